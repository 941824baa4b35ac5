"""torch.distributed.checkpoint.state_dict's functions on models of both front ends.

The kind ``unpatched`` is ``fully_shard`` with torch's functions as torch has them. With all others, they have been told
of wrappers by ``enable_torch_state_dict_functions``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
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
    HYBRID,
    NO_SHARD,
    Net,
    Part,
    assert_dicts_equal,
    assert_same_outputs,
    backward,
    on_cpu,
    other_net,
    placed,
    raised_everywhere,
    reference_backward,
)

from compare import assert_close, assert_equal
from fullshard import FullshardError, ShardingStrategy, StateDictType, dropin, fully_shard
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.activation_checkpoint import apply_activation_checkpointing
from fullshard.checkpoint.state.optimizer.initial import give_initial_state
from fullshard.dropin import enable_torch_state_dict_functions
from fullshard.wrap import ModuleWrapPolicy
from ranks import Rank, RankPool, on_ranks

KINDS = ["flat", "orig", "rows", "mixed", "unpatched"]
kinds = pytest.mark.parametrize("kind", KINDS)
wrappers = pytest.mark.parametrize("kind", ["flat", "orig"])
WHOLE = StateDictOptions(full_state_dict=True)
RANK0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def told(body: Callable[..., None]) -> Callable[..., None]:
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
        for part in net.parts:  # type: ignore[union-attr]
            fully_shard(part, mesh=mesh)
        return fully_shard(net, mesh=mesh)
    if kind == "mixed":
        fully_shard(net.parts[0], mesh=rank.mesh)  # type: ignore[index]
    orig = kind == "orig"
    return FSDP(net, **placed(rank, strategy), use_orig_params=orig, auto_wrap_policy=ModuleWrapPolicy({Part}))


def net(seed: int = 0, *, scalars: bool = True) -> Net:
    """``scalars``: whether there are 0-D parameters."""
    torch.manual_seed(seed)
    model = Net()
    for part in model.parts if not scalars else ():
        part.scale = nn.Parameter(torch.full((1,), 0.5))
    return model


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


def whole(state: Any) -> Any:
    """The same with full tensors."""
    if isinstance(state, dict):
        return {name: whole(value) for name, value in state.items()}
    if isinstance(state, list):
        return [whole(value) for value in state]
    return state.full_tensor() if isinstance(state, DTensor) else state


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
@kinds
@told
def test_model_out(rank: Rank, kind: str) -> None:
    """By default this rank's rows, else whole values, everywhere or on rank 0; the same as of a plain model."""
    model, expected = made(rank, kind, net()), net().state_dict()
    rows = get_model_state_dict(model)
    assert all(isinstance(rows[name], DTensor) for name, _ in net().named_parameters())
    assert_dicts_equal(whole(rows), expected)
    offloaded = get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))
    assert_dicts_equal(on_cpu(whole(offloaded)), on_cpu(expected))
    state = get_model_state_dict(model, options=WHOLE)
    assert all(type(value) is torch.Tensor for value in state.values())
    assert_dicts_equal(state, expected)
    assert_dicts_equal(get_model_state_dict(model, options=RANK0), on_cpu(expected) if rank.rank == 0 else {})
    assert_dicts_equal(get_model_state_dict(made(rank, "plain", net())), expected)


STRATEGIES = [
    ("flat", HYBRID[0]),
    ("unpatched", HYBRID[0]),
    ("orig", NO_SHARD),
]


