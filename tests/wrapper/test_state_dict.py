"""``state_dict()`` of wrappers: that of the module before wrapping; with ``rank0_only`` on the first rank alone."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
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
    on_cpu,
    other_net,
    plain_strategies,
    raised_everywhere,
    wrapped,
)

from compare import assert_equal
from fullshard import (
    CPUOffload,
    FullshardError,
    FullStateDictConfig,
    MixedPrecision,
    PhaseError,
    ShardingStrategy,
    StateDictType,
)
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.activation_checkpoint import CheckpointImpl, apply_activation_checkpointing, checkpoint_wrapper
from fullshard.comm import record
from fullshard.engine.ownership import nested_units
from fullshard.memory import Buffer
from fullshard.wrap import ModuleWrapPolicy
from ranks import Rank, on_ranks

RANK0 = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
strategies_and_forms = pytest.mark.parametrize(
    ("strategy", "orig"), [(FULL, False), (FULL, True), (GRAD_OP, False), (GRAD_OP, True), (NO_SHARD, True)]
)


def first_rank_state(model: nn.Module, config: FullStateDictConfig = RANK0, **arguments: Any) -> Any:
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        return model.state_dict(**arguments)


def gradients_of(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


# ---------------------------------------------------------------- values and names


@on_ranks(1, 2)
@strategies_and_forms
def test_as_before_wrapping(rank: Rank, strategy: ShardingStrategy, orig: bool) -> None:
    """Keys, order, values and dtypes are the unsharded model's, on all ranks or the first; and of wrappers inside."""
    model, reference = wrapped(rank, strategy, use_orig_params=orig)
    with record() as seen:
        state = model.state_dict()
    assert_dicts_equal(state, reference.state_dict())
    assert sum(c.kind == "all_gather" for c in seen) == (0 if strategy is NO_SHARD or rank.world_size == 1 else 3)
    assert {c.kind for c in seen} <= {"all_gather"}
    assert_dicts_equal(first_rank_state(model), on_cpu(reference.state_dict()) if rank.rank == 0 else {})
    assert_freed(model)
    assert_dicts_equal(model.module.parts[1].state_dict(), reference.parts[1].state_dict())
    assert isinstance(state, OrderedDict)
    assert all(type(value) is torch.Tensor and not value.requires_grad for value in state.values())
    assert list(state._metadata) == list(reference.state_dict()._metadata)  # type: ignore[attr-defined]
    check_steps(rank, model, reference)
    state = first_rank_state(model)
    assert len(state) == (len(reference.state_dict()) if rank.rank == 0 else 0)
    assert_same_outputs(rank, model, reference)


@on_ranks(4)
@pytest.mark.parametrize("strategy", HYBRID, ids=lambda s: s.name)
def test_hybrid(rank: Rank, strategy: ShardingStrategy) -> None:
    """The same with replicas, out and in; with ``rank0_only`` one rank of all has it, not one of each replica."""
    model, reference = wrapped(rank, strategy)
    assert_dicts_equal(model.state_dict(), reference.state_dict())
    assert_dicts_equal(first_rank_state(model), on_cpu(reference.state_dict()) if rank.rank == 0 else {})
    model.load_state_dict(other_net().state_dict())
    assert_dicts_equal(model.state_dict(), other_net().state_dict())


@on_ranks(2)
@both_forms
def test_arguments(rank: Rank, orig: bool) -> None:
    """``prefix``, ``destination`` and ``keep_vars``, whose values are parameters; the model goes on."""
    model, reference = wrapped(rank, use_orig_params=orig)
    for prefix in ("model.", "a.b.", "_x"):
        assert_dicts_equal(model.state_dict(prefix=prefix), reference.state_dict(prefix=prefix))
    mine: Any = OrderedDict(before=torch.zeros(1))
    theirs: Any = OrderedDict(before=torch.zeros(1))
    for state in (mine, theirs):
        state._metadata = OrderedDict()
    assert model.state_dict(destination=mine, prefix="p.") is mine
    reference.state_dict(destination=theirs, prefix="p.")
    assert_dicts_equal(mine, theirs)
    assert list(mine._metadata) == list(theirs._metadata)
    mine, theirs = model.state_dict(keep_vars=True), reference.state_dict(keep_vars=True)
    assert_dicts_equal(mine, theirs)
    for name, value in theirs.items():
        assert mine[name].requires_grad == value.requires_grad, name
        assert isinstance(mine[name], nn.Parameter) == isinstance(value, nn.Parameter), name
    destination: Any = {"kept": torch.ones(1)}
    assert first_rank_state(model, destination=destination) is destination
    assert "kept" in destination and len(destination) == (1 + len(theirs) if rank.rank == 0 else 1)
    check_steps(rank, model, reference)
    assert_same_outputs(rank, model, reference)


