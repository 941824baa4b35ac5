"""Storage that is freed and refilled in place, streams and events. The only file that touches them.

[Note: Who owns a full buffer's memory]
A buffer is allocated on the *compute* stream, and the stream that fills it first waits for an event recorded
on the compute stream after that allocation. The caching allocator therefore reuses the block in the order of
the compute stream, whose kernels are the ones that read it, and ``record_stream`` is not needed: peak memory
does not depend on timing. What is lost is the overlap of the fill with kernels enqueued before the allocation,
which is why fills are issued one unit ahead (see [Note: Order and prefetch]).

Two cases differ. After ``set_post_optim_event`` the first fills of a step do not wait for the compute stream, so their
memory is of the side stream's pool. And a user may run a unit on a stream of his own. So a buffer remembers the stream
on which its memory was allocated. Before it is freed on another one, the first waits for that: only then may the next
allocation of its pool have the block.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

__all__ = [
    "Buffer",
    "DeviceLane",
    "Event",
    "HostLane",
    "Lane",
    "Stream",
    "Ticket",
    "Work",
    "alias",
    "current_stream",
    "empty",
    "free_storage",
    "host_buffer",
    "input_on",
    "make_lane",
    "own_storage",
    "poison",
    "refill_storage",
    "run_on",
    "takes_host_gradients",
    "to_host",
    "wait_for_stream",
]


Event = torch.Event
Stream = torch.Stream

_POISON = 0xFF  # in every byte: NaN in all floating-point formats but float8_*fnuz, else a large or negative number
_poisoned = os.environ.get("FULLSHARD_POISON", "0") != "0"


def poison(enabled: bool) -> None:
    """Fill memory with NaN when it is freed and before it is filled, to expose who reads it then. For tests.

    That is unsharded buffers, messages and what gradients are reduced in. The environment variable
    ``FULLSHARD_POISON=1`` does the same from the start. Freed storages have no pages at all: whoever reads them through
    a tensor on the storage faults; who reads through another alias of the memory, or before a collective has filled it,
    finds NaN.
    """
    global _poisoned
    _poisoned = enabled


def _fill_with_poison(storage: torch.UntypedStorage) -> None:
    if storage.size() and storage.device.type != "meta":
        torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).fill_(_POISON)


def empty(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A flat tensor, contents undefined."""
    made = torch.empty(numel, dtype=dtype, device=device)
    if _poisoned:
        _fill_with_poison(made.untyped_storage())
    return made


class Work(Protocol):
    """What a transport returns for something in flight (a c10d ``Work`` is one)."""

    def wait(self) -> object:
        """Block the host (CPU) or the current stream (accelerators) until done; raise if it failed."""


