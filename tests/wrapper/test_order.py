"""The order of units in the first forward: compared, watched while it runs, and noted later."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard import FullshardError, fully_shard
from fullshard.comm import CommRequest, Operand, make_transport
from fullshard.engine.runtime import Runtime
from fullshard.ranks.order import TIMEOUT_VARIABLE, OrderCheck, OrderWatchdog, UnitOrder, explain_difference
from models import tiny_units
from ranks import Rank, RankPool, on_ranks

SOON = 0.3  # seconds until a watch in these tests takes a rank for stalled


def new_group(timeout: float = 30) -> dist.ProcessGroup:
    """A group that a test may break."""
    return dist.new_group(timeout=timedelta(seconds=timeout))


def gather(rank: Rank, group: dist.ProcessGroup, name: str, numel: int = 4) -> None:
    """Gather a unit called ``name``, and wait."""
    region = torch.empty(group.size() * numel)
    transport = make_transport(group, rank.device, reduces=False)
    for work in transport.all_gather([CommRequest(name, [Operand(torch.ones(numel), region)])]):
        work.wait()


def count_collectives(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the ways of communication that are taken from now on."""
    taken: list[str] = []
    new = "all_gather_single"  # what the other is called from torch 2.13 on
    flat = new if hasattr(dist.ProcessGroup, new) else "_allgather_base"
    for owner, name in ((dist.ProcessGroup, flat), (dist, "all_gather_object")):
        usual: Callable[..., Any] = getattr(owner, name)

        def counting(*args: Any, _name: str = name, _usual: Callable[..., Any] = usual, **kwargs: Any) -> Any:
            taken.append("all_gather" if _name == flat else _name)
            return _usual(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)
    return taken


# -------------------------------------------------------------------- comparison


@on_ranks(2, 4)
def test_equal_orders(rank: Rank) -> None:
    """Ranks with the same order compare with one all-gather, whatever the number of units.

    Later only the rank that deviates warns, and it does not communicate.
    """
    check = OrderCheck(rank.group, rank.device)
    with pytest.MonkeyPatch.context() as patch:
        taken = count_collectives(patch)
        check.compare([f"blocks.{i}" for i in range(100)])
        assert taken == ["all_gather"]
        check.compare([])
        check.compare(["a", "b"])
        assert taken == ["all_gather"] * 3
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if rank.rank == 1:
                check.warn_if_changed(["a"])
        assert taken == ["all_gather"] * 3
    assert len(caught) == (rank.rank == 1)
    if caught:
        assert "at position 1 (from 0), 'b' ran then and nothing" in str(caught[0].message)


DIFFERENT_ORDERS = [
    (["", "b", "a"], 1, "'a' on ranks 0, 1, 3; 'b' on rank 2"),
    (["", "a"], 2, "'b' on ranks 0, 1, 3; nothing, its forward was over, on rank 2"),
    (["", "a", "b", "c"], 3, "nothing, its forward was over, on ranks 0, 1, 3; 'c' on rank 2"),
    (["a", "b"], 0, "the root on ranks 0, 1, 3; 'a' on rank 2"),
]


@on_ranks(4)
def test_different_orders_raise_everywhere(rank: Rank) -> None:
    """Every rank raises the same error, which names the first position, and the units and ranks of the world there."""
    check = OrderCheck(rank.group, rank.device)
    for odd, position, told in DIFFERENT_ORDERS:
        with pytest.raises(FullshardError) as caught:
            check.compare(odd if rank.rank == 2 else ["", "a", "b"])
        message = str(caught.value)
        assert f"at position {position} (from 0): {told}. Make all" in message
        messages: list[str] = [""] * rank.world_size
        dist.all_gather_object(messages, message)
        assert set(messages) == {message}
        check.compare(["fine"])  # the group is as good as before
    group = dist.new_group([1, 3])
    if rank.rank in (1, 3):
        with pytest.raises(FullshardError, match="'1' on rank 1; '3' on rank 3"):
            OrderCheck(group, rank.device).compare([str(rank.rank)])


