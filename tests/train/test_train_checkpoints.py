"""Checkpoint folders, positions, metrics and best weights of a run: files and values without ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import signal
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

import fullshard
from fullshard.errors import CheckpointError
from fullshard.train import best_weights, checkpoint_folder, run_folder, weights
from fullshard.train.atomic_file import replacing
from fullshard.train.checkpoint_folder import CheckpointFolder
from fullshard.train.checkpoints import Checkpoints, find_corruption
from fullshard.train.config import CheckpointConfig, ConfigError, GPTConfig, TrainConfig
from fullshard.train.metrics import MetricsFile, last_step, read_metrics, up_to, write_metrics
from fullshard.train.model import GPT
from fullshard.train.position import BestValidation, Position, Setting
from fullshard.train.run_folder import RunLocation
from fullshard.train.stop import INTERRUPTED, STOP_FILE_VARIABLE, TERMINATED, StopRequest, agreed_exit_code

CONFIG = TrainConfig(data_sha256="a", ranks=2).with_options({"batch": 8})


def make(folder: Path, *steps: int, complete: bool = True) -> CheckpointFolder:
    """Checkpoints of these steps, as far as their folders go."""
    for step in steps:
        path = folder / f"step-{step:08d}"
        path.mkdir(parents=True)
        (path / "data-0.safetensors").touch()
        if complete:
            (path / "fullshard.json").touch()
    return CheckpointFolder(folder)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_newest_complete_checkpoint_counts(tmp_path: Path) -> None:
    """Steps are compared as numbers, incomplete folders and strangers do not count, and only the former are removed."""
    folder = make(tmp_path, 5, 100_000_000, 20)
    make(tmp_path, 200_000_000, 7, complete=False)
    (tmp_path / "step-notes").mkdir()
    assert folder.newest() == tmp_path / "step-100000000"
    assert [path.name for path in folder.remove_incomplete()] == ["step-00000007", "step-200000000"]
    assert names(tmp_path) == ["step-00000005", "step-00000020", "step-100000000", "step-notes"]


def test_last_few_checkpoints_are_kept(tmp_path: Path) -> None:
    """The oldest go; incomplete ones are left alone, as one of them may be being written."""
    folder = make(tmp_path, 1, 2, 3, 4)
    make(tmp_path, 5, complete=False)
    folder.keep(2)
    assert names(tmp_path) == ["step-00000003", "step-00000004", "step-00000005"]
    folder.keep(2)
    assert len(names(tmp_path)) == 3


def test_no_folder_has_no_checkpoints(tmp_path: Path) -> None:
    """A run without checkpoints is no error."""
    assert CheckpointFolder(tmp_path / "none").newest() is None


def test_checkpoints_are_found_by_run_folder_or_itself(tmp_path: Path) -> None:
    """A run, its folder of checkpoints and one checkpoint all name a checkpoint; an incomplete one is an error."""
    make(tmp_path / "run" / "checkpoints", 3, 4)
    make(tmp_path / "run" / "checkpoints", 9, complete=False)
    newest = tmp_path / "run" / "checkpoints" / "step-00000004"
    for named in (tmp_path / "run", newest.parent, newest):
        assert checkpoint_folder.find(named) == newest
    assert checkpoint_folder.run_of(newest) == tmp_path / "run"
    for wrong in (newest.with_name("step-00000009"), tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match=r"cannot resume: .*name the folder of a run"):
            checkpoint_folder.find(wrong)


@pytest.mark.parametrize(("every", "steps", "interval"), [(-1, 500, 25), (-1, 30, 10), (0, 500, 0), (7, 500, 7)])
def test_interval_of_checkpoints(every: int, steps: int, interval: int) -> None:
    """A twentieth of the steps, but at least ten, unless the user says otherwise."""
    assert CheckpointConfig(checkpoint_every=every).interval(steps) == interval


def test_position_and_setting_survive_a_checkpoint() -> None:
    """Both read back equal from what JSON could hold, and leave out what a later version may add."""
    position = Position(7, False, 1.5, BestValidation(4, 2.0, 256, "a"), 3.0, "/elsewhere")
    setting = Setting.of(CONFIG)
    for value in (position, Position(), setting):
        assert type(value).from_dict(json.loads(json.dumps(value.to_dict())) | {"later": 1}) == value


def test_setting_that_cannot_go_on_is_named() -> None:
    """Every option of the model that differs is named with both values; so is another seed."""
    before = Setting.of(CONFIG)
    other = Setting.of(CONFIG.with_options({"layers": 7, "width": 64}))
    with pytest.raises(ConfigError, match=r"has a model of --layers 3, not 7, --width 128, not 64: leave"):
        before.check(other, "there")
    with pytest.raises(ConfigError, match=r"--seed 0, not 3: another seed holds out other files"):
        before.check(Setting.of(CONFIG.with_options({"seed": 3})), "there")
    same = CONFIG.with_options({"steps": 3, "eval_every": 1, "lr": 1.0, "keep": 9, "prompt": "x"})
    before.check(Setting.of(same), "there")
    assert before.notes(Setting.of(same)) == []


def test_other_text_and_batch_are_noted() -> None:
    """A text or a global batch that changes is said; more ranks with as many sequences less are not."""
    before = Setting.of(CONFIG)
    (note,) = before.notes(Setting.of(dataclasses.replace(CONFIG, data_sha256="b")))
    assert "the text has changed" in note
    (note,) = before.notes(Setting.of(dataclasses.replace(CONFIG, ranks=4)))
    assert "sees 32 sequences (4 ranks of 8), and 16 so far" in note
    assert before.notes(Setting.of(CONFIG.with_options({"ranks": 4, "batch": 4}))) == []


def record(kind: str, step: int) -> dict[str, object]:
    return {"kind": kind, "step": step}


def test_metrics_are_cut_at_a_step(tmp_path: Path) -> None:
    """Later records go, and the validation of that very step if it was not done; a torn line goes anyway."""
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as metrics:
        for step in (1, 2, 3):
            metrics.write(record("train", step))
            metrics.write(record("validation", step))
    with path.open("a") as file:
        file.write('{"kind": "train", "st')
    assert last_step(path) == 3
    kept = up_to(read_metrics(path), 2, validated=True)
    assert [r["step"] for r in kept] == [1, 1, 2, 2]
    write_metrics(path, up_to(read_metrics(path), 2, validated=False))
    assert read_metrics(path) == [record("train", 1), record("validation", 1), record("train", 2)]
    with MetricsFile(path) as metrics:
        metrics.write(record("train", 3))
    assert [r["step"] for r in read_metrics(path)] == [1, 1, 2, 3]
    assert names(tmp_path) == ["metrics.jsonl"]


@pytest.mark.parametrize("text", ["", '{"ste', "\n", '[1]\n{"kind": 1}\n'])
def test_no_step_is_found_where_there_is_none(tmp_path: Path, text: str) -> None:
    """A file without whole records, and no file, have done no step."""
    assert last_step(tmp_path / "missing") == 0
    (tmp_path / "metrics.jsonl").write_text(text)
    assert last_step(tmp_path / "metrics.jsonl") == 0


def test_last_step_of_a_long_file(tmp_path: Path) -> None:
    """Only the end of the file is read, wherever that cuts a line."""
    path = tmp_path / "metrics.jsonl"
    write_metrics(path, [record("train", step) | {"more": "x" * step} for step in range(1, 300)])
    assert last_step(path) == 299


def test_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    """An exception while writing leaves the old content and nothing else."""
    path = tmp_path / "file"
    path.write_text("old")

    def fail() -> None:
        with replacing(path) as file:
            file.write(b"new")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert path.read_text() == "old" and names(tmp_path) == ["file"]
    with replacing(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and names(tmp_path) == ["file"]


def export(folder: Path, step: int, loss: float, *needed: int) -> BestValidation:
    best = BestValidation(step, loss)
    model = GPT(GPTConfig(layers=1, width=8, heads=1, sequence=8))
    best_weights.export(folder, model, best, set(needed), leads=True)
    return best


def test_best_weights_go_back_with_the_checkpoint(tmp_path: Path) -> None:
    """Until a checkpoint knows of better weights, those that it knows stay; going on from it brings them back."""
    known = export(tmp_path, 10, 3.0)
    export(tmp_path, 20, 2.0, 10)
    newest = export(tmp_path, 30, 1.0, 10, 20)
    assert names(tmp_path) == ["best-00000010.safetensors", "best-00000020.safetensors", "best.safetensors"]
    best_weights.remove_replaced(tmp_path, {10})
    assert names(tmp_path) == ["best-00000010.safetensors", "best.safetensors"]
    assert best_weights.step_of(tmp_path / "best.safetensors") == 30
    assert best_weights.restore(tmp_path, known) == known
    assert names(tmp_path) == ["best.safetensors"]
    assert best_weights.step_of(tmp_path / "best.safetensors") == 10
    assert best_weights.restore(tmp_path, newest) is None  # its file is gone: any validation is better than none
    assert names(tmp_path) == []


def test_best_weights_that_no_checkpoint_knows_go_at_once(tmp_path: Path) -> None:
    """However many better validations there are between two checkpoints, one replaced file is kept, or none."""
    for step in (10, 20, 30, 40):
        export(tmp_path, step, 1.0, 20)
    assert names(tmp_path) == ["best-00000020.safetensors", "best.safetensors"]
    export(tmp_path, 50, 1.0)
    assert names(tmp_path) == ["best.safetensors"]


@pytest.mark.parametrize("saved", [False, True])
def test_checkpoints_know_which_best_weights_are_needed(
    saved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the newest checkpoint until the one after it is there, and then only that one's."""
    writing: Future[None] = Future()
    monkeypatch.setattr("fullshard.train.checkpoints.async_save", lambda *args, **options: writing)
    model = GPT(GPTConfig(layers=1, width=8, heads=1, sequence=8))
    optimizer = torch.optim.SGD(model.parameters())
    kept = Checkpoints(tmp_path, every=1, keep=2, setting=Setting.of(CONFIG), leads=True, say=lambda text: None)
    assert kept.best_steps == set()
    kept.resume_from(Position(15, best=BestValidation(10, 3.0)))
    assert kept.best_steps == {10}
    kept.save(model, optimizer, Position(25, best=BestValidation(20, 2.0)))
    if saved:
        writing.set_result(None)
    kept.poll()
    assert kept.best_steps == ({20} if saved else {10, 20})


