"""The state of an optimizer, by the names of the model's parameters and in pieces of whole tensors.

That is the same for every way of wrapping and sharding the model, so that what one saved another one loads.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.optimizer_entries import (
    NAMELESS,
    Described,
    OptimizedParameter,
    Path,
    StateShapes,
    describe,
    group_options,
    leaves_of,
    mapped,
    optimized_groups,
    path_name,
)
from fullshard.checkpoint.optimizer_target import OptimizerTarget
from fullshard.checkpoint.parameters import LocalParameter
from fullshard.checkpoint.pieces import Pieces
from fullshard.errors import FullshardError

__all__ = [
    "Described",
    "OptimizerTarget",
    "agree_on_state",
    "compare_fingerprints",
    "describe",
    "fingerprint",
    "optimizer_state",
    "state_by_fqn",
]

Leaf = Callable[[LocalParameter, torch.Tensor, bool], Any]  # (whose, the state, whether it is cut) -> what to save


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What ``optimizer`` holds. No communication.

    Args:
        model: Whose parameters it optimizes: plain, DistributedDataParallel, of either front end, or a mixture.
        optimizer: Any.

    Returns:
        ``{"state": {FQN: {name: value}}, "param_groups": [{"params": [FQN, ...], option: value}]}``. Values are
        :class:`Pieces` where the state has one element for each of the parameter's, tensors where it is the same on
        all ranks, and what is no tensor as it is, all of them live. Tied parameters have their first name. Parameters
        without state are in ``param_groups`` only. What users have put into the state under a name of their own is
        there under that; if it is no mapping, in one with the only key "".

    Raises:
        ValueError: If the optimizer has parameters that are not the model's.
        PhaseError: In the middle of a step.
    """
    groups = optimized_groups(model, optimizer.param_groups)
    members = [member for group in groups for member in group]
    state = state_by_fqn(members, optimizer.state, _in_pieces)
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


def _in_pieces(part: LocalParameter, value: torch.Tensor, cut: bool) -> Pieces | torch.Tensor:
    if cut:
        return part.cut(value)
    return Pieces.of(value) if isinstance(value, DTensor) else value.detach()


def state_by_fqn(
    members: Sequence[OptimizedParameter], state: Mapping[Any, Any], leaf: Leaf
) -> dict[str, dict[str, Any]]:
    """The state of the members by the first names of the model's parameters.

    Args:
        members: Parameters of an optimizer.
        state: By parameter object.
        leaf: What becomes of each tensor. Called in an order that is the same on all ranks, so that it may communicate.
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
        for part in member.parts:

            def converted(path: Path, value: Any, member: Any = member, part: LocalParameter = part) -> Any:
                if not isinstance(value, torch.Tensor):
                    return value
                if isinstance(value, DTensor):
                    return leaf(part, value, value.shape == part.shape)
                return leaf(part, value, shapes.is_cut(path, value.shape, member.local_shape))

            found[part.fqn] = mapped(values, converted)
    return found


# ---------------------------------------------------------------- whether ranks have the same


def fingerprint(state: Mapping[str, Any]) -> dict[str, str]:
    """What ranks must have in common to save a state together, by FQN, in words.

    That is names, shapes and dtypes, and what is in tensors that every rank holds all of.

    Args:
        state: ``optimizer_state(...)["state"]``, or a part of it.
    """
    return {fqn: "; ".join(_words(leaves_of(values))) for fqn, values in state.items() if isinstance(values, Mapping)}


def _words(leaves: Mapping[Path, Any]) -> list[str]:
    words = []
    for path, value in leaves.items():
        text = path_name(path)
        if isinstance(value, (torch.Tensor, Pieces)):
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


def compare_fingerprints(found: Sequence[Mapping[str, str]], ranks: Sequence[int]) -> None:
    """Raise if ranks have different states, on every rank that sees this.

    Args:
        found: :func:`fingerprint` of each rank.
        ranks: Their numbers.

    Raises:
        FullshardError: It names parameters and ranks.
    """
    different = []
    for fqn in dict.fromkeys(fqn for prints in found for fqn in prints):
        having = {rank: prints.get(fqn) or "nothing" for rank, prints in zip(ranks, found, strict=True)}
        if len(set(having.values())) > 1:
            by_words: dict[str, list[int]] = {}
            for rank, words in having.items():
                by_words.setdefault(words, []).append(rank)
            told = ", ".join(f"rank{'s' * (len(who) > 1)} {_some(who)}: {words}" for words, who in by_words.items())
            different.append(f"{fqn} ({told})")
    if different:
        more = f" and {len(different) - 8} more" if len(different) > 8 else ""
        raise FullshardError(
            "ranks hold different optimizer state, so it cannot be saved as one; the optimizer has to treat a "
            f"parameter alike on all ranks, also where a rank's part of it is empty: {', '.join(different[:8])}{more}"
        )


def _some(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def agree_on_state(state: Mapping[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """Raise on all ranks of ``group`` if their states differ. All of them call it: a collective of a few bytes.

    Args:
        state: See :func:`fingerprint`.
        group: None: all ranks.

    Raises:
        FullshardError: See :func:`compare_fingerprints`.
    """
    own = fingerprint(state)
    digest = hashlib.sha256(repr(sorted(own.items())).encode()).hexdigest()
    ranks = dist.get_process_group_ranks(group) if group is not None else list(range(dist.get_world_size()))
    digests: list[Any] = [None] * len(ranks)
    dist.all_gather_object(digests, digest, group=group)
    if len(set(digests)) > 1:
        found: list[Any] = [None] * len(ranks)
        dist.all_gather_object(found, own, group=group)
        compare_fingerprints(found, ranks)
