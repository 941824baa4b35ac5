"""Quantized weights of torchao: frozen NF4 with adapters, float8 all-gathers. Skipped where torchao is missing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

pytest.importorskip("torchao")

from compare import assert_close, assert_equal
from fullshard import fully_shard
from fullshard.comm import record
from models import batch, reference_backward, square_loss
from ranks import Rank, on_ranks

AFTER_ADAM: dict[str, float] = {"rtol": 1e-3, "atol": 1e-5}
BLOCK, SCALER_BLOCK = 32, 2  # smaller than torchao's defaults, so that small weights can be cut


class Nf4Adapted(nn.Module):
    """A frozen NF4 weight with trainable low-rank factors, as in QLoRA."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

        dense = torch.randn(rows, columns) / columns**0.5
        self.weight = nn.Parameter(to_nf4(dense, BLOCK, SCALER_BLOCK), requires_grad=False)
        self.down, self.up = nn.Linear(columns, 4, bias=False), nn.Linear(4, rows, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4

        return linear_nf4(x, self.weight) + self.up(self.down(x))


def nf4_model() -> nn.Module:
    """The same for every call. (A deepcopy would quantize again, with torchao's default block sizes.)"""
    torch.manual_seed(5)
    return nn.Sequential(Nf4Adapted(64, 128), nn.Tanh(), Nf4Adapted(128, 64))


def float8_model(all_gather: bool = True, hidden: int = 64) -> nn.Module:
    """Two linear layers that multiply in float8 (emulated); the same for every call."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(32, hidden), nn.Tanh(), nn.Linear(hidden, 32, bias=False))
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=all_gather, emulate=True)
    return convert_to_float8_training(model, config=config)


def shard(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    for index in (0, 2):
        fully_shard(model[index], mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def train_both(
    model: nn.Module, reference: nn.Module, rank: Rank, width: int, after_step: Any = None, steps: int = 2
) -> None:
    """Adam steps on both, with losses compared at every step and trained parameters at the end."""
    optimizers = [
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in (model, reference)
    ]
    for step in range(steps):
        loss_of = square_loss(step, 16, width)
        loss = loss_of(model, rank.rank)
        with torch.no_grad():
            expected = loss_of(reference, rank.rank)
        assert_close(loss.detach(), expected, f"loss of step {step}", **AFTER_ADAM)
        loss.backward()
        reference_backward(reference, rank.world_size, loss_of)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if after_step is not None:
            after_step(model)
    expected_parameters = dict(reference.named_parameters())
    full = {name: p.full_tensor() for name, p in model.named_parameters() if p.requires_grad}
    for name, value in full.items():
        assert_close(value.detach(), expected_parameters[name].detach(), name, **AFTER_ADAM)


def received(collectives: list[Any]) -> int:
    return sum(c.nbytes for c in collectives if c.kind == "all_gather")


@on_ranks(2)
def test_nf4_base_with_adapters_trains(rank: Rank) -> None:
    """Low-rank adapters on a frozen NF4 base train with the losses of the unsharded model."""
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import NF4Tensor

    for reshard in (True, None):
        model = shard(nf4_model(), rank.mesh, reshard_after_forward=reshard)
        train_both(model, nf4_model(), rank, 64)
        for index in (0, 2):
            weight = model[index].weight
            assert isinstance(weight, DTensor) and isinstance(weight.to_local(), NF4Tensor)
            assert not weight.requires_grad and weight.grad is None


@on_ranks(2)
def test_nf4_bytes_travel(rank: Rank) -> None:
    """A gather moves NF4's codes and scales: about a sixth of the float32 weight at this block size."""
    reference = nf4_model()
    packed = sum(
        tensor.nbytes
        for index in (0, 2)
        for tensor in (getattr(reference[index].weight, name) for name in SHARDED_TENSORS)
    )
    adapters = sum(p.nbytes for p in reference.parameters() if p.requires_grad)
    dense = 4 * 2 * 64 * 128
    assert packed < dense / 5
    model = shard(reference, rank.mesh)
    with record() as collectives, torch.no_grad():
        model(batch(rank.rank, 0, 4, 64))
    expected = (packed + adapters) // rank.world_size * (rank.world_size - 1)
    assert expected <= received(collectives) <= 1.05 * expected  # alignment


SHARDED_TENSORS = ("quantized_scalers", "quantization_factor", "quantized_data")


@on_ranks(2)
def test_nf4_state_dict_round_trip(rank: Rank) -> None:
    """A sharded NF4 state dict loads into another sharded model."""
    first, second = (shard(nf4_model(), rank.mesh) for _ in range(2))
    with torch.no_grad():
        for parameter in first.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.5)
        for name in SHARDED_TENSORS[1:2]:
            getattr(first[0].weight._local_tensor, name).mul_(1.5)
    x = batch(rank.rank, 0, 4, 64)
    expected = first(x)
    second.load_state_dict(first.state_dict())
    assert_equal(second(x), expected, "output")


