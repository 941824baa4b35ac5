"""In which dtypes and where the shards, unsharded parameters and gradients of a bucket are kept."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["Storage"]


class Storage(NamedTuple):
    """Dtypes and devices of a bucket. Shards keep the parameters' own dtype."""

    param_dtype: torch.dtype  # of unsharded parameters, and of shards as they are sent
    reduce_dtype: torch.dtype  # of unsharded gradients, and of gradients as they are sent
    offload: bool  # shards and their gradients are kept in CPU memory
    pin_memory: bool  # that memory is page-locked
    offload_gradients: bool = False  # sharded gradients are kept in CPU memory, wherever the shards are
    keep_reduced: bool = False  # sharded gradients stay in ``reduce_dtype`` instead of the shards' dtype
