"""What ``bench checkpoint`` concludes from answers made by hand, and a tiny run of it. No test looks at a time."""

from __future__ import annotations

import json
import mmap
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.checkpoint import driver
from bench.checkpoint import report as checkpoint_report
from bench.checkpoint.report import BY_NAME, OPERATIONS
from bench.checkpoint.systems import FILE, KEEPERS, Keeper, digest, spoil, write_weights
from bench.checkpoint.worker import Answer, OwnMemory, flush
from bench.environment import REPOSITORY, current_environment
from bench.models import GPT
from bench_command import run_small

from bench import resident_memory

FLAT, WRAPPER = "fullshard-wrapper-flat", "fullshard-wrapper"
MIB = 1 << 20


def rounds(
    returned: Sequence[float], *, later: float = 0.0, extra: int = 10 * MIB, right: bool | None = True
) -> list[list[Answer]]:
    """Two ranks, of which the second is slower by one second; a round before and one after that must not count."""
    found = [
        [Answer(r, r + later, extra, None, right), Answer(r + 1.0, r + 1.0 + later, extra // 2, None, right)]
        for r in (99.0, *returned)
    ]
    last = Answer(99.0, 99.0, extra, extra // 5, right)
    return [*found, [last, last]]


def result(summaries: dict[str, dict[str, Any]]) -> dict[str, Any]:
    settings = driver.Options(width=64, blocks=2)
    return {
        "settings": {"width": 64, "layers": 2, "ranks": 2, "threads": 1, "rounds": 2, "files_on": "ext4"}
        | {"parameters": settings.parameters},
        "environment": {**current_environment().as_json(), "commit": "abc"},
        "operations": {name: {"not_run": {}, **summary} for name, summary in summaries.items()},
        "wrong": [],
        "not_run": {},
    }


def test_the_slowest_rank_counts_in_the_rounds_that_count() -> None:
    """Neither the round that warms up nor the one that samples memory is in a time."""
    summary = checkpoint_report.summarise(
        BY_NAME["load"], {"fullshard": rounds([1.0, 3.0]), "fsdp2": rounds([3.0] * 2)}
    )
    entry = summary["ways"]["fullshard"]
    assert entry["seconds"]["returned"] == [2.0, 4.0]
    assert entry["median_returned_seconds"] == 3.0
    assert summary["peer"] == "fsdp2"
    assert entry["returned_ratio"] == {"of_medians": 0.75, "smallest": 0.5, "largest": 1.0}
    assert entry["extra_bytes"] == 10 * MIB and entry["own_bytes"] == 2 * MIB
    assert entry["extra_bytes_by_rank"] == [10 * MIB, 10 * MIB]  # in the last round, both have the most


def test_both_clocks_have_a_ratio() -> None:
    """Until the call returns, and until the files are on the disk."""
    found = {"fullshard": rounds([1.0], later=2.0), "fsdp2": rounds([3.0], later=4.0)}
    entry = checkpoint_report.summarise(BY_NAME["async_save"], found)["ways"]["fullshard"]
    assert checkpoint_report.ratio(entry, "returned").median == 0.5  # type: ignore[union-attr]
    assert checkpoint_report.ratio(entry, "done").median == 0.5  # type: ignore[union-attr]
    assert entry["median_done_seconds"] == 4.0


def test_the_faster_of_two_ways_is_the_peer() -> None:
    """FSDP1 imports in two ways; fullshard is measured by the better one of the whole run."""
    ways = {"fullshard": rounds([1.0]), "fsdp1": rounds([4.0]), "fsdp1+broadcast": rounds([3.0])}
    summary = checkpoint_report.summarise(BY_NAME["import"], ways)
    assert summary["peer"] == "fsdp1+broadcast"
    assert summary["ways"]["fullshard"]["returned_ratio"]["of_medians"] == 0.5
    assert checkpoint_report.summarise(BY_NAME["import"], {"fullshard": rounds([1.0])})["peer"] is None


def test_no_ratio_without_a_peer() -> None:
    """A table is made, but neither a verdict about time nor a bar."""
    summary = checkpoint_report.summarise(BY_NAME["load"], {"fullshard": rounds([1.0], extra=3 * MIB)})
    assert "returned_ratio" not in summary["ways"]["fullshard"]
    text = checkpoint_report.table(result({"load": summary}))
    assert "| load, fullshard | 2.00 | - | - | - | 3 | 1 |" in text
    assert list(checkpoint_report.verdicts(result({"load": summary}))) == [
        "extra memory per rank: 3 MiB of at most 1024, in load, fullshard"
    ]


def test_wrong_values_are_named() -> None:
    """One wrong rank in one round is enough, also in a round that does not count; so is another loss, or NaN."""
    spoiled = rounds([1.0, 1.0])
    spoiled[0][1] = Answer(1.0, 1.0, 0, None, False)
    summary = checkpoint_report.summarise(BY_NAME["load"], {"fullshard": rounds([1.0, 1.0]), "fsdp2": spoiled})
    assert summary["wrong"] == ["fsdp2"]
    assert driver.wrong_values({"a": 1.0, "b": 1.0 + 1e-7}, {"load": summary}) == ["load of fsdp2"]
    assert driver.wrong_values({"a": 1.0, "b": float("nan")}, {}) == ["the loss of b"]
    writes = checkpoint_report.summarise(BY_NAME["save"], {"fsdp2": rounds([1.0], right=None)})
    assert writes["wrong"] == []


def contest_results() -> dict[str, Any]:
    """Every operation with a target: fullshard half of the peer's time but in ``load``; its wrapper 0.9 of it."""
    found = {}
    for name in ("save_weights", "save", "load_weights", "load", "export", "import"):
        own = rounds([4.0 if name == "load" else 1.0], extra=5 * MIB)
        ways = {"fullshard": own, WRAPPER: rounds([2.6]), FLAT: rounds([2.6], extra=7 * MIB)}
        peers = {peer: rounds([3.0], extra=900 * MIB) for peer in BY_NAME[name].peers}
        found[name] = checkpoint_report.summarise(BY_NAME[name], {**ways, **peers})
    return result(found)


def test_verdicts() -> None:
    """Targets are 1.0 of FSDP2's time, 0.8 of FSDP1's for export and import, and the budget of memory."""
    lines = list(checkpoint_report.verdicts(contest_results()))
    assert lines[0] == (f"save_weights: fullshard 0.50, {WRAPPER} 0.90, {FLAT} 0.90, of at most 1.00 of fsdp2's time")
    missed = [line.partition(":")[0] for line in lines if line.endswith("(missed)")]
    assert missed == ["load", "export", "import"]
    assert lines[-1] == f"extra memory per rank: 10 MiB of at most 1024, in save_weights, {WRAPPER}"


def test_memory_beyond_the_budget_is_a_miss() -> None:
    """Not in an asynchronous save: a copy is what that is for."""
    found = {
        name: checkpoint_report.summarise(BY_NAME[name], {"fullshard": rounds([1.0], extra=2 << 30)})
        for name in ("async_save", "load")
    }
    (line,) = checkpoint_report.verdicts(result(found))
    assert line == "extra memory per rank: 2048 MiB of at most 1024, in load, fullshard (missed)"
    del found["load"]
    assert not list(checkpoint_report.verdicts(result(found)))


def test_the_table_of_targets_gets_its_rows(tmp_path: Path) -> None:
    """Rows with the same first cell are replaced where all was measured; everything else stays."""
    page = tmp_path / "page.md"
    firsts = [row[0] for row in checkpoint_report.TARGET_ROWS]
    page.write_text("\n".join(["| other | 1 | 2 |", *(f"| {first} | x | y |" for first in firsts), "end", ""]))
    checkpoint_report.update_targets(page, contest_results())
    lines = page.read_text().split("\n")
    assert lines[0] == "| other | 1 | 2 |" and lines[-2:] == ["end", ""]
    assert lines[1] == f"| {firsts[0]} | 1.0 | **0.50**, **0.90**, **0.90** / **0.50**, **0.90**, **0.90** |"
    assert lines[2] == f"| {firsts[1]} | 1.0 | **0.50**, **0.90**, **0.90** / 1.25 (missed), **0.90**, **0.90** |"
    assert lines[3] == f"| {firsts[2]} | 0.8 | **0.50**, 0.90 (missed), 0.90 (missed) |"
    rows = checkpoint_report.target_rows(contest_results())
    assert rows[checkpoint_report.MEMORY_ROW[0]].endswith("| 1 GiB | **10 MiB**; up to 900 MiB (save_weights, fsdp2) |")
    partly = contest_results()
    del partly["operations"]["save"]
    assert set(checkpoint_report.target_rows(partly)) == {*firsts[1:]}


def test_the_page_of_this_repository_has_those_rows() -> None:
    """Otherwise a run would not find where its figures belong."""
    page = (REPOSITORY / "docs" / "performance.md").read_text()
    for first in [row[0] for row in checkpoint_report.TARGET_ROWS] + [checkpoint_report.MEMORY_ROW[0]]:
        assert page.count(f"| {first} |") == 1
    assert page.count("<!-- bench:checkpoint:1024 -->") == 1


def test_a_block_says_what_was_measured() -> None:
    """Sizes, rows, verdicts, who could not go on."""
    content = contest_results()
    content["not_run"] = {"fsdp1": "it fell"}
    content["operations"]["save"]["not_run"] = {"fsdp1": "it fell"}
    content["operations"]["save"]["ways"].pop("fullshard")
    block = "\n\n".join(checkpoint_report.paragraphs(content))
    assert "GPT of 2 blocks of width 64: 1 MB of fp32 parameters, 2 MB with AdamW's state; 2 gloo ranks" in block
    assert "| load, fsdp2 (peer) | 4.00 | 1.00 (1.00 to 1.00) | - | - | 900 | 180 |" in block
    assert "| save, fsdp1 | cannot run | - | - | - | - | - |" in block
    assert "`fsdp1` could not run: it fell." in block


def test_the_size_of_the_model() -> None:
    """The count of parameters is that of the model; by default it is at least 400 MB."""
    settings = driver.Options(width=64, blocks=3)
    with torch.device("meta"):
        assert settings.parameters == sum(p.numel() for p in GPT(settings.shape).parameters())
    assert 4 * driver.Options().parameters >= 400e6


def test_who_takes_part() -> None:
    """FSDP1's flat form only if asked for; what an operation needs is there; every method exists."""
    assert "fsdp1-flat" not in driver.systems_of(())
    assert driver.systems_of(["fsdp2", "fsdp1-flat"]) == ["fsdp1-flat", "fsdp2"]
    for operation in OPERATIONS:
        names = [way.name for way in operation.ways]
        assert len(set(names)) == len(names) and {*operation.peers} <= {*names}
        for way in operation.ways:
            for method in {way.method, operation.made_by or way.method}:
                assert hasattr(KEEPERS[way.system], f"do_{method}")
        assert operation.writes is (operation.made_by is None and operation.name != "import")


def test_digests_see_every_bit() -> None:
    """Of values, of their order, of non-contiguous memory; and they leave memory resizable."""
    values = torch.arange(6.0).reshape(2, 3)
    assert digest(iter([values])) == digest(iter([values.t().contiguous().t()]))
    assert digest(iter([values])) != digest(iter([values.t()]))
    assert digest(iter([values[0], values[1]])) != digest(iter([values[1], values[0]]))
    assert digest(iter([torch.tensor([0.0])])) != digest(iter([torch.tensor([-0.0])]))
    assert digest(iter([torch.empty(0)])) == digest(iter([]))
    values.untyped_storage().resize_(0)


def test_a_keeper_shows_its_memory() -> None:
    """What is spoiled is spoiled in the model and in the optimizer's state."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    keeper = Keeper(model, optimizer)
    assert len(list(keeper.state())) == 2 * 3  # exp_avg, exp_avg_sq, step
    before = digest(keeper.weights()), digest(keeper.state())
    spoil(keeper.weights())
    assert bool((model.weight == 7).all()) and digest(keeper.state()) == before[1]
    spoil(keeper.state())
    assert digest(keeper.weights()) != before[0] and digest(keeper.state()) != before[1]


def test_exported_files_are_compared_by_names_shapes_and_bits(tmp_path: Path) -> None:
    """In either format; the order in the file does not matter."""
    model = torch.nn.Linear(2, 3)
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    write_weights(model, tmp_path / "a" / FILE)
    torch.save(dict(reversed(model.state_dict().items())), tmp_path / "b" / "model.pt")
    assert driver.digest_of_file(tmp_path / "a") == driver.digest_of_file(tmp_path / "b")
    with torch.no_grad():
        model.bias[0] += 1.0
    write_weights(model, tmp_path / "c" / FILE)
    assert driver.digest_of_file(tmp_path / "a") != driver.digest_of_file(tmp_path / "c")
    flush(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's counts of memory are Linux's")
def test_a_sampler_sees_memory_that_is_gone_when_it_stops() -> None:
    """Anonymous memory held for a while between start and stop."""
    sampler = OwnMemory()
    before = resident_memory.own()
    sampler.start()
    held = mmap.mmap(-1, 16 * MIB)  # not from an allocator, which may have kept as much from tests before
    held.write(bytes(16 * MIB))
    wanted, deadline = (before or 0) + 12 * MIB, time.monotonic() + 60
    while (sampler.highest or 0) < wanted and time.monotonic() < deadline:
        time.sleep(0.001)
    held.close()
    highest = sampler.stop()
    assert highest is not None and highest >= wanted


def test_a_tiny_run(tmp_path: Path) -> None:
    """Saved and loaded by two systems; values are right, files are written."""
    chosen = ("load",)
    options = " ".join(f"--what {what}" for what in chosen) + " --only fullshard --only fsdp2 --folder " + str(tmp_path)
    page, (path,) = run_small(tmp_path / "r", "checkpoint", f"--width 64 --blocks 2 --rounds 1 {options}")
    stored = json.loads(path.read_text())
    assert path.name.startswith("checkpoint_64_part_") and tuple(stored["operations"]) == chosen
    assert stored["wrong"] == [] and stored["not_run"] == {}
    assert stored["losses"]["fullshard"] == pytest.approx(stored["losses"]["fsdp2"], abs=1e-5)
    for summary in stored["operations"].values():
        assert list(summary["ways"]) == ["fullshard", "fsdp2"]
        assert summary["peer"] == "fsdp2"
        entry = summary["ways"]["fullshard"]
        assert len(entry["seconds"]["returned"]) == 1
        if sys.platform == "linux":
            assert entry["extra_bytes"] is not None and entry["own_bytes"] is not None
    assert "<!-- bench:checkpoint:64 -->\nGPT of 2 blocks of width 64" in page and "| load, fullshard |" in page
    assert path.with_suffix(".png").exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["r"]  # nothing is left behind
