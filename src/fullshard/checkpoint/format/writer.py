"""Write a checkpoint: every rank its data file, and the first rank the index, which commits the save.

[Note: Commit]
A save is atomic. Each rank writes a new data file beside those of the existing checkpoint; then the first rank writes
a new index under a temporary name and renames it to ``fullshard.json``, which commits the save and replaces the
previous checkpoint. Only then are data files removed that the index does not name: those of the previous save, and of
ones that were killed. A save that fails on one rank is undone by all, unless it may have been committed, and begins by
removing old files of killed ones, so that these do not fill the disk. Everything is flushed to disk before the step
that relies on it. So whenever the process or the machine crashes, the folder holds a complete checkpoint, the old or
the new one. Object stores have no atomic rename (they copy and remove), but readers still see the old index or the new
one, since objects are written atomically.

The alternative, a new folder for every save and a link to the last, needs links, which object stores and Windows lack,
or leaves it to users to find the last complete folder.
"""

from __future__ import annotations

import contextlib
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from fullshard.checkpoint.format.data_file import DataEntry, dtype_name, write_entries
from fullshard.checkpoint.format.files import Folder, looks
from fullshard.checkpoint.format.index import DATA_FILE, INDEX_FILE, FileEntry, Index, TensorEntry, data_file
from fullshard.checkpoint.format.index_json import to_json
from fullshard.checkpoint.format.region_table import shape_columns
from fullshard.checkpoint.format.write_plan import RankInventory, WritePlan, plan_writes
from fullshard.checkpoint.saving_ranks import SavingRanks
from fullshard.engine.parameters.tensor_shards import TensorShards
from fullshard.errors import CheckpointError

__all__ = ["index_of", "write_checkpoint"]

_ORPHAN_S = 7200.0  # since the last change of a file, longer than ranks wait for each other
_TEMPORARY = re.compile(re.escape(INDEX_FILE) + r"\.[0-9a-f]{12}\.tmp")


def write_checkpoint(
    folder: Folder,
    entries: Mapping[str, TensorShards | bytes],
    ranks: SavingRanks,
    *,
    aliases: Mapping[str, str] = {},
    about: Mapping[str, Any] = {},
    wait: Callable[[], None] = lambda: None,
) -> None:
    """Write a checkpoint, and replace the one that is in the folder. All ranks call it. See [Note: Commit].

    Args:
        folder: A folder that all ranks see.
        entries: What this rank holds, by key: tensors, and serialized values.
        ranks: The ranks that save.
        aliases: Other keys of tied tensors, each with the key under which the tensor is saved.
        about: Description of the save for the index; any JSON value.
        wait: Blocks until the entries can be read.

    Raises:
        CheckpointError: On all ranks, if shards do not cover every tensor, or one of the ranks cannot write.
    """

    def take_inventory() -> tuple[str, RankInventory]:
        wait()
        folder.create()
        if ranks.rank == 0:
            _remove_orphans(folder)
        return uuid.uuid4().hex[:12], RankInventory.of(entries)

    saves, inventories = zip(*ranks.step(take_inventory), strict=True)
    save = saves[0]
    plan = cache(lambda: plan_writes(inventories))  # made in a step, so that its errors are raised on all ranks
    own, begun = data_file(save, ranks.rank), list[str]()
    undo = partial(_remove_quietly, folder, own)
    written = ranks.step(
        lambda: _write_data_file(folder, own, _planned_entries(entries, plan(), ranks.rank)), undo=undo
    )

    def commit() -> None:
        if ranks.rank == 0:
            _commit(folder, index_of(folder.where(INDEX_FILE), plan(), written, aliases, about, save), begun)

    ranks.step(commit, has_effect=lambda: bool(begun), undo=undo)


def _write_data_file(folder: Folder, name: str, contents: Sequence[tuple[DataEntry, torch.Tensor]]) -> FileEntry | None:
    """Write what this rank is planned to write; None if it is nothing."""
    if not contents:
        return None
    with folder.write(name) as stream:
        written = write_entries(stream, contents)
    folder.sync()
    return written


