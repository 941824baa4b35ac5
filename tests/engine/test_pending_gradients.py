"""Gradients that are not in ``.grad`` yet: looking at them, changing, dropping and reducing them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from compare import assert_equal, assert_models_equal
from fullshard import CPUOffloadPolicy, MixedPrecisionPolicy, PendingGradient, fully_shard
from fullshard.comm import record
from models import Branch, Stack, assert_at_rest, batch, gathered, reference_backward, shard_blocks, square_loss
from ranks import Rank, on_ranks

CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-6}


def on_mesh(rank: Rank, mesh: DeviceMesh | None = None, **settings: Any) -> tuple[nn.Module, nn.Module]:
    """A model sharded by blocks, and an unsharded copy."""
    torch.manual_seed(0)
    model = Stack(2)
    reference = copy.deepcopy(model)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh if mesh is not None else rank.mesh, **settings)
    return model, reference


def square(rank: Rank) -> DeviceMesh:
    return rank.make_mesh(2, 2, names=("replicate", "shard"))


def accumulate(model: nn.Module, rank: Rank, *steps: int) -> None:
    """Microbatches without sync."""
    model.set_requires_gradient_sync(False)
    for step in steps:
        square_loss(step)(model, rank.rank).backward()


def reference_of(reference: nn.Module, rank: Rank, *steps: int) -> None:
    for step in steps:
        reference_backward(reference, rank.world_size, square_loss(step))


# -------------------------------------------------------------------- looking


@on_ranks(1, 2, 4)
def test_nothing_pends(rank: Rank) -> None:
    """Before the first forward, between forward and backward and after a synced step there is nothing, and no sync."""
    model, _ = on_mesh(rank)
    with record() as seen:
        for _ in range(2):
            assert model.get_pending_gradients() == {}
            model.synchronize_gradients()
            model.zero_grad()
    assert not seen
    loss = square_loss()(model, rank.rank)
    assert model.get_pending_gradients() == {}
    loss.backward()
    assert model.get_pending_gradients() == {}
    grads = {p: p.grad for p in model.parameters()}
    with record() as seen:
        model.synchronize_gradients()
    assert not seen
    assert all(p.grad is gradient for p, gradient in grads.items())


@on_ranks(1, 2, 4)
def test_full_gradients_by_parameter(rank: Rank) -> None:
    """Keys are the registered parameters; values this rank's own full gradients, live, read without communication."""
    model, reference = on_mesh(rank)
    accumulate(model, rank, 0, 1)
    with record() as seen:
        pending = model.get_pending_gradients()
    assert not seen and not gathered(model)
    assert list(pending) == [parameter for module in _units(model) for parameter in module]
    for step in (0, 1):
        square_loss(step)(reference, rank.rank).backward()
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        entry = pending[parameter]
        assert isinstance(entry, PendingGradient) and entry.partial is None and parameter.grad is None
        torch.testing.assert_close(entry.unreduced, expected[name].grad, **CLOSE, msg=name)


def _units(model: nn.Module) -> list[list[nn.Parameter]]:
    """Parameters by unit: of the root, then of the blocks."""
    blocks = [list(block.parameters()) for block in model.blocks]
    inside = {id(parameter) for block in blocks for parameter in block}
    return [[p for p in model.parameters() if id(p) not in inside], *blocks]


@on_ranks(1, 2)
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32], ids=str)
def test_same_tensors_in_every_microbatch(rank: Rank, reduce_dtype: torch.dtype | None) -> None:
    """The tensors, and their addresses, stay the same over microbatches, forwards and ``reshard()``."""
    model, _ = on_mesh(rank, mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype))
    accumulate(model, rank, 0)
    first = model.get_pending_gradients()
    pointers = [entry.unreduced.data_ptr() for entry in first.values()]
    assert {entry.unreduced.dtype for entry in first.values()} == {reduce_dtype or torch.bfloat16}
    for step in (1, 2):
        before = [entry.unreduced.clone() for entry in first.values()]
        accumulate(model, rank, step)
        with torch.no_grad():
            square_loss()(model, rank.rank)
        model.unshard()
        for module in (*model.blocks, model):
            module.reshard()
        now = model.get_pending_gradients()
        assert all(now[parameter].unreduced is entry.unreduced for parameter, entry in first.items())
        assert [entry.unreduced.data_ptr() for entry in now.values()] == pointers
        assert not all(torch.equal(old, e.unreduced) for old, e in zip(before, now.values(), strict=True))


