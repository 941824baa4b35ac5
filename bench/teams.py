"""Contestants as teams of worker processes, all alive in one run, that train only when their turn comes."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from bench.comparison import Record
from bench.environment import REPOSITORY
from bench.statistics import turn_order

REPLY_TIMEOUT = 150.0  # seconds; longer than a process group's own timeout

console = Console(highlight=False)


class ContestantFailedError(RuntimeError):
    """A contestant could not start or continue; its message says why."""


@dataclass(frozen=True)
class Launch:
    """How one contestant's processes are started: a worker module, and per rank its assignment (JSON)."""

    name: str
    worker: str
    environment: Mapping[str, str]
    assignments: Sequence[str]


@dataclass(frozen=True)
class Turns:
    """How often everyone trains: first a warm-up, then rounds in which each contestant has one turn."""

    warmup_steps: int
    rounds: int
    steps_per_round: int


class Rank:
    """One worker process and the lines it answers with."""

    def __init__(self, launch: Launch, rank: int, log: IO[str]) -> None:
        self.log = log
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._process = subprocess.Popen(
            [sys.executable, "-m", launch.worker, launch.assignments[rank]],
            cwd=REPOSITORY,
            env=dict(launch.environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(None)

    def ask(self, request: Mapping[str, object]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a dead rank is reported when its answer is read
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def reply(self) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=REPLY_TIMEOUT)
        except queue.Empty:
            raise ContestantFailedError(f"no answer within {REPLY_TIMEOUT:.0f} s") from None
        if line is None:
            raise ContestantFailedError(f"its process ended: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ContestantFailedError(str(answer["error"]).splitlines()[0])
        return answer

    def _last_words(self) -> str:
        code = self._process.wait(timeout=5)
        self.log.flush()
        lines = Path(self.log.name).read_text(errors="replace").split("\n")
        said = [line for line in lines if line.strip()]
        cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return f"{cause}, {said[-1] if said else 'nothing on stderr'}"

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


class Team:
    """All ranks of one contestant. ``folder`` takes their logs."""

    def __init__(self, launch: Launch, folder: Path) -> None:
        self.name = launch.name
        self.ranks: list[Rank] = []
        self._files = contextlib.ExitStack()
        for rank in range(len(launch.assignments)):
            log = self._files.enter_context((folder / f"{launch.name}.{rank}.log").open("w"))
            self.ranks.append(Rank(launch, rank, log))

    def gather(self, request: Mapping[str, object] | None = None) -> list[dict[str, Any]]:
        """Every rank's answer to a request (None: to its start)."""
        if request is not None:
            for rank in self.ranks:
                rank.ask(request)
        return [rank.reply() for rank in self.ranks]

    def end(self) -> None:
        for rank in self.ranks:
            rank.end()
        self._files.close()


@contextlib.contextmanager
def _teams(launches: Sequence[Launch], folder: Path, failures: dict[str, str]) -> Iterator[dict[str, Team]]:
    """Start the contestants one after another; those that cannot start are in ``failures``."""
    teams: dict[str, Team] = {}
    try:
        for launch in launches:
            teams[launch.name] = team = Team(launch, folder)
            try:
                team.gather()
            except ContestantFailedError as error:
                _drop(teams, launch.name, error, failures)
        yield teams
    finally:
        for team in teams.values():
            team.end()


def _drop(teams: dict[str, Team], name: str, error: Exception, failures: dict[str, str]) -> None:
    failures[name] = str(error)
    console.print(f"[yellow]{name} cannot run: {error}")
    teams.pop(name).end()


def take_turns(launches: Sequence[Launch], turns: Turns, folder: Path) -> tuple[dict[str, Record], dict[str, str]]:
    """Run all rounds. Returns the records, and why a contestant has none."""
    failures: dict[str, str] = {}
    records: dict[str, Record] = {}
    with _teams(launches, folder, failures) as teams:
        for name in list(teams):
            try:
                losses, _ = _turn(teams[name], turns.warmup_steps)
                records[name] = Record(losses, [], [])
            except ContestantFailedError as error:
                _drop(teams, name, error, failures)
        for index in range(turns.rounds):
            for name in turn_order(list(teams), index) if teams else ():
                try:
                    losses, seconds = _turn(teams[name], turns.steps_per_round)
                except ContestantFailedError as error:
                    _drop(teams, name, error, failures)
                    continue
                records[name].losses += losses
                records[name].seconds.append(seconds)
        for name, team in teams.items():
            records[name].memory = team.gather({"do": "memory"})
    return {name: record for name, record in records.items() if name not in failures}, failures


def _turn(team: Team, steps: int) -> tuple[list[float], list[float]]:
    """Train some steps: the mean loss over the ranks and the slowest rank's time, per step."""
    answers = team.gather({"do": "run", "steps": steps})
    losses = [sum(ranks) / len(ranks) for ranks in zip(*(a["losses"] for a in answers), strict=True)]
    seconds = [max(ranks) for ranks in zip(*(a["seconds"] for a in answers), strict=True)]
    return losses, seconds
