"""Keys of checkpoints that other programs have laid out: ``{"model", "optim"}``, ``{"app": {...}}``, bare weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from fullshard.errors import CheckpointError

__all__ = ["check_key_map", "find_model", "find_optimizer", "names_by_place", "top_level", "with_prefixes"]

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


def find_model(keys: Collection[str], names: Collection[str]) -> dict[str, str]:
    """Find where a model is in a checkpoint.

    Args:
        keys: As stored.
        names: The model's names. A place counts if it has all of them.

    Returns:
        What ``with_prefixes`` takes; empty if it is nowhere.

    Raises:
        CheckpointError: If one place has all names, another has at least half, and none of these is called ``model``.
    """
    counts = names_by_place(keys, names)
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


def names_by_place(keys: Iterable[str], names: Collection[str]) -> Counter[str]:
    """Return how many of the names follow each beginning of keys."""
    counts = Counter[str]()
    for key in keys:
        words = key.split(".")
        counts.update(".".join(words[:start]) for start in range(len(words)) if ".".join(words[start:]) in names)
    return counts


def find_optimizer(keys: Iterable[str], names: Collection[str]) -> dict[str, str]:
    """Find where the state, or else the groups, of an optimizer are, as ``find_model`` does.

    Raises:
        CheckpointError: If there are several places, and none is ``optimizer``.
    """
    ours, stateful, grouped = set[str](), set[str](), set[str]()
    for key in keys:
        words = key.split(".")
        for at, word in enumerate(words):
            if word not in ("state", "param_groups"):
                continue
            place, rest = ".".join(words[:at]), words[at + 1 :]
            if any(".".join(rest[:end]) in names for end in range(1, len(rest))):
                ours.add(place)
            elif word == "state":
                stateful.add(place)
            elif rest[:1] == ["0"]:
                grouped.add(place)
    return _only(sorted(ours | (grouped - stateful)), "optimizer")  # state, but of other parameters: another's


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
            f"the checkpoint has several candidates for the {usual}, under the prefixes {listed}: select one with "
            f"key_map={{'...': {usual!r}}}"
        )
    return {places[0]: usual} if places else {}


def _begins(key: str, prefix: str) -> bool:
    return not prefix or key == prefix or key.startswith(f"{prefix}.")


def _joined(prefix: str, rest: str) -> str:
    return f"{prefix}.{rest}" if prefix and rest else prefix or rest
