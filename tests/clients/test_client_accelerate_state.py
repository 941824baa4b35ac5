"""accelerate on fullshard: states and models saved, loaded and merged; loading where only rank 0 has weights."""

from __future__ import annotations

import pytest

pytest.importorskip("accelerate")

import gc
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import load_fsdp_model, load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer
from accelerate.utils.fsdp_utils import merge_fsdp_weights
from accelerate_runs import (
    BLOCKWISE,
    ENGINES,
    GPT,
    accelerated,
    full,
    gpt,
    loader,
    on_all_ranks,
    parameters_of,
    prepared,
    texts,
    train,
    unsharded,
)
from safetensors.torch import load_file

import fullshard
from compare import assert_equal
from fullshard.errors import FullshardError
from ranks import Rank, on_ranks

FULL, SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"

engines = pytest.mark.parametrize("engine", ENGINES)


def trained(accelerator: Accelerator, steps: int = 2) -> tuple[Any, Any]:
    """The model and its optimizer after so many steps."""
    model, optimizer = prepared(accelerator, gpt())
    train(accelerator, model, optimizer, accelerator.prepare(loader(steps)))
    return model, optimizer


def rest(accelerator: Accelerator, model: Any, optimizer: Any) -> list[torch.Tensor]:
    """Losses of the two steps after the first two."""
    batches = accelerator.skip_first_batches(accelerator.prepare(loader(4)), 2)
    losses, _ = train(accelerator, model, optimizer, batches)
    return losses


# ---------------------------------------------------------------- states


@pytest.mark.parametrize("kind", [FULL, SHARDED])
@pytest.mark.parametrize(
    ("saving", "loading"),
    [*((engine, engine) for engine in ENGINES), ("fsdp1", "fsdp2"), ("fsdp2", "fsdp1-flat"), ("fsdp1-flat", "fsdp1")],
)
@on_ranks(2)
def test_resuming(rank: Rank, saving: str, loading: str, kind: str, tmp_path: Path) -> None:
    """After ``load_state`` another model goes on as the unsharded one does, also with the other version of FSDP."""
    expected = gpt()
    losses, _ = unsharded(expected, texts(4))
    with accelerated(saving, **BLOCKWISE, state_dict_type=kind) as accelerator:
        trained(accelerator)
        accelerator.save_state(str(tmp_path))
    with accelerated(loading, **BLOCKWISE, state_dict_type=kind) as accelerator:
        model, optimizer = prepared(accelerator, gpt(seed=4))
        accelerator.load_state(str(tmp_path))
        assert_equal(rest(accelerator, model, optimizer), losses[rank.rank][2:], "losses")
        assert_equal(full(model), parameters_of(expected), "parameters")


@engines
@on_ranks(2)
def test_resuming_without_distributed_checkpoint(rank: Rank, engine: str, tmp_path: Path) -> None:
    """``use_dcp=False``: each rank saves its shards with ``torch.save``, and loads them weights-only."""
    losses, _ = unsharded(gpt(), texts(4))
    with accelerated(engine, **BLOCKWISE, state_dict_type=SHARDED) as accelerator:
        plugin = accelerator.state.fsdp_plugin
        model, optimizer = trained(accelerator)
        save_fsdp_model(plugin, accelerator, model, str(tmp_path), use_dcp=False)
        save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(tmp_path), use_dcp=False)
    with accelerated(engine, **BLOCKWISE, state_dict_type=SHARDED) as accelerator:
        plugin = accelerator.state.fsdp_plugin
        model, optimizer = prepared(accelerator, gpt(seed=4))
        load_fsdp_model(plugin, accelerator, model, str(tmp_path), use_dcp=False)
        load_fsdp_optimizer(plugin, accelerator, optimizer, model, str(tmp_path), use_dcp=False)
        assert_equal(rest(accelerator, model, optimizer), losses[rank.rank][2:], "losses")


