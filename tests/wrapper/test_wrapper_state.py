"""``state_dict()`` of wrappers: that of the module before wrapping."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from wrapped import (
    DIM,
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
    plain_strategies,
    wrapped,
)

from compare import assert_equal
from fullshard import (
    CPUOffload,
    MixedPrecision,
    PhaseError,
    ShardingStrategy,
)
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.activation_checkpoint import CheckpointImpl, apply_activation_checkpointing, checkpoint_wrapper
from fullshard.comm import record
from fullshard.wrap import ModuleWrapPolicy
from ranks import Rank, on_ranks

# ---------------------------------------------------------------- saving


@on_ranks(1, 2)
@plain_strategies
@both_forms
def test_as_before_wrapping(rank: Rank, strategy: ShardingStrategy, orig: bool) -> None:
    """Keys, order, values and dtypes are the unsharded model's, on all ranks; and those of each wrapper inside."""
    model, reference = wrapped(rank, strategy, use_orig_params=orig)
    with record() as seen:
        state = model.state_dict()
    assert_dicts_equal(state, reference.state_dict())
    assert sum(c.kind == "all_gather" for c in seen) == (0 if strategy is NO_SHARD or rank.world_size == 1 else 3)
    assert {c.kind for c in seen} <= {"all_gather"}
    assert_freed(model)
    assert_dicts_equal(model.module.parts[1].state_dict(), reference.parts[1].state_dict())
    assert isinstance(state, OrderedDict)
    assert all(type(value) is torch.Tensor and not value.requires_grad for value in state.values())
    assert list(state._metadata) == list(reference.state_dict()._metadata)  # type: ignore[attr-defined]
    check_steps(rank, model, reference)
    assert_same_outputs(rank, model, reference)


@on_ranks(4)
@pytest.mark.parametrize("strategy", HYBRID, ids=lambda s: s.name)
def test_hybrid(rank: Rank, strategy: ShardingStrategy) -> None:
    """The same with replicas, out and in."""
    model, reference = wrapped(rank, strategy)
    assert_dicts_equal(model.state_dict(), reference.state_dict())
    other = other_net()
    model.load_state_dict(other.state_dict())
    assert_dicts_equal(model.state_dict(), other.state_dict())


@on_ranks(2)
@both_forms
def test_prefix_and_destination(rank: Rank, orig: bool) -> None:
    """``prefix``, ``destination`` and their old positional forms."""
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


@on_ranks(2)
@both_forms
def test_keep_vars(rank: Rank, orig: bool) -> None:
    """With ``keep_vars`` values are parameters; equal values and keys, and the model goes on."""
    model, reference = wrapped(rank, use_orig_params=orig)
    mine, theirs = model.state_dict(keep_vars=True), reference.state_dict(keep_vars=True)
    assert_dicts_equal(mine, theirs)
    for name, value in theirs.items():
        assert mine[name].requires_grad == value.requires_grad, name
        assert isinstance(mine[name], nn.Parameter) == isinstance(value, nn.Parameter), name
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


@on_ranks(1, 2)
@plain_strategies
@both_forms
def test_values_are_copies(rank: Rank, strategy: ShardingStrategy, orig: bool) -> None:
    """Training does not change what was saved, and writing to it does not change the model."""
    model, reference = wrapped(rank, strategy, use_orig_params=orig)
    state = model.state_dict()
    before = copy.deepcopy(state)
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
def test_buffers_are_copies(rank: Rank) -> None:
    """What was saved in memory brings buffers back, too, after something else was loaded."""
    model, reference = wrapped(rank)
    saved = model.state_dict()
    model.load_state_dict(other_net().state_dict())
    model.load_state_dict(saved)
    assert_dicts_equal(model.state_dict(), reference.state_dict())


