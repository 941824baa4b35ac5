"""What a rank holds of a model, as shards: of every front end, complete over the ranks and with the right values."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from checkpoint.kinds import Model, build, reference
from compare import assert_equal
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import fully_shard
from fullshard.activation_checkpoint import checkpoint_wrapper
from fullshard.checkpoint.state.model import model_state
from fullshard.checkpoint.state.parameters import local_parameters
from fullshard.engine.parameters.tensor_shards import TensorShards
from fullshard.errors import FullshardError, PhaseError
from ranks import Rank, on_ranks


def whole(shards: TensorShards, *, copies: int | None = 1) -> torch.Tensor:
    """The tensor that all ranks' shards make up. Every element is on ``copies`` ranks, or (None) on any number."""
    value, counts = torch.zeros(shards.shape, dtype=torch.float64), torch.zeros(shards.shape)
    for region, local in shards.shards:
        index = tuple(slice(a, b) for a, b in zip(region.offsets, region.ends, strict=True))
        assert local.shape == region.sizes
        value[index] += local.double()
        counts[index] += 1
    dist.all_reduce(value)
    dist.all_reduce(counts)
    assert counts.min() >= 1 if counts.numel() else True
    if copies is not None:
        assert bool((counts == copies).all()), counts
    return (value / counts).to(shards.dtype)


@on_ranks(4)
@pytest.mark.parametrize("kind", ["fully_shard", "hybrid", "flat", "mixture"])
def test_shards_of_all_ranks_are_the_model(rank: Rank, kind: str) -> None:
    """Each name of the unsharded state dict is there; its shards make up its value, and are the model's memory."""
    model = build(rank, kind, seed=3)
    state, expected = model_state(model), reference(3)
    assert state.names == expected.keys()
    assert state.aliases == {"head.weight": "embed.weight"}
    for name, shards in state.tensors.items():
        sharded = kind in ("fully_shard", "flat") and name not in ("scale", "counts") and "norm." not in name
        assert_equal(whole(shards, copies=1 if sharded else None), expected[name], f"{kind} {name}")
        with torch.no_grad():
            for _, local in shards.shards:
                local.fill_(2)
    for name, shards in model_state(model).tensors.items():
        assert_equal(whole(shards, copies=None), torch.full(shards.shape, 2, dtype=shards.dtype), name)


@on_ranks(2)
def test_cast_buffers_are_saved_in_their_own_dtype(rank: Rank) -> None:
    """The state of a buffer that computes in bfloat16 is float32; loaded() brings it back."""
    model = build(rank, "low_buffers")
    with pytest.raises(RuntimeError, match="BFloat16"):
        model(torch.arange(8))  # casts buffers, with which this norm cannot compute
    state = model_state(model)
    assert model.module.norm.running_mean.dtype is torch.bfloat16
    shards = state.tensors["norm.running_mean"]
    assert shards.dtype is torch.float32
    shards.shards[0].local.fill_(3)
    state.copy_back()
    assert_equal(model.module.norm.running_mean, torch.full((6,), 3, dtype=torch.bfloat16), "running_mean")


@on_ranks(4)
@pytest.mark.parametrize("front_end", ["fully_shard", "wrapper"])
def test_tensor_parallel_parameters_have_their_place_in_the_whole(rank: Rank, front_end: str) -> None:
    """Cut by tensor parallelism and then by us, on the same dim (strided) and on another one, unevenly."""
    mesh = rank.make_mesh(2, 2, names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 5))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if front_end == "fully_shard":
        fully_shard(model, mesh=mesh["dp"])
    else:
        model = FSDP(model, device_mesh=mesh["dp"], use_orig_params=True)
    for name, shards in model_state(model).tensors.items():
        assert_equal(whole(shards, copies=None), expected[name], name)


@on_ranks(2)
def test_dtensors_of_users(rank: Rank) -> None:
    """Any placements that say where elements are; Partial does not."""
    value = torch.arange(15.0).view(5, 3)
    for placement in (Shard(0), Shard(1)):
        assert_equal(whole(TensorShards.of(distribute_tensor(value, rank.mesh, [placement]))), value, str(placement))
    partial = distribute_tensor(value, rank.mesh, [Shard(0)]).sum(0)
    assert partial.placements[0].is_partial()
    with pytest.raises(TypeError, match="redistribute it to Shard or Replicate"):
        TensorShards.of(partial)
    assert isinstance(partial.placements[0], Partial)


@on_ranks(2)
def test_empty_parameters_are_everywhere(rank: Rank) -> None:
    """A parameter without elements has a shard, so that it appears in checkpoints."""
    model = nn.Linear(0, 3)
    fully_shard(model, mesh=rank.mesh)
    shards = model_state(model).tensors["weight"]
    assert shards.shape == (3, 0) and len(shards.shards) == 1


@on_ranks(2)
def test_values_of_other_shapes_are_refused(rank: Rank) -> None:
    """A state that is shaped as neither the parameter nor this rank's part of it is an error that names the FQN."""
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
@pytest.mark.parametrize("wrappers", WRAPPERS)
@pytest.mark.parametrize("front_end", ["fully_shard", "original", "flat", "compiled last"])
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
