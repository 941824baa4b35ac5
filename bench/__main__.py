"""List the benchmarks, or run one: ``python -m bench [NAME] [options]``; ``all`` is what ``make bench`` runs."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Sequence

from bench.command_line import start
from bench.environment import REPOSITORY

# Name -> module.
BENCHMARKS = {
    "step": "bench.training.step",
    "modes": "bench.training.modes",
    "wrapper": "bench.training.wrapper",
    "wrap_time": "bench.wrap_time",
    "checkpoint": "bench.checkpoint.driver",
    "host_cost": "bench.host_cost",
    "optimizer_cost": "bench.optimizer_cost",
    "nccl_counts": "bench.nccl_counts.driver",
    "hosts": "bench.hosts.driver",
    "planned": "bench.planned.published",
    "gpu": "bench.gpu.driver",
    "redraw": "bench.redraw",
    "all": "bench.everything",
}


def sentence_of(name: str) -> str:
    """The first line of the module's docstring, read without importing torch."""
    path = REPOSITORY / (BENCHMARKS[name].replace(".", "/") + ".py")
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def listing() -> str:
    lines = [f"  {name:16} {sentence_of(name)}" for name in BENCHMARKS]
    return "\n".join(["python -m bench NAME [options]; NAME --help lists the options.", "", *lines])


def main(arguments: Sequence[str]) -> int:
    """Run what the command line names; the exit status."""
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name in ("-h", "--help"):
        print(listing())
        return 0
    if name not in BENCHMARKS:
        print(f"python -m bench: unknown benchmark {name!r}; known are {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    module = importlib.import_module(BENCHMARKS[name])
    return start(f"python -m bench {name}", module.Options, module.run, sentence_of(name), rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
