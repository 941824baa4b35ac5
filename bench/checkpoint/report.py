"""What is measured of checkpoints, and what is concluded from the answers: ratios and the table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench import report
from bench.checkpoint.worker import INITIAL, TRAINED, Answer
from bench.contestants import FSDP1, FSDP2, FULLSHARD, OURS, WRAPPER_FLAT
from bench.report import column, mebibytes
from bench.statistics import Spread, paired_ratios

RETURNED, DONE = "returned", "done"
BROADCAST = f"{FSDP1}+broadcast"


@dataclass(frozen=True)
class Operation:
    """Something that everybody does in turns."""

    name: str  # as in the table, and of the method of all contestants that have no other
    systems: tuple[str, ...]  # who does it
    peers: tuple[str, ...] = (FSDP2,)  # the fastest of them is what all are measured by
    clock: str = RETURNED  # which time the fastest is chosen by
    expect: str | None = None  # what must be there afterwards, if it reads: TRAINED or INITIAL
    optimizer: bool = False  # whether it reads the optimizer's state
    made_by: str | None = None  # the method that writes what it reads, once; None: it writes, or reads the common file
    others: Mapping[str, str] = field(default_factory=dict)  # further contestants: FSDP1 with another method
    kept: bool = False  # whether what the last round wrote is looked at

    @property
    def ways(self) -> dict[str, tuple[str, str]]:
        """By contestant: the system whose processes are asked, and the method that they are asked for."""
        own = {system: (system, self.name) for system in self.systems}
        return {**own, **{name: (FSDP1, method) for name, method in self.others.items()}}

    @property
    def writes(self) -> bool:
        return self.expect is None


OPERATIONS = (
    Operation("save_weights", (*OURS, FSDP2, FSDP1), clock=DONE),
    Operation("save", (*OURS, FSDP2, FSDP1), clock=DONE),
    # FSDP1's sharded tensors cannot be staged: "torch function 'data_ptr' ... not supported for ShardedTensor".
    Operation("async_save", (FULLSHARD, WRAPPER_FLAT, FSDP2), clock=DONE),
    Operation("async_save_kept", (FULLSHARD, FSDP2), clock=DONE),
    Operation("load_weights", (*OURS, FSDP2), expect=TRAINED, made_by="save_weights"),
    Operation("load", (*OURS, FSDP2), expect=TRAINED, optimizer=True, made_by="save"),
    # Neither side waits for the disk by itself, so this is about the time until the call returns.
    Operation("export", (*OURS, FSDP1, FSDP2), peers=(FSDP2, FSDP1), kept=True),
    Operation(
        "import",
        (*OURS, FSDP1, FSDP2),
        peers=(FSDP2, FSDP1, BROADCAST),
        expect=INITIAL,
        others={BROADCAST: "import_broadcast"},
    ),
)


def ratio_of(mine: Sequence[float], theirs: Sequence[float]) -> Spread:
    """That of the medians, with the smallest and the largest of the rounds in the places of quartiles."""
    paired = paired_ratios(mine, theirs)
    return Spread(statistics.median(mine) / statistics.median(theirs), min(paired), max(paired))


def summarize(operation: Operation, found: Mapping[str, Sequence[Sequence[Answer]]]) -> dict[str, Any]:
    """Times of the slowest rank in all rounds but the first, ratios and memory of every contestant, JSON-ready; no
    ratio to a peer that did not run."""
    times = {
        name: {clock: [max(getattr(a, clock) for a in ranks) for ranks in rounds[1:]] for clock in (RETURNED, DONE)}
        for name, rounds in found.items()
    }
    present = [name for name in operation.peers if name in times]
    peer = min(present, key=lambda name: statistics.median(times[name][operation.clock]), default=None)
    ways, wrong = {}, []
    for name, rounds in found.items():
        extra = [answer.extra for ranks in rounds[1:] for answer in ranks]
        entry: dict[str, Any] = {"seconds": times[name]}
        entry["extra_bytes"] = None if None in extra else max(extra)  # type: ignore[type-var]
        for clock in (RETURNED, DONE) if operation.writes else (RETURNED,):
            entry[f"median_{clock}_seconds"] = statistics.median(times[name][clock])
            if peer is not None:
                entry[f"{clock}_ratio"] = ratio_of(times[name][clock], times[peer][clock]).as_json()
        ways[name] = entry
        wrong += [name] if any(answer.right is False for ranks in rounds for answer in ranks) else []
    return {"ways": ways, "peer": peer, "wrong": wrong}


def paragraphs(result: Mapping[str, Any]) -> list[str]:
    """What stands between the markers of one width: one row per operation and contestant."""
    columns = (
        column("call returns, s", "median_returned_seconds"),
        column("/ peer", "returned_ratio"),
        column("on disk, s", "median_done_seconds"),
        column("/ peer", "done_ratio"),
        mebibytes("extra memory, MiB", "extra_bytes"),
    )
    rows, failures = {}, []
    for name, summary in result["operations"].items():
        for way, entry in summary["ways"].items():
            rows[f"{name}, {way}{' (peer)' if way == summary['peer'] else ''}"] = entry
        failures += [f"{name}, {way}" for way in summary["not_run"]]
    settings = result["settings"]
    megabytes = 4 * settings["parameters"] / 1e6
    return [
        f"GPT of {settings['blocks']} blocks of width {settings['width']}: {megabytes:,.0f} MB of fp32 parameters, "
        f"{3 * megabytes:,.0f} MB with AdamW's state; {settings['ranks']} gloo ranks, threads per rank: "
        f"{settings['threads']}; {settings['rounds']} rounds of turns, after one to warm up. Files on "
        f"{settings['files_on']}, in the page cache when they are read. A ratio is that of the medians; in brackets "
        "are the smallest and the largest of the rounds. Values were bitwise those saved, every time.",
        report.table("what, contestant", rows, columns, failures),
        *report.could_not_run(result["not_run"]),
    ]
