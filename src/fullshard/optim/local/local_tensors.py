"""Plain tensors that an optimizer steps in place of sharded parameters, on the same memory, and their state.

[Note: Local tensors]
A *local tensor* is one plain tensor that a localized optimizer steps. It is this rank's shard of one parameter, or a
*run*: the shards of several parameters that are adjacent in a shard buffer, and whose gradients are adjacent as well,
without gaps. A gap between two gradients must not be written to (some optimizers write to gradients): it may contain
another gradient, or other data of the user.
The optimizer's state for a local tensor is plain, too; the user's view of it, in ``optimizer.state``, are DTensors on
the same memory. So the user's view is always correct and complete, and local tensors can be rebuilt from it whenever
something has changed: the entries of a run are used in place if they are slices of one flat tensor, or copied to a new
one.

Scalars beside the elementwise entries (``step``) exist once per run, and once per parameter in the user's view: other
optimizers, which may load that state, update each of them. See :class:`RunScalars`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fullshard.engine.parameters.placement import dtensor
from fullshard.memory import own_storage

__all__ = ["FlatStates", "LocalTensor", "Member", "RunScalars", "StateEntries"]

StateEntries = dict[Any, Any]  # state of one parameter or local tensor, by name


@dataclass(slots=True, eq=False)
class Member:
    """One parameter as a localized optimizer sees it during a step.

    Args:
        parameter: The user's parameter.
        local: Its local tensor, plain.
        state: Its state in the user's view; None: there is none yet.
    """

    parameter: torch.Tensor
    local: torch.Tensor
    state: StateEntries | None

    @property
    def spec(self) -> DTensorSpec | None:
        """Spec of the parameter; None if that is plain."""
        return self.parameter._spec if isinstance(self.parameter, DTensor) else None

    def as_user_entry(self, local: torch.Tensor) -> torch.Tensor:
        """Return an elementwise entry of the state as users see it, on the memory of ``local``."""
        if local.storage_offset() or local.untyped_storage().nbytes() > local.numel() * local.itemsize:
            local = own_storage(local)
        spec = self.spec
        if spec is None:
            return local
        if spec.tensor_meta is None or spec.tensor_meta.dtype is not local.dtype:
            meta = TensorMeta(self.parameter.shape, self.parameter.stride(), local.dtype)
            spec = replace(spec, tensor_meta=meta)
        return dtensor(local, spec)

    def local_of(self, entry: Any) -> Any:
        """Return this rank's shard of an elementwise entry of the user's view; other entries as they are."""
        return entry._local_tensor if self.spec is not None and isinstance(entry, DTensor) else entry

    def is_elementwise(self, entry: Any) -> bool:
        """Return True if an entry of the user's view has one element for each of the parameter's."""
        if not isinstance(entry, torch.Tensor):
            return False
        if self.spec is None:
            return type(entry) is torch.Tensor and entry.shape == self.local.shape and entry.dim() > 0
        return (
            type(entry) is DTensor
            and entry.placements == self.spec.placements
            and entry.shape == self.parameter.shape
            and type(entry._local_tensor) is torch.Tensor
            and entry._local_tensor.shape == self.local.shape
        )


class FlatStates:
    """Flat tensors of the state of runs, found by the members' entries, which are slices of them."""

    _slices: dict[int, tuple[torch.Tensor, torch.Tensor, int]]  # by id: local tensor of an entry, flat tensor, offset

    def __init__(self) -> None:
        self._slices = {}

    def retain(self, entries: Iterable[Any]) -> None:
        """Forget all flat tensors but those that have these entries of the user's view."""
        locals_ = (entry._local_tensor if isinstance(entry, DTensor) else entry for entry in entries)
        self._slices = {id(local): self._slices[id(local)] for local in locals_ if id(local) in self._slices}

    def divide(self, flat: torch.Tensor, tensor: LocalTensor) -> list[torch.Tensor]:
        """Return the members' slices of a flat tensor, each with a storage of its own on the same memory: who copies or
        pickles one entry copies no other.
        """
        views = [own_storage(view) for view in tensor.views(flat)]
        for view, offset in zip(views, tensor.offsets, strict=True):
            self._slices[id(view)] = (view, flat, offset)
        return views

    def around(self, locals_: Sequence[torch.Tensor], tensor: LocalTensor) -> torch.Tensor | None:
        """Return the slice of a flat tensor that has ``locals_`` as the members' slices; None if there is none."""
        found = [self._slices.get(id(local)) for local in locals_]
        if found[0] is None:
            return None
        _, flat, start = found[0]
        for each, offset in zip(found, tensor.offsets, strict=True):
            if each is None or each[1] is not flat or each[2] != start + offset:
                return None
        return flat.narrow(0, start, tensor.parameter.numel())


