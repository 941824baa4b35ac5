"""``fullshard.load_safetensors``: weights from safetensors files, every rank reading the byte ranges of its shards."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from fullshard.checkpoint.format.host import plain
from fullshard.checkpoint.safetensors.export import ALIASES
from fullshard.checkpoint.safetensors.files import FileTensor, WeightFiles, find_weights, local_path
from fullshard.checkpoint.safetensors.shard_io import ShardFileIO
from fullshard.checkpoint.state.materialize import MetaTensors
from fullshard.checkpoint.state.model import ModelState, model_state
from fullshard.checkpoint.state.parameters import mark_shards_written, walk_modules
from fullshard.checkpoint.state.tensor_shards import TensorShards
from fullshard.errors import CheckpointError
from fullshard.ranks.agreement import any_rank, compare, digest_of, who_differs
from fullshard.ranks.barrier import rank_barrier

__all__ = ["IncompatibleNames", "load_safetensors"]

_SHOWN = 1000  # names per kind of mismatch in an error


class IncompatibleNames(NamedTuple):
    """Names that only the model or only the files have.

    Args:
        missing_keys: Parameters and persistent buffers that the files do not have.
        unexpected_keys: Tensors of the files that the model does not have.
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
    """Fill ``model`` from safetensors files. All ranks call it; each reads only the byte ranges of its shards.

    Contiguous byte ranges are read straight into the shards. Names, shapes and dtypes are compared on all ranks before
    anything changes. Parameters and buffers on the meta device are allocated on the device where their unit computes
    (or is offloaded to); they stay the same objects, so an optimizer may exist already.

    Args:
        model: A model of either front end, DistributedDataParallel or plain; between steps.
        path: A ``.safetensors`` file, an index of several, or a folder with ``model.safetensors``,
            ``model.safetensors.index.json`` or one ``.safetensors`` file.
        strict: Raise if a name is only in the model or only in the files. Otherwise tensors that the files lack keep
            their values; tensors on the meta device must be in the files in any case, unless they are buffers that
            can be initialized.
        rename: Called with each name in the files; returns the model's name for it (as before wrapping), or None to
            leave the tensor out. Equal on all ranks.
        cast: Convert between floating-point dtypes. Other differences of dtype are always errors.
        init_buffers: Fills the buffers of a module, such as the frequencies of rotary embeddings: called with each that
            has buffers on the meta device that are not in the files. What else it changes is undone. None: the module's
            own ``reset_parameters()``, or else ``_init_weights(module)`` of the closest module around it that has such
            a method, as models of Hugging Face transformers (5 and later) do.
        process_group: The ranks that the model is sharded over. None: all.

    Returns:
        The names that only one side has.

    Raises:
        CheckpointError: On all ranks, before anything changes: the files are invalid or do not match the model, with
            missing and unexpected names, and those of wrong shape or dtype. Or a file could not be read to the end
            although it had been checked: then the model is partly changed, and the error says so.
        ValueError: If ``rename`` returns the same name for two tensors.
        PhaseError: If a unit is in the middle of a step.
        FullshardError: On the ranks that wait, if others do not call ``load_safetensors``.
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
        plan = barrier.run_on_all("comparing", lambda: _compare(model, source, init_buffers, strict=strict, cast=cast))
        meta = MetaTensors(model, init_buffers)
        kept = barrier.run_on_all("copying values to keep", lambda: _values_to_keep(model, meta, plan.sources))
        if any_rank(bool(meta), [process_group]):
            barrier.run_on_all("allocating", lambda: meta.materialize(plan.sources))
        state = barrier.run_on_all("collecting", lambda: _targets(model))
        try:
            barrier.run_on_all("restoring", lambda: _restore_kept(state, kept))
            barrier.run_on_all("reading", lambda: _fill(state, plan.sources))
        finally:
            mark_shards_written(model)
        return plan.incompatible


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
        names = {name: name if rename is None else rename(name) for name in files.tensors}
        tensors: dict[str, tuple[Path, FileTensor]] = {}
        for name, new in names.items():
            if new is None:
                continue
            if not isinstance(new, str):
                raise TypeError(f"rename: expected a name or None for {name!r}, found {new!r}")
            if new in tensors:
                both = [old for old, renamed in names.items() if renamed == new]
                raise ValueError(f"rename: the tensors {both} get the same name, {new!r}")
            tensors[new] = files.tensors[name]
        aliases = {}
        for alias, first in _aliases(path, files).items():
            new_alias, new_first = (name if rename is None else rename(name) for name in (alias, first))
            if new_alias is not None and new_first in tensors:
                aliases[new_alias] = new_first
        return cls(path, tensors, aliases)

    @property
    def digest(self) -> bytes:
        """Hash of all tensors and their locations; equal on ranks that see the same files."""
        listed = [
            (new, path.name, place.start, place.shape, str(place.dtype)) for new, (path, place) in self.tensors.items()
        ]
        return digest_of((listed, self.aliases))

    def find(self, names: list[str]) -> tuple[Path, FileTensor] | None:
        """Return the tensor that has one of these names, preferring earlier names."""
        for known in (lambda name: name, self.aliases.get):
            for name in names:
                found = self.tensors.get(known(name) or "")
                if found is not None:
                    return found
        return None


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


@dataclass(frozen=True)
class _ImportPlan:
    """Sources of all tensors to read.

    Args:
        sources: File and location by the model's name (of tied tensors, the first name).
        incompatible: Names without a source or a target.
    """

    sources: dict[str, tuple[Path, FileTensor]]
    incompatible: IncompatibleNames


@dataclass
class _Mismatches:
    """Differences between files and model, by kind."""

    found: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, *names: str) -> None:
        self.found.setdefault(kind, []).extend(names)

    def __iter__(self) -> Iterator[str]:
        for kind, names in self.found.items():
            if names:
                more = f"\n    and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                yield f"{kind}:\n    " + "\n    ".join(names[:_SHOWN]) + more


def _compare(
    model: nn.Module,
    source: _WeightSource,
    init_buffers: Callable[[nn.Module], object] | None,
    *,
    strict: bool,
    cast: bool,
) -> _ImportPlan:
    """Find the source of each tensor.

    Raises:
        CheckpointError: If files and model do not match.
    """
    state, meta, problems = _targets(model), MetaTensors(model, init_buffers), _Mismatches()
    names = state.names_of
    optional = {name for name, _ in _non_persistent_buffers(model)}
    sources: dict[str, tuple[Path, FileTensor]] = {}
    missing = []
    for first, shards in state.tensors.items():
        found = source.find(names[first])
        if found is not None:
            sources[first] = found
            _compare_one(problems, first, shards, found[1], cast=cast)
        elif first not in optional:
            missing.append(first)
    unexpected = sorted(source.tensors.keys() - state.names)
    if strict:
        problems.add("not in the files", *(_described(name, state.tensors[name]) for name in missing))
        problems.add("in the files, but not in the model", *unexpected)
    without = [name for name in meta.never_filled(sources) if not strict or name not in missing]
    problems.add("on the meta device and not in the files (init_buffers can initialize buffers)", *without)
    listed = list(problems)
    if listed:
        raise CheckpointError(f"{source.path} does not match the model (nothing was changed)\n  " + "\n  ".join(listed))
    return _ImportPlan(sources, IncompatibleNames(missing, unexpected))


def _compare_one(problems: _Mismatches, name: str, shards: TensorShards, found: FileTensor, *, cast: bool) -> None:
    own, other = shards.dtype, found.dtype
    if tuple(shards.shape) != found.shape:
        problems.add("shape mismatch", f"{name}: {found.shape} in the files, {tuple(shards.shape)} in the model")
    elif own is not other and not (own.is_floating_point and other.is_floating_point):
        problems.add("dtype mismatch", f"{name}: {other} in the files, {own} in the model")
    elif own is not other and not cast:
        problems.add("dtype mismatch (pass cast=True to convert)", f"{name}: {other} in the files, {own} in the model")
    if shards.device.type != "meta":
        try:
            for shard in shards.shards:
                plain(shard.local)
        except TypeError as error:
            problems.add("cannot be filled from a file", f"{name}: {error}")


def _described(name: str, shards: TensorShards) -> str:
    return f"{name} {tuple(shards.shape)}"


def _targets(model: nn.Module) -> ModelState:
    """Return the tensors that can be filled: the model's state, and non-persistent buffers that some files have."""
    state = model_state(model)
    for name, buffer in _non_persistent_buffers(model):
        if name not in state.tensors:
            state._add_buffer(name, buffer)
    return state


