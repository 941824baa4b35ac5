"""Texts from outside in messages."""

from __future__ import annotations

__all__ = ["clipped"]

_SHOWN = 300  # characters


def clipped(text: object) -> str:
    """Return a text from outside, such as a value in a file, as an error shows it: its first characters."""
    shown = str(text)
    return shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 3]}..."
