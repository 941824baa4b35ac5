"""The order of a step's events, out of a trace that the tests keep: three blocks and the root, two ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from bench.environment import REPOSITORY

from pictures import style
from pictures.style import Palette

SLOW = False
TRACE = REPOSITORY / "tests" / "golden" / "traces" / "shard-2.txt"
LINE = re.compile(r"  (\w+) +(root|blocks\.\d+)(?: (.*))?$")


def record() -> dict[str, Any]:
    """The events of the first step, ``[kind, unit, rest]``."""
    (step,) = re.findall(r"# step 1\n(.*?)(?=# step|\Z)", TRACE.read_text(encoding="utf-8"), re.DOTALL)
    found = [LINE.match(line) for line in step.splitlines()]
    return {"trace": TRACE.name, "events": [[each[1], each[2], each[3] or ""] for each in found if each is not None]}


WAIT = 0.7  # how long a collective takes that nothing overlaps


class Bar(NamedTuple):
    """Something of a unit, from one moment to another."""

    unit: str
    what: str
    begin: float
    end: float


def bars(events: Sequence[Sequence[str]]) -> dict[str, list[Bar]]:
    """Lanes of bars. Each stretch of computation takes one unit of time, and what nothing overlaps a part of one.

    A unit computes from the mark of its forward or backward to the next event that is not computation. An all-gather
    takes from its launch until its unit computes, a reduce-scatter until the memory of its gradients is freed.
    Gradients are there from the unit's backward on.
    """
    lanes: dict[str, list[Bar]] = {
        name: [] for name in ("compute", "all-gather", "reduce-scatter", "parameters", "gradients")
    }
    begun: dict[tuple[str, str], float] = {}
    now = 0.0

    def ended(lane: str, unit: str, what: str) -> None:
        nonlocal now
        begin = begun.pop((lane, unit))
        if begin == now and lane in ("all-gather", "reduce-scatter"):
            now += WAIT
        lanes[lane].append(Bar(unit, what, begin, now))

    for kind, unit, rest in events:
        if kind in ("forward", "backward"):
            if ("all-gather", unit) in begun:
                ended("all-gather", unit, "")
            if kind == "backward":
                begun["gradients", unit] = now
            lanes["compute"].append(Bar(unit, kind, now, now + 1))
            now += 1
        elif kind in ("all_gather", "reduce_scatter"):
            begun[kind.replace("_", "-"), unit] = now
        elif kind == "free" and rest.startswith("(gradients)"):
            ended("reduce-scatter", unit, "")
            ended("gradients", unit, "")
        elif kind == "alloc" and not rest.startswith("("):
            begun["parameters", unit] = now
        elif kind == "free" and not rest.startswith("("):
            ended("parameters", unit, "")
    return lanes


LEFT, TOP, HIGH = 1.75, 1.0, 0.36
LANES = ("compute", "all-gather", "reduce-scatter")


def draw(data: Any, palette: Palette) -> Any:
    figure, axis = style.canvas(5.3)
    title = "While one unit computes, the next is all-gathered and the last is reduced"
    style.heading(figure, palette, title, "One step of a root with three blocks. Time runs to the right.")
    lanes = bars(data["events"])
    last = max(bar.end for lane in lanes.values() for bar in lane)
    scale = (style.WIDTH - LEFT - 0.15) / last

    def put(bar: Bar, y: float, color: str, ink: str, label: str, high: float = HIGH) -> None:
        x, width = LEFT + bar.begin * scale, (bar.end - bar.begin) * scale
        style.box(axis, x, y, width, high, color, edgecolor=palette.background, linewidth=1.2)
        axis.text(x + width / 2, y + high / 2 + 0.01, label, ha="center", va="center", color=ink, fontsize=10)

    colors = {
        "compute": (palette.faint, palette.text),
        "all-gather": (palette.accent, palette.on_accent),
        "reduce-scatter": (palette.second, palette.on_accent),
    }
    y = TOP + 0.22
    for lane in LANES:
        axis.text(LEFT - 0.12, y + HIGH / 2, lane, ha="right", va="center", fontsize=11)
        for bar in _in_turn(lanes[lane]):
            put(bar, y, *colors[lane], _short(bar.unit))
        y += HIGH + 0.1
    turn = next(bar.begin for bar in lanes["compute"] if bar.what == "backward")
    for x, text in ((0.0, "forward"), (turn, "backward")):
        axis.text(LEFT + x * scale + 0.05, TOP + 0.12, text, fontsize=10, color=palette.muted)
    axis.plot(
        [LEFT + turn * scale] * 2, [TOP, 4.85], color=palette.muted, linewidth=0.9, linestyle=(0, (3, 3)), zorder=0
    )
    y += 0.2
    axis.text(0.12, y + 0.1, "Unsharded in memory", fontsize=11, va="center", fontweight="bold")
    y += 0.28
    units = ["root", *sorted({bar.unit for bar in lanes["parameters"]} - {"root"})]
    for unit in units:
        axis.text(LEFT - 0.12, y + 0.12, _short(unit), ha="right", va="center", fontsize=11)
        for bar in lanes["parameters"]:
            if bar.unit == unit:
                put(bar, y, palette.tint, palette.text, "parameters", 0.2)
        for bar in lanes["gradients"]:
            if bar.unit == unit:
                put(bar, y + 0.2, palette.second, palette.on_accent, "gradients", 0.2)
        y += 0.46
    style.caption(
        figure,
        palette,
        f"Drawn from the recorded order of events in tests/golden/traces/{data['trace']}. Lengths are not times.",
    )
    return figure


def _in_turn(lane: Sequence[Bar]) -> list[Bar]:
    """Bars of one lane, each beginning when the one before has ended."""
    found: list[Bar] = []
    for bar in sorted(lane, key=lambda bar: (bar.begin, bar.end)):
        begin = max(bar.begin, found[-1].end if found else 0.0)
        found.append(bar._replace(begin=begin))
    return found


def _short(unit: str) -> str:
    return unit.replace("blocks.", "block ")
