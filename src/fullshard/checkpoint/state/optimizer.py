"""The state of an optimizer by FQN and as regions of unsharded tensors.

That is the same for every way of wrapping and sharding the model, so that what one saved another one loads.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.state.optimizer_entries import (
    NAMELESS,
    OptimizedParameter,
    Path,
    StateShapes,
    group_options,
    leaves_of,
    map_leaves,
    optimized_groups,
    path_name,
)
from fullshard.checkpoint.state.parameters import LocalParameter
from fullshard.checkpoint.state.tensor_shards import TensorShards
from fullshard.errors import FullshardError
from fullshard.ranks.agreement import compare, list_differences

__all__ = [
    "agree_on_state",
    "compare_fingerprints",
    "fingerprint",
    "optimizer_state",
    "state_by_fqn",
]

Leaf = Callable[
    [LocalParameter, torch.Tensor, bool], Any
]  # (parameter, state tensor, is it sharded as the parameter) -> value to save


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of ``optimizer``. No communication.

    Args:
        model: The model that it optimizes: plain, DistributedDataParallel, of either front end, or a mixture.
        optimizer: Any optimizer.

    Returns:
        ``{"state": {FQN: {name: value}}, "param_groups": [{"params": [FQN, ...], option: value}]}``. Values are
        :class:`TensorShards` if the state is sharded as its parameter, tensors if it is the same on all ranks, and
        other values as they are, all of them live. Tied parameters have their first name. Parameters without state are
        in ``param_groups`` only. State that users added under a string key is included under that key; if it is no
        mapping, in one with the only key "".

    Raises:
        ValueError: If the optimizer has parameters that are not in the model.
        PhaseError: In the middle of a step.
    """
    groups = optimized_groups(model, optimizer.param_groups)
    members = [member for group in groups for member in group]
    state = state_by_fqn(members, optimizer.state, _as_shards)
    for key, value in optimizer.state.items():
        if isinstance(key, str):
            state[key] = value if isinstance(value, Mapping) else {NAMELESS: value}
    return {
        "state": state,
        "param_groups": [
            {"params": [fqn for member in group for fqn in member.fqns], **group_options(options)}
            for group, options in zip(groups, optimizer.param_groups, strict=True)
        ],
    }


def _as_shards(original: LocalParameter, value: torch.Tensor, is_sharded: bool) -> TensorShards | torch.Tensor:
    if is_sharded:
        return original.shards_of(value)
    return TensorShards.of(value) if isinstance(value, DTensor) else value.detach()


def state_by_fqn(
    members: Sequence[OptimizedParameter], state: Mapping[Any, Any], leaf: Leaf
) -> dict[str, dict[str, Any]]:
    """Return the state of the members by the first FQN of each parameter.

    Args:
        members: Parameters of an optimizer.
        state: By parameter object.
        leaf: Maps each tensor to the result. Called in the same order on all ranks, so that it may communicate.
    """
    held = [(member, state[member.parameter]) for member in members if state.get(member.parameter)]
    shapes = StateShapes(
        (path, value.shape, member.local_shape)
        for member, values in held
        for path, value in leaves_of(values).items()
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    )
    found = {}
    for member, values in sorted(held, key=lambda pair: pair[0].index):
        for original in member.originals:

            def converted(path: Path, value: Any, member: Any = member, original: LocalParameter = original) -> Any:
                if not isinstance(value, torch.Tensor):
                    return value
                if isinstance(value, DTensor):
                    return leaf(original, value, value.shape == original.shape)
                return leaf(original, value, shapes.is_sharded(path, value.shape, member.local_shape))

            found[original.fqn] = map_leaves(values, converted)
    return found


# ---------------------------------------------------------------- comparing ranks


def fingerprint(state: Mapping[str, Any]) -> dict[str, str]:
    """Describe the state by FQN in words that must be equal on all ranks that save together.

    Compared are names, shapes, dtypes, and the contents of replicated tensors.

    Args:
        state: ``optimizer_state(...)["state"]``, or a subset of it.
    """
    return {fqn: "; ".join(_words(leaves_of(values))) for fqn, values in state.items() if isinstance(values, Mapping)}


def _words(leaves: Mapping[Path, Any]) -> list[str]:
    words = []
    for path, value in leaves.items():
        text = path_name(path)
        if isinstance(value, (torch.Tensor, TensorShards)):
            text += f" {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        if isinstance(value, torch.Tensor) and not value.is_meta:
            host = value.detach().cpu()
            data = host.contiguous().reshape(-1).view(torch.uint8)
            shown = host.item() if value.numel() == 1 else f"#{zlib.crc32(data.numpy()):08x}"  # type: ignore[arg-type]
            text += f" = {shown}"
        elif isinstance(value, (bool, int, float, str)):
            text += f" = {value!r}"
        words.append(text)
    return words


def compare_fingerprints(own: Mapping[str, str], group: dist.ProcessGroup | None = None) -> None:
    """Raise on all ranks of ``group`` if their states differ. All of them call it: a collective of a few bytes.

    Args:
        own: The :func:`fingerprint` of this rank.
        group: The ranks. None: all.

    Raises:
        FullshardError: With the parameters and ranks that differ.
    """

    def explain(found: Mapping[int, Mapping[str, str]]) -> FullshardError:
        return FullshardError(
            "optimizer state differs between ranks and cannot be saved; the optimizer must have the same state for a "
            f"parameter on all ranks, also where a rank's shard is empty: {list_differences(found)}"
        )

    compare(dict(sorted(own.items())), [group], explain)


def agree_on_state(state: Mapping[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """Raise on all ranks of ``group`` if their states differ. All of them call it: a collective of a few bytes.

    Args:
        state: ``optimizer_state(...)["state"]``, or a subset of it.
        group: The ranks. None: all.

    Raises:
        FullshardError: With the parameters and ranks that differ.
    """
    compare_fingerprints(fingerprint(state), group)
