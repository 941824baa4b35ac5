"""Frozen parameters: never reduced, mixed freely with trainable ones, and toggled between any two steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from compare import assert_close, assert_equal
from front_ends import (
    COMPOSABLE,
    FLAT,
    FRONT_ENDS,
    ORIGINAL,
    STRATEGIES,
    FrontEnd,
    adam,
    assert_at_rest,
    assert_same_gradients,
    assert_same_values,
    assert_trains_alike,
    both_backward,
    build,
    each_front_end,
    full_values,
    gathered,
    sharded_with_reference,
    unwrapped,
)
from fullshard import FlatParameter
from fullshard.comm import Collective, record
from models import Frozen, Stack, batch, packed_numel, reference_backward, square_loss, tiny_units, tokens
from pairwise import each_value
from ranks import Rank, on_ranks

LAYERS, WIDTH = 4, 32


def layers() -> nn.Sequential:
    return build(lambda: nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))))


Choice = Callable[[Any], list[nn.Parameter]]


def nothing(model: Any) -> list[nn.Parameter]:
    return []


def weights(model: Any) -> list[nn.Parameter]:
    return [layer[0].weight for layer in model]


def first_layer(model: Any) -> list[nn.Parameter]:
    return list(model[0].parameters())


def middle_layers(model: Any) -> list[nn.Parameter]:
    return [*model[1].parameters(), *model[2].parameters()]


def last_layer(model: Any) -> list[nn.Parameter]:
    return list(model[3].parameters())


def everything(model: Any) -> list[nn.Parameter]:
    return list(model.parameters())


def freeze(model: Any, choice: Choice) -> None:
    """Freeze what is chosen and nothing else."""
    frozen = {id(p) for p in choice(model)}
    for p in model.parameters():
        p.requires_grad_(id(p) not in frozen)


def layer_loss(step: int) -> Any:
    return square_loss(step, 8, WIDTH)


def reductions(model: Any, rank: Rank, step: int = 0) -> list[Collective]:
    """Of one backward."""
    with record() as seen:
        layer_loss(step)(model, rank.rank).backward()
    return [c for c in seen if c.kind == "reduce_scatter"]


def message_numel(world_size: int, *pieces: int) -> int:
    """Elements of a packed message: all ranks' pieces, and one presence number per parameter."""
    return world_size * packed_numel(*pieces, len(pieces))


# -------------------------------------------------------------------- training


@on_ranks(2)
@pytest.mark.parametrize("front_end", [COMPOSABLE, ORIGINAL], ids=str)
@pytest.mark.parametrize(
    "choices",
    [
        (first_layer, middle_layers, last_layer, weights, nothing, middle_layers),
        (everything, last_layer, weights, everything, nothing),
    ],
    ids=["another choice every step", "everything first"],
)
def test_toggling_between_steps(rank: Rank, choices: tuple[Choice, ...], front_end: FrontEnd) -> None:
    """Parameters may be frozen and unfrozen before any step; the optimizer leaves frozen ones alone."""
    model, reference = sharded_with_reference(front_end, rank, layers())
    optimizers = adam(model.parameters()), adam(reference.parameters())
    for step, choice in enumerate(choices):
        for module in (model, reference):
            module.zero_grad()
            freeze(module, choice)
        loss = layer_loss(step)(model, rank.rank)
        assert loss.requires_grad == (choice is not everything)
        if loss.requires_grad:
            loss.backward()
        reference_backward(reference, rank.world_size, layer_loss(step))
        assert_same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
    assert_same_values(model, reference, rtol=1e-4, atol=1e-6)


@on_ranks(2)
def test_toggling_flat_parameters(rank: Rank) -> None:
    """Visible flat parameters can be frozen and unfrozen as a whole."""
    model, reference = sharded_with_reference(FLAT, rank, build(Stack, 2))
    optimizers = adam(model.parameters()), adam(reference.parameters())
    for step, frozen in enumerate([False, True, True, False]):
        for module in (unwrapped(model), reference):
            module.blocks[0].requires_grad_(not frozen)
        both_backward(model, reference, rank, square_loss(step))
        assert_same_gradients(model, reference)
        flat = unwrapped(model.blocks[0])._flat_param
        assert isinstance(flat, FlatParameter) and (flat.grad is None) == frozen
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_values(model, reference, rtol=1e-4, atol=1e-6)


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, early=[True, False])
def test_everything_frozen_first(rank: Rank, early: bool, front_end: FrontEnd) -> None:
    """While all is frozen inputs get their gradients and nothing is reduced; then it trains like the plain one."""
    plain = layers()
    plain.requires_grad_(not early)
    model, reference = sharded_with_reference(front_end, rank, plain)
    model.requires_grad_(False)
    x = batch(0, 9, 8, WIDTH).requires_grad_()
    with record() as seen:
        model(x).sum().backward()  # the input's gradient runs through all units
    expected = torch.autograd.grad(reference(x).sum(), x)[0]
    assert_close(x.grad, expected, "gradient of the input", rtol=1e-5, atol=1e-6)
    assert "reduce_scatter" not in {c.kind for c in seen} and all(p.grad is None for p in model.parameters())
    assert not model(batch(0, 9, 8, WIDTH)).requires_grad
    assert_at_rest(model)
    for module in (model, reference):
        module.requires_grad_(True)
    assert len({c.unit for c in reductions(model, rank)}) == LAYERS
    model.zero_grad()
    assert_trains_alike(model, reference, rank, layer_loss)


