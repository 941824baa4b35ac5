"""``LOCAL_STATE_DICT``: the flat parameters' live memory under their own keys."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
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
    check_steps,
    other_net,
    train,
    wrapped,
)
from wrapper_models import concatenated

from compare import assert_equal
from fullshard import FullshardError, LocalStateDictConfig, MixedPrecision, PhaseError, ShardingStrategy, StateDictType
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.activation_checkpoint import checkpoint_wrapper
from fullshard.comm import record
from fullshard.wrap import ModuleWrapPolicy
from ranks import Rank, RankPool, on_ranks

LOCAL = StateDictType.LOCAL_STATE_DICT
KEYS = ["_flat_param", "parts.0._flat_param", "parts.1._flat_param"]
BUFFERS = ["steps", "parts.0.offset", "parts.0.calls", "parts.1.offset", "parts.1.calls"]


def local(model: nn.Module, **arguments: Any) -> Any:
    with FSDP.state_dict_type(model, LOCAL):
        return model.state_dict(**arguments)


def load(model: nn.Module, state: Any, **arguments: Any) -> Any:
    with FSDP.state_dict_type(model, LOCAL):
        return model.load_state_dict(state, **arguments)


@on_ranks(4)
@pytest.mark.parametrize(("strategy", "assign"), list(zip((FULL, GRAD_OP, *HYBRID), (False, True) * 2, strict=True)))
def test_there_and_back(rank: Rank, strategy: ShardingStrategy, assign: bool) -> None:
    """1-D DTensors of all parameters of a unit, without the padding at the end, on live memory; no communication.

    They are loaded through a file into a model of other numbers, between steps; its parameters stay the same objects.
    """
    model, reference = wrapped(rank, strategy)
    with record() as seen:
        state = local(model)
    assert not list(seen)
    assert sorted(state) == sorted(KEYS + BUFFERS)
    assert_equal(state[KEYS[1]].full_tensor(), concatenated(list(reference.parts[0].parameters()), 1), KEYS[1])
    for key, flat in zip(KEYS, model.parameters(), strict=True):
        value = state[key]
        assert type(value) is DTensor and value.device_mesh == model._options.mesh.device_mesh
        held = value._local_tensor
        assert type(held) is torch.Tensor and not value.requires_grad
        assert not held.numel() or held.data_ptr() == flat.data_ptr(), key
    assert state["steps"].data_ptr() == model.module.steps.data_ptr()
    check_steps(rank, model, reference)
    trained = concatenated(list(reference.parts[0].parameters()), 1)
    torch.testing.assert_close(state[KEYS[1]].full_tensor(), trained)
    file = io.BytesIO()
    torch.save(local(model), file)
    file.seek(0)
    again, _ = wrapped(rank, strategy, seed=3)
    train(rank, again)
    again(torch.ones(1, DIM))  # some strategies keep full parameters after this
    ids = [id(p) for p in again.parameters()]
    result = load(again, torch.load(file, weights_only=False), assign=assign)
    assert result.missing_keys == result.unexpected_keys == []
    assert [id(p) for p in again.parameters()] == ids
    assert_same_outputs(rank, again, model)
    assert_dicts_equal(again.state_dict(), model.state_dict())
    again.zero_grad()
    check_steps(rank, again, reference)


@on_ranks(2)
def test_names(rank: Rank) -> None:
    """Prefixes, plain roots, checkpoint wrappers, frozen parameters in a flat parameter of their own, ``keep_vars``."""
    torch.manual_seed(0)
    model = Net()
    model.first.requires_grad_(False)
    model.parts[0] = checkpoint_wrapper(model.parts[0])
    root = nn.Sequential(FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Part})))
    keys = ["a.0._flat_param", "a.0._flat_param_1", "a.0.parts.0._flat_param", "a.0.parts.1._flat_param"]
    for keep_vars in (False, True):
        state = local(root, prefix="a.", keep_vars=keep_vars)
        assert [key for key in state if "_flat" in key] == keys
        assert len(state) == len(keys) + len(BUFFERS)
    expected = {key: torch.full((len(v),), float(i)) for i, (key, v) in enumerate(state.items()) if key in keys}
    new = {key.removeprefix("a."): expected.get(key, value) for key, value in state.items()}
    load(root, new)
    for index, flat in enumerate(root.parameters()):
        held = local(root, prefix="a.")[keys[index]]._local_tensor
        value = next(iter(expected[keys[index]].tolist()))
        assert bool((held == value).all()) and bool((flat[: len(held)] == value).all())


@on_ranks(4)
def test_one_element(rank: Rank) -> None:
    """Of a single element only one rank has something; whole flat parameters, plain or replicated, are cut."""
    model: Any = FSDP(nn.ParameterList([nn.Parameter(torch.tensor([5.0]))]))
    state = local(model)
    assert state["_flat_param"].shape == (1,)
    assert state["_flat_param"]._local_tensor.numel() == (1 if rank.rank == 0 else 0)
    state = {"_flat_param": distribute_tensor(torch.tensor([7.0]), rank.mesh, [Shard(0)])}
    load(model, state)
    assert_equal(model.state_dict()["0"], torch.tensor([7.0]), "loaded")
    model, source = wrapped(rank)[0], wrapped(rank, seed=5)[0]
    whole: Any = {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in local(source).items()}
    whole[KEYS[0]] = distribute_tensor(whole[KEYS[0]], rank.mesh, [Replicate()])
    load(model, whole)
    assert_dicts_equal(model.state_dict(), source.state_dict())


@on_ranks(2)
def test_offload_and_precision(rank: Rank) -> None:
    """Buffers that compute in another dtype are saved in their own; loading casts them."""
    model, reference = wrapped(rank, mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16))
    model(torch.ones(2, DIM)).sum().backward()
    with FSDP.state_dict_type(model, LOCAL, LocalStateDictConfig(offload_to_cpu=True)):
        state = model.state_dict()
        assert state["parts.0.offset"].dtype is torch.float32
        model.load_state_dict(state)
    assert_equal(model.module.parts[0].module.offset, reference.parts[0].offset.bfloat16(), "buffer")


@on_ranks(2)
def test_where_there_are_none(rank: Rank) -> None:
    """With original parameters it is an error that says so; without sharding values are whole, as torch has them."""
    model, reference = wrapped(rank, use_orig_params=True)
    for ask in (local, lambda m: load(m, reference.state_dict())):
        with pytest.raises(FullshardError, match=r"LOCAL_STATE_DICT.*use_orig_params=True; use SHARDED_STATE_DICT"):
            ask(model)
    check_steps(rank, model, reference)
    model, reference = wrapped(rank, NO_SHARD)
    assert_dicts_equal(local(model), reference.state_dict())
    load(model, other_net().state_dict())
    assert_dicts_equal(model.state_dict(), other_net().state_dict())
    assert_dicts_equal(local(FSDP(nn.ReLU(), use_orig_params=True)), {})


@on_ranks(2)
def test_missing_unexpected_and_wrong(rank: Rank) -> None:
    """Missing flat parameters, whole ones under their own names and other sizes are reported; the model goes on."""
    model, reference = wrapped(rank)
    state = local(model)
    del state[KEYS[1]]
    with pytest.raises(RuntimeError, match=r"Missing key.*\"parts\.0\._flat_param\"") as caught:
        load(model, state)
    assert "_fsdp_wrapped" not in str(caught.value)
    result = load(model, reference.state_dict(), strict=False)
    assert sorted(result.missing_keys) == sorted(KEYS)
    assert set(result.unexpected_keys) == {n for n, _ in reference.named_parameters()}
    wrong = {**local(model), KEYS[2]: distribute_tensor(torch.ones(1000), rank.mesh, [Shard(0)])}
    with pytest.raises(RuntimeError, match=r"size mismatch for parts\.1\._flat_param"):
        load(model, wrong)
    differing = {**local(model), **({KEYS[0]: torch.ones(3)} if rank.rank else {})}
    with pytest.raises(FullshardError, match=r"_flat_param \(a DTensor on rank 0; a tensor on rank 1\)"):
        load(model, differing)
    check_steps(rank, model, reference)


@on_ranks(2)
def test_when_it_may_be_asked(rank: Rank) -> None:
    """Not while full parameters are summoned or a step is going on; after a forward, yes."""
    model, reference = wrapped(rank)
    with FSDP.summon_full_params(model), pytest.raises(PhaseError, match="summon_full_params"):
        local(model)
    with FSDP.state_dict_type(model, LOCAL):
        errors = []

        def ask(*_: Any) -> None:
            with pytest.raises(PhaseError) as caught:
                model.state_dict()
            errors.append(caught.value)

        handle = model.module.last.register_forward_pre_hook(ask)
        model(torch.ones(1, DIM))
        handle.remove()
        assert len(errors) == 1
        assert sorted(model.state_dict()) == sorted(KEYS + BUFFERS)
    assert_freed(model)
    check_steps(rank, model, reference)


def save_checkpoint(rank: Rank, path: str) -> None:
    dcp.save(local(FSDP(other_net(), auto_wrap_policy=ModuleWrapPolicy({Part}))), checkpoint_id=path)


def load_checkpoint(rank: Rank, path: str) -> None:
    model, _ = wrapped(rank)
    state = local(model)
    dcp.load(state, checkpoint_id=path)
    load(model, state)
    assert_dicts_equal(model.state_dict(), other_net().state_dict())


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (2, 1)])
def test_other_worlds(ranks: RankPool, before: int, after: int, tmp_path: Path) -> None:
    """Without padding, other numbers of ranks can load it."""
    ranks(before, save_checkpoint, path=str(tmp_path))
    ranks(after, load_checkpoint, path=str(tmp_path))
