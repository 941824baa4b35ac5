"""``summon_full_params``: full parameters inside of a block, and what becomes of edits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from wrapped import (
    DIM,
    FULL,
    HYBRID,
    assert_same_outputs,
    both_backward,
    both_forms,
    check_steps,
    edit,
    joined,
    plain_strategies,
    raised_everywhere,
    tensors_of,
    wrapped,
)

from compare import assert_equal, assert_models_equal
from fullshard import (
    CPUOffload,
    FullshardError,
    ShardingStrategy,
)
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.comm import record
from ranks import Rank, on_ranks

# ---------------------------------------------------------------- reading


@on_ranks(1, 2)
@plain_strategies
@both_forms
def test_values_names_and_order(rank: Rank, strategy: ShardingStrategy, orig: bool) -> None:
    """Inside, all parameters are there as before wrapping: names, order, shapes, types; outside nothing has changed."""
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


@on_ranks(2)
def test_pieces_are_cut_from_what_summon_shows(rank: Rank) -> None:
    """The pieces of all ranks, put together without the library, are the parameters."""
    model, _ = wrapped(rank, use_orig_params=True)
    with FSDP.summon_full_params(model):
        edit(model)
        full = {name: value.clone() for name, value in tensors_of(model).items()}
    for (name, piece), value in zip(model.named_parameters(), full.values(), strict=True):
        assert_equal(joined(rank, piece), value.flatten(), name)


@on_ranks(2)
@both_forms
def test_recurse(rank: Rank, orig: bool) -> None:
    """Without ``recurse``, only the unit of the module itself is gathered."""
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
        pass
    assert [c.kind for c in seen] == ["all_gather"] * 3


@on_ranks(2)
def test_a_module_above_that_is_no_unit(rank: Rank) -> None:
    """The units in any module are meant; without ``recurse`` a module that is no unit has none."""
    model, reference = wrapped(rank)
    root = nn.Sequential(model, nn.Linear(3, 2))
    with record() as seen, FSDP.summon_full_params(root, recurse=False):
        assert model.module.first.weight.shape != (DIM, DIM)
    assert seen == []
    with FSDP.summon_full_params(root):
        assert_equal(root[0].module.last.weight.detach(), reference.last.weight.detach(), "last")
    with FSDP.summon_full_params(nn.Linear(2, 2)):
        pass


# ---------------------------------------------------------------- writing


@on_ranks(1, 2)
@plain_strategies
@both_forms
@pytest.mark.parametrize("writeback", [True, False])
def test_writeback(rank: Rank, strategy: ShardingStrategy, orig: bool, writeback: bool) -> None:
    """Edits are kept, or not, with every strategy and on any number of ranks."""
    model, reference = wrapped(rank, strategy, use_orig_params=orig)
    with FSDP.summon_full_params(model, writeback=writeback):
        edit(model)
    if writeback:
        edit(reference)
    assert_same_outputs(rank, model, reference)
    check_steps(rank, model, reference)


@on_ranks(4)
@pytest.mark.parametrize("strategy", HYBRID, ids=lambda s: s.name)
@pytest.mark.parametrize("rank0_only", [False, True])
def test_hybrid(rank: Rank, strategy: ShardingStrategy, rank0_only: bool) -> None:
    """Replicas stay replicas: everyone's equal edits are kept, or those of the very first rank."""
    model, reference = wrapped(rank, strategy, use_orig_params=True)
    edit(reference)
    with FSDP.summon_full_params(model, rank0_only=rank0_only):
        edit(model, 2.0 if not rank0_only or rank.rank == 0 else 50.0)
    assert_same_outputs(rank, model, reference)
    check_steps(rank, model, reference)


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


