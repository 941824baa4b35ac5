"""Transports carry out all-gathers, reduce-scatters and all-reduces of (shard, unsharded) pairs of tensors."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from fullshard.layout import PerParameterLayout, Route
from fullshard.memory import Work

__all__ = [
    "Collective",
    "CommRequest",
    "GradScaling",
    "Kind",
    "Operand",
    "Slice",
    "Transport",
    "WrappingTransport",
    "issue_all",
    "launch_all",
    "received_bytes",
    "record",
    "slices_of",
]

Kind = Literal["all_gather", "reduce_scatter", "all_reduce"]


@dataclass(frozen=True)
class GradScaling:
    """How a sum of gradients is scaled: each rank's input is divided by ``before``, the sum by ``after``.

    Args:
        before: Divisor of every rank's input; 1.0 leaves the inputs untouched.
        after: Divisor of the sum; 1.0 leaves the sum untouched.
        native: The back end may divide by itself (NCCL's AVG and PREMUL_SUM). If not: a plain sum, then a
            multiplication.
    """

    before: float = 1.0
    after: float = 1.0
    native: bool = True


class Slice(NamedTuple):
    """The elements of a shard that belong to one parameter, or to parameters that are sent as one.

    Args:
        offset: First element.
        numel: Number of elements, padding included.
        nbytes: Size of all of it, unsharded, in the dtype in which it is sent. Quantization depends on it.
    """

    offset: int
    numel: int
    nbytes: int


def slices_of(layout: PerParameterLayout, start: int, itemsize: int) -> tuple[Slice, ...]:
    """The slices of a layout's shard buffer from element ``start`` on: parameters that are cut over the ranks.

    Args:
        layout: Of the buffer.
        start: Offsets are counted from here; what lies before is left out.
        itemsize: Bytes per element in the dtype in which it is sent.
    """
    sent = [s for s in layout.slots if s.shard_offset >= start and s.shard_numel and s.route is not Route.REPLICATED]
    return tuple(sorted(Slice(s.shard_offset - start, s.shard_numel, s.parameter.numel * itemsize) for s in sent))


@dataclass(frozen=True)
class Operand:
    """One (shard, unsharded) pair of a collective. Both tensors are flat and contiguous.

    Args:
        shard: This rank's part, ``numel`` elements.
        unsharded: ``world_size * numel`` elements, rank r's part at ``r * numel``. In an all-reduce: the shard itself.
        slices: Where parameters, or their gradients, lie in the shard, in order. What is in no slice (padding between
            them, presence numbers, data of tensor subclasses) is never quantized.
    """

    shard: torch.Tensor
    unsharded: torch.Tensor
    slices: Sequence[Slice] = ()

    @classmethod
    def of_parameter(cls, shard: torch.Tensor, unsharded: torch.Tensor) -> Operand:
        """A pair of which all elements belong to one parameter, of the size of ``unsharded``."""
        return cls(shard, unsharded, (Slice(0, shard.numel(), unsharded.nbytes),))


class CommRequest(NamedTuple):
    """The operands that one bucket sends in one launch.

    Args:
        unit: Name of the unit; equal on all ranks.
        operands: Equal in number, sizes and dtypes on all ranks.
        scaling: How sums are scaled; an all-gather ignores it.
    """

    unit: str
    operands: Sequence[Operand]
    scaling: GradScaling = GradScaling()


@dataclass(frozen=True)
class Collective:
    """One collective as the transport issued it, for tests, traces and plans.

    Args:
        kind: Which collective.
        unit: Name of the unit it was issued for.
        dtype: Element type in which it was sent.
        numel: Elements of the unsharded tensor (all ranks' shards).
        nbytes: Bytes that this rank receives from others, see :func:`received_bytes`.
        launch: Number of the launch it was part of: launches of all transports of the process, counted from 0.
    """

    kind: Kind
    unit: str
    dtype: torch.dtype
    numel: int
    nbytes: int
    launch: int


def received_bytes(kind: Kind, nbytes: int, world_size: int) -> int:
    """Bytes that a rank receives from others, of ``nbytes`` unsharded ones: ``nbytes * (N - 1) / N`` over N ranks.

    In an all-reduce twice as many, rounded down.
    """
    return (2 if kind == "all_reduce" else 1) * nbytes * (world_size - 1) // world_size


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
    requests: Iterable[tuple[Transport, CommRequest]],
    launch: Callable[[Transport, Sequence[CommRequest]], Sequence[Work]],
) -> list[Work]:
    """One ``launch`` (such as ``Transport.all_gather``) per transport with all its requests."""
    groups: dict[int, tuple[Transport, list[CommRequest]]] = {}
    for transport, request in requests:
        groups.setdefault(id(transport), (transport, []))[1].append(request)
    return issue_all(partial(launch, transport, grouped) for transport, grouped in groups.values())


def issue_all(calls: Iterable[Callable[[], Sequence[Work]]]) -> list[Work]:
    """The works of all ``calls``. If one raises, what the ones before it issued is waited for first.

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
    """Base of all transports: how the collectives of a bucket are carried out over one axis of the mesh.

    One call is one *launch*: the operands of all its requests are issued together, and how many messages they become
    is the transport's business. Every rank of the group has to make the same calls in the same order.

    A launch returns works, which belong to all its requests together: none of the requests is done before all works
    were waited for, each once, in the order given. The tensors of the operands must stay alive until then.

    The unsharded tensor of a reduce-scatter may be memory of autograd's: it is only read, unless the scaling has a
    factor to divide by before the sum. That of an all-reduce is written to.
    """

    # Smallest shard in bytes that is worth an operand of its own; smaller ones should share a packed one.
    direct_bytes: int
    # Units that are no larger than this when unsharded share a launch with the next unit.
    tiny_bytes: int = 64 * 1024
    # An all-reduce sends all its messages when it is launched, and none when it is waited for.
    sums_at_once: bool = True
    # A user's function reduces: it scales by itself, and is given nothing but gradients.
    hooked: bool = False
    # The back end can average by itself (``ReduceOp.AVG``).
    averages: bool = False
    # An all-gather may be given shards of another dtype than the memory it fills.
    casts: bool = False
    # Padding in a packed message of gradients has to be zero, because it is quantized together with gradients.
    reads_padding: bool = False

    group: dist.ProcessGroup  # a single rank has none
    reduce_group: dist.ProcessGroup  # communicator of reduce_scatter(); ``group`` itself unless they are separate
    rank: int
    world_size: int

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = self.reduce_group = group
        self.rank, self.world_size = group.rank(), group.size()

    def all_gather(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        """Start filling every operand's unsharded tensor with all ranks' shards. Any dtype."""
        self._notify("all_gather", requests)
        return self._all_gather(requests)

    def reduce_scatter(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        """Start a reduce-scatter: ``shard`` gets the scaled sum of this rank's part of the unsharded tensors."""
        self._notify("reduce_scatter", requests)
        return self._reduce_scatter(requests)

    def all_reduce(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        """Start summing tensors over the ranks in place, and scaling the sums.

        Every operand has the same flat tensor as shard and as unsharded, of any size. All ranks get the same bits.
        """
        self._notify("all_reduce", requests)
        return self._all_reduce(requests)

    def allocate(self, kind: Kind, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        """Memory for the unsharded tensor of a packed operand, flat, where the transport brings its own.

        None, as on every built-in back end: the caller uses memory of its own.
        """
        return None

    def release(self, kind: Kind, memory: torch.Tensor) -> None:
        """The message in memory that :meth:`allocate` gave is over. Called in the same order on all ranks."""

    def separate_reduce_group(self, enable: bool) -> None:
        """Give reduce-scatters a communicator of their own, so that they overlap with all-gathers. Call on all ranks.

        A no-op unless the back end keeps the collectives of one communicator in order, as NCCL does. Gloo's messages,
        and those of other back ends, are in flight side by side anyway.
        """

    def _all_gather(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        raise NotImplementedError

    def _reduce_scatter(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        raise NotImplementedError

    def _all_reduce(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        raise NotImplementedError

    def _notify(self, kind: Kind, requests: Sequence[CommRequest]) -> None:
        launch = next(_launches)
        if not _observers:
            return
        for unit, operands, _ in requests:
            for operand in operands:
                received = received_bytes(kind, operand.unsharded.nbytes, self.world_size)
                for observer in _observers:
                    observer(Collective(kind, unit, operand.shard.dtype, operand.unsharded.numel(), received, launch))


class WrappingTransport(Transport):
    """A transport that replaces some collectives of another one, and leaves the others to it.

    Args:
        base: The group's own transport.
    """

    base: Transport

    def __init__(self, base: Transport) -> None:
        super().__init__(base.group)
        self.base, self.reduce_group, self.tiny_bytes = base, base.reduce_group, base.tiny_bytes

    def separate_reduce_group(self, enable: bool) -> None:
        """Give reduce-scatters of the transport underneath a communicator of their own, or take it away."""
        self.base.separate_reduce_group(enable)
        self.reduce_group = self.base.reduce_group

    def _all_gather(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        return self.base._all_gather(requests)

    def _reduce_scatter(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        return self.base._reduce_scatter(requests)

    def _all_reduce(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        return self.base._all_reduce(requests)
