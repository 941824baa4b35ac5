"""What plans predict beside tables that others have published: torchtitan's of Llama, llm-foundry's of MPT."""

from __future__ import annotations

import csv
import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import report
from bench.command_line import Options as SharedOptions
from bench.command_line import option
from bench.environment import REPOSITORY
from bench.planned.programs import Program
from bench.statistics import spread
from fullshard.planning.cluster import GIB, Cluster, cluster_of, infiniband
from fullshard.planning.nearest import TABLE

# Targets: errors of memory in the median and at most, and of time in the median.
MEMORY_MEDIAN, MEMORY_MOST, TIME_MEDIAN = 0.10, 0.20, 0.10
_TITAN, _FOUNDRY = "torchtitan", "llm-foundry"
# What is in the source of a table of torchtitan's -> its short name.
_TABLES = {"PR #165": "PR #165", "202412": "12/2024", "(2024-04-18)": "04/2024", "(2024-08-23": "08/2024"}


@dataclass(frozen=True)
class Row:
    text: Mapping[str, str]

    @property
    def source(self) -> str:
        source = self.text["source"]
        if _FOUNDRY in source:
            return _FOUNDRY
        return f"{_TITAN} {next(name for mark, name in _TABLES.items() if mark in source)}"

    @property
    def name(self) -> str:
        text = self.text
        parts = [text["model"].replace(" (1k steps minipile)", ""), f"{text['gpus']} {self.gpu}"]
        parts += [f"{text['local_batch']} x {text['seq']}", f"recompute {text['activation_checkpointing']}"]
        parts += ["compiled"] * (text["compile"] == "yes") + ["FSDP1"] * (text["mesh"] == "FSDP1 8")
        parts += ["kept"] * ("SHARD_GRAD_OP" in text["mesh"]) + ["float8"] * ("float8" in text["precision"])
        return ", ".join(parts)

    @property
    def gpu(self) -> str:
        kind = "H100" if "h100" in self.text["gpu_type"].lower() else "A100"
        return kind + " 40 GB" * (self.text["gpu_type"] == "a100_40gb")

    @property
    def program(self) -> Program:
        text, early = self.text, self.source in ("torchtitan PR #165", "torchtitan 04/2024")
        found = re.search(r"grad accum (\d+)", text["notes"])
        recompute = text["activation_checkpointing"].removeprefix("selective").strip() or "op"
        model = text["model"].replace("Llama 3.1", "Llama 3")
        return Program(
            "Llama 2 7B" if "minipile" in model else model,
            int(text["gpus"]),
            int(text["local_batch"]),
            int(text["seq"]),
            recompute,
            compiled=text["compile"] == "yes",
            fused_norm=self.source != "torchtitan 12/2024",
            keeps_logits=early,  # "del pred" came with torchtitan's PR #391, in June 2024
            reduce_in_half=text["precision"].endswith("PURE"),
            kept="SHARD_GRAD_OP" in text["mesh"],
            microbatches=int(found[1]) if found else 1,
        )

    @property
    def memory(self) -> float:
        """GiB; 0 if the row has none, infinite if it did not fit."""
        text = self.text["peak_memory_gib"]
        return float("inf") if text.startswith(">") else float(text or 0)

    @property
    def tokens(self) -> float:
        """Tokens per second and GPU, the middle of a range; 0 if the row has none."""
        parts = [float(part) for part in re.findall(r"[\d.]+", self.text["tokens_per_s_per_gpu"])]
        return sum(parts) / len(parts) if parts else 0.0


def published_rows() -> list[Row]:
    with TABLE.open(newline="", encoding="utf-8") as file:
        return [Row(text) for text in csv.DictReader(file)]


def cluster_for(row: Row) -> Cluster:
    """The preset of a row's GPUs, with the memory that its source states."""
    if row.gpu == "A100 40 GB":
        return dataclasses.replace(cluster_of("a100"), name="a100_40gb", memory=39.4 * GIB, bandwidth=1.555e12)
    stated = re.search(r"([\d.]+) GiB", row.text["gpu_type"])
    cluster = cluster_of(row.gpu.lower())
    return dataclasses.replace(cluster, memory=float(stated[1]) * GIB) if stated else cluster


