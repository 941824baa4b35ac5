"""Backward and the optimizer's step inside of a module's own forward. See [Note: Steps inside a forward]."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from compare import assert_close
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import fully_shard
from ranks import Rank, on_ranks

FORMS = ["composed", "original", "flat"]


class Trainer(nn.Module):
    """A forward that is a training step, if it is given an optimizer."""

    optimizer: torch.optim.Optimizer | None = None
    forces: bool = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(6, 7), nn.Linear(7, 7), nn.Linear(7, 3)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x))))).square().mean()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.forces:
            x = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.loss(x), x, create_graph=True)
            return force.square().mean()
        loss = self.loss(x)
        if self.optimizer is None:
            return loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def inputs(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def expected_losses(ranks: int, forces: bool = False) -> list[list[float]]:
    reference = Trainer()
    reference.forces = forces
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    found: list[list[float]] = []
    for step in range(3):
        losses = [reference(inputs(rank, step)) for rank in range(ranks)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append([loss.item() for loss in losses])
    return found


def sharded(form: str, *, nested: bool = True) -> tuple[Any, Trainer]:
    model = Trainer()
    if form == "composed":
        if nested:
            fully_shard(model.middle)
        return fully_shard(model), model
    if nested:
        model.middle = FSDP(model.middle, use_orig_params=form == "original")
    return FSDP(model, use_orig_params=form == "original"), model


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_a_whole_step_inside_a_forward(rank: Rank, form: str):
    """All parameters are trained, those of the unit whose forward is open as well; then steps outside are right."""
    model, trainer = sharded(form)
    trainer.optimizer = optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = expected_losses(2)
    losses = [model(inputs(rank.rank, step)).item() for step in range(2)]
    trainer.optimizer = None
    losses.append(model(inputs(rank.rank, 2)).item())
    model(inputs(rank.rank, 0)).backward()
    optimizer.step()
    for step, loss in enumerate(losses):
        assert_close(torch.tensor(loss), torch.tensor(expected[step][rank.rank]), f"step {step}", rtol=1e-6)


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_a_module_that_is_one_unit(rank: Rank, form: str):
    """It is trained, although no output of a unit tells of the backward; steps outside of forward go on afterwards."""
    model, trainer = sharded(form, nested=False)
    trainer.optimizer = optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, expected in enumerate(expected_losses(2)):
        trainer.optimizer = optimizer if step == 0 else None
        loss = model(inputs(rank.rank, step))
        if step:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_close(loss.detach(), torch.tensor(expected[rank.rank]), f"step {step}", rtol=1e-6)


@on_ranks(2)
def test_gradients_of_inputs_are_no_steps(rank: Rank):
    """Forces, taken inside of the forward and trained through."""
    model, trainer = sharded("composed")
    trainer.forces = True
    model.set_reshard_after_backward(False)  # second derivatives need them
    model.set_reshard_after_forward(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, expected in enumerate(expected_losses(2, forces=True)):
        loss = model(inputs(rank.rank, step))
        assert_close(loss.detach(), torch.tensor(expected[rank.rank]), f"step {step}", rtol=1e-5)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


class Twice(Trainer):
    """Two steps in one forward; and a layer that only the first rank uses."""

    uneven: bool = False

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        losses = []
        for _ in range(2):
            loss = self.loss(x)
            if self.uneven:
                loss = loss + self.extra(torch.ones(3)).square().mean()
            loss.backward()
            if self.optimizer is not None:
                self.optimizer.step()
                self.optimizer.zero_grad()
            losses.append(loss.detach())
        return torch.stack(losses)


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_several_steps_inside_a_forward(rank: Rank, form: str):
    """The second computes with what the first has made, also in the unit whose forward is open."""
    model: Any = Twice()
    inner = model
    if form == "composed":
        fully_shard(model.middle)
        fully_shard(model)
    else:
        model.middle = FSDP(model.middle, use_orig_params=form == "original")
        model = FSDP(model, use_orig_params=form == "original")
    inner.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = Twice()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(2):
        found = model(inputs(rank.rank, step))
        for part in range(2):
            losses = [reference.loss(inputs(each, step)) for each in range(2)]
            assert_close(found[part], losses[rank.rank].detach(), f"step {step}, {part}", rtol=1e-5)
            torch.stack(losses).mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
def test_ranks_that_use_other_parameters_inside(rank: Rank):
    """What is reduced does not depend on which gradients a rank has."""
    model = Twice()
    fully_shard(model.middle)
    fully_shard(model)
    model.uneven = rank.rank == 0
    model.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(inputs(rank.rank, step))
    model.optimizer = None
    model.uneven = True
    model(inputs(rank.rank, 0))
    assert model.extra.weight.grad is not None


class Apart(nn.Module):
    """A backward inside the forward that no nested unit takes part in."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.head(self.inner(x).detach()).sum().backward()
        return x


@on_ranks(2)
def test_a_backward_that_no_nested_unit_takes_part_in(rank: Rank):
    """Its gradients are averaged, and those of the next forward are added to them."""
    model = Apart()
    fully_shard(model.inner)
    fully_shard(model)
    for step in range(1, 3):
        model(torch.full((2, 4), float(1 + rank.rank)))
        assert model.inner.weight.grad is None
        assert_close(model.head.bias.grad.full_tensor(), torch.tensor([2.0 * step]), "gradient of bias", rtol=1e-6)
