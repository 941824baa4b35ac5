"""Runs that are stopped, killed and resumed: what each rank does then, and what is left."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import fullshard
from fullshard.train import loop, run_folder, worker
from fullshard.train.config import ConfigError, TrainConfig
from fullshard.train.corpus import read
from fullshard.train.group import Group
from fullshard.train.model import GPT
from fullshard.train.optimizer import PEAK, build_optimizer
from ranks import Rank, on_ranks

CONFIG = TrainConfig(layers=1, width=16, heads=2, sequence=16, ngrams=2, ngram_rows=8, steps=8, ranks=2)


@on_ranks(2)
def test_all_ranks_stop_when_one_is_asked_to(rank: Rank) -> None:
    """After the same step, with the exit code of the signal that the one got."""
    group = Group(rank.rank, rank.world_size, torch.device(rank.device))
    model, stop = loop.build_model(CONFIG, group), SimpleNamespace(code=143 if rank.rank else 0)
    log: Any = SimpleNamespace(record=lambda record: None)
    corpus, optimizer = read([__file__], seed=0, sequence=16), build_optimizer(cast(GPT, model), CONFIG)
    run = loop.Run(CONFIG, corpus, group, stop, model, optimizer, Path(), log, 0, 0, 0.0)  # type: ignore[arg-type]
    run._train_step(1)
    assert (run.step, run.stop_code) == (1, 143)


@on_ranks(2)
def test_all_ranks_read_the_same_text(rank: Rank, tmp_path: Path) -> None:
    """A node with other files is an error on all ranks, which names its rank."""
    group = Group(rank.rank, rank.world_size, torch.device(rank.device))
    file = tmp_path / f"{rank.rank}.txt"
    file.write_text(f"the text of node {rank.rank}\n" * 20)
    with pytest.raises(ConfigError, match="rank 1 read different text than rank 0: every node needs the same files"):
        worker._read_text(dataclasses.replace(CONFIG, data=(str(file),)), tmp_path, group)


def test_options_that_are_given_to_a_resumed_run_count(tmp_path: Path) -> None:
    """Its rates and its weight decay are those of the command line, and not those of the checkpoint."""
    model = GPT(CONFIG.model)
    fullshard.save(tmp_path / "step-1", model, build_optimizer(model, CONFIG), position={"step": 1})
    given = build_optimizer(model, dataclasses.replace(CONFIG, lr=0.5, muon_lr=0.25, weight_decay=0.125))
    before = [(group[PEAK], group["weight_decay"]) for group in given.param_groups]
    assert loop.load_position(tmp_path / "step-1", model, given) == {"step": 1}
    assert [(group[PEAK], group["weight_decay"]) for group in given.param_groups] == before


def test_what_is_left_of_an_old_checkpoint_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is killed while it removes one resumes from the newest one that is complete."""
    for step in (1, 2):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}" / run_folder.INDEX).touch()
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **options: None)  # as if it were killed then
    run_folder.keep_newest(tmp_path, 1)
    assert [path.name for path in run_folder.complete_checkpoints(tmp_path)] == ["step-2"]
