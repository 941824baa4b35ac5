"""Sharded training equals unsharded training with averaged gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from compare import assert_close, assert_equal, assert_models_equal
from fullshard import fully_shard
from fullshard.comm import record
from fullshard.engine.ownership import nested_units, unit_of
from models import (
    Branch,
    Language,
    Mlp,
    Stack,
    assert_at_rest,
    batch,
    gathered,
    reference_backward,
    shard_blocks,
    square_loss,
    tiny_units,
    tokens,
    with_reference,
)
from ranks import Rank, on_ranks

CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-6}
# Adam divides gradients by their own size, and so makes rounding errors of tiny ones as large as a step.
AFTER_ADAM: dict[str, float] = {"rtol": 1e-3, "atol": 1e-5}
UNEVEN = [(8, 7, 15, 16, 17), (8, 3, 5, 16, 17)]


def train_both(model: nn.Module, reference: nn.Module, rank: Rank, loss_at: Any, steps: int = 10) -> None:
    """Adam steps on both, with gradients compared at every step and parameters at the end."""
    ours = torch.optim.Adam(model.parameters(), lr=1e-2)
    theirs = torch.optim.Adam(reference.parameters(), lr=1e-2)
    for step in range(steps):
        for optimizer in (ours, theirs):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss_of = loss_at(step)
        loss_of(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, loss_of)
        assert_at_rest(model)
        if step in (0, steps - 1):
            assert_models_equal(model, reference, grads=True, **(CLOSE if step == 0 else AFTER_ADAM))
        ours.step()
        theirs.step()
    assert_models_equal(model, reference, **AFTER_ADAM)


@on_ranks(2, 4)
@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@pytest.mark.parametrize("dims", UNEVEN, ids=str)
def test_uneven_layers_train_as_unsharded(rank: Rank, dims: tuple[int, ...], reshard_after_forward: bool) -> None:
    """Ten Adam steps with one unit per layer, of sizes that ranks do not divide, equal unsharded ones."""
    model, reference = with_reference(Mlp(*dims), rank, reshard_after_forward=reshard_after_forward)
    train_both(model, reference, rank, lambda step: square_loss(step, 4, 8))


@on_ranks(2, 4)
@pytest.mark.parametrize("dims", UNEVEN, ids=str)
def test_single_unit_trains_as_unsharded(rank: Rank, dims: tuple[int, ...]) -> None:
    """Ten Adam steps with the whole model as one unit equal unsharded ones."""
    model = Mlp(*dims)
    reference = copy.deepcopy(model)
    fully_shard(model, mesh=rank.mesh)
    train_both(model, reference, rank, lambda step: square_loss(step, 4, 8))


def language_loss(step: int) -> Any:
    def loss_of(model: nn.Module, rank: int) -> torch.Tensor:
        ids = tokens(rank, step, 2, 5)
        return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    return loss_of


@on_ranks(2, 4)
def test_frozen_tied_and_uneven_together(rank: Rank) -> None:
    """A model with a tied embedding of uneven size and frozen parameters beside trainable ones trains right."""
    model = Language()
    model.blocks[0].up.weight.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    model, reference = with_reference(model, rank)
    train_both(model, reference, rank, language_loss)
    assert model.blocks[0].up.weight.grad is None
    assert model.head.weight is model.embedding.weight


@on_ranks(2)
def test_large_direct_parameters_train_as_unsharded(rank: Rank) -> None:
    """Parameters large enough for messages of their own, evenly and unevenly cut, train right."""
    model, reference = with_reference(Mlp(256, 257, 256), rank)
    train_both(model, reference, rank, lambda step: square_loss(step, 4, 256), steps=3)


@on_ranks(2)
def test_gradients_of_one_step_are_bitwise_equal(rank: Rank) -> None:
    """Gradients are summed in rank order, so one step's equal the reference's in every bit."""
    model, reference = with_reference(Stack(), rank)
    square_loss()(model, rank.rank).backward()
    reference_backward(reference, rank.world_size, square_loss())
    assert_models_equal(model, reference, grads=True)


class MixedDtypes(nn.Module):
    """Trainable float32, float64 and bfloat16 parameters, the last frozen in part."""

    def __init__(self) -> None:
        super().__init__()
        self.single, self.wide = nn.Linear(6, 5), nn.Linear(5, 7).double()
        self.low = nn.Linear(7, 3).bfloat16()
        self.low.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.low(self.wide(self.single(x).double()).bfloat16()).float()


@on_ranks(2, 4)
def test_mixed_dtypes_in_one_unit(rank: Rank) -> None:
    """Trainable parameters of three dtypes share a unit, and each keeps its dtype and its gradient's."""
    model = MixedDtypes()
    reference = copy.deepcopy(model)
    fully_shard(model, mesh=rank.mesh)
    for step in range(3):
        loss_of = square_loss(step)
        loss_of(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, loss_of)
    for name, parameter in reference.named_parameters():
        ours = model.get_parameter(name)
        assert ours.dtype is parameter.dtype
        assert (ours.grad is None) == (parameter.grad is None)
    assert_models_equal(model, reference, grads=True, rtol=2e-2, atol=1e-3)


