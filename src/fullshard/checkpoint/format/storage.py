"""torch.distributed.checkpoint's storage writer for fullshard's own format, and the commit protocol of a save.

[Note: Commit]
A save is atomic. Each rank writes a new data file beside those of the existing checkpoint; then the coordinator writes
a new index under a temporary name and renames it to ``fullshard.json``, which commits the save and replaces the
previous checkpoint. Only then are data files removed that the index does not name: those of the previous save and of
interrupted ones. Everything is flushed to disk before the step that relies on it. So whenever the process or the
machine crashes, the folder holds a complete checkpoint, the old or the new one. Object stores have no atomic rename
(they copy and remove), but readers still see the old index or the new one, since objects are written atomically.

The alternative, a new folder for every save and a link to the last, needs links, which object stores and Windows lack,
or leaves it to users to find the last complete folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from fullshard.checkpoint.format.data_file import DataEntry, WrittenEntry, dtype_name, entry_name, write_entries
from fullshard.checkpoint.format.files import Folder
from fullshard.checkpoint.format.index import (
    DATA_FILE,
    ITEM_SIZES,
    FileEntry,
    Index,
    Shard,
    Shards,
    TensorEntry,
    Value,
    data_file,
)
from fullshard.checkpoint.format.index_json import to_json
from fullshard.checkpoint.format.reader import INDEX_FILE, CheckpointReader
from fullshard.checkpoint.format.values import from_bytes
from fullshard.errors import CheckpointError
from fullshard.layout import Region

__all__ = ["INDEX_FILE", "CheckpointReader", "CheckpointWriter"]

_LOOKS, _LOOK_S = 5, 0.2  # retries and interval when looking for a file: a network file system may show it late
_TEMPORARY = re.compile(re.escape(INDEX_FILE) + r"\.[0-9a-f]{12}\.tmp")


@dataclass(frozen=True)
class _DataFileId:
    """The data file of ``rank`` in save ``save``."""

    save: str
    rank: int


class CheckpointWriter(StorageWriter):
    """Storage writer for torch.distributed.checkpoint that writes a checkpoint to a folder. See [Note: Commit].

    Args:
        path: Local path, or URL that fsspec knows. A checkpoint in it is replaced once the new one is complete.
        aliases: Other keys of tied tensors, each with the key under which the tensor is saved.
        about: Description of the save for the index; any JSON value.
        sync: Flush data to disk. Without it, a checkpoint survives a crash of the process, but not of the machine.
        ranks: Number of ranks that save together; fewer are an error. None: any number.
        returns_metadata: Have torch.distributed.checkpoint return its metadata. It sends that to all ranks, which with
            many ranks is most of the time of a save.

    Raises:
        ValueError: If ``about`` is not representable in JSON.
        CheckpointError: If URLs of that protocol cannot be opened.
    """

    folder: Folder
    _aliases: dict[str, str]
    _about: dict[str, Any]
    _sync: bool
    _ranks: int | None
    _returns_metadata: bool
    _save: str
    _rank: int  # among the ranks that save

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        aliases: Mapping[str, str] = {},
        about: Mapping[str, Any] = {},
        sync: bool = True,
        ranks: int | None = None,
        returns_metadata: bool = True,
    ) -> None:
        super().__init__()
        self._aliases, self._about, self._sync = dict(aliases), dict(about), sync
        self._ranks, self._returns_metadata = ranks, returns_metadata
        try:
            json.dumps(self._about, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"about is not representable in JSON: {error}") from error
        self._rank = 0
        self.reset(path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save, to another folder if one is given."""
        if checkpoint_id is not None:
            self.folder = Folder(checkpoint_id)
        self._save = uuid.uuid4().hex[:12]

    @property
    def checkpoint_id(self) -> str:
        """Path of the folder."""
        return self.folder.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True if it could be the path of a folder."""
        return bool(os.fspath(checkpoint_id))

    def storage_meta(self) -> StorageMeta:
        """Return the identity of this save for torch.distributed.checkpoint."""
        return StorageMeta(checkpoint_id=self.folder.path, save_id=self._save)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Record this rank's number. Runs on every rank before it plans."""
        rank = kwargs.get("rank")
        self._rank = rank if isinstance(rank, int) else 0
        if kwargs.get("use_collectives", True) is False:
            raise ValueError("a fullshard checkpoint has one index for all ranks: save with use_collectives=True")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Create the folder and reject dtypes that cannot be stored. Runs on every rank."""
        for item in plan.items:
            if item.tensor_data is not None:
                try:
                    dtype_name(item.tensor_data.properties.dtype)
                except TypeError as error:
                    raise TypeError(f"{item.index.fqn}: {error}") from error
        self.folder.create()
        return replace(plan, storage_data=_DataFileId(self._save, self._rank))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name the data files of all ranks after the coordinator's save. Runs on the coordinator.

        Raises:
            CheckpointError: If ranks are missing.
        """
        if self._ranks is not None and len(plans) != self._ranks:
            raise CheckpointError(
                f"{self.folder.path}: only {len(plans)} of {self._ranks} ranks are saving; was the process group "
                "destroyed meanwhile? Call result() of an asynchronous save before destroying it"
            )
        return [replace(plan, storage_data=_DataFileId(self._save, rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's data file. Runs on every rank.

        Raises:
            CheckpointError: If it cannot be written.
            TypeError: If a tensor has no dense memory, or a value cannot be read back.
        """
        target: _DataFileId = plan.storage_data
        values = {item.index.fqn: _value(item, planner) for item in plan.items if item.type is WriteItemType.BYTE_IO}
        # Large elements first: then each tensor begins at a multiple of the size of its elements.
        items = sorted((item for item in plan.items if _size_of_element(item)), key=_size_of_element, reverse=True)
        items += [item for item in plan.items if item.type is WriteItemType.BYTE_IO]
        results: Future[list[WriteResult]] = Future()
        results.set_result(self._write(target, items, values, planner) if items else [])
        return results

    def _write(
        self, target: _DataFileId, items: list[WriteItem], values: Mapping[str, torch.Tensor], planner: SavePlanner
    ) -> list[WriteResult]:
        entries = [_entry(item, values) for item in items]
        name = data_file(target.save, target.rank)

        def tensors() -> Iterator[torch.Tensor]:
            for item, entry in zip(items, entries, strict=True):
                found = values[item.index.fqn] if item.tensor_data is None else planner.resolve_data(item)
                assert isinstance(found, torch.Tensor)
                _check_tensor(item, entry, found)
                yield found

        note = f"a part of a checkpoint; {INDEX_FILE} says of what"
        try:
            with self.folder.write(name, sync=self._sync) as stream:
                written = write_entries(stream, name, entries, tensors(), note=note)
        except BaseException:
            self._remove_quietly(name)
            raise
        if self._sync:
            self.folder.sync()
        return [WriteResult(item.index, entry.nbytes, written) for item, entry in zip(items, entries, strict=True)]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the save once all ranks have written. Runs on the coordinator.

        Raises:
            CheckpointError: If the shards do not cover every tensor, or the index cannot be written.
        """
        written = {result.index: result for of_rank in results for result in of_rank}
        index = self._index(metadata, list(written.values()))
        temporary = f"{INDEX_FILE}.{self._save}.tmp"
        self._check_files(index)
        try:
            with self.folder.write(temporary, sync=self._sync) as stream:
                stream.write(to_json(index))
            self.folder.replace(INDEX_FILE, by=temporary)
        except BaseException:
            self._remove_quietly(temporary)
            raise
        if self._sync:
            self.folder.sync()
        self._remove_old(keep=index.files)
        metadata.storage_data = {result.index: result.storage_data for result in written.values()}
        metadata.storage_meta = self.storage_meta()
        if not self._returns_metadata:
            metadata.state_dict_metadata, metadata.storage_data, metadata.planner_data = {}, {}, None

    def _check_files(self, index: Index) -> None:
        """Raise unless the files of all ranks are in this folder with their full length, before the old checkpoint is
        replaced.

        Raises:
            CheckpointError: If a file is missing or incomplete.
        """
        for name, file in index.files.items():
            for look in range(_LOOKS):
                found = self.folder.length(name) if self.folder.exists(name) else None
                if found == file.length:
                    break
                time.sleep(_LOOK_S if look + 1 < _LOOKS else 0)
            else:
                raise CheckpointError(
                    f"{self.folder.where(name)} was written by another rank, but on this rank it "
                    f"{'is missing' if found is None else f'has {found} of {file.length} bytes'}: the folder must be "
                    "on a file system that all ranks share; the previous checkpoint is kept"
                )

    def _index(self, metadata: Metadata, results: list[WriteResult]) -> Index:
        paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
        shards: dict[str, list[Shard]] = {key: [] for key in metadata.state_dict_metadata}
        values: dict[str, Value] = {}
        files: dict[str, FileEntry] = {}
        sizes = {(key, tuple(c.offsets)): tuple(c.sizes) for key, c in _chunks(metadata)}
        for result in sorted(results, key=lambda result: result.storage_data.name):
            written: WrittenEntry = result.storage_data
            files[written.name] = written.file
            key, offset = result.index.fqn, result.index.offset
            if offset is None:
                values[key] = Value(written.name, _path(key, paths))
            else:
                shards[key].append(Shard(Region(tuple(offset), sizes[key, tuple(offset)]), written.name))
        tensors = {
            key: TensorEntry(
                dtype_name(found.properties.dtype),
                tuple(found.size),
                Shards.of(tuple(found.size), shards[key]),
                _path(key, paths),
            )
            for key, found in metadata.state_dict_metadata.items()
            if isinstance(found, TensorStorageMetadata)
        }
        where = self.folder.where(INDEX_FILE)
        return Index(where, tensors, values, files, self._aliases, self._about, self._save)

    def _remove_old(self, keep: Mapping[str, Any]) -> None:
        """Remove data files of earlier and of interrupted saves. A file that cannot be removed stays and does no
        harm.
        """
        for name in self.folder.names():
            old = DATA_FILE.fullmatch(name) is not None and name not in keep
            if old or (_TEMPORARY.fullmatch(name) is not None):
                self._remove_quietly(name)

    def _remove_quietly(self, name: str) -> None:
        with contextlib.suppress(CheckpointError, OSError):  # missing, or removed by the next save
            self.folder.remove(name)


def _value(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    """Return the bytes of a value that is not a tensor, after checking that it can be read again."""
    stream: Any = planner.resolve_data(item)
    data = bytearray(stream.getvalue())
    try:
        from_bytes(item.index.fqn, bytes(data))
    except CheckpointError as error:
        raise TypeError(
            f"{item.index.fqn}: this value could not be read back without running code from the checkpoint; save its "
            "state_dict(), or numbers, strings, tensors and lists, tuples and dictionaries of them"
        ) from error
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8, device="cpu")


def _size_of_element(item: WriteItem) -> int:
    """Return the bytes of an element; 0 if the item has none to write."""
    if item.tensor_data is None or 0 in item.tensor_data.chunk.sizes:
        return 0
    return ITEM_SIZES[dtype_name(item.tensor_data.properties.dtype)]


def _entry(item: WriteItem, values: Mapping[str, torch.Tensor]) -> DataEntry:
    key = item.index.fqn
    if item.tensor_data is None:
        return DataEntry(key, "uint8", (values[key].numel(),))
    chunk = item.tensor_data.chunk
    region = Region(tuple(chunk.offsets), tuple(chunk.sizes))
    name = entry_name(key, region, tuple(item.tensor_data.size))
    return DataEntry(name, dtype_name(item.tensor_data.properties.dtype), region.sizes)


def _check_tensor(item: WriteItem, entry: DataEntry, found: torch.Tensor) -> None:
    """Raise unless the planner returned the tensor that it had planned.

    Raises:
        TypeError: If shape or dtype differ.
    """
    if tuple(found.shape) != entry.shape or dtype_name(found.dtype) != entry.dtype:
        raise TypeError(
            f"{item.index.fqn}: expected a tensor of shape {entry.shape} and {entry.dtype}, as planned; found "
            f"{tuple(found.shape)} and {found.dtype}"
        )


def _chunks(metadata: Metadata) -> Iterator[tuple[str, Any]]:
    for key, found in metadata.state_dict_metadata.items():
        if isinstance(found, TensorStorageMetadata):
            for chunk in found.chunks:
                yield key, chunk


def _path(key: str, paths: Mapping[str, Any]) -> tuple[str | int, ...]:
    """Return the path of a key in nested dicts; empty if it is a key of the outermost one."""
    steps = tuple(paths.get(key, ()))
    return steps if steps != (key,) and all(type(step) in (str, int) for step in steps) else ()
