"""One step on local tensors: the optimizer's own arithmetic.

While the optimizer's own ``step`` runs, its ``param_groups`` and ``state`` are temporarily those of the local tensors;
hooks and closures see the user's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from fullshard.engine.parameters.spmd_types import unchecked
from fullshard.optim.local.local_tensors import LocalTensor, State, StateEntries, local_tensors, write_back
from fullshard.profiling import profiled

__all__ = ["WITHOUT_HOOKS", "LocalStep", "own_step"]


# Attributes of an optimizer that steps without hooks of its own.
WITHOUT_HOOKS: dict[str, Any] = {"_optimizer_step_pre_hooks": {}, "_optimizer_step_post_hooks": {}}


def own_step(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """Return ``step`` of a class of optimizers without torch's hooks around it."""
    step: Any = kind.step
    while getattr(step, "hooked", False) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    found: Callable[..., Any] = step
    return found


class DividedStep(Protocol):
    """Divides a part of a step into several, around each of which it moves state."""

    def divide(self, tensors: Sequence[LocalTensor], state: Any) -> Iterable[Sequence[LocalTensor]]:
        """Yield all local tensors, each once, while ``state`` of theirs is where they are."""


class LocalStep:
    """How an optimizer steps local tensors: it keeps none of them, see [Note: Local tensors]."""

    is_running: bool
    offload: DividedStep | None  # None: state stays on the device

    def __init__(self) -> None:
        self.is_running, self.offload = False, None

    @unchecked
    @torch._disable_dynamo  # type: ignore[attr-defined] # as torch does for functions that read state
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        """Step all local tensors; the optimizer's own step gets the further arguments."""
        state = defaultdict[Any, StateEntries](dict)
        with torch.inference_mode(False), torch.no_grad():
            tensors = local_tensors(optimizer, state)
        options = [dict(group) for group in optimizer.param_groups]
        self.is_running = True
        try:
            for part in (tensors,) if self.offload is None else self.offload.divide(tensors, state):
                with profiled("optimizer"):
                    written = self._step_tensors(optimizer, part, state, options, *args, **kwargs)
                for group, values in written:
                    optimizer.param_groups[group].update(values)
        finally:
            self.is_running = False
            with torch.inference_mode(False), torch.no_grad():
                write_back(optimizer, tensors, state)

    def _step_tensors(
        self,
        optimizer: torch.optim.Optimizer,
        tensors: Sequence[LocalTensor],
        state: State,
        options: Sequence[Mapping[str, Any]],
        *args: Any,
        **kwargs: Any,
    ) -> list[tuple[int, dict[str, Any]]]:
        """Run the optimizer's own step with groups and state of these local tensors in place of the user's.

        Args:
            optimizer: The optimizer.
            tensors: The local tensors.
            state: State of all local tensors.
            options: Its groups as they were before the step: each part of a step begins with the same ones.
            *args: Further arguments.
            **kwargs: Further arguments.

        Returns:
            What the optimizer has written to groups, by their number.
        """
        groups, attributes = optimizer.param_groups, optimizer.__dict__
        plain: list[list[torch.Tensor]] = [[] for _ in groups]
        others: dict[int, list[torch.Tensor]] = {}  # DTensors, which foreach cannot mix with plain tensors
        for tensor in tensors:
            is_dtensor = tensor.gradient is None and isinstance(tensor.local, DTensor)
            (others.setdefault(tensor.group, []) if is_dtensor else plain[tensor.group]).append(tensor.local)
        numbered = [*enumerate(plain), *others.items()]
        local_groups = [{**options[number], "params": parameters} for number, parameters in numbered]
        before = [dict(group) for group in local_groups]
        replaced = {"param_groups": local_groups, "state": state, **WITHOUT_HOOKS}
        users = {name: attributes[name] for name in replaced}
        attributes.update(replaced)
        try:
            _set_gradients(tensors)
            own_step(type(optimizer))(optimizer, *args, **kwargs)
        finally:
            attributes.update(users)
            for tensor in tensors:
                if tensor.gradient is not None:
                    tensor.local.grad = None
                    tensor.local.requires_grad_(False)
        return [
            (number, {name: value for name, value in new.items() if name not in old or old[name] is not value})
            for (number, _), old, new in zip(numbered, before, local_groups, strict=True)
        ]


def _set_gradients(tensors: Sequence[LocalTensor]) -> None:
    """Make local tensors leaves with gradients, as their parameters are."""
    for tensor in tensors:
        local, gradient = tensor.local, tensor.gradient
        if gradient is not None:
            local.requires_grad_(tensor.parameter.requires_grad)
            if gradient.dtype is not local.dtype:
                local.grad_dtype = gradient.dtype
            local.grad = gradient
