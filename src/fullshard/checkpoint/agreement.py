"""What ranks have to have in common to save one checkpoint together."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from fullshard.checkpoint.optimizer_state import compare_fingerprints
from fullshard.errors import CheckpointError

__all__ = ["Common", "agree"]

_SHOWN = 5


@dataclass(frozen=True)
class Common:
    """What one rank has.

    Attributes:
        keys: Of what models have.
        states: Of optimizers, in words by FQN.
        local: Digests of parameters that nothing keeps equal over ranks.
        tensors: A digest of all tensors' keys, shapes and dtypes. These may differ among what is only one rank's.
    """

    keys: tuple[str, ...]
    states: Mapping[str, str]
    local: Mapping[str, str]
    tensors: str = ""

    @property
    def digest(self) -> str:
        """Equal where everything is."""
        text = repr((sorted(self.keys), sorted(self.states.items()), sorted(self.local.items())))
        return hashlib.sha256(text.encode()).hexdigest()


def agree(own: Common, group: dist.ProcessGroup | None) -> bool:
    """Raise on all ranks of ``group`` if they do not hold parts of one model. A collective of a few bytes.

    Returns:
        Whether all have the same tensors, by key, shape and dtype.

    Raises:
        CheckpointError: It names keys and ranks.
        FullshardError: If ranks hold different state of an optimizer.
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


def _compare_keys(found: Sequence[Common], ranks: Sequence[int]) -> None:
    parts = [each for each in found if each.keys]
    common = set(parts[0].keys).intersection(*(each.keys for each in parts)) if parts else set()
    for rank, each in zip(ranks, found, strict=True):
        further = [key for key in each.keys if key not in common]
        if further or not each.keys:
            raise CheckpointError(
                f"ranks hold different models: rank {rank} has {', '.join(further[:_SHOWN]) or 'nothing'}"
                f"{f' and {len(further) - _SHOWN} more' if len(further) > _SHOWN else ''}, which others do not have. "
                "Save each model with the process_group of the ranks that it is spread over, to a folder of its own, "
                "as pipeline stages; give experts that differ other names, or make them DTensors"
            )


def _compare_local(found: Sequence[Common], ranks: Sequence[int]) -> None:
    for name in found[0].local:
        having: dict[str | None, list[int]] = {}
        for rank, each in zip(ranks, found, strict=True):
            having.setdefault(each.local.get(name), []).append(rank)
        if len(having) > 1:
            first, second, *_ = having.values()
            raise CheckpointError(
                f"{name} is not sharded (ignored_params, or outside of all units), and ranks hold different values of "
                f"it, such as ranks {first[0]} and {second[0]}: only one could be saved. Make it a DTensor that says "
                "so, or save it with a process_group and a folder of its own"
            )