@on_ranks(4)
def test_partial_gradients(rank: Rank) -> None:
    """After reduce-scatters only: this rank's rows, means over the shard axis, still to be reduced over replicas."""
    model, reference = on_mesh(rank, square(rank))
    model.set_requires_all_reduce(False)
    for step in (0, 1):
        square_loss(step)(model, rank.rank).backward()
    with record() as seen:
        pending = model.get_pending_gradients()
    assert not seen
    assert set(pending) == set(model.parameters())
    mine = rank.rank // 2 * 2
    for step in (0, 1):
        for number in (mine, mine + 1):
            (square_loss(step)(reference, number) / 2).backward()
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        entry = pending[parameter]
        assert entry.unreduced is None and parameter.grad is None
        chunks = torch.chunk(expected[name].grad, 2)
        wanted = chunks[rank.rank % 2]
        torch.testing.assert_close(entry.partial, wanted, **CLOSE, msg=name)


@on_ranks(4)
def test_full_and_partial_at_once(rank: Rank) -> None:
    """A microbatch without sync after one with reduce-scatter only leaves both; together they make the gradient."""
    model, reference = on_mesh(rank, square(rank))
    model.set_requires_all_reduce(False)
    square_loss(0)(model, rank.rank).backward()
    accumulate(model, rank, 1)
    for entry in model.get_pending_gradients().values():
        assert entry.unreduced is not None and entry.partial is not None
    model.synchronize_gradients()
    assert model.get_pending_gradients() == {}
    reference_of(reference, rank, 0, 1)
    assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(2)
def test_of_a_submodule(rank: Rank) -> None:
    """A block's pending gradients are its own; the root's are all."""
    model, _ = on_mesh(rank)
    accumulate(model, rank, 0)
    assert set(model.blocks[0].get_pending_gradients()) == set(model.blocks[0].parameters())
    assert set(model.get_pending_gradients()) == set(model.parameters())
    model.blocks[0].set_requires_gradient_sync(True)
    square_loss(1)(model, rank.rank).backward()
    assert model.blocks[0].get_pending_gradients() == {}
    assert set(model.get_pending_gradients()) == set(model.parameters()) - set(model.blocks[0].parameters())


# -------------------------------------------------------------------- changing


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("sync", ["by backward", "by call"])
def test_changes_count(rank: Rank, sync: str) -> None:
    """What is written to pending gradients is what is added to and reduced."""
    model, reference = on_mesh(rank)
    accumulate(model, rank, 0)
    for entry in model.get_pending_gradients().values():
        entry.unreduced.mul_(3)
    accumulate(model, rank, 1)
    reference_backward(reference, rank.world_size, lambda m, r: 3 * square_loss(0)(m, r))
    reference_of(reference, rank, 1)
    if sync == "by call":
        model.synchronize_gradients()
    else:
        model.set_requires_gradient_sync(True)
        square_loss(2)(model, rank.rank).backward()
        reference_of(reference, rank, 2)
    assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(4)
def test_changes_of_partial_gradients_count(rank: Rank) -> None:
    """The same for rows that wait for the all-reduce: they are live, and stay where they are."""
    model, reference = on_mesh(rank, square(rank))
    model.set_requires_all_reduce(False)
    square_loss(0)(model, rank.rank).backward()
    first = {p: entry.partial for p, entry in model.get_pending_gradients().items()}
    for partial in first.values():
        partial.mul_(3)
    square_loss(1)(model, rank.rank).backward()
    now = model.get_pending_gradients()
    assert all(now[p].partial.data_ptr() == partial.data_ptr() for p, partial in first.items())
    model.synchronize_gradients()
    reference_backward(reference, 4, lambda m, r: 3 * square_loss(0)(m, r))
    reference_of(reference, rank, 1)
    assert_models_equal(model, reference, grads=True, **CLOSE)


