"""``fully_shard(model, policy=...)``: one call shards the modules that a policy chooses, and the model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from compare import assert_models_equal
from fullshard import FSDPModule, MixedPrecisionPolicy, fully_shard
from fullshard.comm import record
from fullshard.engine.ownership import nested_units, unit_of
from fullshard.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy
from ranks import Rank, on_ranks


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)) for _ in range(3)]
    return nn.Sequential(nn.Linear(6, 6), *blocks, nn.Linear(6, 2))


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean()


@on_ranks(2)
@pytest.mark.parametrize("by_hand", [False, True])
def test_policy_shards_and_trains(rank: Rank, by_hand: bool) -> None:
    """The chosen modules and the model become units, also where one was sharded by hand, and training is the same."""
    model = make_model()
    reference = copy.deepcopy(model)
    if by_hand:
        fully_shard(model[2], mesh=rank.mesh)
    assert fully_shard(model, mesh=rank.mesh, policy=ModuleWrapPolicy({nn.Sequential})) is model
    assert [isinstance(child, FSDPModule) for child in model] == [False, True, True, True, False]
    assert len(nested_units(model)) == 4
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.02, foreach=False) for m in (model, reference)]
    for step in range(3):
        with record() as collectives:
            loss_of(model, rank.rank, step).backward()
        assert len({collective.unit for collective in collectives}) == 4
        for other in range(rank.world_size):
            (loss_of(reference, other, step) / rank.world_size).backward()
        assert_models_equal(model, reference, grads=True, rtol=1e-5, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
def test_policies_choose_arguments(rank: Rank) -> None:
    """A CustomPolicy's arguments replace those of the call for its modules; others are those of the call."""
    model = make_model()
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)

    def choose(module: nn.Module) -> bool | dict[str, Any]:
        if module is model[1]:
            return {"reshard_after_forward": False, "mp_policy": bf16}
        return module is model[3]

    fully_shard(model, mesh=rank.mesh, reshard_after_forward=True, policy=CustomPolicy(choose))
    first, second, root = unit_of(model[1]), unit_of(model[3]), unit_of(model)
    assert first is not None and second is not None and root is not None and unit_of(model[2]) is None
    assert first.settings.reshard_after_forward is False and first.policy.precision == bf16
    assert second.settings.reshard_after_forward is True and second.policy == root.policy


@on_ranks(2)
def test_ignored_parameters_do_not_count(rank: Rank) -> None:
    """Sizes are those of what would be sharded, and a generator of ignored parameters serves all units."""
    model = make_model()

    def at_least_100(**kwargs: Any) -> bool:
        return size_based_auto_wrap_policy(min_num_params=100, **kwargs)

    kept = model[1][0].weight
    fully_shard(model, mesh=rank.mesh, policy=at_least_100, ignored_params=(p for p in (kept,)))
    assert [unit_of(child) is not None for child in model] == [False, False, True, True, False]
    assert model[1][0].weight is kept and kept.shape == (9, 6)


@on_ranks(2)
def test_wrong_policies_change_nothing(rank: Rank) -> None:
    """Policies that are none, and arguments that no unit can have, are refused before anything is sharded."""
    model = make_model()
    with pytest.raises(TypeError, match="expected a Policy"):
        fully_shard(model, mesh=rank.mesh, policy=7)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="expected one module, found a list"):
        fully_shard([model[0], model[1]], mesh=rank.mesh, policy=ModuleWrapPolicy({nn.Linear}))
    for chosen, message in (
        ({"reshard": True}, r"policy: found unknown arguments \['reshard'\] for '1'"),
        ({"reshard_after_forward": 3}, "expected a divisor of the 2 ranks"),
        ({"mp_policy": torch.bfloat16}, "mp_policy: expected MixedPrecisionPolicy or None"),
    ):
        wrong = CustomPolicy(lambda module, chosen=chosen: chosen if module in (model[1], model[2]) else False)
        with pytest.raises((ValueError, TypeError), match=message):
            fully_shard(model, mesh=rank.mesh, policy=wrong)
    assert not nested_units(model) and all(type(p) is nn.Parameter for p in model.parameters())
