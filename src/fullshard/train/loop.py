"""The training loop: the same code on every rank, one collective decision per step."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

import torch
import torch.nn.functional as F

from fullshard import CommQuantization, MixedPrecisionPolicy, fully_shard
from fullshard.activation_checkpoint import apply_activation_checkpointing
from fullshard.composable.fsdp_module import FSDPModule
from fullshard.errors import CheckpointError
from fullshard.train import finite
from fullshard.train.checkpoints import Checkpoints, Position
from fullshard.train.config import TrainConfig
from fullshard.train.corpus import Corpus, sample
from fullshard.train.evaluation import HeldOut, evaluate
from fullshard.train.group import Group
from fullshard.train.metrics import bits
from fullshard.train.model import GPT, Block, initialize
from fullshard.train.optimizer import learning_rate, set_learning_rates
from fullshard.train.run_folder import BEST
from fullshard.train.run_log import RunLog
from fullshard.train.stop import StopRequest
from fullshard.train.summary import Footprint
from fullshard.train.weights import BestValidation, save_full

BETWEEN = 8  # validations during the run use one such share of `eval_bytes`


def build_model(config: TrainConfig, group: Group) -> GPT:
    """Build the initialized model, with every block and then the root sharded over all ranks."""
    model = GPT(config.model)
    initialize(model, config.seed)
    model.to(group.device)
    if config.training.activation_checkpointing:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    precision = MixedPrecisionPolicy()
    if config.training.dtype == "bf16":
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=precision)
    fully_shard(model, mp_policy=precision)
    if config.comm_quantization != "none":
        weights = cast('Literal["int8", "fp8"]', config.comm_quantization)
        sharded(model).set_comm_quantization(shard=CommQuantization(all_gather=weights, reduce="int8"))
    return model


def sharded(model: GPT) -> FSDPModule:
    """Return the model as what `fully_shard` has made of it."""
    return cast("FSDPModule", model)


def interim_validation_data(corpus: Corpus, config: TrainConfig) -> HeldOut:
    """Return the held-out bytes of validations during the run."""
    return HeldOut.take(corpus.validation, config.evaluation.eval_bytes // BETWEEN, config.model.sequence)


@dataclass
class Run:
    """A training run on one rank."""

    config: TrainConfig
    corpus: Corpus  # equal on every rank
    group: Group
    stop: StopRequest  # looked at in every step, see [Note: Stopping all ranks]
    folder: Path  # of the run
    model: GPT  # from `build_model`; trained in place
    optimizer: torch.optim.Optimizer
    checkpoints: Checkpoints
    log: RunLog  # gets a record of every step and validation
    position: Position
    best: BestValidation | None  # None before the first validation
    footprints: tuple[Footprint, Footprint] | None = None  # on this rank, and of one unsharded copy; after a step
    stopped: bool = False  # all ranks have seen that one of them was asked to stop

    def train(self) -> None:
        """Run all remaining steps, with validations in between, and checkpoints, the last of which is complete.

        Raises:
            CheckpointError: on all ranks, if the last checkpoint cannot be written, or one cannot be begun.
            DivergedError: on all ranks, if a loss, gradient or weight is not finite; no checkpoint is being written any
                more then.
        """
        start = time.perf_counter() - self.position.elapsed
        try:
            while not self.stopped and self.position.step < self.config.training.steps:
                self._train_step(self.position.step + 1, start)
                if self._is_validation_due():
                    self._validate()
                self.checkpoints.poll()
                if self.checkpoints.are_due(self.position.step):
                    self._save()
            finite.check_weights(self.model, self.position.step)
            if self.checkpoints.are_due(self.position.step, last=True):
                self._save()
        except finite.DivergedError as error:
            with contextlib.suppress(CheckpointError):  # on all ranks; what is wrong here comes first
                self.checkpoints.wait()
            self.group.gather(None)  # until rank 0 has removed older checkpoints
            newest = self.checkpoints.newest_step
            kept = f"The checkpoint after step {newest} is kept: resume with a lower --lr"
            raise error.with_advice(kept if newest else "Start again with --fresh and a lower --lr") from error
        self.checkpoints.wait()

    def _train_step(self, step: int, start: float) -> None:
        """Perform one optimizer step (counted from 1) and record it."""
        began = time.perf_counter()
        settings, sequence = self.config.training, self.config.model.sequence
        set_learning_rates(self.optimizer, step, settings)
        windows = sample(
            self.corpus.train,
            batch=settings.batch * settings.accumulate,
            sequence=sequence,
            key=(self.config.seed, step),
            part=(self.group.rank, self.group.size),
        )
        microbatches = torch.split(torch.from_numpy(windows).to(self.group.device), settings.batch)
        losses = []
        for number, tokens in enumerate(microbatches, start=1):
            sharded(self.model).set_requires_gradient_sync(number == len(microbatches))
            logits = self.model(tokens[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()) / len(microbatches)
            torch.autograd.backward(loss)
            losses.append(loss.detach())
        own_loss = torch.stack(losses).sum().item()
        total, stops = self.group.sum(own_loss, self.stop.code != 0)
        finite.check_loss(self.model, [t[:, :-1] for t in microbatches], own_loss, total, step, self.group)
        norm = finite.clip_gradients(self.model, settings.clip, step)
        self.optimizer.step()
        if self.footprints is None:
            self.footprints = self.measure()
        self.optimizer.zero_grad()
        self.stopped = stops > 0
        now = time.perf_counter()
        self.position = Position(step, now - start)
        self.log.record(
            {
                "kind": "train",
                "step": step,
                "loss": total / self.group.size,
                "bits_per_byte": bits(total / self.group.size),
                "lr": learning_rate(step, settings),
                "grad_norm": norm,
                "tokens_per_s": self.config.sequences * sequence / (now - began),
                "elapsed_s": self.position.elapsed,
            }
        )

    def _is_validation_due(self) -> bool:
        step = self.position.step
        return step == self.config.training.steps or step % self.config.evaluation.eval_every == 0

    def _validate(self) -> None:
        """Validate on a part of the held-out bytes, and keep the best weights.

        Losses on different bytes cannot be compared. So a best on another part or text, from before the run was
        resumed, is replaced by any.
        """
        part = interim_validation_data(self.corpus, self.config)
        loss = self.evaluate("validation", part)
        new = BestValidation(self.position.step, loss, len(part.targets), self.corpus.sha256)
        if self.best is None or not self.best.is_comparable(new) or loss < self.best.validation_loss:
            finite.check_weights(self.model, self.position.step)
            save_full(self.folder / BEST, self.model, new.notes(), leads=self.group.leads)
            self.best = new

    def evaluate(self, kind: str, held_out: HeldOut) -> float:
        """Return the loss on held-out bytes, and record it. A collective.

        Raises:
            DivergedError: on all ranks, if it is not finite.
        """
        began = time.perf_counter()
        loss = evaluate(self.model, held_out, self.config.training.batch, self.group)
        if not math.isfinite(loss):
            finite.check_weights(self.model, self.position.step)
            raise finite.DivergedError(self.position.step, f"the validation loss is {loss}")
        self.position = replace(self.position, elapsed=self.position.elapsed + time.perf_counter() - began)
        self.log.record(
            {
                "kind": kind,
                "step": self.position.step,
                "loss": loss,
                "bits_per_byte": bits(loss),
                "bytes": len(held_out.targets),
                "elapsed_s": self.position.elapsed,
            }
        )
        return loss

    def _save(self) -> None:
        finite.check_weights(self.model, self.position.step)
        self.log.sync()
        self.checkpoints.save(self.model, self.optimizer, self.position)

    def measure(self) -> tuple[Footprint, Footprint]:
        """Count the bytes of training state on this rank, and of one unsharded copy."""
        local, unsharded = (Footprint.of(self.model, self.optimizer, local=local) for local in (True, False))
        return local, unsharded
