"""``fullshard.export_safetensors``: full weights as safetensors files, every rank writing its own shards.

[Note: Export without gathering]
The byte ranges of all tensors follow from names, shapes and dtypes, which all ranks know. So one rank creates the
files, headers first and at full length, under temporary names, and then all ranks write their shards into them
concurrently; weights are not communicated. Which rank writes a replicated shard is planned as for a save. At the end
the files are renamed to their final names, the index last. That needs a folder on a shared file system.

``export_checkpoint`` writes the same files from a checkpoint, without the model and without ranks, in little memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fullshard.checkpoint.format.files import flush, looks
from fullshard.checkpoint.format.host import plain
from fullshard.checkpoint.format.write_plan import RankInventory, plan_writes
from fullshard.checkpoint.safetensors.files import (
    INDEX_NAME,
    SINGLE_NAME,
    FilePlan,
    FileTensor,
    index_text,
    local_path,
    plan_files,
    read_index,
)
from fullshard.checkpoint.safetensors.shard_io import ShardFileIO
from fullshard.checkpoint.saving_ranks import SavingRanks
from fullshard.checkpoint.state.model import ModelState, model_state
from fullshard.checkpoint.tools.offline import Checkpoint, open_checkpoint
from fullshard.engine.parameters.tensor_shards import TensorShard
from fullshard.errors import CheckpointError, UnmaterializedParameterError
from fullshard.ranks.agreement import compare, digest_of, gather, who_differs
from fullshard.ranks.barrier import RankBarrier, rank_barrier
from fullshard.ranks.groups import coordination_group

__all__ = ["ALIASES", "OutputFiles", "export_checkpoint", "export_safetensors"]

ALIASES = "aliases"  # metadata key: other names of tied parameters, each with the name in the files
_NUMBERED = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_TEMPORARY = re.compile(r"\.model[-.\w]*\.[0-9a-f]{16}\.tmp")


def export_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    metadata: Mapping[str, str] | None = None,
    sync: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write the full weights of ``model`` as safetensors files in the Hugging Face layout. All ranks call it.

    The files are ``model.safetensors``, or above ``max_shard_bytes`` several files ``model-00001-of-0000N.safetensors``
    and ``model.safetensors.index.json``. They contain parameters and persistent buffers, with their names before
    wrapping. A tied parameter is written once; its other names are in the metadata under "aliases", where
    ``load_safetensors`` finds them. Extra state of modules is not written.

    Every rank writes its own shards into the files, through a few megabytes of memory, so all ranks must see the same
    ``folder``.

    Args:
        model: A model of ``fully_shard`` or ``FullyShardedDataParallel``, DistributedDataParallel or plain; not in the
            middle of a step.
        folder: Created if missing. Existing weights in this layout are replaced; while they are, readers find the old
            files, the new files or none, but never a mixture.
        dtype: Convert floating-point tensors to it. None: keep their dtypes.
        max_shard_bytes: Limit for the tensors in one file; a larger tensor gets a separate file.
        metadata: Strings to add to the headers of the files.
        sync: Flush the files to disk before returning, so that they survive a power failure.
        process_group: Ranks that the model is sharded over. None: all ranks.

    Raises:
        ValueError: If an argument is invalid, or the format does not support a tensor.
        CheckpointError: On all ranks, if one of them cannot write (with the rank and the file), or does not see the
            folder, or the ranks of ``process_group`` do not hold the whole model. Files written so far are removed.
        UnmaterializedParameterError: If a parameter or buffer is on the meta device.
        PhaseError: If a unit is in the middle of a step.
        FullshardError: On the ranks that have called ``export_safetensors``, if others do not call it.

    Example:
        ```python
        import torch
        from torch import nn
        import fullshard

        model = fullshard.fully_shard(nn.Linear(16, 16))
        fullshard.export_safetensors(model, "exported", dtype=torch.bfloat16)
        ```
    """
    texts = dict(metadata or {})
    _check_arguments(dtype, max_shard_bytes)
    if ALIASES in texts or not all(isinstance(text, str) for item in texts.items() for text in item):
        raise ValueError(f"metadata: expected a dictionary of strings without the key {ALIASES!r}, found {texts}")
    path = local_path("export_safetensors: folder", folder)
    with rank_barrier(f"export_safetensors {path}", process_group) as barrier:
        state = barrier.run_on_all("planning", lambda: _exportable_state(model))
        tensors = {name: _described(shards.dtype, shards.shape, dtype) for name, shards in state.tensors.items()}
        aliases = {ALIASES: json.dumps(state.aliases)} if state.aliases else {}
        header_texts = {"format": "pt", **texts, **aliases}  # some readers require the format
        plans = barrier.run_on_all("planning", lambda: plan_files(tensors, max_shard_bytes, header_texts))
        # Pipeline stages, for example, hold other tensors.
        advice = "pass the process_group of the ranks that one model is sharded over"
        digest = digest_of([(name, str(tensor.dtype), tensor.shape) for name, tensor in tensors.items()])
        compare(
            digest,
            [process_group],
            lambda found: CheckpointError(f"{who_differs(found)} in the model's tensors; {advice}"),
        )
        made = OutputFiles(path, plans, secrets.token_hex(8), sync)
        _on_first(barrier, "making the folder", lambda: _make_folder(made))
        files = OutputFiles(path, plans, next(iter(gather(made.token, process_group).values())), sync)
        try:
            barrier.run_on_all("looking for the folder", lambda: _look_for_folder(files))
            _on_first(barrier, "making files", files.make)
            own = _assign_shards(state, process_group)
            barrier.run_on_all("writing", lambda: files.write(own))
            _on_first(barrier, "naming files", lambda: files.publish(texts))
        finally:
            if barrier.rank == 0:
                files.clean_up()


