"""Sharding formats: which parameter class, which bucket and which registration a front end uses."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch import nn

from fullshard.comm.mesh import ShardMesh
from fullshard.engine.buckets.base import Bucket, has_all_gather_hooks
from fullshard.engine.buckets.extension import ExtensionBucket
from fullshard.engine.buckets.per_parameter import PerParameterBucket
from fullshard.engine.buckets.slices import SliceBucket
from fullshard.engine.buckets.storage import Storage
from fullshard.engine.parameters.flat import FlatParamHandle, FlatShardedParameter, set_gradient_dtype
from fullshard.engine.parameters.placement import ParameterPlacement
from fullshard.engine.parameters.registration import Registration
from fullshard.engine.parameters.sharded import Owner, ShardedParameter, value_of
from fullshard.engine.parameters.slices import SliceParameter
from fullshard.policy import MixedPrecisionPolicy

__all__ = ["PER_PARAMETER", "FlatShardingFormat", "ShardingFormat", "added_layouts"]

FLAT_PARAMETER = "_flat_param"  # name of the first visible flat parameter of a module


class ShardingFormat:
    """Per-parameter sharding: each parameter is a DTensor with ``Shard(0)``, or another dim that the user chose."""

    reduces_gradients_alone: bool = False  # as communication hooks need it: no other numbers in their message
    has_flat_parameters: bool = False  # they are what is registered, and the original ones are attributes beside them
    _parameter_class: type[ShardedParameter] = ShardedParameter

    def parameter(
        self, parameter: nn.Parameter, owner: Owner, fqn: str, placement: ParameterPlacement
    ) -> ShardedParameter:
        """Make the sharded parameter for one that no unit manages yet."""
        return self._parameter_class.of(parameter, owner, fqn, placement)

    def shows_kept(self, *, for_backward: bool) -> bool:
        """Return True if modules hold unsharded parameters that stay in memory, see [Note: Registered parameters].

        Args:
            for_backward: They stay from forward to backward, because the user has chosen so.
        """
        return True

    def copy_for(self, memo: dict[int, Any]) -> ShardingFormat:
        """Return the same format for a deep copy whose modules are in ``memo``."""
        return self

    def accepts(self, parameter: ShardedParameter) -> bool:
        """Return True if a parameter that another unit has kept is of this format's class."""
        return type(parameter) is self._parameter_class

    def group(self, parameter: ShardedParameter) -> tuple[object, ...]:
        """Return what the parameters of a bucket share: those with equal keys are in one."""
        value = value_of(parameter.sharded)
        apart: object
        if isinstance(parameter, SliceParameter):
            # A reduction takes all of a slice: frozen ones lie apart, and those that were cut apart stay apart.
            together = parameter.cut_together
            apart = SliceParameter, parameter.requires_grad if together is None else together
        else:
            apart = has_all_gather_hooks(value, parameter.fqn)
        placed = parameter.placement.mesh, value.device.type == "meta", parameter.at_rest
        return *placed, value.dtype, parameter.param_dtype, parameter.reduced_by, apart

    def bucket(
        self, parameters: Sequence[ShardedParameter], mesh: ShardMesh, storage: Storage, precision: MixedPrecisionPolicy
    ) -> Bucket:
        """Make the bucket of such a group, with the parameters' present values."""
        if isinstance(parameters[0], SliceParameter):
            return SliceBucket(cast("Sequence[SliceParameter]", parameters), mesh, storage)
        values = [value_of(parameter.sharded) for parameter in parameters]
        if has_all_gather_hooks(values[0], parameters[0].fqn):
            return ExtensionBucket(parameters, values, mesh, storage, precision)
        return PerParameterBucket(parameters, values, mesh, storage)

    def registration(self, parameters: Sequence[ShardedParameter], buckets: Sequence[Bucket]) -> Registration:
        """Make the object that puts sharded and unsharded parameters into modules."""
        return Registration(parameters)


PER_PARAMETER = ShardingFormat()

# Makes the format of a layout that is added by an import, by the name of the layout, for ``granularity`` and
# ``first_rank``.
added_layouts: dict[str, Callable[[Any, int], ShardingFormat]] = {}