@on_ranks(2)
def test_nf4_that_cannot_be_cut_is_refused(rank: Rank) -> None:
    """NF4 weights cannot be cut unevenly; the error names the parameter on every rank."""
    torch.manual_seed(5)
    model = nn.Sequential(Nf4Adapted(64, 65))
    with pytest.raises((TypeError, ValueError), match=r"(?s)0\.weight.*65"):
        fully_shard(model, mesh=rank.mesh)


@on_ranks(2)
@pytest.mark.parametrize(("precomputed", "reshard"), [(False, True), (True, False)])
def test_float8_all_gather_trains(rank: Rank, precomputed: bool, reshard: Any) -> None:
    """Float8 all-gathers leave the losses of the unsharded model, with scales computed ahead or in the gather."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    model = shard(float8_model(), rank.mesh, reshard_after_forward=reshard)
    after_step = precompute_float8_dynamic_scale_for_fsdp if precomputed else None
    train_both(model, float8_model(all_gather=False), rank, 32, after_step)
    for index in (0, 2):
        local = model[index].weight.to_local()
        assert isinstance(local, WeightWithDynamicFloat8CastTensor)
        assert (model[index].weight._local_tensor._precomputed_scale is not None) == precomputed


@on_ranks(2)
def test_float8_bytes_travel(rank: Rank) -> None:
    """A gather moves one byte per element of the weights, a reduction four."""
    model = shard(float8_model(), rank.mesh, reshard_after_forward=True)
    with record() as collectives:
        square_loss(0, 16, 32)(model, rank.rank).backward()
    share = (rank.world_size - 1) / rank.world_size
    weights, bias = 2 * 32 * 64, 64
    gathers = 2 * share * (weights + 4 * bias)  # in forward and in backward
    assert gathers <= received(collectives) <= 1.05 * gathers + 256
    reduced = sum(c.nbytes for c in collectives if c.kind == "reduce_scatter")
    assert 4 * share * (weights + bias) <= reduced <= 1.05 * 4 * share * (weights + bias) + 256


@on_ranks(2)
def test_float8_uneven_rows(rank: Rank) -> None:
    """Float8 weights whose rows the ranks do not divide train as well (where torch's version ends the process)."""
    train_both(shard(float8_model(hidden=33), rank.mesh), float8_model(False, 33), rank, 32)


@on_ranks(1, 2)
@pytest.mark.parametrize("name", ["linear_nf4", "Float8LinearConfig"])
def test_examples_of_the_docs(rank: Rank, name: str) -> None:
    """The examples of the docs that use torchao train."""
    page = (Path(__file__).parents[2] / "docs" / "extensions.md").read_text()
    (snippet,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if name in code)
    run: dict[str, Any] = {"__name__": "snippet"}
    exec(snippet, run)
    first = torch.nn.functional.mse_loss(torch.zeros_like(run["x"]), run["x"])
    assert run["loss"] < 1.5 * first  # it has come down from twice that
