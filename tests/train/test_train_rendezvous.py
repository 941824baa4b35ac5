"""Ranks of one start among the traces of earlier ones."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from fullshard.train import rendezvous as rendezvous_module
from fullshard.train.rendezvous import rendezvous, start_store

SOON = timedelta(seconds=0.1)


def start(store: Store, size: int) -> list[Store]:
    """All ranks of one start, as threads."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: rendezvous(store, rank, size), range(size)))


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
    with pytest.raises(TimeoutError, match="rendezvous timed out"):
        rendezvous(store, 1 - missing, 2, SOON)
    one, other = start(store, 2)
    one.set("address", "new")
    assert other.get("address") == b"new"


def test_ranks_meet_in_a_store_that_outlives_the_launchers() -> None:
    """Where rank 0 serves goes through the launcher's store; nothing else does, so that its end does no harm."""
    launchers = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    port = launchers.port

    def join(rank: int) -> Store:
        return start_store(TCPStore("localhost", port, is_master=False), rank, "localhost")

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(join, range(2))
    del launchers
    with pytest.raises(RuntimeError):
        TCPStore("localhost", port, is_master=False, timeout=SOON)
    one.set("key", "value")
    assert other.get("key") == b"value"


def test_store_is_served_where_others_can_reach_it() -> None:
    """By the name that the others know, if that is this machine's; an address of another one cannot be served."""
    assert rendezvous_module._address_here("localhost") == "localhost"
    assert rendezvous_module._address_here("127.0.0.1") == "127.0.0.1"
    with contextlib.suppress(OSError):  # no route from here
        assert rendezvous_module._address_here("192.0.2.1") != "192.0.2.1"
