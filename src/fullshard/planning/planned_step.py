"""Figures of a planned step, and what follows from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fullshard.planning.choices import Choices
from fullshard.planning.cluster import Cluster
from fullshard.planning.dry_run import Step
from fullshard.planning.nearest import Published, nearest
from fullshard.planning.search import Alternative

__all__ = ["PlannedStep"]


@dataclass(frozen=True)
class PlannedStep:
    """Memory and time of one training step of a model on a cluster, with some choices.

    Attributes:
        model: Name of the model's class.
        parameters: Of the model.
        ranks: Of the job.
        rows: Of a rank's batch, over all microbatches: the size of its first dimension.
        tokens: Of a rank in a step, if the batch has token ids; else 0.
        cluster: The machine.
        choices: How the model is sharded.
        step: What the dry run found.
        alternatives: What a search looked at beside these choices, and what would change; empty without a search.
        assumptions: What was assumed, and may be otherwise.
    """

    model: str
    parameters: int
    ranks: int
    rows: int
    tokens: int
    cluster: Cluster
    choices: Choices
    step: Step
    alternatives: Sequence[Alternative] = ()
    assumptions: Sequence[str] = field(default_factory=tuple)

    @property
    def allocated_bytes(self) -> int:
        """Most bytes of tensors on a rank at a time."""
        return self.step.peak.nbytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the caching allocator of a GPU has taken from the device; those of tensors on a CPU."""
        return self.step.reserved

    @property
    def fits(self) -> bool:
        """True if ``reserved_bytes`` are at most those that may be used: 95 % of the device's memory."""
        return self.reserved_bytes <= self.cluster.usable

    @property
    def exposed_seconds(self) -> float:
        """Seconds of a step in which a rank waits for communication, and computes nothing."""
        return sum(each.seconds for each in self.step.trace.exposed(0))

    @property
    def tokens_per_second(self) -> float:
        """Of a rank; 0 if the batch has no token ids."""
        return self.tokens / self.step.seconds

    @property
    def nearest(self) -> Published | None:
        """The published run that is most like this one, if there is one."""
        tokens = self.tokens // self.choices.microbatches
        if not tokens or not self.cluster.gpu:
            return None
        return nearest(
            self.parameters,
            self.ranks,
            tokens,
            self.cluster.gpu,
            float(self.choices.checkpoint_activations),
        )

    @property
    def hfu(self) -> float:
        """Floating-point operations of the step, recomputed ones too, over the device's in the dtype of computation."""
        name = {"bf16": "bfloat16", "fp16": "float16"}.get(self.choices.mixed_precision or "", "float32")
        flops = self.cluster.flops.get(name, max(self.cluster.flops.values()))
        return self.step.flops / self.step.seconds / flops

    def code(self) -> str:
        """Return the lines of Python that shard a model so."""
        return self.choices.code(self.ranks)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as values that JSON can hold."""
        peak = self.step.peak
        return {
            "model": self.model,
            "parameters": self.parameters,
            "ranks": self.ranks,
            "rows": self.rows,
            "cluster": dataclasses.asdict(self.cluster),
            "choices": dataclasses.asdict(self.choices),
            "memory": {
                "usable": self.cluster.usable,
                "allocated": self.allocated_bytes,
                "reserved": self.reserved_bytes,
                "resting": self.step.resting,
                "fits": self.fits,
                "where": list(peak.where),
                "parts": dict(peak.parts),
            },
            "time": {
                "step": self.step.seconds,
                "tokens_per_second": self.tokens_per_second,
                "hfu": self.hfu,
                "kinds": dict(self.step.kinds),
                "computation": self.step.computation,
                "exposed": self.exposed_seconds,
                "flops": self.step.flops,
            },
            "alternatives": [dataclasses.asdict(each) for each in self.alternatives],
            "nearest": None if self.nearest is None else dict(self.nearest.text),
            "assumptions": list(self.assumptions),
        }
