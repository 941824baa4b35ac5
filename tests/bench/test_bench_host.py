"""Small runs of the benchmarks of the host's work in one process; of times, what follows from them is looked at."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.contestants import FSDP1_FLAT, FULLSHARD, PEER_WITH_SAME_FLAG, WRAPPER_FLAT
from small_runs import run_small

from bench import host_cost, optimizer_cost, wrap_time

SMALL = "--units 2 --rounds 2 --steps-per-round 1"


def test_host_cost(tmp_path: Path) -> None:
    """Everybody steps in turns, as often, in the same process; costs are beyond the plain model's step of the round."""
    page, stored = run_small(tmp_path, "host_cost", SMALL + " --direct-units 2 --warmup-steps 1")
    entries = stored["contestants"]
    assert set(entries) == set(host_cost.SYSTEMS) and not stored["not_run"]
    seconds = {name: entry["step"]["seconds"] for name, entry in entries.items()}
    for name, peer in PEER_WITH_SAME_FLAG.items():
        rounds = list(zip(*(seconds[each] for each in (name, peer, host_cost.PLAIN, host_cost.FSDP2)), strict=True))
        ratios = [(mine - plain) / (theirs - plain) for mine, theirs, plain, _ in rounds]
        assert len(ratios) == 2
        assert entries[name]["step"]["host_cost_ratio_to_fsdp1"]["median"] == pytest.approx(sum(ratios) / 2)
        whole = host_cost.whole_step_ratio(entries, name, "step")
        assert whole["median"] == pytest.approx(sum(mine / theirs for mine, _, _, theirs in rounds) / 2)
    assert set(stored["direct"]["contestants"]) == set(host_cost.OF_DIRECT) and not stored["direct"]["not_run"]
    assert "<!-- bench:host_cost -->\nAt batch 1, rank 0 of 8" in page and page.count("| plain |") == 2


def test_wrap_time(tmp_path: Path) -> None:
    """Wrapping and first step of every front end, each beside torch's."""
    page, stored = run_small(tmp_path, "wrap_time", "--units 3 --rounds 2 --warmup-units 1")
    assert not stored["not_run"] and set(stored["contestants"]) == set(wrap_time.SYSTEMS)
    flat, peer = (stored["contestants"][name]["both"] for name in (WRAPPER_FLAT, FSDP1_FLAT))
    ratios = [mine / base for mine, base in zip(flat["seconds"], peer["seconds"], strict=True)]
    assert flat["ratio_to_fsdp1"]["median"] == pytest.approx(sum(ratios) / 2) and "ratio_to_fsdp1" not in peer
    assert stored["contestants"][FULLSHARD]["both"]["ratio_to_fsdp2"]
    assert "<!-- bench:wrap_time -->\n3 units" in page and page.count("| fullshard") == 3


def test_optimizer_cost(tmp_path: Path) -> None:
    """All kinds of parameters with all implementations, as they are without options."""
    page, stored = run_small(tmp_path, "optimizer_cost", SMALL)
    assert set(stored["contestants"]) == set(optimizer_cost.contestants()) and not stored["not_run"]
    assert stored["contestants"]["plain fused"]["ratio_to_plain"]["median"] == 1.0
    rows = ("<!-- bench:optimizer_cost -->\n16 parameters", "| dtensors loop |", "| own clip |")
    assert all(row in page for row in rows)
