"""The optimizers of a run and their learning rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fullshard.optim import Muon, localize
from fullshard.train.config import TrainingConfig
from fullshard.train.model import GPT

BETAS = (0.9, 0.95)
FLOOR = 0.05  # share of the peak that the cosine ends at
PEAK = "peak_lr"  # option of a parameter group: its learning rate between warm-up and decay


class OptimizerList(torch.optim.Optimizer):
    """Several optimizers as one, so that they are stepped, saved and loaded together.

    Args:
        parts: optimizers of different parameters. They share groups and state with this one.
    """

    parts: Sequence[torch.optim.Optimizer]

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts
        for part in parts:
            self.state.update(part.state)
            part.state = self.state

    def step(self, closure: Any = None) -> Any:
        """Step all parts."""
        if closure is not None:
            raise ValueError("an OptimizerList takes no closure")
        for part in self.parts:
            part.step()


def build_optimizer(model: GPT, config: TrainingConfig) -> torch.optim.Optimizer:
    """Return the optimizer of a sharded model; weight decay on matrices only.

    AdamW steps its parameters as local tensors. With Muon, it steps those that are no matrices of blocks.
    """
    in_blocks = {id(p) for p in model.blocks.parameters()} if config.optimizer == "muon" else set()
    parameters = list(model.parameters())
    hidden = [p for p in parameters if p.dim() == 2 and id(p) in in_blocks]
    matrices = [p for p in parameters if p.dim() >= 2 and not (p.dim() == 2 and id(p) in in_blocks)]
    vectors = [p for p in parameters if p.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, PEAK: config.lr},
        {"params": vectors, PEAK: config.lr, "weight_decay": 0.0},
    ]
    adamw = localize(torch.optim.AdamW(groups, config.lr, BETAS, weight_decay=config.weight_decay, fused=True))
    if not hidden:
        return adamw
    muon = Muon([{"params": hidden, PEAK: config.muon_lr}], lr=config.muon_lr, weight_decay=config.weight_decay)
    return OptimizerList(muon, adamw)


def set_learning_rates(optimizer: torch.optim.Optimizer, step: int, config: TrainingConfig) -> None:
    """Set the learning rate of each group for optimizer step `step`."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, config, group[PEAK])


def learning_rate(step: int, config: TrainingConfig, peak: float | None = None) -> float:
    """Return the rate of optimizer step `step` (counted from 1): linear warm-up, then a cosine to 1/20 of the peak.

    Args:
        step: the step.
        config: steps and warm-up.
        peak: the largest rate; None: `config.lr`.
    """
    peak = config.lr if peak is None else peak
    if step <= config.warmup:
        return peak * step / (config.warmup + 1)
    progress = (step - config.warmup) / max(1, config.steps - config.warmup)
    return peak * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))
