"""Plans beside published tables."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.planned import published
from bench.planned.models import LLAMAS, MPT, MPTS, Llama, LlamaShape


def test_published_models() -> None:
    """Their parameters are as many as published, and there are as many rows as the page has."""
    rows = published.published_rows()
    assert {row.source for row in rows} >= {"llm-foundry", "torchtitan PR #165"} and len(rows) > 100
    assert len({row.name for row in rows}) == len(rows)
    with torch.device("meta"):
        for row in rows:
            if row.source == "llm-foundry":
                model = MPT(MPTS[row.text["model"]], int(row.text["seq"]))
                assert sum(each.numel() for each in model.parameters()) == int(row.text["params"]), row.name
        for name, shape in LLAMAS.items():
            count = sum(each.numel() for each in Llama(shape, 8).parameters())
            assert count / 1e9 == pytest.approx(float(re.findall(r"[\d.]+", name)[1]), rel=0.05), name


def test_published_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept by recomputation, by a loop, and by fused kernels, orders the peaks."""
    monkeypatch.setitem(LLAMAS, "tiny", LlamaShape(256, 4, 4, 2, 512, 512))
    row = next(row for row in published.published_rows() if row.text["model"] == "MPT-125m")
    program = dataclasses.replace(row.program, model="tiny", batch=4, sequence=256, microbatches=1)
    cluster = published.cluster_for(row)
    plans = [dataclasses.replace(program, recompute=how).plan(cluster) for how in ("full", "op", "layer", "none")]
    peaks = [plan.peak.nbytes for plan in plans]
    assert peaks == sorted(peaks) and peaks[0] < peaks[1] < peaks[3]
    base = dataclasses.replace(program, recompute="none")
    fused = dataclasses.replace(base, compiled=True).plan(cluster)
    assert fused.peak.nbytes < peaks[3] and fused.flops == plans[3].flops
    keeps = dataclasses.replace(base, keeps_logits=True).plan(cluster)
    assert keeps.resting - plans[3].resting == 4 * 256 * 512 * 4  # in fp32
