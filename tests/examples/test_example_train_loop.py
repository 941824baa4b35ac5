"""examples/train_loop.py: resumed on other numbers of ranks, with all options, and started as users start it."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from bench.hosts.network import INTERFACE, hosts_on_this_machine, why_not
from safetensors.torch import load_file

from compare import assert_close
from fullshard.checkpoint.tools.offline import open_checkpoint
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


def load_example() -> Any:
    """The program as a module."""
    spec = importlib.util.spec_from_file_location("train_loop", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = sys.modules["train_loop"] = importlib.util.module_from_spec(spec)  # where dynamo looks for its globals
    spec.loader.exec_module(example)
    return example


def run(rank: Rank, out: Path, words: list[str], stop_after: int) -> None:
    """Train in a process that is a rank already; only the last rank is asked to stop after some steps."""
    example = load_example()
    stop = StopAfter(stop_after) if rank.rank == rank.world_size - 1 else threading.Event()
    example.train(example.options([*SMALL, "--out", str(out), *words]), rank.device, stop)


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


def test_stops_between_log_lines_and_in_the_last_step(ranks: RankPool, tmp_path: Path) -> None:
    """Signals are looked at in each step; the resumed run logs and saves as if it had not been stopped."""
    words = ["--steps", "5", "--log-every", "4", str(make_text(tmp_path))]
    ranks(2, run, tmp_path / "out", words, 2)
    assert (tmp_path / "out" / "checkpoint").exists() and not numbers_of(tmp_path / "out")
    ranks(2, run, tmp_path / "out", words, 3)
    assert list(numbers_of(tmp_path / "out")["loss"]) == [4, 5]
    assert (tmp_path / "out" / "weights" / "model.safetensors").exists()


def test_another_run_is_not_resumed(ranks: RankPool, tmp_path: Path) -> None:
    """With other settings or another text of the same size, all ranks say what differs, and change nothing."""
    text = make_text(tmp_path)
    words = ["--steps", "3", "--save-every", "1", "--out", str(tmp_path / "out"), str(text)]
    ranks(2, run, tmp_path / "out", words, 1)
    text.write_bytes(text.read_bytes()[::-1])
    changed = ["--seed", "1", "--lr", "0.1", "--warmup", "0", "--steps", "4", "--width", "64"]
    outcomes = ranks(2, run, tmp_path / "out", [*words, *changed], 100, expect_failure=True)
    for outcome in outcomes:
        assert outcome.failed and "rank 0 has other settings than" in str(outcome), outcome
        for difference in ("seed 1, expected 0", "lr 0.1, expected 0.001", "steps 4", "warmup 0", "width 64", "text "):
            assert difference in str(outcome), outcome
    assert list(numbers_of(tmp_path / "out")["loss"]) == [1]


def agree(rank: Rank, checkpoint: Path, settings: list[dict[str, Any]]) -> bool:
    """What ranks with these settings make of the folder, if only rank 0 sees it."""
    hidden = patch.object(Path, "exists", return_value=False) if rank.rank else contextlib.nullcontext()
    with hidden:
        found: bool = load_example().agree(checkpoint, settings[rank.rank], None)
    return found


def test_ranks_agree_whether_to_resume(ranks: RankPool, tmp_path: Path) -> None:
    """Rank 0 looks for the checkpoint; ranks with another text are an error on all ranks."""
    checkpoint = tmp_path / "out" / "checkpoint"
    assert ranks(2, agree, checkpoint, [{"text": "a"}, {"text": "a"}]) == [False, False]
    ranks(1, run, tmp_path / "out", ["--steps", "1", str(make_text(tmp_path))], 100)
    with open_checkpoint(checkpoint) as opened:
        settings = opened.read("extra.settings")
    assert ranks(2, agree, checkpoint, [settings, settings]) == [True, True]
    for outcome in ranks(2, agree, tmp_path / "none", [{"text": "a"}, {"text": "b"}], expect_failure=True):
        assert outcome.failed and "rank 1 has other settings than rank 0: text b, expected a" in str(outcome), outcome


def initial_shard(rank: Rank) -> list[float]:
    """The first weights of this rank's shard."""
    example = load_example()
    model = example.build(example.options([*SMALL, "--replicas", "2"]), rank.device)
    shard: list[float] = model.blocks[1].up.weight.to_local().flatten()[:8].tolist()
    return shard


def test_initial_weights(ranks: RankPool) -> None:
    """Replicas have equal weights, and no two shards do."""
    one, two, *replica = ranks(4, initial_shard)
    assert one != two and replica == [one, two]


