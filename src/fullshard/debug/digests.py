"""Digests of tensors, which differ if a bit does."""

from __future__ import annotations

import functools

import torch

from fullshard.debug.values import values_here

__all__ = ["digest"]

_WORD = torch.int32.itemsize
_SLICE = 2**20  # words that are multiplied at a time, each with a weight of its own
_ODD = 0x9E3779B97F4A7C15 - 2**64  # an odd number with mixed bits, as a signed one


@torch.no_grad()
def digest(tensor: torch.Tensor) -> str:
    """Return a digest of the bits of a tensor, of a DTensor's local tensor, in the order of its elements.

    It is a sum of words of 4 bytes, each times a number for its place, modulo 2**64. One flipped bit always changes it,
    and other values, or the same ones in other places, do with a probability of about 1 - 2**-32. The host waits for
    the device. Of tensors that are not dense, the values are digested.
    """
    local = values_here(tensor)
    place = f"{list(local.shape)} {local.dtype}"
    if local.is_meta or not local.numel():
        return place
    flat = local.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % _WORD:
        flat = flat.clone()
    whole = flat.numel() // _WORD * _WORD
    words, total = flat[:whole].view(torch.int32), 0
    for number, part in enumerate(words.split(_SLICE)):  # type: ignore[no-untyped-call]
        total += int((part * _weights(part.device)[: part.numel()]).sum()) * (2 * number + 1) * _ODD
    return f"{place} {total % 2**64:016x} {flat[whole:].tolist()}"


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randint(-(2**62), 2**62, (_SLICE,), generator=generator, dtype=torch.int64)
    return (2 * numbers + 1).to(device)
