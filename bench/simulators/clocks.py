"""Clocks, links and devices of the modelled network: what time is, and what takes it.

[Note: Time]
A message's end is known when it begins: ``max(issued, end of the one before it on the link) + duration``. Waiting is
therefore only ever until a point in time, and a :class:`Clock` says what that means. A :class:`WallClock` sleeps. A
:class:`SkippingClock` jumps: it shows what the host spends on its own work and adds what it would have slept, so that a
step at 1,024 ranks takes as long to measure as its host work, and no sleep ends late.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

__all__ = ["Clock", "Device", "HostDevice", "Lane", "Passage", "SkippingClock", "StreamDevice", "WallClock"]


class Clock(Protocol):
    """See [Note: Time]. Seconds from an arbitrary origin."""

    skips: bool  # whether nobody ever sleeps

    def now(self) -> float:
        """The time."""

    def wait_until(self, deadline: float) -> None:
        """Return once it is ``deadline``."""

    def outside(self) -> contextlib.AbstractContextManager[None]:
        """What runs inside takes no time, as far as the clock can help it."""


class WallClock:
    """Sleeps. A sleep ends late by what earlier ones ended late, so it is begun that much shorter; no spinning."""

    skips = False
    _late: float  # seconds by which sleeps have ended late, smoothed

    def __init__(self) -> None:
        self._late = 0.0

    def now(self) -> float:
        """Seconds of the monotonic clock."""
        return time.perf_counter()

    def wait_until(self, deadline: float) -> None:
        """Sleep until ``deadline``, once."""
        rest = deadline - self._late - time.perf_counter()
        if rest <= 0:
            return
        time.sleep(rest)
        error = time.perf_counter() - (deadline - self._late)
        # Being preempted says nothing about the next sleep.
        self._late += 0.1 * (min(max(error, 0.0), 1e-3) - self._late)

    def outside(self) -> contextlib.AbstractContextManager[None]:
        """Nothing: a wall clock cannot be stopped."""
        return contextlib.nullcontext()


class SkippingClock:
    """Shows the time the host has worked, and what it would have slept on top.

    Args:
        reading: What measures work. The default is this thread's own processor time, which other processes on a busy
            machine do not lengthen; ``time.perf_counter`` counts them in.
    """

    skips = True
    _reading: Callable[[], float]
    _skipped: float

    def __init__(self, reading: Callable[[], float] = time.thread_time) -> None:
        self._reading, self._skipped = reading, 0.0

    def now(self) -> float:
        """Seconds worked plus seconds skipped."""
        return self._reading() + self._skipped

    def wait_until(self, deadline: float) -> None:
        """It is ``deadline`` at once, if it was not later already."""
        self._skipped += max(0.0, deadline - self.now())

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """The clock stands still inside."""
        begun = self._reading()
        try:
            yield
        finally:
            self._skipped -= self._reading() - begun


@dataclass
class Lane:
    """One direction of one link. ``thread`` is made when it is first needed."""

    end: float = 0.0  # of the last message
    thread: LinkThread | None = None


@dataclass(eq=False)
class Passage:
    """A launch on its way over a link. Seconds of the clock; NaN until known.

    Args:
        seconds: How long it holds the link.
        lanes: What it holds.
        before: The launch of the same communicator that has to be over first.
        filled: Set by the link's thread; None: there is none.
        over: Its end on an accelerator, an event.
    """

    seconds: float
    lanes: Sequence[Lane]
    before: Passage | None = None
    issued: float = math.nan
    start: float = math.nan
    end: float = math.nan
    filled: threading.Event | None = None
    over: Any = None
    _arrived: bool = False
    _callbacks: list[Callable[[], None]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def then(self, callback: Callable[[], None]) -> None:
        """Have the link's thread call this at the end; at once if that has come."""
        with self._lock:
            if not self._arrived:
                self._callbacks.append(callback)
                return
        callback()

    def arrive(self) -> None:
        """The end has come."""
        with self._lock:
            self._arrived, callbacks = True, self._callbacks
        for callback in callbacks:
            callback()

    def begin(self, issued: float) -> None:
        """Take the link as soon as it is free."""
        before = self.before.end if self.before is not None else 0.0
        self.before, self.issued = None, issued
        self.start = max(issued, before, *(lane.end for lane in self.lanes))
        self.end = self.start + self.seconds
        for lane in self.lanes:
            lane.end = self.end


class Device(Protocol):
    """What computes, and what waits for messages: a host, or streams."""

    clock: Clock

    def transmit(self, passage: Passage, fill: Callable[[], None]) -> None:
        """Send once everything that was begun before is there. ``fill`` writes what arrives."""

    def wait(self, passage: Passage) -> None:
        """What comes next starts no earlier than the end of ``passage``."""

    def is_over(self, passage: Passage) -> bool:
        """Whether it has arrived by now."""

    def compute(self, seconds: float, work: Callable[[], Any] | None = None) -> Any:
        """Compute for so long. ``work``, done meanwhile, is part of it; returns its result."""

    def synchronize(self) -> float:
        """Wait until everything that was begun is over; the time then."""


