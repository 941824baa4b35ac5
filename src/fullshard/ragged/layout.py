"""The ragged layout: a flat layout whose slices end where the parameters may be cut, such as between their rows.

Two parameters on three ranks, w of shape (5, 4) and b of shape (3,), which may be cut between rows of four elements
(elements 0 to 8 of w lie at 0 to 7 of rank 0's shard; one of the 24 elements of the unsharded buffer is padding):

    unsharded      | w 0..19            | b 20..22           |
    rank 0 shard   | w[0:8] 0..7        | b empty            |
    rank 1 shard   | w[8:16] 0..7       | b empty            |
    rank 2 shard   | w[16:20] 0..3      | b[0:3] 4..6        |

A parameter is contiguous in the unsharded buffer, so padding lies between parameters only. From that follows what cuts
cost. A parameter with two cuts or more inside needs slices that are a multiple of its *granule* (the elements between
two places where it may be cut), and so do all such parameters of a bucket together: rows of 4,096 and of 14,336
elements need slices of a multiple of 28,672. Where slices are not much longer than that, as among thousands of ranks,
cutting between rows takes padding that no order of the parameters avoids; cutting anywhere takes none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

from fullshard.layout.flat import FlatLayout, FlatSlot
from fullshard.layout.per_parameter import LAYOUTS_KEPT, ParameterShape, is_row_major

__all__ = ["GRANULARITIES", "Granularity", "granule_of", "ragged_layout"]

Granularity = str | int
GRANULARITIES = ("element", "row", "parameter")

# Slices are tried that are longer than the shortest by these shares, where many lie close to each other.
_SLACKS = (0, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7)
_NEIGHBORS = 3  # lengths that are tried from each of them


def granule_of(parameter: ParameterShape, granularity: Granularity) -> int:
    """Return the elements between two places where a parameter may be cut.

    Args:
        parameter: Counted in the order in which its elements lie in memory.
        granularity: "element", "row" (one index of dim 0), "parameter" (never cut), or an int: so many rows. Rows that
            do not follow one another in memory, as of a transposed matrix, cannot be cut apart, so that the parameter
            stays on one rank.

    Raises:
        ValueError: If it is none of these.
    """
    if granularity == "element":
        return 1
    if granularity == "parameter":
        return max(1, parameter.numel)
    rows = 1 if granularity == "row" else granularity
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise ValueError(
            f"{parameter.fqn}: granularity: expected one of {', '.join(map(repr, GRANULARITIES))}, or a number of rows "
            f"from 1 on; found {granularity!r}"
        )
    if not parameter.shape:
        return 1
    if not is_row_major(parameter):
        return max(1, parameter.numel)
    return max(1, rows * math.prod(parameter.shape[1:]))


@lru_cache(maxsize=LAYOUTS_KEPT)
def ragged_layout(
    parameters: tuple[ParameterShape, ...],
    granularities: tuple[Granularity, ...],
    *,
    world_size: int,
    alignment: int = 4,
    first_rank: int = 0,
) -> FlatLayout:
    """Lay out ``parameters`` in equal slices, the shortest of those tried, which end only where parameters may be cut.

    Args:
        parameters: In model order; the layout may place them in another one.
        granularities: Where each may be cut, see ``granule_of``.
        world_size: Ranks that they are cut over.
        alignment: Every parameter, and every slice, starts at a multiple of so many elements in the unsharded buffer.
        first_rank: If no parameter may be cut, the rank that is filled first, modulo the ranks; else without meaning.

    Raises:
        ValueError: If a granularity is invalid.
    """
    granules = [granule_of(p, each) for p, each in zip(parameters, granularities, strict=True)]
    sizes = [parameter.numel for parameter in parameters]
    for slice_numel in _slice_lengths(sizes, granules, world_size, alignment):
        offsets = _offsets(sizes, granules, slice_numel, world_size, alignment)
        if offsets is not None:
            if all(size <= granule for size, granule in zip(sizes, granules, strict=True)):
                total = slice_numel * world_size
                offsets = [(offset + first_rank * slice_numel) % total for offset in offsets]
            slots = (FlatSlot(p, offset, slice_numel) for p, offset in zip(parameters, offsets, strict=True))
            return FlatLayout(tuple(slots), world_size, slice_numel)
    raise AssertionError("slices of all parameters, one on each, always fit")


def _slice_lengths(sizes: Sequence[int], granules: Sequence[int], world_size: int, alignment: int) -> Iterator[int]:
    """Yield lengths of slices in ascending order: the last one always suffices.

    A parameter that is longer than two slices is cut twice wherever it lies, so that its granule divides the slice.
    One that is shorter than its granule is not cut at all.
    """
    whole = [size for size, granule in zip(sizes, granules, strict=True) if granule >= size]
    shortest = max(1, -(-sum(sizes) // world_size), *whole)
    longest = max(alignment, sum(-(-size // alignment) * alignment for size in sizes))
    descending = sorted(zip(sizes, granules, strict=True), reverse=True)
    lengths, step, end = {longest}, alignment, longest
    for size, granule in [*descending, (0, 1)]:  # which is no longer than two slices, while all before it are
        first = max(shortest, -(-size // 2))
        for slack in _SLACKS:
            start = -(-math.ceil(first * (1 + slack)) // step) * step
            lengths.update(range(start, min(start + _NEIGHBORS * step, end), step))
        step, end = math.lcm(step, granule), -(-size // 2)
        if step >= end or end <= shortest:
            break
    return iter(sorted(lengths))


def _offsets(
    sizes: Sequence[int], granules: Sequence[int], slice_numel: int, world_size: int, alignment: int
) -> list[int] | None:
    """Place parameters in slices of that length; return None if they do not all fit.

    Those with the largest granules come first, one after another, and the others into the gaps that they leave, or
    behind them.
    """
    total = slice_numel * world_size
    gaps: list[tuple[int, int]] = []  # first element, and first beyond it
    offsets, end = [0] * len(sizes), 0
    for index in sorted(range(len(sizes)), key=lambda i: (-granules[i], -sizes[i], i)):
        size, granule = sizes[index], granules[index]
        for number, (first, beyond) in enumerate(gaps):
            if beyond - first < size:
                continue
            offset = _first_fit(first, size, granule, slice_numel, alignment)
            if offset is not None and offset + size <= beyond:
                left = [(first, offset), (offset + size, beyond)]
                gaps[number : number + 1] = [(a, b) for a, b in left if b - a >= alignment]
                break
        else:
            offset = _first_fit(end, size, granule, slice_numel, alignment)
            if offset is None or offset + size > total:
                return None
            if offset - end >= alignment:
                gaps.append((end, offset))
            end = offset + size
        offsets[index] = offset
    return offsets


def _first_fit(start: int, size: int, granule: int, slice_numel: int, alignment: int) -> int | None:
    """Return the first aligned offset from ``start`` on at which slices end between granules; None: there is none."""
    offset = -(-start // alignment) * alignment
    for _ in range(2 * alignment + 2):  # a granule further on, the alignment is another one, until they repeat
        cut = (offset // slice_numel + 1) * slice_numel
        if offset + size <= cut:
            return offset
        if offset + size > cut + slice_numel and slice_numel % granule:
            if offset % slice_numel == 0:
                return None  # two cuts wherever it lies
            offset = cut
            continue
        shift = (cut - offset) % granule
        if not shift:
            return offset
        offset = -(-(offset + shift) // alignment) * alignment
    return None
