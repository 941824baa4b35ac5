"""The base class of buckets: how parameters are unsharded and resharded, and their gradients given to a reduction."""

from __future__ import annotations

import contextlib
import inspect
import zlib
from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from fullshard.comm.base import Transport
from fullshard.comm.mesh import ShardMesh
from fullshard.engine.buckets.all_gather import BucketAllGather, ShardAllGather
from fullshard.engine.buckets.storage import Storage
from fullshard.engine.parameters.flat import FlatParamHandle
from fullshard.engine.parameters.sharded import ShardedParameter, value_of
from fullshard.engine.reduction.grad_reduction import GradReduction, PartialReduceOutput, ReductionTerms
from fullshard.engine.reduction.plan import ReductionPlan
from fullshard.errors import FullshardError
from fullshard.layout import FlatLayout, FlatSlot, PerParameterLayout, Slot
from fullshard.memory import Buffer, PendingWork, alias, host_buffer
from fullshard.progress import PROGRESS, UnitName

__all__ = ["POST_ALL_GATHER", "PRE_ALL_GATHER", "Bucket", "BufferBucket", "UnshardedCopies", "has_all_gather_hooks"]

PRE_ALL_GATHER, POST_ALL_GATHER = "fsdp_pre_all_gather", "fsdp_post_all_gather"
RELEASES_OUTPUTS = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


def has_all_gather_hooks(value: torch.Tensor, fqn: str) -> bool:
    """Return True if ``value``, a parameter or this rank's shard of one, says itself what is all-gathered.

    Raises:
        TypeError: If it has only some of the methods of [Note: Extensions], or the first takes a wrong number of
            arguments.
    """
    pre, post = hasattr(value, PRE_ALL_GATHER), hasattr(value, POST_ALL_GATHER)
    if pre != post:
        found, missing = (PRE_ALL_GATHER, POST_ALL_GATHER) if pre else (POST_ALL_GATHER, PRE_ALL_GATHER)
        raise TypeError(f"{fqn}: {type(value).__name__} defines {found} but not {missing}; define both or neither")
    if not pre and hasattr(value, RELEASES_OUTPUTS):
        raise TypeError(f"{fqn}: {type(value).__name__} defines {RELEASES_OUTPUTS} but not {PRE_ALL_GATHER}")
    if pre and (count := len(inspect.signature(getattr(value, PRE_ALL_GATHER)).parameters)) not in (1, 5):
        raise TypeError(
            f"{fqn}: {type(value).__name__}.{PRE_ALL_GATHER} takes {count} arguments; expected (mesh) or "
            "(mesh, outer_size, outer_stride, module, mp_policy)"
        )
    return pre


class UnshardedCopies(NamedTuple):
    """Unsharded parameters beside those that modules compute with."""

    all_gather: BucketAllGather  # fills them, once issued
    values: list[torch.Tensor]  # one per parameter of the bucket, in its shape
    buffer: Buffer  # their memory; whoever is done with it frees it


