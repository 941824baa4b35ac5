"""Check that the ranks of one save hold shards of the same model and the same optimizer state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from fullshard.checkpoint.state.optimizer.state import compare_fingerprints
from fullshard.errors import CheckpointError
from fullshard.ranks.agreement import compare, differs, list_differences

__all__ = ["StateFingerprint", "compare_ranks"]


@dataclass(frozen=True)
class StateFingerprint:
    """Fingerprint of what one rank is about to save.

    Attributes:
        keys: Keys of the models' tensors.
        states: Descriptions of optimizer state by FQN.
        local: Hashes of parameters that nothing keeps equal over ranks.
        tensors: Hash of all tensors' keys, shapes and dtypes; these may differ for tensors of only one rank.
    """

    keys: tuple[str, ...]
    states: Mapping[str, str]
    local: Mapping[str, str]
    tensors: str = ""


def compare_ranks(own: StateFingerprint, group: dist.ProcessGroup | None) -> bool:
    """Raise on all ranks of ``group`` if they do not hold shards of one model. An all-gather of a few bytes.

    Returns:
        True if all ranks have the same tensors, by key, shape and dtype.

    Raises:
        CheckpointError: With the keys and ranks that differ.
        FullshardError: If the state of an optimizer differs between ranks.
    """
    if group is None or not differs(own, group):
        return True
    compare(dict.fromkeys(sorted(own.keys), "a tensor"), [group], _different_models)
    compare_fingerprints(own.states, group)
    compare(dict(sorted(own.local.items())), [group], _different_local_parameters)
    return not differs(own.tensors, group)


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
