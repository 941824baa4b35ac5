"""What a user has chosen for a unit. Must be equal on all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from fullshard.engine.form import Form
from fullshard.engine.mesh import ShardMesh
from fullshard.engine.reduction import ReductionTerms
from fullshard.engine.storage import Storage
from fullshard.engine.wire import UnitWire
from fullshard.memory import Event, Lane, Stream, make_lane
from fullshard.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from fullshard.transport import AllGather, CustomTransport, Division, HookedTransport, ReduceScatter

if TYPE_CHECKING:
    from fullshard.engine.unit import Unit

__all__ = ["CollectiveSettings", "Lanes", "ReductionSettings", "UnitPolicy", "UnitSettings"]


class UnitPolicy(NamedTuple):
    """What is fixed when the unit is made."""

    precision: MixedPrecisionPolicy = MixedPrecisionPolicy()
    offload: OffloadPolicy = OffloadPolicy()
    form: Form = Form()
    offload_gradients: bool = False
    keep_reduced: bool = False  # see Storage

    def storage(self, dtype: torch.dtype) -> Storage:
        """How parameters of ``dtype`` are kept."""
        full = reduce = dtype
        # Integers have no precision to choose; one-byte floats are packed data with scales of their own.
        if dtype.is_floating_point and dtype.itemsize > 1:
            full = self.precision.param_dtype or dtype
            reduce = self.precision.reduce_dtype or full
        pin = self.offload.pin_memory if isinstance(self.offload, CPUOffloadPolicy) else self.offload_gradients
        return Storage(full, reduce, self.offloads, pin, self.offload_gradients, self.keep_reduced)

    @property
    def offloads(self) -> bool:
        """Whether shards are kept in CPU memory."""
        return isinstance(self.offload, CPUOffloadPolicy)


class Lanes(NamedTuple):
    """Where the collectives of a schedule run."""

    gather: Lane
    reduce: Lane
    all_reduce: Lane

    @classmethod
    def on(cls, device: torch.device) -> Lanes:
        """New ones."""
        return cls(*(make_lane(device, priority=-1) for _ in range(3)))


@dataclass(slots=True)
class ReductionSettings:
    """How gradients are reduced."""

    divide_factor: float | None = None  # None: the number of ranks, so that gradients are means
    force_sum: bool = False
    zeros_for_missing: bool = False
    max_in_flight: int = 1  # buckets whose full gradients may wait for their reduction while others are computed
    hook: Callable[[torch.Tensor], object] | None = None
    hook_stream: Stream | None = None

    def terms(self, mesh: ShardMesh, storage: Storage, *, all_reduce: bool) -> ReductionTerms:
        """For one bucket."""
        scatter, replicas = float(mesh.world_size), float(mesh.replicas)
        if self.divide_factor is not None and self.divide_factor != scatter * replicas:
            scatter, replicas = self.divide_factor, 1.0
        native = not self.force_sum
        if storage.reduce_dtype is torch.float16 and (total := scatter * replicas) > 1:
            # Sums over many ranks overflow: divide by about the root of the factor before, by the rest at the end.
            before = 2.0 ** (int(total).bit_length() // 2)
            rest = total / before
            first = Division(before, 1.0 if mesh.replicas > 1 else rest, native=False)
            last = Division(1.0, rest if mesh.replicas > 1 else 1.0, native=False)
        else:
            first, last = Division(1.0, scatter, native), Division(1.0, replicas, native)
        return ReductionTerms(
            first, last, all_reduce, self.zeros_for_missing, self.hook, self.hook_stream, storage.pin_memory
        )


@dataclass(slots=True)
class CollectiveSettings:
    """What gathers and reduces instead of the transports of the mesh."""

    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None
    wire: UnitWire | None = None  # not together with those, nor with a communication hook


@dataclass(slots=True)
class UnitSettings:
    """What may change between steps."""

    reshard_after_forward: bool | int | None = None  # None: True, but False for the root; int: see Bucket.keep_near
    reshard_after_backward: bool = True
    requires_gradient_sync: bool = True
    requires_all_reduce: bool = True
    unshard_in_backward: bool = True
    forward_prefetch: list[weakref.ref[Unit]] = field(default_factory=list)  # empty: the recorded order
    backward_prefetch: list[weakref.ref[Unit]] = field(default_factory=list)
    overlap_optimizer: bool = False  # of the root: see [Note: Overlap with the optimizer]
    prefetch_bytes: int | None = None  # of the root: see Ahead.budget
    backward_order: Literal["before", "after", "none"] = "before"  # of the next unit's gather and this one's backward
    reduction: ReductionSettings = field(default_factory=ReductionSettings)
    collectives: CollectiveSettings = field(default_factory=CollectiveSettings)
    comm_hook: tuple[object, Callable[..., Any]] | None = None  # with its state; reduces instead of the transport
    lanes: Lanes | None = None  # shared with other roots; None: the root's schedule makes its own
    post_optim_event: Event | None = None  # for the next forward of the root only

    def communicating(self, mesh: ShardMesh) -> ShardMesh:
        """``mesh`` with the collectives that the user has set."""
        custom = self.collectives
        if custom.wire is not None:
            return custom.wire.on(mesh)
        if self.comm_hook is not None:
            shard, replicas = (
                None if transport is None else HookedTransport(transport, *self.comm_hook)
                for transport in (mesh.transport, mesh.replica_transport)
            )
            return mesh.with_transports(shard, replicas)
        if mesh.transport is None or not (custom.all_gather or custom.reduce_scatter):
            return mesh
        transport = CustomTransport(mesh.transport, custom.all_gather, custom.reduce_scatter)
        return mesh.with_transports(transport, mesh.replica_transport)
