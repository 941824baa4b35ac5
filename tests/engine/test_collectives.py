"""What a step issues and registers, and what users may change about it: hooks, divisors, and how much is in flight."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close as torch_assert_close

from front_ends import COMPOSABLE, assert_at_rest, assert_same_gradients, both_backward, build, sharded_with_reference
from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.comm import Collective, record
from models import LossOf, Stack, batch, lane_log, reference_backward, square_loss, tiny_units, with_reference
from ranks import Rank, on_ranks

BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


def units(collectives: list[Collective], kind: str) -> list[str]:
    return [c.unit for c in collectives if c.kind == kind]


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
@pytest.mark.parametrize(("early_first", "setting"), [(True, True), (False, None)])
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
    both_backward(model, reference, rank, loss_of(1, 0, 1))
    assert_same_gradients(model, reference)


@on_ranks(4)
@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1)], ids=str)
def test_hook_sees_the_mean_and_its_changes_count(rank: Rank, shape: tuple[int, ...]) -> None:
    """Whatever the mesh: once per unit and synchronized backward, flat, in the reduce dtype, after all reductions."""
    polluted = [torch.full((n,), torch.nan) for n in range(1, 600)]  # what fresh memory will contain
    mesh = rank.mesh if len(shape) == 1 else rank.make_mesh(*shape, names=("r", "s"))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    model, reference = sharded_with_reference(COMPOSABLE, rank, build(Stack, 3, 5), mesh=mesh, mp_policy=policy)
    seen: list[torch.Tensor] = []

    def triple(rows: torch.Tensor) -> None:
        assert rows.ndim == 1 and rows.dtype is torch.float64 and not torch.is_grad_enabled()
        seen.append(rows.clone())
        rows.mul_(3)

    for unit in (model, *model.blocks):
        unit.set_all_reduce_hook(triple)
    polluted.clear()
    model.set_requires_all_reduce(False)
    if len(shape) > 1:  # else there is nothing to hold back
        both_backward(model, reference, rank, square_loss(0, 4, 5))
        assert not seen
    model.set_requires_all_reduce(True)
    both_backward(model, reference, rank, square_loss(1, 4, 5))
    for parameter in reference.parameters():
        parameter.grad.mul_(3)
    assert_same_gradients(model, reference)
    largest = max(float(p.grad.full_tensor().abs().max()) for p in model.parameters())
    assert len(seen) == 4
    for rows in seen:
        assert float(rows.abs().max()) <= max(1.0, largest), "more than gradients and presence numbers"


# Meshes, and the factors with which units divide on them, and whether the back end must not average itself.
DIVISIONS = [
    (None, [(1, False), (2.5, True), (4.0, True)]),
    ((2, 2), [(2.5, False), (4.0, False)]),
    ((4, 1), [(8.0, True), (2.5, False)]),
]


@on_ranks(1, 4)
def test_gradient_divide_factor(rank: Rank) -> None:
    """The sum over all ranks is divided by the factor of a unit, whatever the mesh, averaging back end or not."""
    for shape, factors in DIVISIONS:
        shape = shape if rank.world_size == 4 else shape and (1, 1)
        mesh = rank.mesh if shape is None else rank.make_mesh(*shape, names=("r", "s"))
        for factor, force in factors:
            model, reference = sharded_with_reference(COMPOSABLE, rank, build(Stack, 2), mesh=mesh)
            for unit in (model, model.blocks[0]):
                setter = unit.set_gradient_divide_factor if factor == 4.0 else unit.set_reduce_scatter_divide_factor
                setter(factor)
                unit.set_force_sum_reduction_for_comms(force)
            both_backward(model, reference, rank, square_loss())
            for fqn, parameter in reference.named_parameters():
                if not fqn.startswith("blocks.1"):
                    parameter.grad *= rank.world_size / factor
            assert_same_gradients(model, reference)


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("factor", [None, 3.0, 64.0])
def test_factor_in_half_precision(rank: Rank, factor: float | None) -> None:
    """fp16 sums beyond its range come out right, on all axes: they are divided before and after."""
    square = [(2, 2)] if rank.world_size == 4 else []
    for shape in ((rank.world_size,), (rank.world_size, 1), (1, rank.world_size), *square):
        mesh = rank.mesh if len(shape) == 1 else rank.make_mesh(*shape, names=("r", "s"))
        model = fully_shard(nn.Linear(1, 4, bias=False).half(), mesh=mesh)
        if factor is not None:
            model.set_gradient_divide_factor(factor)
        # Gloo's sums are rounded once they are divided; the halves that NCCL adds up have to fit as well.
        once = rank.device.type == "cpu" and shape not in ((rank.world_size, 1), (2, 2))
        value = 60000.0 if factor != 3.0 and once else 30000.0
        (model(torch.ones(1, 1, dtype=torch.float16)) * value).sum().backward()
        expected = torch.full((4, 1), value * rank.world_size / (factor or rank.world_size))
        torch_assert_close(model.weight.grad.full_tensor().float(), expected, rtol=2e-3, atol=0)


@on_ranks(2)
def test_reductions_in_flight(rank: Rank) -> None:
    """At most as many reductions as allowed are in flight, oldest waited for first; gradients are the same."""
    for limit, expected in ((2, 2), (9, 4), (1, 1)):
        with tiny_units():
            model, reference = sharded_with_reference(COMPOSABLE, rank, build(Stack))
        model.set_reduce_scatter_max_input_buffers(1)
        model.blocks[1].set_reduce_scatter_max_input_buffers(limit, recurse=False)  # the largest value counts
        model.set_separate_reduce_scatter_group(limit == 2)  # which gloo has not: it changes nothing
        with lane_log() as log:
            square_loss()(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, square_loss())
        assert_same_gradients(model, reference)
        reductions = [(what, unit) for what, kind, unit in log if kind == "reduce_scatter"]
        changes = [1 if what == "issue" else -1 for what, _ in reductions]
        assert max(itertools.accumulate(changes)) == expected, f"limit {limit}: {log}"
        for kind in ("issue", "wait"):
            assert [unit for what, unit in reductions if what == kind] == ["blocks.2", "blocks.1", "blocks.0", ""]