def test_checkpoint_that_cannot_be_written_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk ends a run only if it is still full at the last checkpoint."""
    futures: list[Future[None]] = [Future() for _ in range(3)]
    results = iter(futures)
    monkeypatch.setattr("fullshard.train.checkpoints.async_save", lambda *args, **options: next(results))
    model, said = GPT(GPTConfig(layers=1, width=8, heads=1, sequence=8)), list[str]()
    optimizer = torch.optim.SGD(model.parameters())
    kept = Checkpoints(tmp_path, every=1, keep=2, setting=Setting.of(CONFIG), leads=True, say=said.append)
    kept.save(model, optimizer, Position(1))
    futures[0].set_exception(CheckpointError("no space left"))
    make(tmp_path / "checkpoints", 1)
    (tmp_path / "checkpoints" / "step-00000001" / "fullshard.json").unlink()
    kept.poll()
    kept.save(model, optimizer, Position(2))
    assert not (tmp_path / "checkpoints" / "step-00000001").exists()
    assert said == ["warning: the checkpoint after step 1 was not written: no space left"]
    assert kept.newest_step == 0
    futures[1].set_result(None)
    make(tmp_path / "checkpoints", 2)
    kept.wait()
    assert kept.newest_step == 2
    kept.save(model, optimizer, Position(3))
    futures[2].set_exception(CheckpointError("no space left"))
    with pytest.raises(CheckpointError, match="no space left"):
        kept.wait()


def test_losses_on_other_bytes_are_not_compared() -> None:
    """Another number of held-out bytes or another text makes a best that any validation may replace."""
    best = BestValidation(10, 3.0, 256, "a")
    assert best.is_comparable(BestValidation(20, 2.0, 256, "a"))
    assert not best.is_comparable(BestValidation(20, 2.0, 512, "a"))
    assert not best.is_comparable(BestValidation(20, 2.0, 256, "b"))
    assert not best.is_comparable(BestValidation.from_dict({"step": 10, "loss": 3.0, "later": 1}))


def test_unfinished_weights_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an export that failed has written goes at once; what a killed one has left, at the next start."""

    def fail(model: object, folder: Path, **options: object) -> None:
        folder.mkdir()
        (folder / "half").touch()
        raise OSError("disk full")

    monkeypatch.setattr(weights, "export_safetensors", fail)
    with pytest.raises(OSError, match="disk full"):
        export(tmp_path, 10, 3.0)
    assert names(tmp_path) == []
    with contextlib.suppress(OSError):
        fail(None, tmp_path / ".best.safetensors.export")
    (tmp_path / "model.safetensors").touch()
    weights.remove_unfinished(tmp_path)
    assert names(tmp_path) == ["model.safetensors"]


