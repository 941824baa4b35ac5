"""Find out where a value became NaN or infinite: ``find_nonfinite``.

[Note: The origin of a value that is not finite]
Hooks look at every module of a model. In forward, before a module computes, at its parameters and inputs, and after it
at its outputs; inner modules come first. In backward at the gradients of outputs and of parameters, as autograd
computes them, before they are reduced. The first value that is not finite is where it began on this rank: whatever
depends on it comes later. Before an optimizer steps, all ranks compare what they have found, and raise the earliest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fullshard.engine import hooks
from fullshard.engine.containers import iterate_tensors
from fullshard.engine.optimizer_steps import managed_parameters
from fullshard.engine.ownership import nested_units, unit_of
from fullshard.engine.parameters.names import WRAPPED, clean_name
from fullshard.engine.unit import Unit
from fullshard.errors import NonFiniteError
from fullshard.progress import PROGRESS
from fullshard.ranks.agreement import gather, list_ranks
from fullshard.ranks.groups import data_parallel_groups

__all__ = ["find_nonfinite"]

_FORWARD, _BACKWARD, _REDUCTION = range(3)
_PHASES = ("forward", "backward", "reduction of gradients")


@contextlib.contextmanager
def find_nonfinite(model: nn.Module) -> Iterator[None]:
    """While the context is open, raise where a value of ``model`` has become NaN or infinite, on all ranks.

    For finding the cause of a loss that is NaN. Every value that a module takes or returns is looked at, which makes
    steps slower, and blocks the host on accelerators. All ranks open and close the context together.

    Errors are raised before an optimizer of the model's parameters steps, and at the end of the context: both are
    collectives. Values inside of ``torch.compile``\\ d modules, and between modules, are seen where they enter the next
    module. Infinite values that are meant, such as a mask that a module returns, are reported too.

    Args:
        model: A model that is sharded by ``fully_shard`` or ``FullyShardedDataParallel``, or one with such parts, or
            none.

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
    search = _Search(model)
    search.begin()
    try:
        yield
        search.raise_on_all()
    finally:
        search.end()


class _Finding(NamedTuple):
    """The first value that is not finite, in the order of what comes first."""

    step: int
    microbatch: int
    phase: int
    number: int  # of the values that this rank had looked at
    name: str  # FQN of the module or parameter
    what: str


class _Search:
    """The hooks of one ``find_nonfinite``, and what they have found on this rank."""

    model: nn.Module
    found: _Finding | None
    _looked: int
    _names: dict[nn.Module, str]
    _units: dict[nn.Module, Unit]  # by the module that computes while they are unsharded
    _handles: list[Any]
    _hooked: set[int]  # ids of unsharded parameters that have a hook

    def __init__(self, model: nn.Module) -> None:
        self.model, self.found, self._looked = model, None, 0
        self._names = {module: clean_name(name) for name, module in model.named_modules()}
        sharded = ((module, unit) for module in self._names if (unit := unit_of(module)) is not None)
        self._units = {module._modules.get(WRAPPED) or module: unit for module, unit in sharded}
        self._handles, self._hooked = [], set()

    def begin(self) -> None:
        """Register the hooks."""
        for module in self._names:
            if WRAPPED in module._modules:
                continue  # its step has not begun, or has ended, when hooks of the wrapper run
            self._handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after))
        self._handles.append(register_optimizer_step_pre_hook(self._before_step))

    def end(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def raise_on_all(self) -> None:
        """Raise on all ranks if one has found something. A collective.

        Raises:
            NonFiniteError: With what was found first.
        """
        found = {} if self.found is None else {_rank(): self.found}
        for group in self._groups():
            for others in gather(found, group).values():
                found |= {rank: _Finding(*each) for rank, each in others.items()}
        self.found = None
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

    def _groups(self) -> list[Any]:
        groups = [group for unit in nested_units(self.model) for group in data_parallel_groups(unit.mesh)]
        return list({id(group): group for group in groups}.values())

    # ---------------------------------------------------------------- forward

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if hooks.in_backward():
            return  # recomputation of checkpointed activations
        name, unit = self._names[module], self._units.get(module)
        own = module.named_parameters(name, recurse=False)
        parameters = own if unit is None else ((each.fqn, each.unsharded) for each in unit.parameters)
        for fqn, parameter in parameters:
            self._before_use(clean_name(fqn), parameter)
        self._look(_FORWARD, name, f"an input of {_describe(name)}", (args, kwargs))

    def _before_use(self, fqn: str, parameter: torch.Tensor) -> None:
        """Look at an unsharded parameter, and have its gradients looked at."""
        self._look(_FORWARD, fqn, f"parameter {fqn!r}", [parameter])
        if parameter.requires_grad and id(parameter) not in self._hooked:
            self._hooked.add(id(parameter))
            check = partial(self._gradient, fqn, f"the gradient of {fqn!r}, before its reduction,")
            self._handles.append(parameter.register_hook(check))  # type: ignore[no-untyped-call]

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if hooks.in_backward():
            return
        name = self._names[module]
        described = f"output of {_describe(name)}"
        self._look(_FORWARD, name, f"the {described}", output)
        for tensor in iterate_tensors(output):
            if tensor.requires_grad and not tensor.is_leaf:
                check = partial(self._gradient, name, f"the gradient of the {described}")
                tensor.register_hook(check)  # type: ignore[no-untyped-call]

    # ---------------------------------------------------------------- backward

    def _gradient(self, name: str, what: str, gradient: torch.Tensor) -> None:
        self._look(_BACKWARD, name, what, [gradient])

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Look at gradients after their reduction, and compare with other ranks."""
        units = nested_units(self.model)
        managed = (ref() for ref in managed_parameters(optimizer))
        if not any(each is not None and each.unit() in units for each in managed):
            return
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                fqn = clean_name(name)
                self._look(_REDUCTION, fqn, f"the reduced gradient of {fqn!r}", [parameter.grad])
        self.raise_on_all()

    # ---------------------------------------------------------------- values

    def _look(self, phase: int, name: str, what: str, values: Any) -> None:
        """Note the first of some values that is not finite, unless something was found before."""
        if self.found is not None:
            return
        for tensor in iterate_tensors(values):
            self._looked += 1
            if (wrong := _wrong(tensor)) is not None:
                steps = PROGRESS.steps
                place = steps.step, max(steps.microbatch, 0), phase
                self.found = _Finding(*place, self._looked, name, f"{what} has {wrong}")
                return


@torch.no_grad()
def _wrong(tensor: torch.Tensor) -> str | None:
    """Return how many values of a tensor are not finite; None if all are."""
    local = tensor.detach()
    local = local._local_tensor if isinstance(local, DTensor) else local
    if not local.numel() or not (local.is_floating_point() or local.is_complex()) or local.is_meta:
        return None
    if local.isfinite().all():
        return None
    nan, infinite = int(local.isnan().sum()), int(local.isinf().sum())
    counts = [f"{count} {kind}" for count, kind in ((nan, "NaN"), (infinite, "infinite")) if count]
    return f"{' and '.join(counts)} of {local.numel()} values (shape {list(local.shape)}, {local.dtype})"


def _describe(name: str) -> str:
    return repr(name) if name else "the model"


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
