"""``state_dict()`` and ``load_state_dict()`` of wrappers, in full: as those of the module before wrapping."""

from __future__ import annotations

import contextlib
import copy
import io
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from wrapped import (
    BLOCKS,
    DIM,
    FULL,
    GRAD_OP,
    HYBRID,
    NO_SHARD,
    Net,
    assert_dicts_equal,
    assert_freed,
    assert_same_outputs,
    assert_states_equal,
    backward,
    both_forms,
    built,
    check_gradients,
    check_steps,
    on_cpu,
    other_net,
    raised_everywhere,
    reference_backward,
    wrapped,
)

from compare import assert_equal
from fullshard import (
    FullshardError,
    FullStateDictConfig,
    MixedPrecision,
    PhaseError,
    ShardingStrategy,
    StateDictType,
)
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.activation_checkpoint import checkpoint_wrapper
from fullshard.comm import record
from fullshard.engine.ownership import nested_units
from fullshard.memory import Buffer
from fullshard.wrap import ModuleWrapPolicy
from ranks import Rank, on_ranks

RANK0 = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
strategies_and_forms = pytest.mark.parametrize(
    ("strategy", "orig"), [(FULL, False), (GRAD_OP, True), (NO_SHARD, True)], ids=lambda v: getattr(v, "name", v)
)


def first_rank_state(model: nn.Module, config: FullStateDictConfig = RANK0, **arguments: Any) -> Any:
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        return model.state_dict(**arguments)


