"""find_nonfinite names where NaN arose, check_replicas what replicas differ in, replay steps that differ."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from front_ends import COMPOSABLE, FLAT, ORIGINAL, FrontEnd, build, each_front_end, local, step_and_clear
from fullshard import NonFiniteError, fully_shard
from fullshard.debug import check_replicas, find_nonfinite, replay
from fullshard.debug.digests import digest
from fullshard.errors import ReplicaError
from models import batch
from ranks import Rank, on_ranks

WIDTH = 8


class Times(torch.autograd.Function):
    """Identity, whose gradient is that of what follows if ``factor`` is 1, and else full of ``factor``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient if ctx.factor == 1 else torch.full_like(gradient, ctx.factor), None


class Layer(nn.Linear):
    """A layer whose output, its gradient, and the gradient of the weight can be made not finite."""

    output = gradient = weight_gradient = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = Times.apply(self.weight, self.weight_gradient)
        return Times.apply(torch.tanh(nn.functional.linear(x, weight, self.bias)) * self.output, self.gradient)


def layers() -> nn.Sequential:
    return build(lambda: nn.Sequential(*(Layer(WIDTH, WIDTH) for _ in range(3))))


def sharded(rank: Rank, front_end: FrontEnd, **options: Any) -> tuple[Any, list[Any], torch.optim.Optimizer]:
    """A model, its layers, and an optimizer."""
    plain = layers()
    made = list(plain)
    model = front_end.wrap(plain.to(rank.device), rank, **options)
    return model, made, torch.optim.SGD(model.parameters(), lr=0.01)


def step(rank: Rank, model: Any, optimizer: torch.optim.Optimizer, x: float = 1.0) -> None:
    """Two microbatches and a step."""
    for microbatch in range(2):
        model(torch.full((2, WIDTH), x + microbatch + rank.rank, device=rank.device)).square().mean().backward()
    step_and_clear(optimizer)


# An attribute of a layer, its value, the ranks on which it has that, and what is said.
CASES: list[tuple[str, float, tuple[int, ...], str]] = [
    ("output", math.nan, (1,), "microbatch 0, forward: the output of '1' has 16 NaN of 16 values"),
    ("gradient", math.inf, (1,), "microbatch 0, backward: the gradient of '1.bias', before"),
    (
        "weight_gradient",
        math.nan,
        (1,),
        "microbatch 0, backward: the gradient of '1.weight', before its reduction, has 64 NaN of 64 values",
    ),
    # Each gradient is finite, the sum of the microbatches is not.
    ("weight_gradient", 3e38, (0, 1), "microbatch 1, reduction of gradients: the reduced gradient of '1."),
]


@on_ranks(2)
@each_front_end
def test_all_ranks_raise_before_the_optimizer_steps(rank: Rank, front_end: FrontEnd) -> None:
    """They name the module or parameter, and the rank, on which a value first was not finite."""
    model, made, optimizer = sharded(rank, front_end)
    for number, (attribute, value, ranks, expected) in enumerate(CASES, start=1):
        with find_nonfinite(model):
            step(rank, model, optimizer)
            before = [local(parameter).detach().clone() for parameter in model.parameters()]
            if rank.rank in ranks:
                setattr(made[1], attribute, value)
            with pytest.raises(NonFiniteError) as caught:
                step(rank, model, optimizer)
        message = str(caught.value)
        assert message.startswith(f"step {number}, {expected}"), message
        if len(ranks) == 1:
            (name,) = re.findall(r"'(.*?)'", expected)
            assert "on rank 1; nothing before it" in message and caught.value.names == (name,)
        assert all(torch.equal(local(p), old) for p, old in zip(model.parameters(), before, strict=True))
        setattr(made[1], attribute, 1.0)
        optimizer.zero_grad()


@on_ranks(2)
@each_front_end
def test_parameters_and_inputs_are_named(rank: Rank, front_end: FrontEnd) -> None:
    """A weight that is NaN in one rank's shard is NaN on all ranks; an input only on its own."""
    model, _, optimizer = sharded(rank, front_end)
    with find_nonfinite(model), pytest.raises(NonFiniteError) as caught:
        step(rank, model, optimizer, math.inf if rank.rank else 1.0)
    assert "step 0, microbatch 0, forward: an input of the model has" in str(caught.value)
    assert "has 16 infinite of 16 values (shape [2, 8], torch.float32) on rank 1;" in str(caught.value)
    optimizer.zero_grad()
    if rank.rank == 0:
        with torch.no_grad():
            local(next(model.parameters())).view(-1)[0] = math.nan
    with find_nonfinite(model), pytest.raises(NonFiniteError) as caught:
        step(rank, model, optimizer)
    assert "forward: parameter '0.weight' has 1 NaN of 64 values" in str(caught.value)
    assert "on ranks 0, 1;" in str(caught.value)


