"""Checkpoint folders, run folders, metrics, best weights and stop requests of a run: files and values without ranks."""

from __future__ import annotations

import contextlib
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
from fullshard.train import checkpoint_folder, run_folder, weights
from fullshard.train.checkpoints import Checkpoints, Position, find_corruption
from fullshard.train.config import ConfigError, GPTConfig, TrainConfig
from fullshard.train.metrics import read_metrics, up_to, write_metrics
from fullshard.train.model import GPT
from fullshard.train.run_folder import RunLocation, replace_text
from fullshard.train.weights import BestValidation, save_full

CONFIG = TrainConfig(data_sha256="a", ranks=2)
SMALL = GPTConfig(layers=1, width=8, heads=1, sequence=8)


def make(folder: Path, *steps: int, complete: bool = True) -> Path:
    """Checkpoints of these steps, as far as their folders go."""
    for step in steps:
        path = checkpoint_folder.path_of(folder, step)
        path.mkdir(parents=True)
        (path / "data-0.safetensors").touch()
        if complete:
            (path / "fullshard.json").touch()
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_newest_complete_checkpoint_counts(tmp_path: Path) -> None:
    """Steps are compared as numbers, incomplete folders and strangers do not count, and only the former are removed."""
    make(tmp_path, 5, 100_000_000, 20)
    make(tmp_path, 200_000_000, 7, complete=False)
    (tmp_path / "step-notes").mkdir()
    assert checkpoint_folder.newest(tmp_path) == tmp_path / "step-100000000"
    checkpoint_folder.remove_incomplete(tmp_path)
    assert names(tmp_path) == ["step-00000005", "step-00000020", "step-100000000", "step-notes"]
    assert checkpoint_folder.newest(tmp_path / "none") is None


def test_last_few_checkpoints_are_kept(tmp_path: Path) -> None:
    """The oldest go; incomplete ones are left alone, as one of them may be being written."""
    make(tmp_path, 1, 2, 3, 4)
    make(tmp_path, 5, complete=False)
    for _ in range(2):
        checkpoint_folder.keep(tmp_path, 2)
        assert names(tmp_path) == ["step-00000003", "step-00000004", "step-00000005"]


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


def test_damaged_checkpoint_counts_no_more(tmp_path: Path) -> None:
    """It is kept under another name, every time under a new one; the one before it is the newest then."""
    make(tmp_path, 1, 2, 3)
    bad = tmp_path / "step-00000003"
    assert checkpoint_folder.before(bad) == tmp_path / "step-00000002"
    assert checkpoint_folder.set_aside(bad) == tmp_path / "step-00000003.damaged"
    make(tmp_path, 3)
    assert checkpoint_folder.set_aside(bad) == tmp_path / "step-00000003.damaged-2"
    checkpoint_folder.keep(tmp_path, 1)
    assert names(tmp_path) == ["step-00000002", "step-00000003.damaged", "step-00000003.damaged-2"]
    assert checkpoint_folder.before(tmp_path / "step-00000002") is None


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


@pytest.fixture
def saves(monkeypatch: pytest.MonkeyPatch) -> list[Future[None]]:
    """Futures of background saves, which the test completes."""
    futures: list[Future[None]] = []

    def begin(*args: object, **options: object) -> Future[None]:
        futures.append(Future())
        return futures[-1]

    monkeypatch.setattr("fullshard.train.checkpoints.async_save", begin)
    return futures


def test_checkpoint_that_cannot_be_written_is_tried_again(tmp_path: Path, saves: list[Future[None]]) -> None:
    """A full disk ends a run only if it is still full at the last checkpoint."""
    model, said = GPT(SMALL), list[str]()
    optimizer = torch.optim.SGD(model.parameters())
    kept = Checkpoints(tmp_path, CONFIG.with_options({"checkpoint_every": 1}), leads=True, say=said.append)
    kept.save(model, optimizer, Position(1))
    saves[0].set_exception(CheckpointError("no space left"))
    make(tmp_path / "checkpoints", 1, complete=False)
    kept.poll()
    kept.save(model, optimizer, Position(2))
    assert names(tmp_path / "checkpoints") == []
    assert said == ["warning: the checkpoint after step 1 was not written: no space left"]
    assert kept.newest_step == 0
    saves[1].set_result(None)
    make(tmp_path / "checkpoints", 2)
    kept.wait()
    assert kept.newest_step == 2 and not kept.are_due(2, last=True) and kept.are_due(3)
    kept.save(model, optimizer, Position(3))
    saves[2].set_exception(CheckpointError("no space left"))
    with pytest.raises(CheckpointError, match="no space left"):
        kept.wait()


def record(kind: str, step: int) -> dict[str, object]:
    return {"kind": kind, "step": step}


def test_metrics_are_cut_at_a_step(tmp_path: Path) -> None:
    """Later records go, and a final validation that will be repeated; so does a torn line."""
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    written = [record(kind, step) for step in (1, 2, 3) for kind in ("train", "validation", "final_validation")]
    write_metrics(path, written)
    with path.open("a") as file:
        file.write('{"kind": "train", "st')
    assert read_metrics(path) == written
    assert up_to(written, 2, 3) == written[:6]
    assert up_to(written, 2, 2) == written[:5]
    assert names(tmp_path) == ["metrics.jsonl"]


def test_file_is_replaced_whole(tmp_path: Path) -> None:
    """The new text is complete under another name before it takes the place of the old."""
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        replace_text(path, "\ud800")
    assert path.read_text() == "old"
    replace_text(path, "new")
    assert path.read_text() == "new" and names(tmp_path) == ["file"]