# ------------------------------------------------------------------ memory


def memory_cells(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Reserved and allocated GiB of torchtitan's rows, published and planned, and whether they fit."""
    for row in rows:
        out_of_memory, program = row.memory == float("inf"), row.program
        fits = row.text["model"] == "Llama 2 70B" and not out_of_memory
        if _TITAN not in row.source or not (row.memory or fits):
            continue
        cluster = cluster_for(row)
        step = program.plan(cluster, steps=3)
        yield {
            "row": row.name,
            "source": row.source,
            "judged": program.recompute in ("none", "full") and not (out_of_memory or fits),
            "published": None if out_of_memory or fits else row.memory,
            "fits": None if not (out_of_memory or fits) else fits,
            "reserved": step.reserved / GIB,
            "allocated": step.peak.nbytes / GIB,
            "planned_fits": step.reserved <= cluster.memory,
        }
        print(f"memory of {row.name}: {step.reserved / GIB:.2f} GiB", flush=True)


def memory_paragraphs(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    rows, known = [], [cell for cell in cells if cell["published"] is not None]
    for cell in known:
        sizes = [f"{cell[key]:.2f}" for key in ("published", "allocated", "reserved")]
        judged = "yes" if cell["judged"] else "no"
        rows.append([cell["row"], cell["source"], *sizes, f"{100 * _error(cell, 'reserved'):+.1f} %", judged])
    errors = [abs(_error(cell, "reserved")) for cell in known if cell["judged"]]
    met = "" if spread(errors).median <= MEMORY_MEDIAN and max(errors) <= MEMORY_MOST else ", missed"
    target = f"{100 * MEMORY_MEDIAN:.0f} % and {100 * MEMORY_MOST:.0f} %{met}"
    fitting = [cell for cell in cells if cell["fits"] is not None]
    fits = [[cell["row"], str(cell["fits"]), str(cell["planned_fits"]), f"{cell['reserved']:.1f}"] for cell in fitting]
    right = sum(cell["fits"] == cell["planned_fits"] for cell in fitting)
    header = ["run", "source", "published", "plan, allocated", "plan", "error", "judged"]
    return [
        "Peak memory that the caching allocator reserved in published runs, GiB. They are of torch's FSDP. The plan is "
        "of fullshard's engine in the same program, in bf16. Selective recomputation is reported and not judged.",
        report.markdown_table(header, rows),
        f"Those judged are off by {_median_and_most(errors)} at most (target: {target}).",
        report.markdown_table(["run", "fits, published", "fits, planned", "plan, GiB"], fits),
        f"{right} of {len(fitting)} are called right (target: all).",
    ]


# ------------------------------------------------------------------ time


def fitted_row(rows: Sequence[Row]) -> Row:
    """The row on which the efficiency of a source's GPUs is fitted: the first on one node, of 2,048 tokens, if any."""
    usual = (row for row in rows if int(row.text["gpus"]) <= 8 and row.text["seq"] == "2048")
    return next(usual, rows[0])


def with_efficiency(cluster: Cluster, share: float) -> Cluster:
    """A cluster whose matrix multiplications and attention reach a share of what is specified."""
    known: Any = cluster.efficiency
    value = {**known, "matmul": share, "attention": share} if isinstance(known, Mapping) else share
    changed: dict[str, Any] = {"efficiency": value}
    return dataclasses.replace(cluster, **changed)


def fit(row: Row, cluster: Cluster) -> float:
    """The efficiency with which a plan reaches a row's tokens per second: seconds are a line of its inverse."""
    program, inverse = row.program, [1 / 0.4, 1 / 0.8]
    wanted = 1 / row.tokens
    took = [1 / program.tokens_per_second(with_efficiency(cluster, 1 / each)) for each in inverse]
    for _ in range(3):
        slope = (took[-1] - took[-2]) / (inverse[-1] - inverse[-2])
        inverse.append(max(1.0, inverse[-1] + (wanted - took[-1]) / slope))
        if abs(inverse[-1] - inverse[-2]) < 1e-3:
            break
        took.append(1 / program.tokens_per_second(with_efficiency(cluster, 1 / inverse[-1])))
    return 1 / inverse[-1]


def time_cells(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Tokens per second of all rows that have them: one row of each source and GPU is fitted, the others follow."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row.tokens and "float8" not in row.text["precision"]:
            groups[row.source, row.gpu].append(row)
    for (source, gpu), members in groups.items():
        chosen = fitted_row(members)
        share = fit(chosen, cluster_for(chosen))
        print(f"{source}, {gpu}: efficiency {share:.3f}, fitted on {chosen.name}", flush=True)
        for row in members:
            cluster = with_efficiency(cluster_for(row), share)
            cell = {"row": row.name, "source": source, "gpu": gpu, "share": share, "fitted": row is chosen}
            cell |= {"published": row.tokens, "planned": row.program.tokens_per_second(cluster)}
            nodes = int(row.text["gpus"]) > cluster.node
            cell["infiniband"] = row.program.tokens_per_second(infiniband(cluster)) if nodes else cell["planned"]
            print(f"{row.name}: {row.tokens:.0f} tokens/s, planned {cell['planned']:.0f}", flush=True)
            yield cell


def time_paragraphs(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    networks, rows, groups = ("planned", "infiniband"), [], defaultdict(list)
    for cell in cells:
        figures = [f"{cell[key]:,.0f}" for key in ("published", *networks)]
        said = ["fitted" if cell["fitted"] else f"{100 * _error(cell, key):+.1f} %" for key in networks]
        rows.append([cell["row"], cell["source"], *figures[:2], said[0], figures[2], said[1]])
        groups[cell["source"], cell["gpu"], cell["share"]] += [] if cell["fitted"] else [cell]
    sums = [
        [f"{source}, {gpu}", f"{share:.3f}", str(len(members)), *(_spread(members, key) for key in networks)]
        for (source, gpu, share), members in groups.items()
    ]
    predicted = [cell for cell in cells if not cell["fitted"]]
    median = spread([abs(_error(cell, "planned")) for cell in predicted]).median
    one = [cell for cell in predicted if cell["planned"] == cell["infiniband"]]
    header = ["source", "efficiency", "predicted", "error in the median, at most", "with InfiniBand"]
    return [
        "Tokens per second and GPU of published runs. Of each source and GPU, the efficiency of matrix multiplications "
        "and attention is fitted on one row: the first on one node with sequences of 2,048 tokens, or the first if "
        "there is none. The network between nodes, which no source states, is that of the presets, measured on "
        "AWS EFA; beside it, that of the presets with InfiniBand.",
        report.markdown_table(header, sums),
        f"The {len(predicted)} predicted ones are off by {100 * median:.1f} % in the median (target: "
        f"{100 * TIME_MEDIAN:.0f} %{'' if median <= TIME_MEDIAN else ', missed'}), the {len(one)} on one node by "
        f"{_spread(one, 'planned')} at most; with InfiniBand all by {_spread(predicted, 'infiniband')} at most.",
        report.markdown_table(["run", "source", "published", "plan", "error", "plan, InfiniBand", "error"], rows),
    ]


def _error(cell: Mapping[str, Any], key: str) -> float:
    return float(cell[key] / cell["published"] - 1)


def _spread(cells: Sequence[Mapping[str, Any]], key: str) -> str:
    return _median_and_most([abs(_error(cell, key)) for cell in cells])


def _median_and_most(errors: Sequence[float]) -> str:
    return f"{100 * spread(errors).median:.1f} %, {100 * max(errors):.1f} %" if errors else "-"


# ------------------------------------------------------------------ the benchmark

MEMORY, TIME = "memory", "time"


@dataclass(frozen=True, kw_only=True)
class Options(SharedOptions):
    what: tuple[str, ...] = option((MEMORY, TIME), choices=(MEMORY, TIME))
    document: Path = REPOSITORY / "docs" / "performance" / "planned.md"


def run(options: Options) -> None:
    torch.set_num_threads(1)
    rows = published_rows()
    for what in options.what:
        cells = list(memory_cells(rows) if what == MEMORY else time_cells(rows))
        said = memory_paragraphs(cells) if what == MEMORY else time_paragraphs(cells)
        report.publish(options, f"planned_{what}", {"settings": options.settings, "cells": cells}, said)
