"""What a step of AdamW costs on many small sharded parameters, on a fake process group of 8 ranks on CPU.

    python -m bench.optimizer_cost
    python -m bench.optimizer_cost --write-document

A hundred units of eight parameters each: two norms and four small matrices. Only ``optimizer.step`` is timed. The
yardstick is the same optimizer on plain tensors of the shards' sizes, which nothing sharded can undercut but by
stepping fewer tensors: that is what ``flat`` does, one tensor per unit. ``fullshard`` is the optimizer as torch makes
it, ``local`` after ``localize(optimizer, flatten=False)``, ``flat`` after ``localize(optimizer)``.

All contestants live in this process and take turns, with gradients of a backward of their own. Times are CPU time of
the thread, so other processes disturb only by what they do to the caches. Ratios are taken within a round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from bench import report
from bench.contestants import FSDP2, FULLSHARD, shard_units, start_fake_group
from bench.environment import Environment, current_environment
from bench.statistics import Spread, paired_spread, spread, turn_order

PLAIN, LOCAL, FLAT = "plain", "local", "flat"
SYSTEMS = (PLAIN, FSDP2, FULLSHARD, LOCAL, FLAT)
IMPLEMENTATIONS: Mapping[str, Mapping[str, bool]] = {
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "loop": {"foreach": False, "fused": False},
}
PARAMETERS_PER_UNIT = 8

console = Console(highlight=False)


class Target(NamedTuple):
    """At most so much: ``contestant`` with ``implementation`` over ``reference`` (contestant, implementation)."""

    contestant: str
    implementation: str
    reference: tuple[str, str]
    limit: float

    @property
    def label(self) -> str:
        return f"{self.contestant} {self.implementation} / {' '.join(self.reference)}"


TARGETS = (
    Target(LOCAL, "foreach", (PLAIN, "foreach"), 1.1),
    Target(LOCAL, "fused", (PLAIN, "fused"), 1.1),
    # Plain tensors cost foreach half of what DTensors cost it (one dispatch per list), so only flat ones can meet it.
    Target(LOCAL, "foreach", (FSDP2, "foreach"), 0.25),
    Target(FLAT, "foreach", (FSDP2, "foreach"), 0.25),
    Target(LOCAL, "fused", (FSDP2, "fused"), 0.25),
    Target(FLAT, "foreach", (PLAIN, "foreach"), 0.2),
    Target(FLAT, "fused", (PLAIN, "foreach"), 0.2),
)


@dataclass(frozen=True)
class Settings:
    units: int
    ranks: int
    rounds: int
    steps_per_round: int
    warmup_steps: int


class SmallUnit(nn.Module):
    """Two norms and four matrices of so few elements that stepping them is nothing but overhead."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.matrices = nn.ParameterList(nn.Parameter(torch.randn(32, 8)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            x = norm(x)
        return x + torch.stack([matrix.sum() for matrix in self.matrices]).sum()


class Runner:
    """One contestant: its optimizer, with gradients, and the times of its turns."""

    def __init__(self, system: str, implementation: str, settings: Settings) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*(SmallUnit() for _ in range(settings.units)))
        sharding = FSDP2 if system == FSDP2 else FULLSHARD
        shard_units(sharding, model, SmallUnit, init_device_mesh("cpu", (settings.ranks,)))
        model(torch.randn(1, 128)).sum().backward()
        self.parameters: list[Tensor] = list(model.parameters())
        if system == PLAIN:
            self.parameters = [_plain(parameter) for parameter in self.parameters]
        options: Any = IMPLEMENTATIONS[implementation]
        self.model = model
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.parameters, lr=1e-3, **options)
        if system in (LOCAL, FLAT):
            from fullshard.optim import localize

            localize(self.optimizer, flatten=system == FLAT)

    def turn(self, steps: int) -> float:
        """Median of the seconds of some steps."""
        seconds = []
        for _ in range(steps):
            start = time.thread_time()
            self.optimizer.step()
            seconds.append(time.thread_time() - start)
        return statistics.median(seconds)


def _plain(parameter: Any) -> nn.Parameter:
    """A plain parameter like this rank's part of a sharded one, with a gradient."""
    plain = nn.Parameter(parameter.to_local().detach().clone())
    plain.grad = parameter.grad.to_local().clone()
    return plain


Name = tuple[str, str]  # of a contestant: system and implementation


def build(systems: Sequence[str], settings: Settings) -> tuple[dict[Name, Runner], dict[str, str]]:
    """Build and warm up the contestants; the second value says why one cannot run."""
    runners: dict[Name, Runner] = {}
    failures: dict[str, str] = {}
    for system in systems:
        for implementation in IMPLEMENTATIONS:
            try:
                runner = Runner(system, implementation, settings)
                runner.turn(settings.warmup_steps)
                runners[system, implementation] = runner
            except Exception as error:
                name = f"{system} {implementation}"
                failures[name] = f"{type(error).__name__}: {error}".splitlines()[0]
                console.print(f"[yellow]{name} cannot run: {failures[name]}")
    return runners, failures


def compete(runners: Mapping[Name, Runner], settings: Settings) -> dict[Name, list[float]]:
    """Seconds per step, per contestant and round."""
    seconds: dict[Name, list[float]] = {name: [] for name in runners}
    labels = {" ".join(name): name for name in runners}
    for index in range(settings.rounds):
        for label in turn_order(list(labels), index):
            seconds[labels[label]].append(runners[labels[label]].turn(settings.steps_per_round))
    return seconds


