"""Parameters that are frozen, at any time, or ignored: neither is reduced; ignored ones are left to their owner."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from compare import assert_close, assert_equal
from front_ends import (
    CLOSE,
    COMPOSABLE,
    FLAT,
    FRONT_ENDS,
    ORIGINAL,
    STRATEGIES,
    FrontEnd,
    adam,
    assert_same_gradients,
    assert_same_values,
    assert_trains_alike,
    both_backward,
    build,
    each_front_end,
    gathered,
    sharded_with_reference,
    token_loss,
    unwrapped,
)
from fullshard import fully_shard
from fullshard.comm import Collective, record
from fullshard.engine.ownership import unit_of
from models import Frozen, Language, Stack, batch, packed_numel, reference_backward, square_loss, tiny_units, tokens
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
    for module in (model, reference):
        module.requires_grad_(True)
    assert len({c.unit for c in reductions(model, rank)}) == LAYERS
    model.zero_grad()
    assert_trains_alike(model, reference, rank, layer_loss)


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
        assert not [c for c in seen if c.kind == "all_gather"]  # the last two blocks were kept
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


# -------------------------------------------------------------------- ignored parameters


def biases(model: Any) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 1]


def a_block(model: Any) -> list[nn.Parameter]:
    return list(model.blocks[1].parameters())


def of_the_root(model: Any) -> list[nn.Parameter]:
    return [*model.first.parameters(), model.last.bias]


def average(parameters: Iterable[nn.Parameter], rank: Rank) -> None:
    """What the owner of ignored parameters has to do."""
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= rank.world_size


def ignoring(front_end: FrontEnd, rank: Rank, choose: Choice, **options: Any) -> tuple[Any, Any, list[nn.Parameter]]:
    """A model, its reference, and what was ignored."""
    plain = build(Stack)
    ignored = choose(plain)
    model, reference = sharded_with_reference(front_end, rank, plain, **front_end.ignoring(ignored), **options)
    return model, reference, ignored


@on_ranks(2)
@each_value(
    front_end=FRONT_ENDS,
    choose=[biases, a_block, of_the_root, everything],
    strategy=["FULL_SHARD", "SHARD_GRAD_OP"],
)
def test_ignored_parameters(rank: Rank, front_end: FrontEnd, choose: Choice, strategy: str) -> None:
    """They stay the same plain objects with this rank's gradients; averaged by hand, the whole model trains right.

    Microbatches without synchronization add up in their ``.grad`` as autograd leaves them.
    """
    model, reference, ignored = ignoring(front_end, rank, choose, strategy=strategy)
    held = {id(p): p.detach().clone() for p in ignored}
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.02, eps=1e-4, foreach=False) for m in (model, reference)]
    for step in range(3):
        with front_end.no_sync(model):
            square_loss(10 + step)(model, rank.rank).backward()
        square_loss(step)(model, rank.rank).backward()
        average(ignored, rank)
        for each in (10 + step, step):
            reference_backward(reference, rank.world_size, square_loss(each))
        assert_same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_values(model, reference, **CLOSE)
    present = {id(p): p for p in model.parameters()}
    assert all(type(present[each]) is nn.Parameter and present[each].shape == held[each].shape for each in held)
    if front_end.composable:
        assert all(isinstance(p, DTensor) == (key not in held) for key, p in present.items())
    state = model.state_dict()
    assert list(state) == list(reference.state_dict())


@on_ranks(2)
@each_front_end
def test_own_gradients_of_ignored_parameters(rank: Rank, front_end: FrontEnd) -> None:
    """They get this rank's own gradient, and are never sent."""
    model, reference, ignored = ignoring(front_end, rank, a_block)
    with record() as seen:
        square_loss()(model, rank.rank).backward()
    assert "blocks.1" not in {c.unit for c in seen} and {c.kind for c in seen} == {"all_gather", "reduce_scatter"}
    square_loss()(reference, rank.rank).backward()
    for ours, theirs in zip(ignored, reference.blocks[1].parameters(), strict=True):
        assert_equal(ours.grad, theirs.grad, "gradient of this rank")
    assert model.state_dict()["blocks.1.up.weight"].data_ptr() == ignored[0].data_ptr()


