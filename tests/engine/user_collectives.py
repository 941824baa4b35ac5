"""Collectives that a user might bring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class Gather:
    """An all-gather that inherits from nothing; counts its calls. ``done``: returns None instead of a work."""

    def __init__(self, done: bool = False) -> None:
        self.done = done
        self.allocated: list[tuple[int, torch.dtype]] = []
        self.called: list[tuple[int, torch.dtype, bool]] = []
        self.groups: set[tuple[int, ...]] = set()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.allocated.append((size[0], dtype))
        return torch.empty(tuple(size), dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        self.called.append((output_tensor.numel(), output_tensor.dtype, async_op))
        self.groups.add(tuple(dist.get_process_group_ranks(group)))
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op=not self.done)


class Scatter(Gather):
    """A reduce-scatter of the same kind."""

    def __call__(  # type: ignore[override]
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        # NCCL is asked for means where that is all of the division.
        assert op == dist.ReduceOp.SUM or (op == dist.ReduceOp.AVG and input_tensor.device.type != "cpu")
        self.called.append((input_tensor.numel(), input_tensor.dtype, async_op))
        self.groups.add(tuple(dist.get_process_group_ranks(group)))
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op=not self.done)