def test_best_validation_is_kept_with_its_weights(tmp_path: Path) -> None:
    """It reads back from the file; a file without, or no file, has none. Other bytes or text cannot be compared."""
    best, path = BestValidation(10, 3.0625, 256, "a"), tmp_path / "best.safetensors"
    assert BestValidation.read(path) is None
    save_full(path, GPT(SMALL), leads=True)
    assert BestValidation.read(path) is None
    save_full(path, GPT(SMALL), best.notes(), leads=True)
    assert BestValidation.read(path) == best
    assert best.is_comparable(BestValidation(20, 2.0, 256, "a"))
    assert not best.is_comparable(BestValidation(20, 2.0, 512, "a"))
    assert not best.is_comparable(BestValidation(20, 2.0, 256, "b"))


def test_unfinished_weights_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an export that failed has written goes at once; what a killed one has left, at the next start."""

    def fail(model: object, folder: Path, **options: object) -> None:
        folder.mkdir()
        (folder / "half").touch()
        raise OSError("disk full")

    monkeypatch.setattr(weights, "export_safetensors", fail)
    with pytest.raises(OSError, match="disk full"):
        save_full(tmp_path / "best.safetensors", GPT(SMALL), leads=True)
    assert names(tmp_path) == []
    with contextlib.suppress(OSError):
        fail(None, tmp_path / ".best.safetensors.export")
    (tmp_path / "model.safetensors").touch()
    weights.remove_unfinished(tmp_path)
    assert names(tmp_path) == ["model.safetensors"]


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


@pytest.mark.parametrize(
    ("name", "resume", "fresh", "layers"),
    [
        ("own", "other", False, 1),
        ("own", "other", True, 2),
        ("new", "other", False, 2),
        ("new", None, False, None),
        ("own", None, True, None),
    ],
)
def test_settings_are_those_of_the_run_that_resumes(
    name: str, resume: str | None, fresh: bool, layers: int | None, tmp_path: Path
) -> None:
    """A run's own checkpoint comes before the one that it was started from, and so do its settings."""
    for each, number in (("own", 1), ("other", 2)):
        make(tmp_path / each / "checkpoints", 5)
        (tmp_path / each / "config.toml").write_text(CONFIG.with_options({"layers": number}).to_toml())
    settings = RunLocation(tmp_path, name, tmp_path / resume if resume else None, fresh).settings()
    assert (settings.model.layers if settings else None) == layers


def test_run_folders_are_numbered(tmp_path: Path) -> None:
    """A run without a name gets the number after the largest; the location's words lead to the same folder."""
    for name in ("007", "notes"):
        (tmp_path / name).mkdir()
    place = RunLocation(tmp_path).claim(print)
    assert place.folder == tmp_path / "008" and place.folder.is_dir()
    assert place.words() == ["--out", str(tmp_path), "--name", "008"]


def test_run_folder_has_one_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a process holds the folder another gives up, and says so; when it is killed the folder is free."""
    code = (
        "import sys, time; from pathlib import Path; from fullshard.train import run_folder\n"
        "run_folder.lock(Path(sys.argv[1])); print('held', flush=True); time.sleep(1000)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        monkeypatch.setattr(run_folder, "LOCK_TIMEOUT_S", 0.0)
        with pytest.raises(ConfigError, match="another process is writing to"):
            run_folder.lock(tmp_path)
    finally:
        holder.kill()
        holder.communicate()
    monkeypatch.setattr(run_folder, "LOCK_TIMEOUT_S", 60.0)
    assert run_folder.lock(tmp_path) is not None


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="there is no SIGHUP")
@pytest.mark.parametrize("nohup", [False, True])
def test_signals_ask_once_and_end_the_process_if_they_come_again(nohup: bool) -> None:
    """SIGHUP stops a worker as SIGTERM does, unless it was started to ignore it; a later signal means now."""
    code = (
        "import os, signal, sys; from fullshard.train import stop\n"
        # Set in both cases: the tests themselves may have been started by nohup.
        "signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[1] == 'True' else signal.SIG_DFL)\n"
        "request = stop.StopRequest(); os.kill(os.getpid(), signal.SIGHUP); print(request.code)\n"
        "os.kill(os.getpid(), signal.SIGTERM); print(request.code, flush=True)\n"
        "stop.AGAIN = 0; os.kill(os.getpid(), signal.SIGTERM); print('alive')"
    )
    done = subprocess.run([sys.executable, "-c", code, str(nohup)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (143, "0\n143\n" if nohup else "129\n129\n")


@pytest.mark.parametrize("within", [False, True])
def test_rank_without_peers_ends(within: bool) -> None:
    """A rank whose peer was killed ends, even from C++; once no collective follows, peers may go."""
    wait = "HashStore().wait(['never'], timedelta(seconds=1000))" if within else "pass"
    code = (
        "import os, sys; from datetime import timedelta; from fullshard.train import stop\n"
        "from torch._C._distributed_c10d import HashStore\n"
        "stop.FAREWELL = 0.1\n"
        "with stop.ending_with_peers([int(sys.argv[1])]):\n"
        f"    print('ready', flush=True); {wait}\n"
        "sys.stdin.readline(); print('alive', flush=True)"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as peer,
        subprocess.Popen([sys.executable, "-c", code, str(peer.pid)], **pipes) as rank,  # type: ignore[call-overload]
    ):
        try:
            assert rank.stdout.readline() == "ready\n" and rank.poll() is None
            peer.kill()
            peer.wait()
            output, _ = rank.communicate("\n", timeout=60)
            assert (rank.returncode, output) == ((1, "") if within else (0, "alive\n"))
        finally:
            peer.kill()
            rank.kill()
