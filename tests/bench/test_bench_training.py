"""Training, also on hosts: what is concluded from records, what processes are started with, and small runs."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from bench.contestants import CONTESTANTS, OURS, TWO_KEPT, WRAPPING, Contestant, distribute
from bench.environment import REPOSITORY
from bench.hosts import driver as hosts
from bench.hosts.network import why_not
from bench.models import GPTShape, TinyUnit, batch_of
from bench.teams import Launch, ask_alone
from bench.training import modes, step, trainer, wrapper
from bench.training.contest import Record, Settings, TrainingOptions, disagreements
from bench.training.page import Benchmark
from small_runs import run_small
from torch.distributed.tensor import DTensor

from bench import contestants as who
from fullshard import allocator
from fullshard.engine.ownership import nested_units

CPU = torch.device("cpu")
NO_HOSTS = why_not()
SMALLEST = "--width 32 --blocks 1 --tokens 16 --rounds 2 --steps-per-round 1 --warmup-steps 1"


def test_losses_that_disagree_are_named_and_the_unsharded_model_may() -> None:
    """NaN agrees with nothing, not even itself; the reference is FSDP2, of wrappers the first of them."""

    def off(**losses: float) -> set[str]:
        return set(disagreements({name: Record([loss], [[1.0]], []) for name, loss in losses.items()}))

    nan = float("nan")
    assert off(unsharded=0.7, fsdp1=0.500009, fsdp2=0.5, fullshard=0.50002, ddp=nan) == {"fullshard", "ddp"}
    assert off(fsdp1=1.0, wrapper=1.0001) == {"wrapper"} and off(fsdp1=nan) == {"fsdp1"} and off() == set()


def test_peers_get_every_setting_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of prefetching and of the allocator; settings of the caller's allocator reach nobody."""
    for contestant in CONTESTANTS.values():
        peer = contestant.peer and CONTESTANTS[contestant.peer]
        assert not peer or peer.prefetch == contestant.prefetch
    for measurement in wrapper.MEASUREMENTS:
        assert all(CONTESTANTS[name].peer in {None, *measurement.contestants} for name in measurement.contestants)
    for benchmark in (step.STEP, modes.BENCHMARK, wrapper.BENCHMARK):
        for measurement in benchmark.measurements:
            chosen = measurement.chosen()
            names = {contestant.name for contestant in chosen}
            for system in {contestant.system for contestant in chosen} - {"unsharded", "ddp"}:
                other = f"{system}-malloc" if system in OURS else f"{system}+our-malloc"
                assert measurement.name == "prefetch" or names > {system, other}
    for name in who.GOVERNED_VARIABLES:
        monkeypatch.setenv(name, "1")
    environments = {name: who.process_environment(contestant, threads=1) for name, contestant in CONTESTANTS.items()}
    common = environments["fsdp2"]
    assert not set(who.GOVERNED_VARIABLES) & set(common) and common["OMP_NUM_THREADS"] == "1"
    for name, found in environments.items():
        own = {"FULLSHARD_KEEP_FREED_MEMORY": "0"} if name.startswith("fullshard") and name.endswith("-malloc") else {}
        assert found == common | own | ({"FULLSHARD_LAYOUT": "ragged"} if "ragged" in name else {}), name


def told_to_malloc(contestant: Contestant, folder: Path) -> list[tuple[int, int]]:
    """What ``mallopt`` is told when the contestant's rank shards a model; then a hash of the flags of its optimizer."""
    told: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda name, value: told.append((name, value)) or 1, malloc_trim=lambda _: 1)
    with (
        mock.patch.object(allocator, "_glibc", return_value=library),
        mock.patch.object(allocator, "_settings", allocator._AllocatorSettings()),
        mock.patch.dict(os.environ, contestant.environment),
    ):
        worker = {"rank": 0, "ranks": 1, "threads": 1, "store": str(folder / contestant.name)}
        model = {"what": "step", "width": 32, "blocks": 1, "tokens": 16}
        rank = trainer.build(contestant=asdict(contestant), **worker, **model)
    assert type(rank.optimizer) is torch.optim.AdamW
    torch.distributed.destroy_process_group()
    return [*told, (0, hash(tuple(sorted((k, v) for k, v in rank.optimizer.defaults.items() if k != "lr"))))]


def test_peers_get_the_very_setting_of_malloc_that_ours_takes(tmp_path: Path) -> None:
    """And the same flags of the optimizer; peers as they come, and ours without it, change nothing."""
    names = ("fullshard", "fsdp2+our-malloc", "fsdp1-flat+our-malloc", "fsdp2", "fullshard-malloc")
    ours, peer, flat, plain, without = (told_to_malloc(CONTESTANTS[name], tmp_path) for name in names)
    assert ours == peer == flat and len(ours) == 3 and ours[-1:] == plain == without
    assert who.KEPT_MEBIBYTES << 20 == allocator.KEPT_BLOCK_BYTES
    refused = pytest.raises(RuntimeError, match="has to be glibc's")
    with mock.patch.object(allocator, "_glibc", return_value=None), refused:
        who.set_allocator(CONTESTANTS["fsdp2+our-malloc"])


