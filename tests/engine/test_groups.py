"""Units of several modules: ``fully_shard([a, b])`` unshards and reduces them as one, however they are called."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from compare import assert_equal
from front_ends import assert_at_rest, assert_same_gradients, assert_trains_alike, both_backward, gathered
from fullshard import FSDPModule, fully_shard
from fullshard.comm import record
from fullshard.engine.ownership import nested_units, unit_of
from models import Block, LossOf, batch, reference_backward, tiny_units, tokens
from pairwise import each_value
from ranks import Rank, on_ranks

DIM, VOCABULARY = 6, 13
WIDE = 128  # enough that a unit of blocks is not tiny


class Language(nn.Module):
    """Token ids to logits. ``mode`` says how the head runs: once, in chunks, or not at all."""

    def __init__(self, recompute: str = "") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Block(DIM) for _ in range(3))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)
        self.spare = nn.Linear(DIM, DIM)  # never runs
        self.mode, self.recompute = "once", recompute

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, ids, use_reentrant=False) if self.recompute == "all" else self.body(ids)

    def body(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for module in (*self.blocks, self.norm):
            x = self.call(module, x)
        chunks = {"once": 1, "chunks": 3}.get(self.mode)
        return x if chunks is None else torch.cat([self.call(self.head, chunk) for chunk in x.chunk(chunks)])

    def call(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(module, x, use_reentrant=False) if self.recompute == "members" else module(x)


def score(logits: torch.Tensor, rank: int, step: int) -> torch.Tensor:
    return cross_entropy(logits, tokens(rank, step + 100, len(logits)))


# How the head is called: in the model's forward, not at all, or afterwards, chunk by chunk, with a backward for each.
CALLS = ["once", "chunks", "no head", "afterwards", "afterwards, detached"]


def loss_at(step: int, how: str = "once") -> LossOf:
    """The loss of a step in which the head is called in this way."""

    def loss_of(model: Any, rank: int) -> torch.Tensor:
        model.mode = how
        x = model(tokens(rank, step, 9))
        if how == "no head":
            return x.square().mean()
        if how == "afterwards":
            return sum(score(model.head(chunk), rank, step) for chunk in x.chunk(3))
        if how == "afterwards, detached":
            leaf = x.detach().requires_grad_()
            for chunk in leaf.chunk(3):
                score(model.head(chunk), rank, step).backward()
            return (x * leaf.grad).sum()
        return score(x, rank, step)

    return loss_of


# name -> the modules that become one unit
GROUPS: dict[str, Callable[[Any], list[nn.Module]]] = {
    "norm and head": lambda m: [m.norm, m.head],
    "head and norm": lambda m: [m.head, m.norm],
    "embedding and last block": lambda m: [m.embedding, m.blocks[2]],
    "first and last block": lambda m: [m.blocks[0], m.blocks[2]],
    "embedding, norm, head": lambda m: [m.embedding, m.norm, m.head],
    "with an unused one": lambda m: [m.blocks[1], m.spare],
    "inside modules": lambda m: [m.blocks[0].up, m.blocks[1].down],
    "everything": lambda m: [m.embedding, *m.blocks, m.norm, m.head, m.spare],
}


def grouped(rank: Rank, group: str = "norm and head", model: Any = None, **options: Any) -> tuple[Any, Any]:
    """A model with that group, a unit for each block that is not in it, and the root; and an unsharded copy."""
    model = Language() if model is None else model
    reference = copy.deepcopy(model)
    with tiny_units(up_to=0):
        fully_shard(GROUPS[group](model), mesh=rank.mesh, **options)
        for block in model.blocks:
            if unit_of(block) is None:
                fully_shard(block, mesh=rank.mesh, **options)
        return fully_shard(model, mesh=rank.mesh, **options), reference


def check_gradients(model: Any, reference: Any, rank: Rank, how: str) -> None:
    """Require the gradients of one backward to agree, and drop them."""
    both_backward(model, reference, rank, loss_at(0, how))
    assert_same_gradients(model, reference)
    assert_at_rest(model)
    model.zero_grad()
    reference.zero_grad()


def count(run: Callable[[], Any]) -> tuple[Counter[str], Any]:
    """Count each unit's collectives, as "all_gather NAME" and "reduce_scatter NAME"; return what ``run`` returned."""
    with record() as seen:
        result = run()
    return Counter(f"{c.kind} {c.unit}" for c in seen), result


