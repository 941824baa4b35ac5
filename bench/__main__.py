"""List the benchmarks, run one, or run all of ``make bench``: ``python -m bench [NAME|all] [options]``."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Sequence

from bench.command_line import Options, parser_of, start
from bench.environment import REPOSITORY

# Name -> module, in the order of ``make bench``.
BENCHMARKS = {
    "step": "bench.training.step",
    "modes": "bench.training.modes",
    "wrapper": "bench.training.wrapper",
    "wrap_time": "bench.wrap_time",
    "checkpoint": "bench.checkpoint.driver",
    "host_cost": "bench.host_cost",
    "optimizer_cost": "bench.optimizer_cost",
    "muon": "bench.muon.driver",
    "nccl_counts": "bench.nccl_counts.driver",
    "overlap": "bench.overlap.driver",
    "memory_limit": "bench.memory_limit.driver",
    "page_faults": "bench.training.page_faults",
    "scaling": "bench.scaling.driver",
    "quantization": "bench.quantization",
    "wrap_model": "bench.wrap_model",
    "accelerate_step": "bench.training.accelerate_step",
    "gpu": "bench.gpu.driver",
    "pictures": "bench.pictures.driver",
    "redraw": "bench.redraw",
}
# Not part of ``make bench``: needs accelerate; needs a GPU and writes docs/performance/gpu.md; two draw stored data.
APART = ("accelerate_step", "gpu", "pictures", "redraw")


def sentence_of(name: str) -> str:
    """The first line of the module's docstring, read without importing torch."""
    path = REPOSITORY / (BENCHMARKS[name].replace(".", "/") + ".py")
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def listing() -> str:
    lines = [f"  {name:16} {sentence_of(name)}" for name in BENCHMARKS]
    all_of_them = f"  {'all':16} All of these but {', '.join(APART)}, one after another."
    return "\n".join(["python -m bench NAME [options]; NAME --help lists the options.", "", *lines, all_of_them])


def run_all(arguments: Sequence[str]) -> int:
    """Run each in a process of its own, and go on where one fails."""
    parser_of("python -m bench all", Options, "Run all benchmarks of `make bench`.").parse_args(arguments)
    failed = []
    for name in BENCHMARKS:
        if name not in APART:
            print(f"== {name}", flush=True)
            if subprocess.run([sys.executable, "-m", "bench", name, *arguments], check=False).returncode:
                failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all benchmarks ran")
    return 1 if failed else 0


def main(arguments: Sequence[str]) -> int:
    """Run what the command line names; the exit status."""
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name in ("-h", "--help"):
        print(listing())
        return 0
    if name == "all":
        return run_all(rest)
    if name not in BENCHMARKS:
        print(f"python -m bench: unknown benchmark {name!r}; known are {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    module = importlib.import_module(BENCHMARKS[name])
    return start(f"python -m bench {name}", module.Options, module.run, sentence_of(name), rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
