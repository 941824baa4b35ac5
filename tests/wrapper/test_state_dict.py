"""State dicts of wrappers, unsharded or sharded: as those of the module before wrapping; and which form is chosen."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
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
    load,
    local_part,
    on_cpu,
    other_net,
    raised_everywhere,
    reference_backward,
    save,
    whole,
    wrapped,
)

from compare import assert_equal
from fullshard import (
    FullOptimStateDictConfig,
    FullshardError,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
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


def assert_loads(model: nn.Module, other: nn.Module, **arguments: Any) -> None:
    """Require ``model`` to take all of the state of a plain module into the parameters that it has."""
    ids, state = [id(p) for p in model.parameters()], other.state_dict()
    keys = list(state)
    result = model.load_state_dict(state, **arguments)
    assert result.missing_keys == result.unexpected_keys == []
    assert list(state) == keys, "the user's dictionary is as it was"
    assert [id(p) for p in model.parameters()] == ids
    assert_states_equal(model, other)
    assert_freed(model)


# ---------------------------------------------------------------- saving


@on_ranks(4)
@pytest.mark.parametrize(("strategy", "orig"), [(FULL, False), (GRAD_OP, True), (NO_SHARD, True), (HYBRID[0], False)])
def test_as_before_wrapping(rank: Rank, strategy: ShardingStrategy, orig: bool) -> None:
    """Keys, order, values and dtypes are the unsharded model's, on all ranks or the first of all; and of parts."""
    model, reference = wrapped(rank, strategy, use_orig_params=orig)
    assert_dicts_equal(model.module.blocks[1].state_dict(), reference.blocks[1].state_dict())
    with record() as seen:
        state = model.state_dict()
    assert_dicts_equal(state, reference.state_dict())
    assert [c.kind for c in seen] == ["all_gather"] * (0 if strategy is NO_SHARD else 3)
    assert_dicts_equal(save(model, WHOLE, RANK0), on_cpu(reference.state_dict()) if rank.rank == 0 else {})
    assert_freed(model)
    assert isinstance(state, OrderedDict)
    assert all(type(value) is torch.Tensor and not value.requires_grad for value in state.values())
    assert list(state._metadata) == list(reference.state_dict()._metadata)  # type: ignore[attr-defined]
    check_steps(rank, model, reference)
    assert model.check_is_root()
    assert_loads(model, other_net(), assign=orig)


@on_ranks(2)
def test_arguments(rank: Rank) -> None:
    """``prefix``, ``destination`` and ``keep_vars``, whose values are parameters; the model goes on."""
    model, reference = wrapped(rank)
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
    assert save(model, WHOLE, RANK0, destination=destination) is destination
    assert "kept" in destination and len(destination) == (1 + len(theirs) if rank.rank == 0 else 1)
    check_steps(rank, model, reference)


