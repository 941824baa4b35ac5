"""Tiny models, data and runs of transformers' Trainer, and the same training without sharding."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

import fullshard.dropin
from compare import fqn_of
from fullshard import FullyShardedDataParallel

VOCABULARY, LENGTH, BATCH = 61, 12, 2
RATE = 1e-2

Data = list[dict[str, torch.Tensor]]


@contextlib.contextmanager
def standing_in() -> Iterator[None]:
    """fullshard in the place of torch's FSDP, and accelerate's singletons made anew afterwards."""
    try:
        with fullshard.dropin.install(quiet=True):
            yield
    finally:
        GradientState._reset_state()
        AcceleratorState._reset_state(True)


def tiny(kind: str = "llama", **changes: Any) -> PreTrainedModel:
    """A model of a few thousand parameters, the same in every process."""
    torch.manual_seed(1)
    sizes = {"vocab_size": VOCABULARY}
    decoder = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes | decoder | changes))
    if kind == "qwen2":  # embeddings and head are one parameter
        return Qwen2ForCausalLM(Qwen2Config(**sizes | decoder | {"tie_word_embeddings": True} | changes))
    if kind == "gpt2":
        special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        shape = {"n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 4}
        return GPT2LMHeadModel(GPT2Config(**sizes | shape | special | dropouts | changes))
    assert kind == "t5"
    shape = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    special = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    return T5ForConditionalGeneration(T5Config(**sizes | shape | special | changes))


def texts(count: int, seed: int = 7) -> Data:
    """Random ids, as inputs and as labels. The first label, which nothing predicts, does not count."""
    ids = torch.randint(3, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:, 0] = -100
    return [{"input_ids": row, "labels": wanted} for row, wanted in zip(ids, labels, strict=True)]


def arguments(folder: Path | str, version: int, config: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """What ``TrainingArguments`` takes for a run on FSDP of this version: data in order, a constant rate, AdamW."""
    # accelerate itself refuses to broadcast the first rank's parameters on a machine without accelerators
    own: dict[str, Any] = {"version": 1, "sync_module_states": False} if version == 1 else {"version": 2}
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "fsdp": True,
        "fsdp_config": own | (config or {}),
        "use_cpu": True,
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "train_sampling_strategy": "sequential",
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "max_steps": 4,
        "optim": "adamw_torch",
    }
    return given | changes


def trainer_for(model: nn.Module, given: dict[str, Any], data: Data, **more: Any) -> Trainer:
    """A Trainer that shards."""
    trainer = Trainer(model=model, args=prepared(given), train_dataset=data, **more)
    assert trainer.is_fsdp_enabled
    return trainer


def prepared(given: dict[str, Any], kind: type[TrainingArguments] = TrainingArguments) -> TrainingArguments:
    """The arguments. accelerate knows no FSDP among CPUs, and would use DDP: it is told that these are GPUs."""
    made = kind(**given)
    assert made.device.type == "cpu"
    PartialState().distributed_type = DistributedType.MULTI_GPU
    return made


def logged(trainer: Trainer, what: str = "loss") -> list[float]:
    """What was logged under this name, step by step."""
    return [entry[what] for entry in trainer.state.log_history if what in entry]


def unsharded(
    model: nn.Module,
    data: Data,
    steps: int,
    *,
    ranks: int = 2,
    accumulate: int = 1,
    max_norm: float = 1.0,
    trained: Callable[[str], bool] = lambda name: True,
) -> tuple[list[float], list[float]]:
    """Train ``model`` on whole batches, in place.

    Returns:
        Losses and norms of gradients, before clipping, step by step.
    """
    parameters = [p for name, p in model.named_parameters() if p.requires_grad and trained(name)]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)
    each = BATCH * ranks * accumulate
    losses, norms = [], []
    model.train()
    for step in range(steps):
        batch = data[(step * each) % len(data) :][:each]
        loss = model(**stacked(batch)).loss
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(parameters, max_norm if max_norm else math.inf)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms


def stacked(batch: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """One batch of these."""
    return {key: torch.stack([entry[key] for entry in batch]) for key in batch[0]}


def full_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters of a sharded model, by the names that they had. On all ranks."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return {fqn_of(name): p.detach().clone() for name, p in model.named_parameters()}
    named = {fqn_of(name): p.detach() for name, p in model.named_parameters()}
    return {name: p.full_tensor().clone() if isinstance(p, DTensor) else p.clone() for name, p in named.items()}


def assert_losses(actual: Sequence[float], expected: Sequence[float], tolerance: float = 2e-6) -> None:
    """Require the same losses, step by step, of a run that moves by more than the tolerance."""
    assert len(actual) == len(expected), (actual, expected)
    assert max(expected) - min(expected) > 2 * tolerance * max(expected), "a run that does not move shows nothing"
    for step, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert abs(ours - theirs) <= tolerance * abs(theirs), f"step {step}: {actual} instead of {expected}"