# -------------------------------------------------------------------- dropping


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("mode", ["no sync", "reduce-scatter only"])
def test_zero_grad(rank: Rank, mode: str, set_to_none: bool) -> None:
    """``zero_grad`` forgets pending gradients, or zeroes them in place, and later microbatches count alone."""
    mesh = square(rank) if rank.world_size == 4 else rank.mesh
    model, reference = on_mesh(rank, mesh)
    model.set_requires_gradient_sync(mode != "no sync")
    model.set_requires_all_reduce(mode == "no sync")
    square_loss(0)(model, rank.rank).backward()
    model.zero_grad(set_to_none=set_to_none)
    pending = model.get_pending_gradients()
    if set_to_none:
        assert pending == {}
        with record() as seen:
            model.synchronize_gradients()
        assert not seen
        assert all(parameter.grad is None for parameter in model.parameters())
    else:
        for entry in pending.values():
            assert all(not t.any() for t in entry if t is not None)
    square_loss(1)(model, rank.rank).backward()
    model.synchronize_gradients()
    reference_of(reference, rank, 1)
    assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(2)
def test_zero_grad_of_a_submodule(rank: Rank) -> None:
    """``zero_grad`` of one block drops what pends there and nothing else."""
    model, reference = on_mesh(rank)
    accumulate(model, rank, 0)
    model.blocks[1].zero_grad()
    assert set(model.get_pending_gradients()) == set(model.parameters()) - set(model.blocks[1].parameters())
    model.synchronize_gradients()
    reference_of(reference, rank, 0)
    reference.blocks[1].zero_grad()
    assert_models_equal(model, reference, grads=True, **CLOSE)


# -------------------------------------------------------------------- reducing


@on_ranks(1, 2, 4)
def test_synchronize_equals_a_synced_backward(rank: Rank) -> None:
    """Reducing by call gives the bits that reducing at the end of backward gives; a second call does nothing."""
    grads = []
    for by_call in (False, True):
        model, _ = on_mesh(rank)
        accumulate(model, rank, 0, *([1] if by_call else []))
        if by_call:
            with record() as seen:
                model.synchronize_gradients()
            reduced = sorted(c.unit for c in seen if c.kind == "reduce_scatter")
            assert reduced == (["", "blocks.0", "blocks.1"] if rank.world_size > 1 else [])
            assert not [c for c in seen if c.kind == "all_gather"]
            with record() as seen:
                model.synchronize_gradients()
            assert not seen
        else:
            model.set_requires_gradient_sync(True)
            square_loss(1)(model, rank.rank).backward()
        assert_at_rest(model) if rank.world_size > 1 else None
        assert model.get_pending_gradients() == {}
        grads.append([p.grad.to_local() for p in model.parameters()])
    assert_equal(grads[1], grads[0], "gradients")


@on_ranks(2)
def test_backward_after_synchronize(rank: Rank) -> None:
    """A backward that does not come to a unit treats it as any backward does, although it was just reduced by call."""
    model, _ = on_mesh(rank)
    model.set_reduce_scatter_unused_params(True)
    accumulate(model, rank, 0)
    model.synchronize_gradients()
    model.set_requires_gradient_sync(True)
    model.zero_grad()
    model(batch(rank.rank, 1, 4, 6), run=[0]).sum().backward()
    for parameter in model.blocks[1].parameters():
        assert parameter.grad is not None
        assert_equal(
            parameter.grad.to_local(), torch.zeros_like(parameter.to_local()), "gradient of an unused parameter"
        )


@on_ranks(1, 2, 4)
def test_synchronize_in_the_middle(rank: Rank) -> None:
    """Microbatches before and after the call add up, by sharded parameter, and its hooks run once per reduction."""
    model, reference = on_mesh(rank)
    called: list[str] = []
    model.first.weight.register_post_accumulate_grad_hook(lambda parameter: called.append(str(parameter.grad.shape)))
    accumulate(model, rank, 0, 1)
    assert not called
    model.synchronize_gradients()
    accumulate(model, rank, 2)
    model.synchronize_gradients()
    assert len(called) == 2
    reference_of(reference, rank, 0, 1, 2)
    assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(2)
