"""Read checkpoints of torch.distributed.checkpoint's own writer: ``.metadata``, a pickle, and files of ``torch.save``.

[Note: Reading a pickle without running it]
A pickle is a program: it names callables and calls them. ``.metadata`` needs a dozen names, and each has a stand-in
here that only records its arguments; any other name is rejected. The pickle creates no object of torch and can change
none: the stand-ins are new for every file. The recorded arguments are then type-checked and become an
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
from collections.abc import Iterator, Mapping
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

_METADATA = "torch.distributed.checkpoint.metadata"
_RECORDED = {  # classes whose attributes are kept
    (_METADATA, "Metadata"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
_IGNORED = {  # callables whose arguments are not needed
    (_METADATA, "_MEM_FORMAT_ENCODING"),
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

    def _damaged(self, key: str, entry: ShardEntry | ValueEntry, found: str) -> CheckpointError:
        end = entry.start + entry.length
        return CheckpointError(
            f"{self.folder.where(entry.file)}: {key}: bytes {entry.start} to {end} are corrupted ({found}); no code in "
            f"them was run. Copy the file again, or use another checkpoint"
        )

    def _decoded(self, request: ReadRequest) -> torch.Tensor:
        shard = request.shard
        data = self._read_whole(request.key, shard)
        where = f"{self.folder.where(shard.file)}: {request.key}"
        try:
            found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged or hostile file may raise anything
            raise CheckpointError(
                f"{where}: shard {shard.region} cannot be read ({first_line(error)}); no code in it was run. Copy the "
                "file again, or use another checkpoint"
            ) from error
        wanted = f"{shard.region.sizes} {request.dtype}"
        shown = _shown(found)
        if isinstance(found, torch.Tensor) and found.layout is torch.strided:
            shown = f"{tuple(found.shape)} {str(found.dtype).removeprefix('torch.')}"
        if shown != wanted:
            raise CheckpointError(f"{where}: expected a tensor of {wanted}; found {shown}. Use another checkpoint")
        flat: torch.Tensor = found.detach().contiguous().view(-1)
        return flat


def read_metadata_file(folder: Folder) -> Index:
    """Read the index of a folder of torch.distributed.checkpoint.

    Raises:
        CheckpointError: If it is corrupted, is no such index, or names files outside of the folder.
    """
    with folder.read(METADATA_FILE) as stream:
        data = stream.read()
    where = folder.where(METADATA_FILE)
    try:
        found = _Unpickler(io.BytesIO(data), where).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointError(
            f"{where} cannot be read ({type(error).__name__}: {error}). The file is corrupted: use another checkpoint"
        ) from error
    return _MetadataParser(folder, where).index(found)


class _Unpickler(pickle.Unpickler):
    """Unpickler that makes no objects but stand-ins. See [Note: Reading a pickle without running it]."""

    _where: str
    _classes: dict[tuple[str, str], Any]

    def __init__(self, stream: io.BytesIO, where: str) -> None:
        super().__init__(stream)
        self._where = where
        self._classes = {known: _recording_class(known[1]) for known in _RECORDED}

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name in the pickle."""
        known = self._classes.get((module, name))
        if known is not None:
            return known
        if (module, name) in _IGNORED:
            return lambda *_: None
        if (module, name) == ("torch", "Size"):
            return lambda sizes=(): tuple(sizes)
        if (module, name) == ("collections", "OrderedDict"):
            return lambda *_: {}
        if module == "torch" and name in ITEM_SIZES:
            return name
        raise CheckpointError(
            f"{self._where} refers to {module}.{name}, which is not allowed in it; no code was run. It was not written "
            "by torch.distributed.checkpoint's FileSystemWriter, or has been changed since: do not use it"
        )

    def persistent_load(self, pid: Any) -> NoReturn:
        """Reject the pickle: nothing in such a file is stored elsewhere."""
        raise CheckpointError(f"{self._where} refers to external data ({_shown(pid)}): do not use it")


def _recording_class(name: str) -> type:
    """Return a new class that records its attributes, as ``__reduce_ex__`` of dataclasses restores them."""

    def set_state(self: Any, state: Any) -> None:
        self.__dict__["state"] = state

    return type(name, (), {"__setstate__": set_state, "kind": name})