@on_ranks(2)
def test_list_becomes_one_unit(rank: Rank) -> None:
    """Modules of a list or tuple, which is returned, become FSDP modules of one unit that owns all their parameters."""
    model = Language()
    for given in ([model.norm, model.head], (model.embedding, model.spare)):
        assert fully_shard(given, mesh=rank.mesh) is given
        assert all(isinstance(module, FSDPModule) for module in given)
        assert unit_of(given[0]) is unit_of(given[1])
    assert type(model.norm).__name__ == "FSDPLayerNorm" and type(model.head).__name__ == "FSDPLinear"
    assert [p.fqn for p in unit_of(model.head).parameters] == ["weight", "bias", "weight"]

    model = Language()
    reference = copy.deepcopy(model)
    fully_shard(model.blocks[1].up, mesh=rank.mesh)
    fully_shard([model.blocks[0].up, model.blocks[0], model.blocks[1], model.blocks[0]], mesh=rank.mesh)
    fully_shard([model.norm, model.head], mesh=rank.mesh)
    assert unit_of(model.blocks[0].up) is None
    assert [ref() for ref in unit_of(model.blocks[1]).modules] == list(model.blocks[:2])
    assert_trains_alike(fully_shard(model, mesh=rank.mesh), reference, rank, loss_at)
    assert [unit.name for unit in nested_units(model)] == ["", "blocks.0", "blocks.1.up", "norm"]
    assert [p.fqn for p in unit_of(model.head).parameters] == ["norm.weight", "norm.bias", "head.weight"]


@on_ranks(2)
def test_messages_of_partial_calls(rank: Rank) -> None:
    """A group that is called in chunks is all-gathered at most once more and reduced once; without sync never."""
    model, _ = grouped(rank, reshard_after_forward=True)
    for how in CALLS:
        model.set_requires_gradient_sync(False)
        quiet, _ = count(lambda how=how: loss_at(0, how)(model, rank.rank).backward())
        assert not any(name.startswith("reduce_scatter") for name in quiet)
        model.set_requires_gradient_sync(True)
        forward, loss = count(lambda how=how: loss_at(0, how)(model, rank.rank))
        backward, _ = count(loss.backward)
        if how == "chunks":
            assert forward["all_gather norm"] <= 2 and backward["all_gather norm"] <= 2
            assert backward["reduce_scatter norm"] == 1
        assert_at_rest(model)


@on_ranks(2)
@each_value(group=GROUPS, setting=[True, None, False], recompute=["", "members", "", "all"])
def test_training(rank: Rank, group: str, setting: bool | None, recompute: str) -> None:
    """Every group trains as without sharding, whatever runs between its members, in any way to call the head."""
    model, reference = grouped(rank, group, Language(recompute), reshard_after_forward=setting)
    ways = CALLS if model.head in GROUPS[group](model) else CALLS[:3]  # the root's own are called by the root only
    for how in ways:
        check_gradients(model, reference, rank, how)
    assert_trains_alike(model, reference, rank, loss_at, steps=1)
    for step, how in enumerate(ways):
        model.set_requires_gradient_sync(how == ways[-1])
        both_backward(model, reference, rank, loss_at(step, how))
    assert_same_gradients(model, reference)


@on_ranks(2)
@pytest.mark.parametrize(("group", "setting"), [("norm and head", True), ("head and norm", False)])
def test_only_a_part_runs(rank: Rank, group: str, setting: bool) -> None:
    """The group is resharded as the outermost forward ends, if it is not to be kept, and trains without its head."""
    model, _ = grouped(rank, group, reshard_after_forward=setting)
    for how in ("no head", "once"):
        with torch.no_grad():
            loss_at(0, how)(model, rank.rank)
        assert bool(gathered(model)) is not setting
        loss = loss_at(0, how)(model, rank.rank)
        assert bool(gathered(model)) is not setting
        loss.backward()
        assert (model.head.weight.grad is None) is (how == "no head")
        model.zero_grad()


