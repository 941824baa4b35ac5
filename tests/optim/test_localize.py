"""Steps on local tensors: the same bits, the same view of them and the same checkpoints as steps on DTensors."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import math
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import register_optimizer_step_post_hook

import fullshard.ragged
from fullshard import CPUOffloadPolicy, ShardingStrategy, fully_shard, replicate
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.comm import record
from fullshard.engine.ownership import nested_units
from fullshard.optim import localize
from fullshard.optim.local.localize import _is_default, local_step_of
from ranks import Rank, on_ranks

Make = Callable[..., optim.Optimizer]

STOCK: dict[str, tuple[Make, dict[str, Any]]] = {
    "sgd momentum": (optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "adam amsgrad": (optim.Adam, {"lr": 0.1, "amsgrad": True, "maximize": True}),
    "nadam": (optim.NAdam, {"lr": 0.1}),
    "radam": (optim.RAdam, {"lr": 0.1, "weight_decay": 0.1}),
    "adamax": (optim.Adamax, {"lr": 0.1}),
    "adadelta": (optim.Adadelta, {"lr": 0.1}),
    "adagrad": (optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.2, "lr_decay": 0.1}),
    "rmsprop": (optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.9}),
    "adamw foreach": (optim.AdamW, {"lr": 0.1, "foreach": True}),
    "asgd": (optim.ASGD, {"lr": 0.1, "t0": 1.0}),
    "adamw fused": (optim.AdamW, {"lr": 0.1, "fused": True, "amsgrad": True}),
}


class Net(nn.Module):
    """Parameters of all kinds: even ones without gaps between them, uneven, so few rows that some ranks have none,
    without dims, transposed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.even = nn.Sequential(nn.Linear(6, 32), nn.LayerNorm(32), nn.Linear(32, 8))
        self.second = nn.Sequential(nn.Linear(7, 7), nn.LayerNorm(7))
        self.last = nn.Linear(7, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.turned = nn.Parameter(torch.randn(5, 4).t())
        self.spare = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, *, spare: bool = False) -> torch.Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x) + self.even(x)[:, :7])))
        if spare:
            x = x + self.spare(x[:, :3]).sum()
        return self.last(x) * self.scale + self.turned.square().mean()


def build(rank: Rank, *, frozen: bool = False) -> Net:
    torch.manual_seed(3)
    net = Net()
    if frozen:
        net.second[0].bias.requires_grad_(False)
    fully_shard(net.second, mesh=rank.mesh)
    return fully_shard(net, mesh=rank.mesh)


def backward(rank: Rank, net: nn.Module, step: int, **options: Any) -> None:
    batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
    net(batch.chunk(rank.world_size)[rank.rank], **options).square().mean().backward()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def assert_same(one: Any, other: Any, what: str) -> None:
    """Bitwise, and of the same kind."""
    assert type(one) is type(other), what
    if isinstance(one, torch.Tensor):
        if isinstance(one, DTensor):
            assert one._spec == other._spec, what
        one, other = local(one), local(other)
        assert one.dtype is other.dtype and one.shape == other.shape and one.stride() == other.stride(), what
        assert torch.equal(one, other), f"{what}: {one} is not {other}"
    else:
        assert one == other, what


def assert_same_view(
    model: nn.Module,
    optimizer: optim.Optimizer,
    model2: nn.Module,
    optimizer2: optim.Optimizer,
    *,
    ordered: bool = True,
) -> None:
    """Parameters, state and groups are the same to the last bit."""
    names = [name for name, _ in model.named_parameters()]
    for name, p, q in zip(names, model.parameters(), model2.parameters(), strict=True):
        assert_same(p, q, name)
        assert (p in optimizer.state) == (q in optimizer2.state), name
        mine, theirs = optimizer.state.get(p, {}), optimizer2.state.get(q, {})
        assert (list if ordered else sorted)(mine) == (list if ordered else sorted)(theirs), name
        for key in mine:
            assert_same(mine[key], theirs[key], f"{name}.{key}")
    assert len(optimizer.state) == len(optimizer2.state)
    one, other = optimizer.state_dict(), optimizer2.state_dict()
    assert str(one["param_groups"]) == str(other["param_groups"])
    assert list(one["state"]) == list(other["state"])
    assert repr(optimizer) == repr(optimizer2)


class Pair:
    """The same model and optimizer twice: as made, which steps local tensors, and on DTensors."""

    def __init__(
        self, rank: Rank, make: Callable[[nn.Module], optim.Optimizer], *, frozen: bool = False, **options: Any
    ) -> None:
        self.rank = rank
        self.models = build(rank, frozen=frozen), build(rank, frozen=frozen)
        self.optimizers = make(self.models[0]), localize(make(self.models[1]), enable=False)
        if options:
            localize(self.optimizers[0], **options)
        self.count = 0

    def __iter__(self) -> Iterator[tuple[Net, optim.Optimizer]]:
        return zip(self.models, self.optimizers, strict=True)

    def step(self, **options: Any) -> None:
        self.count += 1
        for model, optimizer in self:
            backward(self.rank, model, self.count, **options)
            optimizer.step()
            optimizer.zero_grad()

    def check(self, *, ordered: bool = True) -> None:
        assert_same_view(self.models[0], self.optimizers[0], self.models[1], self.optimizers[1], ordered=ordered)


