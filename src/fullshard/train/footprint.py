"""Bytes of training state on a rank, and of one unsharded copy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Footprint:
    """Bytes of training state.

    Attributes:
        parameters: bytes of parameters.
        gradients: bytes of gradients.
        optimizer: bytes of optimizer state.
    """

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Sum of all three."""
        return self.parameters + self.gradients + self.optimizer


def measure(model: nn.Module, optimizer: torch.optim.Optimizer, *, local: bool) -> Footprint:
    """Count bytes after a step and before gradients are cleared; a missing gradient counts as its parameter.

    Args:
        model: the sharded model.
        optimizer: its optimizer.
        local: count the tensors that this rank holds; otherwise the full size of what they are shards of.
    """
    parameters = list(model.parameters())
    gradients = (p if p.grad is None else p.grad for p in parameters)
    state = (t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor))
    return Footprint(*(_bytes(tensors, local=local) for tensors in (parameters, gradients, state)))


def as_dict(footprint: Footprint) -> dict[str, int]:
    """Return the footprint as plain numbers, for sending and for files."""
    return asdict(footprint)


def _bytes(tensors: Iterable[Tensor], *, local: bool) -> int:
    unsharded = (t.to_local() if local and isinstance(t, DTensor) else t for t in tensors)
    return sum(t.numel() * t.element_size() for t in unsharded)
