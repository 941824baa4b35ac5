"""Which collectives a step issues: how many, for which unit, with what on the wire; and what is registered when."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from compare import assert_models_equal
from fullshard import fully_shard
from fullshard.comm import Collective, record
from fullshard.engine.ownership import unit_of
from models import (
    LossOf,
    Stack,
    assert_at_rest,
    batch,
    gathered,
    packed_numel,
    reference_backward,
    shard_blocks,
    square_loss,
    transport_of,
    with_reference,
)
from ranks import Rank, on_ranks

CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-6}
BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


def units(collectives: list[Collective], kind: str) -> list[str]:
    return [c.unit for c in collectives if c.kind == kind]


@on_ranks(2, 4)
def test_small_parameters_share_one_message(rank: Rank) -> None:
    """A unit of small parameters makes one message per gather and one per reduction, of predictable size."""
    size = rank.world_size
    model = shard_blocks(Stack(depth=1), rank, reshard_after_forward=True)
    with record() as seen:
        square_loss()(model, rank.rank).backward()
    shapes = [tuple(p.shape) for p in model.blocks[0].parameters()]
    assert shapes == [(12, 6), (12,), (6, 12), (6,)]
    pieces = [-(-rows // size) * (rest[0] if rest else 1) for rows, *rest in shapes]
    piece = packed_numel(*pieces)
    gather = Collective("all_gather", "blocks.0", torch.float32, piece * size, piece * 4 * (size - 1), launch=0)
    sent = packed_numel(*pieces, len(shapes))  # with one number for each: whether it had a gradient
    reduce = Collective("reduce_scatter", "blocks.0", torch.float32, sent * size, sent * 4 * (size - 1), launch=0)
    of_block = [replace(c, launch=0) for c in seen if c.unit == "blocks.0"]
    assert of_block == [gather, gather, reduce]


@on_ranks(2)
def test_large_parameters_travel_on_their_own(rank: Rank) -> None:
    """A parameter above the transport's limit is a message by itself, of exactly its own size if cut evenly."""
    rows = 2 * transport_of(rank).direct_bytes // 4 // 16
    model = nn.Linear(16, rows)
    fully_shard(model, mesh=rank.mesh)
    with record() as seen:
        model(batch(0, 0, 2, 16)).sum().backward()
    bias = rows // 2
    message = packed_numel(bias, 2)  # with the presence of weight and bias
    assert [(c.kind, c.numel) for c in seen] == [
        ("all_gather", rows * 16),
        ("all_gather", bias * 2),
        ("reduce_scatter", rows * 16),
        ("reduce_scatter", message * 2),
    ]
    assert seen[0].nbytes == rows * 16 * 4 // 2


@on_ranks(2)
def test_each_dtype_travels_as_it_is(rank: Rank) -> None:
    """Parameters of two dtypes in one unit make two gathers and two reductions, each in its own dtype."""

    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6).double())
    model[0].register_forward_hook(lambda _module, _args, output: output.double())
    fully_shard(model, mesh=rank.mesh, reshard_after_forward=True)
    with record() as seen:
        model(batch(rank.rank, 0, 2, 6)).sum().backward()
    dtypes = [torch.float32, torch.float64]
    assert [(c.kind, c.dtype) for c in seen] == [
        (kind, dtype) for kind in ("all_gather", "all_gather", "reduce_scatter") for dtype in dtypes
    ]
    assert [c.nbytes for c in seen if c.kind == "all_gather"][:2] == [
        packed_numel(18, 3, dtype=dtype) * dtype.itemsize for dtype in dtypes
    ]


# ---------------------------------------------------------------- what is registered when


