"""The wrapper trains as an unsharded model does, whatever runs how often, and in between."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from earlier_front_ends import (
    AFTER_ADAM,
    CLOSE,
    EXACT_RATE,
    Language,
    Mlp,
    Stack,
    assert_at_rest,
    assert_same_gradients,
    assert_same_values,
    batch,
    build,
    full_values,
    reference_backward,
    square_loss,
    token_loss,
    train,
    train_reference,
    wrapped,
)
from torch import nn

from compare import assert_close, assert_equal
from fullshard import BackwardPrefetch, CPUOffload, FullyShardedDataParallel, ShardingStrategy, unsharded
from fullshard.comm import record
from fullshard.wrap import ModuleWrapPolicy
from ranks import Rank, on_ranks

both_modes = pytest.mark.parametrize("use_orig_params", [False, True])
UNEVEN = [(8, 7, 15, 16, 17), (8, 3, 5, 16, 17)]


def groups_of(model: nn.Module, per_layer: bool) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: one, or one per unit with learning rates that differ."""
    if not per_layer:
        return [{"params": list(model.parameters())}]
    return [{"params": list(layer.parameters()), "lr": 0.01 / (i + 1)} for i, layer in enumerate(model.layers)]


@on_ranks(2, 4)
@both_modes
@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("dims", UNEVEN, ids=str)
def test_uneven_layers_train_as_unsharded(
    rank: Rank, dims: tuple[int, ...], per_layer: bool, use_orig_params: bool
) -> None:
    """Ten Adam steps, gradients set to None and to zero in turn, with sizes that ranks do not divide."""
    reference = build(Mlp, *dims)
    model = wrapped(reference, rank, use_orig_params=use_orig_params)
    ours = torch.optim.Adam(groups_of(model, per_layer), lr=1e-2)
    theirs = torch.optim.Adam(groups_of(reference, per_layer), lr=1e-2)
    for step in range(10):
        for optimizer in (ours, theirs):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss_of = square_loss(step, 4, 8)
        loss = loss_of(model, rank.rank)
        loss.backward()
        losses = reference_backward(reference, rank.world_size, loss_of)
        assert_close(loss.detach(), losses[rank.rank], f"loss {step}", **AFTER_ADAM)
        assert_at_rest(model)
        if step == 0:
            assert_same_gradients(model, reference)
        ours.step()
        theirs.step()
    assert_same_values(model, reference, **AFTER_ADAM)


@on_ranks(2)
@both_modes
def test_one_step_of_gradients_is_bitwise_equal(rank: Rank, use_orig_params: bool) -> None:
    """Gradients are summed in rank order, so those of one step equal the reference's in every bit."""
    reference = build(Stack)
    model = wrapped(reference, rank, use_orig_params=use_orig_params)
    square_loss()(model, rank.rank).backward()
    reference_backward(reference, rank.world_size, square_loss())
    assert_same_gradients(model, reference, rtol=0.0, atol=0.0)


# -------------------------------------------------------------------- how often, in which order


def twice(model: nn.Module, rank: int) -> torch.Tensor:
    """The same block, used in the middle and at the end."""
    return model(batch(rank, 0, 4, 6), run=[0, 1, 0, 2, 0]).square().mean()


def two_forwards(model: nn.Module, rank: int) -> torch.Tensor:
    return model(batch(rank, 0, 4, 6)).square().mean() + model(batch(rank, 1, 3, 6)).mean()


def grows_and_shrinks(model: nn.Module, rank: int) -> torch.Tensor:
    """Three forwards that run different blocks."""
    runs: list[list[int]] = [[0], [0, 1, 2], [2]]
    return sum(model(batch(rank, i, 4, 6), run=run).square().mean() for i, run in enumerate(runs))  # type: ignore[return-value]


def output_unused(model: nn.Module, rank: int) -> torch.Tensor:
    model(batch(rank, 3, 4, 6))
    return model(batch(rank, 1, 4, 6)).square().mean()


def skips_a_block(model: nn.Module, rank: int) -> torch.Tensor:
    return model(batch(rank, 0, 4, 6), run=[0, 2]).square().mean()


def through_an_input_gradient(model: nn.Module, rank: int) -> torch.Tensor:
    """The inputs require gradients, as embeddings from elsewhere do."""
    return model(batch(rank, 0, 4, 6).requires_grad_()).square().mean()


LOSSES = [twice, two_forwards, grows_and_shrinks, output_unused, skips_a_block, through_an_input_gradient]


@on_ranks(2)
@both_modes
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("loss_of", LOSSES, ids=lambda f: f.__name__)
def test_any_use_of_modules(rank: Rank, loss_of: Any, strategy: str, use_orig_params: bool) -> None:
    """Modules used repeatedly, partly or in vain: losses and gradients equal the reference's, for three steps."""
    reference = build(Stack)
    model = wrapped(reference, rank, sharding_strategy=ShardingStrategy[strategy], use_orig_params=use_orig_params)
    losses = train(model, rank, lambda _: loss_of, steps=3)
    assert_close(losses, train_reference(reference, rank, lambda _: loss_of, steps=3), "losses", **CLOSE)
    assert_same_values(model, reference, **CLOSE)
    assert_at_rest(model)


