"""Read shards of tensors from data files, block by block, and verify checksums.

A :class:`Source` reads ranges of elements of a shard, and the caller copies them to their targets. :class:`DataSource`
reads fullshard's own files, :class:`~fullshard.checkpoint.format.torch_format.TorchSource` those of torch's own writer.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import torch
import xxhash

from fullshard.checkpoint.format.data_file import Directory, dtype_of, read_directory
from fullshard.checkpoint.format.files import FileVersion, Folder
from fullshard.checkpoint.format.host import bytes_of
from fullshard.checkpoint.format.index import CHECKSUM, ITEM_SIZES, Index, Shard, ShardEntry, ValueEntry
from fullshard.checkpoint.format.index_json import checksum
from fullshard.checkpoint.format.values import from_bytes
from fullshard.errors import CheckpointError
from fullshard.layout import Region, regions_of_range

__all__ = ["DataSource", "ReadRequest", "Source", "copy_range", "is_one_range", "narrowed"]

_SMALL = 1 << 19  # bytes; half of a small second-level cache


@dataclass(frozen=True)
class ReadRequest:
    """Regions of one shard to be read.

    Args:
        key: Key of the tensor.
        dtype: Name of its dtype.
        shard: Location of the shard.
        regions: Regions to read, relative to the shard.
    """

    key: str
    dtype: str
    shard: ShardEntry
    regions: tuple[Region, ...]


class Source(abc.ABC):
    """Data of a checkpoint on disk.

    Args:
        folder: Folder of the checkpoint.
        index: Its index.
        verify: Compare checksums.
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
    def ranges(self, request: ReadRequest) -> Iterator[tuple[int, int]]:
        """Yield the element ranges of a shard that cover its requested regions, each as first element and number of
        elements.
        """

    @abc.abstractmethod
    def check(self, request: ReadRequest, start: int, numel: int) -> None:
        """Read one of these ranges only to verify that it can be read.

        Raises:
            CheckpointError: If the range cannot be read, or its checksum does not match.
        """

    @abc.abstractmethod
    def read(self, request: ReadRequest, start: int, numel: int, into: torch.Tensor) -> torch.Tensor:
        """Read one of these ranges.

        A range that was checked before, in a file that has not changed since, is not verified again.

        Args:
            request: The shard and its regions.
            start: First element of the range.
            numel: Number of elements.
            into: Target, contiguous uint8 memory of the CPU of as many bytes. Need not be used.

        Returns:
            The elements, 1-D, of the tensor's dtype.

        Raises:
            CheckpointError: If they cannot be read, or their checksum does not match.
        """

    def check_file(self, name: str) -> None:
        """Raise unless a data file has the length recorded in the index.

        Raises:
            CheckpointError: If the file is missing, or has another length.
        """
        found, expected = self.folder.length(name), self.index.files[name].length
        if found != expected:
            raise CheckpointError(
                f"{self.folder.where(name)} has {found} bytes, expected {expected}: it was truncated or replaced; copy "
                "it again, or use another checkpoint"
            )
        self._versions[name] = self.folder.version(name)

    def value_bytes(self, key: str) -> bytes:
        """Return the bytes of a value, after checking that it can be deserialized without running code.

        Raises:
            CheckpointError: If the checksum does not match, or they are not safe to read.
        """
        entry = self.value_entry(key)
        data = self._read_whole(key, entry)
        from_bytes(f"{self.folder.where(entry.file)}: {key}", data)
        return data

    def value(self, key: str) -> Any:
        """Return a value that is not a tensor, read and checked by :meth:`value_bytes`."""
        return from_bytes(key, self.value_bytes(key))

    def shard_entry(self, key: str, shard: Shard) -> ShardEntry:
        """Return the place of a shard of the tensor with that key.

        Raises:
            CheckpointError: If it has to be looked up in the file, which cannot be read or does not have it.
        """
        assert isinstance(shard, ShardEntry), shard
        return shard

    def value_entry(self, key: str) -> ValueEntry:
        """Return the place of a value.

        Raises:
            CheckpointError: As for :meth:`shard_entry`.
        """
        entry = self.index.values[key]
        assert isinstance(entry, ValueEntry), entry
        return entry

    def close(self) -> None:
        """Close the file that was read last; reading opens it again."""
        self._open.close()
        self._stream = None

    def _read_whole(self, key: str, entry: ShardEntry | ValueEntry) -> bytes:
        """Return all bytes of an entry after verifying their checksums."""
        data = bytearray(entry.length)
        self._read_checked(key, entry, 0, memoryview(data))
        return bytes(data)

    def _read_checked(self, key: str, entry: ShardEntry | ValueEntry, offset: int, view: memoryview) -> None:
        """Fill ``view`` from byte ``offset`` of an entry on, a multiple of the block size, and verify checksums."""
        self._read_bytes(key, entry, offset, view)
        if self.verify and entry.checksums:
            for begin in range(0, len(view), self.index.block):
                self._compare(key, entry, offset + begin, checksum(view[begin : begin + self.index.block]))

    def _read_bytes(self, key: str, entry: ShardEntry | ValueEntry, offset: int, view: memoryview) -> None:
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

    def _compare(self, key: str, entry: ShardEntry | ValueEntry, offset: int, found: bytes) -> None:
        """Compare the checksum of the block at byte ``offset`` of an entry."""
        number = offset // self.index.block
        if found == entry.checksums[CHECKSUM * number : CHECKSUM * (number + 1)]:
            return
        first = entry.start + offset
        end = min(first + self.index.block, entry.start + entry.length)
        raise CheckpointError(
            f"{self.folder.where(entry.file)}: {key}: checksum mismatch in bytes {first} to {end}; copy the file "
            "again, or use another checkpoint"
        )

    def _is_as_checked(self, name: str) -> bool:
        """Return True if a file has not changed since it was checked. Takes about a microsecond."""
        known = self._versions.get(name)
        return known is not None and known == self.folder.version(name)

    def _file(self, name: str) -> IO[bytes]:
        if self._stream is None or self._stream[0] != name:
            self.close()
            self._stream = name, self._open.enter_context(self.folder.read(name))
        return self._stream[1]


