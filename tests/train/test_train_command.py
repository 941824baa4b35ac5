"""`fullshard train` as a user runs it: processes that are started, interrupted, killed and fail."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from train_processes import (
    LIMIT,
    SHORT,
    SIZE,
    command,
    environment,
    last_step,
    run,
    run_on,
    start,
    wait_for,
    workers_of,
    write_text,
)

from fullshard.train.log import Record, read_metrics
from patience import patient
from ranks import RankPool

finds_processes = pytest.mark.skipif(not Path("/proc/self").exists(), reason="finds processes through /proc")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder with thirty files of 1,000 bytes."""
    (tmp_path / "text").mkdir()
    return write_text(tmp_path / "text")


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """A folder of runs. Processes that still write to it when the test ends are killed."""
    yield tmp_path / "runs"
    for pid in workers_of(tmp_path / "runs"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def is_complete(checkpoints: Path, step: int) -> bool:
    return (checkpoints / f"step-{step:08d}" / "fullshard.json").is_file()


def numbers(metrics: Path) -> list[Record]:
    """What must repeat to the last bit, record by record."""
    times = ("elapsed_s", "tokens_per_s")
    return [{name: value for name, value in r.items() if name not in times} for r in read_metrics(metrics)]


def test_failed_ranks_are_started_again_and_at_last_named(text: Path, out: Path, tmp_path: Path) -> None:
    """After rank 1 is killed, all resume from the last checkpoint.

    When it fails again, for the last time allowed, the command ends with 1, a traceback, and a line for each rank.
    """
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal\n"
        "if os.environ.get('RANK') == '1':\n"
        "    from fullshard.train import corpus\n"
        "    usual = corpus.sample\n"
        "    def sample(*args, key, **options):\n"
        "        if key[1] == 8 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        if key[1] == 8:\n"
        "            raise RuntimeError('disk on fire')\n"
        "        return usual(*args, key=key, **options)\n"
        "    corpus.sample = sample\n"
    )
    line = [text, *SIZE, "--steps", 20, "--checkpoint-every", 3, "--ranks", 2, "--max-restarts", 1]
    path = os.pathsep.join([str(tmp_path), environment().get("PYTHONPATH", "")])
    done = run(*command(*line, "--out", out, "--name", "failed"), PYTHONPATH=path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.findall(r"resumed from step (\d+) ", done.stdout) in (["6"], ["3"])  # the last save may not be complete
    assert [record["step"] for record in read_metrics(out / "failed" / "metrics.jsonl")] == list(range(1, 8))
    assert "fullshard train: rank 1 failed:\nTraceback" in done.stderr and "RuntimeError: disk on fire" in done.stderr
    assert "fullshard train: rank 1 ended with code 1" in done.stderr


@finds_processes
def test_killed_torchrun_leaves_a_run_that_ends_as_an_undisturbed_one(
    text: Path, out: Path, ranks: RankPool, tmp_path: Path
) -> None:
    """Workers whose launcher was killed save and end by themselves; the same command line resumes to the same bytes."""
    line = [text, *SIZE, "--steps", 100, "--eval-every", 50, "--eval-bytes", 2000]
    line += ["--checkpoint-every", 30, "--out", out, "--name"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "--max-restarts", 1]
    words = [sys.executable, *torchrun, "-m", "fullshard", "train", *line, "killed"]
    log, folder = tmp_path / "log.txt", out / "killed"
    process = start(*words, output=log, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    wait_for(lambda: last_step(folder / "metrics.jsonl") > 3 or process.poll() is not None)
    process.kill()
    process.wait(patient(LIMIT))
    killed = time.monotonic()
    wait_for(lambda: not workers_of(out))
    assert time.monotonic() - killed < 15
    reached = last_step(folder / "metrics.jsonl")
    assert reached < 100 and is_complete(folder / "checkpoints", reached), log.read_text()
    for name in ("killed", "whole"):
        done = run_on(ranks, 2, *line, name)
        assert done.returncode == 0 and (f"resumed from step {reached}" in done.stdout) == (name == "killed"), done
    assert numbers(folder / "metrics.jsonl") == numbers(out / "whole" / "metrics.jsonl")
    for name in ("model.safetensors", "config.toml"):
        assert (folder / name).read_bytes() == (out / "whole" / name).read_bytes()
    for each in (folder, folder / "checkpoints"):
        same = out / "whole" / each.relative_to(folder)
        assert sorted(path.name for path in each.iterdir()) == sorted(path.name for path in same.iterdir())


@finds_processes
def test_ctrl_c_stops_all_ranks_and_keeps_the_results(text: Path, out: Path) -> None:
    """SIGINT to the process group ends all ranks with 130 and no traceback; every file is there."""
    process = start(*command(text, *SIZE, "--steps", 1_000_000, "--ranks", 2, "--out", out, "--name", "endless"))
    folder = out / "endless"
    wait_for(lambda: last_step(folder / "metrics.jsonl") > 3 or process.poll() is not None)
    assert len(workers_of(out)) == 3
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=patient(LIMIT))
    assert process.returncode == 130 and "Traceback" not in output + errors, output + errors
    assert not workers_of(out)
    files = ["checkpoints", "config.toml", "metrics.jsonl", "model.safetensors", "summary.json"]
    assert sorted(path.name for path in folder.iterdir()) == files
    steps = [record["step"] for record in read_metrics(folder / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1)) and is_complete(folder / "checkpoints", len(steps))
    assert f"stopped after step {len(steps)} of 1000000; --name endless resumes it" in output


@finds_processes
def test_ctrl_c_while_workers_start_is_no_traceback(text: Path, out: Path) -> None:
    """SIGINT while the workers are being imported ends all of them."""
    process = start(*command(text, *SHORT, "--ranks", 2, "--out", out, "--name", "run"))
    wait_for(lambda: len(workers_of(out)) > 1 or process.poll() is not None)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=patient(LIMIT))
    assert process.returncode == 130 and "Traceback" not in output + errors, output + errors
    wait_for(lambda: not workers_of(out))


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


@pytest.mark.parametrize("hangs", [False, True])
def test_worker_ends_with_its_launcher(hangs: bool) -> None:
    """At once while it starts and may wait for ranks that will never come; after a while if it cannot save."""
    worker = (
        "import signal, time; from fullshard.train import stop\n"
        "stop.GRACE = 0.5; stop.end_with_launcher()\n"
        f"request = stop.StopRequest() if {hangs} else None\n"
        "print('ready', flush=True); time.sleep(LIMIT)".replace("LIMIT", str(LIMIT))
    )
    code = (
        "import os, subprocess, sys; os.environ['FULLSHARD_LAUNCHER'] = str(os.getpid())\n"
        "subprocess.run([sys.executable, '-c', sys.argv[1]])"
    )
    process = start(sys.executable, "-c", code, worker)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.kill()
    process.communicate(timeout=patient(LIMIT / 2))  # until the worker has closed the pipe, too


def test_closed_pipe_stops_the_run(text: Path, out: Path) -> None:
    """When the reader of its output goes away, as `head` does, the run saves and ends as by SIGTERM, without a word."""
    with socket.create_server(("localhost", 0)) as server:
        port = str(server.getsockname()[1])
    line = command(text, *SIZE, "--steps", 400, "--out", out, "--name", "run")
    process = start(*line, RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT=port)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert (process.wait(patient(LIMIT)), process.stderr.read()) == (143, "")
    process.stderr.close()
    reached = last_step(out / "run" / "metrics.jsonl")
    assert reached < 400 and is_complete(out / "run" / "checkpoints", reached)
