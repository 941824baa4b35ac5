"""``fully_shard(model, policy=...)``: one call shards the modules that a policy chooses, and the model.

That models train alike however policies divide them is tested for all front ends in tests/training.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from front_ends import build
from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.engine.ownership import nested_units, unit_of
from fullshard.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy
from models import Block, Stack
from ranks import Rank, on_ranks


@on_ranks(2)
def test_policies_choose_arguments(rank: Rank) -> None:
    """A CustomPolicy's arguments replace those of the call for its modules; what was sharded by hand stays a unit."""
    model = build(Stack)
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)

    def choose(module: nn.Module) -> bool | dict[str, Any]:
        if module is model.blocks[0]:
            return {"reshard_after_forward": False, "mp_policy": bf16}
        return module is model.blocks[2]

    fully_shard(model.blocks[2].up, mesh=rank.mesh)
    by_hand = unit_of(model.blocks[2].up)
    assert fully_shard(model, mesh=rank.mesh, reshard_after_forward=True, policy=CustomPolicy(choose)) is model
    first, second, root = (unit_of(each) for each in (model.blocks[0], model.blocks[2], model))
    assert first is not None and second is not None and root is not None and unit_of(model.blocks[1]) is None
    assert first.settings.reshard_after_forward is False and first.policy.precision == bf16
    assert second.settings.reshard_after_forward is True and second.policy == root.policy
    assert unit_of(model.blocks[2].up) is by_hand is not None


@on_ranks(2)
def test_ignored_parameters_have_no_size(rank: Rank) -> None:
    """A policy by size counts what would be sharded; a generator of ignored parameters serves all units."""
    model = build(Stack)
    kept = model.blocks[0].up.weight
    at_least_150 = functools.partial(size_based_auto_wrap_policy, min_num_params=150)  # a block has 162
    fully_shard(model, mesh=rank.mesh, policy=at_least_150, ignored_params=(p for p in (kept,)))
    assert [unit_of(block) is not None for block in model.blocks] == [False, True, True]
    assert model.blocks[0].up.weight is kept and kept.shape == (12, 6)


@on_ranks(2)
def test_wrong_policies_change_nothing(rank: Rank) -> None:
    """Policies that are none, and arguments that no unit can have, are refused before anything is sharded."""
    model = build(Stack)
    with pytest.raises(TypeError, match="expected a Policy"):
        fully_shard(model, mesh=rank.mesh, policy=7)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="expected one module, found a list"):
        fully_shard([model.first, model.last], mesh=rank.mesh, policy=ModuleWrapPolicy({nn.Linear}))
    for chosen, message in (
        ({"reshard": True}, r"policy: found unknown arguments \['reshard'\] for module 'blocks.0'"),
        ({"reshard_after_forward": 3}, "expected a divisor of the 2 ranks"),
        ({"mp_policy": torch.bfloat16}, "mp_policy: expected MixedPrecisionPolicy or None"),
    ):
        wrong = CustomPolicy(lambda module, chosen=chosen: chosen if isinstance(module, Block) else False)
        with pytest.raises((ValueError, TypeError), match=message):
            fully_shard(model, mesh=rank.mesh, policy=wrong)
    assert not nested_units(model) and all(type(p) is nn.Parameter for p in model.parameters())
