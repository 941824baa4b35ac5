"""Tied parameters in wrappers: within a unit, over units made by hand, and over those of a policy."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from wrapper_models import adam, assert_at_rest, assert_trains_alike, with_reference, wrap

from compare import assert_equal, fqn_of
from fullshard import FlatParameter, FullyShardedDataParallel, TiedParameterError
from fullshard.engine.ownership import nested_units
from fullshard.wrap import ModuleWrapPolicy
from models import Block, Language, LossOf, tokens
from ranks import Rank, on_ranks

BOTH = pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])

# Which modules are wrapped by hand, innermost first, below the root.
BY_HAND: dict[str, list[str]] = {
    "one unit": [],
    "blocks": ["blocks.0", "blocks.1"],
    "both holders": ["embedding", "head"],
    "embedding": ["embedding"],
    "head": ["head"],
    "all": ["head", "blocks.1", "norm", "blocks.0", "embedding"],
}
BY_POLICY: dict[str, set[type[nn.Module]]] = {
    "blocks": {Block},
    "both holders": {nn.Embedding, nn.Linear},
    "embedding": {nn.Embedding, Block},
}


def token_loss(step: int) -> LossOf:
    """Predict the tokens themselves."""

    def loss_of(model: nn.Module, rank: int) -> torch.Tensor:
        inputs = tokens(rank, step, 3, 4)
        return nn.functional.cross_entropy(model(inputs).flatten(0, 1), inputs.flatten())

    return loss_of


def assert_tied(model: FullyShardedDataParallel, reference: nn.Module) -> None:
    """Require that the weight is owned once, has both names in the state dict, and one object when full."""
    owned = [fqn for unit in nested_units(model) for p in unit.parameters for fqn in p.fqns]
    assert sorted(f.rpartition(".")[2] for f in owned).count("weight") >= 2
    assert len(owned) == len(list(reference.named_parameters(remove_duplicate=False)))
    state, expected = model.state_dict(), reference.state_dict()
    assert list(state) == list(expected)
    assert_equal(state["head.weight"], state["embedding.weight"], "tied")
    if any(fqn_of(name) == "head.weight" for name, _ in model.named_parameters(remove_duplicate=False)):
        pieces = {fqn_of(name): p for name, p in model.named_parameters(remove_duplicate=False)}
        assert pieces["head.weight"] is pieces["embedding.weight"]
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        named = [fqn_of(n) for n, _ in model.named_parameters()]
        everything = {fqn_of(n): p for n, p in model.named_parameters(remove_duplicate=False)}
        assert named == [n for n, _ in reference.named_parameters()]
        assert everything["head.weight"] is everything["embedding.weight"]


@on_ranks(2)
@BOTH
@pytest.mark.parametrize("nesting", BY_HAND)
def test_tied_over_units_by_hand(rank: Rank, original: bool, nesting: str) -> None:
    """Wherever the holders are wrapped, their weight is owned once and trains as the unsharded one does."""
    model, reference = with_reference(Language(), rank, BY_HAND[nesting], use_orig_params=original)
    if original:
        numel = sum(p.numel() for p in model.parameters())
        assert numel < sum(p.numel() for p in reference.parameters())
    assert_trains_alike(model, reference, rank, loss=token_loss)
    assert_tied(model, reference)
    assert_at_rest(model)


@on_ranks(2)
@BOTH
@pytest.mark.parametrize("nesting", BY_POLICY)
def test_tied_over_units_of_a_policy(rank: Rank, original: bool, nesting: str) -> None:
    """The same where a policy chooses the units: the weight belongs to their lowest common ancestor."""
    policy = ModuleWrapPolicy(BY_POLICY[nesting])
    model, reference = with_reference(Language(), rank, use_orig_params=original, auto_wrap_policy=policy)
    assert_tied(model, reference)
    assert_trains_alike(model, reference, rank, loss=token_loss)
    assert_tied(model, reference)
    assert_at_rest(model)


@on_ranks(2)
def test_tied_parameters_are_one_object(rank: Rank) -> None:
    """With original parameters both modules hold the object that they held before, at any time."""
    plain = Language()
    before = plain.embedding.weight
    model, _ = with_reference(plain, rank, ["embedding"], use_orig_params=True)
    for step in range(2):
        assert plain.head.weight is plain.embedding.weight is before
        token_loss(step)(model, rank.rank).backward()
        adam(model.parameters()).step()
    assert sum(p is before for p in model.parameters()) == 1


@on_ranks(2)
@pytest.mark.parametrize("wrapped", [[], ["embedding"], ["head"], ["head", "embedding"]], ids=str)
def test_tied_names_in_a_flat_parameter(rank: Rank, wrapped: list[str]) -> None:
    """A flat parameter has a tied one once, under a name that it has in the module that is wrapped."""
    model, _ = with_reference(Language(depth=0), rank, wrapped)
    (flat,) = model.parameters()
    assert isinstance(flat, FlatParameter)
    names = {name.replace("head", "embedding") for name in flat.fqns}
    assert names == {"embedding.weight", "norm.weight", "norm.bias"}
    assert flat.numel() == -(-(13 * 6 + 2 + 6 + 2 + 6) // 2)


class Deeper(nn.Module):
    """A language model below another module."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.last = Language(), nn.Linear(13, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.model(inputs))


