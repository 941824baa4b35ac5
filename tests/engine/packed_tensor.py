"""Small tensor subclasses with the ``fsdp_pre_all_gather`` / ``fsdp_post_all_gather`` protocol.

Two families, as in practice:

- :class:`PackedWeight`: frozen int8 codes with a scale per row, like NF4. Four times smaller than what it stands
  for, all-gathered as it is, expanded in the layer.
- :class:`CastWeight` and its subclasses: trainable, kept in high precision, cast for the all-gather, like float8.

``calls`` of a class lists what the protocol was called with; :func:`forget_calls` empties all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

from compare import assert_close
from front_ends import AFTER_ADAM
from fullshard.comm import record
from models import reference_backward, square_loss
from ranks import Rank

aten = torch.ops.aten


class Call(NamedTuple):
    """One call of the protocol: ``pre``, ``post`` (first time) or ``refill`` (with ``out``)."""

    method: str
    arguments: tuple[Any, ...]


calls: list[Call] = []


def forget_calls() -> None:
    calls.clear()


def called(method: str) -> list[tuple[Any, ...]]:
    """Arguments of every call of ``method``."""
    return [call.arguments for call in calls if call.method == method]


# Packed: frozen codes and scales.


class PackedWeight(torch.Tensor):
    """A (rows, columns) weight as int8 codes and one float32 scale per row. Frozen. Asks for one argument."""

    codes: torch.Tensor  # (rows, columns), int8
    scale: torch.Tensor  # (rows, 1), float32

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, flat: bool = False) -> PackedWeight:
        shape = (codes.numel(),) if flat else codes.shape
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=scale.dtype, device=codes.device)
        self.codes, self.scale = codes, scale
        return self

    @classmethod
    def pack(cls, weight: torch.Tensor) -> PackedWeight:
        """The packed form of a float32 weight."""
        scale = weight.detach().abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
        return cls((weight.detach() / scale).round().to(torch.int8), scale)

    def unpacked(self) -> torch.Tensor:
        """The float32 weight that this one stands for."""
        return self.codes.to(self.scale.dtype) * self.scale

    def __repr__(self, **_: Any) -> str:
        return f"{type(self).__name__}{tuple(self.shape)}"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], _: None, size: Any, stride: Any) -> PackedWeight:
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = _PACKED_OPERATIONS.get(func)
        if operation is None:
            raise NotImplementedError(f"{cls.__name__} does not support {func}")
        return operation(func, *args, **(kwargs or {}))

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        calls.append(Call("pre", (self, mesh)))
        return (self.codes, self.scale), None

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        codes, scale = outputs
        if out is not None:
            calls.append(Call("refill", (self, outputs, metadata, dtype)))
            assert isinstance(out, PackedWeight)
            assert _storage(out.codes) == _storage(codes)  # the all-gather has to fill what `out` looks at
            assert _storage(out.scale) == _storage(scale)
            return None
        calls.append(Call("post", (self, outputs, metadata, dtype)))
        return type(self)(codes, scale), (codes, scale)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _on_both(func: Any, weight: PackedWeight, *args: Any, **options: Any) -> Any:
    """Do it to codes and scales; results, or lists of them, are packed weights again."""
    options = {key: value for key, value in options.items() if key not in ("dtype", "layout", "memory_format")}
    codes, scale = func(weight.codes, *args, **options), func(weight.scale, *args, **options)
    if isinstance(codes, torch.Tensor):
        return type(weight)(codes, scale)
    return [type(weight)(*pair) for pair in zip(codes, scale, strict=True)]


def _new(func: Any, weight: PackedWeight, size: Sequence[int], **options: Any) -> PackedWeight:
    placed = {key: value for key, value in options.items() if key in ("device", "pin_memory")}
    rows = size[0] if len(size) == 2 else 0  # torch asks for `new_empty(0)` where a rank gets no rows
    codes, scale = ((rows, inner.shape[1]) for inner in (weight.codes, weight.scale))
    return type(weight)(func(weight.codes, codes, **placed), func(weight.scale, scale, **placed))


def _view(func: Any, weight: PackedWeight, size: Sequence[int]) -> PackedWeight:
    assert list(size) in ([-1], list(weight.shape))
    return type(weight)(weight.codes, weight.scale, flat=list(size) == [-1])


def _as_strided(func: Any, weight: PackedWeight, size: Sequence[int], stride: Any, offset: int = 0) -> PackedWeight:
    assert offset == 0 and size[1] == weight.shape[1]
    return type(weight)(weight.codes[: size[0]], weight.scale[: size[0]])


def _copy(func: Any, weight: PackedWeight, source: torch.Tensor, non_blocking: bool = False) -> PackedWeight:
    packed = source if isinstance(source, PackedWeight) else weight.pack(source)
    func(weight.codes, packed.codes)
    func(weight.scale, packed.scale)
    return weight


def _to(func: Any, weight: PackedWeight, *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    if dtype is not None and dtype != weight.dtype:
        return weight.unpacked().to(dtype=dtype, device=device)
    return type(weight)(weight.codes.to(device), weight.scale.to(device))


_PACKED_OPERATIONS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(
        (aten.detach.default, aten.clone.default, aten.empty_like.default, aten.split.Tensor, aten.slice.Tensor),
        _on_both,
    ),
    **dict.fromkeys((aten.new_zeros.default, aten.new_empty.default), _new),
    aten.view.default: _view,
    aten.as_strided.default: _as_strided,
    aten.copy_.default: _copy,
    aten._to_copy.default: _to,
}


class _PackedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        ctx.save_for_backward(weight)  # the packed one: expanding it again is what saves the memory
        return x @ weight.unpacked().T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (weight,) = ctx.saved_tensors
        return gradient @ weight.unpacked(), None


class Adapted(nn.Module):
    """A frozen packed weight with trainable low-rank factors beside it."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(PackedWeight.pack(torch.randn(rows, columns) / columns**0.5), requires_grad=False)
        self.down, self.up = nn.Linear(columns, 4, bias=False), nn.Linear(4, rows, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _PackedProduct.apply(x, self.weight) + self.up(self.down(x))


# Cast: trainable, high precision at rest, low in the all-gather.


class CastWeight(torch.Tensor):
    """Base: wraps a float tensor and behaves as it. Subclasses say what is sent.

    ``hint`` stands for what libraries put on the local tensor between steps (float8: a precomputed scale).
    """

    inner: torch.Tensor
    hint: Any

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> CastWeight:
        self = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        self.inner, self.hint = inner, None
        return self

    def __repr__(self, **_: Any) -> str:
        return f"{type(self).__name__}{tuple(self.shape)}"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], _: None, size: Any, stride: Any) -> CastWeight:
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(CastWeight, lambda weight: weight.inner, (args, kwargs or {}))
        result = func(*args, **kwargs)
        return tree_map_only(torch.Tensor, cls, result) if func in _CAST_PRESERVING else result


