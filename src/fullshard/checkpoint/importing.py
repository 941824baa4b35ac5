"""``fullshard.load_safetensors``: weights from safetensors files, every rank reading the byte ranges that it holds."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from fullshard.checkpoint.entry import entered
from fullshard.checkpoint.export import ALIASES
from fullshard.checkpoint.file_pieces import PieceMover
from fullshard.checkpoint.host import plain
from fullshard.checkpoint.materialize import MetaTensors
from fullshard.checkpoint.model_state import ModelState, model_state
from fullshard.checkpoint.parameters import walk, written
from fullshard.checkpoint.pieces import Pieces
from fullshard.checkpoint.safetensors_files import FileTensor, WeightFiles, find_weights, local_path
from fullshard.errors import CheckpointError

__all__ = ["IncompatibleNames", "load_safetensors"]

_SHOWN = 1000  # names of one kind in an error


class IncompatibleNames(NamedTuple):
    """Where model and files differ.

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
    process_group: dist.ProcessGroup | None = None,
) -> IncompatibleNames:
    """Fill ``model`` from safetensors files. All ranks call it; each reads only the byte ranges that it holds.

    What is contiguous goes from the file straight into the shards. Names, shapes and dtypes of everything are compared
    before anything changes, on all ranks together. Parameters and buffers on the meta device get memory, on the device
    where their unit computes (or is offloaded to); they stay the same objects, so an optimizer may exist already.

    Args:
        model: Of either front end, DistributedDataParallel or plain; between steps.
        path: A ``.safetensors`` file, an index of several, or a folder with ``model.safetensors``,
            ``model.safetensors.index.json`` or one ``.safetensors`` file.
        strict: Whether a name that only one side has is an error. Otherwise what the files lack stays as it is; what is
            on the meta device must be in the files all the same. A ``reset_parameters()`` that has to make a buffer
            changes nothing else.
        rename: Called with each name in the files; returns the model's name for it (as before wrapping), or None to
            leave the tensor out. Equal on all ranks.
        cast: Whether to convert between floating-point dtypes. Other differences of dtype are always errors.
        process_group: The ranks that hold the model. None: all.

    Returns:
        The names that only one side has.

    Raises:
        CheckpointError: On all ranks, and nothing was changed: the files are wrong, or do not fit the model; lists the
            names that are missing or unexpected, and those of wrong shape or dtype. Or a file could not be read to the
            end, after it was checked: then the model is partly changed, and the error says so.
        ValueError: If ``rename`` gives two tensors one name.
        PhaseError: If a unit is in the middle of a step.
        FullshardError: On the ranks that wait, if others do not load.
    """
    where = local_path("load_safetensors: path", path)
    with entered(f"load_safetensors {where}", process_group) as entry:
        source = entry.together("reading headers", lambda: _Source.of(where, rename))
        expected = entry.from_first("reading headers", lambda: source.digest)
        entry.together("comparing files", lambda: source.check(expected))
        plan = entry.together("comparing", lambda: _compare(model, source, strict=strict, cast=cast))
        meta = MetaTensors(model)
        kept = entry.together("keeping", lambda: _kept(model, meta, plan.sources))
        if entry.any("looking for meta tensors", lambda: bool(meta)):
            entry.together("giving memory", lambda: meta.materialize(plan.sources))
        state = entry.together("collecting", lambda: _targets(model))
        try:
            entry.together("putting back", lambda: _put_back(state, kept))
            entry.together("reading", lambda: _fill(state, plan.sources))
        finally:
            written(model)
        return plan.incompatible


