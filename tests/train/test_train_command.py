"""`fullshard train` as a user runs it: processes, files, exit codes and messages."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.train.config import GPTConfig, TrainConfig
from fullshard.train.metrics import Record, read_metrics
from fullshard.train.model import load

FILES = ["config.toml", "loss.png", "metrics.jsonl", "model.safetensors", "summary.json"]
SIZE = ["--layers", "1", "--width", "16", "--heads", "2", "--sequence", "32", "--batch", "2", "--device", "cpu"]
SHORT = [*SIZE, "--steps", "5", "--warmup", "2", "--eval-every", "2", "--eval-bytes", "1100", "--generate", "20"]
LIMIT = 120  # seconds after which a hung run is given up


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with thirty files of 1,000 bytes."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(30):
        (folder / f"{number}.txt").write_text((f"line {number} of a text\n" * 100)[:1000])
    return folder


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "fullshard.cli", "train", *map(str, arguments)]


def environment(**more: str) -> dict[str, str]:
    """This environment without what a surrounding torchrun or test pool may have set."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "FULLSHARD_STOP_FILE")
    return {k: v for k, v in os.environ.items() if k not in dropped} | {"OMP_NUM_THREADS": "1"} | more


def run(*line: object, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in line], capture_output=True, text=True, timeout=LIMIT, env=environment(**more)
    )


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
    done = run(*command(text, *SHORT, "--ranks", 2, "--out", out, "--name", "first"))
    assert done.returncode == 0, done.stdout + done.stderr
    return Finished(out / "first", done.stdout)


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
    assert validation[-1]["bytes"] == 1088  # 34 windows of 32


def test_summary_counts_sharded_bytes(finished: Finished) -> None:
    """Each rank holds half of parameters, gradients and AdamW's two moments; sizes are known by hand."""
    summary = json.loads((finished.folder / "summary.json").read_text())
    full = 4 * GPTConfig(layers=1, width=16, heads=2, sequence=32).parameter_count
    assert summary["bytes_unsharded"]["parameters"] == full
    assert summary["bytes_unsharded"]["gradients"] == full
    for rank in summary["bytes_per_rank"]:
        assert rank["parameters"] == rank["gradients"] == full / 2
        assert 2 * full / 2 <= rank["optimizer"] < 2 * full / 2 + 1000  # and step counters
    assert len(summary["bytes_per_rank"]) == 2
    assert summary["held_out_bytes"] == 1088
    assert set(summary["baselines"]) == {"order-0 entropy coding", "zlib level 9"}
    assert summary["bits_per_byte"] == finished.metrics[-1]["bits_per_byte"]
    assert "20 bytes generated" in finished.output and "one unsharded copy" in finished.output


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


def test_config_repeats_the_run_bitwise(finished: Finished) -> None:
    """A run from config.toml alone has the same losses to the last bit, and writes the same config and model."""
    line = ["--config", finished.folder / "config.toml", "--out", finished.folder.parent, "--name", "again"]
    done = run(*command(*line))
    assert done.returncode == 0, done.stdout + done.stderr
    again = Finished(finished.folder.parent / "again", done.stdout)
    assert losses(again.metrics) == losses(finished.metrics)
    for name in ("config.toml", "model.safetensors"):
        assert (again.folder / name).read_bytes() == (finished.folder / name).read_bytes()
    assert "changed" not in done.stdout


def test_torchrun_starts_the_same_run(finished: Finished, text: Path, tmp_path: Path) -> None:
    """Under torchrun the command is a worker itself: one summary, the same files, the same losses."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "fullshard.cli"]
    done = run(sys.executable, *launcher, "train", text, *SHORT, "--out", tmp_path, "--name", "torchrun")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in (tmp_path / "torchrun").iterdir()) == FILES
    assert losses(read_metrics(tmp_path / "torchrun" / "metrics.jsonl")) == losses(finished.metrics)
    assert done.stdout.count("results in") == 1
    written = TrainConfig.from_toml(tmp_path / "torchrun" / "config.toml")
    assert written == TrainConfig.from_toml(finished.folder / "config.toml")


@pytest.fixture
def endless(text: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run in a process group of its own that has done some steps and would go on for very long."""
    line = command(text, *SIZE, "--steps", 1_000_000, "--ranks", 2, "--out", tmp_path, "--name", "endless")
    pipe = subprocess.PIPE
    process = subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True, env=environment(), start_new_session=True)
    metrics = tmp_path / "endless" / "metrics.jsonl"
    deadline = time.monotonic() + LIMIT
    while not (metrics.exists() and len(read_metrics(metrics)) > 3):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate(timeout=LIMIT)
        time.sleep(0.05)
    yield process
    for pid in [process.pid, *workers_of(tmp_path)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=LIMIT)


