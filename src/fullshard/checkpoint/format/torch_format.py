"""Read checkpoints of torch.distributed.checkpoint's own writer: ``.metadata``, a pickle, and files of ``torch.save``.

[Note: Reading a pickle without running it]
A pickle is a program: it names callables and calls them. ``.metadata`` needs a dozen names; any other is refused. Not
even torch's own classes are handed out, as a pickle can change attributes of the classes that it names: each name has a
stand-in, new for every file, that only keeps the state that it is given. What comes out is type-checked and becomes an
``Index``, checked as any other. Tensors and values are read with torch's
restricted unpickler.
"""

from __future__ import annotations

import contextlib
import io
import operator
import pickle
import re
import zipfile
from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from fullshard.checkpoint.format.files import Folder
from fullshard.checkpoint.format.index import ITEM_SIZES, MOST_DIMS, FileEntry, FilePlace, Index, TensorEntry, table_of
from fullshard.checkpoint.format.values import first_line
from fullshard.errors import CheckpointError
from fullshard.layout import Region

__all__ = ["METADATA_FILE", "check_archive", "decode_shard", "read_metadata_file"]

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


def check_archive(where: str, data: bytes | bytearray) -> None:
    """Compare the CRCs of the records of a file of ``torch.save``, a zip archive; ``torch.load`` does not.

    Raises:
        CheckpointError: If it is damaged, or compressed, which torch never does.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            records = archive.infolist()
            if any(record.compress_type != zipfile.ZIP_STORED for record in records):
                raise ValueError("compressed records")
            for record in records:
                if record.CRC:  # without: torch.serialization.set_crc32_options(False)
                    with archive.open(record) as stream:  # which compares it at the end
                        while stream.read(_AT_ONCE):
                            pass
    except (zipfile.BadZipFile, NotImplementedError, OSError, RuntimeError, ValueError) as error:
        raise _damaged(where, first_line(error)) from error


def decode_shard(where: str, data: bytes, sizes: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Return the elements of a shard from a file of ``torch.save``, 1-D, without running code from it.

    Raises:
        CheckpointError: If it is no tensor of these sizes and this dtype.
    """
    try:
        found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged or hostile file may raise anything
        raise _damaged(where, first_line(error)) from error
    wanted, shown = f"{sizes} {dtype}", _shown(found)
    if isinstance(found, torch.Tensor) and found.layout is torch.strided:
        shown = f"{tuple(found.shape)} {str(found.dtype).removeprefix('torch.')}"
    if shown != wanted:
        raise _damaged(where, f"expected a tensor of {wanted}; found {shown}")
    flat: torch.Tensor = found.detach().contiguous().view(-1)
    return flat


def _damaged(where: str, found: str) -> CheckpointError:
    return CheckpointError(
        f"{where} cannot be read ({found}); no code in it was run. Copy the file again, or use another checkpoint"
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
        top = _Unpickler(io.BytesIO(data)).load().state
        tensors, places = _contents(top["state_dict_metadata"], _stored(top["storage_data"]))
        names = sorted({place.file for place in places.values()})
        regions, numbers = table_of(tensors, names, places)
        return Index(
            where,
            tensors,
            regions,
            numbers,
            values={key: place.file for (key, region), place in places.items() if region is None},
            files={name: FileEntry(folder.length(name)) for name in names},
            about={"format": "torch.distributed.checkpoint", "version": _shown(top.get("version"))},
            places=places,
            own_format=False,
        )
    except CheckpointError:
        raise
    except _RefusedError as error:
        raise CheckpointError(
            f"{where}: {error}; no code in it was run. The file is corrupted, or was not written by "
            "torch.distributed.checkpoint's FileSystemWriter: use another checkpoint"
        ) from error
    except Exception as error:  # a damaged pickle may raise anything, with a text of any length
        raise CheckpointError(
            f"{where} cannot be read ({type(error).__name__}). The file is corrupted: use another checkpoint"
        ) from error


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
            raise _RefusedError(f"refers to {module[:80]}.{name[:80]}, which is not allowed")
        return self._names[module, name]

    def persistent_load(self, pid: Any) -> NoReturn:
        """Refuse the pickle: nothing in such a file is stored elsewhere."""
        raise _RefusedError("refers to external data")


_Stored = dict[tuple[str, tuple[int, ...] | None], FilePlace]


def _stored(storage_data: Any) -> _Stored:
    """Return the places of all stored data, by key and offsets."""
    stored: _Stored = {}
    for index, info in storage_data.items():
        key, offset, place = index.state["fqn"], index.state.get("offset"), info.state
        with _refused_with(key):
            name = place["relative_path"]
            # A plain name: torch's writer has no subfolders.
            if not isinstance(name, str) or not re.fullmatch(r"[^/\\:\0]+", name) or name in (".", ".."):
                raise _RefusedError(f"found file {_shown(name)!r}, which is outside of the folder")
            if place.get("transform_descriptors"):
                raise _RefusedError("stored with an extension that only torch's own reader supports")
            at = None if offset is None else _numbers(offset)
            stored[key, at] = FilePlace(name, operator.index(place["offset"]), operator.index(place["length"]))
    return stored


def _contents(
    state_dict_metadata: Any, stored: _Stored
) -> tuple[dict[str, TensorEntry], dict[tuple[str, Region | None], FilePlace]]:
    """Return the tensors of the file, and the places of all shards and values."""
    tensors: dict[str, TensorEntry] = {}
    places: dict[tuple[str, Region | None], FilePlace] = {}
    for key, entry in state_dict_metadata.items():
        with _refused_with(key):
            if not isinstance(key, str):
                raise _RefusedError("found no key")
            if type(entry).__name__ == "BytesStorageMetadata":
                places[key, None] = stored[key, None]
                continue
            fields = entry.state
            dtype = fields["properties"].state[0]
            if type(dtype) is not str:  # nested tuples take exponential time to compare or to print
                raise _RefusedError(f"dtype {_shown(dtype)}")
            tensors[key] = TensorEntry(dtype, _numbers(fields["size"]))
            for chunk in fields["chunks"]:
                region = Region(_numbers(chunk.state["offsets"]), _numbers(chunk.state["sizes"]))
                if region.numel:
                    places[key, region] = stored[key, region.offsets]
    return tensors, places


@contextlib.contextmanager
def _refused_with(key: Any) -> Iterator[None]:
    """Name the key in errors of the block, which may be any: nothing in the pickle has to be what it should be."""
    try:
        yield
    except _RefusedError as error:
        raise _RefusedError(f"{_shown(key)}: {error}") from error
    except Exception as error:
        raise _RefusedError(f"{_shown(key)}: {_shown(str(error))} ({type(error).__name__})") from error


def _numbers(found: Any) -> tuple[int, ...]:
    """Return a few integers; TypeError if they are something else."""
    if not isinstance(found, (tuple, list)) or len(found) > MOST_DIMS:
        raise TypeError(f"found {_shown(found)} in place of sizes")
    return tuple(map(operator.index, found))


def _shown(found: Any) -> str:
    """Return something from a pickle as short text; never all of it: a few bytes may stand for gigabytes of text."""
    if isinstance(found, str):
        return found[:80]
    return str(found) if isinstance(found, int) and abs(found) < 1 << 64 else type(found).__name__
