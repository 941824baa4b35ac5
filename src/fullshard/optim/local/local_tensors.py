"""Flat plain tensors that an optimizer steps in place of sharded parameters, on the same memory, and their state.

[Note: Local tensors]
A *local tensor* is one plain tensor that an optimizer steps. It is this rank's shard of one parameter, or the
shards of several parameters that are adjacent in a shard buffer, and whose gradients are adjacent as well, without
gaps. A gap between two gradients must not be written to (some optimizers write to gradients): it may contain another
gradient, or other data of the user. The shards of several parameters are one 1-D tensor, which makes no difference to
an elementwise optimizer; so is that of a 0-D parameter, whose state would look like scalars. That of any other single
parameter has its shape, so that a step makes no views of its gradient.

The optimizer's state for a local tensor is plain and of its shape; the user's view of it, in ``optimizer.state``, are
DTensors on the same memory. So the user's view is always correct and complete, and local tensors can be rebuilt from it
whenever something has changed. Scalars beside the elementwise entries (``step``) exist once per local tensor, and once
per parameter in the user's view: other optimizers, which may load that state, update each of them (``ScalarState``).

What cannot be stepped like that (sparse gradients, gradients that lie otherwise than the parameter, tensor subclasses,
state of other shapes) is stepped as it is: its local tensor is the user's parameter itself.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils.weak import WeakTensorKeyDictionary

from fullshard.engine.parameters.placement import dtensor_like
from fullshard.engine.parameters.ragged_tensor import SHARDED_TYPES, RaggedDTensor
from fullshard.memory import own_storage

__all__ = ["FlatStates", "LocalTensor", "Member", "ScalarState", "StateEntries"]

StateEntries = dict[Any, Any]  # state of one parameter or local tensor, by name


@dataclass(slots=True, eq=False)
class Member:
    """One parameter during a step.

    Args:
        parameter: The user's parameter.
        local: Its local tensor, plain; the parameter itself if that is stepped.
        state: Its state in the user's view; None: there is none yet.
    """

    parameter: torch.Tensor
    local: torch.Tensor
    state: StateEntries | None

    @property
    def spec(self) -> DTensorSpec | None:
        """Spec of the parameter; None if that is plain."""
        return self.parameter._spec if isinstance(self.parameter, DTensor) else None

    def view(self, flat: torch.Tensor, offset: int) -> torch.Tensor:
        """Return this member's part of a flat tensor, which begins at ``offset``, in the shape of its local tensor."""
        return flat.as_strided(self.local.shape, self.local.stride(), int(flat.storage_offset()) + offset)

    def as_user_entry(self, local: torch.Tensor) -> torch.Tensor:
        """Return an elementwise entry of the state as users see it, on the memory of ``local``."""
        return dtensor_like(local, self.parameter) if isinstance(self.parameter, DTensor) else local

    def is_elementwise(self, entry: Any) -> bool:
        """Return True if an entry of the user's view has one element for each of the parameter's."""
        if not isinstance(entry, torch.Tensor):
            return False
        if self.spec is None:
            return type(entry) is torch.Tensor and entry.shape == self.local.shape and entry.dim() > 0
        return (
            isinstance(entry, DTensor)
            and type(entry) in SHARDED_TYPES
            and isinstance(entry, RaggedDTensor) is isinstance(self.parameter, RaggedDTensor)
            and entry.placements == self.spec.placements
            and entry.shape == self.parameter.shape
            and type(entry._local_tensor) is torch.Tensor
            and entry._local_tensor.shape == self.local.shape
        )


class FlatStates:
    """Flat tensors of the state of local tensors, found by the members' entries, which are slices of them."""

    _slices: Any  # by the local tensor of an entry: the flat tensor and the offset in it

    def __init__(self) -> None:
        self._slices = WeakTensorKeyDictionary()

    def split(self, flat: torch.Tensor, tensor: LocalTensor) -> list[torch.Tensor]:
        """Return the members' slices of a flat tensor, each with a storage of its own on the same memory: who copies or
        pickles one entry copies no other.
        """
        slices = []
        for member, offset in zip(tensor.members, tensor.offsets, strict=True):
            found = member.view(flat, offset)
            if found.storage_offset() or found.untyped_storage().nbytes() > found.numel() * found.itemsize:
                found = own_storage(found)
            self._slices[found] = (flat, offset)
            slices.append(found)
        return slices

    def flat_of(self, slices: Sequence[torch.Tensor], tensor: LocalTensor) -> torch.Tensor | None:
        """Return the part of a flat tensor that has ``slices`` as the members' slices; None if there is none, also if
        a slice was given other memory.
        """
        flat, start = self._slices.get(slices[0], (None, 0))
        expected = [(id(flat), start + offset) for offset in tensor.offsets]
        found = [self._slices.get(each, (None, 0)) for each in slices]
        if flat is None or [(id(each), offset) for each, offset in found] != expected:
            return None
        part: torch.Tensor = flat.narrow(0, start, tensor.parameter.numel())
        addresses = [part.data_ptr() + offset * part.itemsize for offset in tensor.offsets]
        if addresses != [each.data_ptr() for each in slices]:
            return None
        return part


