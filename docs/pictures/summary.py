"""Measured ratios to peers at a glance: the headline figures of ``bench/figures.py``, wins and losses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.command_line import RESULTS
from bench.figures import FIGURES
from bench.results import newest

from pictures import style
from pictures.style import Palette

SLOW = False
SPREAD = ("lower_quartile", "upper_quartile")


def record() -> dict[str, Any]:
    """The headline figures that are measured: what was measured, the peer, the ratio and its spread."""
    results, rows = newest(RESULTS), []
    for figure in FIGURES:
        found = figure.find(results) if figure.headline else None
        if found is not None:
            stored = found if isinstance(found, Mapping) else dict.fromkeys(("median", *SPREAD), found)
            ratio, spread = round(stored["median"], 2), [round(stored[key], 2) for key in SPREAD]
            rows.append({"measured": figure.what, "peer": figure.peer, "ratio": ratio, "spread": spread})
    return {"rows": rows}


def draw(data: Any, palette: Palette) -> Any:
    rows = sorted(data["rows"], key=lambda row: float(row["ratio"]))
    limit = 0.25 + max(1.15, *(row["spread"][1] for row in rows))
    figure = style.figure(1.3 + 0.27 * len(rows))
    height = float(figure.get_size_inches()[1])
    style.heading(figure, palette, "fullshard / peer, as measured", "Left of the line, fullshard is faster or smaller.")
    axis = figure.add_axes((0.66, 0.35 / height, 0.31, 1 - 1.15 / height))
    for y, row in enumerate(rows):
        color = palette.accent if row["ratio"] < 1 else palette.second
        low, high = row["spread"]
        axis.plot((low, high), (y, y), color=color, linewidth=3, alpha=0.45, solid_capstyle="round")
        axis.plot(row["ratio"], y, "o", color=color, markersize=6)
        axis.text(max(high, row["ratio"]) + 0.05, y, f"{row['ratio']:.2f}", va="center", fontsize=9.5)
        label = f"{row['measured']} / {row['peer']}".replace("`", "")
        axis.text(-0.08, y, label, va="center", ha="right", fontsize=9.5, color=palette.text)
    axis.axvline(1, color=palette.muted, linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    axis.set(xlim=(0, limit), ylim=(len(rows) - 0.4, -0.6))
    axis.set_yticks([])
    axis.set_xticks([tick for tick in (0, 0.5, 1, 1.5, 2) if tick < limit])
    axis.spines[["left"]].set_visible(False)
    return figure