class Pairs(nn.Module):
    """Ten blocks. Between them it may log a norm, or look at a weight of the next one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks, self.logs, self.reads = nn.ModuleList(Block(WIDE) for _ in range(10)), False, False
        self.seen: list[int] = []  # unsharded units, at each step of the backward
        self.logged: list[torch.Tensor] = []
        self.read: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.logs:
                self.logged.append(x.norm())
            if self.reads:
                self.read.append(block.up.weight)
            x = block(x)
            if x.requires_grad:
                x.register_hook(lambda _: self.seen.append(len(gathered(self))))
        return x


@on_ranks(2)
def test_pairs_of_blocks(rank: Rank) -> None:
    """Blocks are unsharded for their own backward, not before, whatever one of the ranks runs between them."""
    reference, model = Pairs(), Pairs()
    for first in range(0, 10, 2):
        fully_shard(list(model.blocks[first : first + 2]), mesh=rank.mesh, reshard_after_forward=True)
    model = fully_shard(model, mesh=rank.mesh)
    model.logs = rank.rank == 0  # ranks run different nodes, and all-gather the same units
    assert_trains_alike(model, reference, rank, lambda step: lambda m, r: m(batch(r, step, 3, WIDE)).square().mean())
    model.seen.clear()
    model(batch(rank.rank, 0, 3, WIDE)).square().mean().backward()
    assert max(model.seen) == 2
    model.reads = True  # between blocks of a unit their modules hold the unsharded parameters, as in torch
    model(batch(rank.rank, 0, 3, WIDE))
    assert [isinstance(weight, DTensor) for weight in model.read] == [True, False] * 5


@on_ranks(2)
def test_controls_of_one_member_are_the_groups(rank: Rank) -> None:
    """``unshard``, ``reshard`` and what is set on one member holds for all, also in lists of modules to prefetch."""
    model, reference = grouped(rank)
    model.head.unshard()
    for module, plain in ((model.norm, reference.norm), (model.head, reference.head)):
        assert_equal(module.weight.detach(), plain.weight.detach(), "full weight")
    model.norm.reshard()
    assert_at_rest(model)
    model.norm.unshard(async_op=True).wait()
    assert type(model.head.weight) is nn.Parameter
    model.blocks[2].set_modules_to_forward_prefetch([model.head])
    model.norm.set_modules_to_backward_prefetch([model.blocks[2]])
    model.head.set_reshard_after_forward(False)
    model.norm.set_gradient_divide_factor(1.0)
    for times in (0, 1):  # it was unsharded by hand before the first forward
        model.zero_grad()
        seen, loss = count(lambda: loss_at(0)(model, rank.rank))
        assert seen["all_gather norm"] == times and "norm" in gathered(model)
        seen, _ = count(loss.backward)
        assert seen["all_gather norm"] == 0
    reference_backward(reference, rank.world_size, loss_at(0))
    for parameter in (*reference.norm.parameters(), *reference.head.parameters()):
        parameter.grad *= rank.world_size
    assert_same_gradients(model, reference)


@on_ranks(2)
def test_group_of_roots_in_any_order(rank: Rank) -> None:
    """Members of a group without a unit above may be called in any order, and some of them not at all."""
    torch.manual_seed(6)
    model = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
    reference = copy.deepcopy(model)
    fully_shard(list(model), mesh=rank.mesh)

    def loss_of(modules: Any, number: int, some: tuple[int, ...]) -> torch.Tensor:
        x = batch(number, 0, 3, DIM)
        for index in some:
            x = modules[index](x)
        return x.square().mean()

    for some in ((0, 1, 2), (2, 0, 1), (2, 0), (0,), (2, 0, 1, 2, 0, 1)):
        loss_of(model, rank.rank, some).backward()
        reference_backward(reference, rank.world_size, lambda m, r, some=some: loss_of(m, r, some))
        assert_same_gradients(model, reference)


@on_ranks(2)
@pytest.mark.parametrize("ran", [False, True], ids=["before the first forward", "later"])
def test_member_is_taken_out(rank: Rank, ran: bool) -> None:
    """If a member, or a part of one, is replaced by another module, what is left of the group trains on."""
    model, reference = grouped(rank, "embedding, norm, head")
    if ran:
        assert_trains_alike(model, reference, rank, loss_at, steps=1)
    for one in (model, reference):
        one.norm = nn.Tanh()
        one.blocks[0].up = nn.Identity()
        one.blocks[0].down = nn.Identity()
    assert_trains_alike(model, reference, rank, loss_at, steps=2)
