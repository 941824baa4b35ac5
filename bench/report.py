"""Results as files: JSON, a markdown table between markers in the documentation, a plot beside the JSON."""

from __future__ import annotations

import json
import math
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.command_line import Options
from bench.contestants import WITH_OURS, WITHOUT_OURS
from bench.environment import REPOSITORY, Environment, current_environment
from bench.statistics import Spread

DARK, LIGHT, OTHER = "#00796b", "#b9c4cc", "#d9822b"
# Ends of contestants' names -> what they say: of its units, and of the C allocator of its processes.
ENDS = {
    "-two-kept": "last two units kept by hand",
    WITH_OURS: "fullshard's malloc setting",
    WITHOUT_OURS: "glibc's default malloc",
}
_LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}

# Header, and the cell of a contestant's entry in the JSON.
Column = tuple[str, Callable[[Mapping[str, Any]], str]]


# ------------------------------------------------------------------ cells and sentences


def label_of(name: str) -> str:
    """A contestant's name as people read it in a table: what is not as it comes."""
    for end, setting in ENDS.items():
        name = name.replace(end, f", {setting}")
    return name


def label_in_plot(name: str) -> str:
    """The same in a plot, where peers have the names of their classes."""
    written = label_of(name).replace("fsdp", "FSDP")
    return re.sub(r"\bddp\b", "DDP", written)


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


def cell(value: Any, spec: str = ".2f", scale: float = 1.0) -> str:
    """A number, or a spread as ``as_json`` stored it; a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        found = spread_of(value)
        return format(
            Spread(*(scale * each for each in (found.median, found.lower_quartile, found.upper_quartile))), spec
        )
    return format(value * scale, spec)


def spread_of(stored: Mapping[str, Any]) -> Spread:
    """A spread as ``as_json`` stored it, perhaps beside other things."""
    return Spread(stored["median"], stored["lower_quartile"], stored["upper_quartile"])


def column(header: str, *keys: str, spec: str = ".2f", scale: float = 1.0) -> Column:
    """A column with what stands under ``keys`` of an entry."""
    return header, lambda entry: cell(value_under(entry, keys), spec, scale)


def mebibytes(header: str, *keys: str, spec: str = ".0f") -> Column:
    """A column of bytes."""
    return column(header, *keys, spec=spec, scale=2**-20)


def value_under(entry: Any, keys: Sequence[str]) -> Any:
    """What stands under keys of keys; None if one is missing."""
    for key in keys:
        entry = None if entry is None else entry.get(key)
    return entry


def table(
    first: str, entries: Mapping[str, Mapping[str, Any]], columns: Sequence[Column], failures: Iterable[str] = ()
) -> str:
    """One row per contestant."""
    rows = [[label_of(name), *(text(entry) for _, text in columns)] for name, entry in entries.items()]
    return markdown_table([first, *(header for header, _ in columns)], rows, map(label_of, failures))


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
    title: str = "",
    panels: Sequence[Panel] = (),
    parts: Sequence[object] = (),
    marker: str | None = None,
) -> None:
    """Write JSON and plot, print the paragraphs, and put them into the page if that was asked for.

    Args:
        options: Where to.
        benchmark: Names the file and the block of the page.
        figures: Everything that was measured.
        paragraphs: What the page says, without provenance and plot.
        title: Of the plot.
        panels: Of the plot.
        parts: More of the file's name.
        marker: The name of the block if it is not the benchmark's.
    """
    page = {"marker": marker or benchmark, "title": title, "paragraphs": list(paragraphs)}
    page["document"] = _relative(options.document)
    path, environment = store(options, benchmark, {**figures, "page": page}, *parts)
    image = plot(path.with_suffix(".png"), title, panels)
    write_page(options, marker or benchmark, [*paragraphs, provenance(environment)], image, title)


def _relative(document: Path) -> str | None:
    """Inside the repository; None: elsewhere, which is nobody's business."""
    document = document.resolve()
    return document.relative_to(REPOSITORY).as_posix() if document.is_relative_to(REPOSITORY) else None


def write_page(
    options: Options, marker: str, paragraphs: Sequence[str], image: Path | None = None, title: str = ""
) -> None:
    """Print a block of the page, and put it there with its plot if that was asked for; a missing page is created."""
    print("\n" + "\n\n".join(paragraphs) + "\n", flush=True)
    if options.write_document:
        put(options.document, marker, block(paragraphs, options.document, image, title))


