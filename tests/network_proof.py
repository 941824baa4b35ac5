"""Networks that fail while two hosts train: down for 1 to 120 s, slow for 20 s, and a host that is gone for good.

    cd tests && python -m network_proof --at-once 6

Hosts are network namespaces (``bench.hosts``), so it needs root. Ranks have the watchdog as it comes, and their store
is on the first host. Where the link comes back, losses and weights have to be those of a run without trouble.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from bench.hosts.network import INTERFACE, hosts_on_this_machine
from torch import nn

import fullshard

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("forward", "backward", "optimizer", "save")
SECONDS = (1, 6, 20, 60, 120)
WIDTH, MEGABITS, LIMIT_S = 256, 500, 600
STORE = "tcp://host0:29500"
# Ranks of other hosts cannot look whether a process still has its lock there.
_OWN_MEMORY = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs memory /dev/shm && exec "$@"', "sh"]


# ------------------------------------------------------------------ on a rank


class Pause(nn.Module):
    """Stops both ranks in the forward, or in the backward, of one step."""

    def __init__(self, meet: Callable[[str], None]) -> None:
        super().__init__()
        self.meet = meet

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.meet("forward")
        x = x * 1
        x.register_hook(lambda gradient: self.meet("backward"))
        return x


def train(rank: int, folder: Path, places: Sequence[str]) -> list[float]:
    """Train and save; at each place once, in steps of their own, both ranks wait until something was done to the link.

    Returns:
        The losses, and the sum of the weights.
    """
    step = 0

    def meet(place: str) -> None:
        if place == (dict(enumerate(places)).get((step - 1) // 2) if step % 2 else None):
            (folder / f"{place}.{rank}").touch()
            while not (folder / place).exists():
                time.sleep(0.02)

    dist.init_process_group("gloo", init_method=STORE, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    model.insert(2, Pause(meet))
    for layer in model:
        fullshard.fully_shard(layer)
    fullshard.fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimizer.register_step_pre_hook(lambda *_: meet("optimizer"))
    losses = []
    for step in range(2 * len(places) + 2):
        loss = model(torch.full((8, WIDTH), 0.1 + rank + step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 2:
            meet("save")
            fullshard.checkpoint.save(folder / "checkpoint", model, optimizer)
    fullshard.checkpoint.load(folder / "checkpoint", model, optimizer)
    weights = [parameter.full_tensor().double().sum().item() for parameter in model.parameters()]
    return [*losses, sum(weights)]


def main_of_rank(rank: int, folder: Path, places: Sequence[str]) -> None:
    """Write down what came of it."""
    try:
        said: object = train(rank, folder, places)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    (folder / f"said.{rank}.partial").write_text(json.dumps(said))
    (folder / f"said.{rank}.partial").rename(folder / f"said.{rank}")
    os._exit(0)


# ------------------------------------------------------------------ two hosts


@dataclass(frozen=True)
class Trouble:
    """What happens to the link of the second host.

    Args:
        place: Of both ranks, when it begins.
        seconds: How long; None: for good, as all processes of the host are killed.
        megabits: Its rate meanwhile; 0: it is down, so that killed processes cannot even close their connections.
    """

    place: str
    seconds: float | None
    megabits: float = 0
    host: int = 1


def run(troubles: Sequence[Trouble], name: str) -> tuple[list[object], float]:
    """Train on two hosts with troubles, each in a step of its own.

    Args:
        troubles: In the order of ``PLACES``.
        name: Of the namespaces, which exist once on the machine.

    Returns:
        What the ranks have said, without that of a host that is gone; and the seconds since the last trouble began.
    """
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
    ranks, begun, alive = [], time.monotonic(), range(2)
    with hosts_on_this_machine(2, name) as network, tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        words = ["--folder", temporary, "--places", ",".join(trouble.place for trouble in troubles)]

        def wait_for(paths: Sequence[Path]) -> None:
            end = time.monotonic() + LIMIT_S
            while not all(path.exists() for path in paths):
                if time.monotonic() > end or any(ranks[rank].poll() for rank in alive):
                    raise TimeoutError(f"no {[path.name for path in paths]} of {troubles}")
                time.sleep(0.02)

        network.set_rate(MEGABITS)
        try:
            for rank in alive:
                program = [sys.executable, "-m", "network_proof", "--rank", str(rank), *words]
                command = [*network.inside(rank), *_OWN_MEMORY, *program]
                ranks.append(subprocess.Popen(command, env=environment, cwd=Path(__file__).parent))
            for trouble in troubles:
                wait_for([folder / f"{trouble.place}.{rank}" for rank in alive])
                begun = time.monotonic()
                if trouble.megabits:
                    network.set_rate(trouble.megabits)
                else:
                    network.set_link(trouble.host, up=False)
                (folder / trouble.place).touch()
                if trouble.seconds is None:
                    network.kill(trouble.host)
                    alive = range(1 - trouble.host, 2 - trouble.host)
                    break
                time.sleep(trouble.seconds)
                if trouble.megabits:
                    network.set_rate(MEGABITS)
                else:
                    network.set_link(trouble.host, up=True)
            said = [folder / f"said.{rank}" for rank in alive]
            wait_for(said)
            return [json.loads(path.read_text()) for path in said], time.monotonic() - begun
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def check(trouble: Trouble, name: str, expected: object) -> bool:
    """Report about one; True if it is as it should be."""
    try:
        said, seconds = run([trouble], name)
    except TimeoutError as error:
        said, seconds = [str(error)], LIMIT_S
    lost = "store of the process groups" if trouble.host == 0 else "rank 1 is lost"
    well = lost in str(said[0]) if trouble.seconds is None else said == expected
    print(f"{'ok' if well else 'FAILED':6} {trouble}: {seconds:.0f} s", flush=True)
    if not well or trouble.seconds is None:
        print(f"       {said}", flush=True)
    return well


def main() -> None:
    """Be a rank, or run all and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--at-once", type=int, default=6, help="trainings at the same time")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--places", type=lambda text: text.split(","))
    options = parser.parse_args()
    if options.rank is not None:
        main_of_rank(options.rank, options.folder, options.places)
    troubles = [
        *(Trouble(place, seconds) for seconds in SECONDS for place in PLACES),
        *(Trouble(place, 20, megabits=1) for place in PLACES),
        *(Trouble(place, None, megabits) for megabits in (0, MEGABITS) for place in PLACES),
        *(Trouble(place, None, host=0) for place in PLACES),
    ]
    expected, _ = run([Trouble(PLACES[0], 0)], "fs-expected")
    with ThreadPoolExecutor(options.at_once) as threads:
        names = (f"fs-proof-{number}" for number in range(len(troubles)))
        failed = sum(not well for well in threads.map(partial(check, expected=expected), troubles, names))
    print(f"{len(troubles)} troubles, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
