"""Parameters that are tensor subclasses and say themselves what travels: packed weights, float8, and so on.

[Note: Extensions]
The local tensor of such a parameter has two methods. ``fsdp_pre_all_gather`` returns the tensors to send and
metadata; ``fsdp_post_all_gather`` makes the full parameter from what arrived, the first time as a new tensor, later in
place. Inner tensors travel direct, each into a region with a storage of its own (subclasses compare storages).
The methods are looked up on the local tensor of the sharded parameter at every gather: users put attributes on it.

Every rank must send the same sizes. A rank that holds fewer rows than others may return that much less: it is padded.
Whether sizes fit is found out on all ranks together at the first gather, so that all of them raise.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard.engine.bucket import Bucket
from fullshard.engine.gather import Gather
from fullshard.engine.mesh import ShardMesh
from fullshard.engine.parameter import ShardedParameter, value_of
from fullshard.engine.storage import Storage
from fullshard.errors import FullshardError
from fullshard.layout import PerParameterLayout, Slot
from fullshard.memory import Buffer, Stream, current_stream, free_storage, refill_storage, to_host
from fullshard.policy import MixedPrecisionPolicy
from fullshard.transport import Move, Parcel, Transport

__all__ = ["ExtensionBucket", "has_extension"]

_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def has_extension(value: torch.Tensor, fqn: str) -> bool:
    """Whether ``value``, a parameter or this rank's part of one, says itself what travels.

    Raises:
        TypeError: If it has only one of the two methods, or the first takes a wrong number of arguments.
    """
    pre, post = hasattr(value, _PRE), hasattr(value, _POST)
    if pre != post:
        found, missing = (_PRE, _POST) if pre else (_POST, _PRE)
        raise TypeError(f"{fqn}: {type(value).__name__} defines {found} but not {missing}; define both or neither")
    if pre and _arguments(value) not in (1, 5):
        raise TypeError(
            f"{fqn}: {type(value).__name__}.{_PRE} takes {_arguments(value)} arguments; expected (mesh) or "
            "(mesh, outer_size, outer_stride, module, mp_policy)"
        )
    return pre


def _arguments(value: torch.Tensor) -> int:
    return len(inspect.signature(getattr(value, _PRE)).parameters)


class ExtensionBucket(Bucket):
    """The parameters of a unit that are tensor subclasses with methods of their own. See [Note: Extensions].

    Args:
        parameters: In model order.
        values: Their present values: full tensors, or this rank's rows of them.
        mesh: The ranks to shard over.
        storage: ``full_dtype`` is passed to the subclasses; the rest as everywhere.
        policy: Passed to the subclasses.
    """

    fills: list[_ExtensionGather]

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
            [p.shape for p in parameters], world_size=mesh.world_size, itemsize=1, direct_bytes=0
        )
        self.fills = []
        for parameter, slot, value in zip(self.parameters, layout.slots, values, strict=True):
            parameter.place(self._local(parameter, slot, value))
            self.fills.append(_ExtensionGather(parameter, slot, mesh, storage, policy))

    def _local(self, parameter: ShardedParameter, slot: Slot, value: torch.Tensor) -> torch.Tensor:
        """This rank's rows, in memory of their own, made with the few operations that such subclasses have."""
        rank, cut = self.mesh.rank, slot.parameter.cut
        shape = slot.local_shape(rank)
        # The rows already; on a single rank they are all rows, which are not copied either.
        if tuple(value.shape) == shape and value is not parameter.sharded:
            return self._placed(value)
        try:
            chunks = torch.chunk(value, self.mesh.world_size, dim=cut)
            reserved = (*shape[:cut], slot.chunk_rows, *shape[cut + 1 :])
            padded = value.new_zeros(reserved)
            if shape[cut]:
                target = padded if shape == reserved else padded.narrow(cut, 0, shape[cut])
                target.copy_(chunks[rank])
            local = padded if shape == reserved else padded.narrow(cut, 0, shape[cut])
        except (NotImplementedError, AssertionError) as error:
            raise ValueError(
                f"{parameter.describe()}: {type(value).__name__} cannot be cut into {self.mesh.world_size} parts of "
                f"dim {cut}, this rank's being {shape}: {error}"
            ) from error
        return self._placed(local)

    def _placed(self, local: torch.Tensor) -> torch.Tensor:
        if local.device.type == "meta":
            return local
        if self.storage.offload:
            return local if local.device.type == "cpu" else to_host(local, pin=self.storage.pin_memory)
        return local.to(self.mesh.device)

    def take_over(self) -> None:
        """See :class:`Bucket`: the objects themselves, for users may have put attributes on them."""
        for parameter in self.parameters:
            value = value_of(parameter.sharded)
            if value is not parameter.local:
                parameter.place(value)

    def reroute(self, mesh: ShardMesh) -> None:
        """See :class:`Bucket`."""
        self.mesh, self._reducers = mesh, {}
        for fill in self.fills:
            fill.mesh, fill.transport = mesh, mesh.transport

    @property
    def materialized(self) -> bool:
        """See :class:`Bucket`."""
        return all(parameter.local.device.type != "meta" for parameter in self.parameters)

    @property
    def full_bytes(self) -> int:
        """See :class:`Bucket`: of the regions; what subclasses allocate themselves is not known."""
        return sum(region.allocated_bytes for fill in self.fills for region in fill.regions)

    @property
    def full_size(self) -> int:
        """See :class:`Bucket`."""
        return sum(p.shape.numel * self.storage.full_dtype.itemsize for p in self.parameters)

    def _gathers(self, near: bool) -> list[Gather]:
        return list(self.fills)

    def _free(self) -> None:
        for fill in self.fills:
            fill.free()

    def keep_near(self, size: int) -> None:
        """See :class:`Bucket`. Not for subclasses, which have no parts of parts: backward gathers from all ranks."""


