"""``summon_full_params``: gradients, moments at which it is refused, and models of all kinds."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from wrapped import (
    CLOSE,
    DIM,
    HYBRID,
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
    plain_strategies,
    raised_everywhere,
    wrapped,
)

from compare import assert_close, assert_equal, assert_models_equal
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import (
    MixedPrecision,
    MixedPrecisionPolicy,
    PhaseError,
    ShardingStrategy,
    fully_shard,
)
from fullshard.comm import record
from ranks import Rank, on_ranks

# ---------------------------------------------------------------- gradients


@on_ranks(1, 2)
@plain_strategies
@both_forms
def test_with_grads(rank: Rank, strategy: ShardingStrategy, orig: bool) -> None:
    """Gradients are full inside, and what is done to them is kept."""
    model, reference = wrapped(rank, strategy, use_orig_params=orig)
    both_backward(rank, model, reference)
    with FSDP.summon_full_params(model, writeback=False, with_grads=True):
        assert_models_equal(model, reference, grads=True, **CLOSE)
    with FSDP.summon_full_params(model, with_grads=True):
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(3.0)
    for p in reference.parameters():
        assert p.grad is not None
        p.grad.mul_(3.0)
    with FSDP.summon_full_params(model, writeback=False, with_grads=True):
        assert_models_equal(model, reference, grads=True, **CLOSE)
    for module in (model, reference):
        torch.optim.SGD(module.parameters(), lr=0.1).step()
    assert_same_outputs(rank, model, reference)


@on_ranks(4)
@pytest.mark.parametrize("strategy", HYBRID, ids=lambda s: s.name)
def test_with_grads_hybrid(rank: Rank, strategy: ShardingStrategy) -> None:
    """Gradients of replicas are equal and full."""
    model, reference = wrapped(rank, strategy)
    both_backward(rank, model, reference)
    with FSDP.summon_full_params(model, writeback=False, with_grads=True):
        assert_models_equal(model, reference, grads=True, **CLOSE)


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
    """A parameter without gradient on any rank has none inside and stays so; one that a rank set alone is full."""
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


@on_ranks(2)
@both_forms
def test_with_grads_on_the_first_rank(rank: Rank, orig: bool) -> None:
    """With ``rank0_only`` the first rank can read gradients; values are written back, gradients are as before."""
    model, reference = wrapped(rank, use_orig_params=orig)
    both_backward(rank, model, reference)
    with FSDP.summon_full_params(model, rank0_only=True, with_grads=True):
        if rank.rank == 0:
            assert_models_equal(model, reference, grads=True, **CLOSE)
            edit(model)
    edit(reference)
    check_gradients(model, reference)


@on_ranks(2)
def test_with_grads_dropped_inside(rank: Rank) -> None:
    """Gradients that are set to None inside are None afterwards."""
    model, reference = wrapped(rank, use_orig_params=True)
    both_backward(rank, model, reference)
    with FSDP.summon_full_params(model, with_grads=True):
        model.module.last.weight.grad = None
    assert model.module.last.weight.grad is None
    assert model.module.last.bias.grad is not None


@on_ranks(2)
@both_forms
def test_gradients_survive_without_with_grads(rank: Rank, orig: bool) -> None:
    """Without ``with_grads`` there are none inside, and they are as before afterwards."""
    model, reference = wrapped(rank, use_orig_params=orig)
    both_backward(rank, model, reference)
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    with FSDP.summon_full_params(model):
        assert all(p.grad is None for p in model.parameters())
    after = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    assert_equal(after, before, "gradients")


# ---------------------------------------------------------------- what it does not go with


@on_ranks(2)
def test_nested(rank: Rank) -> None:
    """A unit that is full already is refused, also from below; different units may be open at once."""
    model, reference = wrapped(rank)
    inner = model.module.parts[0]
    with FSDP.summon_full_params(model):
        for again in (model, inner):
            with pytest.raises(PhaseError, match="are unsharded"), FSDP.summon_full_params(again):
                pass
        assert_models_equal(model, reference)  # the outer block goes on
        edit(model)
    edit(reference)
    with FSDP.summon_full_params(model, recurse=False), FSDP.summon_full_params(inner, recurse=False):
        assert_equal(inner.module.up.weight.detach(), reference.parts[0].up.weight.detach(), "inner")
        assert_equal(model.module.first.weight.detach(), reference.first.weight.detach(), "outer")
    check_steps(rank, model, reference)


@on_ranks(2)
@plain_strategies
def test_in_forward_and_backward(rank: Rank, strategy: ShardingStrategy) -> None:
    """In forward and in backward it is refused on all ranks, and the step comes to its end."""
    model, reference = wrapped(rank, strategy)
    errors: list[BaseException] = []

    def ask(*_: Any) -> None:
        with pytest.raises(PhaseError, match="middle of a step") as caught, FSDP.summon_full_params(model):
            pass
        errors.append(caught.value)

    handle = model.module.last.register_forward_pre_hook(ask)
    both_backward(rank, model, reference)
    handle.remove()
    assert len(errors) == 1

    def ask_in_backward(_: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        inputs[0].register_hook(ask)

    handle = model.module.last.register_forward_pre_hook(ask_in_backward)
    model(torch.randn(2, DIM)).sum().backward()
    handle.remove()
    assert len(errors) == 2
    raised_everywhere(rank, errors[0])
    for module in (model, reference):
        module.zero_grad()
    check_steps(rank, model, reference)


@on_ranks(2)
@both_forms
@pytest.mark.parametrize("ran", [False, True], ids=["fresh", "ran"])
@pytest.mark.parametrize("inner", [False, True], ids=["root", "part"])
def test_running_a_unit_inside(rank: Rank, orig: bool, ran: bool, inner: bool) -> None:
    """Running a model while a unit of it is full is refused; afterwards it runs, and its parameters are as before."""
    model, reference = wrapped(rank, use_orig_params=orig)
    if ran:
        check_steps(rank, model, reference)
    before = [id(p) for p in model.parameters()]
    summoned = model.module.parts[1] if inner else model
    with FSDP.summon_full_params(summoned), pytest.raises(PhaseError, match="inside summon_full_params"):
        model(torch.ones(1, DIM))
    assert [id(p) for p in model.parameters()] == before
    check_steps(rank, model, reference)


@on_ranks(2)
@plain_strategies
def test_backward_inside(rank: Rank, strategy: ShardingStrategy) -> None:
    """A backward through units that are full is refused on all ranks, and the next step is right."""
    model, reference = wrapped(rank, strategy)
    loss = model(torch.ones(2, DIM)).sum()
    with FSDP.summon_full_params(model, writeback=False), pytest.raises(PhaseError, match="summon_full_params"):
        loss.backward()
    model.zero_grad()
    check_steps(rank, model, reference, steps=2)


@on_ranks(2)
@both_forms
def test_asking_inside(rank: Rank, orig: bool) -> None:
    """What looks at the model, or drops gradients, may be called inside, and changes no parameter object."""
    model, reference = wrapped(rank, use_orig_params=orig)
    both_backward(rank, model, reference)
    before = [id(p) for p in model.parameters()]
    with FSDP.summon_full_params(model):
        assert model.check_is_root() and len(FSDP.fsdp_modules(model)) == 3
        assert model.get_pending_gradients() == {}
        model.zero_grad()
        model.eval()
        model.train()
        repr(model)
    assert [id(p) for p in model.parameters()] == before
    check_steps(rank, model, reference)


@on_ranks(2)
@both_forms
@pytest.mark.parametrize("ran", [False, True], ids=["fresh", "trained"])
def test_generating_with_the_roots_parameters(rank: Rank, orig: bool, ran: bool) -> None:
    """Methods of the wrapped module run under ``recurse=False``, while units below gather for themselves."""
    model, reference = wrapped(rank, use_orig_params=orig)
    if ran:
        check_steps(rank, model, reference)
    x = torch.randn(2, DIM)
    with torch.no_grad(), FSDP.summon_full_params(model, writeback=False, recurse=False):
        for _ in range(3):
            torch.testing.assert_close(model.run(x), reference.run(x))
    check_steps(rank, model, reference)


@on_ranks(2)
@plain_strategies
@both_forms
def test_between_forward_and_backward(rank: Rank, strategy: ShardingStrategy, orig: bool) -> None:
    """Looking between two forwards, or before a backward, leaves the gradients right."""
    model, reference = wrapped(rank, strategy, use_orig_params=orig)
    batches = [torch.randn(2, DIM, generator=torch.Generator().manual_seed(r)) for r in range(2 * rank.world_size)]
    mine = batches[2 * rank.rank : 2 * rank.rank + 2]
    loss = model(mine[0]).square().sum()
    with FSDP.summon_full_params(model, writeback=False):
        assert_models_equal(model, reference)
    loss = loss + model(mine[1]).square().sum()
    with FSDP.summon_full_params(model, writeback=False):
        assert_models_equal(model, reference)
    loss.backward()
    (sum(reference(x).square().sum() for x in batches) / rank.world_size).backward()
    with FSDP.summon_full_params(model, writeback=False, with_grads=True):
        assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(2)
@both_forms
@pytest.mark.parametrize("writeback", [True, False])
def test_exception_in_the_block(rank: Rank, orig: bool, writeback: bool) -> None:
    """If the block raises, the user's error comes out, nothing is written, and the model is as before."""
    model, reference = wrapped(rank, use_orig_params=orig)
    before = [(name, id(p)) for name, p in model.named_parameters()]

    def fail() -> None:
        with FSDP.summon_full_params(model, writeback=writeback):
            edit(model)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert [(name, id(p)) for name, p in model.named_parameters()] == before
    check_steps(rank, model, reference)


