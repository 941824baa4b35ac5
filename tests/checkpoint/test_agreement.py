"""Flags and values of all ranks of a group. tests/test_agreement_of_ranks.py has the errors that all ranks raise."""

from __future__ import annotations

import torch.distributed as dist

from fullshard.ranks.agreement import any_rank, gather, gather_if_different, list_ranks, list_values
from ranks import Rank, on_ranks


def groups_of(rank: Rank) -> list[dist.ProcessGroup]:
    """The groups of a mesh of two replicas of two shards, or of as many shards as there are ranks."""
    if rank.world_size < 4:
        return [rank.group]
    mesh = rank.make_mesh(2, 2, names=("replicate", "shard"))
    return [mesh.get_group("shard"), mesh.get_group("replicate")]


@on_ranks(1, 4)
def test_any_rank(rank: Rank) -> None:
    """A flag that is true on any rank of the mesh is true on all."""
    groups = groups_of(rank)
    assert not any_rank(False, groups)
    for odd in range(rank.world_size):
        assert any_rank(rank.rank == odd, groups)
    assert any_rank(True, groups)


@on_ranks(4)
def test_values_by_global_rank(rank: Rank) -> None:
    """All values are gathered if any rank's differs, also in a group of some ranks."""
    group = groups_of(rank)[0]
    members = dist.get_process_group_ranks(group)
    assert gather(rank.rank, group) == {member: member for member in members}
    assert gather_if_different(["a"], group) == {}
    for odd in members[1:]:
        expected = {member: "b" if member == odd else "a" for member in members}
        assert gather_if_different("b" if rank.rank == odd else "a", group) == expected


def test_lists_of_ranks_are_short() -> None:
    """Neighbors are a span; no more than a few spans and values are shown."""
    assert list_ranks([5]) == "rank 5"
    assert list_ranks([1, 0]) == "ranks 0, 1"
    assert list_ranks([*range(5), 9]) == "ranks 0-4, 9"
    assert list_ranks(range(0, 100, 2)).endswith(", 22 and 38 more")
    assert list_values({0: "'a'", 1: "'a'", 2: "'b'"}) == "'a' on ranks 0, 1; 'b' on rank 2"
    assert list_values({n: str(n) for n in range(15)}).endswith("11 on rank 11; and 3 others on other ranks")
