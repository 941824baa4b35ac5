"""Read checkpoints of torch.distributed.checkpoint's own writer: ``.metadata``, a pickle, and files of ``torch.save``.

[Note: Reading a pickle without running it]
A pickle is a program: it names callables and calls them. ``.metadata`` needs a dozen names; any other is refused. Not
even torch's own classes are handed out, as a pickle can change attributes of the classes that it names: each name has a
stand-in, new for every file, that only keeps the state that it is given. What comes out is type-checked and becomes an
:class:`~fullshard.checkpoint.format.index.Index`, checked as any other. Tensors and values are read with torch's
restricted unpickler.
"""

from __future__ import annotations

import io
import os
import pickle
import posixpath
import re
import zipfile
from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from fullshard.checkpoint.format.files import Folder
from fullshard.checkpoint.format.index import ITEM_SIZES, FileEntry, Index, ShardEntry, Shards, TensorEntry, ValueEntry
from fullshard.checkpoint.format.source import ReadRequest, Source
from fullshard.checkpoint.format.values import first_line
from fullshard.errors import CheckpointError
from fullshard.layout import Region

__all__ = ["METADATA_FILE", "TorchSource", "read_metadata_file"]

METADATA_FILE = ".metadata"
_AT_ONCE = 1 << 20  # bytes

