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

Parameters that cannot be stepped like that (plain ones, tensor subclasses, those whose gradient or state is sharded
otherwise) are stepped as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import compress
from operator import attrgetter, is_, itemgetter
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.engine.parameters.placement import dtensor_like
from fullshard.engine.parameters.ragged_tensor import SHARDED_TYPES
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
    _columns: list[tuple[list[Any], Any, list[Any], list[Any]]]  # entries, a name, the values, those that are shown
    _sizes: list[tuple[list[Any], int]]  # entries, and how many values they had each
    _is_new: bool  # there may be state that was not there before

    def __init__(self, optimizer: Optimizer, *, with_requires_grad: bool) -> None:
        self._optimizer, self._with_requires_grad, self._is_new = optimizer, with_requires_grad, with_requires_grad
        self._options = [dict(group) for group in optimizer.param_groups]
        self.state, self._groups, self._stepped, self._columns, self._sizes = defaultdict(dict), [], [], [], []

    def parameters(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return the parameter of each local tensor."""
        return {local: p for some, tensors, _ in self._stepped for p, local in zip(some, tensors, strict=True)}

    def open(self) -> None:
        """Find the local tensors of all parameters with gradients, and give them their gradients and state."""
        others: list[tuple[int, Tensors]] = []
        state: Any = self._optimizer.state
        with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for number, group in enumerate(self._optimizer.param_groups):
                gradients = list(map(_GRADIENT, group["params"]))
                given = [gradient is not None for gradient in gradients]
                parameters, gradients = list(compress(group["params"], given)), list(compress(gradients, given))
                entries = list(map(state.get, parameters))
                if not _are_alike(gradients, parameters) or not _are_entries_alike(entries, parameters):
                    alike = list(map(_is_local, parameters, gradients, entries))
                    rest = [not is_local for is_local in alike]
                    as_they_are = list(compress(parameters, rest))
                    self._add(as_they_are, as_they_are, list(compress(entries, rest)))
                    others.append((number, as_they_are))
                    parameters, gradients = list(compress(parameters, alike)), list(compress(gradients, alike))
                    entries = list(compress(entries, alike))
                self._groups.append((number, self._show_local(parameters, gradients, entries)))
        for number, tensors in others:
            self._groups[number][1].extend(tensor for tensor in tensors if not isinstance(tensor, DTensor))
            # Foreach kernels take no list of both.
            self._groups.append((number, [tensor for tensor in tensors if isinstance(tensor, DTensor)]))
        self.state.update(_shared_entries(state))

    def _add(self, parameters: Tensors, tensors: Tensors, entries: list[Any]) -> None:
        """Have tensors stepped, with the state of the parameters."""
        self._stepped.append((parameters, tensors, entries))
        given = [each is not None for each in entries]
        self._is_new = self._is_new or not all(given)
        self.state.update(zip(compress(tensors, given), compress(entries, given), strict=True))

    def _show_local(self, parameters: Tensors, gradients: Tensors, entries: list[Any]) -> Tensors:
        """Have the local tensors of parameters stepped, with their gradients and state, and return them."""
        tensors, own = list(map(_LOCAL, parameters)), list(map(_LOCAL, gradients))
        are_usual = all(map(torch.Tensor.dim, tensors)) and not self._with_requires_grad
        are_usual = are_usual and set(map(_DTYPE, own)) == set(map(_DTYPE, tensors))
        if not are_usual:
            aliases = {id(p): self._alias(p, gradient) for p, gradient in zip(parameters, own, strict=True)}
            tensors = [aliases[id(parameter)] for parameter in parameters]
            own = list(map(_with_dims, own))
        self._add(parameters, tensors, entries)
        for local, gradient in zip(tensors, own, strict=True):
            local.grad = gradient
        known = [each for each in entries if each is not None]
        kinds = set(map(tuple, known))
        for names in kinds:
            some = known if len(kinds) == 1 else [each for each in known if tuple(each) == names]
            self._sizes.append((some, len(names)))
            for name in names:
                column = list(map(itemgetter(name), some))
                shown = [entry._local_tensor if type(entry) in SHARDED_TYPES else entry for entry in column]
                if not are_usual:
                    shown = [new if new is old else _with_dims(new) for old, new in zip(column, shown, strict=True)]
                self._columns.append((some, name, column, shown))
                for each, entry in zip(some, shown, strict=True):
                    each[name] = entry
        return list(tensors)

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
        is_new = self._is_new or any(set(map(len, entries)) != {size} for entries, size in self._sizes)
        for entries, name, column, shown in self._columns:
            for each, users, local in zip(entries, column, shown, strict=True):
                if each.get(name) is local:
                    each[name] = users
                else:
                    is_new = True
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


def _are_alike(tensors: list[Any], parameters: Tensors) -> bool:
    """Return True if gradients, or entries of the state, are certain to be sharded as the parameters are."""
    if not SHARDED_TYPES.issuperset(map(type, tensors)) or not SHARDED_TYPES.issuperset(map(type, parameters)):
        return False
    are_plain = {torch.Tensor}.issuperset(map(type, map(_LOCAL, (*tensors, *parameters))))
    return are_plain and all(map(is_, map(_SPEC, tensors), map(_SPEC, parameters)))


def _are_entries_alike(entries: list[Any], parameters: Tensors) -> bool:
    """Return True if all parameters are certain to have state of the same names, sharded as they are."""
    kinds = {None if each is None else tuple(each) for each in entries}
    if len(kinds) > 1:
        return False
    for name in (kinds.pop() if kinds else None) or ():
        column = list(map(itemgetter(name), entries))
        are_numbers = set(map(type, column)) == {torch.Tensor} and not any(map(torch.Tensor.dim, column))
        if not are_numbers and not _are_alike(column, parameters):
            return False
    return True


def _is_local(parameter: Any, gradient: Any, entries: Any) -> bool:
    """Return True if the local tensor of a parameter can be stepped, with that of its gradient and of its state."""
    kind = type(parameter)
    if kind not in SHARDED_TYPES or type(parameter._local_tensor) is not torch.Tensor:
        return False
    if type(gradient) is not kind or not _is_alike(gradient, parameter):
        return False
    for entry in (entries or {}).values():
        if type(entry) is kind:
            if not _is_alike(entry, parameter):
                return False
        elif isinstance(entry, torch.Tensor) and (isinstance(entry, DTensor) or entry.dim()):
            return False  # maybe of the unsharded parameter: a fused kernel would take the beginning of it
    return True


def _is_alike(tensor: Any, parameter: Any) -> bool:
    """Return True if a gradient, or an entry of the state, has the elements of this rank's shard of a parameter."""
    own, found, local = parameter._spec, tensor._spec, tensor._local_tensor
    if type(local) is not torch.Tensor or local.shape != parameter._local_tensor.shape:
        return False
    return found is own or (found.placements == own.placements and found.shape == own.shape and found.mesh == own.mesh)