class Buffer:
    """A flat buffer whose memory is freed and refilled while the tensors on it stay the same objects.

    Args:
        numel: Size in elements.
        dtype: Element type.
        device: Where it lives.

    Tensors made by :meth:`tensor` before the memory is freed are valid again after the next
    :meth:`allocate`: freeing goes through their common storage, so also tensors that autograd saved
    see the new contents.
    """

    numel: int
    dtype: torch.dtype
    device: torch.device
    _storage: torch.UntypedStorage  # 0 bytes at rest
    _nbytes: int
    _pool: torch.Stream | None  # on which the memory was allocated

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.numel, self.dtype, self.device = numel, dtype, device
        self._pool = current_stream(device)
        self._storage = torch.empty(numel, dtype=dtype, device=device).untyped_storage()
        self._nbytes = self._storage.nbytes()

    def allocate(self) -> None:
        """Give the buffer memory (contents undefined); no-op if it has some."""
        if self._storage.size() != self._nbytes:
            self._pool = current_stream(self.device)
            self._storage.resize_(self._nbytes)
            if _poisoned:
                _fill_with_poison(self._storage)

    def free(self) -> None:
        """Give the memory back."""
        if _poisoned:
            _fill_with_poison(self._storage)
        if self._storage.size():
            _hand_back(self._pool)
        self._storage.resize_(0)

    @property
    def allocated_bytes(self) -> int:
        """Bytes held at the moment: all or 0."""
        return self._storage.size()

    def tensor(self, offset: int, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
        """A tensor on this buffer at ``offset`` (elements); the buffer must be allocated. See :func:`alias`."""
        return _tensor_on(self._storage, self.dtype, self.device, offset, shape, stride)


def alias(tensor: torch.Tensor, offset: int, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """A tensor on the storage of ``tensor`` with a version counter of its own; ``offset`` in elements.

    [Note: Alias tensors]
    Collectives write through such aliases. A view would share the parameter's version counter, which gloo
    bumps from its own thread when it writes an output; autograd would then refuse what it saved in forward.
    """
    start = int(tensor.storage_offset()) + offset
    return _tensor_on(tensor.untyped_storage(), tensor.dtype, tensor.device, start, shape, stride)


def own_storage(view: torch.Tensor) -> torch.Tensor:
    """The memory of ``view``, which lies inside a larger storage, as a tensor that begins a storage of its own size.

    For the local tensors of DTensors: a wrapper takes over the storage offset of its local tensor, and where that is
    not 0, copy.deepcopy and torch.save take the wrapper for a tensor with memory. It also lets a saved shard be as
    large as the parameter's part and not as the whole buffer. The larger storage lives as long as the result.
    """
    if view.device.type == "meta" or not view.numel():
        return torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device=view.device)
    # As a capsule: asked for its device, a tensor knows no accelerator but those in torch's own tree.
    try:
        own: torch.Tensor = from_dlpack(to_dlpack(view))
    except (BufferError, RuntimeError, TypeError):  # a dtype that the exchange format has no name for
        if not view.is_contiguous():
            return view
        own = from_dlpack(to_dlpack(view.view(-1).view(torch.uint8))).view(view.dtype)
    return own.as_strided(view.shape, view.stride(), 0)  # the format forgets strides of dims of size 1


def free_storage(tensor: torch.Tensor, pool: torch.Stream | None) -> int:
    """Give back the memory of a tensor that :func:`refill_storage` fills anew later. Returns the bytes it held.

    Args:
        tensor: Its storage is emptied.
        pool: The stream that was current when the memory was allocated.
    """
    storage = tensor.untyped_storage()
    nbytes = storage.nbytes()
    if _poisoned:
        _fill_with_poison(storage)
    if nbytes:
        _hand_back(pool)
    storage.resize_(0)
    return nbytes


def refill_storage(tensor: torch.Tensor, nbytes: int) -> None:
    """Give a tensor that :func:`free_storage` emptied memory again (contents undefined); no-op if it has some."""
    storage = tensor.untyped_storage()
    if storage.nbytes() != nbytes:
        storage.resize_(nbytes)
        if _poisoned:
            _fill_with_poison(storage)


def host_buffer(numel: int, dtype: torch.dtype, *, pin: bool) -> torch.Tensor:
    """A flat tensor in CPU memory, contents undefined; page-locked if ``pin`` and there is an accelerator."""
    pinned = pin and torch.accelerator.is_available()
    return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=pinned)


def takes_host_gradients(device: torch.device) -> bool:
    """True if torch lets a parameter on ``device`` have a gradient in CPU memory: accelerators of its own tree do."""
    own, host = torch.empty(0, device=device), torch.empty(0, device="cpu")
    return bool(torch._has_compatible_shallow_copy_type(own, host))


def to_host(tensor: torch.Tensor, *, pin: bool) -> torch.Tensor:
    """A copy of ``tensor``, of any subclass, in CPU memory; see :func:`host_buffer`."""
    host = tensor.cpu()
    return host.pin_memory() if pin and torch.accelerator.is_available() else host


