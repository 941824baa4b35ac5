"""Tiny models, and the unsharded training that sharded training is compared with."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fullshard import fully_shard
from fullshard.comm import CollectiveTransport, GlooTransport, NcclTransport, Transport, make_transport, record
from fullshard.engine.buckets.all_gather import BucketAllGather
from fullshard.engine.buckets.base import Bucket
from fullshard.engine.buckets.message import Unpacking
from fullshard.engine.ownership import nested_units
from fullshard.engine.states import Phase
from fullshard.memory import Buffer, DeviceCommStream, HostCommStream, PendingWork
from ranks import Rank

LossOf = Callable[[nn.Module, int], torch.Tensor]  # (model, rank) -> the loss of that rank's batch


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
    """A residual pair of linear layers. ``log`` receives "forward NAME" and "backward NAME"."""

    def __init__(self, dim: int, name: str = "", log: list[str] | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.name, self.log = name, log
        self.checkpointed: bool | None = None  # recompute the body: None no, else use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.log is not None:
            self.log.append(f"forward {self.name}")
        x = self.body(x) if self.checkpointed is None else checkpoint(self.body, x, use_reentrant=self.checkpointed)
        return mark(x, f"backward {self.name}", self.log)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """``depth`` blocks between two linear layers that belong to the root; runs the blocks numbered in ``run``."""

    def __init__(self, depth: int = 3, dim: int = 6, log: list[str] | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(Block(dim, f"blocks.{i}", log) for i in range(depth))
        self.last = nn.Linear(dim, 3)
        self.log = log
        self.checkpointed: bool | None = None  # recompute each block: None no, else use_reentrant

    def forward(self, x: torch.Tensor, run: Sequence[int] | None = None) -> torch.Tensor:
        x = mark(self.first(x), "backward first", self.log)
        for index in range(len(self.blocks)) if run is None else run:
            block = self.blocks[index]
            x = block(x) if self.checkpointed is None else checkpoint(block, x, use_reentrant=self.checkpointed)
        return self.last(x)


class Language(nn.Module):
    """Token ids to logits: an embedding that is tied to the head, ``depth`` blocks, a norm."""

    def __init__(self, vocabulary: int = 13, dim: int = 6, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Branch(nn.Module):
    """Which of two layers computes depends on the rank; a third never does."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd, self.never = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.rank = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.odd if self.rank % 2 else self.even)(x)


class Odd(nn.Module):
    """All kinds of parameters at once, used in an order of their own.

    0-D, integer, transposed, channels_last, expanded, conjugated, empty, unused; of float32, float64 and bfloat16.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.order = nn.Parameter(torch.tensor([4, 2, 0, 1, 3, 5]), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False, True, True, True]), requires_grad=False)
        self.transposed = nn.Parameter(torch.randn(5, 6).t())
        self.rows = nn.Parameter(torch.randn(1, 5).expand(4, 5))
        self.phase = nn.Parameter(torch.randn(5, dtype=torch.complex64).conj())
        self.conv = nn.Conv2d(3, 4, (2, 1)).to(memory_format=torch.channels_last)
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.unused = nn.Linear(3, 3)
        self.wide = nn.Linear(5, 3).double()
        self.low = nn.Linear(3, 3).bfloat16()
        self.low.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x[:, self.order] @ self.transposed * self.scale + self.rows) * self.mask
        x = self.wide((x * self.phase).abs().double())
        x = self.conv(x.float()[:, :, None, None].expand(-1, -1, 2, 1)).flatten(1)[:, :3]
        return self.low(x.bfloat16()).float()


class Frozen(Stack):
    """Frozen parameters beside trainable ones in a block and in the root, and a block that is all frozen."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__(depth)
        self.blocks[0].up.weight.requires_grad_(False)
        self.blocks[1].requires_grad_(False)
        self.first.requires_grad_(False)


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