def test_epochs_have_different_orders(tmp_path: Path) -> None:
    """Each epoch has all samples, in another order; a start in the middle of the second epoch continues it."""
    example = load_example()
    text = example.Text([make_text(tmp_path)], 16, 8)
    samplers = [example.ResumableSampler(text, num_replicas=2, rank=rank, seed=0) for rank in (0, 1)]
    drawn = [list(itertools.islice(sampler, len(text))) for sampler in samplers]
    both = list(itertools.chain.from_iterable(zip(*drawn, strict=True)))
    first, second = both[: len(text)], both[len(text) :]
    assert sorted(first) == sorted(second) == list(range(len(text))) and first != second
    later = example.ResumableSampler(text, num_replicas=1, rank=0, seed=0)
    later.seen = len(text) + 8
    assert list(itertools.islice(later, 8)) == second[8:16]


def test_all_options(ranks: RankPool, tmp_path: Path) -> None:
    """bf16, compiled and recomputed blocks, two replicas on four ranks, workers for data: the loss falls."""
    words = ["--bf16", "--compile", "aot_eager", "--checkpoint-activations", "--replicas", "2", "--workers", "1"]
    words += ["--steps", "8", "--lr", "0.01", str(make_text(tmp_path))]
    ranks(4, run, tmp_path / "out", words, 100, timeout=180)
    losses = numbers_of(tmp_path / "out")["loss"]
    assert losses[8] < losses[1] - 0.1


def run_wrongly(rank: Rank, out: Path, text: Path) -> None:
    """Options that do not fit the number of ranks or the text."""
    for words in (["--batch", "10"], ["--replicas", "3"], ["--sequence", "9999"]):
        with pytest.raises((ValueError, SystemExit), match="expected"):
            run(rank, out, [*words, str(text)], 100)


