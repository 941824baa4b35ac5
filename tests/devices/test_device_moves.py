"""Sharded models that are moved off the device and back: ``cpu()``, ``to()``, ``to_empty()``."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from on_device import on_device
from torch import nn
from torch.distributed.tensor import DTensor

from compare import assert_close
from fullshard.engine.ownership import nested_units
from fullshard.errors import FullshardError
from front_ends import FrontEnd, assert_same_values, each_front_end, full_values
from ranks import Rank

WIDTH = 512


def build(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    with device:
        return nn.Sequential(nn.Linear(4, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))


def data(rank: Rank, step: int) -> torch.Tensor:
    with torch.device("cpu"):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + rank.rank))
    return x.to(rank.device)


def step_on(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def allocated(rank: Rank) -> int:
    gc.collect()
    torch.accelerator.synchronize()
    return torch.get_device_module(rank.device).memory_allocated()


def move_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                state[name] = value.to(device)


@on_device(1, 2)
@each_front_end
@pytest.mark.parametrize("flag", ["none", "swap", "overwrite"])
def test_a_model_moves_to_the_cpu_and_back(rank: Rank, front_end: FrontEnd, flag: str) -> None:
    """Off the device, shards, gradients and optimizer state need none of its memory; back on it, training goes on.

    The parameter objects stay the same, and so does the optimizer. A forward in between says what to do.
    """
    if flag != "none":
        getattr(torch.__future__, f"set_{flag}_module_params_on_conversion")(True)
    try:
        empty = allocated(rank)
        model, twin = (front_end.wrap(build(rank.device), rank) for _ in range(2))
        optimizer, other = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, twin))
        shards = allocated(rank) - empty
        for step in range(2):
            step_on(model, optimizer, data(rank, step))
            step_on(twin, other, data(rank, step))
        before, objects = allocated(rank), [id(p) for p in model.parameters()]
        model.cpu()
        move_state(optimizer, torch.device("cpu"))
        # Half of it is the twin's. What is left of the model are small tensors of streams and messages.
        assert before - allocated(rank) > 1.9 * shards, (before, allocated(rank), shards)
        for p in model.parameters():
            assert p.device.type == "cpu" and p.grad is not None and p.grad.device.type == "cpu"
            assert not isinstance(p, DTensor) or p.to_local().device.type == "cpu"
        with pytest.raises(FullshardError, match=rf"was moved to cpu.*model\.to\('{rank.device}'\)"):
            model(data(rank, 2))
        assert_same_values(copy.deepcopy(model), twin)
        model.to(rank.device)
        move_state(optimizer, rank.device)
        assert objects == [id(p) for p in model.parameters()]
        for step in range(2, 4):
            step_on(model, optimizer, data(rank, step))
            step_on(twin, other, data(rank, step))
        assert_same_values(model, twin)
        del model, optimizer
        assert abs(allocated(rank) - empty) < 1.2 * (before - empty) / 2
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
        torch.__future__.set_overwrite_module_params_on_conversion(False)
