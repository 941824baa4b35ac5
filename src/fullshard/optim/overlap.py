"""Steps that overlap with the communication before and after them. See [Note: Overlap with the optimizer]."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from fullshard.engine.bucket import Bucket
from fullshard.engine.flat_bucket import FlatBucket
from fullshard.engine.ownership import unit_of
from fullshard.engine.parameter import managed_by
from fullshard.engine.schedule import Schedule, tells_units_itself
from fullshard.engine.unit import Unit
from fullshard.errors import FullshardError
from fullshard.optim.local_pieces import Piece
from fullshard.optim.localize import local_step_of, localize

__all__ = ["overlap"]

_O = TypeVar("_O", bound=Optimizer)


def overlap(optimizer: _O, model: nn.Module, *, enable: bool = True) -> _O:
    """Have ``optimizer.step()`` hide the last reductions of a backward and the first gathers of the next forward.

    A backward of ``model`` then returns with its last reductions under way. Their gradients are waited for where they
    are first used: by the step, after it has stepped other parameters, or by any operation on them before. The step
    goes on with the parameters that run first in forward and starts their gather, which travels while the rest is
    stepped. Between a step and the next forward, parameters must not be written to except by loading a state dict or
    by other optimizers; after any other write call ``model.reshard()``, on all ranks. The step becomes a collective:
    all ranks have to step.

    Gradients that a function of the user's is called for (``set_all_reduce_hook``, hooks on parameters), that end in
    CPU memory, or that belong to a ``FullyShardedDataParallel`` are waited for at the end of backward, as without this.

    Args:
        optimizer: Is localised if it is not, see :func:`fullshard.optim.localize`. Changed in place.
        model: The root: what :func:`fullshard.fully_shard` was called on last, or the outermost wrapper.
        enable: False undoes it; the optimizer stays localised.

    Returns:
        The same object.

    Raises:
        ValueError: ``model`` is not sharded, or ``optimizer`` cannot be localised.
    """
    unit = unit_of(model)
    if unit is None:
        raise ValueError(f"overlap: expected a module that fully_shard was called on, found {type(model).__name__}")
    step = local_step_of(optimizer) or local_step_of(localize(optimizer))
    if step is None:
        raise ValueError(f"overlap: expected an elementwise optimizer, found {type(optimizer).__name__}")
    unit.settings.overlap_optimizer = enable
    step.in_parts = StepInParts(optimizer, unit) if enable else None
    if unit.schedule is not None:
        unit.schedule.settle()
    return optimizer


class StepInParts:
    """In which parts, and between what, a localised optimizer steps its pieces.

    Args:
        optimizer: Steps parameters of ``root`` and, maybe, others.
        root: Of the model.
    """

    _optimizer: weakref.ref[Optimizer]
    _root: weakref.ref[Unit]
    _late: set[int]  # ids of the parameters whose gradients are in flight
    _stepped: _Stepped
    _split: tuple[list[Piece], list[Piece], list[Piece]]
    _split_of: tuple[Sequence[Piece], set[int], set[int]] | None  # what it was made for

    def __init__(self, optimizer: Optimizer, root: Unit) -> None:
        self._optimizer, self._root, self._late = weakref.ref(optimizer), root.ref, set()
        self._stepped, self._split, self._split_of = _Stepped([]), ([], [], []), None

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Inside, gradients may be looked at, and have the places that they will be read from."""
        schedule = self._schedule()
        self._late = set()
        if schedule is None:
            yield
            return
        if schedule.overlap.adds:
            schedule.land()
        with schedule.overlap.revealed() as late:
            self._late = late
            yield

    def parts(self, pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
        """The pieces, some at a time; the communication is waited for, and started, in between."""
        schedule = self._schedule()
        if schedule is None:
            yield list(pieces)
            return
        stepped = self._look_at_parameters()
        optimizer = self._optimizer()
        assert optimizer is not None, "it is stepping"
        tells_units_itself.add(optimizer)
        for unit in (ref() for ref in stepped.units):
            if unit is not None:
                unit.outdated = True
        launches = [units for units in schedule.plan_first() if all(map(stepped.has_all_of, units))]
        before, soon, after = self._split_for(pieces, {id(unit) for units in launches for unit in units})
        try:
            if before:
                yield before
            schedule.land()
            if soon:
                yield soon
            schedule.gather_first(launches)
            if after:
                yield after
        except BaseException:
            tells_units_itself.discard(optimizer)  # no hook is called for a step that raises
            raise

    def _schedule(self) -> Schedule | None:
        """Of the model; None if it has not run yet.

        Raises:
            FullshardError: If the model has become a part of another.
        """
        root = self._root()
        schedule = None if root is None else root.schedule
        if schedule is not None and schedule.root() is not root:
            raise FullshardError(
                "fullshard.optim.overlap was given a model that is a part of another one by now, which runs as the "
                "root; call it with that one"
            )
        return None if schedule is None or schedule.busy else schedule

    def _look_at_parameters(self) -> _Stepped:
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        if [*map(id, parameters)] != self._stepped.ids:
            self._stepped = _Stepped(parameters)
        return self._stepped

    def _split_for(self, pieces: Sequence[Piece], first: set[int]) -> tuple[list[Piece], list[Piece], list[Piece]]:
        """What is stepped first, in the middle (what waits for gradients, and what the next forward waits for), last.

        Args:
            pieces: All.
            first: Ids of the units that are gathered next.
        """
        known = self._split_of
        if known is None or known[0] is not pieces or known[1:] != (first, self._late):
            soon: list[Piece] = []
            other: list[Piece] = []
            for piece in pieces:
                parameters = [member.parameter for member in piece.members]
                late = any(id(parameter) in self._late for parameter in parameters)
                begins = any(id(_unit_of(parameter)) in first for parameter in parameters)
                (soon if late or begins else other).append(piece)
            before = _half(other) if self._late else 0
            self._split, self._split_of = (other[:before], soon, other[before:]), (pieces, first, self._late)
        return self._split


class _Stepped:
    """What an optimizer steps.

    Args:
        parameters: All of its parameters.
    """

    ids: list[int]  # of the parameters
    units: list[weakref.ref[Unit]]
    _ids: set[int]

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.ids = [*map(id, parameters)]
        self._ids = set(self.ids)
        units = {id(unit): unit for unit in map(_unit_of, parameters) if unit is not None}
        self.units = [unit.ref for unit in units.values()]

    def has_all_of(self, unit: Unit) -> bool:
        """Whether the unit needs no other optimizer before it can be gathered."""
        return all(id(p) in self._ids or not p.requires_grad for bucket in unit.buckets for p in _seen_of(bucket))


def _seen_of(bucket: Bucket) -> list[nn.Parameter]:
    """What optimizers see of a bucket's parameters."""
    home = bucket.home if isinstance(bucket, FlatBucket) else None
    return [p.sharded for p in bucket.parameters] if home is None else [home.flat]


def _unit_of(parameter: torch.Tensor) -> Unit | None:
    managed = managed_by(parameter)
    return managed.unit() if managed is not None and managed.owned else None


def _half(pieces: Sequence[Piece]) -> int:
    """How many of the pieces, from the first, hold half of all elements."""
    sizes = [piece.parameter.numel() for piece in pieces]
    passed = 0
    for index, size in enumerate(sizes):
        passed += size
        if 2 * passed >= sum(sizes):
            return index + 1
    return 0