def gradients_of(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_loads(model: nn.Module, other: nn.Module) -> None:
    """Require ``model`` to take all of the state of a plain module, and to have it then."""
    result = model.load_state_dict(other.state_dict())
    assert result.missing_keys == result.unexpected_keys == []
    assert_states_equal(model, other)


# ---------------------------------------------------------------- saving


@on_ranks(2)
@strategies_and_forms
def test_as_before_wrapping(rank: Rank, strategy: ShardingStrategy, orig: bool) -> None:
    """Keys, order, values and dtypes are the unsharded model's, on all ranks or the first; and of wrappers inside.

    Asking an inner wrapper first does not make it a root.
    """
    model, reference = wrapped(rank, strategy, use_orig_params=orig)
    assert_dicts_equal(model.module.blocks[1].state_dict(), reference.blocks[1].state_dict())
    with record() as seen:
        state = model.state_dict()
    assert_dicts_equal(state, reference.state_dict())
    assert [c.kind for c in seen] == ["all_gather"] * (0 if strategy is NO_SHARD else 3)
    assert_dicts_equal(first_rank_state(model), on_cpu(reference.state_dict()) if rank.rank == 0 else {})
    assert_freed(model)
    assert isinstance(state, OrderedDict)
    assert all(type(value) is torch.Tensor and not value.requires_grad for value in state.values())
    assert list(state._metadata) == list(reference.state_dict()._metadata)  # type: ignore[attr-defined]
    check_steps(rank, model, reference)
    assert model.check_is_root()


@on_ranks(4)
@pytest.mark.parametrize("strategy", HYBRID, ids=lambda s: s.name)
def test_hybrid(rank: Rank, strategy: ShardingStrategy) -> None:
    """The same with replicas, out and in; with ``rank0_only`` one rank of all has it, not one of each replica."""
    model, reference = wrapped(rank, strategy)
    assert_states_equal(model, reference)
    assert_dicts_equal(first_rank_state(model), on_cpu(reference.state_dict()) if rank.rank == 0 else {})
    assert_loads(model, other_net())


@on_ranks(2)
@both_forms
def test_arguments(rank: Rank, orig: bool) -> None:
    """``prefix``, ``destination`` and ``keep_vars``, whose values are parameters; the model goes on."""
    model, reference = wrapped(rank, use_orig_params=orig)
    mine: Any = OrderedDict(before=torch.zeros(1))
    theirs: Any = OrderedDict(before=torch.zeros(1))
    for state in (mine, theirs):
        state._metadata = OrderedDict()
    assert model.state_dict(destination=mine, prefix="a.b.") is mine
    reference.state_dict(destination=theirs, prefix="a.b.")
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


@on_ranks(2)
@both_forms
def test_below_a_plain_root(rank: Rank, orig: bool) -> None:
    """Wrappers deep inside of plain modules, in and around checkpoint wrappers: names as before, in order, both ways.

    What is added to a wrapped module later computes, and is saved and loaded beside it, on all ranks.
    """
    model: Any = nn.ModuleDict({"a": nn.Sequential(built(), nn.Linear(3, 3)), "b": built()})
    reference = copy.deepcopy(model)
    model["a"][0] = FSDP(model["a"][0], use_orig_params=orig, auto_wrap_policy=BLOCKS)
    model["b"].blocks[0] = FSDP(checkpoint_wrapper(model["b"].blocks[0]), use_orig_params=orig)
    model["b"].blocks[1] = checkpoint_wrapper(FSDP(model["b"].blocks[1], use_orig_params=orig))
    assert_states_equal(model, reference)
    for net in (model["a"][0].module, reference["a"][0]):
        net.last = nn.Sequential(net.last, built(nn.Linear, 3, 3, seed=7))
        net.register_buffer("late", torch.ones(2))
    assert_states_equal(model, reference)
    assert {"a.0.last.1.weight", "a.0.last.1.bias"} <= first_rank_state(model).keys()
    assert_same_outputs(rank, model["a"][0], reference["a"][0])
    other = copy.deepcopy(reference)
    for parameter in other.parameters():
        parameter.data.fill_(float(parameter.dim()))
    assert_loads(model, other)


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
    assert_states_equal(model, reference)
    check_steps(rank, model, reference)
    assert_dicts_equal(state, before)
    for value in state.values():
        value.fill_(100)
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
    model: Any = nn.ModuleDict({"plain": nn.BatchNorm1d(3), "net": built()})
    reference = copy.deepcopy(model)
    ignored = model["net"].blocks[0]
    model["net"] = FSDP(model["net"], use_orig_params=orig, ignored_modules=[ignored])
    expected = reference.state_dict()
    assert_dicts_equal(model.state_dict(), expected)
    others = {n: v for n, v in expected.items() if n.startswith(("plain.", "net.blocks.0."))}
    first = first_rank_state(model)
    assert_dicts_equal(first, {**on_cpu(expected), **others} if rank.rank == 0 else others)
    for state in (first, model.state_dict()):
        for name, parameter in ignored.named_parameters():
            assert state[f"net.blocks.0.{name}"].data_ptr() == parameter.data_ptr()
    assert first["net.blocks.0.offset"].data_ptr() == ignored.offset.data_ptr()
    weight = ignored.up.weight
    assert_loads(model["net"], other_net())
    assert ignored.up.weight is weight


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
def test_extra_state_versions_and_hooks(rank: Rank) -> None:
    """Extra state and the versions of modules get to the modules; extra state belongs to no rank, so all have it.

    State dict hooks of the user's modules see what they would have seen.
    """
    model: Any = built(lambda: nn.Sequential(Extra(2, 2), Extra(2, 2)))
    reference = copy.deepcopy(model)
    seen: list[Any] = []

    def post(module: nn.Module, state: Any, prefix: str, _: Any) -> None:
        seen.append(state[f"{prefix}weight"].clone())
        state[f"{prefix}added"] = torch.ones(1)

    hooks = [module[0].register_state_dict_post_hook(post) for module in (model, reference)]
    outer = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Extra}))
    state = outer.state_dict()
    assert list(state) == list(reference.state_dict()) and "0.added" in state
    assert_equal(*seen, "value in the hook")
    del state["0.added"]
    for hook in hooks:
        hook.remove()
    outer.load_state_dict(state)
    reference.load_state_dict(state)
    for mine, theirs in zip((m for m in outer.modules() if isinstance(m, Extra)), reference, strict=True):
        assert mine.seen == theirs.seen == [{"number": 3}]
        assert mine.version == theirs.version == 2
    first = first_rank_state(outer, keep_vars=True)
    assert isinstance(first["1._extra_state"], dict)
    assert isinstance(first["1.weight"], nn.Parameter) if rank.rank == 0 else "1.weight" not in first


