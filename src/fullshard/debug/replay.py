"""Run a step twice, and say whether it computes the same bits."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint.state.parameters import local_parameters, mark_shards_written
from fullshard.debug.digests import digest
from fullshard.debug.values import ModuleValues
from fullshard.engine.containers import iterate_tensors
from fullshard.engine.ownership import units_of
from fullshard.engine.parameters.sharded import value_of
from fullshard.ranks.agreement import gather_found, list_ranks, own_rank
from fullshard.ranks.groups import groups_of

__all__ = ["Replay", "replay"]

_Value = tuple[str, str]  # what it is, and its digest


@dataclass(frozen=True)
class Replay:
    """Result of ``replay``; its text is a sentence.

    Args:
        values: How many values of this rank were compared.
        first: The first value that differs on any rank: phase, module or parameter, and ranks; None: none differs.
    """

    values: int
    first: str | None

    @property
    def equal(self) -> bool:
        """True if all values have the same bits in both runs, on all ranks."""
        return self.first is None

    def __str__(self) -> str:
        found = "bitwise equal" if self.equal else f"not equal: {self.first} differs first"
        return f"{found} ({self.values:,} values compared on this rank)"


def replay(step: Callable[[], object], model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Replay:
    """Run a training step twice from the same state, and compare all values that the model computes, bit for bit.

    Parameters, buffers, gradients, state of the optimizer and random numbers are those of before in both runs, and
    afterwards those of the second one. A copy of them is in memory meanwhile. A collective.

    Args:
        step: Forward, backward, and the optimizer step if there is one. It has to use the same batch in both runs.
        model: Sharded by either front end, or not.
        optimizer: What ``step`` steps; None: it steps none.

    Returns:
        The same on all ranks, but for the number of values.

    Raises:
        PhaseError: In the middle of a step.

    Example:
        ```python
        import torch
        from torch import nn

        from fullshard import fully_shard
        from fullshard.debug import replay

        model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8)))
        optimizer = torch.optim.AdamW(model.parameters())
        batch = torch.randn(4, 8)


        def step() -> None:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


        print(replay(step, model, optimizer))  # bitwise equal (...)
        ```
    """
    restore = _kept(model, optimizer)
    first = _record(step, model)
    restore()
    second = _record(step, model)
    own = _first_difference(first, second)
    found = gather_found({} if own is None else {own_rank(): own}, groups_of(unit.mesh for unit in units_of(model)))
    if not found:
        return Replay(len(second), None)
    earliest = min(found.values())
    ranks = [rank for rank, each in found.items() if each == earliest]
    return Replay(len(second), f"{earliest[1]} on {list_ranks(ranks)}")


def _record(step: Callable[[], object], model: nn.Module) -> list[_Value]:
    """Run a step, and return what it has computed, in order."""
    found: list[_Value] = []

    def visit(phase: str, name: str, what: str, values: Any) -> None:
        found.extend((f"{phase}: {what}", digest(tensor)) for tensor in iterate_tensors(values))

    with ModuleValues(model, visit):
        step()
    for parameter in local_parameters(model):
        found.append((f"after the step: parameter {parameter.fqn!r}", digest(parameter.local_of(parameter.parameter))))
        if parameter.parameter.grad is not None:
            gradient = parameter.local_of(parameter.parameter.grad)
            found.append((f"after the step: the gradient of {parameter.fqn!r}", digest(gradient)))
    return found


def _first_difference(first: list[_Value], second: list[_Value]) -> tuple[int, str] | None:
    for number, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return number, one[0] if one[0] == other[0] else f"{one[0]} (then {other[0]})"
    if len(first) != len(second):
        number = min(len(first), len(second))
        return number, f"the number of values, after {number}: one run has computed more, which"
    return None


def _kept(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Callable[[], None]:
    """Copy everything that a step changes, and return a function that writes it back."""
    parameters = list({id(each.parameter): each.parameter for each in local_parameters(model)}.values())
    undo: list[Callable[[], object]] = []
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                undo.append(partial(module._buffers.__setitem__, name, buffer))  # the step may assign another
                undo.append(partial(buffer.copy_, buffer.detach().clone()))
    values = [value_of(parameter) for parameter in parameters]
    undo += [partial(value.copy_, value.detach().clone()) for value in values]
    undo.append(partial(mark_shards_written, model))
    for parameter in parameters:
        undo.append(partial(setattr, parameter, "grad", None if parameter.grad is None else parameter.grad.clone()))
    if optimizer is not None:
        for group in optimizer.param_groups:
            options = {name: value for name, value in group.items() if name != "params"}
            undo.append(partial(group.update, copy.deepcopy(options)))
        entries = {parameter: _copied(state) for parameter, state in optimizer.state.items()}
        undo += [optimizer.state.clear, partial(optimizer.state.update, entries)]
    undo += [partial(torch.set_rng_state, torch.get_rng_state()), partial(random.setstate, random.getstate())]
    for device in {value.device.type for value in values} - {"cpu", "meta"}:
        module_of_device = torch.get_device_module(device)
        undo.append(partial(module_of_device.set_rng_state, module_of_device.get_rng_state()))
    if (numpy := sys.modules.get("numpy")) is not None:
        undo.append(partial(numpy.random.set_state, numpy.random.get_state()))

    @torch.no_grad()
    def restore() -> None:
        local_parameters(model)  # raises in the middle of a step
        for each in undo:
            each()

    return restore


def _copied(entries: dict[Any, Any]) -> dict[Any, Any]:
    return {k: v.clone() if isinstance(v, torch.Tensor) else copy.deepcopy(v) for k, v in entries.items()}
