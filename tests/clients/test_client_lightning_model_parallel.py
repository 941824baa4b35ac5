"""Lightning's Fabric on fullshard, with ModelParallelStrategy: fully_shard, with and without tensor parallelism."""

from __future__ import annotations

import pytest

pytest.importorskip("lightning")

import contextlib
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning_runs import Block, adam, batch, fabric_on, full, loss_of, net, standing_in, train, unsharded
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fullshard
from compare import assert_close, assert_equal
from fullshard.comm import record
from ranks import Rank, on_ranks

STEPS = range(4)


def shard(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """A ``parallelize_fn``: every block, then the rest."""
    for module in model:  # type: ignore[attr-defined]
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh["data_parallel"], **options)
    return fully_shard(model, mesh=mesh["data_parallel"], **options)


def shard_with_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Blocks' linear layers cut over one axis, then everything over the other."""
    for module in model:  # type: ignore[attr-defined]
        if isinstance(module, Block):
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(module, mesh["tensor_parallel"], plan)
    return shard(model, mesh)


def strategy(parallelize: Callable[..., Any] = shard, tensor_parallel: int = 1, **options: Any) -> Any:
    return ModelParallelStrategy(parallelize, 2, tensor_parallel, **options)


def whole(norm: Any) -> torch.Tensor:
    """torch's clipping gives a DTensor."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


@on_ranks(2)
def test_losses_are_those_of_the_unsharded_run(rank: Rank) -> None:
    """``setup_module`` shards, then an optimizer of the sharded parameters is set up."""
    with standing_in():
        fabric = fabric_on(strategy())
        model = fabric.setup_module(net())
        optimizer = fabric.setup_optimizers(adam(model))
        assert isinstance(model.module[1], fullshard.FSDPModule)
        losses = train(fabric, model, optimizer, STEPS)
        expected = net()
        assert losses == [step[rank.rank] for step in unsharded(expected, STEPS)]
        assert_equal(full(model), dict(expected.named_parameters()), "parameters")


@on_ranks(4)
def test_tensor_parallel(rank: Rank) -> None:
    """Two axes: blocks' linear layers are cut over one, everything is sharded over the other."""
    with standing_in():
        fabric = fabric_on(strategy(shard_with_tensor_parallel, 2))
        model = fabric.setup_module(net())
        optimizer = fabric.setup_optimizers(adam(model))
        weight = model.module[1].up.weight
        assert weight.device_mesh.ndim == 2 and weight.to_local().shape in [(4, 7), (3, 7)]  # of (14, 7)
        place = fabric.strategy.device_mesh["data_parallel"].get_local_rank()
        reference = unsharded(net(), STEPS)
        for step in STEPS:
            loss = loss_of(model, batch(place, step))
            fabric.backward(loss)
            optimizer.step()
            if step < STEPS[-1]:
                optimizer.zero_grad()
            assert_close(loss, torch.tensor(reference[step][place]), "loss", 1e-5)
        with pytest.raises(RuntimeError, match="same mesh"):  # torch's clip_grad_norm_, which Lightning calls
            fabric.clip_gradients(model, optimizer, max_norm=0.1)


