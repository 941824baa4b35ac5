"""Flat parameters: 1-D shards of the original parameters, or one ``FlatParameter`` for all of a bucket.

[Note: Flat shards]
With flat parameters, the sharded parameter is the part of the original one that lies in this rank's slice of the
flattened bucket: 1-D, maybe empty. It is the ``nn.Parameter`` object that the user's module had before, so optimizers
and parameter groups that were built earlier stay valid; only its data changes. Where nothing is sharded (one rank, or
replication only) it is the whole parameter and keeps its shape.

If flat parameters are visible (``use_orig_params=False``), modules hold the unsharded parameters as plain attributes
while they compute, and the ``FlatParameter`` with all shards is what is registered, optimized and saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Shard

from fullshard.comm.mesh import ShardMesh
from fullshard.engine import hooks
from fullshard.engine.parameters.placement import dtensor, region_at
from fullshard.engine.parameters.sharded import (
    accumulate_gradient,
    clear_gradient,
    keep_gradient_dtype,
    managed_by,
    mark,
    value_of,
)
from fullshard.engine.parameters.slices import SliceParameter
from fullshard.engine.parameters.tensor_shards import (
    ShardViews,
    TensorShard,
    TensorShards,
    full_tensor,
    gather_ranges,
    regions_of_slice,
)
from fullshard.errors import FullshardError
from fullshard.layout import FlatLayout, Region

__all__ = ["FlatParamHandle", "FlatParameter", "FlatShardedParameter", "is_flat", "set_gradient_dtype"]


NOT_FUNCTIONAL = (
    " (torch.func.functional_call does this); a sharded module always computes with its own parameters: call it "
    "without replacements, assign to param.data, or edit parameters inside summon_full_params"
)


class FlatParameter(nn.Parameter):
    """This rank's slice of a unit's parameters as one 1-D parameter, padding included.

    Modules of a ``FullyShardedDataParallel`` with ``use_orig_params=False`` have one per unit and dtype.

    Attributes:
        fqns: FQNs of the original parameters, in order.
        shapes: Unsharded shapes of the original parameters.
    """

    fqns: tuple[str, ...]
    shapes: tuple[torch.Size, ...]


class FlatShardedParameter(SliceParameter):
    """A parameter whose shard is a 1-D part of this rank's slice of the bucket, see [Note: Flat shards]."""

    handle: FlatParamHandle | None = None  # if flat parameters are visible

    @property
    def gradient_dtype(self) -> torch.dtype:
        """The dtype of sharded gradients, or of the visible flat parameter's."""
        return super().gradient_dtype if self.handle is None else self.handle.flat.grad_dtype or self.local.dtype

    @property
    def requires_grad(self) -> bool:
        """True if the parameter, or the visible flat parameter that it is in, requires a gradient."""
        return self.sharded.requires_grad if self.handle is None else self.handle.flat.requires_grad

    @property
    def optimized(self) -> nn.Parameter:
        """The original parameter object, or the visible flat parameter that it is in."""
        return self.sharded if self.handle is None else self.handle.flat

    def place(self, local: torch.Tensor) -> None:
        """Point the sharded parameter at ``local``; the parameter object stays the same wherever that is possible."""
        old, first, self.local = self.sharded, not hasattr(self, "local"), local
        if old.grad is not None and (first or old.grad.shape != local.shape):
            old.grad = None  # this rank's own, of the whole parameter, from before it was sharded
        self._set_data(local)
        self.sharded.__dict__.update(self.attributes)
        mark(self.sharded, self)

    def _set_data(self, local: torch.Tensor) -> None:
        old = self.sharded
        if isinstance(old, DTensor) or not torch._has_compatible_shallow_copy_type(old, local):
            self.sharded = nn.Parameter(local, requires_grad=old.requires_grad)
            keep_gradient_dtype(self.sharded, old)
        else:
            old.data = local

    def forget_layout(self, value: torch.Tensor) -> None:
        """Hold ``value``, the whole parameter, until it is laid out anew; a flat parameter that it was in is gone."""
        self.sharded.requires_grad_(self.requires_grad)
        self.handle = self.sharded.grad = None
        super().forget_layout(value)

    def is_registered(self) -> bool:
        """Return True if the modules still hold the managed parameter and it still lies in the shard buffer."""
        if self.handle is not None:
            return self.handle.is_registered() and all(owner.held() is None for owner in self.owners)
        return self.is_in_place() and all(owner.held() is self.sharded for owner in self.owners)

    def is_in_place(self) -> bool:
        """Return True if the data of the parameter object is still its view of the shard buffer."""
        sharded, local = self.sharded, self.local
        if sharded.shape != local.shape:
            return False
        # Empty tensors have no address. Ranks with a non-empty shard notice replaced data, so all ranks must.
        if not local.numel():
            return bool(torch._C._is_alias_of(sharded, local))  # type: ignore[attr-defined]
        return sharded.data_ptr() == local.data_ptr()

    def is_assigned(self) -> bool:
        """Return True if a module holds another parameter object than the one that is managed, or visible."""
        return super().is_assigned() if self.handle is None else self.handle.is_assigned()

    def accept_replacement(self) -> nn.Parameter:
        """Manage the parameter that the user has put into the module; its value is written back afterwards.

        Raises:
            FullshardError: If it has neither the shape of this rank's shard nor that of the unsharded parameter.
        """
        held = [owner.held() for owner in self.owners]
        if self.handle is not None:
            if any(other is not None for other in held):
                raise FullshardError(
                    f"cannot write back {self.describe()}: with use_orig_params=False a parameter cannot be assigned "
                    "to the module; edit it inside summon_full_params, or set use_orig_params=True"
                )
            self._set_data(self.handle.registered_shard(self))
            return self.sharded
        found = next((other for other in held if other is not self.sharded), self.sharded)
        if not isinstance(found, nn.Parameter):
            raise FullshardError(
                f"cannot write back {self.describe()}: expected an nn.Parameter, found a "
                f"{type(found).__name__}{NOT_FUNCTIONAL}"
            )
        if found.shape not in (self.local.shape, self.placement.shape):
            raise FullshardError(
                f"cannot write back {self.describe()}: its shape was changed to {tuple(found.shape)}; expected the "
                f"shape of this rank's shard, {tuple(self.local.shape)}, or of the unsharded parameter, "
                f"{tuple(self.placement.shape)}"
            )
        if found is not self.sharded:
            self.sharded = found
            self.remember_attributes()
        return found

    # ---------------------------------------------------------------- what ranks hold of it, see [Note: Tensor shards]

    def part_of(self, value: torch.Tensor) -> torch.Tensor:
        """Return this parameter's part, a view, of a tensor that is shaped as ``optimized``, or that part already."""
        local = value_of(value)
        if self.handle is None or local.shape == self.local.shape:
            return local
        assert self.shard is not None, f"{self.fqn} was not laid out"
        return local.reshape(-1).narrow(0, self.shard.offset, self.shard.numel)

    def shards(self, value: torch.Tensor, name: str) -> TensorShards:
        """Return that part as shards of the unsharded parameter.

        Args:
            value: The tensor.
            name: FQN of the parameter, for the error.

        Raises:
            FullshardError: If it is neither this rank's shard of one nor all of it.
        """
        local, shape, whole = self.part_of(value), self.shape, self.placement.shape
        outer = Region.whole(whole)
        if isinstance(full := self.placement.unsharded(local), DTensor):
            here = full.device_mesh.get_coordinate()
            assert here is not None, f"{self.fqn} is on a mesh that this rank is not part of"
            outer = region_at(full, here)
        if tuple(local.shape) == shape.shape:
            return TensorShards.placed(whole, local, outer)
        assert self.shard is not None, f"{self.fqn} was not laid out"
        if not whole.numel():  # as any other tensor without elements: every rank holds all of it
            return TensorShards.placed(whole, local.new_empty(outer.sizes), outer)
        if local.numel() != self.shard.numel:
            raise FullshardError(
                f"{name}: expected this rank's shard, {self.shard.numel} elements, or all of it, {shape.shape}; "
                f"found {tuple(local.shape)}"
            )
        regions = regions_of_slice(shape.shape, shape.stride, self.shard, local.reshape(-1))
        shards = tuple(TensorShard(region.shifted(outer.offsets), part) for region, part in regions)
        return TensorShards(whole, local.dtype, local.device, shards, equal=True)

    def full_from(self, value: torch.Tensor) -> torch.Tensor:
        """Gather the unsharded tensor that is shaped as ``optimized`` on all ranks. A collective.

        Args:
            value: This rank's part of it, in any dtype.

        Returns:
            A new tensor on the compute device.
        """
        return full_tensor(self.placement.unsharded(self._gather(value)))

    def reshard(self, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor that is shaped as ``optimized`` as ``fully_shard`` would shard it. A collective."""
        whole = self._gather(value)
        if self.placement.mesh.shard is None:  # whole in the model's own state dict as well
            return self.placement.unsharded(whole)
        return self.shard_of(whole, whole.device)

    def views(self) -> ShardViews:
        """Return the shards of all ranks: ranges of elements in the order of memory."""
        mesh = self.placement.mesh
        axes = [0] if mesh.shard is not None and mesh.world_size > 1 else []
        return ShardViews(
            mesh.shard or mesh.device_mesh, axes, self.shape.stride, lambda coordinate: self.shard_view(coordinate[0])
        )

    def _gather(self, value: torch.Tensor) -> torch.Tensor:
        """Gather the parameter over the shard axis, with its strides."""
        mesh, shape = self.placement.mesh, self.shape
        local = self.part_of(value).to(mesh.device.type)
        whole = torch.empty_strided(shape.shape, shape.stride, dtype=local.dtype, device=local.device)
        if mesh.shard is None or mesh.world_size == 1:
            return whole.copy_(local.view(shape.shape))
        assert self.slot is not None, f"{self.fqn} was not laid out"
        ranges = (self.slot.shard(rank)[:2] for rank in range(mesh.world_size))
        gather_ranges(whole, ranges, local, mesh.shard.get_group())
        return whole

    # ---------------------------------------------------------------- gradients

    @property
    def local_gradient(self) -> torch.Tensor | None:
        """Sharded gradient, or the part of the visible flat parameter's that belongs to this shard."""
        if self.handle is None or self.shard is None:
            return self.sharded.grad
        gradient, local = self.handle.flat.grad, self.local
        return None if gradient is None else gradient.as_strided(local.shape, local.stride(), self.shard.offset)

    def clear_gradient(self, *, set_to_none: bool) -> None:
        """Clear the sharded gradient, or all of the visible flat parameter's, as ``zero_grad`` does."""
        clear_gradient(self.sharded if self.handle is None else self.handle.flat, set_to_none=set_to_none)

    def set_gradient(self, local: torch.Tensor | None) -> None:
        """Replace the sharded gradient by a copy; in a visible flat parameter's gradient, None becomes zeros."""
        if self.handle is None:
            if local is not None:  # maybe of a copy in CPU memory
                local = local.to(self.local.device, self.gradient_dtype, copy=True).view(self.local.shape)
            self.sharded.grad = local
        elif self.handle.flat.grad is not None and self.shard is not None:
            target = self.handle.flat.grad.narrow(0, self.shard.offset, self.shard.numel)
            if local is None:
                target.zero_()
            else:
                target.as_strided(self.local.shape, self.local.stride()).copy_(local)

    def accumulate(self, local: torch.Tensor) -> None:
        """Set the sharded gradient to ``local``, or add ``local`` to it, and run the user's hooks."""
        accumulate_gradient(self.sharded, local.to(self.gradient_dtype))

    def follow_requires_grad(self) -> None:
        """Have the unsharded parameter, and one that a flat parameter hides, require a gradient as what users see."""
        super().follow_requires_grad()
        if self.handle is not None:
            self.sharded.requires_grad = self.requires_grad
            self.refuse_own_gradient()

    def take_requires_grad(self) -> None:
        """Take the flag of the unsharded parameter, or keep that of the flat parameter, which all in it have."""
        if self.handle is None:
            super().take_requires_grad()
        else:
            self.follow_requires_grad()

    def refuse_own_gradient(self) -> None:
        """Have autograd raise where it accumulates a gradient of this parameter, which a flat parameter hides.

        With one rank it has its whole shape at rest, so a module that holds it can be called outside of its wrapper.
        The optimizer would never see that gradient.
        """
        hooks.after_accumulation(self.sharded, _refuse_gradient)

    def memoize(self, memo: dict[int, Any]) -> None:
        """Put a copy of the sharded parameter, without its gradient, into a deepcopy's memo."""
        memo[id(self.sharded)] = nn.Parameter(self.local.clone(), requires_grad=self.requires_grad)


def _refuse_gradient(sharded: torch.Tensor) -> None:
    # Whoever manages it now: the parameter object outlives a wrapper that failed, and may have been wrapped again.
    parameter = managed_by(sharded)
    if not isinstance(parameter, FlatShardedParameter) or parameter.handle is None:
        return
    sharded.grad = None
    raise FullshardError(
        f"{parameter.describe()} got a gradient from a call outside of its FSDP wrapper, and the flat parameter "
        f"{parameter.handle.name} cannot receive it: the module is shared by the wrapped module and a module outside "
        "of it. Wrap the shared module itself, call it only through its wrapper, or set use_orig_params=True"
    )


class FlatParamHandle:
    """Owns one visible flat parameter: the module that it is registered on and the shard buffer that it is on."""

    flat: FlatParameter
    numel: int  # elements of all ranks together, without the padding at their end
    name: str  # under which it is registered
    parameters: dict[str, nn.Parameter | None]  # of the module
    sharded_parameters: list[FlatShardedParameter]  # the original ones, whose shards lie in the buffer, in order
    _shard_buffer: torch.Tensor  # 1-D
    _address: int  # of that: users may free its storage, and allocate it elsewhere

    def __init__(
        self,
        module: nn.Module,
        name: str,
        shard_buffer: torch.Tensor,
        sharded_parameters: Sequence[FlatShardedParameter],
    ) -> None:
        self.name, self.parameters = name, module._parameters
        self.sharded_parameters, self._shard_buffer = list(sharded_parameters), shard_buffer
        self._address = shard_buffer.data_ptr()
        requires_grad = sharded_parameters[0].sharded.requires_grad
        self.flat = torch.Tensor._make_subclass(FlatParameter, shard_buffer.detach(), requires_grad)
        self._describe()
        dtype = reduce(torch.promote_types, (parameter.gradient_dtype for parameter in sharded_parameters))
        if dtype is not self.flat.dtype:
            self.flat.grad_dtype = dtype
        if any(parameter.sharded.grad is not None for parameter in sharded_parameters):
            self._move_gradients()

    def _move_gradients(self) -> None:
        """Move gradients of the original parameters into the gradient of the flat parameter."""
        self.flat.grad = torch.zeros_like(self._shard_buffer, dtype=self.flat.grad_dtype)
        for parameter in self.sharded_parameters:
            gradient, parameter.sharded.grad = parameter.sharded.grad, None
            if gradient is not None and parameter.shard is not None:
                self.flat.grad.narrow(0, parameter.shard.offset, parameter.shard.numel).copy_(gradient.reshape(-1))

    def show(self, layout: FlatLayout, *, keep_reduced: bool) -> None:
        """Make the flat parameter the one that users see, on the shard buffer of a bucket.

        Args:
            layout: Of the bucket.
            keep_reduced: Its gradients stay in the reduce dtype, which those of the original parameters have.
        """
        for parameter in self.sharded_parameters:
            parameter.handle, local = self, parameter.local
            if parameter.shard is not None and parameter.shard.numel:  # on the storage that users may free and refill
                parameter.place(self._shard_buffer.as_strided(local.shape, local.stride(), parameter.shard.offset))
        last = layout.slots[-1]
        end = last.unsharded_offset + last.parameter.numel
        # DTensors are cut as torch.chunk cuts: only where that gives our slices can the padding be left out.
        self.numel = end if -(-end // layout.world_size) == layout.slice_numel else layout.unsharded_numel
        if keep_reduced:
            set_gradient_dtype(self.flat, self.sharded_parameters[0].sharded.grad_dtype)

    def _describe(self) -> None:
        self.flat.__class__ = FlatParameter  # a move that swaps tensors swaps classes and attributes too
        self.flat.fqns = tuple(parameter.fqn for parameter in self.sharded_parameters)
        self.flat.shapes = tuple(parameter.placement.shape for parameter in self.sharded_parameters)
        mark(self.flat, self.sharded_parameters[0])

    def point_at(self, shard_buffer: torch.Tensor) -> None:
        """Make a shard buffer, the present one or another, the data of the flat parameter (again)."""
        self.flat.data = self._shard_buffer = shard_buffer
        self._address = shard_buffer.data_ptr()
        self._describe()

    def is_registered(self) -> bool:
        """Return True if the flat parameter is registered and on the shard buffer."""
        flat = self.flat
        return not self.is_assigned() and flat.data_ptr() == self._address

    def is_assigned(self) -> bool:
        """Return True if the module holds another parameter object."""
        return self.parameters.get(self.name) is not self.flat

    @property
    def mesh(self) -> ShardMesh:
        """The ranks that it is sharded and replicated over."""
        return self.sharded_parameters[0].placement.mesh

    @property
    def _filled(self) -> int:
        """Elements of this rank, without padding."""
        numel = self.flat.numel()
        return min(max(self.numel - self.mesh.rank * numel, 0), numel)

    def as_dtensor(self, device: torch.device) -> DTensor:
        """Return the live memory (a copy on another device) as a 1-D DTensor without padding, which other numbers of
        ranks can load.
        """
        local = self.flat.detach().as_subclass(torch.Tensor).narrow(0, 0, self._filled).to(device)
        placements = self.mesh.placements(Shard(0))
        meta = TensorMeta(torch.Size((self.numel,)), (1,), local.dtype)
        return dtensor(local, DTensorSpec(self.mesh.device_mesh, placements, tensor_meta=meta))

    def slice_of(self, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice, padding included, of the elements of all ranks. A collective if ``value`` is a
        DTensor that is sharded in another way.
        """
        here = isinstance(value, DTensor) and value.device_mesh == self.mesh.device_mesh
        if isinstance(value, DTensor) and here and value.placements == self.mesh.placements(Shard(0)):
            local = value._local_tensor
        else:
            start = min(self.mesh.rank * self.flat.numel(), self.numel)
            local = full_tensor(value.detach()).narrow(0, start, self._filled)
        padded = torch.zeros(self.flat.shape, dtype=local.dtype, device=local.device)
        padded.narrow(0, 0, self._filled).copy_(local)
        return padded

    def registered_shard(self, parameter: FlatShardedParameter) -> torch.Tensor:
        """Return the shard of one original parameter in the flat parameter that the module holds now.

        Raises:
            FullshardError: If the module holds no ``nn.Parameter``, or one of another shape.
        """
        registered = self.parameters.get(self.name)
        value = self.flat if registered is None else registered
        if not isinstance(value, nn.Parameter):
            raise FullshardError(
                f"cannot write back the flat parameter {self.name}: expected an nn.Parameter, found a "
                f"{type(value).__name__}{NOT_FUNCTIONAL}"
            )
        if value.shape != self._shard_buffer.shape:
            raise FullshardError(
                f"cannot write back the flat parameter {self.name}: its shape was changed to {tuple(value.shape)}, "
                f"expected {tuple(self._shard_buffer.shape)}; edit parameters inside summon_full_params"
            )
        if not value.data_ptr() and value.device.type != "meta":
            raise FullshardError(
                f"the flat parameter {self.name} has no memory: its storage was resized to 0 bytes; resize it back to "
                f"{value.numel() * value.itemsize} bytes, and copy its values there, before it is used"
            )
        assert parameter.shard is not None
        local, flat = parameter.local, value_of(value)
        start = int(flat.storage_offset()) + parameter.shard.offset
        return flat.as_strided(local.shape, local.stride(), start)  # a whole parameter keeps its strides


def is_flat(parameter: torch.Tensor | None) -> bool:
    """Return True for a visible flat parameter, which stands for several parameters of the model."""
    return isinstance(parameter, FlatParameter)


def set_gradient_dtype(parameter: torch.Tensor, dtype: torch.dtype | None) -> None:
    """Have gradients of this dtype, also one that is there (and that a move has cast)."""
    gradient, parameter.grad = parameter.grad, None
    parameter.grad_dtype = dtype
    parameter.grad = None if gradient is None else gradient.to(dtype)
