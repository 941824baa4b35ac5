"""Norms of sharded gradients, and clipping by them.

[Note: One all-reduce per axis]
Elements are summed over the axes that their parameter is sharded over, and replicas count once. So there is one sum for
each set of axes, and one all-reduce per axis, of all sums that it concerns, smaller axes first. A sum that is complete
by then is contributed by the axis' first rank alone: all ranks end with the same bits, and clip alike, even if
gradients that are not reduced (of ignored parameters) differ.
"""

from __future__ import annotations

import math
import operator
import types
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from fullshard.engine.ownership import superseding
from fullshard.engine.parameters.placement import SHARDED_TYPES
from fullshard.engine.parameters.spmd_types import unchecked
from fullshard.errors import NonFiniteError
from fullshard.memory import HostValue
from fullshard.optim.local_shards import Axes, Axis, ShardLocator, local_of
from fullshard.progress import PROGRESS

__all__ = ["clip_grad_norm_", "clip_grads_with_norm_", "get_total_norm"]

_Tensors = torch.Tensor | Iterable[torch.Tensor]
_ByKind = dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]

MAX_NAMES = 10  # in an error

_layout_of = operator.attrgetter("layout")


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
    shards = _NormInputs.of(found, gradients)
    total = shards.norm(norm_type)
    if error_if_nonfinite:
        shards.check_finite(total, norm_type)
    else:
        _nonfinite_norms.look(total)
    groups = shards.groups.values() if shards.is_whole else [_by_kind(_stored_values(gradients))]
    _scale(groups, max_norm, total)
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
    shards = _NormInputs.of(owners, values)
    total = shards.norm(norm_type)
    if error_if_nonfinite:
        shards.check_finite(total, norm_type)
    else:
        _nonfinite_norms.look(total)
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
    gradients = [parameter.grad for parameter in _with_gradients(parameters)]
    _scale([_by_kind(_stored_values(gradients))], max_norm, total_norm)


def _with_gradients(parameters: _Tensors) -> list[torch.Tensor]:
    """Return each parameter once: the sharded one, which has the gradient, for an unsharded one of a module."""
    found = {}
    for parameter in _as_list(parameters):
        if parameter.grad is None and (managed := superseding(parameter)) is not None:
            parameter = managed.optimized
        found[id(parameter)] = parameter
    return list(found.values())


class _NonFiniteNorms:
    """Warns once if a norm is NaN or infinite, without waiting for the device: at the next norm, if need be."""

    _coming: HostValue | None
    _warned: bool

    def __init__(self) -> None:
        self._coming, self._warned = None, False

    def look(self, total: torch.Tensor) -> None:
        """Look at a norm; on an accelerator, at an earlier one that has come to the host."""
        if self._warned or type(total) is not torch.Tensor or total.is_meta or torch.compiler.is_compiling():
            return
        coming = HostValue(total) if total.device.type == "cpu" else self._coming
        value = None if coming is None else coming.get()
        if coming is None or value is not None:
            self._coming = HostValue.of(total)
        if value is not None and not math.isfinite(value):
            self._warned = True
            warnings.warn(
                f"a norm of gradients or weights is {value}, in step {PROGRESS.steps.step} or the one before it. This "
                "is usual when a gradient scaler begins; otherwise, fullshard.debug.find_nonfinite names the module, "
                "rank and phase in which it began. This warning is shown once",
                UserWarning,
                stacklevel=3,
            )


_nonfinite_norms = _NonFiniteNorms()