def _non_persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in walk_modules(model):
        for name, buffer in module._buffers.items():
            if buffer is not None and name in module._non_persistent_buffers_set:
                yield prefix + name, buffer


# -------------------------------------------------------------------- values that no file has


def _values_to_keep(model: nn.Module, meta: MetaTensors, sources: Collection[str]) -> dict[str, list[torch.Tensor]]:
    """Copy values that are not read but that an initialization of buffers would overwrite.

    Returns:
        Copies of this rank's shards, by name.
    """
    prefixes = tuple(meta.initialized_prefixes(sources))
    if not prefixes:
        return {}
    state = _targets(model)
    names = state.names_of
    return {
        name: [plain(shard.local).clone() for shard in shards.shards]
        for name, shards in state.tensors.items()
        if name not in sources
        and shards.device.type != "meta"
        and any(each.startswith(prefixes) for each in names[name])
    }


def _restore_kept(state: ModelState, kept: dict[str, list[torch.Tensor]]) -> None:
    with torch.no_grad():
        for name, values in kept.items():
            for shard, value in zip(state.tensors[name].shards, values, strict=True):
                plain(shard.local).copy_(value)


# -------------------------------------------------------------------- reading


def _fill(state: ModelState, sources: dict[str, tuple[Path, FileTensor]]) -> None:
    """Read this rank's shards, file by file, in file order."""
    places: dict[Path, list[tuple[FileTensor, str]]] = {}
    for name, (path, tensor) in sources.items():
        places.setdefault(path, []).append((tensor, name))
    mover, filled = ShardFileIO(), set()
    for path, tensors in places.items():
        name = ""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                for tensor, name in sorted(tensors, key=lambda item: item[0].start):
                    for shard in state.tensors[name].shards:
                        mover.read(descriptor, tensor, shard)
                    filled.add(name)
            finally:
                os.close(descriptor)
        except (OSError, CheckpointError) as error:
            raise CheckpointError(
                f"{path}: {name} cannot be read: {error}. The model is partly changed: load it again from intact files"
            ) from error
    assert filled == sources.keys(), "every tensor that has a place was read"
    state.copy_back()
