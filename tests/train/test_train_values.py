"""Baselines, config, schedule and held-out windows: values without ranks."""

from __future__ import annotations

import dataclasses
import math
import zlib
from pathlib import Path

import numpy as np
import pytest

from fullshard.train.baselines import order0_bits_per_byte, zlib_bits_per_byte
from fullshard.train.config import ConfigError, GPTConfig, TrainConfig, TrainingConfig, option_names
from fullshard.train.evaluation import HeldOut
from fullshard.train.metrics import read_metrics
from fullshard.train.optimizer import learning_rate


def test_order0_against_hand_computed_value() -> None:
    """Three a and one b, plus one for each of 256 values, give 4/260, 2/260 and 1/260."""
    train = np.frombuffer(b"aaab", dtype=np.uint8)
    held_out = np.frombuffer(b"abbz", dtype=np.uint8)
    expected = -(math.log2(4 / 260) + 2 * math.log2(2 / 260) + math.log2(1 / 260)) / 4
    assert order0_bits_per_byte(train, held_out) == pytest.approx(expected, abs=1e-12)


def test_zlib_counts_its_whole_output() -> None:
    """A thousand equal bytes take as many bits as zlib's output at level 9 has."""
    text = b"a" * 1000
    expected = 8 * len(zlib.compress(text, 9)) / 1000
    assert zlib_bits_per_byte(np.frombuffer(text, dtype=np.uint8)) == expected


def test_config_survives_toml(tmp_path: Path) -> None:
    """A config with every field changed reads back equal, awkward strings included."""
    config = TrainConfig(data=("/a b/ü.txt", 'quo"te'), data_sha256="ff", ranks=3, device="cpu", seed=7)
    config = config.with_options(
        {
            "layers": 1,
            "width": 8,
            "heads": 1,
            "sequence": 9,
            "steps": 5,
            "batch": 3,
            "ngrams": 3,
            "ngram_rows": 100,
            "optimizer": "adamw",
            "muon_lr": 1e-4,
            "lr": 1e-5,
            "warmup": 0,
            "weight_decay": 0.5,
            "clip": 2.5,
            "eval_every": 3,
            "eval_bytes": 2000,
            "prompt": "\n\t'\"",
            "generate": 0,
            "checkpoint_every": 17,
            "keep": 4,
        }
    )
    defaults = TrainConfig()
    for section in ("model", "training", "evaluation", "checkpoints"):
        pairs = zip(
            dataclasses.astuple(getattr(config, section)),
            dataclasses.astuple(getattr(defaults, section)),
            strict=True,
        )
        assert all(one != other for one, other in pairs)
    path = tmp_path / "config.toml"
    path.write_text(config.to_toml(), encoding="utf-8")
    assert TrainConfig.from_toml(path) == config


def test_option_names_are_unique() -> None:
    """No two settings share a name, so that each can be an option."""
    config = TrainConfig()
    sections = (config, config.model, config.training, config.evaluation, config.checkpoints)
    assert sum(len(dataclasses.fields(section)) for section in sections) == len(option_names())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\nlayrs = 3", "unknown settings: layrs"),
        ("seed = 'one'", "seed must be int"),
        ("seed = true", "seed must be int"),
        ("data = 'file'", "data must be"),
        ("[training]\nsteps = 0", "steps must be at least 1"),
        ("[model]\nwidth = 10\nheads = 4", "multiple of 2"),
        ("[training]\noptimizer = 'sgd'", "optimizer must be one of adamw, muon, found 'sgd'"),
        ("[model]\nngrams = 1", "ngrams must be at least 2"),
        ("seed = ", "not a TOML file"),
    ],
)
def test_wrong_config_is_named(tmp_path: Path, text: str, message: str) -> None:
    """A config file with a mistake is an error that names the file and the setting."""
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"wrong.toml.*{message}"):
        TrainConfig.from_toml(path)


def test_parameter_count_by_hand() -> None:
    """One block of width 8 with MLP width 32, embedding, head, rows for n-grams of 2 and 3 bytes, and for matches."""
    config = GPTConfig(layers=1, width=8, heads=2, ngrams=3, ngram_rows=100)
    assert config.parameter_count == 4 * 64 + 2 * 8 * 32 + 2 * 256 * 8 + 2 * 100 * 8 + 3 * 257 * 8


def test_learning_rate_warms_up_and_falls() -> None:
    """The rate rises in equal steps, stays at the peak, and falls in equal steps, the last one to zero."""
    config = TrainingConfig(steps=100, warmup=3, lr=1.0)
    assert [learning_rate(step, config) for step in (1, 2, 3)] == [0.25, 0.5, 0.75]
    assert [learning_rate(step, config) for step in (4, 31)] == [1.0, 1.0]
    assert [learning_rate(step, config) for step in (66, 100, 101)] == pytest.approx([0.5, 1 / 70, 0.0])
    assert learning_rate(66, config, peak=4.0) == pytest.approx(2.0)


def test_held_out_windows_predict_every_byte_once() -> None:
    """Targets are the bytes after the first, cut to whole windows; a limit above the text takes what there is."""
    text = np.arange(100, dtype=np.uint8)
    held_out = HeldOut.take(text, limit=1000, sequence=16)
    assert held_out.count == 6
    assert held_out.targets.tolist() == list(range(1, 97))
    assert HeldOut.take(text, limit=5, sequence=16).count == 1


def test_torn_metrics_are_read_up_to_the_tear(tmp_path: Path) -> None:
    """A last line that was cut off does not hide the lines before it."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [record["step"] for record in read_metrics(path)] == [1, 2]
