"""Match the parameter groups of a saved optimizer, by FQN, with those of the optimizer that is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fullshard.checkpoint.state.optimizer.state import OptimizedParameter, group_options
from fullshard.checkpoint.state.parameters import LocalParameter

__all__ = ["SavedGroups", "equal"]

MOST_NAMES = 20  # in one message


class SavedGroups:
    """Saved options for each group of this optimizer, and parameters that only one side has.

    Args:
        groups: Saved groups, with FQNs; None: not saved.
        state: Saved state, by FQN.
        members: Parameters of each group of this optimizer.
        strict: Report parameters that only one side has as problems.

    Attributes:
        known: FQNs of the saved parameters, with or without state.
        options: Saved options for each group of this optimizer; empty if it keeps its own.
        others: Keys of the saved state that are no parameters.
        problems: Messages about mismatches.
    """

    known: set[str]
    options: list[dict[str, Any]]
    others: list[str]
    problems: list[str]
    _groups: Sequence[Mapping[str, Any]]
    _group_of: dict[str, int]

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
        originals = [original for group in members for member in group for original in member.originals]
        own = {fqn for original in originals for fqn in original.fqns}
        self.known = set(self._group_of) if groups is not None else own & state.keys() or set(state)
        self.others = [name for name in state if name not in (own if groups is None else self.known)]
        self.problems = list(self._only_one_side(originals, own, state)) if strict and groups is not None else []
        self.options = [self._options_of(number, group) for number, group in enumerate(members)]

    def name_of(self, original: LocalParameter) -> str:
        """Return the name that a parameter was saved under, or would have been."""
        return next((name for name in original.fqns if name in self.known), original.fqn)

    def _only_one_side(
        self, originals: Sequence[LocalParameter], own: set[str], state: Mapping[str, Any]
    ) -> Iterator[str]:
        # Frozen parameters have no state: whether they were given to an optimizer says nothing.
        trained = [original for original in originals if original.parameter.requires_grad]
        missing = [original.fqn for original in trained if self.name_of(original) not in self.known]
        if missing:
            yield f"the saved optimizer has no parameters {_list(missing)}"
        unexpected = [fqn for fqn in self._group_of if fqn not in own and state.get(fqn)]
        if unexpected:
            yield f"the checkpoint has state for {_list(unexpected)}, which this optimizer does not have"

    def _options_of(self, number: int, members: Sequence[OptimizedParameter]) -> dict[str, Any]:
        """Return the saved options for a group."""
        if not members:  # those of the saved group of that number, if that is empty too
            is_empty = number < len(self._groups) and not self._groups[number]["params"]
            return group_options(self._groups[number]) if is_empty else {}
        sources: dict[int, list[str]] = {}
        for original in (original for member in members for original in member.originals):
            source = self._group_of.get(self.name_of(original))
            if source is not None:
                sources.setdefault(source, []).append(original.fqn)
        if not sources:
            return {}
        (first, names), *rest = sources.items()
        options = group_options(self._groups[first])
        for source, others in rest:
            differing = _differing(options, group_options(self._groups[source]))
            if differing:
                self.problems.append(
                    f"group {number} of the optimizer has parameters that were saved in groups with different options "
                    f"({', '.join(differing)}): {_list(names)} and {_list(others)}; group them as in the saved "
                    "optimizer"
                )
        return options


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    both = one.keys() & other.keys()
    return sorted((one.keys() ^ other.keys()) | {name for name in both if not equal(one[name], other[name])})


def equal(one: Any, other: Any) -> bool:
    """Return True if two values, or lists or tuples of values, are equal."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        alike = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.shape == other.shape
        return alike and bool((one == other).all())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def _list(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
