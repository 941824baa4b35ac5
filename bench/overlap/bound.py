"""The least time that a step of sharded units can take, and what one schedule takes.

[Note: No schedule is faster]
One processor computes the forwards of the units in their order and then the backwards in the reverse order; one link
carries one message at a time: a gather before each use of a unit whose full parameters are not there, and a reduction
after each backward. Nothing else is assumed of a schedule: not the order of messages, not how far ahead it gathers, not
how many reductions are in flight. Only the bytes of full parameters that are gathered, or being gathered, at a time are
limited, if at all.

Let a computation end at time t. Its unit is still gathered then, so at most ``limit`` less its size of others are there
or on their way. All others that a later computation needs have their gather after t, however the schedule chose; so
that computation begins no earlier than t plus the time of these gathers. The choice that leaves the least of them,
parts of units allowed, is a fractional knapsack. The same at the end: after t the link still has those gathers and
all reductions that are not yet due. The largest such sum bounds every schedule, because each of its terms does.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class UnitCosts:
    """One unit. Seconds.

    Args:
        forward: Of computation.
        backward: Of computation.
        gather: On the link, before the forward.
        regather: The same before the backward; 0: its full parameters were kept.
        reduce: Of its gradients, on the link.
        nbytes: Of its full parameters.
    """

    forward: float
    backward: float
    gather: float
    regather: float
    reduce: float
    nbytes: int = 0


@dataclass(frozen=True)
class StepBound:
    """What a step takes at least. Seconds.

    Args:
        computation: Of computation alone.
        link: Of the messages that are needed, alone on the link.
        seconds: T_LB: no schedule within the memory takes less; see [Note: No schedule is faster].
        memory: The bytes of full parameters at a time for which this holds; None: any.
    """

    computation: float
    link: float
    seconds: float
    memory: int | None


@dataclass(frozen=True)
class Window:
    """What may be gathered ahead of the unit that computes.

    Args:
        units: So many.
        nbytes: Not a number of units but so many bytes of full parameters, and one unit in any case. 0: none.
        reductions: How many may be in flight: a unit's backward is over when all but so many of those before are.
    """

    units: int = 1
    nbytes: int | None = None
    reductions: int = 1

    def __post_init__(self) -> None:
        if self.units < 0 or (self.nbytes or 0) < 0 or self.reductions < 1:
            raise ValueError(f"a window is at least 0, and one reduction, got {self}")

    def after(self, units: Sequence[UnitCosts], index: int) -> int:
        """How many of ``units`` after the one at ``index`` are inside."""
        following = units[index + 1 :]
        if self.nbytes is None:
            return min(self.units, len(following))
        if self.nbytes == 0 or not following:
            return 0
        sizes = itertools.accumulate(unit.nbytes for unit in following)
        return max(1, sum(size <= self.nbytes for size in sizes))

    def memory(self, units: Sequence[UnitCosts]) -> int:
        """The most bytes of full parameters at a time: a unit and what is ahead of it, in either direction."""
        return max(
            sum(unit.nbytes for unit in order[i : i + 1 + self.after(order, i)])
            for order in (list(units), list(reversed(units)))
            for i in range(len(order))
        )


# ------------------------------------------------------------------ the bound


def step_bound(units: Sequence[UnitCosts], limit: int | None = None) -> StepBound:
    """The bound of one step of one microbatch.

    Args:
        units: In the order of the forward; a unit that is gathered again takes as long as the first time.
        limit: Bytes of full parameters at a time; at least the largest unit's. None: no limit.
    """
    if not units:
        raise ValueError("a step needs a unit")
    if limit is not None and limit < max(unit.nbytes for unit in units):
        raise ValueError(f"a limit of {limit} bytes is less than the largest unit")
    computing = sum(unit.forward + unit.backward for unit in units)
    again = _gathered_after(units[:-1], limit, units[-1].nbytes)
    link = sum(unit.gather + unit.reduce for unit in units) + again
    return StepBound(computing, link, max(link, least_seconds(units, limit)), limit)


def least_seconds(units: Sequence[UnitCosts], limit: int | None) -> float:
    """See [Note: No schedule is faster]: the longest of the chains in it."""
    count = len(units)
    steps = [*range(count), *reversed(range(count))]  # units by computation: forwards, then backwards
    ends: list[float] = []  # the least times at which computations end
    least = 0.0
    for place, index in enumerate(steps):
        begins = [ends[-1] if ends else 0.0]
        if place < count:  # its gather and those of all before, from the beginning
            begins.append(sum(unit.gather for unit in units[: index + 1]))
        for earlier in range(place):
            between = {each for each in steps[earlier + 1 : place + 1] if each != steps[earlier]}
            here = units[steps[earlier]].nbytes
            begins.append(ends[earlier] + _gathered_after([units[each] for each in sorted(between)], limit, here))
        backward = place >= count
        ends.append(max(begins) + (units[index].backward if backward else units[index].forward))
        if backward:  # the link still has these gathers, and the reductions of this unit and of all before it
            gathers = _gathered_after(units[:index], limit, units[index].nbytes)
            least = max(least, ends[-1] + gathers + sum(unit.reduce for unit in units[: index + 1]))
    return least


def _gathered_after(units: Sequence[UnitCosts], limit: int | None, here: int) -> float:
    """Seconds of gathers that are left if, beside ``here`` bytes, as much of ``units`` is there as the limit allows."""
    if limit is None:
        return 0.0
    room, left = limit - here, 0.0
    for unit in sorted(units, key=lambda unit: unit.gather / max(1, unit.nbytes), reverse=True):
        kept = min(unit.nbytes, room)
        room -= kept
        left += unit.gather * (1 - kept / unit.nbytes) if unit.nbytes else 0.0
    return left


# ------------------------------------------------------------------ a schedule


def keep_last(units: Sequence[UnitCosts], window: Window = Window()) -> list[UnitCosts]:
    """Do not gather the last unit again, and as many before it as are ahead at any time: backward begins with them."""
    turned = list(reversed(units))
    ahead = window.after([turned[0], *turned], 0)  # 0: none is kept
    kept = 1 + window.after(turned, 0) if ahead else 0
    return [replace(unit, regather=0.0) if i >= len(units) - kept else unit for i, unit in enumerate(units)]


def scheduled_seconds(units: Sequence[UnitCosts], window: Window) -> float:
    """Seconds from the first gather to the end of the last reduction, if nothing but the schedule costs time.

    A gather is issued when a unit begins to compute that has it in its window (an empty one: when it is needed), a
    reduction when its unit's backward ends; the link takes them in that order. A bounded number of reductions is in
    flight, which bounds the memory of gradients: the next unit waits for those before.
    """
    link = computed = 0.0
    arrived: list[float] = []
    for index, unit in enumerate(units):
        while len(arrived) <= index:
            link = max(link, computed) + units[len(arrived)].gather
            arrived.append(link)
        start = max(computed, arrived[index])
        while len(arrived) <= index + window.after(units, index):
            link = max(link, start) + units[len(arrived)].gather
            arrived.append(link)
        computed = start + unit.forward
    return _backward(list(reversed(units)), window, computed, link)


def _backward(order: Sequence[UnitCosts], window: Window, computed: float, link: float) -> float:
    """When the last reduction ends. ``computed``, ``link``: when computation and link are through with the forward."""
    arrived: list[float] = []
    reduced: list[float] = []  # ends of reductions

    def gather(issued: float) -> None:
        nonlocal link
        unit = order[len(arrived)]
        if unit.regather:
            link = max(link, issued) + unit.regather
        arrived.append(link if unit.regather else 0.0)

    for index, unit in enumerate(order):
        while len(arrived) <= index:
            gather(computed)
        start = max(computed, arrived[index])
        while len(arrived) <= index + window.after(order, index):
            gather(start)
        computed = max([start + unit.backward, *reduced[: len(reduced) + 1 - window.reductions]])
        link = max(link, computed) + unit.reduce
        reduced.append(link)
    return reduced[-1]
