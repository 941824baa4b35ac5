"""Fine-tuning, hooks and memory of wrapped models: what is frozen, what is watched, what is kept."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from earlier_front_ends import (
    CLOSE,
    Block,
    Mlp,
    Stack,
    assert_same_gradients,
    assert_same_values,
    batch,
    build,
    full_gradients,
    full_values,
    gathered,
    reference_backward,
    square_loss,
    train,
    train_reference,
    wrapped,
)
from torch import nn

from compare import assert_close, assert_equal
from fullshard import FullyShardedDataParallel, ShardingStrategy
from fullshard.comm import record
from fullshard.engine.ownership import nested_units
from models import tiny_units
from ranks import Rank, on_ranks

both_modes = pytest.mark.parametrize("use_orig_params", [False, True])


# -------------------------------------------------------------------- fine-tuning


@on_ranks(2)
@both_modes
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_frozen_units_are_freed_in_backward(rank: Rank, strategy: str, use_orig_params: bool) -> None:
    """Frozen units at the start and in the middle: nothing stays gathered, nothing of them is reduced."""
    reference = build(Stack, 4)
    for frozen in (reference.first, reference.blocks[0], reference.blocks[2]):
        frozen.requires_grad_(False)
    with tiny_units():
        model = wrapped(reference, rank, sharding_strategy=ShardingStrategy[strategy], use_orig_params=use_orig_params)
    for step in range(2):
        loss = square_loss(step)(model, rank.rank)
        with record() as seen:
            loss.backward()
        assert gathered(model) == []
        reduced = {c.unit for c in seen if c.kind == "reduce_scatter"}
        assert len(reduced) == 3 and not any("blocks.0" in name or "blocks.2" in name for name in reduced)
        reference_backward(reference, rank.world_size, square_loss(step))
    assert_same_gradients(model, reference)


@on_ranks(2)
@both_modes
def test_unfreezing_at_the_last_step(rank: Rank, use_orig_params: bool) -> None:
    """Frozen blocks, a no_grad step in between, and everything trainable for the last steps."""
    reference = build(Stack)
    reference.blocks.requires_grad_(False)
    model = wrapped(reference, rank, use_orig_params=use_orig_params)
    trained: list[list[torch.Tensor]] = []
    for module in (model, reference):
        loop: Callable[..., torch.Tensor] = train if module is model else train_reference
        trained.append([loop(module, rank, square_loss, 3)])
        with torch.no_grad():
            module(batch(0, 0, 4, 6))
        module.requires_grad_(True)
        trained[-1].append(loop(module, rank, square_loss, 3))
    for ours, theirs in zip(*trained, strict=True):
        assert_close(ours, theirs, "losses", **CLOSE)
    assert_same_values(model, reference, **CLOSE)


# -------------------------------------------------------------------- hooks


@on_ranks(2)
def test_hooks_on_parameters(rank: Rank) -> None:
    """Tensor hooks and post-accumulate hooks of original parameters see the reduced gradient of this rank's piece."""
    reference = build(Stack)
    model = wrapped(reference, rank, use_orig_params=True)
    seen: dict[str, torch.Tensor] = {}
    accumulated: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda g, name=name: seen.update({name: g.clone()}))
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: accumulated.append(name))
    square_loss()(model, rank.rank).backward()
    for name, parameter in model.named_parameters():
        if parameter.numel():
            assert_equal(seen[name], parameter.grad, name)
            assert accumulated.count(name) == 1


@on_ranks(2)
@both_modes
def test_hooks_on_modules(rank: Rank, use_orig_params: bool) -> None:
    """Forward and full backward hooks, on wrappers and on what is inside, see what an unsharded module's see."""
    reference = build(Stack)
    model = wrapped(reference, rank, use_orig_params=use_orig_params)

    def watch(module: nn.Module) -> dict[str, torch.Tensor]:
        seen: dict[str, torch.Tensor] = {}
        for name in ("blocks.0", "blocks.1.up", "last"):
            inner = module.get_submodule(name) if module is reference else _inner(module, name)
            inner.register_forward_hook(lambda _, a, o, name=name: seen.update({name: o.detach().clone()}))
            inner.register_full_backward_hook(
                lambda _, gi, go, name=name: seen.update({name + " in": gi[0], name + " out": go[0]})
            )
        return seen

    ours, theirs = watch(model), watch(reference)
    x = batch(rank.rank, 0, 4, 6)
    for module in (model, reference):
        module(x).square().mean().backward()
    assert set(ours) == set(theirs) and len(ours) == 9
    for name, value in theirs.items():
        assert_close(ours[name], value, name, **CLOSE)