@on_ranks(2)
@both_forms
@pytest.mark.parametrize("form", [WHOLE, SHARDED], ids=lambda form: form.name)
def test_names(rank: Rank, form: StateDictType, orig: bool) -> None:
    """Tied, shared, checkpointed, ignored and plain modules have all their names and memory of before wrapping."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    model: Any = nn.Sequential(nn.Linear(4, 4), block, nn.Linear(4, 4), block, nn.Sequential(nn.BatchNorm1d(2)))
    block[1].weight = block[0].weight
    model[2].weight = model[0].weight
    reference = copy.deepcopy(nn.Sequential(model, nn.BatchNorm1d(3)))
    expected = reference.state_dict(prefix="a.")
    model[0] = checkpoint_wrapper(model[0])
    ignored = model[4]
    options: Any = {"auto_wrap_policy": ModuleWrapPolicy({nn.Sequential}), "ignored_modules": [ignored]}
    root = nn.Sequential(FSDP(model, use_orig_params=orig, **options), nn.BatchNorm1d(3))
    state = save(root, form, prefix="a.")
    assert_dicts_equal(whole(state), expected)
    place = {name.removeprefix("a.0."): local_part(value).data_ptr() for name, value in state.items()}
    for one, other in (("0.weight", "2.weight"), ("1.0.weight", "1.1.weight"), ("3.0.weight", "3.1.weight")):
        assert place[one] == place[other]
    assert place["0.weight"] != place["1.0.weight"]
    assert place["4.0.weight"] == ignored[0].weight.data_ptr()
    assert place["4.0.running_mean"] == ignored[0].running_mean.data_ptr()
    others = {name: value for name, value in expected.items() if name.startswith(("a.0.4.", "a.1."))}
    first = save(root, WHOLE, RANK0, prefix="a.")
    assert_dicts_equal(first, {**on_cpu(expected), **others} if rank.rank == 0 else others)
    kept = save(root, form, keep_vars=True)
    assert all(isinstance(kept[n], nn.Parameter) for n, _ in reference.named_parameters(remove_duplicate=False))
    held = ignored[0].weight
    result = load(root, {name.removeprefix("a."): torch.full_like(v, 3) for name, v in state.items()}, form)
    assert result.missing_keys == result.unexpected_keys == []
    assert all(bool((value == 3).all()) for value in root.state_dict().values())
    assert model[2].weight is model[0].weight and ignored[0].weight is held


@on_ranks(2)
@both_forms
def test_below_a_plain_root(rank: Rank, orig: bool) -> None:
    """Wrappers deep inside of plain modules, and what is added to a wrapped module later, are saved and loaded."""
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
    assert {"a.0.last.1.weight", "a.0.last.1.bias"} <= save(model, WHOLE, RANK0).keys()
    assert_same_outputs(rank, model["a"][0], reference["a"][0])
    other = copy.deepcopy(reference)
    for parameter in other.parameters():
        parameter.data.fill_(float(parameter.dim()))
    assert_loads(model, other)


@on_ranks(2)
@pytest.mark.parametrize(
    ("form", "strategy", "orig"),
    [(WHOLE, FULL, False), (WHOLE, NO_SHARD, True), (SHARDED, FULL, False), (SHARDED, FULL, True)],
)
def test_values_are_copies(rank: Rank, form: StateDictType, strategy: ShardingStrategy, orig: bool) -> None:
    """Training does not change what was saved, nor writing to that the model; each has memory of its own size."""
    model, reference = wrapped(rank, strategy, use_orig_params=orig)
    state, file = save(model, form), io.BytesIO()
    before = copy.deepcopy(whole(state))
    torch.save(state, file)
    file.seek(0)
    model.load_state_dict(other_net().state_dict())
    assert_dicts_equal(whole(state), before)
    load(model, torch.load(file, weights_only=False), form)
    assert_states_equal(model, reference)
    check_steps(rank, model, reference)
    assert_dicts_equal(whole(state), before)
    places = set()
    for name, value in state.items():
        local = local_part(value)
        local.fill_(100)
        if name.endswith("weight"):
            assert local.untyped_storage().nbytes() < local.nbytes + 64, name
            places.add(local.data_ptr())
    assert len(places) == 6
    assert_same_outputs(rank, model, reference)


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
    """Extra state and versions get to all ranks' modules; state dict hooks see what they would have seen."""
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
    first = save(outer, WHOLE, RANK0, keep_vars=True)
    assert isinstance(first["1._extra_state"], dict)
    assert isinstance(first["1.weight"], nn.Parameter) if rank.rank == 0 else "1.weight" not in first


# ---------------------------------------------------------------- memory


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
        state = save(model, SHARDED if kind == "sharded" else WHOLE, RANK0 if kind == "rank0_only" else None)
    on_host = rank.device.type == "cpu"  # where rank 0's are taken off accelerators one by one
    result = kind == "all" or (kind == "rank0_only" and rank.rank == 0 and on_host)
    assert len(peaks) == len(sizes)
    assert max(peaks) == (sum(sizes) if result else max(sizes))
    del state


# ---------------------------------------------------------------- loading


