"""Streams without a GPU: a device whose computation and copies take no host time, for libraries that use streams.

torch's FSDP1 and FSDP2 order everything by streams and events, and on CPU these do nothing: every collective blocks.
To see their schedules as they are on an accelerator, ``torch.cpu``'s stand-ins for streams and events are replaced by
ones that keep time. A kernel, here a modelled computation or collective, starts when its stream and its host are
ready; the host runs ahead and is held up only where a library synchronizes. What tensors hold is computed at once, in
the order of the host's program, which is one of the orders that the streams allow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from fullshard.memory import traced_wait
from fullshard.planning.simulation.clocks import Passage, SkippingClock
from fullshard.progress import PROGRESS


@dataclass(eq=False)
class Kernel:
    """A computation or a message on a stream.

    Args:
        issued: When the host enqueued it.
        seconds: How long it takes.
        after: What has to be over first.
        passage: The launch, if it is one: then it needs the link too.
    """

    issued: float
    seconds: float
    after: tuple[Kernel, ...]
    passage: Passage | None = None
    end: float | None = None  # None: not known yet

    def ready(self) -> float | None:
        """Return when it may start; None if that is not known yet."""
        time = self.issued
        for kernel in self.after:
            if kernel.end is None:
                return None
            time = max(time, kernel.end)
        return time


class SimulatedEvent:
    """A point of a stream."""

    device: SimulatedDevice
    after: tuple[Kernel, ...]

    def __init__(self, device: SimulatedDevice) -> None:
        self.device, self.after = device, ()

    def record(self, stream: SimulatedStream | None = None) -> None:
        """Record all that ``stream`` holds now."""
        self.after = (stream or self.device.current).after

    def wait(self, stream: SimulatedStream | None = None) -> None:
        """Have the stream wait."""
        (stream or self.device.current).wait_event(self)

    def synchronize(self) -> None:
        """Have the host wait."""
        self.device.wait_for(self.after)

    def query(self) -> bool:
        """Return True if all that was recorded is over."""
        return all(end <= self.device.clock.now() for end in self.device.ends_of(self.after))


class SimulatedStream:
    """Kernels in order. ``after``: what the next one waits for."""

    device: SimulatedDevice
    after: tuple[Kernel, ...]
    number: int  # 0: the one on which the program begins

    def __init__(self, device: SimulatedDevice, number: int = 0) -> None:
        self.device, self.after, self.number = device, (), number

    def wait_for(self, kernels: tuple[Kernel, ...]) -> None:
        """Have kernels that are enqueued from now on start after these."""
        now = self.device.clock.now()
        both = dict.fromkeys((*self.after, *kernels))
        self.after = tuple(kernel for kernel in both if kernel.end is None or kernel.end > now)

    def wait_stream(self, other: SimulatedStream) -> None:
        """Have kernels that are enqueued from now on start after all of ``other`` so far."""
        self.wait_for(other.after)

    def wait_event(self, event: SimulatedEvent | None) -> None:
        """Have kernels that are enqueued from now on start after an event."""
        if event is not None:
            self.wait_for(event.after)

    def record_event(self, event: SimulatedEvent | None = None) -> SimulatedEvent:
        """Record an event at the present end, and return it."""
        event = event or SimulatedEvent(self.device)
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Have the host wait."""
        self.device.wait_for(self.after)


