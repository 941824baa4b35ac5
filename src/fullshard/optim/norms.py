"""Norms of sharded gradients, and clipping by them.

[Note: One all-reduce per axis]
Elements are summed over the axes that their parameter is sharded over, and replicas count once. So there is one sum for
each set of axes, and one all-reduce per axis, of all sums that it concerns, smaller axes first. A sum that is complete
by then is contributed by the axis' first rank alone: all ranks end with the same bits, and clip alike, even if
gradients that are not reduced (of ignored parameters) differ.
"""

from __future__ import annotations

import math
import types
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from fullshard.comm.groups import device_for
from fullshard.engine.ownership import superseding
from fullshard.engine.parameters.sharded import ShardedParameter, managed_by, value_of
from fullshard.engine.parameters.spmd_types import unchecked
from fullshard.engine.parameters.tensor_shards import local_of, sharded_axes
from fullshard.engine.unit import unit_owning
from fullshard.errors import NonFiniteError

__all__ = ["clip_grad_norm_", "clip_grads_with_norm_", "get_total_norm"]

_Tensors = torch.Tensor | Iterable[torch.Tensor]

MAX_NAMES = 10  # in an error


@unchecked
@torch.no_grad()
def clip_grad_norm_(
    parameters: _Tensors,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients down in place so that their norm, over all ranks, is at most ``max_norm``.

    Like ``torch.nn.utils.clip_grad_norm_``, for all kinds of parameters at once: those of ``fully_shard`` on any mesh,
    of the wrapper with flat or original parameters, DTensors of tensor parallelism, and plain ones. Every element
    counts once, however many ranks hold a replica.

    A collective: all ranks that hold shards or replicas call it with the same parameters in the same order, also if
    gradients are missing on some of them.

    Args:
        parameters: One or more parameters whose ``.grad`` is scaled. Duplicates count once.
        max_norm: Largest norm to allow.
        norm_type: Order p of the norm. ``math.inf``: the largest absolute value; ``-math.inf``: the smallest; 0: the
            number of gradients that are not all zero, as in torch.
        error_if_nonfinite: Raise on all ranks if the norm is infinite or NaN. This waits for the device.
        foreach: Ignored; foreach kernels are always used. For compatibility with torch's signature.

    Returns:
        The norm before scaling: a plain 0-D tensor on the device of the first parameter, fp32 (fp64 if a parameter is
        fp64), with the same bits on all ranks.

    Raises:
        NonFiniteError: With ``error_if_nonfinite``, with the names of the parameters, on whichever rank their shards
            are.
        ValueError: If ``norm_type`` is NaN.

    Example:
        ```python
        import torch
        from torch import nn
        from fullshard import clip_grad_norm_, fully_shard

        model = fully_shard(nn.Linear(16, 16))
        model(torch.randn(4, 16)).square().mean().backward()
        norm = clip_grad_norm_(model.parameters(), max_norm=1.0)
        ```
    """
    found = _with_gradients(parameters)
    gradients = [parameter.grad for parameter in found]
    inputs = _NormInputs(found, gradients)
    total = inputs.norm(norm_type)
    if error_if_nonfinite:
        inputs.check_finite(total, norm_type)
    _scale(gradients, max_norm, total)
    return total


@unchecked
@torch.no_grad()
def get_total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor | None],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    parameters: _Tensors | None = None,
) -> torch.Tensor:
    """Return the norm of all ``tensors`` together, over all ranks. A collective.

    Like ``torch.nn.utils.get_total_norm``, for tensors of all kinds, as ``clip_grad_norm_``. Sharded tensors must be
    DTensors, or parameters of a sharded model (for the norm of the weights). A plain tensor, such as the gradient of a
    wrapper's parameter, does not show that it is a shard: pass ``parameters`` with it.

    Args:
        tensors: One or more tensors. DTensors with ``Partial`` placements are reduced first, one by one.
        norm_type: As for ``clip_grad_norm_``.
        error_if_nonfinite: As for ``clip_grad_norm_``.
        foreach: As for ``clip_grad_norm_``.
        parameters: One parameter for each tensor: the tensor is sharded as its parameter. None among ``tensors`` then
            stands for a tensor that is missing on this rank.

    Returns:
        The norm, as ``clip_grad_norm_`` returns it.

    Raises:
        NonFiniteError: With ``error_if_nonfinite``, as ``clip_grad_norm_``.
        ValueError: If ``norm_type`` is NaN, or the numbers of parameters and tensors differ.
    """
    values = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if parameters is None:
        owners = [tensor for tensor in values if tensor is not None]
    else:
        owners = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if len(owners) != len(values):
            raise ValueError(
                f"get_total_norm: expected a parameter for each of {len(values)} tensors, found {len(owners)} "
                "parameters"
            )
    values = owners if parameters is None else values
    if len(set(map(id, owners))) < len(owners):  # the first of each counts
        firsts = sorted({id(owner): index for index, owner in reversed([*enumerate(owners)])}.values())
        owners, values = [owners[index] for index in firsts], [values[index] for index in firsts]
    inputs = _NormInputs(owners, values)
    total = inputs.norm(norm_type)
    if error_if_nonfinite:
        inputs.check_finite(total, norm_type)
    return total


@unchecked
@torch.no_grad()
def clip_grads_with_norm_(
    parameters: _Tensors, max_norm: float, total_norm: torch.Tensor, foreach: bool | None = None
) -> None:
    """Scale gradients in place by ``max_norm / (total_norm + 1e-6)`` if that is below 1. No communication.

    Like ``torch.nn.utils.clip_grads_with_norm_``. A NaN norm makes all gradients NaN.

    Args:
        parameters: One or more parameters whose ``.grad`` is scaled. Duplicates are scaled once.
        max_norm: Largest norm to allow.
        total_norm: 0-D tensor, equal on all ranks, as ``get_total_norm`` returns it. A DTensor, as torch's function
            returns it, is reduced to a full tensor first, which is a collective.
        foreach: As for ``clip_grad_norm_``.
    """
    _scale([parameter.grad for parameter in _with_gradients(parameters)], max_norm, total_norm)


def _with_gradients(parameters: _Tensors) -> list[torch.Tensor]:
    """Return each parameter once: the sharded one, which has the gradient, for an unsharded one of a module."""
    found = {}
    for parameter in _as_list(parameters):
        if parameter.grad is None and (managed := superseding(parameter)) is not None:
            parameter = managed.optimized
        found[id(parameter)] = parameter
    return list(found.values())


@dataclass(frozen=True, eq=False)
class Axis:
    """One axis of a mesh through this rank. Axes of different meshes with the same ranks are one object.

    Args:
        ranks: Global ranks on the axis, sorted.
        group: The first process group found of these ranks.
    """

    ranks: tuple[int, ...]
    group: dist.ProcessGroup


Axes = tuple[Axis, ...]


class LocalShard(NamedTuple):
    """This rank's shard of one tensor, or of one parameter in a flat tensor.

    Args:
        number: Number of the tensor.
        managed: The parameter in a flat tensor, or the parameter of the wrapper; None for a DTensor or plain tensor.
        axes: Axes that it is sharded over. It is replicated over other axes.
        local: Local tensor, maybe empty; None if the tensor is missing on this rank.
    """

    number: int
    managed: ShardedParameter | None
    axes: Axes
    local: torch.Tensor | None


class _Locator:
    """Finds the local shards of tensors, with one ``Axis`` for all meshes' axes over the same ranks.

    The axes follow from the parameter alone, never from its gradient: a gradient may be missing on some ranks, and
    which collectives run must not depend on that.
    """

    _axes: dict[tuple[int, ...], Axis]
    # By the id of the mesh, which a DTensor keeps alive: placements, with Replicate for Partial, and axes of DTensors.
    _known: dict[tuple[int, tuple[Placement, ...]], tuple[tuple[Placement, ...] | None, Axes]]

    def __init__(self) -> None:
        self._axes, self._known = {}, {}

    @property
    def axes(self) -> list[Axis]:
        """All axes of shards found so far, in the same order on all ranks: smaller ones first."""
        return sorted(self._axes.values(), key=lambda axis: len(axis.ranks))

    def shards(self, number: int, owner: torch.Tensor, tensor: torch.Tensor | None) -> Iterator[LocalShard]:
        """Yield the local shards of ``tensor``, which is sharded as ``owner``: its gradient, a state of it, or itself.

        Args:
            number: Number of the tensor.
            owner: A parameter of a sharded model, or any tensor.
            tensor: A tensor of its shape (of the local shape if plain); None: missing on this rank.

        Yields:
            One shard; for a ``FlatParameter`` one for each parameter in it.
        """
        if isinstance(owner, DTensor):
            yield LocalShard(number, None, *self._of_dtensor(owner, tensor))
            return
        managed = managed_by(owner)
        unit = None if managed is None or managed.optimized is not owner else unit_owning(managed)
        if unit is None:
            yield LocalShard(number, None, (), None if tensor is None else local_of(tensor))
            return
        for part in unit.parameters:
            if part.optimized is owner:
                views, own = part.views(), part.placement.own
                axes = () if own is None else self._of_mesh(own.mesh, sharded_axes(own.mesh, own.placements))
                axes = tuple(dict.fromkeys((*axes, *self._of_mesh(views.mesh, views.axes))))
                yield LocalShard(number, part, axes, None if tensor is None else local_of(part.part_of(tensor)))

    def _of_dtensor(self, owner: DTensor, tensor: torch.Tensor | None) -> tuple[Axes, torch.Tensor | None]:
        spec = owner._spec
        key = id(spec.mesh), spec.placements
        if key not in self._known:
            here = spec.mesh.get_coordinate() is not None
            reduced = tuple(Replicate() if p.is_partial() else p for p in spec.placements) if here else None
            self._known[key] = reduced, self._of_mesh(spec.mesh, sharded_axes(spec.mesh, reduced or ()))
        placements, axes = self._known[key]
        if tensor is None or placements is None:
            return axes, None
        if isinstance(tensor, DTensor) and (tensor._spec.placements != placements or tensor._spec.mesh != spec.mesh):
            tensor = tensor.redistribute(spec.mesh, placements)
        return axes, local_of(tensor)

    def _of_mesh(self, mesh: DeviceMesh, axes: Iterable[int]) -> Axes:
        found = []
        for axis in axes:
            group = mesh.get_group(axis)
            ranks = tuple(sorted(dist.get_process_group_ranks(group)))
            found.append(self._axes.setdefault(ranks, Axis(ranks, group)))
        return tuple(found)


class _NormInputs:
    """This rank's shards of some tensors and the axes to reduce over; all but the shards is the same on all ranks.

    Args:
        owners: Parameters.
        tensors: Tensors, each of which is sharded as its owner.
    """

    owners: Sequence[torch.Tensor]
    shards: list[LocalShard]
    axes: list[Axis]  # in the order of the all-reduces
    device: torch.device
    dtype: torch.dtype  # of the result

    def __init__(self, owners: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor | None]) -> None:
        locator, self.owners, self.shards = _Locator(), owners, []
        for number, (owner, tensor) in enumerate(zip(owners, tensors, strict=True)):
            self.shards += locator.shards(number, owner, tensor)
        is_wide = not {torch.float64, torch.complex128}.isdisjoint(value_of(owner).dtype for owner in owners)
        self.axes, self.dtype = locator.axes, torch.float64 if is_wide else torch.float32
        self.device = owners[0].device if owners else torch.device("cpu")

    def norm(self, norm_type: float) -> torch.Tensor:
        """Return the norm of all tensors. See [Note: One all-reduce per axis]."""
        order = float(norm_type)
        if math.isnan(order):
            raise ValueError("norm_type: expected the order of a norm, such as 2.0 or math.inf, found nan")
        if not self.shards:
            return torch.zeros((), dtype=self.dtype, device=self.device)
        if order == 0:
            return self._count()
        groups: dict[Axes, list[torch.Tensor]] = {}
        for shard in self.shards:
            groups.setdefault(shard.axes, []).extend(_filled_values(shard.local))
        norms = [_norms(same, order) for same in groups.values()]
        if math.isinf(order):
            return self._reduce_extreme(norms, smallest=order < 0).to(self.dtype)
        sums = self._reduce_sums(torch.stack([self._power_sum(same, order) for same in norms]), list(groups))
        return sums.sum().pow(1 / order).to(self.dtype)

    def _count(self) -> torch.Tensor:
        """Return the number of tensors that are not all zero: each has a separate sum."""
        sums = [self._power_sum(_norms(_filled_values(shard.local), 0.0), 0.0) for shard in self.shards]
        reduced = self._reduce_sums(torch.stack(sums), [shard.axes for shard in self.shards])
        indices = torch.tensor([shard.number for shard in self.shards], device=reduced.device)
        counted = reduced.new_zeros(len(self.owners)).index_add_(0, indices, reduced)
        return (counted != 0).sum().to(self.dtype)

    @property
    def _sum_dtype(self) -> torch.dtype:
        """Dtype of the sums: powers of fp32 norms overflow fp32."""
        return torch.float32 if self.device.type == "mps" else torch.float64

    def _power_sum(self, norms: Sequence[torch.Tensor], order: float) -> torch.Tensor:
        if not norms:
            return torch.zeros((), dtype=self._sum_dtype, device=self.device)
        together = torch.cat([same.to(self.device, self._sum_dtype) for same in norms])
        return together.sum() if order == 0 else together.pow(order).sum()

    def _reduce_sums(self, sums: torch.Tensor, axes_of_sums: Sequence[Axes]) -> torch.Tensor:
        """All-reduce each sum over its axes, ``axes_of_sums``."""
        done: set[Axis] = set()
        for axis in self.axes:
            first = axis.group.rank() == 0
            # Sums that are neither sharded over this axis nor complete wait for a larger axis.
            updated = [axis in axes or done.issuperset(axes) for axes in axes_of_sums]
            # Of complete sums, other ranks than the first contribute only what is not finite, so that all ranks see it.
            counts = [axis in axes or first for axes in axes_of_sums]
            kept = ~sums.isfinite() | torch.tensor(counts, device=sums.device)
            sent = sums.where(kept, sums.new_zeros(()))
            _all_reduce(sent, dist.ReduceOp.SUM, axis)
            sums = sent if all(updated) else torch.where(torch.tensor(updated, device=sums.device), sent, sums)
            done.add(axis)
        return sums

    def _reduce_extreme(self, norms: Sequence[Sequence[torch.Tensor]], *, smallest: bool) -> torch.Tensor:
        """Return the largest or smallest of all norms. All axes reduce all numbers: replicas do not change the
        result.
        """
        all_norms = [norm for same in norms for norm in same]
        found = torch.zeros(2, dtype=self._sum_dtype, device=self.device)  # the extreme, and 1 if there is a NaN
        found[0] = -math.inf if smallest else 0.0
        if all_norms:
            stacked = torch.cat([same.to(self.device, self._sum_dtype) for same in all_norms])
            found[1] = stacked.isnan().any()
            stacked = stacked.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)
            found[0] = (-stacked if smallest else stacked).max()
        for axis in self.axes:
            _all_reduce(found, dist.ReduceOp.MAX, axis)  # back ends differ in how they treat NaN
        extreme = -found[0] if smallest else found[0]
        return torch.where(found[1] > 0, math.nan, extreme)

    def check_finite(self, total: torch.Tensor, norm_type: float) -> None:
        """Raise on all ranks if ``total`` is not finite; it is the same on all ranks."""
        if bool(total.isfinite()):
            return
        flags = [
            torch.zeros((), device=self.device)
            if shard.local is None
            else _values_of(shard.local).isfinite().all().logical_not().to(self.device, torch.float32)
            for shard in self.shards
        ]
        found = torch.stack(flags)
        for axis in self.axes:
            _all_reduce(found, dist.ReduceOp.MAX, axis)
        names = [self._name_of(shard) for shard, flag in zip(self.shards, found.tolist(), strict=True) if flag]
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        where = (
            f"non-finite: {', '.join(names[:MAX_NAMES])}{more}" if names else "all are finite, but their norm overflows"
        )
        raise NonFiniteError(
            f"expected a finite norm of order {float(norm_type)} of {len(self.shards)} gradients or other tensors, "
            f"found {float(total)}: {where}. Skip this step, check the loss and the learning rate, or pass "
            "error_if_nonfinite=False to continue",
            names,
        )

    def _name_of(self, shard: LocalShard) -> str:
        owner = self.owners[shard.number]
        managed = shard.managed or managed_by(owner)
        return f"parameter {shard.number} of shape {tuple(owner.shape)}" if managed is None else managed.fqn


def _as_list(tensors: _Tensors) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    found = list(tensors)
    if not found and isinstance(tensors, types.GeneratorType):
        warnings.warn("parameters is an exhausted generator: no gradient is clipped; pass a list", stacklevel=3)
    return found


def _scale(gradients: Iterable[torch.Tensor | None], max_norm: float, total_norm: torch.Tensor) -> None:
    """Scale gradients in place so that their norm, which is ``total_norm``, is at most ``max_norm``."""
    if isinstance(total_norm, DTensor):
        total_norm = total_norm.full_tensor()
    scale = torch.clamp(float(max_norm) / (total_norm + 1e-6), max=1.0)
    stored = [local_of(gradient) for gradient in gradients if gradient is not None]
    # A sparse gradient that is not coalesced has several values per index.
    stored = [local if local.layout is torch.strided else local._values() for local in stored]
    for (device, _), same in _by_kind(stored).items():
        torch._foreach_mul_(same, scale.to(device))


def _by_kind(tensors: list[torch.Tensor]) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """Return tensors by device and dtype."""
    if not tensors:
        return {}
    grouped = _group_tensors_by_device_and_dtype([tensors])  # type: ignore[list-item] # an invariant list of optional
    return {kind: same for kind, ([same], _) in grouped.items()}  # type: ignore[misc]


def _values_of(local: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor: itself unless it is sparse."""
    return local.coalesce()._values() if local.layout is torch.sparse_coo else local


def _filled_values(local: torch.Tensor | None) -> list[torch.Tensor]:
    """Return the values of a tensor, if there are any."""
    values = None if local is None else _values_of(local)
    return [] if values is None or not values.numel() else [values]


def _norms(tensors: list[torch.Tensor], order: float) -> list[torch.Tensor]:
    """Return one norm for each tensor, none of which is empty, in fp32 or wider: one kernel and one 1-D tensor for
    each device and dtype.
    """
    found: list[torch.Tensor] = []
    for (_, dtype), same in _by_kind(tensors).items():
        if dtype.is_complex:
            norms = tuple(torch.linalg.vector_norm(tensor, order) for tensor in same)
        else:
            wide = torch.promote_types(dtype, torch.float32)
            norms = torch._foreach_norm(same, order, dtype=None if dtype is wide else wide)
        found.append(torch.stack(norms))
    return found


def _all_reduce(tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, axis: Axis) -> None:
    """All-reduce in place, through another device if the group has no back end for the tensor's (CPU offload, NCCL)."""
    where = device_for(axis.group, tensor.device)
    sent = tensor if where.type == tensor.device.type else tensor.to(where)
    dist.all_reduce(sent, op=op, group=axis.group)
    if sent is not tensor:
        tensor.copy_(sent)
