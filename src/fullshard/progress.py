"""Progress of this process: its step, its phase, and the collectives that it has launched.

The engine writes it on the training thread, in every step and without communication. All that happens is one stream of
events, which has one source, ``Progress.note``; the collectives of a launch come with its event. Whoever observes reads
this stream: ``fullshard.comm.record``, ``fullshard.trace`` and dry runs. The last launches are kept by their process
groups: ``fullshard.ranks.watchdog`` compares them on its own thread.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import threading
import time
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist

from fullshard.errors import FullshardError

__all__ = ["PROGRESS", "Event", "Launch", "LaunchLog", "Progress", "StepCount", "UnitName"]

LAUNCHES_KEPT = 256  # of each group
SNAPSHOT_EVERY, SNAPSHOTS_KEPT = 16, 1024  # those of other ranks may be seconds old


class UnitName(str):
    """The name of a unit whose parameters are all-gathered, with a digest of how they lie in the messages.

    Messages of ranks where they lie differently may match by their sizes, and mix up parameters without an error.
    """

    layout: int
    # Which of the units of this name it is, by name and ``LaunchLog.index``. They are the unit's, which may be known by
    # several names, and whose buckets may be made anew on some ranks only.
    numbers: dict[tuple[str, int], int]

    def __new__(cls, name: str, layout: int = 0, numbers: dict[tuple[str, int], int] | None = None) -> UnitName:
        """Return the name of a unit; copies are made without the other arguments, which are copied after."""
        made = super().__new__(cls, name)
        made.layout, made.numbers = layout, {} if numbers is None else numbers
        return made


class Launch(NamedTuple):
    """Collectives of one group that were issued together.

    Attributes:
        kind: ``"all_gather"``, ``"reduce_scatter"`` or ``"all_reduce"``.
        units: Names of the units, ``""`` for the root.
        step: Optimizer steps before it.
        microbatch: Forwards of the root before it in that step, from 0.
        group_steps: Optimizer steps before it of units that communicate in the group; of a root, other ranks may have
            others, as experts.
        layouts: How the parameters of the units lie in the messages, as keys of ``Progress.layouts``; 0: not known.
        numbers: Which of the units of its name each is, as of two models of one class, from 0; 0 also if not known.
    """

    kind: str
    units: tuple[str, ...]
    step: int
    microbatch: int
    group_steps: int = 0
    layouts: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()


class Event(NamedTuple):
    """Something that this process began to do.

    Attributes:
        time: Seconds since 1970.
        step: Optimizer steps before it.
        microbatch: Forwards of the root before it in that step.
        kind: ``"forward"``, ``"backward"``, a kind of collective that was launched, ``"wait"`` and ``"waited"`` for
            collectives, ``"raised"``, or what the process is in. In a trace also ``"begin"`` and ``"end"`` of the
            engine's operations, ``"arrived"`` for collectives of an accelerator, and ``"memory"``.
        what: Names of units, ``""`` for the root; an error; an operation; or bytes that a buffer has taken or freed.
        group: Number of the process group of a collective, as of ``Progress.groups``; -1: it is no collective.
        number: Number of a launch in its group, which is the same on all ranks; of a wait, that of the last launch that
            it waits for.
    """

    time: float
    step: int
    microbatch: int
    kind: str
    what: str
    group: int = -1
    number: int = -1


class LaunchLog:
    """The launches of one process group, in their order, which has to be the same on all its ranks."""

    group: weakref.ref[Any]
    name: str  # of the group, and its ranks: programs may give one name to several groups
    ranks: list[int]  # global ones of the group
    index: int  # of the group, in the order in which groups were first used
    count: int = 0  # of launches so far
    began: int = 0  # of them before the last outermost forward
    digest: int = 0  # of kinds, units and layouts of all of them; steps of roots may differ: ranks may evaluate alone
    steps: int = 0  # by optimizers, of the largest trained units that communicate in the group
    snapshots: deque[tuple[int, int, int]]  # counts, digests and steps: ranks compare those that both have
    _before: int = 0  # the digest before the last launch
    _stepped_at: int = -1  # launches before the last step
    _recent: deque[tuple[str, tuple[str, ...], int, int, int, tuple[int, ...], tuple[int, ...]]]  # as of ``Launch``
    _named: Counter[str]  # units of a name that have launched

    def __init__(self, group: Any, index: int) -> None:
        self.group, self.index, self._named = weakref.ref(group), index, Counter()
        self.ranks = sorted(dist.distributed_c10d._world.pg_group_ranks.get(group, ()))
        name = dist.distributed_c10d._world.pg_names.get(group, "")
        self.name = f"{name}-{zlib.crc32(repr(self.ranks).encode()):08x}"
        self.snapshots, self._recent = deque(maxlen=SNAPSHOTS_KEPT), deque(maxlen=LAUNCHES_KEPT)

    def add(self, kind: str, units: tuple[str, ...], step: int, microbatch: int) -> None:
        """Append a launch."""
        known = [(unit.layout, self._number_of(unit)) if isinstance(unit, UnitName) else (0, 0) for unit in units]
        layouts, numbers = zip(*known, strict=True) if known else ((), ())
        self._recent.append((kind, units, step, microbatch, self.steps, layouts, numbers))
        self._before, self.digest = self.digest, zlib.crc32(_code(kind, units, layouts, numbers), self.digest)
        self.count += 1
        if not self.count % SNAPSHOT_EVERY:
            self.snapshots.append((self.count, self.digest, self.steps))

    def withdraw(self) -> None:
        """Remove the last launch: it could not be issued."""
        if self.snapshots and self.snapshots[-1][0] == self.count:
            self.snapshots.pop()
        self.digest, self.count = self._before, self.count - 1
        self._recent.pop()

    def _number_of(self, unit: UnitName) -> int:
        number = unit.numbers.get((unit, self.index))
        if number is None:
            number = unit.numbers[unit, self.index] = self._named[unit]
            self._named[unit] += 1
        return number

    def stepped(self) -> None:
        """Count a step of an optimizer. Several without a launch in between, as of two optimizers, are one step."""
        if self._stepped_at != self.count:
            self.steps, self._stepped_at = self.steps + 1, self.count

    def recent(self) -> tuple[int, list[Launch]]:
        """Return the number of the first launch that is still known, and those from it on. Called by other threads."""
        while True:
            count, launches = self.count, list(self._recent)
            if self.count == count:
                return count - len(launches), [Launch(*each) for each in launches]


@functools.cache
def _code(kind: str, units: tuple[str, ...], layouts: tuple[int, ...], numbers: tuple[int, ...]) -> bytes:
    """Return a text of a launch without its step, which is the same in all processes."""
    return repr((kind, units, layouts, numbers)).encode()


@dataclass(eq=False, slots=True)
class StepCount:
    """Counts the steps of one root, and the microbatches of each step."""

    step: int = 0  # steps of optimizers
    microbatch: int = -1  # number of the last forward since the last step, from 0

    def begin_forward(self) -> None:
        """Count a forward of the root that begins."""
        self.microbatch += 1

    def forward_failed(self) -> None:
        """Take back a forward that raised: it does not count."""
        self.microbatch -= 1

    def optimizer_stepped(self) -> None:
        """Count a step of the largest trained unit; others, as experts, may be stepped on some ranks only.

        Several without a forward in between, as of optimizers that step in backward, are one step.
        """
        if self.microbatch >= 0 or not self.step:
            self.step, self.microbatch = self.step + 1, -1


Observer = Callable[[Event, Sequence[Any]], object]  # of an event, and of a launch its collectives


@dataclass(eq=False)
class Progress:
    """Step, phase and launches of this process. Written by the training thread alone."""

    steps: StepCount = field(default_factory=StepCount)  # of the root that runs, or ran last
    phase: str = "user code"  # or "forward", "backward", ...
    unit: str | None = None  # that it is in, "" for the root; None: no unit's
    observers: list[Observer] = field(default_factory=list)  # with one, events have more detail
    launches: int = 0  # so far, of all groups
    launched: tuple[int, int] = (-1, -1)  # group and number of the last launch
    order: list[str] = field(default_factory=list)  # units whose forward has begun, in the last forward of the root
    layouts: dict[int, str] = field(default_factory=dict)  # by their digest: a line for each parameter of a unit
    raised: str | None = None  # the exception that ended the last forward, or its backward
    caught: str | None = None  # the last such exception, with its step, also after further forwards
    threads: set[int] = field(default_factory=set)  # that train
    failure: str | None = None  # why ranks cannot go on, as all of them know; set by the watchdog
    watchdog: Any = None  # knows why collectives fail; opaque here
    ends: bool = False  # the process was asked to end: when a collective fails, it does not wait for the reason
    waiting: tuple[float, int, int] | None = None  # since when (monotonic) the host waits, group and number of a launch
    # By group: its ranks, and how many rank barriers this one came to.
    barriers: dict[str, tuple[Sequence[int], int]] = field(default_factory=dict)
    # The one that the training thread is in: since when, operation, group, number.
    barrier: tuple[float, str, str, int] | None = None
    _logs: weakref.WeakKeyDictionary[Any, LaunchLog] = field(default_factory=weakref.WeakKeyDictionary)
    _indices: Iterator[int] = field(default_factory=itertools.count)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    # ---------------------------------------------------------------- phases

    def begin_forward(self, steps: StepCount) -> None:
        """Note that the outermost forward of a root begins, whose steps are counted by ``steps``."""
        self.steps, self.raised, self.order = steps, None, []
        for log in self.logs():
            log.began = log.count
        self.threads.add(threading.get_ident())
        steps.begin_forward()

    def enter(self, phase: str, unit: str | None) -> None:
        """Note that a phase of a unit begins."""
        self.phase, self.unit = phase, unit
        self.note(phase, unit or "")

    def note(self, kind: str, what: str, group: int = -1, number: int = -1, collectives: Sequence[Any] = ()) -> None:
        """Pass an event to the observers."""
        if self.observers:
            steps = self.steps
            event = Event(time.time(), steps.step, max(steps.microbatch, 0), kind, what, group, number)
            for observer in self.observers:
                observer(event, collectives)

    @contextlib.contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Call an observer with each event of the block."""
        self.observers.append(observer)
        try:
            yield
        finally:
            self.observers.remove(observer)

    def leave(self, phase: str) -> None:
        """Note that a phase of the whole model has ended."""
        self.enter(f"user code after the {phase}", None)

    def failed(self, where: str) -> None:
        """Note the exception that ended a forward or a backward; the first one counts until the next forward."""
        if self.raised is None:
            error = sys.exc_info()[1]
            self.raised = where if error is None else f"{where}: {type(error).__name__}: {error}"
            self.caught = f"{self.raised} (step {self.steps.step}, microbatch {max(self.steps.microbatch, 0)})"
            self.note("raised", self.raised)

    # ---------------------------------------------------------------- collectives

    def log_of(self, group: Any) -> LaunchLog:
        """Return the log of a process group."""
        log = self._logs.get(group)
        if log is None:
            with self._lock:  # the watchdog copies it
                log = self._logs[group] = LaunchLog(group, next(self._indices))
        return log

    def forget_groups(self, exists: Callable[[Any], bool]) -> None:
        """Forget process groups that do not exist any more, and how ranks of the last world waited and failed."""
        with self._lock:
            for group in [group for group in self._logs if not exists(group)]:
                del self._logs[group]
        self.failure = self.raised = self.waiting = None
        self.barriers.clear()
        self.threads.clear()

    def logs(self) -> list[LaunchLog]:
        """Return the logs of all process groups that exist."""
        with self._lock:
            return list(self._logs.values())

    def launch(self, log: LaunchLog, kind: str, units: Iterable[str], collectives: Sequence[Any] = ()) -> None:
        """Note a launch, before it is issued, with its collectives if there are observers.

        Raises:
            FullshardError: If the watchdog has found that ranks cannot go on.
        """
        if self.failure is not None:
            raise FullshardError(self.failure)
        names = tuple(units)
        log.add(kind, names, self.steps.step, max(self.steps.microbatch, 0))
        self.launches, self.launched = self.launches + 1, (log.index, log.count - 1)
        self.note(kind, ", ".join(names), *self.launched, collectives)

    def arrived(self, before: tuple[int, int]) -> tuple[int, int]:
        """Note that collectives on the current stream of an accelerator are through.

        Args:
            before: ``launched`` before they were.

        Returns:
            Group and number of the last one; -1 if there were none, so that ``launched`` is the same.
        """
        launched = (-1, -1) if self.launched == before else self.launched
        if self.observers:
            self.note("arrived", "", *launched)
        return launched

    def begin_wait(self, launched: tuple[int, int]) -> None:
        """Note that the host waits for collectives, the last of which is ``launched``."""
        self.waiting = time.monotonic(), *launched
        self.note("wait", self.unit or "", *launched)

    def end_wait(self) -> None:
        """Note that the host has waited, or that collectives have failed."""
        launched, self.waiting = (-1, -1) if self.waiting is None else self.waiting[1:], None
        self.note("waited", self.unit or "", *launched)

    def is_watched(self) -> bool:
        """Return True if the watchdog runs, and watches the thread that calls this."""
        return self.watchdog is not None and self.watchdog.watches_thread()

    @contextlib.contextmanager
    def in_barrier(self, name: str, group: str, number: int) -> Iterator[None]:
        """Note a rank barrier in which this thread waits; the watchdog watches that of the training thread."""
        if not self.is_watched():
            yield
            return
        self.barrier = time.monotonic(), name, group, number
        try:
            yield
        finally:
            self.barrier = None

    def explained(self, error: RuntimeError) -> RuntimeError:
        """Return the error to raise for one of collectives: what the watchdog knows about its cause, or ``error``."""
        return error if self.watchdog is None else self.watchdog.explained(error)


PROGRESS = Progress()
