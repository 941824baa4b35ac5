"""torch.distributed.checkpoint.state_dict's functions on models of both front ends.

The kind ``unpatched`` is ``fully_shard`` with torch's functions as torch has them. With all others, they know wrappers
by ``enable_torch_state_dict_functions``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as functions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from wrapped import (
    DIM,
    LOCAL,
    Block,
    Net,
    assert_dicts_equal,
    backward,
    built,
    on_cpu,
    other_net,
    placed,
    raised_everywhere,
    reference_backward,
    whole,
)

from compare import assert_close, assert_equal
from fullshard import FullshardError, ShardingStrategy, dropin, fully_shard
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.activation_checkpoint import apply_activation_checkpointing
from fullshard.checkpoint.state.optimizer.initial import give_initial_state
from fullshard.dropin import enable_torch_state_dict_functions
from fullshard.wrap import ModuleWrapPolicy
from pairwise import each_value
from ranks import Rank, on_ranks

KINDS = ["flat", "orig", "mixed", "unpatched"]
FULL = StateDictOptions(full_state_dict=True)
RANK0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def patched(body: Callable[..., None]) -> Callable[..., None]:
    """Have torch's functions know wrappers while ``body`` runs, but for the kind ``unpatched``."""

    @functools.wraps(body)
    def run(rank: Rank, **arguments: Any) -> None:
        unpatched = arguments.get("kind") == "unpatched"
        with contextlib.nullcontext() if unpatched else enable_torch_state_dict_functions():
            body(rank, **arguments)

    return run


def made(rank: Rank, kind: str, net: nn.Module, strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD) -> nn.Module:
    """The model in one of the forms, each part a unit."""
    if kind == "plain":
        return net
    if kind in ("rows", "unpatched"):
        mesh = placed(rank, strategy).get("device_mesh", rank.mesh)
        for part in net.blocks:  # type: ignore[union-attr]
            fully_shard(part, mesh=mesh)
        return fully_shard(net, mesh=mesh)
    if kind == "mixed":
        fully_shard(net.blocks[0], mesh=rank.mesh)  # type: ignore[index]
    orig = kind == "orig"
    return FSDP(net, **placed(rank, strategy), use_orig_params=orig, auto_wrap_policy=ModuleWrapPolicy({Block}))


def adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.01, "eps": 1e-3, "weight_decay": 0.1, **options})


def step(rank: Rank, model: nn.Module, optimizer: torch.optim.Optimizer, *steps: int) -> None:
    for number in steps:
        if isinstance(model, Net) and not isinstance(next(model.parameters()), DTensor):
            reference_backward(rank, model, number)
        else:
            backward(rank, model, number)
        optimizer.step()
        optimizer.zero_grad()


def assert_optimizers_equal(actual: Any, expected: Any, *, exact: bool = False) -> None:
    """Require equal parameters, state names, values and options by FQN."""
    assert actual["state"].keys() == expected["state"].keys()
    compare: Any = assert_equal if exact else assert_close
    more: Any = {} if exact else {"rtol": 1e-4, "atol": 1e-6}
    for fqn, state in expected["state"].items():
        assert actual["state"][fqn].keys() == state.keys(), fqn
        for name, value in state.items():
            compare(actual["state"][fqn][name], value, f"{fqn}.{name}", **more)
    assert options_of(actual) == options_of(expected)


def options_of(state: Any) -> Any:
    """By FQN; torch makes lists of tuples at times."""
    return {
        fqn: {n: list(v) if isinstance(v, tuple) else v for n, v in group.items() if n != "params"}
        for group in state["param_groups"]
        for fqn in group["params"]
    }


# ---------------------------------------------------------------- parameters


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "options"),
    [("flat", None), ("orig", FULL), ("mixed", BROADCAST)],
)
@patched
def test_model_in(rank: Rank, kind: str, options: StateDictOptions | None) -> None:
    """What was got is set, also from rank 0 alone; a state dict that lacks something is an error, or allowed."""
    source, model = other_net(), made(rank, kind, built())
    state: Any = get_model_state_dict(made(rank, kind, other_net()) if options is None else source, options=options)
    reduced = {name: value for name, value in state.items() if name not in ("blocks.1.up.weight", "steps")}
    if options == BROADCAST and rank.rank != 0:
        state, reduced = {}, {}
    result = set_model_state_dict(model, dict(state), options=options)
    assert list(result.missing_keys) == list(result.unexpected_keys) == []
    assert_dicts_equal(get_model_state_dict(model, options=FULL), source.state_dict())
    model = made(rank, kind, built())
    with pytest.raises(RuntimeError, match=r"blocks\.1\.up\.weight") as caught:
        set_model_state_dict(model, dict(reduced), options=options)
    assert "steps" in str(caught.value) and "_fsdp_wrapped" not in str(caught.value)
    loose = copy.copy(options) if options is not None else StateDictOptions()
    loose.strict = False
    set_model_state_dict(model, dict(reduced), options=loose)
    found = get_model_state_dict(model, options=FULL)
    assert_equal(found["blocks.1.up.weight"], built().blocks[1].up.weight.detach(), "what was missing stays")
    assert_equal(found["first.weight"], source.first.weight.detach(), "what was there")
    assert_equal(found["blocks.0.scale"], source.blocks[0].scale.detach(), "a scalar that was there")


