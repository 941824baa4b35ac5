"""What the engine asks of a back end: gather pieces into regions, reduce regions into pieces, sum regions."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from fullshard.memory import Work

__all__ = ["Collective", "Division", "Kind", "Move", "Parcel", "Transport", "issue_all", "launch_all", "record"]

Kind = Literal["gather", "reduce", "all_reduce"]


@dataclass(frozen=True)
class Division:
    """How a sum over ranks is scaled: inputs are divided by ``before``, the sum by ``after``.

    Args:
        before: Divisor of every rank's input; 1.0 leaves the inputs untouched.
        after: Divisor of the sum; 1.0 leaves the sum untouched.
        native: Whether the back end may divide by itself (NCCL's AVG and PREMUL_SUM). If not: a plain sum,
            then a multiplication.
    """

    before: float = 1.0
    after: float = 1.0
    native: bool = True


@dataclass(frozen=True)
class Move:
    """One piece <-> region pair. All tensors are flat and contiguous.

    Args:
        piece: This rank's part, ``numel`` elements.
        region: ``world_size * numel`` elements, rank r's part at ``r * numel``. In an all-reduce: the piece itself.
    """

    piece: torch.Tensor
    region: torch.Tensor


class Parcel(NamedTuple):
    """What one bucket sends in one launch.

    Args:
        unit: Name of the unit; equal on all ranks.
        moves: Equal in number, sizes and dtypes on all ranks.
        division: How sums are scaled; a gather ignores it.
    """

    unit: str
    moves: Sequence[Move]
    division: Division = Division()


@dataclass(frozen=True)
class Collective:
    """One collective as the transport issued it, for tests, traces and plans.

    Args:
        kind: What was done.
        unit: Name of the unit it was done for.
        dtype: Element type on the wire.
        numel: Elements of the region (all ranks' parts).
        nbytes: Bytes that this rank receives from others, with N ranks and a region of B bytes: ``B * (N - 1) / N``;
            in an all-reduce twice that, rounded down.
        launch: Number of the launch it was part of: launches of all transports of the process, counted from 0.
    """

    kind: Kind
    unit: str
    dtype: torch.dtype
    numel: int
    nbytes: int
    launch: int


_observers: list[Callable[[Collective], None]] = []
_launches = itertools.count()


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


def launch_all(
    sent: Iterable[tuple[Transport | None, Parcel]], launch: Callable[[Transport, Sequence[Parcel]], Sequence[Work]]
) -> list[Work]:
    """One ``launch`` (such as ``Transport.gather``) per transport for all its parcels; None: nothing travels."""
    groups: dict[int, tuple[Transport, list[Parcel]]] = {}
    for transport, parcel in sent:
        if transport is not None:
            groups.setdefault(id(transport), (transport, []))[1].append(parcel)
    return issue_all(partial(launch, transport, parcels) for transport, parcels in groups.values())


def issue_all(calls: Iterable[Callable[[], Sequence[Work]]]) -> list[Work]:
    """The works of all ``calls``. If one raises, what the ones before it issued lands first.

    It writes to memory that the caller is about to free, and messages left behind would be taken for others.
    """
    works: list[Work] = []
    try:
        for call in calls:
            works += call()
    except BaseException:
        for work in works:
            with contextlib.suppress(RuntimeError):
                work.wait()
        raise
    return works


class Transport:
    """Base of all transports.

    One call is one *launch*: the moves of all its parcels are issued together, and how many messages they become is
    the transport's business. Every rank of the group has to make the same calls in the same order.

    A launch returns works, which belong to all its parcels together: none of the parcels is done before all works
    were waited for, each once, in the order given. Regions and pieces must stay alive until then.

    The region of a reduction may be memory of autograd's: it is only read, unless the division has a factor to divide
    by before the sum. That of an all-reduce is written to.
    """

    # Smallest piece in bytes that is worth a move of its own; smaller ones should share a packed one.
    direct_bytes: int
    # Units that are no larger than this when gathered travel with a neighbour.
    tiny_bytes: int = 64 * 1024
    # Whether an all-reduce sends all its messages when it is launched, and none when it is waited for.
    sums_at_once: bool = True
    # Whether a user's function reduces: it divides by itself, and is given nothing but gradients.
    hooked: bool = False

    group: dist.ProcessGroup
    reduce_group: dist.ProcessGroup  # communicator of reduce(); ``group`` itself unless they are separate
    rank: int
    world_size: int

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = self.reduce_group = group
        self.rank, self.world_size = group.rank(), group.size()

    def gather(self, parcels: Sequence[Parcel]) -> Sequence[Work]:
        """Start filling every move's region with all ranks' pieces. Any dtype."""
        self._notify("gather", parcels)
        return self._gather(parcels)

    def reduce(self, parcels: Sequence[Parcel]) -> Sequence[Work]:
        """Start a reduce-scatter: each rank gets the sum of its part of the regions in ``piece``, divided."""
        self._notify("reduce", parcels)
        return self._reduce(parcels)

    def all_reduce(self, parcels: Sequence[Parcel]) -> Sequence[Work]:
        """Start summing regions over the ranks in place, and dividing.

        Every move has the same flat tensor as piece and as region, of any size. All ranks get the same bits.
        """
        self._notify("all_reduce", parcels)
        return self._all_reduce(parcels)

    def allocate(
        self, kind: Literal["gather", "reduce"], numel: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor | None:
        """Memory for the region of a packed move, flat, where the transport brings its own.

        None, as on every built-in back end: the caller uses memory of its own.
        """
        return None

    def release(self, kind: Literal["gather", "reduce"], memory: torch.Tensor) -> None:
        """The message in memory that :meth:`allocate` gave is over. Called in the same order on all ranks."""

    def separate_reduce_group(self, enable: bool) -> None:
        """Whether reductions use a communicator of their own, so that they overlap with gathers. Call on all ranks.

        A no-op unless the back end keeps the collectives of one communicator in order, as NCCL does. Gloo's messages,
        and those of other back ends, are in flight side by side anyway.
        """

    def _gather(self, parcels: Sequence[Parcel]) -> Sequence[Work]:
        raise NotImplementedError

    def _reduce(self, parcels: Sequence[Parcel]) -> Sequence[Work]:
        raise NotImplementedError

    def _all_reduce(self, parcels: Sequence[Parcel]) -> Sequence[Work]:
        raise NotImplementedError

    def _notify(self, kind: Kind, parcels: Sequence[Parcel]) -> None:
        launch = next(_launches)
        if not _observers:
            return
        for unit, moves, _ in parcels:
            for move in moves:
                received = move.region.nbytes * (self.world_size - 1) // self.world_size
                if kind == "all_reduce":
                    received = 2 * move.region.nbytes * (self.world_size - 1) // self.world_size
                for observer in _observers:
                    observer(Collective(kind, unit, move.piece.dtype, move.region.numel(), received, launch))
