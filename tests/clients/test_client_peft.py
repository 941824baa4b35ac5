"""PEFT's adapters on fullshard, through both versions of FSDP, in plain loops."""

from __future__ import annotations

import pytest

pytest.importorskip("peft")
pytest.importorskip("transformers")

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from example_runs import run_example
from peft import (
    IA3Config,
    LoHaConfig,
    LoraConfig,
    PeftConfig,
    PeftModel,
    VeraConfig,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from peft.utils.other import fsdp_auto_wrap_policy
from safetensors.torch import load_file
from torch import nn
from torch.distributed import fsdp  # torch's: what a program would import
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from trainer_runs import (
    BATCH,
    RATE,
    arguments,
    assert_losses,
    full_weights,
    logged,
    stacked,
    standing_in,
    texts,
    tiny,
    trainer_for,
    unsharded,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import fullshard
from compare import assert_close, assert_equal, fqn_of
from ranks import Rank, on_ranks

LINEAR = ["q_proj", "v_proj", "down_proj"]
CONFIGS: dict[str, PeftConfig] = {
    "lora": LoraConfig(r=4, target_modules=LINEAR, init_lora_weights=False, task_type="CAUSAL_LM"),
    "dora": LoraConfig(r=4, target_modules=LINEAR, init_lora_weights=False, use_dora=True, task_type="CAUSAL_LM"),
    "saved": LoraConfig(r=4, target_modules=LINEAR, modules_to_save=["lm_head"], task_type="CAUSAL_LM"),
    "ia3": IA3Config(target_modules=LINEAR, feedforward_modules=["down_proj"], task_type="CAUSAL_LM"),
    "loha": LoHaConfig(r=4, target_modules=LINEAR, init_weights=False, task_type="CAUSAL_LM"),
    "vera": VeraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"),
}
FORMS = ["fsdp1", "flat", "fsdp2"]
FULL = StateDictOptions(full_state_dict=True)  # with cpu_offload, torch gives it to the first rank only


def adapted(kind: str) -> PeftModel:
    """A tiny model with adapters, the same in every process. What adapters start with is not nothing."""
    model = tiny()
    torch.manual_seed(2)
    made = get_peft_model(model, CONFIGS[kind])
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape) * 0.02)
    return made


def sharded(model: Any, form: str) -> Any:
    """The model on FSDP of this form, as PEFT's documentation has it."""
    if form == "fsdp2":
        for layer in [module for module in model.modules() if isinstance(module, LlamaDecoderLayer)]:
            fsdp.fully_shard(layer)
        return fsdp.fully_shard(model)
    if any(config.use_dora for config in model.peft_config.values() if isinstance(config, LoraConfig)):
        policy = ModuleWrapPolicy({LlamaDecoderLayer})  # DoRA reads weights of modules that PEFT's policy would wrap
    else:
        policy = fsdp_auto_wrap_policy(model)
    return fsdp.FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=form == "fsdp1")


