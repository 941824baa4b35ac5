"""Steps on local tensors: the same bits, the same view of them and the same checkpoints as steps on DTensors."""

from __future__ import annotations

import copy
import gc
import io
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
from torch import nn, optim
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import register_optimizer_step_post_hook

import fullshard
from front_ends import FRONT_ENDS, FrontEnd
from front_ends import build as seeded
from fullshard import CPUOffloadPolicy, ShardingStrategy, fully_shard
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.comm import record
from fullshard.optim import localize
from fullshard.optim.local.localize import _is_default, local_step_of
from fullshard.optim.local.step import own_step
from pairwise import each_value
from ranks import Rank, on_ranks

Make = Callable[..., optim.Optimizer]

HOW: list[dict[str, bool]] = [{"foreach": True}, {"fused": True}, {"foreach": False}]
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
    """Parameters of all kinds: uneven, with fewer rows than ranks, without dims, transposed, frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.second = nn.Sequential(nn.Linear(7, 7), nn.LayerNorm(7))
        self.second[0].bias.requires_grad_(False)
        self.last = nn.Linear(7, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.turned = nn.Parameter(torch.randn(5, 4).t())
        self.spare = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, *, spare: bool = False) -> torch.Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        if spare:
            x = x + self.spare(x[:, :3]).sum()
        return self.last(x) * self.scale + self.turned.square().mean()


def build(rank: Rank) -> Net:
    torch.manual_seed(3)
    net = Net()
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


class Pair:
    """The same model and optimizer twice: as made, which steps local tensors, and on DTensors."""

    def __init__(
        self,
        rank: Rank,
        make: Callable[[nn.Module], optim.Optimizer],
        model: Callable[[Rank], nn.Module] = build,
        **options: Any,
    ) -> None:
        self.rank, self.count = rank, 0
        self.models: Any = (model(rank), model(rank))
        self.optimizers = make(self.models[0]), localize(make(self.models[1]), enable=False)
        if options:
            localize(self.optimizers[0], **options)

    def __iter__(self) -> Iterator[tuple[Any, optim.Optimizer]]:
        return zip(self.models, self.optimizers, strict=True)

    def step(self, **options: Any) -> None:
        self.count += 1
        for model, optimizer in self:
            backward(self.rank, model, self.count, **options)
            optimizer.step()
            optimizer.zero_grad()

    def check(self, order: Callable[[Any], Any] = list) -> None:
        """Parameters, state and groups are the same to the last bit."""
        (model, optimizer), (reference, other) = self
        names = [name for name, _ in model.named_parameters()]
        for name, p, q in zip(names, model.parameters(), reference.parameters(), strict=True):
            assert_same(p, q, name)
            assert (p in optimizer.state) == (q in other.state), name
            mine, theirs = optimizer.state.get(p, {}), other.state.get(q, {})
            assert order(mine) == order(theirs), name
            for key in mine:
                assert_same(mine[key], theirs[key], f"{name}.{key}")
        assert len(optimizer.state) == len(other.state)
        found, expected = optimizer.state_dict(), other.state_dict()
        assert str(found["param_groups"]) == str(expected["param_groups"])
        assert list(found["state"]) == list(expected["state"])
        assert repr(optimizer) == repr(other)


def is_local(optimizer: optim.Optimizer) -> bool:
    """True if it has made a step on local tensors."""
    return local_step_of(optimizer) is not None


def adamw(model: nn.Module, **options: Any) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=0.1, **options)


@on_ranks(2)
def test_stock_optimizers_step_to_the_same_bits(rank: Rank) -> None:
    """Every elementwise optimizer of torch's: parameters and the user's view of state, after each step."""
    emulated = next(build(rank).parameters()).device.type == "emulated"  # with kernels of CPUs, which round otherwise
    for name, (kind, options) in STOCK.items():
        pair = Pair(rank, lambda model, k=kind, o=options: k(model.parameters(), **o))
        for _ in range(2):
            pair.step()
            if "fused" not in name or not emulated:
                pair.check()
        assert is_local(pair.optimizers[0]), name


PLAIN: list[tuple[Make, dict[str, Any]]] = [
    *((optim.SGD, {"lr": 0.1, "momentum": 0.9, **how}) for how in HOW),
    *((kind, {"lr": 0.1, **how}) for kind in (optim.AdamW, optim.Adagrad) for how in HOW),
    (optim.Rprop, {}),
]


@pytest.mark.cpu_only("kernels of accelerators round all elements alike")
@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_steps_have_the_bits_of_steps_on_plain_tensors(rank: Rank, dtype: torch.dtype) -> None:
    """Also of fused SGD and Rprop, which cannot step DTensors; all state but the number of steps is DTensors."""
    for kind, options in PLAIN:
        model = nn.Sequential(*(nn.Linear(2, size, dtype=dtype) for size in (64, 8, 1, 37)))
        fully_shard(model, mesh=rank.mesh)
        plain = [nn.Parameter(local(p).clone()) for p in model.parameters()]
        optimizer, reference = kind(model.parameters(), **options), kind(plain, **options)
        for _ in range(3):
            for p, q in zip(model.parameters(), plain, strict=True):
                q.grad = torch.randn_like(q)
                p.grad = as_gradient(q.grad.clone(), p)
            optimizer.step()
            reference.step()
        for p, q in zip(model.parameters(), plain, strict=True):
            assert_same(local(p), q.detach(), f"{kind.__name__}, {options}")
            assert list(optimizer.state[p]) == list(reference.state[q])
            for name, entry in reference.state[q].items():
                if dtype is torch.float32 or "fused" not in options:  # fused kernels leave ends of bf16 state undefined
                    assert_same(local(optimizer.state[p][name]), entry, name)
                assert isinstance(optimizer.state[p][name], DTensor) == (name != "step")


def as_gradient(part: torch.Tensor, p: Any) -> DTensor:
    """A gradient of ``p`` of which this rank has ``part``."""
    return DTensor.from_local(part, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())


@on_ranks(2)
def test_parameters_without_gradient_are_left_out(rank: Rank) -> None:
    """Their step does not advance, and no collective is run to find them."""
    pair = Pair(rank, adamw)
    for spare, dropped in ((False, ""), (False, ""), (True, ""), (True, "second.1.weight"), (False, ""), (True, "")):
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
    weight = model.second[1].weight
    assert optimizer.state[weight]["step"] == 5 and optimizer.state[model.spare.weight]["step"] == 3
    assert {int(state["step"]) for state in optimizer.state.values()} == {3, 5, 6}


EDITS: list[Callable[[optim.Optimizer, nn.Parameter], object]] = [
    lambda o, p: o.state[p]["step"].fill_(7),
    lambda o, p: o.state[p]["exp_avg"].mul_(2),
    lambda o, p: o.state[p].update(exp_avg=o.state[p]["exp_avg"] * 3),
    lambda o, p: local(o.state[p]["exp_avg"]).set_(torch.ones_like(local(o.state[p]["exp_avg"]))),
    lambda o, p: o.state.pop(p),
    lambda o, p: o.state.clear(),
    lambda o, p: o.state[p].update(step=torch.tensor(3.0)),
    lambda o, p: o.param_groups[0].update(lr=0.02, weight_decay=0.5, betas=(0.5, 0.9)),
    lambda o, p: o.state[p].update(note="mine"),
    lambda o, p: o.state.update({"another key": o.state.pop(next(reversed(o.state)))}),
]


@on_ranks(2)
def test_what_users_write_into_state_counts(rank: Rank) -> None:
    """Numbers and moments edited in place, replaced, cleared, and put in by hand."""
    pair = Pair(rank, adamw)
    pair.step()
    for edit in EDITS:
        for model, optimizer in pair:
            edit(optimizer, model.second[0].weight)
        pair.step()
        pair.check()
        if edit is EDITS[0]:
            assert pair.optimizers[0].state[pair.models[0].second[0].weight]["step"] == 8


@on_ranks(2)
def test_options_can_change_between_steps(rank: Rank) -> None:
    """Momentum that comes later and ends again; a learning rate that is a tensor, or a DTensor."""
    pair = Pair(rank, lambda model: optim.SGD(model.parameters(), lr=0.01))
    for momentum in (0.0, 0.9, 0.9, 0.0, 0.9):
        for _, optimizer in pair:
            optimizer.param_groups[0]["momentum"] = momentum
        pair.step()
        pair.check()
    rates = [torch.tensor(0.1) for _ in range(2)]
    pair = Pair(rank, lambda model: optim.AdamW(model.parameters(), lr=rates.pop()))
    pair.step()
    for _, optimizer in pair:
        optimizer.param_groups[0]["lr"].fill_(0.2)
    pair.step()
    pair.check()
    for _, optimizer in pair:  # plain tensors cannot be mixed with it
        optimizer.param_groups[0]["lr"] = DTensor.from_local(torch.tensor(0.3), rank.mesh, [Replicate()])
    pair.step()
    assert pair.optimizers[0].state[pair.models[0].scale]["step"] == 3
    pair.check()


@on_ranks(2)
def test_groups(rank: Rank) -> None:
    """Groups have options of their own; one can be added later, with DTensors of the user's in it.

    A parameter that is listed twice is stepped twice.
    """

    def make(model: nn.Module) -> optim.Optimizer:
        named = dict(model.named_parameters())
        biases = [p for n, p in named.items() if n.endswith("bias")]
        weights = [p for n, p in named.items() if n.endswith("weight") and "spare" not in n]
        return optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0, "lr": 0.02}], lr=0.1)

    pair, others = Pair(rank, make), []
    pair.step(spare=True)
    pair.check()
    for model, optimizer in pair:
        other = nn.Parameter(DTensor.from_local(torch.arange(12.0).view(4, 3), rank.mesh, [Replicate()]))
        added = [model.spare.weight, model.scale, model.turned, other]
        optimizer.add_param_group({"params": added, "lr": 0.05})
        optimizer.param_groups[0]["params"].append(model.first.weight)
        model.zero_grad()
        others.append(other)
    for _ in range(3):
        for other in others:
            other.square().sum().backward()
        pair.step(spare=True)
        pair.check()
        assert_same(others[0], others[1], "the user's")
    assert pair.optimizers[0].state[pair.models[0].first.weight]["step"] == 1 + 2 * 3
    assert is_local(pair.optimizers[0])


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
        for p in args[0].param_groups[0]["params"]:
            if p.grad is not None:
                p.grad.mul_(0.5)

    def decay(_: optim.Optimizer, args: Any, kwargs: Any) -> None:
        args[0].param_groups[0]["lr"] *= 0.5
        for p, state in args[0].state.items():
            state["exp_avg"].mul_(0.5)
            p.data.mul_(0.9)

    pair = Pair(rank, lambda model: adamw(model, eps=0.1))
    pair.step()
    for _, optimizer in pair:  # after a first step: they come before the local step, too
        optimizer.register_step_pre_hook(halve)
        optimizer.register_step_post_hook(decay)
    for _ in range(3):
        pair.step()
        pair.check()
    assert is_local(pair.optimizers[0]) and pair.optimizers[0].param_groups[0]["lr"] == 0.1 / 8


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
    pickle.dumps(pair.optimizers[0].state_dict())
    copies = [copy.deepcopy(each) for each in pair]
    pair.models, pair.optimizers = zip(*copies, strict=True)
    pair.step()
    assert all(next(model.parameters()) is optimizer.param_groups[0]["params"][0] for model, optimizer in pair)
    pair.check()


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
                local(model.first.weight.grad)[0, 0] = math.inf
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        pair.check()
    assert pair.optimizers[0].state[pair.models[0].first.weight]["step"] == 2
    assert [scaler.get_scale() for scaler in scalers] == [2.0, 2.0]


@on_ranks(2)
def test_compiled_steps(rank: Rank) -> None:
    """``torch.compile`` sees DTensors, or runs the hooks; either way the step is the same, also beside others."""
    pair = Pair(
        rank,
        lambda model: optim.SGD(model.parameters(), lr=0.1, momentum=0.5, foreach=True),
        lambda rank: fully_shard(nn.Linear(6, 4, bias=False), mesh=rank.mesh),
    )
    pair.models[1].load_state_dict(pair.models[0].state_dict())
    compiled = torch.compile(pair.optimizers[0].step, backend="eager")
    for number in range(4):
        for model, optimizer in pair:
            backward(rank, model, number)
            compiled() if number in (1, 2) and optimizer is pair.optimizers[0] else optimizer.step()
            model.zero_grad()
        pair.check()


@on_ranks(2)
def test_gradients_and_parameters_of_the_users(rank: Rank) -> None:
    """Gradients that were computed, copied, or lie in any memory; loaded parameters, and those of another dtype."""
    pair = Pair(rank, lambda model: optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=True))
    changes: list[Callable[[Any], Any]] = [
        lambda gradient: gradient,
        lambda gradient: gradient * 2,
        lambda gradient: as_gradient(torch.stack([local(gradient)] * 2, -1)[..., 1], gradient),
        lambda gradient: as_gradient(torch.ones(()).expand(local(gradient).shape), gradient),
    ]
    for change in changes:
        for model, optimizer in pair:
            model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
            backward(rank, model, 5)
            for p in model.parameters():
                p.grad = None if p.grad is None else change(p.grad)
            optimizer.step()
            optimizer.zero_grad()
        pair.check()
    for model, optimizer in pair:
        model.double()
        optimizer.state.clear()
    for _ in range(2):
        for model, optimizer in pair:
            model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        pair.check()


class Signs(optim.Optimizer):
    """Counts in Python, replaces its state, writes into its group and under a name of its own, asks what is trained."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "seen": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["seen"] = group["seen"] + 1
            for p in group["params"]:
                if p.requires_grad and p.grad is not None:
                    state = self.state[p]
                    state["count"] = state.get("count", 0) + 1
                    state["mean"] = p.grad if "mean" not in state else state["mean"] * 0.5 + p.grad
                    p.add_(torch.sign(state["mean"]), alpha=-group["lr"] / state["count"])
        self.state["all"] = {"steps": self.state.get("all", {}).get("steps", 0) + 1}


