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
from checkpoint.kinds import Model, adam, build, shared_folder, train
from compare import assert_equal
from fullshard.checkpoint.key_map import find_model, find_optimizer, top_level, with_prefixes
from fullshard.errors import CheckpointError
from ranks import Rank, on_ranks

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
LAYOUTS = {
    "model and optim": lambda model, optim: {"model": model, "optim": optim, "step": 7},
    "app of another name": lambda model, optim: {"state": {"net": model, "opt": optim}, "step": 7},
}


@on_ranks(2)
@pytest.mark.parametrize(("layout", "flattened"), [(layout, bool(i % 2)) for i, layout in enumerate(LAYOUTS)])
def test_model_and_optimizer_are_found_by_the_names_of_the_model(rank: Rank, layout: str, flattened: bool) -> None:
    """Training goes on as if nothing had happened, and plain values are returned."""
    model = build(rank, "fully_shard", seed=1)
    optimizer = adam(model)
    train(model, optimizer, 0, 2)
    folder = shared_folder(rank)
    options = FLAT if flattened else None
    saved = LAYOUTS[layout](get_model_state_dict(model), get_optimizer_state_dict(model, optimizer, options=options))
    dcp.save(saved, checkpoint_id=folder / "torch")
    expected = train(model, optimizer, 2, 4)
    for kind in ("fully_shard", "flat"):
        loaded = build(rank, kind, seed=2)
        its = adam(loaded, lr=1.0)
        assert fullshard.load(folder / "torch", loaded, its, key_map={"step": "extra.step"}) == {"step": 7}
        assert train(loaded, its, 2, 4) == expected


@on_ranks(2)
def test_bare_weights(rank: Rank) -> None:
    """A state dict of the model alone; without its optimizer's state an optimizer is an error."""
    model = build(rank, "fully_shard", seed=1)
    folder = shared_folder(rank)
    dcp.save(get_model_state_dict(model), checkpoint_id=folder / "bare")
    loaded = build(rank, "flat", seed=2)
    assert fullshard.load(folder / "bare", loaded) == {}
    with pytest.raises(CheckpointError, match="does not match"):
        fullshard.load(folder / "bare", loaded, adam(loaded))
    other = build(rank, "flat", seed=3)
    fullshard.load(folder / "bare", other, key_map={"": "model"})
    assert_equal(dict(fullshard.full_tensors(other)), dict(fullshard.full_tensors(loaded)), "weights")


@on_ranks(2)
def test_key_map_chooses_among_several(rank: Rank) -> None:
    """With two copies of the weights nothing is guessed: the error names both, and ``key_map`` says which."""
    model, average = build(rank, "fully_shard", seed=1), build(rank, "fully_shard", seed=2)
    folder = shared_folder(rank)
    saved = {"net": get_model_state_dict(model), "ema": get_model_state_dict(average), "epoch": {"count": 3}}
    dcp.save(saved, checkpoint_id=folder / "two")
    loaded = build(rank, "fully_shard", seed=3)
    with pytest.raises(CheckpointError, match=r"the prefixes 'ema', 'net': .* key_map=\{'\.\.\.': 'model'\}"):
        fullshard.load(folder / "two", loaded)
    chosen = {"net": "model", "epoch.count": "extra.epoch"}
    assert fullshard.load(folder / "two", loaded, key_map=chosen) == {"epoch": 3}
    assert_equal(dict(fullshard.full_tensors(loaded)), dict(fullshard.full_tensors(model)), "weights")


@on_ranks(2)
def test_key_map_takes_the_place_of_what_is_called_the_model(rank: Rank) -> None:
    """Averages are loaded in the place of the weights, with the optimizer, which is looked for as before."""
    model, average = build(rank, "fully_shard", seed=1), build(rank, "fully_shard", seed=2)
    optimizer = adam(model)
    train(model, optimizer, 0, 1)
    folder = shared_folder(rank)
    weights = {"model": get_model_state_dict(model), "ema": get_model_state_dict(average)}
    saved = {**weights, "optim": get_optimizer_state_dict(model, optimizer), "config": Path("no plain value")}
    dcp.save(saved, checkpoint_id=folder / "x")
    loaded = build(rank, "fully_shard", seed=3)
    its = adam(loaded)
    assert fullshard.load(folder / "x", loaded, its, key_map={"ema": "model"}) == {}
    assert_equal(dict(fullshard.full_tensors(loaded)), dict(fullshard.full_tensors(average)), "weights")
    assert its.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()


