"""Quantized communication: what it costs in loss, and what it saves in bytes.

1. ``fullshard train`` with its defaults, once per format, same seed: validation losses, and bytes as the run counts
   them.
2. How fast one core quantizes, and what follows for a network: bytes over bandwidth beside the time for that.

Losses are compared, never times: what a slow network would gain is calculated from bytes.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench import report
from bench.command_line import Options as SharedOptions
from bench.command_line import option
from bench.environment import REPOSITORY
from bench.report import column, mebibytes
from fullshard.comm.quantized.blocks import BlockFormat
from fullshard.policy import CommQuantization
from fullshard.train.config import COMM_QUANTIZATIONS, TrainConfig

PAGE = REPOSITORY / "docs" / "how_to" / "quantized_communication.md"
TARGET = 0.01  # of the validation loss in full precision
BANDWIDTHS = {"1 Gbit/s": 0.125e9, "10 Gbit/s": 1.25e9, "25 Gbit/s": 3.125e9, "100 Gbit/s": 12.5e9}
# Bytes per parameter of gathers (twice a step) and of the reduction: what is usual, and what becomes of it.
PRECISIONS = {"fp32": (4.0, 4.0), "bf16, gradients in fp32": (2.0, 4.0), "bf16": (2.0, 2.0)}


@dataclass(frozen=True, kw_only=True)
class Options(SharedOptions):
    """The default training job in every format: some ten minutes."""

    steps: int = TrainConfig().steps
    only: tuple[str, ...] = option((), choices=tuple(COMM_QUANTIZATIONS))
    document: Path = PAGE


# ------------------------------------------------------------------ the default training job


def train_once(name: str, steps: int, folder: Path) -> dict[str, Any]:
    """Losses and bytes of one run of ``fullshard train``."""
    line = [sys.executable, "-m", "fullshard", "train", "--comm-quantization", name]
    line += ["--steps", steps, "--name", name]
    line += ["--out", folder, "--checkpoint-every", 0, "--device", "cpu", "--ranks", 2]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(word) for word in line], capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"fullshard train --comm-quantization {name} failed: {done.stderr[-2000:]}")
    records = [json.loads(text) for text in (folder / name / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / name / "summary.json").read_text())
    between = [(r["step"], r["loss"]) for r in records if r["kind"] == "validation"]
    (final,) = (r["loss"] for r in records if r["kind"] == "final_validation")
    norms = [r["grad_norm"] for r in records if r["kind"] == "train"]
    received = summary.get("comm_quantization")
    return {"validation": between, "loss": final, "received": received, "largest_norm": max(norms)}


# ------------------------------------------------------------------ bytes and seconds


def rounding_rates(numel: int = 4 * 1024 * 1024) -> dict[str, float]:
    """Values per second that one core encodes, decodes and adds up, best of three."""
    values = torch.randn(1, numel)
    rates = {}
    for name in ("int8", "fp8"):
        form = BlockFormat(name, CommQuantization().block)
        rows = torch.empty(1, form.rows(numel), form.row_bytes, dtype=torch.uint8)
        calls: dict[str, Callable[[], None]] = {
            "encode": lambda form=form, rows=rows: form.encode(values, rows),
            "decode": lambda form=form, rows=rows: form.decode(rows, values),
            "add": lambda form=form, rows=rows: form.add(rows, values),
        }
        for what, call in calls.items():
            rates[f"{name} {what}"] = numel / min(_seconds(call) for _ in range(3))
    return rates


def _seconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def bytes_per_parameter(gather: float, reduce: float) -> float:
    """Of a step that gathers twice: what a rank receives per parameter, but for the factor (N - 1) / N."""
    return 2 * gather + reduce


def row_bytes(block: int = CommQuantization().block) -> float:
    """Bytes of one quantized value: q / 8 + s / k."""
    return 1 + 4 / block


def predictions(parameters: float = 1e9, ranks: int = 8) -> list[dict[str, Any]]:
    """Seconds that a step's bytes take at several bandwidths, in full precision and quantized."""
    rows = []
    for name, (gather, reduce) in PRECISIONS.items():
        full = bytes_per_parameter(gather, reduce) * parameters * (ranks - 1) / ranks
        short = bytes_per_parameter(row_bytes(), row_bytes()) * parameters * (ranks - 1) / ranks
        seconds = {label: (full / speed, short / speed) for label, speed in BANDWIDTHS.items()}
        rows.append({"precision": name, "full_bytes": full, "bytes": short, "ratio": short / full, "seconds": seconds})
    return rows


