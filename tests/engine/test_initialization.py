"""What fully_shard makes of a model: classes, units, meshes, ignored parameters, meta-device initialisation."""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from compare import assert_close, assert_equal, assert_models_equal
from fullshard import FSDPModule, UnmaterializedParameterError, fully_shard
from fullshard.engine.ownership import nested_units, unit_of
from ranks import Rank, on_ranks
from ranks.device import EMULATED

WIDTHS = (8, 3, 1, 5)  # even, uneven, fewer rows than ranks


def build(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    sizes = zip((6, *WIDTHS), WIDTHS, strict=False)
    return nn.Sequential(*(nn.Linear(n, m) for n, m in sizes))


def shard(rank: Rank, model: nn.Sequential, **options: object) -> nn.Sequential:
    for layer in model:
        fully_shard(layer, mesh=rank.mesh, **options)
    return fully_shard(model, mesh=rank.mesh, **options)


def inputs() -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(7))


def assert_trains_alike(rank: Rank, model: nn.Module, reference: nn.Module) -> None:
    """Two steps of both, each rank on its own rows; parameters and gradients agree."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for _ in range(2):
        own = inputs().chunk(rank.world_size)[rank.rank]
        for module, optimizer, x in ((model, optimizers[0], own), (reference, optimizers[1], inputs())):
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
    assert_models_equal(model, reference, grads=True, rtol=2e-5, atol=1e-6)


# ---------------------------------------------------------------- classes and units


@on_ranks(2)
def test_class_is_named_after_the_old_one_and_derives_from_it(rank: Rank) -> None:
    """The module passed, and no other, becomes an FSDP<Class>, both an FSDPModule and what it was."""
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU())
    assert fully_shard(model, mesh=rank.mesh) is model
    assert type(model).__name__ == "FSDPSequential"
    assert isinstance(model, FSDPModule) and isinstance(model, nn.Sequential)
    assert type(model[0]) is nn.Linear and type(model[1]) is nn.ReLU
    other = fully_shard(nn.Sequential(nn.Linear(2, 2)), mesh=rank.mesh)
    assert type(other) is type(model)


@on_ranks(2)
def test_slice_of_a_sharded_sequential_is_plain(rank: Rank) -> None:
    """Slicing makes a new Sequential, which is not sharded; the units in it still are."""
    model = shard(rank, build())
    part = model[:2]
    assert type(part) is nn.Sequential and part[0] is model[0]
    assert isinstance(part[0], FSDPModule)


@on_ranks(2)
def test_each_call_makes_its_own_unit(rank: Rank) -> None:
    """Units are distinct objects that own distinct parameters, those below not again in those above."""
    model = shard(rank, build())
    units = nested_units(model)
    assert len({id(unit) for unit in units}) == 1 + len(WIDTHS)
    assert [[p.fqn for p in unit.parameters] for unit in units] == [[]] + [["weight", "bias"]] * len(WIDTHS)


@on_ranks(2)
def test_parameters_get_their_full_names_at_the_first_forward(rank: Rank) -> None:
    """From the first forward on, units and parameters are named as below the root."""
    model = fully_shard(nn.Sequential(nn.Sequential(build())), mesh=rank.mesh)
    inner = fully_shard(nn.Sequential(shard(rank, build())), mesh=rank.mesh)
    model(inputs())
    inner(inputs())
    assert unit_of(model).parameters[1].fqn == "0.0.0.bias"
    assert [unit.name for unit in nested_units(inner)] == ["", "0", "0.0", "0.1", "0.2", "0.3"]
    assert unit_of(inner[0][1]).parameters[0].fqn == "0.1.weight"


@on_ranks(2)
@pytest.mark.parametrize("top_first", [False, True])
def test_units_may_be_made_in_any_order(rank: Rank, top_first: bool) -> None:
    """Sharding a child after its parent is as harmless as the other way round: the parent keeps the parameters."""
    reference = build()
    model = copy.deepcopy(reference)
    fully_shard(model if top_first else model[1], mesh=rank.mesh)
    fully_shard(model[1] if top_first else model, mesh=rank.mesh)
    assert sum(len(unit.parameters) for unit in nested_units(model)) == 2 * len(WIDTHS)
    assert_trains_alike(rank, model, reference)


@on_ranks(2)
def test_child_may_run_before_the_root(rank: Rank) -> None:
    """A unit that is run on its own first joins the root when that runs, and trains with it."""
    reference = build()
    model = shard(rank, copy.deepcopy(reference))
    model[0](inputs()).sum().backward()
    reference[0](inputs()).sum().backward()
    assert_models_equal(model[0], reference[0], grads=True, rtol=1e-5, atol=1e-6)
    assert_trains_alike(rank, model, reference)
    assert unit_of(model[0]).runtime is unit_of(model).runtime


# ---------------------------------------------------------------- mesh


@on_ranks(1, 2)
def test_default_mesh_is_all_ranks(rank: Rank) -> None:
    """Without a mesh the parameters are sharded over the default group, with one mesh for all units."""
    reference = build()
    model = copy.deepcopy(reference)
    for module in (*model, model):
        fully_shard(module)
    assert len({id(unit.mesh) for unit in nested_units(model)}) == 1
    assert model[0].weight.device_mesh.shape == (rank.world_size,)
    assert_trains_alike(rank, model, reference)


@pytest.mark.cpu_only("the back end of a script's device")
@on_ranks(1, fresh=True)
def test_plain_script_without_launcher_is_a_world_of_one(rank: Rank) -> None:
    """Without a process group and an environment from a launcher a program trains in a world of one process."""
    dist.destroy_process_group()
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(key, None)
    model = fully_shard(nn.Linear(3, 2))
    optimizer = torch.optim.Adam(model.parameters())
    before = model.weight.full_tensor().clone()
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    assert dist.get_world_size() == 1
    assert (model.weight.full_tensor() != before).all()


# ---------------------------------------------------------------- meta device


def on_meta(rank: Rank, *, one_unit: bool = False) -> nn.Sequential:
    with torch.device("meta"):
        model = build()
    return fully_shard(model, mesh=rank.mesh) if one_unit else shard(rank, model)


@on_ranks(4)
@pytest.mark.parametrize("one_unit", [True, False], ids=["one unit", "unit per layer"])
def test_meta_initialisation_equals_that_of_distribute_tensor(rank: Rank, one_unit: bool) -> None:
    """to_empty and reset_parameters give bitwise the values that distribute_tensor'd parameters get."""
    if rank.device.type == EMULATED:
        pytest.skip("DTensor sets offsets of Philox generators, and that of the emulated device is the CPU's")
    model = on_meta(rank, one_unit=one_unit)
    assert all(p.device.type == "meta" and isinstance(p, DTensor) for p in model.parameters())
    model.to_empty(device=rank.device)
    reference = build()
    for layer in reference:
        for name, p in list(layer.named_parameters()):
            layer.register_parameter(name, nn.Parameter(distribute_tensor(torch.empty_like(p), rank.mesh, [Shard(0)])))
    for module in (model, reference):
        torch.manual_seed(5)
        for layer in module:
            layer.reset_parameters()
    for (fqn, ours), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert_equal(ours.to_local().detach(), expected.to_local().detach(), fqn)
    plain = build()
    plain.load_state_dict({key: value.full_tensor() for key, value in model.state_dict().items()})
    assert_trains_alike(rank, model, plain)


