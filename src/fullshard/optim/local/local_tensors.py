"""Plain tensors that an optimizer steps in place of sharded parameters, on the same memory, and their state.

[Note: Local tensors]
A *local tensor* is one plain tensor that a localized optimizer steps. It is this rank's shard of one parameter, or a
*run*: the shards of several parameters that are adjacent in a shard buffer, and whose gradients are adjacent as well,
without gaps. A gap between two gradients must not be written to (some optimizers write to gradients): it may contain
another gradient, or other data of the user.
The optimizer's state for a local tensor is plain, too; the user's view of it, in ``optimizer.state``, are DTensors on
the same memory. So the user's view is always correct and complete, and local tensors can be rebuilt from it whenever
something has changed: the entries of a run are used in place if they are adjacent, or copied to new memory.

Scalars beside the elementwise entries (``step``) exist once per run, and once per parameter in the user's view: other
optimizers, which may load that state, update each of them. See :class:`RunScalars`.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fullshard.engine.parameters.placement import dtensor
from fullshard.memory import own_storage

if TYPE_CHECKING:
    from fullshard.engine.unit import Unit

__all__ = [
    "InitGroupRow",
    "LocalTensor",
    "Member",
    "RunScalars",
    "ShardLocation",
    "StateBuffers",
    "StateEntries",
    "is_elementwise",
]

StateEntries = dict[Any, Any]  # state of one parameter or local tensor, by name


class ShardLocation(NamedTuple):
    """Location of a parameter's shard.

    Args:
        buffer: The flat shard buffer.
        offset: Offset in it, in elements; -1: the shard has no elements.
        unit: Unit of the parameter.
    """

    buffer: torch.Tensor
    offset: int
    unit: weakref.ref[Unit]


class Member:
    """One parameter as a localized optimizer sees it during a step.

    Args:
        parameter: The user's parameter.
        local: Its local tensor, plain.
        gradient: Local tensor of the gradient, plain.
        location: Location in a shard buffer; None: not in one.
    """

    parameter: torch.Tensor
    local: torch.Tensor
    gradient: torch.Tensor  # at the time of planning
    location: ShardLocation | None
    state: StateEntries | None  # the user's view; None: there is none yet

    __slots__ = ("gradient", "local", "location", "parameter", "state")

    def __init__(
        self, parameter: torch.Tensor, local: torch.Tensor, gradient: torch.Tensor, location: ShardLocation | None
    ) -> None:
        self.parameter, self.local, self.gradient, self.location, self.state = (
            parameter,
            local,
            gradient,
            location,
            None,
        )

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


def is_elementwise(member: Member, entry: Any) -> bool:
    """Return True if an entry of the user's view has one element for each of the parameter's."""
    if not isinstance(entry, torch.Tensor):
        return False
    if member.spec is None:
        return type(entry) is torch.Tensor and entry.shape == member.local.shape and entry.dim() > 0
    return (
        type(entry) is DTensor
        and entry.placements == member.spec.placements
        and entry.shape == member.parameter.shape
        and type(entry._local_tensor) is torch.Tensor
        and entry._local_tensor.shape == member.local.shape
    )


class InitGroupRow(NamedTuple):
    """The values that ``_init_group`` of an optimizer collects for one local tensor.

    Args:
        options: Options that it depends on.
        positions: Indices of the lists that get a value, except the list of gradients.
        values: The values.
        returned: Result of ``_init_group``.
    """

    options: tuple[Any, ...]
    positions: tuple[int, ...]
    values: tuple[Any, ...]
    returned: Any


class LocalTensor:
    """A plain tensor that a localized optimizer steps. See [Note: Local tensors].

    Args:
        group: Index of the parameters' group in the optimizer.
        members: The parameters in it, by address.
        flat: Step it as one flat tensor; otherwise it is the local tensor of its one member.
        user_parameter: Step the user's parameter itself, maybe a DTensor, as an optimizer that is not localized.
    """

    group: int
    members: list[Member]
    parameter: torch.Tensor  # the tensor that is stepped
    index: int  # in its plan
    offsets: list[int]  # of the members in it, in elements
    unit: weakref.ref[Unit] | None  # of its members
    state: StateEntries | None  # the optimizer's state for it; None: none yet
    known: StateEntries  # entries at the last write-back
    row: InitGroupRow | None  # last values of _init_group
    flat: bool

    __slots__ = (
        *("flat", "group", "index", "known", "members"),
        *("offsets", "parameter", "row", "state", "unit"),
    )

    def __init__(self, group: int, members: list[Member], *, flat: bool = False, user_parameter: bool = False) -> None:
        self.group, self.members, self.flat = group, members, flat
        self.state, self.known, self.row = None, {}, None
        first = members[0]
        location = first.location
        self.unit = None if location is None else location.unit
        self.offsets = [0] * len(members)
        if user_parameter:
            self.parameter = first.parameter
        elif not flat:
            # Not the local tensor itself, which must not get a gradient.
            self.parameter = first.local.detach()
        elif location is None or not first.local.numel():
            self.parameter = first.local.as_strided((first.local.numel(),), (1,))
        else:
            self._lay_out(location)

    def _lay_out(self, location: ShardLocation) -> None:
        *self.offsets, numel = accumulate((member.local.numel() for member in self.members), initial=0)
        start = int(location.buffer.storage_offset()) + location.offset
        self.parameter = location.buffer.detach().as_strided((numel,), (1,), start)

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

    # ---------------------------------------------------------------- state

    def load_member_state(self, buffers: StateBuffers) -> None:
        """Build :attr:`state` from the members' states, which have the same entries. Scalars stay the members'."""
        first = self.members[0]
        if first.state is None:
            return
        if self.is_user_parameter:
            self.state = first.state
            return
        self.state = {}
        for name, entry in first.state.items():
            if not self.flat:
                self.state[name] = first.local_of(entry)
            elif is_elementwise(first, entry):
                self.state[name] = self._flat_entry(name, buffers)
            else:
                self.state[name] = entry
        self.known = dict(self.state)

    def _flat_entry(self, name: Any, buffers: StateBuffers) -> torch.Tensor:
        """Return one flat tensor for an elementwise entry: the memory around the members' entries, or a new one that
        they are moved to.
        """
        states = [member.state or {} for member in self.members]
        locals_ = [member.local_of(state[name]) for member, state in zip(self.members, states, strict=True)]
        found = buffers.slice_around(locals_, self.offsets, self.parameter.numel())
        if found is not None:
            return found
        new = torch.zeros(self.parameter.shape, dtype=locals_[0].dtype, device=locals_[0].device)
        for view, local in zip(self._views(new), locals_, strict=True):
            view.copy_(local)
        buffers.add(new)
        for member, state, view in zip(self.members, states, self._views(new), strict=True):
            state[name] = member.as_user_entry(view)
        return new

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [
            flat.as_strided(m.local.shape, m.local.stride(), int(flat.storage_offset()) + offset)
            for m, offset in zip(self.members, self.offsets, strict=True)
        ]

    def write_back(self, state: StateEntries, buffers: StateBuffers) -> list[Any]:
        """Update the user's view after a step that left ``state``, and return the names of changed entries.

        Only new objects are written back; entries changed in place share memory with the user's view.
        """
        if self.is_user_parameter:
            new = self.state is not state
            self.state = self.members[0].state = state
            return list(state) if new else []
        self.state = state
        changed = [name for name, entry in state.items() if name not in self.known or self.known[name] is not entry]
        gone = [name for name in self.known if name not in state]
        for name in changed:
            self._write_back_entry(name, state[name], buffers)
        for member in self.members:
            if member.state is None:
                member.state = {}
            for name in gone:
                member.state.pop(name, None)
        self.known = dict(state)
        return changed + gone

    def has_scalars(self, names: Iterable[Any]) -> bool:
        """Return True if any of these entries is a scalar of a run, which each member has a copy of."""
        found = (self.known.get(name) for name in names)
        return len(self.members) > 1 and any(isinstance(entry, torch.Tensor) and not entry.dim() for entry in found)

    def _write_back_entry(self, name: Any, entry: Any, buffers: StateBuffers) -> None:
        for member in self.members:
            if member.state is None:
                member.state = {}
        is_plain = type(entry) is torch.Tensor
        if is_plain and entry.shape == self.parameter.shape and (self.flat or entry.dim() > 0):
            if self.flat:
                buffers.add(entry)
            for member, view in zip(self.members, self._views(entry) if self.flat else [entry], strict=True):
                assert member.state is not None
                member.state[name] = member.as_user_entry(view)
            return
        for member in self.members:
            assert member.state is not None
            member.state[name] = entry.clone() if is_plain and len(self.members) > 1 else entry


class StateBuffers:
    """Flat tensors of elementwise state, found by the addresses within them."""

    _flats: dict[int, torch.Tensor]  # by address
    _starts: list[int]  # sorted

    def __init__(self) -> None:
        self._flats, self._starts = {}, []

    def add(self, flat: torch.Tensor) -> None:
        """Add a flat tensor."""
        if flat.numel() and flat.data_ptr() not in self._flats:
            bisect.insort(self._starts, flat.data_ptr())
            self._flats[flat.data_ptr()] = flat

    def containing(self, local: torch.Tensor) -> torch.Tensor | None:
        """Return the flat tensor that contains ``local``."""
        address = local.data_ptr()
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        flat = self._flats[self._starts[index]]
        return flat if address < flat.data_ptr() + flat.numel() * flat.itemsize and flat.dtype is local.dtype else None

    def retain(self, locals_: Iterable[torch.Tensor]) -> None:
        """Forget all flat tensors but those that contain these."""
        kept = [flat for flat in map(self.containing, locals_) if flat is not None]
        self._flats, self._starts = {}, []
        for flat in kept:
            self.add(flat)

    def slice_around(self, locals_: Sequence[torch.Tensor], offsets: Sequence[int], numel: int) -> torch.Tensor | None:
        """Return the slice of a flat tensor, of ``numel`` elements, that has ``locals_`` at their offsets; None if
        there is none.
        """
        flat = self.containing(locals_[0]) if locals_[0].numel() else None
        if flat is None:
            return None
        start, size = locals_[0].data_ptr(), flat.itemsize
        first = (start - flat.data_ptr()) // size
        if first + numel > flat.numel():
            return None
        if any(t.data_ptr() - start != o * size for t, o in zip(locals_, offsets, strict=True) if t.numel()):
            return None
        if any(t.dtype is not flat.dtype for t in locals_):
            return None
        return flat.as_strided((numel,), (1,), int(flat.storage_offset()) + first)


class RunScalars:
    """Scalar state of runs, such as ``step``: one per run for the optimizer, and a copy per parameter for the user.

    All scalars of one name, dtype and device are in two vectors, so that write-back is one operation.

    Args:
        name: Name of the entry.
        tensors: The runs that have it, with the same dtype on the same device.
    """

    _values: torch.Tensor  # one per run
    _user_values: torch.Tensor  # one per parameter
    _owner: torch.Tensor  # the run of each parameter
    _version: int  # version of the user's copies at the last write-back

    def __init__(self, name: Any, tensors: Sequence[LocalTensor]) -> None:
        scalars = [tensor.members[0].state[name] for tensor in tensors if tensor.members[0].state is not None]
        self._values = torch.stack(scalars)
        owners = [index for index, tensor in enumerate(tensors) for _ in tensor.members]
        self._owner = torch.tensor(owners, device=self._values.device)
        self._user_values = self._values[self._owner]
        as_user_entry = iter(range(len(owners)))
        for index, tensor in enumerate(tensors):
            assert tensor.state is not None
            tensor.state[name] = tensor.known[name] = self._values[index]
            for member in tensor.members:
                assert member.state is not None
                member.state[name] = self._user_values[next(as_user_entry)]
        self._version = self._user_values._version

    @property
    def is_current(self) -> bool:
        """True if nothing else has written to the user's copies."""
        return self._user_values._version == self._version

    def write_back(self) -> None:
        """Update the user's copies after a step."""
        torch.index_select(self._values, 0, self._owner, out=self._user_values)
        self._version = self._user_values._version
