"""``SHARDED_STATE_DICT``: DTensors as of ``fully_shard``, out and in, and what DTensors of others are loaded."""

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
from torch.nn.parallel import DistributedDataParallel
from wrapped import (
    DIM,
    FULL,
    GRAD_OP,
    HYBRID,
    NO_SHARD,
    Net,
    Part,
    assert_dicts_equal,
    assert_freed,
    assert_same_outputs,
    both_forms,
    check_steps,
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
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.activation_checkpoint import checkpoint_wrapper
from fullshard.comm import record
from fullshard.wrap import ModuleWrapPolicy
from ranks import Rank, RankPool, on_ranks

SHARDED = StateDictType.SHARDED_STATE_DICT


def sharded(model: nn.Module, config: ShardedStateDictConfig | None = None, **arguments: Any) -> Any:
    with FSDP.state_dict_type(model, SHARDED, config):
        return model.state_dict(**arguments)


def load(model: nn.Module, state: Any, kind: StateDictType = SHARDED, **arguments: Any) -> Any:
    with FSDP.state_dict_type(model, kind):
        return model.load_state_dict(state, **arguments)


def by_rows(rank: Rank, net: nn.Module, strategy: ShardingStrategy = FULL) -> nn.Module:
    """The other front end on the same ranks, with the same units."""
    mesh = placed(rank, strategy).get("device_mesh", rank.mesh)
    for part in net.parts:  # type: ignore[union-attr]
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
@pytest.mark.parametrize(
    ("strategy", "orig"), [(FULL, False), (FULL, True), (GRAD_OP, True), (HYBRID[0], False), (HYBRID[1], True)]
)
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
        assert_dicts_equal(again.state_dict(), other_net().state_dict())
        check_steps(rank, again, other_net())


@on_ranks(2)
@both_forms
def test_config(rank: Rank, orig: bool) -> None:
    """Whether a mesh or a group was given makes no difference, nor does ``_use_dtensor``.

    ``NO_SHARD`` has no shards: values are whole, and can be loaded.
    """
    given = {"device_mesh": rank.mesh} if orig else {"process_group": rank.group}
    model, reference = wrapped(rank, use_orig_params=orig, **given)
    for config in (None, ShardedStateDictConfig(_use_dtensor=True), ShardedStateDictConfig(offload_to_cpu=True)):
        state = sharded(model, config)
        for name, parameter in reference.named_parameters():
            assert isinstance(state[name], DTensor), name
            assert_equal(state[name].full_tensor().to(rank.device), parameter.detach(), name)
    model, reference = wrapped(rank, NO_SHARD, use_orig_params=orig)
    assert_dicts_equal(sharded(model), reference.state_dict())
    load(model, other_net().state_dict())
    assert_dicts_equal(sharded(model), other_net().state_dict())


@on_ranks(4)
@both_forms
def test_odd_shapes(rank: Rank, orig: bool) -> None:
    """Scalars, rows fewer than ranks, no rows, other strides, other dtypes, frozen ones."""
    torch.manual_seed(0)

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scalar = nn.Parameter(torch.tensor(2.0))
            self.three = nn.Parameter(torch.randn(3, 2))
            self.none = nn.Parameter(torch.randn(0, 4))
            self.columns = nn.Parameter(torch.randn(5, 6).t())
            self.conv = nn.Parameter(torch.randn(5, 3, 2, 2).to(memory_format=torch.channels_last))
            self.small = nn.Parameter(torch.randn(7).half())
            self.frozen = nn.Parameter(torch.randn(9), requires_grad=False)

        def forward(self) -> torch.Tensor:
            return self.scalar

    plain = Odd()
    state = sharded(FSDP(copy.deepcopy(plain), use_orig_params=orig))
    assert_same_dtensors(state, fully_shard(copy.deepcopy(plain), mesh=rank.mesh).state_dict())
    again = FSDP(Odd(), use_orig_params=not orig)
    load(again, state)
    assert_dicts_equal(again.state_dict(), plain.state_dict())
    assert [v.stride() for v in again.state_dict().values()] == [v.stride() for v in plain.state_dict().values()]


@on_ranks(2)
@both_forms
def test_values_are_copies(rank: Rank, orig: bool) -> None:
    """Training does not change what was saved, nor the other way round; rows have memory of their own size.

    ``torch.save`` and ``torch.load`` carry them.
    """
    model, reference = wrapped(rank, use_orig_params=orig)
    state = sharded(model)
    before = copy.deepcopy({n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in state.items()})
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    again, _ = wrapped(rank, seed=4)
    load(again, torch.load(file, weights_only=False))
    assert_dicts_equal(again.state_dict(), reference.state_dict())
    check_steps(rank, model, reference)
    for name, value in state.items():
        assert_equal(value.full_tensor() if isinstance(value, DTensor) else value, before[name], name)
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
    assert list(state) == list(reference.state_dict(prefix="a."))
    for name, value in reference.state_dict(prefix="a.").items():
        mine = state[name].full_tensor() if isinstance(state[name], DTensor) else state[name]
        assert_equal(mine, value, name)
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


@on_ranks(2)
def test_precision_and_offload(rank: Rank) -> None:
    """Values are in the shards' dtype, buffers in their own, also with offloaded parameters and between steps."""
    precision = MixedPrecision(torch.bfloat16, torch.float32, buffer_dtype=torch.bfloat16)
    for more in ({}, {"cpu_offload": CPUOffload(offload_params=True)}):
        model, reference = wrapped(rank, GRAD_OP, mixed_precision=precision, **more)
        model(torch.ones(2, DIM)).sum().backward()
        with torch.inference_mode():
            assert not any(value.is_inference() for value in sharded(model).values())
        state = sharded(model)
        assert {n: v.dtype for n, v in state.items()} == {n: v.dtype for n, v in reference.state_dict().items()}
        assert_equal(state["last.weight"].full_tensor(), reference.last.weight.detach(), "full precision")
        assert any(p.grad is not None for p in model.parameters())


@on_ranks(4)
@both_forms
def test_tensor_parallel(rank: Rank, orig: bool) -> None:
    """DTensors of tensor parallelism are joined with the data-parallel axis, as by ``fully_shard``; both ways."""
    mesh = rank.make_mesh(2, 2, names=("dp", "tp"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}

    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return parallelize_module(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)), mesh["tp"], plan)

    model = FSDP(made(0), device_mesh=mesh["dp"], use_orig_params=orig)
    rows = fully_shard(made(0), mesh=mesh["dp"])
    state = sharded(model)
    assert_same_dtensors(state, rows.state_dict())
    whole = {name: value.full_tensor() for name, value in state.items()}
    for source in (fully_shard(made(1), mesh=mesh["dp"]).state_dict(), sharded(FSDP(made(1), device_mesh=mesh["dp"]))):
        load(model, source)
        for name, value in sharded(model).items():
            assert_equal(value.full_tensor(), source[name].full_tensor(), name)
    load(model, whole)  # plain tensors have all that is needed, too
    assert_same_dtensors(sharded(model), rows.state_dict())
    load(model, made(1).state_dict(), StateDictType.FULL_STATE_DICT)
    assert_same_dtensors(sharded(model), fully_shard(made(1), mesh=mesh["dp"]).state_dict())