@on_ranks(2)
def test_freezing_and_unfreezing_between_steps(rank: Rank) -> None:
    """A parameter frozen or thawed between steps loses or gets its gradient, also when all were frozen first."""
    model, reference = with_reference(Stack(), rank)
    schedule = [(), ("blocks.0", "last"), ("blocks.0.up.bias", "blocks.1", "first"), ("",)]
    for step, trainable in enumerate(schedule):
        for module in (model, reference):
            module.zero_grad()
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(any(name.startswith(prefix) for prefix in trainable))
        loss_of = square_loss(step)
        loss = loss_of(model, rank.rank)
        assert loss.requires_grad == bool(trainable)
        if trainable:
            loss.backward()
        reference_backward(reference, rank.world_size, loss_of)
        assert_models_equal(model, reference, grads=True, **CLOSE)
        assert_at_rest(model)


@on_ranks(2, 4)
def test_parameter_unused_on_some_ranks(rank: Rank) -> None:
    """A parameter without gradient on some ranks gets the mean everywhere; one without on all keeps None."""
    model = nn.Sequential(nn.Linear(6, 6), Branch(), nn.Linear(6, 6))
    reference = copy.deepcopy(model)
    for layer in (*model, model):
        fully_shard(layer, mesh=rank.mesh)

    def loss_of(module: nn.Module, number: int) -> torch.Tensor:
        module[1].rank = number
        return square_loss()(module, number)

    for _ in range(2):
        loss_of(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, loss_of)
    assert model[1].never.weight.grad is None
    assert model[1].odd.weight.grad is not None
    assert_models_equal(model, reference, grads=True, **CLOSE)


