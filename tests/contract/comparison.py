"""A program under both libraries, and what differs between the two runs."""

from __future__ import annotations

import importlib
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from contract.programs import Program
from contract.recorder import Point, Properties, Value
from models import tiny_units
from ranks import Rank


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
    """

    program: str
    front_end: str
    where: str
    fqn: str
    what: str
    theirs: Any
    ours: Any
    in_backward: bool = False

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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = program.run(importlib.import_module("torch.distributed.fsdp"), rank)
        with tiny_units():  # each unit in messages of its own, as torch's
            ours = program.run(importlib.import_module("fullshard"), rank)
    return compare_points(program, theirs, ours)


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

    def add(at: Point, fqn: str, what: str, one: Any, other: Any) -> None:
        values = _plain(one), _plain(other)
        found.append(Difference(program.name, front_end, at.where, fqn, what, *values, at.in_backward))

    by_label = _labelled(ours)
    for label, point in _labelled(theirs).items():
        other = by_label.get(label)
        if other is None:
            if not refused or not label[0].startswith(their_last.where.rpartition(":")[0]):
                add(point, "", "the point", "reached", _raised(ours) or "never reached")
            continue
        for fqn, what, one, two in differences_at(point, other):
            add(point, fqn, what, one, two)
    if not refused:
        known = _labelled(theirs)
        for label, point in by_label.items():
            if label not in known:
                add(point, "", "the point", "never reached", _raised([point]) or "reached")
        order = [label for label in _labelled(theirs) if label in by_label]
        for place, (one, two) in enumerate(zip(order, (x for x in by_label if x in known), strict=False)):
            if one != two:
                add(known[one], "", "order of points", [x[0] for x in order[place : place + 2]], two[0])
                break
    return Comparison(tuple(found), refused, len(theirs))


def differences_at(theirs: Point, ours: Point) -> Iterator[tuple[str, str, Any, Any]]:
    """(FQN, property, torch's value, fullshard's) of all that differs at a point. If the kinds differ, only these."""
    for fqn in [*theirs.seen, *(f for f in ours.seen if f not in theirs.seen)]:
        one, two = theirs.seen.get(fqn), ours.seen.get(fqn)
        if one is None or two is None:
            yield fqn, "seen", one is not None, two is not None
        elif one.get("kind") != two.get("kind"):
            yield fqn, "kind", one.get("kind"), two.get("kind")
        elif one != two:
            yield from ((fqn, *found) for found in _unequal(one, two))


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
