"""examples/train_loop.py: resumed on other numbers of ranks, with all options, and started as users start it."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from compare import assert_close
from ranks import Rank, RankPool

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "train_loop.py"
SCRIPT = ROOT / "examples" / "train_loop.sbatch"
SMALL = [
    *("--batch", "8", "--microbatch", "2", "--warmup", "2", "--log-every", "1"),
    *("--layers", "2", "--width", "32", "--sequence", "16"),
]

pytestmark = pytest.mark.cpu_only("a program that chooses its device")


class StopAfter(threading.Event):
    """Is set once it was asked that many times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def is_set(self) -> bool:
        self.times -= 1
        return self.times <= 0


def run(rank: Rank, out: Path, words: list[str], stop_after: int) -> None:
    """Train in a process that is a rank already; stop after some steps."""
    spec = importlib.util.spec_from_file_location("train_loop", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = sys.modules["train_loop"] = importlib.util.module_from_spec(spec)  # where dynamo looks for its globals
    spec.loader.exec_module(example)
    args = example.options([*SMALL, "--out", str(out), *words])
    example.train(args, rank.device, StopAfter(stop_after))


def numbers_of(out: Path, twice: bool = False) -> dict[str, dict[int, float]]:
    """The numbers of each step, by name. ``twice``: steps may be there more than once."""
    found: dict[str, dict[int, float]] = {}
    for line in (out / "metrics.csv").read_text().splitlines():
        step, name, value = line.split(",")
        values = found.setdefault(name, {})
        assert twice or int(step) not in values, f"step {step} is there twice"
        values[int(step)] = float(value)
    return found


def make_text(folder: Path) -> Path:
    """A text of nine batches, so that twelve steps are more than one epoch."""
    file = folder / "text.txt"
    file.write_bytes(bytes(i * i % 251 for i in range(9 * 8 * 16 + 1)))
    return file


def test_stopped_and_resumed_on_other_numbers_of_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """On 2 ranks, then on 4, then on 1: losses, norms, learning rates and weights of a run that was not stopped."""
    words = ["--steps", "12", "--save-every", "5", str(make_text(tmp_path))]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ranks(2, run, whole, words, 100)
    for world, steps in ((2, 4), (4, 6), (1, 100)):
        ranks(world, run, parts, words, steps)
    expected, found = numbers_of(whole), numbers_of(parts)
    assert list(found["loss"]) == list(range(1, 13))
    for step in range(1, 13):
        assert found["lr"][step] == expected["lr"][step]
        for name in ("loss", "grad_norm"):
            assert found[name][step] == pytest.approx(expected[name][step], rel=1e-3), f"{name} of step {step}"
    weights = [load_file(out / "weights" / "model.safetensors") for out in (whole, parts)]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        assert_close(weights[1][name], value, name, rtol=1e-2, atol=1e-4)


def test_all_options(ranks: RankPool, tmp_path: Path) -> None:
    """bf16, compiled and recomputed blocks, two replicas on four ranks, workers for data: the loss falls."""
    words = ["--bf16", "--compile", "aot_eager", "--checkpoint-activations", "--replicas", "2", "--workers", "1"]
    ranks(
        4, run, tmp_path / "out", [*words, "--steps", "8", "--lr", "0.01", str(make_text(tmp_path))], 100, timeout=180
    )
    losses = numbers_of(tmp_path / "out")["loss"]
    assert losses[8] < losses[1] - 0.1


@pytest.mark.parametrize("words", [["--batch", "10"], ["--replicas", "3"], ["--sequence", "9999"]])
def test_wrong_options(ranks: RankPool, tmp_path: Path, words: list[str]) -> None:
    """What does not fit the number of ranks or the text is an error that says so."""
    [outcome, _] = ranks(2, run, tmp_path / "out", [*words, str(make_text(tmp_path))], 100, expect_failure=True)
    assert outcome.failed and "expected" in str(outcome), outcome


# -------------------------------------------------------------------- as users start it


def started(command: list[str | Path], **environment: Any) -> subprocess.Popen[str]:
    """A process of its own, on the CPU, without what pytest's ranks have in their environment."""
    outer = {key: value for key, value in os.environ.items() if not re.match("RANK$|WORLD_|LOCAL_|MASTER_|SLURM", key)}
    quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    environment = {**outer, **quiet, **{key: str(value) for key, value in environment.items()}}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def torchrun(*words: str | Path) -> list[str | Path]:
    return [sys.executable, "-m", "torch.distributed.run", *words]


def test_terminated(tmp_path: Path) -> None:
    """torchrun, ended by SIGTERM: all ranks save at the same step."""
    words = ["--nproc-per-node", "2", "--standalone", EXAMPLE, *SMALL, "--steps", "100000", "--out", tmp_path / "out"]
    with started(torchrun(*words, make_text(tmp_path))) as process:
        printed = ""
        for line in process.stdout or ():
            printed += line
            if line.startswith("step 3:"):
                process.send_signal(signal.SIGTERM)
    assert (tmp_path / "out" / "checkpoint" / "fullshard.json").exists(), printed
    last = max(numbers_of(tmp_path / "out")["loss"])
    with started(torchrun(*words[:-4], "--steps", str(last + 1), *words[-2:], make_text(tmp_path))) as process:
        printed, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and re.findall(r"^step (\d+):", printed, re.MULTILINE) == [str(last + 1)], printed


def process_of_rank(rank: int, out: Path) -> int:
    """The process that is this rank of the program with files below ``out``."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            command, variables = ((folder / name).read_bytes().split(b"\0") for name in ("cmdline", "environ"))
            if f"RANK={rank}".encode() in variables and any(word.startswith(str(out).encode()) for word in command):
                return int(folder.name)
    raise AssertionError(f"no rank {rank} runs")


SRUN = """#!/bin/bash
# Two nodes on one machine, of which the second starts last.
"$@" & ( sleep 1; exec "$@" ) &
wait -n && wait -n
"""


def test_batch_script_of_two_nodes(tmp_path: Path) -> None:
    """The SLURM script, whole, with programs in place of SLURM's: two torchrun, two ranks each, two replicas.

    A rank is killed, and all start again from the last checkpoint.
    """
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/bash\necho localhost\n"}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    slurm = {"JOB_NODELIST": "localhost", "JOB_NUM_NODES": 2, "GPUS_ON_NODE": 2, "CPUS_PER_TASK": 2, "JOB_ID": 17}
    words = [*SMALL, "--out", tmp_path / "out", "--steps", "40", "--save-every", "5", make_text(tmp_path)]
    with started(
        ["bash", SCRIPT, *words],
        PATH=f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        PORT=port,
        **{f"SLURM_{key}": value for key, value in slurm.items()},
        SLURM_JOB_NAME="test",
    ) as process:
        printed = ""
        for line in process.stdout or ():
            printed += line
            if line.startswith("step 6:") and printed.count("step 6:") == 1:
                os.kill(process_of_rank(3, tmp_path), signal.SIGKILL)
    assert process.returncode == 0, printed
    steps = [int(step) for step in re.findall(r"^step (\d+):", printed, re.MULTILINE)]
    for old, new in itertools.pairwise(steps):
        assert new == old + 1 or (new % 5 == 1 and old - new <= 5), f"after step {old} came {new}; saved every 5 steps"
    assert list(numbers_of(tmp_path / "out", twice=True)["loss"]) == list(range(1, 41))
    assert len(load_file(tmp_path / "out" / "weights" / "model.safetensors")) == 21


def test_scripts_are_valid_bash() -> None:
    """bash parses the batch script, which is the page's, and all shell snippets of the tutorial."""
    page = (ROOT / "docs" / "tutorial" / "many_nodes.md").read_text()
    snippets = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    assert SCRIPT.read_text() in snippets
    for snippet in snippets:
        done = subprocess.run(["bash", "-n"], input=snippet, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr + snippet