class Observed(nn.Module):
    """Notes the type and shape of its own parameters in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append([(type(p), tuple(p.shape), p.is_leaf, p.requires_grad) for p in self.parameters()])
        return self.linear(x) * self.scale


FULL = [(nn.Parameter, (), True, True), (nn.Parameter, (6, 6), True, True), (nn.Parameter, (6,), True, True)]


@on_ranks(1, 2)
@pytest.mark.parametrize("setting", [True, False])
def test_registered_parameters(rank: Rank, setting: Any) -> None:
    """A module sees plain full parameters in its own forward; at any other time they are DTensors."""
    inner = fully_shard(Observed(), mesh=rank.mesh, reshard_after_forward=setting)
    root = Observed()
    root.linear = inner
    fully_shard(root, mesh=rank.mesh, reshard_after_forward=setting)

    def all_sharded() -> bool:
        return all(isinstance(p, DTensor) for p in root.parameters())

    sharded = dict(root.named_parameters())
    for _ in range(2):
        loss = root(batch(rank.rank, 0, 2, 6)).sum()
        assert all_sharded()
        loss.backward()
        assert all_sharded()
    with torch.no_grad():
        root(batch(rank.rank, 0, 2, 6))
    assert all_sharded()
    assert inner.seen == [FULL] * 3
    assert root.seen[0][0] == FULL[0]  # the root's own; those of the nested unit are sharded at that time
    assert [kind for kind, *_ in root.seen[0][1:]] == [type(sharded["linear.scale"])] * 3
    assert sharded["scale"].placements == (Replicate(),)
    assert all(p is sharded[name] for name, p in root.named_parameters())


@on_ranks(2)
def test_manual_unshard_and_reshard(rank: Rank) -> None:
    """``unshard`` registers one unit's unsharded parameters, with the right values, and ``reshard`` undoes it.

    Freeing a kept unit by hand before backward costs one more all-gather and changes no value.
    """
    model, reference = with_reference(Stack(), rank, reshard_after_forward=False)
    square_loss()(model, rank.rank).backward()  # from now on units have their names
    model.zero_grad()
    with record() as seen:
        assert model.blocks[1].unshard() is None
        assert model.blocks[1].unshard() is None
    assert units(seen, "all_gather") == ["blocks.1"]
    assert gathered(model) == ["blocks.1"]
    for ours, theirs in zip(model.blocks[1].parameters(), reference.blocks[1].parameters(), strict=True):
        assert type(ours) is nn.Parameter
        assert torch.equal(ours, theirs)
    assert isinstance(model.blocks[0].up.weight, DTensor)
    model.blocks[1].reshard()
    model.blocks[1].reshard()
    assert_at_rest(model)
    loss = square_loss()(model, rank.rank)
    model.blocks[1].reshard()
    model.reshard()
    with record() as seen:
        loss.backward()
    reference_backward(reference, rank.world_size, square_loss())
    assert sorted(units(seen, "all_gather")) == ["", "blocks.1"]
    assert_models_equal(model, reference, grads=True, **CLOSE)


# ---------------------------------------------------------------- several forwards, several losses


class TwoOutputs(nn.Module):
    """Returns what the first block gives and what the whole model gives."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.last = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        early = self.blocks[0](x)
        return early, self.last(torch.tanh(self.blocks[2](torch.tanh(self.blocks[1](early)))))


@on_ranks(2)
@pytest.mark.parametrize(("early_first", "setting"), [(True, True), (False, None), (True, False)])
def test_two_losses_on_one_graph(rank: Rank, early_first: bool, setting: Any) -> None:
    """Two backward passes over one graph each reduce the units that they reach, and the gradients add up."""
    model, reference = with_reference(TwoOutputs(), rank, reshard_after_forward=setting)

    def loss_of(step: int, *which: int) -> LossOf:
        return lambda m, number: sum(m(batch(number, step, 4, 6))[i].square().mean() for i in which)

    losses = [output.square().mean() for output in model(batch(rank.rank, 0, 4, 6))]
    reached = {0: ["blocks.0"], 1: ["", *BLOCKS]}
    for count, which in enumerate((0, 1) if early_first else (1, 0)):
        with record() as seen:
            losses[which].backward(retain_graph=count == 0)
        assert set(reached[which]) <= set(units(seen, "reduce_scatter")) <= {"", *reached[which]}
        assert len(units(seen, "reduce_scatter")) <= 4
        assert_at_rest(model)
        reference_backward(reference, rank.world_size, loss_of(0, which))
    loss_of(1, 0, 1)(model, rank.rank).backward()
    reference_backward(reference, rank.world_size, loss_of(1, 0, 1))
    assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(2)
def test_unit_names_are_those_below_the_root(rank: Rank) -> None:
    """Collectives carry the FQN of the unit's module below the root, also after a forward of the unit alone."""
    model = shard_blocks(Stack(), rank)
    with record() as seen, torch.no_grad():
        model.blocks[1](batch(rank.rank, 0, 4, 6))
    assert [c.unit for c in seen] == [""]  # a root of its own until the real one runs
    with record() as seen, torch.no_grad():
        model(batch(rank.rank, 0, 4, 6))
        model.blocks[1](batch(rank.rank, 0, 4, 6))
    assert [c.unit for c in seen] == ["", *BLOCKS, "blocks.1"]
    assert unit_of(model.blocks[2]).name == "blocks.2"
