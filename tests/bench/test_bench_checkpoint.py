"""What ``bench checkpoint`` concludes from answers made by hand, and a tiny run of it. No test looks at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from bench.checkpoint import driver
from bench.checkpoint.report import OPERATIONS, summarize
from bench.checkpoint.systems import FILE, digest, write_weights
from bench.checkpoint.worker import Answer
from small_runs import run_small

MIB = 1 << 20
BY_NAME = {operation.name: operation for operation in OPERATIONS}


def rounds(returned: Sequence[float], *, later: float = 0.0, right: bool | None = True) -> list[list[Answer]]:
    """Two ranks, of which the second is slower by one second; a round before must not count."""
    return [
        [Answer(r, r + later, 10 * MIB, right), Answer(r + 1.0, r + 1.0 + later, 5 * MIB, right)]
        for r in (99.0, *returned)
    ]


def test_the_slowest_rank_counts_beside_the_fastest_peer() -> None:
    """The round that warms up is in no time; both clocks have a ratio; a peer that did not run gives none."""
    found = {"fullshard": rounds([1.0, 3.0], later=2.0), "fsdp2": rounds([3.0] * 2, later=4.0)}
    summary = summarize(BY_NAME["save"], found)
    entry = summary["ways"]["fullshard"]
    assert entry["seconds"]["returned"] == [2.0, 4.0] and entry["median_returned_seconds"] == 3.0
    assert summary["peer"] == "fsdp2" and entry["extra_bytes"] == 10 * MIB
    assert entry["returned_ratio"] == {"median": 0.75, "lower_quartile": 0.5, "upper_quartile": 1.0}
    assert entry["done_ratio"]["median"] == 5 / 8
    ways = {"fullshard": rounds([1.0]), "fsdp1": rounds([4.0]), "fsdp1+broadcast": rounds([3.0])}
    summary = summarize(BY_NAME["import"], ways)
    assert summary["peer"] == "fsdp1+broadcast" and summary["ways"]["fullshard"]["returned_ratio"]["median"] == 0.5
    alone = summarize(BY_NAME["import"], {"fullshard": rounds([1.0])})
    assert alone["peer"] is None and "returned_ratio" not in alone["ways"]["fullshard"]


def test_wrong_values_are_named() -> None:
    """One wrong rank in one round is enough, also in a round that does not count; so is another loss, or NaN."""
    spoiled = rounds([1.0, 1.0])
    spoiled[0][1] = Answer(1.0, 1.0, 0, False)
    summary = summarize(BY_NAME["load"], {"fullshard": rounds([1.0, 1.0]), "fsdp2": spoiled})
    assert summary["wrong"] == ["fsdp2"]
    assert driver.wrong_values({"a": 1.0, "b": 1.0 + 1e-7}, {"load": summary}) == ["load of fsdp2"]
    assert driver.wrong_values({"a": 1.0, "b": float("nan")}, {}) == ["the loss of b"]
    assert not summarize(BY_NAME["save"], {"fsdp2": rounds([1.0], right=None)})["wrong"]


def test_digests_see_every_bit(tmp_path: Path) -> None:
    """Of values, of their order, of non-contiguous memory, which stays resizable, and of files."""
    values = torch.arange(6.0).reshape(2, 3)
    assert digest(iter([values])) == digest(iter([values.t().contiguous().t()]))
    assert digest(iter([values])) != digest(iter([values.t()]))
    assert digest(iter([values[0], values[1]])) != digest(iter([values[1], values[0]]))
    assert digest(iter([torch.tensor([0.0])])) != digest(iter([torch.tensor([-0.0])]))
    values.untyped_storage().resize_(0)
    model, folders = torch.nn.Linear(2, 3), [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
        write_weights(model, folder / FILE)
        with torch.no_grad():
            model.bias[0] += float(folder.name == "b")
    first, second, third = map(driver.digest_of_file, folders)
    assert first == second != third


def test_a_tiny_run(tmp_path: Path) -> None:
    """Saved, loaded, exported by two systems; values are right, files are written, none is left behind."""
    chosen = "--what load --what export --only fullshard --only fsdp2"
    options = f"--width 64 --blocks 1 --rounds 1 --ranks 1 {chosen} --folder {tmp_path}"
    page, stored = run_small(tmp_path / "r", "checkpoint", options)
    assert list(stored["operations"]) == ["load", "export"] and stored["wrong"] == [] and stored["not_run"] == {}
    assert stored["losses"]["fullshard"] == pytest.approx(stored["losses"]["fsdp2"], abs=1e-5)
    load = stored["operations"]["load"]
    assert list(load["ways"]) == ["fullshard", "fsdp2"] and load["peer"] == "fsdp2"
    (mine,), (theirs,) = (load["ways"][name]["seconds"]["returned"] for name in ("fullshard", "fsdp2"))
    assert load["ways"]["fullshard"]["returned_ratio"]["median"] == pytest.approx(mine / theirs)
    assert "<!-- bench:checkpoint:64 -->\nGPT of 1 blocks of width 64" in page and "| load, fullshard |" in page
    assert [entry.name for entry in tmp_path.iterdir()] == ["r"]
