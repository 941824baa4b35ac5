"""One cell of the tables: a number of ranks, a bandwidth, and everyone's step in turns."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from bench.models import GPT, Block, GPTShape, batch_of, next_token_loss
from bench.overlap.bound import StepBound, UnitCosts, Window, keep_last, scheduled_seconds, step_bound
from bench.overlap.systems import SYSTEMS, ModelledUnit, System, UnitShape, build, modelled_model
from bench.statistics import Spread, spread
from bench.turns import each_that_runs, take_turns
from fullshard.planning.simulation.clocks import HostDevice, SkippingClock
from fullshard.planning.simulation.group import Fabric
from fullshard.planning.simulation.network import Network
from fullshard.planning.simulation.ranks import modelled_ranks
from fullshard.planning.simulation.streams import SimulatedDevice, simulated_streams

SMALL_GPT = GPTShape(width=256, blocks=4, tokens=512)
PLAIN = "plain"
ELEMENT = 4  # bytes; everything is fp32
LATENCY, HOP_LATENCY = 20e-6, 5e-6
HOST, STREAMS = "host", "streams"
CLOCKS: Mapping[str, Callable[[], SkippingClock]] = {
    "thread": SkippingClock,
    "process": lambda: SkippingClock(time.perf_counter),
    "none": lambda: SkippingClock(lambda: 0.0),  # the host's own work takes no time: what the schedule alone takes
}


def even_units(units: int = 8, numel: int = 1024 * 320) -> tuple[UnitShape, ...]:
    """Equal ones: 30 ms of computation, a third of it forward."""
    return (UnitShape(numel, 0.010, 0.020),) * units


def uneven_units(groups: int = 2, numel: int = 1024 * 320) -> tuple[UnitShape, ...]:
    """Two that compute much and weigh little, two that weigh three times as much and compute a quarter, and so on: what
    dense and sparse layers, or an encoder and its embeddings, are to one another."""
    dense, sparse = UnitShape(numel, 0.016, 0.032), UnitShape(3 * numel, 0.004, 0.008)
    return (dense, dense, sparse, sparse) * groups


@dataclass(frozen=True)
class Cell:
    """One column of the table.

    Args:
        model: Its name.
        units: What is trained; none: a GPT that computes.
        device: HOST: as CPU ranks, which block where they wait; STREAMS: see ``fullshard.planning.simulation``.
        ranks: N.
        ratio: Link time over computation at 8 ranks and without latencies: below 1 the computation takes longer.
        clock: See ``CLOCKS``.
    """

    model: str
    units: tuple[UnitShape, ...]
    device: str
    ranks: int
    ratio: float
    clock: str = "thread"


@dataclass
class Measured:
    """What a cell gave. Seconds.

    Args:
        costs: Of the units.
        network: Its link.
        steps: Median step per contestant and round.
        failures: Why a contestant has no steps.
        resident: Bytes of a unit that stays gathered beside the others.
    """

    costs: list[UnitCosts]
    network: Network
    steps: dict[str, list[float]]
    failures: dict[str, str]
    resident: int = 0

    @property
    def bound(self) -> StepBound:
        """T_LB of all that gather no more than one unit ahead."""
        return self.bound_of(1)

    def bound_of(self, depth: int) -> StepBound:
        """T_LB with the memory that gathering ``depth`` of the largest units ahead needs, at least one."""
        return step_bound(self.costs, self.window(max(1, depth)).memory(self.costs) + self.resident)

    def window(self, depth: int, reductions: int = 1) -> Window:
        """Of a schedule that gathers so many of the largest units ahead."""
        return Window(depth, depth * max(cost.nbytes for cost in self.costs), reductions)

    def scheduled(self, depth: int = 1, reductions: int = 1) -> float:
        """Seconds of fullshard's schedule, if nothing else costs time."""
        window = self.window(depth, reductions)
        return scheduled_seconds(keep_last(self.costs, window), window)

    def over_bound(self, name: str) -> Spread:
        """Step time over T_LB; over that of its own memory if it gathers more than one unit ahead."""
        depth = next((system.depth for system in SYSTEMS if system.name == name), None)
        least = self.bound_of(1 if depth is None else depth).seconds
        return spread([seconds / least for seconds in self.steps[name]])

    def exposed(self, name: str) -> Spread:
        """Seconds of the step beyond its computation."""
        return spread([seconds - self.bound.computation for seconds in self.steps[name]])


