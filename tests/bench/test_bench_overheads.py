"""Contestants that take turns in one process, and what is concluded from times made by hand."""

from __future__ import annotations

import pytest
from bench.turns import each_that_runs, take_turns

from bench import host_cost, optimizer_cost, wrap_time

FLAT = "fullshard-wrapper-flat"


def test_contestants_take_turns_in_an_order_that_changes() -> None:
    """Everyone once per round; who cannot run is left out, with the reason."""
    order: list[str] = []

    def build(name: str) -> str:
        if name == "b":
            raise ValueError("not today")
        return name

    built, failures = each_that_runs(["a", "b", "c"], build)
    assert list(built) == ["a", "c"] and failures == {"b": "ValueError: not today"}
    found = take_turns({name: lambda name=name: order.append(name) or len(order) for name in built}, rounds=4)
    assert [len(each) for each in found.values()] == [4, 4]
    rounds = [order[i : i + 2] for i in range(0, 8, 2)]
    assert all(sorted(each) == ["a", "c"] for each in rounds) and len({tuple(each) for each in rounds}) == 2
    assert take_turns({}, rounds=3) == {}


def test_host_cost_is_what_a_unit_adds_to_the_plain_step() -> None:
    seconds = {
        "unsharded": {"forward_backward": [1.0, 2.0], "step": [2.0, 3.0]},
        "fsdp2": {"forward_backward": [5.0, 6.0], "step": [10.0, 11.0]},
        "fullshard": {"forward_backward": [3.0, 3.0], "step": [4.0, 7.0]},
    }
    costs = host_cost.host_costs(seconds, "forward_backward", 4)
    assert costs == {"fsdp2": [1.0, 1.0], "fullshard": [0.5, 0.25]}
    ours = host_cost.summarise(seconds, 4)["fullshard"]["step"]
    assert ours["host_seconds_per_unit"]["median"] == 0.75
    assert ours["host_cost_ratio_to_fsdp2"]["median"] == 0.375


def test_host_cost_of_a_wrapper_is_measured_by_fsdp1_with_the_same_flag() -> None:
    """And by FSDP2 as everyone; the verdict is of forward and backward."""
    times = {"unsharded": 1.0, "fsdp1": 3.0, "fsdp1-flat": 5.0, "fullshard-wrapper": 2.2, FLAT: 2.0, "fsdp2": 11.0}
    seconds = {name: {"forward_backward": [time], "step": [time]} for name, time in times.items()}
    summary = host_cost.summarise(seconds, 2)
    assert summary[FLAT]["step"]["host_cost_ratio_to_fsdp1"]["median"] == 0.25
    assert summary[FLAT]["step"]["host_cost_ratio_to_fsdp2"]["median"] == 0.1
    assert "host_cost_ratio_to_fsdp1" not in summary["fsdp1-flat"]["step"]
    assert host_cost.verdicts(summary) == [
        "fullshard-wrapper: 0.60 of at most 0.50 of FSDP1's (missed)",
        "fullshard-wrapper-flat: 0.25 of at most 0.50 of FSDP1's",
    ]
    assert not host_cost.verdicts(host_cost.summarise({"unsharded": seconds["unsharded"]}, 2))


def test_ratios_of_the_time_to_wrap() -> None:
    """Paired per round, with FSDP1 of the same flag."""

    def figures(*seconds: float) -> dict[str, list[float]]:
        return {figure: list(seconds) for figure in wrap_time.FIGURES}

    summary = wrap_time.summarise({"fsdp1-flat": figures(2.0, 4.0), FLAT: figures(1.0, 3.0)}, units=10)
    assert summary[FLAT]["constructor"]["ratio_to_fsdp1"]["median"] == 0.625
    assert summary[FLAT]["constructor"]["median_seconds_per_unit"] == 0.2
    assert "ratio_to_fsdp1" not in summary["fsdp1-flat"]["both"]
    assert wrap_time.verdicts(summary) == ["constructor, fullshard-wrapper-flat: 0.62 of at most 0.50 (missed)"]
    assert "| fsdp1 | cannot run | - |" in wrap_time.table(summary, {"fsdp1": "no reason"})


def test_targets_of_optimizers_are_judged_by_ratios_within_rounds() -> None:
    """Of medians over rounds; a target whose contestants did not run is left out."""
    seconds = {
        "plain foreach": [1.0, 10.0, 2.0],
        "flat foreach": [0.3, 3.0, 0.2],
        "fsdp2 foreach": [8.0, 80.0, 16.0],
    }
    verdicts = {verdict["target"]: verdict for verdict in optimizer_cost.judge(seconds)}
    assert list(verdicts) == ["flat foreach / fsdp2 foreach", "flat foreach / plain foreach"]
    assert verdicts["flat foreach / plain foreach"]["median"] == pytest.approx(0.3)
    assert not verdicts["flat foreach / plain foreach"]["met"]
    assert verdicts["flat foreach / fsdp2 foreach"]["met"]
    text = optimizer_cost.verdict_table(list(verdicts.values()))
    assert text.count("(missed)") == 1 and "| flat foreach / plain foreach | 0.20 | 0.30 (" in text
    summary = optimizer_cost.summarise(seconds, 100)
    assert summary["flat foreach"]["seconds_per_parameter"]["median"] == pytest.approx(0.003)
    assert summary["flat foreach"]["ratio_to_fsdp2"]["median"] == pytest.approx(0.0375)
    assert "| fsdp2 fused | cannot run |" in optimizer_cost.table(summary, {"fsdp2 fused": "no"})
