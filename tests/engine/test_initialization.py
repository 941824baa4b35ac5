"""What fully_shard makes of a model: classes, units, meshes, meta devices, and parameters that users replace."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from compare import assert_equal
from front_ends import (
    COMPOSABLE,
    FLAT,
    ORIGINAL,
    RAGGED,
    FrontEnd,
    assert_at_rest,
    assert_same_gradients,
    assert_trains_alike,
    build,
    each_front_end,
    sharded_with_reference,
    unwrapped,
)
from fullshard import FSDPModule, UnmaterializedParameterError, fully_shard
from fullshard.comm import record
from fullshard.engine.ownership import nested_units, unit_of
from fullshard.engine.runtime import current_runtime, runtime_of
from fullshard.errors import FullshardError
from models import Mlp, batch, reference_backward, tiny_units, with_reference
from pairwise import pairwise
from ranks import Rank, on_ranks
from ranks.device import EMULATED

WIDTHS = (8, 3, 1, 5)  # even, uneven, fewer rows than ranks


def layers(seed: int = 1) -> nn.Sequential:
    return build(
        lambda: nn.Sequential(*(nn.Linear(n, m) for n, m in zip((6, *WIDTHS), WIDTHS, strict=False))), seed=seed
    )


def inputs() -> torch.Tensor:
    return batch(0, 0, 4, 6)


@on_ranks(2)
def test_classes_and_units(rank: Rank) -> None:
    """The module passed, and no other, becomes an FSDP<Class>, both an FSDPModule and what it was; slices are plain."""
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU())
    assert fully_shard(model, mesh=rank.mesh) is model
    assert type(model).__name__ == "FSDPSequential" and isinstance(model, FSDPModule)
    assert isinstance(model, nn.Sequential) and type(model[0]) is nn.Linear and type(model[1]) is nn.ReLU
    model = COMPOSABLE.wrap(layers(), rank)
    assert type(model) is type(fully_shard(nn.Sequential(nn.Linear(2, 2)), mesh=rank.mesh))
    part = model[:2]
    assert type(part) is nn.Sequential and part[0] is model[0] and isinstance(part[0], FSDPModule)
    units = nested_units(model)
    assert len({id(unit) for unit in units}) == 1 + len(WIDTHS)
    assert [[p.fqn for p in unit.parameters] for unit in units] == [[]] + [["weight", "bias"]] * len(WIDTHS)


@on_ranks(2)
def test_names_below_the_root(rank: Rank) -> None:
    """A unit may run before the root, which it joins when that runs."""
    reference = layers()
    model = copy.deepcopy(reference)
    for module in (model[1], model):
        fully_shard(module, mesh=rank.mesh)
    for name in ("", "1"):
        with record() as seen:
            model[1](batch(rank.rank, 0, 4, 8)).sum().backward()
        assert {c.unit for c in seen} == {name}  # a root of its own until the real one has run
        model.zero_grad()
        assert_trains_alike(model, reference, rank, steps=1)
    assert current_runtime(unit_of(model[1])) is current_runtime(unit_of(model))
    inner = fully_shard(nn.Sequential(COMPOSABLE.wrap(layers(), rank)), mesh=rank.mesh)
    inner(inputs())
    assert [unit.name for unit in nested_units(inner)] == ["", "0", "0.0", "0.1", "0.2", "0.3"]
    assert unit_of(inner[0][1]).parameters[0].fqn == "0.1.weight"


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


def on_meta(rank: Rank) -> Any:
    with torch.device("meta"):
        return COMPOSABLE.wrap(layers(), rank)


@on_ranks(4)
def test_meta_initialization_equals_that_of_distribute_tensor(rank: Rank) -> None:
    """to_empty and reset_parameters give bitwise the values that distribute_tensor'd parameters get."""
    if rank.device.type == EMULATED:
        pytest.skip("DTensor sets offsets of Philox generators, and that of the emulated device is the CPU's")
    model = on_meta(rank)
    assert all(p.device.type == "meta" and isinstance(p, DTensor) for p in model.parameters())
    model.to_empty(device=rank.device)
    reference = layers()
    for layer in reference:
        for name, p in list(layer.named_parameters()):
            layer.register_parameter(name, nn.Parameter(distribute_tensor(torch.empty_like(p), rank.mesh, [Shard(0)])))
    for module in (model, reference):
        torch.manual_seed(5)
        for layer in module:
            layer.reset_parameters()
    for (fqn, ours), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert_equal(ours.to_local().detach(), expected.to_local().detach(), fqn)
    plain = layers()
    plain.load_state_dict({key: value.full_tensor() for key, value in model.state_dict().items()})
    assert_trains_alike(model, plain, rank, steps=1)