@on_ranks(2)
@pytest.mark.parametrize("kind", ["flat", "rows"])
@patched
def test_frozen_left_out(rank: Rank, kind: str) -> None:
    """``ignore_frozen_params`` leaves frozen parameters out, all names of tied ones, also where a rank has nothing."""
    model = built()
    model.first.requires_grad_(False)
    model.blocks[0].up.requires_grad_(False)
    model.last.weight.requires_grad_(False)
    model.other = nn.Linear(DIM, 3)
    model.other.weight = model.last.weight
    frozen = {"first.weight", "first.bias", "blocks.0.up.weight", "blocks.0.up.bias", "last.weight", "other.weight"}
    names = [name for name in model.state_dict() if name not in frozen]
    sharded = made(rank, kind, model)
    state = get_model_state_dict(sharded, options=StateDictOptions(ignore_frozen_params=True))
    assert list(state) == names
    options = StateDictOptions(ignore_frozen_params=True, full_state_dict=True, cpu_offload=True)
    assert list(get_model_state_dict(sharded, options=options)) == (names if rank.rank == 0 else [])
    result = set_model_state_dict(sharded, state, options=StateDictOptions(strict=False))
    assert set(result.missing_keys) == frozen


@on_ranks(2)
@patched
def test_names(rank: Rank) -> None:
    """Checkpoint wrappers, torch.compile, a plain root, ties, several flat parameters: FQNs are as before."""
    plain: Any = nn.Sequential(nn.Linear(3, 3), other_net())
    plain[1].first.requires_grad_(False)
    plain[1].blocks[1].up.weight = plain[1].blocks[0].up.weight
    reference = copy.deepcopy(plain)
    apply_activation_checkpointing(plain, check_fn=lambda m: isinstance(m, Block))
    plain[1] = made(rank, "flat", plain[1])
    for model in (plain, torch.compile(plain)):
        state = get_model_state_dict(model, options=FULL)
        assert_dicts_equal(state, reference.state_dict())
        new = {name: torch.full_like(value, 2) for name, value in state.items()}
        set_model_state_dict(model, dict(new), options=FULL)
        assert_dicts_equal(get_model_state_dict(model, options=FULL), new)
        set_model_state_dict(model, dict(reference.state_dict()) if rank.rank == 0 else {}, options=BROADCAST)
        assert_dicts_equal(whole(get_model_state_dict(model)), reference.state_dict())
        optimizer, other = adam(model), adam(reference)
        states = [get_optimizer_state_dict(*each)["state"] for each in ((model, optimizer), (reference, other))]
        assert states[0].keys() == states[1].keys()
        set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))


@on_ranks(2)
@patched
def test_errors_and_settings(rank: Rank) -> None:
    """Ranks that differ are an error on all; the user's ``state_dict_type`` and DDP models are left alone."""
    model = made(rank, "flat", built())
    FSDP.set_state_dict_type(model, LOCAL)
    get_model_state_dict(model)
    state = built().state_dict() if rank.rank == 0 else {"first.weight": torch.ones(DIM, DIM)}
    with pytest.raises(RuntimeError, match="the same keys and kinds of values on all ranks") as caught:
        set_model_state_dict(model, dict(state), options=FULL)
    raised_everywhere(rank, caught.value)
    assert FSDP.get_state_dict_type(model).state_dict_type is LOCAL
    plain = DistributedDataParallel(built())
    optimizer = adam(plain)
    assert_dicts_equal(get_model_state_dict(plain), built().state_dict())
    assert len(get_optimizer_state_dict(plain, optimizer)["state"]) == len(list(plain.parameters()))


# ---------------------------------------------------------------- optimizers


OPTIONS = {
    "rows": StateDictOptions(),
    "whole": FULL,
    "broadcast": BROADCAST,
    "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
    "whole, flattened": StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True),
}