class Scaled(nn.Linear):
    """A layer with a float64 scale and an integer table; notes the dtypes of all three."""

    def __init__(self) -> None:
        super().__init__(4, 4, bias=False)
        self.scale = nn.Parameter(torch.full((4,), 0.5, dtype=torch.float64))
        self.table = nn.Parameter(torch.arange(4), requires_grad=False)
        self.kinds: list[tuple[torch.dtype, ...]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kinds.append((self.weight.dtype, self.scale.dtype, self.table.dtype))
        return super().forward(x).double() * self.scale * self.table


@on_ranks(2)
@each_front_end
def test_ignored_parameters_keep_their_dtype(rank: Rank, front_end: FrontEnd) -> None:
    """A precision policy does not cast them; frozen, integer and float64 ones are as good as others."""
    plain = build(Scaled)
    scale, table = plain.scale, plain.table
    options = {**front_end.precision(torch.bfloat16, torch.float32), **front_end.ignoring([scale, table])}
    model = front_end.wrap(plain, rank, [], **options)
    model(batch(rank.rank, 0, 2, 4)).sum().backward()
    assert plain.kinds == [(torch.bfloat16, torch.float64, torch.int64)]
    assert plain.scale is scale and plain.table is table
    assert scale.grad.dtype is torch.float64 and table.grad is None
    assert {p.grad.dtype for p in model.parameters() if p is not scale and p is not table} == {torch.float32}


@on_ranks(2)
@each_front_end
def test_ignoring_a_tied_parameter(rank: Rank, front_end: FrontEnd) -> None:
    """Ignoring a tied parameter ignores it under all its names."""
    plain = build(Language)
    tied = plain.head.weight
    model, reference = sharded_with_reference(front_end, rank, plain, ["head"], **front_end.ignoring([tied]))
    assert plain.embedding.weight is tied and tied.shape == (13, 6)
    token_loss()(model, rank.rank).backward()
    average([tied], rank)
    reference_backward(reference, 2, token_loss())
    assert_same_gradients(model, reference)


@on_ranks(2)
@each_front_end
def test_ignored_parameters_are_replaced_and_edited(rank: Rank, front_end: FrontEnd) -> None:
    """They may be written to, replaced and frozen by their owner at any time."""
    model, reference, _ = ignoring(front_end, rank, a_block)
    square_loss()(model, rank.rank).backward()
    blocks = [unwrapped(each.blocks[1]) for each in (model, reference)]
    for block in blocks:
        block.up.weight = nn.Parameter(torch.full_like(block.up.weight, 0.1))
        block.down.requires_grad_(False)
    for each in (model, reference):
        each.zero_grad()
    square_loss(1)(model, rank.rank).backward()
    average(blocks[0].up.parameters(), rank)
    reference_backward(reference, 2, square_loss(1))
    assert blocks[0].down.weight.grad is None
    assert_same_gradients(model, reference)


@on_ranks(2)
def test_one_call_alone_ignores(rank: Rank) -> None:
    """A unit above need not repeat it; a lazy parameter may be ignored, and gets its shape in the first forward."""
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 4)), nn.LazyLinear(3))
    fully_shard(model[0], mesh=rank.mesh, ignored_params=model[0].parameters())
    fully_shard(model, mesh=rank.mesh, ignored_params=model[1].parameters())
    assert type(model[0][0].bias) is nn.Parameter and unit_of(model).parameters == []
    assert model(torch.ones(2, 6)).shape == (2, 3)
    assert model[1].weight.shape == (3, 4) and not isinstance(model[1].weight, DTensor)
