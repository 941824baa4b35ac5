"""``SHARDED_STATE_DICT``: DTensors as of ``fully_shard``, out and in, and what DTensors of others are loaded.

``LOCAL_STATE_DICT``: the flat parameters' live memory under their own keys.
"""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from wrapped import (
    BLOCKS,
    DIM,
    FULL,
    GRAD_OP,
    HYBRID,
    NO_SHARD,
    assert_dicts_equal,
    assert_freed,
    assert_same_outputs,
    assert_states_equal,
    both_forms,
    built,
    check_steps,
    concatenated,
    other_net,
    placed,
    raised_everywhere,
    train,
    wrapped,
)

from compare import assert_equal
from fullshard import (
    CPUOffload,
    FullshardError,
    MixedPrecision,
    PhaseError,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.activation_checkpoint import checkpoint_wrapper
from fullshard.comm import record
from fullshard.wrap import ModuleWrapPolicy
from models import Odd
from ranks import Rank, RankPool, on_ranks

SHARDED, LOCAL = StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT


def sharded(model: nn.Module, config: ShardedStateDictConfig | None = None, **arguments: Any) -> Any:
    with FSDP.state_dict_type(model, SHARDED, config):
        return model.state_dict(**arguments)


def load(model: nn.Module, state: Any, kind: StateDictType = SHARDED, **arguments: Any) -> Any:
    with FSDP.state_dict_type(model, kind):
        return model.load_state_dict(state, **arguments)


def by_rows(rank: Rank, net: nn.Module, strategy: ShardingStrategy = FULL) -> nn.Module:
    """The other front end on the same ranks, with the same units."""
    mesh = placed(rank, strategy).get("device_mesh", rank.mesh)
    for part in net.blocks:  # type: ignore[union-attr]
        fully_shard(part, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def assert_same_dtensors(actual: Any, expected: Any) -> None:
    """Require the same keys in order, and bitwise equal local tensors with equal meshes, placements and strides."""
    assert list(actual) == list(expected)
    for name, value in expected.items():
        mine = actual[name]
        assert type(mine) is type(value), (name, type(mine))
        if isinstance(value, DTensor):
            assert mine.placements == value.placements and mine.device_mesh == value.device_mesh, name
            assert mine.shape == value.shape and mine.stride() == value.stride(), name
            assert mine._local_tensor.stride() == value._local_tensor.stride(), name
            mine, value = mine._local_tensor, value._local_tensor
        assert_equal(mine.detach(), value.detach(), name)


# ---------------------------------------------------------------- out


@on_ranks(4)
@pytest.mark.parametrize(("strategy", "orig"), [(FULL, False), (GRAD_OP, True), (HYBRID[0], False), (HYBRID[1], True)])
def test_between_front_ends(rank: Rank, strategy: ShardingStrategy, orig: bool) -> None:
    """Keys, meshes, placements, local shapes and values are those of ``fully_shard``, one all-gather per unit.

    What one front end saves the other loads, in both modes of the wrapper, whatever type is set; the optimizer's
    parameters stay the model's.
    """
    model, reference = wrapped(rank, strategy, use_orig_params=orig)
    with record() as seen:
        state = sharded(model)
    gathers = sum(c.kind == "all_gather" for c in seen)
    assert gathers == (3 if model.world_size > 1 else 0) and {c.kind for c in seen} <= {"all_gather"}
    assert_freed(model)
    assert_same_dtensors(state, by_rows(rank, copy.deepcopy(reference), strategy).state_dict())
    assert not any(value.requires_grad for value in state.values())
    assert list(state._metadata) == list(reference.state_dict()._metadata)
    check_steps(rank, model, reference)
    state, rows = sharded(model), by_rows(rank, other_net(), strategy)
    rows.load_state_dict(state)
    assert_same_dtensors(rows.state_dict(), state)
    source = by_rows(rank, other_net(), strategy).state_dict()
    for kind in (SHARDED, StateDictType.FULL_STATE_DICT):
        again, _ = wrapped(rank, strategy, seed=3, use_orig_params=not orig)
        ids = [id(p) for p in again.parameters()]
        result = load(again, source, kind, assign=kind is SHARDED)
        assert result.missing_keys == result.unexpected_keys == []
        assert [id(p) for p in again.parameters()] == ids
        assert_freed(again)
        assert_states_equal(again, other_net())
        check_steps(rank, again, other_net())


@on_ranks(4)
@both_forms
def test_odd_shapes(rank: Rank, orig: bool) -> None:
    """Scalars, rows fewer than ranks, no rows, other strides, other dtypes, frozen ones."""
    plain = Odd()
    for parameter in plain.parameters():  # conjugated and expanded ones are what they show, once they are saved
        parameter.data = parameter.data.resolve_conj().clone()
    state = sharded(FSDP(copy.deepcopy(plain), use_orig_params=orig))
    assert_same_dtensors(state, fully_shard(copy.deepcopy(plain), mesh=rank.mesh).state_dict())
    again = FSDP(Odd(), use_orig_params=not orig)
    load(again, state)
    assert_states_equal(again, plain)


@on_ranks(2)
@both_forms
def test_values_are_copies(rank: Rank, orig: bool) -> None:
    """Training does not change what was saved, nor the other way round; rows have memory of their own size.

    ``torch.save`` and ``torch.load`` carry them.
    """
    model, reference = wrapped(rank, use_orig_params=orig)
    state = sharded(model, ShardedStateDictConfig(_use_dtensor=orig))
    before = copy.deepcopy(whole(state))
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    again, _ = wrapped(rank, seed=4)
    load(again, torch.load(file, weights_only=False))
    assert_states_equal(again, reference)
    check_steps(rank, model, reference)
    assert_dicts_equal(whole(state), before)
    for name, value in state.items():
        if isinstance(value, DTensor):
            local = value._local_tensor
            assert local.untyped_storage().nbytes() == local.numel() * local.element_size(), name
            local.fill_(100.0)
    assert_same_outputs(rank, model, reference)


@on_ranks(2)
@both_forms
def test_names(rank: Rank, orig: bool) -> None:
    """Prefixes, ties over units, modules at two places, ignored and checkpointed ones, plain roots, ``keep_vars``."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    model.append(model[1])
    model.append(nn.Linear(2, 2))
    reference = nn.Sequential(copy.deepcopy(model))
    model[0] = checkpoint_wrapper(model[0])
    ignored = model[4]
    arguments: Any = {"auto_wrap_policy": ModuleWrapPolicy({nn.Sequential}), "ignored_modules": [ignored]}
    root = nn.Sequential(FSDP(model, use_orig_params=orig, **arguments))
    state = sharded(root, prefix="a.")
    assert_dicts_equal(whole(state), reference.state_dict(prefix="a."))
    assert state["a.0.0.weight"]._local_tensor.data_ptr() == state["a.0.2.weight"]._local_tensor.data_ptr()
    assert state["a.0.4.weight"].data_ptr() == ignored.weight.data_ptr()
    kept = sharded(root, keep_vars=True)
    assert all(isinstance(kept[n], nn.Parameter) for n, _ in reference.named_parameters(remove_duplicate=False))
    new = {name.removeprefix("a."): value for name, value in state.items()}
    for value in new.values():
        (value._local_tensor if isinstance(value, DTensor) else value.data).fill_(3)
    result = load(root, new)
    assert result.missing_keys == result.unexpected_keys == []
    assert all(bool((value == 3).all()) for value in root.state_dict().values())


@on_ranks(4)
@both_forms
def test_tensor_parallel(rank: Rank, orig: bool) -> None:
    """DTensors of tensor parallelism are joined with the data-parallel axis, as by ``fully_shard``; both ways."""
    mesh = rank.make_mesh(2, 2, names=("dp", "tp"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}

    def made(seed: int) -> nn.Module:
        plain = built(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)), seed=seed)
        return parallelize_module(plain, mesh["tp"], plan)

    model = FSDP(made(0), device_mesh=mesh["dp"], use_orig_params=orig)
    rows = fully_shard(made(0), mesh=mesh["dp"])
    state = sharded(model)
    assert_same_dtensors(state, rows.state_dict())
    full = whole(state)
    for source in (fully_shard(made(1), mesh=mesh["dp"]).state_dict(), sharded(FSDP(made(1), device_mesh=mesh["dp"]))):
        load(model, source)
        assert_dicts_equal(whole(sharded(model)), whole(source))
    load(model, full)  # plain tensors have all that is needed, too
    assert_same_dtensors(sharded(model), rows.state_dict())
    load(model, made(1).state_dict(), StateDictType.FULL_STATE_DICT)
    assert_same_dtensors(sharded(model), fully_shard(made(1), mesh=mesh["dp"]).state_dict())


# ---------------------------------------------------------------- in


@on_ranks(2)
@both_forms
def test_values_of_others(rank: Rank, orig: bool) -> None:
    """DTensors that are replicated, cut elsewhere or on a mesh of more axes, and plain ones between, are loaded."""
    model, _ = wrapped(rank, use_orig_params=orig)
    other = other_net()
    grid = rank.make_mesh(1, 2, names=("a", "b"))
    state: Any = other.state_dict()
    for index, (name, value) in enumerate(other.named_parameters()):
        last = Shard(max(value.dim() - 1, 0)) if value.dim() else Replicate()
        if index % 4 < 3:
            mesh, placements = [(rank.mesh, [Replicate()]), (rank.mesh, [last]), (grid, [Replicate(), last])][index % 4]
            state[name] = distribute_tensor(value.detach(), mesh, placements)
    load(model, state)
    assert_states_equal(model, other)


# ---------------------------------------------------------------- other numbers of ranks


def save_checkpoint(rank: Rank, kind: str, form: StateDictType, path: str) -> None:
    with FSDP.state_dict_type(model := made(rank, kind, other_net()), form):
        dcp.save({"model": model.state_dict()}, checkpoint_id=path)


def load_checkpoint(rank: Rank, kind: str, form: StateDictType, path: str) -> None:
    with FSDP.state_dict_type(model := made(rank, kind, built(seed=1)), form):
        state = model.state_dict()
        dcp.load({"model": state}, checkpoint_id=path)
        model.load_state_dict(state)
    assert_dicts_equal(whole(model.state_dict()), other_net().state_dict())


@pytest.mark.parametrize(
    ("before", "after", "form"),
    [
        ((4, "hybrid"), (2, "rows"), SHARDED),
        ((2, "orig"), (1, "plain"), SHARDED),
        ((1, "plain"), (4, "hybrid"), SHARDED),
        ((4, "flat"), (2, "flat"), LOCAL),  # which have no padding at the end
        ((2, "flat"), (1, "flat"), LOCAL),
    ],
    ids=str,
)
def test_other_worlds(
    ranks: RankPool, before: tuple[int, str], after: tuple[int, str], form: StateDictType, tmp_path: Path
) -> None:
    """torch's checkpoints carry models between numbers of ranks and front ends."""
    ranks(before[0], save_checkpoint, kind=before[1], form=form, path=str(tmp_path))
    ranks(after[0], load_checkpoint, kind=after[1], form=form, path=str(tmp_path))


@on_ranks(2)
def test_precision_offload_and_no_shards(rank: Rank) -> None:
    """Values are in the shards' dtype, buffers in their own, also with offloaded parameters and between steps.

    ``NO_SHARD`` has no shards: values are whole, and can be loaded.
    """
    precision = MixedPrecision(torch.bfloat16, torch.float32, buffer_dtype=torch.bfloat16)
    for more in ({"process_group": rank.group}, {"cpu_offload": CPUOffload(offload_params=True)}):
        model, reference = wrapped(rank, GRAD_OP, mixed_precision=precision, **more)
        model(torch.ones(2, DIM)).sum().backward()
        with torch.inference_mode():
            assert not any(value.is_inference() for value in sharded(model).values())
        state = sharded(model, ShardedStateDictConfig(offload_to_cpu=True))
        assert {n: v.dtype for n, v in state.items()} == {n: v.dtype for n, v in reference.state_dict().items()}
        for name, parameter in reference.named_parameters():
            assert_equal(state[name].full_tensor().to(rank.device), parameter.detach(), name)
        assert any(p.grad is not None for p in model.parameters())
    model, reference = wrapped(rank, NO_SHARD)
    assert_dicts_equal(sharded(model), reference.state_dict())
    load(model, other_net().state_dict())
    assert_dicts_equal(sharded(model), other_net().state_dict())


@on_ranks(2)
def test_what_does_not_fit(rank: Rank) -> None:
    """Missing and unexpected names, wrong shapes and other things: the user's names, nothing skipped in silence.

    Ranks that differ are told so.
    """
    model, reference = wrapped(rank, use_orig_params=True)
    state = sharded(model)
    square = distribute_tensor(torch.ones(2, 2), rank.mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match=r"size mismatch for blocks\.1\.up\.weight"):
        load(model, {**state, "blocks.1.up.weight": square})
    with pytest.raises(RuntimeError, match=r"first\.weight"):
        load(model, {**state, "first.weight": "text"})
    differing = dict(state)
    if rank.rank == 1:
        del differing["first.weight"]
        differing["blocks.0.scale"] = torch.tensor(1.0)
    with pytest.raises(FullshardError, match=r"first\.weight \(a DTensor on rank 0; missing on rank 1\)") as caught:
        load(model, differing, strict=False)
    raised_everywhere(rank, caught.value)
    check_steps(rank, model, reference)
    source, _ = wrapped(rank, seed=8)
    state = sharded(source)
    del state["blocks.1.up.weight"], state["first.bias"], state["steps"]
    state["blocks.0.extra"] = state["first.weight"]
    result = load(model, state, strict=False)
    assert sorted(result.missing_keys) == ["blocks.1.up.weight", "first.bias", "steps"]
    assert result.unexpected_keys == ["blocks.0.extra"]
    loaded = model.state_dict()
    torch.testing.assert_close(loaded["blocks.1.up.weight"], reference.blocks[1].up.weight.detach())
    assert_equal(loaded["first.weight"], source.state_dict()["first.weight"], "what was there is loaded")
    with pytest.raises(RuntimeError, match=r"Missing key.*first\.bias") as caught:
        load(model, state)
    assert "blocks.1.up.weight" in str(caught.value) and "_fsdp_wrapped" not in str(caught.value)


def whole(state: Any) -> Any:
    """The same with full tensors."""
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


def made(rank: Rank, kind: str, net: nn.Module) -> nn.Module:
    """The model in the form of that name; the last is for its flat parameters' own memory."""
    if kind == "rows":
        return by_rows(rank, net)
    if kind == "hybrid":
        return FSDP(net, **placed(rank, HYBRID[0]), auto_wrap_policy=BLOCKS)
    return net if kind == "plain" else FSDP(net, use_orig_params=kind == "orig", auto_wrap_policy=BLOCKS)


# ---------------------------------------------------------------- LOCAL: the flat parameters' live memory

KEYS = ["_flat_param", "blocks.0._flat_param", "blocks.1._flat_param"]
BUFFERS = ["steps", "blocks.0.offset", "blocks.0.calls", "blocks.1.offset", "blocks.1.calls"]


def local(model: nn.Module, **arguments: Any) -> Any:
    with FSDP.state_dict_type(model, LOCAL):
        return model.state_dict(**arguments)


def load_local(model: nn.Module, state: Any, **arguments: Any) -> Any:
    with FSDP.state_dict_type(model, LOCAL):
        return model.load_state_dict(state, **arguments)


@on_ranks(4)
@pytest.mark.parametrize(("strategy", "assign"), [(FULL, False), (GRAD_OP, True), (HYBRID[0], False)])
def test_local_there_and_back(rank: Rank, strategy: ShardingStrategy, assign: bool) -> None:
    """1-D DTensors of all parameters of a unit, without the padding at the end, on live memory; no communication.

    They are loaded through a file into a model of other numbers, between steps; its parameters stay the same objects.
    """
    model, reference = wrapped(rank, strategy)
    with record() as seen:
        state = local(model)
    assert not list(seen)
    assert sorted(state) == sorted(KEYS + BUFFERS)
    assert_equal(state[KEYS[1]].full_tensor(), concatenated(list(reference.blocks[0].parameters()), 1), KEYS[1])
    for key, flat in zip(KEYS, model.parameters(), strict=True):
        value = state[key]
        assert type(value) is DTensor and value.device_mesh == model._options.mesh.device_mesh
        held = value._local_tensor
        assert type(held) is torch.Tensor and not value.requires_grad
        assert not held.numel() or held.data_ptr() == flat.data_ptr(), key
    assert state["steps"].data_ptr() == model.module.steps.data_ptr()
    check_steps(rank, model, reference)
    trained = concatenated(list(reference.blocks[0].parameters()), 1)
    torch.testing.assert_close(state[KEYS[1]].full_tensor(), trained)
    file = io.BytesIO()
    torch.save(local(model), file)
    file.seek(0)
    again, _ = wrapped(rank, strategy, seed=3)
    train(rank, again)
    again(torch.ones(1, DIM))  # some strategies keep full parameters after this
    ids = [id(p) for p in again.parameters()]
    result = load_local(again, torch.load(file, weights_only=False), assign=assign)
    assert result.missing_keys == result.unexpected_keys == []
    assert [id(p) for p in again.parameters()] == ids
    assert_same_outputs(rank, again, model)
    assert_states_equal(again, model)
    again.zero_grad()
    check_steps(rank, again, reference)


@on_ranks(2)
def test_local_names(rank: Rank) -> None:
    """Prefixes, plain roots, frozen parameters in a flat parameter of their own; of one element one rank has something.

    Whole flat parameters, plain or replicated, are cut.
    """
    model = nn.Sequential(FSDP(built()), FSDP(nn.ParameterList([nn.Parameter(torch.tensor([5.0]))])))
    frozen = built()
    frozen.first.requires_grad_(False)
    model.append(FSDP(frozen, auto_wrap_policy=BLOCKS))
    keys = ["0._flat_param", "1._flat_param", *(f"2.{key}" for key in (KEYS[0], "_flat_param_1", *KEYS[1:]))]
    state = local(model, prefix="a.", keep_vars=True)
    assert [key for key in state if "_flat" in key] == [f"a.{key}" for key in keys]
    assert state["a.1._flat_param"]._local_tensor.numel() == (1 if rank.rank == 0 else 0)
    new = {key.removeprefix("a."): value for key, value in state.items()}
    for number, key in enumerate(keys):
        new[key] = torch.full((len(new[key]),), float(number))
    new[keys[0]] = distribute_tensor(new[keys[0]], rank.mesh, [Replicate()])
    load_local(model, new)
    for number, key in enumerate(keys):
        assert bool((local(model)[key]._local_tensor == number).all()), key
    for number, parameter in ((0, "0.first.weight"), (1, "1.0"), (2, "2.first.bias"), (3, "2.last.bias")):
        assert bool((model.state_dict()[parameter] == number).all()), parameter


@on_ranks(2)
def test_local_where_there_are_none(rank: Rank) -> None:
    """With original parameters it is an error that says so; without sharding values are whole, as torch has them."""
    model, reference = wrapped(rank, use_orig_params=True)
    for ask in (local, lambda m: load_local(m, reference.state_dict())):
        with pytest.raises(FullshardError, match=r"LOCAL_STATE_DICT.*use_orig_params=True; use SHARDED_STATE_DICT"):
            ask(model)
    check_steps(rank, model, reference)
    model, reference = wrapped(rank, NO_SHARD)
    assert_dicts_equal(local(model), reference.state_dict())
    load_local(model, other_net().state_dict())
    assert_dicts_equal(model.state_dict(), other_net().state_dict())
    assert_dicts_equal(local(FSDP(nn.ReLU(), use_orig_params=True)), {})


@on_ranks(2)
def test_local_what_does_not_fit(rank: Rank) -> None:
    """Missing flat parameters, whole ones under their own names and other sizes are reported; the model goes on.

    Buffers that compute in another dtype are saved in their own; while full parameters are summoned nothing is.
    """
    model, reference = wrapped(rank, mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16))
    with FSDP.summon_full_params(model), pytest.raises(PhaseError, match="summon_full_params"):
        local(model)
    model(torch.ones(2, DIM)).sum().backward()
    assert local(model)["blocks.0.offset"].dtype is torch.float32
    load_local(model, local(model))
    assert_equal(model.module.blocks[0].module.offset, reference.blocks[0].offset.bfloat16(), "buffer")
    state = local(model)
    del state[KEYS[1]]
    with pytest.raises(RuntimeError, match=r"Missing key.*\"blocks\.0\._flat_param\"") as caught:
        load_local(model, state)
    assert "_fsdp_wrapped" not in str(caught.value)
    result = load_local(model, reference.state_dict(), strict=False)
    assert sorted(result.missing_keys) == sorted(KEYS)
    assert set(result.unexpected_keys) == {n for n, _ in reference.named_parameters()}
    wrong = {**local(model), KEYS[2]: distribute_tensor(torch.ones(1000), rank.mesh, [Shard(0)])}
    with pytest.raises(RuntimeError, match=r"size mismatch for blocks\.1\._flat_param"):
        load_local(model, wrong)
    differing = {**local(model), **({KEYS[0]: torch.ones(3)} if rank.rank else {})}
    with pytest.raises(FullshardError, match=r"_flat_param \(a DTensor on rank 0; a tensor on rank 1\)"):
        load_local(model, differing)
    model(torch.ones(2, DIM)).sum().backward()
