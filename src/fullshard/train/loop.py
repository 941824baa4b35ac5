"""The training loop: the same code on every rank, one collective decision per step.

It stops a run whose loss, gradients or weights are no longer finite before they reach weights and checkpoints.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullshard
from fullshard import (
    CommQuantization,
    MixedPrecisionPolicy,
    async_save,
    clip_grad_norm_,
    fully_shard,
    get_total_norm,
)
from fullshard.activation_checkpoint import apply_activation_checkpointing
from fullshard.composable.fsdp_module import FSDPModule
from fullshard.errors import CheckpointError, NonFiniteError
from fullshard.train.config import ConfigError, TrainConfig
from fullshard.train.corpus import Corpus, sample, whole_windows, windows
from fullshard.train.group import Group
from fullshard.train.log import RunLog, bits
from fullshard.train.model import GPT, Block, initialize
from fullshard.train.optimizer import set_learning_rates
from fullshard.train.run_folder import CHECKPOINTS, complete_checkpoints, keep_newest, remove_incomplete
from fullshard.train.stop import StopRequest
from fullshard.train.summary import count_state

TRACED_STEPS = range(2, 7)  # with `trace`, after the start of the run or its resume
INTERMEDIATE_SHARE = 8  # validations during the run use one such share of `eval_bytes`


class DivergedError(ArithmeticError):
    """A loss, gradient or weight is NaN or infinite. Raised on all ranks, with the step and the place."""


@contextlib.contextmanager
def not_finite(step: int, what: str = "") -> Iterator[None]:
    """Raise a `NonFiniteError` of the `with` block, which counts steps of its own, as `DivergedError`."""
    try:
        yield
    except NonFiniteError as error:
        place = re.sub(r"^step \d+, microbatch \d+, ", "", str(error).partition(". Skip this step")[0])
        raise DivergedError(f"step {step}: {what}{place}") from error


def check_loss(model: nn.Module, inputs: Sequence[Tensor], losses: Sequence[float], step: int) -> None:
    """Raise on all ranks if the loss of any rank is not finite. Then a collective, in which the model runs once more.

    Args:
        model: the model with the weights that the loss was computed with.
        inputs: inputs of this rank, one for each forward.
        losses: losses of all ranks.
        step: the optimizer step.

    Raises:
        DivergedError: on all ranks, with the ranks and the first module whose output is not finite.
    """
    bad = [f"{loss} on rank {rank}" for rank, loss in enumerate(losses) if not math.isfinite(loss)]
    if not bad:
        return
    found = f"the loss is {', '.join(bad[:4])}" + (f" and {len(bad) - 4} more" if len(bad) > 4 else "")
    with not_finite(step, f"{found}; "), fullshard.debug.find_nonfinite(model), torch.no_grad():
        for tokens in inputs:
            model(tokens)
    raise DivergedError(f"step {step}: {found}; all outputs of modules are finite")


def check_weights(model: nn.Module, step: int) -> None:
    """Raise `DivergedError` on all ranks if a weight is not finite after `step`. A collective."""
    with not_finite(step, "weights: "):
        get_total_norm(model.parameters(), math.inf, error_if_nonfinite=True)


def build_model(config: TrainConfig, group: Group) -> GPT:
    """Build the initialized model, with every block and then the root sharded over all ranks."""
    model = GPT(config.model)
    initialize(model, config.seed)
    model.to(group.device)
    if config.activation_checkpointing:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    precision = MixedPrecisionPolicy()
    if config.dtype == "bf16":
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


def load_position(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Load a checkpoint into a sharded model and its optimizer. All ranks call it and get the same result or error.

    Options of the optimizer's groups stay those of the settings.

    Returns:
        The position that was saved: `step`, and what else `save` was given as `position`.

    Raises:
        ConfigError: the checkpoint is damaged, does not fit, or is not one of `fullshard train`. The message names the
            older complete checkpoints: which of them is good enough is the user's choice.
    """
    options = [{name: group[name] for name in group if name != "params"} for group in optimizer.param_groups]
    try:
        extra = fullshard.load(checkpoint, model, optimizer)
    except CheckpointError as error:
        complete = complete_checkpoints(checkpoint.parent)
        older = ", ".join(str(path) for path in itertools.takewhile(lambda path: path != checkpoint, complete))
        advice = (
            f"Older checkpoints: {older}. Start from one of them with --resume PATH and another --name"
            if older
            else "There is no older checkpoint: choose another --name to start from the beginning"
        )
        raise ConfigError(f"cannot resume: {error}. {advice}") from error
    if "position" not in extra:
        raise ConfigError(f"cannot resume: {checkpoint} was not written by fullshard train")
    for parameters, own in zip(optimizer.param_groups, options, strict=True):
        parameters.update(own)
    return dict(extra["position"])


