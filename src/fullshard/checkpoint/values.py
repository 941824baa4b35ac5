"""Values that are no tensors (parameter groups, RNG states, numbers, text) as bytes that run no code when read.

They are written with ``torch.save``, so that torch's own readers understand them, and read with its restricted
unpickler only. What that would refuse is refused at save time: a checkpoint that cannot be read is not written.
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

# torch's list of allowed classes belongs to the process, and its context manager restores what it found: two threads
# (an asynchronous save and a load) must not take turns in it.
_ALLOWING = threading.Lock()


def to_bytes(key: str, value: Any) -> bytes:
    """A value as bytes.

    Args:
        key: Its name in the checkpoint, for the error.
        value: Numbers, text, bytes, None, tensors, numpy arrays and numbers, and containers of them.

    Raises:
        TypeError: If :func:`from_bytes` could not read it back.
    """
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        written = stream.getvalue()
        _load(written)
    except Exception as error:  # pickling runs the value's own code, which may raise anything
        raise TypeError(
            f"{key}: a value of type {type(value).__qualname__} cannot be saved, because reading it back would have to "
            f"run code from the checkpoint ({first_line(error)}); save its state_dict(), or numbers, text, tensors "
            "and lists, tuples and dictionaries of them"
        ) from error
    return written


def from_bytes(key: str, data: bytes) -> Any:
    """The value that :func:`to_bytes` made bytes of, with its tensors on the CPU. Runs no code from them.

    Args:
        key: Its name in the checkpoint, for the error.
        data: The bytes.

    Raises:
        CheckpointError: If they are not such bytes, or name anything that is not allowed.
    """
    try:
        return _load(data)
    except Exception as error:  # a damaged or hostile pickle may raise anything
        raise CheckpointError(
            f"{key}: the checkpoint's value cannot be read ({first_line(error)}); nothing in it was run. It was not "
            "written by fullshard, or has been changed since: use another checkpoint"
        ) from error


def _load(data: bytes) -> Any:
    with _ALLOWING, torch.serialization.safe_globals(_allowed()):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _allowed() -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    """What numpy's arrays and numbers are pickled as; states of its random generators contain them."""
    kinds = [getattr(np.dtypes, name) for name in np.dtypes.__all__ if name != "ObjectDType"]
    allowed: list[Any] = [np.ndarray, np.dtype, *kinds]
    for module in ("numpy._core.multiarray", "numpy.core.multiarray"):  # numpy 2 and 1: files may come from either
        for name in ("_reconstruct", "scalar"):
            allowed.append((getattr(_multiarray(), name), f"{module}.{name}"))
    return allowed


def _multiarray() -> Any:
    return importlib.import_module("numpy._core.multiarray" if hasattr(np, "_core") else "numpy.core.multiarray")


def first_line(error: Exception) -> str:
    """What a restricted unpickler says, without its advice on how to switch the protection off."""
    refused = re.search(r"GLOBAL ([\w.]+) was not", str(error))
    if refused:
        return f"it contains {refused[1]}"
    return f"{type(error).__name__}: {error}".splitlines()[0]
