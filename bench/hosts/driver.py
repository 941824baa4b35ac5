"""Steps on hosts with a slow link between them: network namespaces of one machine, gloo, CPU ranks.

Real TCP and real gloo; each host has a link of a given rate in both directions, made by token buckets. Contestants
take turns, all with fullshard's malloc setting, and their losses are compared. The lower bound of a cell is the longer
of two times: of computing, as an unsharded rank beside as many others on this machine takes, and of the bytes that a
host has to receive: all parameters but its own, and its gradients; parameters twice if resharded after forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench import report
from bench.command_line import Options as SharedOptions
from bench.command_line import UsageError, option
from bench.contestants import (
    CONTESTANTS,
    DDP,
    FP32,
    FSDP1,
    FSDP2,
    FULLSHARD,
    HSDP,
    KEPT_MEBIBYTES,
    RAGGED,
    TWO_KEPT,
    UNSHARDED,
    WITH_OURS,
    WRAPPER,
    Contestant,
)
from bench.hosts.network import INTERFACE, hosts_on_this_machine, why_not
from bench.models import GPTShape
from bench.report import column
from bench.training.contest import Record, Settings, compete, disagreements, summarize

ALL_UNITS = 1000
PEERS = (f"{FSDP1}{WITH_OURS}", f"{FSDP2}{WITH_OURS}")
KEPT, OURS_KEPT, INT8 = f"{FSDP2}-kept", f"{FULLSHARD}-kept", f"{FULLSHARD}-int8"
OWN = {
    KEPT: Contestant(KEPT, FSDP2, peer=FSDP2, kept=KEPT_MEBIBYTES, keep_last=ALL_UNITS),
    OURS_KEPT: Contestant(OURS_KEPT, FULLSHARD, peer=FSDP2, keep_last=ALL_UNITS),
    INT8: Contestant(INT8, FULLSHARD, peer=FSDP2, quantized="int8"),
}
NAMES = (UNSHARDED, f"{DDP}{WITH_OURS}", *PEERS, TWO_KEPT, KEPT, FULLSHARD, WRAPPER, RAGGED, OURS_KEPT, INT8)
LABELS = {KEPT: "fsdp2, reshard_after_forward=False", OURS_KEPT: "fullshard, reshard_after_forward=False"}
NOT_HSDP = (FSDP1 + WITH_OURS, WRAPPER, INT8, f"{DDP}{WITH_OURS}")


@dataclass(frozen=True, kw_only=True)
class Options(SharedOptions):
    """Two hosts with one rank each, at three rates: about ten minutes on two cores."""

    hosts: int = option(2, "Hosts.")
    per_host: int = option(1, "Ranks on each host.")
    megabits: tuple[int, ...] = option((2000, 500, 200), "Rates of a host's link, in Mbit/s; 0: any.", least=0)
    hsdp: bool = option(False, "Replicas between hosts, shards within them.")
    width: int = 512
    blocks: int = 6
    tokens: int = 512
    microbatches: int = 1
    rounds: int = 5
    steps_per_round: int = 1
    only: tuple[str, ...] = option((), choices=NAMES)


def needed_bytes(options: Options, *, gathers: int, value_bytes: float = 4) -> float:
    """Bytes that a host has to receive in a step: others' parameters so often, and others' sums of its gradients."""
    parameters = GPTShape(options.width, options.blocks, options.tokens).parameters
    others = (options.hosts - 1) / options.hosts
    if options.hsdp:  # gradients of a host are averaged with those of the others
        return 2 * others * parameters * value_bytes
    return (gathers + 1) * others * parameters * value_bytes


def bounds(options: Options, megabits: int, computing: float) -> dict[str, float]:
    """The lower bounds of a step's seconds: of DDP and of FSDP that keeps parameters, of FSDP, and of int8."""
    seconds = {
        "kept": needed_bytes(options, gathers=1),
        "resharded": needed_bytes(options, gathers=2),
        "int8": needed_bytes(options, gathers=2, value_bytes=1 + 4 / 128),
    }
    rate = 1e6 * megabits / 8
    return {name: max(computing, nbytes / rate if rate else 0.0) for name, nbytes in seconds.items()}


def references(records: Mapping[str, Record]) -> dict[str, str]:
    """Everybody is measured by the better of torch's FSDPs that reshard, and by the unsharded model."""
    medians = {name: summary(records[name]) for name in PEERS if name in records}
    found = {"_to_better_peer": min(medians, key=lambda name: medians[name])} if medians else {}
    return found | ({"_to_unsharded": UNSHARDED} if UNSHARDED in records else {})


