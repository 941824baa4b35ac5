"""What is concluded from records of training made by hand, and what processes are started with."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.command_line import DOCUMENT, RESULTS, UsageError
from bench.contestants import (
    CONTESTANTS,
    FAIRSCALE,
    KEEP_FREED_MEMORY,
    PREFETCHES,
    WRAPPING,
    distribute,
    prepare,
    process_environment,
    start_fake_group,
)
from bench.environment import current_environment
from bench.models import GPT, Block, GPTShape, TinyUnit, batch_of, tiny_units
from bench.training import accelerate_step, modes, page_faults, step, trainer, wrapper
from bench.training.contest import Record, Settings, TrainingOptions, disagreements, refuse_what_does_not_fit, summarise
from bench.training.page import (
    Benchmark,
    bars,
    by_fsdp2,
    contestants_of,
    latest_results,
    paragraphs,
    table,
)

from bench import resident_memory

FLAT = "fullshard-wrapper-flat"


def record(seconds: Sequence[float], peak: int | None = 300, sent: int | None = 10, loss: float = 1.0) -> Record:
    memory = {"baseline": None if peak is None else 100, "peak": peak, "resting": 0, "sent_per_step": sent}
    return Record([loss], [[s] for s in seconds], [{**memory, "sent_per_step": None if sent is None else 0}, memory])


def result(benchmark: Benchmark, what: str, records: dict[str, Record], width: int = 512) -> dict[str, Any]:
    settings = Settings.of(benchmark.measurements[what], width, TrainingOptions(blocks=6, tokens=64, rounds=2))
    return {
        "settings": asdict(settings),
        "environment": {**current_environment().as_json(), "commit": "abc"},
        "accelerate": "1.15.0",
        "losses_that_disagree": {},
        "contestants": summarise(records, lambda name: benchmark.references(name, records)),
        "not_run": {},
    }


COMPOSED = {
    "fsdp1": record([1.0, 2.0], peak=250, sent=1000),
    "fsdp2": record([2.0, 4.0], peak=300, sent=1000),
    "fullshard": record([0.5, 1.0], peak=200, sent=500),
}
WRAPPED = {
    "fsdp1-flat": record([2.0, 4.0], peak=300, sent=1000),
    FLAT: record([1.0, 3.0], peak=200, sent=500),
    "fsdp1": record([1.0, 1.0], peak=200),
    "fullshard-wrapper": record([0.9, 0.9], peak=150),
}


# ------------------------------------------------------------------ ratios


def test_ratios_to_fsdp2_and_to_the_better_peer() -> None:
    """Of time within rounds, of memory and of bytes sent; none to a peer that did not run."""
    ours = summarise(COMPOSED, lambda name: by_fsdp2(name, COMPOSED))["fullshard"]
    assert ours["time_ratio_to_fsdp2"]["median"] == 0.25
    assert ours["time_ratio_to_better_peer"]["reference"] == "fsdp1"
    assert ours["time_ratio_to_better_peer"]["median"] == 0.5
    assert "time_ratio_to_better_peer_keeping_memory" not in ours
    assert ours["peak_over_baseline_ratio_to_fsdp2"] == 0.5
    assert ours["peak_ratio_to_fsdp2"] == pytest.approx(2 / 3)
    assert (ours["sent_bytes_per_step"], ours["sent_ratio_to_fsdp2"]) == (500, 0.5)


def test_each_wrapper_is_measured_by_fsdp1_with_the_same_flag() -> None:
    """A peer itself has no ratio, nor has a wrapper whose own peer did not run, although the other one did."""
    summary = summarise(WRAPPED, lambda name: wrapper.by_peer(name, WRAPPED))
    flat, original = summary[FLAT], summary["fullshard-wrapper"]
    assert (flat["time_ratio"]["reference"], flat["time_ratio"]["median"]) == ("fsdp1-flat", 0.625)
    assert (original["time_ratio"]["reference"], original["time_ratio"]["median"]) == ("fsdp1", 0.9)
    assert flat["peak_over_baseline_ratio"] == flat["sent_ratio"] == 0.5 and flat["peak_ratio"] == pytest.approx(2 / 3)
    assert "time_ratio" not in summary["fsdp1"]
    alone = {"fsdp1": WRAPPED["fsdp1"], FLAT: WRAPPED[FLAT]}
    assert "time_ratio" not in summarise(alone, lambda name: wrapper.by_peer(name, alone))[FLAT]
    only = {"step": result(wrapper.BENCHMARK, "step", {FLAT: WRAPPED[FLAT]})}
    assert not any(panel.values for panel in bars(wrapper.BENCHMARK, only))


def test_what_the_kernel_does_not_know_is_left_out() -> None:
    records = {"fsdp2": record([1.0], None, None), "fullshard": record([1.0], None, None)}
    entry = summarise(records, lambda name: by_fsdp2(name, records))["fullshard"]
    assert entry["peak_bytes"] is entry["sent_bytes_per_step"] is entry["sent_ratio_to_fsdp2"] is None
    assert "| - |" in table(step.STEP, {"step": result(step.STEP, "step", records)})


def test_losses_that_disagree_are_named_and_the_unsharded_model_may() -> None:
    """NaN agrees with nothing, not even itself; wrappers are compared with the first of them."""
    losses = {"unsharded": 0.7, "fsdp2": 0.5, "fsdp1": 0.500009, "fullshard": 0.50002, "ddp": float("nan")}
    records = {name: record([1.0], loss=loss) for name, loss in losses.items()}
    assert set(disagreements(records)) == {"fullshard", "ddp"}
    assert set(disagreements(records, tolerance=1e-3)) == {"ddp"}
    assert not disagreements(WRAPPED) and not disagreements({})
    off = {**WRAPPED, "fullshard-wrapper": record([1.0], loss=1.0001)}
    assert set(disagreements(off)) == {"fullshard-wrapper"}
    assert set(disagreements({"fsdp1": record([1.0], loss=float("nan"))})) == {"fsdp1"}


def test_faults_are_compared_with_an_untouched_allocator_of_the_same_system() -> None:
    def counted(faults: list[int], seconds: float, peak: int) -> Record:
        times = {"user_seconds": [seconds] * 2, "system_seconds": [seconds] * 2}
        memory = {"baseline": 100, "peak": peak, "resting": 0, "faults": faults, **times}
        return Record([1.0], [[seconds], [seconds]], [memory, memory])

    records = {"fullshard, untouched": counted([40, 60], 2.0, 300), "fullshard, 32 MiB": counted([4, 4], 1.0, 320)}
    summary = page_faults.summarise(records)
    kept = summary["fullshard, 32 MiB"]
    assert kept["faults"]["median"] == 4 and summary["fullshard, untouched"]["faults"]["median"] == 50
    assert kept["processor_seconds_ratio"]["median"] == 0.5 and kept["peak_ratio"] == pytest.approx(1.1)
    assert "| fullshard, 32 MiB | 4 |" in page_faults.table(summary, {})
    assert page_faults.Setting.parse("16+huge").name == "16 MiB, huge pages"
    with pytest.raises(UsageError, match="expected MiB"):
        page_faults.Setting.parse("many")


# ------------------------------------------------------------------ the page


def test_verdicts_compare_with_the_targets_of_the_width() -> None:
    slow = {"fsdp2": record([1.0], 300), "fullshard": record([0.75], 260)}

    def of_modes(width: int, **records: dict[str, Record]) -> list[str]:
        return list(modes.verdicts({name: result(modes.BENCHMARK, name, r, width) for name, r in records.items()}))

    assert of_modes(512, accumulation=COMPOSED, bf16=slow) == [
        "accumulation: step 0.50 of at most 0.80, peak over baseline 0.50 of at most 0.75",
        "bf16: step 0.75 of at most 0.80, peak over baseline 0.80 of at most 0.75 (missed)",
    ]
    assert "step 0.75 of at most 0.70 (missed)" in of_modes(1024, bf16=slow)[0]
    assert not of_modes(32, bf16=slow) and not of_modes(512, bf16={"fsdp2": slow["fsdp2"]})

    def of_wrapper(what: str, width: int) -> list[str]:
        return list(wrapper.verdicts({what: result(wrapper.BENCHMARK, what, WRAPPED, width)}))

    assert of_wrapper("step", 512) == [
        "step, fullshard-wrapper-flat: 0.62 of at most 0.85",
        "step, fullshard-wrapper: 0.90 of at most 0.85 (missed)",
    ]
    assert "0.62 of at most 0.65" in of_wrapper("step", 1024)[0]
    assert not of_wrapper("step", 32) and not of_wrapper("accumulation", 512)


def test_a_block_says_what_was_measured_on_what() -> None:
    """Rows, shapes, who could not run and why, and one line of provenance per commit."""
    results = {what: result(modes.BENCHMARK, what, COMPOSED) for what in ("bf16", "accumulation")}
    block = "\n\n".join(paragraphs(modes.BENCHMARK, results))
    assert "| bf16, fullshard | 750 | 0.25 (0.25 to 0.25) |" in block and "8 x 64 tokens per rank" in block
    assert block.count("commit abc.") == 1
    results["accumulation"]["environment"]["commit"] = "def"
    results["accumulation"]["not_run"] = {"fsdp1": "no reason"}
    block = "\n\n".join(paragraphs(modes.BENCHMARK, results))
    assert block.count("commit abc.") == block.count("commit def.") == 1
    assert (
        "`accumulation`: `fsdp1` could not run: no reason." in block and "| accumulation, fsdp1 | cannot run |" in block
    )
    through = {"step": result(accelerate_step.BENCHMARK, "step", COMPOSED)}
    assert "accelerate 1.15.0" in "\n".join(paragraphs(accelerate_step.BENCHMARK, through))


def test_bars_are_of_all_but_the_reference() -> None:
    (times, memory) = bars(modes.BENCHMARK, {"bf16": result(modes.BENCHMARK, "bf16", COMPOSED)})
    assert list(times.values) == ["bf16, fsdp1", "bf16, fullshard"]
    assert memory.values["bf16, fullshard"] == 0.5


def test_the_page_takes_the_latest_result_of_every_measurement_but_no_disagreeing_one(tmp_path: Path) -> None:
    """In the order of the measurements, of one width."""
    stored = {name: result(modes.BENCHMARK, name, COMPOSED) for name in ("offload", "bf16", "hsdp")}
    stored["hsdp"]["losses_that_disagree"] = {"fullshard": 1.0}
    for name, content in stored.items():
        (tmp_path / f"modes_{name}_512_machine.json").write_text(json.dumps(content))
    (tmp_path / "modes_bf16_1024_machine.json").write_text("not read")
    assert list(latest_results(modes.BENCHMARK, tmp_path, 512, "machine")) == ["bf16", "offload"]


@pytest.mark.parametrize("width", [512, 1024])
@pytest.mark.parametrize("benchmark", [step.STEP, modes.BENCHMARK, wrapper.BENCHMARK, accelerate_step.BENCHMARK])
def test_published_tables_are_those_of_the_stored_results(benchmark: Benchmark, width: int) -> None:
    """Row by row, although files and page are older than this code."""
    page = DOCUMENT.read_text().partition(f"<!-- bench:{benchmark.name}:{width} -->")[2].partition("<!-- /bench -->")[0]
    rows = {
        line for line in page.splitlines() if line.startswith("| ") and "---" not in line and "final loss" not in line
    }
    machines = {path.stem.partition(f"_{width}_")[2] for path in RESULTS.glob(f"{benchmark.name}*_{width}_*.json")}
    stored = [latest_results(benchmark, RESULTS, width, machine) for machine in machines]
    assert rows and any(rows <= set(table(benchmark, results).splitlines()) for results in stored)


# ------------------------------------------------------------------ who takes part, and how


def test_peers_get_every_setting_of_ours() -> None:
    """Wrappers are compared in the same configuration, and every allocator setting is there for both sides."""
    for contestant in CONTESTANTS.values():
        peer = contestant.peer and CONTESTANTS[contestant.peer]
        assert not peer or peer.prefetch == contestant.prefetch
    for measurement in wrapper.MEASUREMENTS.values():
        able = {*measurement.contestants, *measurement.optional}
        assert able <= set(CONTESTANTS)
        assert all(CONTESTANTS[name].peer in {None, *measurement.contestants, *measurement.optional} for name in able)
    for benchmark in (step.STEP, accelerate_step.BENCHMARK, modes.BENCHMARK):
        assert {"fsdp2", "fsdp2+malloc", "fullshard", "fullshard-malloc"} <= set(benchmark.contestants)


def test_who_takes_part_in_what() -> None:
    """Optional contestants only if asked for, and nobody in a measurement that is not theirs."""

    def names(measurement: Any, *only: str) -> list[str]:
        return [contestant.name for contestant in contestants_of(measurement, only)]

    assert names(modes.MODES["accumulation"]) == ["fsdp1", "fsdp2", "fullshard"]
    assert names(modes.MODES["bf16"], "fsdp1", "fsdp2+malloc") == ["fsdp2+malloc"]
    assert names(wrapper.MEASUREMENTS["step"]) == ["fsdp1-flat", FLAT, "fsdp1", "fullshard-wrapper"]
    assert names(wrapper.MEASUREMENTS["step"], "fsdp1-flat+malloc", FAIRSCALE, "fsdp1-pre") == ["fsdp1-flat+malloc"]
    assert (
        FAIRSCALE in names(wrapper.MEASUREMENTS["accumulation"]) and len(names(wrapper.MEASUREMENTS["prefetch"])) == 6
    )
    with pytest.raises(ValueError, match="fsdp1 takes no part in mode bf16"):
        trainer.sharded(CONTESTANTS["fsdp1"], torch.nn.Linear(2, 2), "bf16")


def test_allocator_settings_of_the_caller_reach_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    monkeypatch.setenv("FULLSHARD_KEEP_FREED_MEMORY", "1")
    environments = {name: process_environment(contestant, threads=1) for name, contestant in CONTESTANTS.items()}
    assert not set(KEEP_FREED_MEMORY) & set(environments["fsdp2"])
    assert "FULLSHARD_KEEP_FREED_MEMORY" not in environments["fullshard"]
    assert environments["fullshard-malloc"]["FULLSHARD_KEEP_FREED_MEMORY"] == "0"
    assert KEEP_FREED_MEMORY.items() <= environments["fsdp2+malloc"].items()
    assert environments[FAIRSCALE]["ENABLE_NCCL_BASE_COLLECTIVES"] == "0"
    assert all(environment["OMP_NUM_THREADS"] == "1" for environment in environments.values())


def test_a_missing_fairscale_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="fairscale is not installed"):
        prepare(FAIRSCALE)


@pytest.mark.parametrize("system", list(WRAPPING))
def test_the_wrapper_of_each_system_is_its_own(system: str) -> None:
    """Each unit is wrapped by the named library with the named flag, and given its own BackwardPrefetch."""
    from torch.distributed.fsdp import FullyShardedDataParallel as Peer

    import fullshard

    start_fake_group(2)
    try:
        expected = Peer if WRAPPING[system].library.startswith("torch") else fullshard.FullyShardedDataParallel
        model = distribute(system, tiny_units(3), TinyUnit, torch.device("cpu"))
        assert sum(isinstance(module, expected) for module in model.modules()) == 4
        flat = len(list(model.parameters())) == 3  # a flat parameter per unit, not four parameters
        assert flat is not WRAPPING[system].use_orig_params
        for name, member in PREFETCHES.items():
            made: Any = trainer.sharded(CONTESTANTS[f"{system}-{name}"], torch.nn.Sequential(Block(64, 1)), "prefetch")
            found = made._options.prefetch if hasattr(made, "_options") else made.backward_prefetch
            assert (None if found is None else found.name) == member
    finally:
        torch.distributed.destroy_process_group()


def test_the_policies_of_a_mode_are_the_systems_own() -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    expected = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert trainer.options_of("bf16", "fsdp2") == {"mp_policy": expected}
    assert trainer.options_of("offload", "fsdp2") == {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    assert trainer.options_of("hsdp", "fsdp2") == {}


def test_more_than_the_free_memory_is_refused_before_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate counts the model's parameters."""
    monkeypatch.setattr(resident_memory, "available", lambda: 2**30)
    settings = Settings.of(step.STEP.measurements["step"], 1024, TrainingOptions())
    with pytest.raises(UsageError, match="GiB are free"):
        refuse_what_does_not_fit(settings, contestants=8)
    shape = GPTShape(width=256, blocks=2, tokens=32)
    estimated = (12 * shape.blocks * shape.width + 2 * shape.vocabulary + shape.sequence) * shape.width
    assert estimated == pytest.approx(sum(p.numel() for p in GPT(shape).parameters()), rel=0.02)


