"""transformers' Trainer on fullshard, through both versions of FSDP."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

import os
from pathlib import Path

import torch
from trainer_runs import (
    BATCH,
    arguments,
    assert_losses,
    logged,
    stacked,
    standing_in,
    texts,
    tiny,
    trainer_for,
    unsharded,
)

import fullshard
from ranks import Rank, on_ranks

VERSIONS = pytest.mark.parametrize("version", [1, 2], ids=["fsdp1", "fsdp2"])


@VERSIONS
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "t5"])
@on_ranks(2)
def test_losses_and_norms_are_those_of_the_unsharded_run(rank: Rank, version: int, kind: str, tmp_path: Path) -> None:
    """Four steps of four models (two with tied weights, one of convolutions), with gradients clipped."""
    data = texts(16)
    with standing_in():
        # T5 takes the number of tokens and does not use it, so that transformers counts losses twice on two ranks
        given = arguments(tmp_path, version, average_tokens_across_devices=kind != "t5")
        trainer = trainer_for(tiny(kind), given, data)
        trainer.train()
        model = trainer.model
        assert isinstance(model, fullshard.FullyShardedDataParallel if version == 1 else fullshard.FSDPModule)
        units = [m for m in model.modules() if isinstance(m, type(model) if version == 1 else fullshard.FSDPModule)]
        assert len(units) >= 3, "each layer is a unit"
        losses, norms = unsharded(tiny(kind), data, 4)
        assert_losses(logged(trainer), losses)
        assert_losses(logged(trainer, "grad_norm"), norms, 1e-5)
        with pytest.raises(AssertionError, match="step 3"):
            assert_losses([*logged(trainer)[:3], losses[3] * 1.0001], losses)


@VERSIONS
@pytest.mark.parametrize("max_norm", [0.0, 0.3])
@on_ranks(2)
def test_accumulation(rank: Rank, version: int, max_norm: float, tmp_path: Path) -> None:
    """Two microbatches a step, with and without clipping; the last step of an epoch has one only."""
    data = texts(20)
    with standing_in():
        given = arguments(tmp_path, version, gradient_accumulation_steps=2, max_grad_norm=max_norm, max_steps=4)
        trainer = trainer_for(tiny(), given, data)
        trainer.train()
        reference = tiny()
        losses, _ = unsharded(reference, [*data[:16], *data[16:20]], 3, accumulate=2, max_norm=max_norm)
        assert_losses(logged(trainer)[:3], losses)


SETTINGS: dict[str, dict[str, Any]] = {
    "flat": {"version": 1, "use_orig_params": False, "activation_checkpointing": True},
    "prefetch": {
        "version": 1,
        "forward_prefetch": True,
        "backward_prefetch": "backward_pre",
        "limit_all_gathers": False,
    },
    "whole": {"version": 1, "auto_wrap_policy": "NO_WRAP", "cpu_offload": True},
    "by_size": {"version": 1, "auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 500},
    "by_class": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaMLP", "LlamaAttention"]},
    "keep": {"version": 2, "reshard_after_forward": False},
    "checkpointing": {"version": 2, "activation_checkpointing": True},
    "offload": {"version": 2, "cpu_offload": True},
}


@pytest.mark.parametrize("setting", SETTINGS)
@on_ranks(2)
def test_settings_change_no_loss(rank: Rank, setting: str, tmp_path: Path) -> None:
    """Whatever ``fsdp_config`` says, training is that of the unsharded run."""
    data = texts(16)
    with standing_in():
        given = arguments(tmp_path, SETTINGS[setting]["version"], SETTINGS[setting], max_steps=3)
        trainer = trainer_for(tiny(), given, data)
        trainer.train()
        losses, norms = unsharded(tiny(), data, 3)
        assert_losses(logged(trainer), losses)
        assert_losses(logged(trainer, "grad_norm"), norms, 1e-5)


@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD"])
@on_ranks(2)
def test_strategies(rank: Rank, strategy: str, tmp_path: Path) -> None:
    """FSDP1's strategies. accelerate takes them from the environment, and not what the Trainer hands on."""
    data = texts(16)
    os.environ["FSDP_SHARDING_STRATEGY"] = strategy
    with standing_in():
        trainer = trainer_for(tiny(), arguments(tmp_path, 1, max_steps=3), data)
        trainer.train()
        assert trainer.model.sharding_strategy is fullshard.ShardingStrategy[strategy]
        assert_losses(logged(trainer), unsharded(tiny(), data, 3)[0])


@VERSIONS
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=["stored_fp32", "stored_bf16"])
@on_ranks(2)
def test_bf16(rank: Rank, version: int, stored: torch.dtype, tmp_path: Path) -> None:
    """``bf16=True`` computes in bfloat16 and keeps float32 parameters, also of a model that was loaded in bfloat16."""
    data = texts(16)
    with standing_in():
        trainer = trainer_for(tiny().to(stored), arguments(tmp_path, version, bf16=True), data)
        trainer.train()
        assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
        assert {state["exp_avg"].dtype for state in trainer.optimizer.state.values()} == {torch.float32}
        losses, norms = unsharded(tiny().to(stored).float(), data, 4)
        assert_losses(logged(trainer), losses, 2e-3)  # through FSDP2, accelerate has the loss itself rounded, too
        assert_losses(logged(trainer, "grad_norm"), norms, 2e-2)
        with pytest.raises(AssertionError, match="instead of"):
            assert_losses(logged(trainer), losses)  # it did compute in bfloat16


@VERSIONS
@on_ranks(2)
def test_evaluation(rank: Rank, version: int, tmp_path: Path) -> None:
    """Losses and logits of data that the model was not trained on, before, during and after training."""
    data, unseen = texts(16), texts(8, seed=8)
    with standing_in():
        given = arguments(tmp_path, version, eval_strategy="steps", eval_steps=2, average_tokens_across_devices=False)
        trainer = trainer_for(tiny(), given, data, eval_dataset=unseen)
        trainer.train()
        after = trainer.evaluate()["eval_loss"]
        predicted = torch.from_numpy(trainer.predict(unseen).predictions)
        reference = tiny()
        expected = []
        for steps in (2, 4):
            reference = tiny()
            unsharded(reference, data, steps)
            with torch.no_grad():
                outputs = reference.eval()(**stacked(unseen))
            expected.append(float(outputs.loss))
        assert_losses([*logged(trainer, "eval_loss")[:2], after], [*expected, expected[1]])
        torch.testing.assert_close(predicted, outputs.logits, rtol=1e-5, atol=1e-6)
        assert len(predicted) == 4 * BATCH


@on_ranks(2)
def test_evaluation_without_training(rank: Rank, tmp_path: Path) -> None:
    """A Trainer that only predicts: accelerate shards without an optimizer through FSDP1 only."""
    unseen = texts(8)
    with standing_in():
        given = arguments(tmp_path, 1, average_tokens_across_devices=False)
        trainer = trainer_for(tiny(), given, texts(16), eval_dataset=unseen)
        loss = trainer.evaluate()["eval_loss"]
        with torch.no_grad():
            expected = float(tiny()(**stacked(unseen)).loss)
        assert abs(loss - expected) <= 2e-6 * expected