class HostDevice:
    """A host that computes itself, as CPU ranks do: it blocks where it waits."""

    clock: Clock

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def transmit(self, passage: Passage, fill: Callable[[], None]) -> None:
        """Now, or when the link is free."""
        passage.begin(self.clock.now())
        if self.clock.skips:
            with self.clock.outside():
                fill()
            return
        passage.filled = threading.Event()
        lane = passage.lanes[0]
        if lane.thread is None:
            lane.thread = LinkThread()
        lane.thread.play(fill, passage)

    def wait(self, passage: Passage) -> None:
        """Block until its end."""
        self.clock.wait_until(passage.end)
        if passage.filled is not None:
            passage.filled.wait()

    def is_over(self, passage: Passage) -> bool:
        """By the clock."""
        return self.clock.now() >= passage.end

    def compute(self, seconds: float, work: Callable[[], Any] | None = None) -> Any:
        """Block for so long, without the GIL under a wall clock."""
        end = self.clock.now() + seconds
        result = work() if work is not None else None
        self.clock.wait_until(end)
        return result

    def synchronize(self) -> float:
        """Now: a host that has gone on is through with everything before."""
        return self.clock.now()


class LinkThread(threading.Thread):
    """Plays the messages of one lane under a wall clock: fills, sleeps until the end, and then calls back."""

    _jobs: queue.SimpleQueue[tuple[Callable[[], None], Passage] | None]

    def __init__(self) -> None:
        super().__init__(name="modelled link", daemon=True)
        self._jobs = queue.SimpleQueue()
        self.start()

    def play(self, fill: Callable[[], None], passage: Passage) -> None:
        """Queue one message."""
        self._jobs.put((fill, passage))

    def stop(self) -> None:
        """End after what is queued."""
        self._jobs.put(None)
        self.join()

    def run(self) -> None:
        """The thread's own loop."""
        clock = WallClock()
        while (job := self._jobs.get()) is not None:
            fill, passage = job
            fill()
            assert passage.filled is not None
            passage.filled.set()
            clock.wait_until(passage.end)
            passage.arrive()


class StreamDevice:
    """An accelerator on which messages are kernels on streams. On CUDA they spin for their time, else they take none.

    A lane is a stream, so that its messages are one after another; every message waits for what the current stream
    holds when it is issued, and ``wait`` has the current stream wait for an event: what NCCL does. A spinning kernel
    occupies one thread block.

    Args:
        device: Which.
    """

    clock: Clock
    device: torch.device
    _cycles: float  # per second; 0: kernels take no time
    _streams: dict[int, torch.Stream]  # by id of the lane

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self.clock, self.device = WallClock(), torch.device(device)
        self._streams = {}
        self._cycles = self._calibrated() if self.device.type == "cuda" else 0.0

    def _calibrated(self, cycles: int = 20_000_000) -> float:
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(2):  # the first wakes the device up
            begun.record()
            torch.cuda._sleep(cycles)
            ended.record()
            ended.synchronize()
        return cycles / (begun.elapsed_time(ended) / 1e3)

    def spin(self, seconds: float) -> None:
        """Occupy the current stream for so long."""
        if cycles := int(seconds * self._cycles):
            torch.cuda._sleep(cycles)

    def transmit(self, passage: Passage, fill: Callable[[], None]) -> None:
        """Enqueue a kernel on the lane's stream."""
        streams = [self._stream_of(lane) for lane in passage.lanes]
        issued = torch.accelerator.current_stream(self.device).record_event()
        main = streams[0]
        main.wait_event(issued)
        for other in streams[1:]:
            main.wait_stream(other)
        if passage.before is not None and passage.before.lanes[0] is not passage.lanes[0]:  # else a stream's order
            main.wait_event(passage.before.over)
        passage.before = None  # else every passage there ever was would stay alive
        with main:
            fill()
            self.spin(passage.seconds)
            passage.over = main.record_event()
        for other in streams[1:]:
            other.wait_event(passage.over)

    def wait(self, passage: Passage) -> None:
        """Have the current stream wait."""
        torch.accelerator.current_stream(self.device).wait_event(passage.over)

    def is_over(self, passage: Passage) -> bool:
        """Whether its kernel has ended."""
        return bool(passage.over.query())

    def compute(self, seconds: float, work: Callable[[], Any] | None = None) -> Any:
        """A kernel on the current stream, beside what ``work`` enqueues."""
        self.spin(seconds)
        return work() if work is not None else None

    def synchronize(self) -> float:
        """Have the host wait for all streams."""
        torch.accelerator.synchronize(self.device)
        return self.clock.now()

    def _stream_of(self, lane: Lane) -> torch.Stream:
        if id(lane) not in self._streams:
            self._streams[id(lane)] = torch.Stream(device=self.device)
        return self._streams[id(lane)]
