"""Checkpoints of Lightning's Fabric on fullshard, with FSDPStrategy."""

from __future__ import annotations

import pytest

pytest.importorskip("lightning")

from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning_runs import Block, FSDPOnCpu, adam, fabric_on, full, net, standing_in, train, unsharded
from torch import nn

from compare import assert_equal
from ranks import Rank, on_ranks

FORMATS = pytest.mark.parametrize("state_dict_type", ["full", "sharded"])


def sharded(state_dict_type: Any, **options: Any) -> tuple[Fabric, Any, Any]:
    """Fabric, a model of it, and its optimizer."""
    fabric = fabric_on(FSDPOnCpu(auto_wrap_policy={Block}, state_dict_type=state_dict_type, **options))
    model = fabric.setup_module(net())
    return fabric, model, fabric.setup_optimizers(adam(model))


def common(tmp_path: Path, fabric: Fabric, name: str = "checkpoint") -> Path:
    """One path for all ranks: pytest gives each its own."""
    return Path(fabric.broadcast(str(tmp_path / name)))


def plain(steps: range) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The unsharded model after these steps, with its optimizer."""
    model = net()
    optimizer = unsharded_optimizer(model, steps)
    return model, optimizer


def unsharded_optimizer(model: nn.Module, steps: range) -> torch.optim.Optimizer:
    optimizer = adam(model)
    unsharded(model, steps, optimizer=optimizer)
    return optimizer


@FORMATS
@pytest.mark.parametrize("use_orig_params", [True, False])
@on_ranks(2)
def test_resuming(rank: Rank, state_dict_type: str, use_orig_params: bool, tmp_path: Path) -> None:
    """Train, save, load into a fresh model and optimizer, train on: what an uninterrupted run gives."""
    with standing_in():
        fabric, model, optimizer = sharded(state_dict_type, use_orig_params=use_orig_params)
        losses = train(fabric, model, optimizer, range(3))
        path = common(tmp_path, fabric)
        fabric.save(path, {"model": model, "optimizer": optimizer, "step": 3, "note": "kept"})
        assert path.is_file() is (state_dict_type == "full")

        fabric, model, optimizer = sharded(state_dict_type, use_orig_params=use_orig_params)
        train(fabric, model, optimizer, range(7, 9))  # to be forgotten
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
        remainder = fabric.load(path, state)
        assert (state["step"], remainder) == (3, {"note": "kept"})
        losses += train(fabric, model, optimizer, range(3, 6))
        assert losses == [step[rank.rank] for step in unsharded(net(), range(6))]


@on_ranks(2)
def test_what_a_full_checkpoint_has(rank: Rank, tmp_path: Path) -> None:
    """A file that a plain model loads; both moments of the optimizer by name, each the plain optimizer's."""
    with standing_in():
        fabric, model, optimizer = sharded("full")
        train(fabric, model, optimizer, range(3))
        path = common(tmp_path, fabric)
        fabric.save(
            path, {"model": model, "optimizer": optimizer}, filter={"model": lambda name, _: "norm" not in name}
        )
        fabric.barrier()
        expected, expected_optimizer = plain(range(3))
        found = torch.load(path)
        parameters = {name: p for name, p in expected.named_parameters() if "norm" not in name}
        assert_equal(found["model"], {name: p.detach() for name, p in parameters.items()}, "filtered parameters")
        for name, p in expected.named_parameters():
            for moment in ("exp_avg", "exp_avg_sq"):
                assert_equal(found["optimizer"]["state"][name][moment], expected_optimizer.state[p][moment], name)


@on_ranks(2)
def test_checkpoint_of_a_plain_model(rank: Rank, tmp_path: Path) -> None:
    """Model and optimizer that were saved unsharded, the optimizer by numbers, load into sharded ones."""
    with standing_in():
        expected, expected_optimizer = plain(range(3))
        fabric, model, optimizer = sharded("full")
        path = common(tmp_path, fabric)
        if rank.rank == 0:
            torch.save({"model": expected.state_dict(), "optimizer": expected_optimizer.state_dict()}, path)
        fabric.barrier()
        fabric.load(path, {"model": model, "optimizer": optimizer})
        assert_equal(full(model), {n: p.detach() for n, p in expected.named_parameters()}, "parameters")
        losses = train(fabric, model, optimizer, range(3, 6))
        assert losses == [step[rank.rank] for step in unsharded(net(), range(6))][3:]


@on_ranks(2)
def test_load_raw(rank: Rank, tmp_path: Path) -> None:
    """A file of weights alone; missing names are an error unless ``strict=False``."""
    with standing_in():
        fabric, model, _ = sharded("full")
        path = common(tmp_path, fabric)
        weights = {name: torch.full_like(value, 0.5) for name, value in net().state_dict().items()}
        del weights["1.up.bias"]
        if rank.rank == 0:
            torch.save(weights, path)
        fabric.barrier()
        with pytest.raises(RuntimeError, match=r"1\.up\.bias"):
            fabric.load_raw(path, model)
        fabric.load_raw(path, model, strict=False)
        expected = weights | {"1.up.bias": net().state_dict()["1.up.bias"]}
        assert_equal(full(model), {name: expected[name] for name in net().state_dict()}, "parameters")


@on_ranks(2)
def test_consolidation(rank: Rank, tmp_path: Path) -> None:
    """What ``python -m lightning.fabric.utilities.consolidate_checkpoint`` makes of a sharded one: a plain model's."""
    with standing_in():
        fabric, model, optimizer = sharded("sharded")
        train(fabric, model, optimizer, range(3))
        path = common(tmp_path, fabric)
        fabric.save(path, {"model": model, "optimizer": optimizer, "step": 3})
        fabric.barrier()
        expected, expected_optimizer = plain(range(3))
        found = _load_distributed_checkpoint(path)  # all that the program calls
        assert found["step"] == 3
        assert_equal(found["model"], {n: p.detach() for n, p in expected.named_parameters()}, "parameters")
        for name, p in expected.named_parameters():
            for moment in ("exp_avg", "exp_avg_sq"):
                assert_equal(found["optimizer"]["state"][name][moment], expected_optimizer.state[p][moment], name)
        loaded = net()
        loaded.load_state_dict(found["model"])


@on_ranks(2)
def test_a_sharded_checkpoint_replaces_a_full_one(rank: Rank, tmp_path: Path) -> None:
    """Saving in the other format to the same path; either loads, whatever format the strategy saves in."""
    with standing_in():
        fabric, model, optimizer = sharded("full")
        train(fabric, model, optimizer, range(1))
        path = common(tmp_path, fabric)
        for state_dict_type in ("full", "sharded"):
            fabric.strategy._state_dict_type = state_dict_type
            fabric.save(path, {"model": model, "optimizer": optimizer})
            fabric.barrier()
            assert path.is_dir() is (state_dict_type == "sharded")
            _, other, other_optimizer = sharded("full")
            train(fabric, other, other_optimizer, range(5, 6))
            fabric.load(path, {"model": other, "optimizer": other_optimizer})
            assert_equal(full(other), full(model), "parameters")
            fabric.barrier()