def is_local(optimizer: optim.Optimizer) -> bool:
    """True if it has made a step on local tensors."""
    return local_step_of(optimizer) is not None


def adamw(model: nn.Module, **options: Any) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=0.1, **options)


def assert_gaps_are_zero(model: nn.Module) -> None:
    """What no parameter lies in, in shard buffers."""
    for unit in nested_units(model):
        for bucket in unit.buckets:
            left = bucket.shard_buffer.clone()
            for parameter in bucket.parameters:
                offset = (parameter.local.data_ptr() - bucket.shard_buffer.data_ptr()) // left.itemsize
                if parameter.local.numel():
                    left[offset : offset + parameter.local.numel()] = 0
            assert not left.any(), left


@on_ranks(2)
def test_stock_optimizers_step_to_the_same_bits(rank: Rank) -> None:
    """Every elementwise optimizer of torch's: parameters and the user's view of state, after three steps."""
    emulated = next(build(rank).parameters()).device.type == "emulated"  # with kernels of CPUs, which round otherwise
    for name, (kind, options) in STOCK.items():
        pair = Pair(rank, lambda model, k=kind, o=options: k(model.parameters(), **o), frozen=True)
        for _ in range(3):
            pair.step()
            if "fused" not in name or not emulated:
                pair.check()
        assert_gaps_are_zero(pair.models[0])
        assert is_local(pair.optimizers[0]), name


class Odd(nn.Module):
    """Parameters of all sizes, some of them without a whole number of vectors."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        sizes = (64, 32, 8, 8, 128, 32, 40)
        self.all = nn.ParameterList(nn.Parameter(torch.randn(size, 2, dtype=dtype)) for size in sizes)

    def forward(self) -> None:
        raise NotImplementedError


@pytest.mark.cpu_only("kernels of accelerators round all elements alike")
@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_ends_of_vectors(rank: Rank, dtype: torch.dtype) -> None:
    """Each parameter is rounded as a plain tensor is. Fused SGD cannot step DTensors."""
    for options in ({"fused": True}, {"foreach": True}, {"foreach": False}):
        for kind in (optim.SGD, optim.AdamW, optim.Adagrad):
            model = fully_shard(Odd(dtype), mesh=rank.mesh)
            mine, plain = list(model.parameters()), [nn.Parameter(local(p).clone()) for p in model.parameters()]
            more: Any = options | ({"momentum": 0.9} if kind is optim.SGD else {})
            optimizer, reference = kind(mine, lr=0.1, **more), kind(plain, lr=0.1, **more)
            for _ in range(3):
                for q, flat in zip(plain, flat_gradients(mine), strict=True):
                    q.grad = flat.clone()
                optimizer.step()
                reference.step()
                for p, q in zip(mine, plain, strict=True):
                    assert_same(local(p), q.detach(), f"{kind.__name__}, {options}")


def flat_gradients(parameters: list[Any]) -> list[torch.Tensor]:
    """Give the parameters gradients that lie one after another; return this rank's."""
    memory = torch.randn(sum(local(p).numel() for p in parameters)).to(parameters[0].dtype)
    pieces = [
        piece.view(local(p).shape)
        for p, piece in zip(parameters, memory.split([local(p).numel() for p in parameters]), strict=True)
    ]
    for p, piece in zip(parameters, pieces, strict=True):
        p.grad = DTensor.from_local(piece, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
    return pieces


@on_ranks(2)
def test_rprop_steps_as_on_plain_tensors(rank: Rank) -> None:
    """It cannot step DTensors at all; it does to local tensors what it does to plain ones."""
    net = build(rank)
    plain = [nn.Parameter(local(p).clone()) for p in net.parameters()]
    optimizer, reference = optim.Rprop(net.parameters()), optim.Rprop(plain)
    for step in range(3):
        backward(rank, net, step, spare=True)
        for p, q in zip(net.parameters(), plain, strict=True):
            q.grad = local(p.grad).clone()
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
    for p, q in zip(net.parameters(), plain, strict=True):
        assert_same(local(p), q.detach(), "parameter")
        assert list(optimizer.state[p]) == list(reference.state[q])
        for name, entry in reference.state[q].items():
            assert_same(local(optimizer.state[p][name]), entry, name)
            assert isinstance(optimizer.state[p][name], DTensor) == (name != "step")


@on_ranks(2)
def test_parameters_without_gradient_are_left_out(rank: Rank) -> None:
    """Their step does not advance, runs come apart around them and together again; no collective is run for it. A
    parameter in a run whose gradient the user drops once is stepped alone from then on, with its own count.
    """
    pair = Pair(rank, adamw)
    for spare, dropped in ((False, ""), (False, ""), (True, ""), (True, "even.1.weight"), (False, ""), (True, "")):
        pair.count += 1
        for model, optimizer in pair:
            backward(rank, model, pair.count, spare=spare)
            if dropped:
                model.get_parameter(dropped).grad = None
            with record() as collectives:
                optimizer.step()
            assert not list(collectives)
            optimizer.zero_grad()
        pair.check()
    model, optimizer = pair.models[0], pair.optimizers[0]
    weight = model.even[1].weight
    assert optimizer.state[weight]["step"] == 5 and optimizer.state[model.spare.weight]["step"] == 3
    assert {int(state["step"]) for state in optimizer.state.values()} == {3, 5, 6}


@on_ranks(2)
def test_state_dicts_are_interchangeable(rank: Rank) -> None:
    """Through files, to DTensors and back, also with steps that differ in a run."""
    pair = Pair(rank, adamw)
    pair.step(spare=True)
    pair.step(spare=True)
    for _ in range(2):
        pair.models[0].second[0].weight.grad = pair.models[1].second[0].weight.grad = None
        pair.step()
        dicts = [io_round_trip(optimizer.state_dict()) for optimizer in pair.optimizers]
        pair.optimizers[0].load_state_dict(dicts[1])
        pair.optimizers[1].load_state_dict(dicts[0])
        pair.check()
        for _ in range(2):
            pair.step(spare=True)
            pair.check()
    storages = [s["step"].data_ptr() for s in pair.optimizers[0].state_dict()["state"].values()]
    assert len({*storages}) == len(storages), "numbers are shared"


def io_round_trip(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@on_ranks(2)
def test_what_users_write_into_state_counts(rank: Rank) -> None:
    """Numbers and moments edited in place, replaced, cleared, and put in by hand."""
    pair = Pair(rank, adamw)

    def edit(change: Callable[[optim.Optimizer, nn.Parameter], object]) -> None:
        for model, optimizer in pair:
            change(optimizer, model.second[0].weight)
        pair.step()
        pair.check()

    pair.step()
    pair.step()
    edit(lambda o, p: o.state[p]["step"].fill_(7))
    assert pair.optimizers[0].state[pair.models[0].second[0].weight]["step"] == 8
    edit(lambda o, p: o.state[p]["exp_avg"].mul_(2))
    edit(lambda o, p: o.state[p].update(exp_avg=o.state[p]["exp_avg"] * 3))
    edit(lambda o, p: o.state.pop(p))
    edit(lambda o, p: o.state.clear())
    edit(lambda o, p: o.state[p].update(step=torch.tensor(3.0)))
    edit(lambda o, p: o.param_groups[0].update(lr=0.02, weight_decay=0.5, betas=(0.5, 0.9)))
    edit(lambda o, p: o.state[p].update(note="mine"))
    edit(lambda o, p: o.state.clear())
    edit(lambda o, p: o.state[p]["step"].data.fill_(9))
    assert pair.optimizers[0].state[pair.models[0].second[0].weight]["step"] == 10
    edit(lambda o, p: setattr(o.state[p]["step"], "data", torch.ones_like(o.state[p]["step"])))
    edit(lambda o, p: local(o.state[p]["exp_avg"]).set_(torch.ones_like(local(o.state[p]["exp_avg"]))))
    edit(lambda o, p: setattr(local(o.state[p]["exp_avg"]), "data", torch.ones_like(local(o.state[p]["exp_avg"]))))
    edit(lambda o, p: o.state.update({"another key": o.state.pop(next(reversed(o.state)))}))


@on_ranks(2)
def test_options_that_change_what_is_kept(rank: Rank) -> None:
    """Momentum that comes later, and ends again."""
    pair = Pair(rank, lambda model: optim.SGD(model.parameters(), lr=0.01))
    for momentum in (0.0, 0.9, 0.9, 0.0, 0.9):
        for _, optimizer in pair:
            optimizer.param_groups[0]["momentum"] = momentum
        pair.step()
        pair.check()


@on_ranks(2)
def test_groups(rank: Rank) -> None:
    """Parameters of several groups are not stepped together; a group can be added later."""

    def make(model: nn.Module) -> optim.Optimizer:
        named = dict(model.named_parameters())
        biases = [p for n, p in named.items() if n.endswith("bias")]
        weights = [p for n, p in named.items() if n.endswith("weight") and "spare" not in n]
        return optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0, "lr": 0.02}], lr=0.1)

    pair = Pair(rank, make)
    pair.step(spare=True)
    pair.check()
    for model, optimizer in pair:
        optimizer.add_param_group({"params": [model.spare.weight, model.scale, model.turned], "lr": 0.05})
        model.zero_grad()
    for _ in range(3):
        pair.step(spare=True)
        pair.check()