@on_ranks(1, 2)
def test_unmaterialized_parameters_are_listed(rank: Rank) -> None:
    """A forward while parameters are on the meta device raises on every rank and lists their FQNs, no others."""
    model, reference = on_meta(rank), layers()
    model[2].to_empty(device=rank.device)
    for _ in range(2):
        with pytest.raises(UnmaterializedParameterError, match="to_empty") as raised:
            model(inputs())
        for name in ("0.weight", "0.bias", "1.weight", "3.bias"):
            assert name in str(raised.value)
        assert "2.weight" not in str(raised.value)
    for _ in range(2):
        model.to_empty(device=rank.device)
        with torch.no_grad():
            for p, plain in zip(model.parameters(), reference.parameters(), strict=True):
                p.copy_(distribute_tensor(plain.detach(), rank.mesh, p.placements))
        assert_trains_alike(model, reference, rank, steps=1)


@on_ranks(2)
def test_weights_of_rank_0_reach_a_meta_model(rank: Rank) -> None:
    """Broadcasting rank 0's values and loading them with assign=True gives a model that trains."""
    reference, model, state = layers(seed=rank.rank), on_meta(rank), {}
    for (fqn, meta), value in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
        dist.broadcast(value, 0)
        state[fqn] = distribute_tensor(value, meta.device_mesh, meta.placements)
    model.load_state_dict(state, assign=True)
    assert_trains_alike(model, reference, rank, steps=1)


def back_up_and_replace(parameter: nn.Parameter) -> None:
    parameter.backup = parameter.data
    parameter.data = parameter.data + 1


ASSIGNMENTS: dict[str, Callable[[Any], None]] = {
    "plus one": lambda p: setattr(p, "data", p.data + 1),
    "back up and replace": back_up_and_replace,
    "whole": lambda p: setattr(p, "data", torch.ones(p.shape)),
    "rows": lambda p: setattr(p, "data", torch.ones(p.to_local().shape)),
}


@on_ranks(2)
@pairwise(front_end=[COMPOSABLE, RAGGED], assignment=ASSIGNMENTS, steps=[0, 1])
def test_assigned_data_takes_effect_or_raises(rank: Rank, front_end: FrontEnd, assignment: str, steps: int) -> None:
    """``p.data = value`` raises at the next forward, with the FQN, unless it fits a ragged shard; writes count."""
    model, reference = (build(Mlp, 6, 7, 3) for _ in range(2))
    front_end.wrap(model, rank, ["layers.0"])
    assert_trains_alike(model, reference, rank, steps=steps)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        p.data = p.data
        p.data.add_(1)
        q.data.add_(1)
    assert_trains_alike(model, reference, rank, steps=1)
    if rank.device.type == EMULATED and assignment in ("whole", "rows"):
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            ASSIGNMENTS[assignment](model.layers[0].weight)
        return
    ASSIGNMENTS[assignment](model.layers[0].weight)
    if front_end == RAGGED and assignment in ("plus one", "back up and replace"):
        reference.layers[0].weight.data += 1
        assert_trains_alike(model, reference, rank, steps=1)
        return
    for _ in range(2):
        with pytest.raises(FullshardError, match=r"layers\.0\.weight: a tensor was assigned to \.data"):
            model(batch(rank.rank, 0, 4, 6))
    model.layers[0].weight = nn.Parameter(reference.layers[0].weight.detach().clone())
    assert_trains_alike(model, reference, rank, steps=1)


