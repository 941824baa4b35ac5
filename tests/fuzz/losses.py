"""The loss of an operation: the same function of a sharded and of an unsharded model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from containers import tensors_of
from fuzz.models import FEATURES, VOCABULARY, Sizes, set_rank
from fuzz.plan import HistoryPlan, ModelPlan, Operation
from fuzz.reference import Side

DOUBLE_BACKWARD = ("penalty", "penalty only", "force")


@dataclass(frozen=True)
class Loss:
    """Of the batch of one rank.

    Args:
        plan: Of the model.
        seed: Of the batches.
        kind: "square": a mean of the squares' logarithms, which cannot diverge, of all outputs. "penalty": and of the
            gradient of the input. "penalty only": without the first. "force": how far that gradient is from a target.
        run: Which blocks run; None: all.
        every: Whether all of the root's outputs count, or the first.
        inputs: Whether inputs require gradients anyway.
        toggle: Flags that change inside of the forward; see ``Root.forward``.
        outside: How logits are computed after the forward: the head "called", or its weight "read", or "backwards":
            called, with a backward for each chunk. "": inside of it.
        dtype: Of inputs.
        scale: By which the loss is multiplied; see ``HistoryPlan.loss_scale``.
    """

    plan: ModelPlan
    seed: int
    kind: str = "square"
    run: Sequence[int] | None = None
    every: bool = True
    inputs: bool = False
    toggle: tuple[int, str] | None = None
    outside: str = ""
    dtype: torch.dtype = torch.float64
    scale: float = 1.0

    @classmethod
    def of(cls, plan: HistoryPlan, operation: Operation) -> Loss:
        """That an operation's arguments describe."""
        given: dict[str, Any] = operation.arguments
        names = ("run", "every", "inputs", "toggle", "outside")
        options = {name: given[name] for name in names if name in given}
        kind, seed = given.get("loss", "square"), 1000 * plan.seed + operation.data
        return cls(plan.model, seed, kind=kind, scale=plan.loss_scale, **options)

    def batch(self, rank: int, number: int = 0) -> torch.Tensor:
        """The input of a rank, of the ``number``-th batch."""
        generator = torch.Generator().manual_seed(100 * (10 * self.seed + number) + rank)
        shape = (self.plan.batch, Sizes(self.plan).steps)
        if self.plan.tokens:
            return torch.randint(VOCABULARY, shape, generator=generator)
        return torch.randn(*shape, FEATURES, generator=generator, dtype=torch.float64).to(self.dtype)

    def outputs(self, side: Side, rank: int, number: int = 0, *, inputs: bool = False) -> Sequence[torch.Tensor]:
        """The root's input, and its outputs."""
        set_rank(side.model, rank)
        x = self.batch(rank, number)
        if inputs and x.is_floating_point():
            x.requires_grad_()
        hidden, *others = tensors_of(side.forward(x, run=self.run, toggle=self.toggle, hidden=bool(self.outside)))
        found = self._logits(side.model, hidden) if self.outside else [hidden]
        return [x, *found, *(others if self.every else ())]

    def _logits(self, model: nn.Module, hidden: torch.Tensor) -> Sequence[torch.Tensor]:
        """Of two chunks of steps, after the forward."""
        given = hidden.detach().requires_grad_() if self.outside == "backwards" else hidden
        head, found = model.head, []
        for chunk in given.chunk(2, dim=1):
            logits = linear(chunk, head.weight) if self.outside == "read" else head(chunk)
            logits = logits * hidden.shape[-1] ** -0.5
            if self.outside == "backwards":
                (self.scale * _mean(logits)).backward()
                logits = logits.detach()
            found.append(logits)
        if self.outside == "backwards" and given.grad is not None:
            found.append(_Passes.apply(hidden, given.grad))
        return found

    def __call__(self, side: Side, rank: int, number: int = 0) -> torch.Tensor:
        """The loss of a rank on the ``number``-th batch."""
        if self.kind == "jvp":
            return self._of_jvp(side, rank, number)
        x, *outputs = self.outputs(side, rank, number, inputs=self.inputs or self.kind in DOUBLE_BACKWARD)
        loss = self.scale * _sum(_mean(output) for output in outputs)
        if self.kind in DOUBLE_BACKWARD:
            total = _sum(torch.sin(output.double()).sum() for output in outputs)
            gradient = None
            if total.requires_grad:
                (gradient,) = torch.autograd.grad(total, x, create_graph=True, allow_unused=True)
            if gradient is not None:
                target = torch.cos(self.batch(rank, number + 5)) if self.kind == "force" else 0.0
                penalty = _mean(gradient - target)
                loss = loss + penalty if self.kind == "penalty" else penalty
        return loss

    def _of_jvp(self, side: Side, rank: int, number: int) -> torch.Tensor:
        set_rank(side.model, rank)
        x = self.batch(rank, number)
        outputs, tangents = torch.func.jvp(
            lambda x: tuple(tensors_of(side.forward(x, run=self.run, toggle=self.toggle))),
            (x.requires_grad_(self.inputs),),
            (torch.cos(self.batch(rank, number + 5)),),
        )
        return _sum(_mean(value) for value in (*outputs, *tangents))


class _Passes(torch.autograd.Function):
    """A number whose backward passes on a gradient that was computed before."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return gradient.new_zeros(())

    @staticmethod
    def backward(ctx: Any, upper: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.saved_tensors[0], None


def _mean(output: torch.Tensor) -> torch.Tensor:
    return output.double().square().log1p().mean()


def _sum(values: Iterable[torch.Tensor]) -> torch.Tensor:
    first, *others = values
    for value in others:
        first = first + value
    return first
