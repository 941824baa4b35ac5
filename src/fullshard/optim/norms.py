"""Norms of gradients that are spread over ranks, and clipping by them.

[Note: One all-reduce per axis]
Elements are summed over the axes that their parameter is cut over, and replicas count once. So there is one number for
each set of axes; all numbers that an axis matters to travel over it in one message, smaller axes first. A number that
is complete by then is sent by the axis' first rank alone: all ranks end with the same bits, and clip alike, even if
gradients that nobody reduces (of ignored parameters) differ.
"""

from __future__ import annotations

import math
import types
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fullshard.errors import FullshardError
from fullshard.optim.spread import Axes, Axis, Part, Spread, local_of

__all__ = ["clip_grad_norm_", "clip_grads_with_norm_", "get_total_norm"]

_Tensors = torch.Tensor | Iterable[torch.Tensor]

MAX_NAMES = 10  # of parameters in an error


@torch.no_grad()
def clip_grad_norm_(
    parameters: _Tensors,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients down in place so that their norm, over all ranks, is at most ``max_norm``.

    As ``torch.nn.utils.clip_grad_norm_``, and for parameters of all kinds at once: of ``fully_shard`` on any meshes,
    of the wrapper in both forms, DTensors of tensor parallelism, plain ones. Every element counts once, however many
    ranks hold a replica. All ranks that hold parts or replicas have to call it with the same parameters in the same
    order; a rank whose gradients are missing takes part all the same.

    Args:
        parameters: Whose ``.grad`` is scaled; one or many, each counts once even if it comes twice.
        max_norm: The largest norm to allow.
        norm_type: p of the p-norm. ``math.inf``: the largest absolute value, ``-math.inf`` the smallest; 0 counts
            the gradients that are not all zero, as torch does.
        error_if_nonfinite: Raise, on all ranks, if the norm is infinite or NaN. Waits for the device.
        foreach: Whether to use horizontally fused kernels; None: yes.

    Returns:
        The norm before scaling: a plain 0-D tensor on the device of the first parameter, fp32 (fp64 if a parameter
        is), the same bits on all ranks.

    Raises:
        FullshardError: See ``error_if_nonfinite``; names the parameters, wherever the numbers are.
        ValueError: If ``norm_type`` is NaN.
    """
    found = _listed(parameters)
    parts = _Parts.of([(parameter, parameter.grad) for parameter in found])
    total = parts.norm(norm_type, foreach)
    if error_if_nonfinite:
        parts.check_finite(total, norm_type)
    clip_grads_with_norm_(found, max_norm, total, foreach)
    return total


@torch.no_grad()
def get_total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor | None],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    parameters: _Tensors | None = None,
) -> torch.Tensor:
    """The norm of all ``tensors`` together, over all ranks.

    As ``torch.nn.utils.get_total_norm``; see :func:`clip_grad_norm_` for what it knows beyond that. Sharded tensors
    have to be DTensors, or parameters of a sharded model (for the norm of the weights): of a plain tensor, such as
    the gradient of the wrapper's parameters, nothing says that it is a part, so pass ``parameters`` with them.

    Args:
        tensors: One or many. Partial DTensors are reduced first, each on its own.
        norm_type: See :func:`clip_grad_norm_`.
        error_if_nonfinite: See :func:`clip_grad_norm_`.
        foreach: See :func:`clip_grad_norm_`.
        parameters: As many: each tensor lies as its parameter does, and None among ``tensors`` stands for one that
            this rank misses.

    Returns:
        See :func:`clip_grad_norm_`.

    Raises:
        FullshardError: See :func:`clip_grad_norm_`.
        ValueError: If ``norm_type`` is NaN, or there are not as many parameters as tensors.
    """
    values = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if parameters is None:
        pairs = [(tensor, tensor) for tensor in values if tensor is not None]
    else:
        owners = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if len(owners) != len(values):
            raise ValueError(
                f"get_total_norm: expected one of parameters for each of {len(values)} tensors, found {len(owners)}"
            )
        pairs = list(zip(owners, values, strict=True))
    parts = _Parts.of(pairs)
    total = parts.norm(norm_type, foreach)
    if error_if_nonfinite:
        parts.check_finite(total, norm_type)
    return total


@torch.no_grad()
def clip_grads_with_norm_(
    parameters: _Tensors, max_norm: float, total_norm: torch.Tensor, foreach: bool | None = None
) -> None:
    """Scale gradients in place by ``max_norm / (total_norm + 1e-6)`` where that is below 1. No communication.

    As ``torch.nn.utils.clip_grads_with_norm_``. A NaN norm makes NaNs of all gradients.

    Args:
        parameters: Whose ``.grad`` is scaled; one or many, each once even if it comes twice.
        max_norm: The largest norm to allow.
        total_norm: 0-D, the same on all ranks, as :func:`get_total_norm` returns it. A DTensor, as torch's own
            function returns it, is completed first, which is a collective.
        foreach: Whether to use horizontally fused kernels; None: yes.
    """
    gradients: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for parameter in {id(parameter): parameter for parameter in _listed(parameters)}.values():
        if parameter.grad is not None:
            local = local_of(parameter.grad)
            values = local._values() if local.layout is torch.sparse_coo else local
            if values.numel():
                gradients.setdefault((values.device, values.dtype), []).append(values)
    if isinstance(total_norm, DTensor):
        total_norm = total_norm.full_tensor()
    scale = torch.clamp(float(max_norm) / (total_norm + 1e-6), max=1.0)
    for (device, _), same in gradients.items():
        factor = scale.to(device)
        if foreach is not False:
            torch._foreach_mul_(same, factor)
        else:
            for values in same:
                values.mul_(factor)


@dataclass(frozen=True)
class _Parts:
    """This rank's parts of some tensors, with what says how to combine them: the same on all ranks, but for parts."""

    parts: list[list[Part]]  # of each tensor
    axes: list[Axis]  # in the order in which they are gone over
    device: torch.device
    dtype: torch.dtype  # of the result

    @classmethod
    def of(cls, pairs: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> _Parts:
        """The second of each pair lies as the first does."""
        spread, found = Spread(), []
        distinct: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        for owner, tensor in pairs:
            distinct.setdefault(id(owner), (owner, tensor))
        for index, (owner, tensor) in enumerate(distinct.values()):
            found.append(list(spread.parts(owner, tensor, index)))
        owners = [owner for owner, _ in distinct.values()]
        wide = any(owner.dtype in (torch.float64, torch.complex128) for owner in owners)
        device = owners[0].device if owners else torch.device("cpu")
        return cls(found, spread.axes, device, torch.float64 if wide else torch.float32)

    def norm(self, norm_type: float, foreach: bool | None) -> torch.Tensor:
        """Of all of them. See [Note: One all-reduce per axis]."""
        order = float(norm_type)
        if math.isnan(order):
            raise ValueError("norm_type: expected the order of a norm, such as 2.0 or math.inf, found nan")
        if not self.parts:
            return torch.zeros((), dtype=self.dtype, device=self.device)
        groups: dict[tuple[int, Axes], list[torch.Tensor]] = {}
        for index, parts in enumerate(self.parts):
            for part in parts:
                # Norm 0 counts tensors, so each of them is a number of its own.
                same = groups.setdefault((index if order == 0 else 0, part.axes), [])
                if part.local is not None:
                    same.append(part.local)
        norms = [_norms(same, order, foreach) for same in groups.values()]
        cuts = [axes for _, axes in groups]
        if math.isinf(order):
            return self._extreme(norms, smallest=order < 0).to(self.dtype)
        sums = self._summed(torch.stack([self._power_sum(same, order) for same in norms]), cuts)
        if order == 0:
            counted = {index: sums.new_zeros(()) for index, _ in groups}
            for (index, _), value in zip(groups, sums.unbind(), strict=True):
                counted[index] = counted[index] + value
            return (torch.stack(list(counted.values())) != 0).sum().to(self.dtype)
        return sums.sum().pow(1 / order).to(self.dtype)

    @property
    def _wide(self) -> torch.dtype:
        """Of the sums: powers of fp32 norms overflow fp32."""
        return torch.float32 if self.device.type == "mps" else torch.float64

    def _power_sum(self, norms: Sequence[torch.Tensor], order: float) -> torch.Tensor:
        if not norms:
            return torch.zeros((), dtype=self._wide, device=self.device)
        stacked = torch.stack([norm.to(self.device) for norm in norms]).to(self._wide)
        return stacked.sum() if order == 0 else stacked.pow(order).sum()

    def _summed(self, sums: torch.Tensor, cuts: Sequence[Axes]) -> torch.Tensor:
        """One sum per entry of ``cuts``, completed over these axes."""
        done: set[Axis] = set()
        for axis in self.axes:
            first = axis.group.rank() == 0
            # Neither cut here nor complete: its turn to be shared comes with a larger axis, if ever.
            taken = [axis in axes or done.issuperset(axes) for axes in cuts]
            # What only the first rank sends is multiplied by zero elsewhere, which leaves a NaN what it is: numbers
            # that are not finite show on all ranks.
            factors = [1.0 if axis in axes or first else 0.0 for axes in cuts]
            sent = sums * sums.new_tensor(factors)
            _all_reduce(sent, dist.ReduceOp.SUM, axis)
            sums = sent if all(taken) else torch.where(torch.tensor(taken, device=sums.device), sent, sums)
            done.add(axis)
        return sums

    def _extreme(self, norms: Sequence[Sequence[torch.Tensor]], *, smallest: bool) -> torch.Tensor:
        """The largest or smallest of all. Every axis sees all numbers: replicas do no harm."""
        all_norms = [norm.to(self.device) for same in norms for norm in same]
        found = torch.zeros(2, dtype=self._wide, device=self.device)  # the extreme, and whether there is a NaN
        found[0] = -math.inf if smallest else 0.0
        if all_norms:
            stacked = torch.stack(all_norms).to(self._wide)
            found[1] = stacked.isnan().any()
            stacked = stacked.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)
            found[0] = (-stacked if smallest else stacked).max()
        for axis in self.axes:
            _all_reduce(found, dist.ReduceOp.MAX, axis)  # which back ends make something else of a NaN
        extreme = -found[0] if smallest else found[0]
        return torch.where(found[1] > 0, math.nan, extreme)

    def check_finite(self, total: torch.Tensor, norm_type: float) -> None:
        """Raise on all ranks if ``total`` is not finite, which it then is on all of them."""
        if bool(total.isfinite()):
            return
        parts = [part for same in self.parts for part in same]
        flags = [
            torch.zeros((), device=self.device)
            if part.local is None
            else _values_of(part.local).isfinite().all().logical_not().to(self.device, torch.float32)
            for part in parts
        ]
        found = torch.stack(flags)
        for axis in self.axes:
            _all_reduce(found, dist.ReduceOp.MAX, axis)
        names = [part.name for part, flag in zip(parts, found.tolist(), strict=True) if flag]
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        where = f"not finite: {', '.join(names[:MAX_NAMES])}{more}" if names else "each is finite, their norm overflows"
        raise FullshardError(
            f"expected a finite norm of order {float(norm_type)} of {len(parts)} gradients or other tensors, found "
            f"{float(total)}: {where}. Skip this step, look at the loss and the learning rate, or pass "
            "error_if_nonfinite=False to go on"
        )


def _listed(tensors: _Tensors) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    found = list(tensors)
    if not found and isinstance(tensors, types.GeneratorType):
        warnings.warn("the generator of parameters is exhausted: no gradient is clipped", stacklevel=3)
    return found


def _values_of(local: torch.Tensor) -> torch.Tensor:
    """The numbers in a tensor: itself unless it is sparse."""
    return local.coalesce()._values() if local.layout is torch.sparse_coo else local


def _norms(tensors: Sequence[torch.Tensor], order: float, foreach: bool | None) -> list[torch.Tensor]:
    """One norm for each tensor that is not empty, in fp32 or wider, as many kernels as devices and dtypes."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in map(_values_of, tensors):
        if tensor.numel():
            by_kind.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    found: list[torch.Tensor] = []
    for (_, dtype), same in by_kind.items():
        if dtype.is_complex:
            found += [torch.linalg.vector_norm(tensor, order) for tensor in same]
            continue
        wide = torch.promote_types(dtype, torch.float32)
        if foreach is not False:
            found += torch._foreach_norm(same, order, dtype=wide)
        else:
            found += [torch.linalg.vector_norm(tensor, order, dtype=wide) for tensor in same]
    return found


def _all_reduce(tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, axis: Axis) -> None:
    """In place; through another device where the axis has no back end for the tensor's (CPU offload and NCCL)."""
    served = {device.type for device in axis.group._device_types}
    if tensor.device.type in served:
        dist.all_reduce(tensor, op=op, group=axis.group)
        return
    where = "cpu" if "cpu" in served else torch.device(min(served), torch.accelerator.current_device_index())
    sent = tensor.to(where)
    dist.all_reduce(sent, op=op, group=axis.group)
    tensor.copy_(sent)
