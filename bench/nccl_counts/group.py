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
    """One operation of a communicator."""

    kind: str  # ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE or OTHER
    nbytes: int  # of the side that is not sharded
    asynchronous: bool  # asked for with ``asyncOp``: c10d then puts it on the group's own stream, not on the caller's
    launch: int  # that it is part of; operations of one group call have one
    communicator: int  # the group
    address: int  # of the side that is not sharded


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
        asynchronous = bool(getattr(opts, "asyncOp", False))
        journal.collectives.append(
            Collective(kind, tensor.nbytes, asynchronous, journal.launches, self.number, tensor.data_ptr())
        )

    def _start_coalescing(self, device: torch.device) -> None:
        self.journal.launches += 1
        self._in_group_call = True

    def _end_coalescing(self, device: torch.device) -> Any:
        self._in_group_call = False
        return super()._end_coalescing(device)


def _noted(method: str, kind: str, operand: int) -> Any:
    """A method that notes its operand (of a list: the first), and does what the silent group does."""
    silent = getattr(SilentGroup, method)

    def call(self: CountedGroup, *args: Any, **kwargs: Any) -> Any:
        opts = kwargs.get("opts", args[-1] if args else None)
        tensor = args[operand] if isinstance(args[operand], Tensor) else args[operand][0]
        self._note(kind, tensor, opts)
        return silent(self, *args, **kwargs)

    return call


# Method -> what it is, and which of its arguments is not sharded.
for _method, _kind, _operand in (
    ("all_gather_single", ALL_GATHER, 0),
    ("_allgather_base", ALL_GATHER, 0),
    ("reduce_scatter_single", REDUCE_SCATTER, 1),
    ("_reduce_scatter_base", REDUCE_SCATTER, 1),
    ("allreduce", ALL_REDUCE, 0),
    ("allreduce_coalesced", ALL_REDUCE, 0),
    ("allgather", OTHER, 1),
    ("broadcast", OTHER, 0),
    ("all_to_all_single", OTHER, 0),
    ("alltoall_base", OTHER, 0),
):
    setattr(CountedGroup, _method, _noted(_method, _kind, _operand))


@contextlib.contextmanager
def counted_ranks(ranks: int) -> Iterator[Journal]:
    """Be rank 0 of ``ranks`` as long as the block lasts; the journal of all groups that are made in it."""
    CountedGroup.journal = journal = Journal()
    with silent_ranks(ranks, group_type=CountedGroup):
        yield journal