@on_ranks(2)
@each_front_end
def test_finite_training_is_not_changed(rank: Rank, front_end: FrontEnd) -> None:
    """Nothing is raised, results have the same bits, and no hook is left."""
    results = []
    for looks in (False, True):
        model, _, optimizer = sharded(rank, front_end)
        for _ in range(3):
            if looks:
                with find_nonfinite(model):
                    step(rank, model, optimizer)
            else:
                step(rank, model, optimizer)
        results.append([local(parameter) for parameter in model.parameters()])
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@on_ranks(4)
def test_ranks_of_all_replicas_raise(rank: Rank) -> None:
    """A value on one rank of one replica is an error on every rank of all."""
    model, made, optimizer = sharded(rank, COMPOSABLE, strategy="HYBRID_SHARD")
    made[2].output = math.inf if rank.rank == 3 else 1.0
    with find_nonfinite(model), pytest.raises(NonFiniteError, match=r"'2' has.* on rank 3;"):
        step(rank, model, optimizer)


def test_unsharded_models_are_searched_too() -> None:
    """A plain model raises at the end of the context."""
    model: Any = layers()
    model[1].output = math.nan
    with pytest.raises(NonFiniteError, match=r"the output of '1'"), find_nonfinite(model):
        model(torch.ones(2, WIDTH))


# -------------------------------------------------------------------- replicas that differ


class Net(nn.Module):
    """Layers, a buffer that is everywhere the same, and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)
        self.second = nn.Linear(WIDTH, 3)
        self.register_buffer("scale", torch.ones(5))
        self.noise = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(torch.relu(self.norm(self.first(x)))) + self.noise
        return self.second(x) * self.scale[0]


def flip(tensor: torch.Tensor) -> None:
    """Flip the lowest bit of the first element of what this rank holds."""
    local(tensor).detach().view(-1).view(torch.int32)[0] ^= 1


KINDS = {
    "replicate": (COMPOSABLE, "NO_SHARD"),
    "hsdp": (COMPOSABLE, "HYBRID_SHARD"),
    "original": (ORIGINAL, "HYBRID_SHARD"),
    "flat": (FLAT, "HYBRID_SHARD"),
}


def make(rank: Rank, kind: str) -> Any:
    """A model with replicas on four ranks."""
    front_end, strategy = KINDS[kind]
    return front_end.wrap(build(Net).to(rank.device), rank, ["first"] if kind == "hsdp" else [], strategy=strategy)


@on_ranks(4)
@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_is_found_at_the_next_check(rank: Rank, kind: str) -> None:
    """The error has its FQN and rank: in parameters, state of the optimizer and buffers."""
    model = make(rank, kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(2):
        model(batch(rank.rank, number, 4, WIDTH).to(rank.device)).square().mean().backward()
        step_and_clear(optimizer)
        check_replicas(model, optimizer)
    target = next(parameter for parameter in model.parameters() if parameter.numel())
    state = optimizer.state[target]["exp_avg"]
    (buffer,) = (each for name, each in model.named_buffers() if name.endswith("scale"))
    for tensor, name in ((target, "first.weight"), (state, "first.weight (exp_avg)"), (buffer, "scale")):
        if rank.rank == 3:
            flip(tensor)
        with pytest.raises(ReplicaError) as caught:
            check_replicas(model, optimizer)
        message = str(caught.value)
        odd = r"(rank 3 \(not as on|rank \d or on rank 3: which of two is wrong)"
        if kind != "flat" or name == "scale":
            assert re.search(rf"{re.escape(name)} on {odd}", message), message
        assert "found after step 2" in message and "3" in message, message
        assert caught.value.names or rank.rank in (0, 2)
        if rank.rank == 3:
            flip(tensor)
        check_replicas(model, optimizer)


@on_ranks(4)
def test_running_means_and_what_is_named_may_differ(rank: Rank) -> None:
    """Running means of a batch norm, shards of one replica, and buffers that the caller ignores."""
    model = make(rank, "hsdp")
    model.scale.fill_(rank.rank)
    model.norm.running_mean.fill_(rank.rank)
    with pytest.raises(ReplicaError, match="scale") as caught:
        check_replicas(model)
    assert caught.value.names == ("scale",)
    check_replicas(model, ignore=["sc*"])


class Counts(nn.Module):
    """Assigns a new tensor to its buffer in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        return self.linear(x) * self.seen


