"""A real accelerator in the modelled network: messages are kernels that spin."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from fullshard.planning.simulation.clocks import Passage


class StreamDevice:
    """An accelerator on which messages are kernels on a stream. On CUDA they spin for their time, else they take none.

    Every message waits for what the current stream holds when it is issued, and ``wait`` has the current stream wait
    for an event: what NCCL does. A spinning kernel occupies one thread block.

    Args:
        device: Which.
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self.device = torch.device(device)
        self._link = torch.Stream(device=self.device)
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
        self._link.wait_event(torch.accelerator.current_stream(self.device).record_event())
        with self._link:
            fill()
            self.spin(passage.seconds)
            passage.mark = self._link.record_event()

    def wait(self, passage: Passage) -> None:
        torch.accelerator.current_stream(self.device).wait_event(passage.mark)

    def is_over(self, passage: Passage) -> bool:
        return bool(passage.mark.query())

    def compute(self, seconds: float, work: Callable[[], Any] | None = None) -> Any:
        """A kernel on the current stream, beside what ``work`` enqueues."""
        self.spin(seconds)
        return work() if work is not None else None

    def synchronize(self) -> float:
        torch.accelerator.synchronize(self.device)
        return time.perf_counter()
