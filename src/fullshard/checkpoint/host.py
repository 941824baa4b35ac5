"""Bytes of tensors, wherever they are, as blocks of host memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fullshard import memory
from fullshard.layout import boxes_of_range

__all__ = ["HostBlocks", "bytes_of", "host_buffer", "plain"]


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as an ordinary tensor: detached, nothing to be conjugated or negated later.

    Raises:
        TypeError: If it has no memory of its own elements: on the meta device, sparse, quantized, or a subclass.
    """
    tensor = tensor.detach()
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError(f"a {type(tensor).__name__} with layout {tensor.layout} has no elements that could be stored")
    if tensor.device.type == "meta":
        raise TypeError("a tensor on the meta device has no elements; give the model memory first")
    return tensor.resolve_conj().resolve_neg()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor of the CPU, without a copy."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def host_buffer(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """A uint8 buffer of the CPU; ``pinned`` so that accelerators copy from and to it at full speed."""
    return memory.host_buffer(nbytes, torch.uint8, pin=pinned)


class HostBlocks:
    """Gives the elements of tensors row by row, as blocks of bytes.

    Contiguous memory of the CPU is given as it is. Everything else goes through one buffer that belongs to this object,
    pinned for accelerators. A second one, filled while the caller works with the first, would save little: a link
    moves a block ten times as fast as a disk takes it.

    Args:
        nbytes: Of every block but a tensor's last; a multiple of 16.
    """

    nbytes: int
    _buffer: torch.Tensor | None  # allocated when first needed

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self._buffer = nbytes, None

    def of(self, tensor: torch.Tensor) -> Iterator[memoryview]:
        """The blocks of a tensor, in order. Each is valid until the next is asked for.

        Raises:
            TypeError: See :func:`plain`.
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
        """A range of elements, counted row by row, in the buffer."""
        flat = self._host(pinned=tensor.device.type != "cpu")[: numel * tensor.element_size()].view(tensor.dtype)
        if tensor.is_contiguous():
            return flat.copy_(tensor.view(-1)[start : start + numel])
        done = 0
        for box in boxes_of_range(tuple(tensor.shape), start, numel):
            part = tensor
            for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                part = part.narrow(dim, offset, size)
            # On its device first: a copy to another layout and another device at once takes further memory on both.
            flat[done : done + box.numel].view(box.sizes).copy_(part.contiguous())
            done += box.numel
        return flat

    def _host(self, *, pinned: bool) -> torch.Tensor:
        if self._buffer is None or (pinned and not self._buffer.is_pinned()):
            self._buffer = host_buffer(self.nbytes, pinned=pinned)
        return self._buffer
