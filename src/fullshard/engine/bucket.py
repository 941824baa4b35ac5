"""Storage and communication of the parameters of a unit that share a mesh, a device and a dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fullshard.engine.gather import BufferGather, Gather
from fullshard.engine.mesh import ShardMesh
from fullshard.engine.parameter import ShardedParameter, value_of
from fullshard.engine.reducer import GradientReducer, PerParameterReducer
from fullshard.engine.reduction import PendingReduction, ReductionTerms
from fullshard.engine.storage import Storage
from fullshard.errors import FullshardError
from fullshard.layout import PerParameterLayout, Slot
from fullshard.memory import Buffer, Ticket, alias, host_buffer, own_storage

__all__ = ["Bucket", "BufferBucket", "local_rows"]


class Bucket:
    """What all buckets have in common: when they gather, and how they reduce.

    Args:
        parameters: In model order; all of one dtype, on one device and one mesh.
        mesh: The ranks to shard over.
        storage: See there.
    """

    parameters: list[ShardedParameter]
    mesh: ShardMesh
    storage: Storage
    gathered: bool  # whether the full parameters are there, or on their way
    owed: set[int]  # indices of parameters that have gradients from microbatches without sync
    _ticket: Ticket | None  # of the gather in flight
    _in_flight: list[Gather]
    _reducers: dict[tuple[int, ...], GradientReducer]  # by the indices of the trainable parameters

    def __init__(self, parameters: Sequence[ShardedParameter], mesh: ShardMesh, storage: Storage) -> None:
        self.parameters, self.mesh, self.storage = list(parameters), mesh, storage
        self.gathered, self.owed, self._ticket, self._in_flight, self._reducers = False, set(), None, [], {}

    # ---------------------------------------------------------------- what kinds of buckets differ in

    def take_over(self) -> None:
        """Take the values of adopted parameters over and make the parameters ours."""
        raise NotImplementedError

    @property
    def materialized(self) -> bool:
        """False while the parameters are on the meta device."""
        raise NotImplementedError

    @property
    def full_bytes(self) -> int:
        """Bytes that gathered parameters hold at the moment, messages in flight included."""
        raise NotImplementedError

    @property
    def full_size(self) -> int:
        """Bytes of all parameters when gathered."""
        raise NotImplementedError

    def keep_near(self, size: int) -> None:
        """Keep this rank's part of the full parameters over ``size`` neighbouring ranks, to gather from next."""
        raise NotImplementedError

    def drop_near(self) -> None:
        """Forget what :meth:`keep_near` kept."""

    def reroute(self, mesh: ShardMesh) -> None:
        """Communicate through ``mesh``, which has the same ranks, from now on. The full parameters stay the same."""
        raise NotImplementedError

    def copies(self, gradients: bool = False) -> BufferCopies:
        """The full parameters once more, in the shards' own dtype, for who wants to read or edit them.

        Args:
            gradients: Their gradients instead, zeros where there are none.
        """
        raise FullshardError(
            f"{self.parameters[0].describe()} is a tensor subclass that is gathered through hooks of its own; its full "
            "value is what the module computes with: use fullshard.unsharded"
        )

    def restore(self) -> None:
        """Before the parameters are laid out anew, with others: have them hold what every layout can start from.

        A collective, unless the shards are that.
        """

    def parts(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's parts of full ``values``, one per parameter, in the shapes of the shards."""
        raise NotImplementedError

    def _reduced_together(self, trainable: set[int]) -> tuple[int, ...]:
        """Indices of the parameters that a reduction takes if these have gradients."""
        return tuple(sorted(trainable))

    def _reducer(self, parameters: list[ShardedParameter]) -> GradientReducer:
        return PerParameterReducer(parameters, self.mesh, self.storage)

    def _gathers(self, near: bool) -> list[Gather]:
        """What fills the full parameters, which need to exist only once it has arrived."""
        raise NotImplementedError

    def _free(self) -> None:
        """Free the memory of the full parameters."""
        raise NotImplementedError

    # ---------------------------------------------------------------- gather and reshard

    def begin_gather(self, near: bool) -> list[Gather]:
        """What has to be issued to fill the full parameters; nothing if that was done.

        Args:
            near: From the neighbours, if :meth:`keep_near` was called since the last reshard.
        """
        if self.gathered:
            return []
        self.gathered = True
        return self._gathers(near)

    def issued(self, ticket: Ticket, gathers: list[Gather]) -> None:
        """Those gathers are in flight now."""
        self._ticket, self._in_flight = ticket, gathers

    def finish_gather(self) -> None:
        """Make the computation see the full parameters."""
        if self._ticket is not None:
            ticket, self._ticket = self._ticket, None
            ticket.wait()
            self._arrive()

    def _arrive(self) -> None:
        gathers, self._in_flight = self._in_flight, []
        for gather in gathers:
            gather.arrived()

    def reshard(self) -> None:
        """Free the full parameters."""
        if not self.gathered:
            return
        self.finish_gather()
        self.gathered = False
        self._free()

    def forget_gather(self) -> None:
        """Free the full parameters after a failure, when what was in flight may never arrive."""
        try:
            self.finish_gather()
        except RuntimeError:  # the failure that is being recovered from, seen once more
            for gather in self._in_flight:
                gather.abandon()
            self._in_flight = []
        self.gathered = False
        self._free()
        self.drop_near()

    # ---------------------------------------------------------------- reduce

    def begin_reduction(self, terms: ReductionTerms) -> list[PendingReduction]:
        """Take the full gradients of the trainable parameters; what is returned is to be issued."""
        owed = self.owed
        expected = {i for i, p in enumerate(self.parameters) if p.requires_grad or i in owed}
        trainable = self._reduced_together(expected)
        owed.clear()
        pending = []
        if terms.all_reduce:  # what other sets of trainable parameters left unfinished on the replicate axis
            left = [r for key, r in self._reducers.items() if key != trainable and r.owing]
            pending = [PendingReduction(reducer, [None] * len(reducer.parameters), terms) for reducer in left]
        if trainable:
            reducer = self._reducers.get(trainable)
            if reducer is None:
                reducer = self._reducers[trainable] = self._reducer([self.parameters[i] for i in trainable])
            gradients = [p.take_gradient() for p in reducer.parameters]
            pending.append(PendingReduction(reducer, gradients, terms, [i in expected for i in trainable]))
        return pending

    def note_trainable(self) -> None:
        """Have the next reduction include the parameters that are trainable now."""
        self.owed.update(i for i, p in enumerate(self.parameters) if p.requires_grad)

    @property
    def reducers(self) -> list[GradientReducer]:
        """Those in use so far."""
        return list(self._reducers.values())


class BufferCopies(NamedTuple):
    """Full parameters beside those that modules compute with.

    Args:
        gather: Fills them, once issued.
        values: One per parameter of the bucket, in its shape.
        buffer: Their memory. Whoever is done with it frees it.
    """

    gather: Gather
    values: list[torch.Tensor]
    buffer: Buffer


class BufferBucket(Bucket):
    """One shard buffer, one full buffer, and what moves between them.

    On a single rank, if no dtype or device differs, the full parameters lie in the shard buffer itself: nothing is
    copied or freed.

    Args:
        parameters: In model order; all of one dtype and on one device.
        values: Their present values: full tensors, or this rank's rows of them.
        mesh: The ranks to shard over.
        storage: See there.
    """

    layout: PerParameterLayout
    shard_buffer: torch.Tensor  # (layout.shard_numel,), for the life of the bucket
    _full: Buffer | None  # made at the first gather; memory only while gathered
    _home: BufferGather | None  # fills it; None: it is the shard buffer
    _near: BufferGather | None  # fills it from neighbours
    _near_shard: Buffer | None  # what this rank keeps for them
    _ready: bool  # whether the full parameters exist

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        values: Sequence[torch.Tensor],
        mesh: ShardMesh,
        storage: Storage,
    ) -> None:
        super().__init__(parameters, mesh, storage)
        self._full = self._home = self._near = self._near_shard = None
        self._ready = False
        self._place(values)

    def _place(self, values: Sequence[torch.Tensor]) -> None:
        """Lay out a shard buffer and put the parameters on it."""
        mesh, storage = self.mesh, self.storage
        dtype, on_meta = values[0].dtype, values[0].device.type == "meta"
        self.layout = PerParameterLayout.build(
            [p.shape for p in self.parameters],
            world_size=mesh.world_size,
            itemsize=min(dtype.itemsize, storage.full_dtype.itemsize),
            direct_bytes=mesh.transport.direct_bytes if mesh.transport is not None else 0,
        )
        numel = self.layout.shard_numel
        if storage.offload and not on_meta:
            self.shard_buffer = host_buffer(numel, dtype, pin=storage.pin_memory).zero_()
        else:
            self.shard_buffer = torch.zeros(numel, dtype=dtype, device="meta" if on_meta else mesh.device)
        for parameter, slot, value in zip(self.parameters, self.layout.slots, values, strict=True):
            shape, stride = slot.local_shape(mesh.rank), slot.local_stride(mesh.rank)
            local = own_storage(self.shard_buffer.as_strided(shape, stride, slot.shard_offset))
            local.copy_(local_rows(value, slot, mesh.rank))
            parameter.place(local)

    def reroute(self, mesh: ShardMesh) -> None:
        """See :class:`Bucket`. Where full parameters lie does not depend on how they travel; where shards lie does."""
        self.mesh, self._reducers = mesh, {}
        self._place([parameter.local for parameter in self.parameters])
        if self._full is not None:
            self._full.allocate()  # the plan takes tensors on it
            self._home = BufferGather(self.layout, self.shard_buffer, self._full, mesh.transport)
            self._full.free()

    def take_over(self) -> None:
        """See :class:`Bucket`: into the shard buffer."""
        for parameter, slot in zip(self.parameters, self.layout.slots, strict=True):
            value = value_of(parameter.sharded)
            if value is not parameter.local:
                parameter.local.copy_(local_rows(value, slot, self.mesh.rank))
                parameter.place(parameter.local)

    @property
    def materialized(self) -> bool:
        """See :class:`Bucket`."""
        return self.shard_buffer.device.type != "meta"

    @property
    def full_bytes(self) -> int:
        """See :class:`Bucket`."""
        held = 0 if self._full is None else self._full.allocated_bytes
        return held + sum(g.in_flight_bytes for g in (self._home, self._near) if g is not None)

    @property
    def full_size(self) -> int:
        """See :class:`Bucket`."""
        return self.layout.full_numel * self.storage.full_dtype.itemsize

    def copies(self, gradients: bool = False) -> BufferCopies:
        """See :class:`Bucket`."""
        source, rank = self.shard_buffer, self.mesh.rank
        if gradients:
            source = torch.zeros_like(source)
            for parameter, slot in zip(self.parameters, self.layout.slots, strict=True):
                if parameter.sharded.grad is not None:
                    target = source.as_strided(slot.local_shape(rank), slot.local_stride(rank), slot.shard_offset)
                    target.copy_(value_of(parameter.sharded.grad))
        buffer = Buffer(self.layout.full_numel, source.dtype, self.mesh.device)
        placed = zip(self.parameters, self.layout.slots, strict=True)
        values = [buffer.tensor(slot.full_offset, p.shape.shape, p.shape.stride) for p, slot in placed]
        return BufferCopies(BufferGather(self.layout, source, buffer, self.mesh.exact_transport), values, buffer)

    def parts(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See :class:`Bucket`."""
        return [local_rows(v, slot, self.mesh.rank) for v, slot in zip(values, self.layout.slots, strict=True)]

    def _gathers(self, near: bool) -> list[Gather]:
        if not self._ready:
            with torch.inference_mode(False), torch.no_grad():
                self._make_full()
        if near and self._near is not None and self._near_shard is not None and self._near_shard.allocated_bytes:
            return [self._near]
        return [] if self._home is None else [self._home]

    def _make_full(self) -> None:
        """Create the full parameters and what fills them."""
        self._ready = True
        shard, dtype = self.shard_buffer, self.storage.full_dtype
        if self.mesh.transport is None and dtype is shard.dtype and shard.device == self.mesh.device:
            for p, slot in zip(self.parameters, self.layout.slots, strict=True):
                p.set_full(alias(shard, slot.shard_offset, p.shape.shape, p.shape.stride), self.storage.reduce_dtype)
            return
        self._full = Buffer(self.layout.full_numel, dtype, self.mesh.device)
        for p, slot in zip(self.parameters, self.layout.slots, strict=True):
            full = self._full.tensor(slot.full_offset, p.shape.shape, p.shape.stride)
            p.set_full(full, self.storage.reduce_dtype)
        self._home = BufferGather(self.layout, shard, self._full, self.mesh.transport)
        self._full.free()  # its first memory is of the compute stream, whatever a gather allocates on

    def _free(self) -> None:
        if self._full is not None:
            self._full.free()

    def keep_near(self, size: int) -> None:
        """See :class:`Bucket`."""
        if self._full is None or self.mesh.transport is None:
            return
        if self._near is None or self._near.layout.world_size != size:
            self._plan_near(size)
        near, shard, full = self._near, self._near_shard, self._full
        assert near is not None and shard is not None
        shard.allocate()
        rank = self.mesh.neighbours(size).rank
        targets, sources = [], []
        for slot in near.layout.slots:
            own, rows = slot.parameter, slot.local_shape(rank)
            start = slot.local_rows(rank)[0] * (own.stride[own.cut] if rows else 0)
            targets.append(near.source.as_strided(rows, slot.local_stride(rank), slot.shard_offset))
            sources.append(full.tensor(slot.full_offset + start, rows, own.stride))
        torch._foreach_copy_(targets, sources)

    def drop_near(self) -> None:
        """See :class:`Bucket`."""
        if self._near_shard is not None:
            self._near_shard.free()

    def _plan_near(self, size: int) -> None:
        assert self._full is not None
        transport = self.mesh.neighbours(size).transport
        layout = PerParameterLayout.build(
            [p.shape for p in self.parameters],
            world_size=size,
            itemsize=self._full.dtype.itemsize,
            direct_bytes=transport.direct_bytes,
            full_offsets=[slot.full_offset for slot in self.layout.slots],
            full_numel=self.layout.full_numel,
        )
        self._near_shard = Buffer(layout.shard_numel, self._full.dtype, self._full.device)
        source = self._near_shard.tensor(0, (layout.shard_numel,), (1,))
        self._near = BufferGather(layout, source, self._full, transport)
        self._near_shard.free()


def local_rows(value: torch.Tensor, slot: Slot, rank: int) -> torch.Tensor:
    """This rank's rows of ``value``, which may be the full tensor or those rows already."""
    shape = slot.local_shape(rank)
    if tuple(value.shape) == shape:
        return value
    start, stop = slot.local_rows(rank)
    return value.narrow(slot.parameter.cut, start, stop - start)
