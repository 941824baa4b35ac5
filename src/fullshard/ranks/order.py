"""Check that all ranks run their units in the same order: after the first forward, and with a watchdog during it.

Collectives of ranks that run different units do not match: at best they hang, at worst they mix up weights. So the
first forward of a root ends with a comparison of execution orders (:class:`OrderCheck`). Ranks that hang do not get
that far, so a watchdog thread observes them meanwhile (:class:`OrderWatchdog`).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import math
import os
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from fullshard.comm.collective import all_gather_flat
from fullshard.errors import FullshardError

__all__ = ["TIMEOUT_VARIABLE", "OrderCheck", "OrderWatchdog", "UnitOrder", "explain_difference"]

TIMEOUT_VARIABLE = "FULLSHARD_ORDER_TIMEOUT_S"
_DEFAULT_TIMEOUT_S = 10.0
_POLL_S = 0.5  # poll interval of a stalled rank
_PATIENCE_S = 3.0  # wait for ranks that have not published their order
_MAX_RANKS_SHOWN = 8

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class UnitOrder:
    """Execution order of one rank.

    Args:
        names: Names of the units, in the order in which they ran.
        complete: True if the forward is over; otherwise more units may follow.
    """

    names: tuple[str, ...]
    complete: bool = True

    def at(self, position: int) -> str | None:
        """Describe the unit at ``position``; None if it is not known yet."""
        if position < len(self.names):
            return repr(self.names[position]) if self.names[position] else "the root"
        return "nothing, its forward was over," if self.complete else None


def explain_difference(orders: Mapping[int, UnitOrder]) -> str | None:
    """Return an error message if ranks ran units in different orders; None if known orders agree.

    Args:
        orders: Execution orders by global rank.
    """
    for position in range(max((len(order.names) for order in orders.values()), default=0)):
        ranks: dict[str, list[int]] = {}
        for rank, order in sorted(orders.items()):
            name = order.at(position)
            if name is not None:
                ranks.setdefault(name, []).append(rank)
        if len(ranks) > 1:
            return (
                "the ranks ran the model's units in different orders in the first forward, so their collectives do not "
                f"match; the first difference is at position {position} (from 0): {_list(ranks)}. Make all "
                "ranks call the same modules in the same order: look for control flow that depends on the rank or on "
                "its data, and call modules that a rank does not need with an input of zeros"
            )
    return None


def _list(ranks: Mapping[str, Sequence[int]]) -> str:
    """Format units and the ranks that ran them, with at most a few ranks."""
    groups = list(ranks.items())
    shown = groups[:_MAX_RANKS_SHOWN]
    share = _MAX_RANKS_SHOWN // len(shown)
    parts = []
    for name, members in shown:
        few = ", ".join(str(rank) for rank in members[:share])
        more = f" and {len(members) - share} more" if len(members) > share else ""
        parts.append(f"{name} on {'rank' if len(members) == 1 else 'ranks'} {few}{more}")
    if len(groups) > len(shown):
        parts.append(f"and {len(groups) - len(shown)} other units on other ranks")
    return "; ".join(parts)


class OrderCheck:
    """Compares the execution orders of ranks after the first forward; later, this rank's with its first.

    Args:
        group: The ranks.
        device: Device on which the group communicates.
    """

    group: dist.ProcessGroup
    device: torch.device
    _order: tuple[str, ...] | None  # as recorded
    _warned: bool

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self._order, self._warned = None, False

    def compare(self, names: Sequence[str]) -> None:
        """Check that all ranks ran the same units in the same order, and record it. A collective.

        One all-gather of 16 bytes; names are sent only if orders differ.

        Args:
            names: Names of the units, in the order in which they ran on this rank.

        Raises:
            FullshardError: On all ranks, if the orders differ.
        """
        order, size = tuple(names), self.group.size()
        if size > 1 and self._differs(order):
            orders: list[tuple[str, ...]] = [()] * size
            dist.all_gather_object(orders, order, group=self.group)
            members = dist.get_process_group_ranks(self.group)
            found = explain_difference({rank: UnitOrder(o) for rank, o in zip(members, orders, strict=True)})
            assert found is not None, "digests differ but orders do not"
            raise FullshardError(found)
        self._order = order

    def warn_if_changed(self, names: Sequence[str]) -> None:
        """Warn, once, if this rank's order differs from the recorded one. No communication.

        Without a record, ``names`` are recorded.
        """
        order = tuple(names)
        if self._order is None:
            self._order = order
        if self._warned or order == self._order:
            return
        self._warned = True
        before, now = UnitOrder(self._order), UnitOrder(order)
        position = next(i for i in itertools.count() if before.at(i) != now.at(i))
        warnings.warn(
            f"rank {dist.get_rank()} ran its units in another order than in its first forward: at position {position} "
            f"(from 0), {before.at(position)} ran then and {now.at(position)} ran now. That is fine if all ranks did "
            "the same; if not, collectives do not match, and ranks may hang or mix up weights. Units that run out of "
            "order are not prefetched. This warning is shown once",
            UserWarning,
            stacklevel=2,
        )

    def _differs(self, order: tuple[str, ...]) -> bool:
        own = torch.tensor([_digest(order), len(order)], dtype=torch.int64, device=self.device)
        everyone = own.new_empty(2 * self.group.size())
        all_gather_flat(self.group, everyone, own).wait()
        found = everyone.view(-1, 2)
        return bool((found != found[0]).any())


def _digest(names: Sequence[str]) -> int:
    """Return a signed 64-bit hash that is equal in all processes, unlike ``hash``."""
    digest = hashlib.blake2b("\0".join(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


# Watchdogs per group so far. Counted per group, since its ranks create the same watchdogs; see comm/groups.py.
_watches: weakref.WeakKeyDictionary[dist.ProcessGroup, itertools.count[int]] = weakref.WeakKeyDictionary()


class OrderWatchdog:
    """Watchdog for hangs in the first forward: if ranks stall because their orders differ, it aborts and reports that.

    A rank on which no unit starts for a while publishes its execution order in the group's store. The first of these
    ranks compares the orders. If they differ it publishes the failure, and all stalled ranks abort their collectives.
    The group is unusable afterwards. If orders agree so far (a rank may just be slow), nothing happens.

    Create it on all ranks of the group. Use it as follows::

        watch = OrderWatchdog(group, device)      # a root's first forward begins
        try:
            with watch.guard():                # around all of that forward
                ...
                watch.started("blocks.0")      # a unit's forward begins, before anything is waited for
                ...
                watch.completed()              # the forward is over
                check.compare(watch.names)
        finally:
            watch.finished()

    Args:
        group: The ranks.
        device: Device on which they communicate.
        after_s: Seconds without a new unit that count as a stall. None: the environment variable
            ``FULLSHARD_ORDER_TIMEOUT_S``, or 10. 0: never.

    Raises:
        ValueError: If the number of seconds is invalid.
    """

    group: dist.ProcessGroup
    device: torch.device
    after_s: float
    failure: str | None  # error message if the wait was aborted; the same on all ranks
    _names: list[str]
    _complete: bool
    _last: float  # when a unit started last
    _stop: threading.Event
    _thread: threading.Thread | None
    _number: int
    _opened: Store | None
    _ranks: list[int]  # of the group, in order
    _default: Any  # store

    def __init__(self, group: dist.ProcessGroup, device: torch.device, after_s: float | None = None) -> None:
        self.group, self.device = group, device
        self.after_s = _timeout() if after_s is None else _seconds(after_s, "after_s")
        self.failure, self._opened = None, None
        # Looked up here: ranks that are threads have separate default stores, and the watchdog runs in another thread.
        self._ranks, self._default = dist.get_process_group_ranks(group), dist.distributed_c10d._get_default_store()
        self._names, self._complete, self._last = [], False, time.monotonic()
        self._number = next(_watches.setdefault(group, itertools.count()))
        self._stop, self._thread = threading.Event(), None
        if self.after_s > 0 and group.size() > 1:
            self._thread = threading.Thread(target=self._run, name="fullshard order watchdog", daemon=True)
            self._thread.start()

    def started(self, name: str) -> None:
        """Record that the forward of a unit begins. Call it before waiting for its all-gather.

        Prefetched units are not recorded: prefetching is the same on all ranks.
        """
        self._names.append(name)
        self._last = time.monotonic()

    @property
    def names(self) -> tuple[str, ...]:
        """Units that have started, in order."""
        return tuple(self._names)

    def completed(self) -> None:
        """Record that this rank's forward is over. The watchdog continues, since others may wait for this rank."""
        self._complete = True
        self._last = time.monotonic()

    def finished(self) -> None:
        """Stop the thread. May be called again."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * _PATIENCE_S)
        self._thread = None

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Raise the reported failure instead of its symptom: a closed connection or an aborted communicator.

        Raises:
            FullshardError: At the end of the block, if a failure was reported.
        """
        try:
            yield
        except FullshardError:
            raise
        except RuntimeError as error:
            self._fetch_failure()  # another rank may have closed the connection before this one polled
            if self.failure is None:
                raise
            raise FullshardError(self.failure) from error
        if self.failure is not None:
            raise FullshardError(self.failure)

    # ---------------------------------------------------------------- on the thread

    def _run(self) -> None:
        try:
            while not self._stop.wait(min(_POLL_S, self.after_s / 4)):
                if time.monotonic() - self._last >= self.after_s:
                    self._stalled()
                    return
        except RuntimeError as error:  # the store is gone
            _logger.warning("cannot find out whether ranks stall because their orders of units differ: %s", error)

    def _stalled(self) -> None:
        """Publish this rank's order whenever it grows, until a failure is reported or the forward is over."""
        own = str(self.group.rank())
        is_leader = self._store.compare_set("leader", "", own).decode() == own
        published: UnitOrder | None = None
        since: float | None = None  # when a difference was found first
        while True:
            complete = self._complete  # read before the names: the forward continues meanwhile
            order = UnitOrder(self.names, complete)
            if order != published:
                self._store.set(f"order/{own}", json.dumps([order.names, order.complete]))
                published = order
            if is_leader:
                since = self._publish_failure(since)
            self._fetch_failure()
            if self.failure is not None:
                self._abort_wait()
                return
            if self._stop.wait(_POLL_S):
                return

    def _publish_failure(self, since: float | None) -> float | None:
        """Publish a failure if orders differ, once all ranks have published theirs or had time to.

        Returns:
            The time when a difference was found first; None if there is none.
        """
        orders = {}
        for index, rank in enumerate(self._ranks):
            if self._store.check([f"order/{index}"]):
                names, complete = json.loads(self._store.get(f"order/{index}"))
                orders[rank] = UnitOrder(tuple(names), complete)
        found = explain_difference(orders)
        if found is None:
            return None
        now = time.monotonic()
        since = now if since is None else since
        if len(orders) == self.group.size() or now - since >= _PATIENCE_S:
            self._store.set("failure", found)
        return since

    def _abort_wait(self) -> None:
        """Abort the main thread's collective, once the other ranks know why their connections close."""
        _logger.error("%s", self.failure)
        deadline = time.monotonic() + _PATIENCE_S
        aware = self._store.add("aware", 1)
        while aware < self.group.size() and time.monotonic() < deadline:
            time.sleep(_POLL_S / 10)
            aware = self._store.add("aware", 0)
        _abort(self.group, self.device)

    def _fetch_failure(self) -> None:
        """Fetch the failure that another rank has published."""
        with contextlib.suppress(RuntimeError):
            if self.failure is None and self._store.check(["failure"]):
                self.failure = self._store.get("failure").decode()

    @property
    def _store(self) -> Store:
        if self._opened is None:
            # A separate connection: the main thread may be waiting on the default store, which locks it.
            store = self._default.clone() if hasattr(self._default, "clone") else self._default
            ranks = ",".join(str(rank) for rank in self._ranks)
            digest = _digest([self.group.group_name, ranks])
            self._opened = PrefixStore(f"fullshard/order/{digest:x}/{self._number}", store)
        return self._opened


