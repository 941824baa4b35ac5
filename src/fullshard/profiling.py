"""Names of operations in profiles: ``fullshard::all_gather (layers.3)``.

They are events of a ``fullshard.trace`` while one runs, ``record_function`` ranges while a profiler of torch runs
(also ``torch.autograd.profiler.emit_nvtx``), and cost two checks otherwise. Under NVIDIA Nsight Systems, which torch
cannot detect, they are NVTX ranges; the environment variable ``FULLSHARD_NVTX=1`` enables these without Nsight Systems,
and ``FULLSHARD_NVTX=0`` disables them.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable, Iterator

import torch
from torch.profiler import record_function

from fullshard.progress import PROGRESS

__all__ = ["profiled"]

_NOTHING = contextlib.nullcontext()


def profiled(operation: str, units: Iterable[str] = ()) -> contextlib.AbstractContextManager[object]:
    """Return a context manager that names its block in profiles after an operation and units.

    Args:
        operation: Name such as ``"all_gather"``.
        units: FQNs of the units that the operation is for, ``""`` for the root; empty if it is for no unit. Only read
            while a profiler runs.

    Returns:
        The context manager.
    """
    if PROGRESS.observers:
        return _traced(operation, units)
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return record_function(_name(operation, units))
    if _nvtx_wanted():
        return torch.cuda.nvtx.range("{}", _name(operation, units))
    return _NOTHING


@contextlib.contextmanager
def _traced(operation: str, units: Iterable[str]) -> Iterator[None]:
    named = f"{operation} {', '.join(dict.fromkeys(units))}"
    PROGRESS.note("begin", named)
    try:
        with record_function(_name(operation, units)):
            yield
    finally:
        PROGRESS.note("end", named)


def _name(operation: str, units: Iterable[str]) -> str:
    names = ", ".join(dict.fromkeys(unit or "root" for unit in units))
    return f"fullshard::{operation} ({names})" if names else f"fullshard::{operation}"


@functools.cache
def _nvtx_wanted() -> bool:
    chosen = os.environ.get("FULLSHARD_NVTX")
    wanted = "NSYS_PROFILING_SESSION_ID" in os.environ if chosen is None else chosen != "0"
    return wanted and torch.cuda.is_available()