def batch(rank: int, step: int, *shape: int) -> torch.Tensor:
    """Normal numbers that depend on ``rank`` and ``step`` only."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * step + rank))


def tokens(rank: int, step: int, *shape: int, below: int = 13) -> torch.Tensor:
    """Token ids that depend on ``rank`` and ``step`` only."""
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(1000 * step + rank))


def packed_numel(*pieces: int, dtype: torch.dtype = torch.float32) -> int:
    """Elements that a rank adds to a packed message of pieces of these sizes.

    Each piece starts at a multiple of the power of two that it fills, but of no more than 64 bytes, and the end is
    rounded up to 16 bytes.
    """
    end = 0
    for numel in pieces:
        step = min(64 // dtype.itemsize, 2 ** math.ceil(math.log2(numel)))
        end = -(-end // step) * step + numel
    step = 16 // dtype.itemsize
    return -(-end // step) * step


def square_loss(step: int = 0, *shape: int) -> LossOf:
    """The mean square of the outputs on the batch of ``step``."""

    def loss_of(model: nn.Module, rank: int) -> torch.Tensor:
        output = model(batch(rank, step, *(shape or (4, 6))))
        return (output.float() if output.dtype.itemsize < 4 else output).square().mean()

    return loss_of


@contextlib.contextmanager
def tiny_units(up_to: int = 0) -> Iterator[None]:
    """Units made inside travel with a neighbor up to this size in bytes when gathered; 0: none do."""
    usual = {kind: kind.tiny_bytes for kind in (GlooTransport, CollectiveTransport, NcclTransport)}
    for kind in usual:
        kind.tiny_bytes = up_to
    try:
        yield
    finally:
        for kind, tiny_bytes in usual.items():
            kind.tiny_bytes = tiny_bytes


@contextlib.contextmanager
def lane_log() -> Iterator[list[tuple[str, str, str]]]:
    """Log ("issue" or "wait", kind, unit) of every launch, and of the first wait for it."""
    log: list[tuple[str, str, str]] = []

    class Watched:
        def __init__(self, pending_work: PendingWork, launched: list[tuple[str, str]]) -> None:
            self.pending_work, self.launched = pending_work, launched

        def wait(self) -> None:
            while self.launched:
                log.append(("wait", *self.launched.pop(0)))
            self.pending_work.wait()

        synchronize = wait

    def watch(issue: Callable[..., PendingWork]) -> Any:
        def issue_watched(*arguments: Any, **options: Any) -> PendingWork:
            with record() as seen:
                pending_work = issue(*arguments, **options)
            launched = list(dict.fromkeys((c.kind, c.unit) for c in seen))
            log.extend(("issue", *launch) for launch in launched)
            return Watched(pending_work, launched)

        return issue_watched

    usual = {kind: kind.issue for kind in (HostCommStream, DeviceCommStream)}
    for kind, issue in usual.items():
        kind.issue = watch(issue)  # type: ignore[method-assign]
    try:
        yield log
    finally:
        for kind, issue in usual.items():
            kind.issue = issue  # type: ignore[method-assign]


def transport_of(rank: Rank) -> Transport:
    """A transport of the kind that units on the mesh of ``rank`` use."""
    return make_transport(rank.group, rank.device)


def shard_blocks(model: nn.Module, rank: Rank, **settings: Any) -> nn.Module:
    """One unit per block (or layer), then the root."""
    for child in getattr(model, "blocks", None) or model.layers:
        fully_shard(child, mesh=rank.mesh, **settings)
    return fully_shard(model, mesh=rank.mesh, **settings)


def with_reference(model: nn.Module, rank: Rank, **settings: Any) -> tuple[nn.Module, nn.Module]:
    """``model`` sharded by blocks, and an unsharded copy of it."""
    reference = copy.deepcopy(model)
    return shard_blocks(model, rank, **settings), reference


def reference_backward(reference: nn.Module, world_size: int, loss_of: LossOf) -> torch.Tensor:
    """Add to ``.grad`` the mean over ranks of the gradients of their losses, summed in rank order; the losses."""
    parameters = list(reference.parameters())
    before = [p.grad for p in parameters]
    totals: list[torch.Tensor | None] = [None] * len(parameters)
    losses = []
    for rank in range(world_size):
        for parameter in parameters:
            parameter.grad = None
        loss = loss_of(reference, rank)
        losses.append(loss.detach())
        if loss.requires_grad:
            loss.backward()
        for index, parameter in enumerate(parameters):
            gradient, total = parameter.grad, totals[index]
            if gradient is not None:
                totals[index] = gradient.clone() if total is None else total + gradient
    for parameter, total, old in zip(parameters, totals, before, strict=True):
        mean = None if total is None else total.mul_(1 / world_size)
        parameter.grad = mean if old is None else old if mean is None else old + mean
    return torch.stack(losses)


def assert_at_rest(model: nn.Module) -> None:
    """Require that nothing is gathered, all registered managed parameters are sharded, and no phase is open."""
    for unit in nested_units(model):
        assert unit.phase is Phase.IDLE, unit.name
        assert [held_bytes(bucket) for bucket in unit.buckets] == [0] * len(unit.buckets), unit.name
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


def held_bytes(holder: Any) -> int:
    """Return the bytes that buffers of a bucket, and of its all-gathers, hold now."""
    buffers: dict[int, Buffer] = {}

    def collect(value: Any) -> None:
        if isinstance(value, Buffer):
            buffers[id(value)] = value
        elif isinstance(value, (Bucket, BucketAllGather, Unpacking)):
            for each in vars(value).values():
                collect(each)
        elif isinstance(value, list):
            for each in value:
                collect(each)

    collect(holder)
    return sum(buffer.allocated_bytes for buffer in buffers.values())


def gathered(model: nn.Module) -> list[str]:
    """Names of the units that hold memory for full parameters."""
    return [unit.name for unit in nested_units(model) if any(held_bytes(bucket) for bucket in unit.buckets)]
