"""What ``bench checkpoint`` concludes from answers made by hand, and a tiny run of it. No test looks at a time."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from bench.checkpoint import driver
from bench.checkpoint import report as checkpoint_report
from bench.checkpoint.report import BY_NAME
from bench.checkpoint.systems import FILE, digest, write_weights
from bench.checkpoint.worker import Answer
from small_runs import run_small

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


def test_the_slowest_rank_counts_in_the_rounds_that_count() -> None:
    """Neither the round that warms up nor the one that samples memory is in a time; both clocks have a ratio."""
    found = {"fullshard": rounds([1.0, 3.0], later=2.0), "fsdp2": rounds([3.0] * 2, later=4.0)}
    summary = checkpoint_report.summarize(BY_NAME["save"], found)
    entry = summary["ways"]["fullshard"]
    assert entry["seconds"]["returned"] == [2.0, 4.0] and entry["median_returned_seconds"] == 3.0
    assert summary["peer"] == "fsdp2"
    assert entry["returned_ratio"] == {"median": 0.75, "lower_quartile": 0.5, "upper_quartile": 1.0}
    assert entry["done_ratio"]["median"] == 5 / 8
    assert entry["extra_bytes"] == 10 * MIB and entry["own_bytes"] == 2 * MIB


def test_the_faster_of_two_ways_is_the_peer() -> None:
    """FSDP1 imports in two ways; fullshard is measured by the better one of the whole run, or by none."""
    ways = {"fullshard": rounds([1.0]), "fsdp1": rounds([4.0]), "fsdp1+broadcast": rounds([3.0])}
    summary = checkpoint_report.summarize(BY_NAME["import"], ways)
    assert summary["peer"] == "fsdp1+broadcast"
    assert summary["ways"]["fullshard"]["returned_ratio"]["median"] == 0.5
    alone = checkpoint_report.summarize(BY_NAME["import"], {"fullshard": rounds([1.0])})
    assert alone["peer"] is None and "returned_ratio" not in alone["ways"]["fullshard"]


def test_wrong_values_are_named() -> None:
    """One wrong rank in one round is enough, also in a round that does not count; so is another loss, or NaN."""
    spoiled = rounds([1.0, 1.0])
    spoiled[0][1] = Answer(1.0, 1.0, 0, None, False)
    summary = checkpoint_report.summarize(BY_NAME["load"], {"fullshard": rounds([1.0, 1.0]), "fsdp2": spoiled})
    assert summary["wrong"] == ["fsdp2"]
    assert driver.wrong_values({"a": 1.0, "b": 1.0 + 1e-7}, {"load": summary}) == ["load of fsdp2"]
    assert driver.wrong_values({"a": 1.0, "b": float("nan")}, {}) == ["the loss of b"]
    assert not checkpoint_report.summarize(BY_NAME["save"], {"fsdp2": rounds([1.0], right=None)})["wrong"]


def test_digests_see_every_bit() -> None:
    """Of values, of their order, of non-contiguous memory; and they leave memory resizable."""
    values = torch.arange(6.0).reshape(2, 3)
    assert digest(iter([values])) == digest(iter([values.t().contiguous().t()]))
    assert digest(iter([values])) != digest(iter([values.t()]))
    assert digest(iter([values[0], values[1]])) != digest(iter([values[1], values[0]]))
    assert digest(iter([torch.tensor([0.0])])) != digest(iter([torch.tensor([-0.0])]))
    values.untyped_storage().resize_(0)


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


def test_a_tiny_run(tmp_path: Path) -> None:
    """Saved, loaded, exported by two systems; values are right, files are written, none is left behind."""
    chosen = "--what load --what export --only fullshard --only fsdp2"
    options = f"--width 64 --blocks 1 --rounds 1 --ranks 1 {chosen} --folder {tmp_path}"
    page, stored = run_small(tmp_path / "r", "checkpoint", options)
    assert list(stored["operations"]) == ["load", "export"] and stored["wrong"] == [] and stored["not_run"] == {}
    assert stored["losses"]["fullshard"] == pytest.approx(stored["losses"]["fsdp2"], abs=1e-5)
    load = stored["operations"]["load"]
    assert list(load["ways"]) == ["fullshard", "fsdp2"] and load["peer"] == "fsdp2"
    entry = load["ways"]["fullshard"]
    (mine,), (theirs,) = (load["ways"][name]["seconds"]["returned"] for name in ("fullshard", "fsdp2"))
    assert entry["returned_ratio"]["median"] == pytest.approx(mine / theirs)
    assert sys.platform != "linux" or (entry["extra_bytes"] is not None and entry["own_bytes"] is not None)
    assert "<!-- bench:checkpoint:64 -->\nGPT of 1 blocks of width 64" in page and "| load, fullshard |" in page
    (figures,) = (tmp_path / "r").glob("*.json")
    assert figures.name.startswith("checkpoint_64_part_") and figures.with_suffix(".png").exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["r"]
