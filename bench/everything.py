"""All benchmarks of a CPU host, one after another, of one commit and on one machine; then the plots, tables and claims.

A tree with changes is refused, since a commit would not say what was measured. A benchmark whose results are of this
commit and machine already is left out, so that a run that was broken off can be started again. Every benchmark has a
process of its own; one that fails is named at the end, and the others run. Rounds are given so that all take about
``FULL_MINUTES`` on two cores; ``--minutes`` scales them.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench import redraw
from bench.command_line import Options as SharedOptions
from bench.command_line import UsageError, option
from bench.environment import Environment, current_environment
from bench.stored import DIRTY

LEAST_ROUNDS = 3


@dataclass(frozen=True)
class Stage:
    """One process.

    Args:
        benchmark: Its name.
        arguments: Beside rounds.
        minutes: That it takes with ``rounds``, on two cores.
        results: Names of all results that it writes.
        rounds: If it has them.
        needs: A package without which it cannot run.
    """

    benchmark: str
    arguments: str
    minutes: float
    results: tuple[str, ...]
    rounds: int | None = None
    needs: str | None = None

    def command(self, share: float) -> list[str]:
        """Arguments of ``python -m bench`` for this share of the full time."""
        rounds = [] if self.rounds is None else ["--rounds", str(max(LEAST_ROUNDS, round(share * self.rounds)))]
        return [self.benchmark, *self.arguments.split(), *rounds]


def _training(
    benchmark: str, width: int, rounds: int, minutes: float, what: tuple[str, ...] = (), needs: str | None = None
) -> Stage:
    names = tuple(f"{benchmark}_{name}_{width}" for name in what) or (f"{benchmark}_{width}",)
    chosen = "".join(f" --what {name}" for name in what)
    return Stage(benchmark, f"--width {width}{chosen}", minutes, names, rounds, needs)


def _stage(name: str, minutes: float, rounds: int | None = None, arguments: str = "", result: str = "") -> Stage:
    return Stage(name, arguments, minutes, (result or name,), rounds)


MODES = ("bf16", "hsdp", "accumulation", "offload", "ragged")
WRAPPER = ("step", "accumulation", "summon", "summon_writeback", "prefetch")
# The most important first; what needs gloo ranks before what one process does.
STAGES = (
    _training("step", 512, 7, 2.4),
    _training("step", 1024, 6, 3.7),
    _training("modes", 512, 3, 3.7, MODES),
    _training("modes", 1024, 3, 9.0, MODES),
    _training("wrapper", 512, 3, 5.1, WRAPPER),
    _training("wrapper", 1024, 3, 5.9, ("step", "accumulation")),
    _training("accelerate_step", 512, 7, 1.5, needs="accelerate"),
    _training("accelerate_step", 1024, 5, 1.5, needs="accelerate"),
    _stage("checkpoint", 4.2, 3, result="checkpoint_1024"),
    _stage("memory_limit", 4.1, arguments="--ranks 2 --ranks 64 --what fp32 --what bf16"),
    _stage("page_faults", 0.8, 3, result="page_faults_fullshard_1024"),
    _stage("muon", 0.7, 9),
    _stage("host_cost", 0.9, 15),
    _stage("wrap_time", 1.2, 7),
    _stage("optimizer_cost", 2.7, 4),
    _stage("nccl_counts", 0.8),
    _stage("nccl_counts", 5.8, arguments="--device emulated", result="nccl_counts_emulated"),
    _stage("overlap", 1.5, 3),
    _stage("scaling", 4.5),
    _stage("quantization", 4.0, arguments="--steps 500"),
)
# A GPU's, which writes its own page; what compares fullshard with itself; what is calculated; and what only draws.
APART = ("gpu", "hosts", "diagnosis", "planned", "wrap_model", "pictures", "redraw", "all")
FULL_MINUTES = sum(stage.minutes for stage in STAGES)


@dataclass(frozen=True, kw_only=True)
class Options(SharedOptions):
    """Everything that is not measured at this commit on this machine yet."""

    minutes: float = option(FULL_MINUTES, "Minutes for all; rounds are scaled to it, to at least three.")
    plan: bool = option(False, "Only print what would run, and how long it takes.")


def missing(stage: Stage, folder: Path, environment: Environment) -> bool:
    """Whether a result of the stage is not there, or of another commit."""
    for name in stage.results:
        path = folder / f"{name}_{environment.name}.json"
        if not path.exists():
            return True
        if json.loads(path.read_text(encoding="utf-8"))["environment"]["commit"] != environment.commit:
            return True
    return False


def planned(options: Options, environment: Environment) -> Iterator[tuple[Stage, str]]:
    """Every stage, and why it does not run; empty if it does."""
    for stage in STAGES:
        absent = stage.needs is not None and importlib.util.find_spec(stage.needs) is None
        if absent:
            yield stage, f"{stage.needs} is not installed"
        else:
            yield stage, "" if missing(stage, options.results, environment) else "measured at this commit"


def run(options: Options) -> bool:
    """Run all that is missing, then write plots and pages."""
    environment = current_environment()
    if environment.commit.endswith(DIRTY) and not options.plan:
        raise UsageError(f"src or bench differ from commit {environment.commit.split()[0]}: commit first")
    share, failed, begun = options.minutes / FULL_MINUTES, [], time.monotonic()
    for stage, reason in planned(options, environment):
        command = stage.command(share)
        print(f"== {' '.join(command)}: {reason or f'about {share * stage.minutes:.1f} min'}", flush=True)
        if reason or options.plan:
            continue
        started = time.monotonic()
        files = ["--results", str(options.results)]
        if subprocess.run([sys.executable, "-m", "bench", *command, *files], check=False).returncode:
            failed.append(stage.benchmark)
        print(f"== {stage.benchmark} took {(time.monotonic() - started) / 60:.1f} min", flush=True)
    if options.plan:
        return True
    redraw.run(redraw.Options(results=options.results, write_document=options.write_document))
    print(f"failed: {', '.join(failed)}" if failed else f"all ran, {(time.monotonic() - begun) / 60:.0f} min")
    return not failed