@on_ranks(2)
def test_an_optimizer_that_the_user_says_is_elementwise(rank: Rank) -> None:
    """It steps local tensors, whatever it does with its state; they require gradients where the parameters do."""
    with pytest.warns(UserWarning, match="elementwise=True"):
        assert type(localize(Signs([nn.Parameter(torch.ones(2))]))) is Signs
    pair = Pair(rank, lambda model: Signs(model.parameters()), elementwise=True)
    for spare in (False, True, True, False):
        pair.step(spare=spare)
        pair.check()
    for _, optimizer in pair:
        optimizer.state.update({p: dict(entries) for p, entries in optimizer.state.items()})
    pair.step(spare=True)
    pair.check()
    assert pair.optimizers[0].state["all"] == {"steps": 5}
    assert pair.optimizers[0].param_groups[0]["seen"] == 5
    for frozen in (True, False):
        for model, optimizer in pair:
            backward(rank, model, 1)
            model.first.weight.requires_grad_(not frozen)  # its gradient stays
            optimizer.step()
            optimizer.zero_grad()
        pair.check()
    assert pair.optimizers[0].state[pair.models[0].first.weight]["count"] == 5
    assert is_local(pair.optimizers[0])


class Subclass(optim.AdamW):
    """Changes nothing that matters."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none=True)


class Changed(optim.AdamW):
    """Changes what matters."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Finalized(optim.AdamW):
    """Has what a second object of its class would disturb: a finalizer, slots, attributes that cannot be copied."""

    __slots__ = ("count",)
    finalized = 0

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, **options)
        self.count, self.lock = 0, threading.RLock()

    def __del__(self) -> None:
        type(self).finalized += 1

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "lock"}


