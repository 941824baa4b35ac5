"""``fullshard.load``: every rank reads its own shards, after everything has been checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from fullshard.checkpoint.format.data_file import dtype_of
from fullshard.checkpoint.format.index import TensorEntry
from fullshard.checkpoint.format.reader import CheckpointReader
from fullshard.checkpoint.key_map import (
    check_key_map,
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
    state_entries,
)
from fullshard.engine.parameters.tensor_shards import TensorShards
from fullshard.errors import CheckpointError
from fullshard.ranks.agreement import compare, who_differs
from fullshard.ranks.barrier import RankBarrier, rank_barrier
from fullshard.ranks.groups import coordination_group

__all__ = ["load"]

MOST_NAMES = 20  # in one error

T = TypeVar("T")


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
    "optim": ...}`` or a bare state dict of the model: ``key_map`` says where they are.

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
            "app.opt": "optimizer", "epoch": "extra.epoch"}``, or ``{"": "model"}`` for bare weights. Errors say what to
            pass. From checkpoints of other programs, other values are read only if they are in it.
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
        group = coordination_group(process_group)
        size = 1 if group is None else group.size()
        reader = barrier.run_on_all("reading the index", lambda: CheckpointReader.open(path))
        with reader:
            # Ranks that see a folder at different times may see two saves.
            advice = "check that no save is in progress and that all ranks see the same folder"
            compare(
                reader.identity,
                [group],
                lambda found: CheckpointError(
                    f"{os.fspath(path)}: {who_differs(found)} in the checkpoint that they read; {advice}"
                ),
            )
            loading = _CheckpointLoad(reader, barrier, size, os.fspath(path), model, extra, strict=strict)
            barrier.run_on_all("matching names", lambda: loading.match(optimizer, key_map))
            loading.read_values()
            barrier.run_on_all("preparing", loading.prepare)
            barrier.run_on_all("comparing", lambda: loading.compare(cast=cast))
            loading.check_flat()
            loading.read_state()
            return loading.finish(random=random)


class _CheckpointLoad:
    """One call of ``load``: the checkpoint under the keys that fullshard gives, and the targets of all that is read."""

    _reader: CheckpointReader
    _barrier: RankBarrier
    _size: int  # number of ranks
    _path: str
    _model: nn.Module
    _extra: Mapping[str, Any]
    _strict: bool
    _entries: dict[str, TensorEntry | None]  # all tensors, and values (None), by the keys in the checkpoint
    _stored: dict[str, str]  # the keys in the checkpoint, by those that fullshard would give them
    _components: list[Component]
    _models: dict[str, ModelState]  # by the prefix of their keys
    _optimizers: dict[str, OptimizerTarget]
    _values: dict[str, Any]  # values that are not tensors, with placeholders for tensors in them
    _keys_in_values: set[str]  # keys of tensors that belong to values
    _value_tensors: dict[str, torch.Tensor]  # these, and options; those in optimizer state are in its targets

    def __init__(
        self,
        reader: CheckpointReader,
        barrier: RankBarrier,
        size: int,
        path: str,
        model: nn.Module,
        extra: Mapping[str, Any],
        *,
        strict: bool,
    ) -> None:
        self._reader, self._barrier, self._size, self._path = reader, barrier, size, path
        self._model, self._extra, self._strict = model, extra, strict
        index = reader.index
        self._entries = {key: index.tensor(key) for key in (*index.tensors, *index.aliases)}
        self._entries |= dict.fromkeys(index.values)

    # ---------------------------------------------------------------- names

    def match(self, optimizer: torch.optim.Optimizer | None, key_map: Mapping[str, str] | None) -> None:
        """Give the keys of the checkpoint the prefixes that ``fullshard.save`` gives them.

        Raises:
            CheckpointError: If an optimizer is nowhere, or a value that ``key_map`` brings in is a dictionary, of which
                torch has made many values.
        """
        self._components = components(self._model, optimizer, self._extra)
        self._models, self._optimizers = {MODEL: model_state(self._model)}, {}
        self._stored = with_prefixes(self._entries, check_key_map(key_map or {}, self._entries))
        parts = tuple(component.prefix for component in self._components)
        nested = [key for key in self._stored if key.startswith(EXTRA) and not key.startswith(parts)]
        nested = [key for key in nested if "." in key.removeprefix(EXTRA)]
        if nested and not self._is_own():
            raise CheckpointError(
                f"key_map: {self._stored[nested[0]]!r} of the checkpoint is an entry of a dictionary that "
                "torch.distributed.checkpoint has flattened; map each entry to a separate name, such as "
                "'extra.epoch', or read the dictionary with torch"
            )
        if optimizer is not None and not any(key.startswith(OPTIMIZER) for key in self._stored):
            raise CheckpointError(
                f"{self._path} has no optimizer under 'optimizer' (nothing was changed); its keys begin with "
                f"{top_level(self._entries)}: if one of these holds it, pass key_map={{'...': 'optimizer'}}"
            )

    def _is_own(self) -> bool:
        """Return True if fullshard wrote the checkpoint; its keys are then matched exactly."""
        keys = self._entries.keys()
        ours = all(key.startswith((MODEL, OPTIMIZER, EXTRA, RANDOM)) for key in keys)
        return ours and any(key.startswith(RANDOM) and key.removeprefix(RANDOM).isdecimal() for key in keys)

    def _describe_places(self, names: Collection[str]) -> str:
        """Say where most of the names are in the checkpoint, or what else it has."""
        stored = self._entries.keys()
        ((place, count),) = names_by_place(stored, names).most_common(1) or [("", 0)]
        if count:
            return f"{count} of them are under {place!r}: to load these, pass key_map={{{place!r}: 'model'}}"
        return (
            f"its keys begin with {top_level(stored)}: if one of these holds the model, pass key_map={{'...': 'model'}}"
        )

    def _tensor(self, key: str) -> TensorEntry | None:
        """Return the dtype and shape of a tensor; None if there is no tensor of that key."""
        return self._entries.get(self._stored.get(key, ""))

    def _keys_under(self, prefix: str) -> list[tuple[str, str]]:
        """Return the keys that begin with the prefix, and their rest, without tensors that belong to other values."""
        keys = [key for key in self._stored if key.startswith(prefix) and key not in self._keys_in_values]
        return [(key, key.removeprefix(prefix)) for key in keys]

    # ---------------------------------------------------------------- values

    @property
    def _own_random(self) -> str:
        return f"{RANDOM}{self._barrier.rank}"

    def read_values(self) -> None:
        """Read values that are not tensors, tensors in them, and options of optimizers. A collective."""
        prefixes = (EXTRA, *(component.prefix for component in self._components))
        keys = [key for key in self._stored if self._tensor(key) is None]
        keys = [key for key in keys if key.startswith(prefixes) or key == self._own_random]
        new = {stored: key for key, stored in self._stored.items()}

        def read(key: str) -> Any:
            return joined(self._reader.value(self._stored[key]), lambda name: placeholder(new.get(name, name)))

        self._values = self._on_all("reading values", lambda: {key: read(key) for key in keys})
        self._keys_in_values = {name for value in self._values.values() for name in tensors_in(value)}
        optimizers = [component.prefix for component in self._components if component.optimizer is not None]
        states, groups = (tuple(prefix + part for prefix in optimizers) for part in (STATE, GROUPS))
        wanted = [name for name in self._keys_in_values if not name.startswith(states)]
        wanted += [key for key in self._stored if key.startswith(groups) and self._tensor(key) is not None]
        self._value_tensors = self._barrier.run_on_all(
            "preparing values", lambda: {name: self._allocate(name) for name in wanted}
        )
        self._fill(self._value_tensors)

    def _allocate(self, key: str, device: str = "cpu") -> torch.Tensor:
        found = self._tensor(key)
        if found is None:
            raise CheckpointError(f"{key}: missing in the checkpoint, although one of its values refers to it")
        with torch.inference_mode(False):
            return torch.empty(found.shape, dtype=dtype_of(found.dtype), device=device)

    def _described(self, key: str) -> TensorSpec:
        room = self._allocate(key, device="meta")
        return TensorSpec(room.shape, room.dtype)

    def _value(self, key: str) -> Any:
        """Return a value with its tensors."""
        tensors = self._value_tensors
        return tensors[key] if key in tensors else joined(self._values[key], tensors.__getitem__)

    # ---------------------------------------------------------------- targets

    def prepare(self) -> None:
        """Collect the state of the other models, and make the targets of optimizers."""
        for component in self._components[1:]:
            if component.optimizer is None:
                self._models[component.prefix] = model_state(component.model)
            else:
                target = self._target(component.prefix, component.model, component.optimizer)
                self._optimizers[component.prefix] = target

    def _target(self, prefix: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> OptimizerTarget:
        """Return the target for the saved state of an optimizer."""
        groups: dict[int, dict[str, Any]] = {}
        flattened: dict[str, dict[str, Any]] = {}  # torch's other form: a group per parameter, by FQN
        for key, path in self._keys_under(prefix + GROUPS):
            index, _, name = path.partition(".")
            if index.isdecimal() and "." not in name:
                groups.setdefault(int(index), {})[name] = self._value(key)
            else:
                fqn, _, name = path.rpartition(".")
                flattened.setdefault(fqn, {"params": [fqn]})[name] = self._value(key)
        ordered = [*(groups[index] for index in sorted(groups)), *flattened.values()]
        known = {fqn for group in ordered for fqn in group.get("params", ())}
        saved: dict[str, Any] = {}
        for key, path in self._keys_under(prefix + STATE):
            fqn, name = _split_path(path, known)
            value = self._described(key) if self._tensor(key) else joined(self._values[key], self._described)
            if name:
                saved.setdefault(fqn, {})[name] = value
            else:
                saved[fqn] = value
        return OptimizerTarget(model, optimizer, saved, ordered, strict=self._strict)

    # ---------------------------------------------------------------- checking

    def compare(self, *, cast: bool) -> None:
        """Compare names, shapes and dtypes.

        Raises:
            CheckpointError: With all mismatches.
        """
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
                f"the checkpoint {self._path} does not match (nothing was changed):\n  " + "\n  ".join(shown) + more
            )

    def _has(self, key: str) -> bool:
        return key in self._values or any(other.startswith(f"{key}.") for other in self._stored)

    def _problems_of(self, prefix: str, state: ModelState, *, cast: bool) -> list[str]:
        saved = {path for _, path in self._keys_under(prefix)}
        wanted = state.names | state.extra.keys()
        problems = []
        if prefix == MODEL and wanted and not wanted & saved:  # not only if strict: nothing would be loaded
            where = self._describe_places(wanted)
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
            found, own = self._tensor(prefix + name), state.tensors[name]
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

    def check_flat(self) -> None:
        """Raise if parameters that share a flat parameter were saved with different optimizer state, of which it can
        hold only one. A collective.
        """
        if not self._optimizers:
            return
        self._fill(self._optimizer_tensors({prefix: target.shared for prefix, target in self._optimizers.items()}))

        def compare() -> None:
            conflicts = [text for target in self._optimizers.values() for text in target.conflicts()]
            if conflicts:
                raise CheckpointError(f"cannot load the optimizer (nothing was changed): {'; '.join(conflicts)}")

        self._barrier.run_on_all("comparing states", compare)

    # ---------------------------------------------------------------- reading

    def read_state(self) -> None:
        """Fill models and optimizers. A collective."""
        targets = self._optimizer_tensors({prefix: each.tree["state"] for prefix, each in self._optimizers.items()})
        for prefix, state in self._models.items():
            targets.update({prefix + name: shards for name, shards in state.tensors.items()})
        self._fill(targets)

    def _optimizer_tensors(self, states: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Return the tensors in the states of optimizers, by the keys that ``fullshard.save`` gives them."""
        tensors: dict[str, Any] = {}
        for prefix, state in states.items():
            for key, value in state_entries(prefix, state, self._optimizers[prefix].tree["param_groups"]):
                alone = isinstance(value, (torch.Tensor, TensorShards))
                split(value, tensors, key if alone else f"{key}.tensor", small=False)
        return tensors

    def _fill(self, targets: Mapping[str, torch.Tensor | TensorShards]) -> None:
        """Fill tensors in place, by key; those that the checkpoint does not have stay as they are. A collective.

        See [Note: Checked before anything changes].
        """
        shards = {
            self._stored[key]: (target if isinstance(target, TensorShards) else TensorShards.of(target)).shards
            for key, target in targets.items()
            if self._tensor(key) is not None
        }
        reads = self._on_all("checking tensors", lambda: self._reader.check(shards))
        self._on_all("reading tensors", lambda: self._reader.fill(reads))
        self._reader.close()

    def _on_all(self, step: str, function: Callable[[], T]) -> T:
        """Run a step that reads on all ranks; its errors become CheckpointError on all."""

        def read() -> T:
            try:
                return function()
            except Exception as error:
                text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
                raise CheckpointError(f"cannot load the checkpoint {self._path}: {text}") from error

        return self._barrier.run_on_all(step, read)

    # ---------------------------------------------------------------- after reading

    def finish(self, *, random: bool) -> dict[str, Any]:
        """Install what was read in the model, the optimizers and the extra objects; return the other values."""
        for prefix, state in self._models.items():
            state.copy_back()
            saved = {key.removeprefix(prefix): key for key in self._values if key.startswith(prefix)}
            state.set_extra({name: self._value(saved[name]) for name in state.extra if name in saved})
        for target in self._optimizers.values():
            target.install()
        for component in self._components:
            mark_shards_written(component.model)
        values = self._finish_extras()
        own = self._own_random  # last: loading users' objects may draw random numbers
        if random and own in self._values and len(self._keys_under(RANDOM)) == self._size:
            set_random_state(self._value(own), compute_device(self._model))
        return values

    def _finish_extras(self) -> dict[str, Any]:
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