def test_synchronize_a_submodule(rank: Rank) -> None:
    """The call on a block reduces that block; the rest still pends, and nothing is counted twice."""
    model, reference = on_mesh(rank)
    accumulate(model, rank, 0)
    with record() as seen:
        model.blocks[0].synchronize_gradients()
    assert {(c.kind, c.unit) for c in seen} == {("reduce_scatter", "blocks.0")}
    assert isinstance(model.blocks[0].up.weight.grad, DTensor) and model.blocks[1].up.weight.grad is None
    assert set(model.get_pending_gradients()) == set(model.parameters()) - set(model.blocks[0].parameters())
    model.synchronize_gradients()
    reference_of(reference, rank, 0)
    assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(2, 4)
def test_gradients_of_some_ranks_only(rank: Rank) -> None:
    """A parameter that accumulated on one rank alone is reduced on all; what nobody has stays None."""
    model = nn.Sequential(nn.Linear(6, 6), Branch())
    reference = copy.deepcopy(model)
    for module in (*model, model):
        fully_shard(module, mesh=rank.mesh)

    def loss_of(module: nn.Module, number: int) -> torch.Tensor:
        module[1].rank = int(number == 1)
        return square_loss()(module, number)

    model.set_requires_gradient_sync(False)
    loss_of(model, rank.rank).backward()
    assert (model[1].odd.weight in model.get_pending_gradients()) == (rank.rank == 1)
    model.synchronize_gradients()
    reference_backward(reference, rank.world_size, loss_of)
    assert model[1].odd.weight.grad is not None and model[1].never.weight.grad is None
    assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["offload", "columns", "bf16", "frozen later"])
def test_kinds_of_units(rank: Rank, kind: str) -> None:
    """Offloaded units, parameters cut on another dim, other dtypes and parameters frozen meanwhile."""
    settings: dict[str, Any] = {
        "offload": {"offload_policy": CPUOffloadPolicy()},
        "columns": {"shard_placement_fn": lambda p: Shard(p.ndim - 1)},
        "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        "frozen later": {},
    }[kind]
    model, reference = on_mesh(rank, **settings)
    accumulate(model, rank, 0, 1)
    if kind == "frozen later":
        model.blocks[1].requires_grad_(False)
    assert {e.unreduced.shape for e in model.get_pending_gradients().values()} == {
        p.shape for p in reference.parameters()
    }
    model.synchronize_gradients()
    if kind == "frozen later":
        model.blocks[1].requires_grad_(True)
        model.synchronize_gradients()
        model.set_requires_gradient_sync(True)
        square_loss(2)(model, rank.rank).backward()
        reference_of(reference, rank, 2)
    reference_of(reference, rank, 0, 1)
    tolerance = {"rtol": 0.1, "atol": 0.02} if kind == "bf16" else CLOSE
    assert_models_equal(model, reference, grads=True, **tolerance)
    assert all(p.grad.placements == p.placements for p in model.parameters())


# -------------------------------------------------------------------- after exceptions


@on_ranks(2)
@pytest.mark.parametrize("fails", ["forward", "reset"])
def test_after_a_failed_forward(rank: Rank, fails: str) -> None:
    """A forward that raises keeps what pends, for the microbatch can be run again; ``reset_iter_state`` drops it."""
    model, reference = on_mesh(rank)
    accumulate(model, rank, 0)
    with pytest.raises(IndexError):
        model(batch(rank.rank, 1, 4, 6), run=[0, 7])
    if fails == "reset":
        model.reset_iter_state()
        assert model.get_pending_gradients() == {}
    else:
        assert set(model.get_pending_gradients()) == set(model.parameters())
        reference_of(reference, rank, 0)
    accumulate(model, rank, 1)
    model.synchronize_gradients()
    reference_of(reference, rank, 1)
    assert_models_equal(model, reference, grads=True, **CLOSE)


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("in backward")


