"""Keys of checkpoints that other programs have laid out: ``{"model", "optim"}``, ``{"app": {...}}``, bare weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from fullshard.errors import CheckpointError

__all__ = ["check_key_map", "names_by_place", "top_level", "with_prefixes"]

_SHOWN = 12


def with_prefixes(keys: Iterable[str], prefixes: Mapping[str, str]) -> dict[str, str]:
    """Return the keys with other prefixes, and the stored key of each.

    Args:
        keys: As stored.
        prefixes: New prefixes by stored ones, both without the dot at their end; "" is the prefix of every key. The
            longest that a key has counts. A key with none of them stays as it is, unless it lies under one of the new
            prefixes: then it is left out, as something else goes there.

    Raises:
        CheckpointError: If two keys become the same.
    """
    longest_first = sorted(prefixes.items(), key=lambda pair: -len(pair[0]))
    stored: dict[str, str] = {}
    for key in keys:
        new = next((_joined(to, key[len(old) :].lstrip(".")) for old, to in longest_first if _begins(key, old)), None)
        if new is None and any(_begins(key, taken) for taken in prefixes.values()):
            continue
        new = key if new is None else new
        if new in stored:
            raise CheckpointError(f"key_map: {stored[new]!r} and {key!r} of the checkpoint both become {new!r}")
        stored[new] = key
    return stored


def check_key_map(key_map: Mapping[str, str], keys: Collection[str]) -> dict[str, str]:
    """Return ``key_map`` without dots at the ends of its prefixes.

    Raises:
        CheckpointError: If it maps something that is not there, or to what ``fullshard.load`` does not look at.
    """
    found = {old.rstrip("."): new.rstrip(".") for old, new in key_map.items()}
    for old, new in found.items():
        if not any(_begins(key, old) for key in keys):
            raise CheckpointError(
                f"key_map: no key of the checkpoint begins with {old!r}; they begin with {top_level(keys)}"
            )
        if new not in ("model", "optimizer") and not new.startswith("extra."):
            raise CheckpointError(f"key_map: expected 'model', 'optimizer' or 'extra.NAME' for {old!r}, found {new!r}")
    return found


def names_by_place(keys: Iterable[str], names: Collection[str]) -> Counter[str]:
    """Return how many of the names follow each beginning of keys."""
    counts = Counter[str]()
    for key in keys:
        words = key.split(".")
        counts.update(".".join(words[:start]) for start in range(len(words)) if ".".join(words[start:]) in names)
    return counts


def top_level(keys: Iterable[str]) -> str:
    """Return the first parts of the keys, with how many begin with each, for errors."""
    counts = Counter(key.partition(".")[0] for key in keys)
    shown = [f"{name!r} ({count} key{'s' * (count > 1)})" for name, count in counts.most_common(_SHOWN)]
    return ", ".join(shown) + (f" and {len(counts) - _SHOWN} more" if len(counts) > _SHOWN else "")


def _begins(key: str, prefix: str) -> bool:
    return not prefix or key == prefix or key.startswith(f"{prefix}.")


def _joined(prefix: str, rest: str) -> str:
    return f"{prefix}.{rest}" if prefix and rest else prefix or rest
