"""Inspect checkpoints offline: list, read and verify, without the model and without ranks.

Everything is read in parts of a few megabytes, so a checkpoint of any size can be inspected on any machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from fullshard.checkpoint.format.data_file import dtype_of
from fullshard.checkpoint.format.index import TensorEntry
from fullshard.checkpoint.format.reader import CheckpointReader
from fullshard.engine.parameters.tensor_shards import TensorShard
from fullshard.errors import CheckpointError
from fullshard.layout import Region, regions_of_range

__all__ = ["Checkpoint", "open_checkpoint"]

_PART = 1 << 20  # elements read at once


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint for inspection. Needs no process group and no model, and runs no code from the files.

    Args:
        path: Folder or URL, of fullshard's format or of torch.distributed.checkpoint's.

    Returns:
        The open checkpoint, a context manager.

    Raises:
        CheckpointError: If there is no checkpoint, or its index is corrupted.
    """
    return Checkpoint.open(path)


class Checkpoint(CheckpointReader):
    """An open checkpoint, returned by ``open_checkpoint``. A context manager; tensors are read on demand."""

    @property
    def path(self) -> str:
        """Path of the folder."""
        return self.folder.path

    @property
    def aliases(self) -> Mapping[str, str]:
        """Other names of tied tensors, each with the first."""
        return self.index.aliases

    @property
    def names(self) -> list[str]:
        """Names of tensors, as saved, without aliases."""
        return list(self.index.tensors)

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a tensor.

        Args:
            name: Name of the tensor.

        Returns:
            Shape of the unsharded tensor.

        Raises:
            KeyError: If there is no such tensor.
        """
        return torch.Size(self._tensor(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor.

        Args:
            name: Name of the tensor.

        Returns:
            The dtype.

        Raises:
            KeyError: If there is no such tensor.
        """
        return dtype_of(self._tensor(name).dtype)

    def read(self, name: str) -> Any:
        """Read a full tensor or a value.

        Args:
            name: Name of the tensor or value.

        Returns:
            The full tensor in CPU memory, or the value.

        Raises:
            KeyError: If there is no such tensor or value.
            CheckpointError: If it cannot be read, or its checksum does not match.
        """
        if name in self.index.values:
            return self.value(name)
        shape = self._tensor(name).shape
        whole = TensorShard(Region.whole(shape), torch.empty(shape, dtype=self.dtype(name), device="cpu"))
        self.fill(self.find(name, [whole]))
        return whole.local

    def shards(self, name: str) -> Iterator[TensorShard]:
        """Yield a tensor in contiguous parts of at most a million elements, in order.

        Args:
            name: Name of the tensor.

        Yields:
            Each part's region, and its elements.

        Raises:
            KeyError: If there is no such tensor.
            CheckpointError: If it cannot be read, or its checksum does not match.
        """
        entry = self._tensor(name)
        for start in range(0, entry.numel, _PART):
            yield from self._range(name, start, min(_PART, entry.numel - start))

    def verify(self) -> list[str]:
        """Read everything and verify the checksums.

        Returns:
            Problems, one sentence for each damaged file, shard and value. Checkpoints of torch.distributed.checkpoint
            have no checksums of blocks; there, the checksums of torch's zip files are verified.
        """
        problems: list[str] = []
        bad_files: set[str] = set()

        def succeeds(check: Callable[..., object], *arguments: Any) -> bool:
            try:
                check(*arguments)
            except CheckpointError as error:
                problems.append(str(error))
                return False
            return True

        for name in self.index.files:
            if not succeeds(self.check_file, name):
                bad_files.add(name)  # where its shards are is not known then
        for key in self.index.tensors:
            for region, file in self.index.shards(key):
                if file not in bad_files:
                    succeeds(self._verify_shard, key, region)
        for key, file in self.index.values.items():
            if file not in bad_files:
                succeeds(self.value, key)
        return problems

    def _tensor(self, name: str) -> TensorEntry:
        try:
            return self.index.tensor(name)
        except KeyError:
            raise KeyError(f"{self.path} has no tensor {name!r}") from None

    def _range(self, name: str, start: int, numel: int) -> list[TensorShard]:
        """Read a range of elements of a tensor, counted row by row."""
        regions = regions_of_range(self._tensor(name).shape, start, numel)
        shards = [TensorShard(r, torch.empty(r.sizes, dtype=self.dtype(name), device="cpu")) for r in regions]
        self.fill(self.find(name, shards))
        return shards

    def _verify_shard(self, key: str, region: Region) -> None:
        nothing = torch.empty(region.sizes, dtype=self.dtype(key), device="meta")
        for read in self.find(key, [TensorShard(region, nothing)]):
            self.verify_shard(read)
