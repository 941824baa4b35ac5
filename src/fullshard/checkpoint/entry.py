"""Entry protection: saves and loads are collective, and begin only when all ranks are there for the same one.

[Note: Entries]
Ranks meet through the key-value store of the process group and not in a collective of its back end: a collective that
a rank never joins ends in a time-out that names nobody, and a broken group. A meeting has a *slot*, a number that each
rank counts for itself. Whoever arrives says what it came for, and counts itself in; the last one decides, and the
others wait for the verdict. Whoever has waited too long decides that the meeting has failed, and says who is missing.
There is one verdict per slot, the first one, and everybody obeys it: also a rank that comes when it is too late. So all
ranks leave a slot with the same result, and are together again at the next.

A rank makes a handful of requests to the store per meeting, however many ranks there are; what the ranks said is read,
by one of them, only when something is wrong. The last rank that leaves a slot removes its keys.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from fullshard import errors
from fullshard.errors import FullshardError

__all__ = ["ENTRY_PATIENCE_VARIABLE", "STEP_PATIENCE_S", "STEP_PATIENCE_VARIABLE", "Entry", "entered", "load_patience"]

T = TypeVar("T")

ENTRY_PATIENCE_VARIABLE = "FULLSHARD_ENTRY_PATIENCE"
STEP_PATIENCE_VARIABLE = "FULLSHARD_STEP_PATIENCE"
_ENTRY_PATIENCE_S = 30.0  # a rank may be late for a good reason: an evaluation, or the end of another write
_LOAD_PATIENCE_S = 120.0
STEP_PATIENCE_S = 3600.0  # inside, ranks have different amounts to read and write
_JUDGE_S = 10.0  # how long one rank may take to find out what the ranks said
_FIRST_POLL_S, _LAST_POLL_S = 0.0005, 0.05
_REQUESTS_PER_S = 20_000  # that a store can serve while all ranks wait
_MAX_PARTS_SHOWN = 12
_YES = 1 << 32  # a rank that says yes counts for that much more
_KEYS = ("name", "differ", "came", "said", "judge", "verdict", "left")

_RAISED: dict[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError}
_RAISED |= {name: getattr(errors, name) for name in errors.__all__}


class _Verdict(NamedTuple):
    """How a meeting went."""

    kind: str  # "met", "missing", or the exception to raise
    text: str = ""
    yes: bool = False  # whether any rank said so
    said: str = ""  # what the first rank had to say
    came: tuple[str, ...] = ()  # if ranks are missing: what the others had come for

    @property
    def error(self) -> Exception | None:
        """What all ranks raise."""
        return None if self.kind == "met" else _RAISED.get(self.kind, FullshardError)(self.text)


class _Slots:
    """The meetings of one group on one channel, as this rank counts them.

    Args:
        group: The ranks.
        store: For this channel alone.
    """

    lock: threading.RLock
    _group: weakref.ref[dist.ProcessGroup]
    _store: Store
    _rank: int
    _size: int
    _next: int

    def __init__(self, group: dist.ProcessGroup, store: Store) -> None:
        self.lock, self._group, self._store = threading.RLock(), weakref.ref(group), store
        self._rank, self._size, self._next = group.rank(), group.size(), 0

    def meet(self, name: str, patience: float, advice: str, *, yes: bool = False, said: str = "") -> _Verdict:
        """Wait until all ranks are here.

        Args:
            name: What for: the same on all ranks, or all raise.
            patience: Seconds to wait for the others.
            advice: What to do if some do not come.
            yes: What this rank says.
            said: Also, if it is the first.

        Raises:
            FullshardError: If a rank did not come, came too late, or for something else.
        """
        late = True
        with self._connected(name):
            while late:
                slot, self._next = self._next, self._next + 1
                closed = self._store.check([f"{slot}/verdict"])
                if said:
                    self._store.set(f"{slot}/said", said)
                self._arrive(slot, name, yes=yes)
                verdict = self._await(slot, name, patience, advice)
                self._leave(slot)
                late = closed and verdict.kind == "missing"
                if late and name in verdict.came:
                    break  # else the others met for something that this rank never came for: now for the next
        if late:
            raise FullshardError(f"{name}: rank {self._here} came when the others had given up: {verdict.text}")
        if verdict.error is not None:
            raise verdict.error
        return verdict

    def refuse(self, name: str, error: BaseException) -> Exception:
        """Have the next meeting end with an error as soon as ranks come to it; this one will not.

        Returns:
            What all ranks raise: this error, or an earlier one.
        """
        kind, words = _in_words(error)
        with self._connected(name):
            slot, self._next = self._next, self._next + 1
            verdict = self._decide(slot, _Verdict(kind, f"{name}: rank {self._here}: {words}"))
            self._leave(slot)
        return verdict.error or FullshardError(f"{name}: rank {self._here}: {words}")

    def forget(self) -> None:
        """Remove what this rank has said."""
        with contextlib.suppress(RuntimeError):
            self._store.delete_key(f"rank/{self._rank}")

    # ---------------------------------------------------------------- one slot

    def _arrive(self, slot: int, name: str, *, yes: bool) -> None:
        store = self._store
        if store.compare_set(f"{slot}/name", "", name).decode() != name:
            store.set(f"{slot}/differ", "1")
        store.set(f"rank/{self._rank}", json.dumps([slot, name]))
        came = store.add(f"{slot}/came", 1 + (_YES if yes else 0))
        if came % _YES != self._size:
            return
        if store.check([f"{slot}/differ"]):
            who = _who_does_what({what: ranks for what, ranks in self._said(slot).items() if what})
            text = f"the ranks came for different things: {who}. Make all ranks call the same, in the same order"
            self._decide(slot, _Verdict("FullshardError", text))
        else:
            said = store.get(f"{slot}/said").decode() if store.check([f"{slot}/said"]) else ""
            self._decide(slot, _Verdict("met", yes=came >= _YES, said=said))

    def _await(self, slot: int, name: str, patience: float, advice: str) -> _Verdict:
        found = self._poll(slot, patience)
        if found is None and self._store.compare_set(f"{slot}/judge", "", str(self._rank)).decode() == str(self._rank):
            said = self._said(slot)
            missing = said.pop("", [])
            if missing:  # else the last one has come just now, and decides
                who = _who_does_what(said) if len(said) > 1 else f"{name}: entered by {_ranks(*said.values())}"
                text = f"{who}, but not by {_ranks(missing)} within {patience:g} s. {advice}"
                return self._decide(slot, _Verdict("missing", text, came=tuple(said)))
        if found is None:
            found = self._poll(slot, _JUDGE_S)
        if found is None:  # whoever was to decide is gone
            text = f"{name}: not entered by all ranks within {patience:g} s. {advice}"
            return self._decide(slot, _Verdict("missing", text, came=(name,)))
        return found

    def _poll(self, slot: int, seconds: float) -> _Verdict | None:
        # Not a wait on the store: that locks it, keeps signals from being handled, and complains where it times out.
        key, deadline, pause = f"{slot}/verdict", time.monotonic() + seconds, _FIRST_POLL_S
        longest = max(_LAST_POLL_S, self._size / _REQUESTS_PER_S)
        while not self._store.check([key]):
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(pause, left))
            pause = min(1.5 * pause, longest)
        return _read(self._store.get(key))

    def _decide(self, slot: int, verdict: _Verdict) -> _Verdict:
        """The verdict, unless there is one: then that."""
        return _read(self._store.compare_set(f"{slot}/verdict", "", json.dumps(verdict)))

    def _said(self, slot: int) -> dict[str, list[int]]:
        """Ranks by what they have come for; those that have not come are under ""."""
        said: dict[str, list[int]] = {}
        for rank in range(self._size):
            key, name = f"rank/{rank}", ""
            if self._store.check([key]):
                last, what = json.loads(self._store.get(key))
                name = what if last == slot else ""
            said.setdefault(name, []).append(self._global(rank))
        return said

    def _leave(self, slot: int) -> None:
        if self._store.add(f"{slot}/left", 1) == self._size:
            for key in _KEYS:
                self._store.delete_key(f"{slot}/{key}")

    @property
    def _here(self) -> int:
        return self._global(self._rank)

    def _global(self, rank: int) -> int:
        group = self._group()
        return rank if group is None else dist.get_global_rank(group, rank)

    @contextlib.contextmanager
    def _connected(self, name: str) -> Iterator[None]:
        try:
            yield
        except dist.DistError as error:
            raise FullshardError(
                f"{name}: rank {self._here} cannot reach the store through which ranks meet; did the process that "
                f"serves it, usually rank 0, end? ({error})"
            ) from error


class Entry:
    """What all ranks of a group are inside of together; see :func:`entered`.

    Args:
        name: What it is, in errors.
        slots: Through which the ranks meet; None: there is one rank.
        rank: Of this process in the group.
    """

    name: str
    rank: int
    _slots: _Slots | None
    _failed: bool  # all ranks know, and leave

    def __init__(self, name: str, slots: _Slots | None = None, rank: int = 0) -> None:
        self.name, self.rank, self._slots, self._failed = name, rank, slots, False

    def together(self, step: str, function: Callable[[], T], *, patience: float | None = None) -> T:
        """Run a step on all ranks and wait until it is done on all. If it fails on one, it fails on all.

        Args:
            step: What it is, the same on all ranks.
            function: What this rank does. No collective in it: others would wait there if it failed here.
            patience: Seconds to wait for other ranks. None: what the environment variable ``FULLSHARD_STEP_PATIENCE``
                says, an hour without it.

        Returns:
            What ``function`` returns here.

        Raises:
            ValueError, TypeError, FullshardError: What some rank's ``function`` raised, with that rank's number; other
                exceptions as FullshardError.
        """
        value = self._attempt(step, function)
        self._meet(step, patience)
        return value

    def any(self, step: str, function: Callable[[], bool]) -> bool:
        """Whether ``function`` returns True on any rank: the same answer on all. Raises as :meth:`together`."""
        value = self._attempt(step, function)
        verdict = self._meet(step, yes=value)
        return value if verdict is None else verdict.yes

    def from_first(self, step: str, function: Callable[[], str]) -> str:
        """What ``function`` returns on the group's first rank, where alone it runs: on all ranks.

        The text travels through the store, so it has to be small. Raises as :meth:`together`.
        """
        value = self._attempt(step, function) if self.rank == 0 else ""
        verdict = self._meet(step, said=value)
        return value if verdict is None else verdict.said

    def _attempt(self, step: str, function: Callable[[], T]) -> T:
        try:
            return function()
        except Exception as error:
            self._failed = True
            if self._slots is not None:
                raise self._slots.refuse(f"{self.name}, {step}", error) from error
            if type(error).__name__ in _RAISED:
                raise
            raise FullshardError(f"{self.name}, {step}: {_in_words(error)[1]}") from error

    def _meet(self, step: str, patience: float | None = None, *, yes: bool = False, said: str = "") -> _Verdict | None:
        if self._slots is None:
            return None
        advice = (
            "If they are at work, give them longer with the environment variable "
            f"{STEP_PATIENCE_VARIABLE} (seconds); if they hang or have ended, their own output says why"
        )
        seconds = _patience(patience, STEP_PATIENCE_VARIABLE, STEP_PATIENCE_S)
        try:
            return self._slots.meet(f"{self.name}, {step}", seconds, advice, yes=yes, said=said)
        except BaseException as error:
            self._failed = isinstance(error, Exception)
            raise

    def leave(self, error: BaseException | None) -> None:
        """All ranks are done, or this one cannot go on."""
        if self._slots is None or self._failed:
            return
        if error is None:
            self._meet("done")
        else:
            self._slots.refuse(self.name, error)


_lock = threading.Lock()
_known: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, _Slots]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def entered(
    name: str, group: dist.ProcessGroup | None = None, *, channel: str = "", patience: float | None = None
) -> Iterator[Entry]:
    """Enter something that all ranks of a group do together, and leave it together.

    On entry, and on exit, ranks wait for each other, without a collective of the back end. If one of them leaves with
    an exception, the others get it where they come to the next step of the :class:`Entry`, or leave::

        with entered(f"save {path}", group) as entry:
            plan = entry.together("plan", make_plan)    # fails on all ranks if it fails on one
            entry.together("write", lambda: write(plan))

    Args:
        name: What it is and with what, such as "save /runs/7": the same on all ranks.
        group: The ranks. None: the default group, or this process alone if there is none.
        channel: Keeps apart what runs at the same time, such as saves in the background, which other threads do.
        patience: Seconds that a rank waits for the others to enter. None: what the environment variable
            ``FULLSHARD_ENTRY_PATIENCE`` says, 30 without it.

    Raises:
        FullshardError: On all ranks that have entered, if others have not in time (it names both); on those others
            when they come; on all, if they have entered different things.
        ValueError: If this process is not in the group, or the number of seconds is none.
    """
    seconds = _patience(patience, ENTRY_PATIENCE_VARIABLE, _ENTRY_PATIENCE_S)
    if group is None and not (dist.is_available() and dist.is_initialized()):
        yield Entry(name)
        return
    if dist.get_rank(group) < 0:
        raise ValueError(f"{name}: rank {dist.get_rank()} is not in the process group; call it on its ranks only")
    found = dist.group.WORLD if group is None else group
    assert found is not None
    if found.size() == 1:
        yield Entry(name)
        return
    slots = _slots_of(found, channel)
    with slots.lock:
        entry = Entry(name, slots, found.rank())
        advice = (
            "All ranks have to call it, in the same order; look for control flow that depends on the rank, and for "
            "ranks that have failed. If they are only slow, have the others wait longer with the environment variable "
            f"{ENTRY_PATIENCE_VARIABLE} (seconds)"
        )
        try:
            slots.meet(name, seconds, advice)
            try:
                yield entry
            except BaseException as error:
                entry.leave(error)
                raise
            entry.leave(None)
        finally:
            slots.forget()


def load_patience() -> float:
    """Seconds to wait for others to load: ranks that start take more different times than ranks that run."""
    return _patience(None, ENTRY_PATIENCE_VARIABLE, _LOAD_PATIENCE_S)


def _slots_of(group: dist.ProcessGroup, channel: str) -> _Slots:
    with _lock:
        known = _known.setdefault(group, {})
        if channel not in known:
            store = dist.distributed_c10d._get_default_store()
            if hasattr(store, "clone"):  # a connection of its own: others are locked while somebody waits on them
                store = store.clone()
            ranks = ",".join(str(rank) for rank in dist.get_process_group_ranks(group))
            digest = hashlib.blake2b(f"{group.group_name}\0{ranks}".encode(), digest_size=8).hexdigest()
            known[channel] = _Slots(group, PrefixStore(f"fullshard/entry/{digest}/{channel}", store))
        return known[channel]


def _in_words(error: BaseException) -> tuple[str, str]:
    """Which exception to raise elsewhere, and what it says."""
    kind = type(error).__name__
    return (kind, str(error)) if kind in _RAISED else (FullshardError.__name__, f"{kind}: {error}")


def _read(verdict: bytes) -> _Verdict:
    kind, text, yes, said, came = json.loads(verdict)
    return _Verdict(kind, text, yes, said, tuple(came))


def _who_does_what(said: Mapping[str, Sequence[int]]) -> str:
    parts = [f"{name!r} on {_ranks(ranks)}" for name, ranks in itertools.islice(said.items(), _MAX_PARTS_SHOWN)]
    more = len(said) - len(parts)
    return "; ".join(parts) + (f"; and {more} others on other ranks" if more else "")


def _ranks(ranks: Sequence[int]) -> str:
    """Such as "ranks 0, 3-7": no more than a few."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    parts = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}-{b}" for a, b in spans[:_MAX_PARTS_SHOWN]]
    more = sum(b - a + 1 for a, b in spans[_MAX_PARTS_SHOWN:])
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(parts) + (f" and {more} more" if more else "")


def _patience(seconds: float | None, variable: str, otherwise: float) -> float:
    value = os.environ.get(variable, otherwise) if seconds is None else seconds
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        what = f"the environment variable {variable}" if seconds is None else "patience"
        raise ValueError(f"{what}: expected a positive number of seconds, found {value!r}")
    return number
