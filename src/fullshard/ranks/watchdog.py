"""A thread that finds out why ranks are stuck, and ends it with the same error on all of them.

[Note: The watchdog]
A training step needs no communication for it. The thread wakes once a second, writes what this rank is doing to the
store of the process groups, and looks there for news. A rank whose training thread has waited for a collective for a
few seconds raises an *alarm*. All ranks then write a report: their last launches, and what they are doing. Ranks that
are stuck, at most a few of them, compare the reports (see [Note: Why ranks are stuck]). If ranks cannot go on, one of
them proposes the *failure*, which is the same for all. Every rank then aborts its collectives, so that what waits for
them raises, and the training thread raises the failure instead of the error of the back end, or at its next collective.

It ends a run only on what it knows. A rank that gives no sign of life is looked for: any rank on its machine sees
whether its process still holds its lock. If not, the rank is lost; if it does, as in a function that holds Python's own
lock, it is slow. Where nobody can look, as after a network has failed, or if the process is stopped, it is waited for,
for some minutes. Time is measured by the clock of the rank that reads.

Ranks may also launch different collectives that match by their sizes, or cut parameters differently, so that none is
stuck and results are wrong. So signs of life have digests of the launches, which are compared, and once more when
processes end. They also have the number of optimizer steps of units that communicate in the group: where it differs, as
if a rank is a microbatch ahead, shards of different steps are gathered into one parameter, or gradients of different
steps are added.

Requests to a store may block, if its process is stopped or cannot be reached. A second thread, which needs no store,
tells about that.

On accelerators the host does not wait for collectives. There a rank is stuck if it launches nothing while collectives
that it has launched are unfinished.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import linecache
import logging
import os
import pickle
import re
import sys
import sysconfig
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from fullshard.errors import FullshardError
from fullshard.memory import communicates
from fullshard.progress import PROGRESS, LaunchLog
from fullshard.ranks.agreement import digest_of
from fullshard.ranks.liveness import GONE, RUNS, STOPPED, hold_lock, locks_seen, release_lock, state_of
from fullshard.ranks.store import prefix_of, read, seconds_from
from fullshard.ranks.verdict import OURS, GroupReport, Report, Verdict, explain_units, judge

__all__ = ["LOST_VARIABLE", "TIMEOUT_VARIABLE", "Watchdog", "watch"]

TIMEOUT_VARIABLE = "FULLSHARD_WATCHDOG_S"
LOST_VARIABLE = "FULLSHARD_WATCHDOG_LOST_S"
_STUCK_S = 3.0  # in a collective
# That a rank, or the store, may give no sign of life while others are stuck. TCP sends again after pauses that double:
# a link that was down for 120 s answers after 121 s, 205 s or, where messages take 35 ms, 241 s.
_LOST_S = 270.0
_BROKEN_S = 60.0  # the same, once a connection has failed, so that nobody can go on in any case
_ALARM_S = 8.0  # and three times as long as a rank is stuck before
_SURE_S = 5.0  # that ranks wait for each other, or for a network that has failed
_QUIET_S = 3.0  # without a sign of life, until its process is looked for
_POLL_S = 1.0
_REQUESTS_PER_S = 2_000  # to the store while nobody is stuck
_JUDGES = 8  # ranks that compare reports, so that it does not matter if some of them are lost too
_WARN_AGAIN_S = 60.0
_BEATS_PER_DIGEST = 5
_DIGESTS_SHOWN = 4
_UNITS_REPORTED = 1000
_PARAMETERS_REPORTED = 200  # of a unit
_COLLECTIVES_REPORTED = 64  # of a group
_RANKS_COMPARED = 64  # as a process ends

_PACKAGE = str(Path(__file__).resolve().parent.parent)
_TORCH = str(Path(torch.__file__).resolve().parent)
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_TRANSPORT = str(Path("fullshard", "comm", "base.py"))
_WAITING_FILES = ("distributed_c10d.py", "_functional_collectives.py", str(Path("ranks", "agreement.py")))

_ENDS = "the watchdog ended this run, because ranks cannot go on: "
_SUSPECTED = ("calls", "deadlock", "broken")  # if they last
_OPERATIONS = str(Path("torch", "_ops.py"))
_WRAPPERS = ("_no_grad_wrapper", "wrapper", "decorate_context", "_fn", "inner", "__call__", "apply")

_logger = logging.getLogger(__name__)
_lock = threading.Lock()
_generations = itertools.count()  # of default process groups in this process: their stores may be the same
_refused: weakref.ref[dist.ProcessGroup] | None = None  # a world whose watchdog could not be started


def watch() -> None:
    """Start the watchdog of the default process group, unless it has one, it is disabled, or nothing is to be watched.

    One that has ended itself is not replaced: ranks count them, and would look for each other in different places.
    """
    with _lock:  # threads that save may be here, too
        _watch()


def _watch() -> None:
    global _refused
    current: Watchdog | None = PROGRESS.watchdog
    if current is not None and current.watches(dist.group.WORLD):
        if not PROGRESS.threads:
            current.watch_thread()
        return
    if current is not None:
        current.close()
        PROGRESS.forget_groups(lambda group: group in dist.distributed_c10d._world.pg_map)
    PROGRESS.watchdog = None
    world = dist.group.WORLD
    stuck_s = seconds_from(TIMEOUT_VARIABLE, _STUCK_S, allow_zero=True)
    lost_s = seconds_from(LOST_VARIABLE, _LOST_S)
    if world is None or world.size() == 1 or not world._device_types or not stuck_s or _is_fake(world):
        return
    if _refused is not None and _refused() is world:
        return
    try:
        watchdog = Watchdog(world, stuck_s, lost_s)
        watchdog.start()
    except (RuntimeError, OSError) as error:  # of a store that cannot be used by a thread
        _refused = weakref.ref(world)
        _logger.warning("rank %d has no watchdog: %s", world.rank(), error)
        return
    PROGRESS.watchdog = watchdog


class Watchdog:
    """The watchdog of this process. See [Note: The watchdog].

    Args:
        world: The default process group.
        stuck_s: Seconds in a collective after which ranks compare what they do.
        lost_s: Seconds without a sign of life after which a rank is lost whose process nobody can look for.
    """

    stuck_s: float
    lost_s: float
    failed: threading.Event  # PROGRESS.failure is set
    _world: dist.ProcessGroup
    _keys: Store  # on a separate connection: a store is locked while a thread waits on it
    _has_server: bool  # the store is that of a server; others write to a file, which signs of life would fill
    _rank: int
    _process: int  # this one
    _lock: str  # that it holds
    _training: int  # the thread that trains
    _poll_s: float
    _beat: int = 0  # signs of life so far
    _broken: tuple[str, float] | None = None  # the error of a collective, and since when
    _idle: tuple[int, str, float]  # launches, place and since when nothing has changed
    _alarm: tuple[int, float] = (0, 0.0)  # its number, and when this rank has seen it first
    _judges: bool = False  # this rank compares the reports of the alarm
    _beats: dict[int, tuple[int, float]]  # of other ranks: the last one, and when this rank has seen it first
    _mismatch: str = ""  # of launches, though nobody may be stuck; a kind of [Note: Why ranks are stuck]
    _looked: float  # when the thread looked last
    _has_ended: bool = False  # this rank has said its last word
    _suspected: tuple[str, float] = ("", 0.0)  # a deadlock or a broken network, and since when: it counts if it lasts
    _warned: tuple[str, float] = ("", 0.0)  # the last warning, and when
    _compared: Counter[str]  # roots with the same units, by group
    _stop: threading.Event
    _threads: list[threading.Thread]

    def __init__(self, world: dist.ProcessGroup, stuck_s: float, lost_s: float) -> None:
        self.stuck_s, self.lost_s, self.failed = stuck_s, lost_s, threading.Event()
        self._world, self._rank = world, world.rank()
        store: Any = dist.distributed_c10d._get_default_store()
        self._keys = PrefixStore(prefix_of(world, f"watchdog/{next(_generations)}"), store.clone())
        self._has_server = _has_server(store)
        self._process, self._lock, self._training = os.getpid(), hold_lock(), threading.get_ident()
        self._poll_s = max(min(_POLL_S, stuck_s / 4), world.size() / _REQUESTS_PER_S)
        self._looked, self._stop = time.monotonic(), threading.Event()
        self._idle, self._beats, self._compared = (0, "", self._looked), {}, Counter()
        self._threads = [
            threading.Thread(target=target, name=f"fullshard {name}", daemon=True)
            for target, name in ((self._run, "watchdog"), (self._watch_store, "watch on the store"))
        ]

    def start(self) -> None:
        """Start the thread. It ends with the process group, or with the process."""
        self._write_beat()
        for thread in self._threads:
            thread.start()
        atexit.register(self._exit)

    def close(self) -> None:
        """End the thread."""
        self._join()
        release_lock(self._lock)
        atexit.unregister(self._exit)

    def watches(self, world: dist.ProcessGroup | None) -> bool:
        """Return True if this is the watchdog of ``world``, though it may have ended."""
        return world is self._world

    def watch_thread(self) -> None:
        """Watch the thread that calls this."""
        self._training = threading.get_ident()

    def watches_thread(self) -> bool:
        """Return True if the thread that calls this is watched."""
        return self._training == threading.get_ident() and not self._stop.is_set()

    def explained(self, error: RuntimeError) -> RuntimeError:
        """Return the error to raise for one of collectives: the failure, or ``error`` if none is found in time.

        Connections that another rank closes are noticed before the reason is known, so this waits for it.
        """
        if isinstance(error, FullshardError):
            return error
        if not self.failed.is_set() and not self._stop.is_set() and _is_of_back_end(error):
            self._broken = _short(error), time.monotonic()
            limit = time.monotonic() + self.stuck_s + 4 * self._poll_s
            limit += max(min(self.lost_s, _BROKEN_S), _QUIET_S + _SURE_S)
            while not (PROGRESS.ends or self._stop.is_set()) and time.monotonic() < limit:
                if self.failed.wait(0.1):  # signals are handled in between
                    break
        self._broken = None  # if it is handled, this rank goes on
        return error if PROGRESS.failure is None else FullshardError(PROGRESS.failure)

    def compare_units(self, group: dist.ProcessGroup, units: Mapping[str, str]) -> None:
        """Compare the parameters of units with those of the rank that comes here first, before the first launch.

        Args:
            group: The ranks that have to have the same.
            units: By name, a line for each parameter.

        Raises:
            FullshardError: On all ranks of the group, though on the others only when they wait for this one.
        """
        log, store = PROGRESS.log_of(group), self._keys
        names = f"{log.name}/{digest_of(sorted(units)).hex()}"
        self._compared[names] += 1
        key, text = f"units/{names}/{self._compared[names]}", json.dumps(units)
        own = f"{digest_of(text).hex()} {self._rank}"
        try:
            first = store.compare_set(key, "", own).decode()
            if first == own:
                store.set(f"{key}/text", text)
            if first.split()[0] == own.split()[0]:
                return
            reason = explain_units({int(first.split()[1]): json.loads(store.get(f"{key}/text")), self._rank: units})
            store.compare_set("failure", "", json.dumps({"message": reason, "ranks": log.ranks, "kind": "units"}))
        except (dist.DistError, OSError) as error:
            _logger.warning("rank %d has not compared its parameters with other ranks': %s", self._rank, error)
            return
        raise FullshardError(reason)

    # ---------------------------------------------------------------- on the threads

    def _run(self) -> None:
        why = ""
        while not self._stop.wait(self._poll_s):
            if dist.group.WORLD is not self._world:
                found: Any = sys._current_exceptions().get(self._training)  # as in a finally clause
                error = found[1] if isinstance(found, tuple) else found
                self._say_last_word(None if error is None else f"{type(error).__name__}: {error}")
                break
            try:
                self._look()
            except (dist.DistError, OSError) as error:
                if dist.group.WORLD is self._world and self._since_stuck() is not None:
                    self._fail(
                        _ENDS + "the store of the process groups is gone while this rank waits for collectives; the "
                        f"process that has it, rank 0 or the launcher, has probably ended ({error})"
                    )
                break
            except Exception as error:  # it must not end a run that is fine
                why = f"the watchdog has ended: {type(error).__name__}: {error}"
            if len(PROGRESS.threads) > 1:
                why = "several threads train; the watchdog, which watches one, has ended"
            if why:
                _logger.warning("rank %d: %s", self._rank, why)
                with contextlib.suppress(RuntimeError, OSError):
                    self._write_beat(unwatched=why)
            if why or self.failed.is_set():
                break
        self._stop.set()

    def _watch_store(self) -> None:
        """Tell about a store that does not answer while this rank is stuck; after long, end the wait."""
        woken = warned = time.monotonic()
        while not self._stop.wait(self._poll_s):
            now, before = time.monotonic(), woken
            woken, silent_s = now, now - self._looked
            # After a pause of this process the other thread may not have had its turn yet.
            if silent_s < 2 * _QUIET_S + self._poll_s or now - before > _QUIET_S:
                continue
            is_stuck = self._since_stuck() is not None
            if not is_stuck and not self._is_in_collective():
                continue
            reason = (
                f"the store of the process groups has not answered for {silent_s:.0f} s; the process that has it (rank "
                "0 or the launcher) is stopped, or its machine cannot be reached from this one"
            )
            if is_stuck and silent_s > self.lost_s:
                self._fail(f"{_ENDS}{reason}\nNow:\n  waits for collectives in {_place()} on rank {self._rank}")
                return
            if now - warned > 2 * _QUIET_S:
                warned = now + _WARN_AGAIN_S
                _logger.warning("rank %d waits for collectives, and %s", self._rank, reason)

    def _look(self) -> None:
        """Show a sign of life, look for a failure or an alarm, and raise one if this rank is stuck."""
        keys, now, place = self._keys, time.monotonic(), _place()
        if now - self._looked > _QUIET_S + self._poll_s:
            self._beats.clear()  # all processes may have been paused
        self._looked = now
        self._beat += 1
        failure = self._read("failure")
        if failure is not None:
            if self._rank in failure["ranks"]:
                self._fail(failure["message"])
            return
        launches = sum(log.count for log in PROGRESS.logs())
        if (launches, place) != self._idle[:2]:
            self._idle = launches, place, now
        alarm = int(self._read("alarm") or 0)
        if alarm != self._alarm[0]:
            self._alarm = alarm, now
            self._judges = False
        lasts = alarm > 0 and now - self._alarm[1] < 3 * self.stuck_s + _ALARM_S
        if self._has_server or lasts:
            self._write_beat()
        if self._has_server and not self._mismatch and self._beat % _BEATS_PER_DIGEST == 0:
            self._mismatch = self._compare_digests()
        is_stuck = self._since_stuck() is not None or bool(self._mismatch)
        if is_stuck and not lasts:
            keys.compare_set("alarm", str(alarm) if alarm else "", str(alarm + 1))
            return
        if not lasts:
            self._beats.clear()  # nobody is stuck
            return
        keys.set(f"report/{self._rank}", json.dumps([alarm, self._report(place, now).to_json()]))
        if is_stuck and not self._judges:
            self._judges = keys.add(f"judges/{alarm}", 1) <= _JUDGES
        if is_stuck and self._judges:
            self._compare(alarm, now)

    def _compare(self, alarm: int, now: float) -> None:
        """Compare the reports of all ranks that share a group with this one, and say what was found."""
        ranks = {self._rank}
        reports: dict[int, Report] = {}
        quiet: dict[int, _Beat] = {}
        silent: list[int] = []
        while True:  # ranks of its groups, of the groups of these, and so on
            for rank in ranks - reports.keys() - quiet.keys() - set(silent):
                beat = self._beat_of(rank)
                if self._beats.get(rank, (-1, 0.0))[0] != beat.number:
                    self._beats[rank] = beat.number, now
                number, report = self._read(f"report/{rank}") or (0, {})
                if beat.number < 0:
                    reports[rank] = Report("runs", "what comes before its first forward", now - self._alarm[1])
                elif beat.ended:
                    reports[rank] = Report.from_json(report)
                elif beat.unwatched or now - self._beats[rank][1] > max(_QUIET_S, 2.5 * self._poll_s):
                    quiet[rank] = beat
                elif number >= alarm:
                    reports[rank] = Report.from_json(report)
                else:
                    silent.append(rank)
            further = {r for each in reports.values() for group in each.related.values() for r in group.ranks}
            if further <= ranks:
                break
            ranks |= further
        lost: dict[int, str] = {}
        is_broken = any(report.state == "broken" for report in reports.values())
        lost_s = min(self.lost_s, _BROKEN_S) if is_broken else self.lost_s
        for rank, beat in quiet.items():
            silent_s, state = now - self._beats[rank][1], self._state_of(beat, reports)
            does = {GONE: "its process is gone", RUNS: "its process runs", STOPPED: "its process is stopped"}
            reason = (
                beat.unwatched or f"{does.get(state, 'its machine cannot be reached')}, no answer for {silent_s:.0f} s"
            )
            if state == GONE or (state != RUNS and silent_s > lost_s and not beat.unwatched):
                lost[rank] = f"{reason}; it was last seen in {beat.place}"
            else:
                reports[rank] = Report("runs", f"{beat.place} ({reason})", silent_s)
        if silent and now - self._alarm[1] < 2.5 * self._poll_s:
            return  # they have not looked yet
        verdict = judge(dict(sorted(reports.items())), lost, silent, mismatch=self._mismatch)
        self._mismatch = ""  # until they are compared again
        suspected, self._suspected = self._suspected, ("", 0.0)
        if verdict is None:
            return
        suspect = f"{verdict.kind} {verdict.culprits}"
        # Reports are of different moments; and a process that has just ended, which closes connections, still counts.
        if verdict.kind in _SUSPECTED and (suspect != suspected[0] or now - suspected[1] < _SURE_S):
            self._suspected = suspected if suspect == suspected[0] else (suspect, now)
        elif verdict.is_final:
            value = json.dumps({"message": _ENDS + verdict.message, "ranks": sorted(ranks), "kind": verdict.kind})
            self._keys.compare_set("failure", "", value)
        elif max(reports[rank].seconds for rank in verdict.culprits) > self.stuck_s / 2:  # not if it has just gone on
            self._warn(verdict, now)

    def _compare_digests(self) -> str:
        """Return how the launches of a group of which this rank is the first differ; empty if they do not.

        They may match each other by their sizes, so that nobody is stuck, and results are wrong.
        """
        for log in _logs():
            if log.ranks[0] != self._rank:
                continue
            known = {count: rest for count, *rest in list(log.snapshots)}
            for rank in log.ranks:
                digests = self._beat_of(rank).digests.get(log.name, ())
                both = [(*known[count], digest, steps) for count, digest, steps in digests if count in known]
                if any(own != digest for own, _, digest, _ in both):
                    return "differ"
                if any(own != steps for _, own, _, steps in both):
                    return "out of step"
        return ""

    def _beat_of(self, rank: int) -> _Beat:
        return _Beat(*(self._read(f"beat/{rank}") or (-1, "", {}, "")))

    def _write_beat(self, *, ended: bool = False, unwatched: str = "") -> None:
        digests = {log.name: list(log.snapshots)[-_DIGESTS_SHOWN:] for log in _logs()}
        beat = _Beat(self._beat, _place(), digests, self._lock, ended, unwatched)
        self._keys.set(f"beat/{self._rank}", json.dumps(beat))

    def _state_of(self, beat: _Beat, reports: Mapping[int, Report]) -> str:
        """Return the state of the process that has given a sign of life; empty if no rank can look for it."""
        seen = (report.locks.get(beat.lock, "") for report in reports.values())
        return state_of(beat.lock) or next(filter(None, seen), "")

    def _warn(self, verdict: Verdict, now: float) -> None:
        about = f"{verdict.kind} {verdict.culprits}"
        if (about, True) != (self._warned[0], now - self._warned[1] < _WARN_AGAIN_S):
            self._warned = about, now
            _logger.warning("%s", verdict.message)

    def _report(self, place: str, now: float) -> Report:
        waiting, barrier = PROGRESS.waiting, PROGRESS.barrier  # before the counts of what it has come to
        logs = _logs(destroyed=self._has_ended)
        named = {log.index: log.name for log in logs}
        groups = {log.name: GroupReport(log.ranks, *log.recent(), log.began) for log in logs}
        # Who waits in a barrier waits for those that have not come to as many. Being in one is no launch of a forward.
        groups |= {name: GroupReport(*at, (), at[1]) for name, at in list(PROGRESS.barriers.items())}
        layouts = {layout for each in groups.values() for launch in each.calls for layout in launch.layouts}
        waits_for = (named[waiting[1]], waiting[2]) if waiting is not None and waiting[1] in named else None
        collectives, pending = _collectives(self._rank, self._training)
        report = partial(
            Report,
            place=place,
            caught=PROGRESS.caught,
            waits_for=waits_for if barrier is None else (barrier[2], barrier[3] - 1),
            locks={lock: state_of(lock) for lock in locks_seen()},
            order=PROGRESS.order[-_UNITS_REPORTED:],
            groups=groups,
            collectives=collectives,
            layouts={str(layout): _first_lines(PROGRESS.layouts.get(layout, "")) for layout in layouts},
        )
        since = self._since_stuck() if waiting is None else waiting[0]
        idle_s = now - self._idle[2]
        if self._broken is not None:
            return report("broken", seconds=now - self._broken[1], error=self._broken[0])
        if PROGRESS.raised is not None and barrier is None:
            return report("raised", seconds=idle_s, error=PROGRESS.raised)
        if since is not None:
            return report("waits", seconds=now - since)
        if pending is None or idle_s <= self.stuck_s or not self._is_in_collective():
            return report("runs", seconds=idle_s)
        name, number, call = pending
        return report("runs", seconds=idle_s, foreign=call, foreign_at=(name, number) if name in collectives else None)

    def _since_stuck(self) -> float | None:
        """Return since when the training thread waits for collectives, if that is long enough to be stuck."""
        now = time.monotonic()
        waiting = PROGRESS.waiting or PROGRESS.barrier
        since = None if waiting is None else waiting[0]
        if self._broken is not None:
            return self._broken[1]
        if since is None and now - self._idle[2] > self.stuck_s and communicates():
            since = self._idle[2]
        return since if since is not None and now - since > self.stuck_s else None

    def _is_in_collective(self) -> bool:
        """Return True if the training thread is in a function that calls collectives or waits for them."""
        frame: FrameType | None = sys._current_frames().get(self._training)
        if frame is None:
            return False
        if frame.f_code.co_filename.endswith(_OPERATIONS):  # as DTensors call them
            return str(frame.f_locals.get("self")).startswith("_c10d_functional")
        # Or where a user waits for a collective: that is a method of torch, without a frame.
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        return frame.f_code.co_filename.endswith(_WAITING_FILES) or ".wait(" in line

    def _fail(self, message: str) -> None:
        """Have the training thread raise, wherever it waits for collectives."""
        is_foreign = self._is_in_collective()
        _logger.error("rank %d: %s", self._rank, message)
        self._stop.wait(2 * self._poll_s)  # the other ranks read why, before connections and the store close
        PROGRESS.failure = message
        self.failed.set()
        groups = [group for log in _logs() if (group := log.group()) is not None]
        for group in [*groups, self._world] if is_foreign else groups:
            if group.size() > 1:
                abort(group)

    def _read(self, key: str) -> Any:
        """Return the value of a key that may be missing, without waiting for it."""
        return json.loads(read(self._keys, key) or "null")

    def _exit(self) -> None:
        """Say that the process ends, and by which exception."""
        if os.getpid() != self._process:
            return  # a child of it, which has no such thread
        self._join()
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        reason = None if error is None else f"{type(error).__name__}: {error}"
        if reason and PROGRESS.ends:
            reason = f"after its launcher asked it to end, {reason}"
        self._say_last_word(reason or PROGRESS.raised)
        release_lock(self._lock)

    def _say_last_word(self, reason: str | None) -> None:
        """Tell that this rank will launch nothing more, and compare all that it has launched."""
        if self._has_ended:
            return
        self._has_ended = True
        with contextlib.suppress(RuntimeError, OSError):
            self._beat, report = self._beat + 1, self._last_report(reason)
            self._keys.set(f"report/{self._rank}", json.dumps([0, report.to_json()]))
            self._write_beat(ended=True)
            for log in () if self.failed.is_set() else _logs(destroyed=True):
                digest = str(log.digest)
                if self._keys.compare_set(f"end/{log.name}/{log.count}", "", digest) != digest.encode():
                    self._tell_difference({*log.ranks[:_RANKS_COMPARED], self._rank})

    def _tell_difference(self, ranks: Iterable[int]) -> None:
        found = {rank: self._read(f"report/{rank}") for rank in ranks}
        reports = {rank: Report.from_json(each[1]) for rank, each in found.items() if each}
        verdict = judge(reports, {}, mismatch="differ")
        reason = "ranks have launched different collectives" if verdict is None else verdict.message
        _logger.error("rank %d: the results of this run are wrong, because %s", self._rank, reason)

    def _last_report(self, reason: str | None) -> Report:
        return replace(self._report(_place(), time.monotonic()), state="exited", error=reason)

    def _join(self) -> None:
        self._stop.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=self._poll_s + 1)


def abort(group: dist.ProcessGroup) -> None:
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
        for tag in range(_UNANSWERED, _UNANSWERED + 4):
            for step in range(1, group.size()):  # a connection that another rank has closed does not time out
                try:
                    unanswered = torch.empty(1, dtype=torch.uint8, device="cpu")
                    group.recv([unanswered], (group.rank() + step) % group.size(), tag).wait(timedelta(milliseconds=1))
                except RuntimeError as error:
                    if "timed out" in str(error).lower():
                        break


_UNANSWERED = 0x3FFFFF00  # tags that are neither the transport's nor, as far as we know, a user's


class _Beat(NamedTuple):
    """A sign of life of one rank."""

    number: int
    place: str
    digests: dict[str, list[tuple[int, int, int]]]  # as ``LaunchLog.snapshots``, by the name of the group
    lock: str  # that its process holds, see ``ranks/liveness.py``
    ended: bool = False  # it has written a report, and launches nothing more
    unwatched: str = ""  # why there will be no further sign


def _collectives(rank: int, training: int) -> tuple[dict[str, GroupReport[str]], tuple[str, int, str] | None]:
    """Return the last collectives of all process groups, and the one that a thread has called and that is unfinished.

    From torch's flight recorder; nothing if it is disabled (``TORCH_FR_BUFFER_SIZE=0``).
    """
    entries: dict[str, dict[int, str]] = {}
    pending = None
    for dump in ("_dump_fr_trace", "_dump_nccl_trace"):
        trace = getattr(torch._C._distributed_c10d, dump, None)
        for entry in () if trace is None else pickle.loads(trace()).get("entries", ()):
            if entry["is_p2p"]:
                continue
            name, number = str(entry["process_group"][0]), entry["collective_seq_id"]
            of_group = entries.setdefault(name, {})
            if of_group and number <= next(reversed(of_group)):
                of_group.clear()  # of an earlier group of this name
            of_group[number] = call = _call(entry)
            if call != OURS and not entry["retired"] and entry.get("thread_id", str(training)) == str(training):
                pending = name, number, call
    found = {}
    for group, named in dist.distributed_c10d._world.pg_names.items():
        name = str(named)
        known = dist.distributed_c10d._world.pg_group_ranks.get(group, {})
        if len(known) > 1 and known.get(rank) == group.rank():  # else its maker has numbered it in its own way
            calls = [*entries.get(name, {}).items()][-_COLLECTIVES_REPORTED:]
            first = calls[0][0] if calls else 1
            found[name] = GroupReport(sorted(known), first, [call for _, call in calls])
    return found, pending


def _call(entry: dict[str, Any]) -> str:
    """Describe a collective of the flight recorder by the function that was called, and where."""
    function = inside = str(entry["profiling_name"]).rpartition(":")[2]
    for frame in entry.get("frames", ()):
        file, name = frame["filename"], frame["name"]
        if file.endswith(_TRANSPORT):
            return OURS
        if file.startswith(_PACKAGE):
            inside = f"fullshard's {name}"
        elif file.startswith(_TORCH) or (file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file):
            inside = inside if name in _WRAPPERS else name
        else:
            reason = function if inside == function else f"{function} in {inside}"
            return f"{reason}, called at {Path(file).name}:{frame['line']}"
    return function


def _logs(*, destroyed: bool = False) -> list[LaunchLog]:
    """Return the logs of process groups of several ranks that have launched; ``destroyed``: also of those that were."""
    exist = dist.distributed_c10d._world.pg_map
    return [log for log in PROGRESS.logs() if log.count and len(log.ranks) > 1 and (destroyed or log.group() in exist)]


def _first_lines(text: str) -> str:
    return "\n".join(text.split("\n", _PARAMETERS_REPORTED)[:_PARAMETERS_REPORTED])


def _short(error: RuntimeError) -> str:
    """Return the text of a back end's error without the place in its source, and without advice."""
    text = re.sub(r"^\[[^]]*\] *", "", str(error).splitlines()[0]).split(". ")[0]
    return re.sub(r" *\[[^]]*\]:\d+", "", text)[:120]


def _place() -> str:
    """Return what the training thread is in the middle of."""
    where, steps, barrier = PROGRESS.phase, PROGRESS.steps, PROGRESS.barrier
    if barrier is not None:
        where = barrier[1]
    elif PROGRESS.unit is not None:
        where = f"the {where} of {repr(PROGRESS.unit) if PROGRESS.unit else 'the root'}"
    return f"{where} (step {steps.step}, microbatch {max(steps.microbatch, 0)})"


def _has_server(store: Store) -> bool:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, TCPStore)


def _is_fake(world: dist.ProcessGroup) -> bool:
    """Return True for back ends that do not communicate."""
    return all("fake" in world._get_backend(device).name().lower() for device in world._device_types)


def _is_of_back_end(error: RuntimeError) -> bool:
    text = str(error).lower()
    words = ("gloo", "nccl", "connection", "pair closure")
    return isinstance(error, dist.DistError) or any(word in text for word in words)