@on_ranks(4)
@pytest.mark.parametrize(("kind", "strategy"), STRATEGIES)
@told
def test_strategies(rank: Rank, kind: str, strategy: ShardingStrategy) -> None:
    """With replicas, and without sharding, parameters and the optimizer's state, out and in."""
    scalars = kind != "unpatched"
    reference, model = net(scalars=scalars), made(rank, kind, net(scalars=scalars), strategy)
    ours, theirs = adam(model), adam(reference)
    step(rank, model, ours, 0, 1)
    step(rank, reference, theirs, 0, 1)
    expected = get_optimizer_state_dict(reference, theirs)
    for options in (None, WHOLE):
        state, optim_state = get_state_dict(model, ours, options=options)
        assert_optimizers_equal(whole(optim_state), expected)
        again = made(rank, kind, net(5, scalars=scalars), strategy)
        optimizer = adam(again, lr=1.0)
        set_state_dict(
            again, optimizer, model_state_dict=state, optim_state_dict=copy.deepcopy(optim_state), options=options
        )
        assert_same_outputs(rank, again, model)
        assert_optimizers_equal(
            whole(get_optimizer_state_dict(again, optimizer)), whole(get_optimizer_state_dict(model, ours)), exact=True
        )
    state, optim_state = get_state_dict(model, ours, options=RANK0)
    assert bool(state) == (rank.rank == 0)


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "options"),
    [(KINDS[(i + j) % 5], options) for i, options in enumerate((None, WHOLE, BROADCAST)) for j in (0, 1, 3)],
)
@told
def test_model_in(rank: Rank, kind: str, options: StateDictOptions | None) -> None:
    """What was got is set, also from rank 0 alone; a state dict that lacks something is an error, or allowed."""
    source, model = other_net(), made(rank, kind, net())
    state: Any = get_model_state_dict(made(rank, kind, other_net()) if options is None else source, options=options)
    reduced = {name: value for name, value in state.items() if name not in ("parts.1.up.weight", "steps")}
    if options == BROADCAST and rank.rank != 0:
        state, reduced = {}, {}
    result = set_model_state_dict(model, dict(state), options=options)
    assert list(result.missing_keys) == list(result.unexpected_keys) == []
    assert_dicts_equal(get_model_state_dict(model, options=WHOLE), source.state_dict())
    model = made(rank, kind, net())
    if kind == "unpatched" and options == WHOLE:  # torch takes what the model holds for what is missing
        set_model_state_dict(model, dict(reduced), options=options)
    else:
        with pytest.raises(RuntimeError, match=r"parts\.1\.up\.weight") as caught:
            set_model_state_dict(model, dict(reduced), options=options)
        assert "steps" in str(caught.value) and "_fsdp_wrapped" not in str(caught.value)
    loose = copy.copy(options) if options is not None else StateDictOptions()
    loose.strict = False
    set_model_state_dict(model, dict(reduced), options=loose)
    found = get_model_state_dict(model, options=WHOLE)
    assert_equal(found["parts.1.up.weight"], net().parts[1].up.weight.detach(), "what was missing stays")
    assert_equal(found["first.weight"], source.first.weight.detach(), "what was there")
    assert_equal(found["parts.0.scale"], source.parts[0].scale.detach(), "a scalar that was there")


@on_ranks(2)
@kinds
@told
def test_frozen_left_out(rank: Rank, kind: str) -> None:
    """``ignore_frozen_params`` leaves frozen parameters out, all names of tied ones, also where a rank has nothing."""
    model = net()
    model.first.requires_grad_(False)
    model.parts[0].up.requires_grad_(False)
    model.last.weight.requires_grad_(False)
    model.other = nn.Linear(DIM, 3)
    model.other.weight = model.last.weight
    frozen = {"first.weight", "first.bias", "parts.0.up.weight", "parts.0.up.bias", "last.weight", "other.weight"}
    if kind == "unpatched":  # torch leaves out the first name only
        frozen.remove("other.weight")
    names = [name for name in model.state_dict() if name not in frozen]
    sharded = made(rank, kind, model)
    state = get_model_state_dict(sharded, options=StateDictOptions(ignore_frozen_params=True))
    assert list(state) == names
    options = StateDictOptions(ignore_frozen_params=True, full_state_dict=True, cpu_offload=True)
    assert list(get_model_state_dict(sharded, options=options)) == (names if rank.rank == 0 else [])
    result = set_model_state_dict(sharded, state, options=StateDictOptions(strict=False))
    assert set(result.missing_keys) == frozen


