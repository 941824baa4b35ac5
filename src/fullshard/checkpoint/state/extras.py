"""Extra objects of a checkpoint: values, tensors, objects with a state dict, and states of random number generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from fullshard.engine.parameters.tensor_shards import TensorShards

__all__ = ["joined", "placeholder", "random_state", "set_random_state", "split", "state_of", "tensors_in"]

# Tensors up to this size are saved within the value, which is cheaper than an entry. Fits a generator's state.
SMALL_BYTES = 16 * 1024
_MARK = "fullshard.tensor"  # the only key of the dictionary that stands for a tensor


def state_of(value: Any) -> Any:
    """Return the state dict of an object that has one; any other value as it is."""
    stateful = isinstance(value, Stateful) and not isinstance(value, type)
    return value.state_dict() if stateful else value


def split(value: Any, tensors: dict[str, TensorShards], prefix: str, *, small: bool = True) -> Any:
    """Take the tensors out of a nested value.

    Args:
        value: Any value; dictionaries, lists and tuples are searched. Tensors may be ``TensorShards``.
        tensors: Receives the tensors.
        prefix: Prefix of their names.
        small: Leave small plain CPU tensors in the value.

    Returns:
        The value, with each tensor replaced by a dictionary that names it.
    """
    if isinstance(value, TensorShards):
        tensors[prefix] = value
        return placeholder(prefix)
    if isinstance(value, torch.Tensor):
        plain = type(value) is torch.Tensor and value.device.type == "cpu"
        if small and plain and value.numel() * value.element_size() <= SMALL_BYTES:
            return value.detach().clone()
        tensors[prefix] = TensorShards.of(value)
        return placeholder(prefix)
    if isinstance(value, Mapping):
        return {key: split(inner, tensors, f"{prefix}.{key}", small=small) for key, inner in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        parts = [split(inner, tensors, f"{prefix}.{index}", small=small) for index, inner in enumerate(value)]
        return tuple(parts) if isinstance(value, tuple) else parts
    return value


def placeholder(name: str) -> dict[str, str]:
    """Return what stands in a value for the tensor of that name."""
    return {_MARK: name}


def joined(value: Any, tensor_of: Callable[[str], Any]) -> Any:
    """Put the tensors back into a value of ``split``; ``tensor_of`` returns them by name."""
    if isinstance(value, dict):
        if value.keys() == {_MARK}:
            return tensor_of(value[_MARK])
        return {key: joined(inner, tensor_of) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [joined(inner, tensor_of) for inner in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    return value


def tensors_in(value: Any) -> set[str]:
    """Return the names of the tensors that ``split`` took out of a value."""
    names: set[str] = set()
    joined(value, names.add)
    return names


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of this process's random generators: torch, the device, Python, and numpy if it was
    imported.
    """
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = (name, torch.from_numpy(keys.astype("int64")), *rest)
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore random generators to a state of ``random_state``; generators that it lacks are left alone."""
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
