"""Results as files: JSON, a markdown table between markers in the documentation, a plot beside the JSON."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.command_line import Options
from bench.environment import Environment, current_environment
from bench.statistics import Spread

_LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}


# ------------------------------------------------------------------ cells and sentences


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], failures: Iterable[str] = ()) -> str:
    """A table whose first column is text and whose other columns are right-aligned figures.

    Args:
        header: Of the columns.
        rows: Of those that ran.
        failures: Names of those that did not.
    """
    rule = ["---", *("---:" for _ in header[1:])]
    missing = [[name, "cannot run", *["-"] * (len(header) - 2)] for name in failures]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, rule, *rows, *missing])


def cell(value: float | None, spec: str, scale: float = 1.0) -> str:
    return "-" if value is None else format(value * scale, spec)


def mebibytes(value: float | None, spec: str = ".0f") -> str:
    return cell(value, spec, 2**-20)


def spread_of(stored: Mapping[str, Any] | None) -> Spread | None:
    """A spread as ``as_json`` stored it, perhaps beside other things."""
    if stored is None:
        return None
    return Spread(stored["median"], stored["lower_quartile"], stored["upper_quartile"])


def spread_cell(stored: Mapping[str, Any] | None, spec: str = ".2f", scale: float = 1.0) -> str:
    found = spread_of(stored)
    if found is None:
        return "-"
    return format(Spread(scale * found.median, scale * found.lower_quartile, scale * found.upper_quartile), spec)


def verdict(what: str, value: float, limit: float, of: str = "") -> str:
    """One figure beside what it may be at most."""
    return f"{what} {value:.2f} of at most {limit:.2f}{of}{'' if value <= limit else ' (missed)'}"


def against_targets(verdicts: Iterable[str]) -> list[str]:
    """The paragraph of them; none of none."""
    text = "; ".join(verdicts)
    return [f"Against the targets: {text}."] if text else []


def could_not_run(failures: Mapping[str, str]) -> list[str]:
    return [f"`{name}` could not run: {reason}." for name, reason in failures.items()]


# ------------------------------------------------------------------ the page and the files


def replace_block(text: str, name: str, block: str) -> str:
    """Put ``block`` between ``<!-- bench:NAME -->`` and ``<!-- /bench -->``; missing markers are appended."""
    opening, closing = f"<!-- bench:{name} -->", "<!-- /bench -->"
    fresh = f"{opening}\n{block.strip()}\n{closing}"
    pattern = re.compile(re.escape(opening) + r"(?:(?!<!-- bench:).)*?" + re.escape(closing), re.DOTALL)
    if pattern.search(text):
        return pattern.sub(lambda _: fresh, text, count=1)
    if opening in text:
        raise ValueError(f"{opening} has no {closing} after it")
    return f"{text.rstrip()}\n\n{fresh}\n"


def update_document(path: Path, name: str, block: str) -> None:
    """Replace one block of the documentation page; a missing page is created."""
    text = path.read_text(encoding="utf-8") if path.exists() else "# Measurements\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(replace_block(text, name, block), encoding="utf-8")


def store(options: Options, benchmark: str, figures: Mapping[str, object], *parts: object) -> tuple[Path, Environment]:
    """Write the figures as JSON, named after the benchmark, ``parts`` and this kind of machine."""
    environment = current_environment()
    path = options.results / f"{'_'.join(map(str, (benchmark, *parts)))}_{environment.name}.json"
    write_json(path, {"benchmark": benchmark, "environment": environment.as_json(), **figures})
    print(f"wrote {path.name}", flush=True)
    return path, environment


def publish(
    options: Options,
    benchmark: str,
    figures: Mapping[str, object],
    paragraphs: Sequence[str],
    *,
    draw: Callable[[Path], bool] | None = None,
    image_text: str = "",
    parts: Sequence[object] = (),
    marker: str | None = None,
) -> Path:
    """Write JSON and plot, print the paragraphs, and put them into the page if that was asked for.

    Args:
        options: Where to.
        benchmark: Names the file and the block of the page.
        figures: Everything that was measured.
        paragraphs: What the page says, without provenance and plot.
        draw: Draws the plot to a path; returns False if there was nothing to draw.
        image_text: Of the plot.
        parts: More of the file's name.
        marker: The name of the block if it is not the benchmark's.
    """
    path, environment = store(options, benchmark, figures, *parts)
    image = path.with_suffix(".png")
    drawn = draw is not None and draw(image)
    write_page(
        options, marker or benchmark, [*paragraphs, provenance(environment)], image if drawn else None, image_text
    )
    return path


def write_page(options: Options, marker: str, paragraphs: Sequence[str], image: Path | None, image_text: str) -> None:
    """Print a block of the page, and put it there with its plot if that was asked for."""
    print("\n" + "\n\n".join(paragraphs) + "\n", flush=True)
    if options.write_document:
        links = [] if image is None else [image_link(image, options.document, image_text)]
        update_document(options.document, marker, "\n\n".join([*paragraphs, *links]))


def write_json(path: Path, result: Mapping[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_finite(result), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    """The same with NaN and infinities, which JSON does not know, as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def provenance(environment: Environment) -> str:
    """One line under a table: what it was measured on."""
    machine = f"{environment.device}, " if environment.device else ""
    return (
        f"{machine}{environment.cpu}, {environment.cores} cores, torch {environment.torch}, "
        f"Python {environment.python}, {environment.date}, commit {environment.commit}."
    )


