"""Stops a run whose loss, gradients or weights are no longer finite, before they reach weights and checkpoints."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

import fullshard
from fullshard import clip_grad_norm_, get_total_norm
from fullshard.errors import NonFiniteError
from fullshard.train.group import Group

SHOWN = 4  # ranks or names in an error


class DivergedError(ArithmeticError):
    """A loss, gradient or weight is NaN or infinite. Raised on all ranks, with the step, the modules and the ranks."""


@contextlib.contextmanager
def find_origin(model: nn.Module, step: int) -> Iterator[None]:
    """Stop at the first value in the `with` block that is not finite, wherever it is in a step.

    Raises:
        DivergedError: on all ranks, with the module or parameter, the rank and the phase.
    """
    try:
        with fullshard.debug.find_nonfinite(model):
            yield
    except NonFiniteError as error:  # which counts its own steps
        raise DivergedError(f"step {step}, {str(error).partition(', ')[2]}") from error


def check_loss(model: nn.Module, inputs: Sequence[Tensor], losses: Sequence[float], step: int, group: Group) -> None:
    """Raise on all ranks if the loss of any rank is not finite. Then a collective, in which the model runs once more.

    Args:
        model: Model with the weights that the loss was computed with.
        inputs: Inputs of this rank, one for each forward.
        losses: Losses of all ranks.
        step: Current optimizer step.
        group: The ranks.

    Raises:
        DivergedError: On all ranks, with the ranks and the first modules whose output is not finite.
    """
    if all(map(math.isfinite, losses)):
        return
    found = zip(losses, group.gather(_first_module(model, inputs)), strict=True)
    bad = [f"{loss} on rank {n} (first in {name})" for n, (loss, name) in enumerate(found) if not math.isfinite(loss)]
    raise DivergedError(f"step {step}: the loss is {_listed(bad)}")


def clip_gradients(model: nn.Module, largest: float, step: int) -> float:
    """Scale gradients down so that their norm is at most `largest`. A collective.

    Returns:
        The norm before scaling.

    Raises:
        DivergedError: on all ranks, with the parameters, if a gradient is not finite.
    """
    with _named("gradients", step):
        return clip_grad_norm_(model.parameters(), largest, error_if_nonfinite=True).item()


def check_weights(model: nn.Module, step: int) -> None:
    """Raise if a weight is not finite after `step`. A collective.

    Raises:
        DivergedError: on all ranks, with the parameters.
    """
    with _named("weights", step):
        get_total_norm(model.parameters(), math.inf, error_if_nonfinite=True)


@contextlib.contextmanager
def _named(what: str, step: int) -> Iterator[None]:
    """Raise the `NonFiniteError` of the `with` block as a `DivergedError` with the names of the parameters."""
    try:
        yield
    except NonFiniteError as error:
        found = f"{what} are not finite: {_listed(error.names)}"
        if not error.names:
            found = f"the norm of the {what} overflows, although each is finite"
        raise DivergedError(f"step {step}: {found}") from error


def _listed(found: Sequence[str]) -> str:
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return ", ".join(found[:SHOWN]) + more


def _first_module(model: nn.Module, inputs: Sequence[Tensor]) -> str:
    """Run the forwards, and return the name of the first module whose output is not finite."""
    found: list[str] = []
    names = {module: name for name, module in model.named_modules()}

    def look(module: nn.Module, args: object, output: object) -> None:
        if isinstance(output, Tensor) and not output.isfinite().all():
            found.append(names[module])

    handles = [module.register_forward_hook(look) for module in names]
    try:
        with torch.no_grad():
            for tokens in inputs:
                model(tokens)
    finally:
        for handle in handles:
            handle.remove()
    return next(filter(None, found), "the loss, from finite outputs")
