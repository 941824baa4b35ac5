"""What a rank holds of a model: which names it has, when it is its state, and what is no state."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Shard, distribute_tensor

from checkpoint.kinds import Model, build
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import fully_shard
from fullshard.activation_checkpoint import checkpoint_wrapper
from fullshard.checkpoint.state.model import model_state
from fullshard.checkpoint.state.parameters import local_parameters
from fullshard.engine.parameters.tensor_shards import TensorShards
from fullshard.errors import FullshardError, PhaseError
from pairwise import each_value
from ranks import Rank, on_ranks


@on_ranks(2)
def test_values_without_a_place_are_refused(rank: Rank) -> None:
    """A Partial DTensor, and a state that is shaped as neither the parameter nor this rank's shard of it."""
    partial = distribute_tensor(torch.arange(15.0).view(5, 3), rank.mesh, [Shard(0)]).sum(0)
    assert isinstance(partial.placements[0], Partial)
    with pytest.raises(TypeError, match="redistribute it to Shard or Replicate"):
        TensorShards.of(partial)
    for kind in ("fully_shard", "original", "plain"):
        parameter = next(p for p in local_parameters(build(rank, kind)) if p.fqn == "blocks.0.0.weight")
        with pytest.raises(FullshardError, match=r"blocks\.0\.0\.weight: expected .* found \(3,\)"):
            parameter.shards_of(torch.ones(3))


@on_ranks(2)
def test_states_of_running_models_are_refused(rank: Rank) -> None:
    """Between forward and backward, and inside summon_full_params, the parameters are not the model's state."""
    model = build(rank, "flat")
    with (
        FSDP.summon_full_params(model),
        pytest.raises(PhaseError, match="cannot access its state in the middle of a step"),
    ):
        local_parameters(model)
    inner = model.module.blocks[0].register_forward_hook(lambda *_: local_parameters(model))
    with pytest.raises(PhaseError, match="cannot access its state in the middle of a step"):
        model(torch.arange(8))
    inner.remove()
    loss = model(torch.arange(8)).sum()
    between = local_parameters(model)  # the shards are the model's state here, too
    loss.backward()
    assert len(between) == len(local_parameters(model)) == len(list(Model().parameters()))


class Attributes(nn.Module):
    """Children that are called what wrappers call theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self._orig_mod, self._checkpoint_wrapped_module = (nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._checkpoint_wrapped_module(self._orig_mod(self.module(x)))


def _compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


WRAPPERS: dict[str, list[Any]] = {
    "compiled": [_compiled],
    "checkpointed": [checkpoint_wrapper],
    "both": [checkpoint_wrapper, _compiled],
    "both, the other way round": [_compiled, checkpoint_wrapper],
    "none": [],
}


@on_ranks(2)
@each_value(wrappers=WRAPPERS, front_end=["fully_shard", "original", "flat", "compiled last"])
def test_names_are_those_before_wrapping(rank: Rank, wrappers: str, front_end: str) -> None:
    """Whatever wraps a block before or after it is sharded, only what wrappers are called is left out of names."""

    def shard(module: nn.Module) -> nn.Module:
        if front_end == "fully_shard":
            return fully_shard(module)
        wrapped = FSDP(module, use_orig_params=front_end != "flat")
        twice = _compiled in WRAPPERS[wrappers]  # which torch refuses
        return _compiled(wrapped) if front_end == "compiled last" and not twice else wrapped

    block: nn.Module = Attributes()
    expected = {f"0.{name}" for name in block.state_dict()}
    for wrap in WRAPPERS[wrappers]:
        block = wrap(block)
    model = shard(nn.Sequential(shard(block)))
    model(torch.ones(2, 4)).sum().backward()
    assert model_state(model).names == expected
    if front_end in ("original", "flat") and wrappers == "none":
        assert type(model.module[0].module) is Attributes


def test_state_dict_hooks_are_warned_of() -> None:
    """What they add is in no checkpoint; modules of torch and checkpoint wrappers do not alarm anybody."""

    class Own(nn.Linear):
        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            destination[f"{prefix}scales"] = torch.ones(1)

    with pytest.warns(UserWarning, match=r"1 \(Own\) customizes its state dict"):
        model_state(nn.Sequential(nn.Linear(1, 1), Own(1, 1)))
    hooked = nn.Linear(1, 1)
    hooked._register_state_dict_hook(lambda *_: None)
    with pytest.warns(UserWarning, match=r"the model \(Linear\) customizes"):
        model_state(hooked)
    quiet = checkpoint_wrapper(nn.Sequential(nn.BatchNorm1d(1), nn.LSTM(1, 1), nn.MultiheadAttention(2, 1)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model_state(quiet)