@on_ranks(2)
@both_forms
def test_load_between_microbatches(rank: Rank, orig: bool) -> None:
    """Gradients stay as they were; what was loaded, maybe of another dtype, is used by the next forward."""
    model, reference = wrapped(rank, GRAD_OP, use_orig_params=orig)
    backward(rank, model, 0)
    with model.no_sync():
        backward(rank, model, 1)
    model(torch.ones(1, DIM))
    model.load_state_dict(model.state_dict())
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
@pytest.mark.parametrize(
    ("form", "orig", "plain_root"), [(WHOLE, False, False), (WHOLE, True, True), (SHARDED, True, False)]
)
def test_what_does_not_fit(rank: Rank, form: StateDictType, orig: bool, plain_root: bool) -> None:
    """Names, shapes and ranks that differ are reported with the user's names, and what fits is loaded."""
    inner, reference = wrapped(rank, use_orig_params=orig)
    source = FSDP(other_net(), auto_wrap_policy=BLOCKS)
    model: nn.Module = nn.Sequential(inner) if plain_root else inner
    prefix = "0." if plain_root else ""
    state = save(inner, form, prefix=prefix)
    square = torch.ones(2, 2)
    for name, value, match in (
        (
            "blocks.1.up.weight",
            square if form is WHOLE else distribute_tensor(square, rank.mesh, [Shard(0)]),
            rf"size mismatch for {prefix}blocks\.1\.up\.weight",
        ),
        ("first.weight", "text", r"first\.weight"),
    ):
        with pytest.raises(RuntimeError, match=match) as caught:
            load(model, {**state, prefix + name: value}, form)
        assert "_fsdp_wrapped_module" not in str(caught.value)
    with pytest.raises(TypeError):
        model.load_state_dict([1])  # type: ignore[arg-type]
    differing = dict(state)
    if rank.rank == 1:
        del differing[f"{prefix}first.weight"]
    kind = "tensor" if form is WHOLE else "DTensor"
    with pytest.raises(FullshardError, match=rf"first\.weight \(a {kind} on rank 0; missing on rank 1\)") as error:
        load(model, differing, form, strict=False)
    raised_everywhere(rank, error.value)
    check_steps(rank, inner, reference)
    state = save(source, form, prefix=prefix)
    dropped = whole(state.pop(f"{prefix}blocks.1.up.weight"))
    del state[f"{prefix}steps"]
    state[f"{prefix}blocks.0.extra"] = state[f"{prefix}nothing.weight"] = torch.ones(1)
    result = load(model, state, form, strict=False)
    assert sorted(result.missing_keys) == [f"{prefix}blocks.1.up.weight", f"{prefix}steps"]
    assert sorted(result.unexpected_keys) == [f"{prefix}blocks.0.extra", f"{prefix}nothing.weight"]
    with pytest.raises(RuntimeError, match=r"blocks\.1\.up\.weight") as caught:
        load(model, state, form)
    assert "blocks.0.extra" in str(caught.value) and "_fsdp_wrapped_module" not in str(caught.value)
    assert_freed(model)
    loaded = inner.state_dict()
    assert_equal(loaded["blocks.1.down.weight"], other_net().blocks[1].down.weight.detach(), "what was there")
    assert not torch.equal(loaded["blocks.1.up.weight"], dropped)
    assert_loads(inner, other_net())


@on_ranks(2)
@pytest.mark.parametrize(("orig", "strict"), [(False, True), (True, False)])
def test_loading_what_only_rank_0_has(rank: Rank, orig: bool, strict: bool) -> None:
    """It is an error on all ranks, which says what to do; the model is as it was, and can be loaded afterwards."""
    model, reference = wrapped(rank, use_orig_params=orig)
    state = save(model, WHOLE, RANK0)
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
    """Files are no larger than a plain model's, which loads them, as does a wrapper with other parameters."""
    model, reference = wrapped(rank)
    state = model.state_dict()
    mine, theirs = io.BytesIO(), io.BytesIO()
    torch.save(state, mine)
    torch.save(reference.state_dict(), theirs)
    assert len(mine.getvalue()) <= len(theirs.getvalue()) + 1024
    path = tmp_path / f"{rank.rank}.safetensors"
    save_file(state, path)
    loaded = load_file(path)
    assert_dicts_equal({name: loaded[name] for name in state}, on_cpu(state))
    for other in (FSDP(Net(), use_orig_params=True), Net()):
        other.load_state_dict(loaded)
        assert_states_equal(other, reference)


# ---------------------------------------------------------------- the settings themselves

CONFIGS: list[tuple[Any, Any, Any]] = [
    (WHOLE, FullStateDictConfig, FullOptimStateDictConfig),
    (LOCAL, LocalStateDictConfig, LocalOptimStateDictConfig),
    (SHARDED, ShardedStateDictConfig, ShardedOptimStateDictConfig),
]


def test_fields_and_defaults() -> None:
    """Names, order and defaults are torch's; flags may be assigned to, and are checked then as well."""
    torchs = importlib.import_module("torch.distributed.fsdp")
    kinds = [kind for _, *pair in CONFIGS for kind in pair] + [StateDictConfig, OptimStateDictConfig]
    for kind in kinds:
        defaults = asdict(getattr(torchs, kind.__name__)())
        assert asdict(kind()) == defaults and list(asdict(kind())) == list(defaults)
        assigned = kind()
        assigned.offload_to_cpu = not defaults["offload_to_cpu"]
        assert assigned != kind() and assigned.offload_to_cpu is not defaults["offload_to_cpu"]
        with pytest.raises(
            AttributeError, match=f"{kind.__name__} has no field rank_0_only; its fields are offload_to_cpu"
        ):
            assigned.rank_0_only = True
        for name in defaults:
            with pytest.raises(TypeError, match=f"{kind.__name__}: {name}: expected True or False, found None"):
                setattr(assigned, name, None)
            with pytest.raises(TypeError, match=f"{kind.__name__}: {name}: expected True or False, found 1"):
                kind(**{name: 1})
    assert [member.name for member in StateDictType] == [member.name for member in torchs.StateDictType]
    assert [member.name for member in OptimStateKeyType] == ["PARAM_NAME", "PARAM_ID"]


