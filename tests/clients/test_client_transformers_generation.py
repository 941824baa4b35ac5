"""``generate`` of transformers' models on fullshard."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

from pathlib import Path

import torch
from trainer_runs import arguments, prepared, standing_in, texts, tiny, trainer_for, unsharded
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback
from transformers.distributed.fsdp import is_fsdp_managed_module

import fullshard
from ranks import Rank, on_ranks

VERSIONS = pytest.mark.parametrize("version", [1, 2], ids=["fsdp1", "fsdp2"])


def prompt_of(rank: int) -> torch.Tensor:
    """Prompts of other contents and another length on each rank."""
    return torch.arange(5, 5 + 4 + 3 * rank)[None, :]


def length_of(rank: int) -> dict[str, Any]:
    """How many tokens to make: others on each rank."""
    return {"max_new_tokens": 3 + 8 * rank, "min_new_tokens": 3 + 8 * rank, "do_sample": False}


class Speaker(TrainerCallback):
    """Generates after each step, as people do to watch a run."""

    said: list[torch.Tensor]

    def __init__(self, rank: int) -> None:
        self.rank, self.said = rank, []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.said.append(generated(model, self.rank))


def generated(model: Any, rank: int, **more: Any) -> torch.Tensor:
    """What a model of either version makes of this rank's prompt."""
    model.eval()
    if isinstance(model, fullshard.FullyShardedDataParallel):
        with fullshard.FullyShardedDataParallel.summon_full_params(model, writeback=False):
            made = model.generate(prompt_of(rank), **length_of(rank), **more)
    else:
        made = model.generate(prompt_of(rank), **length_of(rank), **more)
    model.train()
    return made


@VERSIONS
@on_ranks(2)
def test_generate_during_and_after_training(rank: Rank, version: int, tmp_path: Path) -> None:
    """Ranks make different numbers of tokens of different prompts, those that the unsharded model makes."""
    data = texts(16)
    with standing_in():
        speaker = Speaker(rank.rank)
        trainer = trainer_for(tiny(), arguments(tmp_path, version), data, callbacks=[speaker])
        trainer.train()
        assert is_fsdp_managed_module(trainer.model)
        inner = trainer.model.module if version == 1 else trainer.model
        assert is_fsdp_managed_module(inner), "generate asks the model itself, which then keeps ranks in step"
        speaker.said.append(generated(trainer.model, rank.rank, num_beams=2))
        with fullshard.unsharded(trainer.model.eval()):  # gathers once
            at_once = trainer.model.generate(prompt_of(rank.rank), **length_of(rank.rank))
        assert torch.equal(at_once, speaker.said[3])
        for step in range(4):
            reference = tiny()
            unsharded(reference, data, step + 1)
            assert torch.equal(speaker.said[step], generated(reference, rank.rank)), f"step {step}"
        assert torch.equal(speaker.said[4], generated(reference, rank.rank, num_beams=2))
        assert not torch.equal(speaker.said[3], generated(tiny(), rank.rank)), "training changed what is said"


@VERSIONS
@on_ranks(2)
def test_predict_with_generate(rank: Rank, version: int, tmp_path: Path) -> None:
    """Seq2SeqTrainer generates in its evaluation: T5, greedily, all ranks' predictions in order."""
    data = texts(16)
    with standing_in():
        given = arguments(tmp_path, version, max_steps=2, average_tokens_across_devices=False)
        given |= {"predict_with_generate": True, "generation_max_length": 9}
        args = prepared(given, Seq2SeqTrainingArguments)
        trainer = Seq2SeqTrainer(model=tiny("t5"), args=args, train_dataset=data)
        trainer.train()
        predicted = trainer.predict(data[:8]).predictions
        reference = tiny("t5")
        unsharded(reference, data, 2)
        inputs = torch.stack([entry["input_ids"] for entry in data[:8]])
        expected = reference.eval().generate(inputs, max_length=9)
        assert torch.equal(torch.from_numpy(predicted[:, : expected.shape[1]]), expected)
