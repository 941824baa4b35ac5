"""Collectives that a user might bring, and models to use them on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fullshard
from compare import assert_models_equal
from fullshard import fully_shard
from models import Stack, reference_backward, square_loss
from ranks import Rank

CLOSE: dict[str, float] = {"rtol": 2e-5, "atol": 1e-6}
ODD_DIM = 5  # of a model whose rows neither two nor four ranks divide


class Gather:
    """An all-gather that inherits from nothing; counts its calls. ``done``: returns None instead of a work."""

    def __init__(self, done: bool = False) -> None:
        self.done = done
        self.allocated: list[tuple[int, torch.dtype]] = []
        self.called: list[tuple[int, torch.dtype, bool]] = []
        self.groups: set[tuple[int, ...]] = set()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.allocated.append((size[0], dtype))
        return torch.empty(tuple(size), dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        self.called.append((output_tensor.numel(), output_tensor.dtype, async_op))
        self.groups.add(tuple(dist.get_process_group_ranks(group)))
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op=not self.done)


class Scatter(Gather):
    """A reduce-scatter of the same kind."""

    def __call__(  # type: ignore[override]
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        # NCCL is asked for means where that is all of the division.
        assert op == dist.ReduceOp.SUM or (op == dist.ReduceOp.AVG and input_tensor.device.type != "cpu")
        self.called.append((input_tensor.numel(), input_tensor.dtype, async_op))
        self.groups.add(tuple(dist.get_process_group_ranks(group)))
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op=not self.done)


class OurGather(fullshard.AllGather):
    """The same on our abstract class."""

    def __init__(self) -> None:
        self.plain = Gather()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.plain.allocate(size, dtype=dtype, device=device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.plain(*args, **kwargs)


class OurScatter(fullshard.ReduceScatter):
    def __init__(self) -> None:
        self.plain = Scatter()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.plain.allocate(size, dtype=dtype, device=device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.plain(*args, **kwargs)


def torchs_classes() -> tuple[Any, Any]:
    """The same on the abstract classes of PyTorch."""
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

    gather = type("TorchGather", (AllGather,), dict(vars(OurGather)))
    scatter = type("TorchScatter", (ReduceScatter,), dict(vars(OurScatter)))
    return gather(), scatter()


def build(dim: int = 6, depth: int = 3) -> Stack:
    torch.manual_seed(8)
    return Stack(depth, dim)


def shard(model: nn.Module, mesh: DeviceMesh, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def units(model: Stack) -> list[Any]:
    """The sharded modules."""
    return [model, *model.blocks]


def loss_of(dim: int = 6, step: int = 0) -> Callable[[nn.Module, int], torch.Tensor]:
    return square_loss(step, 4, dim)


def check_training(model: Any, reference: nn.Module, rank: Rank, dim: int = 6, steps: int = 3) -> None:
    """Adam steps; gradients and parameters equal those of the reference after each."""
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.02) for m in (model, reference)]
    for step in range(steps):
        loss_of(dim, step)(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, loss_of(dim, step))
        assert_models_equal(model, reference, grads=True, **CLOSE)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_models_equal(model, reference, **CLOSE)
