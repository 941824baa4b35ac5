"""Read checkpoints of torch.distributed.checkpoint's own writer: ``.metadata``, a pickle, and files of ``torch.save``.

What comes out of the pickle, stand-ins for a dozen classes, is type-checked and becomes an ``Index``, checked as any
other. See [Note: Reading a pickle without running it].
"""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Iterator
from pickle import UnpicklingError
from typing import Any

import torch

from fullshard.checkpoint.format.files import Folder
from fullshard.checkpoint.format.index import MOST_DIMS, FileEntry, FilePlace, Index, TensorEntry, table_of
from fullshard.checkpoint.format.pickles import Pickled, load_inert, shown
from fullshard.checkpoint.format.values import DTYPES, first_line, read_saved
from fullshard.errors import CheckpointError
from fullshard.layout import Region

__all__ = ["METADATA_FILE", "decode_shard", "read_metadata"]

METADATA_FILE = ".metadata"

_CLASSES = "torch.distributed.checkpoint.metadata"
_CALLS = dict.fromkeys((  # of which some results are needed
    *(f"{_CLASSES}.{name}" for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "StorageMeta")),
    *(f"{_CLASSES}.{name}" for name in ("TensorProperties", "ChunkStorageMetadata", "MetadataIndex")),
    *("torch.distributed.checkpoint.filesystem._StorageInfo", "torch.Size", "torch.serialization._get_layout"),
    f"{_CLASSES}._MEM_FORMAT_ENCODING",
    *(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath", "Path")),
))  # fmt: skip


def decode_shard(where: str, data: bytes, sizes: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Return the elements of a shard from a file of ``torch.save``, 1-D, without running code from it.

    Raises:
        CheckpointError: If it is no tensor of these sizes and this dtype.
    """
    try:
        found = read_saved(data)
    except Exception as error:  # a damaged or hostile file may raise anything
        raise _damaged(where, first_line(error)) from error
    wanted, described = f"{sizes} {dtype}", shown(found)
    if isinstance(found, torch.Tensor):
        described = f"{tuple(found.shape)} {str(found.dtype).removeprefix('torch.')}"
    if described != wanted:
        raise _damaged(where, f"expected a tensor of {wanted}; found {described}")
    flat: torch.Tensor = found.detach().contiguous().view(-1)
    return flat


def _damaged(where: str, found: str) -> CheckpointError:
    return CheckpointError(
        f"{where} cannot be read ({found}); no code in it was run. Copy the file again, or use another checkpoint"
    )


def read_metadata(data: bytes, folder: Folder) -> Index:
    """Read the index of a folder of torch.distributed.checkpoint from the bytes of its ``.metadata``.

    Raises:
        CheckpointError: If it is corrupted, is no such index, or names files outside of the folder.
    """
    where = folder.where(METADATA_FILE)
    try:
        top = load_inert(data, _CALLS, DTYPES).state
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
            about={"format": "torch.distributed.checkpoint", "version": shown(top.get("version"))},
            places=places,
        )
    except CheckpointError:
        raise
    except UnpicklingError as error:
        raise CheckpointError(
            f"{where}: {error}; no code in it was run. The file is corrupted, or was not written by "
            "torch.distributed.checkpoint's FileSystemWriter: use another checkpoint"
        ) from error
    except Exception as error:  # a damaged pickle may raise anything, with a text of any length
        raise CheckpointError(
            f"{where} cannot be read ({type(error).__name__}). The file is corrupted: use another checkpoint"
        ) from error


_Stored = dict[tuple[str, tuple[int, ...] | None], FilePlace]


def _stored(storage_data: Any) -> _Stored:
    """Return the places of all stored data, by key and offsets."""
    stored: _Stored = {}
    for index, info in storage_data.items():
        key, offset, place = index.state["fqn"], index.state.get("offset"), info.state
        with _refused_with(key):
            if not isinstance(key, str):  # others must not be hashed
                raise UnpicklingError("found no key")
            name = place["relative_path"]
            # A plain name: torch's writer has no subfolders.
            if not isinstance(name, str) or not re.fullmatch(r"[^/\\:\0]+", name) or name in (".", ".."):
                raise UnpicklingError(f"found file {shown(name)!r}, which is outside of the folder")
            if place.get("transform_descriptors"):
                raise UnpicklingError("stored with an extension that only torch's own reader supports")
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
                raise UnpicklingError("found no key")
            if type(entry).__name__ == f"{_CLASSES}.BytesStorageMetadata":
                places[key, None] = stored[key, None]
                continue
            fields = entry.state
            dtype = fields["properties"].state[0]
            if not isinstance(dtype, torch.dtype):
                raise UnpicklingError(f"dtype {shown(dtype)}")
            tensors[key] = TensorEntry(str(dtype).removeprefix("torch."), _numbers(fields["size"]))
            for chunk in fields["chunks"]:
                region = Region(_numbers(chunk.state["offsets"]), _numbers(chunk.state["sizes"]))
                if region.numel:
                    places[key, region] = stored[key, region.offsets]
    return tensors, places


@contextlib.contextmanager
def _refused_with(key: Any) -> Iterator[None]:
    """Re-raise any error of the block as UnpicklingError for ``key``; a hostile pickle may hold any type."""
    try:
        yield
    except UnpicklingError as error:
        raise UnpicklingError(f"{shown(key)}: {error}") from error
    except Exception as error:
        raise UnpicklingError(f"{shown(key)}: {shown(str(error))} ({type(error).__name__})") from error


def _numbers(found: Any) -> tuple[int, ...]:
    """Return a few integers, of a ``torch.Size`` or a sequence; TypeError if they are something else."""
    if isinstance(found, Pickled):
        (found,) = found.args or ((),)
    if not isinstance(found, (tuple, list)) or len(found) > MOST_DIMS:
        raise TypeError(f"found {shown(found)} in place of sizes")
    return tuple(map(operator.index, found))
