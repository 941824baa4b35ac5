"""Storage that is freed and refilled in place, streams and events. The only file that touches them.

[Note: Memory of unsharded buffers]
A buffer is allocated on the *compute* stream, and the communication stream that fills it first waits for an event
recorded on the compute stream after that allocation. The caching allocator therefore reuses the block in the order of
the compute stream, whose kernels are the ones that read it, and ``record_stream`` is not needed: peak memory does not
depend on timing. In return an all-gather cannot overlap with kernels enqueued before the allocation, which is why it
is issued one unit early (see [Note: Order and prefetch]).

There are two exceptions. After ``set_post_optim_event`` the first all-gathers of a step do not wait for the compute
stream, so their memory is of the communication stream's pool. And a user may run a unit on another stream. So a buffer
remembers the stream on which its memory was allocated. Before it is freed on another stream, the allocation stream
waits for that one: only then may the next allocation of the pool reuse the block.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from fullshard.progress import PROGRESS

__all__ = [
    "Buffer",
    "CommStream",
    "DeviceClock",
    "DeviceCommStream",
    "Event",
    "HostClock",
    "HostCommStream",
    "HostWork",
    "PendingWork",
    "Stream",
    "Work",
    "alias",
    "allows_cpu_gradients",
    "communicates",
    "current_stream",
    "empty",
    "free_storage",
    "host_buffer",
    "input_on",
    "is_freed_in_place",
    "make_comm_stream",
    "mark_freed_in_place",
    "on_storage",
    "own_storage",
    "poison",
    "refill_storage",
    "run_on",
    "simulated",
    "stream_waiter",
    "to_host",
    "traced_wait",
    "uses_accelerator",
    "wait_for_all",
]


Event = torch.Event
Stream = torch.Stream

_POISON = 0xFF  # in every byte: NaN in all floating-point formats but float8_*fnuz, else a large or negative number
_poisoned = os.environ.get("FULLSHARD_POISON", "0") != "0"


def poison(enabled: bool) -> None:
    """Fill memory with NaN when it is freed and before it is filled, to expose reads at that time. For tests.

    It applies to unsharded buffers, communication buffers and reduced gradients. The environment variable
    ``FULLSHARD_POISON=1`` does the same from the start. Freed storages have no pages at all: a read through a tensor on
    the storage faults; a read through another alias of the memory, or before a collective has filled it, returns NaN.
    """
    global _poisoned
    _poisoned = enabled


def _fill_with_poison(storage: torch.UntypedStorage) -> None:
    if storage.nbytes() and storage.device.type != "meta":
        torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).fill_(_POISON)


def empty(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate a flat tensor, contents undefined."""
    made = torch.empty(numel, dtype=dtype, device=device)
    if _poisoned:
        _fill_with_poison(made.untyped_storage())
    return made


class Work(Protocol):
    """A collective in flight, as transports return it (a c10d ``Work`` is one)."""

    def wait(self) -> object:
        """Block the host (CPU) or the current stream (accelerators) until done; raise if it failed."""


