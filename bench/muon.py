"""Muon on sharded matrices: owners compute, against every rank gathering everything.

    python -m bench.muon --write-document
    python -m bench.muon --rounds 3 --width 256

One step of the optimizer alone, on the matrices of a GPT with gradients that are there already:

``fullshard``            each matrix orthogonalized by one rank, exchanges overlapped in rounds
``fullshard-one-round``  the same without overlap: everything travels, is computed, and travels back
``gather``               every rank gathers every matrix (bf16) and orthogonalizes all of them, one after another
``torch-dtensor``        ``torch.optim.Muon`` on the DTensors, which gathers as its operators need it
``plain``                ``torch.optim.Muon`` on whole matrices on every rank: the computation of ``gather`` alone

Contestants live in the same two gloo processes and take turns; ratios are paired per round. Their parameters have to
have the same bits in the end (``torch-dtensor`` sums in another order: almost). Then the bytes of a step, from
optimizers on fake process groups of several sizes with the matrices of a 7-billion-parameter model on the meta
device, beside the bounds.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer
from rich.console import Console
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from bench import report
from bench.contestants import start_fake_group
from bench.environment import current_environment
from bench.statistics import Spread, paired_spread, spread, turn_order
from fullshard import fully_shard
from fullshard.optim.muon.matrix_optimizer import ROUND_BYTES
from fullshard.optim.muon.muon import Muon, orthogonalize

FULLSHARD, ONE_ROUND, GATHER, TORCH, PLAIN = "fullshard", "fullshard-one-round", "gather", "torch-dtensor", "plain"
CONTESTANTS = (FULLSHARD, ONE_ROUND, GATHER, TORCH, PLAIN)
EXACT = (FULLSHARD, ONE_ROUND, GATHER)  # whose parameters have the bits of the plain ones
GROUP_SIZES = (2, 8, 64)
# A 7B Llama: 32 blocks of four attention matrices and three of the MLP.
LARGE = [(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008)]
LARGE_BLOCKS = 32

console = Console(highlight=False)


@dataclass(frozen=True)
class Settings:
    """What is measured: matrices of ``blocks`` GPT blocks of that width, on so many gloo processes."""

    width: int
    blocks: int
    ranks: int
    rounds: int
    threads: int
    round_bytes: int

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Of all matrices."""
        w = self.width
        return [(3 * w, w), (w, w), (4 * w, w), (w, 4 * w)] * self.blocks