def test_explanations() -> None:
    """Of many ranks and units, few are named; a rank that has not come as far is no difference."""
    told = explain_difference({rank: UnitOrder(("x" if rank % 8 else "y",)) for rank in range(1000)})
    assert told is not None
    assert "'y' on ranks 0, 8, 16, 24 and 121 more; 'x' on ranks 1, 2, 3, 4 and 871 more." in told
    told = explain_difference({rank: UnitOrder((f"u{rank}",)) for rank in range(100)})
    assert told is not None
    assert told.count(" on rank ") == 8 and "and 92 other units on other ranks" in told
    assert explain_difference({0: UnitOrder(("a", "b")), 1: UnitOrder(("a",), complete=False)}) is None
    assert explain_difference({0: UnitOrder(("a", "b")), 1: UnitOrder(("a",))}) is not None
    assert explain_difference({}) is None


def test_later_deviation_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first forward in another order warns with position and units; further ones do not."""
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    check = OrderCheck.__new__(OrderCheck)
    check._order, check._warned = None, False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check.warn_if_changed(["a", "b", "c"])
        check.warn_if_changed(["a", "b", "c"])
    with pytest.warns(UserWarning, match=r"rank 3 .* at position 1 \(from 0\), 'b' ran then and 'c' ran now"):
        check.warn_if_changed(["a", "c", "b"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check.warn_if_changed(["c"])


# -------------------------------------------------------------------- watch


def run_watched(rank: Rank, group: dist.ProcessGroup, units: Sequence[str], after_s: float = SOON) -> OrderWatchdog:
    """A first forward of ``units``, each of which is gathered, as the engine watches it."""
    watch = OrderWatchdog(group, rank.device, after_s)
    try:
        with watch.guard():
            for unit in units:
                watch.started(unit)
                gather(rank, group, unit)
            watch.completed()
            OrderCheck(group, rank.device).compare(units)
    finally:
        watch.finished()
    return watch


def no_watch_runs() -> bool:
    return not any(thread.name == "fullshard order watch" for thread in threading.enumerate())


@on_ranks(4)
@pytest.mark.parametrize(
    ("units", "odd", "told"),
    [
        (["", "a", "b"], ["", "b", "a"], "position 1 (from 0): 'a' on ranks 0, 1, 2; 'b' on rank 3"),
        (["", "a", "b"], ["", "b"], "position 1 (from 0): 'a' on ranks 0, 1, 2; 'b' on rank 3"),
        (
            ["", "a", "b"],
            ["", "a"],
            "position 2 (from 0): 'b' on ranks 0, 1, 2; nothing, its forward was over, on rank 3",
        ),
    ],
    ids=["swapped", "skipped", "shorter"],
)
def test_stall_is_explained_and_ended(rank: Rank, units: Sequence[str], odd: Sequence[str], told: str) -> None:
    """Ranks that wait for each other in different units all get the same error, long before the group's timeout."""
    group, last = new_group(), rank.world_size - 1
    with pytest.raises(FullshardError) as caught:
        run_watched(rank, group, odd if rank.rank == last else units)
    assert told in str(caught.value)
    assert no_watch_runs()
    dist.barrier()  # the world is untouched


@on_ranks(2)
def test_slow_rank_is_left_alone(rank: Rank) -> None:
    """A rank that waits for a slow one goes on waiting, and the forward succeeds."""
    group = new_group()
    units = ["", "a", "b"]
    watch = OrderWatchdog(group, rank.device, SOON)
    with watch.guard():
        for unit in units:
            watch.started(unit)
            if unit == "a" and rank.rank == 1:
                time.sleep(5 * SOON + 1)
            gather(rank, group, unit)
        watch.completed()
        OrderCheck(group, rank.device).compare(units)
    watch.finished()
    assert watch.failure is None and no_watch_runs()


