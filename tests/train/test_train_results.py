"""What a run of `fullshard train` writes, and what it resumes from: on ranks of the pool."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.nn import functional
from train_processes import SHORT, SIZE, last_step, run_on, write_text

from fullshard.train import corpus
from fullshard.train.config import GPTConfig, TrainConfig
from fullshard.train.corpus import whole_windows, windows
from fullshard.train.log import Record, read_metrics
from fullshard.train.model import load
from fullshard.train.summary import show
from ranks import RankPool

FILES = ["checkpoints", "config.toml", "metrics.jsonl", "model.safetensors", "summary.json"]
SAVED = ("config.toml", "model.safetensors")  # the same bytes if the same steps were made


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with thirty files of 1,000 bytes."""
    return write_text(tmp_path_factory.mktemp("text"))


@dataclass(frozen=True)
class Finished:
    """A run that ended well: where it wrote, and what it printed."""

    folder: Path
    output: str

    @property
    def metrics(self) -> list[Record]:
        return read_metrics(self.folder / "metrics.jsonl")


@pytest.fixture(scope="module")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory, ranks: RankPool) -> Finished:
    """A short run of two ranks."""
    out = tmp_path_factory.mktemp("runs")
    return train(ranks, 2, text, *SHORT, "--checkpoint-every", 3, "--out", out, "--name", "first")


def train(ranks: RankPool, size: int, *arguments: object) -> Finished:
    """Run the command, whose last arguments are `--out` and `--name`, on ranks of the pool until it ends well."""
    done = run_on(ranks, size, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return Finished(Path(str(arguments[-3])) / str(arguments[-1]), done.stdout)


def step_back(finished: Finished, folder: Path) -> None:
    """Copy a run of five steps as if it had ended after its checkpoint of the third."""
    shutil.copytree(finished.folder, folder)
    shutil.rmtree(folder / "checkpoints" / "step-00000005")


def losses(records: list[Record]) -> list[tuple[str, int, float, float]]:
    """What must repeat bitwise."""
    return [(r["kind"], r["step"], r["loss"], r.get("grad_norm", 0.0)) for r in records]


def test_run_writes_the_documented_files(finished: Finished) -> None:
    """Each step and validation has a record with its fields; validations on different amounts of bytes say so."""
    assert sorted(path.name for path in finished.folder.iterdir()) == FILES
    steps = [record for record in finished.metrics if record["kind"] == "train"]
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5]
    fields = {"kind", "step", "loss", "bits_per_byte", "lr", "grad_norm", "tokens_per_s", "elapsed_s"}
    assert all(record.keys() == fields for record in steps)
    others = [(r["kind"], r["step"], r["bytes"]) for r in finished.metrics if r["kind"] != "train"]
    between = [("validation", step, 128) for step in (2, 4, 5)]  # 4 windows of 32, of 1100 / 8 bytes
    assert others == [*between, ("final_validation", 5, 1088)]
    assert "step 2: validation" in finished.output and "bits/byte on 128 held-out bytes" in finished.output
    assert "step 5: final validation" in finished.output and "bits/byte on 1,088 held-out bytes" in finished.output


def test_summary_counts_sharded_bytes(finished: Finished) -> None:
    """Each rank holds half of parameters, gradients and moments: two of AdamW, one of Muon for matrices of blocks."""
    summary = json.loads((finished.folder / "summary.json").read_text())
    full = 4 * GPTConfig(layers=1, width=16, heads=2, sequence=32, ngrams=3, ngram_rows=64).parameter_count
    blocks = 4 * (4 * 16**2 + 2 * 16 * 64)
    assert summary["bytes_unsharded"]["parameters"] == summary["bytes_unsharded"]["gradients"] == full
    odd_row = 4 * 16  # of the table of matches, which has 771
    assert len(summary["bytes_per_rank"]) == 2
    for rank, sign in zip(summary["bytes_per_rank"], (1, -1), strict=True):
        assert rank["parameters"] == rank["gradients"] == (full + sign * odd_row) / 2
        assert 0 <= rank["optimizer"] - (2 * full - blocks + 2 * sign * odd_row) / 2 < 1000  # step counters
    assert summary["held_out_bytes"] == 1088
    assert summary["bits_per_byte"] == finished.metrics[-1]["bits_per_byte"]
    assert "bits per byte" in finished.output and "one unsharded copy" in finished.output


