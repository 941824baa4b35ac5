"""Lightning's Fabric on fullshard: FSDPStrategy, which is the wrapper, and ModelParallelStrategy, fully_shard."""

from __future__ import annotations

import pytest

pytest.importorskip("lightning")

import contextlib
import copy
import gc
import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision.fsdp import FSDPPrecision
from lightning.fabric.strategies import ModelParallelStrategy
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning_runs import Block, FSDPOnCpu, adam, batch, fabric_on, full, loss_of, net, standing_in, train, unsharded
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import wrap
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fullshard
from compare import assert_close, assert_equal
from fullshard.comm import record
from ranks import Rank, on_ranks

STEPS = range(4)
KINDS = pytest.mark.parametrize("kind", ["fsdp", "model_parallel"])
FORMATS = pytest.mark.parametrize("sharded", [False, True], ids=["full", "sharded"])


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


def strategy(kind: str, sharded: bool = False, **options: Any) -> Any:
    """One of KINDS, or "tensor_parallel"; ``sharded``: how it saves."""
    if kind == "fsdp":
        kept = "sharded" if sharded else "full"
        return FSDPOnCpu(**{"auto_wrap_policy": {Block}, "state_dict_type": kept, **options})
    cut = kind == "tensor_parallel"
    parallelize = options.pop("parallelize", shard_with_tensor_parallel if cut else shard)
    return ModelParallelStrategy(parallelize, 2, 2 if cut else 1, save_distributed_checkpoint=sharded, **options)


def started(chosen: Any, **options: Any) -> tuple[Fabric, Any, Any]:
    """Fabric on a strategy, a model of it, and its optimizer."""
    fabric = fabric_on(chosen, **options)
    model = fabric.setup_module(net())
    return fabric, model, fabric.setup_optimizers(adam(model))


