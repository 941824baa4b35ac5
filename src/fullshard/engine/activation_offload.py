"""Activations that are in host memory between the forward and the backward of a unit.

[Note: Offloaded activations]
While a unit computes, hooks see every tensor that autograd saves. Large activations among them are copied to host
memory on a side stream when the unit's forward ends. The next unit computes meanwhile; when its forward ends, the
compute stream waits for the copies, and the memory on the device is free. In backward, what a unit needs is copied back
while the unit after it computes: where the unsharded parameters are prefetched, too. So the activations of two units
are on the device at a time, and a copy is hidden if it takes no longer than the computation of one unit.

Copied is the part of a storage that its saved tensors lie in, once, however many they are; they are made anew on a copy
of it with the same strides and alignment, so that kernels compute the same bits. The activations of the last of these
units stay on the device, for its backward comes at once. A unit that runs inside of another one belongs to that.

Parameters and buffers are not activations: they stay on the device anyway, or are on unsharded buffers (of this root or
of another one), whose memory is freed and refilled, and saved tensors on those stay as they are.

Autograd compares versions only of tensors without such hooks, so here it is done for those that stay on the device, and
for the others as long as they are being copied.

Recomputed activations (in backward) are not offloaded, nor are those for which somebody else's hooks are in force, such
as a checkpoint's around the unit, nor those of functions that do not allow hooks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain

import torch
from torch.distributed.tensor import DTensor

from fullshard.engine import hooks
from fullshard.engine.settings import ActivationOffload
from fullshard.engine.states import OpenForward
from fullshard.engine.unit import Unit
from fullshard.memory import CommStream, PendingWork, empty, host_buffer, is_freed_in_place, on_storage

__all__ = ["ForwardActivations", "OffloadedForwards"]

# Where a saved part of a storage begins: what kernels and allocators align to, so that the copy is aligned alike.
ALIGNMENT = 512


class SavedTensor:
    """One tensor that autograd has saved: where it lies in an activation, or itself if it is none."""

    __slots__ = ("activation", "dtype", "shape", "start", "stride", "tensor", "version")

    activation: Activation | None
    tensor: torch.Tensor | None  # None: its activation has left the device

    def __init__(self, tensor: torch.Tensor, activation: Activation | None) -> None:
        # Not the tensor itself, which may own the node that saves it.
        self.tensor, self.activation = tensor if tensor.is_leaf else tensor.detach(), activation
        self.version = tensor._version
        if activation is not None:
            self.dtype, self.shape, self.stride = tensor.dtype, tensor.shape, tensor.stride()
            self.start = int(tensor.storage_offset()) * tensor.itemsize

    def value(self) -> torch.Tensor:
        """Return the saved tensor; the compute stream waits until it is back on the device.

        Raises:
            RuntimeError: If it was modified in place, as autograd does.
        """
        tensor, activation = self.tensor, self.activation
        if tensor is not None:
            if tensor._version != self.version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version "
                    f"{self.version} instead"
                )
            return tensor
        assert activation is not None
        begin = self.start - activation.begin
        return on_storage(activation.on_device(), self.dtype, begin, self.shape, self.stride)


class Activation:
    """The part of a storage that tensors saved in one forward of a unit lie in. Bytes of the storage."""

    __slots__ = ("__weakref__", "begin", "end", "forward", "memory", "returning", "saved")

    begin: int
    end: int
    forward: ForwardActivations
    saved: list[SavedTensor]  # on it, until it has left the device
    memory: tuple[torch.Tensor, torch.Tensor | None] | None  # of its copies: on the host, and on the device again
    returning: PendingWork | None  # the copy to the device, until it was waited for

    def __init__(self, storage: torch.UntypedStorage, forward: ForwardActivations) -> None:
        self.begin, self.end, self.forward = storage.nbytes(), 0, forward
        self.saved, self.memory, self.returning = [], None, None

    @property
    def nbytes(self) -> int:
        """Bytes to copy."""
        return self.end - self.begin

    def save(self, tensor: torch.Tensor) -> SavedTensor:
        """Add a saved tensor that lies in the storage."""
        saved = SavedTensor(tensor, self)
        last = sum((size - 1) * stride for size, stride in zip(saved.shape, saved.stride, strict=True))
        self.begin = min(self.begin, saved.start // ALIGNMENT * ALIGNMENT)
        self.end = max(self.end, saved.start + (last + 1) * tensor.itemsize)
        self.saved.append(saved)
        return saved

    @property
    def is_unmodified(self) -> bool:
        """True if nothing was written to the saved tensors since they were saved."""
        return all(saved.tensor is None or saved.tensor._version == saved.version for saved in self.saved)

    def keep(self) -> None:
        """Leave it on the device."""
        for saved in self.saved:
            saved.activation = None
        self.saved, self.memory = [], None

    def leave(self) -> None:
        """Let go of the memory on the device, which has been copied to the host; keep it if it was modified since."""
        if not self.is_unmodified:
            self.keep()
            return
        for saved in self.saved:
            saved.tensor = None
        self.saved = []

    def on_device(self) -> torch.Tensor:
        """Return its bytes on the device; the current stream waits for them."""
        if self.memory is None or self.memory[1] is None:
            self.forward.fetch_late()
        assert self.memory is not None and self.memory[1] is not None
        if self.returning is not None:
            self.returning.wait()
            self.returning = None
        return self.memory[1]


class ForwardActivations:
    """What autograd saves in one forward of a unit, see [Note: Offloaded activations].

    Args:
        unit: That computes.
        policy: Which activations are offloaded.
        device: Where they are computed.
        stream: On which they are copied.
        kept: Storages that stay on the device, by identity.
        fetched: Is called with this object if a graph needs its activations and nobody has fetched them.
    """

    unit: weakref.ref[Unit]
    policy: ActivationOffload
    _device: torch.device
    _stream: CommStream
    _kept: Collection[int]
    _fetched: Callable[[ForwardActivations], None]
    _open: dict[int, Activation]  # by the identity of their storages, while the forward runs
    _offloaded: list[weakref.ref[Activation]]  # the graph owns them
    _leaving: list[Activation]  # being copied to the host
    _copies: PendingWork | None  # of these

    def __init__(
        self,
        unit: weakref.ref[Unit],
        policy: ActivationOffload,
        device: torch.device,
        stream: CommStream,
        kept: Collection[int],
        fetched: Callable[[ForwardActivations], None],
    ) -> None:
        self.unit, self.policy, self._device, self._stream = unit, policy, device, stream
        self._kept, self._fetched = kept, fetched
        self._open, self._offloaded, self._leaving, self._copies = {}, [], [], None

    # ---------------------------------------------------------------- while the forward runs

    def pack(self, tensor: torch.Tensor) -> SavedTensor:
        """Note a tensor that autograd saves."""
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        if not plain or tensor.device.type != self._device.type or tensor.is_conj() or tensor.is_neg():
            return SavedTensor(tensor, None)
        storage = tensor.untyped_storage()
        activation = self._open.get(storage._cdata)
        if activation is None:
            small = storage.nbytes() < self.policy.min_bytes or not tensor.numel()
            if small or is_freed_in_place(storage) or storage._cdata in self._kept:
                return SavedTensor(tensor, None)
            activation = self._open[storage._cdata] = Activation(storage, self)
        return activation.save(tensor) if tensor.numel() else SavedTensor(tensor, None)

    # ---------------------------------------------------------------- to the host

    @property
    def candidates(self) -> list[Activation]:
        """Activations that can be offloaded: not modified in place since they were saved."""
        return [each for each in self._open.values() if each.is_unmodified]

    def offload(self, chosen: Iterable[Activation]) -> None:
        """End the forward: begin to copy the chosen activations to the host. The others stay on the device."""
        self._leaving = list(chosen)
        identities = set(map(id, self._leaving))
        for activation in self._open.values():
            if id(activation) not in identities:
                activation.keep()
        self._open = {}
        if not self._leaving:
            return
        self._offloaded = [weakref.ref(each) for each in self._leaving]
        with torch.inference_mode(False), torch.no_grad():
            for each in self._leaving:
                each.memory = (host_buffer(each.nbytes, torch.uint8, pin=self.policy.pin_memory), None)
            self._copies = self._stream.issue(list, self._copy_to_host)

    def _copy_to_host(self) -> None:
        for each in self._leaving:
            source = each.saved[0].tensor
            assert each.memory is not None and source is not None
            part = on_storage(source, torch.uint8, each.begin, (each.nbytes,), (1,))
            each.memory[0].copy_(part, non_blocking=True)

    def free_device_memory(self) -> None:
        """Have the compute stream wait for the copies to the host, and free what they were made of."""
        if self._copies is not None:
            self._copies.wait()
        for each in self._leaving:
            each.leave()
        self._leaving, self._copies = [], None

    # ---------------------------------------------------------------- and back

    @property
    def is_alive(self) -> bool:
        """True while a graph has some of the activations."""
        return bool(self._leaving) or any(ref() is not None for ref in self._offloaded)

    def fetch(self) -> None:
        """Begin to copy the activations to the device, as far as graphs still have them and they are not there."""
        self.free_device_memory()
        away = [each for ref in self._offloaded if (each := ref()) is not None and each.memory is not None]
        away = [each for each in away if each.memory is not None and each.memory[1] is None]
        if not away:
            return

        def allocate() -> None:
            for each in away:
                assert each.memory is not None
                each.memory = (each.memory[0], empty(each.nbytes, torch.uint8, self._device))

        def copy() -> None:
            for each in away:
                assert each.memory is not None and each.memory[1] is not None
                each.memory[1].copy_(each.memory[0], non_blocking=True)

        with torch.inference_mode(False), torch.no_grad():
            work = self._stream.issue(list, copy, allocate=allocate)
        for each in away:
            each.returning = work

    def fetch_late(self) -> None:
        """Fetch for a backward that did not begin with this forward's unit, such as the second one of a graph."""
        self.fetch()
        self._fetched(self)

    def free_fetched(self) -> None:
        """End a backward of this forward: free the copies on the device that a retained graph still has."""
        for ref in self._offloaded:
            each = ref()
            if each is not None and each.memory is not None and each.memory[1] is not None:
                if each.returning is not None:  # not used, but on its way
                    each.returning.wait()
                    each.returning = None
                each.memory = (each.memory[0], None)


