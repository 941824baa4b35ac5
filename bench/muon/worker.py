"""One rank on which all contestants of ``muon`` live and take turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from bench.turns import reason_of
from bench.worker import join_group
from fullshard import fully_shard
from fullshard.optim.muon.muon import Muon, orthogonalize

FULLSHARD, ONE_ROUND, GATHER, TORCH, PLAIN = "fullshard", "fullshard-one-round", "gather", "torch-dtensor", "plain"
CONTESTANTS = (FULLSHARD, ONE_ROUND, GATHER, TORCH, PLAIN)


def shapes_of(width: int, blocks: int) -> list[tuple[int, int]]:
    """Of the matrices of a GPT."""
    return [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * blocks


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

    def __init__(self, name: str, shapes: Sequence[tuple[int, int]], round_bytes: int) -> None:
        torch.manual_seed(0)
        whole = [torch.randn(shape) * 0.02 for shape in shapes]
        gradients = [torch.randn(shape) * 0.01 for shape in shapes]
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
        self.optimizer = _optimizer(name, self.parameters, round_bytes)

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


def _optimizer(name: str, parameters: Sequence[nn.Parameter], round_bytes: int) -> torch.optim.Optimizer:
    if name == FULLSHARD:
        return Muon(parameters, lr=0.01, round_bytes=round_bytes)
    if name == ONE_ROUND:
        return Muon(parameters, lr=0.01, round_bytes=1 << 50)
    if name == GATHER:
        return GatherMuon(parameters, lr=0.01)
    return torch.optim.Muon(parameters, lr=0.01)


class Worker:
    """Contestants by name.

    Args:
        shapes: Of their matrices.
        round_bytes: Of the contestant with rounds.
    """

    runners: dict[str, Runner]

    def __init__(self, shapes: Sequence[tuple[int, int]], round_bytes: int) -> None:
        self.runners, self._shapes, self._round_bytes = {}, shapes, round_bytes

    def make(self, name: str) -> dict[str, str]:
        """Build and warm up; why that failed, which is the same on all ranks."""
        try:
            runner = Runner(name, self._shapes, self._round_bytes)
            runner.step()
        except Exception as error:
            return {"failed": reason_of(error)}
        self.runners[name] = runner
        return {}

    def step(self, name: str) -> float:
        return self.runners[name].step()

    def difference(self, name: str) -> float:
        """The largest difference of a parameter from the plain contestant's."""
        pairs = zip(self.runners[name].result(), self.runners[PLAIN].result(), strict=True)
        return max(float((mine - theirs).abs().max()) for mine, theirs in pairs)


def build(rank: int, ranks: int, store: str, threads: int, width: int, blocks: int, round_bytes: int) -> Worker:
    join_group(rank, ranks, store)
    return Worker(shapes_of(width, blocks), round_bytes)
