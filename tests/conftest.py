"""Fixtures and settings of the whole suite. Bodies run on ranks: see the docstring of ``ranks``."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))  # test modules of subfolders import ranks and compare

# Ranks inherit it: memory that is freed, and memory that is not filled yet, reads as NaN in the whole suite.
os.environ.setdefault("FULLSHARD_POISON", "1")
# Inductor's cache does not know for which instructions a kernel was generated. One with vectors does not compile where
# ATen has none (CPU=baseline of the Makefile), so each has a cache.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR",
    f"{tempfile.gettempdir()}/fullshard-kernels-{os.getuid()}-{os.environ.get('ATEN_CPU_CAPABILITY', 'own')}",
)

from ranks import RankPool
from ranks.device import device_type

ANOTHER_RANK = "\n\n--- rank"  # begins the report of each rank in a RanksFailed

# Two shared cores make any wall-clock limit per example a matter of luck.
hypothesis.settings.register_profile("fullshard", deadline=None)
hypothesis.settings.load_profile("fullshard")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The rank pool of the session: ``ranks(2, body, ...)`` runs ``body(rank, ...)`` on two ranks."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """A test that leaves a process group in the main process would fail others, in another file on another day."""
    yield
    left, world = dist.is_initialized(), dist.get_world_size() if dist.is_initialized() else 0
    if left:
        dist.destroy_process_group()
    assert not left, f"the test has left a process group of {world} ranks in the main process"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs another device than the ranks have."""
    if device_type() != "cpu":
        for item in items:
            if (marker := item.get_closest_marker("cpu_only")) is not None:
                item.add_marker(pytest.mark.skip(reason=marker.args[0]))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None, None, None]:
    """End the report with the error of the first test that failed, and of ranks with the one that failed first."""
    yield
    for report in [*terminalreporter.getreports("failed"), *terminalreporter.getreports("error")][:1]:
        terminalreporter.section(f"first failure: {report.nodeid}")
        crash = getattr(report.longrepr, "reprcrash", None)
        message = crash.message if crash else report.longreprtext
        terminalreporter.line(ANOTHER_RANK.join(message.split(ANOTHER_RANK)[:2]))
