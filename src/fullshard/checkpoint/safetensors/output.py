"""The files of one export: written under temporary names, renamed to their final names once all are complete."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from fullshard.checkpoint.safetensors.files import INDEX_NAME, SINGLE_NAME, FilePlan, index_text, read_index
from fullshard.checkpoint.safetensors.shard_io import ShardFileIO
from fullshard.engine.parameters.tensor_shards import TensorShard
from fullshard.errors import CheckpointError

__all__ = ["OutputFiles", "errors_with_path"]

_NUMBERED = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_TEMPORARY = re.compile(r"\.model[-.\w]*\.[0-9a-f]{16}\.tmp")


@dataclass(frozen=True)
class OutputFiles:
    """The files of one export.

    Args:
        folder: Folder of the files; it exists.
        plans: Layout of each file.
        token: Part of the temporary names; 16 hexadecimal digits.
        sync: Flush files to disk before they are renamed.
        is_single: A file of the caller's name, beside others; not the Hugging Face layout.
    """

    folder: Path
    plans: Sequence[FilePlan]
    token: str
    sync: bool = False
    is_single: bool = False

    def make(self) -> None:
        """Create all files with their headers and at full length; remove leftovers of interrupted exports."""
        mine = re.compile(re.escape(f".{self.plans[0].name}.") + r"[0-9a-f]{16}\.tmp")
        leftover = mine if self.is_single else _TEMPORARY
        with errors_with_path(self.folder):
            for path in self.folder.iterdir():
                if leftover.fullmatch(path.name) and self.token not in path.name:
                    path.unlink(missing_ok=True)
        for plan in self.plans:
            with errors_with_path(self.folder / plan.name), self._temporary(plan).open("wb") as file:
                file.write(plan.header)
                file.truncate(plan.size)

    def write(self, shards: Iterable[tuple[str, TensorShard]]) -> None:
        """Write shards of tensors, by name, to their byte ranges, through a few megabytes of memory."""
        numbers = {name: number for number, plan in enumerate(self.plans) for name in plan.tensors}
        mover = ShardFileIO()
        for number, in_file in groupby(shards, lambda item: numbers[item[0]]):
            with self.opened(self.plans[number]) as descriptor:
                for name, shard in in_file:
                    mover.write(descriptor, self.plans[number].tensors[name], shard)

    @contextlib.contextmanager
    def opened(self, plan: FilePlan) -> Iterator[int]:
        """Open one of the files to write to it, as a descriptor."""
        with errors_with_path(self.folder / plan.name):
            descriptor = os.open(self._temporary(plan), os.O_WRONLY | os.O_CLOEXEC)
            try:
                yield descriptor
                if self.sync:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def publish(self, texts: Mapping[str, str]) -> list[Path]:
        """Rename the files to their final names, and remove those that they replace. Readers never see files of two
        exports.

        Args:
            texts: Strings for the index, if there is one.

        Returns:
            The files, in order; the index, if there is one, last.
        """
        with errors_with_path(self.folder):
            index, single = self.folder / INDEX_NAME, self.folder / SINGLE_NAME
            files = [self.folder / plan.name for plan in self.plans]
            replaced = set() if self.is_single else self._replaced(index)
            if len(files) > 1:
                index.unlink(missing_ok=True)  # no index while files of two exports may exist
            for plan, file in zip(self.plans, files, strict=True):
                self._flush(self._temporary(plan))  # also those that this rank has only made
                self._temporary(plan).replace(file)
            if len(files) > 1:
                self.token_file.write_text(index_text(self.plans, texts))
                self._flush(self.token_file)
                self.token_file.replace(index)
                single.unlink(missing_ok=True)  # last: readers prefer it
                files.append(index)
            elif not self.is_single:
                index.unlink(missing_ok=True)
            for file in replaced.difference(files):
                file.unlink(missing_ok=True)
            self._flush(self.folder)
            return files

    def clean_up(self) -> None:
        """Remove temporary files."""
        for path in (self.token_file, *map(self._temporary, self.plans)):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    @property
    def token_file(self) -> Path:
        """A file by which other ranks can tell that they see the same folder; later the index."""
        return self.folder / f".model.{self.token}.tmp"

    def _temporary(self, plan: FilePlan) -> Path:
        return self.folder / f".{plan.name}.{self.token}.tmp"

    def _replaced(self, index: Path) -> set[Path]:
        """Return the files of an earlier export with an index."""
        try:
            names = read_index(index).values()
        except CheckpointError:  # no earlier export
            return set()
        return {self.folder / name for name in names if _NUMBERED.fullmatch(name)}

    def _flush(self, path: Path) -> None:
        if self.sync:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


@contextlib.contextmanager
def errors_with_path(path: Path) -> Iterator[None]:
    """Translate errors of the file system into CheckpointError with the path of what was written."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error}") from error
