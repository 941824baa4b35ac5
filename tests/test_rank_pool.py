"""The rank pool itself: results, failures, hangs, deaths, and what one body leaves behind for the next."""

from __future__ import annotations

import os
import random
import signal
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fullshard import layout
from ranks import Rank, RankPool, RanksFailed, on_ranks


@pytest.fixture(scope="module")
def ranks(ranks: RankPool) -> Iterator[RankPool]:
    """A pool of this file's own: worlds of the session's pool are replaced after so many bodies, in any test."""
    pool = RankPool(beside=ranks)
    yield pool
    pool.close()


def number(rank: Rank, factor: int, *, offset: int = 0) -> int:
    return rank.rank * factor + offset


def sum_over_ranks(rank: Rank, value: torch.Tensor) -> torch.Tensor:
    value = value + rank.rank
    dist.all_reduce(value, group=rank.group)
    return value


def fail_on(rank: Rank, failing: int) -> None:
    print(f"printed by {rank.rank}")
    if rank.rank == failing:
        raise ValueError(f"bad value on {rank.rank}")
    dist.barrier()


def compare_on_all(rank: Rank) -> None:
    size, expected = rank.world_size, 3
    assert size * 100 == expected


def sleep_on(rank: Rank, hanging: int) -> None:
    if rank.rank == hanging:
        time.sleep(100)


def exit_on(rank: Rank, dying: int, code: int) -> str:
    if rank.rank == dying:
        os._exit(code)
    dist.barrier()
    return "got through"


def kill_self(rank: Rank) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def process_id(rank: Rank) -> int:
    return os.getpid()


def left_replaced(rank: Rank) -> None:
    layout.chunk_of = number


def return_lambda(rank: Rank) -> object:
    return lambda: None


def dirty_everything(rank: Rank) -> None:
    torch.manual_seed(123)
    random.seed(123)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    os.environ["LEFT_BY_A_BODY"] = "1"
    os.chdir("/")