@pytest.mark.parametrize("system", list(WRAPPING))
def test_the_wrapper_of_each_system_is_its_own(system: str) -> None:
    """Each unit is wrapped by the named library with the named flag, and given its own BackwardPrefetch."""
    from torch.distributed.fsdp import FullyShardedDataParallel as Peer

    import fullshard

    who.start_fake_group(2)
    expected = Peer if WRAPPING[system].library.startswith("torch") else fullshard.FullyShardedDataParallel
    for name, member in who.PREFETCHES.items():
        units = torch.nn.Sequential(*(TinyUnit() for _ in range(3)))
        model = distribute(system, units, TinyUnit, CPU, prefetch=name)
        assert sum(isinstance(module, expected) for module in model.modules()) == 4
        flat = len(list(model.parameters())) == 3  # a flat parameter per unit, not four parameters
        assert flat is not WRAPPING[system].use_orig_params
        found = model._options.prefetch if hasattr(model, "_options") else model.backward_prefetch
        assert (None if found is None else found.name) == member


def test_one_peer_keeps_as_many_units_as_ours_keeps_by_itself() -> None:
    """Of four, the last two stay unsharded after a forward; the peer as it comes keeps the root alone."""
    who.start_fake_group(2)
    kept = {}
    for name in ("fsdp2", TWO_KEPT, "fullshard"):
        given = CONTESTANTS[name]
        model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))  # too large to share messages
        distribute(given.system, model, torch.nn.Linear, CPU, keep_last=given.keep_last)
        model(torch.randn(1, 512))
        kept[name] = [not isinstance(next(unit.parameters()), DTensor) for unit in model]
    kept["fullshard"] = [unit.is_kept for unit in nested_units(model)][1:]
    assert kept == {"fsdp2": [False] * 4, TWO_KEPT: [False, False, True, True], "fullshard": kept[TWO_KEPT]}