@on_ranks(2)
@pytest.mark.parametrize("flag", ["recurse", "writeback", "rank0_only", "offload_to_cpu", "with_grads"])
def test_bad_input(rank: Rank, flag: str) -> None:
    """What is no flag, or no module, is refused by name."""
    model, _ = wrapped(rank)
    with pytest.raises(ValueError, match=flag), FSDP.summon_full_params(model, **{flag: "yes"}):  # type: ignore[arg-type]
        pass
    with pytest.raises(TypeError, match="module"), FSDP.summon_full_params("model"):  # type: ignore[arg-type]
        pass


# ---------------------------------------------------------------- other models


@on_ranks(2)
def test_fully_sharded_modules(rank: Rank) -> None:
    """Units of the other front end become plain parameters inside as well."""
    model, reference = Net(), None
    for parameter in (*model.parameters(), *model.buffers()):
        dist.broadcast(parameter.detach(), 0)
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
def test_both_front_ends_in_one_model(rank: Rank, orig: bool) -> None:
    """A wrapper around a part that is fully sharded: one block gathers both."""
    torch.manual_seed(0)
    model = Net()
    reference = copy.deepcopy(model)
    fully_shard(model.parts[0], mesh=rank.mesh)
    outer = FSDP(model, use_orig_params=orig)
    with FSDP.summon_full_params(outer, rank0_only=True):
        if rank.rank == 0:
            assert_models_equal(outer, reference)
            edit(outer)
    edit(reference)
    assert_same_outputs(rank, outer, reference)


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


