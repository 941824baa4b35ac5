"""Checkpoints of torch.distributed.checkpoint as programs lay them out: under other names, nested, bare."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

import fullshard
from checkpoint.kinds import Model, adam, build, train
from compare import assert_equal
from fullshard.checkpoint.key_map import with_prefixes
from fullshard.errors import CheckpointError
from ranks import Rank, on_ranks

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
LAYOUTS = {
    "model and optim": (lambda model, optim: {"model": model, "optim": optim, "step": 7}, {"optim": "optimizer"}),
    "app of another name": (
        lambda model, optim: {"state": {"net": model, "opt": optim}, "step": 7},
        {"state.net": "model", "state.opt": "optimizer"},
    ),
}


@on_ranks(2)
@pytest.mark.parametrize(("layout", "flattened"), [(layout, bool(i % 2)) for i, layout in enumerate(LAYOUTS)])
def test_model_and_optimizer_under_other_names(rank: Rank, layout: str, flattened: bool, tmp_path: Path) -> None:
    """Training goes on as if nothing had happened, and plain values are returned."""
    model = build(rank, "fully_shard", seed=1)
    optimizer = adam(model)
    train(model, optimizer, 0, 2)
    options = FLAT if flattened else None
    lay_out, key_map = LAYOUTS[layout]
    saved = lay_out(get_model_state_dict(model), get_optimizer_state_dict(model, optimizer, options=options))
    dcp.save(saved, checkpoint_id=tmp_path / "torch")
    expected = train(model, optimizer, 2, 4)
    for kind in ("fully_shard", "flat"):
        loaded = build(rank, kind, seed=2)
        its = adam(loaded, lr=1.0)
        assert fullshard.load(tmp_path / "torch", loaded, its, key_map={**key_map, "step": "extra.step"}) == {"step": 7}
        assert train(loaded, its, 2, 4) == expected


@on_ranks(2)
def test_bare_weights(rank: Rank, tmp_path: Path) -> None:
    """A state dict of the model alone; without its optimizer's state an optimizer is an error."""
    model = build(rank, "fully_shard", seed=1)
    dcp.save(get_model_state_dict(model), checkpoint_id=tmp_path / "bare")
    loaded = build(rank, "flat", seed=2)
    with pytest.raises(CheckpointError, match=r"names of the model .* are under '': .* pass key_map=\{'': 'model'\}"):
        fullshard.load(tmp_path / "bare", loaded)
    assert fullshard.load(tmp_path / "bare", loaded, key_map={"": "model"}) == {}
    for strict in (True, False):
        with pytest.raises(CheckpointError, match=r"no optimizer under 'optimizer'.*key_map=\{'\.\.\.': 'optimizer'\}"):
            fullshard.load(tmp_path / "bare", loaded, adam(loaded), key_map={"": "model"}, strict=strict)
    assert_equal(dict(fullshard.full_tensors(model)), dict(fullshard.full_tensors(loaded)), "weights")


@on_ranks(2)
def test_key_map_takes_the_place_of_what_is_called_the_model(rank: Rank, tmp_path: Path) -> None:
    """Averages are loaded in the place of the weights, and entries of dictionaries one by one."""
    model, average = build(rank, "fully_shard", seed=1), build(rank, "fully_shard", seed=2)
    weights = {"model": get_model_state_dict(model), "ema": get_model_state_dict(average)}
    dcp.save({**weights, "epoch": {"count": 3}, "config": Path("no plain value")}, checkpoint_id=tmp_path / "x")
    loaded = build(rank, "fully_shard", seed=3)
    chosen = {"ema": "model", "epoch.count": "extra.epoch"}
    assert fullshard.load(tmp_path / "x", loaded, key_map=chosen) == {"epoch": 3}
    assert_equal(dict(fullshard.full_tensors(loaded)), dict(fullshard.full_tensors(average)), "weights")


@on_ranks(2)
@pytest.mark.parametrize("flattened", [False, True])
def test_optimizer_without_state(rank: Rank, flattened: bool, tmp_path: Path) -> None:
    """Its learning rate is loaded."""
    model = build(rank, "fully_shard", seed=1)
    options = FLAT if flattened else None
    sgd = torch.optim.SGD(model.parameters(), lr=0.25)
    weights = get_model_state_dict(model)
    state = get_optimizer_state_dict(model, sgd, options=options)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "one")
    its = torch.optim.SGD(model.parameters(), lr=1.0)
    fullshard.load(tmp_path / "one", model, its)
    assert its.param_groups[0]["lr"] == 0.25


