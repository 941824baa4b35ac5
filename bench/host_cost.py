"""Host time that sharding adds per unit and step, on a silent process group of 8 ranks on CPU: of two models.

A hundred *tiny units*, each a 16 x 16 linear layer and a norm, which share messages; and blocks of *nine parameters
that each have a message of their own*, as the matrices of a Llama block do on few GPUs. The latter are 16 x 16, too,
and fullshard is told that a message of its own pays at any size: what it calls for each does not depend on the size,
but what copies cost does. At batch 1 the arithmetic costs next to nothing, and the process group, which calls itself
NCCL, moves nothing, for nobody. So the time beyond the plain model's step is the library's own, without NCCL's. All
contestants live in this process and take turns. Two figures: forward and backward alone, and the whole step with AdamW,
where it also matters what kind of tensors the optimizer is given. None of them says much alone.

``fsdp1-flat`` and ``fullshard-wrapper-flat`` are wrappers with ``use_orig_params=False``, ``fsdp1`` and
``fullshard-wrapper`` with True; fullshard's are measured by FSDP1 with the same flag. A flat optimizer has fewer
tensors than the plain model's, which can hide all of the host cost in the second figure.

Host cost per unit = (step - plain step) / units, both medians of the same round; beside it stands the ratio of whole
steps. All have the same implementation of AdamW, ``foreach=True``; torch's default on CPU is another for plain tensors.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed import distributed_c10d

from bench import contestants as who
from bench import report
from bench.command_line import Options as SharedOptions
from bench.command_line import option
from bench.contestants import CONTESTANTS, FSDP2, FULLSHARD, PEER_WITH_SAME_FLAG, distribute
from bench.models import TinyUnit
from bench.report import column
from bench.simulators.silent import silent_ranks
from bench.statistics import paired_spread, spread
from bench.turns import compete
from fullshard.comm import NcclTransport

PLAIN = who.UNSHARDED
SYSTEMS = (PLAIN, who.FSDP1, who.FSDP1_FLAT, FSDP2, FULLSHARD, who.RAGGED, who.WRAPPER, who.WRAPPER_FLAT)
FIGURES = {"forward_backward": "forward + backward", "step": "with optimizer step"}
# The second model, and who runs it.
DIRECT = "nine direct parameters"
OF_DIRECT = (PLAIN, FSDP2, FULLSHARD, who.RAGGED)
PARAMETERS, WIDTH = 9, TinyUnit.width

Summary = Mapping[str, Mapping[str, Any]]  # by contestant and figure


@dataclass(frozen=True, kw_only=True)
class Options(SharedOptions):
    units: int = 100
    direct_units: int = option(30, "Units with nine parameters, each in a message of its own.")
    ranks: int = 8
    rounds: int = 20
    steps_per_round: int = 5
    warmup_steps: int = 3
    only: tuple[str, ...] = option((), choices=SYSTEMS)


class Nine(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(PARAMETERS)))


@contextlib.contextmanager
def each_on_its_own() -> Iterator[None]:
    """Every parameter of fullshard's has a message of its own, and no units share one, as long as the block lasts."""
    changes = {"direct_bytes": 0, "tiny_bytes": -1, "smallest_direct": lambda *_, **__: 0}
    with contextlib.ExitStack() as stack:
        for name, value in changes.items():
            stack.enter_context(mock.patch.object(NcclTransport, name, value))
        yield


class Runner:
    def __init__(self, system: str, options: Options, device: str = "cpu", direct: bool = False) -> None:
        torch.manual_seed(0)
        self.device, self.steps = torch.device(device), options.steps_per_round
        model = nn.Sequential(*(TinyUnit() for _ in range(options.units)))
        if direct:
            model = nn.Sequential(*(Nine() for _ in range(options.direct_units)))
        self.inputs = torch.randn(1, WIDTH).to(self.device)
        contestant = CONTESTANTS[system]
        with mock.patch.dict(os.environ, contestant.environment):
            kind_of_unit, model = type(model[0]), model.to(self.device)
            self.model: nn.Module = distribute(contestant.system, model, kind_of_unit, self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=True)
        for _ in range(options.warmup_steps):
            self.step()

    def step(self) -> tuple[float, float]:
        """Seconds until the end of backward, and until the end of the step (gradients cleared): the host's, which on an
        accelerator does not wait for the device."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        start = time.perf_counter()
        self.model(self.inputs).sum().backward()
        after_backward = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return after_backward - start, time.perf_counter() - start

    def turn(self) -> dict[str, float]:
        times = zip(*(self.step() for _ in range(self.steps)), strict=True)
        return dict(zip(FIGURES, map(statistics.median, times), strict=True))


def measured(systems: Sequence[str], options: Options, device: str = "cpu") -> tuple[dict[str, Any], dict[str, str]]:
    """Everyone's summary of tiny units, and why one cannot run."""
    turns, failures = compete(systems, partial(Runner, options=options, device=device), options.rounds)
    return summarize(turns, options.units), failures


