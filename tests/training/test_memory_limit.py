"""The peak of a step's tensor memory is what the formulas of docs/how_to/memory.md say."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))

from bench.contestants import BF16, FP32, FULLSHARD, WRAPPER, WRAPPER_FLAT, distribute, start_fake_group
from bench.ledger import mark, range_of, recorded
from pictures.bytes_per_rank import MIXED, Widths, most_with_neighbors

from models import Block

RANKS, WIDTH, BLOCKS = 8, 256, 4


@pytest.fixture
def fake_group() -> Iterator[None]:
    """Be rank 0 of 8: memory is that of a run, whatever the messages hold."""
    threads = torch.get_num_threads()
    start_fake_group(RANKS)
    yield
    dist.destroy_process_group()
    torch.set_flush_denormal(False)
    torch.set_num_threads(threads)


def train(model: nn.Module) -> None:
    """Three steps, each a range of the ledger."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number in range(3):
        with range_of(f"step {number}"):
            model(torch.ones(1, WIDTH)).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("system", [FULLSHARD, WRAPPER, WRAPPER_FLAT])
@pytest.mark.parametrize(("mode", "widths"), [(FP32, Widths()), (BF16, MIXED)])
def test_the_peak_is_that_of_the_formula(fake_group: None, system: str, mode: str, widths: Widths) -> None:
    """Shards with their state, two unsharded units, the gradients of one, and one reduction; nothing else of size."""
    with recorded() as ledger:
        model: Any = nn.Sequential(*(Block(WIDTH) for _ in range(BLOCKS)))
        model = distribute(system, model, Block, torch.device("cpu"), mode)
        train(model)
    block = sum(parameter.numel() for parameter in Block(WIDTH).parameters())
    span = ledger.span("step 2")
    peak = ledger.peak(span.begin, span.end)[1]
    resting = (widths.master + widths.resting + widths.optimizer) * BLOCKS * block / RANKS
    formula = resting + most_with_neighbors([block] * BLOCKS, widths)
    assert 0.92 * formula <= peak <= formula, (peak, formula)


def test_a_ledger_sees_tensors_temporaries_and_resized_storages() -> None:
    """Each with its size, and the ranges in which it was made."""
    kib = 1024
    with recorded() as ledger:
        with range_of("outer"):
            kept = torch.empty(4 * kib, dtype=torch.uint8)
            with range_of("inner"):
                storage = torch.empty(8 * kib, dtype=torch.uint8).untyped_storage()
            storage.resize_(0)
            mark("between")
            storage.resize_(16 * kib)
    sizes = {block.nbytes: block for block in ledger.blocks}
    assert set(sizes) == {kept.nbytes, 8 * kib, 16 * kib}
    assert sizes[8 * kib].ranges == ("outer", "inner") and sizes[16 * kib].ranges == ("outer",)
    moment, outer = ledger.span("between").begin, ledger.span("outer")
    assert [block.nbytes for block in ledger.alive(moment)] == [4 * kib]
    assert ledger.peak(outer.begin, outer.end)[1] == 20 * kib and ledger.peak(outer.begin, moment)[1] == 12 * kib
