"""Communication hooks for ``FullyShardedDataParallel.register_comm_hook``: how gradients are summed over ranks.

States and plain hooks are PyTorch's own. Its compressing hooks work on accelerators only; those here have the same
names and arguments and work on CPUs, too.
"""

from __future__ import annotations

import torch
from torch.distributed.algorithms._comm_hooks.default_hooks import (
    DefaultState,
    LowPrecisionState,
    allreduce_hook,
    reduce_scatter_hook,
)

__all__ = [
    "DefaultState",
    "LowPrecisionState",
    "allreduce_hook",
    "bf16_compress_hook",
    "fp16_compress_hook",
    "reduce_scatter_hook",
]


def fp16_compress_hook(state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """Average gradients in float16, whatever their own dtype.

    Args:
        state: Says which group. Its ``parameter_type`` is not needed: results keep the dtype of the tensor they are in.
        grad: This rank's gradients, flat, of any floating-point dtype. Without ``output`` it gets the result.
        output: Gets this rank's part of the average: as many elements as ``grad`` over the size of the group.
    """
    _average_in(torch.float16, state, grad, output)


def bf16_compress_hook(state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """Average gradients in bfloat16, whatever their own dtype. Arguments as in :func:`fp16_compress_hook`."""
    _average_in(torch.bfloat16, state, grad, output)


def _average_in(dtype: torch.dtype, state: DefaultState, grad: torch.Tensor, output: torch.Tensor | None) -> None:
    sent = grad.to(dtype)
    if output is None:
        allreduce_hook(state, sent)
        landed, target = sent, grad
    else:
        landed, target = output.to(dtype), output
        reduce_scatter_hook(state, sent, landed)
    if landed is not target:  # else the dtype was the same and it is there already
        target.copy_(landed)
