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


SCENARIOS = list(dict.fromkeys((fault.scenario.__name__, fault.world) for fault in FAULTS.values()))


@pytest.mark.parametrize(("scenario", "world"), SCENARIOS)
def test_faults_are_found(ranks, scenario: str, world: int) -> None:
    """With each fault there are races, or wrong values in one case; without it, and with equivalent changes, none."""
    by_rank = ranks(world, _with_and_without, scenario, world, device_type="emulated", fresh=True)
    for found in zip(*by_rank, strict=True):
        (name,) = {name for name, _ in found}
        outcomes = [outcome for _, outcome in found]
        if name in EQUIVALENT:
            assert not any(outcomes), f"{name}: {outcomes}, although {EQUIVALENT[name].reason}"
        else:
            raced = any(" races, such as " in each for each in outcomes)
            assert raced or (name in SEEN_IN_VALUES and "wrong values" in outcomes), (name, outcomes)


def _with_and_without(rank: Rank, scenario: str, world: int) -> list[tuple[str, str]]:
    """What each fault of a scenario leads to on this rank, in a word; empty: nothing."""
    faults = {**FAULTS, **EQUIVALENT}
    chosen = {n: f for n, f in faults.items() if (f.scenario.__name__, f.world) == (scenario, world)}
    expected, races = _run(next(iter(chosen.values())), rank, seeded=False)
    assert not races, races[0]
    outcomes = [(name, _outcome(fault, rank, expected)) for name, fault in chosen.items()]
    _, races = _run(next(iter(chosen.values())), rank, seeded=False)
    assert not races, f"one fault's races are found with another: {races[0]}"
    return outcomes


def _outcome(fault: Fault, rank: Rank, expected: Values) -> str:
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
        patch.setattr(NcclTransport, "smallest_direct", lambda *_, **__: 1024)  # some on their own, others packed
        patch.setattr(NcclTransport, "tiny_bytes", 0)
        if seeded:
            fault.seed(patch)
        values = fault.scenario(rank)
        gc.collect()
        torch.accelerator.synchronize()
    return values, list(take_races())
