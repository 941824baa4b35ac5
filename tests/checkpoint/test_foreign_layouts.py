"""Checkpoints of torch.distributed.checkpoint as programs lay them out: under other names, nested, bare."""

from __future__ import annotations

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
from fullshard.checkpoint.key_map import find_prefixes, top_level, with_prefixes
from fullshard.errors import CheckpointError
from ranks import Rank, on_ranks

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
LAYOUTS = {
    "model and optim": lambda model, optim: {"model": model, "optim": optim, "step": 7},
    "app": lambda model, optim: {"app": {"model": model, "optim": optim}, "step": 7},
    "app of another name": lambda model, optim: {"state": {"net": model, "opt": optim}, "step": 7},
    "state dicts": lambda model, optim: {"model_state_dict": model, "optimizer_state_dict": optim, "step": 7},
}


@on_ranks(2)
@pytest.mark.parametrize("flattened", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
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
        assert fullshard.load(folder / "torch", loaded, its) == {"step": 7}
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
    with pytest.raises(CheckpointError, match=r"under 'ema', 'net': say which .* key_map=\{'ema': 'model'\}"):
        fullshard.load(folder / "two", loaded)
    strict = {"net": "model", "epoch.count": "extra.epoch"}
    assert fullshard.load(folder / "two", loaded, key_map=strict) == {"epoch": 3}
    assert_equal(dict(fullshard.full_tensors(loaded)), dict(fullshard.full_tensors(model)), "weights")


@on_ranks(2)
def test_checkpoints_of_fullshard_are_taken_as_they_are(rank: Rank) -> None:
    """If the model has changed since, its weights are not taken from the averages beside it."""
    model, average = build(rank, "fully_shard", seed=1), build(rank, "fully_shard", seed=2)
    folder = shared_folder(rank)
    fullshard.save(folder / "x", torch.nn.Linear(2, 2), ema=average)
    before = dict(fullshard.full_tensors(model))
    with pytest.raises(CheckpointError, match="none of the model's"):
        fullshard.load(folder / "x", model, strict=False)
    assert_equal(dict(fullshard.full_tensors(model)), before, "weights")


def test_error_names_what_is_there(tmp_path: Any) -> None:
    """A checkpoint of another model is refused with its top-level keys, and the model stays as it is."""
    dcp.save({"net": {"other.weight": torch.ones(2)}, "step": 1}, checkpoint_id=tmp_path / "x", no_dist=True)
    model = Model(1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"'net' \(1 key\), 'step' \(1 key\); .*key_map=\{that: 'model'\}"):
        fullshard.load(tmp_path / "x", model)
    assert_equal(dict(model.state_dict()), before, "model")


def test_prefixes() -> None:
    """Longest first, on whole words; two keys that become one are an error."""
    keys = ["a.b.w", "a.w", "ab.w", "step"]
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
    """A model of the name ``model`` inside bare weights, modules named ``state``, and what fullshard itself saves."""
    llama = {"model.embed.weight", "model.layers.0.weight", "lm_head.weight"}
    assert find_prefixes(sorted(llama), llama, optimizer=False) == {"": "model"}
    assert find_prefixes([f"model.{name}" for name in llama], llama, optimizer=False) == {}
    nested = {"state.fc.weight", "out.weight"}
    keys = [f"app.net.{name}" for name in nested] + [f"app.opt.state.{name}.exp_avg" for name in nested]
    assert find_prefixes(keys, nested, optimizer=True) == {"app.net": "model", "app.opt": "optimizer"}
    assert find_prefixes(["x.y"], llama, optimizer=True) == {}
    assert top_level(["a.x", "a.y", "b"]) == "'a' (2 keys), 'b' (1 key)"
