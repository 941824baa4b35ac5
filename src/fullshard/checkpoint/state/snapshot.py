"""The state of one save as a flat dictionary, which ``format/writer.py`` writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.format.host import bytes_of
from fullshard.checkpoint.format.values import to_bytes
from fullshard.checkpoint.state.extras import random_state, split, state_of
from fullshard.checkpoint.state.model import model_state
from fullshard.checkpoint.state.optimizer.state import compare_fingerprints, fingerprint, optimizer_state
from fullshard.checkpoint.state.parameters import local_parameters
from fullshard.engine.ownership import units_of
from fullshard.engine.parameters.tensor_shards import TensorShard, TensorShards
from fullshard.errors import CheckpointError
from fullshard.memory import host_buffer, stream_waiter
from fullshard.ranks.agreement import compare, differs, list_differences
from fullshard.version import __version__

__all__ = [
    "EXTRA",
    "GROUPS",
    "MODEL",
    "OPTIMIZER",
    "RANDOM",
    "STATE",
    "Component",
    "Snapshot",
    "StagingMemory",
    "StateFingerprint",
    "compare_ranks",
    "components",
    "compute_device",
    "snapshot",
    "state_entries",
]

# Prefixes of keys.
MODEL, OPTIMIZER, EXTRA, RANDOM = "model.", "optimizer.", "extra.", "rng."
STATE, GROUPS = "state.", "param_groups."  # after an optimizer's prefix
ARGUMENTS = {"cast", "keep_memory", "key_map", "random", "strict"}

# CPU buffers for copies of shards, by shard. They are kept for the next save: the first use of new memory takes longer
# than the copy.
StagingMemory = dict[str, torch.Tensor]


@dataclass(frozen=True)
class StateFingerprint:
    """Fingerprint of what one rank is about to save.

    Attributes:
        keys: Keys of the models' tensors.
        states: Descriptions of optimizer state by FQN.
        local: Hashes of parameters that nothing keeps equal over ranks.
    """

    keys: tuple[str, ...]
    states: Mapping[str, str]
    local: Mapping[str, str]


@dataclass(frozen=True)
class Snapshot:
    """The state to be saved, on this rank.

    Attributes:
        entries: Tensors and serialized values, by key.
        aliases: Other keys of tied parameters.
        about: Description of the save, for the index.
        fingerprint: Compared between the ranks of the save.
        wait: Blocks until the entries can be read: copies from an accelerator are under way when ``stage`` returns.
    """

    entries: dict[str, TensorShards | bytes]
    aliases: dict[str, str]
    about: dict[str, Any]
    fingerprint: StateFingerprint
    wait: Callable[[], None] = lambda: None

    def stage(self, memory: StagingMemory) -> Snapshot:
        """Copy the state to CPU memory, pinned if tensors come from an accelerator.

        From an accelerator, the copies are enqueued on its current stream: whatever changes the tensors later runs
        after them, and the host does not wait. On the CPU they are done when this returns: nothing could hold off a
        write of the program's own.

        Args:
            memory: Buffers of an earlier save, which are overwritten where they have the right size. Those of this save
                replace them.
        """
        shards = [shard for e in self.entries.values() if isinstance(e, TensorShards) for shard in e.shards]
        accelerator = next((p.local.device for p in shards if p.local.device.type != "cpu"), None)
        buffers, entries = dict[str, torch.Tensor](), dict[str, TensorShards | bytes]()
        for key, entry in self.entries.items():
            if isinstance(entry, bytes):
                entries[key] = entry
                continue
            copies = []
            for region, local in entry.shards:
                at = f"{key}{region} {local.nbytes} {accelerator}"
                kept = memory.get(at)
                buffers[at] = (
                    host_buffer(local.nbytes, torch.uint8, pin=accelerator is not None) if kept is None else kept
                )
                copy = buffers[at].view(local.dtype).view(local.shape)
                copies.append(TensorShard(region, copy.copy_(local, non_blocking=accelerator is not None)))
            entries[key] = TensorShards(entry.shape, entry.dtype, torch.device("cpu"), tuple(copies), equal=entry.equal)
        memory.clear()
        memory.update(buffers)
        wait = self.wait if accelerator is None else _waiter([shard.local for shard in shards], accelerator)
        return Snapshot(entries, self.aliases, self.about, self.fingerprint, wait)


class Component(NamedTuple):
    """A model, or an optimizer on one, that is saved or loaded.

    Attributes:
        prefix: Prefix of its keys.
        model: The model.
        optimizer: The optimizer; None: the component is the model itself.
    """

    prefix: str
    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None


def components(model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any]) -> list[Component]:
    """Return the models and optimizers to be saved or loaded, including those among the extras.

    Raises:
        CheckpointError: If the parameters of an optimizer are in none of the models.
        ValueError: If an extra has the name of an argument of ``save`` or ``load``.
    """
    taken = sorted(ARGUMENTS.intersection(extra))
    if taken:
        raise ValueError(
            f"an extra cannot be named {taken[0]!r}: that is an argument of save(), async_save() or load(); choose "
            f"another name"
        )
    found = [Component(MODEL, model)]
    found += [Component(f"{EXTRA}{name}.", value) for name, value in extra.items() if isinstance(value, nn.Module)]
    models = [component.model for component in found]
    if optimizer is not None:
        found.append(Component(OPTIMIZER, model, optimizer))
    for name, value in extra.items():
        if isinstance(value, torch.optim.Optimizer):
            own = {id(parameter) for group in value.param_groups for parameter in group["params"]}
            of = next((each for each in models if any(id(p) in own for p in each.parameters())), None)
            if of is None:
                raise CheckpointError(
                    f"{name}: the optimizer's parameters are in none of the models that were passed; pass its model too"
                )
            found.append(Component(f"{EXTRA}{name}.", of, value))
    return found


def snapshot(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any], group: dist.ProcessGroup | None
) -> Snapshot:
    """Return the state of this rank. No communication, and no copies.

    Raises:
        PhaseError: If the model is in the middle of a step.
        CheckpointError: If the parameters of an optimizer are in none of the models.
        TypeError: If a value cannot be read back without running code.
    """
    rank, size = (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
    entries: dict[str, TensorShards | bytes] = {}
    aliases: dict[str, str] = {}
    keys: list[str] = []
    states: dict[str, str] = {}
    local: dict[str, str] = {}
    for component in components(model, optimizer, extra):
        if component.optimizer is None:
            _add_model(entries, aliases, component)
            keys += [key for key in entries if key.startswith(component.prefix)]
            local.update(_digests(component))
        else:
            found = fingerprint(_add_optimizer(entries, component, component.optimizer))
            states.update({f"{component.prefix}{fqn}": words for fqn, words in found.items()})
    count = sum(
        math.prod(e.shape) for key, e in entries.items() if key.startswith(MODEL) and isinstance(e, TensorShards)
    )
    for name, value in extra.items():
        if not isinstance(value, (nn.Module, torch.optim.Optimizer)):
            _add_value(entries, EXTRA + name, state_of(value))
    _add_value(entries, f"{RANDOM}{rank}", random_state(compute_device(model)))
    about = {
        "fullshard": __version__,
        "torch": str(torch.__version__),
        "saved": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "world_size": size,
        "model": type(model).__name__,
        "elements": count,
        "optimizer": None if optimizer is None else type(optimizer).__name__,
        "extra": list(extra),
    }
    return Snapshot(entries, aliases, about, StateFingerprint(tuple(keys), states, local))


def compare_ranks(own: StateFingerprint, group: dist.ProcessGroup | None) -> None:
    """Raise on all ranks of ``group`` if they do not hold shards of one model. An all-gather of a few bytes.

    Raises:
        CheckpointError: With the keys and ranks that differ.
        FullshardError: If the state of an optimizer differs between ranks.
    """
    if group is None or not differs(own, group):
        return
    compare(dict.fromkeys(sorted(own.keys), "a tensor"), [group], _different_models)
    compare_fingerprints(own.states, group)
    compare(dict(sorted(own.local.items())), [group], _different_local_parameters)


def _different_models(keys: Mapping[int, Mapping[str, str]]) -> CheckpointError:
    return CheckpointError(
        f"ranks hold different models: {list_differences(keys)}. Save each model (pipeline stage) with the "
        "process_group of its ranks and to a separate folder; give experts that differ different names, or make them "
        "DTensors"
    )


def _different_local_parameters(hashes: Mapping[int, Mapping[str, str]]) -> CheckpointError:
    return CheckpointError(
        "parameters that are not sharded (ignored_params, or outside of all units) have values that differ between "
        f"ranks: {list_differences(hashes)}; only one of them could be saved. Make them DTensors, or save them with "
        "another process_group to a separate folder"
    )


def _add_model(entries: dict[str, TensorShards | bytes], aliases: dict[str, str], component: Component) -> None:
    state = model_state(component.model)
    entries.update({component.prefix + name: shards for name, shards in state.tensors.items()})
    for name, value in state.extra.items():
        _add(entries, component.prefix + name, value)
    aliases.update({component.prefix + name: component.prefix + first for name, first in state.aliases.items()})


def _digests(component: Component) -> dict[str, str]:
    """Return hashes of the parameters that are in no unit of a sharded model: nothing keeps them equal over ranks."""
    if not units_of(component.model):
        return {}
    loose = [p for p in local_parameters(component.model) if p.sharded is None and not isinstance(p.parameter, DTensor)]
    found = {}
    for parameter in loose:
        host = parameter.parameter.detach().cpu().contiguous()
        found[component.prefix + parameter.fqn] = xxhash.xxh3_64_hexdigest(bytes_of(host))
    return found


def _add_optimizer(
    entries: dict[str, TensorShards | bytes], component: Component, optimizer: torch.optim.Optimizer
) -> Mapping[str, Any]:
    """Add the state of an optimizer, and return the state, which must be equal on all ranks."""
    tree = optimizer_state(component.model, optimizer)
    for key, value in state_entries(component.prefix, tree["state"], tree["param_groups"]):
        _add(entries, key, value)
    for index, options in enumerate(tree["param_groups"]):
        for name, value in options.items():
            _add(entries, f"{component.prefix}{GROUPS}{index}.{name}", value)
    state: Mapping[str, Any] = tree["state"]
    return state


def state_entries(
    prefix: str, state: Mapping[str, Any], groups: Iterable[Mapping[str, Any]]
) -> Iterator[tuple[str, Any]]:
    """Yield the entries of an optimizer's state with the keys that they have in a checkpoint.

    Args:
        prefix: Prefix of the optimizer's keys.
        state: The state, by FQN; other keys are of what a user has added for the optimizer as a whole.
        groups: The groups, with FQNs.

    Raises:
        CheckpointError: If a name in the state of a parameter is no string.
    """
    known = {fqn for options in groups for fqn in options["params"]}
    for fqn, values in state.items():
        if fqn not in known:
            yield f"{prefix}{STATE}{fqn}", values
            continue
        for name, value in values.items():
            if not isinstance(name, str):
                raise CheckpointError(
                    f"the optimizer state of {fqn} has the key {name!r}: keys must be strings to be restored"
                )
            yield f"{prefix}{STATE}{fqn}.{name}", value


def compute_device(model: nn.Module) -> torch.device:
    """Return the device on which the model computes, by its units or parameters; its shards may be elsewhere."""
    units = units_of(model)
    devices = [unit.mesh.device for unit in units] or [parameter.device for parameter in model.parameters()]
    near = [device for device in devices if device.type not in ("cpu", "meta")]
    return near[0] if near else torch.device("cpu")


def _add(entries: dict[str, TensorShards | bytes], key: str, value: Any) -> None:
    if isinstance(value, TensorShards):
        entries[key] = value
    elif isinstance(value, torch.Tensor):
        entries[key] = TensorShards.of(value)
    else:
        _add_value(entries, key, value)


def _add_value(entries: dict[str, TensorShards | bytes], key: str, value: Any) -> None:
    tensors: dict[str, TensorShards] = {}
    entries[key] = to_bytes(key, split(value, tensors, f"{key}.tensor"))
    entries.update(tensors)


def _waiter(sources: list[torch.Tensor], accelerator: torch.device) -> Callable[[], None]:
    """Return a function that waits for the copies of ``sources``, and keeps those alive until then.

    Memory of another stream that is freed earlier could be used again during the copy.
    """
    copied = stream_waiter(accelerator)

    def wait() -> None:
        copied()
        sources.clear()

    return wait