def test_damaged_checkpoint_counts_no_more(tmp_path: Path) -> None:
    """It is kept under another name, every time under a new one; the one before it is the newest then."""
    folder = make(tmp_path, 1, 2, 3)
    bad = folder.newest()
    assert bad is not None and folder.before(bad) == tmp_path / "step-00000002"
    assert folder.set_aside(bad) == tmp_path / "step-00000003.damaged"
    make(tmp_path, 3)
    assert folder.set_aside(bad) == tmp_path / "step-00000003.damaged-2"
    folder.keep(1)
    assert names(tmp_path) == ["step-00000002", "step-00000003.damaged", "step-00000003.damaged-2"]
    assert folder.before(tmp_path / "step-00000002") is None


def test_only_what_is_not_as_written_is_damage(tmp_path: Path) -> None:
    """A whole checkpoint is not damaged, whatever it fits; a changed byte, a cut index and a missing file are."""
    whole, changed, cut, less = (tmp_path / name for name in ("whole", "changed", "cut", "less"))
    fullshard.save(whole, GPT(GPTConfig(layers=1, width=8, heads=1, sequence=8)))
    assert find_corruption(whole) == ""
    for other in (changed, cut, less):
        shutil.copytree(whole, other)
    (data,) = changed.glob("data-*")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    (cut / "fullshard.json").write_bytes((cut / "fullshard.json").read_bytes()[:-10])
    (less / data.name).unlink()
    assert "checksum mismatch" in find_corruption(changed)
    assert "fullshard.json cannot be read" in find_corruption(cut)
    assert data.name in find_corruption(less)


