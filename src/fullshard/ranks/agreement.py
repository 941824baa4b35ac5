"""Comparison of values between ranks, and errors that all ranks raise.

Every function with a process group is a collective: all ranks of the group call it. The usual case, that all ranks
agree, costs an all-gather of 8 bytes per group. Ranks that may not get as far synchronize with a
``rank_barrier`` first.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fullshard import errors
from fullshard.comm.collective import all_gather_single
from fullshard.errors import FullshardError

__all__ = [
    "any_rank",
    "compare",
    "describe_error",
    "differs",
    "digest_of",
    "error_from",
    "gather",
    "gather_found",
    "gather_if_different",
    "list_differences",
    "list_ranks",
    "list_values",
    "odd_ranks",
    "own_rank",
    "raise_on_all",
    "raised_on_all",
    "resolve_group",
    "values_of_ranks",
    "who_differs",
]

T = TypeVar("T")

_MAX_PARTS_SHOWN = 12
_MAX_KEYS_SHOWN = 8
_RAISED: dict[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError}
_RAISED |= {name: getattr(errors, name) for name in errors.__all__}


def resolve_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the default group for None; None if there are no process groups."""
    if group is None and dist.is_initialized():
        return dist.group.WORLD
    return group


def own_rank() -> int:
    """Return this process's global rank, 0 if there are no process groups."""
    return dist.get_rank() if dist.is_initialized() else 0


def gather(value: T, group: dist.ProcessGroup | None) -> dict[int, T]:
    """Return the values of all ranks of a group (None: the default one), small and pickled, by global rank."""
    group = resolve_group(group)
    ranks = [0] if group is None else dist.get_process_group_ranks(group)
    values: list[Any] = [value] * len(ranks)
    if len(ranks) > 1:
        dist.all_gather_object(values, value, group=group)
    return dict(zip(ranks, values, strict=True))


def gather_found(found: Mapping[int, T], groups: Sequence[dist.ProcessGroup | None]) -> dict[int, T]:
    """Return what ranks of a mesh, given as the groups of its axes, have found, by global rank."""
    everything = dict(found)
    for group in groups:
        for others in gather(everything, group).values():
            everything |= others
    return everything


def differs(value: object, group: dist.ProcessGroup | None) -> bool:
    """Return True on all ranks if the ``repr`` of their values differs; ``group`` as for ``gather``."""
    group = resolve_group(group)
    if group is None or group.size() == 1:
        return False
    devices = [device.type for device in group._device_types]  # none: a process group written in Python
    device = "cpu" if "cpu" in devices or not devices else devices[0]
    own = torch.tensor(list(digest_of(value)), dtype=torch.uint8, device=device)
    everyone = own.new_empty(group.size() * own.numel())
    all_gather_single(everyone, own, group=group)
    return bool((everyone.view(group.size(), -1) != own).any())


def gather_if_different(value: T, group: dist.ProcessGroup | None) -> dict[int, T]:
    """Return the values of all ranks by global rank if they differ, otherwise nothing."""
    return gather(value, group) if differs(value, group) else {}


def any_rank(flag: bool, groups: Sequence[dist.ProcessGroup | None]) -> bool:
    """Return True if ``flag`` is true on any rank of a mesh, given as the groups of its axes."""
    for group in groups:
        flag = differs(flag, group) or flag
    return flag


def compare(value: T, groups: Sequence[dist.ProcessGroup | None], explain: Callable[[dict[int, T]], Exception]) -> None:
    """Raise on all ranks of a mesh if the ``repr`` of their values differs.

    Args:
        value: This rank's.
        groups: The groups of the mesh's axes.
        explain: Makes the error from the values of a group by global rank.
    """
    for index, group in enumerate(groups):
        found = gather_if_different(value, group)
        raise_on_all(explain(found) if found else None, groups[index + 1 :])


