"""``fullshard.load``: every rank reads what it holds, and nothing changes before everything was checked."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader

from fullshard.checkpoint.dcp import on_ranks
from fullshard.checkpoint.entry import Entry, entered, load_patience
from fullshard.checkpoint.extras import joined, set_random_state, split, tensors_in
from fullshard.checkpoint.groups import coordination_group
from fullshard.checkpoint.model_state import ModelState, model_state
from fullshard.checkpoint.optimizer_state import Described, OptimizerTarget
from fullshard.checkpoint.parameters import written
from fullshard.checkpoint.pieces import Pieces
from fullshard.checkpoint.planner import ALL, LoadPlanner
from fullshard.checkpoint.saving import purpose, wait_for_last
from fullshard.checkpoint.snapshot import EXTRA, GROUPS, RANDOM, STATE, Part, compute_device, parts
from fullshard.checkpoint.storage import CheckpointReader
from fullshard.errors import CheckpointError

__all__ = ["load"]

MOST_NAMES = 20  # that one error lists


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
    cast: bool = False,
    random: bool = True,
    process_group: dist.ProcessGroup | None = None,
    storage_reader: StorageReader | None = None,
    **extra: Any,
) -> dict[str, Any]:
    """Load a checkpoint. All ranks call it; each reads only what it holds, straight into its shards.

    All or nothing: names, shapes and dtypes are compared and what is to be read is checked against its checksums on
    all ranks before the first byte of the model changes. Written by :func:`fullshard.save` on any number of ranks for
    either front end, or by torch.distributed.checkpoint from ``{"model": ..., "optimizer": ...}``. No code from the
    checkpoint is run.

    Args:
        path: What was saved to.
        model: Of either front end, DistributedDataParallel or plain; between steps.
        optimizer: On its parameters. It gets the saved state and options of its groups; no step is run. None: the
            checkpoint's optimizer state is left alone.
        strict: Whether a name that only the model or only the checkpoint has is an error. Otherwise what the
            checkpoint lacks stays as it is.
        cast: Whether tensors of another dtype are converted. Otherwise they are an error.
        random: Whether the random number generators of this rank are put where they were; only at the same number of
            ranks.
        process_group: The ranks. None: all.
        storage_reader: Reads instead of fullshard's own reader. Whether a damaged file is noticed before the model
            changes is then up to it.
        extra: Objects with a state dict to load into, by the names under which they were saved.

    Returns:
        The other values that were saved, by name; tensors are full ones in CPU memory.

    Raises:
        CheckpointError: On all ranks, if the checkpoint does not fit or cannot be read; it says what and where.
        FullshardError: On the ranks that wait, if others do not load.
    """
    wait_for_last(process_group)
    what = purpose(f"load (strict={strict}, cast={cast})", path, optimizer, extra)
    with entered(what, process_group, patience=load_patience()) as entry:
        reader = CheckpointReader(path) if storage_reader is None else storage_reader
        if storage_reader is not None:
            reader.reset(path)
        source = _Source(os.fspath(path), reader, coordination_group(process_group), entry)
        loading = _Loading(source, model, optimizer, extra, strict=strict)
        loading.check(cast=cast)
        loading.read()
        return loading.finish(random=random)


class _Source:
    """A checkpoint that all ranks read."""

    path: str
    entry: Entry
    metadata: Metadata
    rank: int
    size: int
    _reader: StorageReader
    _group: dist.ProcessGroup | None

    def __init__(self, path: str, reader: StorageReader, group: dist.ProcessGroup | None, entry: Entry) -> None:
        self.path, self.entry, self._reader, self._group = path, entry, reader, group
        self.rank, self.size = 0, 1
        if group is not None:
            self.rank, self.size = group.rank(), group.size()
        self.metadata = entry.together("reading the index", reader.read_metadata)
        # What is read together follows from the index: ranks that see a folder at different times may see two saves.
        own = hashlib.sha256(repr(self._described()).encode()).hexdigest()
        first = entry.from_first("reading the index", lambda: own)
        entry.together("comparing the index", lambda: self._compare(own, first))

    def _described(self) -> list[tuple[str, Any]]:
        """All keys, with shapes and dtypes."""
        found = {key: self.tensor(key) for key in self.keys}
        return sorted((k, None if t is None else (tuple(t.size), str(t.properties.dtype))) for k, t in found.items())

    def _compare(self, own: str, first: str) -> None:
        if own != first:
            raise CheckpointError(
                f"{self.path}: this rank sees another checkpoint there than the first rank; is it being saved to, or "
                "do ranks see different folders?"
            )

    @property
    def keys(self) -> Iterable[str]:
        """Of everything in it."""
        return self.metadata.state_dict_metadata.keys()

    def tensor(self, key: str) -> TensorStorageMetadata | None:
        """What is known of a tensor; None if there is none of that name."""
        found = self.metadata.state_dict_metadata.get(key)
        return found if isinstance(found, TensorStorageMetadata) else None

    def read(self, targets: dict[str, Any]) -> None:
        """Fill tensors, and replace values that are none, by key."""
        with on_ranks(self._group, f"cannot load the checkpoint {self.path}") as where:
            state_dict_loader.load({ALL: targets}, storage_reader=self._reader, planner=LoadPlanner(), **where)


class _Loading:
    """One call of :func:`load`: what is read where."""

    _source: _Source
    _model: nn.Module
    _extra: Mapping[str, Any]
    _strict: bool
    _values: dict[str, Any]  # what is no tensor, with marks in the places of tensors
    _inner: set[str]  # keys of tensors that belong to values
    _loose: dict[str, torch.Tensor]  # those, in new memory; not those of optimizers, which make room themselves
    _models: dict[str, ModelState]  # by the prefix of their keys
    _optimizers: dict[str, OptimizerTarget]

    def __init__(
        self,
        source: _Source,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        extra: Mapping[str, Any],
        *,
        strict: bool,
    ) -> None:
        self._source, self._model, self._extra, self._strict = source, model, extra, strict
        together = source.entry.together
        found = together("looking through the arguments", lambda: parts(model, optimizer, extra))
        prefixes = (EXTRA, *(part.prefix for part in found))
        own = f"{RANDOM}{source.rank}"
        keys = [key for key in source.keys if source.tensor(key) is None]
        self._values = {key: None for key in keys if key.startswith(prefixes) or key == own}
        source.read(self._values)
        self._inner = {name for value in self._values.values() for name in tensors_in(value)}
        ours = tuple(part.prefix + STATE for part in found if part.optimizer is not None)
        loose = [name for name in self._inner if not ours or not name.startswith(ours)]
        self._loose = together("preparing values", lambda: {name: self._room(name) for name in loose})
        groups = tuple(part.prefix + GROUPS for part in found if part.optimizer is not None)
        tensors = [key for key in source.keys if key.startswith(groups) and source.tensor(key) is not None]
        if groups and tensors:  # options that are tensors, which are compared with each other before the rest is read
            options = together("preparing options", lambda: {key: self._room(key) for key in tensors})
            source.read(dict(options))
            self._loose.update(options)
        self._models, self._optimizers = {}, {}
        for part in found:
            together(f"preparing {part.prefix.rstrip('.')}", partial(self._prepare, part))

    def _prepare(self, part: Part) -> None:
        if part.optimizer is None:
            self._models[part.prefix] = model_state(part.model)
        else:
            self._optimizers[part.prefix] = self._target(part)

    def _room(self, key: str, device: str = "cpu") -> torch.Tensor:
        found = self._source.tensor(key)
        if found is None:
            raise CheckpointError(f"{key}: the checkpoint has a value that refers to this tensor, but not the tensor")
        with torch.inference_mode(False):
            return torch.empty(found.size, dtype=found.properties.dtype, device=device)

    def _target(self, part: Part) -> OptimizerTarget:
        """What there is for an optimizer, in the form that the optimizer's side understands."""
        assert part.optimizer is not None
        groups: dict[int, dict[str, Any]] = {}
        for key, path in self._below(part.prefix + GROUPS):
            index, _, name = path.partition(".")
            groups.setdefault(int(index), {})[name] = self._value(key)
        ordered = [groups[index] for index in sorted(groups)]
        known = {fqn for group in ordered for fqn in group.get("params", ())}
        saved: dict[str, Any] = {}
        for key, path in self._below(part.prefix + STATE):
            fqn, name = _split_path(path, known)
            tensor = self._source.tensor(key)
            value = self._described(key) if tensor is not None else joined(self._values[key], self._described)
            if name:
                saved.setdefault(fqn, {})[name] = value
            else:
                saved[fqn] = value
        return OptimizerTarget(part.model, part.optimizer, saved, ordered, strict=self._strict)

    def _described(self, key: str) -> Described:
        room = self._room(key, device="meta")
        return Described(room.shape, room.dtype)

    def _below(self, prefix: str) -> list[tuple[str, str]]:
        """Keys and what follows the prefix, without the tensors that belong to other values."""
        keys = [key for key in self._source.keys if key.startswith(prefix) and key not in self._inner]
        return [(key, key.removeprefix(prefix)) for key in keys]

    def _value(self, key: str) -> Any:
        """With tensors that are filled when the checkpoint is read."""
        return self._loose[key] if key in self._loose else joined(self._values[key], self._loose.__getitem__)

    # ---------------------------------------------------------------- what can be wrong

    def check(self, *, cast: bool) -> None:
        """Compare names, shapes and dtypes.

        Raises:
            CheckpointError: On all ranks, with everything that does not fit.
        """
        self._source.entry.together("comparing", lambda: self._raise_problems(cast=cast))
        if self._optimizers:
            self._check_flat()

    def _check_flat(self) -> None:
        """Compare what flat parameters have one of and their parts were saved with several.

        Raises:
            CheckpointError: On all ranks.
        """
        shared: dict[str, Any] = {}
        for prefix, target in self._optimizers.items():
            shared.update(_tensors_of(prefix + STATE, target.shared, target))
        self._source.read({key: target for key, target in shared.items() if self._source.tensor(key) is not None})

        def compare() -> None:
            conflicts = [text for target in self._optimizers.values() for text in target.conflicts()]
            if conflicts:
                raise CheckpointError(f"cannot load the optimizer; nothing was changed: {'; '.join(conflicts)}")

        self._source.entry.together("comparing states", compare)

    def _raise_problems(self, *, cast: bool) -> None:
        problems: list[str] = []
        for prefix, state in self._models.items():
            problems += self._problems_of(prefix, state, cast=cast)
        for target in self._optimizers.values():
            problems += target.problems
        missing = [f"{name}: not in the checkpoint" for name in self._extra if not self._has(f"{EXTRA}{name}")]
        problems += missing if self._strict else ()
        if problems:
            shown = problems[:MOST_NAMES]
            more = f"\n  and {len(problems) - len(shown)} more" if len(problems) > len(shown) else ""
            raise CheckpointError(
                f"the checkpoint {self._source.path} does not fit; nothing was changed:\n  " + "\n  ".join(shown) + more
            )

    def _has(self, key: str) -> bool:
        return key in self._values or any(other.startswith(f"{key}.") for other in self._source.keys)

    def _problems_of(self, prefix: str, state: ModelState, *, cast: bool) -> list[str]:
        saved = {path for _, path in self._below(prefix)}
        wanted = state.names | state.extra.keys()
        problems = []
        if self._strict:
            problems += [f"{prefix}{name}: not in the checkpoint" for name in sorted(wanted - saved)]
            problems += [f"{prefix}{name}: in the checkpoint, but not in the model" for name in sorted(saved - wanted)]
        for name in sorted(name for name, pieces in state.tensors.items() if pieces.device.type == "meta"):
            problems.append(
                f"{prefix}{name}: on the meta device, where nothing can be loaded into; call to_empty() first, or "
                "fullshard.load_safetensors"
            )
        for name in sorted(state.tensors.keys() & saved):
            found, own = self._source.tensor(prefix + name), state.tensors[name]
            if found is None:
                problems.append(f"{prefix}{name}: a tensor in the model, but not in the checkpoint")
            elif found.size != own.shape:
                problems.append(
                    f"{prefix}{name}: shape {tuple(found.size)} in the checkpoint, {tuple(own.shape)} in the model"
                )
            elif found.properties.dtype is not own.dtype and not cast:
                problems.append(
                    f"{prefix}{name}: {found.properties.dtype} in the checkpoint, {own.dtype} in the model; pass "
                    "cast=True to convert"
                )
        return problems

    # ---------------------------------------------------------------- reading

    def read(self) -> None:
        """Fill model and optimizer."""
        targets: dict[str, Any] = dict(self._loose)
        for prefix, state in self._models.items():
            targets.update({prefix + name: pieces for name, pieces in state.tensors.items()})
        for prefix, target in self._optimizers.items():
            targets.update(_tensors_of(prefix + STATE, target.tree["state"], target))
        self._source.read({key: target for key, target in targets.items() if self._source.tensor(key) is not None})

    def finish(self, *, random: bool) -> dict[str, Any]:
        """Hand what was read to those that it is for."""
        for prefix, state in self._models.items():
            state.loaded()
            saved = {key.removeprefix(prefix): key for key in self._values if key.startswith(prefix)}
            state.set_extra({name: self._value(saved[name]) for name in state.extra if name in saved})
        for target in self._optimizers.values():
            target.install()
        written(self._model)
        for module in self._extra.values():
            if isinstance(module, nn.Module):
                written(module)
        values = self._extras()
        own = f"{RANDOM}{self._source.rank}"  # last: what users load may draw numbers
        if random and own in self._values and len(self._below(RANDOM)) == self._source.size:
            set_random_state(self._value(own), compute_device(self._model))
        return values

    def _extras(self) -> dict[str, Any]:
        values = {}
        for key in self._values:
            name = key.removeprefix(EXTRA)
            if not key.startswith(EXTRA) or "." in name:  # what has a dot belongs to a model or an optimizer
                continue
            value, target = self._value(key), self._extra.get(name)
            if isinstance(target, Stateful):
                target.load_state_dict(value)
            else:
                values[name] = value
        return values


def _tensors_of(prefix: str, state: Mapping[str, Any], target: OptimizerTarget) -> dict[str, Pieces]:
    """The tensors in a state by the keys that :func:`fullshard.checkpoint.snapshot.snapshot` gives them."""
    tensors: dict[str, Pieces] = {}
    known = {fqn for options in target.tree["param_groups"] for fqn in options["params"]}
    for fqn, values in state.items():
        if fqn not in known:
            split(values, tensors, f"{prefix}{fqn}.tensor", small=False)
            continue
        for name, value in values.items():
            key = f"{prefix}{fqn}.{name}"
            alone = isinstance(value, (torch.Tensor, Pieces))
            split(value, tensors, key if alone else f"{key}.tensor", small=False)
    return tensors


def _split_path(path: str, fqns: Collection[str]) -> tuple[str, str]:
    """The name of a parameter and of its state, from both with a dot in between: both may have dots of their own.

    What is no parameter's has no second name.
    """
    words = path.split(".")
    for count in range(1, len(words)):
        fqn = ".".join(words[:count])
        if fqn in fqns:
            return fqn, ".".join(words[count:])
    return path, ""
