"""``summon_full_params`` in the middle of a step, inside itself, and models that are run inside it."""

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
    NO_SHARD,
    both_backward,
    both_forms,
    check_steps,
    edit,
    plain_strategies,
    raised_everywhere,
    wrapped,
)

from compare import assert_equal, assert_models_equal
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
    """In forward and in backward it is refused on all ranks, and the step comes to its end.

    A backward through units that are unsharded is refused on all ranks, and the next step is right.
    """
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
    loss = model(torch.ones(2, DIM)).sum()
    with FSDP.summon_full_params(model, writeback=False), pytest.raises(PhaseError, match="summon_full_params"):
        loss.backward()
    for module in (model, reference):
        module.zero_grad()
    check_steps(rank, model, reference, steps=2)


@on_ranks(2)
@pytest.mark.parametrize(("orig", "ran"), [(False, True), (True, False)])
def test_running_units_inside(rank: Rank, orig: bool, ran: bool) -> None:
    """Running a model while a unit of it is unsharded is refused; afterwards parameters are as before.

    Methods of the wrapped module run under ``recurse=False``, while units below gather for themselves.
    """
    model, reference = wrapped(rank, use_orig_params=orig)
    if ran:
        check_steps(rank, model, reference)
    before = [id(p) for p in model.parameters()]
    for summoned in (model, model.module.parts[1]):
        with FSDP.summon_full_params(summoned), pytest.raises(PhaseError, match="inside summon_full_params"):
            model(torch.ones(1, DIM))
        assert [id(p) for p in model.parameters()] == before
    x = torch.randn(2, DIM)
    with torch.no_grad(), FSDP.summon_full_params(model, writeback=False, recurse=False):
        for _ in range(3):
            torch.testing.assert_close(model.run(x), reference.run(x))
    check_steps(rank, model, reference)


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
@pytest.mark.parametrize(("strategy", "orig"), [(FULL, False), (GRAD_OP, True), (NO_SHARD, False), (FULL, True)])
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


@on_ranks(2)
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
