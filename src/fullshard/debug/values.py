"""Hooks that see all values of a model in a step, in the order in which they are computed.

In forward, before a module computes, its unsharded parameters and its inputs, and after it its outputs; inner modules
come first. In backward the gradients of outputs and of parameters, as autograd computes them, before they are reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.engine import hooks
from fullshard.engine.containers import iterate_tensors
from fullshard.engine.ownership import unit_of
from fullshard.engine.parameters.names import WRAPPED, clean_name, is_compiled
from fullshard.engine.unit import Unit

__all__ = ["ModuleValues", "values_here"]


class ModuleValues:
    """A context in which all modules of a model have the hooks.

    Args:
        model: Sharded or not.
        visit: Is called with the phase, ``"forward"`` or ``"backward"``, the FQN of a module or parameter, a
            description, and tensors in any containers.
    """

    _visit: Callable[[str, str, str, Any], None]
    _names: dict[nn.Module, str]
    _units: dict[nn.Module, Unit]  # by the module that computes while they are unsharded
    _handles: list[Any]
    _hooked: set[int]  # ids of unsharded parameters that have a hook
    _open: bool

    def __init__(self, model: nn.Module, visit: Callable[[str, str, str, Any], None]) -> None:
        self._visit = visit
        self._names = {module: clean_name(name) for name, module in model.named_modules()}
        sharded = ((module, unit) for module in self._names if (unit := unit_of(module)) is not None)
        self._units = {module._modules.get(WRAPPED) or module: unit for module, unit in sharded}
        self._handles, self._hooked, self._open = [], set(), False

    def __enter__(self) -> None:
        self._open = True
        compiled = _compiled_within(self._names)
        for module in self._names:
            if WRAPPED in module._modules or module in compiled:
                continue  # its step has not begun, or has ended, when hooks of the wrapper run
            self._handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after))

    def __exit__(self, *_: object) -> None:
        self._open = False  # hooks on outputs that are still there do nothing from now on
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if _unseen():
            return
        name, unit = self._names[module], self._units.get(module)
        own = module.named_parameters(name, recurse=False)
        parameters = own if unit is None else ((each.fqn, each.unsharded) for each in unit.parameters)
        for fqn, parameter in ((clean_name(fqn), parameter) for fqn, parameter in parameters):
            self._visit("forward", fqn, f"parameter {fqn!r}", [parameter])
            if parameter.requires_grad and id(parameter) not in self._hooked:
                self._hooked.add(id(parameter))
                look = partial(self._gradient, fqn, f"the gradient of {fqn!r}, before its reduction,")
                self._handles.append(parameter.register_hook(look))  # type: ignore[no-untyped-call]
        self._visit("forward", name, f"an input of {_describe(name)}", (args, kwargs))

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if _unseen():
            return
        name = self._names[module]
        described = f"output of {_describe(name)}"
        self._visit("forward", name, f"the {described}", output)
        for tensor in iterate_tensors(output):
            if tensor.requires_grad and not tensor.is_leaf:
                look = partial(self._gradient, name, f"the gradient of the {described}")
                tensor.register_hook(look)  # type: ignore[no-untyped-call]

    def _gradient(self, name: str, what: str, gradient: torch.Tensor) -> None:
        if self._open and torch._C._functorch.maybe_current_level() is None:
            self._visit("backward", name, what, [gradient])


def values_here(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values that a tensor has on this rank: of a DTensor the local ones, of a sparse one those stored."""
    local = tensor.detach()
    local = local._local_tensor if isinstance(local, DTensor) else local
    if local.layout is torch.strided:
        return local
    return local.coalesce().values() if local.layout is torch.sparse_coo else local.values()


def _compiled_within(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """Return the modules whose forward is part of a compiled one: a hook would compile it anew."""
    found: set[nn.Module] = set()
    for module in modules:
        if is_compiled(module):
            found.update(each for each in module.modules() if each is not module)
        elif module._compiled_call_impl is not None:
            found.update(module.modules())
    return found


def _unseen() -> bool:
    """Return True in compiled code, in functorch's transforms, and if checkpointed activations are recomputed."""
    if torch.compiler.is_compiling():
        return True
    return torch._C._functorch.maybe_current_level() is not None or hooks.in_backward()


def _describe(name: str) -> str:
    return repr(name) if name else "the model"
