"""What tests of the emulated accelerator itself have in common. Names of ``accelerator`` are imported in ranks only."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator

import torch

from ranks import on_ranks

on_emulated = functools.partial(on_ranks, device_type="emulated")


def settled() -> None:
    """End what is pending and what nobody refers to."""
    gc.collect()
    torch.accelerator.synchronize()


@contextlib.contextmanager
def expect_races(*kinds: str) -> Iterator[None]:
    """Take the races up to the end of the block; each kind has to be among them, and no other."""
    from accelerator.races import take_races

    yield
    found = take_races()
    assert {race.kind for race in found} == set(kinds), "\n".join(str(race) for race in found) or "no race"