class _MetadataParser:
    """Builds an index from the stand-ins of an unpickled ``.metadata``."""

    _folder: Folder
    _where: str

    def __init__(self, folder: Folder, where: str) -> None:
        self._folder, self._where = folder, where

    def index(self, found: Any) -> Index:
        top = self._state("metadata", found, "Metadata")
        stored = self._stored(top.get("storage_data"))
        mappings = top.get("planner_data")
        paths = mappings if isinstance(mappings, dict) else {}
        tensors: dict[str, TensorEntry] = {}
        values: dict[str, ValueEntry] = {}
        for key, entry in self._dict("state_dict_metadata", top.get("state_dict_metadata")).items():
            self._is(key, isinstance(key, str), "a key that is not a string")
            path = _path(paths.get(key))
            if getattr(entry, "kind", None) == "BytesStorageMetadata":
                self._is(key, (key, None) in stored, "a value without stored data")
                values[key] = ValueEntry(*stored[key, None], path=path)
            else:
                tensors[key] = self._tensor(key, entry, stored, path)
        names = {shard.file for tensor in tensors.values() for shard in tensor.shards}
        names |= {value.file for value in values.values()}
        files = {name: FileEntry(self._folder.length(name)) for name in sorted(names)}
        about = {"format": "torch.distributed.checkpoint", "version": _shown(top.get("version"))}
        return Index(self._where, tensors, values, files, about=about, raw=False)

    def _stored(self, found: Any) -> dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]]:
        """Return file, first byte and length by key and offsets."""
        places: dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]] = {}
        for index, info in self._dict("storage_data", found).items():
            at = self._state("storage_data", index, "MetadataIndex")
            info = self._state("storage_data", info, "_StorageInfo")
            key, offset = at.get("fqn"), at.get("offset")
            name, start, length = info.get("relative_path"), info.get("offset"), info.get("length")
            if not (isinstance(key, str) and isinstance(name, str) and type(start) is int and type(length) is int):
                self._wrong(key, "an invalid location")
            if not _stays_inside(name):
                self._wrong(key, f"file {_shown(name)!r}, which is outside of the folder")
            if info.get("transform_descriptors"):
                raise CheckpointError(
                    f"{self._where}: {key}: stored with an extension that only torch's own reader supports: load it "
                    "with torch.distributed.checkpoint, and save it again"
                )
            places[key, None if offset is None else self._ints(key, offset)] = name, start, length
        return places

    def _tensor(self, key: str, entry: Any, stored: Mapping[Any, Any], path: tuple[str | int, ...]) -> TensorEntry:
        fields = self._state(key, entry, "TensorStorageMetadata")
        properties = getattr(fields.get("properties"), "state", None)
        dtype = properties[0] if isinstance(properties, tuple) and properties else None
        self._is(key, isinstance(dtype, str), "no dtype")
        shards = []
        for chunk in self._list(key, fields.get("chunks")):
            part = self._state(key, chunk, "ChunkStorageMetadata")
            offsets, sizes = self._ints(key, part.get("offsets")), self._ints(key, part.get("sizes"))
            if 0 in sizes:
                continue
            self._is(key, (key, offsets) in stored, f"a shard at {offsets} without stored data")
            self._is(key, len(offsets) == len(sizes) and min((*offsets, *sizes), default=0) >= 0, "negative sizes")
            shards.append(ShardEntry(Region(offsets, sizes), *stored[key, offsets]))
        shape = self._ints(key, fields.get("size"))
        try:
            return TensorEntry(str(dtype), shape, Shards.of(shape, shards), path)
        except ValueError as error:
            self._wrong(key, str(error))

    def _wrong(self, key: Any, found: str) -> NoReturn:
        raise CheckpointError(
            f"{self._where}: {_shown(key)}: found {found}. The file is corrupted, or was not written by "
            "torch.distributed.checkpoint: use another checkpoint"
        )

    def _is(self, key: Any, good: bool, found: str) -> None:
        if not good:
            self._wrong(key, found)

    def _state(self, key: str, found: Any, kind: str) -> dict[str, Any]:
        state = getattr(found, "state", None)
        self._is(key, getattr(found, "kind", None) == kind and isinstance(state, dict), f"no {kind}")
        assert isinstance(state, dict)
        return state

    def _dict(self, key: str, found: Any) -> dict[Any, Any]:
        self._is(key, isinstance(found, dict), f"no dictionary, but {type(found).__name__}")
        assert isinstance(found, dict)
        return found

    def _list(self, key: str, found: Any) -> list[Any]:
        self._is(key, isinstance(found, list), f"no list, but {type(found).__name__}")
        assert isinstance(found, list)
        return found

    def _ints(self, key: str, found: Any) -> tuple[int, ...]:
        good = isinstance(found, (tuple, list)) and all(type(number) is int for number in found)
        self._is(key, good, "something other than sizes")
        return tuple(found)


def _stays_inside(name: str) -> bool:
    """Return True if a relative path names a file of the folder; torch's writer has no subfolders."""
    plain = posixpath.basename(name) == name and os.path.basename(name) == name and not re.search(r"[:\0\\]", name)
    return plain and name not in ("", ".", "..")


def _shown(found: Any) -> str:
    """Return something from a pickle as short text; never all of it: a few bytes may stand for gigabytes of text."""
    return str(found)[:80] if isinstance(found, (str, int)) else type(found).__name__


def _path(found: Any) -> tuple[str | int, ...]:
    steps = tuple(found) if isinstance(found, (tuple, list)) else ()
    return steps if all(type(step) in (str, int) for step in steps) else ()
