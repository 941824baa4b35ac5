"""In which dtypes and where the shards, unsharded parameters and gradients of a bucket are kept."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["Storage"]


class Storage(NamedTuple):
    """Dtypes and devices of a bucket. Shards keep the parameters' own dtype.

    Args:
        param_dtype: Of unsharded parameters, and of shards as they are sent.
        reduce_dtype: Of unsharded gradients, and of gradients as they are sent.
        offload: Shards and their gradients are kept in CPU memory.
        pin_memory: That memory is page-locked.
        offload_gradients: Sharded gradients are kept in CPU memory, wherever the shards are.
        keep_reduced: Sharded gradients stay in ``reduce_dtype`` instead of the shards' dtype.
    """

    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    offload: bool
    pin_memory: bool
    offload_gradients: bool = False
    keep_reduced: bool = False
