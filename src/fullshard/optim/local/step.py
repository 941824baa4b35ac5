"""One step on local tensors: the user's own optimizer, whose groups and state are those of local tensors meanwhile.

[Note: Local tensors]
The *local tensor* of a parameter is this rank's shard: a plain tensor, on which an optimizer's kernels run without
DTensor dispatch. Its gradient and its state are those of the parameter, in the same memory: the local tensors of
DTensors. All of them are looked up in every step, and nothing refers to them afterwards, so that an optimizer keeps no
memory alive but that of its ``state`` and its parameters, whatever users do to these between two steps.

During a step the dictionaries of the state are the user's own, with local tensors as values. At its end, also if it
raises, each local tensor that was there gives way to its DTensor, and each new one to a new DTensor.

The local tensor of a 0-D parameter is 1-D: its state would look like numbers, such as ``step``, which are plain tensors
in the user's view too.

Plain parameters and other tensor subclasses are stepped as they are. So are the DTensors of a group if the gradient or
the state of one of them is sharded otherwise than its parameter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import compress
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.engine.parameters.placement import SHARDED_TYPES, dtensor_like
from fullshard.engine.parameters.spmd_types import unchecked
from fullshard.profiling import profiled

__all__ = ["WITHOUT_HOOKS", "LocalStep", "State", "own_step"]

State = dict[Any, dict[Any, Any]]  # state of an optimizer, by parameter or local tensor

Tensors = list[Any]  # plain tensors and DTensors

_GRADIENT, _LOCAL, _SPEC, _DTYPE = map(attrgetter, ("grad", "_local_tensor", "_spec", "dtype"))

# Attributes of an optimizer that steps without hooks of its own.
WITHOUT_HOOKS: dict[str, Any] = {"_optimizer_step_pre_hooks": {}, "_optimizer_step_post_hooks": {}}


def own_step(kind: type[Optimizer]) -> Callable[..., Any]:
    """Return ``step`` of a class of optimizers without torch's hooks around it."""
    step: Any = kind.step
    while getattr(step, "hooked", False) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    found: Callable[..., Any] = step
    return found


class StateColumn(NamedTuple):
    """The values of one name in the state of some parameters.

    Args:
        entries: The state of each parameter.
        name: The name.
        values: The user's values, with DTensors.
        shown: The values that the optimizer sees, with local tensors.
        size: How many names there are.
    """

    entries: list[Any]
    name: Any
    values: list[Any]
    shown: list[Any]
    size: int


class DividedStep(Protocol):
    """Divides a step into parts, around each of which it moves state."""

    def divide(self, parameters: dict[torch.Tensor, torch.Tensor], state: State) -> Iterable[set[int]]:
        """Yield the ids of all local tensors, each once, while ``state`` of theirs is where they are.

        Args:
            parameters: The parameter of each local tensor.
            state: The state of each local tensor.
        """


class LocalStep:
    """How an optimizer steps local tensors. It keeps none of them, see [Note: Local tensors].

    Args:
        vouched: True if the user says that the optimizer is elementwise.
    """

    vouched: bool
    is_running: bool
    offload: DividedStep | None  # None: state stays on the device

    def __init__(self, *, vouched: bool = False) -> None:
        self.vouched, self.is_running, self.offload = vouched, False, None

    @unchecked
    @torch._disable_dynamo  # type: ignore[attr-defined] # as torch does for functions that read state
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step all local tensors, and return what the optimizer's own step returns."""
        view = _LocalView(optimizer, with_requires_grad=self.vouched)
        self.is_running = True
        try:
            view.open()
            everything = (None,) if self.offload is None else self.offload.divide(view.parameters(), view.state)
            returned = None
            for part in everything:
                with profiled("optimizer"):
                    returned = view.step(part, *args, **kwargs)
            return returned
        finally:
            self.is_running = False
            view.close()


