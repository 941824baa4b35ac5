"""Checkpoints that an earlier version wrote are loaded, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

import fullshard
from checkpoint.stored.write import EXTRAS, adamw, shard, whole
from compare import assert_equal
from ranks import Rank, on_ranks

STORED = Path(__file__).parent / "stored"
WRITTEN = [("fully_shard", "original"), ("flat", "fully_shard"), ("flat", "plain"), ("torch", "flat")]


@on_ranks(2)
@pytest.mark.parametrize(("written", "kind"), WRITTEN)
def test_a_stored_checkpoint_is_loaded_bit_for_bit(rank: Rank, written: str, kind: str) -> None:
    """Model, AdamW's state and options, and other values, into a model and optimizer with other values."""
    model = shard(kind, seed=2)
    optimizer = adamw(model, lr=0.5)
    found = fullshard.load(STORED / "format1" / written, model, optimizer)
    expected = load_file(STORED / "format1" / written / "expected.safetensors")
    assert_equal(whole(kind, model, optimizer), expected, written)
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    if written != "torch":
        assert_equal(found, EXTRAS, "extras")