@on_ranks(2, 4)
@pytest.mark.parametrize("then", ["forward", "synchronize", "pending"])
def test_after_a_failed_backward(rank: Rank, then: str) -> None:
    """A backward that raises drops what pends, half of which may be of the failed microbatch, whatever comes next."""
    model, reference = on_mesh(rank)
    accumulate(model, rank, 0)
    handle = model.blocks[0].register_forward_hook(lambda module, args, output: _Raises.apply(output))
    with pytest.raises(ArithmeticError):
        square_loss(1)(model, rank.rank).backward()
    handle.remove()
    if then == "synchronize":
        model.synchronize_gradients()
        assert all(parameter.grad is None for parameter in model.parameters())
    elif then == "pending":
        assert model.get_pending_gradients() == {}
    accumulate(model, rank, 2)
    model.synchronize_gradients()
    reference_of(reference, rank, 2)
    assert_models_equal(model, reference, grads=True, **CLOSE)
    assert_at_rest(model)


@on_ranks(2)
def test_training_by_synchronize_alone(rank: Rank) -> None:
    """A loop that never syncs in backward and calls ``synchronize_gradients`` before each step trains like any."""
    model, reference = on_mesh(rank)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2, eps=1e-4) for m in (model, reference)]
    for step in range(3):
        accumulate(model, rank, 2 * step, 2 * step + 1)
        model.synchronize_gradients()
        reference_of(reference, rank, 2 * step, 2 * step + 1)
        assert_models_equal(model, reference, grads=True, **CLOSE)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert model.get_pending_gradients() == {}


@on_ranks(2)
def test_pending_gradients_do_not_share_with_a_copy(rank: Rank) -> None:
    """A deep copy starts without pending gradients and leaves the original's alone."""
    model = shard_blocks(Stack(1), rank)
    accumulate(model, rank, 0)
    copied = copy.deepcopy(model)
    assert copied.get_pending_gradients() == {}
    assert all(p.grad is None for p in copied.parameters())
    assert set(model.get_pending_gradients()) == set(model.parameters())


@on_ranks(4)
def test_partial_gradients_that_appear_later(rank: Rank) -> None:
    """A parameter that only a later microbatch uses pends too, with its rows of that one."""
    model = Stack(2)
    reference = copy.deepcopy(model)
    fully_shard(model, mesh=square(rank))
    model.set_requires_all_reduce(False)
    runs = ([0], [0, 1])
    for step, run in enumerate(runs):
        model(batch(rank.rank, step, 4, 6), run=run).square().mean().backward()
    assert set(model.get_pending_gradients()) == set(model.parameters())
    model.synchronize_gradients()
    for step, run in enumerate(runs):
        reference_backward(reference, 4, lambda m, r, s=step, u=run: m(batch(r, s, 4, 6), run=u).square().mean())
    assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(4)
@pytest.mark.parametrize(("set_to_none", "listed"), [(True, False), (False, False), (True, True)])
def test_partial_gradients_from_other_ranks(rank: Rank, set_to_none: bool, listed: bool) -> None:
    """Rows reduced from another rank's gradient pend here as well, and ``zero_grad`` clears them everywhere."""
    model = nn.Sequential(nn.Linear(6, 6), Branch())
    reference = copy.deepcopy(model)
    for module in (*model, model):
        fully_shard(module, mesh=square(rank))

    def loss_of(module: nn.Module, number: int, users: tuple[int, ...] = (1,)) -> torch.Tensor:
        module[1].rank = int(number in users)
        return square_loss()(module, number)

    model.set_requires_all_reduce(False)
    loss_of(model, rank.rank).backward()
    assert (model[1].odd.weight in model.get_pending_gradients()) == (rank.rank < 2) or not listed
    model.zero_grad(set_to_none=set_to_none)
    model.set_requires_all_reduce(True)
    loss_of(model, rank.rank, ()).backward()
    reference_backward(reference, 4, lambda m, r: loss_of(m, r, ()))
    for name, ours in model.named_parameters():
        theirs = reference.get_parameter(name).grad
        whole = None if ours.grad is None else ours.grad.full_tensor()
        if theirs is not None or whole is not None:
            theirs = torch.zeros(ours.shape) if theirs is None else theirs
            torch.testing.assert_close(whole, theirs, **CLOSE, msg=name)
