"""The parameters of a model as this rank holds them, by the FQNs that they had before wrapping and sharding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.state.tensor_shards import TensorShard, TensorShards, region_of
from fullshard.engine.ownership import units_of
from fullshard.engine.parameters.flat import FlatParameter, FlatShardedParameter
from fullshard.engine.parameters.names import wrapped_name
from fullshard.engine.parameters.placement import dtensor
from fullshard.engine.parameters.ragged_tensor import regions_of_slice
from fullshard.engine.parameters.sharded import ShardedParameter, value_of
from fullshard.engine.parameters.slices import SliceParameter
from fullshard.engine.summoned_parameters import require_idle
from fullshard.errors import FullshardError
from fullshard.layout import Region

__all__ = ["LocalParameter", "ensure_idle", "local_parameters", "mark_shards_written", "walk_modules"]


@dataclass(frozen=True, eq=False)
class LocalParameter:
    """One parameter of a model of any kind, as this rank holds it.

    Attributes:
        fqns: Its FQNs as before wrapping; a tied parameter has several.
        shape: Shape of the unsharded parameter.
        dtype: Dtype of its sharded elements.
        parameter: The parameter object of optimizers: itself, or the ``FlatParameter`` that contains its shard.
        flat_slice: Elements of its shard in a visible flat parameter; None if it is a parameter by itself.
        sharded: Its state in the engine; None if no unit manages it.
    """

    fqns: tuple[str, ...]
    shape: torch.Size
    dtype: torch.dtype
    parameter: nn.Parameter
    flat_slice: slice | None = None
    sharded: ShardedParameter | None = field(default=None, repr=False)

    @property
    def fqn(self) -> str:
        """First FQN."""
        return self.fqns[0]

    def local_of(self, value: torch.Tensor) -> torch.Tensor:
        """Return this parameter's part of a tensor shaped as ``parameter``, such as a state of an optimizer.

        Args:
            value: Plain or DTensor.

        Returns:
            A view of this rank's memory.
        """
        local = value_of(value)
        return local if self.flat_slice is None else local.reshape(-1)[self.flat_slice]

    def shards_of(self, value: torch.Tensor) -> TensorShards:
        """Return that part as shards of the unsharded parameter.

        Args:
            value: Shaped as ``parameter``, of any dtype. A DTensor is cut by its own placements.

        Raises:
            FullshardError: If it has another shape.
        """
        if isinstance(self.sharded, FlatShardedParameter):
            return self._flat_shards(self.sharded, self.local_of(value))
        if isinstance(self.sharded, SliceParameter) and value.shape == self.sharded.local.shape:
            value = value if isinstance(value, DTensor) else dtensor(value.detach(), self.sharded.spec)
        if isinstance(value, DTensor):
            return TensorShards.of(value)
        if isinstance(self.parameter, DTensor) and value.shape == self.parameter._local_tensor.shape:
            return TensorShards.placed(self.shape, value.detach(), region_of(self.parameter))
        if value.shape != self.shape:
            raise FullshardError(
                f"{self.fqn}: expected a tensor of shape {tuple(self.shape)} or this rank's part of one, found "
                f"{tuple(value.shape)}"
            )
        return TensorShards.whole(value)

    def _flat_shards(self, flat: FlatShardedParameter, local: torch.Tensor) -> TensorShards:
        shape = flat.shape
        full = flat.placement.unsharded(local)
        outer = region_of(full) if isinstance(full, DTensor) else Region.whole(self.shape)
        assert outer is not None, f"{self.fqn} is on a mesh that this rank is not part of"
        if tuple(local.shape) == shape.shape:
            return TensorShards.placed(self.shape, local, outer)
        assert flat.shard is not None, f"{self.fqn} was not laid out"
        if not self.shape.numel():  # as any other tensor without elements: every rank holds all of it
            return TensorShards.placed(self.shape, local.new_empty(outer.sizes), outer)
        numel = flat.shard.numel
        if local.numel() != numel:
            raise FullshardError(
                f"{self.fqn}: expected this rank's shard, {numel} elements, or all of it, {shape.shape}; found "
                f"{tuple(local.shape)}"
            )
        regions = regions_of_slice(shape.shape, shape.stride, flat.shard, local.reshape(-1))
        shards = [TensorShard(region.shifted(outer.offsets), part) for region, part in regions]
        return TensorShards(self.shape, local.dtype, local.device, shards, equal=True)


def local_parameters(model: nn.Module) -> list[LocalParameter]:
    """Return all parameters of ``model``, in its order, each once.

    Args:
        model: Plain, DistributedDataParallel, of either front end, or a mixture; at rest.

    Raises:
        PhaseError: If a unit is in the middle of a step, or its parameters are unsharded by ``summon_full_params``.
    """
    ensure_idle(model)
    managed = {
        (id(owner.parameters), owner.name): parameter
        for unit in units_of(model)
        for parameter in unit.parameters
        for owner in (*parameter.owners, *parameter.pending_owners)
    }
    names: dict[int, list[str]] = {}
    found: dict[int, tuple[nn.Parameter, ShardedParameter | None]] = {}
    for prefix, module in walk_modules(model):
        for name, held in module._parameters.items():
            sharded = managed.get((id(module._parameters), name))
            if sharded is None and (held is None or isinstance(held, FlatParameter)):
                continue
            key = id(held if sharded is None else sharded)
            names.setdefault(key, []).append(prefix + name)
            if key not in found:
                parameter = held if sharded is None else sharded.sharded
                assert parameter is not None
                found[key] = (parameter, sharded)
    return [_local(tuple(names[key]), parameter, sharded) for key, (parameter, sharded) in found.items()]


def _local(fqns: tuple[str, ...], parameter: nn.Parameter, sharded: ShardedParameter | None) -> LocalParameter:
    if sharded is None:
        return LocalParameter(fqns, parameter.shape, parameter.dtype, parameter)
    home = sharded.handle if isinstance(sharded, FlatShardedParameter) else None
    if home is None:
        return LocalParameter(fqns, sharded.placement.shape, parameter.dtype, parameter, sharded=sharded)
    assert isinstance(sharded, FlatShardedParameter) and sharded.shard is not None
    flat_slice = slice(sharded.shard.offset, sharded.shard.offset + sharded.shard.numel)
    return LocalParameter(fqns, sharded.placement.shape, home.flat.dtype, home.flat, flat_slice, sharded)


def walk_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of ``model`` on every path to them, with the prefix of their names: "" or ends in a dot.

    Prefixes that wrappers add to names are left out.
    """
    stack = [("", model)]
    while stack:
        prefix, module = stack.pop()
        yield prefix, module
        wrapped = wrapped_name(module)
        for name, child in reversed(module._modules.items()):
            if child is not None:
                stack.append((prefix if name == wrapped else f"{prefix}{name}.", child))


def ensure_idle(model: nn.Module) -> None:
    """Return all units of ``model`` to the idle state, with sharded parameters registered.

    Raises:
        PhaseError: As ``local_parameters`` does.
    """
    for unit in units_of(model):
        require_idle(unit, "its state")


def mark_shards_written(model: nn.Module) -> None:
    """Mark the unsharded parameters of ``model`` as stale after its shards were written to directly."""
    for unit in units_of(model):
        unit.mark_out_of_date()