class GatherMuon(torch.optim.Optimizer):
    """What one writes first: gather each matrix on every rank, orthogonalize it there, keep one's own part."""

    def __init__(self, params: Sequence[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.95, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            for p in group["params"]:
                local, gradient = p._local_tensor, p.grad._local_tensor
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(gradient))
                buffer.lerp_(gradient, 1 - group["momentum"])
                part = gradient.lerp(buffer, group["momentum"]).bfloat16()
                spread_out = DTensor.from_local(
                    part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
                )
                update = orthogonalize(spread_out.full_tensor())
                whole = DTensor.from_local(update, p.device_mesh, [Replicate()], run_check=False)
                mine = whole.redistribute(placements=p.placements)._local_tensor
                rate = group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5
                local.mul_(1 - group["lr"] * group["weight_decay"]).add_(mine, alpha=-rate)


class Runner:
    """One contestant on one rank."""

    def __init__(self, name: str, settings: Settings) -> None:
        torch.manual_seed(0)
        whole = [torch.randn(shape) * 0.02 for shape in settings.shapes]
        gradients = [torch.randn(shape) * 0.01 for shape in settings.shapes]
        model = Matrices(whole)
        if name != PLAIN:
            fully_shard(model)
        self.parameters = list(model.parameters())
        for p, gradient in zip(self.parameters, gradients, strict=True):
            if isinstance(p, DTensor):
                spread_out = DTensor.from_local(gradient, p.device_mesh, [Replicate()], run_check=False)
                p.grad = spread_out.redistribute(placements=p.placements)
            else:
                p.grad = gradient
        self.optimizer = _optimizer(name, self.parameters, settings)

    def step(self) -> float:
        """Seconds of one step, from all ranks' start to this rank's end."""
        dist.barrier()
        start = time.perf_counter()
        self.optimizer.step()
        return time.perf_counter() - start

    def result(self) -> list[torch.Tensor]:
        """The whole parameters."""
        return [(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in self.parameters]


class Matrices(nn.Module):
    """Nothing but matrices."""

    def __init__(self, whole: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.list = nn.ParameterList(nn.Parameter(matrix) for matrix in whole)

    def forward(self) -> None:
        """Never called: gradients are given."""
        raise NotImplementedError


def _optimizer(name: str, parameters: Sequence[nn.Parameter], settings: Settings) -> torch.optim.Optimizer:
    if name == FULLSHARD:
        return Muon(parameters, lr=0.01, round_bytes=settings.round_bytes)
    if name == ONE_ROUND:
        return Muon(parameters, lr=0.01, round_bytes=1 << 50)
    if name == GATHER:
        return GatherMuon(parameters, lr=0.01)
    return torch.optim.Muon(parameters, lr=0.01)


def _work(rank: int, settings: Settings, port: int, answer: str) -> None:
    """One process: all contestants take turns; rank 0 writes the slowest rank's times."""
    torch.set_num_threads(settings.threads)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", rank=rank, world_size=settings.ranks)
    runners: dict[str, Runner] = {}
    failures: dict[str, str] = {}
    for name in CONTESTANTS:
        try:
            runners[name] = Runner(name, settings)
            runners[name].step()
        except Exception as error:  # the same on all ranks
            failures[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            runners.pop(name, None)
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for index in range(settings.rounds):
        for name in turn_order(list(runners), index):
            slowest = torch.tensor(runners[name].step())
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            seconds[name].append(float(slowest))
    differences = _differences(runners)
    if rank == 0:
        text = json.dumps({"seconds": seconds, "differences": differences, "failures": failures})
        Path(answer).write_text(text, encoding="utf-8")
    dist.destroy_process_group()


def _differences(runners: Mapping[str, Runner]) -> dict[str, float]:
    """The largest difference of a parameter from the plain contestant's."""
    reference = runners[PLAIN].result()
    found = {}
    for name, runner in runners.items():
        pairs = zip(runner.result(), reference, strict=True)
        found[name] = max(float((mine - theirs).abs().max()) for mine, theirs in pairs)
    return found


def compete(settings: Settings) -> dict[str, Any]:
    """Seconds per contestant and round, differences, and who could not run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        mp.spawn(_work, args=(settings, port, str(answer)), nprocs=settings.ranks)
        result: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return result


def check(result: Mapping[str, Any]) -> None:
    """Refuse to report times of contestants that computed something else.

    Raises:
        RuntimeError: Says which.
    """
    wrong = {name: result["differences"][name] for name in EXACT if result["differences"].get(name) != 0}
    if wrong:
        raise RuntimeError(f"parameters differ from the plain contestant's: {wrong}")


def step_table(seconds: Mapping[str, Sequence[float]], differences: Mapping[str, float]) -> str:
    """Times, and ratios to gathering everything."""
    rows = []
    for name, times in seconds.items():
        ratio = f"{paired_spread(times, seconds[GATHER]):.2f}" if GATHER in seconds else "-"
        rows.append([name, f"{1e3 * spread(times).median:.0f}", ratio, f"{differences[name]:.1g}"])
    return report.markdown_table(["contestant", "step, ms", "/ gather", "largest difference from plain"], rows)


def traffic_of(ranks: int) -> dict[str, float]:
    """GB that the busiest rank and a mean one send per step of the large model, the bounds, and the balance of work."""
    start_fake_group(ranks)
    try:
        with torch.device("meta"):
            model = Matrices([torch.empty(shape) for shape in LARGE * LARGE_BLOCKS])
        fully_shard(model)
        optimizer = Muon(list(model.parameters()))
        sent = [optimizer.traffic(rank).total for rank in range(ranks)]
        loads = [0.0] * ranks
        for _, exchanged in optimizer.plan().rounds:
            assert exchanged is not None
            for matrix, owner in zip(exchanged.matrices, exchanged.owner_ranks, strict=True):
                loads[owner] += optimizer.work(matrix.shape, optimizer.param_groups[0])
        rounds = len(optimizer.plan().rounds)
    finally:
        dist.destroy_process_group()
    elements = sum(rows * columns for rows, columns in LARGE) * LARGE_BLOCKS
    return {
        "busiest": max(sent) / 1e9,
        "mean": sum(sent) / ranks / 1e9,
        "bound": 2 * 2 * elements * (ranks - 1) / ranks**2 / 1e9,
        "gather": 2 * elements * (ranks - 1) / ranks / 1e9,
        "balance": max(loads) * ranks / sum(loads),
        "rounds": rounds,
    }


def traffic_table(found: Mapping[int, Mapping[str, float]]) -> str:
    """One row per group size."""
    header = ["ranks", "mean, GB", "busiest, GB", "bound, GB", "mean / bound", "gather, GB", "work / mean", "rounds"]
    rows = [
        [
            str(ranks),
            f"{each['mean']:.3f}",
            f"{each['busiest']:.3f}",
            f"{each['bound']:.3f}",
            f"{each['mean'] / each['bound']:.4f}",
            f"{each['gather']:.2f}",
            f"{each['balance']:.3f}",
            f"{each['rounds']:.0f}",
        ]
        for ranks, each in found.items()
    ]
    return report.markdown_table(header, rows)


def main(
    width: Annotated[int, typer.Option(min=8, help="Width of the GPT whose matrices these are.")] = 512,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks: four matrices each.")] = 4,
    ranks: Annotated[int, typer.Option(min=1, help="Gloo processes.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of turns.")] = 9,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each process.")] = 1,
    round_bytes: Annotated[int, typer.Option(min=1, help="Of the contestant with rounds.")] = 2 * 1024 * 1024,
    results: Annotated[Path, typer.Option(help="Folder of the JSON and the plot.")] = report.RESULTS,
    document: Annotated[Path, typer.Option(help="Markdown page with the tables.")] = report.DOCUMENT,
    write_document: Annotated[bool, typer.Option("--write-document", help="Write the tables into the page.")] = False,
) -> None:
    """Compare a step of Muon with owners to one in which every rank gathers everything."""
    settings = Settings(width, blocks, ranks, rounds, threads, round_bytes)
    result = compete(settings)
    check(result)
    traffic = {size: traffic_of(size) for size in GROUP_SIZES}
    environment = current_environment()
    seconds = result["seconds"]
    steps, moved = step_table(seconds, result["differences"]), traffic_table(traffic)
    path = results / f"muon_{environment.name}.json"
    report.write_json(
        path,
        {
            "benchmark": "muon",
            "settings": asdict(settings),
            "environment": environment.as_json(),
            **result,
            "traffic": {str(size): found for size, found in traffic.items()},
        },
    )
    console.print(f"\n{steps}\n\n{moved}\n", markup=False, soft_wrap=True)
    image = path.with_suffix(".png")
    ratios: dict[str, float | Spread] = {name: paired_spread(times, seconds[GATHER]) for name, times in seconds.items()}
    title = f"A step of Muon on {len(settings.shapes)} matrices, {ranks} gloo ranks (whiskers: quartiles)"
    report.plot_bars(image, title, [report.Panel("time / gathering everything", ratios, 1.0)])
    if write_document:
        lines = [
            f"{len(settings.shapes)} matrices of a GPT of width {width} on {ranks} gloo ranks, {threads} thread each, "
            f"rounds of {round_bytes / 2**20:g} MiB per owner; {rounds} rounds of turns. Ratios: median (quartiles).",
            "",
            steps,
            "",
            *(f"`{name}` could not run: {reason}." for name, reason in result["failures"].items()),
            "",
            "Bytes that a rank sends per step, bf16, from the plans of optimizers on fake groups, the matrices of a 7B "
            f"Llama (6.5 billion elements), rounds of {ROUND_BYTES / 2**20:g} MiB per owner. Bound: 2 b P (N-1)/N^2; "
            "beyond it travels one number per matrix and message. Work: of the rank with most, over the mean.",
            "",
            moved,
            "",
            report.provenance(environment),
            "",
            report.image_link(image, document, "A step of Muon"),
        ]
        report.update_document(document, "muon", "\n".join(lines))
    console.print(f"wrote {path.name}")


if __name__ == "__main__":
    typer.run(main)
