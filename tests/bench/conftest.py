"""Makes ``bench`` importable however pytest was started (this folder has the same name)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """Threads, rounding and process group are those of before."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)
    if dist.is_initialized():
        dist.destroy_process_group()
