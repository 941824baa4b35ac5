"""Full tensors one after another: from every form of model, in bounded memory, and abandoned half-way."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from weight_models import FORMS, Net, build, form, full_state

from checkpoint.kinds import shared_folder
from compare import assert_equal
from front_ends import FRONT_ENDS, sharded_with_reference, unwrapped
from front_ends import build as build_model
from fullshard import (
    CPUOffloadPolicy,
    MixedPrecision,
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
from models import Language, tokens
from ranks import Rank, on_ranks

forms = pytest.mark.parametrize("name", FORMS)


def collected(model: nn.Module, **options: object) -> dict[str, torch.Tensor]:
    """All that comes, kept."""
    return dict(full_tensors(model, **options))  # type: ignore[arg-type]


def tensor_bytes() -> int:
    """Memory of all plain tensors that there are."""
    gc.collect()
    storages: dict[int, int] = {}  # by address, where a larger one may begin as well
    for each in gc.get_objects():
        if type(each) is torch.Tensor and each.device.type != "meta" and each.layout is torch.strided:
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = max(storage.nbytes(), storages.get(storage.data_ptr(), 0))
    return sum(storages.values())


def fail_inside(model: nn.Module) -> None:
    """What happens to a loop whose body raises."""
    for _ in full_tensors(model):
        raise KeyError("the caller's")


@on_ranks(1, 4)
@forms
def test_every_form_gives_what_the_plain_model_has(rank: Rank, name: str) -> None:
    """Names, shapes, dtypes and values are the plain model's, tied ones under each name."""
    if name == "hybrid" and rank.world_size == 1:
        pytest.skip("two axes need two ranks")
    expected = full_state(build())
    model = form(name, rank, build())
    found = collected(model)
    assert set(found) == set(expected)
    for fqn, value in expected.items():
        assert type(found[fqn]) is torch.Tensor
        assert_equal(found[fqn], value, fqn)
    assert found["head.weight"] is found["words.weight"]


@on_ranks(2)
@pytest.mark.parametrize("name", ["fully_shard", "wrapper"])
def test_floating_point_tensors_are_converted(rank: Rank, name: str) -> None:
    """With a dtype, floating-point tensors come in it, rounded once; others as they are."""
    expected = full_state(build())
    found = collected(form(name, rank, build()), dtype=torch.bfloat16, device="cpu")
    for fqn, value in expected.items():
        assert_equal(found[fqn], (value.bfloat16() if value.is_floating_point() else value).cpu(), fqn)


@on_ranks(2)
@pytest.mark.parametrize("name", ["fully_shard", "wrapper"])
def test_abandoned_iteration_leaves_the_model_as_it_was(rank: Rank, name: str) -> None:
    """After a break at any place, the model holds its shards, runs, and gives everything again."""
    model = form(name, rank, build())
    tokens = torch.arange(8).view(2, 4)
    expected = full_state(build())
    held = [id(p) for p in model.parameters()]
    for stop in (0, 1, 4):
        for index, _ in enumerate(full_tensors(model)):
            if index == stop:
                break
        assert [id(p) for p in model.parameters()] == held
        assert all(not unit.is_unsharded and not unit.registration.unsharded for unit in nested_units(model))
    with pytest.raises(KeyError):
        fail_inside(model)
    assert_equal(model(tokens), build()(tokens), "output")
    model(tokens).sum().backward()
    for fqn, value in collected(model).items():
        assert_equal(value, expected[fqn], fqn)


@on_ranks(2)
@pytest.mark.parametrize("name", ["fully_shard", "wrapper"])
def test_one_tensor_is_alive_at_a_time(rank: Rank, name: str) -> None:
    """Memory of a tensor goes with it, unless the caller keeps it.

    A thread of the back end may hold what has just been gathered for a moment longer.
    """
    model = form(name, rank, build(dim=64, words=50))
    sizes = [p.shape.numel * 4 for unit in nested_units(model) for p in unit.parameters]
    at_rest = tensor_bytes()
    alive = max(tensor_bytes() for _ in full_tensors(model))
    assert max(sizes) / 2 < alive - at_rest < 2 * max(sizes) + 20_000 < sum(sizes)
    assert tensor_bytes() - at_rest < 1000
    kept = collected(model)
    assert sum(value.nbytes for value in kept.values()) > max(sizes)
    for fqn, value in full_state(build(dim=64, words=50)).items():
        assert_equal(kept[fqn], value, fqn)