def ratio(seconds: Mapping[Name, Sequence[float]], name: Name, reference: Name) -> Spread | None:
    """Of two contestants; None if one did not run."""
    if name not in seconds or reference not in seconds:
        return None
    return paired_spread(seconds[name], seconds[reference])


def summarise(seconds: Mapping[Name, Sequence[float]], parameters: int) -> dict[str, dict[str, Any]]:
    """JSON-ready: per contestant the step, the cost of a parameter, and ratios to plain tensors and to FSDP2."""
    summary: dict[str, dict[str, Any]] = {}
    for name, times in seconds.items():
        entry: dict[str, Any] = {
            "median_step_seconds": spread(times).median,
            "seconds_per_parameter": spread([t / parameters for t in times]).as_json(),
            "seconds": list(times),
        }
        for peer in (PLAIN, FSDP2):
            found = ratio(seconds, name, (peer, name[1]))
            entry[f"ratio_to_{peer}"] = None if found is None else found.as_json()
        summary[" ".join(name)] = entry
    return summary


def judge(seconds: Mapping[Name, Sequence[float]]) -> list[dict[str, Any]]:
    """JSON-ready: each target whose contestants ran, what was reached, and whether that will do."""
    verdicts = []
    for target in TARGETS:
        found = ratio(seconds, (target.contestant, target.implementation), target.reference)
        if found is not None:
            met = found.median <= target.limit
            verdicts.append({"target": target.label, "limit": target.limit, **found.as_json(), "met": met})
    return verdicts


def _ratio_text(values: Mapping[str, float] | None) -> str:
    return "-" if values is None else f"{Spread(**values):.2f}"


def table(summary: Mapping[str, Mapping[str, Any]], failures: Mapping[str, str]) -> str:
    header = ["AdamW step", "ms", "us per parameter", "/ plain tensors", "/ FSDP2"]
    rows = []
    for name, entry in summary.items():
        cost = Spread(**{key: 1e6 * value for key, value in entry["seconds_per_parameter"].items()})
        ratios = [_ratio_text(entry[f"ratio_to_{peer}"]) for peer in (PLAIN, FSDP2)]
        rows.append([name, f"{1e3 * entry['median_step_seconds']:.2f}", f"{cost:.2f}", *ratios])
    rows += [[name, "cannot run", "-", "-", "-"] for name in failures]
    return report.markdown_table(header, rows)


def verdict_table(verdicts: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for verdict in verdicts:
        reached = Spread(verdict["median"], verdict["lower_quartile"], verdict["upper_quartile"])
        missed = "" if verdict["met"] else " (missed)"
        rows.append([str(verdict["target"]), f"{verdict['limit']:.2f}", f"{reached:.2f}{missed}"])
    return report.markdown_table(["ratio", "target, at most", "reached"], rows)


def _document_block(
    settings: Settings, tables: Sequence[str], failures: Mapping[str, str], environment: Environment
) -> str:
    lines = [
        f"{settings.units * PARAMETERS_PER_UNIT} parameters in {settings.units} units, rank 0 of {settings.ranks} on a "
        f"fake process group, one thread, its CPU time; {settings.rounds} rounds of {settings.steps_per_round} steps.",
        "",
    ]
    for text in tables:
        lines += [text, ""]
    lines += [*(f"`{name}` could not run: {reason}." for name, reason in failures.items()), ""]
    return "\n".join([*lines, report.provenance(environment)])


def main(
    units: Annotated[int, typer.Option(min=1, help="Units of eight parameters.")] = 100,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of the fake process group.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of turns.")] = 20,
    steps_per_round: Annotated[int, typer.Option(min=1, help="Steps in a turn.")] = 5,
    warmup_steps: Annotated[int, typer.Option(min=1, help="First steps, not timed.")] = 4,
    only: Annotated[list[str] | None, typer.Option(help=f"Run only this of {', '.join(SYSTEMS[1:])}; repeat.")] = None,
    results: Annotated[Path, typer.Option(help="Folder of the JSON.")] = report.RESULTS,
    document: Annotated[Path, typer.Option(help="Markdown page with the table.")] = report.DOCUMENT,
    write_document: Annotated[bool, typer.Option(help="Write the table into the page.")] = False,
) -> None:
    """Compare what a step of AdamW costs on plain, sharded and localized parameters."""
    for name in only or []:
        if name not in SYSTEMS:
            raise typer.BadParameter(f"unknown contestant {name!r}; known are {', '.join(SYSTEMS)}")
    settings = Settings(units, ranks, rounds, steps_per_round, warmup_steps)
    torch.set_num_threads(1)
    # A fake gather leaves whatever bytes were there; denormal numbers among them would cost time.
    torch.set_flush_denormal(True)
    start_fake_group(ranks)
    try:
        systems = [name for name in SYSTEMS if not only or name == PLAIN or name in only]
        runners, failures = build(systems, settings)
        seconds = compete(runners, settings)
    finally:
        dist.destroy_process_group()
    environment = current_environment()
    summary, verdicts = summarise(seconds, units * PARAMETERS_PER_UNIT), judge(seconds)
    path = results / f"optimizer_cost_{environment.name}.json"
    report.write_json(
        path,
        {
            "benchmark": "optimizer_cost",
            "settings": asdict(settings),
            "environment": environment.as_json(),
            "contestants": summary,
            "targets": verdicts,
            "not_run": failures,
        },
    )
    tables = [table(summary, failures), verdict_table(verdicts)]
    for text in tables:
        console.print(f"\n{text}", markup=False, soft_wrap=True)
    if write_document:
        report.update_document(document, "optimizer_cost", _document_block(settings, tables, failures, environment))
    console.print(f"wrote {path.name}")


if __name__ == "__main__":
    typer.run(main)
