"""``reshard_after_forward=<int>``: between forward and backward parameters stay sharded over a few ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from failing import fail
from front_ends import (
    COMPOSABLE,
    assert_at_rest,
    assert_same_gradients,
    assert_trains_alike,
    both_backward,
    build,
    sharded_with_reference,
)
from fullshard import CommQuantization, MixedPrecisionPolicy, fully_shard
from fullshard.comm import Collective, Transport, record
from fullshard.engine.buckets.per_parameter import PerParameterBucket
from fullshard.engine.ownership import nested_units, unit_of
from fullshard.engine.unit import unit_owning
from fullshard.memory import Work
from models import (
    Language,
    LossOf,
    Stack,
    batch,
    reference_backward,
    shard_blocks,
    square_loss,
    tiny_units,
    tokens,
)
from ranks import Rank, on_ranks


def kept_bytes(model: nn.Module) -> dict[str, int]:
    """Bytes that units keep for their subgroup, by name."""
    kept = {}
    for unit in nested_units(model):
        buckets = [bucket for bucket in unit.buckets if isinstance(bucket, PerParameterBucket)]
        kept[unit.name] = sum(b._subgroup_shard.allocated_bytes for b in buckets if b._subgroup_shard is not None)
    return kept


def received(seen: list[Collective], unit: str) -> int:
    return sum(c.nbytes for c in seen if c.kind == "all_gather" and c.unit == unit)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], LossOf]]] = {
    "uneven": (lambda: Stack(2, 7), lambda step: square_loss(step, 4, 7)),
    "tied": (Language, lambda step: lambda model, rank: model(tokens(rank, step, 4, 5)).square().mean()),
    "recomputed inside": (lambda: recomputed(True), square_loss),
    "recomputed around": (lambda: recomputed(False), square_loss),
}


def recomputed(inside: bool) -> Stack:
    model = Stack(2)
    for module in model.blocks if inside else [model]:
        module.checkpointed = inside  # reentrant, or not
    return model


def made(rank: Rank, make: Callable[[], nn.Module] = lambda: Stack(2), **options: Any) -> tuple[Any, Any]:
    with tiny_units(0):
        return sharded_with_reference(COMPOSABLE, rank, build(make), reshard_after_forward=2, **options)


@on_ranks(4)
@pytest.mark.parametrize("kind", MODELS)
def test_parity(rank: Rank, kind: str) -> None:
    """Steps with all-gathers in backward over two subgroups equal the reference, also those of accumulation."""
    make, loss_at = MODELS[kind]
    model, reference = made(rank, make)
    assert_trains_alike(model, reference, rank, loss_at, steps=2)
    for step, sync in enumerate((False, True)):
        model.set_requires_gradient_sync(sync)
        both_backward(model, reference, rank, loss_at(step))
    assert_same_gradients(model, reference)
    assert_at_rest(model)
    assert not any(kept_bytes(model).values())


@on_ranks(4)
def test_bytes_received_and_kept(rank: Rank) -> None:
    """Forward receives 3/4 of the parameters, backward 1/2; half is kept in between, in the dtype of computation."""
    policy, size = MixedPrecisionPolicy(torch.bfloat16), (128 * 128 + 128) * 2
    for mesh in (rank.mesh, rank.make_mesh(1, 4, names=("replicate", "shard"))):
        layers = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
        model = COMPOSABLE.wrap(layers, rank, mesh=mesh, reshard_after_forward=2, mp_policy=policy)
        for _ in range(2):
            with record() as forward:
                loss = model(batch(rank.rank, 0, 2, 128)).float().sum()
            assert kept_bytes(model) == {"": 0, "0": size // 2, "1": size // 2}
            with record() as backward:
                loss.backward()
            assert not any(kept_bytes(model).values())
            for unit in ("0", "1"):
                assert (received(forward, unit), received(backward, unit)) == (size * 3 // 4, size // 2)


@on_ranks(4)
def test_sizes_that_mean_true_or_false(rank: Rank) -> None:
    """A group of one keeps everything and all-gathers nothing in backward; one of all ranks keeps nothing."""
    with tiny_units(0):
        model = Stack(4)
        for block, setting in zip(model.blocks, (True, 2, False, 4), strict=True):
            fully_shard(block, mesh=rank.mesh, reshard_after_forward=setting)
        fully_shard(model, mesh=rank.mesh, reshard_after_forward=1)
    loss = square_loss()(model, rank.rank)
    assert [name for name, size in kept_bytes(model).items() if size] == ["blocks.1"]
    with record() as seen:
        loss.backward()
    assert [c.unit for c in seen if c.kind == "all_gather"] == ["blocks.3", "blocks.1", "blocks.0"]
    model.set_reshard_after_forward(True)
    loss = square_loss()(model, rank.rank)
    assert not any(kept_bytes(model).values())
    loss.backward()
    assert_at_rest(model)


@on_ranks(4)
@pytest.mark.parametrize("together", [True, False])
def test_several_forwards_before_backward(rank: Rank, together: bool) -> None:
    """Two forwards, then their backwards together or one by one, give the sum of both."""
    model, reference = made(rank)
    with torch.no_grad():
        square_loss()(model, rank.rank)
    assert not any(kept_bytes(model).values())
    losses = [square_loss(step)(model, rank.rank) for step in range(2)]
    with torch.no_grad():
        square_loss(2)(model, rank.rank)
    for loss in [losses[0] + losses[1]] if together else losses:
        loss.backward()
    for step in range(2):
        reference_backward(reference, 4, square_loss(step))
    assert_same_gradients(model, reference)
    assert_at_rest(model)

    abandoned = square_loss(7)(model, rank.rank)  # keeps half of the parameters as they are now
    for one in (model, reference):
        torch.optim.SGD(one.parameters(), lr=0.5).step()
        one.zero_grad()
    assert_trains_alike(model, reference, rank, steps=1)
    assert abandoned.requires_grad and not any(kept_bytes(model).values())

    model.blocks[0].down.register_forward_hook(lambda *_: model.blocks[0].reshard())
    assert_trains_alike(model, reference, rank, steps=2)


@on_ranks(4)
def test_failures_and_changes_of_transport(rank: Rank) -> None:
    """A backward that raises leaves nothing kept, and the next step is right."""
    model, reference = made(rank)
    output = model(batch(rank.rank, 0, 4, 6))
    output.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        output.sum().backward()
    model.zero_grad()
    for policy in (None, CommQuantization(all_gather="int8", min_bytes=1 << 30), None):
        model.set_comm_quantization(policy)
        with record() as seen:
            square_loss()(model, rank.rank).backward()
        assert [c.unit for c in seen if c.kind == "all_gather"].count("blocks.0") == 2
        reference_backward(reference, 4, square_loss())
        assert_same_gradients(model, reference)
        assert not any(kept_bytes(model).values())


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
        shard = self.bucket._subgroup_shard
        self.seen.append(0 if shard is None else shard.allocated_bytes)
        return self.work.wait()


@contextlib.contextmanager
def watched(transport: Transport, bucket: PerParameterBucket) -> Iterator[list[int]]:
    """Watch the all-gathers that ``transport`` does for ``bucket``: the list gets what :class:`_Watched` notes."""
    seen: list[int] = []
    usual = transport._all_gather
    unit = unit_owning(bucket.parameters[0])
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
def test_post_forward_shard_outlives_the_all_gather_from_it(rank: Rank) -> None:
    """A post-forward shard is freed only after an all-gather from it that nobody needed has ended."""
    with tiny_units(0):
        model = shard_blocks(SideBranch(3, 8), rank, reshard_after_forward=2)
    for step in range(2):
        loss = square_loss(step, 4, 8)(model, rank.rank)
        (bucket,) = unit_of(model.blocks[1]).buckets
        assert isinstance(bucket, PerParameterBucket) and bucket._subgroup_shard is not None
        kept = bucket._subgroup_shard.allocated_bytes
        with watched(bucket.mesh.subgroup(2), bucket) as seen:
            loss.backward()  # which prefetches block 1 and reshards it, as it gets no gradient
        assert kept > 0 and seen and set(seen) == {kept}
        assert bucket._subgroup_shard.allocated_bytes == 0
        assert_at_rest(model)
