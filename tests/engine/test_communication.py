"""What users may change about communication: hooks, divisors, and how much is in flight."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close as torch_assert_close
from user_collectives import CLOSE, ODD_DIM, build, check_training, loss_of, shard, units

from compare import assert_equal, assert_models_equal
from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.comm import record
from fullshard.engine.ownership import nested_units
from models import Branch, batch, lane_log, reference_backward, tiny_units
from ranks import Rank, on_ranks

# ---------------------------------------------------------------- the all-reduce hook


@on_ranks(4)
def test_hook_that_replicates_by_hand(rank: Rank) -> None:
    """Sharding over one axis with a hook that averages over the other equals HSDP, bitwise."""
    mesh = rank.make_mesh(2, 2, names=("r", "s"))
    native, by_hand = shard(build(), mesh), shard(build(), mesh["s"])
    group, called = mesh["r"].get_group(), []

    def average(rows: torch.Tensor) -> None:
        called.append(rows.numel())
        dist.all_reduce(rows, group=group)
        rows.mul_(0.5)

    for unit in units(by_hand):
        unit.set_all_reduce_hook(average)
    for step in range(2):
        for model in (native, by_hand):
            loss_of(6, step)(model, rank.rank).backward()
    assert len(called) == 2 * 4
    for (fqn, ours), theirs in zip(by_hand.named_parameters(), native.parameters(), strict=True):
        assert_equal(ours.grad.full_tensor(), theirs.grad.full_tensor(), fqn)


@on_ranks(4)
@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1)], ids=str)
def test_hook_sees_the_mean_and_its_changes_count(rank: Rank, shape: tuple[int, ...]) -> None:
    """Whatever the mesh: once per unit and backward, flat, after all reductions; what it writes becomes ``.grad``."""
    mesh = rank.mesh if len(shape) == 1 else rank.make_mesh(*shape, names=("r", "s"))
    reference = build()
    model = shard(copy.deepcopy(reference), mesh)
    seen: list[torch.Tensor] = []

    def triple(rows: torch.Tensor) -> None:
        assert rows.ndim == 1 and rows.dtype is torch.float32 and not torch.is_grad_enabled()
        seen.append(rows.clone())
        rows.mul_(3)

    for unit in units(model):
        unit.set_all_reduce_hook(triple)
    loss_of()(model, rank.rank).backward()
    reference_backward(reference, 4, loss_of())
    for parameter in reference.parameters():
        parameter.grad.mul_(3)
    assert_models_equal(model, reference, grads=True, **CLOSE)
    assert len(seen) == 4


@on_ranks(2, 4)
def test_hook_sees_no_garbage(rank: Rank) -> None:
    """Padding is zeros: a hook may ask whether all it sees is finite, or take its norm."""
    polluted = [torch.full((n,), torch.nan) for n in range(1, 600)]  # what fresh memory will contain
    model = shard(build(ODD_DIM), rank.mesh)
    seen: list[torch.Tensor] = []
    for unit in units(model):
        unit.set_all_reduce_hook(lambda rows: seen.append(rows.clone()))
    polluted.clear()
    loss_of(ODD_DIM)(model, rank.rank).backward()
    largest = max(float(p.grad.full_tensor().abs().max()) for p in model.parameters())
    for rows in seen:
        assert float(rows.abs().max()) <= max(1.0, largest), "more than gradients and presence numbers"


@on_ranks(4)
def test_hook_waits_for_the_all_reduce(rank: Rank) -> None:
    """On a 2-D mesh a backward without all-reduce does not call it; in a reduce dtype it sees that dtype."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    reference = build()
    model = shard(copy.deepcopy(reference), rank.make_mesh(2, 2, names=("r", "s")), mp_policy=policy)
    dtypes: list[torch.dtype] = []
    model.set_all_reduce_hook(lambda rows: dtypes.append(rows.dtype))
    for step in range(2):
        model.set_requires_all_reduce(step == 1)
        loss_of(6, step)(model, rank.rank).backward()
        reference_backward(reference, 4, loss_of(6, step))
    assert dtypes == [torch.float64]
    assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(2)
def test_hook_that_skips_a_step(rank: Rank) -> None:
    """A hook that zeroes everything leaves gradients of zeros on every rank, also of what some ranks did not use."""
    model = fully_shard(Branch(), mesh=rank.mesh)
    model.rank = rank.rank
    model.set_all_reduce_hook(lambda rows: rows.zero_())
    model(batch(rank.rank, 0, 4, 6)).sum().backward()
    for name in ("even.weight", "odd.weight"):
        gradient = model.get_parameter(name).grad
        assert gradient is not None and not gradient.to_local().any(), name
    assert model.never.weight.grad is None


# ---------------------------------------------------------------- division


# Meshes, and the factors with which units divide on them, and whether the back end must not average itself.
DIVISIONS = [
    (None, [(1, False), (2.5, True), (4.0, True)]),
    ((2, 2), [(2.5, False), (4.0, False)]),
    ((4, 1), [(8.0, True), (2.5, False)]),
]


