"""A model of costs that chooses which shards of a launch NCCL sends alone, and which packed.

An operand of its own needs no copy, but each operation in a group call costs host time, and a ring passes through all
ranks for each. A packed shard is copied once more on the device, all of them by one kernel. Among few ranks the copies
of large parameters cost more than their operations; among many ranks the latency of operations costs more.

The constants are estimates from published measurements, not from fullshard's own: each NCCL operation in a group costs
about 10 us of host and device time; a hop of a ring about 1.5 us; an H100 reads and writes 2.5 TB/s in a copy.
Operations of very different sizes share the channels of a group badly (pytorch#187239), and many small ones are far
slower than a packed one (nccl#725).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["smallest_direct"]

OPERATION_SECONDS = 10e-6  # of one more operation in a group call
HOP_SECONDS = 1.5e-6  # of an operation, for each rank beyond the first
COPY_BYTES_PER_SECOND = 2.5e12  # read and written
MAX_SKEW = 64  # the largest shard of a group, in the size of the smallest that is an operand of its own


def smallest_direct(shards: Sequence[int], world_size: int, *, copied: bool) -> int:
    """Return the size of the smallest shard to send as an operand of its own; larger than all sizes if none is.

    Args:
        shards: Bytes of the shards that could be operands of their own; equal on all ranks.
        world_size: Number of ranks.
        copied: They are copied in any case, because their dtype is not the one in which they are sent.

    Returns:
        Bytes. All shards of at least so many are to be sent as operands of their own, the others packed.
    """
    operation = OPERATION_SECONDS + HOP_SECONDS * (world_size - 1)
    sizes = sorted(shards, reverse=True)
    packed = sum(sizes)
    best, least = sys.maxsize, operation + 2 * packed * world_size / COPY_BYTES_PER_SECOND
    if copied:
        return best
    for count, size in enumerate(sizes, 1):
        packed -= size
        if size * MAX_SKEW < sizes[0]:
            break
        if count < len(sizes) and sizes[count] == size:
            continue
        seconds = (count + bool(packed)) * operation + 2 * packed * world_size / COPY_BYTES_PER_SECOND
        if seconds < least:
            best, least = size, seconds
    return best
