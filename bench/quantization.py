"""Quantized communication: what it costs in loss, and what it saves in bytes.

1. ``fullshard train`` with its defaults, once per format, same seed: validation losses, and bytes as the run counts
   them.
2. The replicate axis: a smaller model on two replicas, gradients all-reduced in full precision, as int8 blocks, and as
   int8 blocks with error feedback, in blocks of 128 and of 2,048 values; for several seeds.
3. How fast one core quantizes, and what follows for a network: bytes over bandwidth beside the time for that.

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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from bench import report
from bench.command_line import DOCUMENT, option
from bench.command_line import Options as SharedOptions
from bench.contestants import Contestant
from bench.report import column, mebibytes
from bench.teams import Launch, Team
from bench.worker import join_group
from fullshard import fully_shard
from fullshard.comm.quantized.blocks import BlockFormat
from fullshard.policy import CommQuantization
from fullshard.train import corpus as texts
from fullshard.train.config import COMM_QUANTIZATIONS, GPTConfig, TrainConfig, TrainingConfig
from fullshard.train.evaluation import HeldOut
from fullshard.train.model import GPT, initialize
from fullshard.train.optimizer import learning_rate

PAGE = DOCUMENT.with_name("low_bandwidth.md")
TARGET = 0.01  # of the validation loss in full precision
FULL = "full precision"
REPLICATE: dict[str, CommQuantization] = {
    FULL: CommQuantization(),
    "int8, block 128": CommQuantization(reduce="int8", min_bytes=4096),
    "int8, block 128, error feedback": CommQuantization(reduce="int8", min_bytes=4096, error_feedback=True),
    "int8, block 2048": CommQuantization(reduce="int8", min_bytes=4096, block=2048),
    "int8, block 2048, error feedback": CommQuantization(
        reduce="int8", min_bytes=4096, block=2048, error_feedback=True
    ),
}
# Small enough for several seeds: one run of each says little about differences of a few thousandths.
REPLICATED = TrainConfig(
    model=GPTConfig(layers=2, width=64, heads=2, sequence=64, ngram_rows=512),
    training=TrainingConfig(batch=4, warmup=20, lr=6e-3),
)
BANDWIDTHS = {"1 Gbit/s": 0.125e9, "10 Gbit/s": 1.25e9, "25 Gbit/s": 3.125e9, "100 Gbit/s": 12.5e9}
# Bytes per parameter of gathers (twice a step) and of the reduction: what is usual, and what becomes of it.
PRECISIONS = {"fp32": (4.0, 4.0), "bf16, gradients in fp32": (2.0, 4.0), "bf16": (2.0, 2.0)}


@dataclass(frozen=True, kw_only=True)
class Options(SharedOptions):
    """The default training job in every format: some ten minutes."""

    steps: int = TrainConfig().training.steps
    only: tuple[str, ...] = option((), choices=tuple(COMM_QUANTIZATIONS))
    feedback_steps: int = option(150, "Steps on replicas; 0: leave them out.", least=0)
    seeds: int = 3
    document: Path = PAGE


# ------------------------------------------------------------------ the default training job


def train_once(name: str, steps: int, folder: Path) -> dict[str, Any]:
    """Losses and bytes of one run of ``fullshard train``."""
    line = [sys.executable, "-m", "fullshard", "train", "--comm-quantization", name]
    line += ["--steps", steps, "--name", name]
    line += ["--out", folder, "--checkpoint-every", 0, "--generate", 0, "--device", "cpu", "--ranks", 2]
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


# ------------------------------------------------------------------ the replicate axis


def replicate_all(steps: int, seeds: int, folder: Path) -> dict[str, list[float]]:
    """The validation losses after training on two replicas, by policy and seed."""
    launch = Launch.of(Contestant("replicas", "replicas"), __name__, folder, ranks=2, steps=steps)
    team = Team(launch, folder, timeout=3600.0)
    losses: dict[str, list[float]] = {name: [] for name in REPLICATE}
    try:
        team.started()
        for seed in range(seeds):
            for name in REPLICATE:
                losses[name] += team.ask("train", name=name, seed=seed)[:1]
    finally:
        team.end()
    return losses


class Replica:
    """One of two, on which a smaller model trains.

    Args:
        rank: Of this process.
        steps: Of each training.
    """

    def __init__(self, rank: int, steps: int) -> None:
        self.rank, self.settings = rank, replace(REPLICATED.training, steps=steps)
        self.sequence = REPLICATED.model.sequence
        self.corpus = texts.read((), seed=0, sequence=self.sequence)
        self.mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))

    def train(self, name: str, seed: int) -> float:
        """The validation loss after training with the policy of this name."""
        settings, sequence = self.settings, self.sequence
        model = GPT(REPLICATED.model)
        initialize(model, seed)
        for block in model.blocks:
            fully_shard(block, mesh=self.mesh)
        fully_shard(model, mesh=self.mesh).set_comm_quantization(replicate=REPLICATE[name])
        optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.95), fused=True)
        for step in range(1, settings.steps + 1):
            optimizer.param_groups[0]["lr"] = learning_rate(step, settings)
            pairs = texts.sample(
                self.corpus.train, batch=settings.batch, sequence=sequence, key=(seed, step), part=(self.rank, 2)
            )
            torch.autograd.backward(_loss(model, torch.from_numpy(pairs)))
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
            optimizer.step()
            optimizer.zero_grad()
        held_out = HeldOut.take(self.corpus.validation, 32 * 1024, sequence)
        pairs = texts.windows(held_out.text, np.arange(held_out.count) * sequence, sequence)
        with torch.no_grad():
            found = [_loss(model, part).item() for part in torch.from_numpy(pairs).split(64)]
        return sum(found) / len(found)


def build(rank: int, ranks: int, store: str, threads: int, steps: int) -> Replica:
    join_group(rank, ranks, store)
    return Replica(rank, steps)


def _loss(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


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
        mebibytes("in full, MiB", "full", spec=",.0f"),
        column("ratio", "ratio", spec=".3f"),
    )
    return report.table("--comm-quantization", rows, columns)


def replicate_table(losses: Mapping[str, Sequence[float]]) -> str:
    """One row per policy of the replicate axis: the mean over seeds, and each seed's ratio."""
    rows = []
    for name, found in losses.items():
        ratios = [mine / full for mine, full in zip(found, losses[FULL], strict=True)]
        each = ", ".join(f"{ratio:.4f}" for ratio in ratios)
        rows.append([name, f"{sum(found) / len(found):.4f}", f"{sum(ratios) / len(ratios):.4f}", each])
    header = ["all-reduce over two replicas", "validation loss", "/ full precision", "by seed"]
    return report.markdown_table(header, rows)


