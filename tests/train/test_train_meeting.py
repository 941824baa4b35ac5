"""Ranks of one start among the traces of earlier ones."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore, Store

from fullshard.train.meeting import meet

SOON = timedelta(seconds=0.1)


def start(store: Store, size: int) -> list[Store]:
    """All ranks of one start, as threads."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: meet(store, rank, size), range(size)))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_starts_have_keys_of_their_own(size: int) -> None:
    """Ranks of one start see each other's keys, and none of an earlier start's."""
    store = HashStore()
    for number in range(3):
        found = start(store, size)
        assert not found[-1].check(["address"])
        found[0].set("address", str(number))
        assert all(each.get("address") == str(number).encode() for each in found)


@pytest.mark.parametrize("missing", [0, 1])
def test_rank_that_never_came_does_not_count_later(missing: int) -> None:
    """After a start that one rank did not live to join, which is an error for the other, the next one succeeds."""
    store = HashStore()
    with pytest.raises(TimeoutError, match="did not find each other"):
        meet(store, 1 - missing, 2, SOON)
    one, other = start(store, 2)
    one.set("address", "new")
    assert other.get("address") == b"new"
