"""Plan which local tensors an optimizer steps, and find out cheaply whether the plan is still valid.

[Note: Step plans]
A plan is valid as long as all parameters, gradients and state entries are the same objects, or lie in the same way.
Checking that costs a fraction of what the plan saves: it is done for all parameters at once, by ``map`` over lists,
without a loop in Python. Plans are local to a rank, and no collective depends on them: ranks may have different runs.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise, starmap
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fullshard.engine.parameters.sharded import managed_by
from fullshard.layout.per_parameter import is_dense
from fullshard.optim.local.local_tensors import FlatStates, LocalTensor, Member, RunScalars, StateEntries

__all__ = ["StepPlan"]

State = dict[Any, Any]  # state of an optimizer: entries by parameter

_gradient_of = operator.attrgetter("grad")
_dtype_of = operator.attrgetter("dtype")
_address_of = torch.Tensor.data_ptr
_stride_of = torch.Tensor.stride


@dataclass(slots=True, eq=False)
class _Candidate:
    """A member, while the plan is made.

    Args:
        member: The member.
        index: Index of its parameter among all.
        group: Index of its group.
        gradient: This rank's shard of its gradient, plain.
        buffer: The shard buffer that its shard lies in; None: it may not be stepped together with others.
        offset: Where it lies there, in elements.
        key: Members that are stepped together have the same key.
    """

    member: Member
    index: int
    group: int
    gradient: torch.Tensor
    buffer: torch.Tensor | None
    offset: int
    key: Any = None

    def distance_to(self, other: _Candidate) -> int | None:
        """Return the bytes from this gradient to the other's if both could be stepped together; None otherwise."""
        numel = self.member.local.numel()
        if self.buffer is None or other.buffer is not self.buffer or other.offset != self.offset + numel:
            return None
        alike = self.group == other.group and self.gradient.dtype is other.gradient.dtype
        return numel * self.gradient.itemsize if alike and numel and other.member.local.numel() else None


