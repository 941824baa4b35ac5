"""Traces of steps on the modelled network, beside the exposed time that the simulation itself gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bench.overlap.cells import HOST, STREAMS, Cell, Stepper, even_units, fabric_of, network_of
from bench.overlap.systems import SYSTEMS
from fullshard.debug.tracing.recorder import Trace, own_groups, recorded
from fullshard.planning.simulation.clocks import SkippingClock
from fullshard.planning.simulation.streams import Kernel, SimulatedDevice

RATIOS = (0.3, 1.0, 3.0)  # link time over computation
WARMUP = 3
NAMES = ("fullshard", "fullshard-wrapper PRE")
_KNOWN = [system for system in SYSTEMS if system.name in NAMES]


@dataclass(frozen=True)
class HostMarks:
    """Times of a host that waits."""

    clock: SkippingClock

    def mark(self) -> float:
        """Now."""
        return self.clock.now()

    def seconds(self, mark: float) -> float:
        """The same."""
        return mark


@dataclass(frozen=True)
class StreamMarks:
    """Times at which the current stream is through with what it has."""

    device: SimulatedDevice

    def mark(self) -> tuple[float, tuple[Kernel, ...]]:
        """Now, and what has to be over."""
        return self.device.clock.now(), self.device.current.after

    def seconds(self, mark: tuple[float, tuple[Kernel, ...]]) -> float:
        """When it is."""
        now, kernels = mark
        return max([now, *self.device.ends_of(kernels)])


def compare(ranks: int) -> Iterator[dict[str, Any]]:
    """Exposed seconds of a step by the trace and by the simulation, for each cell and front end."""
    shapes = even_units()
    computation = sum(shape.forward + shape.backward for shape in shapes)
    for device in (HOST, STREAMS):
        for ratio in RATIOS:
            for system in _KNOWN:
                cell = Cell("even", shapes, device, ranks, ratio, "none")
                with fabric_of(cell, network_of(cell)[0]) as fabric:
                    stepper = Stepper(system, cell, fabric)
                    for _ in range(WARMUP):
                        stepper.step()
                    clock: Any = StreamMarks(fabric.device) if device == STREAMS else HostMarks(fabric.device.clock)
                    with recorded(clock) as events:
                        step = stepper.step()
                    trace = Trace()
                    trace.add(0, events, own_groups())
                    traced = sum(each.seconds for each in trace.exposed(0))
                    parts = sum(segment.seconds for segment in trace.segments[0])
                yield {
                    "device": device,
                    "ranks": ranks,
                    "link_over_computation": ratio,
                    "system": system.name,
                    "step_seconds": step,
                    "exposed_seconds": step - computation,
                    "traced_seconds": traced,
                    "parts_seconds": parts,
                }
