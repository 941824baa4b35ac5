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
    Block,
    Net,
    assert_same_outputs,
    backward,
    both_backward,
    both_forms,
    built,
    check_gradients,
    check_steps,
    edit,
    joined,
    raised_everywhere,
    wrapped,
)

from compare import assert_equal, assert_models_equal
from fullshard import (
    CPUOffload,
    FullshardError,
    MixedPrecision,
    MixedPrecisionPolicy,
    PhaseError,
    ShardingStrategy,
    fully_shard,
)
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.comm import record
from ranks import Rank, on_ranks


def assert_full(model: nn.Module, reference: nn.Module, *, grads: bool = False, **tolerance: float) -> None:
    """Require all full parameters, and gradients, to be those of the unsharded model."""
    with FSDP.summon_full_params(model, writeback=False, with_grads=grads):
        assert_models_equal(model, reference, grads=grads, **tolerance)


# ---------------------------------------------------------------- parameters


@on_ranks(2)
@pytest.mark.parametrize(("strategy", "orig"), [(FULL, False), (GRAD_OP, True), (NO_SHARD, False)])
def test_values_and_edits(rank: Rank, strategy: ShardingStrategy, orig: bool) -> None:
    """Inside, parameters are those of before wrapping, in full precision; edits are kept if ``writeback`` says so."""
    precision = MixedPrecision(torch.bfloat16) if strategy is GRAD_OP else None
    model, reference = wrapped(rank, strategy, use_orig_params=orig, mixed_precision=precision)
    before = [(name, id(p), p.shape) for name, p in model.named_parameters()]
    model(torch.ones(1, DIM))
    with FSDP.summon_full_params(model):
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in reference.named_parameters()]
        assert [name for name, _ in model.named_buffers()] == [name for name, _ in reference.named_buffers()]
        for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert type(mine) is nn.Parameter and mine.is_leaf and mine.requires_grad
            assert_equal(mine.detach(), theirs.detach(), name)
        assert_equal(model.module.blocks[0].module.up.weight.detach(), reference.blocks[0].up.weight.detach(), "direct")
    assert [(name, id(p), p.shape) for name, p in model.named_parameters()] == before
    with FSDP.summon_full_params(model, writeback=False):
        edit(model)
    assert_full(model, reference)
    with FSDP.summon_full_params(model):
        edit(model)
    edit(reference)
    assert_full(model, reference)
    if orig and strategy is not NO_SHARD:  # the shards of all ranks, put together without the library
        for (name, shard), value in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert_equal(joined(rank, shard), value.detach().flatten(), name)
    if precision is None:
        check_steps(rank, model, reference)


@on_ranks(4)
def test_hybrid(rank: Rank) -> None:
    """Replicas stay replicas: with ``rank0_only`` edits of the very first rank are kept; gradients are unsharded."""
    model, reference = wrapped(rank, HYBRID[1], use_orig_params=True)
    edit(reference)
    with FSDP.summon_full_params(model, rank0_only=True):
        edit(model, 2.0 if rank.rank == 0 else 50.0)
    both_backward(rank, model, reference)
    assert_full(model, reference, grads=True, **CLOSE)


