"""What tests ask the emulated accelerator for: races, counts of what should be rare, and captures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

_SHOWN = 12  # frames of a stack


@dataclass(frozen=True)
class Access:
    """An operation on some memory, or anything else that has a place in the program.

    Attributes:
        what: Name of the operation.
        where: The stream that it ran on, or the host.
        stack: Its Python frames, innermost first, one per line. Those of backward are the frames of hooks.
    """

    what: str
    where: str
    stack: str

    def __str__(self) -> str:
        frames = self.stack.splitlines()
        shown = "\n".join(f"      {frame}" for frame in frames[:_SHOWN]) or "      (no Python frame)"
        return f"{self.what} on {self.where}\n{shown}"


@dataclass(frozen=True)
class Race:
    """Two accesses to the same bytes that nothing orders, or memory that is handed out while it may still be in use.

    Attributes:
        kind: What they do to each other, as "read after write".
        nbytes: How many bytes it is about.
        first: The earlier one, in the order of the host.
        second: The later one.
    """

    kind: str
    nbytes: int
    first: Access
    second: Access

    def __str__(self) -> str:
        between = "and then, not ordered after it,"
        return f"{self.kind}, {self.nbytes} bytes\n    {self.first}\n    {between}\n    {self.second}"


class Races(AssertionError):  # noqa: N818 - reads as what happened, in a test report
    """What raced, with the stacks of both sides."""

    def __init__(self, races: list[Race]) -> None:
        self.races = races
        super().__init__(f"{len(races)} races:\n" + "\n".join(f"  {race}" for race in races[:10]))


def take_races() -> list[Race]:
    """The races of this process since the last call."""
    from accelerator.native import native

    return [Race(kind, nbytes, Access(*first), Access(*second)) for kind, nbytes, first, second in native.take_races()]


@dataclass
class Counts:
    """What happened in a period.

    Attributes:
        host_syncs: Each time that the host waited for the device.
        events_made: Events that were created, and not recorded again.
        streams_made: Streams that were created.
    """

    host_syncs: list[Access] = field(default_factory=list)
    events_made: list[Access] = field(default_factory=list)
    streams_made: list[Access] = field(default_factory=list)


@contextlib.contextmanager
def count() -> Iterator[Counts]:
    """Count host synchronizations, new events and new streams of the ``with`` block; filled in at its end."""
    from accelerator.native import native

    counts = Counts()
    native.start_counting()
    try:
        yield counts
    finally:
        for name, found in native.stop_counting().items():
            setattr(counts, name, [Access(*access) for access in found])


@contextlib.contextmanager
def capture() -> Iterator[list[Access]]:
    """Treat the ``with`` block as the capture of a graph, on the current stream, which ``replay`` launches again.

    The list has, at the end, all that a real capture forbids: synchronization and queries, memory from outside of the
    capture's pool, pinned allocations, work on streams that are not part of it, events recorded before it, and streams
    that were not joined again.
    """
    from accelerator.native import native

    errors: list[Access] = []
    native.start_capture()
    try:
        yield errors
    finally:
        errors += [Access(*access) for access in native.end_capture()]


def replay() -> None:
    """Launch what the last capture has launched, once more: the same kernels and collectives on the same addresses."""
    from accelerator.native import native

    native.replay()
