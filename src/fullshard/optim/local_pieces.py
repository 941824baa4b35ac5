"""What an optimizer steps in place of sharded parameters: plain tensors on the same memory, and the state of both.

[Note: Stepped pieces]
A *piece* is one plain tensor that a localised optimizer steps. It is this rank's part of one parameter, or a *run*:
the parts of several parameters that lie one after another in a shard buffer, and whose gradients lie likewise, with
nothing in between. What lies between two gradients is not ours to write (some optimizers write to gradients): it may be
another gradient, or whatever the user who has placed them there keeps.
What the optimizer keeps for a piece lies in plain tensors, too; the user's view of it, in ``optimizer.state``, are
DTensors on the same memory. So the user's view is always right and always complete, and pieces can be made anew from it
whenever something has changed: run by run, what has to lie together is found lying together, or is copied there.

Numbers beside the elementwise entries (``step``) exist once per run, and once per parameter in the user's view: other
optimizers, which may load that state, count in each of them. See :class:`RunNumbers`.
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

from fullshard.engine.placement import dtensor
from fullshard.memory import own_storage

if TYPE_CHECKING:
    from fullshard.engine.unit import Unit

__all__ = ["Entries", "Homes", "Member", "Piece", "Place", "Row", "RunNumbers", "is_elementwise"]

Entries = dict[Any, Any]  # the state of one parameter, or of one piece, by name


class Place(NamedTuple):
    """Where a parameter's part lies.

    Args:
        buffer: The shard buffer: flat.
        offset: In it, in elements; -1: the part has no elements.
        unit: Of the parameter.
    """

    buffer: torch.Tensor
    offset: int
    unit: weakref.ref[Unit]


class Member:
    """One parameter as a localised optimizer sees it during a step.

    Args:
        parameter: As the user has it.
        local: This rank's part of it, plain.
        gradient: This rank's part of the gradient, plain.
        place: Where it lies; None: in memory of its own, or nowhere.
    """

    parameter: torch.Tensor
    local: torch.Tensor
    gradient: torch.Tensor  # at the time of planning
    place: Place | None
    state: Entries | None  # the user's view; None: there is none yet

    __slots__ = ("gradient", "local", "parameter", "place", "state")

    def __init__(
        self, parameter: torch.Tensor, local: torch.Tensor, gradient: torch.Tensor, place: Place | None
    ) -> None:
        self.parameter, self.local, self.gradient, self.place, self.state = parameter, local, gradient, place, None

    @property
    def spec(self) -> DTensorSpec | None:
        """Of the parameter; None if that is plain."""
        return self.parameter._spec if isinstance(self.parameter, DTensor) else None

    def shown(self, local: torch.Tensor) -> torch.Tensor:
        """An elementwise entry of the state as users see it, on the memory of ``local``."""
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
        """The reverse: this rank's part of an entry that is elementwise; others as they are."""
        return entry._local_tensor if self.spec is not None and isinstance(entry, DTensor) else entry


def is_elementwise(member: Member, entry: Any) -> bool:
    """Whether an entry of the user's view has one element for each of the parameter's."""
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


class Row(NamedTuple):
    """What ``_init_group`` of an optimizer collects for one piece.

    Args:
        options: Those that decide about it.
        positions: Which of the lists get something, less that of the gradients.
        values: What they get.
        returned: What it returned.
    """

    options: tuple[Any, ...]
    positions: tuple[int, ...]
    values: tuple[Any, ...]
    returned: Any


