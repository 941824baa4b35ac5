"""The command line of all benchmarks: options that they share, and a parser made of a benchmark's own dataclass.

A benchmark is a module with ``Options``, a subclass of :class:`Options` whose fields are its options, and
``run(options)``, which returns False if something went wrong. What a shared option means is said here, once; a
benchmark says only its default. Only the standard library is imported, so that ``gpu`` runs where only torch is.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from bench.environment import REPOSITORY

RESULTS = REPOSITORY / "bench" / "results"
DOCUMENT = REPOSITORY / "docs" / "performance" / "benchmarks.md"

# Name of the field -> help. The option is the name with hyphens; one that takes several values is repeated.
SHARED = {
    "width": "Model width.",
    "blocks": "Transformer blocks.",
    "tokens": "Tokens per rank and microbatch.",
    "microbatches": "Microbatches of a step.",
    "units": "Units in the model.",
    "ranks": "Ranks: processes of a contestant, or the size of the process group of which one rank is played.",
    "threads": "Compute threads per rank.",
    "rounds": "Rounds; in each, every contestant has a turn.",
    "steps_per_round": "Steps in a turn.",
    "warmup_steps": "First steps, not timed.",
    "only": "Run only this contestant.",
    "what": "Measure only this.",
    "results": "Folder of the JSON and the plot.",
    "document": "Markdown page with the tables.",
    "write_document": "Write the tables into the page.",
}
# Not of a measurement, but of what it is of and where it goes.
OUTSIDE_SETTINGS = ("only", "what", "results", "document", "write_document")


class UsageError(ValueError):
    """What was asked for cannot be measured; the message says why, and what could be."""


def option(default: Any, text: str | None = None, *, choices: Sequence[str] = (), least: float | None = None) -> Any:
    """Declare a field of ``Options``.

    Args:
        default: Its value when it is not given.
        text: Its help; None: it is a shared option.
        choices: Its values; empty: any.
        least: Its smallest value; None: 1 of integers, 0 of floats.
    """
    return field(default=default, metadata={"help": text, "choices": tuple(choices), "least": least})


@dataclass(frozen=True, kw_only=True)
class Options:
    """What every benchmark can be told."""

    results: Path = RESULTS
    document: Path = DOCUMENT
    write_document: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name not in OUTSIDE_SETTINGS}


def parser_of(program: str, options: type[Any], description: str) -> argparse.ArgumentParser:
    """Return a parser whose result has the values of those options that were given."""
    parser = argparse.ArgumentParser(
        prog=program, description=description, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    hints = get_type_hints(options)
    for each in sorted(fields(options), key=lambda field: field.name in OUTSIDE_SETTINGS):
        _add(parser, each, hints[each.name])
    return parser


def _add(parser: argparse.ArgumentParser, each: Field[Any], hint: Any) -> None:
    kinds = [kind for kind in get_args(hint) if kind not in (type(None), Ellipsis)]
    kind, repeated = (kinds[0] if kinds else hint), get_origin(hint) is tuple
    choices, least = each.metadata.get("choices", ()), each.metadata.get("least")
    text = each.metadata.get("help") or SHARED[each.name]
    text += " Repeat for several." if repeated else ""
    text += f" One of {', '.join(choices)}." if choices else ""
    if each.default not in (None, (), False, True, MISSING) and not isinstance(each.default, Path):
        text += f" [{', '.join(map(str, each.default)) if repeated else each.default}]"
    flag, text = "--" + each.name.replace("_", "-"), text.replace("%", "%%")
    if kind is bool:
        parser.add_argument(flag, help=text, action=argparse.BooleanOptionalAction)
        return

    def read(given: str) -> Any:
        value, bound = kind(given), least if least is not None else 1 if kind is int else 0
        if choices and value not in choices:
            raise argparse.ArgumentTypeError(f"unknown {given!r}; known are {', '.join(choices)}")
        if kind in (int, float) and not value >= bound:  # nor NaN
            raise argparse.ArgumentTypeError(f"expected at least {bound}, got {given}")
        return value

    read.__name__ = kind.__name__
    metavar = {int: "N", float: "X", Path: "PATH"}.get(kind, "NAME")
    parser.add_argument(flag, help=text, type=read, action="append" if repeated else "store", metavar=metavar)


def start(
    program: str,
    options: type[Any],
    run: Callable[[Any], bool | None],
    description: str,
    arguments: Sequence[str] | None = None,
) -> int:
    """Run a benchmark as the command line says; its exit status."""
    # Killed from outside, still end the workers: the finally blocks run on SystemExit.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = parser_of(program, options, description)
    given = vars(parser.parse_args(arguments))
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    try:
        return 1 if run(options(**values)) is False else 0
    except UsageError as error:
        parser.error(str(error))