def predictions_table(found: Sequence[Mapping[str, Any]]) -> str:
    """One row per precision that quantization replaces."""
    header = ["gathers and gradients in", "GB per step", "as int8 blocks", "ratio", *BANDWIDTHS]
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
    steps, feedback = result["settings"]["steps"], result["settings"]["feedback_steps"]
    rates = ", ".join(f"{name} {1e-6 * rate:,.0f}" for name, rate in result["values_per_second"].items())
    lines = [f"`fullshard train`, two gloo ranks, {steps} steps, the same seed.", jobs_table(result["jobs"])]
    lines += report.against_targets(verdict(result["jobs"]))
    if result["replicate"]:
        lines += [
            f"A smaller model ({REPLICATED.model.parameter_count:,} parameters) on two replicas, {feedback} steps, "
            "mean over seeds.",
            replicate_table(result["replicate"]),
        ]
    return [
        *lines,
        "Seconds that the bytes of a step take, in full and quantized, for 10^9 parameters on 8 ranks that gather "
        "twice and reduce once (calculated):",
        predictions_table(result["predictions"]),
        f"One core quantizes so many million values a second: {rates}.",
    ]


def run(options: Options) -> None:
    """Train with and without quantized communication, and calculate what it saves."""
    torch.set_num_threads(1)
    jobs: dict[str, dict[str, Any]] = {}
    replicate: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only or COMM_QUANTIZATIONS:
            jobs[name] = train_once(name, options.steps, Path(folder))
            print(f"{name}: validation loss {jobs[name]['loss']:.4f}", flush=True)
        if options.feedback_steps:
            replicate = replicate_all(options.feedback_steps, options.seeds, Path(folder))
    figures = {
        "settings": {**options.settings, "policy": asdict(CommQuantization())},
        "jobs": jobs,
        "replicate": replicate,
        "predictions": predictions(),
        "values_per_second": rounding_rates(),
    }
    report.publish(options, "quantization", figures, paragraphs(figures))
