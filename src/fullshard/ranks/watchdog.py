"""A thread that finds out why ranks are stuck, and ends it with the same error on all of them.

[Note: The watchdog]
A training step needs no communication for it. The thread wakes once a second, writes what this rank is doing to the
store of the process groups, and looks there for news. A rank whose training thread has waited for a collective for a
few seconds raises an *alarm*. All ranks then write a report: their last launches, and what they are doing. Ranks that
are stuck, at most a few of them, compare the reports (see [Note: Why ranks are stuck]). If ranks cannot go on, one of
them proposes the *failure*, which is the same for all. Every rank then aborts its collectives, so that what waits for
them raises, and the training thread raises the failure instead of the error of the back end, or at its next collective.

A rank is lost if it shows no sign of life for some seconds of an alarm. Time is measured by the clock of the rank that
reads. (That a rank cannot see the process is no proof: numbers of processes mean other things in other containers.)

Ranks may also launch different collectives that match by their sizes, or cut parameters differently, so that none is
stuck and results are wrong. So signs of life have digests of the launches, which are compared. They also have the
number of optimizer steps of units that communicate in the group: where it differs, as if a rank is a microbatch ahead,
shards of different steps are gathered into one parameter, or gradients of different steps are added.

On accelerators the host does not wait for collectives. There a rank is stuck if it launches nothing while collectives
that it has launched are unfinished.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import logging
import os
import platform
import re
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from fullshard.errors import FullshardError
from fullshard.memory import communicates
from fullshard.progress import PROGRESS, LaunchLog
from fullshard.ranks.crash import crash_folder, write_crash
from fullshard.ranks.store import GroupStore, seconds_from
from fullshard.ranks.verdict import GroupReport, Report, Verdict, judge

__all__ = ["LOST_VARIABLE", "TIMEOUT_VARIABLE", "Watchdog", "watch"]

TIMEOUT_VARIABLE = "FULLSHARD_WATCHDOG_S"
LOST_VARIABLE = "FULLSHARD_WATCHDOG_LOST_S"
_STUCK_S = 3.0  # in a collective
_LOST_S = 8.0  # without a sign of life while others are stuck
_POLL_S = 1.0
_REQUESTS_PER_S = 2_000  # to the store while nobody is stuck
_JUDGES = 8  # ranks that compare reports, so that it does not matter if some of them are lost too
_WARN_AGAIN_S = 60.0
_BEATS_PER_DIGEST = 5
_DIGESTS_SHOWN = 4
_UNITS_REPORTED = 1000
_PARAMETERS_REPORTED = 200  # of a unit

_PACKAGE = str(Path(__file__).resolve().parent.parent)
_TORCH = str(Path(torch.__file__).resolve().parent)
_WAITING_FILES = ("distributed_c10d.py", "_functional_collectives.py", str(Path("ranks", "agreement.py")))

_logger = logging.getLogger(__name__)
_generations = itertools.count()  # of default process groups in this process: their stores may be the same


def watch() -> None:
    """Start the watchdog of the default process group, unless it runs, is disabled, or there is nothing to watch."""
    current: Watchdog | None = PROGRESS.watchdog
    if current is not None and current.watches(dist.group.WORLD):
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
    try:
        watchdog = Watchdog(world, stuck_s, lost_s)
        watchdog.start()
    except (RuntimeError, OSError) as error:  # of a store that cannot be used by a thread
        _logger.warning("rank %d has no watchdog: %s", world.rank(), error)
        return
    PROGRESS.watchdog = watchdog


class Watchdog:
    """The watchdog of this process. See [Note: The watchdog].

    Args:
        world: The default process group.
        stuck_s: Seconds in a collective after which ranks compare what they do.
        lost_s: Seconds without a sign of life after which a rank is lost.
    """

    stuck_s: float
    lost_s: float
    failed: threading.Event  # PROGRESS.failure is set
    _world: dist.ProcessGroup
    _store: GroupStore
    _has_server: bool  # the store is that of a server; others write to a file, which signs of life would fill
    _rank: int
    _host: tuple[str, int]  # the machine, and this process
    _training: int  # the thread that trains
    _poll_s: float
    _beat: int
    _broken: tuple[str, float] | None  # the error of a collective, and since when
    _idle: tuple[int, str, float]  # launches, place and since when nothing has changed
    _alarm: tuple[int, float]  # its number, and when this rank has seen it first
    _judges: bool
    _beats: dict[int, tuple[int, float]]  # of other ranks: the last one, and when this rank has seen it first
    _mismatch: str  # of launches, though nobody may be stuck; a kind of [Note: Why ranks are stuck]
    _looked: float  # when the thread looked last
    _suspected: tuple[str, float]  # a deadlock or a broken network, and since when: it counts if it lasts
    _warned: tuple[str, float]
    _stop: threading.Event
    _thread: threading.Thread

    def __init__(self, world: dist.ProcessGroup, stuck_s: float, lost_s: float) -> None:
        self.stuck_s, self.lost_s, self.failed = stuck_s, lost_s, threading.Event()
        self._world, self._rank = world, world.rank()
        self._store = GroupStore.of(world, f"watchdog/{next(_generations)}")
        self._has_server = _has_server(dist.distributed_c10d._get_default_store())
        self._host, self._training = (platform.node(), os.getpid()), threading.get_ident()
        self._poll_s = max(min(_POLL_S, stuck_s / 4), world.size() / _REQUESTS_PER_S)
        self._beat, self._broken, self._idle, self._alarm = 0, None, (0, "", time.monotonic()), (0, 0.0)
        self._judges, self._beats, self._suspected, self._warned = False, {}, ("", 0.0), ("", 0.0)
        self._mismatch, self._looked = "", time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fullshard watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread. It ends with the process group, or with the process."""
        self._store.keys.set(f"beat/{self._rank}", json.dumps(_Beat(0, _place(), {}, *self._host)))
        with contextlib.suppress(OSError):
            (crash_folder() / f"rank{self._rank}.json").unlink()  # of an earlier run
        self._thread.start()
        atexit.register(self._exit)

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(timeout=self._poll_s + 1)
        atexit.unregister(self._exit)

    def watches(self, world: dist.ProcessGroup | None) -> bool:
        """True if this is the watchdog of ``world``, and its thread runs."""
        return world is self._world and not self._stop.is_set()

    def explained(self, error: RuntimeError) -> RuntimeError:
        """Return the error to raise for one of collectives: the failure, or ``error`` if none is found in time.

        Connections that another rank closes are noticed before the reason is known, so this waits for it.
        """
        if isinstance(error, FullshardError):
            return error
        if not self.failed.is_set() and not self._stop.is_set() and _is_of_back_end(error):
            self._broken = _short(error), time.monotonic()
            limit = time.monotonic() + self.stuck_s + self.lost_s + 4 * self._poll_s
            while not PROGRESS.ends and time.monotonic() < limit and not self.failed.wait(0.1):
                pass  # signals are handled in between
        self._broken = None  # if it is handled, this rank goes on
        return error if PROGRESS.failure is None else FullshardError(PROGRESS.failure)

    # ---------------------------------------------------------------- on the thread

    def _run(self) -> None:
        while not self._stop.wait(self._poll_s):
            if dist.group.WORLD is not self._world:
                break
            try:
                self._look()
            except (dist.DistError, OSError) as error:
                if dist.group.WORLD is self._world and self._since_stuck() is not None:
                    self._fail(
                        "the store of the process groups is gone while this rank waits for collectives; the process "
                        f"that has it, rank 0 or the launcher, has probably ended ({error})"
                    )
                break
            except Exception as error:  # it must not end a run that is fine
                _logger.warning("rank %d: the watchdog has ended: %s: %s", self._rank, type(error).__name__, error)
                break
            if self.failed.is_set():
                break
            if len(PROGRESS.threads) > 1:
                _logger.warning(
                    "rank %d: several threads train; the watchdog, which watches one, has ended", self._rank
                )
                break
        self._stop.set()

    def _look(self) -> None:
        """Show a sign of life, look for a failure or an alarm, and raise one if this rank is stuck."""
        keys, now, place = self._store.keys, time.monotonic(), _place()
        if now - self._looked > self.lost_s / 2:
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
        lasts = alarm > 0 and now - self._alarm[1] < 3 * self.stuck_s + self.lost_s
        if self._has_server or lasts:
            keys.set(f"beat/{self._rank}", json.dumps(_Beat(self._beat, place, _digests(), *self._host)))
        if self._has_server and not self._mismatch and self._beat % _BEATS_PER_DIGEST == 0:
            self._mismatch = self._compare_digests()
        is_stuck = self._since_stuck() is not None or bool(self._mismatch)
        if is_stuck and not lasts:
            keys.compare_set("alarm", str(alarm) if alarm else "", str(alarm + 1))
            return
        if not lasts:
            self._beats.clear()
            return
        keys.set(f"report/{self._rank}", json.dumps([alarm, self._report(place, now).to_json()]))
        if is_stuck and not self._judges:
            self._judges = keys.add(f"judges/{alarm}", 1) <= _JUDGES
        if is_stuck and self._judges:
            self._compare(alarm, now)

    def _compare(self, alarm: int, now: float) -> None:
        """Compare the reports of all ranks that share a group with this one, and say what was found."""
        ranks = {rank for group, _ in _groups() for rank in _ranks_of(group)}
        reports: dict[int, Report] = {}
        lost: dict[int, str] = {}
        hosts: dict[int, tuple[str, int]] = {}
        silent: list[int] = []
        while True:  # ranks of the groups of other ranks too
            for rank in ranks - reports.keys() - lost.keys() - set(silent):
                beat = self._beat_of(rank)
                if self._beats.get(rank, (-1, 0.0))[0] != beat.number:
                    self._beats[rank] = beat.number, now
                number, report = self._read(f"report/{rank}") or (0, {})
                if beat.exited:
                    reports[rank] = Report.from_json(report)
                elif beat.number < 0:  # it has not come to its first forward
                    reports[rank] = Report("runs", "what comes before its first forward", now - self._alarm[1])
                elif now - self._beats[rank][1] > self.lost_s:
                    lost[rank] = beat.place
                    hosts[rank] = beat.host, beat.process
                elif number >= alarm:
                    reports[rank] = Report.from_json(report)
                else:
                    silent.append(rank)
            further = {r for each in reports.values() for group in each.groups.values() for r in group.ranks}
            if further <= ranks:
                break
            ranks |= further
        for rank, (host, process) in hosts.items():  # a process may hold Python's lock for long
            if any(each.host[0] == host and process in each.siblings for each in reports.values()):
                reports[rank] = Report("runs", f"{lost.pop(rank)}, but does not answer", now - self._beats[rank][1])
        if silent and now - self._alarm[1] < 2.5 * self._poll_s:
            return  # they have not looked yet
        verdict = judge(reports, lost, silent, world_size=self._world.size(), mismatch=self._mismatch)
        self._mismatch = ""  # until they are compared again
        suspected, self._suspected = self._suspected, ("", 0.0)
        if verdict is None:
            return
        # A rank whose process has just ended still counts as answering, and closes connections of others.
        suspect = verdict.message if verdict.kind == "deadlock" else verdict.kind
        if verdict.kind in ("deadlock", "broken") and (suspect != suspected[0] or now - suspected[1] < self.lost_s):
            self._suspected = suspected if suspect == suspected[0] else (suspect, now)
        elif verdict.is_final:
            value = json.dumps({"message": _failure(verdict), "ranks": sorted(ranks), "kind": verdict.kind})
            self._store.keys.compare_set("failure", "", value)
        else:
            self._warn(verdict, now)

    def _compare_digests(self) -> str:
        """Return how the launches of a group of which this rank is the first differ; empty if they do not.

        They may match each other by their sizes, so that nobody is stuck, and results are wrong.
        """
        for group, log in _groups():
            if group.rank():
                continue
            known = {count: rest for count, *rest in list(log.snapshots)}
            for rank in _ranks_of(group):
                digests = self._beat_of(rank).digests.get(group.group_name, ())
                both = [(*known[count], digest, steps) for count, digest, steps in digests if count in known]
                if any(own != digest for own, _, digest, _ in both):
                    return "differ"
                if any(own != steps for _, own, _, steps in both):
                    return "out of step"
        return ""

    def _beat_of(self, rank: int) -> _Beat:
        return _Beat(*(self._read(f"beat/{rank}") or (-1, "", {})))

    def _warn(self, verdict: Verdict, now: float) -> None:
        about = f"{verdict.kind} {verdict.culprits}"
        if (about, True) != (self._warned[0], now - self._warned[1] < _WARN_AGAIN_S):
            self._warned = about, now
            _logger.warning("%s", verdict.message)

    def _report(self, place: str, now: float) -> Report:
        named = {log.index: str(group.group_name) for group, log in _groups()}
        groups = {str(group.group_name): GroupReport(_ranks_of(group), *log.recent()) for group, log in _groups()}
        layouts = {layout for each in groups.values() for launch in each.launches for layout in launch.layouts}
        waiting = PROGRESS.waiting
        caught = next((event for event in reversed(list(PROGRESS.events)) if event[3] == "raised"), None)
        report = partial(
            Report,
            place=place,
            caught=None if caught is None else f"{caught[4]} (step {caught[1]}, microbatch {caught[2]})",
            waits_for=(named[waiting[1]], waiting[2]) if waiting is not None and waiting[1] in named else None,
            forwards=PROGRESS.forwards,
            host=self._host,
            siblings=_siblings(),
            order=PROGRESS.order[-_UNITS_REPORTED:],
            groups=groups,
            layouts={str(layout): _first_lines(PROGRESS.layouts.get(layout, "")) for layout in layouts},
        )
        since = self._since_stuck() if waiting is None else waiting[0]
        idle_s = now - self._idle[2]
        if self._broken is not None:
            return report("broken", seconds=now - self._broken[1], error=self._broken[0])
        if PROGRESS.raised is not None:
            number, error = PROGRESS.raised
            return report("raised", seconds=idle_s, error=error, forwards=number)
        if since is not None:
            return report("waits", seconds=now - since)
        return report("runs", seconds=idle_s, foreign=self._foreign() if idle_s > self.stuck_s else None)

    def _since_stuck(self) -> float | None:
        """Return since when the training thread waits for collectives, if that is long enough to be stuck."""
        now, waiting = time.monotonic(), PROGRESS.waiting
        since = None if waiting is None else waiting[0]
        if self._broken is not None:
            return self._broken[1]
        if since is None and now - self._idle[2] > self.stuck_s and communicates():
            since = self._idle[2]
        return since if since is not None and now - since > self.stuck_s else None

    def _foreign(self) -> str | None:
        """Return the function of torch.distributed in which the training thread is, and where the user called it."""
        frame: FrameType | None = sys._current_frames().get(self._training)
        if frame is None or not frame.f_code.co_filename.endswith(_WAITING_FILES):
            return None  # it computes, maybe in other code of torch.distributed
        inside = ""
        while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _PACKAGE)):
            name, ours = frame.f_code.co_name, frame.f_code.co_filename.startswith(_PACKAGE)
            if ours:
                inside = f"{inside.partition(' ')[0]} of fullshard's {name}"
            elif name != "wrapper" and " " not in inside:
                inside = name
            frame = frame.f_back
        return None if frame is None else f"{inside}, called at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"

    def _fail(self, message: str) -> None:
        """Have the training thread raise, wherever it waits for collectives."""
        is_foreign = self._foreign() is not None
        message = f"{message}. `fullshard inspect {crash_folder()}` shows the last events of each rank"
        _logger.error("rank %d: %s", self._rank, message)
        self._write_crash(self._report(_place(), time.monotonic()), message)
        self._stop.wait(2 * self._poll_s)  # the other ranks read why, before connections and the store close
        PROGRESS.failure = message
        self.failed.set()
        groups = [group for group, _ in _groups()]
        for group in [*groups, self._world] if is_foreign else groups:
            if group.size() > 1:
                abort(group)

    def _write_crash(self, report: Report, failure: str | None) -> None:
        try:
            write_crash(self._rank, self._world.size(), report, failure)
        except OSError as error:
            _logger.warning("cannot write the last events of rank %d: %s", self._rank, error)

    def _read(self, key: str) -> Any:
        """Return the value of a key that may be missing, without waiting for it."""
        found: bytes = self._store.keys.compare_set(key, "unset", "unset")
        return None if found in (b"unset", b"") else json.loads(found)

    def _exit(self) -> None:
        """Say that the process ends, and by which exception."""
        if os.getpid() != self._host[1]:
            return  # a child of it, which has no such thread
        self._stop.set()
        self._thread.join(timeout=self._poll_s + 1)
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        told = "" if error is None else f"{type(error).__name__}: {error}"
        if told and PROGRESS.ends:
            told = f"after its launcher asked it to end, {told}"
        report = replace(self._report(_place(), time.monotonic()), state="exited", error=told or None)
        if error is not None and not self.failed.is_set():
            self._write_crash(report, None)
            _logger.error("rank %d: `fullshard inspect %s` shows its last events", self._rank, crash_folder())
        with contextlib.suppress(RuntimeError, OSError):
            if dist.group.WORLD is self._world:
                self._store.keys.set(f"report/{self._rank}", json.dumps([0, report.to_json()]))
                self._store.keys.set(
                    f"beat/{self._rank}", json.dumps(_Beat(self._beat + 1, _place(), {}, *self._host, True))
                )


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
    host: str = ""
    process: int = 0
    exited: bool = False  # the process has ended, after it has written a report


