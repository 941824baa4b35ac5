"""Which pieces an optimizer steps. See [Note: Plans of pieces]."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fullshard.engine.bucket import BufferBucket
from fullshard.engine.flat_bucket import FlatBucket
from fullshard.engine.parameter import managed_by
from fullshard.engine.unit import Unit
from fullshard.layout.per_parameter import is_dense
from fullshard.optim.local_basis import Basis, State, step_to
from fullshard.optim.local_pieces import Entries, Homes, Member, Piece, Place, RunNumbers, is_elementwise

__all__ = ["Plan"]

NUMBER = "number"


class Plan:
    """The pieces for a set of parameters, their gradients and state. See [Note: Plans of pieces].

    Args:
        optimizer: Whose.
        homes: Of the plan before.
        flatten: Whether to step runs.
    """

    pieces: list[Piece]
    homes: Homes
    numbers: list[RunNumbers]
    fresh: list[torch.Tensor]  # the gradients that it was planned with, as of gradients(); whoever takes them clears it
    local_state: defaultdict[Any, Entries]  # what the optimizer keeps, by the tensors that it steps
    _basis: Basis
    _firsts: list[int]  # the first member of each local piece among all
    _runs: list[tuple[int, tuple[int]]]  # indices of the runs, and their shapes
    _own: list[Piece]  # those that are the user's own parameters

    def __init__(self, optimizer: torch.optim.Optimizer, homes: Homes, *, flatten: bool) -> None:
        groups = optimizer.param_groups
        self.homes, self.numbers, self.local_state = homes, [], defaultdict(dict)
        self._basis = Basis(groups)
        state: State = optimizer.state
        homes.keep(_entries_in(self._basis.parameters, state))
        with torch.inference_mode(False), torch.no_grad():
            self._plan(groups, state, flatten=flatten)
        self.look(optimizer)

    # ---------------------------------------------------------------- planning

    def _plan(self, groups: Sequence[Mapping[str, Any]], state: State, *, flatten: bool) -> None:
        places = _Places()
        self.pieces, self._own, found = [], [], iter(self._basis.gradients)
        for number, group in enumerate(groups):
            members = []
            for parameter, gradient in zip(group["params"], found, strict=False):
                if gradient is None:
                    continue
                member = self._member(parameter, gradient, places if flatten else None)
                if member is not None:
                    member.state = state.get(parameter)
                    if _is_local(member):
                        members.append(member)
                        continue
                member = Member(parameter, parameter, gradient, None)
                member.state = state.get(parameter)
                self._own.append(Piece(number, [member], own=True))
            self.pieces += _Runs(number, members).pieces
        self.fresh = self._basis.note(self.pieces)
        self._firsts = [*accumulate((len(piece.members) for piece in self.pieces), initial=0)][:-1]
        numbered = enumerate(self.pieces)
        self._runs = [(index, (piece.parameter.numel(),)) for index, piece in numbered if piece.flat]
        self.pieces += self._own
        self.local_state.update((key, value) for key, value in state.items() if not isinstance(key, torch.Tensor))
        for index, piece in enumerate(self.pieces):
            piece.index = index
            piece.adopt(self.homes)
            if piece.state is not None:
                self.local_state[piece.parameter] = piece.state
        self._share_numbers()

    def _member(self, parameter: torch.Tensor, gradient: torch.Tensor, places: _Places | None) -> Member | None:
        """None: it has to be stepped as it is."""
        if type(parameter) is DTensor:
            local = parameter._local_tensor
            if type(local) is not torch.Tensor or local.layout is not torch.strided:
                return None
            if type(gradient) is not DTensor or not _same_layout(gradient, parameter):
                self._basis.settled = False
                return None
            gradient = gradient._local_tensor
            usable = type(gradient) is torch.Tensor and gradient.shape == local.shape
        else:
            # One without dims would be taken for a number among the entries of its state.
            if places is None or type(parameter) is not torch.nn.Parameter or not parameter.dim():
                return None
            if places.of(parameter, parameter) is None:
                return None
            local, usable = parameter.detach(), type(gradient) is torch.Tensor
        if not usable or gradient.layout is not torch.strided or gradient.device != local.device:
            self._basis.settled = False
            return None
        return Member(parameter, local, gradient, None if places is None else places.of(parameter, local))

    def _share_numbers(self) -> None:
        alike: dict[Any, list[Piece]] = {}
        for piece in self.pieces:
            if len(piece.members) > 1 and piece.state:
                for name, entry in piece.state.items():
                    if isinstance(entry, torch.Tensor) and not entry.dim():
                        alike.setdefault((name, entry.dtype, entry.device), []).append(piece)
        self.numbers = [RunNumbers(key[0], pieces) for key, pieces in alike.items()]

    # ---------------------------------------------------------------- a step

    def look(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the user's view of the state: from now on, other objects in it are somebody else's doing."""
        self._basis.look(optimizer, self.numbers)

    def gradients(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor] | None:
        """This rank's gradients of the members of local pieces, in order; None: a new plan is needed."""
        return self._basis.gradients_of(optimizer)

    def take(self, gradients: Sequence[torch.Tensor]) -> list[Any] | None:
        """The gradients of the pieces, in order. None: those of a run lie in several memories, if side by side."""
        taken: list[Any] = [gradients[first] for first in self._firsts] if self._runs else list(gradients)
        try:
            for index, shape in self._runs:
                gradient = taken[index]
                taken[index] = gradient.as_strided(shape, (1,), gradient.storage_offset())
        except RuntimeError:
            return None
        taken += [piece.parameter.grad for piece in self._own]
        return taken

    def register(self, optimizer: torch.optim.Optimizer, pieces: Sequence[Piece]) -> None:
        """Put what the parameters of these pieces have as state into the user's view, as far as it is not there.

        In the order of the parameters, as without pieces and as on other ranks, which have others.
        """
        state: State = optimizer.state
        new = {id(m.parameter): m.state for piece in pieces for m in piece.members if m.parameter not in state}
        for parameter in self._basis.parameters if new else ():
            if new.get(id(parameter)) is not None:
                state[parameter] = new[id(parameter)]