def _check_arguments(dtype: torch.dtype | None, max_shard_bytes: int) -> None:
    """Raise ValueError if an argument of an export is invalid."""
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype: expected a floating-point dtype, found {dtype}")
    if max_shard_bytes <= 0:
        raise ValueError(f"max_shard_bytes: expected a positive number, found {max_shard_bytes}")


def _described(own: torch.dtype, shape: Sequence[int], dtype: torch.dtype | None) -> FileTensor:
    """Return a tensor as it is in a file, with floating-point ones converted to ``dtype``."""
    return FileTensor(dtype if dtype is not None and own.is_floating_point else own, tuple(shape))


def _on_first(barrier: RankBarrier, step: str, function: Callable[[], object]) -> None:
    barrier.run_on_all(step, function if barrier.rank == 0 else lambda: None)


# -------------------------------------------------------------------- shards to write


def _exportable_state(model: nn.Module) -> ModelState:
    """Return the state of a model after checking that all of it can be written."""
    state = model_state(model)
    for name, shards in state.tensors.items():
        if shards.device.type == "meta":
            raise UnmaterializedParameterError(
                f"{name} is on the meta device and has no values; load or initialize the model first"
            )
        for shard in shards.shards:
            try:
                plain(shard.local)
            except TypeError as error:
                raise ValueError(f"{name} cannot be written to a safetensors file: {error}") from error
    return state


def _assign_shards(state: ModelState, group: dist.ProcessGroup | None) -> list[tuple[str, TensorShard]]:
    """Return the shards that this rank writes, by the plan of a save. A collective.

    Ranks that hold the same regions of a tensor are assumed to hold the same values.

    Raises:
        CheckpointError: If the shards of all ranks do not make up every tensor.
    """
    tensors = {name: replace(shards, equal=True) for name, shards in state.tensors.items()}
    ranks = SavingRanks(coordination_group(group), "cannot export the weights")
    held = ranks.step(lambda: RankInventory.of(tensors))
    writes = ranks.step(lambda: plan_writes(held).writes[ranks.rank])[ranks.rank]
    shards = ((name, shard) for name, entry in tensors.items() for shard in entry.shards)
    return [shard for shard, chosen in zip(shards, writes.tolist(), strict=True) if chosen]


