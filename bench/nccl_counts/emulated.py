"""The emulated accelerator of the tests, which counts streams, events and blocks of memory itself."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.environment import REPOSITORY

NAME = "emulated"


def register() -> None:
    sys.path.insert(0, str(REPOSITORY / "tests"))
    import accelerator

    accelerator.register()
    from accelerator.native import native

    native.check_races(False)  # what is left out touches no memory
    native.stacks(False)


@contextlib.contextmanager
def priorities_noted() -> Iterator[dict[int, int]]:
    """The priority that each stream was asked for with, by its number, of those made in the block."""
    made: dict[int, int] = {}
    original: Any = torch.Stream
    module = torch.get_device_module(NAME)

    class Noting(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            stream = original(*args, **kwargs)
            made[stream.stream_id] = kwargs.get("priority", 0)
            return stream

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

    noting: Any = Noting("Stream", (), {})
    torch.Stream = module.Stream = noting
    try:
        yield made
    finally:
        torch.Stream = module.Stream = original


def counted(step: Callable[[Callable[[], None]], object], unit: int) -> dict[str, float]:
    """What the device counts in a step: peaks in units of so many bytes, and what is made or waited for anew.

    Args:
        step: Calls what it is given between forward and backward.
        unit: Bytes.
    """
    from accelerator.native import native
    from accelerator.races import count

    torch.accelerator.synchronize()
    peaks: list[float] = []
    before = native.memory(0)["allocated"]
    torch.accelerator.reset_peak_memory_stats()

    def phase_ends() -> None:
        peaks.append((native.memory(0)["peak_allocated"] - before) / unit)
        torch.accelerator.reset_peak_memory_stats()

    with count() as counts:
        step(phase_ends)
    phase_ends()
    return {
        "allocator's peak, forward": peaks[0],
        "allocator's peak, backward": peaks[1],
        "waits of the host": len(counts.host_syncs),
        "new events": len(counts.events_made),
        "new streams": len(counts.streams_made),
    }
