"""How the ranks of one start find each other, and not those of the start before.

[Note: Stale stores]
Under torchrun with the c10d rendezvous, the launcher's process keeps one key-value store for all of its starts, and
torch (as of 2.13) puts nothing into the keys that tells starts apart. After a restart a rank may so find the address
of one that was killed, and wait for it. The number of restarts, which each node counts for itself, would not do
either. So the ranks first agree on a name that no earlier start has used, and keep all their keys below it.

[Note: Store of a start]
What they keep there is only where to find the store that rank 0 serves for this start. Ranks meet through a store
whenever they save, also to save what there is when the launcher was killed, and its store with it.
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

PATIENCE = timedelta(minutes=10)  # ranks of other nodes may still be starting
POLL = 0.02  # seconds between looks


def agent_store() -> Store | None:
    """A connection to the store that torch elastic's launcher keeps; None where rank 0 of each start has its own."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, timeout=PATIENCE)


def meet(store: Store, rank: int, size: int, patience: timedelta = PATIENCE) -> Store:
    """Wait for all ranks of this start. See [Note: Stale stores].

    Rank 0 invents a name and calls it out; each of the others answers under it with a word of its own; and rank 0
    repeats the words of all. A rank that does not find its own among them has heard of an earlier start, and listens
    again.

    Args:
        store: shared by all ranks, and by those of earlier starts.
        rank: this one's.
        size: number of ranks.
        patience: how long to wait.

    Returns:
        The part of the store that only this start knows.

    Raises:
        TimeoutError: not all ranks have come.
    """
    word = uuid.uuid4().hex
    name = _call(store, word, size, patience) if rank == 0 else _answer(store, word, rank, patience)
    return PrefixStore(f"fullshard/{name}", store)


def own_store(store: Store, rank: int, address: str, patience: timedelta = PATIENCE) -> Store:
    """The store of this start, which lives in rank 0's process. See [Note: Store of a start].

    Args:
        store: from `meet`: how the others learn where rank 0 serves.
        rank: this one's. Rank 0 keeps the server for as long as it keeps what it gets here.
        address: by which all ranks reach the machine of the launcher's store, usually that of rank 0 as well.
        patience: how long to wait for rank 0, and for keys of the new store.
    """
    if rank == 0:
        host = _address_here(address)
        own = TCPStore(host, 0, is_master=True, timeout=patience, wait_for_workers=False)
        store.set("address", json.dumps([host, own.port]))
        return own
    store.set_timeout(patience)
    host, port = json.loads(store.get("address"))
    return TCPStore(host, port, is_master=False, timeout=patience)


def _address_here(address: str) -> str:
    """`address`, if it is one of this machine's; else the address with which this machine reaches that one."""
    found = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)
    for family, kind, protocol, _, place in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as here:
            here.bind((place[0], 0))
            return address
    family, kind, protocol, _, place = found[0]
    with socket.socket(family, kind, protocol) as here:
        here.connect(place)  # of datagrams: decides on a route, and sends nothing
        return str(here.getsockname()[0])


def _call(store: Store, name: str, size: int, patience: timedelta) -> str:
    store.set("fullshard/start", name)
    keys = [f"fullshard/{name}/word-{rank}" for rank in range(1, size)]
    deadline = time.monotonic() + patience.total_seconds()
    while keys and not store.check(keys):
        _rest(deadline, "other ranks did not answer")
    words = [store.get(key).decode() for key in keys]
    store.set(f"fullshard/{name}/words", json.dumps(words))
    return name


def _answer(store: Store, word: str, rank: int, patience: timedelta) -> str:
    answered = None
    deadline = time.monotonic() + patience.total_seconds()
    while True:
        if store.check(["fullshard/start"]):
            name = str(store.get("fullshard/start").decode())
            if name != answered:
                store.set(f"fullshard/{name}/word-{rank}", word)
                answered = name
            key = f"fullshard/{name}/words"
            if store.check([key]) and word in json.loads(store.get(key)):
                return name
        _rest(deadline, "rank 0 did not call")


def _rest(deadline: float, problem: str) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(f"the ranks of this start did not find each other: {problem}; see what became of them")
    time.sleep(POLL)
