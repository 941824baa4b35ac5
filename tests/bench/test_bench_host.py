"""Benchmarks of the host's work in one process: small runs, and what is concluded from times made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bench.contestants import FSDP1_FLAT, FSDP2, FULLSHARD, PEER_WITH_SAME_FLAG, WRAPPER_FLAT
from small_runs import run_small

from bench import host_cost, optimizer_cost, wrap_time


def turns(seconds: dict[str, list[float]], figures: Any) -> dict[str, list[dict[str, float]]]:
    """The same seconds for every figure."""
    return {name: [dict.fromkeys(figures, one) for one in each] for name, each in seconds.items()}


def test_host_cost_is_what_a_unit_adds_to_the_plain_step() -> None:
    """By round; a wrapper is measured by FSDP2, and by FSDP1 with the same flag, which the verdict is about."""
    times = {"unsharded": [1.0, 2.0], "fsdp2": [5.0, 6.0], FULLSHARD: [3.0, 3.0], FSDP1_FLAT: [3.0, 4.0]}
    summary = host_cost.summarise(turns({**times, WRAPPER_FLAT: [2.0, 2.5]}, host_cost.FIGURES), 4)
    ours = summary[FULLSHARD]["step"]
    assert ours["host_seconds_per_unit"]["median"] == 0.375 and ours["host_cost_ratio_to_fsdp2"]["median"] == 0.375
    flat = summary[WRAPPER_FLAT]["forward_backward"]
    assert flat["host_cost_ratio_to_fsdp1"]["median"] == 0.375 and "host_cost_ratio_to_fsdp1" not in ours
    assert host_cost.verdicts(summary) == [f"{WRAPPER_FLAT}: 0.38 of at most 0.50 of FSDP1's"]
    assert not host_cost.verdicts(host_cost.summarise(turns({"unsharded": [1.0]}, host_cost.FIGURES), 4))


def test_host_cost(tmp_path: Path) -> None:
    """Everybody steps in turns, as often, in the same process."""
    page, stored = run_small(tmp_path, "host_cost", "--units 2 --rounds 2 --steps-per-round 1 --warmup-steps 1")
    assert set(stored["contestants"]) == set(host_cost.SYSTEMS) and not stored["not_run"]
    for entry in stored["contestants"].values():
        assert len(entry["step"]["seconds"]) == 2
    for name, peer in PEER_WITH_SAME_FLAG.items():
        assert peer in stored["contestants"]
        assert stored["contestants"][name]["step"]["host_cost_ratio_to_fsdp1"]["median"] > 0
    assert "<!-- bench:host_cost -->\n2 units" in page and "| plain |" in page


def test_wrap_time(tmp_path: Path) -> None:
    """Constructor and first step of every wrapper, each beside FSDP1 with the same flag."""
    page, stored = run_small(tmp_path, "wrap_time", "--units 3 --rounds 2 --warmup-units 1")
    flat = stored["contestants"][WRAPPER_FLAT]
    assert not stored["not_run"] and set(flat) == set(wrap_time.FIGURES)
    peer = stored["contestants"][FSDP1_FLAT]
    ratios = [mine / base for mine, base in zip(flat["both"]["seconds"], peer["both"]["seconds"], strict=True)]
    assert flat["both"]["ratio_to_fsdp1"]["median"] == pytest.approx(sum(ratios) / 2)
    assert "ratio_to_fsdp1" not in peer["both"]
    assert "<!-- bench:wrap_time -->\n3 units" in page and "Against the targets: constructor, fullshard" in page


def test_optimizer_cost(tmp_path: Path) -> None:
    """All kinds of parameters with all implementations, as they are without options."""
    page, stored = run_small(tmp_path, "optimizer_cost", "--units 2 --rounds 2 --steps-per-round 1")
    pairs = {f"{system} {way}" for system in optimizer_cost.SYSTEMS for way in optimizer_cost.IMPLEMENTATIONS}
    assert set(stored["contestants"]) == pairs and not stored["not_run"]
    assert len(stored["targets"]) == len(optimizer_cost.TARGETS)
    assert stored["contestants"]["plain fused"]["ratio_to_plain"]["median"] == 1.0
    assert "<!-- bench:optimizer_cost -->\n16 parameters" in page and "| flat loop |" in page


def test_targets_of_optimizers_are_judged_by_ratios_within_rounds() -> None:
    """Of medians over rounds; a target whose contestants did not run is left out."""
    seconds = {
        "plain foreach": [1.0, 10.0, 2.0],
        "local foreach": [1.1, 11.0, 2.6],
        "flat foreach": [0.3, 3.0, 0.2],
        f"{FSDP2} foreach": [8.0, 80.0, 16.0],
    }
    verdicts = {verdict["target"]: verdict for verdict in optimizer_cost.judge(seconds)}
    assert len(verdicts) == 4
    assert verdicts["local foreach / plain foreach"]["median"] == pytest.approx(1.1)
    assert not verdicts["flat foreach / plain foreach"]["met"] and verdicts["flat foreach / fsdp2 foreach"]["met"]
    text = optimizer_cost.verdict_table(list(verdicts.values()))
    assert text.count("(missed)") == 1 and "| flat foreach / plain foreach | 0.20 | 0.30 (" in text
    assert optimizer_cost.summarise(seconds, 100)["flat foreach"]["ratio_to_fsdp2"]["median"] == pytest.approx(0.0375)


def test_muon(tmp_path: Path) -> None:
    """Owners compute the bits of everybody who gathers everything, and send what the bound says."""
    page, stored = run_small(tmp_path, "muon", "--width 32 --blocks 1 --rounds 1 --ranks 1")
    assert list(stored["contestants"]) == ["fullshard", "fullshard-one-round", "gather", "torch-dtensor", "plain"]
    assert not stored["not_run"] and stored["contestants"]["fullshard"]["difference"] == 0
    assert stored["contestants"]["gather"]["ratio_to_gather"]["median"] == 1.0
    assert all(each["mean_over_bound"] == pytest.approx(1, rel=1e-3) for each in stored["traffic"].values())
    assert "<!-- bench:muon -->\n4 matrices" in page