def block(paragraphs: Sequence[str], document: Path, image: Path | None, title: str) -> str:
    """What stands between two markers: the paragraphs, and the plot."""
    links = [] if image is None else [image_link(image, document, title)]
    return "\n\n".join([*paragraphs, *links]).strip()


def put(document: Path, marker: str, text: str) -> None:
    """Write a block into a page; a missing page is created."""
    page = document.read_text(encoding="utf-8") if document.exists() else "# Measurements\n"
    document.parent.mkdir(parents=True, exist_ok=True)
    document.write_text(replace_block(page, marker, text), encoding="utf-8")


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


def provenance(environment: Environment, odd: Sequence[str] = ()) -> str:
    """One line under a table: what it was measured on, and in what that is odd."""
    machine = f"{environment.device}, " if environment.device else ""
    remark = f" **This is {'; '.join(odd)}.**" if odd else ""
    return (
        f"{machine}{environment.cpu}, {environment.cores} cores, torch {environment.torch}, "
        f"Python {environment.python}, {environment.date}, commit {environment.commit}.{remark}"
    )


def image_link(image: Path, document: Path, text: str) -> str:
    """A markdown image, relative to the document it stands in."""
    relative = os.path.relpath(image.resolve(), document.resolve().parent)
    return f"![{text}]({Path(relative).as_posix()})"


# ------------------------------------------------------------------ plots


@dataclass(frozen=True)
class Bars:
    """Horizontal bars: a value, or a value with its quartiles, per contestant; those of ``highlight`` stand out."""

    title: str
    values: Mapping[str, float | Spread]
    reference: float | None = 1.0
    highlight: str = "fullshard"

    @property
    def size(self) -> tuple[float, float]:
        return 5.2, 1.0 + 0.42 * len(self.values)

    def draw(self, axis: Any) -> None:
        """Draw them on an axis of matplotlib."""
        names = [textwrap.fill(label_in_plot(name), 32) for name in self.values]
        spreads = [v if isinstance(v, Spread) else Spread(v, v, v) for v in self.values.values()]
        below = [s.median - s.lower_quartile for s in spreads]
        above = [s.upper_quartile - s.median for s in spreads]
        ours = (self.highlight, f", {self.highlight}")
        named = any(name.startswith(ours[0]) or ours[1] in name for name in self.values)
        colors = [DARK if not named or name.startswith(ours[0]) or ours[1] in name else LIGHT for name in self.values]
        whiskers = [below, above] if any([*below, *above]) else None
        axis.barh(names, [s.median for s in spreads], color=colors, xerr=whiskers, capsize=3)
        limit = max([s.upper_quartile for s in spreads] + [self.reference or 0.0]) or 1.0
        for row, s in enumerate(spreads):
            place = s.upper_quartile + 0.015 * limit
            axis.text(place, row, f"{s.median:.2f}", va="center", fontsize=9, bbox=_LABEL_BOX)
        if self.reference is not None:
            axis.axvline(self.reference, color="#555555", linewidth=1, linestyle="--")
        axis.set_xlim(0, 1.14 * limit)
        axis.set_xlabel("lower is better", loc="left", fontsize=9, color="#5b6874")
        axis.invert_yaxis()


@dataclass(frozen=True)
class Dots:
    """A row per case, and in it a dot per contestant: ours dark, the others each in a way of their own.

    Args:
        title: Of the panel.
        rows: Case -> contestant -> value.
        limits: Vertical lines: value -> what it is.
        logarithmic: The axis of values.
    """

    title: str
    rows: Mapping[str, Mapping[str, float]]
    limits: Mapping[float, str]
    logarithmic: bool = False

    @property
    def values(self) -> Mapping[str, Mapping[str, float]]:
        return self.rows

    @property
    def size(self) -> tuple[float, float]:
        return 6.4, 1.7 + 0.36 * len(self.rows)

    def draw(self, axis: Any) -> None:
        """Draw them on an axis of matplotlib."""
        names = list(dict.fromkeys(name for row in self.rows.values() for name in row))
        for number, name in enumerate(sorted(names, key=lambda name: name.startswith("fullshard"))):
            ours = name.startswith("fullshard")
            found = [(row[name], place) for place, row in enumerate(self.rows.values()) if name in row]
            marker = ("o", "s", "^")[[n for n in names if n.startswith("fullshard")].index(name)] if ours else "D"
            color = DARK if ours else (OTHER, "#5b6874", LIGHT, "#333333")[number % 4]
            label = label_in_plot(name)
            axis.scatter(*zip(*found, strict=True), color=color, marker=marker, s=38, label=label, alpha=0.85, zorder=3)
        for place in range(len(self.rows)):
            axis.axhline(place, color="#e4e8ec", linewidth=0.8, zorder=0)
        for value, what in self.limits.items():
            axis.axvline(value, color="#555555", linewidth=1, linestyle="--", zorder=1)
            axis.text(value, -0.75, what, fontsize=8.5, color="#555555", ha="center")
        if self.logarithmic:
            axis.set_xscale("log")
            ticks = [
                tick for tick in (0.05, 0.1, 0.2, 0.5, 1, 2, 5) if axis.get_xlim()[0] <= tick <= axis.get_xlim()[1]
            ]
            axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axis.minorticks_off()
        axis.set_yticks(range(len(self.rows)), list(self.rows))
        axis.set_ylim(len(self.rows) - 0.5, -1.0)
        axis.set_xlabel("lower is better", loc="left", fontsize=9, color="#5b6874")


