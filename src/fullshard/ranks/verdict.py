"""Pure functions that find out from the reports of all ranks why they are stuck.

[Note: Why ranks are stuck]
All ranks of a process group have to launch the same collectives in the same order. Ranks that wait for a collective
are stuck for one of these reasons, which are looked for in this order:

- ``differ``: the launches of a group differ at a number that two ranks have come to: in their kind, in their units, or
  in how the parameters of the units are cut. They never match, or mix up parameters.
- ``out of step``: they match, but belong to different optimizer steps. Nobody need be stuck.
- ``raised``, ``exited``: a rank that others wait for has left the forward that they are in, or its backward, by an
  exception, or its process has ended.
- ``lost``: the process of such a rank is gone, or has not answered for long.
- ``calls``: what is a launch on one rank is, at its number in the process group, a collective of the user's on another.
- ``deadlock``: ranks wait for each other, in collectives of fullshard or of the user's.
- ``slow``: a rank computes, or cannot answer, and others wait for it.
- ``broken``: collectives failed although all processes are alive, as if the network had failed.

A correct run must not be ended: only what is known ends one. What is not known counts as ``slow``, which is reported,
and after which training may go on. So who waits in a collective of the user's waits for the ranks of its group that
are known not to have called it, and for nobody else.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, TypeVar

from fullshard.progress import Launch
from fullshard.ranks.agreement import list_ranks, list_values, odd_ranks, values_of_ranks

__all__ = ["OURS", "GroupReport", "Report", "Verdict", "explain_units", "judge"]

_T = TypeVar("_T")

OURS = "a launch of fullshard"  # among the collectives of a process group; ``Report.groups`` say more about it
_UNITS_SHOWN = 3
_VALUES_SHOWN = 5  # of what ranks do now: each is a line
_CHARACTERS_SHOWN = 600  # of a line

_SAME_ORDER = (
    "All ranks have to run the same modules in the same order, with the same number of microbatches in each step. Look "
    "for control flow that depends on the rank or on its data, and for data loaders of different lengths; call modules "
    "that a rank does not need with an input of zeros, and add their outputs to the loss"
)
_SAME_STEPS = (
    "No rank may leave out a step of an optimizer, or a microbatch. If it is meant, FULLSHARD_WATCHDOG_S=0 disables "
    "the watchdog"
)
_SAME_CUTS = (
    "All ranks have to have the same parameters in the same order, cut them alike, and send them in the same dtypes. "
    "Look for modules that are made in another order, as from a set; for arguments of fully_shard that depend on the "
    "rank (layout, granularity, shard_placement_fn, mp_policy); for FULLSHARD_ variables that not all nodes have; and "
    "for different versions of fullshard or torch"
)
_SAME_CALLS = (
    "All ranks of a group have to call the same collectives in the same order. full_tensor(), norms, clipping, state "
    "dicts, save and load are collectives, too: call them on all ranks, also if one rank alone uses the result"
)
_RAISED = "Look for the error in the output of that rank; an exception that is handled has to be handled on all ranks"
_ENDED = "Look for an error in the output of that rank; or ranks have different numbers of batches (drop_last)"
_LOST = "Look at the output and the machine of that rank: memory (was it killed?), signals, the network"
_BROKEN = "Look at the network between the machines, and at the settings of the back end"


@dataclass(frozen=True)
class GroupReport(Generic[_T]):
    """The last collectives of one process group on one rank, numbered.

    They are launches of fullshard, from 0; or all collectives as torch's flight recorder has them, from 1, each
    ``OURS`` or such as "all_gather in full_tensor, called at train.py:33".

    Attributes:
        ranks: Global ranks of the group.
        first: Number of the first collective below.
        calls: The collectives.
        began: Launches before the last outermost forward.
    """

    ranks: Sequence[int]
    first: int
    calls: Sequence[_T]
    began: int = 0

    @property
    def end(self) -> int:
        """Number of the next collective."""
        return self.first + len(self.calls)


@dataclass(frozen=True)
class Report:
    """State of one rank and its last collectives, as other ranks read it.

    Args:
        state: ``"waits"`` (for collectives of fullshard), ``"runs"``, ``"raised"``, ``"broken"`` (a collective
            failed), or ``"exited"``.
        place: Such as "the backward of unit 'layers.3' (step 12, microbatch 0)".
        seconds: Since when it has been there.
        foreign: The collective that is not fullshard's in which it waits, as in ``collectives``.
        foreign_at: Name of the group, and number of that collective.
        error: The exception that it raised.
        caught: One that it raised in its last steps, after which it went on.
        waits_for: Name of the group, and number of the launch that it waits for.
        order: Units whose forward has begun, in the last forward of the root.
        groups: Launches by name of the group.
        collectives: All collectives, also the user's, by name of the group.
        layouts: How the parameters of their units are cut and sent, by ``Launch.layouts``.
        locks: Those of processes on its machine, and their states, as of ``ranks/liveness.py``.
    """

    state: str
    place: str
    seconds: float = 0.0
    foreign: str | None = None
    foreign_at: tuple[str, int] | None = None
    error: str | None = None
    caught: str | None = None
    waits_for: tuple[str, int] | None = None
    order: Sequence[str] = ()
    groups: Mapping[str, GroupReport[Launch]] = field(default_factory=dict)
    collectives: Mapping[str, GroupReport[str]] = field(default_factory=dict)
    layouts: Mapping[str, str] = field(default_factory=dict)
    locks: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return it as values that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Report:
        """Return the report that ``to_json`` was called on."""
        found: dict[str, Any] = {
            name: None if value[name] is None else tuple(value[name]) for name in ("waits_for", "foreign_at")
        }
        found["groups"] = {
            name: GroupReport(**{**each, "calls": [_launch(launch) for launch in each["calls"]]})
            for name, each in value["groups"].items()
        }
        found["collectives"] = {name: GroupReport(**each) for name, each in value["collectives"].items()}
        return cls(**{**value, **found})

    @property
    def related(self) -> dict[str, GroupReport[Launch]]:
        """The groups in which it has launched, and that of the barrier that it waits in."""
        own = None if self.waits_for is None else self.waits_for[0]
        return {name: group for name, group in self.groups.items() if group.calls or name == own}

    @property
    def awaited(self) -> tuple[str, int] | None:
        """The group and the number of the launch that it waits for, if both are known."""
        return self.waits_for if self.waits_for is not None and self.waits_for[0] in self.groups else None

    @property
    def doing(self) -> str:
        """The activity of the rank in words, for errors."""
        runs = f"computes in {self.place}" if self.foreign is None else f"waits in {self.foreign}, in {self.place}"
        ended = self.error or "without an exception that is known"
        reason = {
            "waits": f"waits for a collective in {self.place}",
            "broken": f"had a collective fail in {self.place} ({self.error})",
            "raised": f"raised an exception ({self.error}); it is in {self.place}",
            "exited": f"has ended ({ended}); it was in {self.place}",
        }
        return reason.get(self.state, runs)


@dataclass(frozen=True)
class Verdict:
    """Why ranks are stuck.

    Args:
        kind: One of [Note: Why ranks are stuck].
        message: For users; at most ten lines.
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
    reports: Mapping[int, Report], lost: Mapping[int, str], silent: Collection[int] = (), *, mismatch: str = ""
) -> Verdict | None:
    """Return why ranks are stuck.

    Args:
        reports: By global rank, of those that have answered.
        lost: Ranks that are gone, and what is known of them; empty if nothing is.
        silent: Ranks that may answer yet.
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
    doing |= {rank: f"is lost: {reason}" if reason else "is lost" for rank, reason in lost.items()}
    now = [f"  {each}" for each in values_of_ranks(dict(sorted(doing.items())), _VALUES_SHOWN)]

    def verdict(kind: str, culprits: Sequence[int], reason: str, advice: str, *further: str) -> Verdict:
        lines = [reason, *filter(None, further), "Now:", *now, advice]
        return Verdict(kind, "\n".join(line[:_CHARACTERS_SHOWN] for line in lines), culprits)

    if (difference := _difference(reports)) is not None:
        reason = f"the ranks launch different collectives, which never match: {difference[1]}"
        return verdict("differ", difference[0], reason, _SAME_ORDER, _order(reports), _caught(reports))
    if (difference := _cuts(reports)) is not None:
        reason = f"the ranks mix up elements of parameters: {difference[1]}"
        return verdict("differ", difference[0], reason, _SAME_CUTS)
    if mismatch == "out of step" and (difference := _steps(reports)) is not None:
        reason = (
            "the ranks are in different optimizer steps, and gather parameters from shards of several steps, or add "
            f"gradients of several: {difference[1]}"
        )
        return verdict("out of step", difference[0], reason, _SAME_STEPS)
    if not stuck:
        return None
    late = {rank: _late(reports, rank) for rank in reports}
    wanted = _wanted(reports, stuck)
    if ended := [rank for rank in sorted(wanted & reports.keys()) if _has_left(rank, reports, stuck, late)]:
        report = reports[ended[0]]
        reason = f"{waiting} for {list_ranks(ended)}, which will not come"
        return verdict(report.state, ended, reason, _RAISED if report.error else _ENDED, _order(reports))
    if gone := [rank for rank in lost if rank in wanted]:
        reason = f"{waiting}, but {list_ranks(gone)} {'is' if len(gone) == 1 else 'are'} lost"
        return verdict("lost", gone, reason, _LOST)
    if silent:
        return None
    if (difference := _calls(reports)) is not None:
        reason = f"{waiting} for ever, because ranks have called different collectives: {difference[1]}"
        return verdict("calls", difference[0], reason, _SAME_CALLS)
    if locked := _deadlocked(late):
        culprits = [rank for rank in locked if reports[rank].foreign is not None] or locked
        reason = f"{list_ranks(locked)} wait for each other, and for ever"
        return verdict("deadlock", culprits, reason, _SAME_CALLS, _order(reports))
    slow = sorted({rank for each in stuck for rank in late[each]} - set(stuck))
    slow = slow or sorted(rank for rank in wanted & reports.keys() if rank not in stuck)
    if slow:
        reason = list_values({rank: f"{reports[rank].doing}, for {reports[rank].seconds:.0f} s" for rank in slow})
        return Verdict("slow", f"{waiting} for slow ranks: {reason}. Training goes on when they are through", slow)
    if any(report.state == "broken" for report in reports.values()):
        reason = "collectives failed although all ranks answer: the network between them may have failed"
        return verdict("broken", (), reason, _BROKEN)
    return None  # some wait for the network alone


def explain_units(units: Mapping[int, Mapping[str, str]]) -> str:
    """Return an error message about two ranks that differ in the parameters of the same units.

    Args:
        units: By global rank and name of the unit, a line for each parameter.
    """
    for at in (0, None):  # first without the places in a flat parameter, which are others in all of it
        for name in dict.fromkeys(name for own in units.values() for name in own):
            parameters = (own[name].split("\n") for own in units.values())
            for lines in itertools.zip_longest(*parameters, fillvalue="no more parameters"):
                if len({line if at is None else line.split(", from element ")[at] for line in lines}) > 1:
                    return (
                        f"ranks have sharded different parameters: {_unit_called(name)} has "
                        f"{list_values(dict(zip(units, lines, strict=True)))}. All ranks of a process group have to "
                        "shard the same parameters alike: names, shapes, dtypes, requires_grad, and the arguments of "
                        "fully_shard"
                    )
    raise AssertionError("digests differ but units do not")


def _wanted(reports: Mapping[int, Report], stuck: Sequence[int]) -> set[int]:
    """Return the ranks that stuck ranks wait for: of their group, if it is known, else of all their groups."""
    wanted: set[int] = set()
    for rank in stuck:
        report = reports[rank]
        names = report.related if report.awaited is None else [report.awaited[0]]
        wanted |= {each for name in names for each in report.groups[name].ranks}
    return wanted


def _has_left(
    rank: int, reports: Mapping[int, Report], stuck: Sequence[int], late: Mapping[int, Sequence[int]]
) -> bool:
    """Return True if a rank will not come to what others wait for.

    One that has ended may have issued it. One that has raised an exception may go on with its next forward, unless it
    has launched collectives in the one that others are in.
    """
    report = reports[rank]
    if report.state == "exited":
        return any(
            rank in late[each] or reports[each].waits_for is None or reports[each].state == "broken" for each in stuck
        )
    if report.state != "raised":
        return False
    return any(
        own.began < own.end <= _awaited(reports[each], name) and own.began == reports[each].groups[name].began
        for name, own in report.groups.items()
        for each in stuck
        if name in reports[each].groups
    )


def _awaited(report: Report, name: str) -> int:
    """Return the number of the launch of a group that a rank waits for; of its last one, if that is not known."""
    if report.awaited is None:
        return report.groups[name].end - 1
    return report.awaited[1] if report.awaited[0] == name else -1


def _late(reports: Mapping[int, Report], rank: int) -> list[int]:
    """Return the ranks that are known not to have issued what a rank waits for."""
    own = reports[rank]
    if own.state in ("waits", "broken"):
        if own.awaited is None:
            return []
        name, number = own.awaited
        members = [each for each in own.groups[name].ranks if each in reports]
        return [r for r in members if name not in reports[r].groups or reports[r].groups[name].end <= number]
    if own.state != "runs" or own.foreign_at is None:
        return []
    name, number = own.foreign_at
    return [r for r in own.collectives[name].ranks if (of := _of(reports, name, r, own)) and of.end <= number]


def _of(reports: Mapping[int, Report], name: str, rank: int, other: Report) -> GroupReport[str] | None:
    """Return the collectives of a group on a rank that is in the very group that another one means by the name."""
    found = reports[rank].collectives.get(name) if rank in reports else None
    return found if found is not None and found.ranks == other.collectives[name].ranks else None


def _deadlocked(late: Mapping[int, Sequence[int]]) -> list[int]:
    """Return the ranks that wait for each other, and those that wait for them."""
    locked = set(late)
    while free := {rank for rank in locked if not any(other in locked for other in late[rank])}:
        locked -= free
    return sorted(locked)


def _calls(reports: Mapping[int, Report]) -> tuple[list[int], str] | None:
    """Return the ranks that have called a collective of their own where others have launched, and both."""
    for report in reports.values():
        for name, own in report.collectives.items():
            every = {r: of for r in own.ranks if (of := _of(reports, name, r, report)) is not None}
            if len(every) < 2:
                continue
            for number in range(max(of.first for of in every.values()), max(of.end for of in every.values())):
                here = {r: of.calls[number - of.first] for r, of in every.items() if number < of.end}
                odd = [r for r, call in here.items() if call != OURS]
                if 0 < len(odd) < len(here):
                    return odd, f"number {number} of a process group is {list_values(here)}"
    return None


def _launch(value: Sequence[Any]) -> Launch:
    kind, units, step, microbatch, group_steps, *layouts = value
    return Launch(kind, tuple(units), step, microbatch, group_steps, *map(tuple, layouts))


def _difference(reports: Mapping[int, Report]) -> tuple[list[int], str] | None:
    """Return ranks with another launch than most have at the same number of a group, and the first such number."""
    found = _first_different(reports, lambda launch: (launch.kind, launch.units, launch.numbers))  # without steps
    if found is None:
        return None
    number, odd, here = found
    reason = list_values(dict(zip(here, _describe([*here.values()]), strict=True)))
    return odd, f"collective {number} (from 0) of a process group is {reason}"


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
    unit = _unit_called(launches[0].units[at])
    for line in range(max(map(len, lines.values()))):
        reason = {rank: own[line] if line < len(own) else "no more parameters" for rank, own in lines.items()}
        if len(set(reason.values())) > 1:
            return odd, f"{unit} has {list_values(reason)}"
    return odd, f"those of {unit}"


def _first_different(
    reports: Mapping[int, Report], of: Callable[[Launch], Any]
) -> tuple[int, list[int], dict[int, Launch]] | None:
    """Return the number of the first launches of a group that differ, ranks with another value than most, and them."""
    for name in dict.fromkeys(name for report in reports.values() for name in report.groups):
        own = {rank: report.groups[name] for rank, report in reports.items() if name in report.groups}
        first = max(group.first for group in own.values())
        for number in range(first, max(group.end for group in own.values())):
            here = {r: group.calls[number - group.first] for r, group in own.items() if number < group.end}
            if len(here) < 2:
                break
            if odd := odd_ranks({rank: of(launch) for rank, launch in here.items()}):
                return number, odd, here
    return None


def _steps(reports: Mapping[int, Report]) -> tuple[list[int], str] | None:
    """Return ranks in another step than most at the last launch that all ranks of a group have come to, and it."""
    for name in dict.fromkeys(name for report in reports.values() for name in report.groups):
        own = {rank: report.groups[name] for rank, report in reports.items() if name in report.groups}
        number = min(group.end for group in own.values()) - 1
        if number < max(group.first for group in own.values()):
            continue
        here = {rank: group.calls[number - group.first] for rank, group in own.items()}
        if odd := odd_ranks({rank: launch.group_steps for rank, launch in here.items()}):
            reason = {
                rank: f"{_describe_one(launch, 0)}, after {launch.group_steps} steps of an optimizer,"
                for rank, launch in here.items()
            }
            return odd, f"collective {number} (from 0) of a process group is {list_values(reason)}"
    return None


def _order(reports: Mapping[int, Report]) -> str:
    """Return a sentence about a difference between the units that ran in the last forward, if there is one."""
    difference = _first_different_unit({rank: report.order for rank, report in reports.items()})
    return "" if difference is None else f"Their last forwards ran different units {difference}"


def _first_different_unit(orders: Mapping[int, Sequence[str]]) -> str | None:
    """Return where the units that ran, by global rank, differ first; None if they agree as far as known."""
    for position in range(max(map(len, orders.values()), default=0)):
        here = {rank: _unit_called(order[position]) for rank, order in orders.items() if position < len(order)}
        if len(set(here.values())) > 1:
            return f"at position {position} (from 0): {list_values(here)}"
    return None


def _caught(reports: Mapping[int, Report]) -> str:
    """Return a sentence about exceptions that some ranks have raised, and others have not."""
    caught = {rank: f"{each.caught}, and went on," for rank, each in reports.items() if each.caught is not None}
    if not caught or len(caught) == len(reports):
        return ""
    return f"Before that an exception was raised: {list_values(caught)}; handle it on all ranks, or on none"


def _describe(launches: Sequence[Launch]) -> list[str]:
    """Describe launches so that it is seen where they differ: after the units with which all of them begin."""
    alike = len({launch._replace(units=(), layouts=(), numbers=()) for launch in launches}) == 1
    common = 0
    while alike and len({(each.units[: common + 1], each.numbers[: common + 1]) for each in launches}) == 1:
        common += 1  # ends: the units differ
    numbered = any(any(launch.numbers) for launch in launches)
    return [_describe_one(launch, common, numbered=numbered) for launch in launches]


def _describe_one(launch: Launch, first: int, *, numbered: bool = False) -> str:
    units = [_unit_called(unit) for unit in launch.units]
    for at, number in enumerate(launch.numbers if numbered else ()):
        units[at] += f" of model {number + 1}"  # of those that have such a unit, in the order of their first forwards
    shown = units[first : first + _UNITS_SHOWN] or ["no more units"]
    more = len(units) - first - len(shown)
    names = ("... " if first else "") + ", ".join(shown) + (f" and {more} more" if more > 0 else "")
    return f"{launch.kind.replace('_', '-')} of {names} (step {launch.step}, microbatch {launch.microbatch})"


def _unit_called(name: str) -> str:
    return repr(name) if name else "the root"