class Buffer:
    """A flat buffer whose memory is freed and refilled while the tensors on it stay the same objects.

    Args:
        numel: Size in elements.
        dtype: Element type.
        device: Device of the memory.

    Tensors made by ``tensor`` before the memory is freed are valid again after the next ``allocate``: they
    share a storage, which is resized, so tensors that autograd saved see the new contents as well.
    """

    numel: int
    dtype: torch.dtype
    device: torch.device
    _flat: torch.Tensor  # all of it
    _storage: torch.UntypedStorage  # of that; 0 bytes at rest
    _nbytes: int
    _pool: torch.Stream | None  # on which the memory was allocated

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.numel, self.dtype, self.device = numel, dtype, device
        self._pool = current_stream(device)
        self._flat = torch.empty(numel, dtype=dtype, device=device)
        self._storage = self._flat.untyped_storage()
        mark_freed_in_place(self._storage)
        self._nbytes = self._storage.nbytes()
        if PROGRESS.observers:
            PROGRESS.note("memory", str(self._nbytes))

    def allocate(self) -> None:
        """Allocate the memory (contents undefined); no-op if it is allocated."""
        if self._storage.nbytes() != self._nbytes:
            if self._pool is not None:
                self._pool = current_stream(self.device)
            refill_storage(self._storage, self._nbytes)
            if PROGRESS.observers:
                PROGRESS.note("memory", str(self._nbytes))

    def free(self) -> None:
        """Free the memory."""
        if PROGRESS.observers and self._storage.nbytes():
            PROGRESS.note("memory", str(-self._nbytes))
        free_storage(self._storage, self._pool)

    @property
    def allocated_bytes(self) -> int:
        """Bytes allocated now: all or 0."""
        return self._storage.nbytes()

    @property
    def references(self) -> int:
        """Number of tensors, and storage objects, that refer to the memory."""
        return int(torch._C._storage_Use_Count(self._storage._cdata))

    def tensor(self, offset: int, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
        """Make a tensor on this buffer, which must be allocated; ``offset`` in elements; see [Note: Alias tensors]."""
        return alias(self._flat, offset, shape, stride)


def alias(tensor: torch.Tensor, offset: int, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """Make a tensor on the storage of ``tensor`` with a separate version counter; ``offset`` in elements.

    [Note: Alias tensors]
    Collectives write through such aliases. A view would share the parameter's version counter, which gloo increments
    from its own thread when it writes an output; autograd would then reject tensors saved in forward.
    """
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(tensor.untyped_storage(), tensor.storage_offset() + offset, shape, stride)


def on_storage(
    tensor: torch.Tensor, dtype: torch.dtype, begin: int, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """Make a tensor of ``dtype`` on the storage of ``tensor``; ``begin`` in bytes of it, see [Note: Alias tensors]."""
    made = torch.empty(0, dtype=dtype, device=tensor.device)
    with torch.inference_mode(False), torch.no_grad():
        return made.set_(tensor.untyped_storage(), begin // dtype.itemsize, tuple(shape), tuple(stride))


def own_storage(view: torch.Tensor) -> torch.Tensor:
    """Make a tensor on the memory of ``view``, part of a larger storage, whose storage begins and ends with it.

    For the local tensors of DTensors: a wrapper subclass copies the storage offset of its local tensor, and where that
    is not 0, copy.deepcopy and torch.save treat the wrapper as a tensor with memory. A saved shard is also as large as
    the shard instead of the whole buffer. The larger storage lives as long as the result.
    """
    if view.device.type == "meta" or not view.numel():
        own = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device=view.device)
        if _make_simulated is not None:
            own.untyped_storage().resize_(0)  # which is counted: elsewhere it is a part of the larger storage
        return own
    # As a capsule: Tensor.__dlpack_device__ supports only accelerators in torch's own tree.
    try:
        own = from_dlpack(to_dlpack(view))
    except (BufferError, RuntimeError, TypeError):  # a dtype that DLPack does not support
        if not view.is_contiguous():
            return view
        own = from_dlpack(to_dlpack(view.view(-1).view(torch.uint8))).view(view.dtype)
    if own.stride() == view.stride():
        return own
    return own.as_strided(view.shape, view.stride(), 0)  # DLPack drops strides of dims of size 1


def mark_freed_in_place(storage: torch.UntypedStorage) -> None:
    """Note that ``free_storage`` may free the memory of a storage while tensors on it exist."""
    storage._freed_in_place = True  # type: ignore[attr-defined]  # torch keeps the object as long as the storage


def is_freed_in_place(storage: torch.UntypedStorage) -> bool:
    """True if ``free_storage`` may free the memory of a storage while tensors on it exist, as of unsharded buffers."""
    return getattr(storage, "_freed_in_place", False)


def free_storage(storage: torch.UntypedStorage, pool: torch.Stream | None) -> None:
    """Free the memory of a storage, for ``refill_storage`` to allocate again.

    Args:
        storage: Is resized to 0 bytes.
        pool: The stream that was current when the memory was allocated; it waits for the current one, which has used
            the memory.
    """
    if _poisoned:
        _fill_with_poison(storage)
    if pool is not None and storage.nbytes() and (current := torch.accelerator.current_stream(pool.device)) != pool:
        _order(current, pool)
    storage.resize_(0)


def refill_storage(storage: torch.UntypedStorage, nbytes: int) -> None:
    """Allocate the memory that ``free_storage`` freed (contents undefined); no-op if it is allocated."""
    if storage.nbytes() != nbytes:
        storage.resize_(nbytes)
        if _poisoned:
            _fill_with_poison(storage)


def host_buffer(numel: int, dtype: torch.dtype, *, pin: bool) -> torch.Tensor:
    """Allocate a flat CPU tensor, contents undefined; pinned if ``pin`` and there is an accelerator."""
    pinned = pin and torch.accelerator.is_available()
    return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=pinned)


def allows_cpu_gradients(device: torch.device) -> bool:
    """True if torch allows a CPU gradient of a parameter on ``device``: with accelerators in torch's own tree."""
    own, host = torch.empty(0, device=device), torch.empty(0, device="cpu")
    return bool(torch._has_compatible_shallow_copy_type(own, host))


def to_host(tensor: torch.Tensor, *, pin: bool) -> torch.Tensor:
    """Copy ``tensor``, of any subclass, to CPU memory; pinned if ``pin`` and there is an accelerator."""
    host = tensor.cpu()
    return host.pin_memory() if pin and torch.accelerator.is_available() else host


def input_on(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """Copy an input to ``device``; the caller may overwrite ``tensor`` as soon as this returns.

    For dense tensors the host is blocked only by copies from memory that is not pinned. Such memory is read before an
    asynchronous copy returns; pinned memory is read later, so it is copied to another pinned tensor first. Not in a
    captured graph, whose replays read the caller's tensor again: it must not be overwritten until they have.
    """
    if tensor.device == device:
        return tensor
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return tensor.to(device)
    if tensor.device.type == "cpu" and tensor.is_pinned() and not _is_capturing(device):
        tensor = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    return tensor.to(device, non_blocking=True)


class PendingWork(Protocol):
    """Work issued on a communication stream."""

    def wait(self) -> None:
        """Make the compute stream (on CPU: the host) wait for the work. May be called several times."""

    def synchronize(self) -> None:
        """Block the host until the work is done."""


def wait_for_all(works: Iterable[Work]) -> None:
    """Wait for every work, also after one has failed: they write to memory that is reused. Raises the first error."""
    first: BaseException | None = None
    for work in works:
        try:
            work.wait()
        except BaseException as error:  # also of a signal handler
            first = first or error
    if first is not None:
        raise first


class HostWork:
    """Works that the host waits for, and what it does once they are done.

    Several may wait for it: the works, of which gloo's must not be asked twice, are waited for once, and if one of them
    failed, every ``wait`` raises its error.
    """

    __slots__ = ("_error", "_finish", "_works")

    def __init__(self, works: Iterable[Work], finish: Callable[[], None]) -> None:
        self._works = list(works)
        self._finish: Callable[[], None] | None = finish
        self._error: Exception | None = None

    def wait(self) -> None:
        """Wait for the works and finish, unless that was done."""
        if self._error is not None:
            raise self._error
        (works, self._works), (finish, self._finish) = (self._works, []), (self._finish, None)
        try:
            wait_for_all(works)
            if finish is not None:
                finish()
        except BaseException as error:
            interrupted = RuntimeError(f"the wait for this collective was interrupted by {type(error).__name__}")
            self._error = error if isinstance(error, Exception) else interrupted
            raise


class _HostLaunch(HostWork):
    __slots__ = ("_launched",)

    def __init__(self, works: Iterable[Work], finish: Callable[[], None]) -> None:
        super().__init__(works, finish)
        self._launched = PROGRESS.launched

    def wait(self) -> None:
        if not self._works:  # waited for before
            super().wait()
            return
        PROGRESS.begin_wait(self._launched)
        try:
            super().wait()
        except RuntimeError as error:
            self._error = PROGRESS.explained(error)
            if self._error is error:
                raise
            raise self._error from error
        finally:
            PROGRESS.end_wait()

    synchronize = wait

    def __del__(self) -> None:
        # If the model is deleted with an all-gather in flight, its messages must not reach the group's next users.
        if self._works:
            with contextlib.suppress(RuntimeError):
                wait_for_all(self._works)


class HostCommStream:
    """Collectives on CPU: the backend's threads communicate; the host waits and runs ``finish``."""

    def issue(
        self,
        launch: Callable[[], Iterable[Work]],
        finish: Callable[[], None],
        *,
        allocate: Callable[[], None] | None = None,
        after: torch.Event | None = None,
    ) -> PendingWork:
        """Run ``launch`` now; waiting for the pending work waits for its works and runs ``finish``.

        The arguments are those of ``DeviceCommStream.issue``.
        """
        if after is not None:
            after.synchronize()
        if allocate is not None:
            allocate()
        try:
            return _HostLaunch(launch(), finish)
        except RuntimeError as error:
            explained = PROGRESS.explained(error)
            if explained is error:
                raise
            raise explained from error

    def synchronize(self) -> None:
        """Do nothing: only collectives read host memory, and their pending work waits for them."""


class _DeviceWork:
    __slots__ = ("_done", "_launched", "_owner", "_spare", "_waited")

    def __init__(
        self, done: torch.Event, owner: torch.Stream, spare: list[torch.Event], launched: tuple[int, int]
    ) -> None:
        self._done, self._owner, self._spare, self._waited = done, owner, spare, False
        self._launched = launched

    def wait(self) -> None:
        with traced_wait(self._launched):
            current = torch.accelerator.current_stream(self._done.device)
            current.wait_event(self._done)
        self._waited |= current == self._owner

    def synchronize(self) -> None:
        _synchronize(self._done)

    def __del__(self) -> None:
        # Work in flight may still write to memory of the stream that issued it, which is freed with this object.
        if not self._waited:
            self._owner.wait_event(self._done)
        self._spare.append(self._done)


@contextlib.contextmanager
def _in_trace(launched: tuple[int, int]) -> Iterator[None]:
    PROGRESS.note("wait", PROGRESS.unit or "", *launched)
    try:
        yield
    finally:
        PROGRESS.note("waited", PROGRESS.unit or "", *launched)


def traced_wait(launched: tuple[int, int]) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the current stream waits, which a trace records if one runs.

    Args:
        launched: Group and number of the last launch that it waits for; -1 for copies.
    """
    return _in_trace(launched) if PROGRESS.observers else _NOTHING


_NOTHING = contextlib.nullcontext()


class DeviceCommStream:
    """Collectives on an accelerator: one side stream, ordered with the compute stream by events only.

    Events are reused once their pending work is gone, so that a step creates none.
    """

    device: torch.device
    captures: bool  # the last work was captured into a graph
    _stream: torch.Stream
    _last: torch.Event | None  # after the last issued work
    _spare: list[torch.Event]  # of pending work that is gone

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.device, self.captures = device, False
        self._stream = torch.Stream(device=device, priority=priority)
        self._last, self._spare = None, []
        _device_streams.add(self)

    def issue(
        self,
        launch: Callable[[], Iterable[Work]],
        finish: Callable[[], None],
        *,
        allocate: Callable[[], None] | None = None,
        after: torch.Event | None = None,
    ) -> PendingWork:
        """Run ``launch`` after all computation enqueued so far, and ``finish`` once its works are done.

        Both run on the side stream, without blocking the host.

        Args:
            launch: Starts collectives and returns their works.
            finish: Uses the results.
            allocate: Allocates the memory of the results, see [Note: Memory of unsharded buffers].
            after: Event to wait for instead of all computation; earlier uses of the memory must be ordered before it.
        """
        compute = torch.accelerator.current_stream(self.device)
        if after is None:
            if allocate is not None:
                allocate()
            _order(compute, self._stream)
        else:
            self._stream.wait_event(after)
        before = PROGRESS.launched
        try:
            with self._stream:
                if after is not None and allocate is not None:
                    allocate()  # from this stream's own pool: its blocks were last used before the event
                for work in launch():
                    work.wait()
                launched = PROGRESS.arrived(before)
                finish()
        except BaseException:
            _order(self._stream, compute)  # launched work uses memory that the caller is about to free
            self._last = self._stream.record_event()
            raise
        done = self._spare.pop() if self._spare else torch.Event(self.device)
        self._stream.record_event(done)
        self.captures = _is_capturing(self.device)
        self._last = None if self.captures else done  # the host cannot wait for an event within a graph
        return _DeviceWork(done, compute, self._spare, launched)

    def synchronize(self) -> None:
        """Block the host until the last issued work is done."""
        if self._last is not None and not _is_capturing(self.device):
            _synchronize(self._last)


_device_streams: weakref.WeakSet[DeviceCommStream] = weakref.WeakSet()


def uses_accelerator() -> bool:
    """True if there are communication streams on an accelerator."""
    return len(_device_streams) > 0


def communicates() -> bool:
    """True if work on a communication stream of an accelerator is not finished.

    False while a graph is captured, which must not be disturbed by questions from other threads.
    """
    streams = list(_device_streams)
    if any(stream.captures for stream in streams):
        return False
    try:
        return any((event := stream._last) is not None and not event.query() for stream in streams)
    except RuntimeError:  # an error of the device, which the training thread gets, too
        return False


def _synchronize(event: torch.Event) -> None:
    """Block the host until ``event`` is complete, without a device call if it is."""
    if not event.query():
        event.synchronize()


_order_events = threading.local()  # one per thread and device: once a stream waits for it, it can be recorded again


def _order(first: torch.Stream, second: torch.Stream) -> None:
    """Make ``second`` wait for all work enqueued on ``first`` so far."""
    events: dict[Any, torch.Event] = _order_events.__dict__
    event = events.get(first.device)
    if event is None:
        event = events[first.device] = torch.Event(first.device)
    first.record_event(event)
    second.wait_event(event)


def current_stream(device: torch.device) -> torch.Stream | None:
    """Return the current stream of ``device``, from whose pool memory is allocated; None for a CPU."""
    return None if device.type in ("cpu", "meta") else torch.accelerator.current_stream(device)


class HostClock:
    """The clock of the host."""

    mark = staticmethod(time.time)

    def seconds(self, mark: float) -> float:
        """Return the time of a mark in seconds since 1970."""
        return mark


class DeviceClock:
    """The times at which the current streams of an accelerator reach marks, without waits of the host.

    It waits for the device as it is made, and in ``seconds``.
    """

    _first: torch.Event
    _since: float  # 1970, when the device got to the first mark

    def __init__(self) -> None:
        torch.accelerator.synchronize()
        self._first = self._event()
        self._first.synchronize()
        self._since = time.time()

    @staticmethod
    def _event() -> torch.Event:
        stream = torch.accelerator.current_stream()
        return stream.record_event(torch.Event(stream.device, enable_timing=True))

    def mark(self) -> torch.Event | None:
        """Mark the end of what is on the current stream now. None while a graph is captured, which would keep it."""
        return None if _is_capturing(torch.accelerator.current_stream().device) else self._event()

    def seconds(self, mark: torch.Event) -> float:
        """Return the time at which its stream got to a mark, in seconds since 1970."""
        _synchronize(mark)
        return self._since + self._first.elapsed_time(mark) / 1e3


def stream_waiter(device: torch.device) -> Callable[[], None]:
    """Return a function that blocks the host until what is on the current stream of ``device`` now is done."""
    event = torch.accelerator.current_stream(device).record_event()
    return lambda: _synchronize(event)


def _is_capturing(device: torch.device) -> bool:
    """True if the current stream is captured into a graph."""
    query = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return query is not None and bool(query())


def run_on(stream: torch.Stream | None, function: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> None:
    """Call ``function(tensor)`` on ``stream``, ordered after and before the work of the current stream.

    With None, or a CPU tensor: on the current stream.
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


CommStream = HostCommStream | DeviceCommStream

_make_simulated: Callable[[], CommStream] | None = None  # communication streams for the meta device


def make_comm_stream(device: torch.device, priority: int = 0) -> CommStream:
    """Make a communication stream; a negative ``priority`` runs first on devices with stream priorities."""
    if device.type == "meta" and _make_simulated is not None:
        return _make_simulated()
    return HostCommStream() if device.type in ("cpu", "meta") else DeviceCommStream(device, priority)


@contextlib.contextmanager
def simulated(make: Callable[[], CommStream]) -> Iterator[None]:
    """Have the engine run on the meta device, without values, with communication streams that ``make`` returns."""
    global _make_simulated
    before, _make_simulated = _make_simulated, make
    try:
        yield
    finally:
        _make_simulated = before
