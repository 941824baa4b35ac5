"""Units of several modules: ``fully_shard([a, b])`` gathers and reduces them as one, however they are called."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from grouped_modules import (
    DIM,
    GROUPS,
    Language,
    count,
    grouped,
    grouped_with_reference,
    loss_at,
    loss_of_chunks,
    score,
    train,
)

from compare import assert_models_equal
from fullshard import FSDPModule, fully_shard
from fullshard.engine.ownership import nested_units, unit_of
from models import LossOf, assert_at_rest, batch, gathered, reference_backward, tokens
from pairwise import each_value
from ranks import Rank, on_ranks

CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-6}


def loss_of_hidden(step: int) -> LossOf:
    """Of what goes into the head, which does not run."""
    return lambda model, rank: model(tokens(rank, step, 9)).square().mean()


def loss_of_detached_chunks(step: int) -> LossOf:
    """As ``loss_of_chunks``, with a backward after each chunk, so that one chunk's logits are alive at a time."""

    def loss_of(model: Any, rank: int) -> torch.Tensor:
        hidden = model(tokens(rank, step, 9))
        leaf = hidden.detach().requires_grad_()
        for chunk in leaf.chunk(3):
            score(model.head(chunk), rank, step).backward()
        return (hidden * leaf.grad).sum()

    return loss_of


# How the head runs, and the losses of it.
MODES: list[tuple[str, Callable[[int], LossOf]]] = [("once", loss_at), ("no head", loss_of_hidden), ("chunks", loss_at)]


# ---------------------------------------------------------------- one unit


@on_ranks(2)
@pytest.mark.parametrize(("given", "units"), [(list, 5), (tuple, 5)], ids=["list", "tuple"])
def test_list_becomes_one_unit(rank: Rank, given: Any, units: int) -> None:
    """All modules of the list become FSDP modules of one unit that owns all their parameters; the list is returned."""
    model = Language()
    modules = given([model.norm, model.head])
    assert fully_shard(modules, mesh=rank.mesh) is modules
    assert type(model.norm).__name__ == "FSDPLayerNorm" and type(model.head).__name__ == "FSDPLinear"
    assert isinstance(model.norm, FSDPModule) and isinstance(model.head, FSDPModule)
    assert unit_of(model.norm) is unit_of(model.head)
    assert [p.fqn for p in unit_of(model.head).parameters] == ["weight", "bias", "weight"]
    grouped_model = grouped(rank, Language())
    assert len(nested_units(grouped_model)) == units
    grouped_model(tokens(0, 0, 9))
    assert [unit.name for unit in nested_units(grouped_model)] == ["", "blocks.0", "blocks.1", "blocks.2", "norm"]
    names = [parameter.fqn for parameter in unit_of(grouped_model.head).parameters]
    assert names == ["norm.weight", "norm.bias", "head.weight"]


@on_ranks(2)
def test_members_inside_others_and_twice(rank: Rank) -> None:
    """A module that another one of the list contains is part of that one; one listed twice counts once."""
    model = Language()
    reference = copy.deepcopy(model)
    fully_shard([model.blocks[0].up, model.blocks[0], model.norm, model.blocks[0]], mesh=rank.mesh)
    assert not isinstance(model.blocks[0].up, FSDPModule) and unit_of(model.blocks[0].up) is None
    unit = unit_of(model.norm)
    assert unit is unit_of(model.blocks[0]) and [ref() for ref in unit.modules] == [model.blocks[0], model.norm]
    train(rank, fully_shard(model, mesh=rank.mesh), reference)


@on_ranks(2)
@pytest.mark.parametrize("setting", [True, None, False], ids=["reshard", "default", "keep"])
def test_one_gather_and_one_reduction(rank: Rank, setting: bool | None) -> None:
    """A group is gathered once forward, once backward unless it is kept (as what runs last is), and reduced once."""
    model = grouped(rank, Language(), reshard_after_forward=setting)
    for step in range(3):
        forward, loss = count(model, lambda step=step: loss_at(step)(model, rank.rank))
        backward, _ = count(model, loss.backward)
        blocks = ["blocks.0", "blocks.1", "blocks.2"]
        assert forward == Counter(f"all_gather {name}" for name in ["", *blocks, "norm"])
        expected = Counter(f"reduce_scatter {name}" for name in ["", *blocks, "norm"])
        if setting is not False:
            expected.update(f"all_gather {name}" for name in [*blocks, *(["", "norm"] if setting else [])])
        assert backward == expected
        assert_at_rest(model)


@on_ranks(2)
@each_value(group=GROUPS, setting=[True, None, False])
def test_training(rank: Rank, group: str, setting: bool | None) -> None:
    """Every group trains as the model without sharding does, whatever runs between its members."""
    model, reference = grouped_with_reference(rank, group, reshard_after_forward=setting)
    train(rank, model, reference, steps=2)