class _ExtensionGather:
    """Fills one full parameter. See [Note: Extensions]."""

    parameter: ShardedParameter
    mesh: ShardMesh
    transport: Transport | None
    regions: list[Buffer]  # where the inner tensors of all ranks arrive
    _slot: Slot
    _storage: Storage
    _policy: MixedPrecisionPolicy
    _arguments: int  # that fsdp_pre_all_gather takes
    _sizes: list[tuple[torch.Size, torch.dtype]]  # of the inner tensors that each rank sends, padded
    _own_sizes: list[tuple[torch.Size, torch.dtype]] | None  # of those that this rank returned at the first gather
    _inputs: list[torch.Tensor]
    _metadata: Any
    _inner: list[tuple[torch.Tensor, int]]  # memory that the full parameter needs beside the regions, with its bytes
    _pool: Stream | None  # whose that memory is
    _made: bool  # whether the full parameter exists

    def __init__(
        self,
        parameter: ShardedParameter,
        slot: Slot,
        mesh: ShardMesh,
        storage: Storage,
        policy: MixedPrecisionPolicy,
    ) -> None:
        self.parameter, self.mesh, self.transport = parameter, mesh, mesh.transport
        self._slot, self._storage, self._policy = slot, storage, policy
        self._arguments = _arguments(parameter.local)
        self.regions, self._sizes, self._inputs, self._inner = [], [], [], []
        self._own_sizes, self._metadata, self._pool, self._made = None, None, None, False

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
            error = caught  # at the first gather the others are told
        sizes = [(tensor.size(), tensor.dtype) for tensor in inputs]
        if self._own_sizes is not None and sizes != self._own_sizes:
            raise FullshardError(
                f"{self.parameter.describe()}: {_PRE} of {type(local).__name__} returned {_shown(sizes)}, and in the "
                f"gathers before {_shown(self._own_sizes)}; sizes and dtypes have to stay those of the first gather"
            )
        if self._own_sizes is None:
            self._agree(sizes, error)
            self._own_sizes = sizes
            world_size = self.mesh.world_size
            self.regions = [Buffer(size.numel() * world_size, dtype, self.mesh.device) for size, dtype in self._sizes]
            self._made = False
        self._inputs = [
            _padded(tensor.contiguous().view(-1), size.numel())
            for tensor, (size, _) in zip(inputs, self._sizes, strict=True)
        ]
        for region in self.regions:
            region.allocate()

    def copy_in(self) -> None:
        """On a single rank, move the inner tensors: the full parameter frees its own."""
        if self.transport is None:
            for tensor, region in zip(self._inputs, self.regions, strict=True):
                region.tensor(0, (region.numel,), (1,)).copy_(tensor)

    def parcel(self, unit: str) -> Parcel:
        """What travels."""
        return Parcel(
            unit,
            [
                Move(tensor, region.tensor(0, (region.numel,), (1,)))
                for tensor, region in zip(self._inputs, self.regions, strict=True)
                if region.numel
            ],
        )

    def copy_out(self) -> None:
        """Nothing came packed."""

    def arrived(self) -> None:
        """Make the full parameter, or fill it."""
        parameter = self.parameter
        local: Any = parameter.sharded._local_tensor  # type: ignore[attr-defined]
        outputs = tuple(
            region.tensor(0, (region.numel,), (1,)).view(-1, *size[1:]) if size.numel() else region.tensor(0, size, ())
            for region, (size, _) in zip(self.regions, self._sizes, strict=True)
        )
        metadata, self._metadata = self._metadata, None
        self._inputs = []
        post = partial(local.fsdp_post_all_gather, outputs, metadata, self._storage.full_dtype)
        with torch.no_grad():
            if self._made:
                self._pool = current_stream(self.mesh.device)
                for tensor, nbytes in self._inner:
                    refill_storage(tensor, nbytes)
                post(out=parameter.full)
                return
            self._pool = current_stream(self.mesh.device)
            tensor, inner = post()
            self._make_full(tensor, inner)

    def abandon(self) -> None:
        """Forget what was to be sent."""
        self._inputs, self._metadata = [], None

    def free(self) -> None:
        """Free the memory of the full parameter."""
        for region in self.regions:
            region.free()
        for tensor, _ in self._inner:
            free_storage(tensor, self._pool)

    def _make_full(self, tensor: torch.Tensor, inner: Sequence[torch.Tensor]) -> None:
        shape, stride = self.parameter.shape.shape, self.parameter.shape.stride
        if tuple(tensor.shape) != shape:
            tensor = torch.as_strided(tensor, shape, stride, storage_offset=0)  # without the rows of padding
        regions = {region.tensor(0, (0,), (1,)).untyped_storage()._cdata for region in self.regions}
        own = {t.untyped_storage()._cdata: t for t in inner if t.untyped_storage()._cdata not in regions}
        self._inner = [(t, t.untyped_storage().nbytes()) for t in own.values()]
        self.parameter.set_full(tensor, self._storage.reduce_dtype)
        self._made = True

    def _pre_all_gather(self, local: Any) -> Sequence[torch.Tensor]:
        if self._arguments == 1:
            result = local.fsdp_pre_all_gather(self.mesh.shard)
        else:
            shape = self.parameter.shape
            result = local.fsdp_pre_all_gather(
                self.mesh.shard, torch.Size(shape.shape), shape.stride, self._module(), self._policy
            )
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], (tuple, list)):
            raise TypeError(f"expected (tensors, metadata), found {_kind(result)}")
        inputs, self._metadata = result
        for tensor in inputs:
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"expected tensors to send, found {_kind(inputs)}")
        return tuple(inputs)

    def _module(self) -> nn.Module | None:
        return self.parameter.owners[0].module()

    def _agree(self, own: list[tuple[torch.Size, torch.dtype]], error: Exception | None) -> None:
        """Find out, on all ranks together, what each of them sends. See [Note: Extensions]."""
        slot, world_size = self._slot, self.mesh.world_size
        everyone: list[Any] = [own if error is None else f"{type(error).__name__}: {error}"]
        if self.transport is not None:
            everyone, mine = [None] * world_size, everyone[0]
            dist.all_gather_object(everyone, mine, group=self.transport.group)
        for rank, found in enumerate(everyone):
            if isinstance(found, str):
                raise TypeError(
                    f"{self.parameter.describe()}: {_PRE} of {type(self.parameter.local).__name__} failed on rank "
                    f"{rank} of the shard axis: {found}"
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
                    f"{self.parameter.describe()}: {_PRE} of {type(self.parameter.local).__name__} returned tensors "
                    f"{_shown(first)} on rank 0, which holds {rows[0]} rows, and {_shown(sizes)} on rank {rank}, "
                    f"which holds {rows[rank]}; return tensors of equal sizes, or with rows in proportion"
                )
        self._sizes = list(first)  # rank 0 never holds fewer rows than another


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
