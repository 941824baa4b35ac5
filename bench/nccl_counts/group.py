"""A process group of NCCL's kind that notes every call and moves nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from bench.simulators.silent import SilentGroup, silent_ranks

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, OTHER = "all-gather", "reduce-scatter", "all-reduce", "other"


@dataclass(frozen=True)
class Collective:
    """One operation of a communicator.

    Args:
        kind: ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE or OTHER.
        nbytes: Of the side that is not sharded.
        dtype: Of its elements.
        op: Of a reduction, as ``AVG``.
        asynchronous: Asked for with ``asyncOp``: c10d then puts it on the group's own stream, which has the group's
            priority, and not on the caller's.
        launch: The launch that it is part of; operations of one group call have one.
        communicator: The group.
        address: Of the side that is not sharded.
        stream: The caller's current stream; None on a CPU.
    """

    kind: str
    nbytes: int
    dtype: str
    op: str
    asynchronous: bool
    launch: int
    communicator: int
    address: int
    stream: int | None


class Journal:
    """What the groups of this process were asked for, in order."""

    def __init__(self) -> None:
        self.collectives: list[Collective] = []
        self.launches = 0


class CountedGroup(SilentGroup):
    """One rank's view of ranks none of which is there, which keeps a journal. Group calls are those of NCCL."""

    journal: ClassVar[Journal]
    _in_group_call = False

    def _note(self, kind: str, tensor: Tensor, opts: Any) -> None:
        journal = self.journal
        if not self._in_group_call:
            journal.launches += 1
        op = getattr(opts, "reduceOp", "")
        journal.collectives.append(
            Collective(
                kind,
                tensor.nbytes,
                str(tensor.dtype).removeprefix("torch."),
                str(getattr(op, "op", op)).rpartition(".")[2],
                bool(getattr(opts, "asyncOp", False)),
                journal.launches,
                self.number,
                tensor.data_ptr(),
                stream_of(tensor.device),
            )
        )

    def _start_coalescing(self, device: torch.device) -> None:
        self.journal.launches += 1
        self._in_group_call = True

    def _end_coalescing(self, device: torch.device) -> Any:
        self._in_group_call = False
        return super()._end_coalescing(device)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Noted."""
        self._note(ALL_GATHER, output, opts)
        return super().all_gather_single(output, input, opts)

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Noted."""
        self._note(REDUCE_SCATTER, input, opts)
        return super().reduce_scatter_single(output, input, opts)

    _reduce_scatter_base = reduce_scatter_single

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Noted."""
        self._note(ALL_REDUCE, tensors[0], opts)
        return super().allreduce(tensors, opts)

    allreduce_coalesced = allreduce

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """Noted."""
        self._note(OTHER, inputs[0], opts)
        return super().allgather(outputs, inputs, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Noted."""
        self._note(OTHER, tensors[0], opts)
        return super().broadcast(tensors, opts)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> Any:
        """Noted."""
        self._note(OTHER, output, opts)
        return super().all_to_all_single(output, input, output_sizes, input_sizes, opts)

    alltoall_base = all_to_all_single


def stream_of(device: torch.device) -> int | None:
    """The number of the current stream; None on a CPU."""
    return None if device.type in ("cpu", "meta") else torch.accelerator.current_stream(device).stream_id


@contextlib.contextmanager
def counted_ranks(ranks: int, device: torch.device) -> Iterator[Journal]:
    """Be rank 0 of ``ranks`` as long as the block lasts; the journal of all groups that are made in it."""
    CountedGroup.journal = journal = Journal()
    with silent_ranks(ranks, device, group_type=CountedGroup):
        yield journal
