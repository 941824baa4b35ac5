"""A plan as text and as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fullshard.planning.planned_step import PlannedStep

__all__ = ["draw", "table"]

GIB = 2**30
_SHOWN = 8
_COLORS = ("#4477aa", "#aa3377", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#bbbbbb", "#777777")  # what memory is for
_KIND_NAMES = {
    "matmul": "matrix multiplications",
    "memory": "copies and arithmetic by element, optimizer included",
    "function": "norms, softmax, activation functions",
}
# Of plans beside runs, from docs/performance/planned.md.
ERRORS = {
    "accelerator": "memory some 10 %; time some 10 % on one node, and on many what its network is not as assumed",
    "cpu": "memory 1 %; time some 10 % after a calibration, rather too short, else unknown",
}


def table(plan: PlannedStep) -> str:
    """Return memory and time of a plan, and what other choices would change, as text."""
    return "\n".join([*_head(plan), "", *_memory(plan), "", *_time(plan), *_alternatives(plan), *_notes(plan)])


def place(plan: PlannedStep) -> str:
    """Return where the peak of memory is, in words."""
    phase, unit = plan.step.peak.where
    words = {"user code after the forward": "the loss", ("backward", ""): "the backward of the loss and the root unit"}
    if (phase, unit) in words:
        return words[phase, unit]
    if phase in ("forward", "backward"):
        return f"the {phase} of {unit or 'the root unit'}"
    return words.get(phase, f"the {phase}")


def _head(plan: PlannedStep) -> Iterator[str]:
    nodes = -(-plan.ranks // plan.cluster.node)
    yield (
        f"{plan.model}, {plan.parameters / 1e9:,.2f} billion parameters, on {plan.ranks} ranks of "
        f"{plan.cluster.name} ({nodes} node{'s' * (nodes > 1)})"
    )
    yield plan.code()
    if plan.choices.microbatches > 1:
        yield f"# {plan.choices.microbatches} microbatches of {plan.rows // plan.choices.microbatches} rows"


def _memory(plan: PlannedStep) -> Iterator[str]:
    peak = plan.step.peak
    yield f"Memory of a rank at its peak, in {place(plan)}, GiB"
    for kind, nbytes in peak.parts.items():
        if nbytes > 0.001 * peak.nbytes:
            yield f"{nbytes / GIB:>10.2f}  {kind}"
    memory, usable = plan.cluster.memory / GIB, plan.cluster.usable / GIB
    fits = f"{'fits' if plan.fits else 'DOES NOT FIT'} into {usable:.1f}, 95 % of {memory:.1f}"
    if plan.cluster.device == "cpu":
        yield f"{peak.nbytes / GIB:>10.2f}  allocated: {fits}"
    else:
        yield f"{peak.nbytes / GIB:>10.2f}  allocated"
        yield f"{plan.reserved_bytes / GIB:>10.2f}  reserved: {fits}"
    yield f"{plan.step.resting / GIB:>10.2f}  of it between steps"


def _time(plan: PlannedStep) -> Iterator[str]:
    step = plan.step
    yield "Time of a step, ms"
    tokens = f"; {plan.tokens_per_second:,.0f} tokens/s on a rank" if plan.tokens else ""
    yield f"{1e3 * step.seconds:>10.1f}  step; {100 * plan.hfu:.1f} % of the device's operations per second{tokens}"
    yield f"{1e3 * step.computation:>10.1f}  computation:"
    for kind, seconds in sorted(step.kinds.items(), key=lambda each: -each[1]):
        if seconds > 0.001 * step.seconds:
            yield f"{1e3 * seconds:>10.1f}    {_KIND_NAMES.get(kind, kind)}"
    yield f"{1e3 * plan.exposed_seconds:>10.1f}  exposed communication:"
    exposed = [each for each in step.trace.exposed(0) if each.seconds > 0.001 * step.seconds]
    for each in exposed[:_SHOWN]:
        why = "nothing to overlap it with" if each.late_issue > each.seconds / 2 else "slower than what overlaps it"
        name = f"{each.kind.replace('_', '-')} of {each.units or 'the root unit'}"
        yield f"{1e3 * each.seconds:>10.2f}    {name} ({why})"
    rest = exposed[_SHOWN:]
    if rest:
        yield f"{1e3 * sum(each.seconds for each in rest):>10.2f}    {len(rest)} others"


def _alternatives(plan: PlannedStep) -> Iterator[str]:
    if plan.alternatives:
        yield ""
        yield "What one other choice would change (estimated)"
    for each in plan.alternatives:
        figures = f"{100 * each.change:>+8.1f} % {each.extra / GIB:>+8.2f} GiB" if each.seconds else " " * 23
        yield f"{figures}  {each.name}: {each.verdict}"


def _notes(plan: PlannedStep) -> Iterator[str]:
    yield ""
    yield f"Errors: {ERRORS[plan.cluster.device]}"
    if plan.nearest is not None:
        yield f"Nearest published: {plan.nearest}"
    for each in plan.assumptions:
        yield f"Assumed: {each}"


def draw(plan: PlannedStep, path: Path) -> bool:
    """Draw memory over the step by what it is for, and below it what the rank does. False without matplotlib.

    Args:
        plan: The plan.
        path: Of the picture.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        return False
    figure = Figure(figsize=(11, 6), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, sharex=True, height_ratios=[3, 1])
    times, stacks = _curves(plan)
    above.stackplot(times, *stacks.values(), labels=list(stacks), colors=_COLORS, step="post")
    if plan.cluster.memory < 2 * plan.allocated_bytes:
        above.axhline(plan.cluster.memory / GIB, color="#cc3311", linestyle="--", label="memory of the device")
    above.set_ylabel("GiB allocated")
    handles, labels = above.get_legend_handles_labels()
    above.legend(handles[::-1], labels[::-1], fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    peak = max(range(len(times)), key=lambda at: sum(stack[at] for stack in stacks.values()))
    above.set_title(
        f"{plan.model}, {plan.ranks} ranks of {plan.cluster.name}: {plan.allocated_bytes / GIB:.2f} GiB at the peak in "
        f"{place(plan)}, {1e3 * plan.step.seconds:.1f} ms", fontsize=10,
    )  # fmt: skip
    above.axvline(times[peak], color="black", linewidth=0.8, linestyle=":")
    shown = {"compute": ("#228833", "computation"), "wait": ("#ee6677", "waits for communication"),
             "overhead": ("#ccbb44", "packing")}  # fmt: skip
    begun = plan.step.begun
    for segment in plan.step.trace.segments[0]:
        span = (1e3 * (segment.begin - begun), 1e3 * segment.seconds)
        below.broken_barh([span], (0.1, 0.8), facecolors=shown[segment.activity][0])
    collectives = {"all_gather": (-1, "#66ccee"), "reduce_scatter": (-2, "#999999"), "all_reduce": (-3, "#555555")}
    for launched in plan.step.trace.launches[0].values():
        if launched.end is not None:
            row, color = collectives[launched.kind]
            span = (1e3 * (launched.time - begun), 1e3 * (launched.end - launched.time))
            below.broken_barh([span], (row + 0.1, 0.8), facecolors=color)
    rows = {0.5: "the rank", **{row + 0.5: kind.replace("_", "-") for kind, (row, _) in collectives.items()}}
    below.set_yticks(list(rows), list(rows.values()))
    below.set_xlabel("ms")
    patches = [Patch(color=color, label=label) for color, label in shown.values()]
    below.legend(handles=patches, fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=120)
    return True


def _curves(plan: PlannedStep) -> tuple[list[float], dict[str, list[float]]]:
    """Return moments of the step in ms, and GiB by kind at each, those that are there all the time first."""
    held = dict(plan.step.held)
    for _, change in plan.step.changes:
        held.setdefault(change.kind, 0)
    times, stacks = [0.0], {kind: [nbytes / GIB] for kind, nbytes in held.items()}
    for moment, change in sorted(plan.step.changes, key=lambda each: each[0]):
        held[change.kind] += change.nbytes
        if 1e3 * moment > times[-1] or len(times) == 1:
            times.append(1e3 * moment)
            for kind, stack in stacks.items():
                stack.append(held[kind] / GIB)
        else:  # at the same moment: the most of it
            for kind, stack in stacks.items():
                stack[-1] = max(stack[-1], held[kind] / GIB)
    return times, dict(sorted(stacks.items(), key=lambda each: -min(each[1])))
