"""Full tensors one after another: from every kind of model, in bounded memory, and abandoned half-way."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from checkpoint.kinds import KINDS, Model, build, reference
from compare import assert_equal
from front_ends import COMPOSABLE, FLAT, FrontEnd, each_front_end, sharded_with_reference, unwrapped
from front_ends import build as build_model
from fullshard import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    PhaseError,
    UnmaterializedParameterError,
    fully_shard,
    load,
    save,
    unsharded,
)
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.checkpoint.safetensors.stream import full_tensors
from fullshard.engine.ownership import nested_units
from models import Language, Mlp, tokens
from ranks import Rank, on_ranks


def tensor_bytes() -> int:
    """Memory of all plain tensors that there are."""
    gc.collect()
    storages: dict[int, int] = {}  # by address, where a larger one may begin as well
    for each in gc.get_objects():
        if type(each) is torch.Tensor and each.device.type != "meta" and each.layout is torch.strided:
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = max(storage.nbytes(), storages.get(storage.data_ptr(), 0))
    return sum(storages.values())


@on_ranks(4)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_what_the_plain_model_has(rank: Rank, kind: str) -> None:
    """Names, shapes, dtypes and values are the plain model's, tied ones under each name."""
    found = dict(full_tensors(build(rank, kind)))
    assert_equal(found, dict(reference()), kind)
    assert found["head.weight"] is found["embed.weight"]


@on_ranks(1, 2)
@pytest.mark.parametrize("kind", ["fully_shard", "flat"])
def test_floating_point_tensors_are_converted(rank: Rank, kind: str) -> None:
    """With a dtype, floating-point tensors come in it, rounded once; others as they are."""
    expected = {n: (v.bfloat16() if v.is_floating_point() else v).cpu() for n, v in reference().items()}
    assert_equal(dict(full_tensors(build(rank, kind), dtype=torch.bfloat16, device="cpu")), expected, "in bfloat16")


@on_ranks(2)
@pytest.mark.parametrize("kind", ["fully_shard", "flat"])
def test_an_abandoned_iteration_leaves_the_model_as_it_was(rank: Rank, kind: str) -> None:
    """After a break at any place, the model holds its shards, runs, and gives everything again."""
    model, data = build(rank, kind), torch.arange(8)
    held = [id(p) for p in model.parameters()]
    for stop in (0, 1, 4):
        for index, _ in enumerate(full_tensors(model)):
            if index == stop:
                break
        assert [id(p) for p in model.parameters()] == held
        assert all(not unit.is_unsharded and not unit.registration.unsharded for unit in nested_units(model))
    plain = Model()
    assert_equal(model(data), plain(data), "output")
    model(data).sum().backward()
    plain(data)  # which counts, too
    assert_equal(dict(full_tensors(model)), dict(plain.state_dict()), "again")


@on_ranks(2)
@pytest.mark.parametrize("front_end", [COMPOSABLE, FLAT], ids=str)
def test_one_tensor_is_alive_at_a_time(rank: Rank, front_end: FrontEnd) -> None:
    """Memory of a tensor goes with it, unless the caller keeps it.

    A thread of the back end may hold the result of an all-gather for a moment longer.
    """
    model, plain = sharded_with_reference(front_end, rank, build_model(Mlp, 64, 129, 64, 129, 64))
    sizes = [p.shape.numel * 4 for unit in nested_units(model) for p in unit.parameters]
    at_rest = tensor_bytes()
    alive = max(tensor_bytes() for _ in full_tensors(model))
    assert max(sizes) / 2 < alive - at_rest < 2 * max(sizes) + 20_000 < sum(sizes)
    assert tensor_bytes() - at_rest < 1000
    kept = dict(full_tensors(model))
    assert sum(value.nbytes for value in kept.values()) > max(sizes)
    assert_equal(kept, dict(plain.state_dict()), "kept")


@on_ranks(2)
def test_values_are_those_of_the_shards(rank: Rank) -> None:
    """Whatever the modules compute in, also offloaded; buffers come in the dtype in which they are saved.

    Parameters and buffers that a user has distributed, in no unit, come whole.
    """
    options = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16), "offload_policy": CPUOffloadPolicy()}
    found = dict(full_tensors(fully_shard(Model(), mesh=rank.mesh, **options)))
    assert_equal(found, dict(reference()), "values")
    model = build(rank, "low_buffers")
    with pytest.raises(RuntimeError, match="BFloat16"):
        model(torch.arange(8))  # casts buffers, with which this norm cannot compute
    mean = dict(full_tensors(model))["norm.running_mean"]
    assert_equal(mean, reference()["norm.running_mean"].bfloat16().float(), "running_mean")
    plain = nn.Linear(6, 5)
    weight = plain.weight.detach().clone()
    dist.broadcast(weight, 0)
    plain.weight = nn.Parameter(distribute_tensor(weight, rank.mesh, [Shard(1)]))
    plain.register_buffer("table", distribute_tensor(torch.arange(7.0), rank.mesh, [Shard(0)]))
    found = dict(full_tensors(plain))
    assert_equal([found["weight"], found["table"]], [weight, torch.arange(7.0)], "the user's")


@on_ranks(2)
@each_front_end
def test_parts_of_wrappers_and_units_are_whole(rank: Rank, front_end: FrontEnd, tmp_path: Path) -> None:
    """What is inside of a wrapper, or in the middle of a unit, finds the unit, also if its wrapper is gone."""
    torch.manual_seed(rank.rank)
    model, plain = sharded_with_reference(front_end, rank, build_model(Language), ["blocks.0"])
    optimizer = torch.optim.Adam(model.parameters())
    model(tokens(rank.rank, 0, 2, 3)).sum().backward()
    optimizer.step()
    whole = dict(full_tensors(model))
    inner = unwrapped(model)
    for number, name in enumerate(["", "blocks", "blocks.1", "blocks.0", "head", "head"]):
        if number == 5:
            del model, optimizer
            gc.collect()
        part = inner.get_submodule(name)
        part = part if front_end.composable else getattr(part, "module", part)
        expected = {n.removeprefix(f"{name}."): v for n, v in whole.items() if n.startswith(name)}
        assert_equal(dict(full_tensors(part)), expected, name)
        save(tmp_path / str(number), part, *([optimizer] if not name else []))
        shapes = {tuple(value.shape) for value in expected.values()}
        with torch.no_grad(), unsharded(part):
            assert {tuple(p.shape) for p in part.parameters()} == shapes
        with FSDP.summon_full_params(part):
            assert {tuple(p.shape) for p in part.parameters()} == shapes
        target = plain.get_submodule(name)
        load(tmp_path / str(number), target)
        assert_equal(dict(target.state_dict()), expected, f"loaded {name}")
        load(tmp_path / str(number), part)


@on_ranks(2)
def test_wrong_moments_are_refused_at_the_call(rank: Rank) -> None:
    """In the middle of a step, on the meta device, or for a dtype that makes no sense, the call itself raises."""
    model = build(rank, "flat")
    with FSDP.summon_full_params(model), pytest.raises(PhaseError, match="middle of a step"):
        full_tensors(model)
    with torch.device("meta"):
        meta = fully_shard(Model(), mesh=rank.mesh)
    with pytest.raises(UnmaterializedParameterError, match="meta device"):
        full_tensors(meta)
    with pytest.raises(ValueError, match="floating-point"):
        full_tensors(model, dtype=torch.int8)
