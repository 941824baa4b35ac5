"""What is measured of checkpoints, and what is concluded from the answers: ratios, tables, verdicts, a plot."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import report
from bench.checkpoint.worker import INITIAL, TRAINED, Answer
from bench.contestants import FSDP1, FSDP1_FLAT, FSDP2, FULLSHARD, WRAPPER, WRAPPER_FLAT
from bench.report import mebibytes
from bench.statistics import Spread, paired_ratios

RETURNED, DONE = "returned", "done"
OURS = (FULLSHARD, WRAPPER, WRAPPER_FLAT)
BUDGET_BYTES = 1 << 30  # of extra memory per rank
PICKLE, BROADCAST = f"{FSDP1}+torch.save", f"{FSDP1}+broadcast"


@dataclass(frozen=True)
class Way:
    """One contestant of an operation: the processes of a system, and the method that they are asked for."""

    name: str
    system: str
    method: str


@dataclass(frozen=True)
class Operation:
    """Something that everybody does in turns.

    Attributes:
        name: As in the table, and of the method of all ways that have no other.
        systems: Who does it.
        peers: The way among these that is fastest is what all are measured by.
        target: What fullshard may take of the peer's time. None: any.
        clock: Which time the target is about.
        expect: What must be there afterwards, if it reads: TRAINED or INITIAL.
        optimizer: Whether it reads the optimizer's state.
        made_by: The method that writes what it reads, once. None: it writes, or reads the common file.
        others: Further ways.
        kept: Whether what the last round wrote is looked at.
    """

    name: str
    systems: tuple[str, ...]
    peers: tuple[str, ...] = (FSDP2,)
    target: float | None = 1.0
    clock: str = RETURNED
    expect: str | None = None
    optimizer: bool = False
    made_by: str | None = None
    others: tuple[Way, ...] = ()
    kept: bool = False

    @property
    def ways(self) -> tuple[Way, ...]:
        return (*(Way(system, system, self.name) for system in self.systems), *self.others)

    @property
    def writes(self) -> bool:
        return self.expect is None


OPERATIONS = (
    Operation("save_weights", (*OURS, FSDP2, FSDP1, FSDP1_FLAT), clock=DONE),
    Operation("save", (*OURS, FSDP2, FSDP1, FSDP1_FLAT), clock=DONE),
    # FSDP1's sharded tensors cannot be staged: "torch function 'data_ptr' ... not supported for ShardedTensor".
    Operation("async_save", (FULLSHARD, WRAPPER_FLAT, FSDP2), target=None, clock=DONE),
    Operation("async_save_kept", (FULLSHARD, FSDP2), target=None, clock=DONE),
    Operation("load_weights", (*OURS, FSDP2), expect=TRAINED, made_by="save_weights"),
    Operation("load", (*OURS, FSDP2), expect=TRAINED, optimizer=True, made_by="save"),
    # Neither side waits for the disk by itself, so the target is about the time until the call returns.
    Operation(
        "export",
        (*OURS, FSDP1, FSDP1_FLAT, FSDP2),
        peers=(FSDP1,),
        target=0.8,
        others=(Way(PICKLE, FSDP1, "export_pickle"),),
        kept=True,
    ),
    Operation(
        "import",
        (*OURS, FSDP1, FSDP1_FLAT, FSDP2),
        peers=(FSDP1, BROADCAST),
        target=0.8,
        expect=INITIAL,
        others=(Way(BROADCAST, FSDP1, "import_broadcast"),),
    ),
)
BY_NAME = {operation.name: operation for operation in OPERATIONS}


def slowest(rounds: Sequence[Sequence[Answer]], clock: str) -> list[float]:
    """Per round that counts, the time of the slowest rank: without the first round and the last."""
    return [max(getattr(answer, clock) for answer in ranks) for ranks in rounds[1:-1]]


def _largest(values: Sequence[int | None]) -> int | None:
    return None if not values or None in values else max(value for value in values if value is not None)


def summarise(operation: Operation, found: Mapping[str, Sequence[Sequence[Answer]]]) -> dict[str, Any]:
    """Times, ratios and memory of every way, JSON-ready; no ratio to a peer that did not run."""
    times = {name: {clock: slowest(rounds, clock) for clock in (RETURNED, DONE)} for name, rounds in found.items()}
    present = [name for name in operation.peers if name in times]
    peer = min(present, key=lambda name: statistics.median(times[name][operation.clock]), default=None)
    ways = {}
    for name, rounds in found.items():
        entry: dict[str, Any] = {
            "seconds": times[name],
            "extra_bytes": _largest([answer.extra for ranks in rounds[1:] for answer in ranks]),
            "own_bytes": _largest([answer.own for answer in rounds[-1]]),
            "extra_bytes_by_rank": [_largest([ranks[r].extra for ranks in rounds[1:]]) for r in range(len(rounds[0]))],
        }
        for clock in (RETURNED, DONE):
            entry[f"median_{clock}_seconds"] = statistics.median(times[name][clock])
            if peer is not None:
                entry[f"{clock}_ratio"] = _ratio(times[name][clock], times[peer][clock])
        ways[name] = entry
    wrong = [name for name, rounds in found.items() if any(a.right is False for ranks in rounds for a in ranks)]
    return {"ways": ways, "peer": peer, "wrong": wrong}


def _ratio(mine: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    paired = paired_ratios(mine, theirs)
    whole = statistics.median(mine) / statistics.median(theirs)
    return {"of_medians": whole, "smallest": min(paired), "largest": max(paired)}


def ratio(entry: Mapping[str, Any], clock: str) -> Spread | None:
    """Of a way's time to its peer's, with the smallest and the largest of the rounds in the places of quartiles."""
    found = entry.get(f"{clock}_ratio")
    return None if found is None else Spread(found["of_medians"], found["smallest"], found["largest"])


def table(result: Mapping[str, Any]) -> str:
    """The markdown table, one row per operation and way."""
    header = [
        "what, contestant",
        "call returns, s",
        "/ peer",
        "on disk, s",
        "/ peer",
        "extra memory, MiB",
        "without mapped files, MiB",
    ]
    rows, failures = [], []
    for name, summary in result["operations"].items():
        for way, entry in summary["ways"].items():
            mark = " (peer)" if way == summary["peer"] else ""
            on_disk = _time_cells(entry, DONE) if BY_NAME[name].writes else ["-", "-"]
            rows.append(
                [
                    f"{name}, {way}{mark}",
                    *_time_cells(entry, RETURNED),
                    *on_disk,
                    mebibytes(entry["extra_bytes"]),
                    mebibytes(entry["own_bytes"]),
                ]
            )
        failures += [f"{name}, {way}" for way in summary["not_run"]]
    return report.markdown_table(header, rows, failures)


def _time_cells(entry: Mapping[str, Any], clock: str) -> list[str]:
    found = ratio(entry, clock)
    return [f"{entry[f'median_{clock}_seconds']:.2f}", "-" if found is None else f"{found:.2f}"]


def verdicts(result: Mapping[str, Any]) -> Iterator[str]:
    """Per operation with a target: fullshard's ratios to the peer, and whether they meet it; then memory."""
    for name, summary in result["operations"].items():
        operation = BY_NAME[name]
        found = {way: ratio(summary["ways"].get(way, {}), operation.clock) for way in OURS}
        ratios = {way: spread.median for way, spread in found.items() if spread is not None}
        if operation.target is None or not ratios:
            continue
        missed = "" if max(ratios.values()) <= operation.target else " (missed)"
        listed = ", ".join(f"{way} {value:.2f}" for way, value in ratios.items())
        yield f"{name}: {listed}, of at most {operation.target:.2f} of {summary['peer']}'s time{missed}"
    memory = extra_memory(result)
    if memory:
        most = max(memory, key=lambda label: memory[label])
        missed = "" if memory[most] <= BUDGET_BYTES else " (missed)"
        text = f"{memory[most] / 2**20:.0f} MiB of at most {BUDGET_BYTES / 2**20:.0f}"
        yield f"extra memory per rank: {text}, in {most}{missed}"


