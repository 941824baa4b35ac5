"""What is concluded from records of training made by hand, what processes are started with, and small runs."""

from __future__ import annotations

import dataclasses
import json
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.command_line import DOCUMENT, RESULTS, UsageError
from bench.contestants import (
    CONTESTANTS,
    KEEP_FREED_MEMORY,
    PREFETCHES,
    WRAPPING,
    Contestant,
    distribute,
    options_of,
    process_environment,
    start_fake_group,
)
from bench.environment import REPOSITORY, current_environment
from bench.models import GPT, Block, GPTShape, TinyUnit, batch_of, tiny_units
from bench.teams import Launch, ask_alone
from bench.training import accelerate_step, modes, page_faults, step, trainer, wrapper
from bench.training.contest import (
    Measurement,
    Record,
    Settings,
    TrainingOptions,
    by_fsdp2,
    by_peer,
    disagreements,
    refuse_what_does_not_fit,
    summarise,
)
from bench.training.page import Benchmark, latest_results, paragraphs, table
from small_runs import run_small

from bench import resident_memory

FLAT = "fullshard-wrapper-flat"
SMALLEST = "--width 32 --blocks 1 --tokens 16 --rounds 2 --steps-per-round 1 --warmup-steps 1"
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="counts of the Linux kernel")


def record(seconds: Sequence[float], peak: int | None = 300, sent: int | None = 10, loss: float = 1.0) -> Record:
    memory = {"baseline": None if peak is None else 100, "peak": peak, "resting": 0, "sent_per_step": sent}
    used = [{"faults": 10 * s, "user_seconds": s, "system_seconds": s} for s in seconds]
    idle = {**memory, "sent_per_step": None if sent is None else 0}
    return Record([loss], [[s] for s in seconds], [idle, memory], used)


def summary(records: dict[str, Record], references: Any = by_fsdp2) -> dict[str, dict[str, Any]]:
    return summarise(records, {name: references(CONTESTANTS[name], records) for name in records})