class DataSource(Source):
    """fullshard's own data files: elements row by row, with a checksum for every block."""

    _checked: set[tuple[str, int]]  # file and first byte of blocks
    _directories: dict[str, Directory]  # of the files that were looked into; see [Note: Directory]

    def __init__(self, folder: Folder, index: Index, *, verify: bool = True) -> None:
        super().__init__(folder, index, verify=verify)
        self._checked, self._directories = set(), {}

    def check_file(self, name: str) -> None:
        """Raise unless a data file has the recorded length and header.

        Raises:
            CheckpointError: If they differ.
        """
        super().check_file(name)
        file, stream, where = self.index.files[name], self._file(name), self.folder.where(name)
        if len(file.checksum) > CHECKSUM:
            self._directories[name] = read_directory(stream, where, file, self.index.block, verify=self.verify)
        elif self.verify:  # format 1
            stream.seek(0)
            if checksum(stream.read(file.header)) != file.checksum:
                raise CheckpointError(
                    f"{where}: checksum mismatch in the header; copy the file again, or use another checkpoint"
                )

    def shard_entry(self, key: str, shard: Shard) -> ShardEntry:
        """Look up the place of a shard in the directory of its file."""
        if isinstance(shard, ShardEntry):
            return shard
        tensor = self.index.tensors[key]
        found = self._directory(shard.file).shard(key, tensor.dtype, tensor.shape, shard.region)
        return ShardEntry(shard.region, shard.file, found.start, found.length, found.checksums)

    def value_entry(self, key: str) -> ValueEntry:
        """Look up the place of a value in the directory of its file."""
        entry = self.index.values[key]
        if isinstance(entry, ValueEntry):
            return entry
        found = self._directory(entry.file).value(key)
        return ValueEntry(entry.file, found.start, found.length, found.checksums, entry.path)

    def _directory(self, name: str) -> Directory:
        if name not in self._directories:
            self.check_file(name)
        return self._directories[name]

    def ranges(self, request: ReadRequest) -> Iterator[tuple[int, int]]:
        """Yield the blocks that the regions touch; a checksum can only be verified for a whole block."""
        sizes = request.shard.region.sizes
        numel, step = request.shard.region.numel, self.index.block // ITEM_SIZES[request.dtype]
        spans = [(span_of(sizes, region), region) for region in request.regions]
        low, high = min(span[0] for span, _ in spans), max(span[1] for span, _ in spans)
        for start in range(low // step * step, high, step):
            count = min(step, numel - start)
            if any(_touches(sizes, start, count, span, region) for span, region in spans):
                yield start, count

    def check(self, request: ReadRequest, start: int, numel: int) -> None:
        """Verify the checksum of a range, through a small buffer that stays in the processor's cache: half the time."""
        size = ITEM_SIZES[request.dtype]
        offset, end = start * size, (start + numel) * size
        digest = xxhash.xxh3_64()
        for begin in range(offset, end, _SMALL):
            view = self._small[: min(_SMALL, end - begin)]
            self._read_bytes(request.key, request.shard, begin, view)
            digest.update(view)
        self._compare(request.key, request.shard, offset, digest.digest())
        self._checked.add((request.shard.file, request.shard.start + offset))

    def read(self, request: ReadRequest, start: int, numel: int, into: torch.Tensor) -> torch.Tensor:
        """Read a range into the memory given."""
        offset = start * ITEM_SIZES[request.dtype]
        name = request.shard.file
        if (name, request.shard.start + offset) in self._checked and self._is_as_checked(name):
            self._read_bytes(request.key, request.shard, offset, bytes_of(into))
        else:
            self._read_checked(request.key, request.shard, offset, bytes_of(into))
        return into.view(dtype_of(request.dtype))


def span_of(sizes: Sequence[int], region: Region) -> tuple[int, int]:
    """Return the shortest range of elements, counted row by row, that contains a region; the region is not empty."""
    first = last = 0
    for size, offset, end in zip(sizes, region.offsets, region.ends, strict=True):
        first, last = first * size + offset, last * size + end - 1
    return first, last + 1


def is_one_range(sizes: Sequence[int], region: Region) -> bool:
    """Return True if the region has every element between its first and its last."""
    low, high = span_of(sizes, region)
    return high - low == region.numel


def copy_range(flat: torch.Tensor, start: int, sizes: Sequence[int], region: Region, target: torch.Tensor) -> None:
    """Copy the elements of a range that lie in a region to ``target``.

    Args:
        flat: Elements from ``start`` on, row by row, of a tensor of shape ``sizes``; 1-D.
        start: Index of the first element.
        sizes: Shape of the tensor.
        region: Region of the tensor to copy.
        target: Tensor of the region's sizes, on any device, of any dtype.
    """
    done = 0
    for run in regions_of_range(sizes, start, flat.numel()):
        both = run.overlap(region) if sizes else run
        if both is not None:
            part = flat[done : done + run.numel].view(run.sizes)
            narrowed(target, both.relative_to(region.offsets)).copy_(narrowed(part, both.relative_to(run.offsets)))
        done += run.numel


def narrowed(tensor: torch.Tensor, run: Region) -> torch.Tensor:
    """Return a view of a region of a tensor."""
    for dim, (offset, size) in enumerate(zip(run.offsets, run.sizes, strict=True)):
        if size != tensor.size(dim):
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def _touches(sizes: Sequence[int], start: int, count: int, span: tuple[int, int], region: Region) -> bool:
    """Return True if a range of elements intersects a region that lies within ``span``."""
    if start >= span[1] or start + count <= span[0]:
        return False
    if span[1] - span[0] == region.numel:
        return True
    return any(run.overlap(region) is not None for run in regions_of_range(sizes, start, count))