def trained(model: nn.Module, data: Any, rank: Rank, steps: range) -> tuple[list[float], torch.optim.Optimizer]:
    """Losses, averaged over ranks, of a loop in which each rank has its half of every batch."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE, weight_decay=0.0)
    losses, each = [], BATCH * rank.world_size
    model.train()
    for step in steps:
        own = data[step * each :][:each][rank.rank * BATCH :][:BATCH]
        loss = model(**stacked(own)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / rank.world_size
        dist.all_reduce(mean)
        losses.append(float(mean))
    return losses, optimizer


def whole_state(model: Any) -> dict[str, torch.Tensor]:
    """The state dict of a sharded model, whole, on all ranks."""
    if not isinstance(model, fsdp.FullyShardedDataParallel):
        return get_model_state_dict(model, options=FULL)
    whole = fsdp.FullStateDictConfig(offload_to_cpu=True, rank0_only=False)
    with fsdp.FullyShardedDataParallel.state_dict_type(model, fsdp.StateDictType.FULL_STATE_DICT, whole):
        return model.state_dict()


def adapters_of(model: Any, plain: PeftModel) -> dict[str, torch.Tensor]:
    """What PEFT would save of a sharded model, whole, on all ranks; ``plain`` is the like without sharding."""
    state = whole_state(model)
    if not isinstance(model, fsdp.FullyShardedDataParallel):
        return get_peft_model_state_dict(model, state_dict=state)
    # PEFT 0.21 looks for names of modules, and misses all that lie in nested wrappers
    assert not any("lora_" in name for name in get_peft_model_state_dict(model.module, state_dict=state))
    return get_peft_model_state_dict(plain, state_dict=state)


KINDS_AND_FORMS = [(kind, form) for kind in ("lora", "dora") for form in FORMS]
KINDS_AND_FORMS += [("saved", "flat"), ("saved", "fsdp2"), ("ia3", "fsdp1"), ("ia3", "fsdp2")]
KINDS_AND_FORMS += [("loha", "fsdp1"), ("loha", "fsdp2"), ("vera", "fsdp2")]


@pytest.mark.parametrize(("kind", "form"), KINDS_AND_FORMS)
@on_ranks(2)
def test_training_and_saving_of_adapters(rank: Rank, kind: str, form: str, tmp_path: Path) -> None:
    """Losses are the unsharded run's; the base is as it was; saved adapters give a plain model the same outputs."""
    data = texts(16)
    with standing_in():
        before = {name: p.detach().clone() for name, p in adapted(kind).named_parameters() if not p.requires_grad}
        model = sharded(adapted(kind), form)
        losses, optimizer = trained(model, data, rank, range(4))
        reference = adapted(kind)
        assert_losses(losses, unsharded(reference, data, 4, max_norm=0.0)[0])
        weights = full_weights(model)
        assert_equal({name: weights[name] for name in before}, before, "frozen weights")
        for name, parameter in reference.named_parameters():
            if parameter.requires_grad:
                assert_close(weights[name], parameter.detach(), name, rtol=1e-3, atol=1e-4)
        assert len(optimizer.state) <= sum(p.requires_grad for p in reference.parameters())

        saved = adapters_of(model, reference)
        assert set(saved) == set(get_peft_model_state_dict(reference))
        state = whole_state(model)
        if rank.rank == 0:
            (model if form == "fsdp2" else reference).save_pretrained(tmp_path, state_dict=state)
        dist.barrier()
        plain = PeftModel.from_pretrained(tiny(), tmp_path).eval()
        inputs = stacked(data[rank.rank * BATCH :][:BATCH])
        with torch.no_grad():
            ours = model.eval()(**inputs).logits
            assert_close(plain(**inputs).logits, ours, "logits", rtol=1e-5, atol=1e-6)
            assert not torch.allclose(tiny()(**inputs).logits, ours, rtol=0.0, atol=2e-5), "adapters matter"
        if kind in ("lora", "dora"):
            with torch.no_grad():
                merged = plain.merge_and_unload()(**inputs).logits
            assert_close(merged, ours, "merged logits", rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["lora", "dora"])
