"""The process groups' key-value store, which works while collectives hang."""

from __future__ import annotations

import math
import os
from typing import Any

import torch.distributed as dist

from fullshard.ranks.agreement import digest_of

__all__ = ["prefix_of", "read", "seconds_from"]

_UNSET = "unset"  # not JSON


def prefix_of(group: dist.ProcessGroup, purpose: str) -> str:
    """Return the prefix that separates the keys of a group of ranks for one purpose."""
    return f"fullshard/{purpose}/{digest_of((group.group_name, dist.get_process_group_ranks(group))).hex()}"


def read(keys: Any, key: str) -> bytes:
    """Return the value of a key, empty if there is none: one request that never waits, as ``get`` would."""
    found: bytes = keys.compare_set(key, _UNSET, _UNSET)
    return b"" if found == _UNSET.encode() else found


def seconds_from(variable: str, default: float, *, allow_zero: bool = False) -> float:
    """Return a number of seconds from an environment variable.

    Raises:
        ValueError: If it is not a positive number, or zero if that is allowed.
    """
    value = os.environ.get(variable, default)
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not (seconds >= 0 if allow_zero else seconds > 0) or seconds == math.inf:
        expected = "a number of seconds, or 0 to disable it" if allow_zero else "a positive number of seconds"
        raise ValueError(f"the environment variable {variable}: expected {expected}, found {value!r}")
    return seconds
