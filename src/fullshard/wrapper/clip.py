"""``FullyShardedDataParallel.clip_grad_norm_``."""

from __future__ import annotations

import functools
import warnings

import torch
from torch import nn

from fullshard.engine.ownership import nested_units
from fullshard.optim.norms import clip_grad_norm_

__all__ = ["clip_gradients"]


def clip_gradients(module: nn.Module, max_norm: float, norm_type: float) -> torch.Tensor:
    """Clip the gradients of a wrapper's parameters by their total norm, and return the norm."""
    if not norm_type > 0:
        raise ValueError(f"clip_grad_norm_: norm_type: expected a positive number, found {norm_type}")
    parameters = list(module.parameters())
    total = clip_grad_norm_(parameters, max_norm, norm_type).to(nested_units(module)[0].mesh.device)
    dtypes = [parameter.grad.dtype for parameter in parameters if parameter.grad is not None]
    if not dtypes:
        warnings.warn("clip_grad_norm_: this rank has no gradients", stacklevel=3)
        return total.float()
    return total.to(functools.reduce(torch.promote_types, dtypes))