@on_ranks(2)
def test_schedulers_hooks_and_closures(rank: Rank) -> None:
    """They see the user's view; a scheduler that was made before counts steps as one that was made after."""
    net = build(rank)
    optimizer = adamw(net)
    first = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    second = optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    seen: list[str] = []

    def look(name: str) -> Callable[..., None]:
        def hook(found: optim.Optimizer, *_: Any) -> None:
            assert all(isinstance(p, DTensor) for group in found.param_groups for p in group["params"])
            assert all(isinstance(p, DTensor) for p in found.state)
            done = [int(state["step"]) for state in found.state.values()]
            steps = len(seen) // 4 + (name not in ("pre", "closure"))
            assert done == [steps] * len(done) and bool(done) == bool(steps), name
            seen.append(name)

        return hook

    optimizer.register_step_pre_hook(look("pre"))
    optimizer.register_step_post_hook(look("post"))
    everyones = register_optimizer_step_post_hook(look("global"))

    def closure() -> torch.Tensor:
        assert torch.is_grad_enabled()
        look("closure")(optimizer)
        optimizer.zero_grad()
        backward(rank, net, 0)
        return torch.tensor(3.0)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert optimizer.step(closure) == 3
            first.step()
            second.step()
    everyones.remove()
    assert seen == ["pre", "closure", "post", "global"] * 2
    assert all(state["step"] == 2 for state in optimizer.state.values())