@on_ranks(2)
@both_forms
def test_recurse(rank: Rank, orig: bool) -> None:
    """Without ``recurse``, only the unit of the module itself is unsharded, and a module that is no unit has none."""
    model, reference = wrapped(rank, use_orig_params=orig)
    inner = model.module.blocks[0]
    with record() as seen, FSDP.summon_full_params(model, recurse=False):
        assert_equal(model.module.first.weight.detach(), reference.first.weight.detach(), "root")
        assert inner.module.up.weight.shape != (9, DIM)
    assert [c.kind for c in seen] == ["all_gather"]
    with record() as seen, FSDP.summon_full_params(inner, recurse=False):
        assert model.module.first.weight.shape != (DIM, DIM)
        assert_equal(inner.module.up.weight.detach(), reference.blocks[0].up.weight.detach(), "inner")
        assert [name for name, _ in inner.named_parameters()] == [n for n, _ in reference.blocks[0].named_parameters()]
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
def test_replaced_parameters(rank: Rank, orig: bool) -> None:
    """Whatever memory or object is there at the end is kept; another shape is an error on all ranks by name."""
    model, reference = wrapped(rank, use_orig_params=orig)
    assert_same_outputs(rank, model, reference)  # from then on, units know their place in the model
    for seed, how in enumerate(("data", "assign", "module", "transposed")):
        new = torch.randn(9, DIM, generator=torch.Generator().manual_seed(seed))
        reference.blocks[1].up.weight.data.copy_(new)
        with FSDP.summon_full_params(model):
            layer = model.module.blocks[1].module.up
            if how == "data":
                layer.weight.data = new
            elif how == "module":
                layer._parameters["weight"] = nn.Parameter(new.clone())
            else:
                layer.weight = nn.Parameter(new.t().contiguous().t() if how == "transposed" else new.clone())
        assert_same_outputs(rank, model, reference)

    def replace(rank0_only: bool) -> None:
        with FSDP.summon_full_params(model, rank0_only=rank0_only):
            if rank.rank == 0 or not rank0_only:
                edit(model)
                model.module.blocks[1].module.up.weight = nn.Parameter(torch.ones(2, 2))

    with pytest.raises(FullshardError, match=r" blocks\.1\.up\.weight .*\(2, 2\)") as caught:
        replace(rank0_only=False)
    raised_everywhere(rank, caught.value)
    with pytest.raises(FullshardError) as caught:
        replace(rank0_only=True)  # which only the first rank can see
    assert rank.rank or "up.weight" in str(caught.value)
    check_steps(rank, model, reference)


@on_ranks(2)
@both_forms
def test_tied_frozen_and_ignored(rank: Rank, orig: bool) -> None:
    """Tied parameters are one object inside, and replaced together; frozen ones stay frozen, ignored ones alone."""
    model = built(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), Block()))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    ignored, reference = model[2].weight, copy.deepcopy(model)
    outer = FSDP(model, use_orig_params=orig, ignored_modules=[model[2]])
    with FSDP.summon_full_params(outer):
        assert model[1].weight is model[0].weight and model[2].weight is ignored
        assert not model[0].bias.requires_grad and model[0].weight.requires_grad
        assert_models_equal(outer, reference)
        edit(outer)
    edit(reference)
    with FSDP.summon_full_params(outer, rank0_only=True):
        if rank.rank == 0:
            model[0].weight = nn.Parameter(torch.eye(4))
    reference[0].weight.data.copy_(torch.eye(4))
    assert_full(outer, reference)


# ---------------------------------------------------------------- rank0_only, offload_to_cpu


@on_ranks(2)
@pytest.mark.parametrize(
    ("orig", "strategy", "offload"), [(False, FULL, False), (True, GRAD_OP, True), (True, NO_SHARD, True)]
)
def test_rank0_only(rank: Rank, orig: bool, strategy: ShardingStrategy, offload: bool) -> None:
    """Only the first rank has unsharded parameters, and what it writes is sent to the others, also from CPU memory."""
    offloaded = CPUOffload(offload_params=True) if strategy is GRAD_OP else None
    model, reference = wrapped(rank, strategy, use_orig_params=orig, cpu_offload=offloaded)
    with FSDP.summon_full_params(model, writeback=False, rank0_only=True, offload_to_cpu=offload):
        shape = model.module.blocks[0].module.up.weight.shape
        assert (shape == (9, DIM)) == (rank.rank == 0 or strategy is NO_SHARD)
        if rank.rank == 0:
            assert not offload or {p.device.type for p in model.parameters()} == {"cpu"}
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
    """If the block raises on any rank nothing is written anywhere, and the other ranks hear of it."""
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
    assert_full(model, reference)


# ---------------------------------------------------------------- gradients


@on_ranks(2)
@pytest.mark.parametrize(("strategy", "orig"), [(FULL, True), (NO_SHARD, False)])
def test_with_grads(rank: Rank, strategy: ShardingStrategy, orig: bool) -> None:
    """Gradients are unsharded inside, and what is done to them is kept; without ``with_grads`` there are none."""
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
    for module, block in ((model, FSDP.summon_full_params(model, with_grads=True)), (reference, torch.no_grad())):
        with block:
            for p in module.parameters():
                p.grad.mul_(3.0)
    check_gradients(model, reference)