def test_wrong_options(ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What does not fit the number of ranks or the text is an error that says so, and zero where it means nothing."""
    ranks(2, run_wrongly, tmp_path / "out", make_text(tmp_path))
    example = load_example()
    for name in ("replicas", "batch", "microbatch", "steps", "save-every", "log-every", "lr"):
        with pytest.raises(SystemExit):
            example.options([f"--{name}", "0"])
        assert f"--{name}: expected a positive number, found 0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        example.options(["--warmup", "-1"])
    assert example.options(["--warmup", "0", "--workers", "0", "--seed", "0"]).warmup == 0


def test_first_signal_asks_to_stop() -> None:
    """Then Ctrl-C ends the program, and more SIGTERMs do not."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        stop = load_example().stop_on_signals()
        assert not stop.is_set()
        signal.raise_signal(signal.SIGINT)
        assert stop.is_set() and signal.getsignal(signal.SIGINT) == signal.SIG_DFL
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_tensorboard(ranks: RankPool, tmp_path: Path) -> None:
    """The metrics are in an event file."""
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ranks(1, run, tmp_path / "out", ["--steps", "2", str(make_text(tmp_path))], 100)
    events = EventAccumulator(str(tmp_path / "out"))
    events.Reload()
    losses = {event.step: event.value for event in events.Scalars("loss")}
    assert losses == pytest.approx(numbers_of(tmp_path / "out")["loss"])


# -------------------------------------------------------------------- as users start it


def processes_of(out: Path) -> Iterator[Path]:
    """The folders in /proc of processes whose command line has files below ``out``."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if any(word.startswith(os.fsencode(out)) for word in words):
                yield folder


def signal_all(out: Path, number: signal.Signals) -> None:
    """Signal the processes with files below ``out``. Each rank of torchrun has a session of its own, so one by one."""
    for folder in processes_of(out):
        with contextlib.suppress(OSError):
            os.kill(int(folder.name), number)


@contextlib.contextmanager
def started(out: Path, command: list[str | Path], **environment: Any) -> Iterator[subprocess.Popen[str]]:
    """A process with files below ``out``, on the CPU, without what pytest's ranks have in their environment.

    It and its children end with the context, or after five minutes.
    """
    outer = {key: value for key, value in os.environ.items() if not re.match("RANK$|WORLD_|LOCAL_|MASTER_|SLURM", key)}
    quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    environment = {**outer, **quiet, **{key: str(value) for key, value in environment.items()}}
    pipe = subprocess.PIPE
    watchdog = threading.Timer(300, signal_all, [out, signal.SIGKILL])
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True
    ) as process:
        watchdog.start()
        try:
            yield process
        finally:
            watchdog.cancel()
            signal_all(out, signal.SIGKILL)


def torchrun(*words: str | Path) -> list[str | Path]:
    return [sys.executable, "-m", "torch.distributed.run", *words]


def test_alone(tmp_path: Path) -> None:
    """Without torchrun."""
    words = [*SMALL, "--steps", "2", "--out", tmp_path / "out", make_text(tmp_path)]
    with started(tmp_path, [sys.executable, EXAMPLE, *words]) as process:
        printed, _ = process.communicate()
    assert process.returncode == 0 and re.findall(r"^step (\d+):", printed, re.MULTILINE) == ["1", "2"], printed
    assert (tmp_path / "out" / "weights" / "model.safetensors").exists()


def test_terminated(ranks: RankPool, tmp_path: Path) -> None:
    """SIGTERM to torchrun, the rank and its worker, as from SLURM; torchrun then passes it on: the rank saves."""
    words = ["--steps", "100000", "--workers", "1", "--out", str(tmp_path / "out"), str(make_text(tmp_path))]
    with started(tmp_path, torchrun("--nproc-per-node", "1", "--standalone", EXAMPLE, *SMALL, *words)) as process:
        printed = ""
        for line in process.stdout or ():
            printed += line
            if line.startswith("step 3:"):
                signal_all(tmp_path, signal.SIGTERM)
    assert (tmp_path / "out" / "checkpoint" / "fullshard.json").exists(), printed
    assert "DataLoader worker" not in printed, printed
    last = max(numbers_of(tmp_path / "out")["loss"])
    ranks(1, run, tmp_path / "out", words, 1)
    assert max(numbers_of(tmp_path / "out")["loss"]) == last + 1, "resumed from the step at which it was stopped"


def process_of_rank(rank: int, out: Path) -> int:
    """The process that is this rank of the program with files below ``out``."""
    for folder in processes_of(out):
        with contextlib.suppress(OSError):
            if f"RANK={rank}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                return int(folder.name)
    raise AssertionError(f"no rank {rank} runs")


SRUN = """#!/bin/bash
# Two nodes, of which the second starts last.
{} "$@" & ( sleep 1; exec {} "$@" ) &
wait -n && wait -n
"""


@pytest.fixture
def nodes() -> Iterator[list[list[str]]]:
    """How commands on two nodes begin: hosts with a slow link between them; without root, one machine twice."""
    with contextlib.ExitStack() as stack:
        if why_not():
            yield [[], []]
            return
        network = stack.enter_context(hosts_on_this_machine(2))
        network.set_rate(500)
        yield [network.inside(0), network.inside(1)]


def test_batch_script_of_two_nodes(nodes: list[list[str]], tmp_path: Path) -> None:
    """The SLURM script, whole, with programs in place of SLURM's: two torchrun, two ranks each, two replicas.

    A rank is killed, and all start again from the last checkpoint.
    """
    programs = tmp_path / "bin"
    programs.mkdir()
    head = "host0" if nodes[0] else "localhost"
    on_nodes = SRUN.format(*map(shlex.join, nodes))
    for name, text in {"srun": on_nodes, "scontrol": f"#!/bin/bash\necho {head}\n"}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    slurm = {"JOB_NODELIST": "host[0-1]", "JOB_NUM_NODES": 2, "GPUS_ON_NODE": 2, "CPUS_PER_TASK": 2, "JOB_ID": 17}
    words = [*SMALL, "--out", tmp_path / "out", "--steps", "12", "--save-every", "2", make_text(tmp_path)]
    with started(
        tmp_path,
        ["bash", SCRIPT, *words],
        PATH=f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        PORT=port,
        GLOO_SOCKET_IFNAME=INTERFACE if nodes[0] else "lo",
        **{f"SLURM_{key}": value for key, value in slurm.items()},
        SLURM_JOB_NAME="test",
    ) as process:
        printed = ""
        for line in process.stdout or ():
            printed += line
            if line.startswith("step 3:") and printed.count("step 3:") == 1:
                os.kill(process_of_rank(3, tmp_path), signal.SIGKILL)
    assert process.returncode == 0, printed
    steps = [int(step) for step in re.findall(r"^step (\d+):", printed, re.MULTILINE)]
    for old, new in itertools.pairwise(steps):
        assert new == old + 1 or (new % 2 == 1 and old - new <= 2), f"after step {old} came {new}; saved every 2 steps"
    assert list(numbers_of(tmp_path / "out", twice=True)["loss"]) == list(range(1, 13))
    assert len(load_file(tmp_path / "out" / "weights" / "model.safetensors")) == 21


def test_scripts_are_valid_bash() -> None:
    """bash parses the batch script, which is the page's, and all shell snippets of the tutorial."""
    page = (ROOT / "docs" / "tutorial" / "many_nodes.md").read_text()
    snippets = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    assert SCRIPT.read_text() in snippets
    for snippet in snippets:
        done = subprocess.run(["bash", "-n"], input=snippet, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr + snippet