class FinalizedStep(Finalized):
    """Uses it all in a step of its own, which calls that of its base class, around which torch runs hooks too."""

    @property
    def trained(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with self.lock:
            assert self.count == 0
            for p in self.trained:
                if p.grad is not None:
                    p.grad.mul_(0.5)
            self.note = self.__dict__.get("note", 0) + 1
            return super().step(closure)


@on_ranks(2)
@pytest.mark.parametrize("kind", [Finalized, FinalizedStep], ids=lambda kind: kind.__name__)
def test_no_other_optimizer_is_made(rank: Rank, kind: type[Finalized]) -> None:
    """A step finalizes nothing and counts once; hooks get the optimizer itself with its DTensors, and may keep it."""
    optim.AdamW([nn.Parameter(torch.ones(1))])  # torch adds the hooks when the class is used first
    options = {"elementwise": True} if kind is FinalizedStep else {}
    pair = Pair(rank, lambda model: kind(model.parameters(), lr=0.1), **options)
    first = pair.optimizers[0]
    seen: list[Any] = []

    def look(found: optim.Optimizer, args: Any, _: Any) -> None:
        assert found is first and args[0] is first and all(isinstance(p, DTensor) for p in found.state)
        seen.append(len(found.state))

    hooks = first.register_step_pre_hook(look), first.register_step_post_hook(look)
    before = kind.finalized
    for _ in range(3):
        pair.step(spare=True)
        pair.check()
    gc.collect()
    assert kind.finalized == before and is_local(first)
    assert seen == [0] + [len(first.state)] * 5
    assert vars(first).get("note") == vars(pair.optimizers[1]).get("note")
    for hook in hooks:
        hook.remove()
    pickle.dumps(vars(first)["_fullshard_local_step"])
    _, copied = copy.deepcopy((pair.models[0], pair.optimizers[1]))
    assert type(copied) is kind


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, options=HOW)
def test_memory_between_steps(rank: Rank, front_end: FrontEnd, options: dict[str, Any]) -> None:
    """An optimizer keeps nothing alive but its state and parameters: neither gradients, nor state that was replaced."""
    net: Any = front_end.wrap(nn.Sequential(nn.Linear(6, 32), nn.Linear(32, 3)), rank, ())
    optimizer = adamw(net, **options)

    def refs(values: Any) -> list[Any]:
        found = [value for value in values if value is not None and value.dim()]
        return [weakref.ref(value._local_tensor if isinstance(value, DTensor) else value) for value in found]

    def alive(found: list[Any]) -> int:
        return sum(ref() is not None for ref in found)

    def is_gone(found: list[Any]) -> bool:
        if alive(found):
            gc.collect()
        return not alive(found)

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
        assert is_gone(gradients), how
        change()
        assert is_gone(state), how
    weights = refs(net.parameters())
    net = None
    assert is_gone(weights)