def observe_everything(rank: Rank) -> tuple[float, float, torch.dtype, bool, bool, str]:
    return (
        torch.rand(()).item(),
        random.random(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        "LEFT_BY_A_BODY" in os.environ,
        os.getcwd(),
    )


def describe_device(rank: Rank) -> tuple[str, str, str, float]:
    value = torch.full((2,), 1.0 + rank.rank)
    dist.all_reduce(value)
    return rank.device.type, rank.mesh.device_type, value.device.type, value[0].item()


def skip_all(rank: Rank) -> None:
    pytest.skip("not today")


def test_results_come_in_rank_order(ranks: RankPool) -> None:
    """A call passes its arguments on and returns what each rank returned, by rank, from the same processes.

    Bodies can use collectives, and be sent tensors.
    """
    for world in (1, 2, 4):
        assert ranks(world, number, 10, offset=3) == [rank * 10 + 3 for rank in range(world)]
    assert ranks(2, process_id) == ranks(2, process_id) == ranks.pids(2)
    for value in ranks(4, sum_over_ranks, torch.ones(2, 3)):
        assert torch.equal(value, torch.full((2, 3), 4.0 + 0 + 1 + 2 + 3))


def test_worlds_of_two_devices_live_side_by_side(ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call may name the type of device that its ranks compute on; one that cannot be had skips the test."""
    on_cpu = ranks(2, process_id, device_type="cpu")
    assert ranks(2, describe_device, device_type="emulated") == [("emulated", "emulated", "emulated", 3.0)] * 2
    assert ranks(2, describe_device, device_type="cpu") == [("cpu", "cpu", "cpu", 3.0)] * 2
    assert ranks(2, process_id, device_type="cpu") == on_cpu
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(pytest.skip.Exception, match="needs a C\\+\\+ compiler"):
        RankPool(beside=ranks)(2, process_id, device_type="emulated")


def test_error_on_one_rank_is_shown_first(ranks: RankPool) -> None:
    """An exception fails the call within seconds, its traceback shown before the ranks it left hanging."""
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        ranks(2, fail_on, 1)
    text = str(caught.value)
    assert time.monotonic() - start < 20
    assert "fail_on on 2 ranks" in text
    assert "--- rank 1 raised ValueError" in text
    assert 'raise ValueError(f"bad value on {rank.rank}")' in text  # the source line, hence a traceback
    assert "printed by 1" in text
    assert text.index("rank 1 raised ValueError") < text.index("rank 0 hung: still running")
    assert "in fail_on" in text[text.index("rank 0 hung") :]
    assert "ranks/worker.py" not in text[: text.index("rank 0 hung")]


def test_equal_errors_are_shown_once_and_the_world_is_replaced(ranks: RankPool) -> None:
    """An assertion that fails alike on all ranks is reported once, with the values that pytest would show.

    The next call runs in new processes and works.
    """
    before = ranks(2, process_id)
    with pytest.raises(RanksFailed, match=r"ranks 0, 1, each raised AssertionError") as caught:
        ranks(2, compare_on_all)
    assert str(caught.value).count("Traceback") == 1
    assert "assert (2 * 100) == 3" in str(caught.value)
    assert ranks.pids(2) == []
    assert not set(before) & set(ranks(2, process_id))
    assert not any(_is_running(pid) for pid in before)


def test_death_of_a_rank_is_told_from_its_echo(ranks: RankPool) -> None:
    """A rank that ends is named with its exit code, before the ranks that lost their connection to it."""
    with pytest.raises(RanksFailed, match="rank 1 died with exit code 7") as caught:
        ranks(4, exit_on, 1, 7)
    text = str(caught.value)
    assert text.index("rank 1 died") < text.index("consequence")
    assert ranks(4, number, 1) == [0, 1, 2, 3]


def test_idle_rank_that_was_killed_is_reported(ranks: RankPool) -> None:
    """A rank that something kills between two calls fails the next call, and only that one."""
    ranks(2, process_id)
    os.kill(ranks.pids(2)[0], signal.SIGKILL)
    time.sleep(0.1)
    with pytest.raises(RanksFailed, match="rank 0 died with exit code -9"):
        ranks(2, number, 1)
    assert ranks(2, number, 1) == [0, 1]


def test_expected_failure_returns_outcomes(ranks: RankPool) -> None:
    """With ``expect_failure`` the call returns per rank what happened: value, exception or exit code."""
    died, lost = ranks(2, exit_on, 0, 7, fresh=True, expect_failure=True)
    assert (died.kind, died.exit_code, died.failed) == ("died", 7, True)
    assert (lost.kind, lost.error_type, lost.is_consequence) == ("raised", "RuntimeError", True)

    (killed,) = ranks(1, kill_self, fresh=True, expect_failure=True)
    assert (killed.kind, killed.exit_code) == ("died", -signal.SIGKILL)

    fine, stuck = ranks(2, sleep_on, 1, fresh=True, expect_failure=True, timeout=1)
    assert (fine.kind, fine.value, fine.failed) == ("returned", None, False)
    assert (stuck.kind, "in sleep_on" in stuck.stacks) == ("hung", True)

    (raised,) = ranks(1, fail_on, 0, fresh=True, expect_failure=True)
    assert (raised.kind, raised.error_type, raised.message) == ("raised", "ValueError", "bad value on 0")
    assert "Exception" in raised.error_types
    assert "Traceback" in raised.traceback
    assert raised.output == "printed by 0\n"


def test_bodies_leave_nothing_to_others(ranks: RankPool) -> None:
    """Seeds, default dtype, grad mode, environment and directory are as in a new process for every body.

    A fresh world has processes of its own, which end with the call, and the pooled world goes on.
    """
    clean, before = ranks(2, observe_everything), ranks(2, process_id)
    ranks(2, dirty_everything)
    assert ranks(2, observe_everything) == clean
    assert clean[0] == clean[1]
    fresh = ranks(2, process_id, fresh=True)
    assert not set(before) & set(fresh)
    assert not any(_is_running(pid) for pid in fresh)
    assert ranks(2, process_id) == before


def test_what_cannot_run_on_ranks_is_refused(ranks: RankPool) -> None:
    """A function that ranks could not find by name, a value that cannot be pickled, and misuse of the decorator."""
    with pytest.raises(TypeError, match=r"function of a module; got .*<lambda>"):
        ranks(2, lambda rank: None)
    with pytest.raises(RanksFailed, match="returned a function, which cannot be pickled"):
        ranks(1, return_lambda)
    with pytest.raises(TypeError, match="needs world sizes"):
        on_ranks(number)
    with pytest.raises(TypeError, match="taken by on_ranks"):

        @on_ranks(2)
        def body(rank: Rank, world: int) -> None: ...


def test_skip_in_a_body_skips_the_test(ranks: RankPool) -> None:
    """``pytest.skip`` on every rank skips the test."""
    with pytest.raises(pytest.skip.Exception, match="not today"):
        ranks(2, skip_all)
    assert ranks(2, number, 1) == [0, 1]


@on_ranks(1, 2)
@pytest.mark.parametrize("addend", [1, 5])
def test_decorated_body_runs_on_ranks(rank: Rank, addend: int, tmp_path: Path) -> None:
    """A decorated body runs on every rank of every world size, with parameters and fixtures of pytest."""
    assert isinstance(rank, Rank)
    assert tmp_path.is_dir()
    total = torch.tensor(rank.rank + addend)
    dist.all_reduce(total)
    assert total.item() == sum(range(rank.world_size)) + addend * rank.world_size


@on_ranks(1, 2)
@pytest.mark.parametrize("time", ["first", "second"])
def test_what_a_body_replaces_is_put_back(rank: Rank, time: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's copy of ``monkeypatch`` is undone after the body, so that the next body has the real function."""
    assert layout.chunk_of.__module__ == "fullshard.layout.regions"
    monkeypatch.setattr(layout, "chunk_of", number)


def test_body_that_leaves_a_function_replaced_fails(ranks: RankPool) -> None:
    """It would change the tests after it on the same ranks, without a word."""
    with pytest.raises(RanksFailed, match=r"left_replaced left replaced.*: fullshard\.layout\.chunk_of"):
        ranks(2, left_replaced, fresh=True)


def test_failure_reads_well_in_pytest(
    ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failing body fails its own test with the rank's traceback, and the next test passes."""
    code = """
        from ranks import on_ranks

        @on_ranks(2)
        def test_bad(rank):
            wrong = rank.rank + 1
            assert wrong == 7 or rank.rank == 0

        @on_ranks(2)
        def test_good(rank):
            pass
    """
    (tmp_path / "test_inner.py").write_text(textwrap.dedent(code))

    class Pool:
        @pytest.fixture(name="ranks")
        def pool(self) -> RankPool:
            return ranks

    monkeypatch.chdir(tmp_path)
    plugins = ("cacheprovider", "faulthandler", "threadexception", "unraisableexception")
    arguments = ["-q", *(f"-pno:{plugin}" for plugin in plugins), "--rootdir", str(tmp_path), str(tmp_path)]
    pytest.main(arguments, plugins=[Pool()])
    output = capsys.readouterr().out
    assert "1 failed, 1 passed" in output, output
    assert "rank 1 raised AssertionError" in output
    assert "assert (2 == 7 or 1 == 0)" in output
    assert "ranks/world.py" not in output  # no frames of the pool


def instruction_sets(rank: Rank) -> tuple[str, str | None]:
    return torch.backends.cpu.get_cpu_capability(), os.environ.get("MKL_CBWR")


def test_what_ranks_have_of_the_process_above_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks compute with the instruction sets that its environment names; when it is killed they end, too."""
    for name, value in {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "AVX2"}.items():  # ``make test CPU=...``
        monkeypatch.setenv(name, value)
    pool = RankPool(preload=())
    try:
        assert pool(2, instruction_sets) == [("DEFAULT", "AVX2")] * 2
        pids = pool.pids(2)
        assert len(pids) == 2 and all(_is_running(pid) for pid in pids)
        pool._nursery("cpu").process.kill()
        until = time.monotonic() + 10
        while any(_is_running(pid) for pid in pids) and time.monotonic() < until:
            time.sleep(0.05)
        assert not any(_is_running(pid) for pid in pids)
        pool._worlds.clear()  # nobody is left to be ended
    finally:
        pool.close()


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
