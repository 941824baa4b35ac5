"""Capture of a training step of ``fully_shard`` as a graph, and its replays against the same steps without.

Rank 0 of 8 that all hold the same, on a modelled network that takes no time: streams, events and memory are those of a
real run, and copies take the place of NCCL's kernels. On the emulated accelerator a capture is a check for what a
capture forbids, and nothing is replayed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from bench import report
from bench.gpu.device import CUDA, forget_freed, ranks_alike, use
from bench.gpu.models import perceptrons
from bench.gpu.parts import Settings
from bench.turns import each_that_runs

RANKS, STEPS, WARM_UP = 8, 4, 3
# Name -> reshard_after_forward.
CASES = {"reshard_after_forward=False": False, "reshard_after_forward=True": True}


class Run:
    """A model whose step reads its input from one tensor and leaves its loss in another."""

    def __init__(self, width: int, device: torch.device, ranks: int, reshard: bool, seed: int = 0) -> None:
        self.model = perceptrons(width, device, ranks, reshard_after_forward=reshard)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)
        self.x = torch.zeros(32, width, device=device)
        self.loss = torch.zeros((), device=device)
        generator = torch.Generator().manual_seed(seed)
        self.inputs = [torch.randn(32, width, generator=generator) for _ in range(STEPS)]

    def step(self) -> None:
        """One step; gradients stay, so that a graph writes them where it found them."""
        self.optimizer.zero_grad(set_to_none=False)
        loss = self.model(self.x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.loss.copy_(loss.detach())

    def losses(self, step: Any) -> list[float]:
        """Of one step per input."""
        found = []
        for values in self.inputs:
            self.x.copy_(values)
            step()
            found.append(self.loss.item())
        return found


def measure(settings: Settings) -> dict[str, Any]:
    """Losses with and without a graph, or what the capture ran into, by case."""
    device = use(settings.device)
    width = 32 if settings.small else 512
    with ranks_alike(RANKS, device):
        capture = _replayed if device.type == CUDA else _checked
        cases, failures = each_that_runs(tuple(CASES), lambda name: capture(width, device, CASES[name]))
    return {"cases": cases, "not_run": failures}


def warmed_up(run: Run) -> Run:
    """After some steps on a stream of their own, as captures want it, with the weights of the beginning."""
    start = copy.deepcopy([parameter.to_local().detach() for parameter in run.model.parameters()])
    side = torch.Stream(device=run.x.device)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        for _ in range(WARM_UP):
            run.step()
    torch.accelerator.current_stream().wait_stream(side)
    with torch.no_grad():
        for parameter, value in zip(run.model.parameters(), start, strict=True):
            parameter.to_local().copy_(value)
    torch.accelerator.synchronize()
    return run


def _replayed(width: int, device: torch.device, reshard: bool) -> dict[str, Any]:
    eager = warmed_up(Run(width, device, RANKS, reshard))
    expected = eager.losses(eager.step)
    captured = warmed_up(Run(width, device, RANKS, reshard))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # nothing runs yet: the weights are those of the beginning
        captured.step()
    found = captured.losses(graph.replay)
    same = all(
        torch.equal(one.to_local(), other.to_local())
        for one, other in zip(eager.model.parameters(), captured.model.parameters(), strict=True)
    )
    del graph
    forget_freed()
    return {
        "eager": expected,
        "replayed": found,
        "same_losses": found == expected and len(set(found)) == STEPS,
        "same_weights": same,
    }


def _checked(width: int, device: torch.device, reshard: bool) -> dict[str, Any]:
    from accelerator.races import capture

    run = warmed_up(Run(width, device, RANKS, reshard))
    with capture() as forbidden:
        run.step()
    return {"forbidden": [str(access) for access in forbidden]}


def table(result: Mapping[str, Any]) -> str:
    """Markdown of what ``measure`` returned."""
    rows = []
    for name, case in result["cases"].items():
        if "forbidden" in case:
            rows.append([name, f"{len(case['forbidden'])} forbidden calls", "-"])
        else:
            rows.append([name, *("the same" if case[key] else "differ" for key in ("same_losses", "same_weights"))])
    rows += [[name, f"cannot be captured: {why}", "-"] for name, why in result["not_run"].items()]
    return report.markdown_table(["step", f"losses of {STEPS} replays", "weights afterwards"], rows)
