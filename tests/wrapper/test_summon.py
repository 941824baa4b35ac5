"""``summon_full_params``: unsharded parameters and gradients inside of a block, and what becomes of edits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from wrapped import (
    CLOSE,
    DIM,
    FULL,
    GRAD_OP,
    HYBRID,
    NO_SHARD,
    Net,
    Part,
    assert_same_outputs,
    backward,
    both_backward,
    both_forms,
    check_gradients,
    check_steps,
    edit,
    joined,
    raised_everywhere,
    tensors_of,
    wrapped,
)

from compare import assert_close, assert_equal, assert_models_equal
from fullshard import CPUOffload, FullshardError, MixedPrecision, ShardingStrategy, fully_shard
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.comm import record
from ranks import Rank, on_ranks

strategies_and_forms = pytest.mark.parametrize(
    ("strategy", "orig"),
    [(FULL, False), (FULL, True), (GRAD_OP, True), (NO_SHARD, False), (NO_SHARD, True)],
)

# ---------------------------------------------------------------- parameters


@on_ranks(1, 2)
@strategies_and_forms
def test_values_and_edits(rank: Rank, strategy: ShardingStrategy, orig: bool) -> None:
    """Inside, all parameters are there as before wrapping: names, order, shapes, types; outside nothing has changed.

    Edits are kept, or not, as ``writeback`` says.
    """
    model, reference = wrapped(rank, strategy, use_orig_params=orig)
    before = [(name, id(p), p.shape) for name, p in model.named_parameters()]
    with FSDP.summon_full_params(model):
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in reference.named_parameters()]
        assert [name for name, _ in model.named_buffers()] == [name for name, _ in reference.named_buffers()]
        for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert type(mine) is nn.Parameter and mine.is_leaf and mine.requires_grad
            assert_equal(mine.detach(), theirs.detach(), name)
        assert_equal(model.module.parts[0].module.up.weight.detach(), reference.parts[0].up.weight.detach(), "direct")
    assert [(name, id(p), p.shape) for name, p in model.named_parameters()] == before
    check_steps(rank, model, reference)
    for writeback in (False, True):
        with FSDP.summon_full_params(model, writeback=writeback):
            edit(model)
            full = {name: value.clone() for name, value in tensors_of(model).items()}
        if writeback:
            edit(reference)
        assert_same_outputs(rank, model, reference)
    if orig and strategy is not NO_SHARD:  # the shards of all ranks, put together without the library
        for (name, shard), value in zip(model.named_parameters(), full.values(), strict=True):
            assert_equal(joined(rank, shard), value.flatten(), name)
    check_steps(rank, model, reference)


@on_ranks(4)
@pytest.mark.parametrize(("strategy", "rank0_only"), [(HYBRID[0], False), (HYBRID[0], True), (HYBRID[1], True)])
def test_hybrid(rank: Rank, strategy: ShardingStrategy, rank0_only: bool) -> None:
    """Replicas stay replicas: everyone's equal edits are kept, or those of the very first rank; gradients are full."""
    model, reference = wrapped(rank, strategy, use_orig_params=True)
    edit(reference)
    with FSDP.summon_full_params(model, rank0_only=rank0_only):
        edit(model, 2.0 if not rank0_only or rank.rank == 0 else 50.0)
    assert_same_outputs(rank, model, reference)
    check_steps(rank, model, reference)
    both_backward(rank, model, reference)
    with FSDP.summon_full_params(model, writeback=False, with_grads=True):
        assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(2)
@both_forms
def test_recurse(rank: Rank, orig: bool) -> None:
    """Without ``recurse``, only the unit of the module itself is gathered, and a module that is no unit has none."""
    model, reference = wrapped(rank, use_orig_params=orig)
    inner = model.module.parts[0]
    with record() as seen, FSDP.summon_full_params(model, recurse=False):
        assert_equal(model.module.first.weight.detach(), reference.first.weight.detach(), "root")
        assert inner.module.up.weight.shape != (9, DIM)
    assert [c.kind for c in seen] == ["all_gather"]
    with record() as seen, FSDP.summon_full_params(inner, recurse=False):
        assert model.module.first.weight.shape != (DIM, DIM)
        assert_equal(inner.module.up.weight.detach(), reference.parts[0].up.weight.detach(), "inner")
        assert [name for name, _ in inner.named_parameters()] == [n for n, _ in reference.parts[0].named_parameters()]
    assert [c.kind for c in seen] == ["all_gather"]
    with record() as seen, FSDP.summon_full_params(model):
        kept = model.module.first.weight
        assert kept.untyped_storage().size() > 0
    assert [c.kind for c in seen] == ["all_gather"] * 3
    assert kept.untyped_storage().size() == 0, "memory comes and goes"
    root = nn.Sequential(model, nn.Linear(3, 2))
    with record() as seen, FSDP.summon_full_params(root, recurse=False):
        assert model.module.first.weight.shape != (DIM, DIM)
    assert seen == []
    with FSDP.summon_full_params(root):
        assert_equal(root[0].module.last.weight.detach(), reference.last.weight.detach(), "last")
    with FSDP.summon_full_params(nn.Linear(2, 2)):
        pass