def test_batches_are_equal_for_all_contestants_and_differ_by_rank_and_step() -> None:
    shape = GPTShape(width=64, blocks=1, tokens=1024)
    inputs, targets = batch_of(shape, step=3, rank=1)
    assert inputs.shape == targets.shape == (2, 512)
    assert inputs[:, 1:].equal(targets[:, :-1])
    assert inputs.equal(batch_of(shape, step=3, rank=1)[0])
    assert not inputs.equal(batch_of(shape, step=3, rank=0)[0])
    assert not inputs.equal(batch_of(shape, step=4, rank=1)[0])


@pytest.mark.skipif(sys.platform != "linux", reason="counts of the Linux kernel")
def test_bytes_sent_counts_what_went_out_and_not_what_came_in() -> None:
    def drain(end: socket.socket, count: int) -> None:
        while count:
            count -= len(end.recv(count))

    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    with near, far:
        before = trainer.bytes_sent()
        reader = threading.Thread(target=drain, args=(far, 3_000_000))
        reader.start()
        near.sendall(bytes(3_000_000))
        reader.join()
        after = trainer.bytes_sent()
    assert before is not None and after is not None
    # Both ends are ours, and only one of them sent. The last acknowledgement may still be under way.
    assert 2_000_000 < after - before <= 3_000_000
