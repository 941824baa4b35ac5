"""The training loop: the same code on every rank, one collective decision per step."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F

from fullshard import fully_shard
from fullshard.errors import CheckpointError
from fullshard.train import best_weights, finite, footprint
from fullshard.train.checkpoints import Checkpoints
from fullshard.train.config import TrainConfig
from fullshard.train.corpus import Corpus, sample
from fullshard.train.evaluation import HeldOut, evaluate
from fullshard.train.footprint import Footprint
from fullshard.train.group import Group
from fullshard.train.metrics import Record, bits
from fullshard.train.model import GPT, initialize
from fullshard.train.optimizer import learning_rate, set_learning_rates
from fullshard.train.position import BestValidation, Position
from fullshard.train.stop import INTERRUPTED, StopRequest, agreed_exit_code

OPTIONS = ("weight_decay", "peak_lr")  # optimizer options that a resumed run takes from its settings; lr is per step
BETWEEN = 8  # validations during the run use one such share of `eval_bytes`


@dataclass(frozen=True)
class Outcome:
    """Result of the loop, equal on every rank except for `local`.

    Attributes:
        position: progress of the run.
        stopped: exit code of a run that was asked to stop early; 0: it is complete.
        local: training state on this rank.
        unsharded: training state of one unsharded copy.
    """

    position: Position
    stopped: int
    local: Footprint
    unsharded: Footprint

    @property
    def is_terminated(self) -> bool:
        """True if the machine is being taken away: work that can be done after resuming is skipped."""
        return self.stopped not in (0, INTERRUPTED)


@dataclass(frozen=True)
class Observer:
    """Callbacks of a run.

    Attributes:
        folder: folder of the best weights.
        record: called with each record of `metrics.jsonl`.
        saving: called before a checkpoint is saved, so that all records before it are on the disk.
    """

    folder: Path
    record: Callable[[Record], None] = lambda record: None
    saving: Callable[[], None] = lambda: None


def build_model(config: TrainConfig, group: Group) -> GPT:
    """Build the initialized model, with every block and then the root sharded over all ranks."""
    model = GPT(config.model)
    initialize(model, config.seed)
    model.to(group.device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def interim_validation_data(corpus: Corpus, config: TrainConfig) -> HeldOut:
    """Return the held-out bytes of validations during the run."""
    return HeldOut.take(corpus.validation, config.evaluation.eval_bytes // BETWEEN, config.model.sequence)


class Run:
    """A training run on one rank: the same code on every rank, with one collective decision per step."""

    model: GPT
    optimizer: torch.optim.Optimizer
    corpus: Corpus
    config: TrainConfig
    group: Group
    stop: StopRequest
    observer: Observer
    checkpoints: Checkpoints
    position: Position
    _stopped: int  # exit code; 0: the run continues
    _saved: Position | None  # position of the last checkpoint; None: not saved yet
    _footprints: tuple[Footprint, Footprint] | None  # local and whole
    _start: float

    def __init__(
        self,
        model: GPT,
        optimizer: torch.optim.Optimizer,
        corpus: Corpus,
        config: TrainConfig,
        group: Group,
        stop: StopRequest,
    ) -> None:
        """Initialize a run.

        Args:
            model: sharded, from `build_model`; trained in place.
            optimizer: from `fullshard.train.optimizer.build_optimizer`.
            corpus: the text; equal on every rank.
            config: the settings.
            group: the ranks.
            stop: asked at every step, see [Note: Stopping all ranks].
        """
        self.model = model
        self.optimizer = optimizer
        self.corpus = corpus
        self.config = config
        self.group = group
        self.stop = stop
        self._stopped = 0
        self._footprints = None

    def train(self, position: Position, checkpoints: Checkpoints, observer: Observer) -> Outcome:
        """Run all remaining steps, with validations in between and a full one at the end, and checkpoints.

        Args:
            position: progress of model and optimizer.
            checkpoints: checkpoints of the run.
            observer: callbacks.

        Raises:
            CheckpointError: on all ranks, if the last checkpoint cannot be written, or one cannot be begun.
            DivergedError: on all ranks, if a loss, gradient or weight is not finite; no
                checkpoint is being written any more then.
        """
        self.observer, self.checkpoints, self.position = observer, checkpoints, position
        checkpoints.resume_from(position)
        self._saved = position if position.step else None
        self._start = time.perf_counter() - position.elapsed
        try:
            self._run()
        except finite.DivergedError as error:
            with contextlib.suppress(CheckpointError):  # on all ranks; what is wrong here comes first
                self.checkpoints.wait()
            self.group.gather(None)  # until rank 0 has removed older checkpoints
            self.stop.allow_peers_to_exit()
            kept = "Start again with --fresh and a lower --lr"
            if self.checkpoints.newest_step:
                kept = f"The checkpoint after step {self.checkpoints.newest_step} is kept: resume with a lower --lr"
            error.args = (f"{error}. {kept}",)
            raise
        self.checkpoints.wait()
        self.position = replace(self.position, elapsed=self._elapsed())
        local, unsharded = self._footprints or self._measure()
        return Outcome(self.position, self._stopped, local, unsharded)

    def _run(self) -> None:
        if not self.position.validated:  # stopped during that validation
            self._validate_if_due()
        while not self._stopped and self.position.step < self.config.training.steps:
            self._train_step(self.position.step + 1)
            self._validate_if_due()
            self.checkpoints.poll()
            if not self._stopped and self.checkpoints.are_due(self.position.step):
                self._save()
        finite.check_weights(self.model, self.position.step)
        if self.checkpoints.every and self._saved is not self.position:
            self._save()

    def _train_step(self, step: int) -> None:
        """Perform one optimizer step (counted from 1) and record it."""
        began = time.perf_counter()
        settings, sequence = self.config.training, self.config.model.sequence
        set_learning_rates(self.optimizer, step, settings)
        part = (self.group.rank, self.group.size)
        key = (self.config.seed, step)
        pairs = sample(self.corpus.train, batch=settings.batch, sequence=sequence, key=key, part=part)
        tokens = torch.from_numpy(pairs).to(self.group.device)
        logits = self.model(tokens[:, :-1])
        own_loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        torch.autograd.backward(own_loss)
        total, *marks = self.group.sum(own_loss.item(), *self.stop.marks)
        finite.check_loss(self.model, tokens[:, :-1], own_loss.item(), total, step, self.group)
        norm = finite.clip_gradients(self.model, settings.clip, step)
        self.optimizer.step()
        if self._footprints is None:
            self._footprints = self._measure()
        self.optimizer.zero_grad()
        self._stopped = agreed_exit_code(*marks)
        validated = not self._is_validation_due(step)
        self.position = replace(self.position, step=step, validated=validated, validation_loss=None)
        loss, took = total / self.group.size, time.perf_counter() - began
        self.observer.record(
            {
                "kind": "train",
                "step": step,
                "loss": loss,
                "bits_per_byte": bits(loss),
                "lr": learning_rate(step, settings),
                "grad_norm": norm,
                "tokens_per_s": settings.batch * sequence * self.group.size / took,
                "elapsed_s": self._elapsed(),
            }
        )

    def _is_validation_due(self, step: int) -> bool:
        return step == self.config.training.steps or step % self.config.evaluation.eval_every == 0

    def _validate_if_due(self) -> None:
        """Validate on a part of the held-out bytes, after the last step also on all; keep the best weights.

        Losses on different bytes cannot be compared, so these are two kinds of records, and the best is chosen by the
        part. For the same reason a best on another part or text, from before the run was resumed, is replaced by any.
        """
        if self._stopped or self.position.validated:
            return
        step, part, final = self.position.step, interim_validation_data(self.corpus, self.config), None
        loss = self._evaluate(part)
        if step == self.config.training.steps:
            everything = HeldOut.take(self.corpus.validation, self.config.evaluation.eval_bytes, part.sequence)
            final = self._evaluate(everything)
            if final is None:
                return
        if loss is None:
            return
        self._record_validation("validation", loss, part)
        if final is not None:
            self._record_validation("final_validation", final, everything)
        best, new = self.position.best, BestValidation(step, loss, len(part.targets), self.corpus.sha256)
        if best is None or not best.is_comparable(new) or loss < best.loss:
            best = new
            finite.check_weights(self.model, step)
            needed = self.checkpoints.best_steps
            best_weights.export(self.observer.folder, self.model, best, needed, leads=self.group.leads)
        self.position = replace(self.position, validated=True, best=best, validation_loss=final)

    def _evaluate(self, held_out: HeldOut) -> float | None:
        """Return the loss on held-out bytes; None if the run is asked to stop meanwhile."""
        if self._stopped:
            return None
        loss = evaluate(self.model, held_out, self.config.training.batch, self.group, self.stop)
        if loss is None:
            self._stopped = agreed_exit_code(*self.group.sum(*self.stop.marks))
        elif not math.isfinite(loss):
            finite.check_weights(self.model, self.position.step)
            raise finite.DivergedError(self.position.step, f"the validation loss is {loss}")
        return loss

    def _record_validation(self, kind: str, loss: float, held_out: HeldOut) -> None:
        self.observer.record(
            {
                "kind": kind,
                "step": self.position.step,
                "loss": loss,
                "bits_per_byte": bits(loss),
                "bytes": len(held_out.targets),
                "elapsed_s": self._elapsed(),
            }
        )

    def _save(self) -> None:
        finite.check_weights(self.model, self.position.step)
        self.position = replace(self.position, elapsed=self._elapsed())
        self.observer.saving()
        self.checkpoints.save(self.model, self.optimizer, self.position)
        self._saved = self.position

    def _measure(self) -> tuple[Footprint, Footprint]:
        local, unsharded = (footprint.measure(self.model, self.optimizer, local=local) for local in (True, False))
        return local, unsharded

    def _elapsed(self) -> float:
        return time.perf_counter() - self._start
