"""What a plan of pieces rests on, and whether it still holds.

[Note: Plans of pieces]
A plan holds for as long as everything is the object, and lies at the place, that it was planned for. To find that out
costs a fraction of what it saves: it is done for all parameters at once, by ``map`` over lists, without a loop in
Python. All of it concerns this rank only, and no collective depends on it: another rank may have other runs.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fullshard.optim.local_pieces import Member, Piece, RunNumbers

__all__ = ["Basis", "State", "step_to"]

State = dict[Any, Any]  # of an optimizer: entries by parameter

_gradient_of = operator.attrgetter("grad")
_local_of = operator.attrgetter("_local_tensor")
_spec_of = operator.attrgetter("_spec")
_address_of = torch.Tensor.data_ptr
_stride_of = torch.Tensor.stride
_dtype_of = operator.attrgetter("dtype")


class Basis:
    """See the module docstring. To be completed by :meth:`note` and :meth:`look`.

    Args:
        groups: Of the optimizer.
    """

    parameters: list[torch.Tensor]  # of all groups
    gradients: list[Any]  # theirs, while the plan is made
    settled: bool  # whether a gradient that could not be used as it is calls for a new plan every time
    _sizes: list[int]  # parameters in each group
    _sharded: tuple[list[DTensor], list[torch.Tensor]]  # parameters that are DTensors, and their local tensors
    _plain: tuple[list[torch.Tensor], list[int]]  # those in runs that are not, and their addresses
    _types: list[type] | None  # of the gradients; None: they are DTensors
    _chosen: list[int] | None  # which of the gradients are of members of local pieces; None: all, in that order
    _specs: list[Any]  # of the gradients of members
    _steps: list[int | None]  # bytes from each one's gradient to the next one's, if they may be stepped together
    _near: list[bool]  # whether they are
    _layouts: list[Any]  # strides and dtypes of the gradients; nothing if none may be stepped together
    _numbers: Sequence[RunNumbers]  # that users see
    _state: State  # the user's view
    _entries: list[Any]  # what is in it

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        self.parameters = [p for group in groups for p in group["params"]]
        self.gradients = [p.grad for p in self.parameters]
        self.settled = True
        self._sizes = _sizes_of(groups)
        sharded = [p for p in self.parameters if isinstance(p, DTensor)]
        self._sharded = (sharded, [p._local_tensor for p in sharded])
        types = [type(g) for g in self.gradients]
        self._types = None if set(types) == {DTensor} else types

    def note(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """Note the members of local pieces, in order; returns their gradients, and lets go of all."""
        indices = {id(p): index for index, p in enumerate(self.parameters)}
        members = [member for piece in pieces for member in piece.members]
        wanted = [indices[id(m.parameter)] for m in members]
        self._chosen = None if wanted == [*range(len(self.parameters))] else wanted
        found = zip(wanted, members, strict=True)
        self._specs = [None if m.spec is None else self.gradients[i]._spec for i, m in found]
        plain = [m.parameter for m in members if m.spec is None]
        self._plain = (plain, list(map(_address_of, plain)))
        groups = [piece.group for piece in pieces for _ in piece.members]
        self._steps = [
            step_to(one, other) if group == next_group else None
            for one, other, group, next_group in zip(members, members[1:], groups, groups[1:], strict=False)
        ]
        if not any(self._steps):
            self._steps = []  # of what is never stepped together, nobody needs to know where it lies
        gradients = [m.gradient for m in members]
        self._near, self._layouts = self._nearness(gradients), self._layouts_of(gradients)
        for member in members:
            del member.gradient  # it would live for as long as the plan
        self.gradients = []
        return gradients

    def look(self, optimizer: torch.optim.Optimizer, numbers: Sequence[RunNumbers]) -> None:
        """Note the user's view of the state: from now on, other objects in it are somebody else's doing."""
        self._state, self._entries, self._numbers = optimizer.state, _entries_of(optimizer.state), numbers

    def gradients_of(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor] | None:
        """This rank's gradients of the members of local pieces, in order; None: a new plan is needed."""
        if not self.settled or not self._same_parameters(optimizer) or not self._same_state(optimizer):
            return None
        found: Sequence[Any] = list(map(_gradient_of, self.parameters))
        if self._types is not None and list(map(type, found)) != self._types:
            return None
        if self._chosen is not None:
            found = [found[index] for index in self._chosen]
        try:
            if self._plain[0]:
                pairs = [*zip(found, self._specs, strict=True)]
                gradients = [g if spec is None else g._local_tensor for g, spec in pairs]
                specs = [spec if spec is None else g._spec for g, spec in pairs]
            else:
                gradients, specs = list(map(_local_of, found)), list(map(_spec_of, found))
        except AttributeError:  # one is missing, or no DTensor
            return None
        if not all(map(operator.is_, specs, self._specs)) and (
            specs != self._specs or not all(type(gradient) is torch.Tensor for gradient in gradients)
        ):
            return None
        holds = self._nearness(gradients) == self._near and self._layouts_of(gradients) == self._layouts
        return gradients if holds else None

    def _nearness(self, gradients: Sequence[torch.Tensor]) -> list[bool]:
        if not self._steps:
            return []
        addresses = list(map(_address_of, gradients))
        return list(map(operator.eq, map(operator.sub, addresses[1:], addresses), self._steps))

    def _layouts_of(self, gradients: Sequence[torch.Tensor]) -> list[Any]:
        return [*map(_stride_of, gradients), *map(_dtype_of, gradients)] if self._steps else []

    def _same_parameters(self, optimizer: torch.optim.Optimizer) -> bool:
        groups, plain = optimizer.param_groups, self._plain
        found = list(chain.from_iterable(group["params"] for group in groups))
        if len(found) != len(self.parameters) or _sizes_of(groups) != self._sizes:
            return False
        if len(self._sharded[0]) < len(found):
            same = all(map(operator.is_, found, self.parameters))
            found = self._sharded[0]
        else:
            same = True  # nobody else has their local tensors
        try:
            same = same and all(map(operator.is_, map(_local_of, found), self._sharded[1]))
        except AttributeError:
            return False
        return same and (not plain[0] or list(map(_address_of, plain[0])) == plain[1])

    def _same_state(self, optimizer: torch.optim.Optimizer) -> bool:
        if optimizer.state is not self._state:
            return False
        found, entries = _entries_of(optimizer.state), self._entries
        same = len(found) == len(entries) and all(map(operator.is_, found, entries))
        return same and all(numbers.is_current for numbers in self._numbers)


def _entries_of(state: State) -> list[Any]:
    """All entries in the user's view, in order."""
    try:
        return list(chain.from_iterable(map(dict.values, state.values())))
    except TypeError:  # something of the user's own among them
        return [entry for own in state.values() for entry in (own.values() if isinstance(own, dict) else (own,))]


def _sizes_of(groups: Sequence[Mapping[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


def step_to(one: Member, other: Member) -> int | None:
    """Bytes from one's gradient to the other's if the two could be stepped together; None: they cannot be.

    What they keep as state, and options, is left out: who changes these gets a new plan anyway.
    """
    if one.place is None or other.place is None or one.place.buffer is not other.place.buffer:
        return None
    numel = one.local.numel()
    if not numel or not other.local.numel() or other.place.offset != one.place.offset + numel:
        return None
    return numel * one.gradient.itemsize if one.gradient.dtype is other.gradient.dtype else None
