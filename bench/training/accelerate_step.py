"""A training step through accelerate: with torch's FSDP2, and with fullshard in its place, on gloo CPU ranks.

The step is that of ``examples/accelerate_gpt.py``: ``accumulate``, ``backward``, ``clip_grad_norm_``, AdamW. All
contestants run the same code; for fullshard's, ``fullshard.dropin.install()`` comes before it. They take turns as in
``step``: ratios are paired per round, and a run whose losses disagree reports no times. Needs accelerate
(``make test-clients`` installs it).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from bench.command_line import UsageError, option
from bench.contestants import FSDP2, FULLSHARD, WITHOUT_OURS, set_allocator, with_setting
from bench.models import GPT, next_token_loss
from bench.report import column
from bench.training import page, trainer
from bench.training.contest import Measurement, TrainingOptions
from bench.training.page import FINAL_LOSS, MILLISECONDS, NOTES, Benchmark, Result, memory_columns
from bench.worker import join_group

CLIP = 1.0  # largest norm of the gradients
TAKING_PART = (*with_setting((FSDP2,)), FULLSHARD, f"{FULLSHARD}{WITHOUT_OURS}")


def notes(results: Mapping[str, Result]) -> list[str]:
    """What accelerate it was."""
    versions = {result["accelerate"] for result in results.values()}
    return [*NOTES, f"Gradients clipped. accelerate {', '.join(versions)}, FSDP version 2, a unit per block."]


BENCHMARK = Benchmark(
    name="accelerate_step",
    measurements=(Measurement("step", "a training step in fp32", TAKING_PART),),
    columns=(
        MILLISECONDS,
        column("step / FSDP2", "time_ratio_to_fsdp2"),
        column("step / FSDP2 with our malloc setting", "time_ratio_to_fsdp2_with_our_malloc"),
        *memory_columns("FSDP2", "_to_fsdp2"),
        FINAL_LOSS,
    ),
    title="A step through accelerate",
    notes=notes,
    trainer=__name__,
    figures=lambda: {"accelerate": metadata.version("accelerate")},
)


@dataclass(frozen=True, kw_only=True)
class Options(TrainingOptions):
    """All contestants at both widths: about five minutes on two cores."""

    only: tuple[str, ...] = option((), choices=TAKING_PART)


def run(options: Options) -> bool:
    if importlib.util.find_spec("accelerate") is None:
        raise UsageError("accelerate is not installed: `make test-clients` installs what clients' tests need")
    return page.run(BENCHMARK, options)


class Trainer(trainer.Trainer):
    """A rank whose model accelerate has sharded with FSDP2, torch's or fullshard's in its place."""

    accelerator: Any

    def prepare(self) -> None:
        """Make the accelerator, which shards on accelerators only: it is told that these processes are such."""
        given = self.assignment
        if given.contestant.system == FULLSHARD:
            import fullshard.dropin

            fullshard.dropin.install(quiet=True)
        from accelerate import Accelerator, FullyShardedDataParallelPlugin
        from accelerate.state import PartialState
        from accelerate.utils import DistributedType

        join_group(given.rank, given.ranks, given.store)
        ranks = {"RANK": given.rank, "LOCAL_RANK": given.rank}
        os.environ |= {name: str(value) for name, value in ranks.items()}
        os.environ |= {"WORLD_SIZE": str(given.ranks), "LOCAL_WORLD_SIZE": str(given.ranks)}
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
        )
        self.accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)

    def build(self) -> None:
        model = GPT(self.shape)
        set_allocator(self.assignment.contestant)
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.assignment.learning_rate)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        ours = any(base.__module__.startswith("fullshard") for base in type(self.model).__mro__)
        contestant = self.assignment.contestant
        if ours != (contestant.system == FULLSHARD):
            raise RuntimeError(f"the model became a {type(self.model).__mro__}, which is not {contestant.name}'s")

    def train_on(self, batches: list[Any]) -> list[torch.Tensor]:
        losses = []
        for batch in batches:
            with self.accelerator.accumulate(self.model):
                loss = next_token_loss(self.model, batch)
                self.accelerator.backward(loss)
                self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
                self.optimizer.step()
                self.optimizer.zero_grad()
            losses.append(loss.detach())
        return losses


def build(**given: Any) -> Trainer:
    return Trainer(trainer.Assignment.of(**given))
