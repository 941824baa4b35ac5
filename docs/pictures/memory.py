"""Memory over one step, counted, for four ways to train the same model on 8 ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.contestants import FSDP2, FULLSHARD
from bench.teams import Launch, ask_alone

from pictures import style
from pictures.style import Palette

SLOW = True
SHAPE = {"width": 1024, "blocks": 8, "tokens": 256}
RANKS, STEPS = 8, 2
TIMEOUT = 600.0
# As ``pictures.recorder.SYSTEMS`` has them, in the order of the picture.
PANELS = {"replicate": "replicate(model)", "kept": "reshard_after_forward=False", FULLSHARD: "fully_shard(model)"}
MEBIBYTE = 2**20
# Where phases begin and end on the horizontal axis, for steps of different speed.
PHASES = {"forward": (0.0, 1.0), "backward": (1.0, 3.0), "optimizer": (3.0, 3.5)}


def record() -> dict[str, Any]:
    """A step of each on rank 0 of a group whose collectives move nothing: memory is the same, time is not."""
    systems = {}
    for system in (*PANELS, FSDP2):
        contestant = style.with_pictures(FSDP2 if system == FSDP2 else FULLSHARD)
        launch = Launch.alone(contestant, "pictures.recorder", ranks=RANKS, system=system, **SHAPE)
        found = ask_alone(launch, TIMEOUT, "record", steps=STEPS)
        if "failure" in found:
            raise RuntimeError(f"{system}: {found['failure']}")
        answer = found["answers"][0]
        systems[system] = {name: answer[name] for name in ("parameters", "phases", "memory")}
    return {"shape": SHAPE, "ranks": RANKS, "systems": systems}


BINS = 160  # of a panel's width: more than can be seen
LAYERS = (
    ((1,), "parameters, optimizer state"),
    ((2,), "reduced gradients"),
    ((3,), "unsharded parameters"),
    ((4,), "unsharded gradients"),
    ((5,), "activations"),
)


def draw(data: Any, palette: Palette) -> Any:
    figure = style.figure(5.3)
    systems = data["systems"]
    peaks = {name: max(sum(row[1:]) for row in each["memory"]) / MEBIBYTE for name, each in systems.items()}
    replicated, sharded = peaks["replicate"], peaks[FULLSHARD]
    title = (
        f"Peak memory of a step on {data['ranks']} ranks: {replicated:,.0f} MiB replicated, {sharded:,.0f} MiB sharded"
    )
    style.heading(
        figure, palette, title, f"Memory of one rank over time. FSDP2 of torch has a peak of {peaks[FSDP2]:,.0f} MiB."
    )
    colors = (palette.faint, palette.muted, palette.tint, palette.second, palette.accent)
    for x, (_, label), color in zip((0.012, 0.253, 0.44, 0.655, 0.85), LAYERS, colors, strict=True):
        figure.text(x, 0.815, "\u25a0", fontsize=15, color=color, va="center")
        figure.text(x + 0.024, 0.815, label, fontsize=9.5, va="center")
    for index, (name, call) in enumerate(PANELS.items()):
        axis = figure.add_axes((0.085 + index * 0.31, 0.165, 0.28, 0.525))
        times, rows = _binned(*_aligned(systems[name]))
        below = [0.0] * len(times)
        for (columns, _), color in zip(LAYERS, colors, strict=True):
            above = [b + sum(row[i] for i in columns) / MEBIBYTE for b, row in zip(below, rows, strict=True)]
            axis.fill_between(times, below, above, step="post", color=color, linewidth=0)
            below = above
        axis.text(0, 1.05, call, transform=axis.transAxes, fontsize=9, family="DejaVu Sans Mono", fontweight="bold")
        high = max(peaks.values())
        if name != "replicate":
            axis.text(1.75, peaks[name] + 0.03 * high, f"peak {peaks[name]:,.0f} MiB", ha="center", fontweight="bold")
        else:
            axis.text(1.75, 0.66 * high, f"peak {peaks[name]:,.0f} MiB", ha="center", va="top", fontweight="bold")
        axis.set(xlim=(0, 3.5), ylim=(0, 1.04 * high))
        axis.set_xticks([0.5, 2.0, 3.25], ["forward", "backward", "step"], fontsize=9.5)
        axis.tick_params(axis="x", length=0)
        for moment in (1.0, 3.0):
            axis.axvline(moment, color=palette.muted, linewidth=0.8, linestyle=(0, (3, 3)))
        if index:
            axis.set_yticklabels([])
        else:
            axis.set_ylabel("MiB")
    shape, environment = data["shape"], data["environment"]
    style.caption(
        figure,
        palette,
        "Every allocation of tensor memory counted, fp32, AdamW: GPT of "
        f"{systems[FULLSHARD]['parameters'] / 1e6:.0f} M parameters, "
        f"{shape['blocks']} blocks, {shape['tokens']} tokens. Rank 0 of a process group that\n"
        f"moves no data, so the time axis shows order only. torch {environment['torch']}, "
        f"commit {environment['commit'].split()[0]}. Activations include temporary tensors.",
    )
    return figure


def _binned(times: list[float], rows: list[list[int]]) -> tuple[list[float], list[list[int]]]:
    """The highest moment of each of so many equal stretches of time; what lasts longer is in each of them."""
    width = times[-1] / BINS
    found: list[list[int]] = []
    index, current = 0, rows[0]
    for number in range(BINS):
        inside = [current]
        while index < len(times) and times[index] < (number + 1) * width:
            current = rows[index]
            inside.append(current)
            index += 1
        # What ended as this stretch began is not in it.
        found.append(max(inside[1:] or inside, key=lambda row: sum(row[1:])))
    return [number * width for number in range(BINS + 1)], [*found, current]


def _aligned(system: Mapping[str, Any]) -> tuple[list[float], list[list[int]]]:
    """Moments on the common axis, and what was alive from each on."""
    phases = system["phases"]
    times, rows = [], []
    for row in system["memory"]:
        for name, (first, last) in PHASES.items():
            begin, end = phases[name]
            if row[0] <= end or name == "optimizer":
                times.append(first + (last - first) * min(max(row[0] - begin, 0), end - begin) / (end - begin))
                rows.append(row)
                break
    return [*times, 3.5], [*rows, rows[-1]]