class SimulatedDevice:
    """An accelerator with streams that keep time, as a ``Device`` of the modelled network.

    [Note: Who gets the link]
    The host enqueues messages long before they can start, and not in the order in which they can. So nothing is decided
    when a message is enqueued. When the host waits, kernels are played in the order of time: the link goes to the
    message that can start first, and of several to the one that was ready first. What the host enqueues later cannot
    change that, since it cannot start before the host's own time, and that is at least what it waited for.
    """

    clock: SkippingClock
    current: SimulatedStream
    _kernels: list[Kernel]  # whose end is not known, in the order of the host
    _last: dict[int, Kernel]  # message of each communicator
    _streams: int  # made so far
    _link_free: dict[str, float]  # when the last message that was played on each link is through

    def __init__(self, clock: SkippingClock | None = None) -> None:
        self.clock = clock if clock is not None else SkippingClock()
        self._kernels, self._last, self._link_free = [], {}, {}
        self.current, self._streams = SimulatedStream(self), 1

    def stream(self) -> SimulatedStream:
        """Return a new stream."""
        self._streams += 1
        return SimulatedStream(self, self._streams - 1)

    def transmit(self, passage: Passage, fill: Callable[[], None]) -> None:
        """Enqueue a message on the current stream's behalf; the stream goes on."""
        with self.clock.outside():
            fill()
        after = self.current.after
        if passage.communicator in self._last:
            after = (*after, self._last[passage.communicator])
        passage.mark = kernel = Kernel(self.clock.now(), passage.seconds, after, passage)
        self._kernels.append(kernel)
        if passage.communicator is not None:
            self._last[passage.communicator] = kernel

    def wait(self, passage: Passage) -> None:
        """Have the current stream wait."""
        self.current.wait_for((passage.mark,))

    def is_over(self, passage: Passage) -> bool:
        """Return True if the message has arrived by now."""
        return self.ends_of((passage.mark,))[0] <= self.clock.now()

    def compute(self, seconds: float, work: Callable[[], Any] | None = None) -> Any:
        """Enqueue a kernel on the current stream. ``work`` is done at once, and costs the host nothing."""
        kernel = Kernel(self.clock.now(), seconds, self.current.after)
        self._kernels.append(kernel)
        self.current.after = (kernel,)
        if work is None:
            return None
        with self.clock.outside():
            return work()

    def synchronize(self) -> float:
        """Have the host wait for all streams, and return the time then."""
        self.wait_for(tuple(self._kernels))
        return self.clock.now()

    def wait_for(self, kernels: tuple[Kernel, ...]) -> None:
        """Have the host wait."""
        self.clock.wait_until(max(self.ends_of(kernels), default=0.0))

    def ends_of(self, kernels: Sequence[Kernel]) -> list[float]:
        """Return when these are over. See [Note: Who gets the link]."""
        with self.clock.outside():
            while any(kernel.end is None for kernel in kernels):
                self._play()
        return [kernel.end for kernel in kernels if kernel.end is not None]

    def _play(self) -> None:
        """Find the ends of all kernels up to the next message, and of that."""
        ready: list[tuple[float, float, int, Kernel]] = []
        for kernel in self._kernels:
            time = kernel.ready()
            if time is None:
                continue
            if kernel.passage is None:
                kernel.end = time + kernel.seconds
            else:
                free = self._link_free.get(kernel.passage.link, 0.0)
                ready.append((max(time, free), time, len(ready), kernel))
        if ready:
            start, _, _, kernel = min(ready)
            assert kernel.passage is not None
            kernel.end = self._link_free[kernel.passage.link] = start + kernel.seconds
            kernel.passage.start, kernel.passage.end = start, kernel.end
            kernel.passage = None  # which has the kernel
        for kernel in self._kernels:
            if kernel.end is not None:
                kernel.after = ()  # else every kernel there ever was would stay alive
        self._kernels = [kernel for kernel in self._kernels if kernel.end is None]

    @contextlib.contextmanager
    def on(self, stream: SimulatedStream | None) -> Iterator[None]:
        """Enqueue on ``stream`` inside of the ``with`` block."""
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before


@contextlib.contextmanager
def simulated_streams(device: SimulatedDevice) -> Iterator[None]:
    """Have torch's stand-ins for streams on CPU keep time as long as the block lasts."""
    replacements = {
        "Stream": lambda *_, **__: device.stream(),
        "Event": lambda *_, **__: SimulatedEvent(device),
        "current_stream": lambda *_: device.current,
        "stream": device.on,
        "synchronize": lambda *_: device.synchronize(),
    }
    with mock.patch.multiple(torch.cpu, **replacements):  # type: ignore[call-overload]
        yield


@dataclass(frozen=True)
class _Ticket:
    """An event for which the current stream waits, as a trace sees it."""

    event: SimulatedEvent
    launched: tuple[int, int]

    def wait(self) -> None:
        with traced_wait(self.launched):
            self.event.wait()

    def synchronize(self) -> None:
        self.event.synchronize()


class SimulatedLane:
    """fullshard's communication stream on such a device: what one on an accelerator does, on simulated streams."""

    _device: SimulatedDevice
    _stream: SimulatedStream

    def __init__(self, device: SimulatedDevice) -> None:
        self._device, self._stream = device, device.stream()

    def issue(
        self,
        launch: Callable[[], Iterable[Any]],
        finish: Callable[[], None],
        *,
        allocate: Callable[[], None] | None = None,
        after: Any = None,
    ) -> _Ticket:
        """Issue a launch, as ``fullshard.memory.DeviceCommStream.issue`` does."""
        if allocate is not None and after is None:
            allocate()
        self._stream.wait_event(after if after is not None else self._device.current.record_event())
        before = PROGRESS.launched
        with self._device.on(self._stream):
            if allocate is not None and after is not None:
                allocate()  # from this stream's own pool
            for work in launch():
                work.wait()
            launched = PROGRESS.arrived(before)
            finish()
            return _Ticket(self._stream.record_event(), launched)

    def synchronize(self) -> None:
        """Have the host wait for the stream."""
        self._stream.synchronize()
