"""Names for the memory that fullshard's engine asks for, so that a ledger can say what was alive at a peak.

Installed in a benchmark's process only, around the engine's own functions: names as of this version of it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

from bench.memory_limit_ledger import mark, range_of

FULL, GATHER_MESSAGE, WIRE = "full parameters", "gather message", "shard as it travels"
REDUCE_MESSAGE, ROWS, CAST = "reduce message", "reduced rows", "gradients once more, in another form"
GRADIENT, TRANSPORT = "full gradients", "messages of the transport"
BOUNDARY = "boundary"


@contextlib.contextmanager
def labelled(model: nn.Module) -> Iterator[None]:
    """Inside, memory that the units of ``model`` ask for has a name: ``what|unit``."""
    from fullshard.engine.parameter import ShardedParameter
    from fullshard.engine.reducer import GradientReducer
    from fullshard.engine.reduction import PendingReduction
    from fullshard.memory import Buffer
    from fullshard.transport.gloo import GlooTransport

    names: dict[int, str] = {}

    def of_buffer(buffer: Any) -> str:
        if id(buffer) not in names:
            names.update((id(known), name) for known, name in _buffers(model))
        return names.get(id(buffer), "other buffer|")

    def of_reducer(reducer: Any) -> str:
        return next((u.name for u, _, known in _reducers(model) if known is reducer), "")

    take = ShardedParameter.take_gradient

    def take_gradient(parameter: Any) -> torch.Tensor | None:
        gradient = take(parameter)
        if gradient is not None:
            note_gradient(gradient, parameter.unit().name)
        return gradient

    named = [
        (Buffer, "allocate", lambda buffer, *_: of_buffer(buffer)),
        (PendingReduction, "__init__", lambda _, reducer, *__: f"{ROWS}|{of_reducer(reducer)}"),
        (GradientReducer, "inputs", lambda reducer, *_: f"{CAST}|{of_reducer(reducer)}"),
        *((GlooTransport, method, lambda *_: f"{TRANSPORT}|") for method in ("_gather", "_reduce", "_all_reduce")),
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


def _reducers(model: nn.Module) -> Iterator[tuple[Any, Any, Any]]:
    from fullshard.engine.ownership import nested_units

    for unit in nested_units(model):
        for bucket in unit.buckets:
            yield unit, bucket, None
            for reducer in bucket.reducers:
                yield unit, bucket, reducer


def _buffers(model: nn.Module) -> Iterator[tuple[object, str]]:
    for unit, bucket, reducer in _reducers(model):
        if reducer is not None:
            yield reducer.message, f"{REDUCE_MESSAGE}|{unit.name}"
            continue
        yield bucket._full, f"{FULL}|{unit.name}"
        for gather in (getattr(bucket, "_home", None), getattr(bucket, "_near", None)):
            if gather is not None:
                yield gather._message, f"{GATHER_MESSAGE}|{unit.name}"
                yield gather._wire, f"{WIRE}|{unit.name}"