def _same_layout(gradient: DTensor, parameter: DTensor) -> bool:
    own, theirs = parameter._spec, gradient._spec
    return theirs is own or (
        theirs.placements == own.placements and gradient.shape == parameter.shape and theirs.mesh == own.mesh
    )


def _is_local(member: Member) -> bool:
    """Whether all of its state can be had as plain tensors."""
    return member.state is None or all(
        is_elementwise(member, entry) or not isinstance(entry, DTensor) for entry in member.state.values()
    )


def _entries_in(parameters: Sequence[torch.Tensor], state: State) -> list[torch.Tensor]:
    """The local tensors in a state."""
    entries = (entry for p in parameters for entry in (state.get(p) or {}).values())
    tensors = (entry._local_tensor if isinstance(entry, DTensor) else entry for entry in entries)
    return [t for t in tensors if type(t) is torch.Tensor and t.numel() and t.dim()]


class _Places:
    """Finds parameters in shard buffers."""

    _known: dict[int, dict[int, Place]]  # by unit, by sharded parameter

    def __init__(self) -> None:
        self._known = {}

    def of(self, parameter: torch.Tensor, local: torch.Tensor) -> Place | None:
        """Where ``local``, this rank's part of the parameter, lies."""
        managed = managed_by(parameter)
        unit = managed.unit() if managed is not None and managed.owned else None
        if managed is None or unit is None:
            return None
        places = self._known.get(id(unit))
        if places is None:
            places = self._known[id(unit)] = _places_in(unit)
        place = places.get(id(managed))
        if place is None or managed.sharded is not parameter or not _is_dense(local):
            return None
        buffer = place.buffer
        lies = local.data_ptr() == buffer.data_ptr() + place.offset * buffer.itemsize or not local.numel()
        return place if lies and local.dtype is buffer.dtype else None


def _is_dense(local: torch.Tensor) -> bool:
    return is_dense(tuple(local.shape), tuple(local.stride()))


