"""Run folders, checkpoint folders and background saves: files and values without ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fullshard.errors import CheckpointError
from fullshard.train import loop, run_folder
from fullshard.train.config import ConfigError, TrainConfig
from fullshard.train.group import Group
from fullshard.train.log import copy_metrics, read_metrics
from fullshard.train.run_folder import complete_checkpoints, find_checkpoint, settle

CONFIG = TrainConfig(data_sha256="a", ranks=2)


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
    assert [path.name for path in complete_checkpoints(tmp_path)] == [
        "step-00000005",
        "step-00000020",
        "step-100000000",
    ]
    run_folder.keep_newest(tmp_path, 2)
    others = ["step-00000020", "step-100000000", "step-notes"]
    assert names(tmp_path) == sorted([*others, "step-00000007", "step-200000000"])
    run_folder.remove_incomplete(tmp_path)
    assert names(tmp_path) == others
    assert complete_checkpoints(tmp_path / "none") == []


def test_checkpoints_are_found_by_run_folder_or_itself(tmp_path: Path) -> None:
    """A run, its folder of checkpoints and one checkpoint all name a checkpoint; an incomplete one is an error."""
    make(tmp_path / "run" / "checkpoints", 3, 4)
    make(tmp_path / "run" / "checkpoints", 9, complete=False)
    newest = tmp_path / "run" / "checkpoints" / "step-00000004"
    for named in (tmp_path / "run", newest.parent, newest):
        assert find_checkpoint(named) == newest
    for wrong in (newest.with_name("step-00000009"), tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match=r"cannot resume: .*pass the folder of a run"):
            find_checkpoint(wrong)


def test_checkpoint_that_cannot_be_written_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk ends a run only if it is still full at the last checkpoint; a complete one removes older ones."""
    futures: list[Future[None]] = []

    def begin(*args: object, **options: object) -> Future[None]:
        futures.append(Future())
        if len(futures) == 4:
            futures[-1].set_exception(CheckpointError("no space left"))
        return futures[-1]

    monkeypatch.setattr(loop, "async_save", begin)
    monkeypatch.setattr(loop, "check_weights", lambda model, step: None)
    said, folder = list[str](), tmp_path / "checkpoints"
    log = SimpleNamespace(say=said.append, sync=lambda: None)
    config, group = TrainConfig(steps=7, checkpoint_every=2, keep=1), Group(0, 1, torch.device("cpu"))
    run = loop.Run(config, None, group, None, None, None, tmp_path, log, 0, 0, 0.0)  # type: ignore[arg-type]

    def step(number: int) -> None:
        """End the save that the step before has begun."""
        run.step = number
        if number == 3:
            futures[0].set_exception(CheckpointError("no space left"))
            make(folder, 2, complete=False)
        if number == 5:
            assert said == ["warning: the checkpoint after step 2 was not written: no space left"]
            assert names(folder) == []
            make(folder, 1, 4)
        if number in (5, 7):
            futures[-1].set_result(None)

    monkeypatch.setattr(run, "_train_step", step)
    monkeypatch.setattr(run, "evaluate", lambda *_: 0.0)
    with pytest.raises(CheckpointError, match="no space left"):
        run.train()
    assert [text[:24] for text in said[1:]] == ["step 4: checkpoint saved", "step 6: checkpoint saved"]
    assert names(folder) == ["step-00000004"]
    assert run.saved_step == 7 and len(futures) == 4


def test_metrics_are_cut_at_a_step(tmp_path: Path) -> None:
    """Later records go, and a final validation that will be repeated; so does a torn line."""
    path, copy = tmp_path / "metrics.jsonl", tmp_path / "copy.jsonl"
    assert read_metrics(path) == []
    written = [{"kind": kind, "step": step} for step in (1, 2, 3) for kind in ("train", "final_validation")]
    path.write_text("".join(json.dumps(record) + "\n" for record in written) + '{"kind": "train", "st')
    assert read_metrics(path) == written
    for steps, count in ((3, 4), (2, 3)):
        copy_metrics(path, copy, 2, steps)
        assert read_metrics(copy) == written[:count]
    copy_metrics(path, path, 3, 4)
    assert read_metrics(path) == written and names(tmp_path) == ["copy.jsonl", "metrics.jsonl"]


