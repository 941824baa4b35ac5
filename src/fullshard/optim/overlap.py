"""Overlap optimizer steps with the communication before and after them. See [Note: Overlap with the optimizer]."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import TypeVar

from torch import nn
from torch.optim import Optimizer

from fullshard.engine.optimizer_steps import unshards_by_itself
from fullshard.engine.ownership import unit_of
from fullshard.engine.runtime import Runtime, ensure_idle
from fullshard.engine.unit import Unit
from fullshard.errors import FullshardError
from fullshard.optim.local.local_tensors import LocalTensor, owning_unit
from fullshard.optim.local.localize import local_step_of, localize

__all__ = ["overlap"]

_O = TypeVar("_O", bound=Optimizer)


def overlap(optimizer: _O, model: nn.Module, *, enable: bool = True) -> _O:
    """Overlap ``optimizer.step()`` with the last reductions of backward and the first all-gathers of the next forward.

    A backward of ``model`` then returns while its last reductions are in flight. Their gradients are waited for at
    first use: by the step, after it has stepped other parameters, or by any other operation on them. The step then
    updates the parameters that run first in forward and issues their all-gather, which overlaps with the rest of the
    step.

    The step becomes a collective: all ranks have to step. Between a step and the next forward, only other optimizers
    and loading a state dict may write to parameters. After any other write, call ``reshard()`` on all ranks, on every
    FSDP module whose parameters were written: it applies to one unit, not to nested ones.

    Gradients that user hooks receive (``set_all_reduce_hook``, hooks on parameters), that are offloaded to the CPU, or
    that belong to a ``FullyShardedDataParallel`` are waited for at the end of backward, as without overlap.

    Args:
        optimizer: Optimizer of the parameters of ``model`` and maybe others. It is changed in place, and steps local
            tensors (``fullshard.optim.localize``).
        model: The root: the module that ``fullshard.fully_shard`` was called on last, or the outermost wrapper.
        enable: False disables the overlap.

    Returns:
        The same optimizer.

    Raises:
        ValueError: If ``model`` is not sharded, or ``optimizer`` cannot step local tensors.

    Example:
        ```python
        import torch
        from torch import nn
        from fullshard import fully_shard
        from fullshard.optim import overlap

        model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        optimizer = overlap(torch.optim.AdamW(model.parameters(), lr=1e-3), model)
        for _ in range(2):
            model(torch.randn(4, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ```
    """
    unit = unit_of(model)
    if unit is None:
        raise ValueError(f"overlap: expected a module that fully_shard was called on, found {type(model).__name__}")
    step = local_step_of(optimizer) or local_step_of(localize(optimizer))
    if step is None:
        raise ValueError(f"overlap: expected an elementwise optimizer, found {type(optimizer).__name__}")
    unit.settings.overlap_optimizer = enable
    step.schedule = OverlappedStep(optimizer, unit) if enable else None
    ensure_idle(unit)
    return optimizer


class OverlappedStep:
    """Schedule of a step on local tensors that overlaps with communication.

    Args:
        optimizer: Optimizer of the parameters of ``root`` and, maybe, others.
        root: Root unit of the model.
    """

    _optimizer: weakref.ref[Optimizer]
    _root: weakref.ref[Unit]
    _in_flight: set[int]  # ids of the parameters whose gradients are in flight

    def __init__(self, optimizer: Optimizer, root: Unit) -> None:
        self._optimizer, self._root, self._in_flight = weakref.ref(optimizer), root.ref, set()

    @contextlib.contextmanager
    def inspecting_gradients(self) -> Iterator[None]:
        """Return a context in which gradients may be read while their reductions are in flight."""
        runtime = self._runtime()
        self._in_flight = set()
        if runtime is None:
            yield
            return
        if runtime.overlap.adds:
            runtime.finish_deferred_reductions()
        with runtime.overlap.exposed() as late:
            self._in_flight = late
            yield

    def steps(self, tensors: Sequence[LocalTensor]) -> Iterator[Sequence[LocalTensor]]:
        """Yield the local tensors in parts; wait for reductions and issue all-gathers in between."""
        runtime, optimizer = self._runtime(), self._optimizer()
        if runtime is None:
            yield tensors
            return
        assert optimizer is not None, "the optimizer is stepping"
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        ids, units = set(map(id, parameters)), {id(unit): unit for unit in map(owning_unit, parameters)}
        unshards_by_itself.add(optimizer)
        for unit in units.values():
            if unit is not None:
                unit.mark_out_of_date()
        launches = runtime.prefetcher.first_in_forward()
        launches = [first for first in launches if all(_are_stepped(unit, ids) for unit in first)]
        before, soon, after = self._split(tensors, {id(unit) for first in launches for unit in first})
        try:
            if before:
                yield before
            runtime.finish_deferred_reductions()
            if soon:
                yield soon
            runtime.begin_unshard_for_next_forward(launches)
            if after:
                yield after
        except BaseException:
            unshards_by_itself.discard(optimizer)  # torch calls no hooks for a step that raises
            raise

    def _runtime(self) -> Runtime | None:
        """Return the runtime of the model; None if it has not run yet.

        Raises:
            FullshardError: If the model is no longer the root.
        """
        root = self._root()
        runtime = None if root is None else root.runtime
        if runtime is not None and runtime.root() is not root:
            raise FullshardError(
                "overlap: the model that was passed is now nested in another FSDP module; call fullshard.optim.overlap "
                "with the root module"
            )
        return None if runtime is None or runtime.busy else runtime

    def _split(self, tensors: Sequence[LocalTensor], first: set[int]) -> list[list[LocalTensor]]:
        """Split the tensors into those to step first, in the middle (gradients in flight, or needed first in forward),
        and last; ``first`` are the ids of the units that are unsharded next.
        """
        soon: list[LocalTensor] = []
        other: list[LocalTensor] = []
        for tensor in tensors:
            parameter = tensor.parameter
            in_middle = id(parameter) in self._in_flight or id(owning_unit(parameter)) in first
            (soon if in_middle else other).append(tensor)
        before = _first_half(other) if self._in_flight else 0
        return [other[:before], soon, other[before:]]


def _are_stepped(unit: Unit, ids: set[int]) -> bool:
    """Return True if the parameters of the unit are among those with ``ids``: it can be unsharded after their step."""
    parameters = (parameter for bucket in unit.buckets for parameter in bucket.optimizer_parameters)
    return all(id(parameter) in ids or not parameter.requires_grad for parameter in parameters)


def _first_half(tensors: Sequence[LocalTensor]) -> int:
    """Return how many of the tensors, from the first, hold half of all elements."""
    sizes = [tensor.local.numel() for tensor in tensors]
    passed = 0
    for index, size in enumerate(sizes):
        passed += size
        if 2 * passed >= sum(sizes):
            return index + 1
    return 0
