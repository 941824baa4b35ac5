"""Texts from outside in messages."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["clipped", "shortened"]

_SHOWN = 300  # characters


def clipped(text: object) -> str:
    """Return a text from outside, such as a value in a file, as an error shows it: its first characters."""
    shown = str(text)
    return shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 3]}..."


def shortened(items: Iterable[str], most: int = 10) -> str:
    """Return a list of the first items, and how many more there are."""
    every = list(items)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(map(clipped, every[:most])) + more
