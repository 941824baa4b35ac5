"""trl's trainers on fullshard, through both versions of FSDP: SFT, DPO and GRPO, with and without LoRA.

Losses, norms of gradients, what else they log, and the weights in the end are those of the unsharded program. trl's
models compute their losses from ``lm_head.weight`` directly, and never call the head.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("trl")
pytest.importorskip("peft")

import functools
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Trainer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl_runs import ENGINES, assert_same_outcomes, configured, lora, on_disk, sentences, small, tokenizer

from ranks import Rank, on_ranks

engines = pytest.mark.parametrize("engine", ENGINES)
versions = pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
adapters = pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])


def supervised(engine: str, folder: Path, kind: str, adapted: bool, **more: Any) -> Trainer:
    """SFT on prompts and completions, of which the completions count."""
    rows = {"prompt": sentences(24, 1), "completion": [" " + text for text in sentences(24, 2)]}
    return SFTTrainer(
        model=small(kind),
        args=configured(SFTConfig, folder, engine, max_length=32, **more),
        train_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer(),
        peft_config=lora() if adapted else None,
    )


@engines
@adapters
@on_ranks(2, timeout=180)
def test_sft(rank: Rank, engine: str, adapted: bool, tmp_path: Path) -> None:
    """Supervised fine-tuning. Activations are checkpointed, which is trl's default."""
    build = functools.partial(supervised, folder=tmp_path, kind="llama", adapted=adapted)
    assert_same_outcomes(engine, build, ("entropy",))


@versions
@on_ranks(2, timeout=180)
def test_sft_of_tied_weights(rank: Rank, engine: str, tmp_path: Path) -> None:
    """Two microbatches a step; the head's weight is that of the embedding."""
    more = {"gradient_accumulation_steps": 2, "gradient_checkpointing": False}
    build = functools.partial(supervised, folder=tmp_path, kind="qwen2", adapted=False, **more)
    assert_same_outcomes(engine, build, ("entropy",))


def preferring(engine: str, folder: Path, adapted: bool) -> Trainer:
    """DPO. With adapters, the reference is the model without them; else it is a second model."""
    names = {"prompt": 1, "chosen": 2, "rejected": 3}
    rows = {name: [" " * (seed > 1) + text for text in sentences(24, seed)] for name, seed in names.items()}
    return DPOTrainer(
        model=small(),
        ref_model=None if adapted else small(),
        args=configured(DPOConfig, folder, engine, max_length=32, beta=0.5),
        train_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer(),
        peft_config=lora() if adapted else None,
    )


@versions
@adapters
@on_ranks(2, timeout=180)
def test_dpo(rank: Rank, engine: str, adapted: bool, tmp_path: Path) -> None:
    """Direct preference optimization, beside a reference that is sharded as well."""
    build = functools.partial(preferring, folder=tmp_path, adapted=adapted)
    assert_same_outcomes(engine, build, ("rewards/margins", "logps/chosen"))


def spread(completions: list[str], **_: Any) -> list[float]:
    """A reward: the remainders of the words' numbers by 5, less a little for each word."""
    split = [[int(word[1:]) for word in text.split() if word.startswith("w")] for text in completions]
    return [sum(number % 5 for number in numbers) - 0.1 * len(numbers) for numbers in split]


def rewarded(engine: str, folder: Path, adapted: bool) -> Trainer:
    """GRPO. Half of all words end a completion, so that ranks draw different numbers of words."""
    model = AutoModelForCausalLM.from_pretrained(on_disk(folder, "llama"), dtype=torch.float32)
    model.generation_config.eos_token_id = list(range(4, 34))
    own = {"num_generations": 2, "max_completion_length": 8, "beta": 0.1, "temperature": 0.9}
    return GRPOTrainer(
        model=model,
        reward_funcs=spread,
        args=configured(GRPOConfig, folder, engine, **own, per_device_train_batch_size=4),
        train_dataset=Dataset.from_dict({"prompt": sentences(24, 1)}),
        processing_class=tokenizer(),
        peft_config=lora() if adapted else None,
    )


@versions
@adapters
@on_ranks(2, timeout=180)
def test_grpo(rank: Rank, engine: str, adapted: bool, tmp_path: Path) -> None:
    """Group relative policy optimization: the sharded model draws the very completions that the unsharded one does."""
    build = functools.partial(rewarded, folder=tmp_path, adapted=adapted)
    values = ("reward", "kl", "completions/mean_length")
    assert_same_outcomes(engine, build, values)
