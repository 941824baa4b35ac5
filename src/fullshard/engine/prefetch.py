"""Chooses the units to prefetch: recorded execution order, and a budget. It issues nothing.

[Note: Order and prefetch]
The order in which units start their forwards is recorded in every forward of the root and used in the next (the first
uses the order of ``modules()``). Just before a unit computes, the all-gather of its successor is issued; in backward,
that of its predecessor in the order in which this step's forwards ended. One unit is prefetched, so that two units are
unsharded at a time; or as many as fit into a budget in bytes (``set_prefetch_bytes``). All choices depend only on sizes
and on the order in which units run, which are the same on all ranks.

The units whose forwards end last are needed first in backward. Unless the user has set when to reshard them, two are
kept unsharded in between: the last one, and the one before it, which would otherwise be freed as the last one begins
to compute, when there is nothing else to prefetch, and be prefetched anew for backward. So no more units are unsharded
at a time than anywhere else in the step, and backward does not begin with an all-gather. With a budget, as many units
before the last one are kept as fit. In backward, kept units count as prefetched. Those whose backward has not come are
resharded when the next forward of the root begins. More units are unsharded at a time only where the order of the first
step was guessed wrong, and where a unit that runs last has also run before.

Tiny units, such as a single norm, are all-gathered in the same launch as the unit after them and do not count as
prefetched. A hundred of them take a fifth less of the host's time so. ``plan_blocks`` makes none.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from itertools import dropwhile, islice

from fullshard.engine.unit import Unit

__all__ = ["MAX_TINY_UNITS_TOGETHER", "ExecutionOrder", "Prefetcher"]

# A model of nothing but tiny units should not be unsharded all at once.
MAX_TINY_UNITS_TOGETHER = 8

# How many forwards may wait for their backward and still be prefetched in the right order (pipelines have many).
MAX_FORWARDS_REMEMBERED = 64

_UnitRef = weakref.ref[Unit]


class ExecutionOrder:
    """The order in which units start their forwards: recorded in every forward of the root and used in the next.

    Args:
        guess: The order to use in the first.
    """

    _known: list[_UnitRef]
    _recorded: list[_UnitRef]  # in the forward that runs now
    _position: int  # of that forward in the known order

    def __init__(self, guess: list[_UnitRef]) -> None:
        self._known, self._recorded, self._position = list(guess), [], 0

    def begin(self) -> None:
        """Begin to record a forward."""
        self._recorded, self._position = [], 0

    def record(self, unit: Unit) -> None:
        """Append ``unit`` to the recorded order."""
        self._recorded.append(unit.ref)

    def keep(self) -> None:
        """Use the recorded order in the next forward."""
        self._known = self._recorded

    def after(self, unit: Unit) -> Iterable[_UnitRef]:
        """Return the units after ``unit``, searched from the current position in the known order."""
        try:
            self._position = self._known.index(unit.ref, self._position) + 1
        except ValueError:
            return ()  # not in the known order from here on
        return islice(self._known, self._position, None)

    def first(self) -> Iterable[_UnitRef]:
        """Return all units in the known order."""
        return iter(self._known)


class Prefetcher:
    """Chooses the units to prefetch, as launches: lists of units that are all-gathered together.

    Args:
        units: All units of one root, which comes first, in the order of ``modules()``.
    """

    order: ExecutionOrder
    budget: int | None  # bytes of unsharded parameters that may be prefetched; None: one unit
    kept: dict[_UnitRef, None] | None  # units that stay unsharded from forward to backward, in order; None: not known
    ended: list[_UnitRef]  # forwards that wait for their backward, in the order in which they ended
    passed_by: list[_UnitRef]  # forwards that were skipped: the backward of an earlier one began first
    _root: _UnitRef
    _units: list[_UnitRef]
    _prefetched: dict[int, _UnitRef]  # by id; all-gathers issued, units not run yet

    def __init__(self, units: list[Unit]) -> None:
        self._root, self._units = units[0].ref, [unit.ref for unit in units]
        self.order, self.budget, self.kept = ExecutionOrder(self._units), None, None
        self.ended, self.passed_by, self._prefetched = [], [], {}

    def __contains__(self, unit: Unit) -> bool:
        return id(unit) in self._prefetched

    def units(self) -> list[Unit]:
        """Return the prefetched units that still exist."""
        return [unit for ref in self._prefetched.values() if (unit := ref()) is not None]

    def used(self, unit: Unit) -> None:
        """Remove ``unit`` from the prefetched units: it is in use now."""
        self._prefetched.pop(id(unit), None)

    def clear(self) -> None:
        """Clear the prefetched units."""
        self._prefetched.clear()

    def forget(self) -> None:
        """Clear the prefetched units, and the forwards that wait for their backward."""
        self.ended.clear()
        self.passed_by.clear()
        self._prefetched.clear()

    # ---------------------------------------------------------------- forward

    def begin_forward(self) -> None:
        """Begin the outermost forward."""
        self._read_budget()
        if self.kept is None:
            self._choose_kept(self._units[:0:-1])
        self.order.begin()

    def next_in_forward(self, unit: Unit, *, of_root: bool) -> Iterator[list[Unit]]:
        """Choose the units to prefetch in the forward of ``unit``.

        Args:
            unit: Unit that is about to compute.
            of_root: True in a forward of the root, whose order is known.
        """
        if unit.settings.forward_prefetch:
            return self._listed(unit.settings.forward_prefetch)
        if not of_root:
            return iter(())
        successors = self.order.after(unit)
        if len(unit.modules) > 1:  # it stays unsharded until all of them have run
            successors = dropwhile(lambda ref: ref is unit.ref, successors)
        return self._next(successors)

    def forward_ended(self, unit: Unit) -> None:
        """Append ``unit`` to the forwards that wait for their backward."""
        self.ended.append(unit.ref)
        if len(self.ended) > MAX_FORWARDS_REMEMBERED * len(self._units):  # outputs without a backward
            del self.ended[0]

    def end_forward(self) -> None:
        """End the outermost forward, of the root."""
        self.order.keep()
        if self.ended and self.ended[-1] is self._root:
            self._choose_kept(self.ended[-2::-1])

    def is_kept_by_default(self, unit: Unit) -> bool:
        """True if ``unit`` stays unsharded from forward to backward unless the user sets otherwise."""
        return unit.ref is self._root or unit.ref in (self.kept or ())

    # ---------------------------------------------------------------- backward

    def backward_began(self, unit: Unit) -> None:
        """Remove the last forward of ``unit``, whose backward begins, and skip those that ended after it."""
        for index in range(len(self.ended) - 1, -1, -1):
            if self.ended[index] is unit.ref:
                self.passed_by += self.ended[index + 1 :]
                del self.ended[index:]
                return

    def next_in_backward(self, unit: Unit) -> Iterator[list[Unit]]:
        """Choose the units to prefetch in the backward of ``unit``."""
        if unit.settings.backward_prefetch:
            return self._listed(unit.settings.backward_prefetch)
        return self.last_ended(unit) if unit.settings.backward_order == "before" else iter(())

    def last_ended(self, running: Unit | None = None) -> Iterator[list[Unit]]:
        """Choose units of the last forwards that wait for their backward.

        Args:
            running: Unit whose backward begins; of several modules, it stays unsharded until that of all is over.
        """
        refs: Iterable[_UnitRef] = reversed(self.ended)
        if running is not None and len(running.modules) > 1:
            refs = dropwhile(lambda ref: ref is running.ref, refs)
        return self._next(ref for ref in refs if (unit := ref()) is None or unit.settings.unshard_in_backward)

    def comes_next_in_backward(self, unit: Unit) -> bool:
        """True if the forward before the one whose backward runs was of ``unit`` too."""
        return bool(self.ended) and self.ended[-1] is unit.ref

    # ---------------------------------------------------------------- the choice

    def _next(self, refs: Iterable[_UnitRef]) -> Iterator[list[Unit]]:
        """Choose one launch, or as many as fit the budget.

        Units that are prefetched already, or kept for their backward, use the budget too. A launch that is larger than
        the whole budget is chosen when nothing else is prefetched.
        """
        if self.budget == 0:
            return
        room, prefetched = self.budget, self.units()
        if room is not None:
            room -= sum(unit.unsharded_bytes for unit in prefetched)
        crowded = any(not unit.tiny for unit in prefetched)
        kept: set[Unit] = set()
        for launch in self._launches(refs):
            unit = launch[0]
            if unit in self or unit.is_unsharded:
                if room is None and (unit in self or not unit.tiny):
                    return  # what comes next is there already
                if room is not None and unit.is_kept and unit not in kept:
                    kept.add(unit)
                    room, crowded = room - unit.unsharded_bytes, True
                continue
            if room is not None:
                room -= sum(each.unsharded_bytes for each in launch)
            if crowded and (room is None or room < 0):
                return
            yield self.note(launch)
            if room is None:
                return
            crowded |= not launch[-1].tiny

    def _launches(self, refs: Iterable[_UnitRef]) -> Iterator[list[Unit]]:
        """Yield tiny units with those after them, in lists that are all-gathered together; unsharded ones alone."""
        launch: list[Unit] = []
        for unit in (ref() for ref in refs):
            if unit is None or unit.is_summoned:  # deleted, maybe not on all ranks at once; or computes with copies
                continue
            alone = unit in self or unit.is_unsharded
            if launch and (alone or unit.mesh is not launch[-1].mesh):  # there it may be large on others
                yield launch
                launch = []
            launch.append(unit)
            if alone or not unit.tiny or len(launch) == MAX_TINY_UNITS_TOGETHER:
                yield launch
                launch = []
        if launch:
            yield launch

    def _listed(self, refs: list[_UnitRef]) -> Iterator[list[Unit]]:
        """Choose the units that the user has listed, at most as many at a time as are listed."""
        for unit in (ref() for ref in refs):
            if unit is None or unit.is_unsharded or unit.is_summoned:
                continue
            if len(self._prefetched) >= len(refs):
                return
            yield self.note([unit])

    def note(self, units: list[Unit]) -> list[Unit]:
        """Add ``units`` to the prefetched ones, and return them."""
        self._prefetched.update((id(unit), unit.ref) for unit in units)
        return units

    def _read_budget(self) -> None:
        root = self._root()
        self.budget = None if root is None else root.settings.prefetch_bytes

    def _choose_kept(self, refs: Iterable[_UnitRef]) -> None:
        """Choose the units that stay unsharded between forward and backward: the last, and what is prefetched with it.

        Args:
            refs: All units but the root, in the order of their backwards.
        """
        root, self.kept = self._root(), None
        if root is None or root.settings.backward_order != "before" or root.settings.backward_prefetch:
            return
        self.kept = {}
        if self.budget == 0:
            return
        large = tiny = ahead = 0  # ahead: bytes beside the last unit that is not tiny, as it computes
        for ref in refs:
            unit = ref()
            if unit is None or ref in self.kept:
                continue
            tiny += unit.tiny
            ahead += unit.unsharded_bytes if large else 0
            full = large > 1 and (self.budget is None or ahead > self.budget)
            if full or tiny > MAX_TINY_UNITS_TOGETHER:
                return
            large += not unit.tiny
            self.kept[ref] = None
