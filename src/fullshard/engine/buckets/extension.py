"""The bucket of tensor subclasses that say themselves what is all-gathered: packed weights, float8, and so on.

[Note: Extensions]
The local tensor of such a parameter has two methods. ``fsdp_pre_all_gather`` returns the tensors to send and
metadata; ``fsdp_post_all_gather`` makes the unsharded parameter from what arrived, the first time as a new tensor,
later in place. Each inner tensor is an operand of its own, into a buffer of its own (subclasses compare storages). None
is ever quantized. The methods are looked up on the local tensor of the sharded parameter at every all-gather: users put
attributes on it.

A subclass whose unsharded parameter does not read what arrived any more says so by a third method,
``fsdp_should_release_all_gather_outputs_after_post_all_gather``: those buffers then have memory during the all-gather
only.

Every rank must send the same sizes. A rank that holds fewer rows than others may return that much less: it is padded.
Sizes are compared on all ranks together at the first all-gather, so that all of them raise if they do not fit.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from fullshard.comm import CommRequest, Operand, Transport
from fullshard.comm.mesh import ShardMesh
from fullshard.engine.buckets.all_gather import BucketAllGather
from fullshard.engine.buckets.base import POST_ALL_GATHER, PRE_ALL_GATHER, RELEASES_OUTPUTS, Bucket, UnshardedCopies
from fullshard.engine.buckets.per_parameter import plan_per_parameter
from fullshard.engine.buckets.storage import Storage
from fullshard.engine.parameters.sharded import ShardedParameter, value_of
from fullshard.engine.reduction.plan import ReductionPlan
from fullshard.errors import FullshardError
from fullshard.layout import PerParameterLayout, Slot
from fullshard.memory import (
    Buffer,
    Stream,
    current_stream,
    free_storage,
    mark_freed_in_place,
    refill_storage,
    to_host,
)
from fullshard.policy import MixedPrecisionPolicy
from fullshard.ranks.agreement import gather

__all__ = ["ExtensionBucket"]


class ExtensionBucket(Bucket):
    """Parameters with all-gather hooks of their own: each is unsharded by itself, see [Note: Extensions].

    It is made with their present values: whole tensors, or this rank's rows of them. ``storage.param_dtype`` and
    ``policy`` are passed to the subclasses.
    """

    has_parts: bool = False
    all_gathers: list[ExtensionAllGather]

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        values: Sequence[torch.Tensor],
        mesh: ShardMesh,
        storage: Storage,
        policy: MixedPrecisionPolicy,
    ) -> None:
        super().__init__(parameters, mesh, storage)
        layout = PerParameterLayout.build(
            tuple(p.shape for p in parameters), world_size=mesh.world_size, itemsize=1, direct_bytes=0
        )
        self.all_gathers = []
        for parameter, slot, value in zip(self.parameters, layout.slots, values, strict=True):
            parameter.place(self._local(parameter, slot, value))
            self.all_gathers.append(ExtensionAllGather(parameter, slot, mesh, storage, policy))

    def _local(self, parameter: ShardedParameter, slot: Slot, value: torch.Tensor) -> torch.Tensor:
        """Cut this rank's rows, in separate memory, with the few operations that such subclasses have."""
        rank, cut = self.mesh.rank, slot.parameter.cut
        shape = slot.local_shape(rank)
        # The rows already; on a single rank they are all rows, which are not copied either.
        if tuple(value.shape) == shape and value is not parameter.sharded:
            return self._placed(value)
        try:
            chunks = torch.chunk(value, self.mesh.world_size, dim=cut)
            local = value.new_zeros((*shape[:cut], slot.chunk_rows, *shape[cut + 1 :]))
            if shape[cut] != slot.chunk_rows:
                local = local.narrow(cut, 0, shape[cut])
            if shape[cut]:
                local.copy_(chunks[rank])
        except (NotImplementedError, AssertionError) as error:
            raise ValueError(
                f"{parameter.describe()}: cannot shard dim {cut} of a {type(value).__name__} over "
                f"{self.mesh.world_size} ranks (shape of this rank's shard: {shape}): {error}"
            ) from error
        return self._placed(local)

    def _placed(self, local: torch.Tensor) -> torch.Tensor:
        if local.device.type == "meta":
            return local
        if self.storage.offload:
            return local if local.device.type == "cpu" else to_host(local, pin=self.storage.pin_memory)
        return local.to(self.parameters[0].at_rest)

    def write_back(self) -> None:
        """Register replaced local tensors themselves, for users may have put attributes on them."""
        for parameter in self.parameters:
            value = value_of(parameter.sharded)
            if value is not parameter.local:
                parameter.place(value)

    def change_transports(self, mesh: ShardMesh) -> None:
        """Communicate through ``mesh`` from now on."""
        self.mesh, self._plans = mesh, {}
        for each in self.all_gathers:
            each.mesh, each.transport = mesh, mesh.transport

    def copies(self, gradients: bool = False) -> UnshardedCopies:
        """Raise FullshardError: only the subclass can make a second unsharded value."""
        raise FullshardError(
            f"{self.parameters[0].describe()} is a tensor subclass with its own all-gather hooks ({PRE_ALL_GATHER}): "
            "there is no copy of its unsharded value besides the one that the module computes with; read that inside "
            "fullshard.unsharded"
        )

    def _make_plan(self, parameters: list[ShardedParameter]) -> ReductionPlan:
        return plan_per_parameter(parameters, self.mesh, self.storage)

    def _all_gathers(self, from_subgroup: bool) -> list[BucketAllGather]:
        return list(self.all_gathers)

    def _free(self) -> None:
        for each in self.all_gathers:
            each.free()


