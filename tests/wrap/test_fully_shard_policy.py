"""``fully_shard(model, policy=...)``: one call shards the modules that a policy chooses, and the model.

That models train alike however policies divide them is tested for all front ends in tests/training.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from front_ends import build
from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.engine.ownership import nested_units, unit_of
from fullshard.wrap import CustomPolicy, ModuleWrapPolicy, plan_for, size_based_auto_wrap_policy
from models import Block, Stack
from pairwise import each_value
from ranks import Rank, on_ranks


def tied_stack(ties: str) -> Stack:
    """A stack in which something is shared."""
    model = build(Stack)
    if ties == "root":
        model.last = nn.Linear(6, 6)
        model.last.weight = model.first.weight
    if ties == "blocks":
        model.blocks[2].up.weight = model.blocks[0].up.weight
    if ties == "module":
        model.blocks[2].up = model.blocks[0].up
    return model


@on_ranks(2)
@each_value(
    ties=["", "root", "blocks", "module"],
    classes=[(Block, nn.Linear), (nn.Linear,), (Block,), (Block, nn.Linear)],
    by_hand=[True, False],
)
def test_units_are_those_of_the_plan(rank: Rank, ties: str, classes: Any, by_hand: bool) -> None:
    """Every unit holds the parameters that the plan lists, also where one was sharded by hand.

    A module in two units that is not one itself belongs to the root's.
    """
    model = tied_stack(ties)
    plan = plan_for(ModuleWrapPolicy(classes), model)
    if by_hand and not ties:
        fully_shard(model.blocks[1].up, mesh=rank.mesh)
    assert fully_shard(model, mesh=rank.mesh, policy=ModuleWrapPolicy(classes)) is model
    model(torch.ones(2, 6))  # from then on, units know their place in the model
    assert all(unit_of(module) is not None for module in plan.modules)
    held = {unit.name: sorted(sorted(p.fqns) for p in unit.parameters) for unit in nested_units(model)}
    assert held == {name: sorted(sorted(names) for names in parameters) for name, parameters in plan.owners().items()}


@on_ranks(2)
def test_policies_choose_arguments(rank: Rank) -> None:
    """A CustomPolicy's arguments replace those of the call for its modules; others are those of the call.

    Sizes are those of what would be sharded, and a generator of ignored parameters serves all units.
    """
    model = build(Stack)
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)

    def choose(module: nn.Module) -> bool | dict[str, Any]:
        if module is model.blocks[0]:
            return {"reshard_after_forward": False, "mp_policy": bf16}
        return module is model.blocks[2]

    fully_shard(model, mesh=rank.mesh, reshard_after_forward=True, policy=CustomPolicy(choose))
    first, second, root = (unit_of(each) for each in (model.blocks[0], model.blocks[2], model))
    assert first is not None and second is not None and root is not None and unit_of(model.blocks[1]) is None
    assert first.settings.reshard_after_forward is False and first.policy.precision == bf16
    assert second.settings.reshard_after_forward is True and second.policy == root.policy

    def at_least_150(**kwargs: Any) -> bool:
        return size_based_auto_wrap_policy(min_num_params=150, **kwargs)  # a block has 162

    model = build(Stack)
    kept = model.blocks[0].up.weight
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
