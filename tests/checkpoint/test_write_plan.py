"""Who writes what in a save: each region once, by the rank that should, and all of every tensor."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.checkpoint.format.write_plan import RankInventory, TensorTable, WritePlan, plan_writes
from fullshard.errors import CheckpointError
from fullshard.layout import Region, chunk_of, regions_of_range

Regions = Sequence[tuple[int, Region]]


def table(shapes: Sequence[tuple[int, ...]], *, equal: bool = True) -> TensorTable:
    """Of tensors named by their numbers."""
    count = len(shapes)
    keys = tuple(f"t{i}" for i in range(count))
    return TensorTable(keys, ("float32",) * count, tuple(shapes), (equal,) * count)


def divided(shapes: Sequence[tuple[int, ...]], by_rank: Sequence[Regions], **options: Any) -> WritePlan:
    """The decision where all ranks have one table."""
    packed = table(shapes, **options).packed
    return plan_writes([RankInventory(packed, RankInventory.packed(regions), ()) for regions in by_rank])


def written(write_plan: WritePlan, by_rank: Sequence[Regions]) -> list[list[tuple[int, Region]]]:
    """What each rank writes."""
    pairs = zip(by_rank, write_plan.writes, strict=True)
    return [[region for region, kept in zip(regions, parts.tolist(), strict=True) if kept] for regions, parts in pairs]


def rows_of(shape: tuple[int, ...], ranks: int, rank: int, dim: int = 0) -> Region:
    """A rank's shard of a tensor that is sharded on a dim."""
    start, size = chunk_of(shape[dim], ranks, rank)
    offsets, sizes = [0] * len(shape), list(shape)
    offsets[dim], sizes[dim] = start, size
    return Region(tuple(offsets), tuple(sizes))


@given(
    st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 2),
)
@settings(max_examples=60, deadline=None)
def test_every_element_is_written_once(shapes: list[tuple[int, ...]], shards: int, copies: int, dim: int) -> None:
    """Of tensors sharded on any dim, with replicas, the regions written are all elements, none twice."""
    by_rank = [
        [(i, rows_of(shape, shards, rank % shards, min(dim, len(shape) - 1))) for i, shape in enumerate(shapes)]
        for rank in range(shards * copies)
    ]
    write_plan = divided(shapes, by_rank)
    found = [
        (number, *index)
        for regions in written(write_plan, by_rank)
        for number, region in regions
        for index in itertools.product(*(range(a, b) for a, b in zip(region.offsets, region.ends, strict=True)))
    ]
    wanted = [(i, *index) for i, shape in enumerate(shapes) for index in itertools.product(*map(range, shape))]
    assert sorted(found) == wanted


def test_replicas_share_the_work() -> None:
    """What ranks are known to have in common is spread by size; what they merely both have is the first rank's."""
    by_rank = [[(i, Region((0,), (10,))) for i in range(4)]] * 2
    assert [len(regions) for regions in written(divided([(10,)] * 4, by_rank), by_rank)] == [2, 2]
    assert [len(regions) for regions in written(divided([(10,)] * 4, by_rank, equal=False), by_rank)] == [4, 0]


def test_empty_regions_are_not_written() -> None:
    """A value is written by the first rank that has it."""
    packed = table([(2,), (0,)]).packed
    empty, all_of_it = RankInventory.packed([(1, Region((0,), (0,)))]), RankInventory.packed([(0, Region((0,), (2,)))])
    write_plan = plan_writes(
        [
            RankInventory(packed, empty, ()),
            RankInventory(packed, all_of_it, ("a",)),
            RankInventory(packed, empty, ("a", "b")),
        ]
    )
    assert write_plan.values == ((), ("a",), ("b",))
    assert write_plan.ranks.tolist() == [1] and write_plan.regions.tensor.tolist() == [0]


def test_tables_may_differ() -> None:
    """A tensor that only a later rank has is saved, under its own name."""
    first, second = (
        TensorTable(("a",), ("float32",), ((2,),), (True,)),
        TensorTable(("b", "a"), ("int64", "float32"), ((3, 1), (2,)), (True, True)),
    )
    held = [
        RankInventory(first.packed, RankInventory.packed([(0, Region((0,), (1,)))]), ()),
        RankInventory(second.packed, RankInventory.packed([(0, Region((0, 0), (3, 1))), (1, Region((1,), (1,)))]), ()),
    ]
    write_plan = plan_writes(held)
    assert write_plan.table.keys == ("a", "b") and write_plan.table.shapes == ((2,), (3, 1))
    assert write_plan.ranks.tolist() == [0, 1, 1] and write_plan.regions.tensor.tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("regions", "match"),
    [
        ([Region((0, 0), (2, 4))], "t0: the ranks that save hold shards that lack 8 of the 16 elements"),
        (
            [Region((0, 0), (3, 4)), Region((2, 0), (2, 4))],
            r"t0: .* overlapping shards \[0:3, 0:4\] and \[2:4, 0:4\]",
        ),
        ([Region((0, 0), (4, 4)), Region((1, 1), (2, 2))], "overlapping"),
        ([Region((2, 0), (4, 4)), Region((0, 0), (2, 4))], r"t0: .* shard \[2:6, 0:4\] of a tensor of shape"),
    ],
)
def test_what_does_not_make_a_tensor_is_refused(regions: list[Region], match: str) -> None:
    """Holes, overlaps and parts outside of the shape are errors that name the tensor."""
    with pytest.raises(CheckpointError, match=match):
        divided([(4, 4)], [[(0, region)] for region in regions])


@pytest.mark.parametrize(("start", "numel"), [(-1, 2), (0, 13), (12, 1), (0, -1)])
def test_a_range_beyond_the_tensor_is_refused(start: int, numel: int) -> None:
    """Elements that are not there are an error that names the shape."""
    with pytest.raises(ValueError, match=r"out of bounds for shape \(4, 3\)"):
        regions_of_range((4, 3), start, numel)
