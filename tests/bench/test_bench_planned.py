"""Plans beside runs whose allocations are recorded."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from bench.overlap.cells import HOST, STREAMS, Cell, even_units
from bench.planned import driver, llama, modelled, mpt, published
from bench.planned.cases import FAKE_RANKS, GLOO_RANKS, Case, memory_cases


def test_memory_of_a_run() -> None:
    """Within a hundredth, at the same moment: on two ranks, and with recomputation on replicas."""
    assert len(list(memory_cases())) == 40
    cases = [
        Case(512, GLOO_RANKS),
        # bf16 takes minutes on processors without instructions for it
        Case(512, FAKE_RANKS, checkpoint=True, replicas=2),
    ]
    cells = list(driver.compare(cases))
    for cell in cells:
        assert cell["plan"]["peak"] == pytest.approx(cell["run"]["peak"], rel=0.01), cell
        assert cell["plan"]["resting"] == pytest.approx(cell["run"]["resting"], rel=0.01), cell
        assert list(cell["plan"]["place"]) == list(cell["run"]["place"]), cell
    page = "\n".join(driver.paragraphs(cells))
    assert "Of 2 configurations, the plan is off by 0." in page and "names the moment in 2 (target" in page


def test_time_on_a_modelled_network() -> None:
    """What schedules take, run and planned, the host's own work left out: with streams, and on a host that computes."""
    targets = [(cell.device, cell.ranks, cell.ratio) for cell in modelled.modelled_cells()]
    assert len(targets) == 18 and targets[:3] == [(STREAMS, 8, 0.3), (STREAMS, 8, 1.0), (STREAMS, 8, 3.0)]
    small = [Cell("even", even_units(3), device, 64, 1.0, "none") for device in (STREAMS, HOST)]
    cells = list(modelled.compare(small, rounds=1))
    assert all(abs(modelled.error_of(cell)) < 1e-3 for cell in cells), cells
    assert cells[0]["plan_seconds"] > 1.05 * sum(unit.forward + unit.backward for unit in even_units(3))
    slow = {**cells[0], "run_seconds": [2 * cells[0]["plan_seconds"]]}
    assert "off by 50.00 % at most in 1 cells (target: 3 %) (missed)" in "\n".join(modelled.paragraphs([slow]))
    assert "by more than 3 % in 0 of 1 cells" in "\n".join(modelled.paragraphs(cells))


def test_published_models() -> None:
    """Their parameters are as many as published, and there are as many rows as the page has."""
    rows = published.published_rows()
    assert {row.source for row in rows} >= {"llm-foundry", "torchtitan PR #165"} and len(rows) > 100
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        if row.source == "llm-foundry":
            with torch.device("meta"):
                model = mpt.MPT(mpt.SHAPES[row.text["model"]], int(row.text["seq"]))
            assert sum(each.numel() for each in model.parameters()) == int(row.text["params"]), row.name
    for name, shape in llama.SHAPES.items():
        with torch.device("meta"):
            count = sum(each.numel() for each in llama.Llama(shape, 8).parameters())
        assert count / 1e9 == pytest.approx(float(re.findall(r"[\d.]+", name)[1]), rel=0.05), name


def test_published_programs() -> None:
    """What is kept by recomputation, by a loop, and by fused kernels, orders the peaks; a fit reaches its row."""
    row = next(row for row in published.published_rows() if row.text["model"] == "MPT-125m")
    llama.SHAPES["tiny"] = llama.LlamaShape(256, 4, 4, 2, 512, 512)
    try:
        program = dataclasses.replace(row.program, model="tiny", batch=4, sequence=256, microbatches=1)
        cluster = published.cluster_for(row)
        peaks = [
            dataclasses.replace(program, recompute=how).plan(cluster).peak.nbytes
            for how in ("full", "op", "layer", "none")
        ]
        assert peaks == sorted(peaks) and peaks[0] < peaks[1] < peaks[3]
        base = dataclasses.replace(program, recompute="none")
        fused = dataclasses.replace(base, compiled=True).plan(cluster)
        assert fused.peak.nbytes < peaks[3] and fused.flops == base.plan(cluster).flops
        peer = dataclasses.replace(base, peer=True).plan(cluster)
        assert peer.peak.nbytes == pytest.approx(peaks[3], rel=0.05) and peer.reserved >= peer.peak.nbytes
        keeps = dataclasses.replace(base, keeps_logits=True).plan(cluster)
        assert keeps.resting - base.plan(cluster).resting == 4 * 256 * 512 * 4  # in fp32
    finally:
        del llama.SHAPES["tiny"]


def test_published_pages() -> None:
    """Errors beside targets; one row of a source is fitted."""
    memory = [
        {"row": name, "source": "s", "judged": judged, "published": value, "fits": None, "reserved": 10.5, "peer": 9.5,
         "allocated": 9.0, "planned_fits": True, "pair": pair}
        for name, judged, value, pair in (("a", True, 10.0, None), ("b", False, 20.0, "p"), ("c", False, 18.0, "p"))
    ]  # fmt: skip
    page = "\n".join(published.memory_paragraphs(memory))
    assert (
        "off by 5.0 % in the median and 5.0 % at most (target: 10 % and 20 %); with FSDP2" in page
        and "-100.0 %" in page
    )
    assert "(missed)" in page  # the difference
    time = [
        {"row": f"r{at}", "source": "s", "gpu": "H100", "share": 0.5, "fitted": at == 0, "published": 100.0,
         "planned": planned, "infiniband": planned, "slope": ["m", gpus]}
        for at, (planned, gpus) in enumerate(((100.0, 128), (90.0, 512)))
    ]  # fmt: skip
    page = "\n".join(published.time_paragraphs(time))
    assert (
        "| s, H100 | 0.500 | 1 | 10.0 %, 10.0 % | 10.0 %, 10.0 % |" in page and "| m | 1.000 | 0.900 | 0.900 |" in page
    )
