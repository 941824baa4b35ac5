"""Read and write shards at their byte ranges of a file in which tensors are stored whole, row by row.

A CPU shard that is contiguous in memory and in the file, with the file's dtype, is read and written in place.
Everything else goes through one block of memory of fixed size.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from fullshard.checkpoint.format.host import bytes_of, plain
from fullshard.checkpoint.safetensors.files import FileTensor
from fullshard.checkpoint.state.tensor_shards import TensorShard
from fullshard.errors import CheckpointError
from fullshard.layout import Region
from fullshard.layout.per_parameter import contiguous_stride

__all__ = ["BLOCK_BYTES", "ShardFileIO", "contiguous_runs", "split_region"]

BLOCK_BYTES = 8 * 1024 * 1024  # small enough to stay in a processor's cache, large enough that a call costs nothing
_READ_BYTES = 32 * 1024  # shorter ranges are read together with the gaps between them


class ShardFileIO:
    """Reads and writes shards through one block of memory.

    Args:
        block_bytes: Size of the block.
    """

    _nbytes: int
    _block: torch.Tensor | None  # allocated when first needed

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self._nbytes, self._block = block_bytes, None

    def write(self, descriptor: int, target: FileTensor, shard: TensorShard) -> None:
        """Write a shard, of any dtype and on any device, to its byte ranges, in the file's dtype.

        Raises:
            TypeError: If the shard has no dense memory.
            OSError: If writing fails.
        """
        local, dtype = plain(shard.local), target.dtype
        if _is_direct(local, dtype):
            _write_region(descriptor, target, shard.region, bytes_of(local))
            return
        limit = self._nbytes // max(dtype.itemsize, local.element_size())
        for part in split_region(shard.region, contiguous_stride(shard.region.sizes), limit):
            _write_region(descriptor, target, part, bytes_of(self._cast(_narrowed(local, shard.region, part), dtype)))

    def read(self, descriptor: int, source: FileTensor, shard: TensorShard) -> None:
        """Fill a shard from its byte ranges, in the shard's dtype.

        Raises:
            TypeError: If the shard has no dense memory.
            CheckpointError: If the file is too short.
            OSError: If reading fails.
        """
        local, itemsize = plain(shard.local), source.dtype.itemsize
        nbytes = _first_run(shard.region, source.shape)[1] * itemsize
        if _is_direct(local, source.dtype) and (nbytes >= _READ_BYTES or nbytes == local.nbytes):
            view = bytes_of(local)
            for number, start in enumerate(contiguous_runs(shard.region, source.shape)[0].tolist()):
                _read(descriptor, view[number * nbytes : (number + 1) * nbytes], source.start + start * itemsize)
            return
        strides = contiguous_stride(source.shape)
        for part in split_region(shard.region, strides, self._nbytes // itemsize):
            block = self._memory(_span(part.sizes, strides) * itemsize)
            _read(descriptor, bytes_of(block), source.start + _dot(part.offsets, strides) * itemsize)
            values = block.view(source.dtype).as_strided(part.sizes, strides)
            _narrowed(local, shard.region, part).copy_(values)

    def _cast(self, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Copy into the block, contiguous and in another dtype."""
        if part.device.type != "cpu":
            # On the device: a copy that also casts or changes layout would do so on the host.
            part = part.to(dtype).contiguous()
        block = self._memory(part.numel() * dtype.itemsize).view(dtype).view(part.shape)
        return block.copy_(part)

    def _memory(self, nbytes: int) -> torch.Tensor:
        if self._block is None:
            self._block = torch.empty(self._nbytes, dtype=torch.uint8, device="cpu")
        return self._block[:nbytes]


def split_region(region: Region, strides: Sequence[int], limit: int) -> Iterator[Region]:
    """Yield subregions of a region, in order, each spanning at most ``limit`` elements of memory.

    Args:
        region: Region to split.
        strides: Strides of the whole tensor, or of the region as a contiguous tensor.
        limit: Most elements; at least one.
    """
    if not region.numel:
        return
    dim = next((i for i, size in enumerate(region.sizes) if size > 1), None)
    if dim is None or _span(region.sizes, strides) <= limit:
        yield region
        return
    inner = _span(region.sizes[dim + 1 :], strides[dim + 1 :])
    step = 1 if inner > limit else 1 + (limit - inner) // strides[dim]
    for start in range(0, region.sizes[dim], step):
        offsets, sizes = list(region.offsets), list(region.sizes)
        offsets[dim], sizes[dim] = region.offsets[dim] + start, min(step, region.sizes[dim] - start)
        yield from split_region(Region(tuple(offsets), tuple(sizes)), strides, limit)


def contiguous_runs(region: Region, shape: Sequence[int]) -> tuple[np.ndarray, int]:
    """Return the ranges of elements, counted row by row in a tensor of that shape, that make up a region.

    Returns:
        Their starts, in order (int64), and the length of each.
    """
    dim, numel = _first_run(region, shape)
    strides = contiguous_stride(shape)
    starts = np.full(min(region.numel, 1), _dot(region.offsets, strides), dtype=np.int64)
    for size, stride in zip(region.sizes[:dim], strides, strict=False):
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return starts, numel


def _first_run(region: Region, shape: Sequence[int]) -> tuple[int, int]:
    """Return the first dim that a range of elements lies in, and its length."""
    dim, numel = len(shape), 1
    while dim > 0:
        dim -= 1
        numel *= region.sizes[dim]
        if region.sizes[dim] != shape[dim]:
            break
    return dim, numel


def _dot(left: Sequence[int], right: Sequence[int]) -> int:
    return sum(a * b for a, b in zip(left, right, strict=True))


def _span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements of memory from the first to the last element."""
    return _dot([size - 1 for size in sizes], strides) + 1


def _narrowed(local: torch.Tensor, region: Region, part: Region) -> torch.Tensor:
    """Return the memory of a subregion of a region."""
    inside = part.relative_to(region.offsets)
    return local[tuple(map(slice, inside.offsets, inside.ends))]


def _is_direct(local: torch.Tensor, dtype: torch.dtype) -> bool:
    return local.device.type == "cpu" and local.dtype is dtype and local.is_contiguous()


def _write_region(descriptor: int, target: FileTensor, region: Region, contents: memoryview) -> None:
    starts, numel = contiguous_runs(region, target.shape)
    nbytes = numel * target.dtype.itemsize
    for number, start in enumerate(starts.tolist()):
        view, offset = contents[number * nbytes : (number + 1) * nbytes], target.start + start * target.dtype.itemsize
        while view:
            written = os.pwrite(descriptor, view, offset)
            view, offset = view[written:], offset + written


def _read(descriptor: int, view: memoryview, offset: int) -> None:
    while view:
        count = os.preadv(descriptor, [view], offset)
        if not count:
            raise CheckpointError(
                f"unexpected end of file at byte {offset}, {len(view)} bytes missing; was it changed?"
            )
        view, offset = view[count:], offset + count
