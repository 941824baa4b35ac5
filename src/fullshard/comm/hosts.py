"""Ranks of a process group that share a host, between which messages do not use the network.

[Note: Messages between hosts]
A link between hosts is shared by the ranks of a host and is slow, so each byte crosses it once per host and not once
per rank. An all-gather sends a shard to one rank of each other host, its *counterpart*, which passes it on within its
host. A reduce-scatter adds up within each host what is for a rank of another one, and sends the sum. A host with one
rank of the group, and a single host, are no special cases: there is nothing to pass on.

What is passed on depends on launches of other ranks only, and not on when a rank waits: a thread of the group does it.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import hashlib
import os
import platform
import queue
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from fullshard.memory import HostWork, Work

__all__ = ["RelayThread", "Routes", "this_host"]


@dataclass(frozen=True)
class Routes:
    """The ways of messages from and to one rank of a group.

    Args:
        hosts: Ranks of the group by host, each in order; hosts in the order of their first ranks.
        rank: This rank.
    """

    hosts: Sequence[Sequence[int]]
    rank: int

    @cached_property
    def host(self) -> Sequence[int]:
        """The ranks on this rank's host, and it."""
        return next(host for host in self.hosts if self.rank in host)

    @cached_property
    def neighbors(self) -> Sequence[int]:
        """The other ranks on this rank's host, nearest first, so that not all ranks send to the same one at once."""
        at = self.host.index(self.rank)
        return [*self.host[at + 1 :], *self.host[:at]]

    @cached_property
    def counterparts(self) -> Sequence[int]:
        """The rank of each other host with which this rank exchanges messages, nearest first."""
        index = self.host.index(self.rank)
        return [host[index % len(host)] for host in self._others]

    @cached_property
    def relayed(self) -> Mapping[int, Sequence[int]]:
        """By rank of this host: the ranks of other hosts with which it exchanges messages for all of this host."""
        ranks = [(index % len(self.host), rank) for host in self._others for index, rank in enumerate(host)]
        return {rank: [other for place, other in ranks if place == at] for at, rank in enumerate(self.host)}

    @cached_property
    def _others(self) -> Sequence[Sequence[int]]:
        """The other hosts, nearest first."""
        at = next(index for index, host in enumerate(self.hosts) if self.rank in host)
        return [*self.hosts[at + 1 :], *self.hosts[:at]]


def this_host() -> bytes:
    """Return 8 bytes that stand for the machine of this process; or for its network, where namespaces divide it."""
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    known = platform.node(), boot.exists() and boot.read_text(), network.exists() and os.readlink(network)
    return hashlib.blake2b(repr(known).encode(), digest_size=8).digest()


_EXIT_S = 60.0  # as long a process waits at its exit for messages that others have still to send

_threads: weakref.WeakSet[RelayThread] = weakref.WeakSet()


class RelayThread:
    """Waits for works of one process group in their order, on a thread that does not outlive the process.

    Not an executor of the standard library: that would be waited for at exit, also if another rank never comes.
    """

    _queue: _Queue
    _thread: threading.Thread

    def __init__(self) -> None:
        self._queue = queue.SimpleQueue()
        self._thread = threading.Thread(target=_relay, args=(self._queue,), name="fullshard relay", daemon=True)
        self._thread.start()
        _threads.add(self)

    def wait_for(self, work: Work) -> HostWork:
        """Have the thread wait for ``work``. Returns a work that is done when it has, and raises what it raised."""
        done: Future[None] = Future()
        self._queue.put((work, done))
        return HostWork((), lambda: _wait_until_done(done))

    def end(self) -> threading.Thread:
        """Have the thread end when it has passed on what it was given, and return it."""
        self._queue.put(None)
        return self._thread

    def __del__(self) -> None:
        self.end()


@atexit.register
def _end_threads() -> None:
    """End relay threads at exit: one that still waits in C++ would abort the process."""
    deadline = time.monotonic() + _EXIT_S
    for thread in [each.end() for each in list(_threads)]:
        thread.join(max(0.0, deadline - time.monotonic()))


def _wait_until_done(done: Future[None]) -> None:
    """Raise what a signal handler raises meanwhile only afterwards, as gloo does: the memory is still written to."""
    interrupted: BaseException | None = None
    while not done.done():
        try:
            concurrent.futures.wait([done])
        except BaseException as error:
            interrupted = error
    if interrupted is not None:
        raise interrupted
    done.result()


_Queue = queue.SimpleQueue[tuple[Work, Future[None]] | None]


def _relay(works: _Queue) -> None:
    with torch.inference_mode():  # which may write to tensors that were made in it, and to all others
        while (entry := works.get()) is not None:
            work, done = entry
            try:
                work.wait()
            except BaseException as error:  # for the rank that waits
                done.set_exception(error)
            else:
                done.set_result(None)
            del entry, work, done  # which keep what was passed on