@on_ranks(1, 2)
@both_forms
@pytest.mark.parametrize("how", ["data", "assign", "module"])
def test_replaced_parameters(rank: Rank, orig: bool, how: str) -> None:
    """Other memory, another parameter object or one set through ``_parameters``: what is there at the end is kept."""
    model, reference = wrapped(rank, use_orig_params=orig)
    new = torch.randn(9, DIM, generator=torch.Generator().manual_seed(5))
    reference.parts[1].up.weight.data.copy_(new)
    with FSDP.summon_full_params(model):
        layer = model.module.parts[1].module.up
        if how == "data":
            layer.weight.data = new
        elif how == "assign":
            layer.weight = nn.Parameter(new.clone())
        else:
            layer._parameters["weight"] = nn.Parameter(new.clone())
    assert_same_outputs(rank, model, reference)
    check_steps(rank, model, reference)


@on_ranks(2)
@both_forms
def test_replaced_by_another_shape(rank: Rank, orig: bool) -> None:
    """Another shape is an error on all ranks that names the parameter, and the model goes on as it was."""
    model, reference = wrapped(rank, use_orig_params=orig)
    assert_same_outputs(rank, model, reference)  # from then on, units know their place in the model

    def replace() -> None:
        with FSDP.summon_full_params(model):
            edit(model)
            model.module.parts[1].module.up.weight = nn.Parameter(torch.ones(2, 2))

    with pytest.raises(FullshardError, match=r" parts\.1\.up\.weight .*\(2, 2\)") as caught:
        replace()
    raised_everywhere(rank, caught.value)
    check_steps(rank, model, reference)


@on_ranks(2)
def test_transposed_edits(rank: Rank) -> None:
    """A replacement with other strides counts by its values."""
    model, reference = wrapped(rank, use_orig_params=True)
    new = torch.randn(9, DIM, generator=torch.Generator().manual_seed(5))
    with FSDP.summon_full_params(model):
        model.module.parts[0].module.up.weight = nn.Parameter(new.t().contiguous().t())
    reference.parts[0].up.weight.data.copy_(new)
    check_steps(rank, model, reference)


# ---------------------------------------------------------------- rank0_only, offload_to_cpu


@on_ranks(1, 2)
@both_forms
@pytest.mark.parametrize("strategy", [FULL, ShardingStrategy.SHARD_GRAD_OP], ids=lambda s: s.name)
@pytest.mark.parametrize("offload", [False, True], ids=["stay", "offload"])
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
@pytest.mark.parametrize("guilty", [0, 1])
def test_rank0_only_block_fails_on_one_rank(rank: Rank, guilty: int) -> None:
    """If the block raises on any rank nothing is written anywhere, and the other ranks are told."""
    model, reference = wrapped(rank)
    expected = KeyError if rank.rank == guilty else FullshardError

    def fail() -> None:
        with FSDP.summon_full_params(model, rank0_only=True):
            if rank.rank == 0:
                edit(model)
            if rank.rank == guilty:
                raise KeyError("mine")

    with pytest.raises(expected, match="mine" if rank.rank == guilty else "on another rank"):
        fail()
    check_steps(rank, model, reference)


@on_ranks(2)
def test_rank0_only_another_shape(rank: Rank) -> None:
    """A wrong shape, which only the first rank can see, is an error on all ranks and nothing hangs."""
    model, reference = wrapped(rank)

    def replace() -> None:
        with FSDP.summon_full_params(model, rank0_only=True):
            if rank.rank == 0:
                model.module.parts[1].module.up.weight = nn.Parameter(torch.ones(2, 2))

    with pytest.raises(FullshardError) as caught:
        replace()
    assert rank.rank or "up.weight" in str(caught.value)
    check_steps(rank, model, reference)


@on_ranks(2)
def test_rank0_only_without_sharding(rank: Rank) -> None:
    """Without a shard axis every rank is the first of its own: all have them, and write."""
    model, reference = wrapped(rank, ShardingStrategy.NO_SHARD)
    with FSDP.summon_full_params(model, rank0_only=True):
        edit(model) if rank.rank == 0 else None
    edit(reference)
    assert_same_outputs(rank, model, reference)
    check_steps(rank, model, reference)


@on_ranks(2)
@plain_strategies
@pytest.mark.parametrize("offloaded", [False, True], ids=["device", "CPUOffload"])
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
