"""The processes of one world as pytest sees them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import signal
import socket
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path

from patience import patient
from ranks.nursery import Nursery
from ranks.outcome import Outcome, RanksFailed
from ranks.worker import DUMP_STACKS, Job, log_path, stacks_path

START_TIMEOUT = 60.0
STACKS_TIMEOUT = 2.0  # for a rank told to write its stacks
OUTPUT_CHARACTERS = 6000
OWN_FRAMES = ("/ranks/worker.py", "/ranks/nursery.py", "<frozen runpy>")  # say nothing about the test


class World:
    """Ranks that have joined one process group and wait for jobs."""

    def __init__(self, size: int, nursery: Nursery, directory: Path) -> None:
        directory.mkdir()
        self.size, self.jobs = size, 0  # that were run
        self._nursery, self._directory = nursery, directory
        pairs = [socket.socketpair() for _ in range(size)]
        self._connections = [Connection(ours.detach()) for ours, _ in pairs]
        self._output_seen = [0] * size  # the bytes of output, by rank, that belong to earlier jobs
        # By rank, of the ranks that have not been reaped.
        self.pids: dict[int, int] = dict(enumerate(nursery.fork(directory, [theirs.fileno() for _, theirs in pairs])))
        for _, theirs in pairs:
            theirs.close()
        outcomes = self._collect(START_TIMEOUT, grace=None)
        if any(outcome.failed for outcome in outcomes):
            self.kill()
            raise RanksFailed(f"start of a world of {size}", outcomes)

    def run(self, job: Job, timeout: float, grace: float | None) -> list[Outcome]:
        """Run a job on every rank and return what became of it, by rank.

        Ranks that have not finished after ``timeout`` seconds, or ``grace`` seconds after the first failure,
        count as hung; later on a machine that has other work. After any failure the world is of no further use:
        ``kill`` it.
        """
        self._output_seen = [log_path(self._directory, rank).stat().st_size for rank in range(self.size)]
        message = pickle.dumps(job)
        for connection in self._connections:
            with contextlib.suppress(OSError):  # a rank that has died since: _collect says so
                connection.send_bytes(message)
        return self._collect(timeout, grace)

    def kill(self) -> None:
        """End every rank, at once."""
        for connection in self._connections:
            connection.close()
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)  # cannot hit another process: a pid is free only once it is reaped
        while self.pids:
            self._nursery.reap(self.pids.popitem()[1])

    def _collect(self, timeout: float, grace: float | None) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        pending = {connection: rank for rank, connection in enumerate(self._connections)}
        deadline = time.monotonic() + timeout
        limit = f"still running after the timeout of {timeout:g} s"
        extended = False
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                if extended:
                    break
                extended, deadline = True, deadline + patient(timeout) - timeout
                continue
            for connection in ready:
                rank = pending.pop(connection)
                outcome = outcomes[rank] = self._receive(rank)
                if outcome.failed and grace is not None and time.monotonic() + grace < deadline:
                    deadline, extended = time.monotonic() + grace, True
                    limit = f"still running {grace:g} s after rank {rank} {outcome.headline}"
        outcomes |= self._hung(list(pending.values()), limit)
        return [self._with_output(outcomes[rank]) for rank in range(self.size)]

    def _receive(self, rank: int) -> Outcome:
        try:
            return pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, OSError):
            when, pid = time.monotonic(), self.pids.pop(rank)
            os.kill(pid, signal.SIGKILL)  # of no effect if it has ended, as it should have
            return Outcome(rank, "died", when, exit_code=self._nursery.reap(pid))

    def _hung(self, ranks: list[int], message: str) -> dict[int, Outcome]:
        for rank in ranks:
            os.kill(self.pids[rank], DUMP_STACKS)
        until = time.monotonic() + STACKS_TIMEOUT
        return {
            rank: Outcome(rank, "hung", time.monotonic(), message=message, stacks=self._stacks(rank, until))
            for rank in ranks
        }

    def _stacks(self, rank: int, until: float) -> str:
        """What a rank has written of its stacks, once that stops growing."""
        text = ""
        while time.monotonic() < until:
            time.sleep(0.05)
            before, text = text, stacks_path(self._directory, rank).read_text(errors="replace")
            if text and text == before:
                break
        lines = [line for line in text.splitlines() if not any(file in line for file in OWN_FRAMES)]
        return "\n".join(lines) or f"(it wrote no stacks within {STACKS_TIMEOUT:g} s)"

    def _with_output(self, outcome: Outcome) -> Outcome:
        if not outcome.failed:
            return outcome
        written = log_path(self._directory, outcome.rank).read_bytes()[self._output_seen[outcome.rank] :]
        text = written.decode(errors="replace")
        return dataclasses.replace(outcome, output=text[-OUTPUT_CHARACTERS:])
