"""Gradients that only some ranks have are reduced in the same order on all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from front_ends import (
    FrontEnd,
    assert_at_rest,
    assert_same_gradients,
    build,
    each_front_end,
    sharded_with_reference,
    unwrapped,
)
from models import batch, reference_backward
from ranks import Rank, on_ranks


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
    """A parameter before an inner unit has a gradient on rank 0 only, and the inner unit's input on rank 0 only.

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