def is_block(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    """A policy, as FSDP takes it as a callable."""
    return recurse or isinstance(module, Block)


def units(model: nn.Module) -> int:
    kinds = (fullshard.FSDPModule, fullshard.FullyShardedDataParallel)
    return sum(isinstance(module, kinds) for module in model.modules())


def assert_trains_as_unsharded(fabric: Fabric, model: Any, optimizer: Any, rank: Rank) -> None:
    """Require the losses of the unsharded run, bit by bit, and its parameters, unless they are flat."""
    losses, expected = train(fabric, model, optimizer, STEPS), net()
    assert losses == [step[rank.rank] for step in unsharded(expected, STEPS)]
    if not any(isinstance(parameter, fullshard.FlatParameter) for parameter in model.parameters()):
        assert_equal(full(model), dict(expected.named_parameters()), "parameters")


# ---------------------------------------------------------------- setting up


@pytest.mark.parametrize(
    ("options", "expected_units"),
    [
        ({"auto_wrap_policy": None}, 1),
        ({"auto_wrap_policy": {Block}}, 3),
        ({"auto_wrap_policy": {Block}, "activation_checkpointing_policy": {Block}}, 3),
        ({"auto_wrap_policy": is_block, "activation_checkpointing_policy": is_block}, 3),
        ({"auto_wrap_policy": {Block, nn.Linear}, "sharding_strategy": "SHARD_GRAD_OP"}, 9),
        ({"sharding_strategy": "NO_SHARD"}, 3),
        ({"cpu_offload": True}, 3),
    ],
    ids=["whole", "classes", "checkpointing", "callable", "nested", "no_shard", "cpu_offload"],
)
@on_ranks(2)
def test_setup_of_model_and_optimizer(rank: Rank, options: dict[str, Any], expected_units: int) -> None:
    """``fabric.setup(model, optimizer)``, with the strategy's policies: losses and weights of the unsharded run."""
    with standing_in():
        fabric, model = fabric_on(strategy("fsdp", **options)), net()
        calls: list[None] = []
        model[1].register_forward_pre_hook(lambda *_: calls.append(None))
        model, optimizer = fabric.setup(model, adam(model))
        assert units(model) == expected_units
        losses, expected = train(fabric, model, optimizer, STEPS), net()
        assert len(calls) == len(STEPS) * (2 if "activation_checkpointing_policy" in options else 1)
        assert losses == [step[rank.rank] for step in unsharded(expected, STEPS)]
        found = {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in full(model).items()}
        assert_equal(found, dict(expected.named_parameters()), "parameters")


@pytest.mark.parametrize("kind", ["original", "flat", "model_parallel"])
@on_ranks(2)
def test_setup_of_module_then_optimizer(rank: Rank, kind: str) -> None:
    """``setup_module``, then an optimizer of its parameters, then ``setup_optimizers``."""
    with standing_in():
        wrapper = strategy("fsdp", use_orig_params=kind == "original")
        fabric, model, optimizer = started(strategy(kind) if kind == "model_parallel" else wrapper)
        assert units(model) == 3
        assert isinstance(next(model.parameters()), fullshard.FlatParameter) == (kind == "flat")
        assert_trains_as_unsharded(fabric, model, optimizer, rank)


@on_ranks(2)
def test_modules_wrapped_by_hand(rank: Rank) -> None:
    """``wrap`` inside of ``fabric.init_module()`` wraps with the strategy's settings, and ``setup`` lets it be."""
    with standing_in():
        fabric = fabric_on(FSDPOnCpu())
        with fabric.init_module():
            model = net()
            model[1] = wrap(model[1])
            model = wrap(model)
        model, optimizer = fabric.setup(model, adam(model))
        assert units(model) == 2
        assert_trains_as_unsharded(fabric, model, optimizer, rank)


@KINDS
@on_ranks(2)
def test_models_made_on_the_meta_device(rank: Rank, kind: str, tmp_path: Path) -> None:
    """``init_module(empty_init=True)``: what is sharded is initialized, a raw file of weights fills it."""
    weights = tmp_path / "weights.pt"
    torch.save(net().state_dict(), weights)
    with standing_in():
        options = {"auto_wrap_policy": {nn.LayerNorm, nn.Linear}} if kind == "fsdp" else {}
        fabric = fabric_on(strategy(kind, **options))
        with fabric.init_module(empty_init=True):
            model = net()
        assert all(p.is_meta for p in model.parameters())
        model = fabric.setup_module(model)
        assert not any(p.is_meta for p in model.parameters())
        assert_equal(full(model)["1.norm.weight"], torch.ones(7), "what LayerNorm.reset_parameters leaves")
        fabric.load_raw(weights, model)
        assert_trains_as_unsharded(fabric, model, fabric.setup_optimizers(adam(model)), rank)


@on_ranks(4)
def test_hybrid_sharding_over_a_mesh(rank: Rank) -> None:
    """``device_mesh=`` with HYBRID_SHARD. (A tuple of sizes Lightning makes a mesh of CUDA devices of.)"""
    with standing_in():
        mesh = rank.make_mesh(2, 2, names=("replicate", "shard"))
        fabric, model, optimizer = started(strategy("fsdp", device_mesh=mesh, sharding_strategy="HYBRID_SHARD"))
        losses = train(fabric, model, optimizer, STEPS)
        reference = unsharded(net(), STEPS, world=4)
        assert_close(torch.tensor(losses), torch.tensor([step[rank.rank] for step in reference]), "losses", 1e-6)


@on_ranks(4)
def test_tensor_parallel(rank: Rank) -> None:
    """Two axes: blocks' linear layers are cut over one, everything is sharded over the other."""
    with standing_in():
        fabric, model, optimizer = started(strategy("tensor_parallel"))
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


# ---------------------------------------------------------------- a step


@pytest.mark.parametrize("clip", ["norm", "inf", "value"])
@KINDS
@on_ranks(2)
def test_clipping(rank: Rank, kind: str, clip: str) -> None:
    """``fabric.clip_gradients`` by the norm of the whole gradients, which it returns, or by value."""
    options: dict[str, Any] = {
        "norm": {"max_norm": 0.1},
        "inf": {"max_norm": 0.1, "norm_type": float("inf")},
        "value": {"clip_val": 1e-3},
    }[clip]
    norms = []

    def clip_plain(parameters: list[nn.Parameter]) -> None:
        if clip == "value":
            torch.nn.utils.clip_grad_value_(parameters, 1e-3)
        else:
            norms.append(torch.nn.utils.clip_grad_norm_(parameters, **options))

    with standing_in():
        fabric, model, optimizer = started(strategy(kind))
        reference = unsharded(net(), STEPS, clip=clip_plain)
        for step in STEPS:
            loss = loss_of(model, batch(rank.rank, step))
            fabric.backward(loss)
            norm: Any = fabric.clip_gradients(model, optimizer, **options)
            optimizer.step()
            optimizer.zero_grad()
            assert_close(loss, torch.tensor(reference[step][rank.rank]), "loss", 1e-5)
            if clip != "value":
                assert_close(norm.full_tensor() if isinstance(norm, DTensor) else norm, norms[step], "norm", 1e-5)


@KINDS
@on_ranks(2)
def test_accumulation_without_synchronizing(rank: Rank, kind: str) -> None:
    """``fabric.no_backward_sync`` for one batch of two: one reduction, gradients of both."""
    with standing_in():
        fabric, model, optimizer = started(strategy(kind))
        reference = unsharded(net(), STEPS, accumulate=2)
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


# ---------------------------------------------------------------- precision


PRECISIONS = [  # Lightning's name, dtype of computation and reduction, dtype in which parameters are kept
    ("32-true", torch.float32, torch.float32),
    ("bf16-mixed", torch.bfloat16, torch.float32),
    ("16-mixed", torch.float16, torch.float32),
    ("bf16-true", torch.bfloat16, torch.bfloat16),
    ("16-true", torch.float16, torch.float16),
]


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def unsharded_in(dtype: torch.dtype, kept: torch.dtype) -> list[list[float]]:
    """Losses of all ranks, computed and reduced in ``dtype``, with parameters kept in ``kept``."""
    torch.set_default_dtype(kept)
    model = net()
    torch.set_default_dtype(torch.float32)
    optimizer, losses = sgd(model), []
    for step in STEPS:
        lowered = copy.deepcopy(model).to(dtype)
        losses.append([])
        for rank in range(2):
            x, y = batch(rank, step)
            loss = loss_of(lowered, (x.to(dtype), y))
            (loss / 2).backward()
            losses[-1].append(loss.item())
        for parameter, low in zip(model.parameters(), lowered.parameters(), strict=True):
            assert low.grad is not None
            parameter.grad = low.grad.to(kept)
        optimizer.step()
    return losses


@pytest.mark.parametrize(("precision", "dtype", "kept"), PRECISIONS)
@on_ranks(2)
def test_precision(rank: Rank, precision: Any, dtype: torch.dtype, kept: torch.dtype) -> None:
    """What ``Fabric(precision=)`` makes of FSDP: dtypes of forward, of kept parameters; losses of a run in these."""
    with standing_in():
        fabric = fabric_on(strategy("fsdp"), precision=precision)
        with fabric.init_module():
            model = net()
        model, optimizer = fabric.setup(model, sgd(model))
        losses = train(fabric, model, optimizer, STEPS)
        blocks = [module for module in model.modules() if isinstance(module, Block)]
        assert [block.seen for block in blocks] == [{(dtype, dtype)}] * 2
        assert {p.dtype for p in model.parameters()} == {kept}
        assert losses == [step[rank.rank] for step in unsharded_in(dtype, kept)]


@pytest.mark.parametrize(("precision", "kept"), [("bf16-true", torch.bfloat16), ("bf16-mixed", torch.float32)])
@on_ranks(2)
def test_precision_of_model_parallel(rank: Rank, precision: Any, kept: torch.dtype) -> None:
    """bf16-true casts the model before it is sharded; bf16-mixed is autocast over float32 parameters."""
    with standing_in():
        fabric, model, optimizer = started(strategy("model_parallel"), precision=precision)
        losses = train(fabric, model, optimizer, STEPS)
        assert {p.dtype for p in model.parameters()} == {kept}
        expected = torch.tensor([step[rank.rank] for step in unsharded(net(), STEPS)])
        assert_close(torch.tensor(losses), expected, "losses", 5e-2)
        assert losses != expected.tolist()


@on_ranks(2)
def test_scaled_gradients(rank: Rank) -> None:
    """16-mixed with a scaler: an infinite gradient on one rank skips the step on both, and halves both scales."""
    with standing_in():
        plugin = FSDPPrecision("16-mixed")
        assert isinstance(plugin.scaler, fullshard.ShardedGradScaler)
        # Lightning makes its scaler for CUDA, where there is none it is switched off; the argument for another one it
        # refuses always.
        plugin.scaler = ShardedGradScaler(device="cpu", init_scale=2.0**8)
        fabric, model = fabric_on(strategy("fsdp"), plugins=[plugin]), net()
        model, optimizer = fabric.setup(model, sgd(model))
        before = full(model)
        loss = loss_of(model, batch(rank.rank, 0)) * (1e30 if rank.rank == 1 else 1.0)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        assert_equal(full(model), before, "parameters of a skipped step")
        assert plugin.scaler.get_scale() == 2.0**7
        losses = train(fabric, model, optimizer, STEPS)
        expected = [step[rank.rank] for step in unsharded_in(torch.float16, torch.float32)]
        assert_close(torch.tensor(losses), torch.tensor(expected), "losses", 1e-3)
        fabric.backward(loss_of(model, batch(rank.rank, 9)))
        norm = fabric.clip_gradients(model, optimizer, max_norm=1e-3)
        assert norm is not None and 1e-2 < norm < 10, "unscaled before the norm is taken"


@KINDS
@on_ranks(2)
def test_policies_of_the_strategy(rank: Rank, kind: str) -> None:
    """``mixed_precision=``, and ``mp_policy`` and ``offload_policy`` inside of the ``parallelize_fn``."""
    with standing_in():
        dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
        if kind == "fsdp":
            options: dict[str, Any] = {"mixed_precision": MixedPrecision(**dtypes)}
        else:
            policies = {"mp_policy": MixedPrecisionPolicy(**dtypes), "offload_policy": CPUOffloadPolicy()}
            options = {"parallelize": lambda model, mesh: shard(model, mesh, **policies)}
        fabric, model, optimizer = started(strategy(kind, **options))
        with record() as seen:
            train(fabric, model, optimizer, range(1))
        assert {c.dtype for c in seen if "reduce_scatter" in c.kind} == {torch.float32}
        assert {c.dtype for c in seen if "all_gather" in c.kind} == {torch.bfloat16}


# ---------------------------------------------------------------- checkpoints


def common(tmp_path: Path, fabric: Fabric) -> Path:
    """One path for all ranks: pytest gives each its own."""
    return Path(fabric.broadcast(str(tmp_path / "checkpoint")))


def plain(steps: range) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The unsharded model after these steps, with its optimizer."""
    model = net()
    optimizer = adam(model)
    unsharded(model, steps, optimizer=optimizer)
    return model, optimizer


def assert_moments(found: dict[str, Any], expected: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Require both moments of a saved optimizer, by name, to be the plain optimizer's."""
    for name, p in expected.named_parameters():
        for moment in ("exp_avg", "exp_avg_sq"):
            assert_equal(found["state"][name][moment], optimizer.state[p][moment], name)


@FORMATS
@pytest.mark.parametrize("kind", ["original", "flat", "model_parallel"])
@on_ranks(2)
def test_resuming(rank: Rank, kind: str, sharded: bool, tmp_path: Path) -> None:
    """Train, save, load into a fresh model and optimizer, train on: what an uninterrupted run gives."""

    def begin() -> tuple[Fabric, Any, Any]:
        if kind == "model_parallel":
            return started(strategy(kind, sharded))
        return started(strategy("fsdp", sharded, use_orig_params=kind == "original"))

    with standing_in():
        fabric, model, optimizer = begin()
        losses = train(fabric, model, optimizer, range(3))
        path = common(tmp_path, fabric)
        fabric.save(path, {"model": model, "optimizer": optimizer, "step": 3, "note": "kept"})
        fabric.barrier()
        assert path.is_dir() is sharded
        fabric, model, optimizer = begin()
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
        fabric, model, optimizer = started(strategy("fsdp"))
        train(fabric, model, optimizer, range(3))
        path, expected = common(tmp_path, fabric), plain(range(3))
        kept = {"model": lambda name, _: "norm" not in name}
        fabric.save(path, {"model": model, "optimizer": optimizer}, filter=kept)
        fabric.barrier()
        found = torch.load(path)
        parameters = {name: p.detach() for name, p in expected[0].named_parameters() if "norm" not in name}
        assert_equal(found["model"], parameters, "filtered parameters")
        assert_moments(found["optimizer"], *expected)


@KINDS
@on_ranks(2)
def test_checkpoint_of_a_plain_model(rank: Rank, kind: str, tmp_path: Path) -> None:
    """Model and optimizer that were saved unsharded, the optimizer by numbers, load into sharded ones."""
    with standing_in():
        expected, expected_optimizer = plain(range(3))
        fabric, model, optimizer = started(strategy(kind))
        path = common(tmp_path, fabric)
        if rank.rank == 0:
            torch.save({"model": expected.state_dict(), "optimizer": expected_optimizer.state_dict()}, path)
        fabric.barrier()
        fabric.load(path, {"model": model, "optimizer": optimizer})
        losses = train(fabric, model, optimizer, range(3, 6))
        assert losses == [step[rank.rank] for step in unsharded(net(), range(6))][3:]


@on_ranks(2)
def test_load_raw(rank: Rank, tmp_path: Path) -> None:
    """A file of weights alone; missing names are an error unless ``strict=False``."""
    with standing_in():
        fabric, model, _ = started(strategy("fsdp"))
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
        fabric, model, optimizer = started(strategy("fsdp", sharded=True))
        train(fabric, model, optimizer, range(3))
        path, (expected, expected_optimizer) = common(tmp_path, fabric), plain(range(3))
        fabric.save(path, {"model": model, "optimizer": optimizer, "step": 3})
        fabric.barrier()
        found = _load_distributed_checkpoint(path)  # all that the program calls
        assert found["step"] == 3
        assert_equal(found["model"], {n: p.detach() for n, p in expected.named_parameters()}, "parameters")
        assert_moments(found["optimizer"], expected, expected_optimizer)


@FORMATS
@pytest.mark.parametrize("first", ["torch", "fullshard"])
@on_ranks(2)
def test_checkpoint_of_the_other_engine(rank: Rank, first: str, sharded: bool, tmp_path: Path) -> None:
    """What a run on torch's fully_shard has saved, one on fullshard goes on with, and the other way round."""
    os.environ["TORCHELASTIC_RUN_ID"] = "tests"
    losses, path = [], Path()
    for engine in (first, "fullshard" if first == "torch" else "torch"):
        with standing_in() if engine == "fullshard" else contextlib.nullcontext():
            fabric, model, optimizer = started(strategy("model_parallel", sharded))
            assert isinstance(model.module, fullshard.FSDPModule) is (engine == "fullshard")
            if engine != first:
                fabric.load(path, {"model": model, "optimizer": optimizer})
            losses += train(fabric, model, optimizer, range(len(losses), len(losses) + 3))
            if engine == first:
                path = common(tmp_path, fabric)
                fabric.save(path, {"model": model, "optimizer": optimizer})
                fabric.barrier()
            del fabric, model, optimizer
            gc.collect()
    assert losses == [step[rank.rank] for step in unsharded(net(), range(6))]
