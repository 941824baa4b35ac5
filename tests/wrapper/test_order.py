"""The order of units in the first forward: compared, watched while it runs, and noted later."""

from __future__ import annotations

import re
import threading
import time
import warnings
from collections.abc import Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard import FullshardError, FullyShardedDataParallel
from fullshard.comm import CommRequest, Operand, make_transport
from fullshard.ranks.order import (
    END,
    TIMEOUT_VARIABLE,
    OrderWatchdog,
    compare_order,
    explain_difference,
    warn_of_change,
)
from fullshard.wrap import ModuleWrapPolicy
from models import tiny_units
from ranks import Rank, on_ranks

SOON = 0.3  # seconds until a watch in these tests takes a rank for stalled


def new_group(timeout: float = 30) -> dist.ProcessGroup:
    """A group that a test may break."""
    return dist.new_group(timeout=timedelta(seconds=timeout))


def gather(rank: Rank, group: dist.ProcessGroup, name: str, numel: int = 4) -> None:
    """Gather a unit called ``name``, and wait."""
    region = torch.empty(group.size() * numel)
    transport = make_transport(group, rank.device)
    for work in transport.all_gather([CommRequest(name, [Operand(torch.ones(numel), region)])]):
        work.wait()


# -------------------------------------------------------------------- comparison


def compare(group: dist.ProcessGroup, units: Sequence[str]) -> None:
    """A first forward of ``units`` that communicates nothing."""
    with compare_order([group]) as watch:
        for unit in units:
            watch.started(unit)


DIFFERENT_ORDERS = [
    (["", "b", "a"], 1, "'a' on ranks 0, 1, 3; 'b' on rank 2"),
    (["", "a"], 2, "'b' on ranks 0, 1, 3; no unit (its forward had ended) on rank 2"),
    (["", "a", "b", "c"], 3, "no unit (its forward had ended) on ranks 0, 1, 3; 'c' on rank 2"),
    (["a", "b"], 0, "the root on ranks 0, 1, 3; 'a' on rank 2"),
]


@on_ranks(4)
def test_different_orders_raise_everywhere(rank: Rank) -> None:
    """Every rank raises the same error, which names the first position, and the units and ranks of the world there."""
    for odd, position, told in DIFFERENT_ORDERS:
        with pytest.raises(FullshardError) as caught:
            compare(rank.group, odd if rank.rank == 2 else ["", "a", "b"])
        message = str(caught.value)
        assert f"at position {position} (from 0): {told}. Make all" in message
        messages: list[str] = [""] * rank.world_size
        dist.all_gather_object(messages, message)
        assert set(messages) == {message}
        compare(rank.group, ["fine"])  # the group is as good as before
    group = dist.new_group([1, 3])
    if rank.rank in (1, 3):
        with pytest.raises(FullshardError, match="'1' on rank 1; '3' on rank 3"):
            compare(group, [str(rank.rank)])


@on_ranks(4)
def test_difference_between_replicas_raises_everywhere(rank: Rank) -> None:
    """Ranks whose own groups agree raise as well, whether shard groups differ inside or from each other."""
    mesh = rank.make_mesh(2, 2, names=("replicate", "shard"))
    groups = [mesh.get_group("shard"), mesh.get_group("replicate")]
    for odd in ([3], [2, 3]):
        with pytest.raises(FullshardError, match=r"'a' on ranks? \d.*; 'b' on rank"), compare_order(groups) as watch:
            watch.started("b" if rank.rank in odd else "a")


def test_explanations() -> None:
    """Of many ranks and units, few are named; a rank that has not come as far is no difference."""
    told = explain_difference({rank: ["x" if rank % 8 else "y"] for rank in range(1000)})
    assert told is not None and len(told) < 700
    assert "'y' on ranks 0, 8, 16, " in told and "; 'x' on ranks 1-7, 9-15, " in told
    told = explain_difference({rank: [f"u{rank}"] for rank in range(100)})
    assert told is not None
    assert told.count(" on rank ") == 12 and "and 88 others on other ranks" in told
    assert explain_difference({0: ["a", "b"], 1: ["a"]}) is None
    assert explain_difference({0: ["a", "b"], 1: ["a", END]}) is not None
    assert explain_difference({0: ["a", END], 1: ["a", "b"]}) is not None
    assert explain_difference({0: ["a", END], 1: ["a"]}) is None
    assert explain_difference({}) is None


@on_ranks(1)
def test_warning_of_another_order(rank: Rank) -> None:
    """It names the first position, and what ran there."""
    for now, told in (
        (["a", "c", "b"], "1 (from 0), 'b' ran then and 'c'"),
        (["a"], "1 (from 0), 'b' ran then and no unit (its forward had ended) ran now"),
    ):
        with pytest.warns(UserWarning, match=re.escape(told)):
            warn_of_change(["a", "b", "c"], now)


# -------------------------------------------------------------------- watch


