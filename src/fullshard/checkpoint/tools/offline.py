"""Inspect checkpoints offline: list, read, verify and compare, without the model and without ranks.

Everything is read in parts of a few megabytes, so a checkpoint of any size can be inspected on any machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from fullshard.checkpoint.format.data_file import dtype_of
from fullshard.checkpoint.format.host import host_buffer
from fullshard.checkpoint.format.index import ITEM_SIZES, Index, Shard, TensorEntry
from fullshard.checkpoint.format.reader import open_source
from fullshard.checkpoint.format.source import ReadRequest, Source, copy_range
from fullshard.errors import CheckpointError
from fullshard.layout import Region, regions_of_range

__all__ = ["Checkpoint", "Difference", "open_checkpoint"]

_PART = 1 << 24  # bytes read at once
_VALUE = "a value"

Progress = Callable[[int], object]  # called with a number of bytes


@dataclass(frozen=True)
class Difference:
    """One difference between two checkpoints.

    Args:
        name: Name of the tensor or value.
        here: Dtype and shape, or the value, in the first checkpoint; None if it is missing.
        there: The same for the second checkpoint.
        elements: Number of elements that differ; NaN equals NaN. None if they were not compared.
        max_abs: Largest absolute difference; NaN if an element is NaN in only one of the tensors.
    """

    name: str
    here: str | None
    there: str | None
    elements: int | None = None
    max_abs: float | None = None


def open_checkpoint(path: str | os.PathLike[str], *, verify: bool = True) -> Checkpoint:
    """Open a checkpoint for inspection. Needs no process group and no model, and runs no code from the files.

    Args:
        path: Folder or URL, of fullshard's format or of torch.distributed.checkpoint's.
        verify: Compare checksums of everything that is read.

    Raises:
        CheckpointError: If there is no checkpoint, or its index is corrupted.
    """
    return Checkpoint(open_source(path, verify=verify))


class Checkpoint:
    """An open checkpoint; a context manager. Tensors are read on demand. Made by :func:`open_checkpoint`."""

    _source: Source
    _buffer: torch.Tensor  # staging buffer for reads that cannot be done in place

    def __init__(self, source: Source) -> None:
        self._source = source
        self._buffer = host_buffer(0, pinned=False)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._source.close()

    @property
    def path(self) -> str:
        """Path of the folder."""
        return self._source.folder.path

    @property
    def index(self) -> Index:
        """Index of the checkpoint."""
        return self._source.index

    @property
    def about(self) -> Mapping[str, Any]:
        """Description of the save: versions, time, ranks, model."""
        return self.index.about

    @property
    def aliases(self) -> Mapping[str, str]:
        """Other names of tied tensors, each with the first."""
        return self.index.aliases

    @property
    def names(self) -> list[str]:
        """Names of tensors, as saved, without aliases."""
        return list(self.index.tensors)

    @property
    def values(self) -> list[str]:
        """Names of values that are not tensors."""
        return list(self.index.values)

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a tensor; KeyError if there is no tensor of that name."""
        return torch.Size(self._tensor(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor; KeyError if there is no tensor of that name."""
        return dtype_of(self._tensor(name).dtype)

    def read(self, name: str) -> Any:
        """Read a tensor, whole and on the CPU, or a value.

        Raises:
            KeyError: If there is no such tensor or value.
            CheckpointError: If it cannot be read, or its checksum does not match.
        """
        if name in self.index.values:
            return self._source.value(name)
        entry = self._tensor(name)
        return self.read_range(name, 0, entry.numel).view(entry.shape)

    def read_range(self, name: str, start: int, numel: int) -> torch.Tensor:
        """Read a range of elements of a tensor.

        Args:
            name: Name of the tensor.
            start: First element, counted row by row.
            numel: Number of elements.

        Returns:
            The elements, 1-D, on the CPU.

        Raises:
            KeyError: If there is no tensor of that name.
            ValueError: If it does not have these elements.
            CheckpointError: If they cannot be read, or their checksum does not match.
        """
        entry = self._tensor(name)
        out = torch.empty(numel, dtype=dtype_of(entry.dtype), device="cpu")
        done = 0
        for region in regions_of_range(entry.shape, start, numel):
            self._read_region(name, entry, region, out[done : done + region.numel].view(region.sizes))
            done += region.numel
        return out

    def parts(self, name: str, nbytes: int | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield a tensor in parts of at most ``nbytes`` (None: 16 MiB), each as its first element and its elements,
        1-D.
        """
        entry = self._tensor(name)
        step = max(1, (nbytes or _PART) // ITEM_SIZES[entry.dtype])
        for start in range(0, entry.numel, step):
            yield start, self.read_range(name, start, min(step, entry.numel - start))

    def verify(self, progress: Progress | None = None) -> list[str]:
        """Read everything and compare it with its checksums.

        Args:
            progress: Called with the number of bytes of tensors read since the last call.

        Returns:
            Problems, one sentence each. Checkpoints of torch.distributed.checkpoint have no checksums: only data that
            cannot be read are reported.
        """
        problems: list[str] = []

        def succeeds(check: Callable[[], object]) -> bool:
            try:
                check()
            except CheckpointError as error:
                problems.append(str(error))
                return False
            return True

        bad_files = set()
        for name in self.index.files:
            if not succeeds(partial(self._source.check_file, name)):
                bad_files.add(name)  # where its shards are is not known then
        for key, entry in self.index.tensors.items():
            for shard in entry.shards:
                if shard.file in bad_files:
                    continue
                succeeds(partial(self._check_shard, key, entry, shard, succeeds, progress))
        for key, value in self.index.values.items():
            if value.file not in bad_files:
                succeeds(partial(self._source.value_bytes, key))
        return problems

    def diff(self, other: Checkpoint, progress: Progress | None = None) -> list[Difference]:
        """Compare with another checkpoint: names, shapes, dtypes and contents.

        Args:
            other: The second one.
            progress: Called with the number of bytes of this one's tensors compared since the last call.

        Raises:
            CheckpointError: If something cannot be read, or its checksum does not match.
        """
        found: list[Difference] = []
        mine, theirs = self._described(), other._described()
        for name in sorted(mine.keys() | theirs.keys()):
            here, there = mine.get(name), theirs.get(name)
            if here == there == _VALUE:
                one, two = self.read(name), other.read(name)
                if not _equal(one, two):
                    found.append(Difference(name, _shown(one), _shown(two)))
            elif None not in (here, there) and _VALUE not in (here, there) and self.shape(name) == other.shape(name):
                elements, max_abs = self._compare(other, name, progress)
                if elements or here != there:
                    found.append(Difference(name, here, there, elements, max_abs))
            elif here != there:
                found.append(Difference(name, here, there))
        return found

    def _tensor(self, name: str) -> TensorEntry:
        try:
            return self.index.tensor(name)
        except KeyError:
            raise KeyError(f"{self.path} has no tensor {name!r}") from None

    def _described(self) -> dict[str, str]:
        tensors = {name: self._tensor(name) for name in (*self.index.tensors, *self.index.aliases)}
        described = {name: f"{entry.dtype} {list(entry.shape)}" for name, entry in tensors.items()}
        return {**described, **dict.fromkeys(self.index.values, _VALUE)}

    def _check_shard(
        self,
        key: str,
        entry: TensorEntry,
        shard: Shard,
        succeeds: Callable[[Callable[[], object]], bool],
        progress: Progress | None,
    ) -> None:
        """Check all blocks of a shard, also those after a bad one."""
        place = self._source.shard_entry(key, shard)
        request = ReadRequest(key, entry.dtype, place, (Region.whole(shard.region.sizes),))
        for start, numel in self._source.ranges(request):
            succeeds(partial(self._source.check, request, start, numel))
            if progress is not None:
                progress(numel * ITEM_SIZES[request.dtype])

    def _read_region(self, name: str, entry: TensorEntry, region: Region, out: torch.Tensor) -> None:
        key = self.aliases.get(name, name)
        for shard in entry.shards.overlapping(region):
            both = (shard.region.overlap(region) if entry.shape else None) or region
            wanted, place = both.relative_to(shard.region.offsets), both.relative_to(region.offsets)
            request = ReadRequest(name, entry.dtype, self._source.shard_entry(key, shard), (wanted,))
            target = out[tuple(map(slice, place.offsets, place.ends))]
            for start, numel in self._source.ranges(request):
                nbytes = numel * ITEM_SIZES[entry.dtype]
                if self._buffer.numel() < nbytes and self.index.raw:
                    self._buffer = host_buffer(self.index.block, pinned=False)
                flat = self._source.read(request, start, numel, self._buffer[:nbytes])
                copy_range(flat, start, shard.region.sizes, wanted, target)

    def _compare(self, other: Checkpoint, name: str, progress: Progress | None) -> tuple[int, float]:
        """Return how many elements of a tensor differ, and the largest absolute difference."""
        count, largest = 0, 0.0
        numel = self._tensor(name).numel
        step = _PART // max(self.dtype(name).itemsize, other.dtype(name).itemsize)
        for start in range(0, numel, step):
            one, two = (c.read_range(name, start, min(step, numel - start)) for c in (self, other))
            if progress is not None:
                progress(one.nbytes)
            if one.dtype == two.dtype and torch.equal(one.view(torch.uint8), two.view(torch.uint8)):
                continue
            distances = _distances(one, two)
            if distances.numel():
                count += distances.numel()
                largest = float(torch.stack([distances.max(), torch.tensor(largest, dtype=torch.float64)]).max())
        return count, largest


def _distances(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    """Return the absolute differences of the elements that differ; NaN equals NaN."""
    wide = torch.complex128 if one.is_complex() or two.is_complex() else torch.float64
    left, right = one.to(wide), two.to(wide)
    exact = not any(t.is_floating_point() or t.is_complex() for t in (one, two))
    different = (one != two) if exact else (left != right) & ~(left.isnan() & right.isnan())
    return (left - right).abs()[different]


def _equal(one: Any, two: Any) -> bool:
    """Return True if two values are the same, including nested tensors and arrays; NaN equals NaN."""
    if type(one) is not type(two):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and one.shape == two.shape and not _distances(one, two).numel()
    if isinstance(one, np.ndarray):
        return one.dtype == two.dtype and bool(np.array_equal(one, two, equal_nan=one.dtype.kind in "fc"))
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(_equal(value, two[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(_equal, one, two))
    return bool(one == two or (one != one and two != two))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