@on_ranks(1, 2)
def test_unmaterialised_parameters_are_listed(rank: Rank) -> None:
    """A forward while parameters are on the meta device raises on every rank and lists their FQNs, no others."""
    model = on_meta(rank)
    model[2].to_empty(device="cpu")
    for _ in range(2):
        with pytest.raises(UnmaterializedParameterError, match="to_empty") as raised:
            model(inputs())
        for name in ("0.weight", "0.bias", "1.weight", "3.bias"):
            assert name in str(raised.value)
        assert "2.weight" not in str(raised.value)


@on_ranks(2)
def test_materialising_after_the_error_helps(rank: Rank) -> None:
    """After the error the remedy it names works on the same model."""
    model = on_meta(rank)
    with pytest.raises(UnmaterializedParameterError):
        model(inputs())
    model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.constant_(p, 0.5)
    reference = build()
    for p in reference.parameters():
        nn.init.constant_(p, 0.5)
    assert_close(model(inputs()).detach(), reference(inputs()).detach(), "output", rtol=1e-5)
    assert_trains_alike(rank, model, reference)


@on_ranks(2)
def test_weights_of_rank_0_reach_a_meta_model(rank: Rank) -> None:
    """Broadcasting rank 0's values and loading them with assign=True gives a model that trains."""
    reference = build(seed=rank.rank)
    model = on_meta(rank)
    state = {}
    for (fqn, meta), value in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
        dist.broadcast(value, 0)
        state[fqn] = distribute_tensor(value, meta.device_mesh, meta.placements)
    model.load_state_dict(state, assign=True)
    assert_trains_alike(rank, model, reference)
