"""Memory for what of a model is still on the meta device, before it is filled from files."""

from __future__ import annotations

from collections.abc import Collection
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
        left = [held for held in self._held if not any(name in filled for name in held.names)]
        return [held.names[0] for held in left if not held.reset]

    def materialize(self, filled: Collection[str]) -> None:
        """Give memory to all, and run ``reset_parameters()`` of the modules with buffers that are not ``filled``.

        Tied ones stay tied; parameter objects stay the same where that is possible.

        Raises:
            CheckpointError: If a ``reset_parameters()`` fails, or leaves something without memory.
        """
        otherwise = _compute_device(self._model)
        resets: dict[nn.Module, None] = {}
        for held in self._held:
            _give_memory(held, _device_of(held.tensor, otherwise))
            if not any(name in filled for name in held.names):
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


def _give_memory(held: _Held, device: torch.device) -> None:
    old = held.tensor
    new = torch.zeros_like(old, device=device)  # deterministic, should anything go wrong from here on
    if not isinstance(old, nn.Parameter):
        for module, name in held.holders:
            module._buffers[name] = new
        return
    made = nn.Parameter(new, requires_grad=old.requires_grad)
    made.__dict__.update({key: value for key, value in vars(old).items() if not key.startswith("_")})
    if isinstance(old, DTensor):
        try:
            torch.utils.swap_tensors(old, made)  # type: ignore[no-untyped-call]
            return
        except RuntimeError:  # something else refers to it, in a way that cannot be swapped
            pass
    for module, name in held.holders:
        setattr(module, name, made)


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