@on_ranks(2)
@each_front_end
def test_assigned_data_of_unsharded_parameters_raises(rank: Rank, front_end: FrontEnd) -> None:
    """Data assigned inside of a forward, as of a clamped temperature, would never be all-gathered again: it raises."""
    model = front_end.wrap(build(Mlp, 6, 7, 3), rank, [])
    inner, inputs = unwrapped(model).layers[1], batch(rank.rank, 0, 4, 6)
    model(inputs).sum().backward()
    handle = inner.register_forward_pre_hook(lambda m, _: setattr(m.bias, "data", m.bias.data.clamp(-1, 1)))
    model(inputs).sum().backward()
    handle.remove()
    with pytest.raises(FullshardError, match=r"layers\.1\.bias: a tensor was assigned to \.data"):
        model(inputs)


@on_ranks(2)
@pytest.mark.parametrize("front_end", [ORIGINAL, FLAT], ids=str)
def test_data_of_flat_parameters_may_be_assigned_and_its_memory_freed(rank: Rank, front_end: FrontEnd) -> None:
    """``p.data = value`` takes effect; storages are freed and refilled, or cannot be, and without one no unit runs."""
    model, reference = sharded_with_reference(front_end, rank, build(Mlp, 6, 7, 3))
    for p in (*model.parameters(), *reference.parameters()):
        p.data = p.data * 0.5
    assert_trains_alike(model, reference, rank)
    for p in model.parameters():
        storage, value = p.untyped_storage(), p.detach().clone()
        if front_end.flat:
            storage.resize_(0)
            with pytest.raises(FullshardError, match="has no memory: its storage was resized to 0 bytes"):
                model(batch(rank.rank, 0, 4, 6))
            others = [torch.full_like(value, torch.nan) for _ in range(8)]  # may take the memory
            storage.resize_(value.nbytes)
            p.data.copy_(value)
            del others
        elif value.numel() and rank.device.type != EMULATED:  # which resizes memory that it has not allocated
            with pytest.raises(RuntimeError, match="not resizable"):
                storage.resize_(0)
    assert_trains_alike(model, reference, rank)


@on_ranks(1, 2)
def test_replacement_that_does_not_fit_is_named(rank: Rank) -> None:
    """Another shape, other placements or none at all are refused on every rank, with the FQN and the remedy."""
    replicated = distribute_tensor(torch.ones(7, 6), rank.mesh, [Replicate()])
    refused = {
        r"layers\.0\.weight \(shape \(7, 6\).*replaced by a parameter of shape \(9, 9\)": (0, torch.ones(9, 9)),
        r"layers\.1\.weight \(shape \(3, 7\).*replaced by a parameter of shape \(9, 9\)": (1, torch.ones(9, 9)),
        r"layers\.0\.weight.*Replicate.*expected.*Shard.*redistribute it first": (0, replicated),
        r"layers\.0\.weight.*was removed from its module": (0, None),
    }
    for words, (layer, value) in refused.items():
        model, _ = with_reference(Mlp(6, 7, 3), rank)
        model(inputs())
        model.layers[layer].weight = None if value is None else nn.Parameter(value)
        with pytest.raises(ValueError, match=words):
            model(inputs())


@on_ranks(2)
@pytest.mark.parametrize("how", ["together", "forward"])
def test_unit_unsharded_beside_one_that_is_refused(rank: Rank, how: str) -> None:
    """If the second unit of one launch refuses a replaced parameter, the first is unsharded anew after the repair."""
    with tiny_units(2**16):
        model, reference = with_reference(build(Mlp, 6, 6, 6, 6), rank)
    x = batch(rank.rank, 0, 4, 6)
    model(x)  # attaches the units, and records their order
    good = model.layers[1].weight
    model.layers[1].weight = nn.Parameter(torch.ones(9, 9))
    units = [unit_of(layer) for layer in model.layers]
    with pytest.raises(ValueError, match=r"layers\.1\.weight.*replaced by a parameter of shape \(9, 9\)"):
        model(x) if how == "forward" else runtime_of(units[0]).begin_unshard(units)
    assert not any(unit.is_unsharded for unit in units)
    model.layers[1].weight = good
    for step in range(2):
        model(batch(rank.rank, step, 4, 6)).square().mean().backward()
        reference_backward(reference, 2, lambda m, r, step=step: m(batch(r, step, 4, 6)).square().mean())
        assert_same_gradients(model, reference)
        assert_at_rest(model)
