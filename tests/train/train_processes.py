"""Running `fullshard train` as a user does, or on the ranks of the pool, and finding its processes."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from fullshard.train.log import read_metrics
from patience import patient
from ranks import Rank, RankPool

MODEL = ["--layers", "1", "--width", "16", "--heads", "2", "--sequence", "32", "--ngrams", "3", "--ngram-rows", "64"]
SIZE = [*MODEL, "--batch", "2", "--device", "cpu"]
SHORT = [*SIZE, "--steps", "5", "--warmup", "2", "--eval-every", "2", "--eval-bytes", "1100"]
LIMIT = 120  # seconds after which a hung run is given up on an idle machine


def write_text(folder: Path) -> Path:
    """Thirty files of 1,000 bytes."""
    for number in range(30):
        (folder / f"{number}.txt").write_text((f"line {number} of a text\n" * 100)[:1000])
    return folder


def command(*arguments: object) -> list[str]:
    """The command line of a run with these arguments."""
    return [sys.executable, "-m", "fullshard", "train", *map(str, arguments)]


@dataclass(frozen=True)
class Ended:
    """How a run on ranks of the pool ended: its exit code, and what its ranks printed."""

    returncode: int
    stdout: str
    stderr: str


def run_on(ranks: RankPool, size: int, *arguments: object, poison: Callable[[int], None] | None = None) -> Ended:
    """Run `fullshard train` with these arguments on ranks of the pool, as workers that torchrun has started.

    They need no launcher and import nothing, which takes a tenth of the time. ``poison``, a function of a module, is
    called with each rank before the command.
    """
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    words = [str(each) for each in arguments]
    ended: list[Ended] = ranks(size, _work, words, port, poison, fresh=True, device_type="cpu", timeout=LIMIT)
    assert len({each.returncode for each in ended}) == 1, ended
    stdout, stderr = ("".join(getattr(each, name) for each in ended) for name in ("stdout", "stderr"))
    return Ended(ended[0].returncode, stdout, stderr)


def run(*line: object, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; keywords are further variables of its environment."""
    words = [str(word) for word in line]
    return subprocess.run(words, capture_output=True, text=True, timeout=patient(LIMIT), env=environment(**more))


def _work(rank: Rank, words: list[str], port: int, poison: Callable[[int], None] | None) -> Ended:
    from fullshard.__main__ import main

    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), GROUP_RANK="0")
    if poison:
        poison(rank.rank)
    sys.argv = ["fullshard", "train", *words]
    os._exit = sys.exit  # type: ignore[assignment]  # the worker's way to end
    output, errors, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
    return Ended(code, output.getvalue(), errors.getvalue())


def environment(**more: str) -> dict[str, str]:
    """This environment without what a surrounding torchrun or test pool may have set."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
    launchers = ("FULLSHARD_", "TORCHELASTIC")
    kept = {k: v for k, v in os.environ.items() if k not in dropped and not k.startswith(launchers)}
    if "PYTHONPATH" in more:  # what is found there already is still found
        more["PYTHONPATH"] = os.pathsep.join([more["PYTHONPATH"], kept.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return kept | {"OMP_NUM_THREADS": "1"} | more


def start(*line: object, output: Path | None = None, **more: str) -> subprocess.Popen[str]:
    """Start a command in a process group of its own; both its streams go to a pipe each, or on to one file.

    Ctrl-C reaches it also if this process ignores SIGINT, as a shell's background jobs do: what is ignored stays so in
    a new process. Keywords are further variables of its environment.
    """
    words, variables = [str(word) for word in line], environment(**more)
    with contextlib.ExitStack() as stack:
        streams = [subprocess.PIPE] * 2 if output is None else [stack.enter_context(output.open("a"))] * 2
        stack.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.SIG_DFL))
        return subprocess.Popen(
            words, stdout=streams[0], stderr=streams[1], text=True, env=variables, start_new_session=True
        )


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until a condition holds; fail if it takes too long."""
    deadline = time.monotonic() + patient(LIMIT)
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def workers_of(out: Path) -> list[int]:
    """Processes whose command line names a folder, or one in it, by process id (a test's own process never does)."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            words = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if os.fsencode(out) in words and b"fullshard" in words:
            found.append(int(entry.name))
    return found


def last_step(metrics: Path) -> int:
    """The last step in a metrics.jsonl that may still be written; 0 for none."""
    return max((record["step"] for record in read_metrics(metrics)), default=0)
