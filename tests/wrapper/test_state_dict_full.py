"""``FULL_STATE_DICT`` with its configs: who gets values, and where they are."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from wrapped import (
    HYBRID,
    Net,
    Part,
    assert_dicts_equal,
    assert_freed,
    assert_same_outputs,
    both_forms,
    check_steps,
    on_cpu,
    other_net,
    plain_strategies,
    raised_everywhere,
    wrapped,
)

from fullshard import (
    CPUOffload,
    FullshardError,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.activation_checkpoint import checkpoint_wrapper
from fullshard.engine.ownership import nested_units
from fullshard.memory import Buffer
from fullshard.wrap import ModuleWrapPolicy
from ranks import Rank, on_ranks

FULL = StateDictType.FULL_STATE_DICT
RANK0 = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)


def state_of(model: nn.Module, config: FullStateDictConfig = RANK0, **arguments: Any) -> Any:
    with FSDP.state_dict_type(model, FULL, config):
        return model.state_dict(**arguments)


@on_ranks(1, 2, 4)
@plain_strategies
@both_forms
def test_rank0_only(rank: Rank, strategy: ShardingStrategy, orig: bool) -> None:
    """The first rank gets what all would, the others nothing; and the model goes on."""
    model, reference = wrapped(rank, strategy, use_orig_params=orig)
    state = state_of(model)
    first = rank.rank == 0  # with NO_SHARD: of the replicas
    assert_dicts_equal(state, on_cpu(reference.state_dict()) if first else {})
    assert_freed(model)
    check_steps(rank, model, reference)
    state = state_of(model)
    assert len(state) == (len(reference.state_dict()) if first else 0)
    assert_same_outputs(rank, model, reference)


@on_ranks(4)
@pytest.mark.parametrize("strategy", HYBRID, ids=lambda s: s.name)
def test_rank0_only_with_replicas(rank: Rank, strategy: ShardingStrategy) -> None:
    """One rank of all, not one of each replica."""
    model, reference = wrapped(rank, strategy)
    assert_dicts_equal(state_of(model), on_cpu(reference.state_dict()) if rank.rank == 0 else {})


@on_ranks(2)
@both_forms
def test_what_is_not_a_wrappers_is_everywhere(rank: Rank, orig: bool) -> None:
    """With ``rank0_only`` all ranks get the states of plain modules around and of ignored ones inside."""
    torch.manual_seed(0)
    model: Any = nn.ModuleDict({"plain": nn.BatchNorm1d(3), "net": Net()})
    reference = copy.deepcopy(model)
    ignored = model["net"].parts[0]
    model["net"] = FSDP(model["net"], use_orig_params=orig, ignored_modules=[ignored])
    expected = reference.state_dict()
    others = {n: v for n, v in expected.items() if n.startswith(("plain.", "net.parts.0."))}
    state = state_of(model)
    assert_dicts_equal(state, {**on_cpu(expected), **others} if rank.rank == 0 else others)
    assert state["net.parts.0.scale"].data_ptr() == ignored.scale.data_ptr()
    assert state["net.parts.0.offset"].data_ptr() == ignored.offset.data_ptr()


@on_ranks(2)
@both_forms
def test_prefix_tied_and_shared(rank: Rank, orig: bool) -> None:
    """With a prefix, ties over units, a module at two places and checkpoint wrappers, no name is left over."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    model[1][0].bias = model[0].bias
    model.append(model[1])
    reference = copy.deepcopy(model)
    model[0] = checkpoint_wrapper(model[0])
    outer = FSDP(model, use_orig_params=orig, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}))
    state = state_of(outer, prefix="a.b.")
    assert_dicts_equal(state, on_cpu(reference.state_dict(prefix="a.b.")) if rank.rank == 0 else {})
    destination: Any = {"kept": torch.ones(1)}
    assert state_of(outer, destination=destination) is destination
    assert ("kept" in destination) and len(destination) == (1 + len(reference.state_dict()) if rank.rank == 0 else 1)


@on_ranks(2)
@both_forms
def test_keep_vars_and_extra_state(rank: Rank, orig: bool) -> None:
    """``keep_vars`` gives parameters; extra state belongs to no rank, so all have it."""

    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return 5

        def set_extra_state(self, state: Any) -> None:
            assert state == 5

    model = FSDP(nn.Sequential(Extra(3, 3)), use_orig_params=orig)
    state = state_of(model, keep_vars=True)
    names = ["0.weight", "0.bias"] if rank.rank == 0 else []
    assert list(state) == [*names, "0._extra_state"]
    assert all(isinstance(state[name], nn.Parameter) for name in names)
    model.load_state_dict(model.state_dict())


