"""Units of a plan: immutable values that keep no parameter alive."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fullshard.wrap.tree import PlannedParameter

__all__ = ["PlannedUnit"]


@dataclass(frozen=True, eq=False)
class PlannedUnit:
    """One unit: the root, or one or several modules to wrap.

    Args:
        name: Name below the plan's root, as in ``named_modules()``; of several modules, joined by ``" + "``. ``""`` is
            the root.
        modules: The module, or several that become one unit.
        kwargs: Arguments of the front end for this unit.
        parameters: Parameters that the unit owns: in its module, in no nested unit, and used nowhere else.
        owned_by_ancestor: Parameters in its module that an ancestor owns, because they are also used outside of it: the
            unit must leave them out. See [Note: Owner of a shared parameter].
        ignored: Number of ignored parameters in it.
    """

    name: str
    modules: tuple[nn.Module, ...] = field(repr=False)
    kwargs: dict[str, Any]
    parameters: tuple[PlannedParameter, ...]
    owned_by_ancestor: tuple[PlannedParameter, ...]
    ignored: int

    @property
    def left_out(self) -> frozenset[nn.Parameter]:
        """The parameters that the unit must leave to an ancestor, as far as they are still alive."""
        found = (parameter.reference() for parameter in self.owned_by_ancestor)
        return frozenset(parameter for parameter in found if parameter is not None)

    @property
    def target(self) -> Any:
        """The module, or a tuple of several."""
        return self.modules if len(self.modules) > 1 else self.modules[0]

    @property
    def class_name(self) -> str:
        """Class of the module, or classes."""
        return " + ".join(type(module).__name__ for module in self.modules)

    @property
    def title(self) -> str:
        """Name for display; ``(root)`` for the root."""
        return self.name or "(root)"

    @property
    def numel(self) -> int:
        """Number of elements of its parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def gather_bytes(self) -> int:
        """Bytes of its unsharded parameters; floating-point parameters count in the dtype of computation."""
        return sum(parameter.numel * self._gather_dtype(parameter).itemsize for parameter in self.parameters)

    @property
    def frozen(self) -> tuple[PlannedParameter, ...]:
        """Parameters that require no gradient."""
        return tuple(parameter for parameter in self.parameters if not parameter.requires_grad)

    def _gather_dtype(self, parameter: PlannedParameter) -> torch.dtype:
        policy = self.kwargs.get("mixed_precision") or self.kwargs.get("mp_policy")  # the wrapper's, fully_shard's
        dtype = getattr(policy, "param_dtype", None)
        return dtype if isinstance(dtype, torch.dtype) and parameter.dtype.is_floating_point else parameter.dtype