class Outputs(nn.Module):
    """Returns both of two layers' outputs; a third layer is not used at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.layers[0](x)
        return hidden, self.layers[1](hidden)


@on_ranks(2)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_output_and_module_not_in_the_loss(rank: Rank, reshard_after_forward: bool) -> None:
    """Layers that do not contribute to the loss keep no gradient and are freed after backward anyway."""
    model, reference = with_reference(Outputs(), rank, reshard_after_forward=reshard_after_forward)

    def loss_of(module: nn.Module, number: int) -> torch.Tensor:
        return module(batch(number, 0, 4, 6))[0].square().mean()

    for _ in range(2):
        loss_of(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, loss_of)
        assert_at_rest(model)
    assert model.layers[1].weight.grad is None
    assert model.layers[2].weight.grad is None
    assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(1)
def test_single_rank_moves_nothing(rank: Rank) -> None:
    """On one rank training equals plain training in every bit, without a collective and without a copy."""
    model, reference = with_reference(Stack(), rank)
    ours, theirs = (torch.optim.Adam(m.parameters()) for m in (model, reference))
    pointers = {name: p.to_local().data_ptr() for name, p in model.named_parameters()}
    seen_pointers: dict[str, int] = {}
    for name, block in model.blocks.named_children():
        block.register_forward_hook(
            lambda block, _args, _output, name=name: seen_pointers.update(
                {f"blocks.{name}.{key}": p.data_ptr() for key, p in block.named_parameters()}
            )
        )
    with record() as collectives:
        for step in range(3):
            square_loss(step)(model, 0).backward()
            square_loss(step)(reference, 0).backward()
            assert_models_equal(model, reference, grads=True)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
    assert collectives == []
    assert len(seen_pointers) == 12
    assert all(pointers[name] == pointer for name, pointer in seen_pointers.items())
    assert_models_equal(model, reference)


@on_ranks(2)
@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
def test_forward_without_gradient(rank: Rank, reshard_after_forward: bool) -> None:
    """A forward without gradients equals one in eval mode and leaves nothing gathered."""
    model, reference = with_reference(Stack(), rank, reshard_after_forward=reshard_after_forward)
    x = batch(rank.rank, 0, 4, 6)
    expected = reference(x).detach()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert_close(model(x), expected, context.__name__, rtol=1e-6, atol=1e-6)
        assert_at_rest(model)
        with context():
            assert_close(model.eval()(x), expected, "eval", rtol=1e-6, atol=1e-6)
        model.train()
        assert_at_rest(model)


@on_ranks(2)
def test_evaluation_between_training_steps(rank: Rank) -> None:
    """Forwards without gradients between steps, and between a forward and its backward, change nothing."""
    model, reference = with_reference(Stack(), rank)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(3):
        with torch.no_grad():
            model(batch(rank.rank, 50 + step, 4, 6))
        loss = square_loss(step)(model, rank.rank)
        with torch.inference_mode():
            model(batch(rank.rank, 60 + step, 4, 6))
        loss.backward()
        reference_backward(reference, rank.world_size, square_loss(step))
        assert_models_equal(model, reference, grads=True, **CLOSE)
        assert_at_rest(model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
def test_change_in_place_is_seen_by_the_next_forward(rank: Rank) -> None:
    """Writing to sharded parameters in place changes what the next forward computes with."""
    model, reference = with_reference(Stack(), rank)
    x = batch(rank.rank, 0, 4, 6)
    model(x).sum().backward()
    with torch.no_grad():
        for module in (model, reference):
            for parameter in module.parameters():
                parameter.mul_(0.5)
    assert_close(model(x), reference(x), "output", rtol=1e-5, atol=1e-6)


@on_ranks(2)
@pytest.mark.parametrize("reshard_after_forward", [False, None])
def test_optimizer_step_after_an_abandoned_forward(rank: Rank, reshard_after_forward: bool) -> None:
    """An optimizer step after a forward that had no backward is seen by the next forward."""
    model, reference = with_reference(Stack(), rank, reshard_after_forward=reshard_after_forward)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, reference)]
    square_loss()(model, rank.rank).backward()
    reference_backward(reference, rank.world_size, square_loss())
    x = batch(rank.rank, 1, 4, 6)
    model(x)
    for optimizer in optimizers:
        optimizer.step()
    assert_close(model(x), reference(x), "output", rtol=1e-5, atol=1e-6)


OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.Adam, {"foreach": True}),
    (torch.optim.Adam, {"fused": True}),
    (torch.optim.AdamW, {"weight_decay": 0.1, "foreach": True}),
    (torch.optim.AdamW, {"weight_decay": 0.1, "fused": True}),
    (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),  # fused: torch 2.13 has no DTensor rule for _fused_sgd_
]


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "options"), OPTIMIZERS, ids=lambda v: v.__name__ if isinstance(v, type) else "+".join(v)
)
def test_optimizer_variants(rank: Rank, kind: Any, options: dict[str, Any]) -> None:
    """Foreach and fused optimizers work on sharded parameters, empty shards included."""
    model, reference = with_reference(Mlp(6, 1, 5), rank)
    ours = kind(model.parameters(), lr=1e-2, **options)
    plain = {key: value for key, value in options.items() if key not in ("foreach", "fused")}
    theirs = kind(reference.parameters(), lr=1e-2, foreach=False, **plain)
    for step in range(3):
        square_loss(step)(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, square_loss(step))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_models_equal(model, reference, **AFTER_ADAM)


@on_ranks(2, 4)
@pytest.mark.parametrize("norm", [2.0, float("inf"), 1.0])
def test_clip_grad_norm(rank: Rank, norm: float) -> None:
    """``clip_grad_norm_`` finds the norm over all ranks and scales every rank's gradients by it."""
    # torch refuses the infinity norm of an empty tensor, so no rank's shard is empty in that case.
    model, reference = with_reference(Mlp(6, 7, 4) if norm == float("inf") else Mlp(6, 3, 5), rank)
    square_loss()(model, rank.rank).backward()
    reference_backward(reference, rank.world_size, square_loss())
    ours = nn.utils.clip_grad_norm_(model.parameters(), 1e-3, norm)
    theirs = nn.utils.clip_grad_norm_(reference.parameters(), 1e-3, norm)
    assert_close(ours.full_tensor(), theirs, "total norm", rtol=1e-5)
    assert_models_equal(model, reference, grads=True, rtol=1e-4, atol=1e-8)