# ---------------------------------------------------------------- in


@on_ranks(2)
@both_forms
def test_values_of_others(rank: Rank, orig: bool) -> None:
    """DTensors that are replicated, cut elsewhere or on a mesh of more axes, 0-D, plain ones between, and those of
    DistributedDataParallel are loaded; and full values of ours by others.
    """
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
    assert_dicts_equal(model.state_dict(), other.state_dict())
    replicated = DistributedDataParallel(other_net(7))
    load(model, replicated.module.state_dict())
    assert_dicts_equal(model.state_dict(), other_net(7).state_dict())
    train(rank, model)
    state = {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in sharded(model).items()}
    for taker in (replicated, Net()):
        getattr(taker, "module", taker).load_state_dict(state)
        assert_same_outputs(rank, model, taker)


@on_ranks(2)
@pytest.mark.parametrize(("orig", "plain_root"), [(False, False), (True, True)])
def test_missing_and_unexpected(rank: Rank, orig: bool, plain_root: bool) -> None:
    """They are reported under the user's names, and an error if strict; nothing is skipped in silence."""
    inner, reference = wrapped(rank, use_orig_params=orig)
    model: nn.Module = nn.Sequential(inner) if plain_root else inner
    prefix = "0." if plain_root else ""
    source, _ = wrapped(rank, seed=8)
    state = sharded(nn.Sequential(source) if plain_root else source)
    del state[f"{prefix}parts.1.up.weight"], state[f"{prefix}first.bias"], state[f"{prefix}steps"]
    state[f"{prefix}parts.0.extra"] = state[f"{prefix}first.weight"]
    result = load(model, state, strict=False)
    assert sorted(result.missing_keys) == [f"{prefix}{n}" for n in ("first.bias", "parts.1.up.weight", "steps")]
    assert result.unexpected_keys == [f"{prefix}parts.0.extra"]
    loaded = inner.state_dict()
    assert_equal(loaded["parts.1.up.weight"], reference.parts[1].up.weight.detach(), "what was missing stays")
    assert_equal(loaded["first.weight"], source.state_dict()["first.weight"], "what was there is loaded")
    with pytest.raises(RuntimeError, match=r"Missing key.*first\.bias") as caught:
        load(model, state)
    assert "parts.1.up.weight" in str(caught.value) and "_fsdp_wrapped" not in str(caught.value)
    load(model, sharded(nn.Sequential(source) if plain_root else source))
    assert_dicts_equal(inner.state_dict(), source.state_dict())


