"""Models that read parameters of sharded modules in their forward, instead of calling the modules."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import fullshard.ragged  # noqa: F401 # adds the layout
from compare import assert_close
from front_ends import assert_at_rest, assert_trains_alike
from fullshard import MixedPrecisionPolicy, fully_shard, unsharded
from fullshard.comm import record
from models import Stack, batch, shard_blocks
from ranks import Rank, on_ranks

WIDTH, WORDS = 6, 11


class Language(nn.Module):
    """A head whose weight the model multiplies with itself, as fused cross-entropies do, or which it calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.fused = True
        self.seen: list[type] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.block(self.embedding(tokens)))
        if not self.fused:
            return F.cross_entropy(self.head(x).view(-1, WORDS), tokens.view(-1))
        return F.cross_entropy((x @ full(self, self.head.weight).t()).view(-1, WORDS), tokens.view(-1))


def full(model: Language, weight: torch.Tensor) -> torch.Tensor:
    """What trl does with a weight that it reads."""
    model.seen.append(type(weight))
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def tokens(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randint(0, WORDS, (3, 4), generator=torch.Generator().manual_seed(100 * step + rank))


def loss_at(step: int) -> Any:
    return lambda module, number: module(tokens(number, step))


@on_ranks(2)
@pytest.mark.parametrize("reshard", [False, None, True])
def test_head_in_one_unit_with_the_norm(rank: Rank, reshard: bool | None) -> None:
    """accelerate shards the last norm and the head together; the head's weight is read, and the head never called."""
    model = Language()
    reference = copy.deepcopy(model)
    fully_shard(model.block)
    fully_shard([model.norm, model.head], reshard_after_forward=reshard)
    fully_shard(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_trains_alike(model, reference, rank, loss_at)
    assert DTensor not in model.seen
    assert isinstance(model.head.weight, DTensor)
    with unsharded(model):
        model(tokens(rank.rank)).backward()
    for _ in range(2):
        with torch.no_grad():
            model(tokens(rank.rank))
        assert_at_rest(model, "", *(["norm"] if reshard is False else []))


@on_ranks(2)
@pytest.mark.parametrize("where", ["outside", "inside"])
def test_regularizer_on_sharded_parameters(rank: Rank, where: str) -> None:
    """The gradient of a penalty on DTensors is right, wherever it is added to the loss."""

    class Penalized(Language):
        def forward(self, words: torch.Tensor) -> torch.Tensor:
            loss = super().forward(words)
            return loss / 2 + penalty(self) if where == "inside" else loss / 2

    def penalty(module: nn.Module) -> torch.Tensor:
        squares = [p.square().sum() for name, p in module.named_parameters() if name.startswith(("block", "head"))]
        total = torch.stack([s.full_tensor() if isinstance(s, DTensor) else s for s in squares]).sum()
        return total * 0.1

    model = Penalized()
    model.fused = False
    reference = copy.deepcopy(model)
    fully_shard(model.block)
    fully_shard(model.head)
    fully_shard(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = model(tokens(rank.rank))
        (loss + penalty(model) if where == "outside" else loss).backward()
    losses = [reference(tokens(each)) for each in range(2)]
    (torch.stack(losses).mean() + (penalty(reference) if where == "outside" else 0)).backward()
    for name in ("head.weight", "block.0.weight", "embedding.weight"):
        found = model.get_parameter(name).grad
        assert isinstance(found, DTensor)
        assert_close(found.full_tensor(), reference.get_parameter(name).grad, name, rtol=1e-5, atol=1e-6)


class ReadsAndCalls(Language):
    """Reads the head's weight for the loss, and uses the head, or the norm, in a way of which no loss comes."""

    how = "attached"

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        h = self.block(self.embedding(words))
        with torch.set_grad_enabled(not self.how.startswith("no_grad")):
            target = self.norm(h) if self.how == "no_grad, norm" else self.head(self.norm(h))
        if self.how.startswith("no_grad"):
            scaled = h * self.head.weight[:1]
            return (scaled @ self.head.weight.t()).square().mean() + target.mean()
        x = self.norm(h)
        loss = F.cross_entropy((x @ full(self, self.head.weight).t()).view(-1, WORDS), words.view(-1))
        self.logits = self.head(x.detach() if self.how == "detached" else x)
        return loss


@on_ranks(2)
@pytest.mark.parametrize(
    ("how", "group", "reshard"),
    [
        ("attached", True, True),
        ("detached", True, True),
        ("no_grad, norm", True, False),
        ("no_grad, head", False, False),
    ],
)
def test_weight_read_beside_a_call(rank: Rank, how: str, group: bool, reshard: bool) -> None:
    """What has read the weight finds it in backward, although all modules of the unit have run and it was resharded."""
    for prefetch in (None, 0):
        model = ReadsAndCalls()
        model.how = how
        reference = copy.deepcopy(model)
        fully_shard(model.block)
        fully_shard([model.norm, model.head] if group else model.head, reshard_after_forward=reshard)
        fully_shard(model).set_prefetch_bytes(prefetch)
        assert_trains_alike(model, reference, rank, loss_at, steps=2)


@on_ranks(2)
def test_what_is_unsharded_depends_on_no_graph_that_one_rank_holds(rank: Rank) -> None:
    """A rank that keeps an old loss, undetached, takes part in the same collectives as the others."""
    model = shard_blocks(Stack(2), rank)
    kept = []
    for step in range(4):
        with record() as seen:
            loss = model(batch(rank.rank, step, 4, 6), run=[step % 2]).sum()
            loss.backward()
        if rank.rank == 0:
            kept.append(loss)
        del loss
        everyone: list[Any] = [None] * rank.world_size
        dist.all_gather_object(everyone, [c.unit for c in seen if c.kind == "all_gather"])
        assert everyone[0] == everyone[1]


@on_ranks(2)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
def test_writes_to_unsharded_parameters_in_low_precision(rank: Rank, layout: str) -> None:
    """Between forwards without gradients writes count, also through ``.data``; other elements keep their precision."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    reference, x = copy.deepcopy(model), torch.ones(2, 4)
    for module in (model[0], model):
        fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), layout=layout)
    sharded = list(model.parameters())

    def compare(what: str) -> None:
        with torch.no_grad():
            assert_close(model(x).float(), reference(x), what, rtol=3e-2, atol=3e-2)

    compare("before")
    for parameters, factor in ((list(model.parameters()), 0.5), (sharded, 3)):  # the unsharded ones, then the sharded
        for parameter, own in zip(parameters, reference.parameters(), strict=True):
            parameter.data.mul_(factor)
            own.data.mul_(factor)
        compare(f"after writes of {factor}")
    with torch.no_grad():
        model[2].weight[0] = reference[2].weight[0] = 2
    compare("after a write to one row")
    found = model.state_dict()["2.weight"].full_tensor()
    assert_close(found[1:], reference[2].weight[1:].detach(), "rows that nobody wrote", rtol=1e-2, atol=1e-3)
