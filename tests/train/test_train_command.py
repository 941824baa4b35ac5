"""`fullshard train` as a user runs it: processes, files, exit codes and messages."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing import ProcessFailure
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from train_processes import (
    LIMIT,
    SHORT,
    SIZE,
    command,
    environment,
    last_step,
    rank_of,
    run,
    run_on,
    start,
    wait_for,
    workers_of,
    write_text,
)
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.train.config import GPTConfig, TrainConfig
from fullshard.train.launcher import _explain
from fullshard.train.metrics import Record, read_metrics
from fullshard.train.model import load
from ranks import RankPool

FILES = [
    "best.safetensors",
    "checkpoints",
    "config.toml",
    "loss.png",
    "metrics.jsonl",
    "model.safetensors",
    "summary.json",
]
SAVED = ["--checkpoint-every", "3"]
finds_processes = pytest.mark.skipif(not Path("/proc/self").exists(), reason="finds processes through /proc")


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
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A short run of two ranks."""
    out = tmp_path_factory.mktemp("runs")
    done = run(*command(text, *SHORT, *SAVED, "--ranks", 2, "--out", out, "--name", "first"))
    assert done.returncode == 0, done.stdout + done.stderr
    return Finished(out / "first", done.stdout)


def paths(folder: Path) -> str:
    """PYTHONPATH with a folder before all others."""
    return os.pathsep.join([str(folder), *filter(None, [environment().get("PYTHONPATH")])])


def losses(records: list[Record]) -> list[tuple[str, int, float, float]]:
    """What must repeat bitwise."""
    return [(r["kind"], r["step"], r["loss"], r.get("grad_norm", 0.0)) for r in records]


