"""A small model with everything that a state can hold, and its wrappers in all strategies."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from checkpoint import optimizers
from compare import assert_equal, assert_models_equal
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy
from fullshard.engine.ownership import nested_units
from fullshard.wrap import ModuleWrapPolicy
from ranks import Rank

CLOSE: dict[str, float] = {"rtol": 1e-5, "atol": 1e-6}
DIM = 5
PLAIN = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]
HYBRID = [ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2]
FULL, GRAD_OP, NO_SHARD = PLAIN
both_forms = pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
plain_strategies = pytest.mark.parametrize("strategy", PLAIN, ids=lambda s: s.name)


class Part(nn.Module):
    """A residual pair of layers of odd sizes, with a scalar parameter and buffers of several kinds."""

    offset: torch.Tensor
    calls: torch.Tensor
    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.up, self.down = nn.Linear(DIM, 9), nn.Linear(9, DIM, bias=False)
        self.register_buffer("offset", torch.randn(DIM))
        self.register_buffer("calls", torch.tensor(3))
        self.register_buffer("cache", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x + self.offset)))


class Net(nn.Module):
    """Two parts between two layers that belong to the root."""

    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.parts = nn.Sequential(Part(), Part())
        self.last = nn.Linear(DIM, 3)
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.parts(torch.tanh(self.first(x))))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """What a user's own method does: the forward, without the wrapper around it."""
        return self(x)


def other_net(seed: int = 5) -> Net:
    """The same model with other numbers, in its buffers as well."""
    torch.manual_seed(seed)
    model = Net()
    model.steps.fill_(7.0)
    model.parts[1].calls.fill_(8)
    return model


def placed(rank: Rank, strategy: ShardingStrategy) -> dict[str, Any]:
    """Arguments of the constructor for a strategy: hybrid ones replicate over two halves of four ranks."""
    arguments: dict[str, Any] = {"sharding_strategy": strategy}
    if strategy.hybrid:
        halves = 2 if rank.world_size > 2 else 1
        shape = (halves, rank.world_size // halves)
        arguments["device_mesh"] = rank.make_mesh(*shape, names=("replicate", "shard"))
    return arguments


def wrapped(
    rank: Rank, strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD, seed: int = 0, **arguments: Any
) -> tuple[FSDP, Net]:
    """The model with each part a unit, and an unsharded copy of it."""
    torch.manual_seed(seed)
    model = Net()
    reference = copy.deepcopy(model)
    arguments.setdefault("auto_wrap_policy", ModuleWrapPolicy({Part}))
    return FSDP(model, **{**placed(rank, strategy), **arguments}), reference


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters by name as plain tensors, each under all its names."""
    return {name: p.detach() for name, p in module.named_parameters(remove_duplicate=False)}


def joined(rank: Rank, piece: torch.Tensor) -> torch.Tensor:
    """The 1-D pieces of all ranks, one after another: what a parameter's elements are without any help of ours."""
    pieces: list[Any] = [None] * rank.world_size
    dist.all_gather_object(pieces, piece.detach().clone().cpu())
    return torch.cat([other.flatten() for other in pieces]).to(piece.device)


def raised_everywhere(rank: Rank, error: BaseException | None) -> None:
    """Require the same type of error, with the same words, on all ranks."""
    told: list[Any] = [None] * rank.world_size
    dist.all_gather_object(told, None if error is None else (type(error).__name__, str(error)))
    assert None not in told and set(told) == {told[0]}, told


def assert_same_outputs(
    rank: Rank, model: nn.Module, reference: nn.Module, *, rtol: float = 1e-5, atol: float = 1e-6
) -> None:
    """Require that both compute the same from this rank's batch, without gradients."""
    x = torch.randn(3, DIM, generator=torch.Generator().manual_seed(77 + rank.rank))
    with torch.no_grad():
        torch.testing.assert_close(model(x), reference(x), rtol=rtol, atol=atol)


def assert_dicts_equal(actual: Any, expected: Any) -> None:
    """Require the same keys in the same order, and bitwise equal values."""
    assert list(actual) == list(expected), (list(actual), list(expected))
    for name, value in expected.items():
        mine = actual[name]
        assert_equal(mine.detach() if isinstance(mine, torch.Tensor) else mine, value.detach(), name)


def on_cpu(state: Any) -> Any:
    """The same with tensors in CPU memory, as ``offload_to_cpu`` leaves them."""
    if isinstance(state, dict):
        return {name: on_cpu(value) for name, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(on_cpu(value) for value in state)
    return state.detach().cpu() if isinstance(state, torch.Tensor) else state


def assert_states_close(actual: Any, expected: Any, *, exact: bool = False) -> None:
    """As the function of the same name for checkpoints, wherever values are: full states are in CPU memory."""
    optimizers.assert_states_close(on_cpu(actual), on_cpu(expected), exact=exact)


def edit(model: nn.Module, factor: float = 2.0) -> None:
    """Multiply each parameter by a number of its own."""
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.mul_(factor + index)


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """The mean square of the outputs on that rank's batch of that step."""
    x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(100 * step + rank))
    loss: torch.Tensor = model(x).square().mean()
    return loss


def backward(rank: Rank, model: nn.Module, step: int = 0) -> None:
    """Gradients of this rank's batch."""
    loss_of(model, step, rank.rank).backward()


def reference_backward(rank: Rank, reference: nn.Module, *steps: int) -> None:
    """Add the mean over ranks of the gradients of several microbatches."""
    for step in steps or (0,):
        losses = torch.stack([loss_of(reference, step, r) for r in range(rank.world_size)])
        losses.mean().backward()


def both_backward(rank: Rank, model: nn.Module, reference: nn.Module, step: int = 0) -> None:
    """The same gradients in both."""
    backward(rank, model, step)
    reference_backward(rank, reference, step)


def train(rank: Rank, model: nn.Module, step: int = 0) -> None:
    """One step, of a sharded model alone."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(rank, model, step)
    optimizer.step()
    optimizer.zero_grad()


def check_gradients(model: nn.Module, reference: nn.Module, **tolerance: float) -> None:
    """Require that parameters and gradients, gathered, are the reference's."""
    with FSDP.summon_full_params(model, writeback=False, with_grads=True):
        assert_models_equal(model, reference, grads=True, **(tolerance or CLOSE))


def check_steps(rank: Rank, model: nn.Module, reference: nn.Module, steps: int = 1, **tolerance: float) -> None:
    """Train both, and compare gradients and parameters of each step, and the outputs at the end."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for optimizer in optimizers:
        optimizer.zero_grad()
    for step in range(steps):
        both_backward(rank, model, reference, step)
        check_gradients(model, reference, **tolerance)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_outputs(rank, model, reference, rtol=tolerance.get("rtol", 1e-5), atol=tolerance.get("atol", 1e-6))


def assert_freed(model: nn.Module) -> None:
    """Require that no unit holds memory for full parameters."""
    assert not any(bucket.allocated_bytes for unit in nested_units(model) for bucket in unit.buckets)


def counts(seen: list[Any]) -> dict[str, int]:
    """How many launches for a unit there were of each kind."""
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    return {kind: len({(c.unit, c.launch) for c in seen if c.kind == kind}) for kind in kinds}