class Piece:
    """See [Note: Stepped pieces].

    Args:
        group: Index of the parameters' group in the optimizer.
        members: The parameters in it, by address.
        flat: Whether it is stepped as one flat tensor; otherwise it is the one member's own local tensor.
        own: Whether it is the user's own parameter, a DTensor maybe, that is stepped as if nothing were localised.
    """

    group: int
    members: list[Member]
    parameter: torch.Tensor  # what is stepped
    index: int  # in its plan
    offsets: list[int]  # of the members in it, in elements
    unit: weakref.ref[Unit] | None  # of its members
    state: Entries | None  # what the optimizer keeps for it; None: nothing yet
    known: Entries  # the same at the last look
    row: Row | None  # what its optimizer collected for it last
    flat: bool

    __slots__ = (
        *("flat", "group", "index", "known", "members"),
        *("offsets", "parameter", "row", "state", "unit"),
    )

    def __init__(self, group: int, members: list[Member], *, flat: bool = False, own: bool = False) -> None:
        self.group, self.members, self.flat = group, members, flat
        self.state, self.known, self.row = None, {}, None
        first = members[0]
        place = first.place
        self.unit = None if place is None else place.unit
        self.offsets = [0] * len(members)
        if own:
            self.parameter = first.parameter
        elif not flat:
            # Not the local tensor itself: nobody shall find a gradient on that.
            self.parameter = first.local.detach()
        elif place is None or not first.local.numel():
            self.parameter = first.local.as_strided((first.local.numel(),), (1,))
        else:
            self._lay_out(place)

    def _lay_out(self, place: Place) -> None:
        *self.offsets, numel = accumulate((member.local.numel() for member in self.members), initial=0)
        start = int(place.buffer.storage_offset()) + place.offset
        self.parameter = place.buffer.detach().as_strided((numel,), (1,), start)

    @property
    def is_users_own(self) -> bool:
        """Whether it is the user's parameter itself, with the user's gradient and state."""
        return self.parameter is self.members[0].parameter

    def put_gradient(self, gradient: torch.Tensor) -> None:
        """Put it where an optimizer looks for it."""
        if not self.is_users_own:
            if gradient.dtype is not self.parameter.dtype:
                self.parameter.grad_dtype = gradient.dtype
            self.parameter.grad = gradient

    def drop_gradient(self) -> None:
        """The piece is stepped."""
        if not self.is_users_own:
            self.parameter.grad = None

    # ---------------------------------------------------------------- state

    def adopt(self, homes: Homes) -> None:
        """Make :attr:`state` of the members' states, which are alike if there are several. Numbers stay theirs."""
        first = self.members[0]
        if first.state is None:
            return
        if self.is_users_own:
            self.state = first.state
            return
        self.state = {}
        for name, entry in first.state.items():
            if not self.flat:
                self.state[name] = first.local_of(entry)
            elif is_elementwise(first, entry):
                self.state[name] = self._gathered(name, homes)
            else:
                self.state[name] = entry
        self.known = dict(self.state)

    def _gathered(self, name: Any, homes: Homes) -> torch.Tensor:
        """One flat tensor for an elementwise entry: where the members' entries lie, or a new one that they move to."""
        states = [member.state or {} for member in self.members]
        locals_ = [member.local_of(state[name]) for member, state in zip(self.members, states, strict=True)]
        found = homes.around(locals_, self.offsets, self.parameter.numel())
        if found is not None:
            return found
        new = torch.zeros(self.parameter.shape, dtype=locals_[0].dtype, device=locals_[0].device)
        for view, local in zip(self._views(new), locals_, strict=True):
            view.copy_(local)
        homes.add(new)
        for member, state, view in zip(self.members, states, self._views(new), strict=True):
            state[name] = member.shown(view)
        return new

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [
            flat.as_strided(m.local.shape, m.local.stride(), int(flat.storage_offset()) + offset)
            for m, offset in zip(self.members, self.offsets, strict=True)
        ]

    def show(self, state: Entries, homes: Homes) -> list[Any]:
        """Bring the user's view up to date after a step that has left ``state``. The names of what was to do.

        Only what is another object than before; what was changed in place needs nothing.
        """
        if self.is_users_own:
            new = self.state is not state
            self.state = self.members[0].state = state
            return list(state) if new else []
        self.state = state
        changed = [name for name, entry in state.items() if name not in self.known or self.known[name] is not entry]
        gone = [name for name in self.known if name not in state]
        for name in changed:
            self._show_entry(name, state[name], homes)
        for member in self.members:
            if member.state is None:
                member.state = {}
            for name in gone:
                member.state.pop(name, None)
        self.known = dict(state)
        return changed + gone

    def has_numbers(self, names: Iterable[Any]) -> bool:
        """Whether any of these entries is one that a run has one of and each of its members shows."""
        found = (self.known.get(name) for name in names)
        return len(self.members) > 1 and any(isinstance(entry, torch.Tensor) and not entry.dim() for entry in found)

    def _show_entry(self, name: Any, entry: Any, homes: Homes) -> None:
        for member in self.members:
            if member.state is None:
                member.state = {}
        is_plain = type(entry) is torch.Tensor
        if is_plain and entry.shape == self.parameter.shape and (self.flat or entry.dim() > 0):
            if self.flat:
                homes.add(entry)
            for member, view in zip(self.members, self._views(entry) if self.flat else [entry], strict=True):
                assert member.state is not None
                member.state[name] = member.shown(view)
            return
        for member in self.members:
            assert member.state is not None
            member.state[name] = entry.clone() if is_plain and len(self.members) > 1 else entry