@on_ranks(2)
def test_gradient_scaler_with_inf_on_one_rank(rank: Rank) -> None:
    """An overflow in one rank's shard alone makes the scaler skip the step and lower its scale on all."""
    model = fully_shard(nn.Linear(6, 4), mesh=rank.mesh)
    before = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    factors = torch.tensor([float("inf"), 1.0, 1.0, 1.0])  # row 0 lies on rank 0
    for finite in (False, True):
        optimizer.zero_grad()
        output = model(torch.ones(2, 6))
        loss = (output if finite else output * factors).sum()
        scaler.scale(loss).backward()
        local = model.weight.grad.to_local()
        assert bool(local.isfinite().all()) == (finite or rank.rank == 1)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 4.0
        for name, parameter in model.named_parameters():
            step = 0.1 * 2 if finite else 0.0  # two rows of ones
            assert_close(parameter.full_tensor().detach(), before[name] - step, name, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_hooks_on_sharded_parameters(rank: Rank) -> None:
    """Hooks on sharded parameters see the reduced gradient once per backward, and may replace it."""
    model, reference = with_reference(Stack(), rank)
    calls: list[str] = []
    for name, parameter in model.named_parameters():

        def replace(gradient: torch.Tensor, name: str = name) -> torch.Tensor:
            assert isinstance(gradient, DTensor)
            calls.append(f"hook {name}")
            return gradient * 2

        def after(parameter: torch.Tensor, name: str = name) -> None:
            assert isinstance(parameter.grad, DTensor)
            calls.append(f"after {name}")

        parameter.register_hook(replace)
        parameter.register_post_accumulate_grad_hook(after)
    for _ in range(2):
        square_loss()(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, square_loss())
    names = [name for name, _ in model.named_parameters()]
    assert sorted(calls) == sorted([f"{kind} {name}" for kind in ("hook", "after") for name in names] * 2)
    for parameter in reference.parameters():
        parameter.grad.mul_(2)
    assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(2)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_optimizer_in_backward(rank: Rank, reshard_after_forward: bool) -> None:
    """Optimizers that step from hooks in backward train as one that steps after it, and keep no gradient."""
    model, reference = with_reference(Stack(), rank, reshard_after_forward=reshard_after_forward)
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def step_now(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_now)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        theirs.zero_grad()
        square_loss(step)(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, square_loss(step))
        theirs.step()
        assert all(p.grad is None for p in model.parameters())
        assert_at_rest(model)
    assert_models_equal(model, reference, **CLOSE)


@on_ranks(2)
def test_gradients_have_the_parameters_layout(rank: Rank) -> None:
    """Every gradient is a DTensor with the parameter's shape, dtype, placements and local shape."""
    model = shard_blocks(Mlp(6, 3, 5), rank)
    square_loss()(model, rank.rank).backward()
    for parameter in model.parameters():
        gradient = parameter.grad
        assert isinstance(gradient, DTensor)
        assert (gradient.shape, gradient.dtype) == (parameter.shape, parameter.dtype)
        assert gradient.placements == parameter.placements
        assert gradient.to_local().shape == parameter.to_local().shape


@on_ranks(2)
def test_losses_of_both_front_settings_are_equal(rank: Rank) -> None:
    """How a model is cut into units and when it is freed changes no bit of a step's outputs."""
    outputs = []
    for settings in ({"reshard_after_forward": True}, {"reshard_after_forward": False}, {}):
        torch.manual_seed(1)
        model = shard_blocks(Stack(), rank, **settings)
        outputs.append(model(batch(rank.rank, 0, 4, 6)).detach())
    assert_equal(outputs[1], outputs[0], "False against True")
    assert_equal(outputs[2], outputs[0], "None against True")


@on_ranks(2)
def test_nothing_is_left_after_a_forward_that_resharded(rank: Rank) -> None:
    """Between forward and backward only what the settings say is gathered: by default the root and what ran last."""
    every = ["", "blocks.0", "blocks.1", "blocks.2"]
    for setting, expected in [(True, []), (None, ["", "blocks.2"]), (False, every)]:
        with tiny_units():
            model = shard_blocks(Stack(), rank, reshard_after_forward=setting)
        loss = square_loss()(model, rank.rank)
        assert gathered(model) == expected
        loss.backward()
        assert_at_rest(model)
        assert len(nested_units(model)) == 4
        assert unit_of(model.blocks[0]) is nested_units(model)[1]