@dataclass(frozen=True)
class _NormInputs:
    """This rank's shards of some tensors and the axes to reduce over; all but the shards is the same on all ranks."""

    owners: Sequence[torch.Tensor]
    tensors: Sequence[torch.Tensor | None]  # each sharded as its owner
    groups: dict[Axes, _ByKind]  # this rank's shards that are not empty; of sparse ones the values
    is_whole: bool  # True if the groups are all memory of the tensors, and it is theirs
    axes: list[Axis]  # in the order of the all-reduces
    device: torch.device
    dtype: torch.dtype  # of the result

    @classmethod
    def of(cls, owners: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor | None]) -> _NormInputs:
        """Collect the shards of ``tensors``, each of which is sharded as its owner."""
        locator, is_whole = ShardLocator(), True
        shards: dict[Axes, list[torch.Tensor]] = {}
        by_spec: dict[int, list[torch.Tensor] | None] = {}  # of its axes; axes are long to hash
        dtypes: set[torch.dtype] = set()
        for index, (owner, tensor) in enumerate(zip(owners, tensors, strict=True)):
            if (
                isinstance(owner, DTensor)
                and isinstance(tensor, DTensor)
                and {type(owner), type(tensor)} <= SHARDED_TYPES
                and (spec := owner._spec) is tensor._spec
            ):
                if id(spec) not in by_spec:
                    axes = locator.axes_of(spec)
                    by_spec[id(spec)] = None if axes is None else shards.setdefault(axes, [])
                    dtypes.add(owner._local_tensor.dtype)
                same, local = by_spec[id(spec)], tensor._local_tensor
                if same is not None and type(local) is torch.Tensor and local.layout is torch.strided:
                    if local.numel():
                        same.append(local)
                    continue
            dtypes.add((owner._local_tensor if isinstance(owner, DTensor) else owner).dtype)
            for shard in locator.shards(owner, tensor, index):
                shards.setdefault(shard.axes, []).extend(_filled_values(shard.local))
            is_whole = is_whole and tensor is None
        wide = not dtypes.isdisjoint((torch.float64, torch.complex128))
        dtype, device = torch.float64 if wide else torch.float32, owners[0].device if owners else torch.device("cpu")
        groups = {axes: _by_kind(same) for axes, same in shards.items()}
        return cls(owners, tensors, groups, is_whole, locator.axes, device, dtype)

    def norm(self, norm_type: float) -> torch.Tensor:
        """Return the norm of all tensors. See [Note: One all-reduce per axis]."""
        order = float(norm_type)
        if math.isnan(order):
            raise ValueError("norm_type: expected the order of a norm, such as 2.0 or math.inf, found nan")
        if not self.groups:
            return torch.zeros((), dtype=self.dtype, device=self.device)
        if order == 0:
            return self._count()
        norms = [_norms(groups, order) for groups in self.groups.values()]
        if math.isinf(order):
            return self._reduce_extreme(norms, smallest=order < 0).to(self.dtype)
        sums = self._reduce_sums(torch.stack([self._power_sum(same, order) for same in norms]), list(self.groups))
        return sums.sum().pow(1 / order).to(self.dtype)

    def _count(self) -> torch.Tensor:
        """Return the number of tensors that are not all zero: each has a separate sum."""
        locator, indices, sums, axes = ShardLocator(), [], [], []
        for index, (owner, tensor) in enumerate(zip(self.owners, self.tensors, strict=True)):
            for shard in locator.shards(owner, tensor, index):
                indices.append(index)
                sums.append(self._power_sum(_norms(_by_kind(_filled_values(shard.local)), 0.0), 0.0))
                axes.append(shard.axes)
        reduced = self._reduce_sums(torch.stack(sums), axes)
        counted = reduced.new_zeros(len(self.owners))
        counted.index_add_(0, torch.tensor(indices, device=reduced.device), reduced)
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
        locator = ShardLocator()
        shards = [
            shard
            for index, (owner, tensor) in enumerate(zip(self.owners, self.tensors, strict=True))
            for shard in locator.shards(owner, tensor, index)
        ]
        flags = [
            torch.zeros((), device=self.device)
            if shard.local is None
            else _values_of(shard.local).isfinite().all().logical_not().to(self.device, torch.float32)
            for shard in shards
        ]
        found = torch.stack(flags)
        for axis in self.axes:
            _all_reduce(found, dist.ReduceOp.MAX, axis)
        names = [shard.name for shard, flag in zip(shards, found.tolist(), strict=True) if flag]
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        where = (
            f"non-finite: {', '.join(names[:MAX_NAMES])}{more}" if names else "all are finite, but their norm overflows"
        )
        raise NonFiniteError(
            f"expected a finite norm of order {float(norm_type)} of {len(shards)} gradients or other tensors, found "
            f"{float(total)}: {where}. Skip this step, check the loss and the learning rate, or pass "
            "error_if_nonfinite=False to continue",
            names,
        )


def _as_list(tensors: _Tensors) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    found = list(tensors)
    if not found and isinstance(tensors, types.GeneratorType):
        warnings.warn("parameters is an exhausted generator: no gradient is clipped; pass a list", stacklevel=3)
    return found


def _scale(groups: Iterable[_ByKind], max_norm: float, total_norm: torch.Tensor) -> None:
    """Scale gradients in place so that their norm, which is ``total_norm``, is at most ``max_norm``."""
    if isinstance(total_norm, DTensor):
        total_norm = total_norm.full_tensor()
    scale = torch.clamp(float(max_norm) / (total_norm + 1e-6), max=1.0)
    for group in groups:
        for (device, _), same in group.items():
            torch._foreach_mul_(same, scale.to(device))


def _stored_values(gradients: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    """Return the values that gradients store here, several per index if they are sparse and not coalesced."""
    found = [gradient for gradient in gradients if gradient is not None]
    locals_ = [gradient._local_tensor if isinstance(gradient, DTensor) else gradient for gradient in found]
    if not {torch.Tensor}.issuperset(map(type, locals_)):
        locals_ = list(map(local_of, found))
    if {torch.strided}.issuperset(map(_layout_of, locals_)):
        return locals_
    return [local._values() if local.layout is torch.sparse_coo else local for local in locals_]


def _by_kind(tensors: list[torch.Tensor]) -> _ByKind:
    """Return them by device and dtype."""
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


def _norms(groups: _ByKind, order: float) -> list[torch.Tensor]:
    """Return one norm for each tensor, none of which is empty, in fp32 or wider: one kernel and one 1-D tensor for
    each device and dtype.
    """
    found: list[torch.Tensor] = []
    for (_, dtype), same in groups.items():
        if dtype.is_complex:
            norms = tuple(torch.linalg.vector_norm(tensor, order) for tensor in same)
        else:
            wide = torch.promote_types(dtype, torch.float32)
            norms = torch._foreach_norm(same, order, dtype=None if dtype is wide else wide)
        found.append(torch.stack(norms))
    return found


def _all_reduce(tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, axis: Axis) -> None:
    """All-reduce in place, through another device if the group has no back end for the tensor's (CPU offload, NCCL)."""
    served = {device.type for device in axis.group._device_types}
    if tensor.device.type in served:
        dist.all_reduce(tensor, op=op, group=axis.group)
        return
    where = "cpu" if "cpu" in served else torch.device(min(served), torch.accelerator.current_device_index())
    sent = tensor.to(where)
    dist.all_reduce(sent, op=op, group=axis.group)
    tensor.copy_(sent)