def types_of(model: nn.Module) -> list[StateDictType]:
    return [wrapper._state_settings.state_dict_type for wrapper in FSDP.fsdp_modules(model)]


@on_ranks(1)
def test_set_and_get(rank: Rank) -> None:
    """All wrappers get copies of the settings, the old ones are returned; configs of other types are refused."""
    for kind, config, optim_config in CONFIGS:
        model, _ = wrapped(rank)
        default = StateDictSettings(WHOLE, FullStateDictConfig(), FullOptimStateDictConfig())
        assert FSDP.get_state_dict_type(model) == default == StateDictSettings()
        assert FSDP.set_state_dict_type(model, kind) == default
        given = (config(offload_to_cpu=True), optim_config(offload_to_cpu=False))
        assert FSDP.set_state_dict_type(model, kind, *given) == StateDictSettings(kind, config(), optim_config())
        assert FSDP.get_state_dict_type(model) == StateDictSettings(kind, *given)
        assert types_of(model) == [kind] * 3
        given[0].offload_to_cpu = False
        kept = StateDictSettings(kind, config(offload_to_cpu=True), given[1])
        assert FSDP.get_state_dict_type(model) == FSDP.get_state_dict_type(copy.deepcopy(model)) == kept
        for other in [c for _, c, _ in CONFIGS if c is not config] + [StateDictConfig]:
            found = rf"expected a {config.__name__} for {kind.name}, found a {other.__name__}"
            with pytest.raises(RuntimeError, match=found):
                FSDP.set_state_dict_type(model, kind, other())
        for other in [c for _, _, c in CONFIGS if c is not optim_config] + [OptimStateDictConfig]:
            found = rf"optim_state_dict_config: .*{optim_config.__name__}.*{other.__name__}"
            with pytest.raises(RuntimeError, match=found):
                FSDP.set_state_dict_type(model, kind, config(), other())
        assert FSDP.get_state_dict_type(model) == kept
    with pytest.raises(TypeError, match=r"expected a fullshard\.StateDictType, found 'full'"):
        FSDP.set_state_dict_type(model, "full")  # type: ignore[arg-type]


@on_ranks(1)
def test_parts_and_contexts(rank: Rank) -> None:
    """A root, plain or not, stands for the wrappers in it; a context gives each its own settings back."""
    model, _ = wrapped(rank)
    root, inner = nn.Sequential(nn.Linear(2, 2), model), model.module.blocks[1]
    FSDP.set_state_dict_type(root, SHARDED)
    assert FSDP.get_state_dict_type(root).state_dict_type is SHARDED and types_of(root) == [SHARDED] * 3
    assert FSDP.set_state_dict_type(Net(), SHARDED) == FSDP.get_state_dict_type(Net()) == StateDictSettings()
    with FSDP.state_dict_type(Net(), SHARDED):
        pass
    FSDP.set_state_dict_type(root, WHOLE)
    FSDP.set_state_dict_type(inner, LOCAL)
    with FSDP.state_dict_type(model, SHARDED, ShardedStateDictConfig(offload_to_cpu=True)):
        assert FSDP.get_state_dict_type(model).state_dict_config == ShardedStateDictConfig(offload_to_cpu=True)
        with FSDP.state_dict_type(inner, WHOLE):
            assert types_of(model) == [SHARDED, SHARDED, WHOLE]
        assert types_of(model) == [SHARDED] * 3
    assert types_of(model) == [WHOLE, WHOLE, LOCAL]
    with pytest.raises(KeyError), FSDP.state_dict_type(model, SHARDED):
        raise KeyError
    assert types_of(model) == [WHOLE, WHOLE, LOCAL]


@on_ranks(2)
def test_differing_settings(rank: Rank) -> None:
    """They are reported with the names of the modules, and nothing is changed."""
    model, _ = wrapped(rank)
    FSDP.set_state_dict_type(model.module.blocks[1], WHOLE, FullStateDictConfig(rank0_only=True))
    asked: list[Any] = [lambda: FSDP.get_state_dict_type(model), lambda: FSDP.set_state_dict_type(model, SHARDED)]
    for ask in asked:
        with pytest.raises(FullshardError, match=r"in <root>, blocks\.0; .*rank0_only=True.* in blocks\.1") as caught:
            ask()
        raised_everywhere(rank, caught.value)
    assert types_of(model) == [WHOLE] * 3
    FSDP.set_state_dict_type(model.module.blocks[1], WHOLE)
    FSDP.set_state_dict_type(model, SHARDED)
