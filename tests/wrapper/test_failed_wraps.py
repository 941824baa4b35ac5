"""A wrap that fails, wherever, leaves the module as it was: the same objects, names and values."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity import Block, Net, Snapshot, Tied, assert_trains_alike, batch, built, mean_square, units_of
from torch import nn

from compare import assert_equal
from fullshard import (
    CPUOffload,
    FullshardError,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
)
from fullshard.engine.ownership import nested_units
from fullshard.engine.unit import Unit
from fullshard.wrap import CustomPolicy, ModuleWrapPolicy, Policy
from pairwise import pairwise
from ranks import Rank, on_ranks

S = ShardingStrategy
BLOCKS = ModuleWrapPolicy({Block})
MODES = pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])


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


def kwargs_for(module: nn.Module, **arguments: Any) -> CustomPolicy:
    """All blocks, one of them with these arguments."""
    return CustomPolicy(lambda m: arguments if m is module else isinstance(m, Block))


BAD_ARGUMENTS: dict[str, tuple[dict[str, Any], Any, str]] = {
    "unknown": ({"reshard_after_forward": True}, ValueError, "reshard_after_forward.*blocks.1"),
    "type": ({"sharding_strategy": "FULL_SHARD"}, TypeError, "sharding_strategy"),
    "precision": ({"mixed_precision": torch.bfloat16}, TypeError, "mixed_precision"),
    "flag": ({"use_orig_params": None}, ValueError, "use_orig_params"),
    "mesh": ({"sharding_strategy": S.HYBRID_SHARD, "process_group": "world"}, ValueError, "HYBRID_SHARD"),
    "init": ({"param_init_fn": 3}, ValueError, "param_init_fn"),
    "module": ({"module": 3}, (TypeError, ValueError), "module"),
    "policy": ({"auto_wrap_policy": BLOCKS}, ValueError, "auto_wrap_policy"),
    "ignored": ({"ignored_modules": []}, ValueError, "ignored_modules"),
}


@on_ranks(2)
def test_arguments_that_a_policy_chose(rank: Rank) -> None:
    """They are checked before anything is wrapped; the error is the same on all ranks."""
    model = built(Net)
    reference = copy.deepcopy(model)
    before = Snapshot.of(model)
    for name, (arguments, kind, match) in BAD_ARGUMENTS.items():
        with pytest.raises(kind, match=match) as caught:
            FullyShardedDataParallel(model, auto_wrap_policy=kwargs_for(model.blocks[1], **arguments))
        messages: list[Any] = [None] * rank.world_size
        dist.all_gather_object(messages, str(caught.value))
        assert messages[0] == messages[1], name
        before.assert_unchanged(model)
    assert_trains_alike(FullyShardedDataParallel(model, auto_wrap_policy=BLOCKS), reference, rank, steps=1)


def divide(module: nn.Module) -> bool:
    return 1 / 0 > 0


def divide_late(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse or divide(module)


BAD_POLICIES: dict[str, tuple[Any, type[Exception], str]] = {
    "raises": (Breaking(), OSError, "no plan"),
    "elsewhere": (Elsewhere(), ValueError, "not below the root"),
    "answer": (CustomPolicy(lambda module: "yes"), ValueError, "True, False or a dict"),  # type: ignore[arg-type,return-value]
    "custom": (CustomPolicy(divide), ZeroDivisionError, "zero"),
    "signature": (lambda module: True, TypeError, "recurse"),
    "function": (divide_late, ZeroDivisionError, "zero"),
}


@on_ranks(2)
def test_plans_that_cannot_be_made(rank: Rank) -> None:
    """Whatever a policy does wrong shows before anything is wrapped."""
    model = built(Tied)
    before = Snapshot.of(model)
    for policy, kind, match in BAD_POLICIES.values():
        with pytest.raises(kind, match=match):
            FullyShardedDataParallel(model, auto_wrap_policy=policy)
        before.assert_unchanged(model)


@on_ranks(2)
@pairwise(make=[Net, Tied], place=["first block", "second block", "root"], use_orig_params=[False, True])
def test_parameters_that_cannot_be_flat(rank: Rank, make: Any, place: str, use_orig_params: bool) -> None:
    """A parameter that no flat unit takes, in the first, a later or the last unit: all is undone, ties included."""
    model = built(make)
    reference = copy.deepcopy(model)
    frozen, marked = model.blocks[0].up.weight, model.blocks[1].down.weight
    frozen.requires_grad_(False)
    mark = marked.mark = ["attribute"]  # type: ignore[attr-defined]
    before = Snapshot.of(model)
    owner = {"first block": model.blocks[0], "second block": model.blocks[1], "root": model}[place]
    owner.odd = odd_parameter()
    with pytest.raises(ValueError, match="odd is a Odd"), pytest.warns(UserWarning, match="frozen"):
        FullyShardedDataParallel(model, auto_wrap_policy=BLOCKS, use_orig_params=use_orig_params)
    assert nested_units(model) == [] and units_of(model) == []
    del owner.odd
    before.assert_unchanged(model)
    assert marked.mark is mark  # type: ignore[attr-defined]
    frozen.requires_grad_(True)
    wrapped = FullyShardedDataParallel(model, auto_wrap_policy=BLOCKS, use_orig_params=use_orig_params)
    assert_trains_alike(wrapped, reference, rank, steps=2)


@on_ranks(2)
@pytest.mark.parametrize(("policy", "use_orig_params"), [(None, False), (BLOCKS, True)])
def test_unsharded_after_a_failed_wrap(rank: Rank, policy: Any, use_orig_params: bool) -> None:
    """After a wrap that failed the plain module trains, bit for bit as a copy that nobody tried to wrap.

    Gradients that the module had before, of its parameters or some, are there still.
    """
    model = built(Net)
    reference = copy.deepcopy(model)
    mean_square(model, batch(rank.rank, 0)).backward()
    model.blocks[0].up.weight.grad = None
    gradients = {name: p.grad for name, p in model.named_parameters()}
    values = {name: None if grad is None else grad.clone() for name, grad in gradients.items()}
    model.odd = odd_parameter()
    before = Snapshot.of(model)
    options: dict[str, Any] = {"use_orig_params": use_orig_params, "mixed_precision": MixedPrecision(torch.bfloat16)}
    with pytest.raises(ValueError, match="odd"):
        FullyShardedDataParallel(model, auto_wrap_policy=policy, **options)
    del model.odd
    assert list(model.parameters()) == [p for n, p in before.parameters.items() if n != "odd"]
    for name, parameter in model.named_parameters():
        assert parameter.grad is gradients[name], name
        assert_equal(parameter.grad, values[name], name)
    for step in range(2):
        for each in (model, reference):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            optimizer.zero_grad()
            mean_square(each, batch(0, step)).backward()
            optimizer.step()
    for (name, found), wanted in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
        assert_equal(found, wanted, name)


@on_ranks(2)
@MODES
def test_init_fails_in_a_later_unit(rank: Rank, use_orig_params: bool) -> None:
    """``param_init_fn`` raises in the second unit: what the first made of real parameters is undone."""
    model = built(Net)
    with torch.device("meta"):
        model.blocks[1].down = nn.Linear(7, 6, bias=False)
    before = Snapshot.of(model)

    def init(module: nn.Module) -> None:
        raise OSError("file not found")

    for policy in (BLOCKS, None, ModuleWrapPolicy({Block, nn.Linear})):
        with pytest.raises(OSError, match="file not found"):
            FullyShardedDataParallel(
                model, auto_wrap_policy=policy, param_init_fn=init, use_orig_params=use_orig_params
            )
        before.assert_unchanged(model)


@on_ranks(2, timeout=20)
@pytest.mark.parametrize(("policy", "sync"), [(None, True), (BLOCKS, False), (BLOCKS, True)])
def test_failing_on_one_rank(rank: Rank, sync: bool, policy: Any) -> None:
    """Where one rank cannot initialise a module, all ranks raise, and none is left waiting or wrapped."""
    model = built(Net)
    with torch.device("meta"):
        model.head = nn.Linear(6, 3)
    before = Snapshot.of(model)

    def init(module: nn.Module) -> None:
        if rank.rank == 1:
            raise OSError("file not found")
        module.to_empty(device=rank.device, recurse=False)

    kind, match = (OSError, "file not found") if rank.rank == 1 else (FullshardError, "rank 1: OSError: file not found")
    with pytest.raises(kind, match=match):
        FullyShardedDataParallel(model, auto_wrap_policy=policy, param_init_fn=init, sync_module_states=sync)
    before.assert_unchanged(model, meta=True)


@on_ranks(2)
@pytest.mark.parametrize(
    ("front_end", "use_orig_params"), [("wrapper", False), ("wrapper", True), ("fully_shard", False)]
)
def test_units_made_before_stay(rank: Rank, front_end: str, use_orig_params: bool) -> None:
    """What was wrapped by hand before stays wrapped when the wrap around it fails, and works."""
    model = built(Net, 3)
    reference = copy.deepcopy(model)
    if front_end == "wrapper":
        model.blocks[1] = FullyShardedDataParallel(model.blocks[1], use_orig_params=use_orig_params)
    else:
        fully_shard(model.blocks[1], mesh=rank.mesh)
    inner = model.blocks[1]
    held = dict(inner.named_parameters())
    units = nested_units(model)
    model.odd = odd_parameter()
    with pytest.raises(ValueError, match="odd"):
        FullyShardedDataParallel(model, auto_wrap_policy=BLOCKS, use_orig_params=use_orig_params)
    del model.odd
    assert nested_units(model) == units and len(units) == 1 and model.blocks[1] is inner
    now = dict(inner.named_parameters())
    assert list(now) == list(held) and all(now[name] is held[name] for name in now)
    torch.testing.assert_close(inner(batch(0, 0)), reference.blocks[1](batch(0, 0)))
    wrapped = FullyShardedDataParallel(model, auto_wrap_policy=BLOCKS, use_orig_params=use_orig_params)
    loss = mean_square(wrapped, batch(rank.rank, 0))
    loss.backward()
    torch.testing.assert_close(loss, mean_square(reference, batch(rank.rank, 0)))


@on_ranks(2)
@MODES
def test_tied_to_a_unit_made_before(rank: Rank, use_orig_params: bool) -> None:
    """A parameter that a unit wrapped by hand would have to give up, when the wrap fails: the unit has it still."""
    model = built(Tied)
    reference = copy.deepcopy(model)
    model.blocks[0] = FullyShardedDataParallel(model.blocks[0], use_orig_params=use_orig_params)
    model.zz = odd_parameter()
    with pytest.raises(ValueError, match="zz"):
        FullyShardedDataParallel(model, use_orig_params=use_orig_params)
    del model.zz
    assert len(nested_units(model)) == 1
    torch.testing.assert_close(model.blocks[0](batch(0, 0)), reference.blocks[0](batch(0, 0)))
    model.zz = odd_parameter()
    with pytest.raises(ValueError, match="zz"):  # the other block, which has the same weight, is a unit meanwhile
        FullyShardedDataParallel(model, auto_wrap_policy=BLOCKS, use_orig_params=use_orig_params)
    del model.zz
    torch.testing.assert_close(model.blocks[0](batch(0, 0)), reference.blocks[0](batch(0, 0)))
    wrapped = FullyShardedDataParallel(model, use_orig_params=use_orig_params)
    assert_trains_alike(wrapped, reference, rank)


@on_ranks(4)
@pytest.mark.parametrize(("strategy", "use_orig_params"), [(s, bool(i % 2)) for i, s in enumerate(S)])
def test_failures_with_every_strategy(rank: Rank, strategy: ShardingStrategy, use_orig_params: bool) -> None:
    """Whatever is sharded, replicated, offloaded or cast is put together again, also after a second failure."""
    model = built(Tied)
    reference = copy.deepcopy(model)
    before = Snapshot.of(model)
    options: dict[str, Any] = {
        "sharding_strategy": strategy,
        "auto_wrap_policy": ModuleWrapPolicy({Block, nn.Linear}),
        "cpu_offload": CPUOffload(offload_params=use_orig_params),
        "device_mesh": rank.make_mesh(2, 2) if strategy.hybrid else rank.mesh,
        "use_orig_params": use_orig_params,
    }
    for sync in (True, False):
        model.odd = odd_parameter()
        with pytest.raises(ValueError, match="odd"):
            FullyShardedDataParallel(
                model, mixed_precision=MixedPrecision(torch.bfloat16), sync_module_states=sync, **options
            )
        del model.odd
        before.assert_unchanged(model)
    assert_trains_alike(FullyShardedDataParallel(model, **options), reference, rank, steps=2, microbatches=2)


@on_ranks(2)
def test_memory_of_a_failed_wrap(rank: Rank) -> None:
    """Units that were undone are gone, and with them their buffers."""
    model = built(Net)
    model.odd = odd_parameter()
    made: list[weakref.ref[Any]] = []
    usual = Unit.__init__

    def noting(self: Unit, *arguments: Any, **more: Any) -> None:
        made.append(weakref.ref(self))
        usual(self, *arguments, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Unit, "__init__", noting)
        with pytest.raises(ValueError, match="odd"):
            FullyShardedDataParallel(model, auto_wrap_policy=BLOCKS)
    gc.collect()
    assert made and [ref() for ref in made] == [None] * len(made)
