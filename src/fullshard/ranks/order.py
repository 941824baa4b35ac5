"""Check that all ranks run their units in the same order: after the first forward, and with a watchdog during it.

Collectives of ranks that run different units do not match: at best they hang, at worst they mix up weights. So the
first forward of a root ends with a comparison of execution orders. Ranks that hang do not get that far, so a watchdog
thread observes them meanwhile (:class:`OrderWatchdog`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fullshard.errors import FullshardError
from fullshard.ranks.agreement import compare, gather_if_different, list_values, raise_on_all
from fullshard.ranks.store import GroupStore, seconds_from

__all__ = ["END", "TIMEOUT_VARIABLE", "OrderWatchdog", "compare_order", "explain_difference", "warn_of_change"]

END = "(end)"  # follows the names of the units in the execution order of a forward that is over
TIMEOUT_VARIABLE = "FULLSHARD_ORDER_TIMEOUT_S"
_DEFAULT_TIMEOUT_S = 10.0
_POLL_S = 0.5  # poll interval of a stalled rank
_PATIENCE_S = 3.0  # wait for ranks that have not published their order

_logger = logging.getLogger(__name__)


@contextlib.contextmanager
def compare_order(groups: Sequence[dist.ProcessGroup]) -> Iterator[OrderWatchdog]:
    """Compare the execution order of the forward in the ``with`` block with other ranks', and watch it for hangs.

    Args:
        groups: The groups of a mesh's axes. The first one's ranks communicate in the forward.

    Yields:
        The watchdog; its :attr:`~OrderWatchdog.started` is to be called for each unit.

    Raises:
        FullshardError: On all ranks, if they run their units in different orders.
    """
    watch, failure = OrderWatchdog(groups[0]), None
    try:
        with watch.guard():
            yield watch
            watch.completed()
            orders = gather_if_different(watch.order, groups[0])
            failure = _failure(orders) if orders else None
    except FullshardError as error:
        if watch.failure is None:
            raise
        failure = error
    finally:
        watch.finished()
    # Ranks of other groups may agree among themselves; they learn of the failure here.
    raise_on_all(failure, groups[1:])
    compare(watch.order, groups[1:], _failure)


def explain_difference(orders: Mapping[int, Sequence[str]]) -> str | None:
    """Return an error message if ranks ran units in different orders; None if they agree as far as they are known.

    Args:
        orders: Names of the units that ran, by global rank; with :data:`END` if the forward is over.
    """
    for position in range(max(map(len, orders.values()), default=0)):
        ranks: dict[str, list[int]] = {}
        for rank, order in sorted(orders.items()):
            if position < len(order):
                ranks.setdefault(_describe(order[position]), []).append(rank)
        if len(ranks) > 1:
            return (
                "the ranks ran the model's units in different orders in the first forward, so their collectives do not "
                f"match; the first difference is at position {position} (from 0): {list_values(ranks)}. Make all "
                "ranks call the same modules in the same order: look for control flow that depends on the rank or on "
                "its data, and call modules that a rank does not need with an input of zeros"
            )
    return None


def warn_of_change(before: Sequence[str], now: Sequence[str]) -> None:
    """Warn that this rank's execution order differs from that of its first forward. No communication."""
    pairs = enumerate(itertools.zip_longest(before, now, fillvalue=END))
    position, (then, instead) = next((position, pair) for position, pair in pairs if pair[0] != pair[1])
    warnings.warn(
        f"rank {dist.get_rank()} ran its units in another order than in its first forward: at position {position} "
        f"(from 0), {_describe(then)} ran then and {_describe(instead)} ran now. That is fine if all ranks did "
        "the same; if not, collectives do not match, and ranks may hang or mix up weights. Units that run out of "
        "order are not prefetched. This warning is shown once",
        UserWarning,
        stacklevel=2,
    )


def _failure(orders: Mapping[int, Sequence[str]]) -> FullshardError:
    found = explain_difference(orders)
    assert found is not None, "digests differ but orders do not"
    return FullshardError(found)


def _describe(name: str) -> str:
    return "nothing, its forward was over," if name == END else repr(name) if name else "the root"


# Watchdogs per group so far. Counted per group, since its ranks create the same watchdogs; see comm/groups.py.
_watches: weakref.WeakKeyDictionary[dist.ProcessGroup, itertools.count[int]] = weakref.WeakKeyDictionary()


