"""The norm of gradients that are spread over ranks in different ways."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from fullshard.engine.ownership import nested_units
from fullshard.engine.parameter import managed_by, value_of
from fullshard.engine.unit import Unit

__all__ = ["clip_gradients"]


_Groups = tuple[dist.ProcessGroup, ...]


def clip_gradients(module: nn.Module, max_norm: float, norm_type: float) -> torch.Tensor:
    """See :meth:`FullyShardedDataParallel.clip_grad_norm_`.

    Every element is counted once: pieces add up over the groups that they are cut over, replicas do not. One
    all-reduce per such group, whatever gradients this rank has.
    """
    if not norm_type > 0:
        raise ValueError(f"clip_grad_norm_: norm_type: expected a positive number, found {norm_type}")
    units = nested_units(module)
    device = units[0].mesh.device
    pieces: dict[_Groups, list[torch.Tensor]] = {}
    for groups, gradient in _gradients(module, units):
        found = pieces.setdefault(groups, [])
        if gradient is not None:
            found.append(gradient)
    total = torch.zeros((), device=device)
    for groups, found in pieces.items():
        own = _power_sum(found, norm_type, device)
        for group in groups:
            dist.all_reduce(own, op=dist.ReduceOp.MAX if norm_type == math.inf else dist.ReduceOp.SUM, group=group)
        total = torch.maximum(total, own) if norm_type == math.inf else total + own
    if norm_type != math.inf:
        total = total.pow(1 / norm_type)
    gradients = [value_of(p.grad) for p in module.parameters() if p.grad is not None]
    if not gradients:
        warnings.warn("clip_grad_norm_: this rank has no gradients", stacklevel=3)
        return total
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_device.setdefault(gradient.device, []).append(gradient)
    for where, there in by_device.items():
        torch._foreach_mul_(there, scale.to(where))
    return total.to(functools.reduce(torch.promote_types, (gradient.dtype for gradient in gradients)))


def _gradients(module: nn.Module, units: Sequence[Unit]) -> Iterator[tuple[_Groups, torch.Tensor | None]]:
    """This rank's parts of all gradients, None if missing, and the groups whose ranks hold the other parts."""
    for unit in units:
        for parameter in unit.parameters:
            mesh, own = parameter.placement.mesh, parameter.placement.own
            groups = [] if own is None else _cut_over(own.mesh, own.placements)
            if mesh.shard is not None and mesh.world_size > 1:
                groups.append(mesh.shard.get_group())
            gradient = parameter.local_gradient
            counts = mesh.rank == 0 or not parameter.whole_on_every_rank
            yield tuple(groups), gradient if counts else None
    for other in module.parameters():
        if managed_by(other) is None:
            cut = _cut_over(other.device_mesh, other.placements) if isinstance(other, DTensor) else []
            yield tuple(cut), None if other.grad is None else value_of(other.grad)


def _cut_over(mesh: DeviceMesh, placements: Sequence[Placement]) -> list[dist.ProcessGroup]:
    return [mesh.get_group(axis) for axis, placement in enumerate(placements) if not placement.is_replicate()]


def _power_sum(tensors: Sequence[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Sum of the p-th powers of all elements (p = inf: the largest), in fp32."""
    norms = [norm.to(device, torch.float32) for norm in _norms(tensors, norm_type)]
    if not norms:
        return torch.zeros((), device=device)
    stacked = torch.stack(norms)
    return stacked.max() if norm_type == math.inf else stacked.pow(norm_type).sum()


def _norms(tensors: Sequence[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_kind.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    found: list[torch.Tensor] = []
    for (_, dtype), same in by_kind.items():
        found += torch._foreach_norm(same, norm_type, dtype=torch.promote_types(dtype, torch.float32))
    return found
