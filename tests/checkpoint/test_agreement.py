"""Comparison of values between ranks, and errors that all ranks raise."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from fullshard import CheckpointError, FullshardError
from fullshard.ranks.agreement import (
    any_rank,
    compare,
    gather,
    gather_if_different,
    list_ranks,
    list_values,
    raised_on_all,
    who_differs,
)
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


@on_ranks(4)
def test_different_values_raise_on_all(rank: Rank) -> None:
    """Also on the ranks of groups that agree among themselves; equal values pass."""
    groups = groups_of(rank)

    def explain(found: dict[int, int]) -> Exception:
        return CheckpointError(f"{who_differs(found)} in their values")

    for odd in range(1, rank.world_size):
        compare("same", groups, explain)
        with pytest.raises(CheckpointError, match=r"rank \d differs from rank \d in their values"):
            compare(int(rank.rank == odd), groups, explain)
    compare("same", groups, explain)


@on_ranks(1, 4)
def test_failure_raises_on_all(rank: Rank) -> None:
    """The rank that failed raises its error, and the others the same kind with its number."""
    groups, last = groups_of(rank), rank.world_size - 1
    for error, kind in ((ValueError("no"), ValueError), (OSError(28, "disk full"), FullshardError)):
        expected = type(error) if rank.rank == last else kind

        def body(error: Exception = error) -> None:
            with raised_on_all(groups):
                if rank.rank == last:
                    raise error

        with pytest.raises(expected) as caught:
            body()
        assert type(caught.value) is expected and str(error) in str(caught.value)
        assert rank.rank == last or f"rank {last}: " in str(caught.value)
    with raised_on_all(groups):
        pass


def test_lists_of_ranks_are_short() -> None:
    """Neighbors are a span; no more than a few spans and values are shown."""
    assert list_ranks([5]) == "rank 5"
    assert list_ranks([1, 0]) == "ranks 0, 1"
    assert list_ranks([*range(5), 9]) == "ranks 0-4, 9"
    assert list_ranks(range(0, 100, 2)).endswith(", 22 and 38 more")
    assert list_values({0: "'a'", 1: "'a'", 2: "'b'"}) == "'a' on ranks 0, 1; 'b' on rank 2"
    assert list_values({n: str(n) for n in range(15)}).endswith("11 on rank 11; and 3 others on other ranks")
