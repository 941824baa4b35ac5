"""Costs of operations: a roofline of their floating-point operations and of the bytes that they read and write."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _foreach_utils
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from fullshard.planning.cluster import Cluster

__all__ = ["Costs", "fused_kernels", "tensors_in"]

_aten = torch.ops.aten
# Operations that neither read nor write memory, beside views.
_FREE = {
    _aten.empty, _aten.empty_strided, _aten.empty_like, _aten.new_empty, _aten.new_empty_strided, _aten.set_,
    _aten.resize_, _aten.detach, _aten._unsafe_view, _aten.is_same_size, _aten.lift_fresh, _aten.record_stream,
}  # fmt: skip


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in arguments or results of an operation."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        yield from tensors_in(list(values.values()))


class Costs:
    """Seconds of operations on a cluster's device.

    Args:
        cluster: With the figures.
    """

    cluster: Cluster
    unknown: set[str]  # operations of other libraries, which were counted by bytes
    flops: float  # of all so far
    kinds: dict[str, float]  # seconds of all so far, by kind

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.unknown, self.flops, self.kinds = cluster, set(), 0.0, {}

    def seconds(self, func: Any, args: Any, kwargs: Any, result: Any) -> float:
        """Return the seconds of one operation; 0 if it starts no kernel."""
        packet = func._overloadpacket
        if func.is_view or packet in _FREE:
            return 0.0
        outputs = list(tensors_in(result))
        if not outputs and not any(True for _ in tensors_in(args)):
            return 0.0
        nbytes = sum(t.nbytes for t in (*tensors_in(args), *tensors_in(kwargs), *outputs))
        dtype = next((t.dtype for t in tensors_in(args) if t.is_floating_point()), torch.float32)
        kind = "function" if packet in _FUNCTIONS else "memory"
        seconds = nbytes / self.cluster.rate(kind, dtype)
        count: Callable[..., int] | None = _FLOPS.get(packet)
        if count is not None:
            flops = count(*args, **kwargs, out_val=result)
            self.flops += flops
            kind = "attention" if packet in _ATTENTION else "matmul"
            seconds = max(seconds, flops / self.cluster.rate(kind, dtype))
        elif func.namespace not in ("aten", "prim", "prims", "fullshard"):
            self.unknown.add(str(func))
        if seconds < self.cluster.kernel_seconds:
            seconds, kind = self.cluster.kernel_seconds, "shortest kernels"
        self.kinds[kind] = self.kinds.get(kind, 0.0) + seconds
        return seconds


@contextlib.contextmanager
def fused_kernels(*, on_cpu: bool) -> Iterator[None]:
    """Have operations on the meta device be one kernel where they are on the planned device; else they are several.

    Attention: flash kernels and memory-efficient ones save the same tensors: inputs, output, and a number per query.
    RMS norms on accelerators: as a layer norm without bias, which reads, writes and saves as much. Optimizers and norms
    of gradients on accelerators step all tensors at once (``foreach``), and have temporary tensors for all.

    Args:
        on_cpu: Whether the planned device is a CPU, whose RMS norms are several kernels.
    """
    usual, usual_norm = F.scaled_dot_product_attention, F.rms_norm

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        mask = kwargs.get("attn_mask", args[0] if args else None)
        learned = mask is not None and mask.requires_grad  # is several kernels anywhere
        fused = query.is_meta and query.dim() == 4 and value.shape[-1] <= query.shape[-1] and not learned
        return (_fused if fused else usual)(query, key, value, *args, **kwargs)

    def norm(
        input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        one_kernel = input.is_meta and not on_cpu and (weight is None or weight.dtype is input.dtype)
        if one_kernel:
            return F.layer_norm(input, normalized_shape, weight, None, eps or 1e-6)
        return usual_norm(input, normalized_shape, weight, eps)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", attention))
        stack.enter_context(mock.patch.object(F, "rms_norm", norm))
        if not on_cpu:
            devices = [*_foreach_utils._get_foreach_kernels_supported_devices(), "meta"]
            for name in ("torch.utils._foreach_utils", "torch.optim.optimizer"):
                of_devices = f"{name}._get_foreach_kernels_supported_devices"
                stack.enter_context(mock.patch(of_devices, return_value=devices))
        yield


def _fused(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = attn_mask.to(query.dtype)
    kernel = _aten._scaled_dot_product_flash_attention_for_cpu
    narrower = query.shape[-1] - value.shape[-1]  # as of latent attention, whose values are padded
    if narrower > 0:
        value = F.pad(value, (0, narrower))
    result: Tensor = kernel(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return result[..., :-narrower] if narrower > 0 else result


def _forward_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]


def _backward_flops(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]


_FLOPS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    _aten._scaled_dot_product_flash_attention_for_cpu: _forward_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward_flops,
}
_ATTENTION = {packet for packet in _FLOPS if "attention" in str(packet)}
# Several instructions, or passes, for each element that they read and write.
_FUNCTIONS = {
    getattr(_aten, name)
    for name in (
        "gelu", "gelu_backward", "silu", "silu_backward", "tanh", "tanh_backward", "sigmoid", "sigmoid_backward",
        "exp", "log", "sin", "cos", "erf", "pow", "softplus", "softplus_backward", "_softmax", "_softmax_backward_data",
        "_log_softmax", "_log_softmax_backward_data", "logsumexp", "native_layer_norm", "native_layer_norm_backward",
        "native_group_norm", "native_group_norm_backward", "native_batch_norm", "native_batch_norm_backward",
        "_fused_rms_norm", "_fused_rms_norm_backward", "native_dropout", "native_dropout_backward",
        "embedding_dense_backward", "cumsum", "topk", "sort",
    )
    if hasattr(_aten, name)
}  # fmt: skip
