"""``fullshard.export_safetensors``: full weights as safetensors files, every rank writing its own shards.

[Note: Export without gathering]
The byte ranges of all tensors follow from names, shapes and dtypes, which all ranks know. So one rank creates the
files, headers first and at full length, under temporary names, and then all ranks write their shards into them
concurrently; weights are not communicated. Replicated shards are written by one rank. At the end the files are renamed
to their final names, the index last. That needs a folder on a shared file system; otherwise the group's first rank
writes all, tensor by tensor, as ``fullshard.full_tensors`` gathers them.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from fullshard.checkpoint.format.host import plain
from fullshard.checkpoint.safetensors.files import FileTensor, local_path, plan_files, shortened
from fullshard.checkpoint.safetensors.output import OutputFiles, errors_with_path
from fullshard.checkpoint.safetensors.stream import full_tensors
from fullshard.checkpoint.state.model import ModelState, model_state
from fullshard.checkpoint.state.tensor_shards import TensorShard, TensorShards
from fullshard.errors import CheckpointError, UnmaterializedParameterError
from fullshard.ranks.agreement import any_rank, compare, digest_of, gather, who_differs
from fullshard.ranks.barrier import RankBarrier, rank_barrier

__all__ = ["ALIASES", "check_arguments", "described", "export_safetensors"]

ALIASES = "aliases"  # metadata key: other names of tied parameters, each with the name in the files
_LOOKS, _LOOK_S = 5, 0.2  # retries and interval when looking for the folder: a network file system may show it late
_AGREED_BYTES = 16 * 1024 * 1024  # of one all-gather of digests


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

    Every rank writes its own shards into the files, through a few megabytes of memory. If the ranks do not see the same
    ``folder``, the first rank of the process group writes alone, which takes longer and needs as much memory as
    ``full_tensors``.

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
        CheckpointError: On all ranks, if one of them cannot write (with the rank and the file), or the ranks of
            ``process_group`` do not hold the whole model. Files written so far are removed.
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
    check_arguments(dtype, max_shard_bytes)
    if ALIASES in texts or not all(isinstance(text, str) for item in texts.items() for text in item):
        raise ValueError(f"metadata: expected a dictionary of strings without the key {ALIASES!r}, found {texts}")
    path = local_path("export_safetensors: folder", folder)
    with rank_barrier(f"export_safetensors {path}", process_group) as barrier:
        state = barrier.run_on_all("planning", lambda: _exportable_state(model))
        tensors = {name: described(shards.dtype, shards.shape, dtype) for name, shards in state.tensors.items()}
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
            seen = barrier.run_on_all("looking for the folder", lambda: _sees_folder(files))
            shared = not any_rank(not seen, [process_group])
            _on_first(barrier, "making files", files.make)
            if shared:
                own, partial = _assign_shards(state, process_group)
                barrier.run_on_all("assigning shards", lambda: _check_complete(partial, state))
                barrier.run_on_all("writing", lambda: files.write(own))
            else:
                error = _write_alone(files, model, dtype, writes=barrier.rank == 0)
                barrier.run_on_all("writing", lambda: _raise(error))
            _on_first(barrier, "naming files", lambda: files.publish(texts))
        finally:
            if barrier.rank == 0:
                files.clean_up()


def check_arguments(dtype: torch.dtype | None, max_shard_bytes: int) -> None:
    """Raise ValueError if an argument of an export is invalid."""
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype: expected a floating-point dtype, found {dtype}")
    if max_shard_bytes <= 0:
        raise ValueError(f"max_shard_bytes: expected a positive number, found {max_shard_bytes}")


def described(own: torch.dtype, shape: Sequence[int], dtype: torch.dtype | None) -> FileTensor:
    """Return a tensor as it is in a file, with floating-point ones converted to ``dtype``."""
    return FileTensor(dtype if dtype is not None and own.is_floating_point else own, tuple(shape))


def _on_first(barrier: RankBarrier, step: str, function: Callable[[], object]) -> None:
    barrier.run_on_all(step, function if barrier.rank == 0 else lambda: None)


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


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


def _assign_shards(
    state: ModelState, group: dist.ProcessGroup | None
) -> tuple[list[tuple[str, TensorShard]], dict[str, int]]:
    """Return the shards that this rank writes: all that it holds, except replicas that another rank writes. A
    collective.

    Ranks that hold the same regions of a tensor are assumed to hold the same values; the one that has least to write so
    far writes them.

    Returns:
        The shards; and, equal on all ranks, the tensors that all shards together do not cover, with the number of
        elements that they cover.
    """
    size = dist.get_world_size(group) if dist.is_initialized() else 1
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    own = np.array([_holding(held) for held in state.tensors.values()], dtype=np.int64).reshape(-1, 3)
    loads, mine, partial = np.zeros(size, dtype=np.int64), [], {}
    items, step = list(state.tensors.items()), max(1, _AGREED_BYTES // (own.itemsize * 3 * size))
    for start in range(0, len(items), step):
        table = np.stack(list(gather(own[start : start + step], group).values()), axis=1)
        for (name, held), column in zip(items[start : start + step], table, strict=True):
            order = np.argsort(loads, kind="stable")
            digests, first = np.unique(column[order, 0], return_index=True)
            writers = order[first[digests != 0]]  # of each set of regions, the rank with the least to write
            loads[writers] += column[writers, 1]
            if rank in writers:
                mine += [(name, shard) for shard in held.shards if shard.region.numel]
            numel = int(column[writers, 2].sum())
            if numel != held.shape.numel():
                partial[name] = numel
    return mine, partial


def _holding(shards: TensorShards) -> tuple[int, int, int]:
    """Return a hash of the regions of a tensor that this rank holds (0 if none), their bytes, and their elements."""
    regions = [(shard.region.offsets, shard.region.sizes) for shard in shards.shards if shard.region.numel]
    digest = int.from_bytes(digest_of(regions), "little", signed=True) | 1
    return (digest if regions else 0), shards.nbytes, sum(shard.region.numel for shard in shards.shards)


def _check_complete(partial: Mapping[str, int], state: ModelState) -> None:
    """Raise if some tensors would not be written completely: the rest would be zeros in the files."""
    if partial:
        listed = [
            f"{name} (expected {state.tensors[name].shape.numel()} elements, found {numel})"
            for name, numel in partial.items()
        ]
        raise CheckpointError(
            f"the ranks that export do not hold all shards of these tensors: {shortened(listed)}; call it on all ranks "
            "that the model is sharded over, and pass their process_group, or None for all ranks"
        )


# -------------------------------------------------------------------- files


def _make_folder(files: OutputFiles) -> None:
    """Create the folder, and a file in it by which other ranks can tell that they see the same folder."""
    with errors_with_path(files.folder):
        files.folder.mkdir(parents=True, exist_ok=True)
        files.token_file.touch()


def _sees_folder(files: OutputFiles) -> bool:
    """Return True if this rank sees the same folder as the first rank."""
    for look in range(_LOOKS):
        if files.token_file.exists():
            return True
        time.sleep(_LOOK_S if look + 1 < _LOOKS else 0)
    return False


def _write_alone(files: OutputFiles, model: nn.Module, dtype: torch.dtype | None, *, writes: bool) -> Exception | None:
    """Write full tensors as they are gathered. A collective.

    Returns:
        The error, if this rank cannot write: it takes part in all all-gathers, and raises afterwards.
    """
    planned = {name for plan in files.plans for name in plan.tensors}
    tensors, error = full_tensors(model, dtype=dtype), None
    try:
        if writes:
            whole = ((name, TensorShards.whole(tensor).shards[0]) for name, tensor in tensors if name in planned)
            files.write(whole)
    except Exception as raised:
        error = raised
    for _ in tensors:
        pass
    return error
