"""The optimizer of a run: Muon for the matrices of blocks and AdamW for all else, or AdamW for everything."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import AdamW, Optimizer

from fullshard.optim import Muon
from fullshard.train.config import TrainConfig
from fullshard.train.model import GPT

BETAS, EPS = (0.8, 0.95), 1e-10  # rows of rare n-grams have small gradients
HEAD = 0.07  # the head's learning rate, in those of the embeddings: its every column has gradients in every step
COOLING = 0.7  # share of the steps in which learning rates fall
PEAK, METHOD = "peak_lr", "method"  # options of parameter groups: the largest learning rate; "muon" or "adamw"


class MuonAndAdamW(Optimizer):
    """Two optimizers as one that is stepped, saved and loaded: each steps the groups whose `METHOD` names it."""

    parts: dict[str, Optimizer]

    def __init__(self, groups: list[dict[str, Any]], weight_decay: float) -> None:
        # Momentum is orthogonalized in fp32: few CPUs multiply bf16 matrices fast.
        muon = Muon(_of("muon", groups), weight_decay=weight_decay, ns_dtype=torch.float32)
        adamw = AdamW(_of("adamw", groups), betas=BETAS, eps=EPS, weight_decay=weight_decay, fused=True)
        self.parts = {"muon": muon, "adamw": adamw}
        super().__init__([*muon.param_groups, *adamw.param_groups], {})

    def step(self, closure: Any = None) -> Any:
        """Step all parameters. A collective."""
        if closure is not None:
            raise ValueError("MuonAndAdamW.step() does not support a closure")
        for method, part in self.parts.items():  # loading replaces groups and state of this optimizer
            part.param_groups, part.state = _of(method, self.param_groups), self.state
            part.step()


def build_optimizer(model: GPT, config: TrainConfig) -> Optimizer:
    """Return the optimizer of a sharded model. Only matrices of blocks decay. The last group has the rate `lr`."""
    head, embedding = [model.head.weight], list(model.embedding.parameters())
    groups: list[dict[str, Any]] = [
        {"params": list(model.blocks.parameters()), PEAK: config.muon_lr, METHOD: "muon"},
        {"params": head, PEAK: HEAD * config.lr, METHOD: "adamw", "weight_decay": 0.0},
        {"params": embedding, PEAK: config.lr, METHOD: "adamw", "weight_decay": 0.0},
    ]
    if config.optimizer == "muon":
        return MuonAndAdamW(groups, config.weight_decay)
    groups[0].update({PEAK: HEAD * config.lr, METHOD: "adamw"})
    return AdamW(groups, betas=BETAS, eps=EPS, weight_decay=config.weight_decay, fused=True)


def set_learning_rates(optimizer: Optimizer, step: int, config: TrainConfig) -> None:
    """Set the rates of step `step` (counted from 1): linear warm-up, the peak, a linear decay to zero."""
    rise = step / (config.warmup + 1)
    fall = (config.steps + 1 - step) / max(1.0, COOLING * config.steps)
    for group in optimizer.param_groups:
        group["lr"] = group[PEAK] * max(0.0, min(1.0, rise, fall))


def _of(method: str, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [group for group in groups if group[METHOD] == method]
