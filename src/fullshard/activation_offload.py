"""Activations that are in host memory between the forward and the backward of a unit.

[Note: Offloaded activations]
While a unit computes, hooks see every tensor that autograd saves. As the next unit begins to compute, large activations
among them are copied to host memory on a side stream. When the forward of that unit ends, the compute stream waits for
the copies, and the memory on the device is free. In backward, the first saved tensor of a unit that autograd asks for
begins the copy back of what the unit before has saved, about where its unsharded parameters are prefetched. So the
activations of two units are on the device at a time, and a copy is hidden if it takes no longer than the computation of
one unit. Those of the last unit stay on the device: no other one computes before its backward. A unit that runs inside
of another one belongs to that.

Copied is the part of a storage that its saved tensors lie in, once, however many they are; they are made anew on a copy
of it with the same strides and alignment, so that kernels compute the same bits.

Parameters and buffers are not activations: they stay on the device anyway, or are on unsharded buffers (of this root or
of another one), whose memory is freed and refilled, and saved tensors on those stay as they are.

Autograd compares versions only of tensors without such hooks, so here it is done for those that stay on the device, and
for the others as long as they are being copied.

Recomputed activations (in backward) are not offloaded, nor are those for which somebody else's hooks are in force, such
as a checkpoint's around the unit, nor those of functions that do not allow hooks.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import nn

from fullshard.engine.hooks import BackwardPass, in_backward
from fullshard.engine.unit import Unit
from fullshard.memory import (
    CommStream,
    PendingWork,
    empty,
    host_buffer,
    is_freed_in_place,
    make_comm_stream,
    on_storage,
)

__all__ = ["Activation", "ActivationOffload"]

# Where a saved part of a storage begins: what kernels and allocators align to, so that the copy is aligned alike.
ALIGNMENT = 512


@dataclass(eq=False)
class Activation:
    """Tensors on one storage that autograd has saved in one forward of a unit. The graph owns it.

    Args:
        offload: Copies it.
        forward: Number of the forward.
    """

    offload: ActivationOffload
    forward: int
    # On the device, with their versions; empty once that memory was freed.
    saved: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    # Where they lie in the copies, for on_storage.
    views: list[tuple[torch.dtype, int, torch.Size, tuple[int, ...]]] = field(default_factory=list)
    host: torch.Tensor = field(init=False)  # the bytes in host memory, once they were copied
    device: torch.Tensor | None = None  # the bytes on the device again
    returning: PendingWork | None = None  # the copy to the device, until it was waited for

    def save(self, tensor: torch.Tensor) -> tuple[Activation, int]:
        """Add a tensor. Returns what autograd saves in its place."""
        # Not the tensor itself, which may own the node that saves it.
        self.saved.append((tensor if tensor.is_leaf else tensor.detach(), tensor._version))
        return self, len(self.saved) - 1

    @staticmethod
    def saved_tensor(saved: tuple[Activation, int]) -> torch.Tensor:
        """Return the tensor that ``save`` was given; the compute stream waits until it is back on the device.

        Raises:
            RuntimeError: If it was modified in place, as autograd does.
        """
        activation, index = saved
        activation.offload.backward_reached(activation.forward)
        if not activation.saved:
            return on_storage(activation.on_device(), *activation.views[index])
        tensor, version = activation.saved[index]
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {version} "
                "instead"
            )
        return tensor

    @property
    def is_unmodified(self) -> bool:
        """True if nothing was written to the tensors since they were saved."""
        return all(tensor._version == version for tensor, version in self.saved)

    def part(self) -> torch.Tensor:
        """Return the part of the storage that the tensors lie in, as bytes."""
        tensors = [tensor for tensor, _ in self.saved]
        spans = [_span(tensor) for tensor in tensors]
        first = min(begin for begin, _ in spans) // ALIGNMENT * ALIGNMENT
        nbytes = max(end for _, end in spans) - first
        self.views = [
            (tensor.dtype, begin - first, tensor.shape, tensor.stride())
            for tensor, (begin, _) in zip(tensors, spans, strict=True)
        ]
        return on_storage(tensors[0], torch.uint8, first, (nbytes,), (1,))

    def on_device(self) -> torch.Tensor:
        """Return the bytes on the device; the current stream waits for them."""
        if self.device is None:
            self.offload.fetch(self.forward)
        assert self.device is not None
        if self.returning is not None:
            self.returning.wait()
            self.returning = None
        return self.device


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where a tensor begins and ends in its storage, in bytes."""
    begin = int(tensor.storage_offset())
    last = begin + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * tensor.itemsize, (last + 1) * tensor.itemsize


