"""Plans that cannot be made leave the module as it was: the same objects, names and values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from wrapped import (
    BLOCKS,
    Block,
    Snapshot,
    Tied,
    built,
    raised_everywhere,
)

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy
from fullshard.wrap import CustomPolicy, Policy
from ranks import Rank, on_ranks

S = ShardingStrategy


class Breaking(Policy):
    """A plan that cannot be made."""

    def _run_policy(self, root_module: nn.Module, ignored_modules: Any, root_kwargs: Any) -> Any:
        raise OSError("no plan")


class Elsewhere(Policy):
    """A plan for a module of another model."""

    def _run_policy(self, root_module: nn.Module, ignored_modules: Any, root_kwargs: Any) -> Any:
        return {nn.Linear(2, 2): dict(root_kwargs)}


def divide(module: nn.Module) -> bool:
    return 1 / 0 > 0


def divide_late(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse or divide(module)


# Policies, or the arguments that one chooses for a block; the error, and what it says.
BAD_PLANS: list[tuple[Any, Any, str]] = [
    ({"reshard_after_forward": True}, ValueError, "blocks.1.*reshard_after_forward"),
    ({"sharding_strategy": "FULL_SHARD"}, TypeError, "sharding_strategy"),
    ({"mixed_precision": torch.bfloat16}, TypeError, "mixed_precision"),
    ({"use_orig_params": None}, ValueError, "use_orig_params"),
    ({"sharding_strategy": S.HYBRID_SHARD, "process_group": "world"}, ValueError, "HYBRID_SHARD"),
    ({"param_init_fn": 3}, ValueError, "param_init_fn"),
    ({"module": 3}, (TypeError, ValueError), "module"),
    ({"auto_wrap_policy": BLOCKS}, ValueError, "auto_wrap_policy"),
    ({"ignored_modules": []}, ValueError, "ignored_modules"),
    (Breaking(), OSError, "no plan"),
    (Elsewhere(), ValueError, "not a submodule of the root"),
    (CustomPolicy(lambda module: "yes"), ValueError, "True, False or a dict"),  # type: ignore[arg-type,return-value]
    (CustomPolicy(divide), ZeroDivisionError, "zero"),
    (lambda module: True, TypeError, "recurse"),
    (divide_late, ZeroDivisionError, "zero"),
]


@on_ranks(2)
def test_plans_that_cannot_be_made(rank: Rank) -> None:
    """Whatever a policy does wrong shows before anything is wrapped; the error is the same on all ranks."""
    model = built(Tied)
    before = Snapshot.of(model)
    for bad, kind, match in BAD_PLANS:
        one = model.blocks[1]
        policy = CustomPolicy(lambda m, one=one, bad=bad: bad if m is one else isinstance(m, Block))
        with pytest.raises(kind, match=match) as caught:
            FSDP(model, auto_wrap_policy=policy if isinstance(bad, dict) else bad)
        raised_everywhere(rank, caught.value)
        before.assert_unchanged(model)


def test_snapshot_sees_changes() -> None:
    """What the tests of failing wraps rely on."""
    model = built()
    Snapshot.of(model).assert_unchanged(model)
    for change in (
        lambda: model.first.weight.data.add_(1),
        lambda: setattr(model.last, "bias", nn.Parameter(model.last.bias.detach().clone())),
        lambda: model.blocks.append(Block()),
        lambda: model.first.requires_grad_(False),
        lambda: model.first.__dict__.update(extra=1),
    ):
        before = Snapshot.of(model)
        change()
        with pytest.raises(AssertionError):
            before.assert_unchanged(model)
