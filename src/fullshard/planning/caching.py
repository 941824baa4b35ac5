"""Bytes that a caching allocator reserves for a sequence of allocations and frees, by the rules of torch's."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["CachingAllocator", "reserved_bytes"]

MIB = 2**20
_ROUND = 512
_SMALL = MIB  # requests up to this come from segments of 2 MiB
_SMALL_SEGMENT, _LARGE_SEGMENT, _LEAST_OWN_SEGMENT = 2 * MIB, 20 * MIB, 10 * MIB


@dataclass(eq=False)
class _Chunk:
    """A part of a segment."""

    nbytes: int
    pool: tuple[int, bool]  # number of a stream, and whether it is for small requests
    segment: list[_Chunk]  # all its parts, in the order of addresses
    free: bool = False


class CachingAllocator:
    """Blocks in segments that are never given back.

    A request is rounded up to 512 bytes and gets the smallest free block that is large enough, which is split if
    enough is left. If there is none, a segment is reserved: 2 MiB for requests up to 1 MiB, 20 MiB for those below 10
    MiB, else what is needed, in units of 2 MiB. Free neighbors are joined. Each stream has blocks of its own: what was
    freed by one is not reused by another.
    """

    reserved: int
    _free: dict[tuple[int, bool], list[tuple[int, int, _Chunk]]]  # by pool, in the order of sizes
    _made: int

    def __init__(self) -> None:
        self.reserved, self._free, self._made = 0, defaultdict(list), 0

    def allocate(self, nbytes: int, stream: int = 0) -> _Chunk:
        """Return a block of so many bytes from the pool of a stream, which it goes back to."""
        size = max(_ROUND, -(-nbytes // _ROUND) * _ROUND)
        small = size <= _SMALL
        pool = self._free[stream, small]
        place = bisect.bisect_left(pool, (size, -1))
        if place < len(pool):
            chunk = pool.pop(place)[2]
        else:
            nbytes = _segment(size)
            self.reserved += nbytes
            chunk = _Chunk(nbytes, (stream, small), [])
            chunk.segment.append(chunk)
        chunk.free = False
        left = chunk.nbytes - size
        if left >= _ROUND if small else left > _SMALL:
            rest = _Chunk(left, chunk.pool, chunk.segment)
            chunk.segment.insert(chunk.segment.index(chunk) + 1, rest)
            chunk.nbytes = size
            self._put(rest)
        return chunk

    def free(self, chunk: _Chunk) -> None:
        """Take a block back, and join it with free neighbors."""
        segment, pool = chunk.segment, self._free[chunk.pool]
        place = segment.index(chunk)
        for other in segment[max(place - 1, 0) : place + 2]:
            if other.free:
                pool.pop(next(at for at, each in enumerate(pool) if each[2] is other))
                segment.remove(other)
                chunk.nbytes += other.nbytes
        self._put(chunk)

    def _put(self, chunk: _Chunk) -> None:
        chunk.free = True
        self._made += 1
        bisect.insort(self._free[chunk.pool], (chunk.nbytes, self._made, chunk))


def _segment(size: int) -> int:
    """Return the bytes to reserve for a request."""
    if size <= _SMALL:
        return _SMALL_SEGMENT
    return _LARGE_SEGMENT if size < _LEAST_OWN_SEGMENT else -(-size // _SMALL_SEGMENT) * _SMALL_SEGMENT


def reserved_bytes(changes: Iterable[tuple[int, int, int]]) -> int:
    """Return what is reserved in the end.

    Args:
        changes: Number of a storage, bytes that it takes (positive) or gives back, and number of the stream.
    """
    allocator = CachingAllocator()
    held: dict[int, tuple[_Chunk, int]] = {}
    for storage, nbytes, stream in changes:
        if storage in held:
            chunk, before = held.pop(storage)
            allocator.free(chunk)
            nbytes += before
        if nbytes > 0:
            held[storage] = allocator.allocate(nbytes, stream), nbytes
    return allocator.reserved