def result(benchmark: Benchmark, what: str, records: dict[str, Record], width: int = 512) -> dict[str, Any]:
    settings = Settings.of(benchmark.by_name[what], width, TrainingOptions(blocks=6, tokens=64, rounds=2))
    return {
        "settings": asdict(settings),
        "environment": {**current_environment().as_json(), "commit": "abc"},
        "losses_that_disagree": {},
        "contestants": summary(records, benchmark.references),
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
    """Of time within rounds, of memory, of bytes sent and processor time; none to a peer that did not run."""
    ours = summary(COMPOSED)["fullshard"]
    assert ours["time_ratio_to_fsdp2"]["median"] == ours["processor_ratio_to_fsdp2"]["median"] == 0.25
    assert ours["time_ratio_to_better_peer"]["reference"] == "fsdp1"
    assert ours["time_ratio_to_better_peer"]["median"] == 0.5
    assert "time_ratio_to_better_peer_keeping_memory" not in ours
    assert ours["peak_over_baseline_ratio_to_fsdp2"] == 0.5
    assert ours["peak_ratio_to_fsdp2"] == pytest.approx(2 / 3)
    assert (ours["sent_bytes_per_step"], ours["sent_ratio_to_fsdp2"]) == (500, 0.5)
    assert (ours["faults"]["median"], ours["processor_seconds"]["median"]) == (7.5, 1.5)


def test_each_wrapper_is_measured_by_fsdp1_with_the_same_flag() -> None:
    """A peer itself has no ratio, nor has a wrapper whose own peer did not run, although the other one did."""
    found = summary(WRAPPED, by_peer)
    flat, original = found[FLAT], found["fullshard-wrapper"]
    assert (flat["time_ratio"]["reference"], flat["time_ratio"]["median"]) == ("fsdp1-flat", 0.625)
    assert (original["time_ratio"]["reference"], original["time_ratio"]["median"]) == ("fsdp1", 0.9)
    assert flat["peak_over_baseline_ratio"] == flat["sent_ratio"] == 0.5 and "time_ratio" not in found["fsdp1"]
    assert "time_ratio" not in summary({"fsdp1": WRAPPED["fsdp1"], FLAT: WRAPPED[FLAT]}, by_peer)[FLAT]


def test_what_the_kernel_does_not_know_is_left_out() -> None:
    """Memory and bytes sent are dashes where there are no such counts."""
    records = {"fsdp2": record([1.0], None, None), "fullshard": record([1.0], None, None)}
    entry = summary(records)["fullshard"]
    assert entry["peak_bytes"] is entry["sent_bytes_per_step"] is entry["sent_ratio_to_fsdp2"] is None
    assert "| - |" in table(step.STEP, {"step": result(step.STEP, "step", records)})


def test_losses_that_disagree_are_named_and_the_unsharded_model_may() -> None:
    """NaN agrees with nothing, not even itself; wrappers are compared with the first of them."""
    losses = {"unsharded": 0.7, "fsdp2": 0.5, "fsdp1": 0.500009, "fullshard": 0.50002, "ddp": float("nan")}
    records = {name: record([1.0], loss=loss) for name, loss in losses.items()}
    assert set(disagreements(records)) == {"fullshard", "ddp"}
    assert not disagreements(WRAPPED) and not disagreements({})
    off = {**WRAPPED, "fullshard-wrapper": record([1.0], loss=1.0001)}
    assert set(disagreements(off)) == {"fullshard-wrapper"}
    assert set(disagreements({"fsdp1": record([1.0], loss=float("nan"))})) == {"fsdp1"}


# ------------------------------------------------------------------ the page


def test_verdicts_compare_with_the_targets_of_the_width() -> None:
    """Of the better peer's step, and of FSDP2's memory; of FSDP1's step; none at other widths."""

    def of_modes(width: int) -> list[str]:
        return list(modes.verdicts({"bf16": result(modes.BENCHMARK, "bf16", COMPOSED, width)}))

    assert of_modes(512) == ["bf16: step 0.50 of at most 0.80, peak over baseline 0.50 of at most 0.75"]
    assert not of_modes(32)
    assert list(wrapper.verdicts({"step": result(wrapper.BENCHMARK, "step", WRAPPED)})) == [
        "step, fullshard-wrapper-flat: 0.62 of at most 0.85",
        "step, fullshard-wrapper: 0.90 of at most 0.85 (missed)",
    ]


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
    assert "`fsdp1` could not run: no reason." in block and "| accumulation, fsdp1 | cannot run |" in block


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
    for measurement in wrapper.MEASUREMENTS:
        able = {*measurement.contestants, *measurement.optional}
        assert able <= set(CONTESTANTS)
        assert all(CONTESTANTS[name].peer in {None, *able} for name in able)
    for benchmark in (step.STEP, accelerate_step.BENCHMARK, modes.BENCHMARK):
        assert {"fsdp2", "fsdp2+malloc", "fullshard", "fullshard-malloc"} <= set(benchmark.contestants)
    for measurement in page_faults.BENCHMARK.measurements:
        untouched, *others = measurement.chosen()
        assert untouched.environment == {"FULLSHARD_KEEP_FREED_MEMORY": "0"} and not untouched.kept
        assert all(other.peer == untouched.name and other.kept for other in others)


def test_who_takes_part_in_what() -> None:
    """Optional contestants only if asked for, and nobody in a measurement that is not theirs."""

    def names(measurement: Measurement, *only: str) -> list[str]:
        return [contestant.name for contestant in measurement.chosen(only)]

    assert names(modes.BENCHMARK.by_name["accumulation"]) == ["fsdp1", "fsdp2", "fullshard"]
    assert names(modes.BENCHMARK.by_name["bf16"], "fsdp1", "fsdp2+malloc") == ["fsdp2+malloc"]
    assert names(wrapper.BENCHMARK.by_name["step"], "fsdp1-flat+malloc", "fsdp1-pre") == ["fsdp1-flat+malloc"]
    assert len(names(wrapper.BENCHMARK.by_name["prefetch"])) == 6


def test_allocator_settings_of_the_caller_reach_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each contestant has those that its name says."""
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    monkeypatch.setenv("FULLSHARD_KEEP_FREED_MEMORY", "1")
    environments = {name: process_environment(contestant, threads=1) for name, contestant in CONTESTANTS.items()}
    assert not set(KEEP_FREED_MEMORY) & set(environments["fsdp2"])
    assert "FULLSHARD_KEEP_FREED_MEMORY" not in environments["fullshard"]
    assert environments["fullshard-malloc"]["FULLSHARD_KEEP_FREED_MEMORY"] == "0"
    assert KEEP_FREED_MEMORY.items() <= environments["fsdp2+malloc"].items()
    assert all(environment["OMP_NUM_THREADS"] == "1" for environment in environments.values())


@pytest.mark.parametrize("system", list(WRAPPING))
def test_the_wrapper_of_each_system_is_its_own(system: str) -> None:
    """Each unit is wrapped by the named library with the named flag, and given its own BackwardPrefetch."""
    from torch.distributed.fsdp import FullyShardedDataParallel as Peer

    import fullshard

    start_fake_group(2)
    expected = Peer if WRAPPING[system].library.startswith("torch") else fullshard.FullyShardedDataParallel
    model = distribute(system, tiny_units(3), TinyUnit, torch.device("cpu"))
    assert sum(isinstance(module, expected) for module in model.modules()) == 4
    flat = len(list(model.parameters())) == 3  # a flat parameter per unit, not four parameters
    assert flat is not WRAPPING[system].use_orig_params
    for name, member in PREFETCHES.items():
        block = torch.nn.Sequential(Block(64, 1))
        made: Any = distribute(system, block, Block, torch.device("cpu"), prefetch=name)
        found = made._options.prefetch if hasattr(made, "_options") else made.backward_prefetch
        assert (None if found is None else found.name) == member


def test_the_policies_of_a_mode_are_the_systems_own() -> None:
    """The same values for all, of each library's own types."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy

    expected = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert options_of("fsdp2", "bf16") == {"mp_policy": expected}
    assert options_of("fsdp2", "offload") == {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    assert options_of("fsdp1", "bf16") == {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)}
    assert options_of("fsdp2", "hsdp") == {}
    with pytest.raises(ValueError, match="fsdp1 takes no part in mode hsdp"):
        options_of("fsdp1", "hsdp")


def test_more_than_the_free_memory_is_refused_before_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate counts the model's parameters, exactly."""
    monkeypatch.setattr(resident_memory, "available", lambda: 2**30)
    settings = Settings.of(step.STEP.measurements[0], 1024, TrainingOptions())
    with pytest.raises(UsageError, match="GiB are free"):
        refuse_what_does_not_fit(settings, contestants=8)
    shape = GPTShape(width=256, blocks=2, tokens=32)
    assert shape.parameters == sum(p.numel() for p in GPT(shape).parameters())


def test_batches_are_equal_for_all_contestants_and_differ_by_rank_and_step() -> None:
    """Targets are the next tokens."""
    shape = GPTShape(width=64, blocks=1, tokens=1024)
    inputs, targets = batch_of(shape, step=3, rank=1)
    assert inputs.shape == targets.shape == (2, 512) and inputs[:, 1:].equal(targets[:, :-1])
    assert inputs.equal(batch_of(shape, step=3, rank=1)[0])
    assert not inputs.equal(batch_of(shape, step=3, rank=0)[0])
    assert not inputs.equal(batch_of(shape, step=4, rank=1)[0])


@LINUX
def test_bytes_sent_counts_what_went_out_and_not_what_came_in() -> None:
    """Of all connections, as the kernel counts it."""

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


# ------------------------------------------------------------------ processes and small runs


def test_a_process_that_fails_or_hangs_is_ended(tmp_path: Path) -> None:
    """With all that it has started; why is said in a line."""
    (tmp_path / "ends.py").write_text("def build(**_): raise ValueError('out of luck\\nindeed')")
    child = f"open(r'{tmp_path / 'child'}', 'w').write(str(subprocess.Popen(['sleep', '600']).pid))"
    (tmp_path / "hangs.py").write_text(f"import subprocess, time\ndef build(**_):\n    {child}\n    time.sleep(600)")
    paths = {"PYTHONPATH": f"{tmp_path}:{REPOSITORY / 'src'}"}
    alone = Launch.alone(Contestant("x", "x", paths), "ends")
    assert ask_alone(alone, 60, "anything") == {"failure": "ValueError: out of luck"}
    hanging = dataclasses.replace(alone, worker="hangs")
    limit, deadline = 2.0, time.monotonic() + 60
    while not (tmp_path / "child").exists() and time.monotonic() < deadline:
        assert ask_alone(hanging, limit, "anything") == {"failure": f"no answer within {limit:.0f} s"}
        limit *= 2  # on a machine so busy that it did not even start
    process = Path("/proc") / (tmp_path / "child").read_text()
    while process.exists() and "zombie" not in (process / "status").read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not process.exists() or "zombie" in (process / "status").read_text()


def test_modes(tmp_path: Path) -> None:
    """Two contestants of two ranks train the same in turns, in bf16; figures, plot and page."""
    page, stored = run_small(tmp_path, "modes", f"{SMALLEST} --microbatches 2 --what bf16")
    assert list(stored["contestants"]) == ["fsdp2", "fullshard"]
    assert stored["not_run"] == {} and stored["losses_that_disagree"] == {}
    entry = stored["contestants"]["fullshard"]
    assert len(entry["losses"]) == 3 and len(entry["seconds"]) == 2 and len(entry["memory_by_rank"]) == 2
    assert entry["time_ratio_to_fsdp2"]["reference"] == "fsdp2" and entry["time_ratio_to_fsdp2"]["median"] > 0
    assert stored["contestants"]["fsdp2"]["time_ratio_to_fsdp2"]["median"] == 1.0
    if sys.platform == "linux":
        assert 0 < entry["peak_over_baseline_bytes"] < entry["peak_bytes"]
        assert 0 < entry["sent_bytes_per_step"] < 2 * stored["contestants"]["fsdp2"]["sent_bytes_per_step"]
    assert "| bf16, fullshard |" in page and "<!-- bench:modes:32 -->\nGPT of width 32" in page
    assert list(tmp_path.glob("modes_32_*.png"))


@pytest.mark.parametrize(
    ("benchmark", "what", "names"),
    [
        (step.STEP, "step", ("fsdp1", "ddp", "unsharded")),
        (wrapper.BENCHMARK, "summon_writeback", ("fsdp1-flat", FLAT)),
        (wrapper.BENCHMARK, "accumulation", ("fsdp1", "fullshard-wrapper")),
        (page_faults.BENCHMARK, FLAT, ("untouched", "32 MiB")),
    ],
)
def test_contestants_train_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, benchmark: Benchmark, what: str, names: tuple[str, ...]
) -> None:
    """Each in this process, on a group of one rank: the same losses, whatever is measured of them."""
    kept: list[int] = []
    monkeypatch.setattr("fullshard.allocator.keep_freed_memory", lambda nbytes: kept.append(nbytes) or True)
    measurement, options = benchmark.by_name[what], TrainingOptions(blocks=1, tokens=16)
    given = Settings.of(measurement, 32, options).assignment
    found = []
    for contestant in measurement.chosen(names):
        store = str(tmp_path / contestant.name)
        told = {"rank": 0, "ranks": 1, "threads": 1, "store": store, "contestant": asdict(contestant)}
        try:
            rank = trainer.build(**told, **given)
            found.append([*rank.run(1)["losses"], *rank.run(2)["losses"]])
            assert rank.memory()["resting"] is not None or sys.platform != "linux"
        finally:
            torch.distributed.destroy_process_group()
    assert all(losses == pytest.approx(found[0], abs=1e-5) for losses in found) and len(found) == len(names)
    assert kept == ([32 << 20] if benchmark is page_faults.BENCHMARK else [])


def test_accelerate_step(tmp_path: Path) -> None:
    """Where accelerate is installed."""
    pytest.importorskip("accelerate")
    page, stored = run_small(tmp_path, "accelerate_step", f"{SMALLEST} --only fsdp2 --only fullshard")
    assert list(stored["contestants"]) == ["fsdp2", "fullshard"] and not stored["not_run"]
    assert stored["contestants"]["fullshard"]["time_ratio_to_fsdp2"]["median"] > 0
    assert "<!-- bench:accelerate_step:32 -->\nGPT of width 32" in page and "accelerate " in page
