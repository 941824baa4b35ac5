"""Steps on hosts with a slow link between them: network namespaces of one machine, gloo, CPU ranks.

Real TCP and real gloo; each host has a link of a given rate in both directions, made by token buckets. Contestants
take turns, all with fullshard's malloc setting, and their losses are compared. The lower bound of a contestant is the
longer of two times: of computing, as an unsharded rank beside as many others on this machine takes, and of the bytes
that a host has to receive with the contestant's settings: all parameters but its own, those that are resharded after
forward twice, and its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench import report
from bench.command_line import Options as SharedOptions
from bench.command_line import UsageError, option
from bench.contestants import (
    BF16,
    CONTESTANTS,
    DDP,
    FP32,
    FSDP1,
    FSDP2,
    FULLSHARD,
    HSDP,
    KEPT_MEBIBYTES,
    KEPT_UNITS,
    PREFETCHES,
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
from bench.results import Results
from bench.training.contest import Record, Settings, compete, disagreements, faster_of, summarize

ALL_UNITS = 1000
PEERS = (f"{FSDP1}{WITH_OURS}", f"{FSDP2}{WITH_OURS}")
KEPT, OURS_KEPT, AHEAD = f"{FSDP2}-kept", f"{FULLSHARD}-kept", f"{FULLSHARD}-ahead"
QUANTIZED = {f"{FULLSHARD}-int8": "int8", f"{FULLSHARD}-fp8": "fp8"}
INT8 = next(iter(QUANTIZED))
OWN = {
    UNSHARDED: replace(CONTESTANTS[UNSHARDED], kept=KEPT_MEBIBYTES),
    KEPT: Contestant(KEPT, FSDP2, peer=FSDP2, kept=KEPT_MEBIBYTES, keep_last=ALL_UNITS),
    OURS_KEPT: Contestant(OURS_KEPT, FULLSHARD, peer=FSDP2, keep_last=ALL_UNITS),
    AHEAD: Contestant(AHEAD, FULLSHARD, peer=FSDP2, ahead=2),
    **{name: Contestant(name, FULLSHARD, peer=FSDP2, quantized=form) for name, form in QUANTIZED.items()},
}
PREFETCHING = {
    f"{system}-{name}{WITH_OURS if kept else ''}": replace(
        CONTESTANTS[f"{system}-{name}"], name=f"{system}-{name}{WITH_OURS if kept else ''}", kept=kept
    )
    for name in PREFETCHES
    for system, kept in ((FSDP1, KEPT_MEBIBYTES), (WRAPPER, 0))
}
PREFETCH = "prefetch"
BY_PEER, BY_UNSHARDED, BY_NONE = "_to_better_peer", "_to_unsharded", "_to_no_prefetch"
_EXACT = (UNSHARDED, f"{DDP}{WITH_OURS}", *PEERS, TWO_KEPT, KEPT, FULLSHARD, WRAPPER, RAGGED, OURS_KEPT, AHEAD)
NAMES = {
    FP32: (*_EXACT, *QUANTIZED),
    BF16: (UNSHARDED, *PEERS, TWO_KEPT, FULLSHARD, WRAPPER),
    HSDP: (UNSHARDED, PEERS[1], TWO_KEPT, KEPT, FULLSHARD, RAGGED, OURS_KEPT, AHEAD),
    PREFETCH: (UNSHARDED, *PREFETCHING),
}
# In the first thing that is said about speed.
SUMMARIZED = "hosts_2x1"
SHOWN = {
    UNSHARDED: "unsharded, no communication",
    f"{DDP}{WITH_OURS}": "DDP",
    f"{FSDP1}{WITH_OURS}": "FSDP1",
    f"{FSDP2}{WITH_OURS}": "FSDP2",
    TWO_KEPT: "FSDP2, last two units not resharded after forward",
    KEPT: "FSDP2, `reshard_after_forward=False`",
    FULLSHARD: "fullshard",
    OURS_KEPT: "fullshard, `reshard_after_forward=False`",
    INT8: "fullshard, int8",
}
LABELS = {
    KEPT: "fsdp2, reshard_after_forward=False",
    OURS_KEPT: "fullshard, reshard_after_forward=False",
    AHEAD: "fullshard, two units prefetched",
}
MODES = {
    FP32: "sharded over all ranks; fp32",
    BF16: "sharded over all ranks; parameters gathered in bf16, gradients reduced in fp32",
    HSDP: "HSDP, shards within a host; fp32",
    PREFETCH: "sharded over all ranks; fp32; BACKWARD_PRE, BACKWARD_POST and no prefetch in backward",
}


@dataclass(frozen=True, kw_only=True)
class Options(SharedOptions):
    """Two hosts with one rank each, at three rates: about a quarter of an hour on two cores."""

    hosts: int = option(2, "Hosts.")
    per_host: int = option(1, "Ranks on each host.")
    megabits: tuple[int, ...] = option((2000, 500, 200), "Rates of a host's link, in Mbit/s; 0: any.", least=0)
    mode: str = option(FP32, "How it is sharded and sent.", choices=tuple(NAMES))
    width: int = 512
    blocks: int = 6
    tokens: int = 512
    microbatches: int = 1
    rounds: int = 5
    steps_per_round: int = 1
    only: tuple[str, ...] = option((), choices=tuple(dict.fromkeys(name for names in NAMES.values() for name in names)))


def units_kept(contestant: Contestant, blocks: int) -> int:
    """The blocks that stay unsharded from forward to backward."""
    by_itself = contestant.system in (FULLSHARD, WRAPPER) and contestant.prefetch in (None, "pre")
    return min(blocks, contestant.keep_last or by_itself * (KEPT_UNITS + max(0, contestant.ahead - 1)))


def needed_bytes(options: Options, contestant: Contestant) -> float:
    """Bytes that a host has to receive in a step, if each crosses its link once.

    The others' parameters, those of blocks that are resharded after forward twice, in each microbatch; and the others'
    sums of its gradients.
    """
    shape = GPTShape(options.width, options.blocks, options.tokens)
    per_block = (12 * shape.width + 13) * shape.width
    others = (options.hosts - 1) / options.hosts
    sent = 1 + 4 / 128 if contestant.quantized else 4
    if contestant.system == UNSHARDED:
        return 0.0
    if contestant.system == DDP or options.mode == HSDP:  # gradients of a host are averaged with those of the others
        return 2 * others * shape.parameters * sent
    gathered = shape.parameters + (options.blocks - units_kept(contestant, options.blocks)) * per_block
    gathered_bytes = 2 if options.mode == BF16 else sent
    return others * (options.microbatches * gathered * gathered_bytes + shape.parameters * sent)


def bound(options: Options, contestant: Contestant, megabits: int, computing: float) -> float:
    return max(computing, needed_bytes(options, contestant) / (1e6 * megabits / 8) if megabits else 0.0)


def references(contestant: Contestant, records: Mapping[str, Record]) -> dict[str, str]:
    """By the end of the ratios' names: whom a contestant is measured by."""
    found = {
        BY_PEER: faster_of(PEERS, records),
        BY_UNSHARDED: UNSHARDED,
        BY_NONE: contestant.prefetch and contestant.name.replace(f"-{contestant.prefetch}", "-none"),
    }
    return {end: name for end, name in found.items() if name in records and name != contestant.name}


