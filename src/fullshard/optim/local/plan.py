"""Plan which local tensors an optimizer steps, and find out cheaply whether the plan is still valid.

[Note: Step plans]
A plan is valid as long as all parameters and state entries are the same objects and gradients lie in the same way.
Checking that costs a fraction of what the plan saves: it is done for all parameters at once, by ``map`` over lists,
without a loop in Python. Plans are local to a rank, and no collective depends on them: ranks may have other
local tensors.

[Note: Vectors of CPU kernels]
A CPU kernel processes elements in vectors, and those that are left at the end of a tensor one by one, which may round
otherwise: fused kernels contract a multiplication and an addition differently, and in bf16 and fp16 intermediate
results are kept in fp32 or not. A step has the same bits as one of single parameters, so parameters are stepped
together only where no vector crosses from one to the next. Fused kernels begin a vector at every 64 bytes of a tensor,
also where threads divide it. Kernels of bf16 and fp16 are divided among threads anywhere, so there each parameter is
stepped alone. Other kernels of fp32 and fp64, and those of accelerators, round all elements alike.

[Note: Temporary memory of loops]
Neither ``foreach`` nor ``fused``, torch steps tensor by tensor, with temporaries of the size of one. So that a step
needs no more memory than one of DTensors, parameters are stepped together only up to the size of the largest one, or up
to 1 MiB, where a tensor for each parameter would cost more time than memory.

Shards without elements, of which a rank has many with the ragged layout, are stepped as one empty tensor.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, starmap
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.engine.parameters.ragged_tensor import SHARDED_TYPES
from fullshard.engine.parameters.sharded import managed_by
from fullshard.engine.unit import Unit
from fullshard.layout.per_parameter import is_dense
from fullshard.optim.local.local_tensors import FlatStates, LocalTensor, Member, ScalarState, StateEntries

__all__ = ["StepPlan", "local_of", "owning_unit"]

VECTOR = 64  # bytes of the widest vector
LOOP_BYTES = 2**20  # of parameters that a loop may step together even if none is as large

State = dict[Any, Any]  # state of an optimizer: entries by parameter

_address_of = torch.Tensor.data_ptr
_stride_of = torch.Tensor.stride
_dtype_of = operator.attrgetter("dtype")
_requires_grad_of = operator.attrgetter("requires_grad")


class StepPlan:
    """The local tensors for a set of parameters, their gradients and state. See [Note: Step plans].

    Args:
        optimizer: The optimizer.
        flats: Flat tensors of the state of earlier plans.
    """

    tensors: list[LocalTensor]
    local_state: defaultdict[Any, StateEntries]  # the optimizer's state, by the tensors that it steps
    _flats: FlatStates
    _scalars: list[ScalarState]
    _written: tuple[list[Any], list[Any]]  # names, and entries, of the local state at the last write-back
    _parameters: list[torch.Tensor]  # of all groups
    _indices: list[int]  # of the parameters that are members of plain local tensors, among all
    _shards: list[torch.Tensor]  # of those: plain, or local tensors; users may replace their memory
    _first_members: list[int]  # the first member of each plain local tensor, among the members
    _distances: list[int | None]  # bytes from each member's gradient to the next, if both may be stepped together
    _dependencies: list[Any]  # that the plan depends on
    _slices: list[torch.Tensor]  # the user's view of the state of flat tensors, on the memory of the optimizer's
    _addresses: list[int]  # of the slices
    _types: list[type]  # of all gradients
    _layout: list[Any]  # of the members' gradients

    def __init__(self, optimizer: torch.optim.Optimizer, flats: FlatStates) -> None:
        groups, state = optimizer.param_groups, optimizer.state
        self._flats, self._parameters = flats, [p for group in groups for p in group["params"]]
        with torch.inference_mode(False), torch.no_grad():
            found, others = _candidates(groups, state)
            self._indices = [candidate.index for candidate in found]
            self._shards = [local_of(self._parameters[index]) for index in self._indices]
            self._distances = list(starmap(_Candidate.distance_to, pairwise(found)))
            self._first_members = _first_members(found, groups)
            ends = [*self._first_members[1:], len(found)]
            plain = [_local_tensor(found[first:end]) for first, end in zip(self._first_members, ends, strict=False)]
            self.tensors = plain + others
            self._load_state(state)
        all_gradients = [parameter.grad for parameter in self._parameters]
        self._types = [*map(type, all_gradients)]
        self._layout = self._local(all_gradients)[1]
        self._depend_on(optimizer)

    def _load_state(self, state: State) -> None:
        self.local_state, self._written = defaultdict(dict), ([], [])
        self.local_state.update(_shared_entries(state))
        for tensor in self.tensors:
            loaded = tensor.load_state(self._flats)
            if loaded is not None:
                self.local_state[tensor.parameter] = loaded
        self._share_scalars()

    def _share_scalars(self) -> None:
        alike: dict[Any, list[LocalTensor]] = {}
        for tensor in self.tensors:
            if len(tensor.members) > 1:
                for name, entry in self.local_state.get(tensor.parameter, {}).items():
                    if isinstance(entry, torch.Tensor) and not entry.dim():
                        alike.setdefault((name, entry.dtype, entry.device), []).append(tensor)
        self._scalars = [
            ScalarState(name, tensors, [self.local_state[tensor.parameter] for tensor in tensors])
            for (name, *_), tensors in alike.items()
        ]

    # ---------------------------------------------------------------- a step

    def begin(self, optimizer: torch.optim.Optimizer) -> bool:
        """Set the local tensors' gradients; return False if a new plan is needed instead."""
        objects = _dependencies(optimizer)
        if len(objects) != len(self._dependencies) or not all(map(operator.is_, objects, self._dependencies)):
            return False
        if list(map(_address_of, self._slices)) != self._addresses or not all(
            scalars.begin() for scalars in self._scalars
        ):
            return False
        all_gradients = [parameter.grad for parameter in self._parameters]
        if list(map(type, all_gradients)) != self._types:
            return False
        try:
            gradients, layout = self._local(all_gradients)
            if layout != self._layout:
                return False
            for tensor, first in zip(self.tensors, self._first_members, strict=False):  # the plain ones come first
                tensor.set_gradient(gradients[first])
        except RuntimeError:  # gradients that are sparse, or adjacent but in several storages
            return False
        return True

    def finish(self, optimizer: torch.optim.Optimizer) -> None:
        """Clear the local tensors' gradients and update the user's view of the state.

        New entries are added in the order of the parameters, as without local tensors, and as on other ranks, which
        may have other local tensors.
        """
        for tensor in self.tensors[: len(self._first_members)]:
            tensor.parameter.grad = None
        for scalars in self._scalars:
            scalars.write_back()
        state, shared = optimizer.state, _shared_entries(self.local_state)
        if not shared and self._is_written():
            return
        with torch.inference_mode(False), torch.no_grad():
            stepped = [tensor for tensor in self.tensors if tensor.parameter in self.local_state]
            is_new = [tensor.write_back(self.local_state[tensor.parameter], self._flats) for tensor in stepped]
            if any(is_new):
                self._share_scalars()
        self._written = ([], []) if shared else self._contents()
        if not any(is_new) and not shared:
            return
        states = {id(member.parameter): member.state for tensor in stepped for member in tensor.members}
        for parameter in self._parameters:
            if parameter not in state and states.get(id(parameter)) is not None:
                state[parameter] = states[id(parameter)]
        state.update(shared)
        self._depend_on(optimizer)

    def _depend_on(self, optimizer: torch.optim.Optimizer) -> None:
        """Note what the optimizer consists of now."""
        self._dependencies = _dependencies(optimizer)
        members = (member for tensor in self.tensors if tensor.is_flat for member in tensor.members)
        entries = (entry for member in members for entry in (member.state or {}).values())
        self._slices = [local_of(entry) for entry in entries if isinstance(entry, torch.Tensor)]
        self._addresses = list(map(_address_of, self._slices))

    def _contents(self) -> tuple[list[Any], list[Any]]:
        names = chain.from_iterable((*own, None) for own in self.local_state.values())
        return list(names), _entries_of(self.local_state)

    def _is_written(self) -> bool:
        """Return True if no entry of the local state is new since the last write-back."""
        (names, entries), (known_names, known) = self._contents(), self._written
        return names == known_names and len(entries) == len(known) and all(map(operator.is_, entries, known))

    def _local(self, all_gradients: Sequence[torch.Tensor | None]) -> tuple[list[Any], list[Any]]:
        """Return the members' local gradients, given the gradients of all parameters, and how they lie."""
        found: list[Any] = [all_gradients[index] for index in self._indices]
        gradients: list[Any] = [g._local_tensor if type(g) in SHARDED_TYPES else g for g in found]
        addresses = list(map(_address_of, gradients))
        layout = [
            list(map(_address_of, self._shards)),
            list(map(_requires_grad_of, self._parameters)),
            list(map(type, gradients)),
            [g._spec if type(g) in SHARDED_TYPES else None for g in found],
            list(map(_dtype_of, gradients)),
            list(map(_stride_of, gradients)),
            list(map(operator.eq, map(operator.sub, addresses[1:], addresses), self._distances)),
        ]
        return gradients, layout


