"""Communication hooks for ``FullyShardedDataParallel.register_comm_hook``, which reduce gradients.

States and plain hooks are PyTorch's own. PyTorch's compression hooks work only on accelerators; those here have the
same names and arguments and also work on CPUs.
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
    """Average gradients in float16, whatever their dtype.

    Args:
        state: State with the process group. Its ``parameter_type`` is not used: results have the dtype of their tensor.
        grad: This rank's flat gradients, of any floating-point dtype. Without ``output`` they are overwritten by the
            result.
        output: Receives this rank's shard of the average: ``grad.numel() / world_size`` elements.

    Example:
        ```python
        import torch.distributed as dist
        from torch import nn

        from fullshard import FullyShardedDataParallel
        from fullshard.comm_hooks import LowPrecisionState, fp16_compress_hook

        model = FullyShardedDataParallel(nn.Linear(8, 4))
        model.register_comm_hook(LowPrecisionState(dist.group.WORLD), fp16_compress_hook)
        ```
    """
    _average_in(torch.float16, state, grad, output)


def bf16_compress_hook(state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """Average gradients in bfloat16, whatever their dtype.

    Args:
        state: State with the process group. Its ``parameter_type`` is not used: results have the dtype of their tensor.
        grad: This rank's flat gradients, of any floating-point dtype. Without ``output`` they are overwritten by the
            result.
        output: Receives this rank's shard of the average: ``grad.numel() / world_size`` elements.
    """
    _average_in(torch.bfloat16, state, grad, output)


def _average_in(dtype: torch.dtype, state: DefaultState, grad: torch.Tensor, output: torch.Tensor | None) -> None:
    sent = grad.to(dtype)
    if output is None:
        allreduce_hook(state, sent)
        result, target = sent, grad
    else:
        result, target = output.to(dtype), output
        reduce_scatter_hook(state, sent, result)
    if result is not target:  # else the dtypes are equal, and the result is in place
        target.copy_(result)