@on_ranks(2)
@both_forms
def test_below_a_plain_root(rank: Rank, orig: bool) -> None:
    """Wrappers deep inside of plain modules: names as before, in order, both ways."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Sequential(Net(), nn.Linear(3, 3)), "b": Net()})
    reference = copy.deepcopy(model)
    model["a"][0] = FSDP(model["a"][0], use_orig_params=orig, auto_wrap_policy=ModuleWrapPolicy({Part}))
    model["b"].parts[1] = FSDP(model["b"].parts[1], use_orig_params=orig)
    assert_dicts_equal(model.state_dict(), reference.state_dict())
    torch.manual_seed(9)
    other = nn.ModuleDict({"a": nn.Sequential(other_net(1), nn.Linear(3, 3)), "b": other_net(2)})
    result = model.load_state_dict(other.state_dict())
    assert result.missing_keys == result.unexpected_keys == []
    assert_dicts_equal(model.state_dict(), other.state_dict())


@on_ranks(2)
@pytest.mark.parametrize("where", ["inside", "outside", "policy", "reentrant"])
def test_with_checkpoint_wrappers(rank: Rank, where: str) -> None:
    """Checkpoint wrappers, in either order, leave no trace in names, and states go both ways."""
    torch.manual_seed(0)
    model: Any = Net()
    reference = copy.deepcopy(model)
    if where == "inside":
        model.parts[0] = FSDP(checkpoint_wrapper(model.parts[0]))
    elif where == "outside":
        model.parts[0] = checkpoint_wrapper(FSDP(model.parts[0]))
    elif where == "reentrant":
        model.parts[0] = FSDP(checkpoint_wrapper(model.parts[0], CheckpointImpl.REENTRANT))
    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Part}) if where == "policy" else None)
    if where == "policy":
        apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Part))
    assert_dicts_equal(model.state_dict(), reference.state_dict())
    other = other_net()
    model.load_state_dict(other.state_dict())
    assert_dicts_equal(model.state_dict(), other.state_dict())
    check_steps(rank, model, other)
    assert_same_outputs(rank, model, other)


@on_ranks(2)
@strategies_and_forms
def test_values_are_copies(rank: Rank, strategy: ShardingStrategy, orig: bool) -> None:
    """Training does not change what was saved, and writing to it does not change the model; buffers too."""
    model, reference = wrapped(rank, strategy, use_orig_params=orig)
    state = model.state_dict()
    before = copy.deepcopy(state)
    model.load_state_dict(other_net().state_dict())
    assert_dicts_equal(state, before)
    model.load_state_dict(state)
    assert_dicts_equal(model.state_dict(), reference.state_dict())
    check_steps(rank, model, reference)
    for name in ("first.weight", "parts.0.scale", "parts.1.down.weight"):
        assert_equal(state[name], before[name], name)
    for name, value in state.items():
        if name.endswith(("weight", "bias", "scale")):
            value.fill_(100.0)
    assert_same_outputs(rank, model, reference)
    stores = [value.untyped_storage() for name, value in state.items() if name.endswith("weight")]
    assert len({s.data_ptr() for s in stores}) == len(stores)
    assert all(s.nbytes() < 4 * 9 * DIM + 64 for s in stores)  # not a slice of something larger


@on_ranks(2)
@both_forms
def test_tied(rank: Rank, orig: bool) -> None:
    """Tied parameters and shared modules are there under all names; tied ones, also over units, in one memory.

    On the first rank alone, with a prefix and checkpoint wrappers, no name is left over.
    """
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    model[1][1].weight = model[1][0].weight
    model[2].weight = model[0].weight
    model.append(model[1])
    reference = copy.deepcopy(model)
    model[0] = checkpoint_wrapper(model[0])
    outer = FSDP(model, use_orig_params=orig, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}))
    state = outer.state_dict()
    assert_dicts_equal(state, reference.state_dict())
    for one, other in (("0.weight", "2.weight"), ("1.0.weight", "1.1.weight"), ("3.0.weight", "3.1.weight")):
        assert state[one].data_ptr() == state[other].data_ptr()
    assert state["0.weight"].data_ptr() != state["1.0.weight"].data_ptr()
    first = first_rank_state(outer, prefix="a.b.")
    assert_dicts_equal(first, on_cpu(reference.state_dict(prefix="a.b.")) if rank.rank == 0 else {})
    new = {name: torch.full_like(value, float(value.dim())) for name, value in state.items()}
    outer.load_state_dict(new)
    assert_dicts_equal(outer.state_dict(), new)
    assert model[2].weight is model[0].weight


@on_ranks(2)
@both_forms
def test_ignored_and_outside(rank: Rank, orig: bool) -> None:
    """Ignored modules are saved as they are, in the parameters' own memory, and loaded in place.

    With ``rank0_only`` all ranks get the states of plain modules around and of ignored ones inside.
    """
    torch.manual_seed(0)
    model: Any = nn.ModuleDict({"plain": nn.BatchNorm1d(3), "net": Net()})
    reference = copy.deepcopy(model)
    ignored = model["net"].parts[0]
    model["net"] = FSDP(model["net"], use_orig_params=orig, ignored_modules=[ignored])
    expected = reference.state_dict()
    assert_dicts_equal(model.state_dict(), expected)
    others = {n: v for n, v in expected.items() if n.startswith(("plain.", "net.parts.0."))}
    first = first_rank_state(model)
    assert_dicts_equal(first, {**on_cpu(expected), **others} if rank.rank == 0 else others)
    for state in (first, model.state_dict()):
        for name, parameter in ignored.named_parameters():
            assert state[f"net.parts.0.{name}"].data_ptr() == parameter.data_ptr()
    assert first["net.parts.0.offset"].data_ptr() == ignored.offset.data_ptr()
    weight = ignored.up.weight
    model["net"].load_state_dict(other_net().state_dict())
    assert ignored.up.weight is weight
    assert_dicts_equal(model["net"].state_dict(), other_net().state_dict())


class Extra(nn.Linear):
    """A layer of the second version, with extra state."""

    _version = 2
    seen: list[Any]

    def get_extra_state(self) -> Any:
        return {"number": 3}

    def set_extra_state(self, state: Any) -> None:
        self.seen = [state]

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *args: Any) -> None:
        self.version = metadata.get("version")
        super()._load_from_state_dict(state, prefix, metadata, *args)


@on_ranks(2)
@pytest.mark.parametrize("nested", [False, True])
def test_extra_state_and_versions(rank: Rank, nested: bool) -> None:
    """Extra state and the versions of modules get to the modules; extra state belongs to no rank, so all have it."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(Extra(2, 2), Extra(2, 2))
    reference = copy.deepcopy(model)
    outer = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Extra}) if nested else None)
    state = outer.state_dict()
    assert list(state) == list(reference.state_dict())
    outer.load_state_dict(state)
    reference.load_state_dict(state)
    for mine, theirs in zip((m for m in outer.modules() if isinstance(m, Extra)), reference, strict=True):
        assert mine.seen == theirs.seen == [{"number": 3}]
        assert mine.version == theirs.version == 2
    first = first_rank_state(outer, keep_vars=True)
    names = list(state) if rank.rank == 0 else [name for name in state if name.endswith("_extra_state")]
    assert list(first) == names
    assert all(isinstance(first[name], nn.Parameter) for name in names if not name.endswith("_extra_state"))


