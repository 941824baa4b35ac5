"""The user's choices for a unit. They must be equal on all ranks."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.torch_version import TorchVersion

from fullshard.comm import AllGather, CustomTransport, GradScaling, HookedTransport, ReduceScatter
from fullshard.comm.mesh import ShardMesh
from fullshard.comm.quantized.mesh import MeshQuantization
from fullshard.engine.buckets.formats import PER_PARAMETER, ShardingFormat
from fullshard.engine.buckets.storage import Storage
from fullshard.engine.parameters.sharded import ShardedParameter
from fullshard.engine.reduction.grad_reduction import ReductionTerms
from fullshard.memory import CommStream, Event, Stream, make_comm_stream
from fullshard.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

__all__ = ["CollectiveSettings", "CommStreams", "ReductionSettings", "UnitPolicy", "UnitSettings"]


# What reduce_dtype=None means: as FSDP2 of the installed torch has it.
REDUCES_IN_PARAM_DTYPE = TorchVersion(torch.__version__) < "2.15"


def _has_precision(dtype: torch.dtype) -> bool:
    """True if it can be chosen: not of integers, nor of one-byte floats, packed data with scales of their own."""
    return dtype.is_floating_point and dtype.itemsize > 1


class UnitPolicy(NamedTuple):
    """Choices that are fixed when the unit is made."""

    precision: MixedPrecisionPolicy = MixedPrecisionPolicy()
    offload: OffloadPolicy = OffloadPolicy()
    form: ShardingFormat = PER_PARAMETER
    offload_gradients: bool = False
    keep_reduced: bool = False  # sharded gradients stay in the reduce dtype

    def override(self, parameter: nn.Parameter, fqn: str) -> torch.dtype | None:
        """Ask the user in which dtype a parameter is computed with; None: ``param_dtype``, or its own.

        Raises:
            TypeError, ValueError: If the answer is no floating-point dtype, or the parameter is not floating-point.
        """
        ask = self.precision.param_dtype_override_fn
        dtype = None if ask is None else ask(parameter)
        if dtype is None or dtype is self.precision.param_dtype:
            return None
        if dtype is parameter.dtype:
            return dtype
        where = f"MixedPrecisionPolicy: param_dtype_override_fn, for {fqn} ({parameter.dtype})"
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{where}: expected a torch.dtype or None, found {dtype!r}")
        if not dtype.is_floating_point or not _has_precision(parameter.dtype):
            raise ValueError(f"{where}: expected None, or floating-point dtypes of two bytes and more, found {dtype}")
        return dtype

    def gradient_dtypes(self, parameters: Sequence[ShardedParameter]) -> list[torch.dtype | None]:
        """Return the dtypes in which gradients of a unit's parameters are reduced, as their ``grad_dtype`` sets it.

        Gradients of parameters of one dtype are reduced in the widest ``grad_dtype`` among them. None: as the policy
        sets it.
        """
        if REDUCES_IN_PARAM_DTYPE or self.precision.reduce_dtype:
            return [None] * len(parameters)
        widest: dict[torch.dtype, torch.dtype] = {}
        for sharded in (parameter.sharded for parameter in parameters):  # frozen ones may be trained later
            if sharded.grad_dtype is not None:
                wide = widest.get(sharded.dtype, sharded.grad_dtype)
                widest[sharded.dtype] = torch.promote_types(wide, sharded.grad_dtype)
        return [parameter.sharded.grad_dtype and widest.get(parameter.sharded.dtype) for parameter in parameters]

    def storage(
        self, dtype: torch.dtype, override: torch.dtype | None, gradient: torch.dtype | None, *, offload: bool
    ) -> Storage:
        """Return the dtypes and devices of a bucket.

        Args:
            dtype: Of its parameters.
            override: What ``param_dtype_override_fn`` says of them.
            gradient: What ``gradient_dtypes`` says of them.
            offload: Their shards are in CPU memory.
        """
        param = reduce = dtype
        if _has_precision(dtype):
            param = override or self.precision.param_dtype or dtype
            reduce = self.precision.reduce_dtype or gradient or param
        pin = self.offload.pin_memory if isinstance(self.offload, CPUOffloadPolicy) else self.offload_gradients
        return Storage(param, reduce, offload, pin, self.offload_gradients, self.keep_reduced)

    @property
    def offloads(self) -> bool:
        """True if shards, or some of them, are kept in CPU memory."""
        return isinstance(self.offload, CPUOffloadPolicy)

    def offloaded(self, sizes: Sequence[int]) -> list[bool]:
        """Choose the parameters whose shards are kept in CPU memory: the largest that fit into the fraction of a unit.

        Args:
            sizes: Bytes of each parameter of the unit when unsharded.
        """
        chosen, room = [False] * len(sizes), 0.0
        if isinstance(self.offload, CPUOffloadPolicy):
            room = self.offload.fraction * sum(sizes)
        for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
            chosen[index] = self.offloads and sizes[index] <= room
            room -= sizes[index] if chosen[index] else 0
        return chosen


class CommStreams(NamedTuple):
    """The streams on which the collectives and copies of a root run."""

    all_gather: CommStream
    reduce_scatter: CommStream
    all_reduce: CommStream

    @classmethod
    def on(cls, device: torch.device) -> CommStreams:
        """Make new streams on ``device``."""
        return cls(*(make_comm_stream(device, priority=-1) for _ in range(3)))


@dataclass(slots=True)
class ReductionSettings:
    """The user's settings for reducing the gradients of a unit."""

    divide_factor: float | None = None  # None: the number of ranks, so that gradients are means
    force_sum: bool = False
    zeros_for_missing: bool = False
    max_in_flight: int = 1  # launches whose unsharded gradients may wait; the largest of any unit counts for the root
    hook: Callable[[torch.Tensor], object] | None = None
    hook_stream: Stream | None = None

    def terms(self, mesh: ShardMesh, storage: Storage, *, all_reduce: bool) -> ReductionTerms:
        """Return the terms of a reduction of one bucket."""
        half = storage.reduce_dtype is torch.float16
        first, last = _scalings(mesh.world_size, mesh.replicas, self.divide_factor, half, native=not self.force_sum)
        if mesh.world_size == 1 and mesh.replica_transport.hooked:
            first = GradScaling()  # the communication hook scales by itself
        hook, stream = self.hook, self.hook_stream
        return ReductionTerms(first, last, all_reduce, self.zeros_for_missing, hook, stream, storage.pin_memory)


