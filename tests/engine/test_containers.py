"""Tensors inside nested containers: found in all of them, replaced without disturbing the rest."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import pytest
import torch

from containers import CONTAINERS, UNKNOWN_CLASSES, Fields, FrozenFields, pack, tensors_of
from fullshard.engine.containers import MOST_OBJECTS, iterate_tensors, map_tensors, tensors_within

A, B, C = (torch.full((2,), float(i)) for i in range(3))


class Picky(dict):
    """A dict whose constructor takes something else, and which has an attribute."""

    def __init__(self, name: str, **items: Any) -> None:
        super().__init__(**items)
        self.name = name


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def same_structure(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same_structure(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same_structure, one, other))
    if dataclasses.is_dataclass(one):
        return all(same_structure(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    return isinstance(one, torch.Tensor) or one == other


@pytest.mark.parametrize("name", [name for name in CONTAINERS if name not in UNKNOWN_CLASSES])
def test_tensors_are_found_and_replaced(name: str) -> None:
    """Every tensor is found, depth first, and replaced; containers keep their types, and the original is untouched."""
    value = pack(name, A, B, C)
    tensors = tensors_of(value)
    mapped = map_tensors(double, value)
    assert same_structure(mapped, value)
    for new, old in zip(iterate_tensors(mapped), tensors, strict=True):
        assert torch.equal(new, old * 2)
    assert all(x is y for x, y in zip(iterate_tensors(value), tensors, strict=True))
    assert map_tensors(lambda t: t, value) is value


def test_values_without_tensors_are_left_alone() -> None:
    """Values and containers without tensors have none and are returned as they are."""
    for value in (None, 3, "text", [], (), {}, [1, (2, {"a": None})], Fields(1), FrozenFields("x"), {1, 2}, Fields):
        assert list(iterate_tensors(value)) == [] and map_tensors(double, value) is value


def test_what_a_container_carries_is_kept() -> None:
    """Default factories, attributes of subclasses, fields without ``init`` and siblings of what changed survive."""
    left, right = [A], {"b": B}
    mapped = map_tensors(lambda t: double(t) if t is A else t, (left, right))
    assert mapped[0] is not left and mapped[1] is right
    mapped = map_tensors(double, {A})
    assert type(mapped) is set and torch.equal(next(iter(mapped)), A * 2)
    assert map_tensors(double, collections.defaultdict(list, a=A))["missing"] == []
    assert map_tensors(double, Picky("mine", a=A)).name == "mine"
    frozen = FrozenFields(A)
    object.__setattr__(frozen, "computed", B)
    mapped = map_tensors(double, frozen)
    assert mapped.others is None and torch.equal(mapped.computed, B * 2) and frozen.computed is B


class Slotted:
    """An object with slots, one of whose names Python mangles, and one that is never set."""

    __slots__ = ("__hidden", "empty", "shown")

    def __init__(self) -> None:
        self.__hidden, self.shown = A, B


class Link:
    def __init__(self, following: Link | None) -> None:
        self.following, self.tensor = following, A


class Closed:
    """Refuses to show what it has."""

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        raise OSError("closed")


def test_tensors_in_any_object() -> None:
    """Attributes and slots are searched, each object once, however long a chain; some refuse, and are left alone."""
    assert {id(t) for t in tensors_within(Slotted())} == {id(A), id(B)}
    chain: Link | None = None
    for _ in range(5000):
        chain = Link(chain)
    assert len(list(tensors_within(chain))) == 5000
    assert list(tensors_within([Closed(), C, list(range(100_000))])) == [C]
    first = Link(None)
    first.following = Link(first)
    assert len(list(tensors_within({"ring": first}))) == 2
    assert len(list(tensors_within([Link(None) for _ in range(3 * MOST_OBJECTS)]))) <= MOST_OBJECTS
