"""The learning-rate schedule."""

from __future__ import annotations

import math

from fullshard.train.config import TrainingConfig

FLOOR = 0.05  # share of the peak that the cosine ends at


def learning_rate(step: int, config: TrainingConfig) -> float:
    """Return the rate of optimizer step `step` (counted from 1): linear warm-up, then a cosine to 1/20 of the peak."""
    if step <= config.warmup:
        return config.lr * step / (config.warmup + 1)
    progress = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.lr * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))
