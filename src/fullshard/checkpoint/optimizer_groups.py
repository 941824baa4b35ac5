"""The parameter groups of a saved optimizer beside those of this one, compared by the names of parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fullshard.checkpoint.optimizer_entries import OptimizedParameter, group_options, holds_tensors
from fullshard.checkpoint.parameters import LocalParameter

__all__ = ["SavedGroups"]

MOST_NAMES = 20  # that one problem lists


class SavedGroups:
    """Which saved options each group gets, and which parameters only one side has.

    Args:
        groups: As saved, with FQNs; None: not saved.
        state: As saved, by FQN.
        members: Of each group of this optimizer.
        strict: Whether parameters that only one side has are problems.

    Attributes:
        known: Names of the parameters that were saved, with or without state.
        options: Saved ones, for each group of this optimizer; empty if it keeps its own.
        others: Keys of the saved state that were no parameters.
        problems: What does not fit, in words.
    """

    known: set[str]
    options: list[dict[str, Any]]
    others: list[str]
    problems: list[str]
    _groups: Sequence[Mapping[str, Any]]
    _group_of: dict[str, int]
    _names: dict[str, str]  # any name of a parameter here -> the one that it was saved under

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]] | None,
        state: Mapping[str, Any],
        members: Sequence[Sequence[OptimizedParameter]],
        *,
        strict: bool,
    ) -> None:
        self._groups = groups or []
        self._group_of = {fqn: number for number, group in enumerate(self._groups) for fqn in group["params"]}
        parts = [part for group in members for member in group for part in member.parts]
        own = {fqn for part in parts for fqn in part.fqns}
        if groups is None:
            self.known = own & state.keys() or set(state)
            self.others = [name for name in state if name not in own]
        else:
            self.known = set(self._group_of)
            self.others = [name for name in state if name not in self.known]
        self._names = {part.fqn: next((n for n in part.fqns if n in self.known), part.fqn) for part in parts}
        self.problems = list(self._only_one_side(parts, own, state)) if strict and groups is not None else []
        self.options = [self._options(number, group) for number, group in enumerate(members)]

    def name_of(self, part: LocalParameter) -> str:
        """The name that a parameter was saved under, or would have been."""
        return self._names[part.fqn]

    def _only_one_side(self, parts: Sequence[LocalParameter], own: set[str], state: Mapping[str, Any]) -> Iterator[str]:
        # Frozen parameters have no state: whether they were given to an optimizer says nothing.
        missing = [part.fqn for part in parts if self.name_of(part) not in self.known and part.parameter.requires_grad]
        if missing:
            yield f"the optimizer that was saved did not have {_list(missing)}"
        unexpected = [fqn for fqn in self._group_of if fqn not in own and state.get(fqn)]
        if unexpected:
            yield f"state was saved for {_list(unexpected)}, which this optimizer does not have"

    def _options(self, number: int, members: Sequence[OptimizedParameter]) -> dict[str, Any]:
        """For the group of that number."""
        if not members:
            return self._options_of_empty(number)
        sources: dict[int, list[str]] = {}
        for part in (part for member in members for part in member.parts):
            source = self._group_of.get(self.name_of(part))
            if source is not None:
                sources.setdefault(source, []).append(part.fqn)
        if not sources:
            return {}
        (first, names), *rest = sources.items()
        options = group_options(self._groups[first])
        for other, others in rest:
            differing = _differing(options, group_options(self._groups[other]))
            if differing:
                self.problems.append(
                    f"group {number} of the optimizer has parameters that were saved in groups of different options "
                    f"({', '.join(differing)}): {_list(names)} and {_list(others)}; group them as they were"
                )
        return options

    def _options_of_empty(self, number: int) -> dict[str, Any]:
        """A group without parameters is the saved one of that number, if that has none either."""
        if number < len(self._groups) and not self._groups[number]["params"]:
            return group_options(self._groups[number])
        return {}


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return sorted(
        name
        for name in one.keys() | other.keys()
        if name not in one or name not in other or not _same(one[name], other[name])
    )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        alike = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.shape == other.shape
        return alike and bool((one == other).all())
    if holds_tensors(one) or holds_tensors(other):
        pairs = zip(one, other, strict=False) if isinstance(one, (list, tuple)) else ()
        return isinstance(one, (list, tuple)) and len(one) == len(other) and all(_same(a, b) for a, b in pairs)
    return bool(one == other)


def _list(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