def measure(options: Options, megabits: int) -> dict[str, Any]:
    able = CONTESTANTS | OWN | PREFETCHING
    contestants = [able[name] for name in NAMES[options.mode] if not options.only or name in options.only]
    settings = Settings(
        what=FP32 if options.mode == PREFETCH else options.mode,
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
        records, failures = compete(contestants, settings, places, environment)
    exact = {name: record for name, record in records.items() if name not in QUANTIZED}
    entries = summarize(records, {each.name: references(each, records) for each in contestants})
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
        "contestants": entries,
        "losses_that_disagree": wrong,
        "not_run": failures,
    }


def add_bounds(options: Options, cells: Sequence[Mapping[str, Any]]) -> None:
    """Add the lower bounds, with the shortest time of computing of all cells: it does not depend on the link."""
    able, unsharded = CONTESTANTS | OWN | PREFETCHING, [cell["contestants"].get(UNSHARDED) for cell in cells]
    computing = min((entry["median_step_seconds"] for entry in unsharded if entry), default=0.0)
    for cell in cells:
        for name, entry in cell["contestants"].items():
            least = bound(options, able[name], cell["megabits"], computing)
            if name != UNSHARDED and least:
                entry |= {"bound": least, "of_bound": entry["median_step_seconds"] / least}


def table(cells: Sequence[Mapping[str, Any]]) -> str:
    rows = {f"{rate(cell)}, {_label(name)}": entry for cell in cells for name, entry in cell["contestants"].items()}
    headers = {
        f"time_ratio{BY_PEER}": "/ better of FSDP1, FSDP2",
        f"time_ratio{BY_UNSHARDED}": "/ unsharded",
        f"time_ratio{BY_NONE}": "/ without prefetch",
        f"counted_ratio{BY_NONE}": "peak / without prefetch",
    }
    columns = (
        column("step, s", "median_step_seconds"),
        column("/ its lower bound", "of_bound"),
        *(column(header, key) for key, header in headers.items() if any(key in entry for entry in rows.values())),
        report.mebibytes("counted peak, MiB", "counted_bytes"),
        column("final loss", "final_loss", spec=".5f"),
    )
    return report.table("link of a host, contestant", rows, columns)


