"""Results as pages: markdown tables, and blocks of them between markers in the documentation."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.command_line import Options
from bench.contestants import WITH_OURS, WITHOUT_OURS
from bench.environment import REPOSITORY, Environment
from bench.results import StoredResult, store
from bench.statistics import Spread

# Ends of contestants' names -> what they say: of its units, and of the C allocator of its processes.
ENDS = {
    "-two-kept": "last two units kept by hand",
    WITH_OURS: "fullshard's malloc setting",
    WITHOUT_OURS: "glibc's default malloc",
}

# Header, and the cell of a contestant's entry in the JSON.
Column = tuple[str, Callable[[Mapping[str, Any]], str]]


# ------------------------------------------------------------------ tables


def label_of(name: str) -> str:
    """A contestant's name as people read it in a table: what is not as it comes."""
    for end, setting in ENDS.items():
        name = name.replace(end, f", {setting}")
    return name


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], rule: Sequence[str] = ()) -> str:
    """A table whose first column is text and whose others are right-aligned figures, unless ``rule`` says else."""
    rule = rule or ["---", *("---:" for _ in header[1:])]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, rule, *rows])


def cell(value: Any, spec: str = ".2f", scale: float = 1.0) -> str:
    """A number, or a spread as it is stored; a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        return format(Spread(*(scale * value[key] for key in Spread._fields)), spec)
    return format(value * scale, spec)


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
    """One row per contestant, and one for each that could not run."""
    rows = [[label_of(name), *(text(entry) for _, text in columns)] for name, entry in entries.items()]
    rows += [[label_of(name), "cannot run", *["-"] * (len(columns) - 1)] for name in failures]
    return markdown_table([first, *(header for header, _ in columns)], rows)


def could_not_run(failures: Mapping[str, str]) -> list[str]:
    return [f"`{name}` could not run: {reason}." for name, reason in failures.items()]


def provenance(environment: Environment, odd: Sequence[str] = ()) -> str:
    """One line under a table: what it was measured on, and in what that is odd."""
    machine = f"{environment.device}, " if environment.device else ""
    remark = f" **This is {'; '.join(odd)}.**" if odd else ""
    return (
        f"{machine}{environment.cpu}, {environment.cores} cores, torch {environment.torch}, "
        f"Python {environment.python}, {environment.date}, commit {environment.commit}.{remark}"
    )


# ------------------------------------------------------------------ pages


def publish(
    options: Options,
    benchmark: str,
    figures: Mapping[str, object],
    paragraphs: Sequence[str],
    *,
    title: str = "",
    plot: Callable[[Path], None] | None = None,
    parts: Sequence[object] = (),
    marker: str = "",
) -> None:
    """Write the JSON and the plot, print the paragraphs, and put them into the page if that was asked for.

    Args:
        options: Where to.
        benchmark: Names the file and the block of the page.
        figures: Everything that was measured.
        paragraphs: What the page says, without provenance and plot.
        title: Of the plot.
        plot: Draws it into a file beside the JSON.
        parts: More of the file's name.
        marker: The name of the block if it is not the benchmark's.
    """
    page = {"marker": marker or benchmark, "title": title, "paragraphs": list(paragraphs)}
    document = options.document.resolve()
    inside = document.is_relative_to(REPOSITORY)  # where else a page is, is nobody's business
    page["document"] = document.relative_to(REPOSITORY).as_posix() if inside else None
    stored = store(options, benchmark, {**figures, "page": page}, *parts)
    if plot is not None:
        plot(stored.path.with_suffix(".png"))
    show(options, page["marker"], block(stored, options.document))


def show(options: Options, marker: str, text: str) -> None:
    """Print a block of a page, and put it there if that was asked for."""
    print(f"\n{text}\n", flush=True)
    if options.write_document:
        put(options.document, marker, text)


def block(stored: StoredResult, document: Path, odd: Sequence[str] = ()) -> str:
    """What stands between the markers of a result with a block of its own; with the plot, if there is one."""
    page, image = stored.result["page"], stored.path.with_suffix(".png")
    links = [image_link(image, document, page["title"])] if image.exists() else []
    return "\n\n".join([*page["paragraphs"], provenance(stored.environment, odd), *links])


def image_link(image: Path, document: Path, text: str) -> str:
    """A markdown image, relative to the document it stands in."""
    return f"![{text}]({Path(os.path.relpath(image.resolve(), document.resolve().parent)).as_posix()})"


def put(document: Path, marker: str, text: str) -> None:
    """Write a block into a page; a missing page is created."""
    page = document.read_text(encoding="utf-8") if document.exists() else "# Measurements\n"
    document.parent.mkdir(parents=True, exist_ok=True)
    document.write_text(replace_block(page, marker, text), encoding="utf-8")


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