@on_ranks(2)
def test_values_with_tensors_can_be_renamed(rank: Rank, tmp_path: Path) -> None:
    """Tensors of a value are stored beside it, under its old name."""
    model = build(rank, "fully_shard", seed=1)
    fullshard.save(tmp_path / "x", model, progress={"losses": torch.arange(9_000.0)})
    found = fullshard.load(tmp_path / "x", model, key_map={"extra.progress": "extra.state"})
    assert_equal(found["state"], {"losses": torch.arange(9_000.0, device="cpu")}, "values")


@on_ranks(2)
def test_checkpoints_of_fullshard_are_taken_as_they_are(rank: Rank, tmp_path: Path) -> None:
    """If the model has changed since, its weights are not taken from the averages beside it."""
    model, average = build(rank, "fully_shard", seed=1), build(rank, "fully_shard", seed=2)
    fullshard.save(tmp_path / "x", torch.nn.Linear(2, 2), ema=average)
    before = dict(fullshard.full_tensors(model))
    with pytest.raises(CheckpointError, match=r"none of the \d+ names of the model"):
        fullshard.load(tmp_path / "x", model, strict=False)
    assert_equal(dict(fullshard.full_tensors(model)), before, "weights")


def test_error_names_what_is_there(tmp_path: Any) -> None:
    """A checkpoint of another model is refused with its top-level keys, and the model stays as it is."""
    dcp.save({"net": {"other.weight": torch.ones(2)}, "step": 1}, checkpoint_id=tmp_path / "x", no_dist=True)
    model = Model(1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"'net' \(1 key\), 'step' \(1 key\): .*key_map=\{'\.\.\.': 'model'\}"):
        fullshard.load(tmp_path / "x", model)
    assert_equal(dict(model.state_dict()), before, "model")


@pytest.mark.parametrize(
    ("key_map", "message"),
    [
        ({"ema": "weights"}, "expected 'model', 'optimizer' or 'extra.NAME' for 'ema', found 'weights'"),
        ({"epcoh": "extra.epoch"}, "no key of the checkpoint begins with 'epcoh'; they begin with 'model'"),
        ({"scheduler": "extra.scheduler"}, "'scheduler.last_epoch' of the checkpoint is an entry of a dictionary"),
    ],
)
def test_key_map_that_is_wrong_is_an_error(key_map: dict[str, str], message: str, tmp_path: Path) -> None:
    """Nothing would be loaded, or something else, without a word."""
    saved = {"model": dict(Model(2).state_dict()), "ema": dict(Model(3).state_dict()), "rng": {"a": 1}}
    dcp.save({**saved, "scheduler": {"last_epoch": 5}}, checkpoint_id=tmp_path / "x", no_dist=True)
    model = Model(1)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        fullshard.load(tmp_path / "x", model, key_map=key_map)
    fullshard.load(tmp_path / "x", model, key_map={"ema.": "model."})
    assert_equal(dict(model.state_dict()), dict(Model(3).state_dict()), "averages")


def test_error_says_where_most_of_the_names_are(tmp_path: Path) -> None:
    """Also if not strict: nothing would be loaded. An extra model that is not there keeps its values then."""
    saved = dict(Model(2).state_dict())
    name = sorted(saved)[0]
    missing = {key: value for key, value in saved.items() if key != name}
    dcp.save({"net": missing}, checkpoint_id=tmp_path / "x", no_dist=True)
    expected = rf"{len(missing)} of them are under 'net': to load these, pass key_map=\{{'net': 'model'\}}"
    with pytest.raises(CheckpointError, match=expected):
        fullshard.load(tmp_path / "x", Model(1), strict=False)
    fullshard.load(tmp_path / "x", Model(1), strict=False, key_map={"net": "model"}, ema=Model(4))


def test_prefixes() -> None:
    """Longest first, on whole words; what had a new prefix before makes room; two keys that become one are an error."""
    keys = ["a.b.w", "a.w", "ab.w", "step", "model.w", "model.v"]
    assert with_prefixes(keys, {"a": "model", "a.b": "extra.x"}) == {
        "extra.x.w": "a.b.w",
        "model.w": "a.w",
        "ab.w": "ab.w",
        "step": "step",
    }
    assert with_prefixes(["w"], {"": "model"}) == {"model.w": "w"}
    with pytest.raises(CheckpointError, match=r"both become 'model\.w'"):
        with_prefixes(["a.w", "b.w"], {"a": "model", "b": "model"})
