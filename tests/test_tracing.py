"""Traces: segments without gaps, exposed communication and its reasons, late ranks, and the files."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fullshard
from front_ends import FrontEnd, each_front_end
from fullshard import FullshardError
from fullshard import memory as memory_module
from fullshard.debug.tracing.exposed import exposed_waits, late_ranks
from fullshard.debug.tracing.timeline import Launched, RankGroup, Segment, launches, memory, segments
from fullshard.progress import PROGRESS, Event
from models import Mlp
from ranks import Rank, on_ranks

WIDTH = 16
ALL = RankGroup("0", (0, 1))
GROUPS = {0: ALL}


def events(*each: tuple[Any, ...]) -> list[Event]:
    """Events of one microbatch."""
    return [Event(moment, 0, 0, *rest) for moment, *rest in each]


def test_segments_follow_each_other() -> None:
    """Each instant belongs to one: computation of a phase, waits, or work of the engine."""
    found = events(
        (0.0, "forward", "a"),
        (1.0, "begin", "all_gather b"),
        (1.1, "all_gather", "b", 0, 7),
        (1.2, "end", "all_gather b"),
        (2.0, "forward", "b"),
        (2.1, "begin", "wait_for_all_gather b"),
        (2.2, "wait", "b", 0, 7),
        (2.9, "memory", "64"),
        (3.0, "waited", "b"),
        (3.1, "end", "wait_for_all_gather b"),
        (5.0, "backward", "b"),
        (5.5, "memory", "-64"),
        (6.0, "user code after the backward", ""),
    )
    own = segments(found, GROUPS)
    assert [one.end for one in own[:-1]] == [other.begin for other in own[1:]]
    assert own[-1].end - own[0].begin == sum(segment.seconds for segment in own) == 6.0
    kinds: dict[tuple[str, str, str], float] = {}
    for segment in own:
        key = segment.activity, segment.phase, segment.units
        kinds[key] = kinds.get(key, 0.0) + segment.seconds
    assert {key: round(seconds, 6) for key, seconds in kinds.items()} == {
        ("compute", "forward", "a"): 1.8,
        ("overhead", "forward", "b"): 0.4,
        ("compute", "forward", "b"): 2.0,
        ("wait", "forward", "b"): 0.8,
        ("compute", "backward", "b"): 1.0,
    }
    assert launches(found, GROUPS) == {(ALL, 7): Launched(1.1, "all_gather", "b")}
    assert memory(found) == [(2.9, 64), (5.5, 0)]


def test_reasons_of_exposed_communication() -> None:
    """Up to the last issue of any rank it is that rank; after that the link, or that it was issued too late."""
    waits = [
        Segment(10.0, 16.0, 0, 0, "wait", "forward", "a", ALL, 1),  # issued at 5; rank 1 issues at 14
        Segment(20.0, 22.0, 0, 0, "wait", "forward", "b", ALL, 2),  # issued just before
        Segment(30.0, 31.0, 0, 0, "wait", "forward", "c", ALL, 3),  # all issued long before
        Segment(31.0, 40.0, 0, 0, "compute", "forward", "c"),
    ]
    own = {(ALL, n): Launched(t, "all_gather", u) for n, t, u in ((1, 5.0, "a"), (2, 19.9999, "b"), (3, 12.0, "c"))}
    other = {(ALL, n): Launched(t, "all_gather", u) for n, t, u in ((1, 14.0, "a"), (2, 18.0, "b"), (3, 13.0, "c"))}
    found = {each.units: each for each in exposed_waits(0, waits, {0: own, 1: other})}
    parts = {u: (each.late_issue, each.slow_link, each.slow_peer) for u, each in found.items()}
    assert parts == {"a": (0.0, 2.0, 4.0), "b": (2.0, 0.0, 0.0), "c": (0.0, 1.0, 0.0)}
    assert dict(found["a"].peers) == {1: 4.0}
    alone = {(RankGroup("0", (2, 3)), n): Launched(99.0, "all_gather", "a") for n in (1, 2, 3)}
    assert dict(exposed_waits(0, waits, {0: own, 1: other, 2: alone})[0].peers) == {1: 4.0}


@pytest.mark.parametrize("delay", [0.0, 0.05])
def test_late_ranks(delay: float) -> None:
    """A delay in every step is named, with rank, phase and unit; one in a single step, or of all ranks, is not."""
    times = {
        rank: [
            Segment(0.0, 0.1 + 0.01 * (step * 7 % 3) + (delay if (rank, unit) == (2, "u5") else 0.0)
                    + (0.5 if (rank, step, unit) == (1, 3, "u4") else 0.0), step, 0, "compute", "backward", unit)
            for step in range(8) for unit in ("u4", "u5")
        ]
        for rank in range(4)
    }  # fmt: skip
    found = late_ranks(times)
    assert [(each.rank, each.phase, each.units) for each in found] == ([(2, "backward", "u5")] if delay else [])
    assert not found or found[0].seconds == pytest.approx(delay)


@on_ranks(2)
@each_front_end
def test_a_trace(rank: Rank, front_end: FrontEnd, tmp_path: Path) -> None:
    """Parts add up to the time; the files are there, and name what ran; results have the same bits."""
    model = front_end.wrap(Mlp(WIDTH, WIDTH, WIDTH, WIDTH), rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    folder = tmp_path / "trace"
    with fullshard.trace(folder) as trace:
        since = time.time()
        for _ in range(3):
            step()
        took = time.time() - since
    assert set(trace.segments) == {0, 1}
    own = trace.segments[rank.rank]
    parts = sum(segment.seconds for segment in own)
    assert parts == pytest.approx(own[-1].end - own[0].begin) and took <= parts + 1e-3
    phases = {segment.phase for segment in own}
    assert {"forward", "backward", "the end of backward", "optimizer step"} <= phases
    kinds = {(each.kind, each.units) for each in trace.launches[rank.rank].values()}
    assert {kind for kind, _ in kinds} == {"all_gather", "reduce_scatter"}
    assert any("layers.1" in units for _, units in kinds)
    ends = [each.end for each in trace.launches[rank.rank].values()]
    assert any(ends) and (rank.device.type == "cpu" or all(ends))  # the host sees only what it waits for
    assert all(each.end is None or each.time <= each.end for each in trace.launches[rank.rank].values())
    assert trace.launches[0].keys() == trace.launches[1].keys()
    assert trace.memory[rank.rank] and min(nbytes for _, nbytes in trace.memory[rank.rank]) == 0
    assert "Exposed communication of rank " in trace.table()
    if rank.rank == 0:
        assert (folder / "table.txt").read_text() == trace.table() + "\n"
        stored = json.loads((folder / "trace.json").read_text())["traceEvents"]
        assert {event["pid"] for event in stored} == {0, 1} and {event["ph"] for event in stored} == {"M", "X", "C"}
        assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in stored if event["ph"] == "X")
    assert not PROGRESS.observers


def test_streams_of_an_accelerator() -> None:
    """Marks of other streams, at other times, neither cut segments nor make gaps; the end of a collective is its own.

    A wait for copies is exposed, too.
    """
    found = events(
        (0.0, "forward", "a"),
        (4.0, "all_gather", "b", 0, 7),  # the communication stream gets there later than the host
        (6.0, "arrived", "", 0, 7),
        (5.9, "memory", "64"),
        (1.0, "wait", "b", 0, 7),
        (6.1, "waited", "b", 0, 7),
        (6.0, "forward", "b"),  # on a stream of the user's
        (6.5, "wait", "b"),
        (7.0, "waited", "b"),
        (7.5, "user code after the forward", ""),
    )
    own = segments(found, GROUPS)
    assert [(s.begin, s.end, s.activity) for s in own] == [
        (0.0, 1.0, "compute"), (1.0, 6.1, "wait"), (6.1, 6.5, "compute"), (6.5, 7.0, "wait"), (7.0, 7.5, "compute"),
    ]  # fmt: skip
    assert launches(found, GROUPS) == {(ALL, 7): Launched(4.0, "all_gather", "b", end=6.0)}
    exposed = {(each.kind, each.units): each.seconds for each in exposed_waits(0, own, {0: launches(found, GROUPS)})}
    assert exposed == {("all_gather", "b"): pytest.approx(5.1), ("copy", "b"): pytest.approx(0.5)}


@on_ranks(2)
def test_what_a_trace_refuses(rank: Rank, tmp_path: Path) -> None:
    """A folder that cannot be made raises on all ranks; a model that is new on an accelerator."""
    if rank.device.type != "cpu":
        memory_module._device_streams.clear()
        with pytest.raises(FullshardError, match="expected the first forward on an accelerator before"):  # noqa: PT012
            with fullshard.trace(tmp_path / "inside"):
                model = fullshard.fully_shard(nn.Linear(2, 2).to(rank.device))
                model(torch.ones(1, 2, device=rank.device))
    (tmp_path / "file").write_text("")
    with pytest.raises(FullshardError, match="cannot write the trace to"), fullshard.trace(tmp_path / "file" / "c"):
        pass
    assert not PROGRESS.observers
