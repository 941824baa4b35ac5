"""Format a wrap plan as text."""

from __future__ import annotations

import itertools
import re
import reprlib
from collections.abc import Iterator, Sequence
from typing import Any

from fullshard.wrap.units import PlannedUnit

__all__ = ["table"]

_HEADER = ("unit", "class", "elements", "unsharded", "of rank 0", "notes")
_ABSENT = object()
_SHOWN = 4  # names in a note


def table(units: Sequence[PlannedUnit], ranks: int | None = None) -> str:
    """Format the units as a table, the root last, and a line of totals; equal units in a row share a line.

    With ``ranks``, there is a column of the bytes of the parameters on the first of so many ranks.
    """
    rows = [_HEADER]
    for run in _runs(units):
        unit = run[0]
        title, numel = unit.title, f"{unit.numel:,}"
        if len(run) > 1:
            title, numel = f"{title} ... {run[-1].title}", f"{len(run)} x {numel}"
        sizes = _size(unit.gather_bytes), _size(_of_rank(unit, ranks))
        rows.append((title, unit.class_name, numel, *sizes, "; ".join(_notes(unit, units))))
    total, largest = sum(unit.numel for unit in units), max(unit.gather_bytes for unit in units)
    summary = f"{len(units)} units, the largest {_size(largest)}"
    sizes = _size(sum(unit.gather_bytes for unit in units)), _size(sum(_of_rank(unit, ranks) for unit in units))
    rows.append(("total", "", f"{total:,}", *sizes, summary))
    columns = [column for column in range(len(_HEADER)) if column != 4 or ranks is not None]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    return "\n".join(_line(row, widths, columns) for row in rows)


def _line(row: tuple[str, ...], widths: list[int], columns: list[int]) -> str:
    cells = [row[c].rjust(widths[c]) if c in (2, 3, 4) else row[c].ljust(widths[c]) for c in columns]
    return "  ".join(cells).rstrip()


def _of_rank(unit: PlannedUnit, ranks: int | None) -> int:
    return sum(parameter.bytes_of_rank(ranks or 1) for parameter in unit.parameters)


def _runs(units: Sequence[PlannedUnit]) -> Iterator[list[PlannedUnit]]:
    """Yield units in runs of three or more that differ in their numbers only, and the others one by one."""
    for _, group in itertools.groupby(units, lambda unit: _kind(unit, units)):
        run = list(group)
        yield from [run] if len(run) > 2 else ([unit] for unit in run)


def _kind(unit: PlannedUnit, units: Sequence[PlannedUnit]) -> tuple[object, ...]:
    shapes = tuple((parameter.shape, parameter.dtype) for parameter in unit.parameters)
    notes = re.sub(r"\d+", "#", "; ".join(_notes(unit, units)))
    return re.sub(r"\d+", "#", unit.name), unit.class_name, unit.gather_bytes, shapes, notes


def _notes(unit: PlannedUnit, units: Sequence[PlannedUnit]) -> Iterator[str]:
    yield from (f"tied: {' = '.join(p.names)}" for p in unit.parameters if len(p.names) > 1)
    for parameter in unit.owned_by_ancestor:
        owner = next(other for other in units if parameter in other.parameters)
        yield f"without {parameter.name}, shared: see {owner.title}"
    if unit.frozen:
        mixed = len(unit.frozen) < len(unit.parameters)
        yield f"mixed, frozen: {_few([p.name for p in unit.frozen])}" if mixed else "all frozen"
    dtypes = dict.fromkeys(str(parameter.dtype).removeprefix("torch.") for parameter in unit.parameters)
    if len(dtypes) > 1:
        yield f"mixed dtypes: {', '.join(dtypes)}"
    if unit.ignored:
        yield f"{unit.ignored} ignored"
    if not unit.parameters:
        yield "holds no parameters"
    yield from _differences(unit.kwargs, units[-1].kwargs)


def _differences(kwargs: dict[str, Any], of_root: dict[str, Any]) -> Iterator[str]:
    for name, value in kwargs.items():
        inherited = of_root.get(name, _ABSENT)
        if value is not inherited and not _equal(value, inherited):
            yield f"{name}={_short.repr(value)}"


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # tensors and others with another ==
        return False


_short = reprlib.Repr()
_short.maxother = _short.maxstring = 80


def _few(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


def _size(count: int) -> str:
    """Format a number of bytes."""
    amount, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{count} B" if unit == "B" else f"{amount:.1f} {unit}"
