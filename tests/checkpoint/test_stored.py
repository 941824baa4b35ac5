"""Checkpoints that earlier versions wrote are loaded, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

import fullshard
from checkpoint.stored.write import EXTRAS, adamw, shard, whole
from compare import assert_equal
from fullshard.checkpoint.format.index_json import from_json, to_json
from ranks import Rank, on_ranks

STORED = Path(__file__).parent / "stored"
WRITTEN = [
    ("torch", "flat"),
    ("format2/fully_shard", "flat"),
    ("format2/fully_shard", "original"),
    ("format2/flat", "fully_shard"),
    ("format2/flat", "plain"),
]


@on_ranks(2)
@pytest.mark.parametrize(("written", "kind"), WRITTEN)
def test_a_stored_checkpoint_is_loaded_bit_for_bit(rank: Rank, written: str, kind: str) -> None:
    """Model, AdamW's state and options, and other values, into a model and optimizer with other values."""
    model = shard(kind, seed=2)
    optimizer = adamw(model, lr=0.5)
    found = fullshard.load(STORED / written, model, optimizer)
    expected = load_file(STORED / written / "expected.safetensors")
    assert_equal(whole(kind, model, optimizer), expected, written)
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    if "torch" not in written:
        assert_equal(found, EXTRAS, "extras")


@pytest.mark.parametrize("kind", ["fully_shard", "flat"])
def test_the_index_is_written_as_it_was(kind: str) -> None:
    """Byte for byte, so that programs that read it, and comparisons by lines, go on working."""
    stored = (STORED / "format2" / kind / "fullshard.json").read_bytes()
    assert to_json(from_json(stored, "i")) == stored
