"""Small runs of the benchmarks of the host's work in one process; of times, what follows from them is looked at."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from bench.contestants import FSDP1_FLAT, FULLSHARD, PEER_WITH_SAME_FLAG, WRAPPER_FLAT
from small_runs import run_small

from bench import host_cost, optimizer_cost, wrap_time

SMALL = "--units 2 --rounds 2 --steps-per-round 1"


def test_host_cost(tmp_path: Path) -> None:
    """Everybody steps in turns, as often, in the same process."""
    page, stored = run_small(tmp_path, "host_cost", SMALL + " --direct-units 2 --warmup-steps 1")
    assert set(stored["contestants"]) == set(host_cost.SYSTEMS) and not stored["not_run"]
    for entry in stored["contestants"].values():
        assert len(entry["step"]["seconds"]) == 2
    seconds = {name: entry["step"]["seconds"] for name, entry in stored["contestants"].items()}
    for name, peer in PEER_WITH_SAME_FLAG.items():
        rounds = zip(seconds[name], seconds[peer], seconds[host_cost.PLAIN], strict=True)
        ratios = [(mine - plain) / (theirs - plain) for mine, theirs, plain in rounds]
        found = stored["contestants"][name]["step"]["host_cost_ratio_to_fsdp1"]
        assert found["median"] == pytest.approx(sum(ratios) / 2)
        whole = [mine / theirs for mine, theirs in zip(seconds[name], seconds[host_cost.FSDP2], strict=True)]
        assert host_cost.whole_step_ratio(stored["contestants"], name, "step")["median"] == pytest.approx(
            sum(whole) / 2
        )
    assert set(stored["direct"]["contestants"]) == set(host_cost.OF_DIRECT) and not stored["direct"]["not_run"]
    assert "<!-- bench:host_cost -->\nAt batch 1, rank 0 of 8" in page and page.count("| plain |") == 2
    for model, figure in host_cost.TARGETS:
        assert f"{model}, {host_cost.FIGURES[figure]}: " in page


def test_wrap_time(tmp_path: Path) -> None:
    """Wrapping and first step of every front end, each beside torch's, and the targets of each."""
    page, stored = run_small(tmp_path, "wrap_time", "--units 3 --rounds 2 --warmup-units 1")
    flat = stored["contestants"][WRAPPER_FLAT]
    assert not stored["not_run"] and set(flat) == set(wrap_time.FIGURES)
    peer = stored["contestants"][FSDP1_FLAT]
    ratios = [mine / base for mine, base in zip(flat["both"]["seconds"], peer["both"]["seconds"], strict=True)]
    assert flat["both"]["ratio_to_fsdp1"]["median"] == pytest.approx(sum(ratios) / 2)
    assert "ratio_to_fsdp1" not in peer["both"]
    assert stored["contestants"][FULLSHARD]["both"]["ratio_to_fsdp2"]
    assert set(stored["contestants"]) == set(wrap_time.SYSTEMS)
    assert "<!-- bench:wrap_time -->\n3 units" in page and "Against the targets: wrapping, fullshard" in page
    for name in wrap_time.PEERS:
        assert re.search(rf"wrapping, {name}: \S+ of at most 0\.50", page)
        assert re.search(rf"both together, {name}: \S+ of at most 0\.60", page)


def test_optimizer_cost(tmp_path: Path) -> None:
    """All kinds of parameters with all implementations, as they are without options."""
    page, stored = run_small(tmp_path, "optimizer_cost", "--units 2 --rounds 2 --steps-per-round 1")
    pairs = set(optimizer_cost.contestants())
    assert set(stored["contestants"]) == pairs and not stored["not_run"]
    assert len(stored["targets"]) == len(optimizer_cost.TARGETS)
    assert stored["contestants"]["plain fused"]["ratio_to_plain"]["median"] == 1.0
    assert (
        "<!-- bench:optimizer_cost -->\n16 parameters" in page
        and "| dtensors loop |" in page
        and "| own clip |" in page
    )


def test_muon(tmp_path: Path) -> None:
    """Owners compute the bits of everybody who gathers everything, and send what the bound says."""
    page, stored = run_small(tmp_path, "muon", "--width 32 --blocks 1 --rounds 1 --ranks 1")
    assert list(stored["contestants"]) == ["fullshard", "fullshard-one-round", "gather", "torch-dtensor", "plain"]
    assert not stored["not_run"] and stored["contestants"]["fullshard"]["difference"] == 0
    assert stored["contestants"]["gather"]["ratio_to_gather"]["median"] == 1.0
    assert all(each["mean_over_bound"] == pytest.approx(1, rel=1e-3) for each in stored["traffic"].values())
    assert "<!-- bench:muon -->\n4 matrices" in page
