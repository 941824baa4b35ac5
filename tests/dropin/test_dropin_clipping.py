"""torch's gradient clipping on models that stand in for torch's."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from compare import assert_close, assert_equal
from fullshard import dropin, fully_shard
from fullshard.comm import record
from ranks import Rank, on_ranks

CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def trained(rank: Rank, *, sharded: bool) -> nn.Module:
    """A model of some uneven layers, with gradients of data that is equal on all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1), nn.Tanh(), nn.Linear(1, 7))
    if sharded:
        fully_shard(model, mesh=rank.mesh)
    model(torch.linspace(-1, 1, 24).view(4, 6)).square().sum().backward()
    return model


@pytest.mark.parametrize("order", [2.0, 1.0, math.inf])
@on_ranks(2)
def test_torchs_function_clips_as_without_sharding(rank: Rank, order: float) -> None:
    """The norm is a complete DTensor, and gradients are those of the plain model; afterwards torch's way again."""
    clip_grad_norm_ = torch.nn.utils.clip_grad_norm_
    plain, sharded = trained(rank, sharded=False), trained(rank, sharded=True)
    expected = clip_grad_norm_(plain.parameters(), 0.1, order)
    module = torch.nn.utils.clip_grad
    before = vars(module)["_get_total_norm"]
    with dropin.install(quiet=True):
        assert vars(module)["_get_total_norm"] is not before
        norm = clip_grad_norm_(sharded.parameters(), 0.1, order)
        again = clip_grad_norm_(plain.parameters(), 0.05, order)  # plain gradients: torch's own
    assert vars(module)["_get_total_norm"] is before
    assert isinstance(norm, DTensor)
    assert_close(norm.to_local(), expected, "norm", **CLOSE)
    assert_close(norm.full_tensor(), expected, "norm of all ranks", **CLOSE)
    assert_close(again, torch.tensor(0.1), "second norm", **CLOSE)
    for (name, parameter), own in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        assert_close(own.grad.full_tensor() / 2, parameter.grad, name, **CLOSE)


@on_ranks(2)
def test_parameters_that_are_listed_twice(rank: Rank) -> None:
    """They count twice and are scaled twice, as in torch."""
    with dropin.install(quiet=True):
        found = []
        for sharded in (False, True):
            model = trained(rank, sharded=sharded)
            parameters = [*model.parameters(), model[0].weight]
            norm = torch.nn.utils.clip_grad_norm_(parameters, 0.1)
            values = [norm, *(parameter.grad for parameter in model.parameters())]
            found.append([value.full_tensor() if sharded else value for value in values])
    for number, (own, expected) in enumerate(zip(found[1], found[0], strict=True)):
        assert_close(own, expected, str(number), **CLOSE)


@on_ranks(2)
def test_no_gradients_and_other_gradients_take_torchs_way(rank: Rank) -> None:
    """Without gradients the norm is 0; a gradient that needs a reduction first is reduced as torch reduces it."""
    with dropin.install(quiet=True):
        model = nn.Linear(3, 3)
        assert_equal(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0), torch.tensor(0.0), "norm")
        model = trained(rank, sharded=True)
        for parameter in model.parameters():
            parameter.grad = None
        with record() as collectives:
            assert float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)) == 0.0
        assert collectives == []
