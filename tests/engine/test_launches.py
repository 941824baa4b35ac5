"""Launches of several collectives: what was issued lands before an error, or memory that it reads, goes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fullshard.comm import Transport
from fullshard.comm.base import issue_all
from fullshard.engine.buckets.per_parameter import PerParameterBucket
from fullshard.frontend.sharded_module import unit_at
from fullshard.memory import Work
from models import Stack, assert_at_rest, shard_blocks, square_loss, tiny_units
from ranks import Rank, on_ranks


class _Fake:
    """A work that notes that it was waited for, and may have failed."""

    def __init__(self, name: str, waited: list[str], error: str | None = None) -> None:
        self.name, self.waited, self.error = name, waited, error

    def wait(self) -> bool:
        self.waited.append(self.name)
        if self.error is not None:
            raise RuntimeError(self.error)
        return True


@pytest.mark.parametrize("error", [ValueError, RuntimeError, KeyboardInterrupt])
def test_works_land_before_a_later_calls_error_is_raised(error: type[BaseException]) -> None:
    """What was issued before a call that raises is waited for, all of it even if some failed; no later call runs.

    Raising at once instead leaves ``waited`` empty; stopping at the failed work leaves out "c".
    """
    waited: list[str] = []

    def fails() -> list[Any]:
        assert waited == []  # not before: they run side by side
        raise error("the cause")

    def never() -> list[Any]:
        raise AssertionError("called after a failure")

    first = [_Fake("a", waited), _Fake("b", waited, "landed badly")]
    with pytest.raises(error, match="the cause"):
        issue_all([lambda: first, lambda: [_Fake("c", waited)], fails, never])
    assert waited == ["a", "b", "c"]


def test_works_of_calls_that_succeed_are_returned_unwaited() -> None:
    """Without a failure nothing is waited for, and works come in the order of the calls."""
    waited: list[str] = []
    works = [_Fake(name, waited) for name in "abc"]
    assert issue_all([lambda: works[:1], lambda: (), lambda: works[1:]]) == works
    assert waited == []


class SideBranch(Stack):
    """A stack whose block 1 computes in forward, beside the others, but does not contribute to the output."""

    def forward(self, x: torch.Tensor, run: Any = None) -> torch.Tensor:
        x = self.blocks[0](self.first(x))
        self.blocks[1](x)
        return self.last(self.blocks[2](x))


class _Watched:
    """A work that notes how much memory its sender holds when it is waited for."""

    def __init__(self, work: Work, bucket: PerParameterBucket, seen: list[int]) -> None:
        self.work, self.bucket, self.seen = work, bucket, seen

    def wait(self) -> object:
        near = self.bucket._subgroup_shard
        self.seen.append(0 if near is None else near.allocated_bytes)
        return self.work.wait()


@contextlib.contextmanager
def watched(transport: Transport, bucket: PerParameterBucket) -> Iterator[list[int]]:
    """Watch the gathers that ``transport`` does for ``bucket``: the list gets what :class:`_Watched` notes."""
    seen: list[int] = []
    usual = transport._all_gather
    unit = bucket.parameters[0].unit()
    assert unit is not None

    def gather(requests: Any) -> list[Any]:
        works = usual(requests)
        return [_Watched(w, bucket, seen) for w in works] if requests[0].unit == unit.name else list(works)

    transport._all_gather = gather  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        del transport._all_gather


@on_ranks(4)
def test_near_shard_outlives_the_gather_that_sends_from_it(rank: Rank) -> None:
    """A gather from subgroup that nobody needed has landed before what it sends from is freed.

    Backward prefetches block 1, which gets no gradient, so the end of backward reshards it with the gather in flight.
    Freeing the near shard first is seen as a work that is waited for when its sender has no memory.
    """
    with tiny_units(0):
        model = shard_blocks(SideBranch(3, 8), rank, reshard_after_forward=2)
    for step in range(2):
        loss = square_loss(step, 4, 8)(model, rank.rank)
        (bucket,) = unit_at(model.blocks[1]).buckets
        assert isinstance(bucket, PerParameterBucket) and bucket._subgroup_shard is not None
        kept = bucket._subgroup_shard.allocated_bytes
        with watched(bucket.mesh.subgroup(2), bucket) as seen:
            loss.backward()
        assert kept > 0 and seen and set(seen) == {kept}
        assert bucket._subgroup_shard.allocated_bytes == 0
        assert_at_rest(model)
