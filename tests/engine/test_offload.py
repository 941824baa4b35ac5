"""``CPUOffloadPolicy``: on the CPU, where it changes nothing, and on the accelerator that the ranks compute on.

tests/devices has what only an accelerator shows, such as pinned memory and the copies that are made.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from compare import assert_equal, assert_models_equal
from front_ends import CLOSE, COMPOSABLE, adam, assert_at_rest, both_backward, build, sharded_with_reference
from fullshard import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, clip_grad_norm_, fully_shard
from fullshard.activation_checkpoint import offload_activations
from fullshard.comm import record
from fullshard.engine.ownership import nested_units, unit_of
from fullshard.engine.settings import UnitPolicy
from models import Mlp, Stack, reference_backward, square_loss
from ranks import Rank, on_ranks

BF16_FP32 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def small() -> Stack:
    return Stack(2)


def offloaded(
    rank: Rank, make: Callable[[], nn.Module] = small, *, pin: bool = True, **options: Any
) -> tuple[Any, Any]:
    """A model in units by child (or block) with its shards offloaded, and an unsharded copy."""
    policy = CPUOffloadPolicy(pin_memory=pin)
    return sharded_with_reference(COMPOSABLE, rank, build(make), offload_policy=policy, **options)


def train(model: Any, reference: Any, rank: Rank, steps: int = 1) -> None:
    """Adam steps whose losses, gradients and weights have to agree."""
    optimizers = [adam(m.parameters()) for m in (model, reference)]
    for step in range(steps):
        both_backward(model, reference, rank, square_loss(step))
        assert_models_equal(model, reference, grads=True, **CLOSE)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_models_equal(model, reference, **CLOSE)


@on_ranks(1, 2)
def test_parity(rank: Rank) -> None:
    """Adam steps on offloaded shards equal the reference, pinned or not; afterwards the device holds nothing."""
    for make, pin in ((small, True), (lambda: Mlp(6, 7, 1, 5), False)):
        model, reference = offloaded(rank, make, pin=pin)
        train(model, reference, rank, steps=2)
        if rank.world_size > 1 or rank.device.type != "cpu":
            assert_at_rest(model)


@on_ranks(4)
def test_parity_on_two_axes(rank: Rank) -> None:
    """The same on a 2-D mesh, with reduce-scatter only before the last microbatch; and with subgroups."""
    for options in ({"mesh": rank.make_mesh(2, 2, names=("replicate", "shard"))}, {"reshard_after_forward": 2}):
        model, reference = offloaded(rank, **options)
        for step in range(2):
            model.set_requires_all_reduce(step == 1)
            both_backward(model, reference, rank, square_loss(step))
        assert_models_equal(model, reference, grads=True, **CLOSE)
        assert_at_rest(model)


@on_ranks(1, 2)
def test_gradients_are_added(rank: Rank) -> None:
    """Whatever is in ``.grad`` is added to, in place, never overwritten; also what the user put there."""
    model, reference = offloaded(rank)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        ours.grad, theirs.grad = torch.ones_like(ours.detach()), torch.ones_like(theirs)
    held = [parameter.grad for parameter in model.parameters()]
    pointers = [gradient.to_local().data_ptr() for gradient in held]
    for step, letter in enumerate("NSSNS"):
        model.set_requires_gradient_sync(letter == "S")
        both_backward(model, reference, rank, square_loss(step))
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), held, strict=True))
    assert [gradient.to_local().data_ptr() for gradient in held] == pointers
    assert_models_equal(model, reference, grads=True, **CLOSE)
    values = [gradient.to_local().clone() for gradient in held]
    for step in range(2):
        model.zero_grad()
        square_loss(step)(model, rank.rank).backward()
    assert_equal([gradient.to_local() for gradient in held], values, "gradients of earlier steps")


@on_ranks(1, 2)
def test_optimizer_in_a_hook(rank: Rank) -> None:
    """A hook on a parameter runs when its gradient is in host memory, and may step and drop it."""
    model, reference = offloaded(rank)
    optimizers = {p: torch.optim.SGD([p], lr=0.5) for p in model.parameters()}

    def step_now(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_now)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    for step in range(2):
        both_backward(model, reference, rank, square_loss(step))
        optimizer.step()
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
    assert_models_equal(model, reference, **CLOSE)


@on_ranks(2)
def test_last_backward_at_the_end(rank: Rank) -> None:
    """Pipelines that wait at the end only: by then all microbatches are reduced, however often they were reduced."""
    model, reference = offloaded(rank)
    for step in range(3):
        model.set_is_last_backward(step == 2)
        both_backward(model, reference, rank, square_loss(step))
    assert_models_equal(model, reference, grads=True, **CLOSE)
    model.zero_grad()
    reference.zero_grad()
    devices: set[torch.device] = set()

    def triple(rows: torch.Tensor) -> None:
        devices.add(rows.device)
        rows.mul_(3)

    for unit in (model, *model.blocks):
        unit.set_all_reduce_hook(triple)
    model.set_requires_gradient_sync(False)
    square_loss(3)(model, rank.rank).backward()
    model.synchronize_gradients()
    reference_backward(reference, 2, lambda m, r: 3 * square_loss(3)(m, r))
    assert_models_equal(model, reference, grads=True, **CLOSE)
    assert devices == {rank.device}


@on_ranks(2)
def test_some_units_offload(rank: Rank) -> None:
    """Units with and without the policy mix, and a deep copy keeps it."""
    model, reference = build(small), build(small)
    policies = itertools.cycle([CPUOffloadPolicy(), OffloadPolicy()])
    for module in (*model.blocks, model):
        fully_shard(module, mesh=rank.mesh, offload_policy=next(policies))
    for _ in range(2):
        assert [unit_of(m).policy.offloads for m in (*model.blocks, model)] == [True, False, True]
        train(model, reference, rank)
        model = copy.deepcopy(model)


@on_ranks(2)
def test_a_fraction(rank: Rank) -> None:
    """Half of the bytes of each unit: losses and clipped steps are bitwise those without, with the same collectives."""
    results = []
    for fraction in (None, 0.5):
        kind = OffloadPolicy() if fraction is None else CPUOffloadPolicy(fraction=fraction)
        model = COMPOSABLE.wrap(build(small), rank, mp_policy=BF16_FP32, offload_policy=kind)
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        with record() as seen:
            for step in range(20):
                model.set_requires_gradient_sync(step % 2 == 1)
                loss = square_loss(step)(model, rank.rank)
                loss.backward()
                losses.append(loss.detach().cpu())
                if step % 2:
                    losses.append(clip_grad_norm_(model.parameters(), 0.1).detach().cpu())
                    optimizer.step()
                    optimizer.zero_grad()
        results.append((losses, sorted({(c.kind, c.dtype) for c in seen}), len({c.unit for c in seen})))
    assert_equal(results[1][0], results[0][0], "losses and norms")
    assert results[1][1:] == results[0][1:]
    for each in (model, copy.deepcopy(model), model.to(torch.float64)):
        for unit in nested_units(each):
            sizes = [parameter.shape.numel for parameter in unit.parameters]
            assert [parameter.offloaded for parameter in unit.parameters] == UnitPolicy(
                offload=CPUOffloadPolicy(fraction=0.5)
            ).offloaded(sizes)
            for parameter in unit.parameters:
                on_host = parameter.offloaded or rank.device.type == "cpu"
                assert (parameter.sharded.device.type == "cpu") == on_host


def test_choice_of_a_fraction() -> None:
    """The largest parameters that fit are offloaded, then smaller ones."""
    for fraction, chosen in ((0.0, ""), (0.5, "b"), (0.7, "bcd"), (0.9, "bac"), (1.0, "abcd")):
        found = UnitPolicy(offload=CPUOffloadPolicy(fraction=fraction)).offloaded([30, 50, 10, 10])
        assert sorted(name for name, is_chosen in zip("abcd", found, strict=True) if is_chosen) == sorted(chosen)
    assert UnitPolicy().offloaded([1, 2]) == [False, False]


@on_ranks(1)
def test_activations_on_the_cpu(rank: Rank) -> None:
    """One warning says that they are in CPU memory already, and nothing changes; tests/devices has accelerators."""
    model, reference = offloaded(rank)
    on_cpu = pytest.warns(UserWarning, match="offload_activations has no effect on the CPU")
    with on_cpu if rank.device.type == "cpu" else contextlib.nullcontext():
        offload_activations(model, min_bytes=0)
    train(model, reference, rank)
