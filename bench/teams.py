"""Contestants as teams of worker processes (``bench.worker``) that do something only when they are asked."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bench.contestants import Contestant, process_environment
from bench.environment import REPOSITORY, slug

REPLY_TIMEOUT = 150.0  # seconds; longer than a process group's own timeout


class ContestantFailedError(RuntimeError):
    """A contestant could not start or continue; its message says why."""


@dataclass(frozen=True)
class Launch:
    """How one contestant's processes are started: a worker module, and per rank its assignment."""

    name: str
    worker: str
    environment: Mapping[str, str]
    assignments: Sequence[Mapping[str, object]]
    places: Sequence[Sequence[str]] = ()  # by rank, the beginning of a command that runs where the rank is to run

    @classmethod
    def of(
        cls, contestant: Contestant, worker: str, folder: Path, /, *, ranks: int, threads: int = 1, **assignment: object
    ) -> Launch:
        """Ranks of one process group, which meet in a file in ``folder``; ``assignment``: what all are told."""
        store = str(folder / f"{slug(contestant.name)}.store")
        shared = {"ranks": ranks, "store": store, "threads": threads, **assignment}
        assignments = [{"rank": rank, **shared} for rank in range(ranks)]
        return cls(contestant.name, worker, process_environment(contestant, threads), assignments)

    @classmethod
    def alone(cls, contestant: Contestant, worker: str, /, **assignment: object) -> Launch:
        return cls(contestant.name, worker, process_environment(contestant, 1), [assignment])


class Rank:
    def __init__(self, launch: Launch, rank: int, log: IO[str], timeout: float) -> None:
        self.log, self._timeout = log, timeout
        self._answers: queue.Queue[str | None] = queue.Queue()
        place = launch.places[rank] if launch.places else ()
        self._process = subprocess.Popen(
            [*place, sys.executable, "-m", "bench.worker", launch.worker, json.dumps(launch.assignments[rank])],
            cwd=REPOSITORY,
            env=dict(launch.environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # so that it ends with all that it has started
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

    def reply(self) -> Any:
        try:
            line = self._answers.get(timeout=self._timeout)
        except queue.Empty:
            raise ContestantFailedError(f"no answer within {self._timeout:.0f} s") from None
        if line is None:
            raise ContestantFailedError(f"its process ended: {self._last_words()}")
        reply = json.loads(line)
        if "error" in reply:
            raise ContestantFailedError(str(reply["error"]).splitlines()[0])
        return reply["answer"]

    def _last_words(self) -> str:
        code = self._process.wait(timeout=5)
        self.log.flush()
        said = [line for line in Path(self.log.name).read_text(errors="replace").split("\n") if line.strip()]
        cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return f"{cause}, {said[-1] if said else 'nothing on stderr'}"

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Teams:
    """Contestants whose ranks are alive together; one that fails is ended, and why is in ``failures``."""

    alive: dict[str, list[Rank]]
    failures: dict[str, str]

    def __enter__(self) -> Teams:
        self.alive, self.failures, self._open = {}, {}, contextlib.ExitStack()
        self.folder = Path(self._open.enter_context(tempfile.TemporaryDirectory()))  # where ranks meet, and logs are
        return self

    def __exit__(self, *_: object) -> None:
        for rank in (rank for team in self.alive.values() for rank in team):
            rank.end()
        self._open.close()

    def start(self, launch: Launch, timeout: float = REPLY_TIMEOUT) -> None:
        """Start the contestant's ranks, and wait until each has built what it will be asked about.

        Args:
            launch: The contestant.
            timeout: Of each answer, in seconds.
        """
        self.alive[launch.name] = ranks = []
        for index in range(len(launch.assignments)):
            log = self._open.enter_context((self.folder / f"{slug(launch.name)}.{index}.log").open("w"))
            ranks.append(Rank(launch, index, log, timeout))
        self._replies(launch.name)

    def ask(self, name: str, do: str, /, **request: object) -> list[Any] | None:
        """Every rank's answer; None if the contestant fails, or has failed before."""
        for rank in self.alive.get(name, ()):
            rank.ask({"do": do, **request})
        return self._replies(name) if name in self.alive else None

    def _replies(self, name: str) -> list[Any] | None:
        try:
            return [rank.reply() for rank in self.alive[name]]
        except ContestantFailedError as error:
            self.failures[name] = str(error)
            print(f"{name} cannot go on: {error}", flush=True)
            for rank in self.alive.pop(name):
                rank.end()
            return None


def ask_alone(launch: Launch, timeout: float, do: str, /, **request: object) -> dict[str, Any]:
    """Start a contestant, ask for one thing and end it: ``{"answers": ...}`` of all ranks, or ``{"failure": why}``."""
    with Teams() as teams:
        teams.start(launch, timeout)
        answers = teams.ask(launch.name, do, **request)
        return {"failure": teams.failures[launch.name]} if answers is None else {"answers": answers}
