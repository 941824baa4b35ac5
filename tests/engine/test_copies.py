"""Copies of sharded models, their end, and pickling."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from compare import assert_equal, assert_models_equal
from fullshard import FSDPModule, FullshardError, fully_shard
from fullshard.engine.ownership import nested_units, unit_of
from ranks import Rank, on_ranks


class LanguageModel(nn.Module):
    """Embedding, blocks, and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(tokens))) * self.scale


def build() -> LanguageModel:
    torch.manual_seed(1)
    return LanguageModel()


def shard(rank: Rank, model: LanguageModel) -> LanguageModel:
    for block in model.blocks:
        fully_shard(block, mesh=rank.mesh)
    fully_shard(model.embed, mesh=rank.mesh)
    return fully_shard(model, mesh=rank.mesh)


def tokens(step: int = 0) -> torch.Tensor:
    return torch.randint(7, (8, 3), generator=torch.Generator().manual_seed(step))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, steps: int, first: int = 0) -> nn.Module:
    """Steps on the same batches on every rank."""
    optimizer = sgd(model)
    for index in range(first, first + steps):
        optimizer.zero_grad()
        model(tokens(index)).square().mean().backward()
        optimizer.step()
    return model


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("when", ["fresh", "after steps", "after forward", "unsharded"])
def test_deepcopy_is_an_equal_independent_model(rank: Rank, when: str) -> None:
    """A copy has equal parameters and outputs, no gradients, and shares no memory; both train on like plain models."""
    reference = build()
    model = shard(rank, copy.deepcopy(reference))
    if when == "after steps":
        train(model, 2)
        train(reference, 2)
    elif when == "after forward":
        model(tokens())
    elif when == "unsharded":
        model.blocks[0].unshard()
    copied = copy.deepcopy(model)
    assert_models_equal(copied, copy.deepcopy(reference), grads=True, rtol=2e-5, atol=1e-6)
    assert type(copied) is type(model) and isinstance(copied.blocks[0], FSDPModule)
    pointers = [
        {p.to_local().data_ptr() for p in module.parameters() if p.to_local().numel()} for module in (model, copied)
    ]
    assert not pointers[0] & pointers[1]
    with torch.no_grad():
        assert_equal(copied(tokens(9)), model(tokens(9)), "output")
    before = copy.deepcopy(reference)
    train(copied, 2, first=5)
    assert_models_equal(model, before, rtol=2e-5, atol=1e-6)
    for module in (model, reference):
        module.zero_grad()
    train(reference, 2, first=5)
    assert_models_equal(copied, reference, grads=True, rtol=2e-5, atol=1e-6)
    train(model, 2, first=5)
    assert_models_equal(model, reference, grads=True, rtol=2e-5, atol=1e-6)


@on_ranks(2)
def test_copy_has_the_settings_and_units_of_the_original(rank: Rank) -> None:
    """A copy has one unit per unit of the original, its own ties, and the same reshard settings."""
    model = shard(rank, build())
    model.blocks[1].set_reshard_after_forward(False)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    copied = copy.deepcopy(model)
    for ours, theirs in zip(nested_units(model), nested_units(copied), strict=True):
        assert ours is not theirs
        assert ours.settings.reshard_after_forward == theirs.settings.reshard_after_forward
        assert [p.fqn for p in ours.parameters] == [p.fqn for p in theirs.parameters]
    copied.blocks[1].set_reshard_after_forward(True)
    assert unit_of(model.blocks[1]).settings.reshard_after_forward is False
    assert copied.embed.weight is copied.head.weight is not model.head.weight
    assert isinstance(copied.embed.weight, DTensor)
    copied(tokens()).sum().backward()
    assert all(p.grad is None for p in model.parameters())


@on_ranks(2, 4)
def test_exponential_moving_average_over_a_copy(rank: Rank) -> None:
    """The usual EMA loop over a copy's parameters gives what it gives with plain modules."""

    def run(model: nn.Module) -> nn.Module:
        average = copy.deepcopy(model).requires_grad_(False)
        optimizer = sgd(model)
        for index in range(4):
            optimizer.zero_grad()
            model(tokens(index)).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                    slow.lerp_(fast, 0.2)
                average(tokens(index))
        return average

    assert_models_equal(run(shard(rank, build())), run(build()), rtol=2e-5, atol=1e-6)


@on_ranks(2)
def test_averaged_model_of_torch(rank: Rank) -> None:
    """torch.optim.swa_utils.AveragedModel, which copies the model, works on a sharded one."""
    model, reference = shard(rank, build()), build()
    averages = [torch.optim.swa_utils.AveragedModel(m) for m in (model, reference)]
    for module, average in zip((model, reference), averages, strict=True):
        for index in range(3):
            train(module, 1, first=index)
            average.update_parameters(module)
    assert_models_equal(averages[0].module, averages[1].module, rtol=2e-5, atol=1e-6)


@on_ranks(2)
def test_copy_of_a_plain_module_around_units(rank: Rank) -> None:
    """A plain module that contains units is copied with them; so is a unit alone."""
    model = nn.ModuleDict({"a": fully_shard(nn.Linear(3, 2), mesh=rank.mesh), "b": nn.Linear(2, 2)})
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for p in copied.parameters():
            p.zero_()
        assert not copied["a"](torch.ones(1, 3)).any()
        assert model["a"](torch.ones(1, 3)).any()


