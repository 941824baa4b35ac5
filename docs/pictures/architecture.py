"""The folders of the package as boxes, and an arrow from each to those that it imports from."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from bench.environment import REPOSITORY

from pictures import style
from pictures.style import Palette

SLOW = False
PACKAGE = REPOSITORY / "src" / "fullshard"
PUBLIC = "fullshard"  # the package's own ``__init__``

# Folder or file -> where it is drawn, its row and the middle of its box in tenths of the width; and what it does.
ROOMS: Mapping[str, tuple[int, float, str]] = {
    "train": (0, 2.5, "The example trainer behind\nthe command fullshard train"),
    "dropin": (0, 7.5, "Replaces torch.distributed.fsdp\nin programs that import it"),
    PUBLIC: (1, 5.0, "The public names, imported when they are first used"),
    "planning": (2, 2.5, "Memory and time before the run:\ndry runs of the engine"),
    "composable": (3, 2.5, "fully_shard and replicate:\nthe FSDP2 front end"),
    "wrapper": (3, 7.5, "FullyShardedDataParallel:\nthe FSDP1 front end"),
    "frontend": (4, 7.5, "Argument checks; base class\nof both front ends"),
    "debug": (4, 2.5, "Origin of NaN, replicas,\nreplays, traces"),
    "checkpoint": (5, 2.5, "Saves and loads\nsharded state"),
    "wrap": (5, 7.5, "Wrap policies: which\nmodules become units"),
    "optim": (6, 2.5, "Optimizers on local\ntensors, Muon, norms"),
    "ragged": (6, 7.5, "Slices of whole units,\ncut between rows"),
    "engine": (7, 5.0, "What happens in a step, and when: units, buckets,\nparameters, prefetching, reductions, hooks"),
    "ranks": (8, 5.0, "How ranks agree: equal values, errors on every rank"),
    "comm": (9, 5.0, "All-gather, reduce-scatter and all-reduce on each back end"),
    "layout": (10, 2.5, "Numbers: where each parameter\nlies in a buffer. No torch"),
    "memory.py": (10, 7.5, "Storage that is freed and\nrefilled; streams and events"),
}
ROW, BOX, TOP = 0.86, 0.58, 0.55
CROSSED = 4  # above this row arrows cross


def imports(text: str, package: list[str]) -> Iterator[str]:
    """Dotted names of all that a file imports, also inside of functions and for types only."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = package[: len(package) - level + 1] if level else []
                origin = ".".join([*base, *filter(None, [module])])
                yield from (f"{origin}.{alias.name}" for alias in names)


def record() -> dict[str, Any]:
    """The folders, and files, that each folder imports from; ``reduced`` without what follows from the others."""
    known: dict[str, set[str]] = {}
    for path in sorted([*PACKAGE.rglob("*.py"), PACKAGE / "__init__.pyi"]):
        relative = path.relative_to(PACKAGE)
        package = [PUBLIC, *relative.parts[:-1]]
        own = _room(relative.parts[0])
        for name in imports(path.read_text(encoding="utf-8"), package):
            top, *rest = name.split(".")
            if path.suffix == ".pyi" and len(rest) == 1:
                continue  # names a part of the package, which is imported when it is first used
            if top == PUBLIC:
                known.setdefault(own, set()).add(_room_of_name(rest))
    edges = {own: sorted(found - {own}) for own, found in sorted(known.items()) if found - {own}}
    return {
        "imports": edges,
        "reduced": reduced({own: [o for o in found if o in ROOMS] for own, found in edges.items()}),
    }


def _room(first: str) -> str:
    """Of the first part of a file's path below the package."""
    return PUBLIC if first in ("__init__.py", "__init__.pyi") else first


def _room_of_name(rest: list[str]) -> str:
    if rest and (PACKAGE / rest[0]).is_dir():
        return rest[0]
    return f"{rest[0]}.py" if rest and (PACKAGE / f"{rest[0]}.py").exists() else PUBLIC


def reduced(edges: Mapping[str, list[str]]) -> list[list[str]]:
    """The edges between rooms that are drawn, without those that are paths over other rooms."""
    edges = {own: [other for other in found if other in ROOMS] for own, found in edges.items() if own in ROOMS}

    def below(room: str) -> set[str]:
        direct = set(edges.get(room, ()))
        return direct.union(*(below(other) for other in direct))

    return [
        [own, other]
        for own, found in edges.items()
        for other in found
        if not any(other in below(between) for between in found if between != other)
    ]


def draw(data: Any, palette: Palette) -> Any:
    figure, axis = style.canvas(_top("layout") + BOX + 0.42)
    style.heading(figure, palette, "Each part imports only from parts below it")
    for own, other in data["reduced"]:
        _arrow(axis, palette, own, other)
    for name, (_, x, text) in ROOMS.items():
        main = name == "engine"
        color = palette.accent if main else palette.box
        edge = palette.accent if main else palette.muted
        left, half, y = x * style.WIDTH / 10 - _half(name), _half(name), _top(name)
        style.box(axis, left, y, 2 * half, BOX, color, edgecolor=edge, linewidth=1)
        ink = palette.on_accent if main else palette.text
        label = name if name == PUBLIC or name.endswith(".py") else f"{name}/"
        axis.text(left + 0.1, y + BOX / 2, label, va="center", fontsize=11.5, fontweight="bold", color=ink)
        beside = left + 1.4
        axis.text(beside, y + BOX / 2, text, va="center", fontsize=9.5, color=ink, linespacing=1.25)
    style.caption(
        figure,
        palette,
        "Drawn from the imports in src/fullshard. An arrow that follows from others is left out. "
        "Not shown: files that most parts use (errors.py, policy.py, ...).",
    )
    return figure


def _arrow(axis: Any, palette: Palette, own: str, other: str) -> None:
    """From one box to another below it; straight down where the boxes allow it."""
    unit = style.WIDTH / 10
    x, x_below = ROOMS[own][1] * unit, ROOMS[other][1] * unit
    half, half_below = _half(own) - 0.3, _half(other) - 0.3
    start = min(max(x, x_below - half_below), x_below + half_below)
    start = min(max(start, x - half), x + half)
    end = min(max(start, x_below - half_below), x_below + half_below)
    axis.annotate(
        "",
        xy=(end, _top(other)),
        xytext=(start, _top(own) + BOX),
        zorder=0.5,  # behind the boxes between the two
        arrowprops={"arrowstyle": "-|>", "color": palette.muted, "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0},
    )


def _top(name: str) -> float:
    """Where a box begins; there is more room above the row where arrows cross."""
    row = ROOMS[name][0]
    return TOP + row * ROW + (0.2 if row >= CROSSED else 0.0)


def _half(name: str) -> float:
    """Half the width of a box, in inches."""
    return 3.05 if ROOMS[name][1] == 5.0 else 2.05