class FlatShardingFormat(ShardingFormat):
    """Flat sharding: 1-D parts of the original parameters, or one ``FlatParameter``, see [Note: Flat shards].

    Args:
        module: On which visible flat parameters are registered; None: original parameters are what users see.
    """

    reduces_gradients_alone: bool = True
    _parameter_class: type[ShardedParameter] = FlatShardedParameter
    _module: weakref.ref[nn.Module] | None

    def __init__(self, module: nn.Module | None) -> None:
        self._module = None if module is None else weakref.ref(module)
        self.has_flat_parameters = module is not None

    def parameter(
        self, parameter: nn.Parameter, owner: Owner, fqn: str, placement: ParameterPlacement
    ) -> ShardedParameter:
        """Make the sharded parameter for one that no unit manages yet.

        Raises:
            ValueError: If it is a tensor subclass that is all-gathered through hooks of its own.
        """
        if has_all_gather_hooks(value_of(parameter), fqn):
            raise ValueError(
                f"FullyShardedDataParallel: {fqn} is a {type(value_of(parameter)).__name__}, a tensor subclass with "
                "its own all-gather hooks, which flat parameters do not support; use fully_shard"
            )
        return super().parameter(parameter, owner, fqn, placement)

    def shows_kept(self, *, for_backward: bool) -> bool:
        """Show original parameters for backward only, and those in flat parameters while they are there, as FSDP1."""
        return for_backward or self.has_flat_parameters

    def copy_for(self, memo: dict[int, Any]) -> ShardingFormat:
        """Return the same format for a deep copy whose modules are in ``memo``."""
        return self if self._module is None else FlatShardingFormat(memo[id(self._module())])

    def bucket(
        self, parameters: Sequence[ShardedParameter], mesh: ShardMesh, storage: Storage, precision: MixedPrecisionPolicy
    ) -> Bucket:
        """Make the flat bucket of such a group, with the parameters' present values."""
        bucket = super().bucket(parameters, mesh, storage, precision)
        for parameter in parameters if storage.keep_reduced else ():
            set_gradient_dtype(parameter.sharded, storage.reduce_dtype)
        return bucket

    def registration(self, parameters: Sequence[ShardedParameter], buckets: Sequence[Bucket]) -> Registration:
        """Make the object that puts sharded and unsharded parameters into modules; register flat parameters."""
        if self._module is None:
            return super().registration(parameters, buckets)
        module = self._module()
        assert module is not None, "a unit outlived its module"
        for name in [name for name in module._parameters if name.startswith(FLAT_PARAMETER)]:
            del module._parameters[name]
        handles = []
        for index, bucket in enumerate(cast("Sequence[SliceBucket]", buckets)):
            name = FLAT_PARAMETER if index == 0 else f"{FLAT_PARAMETER}_{index}"
            flat = cast("list[FlatShardedParameter]", bucket.parameters)
            handle = flat[0].handle
            if handle is not None and handle.sharded_parameters == flat:
                handle.point_at(bucket.shard_buffer)
                handle.name = name
            else:
                handle = FlatParamHandle(module, name, bucket.shard_buffer, flat)
            bucket.handle = handle
            handle.show(bucket.layout, keep_reduced=bucket.storage.keep_reduced)
            handles.append(handle)
        return FlatParameterRegistration(parameters, handles)


class FlatParameterRegistration(Registration):
    """Modules hold the 1-D parts as plain attributes; flat parameters are registered instead."""

    _handles: list[FlatParamHandle]
    _hidden: list[tuple[dict[str, Any], str, ShardedParameter]]  # the modules' own dictionaries

    def __init__(self, parameters: Sequence[ShardedParameter], handles: Sequence[FlatParamHandle]) -> None:
        super().__init__(parameters)
        self._handles = list(handles)
        owned = [(owner.module(), owner.name, parameter) for parameter in parameters for owner in parameter.owners]
        self._hidden = [(vars(module), name, parameter) for module, name, parameter in owned if module is not None]
        for hidden in parameters:
            cast("FlatShardedParameter", hidden).refuse_own_gradient()

    def use_sharded(self) -> None:
        """Register the flat parameters; modules have the 1-D parts as attributes."""
        self.unsharded = self.copies = False
        for owner, parameter in self._owned:
            if not owner.plain:  # a module that keeps a second list of its weights has to drop the unsharded ones
                owner.set(parameter.sharded)
        self._hide([parameter.sharded for _, _, parameter in self._hidden])

    def use_unsharded(self) -> None:
        """Register the unsharded parameters instead of the flat ones."""
        self._unregister()
        super().use_unsharded()

    def show_unsharded(self) -> None:
        """Register the flat parameters; modules have the unsharded ones as attributes."""
        self._hide([parameter.unsharded for _, _, parameter in self._hidden])

    def _hide(self, shown: Sequence[nn.Parameter]) -> None:
        """Register the flat parameters, and have the modules' attributes show other ones."""
        for (attributes, name, _), parameter in zip(self._hidden, shown, strict=True):
            # None keeps the place among the module's parameters, and whoever lists them skips it.
            attributes["_parameters"][name] = None
            attributes[name] = parameter
        for handle in self._handles:
            handle.parameters[handle.name] = handle.flat

    def holds_unsharded(self) -> bool:
        """Return True: parameters that modules have as attributes cannot be replaced."""
        return True

    def use_copies(self, copies: Mapping[int, nn.Parameter]) -> None:
        """Register copies of the original parameters instead of the flat ones."""
        self._unregister()
        super().use_copies(copies)

    def remove(self) -> None:
        """Remove the flat parameters from their module for good."""
        self._unregister()
        for handle in self._handles:
            handle.parameters.pop(handle.name, None)

    def _unregister(self) -> None:
        for attributes, name, _ in self._hidden:
            attributes.pop(name, None)
        for handle in self._handles:
            handle.parameters[handle.name] = None
