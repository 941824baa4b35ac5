"""Runs of training programs that need no package: sharded by a front end, and unsharded on averaged gradients.

A program is a function ``program(run)`` that returns its models by name. It is written once, with its own control flow,
and run twice: all it asks of the run is to shard its models, to note losses, and to step its optimizers. Everything is
computed in float64, so that rounding explains no difference that ``assert_same_runs`` lets pass.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from compare import assert_close, fqn_of
from fullshard import FullyShardedDataParallel, ShardingStrategy, fully_shard
from fullshard.wrap import ModuleWrapPolicy
from ranks import Rank

RTOL, ATOL = 1e-9, 1e-11

FRONT_ENDS = ("fully_shard", "wrapper", "flat")  # "flat": the wrapper with use_orig_params=False
front_ends = pytest.mark.parametrize("front_end", FRONT_ENDS)

Program = Callable[["Run"], dict[str, nn.Module]]


class Run:
    """One run of a program on this rank.

    Attributes:
        front_end: One of FRONT_ENDS; "unsharded": plain modules, whose gradients ``step`` averages over ranks.
        noted: What the program noted, by name, in the order of noting.
    """

    def __init__(self, rank: Rank, front_end: str = "unsharded", keep: bool = False) -> None:
        self.rank, self.front_end, self.keep = rank, front_end, keep
        self.noted: dict[str, list[torch.Tensor]] = {}

    def shard(self, model: nn.Module, *classes: type[nn.Module]) -> Any:
        """The model, sharded: modules of these classes are units of their own, and the rest is one.

        With ``keep``, parameters stay unsharded from forward on, through backward.
        """
        if self.front_end == "unsharded":
            return model
        if self.front_end == "fully_shard":
            options = {"reshard_after_forward": False} if self.keep else {}
            for module in [module for module in model.modules() if isinstance(module, classes)]:
                fully_shard(module, mesh=self.rank.mesh, **options)
            sharded = fully_shard(model, mesh=self.rank.mesh, **options)
            if self.keep:
                sharded.set_reshard_after_backward(False)
            return sharded
        return FullyShardedDataParallel(
            model,
            device_mesh=self.rank.mesh,
            use_orig_params=self.front_end == "wrapper",
            auto_wrap_policy=ModuleWrapPolicy(set(classes)) if classes else None,
            sharding_strategy=ShardingStrategy.NO_SHARD if self.keep else ShardingStrategy.FULL_SHARD,
        )

    def note(self, name: str, value: torch.Tensor) -> None:
        """Keep a value of this rank, to be compared."""
        self.noted.setdefault(name, []).append(value.detach().clone())

    def step(self, model: Any, optimizer: torch.optim.Optimizer, max_norm: float = math.inf) -> None:
        """Clip the gradients and note their norm; step; clear them."""
        if self.front_end == "unsharded":
            average_gradients(model)
        if isinstance(model, FullyShardedDataParallel):
            norm = model.clip_grad_norm_(max_norm)
        else:
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        self.note("norm", norm.full_tensor() if isinstance(norm, DTensor) else norm)
        optimizer.step()
        optimizer.zero_grad()

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Leave gradients of backwards inside unreduced, until one outside reduces them."""
        if isinstance(model, FullyShardedDataParallel):
            with model.no_sync():
                yield
        elif self.front_end == "fully_shard":
            model.set_requires_gradient_sync(False)
            yield
            model.set_requires_gradient_sync(True)
        else:
            yield

    def data(self, index: int, *shape: int) -> torch.Tensor:
        """Normal numbers that depend on this rank and ``index`` only."""
        return torch.randn(*shape, generator=self.generator(index))

    def generator(self, index: int) -> torch.Generator:
        """Random numbers of this rank and ``index``."""
        return torch.Generator().manual_seed(1000 * index + self.rank.rank)


def average_gradients(model: nn.Module) -> None:
    """Replace each gradient by its mean over ranks; one that only some ranks have is zero on the others."""
    for parameter in model.parameters():
        present = torch.tensor(float(parameter.grad is not None))
        dist.all_reduce(present)
        if present:
            mean = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
            dist.all_reduce(mean)
            parameter.grad = mean / dist.get_world_size()


def built(make: Callable[..., Any], *args: Any, seed: int = 4) -> Any:
    """What ``make`` makes, with the same values on all ranks."""
    torch.manual_seed(seed)
    return make(*args)


def full_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole parameters and buffers by the names that they had before; all ranks call it."""
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        named = [*model.named_parameters(), *model.named_buffers()]
        held = {fqn_of(name): value.detach() for name, value in named}
        return {name: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for name, v in held.items()}


def assert_runs_alike(rank: Rank, front_end: str, program: Program, *, keep: bool = False) -> None:
    """Require a program to compute what it computes unsharded: all that it noted, and its models' weights.

    Raises:
        AssertionError: With the first value that differs; also if the unsharded program trained nothing.
    """
    torch.set_default_dtype(torch.float64)
    reference = Run(rank)
    expected = {name: full_weights(model) for name, model in program(reference).items()}
    losses = torch.stack(reference.noted["loss"])
    assert losses.isfinite().all() and losses.max() - losses.min() > 1e-3, "a run that does not move shows nothing"
    run = Run(rank, front_end, keep)
    found = {name: full_weights(model) for name, model in program(run).items()}
    assert set(run.noted) == set(reference.noted)
    for name, values in reference.noted.items():
        assert len(run.noted[name]) == len(values), name
        for index, (ours, theirs) in enumerate(zip(run.noted[name], values, strict=True)):
            assert_close(ours, theirs, f"{name} {index}", RTOL, ATOL)
    for name, weights in expected.items():
        ours = {fqn: found[name].get(fqn) for fqn in weights}
        assert set(found[name]) == set(weights), name
        for fqn, value in weights.items():
            assert_close(ours[fqn], value, f"{name}: {fqn}", RTOL, ATOL)
