"""``offload_activations`` beside an accelerator: the same bits, two units' activations at a time, and what stays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from on_device import built, data, on_device, peak_above
from torch import nn
from torch.utils.checkpoint import checkpoint

from front_ends import wrapped
from fullshard import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from fullshard.activation_checkpoint import checkpoint_wrapper, offload_activations
from fullshard.activation_offload import Activation, ActivationOffload
from fullshard.comm import record
from fullshard.wrap import ModuleWrapPolicy
from ranks import Rank
from ranks.device import forget_races

WIDTH, BLOCKS, ROWS = 32, 5, 24
HIDDEN = ROWS * 4 * WIDTH * 4  # bytes of one hidden activation
SMALL = {"min_bytes": 1024}


class Block(nn.Module):
    """Saves views and aliases, a product of two halves of one tensor, and its hidden layer twice."""

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.checkpoints = checkpoints

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = torch.tanh(self.up(x)).chunk(2, dim=-1)
        return self.down(torch.sigmoid(gate) * value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (checkpoint(self._mlp, x, use_reentrant=False) if self.checkpoints else self._mlp(x))


def build(checkpoints: bool = False) -> nn.Sequential:
    return built(lambda: nn.Sequential(*(Block(checkpoints) for _ in range(BLOCKS))))


def sharded(rank: Rank, model: nn.Sequential | None = None, **options: Any) -> Any:
    model = build() if model is None else model
    options = {"mesh": rank.mesh, **options}
    for module in (*model, model):
        fully_shard(module, **options)
    return model.to(rank.device) if "offload_policy" not in options else model


def batch(rank: Rank, step: int) -> torch.Tensor:
    return data(rank, step, ROWS, WIDTH)


def losses_of(rank: Rank, model: Any, steps: int = 3, microbatches: int = 1) -> list[torch.Tensor]:
    """Of Adam steps."""
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False), []
    for step in range(steps):
        for part in range(microbatches):
            if microbatches > 1:
                model.set_requires_gradient_sync(part == microbatches - 1)
            loss = model(batch(rank, step * microbatches + part)).float().square().mean()
            loss.backward()
            losses.append(loss.detach().cpu())
        optimizer.step()
        optimizer.zero_grad()
    return losses


# ---------------------------------------------------------------- the same bits


@on_device(2)
def test_losses_are_the_same_bit_for_bit(rank: Rank) -> None:
    """In fp32 and mixed precision, with microbatches, checkpoints, offloaded parameters, and the wrapper.

    The collectives are the same ones.
    """
    bf16, policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32), ModuleWrapPolicy({Block})
    for make, fraction, steps, microbatches in (
        (lambda: sharded(rank), 1.0, 5, 1),
        (lambda: sharded(rank, mp_policy=bf16), 0.5, 5, 2),
        (lambda: sharded(rank, build(checkpoints=True)), 1.0, 2, 1),
        (lambda: sharded(rank, offload_policy=CPUOffloadPolicy(fraction=0.5)), 1.0, 2, 1),
        (lambda: wrapped(build().to(rank.device), rank, auto_wrap_policy=policy), 1.0, 2, 1),
    ):
        results = []
        for share in (0.0, fraction):
            model = make()
            offload_activations(model, share, **SMALL)
            with record() as seen, copies() as moved:
                losses = losses_of(rank, model, steps, microbatches)
            assert len(moved) == (steps * microbatches * (BLOCKS - 1) if share else 0)
            results.append((losses, [(c.kind, c.dtype, c.unit) for c in seen]))
        assert all(map(torch.equal, results[0][0], results[1][0]))
        assert results[0][1] == results[1][1]


@on_device(4)
def test_losses_are_the_same_on_two_axes(rank: Rank) -> None:
    """With replicas and subgroups, parameters and activations offloaded in part."""
    mesh = rank.make_mesh(2, 2, names=("replicate", "shard"))
    expected = losses_of(rank, sharded(rank, mesh=mesh, offload_policy=OffloadPolicy()), 2)
    model = sharded(rank, mesh=mesh, offload_policy=CPUOffloadPolicy(fraction=0.4))
    offload_activations(model, 0.6, **SMALL)
    assert all(map(torch.equal, losses_of(rank, model, 2), expected))


@on_device(1)
def test_graphs_in_other_ways(rank: Rank) -> None:
    """Retained and dropped graphs, gradients of gradients, two forwards before a backward, failures, no gradients."""

    def gradients(model: Any) -> list[torch.Tensor]:
        x = batch(rank, 0).requires_grad_()
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        (first.square().mean() + model(x).mean()).backward()
        kept, dropped = model(batch(rank, 1)).mean(), model(batch(rank, 2)).mean()
        del dropped
        kept.backward()
        with torch.no_grad():
            model(batch(rank, 3))
        with pytest.raises(RuntimeError):
            model(batch(rank, 4)[:, 1:])
        outer: list[torch.Tensor] = []  # somebody's own hooks around the model
        with torch.autograd.graph.saved_tensors_hooks(lambda t: outer.append(t) or t.detach(), lambda t: t):
            model(batch(rank, 5)).mean().backward()
        assert outer
        checkpoint(model, x, use_reentrant=False).square().mean().backward()
        return [x.grad.cpu(), *(p.grad.to_local().cpu() for p in model.parameters())]

    expected = gradients(sharded(rank))
    model = sharded(rank)
    offload_activations(model, **SMALL)
    for ours, theirs in zip(gradients(model), expected, strict=True):
        assert torch.equal(ours, theirs)


@on_device(1)
def test_writes_to_saved_tensors_are_errors(rank: Rank) -> None:
    """As without offloading: of a tensor that is on its way to the host, and of one that stays on the device."""

    for number in range(4):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
        sharded(rank, model)
        offload_activations(model, **SMALL)
        model[number].register_forward_hook(lambda module, arguments, output: output.mul_(0.5))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(batch(rank, 0)).mean().backward()
    forget_races(rank.device)  # the writes come while the copies run


# ---------------------------------------------------------------- what is where


@contextlib.contextmanager
def copies() -> Iterator[list[int]]:
    """Bytes of the activations that are copied to the host, by unit."""
    seen: list[int] = []
    original = ActivationOffload._copy_to_host

    def noted(self: Any) -> None:
        seen.append(sum(part.numel() for _, part in self._leaving))
        original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ActivationOffload, "_copy_to_host", noted)
        yield seen


def _backward_of(model: Any, x: torch.Tensor) -> Callable[[], None]:
    return lambda: model(x).sum().backward()


@on_device(1, fresh=True)
def test_bytes_on_the_device(rank: Rank) -> None:
    """Each storage is copied once, in all units but the last; the peak falls by what is not there any more.

    A block saves its input, the hidden layer, one sigmoid and the product: 1 + 4 + 2 + 2 quarters of the hidden layer.
    """
    quarter, peaks = HIDDEN // 4, {}
    for fraction in (0.0, 0.5, 1.0):
        model = sharded(rank)
        offload_activations(model, fraction, **SMALL)
        x = batch(rank, 0)
        for _ in range(2):
            model(x).sum().backward()
        with copies() as seen:
            peaks[fraction], _ = peak_above(rank.device, _backward_of(model, x))
        per_unit = (1 + 4 + 2 + 2) * quarter
        if fraction == 1.0:
            assert seen == [per_unit] * (BLOCKS - 1)
        assert fraction * per_unit * (BLOCKS - 1) - HIDDEN <= sum(seen) <= fraction * per_unit * (BLOCKS - 1)
    # Two units' are left, and by the peak, which is in the second backward, the others have one less.
    assert peaks[0.0] - peaks[1.0] >= (BLOCKS - 3) * per_unit
    assert peaks[0.0] > peaks[0.5] > peaks[1.0]


@on_device(1)
def test_what_is_refused(rank: Rank) -> None:
    """Arguments out of range, modules that are not sharded, and models without units."""
    model = sharded(rank)
    for wrong, error, text in (
        ({"fraction": 1.5}, ValueError, "from 0 to 1, found 1.5"),
        ({"fraction": -0.1}, ValueError, "from 0 to 1"),
        ({"fraction": True}, TypeError, "expected a number"),
        ({"min_bytes": -1}, ValueError, "at least 0"),
        ({"min_bytes": 1.0}, TypeError, "expected an int"),
        ({"pin_memory": 1}, TypeError, "True or False"),
        ({"modules": [model[0].up]}, ValueError, "found a Linear"),
    ):
        with pytest.raises(error, match=text):
            offload_activations(model, **wrong)
    with pytest.raises(TypeError, match="expected a module"):
        offload_activations([model])
    with pytest.raises(ValueError, match="no sharded module inside"):
        offload_activations(fully_shard(nn.Linear(4, 4), mesh=rank.mesh))
    plain = checkpoint_wrapper(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="no sharded module"):
        offload_activations(plain)


@on_device(2)
def test_memory_that_is_freed_in_place_is_no_activation(rank: Rank) -> None:
    """Nor are ignored parameters and buffers; another root's module that a block calls gets the right gradients."""

    class Calls(nn.Module):
        def __init__(self, helper: list[nn.Module]) -> None:
            super().__init__()
            self.linear, self.helper = nn.Linear(WIDTH, WIDTH), helper  # a list: no submodule
            self.ignored = nn.Linear(WIDTH, 16 * WIDTH, bias=False)
            self.back = nn.Linear(16 * WIDTH, WIDTH)
            self.register_buffer("scale", torch.rand(ROWS, 16 * WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.linear(x))
            for module in self.helper:
                x = module(x)
            return self.back(self.ignored(x) * self.scale)

    def gradients(fraction: float) -> tuple[list[torch.Tensor], list[int]]:
        helper = built(nn.Linear, WIDTH, WIDTH, False)
        model = built(lambda: nn.Sequential(Calls([helper]), Calls([]), Calls([])))
        ignored = {block.ignored.weight for block in model}
        fully_shard(helper, mesh=rank.mesh)
        for module in (*model, model):
            fully_shard(module, mesh=rank.mesh, ignored_params=ignored)
        for each in (helper, model):
            each.to(rank.device)
        offload_activations(model, fraction, min_bytes=1)
        for _ in range(2):
            with copies() as seen:
                model(batch(rank, 0)).square().mean().backward()
        trained = [*model.named_parameters(), *helper.named_parameters()]
        return [p.grad.to_local().cpu() for name, p in trained if "ignored" not in name], seen

    (expected, _), (found, moved) = gradients(0.0), gradients(1.0)
    assert all(map(torch.equal, found, expected))
    rows = ROWS * 4  # bytes of a column
    # Input of the first layer, of the ignored one and (where there is one) of the helper, and of the last one.
    assert moved == [rows * WIDTH * (3 + 16), rows * WIDTH * (2 + 16)]


@on_device(1)
def test_a_retained_graph_keeps_nothing_on_the_device(rank: Rank) -> None:
    """A second backward copies activations to the device again, and they are freed when it ends, like in the first."""
    model = sharded(rank)
    offload_activations(model, **SMALL)
    for _ in range(2):
        loss = model(batch(rank, 0)).square().mean()
        loss.backward(retain_graph=True)
        with used() as seen:
            loss.backward(retain_graph=True)
        assert len({activation.forward for activation in seen}) == BLOCKS - 1
        assert all(not activation.saved and activation.device is None for activation in seen)


@contextlib.contextmanager
def used() -> Iterator[list[Activation]]:
    """Yield the activations that are used on the device again, as often as they are."""
    seen: list[Activation] = []
    original = Activation.on_device

    def noted(self: Activation) -> torch.Tensor:
        seen.append(self)
        return original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Activation, "on_device", noted)
        yield seen