@dataclass(frozen=True)
class _Source:
    """The tensors of the files under the model's names.

    Args:
        path: As given.
        tensors: File and place by name.
        aliases: Further names for them.
    """

    path: Path
    tensors: dict[str, tuple[Path, FileTensor]]
    aliases: dict[str, str]

    @classmethod
    def of(cls, path: Path, rename: Callable[[str], str | None] | None) -> _Source:
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
                raise ValueError(f"rename: gives the tensors {both} the same name, {new!r}")
            tensors[new] = files.tensors[name]
        aliases = {}
        for alias, first in _aliases(path, files).items():
            new_alias, new_first = (name if rename is None else rename(name) for name in (alias, first))
            if new_alias is not None and new_first in tensors:
                aliases[new_alias] = new_first
        return cls(path, tensors, aliases)

    @property
    def digest(self) -> str:
        """Equal on ranks that have found the same tensors in the same places."""
        listed = [
            (new, path.name, place.start, place.shape, str(place.dtype)) for new, (path, place) in self.tensors.items()
        ]
        return hashlib.blake2b(repr((listed, self.aliases)).encode(), digest_size=16).hexdigest()

    def check(self, expected: str) -> None:
        """Raise CheckpointError if this rank has found other files than the first one."""
        if self.digest != expected:
            raise CheckpointError(
                f"{self.path}: the files here are not those that the group's first rank finds; copy the same files to "
                "all machines, and pass the same rename on all ranks"
            )

    def find(self, names: list[str]) -> tuple[Path, FileTensor] | None:
        """The tensor that has one of these names, the first of them before the others."""
        for known in (lambda name: name, self.aliases.get):
            for name in names:
                found = self.tensors.get(known(name) or "")
                if found is not None:
                    return found
        return None


def _aliases(path: Path, files: WeightFiles) -> dict[str, str]:
    """What the metadata says of names that are not in the files."""
    text = files.metadata.get(ALIASES)
    if text is None:
        # Other writers put each name into the metadata by itself.
        return {key: first for key, first in files.metadata.items() if first in files.tensors}
    try:
        aliases = json.loads(text)
    except (ValueError, RecursionError):
        aliases = None
    if not isinstance(aliases, dict) or not all(isinstance(first, str) for first in aliases.values()):
        raise CheckpointError(f"{path}: expected names by names as {ALIASES!r} in the metadata, found {text[:200]!r}")
    return aliases


# -------------------------------------------------------------------- comparing


@dataclass(frozen=True)
class _Plan:
    """What is read.

    Args:
        sources: File and place, by the model's name (of tied tensors the first).
        incompatible: What is not.
    """

    sources: dict[str, tuple[Path, FileTensor]]
    incompatible: IncompatibleNames


@dataclass
class _Problems:
    """What does not fit, by kind."""

    found: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, *names: str) -> None:
        self.found.setdefault(kind, []).extend(names)

    def __iter__(self) -> Iterator[str]:
        for kind, names in self.found.items():
            if names:
                more = f"\n    and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                yield f"{kind}:\n    " + "\n    ".join(names[:_SHOWN]) + more


def _compare(model: nn.Module, source: _Source, *, strict: bool, cast: bool) -> _Plan:
    """Find each tensor's place.

    Raises:
        CheckpointError: If something does not fit.
    """
    state, meta, problems = _targets(model), MetaTensors(model), _Problems()
    names: dict[str, list[str]] = {name: [name] for name in state.tensors}
    for alias, first in state.aliases.items():
        names[first].append(alias)
    optional = _not_persistent(model)
    sources: dict[str, tuple[Path, FileTensor]] = {}
    missing = []
    for first, pieces in state.tensors.items():
        found = source.find(names[first])
        if found is not None:
            sources[first] = found
            _compare_one(problems, first, pieces, found[1], cast=cast)
        elif first not in optional:
            missing.append(first)
    known = {name for every in names.values() for name in every}
    unexpected = sorted(name for name in source.tensors if name not in known)
    if strict:
        problems.add("not in the files", *(_described(name, state.tensors[name]) for name in missing))
        problems.add("in the files, but not in the model", *unexpected)
    without = [name for name in meta.without_value(sources) if not strict or name not in missing]
    problems.add("on the meta device, and neither in the files nor made by a reset_parameters()", *without)
    listed = list(problems)
    if listed:
        raise CheckpointError(f"{source.path} does not fit the model; nothing was changed\n  " + "\n  ".join(listed))
    return _Plan(sources, IncompatibleNames(missing, unexpected))


