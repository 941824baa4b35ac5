"""Pieces of tensors between memory and the byte ranges of a file, where tensors lie whole, row by row.

A piece that is contiguous in both, of one dtype, on the CPU, is read and written straight. Everything else goes through
one block of memory, so that no more than that is needed, however large the piece is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from fullshard.checkpoint.host import bytes_of, plain
from fullshard.checkpoint.pieces import Piece
from fullshard.checkpoint.safetensors_files import FileTensor
from fullshard.errors import CheckpointError
from fullshard.layout import Box

__all__ = ["BLOCK_BYTES", "PieceMover", "parts_of", "runs_of"]

BLOCK_BYTES = 8 * 1024 * 1024  # small enough to stay in a processor's cache, large enough that a call costs nothing
_READ_BYTES = 32 * 1024  # a shorter range is not read by itself, but with what lies between it and the next


class PieceMover:
    """See the module docstring.

    Args:
        block_bytes: Memory to go through.
    """

    _nbytes: int
    _block: torch.Tensor | None  # once needed

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self._nbytes, self._block = block_bytes, None

    def write(self, descriptor: int, target: FileTensor, piece: Piece) -> None:
        """Write a piece to its place, in the file's dtype.

        Args:
            descriptor: Of the file.
            target: The whole tensor in it.
            piece: Of any dtype, on any device.

        Raises:
            TypeError: If the piece has no elements that could be stored.
            OSError: As the system says.
        """
        itemsize = target.dtype.itemsize
        for part, view in self._contents(piece, target.dtype):
            starts, numel = runs_of(part, target.shape)
            nbytes = numel * itemsize
            for number, start in enumerate(starts.tolist()):
                _write(descriptor, view[number * nbytes : (number + 1) * nbytes], target.start + start * itemsize)

    def _contents(self, piece: Piece, dtype: torch.dtype) -> Iterator[tuple[Box, memoryview]]:
        """The bytes of a piece in a dtype, part by part."""
        local = plain(piece.local)
        if _is_direct(local, dtype):
            yield piece.box, bytes_of(local)
            return
        limit = self._nbytes // max(dtype.itemsize, local.element_size())
        for part in parts_of(piece.box, _strides(piece.box.sizes), limit):
            yield part, bytes_of(self._cast(_narrowed(local, piece.box, part), dtype))

    def read(self, descriptor: int, source: FileTensor, piece: Piece) -> None:
        """Fill a piece from its place, in the piece's dtype.

        Raises:
            TypeError: If the piece is no memory that could be filled.
            CheckpointError: If the file ends before.
            OSError: As the system says.
        """
        local, itemsize = plain(piece.local), source.dtype.itemsize
        if not local.numel():
            return
        first, numel = _first_run(piece.box, source.shape)
        whole = numel == piece.box.numel
        if _is_direct(local, source.dtype) and (whole or numel * itemsize >= _READ_BYTES):
            view, nbytes = bytes_of(local), numel * itemsize
            every = [first] if whole else runs_of(piece.box, source.shape)[0].tolist()
            for number, start in enumerate(every):
                _read(descriptor, view[number * nbytes : (number + 1) * nbytes], source.start + start * itemsize)
            return
        strides = _strides(source.shape)
        for part in parts_of(piece.box, strides, self._nbytes // itemsize):
            first = _dot(part.offsets, strides)
            span = _dot([size - 1 for size in part.sizes], strides) + 1
            block = self._memory(span * itemsize)
            _read(descriptor, bytes_of(block), source.start + first * itemsize)
            values = block.view(source.dtype).as_strided(part.sizes, strides)
            _narrowed(local, piece.box, part).copy_(values)

    def _cast(self, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A contiguous copy in the block."""
        if part.device.type != "cpu":
            part = part.to(dtype).contiguous()  # a copy that also casts, or lays out anew, would do that on the host
        block = self._memory(part.numel() * dtype.itemsize).view(dtype).view(part.shape)
        return block.copy_(part)

    def _memory(self, nbytes: int) -> torch.Tensor:
        if self._block is None:
            self._block = torch.empty(self._nbytes, dtype=torch.uint8, device="cpu")
        return self._block[:nbytes]


def parts_of(box: Box, strides: Sequence[int], limit: int) -> Iterator[Box]:
    """A box in parts whose elements, with those between them, are no more than ``limit``, in order.

    Args:
        box: To divide.
        strides: Where its elements lie: those of the whole tensor, or its own for as if it was alone.
        limit: At least one.
    """
    if not box.numel:
        return
    dim = next((i for i, size in enumerate(box.sizes) if size > 1), None)
    if dim is None or _dot([size - 1 for size in box.sizes], strides) < limit:
        yield box
        return
    inner = _dot([size - 1 for size in box.sizes[dim + 1 :]], strides[dim + 1 :]) + 1
    step = 1 if inner > limit else 1 + (limit - inner) // strides[dim]
    for start in range(0, box.sizes[dim], step):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim], sizes[dim] = box.offsets[dim] + start, min(step, box.sizes[dim] - start)
        yield from parts_of(Box(tuple(offsets), tuple(sizes)), strides, limit)


def runs_of(box: Box, shape: Sequence[int]) -> tuple[np.ndarray, int]:
    """The ranges of elements, counted row by row in a tensor of that shape, that a box is.

    Returns:
        Where they begin, in order (int64), and how long each is.
    """
    strides = _strides(shape)
    first, numel = _first_run(box, shape)
    starts = np.array([first if box.numel else 0], dtype=np.int64)[: box.numel]
    done = 1
    for dim, size in enumerate(box.sizes):
        if done * numel >= box.numel:
            break
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * strides[dim]).reshape(-1)
        done *= size
    return starts, numel


def _first_run(box: Box, shape: Sequence[int]) -> tuple[int, int]:
    """Where the first range of elements begins, and how long each is."""
    dim, numel = len(shape), 1
    while dim > 0:
        dim -= 1
        numel *= box.sizes[dim]
        if box.sizes[dim] != shape[dim]:
            break
    return _dot(box.offsets, _strides(shape)), numel


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _dot(left: Sequence[int], right: Sequence[int]) -> int:
    return sum(a * b for a, b in zip(left, right, strict=True))


def _narrowed(local: torch.Tensor, box: Box, part: Box) -> torch.Tensor:
    """The memory of a part of a box."""
    for dim, (offset, size) in enumerate(zip(part.within(box.offsets).offsets, part.sizes, strict=True)):
        local = local.narrow(dim, offset, size)
    return local


def _is_direct(local: torch.Tensor, dtype: torch.dtype) -> bool:
    return local.device.type == "cpu" and local.dtype is dtype and local.is_contiguous()


def _write(descriptor: int, view: memoryview, offset: int) -> None:
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _read(descriptor: int, view: memoryview, offset: int) -> None:
    while view:
        count = os.preadv(descriptor, [view], offset)
        if not count:
            raise CheckpointError(f"the file ends at byte {offset}, {len(view)} bytes too early; was it changed?")
        view, offset = view[count:], offset + count
