"""What torch 2.15 has added to FSDP2: each program runs on torch's FSDP2 and on fullshard, and sees the same."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torchs
from torch import nn
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion

import fullshard
from compare import assert_close, assert_equal
from models import batch
from ranks import Rank, on_ranks

pytestmark = [
    pytest.mark.skipif(TorchVersion(torch.__version__) < "2.15", reason="this torch has not these names"),
    pytest.mark.cpu_only("what torch's FSDP2 does over gloo is compared"),
]


def build(engine: Any, rank: Rank, reshard: bool, **policy: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 3))
    options = {"mesh": rank.mesh, "reshard_after_forward": reshard, "mp_policy": engine.MixedPrecisionPolicy(**policy)}
    for index in (0, 2):
        engine.fully_shard(model[index], **options)
    return engine.fully_shard(model, **options)


def tried(call: Callable[[], Any]) -> str:
    """ "raises", or what was returned, in words that both engines share."""
    try:
        found = call()
    except Exception:
        return "raises"
    return "handle" if hasattr(found, "wait") else str(found)


def gradients(model: Any) -> list[torch.Tensor | None]:
    found = [parameter.grad for parameter in model.parameters() if isinstance(parameter, DTensor)]
    return [None if each is None else each.to_local().clone() for each in found]


def step(model: Any, rank: Rank, number: int) -> None:
    model(batch(rank.rank, number, 5, 6)).square().mean().backward()


def finalized(engine: Any, rank: Rank, seen: list[Any]) -> None:
    """Microbatches without synchronization, and one finalization of them; then one of each backward."""
    for reshard in (True, False):
        model = build(engine, rank, reshard)
        seen.append(tried(model.finalize_backward))  # before the first forward
        model.set_manual_backward_finalization(True)
        for number in range(4):
            model.set_requires_gradient_sync(number == 3)
            step(model, rank, number)
        seen.append(tried(model.finalize_backward))
        seen.append(gradients(model))
        model.zero_grad()
        step(model, rank, 4)
        handle = model.finalize_backward(async_op=True)
        seen.append("handle" if isinstance(handle, engine.GradientReductionHandle) else type(handle))
        seen.append(tried(lambda model=model: step(model, rank, 5)))  # before it was waited for
        seen.append(tried(model.finalize_backward))
        handle.wait()
        seen.append(tried(handle.wait))
        seen.append(gradients(model))


def modes(engine: Any, rank: Rank, seen: list[Any]) -> None:
    """When the mode may change, and where it may be set."""
    model = build(engine, rank, True)
    step(model, rank, 0)
    model.zero_grad()
    model.set_manual_backward_finalization(True)
    step(model, rank, 1)
    seen.append(tried(lambda: model.set_manual_backward_finalization(False)))
    model.finalize_backward()
    seen.append(tried(lambda: model.set_manual_backward_finalization(False)))
    seen.append(tried(lambda: model[0].set_manual_backward_finalization(True)))
    step(model, rank, 2)
    seen.append(gradients(model))


def kept_storage(engine: Any, rank: Rank, seen: list[Any]) -> None:
    """Unsharded parameters keep their addresses over microbatches and steps, also after an optimizer step."""
    for reshard in (True, False):
        model = build(engine, rank, reshard)
        model.set_keep_unsharded_storage(True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        places: list[int] = []
        for index in (0, 2):
            model[index].register_forward_hook(lambda module, *_, to=places: to.append(module.weight.data_ptr()))
        for number in range(4):
            step(model, rank, number)
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        seen.append([places[index] == places[index % 2] for index in range(len(places))])
        seen.append([parameter.to_local().clone() for parameter in model.parameters()])


def override(engine: Any, rank: Rank, seen: list[Any]) -> None:
    """One parameter is computed with in its own dtype; other answers."""
    model = build(
        engine,
        rank,
        True,
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
        param_dtype_override_fn=lambda parameter: parameter.dtype,
    )
    dtypes: list[torch.dtype] = []
    model[0].register_forward_hook(lambda module, *_: dtypes.append(module.weight.dtype))
    step(model, rank, 0)
    seen += [dtypes, gradients(model)]
    seen.append(tried(lambda: build(engine, rank, True, param_dtype_override_fn=lambda _: "bfloat16")))


PROGRAMS = {"finalized": finalized, "modes": modes, "kept storage": kept_storage, "override": override}


@on_ranks(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_same(rank: Rank, name: str) -> None:
    """Values within rounding of the order of sums; everything else is equal."""
    ours: list[Any] = []
    theirs: list[Any] = []
    PROGRAMS[name](fullshard, rank, ours)
    names = ("fully_shard", "MixedPrecisionPolicy", "GradientReductionHandle")
    PROGRAMS[name](SimpleNamespace(**{each: getattr(torchs, each) for each in names}), rank, theirs)
    assert len(ours) == len(theirs)
    for index, (mine, expected) in enumerate(zip(ours, theirs, strict=True)):
        if isinstance(expected, list) and any(isinstance(each, torch.Tensor) for each in expected):
            assert [each is None for each in mine] == [each is None for each in expected]
            for value, other in zip(mine, expected, strict=True):
                if value is not None:
                    assert_close(value, other, f"{name} {index}", rtol=1e-5, atol=1e-7)
        else:
            assert_equal(mine, expected, f"{name} {index}")
