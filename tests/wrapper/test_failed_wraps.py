"""A wrap that fails, wherever, leaves the module as it was: the same objects, names and values."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from wrapped import (
    BLOCKS,
    HYBRID,
    Block,
    Net,
    Snapshot,
    Tied,
    assert_states_equal,
    built,
    check_steps,
    loss_at,
    placed,
    raised_everywhere,
    units_of,
)

from fullshard import CPUOffload, MixedPrecision, ShardingStrategy, fully_shard
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.engine.ownership import nested_units
from fullshard.engine.unit import Unit
from fullshard.wrap import CustomPolicy, ModuleWrapPolicy, Policy
from pairwise import each_value
from ranks import Rank, on_ranks

S = ShardingStrategy


class Odd(torch.Tensor):
    """A tensor with gather hooks of its own, which flat units do not take."""

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], None]:
        return (self,), None

    def fsdp_post_all_gather(self, *arguments: Any, **more: Any) -> None:
        return None


def odd_parameter() -> nn.Parameter:
    return nn.Parameter(torch.randn(4).as_subclass(Odd))


class Breaking(Policy):
    """A plan that cannot be made."""

    def _run_policy(self, root_module: nn.Module, ignored_modules: Any, root_kwargs: Any) -> Any:
        raise OSError("no plan")


class Elsewhere(Policy):
    """A plan for a module of another model."""

    def _run_policy(self, root_module: nn.Module, ignored_modules: Any, root_kwargs: Any) -> Any:
        return {nn.Linear(2, 2): dict(root_kwargs)}


def divide(module: nn.Module) -> bool:
    return 1 / 0 > 0


def divide_late(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse or divide(module)


# Policies, or the arguments that one chooses for a block; the error, and what it says.
BAD_PLANS: list[tuple[Any, Any, str]] = [
    ({"reshard_after_forward": True}, ValueError, "blocks.1.*reshard_after_forward"),
    ({"sharding_strategy": "FULL_SHARD"}, TypeError, "sharding_strategy"),
    ({"mixed_precision": torch.bfloat16}, TypeError, "mixed_precision"),
    ({"use_orig_params": None}, ValueError, "use_orig_params"),
    ({"sharding_strategy": S.HYBRID_SHARD, "process_group": "world"}, ValueError, "HYBRID_SHARD"),
    ({"param_init_fn": 3}, ValueError, "param_init_fn"),
    ({"module": 3}, (TypeError, ValueError), "module"),
    ({"auto_wrap_policy": BLOCKS}, ValueError, "auto_wrap_policy"),
    ({"ignored_modules": []}, ValueError, "ignored_modules"),
    (Breaking(), OSError, "no plan"),
    (Elsewhere(), ValueError, "not a submodule of the root"),
    (CustomPolicy(lambda module: "yes"), ValueError, "True, False or a dict"),  # type: ignore[arg-type,return-value]
    (CustomPolicy(divide), ZeroDivisionError, "zero"),
    (lambda module: True, TypeError, "recurse"),
    (divide_late, ZeroDivisionError, "zero"),
]


@on_ranks(2)
def test_plans_that_cannot_be_made(rank: Rank) -> None:
    """Whatever a policy does wrong shows before anything is wrapped; the error is the same on all ranks."""
    model = built(Tied)
    before = Snapshot.of(model)
    for bad, kind, match in BAD_PLANS:
        one = model.blocks[1]
        policy = CustomPolicy(lambda m, one=one, bad=bad: bad if m is one else isinstance(m, Block))
        with pytest.raises(kind, match=match) as caught:
            FSDP(model, auto_wrap_policy=policy if isinstance(bad, dict) else bad)
        raised_everywhere(rank, caught.value)
        before.assert_unchanged(model)


@on_ranks(2)
@each_value(make=[Net, Tied, Tied], place=["first block", "second block", "root"], orig=[False, True])
def test_parameters_that_cannot_be_flat(rank: Rank, make: Any, place: str, orig: bool) -> None:
    """A parameter that no flat unit takes, in the first, a later or the last unit: all is undone, ties included.

    Gradients that the module had before, of its parameters or some, are there still; the buffers of units are gone.
    """
    model = built(make)
    frozen, marked = model.blocks[0].up.weight, model.blocks[1].down.weight
    frozen.requires_grad_(False)
    mark = marked.mark = ["attribute"]  # type: ignore[attr-defined]
    loss_at()(model, rank.rank).backward()
    gradients = {p: (p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()}
    before = Snapshot.of(model)
    owner = {"first block": model.blocks[0], "second block": model.blocks[1], "root": model}[place]
    owner.odd = odd_parameter()
    made: list[weakref.ref[Any]] = []
    usual = Unit.__init__

    def noting(self: Unit, *arguments: Any, **more: Any) -> None:
        made.append(weakref.ref(self))
        usual(self, *arguments, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Unit, "__init__", noting)
        with pytest.raises(ValueError, match="odd is a Odd"), pytest.warns(UserWarning, match="frozen"):
            FSDP(model, auto_wrap_policy=BLOCKS, use_orig_params=orig)
    assert nested_units(model) == [] and units_of(model) == []
    del owner.odd
    before.assert_unchanged(model)
    assert marked.mark is mark  # type: ignore[attr-defined]
    for parameter, (gradient, value) in gradients.items():
        assert parameter.grad is gradient
        assert gradient is None or torch.equal(gradient, value)
    gc.collect()
    assert [ref() for ref in made] == [None] * len(made) and bool(made) == (place != "first block")
    frozen.requires_grad_(True)
    reference = copy.deepcopy(model)
    check_steps(rank, FSDP(model, auto_wrap_policy=BLOCKS, use_orig_params=orig), reference)


@on_ranks(2)
@pytest.mark.parametrize(("front_end", "orig"), [("wrapper", False), ("wrapper", True), ("fully_shard", False)])
def test_units_made_before_stay(rank: Rank, front_end: str, orig: bool) -> None:
    """What was wrapped by hand before stays wrapped when the wrap around it fails, and works, also if it is tied."""
    model = built(Tied if front_end == "wrapper" else Net)
    reference = copy.deepcopy(model)
    if front_end == "wrapper":
        model.blocks[1] = FSDP(model.blocks[1], use_orig_params=orig)
    else:
        fully_shard(model.blocks[1], mesh=rank.mesh)
    inner = model.blocks[1]
    held = dict(inner.named_parameters())
    units = nested_units(model)
    model.zz = odd_parameter()
    with pytest.raises(ValueError, match="zz"):
        FSDP(model, auto_wrap_policy=BLOCKS, use_orig_params=orig)
    del model.zz
    assert nested_units(model) == units and len(units) == 1 and model.blocks[1] is inner
    now = dict(inner.named_parameters())
    assert list(now) == list(held) and all(now[name] is held[name] for name in now)
    x = torch.ones(2, 5)
    torch.testing.assert_close(inner(x), reference.blocks[1](x))
    check_steps(rank, FSDP(model, auto_wrap_policy=BLOCKS, use_orig_params=orig), reference)


@on_ranks(4)
@pytest.mark.parametrize(("strategy", "orig"), [(S.FULL_SHARD, True), (S.NO_SHARD, True), (HYBRID[0], False)])
def test_failures_with_strategies(rank: Rank, strategy: ShardingStrategy, orig: bool) -> None:
    """Whatever is sharded, replicated, offloaded or cast is put together again, also after a second failure."""
    model = built(Tied)
    reference = copy.deepcopy(model)
    before = Snapshot.of(model)
    options: dict[str, Any] = {
        "auto_wrap_policy": ModuleWrapPolicy({Block, nn.Linear}),
        "cpu_offload": CPUOffload(offload_params=orig),
        "use_orig_params": orig,
        **placed(rank, strategy),
    }
    for sync in (True, False):
        model.odd = odd_parameter()
        with pytest.raises(ValueError, match="odd"):
            FSDP(model, mixed_precision=MixedPrecision(torch.bfloat16), sync_module_states=sync, **options)
        del model.odd
        before.assert_unchanged(model)
    assert_states_equal(FSDP(model, **options), reference)


def test_snapshot_sees_changes() -> None:
    """What the tests of failing wraps rely on."""
    model = built()
    Snapshot.of(model).assert_unchanged(model)
    for change in (
        lambda: model.first.weight.data.add_(1),
        lambda: setattr(model.last, "bias", nn.Parameter(model.last.bias.detach().clone())),
        lambda: model.blocks.append(Block()),
        lambda: model.first.requires_grad_(False),
        lambda: model.first.__dict__.update(extra=1),
    ):
        before = Snapshot.of(model)
        change()
        with pytest.raises(AssertionError):
            before.assert_unchanged(model)
