"""The Trainer's example and its page."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import re
from pathlib import Path

from trainer_runs import run_example


def test_the_example_runs(tmp_path: Path) -> None:
    """The example, as its first lines say to run it: losses fall, and what was saved says the same."""
    printed = run_example("transformers_trainer.py", tmp_path)
    losses = [float(loss) for loss in re.findall(r"'loss': '([\d.]+)'", printed)]
    assert len(losses) == 3 and losses[0] > 2 * losses[2]
    assert "sharded as FSDPLlamaForCausalLM" in printed
    assert "the loaded model says the same: True" in printed
