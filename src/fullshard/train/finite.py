"""Stops a run whose loss, gradients or weights are no longer finite, before they reach weights and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fullshard import clip_grad_norm_, get_total_norm
from fullshard.errors import NonFiniteError
from fullshard.train.group import Group

SHOWN = 4  # ranks or names in an error


class DivergedError(ArithmeticError):
    """A loss, gradient or weight is NaN or infinite. Raised on all ranks, with the step, the modules and the ranks."""

    def __init__(self, step: int, found: str) -> None:
        super().__init__(f"step {step}: {found}")

    def with_advice(self, advice: str) -> DivergedError:
        """Return this error with a sentence added."""
        self.args = (f"{self}. {advice}",)
        return self


def check_loss(model: nn.Module, inputs: Sequence[Tensor], own: float, total: float, step: int, group: Group) -> None:
    """Raise if the loss of any rank is not finite; only then a collective, in which the model runs once more.

    Args:
        model: with the weights that the loss was computed with.
        inputs: of this rank, one for each forward.
        own: loss of this rank.
        total: sum of the losses of all ranks.
        step: the optimizer step that is under way.
        group: the ranks.

    Raises:
        DivergedError: on all ranks, with the ranks and the first modules whose output is not finite.
    """
    if math.isfinite(total):
        return
    found = enumerate(group.gather((own, _first_module(model, inputs))))
    bad = [f"{loss} on rank {rank} (first in {name})" for rank, (loss, name) in found if not math.isfinite(loss)]
    raise DivergedError(step, f"the loss is {_listed(bad)}")


def clip_gradients(model: nn.Module, largest: float, step: int) -> float:
    """Scale gradients down so that their norm is at most `largest`. A collective.

    Returns:
        The norm before scaling.

    Raises:
        DivergedError: on all ranks, with the parameters, if a gradient is not finite.
    """
    try:
        return clip_grad_norm_(model.parameters(), largest, error_if_nonfinite=True).item()
    except NonFiniteError as error:
        raise DivergedError(step, _described("gradients", error.names)) from error


def check_weights(model: nn.Module, step: int) -> None:
    """Raise if a weight is not finite after `step`. A collective.

    Raises:
        DivergedError: on all ranks, with the parameters.
    """
    try:
        get_total_norm(model.parameters(), math.inf, error_if_nonfinite=True)
    except NonFiniteError as error:
        raise DivergedError(step, _described("weights", error.names)) from error


def _described(what: str, names: Sequence[str]) -> str:
    if not names:
        return f"the norm of the {what} overflows, although each is finite"
    return f"{what} are not finite: {_listed(names)}"


def _listed(found: Sequence[str]) -> str:
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return ", ".join(found[:SHOWN]) + more


def _first_module(model: nn.Module, inputs: Sequence[Tensor]) -> str:
    """Run the forwards, and return the name of the first module whose output is not finite."""
    found: list[str] = []

    def look(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: object, output: object) -> None:
            if isinstance(output, Tensor) and not found and not bool(output.isfinite().all()):
                found.append(name)

        return hook

    handles = [module.register_forward_hook(look(name)) for name, module in model.named_modules()]
    try:
        with torch.no_grad():
            for tokens in inputs:
                model(tokens)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found and found[0] else "the loss, from finite outputs"