@on_ranks(2)
def test_torchs_first_version_forgets(rank: Rank, tmp_path: Path) -> None:
    """What the page says of torch's FSDP1 with SHARDED_STATE_DICT: it resumes without the optimizer's state."""
    losses, _ = unsharded(gpt(), texts(4))
    for resumed in (False, True):
        with accelerated("fsdp1", ours=False, **BLOCKWISE, state_dict_type=SHARDED) as accelerator:
            if not resumed:
                trained(accelerator)
                accelerator.save_state(str(tmp_path))
                continue
            model, optimizer = prepared(accelerator, gpt(seed=4))
            accelerator.load_state(str(tmp_path))
            first, second = rest(accelerator, model, optimizer)
            assert_equal(first, losses[rank.rank][2], "loss of the parameters")
            assert abs(second - losses[rank.rank][3]) > 1e-3
    gc.collect()


@pytest.mark.parametrize(
    ("engine", "kind", "ours_first"),
    [
        ("fsdp2", FULL, True),  # torch's own FSDP1 ends here: with FULL by a fault, with SHARDED without Adam's state
        ("fsdp2", SHARDED, True),
        ("fsdp2", FULL, False),
        ("fsdp2", SHARDED, False),
        ("fsdp1", SHARDED, False),
        ("fsdp1-flat", SHARDED, False),
    ],
)
@on_ranks(2)
def test_states_go_to_and_from_torchs_engine(
    rank: Rank, engine: str, kind: str, ours_first: bool, tmp_path: Path
) -> None:
    """What accelerate saved on one engine, it resumes on the other."""
    losses, _ = unsharded(gpt(), texts(4))
    with accelerated(engine, ours=ours_first, **BLOCKWISE, state_dict_type=kind) as accelerator:
        trained(accelerator)
        accelerator.save_state(str(tmp_path))
    gc.collect()
    with accelerated(engine, ours=not ours_first, **BLOCKWISE, state_dict_type=kind) as accelerator:
        model, optimizer = prepared(accelerator, gpt(seed=4))
        kinds = (fullshard.FSDPModule, fullshard.FullyShardedDataParallel)
        assert isinstance(model, kinds) is not ours_first
        accelerator.load_state(str(tmp_path))
        assert_equal(rest(accelerator, model, optimizer), losses[rank.rank][2:], "losses")
    gc.collect()


