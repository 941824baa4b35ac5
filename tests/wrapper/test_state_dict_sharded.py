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
    LOCAL,
    NO_SHARD,
    SHARDED,
    WHOLE,
    assert_dicts_equal,
    assert_freed,
    assert_same_outputs,
    assert_states_equal,
    both_forms,
    built,
    check_steps,
    concatenated,
    load,
    other_net,
    placed,
    save,
    train,
    whole,
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
from fullshard.comm import record
from models import Odd
from ranks import Rank, RankPool, on_ranks


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
@pytest.mark.parametrize(("strategy", "orig"), [(FULL, False), (HYBRID[0], True)])
def test_between_front_ends(rank: Rank, strategy: ShardingStrategy, orig: bool) -> None:
    """DTensors are those of ``fully_shard``, one all-gather per unit, and each front end loads the other's."""
    model, reference = wrapped(rank, strategy, use_orig_params=orig)
    with record() as seen:
        state = save(model, SHARDED)
    assert [c.kind for c in seen] == ["all_gather"] * 3
    assert_freed(model)
    assert_same_dtensors(state, by_rows(rank, copy.deepcopy(reference), strategy).state_dict())
    assert not any(value.requires_grad for value in state.values())
    assert list(state._metadata) == list(reference.state_dict()._metadata)
    check_steps(rank, model, reference)
    state, rows = save(model, SHARDED), by_rows(rank, other_net(), strategy)
    rows.load_state_dict(state)
    assert_same_dtensors(rows.state_dict(), state)
    source = by_rows(rank, other_net(), strategy).state_dict()
    for kind in (SHARDED, WHOLE):
        again, _ = wrapped(rank, strategy, seed=3, use_orig_params=not orig)
        ids = [id(p) for p in again.parameters()]
        result = load(again, source, kind, assign=kind is SHARDED)
        assert result.missing_keys == result.unexpected_keys == []
        assert [id(p) for p in again.parameters()] == ids
        assert_freed(again)
        assert_states_equal(again, other_net())


@on_ranks(4)
def test_odd_shapes(rank: Rank) -> None:
    """Scalars, rows fewer than ranks, no rows, other strides, other dtypes, frozen ones."""
    plain = Odd()
    for parameter in plain.parameters():  # conjugated and expanded ones are what they show, once they are saved
        parameter.data = parameter.data.resolve_conj().clone()
    state = save(FSDP(copy.deepcopy(plain), use_orig_params=True), SHARDED, ShardedStateDictConfig(_use_dtensor=True))
    assert_same_dtensors(state, fully_shard(copy.deepcopy(plain), mesh=rank.mesh).state_dict())
    again = FSDP(Odd())
    load(again, state, SHARDED)
    assert_states_equal(again, plain)


@on_ranks(4)
def test_tensor_parallel(rank: Rank) -> None:
    """DTensors of tensor parallelism are joined with the data-parallel axis, as by ``fully_shard``; both ways."""
    mesh = rank.make_mesh(2, 2, names=("dp", "tp"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}

    def made(seed: int) -> nn.Module:
        plain = built(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)), seed=seed)
        return parallelize_module(plain, mesh["tp"], plan)

    model = FSDP(made(0), device_mesh=mesh["dp"], use_orig_params=True)
    rows = fully_shard(made(0), mesh=mesh["dp"])
    state = save(model, SHARDED)
    assert_same_dtensors(state, rows.state_dict())
    full = whole(state)
    for source in (
        fully_shard(made(1), mesh=mesh["dp"]).state_dict(),
        save(FSDP(made(1), device_mesh=mesh["dp"]), SHARDED),
    ):
        load(model, source, SHARDED)
        assert_dicts_equal(whole(save(model, SHARDED)), whole(source))
    load(model, full, SHARDED)  # plain tensors have all that is needed, too
    assert_same_dtensors(save(model, SHARDED), rows.state_dict())
    load(model, made(1).state_dict(), WHOLE)
    assert_same_dtensors(save(model, SHARDED), fully_shard(made(1), mesh=mesh["dp"]).state_dict())


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
    load(model, state, SHARDED)
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
    """Values are in the shards' dtype, buffers in their own; with ``NO_SHARD`` they are whole."""
    precision = MixedPrecision(torch.bfloat16, torch.float32, buffer_dtype=torch.bfloat16)
    for more in ({"process_group": rank.group}, {"cpu_offload": CPUOffload(offload_params=True)}):
        model, reference = wrapped(rank, GRAD_OP, mixed_precision=precision, **more)
        model(torch.ones(2, DIM)).sum().backward()
        with torch.inference_mode():
            assert not any(value.is_inference() for value in save(model, SHARDED).values())
        state = save(model, SHARDED, ShardedStateDictConfig(offload_to_cpu=True))
        assert {n: v.dtype for n, v in state.items()} == {n: v.dtype for n, v in reference.state_dict().items()}
        for name, parameter in reference.named_parameters():
            assert_equal(state[name].full_tensor().to(rank.device), parameter.detach(), name)
        assert any(p.grad is not None for p in model.parameters())
    model, reference = wrapped(rank, NO_SHARD)
    assert_dicts_equal(save(model, SHARDED), reference.state_dict())
    load(model, other_net().state_dict(), SHARDED)
    assert_dicts_equal(save(model, SHARDED), other_net().state_dict())


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