@on_ranks(2)
@pytest.mark.parametrize("flattened", [False, True])
def test_optimizer_without_state_is_found_by_its_groups(rank: Rank, flattened: bool) -> None:
    """Its learning rate is loaded; of two optimizers on the same parameters none is guessed."""
    model = build(rank, "fully_shard", seed=1)
    options = FLAT if flattened else None
    sgd, momentum = (torch.optim.SGD(model.parameters(), lr=0.25, momentum=m) for m in (0.0, 0.5))
    train(model, momentum, 0, 1)
    folder, weights = shared_folder(rank), get_model_state_dict(model)
    states = [get_optimizer_state_dict(model, each, options=options) for each in (sgd, momentum)]
    dcp.save({"net": weights, "opt": states[0]}, checkpoint_id=folder / "one")
    dcp.save({"net": weights, "a": states[0], "b": states[1]}, checkpoint_id=folder / "two")
    its = torch.optim.SGD(model.parameters(), lr=1.0)
    fullshard.load(folder / "one", model, its)
    assert its.param_groups[0]["lr"] == 0.25
    with pytest.raises(CheckpointError, match=r"candidates for the optimizer, under the prefixes 'a', 'b'"):
        fullshard.load(folder / "two", model, its)


@on_ranks(2)
def test_values_with_tensors_can_be_renamed(rank: Rank) -> None:
    """Tensors of a value are stored beside it, under its old name."""
    model = build(rank, "fully_shard", seed=1)
    folder = shared_folder(rank)
    fullshard.save(folder / "x", model, progress={"losses": torch.arange(9_000.0)})
    found = fullshard.load(folder / "x", model, key_map={"extra.progress": "extra.state"})
    assert_equal(found["state"], {"losses": torch.arange(9_000.0, device="cpu")}, "values")


@on_ranks(2)
def test_checkpoints_of_fullshard_are_taken_as_they_are(rank: Rank) -> None:
    """If the model has changed since, its weights are not taken from the averages beside it."""
    model, average = build(rank, "fully_shard", seed=1), build(rank, "fully_shard", seed=2)
    folder = shared_folder(rank)
    fullshard.save(folder / "x", torch.nn.Linear(2, 2), ema=average)
    before = dict(fullshard.full_tensors(model))
    with pytest.raises(CheckpointError, match=r"none of the \d+ names of the model"):
        fullshard.load(folder / "x", model, strict=False)
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


def test_places_are_found_by_names() -> None:
    """A model of the name ``model`` in bare weights, modules named ``state``, repeated modules, and wrapped ones."""
    llama = {"model.embed.weight", "model.layers.0.weight", "lm_head.weight"}
    assert find_model(sorted(llama), llama) == {"": "model"}
    assert find_model([f"model.{name}" for name in llama], llama) == {"model": "model"}
    assert find_model([f"model.module.{name}" for name in llama], llama) == {"model.module": "model"}
    nested = {"state.fc.weight", "out.weight"}
    keys = [f"state.net.{name}" for name in nested] + [f"state.opt.state.{name}.exp_avg" for name in nested]
    assert find_model(keys, nested) == {"state.net": "model"}
    assert find_optimizer(keys, nested) == {"state.opt": "optimizer"}
    repeated = {"0.weight", "0.bias", "1.0.weight", "1.0.bias"}
    assert find_model([f"net.{name}" for name in repeated], repeated) == {"net": "model"}
    assert find_model(["model.conv.weight", "model.norm.weight"], {"weight"}) == {}
    assert find_model(["net.a.weight", "ema.a.weight", "ema.b.weight"], {"c.weight"}) == {}
    with pytest.raises(CheckpointError, match="under the prefixes 'ema', 'net'"):
        find_model(["net.a.weight", "ema.a.weight", "ema.b.weight"], {"a.weight", "b.weight"})
    assert find_optimizer(["x.y"], llama) == {}
    two = ["g.state.lm_head.weight.step", "g.param_groups.0.lr", "d.state.conv.weight.step", "d.param_groups.0.lr"]
    assert find_optimizer(two, llama) == {"g": "optimizer"}
    with pytest.raises(CheckpointError, match="under the prefixes 'g', 'plain'"):
        find_optimizer([*two, "plain.param_groups.0.lr"], llama)
    assert top_level(["a.x", "a.y", "b"]) == "'a' (2 keys), 'b' (1 key)"
