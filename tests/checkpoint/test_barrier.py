"""Rank barrier: missing, late and diverging ranks are named on every rank, and no rank hangs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from fullshard import FullshardError
from fullshard.progress import PROGRESS
from fullshard.ranks import barrier
from fullshard.ranks.barrier import STEP_TIMEOUT_VARIABLE, rank_barrier
from fullshard.ranks.watchdog import TIMEOUT_VARIABLE, watch
from ranks import Rank, RankPool, on_ranks

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


def enter(name: str, *, group: dist.ProcessGroup | None = None) -> None:
    """Enter and leave."""
    with rank_barrier(name, group):
        pass


@on_ranks(2)
def test_entries_of_all_ranks_succeed(rank: Rank) -> None:
    """Entering together works, any number of times, and leaves no keys behind."""
    enter("the first, which starts the watchdog")
    before = keys()
    for index in range(5):
        with rank_barrier(f"save /{index}", rank.group) as barrier:
            assert barrier.run_on_all("step", lambda: rank.rank) == rank.rank
    assert keys() == before


def leave_out(rank: Rank, how: str) -> str:
    """Ranks 0 and 3 do not come: they wait elsewhere for the others, or end, or do much else."""
    os.environ[TIMEOUT_VARIABLE] = "0.3"
    watch()
    try:
        with rank_barrier("save /a") as barrier:
            if how == "elsewhere" and rank.rank in (0, 3):
                dist.barrier()
            barrier.run_on_all("write", lambda: time.sleep(2.5 * (how == "slow" and rank.rank == 0)))
        if rank.rank in (0, 3) and how == "ended":
            PROGRESS.watchdog._exit()
            return "ended"
        enter("save /b")
    except (FullshardError, RuntimeError) as error:
        return str(error)
    return "all came"


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("elsewhere", "waits for a collective in save /a, write (step 0|waits in barrier, called at test_barrier.py"),
        ("ended", "for ranks 0, 3, which will not come|has ended (without an exception that is known)"),
        ("slow", "all came"),
    ],
    ids=["elsewhere", "ended", "slow"],
)
def test_ranks_that_do_not_come(ranks: RankPool, how: str, says: str) -> None:
    """Ranks that wait get the watchdog's error if the others cannot come; and wait if they can."""
    messages = ranks(4, leave_out, how, fresh=True, timeout=30)
    assert messages[1] == messages[2] and all(words in messages[1] for words in says.split("|")), messages[1]
    assert how != "slow" or set(messages) == {says}


@on_ranks(4)
def test_different_operations_are_an_error_on_all(rank: Rank) -> None:
    """Ranks that come for different things raise the same, which says who does what and who is missing."""
    message = message_of(lambda: enter("load /b" if rank.rank in (1, 3) else "save /a"))
    assert "ranks called different functions" in message
    assert "'save /a' on ranks 0, 2" in message and "'load /b' on ranks 1, 3" in message
    assert equal_everywhere(message)
    enter("save /a")


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

        message = message_of(body, kind)
        assert message.startswith("save /a, write: rank 1: ") and str(error) in message
        assert equal_everywhere(message)
        enter("save /a")


@on_ranks(2)
def test_exception_outside_of_steps_reaches_the_others(rank: Rank) -> None:
    """A rank that leaves with an exception between steps ends the wait of the others, also of those that are done."""

    def body(failing: int, error: Exception, *, more: bool) -> None:
        with rank_barrier("save /a") as barrier:
            if rank.rank == failing:
                raise error
            if more:
                barrier.run_on_all("write", lambda: None)

    lost, wrong = KeyError("lost"), TypeError("wrong")
    own, kind = ("'lost'", KeyError) if rank.rank == 1 else ("save /a: rank 1: KeyError: 'lost'", FullshardError)
    assert message_of(lambda: body(1, lost, more=True), kind) == own
    own = "wrong" if rank.rank == 0 else "save /a: rank 0: wrong"
    assert message_of(lambda: body(0, wrong, more=False), TypeError) == own
    enter("save /a")


@on_ranks(2)
def test_time_limit_without_a_watchdog(rank: Rank) -> None:
    """Who waits for too long raises, and names the ranks that did not come; the one that comes late gets the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PROGRESS, "watchdog", None)
        patch.setattr(barrier, "watch", lambda: None)
        patch.setenv(STEP_TIMEOUT_VARIABLE, str(SOON))
        if rank.rank == 1:
            time.sleep(3 * SOON)
        message = message_of(lambda: enter("save /a"))
    assert "'save /a' on rank 0, but rank 1 did not come within 0.3 s." in message
    assert STEP_TIMEOUT_VARIABLE in message
    enter("save /a")


@on_ranks(4)
def test_groups_enter_by_themselves(rank: Rank) -> None:
    """Errors have global ranks; a process that is not in the group gets a ValueError."""
    mesh = rank.make_mesh(2, 2, names=("a", "b"))
    group = mesh.get_group("a")  # ranks 0, 2 and ranks 1, 3
    enter("x", group=group)
    odd = rank.rank in (1, 3)
    message = message_of(lambda: enter(f"{rank.rank}", group=group)) if odd else ""
    assert ("'1' on rank 1; '3' on rank 3" in message) == odd
    enter("x", group=group)
    alone = dist.new_group([0])
    if rank.rank == 1:
        assert "rank 1 is not in the process group" in message_of(lambda: enter("x", group=alone), ValueError)
    elif rank.rank == 0:
        enter("x", group=alone)
    enter("y")


@on_ranks(4)
def test_requests_to_the_store_do_not_grow_with_ranks(rank: Rank) -> None:
    """A rank makes a bounded number of requests per entry, beside polling; one reads the reports of all ranks."""
    enter("x")
    store = barrier._stores[rank.group]
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
    monkeypatch.setenv(STEP_TIMEOUT_VARIABLE, timeout)
    assert STEP_TIMEOUT_VARIABLE in message_of(lambda: enter("x"), ValueError)


def test_single_process_needs_no_group() -> None:
    """Without a process group everything runs here; errors are the same kinds."""
    with rank_barrier("x") as barrier:
        assert barrier.run_on_all("a", lambda: 3) == 3

    def fail(error: Exception) -> None:
        def write() -> None:
            raise error

        with rank_barrier("save /a") as barrier:
            barrier.run_on_all("write", write)

    assert message_of(lambda: fail(ValueError("no")), ValueError) == "no"
    assert message_of(lambda: fail(OSError("full"))) == "save /a, write: rank 0: OSError: full"


def test_a_store_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where its machine is gone, and torch connects to it again and again: the rank raises what ended the run."""
    answer = threading.Event()
    store = barrier._BarrierStore.__new__(barrier._BarrierStore)
    store.name, store._default = "test", SimpleNamespace(clone=answer.wait)
    monkeypatch.setattr(PROGRESS, "failure", "the store is gone")
    with pytest.raises(FullshardError, match="the store is gone"):
        barrier._by_thread(lambda: store.meet(1, 0, "here", None, 1.0))
    answer.set()