# -------------------------------------------------------------------- files


def _make_folder(files: OutputFiles) -> None:
    """Create the folder, and a file in it by which other ranks can tell that they see the same folder."""
    with _errors_with_path(files.folder):
        files.folder.mkdir(parents=True, exist_ok=True)
        files.token_file.touch()


def _look_for_folder(files: OutputFiles) -> None:
    """Raise CheckpointError unless this rank sees the same folder as the first rank."""
    if not any(files.token_file.exists() for _ in looks()):
        raise CheckpointError(
            f"{files.folder}: this rank does not see the folder that the first rank has made: it must be on a file "
            "system that all ranks share. Without one, let a rank write the tensors of fullshard.full_tensors"
        )


# -------------------------------------------------------------------- from a checkpoint


def export_checkpoint(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    prefix: str = "model.",
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> list[Path]:
    """Write the tensors of a checkpoint as safetensors files, a few megabytes at a time.

    Args:
        path: Folder or URL of the checkpoint, of fullshard's format or of torch.distributed.checkpoint's.
        out: A file that ends in ``.safetensors``; or a folder, which gets the Hugging Face layout: one
            ``model.safetensors``, or numbered files and ``model.safetensors.index.json``.
        prefix: Write the tensors whose names begin with it, without the prefix.
        dtype: Convert floating-point tensors to it. None: keep their dtypes.
        max_shard_bytes: Limit for the tensors in each file of a folder; a larger tensor gets a separate file.

    Returns:
        The files, in order; the index, if there is one, last.

    Raises:
        CheckpointError: If the checkpoint cannot be read, has no such tensors, or a file cannot be written. Existing
            files at ``out`` are then unchanged.
        ValueError: If an argument is invalid, or safetensors does not support a dtype.
    """
    _check_arguments(dtype, max_shard_bytes)
    target = local_path("out", out)
    single = target.suffix == ".safetensors"
    with open_checkpoint(path) as checkpoint:
        tensors = {
            name.removeprefix(prefix): _described(checkpoint.dtype(name), checkpoint.shape(name), dtype)
            for name in _names(checkpoint, prefix)
        }
        metadata = {"format": "pt", **_tied(checkpoint, prefix)}
        plans = plan_files(tensors, 1 << 62 if single else max_shard_bytes, metadata)
        if single:
            plans = [replace(plans[0], name=target.name)]
        folder = target.parent if single else target
        files = OutputFiles(folder, plans, secrets.token_hex(8), is_single=single)
        with _errors_with_path(folder):
            folder.mkdir(parents=True, exist_ok=True)
        try:
            files.make()
            names = (name for plan in plans for name in plan.tensors)  # in the order of the files
            files.write((name, shard) for name in names for shard in checkpoint.shards(prefix + name))
            return files.publish({})
        finally:
            files.clean_up()


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


def _tied(checkpoint: Checkpoint, prefix: str) -> dict[str, str]:
    """Return the metadata in which ``fullshard.load_safetensors`` finds the other names of tied parameters."""
    aliases = {
        name.removeprefix(prefix): first.removeprefix(prefix)
        for name, first in checkpoint.aliases.items()
        if name.startswith(prefix) and first.startswith(prefix)
    }
    return {ALIASES: json.dumps(aliases)} if aliases else {}


# -------------------------------------------------------------------- files until they are complete


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
        with _errors_with_path(self.folder):
            for path in self.folder.iterdir():
                if leftover.fullmatch(path.name) and self.token not in path.name:
                    path.unlink(missing_ok=True)
        for plan in self.plans:
            with _errors_with_path(self.folder / plan.name), self._temporary(plan).open("wb") as file:
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
        with _errors_with_path(self.folder / plan.name):
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
        with _errors_with_path(self.folder):
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
            flush(path)


@contextlib.contextmanager
def _errors_with_path(path: Path) -> Iterator[None]:
    """Translate errors of the file system into CheckpointError with the path of what was written."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error}") from error
