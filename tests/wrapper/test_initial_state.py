"""What units start from: modules on the meta device, and rank 0's values for all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from wrapped import (
    BLOCKS,
    FULL,
    HYBRID,
    NO_SHARD,
    Block,
    Net,
    Tied,
    assert_dicts_equal,
    assert_states_equal,
    backward,
    both_forms,
    built,
    check_steps,
    placed,
)

from compare import assert_equal
from fullshard import CPUOffload, FullshardError, ShardingStrategy
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.wrap import CustomPolicy, ModuleWrapPolicy, always_wrap_policy
from models import Odd
from pairwise import each_value
from ranks import Rank, on_ranks

BLOCKS_AND_LAYERS = ModuleWrapPolicy({Block, nn.Linear})


def on_meta(make: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        return make()


class Scale(nn.LayerNorm):
    """With a frozen parameter, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__(5)
        self.bias.requires_grad_(False)
        self.register_buffer("hidden", torch.arange(5), persistent=False)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "hidden"):
            self.hidden.copy_(torch.arange(5))


def nested() -> nn.Sequential:
    return nn.Sequential(Scale(), nn.BatchNorm1d(5), nn.Sequential(Scale(), nn.Sequential(Scale())))


def fill(module: nn.Module) -> None:
    """A ``param_init_fn``: memory, and values that depend on the shapes only."""
    module.to_empty(device=torch.empty(0).device, recurse=False)  # the rank's
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        with torch.no_grad():
            tensor.copy_(torch.linspace(-0.5, 0.5, tensor.numel()).reshape(tensor.shape))


def filled(module: nn.Module) -> Any:
    """An unsharded module with the values of ``fill``."""
    for submodule in module.modules():
        fill(submodule)
    return module


# -------------------------------------------------------------------- meta device


@on_ranks(2)
@pytest.mark.parametrize(
    ("policy", "orig"), [(None, False), (ModuleWrapPolicy({Scale}), True), (always_wrap_policy, False)]
)
def test_reset_parameters(rank: Rank, policy: Any, orig: bool) -> None:
    """Without ``param_init_fn`` each module gets memory and resets itself; buffers that are not saved too."""
    model, reference = on_meta(nested), nested()
    first = model[0]
    wrapped = FSDP(model, auto_wrap_policy=policy, use_orig_params=orig)
    assert_states_equal(wrapped, reference)
    assert_equal(first.hidden, reference[0].hidden, "hidden")
    with FSDP.summon_full_params(wrapped):
        flags = [p.requires_grad for p in wrapped.parameters()]
    assert flags == [p.requires_grad for p in reference.parameters()]


@on_ranks(2)
@pytest.mark.parametrize(("policy", "orig", "offload"), [(None, True, False), (BLOCKS, False, True)])
def test_param_init_fn(rank: Rank, policy: Any, orig: bool, offload: bool) -> None:
    """It is called once with each module that has state of its own on the meta device; what was frozen stays frozen."""
    model, reference = on_meta(Net), filled(Net())
    for each in (model, reference):
        each.first.requires_grad_(False)
    modules = {id(m): name for name, m in model.named_modules()}
    called: list[str] = []

    def init(module: nn.Module) -> None:
        called.append(modules[id(module)])
        if module is model.first:
            module.weight, module.bias = (
                nn.Parameter(torch.empty_like(p, device=rank.device)) for p in module.parameters()
            )
        fill(module)

    arguments: dict[str, Any] = {"use_orig_params": orig, "cpu_offload": CPUOffload(offload_params=offload)}
    wrapped = FSDP(model, auto_wrap_policy=policy, param_init_fn=init, **arguments)
    own = [n for n, m in reference.named_modules() if [*m.parameters(recurse=False), *m.buffers(recurse=False)]]
    assert sorted(called) == sorted(own)
    assert_states_equal(wrapped, reference)
    with FSDP.summon_full_params(wrapped):
        assert [p.requires_grad for p in wrapped.parameters()] == [p.requires_grad for p in reference.parameters()]
    check_steps(rank, wrapped, copy.deepcopy(reference))
    model = on_meta(Net)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = FSDP(block, param_init_fn=fill, **arguments)
    assert_states_equal(FSDP(model, param_init_fn=fill, **arguments), reference)


@on_ranks(2)
def test_only_what_is_on_meta(rank: Rank) -> None:
    """What has values keeps them; only what has none is initialized. Ignored modules stay on the meta device."""
    model = built()
    reference = copy.deepcopy(model)
    model.blocks[1].down = on_meta(lambda: nn.Linear(9, 5, bias=False))
    fill(reference.blocks[1].down)
    assert_states_equal(FSDP(model, auto_wrap_policy=BLOCKS, param_init_fn=fill), reference)
    model = on_meta(Net)
    spare, called = model.blocks[1], []

    def init(module: nn.Module) -> None:
        called.append(module)
        fill(module)

    FSDP(model, auto_wrap_policy=BLOCKS, param_init_fn=init, ignored_modules=[spare])
    assert all(p.is_meta for p in spare.parameters())
    assert not set(called) & set(spare.modules()) and model.first in called


