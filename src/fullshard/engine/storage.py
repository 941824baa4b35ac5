"""In which dtypes, and where, a bucket keeps what."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["Storage"]


class Storage(NamedTuple):
    """See the module docstring.

    Args:
        full_dtype: Of the full parameters, and of the shards as they travel.
        reduce_dtype: Of full gradients, and of gradients as they travel.
        offload: Shards and their gradients are kept in CPU memory.
        pin_memory: That memory is page-locked.
        offload_gradients: Sharded gradients are kept in CPU memory, wherever the shards are.
        keep_reduced: Sharded gradients stay in ``reduce_dtype`` instead of the shards' dtype.
    """

    full_dtype: torch.dtype
    reduce_dtype: torch.dtype
    offload: bool
    pin_memory: bool
    offload_gradients: bool = False
    keep_reduced: bool = False
