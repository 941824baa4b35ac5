"""``fullshard.optim.offload`` beside an accelerator: the bits of a step on the device, and state in host memory."""

from __future__ import annotations

import copy
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from on_device import built, data, fake_mesh, on_device, peak_above
from torch.distributed.tensor import DTensor

import fullshard
from front_ends import COMPOSABLE, FLAT, ORIGINAL, FrontEnd
from fullshard import CPUOffloadPolicy, MixedPrecisionPolicy
from fullshard.optim import localize, offload
from models import Mlp
from ranks import Rank

WIDTH, LAYERS = 32, 4
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def sharded(rank: Rank, front_end: FrontEnd = COMPOSABLE, width: int = WIDTH, **options: Any) -> Any:
    return front_end.wrap(built(Mlp, *[width] * (LAYERS + 1)), rank, **options)


def train(rank: Rank, model: Any, optimizer: Any, steps: int = 3, first: int = 0) -> list[torch.Tensor]:
    losses = []
    for step in range(first, first + steps):
        for last in (False, True):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(last)
            loss = model(data(rank, 2 * step + last, 8, WIDTH)).float().square().mean()
            loss.backward()
            losses.append(loss.detach().cpu())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def state_of(optimizer: Any) -> list[torch.Tensor]:
    """All elementwise state, this rank's parts of it."""
    entries = (entry for own in optimizer.state.values() for entry in own.values())
    tensors = (entry for entry in entries if isinstance(entry, torch.Tensor) and entry.dim())
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


@on_device(2)
def test_losses_and_state_are_the_same_bit_for_bit(rank: Rank) -> None:
    """Of five or three steps: Adam and SGD, mixed precision, wrappers, in many parts."""
    adam = partial(torch.optim.AdamW, lr=1e-2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["fullshard.optim.offload"], "PART_BYTES", 1)
        for make, options, steps in (
            (adam, {}, 5),
            (partial(adam, amsgrad=True, foreach=True), {"mp_policy": BF16}, 5),
            (partial(torch.optim.SGD, lr=1e-2, momentum=0.9), {}, 3),
            (adam, {"front_end": FLAT}, 3),
            (adam, {"front_end": ORIGINAL}, 3),
        ):
            results = []
            for share in (0, 1):
                model = sharded(rank, **options)
                optimizer = localize(make(model.parameters()))
                if share:
                    offload(optimizer)
                losses = train(rank, model, optimizer, steps)
                results.append((losses, [each.cpu() for each in state_of(optimizer)]))
                on_host = sum(each.nbytes for each in state_of(optimizer) if each.device.type == "cpu")
                assert on_host == share * sum(each.nbytes for each in state_of(optimizer))
                assert all(each.is_pinned() for each in state_of(optimizer) if each.device.type == "cpu")
            for ours, theirs in zip(results[1], results[0], strict=True):
                assert all(map(torch.equal, ours, theirs))


@on_device(2)
def test_state_that_is_loaded_saved_and_moved(rank: Rank) -> None:
    """Loaded state goes to the host, and is stepped as on the device."""
    model = sharded(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(rank, model, optimizer, 1)
    state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    expected = train(rank, model, optimizer, 3, first=1)

    model = sharded(rank)
    model.load_state_dict(weights)
    optimizer = offload(torch.optim.AdamW(model.parameters(), lr=1e-2))
    optimizer.load_state_dict(state)
    assert {each.device.type for each in state_of(optimizer)} == {"cpu"}
    losses = train(rank, model, optimizer, 3, first=1)
    assert all(map(torch.equal, losses, expected))


@on_device(1)
def test_a_step_that_raises(rank: Rank) -> None:
    """State is complete and right wherever it is then, and the next step goes on with it."""

    class Fails(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails and any(group["params"] for group in self.param_groups):
                raise ValueError("stop")
            return super().step()

    results = []
    for is_offloaded in (False, True):
        model = sharded(rank)
        optimizer = localize(Fails(model.parameters(), lr=0.1, momentum=0.9), elementwise=True)
        if is_offloaded:
            offload(optimizer)
        train(rank, model, optimizer, 1)
        optimizer.fails = True
        with pytest.raises(ValueError, match="stop"):
            train(rank, model, optimizer, 1, first=1)
        optimizer.fails = False
        train(rank, model, optimizer, 1, first=2)
        results.append([each.cpu() for each in state_of(optimizer)])
    assert all(map(torch.equal, *results))


@on_device(1, fresh=True)
def test_bytes_on_the_device(rank: Rank) -> None:
    """After a step the device has lost exactly the state that is offloaded; during it, three parts of it are there."""
    held, peaks = {}, {}
    with fake_mesh(rank, 4) as mesh, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["fullshard.optim.offload"], "PART_BYTES", 1)
        for is_offloaded in (False, True):
            model = sharded(rank, width=256, mesh=mesh)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
            if is_offloaded:
                offload(optimizer)
            memory = torch.get_device_module(rank.device)
            before = memory.memory_allocated()
            model(torch.ones(8, 256, device=rank.device)).sum().backward()
            optimizer.step()
            peaks[is_offloaded], _ = peak_above(rank.device, optimizer.step)
            optimizer.zero_grad()
            held[is_offloaded] = memory.memory_allocated() - before
            state = sum(each.nbytes for each in state_of(optimizer))
            del model, optimizer
    assert held[False] - held[True] == pytest.approx(state, rel=0.02)  # the allocator rounds small biases up
    assert peaks[True] - peaks[False] <= 1.02 * 3 * state / LAYERS


@on_device(1)
def test_what_is_refused(rank: Rank) -> None:
    """Wrong arguments, optimizers that are not elementwise, and state that is on the host anyway: a warning."""
    model = sharded(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="True or False"):
        offload(optimizer, pin_memory=1)
    with pytest.raises(TypeError, match=r"expected a torch\.optim\.Optimizer"):
        offload(model)
    with pytest.raises(ValueError, match="an elementwise optimizer, found LBFGS"), pytest.warns(match="LBFGS"):
        offload(torch.optim.LBFGS(model.parameters()))
    on_host = sharded(rank, offload_policy=CPUOffloadPolicy())
    with pytest.warns(UserWarning, match="no effect: all parameters"):
        optimizer = offload(torch.optim.AdamW(on_host.parameters()))
    train(rank, on_host, optimizer, 1)


@on_device(2)
def test_checkpoints(rank: Rank, tmp_path: Path) -> None:
    """A save reads state in host memory, and a load writes it; training continues bit for bit."""
    path = tmp_path / "step"
    model = sharded(rank)
    optimizer = offload(torch.optim.AdamW(model.parameters(), lr=1e-2))
    train(rank, model, optimizer, 2)
    fullshard.save(path, model, optimizer)
    expected = train(rank, model, optimizer, 2, first=2)
    model = sharded(rank)
    optimizer = offload(torch.optim.AdamW(model.parameters(), lr=1e-2))
    fullshard.load(path, model, optimizer)
    assert all(map(torch.equal, train(rank, model, optimizer, 2, first=2), expected))
    assert {each.device.type for each in state_of(optimizer)} == {"cpu"}