_CAST_PRESERVING = {
    aten.detach.default,
    aten.clone.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.new_empty.default,
    aten.split.Tensor,
    aten.slice.Tensor,
    aten.view.default,
    aten.as_strided.default,
    aten.copy_.default,
    aten._to_copy.default,
    aten._pin_memory.default,
}


def _refill(out: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
        out.copy_(value)


class RoundedWeight(CastWeight):
    """Sent as bfloat16 and is used in the unit's dtype. One argument."""

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        calls.append(Call("pre", (self, mesh, self.hint)))
        return (self.inner.to(torch.bfloat16),), ("rounded", self.hint)

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        (low,) = outputs
        assert low.dtype is torch.bfloat16 and metadata[0] == "rounded"
        if out is not None:
            calls.append(Call("refill", (self, outputs, metadata, dtype)))
            if _storage(out) != _storage(low):
                _refill(out, low[: out.shape[0]])
            return None
        calls.append(Call("post", (self, outputs, metadata, dtype)))
        full = low.to(dtype)  # a copy, unless the unit computes in bfloat16
        return full, (low,) if full is low else (low, full)


class SizedRoundedWeight(RoundedWeight):
    """As its base, with five arguments; pads its rows to those of the largest shard."""

    def fsdp_pre_all_gather(  # type: ignore[override]
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        calls.append(Call("pre", (self, mesh, outer_size, outer_stride, module, mp_policy)))
        low, largest = self.inner.to(torch.bfloat16), -(-outer_size[0] // mesh.size())
        return (nn.functional.pad(low, (0, 0, 0, largest - low.shape[0])),), ("rounded", self.hint)


class ScaledWeight(CastWeight):
    """Sent as int8 with one scale for all ranks, which it agrees on with a collective of its own, like float8."""

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        largest = self.inner.abs().max() if self.inner.numel() else self.inner.new_zeros(())
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group())
        scale = largest / 127
        calls.append(Call("pre", (self, mesh)))
        return ((self.inner / scale).round().to(torch.int8),), scale

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        (codes,) = outputs
        full = codes.to(dtype) * metadata
        if out is not None:
            _refill(out, full[: out.shape[0]])
            return None
        return full, (codes, full)


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """What ranks see of a :class:`RoundedWeight`."""
    return weight.to(torch.bfloat16).to(weight.dtype)


def scaled(weight: torch.Tensor) -> torch.Tensor:
    """What ranks see of a :class:`ScaledWeight`."""
    scale = weight.abs().max() / 127
    return (weight / scale).round().to(torch.int8).to(weight.dtype) * scale


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, cast: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return cast(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class CastLinear(nn.Linear):
    """The unsharded reference of a linear layer with a :class:`CastWeight`: casts in its forward."""

    cast: Callable[[torch.Tensor], torch.Tensor]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, _StraightThrough.apply(self.weight, self.cast), self.bias)


CASTS: dict[type[CastWeight], Callable[[torch.Tensor], torch.Tensor]] = {
    RoundedWeight: rounded,
    SizedRoundedWeight: rounded,
    ScaledWeight: scaled,
}


def with_cast_weights(model: nn.Module, kind: type[CastWeight]) -> nn.Module:
    """``model`` with the weight of every linear layer as ``kind``, in place."""
    for layer in [module for module in model.modules() if isinstance(module, nn.Linear)]:
        layer.weight = nn.Parameter(kind(layer.weight.detach()))
    return model


def casting(model: nn.Module, kind: type[CastWeight]) -> nn.Module:
    """``model`` with linear layers that cast their plain weights as ``kind`` does, in place."""
    for layer in [module for module in model.modules() if isinstance(module, nn.Linear)]:
        layer.__class__ = CastLinear
        layer.cast = CASTS[kind]
    return model


def train_both(
    model: nn.Module, reference: nn.Module, rank: Rank, *shape: int, microbatches: int = 1, after_step: Any = None
) -> int:
    """Two steps of AdamW on both, whose losses and trained parameters agree; bytes that were all-gathered."""
    trained = [[p for p in m.parameters() if p.requires_grad] for m in (model, reference)]
    optimizers = [torch.optim.AdamW(parameters, lr=1e-2) for parameters in trained]
    with record() as seen:
        for number in range(2 * microbatches):
            loss_of = square_loss(number, *shape)
            loss = loss_of(model, rank.rank)
            with torch.no_grad():
                assert_close(loss.detach(), loss_of(reference, rank.rank), f"loss {number}", **AFTER_ADAM)
            loss.backward()
            reference_backward(reference, rank.world_size, loss_of)
            if (number + 1) % microbatches == 0:
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                if after_step is not None:
                    after_step(model)
    found = [p.full_tensor().detach() for p in trained[0]]  # packed weights have no full tensor of floats
    for ours, theirs in zip(found, trained[1], strict=True):
        assert_close(ours, theirs.detach(), f"parameter of shape {tuple(theirs.shape)}", **AFTER_ADAM)
    return sum(c.nbytes for c in seen if c.kind == "all_gather")
