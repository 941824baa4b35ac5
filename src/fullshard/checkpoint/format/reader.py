"""Read shards of tensors, and values, from the files of a checkpoint.

[Note: Checked before anything changes]
A checksum mismatch halfway through a load would leave a model that is part old, part new. So every rank first reads
everything that it needs and compares it with its checksums (``CheckpointReader.check``); then the ranks tell each
other whether they have succeeded; only then are targets written (``CheckpointReader.fill``).

A local checkpoint is read a second time for that: it is in the page cache by then, and a copy of our own costs more
than it saves (measured: 200 MB per rank on two ranks, 0.38 s with a copy, 0.20 s without). Data behind a URL, or that
have to be decoded (torch's format), are kept up to a limit; beyond it, they are read and compared again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

import torch
import xxhash

from fullshard.checkpoint.format.data_file import DataEntry, Directory, dtype_of, read_directory
from fullshard.checkpoint.format.files import FileVersion, Folder
from fullshard.checkpoint.format.host import bytes_of
from fullshard.checkpoint.format.index import BLOCK, CHECKSUM, INDEX_FILE, ITEM_SIZES, FilePlace, Index
from fullshard.checkpoint.format.index_json import checksum, from_json
from fullshard.checkpoint.format.torch_format import METADATA_FILE, decode_shard, read_metadata
from fullshard.checkpoint.format.values import from_bytes
from fullshard.engine.parameters.tensor_shards import TensorShard
from fullshard.errors import CheckpointError
from fullshard.layout import Region, regions_of_range
from fullshard.memory import host_buffer
from fullshard.messages import clipped

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CheckpointReader", "ShardRead"]

_KEPT = 1 << 30  # bytes
_SMALL = 1 << 19  # bytes; half of a small second-level cache


@dataclass
class ShardRead:
    """A stored shard, and the memory for each of its regions that is wanted.

    Args:
        key: Key of the tensor.
        dtype: Name of its dtype.
        region: Region of the stored shard.
        place: Its bytes.
        targets: Regions relative to the shard, each with memory of its sizes, on any device and of any dtype.
    """

    key: str
    dtype: str
    region: Region
    place: FilePlace
    targets: list[tuple[Region, torch.Tensor]] = field(default_factory=list)

    @property
    def item_size(self) -> int:
        """Bytes per element."""
        return ITEM_SIZES[self.dtype]


class CheckpointReader:
    """Reads a checkpoint; made by ``open``, and a context manager. Only the blocks that are needed are read.

    Args:
        folder: Folder of the checkpoint.
        index: Its index.
        identity: Checksum of the index, as it is in its file; equal on ranks that read the same save.
    """

    folder: Folder
    index: Index
    identity: bytes
    _open: contextlib.ExitStack  # holds the file that was read last
    _stream: tuple[str, IO[bytes]] | None
    _directories: dict[str, Directory]  # of the files that were looked into; see [Note: Directory]
    _versions: dict[str, FileVersion | None]  # of these files, when they were checked
    _checked: dict[tuple[str, int], torch.Tensor | None]  # by file and first byte: blocks, with those that are kept
    _kept_bytes: int
    _checksum_buffer: memoryview
    _buffer: torch.Tensor  # for blocks that cannot be read in place
    _decoded: tuple[FilePlace, torch.Tensor] | None  # the shard of torch's format that was read last

    def __init__(self, folder: Folder, index: Index, identity: bytes) -> None:
        self.folder, self.index, self.identity = folder, index, identity
        self._open, self._stream = contextlib.ExitStack(), None
        self._directories, self._versions = {}, {}
        self._checked, self._kept_bytes, self._decoded = {}, 0, None
        self._checksum_buffer, self._buffer = memoryview(bytearray(_SMALL)), host_buffer(0, torch.uint8, pin=False)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open the checkpoint in a folder, of fullshard's format or of torch.distributed.checkpoint's.

        Args:
            path: Local path, or URL that fsspec knows.

        Raises:
            CheckpointError: If there is no checkpoint, or its index is corrupted.
        """
        folder = Folder(path)
        for name in (INDEX_FILE, METADATA_FILE):
            if folder.exists(name):
                data = folder.read_index(name)
                own = name == INDEX_FILE
                index = from_json(data, folder.where(name)) if own else read_metadata(data, folder)
                return cls(folder, index, checksum(data))
        names = folder.names()
        found = f"found {', '.join(names[:5])}{' ...' * (len(names) > 5)}" if names else "it is empty or missing"
        raise CheckpointError(
            f"{folder.path} has no checkpoint: {found}, but neither {INDEX_FILE} (fullshard) nor {METADATA_FILE} "
            "(torch.distributed.checkpoint). Pass the folder that was saved to; an interrupted first save leaves no "
            "checkpoint"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def value(self, key: str) -> Any:
        """Return a value that is not a tensor. Runs no code from the file.

        Raises:
            CheckpointError: If its checksum does not match, or it is not safe to read.
        """
        place = self._place(key, None, self.index.values[key])
        return from_bytes(f"{self.folder.where(place.file)}: {clipped(key)}", self._read_whole(key, place))

    def find(self, key: str, targets: Iterable[TensorShard]) -> list[ShardRead]:
        """Return the stored shards of a tensor that have elements of the targets' regions.

        Raises:
            CheckpointError: If one of their files is missing or truncated, or has a damaged header.
        """
        key = self.index.aliases.get(key, key)
        reads: dict[Region, ShardRead] = {}
        for region, local in targets:
            for stored, file in self.index.shards(key, region):
                if stored not in reads:
                    place = self._place(key, stored, file)
                    reads[stored] = ShardRead(key, self.index.tensors[key].dtype, stored, place)
                both = stored.overlap(region)
                assert both is not None
                target = _part(local.detach(), both.relative_to(region.offsets))
                reads[stored].targets.append((both.relative_to(stored.offsets), target))
        return list(reads.values())

    def check(self, targets: Mapping[str, Iterable[TensorShard]]) -> list[ShardRead]:
        """Read and verify everything that the targets need, by key, without changing them.

        See [Note: Checked before anything changes].

        Returns:
            Reads for ``fill``, ordered by file and place.

        Raises:
            CheckpointError: If a file is missing, truncated or changed.
        """
        reads = [read for key, shards in targets.items() for read in self.find(key, shards)]
        reads.sort(key=lambda read: read.place[:2])
        limit = 0 if self.folder.is_local and self.index.own_format else _KEPT
        for read in reads:
            for start, numel in self._blocks(read):
                nbytes, flat = numel * read.item_size, None
                if self._kept_bytes + nbytes <= limit:
                    flat = self._read_block(read, start, numel, host_buffer(nbytes, torch.uint8, pin=False))
                    self._kept_bytes += nbytes
                else:
                    self._verify_block(read, start, numel)
                self._checked[self._block_key(read, start)] = flat
        return reads

    def verify_shard(self, read: ShardRead) -> None:
        """Read all of a shard and verify it.

        Raises:
            CheckpointError: If it cannot be read, or a checksum does not match.
        """
        for start, numel in self._blocks(read):
            self._verify_block(read, start, numel)

    def fill(self, reads: Iterable[ShardRead]) -> None:
        """Read shards into their targets. What was not checked before, or has changed since, is verified.

        Raises:
            CheckpointError: If something cannot be read, or a checksum does not match.
        """
        for read in reads:
            for start, numel in self._blocks(read):
                flat = self._checked.get(self._block_key(read, start))
                if flat is None:
                    memory = self._target_memory(read, start, numel)
                    into = self._reused(read, numel) if memory is None else memory
                    flat = self._read_block(read, start, numel, into)
                    if memory is not None:
                        continue
                for region, target in read.targets:
                    _copy_range(flat, start, read.region.sizes, region, target)

    def check_file(self, name: str) -> None:
        """Raise unless a data file has the length that the index says, and the header.

        Raises:
            CheckpointError: If it is missing, truncated or changed.
        """
        entry, where = self.index.files[name], self.folder.where(name)
        found = self.folder.length(name)
        if found != entry.length:
            raise CheckpointError(
                f"{where} has {found} bytes, expected {entry.length}: it was truncated or replaced; copy "
                "it again, or use another checkpoint"
            )
        version = self.folder.version(name)
        if self.index.own_format:
            self._directories[name] = read_directory(self._file(name), where, name, entry, self.index.block)
        self._versions[name] = version

    def close(self) -> None:
        """Free what was kept, and close the file that was read last; reading opens it again."""
        self._open.close()
        self._stream = self._decoded = None
        self._checked, self._kept_bytes = {}, 0

    # ---------------------------------------------------------------- places

    def _place(self, key: str, region: Region | None, file: str) -> FilePlace:
        """Return the bytes of a shard, or of a value (region None), in a file that is checked first."""
        if file not in self._versions:
            self.check_file(file)
        if self.index.places is not None:
            return self.index.places[key, region]
        entry = DataEntry(key, "uint8", ())
        if region is not None:
            tensor = self.index.tensors[key]
            entry = DataEntry.of_shard(key, tensor.dtype, tensor.shape, region)
        if entry.name not in self._directories[file]:
            raise CheckpointError(
                f"{self.folder.where(file)}: {clipped(key)}: not in this file, although the index says so; copy the "
                "file again, or use another checkpoint"
            )
        place, described = self._directories[file][entry.name]
        if region is not None and (described != entry.described or place.length != entry.nbytes):
            raise CheckpointError(
                f"{self.folder.where(file)}: {clipped(key)}: expected shard {region} of {entry.dtype}; found "
                f"{clipped(described[0])} of shape {clipped(described[1])} in {place.length} bytes: this is not the "
                "file that the index describes; use another checkpoint"
            )
        return place

    # ---------------------------------------------------------------- blocks

    def _block_key(self, read: ShardRead, start: int) -> tuple[str, int]:
        return read.place.file, read.place.start + start * read.item_size

    def _blocks(self, read: ShardRead) -> Iterator[tuple[int, int]]:
        """Yield the blocks that have elements of the wanted regions, each as first element and number of elements.

        A checksum can only be verified for a whole block; a shard of torch's format can only be read as a whole.
        """
        sizes, numel = read.region.sizes, read.region.numel
        if not self.index.own_format:
            yield 0, numel
            return
        step = self.index.block // read.item_size
        spans = [(_span_of(sizes, region), region) for region, _ in read.targets]
        low, high = min(span[0] for span, _ in spans), max(span[1] for span, _ in spans)
        for start in range(low // step * step, high, step):
            count = min(step, numel - start)
            if any(_touches(sizes, start, count, span, region) for span, region in spans):
                yield start, count

    def _target_memory(self, read: ShardRead, start: int, numel: int) -> torch.Tensor | None:
        """Return the bytes of the target that a block can be read straight into: the only one, and it needs all of the
        block; None if there is none.
        """
        (region, target), *others = read.targets
        low, high = _span_of(read.region.sizes, region)
        direct = (
            not others
            and self.index.own_format
            and target.device.type == "cpu"
            and target.dtype == dtype_of(read.dtype)
            and target.is_contiguous()
            and high - low == region.numel
            and low <= start
            and start + numel <= high
        )
        if not direct:
            return None
        first = (start - low) * read.item_size
        return target.view(-1).view(torch.uint8)[first : first + numel * read.item_size]

    def _reused(self, read: ShardRead, numel: int) -> torch.Tensor:
        """Return host memory for a block that is valid until the next call."""
        nbytes = numel * read.item_size if self.index.own_format else 0
        pinned = any(target.device.type != "cpu" for _, target in read.targets)
        if self._buffer.numel() < nbytes or (pinned and not self._buffer.is_pinned()):
            self._buffer = host_buffer(max(nbytes, BLOCK), torch.uint8, pin=pinned)
        return self._buffer[:nbytes]

    def _read_block(self, read: ShardRead, start: int, numel: int, into: torch.Tensor) -> torch.Tensor:
        """Return the elements of a block, 1-D. Those of fullshard's own format are read into ``into``, uint8 memory."""
        if not self.index.own_format:
            if self._decoded is None or self._decoded[0] != read.place:
                self._decoded = None  # freed before the next one is allocated
                where, data = self._where(read.key, read.place), self._read_whole(read.key, read.place)
                self._decoded = read.place, decode_shard(where, data, read.region.sizes, read.dtype)
            return self._decoded[1]
        view, offset, name = bytes_of(into), start * read.item_size, read.place.file
        self._read_bytes(read.key, read.place, offset, view)
        version = self._versions[name]
        if self._block_key(read, start) not in self._checked or version is None or version != self.folder.version(name):
            self._compare(read.key, read.place, offset, checksum(view))
        return into.view(dtype_of(read.dtype))

    def _verify_block(self, read: ShardRead, start: int, numel: int) -> None:
        """Verify the checksum of a block, through a small buffer that stays in the processor's cache: half the time."""
        if not self.index.own_format:
            self._read_block(read, start, numel, self._buffer)
            return
        offset, end = start * read.item_size, (start + numel) * read.item_size
        digest = xxhash.xxh3_64()
        for begin in range(offset, end, _SMALL):
            view = self._checksum_buffer[: min(_SMALL, end - begin)]
            self._read_bytes(read.key, read.place, begin, view)
            digest.update(view)
        self._compare(read.key, read.place, offset, digest.digest())

    # ---------------------------------------------------------------- bytes

    def _read_whole(self, key: str, place: FilePlace) -> bytes:
        """Return all bytes of a shard or value after verifying them."""
        data = bytearray(place.length)
        view = memoryview(data)
        self._read_bytes(key, place, 0, view)
        if self.index.own_format:
            for begin in range(0, len(view), self.index.block):
                self._compare(key, place, begin, checksum(view[begin : begin + self.index.block]))
        return bytes(data)

    def _read_bytes(self, key: str, place: FilePlace, offset: int, view: memoryview) -> None:
        stream, where = self._file(place.file), self.folder.where(place.file)
        try:
            stream.seek(place.start + offset)
            read = 0
            while read < len(view):
                count = stream.readinto(view[read:])  # type: ignore[attr-defined]
                if not count:
                    end = place.start + offset + len(view)
                    raise CheckpointError(f"{where}: {clipped(key)}: the file ends before byte {end}; copy it again")
                read += count
        except OSError as error:
            raise CheckpointError(f"{where}: {clipped(key)}: cannot be read: {error.strerror or error}") from error

    def _compare(self, key: str, place: FilePlace, offset: int, found: bytes) -> None:
        """Compare the checksum of the block at byte ``offset`` of a shard or value."""
        number = offset // self.index.block
        if found == place.checksums[CHECKSUM * number : CHECKSUM * (number + 1)]:
            return
        first = place.start + offset
        end = min(first + self.index.block, place.start + place.length)
        raise CheckpointError(
            f"{self.folder.where(place.file)}: {clipped(key)}: checksum mismatch in bytes {first} to {end}; copy the "
            "file again, or use another checkpoint"
        )

    def _where(self, key: str, place: FilePlace) -> str:
        return f"{self.folder.where(place.file)}: {clipped(key)}: bytes {place.start} to {place.start + place.length}"

    def _file(self, name: str) -> IO[bytes]:
        if self._stream is None or self._stream[0] != name:
            self._open.close()
            self._stream = name, self._open.enter_context(self.folder.read(name))
        return self._stream[1]


def _span_of(sizes: Sequence[int], region: Region) -> tuple[int, int]:
    """Return the shortest range of elements, counted row by row, that contains a region; the region is not empty."""
    first = last = 0
    for size, offset, end in zip(sizes, region.offsets, region.ends, strict=True):
        first, last = first * size + offset, last * size + end - 1
    return first, last + 1


def _copy_range(flat: torch.Tensor, start: int, sizes: Sequence[int], region: Region, target: torch.Tensor) -> None:
    """Copy the elements of a region of a tensor of shape ``sizes`` that are in ``flat``, its elements from ``start`` on
    row by row, to ``target``, which has the region's sizes.
    """
    done = 0
    for run in regions_of_range(sizes, start, flat.numel()):
        both = run.overlap(region)
        if both is not None:
            part = flat[done : done + run.numel].view(run.sizes)
            _part(target, both.relative_to(region.offsets)).copy_(_part(part, both.relative_to(run.offsets)))
        done += run.numel


def _part(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """Return a view of a region of a tensor."""
    return tensor[tuple(map(slice, region.offsets, region.ends))]


def _touches(sizes: Sequence[int], start: int, count: int, span: tuple[int, int], region: Region) -> bool:
    """Return True if a range of elements intersects a region that lies within ``span``."""
    if start >= span[1] or start + count <= span[0]:
        return False
    if span[1] - span[0] == region.numel:
        return True
    return any(run.overlap(region) is not None for run in regions_of_range(sizes, start, count))
