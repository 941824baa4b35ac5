"""Device memory of a step, by the caching allocator's own count, and where models and inputs are."""

from __future__ import annotations

import pytest
import torch
from on_device import fake_mesh, keep_busy, on_device, peak_above
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard import FullyShardedDataParallel, fully_shard
from fullshard.engine.ownership import nested_units
from fullshard.wrap import ModuleWrapPolicy
from models import held_bytes
from ranks import Rank

WIDTH, BLOCKS = 256, 6
FRONT_ENDS = ["fully_shard", "wrapper", "flat wrapper"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


BLOCK_BYTES = 4 * sum(parameter.numel() for parameter in Block().parameters())


def build(device: torch.device, blocks: int = BLOCKS) -> nn.Sequential:
    torch.manual_seed(0)
    with device:
        return nn.Sequential(*(Block() for _ in range(blocks)))


def sharded(front_end: str, mesh: DeviceMesh, device: torch.device, blocks: int = BLOCKS) -> nn.Module:
    model = build(device, blocks)
    if front_end == "fully_shard":
        for block in model:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    policy = ModuleWrapPolicy({Block})
    return FullyShardedDataParallel(
        model, device_mesh=mesh, auto_wrap_policy=policy, use_orig_params=front_end == "wrapper"
    )


@on_device(1, fresh=True)
@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_forward_holds_two_blocks_and_a_step_leaves_nothing(rank: Rank, front_end: str) -> None:
    """A forward holds two blocks' full parameters above shards and activations, never all, and leaves nothing.

    After a step, also of a unit run on its own first, all memory but that of sharded gradients is given back.
    """
    with fake_mesh(rank, 8) as mesh:
        model = sharded(front_end, mesh, rank.device)
        x = torch.randn(4, WIDTH, device=rank.device)
        getattr(model, "module", model)[0](x).sum().backward()
        with torch.no_grad():
            model(x)
            above, left = peak_above(rank.device, lambda: model(x))
        assert above < 2.5 * BLOCK_BYTES and left == 0

        def step() -> None:
            model.zero_grad()
            model(x).sum().backward()

        for _ in range(2):
            step()
        _, left = peak_above(rank.device, step)
        assert left == 0
        assert all(held_bytes(bucket) == 0 for unit in nested_units(model) for bucket in unit.buckets)


@on_device(1, fresh=True)
def test_peak_does_not_depend_on_timing(rank: Rank) -> None:
    """A device that lags behind the host changes nothing in the peak: no record_stream, no events queried."""
    with fake_mesh(rank, 8) as mesh:
        model = sharded("fully_shard", mesh, rank.device)
        x = torch.randn(4, WIDTH, device=rank.device)

        def step() -> None:
            model(x).sum().backward()
            model.zero_grad()

        step()
        step()  # by now the order of units is known
        peaks = []
        for seconds in (0.0, 0.02, 0.0):
            keep_busy(rank.device, seconds)
            peaks.append(max(peak_above(rank.device, step)[0] for _ in range(2)))
    assert len(set(peaks)) == 1


@on_device(1, 2)
@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_models_and_inputs_move_to_the_device(rank: Rank, front_end: str) -> None:
    """A model built on the CPU and inputs that are there are moved, and training is that of the plain model."""
    reference = build(torch.device("cpu"), 2).to(rank.device)
    model = sharded(front_end, rank.mesh, torch.device("cpu"), 2)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, reference))
    for step in range(2):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step), device="cpu")
        loss, expected = model(x).square().mean(), reference(x.to(rank.device)).square().mean()
        assert loss.device == rank.device
        torch.testing.assert_close(loss, expected)
        for one in (loss, expected):
            one.backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
