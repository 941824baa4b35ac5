"""Units that are gathered ahead of their turn: how many, and which."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fullshard.engine.unit import Unit

__all__ = ["MAX_TINY_UNITS_TOGETHER", "Ahead"]

# A model of nothing but tiny units should not be gathered all at once.
MAX_TINY_UNITS_TOGETHER = 8


class Ahead:
    """See [Note: Order and prefetch]. Says what to gather: units that belong in one launch, launch by launch."""

    budget: int | None  # bytes of full parameters that may be ahead; None: one unit
    turn: set[weakref.ref[Unit]] | None  # the units that come first in backward; None: not known yet
    _units: dict[int, weakref.ref[Unit]]  # by id: gathered but not used yet

    def __init__(self) -> None:
        self._units, self.budget, self.turn = {}, None, None

    def __contains__(self, unit: Unit) -> bool:
        return id(unit) in self._units

    def units(self) -> list[Unit]:
        """Those that still exist."""
        return [unit for unit in (ref() for ref in self._units.values()) if unit is not None]

    def used(self, unit: Unit) -> None:
        """It is its turn, or there will be none."""
        self._units.pop(id(unit), None)

    def clear(self) -> None:
        """No turn will come."""
        self._units.clear()

    def next(self, refs: Iterable[weakref.ref[Unit]]) -> Iterator[list[Unit]]:
        """What comes next: one unit, or as many as fit the budget; tiny ones in the launch of the one after.

        What is ahead already counts. A unit that is larger than the whole budget is gathered when nothing else is
        ahead. All of it depends on sizes and on what ran, which are equal on all ranks.
        """
        if self.budget == 0:
            return
        ahead = self.units()
        room = None if self.budget is None else self.budget - sum(unit.full_size for unit in ahead)
        crowded = any(not unit.tiny for unit in ahead)
        together: list[Unit] = []
        for unit in (ref() for ref in refs):
            if unit is None:
                continue  # not on all ranks at the same time, maybe
            if unit in self or (unit.gathered and not unit.tiny):
                if room is None:
                    break  # those from here to the next that is not tiny are ahead already
                continue
            if not unit.gathered:
                together.append(unit)
            if unit.tiny and len(together) < MAX_TINY_UNITS_TOGETHER:
                continue
            if room is not None:
                room -= sum(each.full_size for each in together)
            if crowded and (room is None or room < 0):
                return  # the tiny ones wait for the unit that they go with
            yield self.note(together)
            if room is None:
                return
            crowded, together = crowded or not unit.tiny, []
        if room is None or not crowded or room >= sum(unit.full_size for unit in together):
            yield self.note(together)

    def note_turn(self, ended: Iterable[weakref.ref[Unit]]) -> None:
        """Note which units need not be freed between forward and backward: they would be gathered ahead at once.

        Args:
            ended: The units but the root, in the order in which their backwards come.
        """
        self.turn = set()
        if self.budget == 0:
            return
        room, crowded, tiny = self.budget or 0, False, 0
        for ref in ended:
            unit = ref()
            if unit is None:
                continue
            room, tiny = room - unit.full_size, tiny + unit.tiny
            if (crowded and room < 0) or tiny > MAX_TINY_UNITS_TOGETHER:
                return
            crowded |= not unit.tiny
            self.turn.add(ref)

    def chosen(self, refs: list[weakref.ref[Unit]]) -> Iterator[list[Unit]]:
        """What the user has listed, as many as are listed."""
        for unit in (ref() for ref in refs):
            if unit is None or unit.gathered:
                continue
            if len(self._units) >= len(refs):
                return
            yield self.note([unit])

    def note(self, units: list[Unit]) -> list[Unit]:
        """They are gathered now."""
        self._units.update((id(unit), unit.ref) for unit in units)
        return units
