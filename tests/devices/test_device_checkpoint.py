"""Checkpoint files of tensors on an accelerator."""

from __future__ import annotations

from pathlib import Path

import torch
from on_device import on_device, peak_above
from torch import nn

from checkpoint.contents import read, write
from fullshard import FullOptimStateDictConfig, FullStateDictConfig, FullyShardedDataParallel, StateDictType
from ranks import Rank


@on_device(1)
def test_any_layout_in_pieces_of_a_block(rank: Rank, tmp_path: Path) -> None:
    """Tensors on the device are saved in any layout, and load into any memory, strides and dtype."""
    weight = torch.randn(1500, 2000)  # 12 MB: several blocks
    assert weight.device == rank.device
    saved = {"w": weight, "t": weight.t(), "half": weight.bfloat16()}
    write(tmp_path, saved)
    targets = {
        "w": torch.zeros_like(weight),
        "t": torch.zeros(2000, 1500, device="cpu"),
        "half": torch.zeros(1500, 2000),
    }
    read(tmp_path, targets)
    assert torch.equal(targets["w"], weight)
    assert torch.equal(targets["t"], weight.t().cpu())
    assert torch.equal(targets["half"], weight.bfloat16().float())


@on_device(2)
def test_whole_states_are_on_a_device_one_at_a_time(rank: Rank) -> None:
    """With ``rank0_only`` every rank gathers one state of the optimizer after another, and the first keeps them."""
    width = 1024
    model = FullyShardedDataParallel(
        nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(4)]).to(rank.device),
        device_mesh=rank.mesh,
        use_orig_params=True,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, width)).sum().backward()
    optimizer.step()
    configs = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=True)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs):
        peak, _ = peak_above(rank.device, lambda: FullyShardedDataParallel.optim_state_dict(model, optimizer))
    whole = 4 * width * width
    assert whole / 2 < peak < 2.5 * whole, peak  # of four; a back end lets go of a message a little later
