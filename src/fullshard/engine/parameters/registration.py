"""Registers sharded or unsharded parameters in the modules. Runs four times per unit and step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from fullshard.engine.parameters.sharded import Owner, ShardedParameter

__all__ = ["Registration"]


class Registration:
    """Registers the parameters of a unit in all their modules, and checks that they are still there."""

    unsharded: bool  # the modules hold the unsharded parameters, or copies of them
    copies: bool  # the modules hold copies
    _owned: list[tuple[Owner, ShardedParameter]]

    def __init__(self, parameters: Sequence[ShardedParameter]) -> None:
        self.unsharded = self.copies = False
        self._owned = [(owner, parameter) for parameter in parameters for owner in parameter.owners]

    def use_sharded(self) -> None:
        """Have the modules hold the sharded parameters again, as far as users have not replaced the unsharded ones."""
        shown, self.unsharded, self.copies = self.unsharded and not self.copies, False, False
        for owner, parameter in self._owned:
            if shown:
                unsharded = parameter.unsharded
                if owner.parameters.get(owner.name) is not unsharded:
                    continue  # see [Note: Write-back]
                if unsharded.requires_grad is not parameter.followed:
                    parameter.take_requires_grad()
            if owner.plain:  # as owner.set does, without the cost of a call
                owner.parameters[owner.name] = parameter.sharded
            else:
                owner.set(parameter.sharded)

    def use_unsharded(self) -> None:
        """Have the modules hold the unsharded parameters, which require gradients as the sharded ones do."""
        self.unsharded = True
        for owner, parameter in self._owned:
            parameter.agree_on_requires_grad()
            if owner.plain:
                owner.parameters[owner.name] = parameter.unsharded
            else:
                owner.set(parameter.unsharded)

    def show_unsharded(self) -> None:
        """Leave the unsharded parameters in the modules after a forward."""

    def use_copies(self, copies: Mapping[int, nn.Parameter]) -> None:
        """Have the modules hold ``copies``, a mapping from the ids of parameters."""
        self.unsharded = self.copies = True
        for owner, parameter in self._owned:
            owner.set(copies[id(parameter)])

    def holds_unsharded(self) -> bool:
        """Return True if users have replaced none of the unsharded parameters that the modules hold."""
        return all(owner.held() is parameter.unsharded for owner, parameter in self._owned)

    def remove(self) -> None:
        """Unregister additional parameters, such as flat ones, before the unit is destroyed."""

    def is_registered(self) -> bool:
        """Return True if the modules hold the sharded parameters, on the shard buffers, see [Note: Write-back]."""
        return all(parameter.is_registered() for _, parameter in self._owned)
