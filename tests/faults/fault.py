"""One fault: a text of a source file and what takes its place."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Fault"]


@dataclass(frozen=True)
class Fault:
    """A small change that makes the library wrong.

    Args:
        file: Relative to ``src/fullshard``.
        old: Text that occurs once in it.
        new: What takes its place.
        consequence: What would happen to a user, in a sentence.
        tests: Files or folders below ``tests`` of which one test or more must fail.
    """

    file: str
    old: str
    new: str
    consequence: str
    tests: tuple[str, ...]