def test_run_writes_every_file(finished: Finished) -> None:
    """A run leaves exactly the documented files, and the plot is a picture."""
    assert sorted(path.name for path in finished.folder.iterdir()) == FILES
    assert (finished.folder / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_metrics_hold_every_step(finished: Finished) -> None:
    """Each step has a record with the documented fields; validations are where they were asked for."""
    train = [record for record in finished.metrics if record["kind"] == "train"]
    assert [record["step"] for record in train] == [1, 2, 3, 4, 5]
    fields = {"kind", "step", "loss", "bits_per_byte", "lr", "grad_norm", "tokens_per_s", "elapsed_s"}
    assert all(record.keys() == fields for record in train)
    validation = [record for record in finished.metrics if record["kind"] == "validation"]
    assert [record["step"] for record in validation] == [2, 4, 5]
    assert len({record["bytes"] for record in validation}) == 1
    (final,) = (record for record in finished.metrics if record["kind"] == "final_validation")
    assert (final["step"], final["bytes"]) == (5, 1088)  # 34 windows of 32


def test_summary_counts_sharded_bytes(finished: Finished) -> None:
    """Each rank holds half of parameters, gradients and moments: two of AdamW, one of Muon for matrices of blocks."""
    summary = json.loads((finished.folder / "summary.json").read_text())
    full = 4 * GPTConfig(layers=1, width=16, heads=2, sequence=32, ngrams=3, ngram_rows=64).parameter_count
    blocks = 4 * (4 * 16**2 + 2 * 16 * 64)
    assert summary["bytes_unsharded"]["parameters"] == full
    assert summary["bytes_unsharded"]["gradients"] == full
    odd_row = 4 * 16  # of the table of matches, which has 771
    for rank, sign in zip(summary["bytes_per_rank"], (1, -1), strict=True):
        assert rank["parameters"] == rank["gradients"] == (full + sign * odd_row) / 2
        assert 0 <= rank["optimizer"] - (2 * full - blocks + 2 * sign * odd_row) / 2 < 1000  # step counters
    assert len(summary["bytes_per_rank"]) == 2
    assert summary["held_out_bytes"] == 1088
    assert set(summary["baselines"]) == {"order-0 entropy coding", "zlib level 9"}
    assert summary["bits_per_byte"] == finished.metrics[-1]["bits_per_byte"]
    assert "generated after the prompt" in finished.output and "one unsharded copy" in finished.output


def test_saved_model_has_the_measured_loss(finished: Finished, text: Path) -> None:
    """The saved model, loaded without ranks, has the validation loss that the sharded one had."""
    from fullshard.train import corpus
    from fullshard.train.corpus import windows
    from fullshard.train.evaluation import HeldOut

    validation = corpus.read([str(text)], seed=0, sequence=32).validation
    held_out = HeldOut.take(validation, 1100, 32)
    starts = torch.arange(held_out.count).numpy() * 32
    pairs = torch.from_numpy(windows(held_out.text, starts, 32))
    with torch.no_grad():
        logits = load(finished.folder / "model.safetensors")(pairs[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), pairs[:, 1:].flatten())
    assert float(loss) == pytest.approx(finished.metrics[-1]["loss"], abs=1e-5)


def torchrun(*options: object) -> list[object]:
    """The words that start the command on two ranks under torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, *options]
    return [sys.executable, *launcher, "-m", "fullshard"]


def test_torchrun_repeats_the_run_bitwise(finished: Finished, tmp_path: Path) -> None:
    """A run from config.toml alone, under torchrun, has the same losses to the last bit, and writes the same files;
    with --fresh it takes the place of an old one, which is kept under another name.
    """
    shutil.copytree(finished.folder, tmp_path / "again")
    line = ["--config", finished.folder / "config.toml", "--out", tmp_path, "--name", "again", "--fresh"]
    done = run(*torchrun(), "train", *line)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"--fresh: the contents of {tmp_path / 'again'} were moved to {tmp_path / 'again.before-1'}" in done.stdout
    assert "resumed" not in done.stdout and "changed" not in done.stdout
    assert done.stdout.count("results in") == 1
    assert read_metrics(tmp_path / "again.before-1" / "metrics.jsonl") == finished.metrics
    again = Finished(tmp_path / "again", done.stdout)
    assert sorted(path.name for path in again.folder.iterdir()) == FILES
    assert losses(again.metrics) == losses(finished.metrics)
    for name in ("config.toml", "model.safetensors"):
        assert (again.folder / name).read_bytes() == (finished.folder / name).read_bytes()


@finds_processes
def test_torchrun_restarts_go_on_in_the_same_folder(text: Path, tmp_path: Path) -> None:
    """Under torchrun a killed rank is started again and the run goes on; SIGTERM to torchrun saves where it stands."""
    line = ["train", text, *SIZE, "--steps", 1_000_000, "--checkpoint-every", 5, "--out", tmp_path, "--name", "001"]
    process = start(*torchrun("--max-restarts", 1), *line)
    metrics = tmp_path / "001" / "metrics.jsonl"
    try:
        wait_for(lambda: last_step(metrics) >= 12 or process.poll() is not None)
        os.kill(next(pid for pid in workers_of(tmp_path) if rank_of(pid) == 1), signal.SIGKILL)
        reached = last_step(metrics)
        wait_for(lambda: last_step(metrics) > reached + 5 or process.poll() is not None)
        process.terminate()
        output, errors = process.communicate(timeout=LIMIT)
    finally:
        for pid in [process.pid, *workers_of(tmp_path)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert process.returncode == 1 and "restart 1 of 1" in output and "resumed from step" in output, output + errors
    assert [path.name for path in tmp_path.iterdir()] == ["001"]
    steps = [record["step"] for record in read_metrics(metrics)]
    assert steps == list(range(1, len(steps) + 1))
    assert (tmp_path / "001" / "checkpoints" / f"step-{len(steps):08d}" / "fullshard.json").is_file()
    assert f"stopped after step {len(steps)} of" in output


def test_resume_on_another_number_of_ranks(finished: Finished, ranks: RankPool) -> None:
    """One rank that accumulates all the sequences resumes where two left off, in a run of its own: the same losses."""
    source, sizes = finished.folder / "checkpoints" / "step-00000003", ["--batch", 2, "--accumulate", 2]
    done = run_on(ranks, 1, "--resume", source, *sizes, "--out", finished.folder.parent, "--name", "resumed")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"resumed from step 3 ({source})" in done.stdout
    assert "a step now sees" not in done.stdout
    resumed = Finished(finished.folder.parent / "resumed", done.stdout).metrics
    kept = [record for record in finished.metrics if record["step"] <= 3]
    assert resumed[: len(kept)] == kept
    one, other = losses(resumed), losses(finished.metrics)
    assert [each[:2] for each in one] == [each[:2] for each in other]
    assert [each[2:] for each in one] == [pytest.approx(each[2:], rel=1e-5) for each in other]


def test_options_of_training_resume_bitwise(text: Path, tmp_path: Path, ranks: RankPool) -> None:
    """With all of them, the steps after a checkpoint are those of a run that was not interrupted, and config.toml and
    summary.json say so.
    """
    options = ["--optimizer", "muon", "--dtype", "bf16", "--activation-checkpointing", "--accumulate", 2]
    options += ["--width", 64, "--comm-quantization", "int8"]  # embedding and head are large enough to be quantized
    done = run_on(ranks, 2, text, *SHORT, *SAVED, *options, "--out", tmp_path, "--name", "whole")
    assert done.returncode == 0, done.stdout + done.stderr
    source = tmp_path / "whole" / "checkpoints" / "step-00000003"
    again = run_on(ranks, 2, "--resume", source, "--out", tmp_path, "--name", "resumed")
    assert again.returncode == 0, again.stdout + again.stderr
    whole, resumed = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "resumed"))
    assert losses(resumed) == losses(whole) and all(math.isfinite(record["loss"]) for record in whole)
    for name in ("config.toml", "model.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "resumed" / name).read_bytes()
    training = TrainConfig.from_toml(tmp_path / "resumed" / "config.toml").training
    assert (training.optimizer, training.dtype, training.accumulate) == ("muon", "bf16", 2)
    assert training.activation_checkpointing
    received = json.loads((tmp_path / "whole" / "summary.json").read_text())["comm_quantization"]
    assert 0.2 < received["bytes_received"] / received["bytes_in_full_precision"] < 0.95


def test_finished_run_goes_on_with_more_steps(finished: Finished, tmp_path: Path, ranks: RankPool) -> None:
    """No step is there twice, and the validations at the old end stay; on other bytes even a worse one is the best."""
    shutil.copytree(finished.folder, tmp_path / "longer")
    done = run_on(ranks, 2, "--steps", 7, "--lr", 10, "--eval-bytes", 2100, "--out", tmp_path, "--name", "longer")
    assert done.returncode == 0, done.stdout + done.stderr
    records = read_metrics(tmp_path / "longer" / "metrics.jsonl")
    assert records[: len(finished.metrics)] == finished.metrics
    after = [(record["kind"], record["step"]) for record in records[len(finished.metrics) :]]
    assert after == [
        *(("train", 6), ("validation", 6)),
        *(("train", 7), ("validation", 7), ("final_validation", 7)),
    ]
    assert [r["elapsed_s"] for r in records] == sorted(r["elapsed_s"] for r in records)
    assert sorted(path.name for path in (tmp_path / "longer" / "checkpoints").iterdir()) == [
        "step-00000006",
        "step-00000007",
    ]
    summary = json.loads((tmp_path / "longer" / "summary.json").read_text())
    assert summary["steps"] == 7 and summary["best"]["step"] > 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layers", "2"], "has a model of --layers 1, not 2"),
        (["--optimizer", "adamw"], "was trained with --optimizer muon, not adamw"),
        (["--seed", "1"], "was trained with --seed 0, not 1"),
    ],
)
def test_run_goes_on_only_as_itself(
    finished: Finished, options: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another model or seed is an error that says so, before any worker."""
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    before = (finished.folder / "metrics.jsonl").stat()
    result = CliRunner().invoke(app, ["train", *options, "--out", str(finished.folder.parent), "--name", "first"])
    assert result.exit_code == 2
    assert message in result.output
    assert (finished.folder / "metrics.jsonl").stat() == before


@pytest.fixture
def endless(text: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run in a process group of its own that has done some steps and would go on for very long."""
    line = command(text, *SIZE, "--steps", 1_000_000, "--ranks", 2, "--out", tmp_path, "--name", "endless")
    process = start(*line, "--max-restarts", 0)
    metrics = tmp_path / "endless" / "metrics.jsonl"
    wait_for(lambda: last_step(metrics) > 3 or process.poll() is not None)
    assert process.poll() is None, process.communicate(timeout=LIMIT)
    yield process
    for pid in [process.pid, *workers_of(tmp_path)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=LIMIT)


@finds_processes
def test_ctrl_c_stops_all_ranks_and_keeps_the_results(
    endless: subprocess.Popen[str], tmp_path: Path, ranks: RankPool
) -> None:
    """SIGINT to the process group ends all ranks with 130 and no traceback; every file is there; the run can go on."""
    assert len(workers_of(tmp_path)) == 3
    os.killpg(endless.pid, signal.SIGINT)
    output, errors = endless.communicate(timeout=LIMIT)
    assert endless.returncode == 130, output + errors
    assert "Traceback" not in output + errors
    assert "stopped after step" in output
    assert not workers_of(tmp_path)
    assert sorted(path.name for path in (tmp_path / "endless").iterdir()) == FILES[1:]  # no validation yet
    lines = (tmp_path / "endless" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert (tmp_path / "endless" / "checkpoints" / f"step-{len(lines):08d}" / "fullshard.json").is_file()
    lose_launcher_and_newest_checkpoint(tmp_path, len(lines), ranks)


def lose_launcher_and_newest_checkpoint(out: Path, first: int, ranks: RankPool) -> None:
    """Go on from step `first`: ranks whose launcher is killed save; if that is damaged, the one before it counts."""
    metrics, kept = out / "endless" / "metrics.jsonl", out / "endless" / "checkpoints"
    again = ["--out", out, "--name", "endless", "--eval-bytes", 1100, "--generate", 0]
    process = start(*command(*again, "--max-restarts", 0), output=out / "log.txt")
    wait_for(lambda: last_step(metrics) > first or process.poll() is not None)
    process.kill()
    process.wait(LIMIT)
    wait_for(lambda: not workers_of(out))
    newest = kept / f"step-{last_step(metrics):08d}"
    found = {path.name for path in kept.iterdir()}
    story = (out / "log.txt").read_text()
    assert last_step(metrics) > first and found == {f"step-{first:08d}", newest.name}, story

    data = max(newest.glob("data-*"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[-4] ^= 0xFF
    data.write_bytes(content)
    done = run_on(ranks, 2, *again, "--steps", first + 1)
    assert done.returncode == 0, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    assert f"is corrupted, and was renamed to {newest.name}.damaged" in said and f"resumed from step {first} (" in said
    found = {path.name for path in kept.iterdir()}
    assert found == {f"step-{first:08d}", f"step-{first + 1:08d}", f"{newest.name}.damaged"}


@finds_processes
def test_ctrl_c_while_workers_start_is_no_traceback(text: Path, tmp_path: Path) -> None:
    """SIGINT while the workers are being imported ends all of them."""
    process = start(*command(text, *SHORT, "--ranks", 2, "--out", tmp_path, "--name", "run"))
    wait_for(lambda: len(workers_of(tmp_path)) > 1 or process.poll() is not None)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 130, output + errors
    assert "Traceback" not in output + errors
    wait_for(lambda: not workers_of(tmp_path))


def test_ctrl_c_while_the_command_is_imported_is_no_traceback() -> None:
    """The signal ends the process, as it ends one that has no handler."""
    code = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # which Python leaves out where its parent ignores the signal
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "fullshard.cli":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
from fullshard.__main__ import main
main()
"""
    done = run(sys.executable, "-c", code)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


@finds_processes
def test_workers_end_when_their_launcher_is_killed_during_start_up(text: Path, tmp_path: Path) -> None:
    """A rank that waits for one that never comes ends soon after the launcher, not after the timeout of a store."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\nif os.environ.get('RANK') == '1':\n    time.sleep(600)\n"
    )
    line = command(text, *SHORT, "--ranks", 2, "--out", tmp_path, "--name", "run")
    process = start(*line, output=tmp_path / "log.txt", PYTHONPATH=paths(tmp_path))
    wait_for(lambda: len(workers_of(tmp_path)) == 3 or process.poll() is not None)
    first = next(pid for pid in workers_of(tmp_path) if rank_of(pid) == 0)
    wait_for(lambda: "libtorch_python" in Path(f"/proc/{first}/maps").read_text())
    time.sleep(2)  # for it to come from there to where it waits
    process.kill()
    process.wait(LIMIT)
    wait_for(lambda: first not in workers_of(tmp_path))
    for pid in workers_of(tmp_path):
        os.kill(pid, signal.SIGKILL)


def test_the_rank_that_a_signal_ended_is_named() -> None:
    """Also if another one failed before it was noticed, for want of its peer, or was ended by the agent."""
    killed, ended = (
        ProcessFailure(rank, 7, -number, "") for rank, number in ((2, signal.SIGKILL), (0, signal.SIGTERM))
    )
    failed = ProcessFailure(1, 8, 1, "")
    error = ChildFailedError("train", {0: ended, 1: failed, 2: killed})
    assert str(_explain(error)) == "rank 2 failed: ended by SIGKILL"
    assert str(_explain(ChildFailedError("train", {0: ended, 1: failed}))).startswith("rank 1 failed: ")


def test_failed_rank_is_named_with_its_exception(text: Path, tmp_path: Path) -> None:
    """An exception on one rank ends the command with 1 and a short message; its traceback goes to a file."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    from fullshard.train import corpus\n"
        "    def sample(*args, **kwargs):\n"
        "        raise RuntimeError('disk on fire')\n"
        "    corpus.sample = sample\n"
    )
    line = command(text, *SHORT, "--ranks", 2, "--max-restarts", 0, "--out", tmp_path, "--name", "failed")
    done = run(*line, PYTHONPATH=paths(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "fullshard train: rank 1 failed: RuntimeError: disk on fire" in done.stderr
    assert "Traceback" not in done.stderr
    assert "in sample" in (tmp_path / "failed" / "error.txt").read_text()


@finds_processes
def test_closed_pipe_stops_the_run(text: Path, tmp_path: Path) -> None:
    """When the reader of its output goes away, as `head` does, the run saves and ends, without a word."""
    line = command(text, *SIZE, "--steps", 400, "--ranks", 1, "--out", tmp_path, "--name", "run")
    process = start(*line, "--max-restarts", 0)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    wait_for(lambda: process.poll() is not None)
    assert process.stderr is not None
    errors = process.stderr.read()
    process.stderr.close()
    assert (process.returncode, errors) == (141, "")
    reached = last_step(tmp_path / "run" / "metrics.jsonl")
    assert reached < 400
    assert (tmp_path / "run" / "checkpoints" / f"step-{reached:08d}" / "fullshard.json").is_file()
    assert not workers_of(tmp_path)


def test_generate_continues_a_text(finished: Finished) -> None:
    """The same seed gives the same bytes; another seed, temperature or prompt gives others; the prompt comes first."""

    def generate(*more: str, prompt: str = "line 1") -> str:
        line = ["generate", str(finished.folder), "--prompt", prompt, "--bytes", "30", *more]
        result = CliRunner().invoke(app, line)
        assert result.exit_code == 0, result.output
        return result.output

    first = generate()
    assert first.startswith("line 1") and first == generate() == generate("--weights", "best")
    assert len({first, generate("--seed", "1"), generate("--temperature", "0.01"), generate(prompt="line 2")}) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "there is no nowhere: name the folder of a run"),
        (["empty"], "there is no empty/best.safetensors: name the folder of a run"),
        (["only-last"], "there is no only-last/best.safetensors; it has --weights last"),
        (["damaged"], "cannot read damaged/best.safetensors"),
        (["damaged", "--weights", "middle"], "--weights must be one of best, last, found 'middle'"),
        (["damaged", "--temperature", "0"], "--temperature must be a number above 0"),
        (["damaged", "--prompt", ""], "--prompt must hold at least one character"),
    ],
)
def test_generate_names_what_is_wrong(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder without weights, a file that holds none and wrong options exit with 2 and a line."""
    monkeypatch.chdir(tmp_path)
    for path in ("empty", "only-last/model.safetensors", "damaged/best.safetensors"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).mkdir() if path == "empty" else (tmp_path / path).write_text("nothing")
    result = CliRunner().invoke(app, ["generate", *arguments])
    assert (result.exit_code, message in result.output) == (2, True), result.output
