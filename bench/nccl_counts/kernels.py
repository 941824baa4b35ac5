"""How many CUDA kernels a copy is, by the rules of torch's own CUDA code (2.13).

- ``copy_``, ``clone``, ``to`` and ``cat`` of a dtype: one.
- ``_foreach_copy_``: fused if all sources have one dtype, all targets have one, and every target has the sizes and the
  strides of its source, both dense (``ForeachBinaryOpList.cu``). A fused kernel takes at most 64 tensors and 320
  chunks of 65536 elements (``MultiTensorApply.cuh``), so large lists are several. Else one kernel per pair.
- ``split_with_sizes_copy`` and ``_chunk_cat``: one if inputs and outputs are contiguous, and of one dtype or, of the
  latter, from bf16 to fp32 (``TensorShape.cu``); else one per tensor.

A copy is *strided* if its target or its source is not dense: its kernel reads or writes rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_ELEMENTS, CHUNKS_PER_KERNEL, TENSORS_PER_KERNEL = 65536, 320, 64


class Kernels(NamedTuple):
    launched: int
    strided: int = 0


def of_foreach(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Kernels:
    pairs = [(target, source) for target, source in zip(targets, sources, strict=True) if target.numel()]
    if not pairs:
        return Kernels(0)
    dtypes = {source.dtype for _, source in pairs}, {target.dtype for target, _ in pairs}
    alike = all(t.shape == s.shape and t.stride() == s.stride() and _dense(t) and _dense(s) for t, s in pairs)
    if alike and all(len(each) == 1 for each in dtypes):
        return Kernels(fused_launches([target.numel() for target, _ in pairs]))
    return Kernels(len(pairs), sum(not (_dense(target) and _dense(source)) for target, source in pairs))


def fused_launches(numels: Sequence[int]) -> int:
    """Kernels of ``multi_tensor_apply`` over tensors of these sizes."""
    launches = tensors = chunks = 0
    for numel in numels:
        tensors += 1
        for chunk in range(left := -(-numel // CHUNK_ELEMENTS)):
            chunks += 1
            last = chunk == left - 1
            if chunks == CHUNKS_PER_KERNEL or (last and tensors == TENSORS_PER_KERNEL):
                launches, chunks, tensors = launches + 1, 0, 0 if last else 1
    return launches + (chunks > 0)


def of_split(targets: Sequence[Tensor], source: Tensor) -> Kernels:
    fused = _dense(source) and all(_dense(target) and target.dtype == source.dtype for target in targets)
    return Kernels(1) if fused else Kernels(len(targets), len(targets))


def of_chunk_cat(target: Tensor, sources: Sequence[Tensor]) -> Kernels:
    (dtype, *others) = {source.dtype for source in sources}
    cast = (dtype, target.dtype)
    known = dtype == target.dtype or cast == (torch.bfloat16, torch.float32)
    fused = not others and known and target.is_contiguous() and all(source.is_contiguous() for source in sources)
    return Kernels(1) if fused else Kernels(len(sources) + 1, len(sources))


def of_copy(target: Tensor, source: Tensor) -> Kernels:
    return Kernels(1, int(not (_dense(target) and _dense(source)))) if target.numel() else Kernels(0)


def _dense(tensor: Tensor) -> bool:
    """Whether its elements fill one run of memory, each once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return tensor.numel() == 0
            expected *= size
    return True
