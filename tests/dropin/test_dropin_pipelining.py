"""torch.distributed.pipelining on stages that fullshard shards through torch's names: all schedules."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from running import run_example
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining import stage as stages
from torch.distributed.tensor import DTensor

import fullshard
from compare import assert_close
from front_ends import CLOSE, full, sgd
from fullshard import dropin
from models import Block, batch
from ranks import Rank, RankPool, on_ranks

ROOT = Path(__file__).resolve().parents[2]
DIM, MICROBATCHES, STEPS = 6, 4, 2
V_SHAPED = [ScheduleZBVZeroBubble, ScheduleDualPipeV]
SPLIT = [ScheduleInterleavedZeroBubble, *V_SHAPED]  # backward for inputs and for weights apart
# On stages that free their parameters after forward, that keep them, and on replicas.
CASES = [
    *(("fully_shard", schedule) for schedule in SPLIT),
    ("kept", ScheduleInterleaved1F1B),
    ("replicate", Schedule1F1B),
]


def batches(replica: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets."""
    return batch(replica, 2 * step, 2 * MICROBATCHES, DIM), batch(replica, 2 * step + 1, 2 * MICROBATCHES, DIM)


def parts(count: int) -> nn.ModuleList:
    """The model in ``count`` stages."""
    torch.manual_seed(0)
    return nn.ModuleList(nn.Sequential(Block(DIM), Block(DIM)) for _ in range(count))


def reference(count: int) -> tuple[nn.ModuleList, list[list[float]], dict[str, torch.Tensor]]:
    """The unsharded model after all steps, the losses of each step and replica, and the last step's gradients."""
    model = parts(count)
    optimizer, losses = sgd(model, 0.2, momentum=0.9), []
    gradients: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        losses.append([])
        for replica in range(2):
            x, target = batches(replica, step)
            for part in model:
                x = part(x)
            loss = nn.functional.mse_loss(x, target)
            (loss / 2).backward()
            losses[-1].append(loss.item())
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return model, losses, gradients


def shard(part: nn.Module, kind: str, mesh: Any, **options: Any) -> nn.Module:
    """Each block a unit, and the stage."""
    if kind == "own":
        function = fullshard.fully_shard
    elif kind == "replicate":
        function = importlib.import_module("torch.distributed._composable.replicate_with_fsdp").replicate
    else:
        function = importlib.import_module("torch.distributed.fsdp").fully_shard
        options.setdefault("reshard_after_forward", kind == "fully_shard")
    for block in part.children():
        function(block, mesh=mesh, **options)
    return function(part, mesh=mesh, **options)


def assert_trains(rank: Rank, schedule: Any, kind: str, close: dict[str, float] = CLOSE, **options: Any) -> None:
    """Require losses, gradients and parameters of the unsharded model."""
    if schedule in V_SHAPED and not hasattr(stages, "InferenceMode"):
        pytest.skip("this torch sends between two stages on one rank, which gloo cannot")
    mesh = rank.make_mesh(2, 2, names=("pp", "dp"))
    place, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    count = 2 if schedule is Schedule1F1B else 4
    mine = [place, count - 1 - place] if schedule in V_SHAPED else list(range(place, count, 2))
    model, losses, gradients = reference(count)
    sharded = {
        number: shard(part, kind, mesh["dp"], **options) for number, part in enumerate(parts(count)) if number in mine
    }
    made = [PipelineStage(sharded[n], n, count, torch.device("cpu"), group=mesh["pp"].get_group()) for n in mine]
    run = schedule(made[0] if count == 2 else made, n_microbatches=MICROBATCHES, loss_fn=nn.functional.mse_loss)
    optimizers = [sgd(part, 0.2, momentum=0.9) for part in sharded.values()]
    for step in range(STEPS):
        x, target = batches(replica, step)
        found: list[torch.Tensor] = []
        inputs = (x,) if 0 in mine else ()
        run.step(*inputs, **({"target": target, "losses": found} if count - 1 in mine else {}))
        if found:
            assert torch.stack(found).mean().item() == pytest.approx(losses[step][replica], rel=close["rtol"])
        for number, part in sharded.items():
            for name, parameter in part.named_parameters():
                assert isinstance(parameter, DTensor), f"{name} is full after step {step}"
                assert parameter.grad is not None, "no gradient"
                gradient = full(parameter.grad)
                if step == STEPS - 1:
                    assert_close(gradient, gradients[f"{number}.{name}"], f"gradient of {name}", **close)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for number, part in sharded.items():
        for name, parameter in part.named_parameters():
            assert_close(full(parameter).detach(), model[number].get_parameter(name).detach(), name, **close)


@on_ranks(4)
@pytest.mark.parametrize(("kind", "schedule"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_schedules(rank: Rank, kind: str, schedule: Any) -> None:
    """Backwards in one part or two, on stages that free parameters after forward, keep them, or are replicas."""
    with dropin.install(quiet=True):
        assert_trains(rank, schedule, kind)


@on_ranks(4)
def test_mixed_precision(rank: Rank) -> None:
    """bf16 parameters with gradients in fp32: microbatches add up in fp32."""
    with dropin.install(quiet=True):
        policy = importlib.import_module("torch.distributed.fsdp").MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
        )
        assert_trains(rank, ScheduleZBVZeroBubble, "fully_shard", {"rtol": 0.03, "atol": 0.01}, mp_policy=policy)


@on_ranks(4)
def test_without_the_dropin(rank: Rank) -> None:
    """Stages reduce every microbatch, to the same gradients; zero-bubble schedules do not find the weights."""
    assert_trains(rank, ScheduleInterleaved1F1B, "own")
    with pytest.raises(AssertionError, match="no gradient"):
        assert_trains(rank, ScheduleInterleavedZeroBubble, "own")


PAGE = ROOT / "docs/integrations/pipelining.md"
EXAMPLE = ROOT / "examples/pipelining.py"


def test_example(ranks: RankPool) -> None:
    """It trains: one line a step, on one rank."""
    printed = ranks(4, run_example, EXAMPLE)
    assert [bool(text) for text in printed] == [False, False, True, False]
    losses = [float(value) for value in re.findall(r"^step \d loss (\S+)$", printed[2], re.MULTILINE)]
    assert len(losses) == 5 and losses[-1] < losses[0]


@on_ranks(4)
def test_snippets_of_the_page(rank: Rank) -> None:
    """The others run on four ranks."""
    with dropin.install(quiet=True):
        for snippet in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1:]:
            exec(compile(snippet, str(PAGE), "exec"), {"__name__": "snippet"})
