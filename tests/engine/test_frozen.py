"""Frozen parameters: never reduced, mixed freely with trainable ones, and toggled at any time."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from compare import assert_models_equal
from fullshard import fully_shard
from fullshard.comm import Collective, record
from models import packed_numel, tiny_units, transport_of
from ranks import Rank, on_ranks

LAYERS, WIDTH = 4, 32


def build() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))


def shard(rank: Rank, model: nn.Sequential) -> nn.Sequential:
    for layer in model:
        fully_shard(layer, mesh=rank.mesh)
    return fully_shard(model, mesh=rank.mesh)


def batch_for(step: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> list[Collective]:
    """One step; the reductions in it."""
    optimizer.zero_grad()
    with record() as collectives:
        model(batch).square().mean().backward()
    optimizer.step()
    return [c for c in collectives if c.kind == "reduce_scatter"]


def own_rows(rank: Rank, batch: torch.Tensor) -> torch.Tensor:
    return batch.chunk(rank.world_size)[rank.rank]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2)


def message_numel(world_size: int, *pieces: int) -> int:
    """Elements of a packed message: all ranks' pieces, and one presence number per parameter."""
    return world_size * packed_numel(*pieces, len(pieces))


def none(model: nn.Sequential) -> list[nn.Parameter]:
    return []


def weights(model: nn.Sequential) -> list[nn.Parameter]:
    return [layer[0].weight for layer in model]


def first_layer(model: nn.Sequential) -> list[nn.Parameter]:
    return list(model[0].parameters())


def middle_layers(model: nn.Sequential) -> list[nn.Parameter]:
    return [*model[1].parameters(), *model[2].parameters()]


def last_layer(model: nn.Sequential) -> list[nn.Parameter]:
    return list(model[3].parameters())


def everything(model: nn.Sequential) -> list[nn.Parameter]:
    return list(model.parameters())


Choice = Callable[[nn.Sequential], list[nn.Parameter]]


def freeze(model: nn.Sequential, choice: Choice) -> None:
    """Freeze what is chosen and nothing else."""
    frozen = {id(p) for p in choice(model)}
    for p in model.parameters():
        p.requires_grad_(id(p) not in frozen)