@on_ranks(2)
@both_modes
def test_unused_parameters_have_no_gradient(rank: Rank, use_orig_params: bool) -> None:
    """The gradients of a unit that was not run, and of a layer inside a unit, are None where parameters are visible."""
    reference = build(Stack)
    reference.blocks[1].up.bias = nn.Parameter(torch.ones(5))
    reference.blocks[0].spare = nn.Linear(5, 5)
    model = wrapped(reference, rank, use_orig_params=use_orig_params)
    skips_a_block(model, rank.rank).backward()
    assert all(p.grad is None for p in model.blocks[1].parameters())
    if use_orig_params:
        assert model.blocks[0].spare.weight.grad is None
        values = {p.numel() for p in model.blocks[0].up.parameters() if p.grad is not None}
        assert values
    before = full_values(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    optimizer.step()
    after = full_values(model)
    for name in ("blocks.1.norm.weight", "blocks.1.down.weight"):
        assert_equal(after[name], before[name], name)
    if use_orig_params:  # without a gradient no weight decay
        assert_equal(after["blocks.0.spare.weight"], before["blocks.0.spare.weight"], "spare")
    assert (after["blocks.0.norm.weight"] != before["blocks.0.norm.weight"]).all()


@on_ranks(2)
@both_modes
def test_summon_between_forward_and_backward(rank: Rank, use_orig_params: bool) -> None:
    """Forward, full parameters, another forward, both backwards."""
    reference = build(Stack)
    model = wrapped(reference, rank, use_orig_params=use_orig_params)
    with torch.no_grad():
        model(batch(rank.rank, 5, 4, 6))
    values = full_values(model)
    assert_same_values(reference, model)
    train(model, rank, square_loss, 2)
    train_reference(reference, rank, square_loss, 2)
    assert any((values[name] != value).any() for name, value in full_values(model).items())
    assert_same_values(model, reference, **CLOSE)


@on_ranks(2)
@both_modes
def test_a_unit_alone_after_a_step_of_the_root(rank: Rank, use_orig_params: bool) -> None:
    """A block is run, and trained, on its own between steps of the whole model."""
    reference = build(Stack)
    model = wrapped(reference, rank, use_orig_params=use_orig_params)

    def block_only(module: nn.Module, number: int) -> torch.Tensor:
        return module.blocks[1](batch(number, 9, 4, 6)).square().mean()

    def losses(step: int) -> Any:
        return square_loss(step) if step % 2 == 0 else block_only

    ours = train(model, rank, losses, 5)
    assert_close(ours, train_reference(reference, rank, losses, 5), "losses", **CLOSE)
    assert_same_values(model, reference, **CLOSE)


@on_ranks(2)
def test_a_unit_alone_before_the_root(rank: Rank) -> None:
    """A block that runs before its root does not become a root for ever."""
    reference = build(Stack)
    model = wrapped(reference, rank)
    assert not model.blocks[0].check_is_root()
    x = batch(rank.rank, 0, 4, 6)
    assert_equal(model.blocks[0](x), reference.blocks[0](x), "output")
    assert_equal(train(model, rank, square_loss, 3), train(wrapped(reference, rank), rank, square_loss, 3), "losses")


class Tenfold(nn.Module):
    """One layer, ten times, every other time without gradients."""

    def __init__(self, alternate: bool) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.layers = nn.ModuleList([self.layer])
        self.alternate = alternate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for index in range(10):
            if self.alternate and index % 2:
                with torch.no_grad():
                    offset = self.layer(x)
                x = x + offset
            else:
                x = torch.tanh(self.layer(x))
        return self.last(x)


@on_ranks(2)
@both_modes
@pytest.mark.parametrize("prefetch", [*BackwardPrefetch, None], ids=str)
@pytest.mark.parametrize("forward_prefetch", [True])
@pytest.mark.parametrize("alternate", [False, True])
def test_ten_calls_of_one_layer(
    rank: Rank, alternate: bool, forward_prefetch: bool, prefetch: Any, use_orig_params: bool
) -> None:
    """A layer that a forward calls ten times, in turn with and without gradients, trains right."""
    reference = build(Tenfold, alternate)
    options = {"backward_prefetch": prefetch, "forward_prefetch": forward_prefetch}
    model = FullyShardedDataParallel(
        copy.deepcopy(reference),
        device_mesh=rank.mesh,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=use_orig_params,
        **options,
    )
    losses = train(model, rank, square_loss, 3)
    assert_close(losses, train_reference(reference, rank, square_loss, 3), "losses", **CLOSE)
    assert_same_values(model, reference, **CLOSE)


# -------------------------------------------------------------------- meshes, offload


@on_ranks(4)
@both_modes
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)], ids=str)
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_hybrid_trains_as_full_shard(rank: Rank, strategy: str, shape: tuple[int, int], use_orig_params: bool) -> None:
    """On any mesh, (n, 1) too, hybrid strategies give the losses of FULL_SHARD, also with accumulated microbatches."""
    model = build(Language)
    hybrid = wrapped(
        model,
        rank,
        sharding_strategy=ShardingStrategy[strategy],
        device_mesh=rank.make_mesh(*shape),
        use_orig_params=use_orig_params,
    )
    full = wrapped(model, rank, use_orig_params=use_orig_params)
    assert_close(train(hybrid, rank, token_loss, 4), train(full, rank, token_loss, 4), "losses", **CLOSE)
    for one in (hybrid, full):
        for micro in range(3):
            with one.no_sync() if micro < 2 else contextlib.nullcontext():
                token_loss(micro)(one, rank.rank).backward()
    assert_same_gradients(hybrid, full)
    assert_same_values(hybrid, full, **CLOSE)