# ---------------------------------------------------------------- buffers, precision, offload, memory


@on_ranks(2)
@both_forms
def test_buffers_and_mixed_precision(rank: Rank, orig: bool) -> None:
    """Saved in the original dtypes before, between and after steps; computed with in the others."""
    precision = MixedPrecision(torch.bfloat16, torch.float32, buffer_dtype=torch.bfloat16)
    model, reference = wrapped(rank, use_orig_params=orig, mixed_precision=precision)
    inner = model.module.blocks[0].module
    assert_states_equal(model, reference)
    model(torch.ones(2, DIM)).sum().backward()
    before = gradients_of(model)
    state, first = model.state_dict(), first_rank_state(model)
    assert_equal(gradients_of(model), before, "gradients")
    dtypes = {name: value.dtype for name, value in reference.state_dict().items()}
    assert {n: v.dtype for n, v in first.items()} == (dtypes if rank.rank == 0 else {})
    assert {name: value.dtype for name, value in state.items()} == dtypes
    assert_equal(state["blocks.0.offset"], reference.blocks[0].offset.bfloat16().float(), "buffer")
    assert_equal(state["first.weight"], reference.first.weight.detach(), "full precision")
    other = other_net()
    model.load_state_dict(other.state_dict())
    assert_equal(inner.offset, other.blocks[0].offset.bfloat16(), "loaded into a buffer that had been cast")
    assert_equal(model.state_dict()["first.weight"], other.first.weight.detach(), "loaded")


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


# ---------------------------------------------------------------- moments


@on_ranks(2)
def test_in_forward_and_inside_summon(rank: Rank) -> None:
    """In a forward and inside of ``summon_full_params`` it is refused by name, and what was going on goes on."""
    model, reference = wrapped(rank)
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
    assert_states_equal(model, reference)


# ---------------------------------------------------------------- loading


@on_ranks(2)
@pytest.mark.parametrize(
    ("strategy", "orig", "assign"), [(FULL, False, False), (GRAD_OP, True, True), (NO_SHARD, False, True)]
)
def test_load_from_plain(rank: Rank, strategy: ShardingStrategy, orig: bool, assign: bool) -> None:
    """A plain model's state, also with ``assign``; the optimizer's parameters stay the model's."""
    model, _ = wrapped(rank, strategy, use_orig_params=orig)
    ids = [id(p) for p in model.parameters()]
    other = other_net()
    state = other.state_dict()
    keys = list(state)
    result = model.load_state_dict(state, assign=assign)
    assert result.missing_keys == result.unexpected_keys == []
    assert list(state) == keys, "the user's dictionary is as it was"
    assert [id(p) for p in model.parameters()] == ids
    assert_dicts_equal(model.state_dict(), copy.deepcopy(state))
    assert_freed(model)
    check_steps(rank, model, copy.deepcopy(other))


@on_ranks(2)
@both_forms
def test_load_between_microbatches(rank: Rank, orig: bool) -> None:
    """Gradients, and those that wait for a later microbatch, are as they were before the load.

    Loading counts for the next step, whatever is kept unsharded; values of another dtype are converted.
    """
    model, reference = wrapped(rank, GRAD_OP, use_orig_params=orig)
    backward(rank, model, 0)
    with model.no_sync():
        backward(rank, model, 1)
    model(torch.ones(1, DIM))
    model.load_state_dict(reference.state_dict())
    backward(rank, model, 2)
    reference_backward(rank, reference, 0, 1, 2)
    check_gradients(model, reference)
    model.zero_grad()
    model(torch.ones(1, DIM))
    other = other_net()
    model.load_state_dict({n: v.double() if v.is_floating_point() else v for n, v in other.state_dict().items()})
    assert_states_equal(model, other)
    assert_same_outputs(rank, model, other)
    check_steps(rank, model, other)


