"""A run that is killed again and again ends as one that nobody disturbed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from train_processes import (
    LIMIT,
    SIZE,
    command,
    last_step,
    parent_of,
    rank_of,
    run_on,
    start,
    wait_for,
    workers_of,
    write_text,
)

from fullshard.train.metrics import read_metrics
from ranks import RankPool

STEPS = 40
RUN = [*SIZE, "--steps", STEPS, "--eval-every", 20, "--eval-bytes", 2000, "--generate", 5]
RUN += ["--checkpoint-every", 5, "--ranks", 2, "--max-restarts", 99]
KILLS = 3
MOST_STEPS = 10  # between two kills in training
LONGEST_DELAY = 1.2  # seconds from a start to a kill that does not wait for training

pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="finds processes through /proc")


@dataclass
class Disturbed:
    """A run that is started again whenever its launcher has ended, and what was done to it."""

    out: Path
    text: Path
    log: Path
    process: subprocess.Popen[str] | None = None
    kills: list[str] = field(default_factory=list)

    @property
    def metrics(self) -> Path:
        return self.out / "disturbed" / "metrics.jsonl"

    def revive(self) -> subprocess.Popen[str]:
        """The launcher, started if it is not there."""
        if self.process is not None and self.process.poll() is not None:
            # A worker or launcher that was asked to end saves and says 143, unless it is not so far yet.
            assert self.process.returncode in (143, -signal.SIGTERM, -signal.SIGKILL), self.story()
            self.process = None
        if self.process is None:
            line = command(self.text, *RUN, "--out", self.out, "--name", "disturbed")
            self.process = start(*line, output=self.log)
        return self.process

    def has_reached(self, step: int) -> bool:
        """Whether the run has come to a step; revives it if it has ended."""
        self.revive()
        return last_step(self.metrics) >= step

    def kill(self, draw: random.Random, *, worker: bool = False) -> None:
        """End one of the processes, with or without a chance to save; `worker`: one of the launcher, without."""
        process = self.revive()
        workers = [pid for pid in workers_of(self.out) if rank_of(pid) is not None]
        if worker:  # not an orphan of an earlier launcher
            workers = [pid for pid in workers if parent_of(pid) == process.pid]
        launcher = not worker and (draw.random() < 0.3 or not workers)
        number = signal.SIGTERM if draw.random() < 0.3 and not worker else signal.SIGKILL
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid if launcher else draw.choice(workers), number)
            who = "launcher" if launcher else "worker"
            self.kills.append(f"{number.name} to a {who} at step {last_step(self.metrics)}")
        if launcher:
            process.wait(LIMIT)

    def story(self) -> str:
        """What was printed and done, for a failure's message."""
        ended = self.process.returncode if self.process else None
        return "\n".join([self.log.read_text(), *self.kills, f"ended with {ended}"])


@pytest.fixture
def disturbed(tmp_path: Path) -> Iterator[Disturbed]:
    (tmp_path / "text").mkdir()
    run_ = Disturbed(tmp_path / "runs", write_text(tmp_path / "text"), tmp_path / "log.txt")
    yield run_
    for pid in workers_of(run_.out):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if run_.process:
        run_.process.wait(LIMIT)


def numbers(metrics: Path) -> list[tuple[object, ...]]:
    """What must repeat to the last bit, record by record."""
    names = ("kind", "step", "loss", "bits_per_byte", "lr", "grad_norm")
    return [tuple(record.get(name) for name in names) for record in read_metrics(metrics)]


def test_run_killed_at_random_moments_ends_as_an_undisturbed_one(disturbed: Disturbed, ranks: RankPool) -> None:
    """Three kills of workers and launchers, in training, while saving and while starting: the same bytes."""
    draw = random.Random(5)
    for number in range(KILLS):
        disturbed.revive()
        if number:
            target = last_step(disturbed.metrics) + draw.randint(1, MOST_STEPS)
            wait_for(lambda target=target: disturbed.has_reached(target))
        else:
            time.sleep(draw.uniform(0, LONGEST_DELAY))
        disturbed.kill(draw, worker=number == KILLS - 1)
    assert len(disturbed.kills) == KILLS
    while disturbed.revive().wait(LIMIT):
        pass
    story = disturbed.story()
    assert last_step(disturbed.metrics) == STEPS, story
    whole = run_on(ranks, 2, disturbed.text, *RUN, "--out", disturbed.out, "--name", "whole")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    one, other = disturbed.out / "whole", disturbed.out / "disturbed"
    assert numbers(other / "metrics.jsonl") == numbers(one / "metrics.jsonl"), story
    for name in ("model.safetensors", "best.safetensors", "config.toml"):
        assert (other / name).read_bytes() == (one / name).read_bytes(), f"{name}\n{story}"
    assert sorted(path.name for path in other.iterdir()) == sorted(path.name for path in one.iterdir())
    kept = [path.name for path in sorted((other / "checkpoints").iterdir())]
    assert kept == [f"step-{STEPS - 5:08d}", f"step-{STEPS:08d}"]
    assert "resumed from step" in story and "restart 1 of 99" in story