@on_ranks(2)
@both_forms
def test_wrong_values(rank: Rank, orig: bool) -> None:
    """Wrong shapes are torch's error with the user's name, other things too; ranks that differ are told so."""
    model, reference = wrapped(rank, use_orig_params=orig)
    state = sharded(model)
    wrong = {**state, "parts.1.up.weight": distribute_tensor(torch.ones(2, 2), rank.mesh, [Shard(0)])}
    with pytest.raises(RuntimeError, match=r"size mismatch for parts\.1\.up\.weight"):
        load(model, wrong)
    with pytest.raises(RuntimeError, match=r"first\.weight"):
        load(model, {**state, "first.weight": "text"})
    differing = dict(state)
    if rank.rank == 1:
        del differing["first.weight"]
        differing["parts.0.scale"] = torch.tensor(1.0)
    with pytest.raises(FullshardError, match=r"first\.weight \(a DTensor on rank 0; missing on rank 1\)") as caught:
        load(model, differing, strict=False)
    raised_everywhere(rank, caught.value)
    check_steps(rank, model, reference)
    assert_same_outputs(rank, model, reference)


# ---------------------------------------------------------------- other numbers of ranks


def made(rank: Rank, kind: str, net: nn.Module) -> nn.Module:
    if kind == "rows":
        return by_rows(rank, net)
    if kind == "plain":
        return net
    if kind == "hybrid":
        return FSDP(net, **placed(rank, HYBRID[0]), auto_wrap_policy=ModuleWrapPolicy({Part}))
    return FSDP(net, use_orig_params=kind == "orig", auto_wrap_policy=ModuleWrapPolicy({Part}))


def save_checkpoint(rank: Rank, kind: str, path: str) -> None:
    dcp.save({"model": sharded(made(rank, kind, other_net()))}, checkpoint_id=path)


def load_checkpoint(rank: Rank, kind: str, path: str) -> None:
    torch.manual_seed(1)
    model = made(rank, kind, Net())
    state = sharded(model)
    dcp.load({"model": state}, checkpoint_id=path)
    load(model, state)
    whole = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in model.state_dict().items()}
    assert_dicts_equal(whole, other_net().state_dict())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((4, "flat"), (2, "rows")),
        ((4, "hybrid"), (2, "flat")),
        ((2, "orig"), (1, "plain")),
        ((1, "plain"), (4, "hybrid")),
    ],
    ids=str,
)
def test_other_worlds(ranks: RankPool, before: tuple[int, str], after: tuple[int, str], tmp_path: Path) -> None:
    """torch's checkpoints carry models between numbers of ranks and front ends."""
    ranks(before[0], save_checkpoint, kind=before[1], path=str(tmp_path))
    ranks(after[0], load_checkpoint, kind=after[1], path=str(tmp_path))
