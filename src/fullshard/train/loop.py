"""The training loop, which ends a run on all ranks before a number that is not finite reaches a checkpoint."""

from __future__ import annotations

import contextlib
import math
import re
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import fullshard
from fullshard import CommQuantization, FSDPModule, async_save, clip_grad_norm_, get_total_norm
from fullshard.errors import CheckpointError, NonFiniteError
from fullshard.train.config import ConfigError, TrainConfig
from fullshard.train.corpus import Corpus, sample, whole_windows, windows
from fullshard.train.group import Group
from fullshard.train.log import RunLog, bits
from fullshard.train.model import GPT, initialize
from fullshard.train.optimizer import set_learning_rates
from fullshard.train.run_folder import CHECKPOINTS, complete_checkpoints, keep_newest
from fullshard.train.stop import StopRequest
from fullshard.train.summary import count_state

INTERMEDIATE_SHARE = 8  # validations during the run use one such share of `eval_bytes`


def build_model(config: TrainConfig, group: Group) -> FSDPModule:
    """Return the initialized `GPT`, sharded over all ranks."""
    model = GPT(config.model)
    initialize(model, config.seed)
    model.to(group.device)
    sharded = fullshard.shard(
        model,
        mixed_precision="bf16" if config.dtype == "bf16" else None,
        checkpoint_activations=config.activation_checkpointing,
        report=False,
    )
    if config.comm_quantization != "none":
        weights = cast('Literal["int8", "fp8"]', config.comm_quantization)
        sharded.set_comm_quantization(shard=CommQuantization(all_gather=weights, reduce="int8"))
    return sharded


