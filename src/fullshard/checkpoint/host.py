"""Bytes of tensors, wherever they are, as blocks of host memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fullshard.errors import CheckpointError
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
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)


class HostBlocks:
    """Gives the elements of tensors row by row, as blocks of bytes.

    Contiguous memory of the CPU is given as it is. Everything else goes through buffers that belong to this object: on
    accelerators two, so that the next block travels while the caller works with one.

    Args:
        nbytes: Of every block but a tensor's last; a multiple of 16.
    """

    nbytes: int
    _buffers: list[torch.Tensor]  # allocated when first needed
    _pinned: bool

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._buffers, self._pinned = [], False

    def of(self, tensor: torch.Tensor) -> Iterator[memoryview]:
        """The blocks of a tensor, in order. Each is valid until the next is asked for.

        Raises:
            TypeError: See :func:`plain`.
        """
        tensor = plain(tensor)
        if tensor.device.type != "cpu":
            yield from self._of_accelerator(tensor)
        elif tensor.is_contiguous():
            view = bytes_of(tensor)
            for start in range(0, len(view), self.nbytes):
                yield view[start : start + self.nbytes]
        else:
            for start, numel in self._ranges(tensor):
                yield bytes_of(self._fill(0, tensor, start, numel))

    def _ranges(self, tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
        """First element and number of elements of every block."""
        step = self.nbytes // tensor.element_size()
        for start in range(0, tensor.numel(), step):
            yield start, min(step, tensor.numel() - start)

    def _of_accelerator(self, tensor: torch.Tensor) -> Iterator[memoryview]:
        """Blocks through two pinned buffers: while the caller has one, the other is being filled."""
        device = torch.get_device_module(tensor.device)
        filled: tuple[torch.Tensor, torch.Event] | None = None
        with device.device(tensor.device):
            for number, (start, numel) in enumerate(self._ranges(tensor)):
                block = self._fill(number % 2, tensor, start, numel)
                event = torch.Event(tensor.device.type)
                event.record()
                if filled is not None:
                    filled[1].synchronize()
                    yield bytes_of(filled[0])
                filled = block, event
            if filled is not None:
                filled[1].synchronize()
                yield bytes_of(filled[0])

    def _fill(self, number: int, tensor: torch.Tensor, start: int, numel: int) -> torch.Tensor:
        """Copy a range of elements to a buffer; from an accelerator, without waiting for it."""
        on_host = tensor.device.type == "cpu"
        self._allocate(pinned=not on_host)
        flat = self._buffers[number][: numel * tensor.element_size()].view(tensor.dtype)
        if tensor.is_contiguous():
            flat.copy_(tensor.view(-1)[start : start + numel], non_blocking=not on_host)
            return flat
        done = 0
        for box in boxes_of_range(tuple(tensor.shape), start, numel):
            part = tensor
            for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                part = part.narrow(dim, offset, size)
            if not on_host:  # a copy between layouts and devices at once would be made whole on the host
                part = part.contiguous()
            flat[done : done + box.numel].view(box.sizes).copy_(part, non_blocking=not on_host)
            done += box.numel
        return flat

    def _allocate(self, *, pinned: bool) -> None:
        if self._buffers and (self._pinned or not pinned):
            return
        try:
            self._buffers = [host_buffer(self.nbytes, pinned=pinned) for _ in range(2 if pinned else 1)]
        except RuntimeError as error:
            raise CheckpointError(f"no host memory for a buffer of {self.nbytes} bytes: {error}") from error
        self._pinned = pinned
