"""`fullshard train --wire`: what it sets, and what the summary says of it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from train_processes import command, run, write_text

from fullshard.engine.wire_report import WiredParameter, WireReport, WireTraffic
from fullshard.train.config import ConfigError, TrainConfig
from fullshard.train.metrics import read_metrics
from fullshard.train.wire import summarise

# Embedding and head are 64 KiB each, large enough to be rounded; the block's matrices are not.
SIZE = ["--layers", "1", "--width", "64", "--heads", "2", "--sequence", "32", "--batch", "2", "--device", "cpu"]
SHORT = [*SIZE, "--steps", "2", "--warmup", "1", "--eval-every", "2", "--eval-bytes", "1100", "--generate", "5"]


def test_a_run_says_what_travelled(tmp_path: Path) -> None:
    """The summary has the ratio of bytes, summary.json the bytes, config.toml the setting; losses are finite."""
    text = tmp_path / "text"
    text.mkdir()
    done = run(
        *command(write_text(text), *SHORT, "--checkpoint-every", 0, "--wire", "int8", "--out", tmp_path, "--name", "a")
    )
    assert done.returncode == 0, done.stdout + done.stderr
    values = json.loads((tmp_path / "a" / "summary.json").read_text())["wire"]
    assert values["format"] == "int8" and 0 < values["rounded_parameters"] < values["parameters"]
    ratio = values["bytes_received"] / values["bytes_in_full_precision"]
    assert 0.26 < ratio < 0.9
    shown = " ".join(done.stdout.split())
    assert f"({ratio:.3f}); {values['rounded_parameters']} of {values['parameters']} parameters are rounded" in shown
    assert TrainConfig.from_toml(tmp_path / "a" / "config.toml").wire == "int8"
    assert all(math.isfinite(record["loss"]) for record in read_metrics(tmp_path / "a" / "metrics.jsonl"))


def test_wrong_wires_are_refused() -> None:
    """Other names are found before anything starts."""
    with pytest.raises(ConfigError, match="wire must be one of none, int8, fp8, found 'int4'"):
        TrainConfig(wire="int4")


def test_text_of_a_report() -> None:
    """Bytes in MiB, their ratio and the parameters; one rank sends nothing."""
    parameters = (WiredParameter("", "a", "fp8", "int8", "(no)"), WiredParameter("", "b", "(no)", "(no)", "(no)"))
    report = WireReport((WireTraffic("shard", "gather", 3, 2**20, 4 * 2**20, 4 * 2**20),), parameters)
    assert str(summarise("fp8", report)) == (
        "wire fp8: rank 0 received 1.0 MiB of weights and gradients instead of 4.0 (0.250); 1 of 2 parameters are "
        "rounded"
    )
    assert str(summarise("fp8", WireReport((), parameters))) == "wire fp8: nothing travelled, with one rank"