@dataclass(frozen=True)
class Curves:
    """Lines over a logarithmic axis, per contestant ``{x: y}``; ours dark, unsharded gray, bounds thin."""

    title: str
    values: Mapping[str, Mapping[float, float]]
    label: str
    logarithmic: bool = False
    reference: float | None = None
    size = (4.4, 3.6)

    def draw(self, axis: Any) -> None:
        """Draw them on an axis of matplotlib."""
        for index, (name, points) in enumerate(self.values.items()):
            ours, style = name.startswith("fullshard"), ("-", "--", ":", "-.")[index % 4]
            color = DARK if ours else "#777777" if name == "unsharded" else "#d1495b"
            line = {"linestyle": style, "marker": "osv^"[index // 4 % 4], "ms": 4, "label": label_in_plot(name)}
            if name.endswith("lower bound"):
                line |= {"marker": "", "linewidth": 0.8, "linestyle": "-"}
            axis.plot(*zip(*points.items(), strict=True), color=color, **line)
        if self.reference is not None:
            axis.axhline(self.reference, color="#333333", linewidth=1)
        sizes = sorted({x for points in self.values.values() for x in points})
        axis.set(xscale="log", yscale="log" if self.logarithmic else "linear", xlabel=self.label)
        axis.set_xticks(sizes, [f"{size:,g}" for size in sizes])
        axis.minorticks_off()


def bars(
    entries: Mapping[str, Mapping[str, Any]], panels: Mapping[str, Sequence[str]], reference: float | None = 1.0
) -> list[Bars]:
    """A panel per title, of what stands under its keys: numbers and spreads, not those of a reference to itself."""
    found = []
    for title, keys in panels.items():
        values: dict[str, float | Spread] = {}
        for name, entry in entries.items():
            value = value_under(entry, keys)
            if isinstance(value, Mapping):
                if value.get("reference", None) != name.rpartition(", ")[2]:
                    values[name] = spread_of(value)
            elif value is not None:
                values[name] = value
        found.append(Bars(title, values, reference))
    return found


Panel = Bars | Curves | Dots


def plot(path: Path, title: str, panels: Sequence[Panel], columns: int = 3) -> Path | None:
    """Draw those panels that have values, so many side by side; None if none has."""
    panels = [panel for panel in panels if any(panel.values.values())]
    if not panels:
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    across = min(columns, len(panels))
    down = math.ceil(len(panels) / across)
    width, height = (max(panel.size[i] for panel in panels) for i in range(2))
    size = (across * width, 0.4 + down * height)
    figure, axes = pyplot.subplots(down, across, figsize=size, layout="constrained", squeeze=False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        panel.draw(axis)
        axis.set_title(panel.title if len(panels) > 1 else "", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    whole = title if len(panels) > 1 else ": ".join(filter(None, (title, panels[0].title)))
    figure.suptitle(textwrap.fill(whole, int(11 * size[0])), fontsize=11)
    lines = {label: line for axis in axes.flat for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    if lines and not any(isinstance(panel, Bars) for panel in panels):
        columns = max(2, min(len(lines), int(size[0] / 2.1)))
        figure.legend(
            lines.values(), lines, loc="outside lower center", ncols=columns, fontsize=9, frameon=False, markerscale=1.2
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Software": None})  # without a word about what wrote it
    pyplot.close(figure)
    return path
