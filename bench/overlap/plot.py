"""The plot of steps over their bounds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.overlap.cells import Cell, Measured
from bench.report import save_figure

__all__ = ["plot_cells"]

# What is drawn of the contestants: ours dark, peers light, what gathers nothing ahead dotted.
STYLES = {
    "fullshard": ("#1f6f8b", "-", "o"),
    "fullshard, 2 ahead": ("#1f6f8b", "--", "s"),
    "fullshard, none ahead": ("#1f6f8b", ":", "v"),
    "fullshard-wrapper PRE": ("#63a4b8", "-", "o"),
    "FSDP2": ("#c9622f", "-", "o"),
    "FSDP2, async op": ("#c9622f", "--", "s"),
    "FSDP1 PRE": ("#8d8d8d", "-", "o"),
    "FSDP1 POST": ("#8d8d8d", "--", "s"),
    "FSDP1 none": ("#8d8d8d", ":", "v"),
}


def plot_cells(path: Path, results: Sequence[tuple[Cell, Measured]], target: float) -> bool:
    """Step time over the bound against link time over computation: a row per device, a column per number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    devices = list(dict.fromkeys(cell.device for cell, _ in results))
    ranks = sorted({cell.ranks for cell, _ in results})
    if not results:
        return False
    size = (4.0 * len(ranks) + 1.9, 3.1 * len(devices) + 0.4)
    figure, axes = pyplot.subplots(
        len(devices), len(ranks), figsize=size, layout="constrained", squeeze=False, sharey="row", sharex=True
    )
    for row, device in enumerate(devices):
        for column, n in enumerate(ranks):
            axis = axes[row][column]
            some = sorted(((c.ratio, m) for c, m in results if c.device == device and c.ranks == n), key=lambda x: x[0])
            for name, (color, line, marker) in STYLES.items():
                points = [(ratio, m.over_bound(name).median) for ratio, m in some if name in m.steps]
                if points:
                    axis.plot(*zip(*points, strict=True), color=color, linestyle=line, marker=marker, ms=4, label=name)
            axis.axhline(1.0, color="#333333", linewidth=1)
            axis.axhline(target, color="#333333", linewidth=0.8, linestyle="--")
            axis.set_xscale("log")
            axis.set_xticks([ratio for ratio, _ in some], [f"{ratio:g}" for ratio, _ in some])
            axis.minorticks_off()
            axis.set_title(f"{device}, {n:,} ranks", fontsize=10)
            axis.spines[["top", "right"]].set_visible(False)
            if row == len(devices) - 1:
                axis.set_xlabel("link time / computation", fontsize=9)
        axes[row][0].set_ylabel("step time / lower bound", fontsize=9)
    handles = {label: h for axis in axes.flat for h, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(list(handles.values()), list(handles), loc="outside right center", fontsize=8, frameon=False)
    figure.suptitle("Steps on a modelled network (line: the bound, dashed: the target)", fontsize=11)
    save_figure(figure, path)
    return True
