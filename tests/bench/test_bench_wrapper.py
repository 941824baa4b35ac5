"""What ``bench.wrapper`` and ``bench.wrap_time`` conclude from records made by hand, and tiny runs of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.comparison import Record
from bench.contestants import FAIRSCALE, WRAPPING, distribute, prepare, process_environment
from bench.environment import REPOSITORY, current_environment
from bench.models import TinyUnit, tiny_units

from bench import contestants, host_cost, wrap_time, wrapper, wrapper_worker

FLAT = "fullshard-wrapper-flat"


def run_bench(module: str, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"bench.{module}", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def record(seconds: Sequence[float], peak: int, sent: int | None = 10, loss: float = 1.0) -> Record:
    memory = {"baseline": 100, "peak": peak, "resting": 0, "sent_per_step": sent}
    return Record([loss], [[s] for s in seconds], [{**memory, "sent_per_step": None if sent is None else 0}, memory])


def result(what: str, records: dict[str, Record], width: int = 512, commit: str = "abc") -> dict[str, Any]:
    settings = wrapper.WrapperSettings(
        what=what,
        width=width,
        blocks=6,
        tokens=64,
        microbatches=wrapper.MEASUREMENTS[what].microbatches,
        ranks=2,
        threads=1,
        warmup_steps=1,
        rounds=2,
        steps_per_round=1,
    )
    return {
        "settings": {name: getattr(settings, name) for name in settings.__dataclass_fields__},
        "environment": {**current_environment().as_json(), "commit": commit},
        "losses_that_disagree": {},
        "contestants": wrapper.summarise(records),
        "not_run": {},
    }


RECORDS = {
    "fsdp1-flat": record([2.0, 4.0], peak=300, sent=1000),
    FLAT: record([1.0, 3.0], peak=200, sent=500),
    "fsdp1": record([1.0, 1.0], peak=200),
    "fullshard-wrapper": record([0.9, 0.9], peak=150),
}


def test_each_wrapper_is_measured_by_fsdp1_with_the_same_flag() -> None:
    """Ratios are paired per round with the peer of the same flag; a peer itself has none."""
    summary = wrapper.summarise(RECORDS)
    flat, original = summary[FLAT], summary["fullshard-wrapper"]
    assert (flat["peer"], original["peer"]) == ("fsdp1-flat", "fsdp1")
    assert flat["time_ratio"]["median"] == 0.625
    assert original["time_ratio"]["median"] == 0.9
    assert flat["peak_over_baseline_ratio"] == 0.5
    assert flat["peak_ratio"] == pytest.approx(2 / 3)
    assert flat["sent_ratio"] == 0.5
    assert summary["fsdp1"]["peer"] is None and "time_ratio" not in summary["fsdp1"]


def test_no_ratio_to_a_peer_that_did_not_run() -> None:
    """Without FSDP1 of the same flag there is none, although the other one ran."""
    summary = wrapper.summarise({"fsdp1": RECORDS["fsdp1"], FLAT: RECORDS[FLAT]})
    assert summary[FLAT]["peer"] is None and "time_ratio" not in summary[FLAT]
    assert not wrapper.plot(Path("not written"), [result("step", {FLAT: RECORDS[FLAT]})])


def test_peers_of_variants() -> None:
    """Prefetch is compared with the same prefetch, fairscale and other allocators with the flat or original default."""
    peers = {name: contestant.peer for name, contestant in wrapper_worker.WRAPPER_CONTESTANTS.items()}
    assert peers["fullshard-wrapper-flat-none"] == "fsdp1-flat-none"
    assert peers["fullshard-wrapper-post"] == "fsdp1-post"
    assert peers["fsdp1-flat-pre"] is None
    assert peers["fairscale"] == peers["fsdp1-flat+malloc"] == peers["fullshard-wrapper-flat-malloc"] == "fsdp1-flat"
    assert all(peer is None or peer in peers for peer in peers.values())
    for measurement in wrapper.MEASUREMENTS.values():
        assert {*measurement.contestants, *measurement.optional} <= set(peers)
        for name in measurement.contestants:
            assert peers[name] is None or peers[name] in measurement.contestants


def test_losses_that_disagree_are_named() -> None:
    """All train the same, whatever the flag; NaN agrees with nothing, not even itself."""
    assert not wrapper.disagreements(RECORDS) and not wrapper.disagreements({})
    off = {**RECORDS, "fullshard-wrapper": record([1.0, 1.0], 150, loss=1.0001)}
    assert set(wrapper.disagreements(off)) == {"fullshard-wrapper"}
    assert not wrapper.disagreements(off, tolerance=1e-3)
    assert set(wrapper.disagreements({"fsdp1": record([1.0], 150, loss=float("nan"))})) == {"fsdp1"}


def test_verdicts_are_of_the_plain_step_at_widths_with_a_target() -> None:
    """Two ratios, each with its target of the width; nothing for other measurements and widths."""
    results = [result("step", RECORDS), result("accumulation", RECORDS)]
    assert list(wrapper.verdicts(results)) == [
        "step, fullshard-wrapper-flat: 0.62 of at most 0.85",
        "step, fullshard-wrapper: 0.90 of at most 0.85 (missed)",
    ]
    assert "0.62 of at most 0.65" in next(wrapper.verdicts([result("step", RECORDS, width=1024)]))
    assert not list(wrapper.verdicts([result("step", RECORDS, width=32)]))


def test_a_block_says_what_was_measured_on_what(tmp_path: Path) -> None:
    """Rows, shapes, who could not run and why, and one line of provenance per commit."""
    results = [result("step", RECORDS), result("accumulation", RECORDS)]
    block = wrapper.document_block(results, None, tmp_path / "page.md")
    assert "| step, fullshard-wrapper-flat | 2000 | 0.62 (0.56 to 0.69) |" in block
    assert "8 x 64 tokens per rank" in block
    assert block.count("commit abc.") == 1
    results[1]["environment"]["commit"] = "def"
    results[1]["not_run"] = {"fairscale": "fairscale is not installed"}
    block = wrapper.document_block(results, tmp_path / "a.png", tmp_path / "page.md")
    assert block.count("commit abc.") == block.count("commit def.") == 1
    assert "`accumulation`: `fairscale` could not run: fairscale is not installed." in block
    assert "| accumulation, fairscale | cannot run |" in block
    assert block.endswith("(a.png)")


def test_the_page_takes_the_latest_results_but_no_disagreeing_one(tmp_path: Path) -> None:
    """In the order of the measurements, of one width."""
    stored = {name: result(name, RECORDS) for name in ("prefetch", "step", "summon")}
    stored["summon"]["losses_that_disagree"] = {FLAT: 1.0}
    for name, content in stored.items():
        (tmp_path / f"wrapper_{name}_512_machine.json").write_text(json.dumps(content))
    (tmp_path / "wrapper_step_1024_machine.json").write_text("not read")
    found = wrapper.latest_results(tmp_path, 512, "machine")
    assert [each["settings"]["what"] for each in found] == ["step", "prefetch"]


def test_who_takes_part_in_what() -> None:
    """Optional contestants only if asked for, and nobody in a measurement that is not theirs."""

    def names(what: str, only: list[str] | None) -> list[str]:
        return [c.name for c in wrapper.contestants_of(wrapper.MEASUREMENTS[what], only)]

    assert names("step", None) == ["fsdp1-flat", FLAT, "fsdp1", "fullshard-wrapper"]
    assert names("step", ["fsdp1-flat+malloc", "fairscale", "fsdp1-pre"]) == ["fsdp1-flat+malloc"]
    assert "fairscale" in names("accumulation", None)
    assert len(names("prefetch", None)) == 6
    with pytest.raises(ValueError, match=r"fsdp3.*known are"):
        names("step", ["fsdp3"])


def test_a_missing_fairscale_takes_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is skipped, the others run; its processes would ask for the reduction that gloo takes."""
    chosen = wrapper.contestants_of(wrapper.MEASUREMENTS["accumulation"], None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert [c.name for c in wrapper.installed(chosen)] == [c.name for c in chosen if c.name != "fairscale"]
    with pytest.raises(RuntimeError, match="fairscale is not installed"):
        prepare(FAIRSCALE)
    environment = process_environment(wrapper_worker.wrapper_contestant_named("fairscale"), 1)
    assert environment["ENABLE_NCCL_BASE_COLLECTIVES"] == "0"


@pytest.mark.parametrize("system", list(WRAPPING))
def test_the_wrapper_of_each_system_is_its_own(system: str) -> None:
    """Each unit is wrapped by the named library with the named flag, and given its own BackwardPrefetch."""
    from torch.distributed.fsdp import FullyShardedDataParallel as Peer

    import fullshard

    contestants.start_fake_group(2)
    try:
        expected = Peer if WRAPPING[system].library.startswith("torch") else fullshard.FullyShardedDataParallel
        model = distribute(system, tiny_units(3), TinyUnit, torch.device("cpu"))
        assert sum(isinstance(module, expected) for module in model.modules()) == 4
        flat = len(list(model.parameters())) == 3  # a flat parameter per unit, not four parameters
        assert flat is not WRAPPING[system].use_orig_params
        for name, member in wrapper_worker.PREFETCHES.items():
            contestant = wrapper_worker.wrapper_contestant_named(f"{system}-{name}")
            found = _prefetch_of(wrapper_worker.wrap(contestant, tiny_units(1)))
            assert (None if found is None else found.name) == member
    finally:
        torch.distributed.destroy_process_group()


def _prefetch_of(model: Any) -> Any:
    return model._options.prefetch if hasattr(model, "_options") else model.backward_prefetch


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


@pytest.mark.parametrize("module", ["wrapper", "wrap_time"])
def test_help(module: str) -> None:
    """The options are explained."""
    answer = run_bench(module, "--help")
    assert answer.returncode == 0, answer.stderr
    for option in ("--rounds", "--only", "--write-document"):
        assert option in answer.stdout


@pytest.mark.parametrize(
    ("module", "option", "name"),
    [("wrapper", "--only", "fsdp3"), ("wrapper", "--what", "stop"), ("wrap_time", "--only", "fsdp3")],
)
def test_an_unknown_name_is_refused(module: str, option: str, name: str) -> None:
    """With the names that are known."""
    answer = run_bench(module, option, name)
    assert answer.returncode == 2
    assert name in answer.stderr and "known are" in answer.stderr


def test_training_and_summons_are_measured(tmp_path: Path) -> None:
    """A tiny run, two contestants each: losses agree, files are written, no paths in them."""
    chosen = ("accumulation", "summon_writeback", "prefetch")
    answer = run_bench(
        "wrapper",
        *(option for what in chosen for option in ("--what", what)),
        *("--width", "32", "--blocks", "1", "--tokens", "16", "--microbatches", "2", "--rounds", "1"),
        *("--steps-per-round", "1", "--warmup-steps", "1", "--only", "fsdp1-flat", "--only", FLAT),
        *("--only", "fsdp1-flat-post", "--only", f"{FLAT}-post"),
        *("--results", str(tmp_path), "--document", str(tmp_path / "page.md"), "--write-document"),
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    page = (tmp_path / "page.md").read_text()
    assert "<!-- bench:wrapper:32 -->\nGPT of width 32" in page
    for what in chosen:
        (path,) = tmp_path.glob(f"wrapper_{what}_32_*.json")
        stored = json.loads(path.read_text())
        peer, ours = ("fsdp1-flat-post", f"{FLAT}-post") if what == "prefetch" else ("fsdp1-flat", FLAT)
        assert list(stored["contestants"]) == [peer, ours]
        assert stored["not_run"] == {} and stored["losses_that_disagree"] == {}
        assert str(tmp_path) not in path.read_text()
        entry = stored["contestants"][ours]
        assert entry["peer"] == peer and entry["time_ratio"]["median"] > 0
        assert len(entry["losses"]) == 2 and len(entry["seconds"]) == 1
        assert f"| {what}, {ours} |" in page
        if sys.platform == "linux":
            assert 0 < entry["peak_over_baseline_bytes"] < entry["peak_bytes"]
            assert (entry["sent_bytes_per_step"] is None) is what.startswith("summon")
    assert len(list(tmp_path.glob("wrapper_32_*.png"))) == 1


def test_wrap_time_smoke(tmp_path: Path) -> None:
    """Four contestants wrap a few units."""
    answer = run_bench(
        "wrap_time",
        *("--units", "3", "--rounds", "2", "--warmup-units", "1"),
        *("--results", str(tmp_path), "--document", str(tmp_path / "page.md"), "--write-document"),
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    (path,) = tmp_path.glob("wrap_time_*.json")
    stored = json.loads(path.read_text())
    assert list(stored["contestants"]) == list(WRAPPING) and stored["not_run"] == {}
    assert len(stored["contestants"][FLAT]["constructor"]["seconds"]) == 2
    assert path.with_suffix(".png").exists()
    assert "<!-- bench:wrap_time -->\n3 units" in (tmp_path / "page.md").read_text()