@on_ranks(2)
@both_modes
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_offload_trains_as_without(rank: Rank, strategy: str, use_orig_params: bool) -> None:
    """With offloaded parameters, every bit is as without; gradients of several backwards are added up."""
    model = build(Stack)
    options = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": use_orig_params}
    ours = wrapped(model, rank, cpu_offload=CPUOffload(offload_params=True), **options)
    other = wrapped(model, rank, **options)
    assert_equal(train(ours, rank, square_loss, 3), train(other, rank, square_loss, 3), "losses")
    for one in (ours, other):
        for micro in range(3):
            square_loss(micro)(one, rank.rank).backward()
    assert_same_gradients(ours, other, rtol=0.0, atol=0.0)


# -------------------------------------------------------------------- between steps


@on_ranks(2)
@both_modes
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_evaluation_between_steps(rank: Rank, strategy: str, use_orig_params: bool) -> None:
    """Forwards in eval mode, under no_grad and in inference mode see the last step, agree, and change nothing."""
    reference = build(Stack)
    model = wrapped(reference, rank, sharding_strategy=ShardingStrategy[strategy], use_orig_params=use_orig_params)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=EXACT_RATE) for m in (model, reference))
    x = batch(7, 7, 4, 6)
    for step in range(4):
        square_loss(step)(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, square_loss(step))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            expected = reference(x)
            training = model(x)
            model.eval()
            evaluated = model(x)
        with torch.inference_mode():
            inferred = model(x).clone()
        with_graph = model(x)
        model.train()
        assert_close(training, expected, "no_grad", **CLOSE)
        for name, output in {"eval": evaluated, "inference": inferred, "graph": with_graph}.items():
            assert_equal(output.detach(), training, name)
    assert_same_values(model, reference, **CLOSE)


@on_ranks(2)
@both_modes
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_changed_parameters_are_seen(rank: Rank, strategy: str, use_orig_params: bool) -> None:
    """What is written to parameters in place, after wrapping and between steps, the next forward computes with."""
    reference = build(Stack)
    model = wrapped(reference, rank, sharding_strategy=ShardingStrategy[strategy], use_orig_params=use_orig_params)
    for step in range(3):
        with torch.no_grad():
            for parameter in (*model.parameters(), *reference.parameters()):
                parameter.mul_(1.25)
            output = model(batch(0, step, 4, 6))
            assert_close(output, reference(batch(0, step, 4, 6)), f"output {step}", **CLOSE)


@on_ranks(2)
@both_modes
def test_average_of_weights_by_hand(rank: Rank, use_orig_params: bool) -> None:
    """An exponential moving average on a second wrapped model, shard by shard, evaluates as an unsharded one."""
    reference = build(Stack)
    model, average = (wrapped(reference, rank, use_orig_params=use_orig_params) for _ in range(2))
    reference_average = copy.deepcopy(reference)
    for step in range(4):
        train(model, rank, lambda _, step=step: square_loss(step), 1)
        train_reference(reference, rank, lambda _, step=step: square_loss(step), 1)
        with torch.no_grad():
            for mean, source in ((average, model), (reference_average, reference)):
                for kept, new in zip(mean.parameters(), source.parameters(), strict=True):
                    kept.lerp_(new, 0.25)
            x = batch(0, step, 4, 6)
            assert_close(average(x), reference_average(x), f"output {step}", **CLOSE)
    assert_same_values(average, reference_average, **CLOSE)


@on_ranks(2)
@both_modes
def test_generating_with_held_parameters(rank: Rank, use_orig_params: bool) -> None:
    """A loop of forwards inside ``unsharded`` gathers once and gives the tokens of the unsharded model."""
    reference = build(Language)
    model = wrapped(reference, rank, use_orig_params=use_orig_params)
    train(model, rank, token_loss, 2)
    train_reference(reference, rank, token_loss, 2)

    @torch.no_grad()
    def generate(module: nn.Module) -> torch.Tensor:
        ids = torch.tensor([[1, 2 + rank.rank]])
        for _ in range(rank.rank * 3 + 4):  # ranks need not agree how long
            ids = torch.cat([ids, module(ids)[:, -1:].argmax(-1)], dim=1)
        return ids

    with unsharded(model):
        with record() as seen:
            ids = generate(model)
    assert seen == []
    assert_equal(ids, generate(reference), "tokens")
    assert_at_rest(model)
    assert_close(train(model, rank, token_loss, 2), train_reference(reference, rank, token_loss, 2), "losses", **CLOSE)