def test_saved_model_has_the_measured_loss(finished: Finished, text: Path) -> None:
    """The saved model, loaded without ranks, has the validation loss that the sharded one had."""
    held_out = whole_windows(corpus.read([str(text)], seed=0, sequence=32).validation, 1100, 32)
    pairs = torch.from_numpy(windows(held_out, torch.arange(len(held_out) // 32).numpy() * 32, 32))
    with torch.no_grad():
        logits = load(finished.folder / "model.safetensors")(pairs[:, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1), pairs[:, 1:].flatten())
    assert float(loss) == pytest.approx(finished.metrics[-1]["loss"], abs=1e-5)


def test_config_file_repeats_the_run_bitwise(finished: Finished, tmp_path: Path, ranks: RankPool) -> None:
    """A run from config.toml alone has the same losses to the last bit, and writes the same files."""
    again = train(ranks, 2, "--config", finished.folder / "config.toml", "--out", tmp_path, "--name", "again")
    assert "resumed" not in again.output and "changed" not in again.output
    assert losses(again.metrics) == losses(finished.metrics)
    for name in SAVED:
        assert (again.folder / name).read_bytes() == (finished.folder / name).read_bytes()


def test_resume_on_another_number_of_ranks(finished: Finished, tmp_path: Path, ranks: RankPool) -> None:
    """One rank that accumulates all the sequences resumes where two left off: the same losses."""
    step_back(finished, tmp_path / "resumed")
    resumed = train(ranks, 1, "--batch", 2, "--accumulate", 2, "--out", tmp_path, "--name", "resumed")
    assert "resumed from step 3 (" in resumed.output
    kept = [record for record in finished.metrics if record["step"] <= 3]
    assert resumed.metrics[: len(kept)] == kept
    one, other = losses(resumed.metrics), losses(finished.metrics)
    assert [each[:2] for each in one] == [each[:2] for each in other]
    assert [each[2:] for each in one] == [pytest.approx(each[2:], rel=1e-5) for each in other]


def test_options_of_training_resume_bitwise(text: Path, tmp_path: Path, ranks: RankPool) -> None:
    """With all of them, the steps after a checkpoint are those of a run that was not interrupted.

    config.toml and summary.json say so, and a trace has a timeline and a table of exposed communication.
    """
    options = ["--optimizer", "muon", "--dtype", "bf16", "--activation-checkpointing", "--accumulate", 2]
    options += ["--width", 64, "--comm-quantization", "int8"]  # embedding and head are large enough to be quantized
    options += ["--checkpoint-every", 3, "--trace"]
    whole = train(ranks, 2, text, *SHORT, *options, "--out", tmp_path, "--name", "whole")
    assert "Exposed communication" in (whole.folder / "trace" / "table.txt").read_text()
    assert json.loads((whole.folder / "trace" / "trace.json").read_text())["traceEvents"]
    step_back(whole, tmp_path / "resumed")
    resumed = train(ranks, 2, "--out", tmp_path, "--name", "resumed")
    assert losses(resumed.metrics) == losses(whole.metrics)
    assert all(math.isfinite(record["loss"]) for record in whole.metrics)
    for name in SAVED:
        assert (whole.folder / name).read_bytes() == (resumed.folder / name).read_bytes()
    training = TrainConfig.from_toml(resumed.folder / "config.toml")
    assert (training.optimizer, training.dtype, training.accumulate) == ("muon", "bf16", 2)
    assert training.activation_checkpointing
    received = json.loads((whole.folder / "summary.json").read_text())["comm_quantization"]
    assert 0.2 < received["bytes_received"] / received["bytes_in_full_precision"] < 0.95


def test_finished_run_goes_on_with_more_steps(finished: Finished, tmp_path: Path, ranks: RankPool) -> None:
    """No step is there twice, the validations at the old end stay, and a note says that the text is another."""
    shutil.copytree(finished.folder, tmp_path / "longer")
    (tmp_path / "text").mkdir()
    (write_text(tmp_path / "text") / "new.txt").write_text("new " * 200)
    digest = corpus.read([str(tmp_path / "text")], seed=0, sequence=32).sha256
    config = tmp_path / "longer" / "config.toml"
    config.write_text(dataclasses.replace(TrainConfig.from_toml(config), data_sha256=digest, batch=3).to_toml())
    options = [tmp_path / "text", "--steps", 7, "--batch", 3, "--keep", 1]
    longer = train(ranks, 2, *options, "--out", tmp_path, "--name", "longer")
    assert "note: the text has changed since" in longer.output
    assert longer.metrics[: len(finished.metrics)] == finished.metrics
    after = [(record["kind"], record["step"]) for record in longer.metrics[len(finished.metrics) :]]
    assert after == [("train", 6), ("validation", 6), ("train", 7), ("validation", 7), ("final_validation", 7)]
    assert [path.name for path in (longer.folder / "checkpoints").iterdir()] == ["step-00000007"]


def test_damaged_checkpoint_is_an_error(finished: Finished, tmp_path: Path, ranks: RankPool) -> None:
    """It says that without it the run resumes from the one before; nothing is changed, and nothing stepped back."""
    shutil.copytree(finished.folder, tmp_path / "damaged")
    newest = tmp_path / "damaged" / "checkpoints" / "step-00000005"
    data = max(newest.glob("data-*"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[-4] ^= 0xFF
    data.write_bytes(content)
    done = run_on(ranks, 2, "--steps", 7, "--out", tmp_path, "--name", "damaged")
    assert done.returncode == 2 and "checksum mismatch" in done.stderr, done.stdout + done.stderr
    assert "Remove this checkpoint to resume from the one before" in done.stderr
    assert read_metrics(tmp_path / "damaged" / "metrics.jsonl") == finished.metrics and newest.is_dir()


def make_eighth_loss_infinite(rank: int) -> None:
    """Make the loss of step 8 infinite on rank 1."""
    usual, calls = functional.cross_entropy, []

    def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = usual(logits, targets, *args, **kwargs)
        calls.append(logits.requires_grad)
        return loss * math.inf if logits.requires_grad and sum(calls) == 8 else loss

    if rank == 1:
        functional.cross_entropy = cross_entropy


def test_infinite_loss_stops_the_run_and_keeps_the_last_checkpoint(text: Path, tmp_path: Path, ranks: RankPool) -> None:
    """Exit code 3, the step and the rank in one line, and what to do."""
    line = [text, *SIZE, "--steps", 12, "--checkpoint-every", 3, "--eval-every", 5, "--eval-bytes", 2000]
    done = run_on(ranks, 2, *line, "--out", tmp_path, "--name", "run", poison=make_eighth_loss_infinite)
    assert done.returncode == 3, done.stdout + done.stderr
    (message,) = done.stderr.strip().splitlines()
    assert message == (
        "fullshard train: after step 7: the loss is inf on rank 1; --debug names the first module. "
        "The checkpoint step-00000006 is kept: resume with a lower --lr"
    )
    assert last_step(tmp_path / "run" / "metrics.jsonl") == 7
    assert not (tmp_path / "run" / "model.safetensors").exists()
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step-00000003", "step-00000006"]


# -------------------------------------------------------------------- what is printed in the end


def state(*sizes: int) -> dict[str, int]:
    return dict(zip(("parameters", "gradients", "optimizer"), sizes, strict=True))


def printed(bits_per_byte: float | None = 2.0) -> str:
    """The summary of a made-up run, as a wide console shows it."""
    summary = {
        "parameters": 1000,
        "steps": 5,
        "bits_per_byte": bits_per_byte,
        "baselines": {"order-0 entropy coding": 4.5, "zlib level 9": 1.5},
        "held_out_bytes": 4096,
        "bytes_per_rank": [state(2**20 * (rank + 1), 2**20, 2**21) for rank in range(2)],
        "bytes_unsharded": state(2**21, 2**21, 2**22),
        "seconds": 3.0,
    }
    file = io.StringIO()
    show(summary, 77, Path("runs/001"), Console(file=file, width=500))
    return file.getvalue()


def test_summary_says_what_is_compared() -> None:
    """It has the numbers of the model and the baselines, and says what each sees and which memory is counted."""
    text = printed(bits_per_byte=2.0)
    assert all(re.search(row, text) for row in (r"1,000 parameters\)\W+2.000", r"order-0 .*4.500", r"zlib .*1.500"))
    assert re.search(r"optimizer state\W+2.00\W+2.00\W+4.00", text) and re.search(r"total\W+4.00\W+5.00\W+8.00", text)
    assert "at most 77 bytes before it" in text
    assert "all held-out bytes as one stream" in text
    assert "without unsharded parameters, activations" in text


def test_stopped_run_has_no_comparison() -> None:
    """Without a last validation the summary says so and claims nothing about baselines."""
    text = printed(bits_per_byte=None)
    assert "stopped before the final validation" in text
    assert "order-0" not in text and "zlib" not in text
