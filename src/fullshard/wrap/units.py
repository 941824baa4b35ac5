"""Units of a plan: immutable values that keep no parameter alive."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fullshard.wrap.tree import TreeParameter

__all__ = ["PlannedParameter", "PlannedUnit"]


@dataclass(frozen=True, eq=False, slots=True)
class PlannedParameter:
    """A parameter as it was when the plan was made.

    Args:
        names: All its FQNs below the plan's root, that of ``named_parameters()`` first.
        shape: Its shape; of a DTensor, that of this rank's part.
        numel: Number of elements.
        dtype: Dtype of the parameter.
        requires_grad: False if the parameter is frozen.
        reference: Weak reference to the parameter, because a plan may outlive the unsharded parameters.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    numel: int
    dtype: torch.dtype
    requires_grad: bool
    reference: weakref.ref[nn.Parameter]

    @property
    def name(self) -> str:
        """First FQN."""
        return self.names[0]

    @classmethod
    def of(cls, found: TreeParameter) -> PlannedParameter:
        """Return the record of a parameter of a tree.

        Args:
            found: Parameter of the tree.

        Returns:
            The record.
        """
        parameter = found.parameter
        reference = weakref.ref(parameter)
        shape = tuple(getattr(parameter, "_local_tensor", parameter).shape)
        return cls(found.names, shape, parameter.numel(), parameter.dtype, parameter.requires_grad, reference)

    def bytes_of_rank(self, ranks: int) -> int:
        """Return the bytes of the largest shard, if the rows are sharded over ``ranks`` ranks.

        Args:
            ranks: Number of ranks of the shard axis.

        Returns:
            The bytes of the first rank's shard, in the parameter's dtype.
        """
        rows = -(-self.shape[0] // ranks) if self.shape else 1
        return rows * math.prod(self.shape[1:]) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class PlannedUnit:
    """A unit: the root, or modules that the plan wraps.

    Args:
        name: Name of the module below the plan's root, or names joined by ``" + "``; ``""`` is the root.
        class_name: Class of the module, or classes.
        kwargs: Arguments of its front end.
        parameters: Parameters that the unit owns: in its module, in no nested unit, and used nowhere else.
        owned_by_ancestor: Parameters in its module that an ancestor owns, because they are also used outside of it.
        ignored: Number of ignored parameters in it.
    """

    name: str
    class_name: str
    kwargs: dict[str, Any]
    parameters: tuple[PlannedParameter, ...]
    owned_by_ancestor: tuple[PlannedParameter, ...]
    ignored: int

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
