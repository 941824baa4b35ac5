"""Allocate memory for parameters and buffers on the meta device before they are filled from files."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.state.parameters import ensure_idle, walk_modules
from fullshard.engine.ownership import nested_units
from fullshard.engine.parameters.sharded import managed_by
from fullshard.errors import CheckpointError

__all__ = ["MetaTensors"]


@dataclass
class _MetaTensor:
    """A parameter or buffer on the meta device.

    Args:
        tensor: The tensor.
        names: All its names, as before wrapping.
        owners: The modules that have it, with the attribute name.
    """

    tensor: torch.Tensor
    names: list[str] = field(default_factory=list)
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)

    @property
    def reset(self) -> list[nn.Module]:
        """Modules whose ``reset_parameters()`` can initialize it, if it is a buffer."""
        if isinstance(self.tensor, nn.Parameter):
            return []
        return [module for module, _ in self.owners if callable(getattr(module, "reset_parameters", None))]


class MetaTensors:
    """The parameters and buffers of ``model`` on the meta device, including those that are not saved."""

    _model: nn.Module
    _tensors: list[_MetaTensor]

    def __init__(self, model: nn.Module) -> None:
        found: dict[int, _MetaTensor] = {}
        for prefix, module in walk_modules(model):
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is None or tensor.device.type != "meta":
                    continue
                meta = found.setdefault(id(tensor), _MetaTensor(tensor))
                meta.names.append(prefix + name)
                if (module, name) not in meta.owners:
                    meta.owners.append((module, name))
        self._model, self._tensors = model, list(found.values())

    def never_filled(self, filled: Collection[str]) -> list[str]:
        """Return the tensors that get a value neither from ``filled`` nor from a ``reset_parameters()``."""
        return [meta.names[0] for meta in self._unfilled(filled) if not meta.reset]

    def reset_prefixes(self, filled: Collection[str]) -> list[str]:
        """Return the name prefixes of the modules whose ``reset_parameters()`` will run: those with buffers not in
        ``filled``.
        """
        resets = {module for meta in self._unfilled(filled) for module in meta.reset}
        return [prefix for prefix, module in walk_modules(self._model) if module in resets]

    def _unfilled(self, filled: Collection[str]) -> list[_MetaTensor]:
        return [meta for meta in self._tensors if not any(name in filled for name in meta.names)]

    def materialize(self, filled: Collection[str]) -> None:
        """Allocate all tensors, and run ``reset_parameters()`` of the modules with buffers that are not in ``filled``.

        Tied tensors stay tied; parameters stay the same objects, for optimizers that exist already.

        Raises:
            CheckpointError: If a parameter cannot stay the same object, or a ``reset_parameters()`` fails, or leaves
                something without memory.
        """
        default = _compute_device(self._model)
        resets: dict[nn.Module, None] = {}
        with _without_weak_references(self._tensors):
            for meta in self._tensors:
                _give_memory(meta, _device_of(meta.tensor, default))
        for meta in self._unfilled(filled):
            resets |= dict.fromkeys(meta.reset)
        ensure_idle(self._model)
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
        left = MetaTensors(self._model)._tensors
        if left:
            raise CheckpointError(
                f"parameters or buffers are still on the meta device: {[meta.names[0] for meta in left][:10]}"
            )


@contextlib.contextmanager
def _without_weak_references(every: list[_MetaTensor]) -> Iterator[None]:
    """Drop the weak references of recurrent modules to their parameters, with which these cannot be swapped."""
    modules = {module for meta in every for module, _ in meta.owners if isinstance(module, nn.RNNBase)}
    for module in modules:
        module._flat_weight_refs = []
    try:
        yield
    finally:
        for module in modules:
            module._init_flat_weights()


def _give_memory(meta: _MetaTensor, device: torch.device) -> None:
    old = meta.tensor
    new = torch.zeros_like(old, device=device)  # zeros: deterministic if a later step fails
    if not isinstance(old, nn.Parameter):
        for module, name in meta.owners:
            module._buffers[name] = new
        return
    kind = type(old)
    replacement = nn.Parameter(new, requires_grad=old.requires_grad)
    replacement.__dict__.update({key: value for key, value in vars(old).items() if not key.startswith("_")})
    try:
        torch.utils.swap_tensors(old, replacement)  # type: ignore[no-untyped-call]
    except RuntimeError as error:  # an optimizer would not know a new object
        raise CheckpointError(
            f"{meta.names[0]} on the meta device cannot get memory and stay the same object: {error}; load before "
            "anything else refers to it, a graph of autograd or a weak reference"
        ) from error
    old.__class__ = kind


def _device_of(tensor: torch.Tensor, default: torch.device) -> torch.device:
    managed = managed_by(tensor)
    unit = managed.unit() if managed is not None and managed.owned else None
    if unit is not None:
        return torch.device("cpu") if unit.policy.offloads else unit.mesh.device
    return torch.device(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else default


def _compute_device(model: nn.Module) -> torch.device:
    """Return the device for tensors that are in no unit."""
    unit = next(iter(nested_units(model)), None)
    if unit is not None:
        return unit.mesh.device
    devices = (tensor.device for tensor in (*model.parameters(), *model.buffers()))
    return next((device for device in devices if device.type != "meta"), torch.get_default_device())