def summary(record: Record) -> float:
    """The median step."""
    ordered = sorted(second for turn in record.seconds for second in turn)
    return ordered[len(ordered) // 2]


def measure(options: Options, megabits: int) -> dict[str, Any]:
    """One cell: all contestants at one rate."""
    names = [name for name in NAMES if not options.only or name in options.only]
    names = [name for name in names if not (options.hsdp and name in NOT_HSDP)]
    contestants = [OWN.get(name) or CONTESTANTS[name] for name in names]
    settings = Settings(
        what=HSDP if options.hsdp else FP32,
        width=options.width,
        blocks=options.blocks,
        tokens=options.tokens,
        microbatches=options.microbatches,
        ranks=options.hosts * options.per_host,
        threads=1,
        warmup_steps=2,
        rounds=options.rounds,
        steps_per_round=options.steps_per_round,
    )
    with hosts_on_this_machine(options.hosts) as network:
        network.set_rate(megabits or None)
        places = [network.inside(rank // options.per_host) for rank in range(settings.ranks)]
        environment = {"GLOO_SOCKET_IFNAME": INTERFACE}
        records, failures = compete(contestants, settings, "bench.training.trainer", places, environment)
    measured_by = references(records)
    exact = {name: record for name, record in records.items() if name != INT8}
    entries = summarize(records, {name: {e: r for e, r in measured_by.items() if r != name} for name in records})
    computing = entries[UNSHARDED]["median_step_seconds"] if UNSHARDED in entries else 0.0
    wrong = disagreements(exact)
    for name, record in records.items():
        verdict = f"  WRONG by {wrong[name]:.1e}" if name in wrong else ""
        seconds = entries[name]["median_step_seconds"]
        print(
            f"  {megabits or 'any'} Mbit/s  {name:24} {seconds:6.2f} s  loss {record.losses[-1]:.5f}{verdict}",
            flush=True,
        )
    return {
        "megabits": megabits,
        "settings": asdict(settings),
        "bounds": bounds(options, megabits, computing),
        "contestants": entries,
        "losses_that_disagree": wrong,
        "not_run": failures,
    }


def table(cells: Sequence[Mapping[str, Any]]) -> str:
    """A row per rate and contestant."""
    rows = {
        f"{_rate(cell)}, {LABELS.get(name, report.label_of(name))}": {**entry, "bound": _bound(cell, name)}
        for cell in cells
        for name, entry in cell["contestants"].items()
    }
    columns = (
        column("step, s", "median_step_seconds"),
        column("lower bound, s", "bound"),
        column("/ better of FSDP1, FSDP2", "time_ratio_to_better_peer"),
        column("/ unsharded", "time_ratio_to_unsharded"),
        column("final loss", "final_loss", spec=".5f"),
    )
    return report.table("link of a host, contestant", rows, columns)


def _rate(cell: Mapping[str, Any]) -> str:
    return f"{cell['megabits']} Mbit/s" if cell["megabits"] else "not shaped"


def _bound(cell: Mapping[str, Any], name: str) -> float | None:
    if name == UNSHARDED:
        return None
    kind = "int8" if name == INT8 else "kept" if name in (KEPT, OURS_KEPT, f"{DDP}{WITH_OURS}") else "resharded"
    return float(cell["bounds"][kind])


def panels(cells: Sequence[Mapping[str, Any]]) -> list[report.Curves]:
    """Step time over the rate of the link."""
    shaped = [cell for cell in cells if cell["megabits"]]
    shown = (UNSHARDED, *PEERS, FULLSHARD, INT8)
    lines: dict[str, dict[float, float]] = {
        report.label_of(name).replace(", fullshard's malloc setting", ""): {
            cell["megabits"]: cell["contestants"][name]["median_step_seconds"]
            for cell in shaped
            if name in cell["contestants"]
        }
        for name in shown
    }
    lines["lower bound"] = {cell["megabits"]: cell["bounds"]["resharded"] for cell in shaped}
    drawn = {name: line for name, line in lines.items() if line}
    return [report.Curves("seconds of a step", drawn, "Mbit/s of a host's link")] if len(shaped) > 1 else []


def run(options: Options) -> bool:
    if reason := why_not():
        raise UsageError(f"there can be no hosts on this machine: {reason}")
    cells = [measure(options, megabits) for megabits in options.megabits]
    parts = (f"{options.hosts}x{options.per_host}", *(["hsdp"] if options.hsdp else []))
    mesh = "HSDP, shards within a host" if options.hsdp else "sharded over all ranks"
    told = [
        f"{options.hosts} hosts with {options.per_host} rank{'s' * (options.per_host > 1)} each, {mesh}; GPT of width "
        f"{options.width}, {options.blocks} blocks, {options.microbatches} x {options.tokens} tokens per rank, fp32, "
        f"AdamW, {options.rounds} rounds. Hosts are network namespaces of one machine, with token buckets as links; "
        "gloo, CPU ranks. All have fullshard's malloc setting.",
        table(cells),
    ]
    title = f"Steps over the rate of the link, {parts[0]}{' HSDP' * options.hsdp}"
    figures = {"settings": options.settings, "cells": cells}
    marker = ":".join(("hosts", *parts))
    report.publish(options, "hosts", figures, told, title=title, panels=panels(cells), parts=parts, marker=marker)
    return not any(cell["losses_that_disagree"] for cell in cells)
