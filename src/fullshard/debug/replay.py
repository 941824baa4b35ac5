"""Run a step twice, and say whether it computes the same bits."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint.state.parameters import local_parameters, mark_shards_written
from fullshard.debug.digests import digest
from fullshard.debug.values import ModuleValues
from fullshard.engine.containers import iterate_tensors
from fullshard.engine.ownership import units_of
from fullshard.engine.parameters.sharded import value_of
from fullshard.ranks.agreement import gather, list_ranks
from fullshard.ranks.groups import data_parallel_groups

__all__ = ["Replay", "replay"]

_Value = tuple[str, str]  # what it is, and its digest


@dataclass(frozen=True)
class Replay:
    """What ``replay`` has found; its text says it in a sentence.

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
    state = _State(model, optimizer)
    first = _record(step, model)
    state.restore()
    second = _record(step, model)
    found: dict[int, tuple[int, str]] = {}
    own = _first_difference(first, second)
    if own is not None:
        found[_rank()] = own
    for group in dict.fromkeys(g for unit in units_of(model) for g in data_parallel_groups(unit.mesh)):
        for others in gather(found, group).values():
            found |= {rank: (number, what) for rank, (number, what) in others.items()}
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

    values = ModuleValues(model, visit)
    values.begin()
    try:
        step()
    finally:
        values.end()
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


class _State:
    """Everything that a step changes, copied."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._model, self._optimizer = model, optimizer
        parameters = list({id(each.parameter): each.parameter for each in local_parameters(model)}.values())
        self._buffers = [
            (module, name, buffer)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        tensors = [*(value_of(parameter) for parameter in parameters), *(buffer for _, _, buffer in self._buffers)]
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in tensors]
        self._gradients = [(p, None if p.grad is None else p.grad.clone()) for p in parameters]
        self._groups = self._entries = None
        if optimizer is not None:
            self._groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            self._groups = copy.deepcopy(self._groups)
            self._entries = {p: _copied(entries) for p, entries in optimizer.state.items()}
        device = next((t.device for t, _ in self._tensors if t.device.type not in ("cpu", "meta")), None)
        self._module = None if device is None else torch.get_device_module(device)
        self._random = torch.get_rng_state(), random.getstate()
        self._device_random = None if self._module is None else self._module.get_rng_state()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else (numpy.random, numpy.random.get_state())

    @torch.no_grad()
    def restore(self) -> None:
        """Write everything back."""
        local_parameters(self._model)  # raises in the middle of a step
        for module, name, buffer in self._buffers:  # the step may have assigned another
            module._buffers[name] = buffer
        for tensor, kept in self._tensors:
            tensor.copy_(kept)
        mark_shards_written(self._model)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        if self._optimizer is not None and self._groups is not None and self._entries is not None:
            for group, kept_group in zip(self._optimizer.param_groups, self._groups, strict=True):
                group.update(kept_group)
            self._optimizer.state.clear()
            self._optimizer.state.update(self._entries)
        torch.set_rng_state(self._random[0])
        random.setstate(self._random[1])
        if self._module is not None:
            self._module.set_rng_state(self._device_random)
        if self._numpy is not None:
            self._numpy[0].set_state(self._numpy[1])


def _copied(entries: dict[Any, Any]) -> dict[Any, Any]:
    return {k: v.clone() if isinstance(v, torch.Tensor) else copy.deepcopy(v) for k, v in entries.items()}


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