@dataclass
class Run:
    """A training run on one rank."""

    config: TrainConfig
    corpus: Corpus  # equal on every rank
    group: Group
    stop: StopRequest  # looked at in every step, see [Note: Stopping all ranks]
    model: GPT  # from `build_model`; trained in place
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
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.folder / CHECKPOINTS

    @property
    def elapsed(self) -> float:
        """Seconds in the training loop, over all parts of the run."""
        return time.perf_counter() - self.started

    def train(self) -> None:
        """Run all remaining steps, with validations in between, and checkpoints, the last of which is complete.

        Raises:
            CheckpointError: on all ranks, if the last checkpoint cannot be written, or one cannot be begun.
            DivergedError: on all ranks, if a loss, gradient or weight is not finite; no checkpoint is being written any
                more then.
        """
        config, begun, tracing = self.config, self.step, contextlib.ExitStack()
        try:
            while self.step < config.steps and not self.stop_code:
                if config.trace and self.step - begun == TRACED_STEPS.start:
                    tracing.enter_context(fullshard.trace(self.folder / "trace"))
                searched = fullshard.debug.find_nonfinite(self.model) if config.debug else contextlib.nullcontext()
                with not_finite(self.step + 1), searched:
                    self._train_step(self.step + 1)
                if self.step - begun == TRACED_STEPS.stop:
                    tracing.close()
                if self.step == config.steps or self.step % config.eval_every == 0:
                    self.evaluate("validation", config.eval_bytes // INTERMEDIATE_SHARE)
                if self._saving and self._saving.done() and not self._saving.exception():
                    self.finish_save()  # no collective: ranks may see it at different steps
                every, last = config.checkpoint_interval, self.step == config.steps or bool(self.stop_code)
                is_due = every > 0 and (last or self.step % every == 0)
                if last or is_due:
                    check_weights(self.model, self.step)
                if is_due and self.saved_step != self.step:
                    self.begin_save()
        except DivergedError as error:
            with contextlib.suppress(CheckpointError):  # on all ranks; the DivergedError comes first
                self.finish_save()
            kept = complete_checkpoints(self.checkpoints)
            advice = f"The checkpoint {kept[-1].name} is kept: resume" if kept else "Start again under another --name"
            raise DivergedError(f"{error}. {advice} with a lower --lr") from error
        tracing.close()  # of a run of fewer steps
        self.finish_save()

    def begin_save(self) -> None:
        """Start to save; return as soon as this rank's shards are copied. Waits for the previous save.

        If that failed, for want of space for example, the run goes on, and this one is the next attempt.

        Raises:
            CheckpointError: on all ranks, if this checkpoint cannot be begun.
        """
        self.log.sync()
        try:
            self.finish_save()
        except CheckpointError as error:  # on all ranks
            self.log.say(f"warning: the checkpoint after step {self.saved_step} was not written: {error}")
            if self.group.rank == 0:
                remove_incomplete(self.checkpoints)  # what it has left takes up space
        self._save_began, self.saved_step = time.perf_counter(), self.step
        position = {
            "step": self.step,
            "elapsed": self.elapsed,
            "data_sha256": self.config.data_sha256,
            "sequences": self.config.sequences,
        }
        path = self.checkpoints / f"step-{self.step:08d}"
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
                keep_newest(self.checkpoints, self.config.keep)

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
        for number, tokens in enumerate(microbatches, start=1):
            sharded(self.model).set_requires_gradient_sync(number == len(microbatches))
            logits = self.model(tokens[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()) / len(microbatches)
            torch.autograd.backward(loss)
            losses.append(loss.detach())
        everyone = self.group.gather((torch.stack(losses).sum().item(), self.stop.code))
        rank_losses, stop_codes = zip(*everyone, strict=True)
        if not config.debug:  # which finds it before, also in backward
            check_loss(self.model, [tokens[:, :-1] for tokens in microbatches], rank_losses, step)
        with not_finite(step, "gradients: "):
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
            DivergedError: on all ranks, if it is not finite.
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
            check_weights(self.model, self.step)
            raise DivergedError(f"step {self.step}: the validation loss is {loss}")
        record = {"kind": kind, "step": self.step, "loss": loss, "bits_per_byte": bits(loss)}
        self.log.record({**record, "bytes": len(text) - 1, "elapsed_s": self.elapsed})
        return loss
