"""Hooks on parameters and modules, optimizers in backward, and gradients that users put or look at."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from compare import assert_close, assert_equal
from front_ends import (
    CLOSE,
    COMPOSABLE,
    FRONT_ENDS,
    STRATEGIES,
    FrontEnd,
    assert_at_rest,
    assert_same_gradients,
    assert_same_values,
    both_backward,
    build,
    each_front_end,
    full_gradients,
    local,
    sgd,
    sharded_with_reference,
    step_and_clear,
    unwrapped,
)
from fullshard.comm import GlooTransport
from models import Branch, Mlp, Stack, batch, reference_backward, square_loss
from pairwise import each_value
from ranks import Rank, on_ranks


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, strategy=STRATEGIES)
def test_hooks_on_sharded_parameters(rank: Rank, front_end: FrontEnd, strategy: str) -> None:
    """They see the reduced gradient of this rank's shard once per backward, and may replace it."""
    model, reference = sharded_with_reference(front_end, rank, build(Stack), strategy=strategy)
    seen: dict[str, torch.Tensor] = {}
    calls: Counter[str] = Counter()
    for name, parameter in model.named_parameters():

        def double(gradient: torch.Tensor, name: str = name) -> torch.Tensor:
            calls[f"hook {name}"] += 1
            seen[name] = gradient * 2
            return gradient * 2

        def after(parameter: torch.Tensor, name: str = name) -> None:
            calls[f"after {name}"] += 1
            assert_equal(local(parameter.grad), local(seen[name]), name)

        parameter.register_hook(double)
        parameter.register_post_accumulate_grad_hook(after)
    for _ in range(2):
        model.zero_grad()
        reference.zero_grad()
        both_backward(model, reference, rank, square_loss())
    named = [name for name, p in model.named_parameters() if local(p).numel()]
    assert all(calls[f"{when} {name}"] == 2 for when in ("hook", "after") for name in named)
    for parameter in reference.parameters():
        parameter.grad.mul_(2)
    assert_same_gradients(model, reference)
    for parameter in model.parameters():
        assert (parameter.grad.shape, parameter.grad.dtype) == (parameter.shape, parameter.dtype)
        assert local(parameter.grad).shape == local(parameter).shape
        assert not isinstance(parameter, DTensor) or parameter.grad.placements == parameter.placements


@on_ranks(2)
@each_front_end
def test_hooks_on_modules(rank: Rank, front_end: FrontEnd) -> None:
    """Forward and full backward hooks, on units and on what is inside, see what an unsharded module's see."""
    model, reference = sharded_with_reference(front_end, rank, build(Stack))
    ours: dict[str, torch.Tensor] = {}
    theirs: dict[str, torch.Tensor] = {}
    for module, seen in ((model, ours), (reference, theirs)):
        for name, inner in enumerate((module.blocks[0], unwrapped(module.blocks[1]).up, module.last)):
            inner.register_forward_hook(lambda _, args, out, to=seen, name=name: to.update({f"{name} output": out}))
            inner.register_full_backward_hook(
                lambda _, into, out, to=seen, name=name: to.update(
                    {f"{name} input": into[0], f"{name} gradient": out[0]}
                )
            )
        module(batch(rank.rank, 0, 4, 6)).square().mean().backward()
    assert set(ours) == set(theirs) and len(ours) == 9
    for name, value in theirs.items():
        assert_close(ours[name].detach(), value.detach(), name, **CLOSE)


@on_ranks(2)
@each_value(1, front_end=FRONT_ENDS, strategy=STRATEGIES)
def test_optimizer_in_backward(rank: Rank, front_end: FrontEnd, strategy: str) -> None:
    """Optimizers that step from hooks in backward train as one that steps after it, and keep no gradient."""
    model, reference = sharded_with_reference(front_end, rank, build(Stack), strategy=strategy)
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def step_now(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_now)
    theirs = sgd(reference, 0.1, momentum=0.9)
    for step in range(3):
        theirs.zero_grad()
        both_backward(model, reference, rank, square_loss(step))
        theirs.step()
        assert all(p.grad is None for p in model.parameters())
        assert_at_rest(model)
    assert_same_values(model, reference, **CLOSE)


