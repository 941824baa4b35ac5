"""Correct uses of torch's names that torch 2.13's own FSDP fails on CPU, and that pass with fullshard in its place.

What torch does with each of them is in the table of docs/moving.md.
"""

from __future__ import annotations

import copy
import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._pytree import tree_map_only

from compare import assert_close, assert_equal
from fullshard import dropin
from fullshard.comm import record
from fullshard.frontend import arguments
from ranks import Rank, on_ranks

CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-6}
both_forms = pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
WHOLE_ON_CPU = StateDictOptions(full_state_dict=True, cpu_offload=True)


def torchs() -> Any:
    """torch.distributed.fsdp, whose names are fullshard's while that stands in."""
    return importlib.import_module("torch.distributed.fsdp")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *ranks: int, steps: int = 3) -> None:
    """Steps on the mean of the losses on these ranks' batches."""
    for step in range(steps):
        for rank in ranks:
            (model(batch(rank, step)).square().mean() / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()


def trained() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """What two ranks are to come to, without sharding."""
    model = net()
    optimizer = adam(model)
    train(model, optimizer, 0, 1)
    return model, optimizer


def assert_values(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Require these names with these tensors, whole ones."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        found = actual[name]
        assert_close(found.full_tensor() if isinstance(found, DTensor) else found, value, name, **CLOSE)


def assert_states(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Require these states of the optimizer, by parameter."""
    assert actual.keys() == expected.keys()
    for fqn, state in expected.items():
        assert_values(actual[fqn], state)
        assert not torch.equal(state["exp_avg"], state["exp_avg_sq"]), "equal values would not tell them apart"


def state_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}


@on_ranks(2)
@both_forms
def test_full_state_offloaded(rank: Rank, orig: bool) -> None:
    """FULL_STATE_DICT with offload_to_cpu has the values of a model that was told no device and took rank 0's.

    Every moment of Adam arrives under its own name; torch's engine gives exp_avg the values of exp_avg_sq.
    """
    plain = net()
    if rank.rank:
        plain.apply(lambda m: nn.init.ones_(m.weight) if isinstance(m, nn.Linear) else m)
    with dropin.install(quiet=True):
        fsdp = torchs()
        model = fsdp.FullyShardedDataParallel(plain, use_orig_params=orig, sync_module_states=True)
        optimizer = adam(model)
        train(model, optimizer, rank.rank)
        with fsdp.FullyShardedDataParallel.summon_full_params(model, offload_to_cpu=True):
            found = {name: value.detach().clone() for name, value in model.named_parameters()}
        states = []
        for rank0_only in (False, True):
            configs = (
                fsdp.FullStateDictConfig(offload_to_cpu=True, rank0_only=rank0_only),
                fsdp.FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=rank0_only),
            )
            with fsdp.FullyShardedDataParallel.state_dict_type(model, fsdp.StateDictType.FULL_STATE_DICT, *configs):
                state = fsdp.FullyShardedDataParallel.optim_state_dict(model, optimizer)
                states.append((model.state_dict(), state))
        states.append(get_state_dict(model, optimizer, options=WHOLE_ON_CPU))
    expected, moments = trained()[0].state_dict(), state_by_name(*trained())
    assert_values(found, dict(expected))
    for number, (values, state) in enumerate(states):
        nothing = number > 0 and rank.rank > 0
        assert_values(values, {} if nothing else expected)
        assert_states(state.get("state", {}), {} if nothing else moments)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["flat", "orig", "rows"])
def test_a_rank_without_a_shard_loads(rank: Rank, kind: str, tmp_path: Path) -> None:
    """dcp.load of model and optimizer, where single-row parameters are on one of the ranks only."""

    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        plain = nn.Sequential(nn.Linear(6, 1), nn.Linear(1, 1))
        fsdp = torchs()
        if kind == "rows":
            model = fsdp.fully_shard(plain, mesh=rank.mesh)
        else:
            model = fsdp.FullyShardedDataParallel(plain, use_orig_params=kind == "orig")
        optimizer = adam(model)
        train(model, optimizer, rank.rank)
        return model, optimizer

    with dropin.install(quiet=True):
        saved, old = made(1), made(2)
        state = dict(zip(("model", "optim"), get_state_dict(*saved), strict=True))
        dcp.save(state, checkpoint_id=tmp_path)
        state = dict(zip(("model", "optim"), get_state_dict(*old), strict=True))
        dcp.load(state, checkpoint_id=tmp_path)
        set_state_dict(*old, model_state_dict=state["model"], optim_state_dict=state["optim"])
        whole = StateDictOptions(full_state_dict=True)
        expected, found = (get_state_dict(*each, options=whole) for each in (saved, old))
    assert_equal(found[0], expected[0], "model")
    assert_equal(found[1]["state"], expected[1]["state"], "optimizer")


@on_ranks(2)
@pytest.mark.parametrize("kind", ["wrapper", "rows"])
def test_cpu_offload_without_accelerator(rank: Rank, kind: str) -> None:
    """Offloading works, and says once that there is nothing to pin."""
    arguments._warn_unpinned.cache_clear()
    with dropin.install(quiet=True), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fsdp = torchs()
        for _ in range(2):
            if kind == "rows":
                model = fsdp.fully_shard(net(), mesh=rank.mesh, offload_policy=fsdp.CPUOffloadPolicy())
            else:
                offload = fsdp.CPUOffload(offload_params=True)
                model = fsdp.FullyShardedDataParallel(net(), cpu_offload=offload)
            train(model, adam(model), rank.rank)
        found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert len([w for w in caught if "not pinned" in str(w.message)]) == 1, [str(w.message) for w in caught]
    assert_values(found, trained()[0].state_dict())


class Float8Gathered(torch.Tensor):
    """A weight in fp32 that is gathered in float8."""

    kept: torch.Tensor

    @staticmethod
    def __new__(cls, kept: torch.Tensor) -> Float8Gathered:
        self = torch.Tensor._make_wrapper_subclass(
            cls, kept.shape, strides=kept.stride(), storage_offset=kept.storage_offset(), dtype=kept.dtype
        )
        self.kept = kept
        return self

    def __repr__(self, **_: Any) -> str:
        return f"Float8Gathered({self.kept})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["kept"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> Float8Gathered:
        return Float8Gathered(inner["kept"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, lambda t: t.kept, (args, kwargs or {}))
        result = function(*args, **kwargs)
        if function in KEEPS:
            return tree_map_only(torch.Tensor, cls, result)
        return result

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor], None]:
        return (self.kept.to(torch.float8_e4m3fn),), None

    def fsdp_post_all_gather(self, gathered: Any, _: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        if out is not None:
            out.copy_(gathered[0].to(out.dtype))
            return None
        return gathered[0].to(dtype), gathered


aten = torch.ops.aten
KEEPS = {
    getattr(aten, name).default
    for name in ("as_strided", "clone", "detach", "empty_like", "new_zeros", "view", "_to_copy")
} | {aten.slice.Tensor, aten.split.Tensor}


@on_ranks(2)
def test_float8_gathers_on_gloo(rank: Rank) -> None:
    """A unit of nothing but float8 gathers travels over gloo, one byte an element."""
    torch.manual_seed(0)
    weights = [torch.randn(8, 6), torch.randn(4, 8)]
    x = batch(0, 0)
    rounded = [w.to(torch.float8_e4m3fn).float() for w in weights]
    expected = x @ rounded[0].T @ rounded[1].T
    with dropin.install(quiet=True):
        model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 4, bias=False))
        for layer, weight in zip(model, weights, strict=True):
            layer.weight = nn.Parameter(Float8Gathered(weight))  # type: ignore[assignment]
        torchs().fully_shard(model, mesh=rank.mesh)
        with record() as collectives:
            found = model(x)
        found.sum().backward()
    assert_close(found, expected, "output", rtol=1e-6, atol=1e-6)
    assert not torch.equal(expected, x @ weights[0].T @ weights[1].T), "float8 rounds"
    assert all(isinstance(p.grad, DTensor) for p in model.parameters())
    received = [(c.dtype, c.nbytes) for c in collectives]
    assert received == [(torch.float8_e4m3fn, 8 * 6 // 2), (torch.float8_e4m3fn, 4 * 8 // 2)]


@on_ranks(2)
def test_gradient_divide_factor_on_gloo(rank: Rank) -> None:
    """set_gradient_divide_factor: the sum over ranks, divided by it."""
    for factor in (1.0, 5.0):
        plain = net()
        for number in range(2):
            (plain(batch(number, 0)).square().mean() / factor).backward()
        with dropin.install(quiet=True):
            model = torchs().fully_shard(net(), mesh=rank.mesh)
            model.set_gradient_divide_factor(factor)
            model(batch(rank.rank, 0)).square().mean().backward()
        expected = {name: p.grad for name, p in plain.named_parameters()}
        assert_values({name: p.grad for name, p in model.named_parameters()}, expected)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["flat", "orig", "rows"])
def test_ema_by_deepcopy(rank: Rank, kind: str) -> None:
    """torch's AveragedModel, which copies the model, averages the sharded values; the copy runs."""

    def average(model: nn.Module, *ranks: int) -> AveragedModel:
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(3):
            train(model, optimizer, *ranks, steps=1)
            ema.update_parameters(model)
        return ema

    plain = average(net(), 0, 1)
    with dropin.install(quiet=True):
        fsdp = torchs()
        if kind == "rows":
            model = fsdp.fully_shard(net(), mesh=rank.mesh)
        else:
            model = fsdp.FullyShardedDataParallel(net(), use_orig_params=kind == "orig")
        ema = average(model, rank.rank)
        found, x = ema(batch(0, 7)), batch(0, 7)
        whole = get_model_state_dict(ema.module, options=StateDictOptions(full_state_dict=True))
        apart = copy.deepcopy(model)(x)
    assert_close(found, plain(x), "output of the average", **CLOSE)
    assert_values(whole, plain.module.state_dict())
    assert_equal(apart, model(x), "output of a copy")
    assert not torch.allclose(found, apart)


def test_comparison_fails_on_mixed_up_states() -> None:
    """What torch's engine returns does not pass."""
    model, optimizer = trained()
    expected = state_by_name(model, optimizer)
    wrong = {fqn: {**state, "exp_avg": state["exp_avg_sq"]} for fqn, state in expected.items()}
    with pytest.raises(AssertionError, match="exp_avg"):
        assert_states(wrong, expected)