@on_ranks(2)
def test_hooks_that_use_their_arguments(rank: Rank) -> None:
    """The optimizer among the arguments of hooks has parameters, gradients and state, as in torch."""

    def halve(_: optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in args[0].param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)

    def decay(_: optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in args[0].param_groups:
            group["lr"] *= 0.5
        for p, state in args[0].state.items():
            state["exp_avg"].mul_(0.5)
            p.data.mul_(0.9)

    pair = Pair(rank, lambda model: adamw(model, eps=0.1))
    first, _ = pair.models
    for _, optimizer in pair:
        optimizer.register_step_pre_hook(halve)
        optimizer.register_step_post_hook(decay)
    for _ in range(3):
        pair.step()
        pair.check()
    assert is_local(pair.optimizers[0]) and pair.optimizers[0].param_groups[0]["lr"] == 0.1 / 8
    # A hook that is registered after the first step comes before the local step, too.
    pair.optimizers[0].register_step_pre_hook(lambda found, args, _: seen.append(args[0] is found))
    seen: list[bool] = []
    backward(rank, first, 9)
    pair.optimizers[0].step()
    assert seen == [True]


@on_ranks(2)
def test_steps_inside_of_steps(rank: Rank) -> None:
    """A pre-hook, or a closure, that steps the same optimizer."""
    for inside in ("hook", "closure"):
        pair = Pair(rank, lambda model: optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        for model, optimizer in pair:
            busy: list[bool] = []

            def trial(found: optim.Optimizer, *_: Any, busy: Any = busy) -> None:
                if not busy:
                    busy.append(True)
                    found.step()
                    busy.clear()

            def closure(model: Net = model, optimizer: Any = optimizer, trial: Any = trial) -> torch.Tensor:
                optimizer.zero_grad()
                backward(rank, model, 1)
                trial(optimizer)
                return torch.tensor(2.0)

            if inside == "hook":
                optimizer.register_step_pre_hook(trial)
            for step in range(3):
                backward(rank, model, step)
                assert optimizer.step(None if inside == "hook" else closure) == (None if inside == "hook" else 2.0)
                optimizer.zero_grad()
        pair.check()
        assert is_local(pair.optimizers[0])


@on_ranks(2)
def test_parameters_that_are_listed_twice(rank: Rank) -> None:
    """They are stepped twice, and count two steps."""
    pair = Pair(rank, adamw)
    for model, optimizer in pair:
        optimizer.param_groups[0]["params"].append(model.first.weight)
    for _ in range(3):
        pair.step()
        pair.check()
    assert pair.optimizers[0].state[pair.models[0].first.weight]["step"] == 6
    assert is_local(pair.optimizers[0])


@on_ranks(2)
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP], ids=str)
def test_an_optimizer_that_stepped_before_wrapping(rank: Rank, strategy: ShardingStrategy) -> None:
    """It goes on with the original parameters: also those that are unsharded after a forward for a log."""

    def losses(*, keep: bool) -> list[float]:
        torch.manual_seed(0)
        model, found = Net(), []
        optimizer = optim.SGD(model.parameters(), lr=0.05)
        model(torch.ones(2, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        wrapped = FSDP(model, use_orig_params=True, sharding_strategy=strategy, device_mesh=rank.mesh)
        if not keep:
            optimizer = optim.SGD(wrapped.parameters(), lr=0.05)
        for _ in range(3):
            loss = wrapped(torch.ones(2, 6)).square().mean()
            loss.backward()
            wrapped(torch.ones(2, 6))
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss))
        return found

    kept = losses(keep=True)
    assert kept == losses(keep=False) and kept[0] > kept[1] > kept[2]


@on_ranks(2)
def test_dtensors_of_others_that_move(rank: Rank) -> None:
    """A DTensor that is not fullshard's is given other memory."""
    pair, others = Pair(rank, adamw), []
    for _, optimizer in pair:
        generator = torch.Generator().manual_seed(1)
        other = nn.Parameter(DTensor.from_local(torch.randn(4, 3, generator=generator), rank.mesh, [Replicate()]))
        optimizer.add_param_group({"params": [other]})
        others.append(other)
    for step in range(4):
        for other in others:
            other.square().sum().backward()
            if step == 2:
                other._local_tensor.data = other._local_tensor.clone()
        pair.step()
        pair.check()
        assert torch.equal(local(others[0]), local(others[1]))


@on_ranks(2)
def test_an_exception_leaves_the_users_view(rank: Rank) -> None:
    """And the next step goes on from there."""
    net = build(rank)
    optimizer = adamw(net)
    backward(rank, net, 0)
    optimizer.step()
    optimizer.param_groups[0]["betas"] = None
    groups, state = optimizer.param_groups, optimizer.state
    with pytest.raises(TypeError):
        optimizer.step()
    assert optimizer.param_groups is groups and optimizer.state is state
    assert all(isinstance(p, DTensor) for p in optimizer.state)
    optimizer.param_groups[0]["betas"] = (0.9, 0.99)
    optimizer.step()
    assert all(state["step"] == 2 for state in optimizer.state.values())


class FailingError(Exception):
    """Of a closure."""