@on_ranks(2)
def test_watches_of_one_group_do_not_mix(rank: Rank) -> None:
    """What was published for one root does not accuse the next; other failures stay what they are."""
    group = new_group()
    for name in ("x", "y"):
        watch = OrderWatchdog(group, rank.device, SOON)
        with watch.guard():
            watch.started(name)
            time.sleep(2 * SOON + 0.2)  # so that it is published
            gather(rank, group, name)
        watch.finished()
        assert watch.failure is None
    dist.barrier()  # no rank watches any more
    if rank.rank == 0:
        watch._store.set("failure", "of an earlier forward")
    dist.barrier()
    watch = OrderWatchdog(group, rank.device, SOON)
    with pytest.raises(RuntimeError, match="of the user") as caught, watch.guard():
        raise RuntimeError("of the user")
    assert not isinstance(caught.value, FullshardError)
    watch.finished()
    watch.finished()


@on_ranks(2)
def test_closed_connection_is_explained(rank: Rank) -> None:
    """A rank whose connection another one has closed finds the failure in the store, without a thread of its own."""
    group = new_group()
    watch = OrderWatchdog(group, rank.device, 0)
    assert watch._thread is None
    if rank.rank == 0:
        watch._store.set("failure", "they differ")
    dist.barrier()
    with pytest.raises(FullshardError, match="they differ") as caught, watch.guard():
        raise RuntimeError("Connection closed by peer")
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(FullshardError, match="they differ"), watch.guard():
        pass  # as over NCCL, where broken collectives may go unnoticed
    with pytest.raises(FullshardError, match="its own"), watch.guard():
        raise FullshardError("its own")


@on_ranks(2)
def test_timeout_setting(rank: Rank) -> None:
    """The environment says when a rank is stalled; 0 is never; what is no number is refused."""
    for text, thread in (("0", False), ("2.5", True)):
        os.environ[TIMEOUT_VARIABLE] = text
        watch = OrderWatchdog(rank.group, rank.device)
        assert (watch.after_s, watch._thread is not None) == (float(text), thread)
        watch.finished()
        assert no_watch_runs()
    for text in ("soon", "-1", "nan"):
        os.environ[TIMEOUT_VARIABLE] = text
        with pytest.raises(ValueError, match=f"{TIMEOUT_VARIABLE}.*{text}"):
            OrderWatchdog(rank.group, rank.device)
    with pytest.raises(ValueError, match="after_s"):
        OrderWatchdog(rank.group, rank.device, -2)
    os.environ.pop(TIMEOUT_VARIABLE)
    watch = OrderWatchdog(rank.group, rank.device)
    assert watch.after_s == 10
    watch.finished()


def end_without_watch(rank: Rank, odd: Sequence[str]) -> None:
    run_watched(rank, new_group(timeout=2), odd if rank.rank else ["", "a"], after_s=0)


@pytest.mark.cpu_only("gloo's messages carry the unit's name; back ends whose do not mix units up and go on")
def test_without_a_watch_the_group_times_out(ranks: RankPool) -> None:
    """What the watch is for: without one, ranks fail with the group's timeout and no explanation."""
    outcomes = ranks(2, end_without_watch, ["", "b"], fresh=True, expect_failure=True, timeout=30)
    for outcome in outcomes:
        assert outcome.failed and "FullshardError" not in outcome.error_types


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


def run_model(rank: Rank, model: nn.Module, group: dist.ProcessGroup) -> None:
    """The first forward of ``model``, watched as the engine does it."""
    watch, usual = OrderWatchdog(group, rank.device, SOON), Runtime._enter_forward

    def enter(runtime: Runtime, unit: Any) -> None:
        watch.started(unit.name)
        usual(runtime, unit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runtime, "_enter_forward", enter)
        try:
            with watch.guard():
                model(torch.ones(2, 8))
                watch.completed()
                OrderCheck(group, rank.device).compare(watch.names)
        finally:
            watch.finished()


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
    group = new_group()
    mesh = DeviceMesh.from_group(group, rank.device.type)
    model = Blocks(odd if rank.rank else range(4))
    with tiny_units():
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with pytest.raises(FullshardError) as caught:
            run_model(rank, model, group)
    assert told in str(caught.value)
    assert no_watch_runs()
