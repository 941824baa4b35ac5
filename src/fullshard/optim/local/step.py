"""One step of a localized optimizer: the optimizer's own arithmetic, on local tensors.

[Note: Stepping local tensors]
While the optimizer's own ``step`` runs, its ``param_groups`` and ``state`` are temporarily those of the local tensors;
hooks and closures see the user's. The lists that ``_init_group`` of torch's optimizers fills (one per kind of state)
are the same in every step except for the gradients, so they are recorded and replayed: with many small parameters that
loop is a fourth of a fused step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from fullshard.optim.local.local_tensors import InitGroupRow, LocalTensor, StateBuffers
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
    _buffers: StateBuffers
    _active_inputs: dict[int, _GroupInputs]  # by the id of the local group, while the optimizer steps
    _plan_inputs: list[_GroupInputs] | None  # for all local tensors of the plan
    _gradients: list[torch.Tensor]  # of the local tensors of the plan, in this step
    _changed: list[LocalTensor]  # whose state the optimizer may have replaced in this step

    def __init__(self, inner: Callable[..., Any], *, flatten: bool, is_known: bool) -> None:
        self._inner, self.flatten, self._is_torch_elementwise, self.schedule = inner, flatten, is_known, None
        self._plan, self._buffers, self._active_inputs, self._plan_inputs = None, StateBuffers(), {}, None
        self._gradients, self._changed = [], []

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
            for chunk in (tensors,) if schedule is None else schedule.steps(tensors):
                with profiled("optimizer"):
                    returned = self.step_tensors(optimizer, chunk, *args, **kwargs)
        finally:
            self.finish(optimizer)
        return returned

    # ---------------------------------------------------------------- phases of a step

    def prepare(self, optimizer: torch.optim.Optimizer) -> list[LocalTensor]:
        """Return the local tensors of this step, with their gradients: those of parameters that have one.

        Each is then to be stepped once, in any order, by one or several calls of :meth:`step_tensors`, before
        :meth:`finish`.
        """
        plan, self._changed = self._plan, []
        found = None if plan is None else plan.gradients(optimizer)
        local_gradients = None if plan is None or found is None else plan.local_gradients(found)
        if plan is None or local_gradients is None:
            _wait_for_gradients(optimizer)
            plan = self._plan = StepPlan(optimizer, self._buffers, flatten=self.flatten)
            found, plan.initial_gradients, self._plan_inputs = plan.initial_gradients, [], None
            local_gradients = plan.local_gradients(found)
            assert local_gradients is not None
        self._gradients = local_gradients
        return plan.tensors

    def step_tensors(
        self, optimizer: torch.optim.Optimizer, tensors: Sequence[LocalTensor], *args: Any, **kwargs: Any
    ) -> Any:
        """Step these local tensors; return the result of the optimizer's own step, which gets the further arguments."""
        assert self._plan is not None
        groups, attributes = optimizer.param_groups, optimizer.__dict__
        all_inputs = self._inputs_of(tensors, len(groups))
        local_groups = [{**groups[inputs.group], "params": inputs.parameters} for inputs in all_inputs]
        for inputs, local_group in zip(all_inputs, local_groups, strict=True):
            inputs.begin(local_group, self._gradients, is_known=self._is_torch_elementwise)
            if not inputs.replays:
                self._changed += inputs.tensors
        self._active_inputs = {
            id(local_group): inputs for local_group, inputs in zip(local_groups, all_inputs, strict=True)
        }
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
        plan, changed_tensors, self._gradients = self._plan, self._changed, []
        assert plan is not None
        for scalars in plan.scalars:
            scalars.write_back()
        if not changed_tensors:
            return
        self._changed, self._plan_inputs = [], None  # their recorded inputs may be stale
        states = plan.local_state
        with torch.inference_mode(False), torch.no_grad():
            stepped = [tensor for tensor in changed_tensors if tensor.parameter in states]
            changed = {tensor: tensor.write_back(states[tensor.parameter], self._buffers) for tensor in stepped}
        plan.register(optimizer, stepped)
        if not self._is_torch_elementwise:
            others = {key: value for key, value in plan.local_state.items() if not isinstance(key, torch.Tensor)}
            optimizer.state.update(others)
        if any(tensor.has_scalars(names) for tensor, names in changed.items()):
            self._plan = None  # new scalars of runs need RunScalars
        else:
            plan.note_state(optimizer)

    def init_group(self, group: Mapping[str, Any], lists: Sequence[list[Any]], own: Callable[..., Any]) -> Any:
        """Fill the lists for a group as ``_init_group`` does, by calling ``own`` unless they are known."""
        inputs = self._active_inputs.get(id(group))
        if inputs is not None and inputs.replays:
            return inputs.replay(lists)
        returned = own(group, *lists)
        if inputs is not None:
            inputs.record(lists, returned)
        return returned

    def _inputs_of(self, tensors: Sequence[LocalTensor], groups: int) -> list[_GroupInputs]:
        assert self._plan is not None
        if tensors is not self._plan.tensors:
            return _active_inputs(tensors, groups)
        if self._plan_inputs is None:
            self._plan_inputs = _active_inputs(tensors, groups)
        return self._plan_inputs


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
    _options: tuple[Any, ...]  # options of _init_group
    _columns: tuple[tuple[int, Any], ...] | None  # index and values of each list
    _returned: Any
    _indices: list[int]  # of the tensors in their plan
    _gradients: Sequence[torch.Tensor]  # of the tensors, while the optimizer steps

    def __init__(self, group: int, tensors: Sequence[LocalTensor]) -> None:
        self.group, self.tensors, self.replays = group, list(tensors), False
        self._indices, self._gradients = [tensor.index for tensor in tensors], []
        self.parameters = [tensor.parameter for tensor in tensors]
        self._options, self._columns, self._returned = (), None, None

    def begin(self, group: Mapping[str, Any], gradients: Sequence[torch.Tensor], *, is_known: bool) -> None:
        """Set gradients before the optimizer steps; ``gradients`` are those of all local tensors of the plan."""
        self._gradients = self._gradients_in(gradients)
        options = _init_group_options(group)
        if self._columns is None or options != self._options:
            self._options, self._columns = options, None
            if is_known:
                self._collect()
        self.replays = self._columns is not None
        if not self.replays:
            for tensor, gradient in zip(self.tensors, self._gradients, strict=True):
                tensor.set_gradient(gradient)

    def end(self) -> None:
        """Clear the gradients that :meth:`begin` set."""
        self._gradients = []
        if not self.replays:
            for tensor in self.tensors:
                tensor.clear_gradient()

    def record(self, lists: Sequence[list[Any]], returned: Any) -> None:
        """Record the lists that ``_init_group`` filled, if they have one value per local tensor."""
        count = len(self.tensors)
        filled = [index for index, found in enumerate(lists) if found and index != GRADIENTS]
        columns = [lists[index] for index in filled]
        for tensor in self.tensors:
            tensor.row = None
        if not count or any(len(found) != count for found in (*columns, lists[GRADIENTS])):
            return
        if any(mine is not its for mine, its in zip(self.parameters, lists[PARAMETERS], strict=True)):
            return
        for tensor, values in zip(self.tensors, zip(*columns, strict=True), strict=True):
            if all(isinstance(value, torch.Tensor) for value in values):  # None: created in this step
                tensor.row = InitGroupRow(self._options, tuple(filled), values, returned)

    def replay(self, lists: Sequence[list[Any]]) -> Any:
        """Fill the lists with the recorded values."""
        for index, column in self._columns or ():
            lists[index].extend(column)
        lists[GRADIENTS].extend(self._gradients)
        return self._returned

    def _gradients_in(self, gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        indices = self._indices
        if indices and indices == [*range(indices[0], indices[0] + len(indices))]:
            return gradients[indices[0] : indices[0] + len(indices)]
        return [gradients[index] for index in indices]

    def _collect(self) -> None:
        rows = [tensor.row for tensor in self.tensors]
        first = rows[0] if rows else None
        if first is None or first.options != self._options:
            return
        for row in rows:
            if row is None or row[:2] != first[:2] or row.returned != first.returned:
                return
        columns = zip(*[row.values for row in rows if row is not None], strict=True)
        self._columns, self._returned = tuple(zip(first.positions, columns, strict=True)), first.returned


def _active_inputs(tensors: Iterable[LocalTensor], groups: int) -> list[_GroupInputs]:
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
            landed = getattr(type(parameter.grad), "landed", None)
            if landed is not None:
                landed(parameter.grad)


def _copy_changes(old: Mapping[str, Any], new: Mapping[str, Any], target: dict[str, Any]) -> None:
    """Copy options that the optimizer has written into its local group to the user's group."""
    for name, value in new.items():
        if name != "params" and (name not in old or old[name] is not value):
            target[name] = value