@on_ranks(4)
def test_buffers_of_a_part_of_the_ranks(rank: Rank) -> None:
    """Those of units on another mesh are compared over that; names that only some ranks have are named as such."""
    mesh = init_device_mesh(rank.device.type, (2, 2), mesh_dim_names=("pair", "shard"))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Counts()).to(rank.device)
    model[1].seen += rank.rank // 2  # an expert of each pair of ranks
    fully_shard(model[1], mesh=mesh["shard"])
    fully_shard(model, mesh=rank.mesh)
    with pytest.warns(UserWarning, match="no parameter of this model is replicated"):
        check_replicas(model)
    if rank.rank == 1:
        model[1].seen += 1
    with pytest.raises(ReplicaError, match=r"1.seen on rank 0 or on rank 1: which of two is wrong is not known"):
        check_replicas(model)


# -------------------------------------------------------------------- steps that are repeated


@on_ranks(2)
@each_front_end
def test_replay_makes_one_step(rank: Rank, front_end: FrontEnd) -> None:
    """A step with dropout is the same twice, and the model has made one step after it; noise is named."""
    results = []
    for replayed in (False, True):
        net = build(Net).to(rank.device)
        model = front_end.wrap(net, rank, ["first", "second"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        x = batch(rank.rank, 0, 4, WIDTH).to(rank.device)

        def step(model: Any = model, optimizer: Any = optimizer, x: torch.Tensor = x) -> None:
            model(x).square().mean().backward()
            step_and_clear(optimizer)

        step()
        torch.manual_seed(5)
        if replayed:
            found = replay(step, model, optimizer)
            assert found.equal and re.fullmatch(r"bitwise equal \(\d+ values compared on this rank\)", str(found))
        else:
            step()
        results.append([local(parameter) for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))

    def noisy() -> None:
        net.noise += 0.25 * rank.rank
        step()

    found = replay(noisy, model, optimizer)
    assert not found.equal
    assert found.first == "forward: an input of 'second' on rank 1" and "not equal: forward: an input" in str(found)
    net.noise = 0.0
    assert replay(step, model, optimizer).equal


def test_replay_of_buffers_that_are_replaced() -> None:
    """The second run begins with the buffers of the first, and the model has made one step afterwards."""
    model = Counts()
    found = replay(lambda: model(torch.ones(2, WIDTH)).sum().backward(), model)
    assert found.equal and float(model.seen) == 1


# -------------------------------------------------------------------- digests


def test_any_bit_dtype_and_shape_change_a_digest() -> None:
    """Also in what is left over after whole words; strides and conjugation of equal values do not."""
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn):
        for numel in (1, 7, 64, 1001):
            tensor = torch.randint(0, 2, (numel + 1,)).to(dtype)[1:]  # not aligned
            before = digest(tensor)
            assert digest(tensor.clone()) == before
            for element in (0, numel // 2, numel - 1):
                changed = tensor.clone()
                changed.view(torch.uint8)[element * tensor.itemsize] ^= 1
                assert digest(changed) != before
    value = torch.randn(3, dtype=torch.complex64)
    same = [
        (torch.arange(6.0).view(2, 3).t(), torch.arange(6.0).view(2, 3).t().contiguous()),
        (value.conj(), value.conj().resolve_conj()),
        (torch.eye(4).to_sparse_csr(), torch.eye(4).to_sparse_csr()),
    ]
    other = [
        (torch.zeros(4), torch.zeros(2, 2)),
        (torch.zeros(0), torch.zeros(0, 1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (value.conj(), value),
        (torch.eye(4).to_sparse(), (2 * torch.eye(4)).to_sparse()),
    ]
    assert all(digest(one) == digest(two) for one, two in same)
    assert all(digest(one) != digest(two) for one, two in other)


CHANGES: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda t: t.flip(0),
    lambda t: t.flip(1),
    lambda t: t * torch.tensor([1.0, -1.0]).repeat(t.shape[1] // 2),
    lambda t: torch.cat([t[:1].neg(), t[1:2].neg(), t[2:]]),
    lambda t: t.view(-1)[torch.randperm(t.numel())].view_as(t),
    lambda t: torch.cat([t[4096:], t[:4096]]),
    lambda t: torch.nextafter(t, t + 1),
]


def test_digests_depend_on_places() -> None:
    """Rows or columns in another order, pairs of flipped signs, and slices that change places are other bits."""
    for shape in ((8192, 4), (64, 64), (300, 8)):
        tensor = build(torch.randn, shape)
        for change in CHANGES:
            changed = change(tensor)
            assert torch.equal(changed, tensor) == (digest(changed) == digest(tensor))