@on_ranks(2)
@wrappers
@told
def test_names(rank: Rank, kind: str) -> None:
    """Checkpoint wrappers, torch.compile, a plain root, ties, several flat parameters: FQNs are as before."""
    plain: Any = nn.Sequential(nn.Linear(3, 3), other_net())
    plain[1].first.requires_grad_(False)
    plain[1].parts[1].up.weight = plain[1].parts[0].up.weight
    reference = copy.deepcopy(plain)
    apply_activation_checkpointing(plain, check_fn=lambda m: isinstance(m, Part))
    plain[1] = made(rank, kind, plain[1])
    for model in (plain, torch.compile(plain)):
        state = get_model_state_dict(model, options=WHOLE)
        assert_dicts_equal(state, reference.state_dict())
        new = {name: torch.full_like(value, 2) for name, value in state.items()}
        set_model_state_dict(model, dict(new), options=WHOLE)
        assert_dicts_equal(get_model_state_dict(model, options=WHOLE), new)
        set_model_state_dict(model, dict(reference.state_dict()) if rank.rank == 0 else {}, options=BROADCAST)
        assert_dicts_equal(whole(get_model_state_dict(model)), reference.state_dict())
        optimizer, other = adam(model), adam(reference)
        for each in (model, reference):
            for parameter in each.parameters():
                parameter.grad = torch.full_like(parameter, 0.5) if parameter.requires_grad else None
        optimizer.step(), other.step()
        expected = get_optimizer_state_dict(reference, other)
        actual = whole(get_optimizer_state_dict(model, optimizer))
        assert actual["state"].keys() == expected["state"].keys()
        set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))
        reference.load_state_dict(get_model_state_dict(model, options=WHOLE))


class Hidden(nn.Module):
    """Saves its layer's parameters as its own, and says so."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_state_dict_post_hook(Hidden.shorten)
        self.register_load_state_dict_pre_hook(Hidden.lengthen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    def shorten(self, state: Any, prefix: str, *_: Any) -> None:
        for name in ("weight", "bias"):
            state[prefix + name] = state.pop(f"{prefix}inner.{name}")

    def lengthen(self, state: Any, prefix: str, *_: Any) -> None:
        for name in ("weight", "bias"):
            if prefix + name in state:
                state[f"{prefix}inner.{name}"] = state.pop(prefix + name)

    def _fqn_modifiers(self) -> dict[str, str]:
        return {"weight": "inner", "bias": "inner"}


@on_ranks(2)
@kinds
@told
def test_modifiers(rank: Rank, kind: str) -> None:
    """``dsd_fqn_modifiers``: modules that save under other names."""
    torch.manual_seed(0)
    plain = nn.Sequential(Hidden())
    reference = copy.deepcopy(plain)
    if kind not in ("flat", "orig"):
        fully_shard(plain[0].inner if kind == "mixed" else plain, mesh=rank.mesh)
    model = plain if kind in ("rows", "unpatched") else FSDP(plain, use_orig_params=kind == "orig")
    options = StateDictOptions(full_state_dict=True, dsd_fqn_modifiers="_fqn_modifiers")
    state = get_model_state_dict(model, options=options)
    assert_dicts_equal(state, get_model_state_dict(reference, options=options))
    new = {name: torch.full_like(value, 4) for name, value in state.items()}
    set_model_state_dict(model, dict(new), options=options)
    assert_dicts_equal(get_model_state_dict(model, options=options), new)


@on_ranks(2)
@wrappers
@told
def test_errors_and_settings(rank: Rank, kind: str) -> None:
    """What differs between ranks is an error on all; what the user has set for ``state_dict()`` is as before it.

    Others' models are left alone.
    """
    model = made(rank, kind, net())
    FSDP.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)
    get_model_state_dict(model)
    state = net().state_dict() if rank.rank == 0 else {"first.weight": torch.ones(DIM, DIM)}
    with pytest.raises(RuntimeError, match="differ between ranks") as caught:
        set_model_state_dict(model, dict(state), options=WHOLE)
    raised_everywhere(rank, caught.value)
    assert FSDP.get_state_dict_type(model).state_dict_type is StateDictType.LOCAL_STATE_DICT
    plain = DistributedDataParallel(net())
    optimizer = adam(plain)
    assert_dicts_equal(get_model_state_dict(plain), net().state_dict())
    assert len(get_optimizer_state_dict(plain, optimizer)["state"]) == len(list(plain.parameters()))


# ---------------------------------------------------------------- optimizers


@on_ranks(2)
@kinds
@told
def test_optimizer_out(rank: Rank, kind: str) -> None:
    """As an unsharded optimizer's: rows, whole, on rank 0, flattened."""
    reference, model = net(), made(rank, kind, net())
    ours, theirs = adam(model), adam(reference)
    step(rank, model, ours, 0, 1, 2)
    step(rank, reference, theirs, 0, 1, 2)
    expected = get_optimizer_state_dict(reference, theirs)
    rows = get_optimizer_state_dict(model, ours)
    assert isinstance(rows["state"]["first.weight"]["exp_avg"], DTensor)  # type: ignore[index, call-overload]
    assert_optimizers_equal(whole(rows), expected)
    assert_optimizers_equal(get_optimizer_state_dict(model, ours, options=WHOLE), expected)
    first = get_optimizer_state_dict(model, ours, options=RANK0)
    if rank.rank == 0:
        assert_optimizers_equal(first, on_cpu(expected))
    else:
        assert not first or not any(first.values())
    flat = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    flattened, wanted = (get_optimizer_state_dict(m, o, options=flat) for m, o in ((model, ours), (reference, theirs)))
    assert flattened.keys() == wanted.keys()
    assert_close(flattened["state.first.weight.exp_avg"], wanted["state.first.weight.exp_avg"], "moment", 1e-4, 1e-6)


