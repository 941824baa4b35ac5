"""Serialize values that are not tensors (parameter groups, RNG states, numbers, text) so that reading runs no code.

They are written with ``torch.save``, so that torch's own readers can read them, and read only with its restricted
unpickler. Values that it would reject are rejected at save time, so that every checkpoint can be read.
"""

from __future__ import annotations

import importlib
import io
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fullshard.errors import CheckpointError

__all__ = ["first_line", "from_bytes", "to_bytes"]

# torch's list of allowed classes is global to the process, and its context manager restores the previous one: two
# threads (a background save and a load) must not interleave in it.
_ALLOWING = threading.Lock()


def to_bytes(key: str, value: Any) -> bytes:
    """Serialize a value.

    Args:
        key: Its name in the checkpoint, for the error.
        value: Numbers, strings, bytes, None, tensors, numpy arrays and numbers, and containers of them.

    Raises:
        TypeError: If ``from_bytes`` could not read it back.
    """
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        written = stream.getvalue()
        _load(written)
    except Exception as error:  # pickling runs the value's own code, which may raise anything
        raise TypeError(
            f"{key}: a value of type {type(value).__qualname__} cannot be saved, because reading it back would run "
            f"code from the checkpoint ({first_line(error)}); save its state_dict(), or numbers, strings, tensors and "
            "lists, tuples and dictionaries of them"
        ) from error
    return written


def from_bytes(key: str, data: bytes) -> Any:
    """Deserialize a value of ``to_bytes``, with its tensors on the CPU. Runs no code from the bytes.

    Args:
        key: Its name in the checkpoint, for the error.
        data: The bytes.

    Raises:
        CheckpointError: If they are corrupted, or name anything that is not allowed.
    """
    try:
        return _load(data)
    except Exception as error:  # a damaged or hostile pickle may raise anything
        raise CheckpointError(
            f"{key}: the checkpoint's value cannot be read ({first_line(error)}); no code in it was run. It was not "
            "written by fullshard, or has been changed since: use another checkpoint"
        ) from error


def _load(data: bytes) -> Any:
    with _ALLOWING, torch.serialization.safe_globals(_allowed()):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _allowed() -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    """Return the classes and functions with which numpy arrays, numbers and random generator states are pickled."""
    kinds = [getattr(np.dtypes, name) for name in np.dtypes.__all__ if name != "ObjectDType"]
    allowed: list[Any] = [np.ndarray, np.dtype, *kinds]
    for module in ("numpy._core.multiarray", "numpy.core.multiarray"):  # numpy 2 and 1: files may come from either
        for name in ("_reconstruct", "scalar"):
            allowed.append((getattr(_multiarray(), name), f"{module}.{name}"))
    return allowed


def _multiarray() -> Any:
    return importlib.import_module("numpy._core.multiarray" if hasattr(np, "_core") else "numpy.core.multiarray")


def first_line(error: Exception) -> str:
    """Return the error of a restricted unpickler without its advice on how to switch the protection off."""
    refused = re.search(r"GLOBAL ([\w.]+) was not", str(error))
    if refused:
        return f"it contains {refused[1]}"
    return f"{type(error).__name__}: {error}".splitlines()[0]
