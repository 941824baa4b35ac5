"""Names for the memory that fullshard's engine asks for, so that a ledger can say what was alive at a peak.

Installed in a benchmark's process only, around the engine's own functions: names as of this version of it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, get_args
from unittest import mock

import torch
from torch import nn

from bench.memory_limit.ledger import mark, range_of

FULL, GATHER_MESSAGE, INPUT = "full parameters", "gather message", "all-gather input"
REDUCE_MESSAGE, SHARDS, CAST = "reduce message", "reduced shards", "gradients once more, in another form"
GRADIENT, TRANSPORT = "full gradients", "messages of the transport"
BOUNDARY = "boundary"


@contextlib.contextmanager
def labelled(model: nn.Module) -> Iterator[None]:
    """Inside, memory that the units of ``model`` ask for has a name: ``what|unit``."""
    from fullshard.comm.base import Kind
    from fullshard.comm.gloo import GlooTransport
    from fullshard.engine.parameters.sharded import ShardedParameter
    from fullshard.engine.reduction.grad_reduction import GradReduction
    from fullshard.engine.reduction.plan import ReductionPlan
    from fullshard.memory import Buffer

    names: dict[int, str] = {}

    def of_buffer(buffer: Any) -> str:
        if id(buffer) not in names:
            names.update((id(known), name) for known, name in _buffers(model))
        return names.get(id(buffer), "other buffer|")

    def of_plan(plan: Any) -> str:
        return next((u.name for u, _, known in _plans(model) if known is plan), "")

    take = ShardedParameter.take_gradient

    def take_gradient(parameter: Any) -> torch.Tensor | None:
        gradient = take(parameter)
        if gradient is not None:
            note_gradient(gradient, parameter.unit().name)
        return gradient

    named = [
        (Buffer, "allocate", lambda buffer, *_: of_buffer(buffer)),
        (GradReduction, "__init__", lambda _, plan, *__: f"{SHARDS}|{of_plan(plan)}"),
        (ReductionPlan, "inputs", lambda plan, *_: f"{CAST}|{of_plan(plan)}"),
        *((GlooTransport, f"_{kind}", lambda *_: f"{TRANSPORT}|") for kind in get_args(Kind)),
    ]
    with contextlib.ExitStack() as patches:
        for owner, method, name in named:
            patches.enter_context(mock.patch.object(owner, method, _named(getattr(owner, method), name)))
        patches.enter_context(mock.patch.object(ShardedParameter, "take_gradient", take_gradient))
        yield


def note_gradient(gradient: torch.Tensor, unit: str) -> None:
    """The block under ``gradient`` is a full gradient of ``unit``, however it was made."""
    mark(f"{GRADIENT}|{unit}|{gradient.untyped_storage().data_ptr()}")


def _named(original: Callable[..., Any], name: Callable[..., str]) -> Callable[..., Any]:
    @functools.wraps(original)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with range_of(name(*args)):
            return original(*args, **kwargs)

    return inside


def _plans(model: nn.Module) -> Iterator[tuple[Any, Any, Any]]:
    from fullshard.engine.ownership import nested_units

    for unit in nested_units(model):
        for bucket in unit.buckets:
            yield unit, bucket, None
            for plan in bucket.plans:
                yield unit, bucket, plan


def _buffers(model: nn.Module) -> Iterator[tuple[object, str]]:
    for unit, bucket, plan in _plans(model):
        if plan is not None:
            yield plan.message, f"{REDUCE_MESSAGE}|{unit.name}"
            continue
        yield bucket._unsharded, f"{FULL}|{unit.name}"
        for all_gather in (bucket._all_gather, getattr(bucket, "_subgroup_all_gather", None)):
            for field, what in (("_message", GATHER_MESSAGE), ("_input", INPUT)):
                buffer = getattr(all_gather, field, None)  # a flat one has no message: it gathers in place
                if buffer is not None:
                    yield buffer, f"{what}|{unit.name}"