class Tables(nn.Module):
    """Tables of all dtypes, as quantized weights have, beside a layer that trains."""

    kinds = "int8 uint8 int16 bool uint16 uint32 float8_e4m3fn float16 complex128"

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        dtypes = [getattr(torch, kind) for kind in self.kinds.split()]
        self.tables = nn.ParameterList(
            nn.Parameter((3 * torch.rand(5, 3)).to(dtype), requires_grad=False) for dtype in dtypes
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        for table in self.tables:
            x = x + torch.view_as_real(table.to(torch.complex64)).sum(dim=(0, 2))
        return x


@on_ranks(3)
@each_front_end
def test_frozen_tables_of_any_dtype(rank: Rank, front_end: FrontEnd) -> None:
    """Whatever the dtypes of frozen parameters, they arrive as they are, beside one that trains."""
    model, reference = sharded_with_reference(front_end, rank, build(Tables), [])
    for name, value in full_values(model).items():
        expected = reference.get_parameter(name).detach()
        assert_equal(value.contiguous().view(torch.uint8), expected.view(torch.uint8), name)
    both_backward(model, reference, rank, square_loss())
    assert_same_gradients(model, reference)


# -------------------------------------------------------------------- what is sent


@on_ranks(2)
@pytest.mark.parametrize(("front_end", "early"), [(COMPOSABLE, False), (ORIGINAL, True), (FLAT, True)], ids=str)
def test_only_trainable_elements_are_reduced(rank: Rank, early: bool, front_end: FrontEnd) -> None:
    """With frozen weights exactly the biases' elements are reduced, plus presence numbers and padding."""
    plain = layers()
    if early:
        freeze(plain, weights)
    model = front_end.wrap(plain, rank)
    if not early:
        freeze(model, weights)
    seen = reductions(model, rank)
    assert list(dict.fromkeys(c.unit for c in seen)) == ["3", "2", "1", "0"]
    if front_end.composable:
        assert [c.numel for c in seen] == [message_numel(rank.world_size, -(-WIDTH // rank.world_size))] * LAYERS
    else:
        assert LAYERS * WIDTH <= sum(c.numel for c in seen) <= LAYERS * (WIDTH + 8 * rank.world_size)


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, strategy=STRATEGIES)
def test_units_that_are_all_frozen(rank: Rank, front_end: FrontEnd, strategy: str) -> None:
    """They are not reduced, freed in backward, and at the start of the model not gathered in backward at all."""
    plain = build(Frozen, 4)
    plain.blocks[0].requires_grad_(False)
    with tiny_units():
        model, reference = sharded_with_reference(front_end, rank, plain, strategy=strategy)
    for step in range(2):
        loss = square_loss(step)(model, rank.rank)
        with record() as seen:
            loss.backward()
        assert gathered(model) == []
        sent = {c.unit for c in seen if c.kind != "all_gather"}
        assert sent == {"", "blocks.2", "blocks.3"}
        if strategy == "FULL_SHARD":  # the last block was kept
            assert [c.unit for c in seen if c.kind == "all_gather"] == ["blocks.2"]
        reference_backward(reference, rank.world_size, square_loss(step))
    assert_same_gradients(model, reference)


class BothEnds(nn.Module):
    """Two parts that are called one at a time: ids to vectors, and vectors to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(13, 6), nn.Linear(6, 13)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) if x.is_floating_point() else self.embedding(x)


class Sandwich(nn.Module):
    """Both ends around a layer, in whose backward the head is frozen if ``freezes``."""

    def __init__(self) -> None:
        super().__init__()
        self.ends, self.middle, self.freezes = BothEnds(), nn.Linear(6, 6), False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.middle(self.ends(ids))
        x.register_hook(lambda _: self.ends.head.requires_grad_(not self.freezes) and None)
        return self.ends(x)


@on_ranks(2)
def test_freezing_between_the_parts_of_an_open_ended_backward(rank: Rank) -> None:
    """A gradient of the first part of a unit's backward is reduced although its parameter is frozen before the end.

    The ids tell no end, so the unit rests after the head's part, holding its gradient, until backward is over.
    Were the head not noted then, it would not take part in the reduction and have no gradient, or one too late.
    """

    model, reference = sharded_with_reference(COMPOSABLE, rank, build(Sandwich), ["ends", "middle"])
    for step, freezes in enumerate((False, True, False)):
        model.freezes = freezes
        both_backward(
            model, reference, rank, lambda m, number, step=step: m(tokens(number, step, 4, 5)).square().mean()
        )
        assert model.ends.head.weight.requires_grad != freezes
        assert_same_gradients(model, reference)
        model.ends.head.requires_grad_(True)
        model.zero_grad()
        reference.zero_grad()
