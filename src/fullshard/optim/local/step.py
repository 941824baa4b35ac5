"""One step on local tensors: the optimizer's own arithmetic.

While the optimizer's own ``step`` runs, its ``param_groups`` and ``state`` are temporarily those of the local tensors;
hooks and closures see the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from fullshard.engine.optimizer_overlap import GradientInFlight
from fullshard.optim.local.local_tensors import FlatStates, LocalTensor
from fullshard.optim.local.plan import StepPlan
from fullshard.profiling import profiled

__all__ = ["WITHOUT_HOOKS", "LocalStep", "StepSchedule"]


# Attributes of an optimizer that steps without hooks of its own.
WITHOUT_HOOKS: dict[str, Any] = {"_optimizer_step_pre_hooks": {}, "_optimizer_step_post_hooks": {}}


class StepSchedule(Protocol):
    """Divides a step into several."""

    def inspecting_gradients(self) -> AbstractContextManager[None]:
        """Return a context in which the step reads gradients."""

    def steps(self, tensors: Sequence[LocalTensor]) -> Iterable[Sequence[LocalTensor]]:
        """Yield all local tensors, each once; communication is issued and waited for in between."""


class DividedStep(Protocol):
    """Divides a part of a step into several, around each of which it moves state."""

    def divide(self, tensors: Sequence[LocalTensor], state: Any) -> Iterable[Sequence[LocalTensor]]:
        """Yield all local tensors, each once, while ``state`` of theirs is where they are."""


class LocalStep:
    """The local tensors of an optimizer, and how it steps them.

    Args:
        inner: The optimizer's own step, without hooks: called with the optimizer and the user's further arguments.
    """

    schedule: StepSchedule | None  # None: all at once
    is_running: bool
    offload: DividedStep | None  # None: state stays on the device
    _inner: Callable[..., Any]
    _plan: StepPlan | None
    _flats: FlatStates

    def __init__(self, inner: Callable[..., Any]) -> None:
        self._inner, self.schedule, self._plan, self._flats = inner, None, None, FlatStates()
        self.is_running, self.offload = False, None

    @torch._disable_dynamo  # type: ignore[attr-defined] # as torch does for functions that read state
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        """Step all local tensors; the optimizer's own step gets the further arguments."""
        schedule = self.schedule
        if schedule is None:
            plan = self._prepare(optimizer)
        else:
            with schedule.inspecting_gradients():
                plan = self._prepare(optimizer)
        options = [dict(group) for group in optimizer.param_groups]
        self.is_running = True
        try:
            for part in self._parts(plan):
                with profiled("optimizer"):
                    written = self._step_tensors(optimizer, part, options, *args, **kwargs)
                for group, values in written:
                    optimizer.param_groups[group].update(values)
        finally:
            self.is_running = False
            plan.finish(optimizer)

    def _parts(self, plan: StepPlan) -> Iterator[Sequence[LocalTensor]]:
        """Yield the local tensors in the parts that are stepped one after another."""
        for part in (plan.tensors,) if self.schedule is None else self.schedule.steps(plan.tensors):
            if self.offload is None:
                yield part
            else:
                yield from self.offload.divide(part, plan.local_state)

    def _prepare(self, optimizer: torch.optim.Optimizer) -> StepPlan:
        """Return the plan of this step, with the gradients set."""
        plan = self._plan
        if plan is None or not plan.begin(optimizer):
            _wait_for_gradients(optimizer)
            plan = self._plan = StepPlan(optimizer, self._flats)
            is_valid = plan.begin(optimizer)
            assert is_valid, "the plan was made for these gradients"
        return plan

    def _step_tensors(
        self,
        optimizer: torch.optim.Optimizer,
        tensors: Sequence[LocalTensor],
        options: Sequence[Mapping[str, Any]],
        *args: Any,
        **kwargs: Any,
    ) -> list[tuple[int, dict[str, Any]]]:
        """Run the optimizer's own step with groups and state of these local tensors in place of the user's.

        Args:
            optimizer: The optimizer.
            tensors: The local tensors.
            options: Its groups as they were before the step: each part of a step begins with the same ones.
            *args: Further arguments.
            **kwargs: Further arguments.

        Returns:
            What the optimizer has written to groups, by their number.
        """
        assert self._plan is not None
        groups, attributes = optimizer.param_groups, optimizer.__dict__
        plain: list[list[torch.Tensor]] = [[] for _ in groups]
        others: dict[int, list[torch.Tensor]] = {}  # DTensors, which foreach cannot mix with plain tensors
        for tensor in tensors:
            is_dtensor = isinstance(tensor.parameter, DTensor)
            (others.setdefault(tensor.group, []) if is_dtensor else plain[tensor.group]).append(tensor.parameter)
        numbered = [*enumerate(plain), *others.items()]
        local_groups = [{**options[number], "params": parameters} for number, parameters in numbered]
        before = [dict(group) for group in local_groups]
        replaced = {"param_groups": local_groups, "state": self._plan.local_state, **WITHOUT_HOOKS}
        users = {name: attributes[name] for name in replaced}
        attributes.update(replaced)
        try:
            self._inner(optimizer, *args, **kwargs)
        finally:
            attributes.update(users)
        return [
            (number, {name: value for name, value in new.items() if name not in old or old[name] is not value})
            for (number, _), old, new in zip(numbered, before, local_groups, strict=True)
        ]


def _wait_for_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Wait for gradients whose reductions are still in flight."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if type(parameter.grad) is GradientInFlight:
                parameter.grad.result()
