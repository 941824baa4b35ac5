"""The per-parameter layout: every parameter is cut on one dim (0 unless said) exactly as ``torch.chunk`` cuts it.

Two parameters on two ranks, w of shape (4, 4) and b of shape (3,) (elements are numbered through each buffer; ``-`` is
padding; w is sent directly, b packed in a message of 4 elements per rank):

    unsharded      | w 0..15            | b 16..18 -         |
    rank 0 shard   | w[0:2] 0..7        | b[0:2] 8..9        |
    rank 1 shard   | w[2:4] 0..7        | b[2:3] 8..8 -      |

In the unsharded buffer a parameter is contiguous, so that it needs no copy-out. Rank r's shard of it starts at
element ``r * shard_numel`` of the place reserved for it, so that an all-gather of the (padded) shards writes the
parameter itself. In the shard buffer the shards lie one after another, each starting aligned; those of all *packed*
parameters are contiguous, so that they are sent as one message without a copy-in.

A *row* is one index of the cut dim. Where the rows are not blocks of memory that follow one another, as below
where columns of a w of shape (2, 3) are cut, each shard is made contiguous and sent packed. Such a parameter takes its
own size in the unsharded buffer, whereas every rank's shard takes the size of the largest:

    unsharded      | w 0..5             |
    rank 0 shard   | w[:, 0:2] 0..3     |
    rank 1 shard   | w[:, 2:3] 0..1 -   |
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

__all__ = [
    "ALIGNMENT_BYTES",
    "LAYOUTS_KEPT",
    "ParameterShape",
    "PerParameterLayout",
    "Route",
    "Slot",
    "check_disjoint",
    "direct_shards",
    "is_row_major",
]

# Layouts, and values computed from them, that are kept for other buckets of the same parameters: most models have a
# few kinds of blocks.
LAYOUTS_KEPT = 256

# Vectorized CPU kernels want 64 bytes; it also satisfies the 16 bytes below which NCCL copies scalar by scalar
# (pytorch#195450).
ALIGNMENT_BYTES = 64
# The length of a message is a multiple of it, and that of every shard that is an operand of its own.
MESSAGE_ALIGNMENT_BYTES = 16


class Route(enum.Enum):
    """The way of a parameter into a collective."""

    DIRECT = "direct"  # its shard is the input, and the unsharded parameter the output, of an operand of its own
    PACKED = "packed"  # it shares one message per bucket with other small or oddly laid out parameters
    REPLICATED = "replicated"  # every rank keeps all of it; its gradient is in the shared message


@dataclass(frozen=True)
class ParameterShape:
    """Shape, strides and cut of one parameter.

    Args:
        fqn: Fully qualified name.
        shape: Global shape. A 0-D parameter is replicated.
        stride: Strides in elements of the unsharded parameter; must be dense and non-overlapping.
        replicated: Keep all of it on every rank although it has dims to cut.
        cut: The dim that is cut over the ranks. Without meaning for a replicated parameter.

    Raises:
        ValueError: If shape and stride do not fit each other, or there is no such dim to cut.
    """

    fqn: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    replicated: bool = False
    cut: int = 0

    def __post_init__(self) -> None:
        if not is_dense(self.shape, self.stride):
            raise ValueError(
                f"{self.fqn}: expected dense, non-overlapping strides, found shape {self.shape} "
                f"with stride {self.stride}; pass a contiguous tensor"
            )
        if self.shape and not self.replicated and not 0 <= self.cut < len(self.shape):
            raise ValueError(
                f"{self.fqn}: expected a dim to shard from 0 to {len(self.shape) - 1}, found {self.cut} "
                f"for shape {self.shape}"
            )

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return True if a tensor of this shape and stride fills one block of memory without holes or overlap."""
    if len(shape) != len(stride):
        return False
    if math.prod(shape) == 0:
        return True
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


