"""All benchmarks of a CPU host, one after another, of one commit and on one machine; then the tables and claims.

A tree with changes is refused, since a commit would not say what was measured. A benchmark whose results are of this
commit and machine already is left out, so that a run that was broken off can be started again. Every benchmark has a
process of its own; one that fails is named at the end, and the others run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from bench import redraw
from bench.command_line import Options as SharedOptions
from bench.command_line import UsageError, option
from bench.environment import DIRTY, Environment, current_environment
from bench.training import modes, wrapper

# Command -> names of the results that it writes; the most important first, about 50 minutes on two cores.
STAGES: dict[str, list[str]] = {
    "step --width 512 --rounds 7": ["step_512"],
    "step --width 1024 --rounds 6": ["step_1024"],
    "modes --width 512 --rounds 3": [f"modes_{each}_512" for each in modes.BENCHMARK.by_name],
    "modes --width 1024 --rounds 3": [f"modes_{each}_1024" for each in modes.BENCHMARK.by_name],
    "wrapper --width 512 --rounds 3": [f"wrapper_{each}_512" for each in wrapper.BENCHMARK.by_name],
    "wrapper --width 1024 --what step --what accumulation --rounds 3": [
        f"wrapper_{each}_1024" for each in ("step", "accumulation")
    ],
    "checkpoint --rounds 3": ["checkpoint_1024"],
    "host_cost --rounds 15": ["host_cost"],
    "wrap_time --rounds 7": ["wrap_time"],
    "optimizer_cost --rounds 4": ["optimizer_cost"],
    "nccl_counts": ["nccl_counts"],
}
# A GPU's, which writes its own page; what needs root; what is calculated; and what only writes pages.
APART = ("gpu", "hosts", "planned", "redraw", "all")


@dataclass(frozen=True, kw_only=True)
class Options(SharedOptions):
    """Everything that is not measured at this commit on this machine yet."""

    plan: bool = option(False, "Only print what would run.")


def missing(names: list[str], folder: Path, environment: Environment) -> bool:
    """Whether one of these results is not there, or of another commit."""
    paths = [folder / f"{name}_{environment.name}.json" for name in names]
    return not all(
        path.exists() and json.loads(path.read_text(encoding="utf-8"))["environment"]["commit"] == environment.commit
        for path in paths
    )


def run(options: Options) -> bool:
    environment, failed = current_environment(), []
    if environment.commit.endswith(DIRTY) and not options.plan:
        raise UsageError(f"src or bench differ from commit {environment.commit.split()[0]}: commit first")
    for command, names in STAGES.items():
        runs = missing(names, options.results, environment)
        print(f"== {command}{'' if runs else ': measured at this commit'}", flush=True)
        if runs and not options.plan:
            arguments = [*command.split(), "--results", str(options.results)]
            if subprocess.run([sys.executable, "-m", "bench", *arguments], check=False).returncode:
                failed.append(command)
    if not options.plan:
        redraw.run(redraw.Options(results=options.results, write_document=options.write_document))
        print(f"failed: {', '.join(failed)}" if failed else "all ran")
    return not failed