# -------------------------------------------------------------------- gradients put by hand


class FusedWeightGradient(torch.autograd.Function):
    """Adds the gradient of a weight to its ``.grad`` itself; the weight is none of its inputs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: nn.Module) -> torch.Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        return x @ module.weight.detach().t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        weight = ctx.module.weight
        mine = gradient.t() @ x
        weight.grad = mine if weight.grad is None else weight.grad + mine
        return gradient @ weight.detach(), None


class Fused(nn.Linear):
    """A layer that computes the gradient of its weight itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return FusedWeightGradient.apply(x, self)


class Lookup(nn.Embedding):
    """An embedding whose gradients are sparse, and dense for the inputs of every other step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dense = x.shape[0] % 2 == 1
        return x @ self.weight.t() if dense else super().forward(torch.arange(3)) * x[:3].sum()


BY_HAND: dict[str, Callable[[], nn.Module]] = {
    "fused": lambda: Fused(4, 5, bias=False),
    "lookup": lambda: Lookup(5, 4, sparse=True),
}


@on_ranks(2)
@each_value(kind=BY_HAND, strategy=["FULL_SHARD", "NO_SHARD", "FULL_SHARD"], microbatches=[3, 3, 1])
def test_gradients_by_hand(rank: Rank, kind: str, strategy: str, microbatches: int) -> None:
    """What functions and hooks put into ``.grad`` of unsharded parameters is reduced, and added up."""
    plain = build(lambda: nn.Sequential(nn.Linear(4, 4), BY_HAND[kind]()))
    model, reference = sharded_with_reference(COMPOSABLE, rank, plain, ["1"], strategy=strategy)
    total: dict[str, Any] = defaultdict(int)
    for step in range(microbatches):
        model.set_requires_gradient_sync(step == microbatches - 1)
        model(batch(rank.rank, step, 4 + step, 4)).square().mean().backward()
        for number in range(rank.world_size):
            (reference(batch(number, step, 4 + step, 4)).square().mean() / rank.world_size).backward()
            for name, parameter in reference.named_parameters():
                total[name] += parameter.grad.to_dense()
                parameter.grad = None
    for name, gradient in full_gradients(model).items():
        assert_close(gradient, total[name], name, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_gradient_of_another_placement(rank: Rank) -> None:
    """A replicated gradient that the user has set is added to as DTensors are."""
    model, reference = sharded_with_reference(COMPOSABLE, rank, build(Mlp, 8, 8, 8), [])
    for part in (model, reference):
        ones = torch.ones(8, 8)
        part.layers[0].weight.grad = DTensor.from_local(ones, rank.mesh, [Replicate()]) if part is model else ones
    square_loss(0, 4, 8)(model, rank.rank).backward()
    reference_backward(reference, rank.world_size, square_loss(0, 4, 8))
    assert_same_gradients(model, reference)


# -------------------------------------------------------------------- complex gradients


@on_ranks(2)
@each_front_end
def test_complex_parameter_used_on_one_rank_only(rank: Rank, front_end: FrontEnd) -> None:
    """Complex parameters take part in a reduction although this rank has no gradient for them."""
    model, reference = sharded_with_reference(front_end, rank, build(Branch).to(torch.complex64), [])

    def loss_of(module: Any, number: int) -> torch.Tensor:
        unwrapped(module).rank = number
        return module(batch(number, 0, 3, 6).to(torch.complex64)).abs().sum()

    loss_of(model, rank.rank).backward()
    reference_backward(reference, rank.world_size, loss_of)
    assert_same_gradients(model, reference)


class Flipped(nn.Module):
    """``weight.conj()`` times the input, summed: the gradient of the weight is the lazy conjugate of a plain tensor."""

    def __init__(self, direct_rows: int) -> None:
        super().__init__()
        sizes = {"even": (direct_rows, 64), "uneven": (direct_rows + 1, 64), "small": (3, 2)}
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(size, dtype=torch.complex64)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        totals = [(weight.conj() * weight.shape[0] * x).sum() for weight in self.parameters()]
        return sum(total.abs().square() for total in totals)


@on_ranks(2)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_lazily_conjugated_gradients(rank: Rank, microbatches: int) -> None:
    """Complex parameters whose gradients are conjugated lazily train as without sharding.

    Collectives see complex numbers as pairs of real ones; such a gradient has to be resolved before it can be so seen.
    """
    rows = 4 * GlooTransport.direct_bytes // 8 // 64  # of those that have a message of their own
    model, reference = sharded_with_reference(COMPOSABLE, rank, build(Flipped, rows), [])

    def loss_at(step: int) -> Any:
        return lambda module, number: module(torch.complex(*batch(number, step, 2)) / 1e5).real

    loss_at(0)(reference, 0).backward()
    assert all(p.grad.is_conj() and p.grad.imag.abs().max() > 0 for p in reference.parameters())
    reference.zero_grad()
    optimizers = [sgd(one, 0.5) for one in (model, reference)]
    for step in range(2):
        for microbatch in range(microbatches):
            model.set_requires_gradient_sync(microbatch == microbatches - 1)
            both_backward(model, reference, rank, loss_at(10 * step + microbatch))
        assert_same_gradients(model, reference)
        step_and_clear(*optimizers)


# -------------------------------------------------------------------- [Note: Who owns a gradient]


class Position(nn.Module):
    """Adds a view of its weight: autograd hands out the memory of the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16 * 1024))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x + self.weight.view(16, 1024))


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_memory_that_users_write_to(rank: Rank, strategy: str) -> None:
    """The gradient of an input shares its memory with that of a parameter; writing to either changes only its own."""
    model: Any = build(Position)
    before = model.weight.detach().clone().view(16, 1024)
    COMPOSABLE.wrap(model, rank, [], strategy=strategy)
    expected = torch.zeros_like(before)
    x = batch(rank.rank, 0, 16, 1024).requires_grad_()
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        model(x).sum().backward()
        x.grad.zero_()
    for number in range(2):
        expected += 3 * (1 - torch.tanh(batch(number, 0, 16, 1024) + before).square()) / 2
    assert_close(model.weight.grad.full_tensor(), expected.view(-1), "gradient", rtol=1e-5, atol=1e-6)
    model.zero_grad()
    model(x).sum().backward()
    kept = x.grad.clone()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    model.zero_grad(set_to_none=False)
    assert_equal(x.grad, kept, "gradient of the input")


# -------------------------------------------------------------------- gradients that only some ranks have


class LossAside(nn.Module):
    """Keeps the output of its inner layer, which alone is in the loss, and returns something else."""

    inner_output: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, detached: bool) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        self.inner_output = self.inner(hidden.detach() if detached else hidden)
        return hidden


@on_ranks(2)
@each_front_end
def test_gradient_around_an_inner_unit_on_one_rank(rank: Rank, front_end: FrontEnd) -> None:
    """Ranks reduce in the same order, although the inner unit's input has a gradient on rank 0 only.

    Rank 0 reduces the inner unit when autograd comes to its input, rank 1 when backward ends.
    """
    model, reference = sharded_with_reference(front_end, rank, build(LossAside), ["inner"])

    def loss_of(module: Any, number: int) -> torch.Tensor:
        module(batch(number, 0, 4, 6), number == 1)
        return unwrapped(module).inner_output.square().mean()

    for _ in range(2):
        loss_of(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, loss_of)
        assert_same_gradients(model, reference)
        assert_at_rest(model)
