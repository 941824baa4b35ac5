"""Small models with everything that a state can hold, their wrappers, and what they are compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import front_ends
import models
from checkpoint import optimizers
from compare import assert_equal, fqn_of
from front_ends import assert_same_gradients, assert_same_values, gathered
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy, StateDictType
from fullshard.engine.ownership import unit_of
from fullshard.wrap import ModuleWrapPolicy
from models import LossOf, square_loss
from ranks import Rank

CLOSE: dict[str, float] = {"rtol": 1e-5, "atol": 1e-6}
DIM = 5
PLAIN = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]
HYBRID = [ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2]
FULL, GRAD_OP, NO_SHARD = PLAIN
WHOLE, SHARDED, LOCAL = (StateDictType[f"{form}_STATE_DICT"] for form in ("FULL", "SHARDED", "LOCAL"))
both_forms = pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])


class Block(nn.Module):
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
        return x + self.scale * self.down(torch.tanh(self.up(x + self.offset.to(x.dtype))))


class Net(nn.Module):
    """Blocks between two layers that belong to the root."""

    steps: torch.Tensor

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.Sequential(*(Block() for _ in range(depth)))
        self.last = nn.Linear(DIM, 3)
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.blocks(torch.tanh(self.first(x))))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """What a user's own method does: the forward, without the wrapper around it."""
        return self(x)


class Tied(nn.Module):
    """Two blocks with the same first weight, and a head that is the transpose of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(DIM, DIM, bias=False)
        self.blocks = nn.Sequential(Block(), Block())
        self.blocks[1].up.weight = self.blocks[0].up.weight
        self.head = nn.Linear(DIM, DIM, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(x)))


BLOCKS = ModuleWrapPolicy({Block})


def built(make: Callable[..., Any] = Net, *args: Any, seed: int = 0) -> Any:
    """A model with the same values on all ranks."""
    torch.manual_seed(seed)
    return make(*args)


def other_net(seed: int = 5) -> Any:
    """The same model with other numbers, in its buffers as well."""
    model = built(seed=seed)
    model.steps.fill_(7.0)
    model.blocks[1].calls.fill_(8)
    return model


def placed(rank: Rank, strategy: ShardingStrategy) -> dict[str, Any]:
    """Arguments of the constructor for a strategy: hybrid ones replicate over two halves of four ranks."""
    arguments: dict[str, Any] = {"sharding_strategy": strategy}
    if strategy.hybrid:
        halves = 2 if rank.world_size > 2 else 1
        shape = (halves, rank.world_size // halves)
        arguments["device_mesh"] = rank.make_mesh(*shape, names=("replicate", "shard"))
    return arguments


def wrapped(rank: Rank, strategy: ShardingStrategy = FULL, seed: int = 0, **arguments: Any) -> tuple[Any, Any]:
    """The model with each block a unit, and an unsharded copy of it."""
    model = built(seed=seed)
    reference = copy.deepcopy(model)
    arguments.setdefault("auto_wrap_policy", BLOCKS)
    return FSDP(model, **{**placed(rank, strategy), **arguments}), reference


def units_of(model: nn.Module) -> list[str]:
    """Names, as before wrapping, of the modules inside ``model`` that are wrapped; "" is the outermost."""
    names = [name for name, module in model.named_modules() if isinstance(module, FSDP)]
    return [fqn_of(f"{name}.").removesuffix(".") for name in names]


# -------------------------------------------------------------------- training


def loss_at(step: int = 0) -> LossOf:
    """The mean square of the outputs on a batch of that step."""
    return square_loss(step, 4, DIM)


def backward(rank: Rank, model: nn.Module, step: int = 0) -> None:
    """Gradients of this rank's batch."""
    loss_at(step)(model, rank.rank).backward()


def reference_backward(rank: Rank, reference: nn.Module, *steps: int) -> None:
    """Add the mean over ranks of the gradients of several microbatches."""
    for step in steps or (0,):
        models.reference_backward(reference, rank.world_size, loss_at(step))


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


def check_steps(rank: Rank, model: nn.Module, reference: nn.Module, steps: int = 1, **tolerance: Any) -> None:
    """Train both, and compare losses and gradients of each step, and parameters and outputs at the end."""
    for module in (model, reference):
        module.zero_grad()
    front_ends.assert_trains_alike(model, reference, rank, loss_at, steps=steps, **tolerance)
    for module in (model, reference):
        module.zero_grad()


def check_gradients(model: nn.Module, reference: nn.Module, **tolerance: float) -> None:
    """Require that unsharded parameters and gradients are the reference's."""
    tolerance = tolerance or CLOSE
    assert_same_values(model, reference, **tolerance)
    assert_same_gradients(model, reference, **tolerance)


# -------------------------------------------------------------------- state dicts


def save(model: nn.Module, form: StateDictType, config: Any = None, **arguments: Any) -> Any:
    """The state dict in a form."""
    with FSDP.state_dict_type(model, form, config):
        return model.state_dict(**arguments)


