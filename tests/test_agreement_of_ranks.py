"""Ranks of a mesh agree on values: where some differ, all raise."""

from __future__ import annotations

import pytest

from fullshard.errors import FullshardError
from fullshard.ranks.agreement import compare, list_values, raise_on_all, raised_on_all
from ranks import Rank, on_ranks


@on_ranks(4)
@pytest.mark.parametrize("odd_one", [0, 3])
def test_all_ranks_of_a_mesh_raise_where_one_differs(rank: Rank, odd_one: int) -> None:
    """Also those of rows and columns in which all are equal; afterwards the groups still work."""
    mesh = rank.make_mesh(2, 2)
    groups = [mesh.get_group(0), mesh.get_group(1)]

    def explain(values: dict[int, str]) -> FullshardError:
        return FullshardError(f"the ranks differ: {list_values(values)}")

    with pytest.raises(FullshardError, match=rf"'other' on rank {odd_one}"):
        compare("'other'" if rank.rank == odd_one else "'same'", groups, explain)
    compare("'same'", groups, explain)


@on_ranks(4)
def test_an_error_of_one_rank_is_raised_on_all_ranks_of_a_mesh(rank: Rank) -> None:
    """With its number and its kind."""
    mesh = rank.make_mesh(2, 2)
    failure = ValueError("a bad argument") if rank.rank == 2 else None
    with pytest.raises(ValueError, match="a bad argument" if rank.rank == 2 else "rank 2: a bad argument"):
        raise_on_all(failure, [mesh.get_group(0), mesh.get_group(1)])


@on_ranks(2)
def test_a_rank_that_is_interrupted_tells_the_other(rank: Rank) -> None:
    """It raises what interrupted it, and the other rank does not wait for it until the time-out."""
    interrupted = rank.rank == 1

    def work() -> None:
        with raised_on_all([rank.mesh.get_group()]):
            if interrupted:
                raise KeyboardInterrupt

    expected, match = (KeyboardInterrupt, "") if interrupted else (FullshardError, "rank 1: interrupted by Keyboard")
    with pytest.raises(expected, match=match):
        work()