def input_on(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, which a user has passed, on ``device``; the user may write to his own as soon as this returns.

    Does not block the host for dense tensors, beyond what copies of memory that is not pinned do. Such memory is read
    before an asynchronous copy returns; pinned memory is read later, so that one of our own is filled first. Not in a
    captured graph, whose replays read the user's tensor again: there he has to keep it as it is until they have.
    """
    if tensor.device == device:
        return tensor
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return tensor.to(device)
    if tensor.device.type == "cpu" and tensor.is_pinned() and not _is_capturing(device):
        tensor = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    return tensor.to(device, non_blocking=True)


def _tensor_on(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    device: torch.device,
    offset: int,
    shape: Sequence[int],
    stride: Sequence[int],
) -> torch.Tensor:
    empty = torch.empty(0, dtype=dtype, device=device)
    with torch.no_grad():
        return empty.set_(storage, offset, tuple(shape), tuple(stride))


class Ticket(Protocol):
    """Something issued on a lane."""

    def wait(self) -> None:
        """Make the compute stream (on CPU: the host) see the result. Any number of times."""

    def settle(self) -> None:
        """Block the host until the result is there."""


class Lane(Protocol):
    """Where collectives run, beside the computation."""

    def issue(
        self,
        launch: Callable[[], Iterable[Work]],
        finish: Callable[[], None],
        *,
        allocate: Callable[[], None] | None = None,
        after: torch.Event | None = None,
    ) -> Ticket:
        """Start ``launch`` after all computation enqueued so far, and run ``finish`` once its works are done.

        Args:
            launch: Starts what is to run and returns what to wait for.
            finish: Uses what has arrived.
            allocate: Allocates the memory that is filled, see [Note: Who owns a full buffer's memory].
            after: Wait for this event only, instead of all computation; everything that used the memory before
                must be ordered before it.
        """

    def synchronize(self) -> None:
        """Block the host until everything that was issued is done."""


class _HostTicket:
    __slots__ = ("_error", "_finish", "_works")

    def __init__(self, works: Iterable[Work], finish: Callable[[], None]) -> None:
        self._works = list(works)
        self._finish: Callable[[], None] | None = finish
        self._error: RuntimeError | None = None

    def wait(self) -> None:
        if self._works:
            self._land()
        if self._error is not None:  # for all who share the ticket: nothing has arrived
            raise self._error
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    settle = wait

    def _land(self) -> None:
        """Wait for all works, also after a failure: they write to memory that is used again."""
        works, self._works = self._works, []
        for work in works:
            try:
                work.wait()
            except RuntimeError as caught:
                self._error = self._error or caught

    def __del__(self) -> None:
        # A model that is deleted with a gather in flight must not leave messages to the group's next users.
        self._land()


class HostLane:
    """CPU: the back end's own threads do the communication; the host waits and finishes."""

    def issue(
        self,
        launch: Callable[[], Iterable[Work]],
        finish: Callable[[], None],
        *,
        allocate: Callable[[], None] | None = None,
        after: torch.Event | None = None,
    ) -> Ticket:
        """See :class:`Lane`."""
        if after is not None:
            after.synchronize()
        if allocate is not None:
            allocate()
        return _HostTicket(launch(), finish)

    def synchronize(self) -> None:
        """See :class:`Lane`. Nothing reads host memory but collectives, whose tickets wait for them."""


class _DeviceTicket:
    __slots__ = ("_done", "_owner", "_spare", "_waited")

    def __init__(self, done: torch.Event, owner: torch.Stream, spare: list[torch.Event]) -> None:
        self._done, self._owner, self._spare, self._waited = done, owner, spare, False

    def wait(self) -> None:
        current = torch.accelerator.current_stream(self._done.device)
        current.wait_event(self._done)
        self._waited |= current == self._owner

    def settle(self) -> None:
        _synchronize(self._done)

    def __del__(self) -> None:
        # What is in flight may still write to memory of the stream that issued it, which is freed with the ticket.
        if not self._waited:
            self._owner.wait_event(self._done)
        self._spare.append(self._done)


class DeviceLane:
    """An accelerator: one side stream; order between it and the compute stream is by events only.

    Events are recorded again once nobody can wait for them any more, so that a step creates none.
    """

    device: torch.device
    _stream: torch.Stream
    _last: torch.Event | None  # behind what was issued last
    _spare: list[torch.Event]  # of tickets that are gone

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.device = device
        self._stream = torch.Stream(device=device, priority=priority)
        self._last, self._spare = None, []

    def issue(
        self,
        launch: Callable[[], Iterable[Work]],
        finish: Callable[[], None],
        *,
        allocate: Callable[[], None] | None = None,
        after: torch.Event | None = None,
    ) -> Ticket:
        """See :class:`Lane`. Nothing here blocks the host."""
        compute = torch.accelerator.current_stream(self.device)
        if after is None:
            if allocate is not None:
                allocate()
            _order(compute, self._stream)
        else:
            self._stream.wait_event(after)
        try:
            with self._stream:
                if after is not None and allocate is not None:
                    allocate()  # from this stream's own pool: its blocks were last used before the event
                for work in launch():
                    work.wait()
                finish()
        except BaseException:
            _order(self._stream, compute)  # what was begun uses memory that the caller is about to free
            self._last = self._stream.record_event()
            raise
        done = self._spare.pop() if self._spare else torch.Event(self.device)
        self._stream.record_event(done)
        self._last = None if _is_capturing(self.device) else done  # nobody can wait for an event within a graph
        return _DeviceTicket(done, compute, self._spare)

    def synchronize(self) -> None:
        """See :class:`Lane`."""
        if self._last is not None and not _is_capturing(self.device):
            _synchronize(self._last)


def _synchronize(event: torch.Event) -> None:
    """Block the host until ``event`` has come; not at all if it has."""
    if not event.query():
        event.synchronize()


_handover = threading.local()  # an event per thread and device: once a stream waits for it, it can be recorded again


def _order(first: torch.Stream, second: torch.Stream) -> None:
    """Have ``second`` wait for all that ``first`` was given so far."""
    events: dict[Any, torch.Event] = _handover.__dict__
    event = events.get(first.device)
    if event is None:
        event = events[first.device] = torch.Event(first.device)
    first.record_event(event)
    second.wait_event(event)


def current_stream(device: torch.device) -> torch.Stream | None:
    """The stream on which ``device`` is given work now, and from whose pool memory is; None for a CPU."""
    return None if device.type in ("cpu", "meta") else torch.accelerator.current_stream(device)


def wait_for_stream(device: torch.device) -> None:
    """Block the host until the current stream is done."""
    torch.accelerator.current_stream(device).synchronize()


def _hand_back(pool: torch.Stream | None) -> None:
    """Before memory of a stream's pool is freed: have that stream wait for the current one, which has used it."""
    if pool is not None and (current := torch.accelerator.current_stream(pool.device)) != pool:
        _order(current, pool)


def _is_capturing(device: torch.device) -> bool:
    """Whether what the current stream is given goes into a graph."""
    asked = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return asked is not None and bool(asked())


def run_on(stream: torch.Stream | None, function: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> None:
    """Call ``function(tensor)`` on ``stream``, between what the current stream did before and does next.

    None, or a tensor in CPU memory: on the current stream.
    """
    if stream is None or tensor.device.type == "cpu":
        function(tensor)
        return
    current = torch.accelerator.current_stream(tensor.device)
    _order(current, stream)
    try:
        with stream:
            function(tensor)
    finally:
        _order(stream, current)


def make_lane(device: torch.device, priority: int = 0) -> Lane:
    """The lane for ``device``; a negative ``priority`` is served first where the device knows priorities."""
    return HostLane() if device.type == "cpu" else DeviceLane(device, priority)