@on_ranks(2)
def test_accumulation_without_synchronizing(rank: Rank) -> None:
    """``fabric.no_backward_sync`` switches the reduction of every unit."""
    with standing_in():
        fabric = fabric_on(strategy())
        model, expected = fabric.setup_module(net()), net()
        optimizer = fabric.setup_optimizers(adam(model))
        reference = unsharded(expected, STEPS, accumulate=2)
        for step in STEPS:
            last = step % 2 == 1
            with record() as seen, fabric.no_backward_sync(model, enabled=not last):
                loss = loss_of(model, batch(rank.rank, step))
                fabric.backward(loss / 2)
            assert any("reduce_scatter" in c.kind for c in seen) is last
            assert_close(loss, torch.tensor(reference[step][rank.rank]), "loss", 1e-6)
            if last:
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("clip", ["norm", "inf", "value"])
@on_ranks(2)
def test_clipping(rank: Rank, clip: str) -> None:
    """Norms are those of the whole gradients."""
    with standing_in():
        fabric = fabric_on(strategy())
        model, expected, norms = fabric.setup_module(net()), net(), []
        optimizer = fabric.setup_optimizers(adam(model))
        options: dict[str, Any] = {
            "norm": {"max_norm": 0.1},
            "inf": {"max_norm": 0.1, "norm_type": float("inf")},
            "value": {"clip_val": 1e-3},
        }[clip]

        def clip_plain(parameters: list[nn.Parameter]) -> None:
            if clip == "value":
                torch.nn.utils.clip_grad_value_(parameters, 1e-3)
            else:
                norms.append(torch.nn.utils.clip_grad_norm_(parameters, **options))

        reference = unsharded(expected, STEPS, clip=clip_plain)
        for step in STEPS:
            loss = loss_of(model, batch(rank.rank, step))
            fabric.backward(loss)
            norm = fabric.clip_gradients(model, optimizer, **options)
            optimizer.step()
            optimizer.zero_grad()
            assert_close(loss, torch.tensor(reference[step][rank.rank]), "loss", 1e-5)
            if clip != "value":
                assert_close(whole(norm), norms[step], "norm", 1e-5)


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
@on_ranks(2)
def test_precision(rank: Rank, precision: Any) -> None:
    """bf16-true casts the model before it is sharded; bf16-mixed is autocast over float32 parameters."""
    kept = {"bf16-true": torch.bfloat16, "bf16-mixed": torch.float32}[precision]
    with standing_in():
        fabric = fabric_on(strategy(), precision=precision)
        model = fabric.setup_module(net())
        losses = train(fabric, model, fabric.setup_optimizers(adam(model)), STEPS)
        assert {p.dtype for p in model.parameters()} == {kept}
        expected = torch.tensor([step[rank.rank] for step in unsharded(net(), STEPS)])
        assert_close(torch.tensor(losses), expected, "losses", 5e-2)
        assert losses != expected.tolist()


@on_ranks(2)
def test_policies(rank: Rank) -> None:
    """``mp_policy`` and ``offload_policy`` inside of the ``parallelize_fn``: gathers in bf16, shards in CPU memory."""
    with standing_in():
        policies = {
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            "offload_policy": CPUOffloadPolicy(),
        }
        fabric = fabric_on(strategy(lambda model, mesh: shard(model, mesh, **policies)))
        model = fabric.setup_module(net())
        with record() as seen:
            losses = train(fabric, model, fabric.setup_optimizers(adam(model)), STEPS)
        assert {c.dtype for c in seen if "all_gather" in c.kind} == {torch.bfloat16}
        assert {c.dtype for c in seen if "reduce_scatter" in c.kind} == {torch.float32}
        expected = torch.tensor([step[rank.rank] for step in unsharded(net(), STEPS)])
        assert_close(torch.tensor(losses), expected, "losses", 5e-2)


@on_ranks(2)
def test_models_made_on_the_meta_device(rank: Rank, tmp_path: Path) -> None:
    """``init_module(empty_init=True)``: sharded first, then materialized and initialized, then filled from a file."""
    with standing_in():
        fabric = fabric_on(strategy())
        with fabric.init_module(empty_init=True):
            model = net()
        model = fabric.setup_module(model)
        assert not any(p.is_meta for p in model.parameters())
        assert_equal(full(model)["1.norm.weight"], torch.ones(7), "what LayerNorm.reset_parameters leaves")
        weights = Path(fabric.broadcast(str(tmp_path / "weights.pt")))
        if rank.rank == 0:
            torch.save(net().state_dict(), weights)
        fabric.barrier()
        fabric.load_raw(weights, model)
        losses = train(fabric, model, fabric.setup_optimizers(adam(model)), STEPS)
        assert losses == [step[rank.rank] for step in unsharded(net(), STEPS)]


@pytest.mark.parametrize("distributed", [True, False], ids=["sharded", "full"])
@pytest.mark.parametrize("tensor_parallel", [1, 2], ids=["fsdp", "fsdp_tp"])
def test_resuming(ranks: Any, tensor_parallel: int, distributed: bool, tmp_path: Path) -> None:
    """Train, save, load into a fresh model and optimizer, train on: what an uninterrupted run gives."""
    ranks(2 * tensor_parallel, resume, tensor_parallel, distributed, tmp_path)


