"""Transports carry out all-gathers, reduce-scatters and all-reduces of (shard, unsharded) pairs of tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from fullshard.layout import PerParameterLayout, Route
from fullshard.layout.per_parameter import LAYOUTS_KEPT
from fullshard.memory import Work
from fullshard.progress import PROGRESS, LaunchLog

__all__ = [
    "Collective",
    "CommRequest",
    "GradScaling",
    "Kind",
    "Operand",
    "SingleRankTransport",
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


class GradScaling(NamedTuple):
    """Scaling of a sum of gradients: each rank's input is divided by ``before``, the sum by ``after``.

    Attributes:
        before: Divisor of every rank's input; 1.0 leaves the inputs unchanged.
        after: Divisor of the sum; 1.0 leaves the sum unchanged.
        native: Allow the backend to divide (NCCL's AVG and PREMUL_SUM). False: a plain SUM, then a multiplication.
    """

    before: float = 1.0
    after: float = 1.0
    native: bool = True


class Slice(NamedTuple):
    """Elements of a shard that belong to one parameter, or to parameters that are sent as one.

    Attributes:
        offset: First element.
        numel: Number of elements, padding included.
        nbytes: Unsharded size in bytes, in the dtype in which it is sent. Quantization depends on it.
    """

    offset: int
    numel: int
    nbytes: int


@lru_cache(maxsize=LAYOUTS_KEPT)
def slices_of(layout: PerParameterLayout, start: int, itemsize: int) -> tuple[Slice, ...]:
    """Return the slices of a layout's shard buffer for the parameters that are sharded over the ranks.

    Args:
        layout: Layout of the buffer.
        start: First element of the buffer to consider; offsets are counted from here.
        itemsize: Bytes per element in the dtype in which it is sent.

    Returns:
        The slices in the order of their offsets.
    """
    sent = [s for s in layout.slots if s.shard_offset >= start and s.shard_numel and s.route is not Route.REPLICATED]
    return tuple(sorted(Slice(s.shard_offset - start, s.shard_numel, s.parameter.numel * itemsize) for s in sent))


class Operand(NamedTuple):
    """One (shard, unsharded) pair of a collective. Both tensors are flat and contiguous.

    Attributes:
        shard: This rank's part, ``numel`` elements.
        unsharded: ``world_size * numel`` elements, rank r's part at ``r * numel``. In an all-reduce, the same tensor as
            ``shard``.
        slices: Where parameters, or their gradients, are in the shard, in order. Elements outside of all slices
            (padding, presence numbers, data of tensor subclasses) are never quantized.
    """

    shard: torch.Tensor
    unsharded: torch.Tensor
    slices: Sequence[Slice] = ()

    @classmethod
    def of_parameter(cls, shard: torch.Tensor, unsharded: torch.Tensor) -> Operand:
        """Return an operand of which all elements belong to one parameter.

        Args:
            shard: This rank's shard of the parameter.
            unsharded: The unsharded parameter.

        Returns:
            An operand with one slice.
        """
        return cls(shard, unsharded, (Slice(0, shard.numel(), unsharded.nbytes),))


class CommRequest(NamedTuple):
    """Operands that one bucket sends in one launch.

    Attributes:
        unit: Name of the unit; equal on all ranks.
        operands: Operands, equal in number, sizes and dtypes on all ranks.
        scaling: How sums are scaled; ignored by all-gathers.
    """

    unit: str
    operands: Sequence[Operand]
    scaling: GradScaling = GradScaling()


@dataclass(frozen=True)
class Collective:
    """One collective as the transport issued it, for tests, traces and plans.

    Args:
        kind: ``"all_gather"``, ``"reduce_scatter"`` or ``"all_reduce"``.
        unit: Name of the unit that it was issued for.
        dtype: Dtype in which it was sent.
        numel: Number of elements of the unsharded tensor.
        nbytes: Bytes that this rank receives from others: ``(N - 1) / N`` of the unsharded tensor over N ranks, twice
            as many in an all-reduce.
        launch: Number of the launch that it was part of, counted from 0 over all transports of the process.
    """

    kind: Kind
    unit: str
    dtype: torch.dtype
    numel: int
    nbytes: int
    launch: int


def received_bytes(kind: Kind, nbytes: int, world_size: int) -> int:
    """Return the bytes that a rank receives from others in a collective of ``nbytes`` unsharded bytes.

    They are ``nbytes * (N - 1) / N`` over N ranks; in an all-reduce twice as many, rounded down.
    """
    return (2 if kind == "all_reduce" else 1) * nbytes * (world_size - 1) // world_size


@contextlib.contextmanager
def record() -> Iterator[list[Collective]]:
    """Collect every collective that this process issues inside the ``with`` block.

    Yields:
        A list to which collectives are appended as they are issued.

    Example:
        ```python
        import torch
        from torch import nn

        from fullshard import fully_shard
        from fullshard.comm import record

        model = fully_shard(nn.Linear(8, 4))
        with record() as collectives:
            model(torch.randn(2, 8)).sum().backward()
        print([(each.kind, each.numel) for each in collectives])
        ```
    """
    seen: list[Collective] = []
    with PROGRESS.observed(lambda _, collectives: seen.extend(collectives)):
        yield seen


def launch_all(
    requests: Iterable[tuple[Transport, CommRequest]],
    launch: Callable[[Transport, Sequence[CommRequest]], Sequence[Work]],
) -> list[Work]:
    """Call ``launch`` once per transport, with all its requests.

    Args:
        requests: Pairs of a transport and a request for it.
        launch: Function that issues requests of one transport, such as ``Transport.all_gather``.

    Returns:
        The works of all launches.
    """
    groups: dict[int, tuple[Transport, list[CommRequest]]] = {}  # by identity: a user's transport may define __eq__
    for transport, request in requests:
        groups.setdefault(id(transport), (transport, []))[1].append(request)
    return issue_all([partial(launch, transport, grouped) for transport, grouped in groups.values()])


def issue_all(calls: Iterable[Callable[[], Sequence[Work]]]) -> list[Work]:
    """Return the works of all ``calls``. If one raises, wait for what the earlier ones issued first.

    Otherwise they would write to memory that the caller is about to free, and leave messages behind that later receives
    would match.
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
    """Base class of transports, which carry out the collectives of a bucket over one mesh axis.

    One call is one *launch*: the operands of all its requests are issued together, and the transport decides how many
    messages to send. Every rank of the group must make the same calls in the same order.

    A launch returns works that belong to all its requests together: the requests are done when all works have been
    waited for, each once, in the order given. The tensors of the operands must stay alive until then.

    The unsharded tensor of a reduce-scatter may be memory of autograd: it is only read, unless the scaling divides
    before the sum. The tensor of an all-reduce is written to.

    Args:
        group: The ranks.
    """

    # Smallest shard in bytes that is worth an operand of its own, see ``smallest_direct``.
    direct_bytes: int
    # Units that are no larger than this when unsharded are all-gathered in a launch with the next unit.
    tiny_bytes: int = 64 * 1024
    # A user's function reduces: it scales by itself, and is given nothing but gradients.
    hooked: bool = False
    # The backend can average by itself (``ReduceOp.AVG``).
    averages: bool = False
    # An all-gather may be given shards of another dtype than the memory it fills.
    casts: bool = False
    # Its device has kernels that copy all packed parameters at once, see [Note: Packed copies].
    copies_columns: bool = False
    # Padding in a packed message of gradients has to be zero, because it is quantized together with gradients.
    reads_padding: bool = False

    group: dist.ProcessGroup  # a single rank has none
    reduce_group: dist.ProcessGroup  # communicator of reduce_scatter(); ``group`` itself unless they are separate
    rank: int
    world_size: int
    log: LaunchLog | None = None  # of the group; None: no collective is issued

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = self.reduce_group = group
        self.rank, self.world_size = group.rank(), group.size()
        self.log = PROGRESS.log_of(group)

    def all_gather(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        """Start to fill every operand's unsharded tensor with all ranks' shards, of any dtype.

        Args:
            requests: Operands; equal in number, sizes and dtypes on all ranks.

        Returns:
            Works to wait for, each once and in order.
        """
        return self._launch("all_gather", self._all_gather, requests)

    def reduce_scatter(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        """Start a reduce-scatter: ``shard`` gets the scaled sum of this rank's part of the unsharded tensors.

        Args:
            requests: Operands; equal in number, sizes and dtypes on all ranks.

        Returns:
            Works to wait for, each once and in order.
        """
        return self._launch("reduce_scatter", self._reduce_scatter, requests)

    def all_reduce(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        """Start to sum tensors over the ranks in place and to scale the sums. All ranks get the same bits.

        Args:
            requests: Operands with the same flat tensor, of any size, as ``shard`` and ``unsharded``.

        Returns:
            Works to wait for, each once and in order.
        """
        return self._launch("all_reduce", self._all_reduce, requests)

    def smallest_direct(self, kind: Kind, shards: Sequence[int], *, copied: bool) -> int:
        """Return the size of the smallest shard that is worth an operand of its own; smaller ones are sent packed.

        Args:
            kind: Collective.
            shards: Bytes of the shards of a bucket that could be operands of their own; equal on all ranks.
            copied: They are copied in any case, because their dtype is not the one in which they are sent.

        Returns:
            Bytes: ``direct_bytes``, unless the transport chooses by all sizes and the number of ranks.
        """
        return self.direct_bytes

    def allocate(self, kind: Kind, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        """Return flat memory for the unsharded tensor of a packed operand, if the transport provides it.

        Args:
            kind: Collective that the memory is for.
            numel: Number of elements.
            dtype: Dtype of the tensor.
            device: Device of the tensor.

        Returns:
            A flat tensor, or None (all built-in transports) if the caller has to allocate ordinary memory.
        """
        return None

    def release(self, kind: Kind, memory: torch.Tensor) -> None:
        """Release memory that ``allocate`` returned. Called in the same order on all ranks.

        Args:
            kind: Collective that the memory was for.
            memory: Tensor that ``allocate`` returned.
        """

    def separate_reduce_group(self, enable: bool) -> None:
        """Set whether reduce-scatters use a separate communicator, to overlap with all-gathers. Call it on all ranks.

        Off by default. No-op unless the backend runs the collectives of one communicator in order, as NCCL does:
        messages of gloo and other backends are in flight at the same time anyway.

        Args:
            enable: Use a separate communicator.
        """

    def _all_gather(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        raise NotImplementedError

    def _reduce_scatter(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        raise NotImplementedError

    def _all_reduce(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        raise NotImplementedError

    def _launch(
        self, kind: Kind, issue: Callable[[Sequence[CommRequest]], Sequence[Work]], requests: Sequence[CommRequest]
    ) -> Sequence[Work]:
        if self.log is None:
            return issue(requests)
        collectives = self._collectives(kind, requests) if PROGRESS.observers else ()
        PROGRESS.launch(self.log, kind, [request.unit for request in requests], collectives)
        try:
            return issue(requests)
        except BaseException:
            self.log.withdraw()  # other ranks wait for it
            raise

    def _collectives(self, kind: Kind, requests: Sequence[CommRequest]) -> Sequence[Collective]:
        """Return the collectives of the next launch."""
        return [
            Collective(
                kind,
                unit,
                operand.shard.dtype,
                operand.unsharded.numel(),
                received_bytes(kind, operand.unsharded.nbytes, self.world_size),
                PROGRESS.launches,
            )
            for unit, operands, _ in requests
            for operand in operands
        ]


class SingleRankTransport(Transport):
    """Transport of an axis of size 1: no process group, no collectives, and ``fullshard.comm.record`` sees none.

    An all-gather copies the shard into the unsharded memory unless they share memory, and casts it in the same step. A
    reduce-scatter copies in the other direction and scales; an all-reduce scales.
    """

    direct_bytes: int = 0
    tiny_bytes: int = -1  # without messages there are none to share
    casts: bool = True

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 1

    def _all_gather(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        _copy([(operand.unsharded, operand.shard) for request in requests for operand in request.operands])
        return []

    def _reduce_scatter(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        _copy([(operand.shard, operand.unsharded) for request in requests for operand in request.operands])
        return self._all_reduce(requests)

    def _all_reduce(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        for _, operands, scaling in requests:
            factor = scaling.before * scaling.after
            if factor != 1 and operands:
                torch._foreach_mul_([operand.shard for operand in operands], 1 / factor)
        return []


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy into the first tensor of each pair what is in the second, unless they share their memory."""
    for target, source in pairs:  # of any dtype, which torch's functions of lists are not
        if target is not source and (not source.data_ptr() or target.data_ptr() != source.data_ptr()):
            target.copy_(source)


class WrappingTransport(Transport):
    """A transport that replaces some collectives of another one and passes the others on to it.

    Args:
        base: The group's own transport.
    """

    base: Transport

    def __init__(self, base: Transport) -> None:
        super().__init__(base.group)
        self.base, self.reduce_group, self.tiny_bytes = base, base.reduce_group, base.tiny_bytes
        self.copies_columns = base.copies_columns

    def separate_reduce_group(self, enable: bool) -> None:
        """Set whether reduce-scatters of the wrapped transport use a separate communicator.

        Args:
            enable: Use a separate communicator.
        """
        self.base.separate_reduce_group(enable)
        self.reduce_group = self.base.reduce_group

    def _all_gather(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        return self.base._all_gather(requests)

    def _reduce_scatter(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        return self.base._reduce_scatter(requests)

    def _all_reduce(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        return self.base._all_reduce(requests)
