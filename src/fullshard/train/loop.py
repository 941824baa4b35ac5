"""The training loop: the same code on every rank, one collective decision per step."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.nn.functional as F

import fullshard
from fullshard import CommQuantization, MixedPrecisionPolicy, fully_shard
from fullshard.activation_checkpoint import apply_activation_checkpointing
from fullshard.composable.fsdp_module import FSDPModule
from fullshard.errors import CheckpointError
from fullshard.train import finite
from fullshard.train.checkpoints import Checkpoints
from fullshard.train.config import TrainConfig
from fullshard.train.corpus import Corpus, sample
from fullshard.train.evaluation import HeldOut, evaluate
from fullshard.train.group import Group
from fullshard.train.log import RunLog, bits
from fullshard.train.model import GPT, Block, initialize
from fullshard.train.optimizer import learning_rate, set_learning_rates
from fullshard.train.run_folder import complete_checkpoints
from fullshard.train.stop import StopRequest
from fullshard.train.summary import Footprint

TRACED_STEPS = range(2, 7)  # with `trace`, after the start of the run or its resume
INTERMEDIATE_SHARE = 8  # validations during the run use one such share of `eval_bytes`


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


@dataclass
class Run:
    """A training run on one rank."""

    config: TrainConfig
    corpus: Corpus  # equal on every rank
    group: Group
    stop: StopRequest  # looked at in every step, see [Note: Stopping all ranks]
    model: GPT  # from `build_model`; trained in place
    optimizer: torch.optim.Optimizer
    checkpoints: Checkpoints
    log: RunLog  # gets a record of every step and validation
    step: int  # optimizer steps done; the batches of later ones are a function of the seed and the step's number
    started: float  # when the loop would have started without interruptions, by `time.perf_counter`
    footprints: tuple[Footprint, Footprint] | None = None  # on this rank, and of one unsharded copy; after a step
    stop_code: int = 0  # exit code that a rank was asked to stop with, the same on all; 0: none was

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
        steps = self.config.training.steps
        between = self.held_out(self.config.evaluation.eval_bytes // INTERMEDIATE_SHARE)
        begun, tracing = self.step, contextlib.ExitStack()
        try:
            while self.step < steps and not self.stop_code:
                if self.config.training.trace and self.step - begun == TRACED_STEPS.start:
                    tracing.enter_context(fullshard.trace(self.checkpoints.folder.parent / "trace"))
                debug = self.config.training.debug
                with finite.find_origin(self.model, self.step + 1) if debug else contextlib.nullcontext():
                    self._train_step(self.step + 1)
                if self.step - begun == TRACED_STEPS.stop:
                    tracing.close()
                if self.step == steps or self.step % self.config.evaluation.eval_every == 0:
                    self.evaluate("validation", between)
                self.checkpoints.poll()
                last = self.step == steps or bool(self.stop_code)
                if last or self.checkpoints.are_due(self.step):
                    finite.check_weights(self.model, self.step)
                if self.checkpoints.are_due(self.step, last=last):
                    self.log.sync()
                    text, sequences = self.config.data_sha256, self.config.sequences
                    position = {"elapsed": self.elapsed, "data_sha256": text, "sequences": sequences}
                    self.checkpoints.save(self.model, self.optimizer, self.step, **position)
        except finite.DivergedError as error:
            with contextlib.suppress(CheckpointError):  # on all ranks; what is wrong here comes first
                self.checkpoints.wait()
            kept = complete_checkpoints(self.checkpoints.folder)
            advice = f"The checkpoint {kept[-1].name} is kept: resume" if kept else "Start again under another --name"
            raise finite.DivergedError(f"{error}. {advice} with a lower --lr") from error
        tracing.close()  # of a run of fewer steps
        self.checkpoints.wait()

    def _train_step(self, step: int) -> None:
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
        everyone = self.group.gather((torch.stack(losses).sum().item(), self.stop.code))
        rank_losses, stop_codes = zip(*everyone, strict=True)
        if not settings.debug:  # which finds it before, also in backward
            finite.check_loss(self.model, [t[:, :-1] for t in microbatches], rank_losses, step, self.group)
        norm = finite.clip_gradients(self.model, settings.clip, step)
        self.optimizer.step()
        if self.footprints is None:
            self.footprints = self.measure()
        self.optimizer.zero_grad()
        self.step, self.stop_code = step, max(stop_codes)
        mean = sum(rank_losses) / self.group.size
        self.log.record(
            {
                "kind": "train",
                "step": step,
                "loss": mean,
                "bits_per_byte": bits(mean),
                "lr": learning_rate(step, settings),
                "grad_norm": norm,
                "tokens_per_s": self.config.sequences * sequence / (time.perf_counter() - began),
                "elapsed_s": self.elapsed,
            }
        )

    def held_out(self, limit: int) -> HeldOut:
        """Return the first `limit` of the held-out bytes."""
        return HeldOut.take(self.corpus.validation, limit, self.config.model.sequence)

    def evaluate(self, kind: str, held_out: HeldOut) -> float:
        """Return the loss on held-out bytes, and record it with their number. A collective.

        Raises:
            DivergedError: on all ranks, if it is not finite.
        """
        loss = evaluate(self.model, held_out, self.config.training.batch, self.group)
        if not math.isfinite(loss):
            finite.check_weights(self.model, self.step)
            raise finite.DivergedError(f"step {self.step}: the validation loss is {loss}")
        record = {"kind": kind, "step": self.step, "loss": loss, "bits_per_byte": bits(loss)}
        self.log.record({**record, "bytes": len(held_out.targets), "elapsed_s": self.elapsed})
        return loss

    def measure(self) -> tuple[Footprint, Footprint]:
        """Count the bytes of training state on this rank, and of one unsharded copy."""
        local, unsharded = (Footprint.of(self.model, self.optimizer, local=local) for local in (True, False))
        return local, unsharded
