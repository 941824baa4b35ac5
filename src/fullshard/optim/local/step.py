"""One step of a localized optimizer: the optimizer's own arithmetic, on local tensors.

[Note: Stepping local tensors]
While the optimizer's own ``step`` runs, its ``param_groups`` and ``state`` are temporarily those of the local tensors;
hooks and closures see the user's. The lists that ``_init_group`` of torch's optimizers fills (one per kind of state)
are the same in every step except for the gradients, so they are recorded and replayed: with many small parameters that
loop, and setting their gradients, is a third of a fused step.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from fullshard.engine.optimizer_overlap import GradientInFlight
from fullshard.optim.local.local_tensors import FlatStates, LocalTensor
from fullshard.optim.local.plan import StepPlan
from fullshard.profiling import profiled

__all__ = ["LocalStep", "StepSchedule"]

PARAMETERS, GRADIENTS = 0, 1  # indices of the lists that _init_group fills; the others are of state


class StepSchedule(Protocol):
    """Divides a step into several."""

    def inspecting_gradients(self) -> AbstractContextManager[None]:
        """Return a context in which the step reads gradients."""

    def steps(self, tensors: Sequence[LocalTensor]) -> Iterable[Sequence[LocalTensor]]:
        """Yield all local tensors, each once; communication is issued and waited for in between."""


class LocalStep:
    """The local tensors of a localized optimizer, and how it steps them.

    Args:
        inner: The optimizer's own step, without hooks: called with the optimizer and the user's further arguments.
        flatten: Step runs.
        is_known: The optimizer is one of torch's elementwise optimizers, whose use of state is known.
    """

    schedule: StepSchedule | None  # None: all at once
    flatten: bool
    _inner: Callable[..., Any]
    _is_torch_elementwise: bool
    _plan: StepPlan | None
    _flats: FlatStates
    _inputs: dict[tuple[int, ...], list[_GroupInputs]]  # by the indices of the plan's local tensors in a part
    _active_inputs: dict[int, _GroupInputs]  # by the id of the local group, while the optimizer steps
    _gradients: list[Any]  # of the local tensors of the plan, in this step
    _may_change_state: bool  # the optimizer may have replaced entries of the state in this step

    def __init__(self, inner: Callable[..., Any], *, flatten: bool, is_known: bool) -> None:
        self._inner, self.flatten, self._is_torch_elementwise, self.schedule = inner, flatten, is_known, None
        self._plan, self._flats, self._inputs, self._active_inputs = None, FlatStates(), {}, {}
        self._gradients, self._may_change_state = [], False

    @torch._disable_dynamo  # type: ignore[attr-defined] # as torch does for functions that read state
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step all local tensors; return the result of the optimizer's own step, which gets the further arguments."""
        if any(group.get("differentiable") for group in optimizer.param_groups):
            return self._inner(optimizer, *args, **kwargs)
        schedule = self.schedule
        if schedule is None:
            tensors = self.prepare(optimizer)
        else:
            with schedule.inspecting_gradients():
                tensors = self.prepare(optimizer)
        returned = None
        try:
            for part in (tensors,) if schedule is None else schedule.steps(tensors):
                with profiled("optimizer"):
                    returned = self.step_tensors(optimizer, part, *args, **kwargs)
        finally:
            self.finish(optimizer)
        return returned

    # ---------------------------------------------------------------- phases of a step

    def prepare(self, optimizer: torch.optim.Optimizer) -> list[LocalTensor]:
        """Return the local tensors of this step, with their gradients: those of parameters that have one.

        Each is then to be stepped once, in any order, by one or several calls of :meth:`step_tensors`, before
        :meth:`finish`.
        """
        plan, self._may_change_state = self._plan, False
        gradients = plan.gradients(optimizer) if plan is not None and plan.stable else None
        if plan is None or gradients is None:
            _wait_for_gradients(optimizer)
            plan, self._inputs = StepPlan(optimizer, self._flats, flatten=self.flatten), {}
            gradients = plan.gradients(optimizer)
            assert gradients is not None, "the plan was made for these gradients"
        self._plan, self._gradients = plan, gradients
        return plan.tensors

    def step_tensors(
        self, optimizer: torch.optim.Optimizer, tensors: Sequence[LocalTensor], *args: Any, **kwargs: Any
    ) -> Any:
        """Step these local tensors; return the result of the optimizer's own step, which gets the further arguments."""
        assert self._plan is not None
        groups, attributes = optimizer.param_groups, optimizer.__dict__
        part = tuple([tensor.index for tensor in tensors])
        if part not in self._inputs:
            self._inputs[part] = _group_inputs(tensors, len(groups))
        all_inputs = self._inputs[part]
        local_groups = [{**groups[inputs.group], "params": inputs.parameters} for inputs in all_inputs]
        for inputs, local_group in zip(all_inputs, local_groups, strict=True):
            inputs.begin(local_group, self._gradients, may_replay=self._is_torch_elementwise)
            self._may_change_state |= not inputs.replays
        self._active_inputs = dict(zip(map(id, local_groups), all_inputs, strict=True))
        before = [dict(local_group) for local_group in local_groups]
        state = attributes["state"]
        attributes["param_groups"], attributes["state"] = local_groups, self._plan.local_state
        try:
            return self._inner(optimizer, *args, **kwargs)
        finally:
            attributes["param_groups"], attributes["state"] = groups, state
            self._active_inputs = {}
            for inputs, old, new in zip(all_inputs, before, local_groups, strict=True):
                inputs.end()
                _copy_changes(old, new, groups[inputs.group])

    def finish(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the user's view of the state."""
        plan, self._gradients = self._plan, []
        assert plan is not None
        for scalars in plan.scalars:
            scalars.write_back()
        if self._may_change_state and not plan.write_back(optimizer):
            self._plan = None

    def init_group(self, group: Mapping[str, Any], lists: Sequence[list[Any]], own: Callable[..., Any]) -> Any:
        """Fill the lists for a group as ``_init_group`` does, by calling ``own`` unless they are known."""
        inputs = self._active_inputs.get(id(group))
        if inputs is not None and inputs.replays:
            return inputs.replay(lists)
        returned = own(group, *lists)
        if inputs is not None:
            inputs.record(lists, returned)
        return returned


class _GroupInputs:
    """Parameters, gradients and state lists of one group for the optimizer's step.

    Args:
        group: Index of the group.
        tensors: Local tensors of the group, either all plain or all DTensors.
    """

    group: int
    tensors: list[LocalTensor]
    parameters: list[torch.Tensor]
    replays: bool  # replay the recorded lists
    _options: tuple[Any, ...]  # options that the lists depend on
    _recorded: list[tuple[int, list[Any]]] | None  # indices and values of the lists
    _returned: Any
    _gradients: Sequence[Any]  # of the tensors, while the optimizer steps

    def __init__(self, group: int, tensors: Sequence[LocalTensor]) -> None:
        self.group, self.tensors, self.replays = group, list(tensors), False
        self.parameters = [tensor.parameter for tensor in tensors]
        self._options, self._recorded, self._returned, self._gradients = (), None, None, []

    def begin(self, group: Mapping[str, Any], gradients: Sequence[Any], *, may_replay: bool) -> None:
        """Set gradients before the optimizer steps; ``gradients`` are those of all local tensors of the plan."""
        self._gradients = [gradients[tensor.index] for tensor in self.tensors]
        options = _init_group_options(group)
        self.replays = may_replay and self._recorded is not None and options == self._options
        if not self.replays:
            self._options, self._recorded = options, None
            for tensor, gradient in zip(self.tensors, self._gradients, strict=True):
                tensor.set_gradient(gradient)

    def end(self) -> None:
        """Clear the gradients that :meth:`begin` set."""
        self._gradients = []
        if not self.replays:
            for tensor in self.tensors:
                tensor.clear_gradient()

    def record(self, lists: Sequence[list[Any]], returned: Any) -> None:
        """Record the lists that ``_init_group`` filled, if they have one value per local tensor, all there already."""
        count = len(self.tensors)
        filled = [(index, list(found)) for index, found in enumerate(lists) if found and index != GRADIENTS]
        is_whole = all(len(found) == count for found in (*(column for _, column in filled), lists[GRADIENTS]))
        is_whole = is_whole and all(map(operator.is_, self.parameters, lists[PARAMETERS]))
        # None: created in this step.
        if is_whole and all(isinstance(value, torch.Tensor) for _, column in filled for value in column):
            self._recorded, self._returned = filled, returned

    def replay(self, lists: Sequence[list[Any]]) -> Any:
        """Fill the lists with the recorded values."""
        for index, column in self._recorded or ():
            lists[index].extend(column)
        lists[GRADIENTS].extend(self._gradients)
        return self._returned


def _group_inputs(tensors: Iterable[LocalTensor], groups: int) -> list[_GroupInputs]:
    """Return the inputs of each group, with separate inputs for parameters that are stepped as DTensors."""
    plain: list[list[LocalTensor]] = [[] for _ in range(groups)]
    others: dict[int, list[LocalTensor]] = {}
    for tensor in tensors:
        is_plain = type(tensor.parameter) in (torch.Tensor, torch.nn.Parameter)
        (plain[tensor.group] if is_plain else others.setdefault(tensor.group, [])).append(tensor)
    return [_GroupInputs(index, found) for index, found in [*enumerate(plain), *others.items()]]


def _init_group_options(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the options that ``_init_group`` of torch's optimizers depends on."""
    switches = [(name, bool(v)) for name, v in group.items() if v is None or type(v) is bool or name == "momentum"]
    return (isinstance(group.get("lr"), torch.Tensor), *switches)


def _wait_for_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Wait for gradients whose reductions are still in flight."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if type(parameter.grad) is GradientInFlight:
                parameter.grad.result()


def _copy_changes(old: Mapping[str, Any], new: Mapping[str, Any], target: dict[str, Any]) -> None:
    """Copy options that the optimizer has written into its local group to the user's group."""
    for name, value in new.items():
        if name != "params" and (name not in old or old[name] is not value):
            target[name] = value