@dataclass(slots=True, eq=False)
class _Candidate:
    """A member of a plain local tensor, while the plan is made.

    Args:
        member: The member.
        group: Index of its group.
        index: Index of its parameter among all.
        gradient: This rank's shard of its gradient, plain.
        buffer: The shard buffer that its shard lies in; None: it is not stepped together with others.
        offset: Where it lies there, in elements.
        key: Equal in members that may be stepped together.
        whole: Bytes that the shard must be a multiple of to be followed by another. See [Note: Vectors of CPU kernels].
    """

    member: Member
    group: int
    index: int
    gradient: torch.Tensor
    buffer: torch.Tensor | None
    offset: int
    key: Any
    whole: int

    @property
    def nbytes(self) -> int:
        """Bytes of the shard."""
        return self.member.local.nbytes

    def distance_to(self, other: _Candidate) -> int | None:
        """Return the bytes from this gradient to the other's if both could be stepped together; None otherwise."""
        numel = self.member.local.numel()
        if self.buffer is None or other.buffer is not self.buffer or other.offset != self.offset + numel:
            return None
        if numel * self.member.local.itemsize % self.whole:
            return None
        alike = self.key == other.key and self.gradient.dtype is other.gradient.dtype
        return numel * self.gradient.itemsize if alike and numel and other.member.local.numel() else None

    def continues_in(self, other: _Candidate) -> bool:
        """Return True if the other is stepped together with this one: it follows in memory, or both are empty."""
        one, two = self.member.local, other.member.local
        if not one.numel() and not two.numel():
            alike = self.key == other.key and self.gradient.dtype is other.gradient.dtype
            return alike and (one.dtype, one.device) == (two.dtype, two.device)
        distance = self.distance_to(other)
        if distance is None or self.gradient.data_ptr() + distance != other.gradient.data_ptr():
            return False
        return self.gradient.untyped_storage().data_ptr() == other.gradient.untyped_storage().data_ptr()