def _places_in(unit: Unit) -> dict[int, Place]:
    places = {}
    for bucket in unit.buckets:
        if not isinstance(bucket, (BufferBucket, FlatBucket)) or getattr(bucket, "home", None) is not None:
            continue
        buffer = bucket.shard_buffer
        start = buffer.data_ptr()
        for parameter in bucket.parameters:
            local = parameter.local
            offset = (local.data_ptr() - start) // buffer.itemsize
            if not local.numel():
                places[id(parameter)] = Place(buffer, -1, unit.ref)
            elif 0 <= offset <= buffer.numel() - local.numel():
                places[id(parameter)] = Place(buffer, offset, unit.ref)
    return places


class _Runs:
    """Finds the pieces of the members of one group.

    Args:
        group: Its index.
        members: In the order of the group.
    """

    pieces: list[Piece]
    _group: int
    _alike: dict[int, Any]  # what may be stepped together has the same, by member

    def __init__(self, group: int, members: Sequence[Member]) -> None:
        self._group, self.pieces = group, []
        self._alike = _state_keys(members)
        by_buffer: dict[int, list[Member]] = {}
        for member in members:
            by_buffer.setdefault(id(member if member.place is None else member.place.buffer), []).append(member)
        for found in by_buffer.values():
            found.sort(key=lambda m: -1 if m.place is None else m.place.offset)
            run = found[:1]
            for member in found[1:]:
                if self._follows(run[-1], member):
                    run.append(member)
                else:
                    self._add(run)
                    run = [member]
            self._add(run)

    def _add(self, run: list[Member]) -> None:
        # A tensor without dims would be taken for a number among the state's entries.
        self.pieces.append(Piece(self._group, run, flat=len(run) > 1 or not run[0].local.dim()))

    def _follows(self, one: Member, other: Member) -> bool:
        """Whether ``other`` may be stepped together with ``one``."""
        key = self._alike[id(one)]
        if key is None or self._alike[id(other)] != key:
            return False
        if one.place is None or other.place is None:
            return False
        if not one.local.numel():  # they have nothing here but their state
            return not other.local.numel() and one.gradient.dtype is other.gradient.dtype
        step = step_to(one, other)
        if step is None or one.gradient.data_ptr() + step != other.gradient.data_ptr():
            return False
        if any(m.gradient.stride() != m.local.stride() for m in (one, other)):
            return False
        return one.gradient.untyped_storage().data_ptr() == other.gradient.untyped_storage().data_ptr()


def _state_keys(members: Sequence[Member]) -> dict[int, Any]:
    """By member, what the state of those that are stepped together must have in common; None: nothing will do."""
    numbers: list[torch.Tensor] = []
    keys: dict[int, Any] = {}
    for member in members:
        key: list[Any] | None = []
        for name, entry in (member.state or {}).items():
            described = _described(member, entry, numbers)
            key = None if described is None or key is None else [*key, (name, *described)]
        keys[id(member)] = key if key is None or member.state is not None else "none"
    values = _values(numbers)
    for key in keys.values():
        if isinstance(key, list):
            key[:] = [
                (name, kind, entry.dtype, entry.device, values[id(entry)]) if kind == NUMBER else (name, kind, entry)
                for name, kind, entry in key
            ]
    return keys


def _described(member: Member, entry: Any, numbers: list[torch.Tensor]) -> tuple[Any, Any] | None:
    if is_elementwise(member, entry):
        local = member.local_of(entry)
        return ("elementwise", local.dtype) if local.stride() == member.local.stride() else None
    if isinstance(entry, torch.Tensor):
        if type(entry) is not torch.Tensor or entry.dim() or entry.is_complex():
            return None
        numbers.append(entry)
        return (NUMBER, entry)
    if entry is None or isinstance(entry, (bool, int, float, str)):
        return (type(entry), entry)
    return None


def _values(numbers: Iterable[torch.Tensor]) -> dict[int, float]:
    """Of tensors with one number each, by id: from each device at once."""
    alike: dict[Any, list[torch.Tensor]] = {}
    for number in numbers:
        alike.setdefault((number.device, number.dtype), []).append(number)
    values = {}
    for found in alike.values():
        for number, value in zip(found, torch.stack(found).tolist(), strict=True):
            values[id(number)] = value
    return values
