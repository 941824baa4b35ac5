"""Regions: ranges of elements as rectangular parts, and what two parts have in common."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fullshard.layout import Region, chunk_of, regions_of_range

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def slices_of(region: Region) -> tuple[slice, ...]:
    return tuple(slice(start, end) for start, end in zip(region.offsets, region.ends, strict=True))


@given(shapes, st.data())
def test_boxes_of_a_range_are_its_elements_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    """Concatenated, the regions hold exactly the range; there are at most 2 n - 1 of them."""
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    length = data.draw(st.integers(0, numel - start))
    numbers = torch.arange(numel).view(shape)
    regions = regions_of_range(shape, start, length)
    found = [numbers[slices_of(region)].reshape(-1) for region in regions]
    assert torch.cat([torch.empty(0, dtype=torch.long), *found]).tolist() == list(range(start, start + length))
    assert all(region.numel == part.numel() for region, part in zip(regions, found, strict=True))
    assert len(regions) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize(("start", "numel"), [(-1, 2), (0, 13), (12, 1), (0, -1)])
def test_a_range_beyond_the_tensor_is_refused(start: int, numel: int) -> None:
    """Elements that are not there are an error that names the shape."""
    with pytest.raises(ValueError, match=r"out of bounds for shape \(4, 3\)"):
        regions_of_range((4, 3), start, numel)


@given(st.data())
def test_overlap_is_what_both_have(data: st.DataObject) -> None:
    """Marking both regions in a tensor marks the overlap twice."""
    shape = (4, 5)
    regions = []
    for _ in range(2):
        offsets = tuple(data.draw(st.integers(0, size)) for size in shape)
        sizes = tuple(data.draw(st.integers(0, size - o)) for size, o in zip(shape, offsets, strict=True))
        regions.append(Region(offsets, sizes))
    marks = torch.zeros(shape)
    for region in regions:
        marks[slices_of(region)] += 1
    overlap = regions[0].overlap(regions[1])
    assert overlap == regions[1].overlap(regions[0])
    both = torch.zeros(shape, dtype=torch.bool)
    if overlap is not None:
        both[slices_of(overlap)] = True
    assert torch.equal(marks == 2, both)
    if overlap is not None:
        assert overlap.relative_to(regions[0].offsets).shifted(regions[0].offsets) == overlap


def test_a_box_prints_as_a_slice_and_permutes() -> None:
    """What errors show, and a region in another order of dims."""
    region = Region((1, 0, 2), (2, 3, 4))
    assert str(region) == "[1:3, 0:3, 2:6]"
    assert region.permuted((2, 0, 1)) == Region((2, 1, 0), (4, 2, 3))
    assert Region((), ()).numel == 1
    with pytest.raises(ValueError, match="as many offsets as sizes"):
        Region((0,), (1, 2))


@given(st.integers(0, 20), st.integers(1, 7))
def test_chunk_of_cuts_as_torch_does(size: int, parts: int) -> None:
    """The sizes are torch.chunk's, with empty ones behind."""
    expected = [chunk.tolist() for chunk in torch.arange(size).chunk(parts)]
    found = [list(range(start, start + length)) for start, length in (chunk_of(size, parts, i) for i in range(parts))]
    assert [chunk for chunk in found if chunk] == [chunk for chunk in expected if chunk]