@dataclass(frozen=True)
class Slot:
    """The place of one parameter. Offsets and sizes are in elements and equal on every rank."""

    parameter: ParameterShape
    route: Route
    world_size: int
    shard_offset: int  # of its shard in every rank's shard buffer
    unsharded_offset: int  # of the parameter in the unsharded buffer

    @cached_property
    def rows(self) -> int:
        """Size of the cut dim (1 for replicated parameters, which are not cut)."""
        return 1 if self.route is Route.REPLICATED else self.parameter.shape[self.parameter.cut]

    @cached_property
    def row_numel(self) -> int:
        """Elements of one row, also where there are no rows."""
        return self.parameter.numel if self.route is Route.REPLICATED else _row_numel(self.parameter)

    @cached_property
    def chunk_rows(self) -> int:
        """Rows of the first shards: ``ceil(rows / world_size)``; later ranks may hold fewer, or none."""
        return 1 if self.route is Route.REPLICATED else -(-self.rows // self.world_size)

    @cached_property
    def shard_numel(self) -> int:
        """Elements reserved in every rank's shard buffer, padding included."""
        return self.chunk_rows * self.row_numel

    @cached_property
    def row_major(self) -> bool:
        """True if the cut dim is outermost in memory, so that the shards of consecutive ranks are contiguous.

        Always so on a single rank, whose shard is the whole parameter.
        """
        return self.world_size == 1 or is_row_major(self.parameter)

    @cached_property
    def in_place(self) -> bool:
        """True if shards are copied straight into the unsharded parameter: on a single rank always."""
        return self.route is Route.DIRECT or (self.world_size == 1 and self.shard_numel > 0)

    @cached_property
    def padded(self) -> bool:
        """True if it takes more than its size in the unsharded buffer: its rows are not a multiple of the ranks."""
        return self.row_major and self.unsharded_numel != self.parameter.numel

    @cached_property
    def unsharded_numel(self) -> int:
        """Elements reserved in the unsharded buffer: all (padded) shards where they are contiguous there."""
        if self.route is Route.REPLICATED or not self.row_major:
            return self.parameter.numel
        return self.shard_numel * self.world_size

    def local_rows(self, rank: int) -> tuple[int, int]:
        """Return the first and the one-past-last row that ``rank`` holds."""
        return min(rank * self.chunk_rows, self.rows), min((rank + 1) * self.chunk_rows, self.rows)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the shard that ``rank`` holds; the cut dim may be 0, the others are the parameter's."""
        if self.route is Route.REPLICATED:
            return self.parameter.shape
        start, stop = self.local_rows(rank)
        return _replaced(self.parameter.shape, self.parameter.cut, stop - start)

    def local_stride(self, rank: int) -> tuple[int, ...]:
        """Return the strides of the shard of ``rank``: the parameter's where its rows are blocks, else contiguous ones.

        Contiguous strides depend on the rank, because its rows are not outermost in them unless dim 0 is cut.
        """
        if self.route is Route.REPLICATED or self.world_size == 1:
            return self.parameter.stride
        if self.row_major:
            return _replaced(self.parameter.stride, self.parameter.cut, self.row_numel)
        return contiguous_stride(self.local_shape(rank))


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return row-major strides of ``shape``, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_row_major(parameter: ParameterShape) -> bool:
    """Return True if rows are blocks of memory that follow one another; a replicated parameter is one row."""
    if parameter.replicated or not parameter.shape:
        return True
    cut = parameter.cut
    rows_in_order = parameter.shape[cut] <= 1 or parameter.stride[cut] == _row_numel(parameter)
    return rows_in_order and is_dense(_without(parameter.shape, cut), _without(parameter.stride, cut))


@dataclass(frozen=True)
class PerParameterLayout:
    """The places of the parameters of one bucket. Build with ``build``; offsets and sizes are in elements."""

    slots: tuple[Slot, ...]  # in the order of the parameters given
    world_size: int
    alignment: int
    message_offset: int  # of the packed shards in the shard buffer
    message_numel: int  # elements that each rank contributes to the packed message
    shard_numel: int
    unsharded_numel: int

    @classmethod
    @lru_cache(maxsize=LAYOUTS_KEPT)
    def build(
        cls,
        parameters: tuple[ParameterShape, ...],
        *,
        world_size: int,
        itemsize: int,
        direct_bytes: int,
        alignment_bytes: int = ALIGNMENT_BYTES,
        within: PerParameterLayout | None = None,
    ) -> PerParameterLayout:
        """Lay out ``parameters``; equal arguments give the same object.

        Args:
            parameters: In model order.
            world_size: Ranks that the parameters are cut over.
            itemsize: Bytes per element of the smallest dtype in which a buffer of this layout is held (a shard may be
                kept in fp32 and sent in bf16). What is aligned in it is aligned in every larger dtype.
            direct_bytes: Smallest shard, in bytes of that dtype, for which an operand of its own pays.
            alignment_bytes: Every unsharded parameter and every shard that is as large starts at a multiple of it. A
                smaller shard starts at a multiple of the power of two that it fills: among thousands of ranks most
                shards of norms and biases are one element, and aligned to 64 bytes they would make the message that
                all ranks gather sixteen times as large.
            within: A layout of the same parameters over a larger group, into whose unsharded buffer this smaller one
                gathers. They fit there if its ranks are a multiple of ``world_size``: each layout rounds a
                parameter's rows up to the next multiple of its ranks. None: a buffer of its own.

        Raises:
            ValueError: If ``within`` has another number of parameters, or they do not fit into its buffer.
        """
        alignment = max(1, alignment_bytes // itemsize)
        routes = [_route(p, world_size, itemsize, direct_bytes) for p in parameters]

        slots = [Slot(p, route, world_size, 0, 0) for p, route in zip(parameters, routes, strict=True)]
        if within is None:
            ends = [0, *itertools.accumulate(_aligned(slot.unsharded_numel, alignment) for slot in slots)]
            unsharded_offsets, unsharded_numel = ends[:-1], ends[-1]
        else:
            unsharded_offsets = [slot.unsharded_offset for slot in within.slots]
            unsharded_numel = within.unsharded_numel
        if len(unsharded_offsets) != len(parameters):
            raise ValueError(
                f"expected a layout of the same {len(parameters)} parameters, found one of {len(unsharded_offsets)}"
            )

        direct = [i for i, route in enumerate(routes) if route is Route.DIRECT]
        packed = [i for i, route in enumerate(routes) if route is not Route.DIRECT]
        offset = message_offset = 0
        for index in direct + packed:
            numel = slots[index].shard_numel
            if packed and index == packed[0]:
                message_offset = offset = _aligned(offset, alignment)
            offset = _aligned(offset, _shard_alignment(numel, alignment))
            slots[index] = replace(slots[index], shard_offset=offset, unsharded_offset=unsharded_offsets[index])
            offset += numel
        offset = _aligned(offset, min(alignment, max(1, MESSAGE_ALIGNMENT_BYTES // itemsize)))  # the message's end
        return cls(
            slots=tuple(slots),
            world_size=world_size,
            alignment=alignment,
            message_offset=message_offset if packed else offset,
            message_numel=offset - message_offset if packed else 0,
            shard_numel=offset,
            unsharded_numel=unsharded_numel,
        )

    def __hash__(self) -> int:  # without the slots: layouts are looked up often, and nearly always found by identity
        return hash((self.shard_numel, self.unsharded_numel, self.message_numel, self.world_size, len(self.slots)))

    def __post_init__(self) -> None:
        unsharded = [(s.unsharded_offset, s.unsharded_numel, s.parameter.fqn, self.alignment) for s in self.slots]
        shard = [
            (s.shard_offset, s.shard_numel, s.parameter.fqn, _shard_alignment(s.shard_numel, self.alignment))
            for s in self.slots
        ]
        check_disjoint(unsharded, self.unsharded_numel, "unsharded buffer")
        check_disjoint(shard, self.shard_numel, "shard buffer")
        for slot in self.slots:
            held = slot.local_rows(slot.world_size - 1)[1]  # every rank begins where the one before it ends
            if slot.route is not Route.REPLICATED and (held != slot.rows or slot.world_size != self.world_size):
                raise ValueError(
                    f"{slot.parameter.fqn}: expected {slot.rows} rows on {self.world_size} ranks, found {held} rows on "
                    f"{slot.world_size} ranks"
                )
            inside = self.message_offset <= slot.shard_offset
            if slot.shard_numel and inside == (slot.route is Route.DIRECT):
                raise ValueError(
                    f"{slot.parameter.fqn}: {slot.route} parameter on the wrong side of the packed message"
                )

    @cached_property
    def in_place(self) -> list[tuple[int, int, int]]:
        """Shards that are gathered straight into the unsharded buffer: offset, elements, and where all of them lie."""
        return [(s.shard_offset, s.shard_numel, s.unsharded_offset) for s in self.slots if s.in_place]


def _route(parameter: ParameterShape, world_size: int, itemsize: int, direct_bytes: int) -> Route:
    if parameter.replicated or not parameter.shape:
        return Route.REPLICATED
    direct = _direct_bytes(parameter, world_size, itemsize) >= max(direct_bytes, 1)
    return Route.DIRECT if direct else Route.PACKED


def direct_shards(parameters: Sequence[ParameterShape], world_size: int, itemsize: int) -> list[int]:
    """Return the sizes in bytes of the shards that can be operands of their own.

    Args:
        parameters: In any order.
        world_size: Ranks that the parameters are cut over.
        itemsize: Bytes per element.
    """
    sizes = (_direct_bytes(p, world_size, itemsize) for p in parameters if p.shape and not p.replicated)
    return [size for size in sizes if size]


def _direct_bytes(parameter: ParameterShape, world_size: int, itemsize: int) -> int:
    """Return the bytes of a shard that can be a separate operand; 0 if it cannot."""
    nbytes = -(-parameter.shape[parameter.cut] // world_size) * _row_numel(parameter) * itemsize
    # On one rank the shard is the whole, whichever dim is cut; without a cut > 0 the route is that of more ranks.
    blocks = is_row_major(parameter) or (world_size == 1 and parameter.cut > 0)
    return nbytes if blocks and nbytes % MESSAGE_ALIGNMENT_BYTES == 0 else 0


def _row_numel(parameter: ParameterShape) -> int:
    return math.prod(_without(parameter.shape, parameter.cut))


def _without(values: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*values[:dim], *values[dim + 1 :])


def _replaced(values: Sequence[int], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def _aligned(numel: int, alignment: int) -> int:
    return -(-numel // alignment) * alignment


def _shard_alignment(numel: int, alignment: int) -> int:
    """Return the alignment of a shard of so many elements."""
    return alignment if numel >= alignment else min(alignment, 1 << max(numel - 1, 0).bit_length())


def check_disjoint(extents: Iterable[tuple[int, int, str, int]], size: int, buffer: str) -> None:
    """Raise unless all extents (offset, elements, name, alignment) are aligned, within ``size`` and without overlap."""
    end, previous = 0, "its start"
    for offset, numel, name, alignment in sorted(extent for extent in extents if extent[1]):
        if offset % alignment:
            raise ValueError(f"{buffer}: {name} starts at {offset}, not a multiple of {alignment}")
        if offset < end:
            raise ValueError(f"{buffer}: {name} at {offset} overlaps {previous}, which ends at {end}")
        end, previous = offset + numel, name
    if end > size:
        raise ValueError(f"{buffer}: {previous} ends at {end}, beyond the buffer's {size} elements")
