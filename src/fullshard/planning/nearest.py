"""The published run that is most like a planned one, to hold the plan against."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["TABLE", "Published", "nearest"]

# Rows of the tables that torchtitan and llm-foundry have published, as they stand there, with their sources.
TABLE = Path(__file__).with_name("published.csv")
MOST = 2.0  # distance beyond which a run says nothing about another one


@dataclass(frozen=True)
class Published:
    """A published run.

    Attributes:
        text: Its row, by column.
    """

    text: Mapping[str, str]

    def __str__(self) -> str:
        text = self.text
        recompute = text["activation_checkpointing"]
        run = [
            f"{text['model']} on {text['gpus']} {text['gpu_type'].split(',')[0]}",
            f"{text['local_batch']} x {text['seq']} tokens, recomputation {recompute}",
        ]
        found = [f"{text['tokens_per_s_per_gpu']} tokens/s on a GPU"]
        found += [f"{text['peak_memory_gib']} GiB"] * bool(text["peak_memory_gib"])
        return f"{', '.join(run)}: {', '.join(found)} ({text['source'].split(' @')[0]})"


def nearest(parameters: int, ranks: int, tokens: int, gpu: str, recomputed: float) -> Published | None:
    """Return the published run that is most like a planned one; None if none is like it.

    Args:
        parameters: Of the model.
        ranks: Of the job.
        tokens: Of a rank in a microbatch.
        gpu: Name of the cluster.
        recomputed: Share of the blocks.
    """
    best, least = None, MOST
    with TABLE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            kind = row["gpu_type"].lower()
            try:
                sizes = (
                    float(row["params"].split(" ")[0]),
                    float(row["gpus"]),
                    float(row["local_batch"]) * float(row["seq"]),
                )
            except ValueError:  # not stated
                continue
            if gpu not in kind or not row["tokens_per_s_per_gpu"] or row["tokens_per_s_per_gpu"] == "OOM":
                continue
            away = sum(abs(math.log(a / b)) for a, b in zip(sizes, (parameters, ranks, tokens), strict=True)) / 2
            share = {"full": 1.0, "none": 0.0}.get(row["activation_checkpointing"], 0.5)
            away += abs(share - recomputed)
            if away < least:
                best, least = Published(row), away
    return best
