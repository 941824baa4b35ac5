"""A program under both libraries, and what differs between the two runs."""

from __future__ import annotations

import contextlib
import gc
import importlib
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

import fullshard
from contract import unsharded
from contract.programs import Program
from contract.recorder import Point, Properties, Value
from models import tiny_units
from ranks import Rank

SHARED = ("dtype", "device", "requires_grad", "values")  # what plain tensors and parameters have in common


Found = tuple[tuple[str, Any, Any], ...]  # property, torch's value, fullshard's


@dataclass(frozen=True)
class Difference:
    """What torch's FSDP and fullshard show differently.

    Attributes:
        program: name of the program.
        front_end: "fully_shard" or "wrapper".
        where: the point.
        fqn: the parameter; "" for what is not of one.
        what: the property.
        theirs: torch's value.
        ours: fullshard's value.
        in_backward: whether the point is inside a backward.
        operations: attributes, the units, and all operations up to this one, in words.
        stepped: whether torch has shown the parameter unsharded since before a step.
        right: if losses differ, whose are those of the unsharded model: "torch", "fullshard", "both" or "none".
    """

    program: str
    front_end: str
    where: str
    fqn: str
    what: str
    theirs: Any
    ours: Any
    in_backward: bool = False
    right: str = ""
    operations: str = ""
    stepped: bool = False

    def __str__(self) -> str:
        of = f"{self.fqn}, {self.what}" if self.fqn else self.what
        return f"{self.program}: {self.where}: {of}: torch {self.theirs}, fullshard {self.ours}"

    @property
    def point(self) -> str:
        """The point without the operation it is in."""
        return self.where.partition(": ")[2]


@dataclass(frozen=True)
class Comparison:
    """What came of a program: differences, and why torch has refused to go on, if it has."""

    differences: tuple[Difference, ...]
    refused: str = ""
    points: int = 0


def compare(rank: Rank, program: Program) -> Comparison:
    """Run a program under both libraries, and compare on this rank."""
    with warnings.catch_warnings(), _uncollected():
        warnings.simplefilter("ignore")
        theirs = program.run(importlib.import_module("torch.distributed.fsdp"), rank)
        with tiny_units():  # each unit in messages of its own, as torch's
            ours = program.run(fullshard, rank)
        comparison = compare_points(program, theirs, ours)
        # Both ranks decide alike, since the unsharded model runs collectives. Ranks may see different values.
        different = torch.tensor([float(any("values" in d.what or d.what == "loss" for d in comparison.differences))])
        dist.all_reduce(different)
        if not different or program.wrapper:
            return comparison
        truth = losses(program.run(unsharded, rank))
    right = [name for name, points in (("torch", theirs), ("fullshard", ours)) if agree(losses(points), truth)]
    verdict = "both" if len(right) == 2 else right[0] if right else "none"
    return replace(comparison, differences=tuple(replace(d, right=verdict) for d in comparison.differences))


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Inside, garbage is left: looking for it would go through all that recorders keep, again and again."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def losses(points: Sequence[Point]) -> list[tuple[str, Value]]:
    """All losses, with where they were seen."""
    return [(point.where, point.seen[""]["loss"]) for point in points if "loss" in point.seen.get("", ())]


def agree(ours: list[tuple[str, Value]], truth: list[tuple[str, Value]]) -> bool:
    """Whether losses are those of the unsharded model, as far as they go."""
    return all(one == two for one, two in zip(ours, truth, strict=False))