@on_ranks(2)
@pytest.mark.parametrize(("kind", "name"), list(zip(["flat", "orig", "mixed", "rows", "flat"], OPTIONS, strict=True)))
@patched
def test_optimizer_in(rank: Rank, kind: str, name: str) -> None:
    """Into a fresh optimizer: it goes on as the one that was saved, with its options."""
    options = OPTIONS[name]
    model = made(rank, kind, built())
    optimizer = adam(model)
    step(rank, model, optimizer, 0, 1)
    state, optim_state = get_state_dict(model, optimizer, options=options)
    saved = copy.deepcopy(whole(optim_state))
    optim_state = copy.deepcopy(optim_state)  # torch's optimizers take tensors as they are
    again = made(rank, kind, built(seed=9))
    fresh = adam(again, lr=5.0, weight_decay=0.9)
    if options is BROADCAST:  # in one call, an empty dictionary would mean that no model is meant
        set_model_state_dict(again, state if rank.rank == 0 else {}, options=options)
        set_optimizer_state_dict(again, fresh, optim_state if rank.rank == 0 else {}, options=options)
    else:
        set_state_dict(again, fresh, model_state_dict=state, optim_state_dict=optim_state, options=options)
    found = get_optimizer_state_dict(again, fresh, options=options)
    if "state" in saved:
        assert_optimizers_equal(whole(found), saved, exact=True)
    else:
        assert whole(found).keys() == saved.keys()
        assert_equal(whole(found)["state.blocks.0.scale.exp_avg_sq"], saved["state.blocks.0.scale.exp_avg_sq"], "flat")
    for each, theirs in ((model, optimizer), (again, fresh)):
        step(rank, each, theirs, 3)
    assert_dicts_equal(get_model_state_dict(again, options=FULL), get_model_state_dict(model, options=FULL))


MAKERS: dict[str, Any] = {
    "adam": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
}


