"""What the comparison of programs, sharded and not, tells apart."""

from __future__ import annotations

import functools

import pytest
import torch
from program_runs import Run, assert_runs_alike, built, front_ends
from torch import nn

from ranks import Rank, on_ranks

WRONG = {"rate": "loss 1", "scale of the last gradients": "norm 1", "weights at the end": "model: 0", "data": "loss 0"}


def net() -> nn.Module:
    """A small one."""
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))


def trained(run: Run, wrong: str) -> dict[str, nn.Module]:
    """Two steps of a small model; the sharded run of it has something wrong, by no more than a millionth of it."""
    off = 1e-6 if run.front_end != "unsharded" else 0.0
    model = run.shard(built(net), nn.Linear)
    sgd = torch.optim.SGD(model.parameters(), lr=0.3 * (1 + off * (wrong == "rate")))
    for step in range(2):
        loss = model(run.data(step, 4, 6) * (1 + off * (wrong == "data"))).square().mean()
        (loss * (1 + off * (wrong == "scale of the last gradients" and step == 1))).backward()
        run.note("loss", loss)
        run.step(model, sgd)
    with torch.no_grad():
        for parameter in model.parameters() if wrong == "weights at the end" else ():
            parameter.mul_(1 + off)
    return {"model": model}


@pytest.mark.parametrize("wrong", WRONG)
@front_ends
@on_ranks(2)
def test_a_millionth_is_found(rank: Rank, wrong: str, front_end: str) -> None:
    """Another rate, scale, weight or datum, by 1e-6, is told apart; without it the runs are alike."""
    assert_runs_alike(rank, front_end, functools.partial(trained, wrong="nothing"))
    with pytest.raises(AssertionError, match=WRONG[wrong]):
        assert_runs_alike(rank, front_end, functools.partial(trained, wrong=wrong))
