"""What users save beside model and optimizer: values, tensors, objects with a state dict, random number generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from fullshard.checkpoint.pieces import Pieces

__all__ = ["joined", "random_state", "set_random_state", "split", "state_of", "tensors_in"]

# Tensors up to this size stay among the values: that is less work than an entry of its own. Fits a generator's state.
SMALL_BYTES = 16 * 1024
_MARK = "fullshard.tensor"  # the only key of what stands for a tensor


def state_of(value: Any) -> Any:
    """What of a value is saved: an object that has a state dict gives that."""
    stateful = isinstance(value, Stateful) and not isinstance(value, type)
    return value.state_dict() if stateful else value


def split(value: Any, tensors: dict[str, Pieces], prefix: str, *, small: bool = True) -> Any:
    """``value`` with its tensors taken out.

    Args:
        value: Anything; dictionaries, lists and tuples are looked into. Tensors may be :class:`Pieces`.
        tensors: Receives the tensors, under names that begin with ``prefix``.
        prefix: See there.
        small: Whether small plain CPU tensors stay where they are.

    Returns:
        The value, with dictionaries that name them in the tensors' places.
    """
    if isinstance(value, Pieces):
        tensors[prefix] = value
        return {_MARK: prefix}
    if isinstance(value, torch.Tensor):
        plain = type(value) is torch.Tensor and value.device.type == "cpu"
        if small and plain and value.numel() * value.element_size() <= SMALL_BYTES:
            return value.detach().clone()
        tensors[prefix] = Pieces.of(value)
        return {_MARK: prefix}
    if isinstance(value, Mapping):
        return {key: split(inner, tensors, f"{prefix}.{key}", small=small) for key, inner in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        parts = [split(inner, tensors, f"{prefix}.{index}", small=small) for index, inner in enumerate(value)]
        return tuple(parts) if isinstance(value, tuple) else parts
    return value


def joined(value: Any, tensor_of: Callable[[str], Any]) -> Any:
    """The inverse of :func:`split`: ``tensor_of`` gives the tensors by name."""
    if isinstance(value, dict):
        if value.keys() == {_MARK}:
            return tensor_of(value[_MARK])
        return {key: joined(inner, tensor_of) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [joined(inner, tensor_of) for inner in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    return value


def tensors_in(value: Any) -> set[str]:
    """The names of the tensors that :func:`split` took out of a value."""
    names: set[str] = set()
    joined(value, names.add)
    return names


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of this process's generators: torch's, of the device, Python's, and numpy's if it was imported."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = (name, torch.from_numpy(keys.astype("int64")), *rest)
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Put generators where :func:`random_state` found them; those that it did not find stay where they are."""
    torch.set_rng_state(state["torch"])
    random.setstate(_tuples(state["python"]))
    if device.type != "cpu" and device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type], device)
    if "numpy" in state:
        import numpy

        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value
