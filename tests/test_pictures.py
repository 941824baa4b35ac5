"""The pictures of the documentation: stored data is current where it is of code, and every picture is drawn from it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs"))

from bench.ledger import Block, Span
from pictures import architecture, bytes_per_rank, draw, meshes, recorder, schedule, step, style


@pytest.mark.parametrize("name", ["architecture", "schedule", "bytes", "summary"])
def test_stored_data_is_that_of_the_code(name: str) -> None:
    """Imports, golden trace, formulas, figures; else run ``python docs/pictures/draw.py NAME --record``."""
    assert json.loads(json.dumps(draw.module_of(name).record())) == draw.stored(name)


def test_meshes_are_those_of_the_code() -> None:
    """Of one of the eight ranks: its rows, and whom it exchanges what with."""
    stored = draw.stored("meshes")["meshes"]
    for name, found in meshes.record(ranks=[3])["meshes"].items():
        assert found["rows"]["3"] == stored[name]["rows"]["3"] and set(found["groups"]) == set(stored[name]["groups"])
        for kind, (own,) in found["groups"].items():
            assert own in stored[name]["groups"][kind] and 3 in own


@pytest.mark.parametrize("name", draw.PICTURES)
def test_every_picture_is_drawn_in_both_themes(name: str, tmp_path: Path) -> None:
    """As text in paths, with a background, without the date; the stored ones are there and as large."""
    pytest.importorskip("matplotlib")
    paths = draw.draw(name, draw.stored(name), tmp_path)
    assert [path.name for path in paths] == [f"{name}.svg", f"{name}.dark.svg"]
    for path, palette in zip(paths, style.PALETTES, strict=True):
        text, stored = path.read_text(), (style.FOLDER / path.name).read_text()
        assert palette.background in text and "<text" not in text and "dc:date" not in text
        assert re.findall(r'viewBox="([^"]*)"', stored) == re.findall(r'viewBox="([^"]*)"', text)
        if sys.version_info >= (3, 11):  # constraints.txt pins matplotlib there, and so every line of a picture
            assert stored == text, f"python docs/pictures/draw.py {name}"


def test_every_folder_and_every_import_is_drawn() -> None:
    """All folders are boxes, arrows go down, and follow from no others."""
    folders = {path.parent.name for path in architecture.PACKAGE.glob("*/__init__.py")}
    assert folders < set(architecture.ROOMS)
    drawn = draw.stored("architecture")["reduced"]
    assert all(architecture.ROOMS[own][0] < architecture.ROOMS[other][0] for own, other in drawn)
    edges = {"train": ["engine", "comm"], "engine": ["comm"], "comm": ["layout"]}
    assert architecture.reduced(edges) == [["train", "engine"], ["engine", "comm"], ["comm", "layout"]]


def test_a_schedule_has_overlap_where_the_trace_has_it() -> None:
    """The next block is all-gathered while one computes, and reduced while the one before computes."""
    lanes = schedule.bars(schedule.record()["events"])
    compute = {(bar.unit, bar.what): bar for bar in lanes["compute"]}
    gathers, reductions = lanes["all-gather"], {bar.unit: bar for bar in lanes["reduce-scatter"]}
    (first,) = (bar for bar in gathers if bar.unit == "blocks.1" and bar.begin < 3)
    assert first[2:] == compute["blocks.0", "forward"][2:]
    assert reductions["blocks.2"][2:] == compute["blocks.1", "backward"][2:]


def test_formulas_are_near_the_counted_bytes() -> None:
    """Of the steps that memory.svg shows: state at rest within 1 %, unsharded tensors within 5 %."""
    stored = draw.stored("memory")
    width, blocks = stored["shape"]["width"], stored["shape"]["blocks"]
    block = 12 * width**2 + 13 * width
    root = stored["systems"]["fullshard"]["parameters"] - blocks * block
    for system, name in {"fullshard": "ZeRO-3", "kept": "ZeRO-2"}.items():
        rows = stored["systems"][system]["memory"]
        (strategy,) = (each for each in bytes_per_rank.STRATEGIES if each.name == name)
        expected = strategy.bytes_on([block] * blocks, stored["ranks"], bytes_per_rank.Widths())
        resting = max(row[1] for row in rows) + max(row[2] for row in rows)
        share = 16 * root / stored["ranks"]
        assert resting == pytest.approx(sum(expected.values()) - expected["unsharded"] + share, rel=0.01)
        assert max(row[3] + row[4] for row in rows) == pytest.approx(expected["unsharded"] + 8 * root, rel=0.05)
    assert sum(bytes_per_rank.LlamaShape().units) == 8_030_261_248


def test_a_recorded_step_knows_what_memory_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a rank of a fake group: what is at rest, sharded gradients, and unsharded ones of one block at least."""
    import torch
    import torch.distributed as dist

    from fullshard.engine.parameters.sharded import ShardedParameter

    for name in ("collect_gradient", "accumulate"):
        monkeypatch.setattr(ShardedParameter, name, getattr(ShardedParameter, name))  # restored afterwards
    threads = torch.get_num_threads()
    try:
        built = recorder.build(width=128, blocks=2, tokens=16, ranks=4, system="fullshard")
        found: dict[str, Any] = built.record(steps=1, warmup=1)
    finally:
        dist.destroy_process_group()
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)
    rest, sharded, parameters, gradients, _ = (max(row[i] for row in found["memory"]) for i in range(1, 6))
    nbytes = 4 * found["parameters"]
    assert rest == pytest.approx(3 * nbytes / 4, rel=0.1) and sharded == pytest.approx(nbytes / 4, rel=0.1)
    assert parameters > nbytes / 2 and gradients > nbytes / 3
    computed = {(phase, unit) for phase, unit, *_ in found["compute"]}
    assert computed >= {("forward", "blocks.0"), ("backward", "blocks.1"), ("optimizer", "")}
    assert any(name == "fullshard::all_gather (blocks.1)" for name, *_ in found["operations"])


def test_recorded_pictures_are_of_one_step() -> None:
    """Waiting is no computation, memory is named by what made it, and a step begins with what is at rest."""
    gaps = [Span("", 0, 12), Span("", 14, 16), Span("", 19, 30)]
    assert recorder.without((10, 20), gaps) == [(12, 14), (16, 19)]
    assert recorder.without((10, 20), []) == [(10, 20)] and recorder.without((20, 29), gaps) == []
    whole = Span("step", 10, 20)
    made = {
        "at rest": Block(1, 8, 0, None, (), ()),
        "parameters": Block(2, 8, 11, 12, (), ("fullshard::all_gather (blocks.0)", "aten::empty")),
        "gradients": Block(3, 8, 11, 12, (), ("fullshard::reduce_scatter (blocks.0)",)),
        "other": Block(4, 8, 11, 12, (), ("aten::mm",)),
    }
    assert {name: recorder.kind_of(block, whole, {}) for name, block in made.items()} == {name: name for name in made}
    assert recorder.kind_of(made["other"], whole, {id(made["other"]): recorder.SHARDED}) == "sharded gradients"
    data = draw.stored("step")
    first = [data["memory"][0][0], data["memory"][0][1] + 34 * 2**20, *data["memory"][0][2:]]
    assert step.rests(data) and not step.rests({**data, "memory": [first, *data["memory"][1:]]})
    for name in ("step", "memory"):
        assert draw.module_of(name).SLOW and {"cpu", "torch", "commit"} <= set(draw.stored(name)["environment"])