@on_ranks(2)
def test_hooks_of_users(rank: Rank) -> None:
    """State dict hooks of the user's modules see what they would have seen."""
    model, reference = wrapped(rank)
    calls: dict[str, list[Any]] = {"wrapped": [], "plain": []}
    for name, part in (("wrapped", model.module.parts[0].module), ("plain", reference.parts[0])):
        calls[name] = []

        def post(module: nn.Module, state: Any, prefix: str, _: Any, log: list[Any] = calls[name]) -> None:
            log.append({key: value.clone() for key, value in state.items() if key.endswith("up.weight")})
            state[f"{prefix}added"] = torch.ones(1)

        part.register_state_dict_post_hook(post)
    mine, theirs = model.state_dict(), reference.state_dict()
    assert_dicts_equal(mine, theirs)
    (seen,), (expected,) = calls["wrapped"], calls["plain"]
    assert_equal(next(iter(seen.values())), next(iter(expected.values())), "value in the hook")


@on_ranks(2)
def test_modules_attached_later(rank: Rank) -> None:
    """What is added to a wrapped module after wrapping is saved and loaded beside it, on all ranks."""
    model, reference = wrapped(rank)
    for net in (model.module, reference):
        torch.manual_seed(7)
        net.head = nn.Linear(2, 2)
        net.register_buffer("late", torch.ones(2))
    assert_dicts_equal(model.state_dict(), reference.state_dict())
    state = first_rank_state(model)
    assert {"head.weight", "head.bias"} <= state.keys()
    new = {name: torch.full_like(value, 3) for name, value in reference.state_dict().items()}
    model.load_state_dict(new)
    assert_dicts_equal(model.state_dict(), new)


