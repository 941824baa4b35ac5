"""Check that replicas still hold the same bits.

Ranks of a replicate axis reduce the same gradients and step the same parameters, so what they hold stays the same, bit
for bit. A bit that flips in the memory of one of them, or a kernel that computes differently there, goes unnoticed:
from then on, that rank trains another model, and pulls the gradients of all.
"""

from __future__ import annotations

import fnmatch
import warnings
import weakref
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.modules.batchnorm import SyncBatchNorm, _NormBase

from fullshard.checkpoint.state.parameters import LocalParameter, local_parameters, walk_modules
from fullshard.debug.digests import digest
from fullshard.engine.ownership import unit_of, units_of
from fullshard.errors import ReplicaError
from fullshard.progress import PROGRESS
from fullshard.ranks.agreement import gather_if_different, list_ranks, odd_ranks, raise_on_all
from fullshard.ranks.groups import groups_of

__all__ = ["check_replicas"]

_SHOWN = 6


def check_replicas(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, ignore: Iterable[str] = ()
) -> None:
    """Raise on all ranks if replicas do not hold the same bits. A collective, between steps.

    Compared are parameters over the axes on which they are replicated (HSDP, ``replicate``, and what is too small to be
    sharded), the state of ``optimizer`` likewise, and buffers over the data-parallel ranks of the unit that has their
    module. Not those of batch norms, which each rank computes from its own data. Of a model that is sharded over all
    ranks, no parameter is replicated: a warning says so. Ranks exchange 8 bytes if all is well.

    Args:
        model: A model that is sharded by ``fully_shard``, ``replicate`` or ``FullyShardedDataParallel``.
        optimizer: An optimizer of its parameters.
        ignore: Patterns with ``*`` and ``?`` of FQNs that may differ, such as buffers of each rank's own.

    Raises:
        ReplicaError: On all ranks, with FQNs and ranks.
        PhaseError: In the middle of a step.

    Example:
        ```python
        from torch import nn

        from fullshard import replicate
        from fullshard.debug import check_replicas

        model = replicate(nn.Linear(8, 8))
        check_replicas(model)
        ```
    """
    ignored = tuple(ignore)
    digests: dict[dist.ProcessGroup, dict[str, str]] = {group: {} for group in _groups(model)}  # the same on all ranks
    compared = list(_replicated(model, optimizer))
    _warn_of_nothing(model, compared)
    for name, tensor, groups in compared:
        if groups and not any(fnmatch.fnmatch(name.partition(" ")[0], pattern) for pattern in ignored):
            found = digest(tensor)
            for group in groups:
                digests.setdefault(group, {})[name] = found
    failure: ReplicaError | None = None
    for group, own in digests.items():
        everyone = gather_if_different(own, group)
        failure = failure or (_explain(everyone) if everyone else None)
    raise_on_all(failure, _groups(model))


def _replicated(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[str, torch.Tensor, list[dist.ProcessGroup]]]:
    """Yield what ranks may have in common: name, value, and the groups of ranks that should hold the same."""
    for parameter in local_parameters(model):
        groups = _groups_of(parameter)
        if not groups:
            continue
        yield parameter.fqn, parameter.local_of(parameter.parameter), groups
        state = {} if optimizer is None else optimizer.state.get(parameter.parameter, {})
        for name, entry in state.items():
            if isinstance(entry, torch.Tensor):
                whole = entry.shape == parameter.parameter.shape
                yield f"{parameter.fqn} ({name})", parameter.local_of(entry) if whole else entry, groups
    everywhere = _groups(model)
    owners = {module: _groups(module) for _, module in walk_modules(model) if unit_of(module) is not None}
    within = {inner: groups for module, groups in owners.items() for inner in module.modules()}  # the innermost wins
    for prefix, module in walk_modules(model):
        if isinstance(module, _NormBase) and not isinstance(module, SyncBatchNorm):
            continue
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield f"{prefix}{name}", buffer, within.get(module, everywhere)


def _warn_of_nothing(model: nn.Module, compared: list[tuple[str, torch.Tensor, list[dist.ProcessGroup]]]) -> None:
    parameters = {parameter.fqn for parameter in local_parameters(model)}
    if model not in _warned and not any(name in parameters for name, _, groups in compared if groups):
        _warned.add(model)
        warnings.warn(
            "check_replicas: no parameter of this model is replicated, as it is sharded over all ranks: only buffers "
            "are compared. Parameters have replicas with HSDP (a 2-D mesh) and with replicate",
            stacklevel=3,
        )


_warned: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _groups(model: nn.Module) -> list[dist.ProcessGroup]:
    return groups_of(unit.mesh for unit in units_of(model))


def _groups_of(parameter: LocalParameter) -> list[dist.ProcessGroup]:
    """Return the groups of ranks that hold the same part of a parameter."""
    value = parameter.parameter
    if isinstance(value, DTensor):
        mesh = value.device_mesh
        axes = [axis for axis, placement in enumerate(value.placements) if isinstance(placement, Replicate)]
        return [mesh.get_group(axis) for axis in axes if mesh.size(axis) > 1]
    if parameter.sharded is None:
        return []  # nobody keeps replicas of it equal
    replicate = parameter.sharded.placement.mesh.replicate
    return [replicate.get_group()] if replicate is not None and replicate.size() > 1 else []


def _explain(digests: dict[int, dict[str, str]]) -> ReplicaError:
    every = dict.fromkeys(name for own in digests.values() for name in own)
    names = [name for name in every if len({own.get(name) for own in digests.values()}) > 1]
    text = []
    for name in names[:_SHOWN]:
        values = {rank: own.get(name) for rank, own in digests.items()}
        odd = odd_ranks(values)
        others = [rank for rank in values if rank not in odd]
        if None in values.values():
            text.append(f"{name} is only on {list_ranks([rank for rank in values if values[rank] is not None])}")
        elif len(odd) < len(others):
            text.append(f"{name} on {list_ranks(odd)} (not as on {list_ranks(others)})")
        else:
            text.append(f"{name} on {list_ranks(others)} or on {list_ranks(odd)}: which of two is wrong is not known")
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ReplicaError(
        f"replicas do not hold the same bits, found after step {PROGRESS.steps.step}: {'; '.join(text)}{more}. A bit "
        "has flipped in memory, or a kernel computes differently on these ranks: load a checkpoint from before, and "
        "test the machines. If these values are each rank's own, name them in ignore=",
        [name.partition(" ")[0] for name in names],
    )
