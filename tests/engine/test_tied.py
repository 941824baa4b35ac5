"""Tied parameters: owned once, by the lowest unit that contains all their holders, under all their names."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from compare import assert_close, assert_equal, assert_models_equal
from fullshard import TiedParameterError, fully_shard
from fullshard.comm import record
from fullshard.engine.ownership import nested_units, unit_of
from ranks import Rank, on_ranks

VOCABULARY, WIDTH = 7, 6  # 7 rows: uneven over two and over four ranks


class LanguageModel(nn.Module):
    """An embedding whose weight is also that of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(tokens)).tanh())


class Wrapped(nn.Module):
    """A language model below another module."""

    def __init__(self) -> None:
        super().__init__()
        self.model = LanguageModel()
        self.last = nn.Linear(VOCABULARY, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.last(self.model(tokens))


# Which modules become units, innermost first, and the unit that has to own the weight ("" is the root).
NESTINGS: dict[str, tuple[list[str], str]] = {
    "one unit": ([""], ""),
    "sibling units": (["model.embed", "model.head", ""], ""),
    "head before embedding": (["model.head", "model.embed", ""], ""),
    "child and root": (["model.embed", ""], ""),
    "head and root": (["model.head", ""], ""),
    "ancestor in the middle": (["model.embed", "model.body", "model.head", "model", ""], "model"),
    "child and the ancestor in the middle": (["model.head", "model", ""], "model"),
}


def build(seed: int = 1) -> Wrapped:
    torch.manual_seed(seed)
    return Wrapped()


def shard(rank: Rank, model: nn.Module, nesting: str) -> nn.Module:
    for name in NESTINGS[nesting][0]:
        fully_shard(model.get_submodule(name), mesh=rank.mesh)
    return model


def tokens_for(step: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (8, 3), generator=torch.Generator().manual_seed(step))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(tokens).square().mean().backward()
    optimizer.step()


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("nesting", NESTINGS)
def test_trains_like_the_plain_module(rank: Rank, nesting: str) -> None:
    """However the holders are spread over units, training equals that of the plain tied module."""
    reference = build()
    model = shard(rank, copy.deepcopy(reference), nesting)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.2, momentum=0.9) for m in (model, reference)]
    assert len(list(model.parameters())) == len(list(reference.parameters()))
    for index in range(4):
        step(model, optimizers[0], tokens_for(index).chunk(rank.world_size)[rank.rank])
        step(reference, optimizers[1], tokens_for(index))
    assert_models_equal(model, reference, grads=True, rtol=2e-5, atol=1e-6)


@on_ranks(2)
@pytest.mark.parametrize("nesting", NESTINGS)
def test_lowest_common_unit_owns_it_once(rank: Rank, nesting: str) -> None:
    """Exactly one unit, the lowest one above all holders, owns the parameter, and knows all its names."""
    model = shard(rank, build(), nesting)
    with record() as collectives:
        model(tokens_for(0))
    owners = [u for u in nested_units(model) for p in u.parameters if "model.embed.weight" in p.fqns]
    assert [unit.name for unit in owners] == [NESTINGS[nesting][1]]
    (owned,) = (p for p in owners[0].parameters if "model.embed.weight" in p.fqns)
    assert sorted(owned.fqns) == ["model.embed.weight", "model.head.weight"]
    assert all(c.numel for c in collectives if c.kind == "all_gather")
    assert model.model.embed.weight is model.model.head.weight
    assert isinstance(model.model.embed.weight, DTensor)


@on_ranks(2, 4)
@pytest.mark.parametrize("nesting", NESTINGS)
def test_state_dict_has_every_name(rank: Rank, nesting: str) -> None:
    """The state dict has the tied parameter under all its FQNs with equal values, before and after a step."""
    reference = build()
    model = shard(rank, copy.deepcopy(reference), nesting)
    assert list(model.state_dict()) == list(reference.state_dict())
    step(model, torch.optim.SGD(model.parameters(), lr=0.2), tokens_for(rank.rank))
    state = model.state_dict()
    assert list(state) == list(reference.state_dict())
    names = "model.embed.weight", "model.head.weight"
    assert state[names[0]].to_local().data_ptr() == state[names[1]].to_local().data_ptr()
    assert_equal(state[names[0]].full_tensor(), state[names[1]].full_tensor(), "tied weight")