@on_ranks(2)
@each_value(policy=[None, BLOCKS, BLOCKS_AND_LAYERS], kind=["raises", "leaves", "no reset"])
def test_failing_initialization(rank: Rank, kind: str, policy: Any) -> None:
    """An initialization that fails, here in the last unit, says why."""
    model = built()
    model.last = on_meta(lambda: nn.Linear(5, 3))
    if kind == "no reset":
        model.last.reset_parameters = None

    def init(module: nn.Module) -> None:
        if kind == "raises":
            raise OSError("no weights for the head")

    expected, words = {
        "raises": (OSError, "no weights for the head"),
        "leaves": (ValueError, "Linear.*meta"),
        "no reset": (ValueError, "Linear.*reset_parameters"),
    }[kind]
    with pytest.raises(expected, match=words):
        FSDP(model, auto_wrap_policy=policy, param_init_fn=None if kind == "no reset" else init)


@on_ranks(2, timeout=20)
@pytest.mark.parametrize(("policy", "sync"), [(None, True), (BLOCKS, False)])
def test_failing_on_one_rank(rank: Rank, sync: bool, policy: Any) -> None:
    """Where one rank cannot initialize a module, all ranks raise, and none is left waiting."""
    model = built()
    model.last = on_meta(lambda: nn.Linear(5, 3))

    def init(module: nn.Module) -> None:
        if rank.rank == 1:
            raise OSError("file not found")
        fill(module)

    kind, match = (OSError, "file not found") if rank.rank == 1 else (FullshardError, "rank 1: OSError: file not found")
    with pytest.raises(kind, match=match):
        FSDP(model, auto_wrap_policy=policy, param_init_fn=init, sync_module_states=sync)


# -------------------------------------------------------------------- rank 0's values


class Various(nn.Module):
    """Parameters of all kinds, and buffers of dtypes that back ends do not know, or without memory of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.tied, self.odd, self.norm = Net(), Tied(), Odd(), nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.rand(9) > 0.5)
        self.register_buffer("columns", torch.randn(4, 3).t())
        self.register_buffer("conjugated", torch.randn(4, dtype=torch.complex64).conj())
        self.register_buffer("expanded", torch.randn(3).expand(4, 3))
        self.register_buffer("quarter", torch.randn(7).to(torch.float8_e4m3fn))


def on_all_ranks(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.resolve_conj().contiguous() for name, value in state.items()}


@on_ranks(2)
@pytest.mark.parametrize(
    ("policy", "strategy", "orig"), [(None, FULL, False), (BLOCKS, NO_SHARD, True), (always_wrap_policy, FULL, True)]
)
def test_sync_module_states(rank: Rank, policy: Any, strategy: ShardingStrategy, orig: bool) -> None:
    """Ranks that were seeded differently start from rank 0's parameters and buffers, of every kind."""
    model, reference = built(Various, seed=rank.rank), built(Various, seed=0)
    arguments: dict[str, Any] = {"sharding_strategy": strategy, "use_orig_params": orig}
    wrapped = FSDP(model, auto_wrap_policy=policy, sync_module_states=True, **arguments)
    assert_dicts_equal(on_all_ranks(wrapped.state_dict()), on_all_ranks(reference.state_dict()))


@on_ranks(4)
def test_sync_with_replicas(rank: Rank) -> None:
    """With replicas, too, all ranks get the values of the very first one, nothing of those between."""
    model, reference = built(seed=rank.rank), built(seed=0)
    wrapped = FSDP(model, auto_wrap_policy=BLOCKS, sync_module_states=True, **placed(rank, HYBRID[0]))
    assert_states_equal(wrapped, reference)
    check_steps(rank, wrapped, reference)


@on_ranks(2)
@both_forms
def test_weights_on_the_first_rank_only(rank: Rank, orig: bool) -> None:
    """Rank 0 has loaded the weights, the others have the model on the meta device: all end with rank 0's, ties too."""
    reference = built(Tied)
    model = copy.deepcopy(reference) if rank.rank == 0 else on_meta(Tied)
    wrapped = FSDP(
        model,
        auto_wrap_policy=BLOCKS_AND_LAYERS if orig else BLOCKS,
        sync_module_states=True,
        param_init_fn=lambda module: module.to_empty(device=rank.device, recurse=False),
        use_orig_params=orig,
    )
    assert_states_equal(wrapped, reference)
    check_steps(rank, wrapped, reference)


@on_ranks(2)
def test_sync_by_unit(rank: Rank) -> None:
    """A policy, and wrapping by hand, choose for each unit whether it is synchronized; ignored parameters never are."""
    model, reference, other = built(seed=rank.rank), built(seed=0), built(seed=1)
    spare = model.last.bias
    chosen = model.blocks[0]
    policy = CustomPolicy(lambda m: {"sync_module_states": True} if m is chosen else isinstance(m, Block))
    wrapped = FSDP(model, auto_wrap_policy=policy, ignored_states=[spare])
    state = wrapped.state_dict()
    for name, value in reference.blocks[0].state_dict().items():
        assert_equal(state[f"blocks.0.{name}"], value, name)
    own = (reference if rank.rank == 0 else other).last.bias
    assert_equal(spare.detach(), own.detach(), "ignored")
    assert not torch.equal(state["last.weight"], reference.last.weight)  # the halves are of both ranks
    with FSDP.summon_full_params(wrapped):
        assert_equal(model.first.weight[0].detach(), reference.first.weight[0].detach(), "rank 0's part")
    backward(rank, wrapped)
