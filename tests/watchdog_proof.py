"""The programs of ``test_watchdog.py`` and more, as processes, with the times of users, on a loaded machine.

    cd tests && python -m watchdog_proof --load 30 --repeat 5

Each runs on 3 or 4 ranks, with the store in the launcher, in rank 0 or in a file. A divergence passes if all ranks that
are left say the same, in the expected words; a correct program if it ends by itself. Takes most of an hour.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import faulthandler
import itertools
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch.optim imports it on the first step
import torch.distributed as dist
import torch.distributed.checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, get_worker_info

import fullshard
import test_watchdog as programs
from fullshard import FullyShardedDataParallel
from ranks.rank import Rank

STORES = ("agent", "rank 0", "file")
ODD, LONG_S, LIMIT_S = programs.ODD, 12.0, 150.0
step_of, WIDTH = programs.step_of, programs.WIDTH


# -------------------------------------------------------------------- correct programs that the suite has no time for


def two_models_in_turns(rank: Rank, shard: Any) -> None:
    """As of a GAN; ranks are late in turns."""
    models = [shard(programs.Net()), shard(programs.Net())]
    for number in range(6):
        time.sleep(LONG_S / 3 * (number % rank.world_size == rank.rank))
        for model in models:
            step_of(model)


def a_second_world(rank: Rank, shard: Any) -> None:
    """All process groups are destroyed, and made anew."""
    step_of(shard(programs.Net()))
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, 0)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder[0]}/x", rank=rank.rank, world_size=rank.world_size)
    time.sleep(LONG_S * (rank.rank == 1))
    step_of(shard(programs.Net()))


def a_thread_serves_data(rank: Rank, net: programs.Net, model: torch.nn.Module) -> None:
    """A thread of rank 0 waits for one of rank 1, on a group of theirs, while another rank is slow."""
    pair = dist.new_group([0, 1])
    served = threading.Thread(
        target=lambda: [time.sleep(2 * LONG_S * rank.rank), dist.broadcast(torch.ones(1), 1, pair)]
    )
    if rank.rank < 2:
        served.start()
    step_of(model)
    time.sleep(LONG_S * (rank.rank == 2))
    step_of(model)
    if rank.rank < 2:
        served.join()


def one_goes_on_alone(rank: Rank, shard: Any) -> None:
    """The others have ended, while it writes what it has found."""
    step_of(shard(programs.Net()))
    time.sleep(LONG_S * (rank.rank == 1))


def background_save(rank: Rank, net: programs.Net, model: torch.nn.Module) -> None:
    """One rank writes slowly, while all go on training; another one comes late to the next save."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, 0)
    handle = fullshard.checkpoint.async_save(f"{folder[0]}/a", model)
    for _ in range(4):
        step_of(model)
        time.sleep(LONG_S / 3 * (rank.rank == 1))
    handle.result()
    time.sleep(LONG_S * (rank.rank == 2))
    fullshard.checkpoint.save(f"{folder[0]}/b", model)
    time.sleep(LONG_S * (rank.rank == 0))
    fullshard.checkpoint.load(f"{folder[0]}/b", model)