@on_ranks(2)
def test_who_else_wraps_steps(rank: Rank) -> None:
    """A closure that raises, hooks that replace what is stepped, methods kept from before, and copies."""
    pair = Pair(rank, adamw)
    pair.step()

    def fail() -> float:
        raise FailingError

    for model, optimizer in pair:
        backward(rank, model, 4)
        with pytest.raises(FailingError):
            optimizer.step(fail)
        kept = type(optimizer).step.__get__(optimizer)  # as accelerate and gradient scalers do
        optimizer.step = lambda *args, kept=kept, **options: kept(*args, **options)
        optimizer.step()
        del optimizer.step
        itself = optimizer.register_step_pre_hook(lambda found, args, options: ((found, *args[1:]), options))
        halved = optimizer.register_step_pre_hook(lambda found, *_: found.param_groups[0].update(lr=0.05))
        optimizer.step()
        itself.remove()
        halved.remove()
        optimizer.step(closure=lambda: 3)
    pair.check()
    copies = [copy.deepcopy((model, optimizer)) for model, optimizer in pair]
    for model, optimizer in copies:
        assert next(model.parameters()) is optimizer.param_groups[0]["params"][0]
        backward(rank, model, 9)
        optimizer.step()
    assert_same_view(copies[0][0], copies[0][1], copies[1][0], copies[1][1])
    pair.check()
    pickle.dumps(pair.optimizers[0].state_dict())


@on_ranks(2)
@pytest.mark.parametrize("fused", [False, True], ids=["loop", "fused"])
def test_gradient_scalers(rank: Rank, fused: bool) -> None:
    """A step with an infinite gradient is left out, also by an optimizer that unscales gradients itself."""
    pair = Pair(rank, lambda model: adamw(model, fused=fused))
    scalers = [fullshard.ShardedGradScaler("cpu", init_scale=4.0) for _ in pair]
    for number in range(3):
        for scaler, (model, optimizer) in zip(scalers, pair, strict=True):
            batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(number))
            scaler.scale(model(batch.chunk(2)[rank.rank]).square().mean()).backward()
            if number == 1:
                local(model.even[0].weight.grad)[0, 0] = math.inf
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        pair.check()
    assert pair.optimizers[0].state[pair.models[0].even[0].weight]["step"] == 2
    assert [scaler.get_scale() for scaler in scalers] == [2.0, 2.0]


@on_ranks(2)
def test_compiled_steps(rank: Rank) -> None:
    """``torch.compile`` sees DTensors, or runs the hooks; either way the step is the same, also beside others."""
    models = [fully_shard(nn.Linear(4, 4), mesh=rank.mesh) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [optim.SGD(model.parameters(), lr=0.1, momentum=0.5, foreach=True) for model in models]
    compiled = torch.compile(optimizers[0].step, backend="eager")
    for number in range(4):
        for step, model in zip(
            (compiled if number in (1, 2) else optimizers[0].step, optimizers[1].step), models, strict=True
        ):
            model(torch.full((2, 4), number + 1.0)).square().mean().backward()
            step()
            model.zero_grad()
        assert_same_view(models[0], optimizers[0], models[1], optimizers[1])


@on_ranks(2)
def test_adopted_parameters_and_other_gradients(rank: Rank) -> None:
    """A model that moves to another dtype, gradients that the user has computed or put elsewhere."""
    pair = Pair(rank, lambda model: optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=True))
    pair.step()
    pair.step()
    for model, _ in pair:
        model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    pair.step()
    pair.check()
    for change in (lambda g: g * 2, lambda g: g.clone()):
        for model, optimizer in pair:
            backward(rank, model, 5)
            for p in model.parameters():
                if p.grad is not None:
                    p.grad = change(p.grad)
            optimizer.step()
            optimizer.zero_grad()
        pair.check()
    for model, optimizer in pair:
        model.double()
        optimizer.state.clear()
    for _ in range(3):
        pair.count += 1
        for model, optimizer in pair:
            model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        pair.check()


PLACES: dict[str, Callable[[list[Any]], list[Any]]] = {
    "as the shards lie": lambda parts: parts,
    "backwards": lambda parts: parts[::-1],
    "in pairs": lambda parts: [parts[i ^ 1] if i ^ 1 < len(parts) else part for i, part in enumerate(parts)],
    "each one element repeated": lambda parts: parts,
}


