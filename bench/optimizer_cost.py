"""What a step of AdamW, and clipping before it, cost on many small sharded parameters: a fake group of 8 ranks on CPU.

A hundred units of eight parameters each: two norms and four small matrices. The yardstick is the same on plain tensors
of the shards' sizes. ``fullshard`` is the optimizer as torch makes it, ``dtensors`` the same after
``localize(optimizer, enable=False)``. ``clip`` is ``torch.nn.utils.clip_grad_norm_``, and for the contestant ``own`` it
is ``fullshard.clip_grad_norm_``.

All contestants live in this process and take turns, with gradients of a backward of their own. Times are CPU time of
the thread, so other processes disturb only by what they do to the caches. Ratios are taken within a round. DTensor
dispatch finds the specs that it has cached by identity, and equal ones of others by comparison, which takes longer: a
turn begins with an empty cache and a step that is not timed, as if each were alone in its process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bench import report
from bench.command_line import Options as SharedOptions
from bench.command_line import option
from bench.contestants import FSDP2, FULLSHARD, distribute, fake_group
from bench.models import PARAMETERS_PER_UNIT, SmallUnit
from bench.report import column
from bench.statistics import paired_spread, spread
from bench.turns import compete

PLAIN, DTENSORS, OWN = "plain", "dtensors", "own"
SYSTEMS = (PLAIN, FSDP2, FULLSHARD, DTENSORS, OWN)
CLIP = "clip"
IMPLEMENTATIONS: Mapping[str, Mapping[str, bool]] = {
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "loop": {"foreach": False, "fused": False},
    CLIP: {},
}
# Contestants that differ only in their step, and only in how they clip.
WITHOUT: Mapping[str, frozenset[str]] = {
    DTENSORS: frozenset({CLIP}),
    OWN: frozenset({"foreach", "fused", "loop"}),
}


@dataclass(frozen=True, kw_only=True)
class Options(SharedOptions):
    units: int = 100
    ranks: int = 8
    rounds: int = 20
    steps_per_round: int = 5
    warmup_steps: int = 4
    only: tuple[str, ...] = option((), choices=SYSTEMS)


class Runner:
    """One contestant: its optimizer, with gradients, warmed up."""

    def __init__(self, name: str, settings: Options) -> None:
        system, _, implementation = name.partition(" ")
        torch.manual_seed(0)
        model = nn.Sequential(*(SmallUnit() for _ in range(settings.units)))
        distribute(FSDP2 if system == FSDP2 else FULLSHARD, model, SmallUnit, torch.device("cpu"))
        model(torch.randn(1, SmallUnit.width)).sum().backward()
        self.parameters: list[Tensor] = list(model.parameters())
        if system == PLAIN:
            self.parameters = [_plain(parameter) for parameter in self.parameters]
        options: Any = IMPLEMENTATIONS[implementation]
        self.model = model
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.parameters, lr=1e-3, **options)
        if system == DTENSORS:
            from fullshard.optim import localize

            localize(self.optimizer, enable=False)
        self.run: Callable[[], Any] = self.optimizer.step
        if implementation == CLIP:
            import fullshard

            clip = fullshard.clip_grad_norm_ if system == OWN else torch.nn.utils.clip_grad_norm_
            self.run = partial(clip, self.parameters, 1e6)  # scaled by 1, so that all turns are alike
        self.steps = settings.steps_per_round
        for _ in range(settings.warmup_steps):
            self.run()

    def turn(self) -> float:
        seconds = []
        forget_specs()
        self.run()
        for _ in range(self.steps):
            start = time.thread_time()
            self.run()
            seconds.append(time.thread_time() - start)
        return statistics.median(seconds)


def forget_specs() -> None:
    """Empty DTensor's caches of how operations are sharded."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache.cache_clear()
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:
        clear()


def _plain(parameter: Any) -> nn.Parameter:
    """A plain parameter like this rank's part of a sharded one, with a gradient."""
    plain = nn.Parameter(parameter.to_local().detach().clone())
    plain.grad = parameter.grad.to_local().clone()
    return plain


def summarize(seconds: Mapping[str, Sequence[float]], parameters: int) -> dict[str, dict[str, Any]]:
    """JSON-ready: per contestant the step, the cost of a parameter, and ratios to plain tensors and to FSDP2."""
    summary: dict[str, dict[str, Any]] = {}
    for name, times in seconds.items():
        entry: dict[str, Any] = {
            "median_step_seconds": spread(times).median,
            "seconds_per_parameter": spread([t / parameters for t in times]).as_json(),
            "seconds": list(times),
        }
        for peer in (PLAIN, FSDP2):
            reference = seconds.get(f"{peer} {name.partition(' ')[2]}")
            entry[f"ratio_to_{peer}"] = None if reference is None else paired_spread(times, reference).as_json()
        summary[name] = entry
    return summary


def table(summary: Mapping[str, Mapping[str, Any]], failures: Mapping[str, str]) -> str:
    columns = (
        column("ms", "median_step_seconds", scale=1e3),
        column("us per parameter", "seconds_per_parameter", scale=1e6),
        column("/ plain tensors", f"ratio_to_{PLAIN}"),
        column("/ FSDP2", f"ratio_to_{FSDP2}"),
    )
    tables = []
    for title, is_clip in (("AdamW step", False), ("gradient clipping", True)):
        of_table = {name: entry for name, entry in summary.items() if (name.partition(" ")[2] == CLIP) is is_clip}
        failed = {name: why for name, why in failures.items() if (name.partition(" ")[2] == CLIP) is is_clip}
        tables.append(report.table(title, of_table, columns, failed))
    return "\n\n".join(tables)


def contestants(systems: Sequence[str] = SYSTEMS) -> list[str]:
    """Each system with each implementation that it has."""
    ways = {system: [way for way in IMPLEMENTATIONS if way not in WITHOUT.get(system, ())] for system in systems}
    return [f"{system} {way}" for system in systems for way in ways[system]]


def run(options: Options) -> None:
    """Compare what a step of AdamW, and clipping, cost on plain and sharded parameters."""
    chosen = [name for name in SYSTEMS if not options.only or name == PLAIN or name in options.only]
    names = contestants(chosen)
    with fake_group(options.ranks):
        seconds, failures = compete(names, lambda name: Runner(name, options), options.rounds)
    parameters = options.units * PARAMETERS_PER_UNIT
    summary = summarize(seconds, parameters)
    paragraphs = [
        f"{parameters} parameters in {options.units} units, rank 0 of {options.ranks} on a fake process group, one "
        f"thread, its CPU time; {options.rounds} rounds of {options.steps_per_round} steps.",
        table(summary, failures),
        *report.could_not_run(failures),
    ]
    figures = {"settings": options.settings, "contestants": summary, "not_run": failures}
    report.publish(options, "optimizer_cost", figures, paragraphs)
