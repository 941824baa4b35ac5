"""transformers' Trainer on fullshard, through both versions of FSDP."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import merge_fsdp_weights
from example_runs import run_example
from safetensors.torch import load_file
from torch import nn
from trainer_runs import (
    BATCH,
    RATE,
    arguments,
    assert_losses,
    full_weights,
    logged,
    prepared,
    stacked,
    standing_in,
    texts,
    tiny,
    trainer_for,
    unsharded,
)
from transformers import (
    AutoModelForCausalLM,
    DistributedConfig,
    LlamaForCausalLM,
    Qwen2ForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
)
from transformers.distributed.fsdp import is_fsdp_managed_module

import fullshard
from compare import assert_equal
from fullshard.engine.ownership import unit_of
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


# ---------------------------------------------------------------- checkpoints

KINDS = pytest.mark.parametrize("kept", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"], ids=["full", "sharded"])
CONFIGURATIONS = pytest.mark.parametrize(
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


@CONFIGURATIONS
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


@CONFIGURATIONS
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


# ---------------------------------------------------------------- generation


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


# ---------------------------------------------------------------- from_pretrained(distributed_config=...)


def loaded(rank: Rank, folder: Path, kind: str, **config: Any) -> Any:
    """A tiny model that transformers has read from a file and sharded."""
    if rank.rank == 0:
        tiny(kind).save_pretrained(folder / "start")
    dist.barrier()
    sizes = {"fsdp_size": rank.world_size} | config
    return AutoModelForCausalLM.from_pretrained(folder / "start", distributed_config=DistributedConfig(**sizes))


def by_hand(model: nn.Module, data: Any, rank: Rank, steps: int) -> list[float]:
    """A plain loop: each rank has its part of every batch.

    Returns:
        Losses, averaged over ranks.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    losses, each = [], BATCH * rank.world_size
    model.train()
    for step in range(steps):
        own = data[step * each :][:each][rank.rank * BATCH :][:BATCH]
        loss = model(**stacked(own)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().float() / rank.world_size
        dist.all_reduce(mean)
        losses.append(float(mean))
    return losses


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@on_ranks(2)
def test_plain_loop_then_saved_and_read(rank: Rank, kind: str, tmp_path: Path) -> None:
    """Layers are units that free their weights; norm and head, or the tied embeddings, are one that keeps them."""
    data = texts(16)
    with standing_in():
        model = loaded(rank, tmp_path, kind)
        assert isinstance(model, fullshard.FSDPModule) and is_fsdp_managed_module(model)
        tail = model.lm_head if kind == "llama" else model.model.embed_tokens
        assert unit_of(model.model.norm) is unit_of(tail)
        assert unit_of(model.model.norm).settings.reshard_after_forward is False
        assert unit_of(model.model.layers[0]).settings.reshard_after_forward is True
        assert_losses(by_hand(model, data, rank, 4), unsharded(tiny(kind), data, 4)[0])
        weights = full_weights(model)
        model.save_pretrained(tmp_path / "whole")
        if kind == "llama":  # transformers hands tied weights to safetensors twice, which it refuses
            model.save_pretrained(tmp_path / "parts", distributed_checkpoint=True)
        dist.barrier()
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
        assert type(plain) is type(tiny(kind))
        assert_equal({name: p.detach() for name, p in plain.named_parameters()}, weights, "weights")
        for where in ("whole", "parts") if kind == "llama" else ("whole",):
            config = DistributedConfig(fsdp_size=2)
            again = AutoModelForCausalLM.from_pretrained(tmp_path / where, distributed_config=config)
            assert_equal(full_weights(again), weights, where)


@pytest.mark.parametrize(
    "options", [{"fsdp_cpu_offload": True}, {"fsdp_mixed_precision": True}], ids=["offload", "bf16"]
)
@on_ranks(2)
def test_options(rank: Rank, options: dict[str, Any], tmp_path: Path) -> None:
    """Offloading to the CPU, and bfloat16 with float32 gradients."""
    data = texts(16)
    with standing_in():
        losses = by_hand(loaded(rank, tmp_path, "llama", **options), data, rank, 4)
        assert_losses(losses, unsharded(tiny(), data, 4)[0], 2e-6 if "fsdp_cpu_offload" in options else 1.5e-3)


@on_ranks(2)
def test_every_module_by_hand(rank: Rank, tmp_path: Path) -> None:
    """A plan of one's own: norm and head apart."""
    data = texts(16)
    plan = {"model.norm": "free_full_weight", "model.layers.*.mlp": "keep_full_weight"}
    with standing_in():
        model = loaded(rank, tmp_path, "llama", fsdp_plan=plan)
        assert unit_of(model.model.norm) is not unit_of(model.lm_head)
        assert unit_of(model.model.layers[0].mlp) is not unit_of(model.model.layers[0])
        assert_losses(by_hand(model, data, rank, 3), unsharded(tiny(), data, 3)[0])


@on_ranks(4)
def test_replicas(rank: Rank, tmp_path: Path) -> None:
    """Two replicas of two parts."""
    data = texts(32)
    with standing_in():
        model = loaded(rank, tmp_path, "llama", fsdp_size=2, dp_replicate_size=2)
        assert_losses(by_hand(model, data, rank, 3), unsharded(tiny(), data, 3, ranks=4)[0])


@on_ranks(2)
def test_trainer_of_a_sharded_model(rank: Rank, tmp_path: Path) -> None:
    """The Trainer takes such a model as it is: accumulation, and saving. It refuses to make checkpoints of one."""
    data = texts(32)
    with standing_in():
        given = arguments(tmp_path, 2, gradient_accumulation_steps=2)
        del given["fsdp"], given["fsdp_config"]
        trainer = Trainer(model=loaded(rank, tmp_path, "llama"), args=prepared(given), train_dataset=data)
        trainer.train()
        assert_losses(logged(trainer), unsharded(tiny(), data, 4, accumulate=2)[0])
        weights = full_weights(trainer.model)
        trainer.save_model(str(tmp_path / "saved"))
        dist.barrier()
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        assert_equal({name: p.detach() for name, p in plain.named_parameters()}, weights, "weights")


# ---------------------------------------------------------------- the example


def test_the_example_runs(tmp_path: Path) -> None:
    """The example, as its first lines say to run it: losses fall, and what was saved says the same."""
    printed = run_example("transformers_trainer.py", TMPDIR=str(tmp_path))
    losses = [float(loss) for loss in re.findall(r"'loss': '([\d.]+)'", printed)]
    assert len(losses) == 3 and losses[0] > 2 * losses[2]
    assert "sharded as FSDPLlamaForCausalLM" in printed
    assert "the loaded model says the same: True" in printed
