"""torch's ``clip_grad_norm_`` on gradients of sharded parameters, without an operation on a DTensor for each.

``torch.nn.utils.clip_grad_norm_`` takes the norm of each DTensor by itself, and makes a DTensor of each result: for
many small parameters that costs several times what it costs for plain tensors. The two functions of its module that it
calls are replaced here, for gradients that are all sharded or replicated DTensors. Others take torch's way, such as
gradients that are given twice, which torch counts and clips twice, and so do their errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.nn.utils import clip_grad

from fullshard.engine.parameters.placement import SHARDED_TYPES
from fullshard.optim.norms import clip_grads_with_norm_, get_total_norm

__all__ = ["MODULE", "replaced_functions"]

MODULE = clip_grad


def replaced_functions() -> dict[str, Callable[..., Any]]:
    """Return fullshard's functions by their names in ``MODULE``."""
    return {
        "_get_total_norm": _norm_like(MODULE._get_total_norm),
        "_clip_grads_with_norm_": _clip_like(MODULE._clip_grads_with_norm_),
    }


def _norm_like(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        values: list[Any] = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if not _all_sharded(values):
            return original(values, norm_type, error_if_nonfinite, foreach)
        norm, mesh = get_total_norm(values, norm_type, error_if_nonfinite), values[0].device_mesh
        # Programs expect a DTensor; this one is complete on all ranks.
        return DTensor.from_local(norm, mesh, [Replicate()] * mesh.ndim, run_check=False)

    return total_norm


def _clip_like(original: Callable[..., None]) -> Callable[..., None]:
    def clip(parameters: Any, max_norm: float, total_norm: torch.Tensor, foreach: bool | None = None) -> None:
        found = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if _all_sharded([parameter.grad for parameter in found if parameter.grad is not None]):
            clip_grads_with_norm_(found, max_norm, total_norm)
        else:
            original(found, max_norm, total_norm, foreach)

    return clip


def _all_sharded(gradients: Iterable[torch.Tensor]) -> bool:
    """True if there are gradients, each once, and all are DTensors on one mesh whose values need no reduction."""
    found = list(gradients)
    if len(set(map(id, found))) != len(found):
        return False
    specs: dict[int, DTensorSpec] = {}  # many gradients have the same
    for gradient in found:
        if not isinstance(gradient, DTensor) or type(gradient) not in SHARDED_TYPES:
            return False
        specs[id(gradient._spec)] = gradient._spec
    if any(placement.is_partial() for spec in specs.values() for placement in spec.placements):
        return False
    return len({spec.mesh for spec in specs.values()}) == 1