def raise_on_all(failure: Exception | None, groups: Sequence[dist.ProcessGroup | None]) -> None:
    """Raise on all ranks of a mesh if any rank has failed.

    Args:
        failure: This rank's error, which it raises; None: it has not failed.
        groups: The groups of the mesh's axes.

    Raises:
        ValueError, TypeError, FullshardError: The error of the first rank that failed, with its number; other
            exceptions as FullshardError.
    """
    for group in groups:
        found = gather_if_different(None if failure is None else describe_error(failure), group)
        for rank, error in found.items():
            if failure is None and error is not None:
                failure = error_from(error[0], f"rank {rank}: {error[1]}")
    if failure is not None:
        raise failure


@contextlib.contextmanager
def raised_on_all(groups: Sequence[dist.ProcessGroup | None]) -> Iterator[None]:
    """Raise an error of the ``with`` block on all ranks of a mesh, as ``raise_on_all``.

    What ends a process, such as a KeyboardInterrupt, is raised on other ranks as FullshardError.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    except BaseException as error:
        with contextlib.suppress(Exception):  # of a backend whose other ranks were interrupted, too
            raise_on_all(FullshardError(f"interrupted by {type(error).__name__}"), groups)
        raise
    raise_on_all(failure, groups)


def odd_ranks(values: Mapping[int, object]) -> list[int]:
    """Return the ranks that have another value than most; of values that are equally frequent, the first is usual."""
    everyone = list(values.values())
    usual = max(everyone, key=everyone.count)
    return [rank for rank, value in values.items() if value != usual]


def who_differs(values: Mapping[int, object]) -> str:
    """Format the ranks that have another value than the first one, such as "ranks 1, 2 differ from ranks 0, 3"."""
    first = next(iter(values.values()))
    same = [rank for rank, value in values.items() if value == first]
    others = [rank for rank in values if rank not in same]
    return f"{list_ranks(others)} differ{'s' * (len(others) == 1)} from {list_ranks(same)}"


def describe_error(error: BaseException) -> tuple[str, str]:
    """Return the name of the exception to raise on other ranks, and its message."""
    kind = type(error).__name__
    return (kind, str(error)) if kind in _RAISED else (FullshardError.__name__, f"{kind}: {error}")


def error_from(kind: str, message: str) -> Exception:
    """Return an exception of a kind that ``describe_error`` returned."""
    return _RAISED[kind](message)


def digest_of(value: object) -> bytes:
    """Return 8 bytes of hash of the ``repr`` of ``value``: equal in all processes, unlike ``hash``."""
    return hashlib.blake2b(repr(value).encode(), digest_size=8).digest()


def list_differences(values: Mapping[int, Mapping[str, str]]) -> str:
    """Format the keys whose values differ between ranks, such as "weight ('a' on rank 0; nothing on ranks 1-3)"."""
    different = []
    for key in dict.fromkeys(key for own in values.values() for key in own):
        here = {rank: own.get(key) or "nothing" for rank, own in values.items()}
        if len(set(here.values())) > 1:
            different.append(f"{key} ({list_values(here)})")
    more = len(different) - _MAX_KEYS_SHOWN
    return ", ".join(different[:_MAX_KEYS_SHOWN]) + (f" and {more} more" if more > 0 else "")


def values_of_ranks(values: Mapping[int, str], most: int = _MAX_PARTS_SHOWN) -> list[str]:
    """Format each value with its ranks, as "'a' on ranks 0, 3-7": ``most`` of them, and how many more there are."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    parts = [f"{value} on {list_ranks(own)}" for value, own in itertools.islice(ranks.items(), most)]
    more = len(ranks) - len(parts)
    return [*parts, f"and {more} others on other ranks"] if more else parts


def list_values(values: Mapping[int, str]) -> str:
    """Format the values of ranks, such as "'a' on ranks 0, 3-7; 'b' on rank 1"."""
    return "; ".join(values_of_ranks(values))


def list_ranks(ranks: Sequence[int]) -> str:
    """Format ranks such as "ranks 0, 3-7", with at most a few spans."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    parts = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}-{b}" for a, b in spans[:_MAX_PARTS_SHOWN]]
    more = sum(b - a + 1 for a, b in spans[_MAX_PARTS_SHOWN:])
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(parts) + (f" and {more} more" if more else "")
