"""Checkpoints of torch.distributed.checkpoint's own writer: ``.metadata``, a pickle, and files of ``torch.save``.

[Note: Reading a pickle without running it]
A pickle is a program: it names callables and calls them. ``.metadata`` needs a dozen of names, and for each there is a
stand-in here that only records what it is called with; any other name is refused. No object of torch is made from the
pickle, and none can be changed by it: the stand-ins are new for every file. What they recorded is then taken apart
with every type checked, and becomes an :class:`~fullshard.checkpoint.index.Index`, checked as any other.
Tensors and values are read with torch's restricted unpickler.
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

from fullshard.checkpoint.files import Folder
from fullshard.checkpoint.index import ITEM_SIZES, FileEntry, Index, PieceEntry, TensorEntry, ValueEntry
from fullshard.checkpoint.source import Needed, Source
from fullshard.checkpoint.values import first_line
from fullshard.errors import CheckpointError
from fullshard.layout import Box

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
_IGNORED = {  # what is called, but says nothing that is needed
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath", "Path")),
}


class TorchSource(Source):
    """Reads what torch's writer wrote: each piece is a small file of ``torch.save``, without checksums of ours."""

    _last: tuple[PieceEntry, torch.Tensor] | None = None  # whoever reads a tensor in parts asks for a piece repeatedly

    def ranges(self, needed: Needed) -> Iterator[tuple[int, int]]:
        """All of the piece: it can only be read as a whole."""
        yield 0, needed.piece.box.numel

    def check(self, needed: Needed, start: int, numel: int) -> None:
        """See :meth:`Source.check`."""
        self.read(needed, start, numel, torch.empty(0, dtype=torch.uint8, device="cpu"))

    def read(self, needed: Needed, start: int, numel: int, into: torch.Tensor) -> torch.Tensor:
        """See :meth:`Source.read`; does not use the memory given."""
        piece = needed.piece
        if self._last is not None and self._last[0] == piece:
            return self._last[1]
        self._last = None  # before there is a second one
        flat = self._decoded(needed)
        self._last = piece, flat
        return flat

    def close(self) -> None:
        """Close the file that was read last."""
        super().close()
        self._last = None

    def _read_whole(self, key: str, entry: PieceEntry | ValueEntry) -> bytes:
        """What ``torch.save`` wrote is a zip archive with CRCs of its records; ``torch.load`` does not compare them."""
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

    def _damaged(self, key: str, entry: PieceEntry | ValueEntry, found: str) -> CheckpointError:
        end = entry.start + entry.length
        return CheckpointError(
            f"{self.folder.where(entry.file)}: {key}: bytes {entry.start} to {end} are not what torch.save wrote "
            f"({found}); nothing in them was run. Copy the file again, or use another checkpoint"
        )

    def _decoded(self, needed: Needed) -> torch.Tensor:
        piece = needed.piece
        data = self._read_whole(needed.key, piece)
        where = f"{self.folder.where(piece.file)}: {needed.key}"
        try:
            found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged or hostile file may raise anything
            raise CheckpointError(
                f"{where}: piece {piece.box} cannot be read ({first_line(error)}); nothing in it was run. Copy the "
                "file again, or use another checkpoint"
            ) from error
        wanted = f"{piece.box.sizes} {needed.dtype}"
        shown = _shown(found)
        if isinstance(found, torch.Tensor) and found.layout is torch.strided:
            shown = f"{tuple(found.shape)} {str(found.dtype).removeprefix('torch.')}"
        if shown != wanted:
            raise CheckpointError(f"{where}: expected a tensor of {wanted}; found {shown}. Use another checkpoint")
        flat: torch.Tensor = found.detach().contiguous().view(-1)
        return flat


