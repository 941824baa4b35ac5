"""Run training steps of a sharded model without memory and without time, on a machine that is given in figures.

[Note: The dry run]
The engine itself runs: its hooks, its units, its streams and its collectives, on the meta device. Tensors have shapes
and no values. Each operation takes the time that a roofline gives it, on streams that keep time; each collective that
of a modelled network. So a plan has the schedule and the buffers of the runtime because it is the runtime, and a change
of the engine is a change of all plans.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.debug.tracing.recorder import Trace, own_groups
from fullshard.errors import FullshardError
from fullshard.memory import HostCommStream, simulated
from fullshard.planning.caching import reserved_bytes
from fullshard.planning.cluster import Cluster
from fullshard.planning.ledger import Change, Ledger, Peak
from fullshard.planning.operations import Costs, fused_kernels, tensors_in
from fullshard.planning.simulation.clocks import HostDevice, SkippingClock
from fullshard.planning.simulation.network import Network
from fullshard.planning.simulation.ranks import modelled_ranks
from fullshard.planning.simulation.streams import SimulatedDevice, SimulatedLane, simulated_streams
from fullshard.progress import PROGRESS, Event

__all__ = ["DryRun", "Step", "dry_run", "where"]

_KINDS = {
    "forward": "activations",
    "user code after the forward": "logits and loss",
    "backward": "gradients and workspace",
    "the end of backward": "gradients and workspace",
    "optimizer step": "optimizer state",
}
# What the process notes of its own training, and a dry run leaves as it was.
_OWN_PROGRESS = ["observers", "steps", "phase", "unit", "launched", "order", "raised", "caught", "waiting"]
_COMMUNICATION = ("all_gather", "reduce_scatter", "all_reduce", "pack_gradients")


@dataclass(frozen=True)
class _ClusterNetwork(Network):
    """A cluster's links, which depend on the ranks of a group."""

    cluster: Cluster | None = None

    def of(self, ranks: Sequence[int]) -> Network:
        """Return the link of a group of ranks in even distances."""
        assert self.cluster is not None
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        link = self.cluster.link(len(ranks), stride)
        inside = (len(ranks) - 1) * stride < self.cluster.node
        return Network(
            **dataclasses.asdict(link), like=self.like, fills=False, link_name="inner" if inside else "outer"
        )


@dataclass(frozen=True)
class Step:
    """Figures of the last step of a dry run.

    Attributes:
        seconds: From its begin until the device is through.
        flops: Of matrix multiplications and attention, on this rank.
        computation: Seconds of kernels on the compute stream.
        resting: Bytes between steps.
        reserved: Bytes that a caching allocator has reserved; on a CPU, those of tensors at the peak.
        peak: The moment with most memory.
        begun: When it began, by the trace's clock.
        held: Bytes at its begin, by what they are for.
        changes: Allocations and frees, with seconds since the begin of the step.
        trace: With segments and exposed communication of this rank.
        unknown: Operations without a rule, which were counted by the bytes that they read and write.
        autocast: Whether the model uses ``torch.autocast``, which does nothing on the meta device.
        kinds: Seconds of operations by their kind; ``"shortest kernels"`` are those that have next to nothing to do.
    """

    seconds: float
    flops: float
    computation: float
    resting: int
    reserved: int
    peak: Peak
    begun: float
    held: Mapping[str, int]
    changes: Sequence[tuple[float, Change]] = field(repr=False)
    trace: Trace = field(repr=False)
    unknown: Sequence[str]
    kinds: Mapping[str, float]
    autocast: bool

    def peaks(self) -> dict[str, int]:
        """Return the most bytes at a time in each phase of the step."""
        total, found = self.resting, {"": self.resting}
        for _, change in self.changes:
            total += change.nbytes
            phase = change.where[0]
            found[phase] = max(found.get(phase, 0), total)
        return found


