"""What all pictures share: two palettes, fonts, and how they are written."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.environment import REPOSITORY

FOLDER = REPOSITORY / "docs" / "pictures"
DATA = FOLDER / "data"
WIDTH = 9.4  # inches: 900 px of a browser


@dataclass(frozen=True)
class Palette:
    """Colors of one theme. ``accent`` and its lighter ``tint`` are ours, ``second`` is for what stands against it."""

    name: str
    background: str
    text: str
    muted: str
    faint: str
    box: str
    accent: str
    tint: str
    second: str
    on_accent: str


LIGHT = Palette(
    "light", "#ffffff", "#1f2933", "#5b6874", "#d5dce2", "#f1f4f6", "#00796b", "#9bd3cb", "#d9822b", "#ffffff"
)
DARK = Palette(
    "dark", "#1e2129", "#e6e9ee", "#a3adb9", "#3d4452", "#2a2f3a", "#3fb8a8", "#24635c", "#f0a04b", "#10141a"
)
PALETTES = (LIGHT, DARK)

SETTINGS = {
    "svg.fonttype": "path",  # the same on every reader's machine
    "svg.hashsalt": "fullshard",  # ids that do not change from one run to the next
    "font.family": "DejaVu Sans",
    "font.size": 11.5,
    "axes.titlesize": 13,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
}


def with_pictures(name: str) -> Any:
    """A contestant of the benchmarks whose processes can import these modules."""
    from bench.contestants import CONTESTANTS

    contestant = CONTESTANTS[name]
    paths = os.pathsep.join(filter(None, [str(FOLDER.parent), os.environ.get("PYTHONPATH")]))
    return replace(contestant, environment={**contestant.environment, "PYTHONPATH": paths})


def apply(palette: Palette) -> None:
    """Have matplotlib draw in these colors from now on."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcdefaults()
    matplotlib.rcParams.update(SETTINGS)
    for name in ("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor", "axes.titlecolor"):
        matplotlib.rcParams[name] = palette.text
    for name in ("axes.edgecolor", "xtick.color", "ytick.color"):
        matplotlib.rcParams[name] = palette.muted
    for name in ("figure.facecolor", "axes.facecolor", "savefig.facecolor"):
        matplotlib.rcParams[name] = palette.background


def figure(height: float, width: float = WIDTH) -> Any:
    """An empty figure of so many inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height))


def canvas(height: float, width: float = WIDTH) -> tuple[Any, Any]:
    """A figure with one axis for boxes and text: its units are inches, its origin is the upper left corner."""
    made = figure(height, width)
    axis = made.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, width), ylim=(height, 0))
    axis.axis("off")
    return made, axis


def heading(made: Any, palette: Palette, title: str, below: str = "") -> None:
    """The message of a picture, at its upper left corner, and a line below it."""
    height = made.get_size_inches()[1]
    made.text(0.012, 1 - 0.10 / height, title, fontsize=14, fontweight="bold", color=palette.text, va="top")
    if below:
        made.text(0.012, 1 - 0.42 / height, below, fontsize=11, color=palette.muted, va="top")


def caption(made: Any, palette: Palette, text: str) -> None:
    """One small line at the lower left corner: what it was made from."""
    height = made.get_size_inches()[1]
    made.text(0.012, 0.07 / height, text, fontsize=8.5, color=palette.muted, va="bottom")


def box(axis: Any, x: float, y: float, width: float, height: float, color: str, **more: Any) -> None:
    """A filled rectangle; without an edge unless one is given."""
    from matplotlib.patches import Rectangle

    axis.add_patch(Rectangle((x, y), width, height, facecolor=color, **{"linewidth": 0, **more}))


def file_of(name: str, palette: Palette, folder: Path = FOLDER) -> Path:
    """``NAME.svg`` or ``NAME.dark.svg``, as docs/site_hook.py looks for them."""
    return folder / (f"{name}.svg" if palette is LIGHT else f"{name}.{palette.name}.svg")


def write(made: Any, name: str, palette: Palette, folder: Path = FOLDER) -> Path:
    """Write a picture without its date and without a word about what wrote it."""
    path = file_of(name, palette, folder)
    folder.mkdir(parents=True, exist_ok=True)
    made.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    text = path.read_text(encoding="utf-8")
    path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8")
    return path
