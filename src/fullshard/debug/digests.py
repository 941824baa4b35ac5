"""Digests of tensors, which differ if a bit does."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

__all__ = ["digest"]

_WORD = torch.int64.itemsize


@torch.no_grad()
def digest(tensor: torch.Tensor) -> str:
    """Return a digest of the bits of a tensor, of a DTensor's local tensor, in the order of its elements.

    It is made of the sum and the exclusive or of its words of 8 bytes: any one flipped bit changes both, and values
    that differ in many places almost certainly do. Two passes over memory, and the host waits for the device.
    """
    local = tensor.detach()
    local = (local._local_tensor if isinstance(local, DTensor) else local).contiguous()
    place = f"{list(local.shape)} {local.dtype}"
    if not local.numel() or local.is_meta:
        return place
    flat = local.view(-1).view(torch.uint8)
    if flat.storage_offset() % _WORD:
        flat = flat.clone()
    whole = flat.numel() // _WORD * _WORD
    words = flat[:whole].view(torch.int64)
    tail = flat[whole:].tolist()
    found = (int(words.sum()), int(torch.hash_tensor(words).view(torch.int64))) if whole else ()
    return f"{place} {found} {tail}"
