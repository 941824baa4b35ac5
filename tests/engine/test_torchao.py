"""Quantized weights of torchao: frozen NF4 with adapters, float8 all-gathers. Skipped where torchao is missing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_tensor import train_both
from torch import nn
from torch.distributed.tensor import DTensor

pytest.importorskip("torchao")

from compare import assert_equal
from front_ends import COMPOSABLE
from fullshard import fully_shard
from models import batch
from ranks import Rank, on_ranks

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


def float8_model(hidden: int, all_gather: bool = True) -> nn.Module:
    """Two linear layers that multiply in float8 (emulated); the same for every call."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(32, hidden), nn.Tanh(), nn.Linear(hidden, 32, bias=False))
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=all_gather, emulate=True)
    return convert_to_float8_training(model, config=config)


@on_ranks(2)
def test_nf4_base_with_adapters(rank: Rank) -> None:
    """Low-rank adapters on a frozen NF4 base train with the losses of the unsharded model."""
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import NF4Tensor

    reference = nf4_model()
    names = ("quantized_scalers", "quantization_factor", "quantized_data")
    packed = sum(getattr(reference[index].weight, name).nbytes for index in (0, 2) for name in names)
    adapters = sum(p.nbytes for p in reference.parameters() if p.requires_grad)
    model = COMPOSABLE.wrap(nf4_model(), rank, ["0", "2"], reshard_after_forward=True)
    received = train_both(model, reference, rank, 16, 64)
    expected = 2 * 2 * (packed + adapters) // 2  # two steps, forward and backward, from the other rank
    assert packed < 4 * 2 * 64 * 128 / 5 and expected <= received <= 1.05 * expected  # alignment
    for index in (0, 2):
        weight = model[index].weight
        assert isinstance(weight, DTensor) and isinstance(weight.to_local(), NF4Tensor)
        assert not weight.requires_grad and weight.grad is None
    model[0].weight._local_tensor.quantization_factor.mul_(1.5)
    other, x = COMPOSABLE.wrap(nf4_model(), rank, ["0", "2"]), batch(rank.rank, 0, 4, 64)
    other.load_state_dict(model.state_dict())
    assert_equal(other(x), model(x), "output")
    with pytest.raises((TypeError, ValueError), match=r"(?s)0\.weight.*65"):
        fully_shard(nn.Sequential(Nf4Adapted(64, 65)), mesh=rank.mesh)


@on_ranks(2)
@pytest.mark.parametrize(("precomputed", "reshard", "rows"), [(False, True, 64), (True, False, 64), (False, None, 33)])
def test_float8_all_gather_trains(rank: Rank, precomputed: bool, reshard: Any, rows: int) -> None:
    """Float8 all-gathers leave the losses of the unsharded model, with scales computed ahead or in the gather."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    model = COMPOSABLE.wrap(float8_model(rows), rank, ["0", "2"], reshard_after_forward=reshard)
    after_step = precompute_float8_dynamic_scale_for_fsdp if precomputed else None
    received = train_both(model, float8_model(rows, all_gather=False), rank, 16, 32, after_step=after_step)
    for index in (0, 2):
        local = model[index].weight.to_local()
        assert isinstance(local, WeightWithDynamicFloat8CastTensor)
        assert (model[index].weight._local_tensor._precomputed_scale is not None) == precomputed
    if reshard:
        expected = 2 * 2 * (2 * 32 * rows + 4 * rows) / 2
        assert expected <= received <= 1.05 * expected + 1024


@on_ranks(2)
@pytest.mark.parametrize("name", ["linear_nf4", "Float8LinearConfig"])
def test_examples_of_the_docs(rank: Rank, name: str) -> None:
    """The examples of the docs that use torchao train."""
    page = (Path(__file__).parents[2] / "docs" / "how_to" / "packed_weights.md").read_text()
    (snippet,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if name in code)
    run: dict[str, Any] = {"__name__": "snippet"}
    exec(snippet, run)
    first = torch.nn.functional.mse_loss(torch.zeros_like(run["x"]), run["x"])
    assert run["loss"] < 1.5 * first  # it has come down from twice that
