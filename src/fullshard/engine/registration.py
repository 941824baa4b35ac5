"""Which of a unit's parameters, sharded or full, the modules hold. Runs four times per unit and step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from fullshard.engine.parameter import Owner, ShardedParameter

__all__ = ["Registration"]


class Registration:
    """Puts parameters into modules, and looks whether they are still there.

    Args:
        parameters: With all their owners.
    """

    full: bool  # whether the modules hold the full ones
    _parameters: list[ShardedParameter]
    _plain: list[tuple[dict[str, nn.Parameter | None], str, ShardedParameter]]  # see Owner.plain
    _others: list[tuple[Owner, ShardedParameter]]

    def __init__(self, parameters: Sequence[ShardedParameter]) -> None:
        owned = [(owner, parameter) for parameter in parameters for owner in parameter.owners]
        self._parameters, self.full = list(parameters), False
        self._plain = [(owner.parameters, owner.name, parameter) for owner, parameter in owned if owner.plain]
        self._others = [(owner, parameter) for owner, parameter in owned if not owner.plain]

    def use_sharded(self) -> None:
        """Have the modules hold the sharded parameters."""
        self.full = False
        for held, name, parameter in self._plain:
            held[name] = parameter.sharded
        for owner, parameter in self._others:
            owner.set(parameter.sharded)

    def use_full(self) -> None:
        """Have the modules hold the full parameters, which require gradients as the sharded ones do."""
        self.full = True
        for parameter in self._parameters:
            if parameter.full.requires_grad is not parameter.requires_grad:
                parameter.follow_requires_grad()
        for held, name, parameter in self._plain:
            held[name] = parameter.full
        for owner, parameter in self._others:
            owner.set(parameter.full)

    def use_instead(self, others: Mapping[int, nn.Parameter]) -> None:
        """Have the modules hold ``others``, by the ids of the parameters that they stand for."""
        self.full = True
        for held, name, parameter in self._plain:
            held[name] = others[id(parameter)]
        for owner, parameter in self._others:
            owner.set(others[id(parameter)])

    def leave(self) -> None:
        """Take out of the modules whatever is there beside parameters: the unit ends."""

    def is_current(self) -> bool:
        """Whether the modules hold our sharded parameters, and these are where we put them. See [Note: Adoption]."""
        for held, name, parameter in self._plain:
            sharded = parameter.sharded
            if held.get(name) is not sharded or sharded._local_tensor is not parameter.local:  # type: ignore[attr-defined]
                return False
        return all(parameter.is_current() for _, parameter in self._others)
