"""The state of a model on one rank: parameters, persistent buffers and extra state by FQN, without communication."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint.state.parameters import local_parameters, walk_modules
from fullshard.engine.parameters.tensor_shards import TensorShards

__all__ = ["EXTRA_STATE", "ModelState", "model_state"]

EXTRA_STATE = "_extra_state"  # what nn.Module calls a module's own state in a state dict


@dataclass(eq=False)
class ModelState:
    """State of a model on this rank. Writing to its tensors writes to the model.

    Attributes:
        tensors: Parameters and persistent buffers by FQN, tied ones under their first name.
        aliases: Other names of tied ones, each with the first name.
        extra: Results of the modules' ``get_extra_state``, by FQN.
        non_persistent: Names of buffers that are not saved, if these were asked for.
    """

    tensors: dict[str, TensorShards] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    non_persistent: set[str] = field(default_factory=set)
    _setters: dict[str, Callable[[Any], None]] = field(default_factory=dict)  # for extra state
    # Buffers that are saved in another dtype: buffer, saved tensor.
    _cast: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    @property
    def names(self) -> set[str]:
        """Names of all tensors, including all names of tied ones."""
        return self.tensors.keys() | self.aliases.keys()

    @property
    def names_of(self) -> dict[str, list[str]]:
        """All names of each tensor, by the first."""
        names = {name: [name] for name in self.tensors}
        for alias, first in self.aliases.items():
            names[first].append(alias)
        return names

    def set_extra(self, values: dict[str, Any]) -> None:
        """Pass loaded extra state to the modules."""
        for name, value in values.items():
            self._setters[name](value)

    def copy_back(self) -> None:
        """Copy filled tensors to the buffers that do not share memory with them."""
        for buffer, state in self._cast:
            buffer.copy_(state)

    def _add_buffer(self, fqn: str, buffer: torch.Tensor) -> None:
        dtype = buffer.__dict__.get("_fullshard_dtype", buffer.dtype)  # its dtype before the wrapper cast it
        state = buffer
        if dtype is not buffer.dtype:
            state = buffer.detach().to(dtype)
            self._cast.append((buffer.detach(), state))
        self.tensors[fqn] = TensorShards.of(state)


def model_state(model: nn.Module, *, non_persistent: bool = False) -> ModelState:
    """Return the state of ``model`` on this rank, in model order.

    Args:
        model: Plain, DistributedDataParallel, of either front end, or a mixture; at rest.
        non_persistent: Include buffers that are not saved.

    Raises:
        PhaseError: If a unit is in the middle of a step, or its parameters are unsharded by ``summon_full_params``.
        TypeError: If a DTensor has a placement other than Shard and Replicate.
    """
    state = ModelState()
    for parameter in local_parameters(model):
        state.tensors[parameter.fqn] = parameter.shards_of(parameter.parameter)
        state.aliases.update(dict.fromkeys(parameter.fqns[1:], parameter.fqn))
    seen: dict[int, str] = {}
    for prefix, module in walk_modules(model):
        for name, buffer in module._buffers.items():
            fqn, unsaved = prefix + name, name in module._non_persistent_buffers_set
            if buffer is None or (unsaved and not non_persistent):
                continue
            if unsaved:
                state.non_persistent.add(fqn)
            first = seen.setdefault(id(buffer), fqn)
            if first != fqn:
                state.aliases[fqn] = first
            else:
                state._add_buffer(fqn, buffer)
        _warn_about_custom_state_dict(prefix, module)
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            state.extra[prefix + EXTRA_STATE] = module.get_extra_state()
            state._setters[prefix + EXTRA_STATE] = module.set_extra_state
    return state


def _warn_about_custom_state_dict(prefix: str, module: nn.Module) -> None:
    """Warn about modules that customize their state dict in ways that checkpoints ignore."""
    hooks = [*module._state_dict_hooks.values(), *module._load_state_dict_pre_hooks.values()]
    # Hooks of torch and fullshard only rename keys for wrappers.
    foreign = [hook for hook in hooks if not str(_module_of(hook)).startswith(("torch.", "fullshard."))]
    if foreign or type(module)._save_to_state_dict is not nn.Module._save_to_state_dict:
        warnings.warn(
            f"{prefix.removesuffix('.') or 'the model'} ({type(module).__name__}) customizes its state dict with hooks "
            "or _save_to_state_dict, which fullshard.save does not run: it saves parameters, persistent buffers and "
            "the result of get_extra_state(). Return additional state from get_extra_state()",
            stacklevel=2,
        )


def _module_of(hook: Any) -> str | None:
    hook = getattr(hook, "hook", hook)  # torch wraps some in an object
    return getattr(getattr(hook, "func", hook), "__module__", None)
