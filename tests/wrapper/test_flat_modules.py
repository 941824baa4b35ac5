"""Modules that treat their parameters in ways of their own, in wrappers: caches, lists, parametrizations, hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from wrapper_models import (
    CLOSE,
    adam,
    assert_at_rest,
    assert_like,
    assert_trains_alike,
    backward,
    pieces_of,
    with_reference,
    wrap,
)

from compare import assert_equal
from fullshard import FullyShardedDataParallel, ShardingStrategy
from models import LossOf, Stack, batch, square_loss, tokens
from ranks import Rank, on_ranks

BOTH = pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
BLOCKS = ["blocks.0"]


class Recurrent(nn.Module):
    """An LSTM, which keeps a list of its parameters beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True)
        self.last = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.lstm(x.view(2, -1, 6))[0])


class Attentive(nn.Module):
    """Attention, which uses some parameters without calling the module that holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(1, -1, 6)
        return self.norm(self.attention(x, x, x, need_weights=False)[0].view(-1, 6))


class Listed(nn.Module):
    """Parameters in a list and in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(6, 6) for _ in range(3))
        self.by_name = nn.ParameterDict({"scale": torch.randn(6), "shift": torch.randn(6)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x * self.by_name["scale"] + self.by_name["shift"]


class Normed(nn.Module):
    """A layer whose weight is computed from two others, and one whose weight is kept symmetric."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.orthogonal = nn.utils.parametrizations.orthogonal(nn.Linear(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.orthogonal(torch.tanh(self.normed(x)))


class Watchful(nn.Linear):
    """Notes which attributes are set, as modules with caches do."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "weight":
            super().__setattr__("cached", [value])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.cached[0], self.bias)


MODULES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "lstm": (Recurrent, ["lstm"]),
    "lstm in the root": (Recurrent, []),
    "attention": (Attentive, ["attention"]),
    "attention in the root": (Attentive, []),
    "lists": (Listed, []),
    "parametrized": (Normed, ["normed", "orthogonal"]),
    "parametrized in the root": (Normed, []),
    "own setattr": (lambda: nn.Sequential(Watchful(6, 6), nn.Linear(6, 3)), ["0"]),
}


FULL, KEPT = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
CASES = [(kind, FULL) for kind in MODULES] + [("lstm", KEPT), ("attention in the root", KEPT), ("own setattr", KEPT)]


@on_ranks(2)
@BOTH
@pytest.mark.parametrize(("kind", "strategy"), CASES)
def test_modules_with_ways_of_their_own(rank: Rank, original: bool, kind: str, strategy: ShardingStrategy) -> None:
    """They train as the unsharded ones do, and their state dicts are equal."""
    make, wrapped = MODULES[kind]
    model, reference = with_reference(make(), rank, wrapped, use_orig_params=original, sharding_strategy=strategy)
    assert_trains_alike(model, reference, rank)
    assert_at_rest(model)
    state = model.state_dict()
    assert list(state) == list(reference.state_dict())
    fresh, _ = with_reference(make(), rank, wrapped, use_orig_params=original, sharding_strategy=strategy)
    fresh.load_state_dict(state)
    assert_like(fresh, reference, **CLOSE)


@on_ranks(2)
@BOTH
@pytest.mark.parametrize("sparse", [False, True])
def test_embeddings(rank: Rank, original: bool, sparse: bool) -> None:
    """An embedding with a padding row trains as the unsharded one does, also if its own gradient is sparse."""

    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(17, 6, padding_idx=3, sparse=sparse)
            self.last = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.embedding(x))

    def loss(step: int) -> LossOf:
        return lambda of, number: of(tokens(number, step, 2, 3)).square().mean()

    model, reference = with_reference(Embedded(), rank, ["embedding"], use_orig_params=original)
    reference.embedding.sparse = False  # the sharded gradient is dense
    assert_trains_alike(model, reference, rank, loss=loss)


class Marked(nn.Parameter):
    """A kind of parameter that a user has made."""


@on_ranks(2)
def test_parameters_of_the_users_own_class(rank: Rank) -> None:
    """With original parameters their class stays, as the object does."""
    plain = nn.Linear(6, 3)
    plain.weight = Marked(plain.weight.detach())
    weight = plain.weight
    model, reference = with_reference(plain, rank, use_orig_params=True)
    assert_trains_alike(model, reference, rank)
    assert plain.weight is weight and type(plain.weight) is Marked