def test_best_weights_are_taken_along_to_another_run(tmp_path: Path) -> None:
    """A run that starts from another's checkpoint gets the weights that the checkpoint knows, and no later ones."""
    source, folder = tmp_path / "source", tmp_path / "folder"
    source.mkdir(), folder.mkdir()
    known, later = export(source, 10, 3.0), export(source, 20, 2.0, 10)
    best_weights.copy_from(source, folder, None)
    assert names(folder) == []
    best_weights.copy_from(source, folder, known)
    assert best_weights.step_of(folder / "best.safetensors") == 10
    best_weights.copy_from(source, folder, later)
    assert best_weights.step_of(folder / "best.safetensors") == 20
    assert names(source) == ["best-00000010.safetensors", "best.safetensors"]


def test_unfinished_run_without_checkpoint_starts_again(tmp_path: Path) -> None:
    """The same command may repeat steps that no checkpoint knows of; other settings, or results, may not be touched."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text(CONFIG.to_toml())
    (folder / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n')
    place = RunLocation(tmp_path, "run")
    place.check(CONFIG)
    with pytest.raises(ConfigError, match=r"choose another --name, or --fresh"):
        place.check(CONFIG.with_options({"lr": 1.0}))
    RunLocation(tmp_path, "run", fresh=True).check(CONFIG.with_options({"lr": 1.0}))
    (folder / "summary.json").write_text("{}")
    make(tmp_path / "other" / "checkpoints", 1)
    with pytest.raises(ConfigError, match="already has results"):
        RunLocation(tmp_path, "run", resume=tmp_path / "other").check(CONFIG)
    with pytest.raises(ConfigError, match="already has results"):
        place.check(CONFIG)


def test_settings_are_those_of_the_run_that_goes_on(tmp_path: Path) -> None:
    """A run's own checkpoint comes before the one that it was started from, and so do its settings."""
    for name, layers in (("own", 1), ("other", 2)):
        make(tmp_path / name / "checkpoints", 5)
        (tmp_path / name / "config.toml").write_text(CONFIG.with_options({"layers": layers}).to_toml())

    def layers_of(place: RunLocation) -> int | None:
        settings = place.settings()
        return settings.model.layers if settings else None

    assert layers_of(RunLocation(tmp_path, "own", resume=tmp_path / "other")) == 1
    assert layers_of(RunLocation(tmp_path, "own", resume=tmp_path / "other", fresh=True)) == 2
    assert layers_of(RunLocation(tmp_path, "new", resume=tmp_path / "other")) == 2
    assert layers_of(RunLocation(tmp_path, "new")) is None
    assert layers_of(RunLocation(tmp_path, "own", fresh=True)) is None