def image_link(image: Path, document: Path, text: str) -> str:
    """A markdown image, relative to the document it stands in."""
    relative = os.path.relpath(image.resolve(), document.resolve().parent)
    return f"![{text}]({Path(relative).as_posix()})"


@dataclass(frozen=True)
class Panel:
    """One group of horizontal bars: a value, or a value with its quartiles, per contestant."""

    title: str
    values: Mapping[str, float | Spread]
    reference: float | None = None


def plot_bars(path: Path, title: str, panels: Sequence[Panel], highlight: str = "fullshard") -> bool:
    """Draw those panels that have bars side by side; False if none has.

    Bars of contestants whose name starts with ``highlight`` stand out.
    """
    panels = [panel for panel in panels if panel.values]
    if not panels:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tallest = max(len(panel.values) for panel in panels)
    size = (5.2 * len(panels), 1.4 + 0.42 * tallest)
    figure, axes = pyplot.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        names = list(panel.values)
        spreads = [v if isinstance(v, Spread) else Spread(v, v, v) for v in panel.values.values()]
        medians = [s.median for s in spreads]
        whiskers = [
            [s.median - s.lower_quartile for s in spreads],
            [s.upper_quartile - s.median for s in spreads],
        ]
        colors = ["#1f6f8b" if name.startswith(highlight) else "#b9c4cc" for name in names]
        has_spread = any(isinstance(v, Spread) for v in panel.values.values())
        axis.barh(names, medians, color=colors, xerr=whiskers if has_spread else None, capsize=3)
        limit = max([s.upper_quartile for s in spreads] + [panel.reference or 0.0]) or 1.0
        for row, s in enumerate(spreads):
            axis.text(
                s.upper_quartile + 0.015 * limit,
                row,
                f"{s.median:.2f}",
                va="center",
                fontsize=9,
                bbox=_LABEL_BOX,
            )
        if panel.reference is not None:
            axis.axvline(panel.reference, color="#555555", linewidth=1, linestyle="--")
        axis.set_xlim(0, 1.14 * limit)
        axis.invert_yaxis()
        axis.set_title(panel.title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    save_figure(figure, path)
    return True


def save_figure(figure: Any, path: Path, dpi: int = 130) -> None:
    """Write a matplotlib figure without a word about what wrote it."""
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi, metadata={"Software": None})
    pyplot.close(figure)
