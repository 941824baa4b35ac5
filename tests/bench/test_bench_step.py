"""What ``bench.step`` concludes from records, on records made by hand; and what it starts processes with."""

from __future__ import annotations

import pytest
import typer
from bench.contestants import CONTESTANTS, KEEP_FREED_MEMORY, contestant_named
from bench.models import GPT, GPTShape, batch_of

from bench import host_cost, step


def record(losses: list[float], seconds: list[list[float]], peak: int = 300, baseline: int = 100) -> step.Record:
    return step.Record(losses, seconds, [{"baseline": baseline, "peak": peak, "resting": 0}] * 2)


def test_losses_that_differ_are_named_and_the_unsharded_model_may() -> None:
    records = {
        "unsharded": record([1.0, 0.7], [[1.0]]),
        "fsdp2": record([1.0, 0.5], [[1.0]]),
        "fsdp1": record([1.0, 0.500009], [[1.0]]),
        "fullshard": record([1.0, 0.50002], [[1.0]]),
        "ddp": record([1.0, float("nan")], [[1.0]]),
    }
    assert set(step.disagreements(records)) == {"fullshard", "ddp"}


def test_ratios_to_fsdp2_and_to_the_better_peer() -> None:
    records = {
        "fsdp1": record([1.0], [[1.0, 1.0], [3.0]], peak=250),
        "fsdp2": record([1.0], [[2.0, 2.0], [4.0]]),
        "fullshard": record([1.0], [[1.0, 1.0], [2.0]], peak=200),
    }
    ours = step.summarise(records)["fullshard"]
    assert ours["time_ratio_to_fsdp2"]["median"] == 0.5
    assert ours["time_ratio_to_better_peer"]["reference"] == "fsdp1"
    assert ours["time_ratio_to_better_peer"]["median"] == pytest.approx((1 + 2 / 3) / 2)
    assert "time_ratio_to_better_peer_keeping_memory" not in ours
    assert ours["peak_over_baseline_ratio_to_fsdp2"] == 0.5
    assert ours["peak_ratio_to_fsdp2"] == pytest.approx(2 / 3)


def test_memory_unknown_to_the_kernel_is_left_out() -> None:
    unknown = step.Record([1.0], [[1.0]], [{"baseline": None, "peak": None, "resting": None}])
    assert unknown.peak is None and unknown.peak_over_baseline is None
    assert "| - |" in step.table(step.summarise({"fsdp2": unknown}), {})


def test_allocator_settings_of_the_caller_reach_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    monkeypatch.setenv("FULLSHARD_KEEP_FREED_MEMORY", "1")
    environments = {c.name: step._environment_of(c, threads=1) for c in CONTESTANTS}
    assert not set(KEEP_FREED_MEMORY) & set(environments["fsdp2"])
    assert "FULLSHARD_KEEP_FREED_MEMORY" not in environments["fullshard"]
    assert environments["fullshard-malloc"]["FULLSHARD_KEEP_FREED_MEMORY"] == "0"
    for name, value in KEEP_FREED_MEMORY.items():
        assert environments["fsdp2+malloc"][name] == value
    assert all(environment["OMP_NUM_THREADS"] == "1" for environment in environments.values())


def test_more_than_the_free_memory_is_refused_before_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "available_memory", lambda: 2**30)
    settings = step.Settings(1024, 4, 64, ranks=2, threads=1, warmup_steps=1, rounds=1, steps_per_round=1)
    with pytest.raises(typer.BadParameter, match="GiB are free"):
        step.refuse_too_much_memory(settings, contestants=8)


def test_the_memory_estimate_counts_the_models_parameters() -> None:
    shape = GPTShape(width=256, blocks=2, tokens=32)
    counted = sum(p.numel() for p in GPT(shape).parameters())
    estimated = (12 * shape.blocks * shape.width + 2 * shape.vocabulary + shape.sequence) * shape.width
    assert estimated == pytest.approx(counted, rel=0.02)


def test_batches_are_equal_for_all_contestants_and_differ_by_rank_and_step() -> None:
    shape = GPTShape(width=64, blocks=1, tokens=1024)
    inputs, targets = batch_of(shape, step=3, rank=1)
    assert inputs.shape == targets.shape == (2, 512)
    assert inputs[:, 1:].equal(targets[:, :-1])
    assert inputs.equal(batch_of(shape, step=3, rank=1)[0])
    assert not inputs.equal(batch_of(shape, step=3, rank=0)[0])
    assert not inputs.equal(batch_of(shape, step=4, rank=1)[0])


def test_an_unknown_contestant_is_named() -> None:
    with pytest.raises(ValueError, match="fsdp3"):
        contestant_named("fsdp3")


def test_host_cost_is_what_a_unit_adds_to_the_plain_step() -> None:
    seconds = {
        "unsharded": {"forward_backward": [1.0, 2.0], "step": [2.0, 3.0]},
        "fsdp2": {"forward_backward": [5.0, 6.0], "step": [10.0, 11.0]},
        "fullshard": {"forward_backward": [3.0, 3.0], "step": [4.0, 7.0]},
    }
    assert host_cost.host_costs(seconds, "forward_backward", 4) == {
        "fsdp2": [1.0, 1.0],
        "fullshard": [0.5, 0.25],
    }
    ours = host_cost.summarise(seconds, 4)["fullshard"]["step"]
    assert ours["host_seconds_per_unit"]["median"] == 0.75
    assert ours["host_cost_ratio_to_fsdp2"]["median"] == 0.375
