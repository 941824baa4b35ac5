"""torch.distributed.checkpoint's storage reader for fullshard's own format, and for torch's.

[Note: Checked before anything changes]
A rank that finds a damaged byte halfway through a load would leave a model of two checkpoints. So everything that a
rank needs is read and compared with its checksums while it plans, before torch.distributed.checkpoint exchanges the
plans: that exchange fails on all ranks if planning failed on one. Only then are targets written.

Of a local checkpoint, what was read the first time is read again: by then the operating system has it in memory, and a
copy of our own costs more than it saves (measured: 200 MB per rank on two ranks, 0.38 s with a copy, 0.20 s without).
Behind a URL it is kept, up to a limit, and so is what has to be decoded (torch's format); what is beyond is read and
compared again.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from fullshard.checkpoint.data_file import dtype_of
from fullshard.checkpoint.files import Folder
from fullshard.checkpoint.host import host_buffer
from fullshard.checkpoint.index import BLOCK, ITEM_SIZES, Index, TensorEntry
from fullshard.checkpoint.index_json import from_json
from fullshard.checkpoint.source import DataSource, Needed, Source, copy_range, is_one_range, span_of
from fullshard.checkpoint.torch_format import METADATA_FILE, TorchSource, read_metadata_file
from fullshard.errors import CheckpointError
from fullshard.layout import Box

__all__ = ["INDEX_FILE", "CheckpointReader", "open_source"]

INDEX_FILE = "fullshard.json"
_KEPT = 1 << 30  # bytes


def open_source(path: str | os.PathLike[str], *, verify: bool = True) -> Source:
    """The checkpoint in a folder, of fullshard's format or of torch.distributed.checkpoint's.

    Args:
        path: Local path, or URL that fsspec knows.
        verify: Whether checksums are compared.

    Raises:
        CheckpointError: If there is none, or its index is damaged.
    """
    folder = Folder(path)
    if folder.exists(INDEX_FILE):
        with folder.read(INDEX_FILE) as stream:
            data = stream.read()
        return DataSource(folder, from_json(data, folder.where(INDEX_FILE)), verify=verify)
    if folder.exists(METADATA_FILE):
        return TorchSource(folder, read_metadata_file(folder), verify=verify)
    names = folder.names()
    found = f"it has {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}" if names else "there is nothing"
    raise CheckpointError(
        f"{folder.path} has no checkpoint: {found}, and neither {INDEX_FILE} (fullshard's) nor {METADATA_FILE} "
        "(torch.distributed.checkpoint's). Pass the folder that was saved to; if a first save was killed, there is none"
    )


class CheckpointReader(StorageReader):
    """Reads a checkpoint through torch.distributed.checkpoint: only the bytes that a rank needs.

    The index is read once: later loads with the same reader see the same save until :meth:`reset`.

    Args:
        path: Local path, or URL that fsspec knows; of fullshard's format or of torch.distributed.checkpoint's.
        verify: Whether everything is compared with its checksums before anything changes. See
            [Note: Checked before anything changes].
        keep_bytes: Most bytes of host memory for what was read to be compared; what is beyond is read twice. None:
            1 GiB, but nothing for local folders of fullshard's format.

    Raises:
        CheckpointError: If that kind of URL cannot be opened here.
    """

    verify: bool
    keep_bytes: int | None
    _path: str
    _source: Source | None  # None until the index has been read
    _metadata: Metadata | None  # what is made of that
    _checked: dict[Needed, list[torch.Tensor | None]]  # by piece, the ranges that were kept
    _values: dict[str, bytes]
    _kept_bytes: int
    _buffer: torch.Tensor  # for blocks that are not kept

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = True, keep_bytes: int | None = None) -> None:
        super().__init__()
        self.verify, self.keep_bytes = verify, keep_bytes
        self._buffer = host_buffer(0, pinned=False)
        self.reset(path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget what was read; continue with another checkpoint if one is given."""
        if checkpoint_id is not None:
            self._path = os.fspath(checkpoint_id)
        self._source = self._metadata = None
        self._forget()

    @property
    def checkpoint_id(self) -> str:
        """The folder."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it could be a folder."""
        return bool(os.fspath(checkpoint_id))

    @property
    def index(self) -> Index:
        """What the checkpoint has.

        Raises:
            CheckpointError: If there is none, or its index is damaged.
        """
        return self._opened().index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index, as torch.distributed.checkpoint understands it; tied tensors under each of their names.

        Raises:
            CheckpointError: If there is none, or it is damaged.
        """
        if self._metadata is None:
            self._metadata = self._described_all()
        return replace(self._metadata, state_dict_metadata=dict(self._metadata.state_dict_metadata))

    def _described_all(self) -> Metadata:
        index = self.index
        names = {**{key: key for key in index.tensors}, **index.aliases}
        described: dict[str, Any] = {name: _described(index.tensors[key]) for name, key in names.items()}
        described.update({key: BytesStorageMetadata() for key in index.values})
        paths = {name: index.tensors[key].path for name, key in names.items() if name == key}
        paths.update({key: value.path for key, value in index.values.items()})
        return Metadata(
            described,
            planner_data={key: path or (key,) for key, path in paths.items()},
            storage_data={},
            storage_meta=StorageMeta(checkpoint_id=self._path, save_id=index.save),
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Called on every rank before it plans."""
        self._opened()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Called on every rank: reads and checks what the plan needs. See [Note: Checked before anything changes].

        Raises:
            CheckpointError: If a file is missing, cut off or changed.
        """
        self._forget()
        try:
            self._check(plan)
        except BaseException:
            self._forget()
            raise
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Called on the coordinator; nothing to be done."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Called on every rank: write what was read to where the planner wants it.

        Raises:
            CheckpointError: If something cannot be read, or a target does not have the planned size.
        """
        self._check(plan)  # finds nothing to do, unless a planner changed its mind
        try:
            for needed, items in self._needed(plan).items():
                self._fill(needed, items, planner)
            for item in plan.items:
                if item.type is LoadItemType.BYTE_IO:
                    planner.load_bytes(item, io.BytesIO(self._values[item.storage_index.fqn]))
        finally:
            self._forget()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _opened(self) -> Source:
        if self._source is None:
            self._source = open_source(self._path, verify=self.verify)
        return self._source

    def _forget(self) -> None:
        self._checked, self._values, self._kept_bytes = {}, {}, 0
        if self._source is not None:
            self._source.close()

    def _reused(self, nbytes: int, *, pinned: bool = False) -> torch.Tensor:
        """Memory that lasts until it is asked for again."""
        if self._buffer.numel() < nbytes or (pinned and not self._buffer.is_pinned()):
            self._buffer = host_buffer(max(nbytes, BLOCK), pinned=pinned)
        return self._buffer[:nbytes]

    def _needed(self, plan: LoadPlan) -> dict[Needed, list[ReadItem]]:
        """The pieces that a plan reads from, in the order in which they lie in the files."""
        index = self.index
        items: dict[tuple[str, tuple[int, ...]], list[ReadItem]] = {}
        for item in plan.items:
            if item.type is not LoadItemType.BYTE_IO and 0 not in item.lengths:
                key = index.aliases.get(item.storage_index.fqn, item.storage_index.fqn)
                items.setdefault((key, tuple(item.storage_index.offset or ())), []).append(item)
        pieces = {key: {piece.box.offsets: piece for piece in index.tensors[key].pieces} for key, _ in items}
        found: dict[Needed, list[ReadItem]] = {}
        for (key, offsets), of_piece in items.items():
            tensor, piece = index.tensors[key], pieces[key][offsets]
            regions = tuple(Box(tuple(item.storage_offsets), tuple(item.lengths)) for item in of_piece)
            found[Needed(key, tensor.dtype, piece, regions)] = of_piece
        order = sorted(found, key=lambda needed: (needed.piece.file, needed.piece.start))
        return {needed: found[needed] for needed in order}

    # ---------------------------------------------------------------- first: check

    def _check(self, plan: LoadPlan) -> None:
        source = self._opened()
        needed = [one for one in self._needed(plan) if one not in self._checked]
        values = [item.storage_index.fqn for item in plan.items if item.type is LoadItemType.BYTE_IO]
        values = [key for key in values if key not in self._values]
        for name in sorted({one.piece.file for one in needed} | {source.index.values[key].file for key in values}):
            source.check_file(name)
        self._values.update({key: source.value_bytes(key) for key in values})
        limit = self.keep_bytes
        if limit is None:
            limit = 0 if source.folder.is_local and source.index.raw else _KEPT
        for one in needed:
            kept: list[torch.Tensor | None] = []
            for start, numel in source.ranges(one) if self.verify else ():
                nbytes = numel * ITEM_SIZES[one.dtype]
                if self._kept_bytes + nbytes <= limit:
                    kept.append(source.read(one, start, numel, host_buffer(nbytes, pinned=False)))
                    self._kept_bytes += nbytes
                else:
                    source.check(one, start, numel)
                    kept.append(None)
            self._checked[one] = kept

    # ---------------------------------------------------------------- then: write

    def _fill(self, needed: Needed, items: list[ReadItem], planner: LoadPlanner) -> None:
        """Write one piece's elements to all that want some of them."""
        source = self._opened()
        targets = [planner.resolve_tensor(item).detach() for item in items]
        for item, target in zip(items, targets, strict=True):
            if target.size() != item.lengths:
                raise CheckpointError(
                    f"{needed.key}: expected memory of shape {tuple(item.lengths)} to load into; found "
                    f"{tuple(target.shape)}"
                )
        kept = iter(self._checked.pop(needed, ()))
        sizes = needed.piece.box.sizes
        pairs = list(zip(needed.regions, targets, strict=True))
        for start, numel in source.ranges(needed):
            flat = next(kept, None)
            if flat is None and _reads_in_place(source, needed, start, numel, targets):
                first = (start - span_of(sizes, needed.regions[0])[0]) * ITEM_SIZES[needed.dtype]
                memory = targets[0].view(-1).view(torch.uint8)
                source.read(needed, start, numel, memory[first : first + numel * ITEM_SIZES[needed.dtype]])
                continue
            if flat is None:
                pinned = targets[0].device.type != "cpu"
                into = self._reused(numel * ITEM_SIZES[needed.dtype], pinned=pinned)
                flat = source.read(needed, start, numel, into)
            for region, target in pairs:
                copy_range(flat, start, sizes, region, target)
        for item, target in zip(items, targets, strict=True):
            planner.commit_tensor(item, target)


def _reads_in_place(source: Source, needed: Needed, start: int, numel: int, targets: Iterable[torch.Tensor]) -> bool:
    """Whether a range of a piece can be read straight into its target: it is the only one, and all of the range's."""
    if not isinstance(source, DataSource) or len(needed.regions) != 1:
        return False
    (target,), (region,) = targets, needed.regions
    low, high = span_of(needed.piece.box.sizes, region)
    return (
        target.device.type == "cpu"
        and target.dtype == dtype_of(needed.dtype)
        and target.is_contiguous()
        and is_one_range(needed.piece.box.sizes, region)
        and low <= start
        and start + numel <= high
    )


def _described(tensor: TensorEntry) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(piece.box.offsets), torch.Size(piece.box.sizes)) for piece in tensor.pieces
    ]
    return TensorStorageMetadata(TensorProperties(dtype=dtype_of(tensor.dtype)), torch.Size(tensor.shape), chunks)
