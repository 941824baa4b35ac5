"""Export full weights from a checkpoint to safetensors files, without the model, without ranks, in little memory."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import torch

from fullshard.checkpoint.format.host import bytes_of
from fullshard.checkpoint.safetensors.export import ALIASES, TEMPORARY
from fullshard.checkpoint.safetensors.files import (
    INDEX_NAME,
    SINGLE_NAME,
    FilePlan,
    TensorKind,
    index_text,
    local_path,
    plan_files,
    read_index,
)
from fullshard.checkpoint.tools.offline import Checkpoint, open_checkpoint
from fullshard.errors import CheckpointError

__all__ = ["export"]

_NUMBERED = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def export(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    prefix: str = "model.",
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    progress: Callable[[int], object] | None = None,
) -> list[Path]:
    """Write the tensors of a checkpoint as safetensors files, a few megabytes at a time.

    Args:
        path: Folder or URL of the checkpoint, of fullshard's format or of torch.distributed.checkpoint's.
        out: A file that ends in ``.safetensors``; or a folder, which gets the Hugging Face layout: one
            ``model.safetensors``, or numbered files and ``model.safetensors.index.json``.
        prefix: Write the tensors whose names begin with it, without the prefix.
        dtype: Convert floating-point tensors to it. None: keep their dtypes.
        max_shard_bytes: Limit for the tensors in each file of a folder; a larger tensor gets a separate file.
        progress: Called with the number of bytes written since the last call.

    Returns:
        The files, in order; the index, if there is one, last.

    Raises:
        CheckpointError: If the checkpoint cannot be read, has no such tensors, or a file cannot be written. Existing
            files at ``out`` are then unchanged.
        ValueError: If an argument is invalid, or safetensors does not support a dtype.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype: expected a floating-point dtype, found {dtype}")
    if max_shard_bytes <= 0:
        raise ValueError(f"max_shard_bytes: expected a positive number, found {max_shard_bytes}")
    target = local_path("out", out)
    single = target.suffix == ".safetensors"
    with open_checkpoint(path) as checkpoint:
        kinds = {name.removeprefix(prefix): _kind(checkpoint, name, dtype) for name in _names(checkpoint, prefix)}
        metadata = {"format": "pt", **_tied(checkpoint, prefix)}
        plans = plan_files(kinds, 1 << 62 if single else max_shard_bytes, metadata)
        names = [target.name] if single else [plan.name for plan in plans]
        with _OutputFolder(target.parent if single else target, is_layout=not single) as output:
            for plan, name in zip(plans, names, strict=True):
                with output.open(name) as stream:
                    _write(checkpoint, plan, prefix, stream, progress)
            if len(plans) > 1:
                with output.open(INDEX_NAME) as stream:
                    stream.write(index_text(plans, {}).encode())
                names.append(INDEX_NAME)
            output.publish()
            return [output.folder / name for name in names]


def _names(checkpoint: Checkpoint, prefix: str) -> list[str]:
    found = [name for name in checkpoint.names if name.startswith(prefix)]
    if not found:
        there = sorted({name.split(".")[0] + "." for name in checkpoint.names if "." in name})
        raise CheckpointError(
            f"{checkpoint.path} has no tensors whose names begin with {prefix!r}. Prefixes of its "
            f"{len(checkpoint.names)} tensors: {', '.join(map(repr, there[:10])) or 'none'}; pass one of these as "
            "prefix, or '' for all tensors"
        )
    return found


def _kind(checkpoint: Checkpoint, name: str, dtype: torch.dtype | None) -> TensorKind:
    found = checkpoint.dtype(name)
    return TensorKind(dtype if dtype is not None and found.is_floating_point else found, tuple(checkpoint.shape(name)))


def _tied(checkpoint: Checkpoint, prefix: str) -> dict[str, str]:
    """Return the metadata in which :func:`fullshard.load_safetensors` finds the other names of tied parameters."""
    aliases = {
        name.removeprefix(prefix): first.removeprefix(prefix)
        for name, first in checkpoint.aliases.items()
        if name.startswith(prefix) and first.startswith(prefix)
    }
    return {ALIASES: json.dumps(aliases)} if aliases else {}


def _write(
    checkpoint: Checkpoint, plan: FilePlan, prefix: str, stream: IO[bytes], progress: Callable[[int], object] | None
) -> None:
    stream.write(plan.header)
    for name, place in sorted(plan.tensors.items(), key=lambda item: item[1].start):
        for _, part in checkpoint.parts(prefix + name):
            written = stream.write(bytes_of(part.to(place.dtype)))
            if progress is not None:
                progress(written)


class _OutputFolder:
    """Output files, which are renamed to their final names once all are complete and removed on failure."""

    folder: Path
    is_layout: bool  # Hugging Face layout: files of an earlier export may exist
    _made: list[str]
    _token: str  # in the temporary names

    def __init__(self, folder: Path, *, is_layout: bool) -> None:
        self.folder, self.is_layout, self._made, self._token = folder, is_layout, [], secrets.token_hex(8)
        with self.errors_with_path(""):
            folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> _OutputFolder:
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._made:
            with contextlib.suppress(OSError):
                self._temporary(name).unlink()

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        """Open a file under a temporary name. Leftovers of interrupted exports are removed."""
        self._made.append(name)
        with self.errors_with_path(name):
            left = TEMPORARY if self.is_layout else re.compile(re.escape(f".{name}.") + r"[0-9a-f]{16}\.tmp")
            for file in self.folder.iterdir():
                if left.fullmatch(file.name) and self._token not in file.name:
                    file.unlink(missing_ok=True)
            with self._temporary(name).open("wb") as stream:
                yield stream

    def publish(self) -> None:
        """Rename the files to their final names and remove the files that they replace, so that readers never see files
        of two exports.
        """
        old = self._old() if self.is_layout else []
        with self.errors_with_path(""):
            if self.is_layout and INDEX_NAME in self._made:
                (self.folder / INDEX_NAME).unlink(missing_ok=True)  # no index while its files change
            for name in self._made:
                self._temporary(name).replace(self.folder / name)
            for name in old:
                (self.folder / name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def errors_with_path(self, name: str) -> Iterator[None]:
        """Translate errors of the file system into CheckpointError with the path of the file."""
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"{self.folder / name} cannot be written: {error.strerror or error}") from error

    def _old(self) -> list[str]:
        """Return the files of an earlier export of the same layout that this one does not overwrite."""
        found = [SINGLE_NAME, INDEX_NAME]
        with contextlib.suppress(CheckpointError):
            found += [name for name in read_index(self.folder / INDEX_NAME).values() if _NUMBERED.fullmatch(name)]
        return [name for name in dict.fromkeys(found) if name not in self._made]

    def _temporary(self, name: str) -> Path:
        return self.folder / f".{name}.{self._token}.tmp"