class _Slow(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        found = get_worker_info()
        time.sleep(LONG_S * (index == 5 and found is not None and os.environ["RANK"] == "1"))
        return torch.ones(WIDTH)


def workers_of_a_loader(rank: Rank, net: programs.Net, model: torch.nn.Module) -> None:
    """One of them is slow; they are children of the rank, and have its watchdog's memory."""
    for batch in DataLoader(_Slow(), batch_size=2, num_workers=2):
        model(batch).square().mean().backward()


def summoned_on_one_rank(rank: Rank, net: programs.Net, model: torch.nn.Module) -> None:
    """One rank exports for long from unsharded parameters."""
    with FullyShardedDataParallel.summon_full_params(model):
        time.sleep(LONG_S * (rank.rank == 0))


def forwards_ended_on_purpose(rank: Rank, net: programs.Net, model: torch.nn.Module) -> None:
    """All ranks leave each forward by an exception, as to get features; one of them then works on them for long."""
    for number in range(4):
        net.blocks[2].before = programs.fail
        with contextlib.suppress(ValueError), torch.no_grad():
            model(torch.ones(2, WIDTH))
        net.blocks[2].before = None
        time.sleep(LONG_S * (rank.rank == number == 1))


def metrics_of_late_ranks(rank: Rank, shard: Any) -> None:
    """Ranks wait in collectives of their own for one that is late."""
    model = shard(programs.Net())
    for number in range(3):
        step_of(model)
        time.sleep(LONG_S * (rank.rank == number))
        dist.all_reduce(torch.ones(1))
        dist.barrier()


programs.WHOLE += [two_models_in_turns, a_second_world, one_goes_on_alone, metrics_of_late_ranks]
CORRECT = [
    *(*programs.CORRECT, two_models_in_turns, a_second_world, one_goes_on_alone, metrics_of_late_ranks),
    *(a_thread_serves_data, background_save, workers_of_a_loader, summoned_on_one_rank, forwards_ended_on_purpose),
]


def run_correct(rank: Rank, name: str, front_end: str) -> str:
    """Run one of them, with the watchdog as it comes."""
    return programs.run_program(next(each for each in CORRECT if each.__name__ == name), rank, front_end)


# -------------------------------------------------------------------- worlds


@dataclass
class Case:
    """A program on ranks.

    Args:
        name: For the report.
        body: Run on each rank, with ``arguments`` after it; the word FOLDER stands for one of its own.
        words: Which all ranks have to say; None: it is correct, and they say "trained".
    """

    name: str
    body: Callable[..., Any]
    arguments: tuple[Any, ...]
    words: list[str] | None
    world: int
    store: str
    folder: Path = Path()
    pids: list[int] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)  # with which its processes have ended
    began: float = 0.0

    def start(self) -> None:
        """Fork its ranks, and the process that has the store."""
        self.began, self.folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="watchdog-proof-"))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        if self.store == "agent":
            self.pids.append(self._fork(-1, partial(_host, port)))
        self.pids += [self._fork(rank, partial(self._run, rank, port)) for rank in range(self.world)]

    def _fork(self, rank: int, work: Callable[[], None]) -> int:
        sys.stdout.flush()
        if pid := os.fork():
            return pid
        os.setsid()
        log = os.open(self.folder / f"log{rank}", os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1)
        try:
            work()
        except BaseException:
            traceback.print_exc()
        atexit._run_exitfuncs()  # what else the parent does as it ends, is not this process's
        os._exit(0)

    def _run(self, rank: int, port: int) -> None:
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(self.world),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            LOCAL_RANK=str(rank),
        )
        torch.set_num_threads(1)
        limit = timedelta(minutes=30)
        if self.store == "file":
            where = f"file://{self.folder}/store"
            dist.init_process_group("gloo", init_method=where, rank=rank, world_size=self.world, timeout=limit)
        else:
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(self.store == "agent")
            dist.init_process_group("gloo", timeout=limit)
        place = Rank(rank, self.world, init_device_mesh("cpu", (self.world,)), dist.group.WORLD, torch.device("cpu"))
        dist.barrier()
        arguments = [str(self.folder / "own") if each == "FOLDER" else each for each in self.arguments]
        try:
            value = self.body(place, *arguments)
        except BaseException as error:
            value = f"{type(error).__name__}: {error}"
        (self.folder / f"said{rank}.partial").write_text(json.dumps(str(value)))
        (self.folder / f"said{rank}.partial").rename(self.folder / f"said{rank}")

    def said(self) -> dict[int, str]:
        """What its ranks have returned so far."""
        paths = ((rank, self.folder / f"said{rank}") for rank in range(self.world))
        return {rank: json.loads(path.read_text()) for rank, path in paths if path.exists()}

    def is_over(self) -> bool:
        """Whether all ranks that can say something have, or the time is up."""
        wanted = range(self.world) if self.words is None else [each for each in range(self.world) if each != ODD]
        return self.said().keys() >= set(wanted) or time.monotonic() - self.began > LIMIT_S

    def end(self) -> str:
        """End its processes, and return what is wrong; empty if nothing is."""
        said = self.said()
        if wrong := self.wrong_about(said):
            for pid in self.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
            time.sleep(5)
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                self.statuses.append(os.waitpid(pid, 0)[1])
        if not wrong:
            shutil.rmtree(self.folder, ignore_errors=True)
        return wrong

    def wrong_about(self, said: dict[int, str]) -> str:
        """Return what is wrong about what ranks have said; empty if nothing is."""
        if self.words is None:
            bad = {rank: said.get(rank, "nothing") for rank in range(self.world) if said.get(rank) != "trained"}
            return f"ended a correct program: {bad}" if bad else ""
        told = {rank: _without_time(text) for rank, text in said.items() if rank != ODD}
        if len(told) < self.world - 1:
            return f"no word from {self.world - 1 - len(told)} of its ranks after {LIMIT_S:.0f} s: {told}"
        if len(set(told.values())) > 1:
            return f"ranks say different things: {told}"
        text = told[0]
        missing = [each for each in self.words if each not in text]
        return f"expected {missing} in: {text}" if missing else ""


