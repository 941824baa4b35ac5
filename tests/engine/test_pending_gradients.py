"""Gradients that are not in ``.grad`` yet: looking at them, changing, dropping and reducing them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from compare import assert_close, assert_equal
from front_ends import (
    CLOSE,
    COMPOSABLE,
    assert_at_rest,
    assert_same_gradients,
    both_backward,
    build,
    gathered,
    sharded_with_reference,
)
from fullshard import MixedPrecisionPolicy, PendingGradient
from fullshard.comm import record
from models import Branch, Stack, batch, reference_backward, square_loss
from ranks import Rank, on_ranks


def made(rank: Rank, strategy: str = "FULL_SHARD", **settings: Any) -> tuple[Any, Any]:
    return sharded_with_reference(COMPOSABLE, rank, build(Stack, 2), strategy=strategy, **settings)


def accumulate(model: Any, rank: Rank, *steps: int) -> None:
    """Microbatches without synchronization."""
    model.set_requires_gradient_sync(False)
    for step in steps:
        square_loss(step)(model, rank.rank).backward()


def expect(model: Any, reference: Any, rank: Rank, *steps: int) -> None:
    """Require the gradients to be those of these microbatches, beside what the reference has already."""
    for step in steps:
        reference_backward(reference, rank.world_size, square_loss(step))
    assert_same_gradients(model, reference, **CLOSE)


@on_ranks(1, 2)
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32], ids=str)
def test_unreduced_gradients(rank: Rank, reduce_dtype: torch.dtype | None) -> None:
    """By registered parameter, unit by unit: this rank's own, full, live, in the reduce dtype, read without a sound."""
    model, reference = made(rank, mp_policy=MixedPrecisionPolicy(reduce_dtype and torch.bfloat16, reduce_dtype))
    accumulate(model, rank, 0)
    with record() as seen:
        first = model.get_pending_gradients()
    assert not seen and not gathered(model)
    blocks = [p for block in model.blocks for p in block.parameters()]
    root = [p for p in model.parameters() if all(p is not other for other in blocks)]
    assert all(one is other for one, other in zip(first, [*root, *blocks], strict=True))
    assert set(model.blocks[0].get_pending_gradients()) == set(model.blocks[0].parameters())
    pointers = [entry.unreduced.data_ptr() for entry in first.values()]
    accumulate(model, rank, 1)
    with torch.no_grad():
        square_loss()(model, rank.rank)
    model.unshard()
    for module in (*model.blocks, model):
        module.reshard()
    now = model.get_pending_gradients()
    assert all(now[parameter].unreduced is entry.unreduced for parameter, entry in first.items())
    assert [entry.unreduced.data_ptr() for entry in now.values()] == pointers
    for step in (0, 1):
        square_loss(step)(reference, rank.rank).backward()
    for name, parameter in model.named_parameters():
        entry = now[parameter]
        assert isinstance(entry, PendingGradient) and entry.partial is None and parameter.grad is None
        tolerance = {"rtol": 0.1, "atol": 0.02} if reduce_dtype else CLOSE
        assert_close(entry.unreduced, reference.get_parameter(name).grad, name, **tolerance)


