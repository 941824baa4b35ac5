"""What of a model is saved: parameters, persistent buffers and extra state, by name, without communication."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint.parameters import local_parameters, walk
from fullshard.checkpoint.pieces import Pieces

__all__ = ["EXTRA_STATE", "ModelState", "model_state"]

EXTRA_STATE = "_extra_state"  # what nn.Module calls a module's own state in a state dict


class ModelState:
    """A model's state as this rank holds it. What is written into it is written into the model.

    Attributes:
        tensors: Parameters and persistent buffers by FQN, tied ones under their first name.
        aliases: The further names of tied ones, each with the first one.
        extra: What modules return from ``get_extra_state``, by FQN.
    """

    tensors: dict[str, Pieces]
    aliases: dict[str, str]
    extra: dict[str, Any]
    _setters: dict[str, Callable[[Any], None]]  # for extra state
    _cast: list[tuple[torch.Tensor, torch.Tensor]]  # buffers that compute in another dtype: the buffer, its state

    def __init__(self) -> None:
        self.tensors, self.aliases, self.extra, self._setters, self._cast = {}, {}, {}, {}, []

    @property
    def names(self) -> set[str]:
        """All names of tensors, those of tied ones included."""
        return self.tensors.keys() | self.aliases.keys()

    def set_extra(self, values: dict[str, Any]) -> None:
        """Hand loaded extra state to the modules."""
        for name, value in values.items():
            self._setters[name](value)

    def loaded(self) -> None:
        """The tensors were filled: bring those to the model that are not the model's own memory."""
        for buffer, state in self._cast:
            buffer.copy_(state)

    def _add_buffer(self, fqn: str, buffer: torch.Tensor) -> None:
        dtype = buffer.__dict__.get("_fullshard_dtype", buffer.dtype)  # from before the wrapper cast it
        state = buffer
        if dtype is not buffer.dtype:
            state = buffer.detach().to(dtype)
            self._cast.append((buffer.detach(), state))
        self.tensors[fqn] = Pieces.of(state)


def model_state(model: nn.Module) -> ModelState:
    """The state of ``model`` as this rank holds it, in model order.

    Args:
        model: Plain, DistributedDataParallel, of either front end, or a mixture; at rest.

    Raises:
        PhaseError: If a unit is in the middle of a step, or its full parameters are summoned.
        TypeError: If a tensor is sharded in a way that says of no element where it is.
    """
    state = ModelState()
    for parameter in local_parameters(model):
        state.tensors[parameter.fqn] = parameter.cut(parameter.parameter)
        state.aliases.update(dict.fromkeys(parameter.fqns[1:], parameter.fqn))
    seen: dict[int, str] = {}
    for prefix, module in walk(model):
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set:
                continue
            fqn = prefix + name
            first = seen.setdefault(id(buffer), fqn)
            if first != fqn:
                state.aliases[fqn] = first
            else:
                state._add_buffer(fqn, buffer)
        _warn_of_own_ways(prefix, module)
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            state.extra[prefix + EXTRA_STATE] = module.get_extra_state()
            state._setters[prefix + EXTRA_STATE] = module.set_extra_state
    return state


def _warn_of_own_ways(prefix: str, module: nn.Module) -> None:
    """Modules may put more into a state dict than is looked at here, and nobody would miss it."""
    hooks = [*module._state_dict_hooks.values(), *module._load_state_dict_pre_hooks.values()]
    # Those of torch and ours change names for wrappers.
    foreign = [hook for hook in hooks if not str(_module_of(hook)).startswith(("torch.", "fullshard."))]
    if foreign or type(module)._save_to_state_dict is not nn.Module._save_to_state_dict:
        warnings.warn(
            f"{prefix.removesuffix('.') or 'the model'} ({type(module).__name__}) changes state dicts with hooks or a "
            "_save_to_state_dict of its own, which checkpoints do not run: they have parameters, persistent buffers "
            "and what get_extra_state returns. Put further state there",
            stacklevel=2,
        )


def _module_of(hook: Any) -> str | None:
    hook = getattr(hook, "hook", hook)  # torch keeps some in an object of its own
    return getattr(getattr(hook, "func", hook), "__module__", None)
