"""Plan which local tensors an optimizer steps. See [Note: Step plans]."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fullshard.engine.parameters.sharded import managed_by
from fullshard.engine.unit import Unit
from fullshard.layout.per_parameter import is_dense
from fullshard.optim.local.guards import PlanGuards, State, byte_distance
from fullshard.optim.local.local_tensors import (
    LocalTensor,
    Member,
    RunScalars,
    ShardLocation,
    StateBuffers,
    StateEntries,
    is_elementwise,
)

__all__ = ["StepPlan"]

SCALAR = "number"


class StepPlan:
    """The local tensors for a set of parameters, their gradients and state. See [Note: Step plans].

    Args:
        optimizer: The optimizer.
        buffers: State buffers of the previous plan.
        flatten: Step runs.
    """

    tensors: list[LocalTensor]
    buffers: StateBuffers
    scalars: list[RunScalars]
    initial_gradients: list[torch.Tensor]  # gradients() of the step that it was planned in; cleared after use
    local_state: defaultdict[Any, StateEntries]  # the optimizer's state, by the tensors that it steps
    _guards: PlanGuards
    _firsts: list[int]  # index of the first member of each local tensor among all members
    _runs: list[tuple[int, tuple[int]]]  # indices of the runs, and their shapes
    _user_tensors: list[LocalTensor]  # the user's own parameters

    def __init__(self, optimizer: torch.optim.Optimizer, buffers: StateBuffers, *, flatten: bool) -> None:
        groups = optimizer.param_groups
        self.buffers, self.scalars, self.local_state = buffers, [], defaultdict(dict)
        self._guards = PlanGuards(groups)
        state: State = optimizer.state
        buffers.retain(_entries_in(self._guards.parameters, state))
        with torch.inference_mode(False), torch.no_grad():
            self._plan(groups, state, flatten=flatten)
        self.note_state(optimizer)

    # ---------------------------------------------------------------- planning

    def _plan(self, groups: Sequence[Mapping[str, Any]], state: State, *, flatten: bool) -> None:
        locations = _ShardLocations()
        self.tensors, self._user_tensors, found = [], [], iter(self._guards.gradients)
        for number, group in enumerate(groups):
            members = []
            for parameter, gradient in zip(group["params"], found, strict=False):
                if gradient is None:
                    continue
                member = self._member(parameter, gradient, locations if flatten else None)
                if member is not None:
                    member.state = state.get(parameter)
                    if _has_local_state(member):
                        members.append(member)
                        continue
                member = Member(parameter, parameter, gradient, None)
                member.state = state.get(parameter)
                self._user_tensors.append(LocalTensor(number, [member], user_parameter=True))
            self.tensors += _RunBuilder(number, members).tensors
        self.initial_gradients = self._guards.record(self.tensors)
        self._firsts = [*accumulate((len(tensor.members) for tensor in self.tensors), initial=0)][:-1]
        numbered = enumerate(self.tensors)
        self._runs = [(index, (tensor.parameter.numel(),)) for index, tensor in numbered if tensor.flat]
        self.tensors += self._user_tensors
        self.local_state.update((key, value) for key, value in state.items() if not isinstance(key, torch.Tensor))
        for index, tensor in enumerate(self.tensors):
            tensor.index = index
            tensor.load_member_state(self.buffers)
            if tensor.state is not None:
                self.local_state[tensor.parameter] = tensor.state
        self._share_scalars()

    def _member(
        self, parameter: torch.Tensor, gradient: torch.Tensor, locations: _ShardLocations | None
    ) -> Member | None:
        """Return the member for a parameter; None if the parameter itself has to be stepped."""
        if type(parameter) is DTensor:
            local = parameter._local_tensor
            if type(local) is not torch.Tensor or local.layout is not torch.strided:
                return None
            if type(gradient) is not DTensor or not _same_layout(gradient, parameter):
                self._guards.stable = False
                return None
            gradient = gradient._local_tensor
            usable = type(gradient) is torch.Tensor and gradient.shape == local.shape
        else:
            # State of a 0-D parameter would be taken for scalars.
            if locations is None or type(parameter) is not torch.nn.Parameter or not parameter.dim():
                return None
            if locations.of(parameter, parameter) is None:
                return None
            local, usable = parameter.detach(), type(gradient) is torch.Tensor
        if not usable or gradient.layout is not torch.strided or gradient.device != local.device:
            self._guards.stable = False
            return None
        return Member(parameter, local, gradient, None if locations is None else locations.of(parameter, local))

    def _share_scalars(self) -> None:
        alike: dict[Any, list[LocalTensor]] = {}
        for tensor in self.tensors:
            if len(tensor.members) > 1 and tensor.state:
                for name, entry in tensor.state.items():
                    if isinstance(entry, torch.Tensor) and not entry.dim():
                        alike.setdefault((name, entry.dtype, entry.device), []).append(tensor)
        self.scalars = [RunScalars(key[0], tensors) for key, tensors in alike.items()]

    # ---------------------------------------------------------------- a step

    def note_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the entries of the user's view of the state: if others are in it later, the plan is invalid."""
        self._guards.note_state(optimizer, self.scalars)

    def gradients(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor] | None:
        """Return this rank's gradients of the members of all local tensors, in order; None if a new plan is needed."""
        return self._guards.gradients_of(optimizer)

    def local_gradients(self, gradients: Sequence[torch.Tensor]) -> list[Any] | None:
        """Return the gradients of the local tensors, in order; None if those of a run are adjacent but in several
        storages.
        """
        local_gradients: list[Any] = [gradients[first] for first in self._firsts] if self._runs else list(gradients)
        try:
            for index, shape in self._runs:
                gradient = local_gradients[index]
                local_gradients[index] = gradient.as_strided(shape, (1,), gradient.storage_offset())
        except RuntimeError:
            return None
        local_gradients += [tensor.parameter.grad for tensor in self._user_tensors]
        return local_gradients

    def register(self, optimizer: torch.optim.Optimizer, tensors: Sequence[LocalTensor]) -> None:
        """Add the new state of these local tensors' parameters to the user's view.

        In the order of the parameters, as without local tensors, and as on other ranks, which have other runs.
        """
        state: State = optimizer.state
        new = {id(m.parameter): m.state for tensor in tensors for m in tensor.members if m.parameter not in state}
        for parameter in self._guards.parameters if new else ():
            if new.get(id(parameter)) is not None:
                state[parameter] = new[id(parameter)]


