"""Every collective, buffer and phase of three steps, in order, is what the file of the configuration says.

``make golden`` writes the files anew. Where a change of the engine is meant to change them, read their diff.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import seams
import torch
from golden_configurations import CONFIGURATIONS
from golden_steps import Run, watch
from golden_trace import Trace, difference

from models import tiny_units
from ranks import Rank, RankPool, on_ranks

TRACES = Path(__file__).parent / "traces"
REWRITE = os.environ.get("FULLSHARD_GOLDEN") == "rewrite"
STEPS = range(1, 4)

pytestmark = [
    pytest.mark.cpu_only("on other devices units have other buffers, and lanes other orders"),
    pytest.mark.skipif(os.environ.get("FULLSHARD_TEST_BACKEND", "gloo") != "gloo", reason="other back ends pack less"),
]


class Recorded(NamedTuple):
    """What a rank says of its three steps."""

    text: str
    collectives: list[str]


def run(rank: Rank, name: str, fault: str | None = None) -> Recorded:
    """Train as the configuration of this name says."""
    chosen, trace = CONFIGURATIONS[name], Trace()
    torch.manual_seed(4)
    with seams.seeded(fault), seams.recording(trace):
        with tiny_units(up_to=chosen.tiny):
            model = chosen.shard(chosen.model(), rank)
        watch(model, trace)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=2.0**-4)
        training = Run(model, optimizer, rank, chosen.loss, trace)
        chosen.prepare(training)
        for step in STEPS:
            trace.begin_step()
            chosen.step(training, step)
            trace.end_step(seams.labels(model))
    return Recorded(trace.text(), trace.collectives())


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_trace(ranks: RankPool, name: str) -> None:
    """Rank 0's trace is the stored one, and all ranks issue the same collectives."""
    recorded = ranks(CONFIGURATIONS[name].world, run, name)
    for number, other in enumerate(recorded):
        own, its = ("\n".join(each.collectives) for each in (recorded[0], other))
        assert own == its, "\n" + difference(own, its, f"{name}: collectives of rank 0 and rank {number}")
    path = TRACES / f"{name}.txt"
    if REWRITE:
        path.parent.mkdir(exist_ok=True)
        path.write_text(recorded[0].text, encoding="utf-8")
    found = difference(path.read_text(encoding="utf-8"), recorded[0].text, name)
    assert not found, f"the trace has changed; `make golden` stores it, if it is meant to\n{found}"


def test_files_belong_to_configurations() -> None:
    """There is a file for every configuration, and no other."""
    stored = {path.stem: path for path in TRACES.glob("*.txt")}
    for name in stored.keys() - CONFIGURATIONS.keys() if REWRITE else ():
        stored.pop(name).unlink()
    assert stored.keys() == CONFIGURATIONS.keys()


# fault, configuration -> the part of the step where the diff begins, and lines that change there
SEEDED = {
    ("swapped gathers", "shard-2"): ("forward", ["+ all_gather blocks.1", "- all_gather blocks.1"]),
    ("dropped prefetch", "wrapper-flat"): ("forward", ["- all_gather blocks.2", "+ all_gather blocks.2"]),
    ("late free", "wrapper-original"): ("forward", ["- free blocks.0"]),
    ("late reduction", "shard-2"): ("backward", ["- reduce_scatter blocks.2", "+ reduce_scatter blocks.2"]),
}


@pytest.mark.parametrize(("fault", "name"), SEEDED, ids=str)
def test_fault_is_found(ranks: RankPool, fault: str, name: str) -> None:
    """A fault that is seeded into the engine changes the trace, and the diff's first hunks are where the fault is."""
    recorded = ranks(CONFIGURATIONS[name].world, run, name, fault)
    found = difference((TRACES / f"{name}.txt").read_text(encoding="utf-8"), recorded[0].text, name)
    section, lines = SEEDED[fault, name]
    hunks = re.split(r"^@@.*@@ (.*)\n", found, flags=re.MULTILINE)[1:]  # where, lines, where, lines, ...
    place = f"step 1, {section}"
    assert hunks and hunks[0] == place, found
    there = "\n".join(hunk for where, hunk in zip(hunks[::2], hunks[1::2], strict=True) if where == place)
    changed = [f"{line[:1]} {' '.join(line[1:].split())}" for line in there.splitlines()]
    assert all(any(each.startswith(line) for each in changed) for line in lines), found


@on_ranks(1)
def test_seams_are_closed(rank: Rank) -> None:
    """Recording, and seeding faults, leave the engine as it was."""
    before = [dict(vars(each)) for each in seams.PATCHED]
    for fault in (None, *seams.FAULTS):
        run(rank, "shard-1", fault)
    assert [dict(vars(each)) for each in seams.PATCHED] == before
