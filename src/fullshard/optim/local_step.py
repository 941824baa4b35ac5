"""One step of a localised optimizer: the optimizer's own arithmetic, on pieces.

[Note: Stepping on pieces]
While the optimizer's own ``step`` runs, its ``param_groups`` and ``state`` are those of the pieces; hooks, closures and
everybody else see the user's. What ``_init_group`` of torch's optimizers collects from them (a list of tensors for each
kind of state) is the same in every step but for the gradients, so it is kept and given again: on many small parameters
that loop is a fourth of a fused step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from fullshard.optim.local_pieces import Homes, Piece, Row
from fullshard.optim.local_plan import Plan

__all__ = ["InParts", "LocalStep"]

PARAMETERS, GRADIENTS = 0, 1  # which of the lists that _init_group fills; the others are of state


class InParts(Protocol):
    """In which parts a step goes."""

    def looking(self) -> AbstractContextManager[None]:
        """Where the step looks for gradients."""

    def parts(self, pieces: Sequence[Piece]) -> Iterable[Sequence[Piece]]:
        """All pieces, each once; what else has to happen does so in between."""


class LocalStep:
    """What a localised optimizer has beside itself: its pieces, and how it steps them.

    Args:
        inner: The optimizer's own step, without hooks: called with the optimizer and what else its users pass.
        flatten: Whether to step runs.
        is_known: Whether the optimizer is one of torch's, of which it is known what it does with its state.
    """

    in_parts: InParts | None  # None: all at once
    flatten: bool
    _inner: Callable[..., Any]
    _is_known: bool
    _plan: Plan | None
    _homes: Homes
    _feeds: dict[int, _Feed]  # by the id of the group that stands for the user's, while the optimizer steps
    _whole: list[_Feed] | None  # of all pieces of the plan
    _gradients: list[torch.Tensor]  # of the pieces of the plan, in this step
    _unseen: list[Piece]  # of which the optimizer may have replaced state in this step

    def __init__(self, inner: Callable[..., Any], *, flatten: bool, is_known: bool) -> None:
        self._inner, self.flatten, self._is_known, self.in_parts = inner, flatten, is_known, None
        self._plan, self._homes, self._feeds, self._whole = None, Homes(), {}, None
        self._gradients, self._unseen = [], []

    @torch._disable_dynamo  # type: ignore[attr-defined] # as torch does with what looks at state
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step all pieces. What the optimizer's own step returned, which gets the further arguments."""
        if any(group.get("differentiable") for group in optimizer.param_groups):
            return self._inner(optimizer, *args, **kwargs)
        in_parts = self.in_parts
        if in_parts is None:
            pieces = self.prepare(optimizer)
        else:
            with in_parts.looking():
                pieces = self.prepare(optimizer)
        returned = None
        try:
            for part in (pieces,) if in_parts is None else in_parts.parts(pieces):
                returned = self.step_pieces(optimizer, part, *args, **kwargs)
        finally:
            self.finish(optimizer)
        return returned

    # ---------------------------------------------------------------- a step in parts

    def prepare(self, optimizer: torch.optim.Optimizer) -> list[Piece]:
        """The pieces of this step, with their gradients: those of parameters that have one.

        Each is then to be stepped once, in any order, by one or several calls of :meth:`step_pieces`, before
        :meth:`finish`.
        """
        plan, self._unseen = self._plan, []
        found = None if plan is None else plan.gradients(optimizer)
        taken = None if plan is None or found is None else plan.take(found)
        if plan is None or taken is None:
            _land(optimizer)
            plan = self._plan = Plan(optimizer, self._homes, flatten=self.flatten)
            found, plan.fresh, self._whole = plan.fresh, [], None
            taken = plan.take(found)
            assert taken is not None
        self._gradients = taken
        return plan.pieces

    def step_pieces(self, optimizer: torch.optim.Optimizer, pieces: Sequence[Piece], *args: Any, **kwargs: Any) -> Any:
        """Step these pieces. What the optimizer's own step returned, which gets the further arguments."""
        assert self._plan is not None
        groups, attributes = optimizer.param_groups, optimizer.__dict__
        feeds = self._feeds_of(pieces, len(groups))
        stand_ins = [{**groups[feed.group], "params": feed.parameters} for feed in feeds]
        for feed, stand_in in zip(feeds, stand_ins, strict=True):
            feed.begin(stand_in, self._gradients, is_known=self._is_known)
            if not feed.replays:
                self._unseen += feed.pieces
        self._feeds = {id(stand_in): feed for stand_in, feed in zip(stand_ins, feeds, strict=True)}
        before = [dict(stand_in) for stand_in in stand_ins]
        state = attributes["state"]
        attributes["param_groups"], attributes["state"] = stand_ins, self._plan.local_state
        try:
            return self._inner(optimizer, *args, **kwargs)
        finally:
            attributes["param_groups"], attributes["state"] = groups, state
            self._feeds = {}
            for feed, old, new in zip(feeds, before, stand_ins, strict=True):
                feed.end()
                _copy_changes(old, new, groups[feed.group])

    def finish(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring the user's view of the state up to date."""
        plan, unseen, self._gradients = self._plan, self._unseen, []
        assert plan is not None
        for numbers in plan.numbers:
            numbers.show()
        if not unseen:
            return
        self._unseen, self._whole = [], None  # what the feeds know of those pieces may be out of date
        states = plan.local_state
        with torch.inference_mode(False), torch.no_grad():
            stepped = [piece for piece in unseen if piece.parameter in states]
            changed = {piece: piece.show(states[piece.parameter], self._homes) for piece in stepped}
        plan.register(optimizer, stepped)
        if not self._is_known:
            others = {key: value for key, value in plan.local_state.items() if not isinstance(key, torch.Tensor)}
            optimizer.state.update(others)
        if any(piece.has_numbers(names) for piece, names in changed.items()):
            self._plan = None  # they are to be shown from now on
        else:
            plan.look(optimizer)

    def fill(self, group: Mapping[str, Any], lists: Sequence[list[Any]], own: Callable[..., Any]) -> Any:
        """In place of ``_init_group``: fill the lists for a group, by ``own`` if need be. What that returned."""
        feed = self._feeds.get(id(group))
        if feed is not None and feed.replays:
            return feed.replay(lists)
        returned = own(group, *lists)
        if feed is not None:
            feed.record(lists, returned)
        return returned

    def _feeds_of(self, pieces: Sequence[Piece], groups: int) -> list[_Feed]:
        assert self._plan is not None
        if pieces is not self._plan.pieces:
            return _feeds(pieces, groups)
        if self._whole is None:
            self._whole = _feeds(pieces, groups)
        return self._whole


class _Feed:
    """What an optimizer steps of one group at a time.

    Args:
        group: Index of the group.
        pieces: Of the group; all plain or, in a group of their own, DTensors: the two do not mix.
    """

    group: int
    pieces: list[Piece]
    parameters: list[torch.Tensor]
    replays: bool  # whether what was collected before is given again
    _options: tuple[Any, ...]  # that decide about what is collected
    _columns: tuple[tuple[int, Any], ...] | None  # which list gets what
    _returned: Any
    _indices: list[int]  # of the pieces in their plan
    _gradients: Sequence[torch.Tensor]  # of the pieces, while the optimizer steps

    def __init__(self, group: int, pieces: Sequence[Piece]) -> None:
        self.group, self.pieces, self.replays = group, list(pieces), False
        self._indices, self._gradients = [piece.index for piece in pieces], []
        self.parameters = [piece.parameter for piece in pieces]
        self._options, self._columns, self._returned = (), None, None

    def begin(self, group: Mapping[str, Any], gradients: Sequence[torch.Tensor], *, is_known: bool) -> None:
        """The optimizer is about to step; ``gradients`` are those of all pieces of the plan."""
        self._gradients = self._gradients_in(gradients)
        options = _deciding(group)
        if self._columns is None or options != self._options:
            self._options, self._columns = options, None
            if is_known:
                self._collect()
        self.replays = self._columns is not None
        if not self.replays:
            for piece, gradient in zip(self.pieces, self._gradients, strict=True):
                piece.put_gradient(gradient)

    def end(self) -> None:
        """It has."""
        self._gradients = []
        if not self.replays:
            for piece in self.pieces:
                piece.drop_gradient()

    def record(self, lists: Sequence[list[Any]], returned: Any) -> None:
        """Note what the optimizer has collected, one value per piece in some of the lists."""
        count = len(self.pieces)
        filled = [index for index, found in enumerate(lists) if found and index != GRADIENTS]
        columns = [lists[index] for index in filled]
        for piece in self.pieces:
            piece.row = None
        if not count or any(len(found) != count for found in (*columns, lists[GRADIENTS])):
            return
        if any(mine is not its for mine, its in zip(self.parameters, lists[PARAMETERS], strict=True)):
            return
        for piece, values in zip(self.pieces, zip(*columns, strict=True), strict=True):
            if all(isinstance(value, torch.Tensor) for value in values):  # None: to be made in this step
                piece.row = Row(self._options, tuple(filled), values, returned)

    def replay(self, lists: Sequence[list[Any]]) -> Any:
        """Fill the lists with what was collected before."""
        for index, column in self._columns or ():
            lists[index].extend(column)
        lists[GRADIENTS].extend(self._gradients)
        return self._returned

    def _gradients_in(self, gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        indices = self._indices
        if indices and indices == [*range(indices[0], indices[0] + len(indices))]:
            return gradients[indices[0] : indices[0] + len(indices)]
        return [gradients[index] for index in indices]

    def _collect(self) -> None:
        rows = [piece.row for piece in self.pieces]
        first = rows[0] if rows else None
        if first is None or first.options != self._options:
            return
        for row in rows:
            if row is None or row[:2] != first[:2] or row.returned != first.returned:
                return
        columns = zip(*[row.values for row in rows if row is not None], strict=True)
        self._columns, self._returned = tuple(zip(first.positions, columns, strict=True)), first.returned


def _feeds(pieces: Iterable[Piece], groups: int) -> list[_Feed]:
    """One for each group, and one more for those of its parameters that are stepped as the DTensors they are."""
    plain: list[list[Piece]] = [[] for _ in range(groups)]
    others: dict[int, list[Piece]] = {}
    for piece in pieces:
        is_plain = type(piece.parameter) in (torch.Tensor, torch.nn.Parameter)
        (plain[piece.group] if is_plain else others.setdefault(piece.group, [])).append(piece)
    return [_Feed(index, found) for index, found in [*enumerate(plain), *others.items()]]


def _deciding(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """The options that ``_init_group`` of torch's optimizers looks at."""
    switches = [(name, bool(v)) for name, v in group.items() if v is None or type(v) is bool or name == "momentum"]
    return (isinstance(group.get("lr"), torch.Tensor), *switches)


def _land(optimizer: torch.optim.Optimizer) -> None:
    """Wait for gradients that are still under way."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            landed = getattr(type(parameter.grad), "landed", None)
            if landed is not None:
                landed(parameter.grad)


def _copy_changes(old: Mapping[str, Any], new: Mapping[str, Any], target: dict[str, Any]) -> None:
    """Have the user's group keep what the optimizer has written into the one that stood for it."""
    for name, value in new.items():
        if name != "params" and (name not in old or old[name] is not value):
            target[name] = value