class StepPlan:
    """The local tensors for a set of parameters, their gradients and state. See [Note: Step plans].

    Args:
        optimizer: The optimizer.
        flats: Flat tensors of the state of earlier plans' runs.
        flatten: Step runs.
    """

    tensors: list[LocalTensor]
    local_state: defaultdict[Any, StateEntries]  # the optimizer's state, by the tensors that it steps
    scalars: list[RunScalars]
    stable: bool  # False: a gradient could not be used in place, and every step needs a new plan
    _flats: FlatStates
    _user_tensors: list[LocalTensor]  # the user's own parameters
    _parameters: list[torch.Tensor]  # of all groups
    _indices: list[int]  # of the members' parameters
    _distances: list[int | None]  # bytes from each member's gradient to the next, if both may be stepped together
    _facts: _Facts  # what the plan depends on, beside where the members' gradients are
    _layout: list[Any]  # how these lie
    _firsts: list[int]  # index of the first member of each local tensor among all members
    _runs: list[tuple[int, int]]  # indices of flat local tensors, and their numbers of elements

    def __init__(self, optimizer: torch.optim.Optimizer, flats: FlatStates, *, flatten: bool) -> None:
        groups, state = optimizer.param_groups, optimizer.state
        self._flats, self.stable, self.scalars, self.local_state = flats, True, [], defaultdict(dict)
        self._parameters = [p for group in groups for p in group["params"]]
        flats.retain(_entries_of(state))
        with torch.inference_mode(False), torch.no_grad():
            runs = _runs_of(self._candidates(groups, state, flatten=flatten))
            self.tensors = [_local_tensor(run) for run in runs]
            self._firsts = [*accumulate(map(len, runs), initial=0)][:-1]
            self._runs = [(i, tensor.parameter.numel()) for i, tensor in enumerate(self.tensors) if tensor.flat]
            members = [candidate for run in runs for candidate in run]
            self._indices = [candidate.index for candidate in members]
            self._distances = list(starmap(_Candidate.distance_to, pairwise(members)))
            self.tensors += self._user_tensors
            self._load_state(state)
        _, self._layout = self._member_gradients()
        self._facts = _Facts(optimizer)

    # ---------------------------------------------------------------- planning

    def _candidates(self, groups: Sequence[Mapping[str, Any]], state: State, *, flatten: bool) -> list[_Candidate]:
        """Return a candidate for each parameter that has a gradient and can be stepped as a plain tensor."""
        buffers = _ShardBuffers() if flatten else None
        found, self._user_tensors = [], []
        numbers = (number for number, group in enumerate(groups) for _ in group["params"])
        for index, (parameter, number) in enumerate(zip(self._parameters, numbers, strict=True)):
            if parameter.grad is None:
                continue
            buffer = None if buffers is None else buffers.of(parameter)
            pair = self._plain_pair(parameter, parameter.grad, is_placed=buffer is not None)
            member = Member(parameter, parameter if pair is None else pair[0], state.get(parameter))
            if pair is None or not _has_local_state(member):
                self._user_tensors.append(LocalTensor(number, [member], parameter))
            else:
                offset = 0 if buffer is None else (pair[0].data_ptr() - buffer.data_ptr()) // buffer.itemsize
                found.append(_Candidate(member, index, number, pair[1], buffer, offset))
        _set_keys(found)
        return found

    def _plain_pair(
        self, parameter: torch.Tensor, gradient: torch.Tensor, *, is_placed: bool
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return this rank's shards of a parameter and its gradient; None if the parameter itself has to be stepped.

        Plain parameters are returned only if they are placed in a shard buffer, and so may be in runs.
        """
        if type(parameter) is DTensor:
            local = parameter._local_tensor
            if type(local) is not torch.Tensor or local.layout is not torch.strided:
                return None
            if type(gradient) is not DTensor or not _same_layout(gradient, parameter):
                self.stable = False
                return None
            gradient = gradient._local_tensor
        else:
            # State of a 0-D parameter would be taken for scalars.
            if not is_placed or type(parameter) is not torch.nn.Parameter or not parameter.dim():
                return None
            local = parameter.detach()
        if (
            type(gradient) is not torch.Tensor
            or gradient.layout is not torch.strided
            or gradient.shape != local.shape
            or gradient.device != local.device
        ):
            self.stable = False
            return None
        return local, gradient

    def _load_state(self, state: State) -> None:
        self.local_state.update((key, value) for key, value in state.items() if not isinstance(key, torch.Tensor))
        alike: dict[Any, list[LocalTensor]] = {}
        for index, tensor in enumerate(self.tensors):
            tensor.index = index
            loaded = tensor.load_state(self._flats)
            if loaded is None:
                continue
            self.local_state[tensor.parameter] = loaded
            for name, entry in loaded.items() if len(tensor.members) > 1 else ():
                if isinstance(entry, torch.Tensor) and not entry.dim():
                    alike.setdefault((name, entry.dtype, entry.device), []).append(tensor)
        for (name, *_), runs in alike.items():
            self.scalars.append(RunScalars(name, runs, [self.local_state[run.parameter] for run in runs]))

    # ---------------------------------------------------------------- a step

    def gradients(self, optimizer: torch.optim.Optimizer) -> list[Any] | None:
        """Return the gradients of all local tensors, in order; None if a new plan is needed."""
        if _Facts(optimizer) != self._facts or not all(scalars.is_current for scalars in self.scalars):
            return None
        gradients, layout = self._member_gradients()
        if layout != self._layout:
            return None
        found = [gradients[first] for first in self._firsts]
        try:
            for index, numel in self._runs:
                found[index] = found[index].as_strided((numel,), (1,), found[index].storage_offset())
        except RuntimeError:  # adjacent, but in several storages
            return None
        return found + [tensor.parameter.grad for tensor in self._user_tensors]

    def write_back(self, optimizer: torch.optim.Optimizer) -> bool:
        """Update the user's view of the state; return False if the plan cannot be used any longer.

        New entries are added in the order of the parameters, as without local tensors, and as on other ranks, which
        have other runs.
        """
        state: State = optimizer.state
        with torch.inference_mode(False), torch.no_grad():
            stepped = [tensor for tensor in self.tensors if tensor.parameter in self.local_state]
            new_scalars = [tensor.write_back(self.local_state[tensor.parameter], self._flats) for tensor in stepped]
        members = (member for tensor in stepped for member in tensor.members)
        new = {id(m.parameter): m.state for m in members if m.parameter not in state}
        for parameter in self._parameters if new else ():
            if new.get(id(parameter)) is not None:
                state[parameter] = new[id(parameter)]
        state.update((key, value) for key, value in self.local_state.items() if not isinstance(key, torch.Tensor))
        self._facts = _Facts(optimizer)
        return not any(new_scalars)  # new scalars of runs need RunScalars

    def _member_gradients(self) -> tuple[list[Any], list[Any]]:
        """Return this rank's gradients of all members, in order, and how they lie."""
        found = [self._parameters[index].grad for index in self._indices]
        gradients: list[Any] = [g._local_tensor if type(g) is DTensor else g for g in found]
        layout: list[Any] = [[g._spec if type(g) is DTensor else None for g in found], list(map(type, gradients))]
        if any(self._distances):  # without runs, addresses do not matter
            addresses = list(map(_address_of, gradients))
            layout.append(list(map(operator.eq, map(operator.sub, addresses[1:], addresses), self._distances)))
            layout += [list(map(_stride_of, gradients)), list(map(_dtype_of, gradients))]
        return gradients, layout


class _Facts:
    """What a plan depends on beside gradients' memory: equal as long as the same objects are there.

    Args:
        optimizer: The optimizer.
    """

    __slots__ = ("_alive", "_facts")

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        groups, state = optimizer.param_groups, optimizer.state
        parameters = list(chain.from_iterable(group["params"] for group in groups))
        locals_ = [p._local_tensor if isinstance(p, DTensor) else None for p in parameters]
        entries = _entries_of(state)
        self._alive = (state, parameters, locals_, entries)  # so that no other object gets one of their ids
        self._facts = (
            [len(group["params"]) for group in groups],
            [*map(id, chain((state,), parameters, locals_, entries))],
            [p.data_ptr() for p in parameters if type(p) is torch.nn.Parameter],
            [*map(type, map(_gradient_of, parameters))],
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Facts) and self._facts == other._facts

    __hash__ = None  # type: ignore[assignment] # compared only


def _entries_of(state: State) -> list[Any]:
    """Return all entries of a state, in order."""
    try:
        return list(chain.from_iterable(map(dict.values, state.values())))
    except TypeError:  # users' own entries among them
        return [entry for own in state.values() for entry in (own.values() if isinstance(own, dict) else (own,))]


def _same_layout(gradient: DTensor, parameter: DTensor) -> bool:
    own, theirs = parameter._spec, gradient._spec
    return theirs is own or (
        theirs.placements == own.placements and gradient.shape == parameter.shape and theirs.mesh == own.mesh
    )


def _has_local_state(member: Member) -> bool:
    """Return True if all of the member's state is available as plain tensors."""
    return member.state is None or all(
        member.is_elementwise(entry) or not isinstance(entry, DTensor) for entry in member.state.values()
    )


class _ShardBuffers:
    """Finds the shard buffers that parameters lie in."""

    _known: dict[int, dict[int, torch.Tensor]]  # by unit, by sharded parameter

    def __init__(self) -> None:
        self._known = {}

    def of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the buffer that this rank's shard of a parameter lies in, without holes; None if there is none."""
        managed = managed_by(parameter)
        unit = managed.unit() if managed is not None and managed.owned else None
        if managed is None or unit is None or managed.sharded is not parameter:
            return None
        if id(unit) not in self._known:
            buffers = ((b.shard_buffer_of_optimizers, b.parameters) for b in unit.buckets)
            self._known[id(unit)] = {id(p): buffer for buffer, found in buffers if buffer is not None for p in found}
        buffer = self._known[id(unit)].get(id(managed))
        local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        if buffer is None or local.dtype is not buffer.dtype or not is_dense(tuple(local.shape), tuple(local.stride())):
            return None
        offset, whole = divmod(local.data_ptr() - buffer.data_ptr(), buffer.itemsize)
        is_there = not whole and 0 <= offset <= buffer.numel() - local.numel()
        return buffer if is_there or not local.numel() else None


def _runs_of(candidates: Sequence[_Candidate]) -> list[list[_Candidate]]:
    """Return what is stepped together, group by group, in the order in which it lies in shard buffers."""
    by_place: dict[Any, list[_Candidate]] = {}
    for candidate in candidates:
        where = candidate if candidate.buffer is None else candidate.buffer
        by_place.setdefault((candidate.group, id(where)), []).append(candidate)
    runs: list[list[_Candidate]] = []
    for found in by_place.values():
        found.sort(key=lambda c: c.offset)
        for index, candidate in enumerate(found):
            if index and _follows(found[index - 1], candidate):
                runs[-1].append(candidate)
            else:
                runs.append([candidate])
    return runs


def _follows(one: _Candidate, other: _Candidate) -> bool:
    """Return True if ``other`` may be stepped together with ``one``."""
    distance = one.distance_to(other)
    if distance is None or one.key is None or one.key != other.key:
        return False
    if one.gradient.data_ptr() + distance != other.gradient.data_ptr():
        return False
    if any(c.gradient.stride() != c.member.local.stride() for c in (one, other)):
        return False
    return one.gradient.untyped_storage().data_ptr() == other.gradient.untyped_storage().data_ptr()


def _local_tensor(run: Sequence[_Candidate]) -> LocalTensor:
    first, members = run[0], [candidate.member for candidate in run]
    local, buffer = first.member.local, first.buffer
    if len(run) > 1:
        assert buffer is not None
        numel, start = sum(member.local.numel() for member in members), int(buffer.storage_offset()) + first.offset
        return LocalTensor(first.group, members, buffer.detach().as_strided((numel,), (1,), start), flat=True)
    # State of a 0-D tensor would be taken for scalars. Not the local tensor itself, which must not get a gradient.
    flat = not local.dim()
    return LocalTensor(first.group, members, local.as_strided((1,), (1,)) if flat else local.detach(), flat=flat)


def _set_keys(candidates: Sequence[_Candidate]) -> None:
    """Set the candidates' keys: the kinds of their entries of the state, and the values of scalars."""
    scalars: list[torch.Tensor] = []
    for candidate in candidates:
        state = candidate.member.state
        described = [_describe(candidate.member, entry, scalars) for entry in (state or {}).values()]
        is_known = None not in described
        candidate.key = (state is None, [*zip(state or (), described, strict=True)]) if is_known else None
    values = _scalar_values(scalars)
    for candidate in candidates:
        if candidate.key is not None:
            named = [(name, values.get(id(kind[0]), kind[0]), *kind[1:]) for name, kind in candidate.key[1]]
            candidate.key = (candidate.key[0], named)


def _describe(member: Member, entry: Any, scalars: list[torch.Tensor]) -> tuple[Any, ...] | None:
    """Return what must be equal in members that are stepped together; None: the member must be stepped alone.

    A scalar is the first value of a tuple, and is added to ``scalars``.
    """
    if member.is_elementwise(entry):
        local = member.local_of(entry)
        return ("elementwise", local.dtype) if local.stride() == member.local.stride() else None
    if isinstance(entry, torch.Tensor):
        if type(entry) is not torch.Tensor or entry.dim() or entry.is_complex():
            return None
        scalars.append(entry)
        return (entry, entry.dtype, entry.device)
    return (type(entry), entry) if entry is None or isinstance(entry, (bool, int, float, str)) else None


def _scalar_values(scalars: Iterable[torch.Tensor]) -> dict[int, float]:
    """Return the values of scalar tensors by id, with one transfer per device."""
    alike: dict[Any, list[torch.Tensor]] = {}
    for scalar in scalars:
        alike.setdefault((scalar.device, scalar.dtype), []).append(scalar)
    values = (zip(map(id, found), torch.stack(found).tolist(), strict=True) for found in alike.values())
    return dict(chain.from_iterable(values))