# ---------------------------------------------------------------- buffers, precision, offload


@on_ranks(2)
@both_forms
def test_buffers_and_mixed_precision(rank: Rank, orig: bool) -> None:
    """Saved in the original dtypes before, between and after steps; computed with in the others."""
    precision = MixedPrecision(torch.bfloat16, torch.float32, buffer_dtype=torch.bfloat16)
    model, reference = wrapped(rank, use_orig_params=orig, mixed_precision=precision)
    inner = model.module.parts[0].module
    assert_dicts_equal(model.state_dict(), reference.state_dict())
    model(torch.ones(2, DIM)).sum().backward()
    assert inner.offset.dtype is torch.bfloat16 and inner.calls.dtype is torch.int64
    before = gradients_of(model)
    state, first = model.state_dict(), first_rank_state(model)
    assert_equal(gradients_of(model), before, "gradients")
    assert {n: v.dtype for n, v in first.items()} == ({n: v.dtype for n, v in state.items()} if rank.rank == 0 else {})
    assert {name: value.dtype for name, value in state.items()} == {
        name: value.dtype for name, value in reference.state_dict().items()
    }
    assert inner.offset.dtype is torch.bfloat16
    assert_equal(state["parts.0.offset"], reference.parts[0].offset.bfloat16().float(), "buffer")
    assert_equal(state["first.weight"], reference.first.weight.detach(), "full precision")
    other = other_net()
    model.load_state_dict(other.state_dict())
    assert_equal(inner.offset, other.parts[0].offset.bfloat16(), "loaded into a buffer that had been cast")
    assert inner.offset.dtype is torch.bfloat16
    assert_equal(model.state_dict()["first.weight"], other.first.weight.detach(), "loaded")