def read_metadata_file(folder: Folder) -> Index:
    """The index that a folder of torch.distributed.checkpoint has.

    Raises:
        CheckpointError: If it is damaged, contains anything else than such an index, or leads out of the folder.
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
            f"{where} cannot be read ({type(error).__name__}: {error}). The file is damaged: use another checkpoint"
        ) from error
    return _Reading(folder, where).index(found)


class _Unpickler(pickle.Unpickler):
    """See [Note: Reading a pickle without running it]."""

    _where: str
    _classes: dict[tuple[str, str], Any]

    def __init__(self, stream: io.BytesIO, where: str) -> None:
        super().__init__(stream)
        self._where = where
        self._classes = {known: _recording(known[1]) for known in _RECORDED}

    def find_class(self, module: str, name: str) -> Any:
        """A stand-in for a name in the pickle."""
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
            f"{self._where} refers to {module}.{name}, which has no place in it; nothing was run. It was not written "
            "by torch.distributed.checkpoint's file system writer, or has been changed since: do not use it"
        )

    def persistent_load(self, pid: Any) -> NoReturn:
        """Refused: nothing in such a file is stored elsewhere."""
        raise CheckpointError(f"{self._where} refers to data elsewhere ({_shown(pid)}): do not use it")


def _recording(name: str) -> type:
    """A new class that takes any attributes, as ``__reduce_ex__`` of dataclasses restores them."""

    def set_state(self: Any, state: Any) -> None:
        self.__dict__["state"] = state

    return type(name, (), {"__setstate__": set_state, "kind": name})


class _Reading:
    """Takes apart what the stand-ins recorded."""

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
            self._is(key, isinstance(key, str), "a key that is no text")
            path = _path(paths.get(key))
            if getattr(entry, "kind", None) == "BytesStorageMetadata":
                self._is(key, (key, None) in stored, "a value of which nothing is stored")
                values[key] = ValueEntry(*stored[key, None], path=path)
            else:
                tensors[key] = self._tensor(key, entry, stored, path)
        names = {piece.file for tensor in tensors.values() for piece in tensor.pieces}
        names |= {value.file for value in values.values()}
        files = {name: FileEntry(self._folder.length(name)) for name in sorted(names)}
        about = {"format": "torch.distributed.checkpoint", "version": _shown(top.get("version"))}
        return Index(self._where, tensors, values, files, about=about, raw=False)

    def _stored(self, found: Any) -> dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]]:
        """File, first byte and bytes, by key and offsets."""
        places: dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]] = {}
        for index, info in self._dict("storage_data", found).items():
            at = self._state("storage_data", index, "MetadataIndex")
            info = self._state("storage_data", info, "_StorageInfo")
            key, offset = at.get("fqn"), at.get("offset")
            name, start, length = info.get("relative_path"), info.get("offset"), info.get("length")
            if not (isinstance(key, str) and isinstance(name, str) and type(start) is int and type(length) is int):
                self._wrong(key, "a place that is none")
            if not _stays_inside(name):
                self._wrong(key, f"a file {_shown(name)}, which is not one of the folder")
            if info.get("transform_descriptors"):
                raise CheckpointError(
                    f"{self._where}: {key}: stored with an extension that only torch's own reader knows: load it with "
                    "torch.distributed.checkpoint, and save it again"
                )
            places[key, None if offset is None else self._ints(key, offset)] = name, start, length
        return places

    def _tensor(self, key: str, entry: Any, stored: Mapping[Any, Any], path: tuple[str | int, ...]) -> TensorEntry:
        fields = self._state(key, entry, "TensorStorageMetadata")
        properties = getattr(fields.get("properties"), "state", None)
        dtype = properties[0] if isinstance(properties, tuple) and properties else None
        self._is(key, isinstance(dtype, str), "no dtype")
        pieces = []
        for chunk in self._list(key, fields.get("chunks")):
            part = self._state(key, chunk, "ChunkStorageMetadata")
            offsets, sizes = self._ints(key, part.get("offsets")), self._ints(key, part.get("sizes"))
            if 0 in sizes:
                continue
            self._is(key, (key, offsets) in stored, f"a piece at {offsets} of which nothing is stored")
            self._is(key, len(offsets) == len(sizes) and min((*offsets, *sizes), default=0) >= 0, "negative sizes")
            pieces.append(PieceEntry(Box(offsets, sizes), *stored[key, offsets]))
        return TensorEntry(str(dtype), self._ints(key, fields.get("size")), tuple(pieces), path)

    def _wrong(self, key: Any, found: str) -> NoReturn:
        raise CheckpointError(
            f"{self._where}: {_shown(key)}: found {found}. The file is damaged, or was made by something else than "
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
        self._is(key, good, "something else than sizes")
        return tuple(found)


def _stays_inside(name: str) -> bool:
    """Whether a relative path leads to a file of the folder; torch's writer has no folders below."""
    plain = posixpath.basename(name) == name and os.path.basename(name) == name and not re.search(r"[:\0\\]", name)
    return plain and name not in ("", ".", "..")


def _shown(found: Any) -> str:
    """Something from a pickle in a few words; never all of it: a few bytes may stand for gigabytes of text."""
    return str(found)[:80] if isinstance(found, (str, int)) else type(found).__name__


def _path(found: Any) -> tuple[str | int, ...]:
    steps = tuple(found) if isinstance(found, (tuple, list)) else ()
    return steps if all(type(step) in (str, int) for step in steps) else ()