def compare_points(program: Program, theirs: Sequence[Point], ours: Sequence[Point]) -> Comparison:
    """What differs between two recordings, up to where torch refuses to go on."""
    front_end = "wrapper" if program.wrapper else "fully_shard"
    refused = ""
    their_last = theirs[-1]
    if their_last.where.endswith(": raised"):
        facts = their_last.seen[""]
        refused = f"{their_last.where.rpartition(':')[0]}: {facts['raised']}: {facts['message']}"
        theirs = theirs[:-1]
    found: list[Difference] = []

    pasts: dict[int, str] = {}
    pairs: dict[tuple[int, int], Found] = {}

    def add(at: Point, fqn: str, what: str, one: Any, other: Any) -> None:
        values = _plain(one), _plain(other)
        number = re.match(r"\d+", at.where)
        count = int(number[0]) + 1 if number else 0
        past = pasts.get(count) or pasts.setdefault(
            count, f"{program.attributes} {program.units} {program.operations[:count]}"
        )
        more = at.in_backward, "", past, fqn in stepped
        found.append(Difference(program.name, front_end, at.where, fqn, what, *values, *more))

    by_label = _labelled(ours)
    stepped: set[str] = set()
    for label, point in _labelled(theirs).items():
        shown = {fqn for fqn, seen in point.seen.items() if seen.get("kind") == "plain"}
        stepped = {fqn for fqn in stepped if fqn in shown or not point.seen.get(fqn)}
        if point.where.endswith("after step"):
            stepped |= shown
        other = by_label.get(label)
        if other is None:
            if not refused or not label[0].startswith(their_last.where.rpartition(":")[0]):
                add(point, "", "the point", "reached", _raised(ours) or "never reached")
            continue
        for fqn, what, one, two in differences_at(point, other, pairs):
            add(point, fqn, what, one, two)
    if not refused:
        known = _labelled(theirs)
        both = known.keys() & by_label.keys()
        for label, point in by_label.items():
            if label not in known:
                add(point, "", "the point", "never reached", _raised([point]) or "reached")
        # Hooks of parameters run when a reduction is complete: that is not ordered among other points.
        order = [[x for x in points if x in both and ": post-accumulate" not in x[0]] for points in (known, by_label)]
        for one, two in zip(*order, strict=False):
            if one != two:
                add(known[one], "", "order of points", one[0], two[0])
                break
    return Comparison(tuple(found), refused, len(theirs))


def differences_at(
    theirs: Point, ours: Point, pairs: dict[tuple[int, int], Found]
) -> Iterator[tuple[str, str, Any, Any]]:
    """(FQN, property, torch's value, fullshard's) of all that differs at a point.

    ``pairs`` has what was found before: what has not changed between points is the same object at both.
    """
    for fqn in [*theirs.seen, *(f for f in ours.seen if f not in theirs.seen)]:
        one, two = theirs.seen.get(fqn), ours.seen.get(fqn)
        if one is None or two is None:
            yield fqn, "seen", one is not None, two is not None
            continue
        pair = id(one), id(two)
        if pair not in pairs:
            pairs[pair] = tuple(_differences_of(one, two))
        yield from ((fqn, *found) for found in pairs[pair])


def _differences_of(theirs: Properties, ours: Properties) -> Iterator[tuple[str, Any, Any]]:
    """What differs of a parameter; of unlike kinds little else."""
    kinds, forms = ((theirs.get(what), ours.get(what)) for what in ("kind", "form"))
    if kinds[0] != kinds[1]:
        yield "kind", *kinds
        if all(str(kind).startswith("plain") for kind in kinds):
            if forms[0] != forms[1]:
                yield "form", *forms
            else:
                yield from _unequal(*({what: side.get(what) for what in SHARED} for side in (theirs, ours)))
    elif forms[0] != forms[1]:
        yield "form", *forms
    elif theirs != ours:
        yield from _unequal(theirs, ours)


def _unequal(theirs: Properties, ours: Properties) -> Iterator[tuple[str, Any, Any]]:
    for what in [*theirs, *(w for w in ours if w not in theirs)]:
        if what.startswith("grad's") and theirs.get("grad") != ours.get("grad"):
            continue
        if what not in theirs or what not in ours:
            yield what, theirs.get(what, "nothing"), ours.get(what, "nothing")
        elif theirs[what] != ours[what]:
            yield what, theirs[what], ours[what]


def _labelled(points: Sequence[Point]) -> dict[tuple[str, int], Point]:
    counts: Counter[str] = Counter()
    labelled = {}
    for point in points:
        labelled[point.where, counts[point.where]] = point
        counts[point.where] += 1
    return labelled


def _raised(points: Sequence[Point]) -> str:
    facts = points[-1].seen.get("", {})
    return f"raised {facts['raised']}: {facts['message']}" if "raised" in facts else ""


def _plain(value: Any) -> Any:
    """What can be sent from a rank: no tensors."""
    return repr(value) if isinstance(value, Value | torch.dtype) else value
