"""Tensor and sequence parallelism, then FSDP by torch's names, on 2x2 ranks.

What the engine does with tensor-parallel parameters is tested in tests/engine/test_tensor_parallel.py.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import fullshard
from compare import assert_close
from fullshard import dropin
from ranks import Rank, on_ranks

CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-6}
WHOLE = StateDictOptions(full_state_dict=True)
VOCABULARY, DIM = 12, 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Token ids to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def ids_of(replica: int, step: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, 4), generator=torch.Generator().manual_seed(10 * step + replica))


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())


def cut(model: Net, mesh: DeviceMesh, style: str) -> Net:
    """Columns and rows inside the layers; or all of it, with the sequence cut between, and the logits too."""
    if style == "tensor":
        for layer in model.layers:
            parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return model
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=style != "loss"),
    }
    if style == "sequence":
        plan["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    for number in range(len(model.layers)):
        plan[f"layers.{number}.norm"] = SequenceParallel()
        plan[f"layers.{number}.up"] = ColwiseParallel(input_layouts=Shard(1))
        plan[f"layers.{number}.down"] = RowwiseParallel(output_layouts=Shard(1))
    return parallelize_module(model, mesh, plan)


def shard(model: nn.Module, mesh: DeviceMesh, kind: str) -> nn.Module:
    fsdp = importlib.import_module("torch.distributed.fsdp")
    if kind in ("flat", "orig"):
        policy = fsdp.wrap.ModuleWrapPolicy({Layer})
        return fsdp.FullyShardedDataParallel(
            model, device_mesh=mesh, auto_wrap_policy=policy, use_orig_params=kind == "orig"
        )
    function = fsdp.fully_shard
    if kind == "replicate":
        function = importlib.import_module("torch.distributed._composable.replicate_with_fsdp").replicate
    for layer in model.layers:  # type: ignore[union-attr]
        function(layer, mesh=mesh)
    return function(model, mesh=mesh)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.02, foreach=False)


class Reference(NamedTuple):
    """The unsharded model after its training, losses by step and replica, and gradient norms."""

    model: Net
    optimizer: torch.optim.Optimizer
    losses: list[list[float]]
    norms: list[float]


def reference(steps: int, clip: float) -> Reference:
    model = net()
    optimizer = adam(model)
    losses: list[list[float]] = []
    norms: list[float] = []
    for step in range(steps):
        losses.append([])
        for replica in range(2):
            loss = loss_of(model, ids_of(replica, step))
            (loss / 2).backward()
            losses[-1].append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
    return Reference(model, optimizer, losses, norms)


@on_ranks(4)
@pytest.mark.parametrize(
    ("kind", "style"),
    [
        ("rows", "loss"),
        ("flat", "tensor"),
        ("orig", "sequence"),
    ],
)
def test_trains_like_the_unsharded_model(rank: Rank, kind: str, style: str) -> None:
    """Losses, gradient norms and, after steps with clipping, parameters and optimizer state; then set again."""
    mesh = rank.make_mesh(2, 2, names=("dp", "tp"))
    replica = mesh["dp"].get_local_rank()
    plain, plain_optimizer, losses, norms = reference(3, clip=0.1)
    assert min(norms) > 0.1, "nothing would be clipped"
    with dropin.install(quiet=True):
        model = shard(cut(net(), mesh["tp"], style), mesh["dp"], kind)
        optimizer = adam(model)
        for step in range(3):
            ids = ids_of(replica, step)
            if style == "loss":
                with loss_parallel():
                    loss = loss_of(model, ids)
                    loss.backward()
            else:
                loss = loss_of(model, ids)
                loss.backward()
            found = loss.full_tensor() if isinstance(loss, DTensor) else loss
            assert found.item() == pytest.approx(losses[step][replica], rel=1e-5)
            norm = clip(model, 0.1, style)
            assert norm == pytest.approx(norms[step], rel=1e-4)
            optimizer.step()
            optimizer.zero_grad()
        state = get_model_state_dict(model, options=WHOLE)
        optim = get_optimizer_state_dict(model, optimizer, options=WHOLE)
        compare(state, optim, plain, plain_optimizer)
        other = shard(cut(net(), mesh["tp"], style), mesh["dp"], kind)
        fresh = adam(other)
        set_model_state_dict(other, state, options=WHOLE)
        set_optimizer_state_dict(other, fresh, optim_state_dict=optim, options=WHOLE)
        again = get_model_state_dict(other, options=WHOLE), get_optimizer_state_dict(other, fresh, options=WHOLE)
        compare(*again, plain, plain_optimizer)


def clip(model: Any, most: float, style: str) -> float:
    if hasattr(model, "clip_grad_norm_"):
        norm = model.clip_grad_norm_(most)
    elif style == "tensor":  # torch's does not take parameters on several meshes, on either engine
        norm = fullshard.clip_grad_norm_(model.parameters(), most)
    else:
        norm = nn.utils.clip_grad_norm_(model.parameters(), most, foreach=False)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def compare(state: dict[str, Any], optim: dict[str, Any], plain: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    expected = plain.state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(state[name], value, name, **CLOSE)
        for key, moment in optimizer.state[plain.get_parameter(name)].items():
            assert_close(optim["state"][name][key], moment, f"{name}.{key}", **CLOSE)
