"""Tiny models, both front ends on them, and the unsharded training that they are compared with."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from compare import assert_close, assert_equal, fqn_of
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy, fully_shard, replicate
from fullshard.comm import base
from fullshard.engine.ownership import nested_units
from fullshard.engine.states import Phase
from fullshard.wrap import ModuleWrapPolicy
from ranks import Rank

LossOf = Callable[[nn.Module, int], torch.Tensor]  # (model, rank) -> the loss of that rank's batch
Values = dict[str, torch.Tensor]  # by FQN

CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-6}
# Adam divides gradients by their own size, and so makes rounding errors of tiny ones as large as a step.
AFTER_ADAM: dict[str, float] = {"rtol": 1e-3, "atol": 1e-5}
# A step of this size is a multiplication without rounding: the update is the same bit by bit, fused or not.
EXACT_RATE = 2.0**-4


class Mlp(nn.Module):
    """Linear layers of the widths given, with tanh in between; the first width is the input's."""

    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in itertools.pairwise(dims))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Block(nn.Module):
    """A norm and a residual pair of linear layers; ``log`` receives "forward NAME" and "backward NAME"."""

    dtypes: list[torch.dtype]  # of each forward's input

    def __init__(self, dim: int, name: str = "", log: list[str] | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim + 1), nn.Linear(2 * dim + 1, dim, bias=False)
        self.name, self.log, self.dtypes = name, log, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.dtypes.append(x.dtype)
        if self.log is not None:
            self.log.append(f"forward {self.name}")
        return mark(x + self.down(torch.tanh(self.up(self.norm(x)))), f"backward {self.name}", self.log)


