"""Read tensors of any device as blocks of host memory."""

from __future__ import annotations

from collections.abc import Iterator
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


class HostBlocks:
    """Iterates over the elements of tensors row by row, as blocks of bytes.

    Contiguous CPU memory is used in place. Everything else is copied through one buffer of this object, pinned for
    accelerators. Double buffering would save little: a link transfers a block ten times as fast as a disk writes it.

    Args:
        nbytes: Size of every block except a tensor's last; a multiple of 16.
    """

    nbytes: int
    _buffer: torch.Tensor | None  # allocated when first needed

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self._buffer = nbytes, None

    def of(self, tensor: torch.Tensor) -> Iterator[memoryview]:
        """Yield the blocks of a tensor in order. Each is valid until the next one is requested.

        Raises:
            TypeError: If it has no dense memory.
        """
        tensor = plain(tensor)
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            view = bytes_of(tensor)
            for start in range(0, len(view), self.nbytes):
                yield view[start : start + self.nbytes]
            return
        step = self.nbytes // tensor.element_size()
        for start in range(0, tensor.numel(), step):
            yield bytes_of(self._copied(tensor, start, min(step, tensor.numel() - start)))

    def _copied(self, tensor: torch.Tensor, start: int, numel: int) -> torch.Tensor:
        """Copy a range of elements, counted row by row, into the buffer."""
        flat = self._host(pinned=tensor.device.type != "cpu")[: numel * tensor.element_size()].view(tensor.dtype)
        if tensor.is_contiguous():
            return flat.copy_(tensor.view(-1)[start : start + numel])
        done = 0
        for region in regions_of_range(tuple(tensor.shape), start, numel):
            part = tensor[tuple(map(slice, region.offsets, region.ends))]
            # Make it contiguous on its device first: copying across layouts and devices at once allocates on both.
            flat[done : done + region.numel].view(region.sizes).copy_(part.contiguous())
            done += region.numel
        return flat

    def _host(self, *, pinned: bool) -> torch.Tensor:
        if self._buffer is None or (pinned and not self._buffer.is_pinned()):
            self._buffer = host_buffer(self.nbytes, torch.uint8, pin=pinned)
        return self._buffer