def load(model: nn.Module, state: Any, form: StateDictType, **arguments: Any) -> Any:
    """Load a state dict of a form; the names that were missing and unexpected."""
    with FSDP.state_dict_type(model, form):
        return model.load_state_dict(state, **arguments)


def whole(state: Any) -> Any:
    """The same with all of each sharded tensor."""
    if isinstance(state, dict):
        return {name: whole(value) for name, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(whole(value) for value in state)
    return state.full_tensor() if isinstance(state, DTensor) else state


def local_part(value: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    return value._local_tensor if isinstance(value, DTensor) else value


# -------------------------------------------------------------------- comparison


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


def assert_states_equal(model: nn.Module, reference: nn.Module) -> None:
    """Require equal state dicts, of all ranks."""
    assert_dicts_equal(model.state_dict(), reference.state_dict())


def assert_states_close(actual: Any, expected: Any, *, exact: bool = False) -> None:
    """As the function of the same name for checkpoints, wherever values are: full states are in CPU memory."""
    optimizers.assert_states_close(on_cpu(actual), on_cpu(expected), exact=exact)


def assert_freed(model: nn.Module) -> None:
    """Require that no unit holds memory for unsharded parameters."""
    assert gathered(model) == []


def on_cpu(state: Any) -> Any:
    """The same with tensors in CPU memory, as ``offload_to_cpu`` leaves them."""
    if isinstance(state, dict):
        return {name: on_cpu(value) for name, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(on_cpu(value) for value in state)
    return state.detach().cpu() if isinstance(state, torch.Tensor) else state


def joined(rank: Rank, shard: torch.Tensor) -> torch.Tensor:
    """The 1-D shards of all ranks, one after another: the elements of a parameter, without any help of ours."""
    shards: list[Any] = [None] * rank.world_size
    dist.all_gather_object(shards, shard.detach().clone().cpu())
    return torch.cat([other.flatten() for other in shards]).to(shard.device)


def raised_everywhere(rank: Rank, error: BaseException | None) -> None:
    """Require the same type of error, with the same words, on all ranks."""
    raised: list[Any] = [None] * rank.world_size
    dist.all_gather_object(raised, None if error is None else (type(error).__name__, str(error).split(" at 0x")[0]))
    assert None not in raised and set(raised) == {raised[0]}, raised


def edit(model: nn.Module, factor: float = 2.0) -> None:
    """Multiply each parameter by a number of its own."""
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.mul_(factor + index)


# -------------------------------------------------------------------- flat parameters


def concatenated(tensors: Sequence[torch.Tensor], world_size: int, alignment: int = 4) -> torch.Tensor:
    """By plain loops, what the ranks' slices are together: tensors one after another, each aligned, padded once."""
    values: list[Any] = []
    for tensor in tensors:
        values += [0.0] * (-len(values) % alignment)
        values += tensor.detach().flatten().tolist()
    values += [0.0] * (-len(values) % world_size)
    return torch.tensor(values, dtype=tensors[0].dtype)


def slice_of(tensors: Sequence[torch.Tensor], rank: Rank) -> torch.Tensor:
    """This rank's slice of :func:`concatenated`."""
    return concatenated(tensors, rank.world_size).chunk(rank.world_size)[rank.rank]


def shards_of(tensors: Sequence[torch.Tensor], rank: Rank) -> list[torch.Tensor]:
    """This rank's shard of each tensor, 1-D, maybe empty."""
    marked = [torch.full_like(t, i + 1.0, dtype=torch.float64) for i, t in enumerate(tensors)]
    values, owners = slice_of(tensors, rank), slice_of(marked, rank)
    return [values[owners == i + 1.0] for i in range(len(tensors))]


# -------------------------------------------------------------------- what a module was


class Snapshot(NamedTuple):
    """What a module was: its modules with the names of their attributes, and its tensors with their values."""

    modules: dict[str, tuple[nn.Module, set[str]]]
    tensors: dict[str, tuple[torch.Tensor, torch.Tensor, bool]]

    @classmethod
    def of(cls, module: nn.Module) -> Snapshot:
        """What ``module`` is."""
        modules = module.named_modules(remove_duplicate=False)
        tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        return cls(
            {name: (each, set(each.__dict__)) for name, each in modules},
            {name: (tensor, tensor.detach().clone(), tensor.requires_grad) for name, tensor in tensors},
        )

    def assert_unchanged(self, module: nn.Module) -> None:
        """Require ``module`` to be the same: objects, names and order, values, and no unit anywhere."""
        now = Snapshot.of(module)
        assert list(now.modules.items()) == list(self.modules.items())
        assert list(now.tensors) == list(self.tensors)
        for name, (held, value, trainable) in self.tensors.items():
            tensor = now.tensors[name][0]
            assert tensor is held and tensor.requires_grad is trainable and tensor.is_leaf, name
            assert type(tensor) in (nn.Parameter, torch.Tensor) and tensor.stride() == value.stride(), name
            assert_equal(tensor.detach(), value, name)
        assert all(unit_of(each) is None for each in module.modules())