@on_ranks(2)
def test_load_that_differs(rank: Rank) -> None:
    """Each rank keeps its own slice of what it loads, as of what it writes in ``summon_full_params``."""
    model, _ = wrapped(rank)
    nets = [other_net(r) for r in range(rank.world_size)]
    model.load_state_dict(nets[rank.rank].state_dict())
    state = model.state_dict()
    states: list[Any] = [None] * rank.world_size
    dist.all_gather_object(states, {name: value.cpu() for name, value in state.items()})
    first, last = "first.weight", "last.bias"  # the ends of the root's concatenation
    for found in states:
        assert_equal(found[first], nets[0].first.weight.detach().cpu(), first)
        assert_equal(found[last], nets[-1].last.bias.detach().cpu(), last)
    assert_equal(state["steps"], nets[rank.rank].steps, "buffers are not sharded")


@on_ranks(2)
@pytest.mark.parametrize(("orig", "plain_root"), [(False, False), (True, True)])
def test_what_does_not_fit(rank: Rank, orig: bool, plain_root: bool) -> None:
    """Missing and unexpected names, wrong shapes, and what is no tensor: results and errors have the user's names.

    What fits is loaded. The model can be used and loaded afterwards.
    """
    inner, reference = wrapped(rank, use_orig_params=orig)
    model: nn.Module = nn.Sequential(inner) if plain_root else inner
    prefix = "0." if plain_root else ""
    whole: Any = reference.state_dict(prefix=prefix)
    for name, value, match in (
        ("blocks.1.up.weight", torch.ones(2, 2), rf"size mismatch for {prefix}blocks\.1\.up\.weight"),
        ("first.weight", "text", r"first\.weight"),
    ):
        with pytest.raises(RuntimeError, match=match) as caught:
            model.load_state_dict({**whole, prefix + name: value})
        assert "_fsdp_wrapped_module" not in str(caught.value)
    with pytest.raises(TypeError):
        model.load_state_dict([1])  # type: ignore[arg-type]
    check_steps(rank, inner, reference)
    other = other_net()
    state: Any = other.state_dict(prefix=prefix)
    dropped = state.pop(f"{prefix}blocks.1.up.weight")
    del state[f"{prefix}steps"]
    state[f"{prefix}blocks.0.extra"] = state[f"{prefix}nothing.weight"] = torch.ones(1)
    result = model.load_state_dict(state, strict=False)
    assert sorted(result.missing_keys) == [f"{prefix}blocks.1.up.weight", f"{prefix}steps"]
    assert sorted(result.unexpected_keys) == [f"{prefix}blocks.0.extra", f"{prefix}nothing.weight"]
    with pytest.raises(RuntimeError, match=r"blocks\.1\.up\.weight") as caught:
        model.load_state_dict(state)
    assert "blocks.0.extra" in str(caught.value) and "_fsdp_wrapped_module" not in str(caught.value)
    assert_freed(model)
    loaded = inner.state_dict()
    assert_equal(loaded["blocks.1.down.weight"], other.blocks[1].down.weight.detach(), "what was there")
    assert not torch.equal(loaded["blocks.1.up.weight"], dropped)
    assert_loads(inner, other)


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
    assert_same_outputs(rank, model, reference)
    assert_loads(model, other_net())


@on_ranks(2)
def test_files(rank: Rank, tmp_path: Path) -> None:
    """Each rank's state goes through ``torch.save`` and safetensors, at no more bytes than a plain model's.

    A plain model and a wrapper in another form load it.
    """
    model, reference = wrapped(rank)
    state = model.state_dict()
    mine, theirs = io.BytesIO(), io.BytesIO()
    torch.save(state, mine)
    torch.save(reference.state_dict(), theirs)
    assert len(mine.getvalue()) <= len(theirs.getvalue()) + 1024
    mine.seek(0)
    assert_dicts_equal(torch.load(mine, weights_only=True), state)
    path = tmp_path / f"{rank.rank}.safetensors"
    save_file(state, path)
    loaded = load_file(path)
    assert_dicts_equal({name: loaded[name] for name in state}, on_cpu(state))
    for other in (FSDP(Net(), use_orig_params=True), Net()):
        other.load_state_dict(loaded)
        assert_states_equal(other, reference)