def _planned_entries(
    entries: Mapping[str, TensorShards | bytes], plan: WritePlan, rank: int
) -> list[tuple[DataEntry, torch.Tensor]]:
    """Return the entries of this rank's data file in order."""
    shards = [
        (DataEntry.of_shard(key, dtype_name(key, entry.dtype), tuple(entry.shape), shard.region), shard.local)
        for key, entry in entries.items()
        if not isinstance(entry, bytes)
        for shard in entry.shards
    ]
    writes = [shard for shard, flag in zip(shards, plan.writes[rank].tolist(), strict=True) if flag and shard[0].nbytes]
    # Large elements first: then each tensor begins at a multiple of the size of its elements.
    contents = sorted(writes, key=lambda shard: shard[1].element_size(), reverse=True)
    for key in plan.values[rank]:
        data = entries[key]
        assert isinstance(data, bytes)
        contents.append((DataEntry(key, "uint8", (len(data),)), torch.frombuffer(bytearray(data), dtype=torch.uint8)))
    return contents


def index_of(
    where: str,
    plan: WritePlan,
    written: Sequence[FileEntry | None],
    aliases: Mapping[str, str],
    about: Mapping[str, Any],
    save: str,
) -> Index:
    """Return the index of a save from its write plan and the file that each rank has written; None: it wrote none."""
    files = {data_file(save, rank): file for rank, file in enumerate(written) if file is not None}
    numbers = np.cumsum([file is not None for file in written]) - 1  # of the files, by rank
    order = np.lexsort((plan.regions.first(shape_columns(plan.table.shapes)), plan.regions.tensor))
    tensors = map(TensorEntry, plan.table.dtypes, plan.table.shapes)
    values = {key: data_file(save, rank) for rank, keys in enumerate(plan.values) for key in keys}
    return Index(
        where,
        dict(zip(plan.table.keys, tensors, strict=True)),
        plan.regions.take(order),
        numbers[plan.ranks[order]],
        values,
        files,
        aliases,
        about,
        save,
    )


def _commit(folder: Folder, index: Index, begun: list[str]) -> None:
    """Replace the checkpoint by the one that the index describes, and remove the files of the old one.

    Args:
        folder: The folder.
        index: The index of the new checkpoint.
        begun: Receives the name of the save before it may count: an error after that leaves its files.
    """
    temporary = f"{INDEX_FILE}.{index.save}.tmp"
    _check_files(folder, index)
    try:
        with folder.write(temporary) as stream:
            stream.write(to_json(index))
        begun.append(index.save)
        folder.replace(INDEX_FILE, by=temporary)
    except BaseException:
        _remove_quietly(folder, temporary)
        raise
    folder.sync()
    with contextlib.suppress(CheckpointError, OSError):  # the save is committed: what stays is removed by the next one
        for name in _files_of_saves(folder):
            if name not in index.files:
                _remove_quietly(folder, name)


def _files_of_saves(folder: Folder) -> list[str]:
    """Return the names of data files and temporary files of saves in the folder, without the index."""
    return [name for name in folder.names() if DATA_FILE.fullmatch(name) or _TEMPORARY.fullmatch(name)]


def _remove_orphans(folder: Folder) -> None:
    """Remove files of saves that were killed, so that they do not fill the disk until a save succeeds.

    They are in no index, and old: younger ones may be those of a save that runs. Behind a URL, ages are not known.
    """
    with contextlib.suppress(CheckpointError, OSError):
        index = folder.read_index(INDEX_FILE) if folder.exists(INDEX_FILE) else b""
        for name in _files_of_saves(folder):
            version = None if name.encode() in index else folder.version(name)
            if version is not None and time.time() - version[3] / 1e9 > _ORPHAN_S:
                _remove_quietly(folder, name)


def _check_files(folder: Folder, index: Index) -> None:
    """Raise unless the files of all ranks are in this folder with their full length.

    Raises:
        CheckpointError: If a file is missing or incomplete.
    """
    for name, file in index.files.items():
        found = None
        for _ in looks():
            found = folder.length(name) if folder.exists(name) else None
            if found == file.length:
                break
        else:
            raise CheckpointError(
                f"{folder.where(name)} was written by another rank, but on this rank it "
                f"{'is missing' if found is None else f'has {found} of {file.length} bytes'}: the folder must be "
                "on a file system that all ranks share; the previous checkpoint is kept"
            )


def _remove_quietly(folder: Folder, name: str) -> None:
    """Remove a file. One that cannot be removed does no harm: the next save tries again."""
    with contextlib.suppress(CheckpointError, OSError):
        folder.remove(name)