def _candidates(groups: Sequence[Mapping[str, Any]], state: State) -> tuple[list[_Candidate], list[LocalTensor]]:
    """Return the parameters with gradients: the plain ones, group by group in the order in which they lie in shard
    buffers, and local tensors for those that are stepped as they are.
    """
    numbered = [(number, parameter) for number, group in enumerate(groups) for parameter in group["params"]]
    buffers = _shard_buffers(parameter for _, parameter in numbered)
    scalars = _scalar_values(state)
    count = Counter(id(parameter) for _, parameter in numbered)
    found: list[_Candidate] = []
    others: list[LocalTensor] = []
    for index, (number, parameter) in enumerate(numbered):
        if parameter.grad is None:
            continue
        buffer, entries = buffers.get(id(parameter)), state.get(parameter)
        pair = _local_shards(parameter, parameter.grad, is_placed=buffer is not None)
        member = Member(parameter, parameter if pair is None else pair[0], entries)
        if pair is None or not _has_local_state(member) or count[id(parameter)] > 1:  # the second step goes on with it
            others.append(LocalTensor(number, [member], parameter))
            continue
        offset, key = 0, (number, parameter.requires_grad, entries is None, _describe(member, scalars))
        if buffer is not None:
            offset, rest = divmod(pair[0].data_ptr() - buffer.data_ptr(), buffer.itemsize)
            is_there = pair[0].dtype is buffer.dtype and not rest and 0 <= offset <= buffer.numel() - pair[0].numel()
            buffer = buffer if is_there and (pair[0].device.type != "cpu" or pair[0].itemsize > 2) else None
        whole = VECTOR if pair[0].device.type == "cpu" and groups[number].get("fused") else 1
        found.append(_Candidate(member, number, index, pair[1], buffer, offset, key, whole))
    places: dict[int, int] = {}
    for candidate in found:
        places.setdefault(id(candidate.buffer), len(places))
    return sorted(found, key=lambda c: (c.group, not c.nbytes, places[id(c.buffer)], c.offset)), others


