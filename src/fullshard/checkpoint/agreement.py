"""Check that the ranks of one save hold shards of the same model and the same optimizer state."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from fullshard.checkpoint.state.optimizer.state import compare_fingerprints
from fullshard.errors import CheckpointError

__all__ = ["StateFingerprint", "compare_ranks"]

_SHOWN = 5


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

    @property
    def digest(self) -> str:
        """Hash of keys, optimizer states and local parameters; equal on all ranks that may save together."""
        text = repr((sorted(self.keys), sorted(self.states.items()), sorted(self.local.items())))
        return hashlib.sha256(text.encode()).hexdigest()


def compare_ranks(own: StateFingerprint, group: dist.ProcessGroup | None) -> bool:
    """Raise on all ranks of ``group`` if they do not hold shards of one model. An all-gather of a few bytes.

    Returns:
        True if all ranks have the same tensors, by key, shape and dtype.

    Raises:
        CheckpointError: With the keys and ranks that differ.
        FullshardError: If the state of an optimizer differs between ranks.
    """
    if group is None:
        return True
    ranks = dist.get_process_group_ranks(group)
    digests: list[Any] = [None] * len(ranks)
    dist.all_gather_object(digests, (own.digest, own.tensors), group=group)
    alike = len({tensors for _, tensors in digests}) == 1
    if len({digest for digest, _ in digests}) == 1:
        return alike
    found: list[Any] = [None] * len(ranks)
    dist.all_gather_object(found, own, group=group)
    _compare_keys(found, ranks)
    compare_fingerprints([each.states for each in found], ranks)
    _compare_local(found, ranks)
    return alike


def _compare_keys(found: Sequence[StateFingerprint], ranks: Sequence[int]) -> None:
    holders = [each for each in found if each.keys]
    common = set(holders[0].keys).intersection(*(each.keys for each in holders)) if holders else set()
    for rank, each in zip(ranks, found, strict=True):
        further = [key for key in each.keys if key not in common]
        if further or not each.keys:
            raise CheckpointError(
                f"ranks hold different models: rank {rank} has {', '.join(further[:_SHOWN]) or 'no tensors'}"
                f"{f' and {len(further) - _SHOWN} more' if len(further) > _SHOWN else ''}, which others do not have. "
                "Save each model (pipeline stage) with the process_group of its ranks and to a separate folder; give "
                "experts that differ different names, or make them DTensors"
            )


def _compare_local(found: Sequence[StateFingerprint], ranks: Sequence[int]) -> None:
    for name in found[0].local:
        having: dict[str | None, list[int]] = {}
        for rank, each in zip(ranks, found, strict=True):
            having.setdefault(each.local.get(name), []).append(rank)
        if len(having) > 1:
            first, second, *_ = having.values()
            raise CheckpointError(
                f"{name} is not sharded (ignored_params, or outside of all units), and its values differ between "
                f"ranks, such as ranks {first[0]} and {second[0]}: only one of them could be saved. Make it a DTensor, "
                "or save it with another process_group to a separate folder"
            )