def _compare_one(problems: _Problems, name: str, pieces: Pieces, found: FileTensor, *, cast: bool) -> None:
    own, other = pieces.dtype, found.dtype
    if tuple(pieces.shape) != found.shape:
        problems.add("of another shape", f"{name}: {found.shape} in the files, {tuple(pieces.shape)} in the model")
    elif own is not other and not (own.is_floating_point and other.is_floating_point):
        problems.add("of another dtype", f"{name}: {other} in the files, {own} in the model")
    elif own is not other and not cast:
        problems.add("of another dtype (cast=True converts)", f"{name}: {other} in the files, {own} in the model")
    if pieces.device.type != "meta":
        try:
            for piece in pieces.pieces:
                plain(piece.local)
        except TypeError as error:
            problems.add("not to be filled from a file", f"{name}: {error}")


def _described(name: str, pieces: Pieces) -> str:
    return f"{name} {tuple(pieces.shape)}"


def _targets(model: nn.Module) -> ModelState:
    """What can be filled: the model's state, and buffers that it does not save, but some files have."""
    state = model_state(model)
    for name, buffer in _unsaved(model):
        if name not in state.tensors:
            state._add_buffer(name, buffer)
    return state


def _unsaved(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in walk(model):
        for name, buffer in module._buffers.items():
            if buffer is not None and name in module._non_persistent_buffers_set:
                yield prefix + name, buffer


def _not_persistent(model: nn.Module) -> set[str]:
    return {name for name, _ in _unsaved(model)}


# -------------------------------------------------------------------- what no file has


def _kept(model: nn.Module, meta: MetaTensors, sources: Collection[str]) -> dict[str, list[torch.Tensor]]:
    """Copies of what has a value already, is not read, and would lose it in a ``reset_parameters()``.

    Returns:
        By name, this rank's pieces.
    """
    prefixes = tuple(meta.reset_prefixes(sources))
    if not prefixes:
        return {}
    state = _targets(model)
    names: dict[str, list[str]] = {name: [name] for name in state.tensors}
    for alias, first in state.aliases.items():
        names[first].append(alias)
    return {
        name: [plain(piece.local).clone() for piece in pieces.pieces]
        for name, pieces in state.tensors.items()
        if name not in sources
        and pieces.device.type != "meta"
        and any(each.startswith(prefixes) for each in names[name])
    }


def _put_back(state: ModelState, kept: dict[str, list[torch.Tensor]]) -> None:
    with torch.no_grad():
        for name, values in kept.items():
            for piece, value in zip(state.tensors[name].pieces, values, strict=True):
                plain(piece.local).copy_(value)


# -------------------------------------------------------------------- reading


def _fill(state: ModelState, sources: dict[str, tuple[Path, FileTensor]]) -> None:
    """Read this rank's pieces, file by file, from the front to the back."""
    places: dict[Path, list[tuple[FileTensor, str]]] = {}
    for name, (path, tensor) in sources.items():
        places.setdefault(path, []).append((tensor, name))
    mover, filled = PieceMover(), set()
    for path, tensors in places.items():
        name = ""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                for tensor, name in sorted(tensors, key=lambda item: item[0].start):
                    for piece in state.tensors[name].pieces:
                        mover.read(descriptor, tensor, piece)
                    filled.add(name)
            finally:
                os.close(descriptor)
        except (OSError, CheckpointError) as error:
            raise CheckpointError(
                f"{path}: {name} cannot be read: {error}. The model is partly changed: load it again from good files"
            ) from error
    assert filled == sources.keys(), "every tensor that has a place was read"
    state.loaded()
