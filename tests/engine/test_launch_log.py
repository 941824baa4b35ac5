"""What counts as a launch and as a step where ranks compare them, and groups that are made for a part of the ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard import fully_shard
from fullshard.comm import part_of
from fullshard.engine.ownership import unit_of
from fullshard.progress import PROGRESS
from fullshard.ranks.agreement import differs
from fullshard.ranks.groups import coordination_group
from ranks import Rank, on_ranks

X = torch.ones(2, 4)


@on_ranks(2)
def test_a_launch_that_could_not_be_issued_does_not_count(rank: Rank) -> None:
    """A rank that runs its forward again is not taken for one that has launched something else."""
    model = fully_shard(nn.Linear(4, 4), mesh=rank.mesh)
    model(X).sum().backward()

    def fails(_: Any) -> None:
        raise RuntimeError("out of memory")

    if rank.rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(unit_of(model).mesh.transport, "_all_gather", fails)
            with pytest.raises(RuntimeError, match="out of memory"):
                model(X)
    model(X).sum().backward()
    log = PROGRESS.log_of(rank.group)
    assert not differs((log.count, log.digest), rank.group)


class Fails:
    """A work of a message that was lost."""

    def wait(self) -> None:
        raise RuntimeError("lost")


@on_ranks(2)
def test_after_an_all_gather_that_fails_modules_hold_their_shards(rank: Rank) -> None:
    """Also those of a root that would stay unsharded after its forward, whose buffer nothing has filled."""
    model = fully_shard(nn.Linear(4, 4), mesh=rank.mesh)
    model(X).sum().backward()
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(unit_of(model).mesh.transport, "_all_gather", lambda _: [Fails()])
        with pytest.raises(RuntimeError, match="lost"):
            model(X)
    assert isinstance(model.weight, DTensor) and not unit_of(model).is_unsharded


@on_ranks(1)
def test_units_of_the_last_forward_are_known(rank: Rank) -> None:
    """In their order, so that the watchdog can name the module that a rank has left out."""
    blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for module in (*blocks, blocks):
        fully_shard(module, mesh=rank.mesh)
    for _ in range(2):
        blocks(X)
        assert PROGRESS.order == ["", "0", "1"]


@on_ranks(2)
def test_steps_of_several_optimizers_are_one(rank: Rank) -> None:
    """Ranks that divide parameters among other numbers of optimizers are not out of step."""
    model = fully_shard(nn.Linear(4, 4), mesh=rank.mesh)
    parts = [[model.weight], [model.bias]] if rank.rank else [list(model.parameters())]
    optimizers = [torch.optim.SGD(part, lr=0.1) for part in parts]
    for _ in range(2):
        model(X).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    model(X)
    assert not differs(PROGRESS.log_of(rank.group).recent()[1][-1].group_steps, rank.group)


@on_ranks(2)
def test_a_part_of_a_group_that_was_destroyed_is_made_anew(rank: Rank) -> None:
    """So models may be sharded over it again."""
    parts = []
    for _ in range(2):
        parts.append(part_of(rank.group, [0, 1], "of a test"))
        total = torch.ones(1)
        dist.all_reduce(total, group=parts[-1])
        assert total == 2
        dist.destroy_process_group(parts[-1])
    assert parts[0] is not parts[1]


@on_ranks(2)
def test_saves_in_the_background_have_a_group_of_their_own(rank: Rank) -> None:
    """Their messages are not among those of training, also if only some ranks train."""
    some = dist.new_group([0, 1])
    background = coordination_group(some, background=True)
    assert coordination_group(some) is some and background is not some
    assert background is coordination_group(some, background=True)
    assert dist.get_process_group_ranks(background) == [0, 1] and coordination_group(None) is not dist.group.WORLD