@on_ranks(2)
@plain_strategies
def test_half_precision_and_offloading(rank: Rank, strategy: ShardingStrategy) -> None:
    """A model in half precision keeps it; with offloaded parameters, out and in is the same."""
    torch.manual_seed(0)
    half = Net().half()
    reference: Any = copy.deepcopy(half)
    outer = FSDP(half, sharding_strategy=strategy)
    assert_dicts_equal(outer.state_dict(), reference.state_dict())
    new = other_net().half().state_dict()
    outer.load_state_dict(new)
    assert_dicts_equal(outer.state_dict(), new)
    model, reference = wrapped(rank, strategy, cpu_offload=CPUOffload(offload_params=True))
    check_steps(rank, model, reference)
    saved = copy.deepcopy(model.state_dict())
    assert list(saved) == list(reference.state_dict())
    model.load_state_dict(other_net().state_dict())
    assert_dicts_equal(model.state_dict(), other_net().state_dict())
    model.load_state_dict(saved)
    assert_same_outputs(rank, model, reference)


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
@pytest.mark.parametrize(("kind", "orig"), [("rank0_only", False), ("sharded", True), ("all", True)])
def test_memory(rank: Rank, kind: str, orig: bool) -> None:
    """Full copies are alive one unit at a time, except as the result."""
    model, _ = wrapped(rank, use_orig_params=orig)
    sizes = [sum(bucket.unsharded_bytes for bucket in unit.buckets) for unit in nested_units(model)]
    with live_buffers() as peaks:
        if kind == "sharded":
            with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
                state = model.state_dict()
        else:
            state = first_rank_state(model, RANK0 if kind == "rank0_only" else FullStateDictConfig())
    on_host = rank.device.type == "cpu"  # where rank 0's are taken off accelerators one by one
    result = kind == "all" or (kind == "rank0_only" and rank.rank == 0 and on_host)
    assert len(peaks) == len(sizes)
    assert max(peaks) == (sum(sizes) if result else max(sizes))
    del state


@on_ranks(2)
@pytest.mark.parametrize(("orig", "strict"), [(False, True), (True, False)])
def test_loading_what_only_rank_0_has(rank: Rank, orig: bool, strict: bool) -> None:
    """It is an error on all ranks, which says what to do; the model is as it was, and can be loaded afterwards."""
    model, reference = wrapped(rank, use_orig_params=orig)
    state = first_rank_state(model)
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


# ---------------------------------------------------------------- moments


@on_ranks(2)
@strategies_and_forms
def test_at_any_moment_between_steps(rank: Rank, strategy: ShardingStrategy, orig: bool) -> None:
    """After a forward, after a backward, without sync and under no_grad: right values, and gradients stay."""
    model, reference = wrapped(rank, strategy, use_orig_params=orig)
    x = torch.ones(2, DIM)
    model(x)  # its backward never comes
    assert_dicts_equal(model.state_dict(), reference.state_dict())
    loss = model(x).sum()
    assert_dicts_equal(model.state_dict(), reference.state_dict())
    loss.backward()
    before = gradients_of(model)
    assert_dicts_equal(model.state_dict(), reference.state_dict())
    assert_equal(gradients_of(model), before, "gradients")
    with model.no_sync():
        model(x).sum().backward()
        assert_dicts_equal(model.state_dict(), reference.state_dict())
        with torch.no_grad():
            model(x)
    with torch.inference_mode():
        assert_dicts_equal(model.state_dict(), reference.state_dict())
    model.zero_grad()
    check_steps(rank, model, reference)
    assert_same_outputs(rank, model, reference)


@on_ranks(2)
def test_of_a_part_before_the_first_forward(rank: Rank) -> None:
    """Asking an inner wrapper first does not make it a root: training goes on as without."""
    model, reference = wrapped(rank)
    assert_dicts_equal(model.module.parts[0].state_dict(), reference.parts[0].state_dict())
    model.module.parts[1].load_state_dict(reference.parts[1].state_dict())
    check_steps(rank, model, reference)
    assert model.check_is_root()
    assert_same_outputs(rank, model, reference)


@on_ranks(2)
@both_forms
def test_in_forward_and_inside_summon(rank: Rank, orig: bool) -> None:
    """In a forward and inside of ``summon_full_params`` it is refused by name, and what was going on goes on."""
    model, reference = wrapped(rank, use_orig_params=orig)
    errors = []

    def ask(*_: Any) -> None:
        with pytest.raises(PhaseError, match="middle of a step") as caught:
            model.state_dict()
        errors.append(caught.value)

    handle = model.module.last.register_forward_pre_hook(ask)
    assert_same_outputs(rank, model, reference)
    handle.remove()
    assert len(errors) == 1
    with FSDP.summon_full_params(model), pytest.raises(PhaseError, match="summon_full_params"):
        model.state_dict()
    assert_dicts_equal(model.state_dict(), reference.state_dict())
