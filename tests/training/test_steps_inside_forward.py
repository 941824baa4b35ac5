"""Backward and the optimizer's step inside of a module's own forward. See [Note: Steps inside a forward]."""

from __future__ import annotations

import torch
from torch import nn

from compare import assert_close
from front_ends import (
    COMPOSABLE,
    FRONT_ENDS,
    STRATEGIES,
    FrontEnd,
    assert_same_gradients,
    assert_same_values,
    assert_trains_alike,
    build,
    each_front_end,
    full_gradients,
    sgd,
    sharded_with_reference,
)
from models import batch, reference_backward
from pairwise import each_value, pairwise
from ranks import Rank, on_ranks


class Trainer(nn.Module):
    """A forward that is one or several training steps, if it is given an optimizer."""

    optimizer: torch.optim.Optimizer | None = None
    steps = 1

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 7), nn.Linear(7, 7), nn.Linear(7, 3)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x))))).square().mean()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.optimizer is None:
            return self.loss(x)[None]
        losses = []
        for _ in range(self.steps):
            loss = self.loss(x)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.detach())
        return torch.stack(losses)


@on_ranks(2)
@pairwise(front_end=FRONT_ENDS, units=[["middle"], []], steps=[1, 2])
def test_whole_steps_inside_a_forward(rank: Rank, front_end: FrontEnd, units: list[str], steps: int) -> None:
    """All parameters are trained, those of the unit whose forward is open as well; then steps outside are right.

    Of several steps the second computes with what the first has made. A module that is one unit is trained, although
    no output of a unit tells of the backward.
    """
    trainer = build(Trainer)
    model, reference = sharded_with_reference(front_end, rank, trainer, units)
    optimizer, theirs = (sgd(each, 0.1) for each in (model, reference))
    trainer.steps = steps
    for call in range(4):
        trainer.optimizer = optimizer if call < 2 else None
        found = model(batch(rank.rank, call, 4, 6))
        if trainer.optimizer is None:
            found.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        for index, loss in enumerate(found.detach()):
            expected = reference_backward(reference, 2, lambda m, r, call=call: m.loss(batch(r, call, 4, 6)))
            assert_close(loss, expected[rank.rank], f"loss {call}, {index}", rtol=1e-5)
            theirs.step()
            theirs.zero_grad()
    assert_same_values(model, reference, rtol=1e-4, atol=1e-6)


class Uneven(Trainer):
    """A layer that only the first rank uses."""

    uneven = False

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(3, 3)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().loss(x)
        return loss + self.extra(torch.ones(3)).square().mean() if self.uneven else loss


@on_ranks(2)
@each_front_end
def test_ranks_that_use_other_parameters_inside(rank: Rank, front_end: FrontEnd) -> None:
    """What is reduced does not depend on which gradients a rank has."""
    trainer = build(Uneven)
    model = front_end.wrap(trainer, rank, ["middle"])
    trainer.uneven = rank.rank == 0
    trainer.optimizer = sgd(model, 0.1)
    for step in range(2):
        model(batch(rank.rank, step, 4, 6))
    trainer.optimizer, trainer.uneven = None, True
    model(batch(rank.rank, 0, 4, 6)).sum().backward()
    assert full_gradients(model)["extra.weight"] is not None


class Apart(nn.Module):
    """A backward inside the forward that no nested unit takes part in."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.head(self.inner(x).detach()).sum().backward()
        return x


@on_ranks(2)
@each_front_end
def test_a_backward_that_no_nested_unit_takes_part_in(rank: Rank, front_end: FrontEnd) -> None:
    """Its gradients are averaged, and those of the next forward are added to them."""
    model = front_end.wrap(build(Apart), rank, ["inner"])
    for step in range(1, 3):
        model(torch.full((2, 4), float(1 + rank.rank)))
        found = full_gradients(model)
        assert found["inner.weight"] is None
        assert_close(found["head.bias"], torch.tensor([2.0 * step]), "gradient of bias", rtol=1e-6)


class Forces(nn.Module):
    """Takes gradients by its input inside its own forward, as physics models do."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 5), nn.Linear(5, 6)])
        self.head, self.trained = nn.Linear(6, 3), trained

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        energy = self.blocks[1](torch.tanh(self.blocks[0](x))).tanh().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=self.trained)
        return self.head(force)


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, strategy=STRATEGIES, trained=[True, False])
def test_gradients_of_inputs_inside_a_forward(rank: Rank, front_end: FrontEnd, strategy: str, trained: bool) -> None:
    """Forces are no steps: they leave the root able to go on, whether they are trained through or not."""
    model, reference = sharded_with_reference(front_end, rank, build(Forces, trained), strategy=strategy)
    assert_trains_alike(model, reference, rank)


@on_ranks(2)
def test_accumulating_inside_a_forward(rank: Rank) -> None:
    """Backwards inside with and without synchronization add up with one outside."""
    trainer = build(Trainer)
    model, reference = sharded_with_reference(COMPOSABLE, rank, trainer, ["middle"])
    trainer.optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)  # of other parameters
    model(batch(rank.rank, 0, 4, 6))
    trainer.optimizer = None
    model(batch(rank.rank, 1, 4, 6)).sum().backward()
    for step in range(2):
        reference_backward(reference, 2, lambda m, r, step=step: m.loss(batch(r, step, 4, 6)))
    assert_same_gradients(model, reference)