def _same_layout(gradient: DTensor, parameter: DTensor) -> bool:
    own, theirs = parameter._spec, gradient._spec
    return theirs is own or (
        theirs.placements == own.placements and gradient.shape == parameter.shape and theirs.mesh == own.mesh
    )


def _has_local_state(member: Member) -> bool:
    """Return True if all of the member's state is available as plain tensors."""
    return member.state is None or all(
        is_elementwise(member, entry) or not isinstance(entry, DTensor) for entry in member.state.values()
    )


def _entries_in(parameters: Sequence[torch.Tensor], state: State) -> list[torch.Tensor]:
    """Return the local tensors in a state."""
    entries = (entry for p in parameters for entry in (state.get(p) or {}).values())
    tensors = (entry._local_tensor if isinstance(entry, DTensor) else entry for entry in entries)
    return [t for t in tensors if type(t) is torch.Tensor and t.numel() and t.dim()]


class _ShardLocations:
    """Finds the shards of parameters in shard buffers."""

    _known: dict[int, dict[int, ShardLocation]]  # by unit, by sharded parameter

    def __init__(self) -> None:
        self._known = {}

    def of(self, parameter: torch.Tensor, local: torch.Tensor) -> ShardLocation | None:
        """Return the location of ``local``, this rank's shard of the parameter."""
        managed = managed_by(parameter)
        unit = managed.unit() if managed is not None and managed.owned else None
        if managed is None or unit is None:
            return None
        locations = self._known.get(id(unit))
        if locations is None:
            locations = self._known[id(unit)] = _locations_in(unit)
        location = locations.get(id(managed))
        if location is None or managed.sharded is not parameter or not _is_dense(local):
            return None
        buffer = location.buffer
        is_there = local.data_ptr() == buffer.data_ptr() + location.offset * buffer.itemsize or not local.numel()
        return location if is_there and local.dtype is buffer.dtype else None


def _is_dense(local: torch.Tensor) -> bool:
    return is_dense(tuple(local.shape), tuple(local.stride()))