@on_ranks(2)
@pytest.mark.parametrize("offload", [False, True])
def test_with_grads_of_some(rank: Rank, offload: bool) -> None:
    """None inside is None afterwards, on all ranks; what is set inside, or by one rank alone, is kept."""
    model, reference = wrapped(rank, use_orig_params=True)
    new = torch.arange(DIM * DIM).float().view(DIM, DIM)
    with FSDP.summon_full_params(model, with_grads=True, offload_to_cpu=offload):
        assert all(p.grad is None for p in model.parameters())
        weight = model.module.first.weight
        weight.grad = new.to(weight.device)
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["_fsdp_wrapped_module.first.weight"]
    assert_equal(joined(rank, model.module.first.weight.grad), new.flatten(), "gradient")
    both_backward(rank, model, reference)
    model.module.last.weight.grad = None
    bias = model.module.first.bias  # a shard of it may be on either rank
    bias.grad = torch.ones_like(bias) if rank.rank == 0 else None
    holder = joined(rank, torch.full_like(bias.detach(), float(rank.rank)))
    with FSDP.summon_full_params(model, with_grads=True, offload_to_cpu=offload):
        assert model.module.last.weight.grad is None
        assert_equal(model.module.first.bias.grad, 1.0 - holder, "first.bias")
        model.module.last.bias.grad = None
    assert model.module.last.weight.grad is None and model.module.last.bias.grad is None
    with FSDP.summon_full_params(model, writeback=False, with_grads=True):
        assert_equal(model.module.first.bias.grad, 1.0 - holder, "first.bias, later")


@on_ranks(2)
def test_fully_sharded_modules(rank: Rank) -> None:
    """Units of the other front end become plain parameters inside as well, with gradients that can be changed."""
    model = built()
    reference = copy.deepcopy(model)
    for block in model.blocks:
        fully_shard(block, mesh=rank.mesh)
    model = FSDP(model, use_orig_params=True)
    both_backward(rank, model, reference)
    with FSDP.summon_full_params(model, with_grads=True, offload_to_cpu=True):
        assert {type(p) for p in model.parameters()} == {nn.Parameter}
        assert_models_equal(model, reference, grads=True, **CLOSE)
    for module, block in ((model, FSDP.summon_full_params(model, with_grads=True)), (reference, torch.no_grad())):
        with block:
            edit(module)
            for parameter in module.parameters():
                parameter.grad.mul_(2)
    assert_full(model, reference, grads=True, **CLOSE)


# ---------------------------------------------------------------- moments


@on_ranks(2)
def test_nested(rank: Rank) -> None:
    """A unit that is full already is refused, also from below; different units may be open at once."""
    model, reference = wrapped(rank)
    inner = model.module.blocks[0]
    with FSDP.summon_full_params(model):
        for again in (model, inner):
            with pytest.raises(PhaseError, match="is unsharded"), FSDP.summon_full_params(again):
                pass
        with pytest.raises(PhaseError, match="summon_full_params"):
            model.state_dict()
        assert_models_equal(model, reference)  # the outer block goes on
    with FSDP.summon_full_params(model, recurse=False), FSDP.summon_full_params(inner, recurse=False):
        assert_equal(inner.module.up.weight.detach(), reference.blocks[0].up.weight.detach(), "inner")
        assert_equal(model.module.first.weight.detach(), reference.first.weight.detach(), "outer")


