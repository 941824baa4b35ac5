"""Sharded models that are moved off the device and back: ``cpu()``, ``to()``, ``to_empty()``."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from on_device import built, data, on_device
from torch import nn
from torch.distributed.tensor import DTensor

from compare import assert_close
from front_ends import COMPOSABLE, FRONT_ENDS, ORIGINAL, RAGGED, FrontEnd, assert_same_values, full_values, unwrapped
from fullshard.errors import FullshardError
from pairwise import each_value
from ranks import Rank

WIDTH = 512
SIZES = ((4, WIDTH), (WIDTH, WIDTH), (WIDTH, 3))


def build(device: torch.device) -> nn.Sequential:
    return built(
        lambda: nn.Sequential(nn.Linear(4, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)), device=device
    )


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
@each_value(front_end=FRONT_ENDS, flag=["none", "swap", "overwrite"])
def test_a_model_moves_to_the_cpu_and_back(rank: Rank, front_end: FrontEnd, flag: str) -> None:
    """Off the device, shards, gradients and optimizer state need none of its memory; back on it, training goes on.

    The parameter objects stay the same, and so does the optimizer. A forward in between says what to do.
    """
    if flag != "none":
        getattr(torch.__future__, f"set_{flag}_module_params_on_conversion")(True)
    try:
        model, twin = (front_end.wrap(build(rank.device), rank) for _ in range(2))
        optimizer, other = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, twin))
        for step in range(2):
            step_on(model, optimizer, data(rank, step, 2, 4))
            step_on(twin, other, data(rank, step, 2, 4))
        objects = [id(p) for p in model.parameters()]
        model.cpu()
        move_state(optimizer, torch.device("cpu"))
        for p in model.parameters():
            assert p.device.type == "cpu" and p.grad is not None and p.grad.device.type == "cpu"
            assert not isinstance(p, DTensor) or p.to_local().device.type == "cpu"
        with pytest.raises(FullshardError, match=rf"was moved to cpu.*model\.to\('{rank.device}'\)"):
            model(data(rank, 2, 2, 4))
        assert_same_values(model, twin)
        assert_same_values(copy.deepcopy(model), twin)
        model.to(rank.device)
        move_state(optimizer, rank.device)
        assert objects == [id(p) for p in model.parameters()]
        for step in range(2, 4):
            step_on(model, optimizer, data(rank, step, 2, 4))
            step_on(twin, other, data(rank, step, 2, 4))
        assert_same_values(model, twin)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
        torch.__future__.set_overwrite_module_params_on_conversion(False)


@on_device(2)
@each_value(front_end=FRONT_ENDS, way=["cpu", "to_empty", "meta"])
def test_what_is_moved_needs_no_device_memory(rank: Rank, front_end: FrontEnd, way: str) -> None:
    """Shards and gradients leave the device, with their values or without; brought back, they train."""
    empty = allocated(rank)
    model = front_end.wrap(build(rank.device), rank)
    shards = allocated(rank) - empty
    model(data(rank, 0, 2, 4)).square().mean().backward()
    values, before = full_values(model), allocated(rank)
    model.to_empty(device="cpu") if way == "to_empty" else model.to(way)
    assert before - allocated(rank) > 1.9 * shards, (empty, shards, before, allocated(rank))
    model.to(rank.device) if way == "cpu" else model.to_empty(device=rank.device)
    if way == "cpu":
        after = full_values(model)
        for name, value in values.items():
            assert_close(after[name], value, name, rtol=0)
    else:
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.5)
    model.zero_grad()
    model(data(rank, 0, 2, 4)).square().mean().backward()
    assert all(p.grad is not None and p.grad.device == p.device == rank.device for p in model.parameters())


@on_device(2)
@pytest.mark.parametrize("front_end", [COMPOSABLE, ORIGINAL, RAGGED], ids=str)  # flat modules have no parameters
def test_a_part_that_was_moved_is_named(rank: Rank, front_end: FrontEnd) -> None:
    """A submodule of a unit, moved by itself, is found at the next forward; moved back, it trains on."""
    model, twin = (front_end.wrap(build(rank.device), rank, []) for _ in range(2))
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    inner = unwrapped(model)[1]
    inner.cpu()
    if front_end.composable:  # else torch has made new parameter objects, which are loaded into the shards
        with pytest.raises(FullshardError, match=r"1\.(weight|bias).*was moved to cpu"):
            model(data(rank, 0, 2, 4))
        inner.to(rank.device)
        step_on(model, optimizer, data(rank, 0, 2, 4))
        step_on(twin, other, data(rank, 0, 2, 4))
    assert_same_values(model, twin)
