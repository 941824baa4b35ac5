"""Export full weights from a checkpoint to safetensors files, without the model, without ranks, in little memory."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import replace
from pathlib import Path

import torch

from fullshard.checkpoint.format.host import bytes_of
from fullshard.checkpoint.safetensors.export import ALIASES, check_arguments, described
from fullshard.checkpoint.safetensors.files import FilePlan, local_path, plan_files
from fullshard.checkpoint.safetensors.output import OutputFiles, errors_with_path
from fullshard.checkpoint.tools.offline import Checkpoint, open_checkpoint
from fullshard.errors import CheckpointError

__all__ = ["export"]


def export(
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
    check_arguments(dtype, max_shard_bytes)
    target = local_path("out", out)
    single = target.suffix == ".safetensors"
    with open_checkpoint(path) as checkpoint:
        tensors = {
            name.removeprefix(prefix): described(checkpoint.dtype(name), checkpoint.shape(name), dtype)
            for name in _names(checkpoint, prefix)
        }
        metadata = {"format": "pt", **_tied(checkpoint, prefix)}
        plans = plan_files(tensors, 1 << 62 if single else max_shard_bytes, metadata)
        if single:
            plans = [replace(plans[0], name=target.name)]
        folder = target.parent if single else target
        files = OutputFiles(folder, plans, secrets.token_hex(8), is_single=single)
        with errors_with_path(folder):
            folder.mkdir(parents=True, exist_ok=True)
        try:
            files.make()
            for plan in plans:
                with files.opened(plan) as descriptor:
                    os.lseek(descriptor, len(plan.header), os.SEEK_SET)
                    _write(checkpoint, plan, prefix, descriptor)
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


def _write(checkpoint: Checkpoint, plan: FilePlan, prefix: str, descriptor: int) -> None:
    for name, place in sorted(plan.tensors.items(), key=lambda item: item[1].start):
        for _, part in checkpoint.parts(prefix + name):
            view = bytes_of(part.to(place.dtype))
            while view:
                written = os.write(descriptor, view)
                view = view[written:]
