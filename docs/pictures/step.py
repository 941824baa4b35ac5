"""One training step over time: what computes, what communicates, and the memory of unsharded tensors."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from bench.contestants import FULLSHARD
from bench.teams import Launch, ask_alone

from pictures import style
from pictures.style import Palette

SLOW = True
SHAPE = {"width": 1024, "blocks": 4, "tokens": 256}
RANKS, STEPS = 2, 12
TIMEOUT = 600.0


def record() -> dict[str, Any]:
    """The fastest of some steps on gloo ranks."""
    with tempfile.TemporaryDirectory() as folder:
        told = {**SHAPE, "system": FULLSHARD}
        launch = Launch.of(style.with_pictures(FULLSHARD), "pictures.recorder", Path(folder), ranks=RANKS, **told)
        found = ask_alone(launch, TIMEOUT, "record", steps=STEPS)
    if "failure" in found:
        raise RuntimeError(found["failure"])
    data = {"shape": SHAPE, "ranks": RANKS, **found["answers"][0]}
    if not rests(data):
        raise RuntimeError(
            "memory at rest is not that of shards and AdamW's state; something else was alive: record again"
        )
    return data


def rests(data: Any) -> bool:
    """Return True if the step begins with the memory of the shards and AdamW's two moments in fp32, within 1%."""
    expected = 3 * 4 * data["parameters"] / data["ranks"]
    return bool(abs(sum(data["memory"][0][1:]) - expected) < 0.01 * expected)


LEFT, RIGHT = 0.135, 0.985
MEBIBYTE = 2**20


def draw(data: Any, palette: Palette) -> Any:
    figure = style.figure(5.7)
    end = data["microseconds"] / 1000
    title = "One training step with fully_shard: computation, communication, memory"
    below = "Numbers are transformer blocks, one unit each. Gaps in the first row: waiting for communication."
    style.heading(figure, palette, title, below)
    lanes = figure.add_axes((LEFT, 0.575, RIGHT - LEFT, 0.295))
    _lanes(lanes, palette, data)
    memory = figure.add_axes((LEFT, 0.20, RIGHT - LEFT, 0.335))
    _memory(memory, palette, data)
    for axis in (lanes, memory):
        axis.set_xlim(0, end)
        for name in ("backward", "optimizer"):
            axis.axvline(
                data["phases"][name][0] / 1000, color=palette.muted, linewidth=0.9, linestyle=(0, (3, 3)), zorder=0
            )
    style.caption(figure, palette, _made_from(data))
    return figure


def _made_from(data: Any) -> str:
    shape, environment = data["shape"], data["environment"]
    steps = sorted(each / 1000 for each in data["all_steps"])
    return (
        f"Profile of rank 0 of {data['ranks']} CPU ranks (gloo), fp32: GPT of {data['parameters'] / 1e6:.0f} M "
        f"parameters, {shape['blocks']} blocks, "
        f"{shape['tokens']} tokens per rank, AdamW. The fastest of {len(steps)} steps\n"
        f"({steps[0]:.0f} to {steps[-1]:.0f} ms). {environment['cpu']}, {environment['cores']} cores, "
        f"torch {environment['torch']}, commit {environment['commit'].split()[0]}. Activations not shown."
    )


def _short(unit: str) -> str:
    return unit.removeprefix("blocks.") or "root"


def _lanes(axis: Any, palette: Palette, data: Any) -> None:
    """Three rows: what computes, all-gathers, reduce-scatters."""
    end = data["microseconds"]

    def put(row: int, begin: int, finish: int, color: str, ink: str, label: str) -> None:
        axis.barh(row, (finish - begin) / 1000, left=begin / 1000, height=0.7, color=color)
        if label and finish - begin > 0.022 * end:
            axis.text((begin + finish) / 2000, row + 0.02, label, ha="center", va="center", fontsize=10, color=ink)

    for phase, unit, begin, finish in _joined(data["compute"], end):
        label = "step" if phase == "optimizer" else "" if not unit else _short(unit)
        put(0, begin, finish, palette.faint, palette.text, label)
    for kind, units, begin, finish, _ in data["launches"]:
        gather = kind == "all_gather"
        color = palette.accent if gather else palette.second
        put(1 if gather else 2, begin, finish, color, palette.on_accent, _short(units[-1]) if units[-1] else "")
    axis.set(ylim=(2.45, -0.95))
    axis.set_yticks(range(3), ["compute", "all-gather", "reduce-scatter"])
    axis.tick_params(length=0, labelsize=11)
    axis.set_xticks([])
    axis.spines[["left", "bottom"]].set_visible(False)
    for name in ("forward", "backward"):
        axis.text(data["phases"][name][0] / 1000 + end / 1e3 * 0.005, -0.55, name, fontsize=10.5, color=palette.muted)


def _joined(spans: Any, end: int) -> list[list[Any]]:
    """Spans of one unit that follow each other at once are one; very short ones are left out."""
    found: list[list[Any]] = []
    for phase, unit, begin, finish in spans:
        if found and found[-1][:2] == [phase, unit] and begin - found[-1][3] < 0.003 * end:
            found[-1][3] = finish
        else:
            found.append([phase, unit, begin, finish])
    return [each for each in found if each[3] - each[2] > 0.0015 * end]


def _memory(axis: Any, palette: Palette, data: Any) -> None:
    """What is unsharded, over what is sharded: as the ledger counted, in MiB."""
    rows = data["memory"]
    end = data["microseconds"] / 1000
    times = [row[0] / 1000 for row in rows] + [end]
    # Columns: time, then the recorder's KINDS.
    rest, sharded, parameters, gradients = ([row[i] / MEBIBYTE for row in rows] for i in range(1, 5))
    layers = [[a + b for a, b in zip(rest, sharded, strict=True)], parameters, gradients]
    below = [0.0] * len(times)
    for layer, color in zip(layers, (palette.faint, palette.tint, palette.second), strict=True):
        above = [a + b for a, b in zip(below, [*layer, layer[-1]], strict=True)]
        axis.fill_between(times, below, above, step="post", color=color, linewidth=0)
        below = above
    highest = max(below)
    axis.text(
        end * 0.012, rest[0] / 2, f"sharded: parameters, optimizer state ({rest[0]:.0f} MiB), gradients", va="center"
    )
    place = {"fontsize": 11, "va": "bottom"}
    axis.text(end * 0.012, highest * 0.90, "unsharded parameters", color=palette.accent, fontweight="bold", **place)
    axis.text(
        data["phases"]["backward"][0] / 1000 + end * 0.01,
        highest * 1.03,
        "unsharded gradients",
        color=palette.second,
        fontweight="bold",
        **place,
    )
    axis.set_ylabel("memory, MiB")
    axis.set_xlabel("milliseconds")
    axis.set_ylim(0, highest * 1.16)
