"""Transports for backends with efficient collectives: NCCL, c10d's fake group, and any other registered backend.

Also for process groups without a backend of c10d, such as those written in Python.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _make_nccl_premul_sum
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    AllreduceOptions,
    ReduceScatterOptions,
)

from fullshard.comm.base import CommRequest, GradScaling, Kind, Operand, Transport, issue_all
from fullshard.comm.group_costs import smallest_direct
from fullshard.comm.groups import part_of
from fullshard.memory import HostWork, Work

__all__ = [
    "CollectiveTransport",
    "NcclTransport",
    "PythonGroupTransport",
    "Reduction",
    "all_gather_single",
    "nccl_reduction",
    "reduce_scatter_single",
]

# Dtypes that every backend can all-gather. NCCL knows neither int16 nor uint16, some versions no float8.
_GATHERED_DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.uint8})

# Renamed in torch 2.13, which warns at the old names. They run on any process group. For groups with a backend of c10d,
# transports call the groups' own methods: the same in all versions of torch, and half the host time.
all_gather_single: Callable[..., dist.Work | None] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
reduce_scatter_single: Callable[..., dist.Work | None] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


@dataclass(frozen=True, eq=False)  # operations that multiply by different factors compare equal in torch
class Reduction:
    """A reduction of the back end, and the factors around it, that carry out a ``GradScaling``.

    Args:
        op: The operation of the backend.
        before: Factor that every rank's input is multiplied by ahead of it; 1.0 for none.
        after: Factor that the result is multiplied by; 1.0 for none.
    """

    op: ReduceOp
    before: float
    after: float


# Options are made once, because that takes as long as the call.
@lru_cache
def _all_gather_options(asynchronous: bool) -> AllgatherOptions:
    options = AllgatherOptions()
    options.asyncOp = asynchronous
    return options


@lru_cache
def _reduce_scatter_options(reduction: Reduction, asynchronous: bool) -> ReduceScatterOptions:
    options = ReduceScatterOptions()
    options.reduceOp, options.asyncOp = reduction.op, asynchronous
    return options


def _real(flat: torch.Tensor) -> torch.Tensor:
    """Return complex numbers as pairs of real ones: sums are the same, and NCCL supports no complex ones."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