class Homes:
    """The flat tensors that hold elementwise state, to be found by the addresses of what lies in them."""

    _flats: dict[int, torch.Tensor]  # by address
    _starts: list[int]  # sorted

    def __init__(self) -> None:
        self._flats, self._starts = {}, []

    def add(self, flat: torch.Tensor) -> None:
        """One more."""
        if flat.numel() and flat.data_ptr() not in self._flats:
            bisect.insort(self._starts, flat.data_ptr())
            self._flats[flat.data_ptr()] = flat

    def at(self, local: torch.Tensor) -> torch.Tensor | None:
        """The one that ``local`` lies in."""
        address = local.data_ptr()
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        flat = self._flats[self._starts[index]]
        return flat if address < flat.data_ptr() + flat.numel() * flat.itemsize and flat.dtype is local.dtype else None

    def keep(self, locals_: Iterable[torch.Tensor]) -> None:
        """Forget all but those that these lie in."""
        kept = [flat for flat in map(self.at, locals_) if flat is not None]
        self._flats, self._starts = {}, []
        for flat in kept:
            self.add(flat)

    def around(self, locals_: Sequence[torch.Tensor], offsets: Sequence[int], numel: int) -> torch.Tensor | None:
        """The part of one, of ``numel`` elements, in which ``locals_`` lie at their offsets; None: there is none."""
        flat = self.at(locals_[0]) if locals_[0].numel() else None
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


class RunNumbers:
    """Numbers in the state of runs, such as ``step``: one for the optimizer to count in, and one per parameter to show.

    All of one name, dtype and device lie in two vectors, so that showing is one operation however many there are.

    Args:
        name: Of the entry.
        pieces: The runs that have it, with the same dtype on the same device.
    """

    _own: torch.Tensor  # one per run
    _shown: torch.Tensor  # one per parameter
    _owner: torch.Tensor  # the run of each parameter
    _version: int  # of what is shown, when it was last brought up to date

    def __init__(self, name: Any, pieces: Sequence[Piece]) -> None:
        numbers = [piece.members[0].state[name] for piece in pieces if piece.members[0].state is not None]
        self._own = torch.stack(numbers)
        owners = [index for index, piece in enumerate(pieces) for _ in piece.members]
        self._owner = torch.tensor(owners, device=self._own.device)
        self._shown = self._own[self._owner]
        shown = iter(range(len(owners)))
        for index, piece in enumerate(pieces):
            assert piece.state is not None
            piece.state[name] = piece.known[name] = self._own[index]
            for member in piece.members:
                assert member.state is not None
                member.state[name] = self._shown[next(shown)]
        self._version = self._shown._version

    @property
    def is_current(self) -> bool:
        """Whether nobody but us has written to what is shown."""
        return self._shown._version == self._version

    def show(self) -> None:
        """A step was made."""
        torch.index_select(self._own, 0, self._owner, out=self._shown)
        self._version = self._shown._version
