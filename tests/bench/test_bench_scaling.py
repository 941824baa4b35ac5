"""What grows with units and ranks, by counting calls and not seconds; and the benchmark of it on made-up figures."""

from __future__ import annotations

import contextlib
import gc
import math
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bench.contestants import distribute, start_fake_group
from bench.models import TinyUnit, tiny_units
from bench.scaling.checkpoint import box_on, entries, tensors
from bench.scaling.checkpoint import measure as measure_checkpoint
from bench.scaling.driver import SYSTEMS, Options, cases, exponents, paragraphs, slope, verdicts
from bench.scaling.worker import Case, Cost, Runner, collective_names, silent_collectives, stack
from small_runs import run_small

from fullshard.checkpoint.format.write_plan import RankInventory, TensorTable, plan_writes
from fullshard.comm import CollectiveTransport

SETTINGS = Options(units=(10, 100), ranks=(8, 64), usual_units=10, usual_ranks=8, limit_s=60.0)
# Messages are split in halves or not by their size, gathers are taken together if units are tiny: a few calls more.
TOLERANCE = 0.06


def fake_group(ranks: int) -> None:
    """Start a fake group; the one before ends."""
    if dist.is_initialized():
        dist.destroy_process_group()
    start_fake_group(ranks)


def calls(action: Callable[[], Any]) -> int:
    """Functions called, Python's and built-in ones, generators resumed included."""
    count = 0

    def seen(_: Any, event: str, __: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()
    sys.setprofile(seen)
    try:
        action()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def counts(system: str, units: int) -> dict[str, int]:
    """Calls of a new model's phases."""
    model, inputs = tiny_units(units), torch.ones(1, 16)
    made: list[Any] = []
    found = {"init": calls(lambda: made.append(distribute(system, model, TinyUnit, torch.device("cpu"))))}

    def step() -> None:
        made[0](inputs).sum().backward()

    found["first"] = calls(step)
    for parameter in made[0].parameters():
        parameter.grad = None
    found["steady"] = calls(step)
    return found


@pytest.mark.parametrize("system", ["fullshard", "fullshard-wrapper"])
def test_calls_grow_with_units_in_proportion(system: str) -> None:
    """Twenty more units cost four times what five more do, in each phase: nothing is quadratic."""
    fake_group(8)
    counts(system, 3)
    five, ten, thirty = (counts(system, units) for units in (5, 10, 30))
    for phase in five:
        assert thirty[phase] - ten[phase] <= 4 * (ten[phase] - five[phase]) * (1 + TOLERANCE), phase


@pytest.mark.parametrize("system", ["fullshard", "fullshard-wrapper"])
def test_calls_do_not_grow_with_ranks(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Initialisation and a step call as many functions on 1,024 ranks as on 8."""
    monkeypatch.setattr(CollectiveTransport, "tiny_bytes", 0)  # padded to 1,024 ranks, units are not tiny
    found = []
    for ranks in (8, 1024):
        fake_group(ranks)
        counts(system, 2)
        found.append(counts(system, 8))
    few, many = found
    # In the first forward the orders of all ranks are compared, once for all units: one call per rank at most.
    assert many["init"] <= few["init"] * (1 + TOLERANCE)
    assert many["steady"] <= few["steady"] * (1 + TOLERANCE) + 100
    assert many["first"] <= few["first"] * (1 + TOLERANCE) + 1024 + 200


def test_dividing_a_checkpoint_calls_in_proportion_to_ranks() -> None:
    """The first rank's decision takes a bounded number of calls per rank, however many tensors there are."""

    def taken(units: int, ranks: int) -> int:
        shapes = [shape for _, shape in tensors(units) if shape]  # one holder each
        own = {key: value for key, value in entries(units, 0, ranks).items() if value.shape}
        table_of_all = TensorTable.of(own).packed
        held = [
            RankInventory(
                None if rank else table_of_all,
                RankInventory.packed([(i, box_on(rank, ranks, s)) for i, s in enumerate(shapes)]),
                (),
            )
            for rank in range(ranks)
        ]
        return calls(lambda: plan_writes(held))

    few, more, most = taken(4, 16), taken(4, 64), taken(16, 64)
    assert more - few <= 48 * 45
    assert most - more <= 72 * 16  # by tensor, and not by part of one


def test_slopes() -> None:
    """An exponent is that of the power law; without two points there is none."""
    assert slope({1: 3.0, 10: 30.0, 100: 300.0}) == pytest.approx(1)
    assert slope({2: 5.0, 8: 5.0}) == pytest.approx(0)
    assert math.isnan(slope({10: 1.0}))


def made_up(system: str, power_of_units: float, power_of_ranks: float) -> list[dict[str, Any]]:
    """Costs that follow two powers."""
    found = []
    for over, units, ranks in (("ranks", 10, 8), ("ranks", 10, 64), ("units", 10, 8), ("units", 100, 8)):
        seconds = 1e-3 * units**power_of_units * ranks**power_of_ranks
        cost = asdict(Cost(seconds, seconds, seconds, 1024 * units, 2048 * units, 1 << 20))
        found.append({"system": system, "units": units, "ranks": ranks, "over": over, "cost": cost})
    return found


def test_verdicts() -> None:
    """What is in proportion to units passes, what grows with ranks or faster is named; peers are not judged."""
    good = exponents(made_up("fullshard", 1.0, 0.0))
    assert good["fullshard"]["init"] == pytest.approx({"units": 1.0, "ranks": 0.0})
    assert verdicts(good) == []
    assert len(verdicts(exponents(made_up("fullshard", 1.5, 0.0)))) == 3
    found = verdicts(exponents(made_up("fullshard-wrapper", 1.0, 0.5)))
    assert found[0] == "fullshard-wrapper, initialisation: exponent 0.50 in ranks, allowed 0.10"
    assert verdicts(exponents(made_up("fsdp2", 2.0, 1.0))) == []


def test_a_block_says_what_was_measured_and_what_not() -> None:
    """Each figure is in its column, what could not be measured is a dash."""
    made = made_up("fullshard", 1.0, 0.0)
    failure = {"failure": "more than 9 s"}
    costs = [made[0], {**{k: v for k, v in made[1].items() if k != "cost"}, **failure}, *made[2:]]
    result = {"costs": costs, "exponents": exponents(costs), "checkpoints": [{"units": 1, "ranks": 8, **failure}]}
    block = "\n".join(paragraphs(result, SETTINGS))
    assert "| fullshard, initialisation | 10 | - | - | 10 | 100 | 1.00 |" in block
    assert "Not measured: fullshard with 10 units on 64 ranks (more than 9 s)" in block
    assert "| 8 | 8 | - | - |" in block and "All of ours keep to it." in block


def test_cases_cover_both_axes() -> None:
    """All ranks with the usual units, all units with the usual ranks, each once, for every system alike."""
    found = cases(SYSTEMS, SETTINGS)
    for system in SYSTEMS:
        mine = [(over, case.units, case.ranks) for over, case in found if case.system == system]
        assert mine == [("ranks", 10, 8), ("ranks", 10, 64), ("units", 10, 8), ("units", 100, 8)]


def test_scaling(tmp_path: Path) -> None:
    """Two systems in processes of their own, with Python's memory of ours, and a checkpoint in this one."""
    options = "--units 2 --ranks 4 --usual-units 2 --usual-ranks 4 --no-checkpoints --only fullshard"
    page, stored = run_small(tmp_path, "scaling", options)
    assert [each["over"] for each in stored["costs"]] == ["ranks", "units"]
    first = stored["costs"][0]["cost"]
    assert min(first["init"], first["first"], first["steady"], first["python_bytes"]) > 0
    assert "| fullshard, 2 units, 4 ranks |" in page
    found = measure_checkpoint(units=1, ranks=8)
    assert found.shards >= 8 and found.index_bytes > 0 and found.sent > 0


def steady_step(system: str, ranks: int, *, silent: bool) -> tuple[int, int]:
    """Return, for a later step of a tiny model: collectives that reach the fake group, and copies of tensors.

    Both are counted by torch's profiler below the names of ``ProcessGroup``'s methods, which differ between versions.
    """
    with silent_collectives() if silent else contextlib.nullcontext():
        runner = Runner(Case(system, 3, ranks, 64))
        model = runner.distribute(stack(3, 64))
        runner.step(model)
        runner.forget(model)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            runner.step(model)
    names = [event.name for event in profiler.events()]
    return sum(name.startswith("c10d::") for name in names), names.count("aten::copy_")


@pytest.mark.parametrize("system", SYSTEMS)
def test_collectives_are_silenced_for_every_system(system: str) -> None:
    """No collective of ours or of a peer reaches the fake group, which copies once per rank."""
    fake_group(8)
    collectives, copies = steady_step(system, 8, silent=False)
    assert collectives >= 6, "an all-gather and a reduce-scatter per unit"
    silenced, few = steady_step(system, 8, silent=True)
    assert silenced == 0
    assert few <= copies - 3 * 8, "a copy per rank less in each all-gather"
    fake_group(64)
    # FSDP1 on CPU gathers into a list of chunks, one view per rank, which copies nothing.
    assert steady_step(system, 64, silent=True) == (0, few)


def test_silenced_collectives_are_restored() -> None:
    """Methods of a process group are the old ones afterwards."""
    fake_group(8)
    before = {name: vars(dist.ProcessGroup)[name] for name in collective_names()}
    with silent_collectives():
        assert all(vars(dist.ProcessGroup)[name] is not method for name, method in before.items())
    assert {name: vars(dist.ProcessGroup)[name] for name in before} == before