@on_ranks(2)
def test_compute_dtypes_and_offload_do_not_matter(rank: Rank) -> None:
    """Values are those of the shards, and buffers those that are saved, whatever the modules compute in."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = fully_shard(build(), mesh=rank.mesh, mp_policy=policy, offload_policy=CPUOffloadPolicy())
    for fqn, value in collected(model).items():
        assert_equal(value, full_state(build())[fqn], fqn)
    model = FSDP(build(), mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16), process_group=rank.group)
    model(torch.arange(4).view(1, 4))
    assert collected(model)["blocks.0.offset"].dtype is torch.float32


@on_ranks(2)
def test_dtensors_of_the_user_are_gathered_as_well(rank: Rank) -> None:
    """Parameters and buffers that a user has distributed, in no unit, come whole."""
    model = nn.Linear(6, 5)
    expected = full_state(model)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), rank.mesh, [Shard(1)]))
    dist.broadcast(expected["weight"], 0)
    model.register_buffer("table", distribute_tensor(torch.arange(7.0), rank.mesh, [Shard(0)]))
    found = collected(model)
    assert_equal(found["weight"], expected["weight"], "weight")
    assert_equal(found["table"], torch.arange(7.0), "table")
    assert not any(isinstance(value, DTensor) for value in found.values())


@on_ranks(2)
@pytest.mark.parametrize("form", ["composable", "ragged", "flat", "original"])
def test_parts_of_wrappers_and_units_are_whole(rank: Rank, form: str) -> None:
    """What is inside of a wrapper, or in the middle of a unit, finds the unit, also if its wrapper is gone."""
    torch.manual_seed(rank.rank)
    front_end = next(each for each in FRONT_ENDS if each.name == form)
    model, reference = sharded_with_reference(front_end, rank, build_model(Language), ["blocks.0"])
    optimizer = torch.optim.Adam(model.parameters())
    model(tokens(rank.rank, 0, 2, 3)).sum().backward()
    optimizer.step()
    whole = collected(model)
    inner = unwrapped(model)
    with shared_folder(rank) as folder:
        for number, name in enumerate(["", "blocks", "blocks.1", "blocks.0", "head", "head"]):
            if number == 5:
                del model, optimizer
                gc.collect()
            part = inner.get_submodule(name)
            part = part if front_end.composable else getattr(part, "module", part)
            expected = {n.removeprefix(f"{name}."): v for n, v in whole.items() if n.startswith(name)}
            found = collected(part)
            assert found.keys() == expected.keys()
            for fqn, value in found.items():
                assert_equal(value, expected[fqn], f"{name} {fqn}")
            save(folder / str(number), part, *([optimizer] if not name else []))
            with torch.no_grad(), unsharded(part):
                assert {tuple(p.shape) for p in part.parameters()} == {tuple(v.shape) for v in expected.values()}
            with FSDP.summon_full_params(part):
                assert {tuple(p.shape) for p in part.parameters()} == {tuple(v.shape) for v in expected.values()}
            plain = reference.get_submodule(name)
            load(folder / str(number), plain)
            for fqn, value in plain.state_dict().items():
                assert_equal(value, expected[fqn], f"loaded {name} {fqn}")
            load(folder / str(number), part)


@on_ranks(2)
def test_wrong_moments_are_refused_at_the_call(rank: Rank) -> None:
    """In the middle of a step, on the meta device, or for a dtype that makes no sense, the call itself raises."""
    model = form("wrapper", rank, build())
    with FSDP.summon_full_params(model), pytest.raises(PhaseError, match="middle of a step"):
        full_tensors(model)
    with torch.device("meta"):
        meta = Net()
    with pytest.raises(UnmaterializedParameterError, match="meta device"):
        full_tensors(form("fully_shard", rank, meta))
    with pytest.raises(ValueError, match="floating-point"):
        full_tensors(model, dtype=torch.int8)