@on_ranks(2, 4)
@pytest.mark.parametrize("early", [True, False], ids=["frozen before sharding", "frozen after sharding"])
def test_only_trainable_elements_are_reduced(rank: Rank, early: bool) -> None:
    """With frozen weights exactly the biases' elements are reduced, plus presence numbers and padding."""
    model = build()
    if early:
        freeze(model, weights)
    shard(rank, model)
    if not early:
        freeze(model, weights)
    reductions = step(model, sgd(model), batch_for(0))
    expected = message_numel(rank.world_size, -(-WIDTH // rank.world_size))
    assert [c.numel for c in reductions] == [expected] * LAYERS
    assert [c.unit for c in reductions] == ["3", "2", "1", "0"]


@on_ranks(2)
def test_large_frozen_weight_is_not_reduced(rank: Rank) -> None:
    """A weight that would travel directly does not travel at all while it is frozen, and does once it is not."""
    rows = transport_of(rank).direct_bytes // 4 // 256 * 2
    model = fully_shard(nn.Linear(256, rows), mesh=rank.mesh)
    model.weight.requires_grad_(False)
    x, optimizer = torch.ones(2, 256), sgd(model)
    assert [c.numel for c in step(model, optimizer, x)] == [message_numel(2, rows // 2)]
    model.weight.requires_grad_(True)
    # The presence numbers are of two parameters, of which one is in the message.
    assert [c.numel for c in step(model, optimizer, x)] == [rows * 256, 2 * packed_numel(rows // 2, 2)]


@on_ranks(2, 4)
def test_unit_that_is_all_frozen_is_not_reduced(rank: Rank) -> None:
    """Frozen units at the start have neither a backward nor a reduction; those in the middle have no reduction."""
    model = shard(rank, build())
    freeze(model, first_layer)
    assert [c.unit for c in step(model, sgd(model), batch_for(0))] == ["3", "2", "1"]
    freeze(model, middle_layers)
    assert [c.unit for c in step(model, sgd(model), batch_for(0))] == ["3", "0"]


@on_ranks(2)
def test_frozen_units_at_the_start_are_not_gathered_in_backward(rank: Rank) -> None:
    """Where neither the input nor a parameter requires a gradient, backward gathers nothing."""
    with tiny_units():
        model = shard(rank, build())
    freeze(model, first_layer)
    batch = batch_for(0)
    model(batch).sum().backward()
    output = model(batch)
    with record() as collectives:
        output.sum().backward()
    assert [c.unit for c in collectives if c.kind == "all_gather"] == ["2", "1"]  # the last was kept


@on_ranks(1, 2, 4)
@pytest.mark.parametrize(
    "choice", [none, weights, first_layer, middle_layers, last_layer], ids=lambda choice: choice.__name__
)
def test_trains_like_the_plain_module(rank: Rank, choice: Choice) -> None:
    """Whatever is frozen stays as it is, and the rest trains as in the plain module."""
    reference = build()
    model = copy.deepcopy(reference)
    freeze(model, choice)
    freeze(reference, choice)
    shard(rank, model)
    optimizers = sgd(model), sgd(reference)
    for index in range(3):
        step(model, optimizers[0], own_rows(rank, batch_for(index)))
        step(reference, optimizers[1], batch_for(index))
    assert_models_equal(model, reference, grads=True, rtol=2e-5, atol=1e-6)


@on_ranks(1, 2, 4)
@pytest.mark.parametrize(
    "choices",
    [
        (none, weights, none),
        (weights, none, first_layer, none),
        (first_layer, middle_layers, last_layer, weights, none, middle_layers),
    ],
    ids=["freeze mid-training", "toggle every step", "another choice every step"],
)
def test_toggling_between_steps_equals_the_plain_module(rank: Rank, choices: tuple[Choice, ...]) -> None:
    """Parameters may be frozen and unfrozen before any step; training equals the plain module's."""
    reference = build()
    model = shard(rank, copy.deepcopy(reference))
    optimizers = sgd(model), sgd(reference)
    for index, choice in enumerate(choices):
        freeze(model, choice)
        freeze(reference, choice)
        step(model, optimizers[0], own_rows(rank, batch_for(index)))
        step(reference, optimizers[1], batch_for(index))
        assert_models_equal(model, reference, grads=True, rtol=2e-5, atol=1e-6)


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("early", [True, False], ids=["frozen before sharding", "frozen after sharding"])
def test_all_frozen_first_and_unfrozen_later(rank: Rank, early: bool) -> None:
    """A model that is all frozen at its first forwards trains like the plain one once it is unfrozen."""
    reference = build()
    model = copy.deepcopy(reference)
    if early:
        freeze(model, everything)
    shard(rank, model)
    freeze(model, everything)
    x = batch_for(9).requires_grad_()
    model(x).sum().backward()  # the input's gradient runs through all units
    assert x.grad is not None and all(p.grad is None for p in model.parameters())
    assert not model(batch_for(9)).requires_grad
    freeze(model, none)
    optimizers = sgd(model), sgd(reference)
    for index in range(2):
        reductions = step(model, optimizers[0], own_rows(rank, batch_for(index)))
        step(reference, optimizers[1], batch_for(index))
        assert len(reductions) == (LAYERS if rank.world_size > 1 else 0)
    assert_models_equal(model, reference, grads=True, rtol=2e-5, atol=1e-6)


@on_ranks(2)
def test_frozen_parameter_called_several_times(rank: Rank) -> None:
    """A unit with frozen weights that is called twice in one forward trains its biases like the plain one."""
    reference = build()
    freeze(reference, weights)
    model = shard(rank, copy.deepcopy(reference))
    optimizers = sgd(model), sgd(reference)
    for index in range(2):
        for module, optimizer, batch in (
            (model, optimizers[0], own_rows(rank, batch_for(index))),
            (reference, optimizers[1], batch_for(index)),
        ):
            optimizer.zero_grad()
            module(module(batch)).square().mean().backward()
            optimizer.step()
    assert_models_equal(model, reference, grads=True, rtol=2e-5, atol=1e-6)


@on_ranks(2, 4)
def test_in_place_edit_of_a_frozen_parameter_is_seen(rank: Rank) -> None:
    """Changing a frozen sharded parameter under no_grad is seen by the next forward."""
    model = shard(rank, build())
    freeze(model, everything)
    model(batch_for(0))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert not model(batch_for(0)).any()
