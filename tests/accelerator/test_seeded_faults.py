"""The race checker proves itself: faults that are seeded into the code for accelerators are found."""

from __future__ import annotations

import gc

import pytest
import torch

from accelerator.seeded_faults import EQUIVALENT, FAULTS, Fault, Values
from fullshard.comm import NcclTransport
from ranks import Rank

# The files are written from memory that the host reads past torch.
SEEN_IN_VALUES = {"a checkpoint is written before its copies are there"}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(ranks, name: str) -> None:
    """With the fault there are races, or wrong values in one case; without it there are none."""
    found = ranks(FAULTS[name].world, _with_and_without, "FAULTS", name, device_type="emulated", fresh=True)
    raced = any(" races, such as " in each for each in found)
    assert raced or (name in SEEN_IN_VALUES and "wrong values" in found), found


@pytest.mark.parametrize("name", EQUIVALENT)
def test_an_equivalent_change_is_none(ranks, name: str) -> None:
    """Changes that cannot be told from the original: there are no races, and the values are the same."""
    found = ranks(EQUIVALENT[name].world, _with_and_without, "EQUIVALENT", name, device_type="emulated", fresh=True)
    assert not any(found), f"{name}: {found}, although {EQUIVALENT[name].reason}"


def _with_and_without(rank: Rank, table: str, name: str) -> str:
    """What the fault leads to on this rank, in a word; empty: nothing."""
    fault = {"FAULTS": FAULTS, "EQUIVALENT": EQUIVALENT}[table][name]
    expected, races = _run(fault, rank, seeded=False)
    assert not races, races[0]
    try:
        values, races = _run(fault, rank, seeded=True)
    except RuntimeError as error:  # reading of memory that is gone, for one
        return f"raised {error}"
    if races:
        return f"{len(races)} races, such as {races[0]}"
    same = all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))
    return "" if same else "wrong values"


def _run(fault: Fault, rank: Rank, *, seeded: bool) -> tuple[Values, list[object]]:
    from accelerator.races import take_races

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NcclTransport, "direct_bytes", 1024)  # some parameters travel on their own, others packed
        patch.setattr(NcclTransport, "tiny_bytes", 0)
        if seeded:
            fault.seed(patch)
        values = fault.scenario(rank)
        gc.collect()
        torch.accelerator.synchronize()
    return values, list(take_races())
