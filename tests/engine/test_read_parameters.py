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
from front_ends import CLOSE, assert_at_rest, assert_trains_alike
from fullshard import MixedPrecisionPolicy, clip_grad_norm_, fully_shard, unsharded
from fullshard.comm import record
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
    """accelerate shards the last norm and the head together; the head's weight is read, and the head never called.

    After forwards without gradients, and after training inside of ``unsharded``, only what users keep is unsharded.
    """
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
    """What has read the weight finds it in backward, although all modules of the unit have run and it was resharded.

    Also where the unit's own forward ran under ``no_grad``.
    """
    for prefetch in (None, 0):
        model = ReadsAndCalls()
        model.how = how
        reference = copy.deepcopy(model)
        fully_shard(model.block)
        fully_shard([model.norm, model.head] if group else model.head, reshard_after_forward=reshard)
        fully_shard(model).set_prefetch_bytes(prefetch)
        assert_trains_alike(model, reference, rank, loss_at, steps=2)


class TwoHeads(Language):
    """Which head runs depends on the call."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WORDS, bias=False)
        self.chosen = "head"

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        head = self.get_submodule(self.chosen)
        return F.cross_entropy(head(self.norm(self.block(self.embedding(words)))).view(-1, WORDS), words.view(-1))


@on_ranks(2)
def test_what_is_unsharded_depends_on_no_graph_that_one_rank_holds(rank: Rank) -> None:
    """A rank that keeps an old loss, undetached, takes part in the same collectives as the others."""
    model = TwoHeads()
    for module in (model.block, model.head, model.other, model):
        fully_shard(module)
    held = []
    for step in range(4):
        model.chosen = "other" if step % 2 else "head"
        with record() as seen:
            loss = model(tokens(rank.rank, step))
            loss.backward()
        if rank.rank == 0:
            held.append(loss)
        del loss
        in_step = [c.unit for c in seen if c.kind == "all_gather"]
        everyone: list[Any] = [None] * rank.world_size
        dist.all_gather_object(everyone, in_step)
        assert everyone[0] == everyone[1]


@on_ranks(2)
def test_shown_parameters_stand_for_the_sharded_ones(rank: Rank) -> None:
    """While modules show unsharded parameters, clipping, zero_grad, flags, writes and replacements count."""
    torch.manual_seed(0)
    reference, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), torch.ones(2, 4)
    model = fully_shard(copy.deepcopy(reference), reshard_after_forward=False)
    sharded = model[1].weight

    def show() -> nn.Parameter:
        """Have the model show unsharded parameters, and sharded ones have gradients, as the reference has them."""
        for side in (reference, model):
            side(x).sum().backward()
        with torch.no_grad():
            model(x)
        shown = model[1].weight
        assert not isinstance(shown, DTensor)
        return shown

    show()
    norm = clip_grad_norm_(model.parameters(), 0.1)
    assert_close(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.1), "norm", **CLOSE)
    assert_close(sharded.grad.full_tensor(), reference[1].weight.grad, "clipped", **CLOSE)
    for to_none in (False, True):
        model.zero_grad(set_to_none=to_none)
        assert sharded.grad is None if to_none else not sharded.grad.full_tensor().any()
    reference.zero_grad()
    sharded.requires_grad_(False)
    reference[1].weight.requires_grad_(False)
    show()
    assert sharded.grad is None
    model[1].weight.requires_grad_(True)
    reference[1].weight.requires_grad_(True)
    with torch.no_grad():
        for side in (reference, model):
            side[1].weight.mul_(0.5)
    model[0].weight = nn.Parameter(model[0].weight.detach() * 2)
    reference[0].weight = nn.Parameter(reference[0].weight.detach() * 2)
    model.zero_grad()
    reference.zero_grad()
    optimizers = [torch.optim.SGD(side.parameters(), 0.1) for side in (model, reference)]
    show()
    with pytest.warns(UserWarning, match="steps the sharded parameters instead"):
        optimizers[0].step()
    optimizers[1].step()
    model.reshard()
    for name, parameter in model.named_parameters():
        expected = reference.get_parameter(name)
        assert_close(parameter.full_tensor(), expected.detach(), name, **CLOSE)
        assert_close(parameter.grad.full_tensor(), expected.grad, f"gradient of {name}", **CLOSE)


@on_ranks(2)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_writes_between_forwards_without_backward(rank: Rank, dtype: torch.dtype | None, layout: str) -> None:
    """Writes to what modules show count, also through ``.data``, and so do those to sharded parameters from before.

    As zeroth-order optimizers write, and as weights are exchanged for their averages to be evaluated. Elements that
    nobody writes keep their precision.
    """
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    reference, x = copy.deepcopy(model), torch.ones(2, 4)
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    for module in (model[0], model):
        fully_shard(module, mp_policy=policy, layout=layout)
    sharded = list(model.parameters())
    bound = {"rtol": 1e-6, "atol": 1e-6} if dtype is None else {"rtol": 3e-2, "atol": 3e-2}

    def compare(what: str) -> None:
        with torch.no_grad():
            assert_close(model(x).float(), reference(x), what, **bound)

    compare("before")
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
    for parameter in reference.parameters():
        parameter.data.mul_(0.5)
    compare("after writes through .data")
    for parameter, own in zip(sharded, reference.parameters(), strict=True):
        parameter.data.mul_(3)
        own.data.mul_(3)
    compare("after writes to the sharded parameters")
    exact = reference[2].weight.detach().clone()
    with torch.no_grad():
        model[2].weight[0] = 2
        exact[0] = 2
        reference[2].weight[0] = 2
    compare("after a write to one row")
    for parameter, before in ((model.state_dict()["2.weight"], exact),):
        assert_close(parameter.full_tensor()[1:], before[1:], "rows that nobody wrote", rtol=1e-2, atol=1e-3)