class LocalTensor:
    """A plain tensor that a localized optimizer steps. See [Note: Local tensors].

    Args:
        group: Index of the parameters' group in the optimizer.
        members: The parameters in it, by address.
        parameter: The tensor that is stepped: the members' shards as one flat tensor, the shard of the only member, or
            that member's parameter itself, maybe a DTensor, as in an optimizer that is not localized.
        flat: True for a flat tensor.
    """

    group: int
    members: list[Member]
    parameter: torch.Tensor
    flat: bool
    index: int  # in its plan
    offsets: list[int]  # of the members in it, in elements
    known: StateEntries  # the optimizer's state for it at the last write-back

    __slots__ = ("flat", "group", "index", "known", "members", "offsets", "parameter")

    def __init__(self, group: int, members: list[Member], parameter: torch.Tensor, *, flat: bool = False) -> None:
        self.group, self.members, self.parameter, self.flat, self.known = group, members, parameter, flat, {}
        self.offsets = [*accumulate((member.local.numel() for member in members[:-1]), initial=0)]

    @property
    def is_user_parameter(self) -> bool:
        """True if it is the user's parameter itself, with the user's gradient and state."""
        return self.parameter is self.members[0].parameter

    def set_gradient(self, gradient: torch.Tensor) -> None:
        """Set the gradient where the optimizer reads it."""
        if not self.is_user_parameter:
            if gradient.dtype is not self.parameter.dtype:
                self.parameter.grad_dtype = gradient.dtype
            self.parameter.grad = gradient

    def clear_gradient(self) -> None:
        """Remove the gradient after the step."""
        if not self.is_user_parameter:
            self.parameter.grad = None

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the members' views of a flat tensor."""
        return [
            flat.as_strided(m.local.shape, m.local.stride(), int(flat.storage_offset()) + offset)
            for m, offset in zip(self.members, self.offsets, strict=True)
        ]

    # ---------------------------------------------------------------- state

    def load_state(self, flats: FlatStates) -> StateEntries | None:
        """Return the optimizer's state from the members' states, which have the same entries; None: none yet."""
        first = self.members[0]
        if first.state is None or self.is_user_parameter:
            return first.state
        state = {}
        for name, entry in first.state.items():
            is_run = self.flat and first.is_elementwise(entry)
            state[name] = self._load_flat(name, flats) if is_run else entry if self.flat else first.local_of(entry)
        self.known = dict(state)
        return state

    def _load_flat(self, name: Any, flats: FlatStates) -> torch.Tensor:
        states = [member.state or {} for member in self.members]
        locals_ = [member.local_of(state[name]) for member, state in zip(self.members, states, strict=True)]
        flat = flats.around(locals_, self)
        if flat is None:
            flat = torch.empty(self.parameter.shape, dtype=locals_[0].dtype, device=locals_[0].device)
            for view, local in zip(self.views(flat), locals_, strict=True):
                view.copy_(local)
            self._set_user_entries(name, flat, flats)
        return flat

    def write_back(self, state: StateEntries, flats: FlatStates) -> bool:
        """Update the user's view after a step that left ``state``; return True if a run has got a scalar, which each
        member has a copy of.

        Only new objects are written back; entries changed in place share memory with the user's view.
        """
        if self.is_user_parameter:
            self.members[0].state = state
            return False
        changed = {name: e for name, e in state.items() if name not in self.known or self.known[name] is not e}
        gone = self.known.keys() - state.keys()
        for member in self.members:
            member.state = {} if member.state is None else member.state
            for name in gone:
                member.state.pop(name, None)
        for name, entry in changed.items():
            self._set_user_entries(name, entry, flats)
        self.known = dict(state)
        return len(self.members) > 1 and any(isinstance(e, torch.Tensor) and not e.dim() for e in changed.values())

    def _set_user_entries(self, name: Any, entry: Any, flats: FlatStates) -> None:
        is_plain = type(entry) is torch.Tensor
        if is_plain and entry.shape == self.parameter.shape and (self.flat or entry.dim() > 0):
            locals_ = flats.divide(entry, self) if self.flat else [entry]
            entries = [member.as_user_entry(local) for member, local in zip(self.members, locals_, strict=True)]
        else:
            entries = [entry.clone() if is_plain and len(self.members) > 1 else entry for _ in self.members]
        for member, each in zip(self.members, entries, strict=True):
            assert member.state is not None
            member.state[name] = each


class RunScalars:
    """Scalar state of runs, such as ``step``: one per run for the optimizer, and a copy per parameter for the user.

    All scalars of one name, dtype and device are in two vectors, so that write-back is one operation.

    Args:
        name: Name of the entry.
        tensors: The runs that have it, with the same dtype on the same device.
        states: The optimizer's state for each.
    """

    _values: torch.Tensor  # one per run
    _user_values: torch.Tensor  # one per parameter
    _owner: torch.Tensor  # the run of each parameter
    _version: int  # version of the user's copies at the last write-back

    def __init__(self, name: Any, tensors: Sequence[LocalTensor], states: Sequence[StateEntries]) -> None:
        self._values = torch.stack([state[name] for state in states])
        owners = [index for index, tensor in enumerate(tensors) for _ in tensor.members]
        self._owner = torch.tensor(owners, device=self._values.device)
        self._user_values = self._values[self._owner]
        for tensor, state, value in zip(tensors, states, self._values.unbind(), strict=True):
            state[name] = tensor.known[name] = value
        members = (member for tensor in tensors for member in tensor.members)
        for member, value in zip(members, self._user_values.unbind(), strict=True):
            assert member.state is not None
            member.state[name] = value
        self._version = self._user_values._version

    @property
    def is_current(self) -> bool:
        """True if nothing else has written to the user's copies."""
        return self._user_values._version == self._version

    def write_back(self) -> None:
        """Update the user's copies after a step."""
        torch.index_select(self._values, 0, self._owner, out=self._user_values)
        self._version = self._user_values._version