def _first_members(found: Sequence[_Candidate], groups: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return where local tensors begin among the candidates. See [Note: Temporary memory of loops]."""
    largest = [LOOP_BYTES] * len(groups)
    for candidate in found:
        largest[candidate.group] = max(largest[candidate.group], candidate.nbytes)
    first: list[int] = []
    together = 0
    for index, candidate in enumerate(found):
        together += candidate.nbytes
        is_loop = _is_loop(groups[candidate.group], candidate.member.local.device)
        fits = not is_loop or together <= largest[candidate.group]
        if not index or not fits or not found[index - 1].continues_in(candidate):
            first.append(index)
            together = candidate.nbytes
    return first


def _is_loop(group: Mapping[str, Any], device: torch.device) -> bool:
    """Return True if torch steps the tensors of a group one by one: the default only on the CPU."""
    if group.get("fused") or group.get("foreach"):
        return False
    return device.type == "cpu" or "foreach" not in group or group["foreach"] is False


def local_of(entry: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor, and any other tensor itself."""
    return entry._local_tensor if isinstance(entry, DTensor) else entry


def _local_shards(
    parameter: torch.Tensor, gradient: torch.Tensor, *, is_placed: bool
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return this rank's shards of a parameter and its gradient; None if the parameter itself has to be stepped.

    Plain parameters are returned only if they are placed in a shard buffer, where they may be adjacent to others.
    """
    if isinstance(parameter, DTensor) and type(parameter) in SHARDED_TYPES:
        same_type = isinstance(gradient, DTensor) and type(gradient) is type(parameter)
        if not same_type or not _same_placement(cast("DTensor", gradient), parameter):
            return None
        local, gradient = parameter._local_tensor, local_of(gradient)
    elif type(parameter) is nn.Parameter and is_placed and parameter.dim():  # 0-D: its state looks like scalars
        local = parameter.detach()
    else:
        return None
    if any(type(each) is not torch.Tensor or each.layout is not torch.strided for each in (local, gradient)):
        return None
    is_alike = gradient.shape == local.shape and gradient.device == local.device and _same_order(gradient, local)
    return (local, gradient) if is_alike else None


def _same_placement(gradient: DTensor, parameter: DTensor) -> bool:
    own, theirs = parameter._spec, gradient._spec
    return theirs is own or (
        theirs.placements == own.placements and gradient.shape == parameter.shape and theirs.mesh == own.mesh
    )


def _same_order(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if the elements of two tensors of one shape lie in the same order, without holes."""
    if not is_dense(tuple(one.shape), tuple(one.stride())):
        return False
    sizes = zip(one.shape, one.stride(), other.stride(), strict=True)
    return not one.numel() or all(stride == theirs for size, stride, theirs in sizes if size != 1)


def _has_local_state(member: Member) -> bool:
    """Return True if all of the member's state is there for local tensors: as their elements, or as numbers.

    Another plain tensor may be the state of the unsharded parameter, of which a fused kernel would take the beginning.
    """
    entries = [] if member.state is None else [e for e in member.state.values() if isinstance(e, torch.Tensor)]
    plain_number = (not isinstance(entry, DTensor) and not entry.dim() for entry in entries)
    return all(number or member.is_elementwise(entry) for number, entry in zip(plain_number, entries, strict=True))


def _describe(member: Member, scalars: Mapping[int, float]) -> list[Any]:
    """Return what must be equal in the state of members that are stepped together."""
    described: list[Any] = []
    for name, entry in (member.state or {}).items():
        if member.is_elementwise(entry):
            described.append((name, entry.dtype))
        elif id(entry) in scalars:
            described.append((name, scalars[id(entry)], entry.dtype, entry.device))
        elif entry is None or isinstance(entry, (bool, int, float, str)):
            described.append((name, type(entry), entry))
        else:
            described.append(object())  # equal to nothing: the member is stepped alone
    return described


def _scalar_values(state: State) -> dict[int, float]:
    """Return the values of scalar tensors of the state by id, with one transfer per device."""
    alike: dict[Any, list[torch.Tensor]] = {}
    for entry in _entries_of(state):
        if type(entry) is torch.Tensor and not entry.dim() and not entry.is_complex():
            alike.setdefault((entry.device, entry.dtype), []).append(entry)
    values = (zip(map(id, found), torch.stack(found).tolist(), strict=True) for found in alike.values())
    return dict(chain.from_iterable(values))


def _shard_buffers(parameters: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return the shard buffers that parameters of units lie in, by the parameters' ids."""
    units = {id(unit): unit for unit in map(owning_unit, parameters) if unit is not None}
    buckets = (bucket for unit in units.values() for bucket in unit.buckets)
    buffers = ((bucket.shard_buffer_of_optimizers, bucket.parameters) for bucket in buckets)
    return {id(each.sharded): buffer for buffer, found in buffers if buffer is not None for each in found}


def owning_unit(parameter: torch.Tensor) -> Unit | None:
    """Return the unit that a parameter belongs to; None for others."""
    managed = managed_by(parameter)
    unit: Unit | None = managed.unit() if managed is not None and managed.owned else None
    return unit


def _local_tensor(candidates: Sequence[_Candidate]) -> LocalTensor:
    first, members = candidates[0], [candidate.member for candidate in candidates]
    numel = sum(member.local.numel() for member in members)
    if len(candidates) == 1:
        local = first.member.local
        stepped = local.detach() if local.dim() else local.detach().as_strided((1,), (1,))
    elif not numel:
        stepped = first.member.local.new_empty(0)
    else:
        assert first.buffer is not None
        start = int(first.buffer.storage_offset()) + first.offset
        stepped = first.buffer.detach().as_strided((numel,), (1,), start)
    return LocalTensor(first.group, members, stepped.requires_grad_(first.member.parameter.requires_grad))


def _dependencies(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the objects that a plan depends on, to be compared by identity."""
    groups, state = optimizer.param_groups, optimizer.state
    parameters = list(chain.from_iterable((*group["params"], None) for group in groups))
    locals_ = [parameter._local_tensor for parameter in parameters if isinstance(parameter, DTensor)]
    keys_and_values = chain.from_iterable(state.items())  # of all parameters: the dictionaries of their entries
    implementations = (group.get(name) for group in groups for name in ("fused", "foreach"))
    return [state, *implementations, *parameters, *locals_, *keys_and_values, *_entries_of(state)]


def _entries_of(state: State) -> list[Any]:
    """Return all entries of a state, in order."""
    try:
        return list(chain.from_iterable(map(dict.values, state.values())))
    except TypeError:  # users' own entries among them
        return [entry for own in state.values() for entry in (own.values() if isinstance(own, dict) else (own,))]


def _shared_entries(state: State) -> State:
    """Return the entries of a state that belong to no parameter."""
    return {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}