class Stack(nn.Module):
    """Blocks between two linear layers; runs the blocks numbered in ``run``.

    Between the backwards of two blocks, ``log`` receives "between NAME", of the block that comes next.
    """

    def __init__(self, depth: int = 3, dim: int = 6, log: list[str] | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(Block(dim, f"blocks.{i}", log) for i in range(depth))
        self.last = nn.Linear(dim, 3)
        self.log = log

    def forward(self, x: torch.Tensor, run: Sequence[int] | None = None) -> torch.Tensor:
        x = mark(self.first(x), "backward first", self.log)
        for index in range(len(self.blocks)) if run is None else run:
            x = mark(self.blocks[index](x), f"between blocks.{index}", self.log)
        return self.last(x)


class Language(nn.Module):
    """Token ids to logits: an embedding that is tied to the head, ``depth`` blocks, a norm, a 0-D temperature."""

    def __init__(self, vocabulary: int = 13, dim: int = 6, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.temperature


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, text: str, log: list[str]) -> torch.Tensor:
        ctx.text, ctx.log = text, log
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.log.append(ctx.text)
        return gradient, None, None


def mark(x: torch.Tensor, text: str, log: list[str] | None) -> torch.Tensor:
    """Identity that appends ``text`` to ``log`` when its backward runs."""
    return x if log is None else _Mark.apply(x, text, log)


def build(make: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> Any:
    """What ``make`` makes, with the same values on all ranks."""
    torch.manual_seed(4)
    return make(*args, **kwargs)


def batch(rank: int, step: int, *shape: int) -> torch.Tensor:
    """Normal numbers that depend on ``rank`` and ``step`` only."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * step + rank))


def square_loss(step: int = 0, *shape: int) -> LossOf:
    """The mean square of the outputs on the batch of ``step``."""

    def loss_of(model: nn.Module, rank: int) -> torch.Tensor:
        return model(batch(rank, step, *(shape or (4, 6)))).float().square().mean()

    return loss_of


def token_loss(step: int = 0) -> LossOf:
    """Cross entropy of the logits for the very tokens that went in."""

    def loss_of(model: nn.Module, rank: int) -> torch.Tensor:
        ids = torch.randint(13, (2, 5), generator=torch.Generator().manual_seed(1000 * step + rank))
        return nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())

    return loss_of


# ---------------------------------------------------------------- both front ends


def wrapped(model: nn.Module, rank: Rank, **options: Any) -> FSDP:
    """A copy of ``model`` in the wrapper: one unit per block (or layer), and the root."""
    classes = {Block} if any(isinstance(m, Block) for m in model.modules()) else {nn.Linear}
    if "device_mesh" not in options and "process_group" not in options:
        options["device_mesh"] = rank.mesh
    options.setdefault("auto_wrap_policy", ModuleWrapPolicy(classes))
    return FSDP(copy.deepcopy(model), **options)


def sharded(model: nn.Module, rank: Rank, **options: Any) -> nn.Module:
    """A copy of ``model`` with ``fully_shard`` on the same modules as :func:`wrapped`."""
    model = copy.deepcopy(model)
    options.setdefault("mesh", rank.mesh)
    for child in getattr(model, "blocks", None) or getattr(model, "layers", None) or ():
        fully_shard(child, **options)
    return fully_shard(model, **options)


def replicated(model: nn.Module, rank: Rank, **options: Any) -> nn.Module:
    """A copy of ``model`` with ``replicate`` on the same modules as :func:`wrapped`."""
    model = copy.deepcopy(model)
    for child in getattr(model, "blocks", None) or getattr(model, "layers", None) or ():
        replicate(child, mesh=rank.mesh, **options)
    return replicate(model, mesh=rank.mesh, **options)


# Name of a strategy -> how fully_shard does the same (NO_SHARD: replicate).
SAME_STRATEGY: dict[ShardingStrategy, dict[str, Any]] = {
    ShardingStrategy.FULL_SHARD: {},
    ShardingStrategy.SHARD_GRAD_OP: {"reshard_after_forward": False},
    ShardingStrategy.HYBRID_SHARD: {},
    ShardingStrategy._HYBRID_SHARD_ZERO2: {"reshard_after_forward": False},
}


# ---------------------------------------------------------------- training and comparing


def reference_backward(reference: nn.Module, world_size: int, loss_of: LossOf) -> torch.Tensor:
    """Add to ``.grad`` the mean over ranks of the gradients of their losses; the losses of all ranks."""
    parameters = [p for p in reference.parameters() if p.requires_grad]
    before = [p.grad for p in parameters]
    totals: list[torch.Tensor | None] = [None] * len(parameters)
    losses = []
    for rank in range(world_size):
        for parameter in parameters:
            parameter.grad = None
        loss = loss_of(reference, rank)
        losses.append(loss.detach())
        loss.backward()
        for index, parameter in enumerate(parameters):
            gradient, total = parameter.grad, totals[index]
            if gradient is not None:
                totals[index] = gradient.clone() if total is None else total + gradient
    for parameter, total, old in zip(parameters, totals, before, strict=True):
        mean = None if total is None else total.mul_(1 / world_size)
        parameter.grad = mean if old is None else old if mean is None else old + mean
    return torch.stack(losses)


def full_values(model: nn.Module) -> Values:
    """All parameters by FQN, full, of a model whose units may come from both front ends. All ranks call it."""
    with FSDP.summon_full_params(model, writeback=False):
        return {fqn_of(n): p.detach().clone() for n, p in model.named_parameters(remove_duplicate=False)}


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """As :func:`full_values`, of the gradients."""
    with FSDP.summon_full_params(model, writeback=False, with_grads=True):
        return {
            fqn_of(n): None if p.grad is None else p.grad.detach().clone()
            for n, p in model.named_parameters(remove_duplicate=False)
        }


def assert_same_values(model: nn.Module, reference: nn.Module, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Require all parameters to agree; bitwise without tolerances."""
    actual, expected = full_values(model), full_values(reference)
    assert set(actual) == set(expected)
    for name, value in expected.items():
        if rtol == atol == 0.0:
            assert_equal(actual[name], value, name)
        else:
            assert_close(actual[name], value, name, rtol=rtol, atol=atol)


def assert_same_gradients(model: nn.Module, reference: nn.Module, *, rtol: float = 1e-4, atol: float = 1e-6) -> None:
    """Require all gradients to agree within the tolerances; None (of the reference) may be zero."""
    actual, expected = full_gradients(model), full_gradients(reference)
    assert set(actual) == set(expected)
    for name, value in expected.items():
        found = actual[name]
        if value is None:
            assert found is None or not found.any(), name
        else:
            assert found is not None, f"{name}: no gradient"
            assert_close(found, value, name, rtol=rtol, atol=atol)


def sgd(model: nn.Module, rate: float) -> torch.optim.SGD:
    """Plain SGD. Not foreach, which torch takes on accelerators, where plain tensors are beside DTensors: it raises."""
    kinds = {isinstance(parameter, DTensor) for parameter in model.parameters()}
    return torch.optim.SGD(model.parameters(), lr=rate, foreach=False if len(kinds) > 1 else None)


def train(
    model: nn.Module, rank: Rank, loss_at: Callable[[int], LossOf], steps: int = 10, rate: float = EXACT_RATE
) -> torch.Tensor:
    """Train with SGD; this rank's losses, one per step."""
    optimizer = sgd(model, rate)
    losses = []
    for step in range(steps):
        loss = loss_at(step)(model, rank.rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        losses.append(loss.detach())
    return torch.stack(losses)


def train_reference(
    model: nn.Module, rank: Rank, loss_at: Callable[[int], LossOf], steps: int = 10, rate: float = EXACT_RATE
) -> torch.Tensor:
    """As :func:`train`, unsharded, on the data of all ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    losses = []
    for step in range(steps):
        losses.append(reference_backward(model, rank.world_size, loss_at(step))[rank.rank])
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return torch.stack(losses)


def assert_at_rest(model: nn.Module) -> None:
    """Require that nothing is gathered and no phase is open."""
    for unit in nested_units(model):
        assert unit.phase is Phase.IDLE, unit.name
    assert gathered(model) == []


def gathered(model: nn.Module) -> list[str]:
    """Names of the units that hold memory for full parameters."""
    return [unit.name for unit in nested_units(model) if any(bucket.allocated_bytes for bucket in unit.buckets)]


# ---------------------------------------------------------------- order of events


class Events(list[str]):
    """Collects "gather UNIT", "reduce UNIT" (root: "root") between the marks that the model makes itself.

    A reduction of several messages counts once.
    """

    def __enter__(self) -> Events:
        base._observers.append(self.collective)
        self.clear()
        return self

    def __exit__(self, *_: object) -> None:
        base._observers.remove(self.collective)

    def collective(self, collective: base.Collective) -> None:
        event = f"{collective.kind} {collective.unit or 'root'}"
        if self[-1:] != [event]:
            self.append(event)

    def short(self) -> str:
        """ "gather blocks.1" becomes G1, forward F1, backward B1, between b1, reduce R1; root: Gr, Rr; first: Bf."""
        letters = []
        for event in self:
            kind, name = event.split()
            letter = {"between": "b", "all_gather": "G"}.get(kind, kind[0].upper())
            letters.append(letter + {"root": "r", "first": "f"}.get(name, fqn_of(name).removeprefix("blocks.")))
        return " ".join(letters)
