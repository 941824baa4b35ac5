"""Why ranks are stuck, from the reports of all of them. Pure functions, without communication.

[Note: Why ranks are stuck]
All ranks of a process group have to launch the same collectives in the same order. Ranks that wait for a collective
are stuck for one of these reasons, which are looked for in this order:

- ``differ``: the launches of a group differ at a number that two ranks have come to: in their kind, in their units, or
  in how the parameters of the units are cut. They never match, or mix up parameters.
- ``out of step``: they match, but belong to different optimizer steps. Nobody need be stuck.
- ``raised``, ``exited``: a rank that others wait for has left the forward that they are in, or its backward, by an
  exception, or its process has ended.
- ``lost``: the process of such a rank does not answer any more.
- ``broken``: collectives failed although all processes are alive, as if the network had failed.
- ``deadlock``: no rank computes, and none waits for the network alone: the ranks that others wait for are all in
  collectives of the user.
- ``slow``: a rank computes, or cannot answer, and others wait for it. This is the only one after which training may go
  on.

A correct run must not be ended, so what is not known counts as slow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fullshard.progress import Launch
from fullshard.ranks.agreement import list_ranks, list_values
from fullshard.ranks.order import first_difference

__all__ = ["GroupReport", "Report", "Verdict", "judge"]

_UNITS_SHOWN = 3

_SAME_ORDER = (
    "All ranks have to run the same modules in the same order, with the same number of microbatches in each step. Look "
    "for control flow that depends on the rank or on its data, and for data loaders of different lengths; call modules "
    "that a rank does not need with an input of zeros, and add their outputs to the loss"
)
_SAME_CUTS = (
    "All ranks have to have the same parameters in the same order, cut them alike, and send them in the same dtypes. "
    "Look for modules that are made in another order, as from a set; for arguments of fully_shard that depend on the "
    "rank (layout, granularity, shard_placement_fn, mp_policy); for FULLSHARD_ variables that not all nodes have; and "
    "for different versions of fullshard or torch"
)


@dataclass(frozen=True)
class GroupReport:
    """The last launches of one process group on one rank."""

    ranks: Sequence[int]  # global ranks of the group
    first: int  # number of the first launch below
    launches: Sequence[Launch]

    @property
    def count(self) -> int:
        """Number of launches so far."""
        return self.first + len(self.launches)


@dataclass(frozen=True)
class Report:
    """What one rank is doing.

    Args:
        state: ``"waits"`` (for collectives of fullshard), ``"runs"``, ``"raised"``, ``"broken"`` (a collective
            failed), or ``"exited"``.
        place: Such as "the backward of unit 'layers.3' (step 12, microbatch 0)".
        seconds: Since when it has been there.
        foreign: The collective that is not fullshard's in which it waits, as "all_reduce, called at train.py:33".
        error: The exception that it raised.
        caught: One that it raised in its last steps, after which it went on.
        waits_for: Name of the group, and number of the launch that it waits for.
        forwards: Outermost forwards that it has begun.
        host: Its machine and process.
        siblings: Processes of the same launcher that run on its machine.
        order: Units whose forward has begun, in the last forward of the root.
        groups: Launches by name of the group.
        layouts: How the parameters of their units are cut and sent, by ``Launch.layouts``.
    """

    state: str
    place: str
    seconds: float = 0.0
    foreign: str | None = None
    error: str | None = None
    caught: str | None = None
    waits_for: tuple[str, int] | None = None
    forwards: int = 0
    host: tuple[str, int] = ("", 0)
    siblings: Sequence[int] = ()
    order: Sequence[str] = ()
    groups: Mapping[str, GroupReport] = field(default_factory=dict)
    layouts: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return it as values that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Report:
        """Return the report that ``to_json`` was called on."""
        groups = {
            name: GroupReport(each["ranks"], each["first"], [_launch(launch) for launch in each["launches"]])
            for name, each in value["groups"].items()
        }
        waits_for = None if value["waits_for"] is None else tuple(value["waits_for"])
        return cls(**{**value, "groups": groups, "waits_for": waits_for, "host": tuple(value["host"])})

    @property
    def doing(self) -> str:
        """What it does, for errors."""
        if self.state == "waits":
            return f"waits for a collective in {self.place}"
        if self.state == "broken":
            return f"had a collective fail in {self.place} ({self.error})"
        if self.state == "raised":
            return f"raised an exception ({self.error}); it is in {self.place}"
        if self.state == "exited":
            return f"has ended ({self.error or 'without an exception'}); it was in {self.place}"
        if self.foreign is not None:
            return f"waits in {self.foreign}, in {self.place}"
        return f"computes in {self.place}"


@dataclass(frozen=True)
class Verdict:
    """Why ranks are stuck.

    Args:
        kind: One of [Note: Why ranks are stuck].
        message: For users.
        culprits: The ranks that others wait for, as far as known.
    """

    kind: str
    message: str
    culprits: Sequence[int] = ()

    @property
    def is_final(self) -> bool:
        """True if ranks cannot go on."""
        return self.kind != "slow"


def judge(
    reports: Mapping[int, Report],
    lost: Mapping[int, str],
    silent: Collection[int] = (),
    *,
    world_size: int,
    mismatch: str = "",
) -> Verdict | None:
    """Return why ranks are stuck.

    Args:
        reports: By global rank, of those that have answered.
        lost: Ranks that do not answer any more, and the place where they were last; empty if it is not known.
        silent: Ranks that may answer yet.
        world_size: Ranks of the job. A rank may wait for one that uses no fullshard, about which nothing is known.
        mismatch: How launches differ, whether or not a rank is stuck: ``"differ"``, ``"out of step"``; empty if they do
            not, as far as is known.

    Returns:
        The reason; None if it is not known yet, or if nobody is stuck.
    """
    stuck = [rank for rank, report in reports.items() if report.state in ("waits", "broken")]
    if not stuck and not mismatch:
        return None
    waiting = f"{list_ranks(stuck)} wait{'s' * (len(stuck) == 1)}"
    doing = {rank: report.doing for rank, report in reports.items()}
    for rank, place in lost.items():
        doing[rank] = f"does not answer; it was in {place}" if place else "does not answer"
    now = f"Now: {list_values(dict(sorted(doing.items())))}."
    if (difference := _difference(reports)) is not None:
        culprits, told = difference
        message = (
            f"the ranks launch different collectives, which never match: {told}.{_order(reports)}{_caught(reports)} "
            f"{now} {_SAME_ORDER}"
        )
        return Verdict("differ", message, culprits)
    if (difference := _cuts(reports)) is not None:
        culprits, told = difference
        return Verdict("differ", f"the ranks mix up elements of parameters: {told}. {now} {_SAME_CUTS}", culprits)
    if mismatch == "out of step" and (difference := _steps(reports)) is not None:
        culprits, told = difference
        message = (
            "the ranks are in different optimizer steps, and gather parameters from shards of several steps, or add "
            f"gradients of several: {told}. {now} {_SAME_ORDER}. No rank may leave out a step of an optimizer. If it "
            "is meant, FULLSHARD_WATCHDOG_S=0 disables the watchdog"
        )
        return Verdict("out of step", message, culprits)
    if not stuck:
        return None
    wanted = _wanted(reports, stuck)
    late = {rank: _late(reports, reports[rank]) for rank in stuck}
    ended = [rank for rank in wanted if rank in reports and _has_left(rank, reports, late)]
    if ended:
        return _left(ended, reports, f"{waiting} for a rank that will not come", now)
    gone = [rank for rank in lost if rank in wanted]
    if gone:
        are = "is" if len(gone) == 1 else "are"
        message = (
            f"{list_ranks(gone)} {are} lost: the process has ended, hangs, or cannot be reached. {now} Look at "
            "the output and the machine of that rank: memory, signals, the network"
        )
        return Verdict("lost", message, gone)
    if silent:
        return None
    running = [
        rank for rank, report in reports.items() if report.state not in ("waits", "broken") and not report.foreign
    ]
    if len(reports) < world_size:
        running += [rank for rank, report in reports.items() if report.foreign is not None]
    if running:
        slow = [rank for rank in running if rank in wanted] or running
        told = list_values({rank: f"{reports[rank].doing}, for {reports[rank].seconds:.0f} s" for rank in slow})
        return Verdict("slow", f"{waiting} for slow ranks: {told}. Training goes on when they are through", slow)
    if any(report.state == "broken" for report in reports.values()):
        message = f"collectives failed although all ranks answer: the network between them may have failed. {now}"
        return Verdict("broken", message)
    if any(report.foreign is not None for report in reports.values()) and all(late.values()):
        culprits = sorted({each for of in late.values() for each in of if reports[each].foreign is not None})
        return Verdict("deadlock", f"all ranks wait, and none computes.{_order(reports)} {now} {_SAME_ORDER}", culprits)
    return None  # some wait for the network alone


def _left(ended: list[int], reports: Mapping[int, Report], waiting: str, now: str) -> Verdict:
    told = list_values({rank: reports[rank].doing for rank in ended})
    advice = (
        "Look for the error in the output of that rank; an exception that is handled has to be handled on all ranks"
        if any(reports[rank].error for rank in ended)
        else "Ranks may have different numbers of batches: see drop_last of data loaders"
    )
    return Verdict(reports[ended[0]].state, f"{waiting}: {told}. {now} {advice}", ended)


def _wanted(reports: Mapping[int, Report], stuck: Sequence[int]) -> set[int]:
    """Return the ranks that stuck ranks wait for: of their group, if it is known, else of all their groups."""
    wanted: set[int] = set()
    for rank in stuck:
        report = reports[rank]
        known = report.waits_for is not None and report.waits_for[0] in report.groups
        names = [report.waits_for[0]] if known and report.waits_for is not None else report.groups
        wanted |= {each for name in names for each in report.groups[name].ranks}
    return wanted


def _has_left(rank: int, reports: Mapping[int, Report], late: Mapping[int, Sequence[int]]) -> bool:
    """Return True if a rank will not come to the forward that others are in: it has ended, or has raised in that.

    A rank that has ended may have issued all that others wait for.
    """
    report = reports[rank]
    if report.state == "exited":
        unknown = any(reports[each].waits_for is None for each in late)
        return unknown or report.error is not None or any(rank in of for of in late.values())
    return report.state == "raised" and any(reports[each].forwards <= report.forwards for each in late)


def _launch(value: Sequence[Any]) -> Launch:
    kind, units, step, microbatch, group_steps, *layouts = value
    return Launch(kind, tuple(units), step, microbatch, group_steps, *map(tuple, layouts))  # older files have none


def _difference(reports: Mapping[int, Report]) -> tuple[list[int], str] | None:
    """Return ranks with another launch than most have at the same number of a group, and the first such number."""
    found = _first_different(reports, lambda launch: (launch.kind, launch.units))  # without steps
    if found is None:
        return None
    number, odd, here = found
    told = list_values(dict(zip(here, _describe([*here.values()]), strict=True)))
    return odd, f"collective {number} (from 0) of a process group is {told}"


def _cuts(reports: Mapping[int, Report]) -> tuple[list[int], str] | None:
    """Return ranks that cut the parameters of a unit in another way than most do, and the first such parameter."""
    found = _first_different(reports, lambda launch: launch.layouts)
    if found is None:
        return None
    _, odd, here = found
    launches = [*here.values()]
    if not all(len(launch.layouts) == len(launch.units) and all(launch.layouts) for launch in launches):
        return None  # a rank does not say it
    at = next(i for i in range(len(launches[0].units)) if len({launch.layouts[i] for launch in launches}) > 1)
    lines = {rank: reports[rank].layouts.get(str(launch.layouts[at]), "").split("\n") for rank, launch in here.items()}
    unit = repr(launches[0].units[at]) if launches[0].units[at] else "the root"
    for line in range(max(map(len, lines.values()))):
        told = {rank: own[line] if line < len(own) else "no more parameters" for rank, own in lines.items()}
        if len(set(told.values())) > 1:
            return odd, f"{unit} has {list_values(told)}"
    return odd, f"those of {unit}"


def _first_different(
    reports: Mapping[int, Report], of: Callable[[Launch], Any]
) -> tuple[int, list[int], dict[int, Launch]] | None:
    """Return the number of the first launches of a group that differ, ranks with another value than most, and them."""
    for name in dict.fromkeys(name for report in reports.values() for name in report.groups):
        own = {rank: report.groups[name] for rank, report in reports.items() if name in report.groups}
        first = max(group.first for group in own.values())
        for number in range(first, max(group.count for group in own.values())):
            here = {r: group.launches[number - group.first] for r, group in own.items() if number < group.count}
            if len(here) < 2:
                break
            values = {rank: of(launch) for rank, launch in here.items()}
            if len(set(values.values())) > 1:
                all_values = [*values.values()]
                usual = max(set(all_values), key=lambda value: (all_values.count(value), value == all_values[0]))
                return number, [rank for rank, value in values.items() if value != usual], here
    return None


def _steps(reports: Mapping[int, Report]) -> tuple[list[int], str] | None:
    """Return ranks in another step than most at the last launch that all ranks of a group have come to, and it."""
    for name in dict.fromkeys(name for report in reports.values() for name in report.groups):
        own = {rank: report.groups[name] for rank, report in reports.items() if name in report.groups}
        number = min(group.count for group in own.values()) - 1
        if number < max(group.first for group in own.values()):
            continue
        here = {rank: group.launches[number - group.first] for rank, group in own.items()}
        steps = [launch.group_steps for launch in here.values()]
        if len(set(steps)) > 1:
            usual = max(steps, key=steps.count)
            told = list_values(
                {
                    rank: f"{_describe_one(launch, 0)}, after {launch.group_steps} steps of an optimizer,"
                    for rank, launch in here.items()
                }
            )
            odd = [rank for rank, launch in here.items() if launch.group_steps != usual]
            return odd, f"collective {number} (from 0) of a process group is {told}"
    return None


def _order(reports: Mapping[int, Report]) -> str:
    """Return a sentence about a difference between the units that ran in the last forward, if there is one."""
    difference = first_difference({rank: report.order for rank, report in reports.items()})
    return "" if difference is None else f" Their last forwards ran different units {difference}."


def _caught(reports: Mapping[int, Report]) -> str:
    """Return a sentence about exceptions that some ranks have raised, and others have not."""
    caught = {rank: f"{each.caught}, and went on," for rank, each in reports.items() if each.caught is not None}
    if not caught or len(caught) == len(reports):
        return ""
    return f" Before that an exception was raised: {list_values(caught)}; handle it on all ranks, or on none."


def _describe(launches: Sequence[Launch]) -> list[str]:
    """Describe launches so that it is seen where they differ: after the units with which all of them begin."""
    alike = len({launch._replace(units=(), layouts=()) for launch in launches}) == 1
    common = 0
    while alike and len({launch.units[: common + 1] for launch in launches}) == 1:
        common += 1  # ends: the units differ
    return [_describe_one(launch, common) for launch in launches]


def _describe_one(launch: Launch, first: int) -> str:
    units = [repr(unit) if unit else "the root" for unit in launch.units]
    shown = units[first : first + _UNITS_SHOWN] or ["no more units"]
    more = len(units) - first - len(shown)
    names = ("... " if first else "") + ", ".join(shown) + (f" and {more} more" if more > 0 else "")
    return f"{launch.kind.replace('_', '-')} of {names} (step {launch.step}, microbatch {launch.microbatch})"


def _late(reports: Mapping[int, Report], waiting: Report) -> list[int]:
    """Return the ranks that have not issued what a rank waits for; none if that is not known."""
    if waiting.waits_for is None or waiting.waits_for[0] not in waiting.groups:
        return []
    name, number = waiting.waits_for
    members = [rank for rank in waiting.groups[name].ranks if rank in reports]
    return [r for r in members if name not in reports[r].groups or reports[r].groups[name].count <= number]
