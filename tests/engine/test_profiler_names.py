"""Names in profiles: each collective, each wait and the optimizer, with the units that they are done for."""

from __future__ import annotations

import collections

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from front_ends import COMPOSABLE, ORIGINAL, FrontEnd
from fullshard.optim import localize
from fullshard.profiling import profiled
from models import Stack
from ranks import Rank, on_ranks

DIM = 256  # large enough that no unit shares a launch with its neighbor


def names_of_a_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> collections.Counter[str]:
    """The ranges that a profile of a second step has, with how often."""
    for _ in range(2):
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            model(torch.ones(4, DIM)).sum().backward()
            optimizer.step()
        optimizer.zero_grad()
    names = (event.name for event in recorded.events())
    return collections.Counter(name for name in names if name.startswith("fullshard::"))


@on_ranks(2)
@pytest.mark.parametrize("front_end", [COMPOSABLE, ORIGINAL], ids=str)
def test_a_profile_names_what_each_unit_waits_for(rank: Rank, front_end: FrontEnd) -> None:
    """All-gathers in forward and backward, reduce-scatters and waits bear the FQN of their unit."""
    assert profiled("wait", "layers.3") is profiled("optimizer")
    model = front_end.wrap(Stack(3, DIM), rank)
    names = names_of_a_step(model, localize(torch.optim.AdamW(model.parameters())))
    for unit, times in (("root", 1), ("blocks.0", 2), ("blocks.1", 1), ("blocks.2", 1)):  # the last two are kept
        assert names[f"fullshard::all_gather ({unit})"] == times, names
        assert names[f"fullshard::reduce_scatter ({unit})"] == 1, names
        assert names[f"fullshard::wait_for_all_gather ({unit})"] >= times, names
        assert names[f"fullshard::wait_for_reduce_scatter ({unit})"] == 1, names
        assert names[f"fullshard::wait_for_gradients ({unit})"] == 1, names
    assert names["fullshard::optimizer"] == 1, names
    assert not any("all_reduce" in name for name in names), names


@on_ranks(4)
def test_a_profile_names_reductions_over_replicas(rank: Rank) -> None:
    """On a 2-D mesh each unit's reduce-scatter is followed by its all-reduce."""
    model = COMPOSABLE.wrap(Stack(2, DIM), rank, strategy="HYBRID_SHARD")
    names = names_of_a_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for unit in ("root", "blocks.0", "blocks.1"):
        assert names[f"fullshard::reduce_scatter ({unit})"] == names[f"fullshard::all_reduce ({unit})"] == 1, names


@on_ranks(2)
def test_units_that_share_a_launch_share_its_name(rank: Rank) -> None:
    """Tiny units are all-gathered with the one after them, and reduced with the one before: the name lists them."""
    layers = torch.nn.Sequential(torch.nn.LayerNorm(DIM), torch.nn.Linear(DIM, DIM), torch.nn.Linear(DIM, DIM))
    model = COMPOSABLE.wrap(layers, rank)
    names = names_of_a_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    together = [name for name in names if "all_gather (" in name and ", " in name]
    assert any("(0, 1" in name for name in together), names  # on an accelerator the next one as well