class OrderWatchdog:
    """Watchdog for hangs in the first forward: if ranks stall because their orders differ, it aborts and reports that.

    A rank on which no unit starts for a while posts its execution order in the group's store. The first of these
    ranks compares the orders. If they differ it publishes the failure, and all stalled ranks abort their collectives.
    The group is unusable afterwards. If orders agree so far (a rank may just be slow), nothing happens.

    Create it on all ranks of the group.

    Args:
        group: The ranks.
        after_s: Seconds without a new unit that count as a stall, unless the environment variable
            ``FULLSHARD_ORDER_TIMEOUT_S`` is set. 0: never.

    Raises:
        ValueError: If the environment variable is invalid.
    """

    group: dist.ProcessGroup
    after_s: float
    failure: str | None  # error message if the wait was aborted; the same on all ranks
    store: GroupStore
    _names: list[str]
    _last: float  # when a unit started last
    _stop: threading.Event
    _thread: threading.Thread | None

    def __init__(self, group: dist.ProcessGroup, after_s: float = _DEFAULT_TIMEOUT_S) -> None:
        self.group, self.failure = group, None
        self.after_s = seconds_from(TIMEOUT_VARIABLE, after_s, allow_zero=True)
        self.store = GroupStore(group, f"order/{next(_watches.setdefault(group, itertools.count()))}")
        self._names, self._last = [], time.monotonic()
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
    def order(self) -> tuple[str, ...]:
        """Units that have started, in order."""
        return tuple(self._names)

    def completed(self) -> None:
        """Record that this rank's forward is over. The watchdog continues, since others may wait for this rank."""
        self.started(END)

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
            with contextlib.suppress(RuntimeError):  # another rank may have closed the connection before this one knew
                self.failure = self.failure or self.store.decision("failure")
            if self.failure is None:
                raise
            raise FullshardError(self.failure) from error
        if self.failure is not None:
            raise FullshardError(self.failure)

    # ---------------------------------------------------------------- on the thread

    def _run(self) -> None:
        """Post this rank's order once it stalls, until a failure is reported or the forward is over."""
        stalled = leads = False
        try:
            while not self._stop.wait(min(_POLL_S, self.after_s / 4)):
                if not stalled:
                    stalled = time.monotonic() - self._last >= self.after_s
                    leads = stalled and self.store.decide("leader", self.store.rank) == self.store.rank
                    continue
                self.store.post(self._names)
                if leads:
                    self._publish_difference()
                self.failure = self.store.decision("failure")
                if self.failure is not None:
                    _logger.error("%s", self.failure)
                    self._wait_until_known()
                    _abort(self.group)
                    return
            if stalled:
                self.store.clear(*["leader"] if leads else [])
        except RuntimeError as error:  # the store is gone
            _logger.warning("cannot find out whether ranks stall because their orders of units differ: %s", error)

    def _publish_difference(self) -> None:
        """Publish a failure if orders differ, once all ranks have posted theirs or had time to."""
        deadline = time.monotonic() + _PATIENCE_S
        while (found := explain_difference(orders := self.store.posted())) is not None:
            if len(orders) == self.group.size() or time.monotonic() > deadline:
                self.store.decide("failure", found)
                return
            if self._stop.wait(_POLL_S):
                return
            self.store.post(self._names)

    def _wait_until_known(self) -> None:
        """Wait until the other ranks know why their connections close."""
        deadline = time.monotonic() + _PATIENCE_S
        known = self.store.keys.add("known", 1)
        while known < self.group.size() and time.monotonic() < deadline:
            time.sleep(_POLL_S / 10)
            known = self.store.keys.add("known", 0)


def _abort(group: dist.ProcessGroup) -> None:
    """Abort all pending collectives of ``group``, from another thread.

    [Note: Aborting gloo collectives]
    Gloo's back end accepts ``abort`` and ``shutdown`` but continues to wait. However, a receive that times out closes
    all connections of its group, and pending operations on them raise. So a receive without a matching send is issued,
    with a timeout of a millisecond. A group may have several sets of connections, selected by tag.
    """
    devices = group._device_types
    if not devices:  # a process group written in Python
        with contextlib.suppress(RuntimeError):
            group.abort()
    for device in devices:
        backend: Any = group._get_backend(device)
        if backend.name().lower() != "gloo":
            with contextlib.suppress(RuntimeError):
                backend.abort()
            continue
        peer = (group.rank() + 1) % group.size()
        for turn in range(4):
            with contextlib.suppress(RuntimeError):
                unanswered = torch.empty(1, dtype=torch.uint8, device="cpu")
                group.recv([unanswered], peer, _UNANSWERED + turn).wait(timedelta(milliseconds=1))


_UNANSWERED = 0x3FFFFF00  # tags that are neither the transport's nor, as far as we know, a user's
