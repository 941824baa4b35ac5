"""Checkpoints of transformers' Trainer on fullshard: resumed, loaded by ``from_pretrained``, merged."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.utils import merge_fsdp_weights
from safetensors.torch import load_file
from torch import nn
from trainer_runs import arguments, full_weights, logged, standing_in, texts, tiny, trainer_for
from transformers import LlamaForCausalLM, Qwen2ForCausalLM, Trainer

from compare import assert_equal
from ranks import Rank, on_ranks

KINDS = pytest.mark.parametrize("kept", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"], ids=["full", "sharded"])
VERSIONS = pytest.mark.parametrize(
    "config", [{"version": 1}, {"version": 1, "use_orig_params": False}, {"version": 2}], ids=["fsdp1", "flat", "fsdp2"]
)


def spoiled(model: nn.Module) -> Any:
    """The model with weights that must not survive loading."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.125)
    return model


def trained(folder: Path, config: dict[str, Any], model: nn.Module, resume: str | None = None, **more: Any) -> Trainer:
    """Four steps, a checkpoint after the second."""
    given = arguments(folder, config["version"], config, save_strategy="steps", save_steps=2, **more)
    trainer = trainer_for(model, given, texts(16))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@VERSIONS
@KINDS
@on_ranks(2)
def test_resume(rank: Rank, config: dict[str, Any], kept: str, tmp_path: Path) -> None:
    """A run that is taken up again in its middle ends as the one that went through: bit by bit."""
    with standing_in():
        config = {**config, "state_dict_type": kept}
        through = trained(tmp_path, config, tiny())
        losses, weights = logged(through), full_weights(through.model)
        shutil.rmtree(tmp_path / "checkpoint-4", ignore_errors=True)
        dist.barrier()
        again = trained(tmp_path, config, spoiled(tiny()), str(tmp_path / "checkpoint-2"))
        assert again.state.global_step == 4
        assert logged(again) == losses
        assert_equal(full_weights(again.model), weights, "weights")


@VERSIONS
@on_ranks(2)
def test_save_model(rank: Rank, config: dict[str, Any], tmp_path: Path) -> None:
    """``save_model`` writes what ``from_pretrained`` reads: the very weights, tied ones tied."""
    with standing_in():
        trainer = trained(tmp_path, config, tiny("qwen2"))
        weights = full_weights(trainer.model)
        trainer.save_model(str(tmp_path / "saved"))
        dist.barrier()
        loaded = Qwen2ForCausalLM.from_pretrained(tmp_path / "saved")
        assert type(loaded) is Qwen2ForCausalLM and loaded.config.architectures == ["Qwen2ForCausalLM"]
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert_equal({name: p.detach() for name, p in loaded.named_parameters()}, weights, "weights")


@pytest.mark.parametrize("version", [1, 2])
@on_ranks(2)
def test_sharded_checkpoint_is_merged(rank: Rank, version: int, tmp_path: Path) -> None:
    """accelerate's ``merge_fsdp_weights`` makes one file of a sharded checkpoint, and a plain model loads it."""
    with standing_in():
        trainer = trained(tmp_path, {"version": version, "state_dict_type": "SHARDED_STATE_DICT"}, tiny())
        weights = full_weights(trainer.model)
        merge_fsdp_weights(str(tmp_path / "checkpoint-4" / "pytorch_model_fsdp_0"), str(tmp_path / "merged"))
        dist.barrier()
        plain = spoiled(tiny())
        plain.load_state_dict(load_file(tmp_path / "merged" / "model.safetensors"))
        assert_equal({name: p.detach() for name, p in plain.named_parameters()}, weights, "weights")


@pytest.mark.parametrize("version", [1, 2])
@on_ranks(2)
def test_best_model_comes_back(rank: Rank, version: int, tmp_path: Path) -> None:
    """``load_best_model_at_end`` brings back the checkpoint of the lowest loss."""
    with standing_in():
        config = {"version": version, "state_dict_type": "FULL_STATE_DICT"}
        more: dict[str, Any] = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2}
        more |= {"metric_for_best_model": "eval_loss", "learning_rate": 0.5}  # soon worse
        given = arguments(tmp_path, version, config, save_strategy="steps", save_steps=2, **more)
        trainer = trainer_for(tiny(), given, texts(16), eval_dataset=texts(4, seed=8))
        trainer.train()
        losses = logged(trainer, "eval_loss")
        best = tmp_path / f"checkpoint-{2 * (1 + losses.index(min(losses)))}"
        assert trainer.state.best_model_checkpoint == str(best)
        kept = torch.load(best / "pytorch_model_fsdp.bin", weights_only=True)
        now = full_weights(trainer.model)
        assert_equal(now, {name: kept[name] for name in now}, "weights")
        assert trainer.evaluate()["eval_loss"] == min(losses)


@on_ranks(2)
def test_a_checkpoint_of_one_version_goes_on_in_the_other(rank: Rank, tmp_path: Path) -> None:
    """A full checkpoint of FSDP1 holds for FSDP2 the weights and the optimizer's state that its own would."""
    with standing_in():
        losses = logged(trained(tmp_path / "one", {"version": 1}, tiny()))
        optimizer = tmp_path / "one" / "checkpoint-2" / "optimizer.bin"
        again = trained(tmp_path / "two", {"version": 2}, spoiled(tiny()), str(optimizer.parent))
        assert logged(again) == losses


RAM = {"cpu_ram_efficient_loading": True}


@pytest.mark.parametrize("version", [1, 2])
@on_ranks(2)
def test_loading_on_one_rank(rank: Rank, version: int, tmp_path: Path) -> None:
    """``cpu_ram_efficient_loading``: the first rank reads the file, the others get their parts from it."""
    if rank.rank == 0:
        tiny().save_pretrained(tmp_path / "start")
    dist.barrier()
    data = texts(16)
    with standing_in():
        os.environ["ACCELERATE_USE_FSDP"] = os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "true"
        model = LlamaForCausalLM.from_pretrained(tmp_path / "start")
        if rank.rank != 0:
            spoiled(model)  # whatever other ranks have got, the first one's counts
        given = arguments(tmp_path, version, RAM if version == 2 else {})
        trainer = trainer_for(model, given, data)
        if version == 1:  # what FullyShardedDataParallelPlugin refuses to hear where there is no accelerator
            plugin = trainer.accelerator.state.fsdp_plugin
            plugin.sync_module_states = plugin.cpu_ram_efficient_loading = True
            plugin.param_init_fn = lambda module: module.to_empty(device="cpu", recurse=False)
        trainer.train()
        reference = trainer_for(tiny(), arguments(tmp_path, version), data)
        reference.train()
        assert logged(trainer) == logged(reference)
