"""Allocate memory for parameters and buffers on the meta device before they are filled from files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.state.parameters import ensure_idle, walk_modules
from fullshard.engine.ownership import units_of
from fullshard.engine.parameters.sharded import managed_by, value_of
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


class MetaTensors:
    """The parameters and buffers of ``model`` on the meta device, including those that are not saved.

    Args:
        model: The model.
        init_buffers: Called with each module that has buffers on the meta device that are not filled from elsewhere,
            once they have memory. None: its ``reset_parameters()``, or else ``_init_weights(module)`` of the closest
            module around it that has such a method, as models of Hugging Face transformers do.
    """

    _model: nn.Module
    _tensors: list[_MetaTensor]
    _init_buffers: Callable[[nn.Module], object] | None
    _around: dict[nn.Module, nn.Module]  # the closest module with an ``_init_weights``, by module

    def __init__(self, model: nn.Module, init_buffers: Callable[[nn.Module], object] | None = None) -> None:
        found: dict[int, _MetaTensor] = {}
        for prefix, module in walk_modules(model):
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is None or tensor.device.type != "meta":
                    continue
                meta = found.setdefault(id(tensor), _MetaTensor(tensor))
                meta.names.append(prefix + name)
                if (module, name) not in meta.owners:
                    meta.owners.append((module, name))
        self._model, self._tensors, self._init_buffers = model, list(found.values()), init_buffers
        self._around = {}
        for module in model.modules():  # those outside come before those inside of them
            if callable(getattr(module, "_init_weights", None)):
                self._around.update(dict.fromkeys(module.modules(), module))

    def never_filled(self, filled: Collection[str]) -> list[str]:
        """Return the tensors that get a value neither from ``filled`` nor from an initialization of their module."""
        return [
            meta.names[0]
            for meta in self._unfilled(filled)
            if isinstance(meta.tensor, nn.Parameter)
            or not any(self._initialization_of(module) for module, _ in meta.owners)
        ]

    def _initialization_of(self, module: nn.Module) -> Callable[[], object] | None:
        if self._init_buffers is not None:
            return partial(self._init_buffers, module)
        reset: Callable[[], object] | None = getattr(module, "reset_parameters", None)
        if callable(reset):
            return reset
        around: Any = self._around.get(module)
        return None if around is None else partial(around._init_weights, module)

    def _unfilled(self, filled: Collection[str]) -> list[_MetaTensor]:
        return [meta for meta in self._tensors if not any(name in filled for name in meta.names)]

    def materialize(self, filled: Collection[str]) -> None:
        """Allocate all tensors, and initialize the modules with buffers that are not in ``filled``.

        Tied tensors stay tied; parameters stay the same objects, for optimizers that exist already. What else an
        initialization changes is undone.

        Raises:
            CheckpointError: If a parameter cannot stay the same object, or an initialization fails, or leaves
                something without memory, or does not set a buffer.
        """
        default = _compute_device(self._model)
        # Tensors are kept, not only their ids, which are reused for those that an initialization makes.
        new: dict[int, torch.Tensor] = {}
        with _without_weak_references(self._tensors):
            for meta in self._tensors:
                made = _give_memory(meta, _device_of(meta.tensor, default))
                new[id(made)] = made
        ensure_idle(self._model)
        unset = [(meta.names[0], *owner) for meta in self._unfilled(filled) for owner in meta.owners]
        before = [(module._buffers[name], _version_of(module._buffers[name])) for _, module, name in unset]
        for module in dict.fromkeys(module for _, module, _ in unset):
            initialize = self._initialization_of(module)
            if initialize is not None:
                with _restored(module, new):
                    _run(initialize, module)
        left = [meta.names[0] for meta in MetaTensors(self._model)._tensors]
        if left:
            raise CheckpointError(f"parameters or buffers are still on the meta device: {left[:10]}")
        pairs = zip(unset, before, strict=True)
        forgotten = [name for (name, module, own), old in pairs if not _is_set(module._buffers[own], *old)]
        if forgotten:
            raise CheckpointError(
                f"these buffers are not in the files, and the initialization of their modules did not set them: "
                f"{forgotten[:10]}; pass init_buffers, a function that sets them"
            )


def _run(initialize: Callable[[], object], module: nn.Module) -> None:
    try:
        with torch.no_grad():
            initialize()
    except Exception as error:
        raise CheckpointError(
            f"the initialization of a {type(module).__name__}, which has buffers on the meta device that are not in "
            f"the files, failed: {type(error).__name__}: {error}"
        ) from error


@contextlib.contextmanager
def _restored(module: nn.Module, new: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Restore the module's tensors after the block, except those in ``new`` (by id)."""
    stores: list[dict[str, Any]] = [held for each in module.modules() for held in (each._parameters, each._buffers)]
    kept = [
        (tensors, name, tensor, value_of(tensor).clone())
        for tensors in stores
        for name, tensor in tensors.items()
        if tensor is not None and new.get(id(tensor)) is not tensor
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensors, name, tensor, value in kept:
                value_of(tensor).copy_(value)
                tensors[name] = tensor


def _version_of(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def _is_set(buffer: torch.Tensor | None, before: torch.Tensor | None, version: int) -> bool:
    """Return True if a new buffer of zeros, ``before``, has been replaced or written to, be it with zeros."""
    if buffer is None or not buffer.numel() or buffer is not before or _version_of(buffer) != version:
        return True
    return bool(value_of(buffer).any())  # written to through .data


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


def _give_memory(meta: _MetaTensor, device: torch.device) -> torch.Tensor:
    """Allocate a tensor; return the tensor that the modules have then."""
    old = meta.tensor
    new = torch.zeros_like(old, device=device)  # zeros: deterministic if a later step fails
    if not isinstance(old, nn.Parameter):
        for module, name in meta.owners:
            module._buffers[name] = new
        return new
    kind = type(old)
    replacement = nn.Parameter(new, requires_grad=old.requires_grad)
    replacement.__dict__.update({key: value for key, value in vars(old).items() if not key.startswith("_")})
    try:
        torch.utils.swap_tensors(old, replacement)  # type: ignore[no-untyped-call]
    except RuntimeError as error:  # an optimizer would not know a new object
        raise CheckpointError(
            f"{meta.names[0]} is on the meta device and cannot be materialized in place: {error}; load before anything "
            "else refers to it, such as an autograd graph or a weak reference"
        ) from error
    old.__class__ = kind
    return old


def _device_of(tensor: torch.Tensor, default: torch.device) -> torch.device:
    managed = managed_by(tensor)
    if managed is not None and managed.owned:
        return managed.at_rest
    return torch.device(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else default


def _compute_device(model: nn.Module) -> torch.device:
    """Return the device for tensors that are in no unit."""
    unit = next(iter(units_of(model)), None)
    if unit is not None:
        return unit.mesh.device
    devices = (tensor.device for tensor in (*model.parameters(), *model.buffers()))
    return next((device for device in devices if device.type != "meta"), torch.get_default_device())
