"""The flat layout: all parameters one after another, padded once, and cut into equal slices.

Two parameters on two ranks, w of shape (3, 3) and b of shape (3,) (elements are numbered through each buffer; 4 of the
16 elements of the unsharded buffer are padding):

    unsharded      | w 0..8             | b 12..14           |
    rank 0 shard   | w[0:8] 0..7        | b empty            |
    rank 1 shard   | w[8:9] 0..0        | b[0:3] 4..6        |

Rank r's slice is the shard buffer itself, so that an all-gather is one collective without copies, and so is a
reduce-scatter once the gradients lie one after another. In return what a rank holds of a parameter may begin and end
anywhere inside it: it is 1-D, and knows nothing of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

from fullshard.layout.per_parameter import LAYOUTS_KEPT, ParameterShape, check_disjoint

__all__ = ["FlatLayout", "FlatShard", "FlatSlot"]


class FlatShard(NamedTuple):
    """The part of one parameter that one rank holds.

    Args:
        start: First element of the parameter's memory that it holds.
        numel: How many; 0: none.
        offset: Where they begin in the rank's slice.
    """

    start: int
    numel: int
    offset: int


@dataclass(frozen=True, slots=True)
class FlatSlot:
    """The place of one parameter. Offsets and sizes are in elements."""

    parameter: ParameterShape
    unsharded_offset: int
    slice_numel: int  # of every rank

    def shard(self, rank: int) -> FlatShard:
        """Return the part that ``rank`` holds."""
        first, end = rank * self.slice_numel, (rank + 1) * self.slice_numel
        start = min(max(first - self.unsharded_offset, 0), self.parameter.numel)
        stop = min(max(end - self.unsharded_offset, 0), self.parameter.numel)
        offset = min(max(self.unsharded_offset - first, 0), self.slice_numel)
        return FlatShard(start, stop - start, offset)


@dataclass(frozen=True)
class FlatLayout:
    """The places of the parameters of one bucket. Build with ``build``; offsets and sizes are in elements."""

    slots: tuple[FlatSlot, ...]  # in the order of the parameters given, which need not be that in memory
    world_size: int
    slice_numel: int  # of every rank's shard buffer
    message_numel: ClassVar[int] = 0  # nothing is packed

    @classmethod
    @lru_cache(maxsize=LAYOUTS_KEPT)
    def build(
        cls,
        parameters: tuple[ParameterShape, ...],
        *,
        world_size: int,
        alignment: int = 4,
    ) -> FlatLayout:
        """Lay out ``parameters``; equal arguments give the same object.

        Args:
            parameters: In model order.
            world_size: Ranks that they are cut over.
            alignment: Every parameter starts at a multiple of so many elements in the unsharded buffer.
        """
        offsets, end = [], 0
        for parameter in parameters:
            start = -(-end // alignment) * alignment
            offsets.append(start)
            end = start + parameter.numel
        slice_numel = -(-end // world_size)
        slots = (FlatSlot(p, offset, slice_numel) for p, offset in zip(parameters, offsets, strict=True))
        return cls(tuple(slots), world_size, slice_numel)

    def __hash__(self) -> int:  # without the slots: layouts are looked up often, and nearly always found by identity
        return hash((self.slice_numel, self.world_size, len(self.slots)))

    def __post_init__(self) -> None:
        for slot in self.slots:
            if slot.slice_numel != self.slice_numel:
                raise ValueError(
                    f"{slot.parameter.fqn}: expected slices of {self.slice_numel} elements, found {slot.slice_numel}"
                )
        extents = ((slot.unsharded_offset, slot.parameter.numel, slot.parameter.fqn, 1) for slot in self.slots)
        check_disjoint(extents, self.unsharded_numel, "unsharded buffer")

    def shards(self, rank: int) -> tuple[FlatShard, ...]:
        """Return the parts of all parameters that ``rank`` holds."""
        return _shards(self, rank)

    @property
    def unsharded_numel(self) -> int:
        """Elements of the unsharded buffer."""
        return self.slice_numel * self.world_size

    @property
    def shard_numel(self) -> int:
        """Elements of every rank's shard buffer."""
        return self.slice_numel

    @property
    def in_place(self) -> list[tuple[int, int, int]]:
        """The slice, which is all-gathered straight into the unsharded buffer."""
        return [(0, self.slice_numel, 0)] if self.slice_numel else []


@lru_cache(maxsize=LAYOUTS_KEPT)
def _shards(layout: FlatLayout, rank: int) -> tuple[FlatShard, ...]:
    return tuple(slot.shard(rank) for slot in layout.slots)