@on_ranks(2)
@pytest.mark.parametrize("sharing", [fully_shard, replicate], ids=lambda f: f.__name__)
def test_gradients_in_memory_of_the_users(rank: Rank, sharing: Any) -> None:
    """Views of one tensor, in any order, with other things in between: only what gradients are is read and written."""

    def put(pairs: list[tuple[DTensor, nn.Parameter]], how: str, gap: int) -> torch.Tensor:
        """Give each pair the same gradients. True where no gradient lies in the memory of the first ones'."""
        memory, offset = torch.full((400,), math.inf), 0
        for p, q in PLACES[how](
            sorted(pairs, key=lambda pair: local(pair[0]).data_ptr() if local(pair[0]).numel() else 0)
        ):
            q.grad = torch.full_like(q, offset + 1.0)
            view = memory.as_strided(q.shape, q.stride(), offset).copy_(q.grad)
            if how == "each one element repeated":
                view = memory.as_strided(q.shape, (0,) * q.dim(), offset)
            p.grad = DTensor.from_local(view, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
            offset += q.numel() + gap
        return memory

    class Many(Net):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            sizes = ((4,), (6, 3), (), (8, 4), (4,), (), (12,), (16, 2), (16,))
            self.all = nn.ParameterList(nn.Parameter(torch.randn(size)) for size in sizes)

    for how, gap in itertools.product(PLACES, (0, 1, 3, 16)):
        model = sharing(Many(), mesh=rank.mesh)
        options = {"lr": 0.1, "momentum": 0.9, "nesterov": True}
        options["foreach"] = how != "each one element repeated"  # which adds the momentum to the gradients in place
        optimizer = optim.SGD(model.parameters(), **options)
        plain = optim.SGD([nn.Parameter(local(p).clone()) for p in model.parameters()], **options)
        pairs = [*zip(model.parameters(), plain.param_groups[0]["params"], strict=True)]
        for where in ("as the shards lie", how, how):
            memory = put(pairs, where, gap)
            before = memory.isinf()
            optimizer.step()
            plain.step()
            for p, q in pairs:
                assert_same(local(p), q.detach(), f"parameter, {where}, {gap}")
                assert torch.equal(local(p.grad), q.grad), (where, gap)
            assert torch.equal(memory.isinf(), before), (where, gap)


class Signs(optim.Optimizer):
    """A user's: counts in Python, replaces its state, and writes into its group and under a name of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "seen": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["seen"] = group["seen"] + 1
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["count"] = state.get("count", 0) + 1
                    state["mean"] = p.grad if "mean" not in state else state["mean"] * 0.5 + p.grad
                    p.add_(torch.sign(state["mean"]), alpha=-group["lr"] / state["count"])
        self.state["all"] = {"steps": self.state.get("all", {}).get("steps", 0) + 1}


@on_ranks(2)
def test_an_optimizer_that_the_user_vouches_for(rank: Rank) -> None:
    """It is stepped on pieces, whatever it does with its state."""
    with pytest.warns(UserWarning, match="elementwise=True"):
        assert type(localize(Signs([nn.Parameter(torch.ones(2))]))) is Signs
    pair = Pair(rank, lambda model: Signs(model.parameters()), elementwise=True)
    for spare in (False, True, True, False):
        pair.step(spare=spare)
        pair.check()
        assert_gaps_are_zero(pair.models[0])
    for _, optimizer in pair:
        optimizer.state.update({p: dict(entries) for p, entries in optimizer.state.items()})
    pair.step(spare=True)
    pair.check()
    assert pair.optimizers[0].state["all"] == {"steps": 5}
    assert pair.optimizers[0].param_groups[0]["seen"] == 5


class Trainable(optim.Optimizer):
    """Steps what requires a gradient."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad and p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])


@on_ranks(2)
def test_steps_that_ask_what_is_trained(rank: Rank) -> None:
    """Local tensors require gradients where the parameters do, also if that changes."""
    pair = Pair(rank, lambda model: Trainable(model.parameters()), elementwise=True)
    before = local(pair.models[0].first.weight).clone()
    pair.step()
    assert is_local(pair.optimizers[0])
    assert not torch.equal(before, local(pair.models[0].first.weight))
    for frozen in (True, False):
        for model, optimizer in pair:
            backward(rank, model, 1)
            model.even[0].weight.requires_grad_(not frozen)  # its gradient stays
            optimizer.step()
            optimizer.zero_grad()
        pair.check()


@on_ranks(2)
def test_a_step_that_calls_another(rank: Rank) -> None:
    """A subclass calls the step of its base class, around which torch runs hooks too."""
    optim.AdamW([nn.Parameter(torch.ones(1))])  # torch adds the hooks when the class is used first
    pair = Pair(rank, lambda model: Changed(model.parameters(), lr=0.1), elementwise=True)
    seen: list[int] = []
    pair.optimizers[0].register_step_post_hook(
        lambda found, *_: seen.append(sum(isinstance(p, DTensor) for p in found.state))
    )
    for _ in range(3):
        pair.step()
        pair.check()
    assert seen == [len(pair.optimizers[0].state)] * 3


class Subclass(optim.AdamW):
    """Changes nothing that matters."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none=True)


class Changed(optim.AdamW):
    """Changes what matters."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Finalized(optim.AdamW):
    """Has what a second object of its class would disturb: a finalizer, slots, a property, attributes that count."""

    __slots__ = ("count",)
    finalized = 0

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, **options)
        self.count, self.lock = 0, threading.RLock()

    def __del__(self) -> None:
        type(self).finalized += 1

    def __getattr__(self, name: str) -> Any:
        if name == "missing":
            return "found"
        raise AttributeError(name)

    @property
    def trained(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "lock"}


class FinalizedStep(Finalized):
    """Uses it all in a step of its own, and steps what the property returns."""

    def extra(self) -> None:
        for p in self.trained:
            p.grad.mul_(0.5)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with self.lock:
            assert self.missing == "found" and self.count == 0
            self.extra()
            self.note = self.__dict__.get("note", 0) + 1
            return super().step(closure)


