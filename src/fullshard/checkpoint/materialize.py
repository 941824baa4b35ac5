"""Memory for what of a model is still on the meta device, before it is filled from files."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.parameters import settle, walk
from fullshard.engine.ownership import nested_units
from fullshard.engine.parameter import managed_by
from fullshard.errors import CheckpointError

__all__ = ["MetaTensors"]


@dataclass
class _Held:
    """A parameter or buffer on the meta device.

    Args:
        tensor: It.
        names: All of them, as before wrapping.
        holders: The modules that hold it, and under which attribute.
    """

    tensor: torch.Tensor
    names: list[str] = field(default_factory=list)
    holders: list[tuple[nn.Module, str]] = field(default_factory=list)

    @property
    def reset(self) -> list[nn.Module]:
        """Modules that can give it a value, if it is a buffer."""
        if isinstance(self.tensor, nn.Parameter):
            return []
        return [module for module, _ in self.holders if callable(getattr(module, "reset_parameters", None))]


class MetaTensors:
    """The parameters and buffers of ``model`` that are on the meta device, those that are not saved included."""

    _model: nn.Module
    _held: list[_Held]

    def __init__(self, model: nn.Module) -> None:
        found: dict[int, _Held] = {}
        for prefix, module in walk(model):
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is None or tensor.device.type != "meta":
                    continue
                held = found.setdefault(id(tensor), _Held(tensor))
                held.names.append(prefix + name)
                if (module, name) not in held.holders:
                    held.holders.append((module, name))
        self._model, self._held = model, list(found.values())

    def without_value(self, filled: Collection[str]) -> list[str]:
        """Those that nothing will give a value: neither who fills ``filled`` nor a ``reset_parameters()``."""
        return [held.names[0] for held in self._unfilled(filled) if not held.reset]

    def reset_prefixes(self, filled: Collection[str]) -> list[str]:
        """What the names of all begin with that a ``reset_parameters()`` may change: the modules with buffers that are
        not ``filled``.
        """
        resets = {module for held in self._unfilled(filled) for module in held.reset}
        return [prefix for prefix, module in walk(self._model) if module in resets]

    def _unfilled(self, filled: Collection[str]) -> list[_Held]:
        return [held for held in self._held if not any(name in filled for name in held.names)]

    def materialize(self, filled: Collection[str]) -> None:
        """Give memory to all, and run ``reset_parameters()`` of the modules with buffers that are not ``filled``.

        Tied ones stay tied; parameters stay the same objects, for optimizers that exist already.

        Raises:
            CheckpointError: If a parameter cannot stay the same object, or a ``reset_parameters()`` fails, or leaves
                something without memory.
        """
        otherwise = _compute_device(self._model)
        resets: dict[nn.Module, None] = {}
        with _without_weak_references(self._held):
            for held in self._held:
                _give_memory(held, _device_of(held.tensor, otherwise))
        for held in self._unfilled(filled):
            resets |= dict.fromkeys(held.reset)
        settle(self._model)
        for module in resets:
            reset: Any = module.reset_parameters
            try:
                with torch.no_grad():
                    reset()
            except Exception as error:
                raise CheckpointError(
                    f"reset_parameters() of a {type(module).__name__}, which has buffers on the meta device that are "
                    f"not in the files, failed: {type(error).__name__}: {error}"
                ) from error
        left = MetaTensors(self._model)._held
        if left:
            raise CheckpointError(f"these are still on the meta device: {[held.names[0] for held in left][:10]}")


@contextlib.contextmanager
def _without_weak_references(every: list[_Held]) -> Iterator[None]:
    """Recurrent modules of torch have weak references to their parameters, with which these cannot be swapped."""
    modules = {module for held in every for module, _ in held.holders if isinstance(module, nn.RNNBase)}
    for module in modules:
        module._flat_weight_refs = []
    try:
        yield
    finally:
        for module in modules:
            module._init_flat_weights()


def _give_memory(held: _Held, device: torch.device) -> None:
    old = held.tensor
    new = torch.zeros_like(old, device=device)  # deterministic, should anything go wrong from here on
    if not isinstance(old, nn.Parameter):
        for module, name in held.holders:
            module._buffers[name] = new
        return
    kind = type(old)
    made = nn.Parameter(new, requires_grad=old.requires_grad)
    made.__dict__.update({key: value for key, value in vars(old).items() if not key.startswith("_")})
    try:
        torch.utils.swap_tensors(old, made)  # type: ignore[no-untyped-call]
    except RuntimeError as error:  # a new object instead would be one that an optimizer does not know
        raise CheckpointError(
            f"{held.names[0]} on the meta device cannot get memory and stay the same object: {error}; load before "
            "anything else refers to it, a graph of autograd or a weak reference"
        ) from error
    old.__class__ = kind


def _device_of(tensor: torch.Tensor, otherwise: torch.device) -> torch.device:
    managed = managed_by(tensor)
    unit = managed.unit() if managed is not None and managed.owned else None
    if unit is not None:
        return torch.device("cpu") if unit.policy.offloads else unit.mesh.device
    return torch.device(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else otherwise


def _compute_device(model: nn.Module) -> torch.device:
    """For what is in no unit."""
    unit = next(iter(nested_units(model)), None)
    if unit is not None:
        return unit.mesh.device
    devices = (tensor.device for tensor in (*model.parameters(), *model.buffers()))
    return next((device for device in devices if device.type != "meta"), torch.get_default_device())