def _host(port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    while store:
        time.sleep(60)


def _without_time(text: str) -> str:
    first, _, rest = text.partition(" ")
    return rest if first.replace(".", "").isdigit() else text


def _seconds(text: str) -> float | None:
    first = text.partition(" ")[0]
    return float(first) if first.replace(".", "").isdigit() else None


def divergences() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...], list[str]]]:
    """Yield names, bodies, arguments, and the words that ranks say."""
    for name, words in programs.SCENARIOS.items():
        for front_end in ("composable", "wrapper"):
            # What the wrapper shows are no DTensors, and it says some in other words.
            if front_end == "composable" or name not in ("backward raises", "not in the loss", "full tensor"):
                yield f"{name}, {front_end}", programs.train, (front_end, name, "FOLDER"), words
    for how in programs.CUTS:
        yield f"cut: {how}", programs.train_cut_differently, (how,), ["mix up elements", "on rank 2"]
    for front_end, how in itertools.product(("composable", "wrapper"), ("frozen", "dtype")):
        yield (
            f"parameters: {how}, {front_end}",
            programs.train_with_other_parameters,
            (front_end, how),
            ["different param"],
        )
    yield "save, killed", programs.save_without_one, ("FOLDER",), ["its process is gone", "on rank 2"]


def cases(repeat: int) -> Iterator[Case]:
    """Yield all of them, each on another number of ranks and with another store than the one before."""
    where = itertools.cycle(itertools.product((4, 3), STORES))
    for _ in range(2):
        for name, body, arguments, words in divergences():
            world, store = next(where)
            if world == 3:
                words = [
                    each.replace("ranks 0, 1, 3", "ranks 0, 1").replace("ranks 0-3", "ranks 0-2") for each in words
                ]
            yield Case(name, body, arguments, words, world, store)
        next(where)
    for number in range(repeat):
        for program in CORRECT:
            world, store = next(where)
            if program is programs.replica_that_is_through:
                world = 4
            front_end = ("composable", "wrapper")[number % 2]
            name = program.__name__
            yield Case(f"{name}, {front_end}", run_correct, (name, front_end), None, world, store)


def main() -> None:
    """Run them and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--load", type=int, default=0, help="processes that compute meanwhile")
    parser.add_argument("--repeat", type=int, default=5, help="times of each correct program")
    parser.add_argument("--at-once", type=int, default=6, help="programs that run at the same time")
    parser.add_argument("--only", default="", help="part of a name")
    options = parser.parse_args()
    programs.STUCK_S, programs.LOST_S, programs.LONG_S = 3.0, 60.0, LONG_S
    waiting = [case for case in cases(options.repeat) if options.only in case.name]
    sys.exit(run_all(waiting, at_once=options.at_once, load=options.load))


def run_all(waiting: list[Any], at_once: int, load: int = 0) -> bool:
    """Run cases and report. Returns True if one has failed."""
    spinners = [_spin() for _ in range(load)]
    running: list[Case] = []
    failed, times, total = [], [], len(waiting)
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(waiting.pop(0))
                running[-1].start()
            time.sleep(0.5)
            for case in [each for each in running if each.is_over()]:
                running.remove(case)
                times += [(s, case.name) for text in case.said().values() if (s := _seconds(text)) is not None]
                told = case.end()
                print(f"{'FAILED' if told else 'ok':6} {case.name} ({case.world} ranks, {case.store})", flush=True)
                if told:
                    failed.append(case)
                    print(f"       {told}\n       {case.statuses} {case.folder}", flush=True)
    finally:
        for pid in [*spinners, *(pid for case in running for pid in case.pids)]:
            os.kill(pid, signal.SIGKILL)
    by_name = {name: seconds for seconds, name in sorted(times)}
    slowest = sorted(((seconds, name) for name, seconds in by_name.items()), reverse=True)[:8]
    print(
        f"{total} programs, {len(failed)} failed, load {os.getloadavg()[0]:.0f}; from the step's begin to the error: "
        f"{slowest}"
    )
    return bool(failed)


def _spin() -> int:
    if pid := os.fork():
        return pid
    while True:
        pass


if __name__ == "__main__":
    main()