@on_ranks(2)
def test_local_state_is_refused(rank: Rank, tmp_path: Path) -> None:
    """LOCAL_STATE_DICT with ``use_orig_params=True``: with what to do instead."""
    with accelerated("fsdp1", **BLOCKWISE, state_dict_type="LOCAL_STATE_DICT") as accelerator:
        trained(accelerator)
        with pytest.raises(FullshardError, match="use SHARDED_STATE_DICT"):
            accelerator.save_state(str(tmp_path))


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1-flat"])
@on_ranks(2)
def test_schedulers_are_resumed(rank: Rank, engine: str, tmp_path: Path) -> None:
    """With the state of the model, in one ``save_state``."""
    found = []
    for resumed in (False, True):
        with accelerated(engine, **BLOCKWISE) as accelerator:
            model, optimizer = prepared(accelerator, gpt())
            scheduler = accelerator.prepare(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
            if resumed:
                accelerator.load_state(str(tmp_path))
            else:
                train(accelerator, model, optimizer, accelerator.prepare(loader(2)))
                scheduler.step()
                accelerator.save_state(str(tmp_path))
            losses = rest(accelerator, model, optimizer)
            found.append((losses, scheduler.get_last_lr(), optimizer.param_groups[0]["lr"]))
    assert_equal(found[1], found[0], "resumed")
    assert found[1][2] < 1e-2


# ---------------------------------------------------------------- models


@engines
@on_ranks(2)
def test_models_are_saved_and_merged(rank: Rank, engine: str, tmp_path: Path) -> None:
    """``get_state_dict``, ``save_model`` and ``merge_fsdp_weights`` give what a plain model has, in fp32."""
    expected = gpt()
    unsharded(expected, texts(2))
    with accelerated(engine, **BLOCKWISE, state_dict_type=SHARDED) as accelerator:
        model, _ = trained(accelerator)
        state = accelerator.get_state_dict(model)
        accelerator.save_model(model, str(tmp_path / "whole"))
        accelerator.save_model(model, str(tmp_path / "parts"), max_shard_size="2KB")
        accelerator.save_state(str(tmp_path / "state"))
        merge_fsdp_weights(str(tmp_path / "state" / "pytorch_model_fsdp_0"), str(tmp_path / "merged"))
        accelerator.wait_for_everyone()
    assert_equal(dict(state), dict(expected.state_dict()) if rank.rank == 0 else {}, "get_state_dict")
    for file in ("whole", "merged"):
        found = load_file(tmp_path / file / "model.safetensors")
        assert_equal(found, dict(expected.state_dict()), file)
    parts = sorted((tmp_path / "parts").glob("*.safetensors"))
    assert len(parts) > 1
    assert_equal({k: v for part in parts for k, v in load_file(part).items()}, dict(expected.state_dict()), "parts")


@engines
@on_ranks(2)
def test_tied_weights_are_saved(rank: Rank, engine: str, tmp_path: Path) -> None:
    """By ``save_model``, once, with FSDP2 under both names; a plain model that ties them takes the file."""
    expected = gpt(tied=True)
    unsharded(expected, texts(2))
    with accelerated(engine, **BLOCKWISE) as accelerator:
        model, optimizer = prepared(accelerator, gpt(tied=True))
        train(accelerator, model, optimizer, accelerator.prepare(loader(2)))
        accelerator.save_model(model, str(tmp_path))
        accelerator.wait_for_everyone()
    plain = gpt(seed=4, tied=True)
    missing, unexpected = plain.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert len(missing) == (engine != "fsdp2") and not unexpected
    assert_equal(parameters_of(plain), parameters_of(expected), "parameters")


@engines
@on_ranks(2)
def test_unwrapping(rank: Rank, engine: str) -> None:
    """``unwrap_model`` gives the user's model, whichever class stands around it."""
    given = gpt()
    with accelerated(engine, **BLOCKWISE) as accelerator:
        model, _ = prepared(accelerator, given)
        assert accelerator.unwrap_model(model) is given
        assert isinstance(given, GPT)


# ---------------------------------------------------------------- weights on rank 0 only


@pytest.mark.parametrize(("tied", "offload"), [(False, False), (True, False), (False, True)])
@on_ranks(2)
def test_ram_efficient_loading(rank: Rank, tied: bool, offload: bool) -> None:
    """FSDP2 with ``cpu_ram_efficient_loading``: all get what rank 0 has."""
    expected = gpt(tied=tied)
    losses, _ = unsharded(expected, texts(4))
    options = {**BLOCKWISE, "cpu_ram_efficient_loading": True, "cpu_offload": offload}
    with accelerated("fsdp2", **options) as accelerator:
        model, optimizer = prepared(accelerator, gpt(seed=3 if rank.rank == 0 else 4, tied=tied))
        ours, _ = train(accelerator, model, optimizer, accelerator.prepare(loader(4)))
        assert_equal(ours, losses[rank.rank], "losses")
        assert_equal(full(model), parameters_of(expected), "parameters")


def synchronised(plugin: FullyShardedDataParallelPlugin) -> None:
    """What ``sync_module_states=True`` does where there is an accelerator; elsewhere the plugin raises."""
    plugin.sync_module_states = True
    plugin.param_init_fn = lambda module: module.to_empty(device=torch.device("cpu"), recurse=False)


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp1-flat"])
@pytest.mark.parametrize("tied", [False, True])
@on_ranks(2)
def test_sync_module_states(rank: Rank, engine: str, tied: bool) -> None:
    """FSDP1: a rank whose model is on the meta device gets weights and buffers of rank 0."""
    expected = gpt(tied=tied)
    losses, _ = unsharded(expected, texts(4))
    with accelerated(engine, before=synchronised, **BLOCKWISE) as accelerator:
        with torch.device("meta" if rank.rank else "cpu"):
            given = gpt(tied=tied)
        model, optimizer = prepared(accelerator, given)
        ours, _ = train(accelerator, model, optimizer, accelerator.prepare(loader(4)))
        assert_equal(ours, losses[rank.rank], "losses")
        assert_equal(full(model), parameters_of(expected), "parameters")
        assert on_all_ranks(float(given.scale)) == [0.5, 0.5]