@contextlib.contextmanager
def live_buffers() -> Iterator[list[int]]:
    """Notes, at each allocation of a full buffer, how many bytes of such buffers are alive."""
    alive: list[Any] = []
    peaks: list[int] = []
    original = Buffer.__init__

    def noted(self: Buffer, *args: Any) -> None:
        original(self, *args)
        alive.append(StorageWeakRef(self._storage))
        alive[:] = [ref for ref in alive if not ref.expired()]
        storages = [torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in alive]
        peaks.append(sum(storage.nbytes() for storage in storages if storage is not None))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Buffer, "__init__", noted)
        yield peaks


@on_ranks(2)
@pytest.mark.parametrize("kind", ["rank0_only", "sharded", "all"])
@both_forms
def test_memory(rank: Rank, kind: str, orig: bool) -> None:
    """Full copies are alive one unit at a time, except as the result."""
    model, _ = wrapped(rank, use_orig_params=orig)
    sizes = [sum(bucket.unsharded_bytes for bucket in unit.buckets) for unit in nested_units(model)]
    with live_buffers() as peaks:
        if kind == "sharded":
            with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
                state = model.state_dict()
        else:
            state = state_of(model, RANK0 if kind == "rank0_only" else FullStateDictConfig())
    on_host = rank.device.type == "cpu"  # where rank 0's are taken off accelerators one by one
    result = kind == "all" or (kind == "rank0_only" and rank.rank == 0 and on_host)
    assert len(peaks) == len(sizes)
    assert max(peaks) == (sum(sizes) if result else max(sizes))
    del state


@on_ranks(2)
@both_forms
def test_buffers_with_mixed_precision(rank: Rank, orig: bool) -> None:
    """Buffers that compute in a low dtype are saved in their own, on the CPU; the live ones stay."""
    precision = MixedPrecision(torch.bfloat16, torch.float32, buffer_dtype=torch.bfloat16)
    model, reference = wrapped(rank, use_orig_params=orig, mixed_precision=precision)
    model(torch.ones(2, 5)).sum().backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    state = state_of(model)
    assert {n: v.dtype for n, v in state.items()} == (
        {n: v.dtype for n, v in reference.state_dict().items()} if rank.rank == 0 else {}
    )
    assert model.module.parts[0].module.offset.dtype is torch.bfloat16
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        assert (gradient is None) == (parameter.grad is None)
        assert gradient is None or torch.equal(gradient, parameter.grad)


@on_ranks(2)
def test_rank_0_to_all(rank: Rank) -> None:
    """Saved by rank 0, loaded by rank 0 before wrapping, sent to all: half precision, with gradients around."""
    torch.manual_seed(0)
    model = FSDP(Net().half(), auto_wrap_policy=ModuleWrapPolicy({Part}), cpu_offload=CPUOffload(offload_params=True))
    model(torch.ones(2, 5).half()).sum().backward()
    expected = model.state_dict()
    state = state_of(model)
    torch.manual_seed(100 + rank.rank)
    plain = Net().half()
    if rank.rank == 0:
        plain.load_state_dict(state)
    again = FSDP(plain, sync_module_states=True, auto_wrap_policy=ModuleWrapPolicy({Part}))
    assert_dicts_equal(again.state_dict(), expected)


@on_ranks(2)
@both_forms
@pytest.mark.parametrize("strict", [False, True])
def test_loading_what_only_rank_0_has(rank: Rank, orig: bool, strict: bool) -> None:
    """It is an error on all ranks, which says what to do; the model is as it was, and can be loaded afterwards."""
    model, reference = wrapped(rank, use_orig_params=orig)
    state = state_of(model)
    for value in state.values():
        value.fill_(9)
    with pytest.raises(
        FullshardError, match=r"\(a tensor on rank 0; missing on rank 1\).*sync_module_states"
    ) as caught:
        model.load_state_dict(state, strict=strict)
    raised_everywhere(rank, caught.value)
    check_steps(rank, model, reference)
    root = nn.Sequential(model)
    with pytest.raises(FullshardError, match=r"0\.first|first\.weight"):
        root.load_state_dict({f"0.{n}": v for n, v in state.items()}, strict=strict)
    saved = model.state_dict()  # whatever the failed load has left behind
    assert_same_outputs(rank, model, reference)
    model.load_state_dict(other_net().state_dict())
    assert_dicts_equal(model.state_dict(), other_net().state_dict())
    assert list(saved) == list(reference.state_dict())


@on_ranks(2)
def test_modules_attached_later(rank: Rank) -> None:
    """What is added to a wrapped module after wrapping is saved and loaded beside it, on all ranks."""
    model, reference = wrapped(rank)
    for net in (model.module, reference):
        torch.manual_seed(7)
        net.head = nn.Linear(2, 2)
        net.register_buffer("late", torch.ones(2))
    assert_dicts_equal(model.state_dict(), reference.state_dict())
    state = state_of(model)
    assert {"head.weight", "head.bias"} <= state.keys()
    new = {name: torch.full_like(value, 3) for name, value in reference.state_dict().items()}
    model.load_state_dict(new)
    assert_dicts_equal(model.state_dict(), new)