OPTIONS = {
    "rows": StateDictOptions(),
    "whole": WHOLE,
    "broadcast": BROADCAST,
    "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
    "whole, flattened": StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True),
}


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "name"), [(KINDS[(i + j) % 5], name) for i, name in enumerate(OPTIONS) for j in (1, 3)]
)
@told
def test_optimizer_in(rank: Rank, kind: str, name: str) -> None:
    """Into a fresh optimizer: it goes on as the one that was saved, with its options."""
    options = OPTIONS[name]
    scalars = kind != "unpatched"  # see test_what_torch_cannot_do
    model = made(rank, kind, net(scalars=scalars))
    optimizer = adam(model)
    step(rank, model, optimizer, 0, 1)
    state, optim_state = get_state_dict(model, optimizer, options=options)
    saved = copy.deepcopy(whole(optim_state))
    optim_state = copy.deepcopy(optim_state)  # torch's optimizers take tensors as they are
    again = made(rank, kind, net(9, scalars=scalars))
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
        assert_equal(whole(found)["state.parts.0.scale.exp_avg_sq"], saved["state.parts.0.scale.exp_avg_sq"], "flat")
    for each, theirs in ((model, optimizer), (again, fresh)):
        step(rank, each, theirs, 3)
    assert_dicts_equal(get_model_state_dict(again, options=WHOLE), get_model_state_dict(model, options=WHOLE))


MAKERS: dict[str, Any] = {
    "adam": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
}


@on_ranks(2)
@pytest.mark.parametrize(("kind", "name"), [(KINDS[i % 4], name) for i, name in enumerate(MAKERS)])
@told
def test_fresh_optimizers(rank: Rank, kind: str, name: str) -> None:
    """To look at a fresh optimizer changes nothing: no step is counted, no hook called; one sees its beginning."""
    model = made(rank, kind, net())
    optimizer, untouched = MAKERS[name](model.parameters()), MAKERS[name](made(rank, kind, net()).parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    told: list[Any] = []
    optimizer.register_step_pre_hook(lambda *a: told.append(a))
    optimizer.register_step_post_hook(lambda *a: told.append(a))
    backward(rank, model)
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    before = whole(get_model_state_dict(model))
    kept = {k: copy.deepcopy(v) for k, v in optimizer.param_groups[0].items() if k != "params"}
    state = get_optimizer_state_dict(model, optimizer)
    assert not told and scheduler.last_epoch == 0 and getattr(optimizer, "_opt_called", False) is False
    assert len(optimizer.state) == len(untouched.state)
    assert {k: v for k, v in optimizer.param_groups[0].items() if k != "params"} == kept
    assert_dicts_equal(whole(get_model_state_dict(model)), before)
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        assert gradient is None or torch.equal(whole(gradient), whole(parameter.grad))
    beginning = {"step": 0.0, "exp_avg": 0.0, "mu_product": 1.0, "sum": 0.5, "mu": 1.0, "eta": 0.1, "ax": 0.0}
    assert name == "sgd" or state["state"].keys() == {n for n, _ in net().named_parameters()}  # type: ignore[union-attr]
    for fqn, values in whole(state)["state"].items():
        for key in beginning.keys() & values.keys():
            assert bool((torch.as_tensor(values[key]) == beginning[key]).all()), (fqn, key, values[key])
    set_optimizer_state_dict(model, optimizer, state)
    assert all(float(values.get("step", 0)) == 0 for values in optimizer.state.values())
    assert_dicts_equal(whole(get_model_state_dict(model)), before)


@told
def save_checkpoint(rank: Rank, kind: str, path: str) -> None:
    model = made(rank, kind, net())
    optimizer = adam(model)
    step(rank, model, optimizer, 0)  # of the mean over ranks that differ, so what is loaded is compared with this
    state, optim_state = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optim": optim_state}, checkpoint_id=path)
    everything = whole({"model": state, "optim": optim_state})
    if rank.rank == 0:
        torch.save(on_cpu(everything), f"{path}.whole")


@told
def load_checkpoint(rank: Rank, kind: str, path: str) -> None:
    model = made(rank, kind, net(3))
    optimizer = adam(model)
    state, optim_state = get_state_dict(model, optimizer)
    dcp.load({"model": state, "optim": optim_state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optim_state)
    expected = torch.load(f"{path}.whole")
    assert_dicts_equal(on_cpu(get_model_state_dict(model, options=WHOLE)), expected["model"])
    held = whole(get_optimizer_state_dict(model, optimizer))
    assert_optimizers_equal(on_cpu(held), expected["optim"], exact=True)
    step(rank, model, optimizer, 1)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((4, "flat"), (2, "rows")),
        ((2, "rows"), (4, "orig")),
        ((2, "orig"), (1, "plain")),
        ((4, "unpatched"), (2, "flat")),
    ],
    ids=str,
)
def test_checkpoints(ranks: RankPool, before: tuple[int, str], after: tuple[int, str], tmp_path: Path) -> None:
    """The usual recipe with torch's checkpoints, between front ends and numbers of ranks, into fresh optimizers."""
    ranks(before[0], save_checkpoint, kind=before[1], path=str(tmp_path / "checkpoint"))
    ranks(after[0], load_checkpoint, kind=after[1], path=str(tmp_path / "checkpoint"))