def rate(cell: Mapping[str, Any]) -> str:
    return f"{cell['megabits']} Mbit/s" if cell["megabits"] else "unlimited"


def _label(name: str) -> str:
    """All have the setting of malloc, so it says nothing."""
    return LABELS.get(name) or report.label_of(name.replace(WITH_OURS, ""))


def plot(cells: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Seconds of a step over the rate of the link, of those shown but for two; nothing of a single rate."""
    shaped = [cell for cell in cells if cell["megabits"] and FULLSHARD in cell["contestants"]]
    if len(shaped) < 2:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6.4, 4.4), layout="constrained")
    for index, name in enumerate(name for name in SHOWN if name not in (TWO_KEPT, OURS_KEPT)):
        points = {
            cell["megabits"]: cell["contestants"][name]["median_step_seconds"]
            for cell in shaped
            if name in cell["contestants"]
        }
        ours = name in (FULLSHARD, INT8)
        color = "#00796b" if ours else "#777777" if name == UNSHARDED else "#d1495b"
        style = {"linestyle": ("-", "--", ":", "-.")[index % 4], "marker": "osv^"[index % 4], "markersize": 4}
        axis.plot(list(points), list(points.values()), color=color, label=SHOWN[name].replace("`", ""), **style)
    bounds = [cell["contestants"][FULLSHARD]["bound"] for cell in shaped]
    rates = [cell["megabits"] for cell in shaped]
    axis.plot(rates, bounds, color="#00796b", linewidth=0.8, label="fullshard, lower bound")
    axis.set(xscale="log", xlabel="bandwidth of a host's link, Mbit/s", ylabel="seconds of a step", title=title)
    axis.set_ylim(bottom=0)
    axis.set_xticks(rates, [f"{each:,g}" for each in rates])
    axis.minorticks_off()
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    figure.savefig(path, dpi=130, metadata={"Software": None})
    pyplot.close(figure)


def summary(document: Path) -> Callable[[Results], str]:
    """What stands on a page: seconds of a step by rate, with the plot."""

    def write(results: Results) -> str:
        if SUMMARIZED not in results:
            return "not measured"
        stored = results[SUMMARIZED]
        rows, kept = [], []
        for cell in stored.result["cells"]:
            found = cell["contestants"]
            ours = found[FULLSHARD]
            seconds = [report.cell(found.get(name, {}).get("median_step_seconds")) for name in SHOWN]
            ratio = report.cell(ours.get("time_ratio_to_better_peer"))
            rows.append([rate(cell), *seconds, report.cell(ours["bound"]), ratio])
            if KEPT in found:
                kept.append(f"{ours['median_step_seconds'] / found[KEPT]['median_step_seconds']:.2f}")
        header = ["link bandwidth", *SHOWN.values(), "lower bound of fullshard", "fullshard / faster of FSDP1, FSDP2"]
        told = (
            f"Of the time of FSDP2 with `reshard_after_forward=False`, fullshard as it comes takes {', '.join(kept)}."
        )
        image = report.image_link(stored.path.with_suffix(".png"), document, stored.result["page"]["title"])
        return "\n\n".join([report.markdown_table(header, rows), told, image, report.provenance(stored.environment)])

    return write


def run(options: Options) -> bool:
    if reason := why_not():
        raise UsageError(f"there can be no hosts on this machine: {reason}")
    cells = [measure(options, megabits) for megabits in options.megabits]
    add_bounds(options, cells)
    accumulated = [f"{options.microbatches}-microbatches"] if options.microbatches > 1 else []
    parts = [f"{options.hosts}x{options.per_host}", *([options.mode] if options.mode != FP32 else []), *accumulated]
    steps = f"{options.steps_per_round} step{'s' * (options.steps_per_round > 1)}"
    told = [
        f"{options.hosts} hosts with {options.per_host} rank{'s' * (options.per_host > 1)} each, "
        f"{MODES[options.mode]}; GPT of width {options.width}, {options.blocks} blocks, {options.microbatches} x "
        f"{options.tokens} tokens per rank, AdamW; medians of {options.rounds} rounds of {steps}, and ratios within a "
        "round with their quartiles. Hosts are network namespaces of one machine, with token buckets as links; gloo, "
        "CPU ranks. All have fullshard's malloc setting.",
        table(cells),
    ]
    title = f"Step time over link bandwidth, {' '.join(parts)}"
    figures = {"settings": options.settings, "cells": cells}
    marker = ":".join(("hosts", *parts))
    draw = partial(plot, cells, title=title)
    report.publish(options, "hosts", figures, told, title=title, plot=draw, parts=parts, marker=marker)
    return not any(cell["losses_that_disagree"] for cell in cells)
