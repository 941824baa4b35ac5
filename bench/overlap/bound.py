"""The least time that a step of sharded units can take, and the memory of gathering ahead.

The limits: computation alone, the link alone, the chain of first gather, computation and last reduction, and the
schedule that gathers ``depth`` units ahead.
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
    """Lower bounds on a step, in seconds.

    Args:
        computation: LB1.
        link: LB2.
        chain: LB3.
        schedule: LB4 at the depth asked for.
        memory: Bytes of full parameters that this depth may hold at once.
    """

    computation: float
    link: float
    chain: float
    schedule: float
    memory: int

    @property
    def seconds(self) -> float:
        """T_LB: the largest of them."""
        return max(self.computation, self.link, self.chain, self.schedule)


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


def keep_last(units: Sequence[UnitCosts], window: Window = Window()) -> list[UnitCosts]:
    """Do not gather the last unit again, and as many before it as are ahead at any time: backward begins with them."""
    turned = list(reversed(units))
    ahead = window.after([turned[0], *turned], 0)  # 0: none is kept
    kept = 1 + window.after(turned, 0) if ahead else 0
    return [replace(unit, regather=0.0) if i >= len(units) - kept else unit for i, unit in enumerate(units)]


def step_bound(units: Sequence[UnitCosts], window: Window = Window()) -> StepBound:
    """The bounds of one step of one microbatch.

    Args:
        units: In the order of the forward.
        window: What is gathered ahead.
    """
    if not units:
        raise ValueError("a step needs a unit")
    computing = sum(unit.forward + unit.backward for unit in units)
    return StepBound(
        computation=computing,
        link=sum(unit.gather + unit.regather + unit.reduce for unit in units),
        chain=units[0].gather + computing + units[0].reduce,
        schedule=scheduled_seconds(units, window),
        memory=max(sum(u.nbytes for u in units[i : i + 1 + window.after(units, i)]) for i in range(len(units))),
    )


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