@on_ranks(2)
@pytest.mark.parametrize("kind", [Finalized, FinalizedStep], ids=lambda kind: kind.__name__)
def test_no_other_optimizer_is_made(rank: Rank, kind: type[Finalized]) -> None:
    """A step finalizes nothing and counts once; hooks get the optimizer itself, and may keep it."""
    options = {"elementwise": True} if kind is FinalizedStep else {}
    pair = Pair(rank, lambda model: kind(model.parameters(), lr=0.1), **options)
    first = pair.optimizers[0]
    seen: list[Any] = []
    hooks = (
        first.register_step_pre_hook(lambda found, args, _: seen.append(args[0])),
        first.register_step_post_hook(lambda found, args, _: seen.append(args[0])),
    )
    before = kind.finalized
    for _ in range(3):
        pair.step(spare=True)
        pair.check()
    gc.collect()
    assert kind.finalized == before and is_local(first)
    assert len(seen) == 6 and all(each is first for each in seen)
    assert vars(first).get("note") == vars(pair.optimizers[1]).get("note")
    for hook in hooks:
        hook.remove()
    pickle.dumps(vars(first)["_fullshard_local_step"])
    _, copied = copy.deepcopy((pair.models[0], pair.optimizers[1]))
    assert type(copied) is kind


@on_ranks(2)
@pytest.mark.parametrize("front", ["per_parameter", "ragged", "wrapper", "flat"])
@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
def test_memory_between_steps(rank: Rank, front: str, options: dict[str, Any]) -> None:
    """An optimizer keeps nothing alive but its state and parameters: neither gradients, nor state that was replaced."""
    torch.manual_seed(3)
    net: Any = nn.Sequential(nn.Linear(6, 32), nn.Linear(32, 3))
    if front in ("wrapper", "flat"):
        net = FSDP(net, process_group=rank.group, use_orig_params=front == "wrapper")
    else:
        net = fully_shard(net, mesh=rank.mesh, **({"layout": "ragged"} if front == "ragged" else {}))
    optimizer = adamw(net, **options)

    def refs(values: Any) -> list[Any]:
        found = [value for value in values if value is not None and value.dim()]
        return [weakref.ref(value._local_tensor if isinstance(value, DTensor) else value) for value in found]

    def alive(found: list[Any]) -> int:
        gc.collect()
        return sum(ref() is not None for ref in found)

    def move(state: dict[str, Any]) -> None:
        state.update({name: entry.clone() for name, entry in state.items()})

    changes: dict[str, Callable[[], object]] = {
        "moved": lambda: [move(state) for state in optimizer.state.values()],
        "loaded": lambda: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
        "cleared": lambda: optimizer.state.clear(),
        "emptied": lambda: (optimizer.state.clear(), optimizer.param_groups.clear()),
    }
    for how, change in changes.items():
        for _ in range(2):
            net(torch.ones(2, 6)).square().mean().backward()
            optimizer.step()
        gradients = refs(p.grad for p in net.parameters())
        state = refs(entry for own in optimizer.state.values() for entry in own.values())
        assert alive(gradients) == len(gradients) > 0 and alive(state) == len(state) > 0
        optimizer.zero_grad(set_to_none=True)
        assert not alive(gradients), how
        change()
        assert not alive(state), how
    weights = refs(net.parameters())
    net = None
    assert not alive(weights)


