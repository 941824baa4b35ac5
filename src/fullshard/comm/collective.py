"""Transports for backends with efficient collectives: NCCL, c10d's fake group, and any other registered backend.

Also for process groups without a backend of c10d, such as those written in Python.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    ReduceOp,
    ReduceScatterOptions,
    _make_nccl_premul_sum,
)

from fullshard.comm.base import CommRequest, GradScaling, Operand, Transport, issue_all
from fullshard.memory import Work

__all__ = [
    "CollectiveTransport",
    "NcclTransport",
    "PythonGroupTransport",
    "Reduction",
    "Scaled",
    "all_gather_base",
    "all_gather_flat",
    "nccl_reduction",
    "reduce_scatter_base",
]

# Dtypes that every backend can all-gather. NCCL knows neither int16 nor uint16, some versions no float8.
_GATHERED_DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.uint8})

# Renamed between torch 2.11 and 2.13; the old names warn in the new ones.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@functools.cache
def _all_gather_options(async_op: bool) -> AllgatherOptions:
    options = AllgatherOptions()
    options.asyncOp = async_op
    return options


# The groups' own methods: they are the same in all versions of torch, and cost half the host time of the functions of
# torch.distributed.
def all_gather_base(
    group: dist.ProcessGroup, unsharded: torch.Tensor, shard: torch.Tensor, *, async_op: bool = True
) -> dist.Work:
    """Start an all-gather of ``shard`` into ``unsharded``, both flat, on a group with a backend of c10d's."""
    return group._allgather_base(unsharded, shard, _all_gather_options(async_op))


def reduce_scatter_base(
    group: dist.ProcessGroup,
    shard: torch.Tensor,
    unsharded: torch.Tensor,
    op: ReduceOp | ReduceOp.RedOpType,
    *,
    async_op: bool = True,
) -> dist.Work:
    """Start a reduce-scatter of ``unsharded`` into ``shard``, both flat, on a group with a backend of c10d's."""
    options = ReduceScatterOptions()
    options.reduceOp, options.asyncOp = op if isinstance(op, ReduceOp) else ReduceOp(op), async_op
    return group._reduce_scatter_base(shard, unsharded, options)


def all_gather_flat(group: dist.ProcessGroup, unsharded: torch.Tensor, shard: torch.Tensor) -> Work:
    """Start an all-gather on any process group.

    Args:
        group: The ranks.
        unsharded: Is filled: ``world_size * numel`` elements, flat.
        shard: This rank's, ``numel`` elements of the same dtype, flat.
    """
    work: Work = _all_gather(unsharded, shard, group=group, async_op=True)
    return work


class Reduction(NamedTuple):
    """How a ``GradScaling`` is carried out.

    Args:
        op: The operation of the backend.
        before: Factor that every rank's input is multiplied by ahead of it; 1.0 for none.
        after: Factor that the result is multiplied by; 1.0 for none.
    """

    op: ReduceOp
    before: float
    after: float


class Scaled:
    """Multiplies results once the work that brings them is done.

    Args:
        work: The reduction in flight.
        results: Pairs of a tensor and its factor.
    """

    __slots__ = ("_results", "_work")

    def __init__(self, work: Work, results: Iterable[tuple[torch.Tensor, float]]) -> None:
        self._work, self._results = work, list(results)

    def wait(self) -> None:
        """Wait, then multiply (on accelerators: enqueue that on the current stream)."""
        self._work.wait()
        for tensor, factor in self._results:
            tensor.mul_(factor)