class _LocalView:
    """The groups and the state of an optimizer, with local tensors in place of DTensors while it is open.

    Its loops over parameters run in C, each over one kind of object: a step of many small parameters waits for memory.

    Args:
        optimizer: The optimizer.
        with_requires_grad: True if local tensors require gradients where the parameters do, as some steps ask for.
    """

    state: State
    _groups: list[tuple[int, Tensors]]  # tensors that are stepped, by the number of their group
    _stepped: list[tuple[Tensors, Tensors, list[Any]]]  # parameters, what is stepped for them, entries of the state
    _columns: list[StateColumn]
    _is_new: bool  # there may be state that was not there before

    def __init__(self, optimizer: Optimizer, *, with_requires_grad: bool) -> None:
        self._optimizer, self._with_requires_grad, self._is_new = optimizer, with_requires_grad, with_requires_grad
        self._options = [dict(group) for group in optimizer.param_groups]
        self.state, self._groups, self._stepped, self._columns = defaultdict(dict), [], [], []

    def parameters(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return the parameter of each local tensor."""
        return {local: p for some, tensors, _ in self._stepped for p, local in zip(some, tensors, strict=True)}

    def open(self) -> None:
        """Find the local tensors of all parameters with gradients, and give them their gradients and state."""
        state: Any = self._optimizer.state
        others: list[tuple[int, Tensors]] = []
        with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for number, group in enumerate(self._optimizer.param_groups):
                gradients = list(map(_GRADIENT, group["params"]))
                given = [gradient is not None for gradient in gradients]
                listed, gradients = list(compress(group["params"], given)), list(compress(gradients, given))
                are_sharded = [type(parameter) in SHARDED_TYPES for parameter in listed]
                parameters, gradients = list(compress(listed, are_sharded)), list(compress(gradients, are_sharded))
                entries = list(map(state.get, parameters))
                are_plain = {torch.Tensor}.issuperset(map(type, map(_LOCAL, parameters)))
                are_local = are_plain and _are_alike(gradients, parameters)
                columns = _columns(parameters, entries) if are_local else None
                if columns is None:
                    parameters, gradients, entries, columns = [], [], [], []
                local = self._show_local(parameters, gradients, entries, columns)
                rest = [p for p in listed if type(p) not in SHARDED_TYPES] if parameters else listed
                self._add(rest, rest, list(map(state.get, rest)))
                self._groups.append((number, local + [p for p in rest if not isinstance(p, DTensor)]))
                # Foreach kernels take no list of DTensors and plain tensors.
                others.append((number, [p for p in rest if isinstance(p, DTensor)]))
        self._groups += [(number, tensors) for number, tensors in others if tensors]
        self.state.update(_shared_entries(state))

    def _add(self, parameters: Tensors, tensors: Tensors, entries: list[Any]) -> None:
        """Have tensors stepped, with the state of the parameters."""
        self._stepped.append((parameters, tensors, entries))
        self._is_new = self._is_new or not all(entries)
        given = [each is not None for each in entries]
        self.state.update(zip(compress(tensors, given), compress(entries, given), strict=True))

    def _show_local(
        self, parameters: Tensors, gradients: Tensors, entries: list[Any], columns: list[StateColumn]
    ) -> Tensors:
        """Have the local tensors of parameters stepped, with their gradients and state, and return them."""
        tensors, own = list(map(_LOCAL, parameters)), list(map(_LOCAL, gradients))
        are_usual = all(map(torch.Tensor.dim, tensors)) and set(map(_DTYPE, own)) == set(map(_DTYPE, tensors))
        if self._with_requires_grad or not are_usual:
            aliases = {id(p): self._alias(p, gradient) for p, gradient in zip(parameters, own, strict=True)}
            tensors, own = [aliases[id(parameter)] for parameter in parameters], list(map(_with_dims, own))
            columns = [
                each if each.shown is each.values else each._replace(shown=list(map(_with_dims, each.shown)))
                for each in columns
            ]
        self._add(parameters, tensors, entries)
        for local, gradient in zip(tensors, own, strict=True):
            local.grad = gradient
        self._columns += columns
        for column in columns:
            if column.shown is not column.values:
                for each, entry in zip(column.entries, column.shown, strict=True):
                    each[column.name] = entry
        return tensors

    def _alias(self, parameter: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Return a local tensor that is an object of its own, of which more than its gradient is set."""
        local = _with_dims(parameter._local_tensor.detach())
        local.requires_grad_(self._with_requires_grad and parameter.requires_grad)
        local.grad_dtype = gradient.dtype
        return local

    def step(self, part: set[int] | None, *args: Any, **kwargs: Any) -> Any:
        """Run the optimizer's own step on all local tensors, or on those with the ids in ``part``.

        Each part begins with the options of before the step.
        """
        optimizer, attributes = self._optimizer, self._optimizer.__dict__
        groups: list[dict[str, Any]] = []
        for number, tensors in self._groups:
            chosen = tensors if part is None else [tensor for tensor in tensors if id(tensor) in part]
            groups.append({**self._options[number], "params": chosen})
        replaced = {"param_groups": groups, "state": self.state, **WITHOUT_HOOKS}
        users = {name: attributes[name] for name in replaced}
        attributes.update(replaced)
        try:
            returned = own_step(type(optimizer))(optimizer, *args, **kwargs)
        finally:
            attributes.update(users)
        for (number, _), group in zip(self._groups, groups, strict=True):
            before = self._options[number]
            changed = {name: value for name, value in group.items() if name not in before or before[name] is not value}
            del changed["params"]
            optimizer.param_groups[number].update(changed)
        return returned

    def close(self) -> None:
        """Show DTensors in the state again, and take the gradients from the local tensors."""
        is_new = self._is_new
        for column in self._columns:
            is_new = is_new or set(map(len, column.entries)) != {column.size}
            left = [each.get(column.name) for each in column.entries]
            is_known = list(map(is_, left, column.shown))
            is_new = is_new or not all(is_known)
            if column.shown is not column.values:
                for each, users in zip(
                    compress(column.entries, is_known), compress(column.values, is_known), strict=True
                ):
                    each[column.name] = users
        with torch.inference_mode(False), torch.no_grad():
            for parameters, tensors, entries in self._stepped:
                if tensors is not parameters:
                    for local in tensors:
                        local.grad = None
                if is_new:
                    for each in zip(parameters, tensors, entries, strict=True):
                        self._show_users(*each)
        self._optimizer.state.update(_shared_entries(self.state))

    def _show_users(self, parameter: Any, local: torch.Tensor, before: Any) -> None:
        """Show a DTensor for each new tensor in the state of a parameter."""
        left = self.state.get(local)
        if left is None:
            return
        if local is not parameter:
            for name, entry in left.items():
                if type(entry) is torch.Tensor and entry.shape == local.shape:
                    left[name] = dtensor_like(entry.view(parameter._local_tensor.shape), parameter)
        if left is not before:
            state: Any = self._optimizer.state
            state[parameter] = left


def _with_dims(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, 1-D if it is 0-D."""
    return tensor if tensor.dim() else tensor.view(1)


def _shared_entries(state: Any) -> State:
    """Return the entries of a state that belong to no parameter."""
    others = {kind for kind in set(map(type, state)) if not issubclass(kind, torch.Tensor)}
    return {key: entries for key, entries in state.items() if type(key) in others} if others else {}


def _are_alike(tensors: Tensors, parameters: Tensors) -> bool:
    """Return True if gradients, or entries of the state, have the elements of this rank's shards of parameters."""
    if not all(map(is_, map(type, tensors), map(type, parameters))):
        return False
    if not {torch.Tensor}.issuperset(map(type, map(_LOCAL, tensors))):
        return False
    return all(map(is_, map(_SPEC, tensors), map(_SPEC, parameters))) or all(map(_is_alike, tensors, parameters))


def _is_alike(tensor: Any, parameter: Any) -> bool:
    own, found = parameter._spec, tensor._spec
    if found.placements != own.placements or found.shape != own.shape or found.mesh != own.mesh:
        return False
    return bool(tensor._local_tensor.shape == parameter._local_tensor.shape)


def _columns(parameters: Tensors, entries: list[Any]) -> list[StateColumn] | None:
    """Return the state of parameters by name; None if some of it has not the elements of this rank's shards."""
    found: list[StateColumn] = []
    for names in {tuple(each) for each in entries if each is not None}:
        chosen = [each is not None and tuple(each) == names for each in entries]
        owners, some = list(compress(parameters, chosen)), list(compress(entries, chosen))
        for name in names:
            values = list(map(itemgetter(name), some))
            if _are_alike(values, owners):
                found.append(StateColumn(some, name, values, list(map(_LOCAL, values)), len(names)))
            elif any(isinstance(each, DTensor) or each.dim() for each in values if isinstance(each, torch.Tensor)):
                return None  # maybe of unsharded parameters, whose beginning a fused kernel would take
            else:
                found.append(StateColumn(some, name, values, values, len(names)))
    return found
