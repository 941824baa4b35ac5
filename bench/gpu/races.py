"""Steps with streams held up, against the same steps without, bit by bit.

A missing wait goes unnoticed while the stream that should have been waited for is early enough. So each mode trains
three times: as it comes; with every launch on a side stream held up by a spinning kernel; and with the computation held
up before every unit, forward and backward. Memory that is not filled yet reads as NaN (``FULLSHARD_POISON=1``). All
three must end with the same bits. That the check can fail is shown by a fault: side streams that nobody waits for.

Rank 0 of 8 that all hold the same, on a modelled network that takes no time: collectives are copies on a stream of
their own. On the emulated accelerator nothing is held up; there the race checker looks on, and has to find the fault.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn

from bench import report
from bench.gpu.device import EMULATED, hold_up, ranks_alike, use
from bench.gpu.models import Perceptron, perceptrons
from bench.gpu.parts import Settings
from bench.turns import each_that_runs
from fullshard import CPUOffloadPolicy, MixedPrecisionPolicy
from fullshard import memory as fullshard_memory

RANKS, STEPS, SECONDS = 8, 3, 0.002
MODES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "kept after forward": {"reshard_after_forward": False},
    "bf16, fp32 reductions": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "CPU offload": {"offload_policy": CPUOffloadPolicy()},
    "wrapper, flat parameters": {"use_orig_params": False},
    "wrapper, original parameters": {"use_orig_params": True},
}
HELD_UP = ("nothing", "side streams", "computation")


@contextlib.contextmanager
def side_streams_held_up(device: torch.device) -> Iterator[None]:
    """Have every launch of a lane begin with a spinning kernel."""
    usual = fullshard_memory.DeviceCommStream.issue

    def issue(self: Any, launch: Callable[[], Any], finish: Callable[[], None], **options: Any) -> Any:
        def later() -> Any:
            hold_up(device, SECONDS)
            return launch()

        return usual(self, later, finish, **options)

    with mock.patch.object(fullshard_memory.DeviceCommStream, "issue", issue):
        yield


def hold_up_computation(model: nn.Module, device: torch.device) -> None:
    """Have every block begin with a spinning kernel, forward and backward."""
    for block in model.modules():
        if isinstance(block, Perceptron):
            block.register_forward_pre_hook(lambda *_: hold_up(device, SECONDS))
            block.register_full_backward_pre_hook(lambda *_: hold_up(device, SECONDS))


def train(width: int, device: torch.device, options: dict[str, Any], held_up: str) -> list[torch.Tensor]:
    """The losses of some steps, and the weights afterwards."""
    model = perceptrons(width, device, RANKS, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    if held_up == "computation":
        hold_up_computation(model, device)
    found = []
    with side_streams_held_up(device) if held_up == "side streams" else contextlib.nullcontext():
        for step in range(STEPS):
            x = torch.randn(16, width, generator=torch.Generator().manual_seed(step)).to(device)
            loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
    torch.accelerator.synchronize()
    weights = [getattr(parameter, "_local_tensor", parameter).detach() for parameter in model.parameters()]
    return [tensor.cpu().clone() for tensor in (*found, *weights)]


def compare(width: int, device: torch.device, options: dict[str, Any]) -> dict[str, Any]:
    """Which of the held-up runs ended with other bits than the one that was not, and how many races were seen."""
    results = {name: train(width, device, options, name) for name in HELD_UP}
    expected = results["nothing"]
    differing = [name for name in HELD_UP[1:] if not _same(results[name], expected)]
    return {
        "finite": all(tensor.isfinite().all().item() for tensor in expected),
        "differ": differing,
        "races": _races(device),
    }


def _same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(
        torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
        for one, other in zip(found, expected, strict=True)
    )


def _races(device: torch.device) -> int | None:
    """Races that the emulated accelerator has found since the last call."""
    if device.type != EMULATED:
        return None
    from accelerator.races import take_races

    return len(take_races())


def fault(width: int, device: torch.device) -> dict[str, Any]:
    """What the check says when nobody waits for what runs on side streams, not even when a ticket is dropped."""
    pending_work = fullshard_memory._DeviceWork
    with mock.patch.object(pending_work, "wait"), mock.patch.object(pending_work, "__del__", create=True):
        return compare(width, device, {})


def measure(settings: Settings) -> dict[str, Any]:
    """What ``compare`` found, by mode; and of a fault."""
    device = use(settings.device)
    width = 32 if settings.small else 512
    with ranks_alike(RANKS, device):
        modes, failures = each_that_runs(tuple(MODES), lambda name: compare(width, device, MODES[name]))
        faults, unnoticed = each_that_runs(("side streams that nobody waits for",), lambda _: fault(width, device))
    return {"modes": modes, "faults": faults, "not_run": {**failures, **unnoticed}}


def table(result: Mapping[str, Any]) -> str:
    """Markdown of what ``measure`` returned."""
    rows = [[name, *_verdict(entry)] for name, entry in result["modes"].items()]
    rows += [[f"a fault: {name}", *_verdict(entry)] for name, entry in result["faults"].items()]
    rows += [[name, f"cannot run: {why}", "-"] for name, why in result["not_run"].items()]
    header = ["mode", "bits with delayed streams", "races"]
    if all(row[-1] == "-" for row in rows):  # nobody looks for races on a real device
        header, rows = header[:-1], [row[:-1] for row in rows]
    return report.markdown_table(header, rows)


def _verdict(entry: Mapping[str, Any]) -> list[str]:
    bits = f"differ with {' and '.join(entry['differ'])}" if entry["differ"] else "the same"
    bits += "" if entry["finite"] else ", not finite"
    return [bits, "-" if entry["races"] is None else str(entry["races"])]
