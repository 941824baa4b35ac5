"""The training loop: the same code on every rank, one collective decision per step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import fully_shard
from fullshard.train import footprint
from fullshard.train.config import TrainConfig
from fullshard.train.corpus import Corpus, sample
from fullshard.train.evaluation import HeldOut, evaluate
from fullshard.train.footprint import Footprint
from fullshard.train.group import Group
from fullshard.train.learning_rate import learning_rate
from fullshard.train.metrics import Record, bits
from fullshard.train.model import GPT, GPTConfig, initialise
from fullshard.train.stop import StopRequest

BETAS = (0.9, 0.95)
BETWEEN = 8  # validations during the run use one such share of `eval_bytes`


@dataclass
class Outcome:
    """What came out of the loop, equal on every rank except for `local`.

    Attributes:
        step: optimizer steps done.
        interrupted: whether the run was asked to stop before its last step.
        local: training state on this rank.
        whole: training state of one unsharded copy.
        validation_loss: nats per byte of the last full validation; None if there was none.
        seconds: time in the loop.
    """

    step: int = 0
    interrupted: bool = False
    local: Footprint = field(default_factory=lambda: Footprint(0, 0, 0))
    whole: Footprint = field(default_factory=lambda: Footprint(0, 0, 0))
    validation_loss: float | None = None
    seconds: float = 0.0


def build(config: TrainConfig, group: Group) -> GPT:
    """The model with its starting weights, every block and then the root sharded over all ranks."""
    model = GPT(GPTConfig(config.layers, config.width, config.heads, config.sequence))
    initialise(model, config.seed)
    model.to(group.device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def optimizer_of(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW on the sharded parameters; weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=BETAS, weight_decay=config.weight_decay, fused=True)


def train(
    model: GPT,
    corpus: Corpus,
    config: TrainConfig,
    group: Group,
    stop: StopRequest,
    observe: Callable[[Record], None],
) -> Outcome:
    """Train `model` in place for `config.steps` steps, with validations in between and a full one at the end.

    Args:
        model: sharded, from `build`.
        corpus: the text; equal on every rank.
        config: the settings.
        group: the ranks.
        stop: asked before every step; see [Note: Stopping all ranks].
        observe: called on every rank with each record of `metrics.jsonl`.
    """
    optimizer = optimizer_of(model, config)
    final = HeldOut.take(corpus.validation, config.eval_bytes, config.sequence)
    between = HeldOut.take(corpus.validation, config.eval_bytes // BETWEEN, config.sequence)
    outcome = Outcome()
    start = time.perf_counter()

    def validate(held_out: HeldOut) -> float | None:
        loss = evaluate(model, held_out, config.batch, group, stop)
        if loss is not None:
            observe(
                {
                    "kind": "validation",
                    "step": outcome.step,
                    "loss": loss,
                    "bits_per_byte": bits(loss),
                    "bytes": len(held_out.targets),
                    "elapsed_s": time.perf_counter() - start,
                }
            )
        return loss

    for step in range(1, config.steps + 1):
        began = time.perf_counter()
        loss, norm, stopping = _step(model, optimizer, corpus, config, group, step, stop)
        now = time.perf_counter()
        outcome.step = step
        if step == 1:
            outcome.local = footprint.measure(model, optimizer, local=True)
            outcome.whole = footprint.measure(model, optimizer, local=False)
        optimizer.zero_grad()
        observe(
            {
                "kind": "train",
                "step": step,
                "loss": loss,
                "bits_per_byte": bits(loss),
                "lr": learning_rate(step, config),
                "grad_norm": norm,
                "tokens_per_s": config.batch * config.sequence * group.size / (now - began),
                "elapsed_s": now - start,
            }
        )
        outcome.interrupted = stopping
        if not stopping and step % config.eval_every == 0 and step < config.steps:
            outcome.interrupted = validate(between) is None
        if outcome.interrupted:
            break
    else:
        outcome.validation_loss = validate(final)
        outcome.interrupted = outcome.validation_loss is None
    outcome.seconds = time.perf_counter() - start
    return outcome


def _step(
    model: GPT,
    optimizer: torch.optim.Optimizer,
    corpus: Corpus,
    config: TrainConfig,
    group: Group,
    step: int,
    stop: StopRequest,
) -> tuple[float, float, bool]:
    """One optimizer step; gradients are left in place.

    Returns:
        Mean loss over all ranks in nats per byte, gradient norm before clipping, and whether any rank was
        asked to stop.
    """
    for parameters in optimizer.param_groups:
        parameters["lr"] = learning_rate(step, config)
    pairs = sample(
        corpus.train, batch=config.batch, sequence=config.sequence, key=(config.seed, step, group.rank)
    )
    tokens = torch.from_numpy(pairs).to(group.device)
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    torch.autograd.backward(loss)
    norm = _whole(torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip))
    optimizer.step()
    total, stopping = group.sum(loss.item(), float(bool(stop)))
    return total / group.size, norm.item(), stopping > 0


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