@dataclass(eq=False)
class ActivationOffload:
    """Copies activations of some units to host memory and back, see [Note: Offloaded activations].

    Args:
        fraction: Share of the bytes to copy.
        min_bytes: What is in smaller memory stays on the device.
        pin_memory: Pin the host memory.
        device: Where the units compute.
    """

    fraction: float
    min_bytes: int
    pin_memory: bool
    device: torch.device
    _stream: CommStream = field(init=False)
    _kept: set[int] = field(default_factory=set)  # storages of the unit's parameters and buffers, by identity
    # Forwards whose activations a graph still has, by number: the activations by the identity of their storage.
    _forwards: dict[int, weakref.WeakValueDictionary[int, Activation]] = field(default_factory=dict)
    _number: int = 0  # of the last forward
    _leaving: list[tuple[Activation, torch.Tensor]] = field(default_factory=list)  # to the host, with what is copied
    _copies: PendingWork | None = None  # of these
    _pass: BackwardPass | None = None  # the last one that came to any of the forwards
    _reached: int | None = None  # the forward that it is at
    _returned: list[int] = field(default_factory=list)  # forwards whose activations it has on the device again
    _room: float = 0.0  # bytes that may be copied of what was seen since the last one

    def __post_init__(self) -> None:
        self._stream = make_comm_stream(self.device, priority=-1)
        self._forwards[0] = weakref.WeakValueDictionary()

    # ---------------------------------------------------------------- forward

    @contextlib.contextmanager
    def around(self, unit: Unit) -> Iterator[None]:
        """Surround a forward of ``unit``: offload what the one before has saved, and see what this one saves."""
        enabled = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
        may_hook = enabled and torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        if in_backward() or not may_hook or not torch.is_grad_enabled():
            yield
            return
        self._offload()
        self._forwards = {number: saved for number, saved in self._forwards.items() if saved}
        self._number += 1
        self._forwards[self._number] = weakref.WeakValueDictionary()
        modules = [module for ref in unit.modules if (module := ref()) is not None]
        own = (tensor for module in modules for tensor in chain(module.parameters(), module.buffers()))
        self._kept = {each.untyped_storage()._cdata for each in own if type(each) in (torch.Tensor, nn.Parameter)}
        torch._C._autograd._push_saved_tensors_default_hooks(self._save, Activation.saved_tensor)
        try:
            yield
        finally:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            self.finish_copies()

    def _save(self, tensor: torch.Tensor) -> tuple[Activation, int]:
        """Note a tensor that autograd saves. Returns what it saves in its place."""
        activation = Activation(self, self._number)
        strided = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.numel() > 0
        if strided and tensor.device.type == self.device.type and not (tensor.is_conj() or tensor.is_neg()):
            storage = tensor.untyped_storage()
            stays = is_freed_in_place(storage) or storage._cdata in self._kept
            if not stays and storage.nbytes() >= self.min_bytes:
                activation = self._forwards[self._number].setdefault(storage._cdata, activation)
        return activation.save(tensor)

    def _offload(self) -> None:
        """Begin to copy what the last forward has saved, evenly: never more than the fraction of what was seen."""
        with torch.inference_mode(False), torch.no_grad():
            for activation in list(self._forwards[self._number].values()):
                if activation.is_unmodified:
                    part = activation.part()
                    self._room += self.fraction * part.numel()
                    if part.numel() <= self._room:
                        self._room -= part.numel()
                        self._leaving.append((activation, part))
            if self._leaving:
                self._copies = self._stream.issue(list, self._copy_to_host)

    def _copy_to_host(self) -> None:
        for activation, part in self._leaving:
            activation.host = host_buffer(part.numel(), torch.uint8, pin=self.pin_memory)
            activation.host.copy_(part, non_blocking=True)

    def finish_copies(self) -> None:
        """Have the compute stream wait for copies to the host, and free what they were made of, unless it changed."""
        if self._copies is not None:
            self._copies.wait()
        for activation, _ in self._leaving:
            if activation.is_unmodified:
                activation.saved = []
        self._leaving, self._copies = [], None

    # ---------------------------------------------------------------- backward

    def backward_reached(self, forward: int) -> None:
        """Note that autograd has come to ``forward``; begin to copy to the device what the one before has saved."""
        if forward == self._reached or not in_backward():
            return
        if self._pass is None or not self._pass.runs:
            self._pass = BackwardPass(self._reach, self._reach)
        self.finish_copies()
        self._reach(forward)
        before = max((number for number, saved in self._forwards.items() if number < forward and saved), default=None)
        if before is not None:
            self.fetch(before)

    def fetch(self, forward: int) -> None:
        """Begin to copy to the device what is only in host memory and still needed."""
        away = [each for each in self._forwards[forward].values() if not each.saved and each.device is None]
        if not away:
            return
        copies: list[torch.Tensor] = []

        def allocate() -> None:
            copies.extend(empty(each.host.numel(), torch.uint8, self.device) for each in away)

        def copy() -> None:
            for each, target in zip(away, copies, strict=True):
                target.copy_(each.host, non_blocking=True)

        with torch.inference_mode(False), torch.no_grad():
            work = self._stream.issue(list, copy, allocate=allocate)
        for each, target in zip(away, copies, strict=True):
            each.device, each.returning = target, work
        self._returned.append(forward)

    def _reach(self, forward: int | None = None) -> None:
        """Come to ``forward`` in backward, or to the end; free copies on the device of others, whose graph is kept."""
        self._reached, self._room = forward, 0.0
        for other in self._returned:
            for activation in self._forwards.get(other, {}).values():
                if other != forward and activation.device is not None:
                    activation.on_device()  # waits for it: it may be on its way
                    activation.device = None
        self._returned = [other for other in self._returned if other == forward]
