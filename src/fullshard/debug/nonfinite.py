"""Find out where a value became NaN or infinite.

[Note: The origin of a value that is not finite]
Every value of a step is looked at, in the order in which they are computed. The first one that is not finite is where
it began on this rank: whatever depends on it comes later. Before an optimizer steps, all ranks compare what they have
found, and raise the earliest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fullshard.debug.values import ModuleValues, values_here
from fullshard.engine.containers import iterate_tensors
from fullshard.engine.optimizer_steps import stepped_units
from fullshard.engine.ownership import units_of
from fullshard.engine.parameters.names import clean_name
from fullshard.engine.unit import Unit
from fullshard.errors import NonFiniteError
from fullshard.progress import PROGRESS, StepCount
from fullshard.ranks.agreement import gather_found, list_ranks, own_rank
from fullshard.ranks.groups import groups_of

__all__ = ["find_nonfinite"]

_PHASES = ("forward", "backward", "reduction of gradients")


@contextlib.contextmanager
def find_nonfinite(model: nn.Module) -> Iterator[None]:
    """While the context is open, raise where a value of ``model`` has become NaN or infinite, on all ranks.

    For finding the cause of a loss that is NaN. Every value that a module takes or returns is looked at, which makes
    steps slower, and blocks the host on accelerators. All ranks open and close the context together.

    Errors are raised before an optimizer of the model's parameters steps, by the ranks of the units that it steps, and
    at the end of the context, by all: both are collectives. Values inside of ``torch.compile``\\ d modules, and between
    modules, are seen where they enter the next module. Infinite values that are meant, such as a mask that a module
    returns, are reported too.

    Args:
        model: A model that is sharded by ``fully_shard`` or ``FullyShardedDataParallel``, or one with such parts. Of
            another one, a rank raises what it has found itself.

    Raises:
        NonFiniteError: On all ranks, with the first value that is not finite: the module, or the FQN of the parameter,
            the ranks, step, microbatch and phase. ``names`` has the FQN of the module or parameter.

    Example:
        ```python
        import torch
        from torch import nn

        from fullshard import fully_shard
        from fullshard.debug import find_nonfinite

        model = fully_shard(nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with find_nonfinite(model):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        ```
    """
    search = _NonFiniteSearch(model)
    with contextlib.ExitStack() as hooks:
        hooks.enter_context(ModuleValues(model, search.look))
        hooks.enter_context(register_optimizer_step_pre_hook(search.before_step))
        if (own := search.own_steps) is not None:
            hooks.enter_context(model.register_forward_pre_hook(lambda *_: own.begin_forward(), prepend=True))
        yield
        search.raise_on_all()


class _Finding(NamedTuple):
    """The first value that is not finite on a rank; findings are ordered by step, microbatch, phase and number."""

    step: int
    microbatch: int
    phase: int
    number: int  # of the values that this rank had looked at
    name: str  # FQN of the module or parameter
    what: str


class _NonFiniteSearch:
    """The values that one ``find_nonfinite`` has looked at on this rank, and what it has found."""

    model: nn.Module
    found: _Finding | None = None
    own_steps: StepCount | None  # of a model without units; None: the engine counts
    _looked: int = 0

    def __init__(self, model: nn.Module) -> None:
        self.model, self.own_steps = model, None if units_of(model) else StepCount()

    def raise_on_all(self, units: Iterable[Unit] | None = None) -> None:
        """Raise on all ranks of some units if one of them has found something. A collective.

        Args:
            units: None: all of the model.

        Raises:
            NonFiniteError: With what was found first.
        """
        found = {} if self.found is None else {own_rank(): self.found}
        groups = groups_of(unit.mesh for unit in (units_of(self.model) if units is None else units))
        found, self.found = gather_found(found, groups), None
        if not found:
            return
        first = min(found.values())
        place = first._replace(number=0)
        ranks = [rank for rank, each in found.items() if each._replace(number=0) == place]
        raise NonFiniteError(
            f"step {first.step}, microbatch {first.microbatch}, {_PHASES[first.phase]}: {first.what} on "
            f"{list_ranks(ranks)}; nothing before it was NaN or infinite",
            [first.name],
        )

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Look at gradients after their reduction, and compare with other ranks."""
        own = {id(parameter) for parameter in self.model.parameters()}
        if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            return
        of_model = units_of(self.model)
        stepped = [unit for unit in stepped_units(optimizer) if unit in of_model]
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                fqn = clean_name(name)
                self.look(_PHASES[2], fqn, f"the reduced gradient of {fqn!r}", [parameter.grad])
        self.raise_on_all(stepped)
        if self.own_steps is not None:
            self.own_steps.optimizer_stepped()

    def look(self, phase: str, name: str, what: str, values: Any) -> None:
        """Note the first of some values that is not finite, unless something was found before."""
        if self.found is not None:
            return
        for tensor in iterate_tensors(values):
            self._looked += 1
            if (wrong := _wrong(tensor)) is not None:
                steps = self.own_steps or PROGRESS.steps
                place = steps.step, max(steps.microbatch, 0), _PHASES.index(phase)
                self.found = _Finding(*place, self._looked, name, f"{what} has {wrong}")
                return


@torch.no_grad()
def _wrong(tensor: torch.Tensor) -> str | None:
    """Return how many values of a tensor are not finite; None if all are."""
    local = values_here(tensor)
    if not local.numel() or not (local.is_floating_point() or local.is_complex()) or local.is_meta:
        return None
    if local.itemsize == 1:  # formats of one byte have few operations
        local = local.float()
    if local.isfinite().all():
        return None
    nan, infinite = int(local.isnan().sum()), int(local.isinf().sum())
    counts = [f"{count} {kind}" for count, kind in ((nan, "NaN"), (infinite, "infinite")) if count]
    return f"{' and '.join(counts)} of {local.numel()} values (shape {list(local.shape)}, {local.dtype})"