def _abort(group: dist.ProcessGroup, device: torch.device) -> None:
    """Abort all pending collectives of ``group``, from another thread.

    [Note: Aborting gloo collectives]
    Gloo's back end accepts ``abort`` and ``shutdown`` but continues to wait. However, a receive that times out closes
    all connections of its group, and pending operations on them raise. So a receive without a matching send is issued,
    with a timeout of a millisecond. A group may have several sets of connections, selected by tag.
    """
    try:
        backend: Any = group._get_backend(device)
    except RuntimeError:  # a process group written in Python
        with contextlib.suppress(RuntimeError):
            group.abort()
        return
    if backend.name().lower() != "gloo":
        with contextlib.suppress(RuntimeError):
            backend.abort()
        return
    peer = (group.rank() + 1) % group.size()
    for turn in range(4):
        with contextlib.suppress(RuntimeError):
            unanswered = torch.empty(1, dtype=torch.uint8, device="cpu")
            group.recv([unanswered], peer, _UNANSWERED + turn).wait(timedelta(milliseconds=1))


_UNANSWERED = 0x3FFFFF00  # tags that are neither the transport's nor, as far as we know, a user's


def _timeout() -> float:
    return _seconds(
        os.environ.get(TIMEOUT_VARIABLE, _DEFAULT_TIMEOUT_S), f"the environment variable {TIMEOUT_VARIABLE}"
    )


def _seconds(value: str | float, what: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise ValueError(f"{what}: expected a number of seconds, or 0 to disable the watchdog; found {value!r}")
    return seconds
