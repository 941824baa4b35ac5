"""The pool: one world per size, kept over the tests of a session; what the fixture ``ranks`` gives."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ranks.nursery import Nursery
from ranks.outcome import Outcome, RanksFailed
from ranks.rank import DEFAULT_TIMEOUT
from ranks.worker import Job
from ranks.world import World

GRACE = 3.0  # after the first failure, for the other ranks to say what they make of it


class RankPool:
    """Runs bodies on ranks. Worlds start when first needed and are replaced after a failure."""

    _directory: Path
    _nursery: Nursery | None
    _worlds: dict[int, World]
    _started: int  # worlds so far, to name their directories

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="fullshard-ranks-"))
        self._nursery = None
        self._worlds = {}
        self._started = 0

    def __call__(
        self,
        world: int,
        body: Callable[..., Any],
        /,
        *args: Any,
        timeout: float = DEFAULT_TIMEOUT,
        fresh: bool = False,
        expect_failure: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Run ``body(rank, *args, **kwargs)`` on every rank of a world and return what it returned, by rank.

        Args:
            world: number of ranks.
            body: function of a module (no closure, no lambda); it travels by name, all else by pickle.
            timeout: seconds after which a rank counts as hung.
            fresh: run in a new world that is thrown away afterwards, for a body that leaves the process group
                broken.
            expect_failure: return one ``Outcome`` per rank instead, whatever it is, and let each rank run
                until it finishes or ``timeout`` is over.

        Raises:
            RanksFailed: some rank raised, died or hung. The next call gets a new world.
        """
        __tracebackhide__ = True
        job = _job(body, args, kwargs)
        where = self._start(world) if fresh else self._worlds.pop(world, None) or self._start(world)
        usable = False
        try:
            outcomes = where.run(job, timeout, grace=None if expect_failure else GRACE)
            usable = not any(outcome.failed for outcome in outcomes)
        finally:  # also when pytest is interrupted meanwhile
            if usable and not fresh:
                self._worlds[world] = where
            else:
                where.kill()
        return outcomes if expect_failure else _values(f"{job.qualname} on {world} ranks", outcomes)

    def pids(self, world: int) -> list[int]:
        """Process ids, by rank, of the world that the next call will use; empty if it has to be started."""
        return list(self._worlds[world].pids.values()) if world in self._worlds else []

    def close(self) -> None:
        """End all processes and remove their files."""
        for world in self._worlds.values():
            world.kill()
        self._worlds.clear()
        if self._nursery is not None:
            self._nursery.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self, size: int) -> World:
        if self._nursery is None:
            self._nursery = Nursery(self._directory)
        self._started += 1
        return World(size, self._nursery, self._directory / f"world{self._started}")


def _job(body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Job:
    body = getattr(body, "__rank_body__", body)
    name = getattr(body, "__qualname__", repr(body))
    if "<" in name:
        raise TypeError(f"ranks find a body by its name, so it has to be a function of a module; got {name}")
    path = os.path.abspath(sys.modules[body.__module__].__file__)
    return Job(body.__module__, path, name, pickle.dumps((args, kwargs)), tuple(sys.path))


def _values(what: str, outcomes: list[Outcome]) -> list[Any]:
    __tracebackhide__ = True
    if all(outcome.kind == "skipped" for outcome in outcomes):
        pytest.skip(outcomes[0].message)
    if any(outcome.failed for outcome in outcomes):
        raise RanksFailed(what, outcomes)
    return [outcome.value for outcome in outcomes]