class DryRun(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the time and the memory of operations, as they are dispatched.

    Args:
        cluster: The machine.
        device: Its streams, or its host.
    """

    cluster: Cluster
    costs: Costs
    ledger: Ledger
    events: list[tuple[Any, Event]]
    computation: float

    def __init__(self, cluster: Cluster, device: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cluster, self.costs, self._device = cluster, Costs(cluster), device
        self.ledger = Ledger(self.mark, self._kind, self._stream)
        self.events, self.computation = [], 0.0
        self._main = getattr(device, "current", None)
        self._operations: list[str] = []
        self._pending = self._issued = 0.0
        self.autocasts: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it dispatches operations on what this rank has of it, which are seen
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if any(isinstance(each, FakeTensor) for each in tensors_in(result)):
            return result  # DTensor asks for the shape of a whole
        new = [tensor for tensor in tensors_in(result) if tensor.is_meta and not self.ledger.knows(tensor)]
        if new:
            given = {other.untyped_storage()._cdata for other in tensors_in(args)}  # made before the run
            for tensor in new:
                if tensor.untyped_storage()._cdata not in given and not self.ledger.knows(tensor):
                    self.ledger.see(tensor)
        seconds = self.costs.seconds(func, args, kwargs, result)
        if seconds:
            self._pending += seconds
            clock = self._device.clock
            clock.wait_until(clock.now() + self.cluster.op_seconds)
            self._issued += self.cluster.op_seconds
        return result

    def flush(self) -> None:
        """Put what was dispatched onto the current stream, as one kernel: no shorter than the host took to issue it."""
        if self._pending:
            seconds, self._pending = max(self._pending, self._issued), 0.0
            self._issued = 0.0
            if getattr(self._device, "current", None) is self._main:
                self.computation += seconds
            self._device.compute(seconds)

    def mark(self) -> Any:
        """Mark the present: of the current stream, or of the host."""
        if isinstance(self._device, SimulatedDevice):
            return self._device.clock.now(), self._device.current.after, self._pending
        return self._device.clock.now() + self._pending

    def seconds(self, mark: Any) -> float:
        """Return the time of a mark."""
        if isinstance(self._device, SimulatedDevice):
            now, kernels, pending = mark
            return max([now, *self._device.ends_of(kernels)]) + pending  # type: ignore[no-any-return]
        return float(mark)

    def noted(self, event: Event, _: object) -> None:
        """Take an event of the engine."""
        self.flush()
        if event.kind == "begin":
            self._operations.append(event.what.partition(" ")[0])
        elif event.kind == "end" and self._operations:
            self._operations.pop()
        self.events.append((self.mark(), event))

    def _stream(self) -> int:
        return self._device.current.number if isinstance(self._device, SimulatedDevice) else 0

    def _kind(self) -> tuple[str, tuple[str, str]]:
        where = PROGRESS.phase, PROGRESS.unit or ""
        if self._operations and self._operations[-1] in _COMMUNICATION:
            return "communication buffers", where
        return _KINDS.get(PROGRESS.phase, "parameters"), where


@contextlib.contextmanager
def _on(cluster: Cluster, ranks: int) -> Iterator[DryRun]:
    """Be rank 0 of a cluster, without memory and time, as long as the block lasts."""
    if dist.is_initialized():
        raise FullshardError("plan: expected no process group, found one; plan before init_process_group, or elsewhere")
    clock = SkippingClock(lambda: 0.0)
    on_host = cluster.device == "cpu"
    device: Any = HostDevice(clock, cluster.contention) if on_host else SimulatedDevice(clock)
    network = _ClusterNetwork(1.0, like=cluster.backend, fills=False, cluster=cluster)
    run = DryRun(cluster, device)
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, sys, "excepthook", sys.excepthook)  # every new group adds a prefix to it
        stack.enter_context(mock.patch.dict(os.environ, {"FULLSHARD_WATCHDOG_S": "0"}))
        if not on_host:
            stack.enter_context(simulated_streams(device))
        stack.enter_context(simulated(HostCommStream if on_host else partial(SimulatedLane, device)))  # type: ignore[arg-type]
        stack.enter_context(modelled_ranks(ranks, network, device=device))
        stack.enter_context(run.ledger.resizes())
        stack.enter_context(fused_kernels(on_cpu=on_host))
        stack.enter_context(_noted_autocasts(run.autocasts))
        stack.enter_context(run)
        for name in _OWN_PROGRESS:
            value = getattr(PROGRESS, name)
            stack.callback(setattr, PROGRESS, name, copy.copy(value) if isinstance(value, list) else value)
        yield run


@contextlib.contextmanager
def _noted_autocasts(found: list[str]) -> Iterator[None]:
    """Note the devices of ``torch.autocast`` that is entered."""
    usual = torch.autocast.__enter__

    def enter(self: torch.autocast) -> Any:
        if getattr(self, "_enabled", True):
            found.append(self.device)
        return usual(self)  # type: ignore[no-untyped-call]

    with mock.patch.object(torch.autocast, "__enter__", enter):
        yield


@contextlib.contextmanager
def _collected() -> Iterator[None]:
    """Collect the garbage of the block at its end, but not older objects, which would take long in large programs."""
    thaws = not gc.get_freeze_count()
    if thaws:
        gc.freeze()
    try:
        yield
        gc.collect()
    finally:
        if thaws:
            gc.unfreeze()


def dry_run(
    build: Callable[[], tuple[nn.Module, torch.optim.Optimizer]],
    loss: Callable[[nn.Module], Tensor],
    *,
    cluster: Cluster,
    ranks: int,
    microbatches: int = 1,
    steps: int = 2,
    offload_optimizer: bool = False,
) -> Step:
    """Run steps of training without memory and time.

    Args:
        build: Returns a model on the meta device, sharded over a mesh of device type ``"meta"``, and its optimizer.
        loss: Runs the forward of a microbatch, and returns the loss.
        cluster: The machine.
        ranks: Size of the job.
        microbatches: Forwards and backwards of a step.
        steps: The last one counts: the first one has no order of units, and no optimizer state.
        offload_optimizer: Whether the optimizer's state is in CPU memory, as by ``fullshard.optim.offload``.

    Returns:
        What was found.

    Raises:
        FullshardError: If a process group exists, or the model needs values to run.
    """
    with _on(cluster, ranks) as run:
        with _collected():
            model, optimizer = build()
        # Only shards: a model that is built on the meta device is never on the device as a whole.
        sharded = [(number, nbytes, 0) for number, nbytes in run.ledger.alive()]
        built = len(run.ledger.changes)
        for _ in range(steps):
            run.flush()
            begun, flops, computed = run._device.synchronize(), run.costs.flops, run.computation
            kinds = dict(run.costs.kinds)
            first, run.events = len(run.ledger.changes), []
            PROGRESS.observers = [run.noted]
            PROGRESS.enter("user code", None)
            _train(model, optimizer, loss, microbatches)
            PROGRESS.enter("the end of the step", None)
            PROGRESS.observers = []
            ended = run._device.synchronize()
        trace = Trace()
        trace.add(0, [event._replace(time=run.seconds(mark)) for mark, event in run.events], own_groups())
        ledger, seconds = run.ledger, ended - begun
        if offload_optimizer:
            seconds += ledger.leave_out(_KINDS["optimizer step"]) / cluster.bus  # there and back at the same time
        changes = [(run.seconds(change.moment) - begun, change) for change in ledger.changes[first:]]
        peak = ledger.peak(first)
        storages = [*sharded, *((each.storage, each.nbytes, each.stream) for each in ledger.changes[built:])]
        return Step(
            seconds, run.costs.flops - flops, run.computation - computed,
            sum(change.nbytes for change in ledger.changes[:first]),
            peak.nbytes if cluster.device == "cpu" else reserved_bytes(storages),
            peak, begun, ledger.held(first), changes, trace, sorted(run.costs.unknown),
            {kind: taken - kinds.get(kind, 0.0) for kind, taken in run.costs.kinds.items()},
            bool(run.autocasts),
        )  # fmt: skip


def where(error: BaseException) -> str:
    """Return file and line in which an exception was raised, outside of torch and of this library if there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    own = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))
    users = [frame for frame in frames if not frame.filename.startswith(own)] or frames
    return f"{users[-1].filename}:{users[-1].lineno}"


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[nn.Module], Tensor], microbatches: int
) -> None:
    try:
        for _ in range(microbatches):
            loss(model).backward()  # type: ignore[no-untyped-call]
    except (RuntimeError, NotImplementedError) as error:
        if "meta" not in str(error).lower():
            raise
        raise FullshardError(
            f"plan: the model needs values to run, at {where(error)}: {error}. Expected a forward and a loss whose "
            "branches and shapes do not depend on the values of tensors"
        ) from error
    optimizer.step()
    optimizer.zero_grad()
