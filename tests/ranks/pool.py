"""The pool: one world per size and type of device, kept over the tests of a session; the fixture ``ranks`` gives it."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ranks.device import device_type as default_device_type
from ranks.device import unavailable
from ranks.nursery import PRELOADED, Nursery
from ranks.outcome import Outcome, RanksFailed
from ranks.rank import DEFAULT_TIMEOUT
from ranks.worker import Job
from ranks.world import World

GRACE = 3.0  # after the first failure, for the other ranks to say what they make of it
# Of a world, which is then replaced: each group of gloo that a body makes keeps threads that wake up now and then.
MOST_JOBS = 200


class RankPool:
    """Runs bodies on ranks. Worlds start when first needed and are replaced after a failure."""

    def __init__(self, beside: RankPool | None = None, preload: Sequence[str] = PRELOADED) -> None:
        """Make a pool. One ``beside`` another has worlds of its own, from the other's nurseries.

        Args:
            beside: another pool.
            preload: modules that ranks find imported.
        """
        self._beside, self._preload = beside, preload
        self._directory = Path(tempfile.mkdtemp(prefix="fullshard-ranks-"))
        self._nurseries: dict[str, Nursery] = {}  # by type of device
        self._worlds: dict[tuple[int, str], World] = {}  # by size and type of device
        self._started = 0  # worlds so far, to name their directories

    def __call__(
        self,
        world: int,
        body: Callable[..., Any],
        /,
        *args: Any,
        timeout: float = DEFAULT_TIMEOUT,
        fresh: bool = False,
        expect_failure: bool = False,
        device_type: str | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Run ``body(rank, *args, **kwargs)`` on every rank of a world and return what it returned, by rank.

        Args:
            world: number of ranks.
            body: function of a module (no closure, no lambda), which is sent by its name; all else is pickled.
            timeout: seconds after which a rank counts as hung.
            fresh: run in a new world that is thrown away afterwards, for a body that breaks the process group.
            expect_failure: return one ``Outcome`` per rank, whatever it is, when all have finished or timed out.
            device_type: what the ranks compute on (see ``device.py``); FULLSHARD_TEST_DEVICE, or the CPU,
                without it. The test is skipped where it cannot be had.

        Raises:
            RanksFailed: some rank raised, died or hung. The next call gets a new world.
        """
        __tracebackhide__ = True
        job = _job(body, args, kwargs)
        key = world, device_type or default_device_type()
        where = self._start(*key) if fresh else self._worlds.pop(key, None) or self._start(*key)
        usable = False
        try:
            outcomes = where.run(job, timeout, grace=None if expect_failure else GRACE)
            usable = not any(outcome.failed for outcome in outcomes)
        finally:  # also when pytest is interrupted meanwhile
            where.jobs += 1
            if usable and not fresh and where.jobs < MOST_JOBS:
                self._worlds[key] = where
            else:
                where.kill()
        return outcomes if expect_failure else _values(f"{job.qualname} on {world} ranks", outcomes)

    def pids(self, world: int) -> list[int]:
        """Process ids, by rank, of the world that the next call will use; empty if it has to be started."""
        key = world, default_device_type()
        return list(self._worlds[key].pids.values()) if key in self._worlds else []

    def close(self) -> None:
        """End all processes and remove their files."""
        for world in self._worlds.values():
            world.kill()
        self._worlds.clear()
        for nursery in self._nurseries.values():
            nursery.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self, size: int, device: str) -> World:
        if reason := unavailable(device, size):
            pytest.skip(reason)
        self._started += 1
        return World(size, self._nursery(device), self._directory / f"world{self._started}")

    def _nursery(self, device: str) -> Nursery:
        if self._beside is not None:
            return self._beside._nursery(device)
        if device not in self._nurseries:
            self._nurseries[device] = Nursery(self._directory, device, self._preload)
        return self._nurseries[device]


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