@on_ranks(4)
@pytest.mark.parametrize("group", ["embedding and last block", "with an unused one"])
def test_training_on_four_ranks(rank: Rank, group: str) -> None:
    """Where most shards are empty, and backward gathers from two ranks, also what did not run in part."""
    model, reference = grouped_with_reference(rank, group, reshard_after_forward=2)
    for mode, losses in MODES:
        model.mode = reference.mode = mode
        train(rank, model, reference, losses, steps=1)


@on_ranks(2)
def test_units_inside_members(rank: Rank) -> None:
    """A member may contain units of its own, which keep their parameters."""
    model = Language()
    reference = copy.deepcopy(model)
    fully_shard(model.blocks[0].up, mesh=rank.mesh)
    fully_shard([model.blocks[0], model.blocks[1]], mesh=rank.mesh)
    train(rank, fully_shard(model, mesh=rank.mesh), reference)
    names = [unit.name for unit in nested_units(model)]
    assert names == ["", "blocks.0", "blocks.0.up"]


# ---------------------------------------------------------------- parts of a group


@on_ranks(2)
@pytest.mark.parametrize(
    ("group", "setting"),
    [("norm and head", True), ("head and norm", False), ("embedding, norm, head", True), ("everything", False)],
)
def test_only_a_part_runs(rank: Rank, group: str, setting: bool) -> None:
    """Members that do not run get no gradient. The group stays until backward, for who has read their parameters."""
    model, reference = grouped_with_reference(rank, group, reshard_after_forward=setting)
    for mode, losses in (MODES[1], MODES[0]):
        model.mode = reference.mode = mode
        with torch.no_grad():
            losses(0)(model, rank.rank)
        assert_at_rest(model)
        loss = losses(0)(model, rank.rank)
        # A part of "everything", the spare layer, never runs.
        assert bool(gathered(model)) is (mode == "no head" or group == "everything" or not setting)
        loss.backward()
        reference_backward(reference, rank.world_size, losses(0))
        assert (model.head.weight.grad is None) is (mode == "no head")
        assert_models_equal(model, reference, grads=True, **CLOSE)
        assert_at_rest(model)
        model.zero_grad()
        reference.zero_grad()


# How a member is called on its own, in how many backwards: the groups and settings that meet each other.
CHUNKS = [
    ("norm and head", True, loss_of_chunks),
    ("norm and head", None, loss_of_detached_chunks),
    ("embedding, norm, head", False, loss_of_detached_chunks),
    ("everything", True, loss_of_chunks),
]


@on_ranks(2)
@pytest.mark.parametrize(("group", "setting", "losses"), CHUNKS)
def test_head_is_called_afterwards_in_chunks(rank: Rank, group: str, setting: bool | None, losses: Any) -> None:
    """A member may be called on its own, several times, when the root's forward is over."""
    model, reference = grouped_with_reference(rank, group, reshard_after_forward=setting)
    model.mode = reference.mode = "no head"
    train(rank, model, reference, losses, steps=2)


@on_ranks(2)
@each_value(group=["norm and head", "head and norm", "embedding, norm, head"], setting=[True, None, False])
def test_head_is_called_several_times_inside(rank: Rank, group: str, setting: bool | None) -> None:
    """A member that runs in chunks inside the root is gathered at most once more, and reduced once."""
    model, reference = grouped_with_reference(rank, group, reshard_after_forward=setting)
    model.mode = reference.mode = "chunks"
    train(rank, model, reference, steps=2)
    name = unit_of(model.head).name
    forward, loss = count(model, lambda: loss_at(0)(model, rank.rank))
    assert forward[f"all_gather {name}"] <= 2
    backward, _ = count(model, loss.backward)
    assert backward[f"all_gather {name}"] <= 2 and backward[f"reduce_scatter {name}"] == 1


@on_ranks(2)
@pytest.mark.parametrize("losses", [loss_of_chunks, loss_of_detached_chunks], ids=["one backward", "one each"])
def test_chunks_with_accumulation(rank: Rank, losses: Any) -> None:
    """Microbatches without sync reduce nothing, also of chunks that have a backward each."""
    model, reference = grouped_with_reference(rank)
    model.mode = reference.mode = "no head"
    for step, sync in enumerate([False, False, True]):
        model.set_requires_gradient_sync(sync)
        reductions, _ = count(model, lambda step=step: losses(step)(model, rank.rank).backward())
        assert any(name.startswith("reduce_scatter") for name in reductions) is sync
        reference_backward(reference, rank.world_size, losses(step))
    assert_models_equal(model, reference, grads=True, **CLOSE)
    assert_at_rest(model)


@on_ranks(2)
def test_members_called_before_the_root_ran(rank: Rank) -> None:
    """A member may run and train on its own before the model's first forward."""
    model, reference = grouped_with_reference(rank)
    loss: LossOf = lambda module, number: module.head(batch(number, 0, 3, DIM)).square().mean()  # noqa: E731
    loss(model, rank.rank).backward()
    reference_backward(reference, rank.world_size, loss)
    assert_models_equal(model, reference, grads=True, **CLOSE)
    model.head.reshard()
    model.zero_grad()
    reference.zero_grad()
    train(rank, model, reference)
