"""What grows with units and ranks, by counting calls and not seconds; and a small run of the benchmark of it."""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bench.contestants import distribute, start_fake_group
from bench.models import TinyUnit, tiny_units
from bench.scaling.checkpoint import box_on, entries, tensors
from bench.scaling.driver import SYSTEMS
from bench.scaling.worker import Case, Runner, silent_collectives, stack
from bench.teams import Launch
from small_runs import run_small

from fullshard.checkpoint.format.write_plan import RankInventory, TensorTable, plan_writes
from fullshard.comm import CollectiveTransport

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
    """Initialization and a step call as many functions on 1,024 ranks as on 8."""
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


@pytest.mark.parametrize("system", ["fullshard", "fullshard-wrapper"])
def test_numbers_made_in_python_do_not_grow_with_ranks(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call can cost as much as there are ranks: a tensor of a Python number for each."""
    real, sizes, found = torch.tensor, [0], []

    def counted(*arguments: Any, **options: Any) -> torch.Tensor:
        made = real(*arguments, **options)
        sizes.append(made.numel())
        return made

    monkeypatch.setattr(torch, "tensor", counted)
    for ranks in (8, 1024):
        fake_group(ranks)
        sizes.clear()
        counts(system, 4)
        found.append(max(sizes))
    assert found[0] == found[1]


def test_dividing_a_checkpoint_calls_in_proportion_to_ranks() -> None:
    """The write plan takes a bounded number of calls per rank, however many tensors there are."""

    def taken(units: int, ranks: int) -> int:
        shapes = [shape for _, shape in tensors(units) if shape]  # one holder each
        own = {key: value for key, value in entries(units, 0, ranks).items() if value.shape}
        table_of_all = TensorTable.of(own).packed
        held = [
            RankInventory(
                table_of_all,
                RankInventory.packed([(i, box_on(rank, ranks, s)) for i, s in enumerate(shapes)]),
                (),
            )
            for rank in range(ranks)
        ]
        return calls(lambda: plan_writes(held))

    few, more, most = taken(4, 16), taken(4, 64), taken(16, 64)
    assert more - few <= 48 * 45
    assert most - more <= 72 * 16  # by tensor, and not by part of one


def test_scaling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same cases for ours and a peer, here in this process, with Python's memory of ours; and a checkpoint."""

    def ask_here(launch: Launch, _: float, do: str, /, **request: Any) -> dict[str, Any]:
        return {"answers": [getattr(importlib.import_module(launch.worker).build(), do)(**request)]}

    monkeypatch.setattr("bench.scaling.driver.ask_alone", ask_here)
    monkeypatch.setattr("bench.scaling.driver.CHECKPOINTS", ((1, 8),))
    options = "--units 2 --ranks 4 --usual-units 2 --usual-ranks 4 --only fullshard --only fsdp2"
    page, stored = run_small(tmp_path, "scaling", options)
    assert [(each["system"], each["over"]) for each in stored["costs"]] == [
        (system, over) for system in ("fullshard", "fsdp2") for over in ("ranks", "units")
    ]
    first = stored["costs"][0]["cost"]
    assert min(first["init"], first["first"], first["steady"], first["python_bytes"]) > 0
    assert "| fullshard, 2 units, 4 ranks |" in page and "| fsdp2, steady step |" in page
    (saved,) = stored["checkpoints"]
    assert saved["cost"]["shards"] >= 8 and saved["cost"]["index_bytes"] > 0 and "| 8 | 8 |" in page


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
