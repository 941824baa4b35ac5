"""Registers sharded or unsharded parameters in the modules. Runs four times per unit and step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.engine.parameters.sharded import Owner, ShardedParameter

__all__ = ["Registration"]


class Registration:
    """Registers the parameters of a unit in all their modules, and checks that they are still there."""

    unsharded: bool  # the modules hold the unsharded parameters, or copies of them
    copies: bool  # the modules hold copies
    _plain: list[tuple[dict[str, nn.Parameter | None], str, ShardedParameter]]  # see Owner.plain
    _others: list[tuple[Owner, ShardedParameter]]
    _dtensors: list[ShardedParameter]

    def __init__(self, parameters: Sequence[ShardedParameter]) -> None:
        owned = [(owner, parameter) for parameter in parameters for owner in parameter.owners]
        self.unsharded = self.copies = False
        self._plain = [(owner.parameters, owner.name, parameter) for owner, parameter in owned if owner.plain]
        self._others = [(owner, parameter) for owner, parameter in owned if not owner.plain]
        self._dtensors = [parameter for parameter in parameters if isinstance(parameter.sharded, DTensor)]

    def use_sharded(self) -> None:
        """Have the modules hold the sharded parameters again, as far as users have not replaced the unsharded ones."""
        shown, self.unsharded, self.copies = self.unsharded and not self.copies, False, False
        for held, name, parameter in self._plain:
            if shown:
                unsharded = parameter.unsharded
                if held.get(name) is not unsharded:
                    continue  # see [Note: Write-back]
                if unsharded.requires_grad is not parameter.followed:
                    parameter.take_requires_grad()
            held[name] = parameter.sharded
        for owner, parameter in self._others:
            if shown and owner.held() is not parameter.unsharded:
                continue
            if shown and parameter.unsharded.requires_grad is not parameter.followed:
                parameter.take_requires_grad()
            owner.set(parameter.sharded)

    def use_unsharded(self) -> None:
        """Have the modules hold the unsharded parameters, which require gradients as the sharded ones do."""
        self.unsharded = True
        for held, name, parameter in self._plain:
            parameter.agree_on_requires_grad()
            held[name] = parameter.unsharded
        for owner, parameter in self._others:
            parameter.agree_on_requires_grad()
            owner.set(parameter.unsharded)

    def show_unsharded(self) -> None:
        """Leave the unsharded parameters in the modules after a forward."""

    def use_copies(self, copies: Mapping[int, nn.Parameter]) -> None:
        """Have the modules hold ``copies``, a mapping from the ids of parameters."""
        self.unsharded = self.copies = True
        for held, name, parameter in self._plain:
            held[name] = copies[id(parameter)]
        for owner, parameter in self._others:
            owner.set(copies[id(parameter)])

    def holds_unsharded(self) -> bool:
        """True if users have replaced none of the unsharded parameters that the modules hold."""
        plain = all(held.get(name) is parameter.unsharded for held, name, parameter in self._plain)
        return plain and all(owner.held() is parameter.unsharded for owner, parameter in self._others)

    def remove(self) -> None:
        """Unregister additional parameters, such as flat ones, before the unit is destroyed."""

    def check_data(self) -> None:
        """Raise FullshardError if ``.data`` of a sharded parameter was assigned to, see [Note: Assigned data]."""
        for parameter in self._dtensors:
            parameter.check_data()

    def is_registered(self) -> bool:
        """True if the modules hold the sharded parameters, on the shard buffers, see [Note: Write-back]."""
        for held, name, parameter in self._plain:
            sharded = parameter.sharded
            if held.get(name) is not sharded or sharded._local_tensor is not parameter.local:  # type: ignore[attr-defined]
                return False
        return all(parameter.is_registered() for _, parameter in self._others)
