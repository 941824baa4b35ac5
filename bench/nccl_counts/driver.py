"""Counts of what one Llama block costs on NCCL: messages, copies, kernels, allocations and calls, beside FSDP2's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from bench import report
from bench.command_line import Options as SharedOptions
from bench.command_line import option
from bench.contestants import CONTESTANTS, FSDP2, FULLSHARD, RAGGED, UNSHARDED
from bench.nccl_counts.blocks import CONFIGURATIONS
from bench.teams import Launch, ask_alone

SYSTEMS = (UNSHARDED, FSDP2, FULLSHARD, RAGGED)
WORKER = "bench.nccl_counts.worker"
TIMEOUT = 300.0
MEGABYTE = 1e6
TOLERANCE = 1e-3  # of what counts as more: padding and a few flags

Counts = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Options(SharedOptions):
    configuration: tuple[str, ...] = option((), "Count only this.", choices=tuple(CONFIGURATIONS))


class Row(NamedTuple):
    """A count, of a block in a steady step unless it says otherwise: what it is of a contestant's; less is better."""

    name: str
    of: Callable[[Counts], float | None]
    spec: str = ".0f"


def forward(*names: str, scale: float = 1.0) -> Callable[[Counts], float]:
    """What happens in a forward: one all-gather, and nothing else."""
    return lambda counts: sum(counts.get(f"{name}, forward", 0.0) for name in names) / scale


def reduction(*names: str, scale: float = 1.0) -> Callable[[Counts], float]:
    """What happens in a backward but not in a forward: a backward is one all-gather and one reduction."""

    def of(counts: Counts) -> float:
        parts = (counts.get(f"{name}, backward", 0.0) - counts.get(f"{name}, forward", 0.0) for name in names)
        return sum(parts) / scale

    return of


def both(*names: str) -> Callable[[Counts], float]:
    return lambda counts: sum(counts.get(f"{name}, {at}", 0.0) for name in names for at in ("forward", "backward"))


def total(*names: str) -> Callable[[Counts], float | None]:
    """What is counted under these names; None if it was not counted."""
    return lambda counts: None if names[0] not in counts else sum(counts[name] for name in names)


def packed_share(counts: Counts) -> float:
    """Of what an all-gather brings, how much is copied afterwards."""
    return counts.get("copy-out written, forward", 0.0) / counts["all-gather bytes, forward"]


KINDS = ("all-gather", "reduce-scatter", "all-reduce")
ROWS = (
    Row("messages per all-gather", forward("all-gather messages")),
    Row("messages per reduce-scatter", reduction("reduce-scatter messages")),
    Row("messages per all-reduce", reduction("all-reduce messages")),
    Row("launches of NCCL, per step", both(*(f"{kind} launches" for kind in KINDS))),
    Row("asynchronous messages, per step", total("asynchronous messages")),
    Row("sent, MB per step", lambda counts: both(*(f"{kind} bytes" for kind in KINDS))(counts) / MEGABYTE),
    Row("packed share of an all-gather", packed_share, ".3f"),
    Row("copy-in, MB per all-gather", forward("copies bytes", scale=MEGABYTE), ".1f"),
    Row("copy-out, MB per all-gather", forward("copy-out bytes", scale=MEGABYTE), ".1f"),
    Row("copied, MB per reduction", reduction("copies bytes", "copy-out bytes", scale=MEGABYTE), ".1f"),
    Row("copy kernels per all-gather", forward("copies kernels", "copy-out kernels")),
    Row("copy kernels per reduction", reduction("copies kernels", "copy-out kernels")),
    Row("strided copy kernels, per step", both("copies strided kernels", "copy-out strided kernels")),
    Row("other kernels, per step", both("other kernels")),
    Row("allocations per all-gather", forward("allocations")),
    Row("allocations per reduction", reduction("allocations")),
    Row("peak of memory in forward, units", total("peak, forward"), ".2f"),
    Row("peak of memory in backward, units", total("peak, backward"), ".2f"),
    Row("communicators of the model", total("communicators")),
    Row("reads of the host, per step", total("reads of the host")),
    Row("calls of Python functions, per step", total("calls of Python functions")),
    Row("calls of C functions, per step", total("calls of C functions")),
)


def without_plain(counts: Counts, plain: Counts) -> dict[str, float]:
    """What a contestant adds to the plain model."""
    own = ("communicators", "peak, ")
    return {name: value - (0 if name.startswith(own) else plain.get(name, 0)) for name, value in counts.items()}


def rows_of(counts: Counts) -> dict[str, float | None]:
    return {row.name: row.of(counts) for row in ROWS}


def count(options: Options) -> tuple[dict[str, Any], dict[str, str]]:
    """Rows by configuration and contestant, each from a process of its own; and why there are none."""
    found: dict[str, dict[str, Any]] = {}
    failures: dict[str, str] = {}
    for configuration in options.configuration or CONFIGURATIONS:
        counts = {}
        for system in SYSTEMS:
            contestant = CONTESTANTS[system]
            launch = Launch.alone(contestant, WORKER, system=contestant.system)
            answer = ask_alone(launch, TIMEOUT, "count", configuration=configuration)
            if "failure" in answer:
                failures[f"{system}, {configuration}"] = answer["failure"]
            else:
                (counts[system],) = answer["answers"]
        plain = counts.pop(UNSHARDED, {})
        found[configuration] = {system: rows_of(without_plain(each, plain)) for system, each in counts.items()}
    return found, failures


def table(found: Mapping[str, Any]) -> str:
    """A row per count, and a column per contestant and configuration."""
    header, rows = ["per block"], []
    for configuration in found:
        header += [f"{configuration}: {FSDP2}", FULLSHARD, RAGGED]
    for row in ROWS:
        cells = [report.cell(found[each].get(s, {}).get(row.name), row.spec) for each in found for s in SYSTEMS[1:]]
        if set(cells) != {"-"}:
            rows.append([row.name, *cells])
    return report.markdown_table(header, rows)


def worse(found: Mapping[str, Any]) -> dict[str, list[str]]:
    """Per configuration the counts in which fullshard has more than FSDP2."""
    lists: dict[str, list[str]] = {}
    for configuration, by_system in found.items():
        ours, theirs = by_system.get(FULLSHARD, {}), by_system.get(FSDP2, {})
        both = [name for name, value in ours.items() if None not in (value, theirs.get(name))]
        lists[configuration] = [name for name in both if ours[name] > theirs[name] * (1 + TOLERANCE)]
    return lists


def run(options: Options) -> None:
    """Count, and write the table, and where fullshard is worse."""
    found, failures = count(options)
    paragraphs = [
        "Llama blocks in their true shapes, CPU tensors, rank 0 of a process group that says it is NCCL "
        "and moves nothing. Parameters are gathered in bf16, gradients reduced in fp32. Counted is what one more block "
        "adds to a step, beyond what it adds to the plain model's.",
        table(found),
        *(
            f"**Worse than FSDP2, {configuration}**: {'; '.join(names) or 'nothing'}."
            for configuration, names in worse(found).items()
        ),
        *report.could_not_run(failures),
    ]
    figures = {"settings": options.settings, "counts": found, "worse": worse(found), "not_run": failures}
    report.publish(options, "nccl_counts", figures, paragraphs)