@on_ranks(2)
def test_going_on_from_saved_adapters(rank: Rank, kind: str, form: str) -> None:
    """Adapters alone are enough to go on: they are loaded into a sharded model, by PEFT's or torch's function."""
    data = texts(16)
    with standing_in():
        model = sharded(adapted(kind), form)
        trained(model, data, rank, range(2))
        saved = adapters_of(model, adapted(kind))
        expected, _ = trained(model, data, rank, range(2, 4))
        fresh = adapted(kind)
        with torch.no_grad():
            for parameter in fresh.parameters():
                if parameter.requires_grad:
                    parameter.fill_(0.5)
        if form == "fsdp2":
            again = sharded(fresh, form)
            renamed = {name.replace(".weight", ".default.weight"): value for name, value in saved.items()}
            names = {fqn_of(name) for name, p in again.named_parameters() if p.requires_grad}
            if kind == "dora":  # PEFT writes its vector without a name of its own
                renamed = {
                    n.replace("lora_magnitude_vector", "lora_magnitude_vector.default.weight"): v
                    for n, v in renamed.items()
                }
            assert set(renamed) == names
            set_model_state_dict(again, renamed, options=StateDictOptions(full_state_dict=True, strict=False))
        else:
            set_peft_model_state_dict(fresh, saved)
            again = sharded(fresh, form)
        assert trained(again, data, rank, range(2, 4))[0] == expected


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_merging_where_it_is(rank: Rank, form: str) -> None:
    """``merge_adapter`` inside of ``summon_full_params``: what is merged is written back, and can be taken out."""
    data = texts(16)
    inputs = stacked(data[:BATCH])
    with standing_in(), torch.no_grad():
        model = sharded(adapted("lora"), form).eval()
        inner = model.module if form != "fsdp2" else model
        apart = model(**inputs).logits
        before = full_weights(model)
        with fullshard.FullyShardedDataParallel.summon_full_params(model):
            inner.merge_adapter()
        assert_close(model(**inputs).logits, apart, "merged logits", rtol=1e-4, atol=1e-5)
        merged = full_weights(model)
        changed = {name for name in before if not torch.equal(before[name], merged[name])}
        assert changed == {name for name in before if name.endswith("base_layer.weight")}
        with fullshard.FullyShardedDataParallel.summon_full_params(model):
            inner.unmerge_adapter()
        assert_close(model(**inputs).logits, apart, "logits", rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- in transformers' Trainer

TRAINERS: dict[str, dict[str, Any]] = {
    "fsdp1": {"version": 1},
    "fsdp1_flat": {"version": 1, "use_orig_params": False},
    "full": {"version": 2, "state_dict_type": "FULL_STATE_DICT"},
    "sharded": {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"},
}


@pytest.mark.parametrize("form", TRAINERS)
@on_ranks(2)
def test_training(rank: Rank, form: str, tmp_path: Path) -> None:
    """Losses and norms are those of the unsharded run, and the base is as it was."""
    data = texts(16)
    with standing_in():
        trainer = trainer_for(adapted("lora"), arguments(tmp_path, TRAINERS[form]["version"], TRAINERS[form]), data)
        trainer.train()
        reference = adapted("lora")
        losses, norms = unsharded(reference, data, 4)
        assert_losses(logged(trainer), losses)
        assert_losses(logged(trainer, "grad_norm"), norms, 1e-5)
        weights = full_weights(trainer.model)
        for name, parameter in adapted("lora").named_parameters():
            if not parameter.requires_grad:
                assert_equal(weights[name], parameter.detach(), name)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("kept", ["full", "sharded"])
@on_ranks(2)
def test_going_on_from_a_checkpoint(rank: Rank, kept: str, dora: bool, tmp_path: Path) -> None:
    """Checkpoints have adapters only, and a run goes on from one as if it had never stopped."""
    data = texts(16)
    with standing_in():
        given = arguments(tmp_path, 2, TRAINERS[kept], save_strategy="steps", save_steps=2)
        through = trainer_for(adapted("dora" if dora else "lora"), given, data)
        through.train()
        if kept == "full":
            held = torch.load(tmp_path / "checkpoint-2" / "pytorch_model_fsdp.bin", weights_only=True)
            assert held and all("lora_" in name for name in held)
        again = trainer_for(adapted("dora" if dora else "lora"), given, data)
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
        trainer = trainer_for(adapted("dora" if dora else "lora"), arguments(tmp_path, 2, TRAINERS["full"]), data)
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
    printed = run_example("peft_lora.py", TMPDIR=str(tmp_path))
    assert "14336 of 112960 parameters trained" in printed
    assert "the merged model gives the same logits: True" in printed
