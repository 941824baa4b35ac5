"""Rank barrier: missing, late and diverging ranks are named on every rank, and no rank hangs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from fullshard import FullshardError
from fullshard.ranks.barrier import BARRIER_TIMEOUT_VARIABLE, STEP_TIMEOUT_VARIABLE, rank_barrier
from fullshard.ranks.store import GroupStore
from ranks import Rank, on_ranks

SOON = 0.3  # timeout in seconds where a rank is missing


def keys() -> int:
    """Number of keys in the store of the default group."""
    dist.barrier()
    count = int(dist.distributed_c10d._get_default_store().num_keys())
    dist.barrier()
    return count


def message_of(body: Callable[[], Any], kind: type[Exception] = FullshardError) -> str:
    """What ``body`` raises."""
    with pytest.raises(kind) as caught:
        body()
    assert type(caught.value) is kind
    return str(caught.value)


def equal_everywhere(text: str) -> bool:
    """Whether all ranks have the same text."""
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return len(set(texts)) == 1


def enter(name: str, **options: Any) -> None:
    """Enter and leave."""
    with rank_barrier(name, **options):
        pass


@on_ranks(2)
def test_entries_of_all_ranks_succeed(rank: Rank) -> None:
    """Entering together works, any number of times, and leaves no keys behind."""
    before = keys()
    for index in range(5):
        with rank_barrier(f"save /{index}", rank.group) as barrier:
            assert barrier.run_on_all("step", lambda: rank.rank) == rank.rank
    assert keys() == before


@on_ranks(4)
def test_missing_ranks_are_named_on_all_that_came(rank: Rank) -> None:
    """Ranks that wait raise, naming both the ranks that came and those that did not; the next entry works again.

    A rank that comes after that gets an error that says so, without a wait of its own.
    """
    if rank.rank in (1, 2):
        message = message_of(lambda: enter("save /a", timeout=SOON))
        assert "save /a: reached by ranks 1, 2, but not by ranks 0, 3 within 0.3 s." in message
        assert BARRIER_TIMEOUT_VARIABLE in message
    dist.barrier()
    if rank.rank in (0, 3):
        message = message_of(lambda: enter("save /a", timeout=1000))
        assert f"save /a: rank {rank.rank} arrived after the others had timed out: save /a: reached by" in message
    dist.barrier()
    enter("save /a", timeout=20)


@on_ranks(4)
def test_rank_that_skips_one_joins_the_next(rank: Rank) -> None:
    """A rank that never came to one entry takes part in the next, if that has another name."""
    if rank.rank != 2:
        message_of(lambda: enter("save /1", timeout=SOON))
    dist.barrier()
    enter("save /2", timeout=20)
    enter("save /2", timeout=20)


@on_ranks(4)
def test_different_operations_are_an_error_on_all(rank: Rank) -> None:
    """Ranks that come for different things raise the same, which says who does what and who is missing."""
    message = message_of(lambda: enter("load /b" if rank.rank in (1, 3) else "save /a", timeout=20))
    assert "ranks called different functions" in message
    assert "'save /a' on ranks 0, 2" in message and "'load /b' on ranks 1, 3" in message
    assert equal_everywhere(message)
    if rank.rank != 3:
        message = message_of(lambda: enter("load /b" if rank.rank == 1 else "save /a", timeout=SOON))
        assert "'save /a' on ranks 0, 2; 'load /b' on rank 1, but not by rank 3" in message
    dist.barrier()
    if rank.rank == 3:
        message_of(lambda: enter("save /a"))
    dist.barrier()
    enter("save /a", timeout=20)


@on_ranks(2)
def test_failure_of_one_rank_in_a_step_fails_all(rank: Rank) -> None:
    """What one rank raises in a step is raised on all, of the same kind and with its rank; then all goes on."""
    for error, kind in ((ValueError("no"), ValueError), (OSError(28, "disk full"), FullshardError)):

        def fail(error: Exception = error) -> None:
            if rank.rank == 1:
                raise error

        def body(fail: Callable[[], None] = fail) -> None:
            with rank_barrier("save /a") as barrier:
                barrier.run_on_all("plan", lambda: None)
                barrier.run_on_all("write", fail)
                raise AssertionError("the step has failed")

        message = message_of(body, kind)
        assert message.startswith("save /a, write: rank 1: ") and str(error) in message
        assert equal_everywhere(message)
        enter("save /a")


@on_ranks(2)
def test_exception_outside_of_steps_reaches_the_others(rank: Rank) -> None:
    """A rank that leaves with an exception between steps ends the wait of the others, also of those that are done."""

    def body() -> None:
        with rank_barrier("save /a") as barrier:
            if rank.rank == 1:
                raise KeyError("lost")
            barrier.run_on_all("write", lambda: None)

    if rank.rank == 1:
        with pytest.raises(KeyError):
            body()
    else:
        assert message_of(body) == "save /a: rank 1: KeyError: 'lost'"

    def late() -> None:
        with rank_barrier("save /a"):
            if rank.rank == 0:
                raise TypeError("wrong")

    assert message_of(late, TypeError) == ("wrong" if rank.rank == 0 else "save /a: rank 0: wrong")
    enter("save /a")


@on_ranks(2)
def test_step_that_a_rank_does_not_reach_names_it(rank: Rank) -> None:
    """Steps have a separate timeout, and the error says how to raise it."""

    def body() -> None:
        with rank_barrier("save /a") as barrier:
            if rank.rank == 1:
                time.sleep(3 * SOON)
            barrier.run_on_all("write", lambda: None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STEP_TIMEOUT_VARIABLE, str(SOON))
        message = message_of(body)
    assert "save /a, write: reached by rank 0, but not by rank 1" in message
    assert STEP_TIMEOUT_VARIABLE in message
    enter("save /a")


@on_ranks(4)
def test_subgroups_meet_by_themselves_and_use_global_ranks(rank: Rank) -> None:
    """Groups of a device mesh enter apart from each other; errors have global ranks."""
    mesh = rank.make_mesh(2, 2, names=("a", "b"))
    group = mesh.get_group("a")  # ranks 0, 2 and ranks 1, 3
    enter("x", group=group)
    if rank.rank == 3:
        message = message_of(lambda: enter("x", group=group, timeout=SOON))
        assert "x: reached by rank 3, but not by rank 1" in message
    dist.barrier()
    if rank.rank == 1:
        message_of(lambda: enter("x", group=group))
    dist.barrier()
    enter("x", group=group)
    enter("y")


@on_ranks(2)
def test_process_outside_of_the_group_is_refused(rank: Rank) -> None:
    """A process that is not in the group gets a ValueError."""
    group = dist.new_group([0])
    if rank.rank == 1:
        assert "rank 1 is not in the process group" in message_of(lambda: enter("x", group=group), ValueError)
    else:
        enter("x", group=group)


@on_ranks(4)
def test_requests_to_the_store_do_not_grow_with_ranks(rank: Rank) -> None:
    """A rank makes a bounded number of requests per entry, beside polling; one reads the reports of all ranks."""
    enter("x")
    store = GroupStore.of(rank.group, "barrier")
    counted: list[str] = []

    class Counting:
        def __init__(self, store: Any) -> None:
            self.store = store

        def __getattr__(self, name: str) -> Any:
            def call(*args: Any) -> Any:
                polls = name == "compare_set" and args[0].endswith("result") and args[1]
                if not polls:
                    counted.append(f"{name} {args[0]}")
                return getattr(self.store, name)(*args)

            return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(store.__dict__, "keys", Counting(store.keys))
        enter("x")
    assert len([each for each in counted if not each.startswith("delete_key")]) <= 10, counted


@pytest.mark.parametrize("timeout", ["soon", "0", "-1", "nan", "inf"])
def test_wrong_timeout_is_refused(timeout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A timeout that is no positive number is an error, from the environment as well."""
    monkeypatch.setenv(BARRIER_TIMEOUT_VARIABLE, timeout)
    assert BARRIER_TIMEOUT_VARIABLE in message_of(lambda: enter("x"), ValueError)


def test_single_process_needs_no_group() -> None:
    """Without a process group everything runs here; errors are the same kinds."""
    with rank_barrier("x") as barrier:
        assert barrier.run_on_all("a", lambda: 3) == 3

    def fail(error: Exception) -> None:
        raise error

    def body(error: Exception) -> None:
        with rank_barrier("save /a") as barrier:
            barrier.run_on_all("write", lambda: fail(error))

    assert message_of(lambda: body(ValueError("no")), ValueError) == "no"
    assert message_of(lambda: body(OSError("full"))) == "save /a, write: rank 0: OSError: full"
