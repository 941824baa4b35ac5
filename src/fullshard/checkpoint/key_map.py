"""Keys of checkpoints that other programs have laid out: ``{"model", "optim"}``, ``{"app": {...}}``, bare weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from fullshard.errors import CheckpointError

__all__ = ["find_prefixes", "top_level", "with_prefixes"]

_SHOWN = 12


def with_prefixes(keys: Iterable[str], prefixes: Mapping[str, str]) -> dict[str, str]:
    """Return the keys with other prefixes, and the stored key of each.

    Args:
        keys: As stored.
        prefixes: New prefixes by stored ones, both without the dot at their end; "" is the prefix of every key. The
            longest that a key has counts; a key that has none stays as it is.

    Raises:
        CheckpointError: If two keys become the same.
    """
    longest_first = sorted(prefixes.items(), key=lambda pair: -len(pair[0]))
    stored: dict[str, str] = {}
    for key in keys:
        new = next((_joined(to, key[len(old) :].lstrip(".")) for old, to in longest_first if _begins(key, old)), key)
        if new in stored:
            raise CheckpointError(f"key_map: {stored[new]!r} and {key!r} of the checkpoint both become {new!r}")
        stored[new] = key
    return stored


def find_prefixes(keys: Collection[str], names: Collection[str], *, optimizer: bool) -> dict[str, str]:
    """Find where a model, and the state of its optimizer, are in a checkpoint.

    Args:
        keys: As stored.
        names: The model's names; a place counts if it has all of them.
        optimizer: Find the state of an optimizer, too: where ``state.`` and one of these names follow.

    Returns:
        What :func:`with_prefixes` takes; empty if all is where :func:`fullshard.save` puts it, or nowhere.

    Raises:
        CheckpointError: If there is more than one such place.
    """
    models, optimizers = Counter[str](), Counter[str]()
    for key in keys:
        words = key.split(".")
        models.update(".".join(words[:start]) for start in range(len(words)) if ".".join(words[start:]) in names)
        optimizers.update(
            ".".join(words[:at])
            for at, word in enumerate(words)
            if word == "state" and any(".".join(words[at + 1 : end]) in names for end in range(at + 2, len(words)))
        )
    usual = [key for key in keys if _begins(key, "model")]
    complete = [place for place, count in models.items() if count == len(names)]
    # A part of what is called the model is not another model, unless it is all of that: ``model.module``.
    places = [p for p in complete if not p.startswith("model.") or all(_begins(key, p) for key in usual)]
    found = {"model": _only(places, "model")}
    if optimizer:
        most = max(optimizers.values(), default=0)
        found["optimizer"] = _only([place for place, count in optimizers.items() if count == most], "optimizer")
    return {old: new for new, old in found.items() if old is not None and old != new}


def top_level(keys: Iterable[str]) -> str:
    """Return the first parts of the keys, with how many begin with each, for errors."""
    counts = Counter(key.partition(".")[0] for key in keys)
    shown = [f"{name!r} ({count} key{'s' * (count > 1)})" for name, count in counts.most_common(_SHOWN)]
    return ", ".join(shown) + (f" and {len(counts) - _SHOWN} more" if len(counts) > _SHOWN else "")


def _only(places: list[str], usual: str) -> str | None:
    """Return the usual place if it is one of these, else the only one; None if there is none."""
    if usual in places:
        return usual
    if len(places) > 1:
        listed = ", ".join(repr(place) for place in sorted(places))
        raise CheckpointError(
            f"the checkpoint has the names of the model under {listed}: say which to load with "
            f"key_map={{{min(places)!r}: {usual!r}}}"
        )
    return places[0] if places else None


def _begins(key: str, prefix: str) -> bool:
    return not prefix or key == prefix or key.startswith(f"{prefix}.")


def _joined(prefix: str, rest: str) -> str:
    return f"{prefix}.{rest}" if prefix and rest else prefix or rest
