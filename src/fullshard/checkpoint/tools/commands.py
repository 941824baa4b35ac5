"""Implementation of ``fullshard inspect`` and ``fullshard export``. Options are declared in ``fullshard.cli``.

Exit codes: 0 all good; 1 problems were found, or something could not be written; 2 wrong input.
"""

from __future__ import annotations

import fnmatch
import os
import re
import sys

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fullshard.checkpoint.format.index import TensorEntry
from fullshard.checkpoint.safetensors.export import export_checkpoint
from fullshard.checkpoint.tools.offline import Checkpoint, open_checkpoint
from fullshard.errors import CheckpointError

__all__ = ["export", "inspect", "parse_size"]

GOOD, FOUND, WRONG_INPUT = 0, 1, 2

_MOST_ROWS = 30  # of a table, unless --names is given
_MOST_CHARACTERS = 10_000  # of a value that --names selects
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"\s*([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([A-Za-z]*)\s*")


def inspect(path: str, *, verify: bool, names: str | None) -> int:
    """Print the contents of a checkpoint.

    Args:
        path: Folder or URL.
        verify: Read everything and compare it with its checksums.
        names: Pattern with ``*`` and ``?`` of the tensors and values to list. None: list the first ones.

    Returns:
        Exit code of the command.
    """
    console = Console()
    try:
        with open_checkpoint(path) as checkpoint:
            _show_head(checkpoint, console)
            if not _show_names(checkpoint, names, console):
                return _fail("inspect", f"no tensor or value of {path} matches {names!r}", WRONG_INPUT)
            return _verify(checkpoint, console) if verify else GOOD
    except CheckpointError as error:
        return _fail("inspect", str(error), WRONG_INPUT)


def export(path: str, out: str | os.PathLike[str], *, prefix: str, dtype: str | None, max_shard_size: str) -> int:
    """Write the full weights of a checkpoint as safetensors files.

    Args:
        path: Folder or URL of the checkpoint.
        out: A ``.safetensors`` file, or a folder.
        prefix: Prefix of the tensors to write; removed from their names.
        dtype: Name of the dtype for floating-point tensors. None: keep their dtypes.
        max_shard_size: Limit per file, such as ``5GB``.

    Returns:
        Exit code of the command.
    """
    chosen = None if dtype is None else getattr(torch, dtype.removeprefix("torch."), None)
    if dtype is not None and (not isinstance(chosen, torch.dtype) or not chosen.is_floating_point):
        return _fail(
            "export", f"--dtype: expected a floating-point dtype such as bfloat16, found {dtype!r}", WRONG_INPUT
        )
    try:
        most = parse_size(max_shard_size)
        with open_checkpoint(path) as checkpoint:
            if not any(key.startswith(prefix) for key in checkpoint.names):
                return _fail("export", f"no tensor of {path} has a name that begins with {prefix!r}", WRONG_INPUT)
    except (CheckpointError, ValueError) as error:
        return _fail("export", str(error), WRONG_INPUT)
    try:
        files = export_checkpoint(path, out, prefix=prefix, dtype=chosen, max_shard_bytes=most)
    except (CheckpointError, ValueError) as error:
        return _fail("export", str(error), FOUND if isinstance(error, CheckpointError) else WRONG_INPUT)
    console = Console()
    console.print(Text(f"weights of {path}"), soft_wrap=True)
    table = _table("file", "size>")
    for file in files:
        table.add_row(escape(str(file)), _bytes(file.stat().st_size))
    console.print(table)
    return GOOD


def parse_size(text: str) -> int:
    """Return the bytes of a size such as ``5GB`` or ``512 MiB``; a plain number is bytes.

    Raises:
        ValueError: If it is no size, or not positive.
    """
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise ValueError(f"--max-shard-size: expected a size such as 5GB or 512MiB, found {text!r}")
    return int(float(match[1]) * unit)


def _show_head(checkpoint: Checkpoint, console: Console) -> None:
    """Print totals, what the saver said, and a table of the parts of the checkpoint."""
    index, parts = checkpoint.index, dict[str, list[TensorEntry]]()
    for key, entry in index.tensors.items():
        head, dot, rest = key.partition(".")
        if dot and rest.startswith("state."):  # of an optimizer: by the name of the state
            head = f"{head}.state.*.{key.rpartition('.')[2]}"
        parts.setdefault(head if dot else "(top)", []).append(entry)
    console.print(Text.assemble(("checkpoint ", "dim"), (checkpoint.path, "bold")), soft_wrap=True)
    facts = [
        f"{_count(len(index.tensors), 'tensor')} with {_total(list(index.tensors.values()))}",
        _count(len(index.values), "other value"),
        _count(len(index.files), "file"),
    ]
    console.print(Text(" · ".join(facts)))
    about = [f"{key} {value}" for key, value in index.about.items() if value not in (None, "", [], {})]
    if about:
        console.print(Text(" · ".join(about), style="dim"))
    table = _table("part", "tensors>", "size>", "dtypes")
    for part, entries in parts.items():
        dtypes = ", ".join(dict.fromkeys(entry.dtype for entry in entries))
        table.add_row(escape(part), str(len(entries)), _total(entries), dtypes)
    if parts:
        console.print(table)


