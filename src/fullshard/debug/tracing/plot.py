"""A picture of one step: what each rank computes, waits for, and communicates, over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fullshard.debug.tracing.timeline import Launched, RankGroup, Segment, short_units

__all__ = ["draw_step"]

_COLORS = {
    "forward": "#4477aa",
    "backward": "#228833",
    "optimizer step": "#aa3377",
    "overhead": "#ccbb44",
    "wait": "#ee6677",
    "all_gather": "#66ccee",
    "reduce_scatter": "#bbbbbb",
    "all_reduce": "#777777",
    "other": "#dddddd",
}
_RANKS = 8  # drawn, at most


def draw_step(
    segments: Mapping[int, Sequence[Segment]],
    launches: Mapping[int, Mapping[tuple[RankGroup, int], Launched]],
    memory: Mapping[int, Sequence[tuple[float, int]]],
    path: Path,
) -> bool:
    """Draw the step of median length, of up to 8 ranks. Returns False, and draws nothing, without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        return False
    ranks = list(segments)[:_RANKS]
    step = _median_step(segments[ranks[0]])
    figure = Figure(figsize=(11, 2.4 + 0.9 * len(ranks)), layout="constrained")
    FigureCanvasAgg(figure)
    axes, below = figure.subplots(2, sharex=True, height_ratios=[len(ranks), 1])
    shown = {rank: [s for s in segments[rank] if s.step == step] for rank in ranks}
    start = min((own[0].begin for own in shown.values() if own), default=0.0)
    length = 1e3 * (max((own[-1].end for own in shown.values() if own), default=0.0) - start)
    used: dict[str, None] = {}
    for row, rank in enumerate(ranks):
        for segment in shown[rank]:
            kind = _kind(segment)
            used[kind] = None
            span = (1e3 * (segment.begin - start), 1e3 * segment.seconds)
            axes.broken_barh([span], (row - 0.05, 0.4), facecolors=_COLORS[kind])
            if kind in ("forward", "backward") and segment.units and 1e3 * segment.seconds > 0.02 * length:
                name = short_units(segment.units).rpartition(".")[2]
                axes.text(span[0] + span[1] / 2, row + 0.15, name, fontsize=6, ha="center", va="center", color="white")
        stop = shown[rank][-1].end if shown[rank] else start
        for launched in launches[rank].values():
            if launched.end is not None and start < launched.end and launched.time < stop:
                used[launched.kind] = None
                span = (1e3 * (launched.time - start), 1e3 * (launched.end - launched.time))
                place = (row - 0.46, 0.18) if launched.kind == "all_gather" else (row - 0.26, 0.18)
                axes.broken_barh([span], place, facecolors=_COLORS[launched.kind])
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.invert_yaxis()
    axes.set_title(f"Step {step}. Thin: collectives, from issue until waited for. Thick: computation and waits")
    end = max((own[-1].end for own in shown.values() if own), default=0.0)
    for rank in ranks:
        during = [(1e3 * (moment - start), nbytes / 2**20) for moment, nbytes in memory[rank] if start <= moment <= end]
        if during:
            below.step(*zip(*during, strict=True), where="post", label=f"rank {rank}", linewidth=1)
    below.set_ylabel("MiB of gathered\nparameters")
    if below.get_lines():
        below.legend(fontsize=7, ncols=4, frameon=False, loc="upper right")
    below.set_xlabel("ms")
    labels = {name: name.replace("_", "-") if "_" in name else name for name in used}
    handles = [Patch(color=_COLORS[name], label=labels[name]) for name in _COLORS if name in used]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=120)
    return True


def _kind(segment: Segment) -> str:
    if segment.activity in ("wait", "overhead"):
        return segment.activity
    if segment.phase in _COLORS:
        return segment.phase
    return "backward" if segment.phase == "the end of backward" else "other"


def _median_step(segments: Sequence[Segment]) -> int:
    """Return the number of the step of median length, without the first and the last, if there are more."""
    lengths: dict[int, float] = {}
    for segment in segments:
        lengths[segment.step] = lengths.get(segment.step, 0.0) + segment.seconds
    steps = sorted(lengths)
    steps = steps[1:-1] if len(steps) > 2 else steps
    return sorted(steps, key=lambda step: lengths[step])[len(steps) // 2]