class CollectiveTransport(Transport):
    """One collective per operand, all in flight together. Sums are scaled by multiplications before and after.

    Args:
        group: The ranks.
    """

    direct_bytes: int = 64 * 1024
    # Run collectives on a stream of the backend, which the caller's stream waits for. False: on the caller's stream.
    asynchronous: bool = True

    def _all_gather(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        operands = [operand for request in requests for operand in request.operands if operand.unsharded.numel()]
        return self._together(self.group, operands, self._issue_gather)

    def _issue_gather(self, operand: Operand) -> Work | None:
        shard, unsharded = operand.shard, operand.unsharded
        if shard.dtype not in _GATHERED_DTYPES:
            shard, unsharded = shard.view(torch.uint8), unsharded.view(torch.uint8)
        return self.group._allgather_base(unsharded, shard, _all_gather_options(self.asynchronous))

    def _reduce_scatter(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        return self._summed(self.reduce_group, requests, self._issue_reduce_scatter)

    def _issue_reduce_scatter(self, operand: Operand, reduction: Reduction) -> Work | None:
        options = _reduce_scatter_options(reduction, self.asynchronous)
        return self.reduce_group._reduce_scatter_base(_real(operand.shard), _real(operand.unsharded), options)

    def _all_reduce(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        return self._summed(self.group, requests, self._issue_all_reduce)

    def _issue_all_reduce(self, operand: Operand, reduction: Reduction) -> Work | None:
        options = AllreduceOptions()
        options.reduceOp, options.asyncOp = reduction.op, self.asynchronous
        return self.group.allreduce([_real(operand.unsharded)], options)

    def _summed(
        self,
        group: dist.ProcessGroup,
        requests: Sequence[CommRequest],
        issue: Callable[[Operand, Reduction], Work | None],
    ) -> Sequence[Work]:
        reductions = [
            (operand, self._reduction(operand.shard.dtype, scaling))
            for _, operands, scaling in requests
            for operand in operands
            if operand.unsharded.numel()
        ]
        # Ahead of the launch: nothing but collectives may come inside a group call.
        for operand, reduction in reductions:
            if reduction.before != 1:
                operand.unsharded.mul_(reduction.before)
        waiting = iter(reductions)
        works = self._together(group, [each for each, _ in reductions], lambda each: issue(each, next(waiting)[1]))
        scaled = [(operand.shard, reduction.after) for operand, reduction in reductions if reduction.after != 1]
        if not scaled:
            return works
        finished = HostWork(works, partial(_scale, scaled))
        if works:
            return [finished]
        finished.wait()  # they are on the caller's stream
        return []

    def _reduction(self, dtype: torch.dtype, scaling: GradScaling) -> Reduction:
        """Return how to carry out ``scaling`` for sums of ``dtype``: the same object every time."""
        return _plain_sum(scaling)

    def _together(
        self, group: dist.ProcessGroup, operands: Sequence[Operand], issue: Callable[[Operand], Work | None]
    ) -> Sequence[Work]:
        """Call ``issue``, which issues a collective on ``group``, for every operand.

        Returns:
            One work each, one for all, or none if they run on the current stream.
        """
        return issue_all(partial(_issue_one, issue, operand) for operand in operands)


def _scale(results: Sequence[tuple[torch.Tensor, float]]) -> None:
    for tensor, factor in results:
        tensor.mul_(factor)


def _issue_one(issue: Callable[[Operand], Work | None], operand: Operand) -> list[Work]:
    work = issue(operand)
    return [] if work is None else [work]


class PythonGroupTransport(CollectiveTransport):
    """Transport of a process group without a c10d backend, through the functions of ``torch.distributed``.

    Args:
        group: The ranks.
    """

    def _issue_gather(self, operand: Operand) -> Work | None:
        unsharded, shard = operand.unsharded.view(torch.uint8), operand.shard.view(torch.uint8)
        return all_gather_single(unsharded, shard, group=self.group, async_op=True)

    def _issue_reduce_scatter(self, operand: Operand, reduction: Reduction) -> Work | None:
        return reduce_scatter_single(
            operand.shard, operand.unsharded, reduction.op, group=self.reduce_group, async_op=True
        )


class NcclTransport(CollectiveTransport):
    """Transport of NVIDIA and AMD GPUs: one NCCL group call, which is one kernel, for all operands of a launch.

    Collectives run on the stream that is current: NCCL's own streams have no priority, and each work of theirs costs
    events. NCCL scales gradients itself where it can, with AVG or PREMUL_SUM.

    Args:
        group: The ranks.
    """

    tiny_bytes: int = 1024 * 1024
    averages: bool = True
    copies_columns: bool = True
    asynchronous: bool = False

    def smallest_direct(self, kind: Kind, shards: Sequence[int], *, copied: bool) -> int:
        """Choose by a model of costs, see ``fullshard.comm.group_costs``.

        Args:
            kind: Collective.
            shards: Bytes of the shards that could be operands of their own.
            copied: They are copied in any case, because their dtype is not the one in which they are sent.

        Returns:
            Bytes of the smallest shard to send as an operand of its own.
        """
        return smallest_direct(shards, self.world_size, copied=copied)

    def separate_reduce_group(self, enable: bool) -> None:
        """Set whether reduce-scatters use a separate communicator. By default they share that of all-gathers.

        Args:
            enable: Use a separate communicator, which is made when it is first asked for.

        Raises:
            ValueError: If the group's ranks are not in ascending order: a new group would sort them, and ranks would
                get each other's shards.
        """
        if not enable:
            self.reduce_group = self.group
            return
        ranks = dist.get_process_group_ranks(self.group)
        if ranks != sorted(ranks):
            raise ValueError(
                "a separate communicator for reduce-scatters: expected a process group with ranks in ascending order, "
                f"found {ranks}; make the mesh of ranks in order, or leave the communicator shared"
            )
        self.reduce_group = part_of(self.group, ranks, "reduce_scatter")

    def _reduction(self, dtype: torch.dtype, scaling: GradScaling) -> Reduction:
        return nccl_reduction(dtype, scaling, self.world_size)

    def _together(
        self, group: dist.ProcessGroup, operands: Sequence[Operand], issue: Callable[[Operand], Work | None]
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
        work = group._end_coalescing(device)
        return [] if work is None else [work]


_PREMULTIPLIED = frozenset({torch.float32, torch.bfloat16})


@lru_cache
def nccl_reduction(dtype: torch.dtype, scaling: GradScaling, world_size: int) -> Reduction:
    """Return how NCCL carries out ``scaling`` over ``world_size`` ranks: AVG or PREMUL_SUM where allowed, else SUM.

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


@lru_cache
def _plain_sum(scaling: GradScaling) -> Reduction:
    return Reduction(ReduceOp(ReduceOp.SUM), 1 / scaling.before, 1 / scaling.after)
