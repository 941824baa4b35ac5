"""What the engine asks of a back end: gather pieces into regions, reduce regions into pieces."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.distributed as dist

from fullshard.memory import Work

__all__ = ["Collective", "Move", "Transport", "record"]


@dataclass(frozen=True)
class Move:
    """One piece <-> region pair. All tensors are flat and contiguous.

    Args:
        piece: This rank's part, ``numel`` elements.
        region: ``world_size * numel`` elements, rank r's part at ``r * numel``.
    """

    piece: torch.Tensor
    region: torch.Tensor


@dataclass(frozen=True)
class Collective:
    """One collective as the transport issued it, for tests, traces and plans.

    Args:
        kind: What was done.
        unit: Name of the unit it was done for.
        dtype: Element type on the wire.
        numel: Elements of the region (all ranks' parts).
        nbytes: Bytes that this rank receives from others: ``region bytes * (N - 1) / N``.
    """

    kind: Literal["gather", "reduce"]
    unit: str
    dtype: torch.dtype
    numel: int
    nbytes: int


_observers: list[Callable[[Collective], None]] = []


@contextlib.contextmanager
def record() -> Iterator[list[Collective]]:
    """Collect every collective that this process issues inside the ``with`` block.

    >>> with record() as collectives:
    ...     pass  # a training step
    >>> collectives
    []
    """
    seen: list[Collective] = []
    _observers.append(seen.append)
    try:
        yield seen
    finally:
        _observers.remove(seen.append)


class Transport:
    """Base of all transports.

    One *gather* or *reduce* of the engine is one call with all the moves of a bucket; how many messages that
    becomes is the transport's business. Nothing here waits for completion: the returned works do.
    """

    # Smallest piece in bytes that is worth a message of its own; smaller ones share one.
    direct_bytes: ClassVar[int]

    group: dist.ProcessGroup
    rank: int
    world_size: int

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.world_size = group.rank(), group.size()

    def gather(self, moves: Sequence[Move], unit: str) -> Sequence[Work]:
        """Start filling every move's region with all ranks' pieces."""
        if _observers:
            self._notify("gather", moves, unit)
        return self._gather(moves, unit)

    def reduce(self, moves: Sequence[Move], unit: str) -> Sequence[Work]:
        """Start averaging the regions over the ranks, each rank getting its own part in ``piece``.

        The regions may be overwritten. They and the pieces must stay alive until the works are done.
        """
        if _observers:
            self._notify("reduce", moves, unit)
        return self._reduce(moves, unit)

    def _gather(self, moves: Sequence[Move], unit: str) -> Sequence[Work]:
        raise NotImplementedError

    def _reduce(self, moves: Sequence[Move], unit: str) -> Sequence[Work]:
        raise NotImplementedError

    def _notify(self, kind: Literal["gather", "reduce"], moves: Sequence[Move], unit: str) -> None:
        for move in moves:
            received = move.piece.nbytes * (self.world_size - 1)
            for observer in _observers:
                observer(Collective(kind, unit, move.piece.dtype, move.region.numel(), received))
