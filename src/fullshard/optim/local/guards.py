"""Guards of a step plan: find out cheaply whether the plan is still valid.

[Note: Step plans]
A plan is valid as long as all parameters, gradients and state entries are the same objects at the same addresses.
Checking that costs a fraction of what the plan saves: it is done for all parameters at once, by ``map`` over lists,
without a loop in Python. Plans are local to a rank, and no collective depends on them: ranks may have different runs.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fullshard.optim.local.local_tensors import LocalTensor, Member, RunScalars

__all__ = ["PlanGuards", "State", "byte_distance"]

State = dict[Any, Any]  # state of an optimizer: entries by parameter

_gradient_of = operator.attrgetter("grad")
_local_of = operator.attrgetter("_local_tensor")
_spec_of = operator.attrgetter("_spec")
_address_of = torch.Tensor.data_ptr
_stride_of = torch.Tensor.stride
_dtype_of = operator.attrgetter("dtype")


class PlanGuards:
    """Guards of a step plan. See [Note: Step plans]. Completed by :meth:`record` and :meth:`note_state`.

    Args:
        groups: Parameter groups of the optimizer.
    """

    parameters: list[torch.Tensor]  # of all groups
    gradients: list[Any]  # their gradients, while the plan is made
    stable: bool  # False: a gradient could not be used in place, and every step needs a new plan
    _sizes: list[int]  # parameters in each group
    _sharded: tuple[list[DTensor], list[torch.Tensor]]  # parameters that are DTensors, and their local tensors
    _plain: tuple[list[torch.Tensor], list[int]]  # plain parameters in runs, and their addresses
    _types: list[type] | None  # of the gradients; None: they are DTensors
    _chosen: list[int] | None  # indices of the gradients of members; None: all, in order
    _specs: list[Any]  # of the gradients of members
    _distances: list[int | None]  # bytes from each gradient to the next, if both may be stepped together
    _adjacent: list[bool]  # True where gradients have that distance
    _layouts: list[Any]  # strides and dtypes of the gradients; empty if none may be stepped together
    _scalars: Sequence[RunScalars]  # with copies for users
    _state: State  # the user's view
    _entries: list[Any]  # its entries

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        self.parameters = [p for group in groups for p in group["params"]]
        self.gradients = [p.grad for p in self.parameters]
        self.stable = True
        self._sizes = _sizes_of(groups)
        sharded = [p for p in self.parameters if isinstance(p, DTensor)]
        self._sharded = (sharded, [p._local_tensor for p in sharded])
        types = [type(g) for g in self.gradients]
        self._types = None if set(types) == {DTensor} else types

    def record(self, tensors: Sequence[LocalTensor]) -> list[torch.Tensor]:
        """Record the members of all local tensors, in order; return their gradients, and drop all references to
        gradients.
        """
        indices = {id(p): index for index, p in enumerate(self.parameters)}
        members = [member for tensor in tensors for member in tensor.members]
        wanted = [indices[id(m.parameter)] for m in members]
        self._chosen = None if wanted == [*range(len(self.parameters))] else wanted
        found = zip(wanted, members, strict=True)
        self._specs = [None if m.spec is None else self.gradients[i]._spec for i, m in found]
        plain = [m.parameter for m in members if m.spec is None]
        self._plain = (plain, list(map(_address_of, plain)))
        groups = [tensor.group for tensor in tensors for _ in tensor.members]
        self._distances = [
            byte_distance(one, other) if group == next_group else None
            for one, other, group, next_group in zip(members, members[1:], groups, groups[1:], strict=False)
        ]
        if not any(self._distances):
            self._distances = []  # without runs, addresses do not matter
        gradients = [m.gradient for m in members]
        self._adjacent, self._layouts = self._adjacency(gradients), self._layouts_of(gradients)
        for member in members:
            del member.gradient  # the plan must not keep it alive
        self.gradients = []
        return gradients

    def note_state(self, optimizer: torch.optim.Optimizer, scalars: Sequence[RunScalars]) -> None:
        """Record the entries of the user's view of the state: if others are in it later, the plan is invalid."""
        self._state, self._entries, self._scalars = optimizer.state, _entries_of(optimizer.state), scalars

    def gradients_of(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor] | None:
        """Return this rank's gradients of the members of all local tensors, in order; None if a new plan is needed."""
        if not self.stable or not self._same_parameters(optimizer) or not self._same_state(optimizer):
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
        except AttributeError:  # a gradient is missing, or no DTensor
            return None
        if not all(map(operator.is_, specs, self._specs)) and (
            specs != self._specs or not all(type(gradient) is torch.Tensor for gradient in gradients)
        ):
            return None
        holds = self._adjacency(gradients) == self._adjacent and self._layouts_of(gradients) == self._layouts
        return gradients if holds else None

    def _adjacency(self, gradients: Sequence[torch.Tensor]) -> list[bool]:
        if not self._distances:
            return []
        addresses = list(map(_address_of, gradients))
        return list(map(operator.eq, map(operator.sub, addresses[1:], addresses), self._distances))

    def _layouts_of(self, gradients: Sequence[torch.Tensor]) -> list[Any]:
        return [*map(_stride_of, gradients), *map(_dtype_of, gradients)] if self._distances else []

    def _same_parameters(self, optimizer: torch.optim.Optimizer) -> bool:
        groups, plain = optimizer.param_groups, self._plain
        found = list(chain.from_iterable(group["params"] for group in groups))
        if len(found) != len(self.parameters) or _sizes_of(groups) != self._sizes:
            return False
        if len(self._sharded[0]) < len(found):
            same = all(map(operator.is_, found, self.parameters))
            found = self._sharded[0]
        else:
            same = True  # the local tensors below identify the parameters
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
        return same and all(scalars.is_current for scalars in self._scalars)


def _entries_of(state: State) -> list[Any]:
    """Return all entries in the user's view, in order."""
    try:
        return list(chain.from_iterable(map(dict.values, state.values())))
    except TypeError:  # users' own entries among them
        return [entry for own in state.values() for entry in (own.values() if isinstance(own, dict) else (own,))]


def _sizes_of(groups: Sequence[Mapping[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


def byte_distance(one: Member, other: Member) -> int | None:
    """Return the bytes from one's gradient to the other's if the two could be stepped together; None otherwise.

    State and options are not compared: if they change, a new plan is made anyway.
    """
    if one.location is None or other.location is None or one.location.buffer is not other.location.buffer:
        return None
    numel = one.local.numel()
    if not numel or not other.local.numel() or other.location.offset != one.location.offset + numel:
        return None
    return numel * one.gradient.itemsize if one.gradient.dtype is other.gradient.dtype else None
