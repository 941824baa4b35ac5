"""Whether all ranks run their units in the same order: checked after the first forward, and watched while it runs.

Collectives of ranks that run different units do not match: at best they never end, at worst they mix up weights.
So the first forward of a root ends with a comparison of what ran (:class:`OrderCheck`). Ranks that wait for each
other do not get that far, so a thread looks after them meanwhile (:class:`OrderWatch`).
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

from fullshard.errors import FullshardError
from fullshard.transport.python_group import all_gather_flat

__all__ = ["TIMEOUT_VARIABLE", "OrderCheck", "OrderWatch", "UnitOrder", "explain_difference"]

TIMEOUT_VARIABLE = "FULLSHARD_ORDER_TIMEOUT_S"
_DEFAULT_TIMEOUT_S = 10.0
_POLL_S = 0.5  # how often a stalled rank looks at what the others say
_PATIENCE_S = 3.0  # how long a difference waits for the ranks that have not said anything yet
_MAX_RANKS_SHOWN = 8

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class UnitOrder:
    """What one rank ran.

    Args:
        names: Of the units, in the order in which they ran.
        complete: Whether that is the whole forward; if not, more may come.
    """

    names: tuple[str, ...]
    complete: bool = True

    def at(self, position: int) -> str | None:
        """What ran at ``position``, in words; None if that is not known yet."""
        if position < len(self.names):
            return repr(self.names[position]) if self.names[position] else "the root"
        return "nothing, its forward was over," if self.complete else None


def explain_difference(orders: Mapping[int, UnitOrder]) -> str | None:
    """What to tell users whose ranks ran units in different orders; None if the orders agree as far as they are known.

    Args:
        orders: By global rank.
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
    """Units and the ranks that ran them: of all ranks, no more than a few."""
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
    """Compares the ranks' orders after the first forward; later, this rank's with the one it had then.

    Args:
        group: The ranks.
        device: Where the group communicates.
    """

    group: dist.ProcessGroup
    device: torch.device
    _order: tuple[str, ...] | None  # as recorded
    _warned: bool

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self._order, self._warned = None, False

    def compare(self, names: Sequence[str]) -> None:
        """Have all ranks make sure that they ran the same units in the same order, and record it. A collective.

        One all-gather of 16 bytes; only if something differs do the names themselves travel.

        Args:
            names: Of the units, in the order in which they ran on this rank.

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

    def note(self, names: Sequence[str]) -> None:
        """Warn, once, if this rank's order is no longer the recorded one. No communication.

        Without a record, ``names`` become it.
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
            "the same; if not, collectives do not match, and ranks may hang or mix up weights. Units that come out "
            "of order are not gathered ahead. This is said once",
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
    """A signed number of 64 bits that is the same in every process, as ``hash`` is not."""
    digest = hashlib.blake2b("\0".join(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


# Watches per group so far. Counted per group, since ranks make the same watches on it; see transport/groups.py.
_watches: weakref.WeakKeyDictionary[dist.ProcessGroup, itertools.count[int]] = weakref.WeakKeyDictionary()


class OrderWatch:
    """Finds out why ranks stall in their first forward, if they do because their orders differ, and ends the wait.

    A rank on which no unit starts for a while publishes in the group's store what it has run. One of those ranks, the
    first, compares. If orders differ it publishes the verdict, and all ranks that stall break off what they wait for.
    The group is unusable afterwards. If orders agree so far (a rank may just be slow), nothing happens.

    Make it on all ranks of the group. Use it as follows::

        watch = OrderWatch(group, device)      # a root's first forward begins
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
        device: Where they communicate.
        after_s: Seconds without a new unit that count as a stall. None: what the environment variable
            ``FULLSHARD_ORDER_TIMEOUT_S`` says, 10 without it. 0: never.

    Raises:
        ValueError: The number of seconds is not one, or is negative.
    """

    group: dist.ProcessGroup
    device: torch.device
    after_s: float
    verdict: str | None  # why the wait was broken off; the same on all ranks
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
        self.verdict, self._opened = None, None
        # Looked up here: ranks that are threads have a default store each, and the watch is a thread of its own.
        self._ranks, self._default = dist.get_process_group_ranks(group), dist.distributed_c10d._get_default_store()
        self._names, self._complete, self._last = [], False, time.monotonic()
        self._number = next(_watches.setdefault(group, itertools.count()))
        self._stop, self._thread = threading.Event(), None
        if self.after_s > 0 and group.size() > 1:
            self._thread = threading.Thread(target=self._run, name="fullshard order watch", daemon=True)
            self._thread.start()

    def started(self, name: str) -> None:
        """The forward of a unit called ``name`` begins. Call this before waiting for its gather.

        Not for what is gathered ahead: that is a guess, and the same on all ranks.
        """
        self._names.append(name)
        self._last = time.monotonic()

    @property
    def names(self) -> tuple[str, ...]:
        """The units that have started, in order: what to compare at the end."""
        return tuple(self._names)

    def completed(self) -> None:
        """This rank's forward is over. The watch goes on, for others may be waiting for this rank."""
        self._complete = True
        self._last = time.monotonic()

    def finished(self) -> None:
        """End the thread. May be called again."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * _PATIENCE_S)
        self._thread = None

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Raise the verdict instead of what it looks like: a closed connection, an aborted communicator, or nothing.

        Raises:
            FullshardError: At the end of the block, if there is a verdict.
        """
        try:
            yield
        except FullshardError:
            raise
        except RuntimeError as error:
            self._look_up()  # another rank may have closed the connection before this one looked
            if self.verdict is None:
                raise
            raise FullshardError(self.verdict) from error
        if self.verdict is not None:
            raise FullshardError(self.verdict)

    # ---------------------------------------------------------------- on the thread

    def _run(self) -> None:
        try:
            while not self._stop.wait(min(_POLL_S, self.after_s / 4)):
                if time.monotonic() - self._last >= self.after_s:
                    self._stalled()
                    return
        except RuntimeError as error:  # no store to talk through
            _logger.warning("cannot find out whether ranks stall because their orders of units differ: %s", error)

    def _stalled(self) -> None:
        """Say what ran here, as long as that grows, until there is a verdict or the forward is over."""
        own = str(self.group.rank())
        judges = self._store.compare_set("judge", "", own).decode() == own
        said: UnitOrder | None = None
        since: float | None = None  # when a difference was found
        while True:
            complete = self._complete  # before the names: the forward goes on meanwhile
            order = UnitOrder(self.names, complete)
            if order != said:
                self._store.set(f"order/{own}", json.dumps([order.names, order.complete]))
                said = order
            if judges:
                since = self._judge(since)
            self._look_up()
            if self.verdict is not None:
                self._break_off()
                return
            if self._stop.wait(_POLL_S):
                return

    def _judge(self, since: float | None) -> float | None:
        """Publish a verdict on what the ranks have said, once all have or the others had time to.

        Returns:
            When a difference was found first; None if there is none.
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
            self._store.set("verdict", found)
        return since

    def _break_off(self) -> None:
        """End what the main thread waits for, once the others know why their connections close."""
        _logger.error("%s", self.verdict)
        deadline = time.monotonic() + _PATIENCE_S
        aware = self._store.add("aware", 1)
        while aware < self.group.size() and time.monotonic() < deadline:
            time.sleep(_POLL_S / 10)
            aware = self._store.add("aware", 0)
        _abort(self.group, self.device)

    def _look_up(self) -> None:
        """Take over the verdict if there is one."""
        with contextlib.suppress(RuntimeError):
            if self.verdict is None and self._store.check(["verdict"]):
                self.verdict = self._store.get("verdict").decode()

    @property
    def _store(self) -> Store:
        if self._opened is None:
            # A connection of its own: the main thread may be waiting on the default one, which it locks.
            store = self._default.clone() if hasattr(self._default, "clone") else self._default
            ranks = ",".join(str(rank) for rank in self._ranks)
            digest = _digest([self.group.group_name, ranks])
            self._opened = PrefixStore(f"fullshard/order/{digest:x}/{self._number}", store)
        return self._opened


def _abort(group: dist.ProcessGroup, device: torch.device) -> None:
    """Have everything that waits on ``group`` raise, from another thread.

    [Note: Breaking off a wait over gloo]
    Gloo's back end takes ``abort`` and ``shutdown`` and goes on waiting. But a receive that times out closes all
    connections of its group, and whatever waits for them raises. So one is issued that nobody will answer, and given a
    millisecond. A group may have several sets of connections, which take turns by tag.
    """
    try:
        backend: Any = group._get_backend(device)
    except RuntimeError:  # written in Python
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
        raise ValueError(f"{what}: expected a number of seconds, 0 to switch the watch off; got {value!r}")
    return seconds
