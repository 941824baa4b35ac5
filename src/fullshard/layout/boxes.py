"""Boxes: rectangular parts of a tensor. What a rank holds of a parameter is one box, or a few.

A slice of a flat buffer may end anywhere inside a parameter. In the parameter's own dims that is a few boxes:

>>> for box in boxes_of_range((4, 3), start=2, numel=8):  # the end of row 0, rows 1 and 2, the beginning of row 3
...     print(box)
[0:1, 2:3]
[1:3, 0:3]
[3:4, 0:1]
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Box", "boxes_of_range", "chunk_of"]


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor: from ``offsets``, ``sizes`` elements in each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes) or min((*self.offsets, *self.sizes), default=0) < 0:
            raise ValueError(f"expected as many offsets as sizes, none below 0; found {self.offsets}, {self.sizes}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All of a tensor of that shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements; 1 for the whole of a 0-D tensor."""
        return math.prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        """The first index of each dim that is not in it any more."""
        return tuple(map(operator.add, self.offsets, self.sizes))

    def overlap(self, other: Box) -> Box | None:
        """What both contain, in coordinates of the tensor; None if that is nothing."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = tuple(map(min, self.ends, other.ends))
        sizes = tuple(end - offset for offset, end in zip(offsets, ends, strict=True))
        return Box(offsets, sizes) if all(size > 0 for size in sizes) else None

    def within(self, outer: Sequence[int]) -> Box:
        """The same box where ``outer`` is the origin."""
        return Box(tuple(a - b for a, b in zip(self.offsets, outer, strict=True)), self.sizes)

    def moved(self, offsets: Sequence[int]) -> Box:
        """The same box, ``offsets`` further away from the origin."""
        return Box(tuple(a + b for a, b in zip(self.offsets, offsets, strict=True)), self.sizes)

    def permuted(self, dims: Sequence[int]) -> Box:
        """The box whose dim ``i`` is this one's dim ``dims[i]``."""
        return Box(tuple(self.offsets[dim] for dim in dims), tuple(self.sizes[dim] for dim in dims))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.offsets, self.ends, strict=True)) + "]"


def boxes_of_range(shape: Sequence[int], start: int, numel: int) -> list[Box]:
    """A range of the elements of a tensor, counted row by row, as boxes in that order.

    Args:
        shape: Of the tensor.
        start: First element of the range.
        numel: Elements of the range; 0 gives no boxes.

    Raises:
        ValueError: If the tensor does not have these elements.
    """
    if start < 0 or numel < 0 or start + numel > math.prod(shape):
        raise ValueError(f"shape {tuple(shape)} has no elements {start} to {start + numel}")
    if numel == 0:
        return []
    if not shape:
        return [Box((), ())]
    row = math.prod(shape[1:])
    first, skipped = divmod(start, row)
    boxes: list[Box] = []
    if skipped:  # the rest of a row that has begun before
        taken = min(numel, row - skipped)
        boxes += _in_row(first, boxes_of_range(shape[1:], skipped, taken))
        first, numel = first + 1, numel - taken
    rows, left = divmod(numel, row)
    if rows:
        boxes.append(Box((first, *(0,) * (len(shape) - 1)), (rows, *shape[1:])))
    if left:
        boxes += _in_row(first + rows, boxes_of_range(shape[1:], 0, left))
    return boxes


def chunk_of(size: int, parts: int, index: int) -> tuple[int, int]:
    """Where ``torch.chunk`` cuts: offset and size of part ``index`` of a dim of that size; beyond the end, size 0."""
    step = -(-size // parts)
    start = min(index * step, size)
    return start, min(start + step, size) - start


def _in_row(row: int, boxes: list[Box]) -> list[Box]:
    return [Box((row, *box.offsets), (1, *box.sizes)) for box in boxes]
