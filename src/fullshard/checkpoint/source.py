"""Reading pieces of tensors from data files, checked, block by block.

A :class:`Source` gives ranges of elements of a piece; whoever asks decides where they go. :class:`DataSource` reads
fullshard's own files, :class:`~fullshard.checkpoint.torch_format.TorchSource` those of torch.distributed.checkpoint.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import torch
import xxhash

from fullshard.checkpoint.data_file import dtype_of
from fullshard.checkpoint.files import FileVersion, Folder
from fullshard.checkpoint.host import bytes_of
from fullshard.checkpoint.index import CHECKSUM, ITEM_SIZES, Index, PieceEntry, ValueEntry
from fullshard.checkpoint.index_json import checksum
from fullshard.checkpoint.values import from_bytes
from fullshard.errors import CheckpointError
from fullshard.layout import Box, boxes_of_range

__all__ = ["DataSource", "Needed", "Source", "copy_range", "is_one_range", "narrowed"]

_SMALL = 1 << 19  # bytes; half of a small second-level cache


@dataclass(frozen=True)
class Needed:
    """What is wanted of one piece.

    Args:
        key: Of its tensor.
        dtype: Of its tensor, by name.
        piece: Where it is.
        regions: Which parts of it are wanted, as boxes of the piece.
    """

    key: str
    dtype: str
    piece: PieceEntry
    regions: tuple[Box, ...]


class Source(abc.ABC):
    """A checkpoint's data.

    Args:
        folder: Where it is.
        index: What it has.
        verify: Whether checksums are compared.
    """

    folder: Folder
    index: Index
    verify: bool
    _open: contextlib.ExitStack  # holds the file that was read last
    _stream: tuple[str, IO[bytes]] | None
    _versions: dict[str, FileVersion | None]  # of files, when they were checked
    _small: memoryview

    def __init__(self, folder: Folder, index: Index, *, verify: bool = True) -> None:
        self.folder, self.index, self.verify = folder, index, verify
        self._open, self._stream = contextlib.ExitStack(), None
        self._versions, self._small = {}, memoryview(bytearray(_SMALL))

    @abc.abstractmethod
    def ranges(self, needed: Needed) -> Iterator[tuple[int, int]]:
        """The ranges of a piece to read so as to have its regions: first element and number of elements of each."""

    @abc.abstractmethod
    def check(self, needed: Needed, start: int, numel: int) -> None:
        """Read one of these ranges (its first element, its elements), only to see whether it can be read.

        Raises:
            CheckpointError: As :meth:`read`.
        """

    @abc.abstractmethod
    def read(self, needed: Needed, start: int, numel: int, into: torch.Tensor) -> torch.Tensor:
        """Read one of these ranges.

        A range that was checked before, in a file that has not changed since, is not compared again.

        Args:
            needed: What it is of.
            start: Its first element.
            numel: Its elements.
            into: Where to: contiguous memory of the CPU, uint8, of as many bytes. Need not be used.

        Returns:
            The elements, 1-D, of the tensor's dtype.

        Raises:
            CheckpointError: If they cannot be read, or are not what was written.
        """

    def check_file(self, name: str) -> None:
        """That a data file is as long as it should be.

        Raises:
            CheckpointError: If it is not, or not there.
        """
        found, expected = self.folder.length(name), self.index.files[name].length
        if found != expected:
            raise CheckpointError(
                f"{self.folder.where(name)} has {found} bytes, and should have {expected}: it was cut off or replaced; "
                "copy it again, or use another checkpoint"
            )
        self._versions[name] = self.folder.version(name)

    def value_bytes(self, key: str) -> bytes:
        """The bytes of a value that is no tensor, once it is sure that they can be read without running code.

        Raises:
            CheckpointError: If they are not what was written, or not safe to read.
        """
        entry = self.index.values[key]
        data = self._read_whole(key, entry)
        from_bytes(f"{self.folder.where(entry.file)}: {key}", data)
        return data

    def value(self, key: str) -> Any:
        """A value that is no tensor; see :meth:`value_bytes`."""
        return from_bytes(key, self.value_bytes(key))

    def close(self) -> None:
        """Close the file that was read last; reading opens it again."""
        self._open.close()
        self._stream = None

    def _read_whole(self, key: str, entry: PieceEntry | ValueEntry) -> bytes:
        """All bytes of an entry, compared with what there is to compare them with."""
        data = bytearray(entry.length)
        self._read_checked(key, entry, 0, memoryview(data))
        return bytes(data)

    def _read_checked(self, key: str, entry: PieceEntry | ValueEntry, offset: int, view: memoryview) -> None:
        """Fill ``view`` from byte ``offset`` of an entry on, a multiple of the block size, and compare checksums."""
        self._read_bytes(key, entry, offset, view)
        if self.verify and entry.checksums:
            for begin in range(0, len(view), self.index.block):
                self._compare(key, entry, offset + begin, checksum(view[begin : begin + self.index.block]))

    def _read_bytes(self, key: str, entry: PieceEntry | ValueEntry, offset: int, view: memoryview) -> None:
        stream = self._file(entry.file)
        where = self.folder.where(entry.file)
        try:
            stream.seek(entry.start + offset)
            read = 0
            while read < len(view):
                count = stream.readinto(view[read:])  # type: ignore[attr-defined]
                if not count:
                    end = entry.start + offset + len(view)
                    raise CheckpointError(f"{where}: {key}: the file ends before byte {end}; copy it again")
                read += count
        except OSError as error:
            raise CheckpointError(f"{where}: {key}: cannot be read: {error.strerror or error}") from error

    def _compare(self, key: str, entry: PieceEntry | ValueEntry, offset: int, found: bytes) -> None:
        """Compare the checksum of the block at byte ``offset`` of an entry."""
        number = offset // self.index.block
        if found == entry.checksums[CHECKSUM * number : CHECKSUM * (number + 1)]:
            return
        first = entry.start + offset
        end = min(first + self.index.block, entry.start + entry.length)
        raise CheckpointError(
            f"{self.folder.where(entry.file)}: {key}: bytes {first} to {end} are not those that were written; copy the "
            "file again, or use another checkpoint"
        )

    def _is_as_checked(self, name: str) -> bool:
        """Whether a file is still the one that was checked. Asking takes a millionth of a second."""
        known = self._versions.get(name)
        return known is not None and known == self.folder.version(name)

    def _file(self, name: str) -> IO[bytes]:
        if self._stream is None or self._stream[0] != name:
            self.close()
            self._stream = name, self._open.enter_context(self.folder.read(name))
        return self._stream[1]


class DataSource(Source):
    """fullshard's own data files: elements row by row, a checksum for every block."""

    _checked: set[tuple[str, int]]  # file and first byte of blocks

    def __init__(self, folder: Folder, index: Index, *, verify: bool = True) -> None:
        super().__init__(folder, index, verify=verify)
        self._checked = set()

    def check_file(self, name: str) -> None:
        """That a data file has the length, and the header, that it should.

        Raises:
            CheckpointError: If not.
        """
        super().check_file(name)
        file = self.index.files[name]
        if self.verify:
            header = self._file(name)
            header.seek(0)
            if checksum(header.read(file.header)) != file.checksum:
                raise CheckpointError(
                    f"{self.folder.where(name)}: the header is not the one that was written; copy the file again, or "
                    "use another checkpoint"
                )

    def ranges(self, needed: Needed) -> Iterator[tuple[int, int]]:
        """Blocks that the regions touch; a checksum can only be compared for a whole block."""
        sizes = needed.piece.box.sizes
        numel, step = needed.piece.box.numel, self.index.block // ITEM_SIZES[needed.dtype]
        spans = [(span_of(sizes, region), region) for region in needed.regions]
        low, high = min(span[0] for span, _ in spans), max(span[1] for span, _ in spans)
        for start in range(low // step * step, high, step):
            count = min(step, numel - start)
            if any(_touches(sizes, start, count, span, region) for span, region in spans):
                yield start, count

    def check(self, needed: Needed, start: int, numel: int) -> None:
        """See :meth:`Source.check`. Through little memory, which stays in the processor's cache: half the time."""
        size = ITEM_SIZES[needed.dtype]
        offset, end = start * size, (start + numel) * size
        digest = xxhash.xxh3_64()
        for begin in range(offset, end, _SMALL):
            view = self._small[: min(_SMALL, end - begin)]
            self._read_bytes(needed.key, needed.piece, begin, view)
            digest.update(view)
        self._compare(needed.key, needed.piece, offset, digest.digest())
        self._checked.add((needed.piece.file, needed.piece.start + offset))

    def read(self, needed: Needed, start: int, numel: int, into: torch.Tensor) -> torch.Tensor:
        """See :meth:`Source.read`; always reads into the memory given."""
        offset = start * ITEM_SIZES[needed.dtype]
        name = needed.piece.file
        if (name, needed.piece.start + offset) in self._checked and self._is_as_checked(name):
            self._read_bytes(needed.key, needed.piece, offset, bytes_of(into))
        else:
            self._read_checked(needed.key, needed.piece, offset, bytes_of(into))
        return into.view(dtype_of(needed.dtype))


def span_of(sizes: Sequence[int], region: Box) -> tuple[int, int]:
    """The shortest range of elements, counted row by row, that has all of a region in it; the region is not empty."""
    first = last = 0
    for size, offset, end in zip(sizes, region.offsets, region.ends, strict=True):
        first, last = first * size + offset, last * size + end - 1
    return first, last + 1


def is_one_range(sizes: Sequence[int], region: Box) -> bool:
    """Whether a region has every element between its first and its last."""
    low, high = span_of(sizes, region)
    return high - low == region.numel


def copy_range(flat: torch.Tensor, start: int, sizes: Sequence[int], region: Box, target: torch.Tensor) -> None:
    """Copy those elements of a range that are in a region to where they belong.

    Args:
        flat: Elements from ``start`` on, row by row, of something of shape ``sizes``; 1-D.
        start: The first one's number.
        sizes: That shape.
        region: Which part of it goes to ``target``.
        target: Gets them: of the region's sizes, on any device, of any dtype.
    """
    done = 0
    for box in boxes_of_range(sizes, start, flat.numel()):
        both = box.overlap(region) if sizes else box
        if both is not None:
            part = flat[done : done + box.numel].view(box.sizes)
            narrowed(target, both.within(region.offsets)).copy_(narrowed(part, both.within(box.offsets)))
        done += box.numel


def narrowed(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """A view of a box of a tensor."""
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        if size != tensor.size(dim):
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def _touches(sizes: Sequence[int], start: int, count: int, span: tuple[int, int], region: Box) -> bool:
    """Whether a range of elements has any of a region, which lies within ``span``."""
    if start >= span[1] or start + count <= span[0]:
        return False
    if span[1] - span[0] == region.numel:
        return True
    return any(box.overlap(region) is not None for box in boxes_of_range(sizes, start, count))
