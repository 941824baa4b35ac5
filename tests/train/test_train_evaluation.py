"""Baselines, learning rates and held-out windows: values without ranks."""

from __future__ import annotations

import math
import zlib

import numpy as np
import pytest

from fullshard.train.config import TrainingConfig
from fullshard.train.evaluation import HeldOut, baselines
from fullshard.train.optimizer import learning_rate


def test_order0_against_hand_computed_value() -> None:
    """Three a and one b, plus one for each of 256 values, give 4/260, 2/260 and 1/260."""
    train, held_out = (np.frombuffer(text, dtype=np.uint8) for text in (b"aaab", b"abbz"))
    expected = -(math.log2(4 / 260) + 2 * math.log2(2 / 260) + math.log2(1 / 260)) / 4
    assert baselines(train, held_out)["order-0 entropy coding"] == pytest.approx(expected, abs=1e-12)


def test_zlib_counts_its_whole_output() -> None:
    """A thousand equal bytes take as many bits as zlib's output at level 9 has."""
    text = b"a" * 1000
    found = baselines(*(np.frombuffer(text, dtype=np.uint8),) * 2)["zlib level 9"]
    assert found == 8 * len(zlib.compress(text, 9)) / 1000


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