@on_ranks(2)
@both_forms
def test_tied(rank: Rank, orig: bool) -> None:
    """Tied parameters and shared modules are there under all names; tied ones, also over units, in one memory."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    model[1][1].weight = model[1][0].weight
    model[2].weight = model[0].weight
    model.append(model[1])
    reference = copy.deepcopy(model)
    outer = FSDP(model, use_orig_params=orig, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}))
    state = outer.state_dict()
    assert_dicts_equal(state, reference.state_dict())
    for one, other in (("0.weight", "2.weight"), ("1.0.weight", "1.1.weight"), ("3.0.weight", "3.1.weight")):
        assert state[one].data_ptr() == state[other].data_ptr()
    assert state["0.weight"].data_ptr() != state["1.0.weight"].data_ptr()
    new = {name: torch.full_like(value, float(value.dim())) for name, value in state.items()}
    outer.load_state_dict(new)
    assert_dicts_equal(outer.state_dict(), new)
    assert model[2].weight is model[0].weight


@on_ranks(2)
@both_forms
def test_ignored(rank: Rank, orig: bool) -> None:
    """Ignored modules are saved as they are: the parameters' own memory; and loaded in place."""
    torch.manual_seed(0)
    model = Net()
    reference = copy.deepcopy(model)
    ignored = model.parts[0]
    outer = FSDP(model, use_orig_params=orig, ignored_modules=[ignored])
    state = outer.state_dict()
    assert_dicts_equal(state, reference.state_dict())
    for name, parameter in ignored.named_parameters():
        assert state[f"parts.0.{name}"].data_ptr() == parameter.data_ptr()
    weight = ignored.up.weight
    outer.load_state_dict(other_net().state_dict())
    assert ignored.up.weight is weight
    assert_dicts_equal(outer.state_dict(), other_net().state_dict())


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
    """Extra state and the versions of modules get to the modules."""
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
    state = model.state_dict()
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
def test_half_precision_model(rank: Rank) -> None:
    """A model in half precision keeps it."""
    torch.manual_seed(0)
    model = Net().half()
    reference = copy.deepcopy(model)
    outer = FSDP(model)
    assert_dicts_equal(outer.state_dict(), reference.state_dict())
    new = other_net().half().state_dict()
    outer.load_state_dict(new)
    assert_dicts_equal(outer.state_dict(), new)


@on_ranks(2)
@plain_strategies
def test_cpu_offload(rank: Rank, strategy: ShardingStrategy) -> None:
    """With offloaded parameters it is the same."""
    model, reference = wrapped(rank, strategy, cpu_offload=CPUOffload(offload_params=True))
    check_steps(rank, model, reference)
    saved = copy.deepcopy(model.state_dict())
    assert list(saved) == list(reference.state_dict())
    model.load_state_dict(other_net().state_dict())
    assert_dicts_equal(model.state_dict(), other_net().state_dict())
    model.load_state_dict(saved)
    assert_same_outputs(rank, model, reference)


# ---------------------------------------------------------------- moments


@on_ranks(1, 2)
@plain_strategies
@both_forms
def test_at_any_moment_between_steps(rank: Rank, strategy: ShardingStrategy, orig: bool) -> None:
    """After a forward, after a backward, without sync and under no_grad: right values, and gradients stay."""
    model, reference = wrapped(rank, strategy, use_orig_params=orig)
    x = torch.ones(2, DIM)
    model(x)  # its backward never comes
    assert_dicts_equal(model.state_dict(), reference.state_dict())
    loss = model(x).sum()
    assert_dicts_equal(model.state_dict(), reference.state_dict())
    loss.backward()
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    assert_dicts_equal(model.state_dict(), reference.state_dict())
    after = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    assert_equal(after, before, "gradients")
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
def test_in_forward(rank: Rank) -> None:
    """In a forward it is refused, and the forward goes on."""
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
    assert_dicts_equal(model.state_dict(), reference.state_dict())


@on_ranks(2)
@both_forms
def test_inside_summon(rank: Rank, orig: bool) -> None:
    """Inside of ``summon_full_params`` it is refused by name, and works afterwards."""
    model, reference = wrapped(rank, use_orig_params=orig)
    with FSDP.summon_full_params(model), pytest.raises(PhaseError, match="summon_full_params"):
        model.state_dict()
    assert_dicts_equal(model.state_dict(), reference.state_dict())