@on_ranks(2)
@each_value(kind=KINDS[:3], name=MAKERS)
@patched
def test_fresh_optimizers(rank: Rank, kind: str, name: str) -> None:
    """To look at a fresh optimizer changes nothing: no step is counted, no hook called; one sees its beginning."""
    model = made(rank, kind, built())
    optimizer, untouched = MAKERS[name](model.parameters()), MAKERS[name](made(rank, kind, built()).parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    called: list[Any] = []
    optimizer.register_step_pre_hook(lambda *a: called.append(a))
    optimizer.register_step_post_hook(lambda *a: called.append(a))
    backward(rank, model)
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    before = whole(get_model_state_dict(model))
    kept = {k: copy.deepcopy(v) for k, v in optimizer.param_groups[0].items() if k != "params"}
    state = get_optimizer_state_dict(model, optimizer)
    assert not called and scheduler.last_epoch == 0 and getattr(optimizer, "_opt_called", False) is False
    assert len(optimizer.state) == len(untouched.state)
    assert {k: v for k, v in optimizer.param_groups[0].items() if k != "params"} == kept
    assert_dicts_equal(whole(get_model_state_dict(model)), before)
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        assert gradient is None or torch.equal(whole(gradient), whole(parameter.grad))
    beginning = {"step": 0.0, "exp_avg": 0.0, "sum": 0.5, "mu": 1.0, "eta": 0.1, "ax": 0.0}
    assert name == "sgd" or state["state"].keys() == {n for n, _ in built().named_parameters()}  # type: ignore[union-attr]
    for fqn, values in whole(state)["state"].items():
        for key in beginning.keys() & values.keys():
            assert bool((torch.as_tensor(values[key]) == beginning[key]).all()), (fqn, key, values[key])
    set_optimizer_state_dict(model, optimizer, state)
    assert all(float(values.get("step", 0)) == 0 for values in optimizer.state.values())
    assert_dicts_equal(whole(get_model_state_dict(model)), before)


# ---------------------------------------------------------------- on request


@on_ranks(2)
@pytest.mark.parametrize("form", ["inside", "compiled"])
def test_wrappers_refuse(rank: Rank, form: str) -> None:
    """Unless the functions know wrappers, all of them raise, wherever the wrapper is, and change nothing."""
    model: nn.Module = built()
    if form == "inside":
        model.last = FSDP(model.last)
    else:
        model = made(rank, "mixed", model)
    optimizer = adam(model)
    if form == "compiled":
        model = torch.compile(model)  # type: ignore[assignment]
    state: Any = built().state_dict()
    optim: Any = get_optimizer_state_dict(plain := built(), adam(plain))
    with enable_torch_state_dict_functions():
        before = whole(get_model_state_dict(model))
    for options in (None, BROADCAST):
        for function, *arguments in (
            (get_model_state_dict, model),
            (get_optimizer_state_dict, model, optimizer),
            (get_state_dict, model, optimizer),
            (set_model_state_dict, model, dict(state)),
            (set_optimizer_state_dict, model, optimizer, optim),
            (functools.partial(set_state_dict, model_state_dict=state, optim_state_dict=optim), model, optimizer),
        ):
            with pytest.raises(FullshardError, match="enable_torch_state_dict_functions") as caught:
                function(*arguments, options=options)
            raised_everywhere(rank, caught.value)
    assert not optimizer.state
    with enable_torch_state_dict_functions():
        assert_dicts_equal(whole(get_model_state_dict(model)), before)


@on_ranks(2)
def test_parts_of_wrappers_are_refused(rank: Rank) -> None:
    """What is inside of a wrapper has slices for parameters, which torch would save as if they were whole."""
    model = FSDP(nn.Sequential(nn.Linear(4, 4), FSDP(nn.Linear(4, 4))), use_orig_params=True)
    optimizer = adam(model)
    with enable_torch_state_dict_functions():
        for part in (model.module, model.module[0]):
            for function, *arguments in (
                (get_model_state_dict,),
                (set_model_state_dict, {}),
                (get_state_dict, optimizer),
            ):
                with pytest.raises(FullshardError, match="pass the FullyShardedDataParallel around it"):
                    function(part, *arguments)
        get_state_dict(model, optimizer)
        get_model_state_dict(model.module[1])


def test_it_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """By whoever asked last, in any order, also around the drop-in; a torch that lacks names is left as it is."""
    before = dict(vars(functions))
    with enable_torch_state_dict_functions() as mine:
        during = dict(vars(functions))
        assert during.keys() == before.keys()
        assert {name for name in before if during[name] is not before[name]} >= {"FSDP", "_get_optim_state_dict"}
        other = enable_torch_state_dict_functions()
        assert vars(functions) == during
        mine.close(), mine.close()
        assert vars(functions) == during
        installation = dropin.install(quiet=True)
        other.close()
        assert isinstance(FSDP.__new__(FSDP), functions.FSDP)
        last = enable_torch_state_dict_functions()
        with installation:
            pass
        assert vars(functions) == during
        last.close()
        assert vars(functions) == before
    assert vars(functions) == before
    monkeypatch.delattr(functions, "_get_optim_state_dict")
    before = dict(vars(functions))
    with pytest.warns(UserWarning, match="_get_optim_state_dict"), enable_torch_state_dict_functions():
        assert vars(functions) == before


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
@patched
def test_out(rank: Rank, kind: str) -> None:
    """Parameters and the optimizer's state: rows, whole, on rank 0, flattened; the same as of a plain model."""
    reference, model = built(), made(rank, kind, built())
    assert_dicts_equal(get_model_state_dict(model, options=FULL), built().state_dict())
    ours, theirs = adam(model), adam(reference)
    step(rank, model, ours, 0, 1, 2)
    step(rank, reference, theirs, 0, 1, 2)
    expected = get_optimizer_state_dict(reference, theirs)
    state, rows = get_state_dict(model, ours)
    assert all(isinstance(state[name], DTensor) for name, _ in reference.named_parameters())
    assert isinstance(rows["state"]["first.weight"]["exp_avg"], DTensor)  # type: ignore[index, call-overload]
    assert_optimizers_equal(whole(rows), expected)
    full, optim = get_state_dict(model, ours, options=FULL)
    assert_dicts_equal(full, whole(state))
    assert_optimizers_equal(optim, expected)
    offloaded = get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))
    assert_dicts_equal(on_cpu(whole(offloaded)), on_cpu(full))
    first, optim = get_state_dict(model, ours, options=RANK0)
    assert_dicts_equal(first, on_cpu(full) if rank.rank == 0 else {})
    if rank.rank == 0:
        assert_optimizers_equal(optim, on_cpu(expected))
    else:
        assert not optim or not any(optim.values())
    flat = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    flattened, wanted = (get_optimizer_state_dict(m, o, options=flat) for m, o in ((model, ours), (reference, theirs)))
    assert flattened.keys() == wanted.keys()
    assert_close(flattened["state.first.weight.exp_avg"], wanted["state.first.weight.exp_avg"], "moment", 1e-4, 1e-6)


def test_optimizers_that_pass_on_to_another() -> None:
    """An optimizer by class that passes state and groups on to another, as accelerate's, has that given its state."""

    class Passing(torch.optim.Optimizer):
        def __init__(self) -> None:
            self.optimizer = optimizer

        state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]
        param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]

        def step(self, closure: Any = None) -> None:
            raise AssertionError("may skip steps, or unscale gradients")

    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    give_initial_state(Passing())
    assert optimizer.state[weight]["step"] == 0 and not optimizer.state[weight]["exp_avg"].any()