def _locations_in(unit: Unit) -> dict[int, ShardLocation]:
    locations = {}
    for bucket in unit.buckets:
        buffer = bucket.shard_buffer_of_optimizers
        if buffer is None:
            continue
        start = buffer.data_ptr()
        for parameter in bucket.parameters:
            local = parameter.local
            offset = (local.data_ptr() - start) // buffer.itemsize
            if not local.numel():
                locations[id(parameter)] = ShardLocation(buffer, -1, unit.ref)
            elif 0 <= offset <= buffer.numel() - local.numel():
                locations[id(parameter)] = ShardLocation(buffer, offset, unit.ref)
    return locations


class _RunBuilder:
    """Builds the local tensors for the members of one group.

    Args:
        group: Index of the group.
        members: Its members, in order.
    """

    tensors: list[LocalTensor]
    _group: int
    _alike: dict[int, Any]  # key by member; members with the same key may be stepped together

    def __init__(self, group: int, members: Sequence[Member]) -> None:
        self._group, self.tensors = group, []
        self._alike = _state_keys(members)
        by_buffer: dict[int, list[Member]] = {}
        for member in members:
            by_buffer.setdefault(id(member if member.location is None else member.location.buffer), []).append(member)
        for found in by_buffer.values():
            found.sort(key=lambda m: -1 if m.location is None else m.location.offset)
            run = found[:1]
            for member in found[1:]:
                if self._follows(run[-1], member):
                    run.append(member)
                else:
                    self._add(run)
                    run = [member]
            self._add(run)

    def _add(self, run: list[Member]) -> None:
        # State of a 0-D tensor would be taken for scalars.
        self.tensors.append(LocalTensor(self._group, run, flat=len(run) > 1 or not run[0].local.dim()))

    def _follows(self, one: Member, other: Member) -> bool:
        """Return True if ``other`` may be stepped together with ``one``."""
        key = self._alike[id(one)]
        if key is None or self._alike[id(other)] != key:
            return False
        if one.location is None or other.location is None:
            return False
        if not one.local.numel():  # empty shards: only their state matters
            return not other.local.numel() and one.gradient.dtype is other.gradient.dtype
        step = byte_distance(one, other)
        if step is None or one.gradient.data_ptr() + step != other.gradient.data_ptr():
            return False
        if any(m.gradient.stride() != m.local.stride() for m in (one, other)):
            return False
        return one.gradient.untyped_storage().data_ptr() == other.gradient.untyped_storage().data_ptr()


def _state_keys(members: Sequence[Member]) -> dict[int, Any]:
    """Return for each member a key that members stepped together have in common; None: it must be stepped alone."""
    scalars: list[torch.Tensor] = []
    keys: dict[int, Any] = {}
    for member in members:
        key: list[Any] | None = []
        for name, entry in (member.state or {}).items():
            described = _entry_key(member, entry, scalars)
            key = None if described is None or key is None else [*key, (name, *described)]
        keys[id(member)] = key if key is None or member.state is not None else "none"
    values = _scalar_values(scalars)
    for key in keys.values():
        if isinstance(key, list):
            key[:] = [
                (name, kind, entry.dtype, entry.device, values[id(entry)]) if kind == SCALAR else (name, kind, entry)
                for name, kind, entry in key
            ]
    return keys


def _entry_key(member: Member, entry: Any, scalars: list[torch.Tensor]) -> tuple[Any, Any] | None:
    if is_elementwise(member, entry):
        local = member.local_of(entry)
        return ("elementwise", local.dtype) if local.stride() == member.local.stride() else None
    if isinstance(entry, torch.Tensor):
        if type(entry) is not torch.Tensor or entry.dim() or entry.is_complex():
            return None
        scalars.append(entry)
        return (SCALAR, entry)
    if entry is None or isinstance(entry, (bool, int, float, str)):
        return (type(entry), entry)
    return None


def _scalar_values(scalars: Iterable[torch.Tensor]) -> dict[int, float]:
    """Return the values of scalar tensors by id, with one transfer per device."""
    alike: dict[Any, list[torch.Tensor]] = {}
    for number in scalars:
        alike.setdefault((number.device, number.dtype), []).append(number)
    values = {}
    for found in alike.values():
        for number, value in zip(found, torch.stack(found).tolist(), strict=True):
            values[id(number)] = value
    return values