def test_errors() -> None:
    """Optimizers that cannot be localized are left as they are, and a warning says why."""
    weight = nn.Parameter(torch.ones(4, 4))
    others = {
        "inner products": optim.LBFGS([weight]),
        "rows and columns": optim.Adafactor([weight]),
        "full matrices": optim.Muon([weight]),
        "sparse gradients": optim.SparseAdam([weight]),
        "differentiable": optim.SGD([weight], differentiable=True),
        "not known": Changed([weight]),
    }
    for reason, optimizer in others.items():
        with pytest.warns(UserWarning, match=reason):
            assert localize(optimizer) is optimizer
        assert local_step_of(optimizer) is None
    with pytest.raises(TypeError, match=r"expected a torch\.optim\.Optimizer, found Linear"):
        localize(nn.Linear(2, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = local_step_of(localize(Subclass([weight])))
        assert step is not None


class ScheduleFree(optim.Optimizer):
    """As an optimizer of schedulefree: counts steps in its groups, and keeps a second copy of the weights."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "k": 0, "train_mode": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert self.param_groups[0]["train_mode"]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if "z" not in state:
                        state["z"] = torch.clone(p, memory_format=torch.preserve_format)
                    state["z"].sub_(p.grad, alpha=group["lr"])
                    p.lerp_(end=state["z"], weight=1 / group["k"])
        return loss


@on_ranks(2)
def test_who_steps_is_local(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known classes with sharded parameters, without a warning; whoever else, and whoever is told not to, does not."""
    known = type("SGDScheduleFree", (ScheduleFree,), {"__module__": "schedulefree.sgd_schedulefree"})
    known.step = ScheduleFree.step
    monkeypatch.setattr(ScheduleFree.step, "__module__", "schedulefree.sgd_schedulefree")
    expected = {Subclass: True, known: True, ScheduleFree: False, Changed: False, optim.SGD: True}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind, is_known in expected.items():
            pair = Pair(rank, lambda model, k=kind: k(model.parameters()))
            for _ in range(2):
                pair.step()
            pair.check()
            assert (local_step_of(pair.optimizers[0]) is not None) == is_known, kind
            assert local_step_of(pair.optimizers[1]) is None
    plain = nn.Parameter(torch.ones(2))
    plain.grad = torch.ones(2)
    others = {
        "plain parameters": optim.SGD([plain], lr=0.5),
        "autograd": optim.SGD(build(rank).parameters(), differentiable=True),
    }
    with monkeypatch.context() as patch:
        patch.setenv("FULLSHARD_LOCAL_OPTIMIZERS", "0")
        _is_default.cache_clear()
        others["environment"] = optim.SGD(build(rank).parameters())
        for why, optimizer in others.items():
            optimizer.step()
            assert local_step_of(optimizer) is None, why
    _is_default.cache_clear()
    assert torch.equal(plain, torch.full((2,), 0.5))


@on_ranks(2)
def test_tensors_in_groups(rank: Rank) -> None:
    """A learning rate that is a tensor, also a DTensor, which plain tensors cannot be mixed with."""
    rates = [torch.tensor(0.1) for _ in range(2)]
    pair = Pair(rank, lambda model: optim.AdamW(model.parameters(), lr=rates.pop()))
    pair.step()
    pair.check()
    for _, optimizer in pair:
        optimizer.param_groups[0]["lr"].fill_(0.2)
    pair.step()
    pair.check()
    for _, optimizer in pair:
        rate = DTensor.from_local(torch.tensor(0.3), rank.mesh, [Replicate()])
        optimizer.param_groups[0]["lr"] = rate
    pair.step()
    assert pair.optimizers[0].state[pair.models[0].scale]["step"] == 3
    pair.check()


@on_ranks(2)
def test_lists_of_all_kinds(rank: Rank) -> None:
    """Plain and sparse gradients, a 2-D mesh, another dtype and an offloaded unit in one optimizer."""

    def make_model(seed: int = 5) -> nn.ModuleDict:
        torch.manual_seed(seed)
        model = nn.ModuleDict(
            {
                "plain": nn.Linear(6, 6),
                "sparse": nn.Embedding(5, 6, sparse=True),
                "mesh": nn.Linear(6, 6),
                "bf16": nn.Linear(6, 6).bfloat16(),
                "offloaded": nn.Linear(6, 6),
                "complex": nn.Linear(6, 6, dtype=torch.complex64),
            }
        )
        fully_shard(model["mesh"], mesh=rank.make_mesh(1, 2, names=("replicate", "shard")))
        fully_shard(model["bf16"], mesh=rank.mesh)
        fully_shard(model["offloaded"], mesh=rank.mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
        fully_shard(model["complex"], mesh=rank.mesh)
        return model

    def run(model: nn.ModuleDict, step: int) -> None:
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(step))
        x = model["plain"](x) + model["sparse"](torch.tensor([0, 1, 3]))
        x = model["offloaded"](model["mesh"](x))
        x = model["bf16"](x.bfloat16()).float()
        model["complex"](x.cfloat()).abs().square().mean().backward()

    for make in (lambda m: optim.SGD(m.parameters(), lr=0.01), lambda m: optim.Adagrad(m.parameters(), lr=0.01)):
        models = make_model(), make_model()
        optimizers = make(models[0]), localize(make(models[1]), enable=False)
        for step in range(3):
            for model, optimizer in zip(models, optimizers, strict=True):
                run(model, step)
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            assert_same_view(models[0], optimizers[0], models[1], optimizers[1])


# -------------------------------------------------------------------- checkpoints


@on_ranks(2)
@pytest.mark.parametrize("how", ["fullshard", "torch"])
def test_checkpoints_go_both_ways(rank: Rank, how: str, tmp_path: Path) -> None:
    """What a step on local tensors left, one on DTensors loads and goes on from to the same bits, and the reverse."""
    for number, saves_local in enumerate((True, False)):
        pair = Pair(rank, adamw)
        saver, loader = (*pair,) if saves_local else (*pair,)[::-1]
        for model, optimizer in (saver, saver, saver) if saves_local else (saver, saver, saver, loader):
            backward(rank, model, 1, spare=True)
            optimizer.step()  # the loader's own state is written over
            optimizer.zero_grad()
        if how == "fullshard":
            folder = folder_of_all(tmp_path, str(number))
            fullshard.save(folder, *saver)
            fullshard.load(folder, *loader)
        else:
            states = copy.deepcopy(torch_state_dict.get_state_dict(*saver))
            torch_state_dict.set_state_dict(*loader, model_state_dict=states[0], optim_state_dict=states[1])
        for _ in range(2):
            pair.step(spare=True)
            pair.check(ordered=False)  # entries may be in the checkpoint's order


def folder_of_all(tmp_path: Path, name: str) -> str:
    """The first rank's path."""
    folders = [str(tmp_path / name)]
    dist.broadcast_object_list(folders)
    return folders[0]


@on_ranks(2)
@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
def test_the_wrappers_parameters(rank: Rank, orig: bool) -> None:
    """Plain shards are stepped to the same bits, in runs where there are several; state dicts are the same."""
    torch.manual_seed(3)
    net = Net()
    models = [FSDP(each, process_group=rank.group, use_orig_params=orig) for each in (net, copy.deepcopy(net))]
    optimizers = adamw(models[0]), localize(adamw(models[1]), enable=False)

    def train() -> None:
        for step in range(3):
            for model, optimizer in zip(models, optimizers, strict=True):
                backward(rank, model, step)
                optimizer.step()
                optimizer.zero_grad()

    train()
    assert is_local(optimizers[0])
    states = [FSDP.optim_state_dict(m, o) for m, o in zip(models, optimizers, strict=True)]
    assert str(states[0]) == str(states[1])
    optimizers[0].load_state_dict(FSDP.optim_state_dict_to_load(models[0], optimizers[0], states[1]))
    train()
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(p, q)
