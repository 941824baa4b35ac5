"""The unsharded model: it sees the batches of all ranks, one after the other, and averages their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fuzz.comparison import largest
from fuzz.models import Root


class Side:
    """A model and how it is called: of both models the same can be asked.

    Args:
        model: Sharded, or not.
        forward: Calls it; None: as any module.
    """

    def __init__(self, model: nn.Module, forward: Callable[..., Any] | None = None) -> None:
        self.model, self.forward = model, forward or model


def _own_gradient(parameter: torch.Tensor) -> None:
    """Operand the gradient into memory of its own.

    Autograd takes what it computes for ``.grad`` as it is, and adds the next gradient in place: where two parameters
    have one gradient (``a.view(1, -1) + b.view(1, -1)``), to both at once.
    """
    if parameter.grad is not None:  # else it was frozen since its forward
        parameter.grad = parameter.grad.clone()


class Reference(Side):
    """See the module docstring.

    Args:
        model: In the dtypes of the sharded model's shards.
        world_size: Number of ranks whose batches are seen.

    Attributes:
        cancellation: How much larger than the gradient of a parameter the largest of its addends is. The rounding
            error of a sum is relative to its addends.
    """

    cancellation: dict[nn.Parameter, float]
    _largest_addend: dict[nn.Parameter, float]

    def __init__(self, model: Root, world_size: int) -> None:
        super().__init__(model)
        self.model: Root = model
        self.world_size = world_size
        self.cancellation, self._largest_addend = {}, {}

    def _take_gradients(self) -> list[torch.Tensor | None]:
        """Of all parameters; there are none afterwards."""
        taken = [parameter.grad for parameter in self.model.parameters()]
        self.model.zero_grad()
        return taken

    def average(self, work: Callable[[Side, int], torch.Tensor]) -> list[torch.Tensor]:
        """Add to ``.grad`` the mean over ranks of what ``work(self, rank)`` adds to it; what it returns, by rank."""
        before = self._take_gradients()
        for parameter in self.model.parameters():
            if not parameter._post_accumulate_grad_hooks and parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_own_gradient)
        totals: list[torch.Tensor | None] = [None] * len(before)
        addends: list[list[float]] = [[] for _ in before]
        flags = [parameter.requires_grad for parameter in self.model.parameters()]
        results = []
        for rank in range(self.world_size):
            for parameter, flag in zip(self.model.parameters(), flags, strict=True):
                parameter.requires_grad_(flag)  # the forward of another rank may have changed it
            results.append(work(self, rank))
            for index, gradient in enumerate(self._take_gradients()):
                total = totals[index]
                if gradient is not None:
                    totals[index] = gradient if total is None else total + gradient
                    addends[index].append(largest(gradient))
        for parameter, total, old in zip(self.model.parameters(), totals, before, strict=True):
            mean = None if total is None else total / self.world_size
            parameter.grad = mean if old is None else old if mean is None else old + mean
        for parameter, new, old in zip(self.model.parameters(), addends, before, strict=True):
            earlier = 0.0 if old is None else self._largest_addend.get(parameter, largest(old))
            if new:
                self._largest_addend[parameter] = max(*new, earlier)
                self.cancellation[parameter] = max(*new, earlier) / (largest(parameter.grad) or 1.0)
        return results

    def fill(self, flat: Sequence[Sequence[nn.Parameter]]) -> None:
        """Of each flat parameter, missing gradients are zeros if others of its parameters have some."""
        for parameters in flat:
            if any(parameter.grad is not None for parameter in parameters):
                for parameter in parameters:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
