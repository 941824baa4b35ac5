"""Lightning's Fabric on fullshard, with FSDPStrategy: the wrapper."""

from __future__ import annotations

import pytest

pytest.importorskip("lightning")

import copy
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision.fsdp import FSDPPrecision
from lightning.fabric.strategies import FSDPStrategy
from lightning_runs import (
    Block,
    FSDPOnCpu,
    adam,
    batch,
    fabric_on,
    full,
    loss_of,
    net,
    standing_in,
    train,
    unsharded,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import wrap

import fullshard
from compare import assert_close, assert_equal
from fullshard.comm import record
from ranks import Rank, on_ranks

STEPS = range(4)


def is_block(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    """A policy, as FSDP takes it as a callable."""
    return recurse or isinstance(module, Block)


def units(model: nn.Module) -> int:
    return sum(isinstance(module, fullshard.FullyShardedDataParallel) for module in model.modules())


def assert_trained_as(model: nn.Module, expected: nn.Module, losses: list[float], rank: Rank, reference: Any) -> None:
    """Same losses, same parameters, bit by bit."""
    assert losses == [step[rank.rank] for step in reference]
    assert_equal(full(model), dict(copy.deepcopy(expected).named_parameters()), "parameters")


# ---------------------------------------------------------------- setting up


@pytest.mark.parametrize(
    ("options", "expected_units"),
    [
        ({}, 1),
        ({"auto_wrap_policy": {Block}}, 3),
        ({"auto_wrap_policy": is_block}, 3),
        ({"auto_wrap_policy": {Block, nn.Linear}, "sharding_strategy": "SHARD_GRAD_OP"}, 9),
        ({"sharding_strategy": "NO_SHARD"}, 1),
        ({"cpu_offload": True}, 1),
    ],
    ids=["whole", "classes", "callable", "nested", "no_shard", "cpu_offload"],
)
@on_ranks(2)
def test_setup_of_model_and_optimizer(rank: Rank, options: dict[str, Any], expected_units: int) -> None:
    """``fabric.setup(model, optimizer)``, with the strategy's policies: losses and weights of the unsharded run."""
    with standing_in():
        fabric = fabric_on(FSDPOnCpu(**options))
        model = net()
        model, optimizer = fabric.setup(model, adam(model))
        assert units(model) == expected_units
        losses = train(fabric, model, optimizer, STEPS)
        expected = net()
        assert_trained_as(model, expected, losses, rank, unsharded(expected, STEPS))


@pytest.mark.parametrize("use_orig_params", [True, False])
@on_ranks(2)
def test_setup_of_module_then_optimizer(rank: Rank, use_orig_params: bool) -> None:
    """``setup_module``, then an optimizer of its parameters, then ``setup_optimizers``."""
    with standing_in():
        fabric = fabric_on(FSDPOnCpu(auto_wrap_policy={Block}, use_orig_params=use_orig_params))
        model = fabric.setup_module(net())
        optimizer = fabric.setup_optimizers(adam(model))
        assert isinstance(next(model.parameters()), fullshard.FlatParameter) is not use_orig_params
        losses = train(fabric, model, optimizer, STEPS)
        expected = net()
        reference = unsharded(expected, STEPS)
        assert losses == [step[rank.rank] for step in reference]
        if use_orig_params:
            assert_trained_as(model, expected, losses, rank, reference)


@on_ranks(2)
def test_optimizers_made_too_early_are_refused(rank: Rank) -> None:
    """Lightning's own checks of flat parameters: the joint setup, and an optimizer of the plain parameters."""
    with standing_in():
        fabric = fabric_on(FSDPOnCpu(use_orig_params=False))
        model = net()
        with pytest.raises(ValueError, match="not supported when setting the model and optimizer up jointly"):
            fabric.setup(model, adam(model))
        early = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
        sharded = fabric.setup_module(model)
        with pytest.raises(ValueError, match="does not seem to reference any FSDP parameters"):
            fabric.setup_optimizers(early)
        fabric.setup_optimizers(adam(sharded))


@on_ranks(2)
def test_modules_wrapped_by_hand(rank: Rank) -> None:
    """``wrap`` inside of ``fabric.init_module()`` wraps with the strategy's settings, and ``setup`` lets it be."""
    with standing_in():
        fabric = fabric_on(FSDPOnCpu())
        with fabric.init_module():
            model = net()
            model[1] = wrap(model[1])
            model = wrap(model)
        model, optimizer = fabric.setup(model, adam(model))
        assert units(model) == 2
        losses = train(fabric, model, optimizer, STEPS)
        expected = net()
        assert_trained_as(model, expected, losses, rank, unsharded(expected, STEPS))


@on_ranks(2)
def test_models_made_on_the_meta_device(rank: Rank, tmp_path: Path) -> None:
    """``init_module(empty_init=True)``: wrapped modules are initialized, a raw file of weights fills them."""
    weights = tmp_path / "weights.pt"
    torch.save(net().state_dict(), weights)
    with standing_in():
        fabric = fabric_on(FSDPOnCpu(auto_wrap_policy={nn.LayerNorm, nn.Linear}))
        with fabric.init_module(empty_init=True):
            model = net()
        assert all(p.is_meta for p in model.parameters())
        with pytest.raises(RuntimeError, match="references to the model's meta-device parameters"):
            fabric.setup(model, adam(model))
        model = fabric.setup_module(model)
        assert not any(p.is_meta for p in model.parameters())
        ones = full(model)["1.norm.weight"]
        assert_equal(ones, torch.ones(7), "what LayerNorm.reset_parameters leaves")
        fabric.load_raw(weights, model)
        losses = train(fabric, model, fabric.setup_optimizers(adam(model)), STEPS)
        expected = net()
        assert_trained_as(model, expected, losses, rank, unsharded(expected, STEPS))


@on_ranks(4)
def test_hybrid_sharding_over_a_mesh(rank: Rank) -> None:
    """``device_mesh=`` with HYBRID_SHARD. (A tuple of sizes Lightning makes a mesh of CUDA devices of.)"""
    with standing_in():
        mesh = rank.make_mesh(2, 2, names=("replicate", "shard"))
        options: dict[str, Any] = {"device_mesh": mesh, "sharding_strategy": "HYBRID_SHARD"}
        fabric = fabric_on(FSDPOnCpu(auto_wrap_policy={Block}, **options))
        model = net()
        model, optimizer = fabric.setup(model, adam(model))
        losses = train(fabric, model, optimizer, STEPS)
        reference = unsharded(net(), STEPS, world=4)
        assert_close(torch.tensor(losses), torch.tensor([step[rank.rank] for step in reference]), "losses", 1e-6)
        with pytest.raises(RuntimeError, match="requires you to pass at least one of"):
            FSDPOnCpu(sharding_strategy="HYBRID_SHARD")


@on_ranks(2)
def test_lightning_itself_wants_a_gpu_for_its_own_class(rank: Rank) -> None:
    """The refusal is Lightning's, by name of the class, before anything of FSDP is asked for."""
    with standing_in():
        for strategy in ("fsdp", FSDPStrategy()):
            with pytest.raises(ValueError, match="FSDP is only available on GPU"):
                Fabric(accelerator="cpu", devices=2, strategy=strategy)


# ---------------------------------------------------------------- a step


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@on_ranks(2)
def test_gradients_clipped_by_norm(rank: Rank, norm_type: float) -> None:
    """``fabric.clip_gradients(max_norm=)`` returns and applies the norm over all ranks' shards."""
    with standing_in():
        fabric = fabric_on(FSDPOnCpu(auto_wrap_policy={Block}))
        model, expected, norms = net(), net(), []
        model, optimizer = fabric.setup(model, adam(model))

        def clip(parameters: list[nn.Parameter]) -> None:
            norms.append(torch.nn.utils.clip_grad_norm_(parameters, 0.1, norm_type))

        reference = unsharded(expected, STEPS, clip=clip)
        for step in STEPS:
            loss = loss_of(model, batch(rank.rank, step))
            fabric.backward(loss)
            norm = fabric.clip_gradients(model, optimizer, max_norm=0.1, norm_type=norm_type)
            optimizer.step()
            optimizer.zero_grad()
            assert norm is not None
            assert_close(norm, norms[step], "norm", 1e-5)
            assert_close(loss, torch.tensor(reference[step][rank.rank]), "loss", 1e-5)


@on_ranks(2)
def test_gradients_clipped_by_value(rank: Rank) -> None:
    """``fabric.clip_gradients(clip_val=)`` works on the shards."""
    with standing_in():
        fabric = fabric_on(FSDPOnCpu())
        model, expected = net(), net()
        model, optimizer = fabric.setup(model, adam(model))
        reference = unsharded(expected, STEPS, clip=lambda ps: torch.nn.utils.clip_grad_value_(ps, 1e-3))
        losses = []
        for step in STEPS:
            loss = loss_of(model, batch(rank.rank, step))
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, clip_val=1e-3)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert_trained_as(model, expected, losses, rank, reference)


@on_ranks(2)
def test_accumulation_without_synchronizing(rank: Rank) -> None:
    """``fabric.no_backward_sync`` for one batch of two: one reduction, gradients of both."""
    with standing_in():
        fabric = fabric_on(FSDPOnCpu(auto_wrap_policy={Block}))
        model, expected = net(), net()
        model, optimizer = fabric.setup(model, adam(model))
        reference = unsharded(expected, STEPS, accumulate=2)
        for step in STEPS:
            last = step % 2 == 1
            with record() as seen, fabric.no_backward_sync(model, enabled=not last):
                loss = loss_of(model, batch(rank.rank, step))
                fabric.backward(loss / 2)
            assert any("reduce_scatter" in c.kind for c in seen) is last
            assert_close(loss, torch.tensor(reference[step][rank.rank]), "loss", 1e-6)
            if last:
                optimizer.step()
                optimizer.zero_grad()


@on_ranks(2)
def test_activation_checkpointing(rank: Rank) -> None:
    """``activation_checkpointing_policy``: blocks run again in backward, nothing else changes."""
    for policy in ({Block}, is_block):
        with standing_in():
            fabric = fabric_on(FSDPOnCpu(auto_wrap_policy={Block}, activation_checkpointing_policy=policy))
            model = net()
            model, optimizer = fabric.setup(model, adam(model))
            assert sum(isinstance(module, CheckpointWrapper) for module in model.modules()) == 2
            calls: list[None] = []
            for block in (m for m in model.modules() if isinstance(m, Block)):
                block.register_forward_pre_hook(lambda *_, calls=calls: calls.append(None))
            losses = train(fabric, model, optimizer, STEPS)
            assert len(calls) == 2 * 2 * len(STEPS)
            assert losses == [step[rank.rank] for step in unsharded(net(), STEPS)]


# ---------------------------------------------------------------- precision


PRECISIONS = [  # Lightning's name, dtype of computation and reduction, dtype in which parameters are kept
    ("32-true", torch.float32, torch.float32),
    ("bf16-mixed", torch.bfloat16, torch.float32),
    ("16-mixed", torch.float16, torch.float32),
    ("bf16-true", torch.bfloat16, torch.bfloat16),
    ("16-true", torch.float16, torch.float16),
]


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def unsharded_in(dtype: torch.dtype, kept: torch.dtype) -> list[list[float]]:
    """Losses of all ranks, computed and reduced in ``dtype``, with parameters kept in ``kept``."""
    torch.set_default_dtype(kept)
    model = net()
    torch.set_default_dtype(torch.float32)
    optimizer, losses = sgd(model), []
    for step in STEPS:
        lowered = copy.deepcopy(model).to(dtype)
        losses.append([])
        for rank in range(2):
            x, y = batch(rank, step)
            loss = loss_of(lowered, (x.to(dtype), y))
            (loss / 2).backward()
            losses[-1].append(loss.item())
        for parameter, low in zip(model.parameters(), lowered.parameters(), strict=True):
            assert low.grad is not None
            parameter.grad = low.grad.to(kept)
        optimizer.step()
    return losses


@pytest.mark.parametrize(("precision", "dtype", "kept"), PRECISIONS)
@on_ranks(2)
def test_precision(rank: Rank, precision: Any, dtype: torch.dtype, kept: torch.dtype) -> None:
    """What ``Fabric(precision=)`` makes of FSDP: dtypes of forward, of kept parameters; losses of a run in these."""
    with standing_in():
        fabric = fabric_on(FSDPOnCpu(auto_wrap_policy={Block}), precision=precision)
        with fabric.init_module():
            model = net()
        model, optimizer = fabric.setup(model, sgd(model))
        losses = train(fabric, model, optimizer, STEPS)
        blocks = [module for module in model.modules() if isinstance(module, Block)]
        assert [block.seen for block in blocks] == [{(dtype, dtype)}] * 2
        assert {p.dtype for p in model.parameters()} == {kept}
        assert losses == [step[rank.rank] for step in unsharded_in(dtype, kept)]


@on_ranks(2)
def test_scaled_gradients(rank: Rank) -> None:
    """16-mixed with a scaler: an infinite gradient on one rank skips the step on both, and halves both scales."""
    with standing_in():
        plugin = FSDPPrecision("16-mixed")
        assert isinstance(plugin.scaler, fullshard.ShardedGradScaler)
        # Lightning makes its scaler for CUDA, where there is none it is switched off; the argument for another one it
        # refuses always.
        plugin.scaler = ShardedGradScaler(device="cpu", init_scale=2.0**8)
        fabric = fabric_on(FSDPOnCpu(auto_wrap_policy={Block}), plugins=[plugin])
        model = net()
        model, optimizer = fabric.setup(model, sgd(model))
        before = full(model)
        loss = loss_of(model, batch(rank.rank, 0)) * (1e30 if rank.rank == 1 else 1.0)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        assert_equal(full(model), before, "parameters of a skipped step")
        assert plugin.scaler.get_scale() == 2.0**7
        losses = train(fabric, model, optimizer, STEPS)
        expected = [step[rank.rank] for step in unsharded_in(torch.float16, torch.float32)]
        assert_close(torch.tensor(losses), torch.tensor(expected), "losses", 1e-3)
        fabric.backward(loss_of(model, batch(rank.rank, 9)))
        norm = fabric.clip_gradients(model, optimizer, max_norm=1e-3)
        assert norm is not None and 1e-2 < norm < 10, "unscaled before the norm is taken"


@on_ranks(2)
def test_mixed_precision_of_the_strategy(rank: Rank) -> None:
    """``FSDPStrategy(mixed_precision=MixedPrecision(...))`` goes before the precision of Fabric."""
    with standing_in():
        from torch.distributed.fsdp import MixedPrecision

        config = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fabric = fabric_on(FSDPOnCpu(auto_wrap_policy={Block}, mixed_precision=config))
        model = net()
        model, optimizer = fabric.setup(model, adam(model))
        with record() as seen:
            train(fabric, model, optimizer, range(1))
        assert {c.dtype for c in seen if "reduce_scatter" in c.kind} == {torch.float32}
        assert {c.dtype for c in seen if "all_gather" in c.kind} == {torch.bfloat16}
