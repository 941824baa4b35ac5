"""Check that all ranks run their units in the same order: after the first forward, and with a watchdog during it.

Collectives of ranks that run different units do not match: at best they hang, at worst they mix up weights. So the
first forward of a root ends with a comparison of execution orders, and a watchdog thread observes ranks that hang
before they get that far.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fullshard.errors import FullshardError
from fullshard.ranks.agreement import compare, gather_if_different, list_values, raise_on_all
from fullshard.ranks.store import GroupStore, Rendezvous, seconds_from

__all__ = ["END", "TIMEOUT_VARIABLE", "OrderWatchdog", "compare_order", "explain_difference", "warn_of_change"]

END = "(end)"  # follows the names of the units in the execution order of a forward that is over
TIMEOUT_VARIABLE = "FULLSHARD_ORDER_TIMEOUT_S"
_DEFAULT_TIMEOUT_S = 10.0
_POLL_S = 0.5  # poll interval of a stalled rank
_PATIENCE_S = 3.0  # wait for ranks that have not reported their order

_logger = logging.getLogger(__name__)


@contextlib.contextmanager
def compare_order(groups: Sequence[dist.ProcessGroup]) -> Iterator[OrderWatchdog]:
    """Compare the execution order of the forward in the ``with`` block with other ranks', and watch it for hangs.

    Args:
        groups: The groups of a mesh's axes. The first one's ranks communicate in the forward.

    Yields:
        The watchdog, to be told of each unit that starts.

    Raises:
        FullshardError: On all ranks, if they run their units in different orders.
    """
    watch, failure = OrderWatchdog(groups[0]), None
    try:
        yield watch
        watch.started(END)  # the watchdog continues, since others may wait for this rank
        orders = gather_if_different(watch.order, groups[0])
        failure = _failure(orders) if orders else None
    except RuntimeError as error:  # may be a symptom: a closed connection, or an aborted communicator
        text = None if isinstance(error, FullshardError) else watch.reported()
        if text is None:
            raise
        failure = FullshardError(text)
        failure.__cause__ = error
    finally:
        watch.finished()
    if failure is None and watch.failure is not None:  # the symptom went unnoticed, as it may over NCCL
        failure = FullshardError(watch.failure)
    # Ranks of other groups may agree among themselves; they learn of the failure here.
    raise_on_all(failure, groups[1:])
    compare(watch.order, groups[1:], _failure)


def explain_difference(orders: Mapping[int, Sequence[str]]) -> str | None:
    """Return an error message if the units that ran, by global rank, differ; None if they agree as far as known."""
    for position in range(max(map(len, orders.values()), default=0)):
        here = {rank: _describe(order[position]) for rank, order in orders.items() if position < len(order)}
        if len(set(here.values())) > 1:
            return (
                "the ranks ran the model's units in different orders in the first forward, so their collectives do not "
                f"match; the first difference is at position {position} (from 0): {list_values(here)}. Make all "
                "ranks call the same modules in the same order: look for control flow that depends on the rank or on "
                "its data, and call modules that a rank does not need with an input of zeros"
            )
    return None


def warn_of_change(before: Sequence[str], now: Sequence[str]) -> None:
    """Warn that this rank's execution order differs from that of its first forward. No communication."""
    pairs = enumerate(itertools.zip_longest(before, now, fillvalue=END))
    position, (then, instead) = next((position, pair) for position, pair in pairs if pair[0] != pair[1])
    warnings.warn(
        f"rank {dist.get_rank()} ran its units in a different order than in its first forward: at position {position} "
        f"(from 0), {_describe(then)} ran then and {_describe(instead)} ran now. This is fine if all ranks ran the "
        "same order; if not, collectives do not match, and ranks may hang or use wrong weights. Units that run "
        "out of order are not prefetched. This warning is shown once",
        UserWarning,
        stacklevel=2,
    )


def _failure(orders: Mapping[int, Sequence[str]]) -> FullshardError:
    found = explain_difference(orders)
    assert found is not None, "digests differ but orders do not"
    return FullshardError(found)


def _describe(name: str) -> str:
    return "no unit (its forward had ended)" if name == END else repr(name) if name else "the root"


class OrderWatchdog:
    """Watchdog for hangs in the first forward: if ranks stall because their orders differ, it aborts and reports that.

    A rank on which no unit starts for a while reports its execution order to a rendezvous in the group's store. The
    first of these ranks compares the orders. If they differ it proposes the failure, and all stalled ranks abort their
    collectives; the group is unusable afterwards. If orders agree so far (a rank may just be slow), nothing happens.

    Args:
        group: The ranks, all of which create it.

    Raises:
        ValueError: If the environment variable is invalid.
    """

    after_s: float  # without a new unit, which count as a stall; 0: never
    failure: str | None  # error message if the wait was aborted; the same on all ranks
    rendezvous: Rendezvous
    _group: dist.ProcessGroup
    _names: list[str]
    _last: float  # when a unit started last
    _stop: threading.Event
    _thread: threading.Thread | None

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.after_s = seconds_from(TIMEOUT_VARIABLE, _DEFAULT_TIMEOUT_S, allow_zero=True)
        self.failure, self._group = None, group
        self.rendezvous = GroupStore.of(group, "order").next_rendezvous()
        self._names, self._last = [], time.monotonic()
        self._stop, self._thread = threading.Event(), None
        if self.after_s > 0 and group.size() > 1:
            self._thread = threading.Thread(target=self._run, name="fullshard order watchdog", daemon=True)
            self._thread.start()

    def started(self, name: str) -> None:
        """Record that the forward of a unit begins, before waiting for its all-gather."""
        self._names.append(name)
        self._last = time.monotonic()

    @property
    def order(self) -> tuple[str, ...]:
        """Units that have started, in order."""
        return tuple(self._names)

    def finished(self) -> None:
        """Stop the thread. May be called again."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * _PATIENCE_S)
        self._thread = None

    def reported(self) -> str | None:
        """Return the failure; another rank may have closed connections because of it before this one's thread knew."""
        with contextlib.suppress(RuntimeError):
            self.failure = self.failure or self.rendezvous.result()
        return self.failure

    # ---------------------------------------------------------------- on the thread

    def _run(self) -> None:
        """Report this rank's order when it stalls, until a failure is known or the forward is over."""
        known, leads = -1, False  # units in its last report; the first rank that stalls compares
        try:
            while not self._stop.wait(min(_POLL_S, self.after_s / 4)):
                order, stalled_s = self.order, time.monotonic() - self._last - self.after_s
                if len(order) > known and stalled_s >= 0:
                    known, leads = len(order), self.rendezvous.report(order) == 1 or leads
                if leads:
                    orders = self.rendezvous.reports()
                    found = explain_difference(orders)
                    if found is not None and (len(orders) == self._group.size() or stalled_s > _PATIENCE_S):
                        self.rendezvous.propose(found)
                if known >= 0:
                    self.failure = self.rendezvous.result()
                if self.failure is not None:
                    _logger.error("%s", self.failure)
                    self._stop.wait(2 * _POLL_S)  # the other ranks read why, before their connections close
                    _abort(self._group)
                    return
        except RuntimeError as error:  # the store is gone
            _logger.warning("cannot compare the order of units between ranks, which may explain a hang: %s", error)


def _abort(group: dist.ProcessGroup) -> None:
    """Abort all pending collectives of ``group``, from another thread.

    [Note: Aborting gloo collectives]
    Gloo's backend accepts ``abort`` and ``shutdown`` but continues to wait. However, a receive that times out closes
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
