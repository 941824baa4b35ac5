"""The parameters of a model as this rank holds them, by the FQNs that they had before wrapping and sharding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from fullshard.engine.ownership import units_of
from fullshard.engine.parameters.flat import is_flat
from fullshard.engine.parameters.names import wrapped_name
from fullshard.engine.parameters.sharded import ShardedParameter, value_of
from fullshard.engine.parameters.tensor_shards import TensorShards, shards_like
from fullshard.engine.summoned_parameters import require_idle

__all__ = ["LocalParameter", "ensure_idle", "local_parameters", "mark_shards_written", "walk_modules"]


@dataclass(frozen=True, eq=False)
class LocalParameter:
    """One parameter of a model of any kind, as this rank holds it.

    Attributes:
        fqns: Its FQNs as before wrapping; a tied parameter has several.
        parameter: The parameter object of optimizers: itself, or the ``FlatParameter`` that contains its shard.
        sharded: Its state in the engine; None if no unit manages it.
    """

    fqns: tuple[str, ...]
    parameter: nn.Parameter
    sharded: ShardedParameter | None = field(default=None, repr=False)

    @property
    def fqn(self) -> str:
        """First FQN."""
        return self.fqns[0]

    @property
    def shape(self) -> torch.Size:
        """Shape of the unsharded parameter."""
        return self.parameter.shape if self.sharded is None else self.sharded.placement.shape

    def local_of(self, value: torch.Tensor) -> torch.Tensor:
        """Return this parameter's part, a view, of a tensor shaped as ``parameter``, such as an optimizer's state."""
        return value_of(value) if self.sharded is None else self.sharded.part_of(value)

    def shards_of(self, value: torch.Tensor) -> TensorShards:
        """Return that part as shards of the unsharded parameter.

        Args:
            value: Shaped as ``parameter``, of any dtype. A DTensor is cut by its own placements.

        Raises:
            FullshardError: If it has another shape.
        """
        if self.sharded is None:
            return shards_like(self.parameter, value, self.fqn)
        return self.sharded.shards(value, self.fqn)


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
            parameter = held if sharded is None else sharded.optimized
            if parameter is None or (sharded is None and is_flat(held)):
                continue
            key = id(held if sharded is None else sharded)
            names.setdefault(key, []).append(prefix + name)
            found[key] = parameter, sharded
    return [LocalParameter(tuple(names[key]), *held) for key, held in found.items()]


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
