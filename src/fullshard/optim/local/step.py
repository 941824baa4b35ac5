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
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.engine.parameters.placement import SHARDED_TYPES, dtensor_like
from fullshard.engine.parameters.spmd_types import unchecked
from fullshard.profiling import profiled

__all__ = ["WITHOUT_HOOKS", "LocalStep", "State", "own_step"]

State = dict[Any, dict[Any, Any]]  # state of an optimizer, by parameter or local tensor

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

    def divide(self, tensors: Iterable[torch.Tensor], state: State) -> Iterable[set[int]]:
        """Yield the ids of each part of the local tensors while its state is on the device; each id is yielded once.

        Args:
            tensors: The local tensors.
            state: The state of each local tensor.
        """


class LocalStep:
    """The step of an optimizer on local tensors. It keeps none of them, see [Note: Local tensors].

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
            everything = (None,) if self.offload is None else self.offload.divide(view.tensors, view.state)
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

    Args:
        optimizer: The optimizer.
        with_requires_grad: True if local tensors require gradients where the parameters do, as some steps ask for.
    """

    state: State
    _groups: list[tuple[int, list[torch.Tensor]]]  # tensors that are stepped, by the number of their group
    # Parameters, the tensors that are stepped for them, and the entries of the state.
    _stepped: list[tuple[torch.Tensor, torch.Tensor, dict[Any, Any] | None]]
    _aliases: dict[int, torch.Tensor]  # local tensors that are not the parameters' own, by the parameters' ids
    # Entries of the state in which a local tensor stands for a DTensor: the dictionary, the name, and both.
    _shown: list[tuple[dict[Any, Any], Any, DTensor, torch.Tensor]]

    def __init__(self, optimizer: Optimizer, *, with_requires_grad: bool) -> None:
        self._optimizer, self._with_requires_grad = optimizer, with_requires_grad
        self._options = [dict(group) for group in optimizer.param_groups]
        self.state, self._groups, self._stepped, self._shown = defaultdict(dict), [], [], []
        self._aliases = {}

    @property
    def tensors(self) -> Iterable[torch.Tensor]:
        """The tensors that are stepped."""
        return [tensor for _, tensors in self._groups for tensor in tensors]

    def open(self) -> None:
        """Find the local tensors of all parameters with gradients, and give them their gradients and state."""
        state: Any = self._optimizer.state
        others: list[tuple[int, list[torch.Tensor]]] = []
        with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for number, group in enumerate(self._optimizer.param_groups):
                listed = [parameter for parameter in group["params"] if parameter.grad is not None]
                sharded = [parameter for parameter in listed if type(parameter) in SHARDED_TYPES]
                entries = [state.get(parameter) for parameter in sharded]
                stepped: list[torch.Tensor] = []
                if all(map(_is_local, sharded, entries)):
                    stepped = list(map(self._show_local, sharded, entries))
                    listed = [parameter for parameter in listed if type(parameter) not in SHARDED_TYPES]
                for parameter in listed:
                    self._add(parameter, parameter, state.get(parameter))
                # Foreach kernels take no list of DTensors and plain tensors.
                self._groups.append((number, stepped + [each for each in listed if not isinstance(each, DTensor)]))
                others.append((number, [each for each in listed if isinstance(each, DTensor)]))
        self._groups += [(number, tensors) for number, tensors in others if tensors]
        self.state.update(_shared_entries(state))

    def _add(self, parameter: torch.Tensor, stepped: torch.Tensor, entries: dict[Any, Any] | None) -> None:
        self._stepped.append((parameter, stepped, entries))
        if entries is not None:
            self.state[stepped] = entries

    def _show_local(self, parameter: Any, entries: dict[Any, Any] | None) -> torch.Tensor:
        """Return the local tensor of a parameter, with its gradient, and show local tensors in its state."""
        local: torch.Tensor = parameter._local_tensor
        gradient: torch.Tensor = parameter.grad._local_tensor
        if self._with_requires_grad or not local.dim() or gradient.dtype is not local.dtype:
            # More than the gradient is set, so it is another object than the parameter's.
            local = self._aliases.setdefault(id(parameter), _with_dims(local.detach()))
            local.requires_grad_(self._with_requires_grad and parameter.requires_grad)
            local.grad_dtype, gradient = gradient.dtype, _with_dims(gradient)
        local.grad = gradient
        self._add(parameter, local, entries)
        if entries is not None:
            for name, entry in entries.items():
                if isinstance(entry, DTensor):
                    entries[name] = shown = _with_dims(entry._local_tensor)
                    self._shown.append((entries, name, entry, shown))
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
        state: Any = self._optimizer.state
        for entries, name, users, shown in self._shown:
            if entries.get(name) is shown:
                entries[name] = users
        with torch.inference_mode(False), torch.no_grad():
            for parameter, stepped, before in self._stepped:
                left = self.state.get(stepped)
                if stepped is not parameter:
                    stepped.grad = None
                    _show_users(parameter, stepped, left or {})
                if left is not None and left is not before:
                    state[parameter] = left
        state.update(_shared_entries(self.state))


def _show_users(parameter: Any, local: torch.Tensor, entries: dict[Any, Any]) -> None:
    """Show a DTensor for each new local tensor in the state of a parameter."""
    for name, entry in entries.items():
        if type(entry) is torch.Tensor and entry.dim() and entry.shape == local.shape:
            entries[name] = dtensor_like(entry.view(parameter._local_tensor.shape), parameter)


def _with_dims(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, 1-D if it is 0-D."""
    return tensor if tensor.dim() else tensor.view(1)


def _shared_entries(state: Any) -> State:
    """Return the entries of a state that belong to no parameter."""
    return {key: entries for key, entries in state.items() if not isinstance(key, torch.Tensor)}


def _is_local(parameter: Any, entries: dict[Any, Any] | None) -> bool:
    """Return True if the gradient and the state of a parameter have the elements of this rank's shard of it."""
    kind = type(parameter)
    if type(parameter._local_tensor) is not torch.Tensor or type(parameter.grad) is not kind:
        return False
    for value in (parameter.grad, *(entries or {}).values()):
        if type(value) is kind:
            if not _is_alike(value, parameter):
                return False
        # Others with dims are maybe of unsharded parameters, whose beginning a fused kernel would take.
        elif isinstance(value, torch.Tensor) and (isinstance(value, DTensor) or value.dim()):
            return False
    return True


def _is_alike(tensor: Any, parameter: Any) -> bool:
    """Return True if a DTensor is sharded as a parameter, with a plain local tensor."""
    if type(tensor._local_tensor) is not torch.Tensor:
        return False
    spec, found = parameter._spec, tensor._spec
    if spec is found:
        return True
    if found.placements != spec.placements or found.shape != spec.shape or found.mesh != spec.mesh:
        return False
    return bool(tensor._local_tensor.shape == parameter._local_tensor.shape)
