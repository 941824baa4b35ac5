"""Device memory of a step, by the caching allocator's own count, and where models and inputs are."""

from __future__ import annotations

import pytest
import torch
from on_device import built, fake_mesh, keep_busy, on_device, peak_above
from torch import nn

from front_ends import COMPOSABLE, FLAT, ORIGINAL, FrontEnd, unwrapped
from fullshard.engine.ownership import nested_units
from models import Block, held_bytes
from ranks import Rank

WIDTH, BLOCKS = 256, 6
each_front_end = pytest.mark.parametrize("front_end", [COMPOSABLE, ORIGINAL, FLAT], ids=str)


BLOCK_BYTES = 4 * sum(parameter.numel() for parameter in Block(WIDTH).parameters())


def build(device: torch.device | str, blocks: int = BLOCKS) -> nn.Sequential:
    return built(lambda: nn.Sequential(*(Block(WIDTH) for _ in range(blocks))), device=device)


@on_device(1, fresh=True)
@each_front_end
def test_forward_holds_two_blocks_and_a_step_leaves_nothing(rank: Rank, front_end: FrontEnd) -> None:
    """A forward holds two blocks' full parameters above shards and activations, never all, and leaves nothing.

    After a step, also of a unit run on its own first, all memory but that of sharded gradients is given back.
    """
    with fake_mesh(rank, 8) as mesh:
        model = front_end.wrap(build(rank.device), rank, mesh=mesh)
        x = torch.randn(4, WIDTH, device=rank.device)
        unwrapped(model)[0](x).sum().backward()
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
        model = COMPOSABLE.wrap(build(rank.device), rank, mesh=mesh)
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
@each_front_end
def test_models_and_inputs_move_to_the_device(rank: Rank, front_end: FrontEnd) -> None:
    """A model built on the CPU and inputs that are there are moved, and training is that of the plain model."""
    reference = build(rank.device, 2)
    model = front_end.wrap(build("cpu", 2), rank)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, reference))
    for _ in range(2):
        x = torch.randn(8, WIDTH, device="cpu")  # the same on all ranks, which have the same seed
        loss, expected = model(x).square().mean(), reference(x.to(rank.device)).square().mean()
        assert loss.device == rank.device
        torch.testing.assert_close(loss, expected)
        for one in (loss, expected):
            one.backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