def _show_names(checkpoint: Checkpoint, pattern: str | None, console: Console) -> bool:
    """Print tables of tensors and values. Return False if none matches the pattern."""
    index = checkpoint.index
    every = [*index.tensors, *index.aliases]
    tensors = fnmatch.filter(every, pattern or "*")
    if pattern is None:  # optimizer state is summarized by part
        tensors = [name for name in tensors if ".state." not in name]
    values = fnmatch.filter(list(index.values), pattern or "*")
    most, limit = (_MOST_ROWS, 100) if pattern is None else (len(every) + len(values), _MOST_CHARACTERS)
    table = _table("tensor", "dtype", "shape", "size>", "shards>")
    for name in tensors[:most]:
        entry, first = index.tensor(name), index.aliases.get(name)
        shape = " x ".join(map(str, entry.shape)) or "scalar"
        size, shards = ("", "") if first else (_bytes(entry.nbytes), str(sum(1 for _ in index.shards(name))))
        table.add_row(escape(f"{name}\n= {first}" if first else name), entry.dtype, shape, size, shards)
    _show_rows(table, len(every if pattern is None else tensors), "tensors", console)
    table = _table("value", "contents")
    table.columns[0].min_width = min(max(map(len, values[:most]), default=0), console.width // 2)
    for name in values[:most]:
        table.add_row(escape(name), _contents(checkpoint, name, limit))
    _show_rows(table, len(values), "values", console)
    return bool(tensors or values or pattern is None)


def _show_rows(table: Table, count: int, what: str, console: Console) -> None:
    """Print a table unless it is empty, and how many of ``count`` are not in it."""
    if table.row_count:
        console.print(table)
    more = count - table.row_count
    if more > 0:
        console.print(f"[dim]and {more} more {what}; --names '*' lists all, --names 'model.*' those that match[/]\n")


def _contents(checkpoint: Checkpoint, name: str, limit: int) -> Text:
    try:
        text = " ".join(repr(checkpoint.read(name)).split())
    except CheckpointError:
        return Text("cannot be read; run with --verify to see the error", style="red")
    return Text(text if len(text) <= limit else text[: limit - 3] + "...")


def _verify(checkpoint: Checkpoint, console: Console) -> int:
    problems = checkpoint.verify()
    for problem in problems:
        console.print(Text.assemble(("problem: ", "bold red"), problem), soft_wrap=True)
    if problems:
        console.print(Text(f"{_count(len(problems), 'problem')} found", style="bold red"))
        return FOUND
    what = (
        "all checksums match" if checkpoint.index.own_format else "everything can be read; the format has no checksums"
    )
    console.print(Text.assemble(("verified: ", "bold green"), f"{_bytes(checkpoint.index.nbytes)} of tensors, {what}"))
    return GOOD


def _table(*columns: str) -> Table:
    """Return a table; columns whose names end in ``>`` are aligned to the right, the first one and contents folded."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for number, name in enumerate(columns):
        fold = "fold" if number == 0 or name == "contents" else "ellipsis"
        table.add_column(name.rstrip(">"), justify="right" if name.endswith(">") else "left", overflow=fold)  # type: ignore[arg-type]
    return table


def _fail(command: str, message: str, code: int) -> int:
    print(f"fullshard {command}: {message}", file=sys.stderr)
    return code


def _total(entries: list[TensorEntry]) -> str:
    elements, nbytes = sum(entry.numel for entry in entries), sum(entry.nbytes for entry in entries)
    return f"{_scaled(elements, ('', ' K', ' M', ' B'))} elements, {_bytes(nbytes)}"


def _bytes(count: int) -> str:
    return _scaled(count, (" B", " kB", " MB", " GB", " TB"))


def _scaled(count: int, units: tuple[str, ...]) -> str:
    """Format a number with at most four digits, in units of thousands."""
    value, power = float(count), 0
    while value >= 999.95 and power < len(units) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.0f}{units[0]}" if power == 0 else f"{value:.1f}{units[power]}"


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