def _real(flat: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs: sums are the same, and NCCL knows no others."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


class CollectiveTransport(Transport):
    """One collective per operand, all in flight together. Sums are scaled by multiplications before and after.

    Args:
        group: The ranks.
    """

    direct_bytes: int = 64 * 1024

    def _all_gather(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        operands = [operand for request in requests for operand in request.operands if operand.unsharded.numel()]
        return self._together(self.group, operands, self._issue_gather)

    def _issue_gather(self, operand: Operand) -> Work:
        shard, unsharded = operand.shard, operand.unsharded
        if shard.dtype not in _GATHERED_DTYPES:
            shard, unsharded = shard.view(torch.uint8), unsharded.view(torch.uint8)
        return all_gather_base(self.group, unsharded, shard)

    def _reduce_scatter(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        return self._summed(self.reduce_group, requests, self._issue_reduce_scatter)

    def _issue_reduce_scatter(self, operand: Operand, op: ReduceOp) -> Work:
        return reduce_scatter_base(self.reduce_group, _real(operand.shard), _real(operand.unsharded), op)

    def _all_reduce(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        return self._summed(self.group, requests, self._issue_all_reduce)

    def _issue_all_reduce(self, operand: Operand, op: ReduceOp) -> Work:
        options = AllreduceOptions()
        options.reduceOp, options.asyncOp = op, True
        return self.group.allreduce([_real(operand.unsharded)], options)

    def _summed(
        self, group: dist.ProcessGroup, requests: Sequence[CommRequest], issue: Callable[[Operand, ReduceOp], Work]
    ) -> Sequence[Work]:
        reductions = [
            (operand, self._reduction(operand.shard.dtype, request.scaling))
            for request in requests
            for operand in request.operands
            if operand.unsharded.numel()
        ]
        # Ahead of the launch: nothing but collectives may come inside a group call.
        for operand, reduction in reductions:
            if reduction.before != 1:
                operand.unsharded.mul_(reduction.before)
        ops = iter([reduction.op for _, reduction in reductions])
        works = self._together(group, [operand for operand, _ in reductions], lambda operand: issue(operand, next(ops)))
        scaled = [(operand.shard, reduction.after) for operand, reduction in reductions if reduction.after != 1]
        if not scaled:
            return works
        if len(works) == 1:
            return [Scaled(works[0], scaled)]
        return [
            work if reduction.after == 1 else Scaled(work, [(operand.shard, reduction.after)])
            for work, (operand, reduction) in zip(works, reductions, strict=True)
        ]

    def _reduction(self, dtype: torch.dtype, scaling: GradScaling) -> Reduction:
        """How to carry out ``scaling`` for sums of ``dtype``."""
        return _plain_sum(scaling)

    def _together(
        self, group: dist.ProcessGroup, operands: Sequence[Operand], issue: Callable[[Operand], Work]
    ) -> Sequence[Work]:
        """Call ``issue``, which issues a collective on ``group``, for every operand: one work each, or one for all."""
        return issue_all(partial(_issue_one, issue, operand) for operand in operands)


def _issue_one(issue: Callable[[Operand], Work], operand: Operand) -> list[Work]:
    return [issue(operand)]


class PythonGroupTransport(CollectiveTransport):
    """Transport of a process group without a c10d backend, through the functions of ``torch.distributed``.

    Args:
        group: The ranks.
    """

    def _issue_gather(self, operand: Operand) -> Work:
        return all_gather_flat(self.group, operand.unsharded.view(torch.uint8), operand.shard.view(torch.uint8))

    def _issue_reduce_scatter(self, operand: Operand, op: ReduceOp) -> Work:
        work: Work = _reduce_scatter(operand.shard, operand.unsharded, op, self.reduce_group, async_op=True)
        return work


class NcclTransport(CollectiveTransport):
    """Transport of NVIDIA and AMD GPUs: one NCCL group call, which is one kernel, for all operands of a launch.

    NCCL scales gradients itself where it can, with AVG or PREMUL_SUM.

    Args:
        group: The ranks, with the communicator of all-gathers and all-reduces.
        reduce_group: The same ranks with a communicator for reduce-scatters. None: they share the communicator of
            ``group``.
    """

    # From about 1 MB per rank NCCL reaches its bandwidth inside a group call; smaller shards are cheaper to
    # pack than to launch. Not measured on our own hardware yet (docs/performance/benchmarks.md says so).
    direct_bytes: int = 1024 * 1024
    tiny_bytes: int = 1024 * 1024
    averages: bool = True

    _own_reduce_group: dist.ProcessGroup | None

    def __init__(self, group: dist.ProcessGroup, reduce_group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group)
        self._own_reduce_group = reduce_group
        self.separate_reduce_group(True)

    def separate_reduce_group(self, enable: bool) -> None:
        """Switch reduce-scatters between their separate communicator (the default) and that of all-gathers.

        Args:
            enable: Use the separate communicator.
        """
        self.reduce_group = self._own_reduce_group if enable and self._own_reduce_group is not None else self.group

    def _reduction(self, dtype: torch.dtype, scaling: GradScaling) -> Reduction:
        return nccl_reduction(dtype, scaling, self.world_size)

    def _together(
        self, group: dist.ProcessGroup, operands: Sequence[Operand], issue: Callable[[Operand], Work]
    ) -> Sequence[Work]:
        if len(operands) < 2:
            return super()._together(group, operands, issue)
        device = operands[0].shard.device
        group._start_coalescing(device)
        try:
            for operand in operands:
                issue(operand)
        except BaseException:
            with contextlib.suppress(RuntimeError):
                work = group._end_coalescing(device)
                if work is not None:  # what was begun uses memory that the caller is about to free
                    work.wait()
            raise
        return [group._end_coalescing(device)]


_PREMULTIPLIED = frozenset({torch.float32, torch.bfloat16})


def nccl_reduction(dtype: torch.dtype, scaling: GradScaling, world_size: int) -> Reduction:
    """How NCCL carries out ``scaling`` over ``world_size`` ranks: AVG or PREMUL_SUM where allowed, else SUM.

    A premultiplied sum is left to fp32 and bf16, whose range leaves it room; inputs that are divided beforehand
    (fp16) are multiplied explicitly on both sides.
    """
    if scaling.after == 1 or scaling.before != 1 or not scaling.native:
        return _plain_sum(scaling)
    if scaling.after == world_size:
        return Reduction(ReduceOp(ReduceOp.AVG), 1.0, 1.0)
    if dtype in _PREMULTIPLIED:
        return Reduction(_make_nccl_premul_sum(1 / scaling.after), 1.0, 1.0)
    return _plain_sum(scaling)


def _plain_sum(scaling: GradScaling) -> Reduction:
    return Reduction(ReduceOp(ReduceOp.SUM), 1 / scaling.before, 1 / scaling.after)