def extra_memory(result: Mapping[str, Any], ways: Sequence[str] = OURS) -> dict[str, int]:
    """Of all operations that copy nothing on purpose, which an asynchronous save does: by "operation, way"."""
    return {
        f"{name}, {way}": entry["extra_bytes"]
        for name, summary in result["operations"].items()
        for way, entry in summary["ways"].items()
        if not name.startswith("async_save") and way in ways and entry["extra_bytes"] is not None
    }


# -------------------------------------------------------------------- the page

# First cell of a row in the table of targets, its second one, and the operations it sums up.
TARGET_ROWS = (
    ("checkpoint saved, to FSDP2 with DCP: weights / with AdamW's state", "1.0", ("save_weights", "save")),
    ("checkpoint loaded, the same", "1.0", ("load_weights", "load")),
    ("full export to safetensors, to FSDP1's full state dict and `save_file`", "0.8", ("export",)),
    ("full import from safetensors, to the faster of FSDP1's two ways", "0.8", ("import",)),
)
MEMORY_ROW = "extra memory per rank in all of these; torch's most", "1 GiB"


def target_rows(result: Mapping[str, Any]) -> dict[str, str]:
    """Rows of the table of targets by their first cells, those for which everything was measured."""
    rows = {}
    for first, target, names in TARGET_ROWS:
        cells = [_target_cell(BY_NAME[name], result["operations"].get(name)) for name in names]
        if None not in cells:
            rows[first] = f"| {first} | {target} | {' / '.join(map(str, cells))} |"
    ours, theirs = extra_memory(result), extra_memory(result, (FSDP1, FSDP2))
    if len(rows) == len(TARGET_ROWS) and ours and theirs:
        first, target = MEMORY_ROW
        most, best = max(ours.values()), "**" if max(ours.values()) <= BUDGET_BYTES else ""
        label = max(theirs, key=lambda name: theirs[name])
        text = f"{best}{most / 2**20:.0f} MiB{best}; up to {theirs[label] / 2**20:.0f} MiB ({label})"
        rows[first] = f"| {first} | {target} | {text} |"
    return rows