def load_position(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Load a checkpoint into a sharded model and its optimizer, and return its position. A collective.

    Options of the optimizer's groups stay those of the settings.

    Raises:
        ConfigError: the checkpoint is damaged, does not fit, or is not one of `fullshard train`.
    """
    options = [{name: group[name] for name in group if name != "params"} for group in optimizer.param_groups]
    try:
        position = fullshard.load(checkpoint, model, optimizer).get("position")
    except CheckpointError as error:
        raise ConfigError(
            f"cannot load {checkpoint}: {error}. Remove this checkpoint to resume from the one before, if there is one"
        ) from None
    if not isinstance(position, dict):
        raise ConfigError(f"cannot resume: {checkpoint} was not saved by fullshard train")
    for group, own in zip(optimizer.param_groups, options, strict=True):
        group.update(own)
    return position


@dataclass(eq=False)
class Run:
    """A training run on one rank; all ranks make the same calls."""

    config: TrainConfig
    corpus: Corpus
    group: Group
    stop: StopRequest
    model: FSDPModule
    optimizer: torch.optim.Optimizer
    folder: Path  # of the run, which every rank sees if checkpoints are saved
    log: RunLog  # gets a record of every step and validation
    step: int  # optimizer steps done; the batches of later ones are a function of the seed and the step's number
    saved_step: int  # of the last checkpoint that was begun or resumed from; 0: there is none
    started: float  # when the loop would have started without interruptions, by `time.perf_counter`
    state_bytes: tuple[dict[str, int], dict[str, int]] | None = None  # of this rank, and unsharded; after a step
    stop_code: int = 0  # exit code that a rank was asked to stop with, the same on all; 0: none was
    _saving: Future[None] | None = None
    _save_began: float = 0.0

    @property
    def elapsed(self) -> float:
        """Seconds in the training loop, over all parts of the run."""
        return time.perf_counter() - self.started

    def train(self) -> None:
        """Run all remaining steps, with validations in between, and checkpoints, the last of which is complete.

        Raises:
            CheckpointError: on all ranks, if a checkpoint cannot be written.
            NonFiniteError: on all ranks, if a loss, gradient or weight is NaN or infinite.
        """
        config, begun, tracing = self.config, self.step, contextlib.ExitStack()
        try:
            while self.step < config.steps and not self.stop_code:
                if config.trace and self.step == begun + 2:  # the first two allocate memory and plan
                    tracing.enter_context(fullshard.trace(self.folder / "trace"))
                self._train_step(self.step + 1)
                if self.step == begun + 7:
                    tracing.close()
                if self.step == config.steps or self.step % config.eval_every == 0:
                    self.evaluate("validation", config.eval_bytes // INTERMEDIATE_SHARE)
                if self._saving and self._saving.done() and not self._saving.exception():
                    self.finish_save()  # no collective: ranks may see it at different steps
                every, last = config.checkpoint_every, self.step == config.steps or bool(self.stop_code)
                is_due = every > 0 and (last or self.step % every == 0)
                if last or is_due:
                    get_total_norm(self.model.parameters(), math.inf, error_if_nonfinite=True)
                if is_due and self.saved_step != self.step:
                    self.begin_save()
        except NonFiniteError as error:
            with contextlib.suppress(CheckpointError):  # on all ranks; the NonFiniteError comes first
                self.finish_save()
            kept = complete_checkpoints(self.folder / CHECKPOINTS)
            advice = f"The checkpoint {kept[-1].name} is kept: resume" if kept else "Start again under another --name"
            cause = re.sub(r"^step \d+, ", "", str(error).partition(". Skip this step")[0])  # counted from the resume
            raise NonFiniteError(f"after step {self.step}: {cause}. {advice} with a lower --lr", error.names) from error
        tracing.close()  # of a run of fewer steps
        self.finish_save()

    def begin_save(self) -> None:
        """Start to save; return as soon as this rank's shards are copied. Waits for the previous save.

        Raises:
            CheckpointError: on all ranks, if the previous checkpoint cannot be written, or this one cannot be begun.
        """
        self.log.sync()
        self.finish_save()
        self._save_began, self.saved_step = time.perf_counter(), self.step
        position = {"step": self.step, "elapsed": self.elapsed, "data_sha256": self.config.data_sha256}
        path = self.folder / CHECKPOINTS / f"step-{self.step:08d}"
        self._saving = async_save(path, self.model, self.optimizer, position=position)

    def finish_save(self) -> None:
        """Wait until the pending checkpoint is complete, and remove old ones.

        Raises:
            CheckpointError: on all ranks, if it cannot be written.
        """
        pending, self._saving = self._saving, None
        if pending is not None:
            pending.result()
            self.log.say(f"step {self.saved_step}: checkpoint saved in {time.perf_counter() - self._save_began:.1f} s")
            if self.group.rank == 0:
                keep_newest(self.folder / CHECKPOINTS, self.config.keep)

    def _train_step(self, step: int) -> None:
        """Perform one optimizer step (counted from 1) and record it."""
        began, config = time.perf_counter(), self.config
        set_learning_rates(self.optimizer, step, config)
        drawn = sample(
            self.corpus.train,
            batch=config.batch * config.accumulate,
            sequence=config.sequence,
            key=(config.seed, step),
            part=(self.group.rank, self.group.size),
        )
        microbatches = torch.split(torch.from_numpy(drawn).to(self.group.device), config.batch)
        losses = []
        with fullshard.debug.find_nonfinite(self.model) if config.debug else contextlib.nullcontext():
            for number, tokens in enumerate(microbatches, start=1):
                self.model.set_requires_gradient_sync(number == len(microbatches))
                logits = self.model(tokens[:, :-1])
                loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()) / len(microbatches)
                torch.autograd.backward(loss)
                losses.append(loss.detach())
        everyone = self.group.gather((torch.stack(losses).sum().item(), self.stop.code))
        rank_losses, stop_codes = zip(*everyone, strict=True)
        if bad := [f"{loss} on rank {rank}" for rank, loss in enumerate(rank_losses) if not math.isfinite(loss)]:
            raise NonFiniteError(f"the loss is {', '.join(bad)}; --debug names the first module")
        norm = clip_grad_norm_(self.model.parameters(), config.clip, error_if_nonfinite=True).item()
        self.optimizer.step()
        if self.state_bytes is None:
            self.state_bytes = count_state(self.model, self.optimizer)
        self.optimizer.zero_grad()
        self.step, self.stop_code = step, max(stop_codes)
        mean = sum(rank_losses) / self.group.size
        self.log.record(
            {
                "kind": "train",
                "step": step,
                "loss": mean,
                "bits_per_byte": bits(mean),
                "lr": self.optimizer.param_groups[-1]["lr"],
                "grad_norm": norm,
                "tokens_per_s": config.sequences * config.sequence / (time.perf_counter() - began),
                "elapsed_s": self.elapsed,
            }
        )

    def evaluate(self, kind: str, limit: int) -> float:
        """Return the mean cross-entropy in nats per byte over the first `limit` held-out bytes, and record it.

        A collective. Every rank runs the same number of forwards, which are collectives: windows are dealt out in
        rounds, and a rank without a window left in the last round predicts one that does not count.

        Raises:
            NonFiniteError: on all ranks, if it is not finite.
        """
        batch, sequence, group = self.config.batch, self.config.sequence, self.group
        text = whole_windows(self.corpus.validation, limit, sequence)
        total = 0.0
        self.model.eval()
        for first in range(0, len(text) // sequence, batch * group.size):
            own = first + group.rank * batch + np.arange(batch)
            counts = own < len(text) // sequence
            pairs = windows(text, np.where(counts, own, 0) * sequence, sequence)
            tokens = torch.from_numpy(pairs).to(group.device)
            with torch.no_grad():
                logits = self.model(tokens[:, :-1])
                losses = F.cross_entropy(logits.float().transpose(1, 2), tokens[:, 1:], reduction="none")
            total += float(losses.cpu()[torch.from_numpy(counts)].double().sum())  # not every device knows float64
        self.model.train()
        loss = sum(group.gather(total)) / (len(text) - 1)
        if not math.isfinite(loss):
            raise NonFiniteError(f"the validation loss is {loss}")
        record = {"kind": kind, "step": self.step, "loss": loss, "bits_per_byte": bits(loss)}
        self.log.record({**record, "bytes": len(text) - 1, "elapsed_s": self.elapsed})
        return loss