def test_run_folder_has_one_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a process holds the folder another gives up, and says so; when it is killed the folder is free."""
    code = (
        "import sys, time; from pathlib import Path; from fullshard.train import run_folder\n"
        "run_folder.begin(Path(sys.argv[1]), None); print('held', flush=True); time.sleep(1000)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        monkeypatch.setattr(run_folder, "LOCK_TIMEOUT_S", 0.0)
        with pytest.raises(ConfigError, match="another process is writing to"):
            run_folder.begin(tmp_path, None)
    finally:
        holder.kill()
        holder.communicate()
    monkeypatch.setattr(run_folder, "LOCK_TIMEOUT_S", 60.0)
    assert run_folder.begin(tmp_path, None).checkpoint is None


def test_any_rank_that_is_asked_stops_all() -> None:
    """Sums of marks give the code that all exit with; being taken away beats Ctrl-C."""
    assert (INTERRUPTED, TERMINATED) == (130, 143)
    assert [agreed_exit_code(0, 0), agreed_exit_code(2, 0), agreed_exit_code(0, 1), agreed_exit_code(1, 1)] == [
        0,
        130,
        143,
        143,
    ]


@pytest.mark.parametrize(("written", "code"), [("130", 130), ("143", 143), ("129", 143), ("", 143)])
def test_stop_file_asks(written: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the launcher was asked decides how workers stop: only Ctrl-C leaves time for results."""
    monkeypatch.setenv(STOP_FILE_VARIABLE, str(tmp_path / "stop"))
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    stop = StopRequest()
    assert stop.code == 0 and stop.marks == (0.0, 0.0)
    (tmp_path / "stop").write_text(written)
    assert stop.code == code
    assert agreed_exit_code(*stop.marks) == code


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="there is no SIGHUP")
@pytest.mark.parametrize("nohup", [False, True])
def test_closed_terminal_asks_to_end(nohup: bool) -> None:
    """SIGHUP stops a worker as SIGTERM does; one that was started to ignore it goes on."""
    code = (
        "import os, signal, sys; from fullshard.train.stop import StopRequest\n"
        # Set in both cases: the tests themselves may have been started by nohup.
        "signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[1] == 'True' else signal.SIG_DFL)\n"
        "request = StopRequest(); os.kill(os.getpid(), signal.SIGHUP); print(request.code)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(nohup)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "0\n" if nohup else "143\n")


@pytest.mark.parametrize("hangs", [False, True])
def test_rank_without_peers_ends_when_asked_to(hangs: bool) -> None:
    """A rank that is terminated while another is gone ends by itself, even from C++; while all are there it goes on."""
    wait = "HashStore().wait(['never'], timedelta(seconds=1000))" if hangs else "sys.stdin.readline()"
    code = (
        "import sys, time; from datetime import timedelta; from fullshard.train import stop\n"
        "from torch._C._distributed_c10d import HashStore\n"
        "request = stop.StopRequest(); request.watch([int(sys.argv[1])])\n"
        f"print('ready', flush=True); {wait}; print(request.code, flush=True); time.sleep(1000)"
    )
    pipe = subprocess.PIPE
    peer = subprocess.Popen([sys.executable, "-c", "input()"], stdin=pipe)
    line = [sys.executable, "-c", code, str(peer.pid)]
    rank = subprocess.Popen(line, stdin=pipe, stdout=pipe, text=True)
    try:
        assert rank.stdin is not None and rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
        rank.terminate()
        if not hangs:
            rank.stdin.write("\n")
            rank.stdin.flush()
            assert rank.stdout.readline() == "143\n"
        assert rank.poll() is None
        peer.kill()  # not waited for: a zombie is gone, too
        assert rank.wait(60) == 1
    finally:
        for process in (rank, peer):
            process.kill()
            process.communicate()