_CLASSES = "torch.distributed.checkpoint.metadata"
_KEPT = {  # classes whose instances are needed
    *((_CLASSES, name) for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties")),
    *((_CLASSES, name) for name in ("ChunkStorageMetadata", "MetadataIndex", "StorageMeta")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
_IGNORED = {  # callables whose results are not needed
    (_CLASSES, "_MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath", "Path")),
}


class TorchSource(Source):
    """Data files of torch's writer: each shard is a small file of ``torch.save``, without checksums of ours."""

    _last: tuple[ShardEntry, torch.Tensor] | None = None  # tensors are read in parts

    def ranges(self, request: ReadRequest) -> Iterator[tuple[int, int]]:
        """Yield the whole shard, which cannot be read in part."""
        yield 0, request.shard.region.numel

    def check(self, request: ReadRequest, start: int, numel: int) -> None:
        """Read and decode a shard to verify that it can be read."""
        self.read(request, start, numel, torch.empty(0, dtype=torch.uint8, device="cpu"))

    def read(self, request: ReadRequest, start: int, numel: int, into: torch.Tensor) -> torch.Tensor:
        """Return the decoded shard; the memory given is not used."""
        shard = request.shard
        if self._last is not None and self._last[0] == shard:
            return self._last[1]
        self._last = None  # freed before the next one is allocated
        flat = self._decoded(request)
        self._last = shard, flat
        return flat

    def close(self) -> None:
        """Close the file that was read last."""
        super().close()
        self._last = None

    def _read_whole(self, key: str, entry: ShardEntry | ValueEntry) -> bytes:
        """Return a file of ``torch.save``, a zip archive, after comparing the CRCs of its records; ``torch.load`` does
        not.
        """
        data = super()._read_whole(key, entry)
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                records = archive.infolist()
                compressed = any(record.compress_type != zipfile.ZIP_STORED for record in records)  # torch never does
                for record in records if self.verify and not compressed else ():
                    if record.CRC:  # without: torch.serialization.set_crc32_options(False)
                        with archive.open(record) as stream:  # which compares it at the end
                            while stream.read(_AT_ONCE):
                                pass
        except (zipfile.BadZipFile, NotImplementedError, OSError, RuntimeError, ValueError) as error:
            raise self._damaged(key, entry, first_line(error)) from error
        if compressed:
            raise self._damaged(key, entry, "compressed records")
        return data

    def _decoded(self, request: ReadRequest) -> torch.Tensor:
        data = self._read_whole(request.key, request.shard)
        try:
            found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged or hostile file may raise anything
            raise self._damaged(request.key, request.shard, first_line(error)) from error
        wanted, shown = f"{request.shard.region.sizes} {request.dtype}", _shown(found)
        if isinstance(found, torch.Tensor) and found.layout is torch.strided:
            shown = f"{tuple(found.shape)} {str(found.dtype).removeprefix('torch.')}"
        if shown != wanted:
            raise self._damaged(request.key, request.shard, f"expected a tensor of {wanted}; found {shown}")
        flat: torch.Tensor = found.detach().contiguous().view(-1)
        return flat

    def _damaged(self, key: str, entry: ShardEntry | ValueEntry, found: str) -> CheckpointError:
        return CheckpointError(
            f"{self.folder.where(entry.file)}: {key}: bytes {entry.start} to {entry.start + entry.length} cannot be "
            f"read ({found}); no code in them was run. Copy the file again, or use another checkpoint"
        )


def read_metadata_file(folder: Folder) -> Index:
    """Read the index of a folder of torch.distributed.checkpoint.

    Raises:
        CheckpointError: If it is corrupted, is no such index, or names files outside of the folder.
    """
    where = folder.where(METADATA_FILE)
    with folder.read(METADATA_FILE) as stream:
        data = stream.read()
    try:
        top = _fields(_Unpickler(io.BytesIO(data)).load(), "Metadata")
        places = _places(top.get("storage_data"))
        tensors, values = _entries(top, places)
    except _RefusedError as error:
        raise CheckpointError(
            f"{where}: {error}; no code in it was run. The file is corrupted, or was not written by "
            "torch.distributed.checkpoint's FileSystemWriter: use another checkpoint"
        ) from error
    except Exception as error:  # a damaged pickle may raise anything, with a text of any length
        raise CheckpointError(
            f"{where} cannot be read ({type(error).__name__}). The file is corrupted: use another checkpoint"
        ) from error
    names = {shard.file for tensor in tensors.values() for shard in tensor.shards}
    names |= {value.file for value in values.values()}
    files = {name: FileEntry(folder.length(name)) for name in sorted(names)}
    about = {"format": "torch.distributed.checkpoint", "version": _shown(top.get("version"))}
    return Index(where, tensors, values, files, about=about, raw=False)


class _RefusedError(Exception):
    """Something that does not belong into such a file."""


class _Restored:
    """Stands for an instance of a class of torch, and keeps the state that it is restored with."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = state


class _Unpickler(pickle.Unpickler):
    """Unpickler that makes no objects but stand-ins. See [Note: Reading a pickle without running it]."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self._names: dict[tuple[str, str], Any] = {known: type(known[1], (_Restored,), {}) for known in _KEPT}
        self._names |= {known: lambda *_: None for known in _IGNORED}
        self._names |= {("torch", "Size"): lambda sizes=(): tuple(sizes), ("collections", "OrderedDict"): lambda *_: {}}
        self._names |= {("torch", name): name for name in ITEM_SIZES}

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name in the pickle."""
        if (module, name) not in self._names:
            raise _RefusedError(f"refers to {module[:80]}.{name[:80]}, which is not allowed in it")
        return self._names[module, name]

    def persistent_load(self, pid: Any) -> NoReturn:
        """Refuse the pickle: nothing in such a file is stored elsewhere."""
        raise _RefusedError("refers to external data")


_Places = dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]]


def _places(found: Any) -> _Places:
    """Return file, first byte and length of all stored data, by key and offsets."""
    places: _Places = {}
    for index, info in _checked("storage_data", found, dict).items():
        at, place = _fields(index, "MetadataIndex"), _fields(info, "_StorageInfo")
        key, offset, name = _checked("a key", at.get("fqn"), str), at.get("offset"), place.get("relative_path")
        start, length = place.get("offset"), place.get("length")
        if not (isinstance(name, str) and type(start) is int and type(length) is int):
            raise _RefusedError(f"{_shown(key)}: found an invalid location")
        # A plain name: torch's writer has no subfolders.
        if name in ("", ".", "..") or not posixpath.basename(name) == os.path.basename(name) == name:
            raise _RefusedError(f"{_shown(key)}: found file {_shown(name)!r}, which is outside of the folder")
        if re.search(r"[:\0\\]", name):
            raise _RefusedError(f"{_shown(key)}: found file {_shown(name)!r}, which is not a name")
        if place.get("transform_descriptors"):
            raise _RefusedError(f"{_shown(key)}: stored with an extension that only torch's own reader supports")
        places[key, None if offset is None else _sizes(key, offset)] = name, start, length
    return places


def _entries(top: dict[str, Any], places: _Places) -> tuple[dict[str, TensorEntry], dict[str, ValueEntry]]:
    """Return the tensors and values of the file."""
    tensors: dict[str, TensorEntry] = {}
    values: dict[str, ValueEntry] = {}
    paths = top.get("planner_data")
    for key, entry in _checked("state_dict_metadata", top.get("state_dict_metadata"), dict).items():
        path = _path(paths.get(_checked("a key", key, str)) if isinstance(paths, dict) else None)
        if type(entry).__name__ == "BytesStorageMetadata":
            if (key, None) not in places:
                raise _RefusedError(f"{_shown(key)}: found a value without stored data")
            values[key] = ValueEntry(*places[key, None], path=path)
            continue
        fields, shards = _fields(entry, "TensorStorageMetadata", key), []
        properties = getattr(fields.get("properties"), "state", None)
        dtype = properties[0] if isinstance(properties, tuple) and properties else None
        for chunk in _checked(key, fields.get("chunks"), list):
            part = _fields(chunk, "ChunkStorageMetadata", key)
            offsets, sizes = _sizes(key, part.get("offsets")), _sizes(key, part.get("sizes"))
            if len(offsets) != len(sizes) or min((*offsets, *sizes), default=0) < 0:
                raise _RefusedError(f"{_shown(key)}: found negative sizes")
            if 0 not in sizes:
                if (key, offsets) not in places:
                    raise _RefusedError(f"{_shown(key)}: found a shard at {offsets} without stored data")
                shards.append(ShardEntry(Region(offsets, sizes), *places[key, offsets]))
        size = _sizes(key, fields.get("size"))
        try:
            found = Shards.of(size, shards)
        except ValueError as error:
            raise _RefusedError(f"{_shown(key)}: found {error}") from error
        tensors[key] = TensorEntry(_checked(f"{_shown(key)}: dtype", dtype, str), size, found, path)
    return tensors, values


def _checked(key: str, found: Any, kind: type) -> Any:
    if type(found) is not kind:
        raise _RefusedError(f"{_shown(key)}: found no {kind.__name__}, but {_shown(found)}")
    return found


def _fields(found: Any, kind: str, key: str = "the pickle") -> dict[str, Any]:
    """Return the attributes of a stand-in for an instance of that class."""
    state = found.state if isinstance(found, _Restored) and type(found).__name__ == kind else None
    if type(state) is not dict:
        raise _RefusedError(f"{_shown(key)}: found no {kind}, but {_shown(found)}")
    return state


def _sizes(key: str, found: Any) -> tuple[int, ...]:
    if not isinstance(found, (tuple, list)) or not all(type(number) is int for number in found):
        raise _RefusedError(f"{_shown(key)}: found something other than sizes")
    return tuple(found)


def _shown(found: Any) -> str:
    """Return something from a pickle as short text; never all of it: a few bytes may stand for gigabytes of text."""
    if isinstance(found, str):
        return found[:80]
    return str(found) if isinstance(found, int) and abs(found) < 1 << 64 else type(found).__name__


def _path(found: Any) -> tuple[str | int, ...]:
    steps = tuple(found) if isinstance(found, (tuple, list)) else ()
    return steps if all(type(step) in (str, int) for step in steps) else ()
