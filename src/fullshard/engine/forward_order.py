"""The order in which the units of a root run."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fullshard.engine.order import OrderCheck
    from fullshard.engine.unit import Unit

__all__ = ["ForwardOrder"]


class ForwardOrder:
    """Recorded in every forward of the root and used in the next. See [Note: Order and prefetch].

    Args:
        guess: The order to use in the first.
    """

    on_start: Callable[[str], None] | None  # called with the name of each unit whose forward begins
    checks: list[OrderCheck] | None  # of whoever compares ranks; None: not compared yet
    changed: bool  # whether the last forward ran other units than the one before
    _known: list[weakref.ref[Unit]]
    _recorded: list[weakref.ref[Unit]]  # in the forward that runs now
    _cursor: int  # how far that one has come in what is known

    def __init__(self, guess: list[weakref.ref[Unit]]) -> None:
        self.on_start = self.checks = None
        self.changed = False
        self._known, self._recorded, self._cursor = list(guess), [], 0

    def begin(self) -> None:
        """A forward begins."""
        self._recorded, self._cursor = [], 0

    def entered(self, unit: Unit) -> None:
        """A forward of ``unit`` begins in it."""
        if self.on_start is not None:
            self.on_start(unit.name)

    def started(self, unit: Unit) -> None:
        """``unit`` has its full parameters."""
        self._recorded.append(unit.ref)

    def keep(self) -> None:
        """The forward was the root's and is over."""
        self.changed = self._recorded != self._known
        self._known = self._recorded

    def after(self, unit: Unit) -> Iterable[weakref.ref[Unit]]:
        """The units after ``unit``, found from where the present forward stands."""
        try:
            self._cursor = self._known.index(unit.ref, self._cursor) + 1
        except ValueError:
            return ()  # not in the known order from here on
        return islice(self._known, self._cursor, None)

    def first(self) -> Iterable[weakref.ref[Unit]]:
        """The units of a forward, from its beginning."""
        return iter(self._known)

    def names(self) -> list[str]:
        """Of the units that the last forward of the root ran."""
        return [unit.name for unit in (ref() for ref in self._known) if unit is not None]