def resume(rank: Rank, tensor_parallel: int, distributed: bool, tmp_path: Path) -> None:
    def started() -> tuple[Fabric, Any, Any]:
        parallelize = shard if tensor_parallel == 1 else shard_with_tensor_parallel
        fabric = fabric_on(strategy(parallelize, tensor_parallel, save_distributed_checkpoint=distributed))
        model = fabric.setup_module(net())
        return fabric, model, fabric.setup_optimizers(adam(model))

    def run(fabric: Fabric, model: Any, optimizer: Any, steps: range) -> list[float]:
        place, losses = fabric.strategy.device_mesh["data_parallel"].get_local_rank(), []
        for step in steps:
            loss = loss_of(model, batch(place, step))
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    with standing_in():
        fabric, model, optimizer = started()
        run(fabric, model, optimizer, range(3))
        path = Path(fabric.broadcast(str(tmp_path / "checkpoint")))
        fabric.save(path, {"model": model, "optimizer": optimizer, "step": 3})
        fabric.barrier()
        assert path.is_dir() is distributed
        saved = _load_distributed_checkpoint(path) if distributed else torch.load(path)
        assert saved["step"] == 3
        assert_equal(saved["model"], full(model), "parameters")
        uninterrupted = run(fabric, model, optimizer, range(3, 6))
        fabric, model, optimizer = started()
        run(fabric, model, optimizer, range(7, 8))  # to be forgotten
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
        fabric.load(path, state)
        assert state["step"] == 3
        assert run(fabric, model, optimizer, range(3, 6)) == uninterrupted


@on_ranks(2)
def test_checkpoint_of_a_plain_model(rank: Rank, tmp_path: Path) -> None:
    """Model and optimizer that were saved unsharded, the optimizer by numbers, load into sharded ones."""
    with standing_in():
        expected = net()
        expected_optimizer = adam(expected)
        unsharded(expected, range(3), optimizer=expected_optimizer)
        fabric = fabric_on(strategy())
        model = fabric.setup_module(net())
        optimizer = fabric.setup_optimizers(adam(model))
        path = Path(fabric.broadcast(str(tmp_path / "checkpoint")))
        if rank.rank == 0:
            torch.save({"model": expected.state_dict(), "optimizer": expected_optimizer.state_dict()}, path)
        fabric.barrier()
        fabric.load(path, {"model": model, "optimizer": optimizer})
        losses = train(fabric, model, optimizer, range(3, 6))
        assert losses == [step[rank.rank] for step in unsharded(net(), range(6))][3:]


@on_ranks(2)
def test_wrapped_models_are_refused(rank: Rank) -> None:
    """ModelParallelStrategy knows modules of the wrapper."""
    with standing_in():
        fabric = fabric_on(strategy())
        with pytest.raises(TypeError, match="only supports the new FSDP2 APIs"):
            fabric.setup_module(fullshard.FullyShardedDataParallel(net()))


@pytest.mark.parametrize("distributed", [True, False], ids=["sharded", "full"])
@pytest.mark.parametrize("first", ["torch", "fullshard"])
@on_ranks(2)
def test_checkpoint_of_the_other_engine(rank: Rank, first: str, distributed: bool, tmp_path: Path) -> None:
    """What a run on torch's fully_shard has saved, one on fullshard goes on with, and the other way round."""
    os.environ["TORCHELASTIC_RUN_ID"] = "tests"
    losses, path = [], Path()
    for engine in (first, "fullshard" if first == "torch" else "torch"):
        with standing_in() if engine == "fullshard" else contextlib.nullcontext():
            fabric = fabric_on(strategy(save_distributed_checkpoint=distributed))
            model = fabric.setup_module(net())
            assert isinstance(model.module, fullshard.FSDPModule) is (engine == "fullshard")
            optimizer = fabric.setup_optimizers(adam(model))
            if engine != first:
                fabric.load(path, {"model": model, "optimizer": optimizer})
            losses += train(fabric, model, optimizer, range(len(losses), len(losses) + 3))
            if engine == first:
                path = Path(fabric.broadcast(str(tmp_path / "checkpoint")))
                fabric.save(path, {"model": model, "optimizer": optimizer})
                fabric.barrier()
            del fabric, model, optimizer
            gc.collect()
    assert losses == [step[rank.rank] for step in unsharded(net(), range(6))]
