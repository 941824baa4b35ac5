"""What ``bench.modes`` concludes from records made by hand, what it starts, and a tiny run of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.comparison import Record, disagreements
from bench.environment import REPOSITORY, current_environment

from bench import modes, modes_worker


def run_modes(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench.modes", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def record(seconds: Sequence[float], peak: int, sent: int | None, loss: float = 1.0) -> Record:
    memory = {"baseline": 100, "peak": peak, "resting": 0, "sent_per_step": sent}
    return Record([loss], [[s] for s in seconds], [{**memory, "sent_per_step": None if sent is None else 0}, memory])


def result(mode: str, records: dict[str, Record], width: int = 512, commit: str = "abc") -> dict[str, Any]:
    settings = modes.ModeSettings(
        mode=mode,
        width=width,
        blocks=6,
        tokens=64,
        microbatches=modes.MODES[mode].microbatches,
        ranks=modes.MODES[mode].ranks,
        threads=1,
        warmup_steps=1,
        rounds=2,
        steps_per_round=1,
    )
    return {
        "settings": {name: getattr(settings, name) for name in settings.__dataclass_fields__},
        "environment": {**current_environment().as_json(), "commit": commit},
        "losses_that_disagree": {},
        "contestants": modes.summarise_mode(records),
        "not_run": {},
    }


ACCUMULATED = {
    "fsdp1": record([1.0, 2.0], peak=250, sent=1000),
    "fsdp2": record([2.0, 4.0], peak=300, sent=1000),
    "fullshard": record([0.5, 1.0], peak=200, sent=500),
}


def test_ratios_of_time_memory_and_bytes_sent() -> None:
    ours = modes.summarise_mode(ACCUMULATED)["fullshard"]
    assert ours["time_ratio_to_fsdp2"]["median"] == 0.25
    assert ours["time_ratio_to_better_peer"]["reference"] == "fsdp1"
    assert ours["time_ratio_to_better_peer"]["median"] == 0.5
    assert ours["peak_over_baseline_ratio_to_fsdp2"] == 0.5
    assert (ours["sent_bytes_per_step"], ours["sent_ratio_to_fsdp2"]) == (500, 0.5)


def test_bytes_unknown_to_the_kernel_are_left_out() -> None:
    summary = modes.summarise_mode({"fsdp2": record([1.0], 200, None), "fullshard": record([1.0], 200, None)})
    assert summary["fullshard"]["sent_bytes_per_step"] is None
    assert summary["fullshard"]["sent_ratio_to_fsdp2"] is None


def test_losses_of_a_mode_that_disagree_are_named() -> None:
    records = {"fsdp2": record([1.0], 200, 1), "fullshard": record([1.0], 200, 1, loss=1.0001)}
    assert set(disagreements(records)) == {"fullshard"}
    assert not disagreements(records, tolerance=1e-3)
    records["fullshard"].losses = [float("nan")]
    assert set(disagreements(records, tolerance=1e-3)) == {"fullshard"}


def test_verdicts_compare_with_the_target_of_the_width() -> None:
    slow = {"fsdp2": record([1.0], 300, 1), "fullshard": record([0.75], 260, 1)}
    results = [result("accumulation", ACCUMULATED), result("bf16", slow)]
    assert list(modes.verdicts(results)) == [
        "accumulation: step 0.50 of at most 0.80, peak over baseline 0.50 of at most 0.75",
        "bf16: step 0.75 of at most 0.80, peak over baseline 0.80 of at most 0.75 (missed)",
    ]
    assert "step 0.75 of at most 0.70 (missed)" in next(modes.verdicts([result("bf16", slow, width=1024)]))
    assert not list(modes.verdicts([result("bf16", slow, width=32)]))  # no targets for this width
    assert not list(modes.verdicts([result("bf16", {"fsdp2": slow["fsdp2"]})]))


def test_a_block_says_which_rows_were_measured_on_what(tmp_path: Path) -> None:
    results = [result("bf16", ACCUMULATED), result("accumulation", ACCUMULATED)]
    block = modes.document_block(results, None, tmp_path / "page.md")
    assert "| bf16, fullshard | 750 | 0.25 (0.25 to 0.25) |" in block
    assert "8 x 64 tokens per rank" in block
    assert block.count("commit abc.") == 1
    results[1]["environment"]["commit"] = "def"
    results[1]["not_run"] = {"fsdp1": "no reason"}
    block = modes.document_block(results, tmp_path / "a.png", tmp_path / "page.md")
    assert block.count("commit abc.") == block.count("commit def.") == 1
    assert "`accumulation`: `fsdp1` could not run: no reason." in block
    assert block.endswith("(a.png)")


def test_the_page_takes_the_latest_result_of_every_mode_but_no_disagreeing_one(tmp_path: Path) -> None:
    stored = {name: result(name, ACCUMULATED) for name in ("offload", "bf16", "hsdp")}
    stored["hsdp"]["losses_that_disagree"] = {"fullshard": 1.0}
    for name, content in stored.items():
        (tmp_path / f"modes_{name}_512_machine.json").write_text(json.dumps(content))
    (tmp_path / "modes_bf16_1024_machine.json").write_text("not read")
    found = modes.latest_results(tmp_path, 512, "machine")
    assert [each["settings"]["mode"] for each in found] == ["bf16", "offload"]


def test_fsdp1_takes_part_in_accumulation_only() -> None:
    def names(mode: str, only: list[str] | None) -> list[str]:
        return [c.name for c in modes.contestants_of(modes.MODES[mode], only)]

    assert names("accumulation", None) == ["fsdp1", "fsdp2", "fullshard"]
    assert names("bf16", None) == ["fsdp2", "fullshard"]
    assert names("bf16", ["fsdp1", "fsdp2+malloc", "ddp"]) == ["fsdp2+malloc"]
    with pytest.raises(ValueError, match="fsdp3"):
        names("bf16", ["fsdp3"])
    with pytest.raises(ValueError, match="fsdp1 takes no part in mode bf16"):
        modes_worker.shard("fsdp1", torch.nn.Linear(2, 2), "bf16")


def test_the_policies_of_a_mode_are_the_systems_own() -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    expected = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert modes_worker.options_of("bf16", "fsdp2") == {"mp_policy": expected}
    assert modes_worker.options_of("offload", "fsdp2") == {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    for mode in ("hsdp", "accumulation"):
        assert modes_worker.options_of(mode, "fsdp2") == {}


@pytest.mark.skipif(sys.platform != "linux", reason="counts of the Linux kernel")
def test_bytes_sent_counts_what_went_out_and_not_what_came_in() -> None:
    def drain(end: socket.socket, count: int) -> None:
        while count:
            count -= len(end.recv(count))

    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    with near, far:
        before = modes_worker.bytes_sent()
        reader = threading.Thread(target=drain, args=(far, 3_000_000))
        reader.start()
        near.sendall(bytes(3_000_000))
        reader.join()
        after = modes_worker.bytes_sent()
    assert before is not None and after is not None
    # Both ends are ours, and only one of them sent. The last acknowledgement may still be under way.
    assert 2_000_000 < after - before <= 3_000_000


def test_help() -> None:
    answer = run_modes("--help")
    assert answer.returncode == 0, answer.stderr
    for option in ("--mode", "--rounds", "--only", "--write-document"):
        assert option in answer.stdout


@pytest.mark.parametrize(("option", "name"), [("--only", "fsdp3"), ("--mode", "fp4")])
def test_an_unknown_name_is_refused(option: str, name: str) -> None:
    answer = run_modes(option, name)
    assert answer.returncode == 2
    assert name in answer.stderr and "known are" in answer.stderr


def test_every_mode_runs_with_its_peers(tmp_path: Path) -> None:
    answer = run_modes(
        *("--width", "32", "--blocks", "1", "--tokens", "16", "--microbatches", "2", "--rounds", "1"),
        *("--steps-per-round", "1", "--warmup-steps", "1", "--only", "fsdp1", "--only", "fsdp2"),
        *("--results", str(tmp_path), "--document", str(tmp_path / "page.md"), "--write-document"),
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    sent = {}
    for mode in modes.MODES:
        (path,) = tmp_path.glob(f"modes_{mode}_32_*.json")
        stored = json.loads(path.read_text())
        expected = ["fsdp1", "fsdp2"] if mode == "accumulation" else ["fsdp2"]
        assert list(stored["contestants"]) == expected
        assert stored["not_run"] == {} and stored["losses_that_disagree"] == {}
        assert str(tmp_path) not in path.read_text()
        entry = stored["contestants"]["fsdp2"]
        assert len(entry["memory_by_rank"]) == modes.MODES[mode].ranks
        assert len(entry["losses"]) == 2 and len(entry["seconds"]) == 1
        sent[mode] = entry["sent_bytes_per_step"]
    if sys.platform == "linux":
        assert 0 < sent["bf16"] < sent["offload"]  # two microbatches each, but gathers of half the bytes
        assert sent["accumulation"] > 0
    page = (tmp_path / "page.md").read_text()
    assert "<!-- bench:modes:32 -->\nGPT of width 32" in page
    for mode in modes.MODES:
        assert f"| {mode}, fsdp2 |" in page
