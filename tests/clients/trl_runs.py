"""Tiny models, texts and runs of trl's trainers: on FSDP of either version, and unsharded."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from trainer_runs import VOCABULARY, arguments, full_weights, logged, prepared, standing_in, tiny
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments

import fullshard

# What ``fsdp_config`` says, by engine; "ddp": the program unsharded, its gradients averaged by torch's DDP.
ENGINES: dict[str, dict[str, Any]] = {
    "fsdp1": {"version": 1},
    "fsdp1_flat": {"version": 1, "use_orig_params": False},
    "fsdp2": {"version": 2},
}
STEPS = 3
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]


class Outcome(NamedTuple):
    """What a run came to."""

    logs: dict[str, list[float]]
    weights: dict[str, torch.Tensor]


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
    """Adapters of which both parts have gradients from the first step on."""
    targets = ["q_proj", "v_proj", "down_proj"]
    return LoraConfig(r=4, target_modules=targets, init_lora_weights="gaussian", task_type="CAUSAL_LM")


def on_disk(folder: Path, kind: str) -> str:
    """Where a tiny model lies, for what trl reads again by its name."""
    place = folder / kind
    if dist.get_rank() == 0 and not place.exists():
        tiny(kind).save_pretrained(place)
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
        trainer.train()
        inner: Any = trainer.model_wrapped
        if engine == "ddp":
            assert isinstance(inner, DistributedDataParallel)
            weights = {name: p.detach().clone() for name, p in inner.module.named_parameters()}
        else:
            kind = fullshard.FSDPModule if engine == "fsdp2" else fullshard.FullyShardedDataParallel
            assert isinstance(inner, kind)
            assert sum(isinstance(module, kind) for module in inner.modules()) >= 3, "each layer is a unit"
            weights = full_weights(inner)
        return Outcome({name: logged(trainer, name) for name in ("loss", "grad_norm", *values)}, weights)


def assert_same_outcomes(
    engine: str,
    build: Callable[[str], Trainer],
    values: tuple[str, ...] = (),
    start: nn.Module | None = None,
) -> None:
    """Require that a trainer on FSDP logs and learns what it does unsharded.

    Args:
        engine: A key of ENGINES.
        build: Makes the trainer for an engine, or for "ddp".
        values: What it logs besides losses and norms, and is to be the same.
        start: What the model was, where weights that move are to be told from those that do not.
    """
    expected = outcome("ddp", build, values)
    found = outcome(engine, build, values)
    for name, wanted in expected.logs.items():
        assert len(wanted) == STEPS and len(set(wanted)) > 1, f"{name}: a run that does not move shows nothing"
        tolerance = 1e-5 if name == "grad_norm" else 2e-6
        torch.testing.assert_close(
            torch.tensor(found.logs[name], dtype=torch.float64),
            torch.tensor(wanted, dtype=torch.float64),
            rtol=tolerance,
            atol=1e-7,
            msg=lambda text, name=name, wanted=wanted: f"{name}: {found.logs[name]} instead of {wanted}\n{text}",
        )
    assert set(found.weights) == set(expected.weights)
    before = {} if start is None else dict(start.named_parameters())
    for name, value in expected.weights.items():
        torch.testing.assert_close(
            found.weights[name], value, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
        if name in before:
            assert (value - before[name].detach()).abs().max() > 1e-4, f"{name} was not trained"
