"""Communication that nothing hides, for which reasons, and ranks that are late.

[Note: Reasons of exposed communication]
A rank waits for a collective from w to e. Some rank was the last to issue it, at time t. Up to t the wait is for that
rank (``slow peer``). The rest is the time of the messages: ``late issue`` if this rank has itself issued the collective
only just before it waited, so that nothing could hide it, else ``slow link``. Waits of an accelerator for copies, as of
parameters and optimizer state that are offloaded to the host, are ``slow link``, too.

[Note: Late ranks]
Ranks that wait for each other take equally long, so durations do not tell who is slow; times of arrival do. Since its
last wait, a rank has computed for some time until it issued the next collective. A rank that needs longer for the same
unit and phase than the other ranks, in the median over steps, is late there. Single delays, which every machine has,
do not count.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fullshard.debug.tracing.timeline import Launched, RankGroup, Segment

__all__ = ["Exposed", "LateRank", "exposed_waits", "late_ranks"]

JUST_BEFORE_S = 0.0005  # a collective is issued so shortly before it is waited for
_LEAST_S = 0.005  # lateness that is reported
_LEAST_SHARE = 0.2  # of what the other ranks need there
_LEAST_QUARTILE = 0.4  # of the median: the delay is there in most steps

_Key = tuple[RankGroup, int]


@dataclass
class Exposed:
    """Seconds that one rank waited for one kind of collective of some units, by reason."""

    kind: str
    units: str
    count: int = 0
    late_issue: float = 0.0
    slow_link: float = 0.0
    slow_peer: float = 0.0
    peers: dict[int, float] = field(default_factory=lambda: defaultdict(float))  # seconds by the rank waited for

    @property
    def seconds(self) -> float:
        """Exposed seconds in total: late issue, slow link, slow peer."""
        return self.late_issue + self.slow_link + self.slow_peer


class LateRank(NamedTuple):
    """A rank that needs longer than others for a phase of a unit, in the median over steps."""

    seconds: float
    rank: int
    phase: str
    units: str


def exposed_waits(
    rank: int, segments: Sequence[Segment], launches: Mapping[int, Mapping[_Key, Launched]]
) -> list[Exposed]:
    """Sum up the waits of a rank, the longest first.

    Args:
        rank: The rank.
        segments: What it did.
        launches: Of all ranks.
    """
    found: dict[tuple[str, str], Exposed] = {}
    for segment in segments:
        if segment.activity != "wait":
            continue
        awaited = segment.group, segment.number
        own = launches[rank].get(awaited) if segment.number >= 0 else Launched(0.0, "copy", segment.units)
        if own is None:  # issued before the trace
            continue
        exposed = found.setdefault((own.kind, own.units), Exposed(own.kind, own.units))
        arrivals = {rank: own.time} | {r: of[awaited].time for r, of in launches.items() if awaited in of}
        last = max(arrivals, key=lambda r: arrivals[r])
        arrived = min(max(arrivals[last], segment.begin), segment.end)
        exposed.count += 1
        exposed.slow_peer += arrived - segment.begin
        if last != rank:
            exposed.peers[last] += arrived - segment.begin
        if segment.begin - own.time < JUST_BEFORE_S:
            exposed.late_issue += segment.end - arrived
        else:
            exposed.slow_link += segment.end - arrived
    return sorted(found.values(), key=lambda each: -each.seconds)


def late_ranks(segments: Mapping[int, Sequence[Segment]]) -> list[LateRank]:
    """Return ranks that need longer than others, the latest first. See [Note: Late ranks].

    Args:
        segments: What all ranks did.
    """
    times: dict[tuple[str, str], dict[int, dict[int, float]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(float))
    )
    for rank, own in segments.items():
        for segment in own:
            if segment.activity != "wait":
                times[segment.phase, segment.units][segment.step][rank] += segment.seconds
    found = []
    for (phase, units), by_step in times.items():
        steps = [of for of in by_step.values() if of.keys() == segments.keys()]
        for rank in segments if len(segments) > 1 and len(steps) > 2 else ():
            others = [statistics.median(s for r, s in of.items() if r != rank) for of in steps]
            excess = [of[rank] - other for of, other in zip(steps, others, strict=True)]
            late, usual = statistics.median(excess), statistics.median(others)
            quartile = statistics.quantiles(excess, n=4)[0]
            if late > max(_LEAST_S, _LEAST_SHARE * usual) and quartile > _LEAST_QUARTILE * late:
                found.append(LateRank(late, rank, phase, units))
    return sorted(found, reverse=True)
