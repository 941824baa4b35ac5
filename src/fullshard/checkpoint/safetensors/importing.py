"""``fullshard.load_safetensors``: weights from safetensors files, every rank reading the byte ranges of its shards."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch import nn

from fullshard.checkpoint.format.host import plain
from fullshard.checkpoint.safetensors.export import ALIASES
from fullshard.checkpoint.safetensors.files import FileTensor, WeightFiles, find_weights, local_path
from fullshard.checkpoint.safetensors.shard_io import ShardFileIO
from fullshard.checkpoint.state.materialize import MetaTensors
from fullshard.checkpoint.state.model import ModelState, model_state
from fullshard.checkpoint.state.parameters import mark_shards_written
from fullshard.engine.parameters.tensor_shards import TensorShards
from fullshard.errors import CheckpointError
from fullshard.ranks.agreement import compare, digest_of, who_differs
from fullshard.ranks.barrier import rank_barrier

__all__ = ["IncompatibleNames", "load_safetensors"]

_SHOWN = 1000  # names per kind of mismatch in an error


class IncompatibleNames(NamedTuple):
    """Names that only the model or only the files have.

    Attributes:
        missing_keys: Parameters and persistent buffers that are not in the files.
        unexpected_keys: Tensors of the files that are not in the model.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_safetensors(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    rename: Callable[[str], str | None] | None = None,
    cast: bool = True,
    init_buffers: Callable[[nn.Module], object] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> IncompatibleNames:
    """Load weights into ``model`` from safetensors files. All ranks call it; each reads only its own shards.

    Contiguous byte ranges are read directly into the shards. All ranks compare names, shapes and dtypes before anything
    changes. Parameters and buffers on the meta device are allocated on the compute device of their unit (or in CPU
    memory if the unit is offloaded). Parameters stay the same objects, so an optimizer may exist already.

    Args:
        model: A model of ``fully_shard`` or ``FullyShardedDataParallel``, DistributedDataParallel or plain; not in the
            middle of a step.
        path: A ``.safetensors`` file, an index of several files, or a folder with ``model.safetensors``,
            ``model.safetensors.index.json`` or one ``.safetensors`` file.
        strict: Raise if a name is only in the model or only in the files. If False, tensors that are not in the files
            keep their values. Tensors on the meta device must be in the files in any case, unless they are buffers that
            can be initialized.
        rename: Called with each name in the files. Returns the name in the model (before wrapping), or None to skip the
            tensor. Must return the same names on all ranks.
        cast: Convert between floating-point dtypes. Other dtype mismatches are always errors.
        init_buffers: Function that initializes the buffers of a module, such as the frequencies of rotary embeddings.
            It is called with each module that has buffers on the meta device that are not in the files; its changes to
            other tensors are undone. None: the module's ``reset_parameters()``, else ``_init_weights(module)`` of the
            closest enclosing module with such a method, as models of Hugging Face transformers (5 and later) have.
        process_group: Ranks that the model is sharded over. None: all ranks.

    Returns:
        The names that only the model or only the files have.

    Raises:
        CheckpointError: On all ranks and before anything changes, if the files are invalid or do not match the model,
            with missing and unexpected names and mismatches of shape or dtype. Also if a file that was checked could
            not be read to the end: then the model is partly changed, and the error says so.
        ValueError: If ``path`` is a URL, or ``rename`` returns the same name for two tensors.
        PhaseError: If a unit is in the middle of a step.
        FullshardError: On the ranks that have called ``load_safetensors``, if others do not call it.

    Example:
        ```python
        import torch
        from torch import nn
        import fullshard

        fullshard.export_safetensors(fullshard.fully_shard(nn.Linear(16, 16)), "weights")
        with torch.device("meta"):
            model = nn.Linear(16, 16)
        fullshard.fully_shard(model)
        fullshard.load_safetensors(model, "weights")
        ```
    """
    where = local_path("load_safetensors: path", path)
    with rank_barrier(f"load_safetensors {where}", process_group) as barrier:
        source = barrier.run_on_all("reading headers", lambda: _WeightSource.of(where, rename))
        advice = "copy the same files to all machines, and pass the same rename on all ranks"
        compare(
            source.digest,
            [process_group],
            lambda found: CheckpointError(f"{where}: {who_differs(found)} in the files that they read; {advice}"),
        )
        meta = barrier.run_on_all("looking for meta tensors", lambda: MetaTensors(model, init_buffers))
        targets = partial(model_state, model, non_persistent=True)  # which some files have
        sources, names = barrier.run_on_all(
            "comparing", lambda: _compare(targets(), source, meta, strict=strict, cast=cast)
        )
        try:
            barrier.run_on_all("allocating", lambda: meta.materialize(sources))
            barrier.run_on_all("reading", lambda: _fill(targets(), sources))
        finally:
            mark_shards_written(model)
        return names


@dataclass(frozen=True)
class _WeightSource:
    """The tensors of the files under the model's names.

    Args:
        path: Path as given.
        tensors: File and location by name.
        aliases: Other names of tied tensors.
    """

    path: Path
    tensors: dict[str, tuple[Path, FileTensor]]
    aliases: dict[str, str]

    @classmethod
    def of(cls, path: Path, rename: Callable[[str], str | None] | None) -> _WeightSource:
        files = find_weights(path)
        new_name = rename or (lambda name: name)
        tensors: dict[str, tuple[Path, FileTensor]] = {}
        for name, found in files.tensors.items():
            new = new_name(name)
            if new is None:
                continue
            if not isinstance(new, str):
                raise TypeError(f"rename: expected a name or None for {name!r}, found {new!r}")
            if new in tensors:
                both = [old for old in files.tensors if new_name(old) == new]
                raise ValueError(f"rename: the tensors {both} get the same name, {new!r}")
            tensors[new] = found
        renamed = ((new_name(alias), new_name(first)) for alias, first in _aliases(path, files).items())
        return cls(path, tensors, {alias: first for alias, first in renamed if alias is not None and first in tensors})

    @property
    def digest(self) -> bytes:
        """Hash of all tensors and their locations; equal on ranks that see the same files."""
        return digest_of(([(name, path.name, place) for name, (path, place) in self.tensors.items()], self.aliases))

    def find(self, names: list[str]) -> tuple[Path, FileTensor] | None:
        """Return the tensor that has one of these names, or else one of their aliases, preferring earlier names."""
        known = (name for name in (*names, *map(self.aliases.get, names)) if name in self.tensors)
        found = next(known, None)
        return None if found is None else self.tensors[found]


def _aliases(path: Path, files: WeightFiles) -> dict[str, str]:
    """Return the other names of tied tensors, from the metadata of the files."""
    text = files.metadata.get(ALIASES)
    if text is None:
        # Other writers add a metadata key per name.
        return {key: first for key, first in files.metadata.items() if first in files.tensors}
    try:
        aliases = json.loads(text)
    except (ValueError, RecursionError):
        aliases = None
    if not isinstance(aliases, dict) or not all(isinstance(first, str) for first in aliases.values()):
        raise CheckpointError(
            f"{path}: expected a JSON object of names as {ALIASES!r} in the metadata, found {text[:200]!r}"
        )
    return aliases


# -------------------------------------------------------------------- comparing


def _compare(
    state: ModelState, source: _WeightSource, meta: MetaTensors, *, strict: bool, cast: bool
) -> tuple[dict[str, tuple[Path, FileTensor]], IncompatibleNames]:
    """Return the file and location of each tensor to read, by the model's (first) name; and the names of one side only.

    Raises:
        CheckpointError: If files and model do not match.
    """
    names, problems = state.names_of, defaultdict[str, list[str]](list)
    sources, missing = {}, []
    for first, shards in state.tensors.items():
        found = source.find(names[first])
        if found is not None:
            sources[first] = found
            for kind, text in _mismatches(shards, found[1], cast=cast):
                problems[kind].append(f"{first}: {text}")
        elif not state.non_persistent.issuperset(names[first]):
            missing.append(first)
    unexpected = sorted(source.tensors.keys() - state.names)
    if strict:
        problems["not in the files"] += [f"{name} {tuple(state.tensors[name].shape)}" for name in missing]
        problems["in the files, but not in the model"] += unexpected
    without = [name for name in meta.never_filled(sources) if not strict or name not in missing]
    problems["on the meta device and not in the files (init_buffers can initialize buffers)"] += without
    listed = []
    for kind, found_names in problems.items():
        more = [f"and {len(found_names) - _SHOWN} more"] if len(found_names) > _SHOWN else []
        listed += [f"\n  {kind}:", *(f"\n    {text}" for text in (*found_names[:_SHOWN], *more))] if found_names else []
    if listed:
        raise CheckpointError(f"{source.path} does not match the model (nothing was changed){''.join(listed)}")
    return sources, IncompatibleNames(missing, unexpected)


def _mismatches(shards: TensorShards, found: FileTensor, *, cast: bool) -> Iterator[tuple[str, str]]:
    """Yield why a tensor cannot be read: the kind of the mismatch, and what is on both sides."""
    own, other = shards.dtype, found.dtype
    both = f"{other} in the files, {own} in the model"
    if tuple(shards.shape) != found.shape:
        yield "shape mismatch", f"{found.shape} in the files, {tuple(shards.shape)} in the model"
    elif own is not other and not (own.is_floating_point and other.is_floating_point):
        yield "dtype mismatch", both
    elif own is not other and not cast:
        yield "dtype mismatch (pass cast=True to convert)", both
    try:
        for shard in shards.shards if shards.device.type != "meta" else ():
            plain(shard.local)
    except TypeError as error:
        yield "cannot be filled from a file", str(error)


# -------------------------------------------------------------------- reading


def _fill(state: ModelState, sources: dict[str, tuple[Path, FileTensor]]) -> None:
    """Read this rank's shards, file by file, in file order."""
    places: dict[Path, list[tuple[FileTensor, str]]] = {}
    for name, (path, tensor) in sources.items():
        places.setdefault(path, []).append((tensor, name))
    mover = ShardFileIO()
    for path, tensors in places.items():
        name = ""
        try:
            with path.open("rb", buffering=0) as file:
                for tensor, name in sorted(tensors, key=lambda item: item[0].start):
                    for shard in state.tensors[name].shards:
                        mover.read(file.fileno(), tensor, shard)
        except (OSError, CheckpointError) as error:
            raise CheckpointError(
                f"{path}: {name} cannot be read: {error}. The model is partly changed: load it again from intact files"
            ) from error
    state.copy_back()
