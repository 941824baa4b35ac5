"""`fullshard train --comm-quantization`: what it sets, and what the summary says of it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from train_processes import command, run, write_text

from fullshard.engine.quantized_report import QuantizationReport, QuantizationTraffic, QuantizedParameter
from fullshard.train.config import ConfigError, TrainConfig
from fullshard.train.metrics import read_metrics
from fullshard.train.quantization import summarize

# Embedding and head are 64 KiB each, large enough to be quantized; the block's matrices are not.
SIZE = ["--layers", "1", "--width", "64", "--heads", "2", "--sequence", "32", "--batch", "2", "--device", "cpu"]
SHORT = [*SIZE, "--steps", "2", "--warmup", "1", "--eval-every", "2", "--eval-bytes", "1100", "--generate", "5"]


def test_a_run_says_what_it_received(tmp_path: Path) -> None:
    """The summary has the ratio of bytes, summary.json the bytes, config.toml the setting; losses are finite."""
    text = tmp_path / "text"
    text.mkdir()
    done = run(
        *command(
            write_text(text),
            *SHORT,
            "--checkpoint-every",
            0,
            "--comm-quantization",
            "int8",
            "--out",
            tmp_path,
            "--name",
            "a",
        )
    )
    assert done.returncode == 0, done.stdout + done.stderr
    values = json.loads((tmp_path / "a" / "summary.json").read_text())["comm_quantization"]
    assert values["format"] == "int8" and 0 < values["quantized_parameters"] < values["parameters"]
    ratio = values["bytes_received"] / values["bytes_in_full_precision"]
    assert 0.26 < ratio < 0.9
    shown = " ".join(done.stdout.split())
    assert (
        f"({ratio:.3f}); {values['quantized_parameters']} of {values['parameters']} parameters are quantized" in shown
    )
    assert TrainConfig.from_toml(tmp_path / "a" / "config.toml").comm_quantization == "int8"
    assert all(math.isfinite(record["loss"]) for record in read_metrics(tmp_path / "a" / "metrics.jsonl"))


def test_wrong_formats_are_refused() -> None:
    """Other names are found before anything starts."""
    with pytest.raises(ConfigError, match="comm_quantization must be one of none, int8, fp8, found 'int4'"):
        TrainConfig(comm_quantization="int4")


def test_text_of_a_report() -> None:
    """Bytes in MiB, their ratio and the parameters; one rank sends nothing."""
    parameters = (
        QuantizedParameter("", "a", "fp8", "int8", "(no)"),
        QuantizedParameter("", "b", "(no)", "(no)", "(no)"),
    )
    report = QuantizationReport(
        (QuantizationTraffic("shard", "all_gather", 3, 2**20, 4 * 2**20, 4 * 2**20),), parameters
    )
    assert str(summarize("fp8", report)) == (
        "comm quantization fp8: rank 0 received 1.0 MiB of weights and gradients instead of 4.0 (0.250); 1 of 2 "
        "parameters are quantized"
    )
    assert str(summarize("fp8", QuantizationReport((), parameters))) == (
        "comm quantization fp8: nothing was sent, with one rank"
    )
