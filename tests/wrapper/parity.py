"""Training of a wrapped model beside the same model unsharded, and what a module was before something was tried."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from compare import assert_close, assert_equal
from fullshard import FullyShardedDataParallel
from fullshard.engine.ownership import unit_of
from ranks import Rank

LossOf = Callable[[nn.Module, torch.Tensor], torch.Tensor]  # (model, this rank's batch) -> loss


class Block(nn.Module):
    """A residual pair of linear layers behind a norm; no number of elements is even."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 7), nn.Linear(7, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks between two linear layers, and a buffer of floats and one of integers."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(6, 3)
        self.register_buffer("shift", torch.linspace(0.0, 0.1, 6))
        self.register_buffer("count", torch.tensor(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = x + self.shift.to(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Tied(nn.Module):
    """Two blocks with the same first layer, and a head that is the transpose of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(6, 6, bias=False)
        self.blocks = nn.Sequential(Block(), Block())
        self.blocks[1].up.weight = self.blocks[0].up.weight
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(x)))


def built(make: Callable[..., nn.Module], *args: Any, seed: int = 0) -> nn.Module:
    """A model with the same values on all ranks."""
    torch.manual_seed(seed)
    return make(*args)


def batch(rank: int, step: int, *shape: int) -> torch.Tensor:
    """Normal numbers that depend on ``rank`` and ``step`` only."""
    return torch.randn(*(shape or (4, 6)), generator=torch.Generator().manual_seed(1000 * step + rank))


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The loss of most tests."""
    return model(x).float().square().mean()


def units_of(model: nn.Module) -> list[str]:
    """Names, as before wrapping, of the modules inside ``model`` that are wrapped; "" is the outermost."""
    names = []
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            names.append(name.replace("_fsdp_wrapped_module.", "").removesuffix("_fsdp_wrapped_module").rstrip("."))
    return names


def assert_trains_alike(
    model: Any,
    reference: nn.Module,
    rank: Rank,
    *,
    peers: Sequence[int] | None = None,
    steps: int = 3,
    microbatches: int = 1,
    loss_of: LossOf = mean_square,
    shape: Sequence[int] = (4, 6),
    rtol: float = 1e-4,
    atol: float = 1e-6,
) -> None:
    """Require the losses of each step, and all parameters and buffers in the end, to be the unsharded model's.

    Args:
        model: Wrapped; all ranks call this.
        reference: What it was before. Learns from the mean over ranks of the gradients.
        rank: This one.
        peers: The ranks whose gradients are averaged; None: all.
        steps: Of the optimizer.
        microbatches: Backwards per step, all but the last in ``no_sync``.
        loss_of: The loss of a batch.
        shape: Of each rank's batch.
        rtol, atol: As in ``assert_close``.
    """
    peers = range(rank.world_size) if peers is None else peers
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.2, momentum=0.9) for m in (model, reference)]
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for micro in range(microbatches):
            index = step * microbatches + micro
            wanted = 0.0
            for peer in peers:
                loss = loss_of(reference, batch(peer, index, *shape))
                (loss / len(peers)).backward()
                wanted = loss.item() if peer == rank.rank else wanted
            with model.no_sync() if micro < microbatches - 1 else contextlib.nullcontext():
                loss = loss_of(model, batch(rank.rank, index, *shape))
                loss.backward()
            assert_close(loss.detach(), torch.tensor(wanted), f"loss of step {step}", max(rtol, 1e-5), 1e-7)
        for optimizer in optimizers:
            optimizer.step()
    assert_states_alike(model, reference, rtol, atol)


def assert_states_alike(model: nn.Module, reference: nn.Module, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Require the same keys in the same order, and close values; bitwise equal ones without tolerances."""
    found, wanted = model.state_dict(), reference.state_dict()
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        if rtol == atol == 0:
            assert_equal(found[name], value, name)
        else:
            assert_close(found[name], value, name, rtol, atol)


class Snapshot(NamedTuple):
    """What a module was."""

    modules: dict[str, nn.Module]
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    values: dict[str, torch.Tensor]
    trainable: dict[str, bool]
    attributes: dict[str, set[str]]  # of each module

    @classmethod
    def of(cls, module: nn.Module) -> Snapshot:
        """What ``module`` is."""
        parameters = dict(module.named_parameters(remove_duplicate=False))
        buffers = dict(module.named_buffers(remove_duplicate=False))
        return cls(
            dict(module.named_modules(remove_duplicate=False)),
            parameters,
            buffers,
            {name: value.detach().clone() for name, value in (*parameters.items(), *buffers.items())},
            {name: parameter.requires_grad for name, parameter in parameters.items()},
            {name: set(m.__dict__) for name, m in module.named_modules(remove_duplicate=False)},
        )

    def assert_unchanged(self, module: nn.Module, *, meta: bool = False) -> None:
        """Require ``module`` to be the same: objects, names and order, values, and no unit anywhere.

        Args:
            module: As it is now.
            meta: Whether what was on the meta device may have been replaced.
        """
        now = Snapshot.of(module)
        assert list(now.modules.items()) == list(self.modules.items())
        assert now.attributes == self.attributes
        assert list(now.trainable.items()) == list(self.trainable.items())
        assert list(now.parameters) == list(self.parameters) and list(now.buffers) == list(self.buffers)
        for name, value in self.values.items():
            if value.is_meta and meta:
                continue
            held = {**self.parameters, **self.buffers}[name]
            assert {**now.parameters, **now.buffers}[name] is held, name
            assert held.stride() == value.stride() or value.is_meta, name
            if value.is_meta:
                assert held.is_meta and held.shape == value.shape
            else:
                assert_equal(held.detach(), value, name)
        for name, parameter in now.parameters.items():
            assert type(parameter) is nn.Parameter and parameter.is_leaf, name
        assert [name for name, m in now.modules.items() if unit_of(m) is not None] == []
