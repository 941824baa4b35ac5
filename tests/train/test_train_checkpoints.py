"""Run folders, checkpoint folders and background saves: files and values without ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fullshard.errors import CheckpointError
from fullshard.train import loop, run_folder
from fullshard.train.config import ConfigError, TrainConfig
from fullshard.train.group import Group
from fullshard.train.log import cut_metrics, read_metrics
from fullshard.train.run_folder import complete_checkpoints, settle


def make(folder: Path, *steps: int, complete: bool = True) -> Path:
    """Checkpoints of these steps, as far as their folders go."""
    for step in steps:
        path = folder / f"step-{step:08d}"
        path.mkdir(parents=True)
        (path / "data-0.safetensors").touch()
        if complete:
            (path / "fullshard.json").touch()
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_newest_complete_checkpoint_counts(tmp_path: Path) -> None:
    """Steps are compared as numbers; strangers do not count, nor do incomplete ones, which are removed at a start."""
    make(tmp_path, 5, 100_000_000, 20)
    make(tmp_path, 200_000_000, 7, complete=False)
    (tmp_path / "step-notes").mkdir()
    complete = ["step-00000005", "step-00000020", "step-100000000"]
    assert [path.name for path in complete_checkpoints(tmp_path)] == complete
    run_folder.keep_newest(tmp_path, 2)
    others = ["step-00000020", "step-100000000", "step-notes"]
    assert names(tmp_path) == sorted([*others, "step-00000007", "step-200000000"])
    run_folder.remove_incomplete(tmp_path)
    assert names(tmp_path) == others
    assert complete_checkpoints(tmp_path / "none") == []


def test_checkpoint_that_cannot_be_written_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is noticed when the next one is due, or at the end; a complete one removes older ones."""
    futures: list[Future[None]] = []
    monkeypatch.setattr(loop, "async_save", lambda *_, **options: futures.append(Future()) or futures[-1])
    monkeypatch.setattr(loop, "get_total_norm", lambda *_, **options: None)
    said, folder = list[str](), tmp_path / "checkpoints"
    log = SimpleNamespace(say=said.append, sync=lambda: None)
    config, group = TrainConfig(steps=9, checkpoint_every=2, keep=1), Group(0, 1, torch.device("cpu"))
    model: Any = torch.nn.Module()
    run = loop.Run(config, None, group, None, model, None, tmp_path, log, 0, 0, 0.0)  # type: ignore[arg-type]

    def step(number: int) -> None:
        """End the save that the step before has begun."""
        run.step = number
        if number == 3:
            make(folder, 1, 2)
            futures[0].set_result(None)
        if number == 5:
            futures[1].set_exception(CheckpointError("no space left"))

    monkeypatch.setattr(run, "_train_step", step)
    monkeypatch.setattr(run, "evaluate", lambda *_: 0.0)
    with pytest.raises(CheckpointError, match="no space left"):
        run.train()
    assert [text[:24] for text in said] == ["step 2: checkpoint saved"]
    assert names(folder) == ["step-00000002"]
    assert run.step == 6 and len(futures) == 2


def test_metrics_are_cut_at_a_step(tmp_path: Path) -> None:
    """Later records go, and a final validation that will be repeated; so does a torn line."""
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    written = [{"kind": kind, "step": step} for step in (1, 2, 3) for kind in ("train", "final_validation")]
    path.write_text("".join(json.dumps(record) + "\n" for record in written) + '{"kind": "train", "st')
    assert read_metrics(path) == written
    for step, steps, count in ((3, 4, 6), (2, 3, 4), (2, 2, 3)):
        cut_metrics(path, step, steps)
        assert read_metrics(path) == written[:count] and names(tmp_path) == ["metrics.jsonl"]


def test_file_is_replaced_whole(tmp_path: Path) -> None:
    """The new text is complete under another name before it takes the place of the old."""
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        run_folder.replace_text(path, "\ud800")
    assert path.read_text() == "old"
    run_folder.replace_text(path, "new")
    assert path.read_text() == "new" and names(tmp_path) == ["file"]


def test_results_without_a_checkpoint_are_not_overwritten(tmp_path: Path) -> None:
    """A run that was stopped before its first checkpoint starts again; one with a summary does not."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n')
    assert settle(folder, None, {"lr": 0.5}) == (TrainConfig(lr=0.5), None)
    (folder / "summary.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"already has results, .*: choose another --name"):
        settle(folder, None, {})


def test_settings_are_those_of_the_run_that_resumes(tmp_path: Path) -> None:
    """Those given, or of a config file, come before those of the run; a checkpoint without any is refused."""
    folder, file = tmp_path / "own", tmp_path / "config.toml"
    make(folder / "checkpoints", 5)
    (folder / "config.toml").write_text(TrainConfig(layers=2, lr=0.5).to_toml())
    assert settle(folder, None, {"keep": 7})[0] == TrainConfig(layers=2, lr=0.5, keep=7)
    assert settle(folder, None, {})[1] == folder / "checkpoints" / "step-00000005"
    file.write_text(TrainConfig(layers=2, lr=0.125).to_toml())
    assert settle(folder, file, {"keep": 7})[0] == TrainConfig(layers=2, lr=0.125, keep=7)
    for given, message in (
        ({"layers": 3, "seed": 1}, "--layers 2, not 3, --seed 0, not 1: leave"),
        ({"optimizer": "adamw"}, "--optimizer muon, not adamw: leave"),
    ):
        with pytest.raises(ConfigError, match=f"step-00000005 was trained with {message}"):
            settle(folder, None, given)
    make(tmp_path / "moved" / "checkpoints", 5)  # nobody could tell whether the model, the seed and the text are equal
    with pytest.raises(ConfigError, match=r"cannot read .*config.toml, the settings of a run: No such file"):
        settle(tmp_path / "moved", None, {})


def test_run_folders_are_numbered(tmp_path: Path) -> None:
    """A run without a name gets the number after the largest."""
    for name in ("007", "notes"):
        (tmp_path / name).mkdir()
    assert run_folder.make_numbered(tmp_path) == tmp_path / "008" and (tmp_path / "008").is_dir()


def test_run_folder_has_one_writer(tmp_path: Path) -> None:
    """A second process says what it waits for, and goes on when the first one is killed."""
    code = (
        "import sys, time; from pathlib import Path; from fullshard.train import run_folder\n"
        "run_folder.lock(Path(sys.argv[1]), lambda text: print(text, flush=True)); print('held', flush=True)\n"
        "time.sleep(1000)"
    )
    processes = []
    try:
        for expected in ("held\n", f"waiting for another process that is writing to {tmp_path}\n"):
            line = [sys.executable, "-c", code, str(tmp_path)]
            processes.append(subprocess.Popen(line, stdout=subprocess.PIPE, text=True))
            assert processes[-1].stdout is not None and processes[-1].stdout.readline() == expected
        processes[0].kill()
        assert processes[1].stdout is not None and processes[1].stdout.readline() == "held\n"
    finally:
        for process in processes:
            process.kill()
            process.communicate()