# ---------------------------------------------------------------- on request


@on_ranks(2)
@pytest.mark.parametrize("form", ["inside", "mixed", "compiled"])
def test_wrappers_refuse(rank: Rank, form: str) -> None:
    """Unless the functions were told of wrappers, all of them raise, wherever the wrapper is, and change nothing."""
    model: nn.Module = net()
    if form == "inside":
        model.last = FSDP(model.last)
    else:
        model = made(rank, "mixed", model)
    optimizer = adam(model)
    if form == "compiled":
        model = torch.compile(model)  # type: ignore[assignment]
    state: Any = net().state_dict()
    optim: Any = get_optimizer_state_dict(plain := net(), adam(plain))
    with enable_torch_state_dict_functions():
        before = whole(get_model_state_dict(model))
    for options in (None, WHOLE, RANK0, BROADCAST):
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
def test_what_torch_cannot_do(rank: Rank) -> None:
    """Loading full optimizer state into ``fully_shard`` fails in torch's own functions if it is flattened, and at the
    next step if there are 0-D parameters. If one of these passes, docs/clients/torch_checkpoint.md has to say so.
    """
    flattened = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    for options, scalars in ((flattened, False), (WHOLE, True)):
        model, again = (made(rank, "unpatched", net(seed, scalars=scalars)) for seed in (0, 1))
        optimizer, fresh = adam(model), adam(again)
        step(rank, model, optimizer, 0)
        state = get_optimizer_state_dict(model, optimizer, options=options)
        with pytest.raises((AssertionError, KeyError)):
            load_and_step(rank, again, fresh, state, options)


def load_and_step(rank: Rank, model: nn.Module, optimizer: Any, state: Any, options: StateDictOptions) -> None:
    set_optimizer_state_dict(model, optimizer, copy.deepcopy(state), options=options)
    step(rank, model, optimizer, 1)


def test_it_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """By whoever asked for it last, in whatever order, also around the drop-in; torch's module is then as it was.

    A torch that lacks names says so, and nothing is changed.
    """
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
        assert functions.FSDP is FSDP  # type: ignore[comparison-overlap]
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


class Passing(torch.optim.Optimizer):
    """As accelerate's: an optimizer by class, which passes on to another."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> None:
        raise AssertionError("may skip steps, or unscale gradients")


def test_optimizers_that_pass_on_to_another() -> None:
    """The other one is given its state."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    give_initial_state(Passing(optimizer))
    assert optimizer.state[weight]["step"] == 0 and not optimizer.state[weight]["exp_avg"].any()
