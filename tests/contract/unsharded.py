"""A third library for programs with ``fully_shard``: nothing is sharded. It tells which of two losses is right."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn


class _Handle:
    def wait(self) -> None:
        """Nothing is under way."""


METHODS = (
    "reset_iter_state",
    "reshard",
    "set_is_last_backward",
    "set_requires_gradient_sync",
    "set_reshard_after_backward",
    "set_reshard_after_forward",
    "unshard",
)


def fully_shard(target: nn.Module | list[nn.Module], **settings: Any) -> None:
    """Give modules the methods of a unit, which do nothing."""
    for module in target if isinstance(target, list) else [target]:
        for method in METHODS:
            setattr(module, method, lambda *arguments, **options: _Handle())


def MixedPrecisionPolicy(**options: Any) -> None:  # noqa: N802
    """Compute in the dtypes that parameters have."""


def CPUOffloadPolicy(**options: Any) -> None:  # noqa: N802
    """Leave parameters where they are."""


def average_gradients(model: nn.Module) -> None:
    """Average gradients over the ranks."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())