@lru_cache
def _scalings(
    ranks: int, copies: int, factor: float | None, half: bool, native: bool
) -> tuple[GradScaling, GradScaling]:
    """Return how sums are scaled over the shard axis (``ranks``), and then over the replicate axis (``copies``)."""
    scatter, replicas = float(ranks), float(copies)
    if factor is not None and factor != scatter * replicas:
        scatter, replicas = factor, 1.0
    total = scatter * replicas
    if not half or total <= 1:
        return GradScaling(1.0, scatter, native), GradScaling(1.0, replicas, native)
    # Sums over many ranks overflow: divide by about the root of the factor before, by the rest at the end.
    before = 2.0 ** (int(total).bit_length() // 2)
    rest = total / before
    if copies > 1:
        return GradScaling(before, 1.0, native=False), GradScaling(1.0, rest, native=False)
    return GradScaling(before, rest, native=False), GradScaling(1.0, 1.0, native=False)


@dataclass(slots=True)
class CollectiveSettings:
    """Collectives that replace those of the mesh's own transports."""

    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None
    quantization: MeshQuantization | None = None  # not together with those, nor with a communication hook


@dataclass(slots=True)
class UnitSettings:
    """Choices that may change between steps."""

    reshard_after_forward: bool | int | None = None  # None: see is_kept_by_default; int: reshard_to_subgroup
    reshard_after_backward: bool = True
    requires_gradient_sync: bool = True
    requires_all_reduce: bool = True
    unshard_in_backward: bool = True
    keep_unsharded_storage: bool = False  # the memory of unsharded parameters stays when they are resharded
    forward_prefetch: list[weakref.ref[Any]] = field(default_factory=list)  # units; empty: in the recorded order
    backward_prefetch: list[weakref.ref[Any]] = field(default_factory=list)
    finalized_by_caller: bool = False  # of the root: see set_manual_backward_finalization
    prefetch_bytes: int | None = None  # of the root: see Prefetcher.budget
    backward_order: Literal["before", "after", "none"] = "before"  # of prefetching the next: BackwardPrefetch
    reduction: ReductionSettings = field(default_factory=ReductionSettings)
    collectives: CollectiveSettings = field(default_factory=CollectiveSettings)
    comm_hook: tuple[object, Callable[..., Any]] | None = None  # with its state; reduces instead of the transport
    comm_streams: CommStreams | None = None  # shared with other roots; None: the root's runtime makes its own
    post_optim_event: Event | None = None  # for the next forward of the root only
    # Returns a context for a forward of the unit, which it is called with: around all that the module itself computes.
    around_forward: Callable[[Any], contextlib.AbstractContextManager[object]] | None = None

    def communicating(self, mesh: ShardMesh) -> ShardMesh:
        """Return ``mesh`` with the custom, hooked or quantized transports that the user set."""
        custom, shard, replicas = self.collectives, mesh.transport, mesh.replica_transport
        if custom.quantization is not None:
            return custom.quantization.on(mesh)
        if self.comm_hook is not None:
            hooked = (t if t.world_size == 1 else HookedTransport(t, *self.comm_hook) for t in (shard, replicas))
            return mesh.with_transports(*hooked)
        if shard.world_size == 1 or not (custom.all_gather or custom.reduce_scatter):
            return mesh
        return mesh.with_transports(CustomTransport(shard, custom.all_gather, custom.reduce_scatter), replicas)
