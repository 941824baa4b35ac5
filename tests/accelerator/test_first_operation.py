"""The first operation of a group needs all of its ranks where communicators are made when they are first used."""

from __future__ import annotations

import torch
from torch import nn

from fullshard import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
from fullshard import FullyShardedDataParallel as FSDP
from ranks import Rank, on_ranks


@on_ranks(2, device_type="emulated", fresh=True)
def test_optimizer_state_for_one_rank_before_any_step(rank: Rank) -> None:
    """Rank 0 gets all of the state although the group was never used and the last rank holds little of it."""
    torch.manual_seed(0)
    model = FSDP(nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 1)), device_id=rank.device, use_orig_params=True)
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    optimizer.step()
    whole = FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=False)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True), whole):
        state = FSDP.optim_state_dict(model, optimizer)
    if rank.rank == 0:
        for values in state["state"].values():
            torch.testing.assert_close(values["exp_avg"], torch.full_like(values["exp_avg"], 0.2))
