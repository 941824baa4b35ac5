"""Keys of checkpoints that other programs have laid out: ``{"model", "optim"}``, ``{"app": {...}}``, bare weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from fullshard.errors import CheckpointError

__all__ = ["find_model", "find_optimizer", "top_level", "with_prefixes"]

_SHOWN = 12


def with_prefixes(keys: Iterable[str], prefixes: Mapping[str, str]) -> dict[str, str]:
    """Return the keys with other prefixes, and the stored key of each.

    Args:
        keys: As stored.
        prefixes: New prefixes by stored ones, both without the dot at their end; "" is the prefix of every key. The
            longest that a key has counts. A key that has none stays as it is, or is left out if a new prefix is its
            own: that place is taken.

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


def find_model(keys: Collection[str], names: Collection[str]) -> dict[str, str]:
    """Find where a model is in a checkpoint.

    Args:
        keys: As stored.
        names: The model's names. A place counts if it has all of them.

    Returns:
        What :func:`with_prefixes` takes; empty if it is nowhere.

    Raises:
        CheckpointError: If it is not the only place with at least half of the names, and not ``model``.
    """
    counts = Counter[str]()
    for key in keys:
        words = key.split(".")
        counts.update(".".join(words[:start]) for start in range(len(words)) if ".".join(words[start:]) in names)
    complete = [place for place, count in counts.items() if count == len(names)]
    usual = [key for key in keys if _begins(key, "model")]
    # A part of a model, or of what is called so, is not another model, unless it is all of that: ``model.module``.
    places = [
        place
        for place, count in counts.items()
        if 2 * count >= len(names)
        and not any(place != outer and _begins(place, outer) for outer in complete)
        and (not place.startswith("model.") or all(_begins(key, place) for key in usual))
    ]
    return _only(places, "model") if any(place in complete for place in places) else {}


def find_optimizer(keys: Iterable[str], names: Collection[str]) -> dict[str, str]:
    """Find where the state or the groups of an optimizer are, as :func:`find_model` does.

    Raises:
        CheckpointError: If there are several places, and none is ``optimizer``.
    """
    places: dict[str, None] = {}
    for key in keys:
        words = key.split(".")
        for at, word in enumerate(words):
            rest = [".".join(words[at + 1 : end]) for end in range(at + 2, len(words))]
            named = any(name in names for name in rest)
            if (word == "state" and named) or (word == "param_groups" and (named or words[at + 1 : at + 2] == ["0"])):
                places[".".join(words[:at])] = None
    return _only(list(places), "optimizer")


def top_level(keys: Iterable[str]) -> str:
    """Return the first parts of the keys, with how many begin with each, for errors."""
    counts = Counter(key.partition(".")[0] for key in keys)
    shown = [f"{name!r} ({count} key{'s' * (count > 1)})" for name, count in counts.most_common(_SHOWN)]
    return ", ".join(shown) + (f" and {len(counts) - _SHOWN} more" if len(counts) > _SHOWN else "")


def _only(places: list[str], usual: str) -> dict[str, str]:
    """Return the usual place if it is one of these, else the only one; empty if there is none."""
    if usual in places:
        return {usual: usual}
    if len(places) > 1:
        listed = ", ".join(repr(place) for place in sorted(places))
        raise CheckpointError(
            f"the checkpoint has the names of the model, for its {usual}, under {listed}: say which to load with "
            f"key_map={{{min(places)!r}: {usual!r}}}"
        )
    return {places[0]: usual} if places else {}


def _begins(key: str, prefix: str) -> bool:
    return not prefix or key == prefix or key.startswith(f"{prefix}.")


def _joined(prefix: str, rest: str) -> str:
    return f"{prefix}.{rest}" if prefix and rest else prefix or rest
