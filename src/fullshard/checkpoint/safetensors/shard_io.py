"""Read and write shards at their byte ranges of a file in which tensors are stored whole, row by row."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import numpy as np

from fullshard.checkpoint.format.host import HostBlocks
from fullshard.checkpoint.safetensors.files import FileTensor
from fullshard.engine.parameters.tensor_shards import TensorShard
from fullshard.errors import CheckpointError
from fullshard.layout import Region
from fullshard.layout.per_parameter import contiguous_stride

__all__ = ["ShardFileIO"]

BLOCK_BYTES = 8 * 1024 * 1024  # small enough to stay in a processor's cache, large enough that a call costs nothing


class ShardFileIO:
    """Reads and writes shards: in place where they are contiguous on the CPU and of the file's dtype, else in blocks.

    Args:
        block_bytes: Size of a block.
    """

    _blocks: HostBlocks

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self._blocks = HostBlocks(block_bytes)

    def write(self, descriptor: int, target: FileTensor, shard: TensorShard) -> None:
        """Write a shard, of any dtype and on any device, to its byte ranges, in the file's dtype.

        Raises:
            TypeError: If the shard has no dense memory.
            OSError: If writing fails.
        """
        for offset, view in _places(self._blocks.of(shard.local, target.dtype), target, shard.region):
            while view:
                written = os.pwrite(descriptor, view, offset)
                view, offset = view[written:], offset + written

    def read(self, descriptor: int, source: FileTensor, shard: TensorShard) -> None:
        """Fill a shard from its byte ranges, in the shard's dtype.

        Raises:
            TypeError: If the shard has no dense memory.
            CheckpointError: If the file is too short.
            OSError: If reading fails.
        """
        for offset, view in _places(self._blocks.into(shard.local, source.dtype), source, shard.region):
            while view:
                count = os.preadv(descriptor, [view], offset)
                if not count:
                    raise CheckpointError(
                        f"unexpected end of file at byte {offset}, {len(view)} bytes missing; was it changed?"
                    )
                view, offset = view[count:], offset + count


def _places(blocks: Iterator[memoryview], tensor: FileTensor, region: Region) -> Iterator[tuple[int, memoryview]]:
    """Yield the byte of the file at which each part of the blocks, which hold a region row by row, lies."""
    starts, numel = _contiguous_runs(region, tensor.shape)
    length, at = numel * tensor.dtype.itemsize, 0
    for block in blocks:
        while block:
            run, inside = divmod(at, length)
            part = block[: length - inside]
            yield tensor.start + int(starts[run]) * tensor.dtype.itemsize + inside, part
            block, at = block[len(part) :], at + len(part)


def _contiguous_runs(region: Region, shape: Sequence[int]) -> tuple[np.ndarray, int]:
    """Return the ranges of elements, counted row by row in a tensor of that shape, that make up a region: their starts,
    in order (int64), and the length of each.
    """
    dim, numel, strides = len(shape), 1, contiguous_stride(shape)
    while dim > 0:
        dim -= 1
        numel *= region.sizes[dim]
        if region.sizes[dim] != shape[dim]:
            break
    first = sum(offset * stride for offset, stride in zip(region.offsets, strides, strict=True))
    starts = np.full(1, first, dtype=np.int64)
    for size, stride in zip(region.sizes[:dim], strides, strict=False):
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return starts, numel