def _inner(model: nn.Module, name: str) -> nn.Module:
    found = model
    for part in name.split("."):
        found = getattr(found, part) if not part.isdigit() else found[int(part)]  # type: ignore[index]
    return found


@on_ranks(2)
def test_hooks_on_flat_parameters(rank: Rank) -> None:
    """Tensor hooks and post-accumulate hooks of flat parameters see this rank's slice of the reduced gradient, once."""
    model = wrapped(build(Stack), rank)
    seen: dict[str, torch.Tensor] = {}
    accumulated: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda g, name=name: seen.update({name: g.clone()}))
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: accumulated.append(name))
    square_loss()(model, rank.rank).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert_equal(seen[name], parameter.grad, name)
        assert accumulated.count(name) == 1


@on_ranks(2)
@both_modes
def test_hooks_that_change_gradients(rank: Rank, use_orig_params: bool) -> None:
    """What a tensor hook returns takes the gradient's place."""
    models = [wrapped(build(Stack), rank, use_orig_params=use_orig_params) for _ in range(2)]
    for parameter in models[0].parameters():
        parameter.register_hook(lambda g: g * 2)
    for model in models:
        square_loss()(model, rank.rank).backward()
    for ours, plain in zip(*(model.parameters() for model in models), strict=True):
        if plain.numel():
            assert_equal(ours.grad, plain.grad * 2, "gradient")


# -------------------------------------------------------------------- memory


@on_ranks(2)
@both_modes
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_two_units_are_full_at_a_time(rank: Rank, strategy: str, use_orig_params: bool) -> None:
    """Of equal blocks two are full at once, one that computes and the next; SHARD_GRAD_OP keeps them till backward.

    FULL_SHARD keeps the last one only.
    """
    reference = build(Stack, 6)
    with tiny_units():
        model = wrapped(reference, rank, sharding_strategy=ShardingStrategy[strategy], use_orig_params=use_orig_params)
    full = {"forward": [0], "backward": [0]}

    def look(direction: str) -> None:
        blocks = [name for name in gathered(model) if "blocks" in name]
        full[direction].append(len(blocks))

    for block in model.blocks:
        inner = block.module
        inner.norm.register_forward_pre_hook(lambda *_: look("forward"))
        inner.down.register_forward_hook(lambda *_: look("forward"))
        inner.norm.register_full_backward_hook(lambda *_: look("backward"))
        inner.down.register_full_backward_hook(lambda *_: look("backward"))
    for step in range(2):
        loss = square_loss(step)(model, rank.rank)
        kept = [name for name in gathered(model) if "blocks" in name]
        assert kept == [f"blocks.{index}" for index in range(6) if index == 5 or strategy != "FULL_SHARD"]
        loss.backward()
        assert gathered(model) == []
    if strategy == "FULL_SHARD":
        assert max(full["forward"]) == max(full["backward"]) == 2
    with torch.no_grad():
        model(batch(0, 0, 4, 6))
    assert gathered(model) == []
    assert all(unit.is_idle for unit in nested_units(model))


@on_ranks(2)
@both_modes
def test_shards_are_all_that_is_kept(rank: Rank, use_orig_params: bool) -> None:
    """At rest a rank holds 1/N of the parameters, padded, and as much of gradients."""
    reference = build(Mlp, 8, 64, 64, 8)
    model = wrapped(reference, rank, use_orig_params=use_orig_params)
    square_loss(0, 4, 8)(model, rank.rank).backward()
    whole = sum(p.numel() for p in reference.parameters())
    for tensors in ([p.data for p in model.parameters()], [p.grad for p in model.parameters() if p.grad is not None]):
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}
        assert sum(storages.values()) <= 4 * whole / rank.world_size + 3 * 128
    assert list(itertools.chain.from_iterable(full_gradients(model))) != []
    assert_equal(full_values(model)["layers.1.weight"], reference.layers[1].weight.detach(), "weight")
    assert isinstance(model.layers[0], FullyShardedDataParallel) and not any(
        isinstance(m, Block) for m in model.modules()
    )