@on_ranks(4)
def test_partial_gradients(rank: Rank) -> None:
    """After reduce-scatters only: this rank's rows, live, means over the shard axis, to be reduced over replicas."""
    model, reference = made(rank, "HYBRID_SHARD")
    model.set_requires_all_reduce(False)
    for step in (0, 1):
        square_loss(step)(model, rank.rank).backward()
        pending = model.get_pending_gradients()
        for number in (rank.rank // 2 * 2, rank.rank // 2 * 2 + 1):
            (square_loss(step)(reference, number) / 2).backward()
        for name, parameter in model.named_parameters():
            entry = pending[parameter]
            assert entry.unreduced is None and parameter.grad is None
            expected = torch.chunk(reference.get_parameter(name).grad, 2)[rank.rank % 2]
            assert_close(entry.partial, expected, name, **CLOSE)
    reference.zero_grad()
    for entry in pending.values():
        entry.partial.mul_(3)
    accumulate(model, rank, 2)
    assert all(None not in entry for entry in model.get_pending_gradients().values())
    now = model.get_pending_gradients()
    assert all(new.partial.data_ptr() == pending[p].partial.data_ptr() for p, new in now.items())
    model.synchronize_gradients()
    for _ in range(3):
        for step in (0, 1):
            reference_backward(reference, 4, square_loss(step))
    expect(model, reference, rank, 2)


@on_ranks(4)
def test_partial_gradients_that_are_being_reduced(rank: Rank) -> None:
    """A reduction in flight takes those of earlier microbatches along: what they are can no longer be changed."""
    model, reference = made(rank, "HYBRID_SHARD")
    model.set_requires_all_reduce(False)
    square_loss(0)(model, rank.rank).backward()
    assert len(model.get_pending_gradients()) == len(list(model.parameters()))
    model.set_requires_all_reduce(True)
    model.set_is_last_backward(False)
    square_loss(1)(model, rank.rank).backward()
    assert any(parameter.grad is None for parameter in model.parameters())  # the last unit's is in flight
    assert model.get_pending_gradients() == {}
    model.synchronize_gradients()
    expect(model, reference, rank, 0, 1)


WIDTH = 128


class Operators(TorchDispatchMode):
    """Names of the operators that run inside on tensors as large as a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, torch.Tensor) and leaf.numel() >= WIDTH * WIDTH for leaf in leaves):
            self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


COPIES = {"cat", "stack", "copy_", "_foreach_copy_", "clone", "_to_copy", "contiguous", "empty_strided", "zeros"}


@on_ranks(2)
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32], ids=str)
def test_nothing_is_copied_or_sent_without_sync(rank: Rank, reduce_dtype: Any) -> None:
    """From the second microbatch on gradients are added where autograd left them: no collective, copy or new memory."""
    policy = MixedPrecisionPolicy(reduce_dtype and torch.bfloat16, reduce_dtype)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    model = COMPOSABLE.wrap(layers, rank, strategy="SHARD_GRAD_OP", mp_policy=policy)
    model.set_reshard_after_backward(False)  # so that nothing is all-gathered either
    model.set_requires_gradient_sync(False)
    for step in range(3):
        loss = model(batch(rank.rank, step, 2, WIDTH)).float().square().mean()
        with record() as seen, Operators() as operators:
            loss.backward()
        pending = {p: entry.unreduced for p, entry in model.get_pending_gradients().items()}
        assert not seen and len(pending) == 6
        if step == 0:
            before = {p: (gradient, gradient.data_ptr(), gradient._version) for p, gradient in pending.items()}
            continue
        # The one copy that remains is autograd's: a bf16 weight gradient on its way into fp32.
        casts = 3 if reduce_dtype else 0
        assert sum(name in COPIES for name in operators.seen) == operators.seen.count("_to_copy") == casts
        assert operators.seen.count("add_") == 3
    for parameter, gradient in pending.items():
        first, pointer, version = before[parameter]
        assert gradient is first and gradient.dtype is torch.float32
        assert (gradient.data_ptr(), gradient._version) == (pointer, version + 2)  # an addition in place for each


@on_ranks(4)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("mode", ["no sync", "reduce-scatter only"])
def test_zero_grad(rank: Rank, mode: str, set_to_none: bool) -> None:
    """``zero_grad`` forgets pending gradients, or zeroes them in place, and later microbatches count alone."""
    model, reference = made(rank, "HYBRID_SHARD")
    model.set_requires_gradient_sync(mode != "no sync")
    model.set_requires_all_reduce(mode == "no sync")
    square_loss(0)(model, rank.rank).backward()
    if mode == "no sync":
        model.blocks[1].zero_grad()  # of a part: what pends elsewhere stays
        assert set(model.get_pending_gradients()) == set(model.parameters()) - set(model.blocks[1].parameters())
    model.zero_grad(set_to_none=set_to_none)
    pending = model.get_pending_gradients()
    assert all(not t.any() for entry in pending.values() for t in entry if t is not None)
    if set_to_none:
        with record() as seen:
            model.synchronize_gradients()
        assert pending == {} and not seen and all(parameter.grad is None for parameter in model.parameters())
    square_loss(1)(model, rank.rank).backward()
    model.synchronize_gradients()
    expect(model, reference, rank, 1)


@on_ranks(1, 2)
def test_synchronize_equals_a_synchronized_backward(rank: Rank) -> None:
    """Reducing by call gives the bits that reducing at the end of backward gives; a second call does nothing."""
    grads = []
    for by_call in (False, True):
        model, _ = made(rank)
        called: list[int] = []
        model.first.weight.register_post_accumulate_grad_hook(lambda _, called=called: called.append(1))
        accumulate(model, rank, 0, *([1] if by_call else []))
        if by_call:
            with record() as seen:
                model.synchronize_gradients()
            kinds = sorted((c.kind, c.unit) for c in seen)
            units = ["", "blocks.0", "blocks.1"] if rank.world_size > 1 else []
            assert kinds == [("reduce_scatter", unit) for unit in units]
            with record() as seen:
                model.synchronize_gradients()
            assert not seen
        else:
            model.set_requires_gradient_sync(True)
            square_loss(1)(model, rank.rank).backward()
        assert_at_rest(model)
        assert model.get_pending_gradients() == {} and called == [1]
        grads.append([p.grad.to_local() for p in model.parameters()])
    assert_equal(grads[1], grads[0], "gradients")


@on_ranks(2)
def test_synchronize_a_submodule(rank: Rank) -> None:
    """The call on a block reduces that block; the rest still pends, and nothing is counted twice."""
    model, reference = made(rank)
    accumulate(model, rank, 0)
    with record() as seen:
        model.blocks[0].synchronize_gradients()
    assert {(c.kind, c.unit) for c in seen} == {("reduce_scatter", "blocks.0")}
    assert isinstance(model.blocks[0].up.weight.grad, DTensor) and model.blocks[1].up.weight.grad is None
    assert set(model.get_pending_gradients()) == set(model.parameters()) - set(model.blocks[0].parameters())
    model.synchronize_gradients()
    accumulate(model, rank, 1)
    model.synchronize_gradients()
    expect(model, reference, rank, 0, 1)
    model.zero_grad()
    model.set_requires_gradient_sync(True)
    model.set_reduce_scatter_unused_params(True)
    model(batch(rank.rank, 1, 4, 6), run=[0]).sum().backward()
    for parameter in model.blocks[1].parameters():
        assert_equal(parameter.grad.to_local(), torch.zeros_like(parameter.to_local()), "unused parameter")


@on_ranks(4)
@pytest.mark.parametrize(("set_to_none", "listed"), [(True, False), (False, False), (True, True)])
def test_partial_gradients_from_other_ranks(rank: Rank, set_to_none: bool, listed: bool) -> None:
    """Rows reduced from another rank's gradient pend here as well, and ``zero_grad`` clears them everywhere."""
    plain = build(lambda: nn.Sequential(nn.Linear(6, 6), Branch()))
    reference = copy.deepcopy(plain)
    model = COMPOSABLE.wrap(plain, rank, strategy="HYBRID_SHARD")
    model.set_requires_all_reduce(False)
    model[1].rank = int(rank.rank == 1)  # rank 1 alone runs the odd layer, then nobody
    square_loss()(model, rank.rank).backward()
    assert (model[1].odd.weight in model.get_pending_gradients()) == (rank.rank < 2) or not listed
    model.zero_grad(set_to_none=set_to_none)
    model.set_requires_all_reduce(True)
    model[1].rank = 0
    both_backward(model, reference, rank, square_loss())
    for name, ours in model.named_parameters():
        theirs = reference.get_parameter(name).grad
        whole = None if ours.grad is None else ours.grad.full_tensor()
        if theirs is not None or whole is not None:
            assert_close(whole, torch.zeros(ours.shape) if theirs is None else theirs, name, **CLOSE)
