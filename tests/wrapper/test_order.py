"""The order of units in the first forward: compared when it ends, and noted later."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard import FullshardError, FullyShardedDataParallel
from fullshard.ranks.order import (
    END,
    compare_order,
    explain_difference,
    warn_of_change,
)
from fullshard.wrap import ModuleWrapPolicy
from ranks import Rank, on_ranks

# -------------------------------------------------------------------- comparison


DIFFERENT_ORDERS = [
    (["", "b", "a"], 1, "'a' on ranks 0, 1, 3; 'b' on rank 2"),
    (["", "a"], 2, "'b' on ranks 0, 1, 3; no unit (its forward had ended) on rank 2"),
    (["", "a", "b", "c"], 3, "no unit (its forward had ended) on ranks 0, 1, 3; 'c' on rank 2"),
    (["a", "b"], 0, "the root on ranks 0, 1, 3; 'a' on rank 2"),
]


@on_ranks(4)
def test_different_orders_raise_everywhere(rank: Rank) -> None:
    """Every rank raises the same error, which names the first position, and the units and ranks of the world there."""
    for odd, position, told in DIFFERENT_ORDERS:
        with pytest.raises(FullshardError) as caught:
            compare_order(odd if rank.rank == 2 else ["", "a", "b"], [rank.group])
        message = str(caught.value)
        assert f"at position {position} (from 0): {told}. Make all" in message
        messages: list[str] = [""] * rank.world_size
        dist.all_gather_object(messages, message)
        assert set(messages) == {message}
        compare_order(["fine"], [rank.group])  # the group is as good as before
    group = dist.new_group([1, 3])
    if rank.rank in (1, 3):
        with pytest.raises(FullshardError, match="'1' on rank 1; '3' on rank 3"):
            compare_order([str(rank.rank)], [group])


@on_ranks(4)
def test_difference_between_replicas_raises_everywhere(rank: Rank) -> None:
    """Ranks whose own groups agree raise as well, whether shard groups differ inside or from each other."""
    mesh = rank.make_mesh(2, 2, names=("replicate", "shard"))
    groups = [mesh.get_group("shard"), mesh.get_group("replicate")]
    for odd in ([3], [2, 3]):
        with pytest.raises(FullshardError, match=r"'a' on ranks? \d.*; 'b' on rank"):
            compare_order(["b" if rank.rank in odd else "a"], groups)


def test_explanations() -> None:
    """Of many ranks and units, few are named; a rank that has not come as far is no difference."""
    told = explain_difference({rank: ["x" if rank % 8 else "y"] for rank in range(1000)})
    assert told is not None and len(told) < 700
    assert "'y' on ranks 0, 8, 16, " in told and "; 'x' on ranks 1-7, 9-15, " in told
    told = explain_difference({rank: [f"u{rank}"] for rank in range(100)})
    assert told is not None
    assert told.count(" on rank ") == 12 and "and 88 others on other ranks" in told
    assert explain_difference({0: ["a", "b"], 1: ["a"]}) is None
    assert explain_difference({0: ["a", "b"], 1: ["a", END]}) is not None
    assert explain_difference({0: ["a", END], 1: ["a", "b"]}) is not None
    assert explain_difference({0: ["a", END], 1: ["a"]}) is None
    assert explain_difference({}) is None


@on_ranks(1)
def test_warning_of_another_order(rank: Rank) -> None:
    """It names the first position, and what ran there."""
    for now, told in (
        (["a", "c", "b"], "1 (from 0), 'b' ran then and 'c'"),
        (["a"], "1 (from 0), 'b' ran then and no unit (its forward had ended) ran now"),
    ):
        with pytest.warns(UserWarning, match=re.escape(told)):
            warn_of_change(["a", "b", "c"], now)


# -------------------------------------------------------------------- models


class Blocks(nn.Module):
    """Layers that run in the given order."""

    def __init__(self, order: Sequence[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return x


@on_ranks(2)
def test_order_of_a_sharded_model(rank: Rank) -> None:
    """Both ranks name the first units that differ, at the end of the first forward."""
    order = [0, 2, 1, 3] if rank.rank else range(4)
    model = FullyShardedDataParallel(Blocks(order), dist.new_group(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    told = re.escape("position 2 (from 0): 'blocks.1' on rank 0; 'blocks.2' on rank 1")
    with pytest.raises(FullshardError, match=told):
        model(torch.ones(2, 8))


@on_ranks(2)
def test_change_after_the_first_forward_warns_once(rank: Rank) -> None:
    """The first forward in another order warns; further ones, or in the first order, or without gradients, do not."""
    model = FullyShardedDataParallel(
        Blocks([0, 1, 2, 3]).to(rank.device), auto_wrap_policy=ModuleWrapPolicy({nn.Linear})
    )
    blocks = model.module
    assert isinstance(blocks, Blocks)
    x = torch.ones(2, 8, device=rank.device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(x).sum().backward()
        blocks.order = [2, 0]
        with torch.no_grad():
            model(x)
        for order in ([0, 1, 2, 3], [0, 2, 1, 3], [3, 2, 1, 0], [0, 1, 2, 3]):
            blocks.order = order
            model(x).sum().backward()
    found = [str(each.message) for each in caught if "different order" in str(each.message)]
    assert len(found) == 1
    assert (
        f"rank {rank.rank} ran" in found[0] and "at position 2 (from 0), 'blocks.1' ran then and 'blocks.2'" in found[0]
    )
