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
from fullshard.train.config import TrainConfig, TrainingConfig
from fullshard.train.corpus import Corpus, sample
from fullshard.train.evaluation import HeldOut, evaluate
from fullshard.train.footprint import Footprint
from fullshard.train.group import Group
from fullshard.train.learning_rate import learning_rate
from fullshard.train.metrics import Record, bits
from fullshard.train.model import GPT, initialise
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
    model = GPT(config.model)
    initialise(model, config.seed)
    model.to(group.device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def optimizer_of(model: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW on the sharded parameters; weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=BETAS, weight_decay=config.weight_decay, fused=True)


class Run:
    """A training run on one rank: the same code on every rank, with one collective decision per step."""

    model: GPT
    optimizer: torch.optim.Optimizer
    corpus: Corpus
    config: TrainConfig
    group: Group
    stop: StopRequest
    observe: Callable[[Record], None]
    outcome: Outcome
    _start: float

    def __init__(
        self,
        model: GPT,
        corpus: Corpus,
        config: TrainConfig,
        group: Group,
        stop: StopRequest,
        observe: Callable[[Record], None],
    ) -> None:
        """Prepare a run.

        Args:
            model: sharded, from `build`; trained in place.
            corpus: the text; equal on every rank.
            config: the settings.
            group: the ranks.
            stop: asked at every step, see [Note: Stopping all ranks].
            observe: called with each record of `metrics.jsonl`.
        """
        self.model = model
        self.optimizer = optimizer_of(model, config.training)
        self.corpus = corpus
        self.config = config
        self.group = group
        self.stop = stop
        self.observe = observe
        self.outcome = Outcome()
        self._start = time.perf_counter()

    def train(self) -> Outcome:
        """Do all steps, with validations on a part of the held-out bytes in between and a full one at the end."""
        steps, evaluation = self.config.training.steps, self.config.evaluation
        while not self.outcome.interrupted and self.outcome.step < steps:
            self._train_step(self.outcome.step + 1)
            if self.outcome.step == steps and not self.outcome.interrupted:
                self.outcome.validation_loss = self._validate(evaluation.eval_bytes)
            elif self.outcome.step % evaluation.eval_every == 0 and not self.outcome.interrupted:
                self._validate(evaluation.eval_bytes // BETWEEN)
        self.outcome.seconds = self._elapsed()
        return self.outcome

    def _train_step(self, step: int) -> None:
        """One optimizer step (counted from 1) and its record."""
        began = time.perf_counter()
        settings, sequence = self.config.training, self.config.model.sequence
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = learning_rate(step, settings)
        key = (self.config.seed, step, self.group.rank)
        pairs = sample(self.corpus.train, batch=settings.batch, sequence=sequence, key=key)
        tokens = torch.from_numpy(pairs).to(self.group.device)
        logits = self.model(tokens[:, :-1])
        own_loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        torch.autograd.backward(own_loss)
        norm = _whole(torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip))
        self.optimizer.step()
        total, stopping = self.group.sum(own_loss.item(), float(bool(self.stop)))
        if step == 1:
            self.outcome.local = footprint.measure(self.model, self.optimizer, local=True)
            self.outcome.whole = footprint.measure(self.model, self.optimizer, local=False)
        self.optimizer.zero_grad()
        self.outcome.step = step
        self.outcome.interrupted = stopping > 0
        loss, took = total / self.group.size, time.perf_counter() - began
        self.observe(
            {
                "kind": "train",
                "step": step,
                "loss": loss,
                "bits_per_byte": bits(loss),
                "lr": learning_rate(step, settings),
                "grad_norm": norm.item(),
                "tokens_per_s": settings.batch * sequence * self.group.size / took,
                "elapsed_s": self._elapsed(),
            }
        )

    def _validate(self, limit: int) -> float | None:
        """Loss on the first `limit` held-out bytes and its record; None if the run was asked to stop."""
        held_out = HeldOut.take(self.corpus.validation, limit, self.config.model.sequence)
        loss = evaluate(self.model, held_out, self.config.training.batch, self.group, self.stop)
        self.outcome.interrupted = loss is None
        if loss is not None:
            self.observe(
                {
                    "kind": "validation",
                    "step": self.outcome.step,
                    "loss": loss,
                    "bits_per_byte": bits(loss),
                    "bytes": len(held_out.targets),
                    "elapsed_s": self._elapsed(),
                }
            )
        return loss

    def _elapsed(self) -> float:
        return time.perf_counter() - self._start


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
