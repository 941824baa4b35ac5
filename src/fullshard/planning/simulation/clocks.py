"""Clocks and devices of the modelled network.

[Note: Time]
A message's end is known when it begins: ``max(issued, end of the one before it on the link) + duration``. Waiting is
therefore only ever until a point in time, and the clock jumps there: it shows what the host spends on its own work and
adds what it would have slept, so that a step at 1,024 ranks takes as long to measure as its host work, and no sleep
ends late.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol


class SkippingClock:
    """Shows the seconds that the host has worked, and those that it would have slept on top.

    Args:
        reading: What measures work. The default is this thread's own processor time, which other processes on a busy
            machine do not lengthen; ``time.perf_counter`` counts them in.
    """

    _reading: Callable[[], float]
    _skipped: float

    def __init__(self, reading: Callable[[], float] = time.thread_time) -> None:
        self._reading, self._skipped = reading, 0.0

    def now(self) -> float:
        """Return the seconds worked plus the seconds skipped."""
        return self._reading() + self._skipped

    def wait_until(self, deadline: float) -> None:
        """Skip to ``deadline``, unless it is later already."""
        self._skipped += max(0.0, deadline - self.now())

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Stop the clock inside of the ``with`` block."""
        begun = self._reading()
        try:
            yield
        finally:
            self._skipped -= self._reading() - begun


@dataclass(eq=False)
class Passage:
    """A launch on its way over the link. Seconds of the clock; NaN until known, on an accelerator always.

    Args:
        seconds: How long it holds the link.
        communicator: Whose launches are in order; None: it waits for none but on the link.
        link: Which one it needs.
        mark: Its end, as the device knows it.
    """

    seconds: float
    communicator: int | None = None
    link: str = ""
    start: float = math.nan
    end: float = math.nan
    mark: Any = None


class Device(Protocol):
    """A computing device beside one link, which waits for its messages: a host, or streams."""

    def transmit(self, passage: Passage, fill: Callable[[], None]) -> None:
        """Send a launch after everything that was begun before; ``fill`` writes the outputs."""

    def wait(self, passage: Passage) -> None:
        """Have everything that follows start no earlier than the end of ``passage``."""

    def is_over(self, passage: Passage) -> bool:
        """Return True if the launch has ended by now."""

    def compute(self, seconds: float, work: Callable[[], Any] | None = None) -> Any:
        """Compute for so many seconds, of which ``work`` is a part, and return its result."""

    def synchronize(self) -> float:
        """Wait until everything that was begun is over, and return the time then."""


class HostDevice:
    """A host that computes itself, as CPU ranks do: it blocks where it waits.

    Args:
        clock: Its time.
        contention: Seconds of computation that a second of communication beside it costs, from 0 to 1: a message that
            is on its way takes part of the processor.
    """

    clock: SkippingClock
    _contention: float
    _link_free: dict[str, float]  # when the last message on each link is through

    def __init__(self, clock: SkippingClock, contention: float = 0.0) -> None:
        self.clock, self._contention, self._link_free = clock, contention, {}

    def transmit(self, passage: Passage, fill: Callable[[], None]) -> None:
        """Begin a launch when the one before it on the link ends."""
        passage.start = max(self.clock.now(), self._link_free.get(passage.link, 0.0))
        passage.end = self._link_free[passage.link] = passage.start + passage.seconds
        with self.clock.outside():
            fill()

    def wait(self, passage: Passage) -> None:
        """Block until the launch has ended."""
        self.clock.wait_until(passage.end)

    def is_over(self, passage: Passage) -> bool:
        """Return True if the launch has ended by now."""
        return self.clock.now() >= passage.end

    def compute(self, seconds: float, work: Callable[[], Any] | None = None) -> Any:
        """Compute for so many seconds, longer beside messages, of which ``work`` is a part; return its result."""
        end = self.clock.now() + self._beside_messages(seconds)
        result = work() if work is not None else None
        self.clock.wait_until(end)
        return result

    def _beside_messages(self, seconds: float) -> float:
        """Return how long so much computation takes beside the messages that are on their way."""
        busy = max(0.0, max(self._link_free.values(), default=0.0) - self.clock.now())
        done = busy * (1 - self._contention)
        return seconds + busy - done if seconds > done else seconds / (1 - self._contention)

    def synchronize(self) -> float:
        """Return the time now: a host that has gone on is through with everything before."""
        return self.clock.now()