@pytest.mark.parametrize("name", ["n" * 300, "ü" * 128, "a/b" * 9, "\0"])
def test_names_that_no_folder_can_have(tmp_path: Path, name: str) -> None:
    """They are refused before anything is made, and shown in short."""
    with pytest.raises(ConfigError, match=r"--name must be the name of one folder .* at most 255 bytes") as caught:
        run_folder.folder_of(tmp_path / "runs", name)
    assert len(str(caught.value)) < 500 + len(str(tmp_path)) and not names(tmp_path)


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
    """A run that was stopped before its first checkpoint starts again; one of other settings, or with a summary, does
    not, wherever it would start from. With a checkpoint it resumes.
    """
    make(tmp_path / "other" / "checkpoints", 5)
    config = tmp_path / "config.toml"
    for place in (tmp_path / "run", tmp_path / "other"):
        place.mkdir(exist_ok=True)
        (place / "config.toml").write_text(CONFIG.to_toml())
        (place / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n')
    config.write_text(CONFIG.to_toml())
    changed = {"lr": 0.5, "data": ("/text",)}
    folder, starts = tmp_path / "run", [(None, config), (tmp_path / "other", None)]
    assert settle(tmp_path / "other", None, None, changed)[1] == tmp_path / "other" / "checkpoints" / "step-00000005"
    for resume, file in starts:
        settle(folder, resume, file, {"ranks": 3, "data_sha256": "b"})
        with pytest.raises(ConfigError, match=r"results of --data \(\), not \('/text',\), --lr 0.06, not 0.5, but no"):
            settle(folder, resume, file, changed)
    (folder / "summary.json").write_text("{}")
    for resume, file in starts:
        with pytest.raises(ConfigError, match=r"already has results, .*: choose another --name"):
            settle(folder, resume, file, {})
    (folder / "summary.json").unlink()
    (folder / "metrics.jsonl").write_text("")
    settle(folder, None, config, changed)


@pytest.mark.parametrize(
    ("name", "resume", "layers"), [("own", "other", 1), ("new", "other", 2), (None, "own", 1), ("new", None, 3)]
)
def test_settings_are_those_of_the_run_that_resumes(
    name: str | None, resume: str | None, layers: int, tmp_path: Path
) -> None:
    """A run's own checkpoint comes before the one that it was started from, and so do its settings. What is given,
    or in a config file, comes before both.
    """
    for each, number in (("own", 1), ("other", 2)):
        make(tmp_path / each / "checkpoints", 5)
        (tmp_path / each / "config.toml").write_text(TrainConfig(layers=number, lr=0.5).to_toml())
    places = (tmp_path / name if name else None, tmp_path / resume if resume else None)
    config, checkpoint = settle(*places, None, {"lr": 0.25})
    assert (config.layers, config.lr, checkpoint is None) == (layers, 0.25, resume is None)
    (tmp_path / "config.toml").write_text(TrainConfig(layers=layers, lr=0.125).to_toml())
    assert settle(*places, tmp_path / "config.toml", {})[0].lr == 0.125


def test_checkpoint_without_settings_is_refused(tmp_path: Path) -> None:
    """Nobody could tell whether the model, the seed and the text are the same."""
    make(tmp_path / "moved", 5)
    with pytest.raises(ConfigError, match=r"cannot read .*config.toml: No such file.* choose another --name"):
        settle(None, tmp_path / "moved", None, {})


def test_run_folders_are_numbered(tmp_path: Path) -> None:
    """A run without a name gets the number after the largest."""
    for name in ("007", "notes"):
        (tmp_path / name).mkdir()
    assert run_folder.make_numbered(tmp_path) == tmp_path / "008" and (tmp_path / "008").is_dir()


def test_run_folder_has_one_writer(tmp_path: Path) -> None:
    """A second process says what it waits for, for a limited time, and goes on when the first one is killed."""
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
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run_folder, "LOCK_TIMEOUT", 0.0)
            with pytest.raises(ConfigError, match="another process is writing to"):
                run_folder.lock(tmp_path, print)
        processes[0].kill()
        assert processes[1].stdout is not None and processes[1].stdout.readline() == "held\n"
    finally:
        for process in processes:
            process.kill()
            process.communicate()