class Stepper:
    """A contestant in a cell; None: the plain model."""

    _run: Callable[[], torch.Tensor]

    def __init__(self, system: System | None, cell: Cell, fabric: Fabric) -> None:
        self.device = fabric.device
        torch.manual_seed(0)
        model: nn.Module = modelled_model(cell.units, self.device) if cell.units else GPT(SMALL_GPT)
        unit_type = ModelledUnit if cell.units else Block
        self.model = model if system is None else build(system, model, unit_type, self.device)
        inputs, batch = torch.zeros(4, requires_grad=True), batch_of(SMALL_GPT, 0, 0)
        self._run = lambda: self.model(inputs).sum() if cell.units else next_token_loss(self.model, batch)

    def step(self) -> float:
        """Seconds of forward and backward, until everything is through; gradients are dropped afterwards."""
        begun = self.device.synchronize()
        self._run().backward()
        seconds: float = self.device.synchronize() - begun
        for parameter in self.model.parameters():
            parameter.grad = None
        return seconds

    def turn(self, steps: int) -> float:
        """The median of some steps."""
        return spread([self.step() for _ in range(steps)]).median


def measure(cell: Cell, systems: Sequence[System], rounds: int, steps: int = 1, warmup: int = 3) -> Measured:
    """Build everyone on one fabric and let them take turns."""
    network, costs = network_of(cell)
    computation = sum(cost.forward + cost.backward for cost in costs)
    result = Measured(costs, network, {}, {}, resident=0 if cell.units else costs[0].nbytes)
    with fabric_of(cell, network) as fabric:
        known = {system.name: system for system in systems}

        def warmed_up(name: str) -> Stepper:
            stepper = Stepper(known[name], cell, fabric)
            for _ in range(warmup):
                stepper.step()
            return stepper

        steppers, result.failures = each_that_runs(known, warmed_up)
        if not cell.units:
            steppers[PLAIN] = Stepper(None, cell, fabric)
        result.steps = take_turns({name: partial(one.turn, steps) for name, one in steppers.items()}, rounds)
    if not cell.units:  # the units' computation adds up to what the plain model took in the same rounds
        factor = spread(result.steps.pop(PLAIN)).median / computation
        result.costs = [replace(c, forward=factor * c.forward, backward=factor * c.backward) for c in costs]
    return result


def network_of(cell: Cell) -> tuple[Network, list[UnitCosts]]:
    """The network of a cell, and what its units cost on it."""
    costs = [UnitCosts(u.forward, u.backward, 0, 0, 0, u.numel * ELEMENT) for u in cell.units] or _timed_costs(cell)
    computation = sum(cost.forward + cost.backward for cost in costs)
    bandwidth = sum(cost.nbytes * 3 for cost in costs) * 7 / 8 / (cell.ratio * computation)
    like = "nccl" if cell.device == STREAMS else "collective"
    network = Network(bandwidth, latency=LATENCY, hop_latency=HOP_LATENCY, like=like)  # type: ignore[arg-type]
    return network, [_on(network, cost, cell.ranks) for cost in costs]


def _on(network: Network, cost: UnitCosts, ranks: int) -> UnitCosts:
    seconds = network.seconds(cost.nbytes * (ranks - 1) / ranks, ranks)
    return replace(cost, gather=seconds, regather=seconds, reduce=seconds)


def _timed_costs(cell: Cell) -> list[UnitCosts]:
    """Of the GPT's units, from the plain model on this machine: the root's computation is that of its subgroup.

    The root, which holds embeddings and head, is gathered first and kept.
    """
    clock = CLOCKS[cell.clock]()
    marks: list[float] = []
    model = GPT(SMALL_GPT)
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: marks.append(clock.now()))
        block.register_full_backward_hook(lambda *_: marks.append(clock.now()))
    batch, count = batch_of(SMALL_GPT, 0, 0), len(model.blocks)
    runs = []
    for _ in range(9):
        marks.clear()
        begun = clock.now()
        loss = next_token_loss(model, batch)
        turn = clock.now()
        loss.backward()
        ends = [begun, *marks[1:count], turn, *marks[count:-1], clock.now()]
        runs.append([after - before for before, after in itertools.pairwise(ends)])
        model.zero_grad(set_to_none=True)
    seconds = [spread(column).median for column in zip(*runs[2:], strict=True)]
    forward, backward = seconds[:count], seconds[count:][::-1]
    sizes = [sum(p.nbytes for p in block.parameters()) for block in model.blocks]
    root = sum(p.nbytes for p in model.parameters()) - sum(sizes)
    costs = [UnitCosts(f, b, 0, 0, 0, size) for f, b, size in zip(forward, backward, sizes, strict=True)]
    return [UnitCosts(0.0, 0.0, 0, 0, 0, root), *costs]


@contextlib.contextmanager
def fabric_of(cell: Cell, network: Network) -> Iterator[Fabric]:
    """Be a rank of the cell as long as the block lasts."""
    clock = CLOCKS[cell.clock]()
    with contextlib.ExitStack() as stack:
        device: Any = HostDevice(clock)
        if cell.device == STREAMS:
            device = SimulatedDevice(clock)
            stack.enter_context(simulated_streams(device))
        yield stack.enter_context(modelled_ranks(cell.ranks, network, device=device))