def test_optimizers_that_are_not_elementwise_step_dtensors() -> None:
    """They are left as they are, and a warning says why."""
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


class Unknown(optim.Optimizer):
    """Subtracts gradients. No library has it, so whether it is elementwise is not known."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"])


@on_ranks(2)
def test_who_steps_is_local(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known classes with sharded parameters, without a warning; others step DTensors, and so does who is to."""

    class SGDScheduleFree(Unknown):
        """Known by the names of its class and its library."""

        def step(self, closure: Any = None) -> Any:
            return own_step(Unknown)(self, closure)

    SGDScheduleFree.__module__ = SGDScheduleFree.step.__module__ = "schedulefree.sgd_schedulefree"
    expected = {Subclass: True, SGDScheduleFree: True, Unknown: False, Changed: False, optim.SGD: True}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind, is_known in expected.items():
            pair = Pair(rank, lambda model, k=kind: k(model.parameters()))
            for _ in range(2):
                pair.step()
            pair.check()
            assert is_local(pair.optimizers[0]) == is_known, kind
            assert not is_local(pair.optimizers[1])
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
            assert not is_local(optimizer), why
    _is_default.cache_clear()
    assert torch.equal(plain, torch.full((2,), 0.5))


@on_ranks(2)
def test_lists_of_all_kinds(rank: Rank) -> None:
    """Plain and sparse gradients, a 2-D mesh, another dtype and an offloaded unit in one optimizer."""

    def make(rank: Rank) -> nn.ModuleDict:
        torch.manual_seed(5)
        model = nn.ModuleDict({name: nn.Linear(6, 6) for name in ("plain", "mesh", "bf16", "offloaded", "complex")})
        model["sparse"] = nn.Embedding(5, 6, sparse=True)
        fully_shard(model["mesh"], mesh=rank.make_mesh(1, 2, names=("replicate", "shard")))
        fully_shard(model["bf16"].bfloat16(), mesh=rank.mesh)
        fully_shard(model["offloaded"], mesh=rank.mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
        fully_shard(model["complex"].to(torch.complex64), mesh=rank.mesh)
        return model

    for kind in (optim.SGD, optim.Adagrad):
        pair = Pair(rank, lambda model, kind=kind: kind(model.parameters(), lr=0.01), make)
        for step in range(3):
            for model, optimizer in pair:
                x = torch.randn(3, 6, generator=torch.Generator().manual_seed(step))
                x = model["plain"](x) + model["sparse"](torch.tensor([0, 1, 3]))
                x = model["bf16"](model["offloaded"](model["mesh"](x)).bfloat16())
                model["complex"](x.cfloat()).abs().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            pair.check()


# -------------------------------------------------------------------- checkpoints


@on_ranks(2)
@pytest.mark.parametrize("how", ["state_dict", "fullshard", "torch"])
def test_checkpoints_of_both_kinds_of_steps_are_interchangeable(rank: Rank, how: str, tmp_path: Path) -> None:
    """What a step on local tensors left, one on DTensors loads and goes on from to the same bits, and the reverse.

    Parameters may have made different numbers of steps.
    """
    for saves_local in (True, False):
        pair = Pair(rank, adamw)
        saver, loader = tuple(pair) if saves_local else tuple(pair)[::-1]
        for step, (model, optimizer) in enumerate([saver] * 3 + [loader] * (not saves_local)):
            backward(rank, model, 1, spare=step > 0)
            optimizer.step()  # the loader's own state is written over
            optimizer.zero_grad()
        if how == "fullshard":
            fullshard.save(tmp_path / str(saves_local), *saver)
            fullshard.load(tmp_path / str(saves_local), *loader)
        elif how == "torch":
            states = copy.deepcopy(torch_state_dict.get_state_dict(*saver))
            torch_state_dict.set_state_dict(*loader, model_state_dict=states[0], optim_state_dict=states[1])
        else:
            file = io.BytesIO()
            torch.save([each.state_dict() for each in saver], file)
            file.seek(0)
            for each, state in zip(loader, torch.load(file, weights_only=False), strict=True):
                each.load_state_dict(state)
        for _ in range(2):
            pair.step(spare=True)
            pair.check(sorted)  # entries may be in the checkpoint's order


@on_ranks(2)
@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
def test_the_wrappers_parameters(rank: Rank, orig: bool) -> None:
    """Plain shards are stepped to the same bits; state dicts are the same."""
    pair = Pair(rank, adamw, lambda rank: FSDP(seeded(Net), process_group=rank.group, use_orig_params=orig))
    for load in (False, True):
        if load:
            states = [FSDP.optim_state_dict(model, optimizer) for model, optimizer in pair]
            assert str(states[0]) == str(states[1])
            model, optimizer = next(iter(pair))
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, states[1]))
        for _ in range(3):
            pair.step()
    assert is_local(pair.optimizers[0])
    for p, q in zip(*(model.parameters() for model in pair.models), strict=True):
        assert torch.equal(p, q)