def _groups() -> list[tuple[dist.ProcessGroup, LaunchLog]]:
    """Return the process groups with launches that exist and were not destroyed, of several ranks."""
    logs = [(group, log) for log in PROGRESS.logs() if (group := log.group()) is not None and log.count]
    return [(group, log) for group, log in logs if group in dist.distributed_c10d._world.pg_map and group.size() > 1]


def _digests() -> dict[str, list[tuple[int, int, int]]]:
    return {group.group_name: list(log.snapshots)[-_DIGESTS_SHOWN:] for group, log in _groups()}


def _first_lines(text: str) -> str:
    return "\n".join(text.split("\n", _PARAMETERS_REPORTED)[:_PARAMETERS_REPORTED])


def _siblings() -> list[int]:
    """Return the processes of the same launcher, this one too, that run on this machine; empty if it is not known."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getppid() and state in "RSDI":
                found.append(int(path.parent.name))
    return found


def _short(error: RuntimeError) -> str:
    """The text of a back end's error without the place in its source, and without advice."""
    text = re.sub(r"^\[[^]]*\] *", "", str(error).splitlines()[0]).split(". ")[0]
    return re.sub(r" *\[[^]]*\]:\d+", "", text)[:120]


def _failure(verdict: Verdict) -> str:
    return f"the watchdog ended this run, because ranks cannot go on: {verdict.message}"


def _place() -> str:
    """Return what the training thread is in the middle of."""
    where, steps = PROGRESS.phase, PROGRESS.steps
    if PROGRESS.unit is not None:
        where = f"the {where} of {repr(PROGRESS.unit) if PROGRESS.unit else 'the root'}"
    return f"{where} (step {steps.step}, microbatch {max(steps.microbatch, 0)})"


def _ranks_of(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


def _has_server(store: Store) -> bool:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, TCPStore)


def _is_fake(world: dist.ProcessGroup) -> bool:
    """True for back ends that do not communicate."""
    return all("fake" in world._get_backend(device).name().lower() for device in world._device_types)


def _is_of_back_end(error: RuntimeError) -> bool:
    text = str(error).lower()
    words = ("gloo", "nccl", "connection", "pair closure")
    return isinstance(error, dist.DistError) or any(word in text for word in words)
