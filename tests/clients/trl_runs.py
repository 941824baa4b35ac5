"""Tiny models, texts and runs of trl's trainers: on FSDP of either version, and unsharded."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.parallel import DistributedDataParallel
from trainer_runs import VOCABULARY, arguments, full_weights, logged, prepared, standing_in, tiny
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Trainer, TrainingArguments

import fullshard
from compare import assert_equal

# What ``fsdp_config`` says, by engine; "ddp": the program unsharded, its gradients averaged by torch's DDP.
ENGINES: dict[str, dict[str, Any]] = {
    "fsdp1": {"version": 1},
    "fsdp1_flat": {"version": 1, "use_orig_params": False},
    "fsdp2": {"version": 2},
}
STEPS = 3
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]


class Outcome(NamedTuple):
    """What a run came to.

    Attributes:
        logs: Logged values, step by step.
        start: All parameters, before training.
        weights: All parameters, after it.
        trained: Names of those that have gradients.
    """

    logs: dict[str, list[float]]
    start: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    trained: set[str]


def small(kind: str = "llama") -> PreTrainedModel:
    """A tiny model whose layers all matter: with weights of the usual size, its attention hardly has gradients."""
    return tiny(kind, initializer_range=0.3)


def tokenizer() -> PreTrainedTokenizerFast:
    """A word each: the special ones, then "w4", "w5", ..."""
    words = [*SPECIAL, *(f"w{number}" for number in range(len(SPECIAL), VOCABULARY))]
    whole = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    whole.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=whole, **names)


def sentences(count: int, seed: int, lengths: tuple[int, int] = (3, 9)) -> list[str]:
    """Random words, of as many as ``lengths`` allow: ranks have different numbers of tokens."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        length = int(torch.randint(*lengths, (), generator=generator))
        made.append(" ".join(f"w{n}" for n in torch.randint(4, VOCABULARY, (length,), generator=generator).tolist()))
    return made


def lora() -> LoraConfig:
    """Adapters that change the model, and of which both parts have gradients, from the first step on."""
    targets = ["q_proj", "v_proj", "down_proj"]
    return LoraConfig(r=4, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")


def on_disk(folder: Path, kind: str) -> str:
    """Where a tiny model lies, for what trl reads again by its name."""
    place = folder / kind
    if dist.get_rank() == 0 and not place.exists():
        small(kind).save_pretrained(place)
    dist.barrier()
    return str(place)


def configured(kind: type[TrainingArguments], folder: Path, engine: str, **more: Any) -> TrainingArguments:
    """The configuration of a trainer of trl, for an engine or "ddp". SGD: its steps are as long as gradients are."""
    os.environ["CI"] = "1"  # trl sends no telemetry from there
    config = ENGINES.get(engine, {"version": 2})
    given = arguments(folder, config["version"], config, max_steps=STEPS, optim="sgd", learning_rate=0.3, bf16=False)
    if engine == "ddp":
        del given["fsdp"], given["fsdp_config"]
        return kind(**given | more)
    return prepared(given | more, kind)


def outcome(engine: str, build: Callable[[str], Trainer], values: tuple[str, ...]) -> Outcome:
    """Train with what ``build`` makes for an engine: logged values, losses and norms, and the weights."""
    torch.manual_seed(0)
    with standing_in():
        trainer = build(engine)
        start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
        trainer.train()
        model: Any = trainer.model_wrapped
        if engine == "ddp":
            assert isinstance(model, DistributedDataParallel)
            weights = full_weights(model.module)
        else:
            kind = fullshard.FSDPModule if engine == "fsdp2" else fullshard.FullyShardedDataParallel
            assert isinstance(model, kind)
            assert sum(isinstance(module, kind) for module in model.modules()) >= 3, "each layer is a unit"
            weights = full_weights(model)
        logs = {name: logged(trainer, name) for name in ("loss", "grad_norm", *values)}
        return Outcome(logs, start, weights, trained)


def assert_same_outcomes(engine: str, build: Callable[[str], Trainer], values: tuple[str, ...] = ()) -> None:
    """Require that a trainer on FSDP logs and learns what it does unsharded.

    Weights are compared by how far they went, to 1e-4 of the largest step in a parameter.

    Args:
        engine: A key of ENGINES.
        build: Makes the trainer for an engine, or for "ddp".
        values: What it logs besides losses and norms, and is to be the same.
    """
    expected = outcome("ddp", build, values)
    found = outcome(engine, build, values)
    for name, wanted in expected.logs.items():
        assert len(wanted) == STEPS and len(set(wanted)) > 1, f"{name}: a run that does not move shows nothing"
        for ours, theirs in zip(found.logs[name], wanted, strict=True):
            near = math.isclose(ours, theirs, rel_tol=1e-5 if name == "grad_norm" else 2e-6, abs_tol=1e-7)
            assert near, f"{name}: {found.logs[name]} instead of {wanted}"
    assert set(found.weights) == set(expected.weights) == set(expected.start)
    for name, before in expected.start.items():
        assert_equal(found.start[name], before, f"{name} before training")
        moved = float((expected.weights[name] - before).abs().max())
        assert moved > 1e-4 if name in expected.trained else moved == 0, f"{name}: {moved} without sharding"
        error = float((found.weights[name] - expected.weights[name]).abs().max())
        assert error <= 1e-4 * moved + 1e-7, f"{name}: off by {error}, where it went as far as {moved}"
