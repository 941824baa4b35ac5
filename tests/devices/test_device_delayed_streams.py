"""Steps end with the same bits when side streams, or the computation, are held up by spinning kernels.

A missing wait goes unnoticed while the stream that should have been waited for is early enough. Where nothing spins
(the emulated device) the race checker looks on.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.simulators.spinning import StreamDevice
from on_device import keep_busy, on_device

from fullshard import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from fullshard import memory as fullshard_memory
from fullshard.planning.simulation.network import Network
from fullshard.planning.simulation.ranks import modelled_ranks
from fullshard.wrap import ModuleWrapPolicy
from models import Block
from ranks import Rank

RANKS, WIDTH, SECONDS = 8, 64, 0.002
MODES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "kept after forward": {"reshard_after_forward": False},
    "bf16, fp32 reductions": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "CPU offload": {"offload_policy": CPUOffloadPolicy()},
    "wrapper, flat parameters": {"use_orig_params": False},
    "wrapper, original parameters": {"use_orig_params": True},
}


@contextlib.contextmanager
def side_streams_held_up(device: torch.device) -> Iterator[None]:
    """Every launch on a communication stream begins with a spinning kernel."""
    usual = fullshard_memory.DeviceCommStream.issue

    def issue(self: Any, launch: Callable[[], Any], finish: Callable[[], None], **options: Any) -> Any:
        def later() -> Any:
            keep_busy(device, SECONDS)
            return launch()

        return usual(self, later, finish, **options)

    with mock.patch.object(fullshard_memory.DeviceCommStream, "issue", issue):
        yield


def sharded(device: torch.device, options: dict[str, Any]) -> nn.Module:
    """Four blocks, each a unit; of the wrapper if its flag is an option."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(WIDTH) for _ in range(4))).to(device)
    mesh = init_device_mesh(device.type, (RANKS,))
    if "use_orig_params" in options:
        return FullyShardedDataParallel(model, device_mesh=mesh, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def trained(device: torch.device, options: dict[str, Any], held_up: str = "") -> list[torch.Tensor]:
    """The losses of three steps, and the weights afterwards."""
    model = sharded(device, options)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9), []
    for block in (each for each in model.modules() if isinstance(each, Block) and held_up == "computation"):
        block.register_forward_pre_hook(lambda *_: keep_busy(device, SECONDS))
        block.register_full_backward_pre_hook(lambda *_: keep_busy(device, SECONDS))
    with side_streams_held_up(device) if held_up == "side streams" else contextlib.nullcontext():
        for step in range(3):
            x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step), device="cpu").to(device)
            loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
    torch.accelerator.synchronize()
    weights = [getattr(parameter, "_local_tensor", parameter).detach() for parameter in model.parameters()]
    return [tensor.cpu().clone() for tensor in (*found, *weights)]


@contextlib.contextmanager
def ranks_alike(rank: Rank) -> Iterator[None]:
    """Be rank 0 of 8 that all hold the same: collectives are copies on a stream of their own, which take no time."""
    dist.destroy_process_group()
    with modelled_ranks(RANKS, Network(bandwidth=math.inf), device=StreamDevice(rank.device)):
        yield


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Bit by bit."""
    pairs = zip(found, expected, strict=True)
    return all(torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)) for a, b in pairs)


@on_device(1, fresh=True)
@pytest.mark.parametrize("mode", MODES)
def test_delayed_streams_change_no_bit(rank: Rank, mode: str) -> None:
    """Every wait that a step needs is there, whichever stream is late."""
    with ranks_alike(rank):
        expected = trained(rank.device, MODES[mode])
        assert all(tensor.isfinite().all() for tensor in expected)
        for held_up in ("side streams", "computation"):
            assert same(trained(rank.device, MODES[mode], held_up), expected), held_up


@on_device(1, fresh=True)
def test_side_streams_that_nobody_waits_for_are_noticed(rank: Rank) -> None:
    """The check can fail."""
    if rank.device.type != "cuda":
        pytest.skip("nothing spins here; the race checker has seeded faults of its own")
    work = fullshard_memory._DeviceWork
    with ranks_alike(rank), mock.patch.object(work, "wait"), mock.patch.object(work, "__del__", create=True):
        expected = trained(rank.device, {})
        assert not same(trained(rank.device, {}, "side streams"), expected)