def run_watched(
    rank: Rank, group: dist.ProcessGroup, units: Sequence[str], *, after_s: float = SOON, slow: str | None = None
) -> None:
    """A first forward of ``units``, each of which is gathered; rank 1 is late for the unit ``slow``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TIMEOUT_VARIABLE, str(after_s))
        with compare_order([group]) as watch:
            for unit in units:
                watch.started(unit)
                if unit == slow and rank.rank == 1:
                    time.sleep(4 * SOON)
                gather(rank, group, unit)


def no_watch_runs() -> bool:
    return not any("fullshard order" in thread.name for thread in threading.enumerate())


@on_ranks(4)
@pytest.mark.parametrize(
    ("odd", "told"),
    [
        (["", "b"], "position 1 (from 0): 'a' on ranks 0-2; 'b' on rank 3"),
        (["", "a"], "position 2 (from 0): 'b' on ranks 0-2; no unit (its forward had ended) on rank 3"),
    ],
    ids=["skipped", "shorter"],
)
def test_stall_is_explained_and_ended(rank: Rank, odd: Sequence[str], told: str) -> None:
    """Ranks that wait for each other in different units all get the same error, long before the group's timeout."""
    group, last = new_group(), rank.world_size - 1
    with pytest.raises(FullshardError) as caught:
        run_watched(rank, group, odd if rank.rank == last else ["", "a", "b"])
    assert told in str(caught.value)
    assert no_watch_runs()
    dist.barrier()  # the world is untouched


@on_ranks(2)
def test_slow_rank_is_left_alone(rank: Rank) -> None:
    """A rank that waits for a slow one goes on waiting, and the forward succeeds."""
    group = new_group()
    run_watched(rank, group, ["", "a", "b"], slow="a")
    assert no_watch_runs()


@on_ranks(2)
def test_failure_of_an_earlier_forward_is_not_reported(rank: Rank) -> None:
    """Watchdogs of one group have separate keys; other failures stay what they are."""
    group = new_group()
    watch = OrderWatchdog(group)
    watch.rendezvous.propose("of an earlier forward")
    watch.finished()
    dist.barrier()
    with pytest.raises(RuntimeError, match="of the user") as caught, compare_order([group]):
        raise RuntimeError("of the user")
    assert not isinstance(caught.value, FullshardError)


def fail_with(rank: Rank, error: Exception) -> None:
    """A forward that fails after rank 0 has published a failure."""
    with compare_order([rank.group]) as watch:
        assert no_watch_runs()
        if rank.rank == 0:
            watch.rendezvous.propose("they differ")
        dist.barrier()
        raise error


@on_ranks(2)
def test_closed_connection_is_explained(rank: Rank) -> None:
    """A rank whose connection another one has closed finds the failure in the store, without a thread of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TIMEOUT_VARIABLE, "0")
        with pytest.raises(FullshardError, match="they differ") as caught:
            fail_with(rank, RuntimeError("Connection closed by peer"))
        assert isinstance(caught.value.__cause__, RuntimeError)
        with pytest.raises(FullshardError, match="they differ"), compare_order([rank.group]) as watch:
            watch.failure = "they differ"  # by the thread; broken collectives may go unnoticed over NCCL
        with pytest.raises(FullshardError, match="its own"):
            fail_with(rank, FullshardError("its own"))


@on_ranks(2)
def test_timeout_setting(rank: Rank) -> None:
    """The environment says when a rank is stalled; 0 is never; what is no number is refused."""
    with pytest.MonkeyPatch.context() as patch:
        for text in ("0", "2.5"):
            patch.setenv(TIMEOUT_VARIABLE, text)
            watch = OrderWatchdog(rank.group)
            assert watch.after_s == float(text) and no_watch_runs() == (text == "0")
            watch.finished()
            assert no_watch_runs()
        for text in ("soon", "-1", "nan"):
            patch.setenv(TIMEOUT_VARIABLE, text)
            with pytest.raises(ValueError, match=f"{TIMEOUT_VARIABLE}.*{text}"):
                OrderWatchdog(rank.group)


class Blocks(nn.Module):
    """Layers that run in the given order."""

    def __init__(self, order: Sequence[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return x


@on_ranks(2)
@pytest.mark.parametrize(
    ("odd", "told"),
    [
        ([3, 1, 0, 2], "position 1 (from 0): 'blocks.0' on rank 0; 'blocks.3' on rank 1"),
        ([0, 2, 1, 3], "position 2 (from 0): 'blocks.1' on rank 0; 'blocks.2' on rank 1"),
    ],
    ids=["stalls", "does not stall"],
)
def test_stall_of_a_sharded_model(rank: Rank, odd: Sequence[int], told: str) -> None:
    """What the engine waits for is broken off: both ranks name the units, whether or not they come to the end."""
    with tiny_units(), pytest.MonkeyPatch.context() as patch:
        patch.setenv(TIMEOUT_VARIABLE, str(SOON))
        model = Blocks(odd if rank.rank else range(4))
        model = FullyShardedDataParallel(model, new_group(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
        with pytest.raises(FullshardError) as caught:
            model(torch.ones(2, 8))
    assert told in str(caught.value)
    assert no_watch_runs()


@on_ranks(2)
def test_change_after_the_first_forward_warns_once(rank: Rank) -> None:
    """The first forward in another order warns; further ones, or in the first order, or without gradients, do not."""
    model = FullyShardedDataParallel(
        Blocks([0, 1, 2, 3]).to(rank.device), auto_wrap_policy=ModuleWrapPolicy({nn.Linear})
    )
    blocks = model.module
    assert isinstance(blocks, Blocks)
    x = torch.ones(2, 8, device=rank.device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(x).sum().backward()
        blocks.order = [2, 0]
        with torch.no_grad():
            model(x)
        for order in ([0, 1, 2, 3], [0, 2, 1, 3], [3, 2, 1, 0], [0, 1, 2, 3]):
            blocks.order = order
            model(x).sum().backward()
    found = [str(each.message) for each in caught if "different order" in str(each.message)]
    assert len(found) == 1
    assert (
        f"rank {rank.rank} ran" in found[0] and "at position 2 (from 0), 'blocks.1' ran then and 'blocks.2'" in found[0]
    )
