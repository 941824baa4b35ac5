"""Choices of units: what they shard, the network that their plans assume, and a page that is up to date."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from bench.wrap_model import (
    AS_BANDWIDTH,
    CHOICES,
    COLUMNS,
    EFA,
    GPT,
    HYBRID,
    INFINIBAND,
    PAGE,
    PLAIN,
    RECOMMENDED,
    WITHIN,
)

from bench import wrap_model
from fullshard.engine.ownership import unit_of
from fullshard.planning.cluster import PRESETS
from fullshard.planning.simulation.network import Network
from fullshard.planning.simulation.ranks import modelled_ranks

SMALL = dataclasses.replace(GPT, title="small", width=64, blocks=4, heads=2, key_value_heads=1, hidden=128, gated=True,
                            vocabulary=500, sequence=32, checkpoint=True)  # fmt: skip
EACH = [f"blocks.{number}" for number in range(4)]


def test_units_of_the_choices() -> None:
    """Every row makes the units that it says, of all parameters, with these settings."""
    expected = {name: ["embed", *EACH, "norm"] for name in CHOICES}
    expected |= {"the model is one unit": [], PLAIN: EACH, "blocks, norm + head": [*EACH, "norm"]}
    expected |= {
        "blocks, embed, norm, head": ["embed", *EACH, "norm", "head"],
        wrap_model.BY_TWO: ["embed", "blocks.0", "blocks.2", "norm"],
        wrap_model.BY_FOUR: ["embed", "blocks.0", "norm"],
    }
    for name, units in CHOICES.items():
        with modelled_ranks(64, Network(1e9, fills=False)), torch.device("meta"):
            model = units.shard(wrap_model.Decoder(SMALL), 64)
            found = {module: unit for module, each in model.named_modules() if (unit := unit_of(each)) is not None}
            first = {
                found[module]: module for module in reversed(found)
            }  # modules of one unit are named after the first
        assert sorted(first.values()) == sorted(["", *expected[name]]), name
        assert {unit.mesh.replicas for unit in first} == {8 if units.hybrid else 1}, name
        settings = {module: unit.settings.reshard_after_forward for unit, module in first.items()}
        assert settings.get("blocks.0", units.reshard) == units.reshard and settings[""] is None, name


def test_networks_of_the_readings() -> None:
    """A message of the measured size takes the measured time, whatever it is read as; so do all-reduces."""
    for reading in (EFA, AS_BANDWIDTH):
        link = wrap_model.cluster_of(reading).outer[64]
        assert link.latency + 256e6 / link.bandwidth == pytest.approx(20e-6 + 256e6 / 11.04e9, rel=0.01)
        reduced = link.all_reduce_latency + 256e6 / link.all_reduce_bandwidth
        assert reduced == pytest.approx(20e-6 + 256e6 / 32.94e9, rel=0.01)
    assert wrap_model.cluster_of() == PRESETS["h100"] and "NCCL" in wrap_model.cluster_of(INFINIBAND).source
    hybrid = CHOICES[HYBRID]
    assert not hybrid.applies(8) and hybrid.applies(64) and not CHOICES[WITHIN].applies(8)
    assert CHOICES[RECOMMENDED].applies(8)


def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All tables and a plot; one copy per node takes more memory, and kept units save all-gathers."""
    few = {name: CHOICES[name] for name in (PLAIN, RECOMMENDED, *wrap_model.COMPARED)}
    changed = {
        "MODELS": (dataclasses.replace(SMALL, blocks=2),),
        "COLUMNS": ((8, EFA), (64, EFA)),
        "MANY": (64,),
        "CHOICES": few,
    }
    for name, value in {**changed, "TOKEN_FACTORS": (1, 2)}.items():
        monkeypatch.setattr(wrap_model, name, value)
    page = tmp_path / "page.md"
    wrap_model.run(wrap_model.Options(write_document=True, document=page))
    text = page.read_text(encoding="utf-8")
    assert text.count("<!-- /bench -->") == 3 and f"| **{RECOMMENDED}** |" in text and f"| {HYBRID} | - |" in text
    assert text.count("| small, 64 |") == 4  # tokens, and three readings
    assert (tmp_path / "units.png").stat().st_size > 10_000 and RECOMMENDED in capsys.readouterr().out


def test_the_page_is_up_to_date() -> None:
    """The recommended row, planned anew; and the step gets longer with nodes on the measured network."""
    found = {
        case: wrap_model.outcome(case) for column in COLUMNS for case in [wrap_model.Case(GPT, RECOMMENDED, *column)]
    }
    row = "| " + " | ".join(wrap_model.row(found, GPT, RECOMMENDED)) + " |"
    assert row in PAGE.read_text(encoding="utf-8"), "stale: python -m bench wrap_model --write-document"
    steps = [outcome.seconds for case, outcome in found.items() if case.reading == EFA]
    assert steps == sorted(steps)