def measured_directly(systems: Sequence[str], options: Options) -> tuple[dict[str, Any], dict[str, str]]:
    """The same of units with nine parameters, each in a message of its own."""

    def build(system: str) -> Runner:
        runner = Runner(system, options, direct=True)
        before = _collectives()
        runner.step()
        sent = _collectives() - before
        least = PARAMETERS * (3 * options.direct_units - 2)  # two units stay unsharded until their backward
        if system == FULLSHARD and sent < least:
            raise RuntimeError(f"expected a message per parameter, {least} in all or more, found {sent}")
        return runner

    with each_on_its_own():
        turns, failures = compete(systems, build, options.rounds)
    return summarize(turns, options.direct_units), failures


def _collectives() -> int:
    return sum(group.collectives for group in distributed_c10d._world.pg_map)


def summarize(turns: Mapping[str, Sequence[Mapping[str, float]]], units: int) -> dict[str, dict[str, Any]]:
    """JSON-ready: per contestant and figure the step, the cost per unit and its ratio to FSDP2's, and, of
    fullshard's wrapper, to FSDP1's with the same flag."""
    summary: dict[str, dict[str, Any]] = {name: {} for name in turns}
    for figure in FIGURES:
        seconds = {name: [one[figure] for one in each] for name, each in turns.items()}
        costs = {
            name: [(mine - base) / units for mine, base in zip(times, seconds[PLAIN], strict=True)]
            for name, times in seconds.items()
            if name != PLAIN
        }
        for name, times in seconds.items():
            entry: dict[str, Any] = {"median_step_seconds": spread(times).median, "seconds": times}
            if name in costs:
                entry["host_seconds_per_unit"] = spread(costs[name]).as_json()
                for label, peer in (("fsdp2", FSDP2), ("fsdp1", PEER_WITH_SAME_FLAG.get(name))):
                    if peer in costs:
                        entry[f"host_cost_ratio_to_{label}"] = paired_spread(costs[name], costs[peer]).as_json()
            summary[name][figure] = entry
    return summary


def whole_step_ratio(summary: Summary, name: str, figure: str) -> dict[str, float] | None:
    """A contestant's whole step over FSDP2's of the same round, a spread as JSON; None if one of them did not run."""
    seconds = [report.value_under(summary, (system, figure, "seconds")) for system in (name, FSDP2)]
    return None if None in seconds else paired_spread(*seconds).as_json()


def table(summary: Summary, failures: Mapping[str, str]) -> str:
    columns, rows = [], {}
    for figure, label in FIGURES.items():
        columns += [
            column(f"{label}: step, ms", figure, "median_step_seconds", spec=".1f", scale=1e3),
            column("per unit beyond plain, us", figure, "host_seconds_per_unit", spec=".0f", scale=1e6),
            column("/ FSDP2", figure, "host_cost_ratio_to_fsdp2"),
            column("whole step / FSDP2", figure, "whole_step_ratio"),
            column("/ FSDP1, same flag", figure, "host_cost_ratio_to_fsdp1"),
        ]
    for name, entry in summary.items():
        whole = {figure: {"whole_step_ratio": whole_step_ratio(summary, name, figure)} for figure in entry}
        rows["plain" if name == PLAIN else name] = {figure: entry[figure] | whole[figure] for figure in entry}
    return report.table("contestant", rows, columns, failures)


def run(options: Options) -> None:
    """Compare the host time per unit and step of fullshard and its peers."""
    with silent_ranks(options.ranks):
        chosen = [name for name in SYSTEMS if not options.only or name == PLAIN or name in options.only]
        summary, failures = measured(chosen, options)
        direct, failed = measured_directly([name for name in chosen if name in OF_DIRECT], options)
    paragraphs = [
        f"At batch 1, rank 0 of {options.ranks} on a process group that moves nothing, one thread; {options.rounds} "
        f"rounds of {options.steps_per_round} steps.",
        f"{options.units} tiny units (linear 16 x 16 and norm):",
        table(summary, failures),
        f"{options.direct_units} units of nine parameters, each sent in a message of its own (9 messages where FSDP2 "
        "has 1):",
        table(direct, failed),
        *report.could_not_run({**failures, **{f"{name}, {DIRECT}": why for name, why in failed.items()}}),
    ]
    figures = {"settings": options.settings, "contestants": summary, "not_run": failures}
    report.publish(options, "host_cost", {**figures, "direct": {"contestants": direct, "not_run": failed}}, paragraphs)