@on_ranks(1, 4)
@pytest.mark.parametrize(("shape", "factors"), DIVISIONS, ids=["1-D", "2x2", "4x1"])
def test_gradient_divide_factor(rank: Rank, shape: Any, factors: list[tuple[float, bool]]) -> None:
    """The sum over all ranks is divided by the factor of a unit, whatever the mesh, averaging back end or not.

    Units without a factor keep their means. ``set_reduce_scatter_divide_factor`` is its older name.
    """
    shape = shape if rank.world_size == 4 else shape and (1, 1)
    mesh = rank.mesh if shape is None else rank.make_mesh(*shape, names=("r", "s"))
    for factor, force in factors:
        reference = build(depth=2)
        model = shard(copy.deepcopy(reference), mesh)
        for unit in units(model)[:-1]:
            setter = unit.set_gradient_divide_factor if factor == 4.0 else unit.set_reduce_scatter_divide_factor
            setter(factor)
            unit.set_force_sum_reduction_for_comms(force)
        loss_of()(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, loss_of())
        for fqn, parameter in reference.named_parameters():
            if not fqn.startswith("blocks.1"):
                parameter.grad *= rank.world_size / factor
        assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("factor", [None, 3.0, 64.0])
def test_factor_in_half_precision(rank: Rank, factor: float | None) -> None:
    """fp16 sums beyond its range come out right, on all axes: they are divided before and after."""
    for shape in ((rank.world_size,), (rank.world_size, 1), (1, rank.world_size)):
        mesh = rank.mesh if len(shape) == 1 else rank.make_mesh(*shape, names=("r", "s"))
        model = fully_shard(nn.Linear(1, 4, bias=False).half(), mesh=mesh)
        if factor is not None:
            model.set_gradient_divide_factor(factor)
        # Gloo's sums are rounded once they are divided; the halves that NCCL adds up have to fit as well.
        once = rank.device.type == "cpu" and shape != (rank.world_size, 1)
        value = 60000.0 if factor != 3.0 and once else 30000.0
        (model(torch.ones(1, 1, dtype=torch.float16)) * value).sum().backward()
        expected = torch.full((4, 1), value * rank.world_size / (factor or rank.world_size))
        torch_assert_close(model.weight.grad.full_tensor().float(), expected, rtol=2e-3, atol=0)


# ---------------------------------------------------------------- what is reduced when


@on_ranks(2, 4)
def test_zeros_for_parameters_without_gradients(rank: Rank) -> None:
    """``set_reduce_scatter_unused_params``: zeros instead of None for what no rank used, until it is switched off."""
    reference = Branch()
    model = fully_shard(copy.deepcopy(reference), mesh=rank.mesh)

    def loss(module: nn.Module, number: int) -> torch.Tensor:
        module.rank = number
        return module(batch(number, 0, 4, 6)).square().mean()

    for enable in (True, False):
        model.zero_grad()
        reference.zero_grad()
        model.set_reduce_scatter_unused_params(enable)
        loss(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, loss)
        for parameter in reference.never.parameters() if enable else ():
            parameter.grad = torch.zeros_like(parameter)
        assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(2)
def test_reductions_in_flight(rank: Rank) -> None:
    """At most as many reductions as allowed are in flight, oldest waited for first; gradients are the same."""
    for limit, expected in ((1, 1), (2, 2), (3, 3), (9, 4)):
        with tiny_units():
            reference = build()
            model = shard(copy.deepcopy(reference), rank.mesh)
            model.blocks[1].set_reduce_scatter_max_input_buffers(limit)  # the largest value counts
            with lane_log() as log:
                check_training(model, reference, rank, steps=1)
        reductions = [(what, unit) for what, kind, unit in log if kind == "reduce_scatter"]
        in_flight, most = 0, 0
        for what, _ in reductions:
            in_flight += 1 if what == "issue" else -1
            most = max(most, in_flight)
        assert most == expected, f"limit {limit}: {log}"
        for kind in ("issue", "wait"):
            assert [unit for what, unit in reductions if what == kind] == ["blocks.2", "blocks.1", "blocks.0", ""]
    # With ``recurse=False`` the setting is that unit's; lowering it again counts.
    model.set_reduce_scatter_max_input_buffers(3, recurse=False)
    assert [unit.settings.reduction.max_in_flight for unit in nested_units(model)][:2] == [3, 1]
    model.set_reduce_scatter_max_input_buffers(2)
    assert [unit.settings.reduction.max_in_flight for unit in nested_units(model)] == [2] * 4


@on_ranks(2, 4)
def test_same_bits_whatever_is_in_flight(rank: Rank) -> None:
    """The limit, and a separate group, change no value and no message."""
    results, messages = [], []
    for limit, separate in ((1, False), (2, True), (5, True)):
        model = shard(build(), rank.mesh)
        model.set_reduce_scatter_max_input_buffers(limit)
        model.set_separate_reduce_scatter_group(separate)
        with record() as seen:
            for step in range(2):
                loss_of(6, step)(model, rank.rank).backward()
        results.append({fqn: p.grad.to_local() for fqn, p in model.named_parameters()})
        messages.append([(c.kind, c.unit, c.nbytes) for c in seen])
    assert_equal(results[1:], results[:1] * 2, "gradients")
    assert messages[0] == messages[1] == messages[2]