@on_ranks(2, 4)
@pytest.mark.parametrize("nesting", ["one unit", "sibling units", "ancestor in the middle"])
def test_every_row_of_an_uneven_vocabulary_is_updated(rank: Rank, nesting: str) -> None:
    """All rows change in one step on all ranks, by what the plain module would change them."""
    reference = build()
    before = reference.model.embed.weight.detach().clone()
    model = shard(rank, copy.deepcopy(reference), nesting)
    tokens = torch.arange(VOCABULARY).unsqueeze(0)
    step(model, torch.optim.SGD(model.parameters(), lr=0.5), tokens)
    step(reference, torch.optim.SGD(reference.parameters(), lr=0.5), tokens)
    after = model.model.embed.weight.full_tensor().detach()
    assert (after != before).any(dim=1).all()
    assert_close(after, reference.model.embed.weight.detach(), "tied weight", rtol=1e-5, atol=1e-6)


@on_ranks(1, 2)
@pytest.mark.parametrize("order", [("embed", "head"), ("head", "embed")], ids="-".join)
@pytest.mark.parametrize("first", ["model", "embed", "head"])
def test_units_without_a_common_unit_are_refused(rank: Rank, order: tuple[str, str], first: str) -> None:
    """Whichever of two units that share a parameter runs first, it raises on every rank and names the parameter."""
    model = build().model
    for name in order:
        fully_shard(getattr(model, name), mesh=rank.mesh)
    inputs = torch.ones(2, WIDTH) if first == "head" else tokens_for(0)
    with pytest.raises(TiedParameterError, match=r"weight \(shape \(7, 6\).*call fully_shard on a module that"):
        (model if first == "model" else getattr(model, first))(inputs)


@on_ranks(2)
def test_a_common_unit_afterwards_settles_the_tie(rank: Rank) -> None:
    """After the error, calling fully_shard on the common ancestor is the remedy."""
    reference = build().model
    model = copy.deepcopy(reference)
    fully_shard(model.embed, mesh=rank.mesh)
    fully_shard(model.head, mesh=rank.mesh)
    with pytest.raises(TiedParameterError):
        model(tokens_for(0))
    fully_shard(model, mesh=rank.mesh)
    assert_close(model(tokens_for(0)).detach(), reference(tokens_for(0)).detach(), "output", rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_sharding_layer_by_layer_gives_no_false_ties(rank: Rank) -> None:
    """Layers that are built, sharded and collected one by one never count as tied, though ids are used again."""
    kept = nn.ModuleList()
    for index in range(60):
        layer = fully_shard(nn.Linear(4, 4), mesh=rank.mesh)
        if index % 10 == 0:
            kept.append(layer)
        del layer
        gc.collect(0)
    model = fully_shard(nn.Sequential(*kept), mesh=rank.mesh)
    model(torch.ones(2, 4)).sum().backward()
    assert [len(unit.parameters) for unit in nested_units(model)] == [0] + [2] * len(kept)
    assert len({id(p) for p in model.parameters()}) == 2 * len(kept)


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("inner", [False, True], ids=["not a unit", "a unit"])
def test_shared_module_is_sharded_once(rank: Rank, inner: bool) -> None:
    """A module that appears twice has its parameters once, is called twice, and trains like the plain one."""
    torch.manual_seed(1)
    shared = nn.Linear(4, 4)
    reference = nn.Sequential(shared, nn.Tanh(), shared)
    model = copy.deepcopy(reference)
    assert model[0] is model[2]
    if inner:
        fully_shard(model[0], mesh=rank.mesh)
    fully_shard(model, mesh=rank.mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.2) for m in (model, reference)]
    for index in range(3):
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(index))
        step(model, optimizers[0], batch.chunk(rank.world_size)[rank.rank])
        step(reference, optimizers[1], batch)
    assert_models_equal(model, reference, grads=True, rtol=2e-5, atol=1e-6)
    assert list(model.state_dict()) == list(reference.state_dict())
    assert len(unit_of(model[0] if inner else model).parameters) == 2


@on_ranks(2)
def test_one_parameter_under_two_names_of_one_module(rank: Rank) -> None:
    """Two attributes of one module may hold the same parameter."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = self.b = nn.Parameter(torch.randn(3, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.a is self.b
            return x @ self.a.t() @ self.b

    reference = Twice()
    model = fully_shard(copy.deepcopy(reference), mesh=rank.mesh)
    x = torch.randn(5, 4)
    model(x).sum().backward()
    reference(x).sum().backward()
    assert_models_equal(model, reference, grads=True, rtol=1e-5, atol=1e-6)
    assert model.a is model.b