def test_the_policies_of_a_mode_are_the_systems_own() -> None:
    """The same values for all, of each library's own types; batches differ by rank and step."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy

    expected = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert who.options_of("fsdp2", "bf16") == {"mp_policy": expected}
    assert who.options_of("fsdp2", "offload") == {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    assert who.options_of("fsdp1", "bf16") == {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)}
    assert who.options_of("fsdp2", "hsdp") == {}
    with pytest.raises(ValueError, match="fsdp1 takes no part in mode hsdp"):
        who.options_of("fsdp1", "hsdp")
    batches = [batch_of(GPTShape(64, 1, 1024), step, rank) for step, rank in ((3, 1), (3, 0), (4, 1))]
    assert batches[0][0][:, 1:].equal(batches[0][1][:, :-1]), "targets are the next tokens"
    assert len({tuple(inputs.flatten().tolist()) for inputs, _ in batches}) == 3


def test_a_process_that_fails_or_hangs_is_ended(tmp_path: Path) -> None:
    """With all that it has started; why is said in a line."""
    (tmp_path / "ends.py").write_text("def build(**_): raise ValueError('out of luck\\nindeed')")
    child = f"open(r'{tmp_path / 'child'}', 'w').write(str(subprocess.Popen(['sleep', '600']).pid))"
    (tmp_path / "hangs.py").write_text(f"import subprocess, time\ndef build(**_):\n    {child}\n    time.sleep(600)")
    alone = Launch.alone(Contestant("x", "x", {"PYTHONPATH": f"{tmp_path}:{REPOSITORY / 'src'}"}), "ends")
    assert ask_alone(alone, 60, "anything") == {"failure": "ValueError: out of luck"}
    limit, deadline = 4.0, time.monotonic() + 60
    while not (tmp_path / "child").exists() and time.monotonic() < deadline:
        outcome = ask_alone(replace(alone, worker="hangs"), limit, "anything")
        assert outcome == {"failure": f"no answer within {limit:.0f} s"}
        limit *= 2  # on a machine so busy that it did not even start
    process = Path("/proc") / (tmp_path / "child").read_text()
    while (
        alive := process.exists() and "zombie" not in (process / "status").read_text()
    ) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive


def test_modes(tmp_path: Path) -> None:
    """Contestants of two ranks train the same in turns, in bf16; memory and bytes sent are counted, ratios paired."""
    names = ["fsdp2", "fsdp2+our-malloc", "fullshard"]
    chosen = " ".join(f"--only {name}" for name in names)
    page, stored = run_small(tmp_path, "modes", f"{SMALLEST} --microbatches 2 --what bf16 {chosen}")
    assert list(stored["contestants"]) == names
    assert stored["not_run"] == {} and stored["losses_that_disagree"] == {}
    entry, peer = (stored["contestants"][name] for name in ("fullshard", "fsdp2"))
    parameters = GPTShape(32, 1, 16).parameters
    for rank in entry["memory_by_rank"]:  # before the first step, half of the parameters
        assert 2 * parameters <= rank["counted_resting"] < 2 * parameters + 8192 < rank["counted"]
    assert entry["counted_bytes"] == max(rank["counted"] for rank in entry["memory_by_rank"])
    assert len(entry["losses"]) == 4 and len(entry["seconds"]) == 2
    ratios = [mine / theirs for (mine,), (theirs,) in zip(entry["seconds"], peer["seconds"], strict=True)]
    assert entry["time_ratio_to_fsdp2"]["median"] == pytest.approx(sum(ratios) / 2)
    if sys.platform == "linux":
        assert 0 < entry["peak_over_baseline_bytes"] < entry["peak_bytes"]
        assert 0 < entry["sent_bytes_per_step"] < 2 * peer["sent_bytes_per_step"]
    assert "| bf16, fullshard |" in page and "<!-- bench:modes:32 -->\nGPT of width 32" in page


@pytest.mark.parametrize(
    ("benchmark", "what", "names"),
    [
        (step.STEP, "step", ("fsdp1", "ddp", "unsharded")),
        (wrapper.BENCHMARK, "summon_writeback", ("fsdp1-flat", "fullshard-wrapper-flat")),
        (wrapper.BENCHMARK, "accumulation", ("fsdp1", "fullshard-wrapper")),
    ],
)
def test_contestants_train_alike(tmp_path: Path, benchmark: Benchmark, what: str, names: tuple[str, ...]) -> None:
    """Each in this process, on a group of one rank: the same losses, whatever is measured of them."""
    measurement, found = benchmark.by_name[what], []
    given = Settings.of(measurement, 32, TrainingOptions(blocks=1, tokens=16)).assignment
    for contestant in measurement.chosen(names):
        told = {"rank": 0, "ranks": 1, "threads": 1, "store": str(tmp_path / contestant.name)}
        try:
            rank = trainer.build(contestant=asdict(contestant), **told, **given)
            found.append([*rank.warm_up(1)["losses"], *rank.run(1)["losses"]])
            assert rank.memory()["counted"] > rank.memory()["counted_resting"] >= 4 * GPTShape(32, 1, 16).parameters
        finally:
            torch.distributed.destroy_process_group()
    assert all(losses == pytest.approx(found[0], abs=1e-5) for losses in found) and len(found) == len(names)


@pytest.mark.skipif(bool(NO_HOSTS), reason=NO_HOSTS)
def test_hosts(tmp_path: Path) -> None:
    """The benchmark runs, losses agree, and nobody is faster than the lower bound."""
    options = "--megabits 500 --width 64 --blocks 2 --tokens 64 --rounds 1 --only unsharded --only fullshard"
    page, result = run_small(tmp_path, "hosts", options, "--only", "fsdp2+our-malloc")
    assert "500 Mbit/s, fullshard |" in page
    (cell,) = result["cells"]
    assert cell["losses_that_disagree"] == {} and cell["not_run"] == {}
    assert cell["contestants"]["fullshard"]["median_step_seconds"] > 0


def test_bounds() -> None:
    """Half of the parameters, of blocks that are resharded twice, and of the gradients of two hosts."""
    options, fsdp2 = hosts.Options(), CONTESTANTS["fsdp2"]
    parameters, block = GPTShape(512, 6, 512).parameters, (12 * 512 + 13) * 512
    assert hosts.needed_bytes(options, fsdp2) == (2 * parameters + 6 * block) * 2
    assert hosts.needed_bytes(options, CONTESTANTS["fullshard"]) == (2 * parameters + 4 * block) * 2
    for gathered_once in (hosts.OWN[hosts.KEPT], CONTESTANTS["ddp"]):
        assert hosts.needed_bytes(options, gathered_once) == parameters * 4
    assert hosts.needed_bytes(options, hosts.OWN[hosts.INT8]) == (2 * parameters + 4 * block) * (1 + 4 / 128) / 2
    assert hosts.needed_bytes(hosts.Options(mode="hsdp"), fsdp2) == parameters * 4
    assert hosts.needed_bytes(hosts.Options(microbatches=2), fsdp2) == (3 * parameters + 12 * block) * 2
    assert hosts.bound(options, fsdp2, 500, 1.0) == pytest.approx((2 * parameters + 6 * block) * 2 / 62.5e6)
    assert hosts.bound(options, fsdp2, 0, 1.0) == 1.0
