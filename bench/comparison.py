"""What is concluded from the records of a run: whether the losses agree, then ratios of time and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.statistics import largest_difference, paired_spread, round_medians, spread

LOSS_TOLERANCE = 1e-5
# Contestants whose losses must equal FSDP2's: all that average gradients.
SAME_LOSSES_AS = "fsdp2"
PEERS = ("fsdp1", "fsdp2")
PEERS_KEEPING_MEMORY = ("fsdp1+malloc", "fsdp2+malloc")


@dataclass
class Record:
    """Per step the mean loss over ranks; per round and step the slowest rank's time; memory per rank."""

    losses: list[float]
    seconds: list[list[float]]
    memory: list[dict[str, int | None]]

    def largest(self, field: str) -> int | None:
        values = [rank[field] for rank in self.memory]
        return max(v for v in values if v is not None) if None not in values and values else None

    @property
    def peak(self) -> int | None:
        return self.largest("peak")

    @property
    def peak_over_baseline(self) -> int | None:
        differences = [
            rank["peak"] - rank["baseline"]
            for rank in self.memory
            if rank["peak"] is not None and rank["baseline"] is not None
        ]
        return max(differences) if differences else None


def disagreements(records: Mapping[str, Record], tolerance: float = LOSS_TOLERANCE) -> dict[str, float]:
    """Contestants that average gradients and yet trained something else than FSDP2, by how much."""
    if SAME_LOSSES_AS not in records:
        return {}
    reference = records[SAME_LOSSES_AS]
    found = {name: largest_difference(r.losses, reference.losses) for name, r in records.items() if name != "unsharded"}
    return {name: difference for name, difference in found.items() if not difference <= tolerance}


def faster_of(names: Sequence[str], records: Mapping[str, Record]) -> str | None:
    """The contestant with the smaller median round time over the whole run."""
    present = [name for name in names if name in records]
    return min(present, key=lambda n: spread(round_medians(records[n].seconds)).median, default=None)


def summarise(records: Mapping[str, Record]) -> dict[str, dict[str, Any]]:
    """Everything reported about each contestant, JSON-ready; no ratio to a reference that did not run."""
    references = {
        "fsdp2": "fsdp2" if "fsdp2" in records else None,
        "better_peer": faster_of(PEERS, records),
        "better_peer_keeping_memory": faster_of(PEERS_KEEPING_MEMORY, records),
    }
    summary: dict[str, dict[str, Any]] = {}
    for name, record in records.items():
        times = round_medians(record.seconds)
        entry: dict[str, Any] = {
            "median_step_seconds": spread([s for turn in record.seconds for s in turn]).median,
            "final_loss": record.losses[-1],
            "largest_loss_difference_to_fsdp2": None,
            "peak_bytes": record.peak,
            "peak_over_baseline_bytes": record.peak_over_baseline,
            "memory_by_rank": record.memory,
            "seconds": record.seconds,
            "losses": record.losses,
        }
        for label, reference in references.items():
            if reference is None:
                continue
            base = records[reference]
            ratio = paired_spread(times, round_medians(base.seconds))
            entry[f"time_ratio_to_{label}"] = {"reference": reference, **ratio.as_json()}
        if "fsdp2" in records:
            base = records["fsdp2"]
            entry["largest_loss_difference_to_fsdp2"] = largest_difference(record.losses, base.losses)
            for field in ("peak", "peak_over_baseline"):
                mine, theirs = getattr(record, field), getattr(base, field)
                entry[f"{field}_ratio_to_fsdp2"] = mine / theirs if mine and theirs else None
        summary[name] = entry
    return summary


def ratio_text(entry: Mapping[str, Any], label: str) -> str:
    ratio = entry.get(f"time_ratio_to_{label}")
    if ratio is None:
        return "-"
    return f"{ratio['median']:.2f} ({ratio['lower_quartile']:.2f} to {ratio['upper_quartile']:.2f})"


def optional_text(value: float | None, spec: str, scale: float = 1.0) -> str:
    return "-" if value is None else format(value / scale, spec)