@on_ranks(2)
@pytest.mark.parametrize("strategy", [FULL, NO_SHARD], ids=lambda s: s.name)
def test_in_forward_and_backward(rank: Rank, strategy: ShardingStrategy) -> None:
    """In a step it is refused on all ranks, and so is a backward inside; the step comes to its end."""
    model, reference = wrapped(rank, strategy)
    errors: list[BaseException] = []

    def ask(*_: Any) -> None:
        with pytest.raises(PhaseError, match="middle of a step"):
            model.state_dict()
        with pytest.raises(PhaseError, match="middle of a step") as caught, FSDP.summon_full_params(model):
            pass
        errors.append(caught.value)

    def ask_in_both(module: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        ask()
        inputs[0].register_hook(ask)

    handle = model.module.last.register_forward_pre_hook(ask_in_both)
    both_backward(rank, model, reference)
    handle.remove()
    assert len(errors) == 2
    raised_everywhere(rank, errors[0])
    check_gradients(model, reference)
    loss = model(torch.ones(2, DIM)).sum()
    with FSDP.summon_full_params(model, writeback=False), pytest.raises(PhaseError, match="summon_full_params"):
        loss.backward()
    check_steps(rank, model, reference)


@on_ranks(2)
@pytest.mark.parametrize(("orig", "ran"), [(False, True), (True, False)])
def test_running_units_inside(rank: Rank, orig: bool, ran: bool) -> None:
    """Running unsharded units with gradients is refused; looking at them is not, nor is ``recurse=False``."""
    model, reference = wrapped(rank, use_orig_params=orig)
    if ran:
        backward(rank, model)
    before = [id(p) for p in model.parameters()]
    for summoned in (model, model.module.blocks[1]):
        with FSDP.summon_full_params(summoned), pytest.raises(PhaseError, match="inside summon_full_params"):
            model(torch.ones(1, DIM))
        assert [id(p) for p in model.parameters()] == before
    with FSDP.summon_full_params(model):
        assert model.check_is_root() and len(FSDP.fsdp_modules(model)) == 3
        assert model.get_pending_gradients() == {}
        model.zero_grad()
        model.eval().train()
        repr(model)
    assert [id(p) for p in model.parameters()] == before
    x = torch.randn(2, DIM)
    with torch.no_grad(), FSDP.summon_full_params(model, writeback=False, recurse=False):
        torch.testing.assert_close(model.run(x), reference.run(x))
    check_steps(rank, model, reference)


@on_ranks(2)
@both_forms
def test_exception_in_the_block(rank: Rank, orig: bool) -> None:
    """If the block raises, the user's error comes out, nothing is written, and the model is as before."""
    model, reference = wrapped(rank, use_orig_params=orig)
    before = [(name, id(p)) for name, p in model.named_parameters()]

    def fail(writeback: bool) -> None:
        with FSDP.summon_full_params(model, writeback=writeback):
            edit(model)
            raise KeyError("mine")

    for writeback in (True, False):
        with pytest.raises(KeyError, match="mine"):
            fail(writeback)
        assert [(name, id(p)) for name, p in model.named_parameters()] == before
    check_steps(rank, model, reference)


@on_ranks(1)
def test_bad_input(rank: Rank) -> None:
    """What is no flag, or no module, is refused by name."""
    model, _ = wrapped(rank)
    for flag in ("recurse", "writeback", "rank0_only", "offload_to_cpu", "with_grads"):
        with pytest.raises(ValueError, match=flag), FSDP.summon_full_params(model, **{flag: "yes"}):  # type: ignore[arg-type]
            pass
    with pytest.raises(TypeError, match="module"), FSDP.summon_full_params("model"):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize("mixed", [False, True], ids=["plain", "bf16"])
@on_ranks(2)
def test_running_on_the_copies(rank: Rank, mixed: bool) -> None:
    """Without gradients, wrappers and fully_shard units inside can be run: whole, and the module inside; uncast."""
    model: Any = built(Net)
    reference = copy.deepcopy(model)
    precision = MixedPrecision(param_dtype=torch.bfloat16) if mixed else None
    model.blocks[0] = FSDP(model.blocks[0], mixed_precision=precision)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if mixed else None)
    fully_shard(model.blocks[1], mesh=rank.mesh, mp_policy=policy)
    model = FSDP(model, mixed_precision=precision)
    x = torch.randn(3, DIM)
    with record() as seen, FSDP.summon_full_params(model, writeback=False):
        collectives = len(seen)
        with torch.no_grad():
            for run in (model, model.module):
                assert_equal(run(x), reference(x), "output")
        assert len(seen) == collectives
        with pytest.raises(PhaseError, match="cannot run inside summon_full_params"):
            model(x)
    with torch.no_grad(), FSDP.summon_full_params(model, writeback=False, rank0_only=True):
        if rank.rank == 0:
            assert_equal(model(x), reference(x), "output")
        else:
            with pytest.raises(PhaseError, match="cannot run inside summon_full_params"):
                model(x)
    model(x).sum().backward()