def workers_of(out: Path) -> list[int]:
    """Processes whose command line names a folder, by process id (this test's own process never does)."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if entry.name.isdecimal() and os.fsencode(out) in words and b"fullshard" in words:
            found.append(int(entry.name))
    return found


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="finds processes through /proc")
def test_ctrl_c_stops_all_ranks_and_keeps_the_results(endless: subprocess.Popen[str], tmp_path: Path) -> None:
    """SIGINT to the process group ends all ranks with 130 and no traceback; every file is there and whole."""
    assert len(workers_of(tmp_path)) == 3
    os.killpg(endless.pid, signal.SIGINT)
    output, errors = endless.communicate(timeout=LIMIT)
    assert endless.returncode == 130, output + errors
    assert "Traceback" not in output + errors
    assert "stopped after step" in output
    assert not workers_of(tmp_path)
    assert sorted(path.name for path in (tmp_path / "endless").iterdir()) == FILES
    lines = (tmp_path / "endless" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, len(lines) + 1))


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="finds processes through /proc")
def test_killed_rank_is_named(endless: subprocess.Popen[str], tmp_path: Path) -> None:
    """When the system kills a rank, the command ends with 1 and one line that names rank and signal."""
    victim = next(
        pid for pid in workers_of(tmp_path) if b"\0RANK=1\0" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    )
    os.kill(victim, signal.SIGKILL)
    output, errors = endless.communicate(timeout=LIMIT)
    assert endless.returncode == 1, output + errors
    assert "rank 1 failed: ended by SIGKILL" in errors
    assert "Traceback" not in output + errors
    assert not workers_of(tmp_path)


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
    line = command(text, *SHORT, "--ranks", 2, "--out", tmp_path, "--name", "failed")
    done = run(*line, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "rank 1 failed: RuntimeError: disk on fire" in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2
    assert "in sample" in (tmp_path / "failed" / "error.txt").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere"),
        (["empty.txt"], "empty.txt is empty"),
        (["folder"], "no text in the folder"),
        (["small.txt"], "needed at --sequence 128"),
        (["big.txt", "--steps", "0"], "steps must be at least 1"),
        (["big.txt", "--device", "tpu"], "device must be one of"),
        (["big.txt", "--config", "missing.toml"], "missing.toml"),
    ],
)
def test_wrong_input_is_an_error_before_any_worker(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong input exits with 2 and a line that names it; no run folder is made and nothing is launched."""
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "small.txt").write_text("small")
    (tmp_path / "big.txt").write_text("big " * 1000)
    (tmp_path / "folder").mkdir()
    result = CliRunner().invoke(app, ["train", *arguments])
    assert result.exit_code == 2
    assert message in result.output
    assert not (tmp_path / "runs").exists()


def test_missing_matplotlib_is_said_before_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without matplotlib the command says what to install, and trains nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = CliRunner().invoke(app, ["train"])
    assert result.exit_code == 2
    assert "fullshard[train]" in result.output
    assert not (tmp_path / "runs").exists()


def test_results_are_never_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that has results already is an error that says so."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "taken").mkdir(parents=True)
    (tmp_path / "runs" / "taken" / "metrics.jsonl").write_text("precious")
    (tmp_path / "big.txt").write_text("big " * 1000)
    result = CliRunner().invoke(app, ["train", "big.txt", "--name", "taken"])
    assert result.exit_code == 2
    assert "choose another --name" in result.output
    assert (tmp_path / "runs" / "taken" / "metrics.jsonl").read_text() == "precious"


def test_help_and_version_need_no_torch() -> None:
    """Help lists the options, the version is printed, and the command line by itself imports no torch for it."""
    code = """
import importlib.util, sys, types
package = types.ModuleType("fullshard")  # the package's public names do import torch
package.__path__ = list(importlib.util.find_spec("fullshard").submodule_search_locations)
sys.modules["fullshard"] = package
from fullshard.cli import app
for arguments in (["--version"], ["train", "--help"]):
    try:
        app(arguments)
    except SystemExit as end:
        assert end.code == 0
print("heavy:", {"torch", "matplotlib"} & set(sys.modules))
"""
    done = run(sys.executable, "-c", code, COLUMNS="120")
    assert done.stdout.startswith("fullshard ")
    assert "--eval-bytes" in done.stdout and "--prompt" in done.stdout
    assert done.stdout.endswith("heavy: set()\n"), done.stdout + done.stderr
