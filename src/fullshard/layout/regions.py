"""Rectangular regions of a tensor. A rank's shard of a parameter is one region, or a few.

A slice of a flat buffer may end anywhere inside a parameter. In the parameter's own dims that is a few regions:

>>> for region in regions_of_range((4, 3), start=2, numel=8):  # the end of row 0, rows 1 and 2, the start of row 3
...     print(region)
[0:1, 2:3]
[1:3, 0:3]
[3:4, 0:1]
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Region", "chunk_of", "regions_of_range"]


@dataclass(frozen=True, slots=True)
class Region:
    """A rectangular region of a tensor: ``sizes`` elements in each dim, from ``offsets`` on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes) or min((*self.offsets, *self.sizes), default=0) < 0:
            raise ValueError(f"expected as many offsets as sizes, none below 0; found {self.offsets}, {self.sizes}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """Return the region of a whole tensor of that shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements; 1 for the whole of a 0-D tensor."""
        return math.prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        """First index of each dim beyond the region."""
        return tuple(map(operator.add, self.offsets, self.sizes))

    def overlap(self, other: Region) -> Region | None:
        """Return the intersection in coordinates of the tensor; None if it is empty."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = tuple(map(min, self.ends, other.ends))
        sizes = tuple(end - offset for offset, end in zip(offsets, ends, strict=True))
        return Region(offsets, sizes) if all(size > 0 for size in sizes) else None

    def relative_to(self, outer: Sequence[int]) -> Region:
        """Return the same region with ``outer`` as the origin."""
        return Region(tuple(a - b for a, b in zip(self.offsets, outer, strict=True)), self.sizes)

    def shifted(self, offsets: Sequence[int]) -> Region:
        """Return the same region, shifted by ``offsets``."""
        return Region(tuple(a + b for a, b in zip(self.offsets, offsets, strict=True)), self.sizes)

    def permuted(self, dims: Sequence[int]) -> Region:
        """Return the region whose dim ``i`` is this one's dim ``dims[i]``."""
        return Region(tuple(self.offsets[dim] for dim in dims), tuple(self.sizes[dim] for dim in dims))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.offsets, self.ends, strict=True)) + "]"


def regions_of_range(shape: Sequence[int], start: int, numel: int) -> list[Region]:
    """Return the regions, in order, that make up a range of elements of a tensor, counted row by row.

    Args:
        shape: Shape of the tensor.
        start: First element of the range.
        numel: Number of elements; 0 gives no regions.

    Raises:
        ValueError: If the range is out of bounds.
    """
    if start < 0 or numel < 0 or start + numel > math.prod(shape):
        raise ValueError(f"elements {start} to {start + numel} are out of bounds for shape {tuple(shape)}")
    if numel == 0:
        return []
    if not shape:
        return [Region((), ())]
    row = math.prod(shape[1:])
    first, skipped = divmod(start, row)
    regions: list[Region] = []
    if skipped:  # the rest of the first row
        taken = min(numel, row - skipped)
        regions += _in_row(first, regions_of_range(shape[1:], skipped, taken))
        first, numel = first + 1, numel - taken
    rows, left = divmod(numel, row)
    if rows:
        regions.append(Region((first, *(0,) * (len(shape) - 1)), (rows, *shape[1:])))
    if left:
        regions += _in_row(first + rows, regions_of_range(shape[1:], 0, left))
    return regions


def chunk_of(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return offset and size of chunk ``index`` of a dim of that size, cut as ``torch.chunk`` does; size 0 beyond the
    end.
    """
    step = -(-size // parts)
    start = min(index * step, size)
    return start, min(start + step, size) - start


def _in_row(row: int, regions: list[Region]) -> list[Region]:
    return [Region((row, *region.offsets), (1, *region.sizes)) for region in regions]
