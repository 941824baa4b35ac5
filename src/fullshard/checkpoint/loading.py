"""``fullshard.load``: every rank reads its own shards, after everything has been checked."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from fullshard.checkpoint.format.data_file import dtype_of
from fullshard.checkpoint.format.index import TensorEntry
from fullshard.checkpoint.format.reader import CheckpointReader, open_reader
from fullshard.checkpoint.key_map import (
    check_key_map,
    find_model,
    find_optimizer,
    names_by_place,
    top_level,
    with_prefixes,
)
from fullshard.checkpoint.saving import describe_call, wait_for_pending_save
from fullshard.checkpoint.state.extras import joined, placeholder, set_random_state, split, tensors_in
from fullshard.checkpoint.state.model import ModelState, model_state
from fullshard.checkpoint.state.optimizer.state import TensorSpec
from fullshard.checkpoint.state.optimizer.target import OptimizerTarget
from fullshard.checkpoint.state.parameters import mark_shards_written
from fullshard.checkpoint.state.snapshot import (
    EXTRA,
    GROUPS,
    MODEL,
    OPTIMIZER,
    RANDOM,
    STATE,
    Component,
    components,
    compute_device,
)
from fullshard.checkpoint.state.tensor_shards import TensorShards
from fullshard.errors import CheckpointError
from fullshard.ranks.agreement import compare, raised_on_all, who_differs
from fullshard.ranks.barrier import RankBarrier, rank_barrier
from fullshard.ranks.groups import coordination_group

__all__ = ["load"]

MOST_NAMES = 20  # in one error


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
    cast: bool = False,
    random: bool = True,
    key_map: Mapping[str, str] | None = None,
    process_group: dist.ProcessGroup | None = None,
    **extra: Any,
) -> dict[str, Any]:
    """Load a checkpoint into a model and optimizer. All ranks call it; each reads only its own shards.

    Loading is atomic: all ranks compare names, shapes and dtypes and verify checksums before the first byte of the
    model changes. No code from the checkpoint is run.

    It reads checkpoints of ``fullshard.save``, saved on any number of ranks and with either front end, and of
    ``torch.distributed.checkpoint``. In the latter, model and optimizer may be anywhere, as in ``{"model": ...,
    "optim": ...}``, ``{"app": {...}}`` or a bare state dict of the model: they are found by the names of the model's
    parameters.

    Args:
        path: Folder or URL of the checkpoint.
        model: A model of ``fully_shard`` or ``FullyShardedDataParallel``, DistributedDataParallel or plain; not in the
            middle of a step.
        optimizer: Optimizer of the model's parameters. It gets the saved state and group options; no step is run. None:
            the optimizer state in the checkpoint is not read.
        strict: Raise if a name is only in the model or only in the checkpoint. If False, parameters that are not in the
            checkpoint keep their values.
        cast: Convert tensors of other dtypes. If False, they are an error.
        random: Restore this rank's random number generators, if the number of ranks is the same.
        key_map: Maps prefixes of keys in the checkpoint to "model", "optimizer" or "extra.NAME": ``{"app.net": "model",
            "app.opt": "optimizer", "epoch": "extra.epoch"}``, or ``{"": "model"}`` for bare weights. In checkpoints of
            other programs, model and optimizer are searched for if they are not in it; other values are read only if
            they are.
        process_group: Ranks that load together. None: all ranks.
        **extra: Objects with a state dict to load into, by the names under which they were saved.

    Returns:
        The other values that were saved, by name. Tensors are full tensors in CPU memory.

    Raises:
        CheckpointError: On all ranks, if the checkpoint does not match the model or cannot be read.
        FullshardError: On the ranks that have called ``load``, if others do not call it.

    Example:
        ```python
        import torch
        from torch import nn
        import fullshard

        model = fullshard.fully_shard(nn.Linear(16, 16))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        fullshard.save("checkpoints/step-300", model, optimizer, step=300)
        values = fullshard.load("checkpoints/step-300", model, optimizer)
        assert values["step"] == 300
        ```
    """
    wait_for_pending_save(process_group)
    mapped = "" if key_map is None else f", key_map={dict(key_map)}"
    what = describe_call(f"load (strict={strict}, cast={cast}{mapped})", path, optimizer, extra)
    with rank_barrier(what, process_group) as barrier:
        source = _SharedCheckpoint(os.fspath(path), coordination_group(process_group), barrier)
        try:
            loading = _CheckpointLoad(source, model, optimizer, extra, key_map, strict=strict)
            loading.check(cast=cast)
            loading.read()
            return loading.finish(random=random)
        finally:
            source.close()


class _SharedCheckpoint:
    """A checkpoint that all ranks read, and the barrier on which they synchronize."""

    path: str
    barrier: RankBarrier
    rank: int
    size: int
    _reader: CheckpointReader
    _groups: list[dist.ProcessGroup | None]
    _entries: dict[str, TensorEntry | None]  # all tensors, and values (None), by the keys in the checkpoint
    _stored: dict[str, str]  # the keys in the checkpoint, by those that fullshard would give them
    _new: dict[str, str]  # the inverse

    def __init__(self, path: str, group: dist.ProcessGroup | None, barrier: RankBarrier) -> None:
        self.path, self.barrier, self._groups = path, barrier, [group]
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())
        self._reader = barrier.run_on_all("reading the index", lambda: open_reader(path))
        index = self._reader.index
        self._entries = {key: index.tensor(key) for key in (*index.tensors, *index.aliases)}
        self._entries |= dict.fromkeys(index.values)
        self._stored = self._new = {key: key for key in self._entries}
        # All ranks must read the same index: ranks that see a folder at different times may see two saves.
        advice = "check that no save is in progress and that all ranks see the same folder"
        compare(
            self._reader.identity,
            self._groups,
            lambda found: CheckpointError(f"{path}: {who_differs(found)} in the checkpoint that they read; {advice}"),
        )

    def match(
        self, state: ModelState, optimizer: torch.optim.Optimizer | None, key_map: Mapping[str, str] | None
    ) -> None:
        """Give the keys of a checkpoint of another program the prefixes that ``fullshard.save`` gives them.

        Raises:
            CheckpointError: If more than one part of the checkpoint has the names of the model.
        """
        stored = self._entries.keys()
        prefixes = check_key_map(key_map or {}, stored)
        if not self._is_own():
            names, mapped = state.names | state.extra.keys(), set(prefixes.values())
            if "model" not in mapped:
                prefixes = {**find_model(stored, names), **prefixes}
            if optimizer is not None and "optimizer" not in mapped:
                prefixes = {**find_optimizer(stored, names), **prefixes}
        self._stored = with_prefixes(stored, prefixes)
        self._new = {stored: key for key, stored in self._stored.items()}

    def _is_own(self) -> bool:
        """True if fullshard has written it; there, what is missing in one place is not to be taken from another."""
        keys = self._entries.keys()
        ours = all(key.startswith((MODEL, OPTIMIZER, EXTRA, RANDOM)) for key in keys)
        return ours and any(key.startswith(RANDOM) and key.removeprefix(RANDOM).isdecimal() for key in keys)

    def check_values(self, parts: tuple[str, ...]) -> None:
        """Raise if a value that ``key_map`` brings in is a dictionary, of which torch has made many values.

        Args:
            parts: Prefixes of models and optimizers.
        """
        nested = [key for key in self._stored if key.startswith(EXTRA) and not key.startswith(parts)]
        nested = [key for key in nested if "." in key.removeprefix(EXTRA)]
        if nested and not self._is_own():
            raise CheckpointError(
                f"key_map: {self._stored[nested[0]]!r} of the checkpoint is an entry of a dictionary that "
                "torch.distributed.checkpoint has flattened; map each entry to a separate name, such as "
                "'extra.epoch', or read the dictionary with torch"
            )

    @property
    def keys(self) -> Iterable[str]:
        """Keys of all tensors and values."""
        return self._stored.keys()

    def describe_places(self, names: Collection[str]) -> str:
        """Say where most of the names are in the checkpoint, or what else it has."""
        stored = self._entries.keys()
        ((place, count),) = names_by_place(stored, names).most_common(1) or [("", 0)]
        if count:
            return f"{count} of them are under {place!r}: to load these, pass key_map={{{place!r}: 'model'}}"
        return (
            f"its keys begin with {top_level(stored)}: if one of these holds the model, pass key_map={{'...': 'model'}}"
        )

    def tensor(self, key: str) -> TensorEntry | None:
        """Return the dtype and shape of a tensor; None if there is no tensor of that key."""
        return self._entries.get(self._stored.get(key, ""))

    def values(self, keys: Iterable[str]) -> dict[str, Any]:
        """Return values that are not tensors, by key. A collective."""
        with self._raised_on_all():
            return {key: self._renamed(self._reader.value(self._stored[key])) for key in keys}

    def read(self, targets: Mapping[str, torch.Tensor | TensorShards]) -> None:
        """Fill tensors in place, by key; those that the checkpoint does not have stay as they are. A collective.

        See [Note: Checked before anything changes].
        """
        shards = {
            self._stored[key]: (target if isinstance(target, TensorShards) else TensorShards.of(target)).shards
            for key, target in targets.items()
            if self.tensor(key) is not None
        }
        with self._raised_on_all():
            reads = self._reader.check(shards)
        with self._raised_on_all():
            self._reader.fill(reads)
        self._reader.close()

    def close(self) -> None:
        """Close the file that was read last."""
        self._reader.close()

    @contextlib.contextmanager
    def _raised_on_all(self) -> Iterator[None]:
        """Raise an error of the block on all ranks, as CheckpointError."""
        with raised_on_all(self._groups):
            try:
                yield
            except Exception as error:
                text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
                raise CheckpointError(f"cannot load the checkpoint {self.path}: {text}") from error

    def _renamed(self, value: Any) -> Any:
        """Return a value that was read, with the new names of the tensors in it."""
        return joined(value, lambda name: placeholder(self._new.get(name, name)))


class _CheckpointLoad:
    """One call of ``load``: the targets of all tensors and values that are read."""

    _source: _SharedCheckpoint
    _model: nn.Module
    _extra: Mapping[str, Any]
    _strict: bool
    _values: dict[str, Any]  # values that are not tensors, with placeholders for tensors in them
    _keys_in_values: set[str]  # keys of tensors that belong to values
    _value_tensors: dict[str, torch.Tensor]  # these tensors, newly allocated; those of optimizers allocate their own
    _models: dict[str, ModelState]  # by the prefix of their keys
    _optimizers: dict[str, OptimizerTarget]

    def __init__(
        self,
        source: _SharedCheckpoint,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        extra: Mapping[str, Any],
        key_map: Mapping[str, str] | None,
        *,
        strict: bool,
    ) -> None:
        self._source, self._model, self._extra, self._strict = source, model, extra, strict
        run_on_all = source.barrier.run_on_all
        found = run_on_all("checking arguments", lambda: components(model, optimizer, extra))
        state = run_on_all("collecting", lambda: model_state(model))
        run_on_all("matching names", lambda: source.match(state, optimizer, key_map))
        parts = tuple(component.prefix for component in found)
        run_on_all("matching values", lambda: source.check_values(parts))
        prefixes = (EXTRA, *(component.prefix for component in found))
        own = f"{RANDOM}{source.rank}"
        keys = [key for key in source.keys if source.tensor(key) is None]
        self._values = source.values(key for key in keys if key.startswith(prefixes) or key == own)
        self._keys_in_values = {name for value in self._values.values() for name in tensors_in(value)}
        ours = tuple(component.prefix + STATE for component in found if component.optimizer is not None)
        loose = [name for name in self._keys_in_values if not ours or not name.startswith(ours)]
        self._value_tensors = run_on_all("preparing values", lambda: {name: self._allocate(name) for name in loose})
        groups = tuple(component.prefix + GROUPS for component in found if component.optimizer is not None)
        tensors = [key for key in source.keys if key.startswith(groups) and source.tensor(key) is not None]
        if groups and tensors:  # options that are tensors are compared with each other before the rest is read
            options = run_on_all("preparing options", lambda: {key: self._allocate(key) for key in tensors})
            source.read(options)
            self._value_tensors.update(options)
        self._models, self._optimizers = {MODEL: state}, {}
        for component in found[1:]:
            run_on_all(f"preparing {component.prefix.rstrip('.')}", partial(self._prepare, component))

    def _prepare(self, component: Component) -> None:
        if component.optimizer is None:
            self._models[component.prefix] = model_state(component.model)
        else:
            self._optimizers[component.prefix] = self._target(component)

    def _allocate(self, key: str, device: str = "cpu") -> torch.Tensor:
        found = self._source.tensor(key)
        if found is None:
            raise CheckpointError(f"{key}: missing in the checkpoint, although one of its values refers to it")
        with torch.inference_mode(False):
            return torch.empty(found.shape, dtype=dtype_of(found.dtype), device=device)

    def _target(self, component: Component) -> OptimizerTarget:
        """Return the target for the saved state of an optimizer."""
        assert component.optimizer is not None
        groups: dict[int, dict[str, Any]] = {}
        flattened: dict[str, dict[str, Any]] = {}  # torch's other form: a group per parameter, by FQN
        for key, path in self._keys_under(component.prefix + GROUPS):
            index, _, name = path.partition(".")
            if index.isdecimal() and "." not in name:
                groups.setdefault(int(index), {})[name] = self._value(key)
            else:
                fqn, _, name = path.rpartition(".")
                flattened.setdefault(fqn, {"params": [fqn]})[name] = self._value(key)
        ordered = [*(groups[index] for index in sorted(groups)), *flattened.values()]
        known = {fqn for group in ordered for fqn in group.get("params", ())}
        saved: dict[str, Any] = {}
        for key, path in self._keys_under(component.prefix + STATE):
            fqn, name = _split_path(path, known)
            tensor = self._source.tensor(key)
            value = self._described(key) if tensor is not None else joined(self._values[key], self._described)
            if name:
                saved.setdefault(fqn, {})[name] = value
            else:
                saved[fqn] = value
        return OptimizerTarget(component.model, component.optimizer, saved, ordered, strict=self._strict)

    def _described(self, key: str) -> TensorSpec:
        room = self._allocate(key, device="meta")
        return TensorSpec(room.shape, room.dtype)

    def _keys_under(self, prefix: str) -> list[tuple[str, str]]:
        """Return the keys that begin with the prefix, and their rest, without tensors that belong to other values."""
        keys = [key for key in self._source.keys if key.startswith(prefix) and key not in self._keys_in_values]
        return [(key, key.removeprefix(prefix)) for key in keys]

    def _value(self, key: str) -> Any:
        """Return a value with its tensors, which are filled when the checkpoint is read."""
        return (
            self._value_tensors[key]
            if key in self._value_tensors
            else joined(self._values[key], self._value_tensors.__getitem__)
        )

    # ---------------------------------------------------------------- checking

    def check(self, *, cast: bool) -> None:
        """Compare names, shapes and dtypes.

        Raises:
            CheckpointError: On all ranks, with all mismatches.
        """
        self._source.barrier.run_on_all("comparing", lambda: self._raise_problems(cast=cast))
        if self._optimizers:
            self._check_flat()

    def _check_flat(self) -> None:
        """Raise if parameters that share a flat parameter were saved with different optimizer state, of which it can
        hold only one.

        Raises:
            CheckpointError: On all ranks.
        """
        shared: dict[str, Any] = {}
        for prefix, target in self._optimizers.items():
            shared.update(_tensors_of(prefix + STATE, target.shared, target))
        self._source.read(shared)

        def compare() -> None:
            conflicts = [text for target in self._optimizers.values() for text in target.conflicts()]
            if conflicts:
                raise CheckpointError(f"cannot load the optimizer (nothing was changed): {'; '.join(conflicts)}")

        self._source.barrier.run_on_all("comparing states", compare)

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
                f"the checkpoint {self._source.path} does not match (nothing was changed):\n  "
                + "\n  ".join(shown)
                + more
            )

    def _has(self, key: str) -> bool:
        return key in self._values or any(other.startswith(f"{key}.") for other in self._source.keys)

    def _problems_of(self, prefix: str, state: ModelState, *, cast: bool) -> list[str]:
        saved = {path for _, path in self._keys_under(prefix)}
        wanted = state.names | state.extra.keys()
        problems = []
        if prefix == MODEL and wanted and not wanted & saved:  # not only if strict: nothing would be loaded
            where = self._source.describe_places(wanted)
            problems.append(f"none of the {len(wanted)} names of the model is under 'model' in the checkpoint; {where}")
        elif self._strict:
            problems += [f"{prefix}{name}: not in the checkpoint" for name in sorted(wanted - saved)]
            problems += [f"{prefix}{name}: in the checkpoint, but not in the model" for name in sorted(saved - wanted)]
        for name in sorted(name for name, shards in state.tensors.items() if shards.device.type == "meta"):
            problems.append(
                f"{prefix}{name}: on the meta device, so it cannot be loaded; call to_empty() first, or use "
                "fullshard.load_safetensors"
            )
        for name in sorted(state.tensors.keys() & saved):
            found, own = self._source.tensor(prefix + name), state.tensors[name]
            if found is None:
                problems.append(f"{prefix}{name}: a tensor in the model, but not in the checkpoint")
            elif found.shape != own.shape:
                problems.append(
                    f"{prefix}{name}: shape {found.shape} in the checkpoint, {tuple(own.shape)} in the model"
                )
            elif dtype_of(found.dtype) is not own.dtype and not cast:
                problems.append(
                    f"{prefix}{name}: torch.{found.dtype} in the checkpoint, {own.dtype} in the model; pass "
                    "cast=True to convert"
                )
        return problems

    # ---------------------------------------------------------------- reading

    def read(self) -> None:
        """Fill model and optimizer."""
        targets: dict[str, Any] = dict(self._value_tensors)
        for prefix, state in self._models.items():
            targets.update({prefix + name: shards for name, shards in state.tensors.items()})
        for prefix, target in self._optimizers.items():
            targets.update(_tensors_of(prefix + STATE, target.tree["state"], target))
        self._source.read(targets)

    def finish(self, *, random: bool) -> dict[str, Any]:
        """Install what was read in the model, the optimizers and the extra objects; return the other values."""
        for prefix, state in self._models.items():
            state.copy_back()
            saved = {key.removeprefix(prefix): key for key in self._values if key.startswith(prefix)}
            state.set_extra({name: self._value(saved[name]) for name in state.extra if name in saved})
        for target in self._optimizers.values():
            target.install()
        mark_shards_written(self._model)
        for module in self._extra.values():
            if isinstance(module, nn.Module):
                mark_shards_written(module)
        values = self._extras()
        own = f"{RANDOM}{self._source.rank}"  # last: loading users' objects may draw random numbers
        if random and own in self._values and len(self._keys_under(RANDOM)) == self._source.size:
            set_random_state(self._value(own), compute_device(self._model))
        return values

    def _extras(self) -> dict[str, Any]:
        values = {}
        for key in self._values:
            name = key.removeprefix(EXTRA)
            if not key.startswith(EXTRA) or "." in name:  # keys with a dot belong to a model or an optimizer
                continue
            value, target = self._value(key), self._extra.get(name)
            if isinstance(target, Stateful):
                target.load_state_dict(value)
            else:
                values[name] = value
        return values


def _tensors_of(prefix: str, state: Mapping[str, Any], target: OptimizerTarget) -> dict[str, TensorShards]:
    """Return the tensors in a state by the keys that ``fullshard.checkpoint.state.snapshot.snapshot`` gives
    them.
    """
    tensors: dict[str, TensorShards] = {}
    known = {fqn for options in target.tree["param_groups"] for fqn in options["params"]}
    for fqn, values in state.items():
        if fqn not in known:
            split(values, tensors, f"{prefix}{fqn}.tensor", small=False)
            continue
        for name, value in values.items():
            key = f"{prefix}{fqn}.{name}"
            alone = isinstance(value, (torch.Tensor, TensorShards))
            split(value, tensors, key if alone else f"{key}.tensor", small=False)
    return tensors


def _split_path(path: str, fqns: Collection[str]) -> tuple[str, str]:
    """Split ``FQN.state name`` into both; each may contain dots itself.

    A path of no parameter has no second part.
    """
    words = path.split(".")
    for count in range(1, len(words)):
        fqn = ".".join(words[:count])
        if fqn in fqns:
            return fqn, ".".join(words[count:])
    return path, ""