class Bucket:
    """Parameters of a unit that share a mesh, a device and a dtype: they are unsharded, and reduced, together.

    Args:
        parameters: In model order; all of one dtype, on one device and one mesh.
        mesh: The ranks to shard over.
        storage: Dtypes and devices of shards, unsharded parameters and gradients.
    """

    has_parts: bool = True  # no tensor subclasses that say themselves what is all-gathered: `local_part` cuts values
    parameters: list[ShardedParameter]
    mesh: ShardMesh
    storage: Storage
    handle: FlatParamHandle | None  # of the flat parameter that users see instead of the original ones
    is_unsharded: bool  # the unsharded parameters are there, or on their way
    partial_reduce_output: PartialReduceOutput  # sharded gradients that wait for their all-reduce
    _has_unreduced_grads: set[int]  # indices of parameters that may have gradients of microbatches without sync
    _pending_work: PendingWork | None  # of the all-gather in flight
    _in_flight: list[BucketAllGather]
    _plans: dict[tuple[int, ...], ReductionPlan]  # by the indices of the trainable parameters
    _name: UnitName | None  # of its unit, as launches have it
    _keeps_storage: bool  # the memory of unsharded parameters stays when they are resharded

    def __init__(self, parameters: Sequence[ShardedParameter], mesh: ShardMesh, storage: Storage) -> None:
        self.parameters, self.mesh, self.storage = list(parameters), mesh, storage
        self.partial_reduce_output, self.handle = PartialReduceOutput(), None
        self.is_unsharded, self._has_unreduced_grads = False, set()
        self._pending_work, self._in_flight, self._plans, self._name = None, [], {}, None
        self._keeps_storage = False

    # ---------------------------------------------------------------- what kinds of buckets differ in

    def write_back(self) -> None:
        """Copy the values of replaced parameters into the shards, and register the shards again."""
        for parameter in self.parameters:
            if not parameter.is_in_place():
                parameter.local.copy_(parameter.local_part(value_of(parameter.sharded)))
                parameter.place(parameter.local)

    @property
    def materialized(self) -> bool:
        """False while a parameter is on the meta device."""
        return all(parameter.local.device.type != "meta" for parameter in self.parameters)

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of all parameters when unsharded; of tensor subclasses, as they would be without."""
        return sum(parameter.shape.numel for parameter in self.parameters) * self.storage.param_dtype.itemsize

    def check_data(self) -> None:
        """Raise FullshardError if ``.data`` of a parameter was assigned to, see [Note: Assigned data]."""
        for parameter in self.parameters:
            parameter.check_data()

    def reshard_to_subgroup(self, size: int) -> None:
        """Keep this rank's shard of the unsharded parameters over ``size`` consecutive ranks, to unshard from next.

        Without effect on a single rank, and for tensor subclasses that say themselves what is all-gathered.
        """

    def free_subgroup_shard(self) -> None:
        """Free the shard that ``reshard_to_subgroup`` kept."""

    def change_transports(self, mesh: ShardMesh) -> None:
        """Communicate through ``mesh``, which has the same ranks, from now on. Unsharded parameters stay the same."""
        raise NotImplementedError

    def copies(self, gradients: bool = False) -> UnshardedCopies:
        """Make copies of the unsharded parameters in the shards' own dtype, to be read or edited.

        Args:
            gradients: Copy the gradients and not the values; zeros where there are none.
        """
        raise NotImplementedError

    def restore(self) -> None:
        """Make the shards independent of the layout of this bucket, so that another bucket can take them.

        A collective, unless the shards are that.
        """

    def needs_rebuild(self) -> bool:
        """Return True if a local tensor has got all-gather hooks since the bucket was made: it needs another bucket."""
        return self.has_parts and any(
            has_all_gather_hooks(parameter.local, parameter.fqn) for parameter in self.parameters
        )

    def _reduced_together(self, trainable: set[int]) -> tuple[int, ...]:
        """Return the indices of the parameters that a reduction takes if those of ``trainable`` have gradients."""
        return tuple(sorted(trainable))

    def _make_plan(self, parameters: list[ShardedParameter]) -> ReductionPlan:
        """Plan the reduction of some parameters of the bucket."""
        raise NotImplementedError

    def _all_gathers(self, from_subgroup: bool) -> list[BucketAllGather]:
        """Return the all-gathers that fill the unsharded parameters, which need to exist only after their arrival."""
        raise NotImplementedError

    def _free(self) -> None:
        """Free the memory of the unsharded parameters."""
        raise NotImplementedError

    def _where(self, index: int) -> str:
        """Describe how a parameter is cut and sent, which has to be equal on all ranks."""
        dim = self.parameters[index].placement.shard_dim
        return "not cut" if dim is None else f"cut along dim {dim}"

    # ---------------------------------------------------------------- unshard and reshard

    def launch_name(self, unit: str, numbers: dict[tuple[str, int], int]) -> UnitName:
        """Return the name of the unit for launches, by which ranks compare how the parameters are cut and sent.

        Args:
            unit: Its name.
            numbers: The unit's, as of ``UnitName``.
        """
        if self._name != unit:
            storage, lines = self.storage, []
            for index, parameter in enumerate(self.parameters):
                name, shape = parameter.fqn.removeprefix(f"{unit}."), parameter.shape
                # Those of dims of size 1 mean nothing, and may differ.
                strides = tuple(
                    s for s, size in zip(shape.stride, shape.shape, strict=True) if shape.numel and size > 1
                )
                lines.append(
                    f"{name} {shape.shape} with strides {strides}, sent in {storage.param_dtype} and reduced in "
                    f"{storage.reduce_dtype}, {self._where(index)}"
                )
            text = "\n".join(lines)
            self._name = UnitName(unit, zlib.crc32(text.encode()), numbers)
            PROGRESS.layouts[self._name.layout] = text
        return self._name

    def described(self, name: UnitName) -> str:
        """Describe cuts, dtypes and flags of the parameters, a line for each; the text has to be equal on all ranks."""
        lines = PROGRESS.layouts[name.layout].split("\n")
        if torch.is_grad_enabled():  # else it does not matter
            lines = [
                f"{'trained' if parameter.requires_grad else 'frozen'} {line}"
                for line, parameter in zip(lines, self.parameters, strict=True)
            ]
        return "\n".join(lines)

    def prepare_unshard(self, from_subgroup: bool) -> list[BucketAllGather]:
        """Return the all-gathers to be issued to fill the unsharded parameters; none if that was done.

        Args:
            from_subgroup: From the subgroup, if ``reshard_to_subgroup`` was called since the last reshard.
        """
        if self.is_unsharded:
            return []
        if (away := self.parameters[0].away) is not None:
            raise FullshardError(
                f"{self.parameters[0].describe()} was moved to {away}, but its unit computes on {self.mesh.device}; "
                f"move the model back before it runs: model.to({str(self.mesh.device)!r})"
            )
        self._in_flight, self.is_unsharded = self._all_gathers(from_subgroup), True
        return self._in_flight

    def issued(self, pending_work: PendingWork) -> None:
        """Remember that the all-gathers were issued, for ``wait_for_unshard``."""
        self._pending_work = pending_work

    def wait_for_unshard(self) -> None:
        """Make the computation see the unsharded parameters."""
        if self._pending_work is not None:
            self._pending_work.wait()  # if it failed, it raises again wherever it is waited for
            while self._in_flight:  # those that have arrived do so once, also if memory for another runs out
                self._in_flight[0].arrived()
                del self._in_flight[0]
            self._pending_work = None

    def reshard(self) -> None:
        """Free the unsharded parameters."""
        if not self.is_unsharded:
            return
        self.wait_for_unshard()
        self.is_unsharded = False
        self.keep_storage(self._keeps_storage)

    def keep_storage(self, keep: bool) -> None:
        """Set whether the memory of unsharded parameters stays when they are resharded; what is left is freed."""
        self._keeps_storage = keep
        if not keep and not self.is_unsharded:
            self._free()

    def abandon_unshard(self) -> None:
        """Free the unsharded parameters after a failure, when what was in flight may never arrive."""
        if self._pending_work is not None:
            with contextlib.suppress(Exception):  # the failure that is being recovered from, seen once more
                self._pending_work.wait()
        for all_gather in self._in_flight:  # also those that were not issued
            all_gather.abandon()
        self._pending_work, self._in_flight, self.is_unsharded = None, [], False
        self.keep_storage(self._keeps_storage)
        self.free_subgroup_shard()

    # ---------------------------------------------------------------- reduce

    def begin_reduction(self, terms: ReductionTerms) -> list[GradReduction]:
        """Take the unsharded gradients of the trainable parameters, and return the reductions to be issued."""
        expected = {i for i, p in enumerate(self.parameters) if p.is_trained}
        if self._has_unreduced_grads:
            expected |= self._has_unreduced_grads
            self._has_unreduced_grads.clear()
        trainable = self._reduced_together(expected)
        pending = []
        if terms.all_reduce and self.partial_reduce_output.needs_all_reduce:
            for key, other in self._plans.items():  # what reductions of other sets of trainable parameters have left
                if key != trainable and self.partial_reduce_output.needed_by(other):
                    flags = [True] * len(key)
                    pending.append(GradReduction(other, [None] * len(key), terms, self.partial_reduce_output, flags))
        if trainable:
            plan = self._plan_of(trainable)
            gradients = [parameter.take_gradient() for parameter in plan.parameters]
            flags = [i in expected for i in trainable]
            pending.append(GradReduction(plan, gradients, terms, self.partial_reduce_output, flags))
        return pending

    def _plan_of(self, trainable: tuple[int, ...]) -> ReductionPlan:
        plan = self._plans.get(trainable)
        if plan is None:
            plan = self._plans[trainable] = self._make_plan([self.parameters[i] for i in trainable])
        return plan

    def note_trainable(self) -> None:
        """Have the next reduction include the parameters that are trainable now."""
        self._has_unreduced_grads.update(i for i, p in enumerate(self.parameters) if p.is_trained)

    def drop_unreduced_grads(self) -> None:
        """Forget gradients that were not reduced, or not over all axes."""
        self._has_unreduced_grads.clear()
        self.partial_reduce_output.drop()


class BufferBucket(Bucket):
    """A bucket with one shard buffer, and at most one unsharded buffer.

    On a single rank, if no dtype or device differs, the unsharded parameters lie in the shard buffer itself: nothing
    is copied or freed.
    """

    layout: PerParameterLayout | FlatLayout
    shard_buffer: torch.Tensor  # flat, for the life of the bucket
    _unsharded: Buffer | None  # made at the first unshard; memory only while unsharded. None: the shard buffer
    _all_gather: BucketAllGather | None  # fills it
    _subgroup_all_gather: BucketAllGather | None  # fills it from a subgroup
    _subgroup_shard: Buffer | None  # what this rank keeps for that; memory only while it does
    _subgroup_copies: tuple[list[torch.Tensor], list[torch.Tensor]]  # into that, from the unsharded buffer
    _made: bool  # the unsharded parameters exist
    _references: int  # to the memory of the unsharded buffer, when it was made

    def __init__(self, parameters: Sequence[ShardedParameter], mesh: ShardMesh, storage: Storage) -> None:
        super().__init__(parameters, mesh, storage)
        self._unsharded = self._all_gather = self._subgroup_all_gather = self._subgroup_shard = None
        self._made, self._references = False, 0

    def check_data(self) -> None:
        """Raise FullshardError if ``.data`` of a parameter was assigned to, see [Note: Assigned data]."""
        super().check_data()
        if not self._made or (self._unsharded is not None and self._unsharded.references >= self._references):
            return
        for parameter in self.parameters:
            memory = parameter.local if self._unsharded is None else self._unsharded.tensor(0, (0,), (1,))
            known = parameter.unsharded
            if not isinstance(known, DTensor) and not torch._C._is_alias_of(known, memory):  # type: ignore[attr-defined]
                raise parameter.lost_data()

    def change_transports(self, mesh: ShardMesh) -> None:
        """Communicate through ``mesh`` from now on: all-gathers, and at the next reduction its plan, are new."""
        self.mesh, self._plans, self._subgroup_all_gather, self._name = mesh, {}, None, None
        if mesh.world_size > 1:
            self._move_shards()
        if self._unsharded is not None:
            self._unsharded.allocate()  # the plan takes tensors on it
            self._all_gather = ShardAllGather(self.layout, self.shard_buffer, self._unsharded, mesh.transport)
            self._unsharded.free()

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of the unsharded buffer while it has memory."""
        return self.layout.unsharded_numel * self.storage.param_dtype.itemsize

    def _new_shard_buffer(self, numel: int, value: torch.Tensor) -> torch.Tensor:
        """Make zeros of the dtype of ``value``: in CPU memory if offloaded, on the meta device if ``value`` is."""
        if self.storage.offload and value.device.type != "meta":
            return host_buffer(numel, value.dtype, pin=self.storage.pin_memory).zero_()
        device = value.device if value.device.type == "meta" else self.parameters[0].at_rest
        return torch.zeros(numel, dtype=value.dtype, device=device)

    def _move_shards(self) -> None:
        """Lay out the shard buffer anew if the layout depends on the transport."""

    def _shard_on(self, buffer: torch.Tensor, index: int) -> torch.Tensor:
        """Return the shard of one parameter on a buffer that is laid out as the shard buffer."""
        raise NotImplementedError

    def _gradient_shards(self) -> torch.Tensor:
        """Copy the sharded gradients to a buffer that is laid out as the shard buffer, zeros where there are none."""
        dtype = reduce(torch.promote_types, (parameter.gradient_dtype for parameter in self.parameters))
        shard = torch.zeros_like(self.shard_buffer, dtype=dtype)
        for index, parameter in enumerate(self.parameters):
            if (gradient := parameter.local_gradient) is not None and gradient.numel():
                self._shard_on(shard, index).copy_(gradient)
        return shard

    def copies(self, gradients: bool = False) -> UnshardedCopies:
        """Make copies of the unsharded parameters, or of their gradients, in the dtype of the shards."""
        shard = self._gradient_shards() if gradients else self.shard_buffer
        buffer = Buffer(self.layout.unsharded_numel, shard.dtype, self.mesh.device)
        all_gather = ShardAllGather(self.layout, shard, buffer, self.mesh.exact_transport)
        slots: Sequence[Slot | FlatSlot] = self.layout.slots
        values = [buffer.tensor(s.unsharded_offset, s.parameter.shape, s.parameter.stride) for s in slots]
        return UnshardedCopies(all_gather, values, buffer)

    def _all_gathers(self, from_subgroup: bool) -> list[BucketAllGather]:
        if not self._made:
            with torch.inference_mode(False), torch.no_grad():
                self._make_unsharded()
            self._made = True
        kept = self._subgroup_shard is not None and self._subgroup_shard.allocated_bytes > 0
        if from_subgroup and kept and self._subgroup_all_gather is not None:
            return [self._subgroup_all_gather]
        return [] if self._all_gather is None else [self._all_gather]

    def reshard_to_subgroup(self, size: int) -> None:
        """Keep this rank's part of the unsharded buffer over ``size`` consecutive ranks, to unshard from next."""
        unsharded = self._unsharded
        if unsharded is None or not self.is_unsharded or self.mesh.world_size == 1:
            return
        transport = self.mesh.subgroup(size)
        if self._subgroup_all_gather is None or self._subgroup_all_gather.transport is not transport:
            self._subgroup_all_gather = self._plan_subgroup(unsharded, transport)
        assert self._subgroup_shard is not None
        self._subgroup_shard.allocate()
        torch._foreach_copy_(*self._subgroup_copies)

    def _plan_subgroup(self, unsharded: Buffer, transport: Transport) -> BucketAllGather:
        """Make what this rank keeps for a subgroup, the copies into it, and the all-gather from it."""
        layout = self._subgroup_layout(transport)
        self._subgroup_shard = Buffer(layout.shard_numel, unsharded.dtype, unsharded.device)
        shard = self._subgroup_shard.tensor(0, (layout.shard_numel,), (1,))
        self._subgroup_copies = self._subgroup_parts(layout, shard, unsharded, transport.rank)
        all_gather = ShardAllGather(layout, shard, unsharded, transport)
        self._subgroup_shard.free()
        return all_gather

    def _subgroup_layout(self, transport: Transport) -> Any:
        """Lay out the parameters, in the same unsharded buffer, over the ranks of a subgroup."""
        raise NotImplementedError

    def _subgroup_parts(
        self, layout: Any, shard: torch.Tensor, unsharded: Buffer, rank: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return views of a subgroup's shard, and of the parts of the unsharded buffer that it holds."""
        raise NotImplementedError

    def free_subgroup_shard(self) -> None:
        """Free the shard that ``reshard_to_subgroup`` kept."""
        if self._subgroup_shard is not None:
            self._subgroup_shard.free()

    def _make_unsharded(self) -> None:
        """Create the unsharded parameters and the all-gather that fills them."""
        shard, dtype, reduce_dtype = self.shard_buffer, self.storage.param_dtype, self.storage.reduce_dtype
        if self.mesh.world_size == 1 and dtype is shard.dtype and shard.device == self.mesh.device:
            for parameter in self.parameters:
                shape = parameter.shape
                parameter.set_unsharded(alias(parameter.local, 0, shape.shape, shape.stride), reduce_dtype)
            return
        unsharded = Buffer(self.layout.unsharded_numel, dtype, self.mesh.device)
        all_gather = ShardAllGather(self.layout, shard, unsharded, self.mesh.transport)
        slots: Sequence[Slot | FlatSlot] = self.layout.slots
        for parameter, slot in zip(self.parameters, slots, strict=True):
            shape, offset = parameter.shape, slot.unsharded_offset
            parameter.set_unsharded(unsharded.tensor(offset, shape.shape, shape.stride), reduce_dtype)
        self._references = unsharded.references
        unsharded.free()  # its first memory is of the compute stream, whatever an all-gather allocates on
        self._unsharded, self._all_gather = unsharded, all_gather

    def _free(self) -> None:
        if self._unsharded is not None:
            self._unsharded.free()