@on_ranks(2, 3)
@BOTH
@pytest.mark.parametrize(
    "wrapped", [["model.embedding", "model.head", "model"], ["model.head", "model.blocks.0"]], ids=len
)
def test_tied_below_the_root(rank: Rank, original: bool, wrapped: list[str]) -> None:
    """The lowest unit above all holders owns the weight, whether that is the root or not."""
    model, reference = with_reference(Deeper(), rank, wrapped, use_orig_params=original)
    (owner,) = [unit for unit in nested_units(model) for p in unit.parameters if len(p.owners) == 2]
    assert owner.modules[0]() is (model.module.model if "model" in wrapped else model)
    assert_trains_alike(model, reference, rank, loss=token_loss_of_five)
    assert list(model.state_dict()) == list(reference.state_dict())


def token_loss_of_five(step: int) -> LossOf:
    """The mean square of outputs for tokens."""
    return lambda model, rank: model(tokens(rank, step, 3, 4)).square().mean()


@on_ranks(2)
@BOTH
def test_tied_and_frozen(rank: Rank, original: bool) -> None:
    """A tied weight that is frozen stays as it is while the rest is trained."""
    plain = Language()
    plain.embedding.weight.requires_grad_(False)
    model, reference = with_reference(plain, rank, ["embedding"], use_orig_params=original)
    assert_trains_alike(model, reference, rank, loss=token_loss)
    assert_equal(model.state_dict()["head.weight"], reference.head.weight.detach(), "frozen")


@on_ranks(2)
def test_optimizer_from_before_keeps_tied_weights(rank: Rank) -> None:
    """An optimizer that was built before units passed the weight on still trains the object that is registered."""
    plain = Language()
    reference = copy.deepcopy(plain)
    optimizers = adam(plain.parameters()), adam(reference.parameters())
    model = wrap(plain, rank, ["head", "embedding"], use_orig_params=True)
    assert_trains_alike(model, reference, rank, optimizers, loss=token_loss)


class Twice(nn.Module):
    """One module under two names, between layers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.block = Block(6)
        self.again = self.block
        self.last = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.again(self.first(self.block(x))))


@on_ranks(2)
@BOTH
@pytest.mark.parametrize("way", ["root", "policy"])
def test_a_module_under_two_names(rank: Rank, original: bool, way: str) -> None:
    """A shared module is one unit, or part of one, and runs twice."""
    policy = ModuleWrapPolicy({Block}) if way == "policy" else None
    model, reference = with_reference(Twice(), rank, use_orig_params=original, auto_wrap_policy=policy)
    assert model.module.again is model.module.block
    assert len(nested_units(model)) == (2 if policy else 1)
    assert_trains_alike(model, reference, rank)
    assert list(model.state_dict()) == list(reference.state_dict())


@on_ranks(2)
def test_tied_over_separate_models(rank: Rank) -> None:
    """A weight that two wrapped models share without a wrapper around both is refused, on all ranks."""
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    wrapped = wrap(first, rank, use_orig_params=True)
    with pytest.raises(TiedParameterError, match="weight"):
        wrap(second, rank, use_orig_params=True)(wrapped(torch.ones(2, 6)))
