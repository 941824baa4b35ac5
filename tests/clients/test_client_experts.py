"""A mixture of experts: each token goes to one expert or to two, and some experts get no token on some ranks."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import torch
from program_runs import Run, assert_runs_alike, built, front_ends
from torch import nn

from ranks import Rank, on_ranks

WORDS, WIDTH, EXPERTS, LENGTH, BATCH = 17, 6, 5, 4, 2
IDLE = 3  # the expert that no rank sends a token to
SHIFT = 20.0


class Routed(NamedTuple):
    """Tokens, and what the loss adds for their distribution over experts."""

    tokens: torch.Tensor
    balance: torch.Tensor


class Listed(nn.Module):
    """Experts that are modules."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 7), nn.SiLU(), nn.Linear(7, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        return self.experts[expert](x)


class Grouped(nn.Module):
    """Experts that are rows of common parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 7) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, 7, WIDTH) / 3)

    def forward(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(x @ self.up[expert]) @ self.down[expert]


class Mixture(nn.Module):
    """A residual mixture. The first token's id decides which experts a rank's tokens are kept from."""

    def __init__(self, kind: type[nn.Module], top: int) -> None:
        super().__init__()
        self.top = top
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = kind()
        self.used: list[list[int]] = []

    def forward(self, tokens: torch.Tensor, bias: torch.Tensor) -> Routed:
        shape, x = tokens.shape, self.norm(tokens).flatten(0, 1)
        logits = self.router(x)
        shares = (logits + bias).softmax(dim=-1)
        weights, chosen = shares.topk(self.top, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True) if self.top > 1 else weights
        out = torch.zeros_like(x)
        self.used.append(chosen.unique().tolist())
        for expert in self.used[-1]:
            row, place = (chosen == expert).nonzero(as_tuple=True)
            out = out.index_add(0, row, weights[row, place, None] * self.experts(expert, x[row]))
        load = nn.functional.one_hot(chosen, EXPERTS).sum(dim=(0, 1)).to(x.dtype) / chosen.numel()
        balance = EXPERTS * (load * shares.mean(dim=0)).sum() + 1e-2 * logits.logsumexp(dim=-1).square().mean()
        return Routed(tokens + out.unflatten(0, shape[:2]), balance)


class Model(nn.Module):
    """Token ids to logits and the sum of the balances of two mixtures."""

    def __init__(self, kind: type[nn.Module], top: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.mixtures = nn.ModuleList([Mixture(kind, top), Mixture(kind, top)])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, balances = self.embed(ids), []
        for mixture in self.mixtures:
            x, balance = mixture(x, bias)
            balances.append(balance)
        return self.head(x), torch.stack(balances).sum()


def mixed(run: Run, kind: type[nn.Module], top: int, units: tuple[type[nn.Module], ...]) -> dict[str, nn.Module]:
    """Five steps. Rank 0 never uses expert 0, rank 1 never expert 1, and no rank expert IDLE."""
    model = run.shard(built(Model, kind, top), *units)
    sgd = torch.optim.SGD(model.parameters(), lr=0.3)  # without momentum: a gradient of zero is none at all
    bias = torch.zeros(EXPERTS)
    bias[[run.rank.rank, IDLE]] = -SHIFT
    for step in range(5):
        ids = torch.randint(WORDS, (BATCH, LENGTH), generator=run.generator(step))
        logits, balance = model(ids, bias)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()) + 0.1 * balance
        loss.backward()
        run.note("loss", loss)
        run.note("balance", balance)
        run.step(model, sgd, max_norm=2.0)
    for mixture in [module for module in model.modules() if isinstance(module, Mixture)]:
        used = {expert for call in mixture.used for expert in call}
        assert used == {0, 1, 2, 4} - {run.rank.rank}, "which experts this rank used"
    return {"model": model}


CASES: dict[str, dict[str, Any]] = {
    "modules, top 1": {"kind": Listed, "top": 1, "units": (Mixture,)},
    "modules, top 2, one unit": {"kind": Listed, "top": 2, "units": ()},
    "rows, top 2": {"kind": Grouped, "top": 2, "units": (Mixture,)},
}


@pytest.mark.parametrize("case", CASES)
@front_ends
@on_ranks(2)
def test_experts(rank: Rank, case: str, front_end: str) -> None:
    """Losses, norms and weights of a mixture in one unit, or in a unit per mixture, are the unsharded run's."""
    assert_runs_alike(rank, front_end, functools.partial(mixed, **CASES[case]))