class LocalTensor:
    """A plain tensor that an optimizer steps. See [Note: Local tensors].

    Args:
        group: Index of the parameters' group in the optimizer.
        members: The parameters in it, by address.
        parameter: The tensor that is stepped: the members' shards as one flat tensor, or the only member's shard or
            parameter.
    """

    group: int
    members: list[Member]
    parameter: torch.Tensor
    offsets: list[int]  # of the members in it, in elements
    known: StateEntries  # the optimizer's state for it at the last write-back
    is_flat: bool  # 1-D whatever the shape of its members

    __slots__ = ("group", "is_flat", "known", "members", "offsets", "parameter")

    def __init__(self, group: int, members: list[Member], parameter: torch.Tensor) -> None:
        self.group, self.members, self.parameter, self.known = group, members, parameter, {}
        self.is_flat = len(members) > 1 or not members[0].local.dim()
        self.offsets = [*accumulate((member.local.numel() for member in members[:-1]), initial=0)]

    @property
    def is_user_parameter(self) -> bool:
        """True if it is the user's parameter itself, with the user's gradient and state."""
        return self.parameter is self.members[0].parameter

    def set_gradient(self, gradient: torch.Tensor) -> None:
        """Set the gradient, given as that of the first member, with those of the others behind it in memory."""
        flat = gradient
        if self.is_flat:
            flat = gradient.as_strided((self.parameter.numel(),), (1,), gradient.storage_offset())
        if flat.dtype is not self.parameter.dtype:
            self.parameter.grad_dtype = flat.dtype
        self.parameter.grad = flat

    def load_state(self, flats: FlatStates) -> StateEntries | None:
        """Return the optimizer's state from the members' states, which have the same entries; None: none yet."""
        first = self.members[0]
        if first.state is None or self.is_user_parameter:
            return first.state
        for name, entry in [*first.state.items()]:
            self.known[name] = self._load_flat(name, flats) if first.is_elementwise(entry) else entry
        return dict(self.known)

    def _load_flat(self, name: Any, flats: FlatStates) -> torch.Tensor:
        entries = [(member.state or {})[name] for member in self.members]
        slices = [entry._local_tensor if isinstance(entry, DTensor) else entry for entry in entries]
        if len(slices) == 1 and slices[0].stride() == self.members[0].local.stride():
            return slices[0] if not self.is_flat else slices[0].as_strided(self.parameter.shape, (1,))
        flat = flats.flat_of(slices, self) if self.is_flat else None
        if flat is None:
            flat = torch.empty_like(self.parameter, dtype=slices[0].dtype)
            for member, offset, found in zip(self.members, self.offsets, slices, strict=True):
                member.view(flat, offset).copy_(found)
            self._set_user_entries(name, flat, flats)
        return flat

    def write_back(self, state: StateEntries, flats: FlatStates) -> bool:
        """Update the members' states after a step that left ``state``; return True if anything in it is new.

        Only new objects are written back; entries changed in place share memory with the user's view.
        """
        if self.is_user_parameter:
            is_new = self.members[0].state is not state
            self.members[0].state = state
            return is_new
        known, has_state = self.known, self.members[0].state is not None
        if has_state and len(state) == len(known) and all(map(operator.is_, state.values(), known.values())):
            return False
        for member in self.members:
            member.state = {} if member.state is None else member.state
            for name in known.keys() - state.keys():
                member.state.pop(name, None)
        for name, entry in state.items():
            if name not in known or known[name] is not entry:
                self._set_user_entries(name, entry, flats)
        self.known = dict(state)
        return True

    def _set_user_entries(self, name: Any, entry: Any, flats: FlatStates) -> None:
        if type(entry) is torch.Tensor and entry.shape == self.parameter.shape:
            slices = flats.split(entry, self) if self.is_flat else [entry]
            entries = [member.as_user_entry(local) for member, local in zip(self.members, slices, strict=True)]
        elif type(entry) is torch.Tensor and len(self.members) > 1:
            entries = [entry.clone() for _ in self.members]
        else:
            entries = [entry for _ in self.members]
        for member, each in zip(self.members, entries, strict=True):
            assert member.state is not None
            member.state[name] = each


class ScalarState:
    """Scalar state, such as ``step``: one per local tensor for the optimizer, and a copy per parameter for the user.

    All scalars of one name, dtype and device are in two vectors, so that write-back is one operation.

    Args:
        name: Name of the entry.
        tensors: The local tensors that have it, with the same dtype on the same device.
        states: The optimizer's state for each.
    """

    _values: torch.Tensor  # one per local tensor
    _user_values: torch.Tensor  # one per parameter
    _owner: torch.Tensor  # the local tensor of each parameter
    _first: torch.Tensor  # the first parameter of each local tensor
    _version: int  # version of the user's copies at the last write-back

    def __init__(self, name: Any, tensors: Sequence[LocalTensor], states: Sequence[StateEntries]) -> None:
        self._values = torch.stack([state[name] for state in states])
        owners = [index for index, tensor in enumerate(tensors) for _ in tensor.members]
        firsts = accumulate((len(tensor.members) for tensor in tensors[:-1]), initial=0)
        self._owner = torch.tensor(owners, device=self._values.device)
        self._first = torch.tensor([*firsts], device=self._values.device)
        self._user_values = self._values[self._owner]
        for tensor, state, value in zip(tensors, states, self._values.unbind(), strict=True):
            state[name] = tensor.known[name] = value
        members = (member for tensor in tensors for member in tensor.members)
        for member, value in zip(members, self._user_values.unbind(), strict=True):
            assert member.state is not None
            member.state[name] = value
        self._version = self._user_values._version

    def begin(self) -> bool:
        """Return True if nothing else has written to the user's copies.

        Writes through ``.data`` or an array have no version. On the CPU, values are compared; elsewhere that would wait
        for the device, and what was written to all parameters of a local tensor alike is taken over.
        """
        if self._user_values._version != self._version:
            return False
        if self._values.device.type == "cpu":
            return torch.equal(self._user_values, self._values[self._owner])
        torch.index_select(self._user_values, 0, self._first, out=self._values)
        return True

    def write_back(self) -> None:
        """Update the user's copies after a step."""
        torch.index_select(self._values, 0, self._owner, out=self._user_values)
        self._version = self._user_values._version
