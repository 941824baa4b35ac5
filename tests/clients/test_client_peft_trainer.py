"""PEFT's adapters in transformers' Trainer on fullshard: checkpoints, going on, merging; the example and its page."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("peft")
pytest.importorskip("transformers")

from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from trainer_runs import (
    BATCH,
    arguments,
    assert_losses,
    full_weights,
    logged,
    run_example,
    stacked,
    standing_in,
    texts,
    tiny,
    trainer_for,
    unsharded,
)

from compare import assert_close, assert_equal
from ranks import Rank, on_ranks

FORMS: dict[str, dict[str, Any]] = {
    "fsdp1": {"version": 1},
    "fsdp1_flat": {"version": 1, "use_orig_params": False},
    "full": {"version": 2, "state_dict_type": "FULL_STATE_DICT"},
    "sharded": {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"},
}


def adapted(dora: bool = False) -> PeftModel:
    """A tiny model with LoRA."""
    model = tiny()
    torch.manual_seed(2)
    config = LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj", "down_proj"],
        init_lora_weights=False,
        use_dora=dora,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_training(rank: Rank, form: str, tmp_path: Path) -> None:
    """Losses and norms are those of the unsharded run, and the base is as it was."""
    data = texts(16)
    with standing_in():
        trainer = trainer_for(adapted(), arguments(tmp_path, FORMS[form]["version"], FORMS[form]), data)
        trainer.train()
        reference = adapted()
        losses, norms = unsharded(reference, data, 4)
        assert_losses(logged(trainer), losses)
        assert_losses(logged(trainer, "grad_norm"), norms, 1e-5)
        weights = full_weights(trainer.model)
        for name, parameter in adapted().named_parameters():
            if not parameter.requires_grad:
                assert_equal(weights[name], parameter.detach(), name)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("kept", ["full", "sharded"])
@on_ranks(2)
def test_going_on_from_a_checkpoint(rank: Rank, kept: str, dora: bool, tmp_path: Path) -> None:
    """Checkpoints have adapters only, and a run goes on from one as if it had never stopped."""
    data = texts(16)
    with standing_in():
        given = arguments(tmp_path, 2, FORMS[kept], save_strategy="steps", save_steps=2)
        through = trainer_for(adapted(dora), given, data)
        through.train()
        if kept == "full":
            held = torch.load(tmp_path / "checkpoint-2" / "pytorch_model_fsdp.bin", weights_only=True)
            assert held and all("lora_" in name for name in held)
        again = trainer_for(adapted(dora), given, data)
        with torch.no_grad():
            for parameter in again.model.parameters():
                if parameter.requires_grad:
                    parameter.fill_(0.5)
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert logged(again) == logged(through)
        assert_equal(full_weights(again.model), full_weights(through.model), "weights")


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@on_ranks(2)
def test_saved_adapters_in_a_plain_model(rank: Rank, dora: bool, tmp_path: Path) -> None:
    """``save_model`` writes adapters; a plain model with them, or with them merged into it, has the same outputs."""
    data = texts(16)
    inputs = stacked(data[:BATCH])
    with standing_in():
        trainer = trainer_for(adapted(dora), arguments(tmp_path, 2, FORMS["full"]), data)
        trainer.train()
        trainer.save_model(str(tmp_path / "saved"))
        dist.barrier()
        with torch.no_grad():
            ours = trainer.model.eval()(**inputs).logits
            held = load_file(tmp_path / "saved" / "adapter_model.safetensors")
            assert held and all("lora_" in name for name in held)
            plain = PeftModel.from_pretrained(tiny(), tmp_path / "saved").eval()
            assert_close(plain(**inputs).logits, ours, "logits", rtol=1e-5, atol=1e-6)
            assert_close(plain.merge_and_unload()(**inputs).logits, ours, "merged logits", rtol=1e-4, atol=1e-5)


def test_the_example_runs(tmp_path: Path) -> None:
    """The example, as its first lines say to run it."""
    printed = run_example("peft_lora.py", tmp_path)
    assert "14336 of 112960 parameters trained" in printed
    assert "the merged model gives the same logits: True" in printed
