"""Memory that offloaded gradients and state are copied from and to."""

from __future__ import annotations

import copy

import torch
from on_device import on_device
from torch import nn

from fullshard import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from fullshard.engine.parameters.sharded import value_of
from fullshard.optim import offload
from ranks import Rank


@on_device(1)
def test_steps_use_the_same_memory(rank: Rank) -> None:
    """Pinned memory is slow to allocate, so state returns to where it was."""
    model = fully_shard(nn.Linear(8, 8), mesh=rank.mesh).to(rank.device)
    optimizer = offload(torch.optim.AdamW(model.parameters()))
    places = []
    for _ in range(3):
        model(torch.ones(2, 8, device=rank.device)).sum().backward()
        optimizer.step()
        state = [value_of(entry) for own in optimizer.state.values() for entry in own.values() if entry.dim()]
        places.append([value.data_ptr() for value in state])
    assert places[0] == places[1] == places[2] and len(set(places[0])) == 4


@on_device(2)
def test_gradients_that_are_cast_arrive_as_they_were(rank: Rank) -> None:
    """Reduced in bf16, and in fp32 in CPU memory: backward does not use the memory of the cast ones meanwhile."""
    gradients = []
    for policy in (OffloadPolicy(), CPUOffloadPolicy()):
        torch.manual_seed(0)
        with torch.device("cpu"):
            model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
        for module in (*model, model):
            fully_shard(module, mesh=rank.mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16), offload_policy=policy)
        if not isinstance(policy, CPUOffloadPolicy):
            model.to(rank.device)
        for _ in range(3):
            model(torch.ones(8, 64, device=rank.device)).square().mean().backward()
        gradients.append([value_of(parameter.grad).cpu() for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))


@on_device(2)
def test_writes_after_a_backward_that_ends_early(rank: Rank) -> None:
    """What backward has prefetched for units that it does not reach has been read before the host goes on."""

    class EndsEarly(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self[3](self[2](self[1](self[0](x)).detach()))

    with torch.device("cpu"):
        plain = EndsEarly(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    model, x = copy.deepcopy(plain), torch.ones(8, 64, device=rank.device)
    for module in (*model, model):
        fully_shard(module, mesh=rank.mesh, offload_policy=CPUOffloadPolicy())
    for _ in range(3):
        model(x).square().mean().backward()
        with torch.no_grad():
            for parameter in (*model.parameters(), *plain.parameters()):
                value_of(parameter).mul_(0.5)
    torch.testing.assert_close(model(x), plain.to(rank.device)(x), rtol=1e-3, atol=1e-6)