@on_ranks(2)
@both_forms
def test_own_part_counts(rank: Rank, orig: bool) -> None:
    """Of ranks that edit differently, each keeps its own slice of what it wrote."""
    model, _ = wrapped(rank, use_orig_params=orig, auto_wrap_policy=None)
    with FSDP.summon_full_params(model):
        for parameter in model.parameters():
            nn.init.constant_(parameter, float(rank.rank))
    with FSDP.summon_full_params(model, writeback=False):
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert_equal(flat.sort().values, flat, "rank 0's part comes first")
    assert set(flat.tolist()) == {0.0, 1.0}


@on_ranks(2)
@both_forms
def test_edits_between_steps_reach_the_optimizer(rank: Rank, orig: bool) -> None:
    """What is written in the middle of a training is what the next steps start from, with the optimizer as it was."""
    model, reference = wrapped(rank, use_orig_params=orig)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.05) for m in (model, reference)]
    for step in range(4):
        both_backward(rank, model, reference, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with FSDP.summon_full_params(model):
            edit(model, 0.5)
        edit(reference, 0.5)
        with torch.no_grad():
            for module in (model, reference):
                for parameter in module.parameters():
                    parameter.div_(10.0)
    with FSDP.summon_full_params(model, writeback=False):
        assert_models_equal(model, reference, rtol=1e-4, atol=1e-5)


@on_ranks(2)
@both_forms
def test_replaced_parameters(rank: Rank, orig: bool) -> None:
    """Other memory, another object, other strides, one set through ``_parameters``: what is there at the end is kept.

    Another shape is an error on all ranks that names the parameter, and the model goes on as it was.
    """
    model, reference = wrapped(rank, use_orig_params=orig)
    assert_same_outputs(rank, model, reference)  # from then on, units know their place in the model
    for seed, how in enumerate(("data", "assign", "module", "transposed")):
        new = torch.randn(9, DIM, generator=torch.Generator().manual_seed(seed))
        reference.parts[1].up.weight.data.copy_(new)
        with FSDP.summon_full_params(model):
            layer = model.module.parts[1].module.up
            if how == "data":
                layer.weight.data = new
            elif how == "module":
                layer._parameters["weight"] = nn.Parameter(new.clone())
            else:
                layer.weight = nn.Parameter(new.t().contiguous().t() if how == "transposed" else new.clone())
        assert_same_outputs(rank, model, reference)

    def replace() -> None:
        with FSDP.summon_full_params(model):
            edit(model)
            model.module.parts[1].module.up.weight = nn.Parameter(torch.ones(2, 2))

    with pytest.raises(FullshardError, match=r" parts\.1\.up\.weight .*\(2, 2\)") as caught:
        replace()
    raised_everywhere(rank, caught.value)
    check_steps(rank, model, reference)


# ---------------------------------------------------------------- rank0_only, offload_to_cpu


@on_ranks(2)
@pytest.mark.parametrize(
    ("orig", "strategy", "offload"),
    [(False, FULL, False), (True, FULL, True), (False, GRAD_OP, True)],
)
def test_rank0_only(rank: Rank, orig: bool, strategy: ShardingStrategy, offload: bool) -> None:
    """Only the first rank has full parameters; what it writes is sent to the others."""
    model, reference = wrapped(rank, strategy, use_orig_params=orig)
    with FSDP.summon_full_params(model, writeback=False, rank0_only=True, offload_to_cpu=offload):
        shape = model.module.parts[0].module.up.weight.shape
        assert (shape == (9, DIM)) == (rank.rank == 0)
        if rank.rank == 0:
            assert_models_equal(model, copy.deepcopy(reference).cpu() if offload else reference)
            edit(model)
    assert_same_outputs(rank, model, reference)
    with FSDP.summon_full_params(model, rank0_only=True, offload_to_cpu=offload):
        if rank.rank == 0:
            edit(model)
            model.module.first.bias = nn.Parameter(torch.arange(DIM).float())
    edit(reference)
    reference.first.bias.data.copy_(torch.arange(DIM))
    assert_same_outputs(rank, model, reference)
    check_steps(rank, model, reference)


@on_ranks(2)
def test_rank0_only_fails_on_one_rank(rank: Rank) -> None:
    """If the block raises on any rank nothing is written anywhere, and the other ranks are told.

    A wrong shape, which only the first rank can see, is an error on all ranks and nothing hangs.
    """
    model, reference = wrapped(rank)

    def fail(guilty: int) -> None:
        with FSDP.summon_full_params(model, rank0_only=True):
            if rank.rank == 0:
                edit(model)
            if rank.rank == guilty:
                raise KeyError("mine")

    for guilty in (0, 1):
        mine = rank.rank == guilty
        with pytest.raises(KeyError if mine else FullshardError, match="mine" if mine else "on another rank"):
            fail(guilty)

    def replace() -> None:
        with FSDP.summon_full_params(model, rank0_only=True):
            if rank.rank == 0:
                model.module.parts[1].module.up.weight = nn.Parameter(torch.ones(2, 2))

    with pytest.raises(FullshardError) as caught:
        replace()
    assert rank.rank or "up.weight" in str(caught.value)
    check_steps(rank, model, reference)


@on_ranks(2)
def test_rank0_only_of_other_units(rank: Rank) -> None:
    """Without a shard axis every rank is the first of its own: all have parameters, and write.

    A wrapper around a part that is fully sharded: one block gathers both.
    """
    model, reference = wrapped(rank, NO_SHARD)
    with FSDP.summon_full_params(model, rank0_only=True):
        edit(model) if rank.rank == 0 else None
    edit(reference)
    assert_same_outputs(rank, model, reference)
    check_steps(rank, model, reference)
    torch.manual_seed(0)
    mixed = Net()
    reference = copy.deepcopy(mixed)
    fully_shard(mixed.parts[0], mesh=rank.mesh)
    outer = FSDP(mixed, use_orig_params=True)
    with FSDP.summon_full_params(outer, rank0_only=True):
        if rank.rank == 0:
            assert_models_equal(outer, reference)
            edit(outer)
    edit(reference)
    assert_same_outputs(rank, outer, reference)


@on_ranks(2)
@pytest.mark.parametrize(("strategy", "offloaded"), [(FULL, False), (FULL, True), (GRAD_OP, True), (NO_SHARD, False)])
def test_offload_to_cpu(rank: Rank, strategy: ShardingStrategy, offloaded: bool) -> None:
    """CPU copies can be read and written back with each strategy, also where shards are in CPU memory anyway."""
    offload = CPUOffload(offload_params=True) if offloaded else None
    model, reference = wrapped(rank, strategy, use_orig_params=True, cpu_offload=offload)
    with FSDP.summon_full_params(model, offload_to_cpu=True):
        assert {p.device.type for p in model.parameters()} == {"cpu"}
        assert_models_equal(model, copy.deepcopy(reference).cpu())
        edit(model)
    edit(reference)
    check_steps(rank, model, reference)


# ---------------------------------------------------------------- gradients


@on_ranks(2)
@strategies_and_forms
def test_with_grads(rank: Rank, strategy: ShardingStrategy, orig: bool) -> None:
    """Gradients are full inside, on the first rank too, and what is done to them is kept.

    Without ``with_grads`` there are none inside, and they are as before afterwards.
    """
    model, reference = wrapped(rank, strategy, use_orig_params=orig)
    both_backward(rank, model, reference)
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    with FSDP.summon_full_params(model):
        assert all(p.grad is None for p in model.parameters())
    after = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    assert_equal(after, before, "gradients")
    with FSDP.summon_full_params(model, rank0_only=True, with_grads=True):
        if rank.rank == 0:
            assert_models_equal(model, reference, grads=True, **CLOSE)
            edit(model)
    edit(reference)
    check_gradients(model, reference)
    for module, block in ((model, FSDP.summon_full_params(model, with_grads=True)), (reference, torch.no_grad())):
        with block:
            for p in module.parameters():
                assert p.grad is not None
                p.grad.mul_(3.0)
    check_gradients(model, reference)
    for module in (model, reference):
        torch.optim.SGD(module.parameters(), lr=0.1).step()
    assert_same_outputs(rank, model, reference)


@on_ranks(2)
@pytest.mark.parametrize("offload", [False, True])
def test_with_grads_none(rank: Rank, offload: bool) -> None:
    """Before any backward there are none; what is set inside is kept, and so is None."""
    model, _ = wrapped(rank, use_orig_params=True)
    with FSDP.summon_full_params(model, with_grads=True, offload_to_cpu=offload):
        assert all(p.grad is None for p in model.parameters())
        weight = model.module.first.weight
        weight.grad = torch.arange(DIM * DIM).float().view(DIM, DIM).to(weight.device)
    names = [name for name, p in model.named_parameters() if p.grad is not None]
    assert names == ["_fsdp_wrapped_module.first.weight"]
    grad = model.module.first.weight.grad
    assert grad is not None
    assert_equal(joined(rank, grad), torch.arange(DIM * DIM).float(), "gradient")


@on_ranks(2)
@both_forms
def test_with_grads_offloaded(rank: Rank, orig: bool) -> None:
    """Gradients that are changed in CPU memory are those of the units afterwards, of both front ends'."""
    torch.manual_seed(0)
    model = Net()
    fully_shard(model.parts[0], mesh=rank.mesh)
    outer = FSDP(model, use_orig_params=orig)
    backward(rank, outer)
    with FSDP.summon_full_params(outer, writeback=False, with_grads=True):
        before = {name: p.grad.clone() for name, p in outer.named_parameters() if p.grad is not None}
    with FSDP.summon_full_params(outer, with_grads=True, offload_to_cpu=True):
        for p in outer.parameters():
            assert p.grad is not None and p.grad.device.type == "cpu"
            p.grad.mul_(2)
    with FSDP.summon_full_params(outer, writeback=False, with_grads=True):
        for name, p in outer.named_parameters():
            assert_equal(p.grad, 2 * before[name], name)


@on_ranks(2)
def test_with_grads_of_some(rank: Rank) -> None:
    """A parameter without gradient on any rank has none inside and stays so; one that a rank set alone is full.

    Gradients that are set to None inside are None afterwards.
    """
    model, reference = wrapped(rank, use_orig_params=True)
    both_backward(rank, model, reference)
    model.module.last.weight.grad = None
    bias = model.module.first.bias  # a piece of it may be on either rank
    if rank.rank == 0:
        bias.grad = torch.ones_like(bias)
    else:
        bias.grad = None
    holder = joined(rank, torch.full_like(bias.detach(), float(rank.rank)))
    with FSDP.summon_full_params(model, with_grads=True):
        assert model.module.last.weight.grad is None
        assert model.module.last.bias.grad is not None
        assert_equal(model.module.first.bias.grad, 1.0 - holder, "first.bias")
    assert model.module.last.weight.grad is None
    with FSDP.summon_full_params(model, writeback=False, with_grads=True):
        assert_equal(model.module.first.bias.grad, 1.0 - holder, "first.bias, later")
    with FSDP.summon_full_params(model, with_grads=True):
        model.module.last.bias.grad = None
    assert model.module.last.bias.grad is None and model.module.first.weight.grad is not None


# ---------------------------------------------------------------- other models


@on_ranks(2)
def test_fully_sharded_modules(rank: Rank) -> None:
    """Units of the other front end become plain parameters inside as well."""
    torch.manual_seed(0)
    model: Any = Net()
    reference = copy.deepcopy(model)
    for part in model.parts:
        fully_shard(part, mesh=rank.mesh)
    fully_shard(model, mesh=rank.mesh)
    both_backward(rank, model, reference)
    with FSDP.summon_full_params(model, with_grads=True):
        assert {type(p) for p in model.parameters()} == {nn.Parameter}
        for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert_equal(mine.detach(), theirs.detach(), name)
            assert mine.grad is not None and theirs.grad is not None
            assert_close(mine.grad, theirs.grad, name, **CLOSE)
        edit(model)
    edit(reference)
    assert_models_equal(model, reference)
    assert_same_outputs(rank, model, reference)


@on_ranks(2)
@both_forms
def test_full_precision(rank: Rank, orig: bool) -> None:
    """With mixed precision the parameters are the shards' own, not what modules compute with."""
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    model, reference = wrapped(rank, use_orig_params=orig, mixed_precision=precision)
    model(torch.ones(1, DIM)).sum().backward()
    with FSDP.summon_full_params(model, with_grads=True):
        for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert_equal(mine.detach(), theirs.detach(), name)
            assert mine.grad is not None and mine.grad.dtype is torch.float32
        assert model.module.parts[0].module.offset.dtype is torch.bfloat16  # buffers stay what they are


@on_ranks(2)
@both_forms
def test_tied_frozen_and_ignored(rank: Rank, orig: bool) -> None:
    """Tied parameters are one object inside, frozen ones stay frozen, ignored ones are left alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), Part())
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    reference = copy.deepcopy(model)
    ignored = model[2]
    outer = FSDP(model, use_orig_params=orig, ignored_modules=[ignored])
    with FSDP.summon_full_params(outer):
        assert model[1].weight is model[0].weight
        assert not model[0].bias.requires_grad and model[0].weight.requires_grad
        assert outer.module[2].weight is ignored.weight
        assert [name for name, _ in outer.named_parameters()] == [name for name, _ in reference.named_parameters()]
        assert_models_equal(outer, reference)
        with torch.no_grad():
            model[1].weight.mul_(2.0)
            model[0].bias.add_(1.0)
    with FSDP.summon_full_params(outer, rank0_only=True):
        if rank.rank == 0:
            model[0].weight = nn.Parameter(torch.eye(4))
    with FSDP.summon_full_params(outer, writeback=False):
        assert_equal(model[0].weight.detach(), torch.eye(4), "one of the tied ones was replaced")
        assert_equal(model[0].bias.detach(), reference[0].bias.detach() + 1.0, "frozen")