# ------------------------------------------------------------------ report


def jobs_table(jobs: Mapping[str, Mapping[str, Any]]) -> str:
    """One row per run of the training job."""
    rows = {}
    for name, job in jobs.items():
        got, full = (
            (job["received"] or {}).get("bytes_received"),
            (job["received"] or {}).get("bytes_in_full_precision"),
        )
        to_full = job["loss"] / jobs["none"]["loss"] if "none" in jobs else None
        rows[name] = {**job, "to_full": to_full, "got": got, "full": full, "ratio": got / full if full else None}
    columns = (
        column("validation loss", "loss", spec=".4f"),
        column("/ none", "to_full", spec=".4f"),
        column("bits per byte", "loss", spec=".3f", scale=1 / math.log(2)),
        mebibytes("received per rank, MiB", "got", spec=",.0f"),
        mebibytes("in full precision, MiB", "full", spec=",.0f"),
        column("ratio", "ratio", spec=".3f"),
    )
    return report.table("--comm-quantization", rows, columns)


def predictions_table(found: Sequence[Mapping[str, Any]]) -> str:
    """One row per precision that quantization replaces."""
    header = ["all-gathers and gradients in", "GB per step", "GB as int8 blocks", "ratio", *BANDWIDTHS]
    rows = [
        [
            row["precision"],
            f"{row['full_bytes'] / 1e9:.2f}",
            f"{row['bytes'] / 1e9:.2f}",
            f"{row['ratio']:.3f}",
            *(f"{full:.2f} to {short:.2f} s" for full, short in row["seconds"].values()),
        ]
        for row in found
    ]
    return report.markdown_table(header, rows)


def verdict(jobs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Per format: how far its loss is from full precision's, and whether that meets the target."""
    if "none" not in jobs:
        return []
    changes = {name: job["loss"] / jobs["none"]["loss"] - 1 for name, job in jobs.items() if name != "none"}
    return [
        f"{name}: loss {100 * change:+.2f}% of at most {100 * TARGET:.0f}%{'' if change <= TARGET else ' (missed)'}"
        for name, change in changes.items()
    ]


def paragraphs(result: Mapping[str, Any]) -> list[str]:
    """What the page says."""
    steps = result["settings"]["steps"]
    rates = ", ".join(f"{name} {1e-6 * rate:,.0f}" for name, rate in result["values_per_second"].items())
    return [
        f"`fullshard train`, two gloo ranks, {steps} steps, the same seed.",
        jobs_table(result["jobs"]),
        *report.against_targets(verdict(result["jobs"])),
        "Seconds to send the bytes of a step, in full precision and quantized, for 10^9 parameters on 8 ranks, two "
        "all-gathers and one reduce-scatter (calculated):",
        predictions_table(result["predictions"]),
        f"Million values per second on one core: {rates}.",
    ]


def run(options: Options) -> None:
    """Train with and without quantized communication, and calculate what it saves."""
    torch.set_num_threads(1)
    jobs: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only or COMM_QUANTIZATIONS:
            jobs[name] = train_once(name, options.steps, Path(folder))
            print(f"{name}: validation loss {jobs[name]['loss']:.4f}", flush=True)
    figures = {
        "settings": {**options.settings, "policy": asdict(CommQuantization())},
        "jobs": jobs,
        "predictions": predictions(),
        "values_per_second": rounding_rates(),
    }
    report.publish(options, "quantization", figures, paragraphs(figures))
