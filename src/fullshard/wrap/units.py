"""What a plan says about one unit: plain values, which keep no parameter alive."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fullshard.wrap.tree import TreeParameter

__all__ = ["PlannedParameter", "PlannedUnit"]


@dataclass(frozen=True, eq=False)
class PlannedParameter:
    """A parameter as it was when the plan was made.

    Args:
        names: All its FQNs below the plan's root, that of ``named_parameters()`` first.
        numel: Number of elements.
        dtype: Its own dtype.
        requires_grad: False: frozen.
        reference: The parameter. Weak, because a plan may be kept for longer than the full parameters.
    """

    names: tuple[str, ...]
    numel: int
    dtype: torch.dtype
    requires_grad: bool
    reference: weakref.ref[nn.Parameter]

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    @classmethod
    def of(cls, found: TreeParameter) -> PlannedParameter:
        """The record of a parameter of a tree."""
        parameter = found.parameter
        reference = weakref.ref(parameter)
        return cls(found.names, parameter.numel(), parameter.dtype, parameter.requires_grad, reference)


@dataclass(frozen=True, eq=False)
class PlannedUnit:
    """A unit: the root, or a module that the plan wraps.

    Args:
        name: The module's name below the plan's root; "" is the root.
        class_name: The class of the module.
        kwargs: What its front end is called with.
        parameters: Those it holds: in its module, in no unit further down, and used nowhere else.
        lifted: Those in its module that a unit above it holds, because they are used outside of it as well.
        ignored: How many parameters it would hold were they not ignored.
    """

    name: str
    class_name: str
    kwargs: dict[str, Any]
    parameters: tuple[PlannedParameter, ...]
    lifted: tuple[PlannedParameter, ...]
    ignored: int

    @property
    def title(self) -> str:
        """Its name for people."""
        return self.name or "(root)"

    @property
    def numel(self) -> int:
        """Number of elements of its parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def gather_bytes(self) -> int:
        """Bytes of its parameters when gathered: floating-point ones in the dtype they are computed in."""
        return sum(parameter.numel * self._gather_dtype(parameter).itemsize for parameter in self.parameters)

    @property
    def frozen(self) -> tuple[PlannedParameter, ...]:
        """Those of its parameters that need no gradient."""
        return tuple(parameter for parameter in self.parameters if not parameter.requires_grad)

    def _gather_dtype(self, parameter: PlannedParameter) -> torch.dtype:
        policy = self.kwargs.get("mixed_precision") or self.kwargs.get("mp_policy")  # the wrapper's, fully_shard's
        dtype = getattr(policy, "param_dtype", None)
        return dtype if isinstance(dtype, torch.dtype) and parameter.dtype.is_floating_point else parameter.dtype