def _target_cell(operation: Operation, summary: Mapping[str, Any] | None) -> str | None:
    """The ratios of fully_shard and the wrapper's two forms, those that meet the target in bold."""
    found = [ratio((summary or {"ways": {}})["ways"].get(way, {}), operation.clock) for way in OURS]
    if None in found:
        return None
    medians = [spread.median for spread in found if spread is not None]
    target = operation.target or 0.0
    return ", ".join(f"**{value:.2f}**" if value <= target else f"{value:.2f} (missed)" for value in medians)


def update_targets(document: Path, result: Mapping[str, Any]) -> None:
    """Put new figures into the page's table of targets, where it has such rows."""
    rows = target_rows(result)
    lines = document.read_text(encoding="utf-8").split("\n")
    for index, line in enumerate(lines):
        first = line.removeprefix("| ").partition(" | ")[0]
        lines[index] = rows.get(first, line) if line.startswith("| ") else line
    document.write_text("\n".join(lines), encoding="utf-8")


def paragraphs(result: Mapping[str, Any]) -> list[str]:
    """What stands between the markers of one width."""
    settings = result["settings"]
    megabytes = 4 * settings["parameters"] / 1e6
    return [
        f"GPT of {settings['layers']} blocks of width {settings['width']}: {megabytes:,.0f} MB of fp32 parameters, "
        f"{3 * megabytes:,.0f} MB with AdamW's state; {settings['ranks']} gloo ranks, threads per rank: "
        f"{settings['threads']}; {settings['rounds']} rounds of turns, after one to warm up. Files on "
        f"{settings['files_on']}, in the page cache when they are read. A ratio is that of the medians; in brackets "
        "are the smallest and the largest of the rounds. Values were bitwise those saved, every time.",
        table(result),
        *report.against_targets(verdicts(result)),
        *report.could_not_run(result["not_run"]),
    ]


def bars(result: Mapping[str, Any]) -> list[report.Panel]:
    """All times that have a peer, and everyone's memory."""
    times: dict[str, float | Spread] = {}
    memory: dict[str, float | Spread] = {}
    for name, summary in result["operations"].items():
        for way, entry in summary["ways"].items():
            found = ratio(entry, BY_NAME[name].clock)
            if found is not None and way != summary["peer"]:
                times[f"{way}, {name}"] = found
            if entry["extra_bytes"] is not None:
                memory[f"{way}, {name}"] = entry["extra_bytes"] / 2**30
    return [
        report.Panel("time / peer (FSDP2; export, import: FSDP1)", times, 1.0),
        report.Panel("extra memory per rank, GiB", memory, BUDGET_BYTES / 2**30),
    ]