@on_ranks(2)
def test_unit_below_a_sharded_model_can_be_copied_alone(rank: Rank) -> None:
    """A copy of one unit is the root of itself, whatever the original belongs to."""
    model = shard(rank, build())
    model(tokens()).sum().backward()
    block = copy.deepcopy(model.blocks[0])
    x = torch.ones(2, 6)
    assert_equal(block(x).detach(), model.blocks[0](x).detach(), "output")
    block(x).sum().backward()
    assert unit_of(block).runtime is not unit_of(model).runtime


# ---------------------------------------------------------------- the end of a model


def watched(model: nn.Module) -> dict[str, weakref.ref[Any]]:
    """Weak references to everything that would keep memory or the model alive."""
    found: dict[str, weakref.ref[Any]] = {"model": weakref.ref(model)}
    for number, unit in enumerate(nested_units(model)):
        found[f"unit {number}"] = unit.ref
        for index, bucket in enumerate(unit.buckets):
            found[f"shard buffer {number}/{index}"] = weakref.ref(bucket.shard_buffer)
        for parameter in unit.parameters:
            found[f"sharded {number}/{parameter.fqn}"] = weakref.ref(parameter.sharded)
            if parameter.has_unsharded:
                found[f"unsharded {number}/{parameter.fqn}"] = weakref.ref(parameter.unsharded)
    return found


@on_ranks(1, 2)
@pytest.mark.parametrize(
    "after", ["nothing", "a no-grad forward", "a forward", "steps", "a failed forward", "prefetch settings"]
)
def test_deleting_the_model_frees_it_at_once(rank: Rank, after: str) -> None:
    """Without the garbage collector's help, units, shards and full parameters go with the last reference."""
    gc.collect()
    gc.disable()
    try:
        model = shard(rank, build())
        if after == "a no-grad forward":
            with torch.no_grad():
                model(tokens())
        elif after == "a forward":
            model(tokens())
        elif after == "steps":
            train(model, 2)
        elif after == "a failed forward":
            with contextlib.suppress(RuntimeError, TypeError):
                model(torch.ones(3, 3))
        elif after == "prefetch settings":
            model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
            model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])
            train(model, 1)
        references = watched(model)
        assert len(references) > 6
        del model
        alive = [name for name, reference in references.items() if reference() is not None]
        assert alive == []
    finally:
        gc.enable()


@on_ranks(2)
def test_deleting_a_copy_frees_it_at_once(rank: Rank) -> None:
    """A deep copy goes at once too, and the original stays usable."""
    gc.collect()
    gc.disable()
    try:
        model = shard(rank, build())
        copied = copy.deepcopy(model)
        train(copied, 1)
        references = watched(copied)
        del copied
        assert [name for name, reference in references.items() if reference() is not None] == []
    finally:
        gc.enable()
    train(model, 1)


@on_ranks(2)
def test_deleting_model_and_output_frees_both_at_once(rank: Rank) -> None:
    """A graph whose backward never ran keeps nothing alive once the output is gone."""
    gc.collect()
    gc.disable()
    try:
        model = shard(rank, build())
        output = model(tokens())
        references = watched(model)
        del model, output
        assert [name for name, reference in references.items() if reference() is not None] == []
    finally:
        gc.enable()


@on_ranks(1, 2)
@pytest.mark.parametrize("how", ["pickle", "torch.save", "pickle of a module around it"])
def test_pickling_is_refused_with_the_remedy(rank: Rank, how: str) -> None:
    """A sharded module cannot be pickled, by whatever means; the error names the class and what to save instead."""
    model = shard(rank, build())
    save = functools.partial(torch.save, f=io.BytesIO()) if how == "torch.save" else pickle.dumps
    saved = nn.ModuleList([model]) if "around" in how else model
    with pytest.raises(FullshardError, match=r"FSDPLanguageModel cannot be pickled.*model\.state_dict\(\)"):
        save(saved)


class Uncopied:
    def __deepcopy__(self, memo: object) -> None:
        raise AssertionError("nobody copies this")


class Choosy(nn.Linear):
    """A class that says what belongs to a copy of it."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.owner: Uncopied | None = Uncopied()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "owner": None}


@on_ranks(1, 2)
def test_classes_that_choose_what_is_copied(rank: Rank):
    """``__getstate__`` counts, as for modules that are not sharded."""
    model = fully_shard(Choosy())
    copied = copy.deepcopy(model)
    assert copied.owner is None and isinstance(model.owner, Uncopied)
    copied(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad is None and copied.weight.grad is not None


class Tupled(nn.Linear):
    """A class whose ``__getstate__`` is for its own ``__setstate__`` alone."""

    def __getstate__(self) -> object:
        return (dict(self.__dict__), "more")

    def __setstate__(self, state: object) -> None:
        super().__setstate__(state[0] if isinstance(state, tuple) else state)  # type: ignore[arg-type]


@on_ranks(1)
def test_states_that_are_no_dictionaries(rank: Rank):
    """The module is copied with all that it has."""
    model = fully_shard(Tupled(3, 3))
    copy.deepcopy(model)(torch.ones(1, 3)).sum().backward()