@on_ranks(2)
@BOTH
def test_tensor_hooks_see_reduced_gradients(rank: Rank, original: bool) -> None:
    """A hook on a registered parameter is called once per backward with the reduced gradient, and may change it."""
    model, reference = with_reference(Stack(1), rank, BLOCKS, use_orig_params=original)
    calls: list[torch.Size] = []

    def halve(gradient: torch.Tensor) -> torch.Tensor:
        calls.append(gradient.shape)
        return gradient / 2

    for parameter in model.parameters():
        parameter.register_hook(halve)
    for step in range(2):
        calls.clear()
        square_loss(step)(model, rank.rank).backward()
        assert sorted(calls) == sorted(p.shape for p in model.parameters())
        reference.zero_grad()
        backward_of_reference(reference, rank, step)
        for parameter in reference.parameters():
            parameter.grad /= 2
        assert_like(model, reference, grads=True, **CLOSE)
        model.zero_grad()


def backward_of_reference(reference: nn.Module, rank: Rank, step: int) -> None:
    """The mean of the ranks' gradients of one step."""
    total = sum(square_loss(step)(reference, number) for number in range(rank.world_size)) / rank.world_size
    assert isinstance(total, torch.Tensor)
    total.backward()


@on_ranks(2)
@BOTH
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_training_after_inference(rank: Rank, original: bool, context: Callable[[], Any]) -> None:
    """A first forward without grad, or in inference mode, does not spoil the training that follows."""
    model, reference = with_reference(Stack(1), rank, BLOCKS, use_orig_params=original)
    with context():
        output = model(batch(0, 0, 4, 6))
        assert_equal(output.clone(), reference(batch(0, 0, 4, 6)).clone(), "output")
    assert_trains_alike(model, reference, rank)
    with context():
        model(batch(0, 0, 4, 6))
    assert_trains_alike(model, reference, rank)


@on_ranks(2)
@BOTH
def test_wrapping_without_grad(rank: Rank, original: bool) -> None:
    """Wrapping and building optimizers where grad is off makes the same model."""
    with torch.no_grad():
        model, reference = with_reference(Stack(1), rank, BLOCKS, use_orig_params=original)
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())
    assert_trains_alike(model, reference, rank)


@on_ranks(2)
@BOTH
def test_gradient_inside_forward(rank: Rank, original: bool) -> None:
    """A model that takes a gradient by its input inside its own forward, as physics models do, trains."""

    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.detach().requires_grad_()
            energy = self.energy(x).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return force

    model, reference = with_reference(Force(), rank, use_orig_params=original)
    # The last bias has no gradient: None in the reference, in flat mode zero. It must not decay.
    optimizers = adam(model.parameters(), weight_decay=0.0), adam(reference.parameters(), weight_decay=0.0)
    assert_trains_alike(model, reference, rank, optimizers, grads=original)


@on_ranks(2)
def test_size_of_pieces_is_what_optimizers_hold(rank: Rank) -> None:
    """The state of an optimizer is sharded as the parameters are."""
    model, reference = with_reference(Stack(1), rank, BLOCKS, use_orig_params=True)
    optimizer = adam(model.parameters())
    backward(model, reference, rank, square_loss())
    optimizer.step()
    held = sum(state["exp_avg"].numel() for state in optimizer.state.values())
    assert held == sum(p.numel() for p in model.parameters()) < sum(p.numel() for p in reference.parameters()) * 0.6
    root = [p for name, p in reference.named_parameters() if not name.startswith("blocks")]
    gradients = [p.grad for p in root]
    expected = pieces_of(gradients, rank)
    own = [p for name, p in model.named_parameters() if "blocks" not in name]
    for parameter, gradient in zip(own, expected, strict=True):
        torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], 0.1 * gradient)


@on_ranks(2)
@BOTH
def test_containers_warn_and_keep_their_parameters(rank: Rank, original: bool) -> None:
    """A list of modules that is wrapped itself warns; its parameters are those of a unit, saved as ever."""
    plain = nn.ModuleList([nn.Linear(6, 3), nn.Linear(3, 2)])
    expected = {name: value.clone() for name, value in plain.state_dict().items()}
    with pytest.warns(UserWarning, match="ModuleList has no forward"):
        model = wrap(plain, rank, use_orig_params=original)
    assert isinstance(model, FullyShardedDataParallel)
    for name, value in model.state_dict().items():
        assert_equal(value, expected[name], name)
