"""Backward and the optimizer's step inside of a module's own forward. See [Note: Steps inside a forward]."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from compare import assert_close
from fullshard import FullshardError, fully_shard
from fullshard import FullyShardedDataParallel as FSDP
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
    """An error on all ranks instead of training nothing; steps outside of forward go on afterwards."""
    model, trainer = sharded(form, nested=False)
    trainer.optimizer = optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(FullshardError, match="backward ran inside of the forward of a module that is one unit"):
        model(inputs(rank.rank, 0))
    trainer.optimizer = None
    for step, expected in enumerate(expected_losses(2)):
        loss = model(inputs(rank.rank, step))
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