class ExtensionAllGather(BucketAllGather):
    """Fills one unsharded parameter from the inner tensors of all ranks, see [Note: Extensions]."""

    parameter: ShardedParameter
    mesh: ShardMesh
    transport: Transport
    buffers: list[Buffer]  # where the inner tensors of all ranks arrive
    _slot: Slot
    _storage: Storage
    _policy: MixedPrecisionPolicy
    _arguments: int  # that fsdp_pre_all_gather takes
    _sizes: list[tuple[torch.Size, torch.dtype]]  # of the inner tensors that each rank sends, padded
    _own_sizes: list[tuple[torch.Size, torch.dtype]] | None  # of those that this rank returned at the first all-gather
    _inputs: list[torch.Tensor]
    _metadata: Any
    _inner: list[tuple[torch.Tensor, int]]  # memory, with its size, that it needs beside the buffers
    _pool: Stream | None  # whose that memory is
    _made: bool  # the unsharded parameter exists
    _releases: bool  # the buffers are freed as soon as it is made

    def __init__(
        self, parameter: ShardedParameter, slot: Slot, mesh: ShardMesh, storage: Storage, policy: MixedPrecisionPolicy
    ) -> None:
        self.parameter, self.mesh, self.transport = parameter, mesh, mesh.transport
        self._slot, self._storage, self._policy = slot, storage, policy
        self._arguments = len(inspect.signature(getattr(parameter.local, PRE_ALL_GATHER)).parameters)
        self.buffers, self._sizes, self._inputs, self._inner = [], [], [], []
        self._own_sizes, self._metadata, self._pool, self._made = None, None, None, False
        releases = getattr(parameter.local, RELEASES_OUTPUTS, bool)()
        if not isinstance(releases, bool):
            raise TypeError(f"{parameter.describe()}: {RELEASES_OUTPUTS}: expected a bool, found {releases!r}")
        self._releases = releases

    def allocate(self) -> None:
        """Ask the local tensor what to send, and give memory to what arrives."""
        local = self.parameter.sharded._local_tensor  # type: ignore[attr-defined]
        assert isinstance(local, torch.Tensor)
        if local.device != self.mesh.device:
            local = local.to(self.mesh.device, non_blocking=True)
        error: Exception | None = None
        inputs: Sequence[torch.Tensor] = ()
        try:
            with torch.no_grad():
                inputs = self._pre_all_gather(local)
        except Exception as caught:  # whatever a subclass raises
            if self._own_sizes is not None:
                raise
            error = caught  # at the first all-gather the others are told
        sizes = [(tensor.size(), tensor.dtype) for tensor in inputs]
        if self._own_sizes is not None and sizes != self._own_sizes:
            raise FullshardError(
                f"{self.parameter.describe()}: {PRE_ALL_GATHER} of {type(local).__name__} returned tensors "
                f"{_shown(sizes)}, expected {_shown(self._own_sizes)} as in the first all-gather; sizes and dtypes "
                "must not change"
            )
        if self._own_sizes is None:
            self._agree(sizes, error)
            world_size = self.mesh.world_size
            self.buffers = [Buffer(size.numel() * world_size, dtype, self.mesh.device) for size, dtype in self._sizes]
            self._own_sizes = sizes
        pairs = zip(inputs, self._sizes, strict=True)
        self._inputs = [_padded(tensor.contiguous().view(-1), size.numel()) for tensor, (size, _) in pairs]
        for buffer in self.buffers:
            buffer.allocate()

    def request(self, unit: str) -> CommRequest:
        """Make one operand per inner tensor: a single rank copies too, as the unsharded parameter frees its memory."""
        pairs = zip(self._inputs, self.buffers, strict=True)
        return CommRequest(unit, [Operand(sent, b.tensor(0, (b.numel,), (1,))) for sent, b in pairs if b.numel])

    def arrived(self) -> None:
        """Make the unsharded parameter, or fill it."""
        parameter = self.parameter
        local: Any = parameter.sharded._local_tensor  # type: ignore[attr-defined]
        outputs = tuple(
            buffer.tensor(0, (buffer.numel,), (1,)).view(-1, *size[1:]) if size.numel() else buffer.tensor(0, size, ())
            for buffer, (size, _) in zip(self.buffers, self._sizes, strict=True)
        )
        post = partial(local.fsdp_post_all_gather, outputs, self._metadata, self._storage.param_dtype)
        self._pool = current_stream(self.mesh.device)
        with torch.no_grad():
            if self._made:
                for tensor, nbytes in self._inner:
                    refill_storage(tensor.untyped_storage(), nbytes)
                post(out=parameter.unsharded)
            else:
                self._make_unsharded(*post())
        if self._releases:
            for buffer in self.buffers:
                buffer.free()
        self.abandon()

    def abandon(self) -> None:
        """Forget what was to be sent."""
        self._inputs, self._metadata = [], None

    def free(self) -> None:
        """Free the memory of the unsharded parameter."""
        for buffer in self.buffers:
            buffer.free()
        for tensor, _ in self._inner:
            free_storage(tensor.untyped_storage(), self._pool)

    def _make_unsharded(self, tensor: torch.Tensor, inner: Sequence[torch.Tensor]) -> None:
        shape, stride = self.parameter.shape.shape, self.parameter.shape.stride
        if tuple(tensor.shape) != shape:
            tensor = torch.as_strided(tensor, shape, stride, storage_offset=0)  # without the rows of padding
        gathered = {buffer.tensor(0, (0,), (1,)).untyped_storage()._cdata for buffer in self.buffers}
        if self._releases and any(t.untyped_storage()._cdata in gathered for t in _inner_tensors(tensor)):
            raise FullshardError(
                f"{self.parameter.describe()}: {POST_ALL_GATHER} of {type(self.parameter.local).__name__} returned a "
                f"tensor on the memory of what was all-gathered, although {RELEASES_OUTPUTS} is True; copy it, or "
                "return False"
            )
        own = {t.untyped_storage()._cdata: t for t in inner if t.untyped_storage()._cdata not in gathered}
        self._inner = [(t, t.untyped_storage().nbytes()) for t in own.values()]
        for t in own.values():
            mark_freed_in_place(t.untyped_storage())
        self.parameter.set_unsharded(tensor, self._storage.reduce_dtype)
        self._made = True

    def _pre_all_gather(self, local: Any) -> Sequence[torch.Tensor]:
        if self._arguments == 1:
            result = local.fsdp_pre_all_gather(self.mesh.shard)
        else:
            shape, module = self.parameter.shape, self.parameter.owners[0].module()
            size = torch.Size(shape.shape)
            result = local.fsdp_pre_all_gather(self.mesh.shard, size, shape.stride, module, self._policy)
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], (tuple, list)):
            raise TypeError(f"expected (tensors, metadata), found {_kind(result)}")
        inputs, self._metadata = result
        for tensor in inputs:
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"expected tensors to all-gather, found {_kind(inputs)}")
        return tuple(inputs)

    def _agree(self, own: list[tuple[torch.Size, torch.dtype]], error: Exception | None) -> None:
        """Find out, on all ranks together, what each of them sends, and raise on all if it does not fit."""
        slot, world_size = self._slot, self.mesh.world_size
        mine: Any = own if error is None else f"{type(error).__name__}: {error}"
        everyone = [mine] if world_size == 1 else list(gather(mine, self.transport.group).values())
        for rank, found in enumerate(everyone):
            if isinstance(found, str):  # callers may go on after one of these
                kind = torch.OutOfMemoryError if found.startswith("OutOfMemoryError") else TypeError
                raise kind(
                    f"{self.parameter.describe()}: {PRE_ALL_GATHER} of {type(self.parameter.local).__name__} failed "
                    f"on rank {rank} of the shard axis: {found}"
                ) from error
        rows = [slot.local_shape(rank)[slot.parameter.cut] for rank in range(world_size)]
        first = everyone[0]
        for rank, sizes in enumerate(everyone):
            fits = len(sizes) == len(first) and all(
                dtype is dtype0
                and (size == size0 or (size[1:] == size0[1:] and _rows(size) * rows[0] == _rows(size0) * rows[rank]))
                for (size, dtype), (size0, dtype0) in zip(sizes, first, strict=False)
            )
            if not fits:
                raise ValueError(
                    f"{self.parameter.describe()}: {PRE_ALL_GATHER} of {type(self.parameter.local).__name__} returned "
                    f"tensors {_shown(first)} on rank 0, which has {rows[0]} rows, and {_shown(sizes)} on rank "
                    f"{rank}, which has {rows[rank]} rows; return tensors of equal sizes on all ranks, or of sizes in "
                    "proportion to the rows"
                )
        self._sizes = list(first)  # rank 0 never holds fewer rows than another


def _inner_tensors(tensor: Any) -> list[torch.Tensor]:
    """Return the tensors that a subclass consists of; a plain tensor itself."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    return [tensor] if flatten is None else [getattr(tensor, name) for name in flatten()[0]]


def _kind(value: object) -> str:
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(type(item).__name__ for item in value) + ")"
    return type(value).__name__


def _rows(size: torch.Size) -> int:
    return size[0] if size else 1


def _padded(flat: torch.Tensor, numel: int) -> torch.Tensor:
    if flat.numel() == numel:
        return flat
    padded = flat.new_zeros(numel)
    padded.narrow(0, 0, flat.numel()).copy_(flat)
    return padded


def _shown(sizes: Sequence[tuple[torch.Size, torch.dtype]]) -> str:
    return "[" + ", ".join(f"{tuple(size)} {dtype}" for size, dtype in sizes) + "]"
