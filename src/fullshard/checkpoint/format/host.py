"""Tensors of any device as blocks of host memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from fullshard.layout import regions_of_range
from fullshard.memory import host_buffer

__all__ = ["HostBlocks", "bytes_of", "plain"]


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as an ordinary tensor: detached, with no lazy conjugation or negation.

    Raises:
        TypeError: If it has no dense memory: on the meta device, sparse, quantized, or a subclass.
    """
    tensor = tensor.detach()
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError(
            f"a {type(tensor).__name__} with layout {tensor.layout} has no dense memory, so it cannot be stored"
        )
    if tensor.device.type == "meta":
        raise TypeError("a tensor on the meta device has no values; materialize the model first")
    return tensor.resolve_conj().resolve_neg()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, without a copy."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


@dataclass(eq=False)
class HostBlocks:
    """Blocks of host memory through which the elements of tensors are written and read, row by row.

    Contiguous CPU memory is used in place. Everything else is copied through one buffer of this object, pinned for
    accelerators. Double buffering would save little: a link transfers a block ten times as fast as a disk writes it.

    Args:
        nbytes: Size of every block except a tensor's last; at least that of an element.
    """

    nbytes: int
    _buffer: torch.Tensor | None = field(default=None, init=False)  # allocated when first needed

    def of(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Iterator[memoryview]:
        """Yield the blocks of a tensor in order. Each is valid until the next one is requested.

        Args:
            tensor: The tensor, on any device.
            dtype: Convert it; None: keep its dtype.

        Raises:
            TypeError: If it has no dense memory.
        """
        tensor = plain(tensor)
        for block, parts in self._blocks(tensor, dtype or tensor.dtype):
            for memory, part in parts:
                # On its device first: a copy across layouts, dtypes and devices at once allocates on both.
                memory.copy_(part if part.device.type == "cpu" else part.to(memory.dtype).contiguous())
            yield block

    def into(self, tensor: torch.Tensor, dtype: torch.dtype) -> Iterator[memoryview]:
        """Yield blocks for the elements of a tensor in order, to be filled with values of that dtype.

        Raises:
            TypeError: If it has no dense memory.
        """
        for block, parts in self._blocks(plain(tensor), dtype):
            yield block
            for memory, part in parts:
                part.copy_(memory)

    def _blocks(self, tensor: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[memoryview, list[Part]]]:
        """Yield blocks with their parts; none if the block is the tensor's own memory."""
        if tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.dtype is dtype:
            view = bytes_of(tensor)
            for start in range(0, len(view), self.nbytes):
                yield view[start : start + self.nbytes], []
            return
        step = self.nbytes // max(dtype.itemsize, tensor.element_size())
        for start in range(0, tensor.numel(), step):
            numel = min(step, tensor.numel() - start)
            flat = self._host(pinned=tensor.device.type != "cpu")[: numel * dtype.itemsize].view(dtype)
            yield bytes_of(flat), parts_of(flat, tensor, start)

    def _host(self, *, pinned: bool) -> torch.Tensor:
        if self._buffer is None or (pinned and not self._buffer.is_pinned()):
            self._buffer = host_buffer(self.nbytes, torch.uint8, pin=pinned)
        return self._buffer


Part = tuple[torch.Tensor, torch.Tensor]  # of a block, and of the tensor, with the same elements


def parts_of(flat: torch.Tensor, tensor: torch.Tensor, start: int) -> list[Part]:
    """Return the parts of 1-D memory for the elements of a tensor from ``start`` on, and the tensor's parts of each."""
    if tensor.is_contiguous():
        return [(flat, tensor.view(-1)[start : start + flat.numel()])]
    parts, done = [], 0
    for region in regions_of_range(tuple(tensor.shape), start, flat.numel()):
        part = tensor[tuple(map(slice, region.offsets, region.ends))]
        parts.append((flat[done : done + region.numel].view(region.sizes), part))
        done += region.numel
    return parts
