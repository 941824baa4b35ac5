"""State of optimizers in ``ShardedTensor``, as torch's loader of sharded optimizer state makes it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict

from checkpoint.kinds import shared_folder
from compare import assert_equal
from fullshard import FullOptimStateDictConfig, FullshardError, FullStateDictConfig, StateDictType
from fullshard import FullyShardedDataParallel as FSDP
from ranks import Rank, on_ranks


def build(use_orig_params: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = FSDP(nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)), use_orig_params=use_orig_params)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: Rank) -> None:
    torch.manual_seed(rank.rank)
    model(torch.randn(4, 7)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("use_orig_params", [True, False], ids=["original", "flat"])
@on_ranks(2, 3)
def test_loads_what_torch_has_read(rank: Rank, use_orig_params: bool):
    """Uneven rows, ranks without any; the next step is that of the optimizer that was saved, bit by bit."""
    model, optimizer = build(use_orig_params)
    step(model, optimizer, rank)
    folder = str(shared_folder(rank) / "older")
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        dcp.save(
            {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}, checkpoint_id=folder
        )
        again, fresh = build(use_orig_params)
        FSDP.set_state_dict_type(again, StateDictType.SHARDED_STATE_DICT)
        state = {"model": again.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        again.load_state_dict(state["model"])
        read = load_sharded_optimizer_state_dict(state["model"], "optimizer", dcp.FileSystemReader(folder))
        fresh.load_state_dict(FSDP.optim_state_dict_to_load(again, fresh, read["optimizer"]))
    for kept, loaded in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        assert kept.keys() == loaded.keys()
        for name in kept:
            assert_equal(loaded[name], kept[name], name)
    step(model, optimizer, rank)
    step(again, fresh, rank)
    for new, old in zip(again.parameters(), model.parameters(), strict=True):
        assert_equal(new.detach(), old.detach(), "parameter")


@pytest.mark.parametrize("use_orig_params", [True, False], ids=["original", "flat"])
@on_ranks(2)
def test_fresh_optimizers_can_be_loaded_into(rank: Rank, use_orig_params: bool):
    """torch's functions load into what is there: the sharded form has the first state; the optimizer stays fresh."""
    model, optimizer = build(use_orig_params)
    assert FSDP.optim_state_dict(model, optimizer)["state"] == {}
    folder = str(shared_folder(rank) / "fresh")
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        first = FSDP.optim_state_dict(model, optimizer)
        assert len(first["state"]) == 4 and not optimizer.state
        assert all(not value.to_local().any() for value in (s["exp_avg"] for s in first["state"].values()))
        step(model, optimizer, rank)
        dcp.save({"optimizer": FSDP.optim_state_dict(model, optimizer)}, checkpoint_id=folder)
        again, fresh = build(use_orig_params)
        FSDP.set_state_dict_type(again, StateDictType.SHARDED_STATE_DICT)
        read = {"optimizer": FSDP.optim_state_dict(again, fresh)}
        dcp.load(read, checkpoint_id=folder)
        fresh.load_state_dict(FSDP.optim_state_dict_to_load(again, fresh, read["optimizer"]))
    for kept, loaded in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        for name in kept:
            assert_equal(loaded[name], kept[name], name)


@on_ranks(2)
def test_state_on_some_ranks_only(rank: Rank):
    """A rank whose optimizer was emptied is not given a first state in silence: all ranks are told."""
    model, optimizer = build(use_orig_params=True)
    step(model, optimizer, rank)
    if rank.rank == 1:
        optimizer.state.clear()
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        with pytest.raises(FullshardError, match=r"0\.weight"):
            FSDP.optim_state_dict(model, optimizer)


@on_ranks(2)
def test_the_first_rank_alone_cannot_send_what_all_must_gather(rank: Rank):
    """With rank0_only a ShardedTensor or a DTensor is the same error on all ranks; nobody waits for a message."""
    model, optimizer = build(use_orig_params=True)
    step(model, optimizer, rank)
    folder = str(shared_folder(rank) / "alone")
    FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    sharded, state = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    dcp.save({"model": sharded, "optimizer": state}, checkpoint_id=folder)
    read = load_sharded_optimizer_state_dict(sharded, "optimizer", dcp.FileSystemReader(folder))["optimizer"]
    configs = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)
    FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs)
    with pytest.raises(ValueError, match="found ShardedTensors"):
        FSDP.optim_state_dict_to_load(model, optimizer, read)
    with pytest.raises(ValueError, match="found DTensors"):
        FSDP.optim_state_dict_to_load(model, optimizer, state)


@on_ranks(1)
def test_first_states_draw_no_random_numbers(rank: Rank):
    """Optimizers that round at random draw in their next step what they would have drawn."""

    class Noisy(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            torch.rand(3)
            super().step()

    model = FSDP(nn.Linear(2, 2), use_orig_params=True)
    optimizer = Noisy(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        FSDP.optim_state_dict(model, optimizer)
    assert_equal(torch.rand(2), expected, "numbers")
