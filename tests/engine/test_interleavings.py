"""Orders of events that once lost gradients or handed out the wrong memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from compare import assert_close
from fullshard import fully_shard, replicate
from ranks import Rank, on_ranks

WIDTH = 8


def build() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def loss(model: nn.Module, rank: Rank, step: int) -> torch.Tensor:
    batch = torch.randn(rank.world_size, 3, WIDTH, generator=torch.Generator().manual_seed(step))
    is_reference = not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return model(batch.flatten(0, 1) if is_reference else batch[rank.rank]).square().mean()


def close_gradients(model: nn.Module, reference: nn.Module) -> None:
    full = [None if p.grad is None else p.grad.full_tensor() for p in model.parameters()]
    for gradient, (name, plain) in zip(full, reference.named_parameters(), strict=True):
        assert (gradient is None) == (plain.grad is None), name
        if gradient is not None:
            assert_close(gradient, plain.grad, name, rtol=1e-5, atol=1e-7)


@on_ranks(2)
def test_frozen_in_mid_accumulation(rank: Rank) -> None:
    """A parameter frozen between microbatches keeps the gradient of the first, now and not after it is unfrozen."""
    model, reference = build(), build()
    for layer in model:
        fully_shard(layer, mesh=rank.mesh)
    fully_shard(model, mesh=rank.mesh)
    for part in (model, reference):
        if part is model:
            model.set_requires_gradient_sync(False)
        loss(part, rank, 0).backward()
        part[1].weight.requires_grad_(False)
        if part is model:
            model.set_requires_gradient_sync(True)
        loss(part, rank, 1).backward()
    close_gradients(model, reference)
    for part in (model, reference):
        part[1].weight.requires_grad_(True)
        part.zero_grad()
        loss(part, rank, 2).backward()
    close_gradients(model, reference)


class Branches(nn.Module):
    """The second branch takes part in a forward only if asked."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.trunk, self.branch, self.both = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.trunk(x)
        return self.branch(x) if self.both else x


@on_ranks(4)
@pytest.mark.parametrize("kind", ["hsdp", "replicate"])
def test_unit_that_the_last_microbatch_does_not_touch(rank: Rank, kind: str) -> None:
    """What a unit owes the replicate axis is paid at the last backward, also while its reduction is under way."""
    model, reference = Branches(), Branches()
    mesh = init_device_mesh(rank.device.type, (2, 2) if kind == "hsdp" else (4,))
    apply = fully_shard if kind == "hsdp" else replicate
    for module in (model.trunk, model.branch, model):
        apply(module, mesh=mesh)
    for step, last in ((0, False), (1, True)):
        model.both = reference.both = not last
        model.set_requires_all_reduce(last)
        model.set_is_last_backward(last)
        loss(model, rank, step).backward()
        loss(reference, rank, step).backward()
    close_gradients(model, reference)


@on_ranks(2)
def test_gradient_of_another_placement(rank: Rank) -> None:
    """A replicated gradient that the user has set is added to as DTensors are."""
    model, reference = build(), build()
    fully_shard(model, mesh=rank.mesh)
    for part in (model, reference):
        weight = part[0].weight
        ones = torch.ones(WIDTH, WIDTH)
        weight.grad = DTensor.from_local(ones, rank.mesh, [Replicate()]) if part is model else ones
        loss(part, rank, 0).backward()
    close_gradients(model, reference)


@on_ranks(2)
def test_gather_that_failed_is_done_again(rank: Rank) -> None:
    """After a gather that raised on all ranks, the next one gathers instead of handing out what is not there."""

    class Refuses:
        def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        def __call__(self, **_: object) -> None:
            raise RuntimeError("refused")

    model = build()
    plain = copy.deepcopy(model)
    fully_shard(model, mesh=rank.mesh)
    model.set_custom_all_gather(Refuses())
    with pytest.raises(RuntimeError, match="refused"):
        model.unshard()
    model.set_custom_all_gather(None)
    model.unshard()
    for full, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(full.detach(), expected.detach(), "parameter", rtol=0)
    model.reshard()
