"""Rendezvous of the ranks of one start, separate from earlier starts.

[Note: Stale stores]
Under torchrun with the c10d rendezvous, the launcher's process keeps one key-value store for all of its starts, and
torch (as of 2.13) uses the same keys for all starts. So after a restart a rank may find the address of a rank that was
killed, and wait for it. The number of restarts, which each node counts for itself, does not identify a start either. So
the ranks first agree on a unique name for the start, and use it as a prefix of all their keys.

[Note: Store of a start]
The launcher's store is only used to find the store that rank 0 serves for this start. Ranks need a store whenever they
save, also after the launcher was killed, and its store with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import uuid
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

TIMEOUT = timedelta(minutes=10)  # ranks of other nodes may still be starting
POLL = 0.02  # seconds between polls


def agent_store() -> Store | None:
    """Return a connection to the store of torch elastic's launcher; None if rank 0 of each start has a separate
    store.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, timeout=TIMEOUT)


def rendezvous(store: Store, rank: int, size: int, timeout: timedelta = TIMEOUT) -> Store:
    """Wait for all ranks of this start. See [Note: Stale stores].

    Rank 0 announces a unique name; each other rank joins it with a token; and rank 0 publishes all tokens. A rank that
    does not find its token among them has read the name of an earlier start, and tries again.

    Args:
        store: shared by all ranks, and by those of earlier starts.
        rank: this rank.
        size: number of ranks.
        timeout: time to wait.

    Returns:
        The store with a prefix for this start.

    Raises:
        TimeoutError: not all ranks have joined.
    """
    token = uuid.uuid4().hex
    name = _announce(store, token, size, timeout) if rank == 0 else _join(store, token, rank, timeout)
    return PrefixStore(f"fullshard/{name}", store)


def start_store(store: Store, rank: int, address: str, timeout: timedelta = TIMEOUT) -> Store:
    """Return the store of this start, which is served by rank 0's process. See [Note: Store of a start].

    Args:
        store: from `rendezvous`, with which the others find rank 0's server.
        rank: this rank. On rank 0, the server lives as long as the returned store.
        address: address of the machine of the launcher's store, usually also that of rank 0.
        timeout: time to wait for rank 0, and for keys of the new store.
    """
    if rank == 0:
        host = _address_here(address)
        own = TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
        store.set("address", json.dumps([host, own.port]))
        return own
    store.set_timeout(timeout)
    host, port = json.loads(store.get("address"))
    return TCPStore(host, port, is_master=False, timeout=timeout)


def _address_here(address: str) -> str:
    """Return `address` if it is one of this machine's; else the address with which this machine reaches it."""
    found = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)
    for family, kind, protocol, _, place in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as here:
            here.bind((place[0], 0))
            return address
    family, kind, protocol, _, place = found[0]
    with socket.socket(family, kind, protocol) as here:
        here.connect(place)  # datagram socket: selects a route, sends nothing
        return str(here.getsockname()[0])


def _announce(store: Store, name: str, size: int, timeout: timedelta) -> str:
    store.set("fullshard/start", name)
    keys = [f"fullshard/{name}/word-{rank}" for rank in range(1, size)]
    deadline = time.monotonic() + timeout.total_seconds()
    while keys and not store.check(keys):
        _sleep(deadline, "other ranks did not join")
    tokens = [store.get(key).decode() for key in keys]
    store.set(f"fullshard/{name}/words", json.dumps(tokens))
    return name


def _join(store: Store, token: str, rank: int, timeout: timedelta) -> str:
    joined = None
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        if store.check(["fullshard/start"]):
            name = str(store.get("fullshard/start").decode())
            if name != joined:
                store.set(f"fullshard/{name}/word-{rank}", token)
                joined = name
            key = f"fullshard/{name}/words"
            if store.check([key]) and token in json.loads(store.get(key)):
                return name
        _sleep(deadline, "rank 0 did not announce a name")


def _sleep(deadline: float, problem: str) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(f"rendezvous timed out: {problem}; see the output of these ranks")
    time.sleep(POLL)
