"""The origin of a value that is not finite: module or parameter, rank, step, microbatch and phase."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from front_ends import FrontEnd, each_front_end
from fullshard import NonFiniteError, fully_shard
from fullshard.debug import find_nonfinite
from ranks import Rank, on_ranks

WIDTH = 8


class Times(torch.autograd.Function):
    """Identity, whose gradient is that of what follows if ``factor`` is 1, and else full of ``factor``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient if ctx.factor == 1 else torch.full_like(gradient, ctx.factor), None


class Block(nn.Module):
    """A layer whose output is multiplied by a number; its gradient, and that of its weight, are replaced by others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.output = self.gradient = self.weight_gradient = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = Times.apply(self.linear.weight, self.weight_gradient)
        x = torch.tanh(nn.functional.linear(x, weight, self.linear.bias)) * self.output
        return Times.apply(x, self.gradient)


class Net(nn.Module):
    """Three blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def sharded(rank: Rank, front_end: FrontEnd, **options: Any) -> tuple[Any, list[Any], torch.optim.Optimizer]:
    """A model, its blocks, and an optimizer."""
    net = Net().to(rank.device)
    blocks = list(net.blocks)
    model = front_end.wrap(net, rank, [f"blocks.{index}" for index in range(3)], **options)
    return model, blocks, torch.optim.SGD(model.parameters(), lr=0.01)


def step(rank: Rank, model: Any, optimizer: torch.optim.Optimizer, x: float = 1.0) -> None:
    """Two microbatches and a step."""
    for microbatch in range(2):
        model(torch.full((2, WIDTH), x + microbatch + rank.rank, device=rank.device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


CASES = {
    "output": ({"output": math.nan}, "forward: the output of 'blocks.1' has 16 NaN of 16 values", "blocks.1"),
    "gradient": (
        {"gradient": math.inf},
        "backward: the gradient of 'blocks.1.linear.bias', before",
        "blocks.1.linear.bias",
    ),
    "gradient of a parameter": (
        {"weight_gradient": math.nan},
        "backward: the gradient of 'blocks.1.linear.weight', before its reduction, has 64 NaN of 64 values",
        "blocks.1.linear.weight",
    ),
}


@on_ranks(2)
@each_front_end
@pytest.mark.parametrize("case", CASES)
def test_one_rank_makes_it(rank: Rank, front_end: FrontEnd, case: str) -> None:
    """All ranks raise before the optimizer steps, and name it."""
    model, blocks, optimizer = sharded(rank, front_end)
    changes, told, name = CASES[case]
    with find_nonfinite(model):
        step(rank, model, optimizer)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        if rank.rank == 1:
            vars(blocks[1]).update(changes)
        with pytest.raises(NonFiniteError) as caught:
            step(rank, model, optimizer)
    message = str(caught.value)
    assert message.startswith(f"step 1, microbatch 0, {told}"), message
    assert "on rank 1; nothing before it" in message and caught.value.names == (name,)
    for now, then in zip(model.parameters(), before, strict=True):
        now, then = (each.to_local() if isinstance(each, DTensor) else each for each in (now, then))
        assert torch.equal(now, then)


@on_ranks(2)
@each_front_end
def test_parameters_and_inputs(rank: Rank, front_end: FrontEnd) -> None:
    """A weight that is NaN on one rank's shard reaches all ranks; an input only its own."""
    model, _, optimizer = sharded(rank, front_end)
    with find_nonfinite(model), pytest.raises(NonFiniteError) as caught:
        step(rank, model, optimizer, math.inf if rank.rank else 1.0)
    assert "step 0, microbatch 0, forward: an input of the model has" in str(caught.value)
    assert "has 16 infinite of 16 values (shape [2, 8], torch.float32) on rank 1;" in str(caught.value)
    optimizer.zero_grad()
    for parameter in list(model.parameters())[:1]:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if rank.rank == 0:
            with torch.no_grad():
                local.view(-1)[0] = math.nan
    with find_nonfinite(model), pytest.raises(NonFiniteError) as caught:
        step(rank, model, optimizer)
    assert "forward: parameter 'blocks.0.linear.weight' has 1 NaN of 64 values" in str(caught.value)
    assert "on ranks 0, 1;" in str(caught.value)


@on_ranks(2)
@each_front_end
def test_sums_that_overflow(rank: Rank, front_end: FrontEnd) -> None:
    """Gradients that are finite on every rank, with a sum that is not."""
    model, blocks, optimizer = sharded(rank, front_end)
    blocks[1].weight_gradient = 3e38
    found = re.escape("reduction of gradients: the reduced gradient of 'blocks.1.")
    with find_nonfinite(model), pytest.raises(NonFiniteError, match=found):
        step(rank, model, optimizer)


@on_ranks(2)
@each_front_end
def test_what_is_finite(rank: Rank, front_end: FrontEnd) -> None:
    """Nothing is raised, results have the same bits, and no hook is left."""
    results = []
    for look in (False, True):
        model, _, optimizer = sharded(rank, front_end)
        for _ in range(3):
            if look:
                with find_nonfinite(model):
                    step(rank, model, optimizer)
            else:
                step(rank, model, optimizer)
        results.append([parameter.detach() for parameter in model.parameters()])
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    for one, other in zip(*results, strict=True):
        one, other = (each.to_local() if isinstance(each, DTensor) else each for each in (one, other))
        assert torch.equal(one, other)


@on_ranks(4)
def test_replicas(rank: Rank) -> None:
    """Ranks of all shard groups hear of it."""
    net = Net()
    blocks = list(net.blocks)
    mesh = rank.make_mesh(2, 2)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    model = fully_shard(net, mesh=mesh)
    blocks[2].output = math.inf if rank.rank == 3 else 1.0
    with find_nonfinite(model), pytest.raises(NonFiniteError, match=re.escape("'blocks.2' has")) as caught:
        step(rank, model, torch.optim.SGD(model.parameters(), lr=0.01))
    assert "on rank 3;" in str(caught.value)


def test_without_ranks() -> None:
    """A plain model, at the end of the context."""
    net = Net()
    net.blocks[1].output = math.nan
    with pytest.raises(NonFiniteError, match=r"the output of 'blocks\.1'"), find_nonfinite(net):
        net(torch.ones(2, WIDTH))