@on_ranks(2)
def test_memory_comes_and_goes(rank: Rank) -> None:
    """Inside, nothing of what units compute with is allocated; afterwards nothing at all is."""
    model, _ = wrapped(rank)
    with FSDP.summon_full_params(model):
        kept = model.module.first.weight
        assert kept.untyped_storage().size() > 0
    assert kept.untyped_storage().size() == 0


@pytest.mark.parametrize("mixed", [False, True], ids=["plain", "bf16"])
@on_ranks(2)
def test_running_on_the_copies(rank: Rank, mixed: bool):
    """Without gradients, wrappers and fully_shard units inside can be run: whole, and the module inside; uncast."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2), nn.Linear(2, 2))
    reference = copy.deepcopy(model)
    precision = MixedPrecision(param_dtype=torch.bfloat16) if mixed else None
    model[2] = FSDP(model[2], mixed_precision=precision)
    fully_shard(model[3], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16 if mixed else None))
    model = FSDP(model, mixed_precision=precision)
    x = torch.randn(3, 4)
    with record() as seen, FSDP.summon_full_params(model, writeback=False):
        gathered = len(seen)
        with torch.no_grad():
            for run in (model, model.module):
                assert_equal(run(x), reference(x), "output")
        assert len(seen) == gathered
        with pytest.raises(PhaseError, match="was run inside summon_full_params"):
            model(x)
    with torch.no_grad(), FSDP.summon_full_params(model, writeback=False, rank0_only=True):
        if rank.rank == 0:
            assert_equal(model(x), reference(x), "output")
        else:
            with pytest.raises(PhaseError, match="was run inside summon_full_params"):
                model(x)
    model(x).sum().backward()
