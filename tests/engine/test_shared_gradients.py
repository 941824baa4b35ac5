"""Gradients that share their memory with other gradients. See [Note: Who owns a gradient]."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from compare import assert_close
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import MixedPrecisionPolicy, fully_shard, replicate
from fullshard.optim import localize
from ranks import Rank, on_ranks

ROWS, WIDTH = 16, 2048  # 128 KiB in fp32: they are reduced in place, without being packed


class Positions(nn.Module):
    """Its parameters are added to each other and to the activation, which all have one gradient."""

    def __init__(self, features: int = WIDTH) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(ROWS, features) * 0.1) for _ in range(2))
        self.scale = nn.Parameter(torch.randn(()))
        self.gain = nn.Parameter(torch.randn(features) * 0.1 + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.a.unsqueeze(0)
        x = x + self.a.view(1, ROWS, -1) + self.b.view(1, ROWS, -1)
        return torch.tanh(x * self.gain) * self.scale


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Positions() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def data(rank: int, step: int) -> torch.Tensor:
    return torch.randn(1, ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    return module(data(rank, step)).square().sum() / 1000


def expected_gradients(reference: nn.Module, ranks: int, steps: list[int]) -> dict[str, torch.Tensor]:
    """Sums over steps of means over ranks, added up outside of autograd, which adds to gradients that share memory."""
    names, parameters = zip(*reference.named_parameters(), strict=True)
    total = [torch.zeros_like(p) for p in parameters]
    for step in steps:
        for rank in range(ranks):
            for sum_, gradient in zip(
                total, torch.autograd.grad(loss_of(reference, rank, step), parameters), strict=True
            ):
                sum_.add_(gradient, alpha=1 / ranks)
    return dict(zip(names, total, strict=True))


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def build(front_end: str, rank: Rank, model: Model, **options: Any) -> Any:
    if front_end == "wrapped":
        for index, block in enumerate(model.blocks):
            model.blocks[index] = FSDP(block, use_orig_params=True, sharding_strategy=options.pop("strategy", None))
        return FSDP(model, use_orig_params=True)
    shard: Any = replicate if front_end == "replicated" else fully_shard
    if front_end == "hybrid":
        options["mesh"] = rank.make_mesh(rank.world_size // 2, 2) if rank.world_size > 2 else rank.make_mesh(2, 1)
    for block in model.blocks:
        shard(block, **options)
    return shard(model, **options)


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("front_end", ["sharded", "replicated", "hybrid"])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_every_holder_keeps_its_gradient(rank: Rank, front_end: str, microbatches: int) -> None:
    """Also of several microbatches without sync, and of gradients that add up over steps."""
    if front_end == "hybrid" and rank.world_size % 2:
        pytest.skip("two axes")
    reference = Model()
    model = build(front_end, rank, copy.deepcopy(reference))
    for step in range(2 * microbatches):
        model.set_requires_gradient_sync(step % microbatches == microbatches - 1)
        loss_of(model, rank.rank, step).backward()
    expected = expected_gradients(reference, rank.world_size, list(range(2 * microbatches)))
    for name, gradient in expected.items():
        assert_close(full(model.get_parameter(name).grad), gradient, name, rtol=1e-4, atol=1e-5)


@on_ranks(2, 3)
@pytest.mark.parametrize("front_end", ["sharded", "replicated"])
def test_division_before_the_sum(rank: Rank, front_end: str) -> None:
    """fp16 gradients are divided before they are summed; the memory that is divided is the reduction's own."""
    reference = Model()
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    model = build(front_end, rank, copy.deepcopy(reference).half(), mp_policy=policy)
    output = model(data(rank.rank, 0).half()).float()
    (output.square().sum() / 1000).backward()
    half = copy.deepcopy(reference).half().float()
    for name, gradient in expected_gradients(half, rank.world_size, [0]).items():
        found = full(model.get_parameter(name).grad).float()
        error = ((found - gradient).norm() / gradient.norm()).item()
        assert error < 0.02, f"{name}: {error}"  # fp16 rounds by 5e-4 a dozen times; halved gradients are off by 0.5


@on_ranks(1, 2)
@pytest.mark.parametrize("front_end", ["sharded", "replicated"])
def test_what_users_hold(rank: Rank, front_end: str) -> None:
    """The gradient of an activation that a user retains is not changed by what happens to a parameter's."""
    model = build(front_end, rank, Model())
    x = data(rank.rank, 0).requires_grad_()
    retained = []
    model.blocks[1].register_forward_pre_hook(lambda _, args: args[0].retain_grad() or retained.append(args[0]))
    model(x).square().sum().backward()
    grads = [t.grad.clone() for t in (x, *retained)]
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    model.zero_grad(set_to_none=False)
    for tensor, before in zip((x, *retained), grads, strict=True):
        assert_close(tensor.grad, before, "gradient of an activation", rtol=0)


@on_ranks(1, 2)
@pytest.mark.parametrize("front_end", ["sharded", "replicated"])
def test_clipping_and_steps(rank: Rank, front_end: str) -> None:
    """Clipping scales each gradient once; all parameters are trained, 0-D ones by a localized optimizer as well."""
    reference = Model()
    model = build(front_end, rank, copy.deepcopy(reference))
    optimizer = localize(torch.optim.SGD(model.parameters(), lr=0.1))
    expected = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(2):
        loss_of(model, rank.rank, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        gradients = expected_gradients(reference, rank.world_size, [step])
        for name, parameter in reference.named_parameters():
            parameter.grad = gradients[name]
        nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()
    for name, parameter in reference.named_parameters():
        assert_close(full(model.get_parameter(name).detach()), parameter.detach(), name, rtol=1e-4, atol=1e-5)