class OffloadedForwards:
    """The forwards of one root whose activations are offloaded, and when they are copied.

    Args:
        units: All units of the root.
    """

    _units: Sequence[weakref.ref[Unit]]
    _kept: set[int] | None  # storages of parameters and buffers, by identity; None: to be looked for in this forward
    _open: tuple[OpenForward, ForwardActivations] | None  # that runs
    _leaving: list[ForwardActivations]  # being copied to the host
    _waiting: list[weakref.ref[ForwardActivations]]  # for their backward, in the order in which the forwards ended
    _in_backward: list[weakref.ref[ForwardActivations]]  # whose backward has begun in this pass
    _number: int  # of offloaded forwards in the root's forward that runs
    _last: int | None  # how many there were in the last one; None: not known yet
    _seen: int  # bytes of activations in the forward of the root that runs
    _moved: int  # those of them that are offloaded

    def __init__(self, units: Sequence[weakref.ref[Unit]]) -> None:
        self._units, self._kept, self._open = units, None, None
        self._leaving, self._waiting, self._in_backward = [], [], []
        self._number, self._last, self._seen, self._moved = 0, None, 0, 0

    # ---------------------------------------------------------------- forward

    def begin_forward(self) -> None:
        """Begin the outermost forward."""
        if self._number:
            self._last = self._number
        elif self._last is None:  # each once, presumably
            units = (unit for ref in self._units if (unit := ref()) is not None)
            self._last = sum(unit.settings.activation_offload is not None for unit in units)
        self._number = self._seen = self._moved = 0
        self._kept = None

    def begin(self, unit: Unit, call: OpenForward, stream: CommStream) -> None:
        """Have what autograd saves in ``call`` of ``unit`` offloaded on ``stream``, where that is for it to do."""
        policy, device = unit.settings.activation_offload, unit.mesh.device
        if policy is None or device.type == "cpu" or not torch.is_grad_enabled() or hooks.in_backward():
            return
        if self._open is None and hooks.may_hook_saved_tensors():
            if self._kept is None:
                root = self._units[0]()
                modules = () if root is None else [module for ref in root.modules if (module := ref()) is not None]
                tensors = (tensor for module in modules for tensor in chain(module.parameters(), module.buffers()))
                self._kept = {storage for tensor in tensors for storage in _storages(tensor)}
            forward = ForwardActivations(unit.ref, policy, device, stream, self._kept, self._in_backward_late)
            hooks.begin_saved_tensor_hooks(forward.pack, SavedTensor.value)
            self._open = call, forward

    def end(self, call: OpenForward, *, failed: bool = False) -> None:
        """End ``call``: what it has saved begins to leave the device, and what the one before it has saved has left."""
        if self._open is None or self._open[0] is not call:
            return
        (_, forward), self._open = self._open, None
        hooks.end_saved_tensor_hooks()
        if failed:
            forward.offload(())
            return
        self.free_device_memory()
        self._number += 1
        if self._number == self._last:  # its backward comes at once
            forward.offload(())
            return
        forward.offload([each for each in forward.candidates if self._is_chosen(each, forward.policy)])
        if forward.is_alive:
            self._leaving.append(forward)
            self._waiting = [ref for ref in self._waiting if (other := ref()) is not None and other.is_alive]
            self._waiting.append(weakref.ref(forward))

    def _is_chosen(self, activation: Activation, policy: ActivationOffload) -> bool:
        """Choose activations evenly, so that at no point a larger fraction of the bytes is chosen."""
        self._seen += activation.nbytes
        chosen = self._moved + activation.nbytes <= policy.fraction * self._seen
        self._moved += activation.nbytes if chosen else 0
        return chosen

    def free_device_memory(self) -> None:
        """Have the compute stream wait for copies to the host, and free what they were made of."""
        leaving, self._leaving = self._leaving, []
        for forward in leaving:
            forward.free_device_memory()

    # ---------------------------------------------------------------- backward

    def backward_began(self, unit: Unit) -> None:
        """Begin to copy to the device what the unit before ``unit`` has saved."""
        if not self._waiting:
            return
        self.free_device_memory()
        for index in range(len(self._waiting) - 1, -1, -1):
            forward = self._waiting[index]()
            if forward is not None and forward.unit is unit.ref:
                self._in_backward.append(self._waiting[index])
                del self._waiting[index:]
                break
        while self._waiting:
            before = self._waiting[-1]()
            if before is not None and before.is_alive:
                before.fetch()
                return
            self._waiting.pop()

    def _in_backward_late(self, forward: ForwardActivations) -> None:
        """Note that ``forward`` was fetched by a graph itself, for ``backward_ended`` to free."""
        if all(ref() is not forward for ref in self._in_backward):
            self._in_backward.append(weakref.ref(forward))

    def backward_ended(self, unit: Unit | None = None) -> None:
        """Free what is still on the device for the backward of ``unit`` (None: of all), because the graph is kept."""
        left = []
        for ref in self._in_backward:
            forward = ref()
            if forward is not None and unit is not None and forward.unit is not unit.ref:
                left.append(ref)
            elif forward is not None:
                forward.free_fetched()
        self._in_backward = left

    def drop(self) -> None:
        """Forget all forwards, after a failure; graphs that still exist fetch what they need by themselves."""
        if self._open is not None:  # it neither returned nor raised
            self.end(self._open[0], failed=True)
        self.free_device_memory()
        self._waiting, self._in_backward, self._number = [], [], 0


def _storages(tensor: torch.Tensor) -> Iterator[int]:
    """Yield the storages of a tensor, by identity: also those of a DTensor and of other subclasses."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    flatten = getattr(local, "__tensor_flatten__", None)
    if flatten is None:
        yield local.untyped_storage()._cdata
        return
    for name in flatten()[0]:
        yield from _storages(getattr(local, name))