@on_ranks(4)
@pytest.mark.parametrize(("strategy", "assign"), [(GRAD_OP, True), (HYBRID[0], False)])
def test_local_there_and_back(rank: Rank, strategy: ShardingStrategy, assign: bool) -> None:
    """1-D DTensors of a unit's parameters on live memory, without padding or communication, go through files."""
    model, reference = wrapped(rank, strategy)
    with record() as seen:
        state = save(model, LOCAL)
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
    torch.save(save(model, LOCAL), file)
    file.seek(0)
    again, _ = wrapped(rank, strategy, seed=3)
    train(rank, again)
    again(torch.ones(1, DIM))  # some strategies keep full parameters after this
    ids = [id(p) for p in again.parameters()]
    result = load(again, torch.load(file, weights_only=False), LOCAL, assign=assign)
    assert result.missing_keys == result.unexpected_keys == []
    assert [id(p) for p in again.parameters()] == ids
    assert_same_outputs(rank, again, model)
    assert_states_equal(again, model)
    again.zero_grad()
    check_steps(rank, again, reference)


@on_ranks(2)
def test_local_names(rank: Rank) -> None:
    """Prefixes, frozen parameters apart, parameters of one element; whole flat parameters are cut."""
    model = nn.Sequential(FSDP(built()), FSDP(nn.ParameterList([nn.Parameter(torch.tensor([5.0]))])))
    frozen = built()
    frozen.first.requires_grad_(False)
    model.append(FSDP(frozen, auto_wrap_policy=BLOCKS))
    keys = ["0._flat_param", "1._flat_param", *(f"2.{key}" for key in (KEYS[0], "_flat_param_1", *KEYS[1:]))]
    state = save(model, LOCAL, prefix="a.", keep_vars=True)
    assert [key for key in state if "_flat" in key] == [f"a.{key}" for key in keys]
    assert state["a.1._flat_param"]._local_tensor.numel() == (1 if rank.rank == 0 else 0)
    new = {key.removeprefix("a."): value for key, value in state.items()}
    for number, key in enumerate(keys):
        new[key] = torch.full((len(new[key]),), float(number))
    new[keys[0]] = distribute_tensor(new[keys[0]], rank.mesh, [Replicate()])
    load(model, new, LOCAL)
    for number, key in enumerate(keys):
        assert bool((save(model, LOCAL)[key]._local_tensor == number).all()), key
    for number, parameter in ((0, "0.first.weight"), (1, "1.0"), (2, "2.first.bias"), (3, "2.last.bias")):
        assert bool((model.state_dict()[parameter] == number).all()), parameter


@on_ranks(2)
def test_local_where_there_are_none(rank: Rank) -> None:
    """With original parameters it is an error that says so; without sharding values are whole, as torch has them."""
    model, reference = wrapped(rank, use_orig_params=True)
    for ask in (lambda m: save(m, LOCAL), lambda m: load(m, reference.state_dict(), LOCAL)):
        with pytest.raises(FullshardError, match=r"LOCAL_STATE_DICT.*use_orig_params=True; use SHARDED_STATE_DICT"):
            ask(model)
    check_steps(rank, model, reference)
    model, reference = wrapped(rank, NO_SHARD)
    assert_dicts_equal(save(model, LOCAL), reference.state_dict())
    load(model, other_net().state_dict(), LOCAL)
    assert_dicts_equal(model.state_dict(), other_net().state_dict())
    assert_dicts_equal(save(FSDP(nn.ReLU(), use_orig_params=True), LOCAL), {})


@on_ranks(2)
def test_local_what_does_not_fit(rank: Rank) -> None:
    """Missing names, other names and sizes are reported; buffers are saved in their own dtype; the model trains on."""
    model, reference = wrapped(rank, mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16))
    with FSDP.summon_full_params(model), pytest.raises(PhaseError, match="summon_full_params"):
        save(model, LOCAL)
    model(torch.ones(2, DIM)).sum().backward()
    assert save(model, LOCAL)["blocks.0.offset"].dtype is torch.float32
    load(model, save(model, LOCAL), LOCAL)
    assert_equal(model.module.blocks[0].module.offset, reference.blocks[0].offset.bfloat16(), "buffer")
    state = save(model, LOCAL)
    del state[KEYS[1]]
    with pytest.raises(RuntimeError, match=r"Missing key.*\"blocks\.0\._flat_param\"") as caught:
        load(model, state, LOCAL)
    assert "_fsdp_wrapped" not in str(caught.value)
    result = load(model, reference.state_dict(), LOCAL, strict=False)
    assert sorted(result.missing_keys) == sorted(KEYS)
    assert set(result.unexpected_keys) == {n for n, _ in reference.named_parameters()}
    wrong = {**save(model, LOCAL), KEYS[2]: distribute_tensor(torch.ones(1000), rank.mesh, [Shard(0)])}
    with pytest.raises(RuntimeError, match=r"size mismatch for blocks\.1\._flat_param"):
        load(model, wrong, LOCAL)
    differing = {**save(model, LOCAL), **({KEYS[0]: torch.ones(3)} if rank.rank else {})}
    with pytest.raises(FullshardError, match=r"_flat_param \(a DTensor on rank 0; a tensor on rank 1\)"):
        load(model, differing, LOCAL)
    model(torch.ones(2, DIM)).sum().backward()
