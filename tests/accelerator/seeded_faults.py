"""Faults to be found by the race checker: what would be easy to get wrong in the code for accelerators, one at a time.

Each fault is a patch and the scenario that is run with it. ``EQUIVALENT`` has changes that look like faults and are
none, each with the reason.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard
import fullshard.optim
from fullshard import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, memory
from fullshard.activation_checkpoint import offload_activations
from fullshard.activation_offload import Activation, ActivationOffload
from fullshard.checkpoint.state import snapshot
from fullshard.comm import NcclTransport
from fullshard.comm import collective as collectives
from fullshard.engine import runtime as runtime
from fullshard.engine.buckets.base import Bucket
from fullshard.engine.reduction import grad_reduction as reduction
from fullshard.engine.reduction import queue as reductions
from fullshard.memory import DeviceCommStream, Work
from fullshard.optim.offload import _Part
from ranks import Rank

DIM = 32
Patch = pytest.MonkeyPatch
Values = list[torch.Tensor]


# ---------------------------------------------------------------- scenarios: what is run, and which values come of it


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.Tanh(), nn.Linear(2 * DIM, DIM)) for _ in range(3)]
    )


def _sharded(rank: Rank, mesh: tuple[int, ...] | None = None, **options: Any) -> nn.Module:
    model = _model()
    over = rank.mesh if mesh is None else rank.make_mesh(*mesh, names=("replicate", "shard"))
    for block in model:
        fully_shard(block, mesh=over, **options)
    return fully_shard(model, mesh=over, **options)


def _values(model: nn.Module) -> Values:
    return [p.detach().full_tensor().cpu() for p in model.parameters()]  # type: ignore[operator]


def _train(model: nn.Module, rank: Rank, steps: int = 2) -> Values:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(1 + rank.rank)
    for _ in range(steps):
        model(torch.randn(4, DIM)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return _values(model)


def training(rank: Rank) -> Values:
    """Two steps."""
    return _train(_sharded(rank), rank)


def mixed(rank: Rank) -> Values:
    """Two steps in bf16, reduced in fp16, which is scaled beside the collective."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float16)
    return _train(_sharded(rank, mp_policy=policy), rank)


def scaled(rank: Rank) -> Values:
    """Two steps in fp64, whose sums are divided by a number that is not that of ranks."""
    model = _sharded(rank, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64))
    for module in model.modules():
        if isinstance(module, fullshard.FSDPModule):
            module.set_gradient_divide_factor(3.0)
    return _train(model, rank)


def replicas(rank: Rank) -> Values:
    """Two steps with two replicas."""
    return _train(_sharded(rank, (rank.world_size // 2, 2)), rank)


def offloaded(rank: Rank) -> Values:
    """Two steps with shards in CPU memory."""
    return _train(_sharded(rank, offload_policy=CPUOffloadPolicy()), rank)


def activations(rank: Rank) -> Values:
    """Two steps with activations in CPU memory."""
    model = _sharded(rank)
    offload_activations(model, min_bytes=1)
    return _train(model, rank)


def state_offloaded(rank: Rank) -> Values:
    """Three steps with optimizer state in CPU memory, in parts of one unit, which is read after them."""
    model = _sharded(rank)
    optimizer = fullshard.optim.offload(torch.optim.AdamW(model.parameters(), lr=0.01))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[_Part.__module__], "PART_BYTES", 1)
        for _ in range(3):
            model(torch.ones(4, DIM)).square().mean().backward()
            optimizer.step()
    state = [entry.to_local() for own in optimizer.state.values() for entry in own.values() if entry.dim()]
    return [*(each.clone() for each in state), *_values(model)]


def written_after_evaluation(rank: Rank) -> Values:
    """A forward of an offloaded model, after which the user writes to the shards."""
    model = _sharded(rank, offload_policy=CPUOffloadPolicy())
    shards = [p.to_local() for p in model.parameters()]  # type: ignore[operator]
    with torch.no_grad():
        output = model(torch.ones(4, DIM))
        for shard in shards:
            shard.fill_(0.25)
    return [output.cpu(), *_values(model)]


def hooked(rank: Rank) -> Values:
    """Two steps with an all-reduce hook on a stream of its own."""
    model = _sharded(rank)
    stream = torch.Stream(rank.device)
    for module in model.modules():
        if isinstance(module, fullshard.FSDPModule):
            module.set_all_reduce_hook(lambda rows: rows.mul_(0.5), stream=stream)
    return _train(model, rank)


def refilled_input(rank: Rank) -> Values:
    """Forwards on a batch in pinned memory that is refilled at once."""
    model, batch, outputs = _sharded(rank), torch.empty(4, DIM, pin_memory=True, device="cpu"), []
    for step in range(3):
        batch.fill_(float(step))
        outputs.append(model(batch).detach())
    return [output.cpu() for output in outputs]


def _others() -> Values:
    """Tensors of many sizes that are all there at the same time, so that whatever was freed is used again.

    One tensor alone may take memory that an earlier test has freed, and which free blocks are neighbors, and so make
    one of another size, depends on their addresses.
    """
    gc.collect()  # a model may be in a cycle, such as that of an exception before
    others = [torch.full((numel,), float(n)) for n in range(40) for numel in (2 * DIM * DIM, DIM * DIM, 256, 64, 16)]
    return [other.cpu() for other in others]


def dropped(rank: Rank) -> Values:
    """A model that is deleted while its last reductions are under way; others take its memory."""
    model = _sharded(rank)
    model.set_manual_backward_finalization(True)  # type: ignore[operator]
    model(torch.ones(4, DIM)).square().mean().backward()
    del model
    return _others()


def unshard_dropped(rank: Rank) -> Values:
    """A model that is deleted while it is being unsharded; others take its memory."""
    model = _sharded(rank)
    handle = model[1].unshard(async_op=True)  # type: ignore[index,operator]
    del handle, model
    return _others()


def resharded(rank: Rank) -> Values:
    """A unit that is resharded while it is being unsharded; others take its memory."""
    model = _sharded(rank)
    model[1].unshard(async_op=True)  # type: ignore[index,operator]
    model[1].reshard()  # type: ignore[index,operator]
    return _others()


def failing_launch(rank: Rank) -> Values:
    """A forward whose all-gather raises when half of it is issued, and one that goes well."""
    model = _sharded(rank)
    with pytest.MonkeyPatch.context() as patch:
        issue, calls = collectives.CollectiveTransport._issue_gather, []

        def failing(self: Any, operand: Any) -> Work:
            calls.append(operand)
            if len(calls) == 3:
                raise RuntimeError("no more")
            return issue(self, operand)

        patch.setattr(collectives.CollectiveTransport, "_issue_gather", failing)
        with contextlib.suppress(RuntimeError):
            model(torch.ones(4, DIM))
    taken = [torch.full((2 * DIM, DIM), 1.0) for _ in range(10)]
    return [model(torch.ones(4, DIM)).detach().cpu(), *(each.cpu() for each in taken)]


def failing_forward(rank: Rank) -> Values:
    """A forward of the root that raises ahead of its first unit, a step, and a forward of a unit alone."""
    model = _sharded(rank)
    model(torch.ones(4, DIM))
    event = torch.accelerator.current_stream().record_event()
    model.set_post_optim_event(event)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime.Runtime, "unshard", _raising)
        with contextlib.suppress(RuntimeError):
            model(torch.ones(4, DIM))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    return [model[0](torch.ones(4, DIM)).detach().cpu()]  # type: ignore[index]


def saved(rank: Rank) -> Values:
    """A checkpoint written from copies in pinned memory."""
    model = _sharded(rank)
    where = [tempfile.mkdtemp()]
    dist.broadcast_object_list(where, 0)
    fullshard.async_save(f"{where[0]}/step", model).result()
    loaded = _sharded(rank)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.zero_()
    fullshard.load(f"{where[0]}/step", loaded)
    return _values(loaded)


def _raising(*_: Any) -> Any:
    raise RuntimeError("raised on purpose")


# ---------------------------------------------------------------- faults


@dataclass(frozen=True)
class Fault:
    """A change of the code, and what it is run in.

    Attributes:
        seed: Makes the change.
        scenario: What is run with it.
        world: On how many ranks.
        reason: Why nothing can be found, for changes that are equivalent.
    """

    seed: Callable[[Patch], None]
    scenario: Callable[[Rank], Values] = training
    world: int = 2
    reason: str = ""


def comm_stream(
    *,
    order_before: bool = True,
    allocate_on_lane: bool = False,
    order_first: bool = False,
    wait_works: bool = True,
    finish_on_lane: bool = True,
    done: str = "last",
    order_on_failure: bool = True,
) -> Callable[[Patch], None]:
    """Replace ``DeviceCommStream.issue`` by a copy that differs in what is given."""

    def issue(
        self: DeviceCommStream,
        launch: Callable[[], Iterable[Work]],
        finish: Callable[[], None],
        *,
        allocate: Callable[[], None] | None = None,
        after: torch.Event | None = None,
    ) -> Any:
        compute = torch.accelerator.current_stream(self.device)
        if order_first:
            memory._order(compute, self._stream)
        if allocate is not None and not allocate_on_lane:
            allocate()
        if order_before and not order_first:
            memory._order(compute, self._stream)
        event = torch.Event(self.device)
        try:
            with self._stream:
                if allocate is not None and allocate_on_lane:
                    allocate()
                works = list(launch())
                for work in works if wait_works else ():
                    work.wait()
                if done == "first":
                    self._stream.record_event(event)
                if finish_on_lane:
                    finish()
            if not finish_on_lane:
                finish()
        except BaseException:
            if order_on_failure:
                memory._order(self._stream, compute)
            raise
        if done == "last":
            self._stream.record_event(event)
        elif done == "compute":
            compute.record_event(event)
        self._last = event
        return memory._DeviceWork(event, compute, [], (-1, -1))

    return lambda patch: patch.setattr(DeviceCommStream, "issue", issue)


def replace(owner: Any, name: str, value: Any) -> Callable[[Patch], None]:
    """Replace an attribute."""
    return lambda patch: patch.setattr(owner, name, value)


def asynchronous(seed: Callable[[Patch], None]) -> Callable[[Patch], None]:
    """Make a change where collectives run on a stream of the back end, as other back ends than NCCL do."""

    def both(patch: Patch) -> None:
        patch.setattr(NcclTransport, "asynchronous", True)
        seed(patch)

    return both


# The usual methods, which faults call.
_end_reduce_scatter = reduction.GradReduction.end_reduce_scatter
_release = reduction.GradReduction.release
_enter = runtime.Runtime._enter_forward
_finish_copies = ActivationOffload.finish_copies
_on_device = Activation.on_device
_finish = _Part.finish
_finalize = reduction.GradReduction.finalize
_Event = torch.Event


def _wait_elsewhere(self: Any) -> None:
    self._owner.device  # noqa: B018 - the stream that has to wait is left alone
    _elsewhere(self._owner.device).wait_event(self._done)
    self._waited = True


@functools.cache
def _elsewhere(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


def _free_before_wait(self: Any) -> bool:
    self._free_inputs()
    self.reduce_scattered = False
    return _end_reduce_scatter(self)


def _no_wait_between_stages(self: Any) -> bool:
    pending_work, self._pending_work = self._pending_work, _Ticket()
    try:
        return _end_reduce_scatter(self)
    finally:
        self._pending_work = pending_work


def _no_wait_at_the_end(self: Any) -> None:
    self._pending_work, before = _Ticket(), self._pending_work
    before._waited = True
    _release(self)


class _Ticket:
    """Of something that is taken to have arrived: nobody waits."""

    def wait(self) -> None: ...

    synchronize = wait


def _arrive_before_wait(self: Bucket) -> None:
    if self._pending_work is not None:
        pending_work, self._pending_work = self._pending_work, None
        for all_gather in self._in_flight:
            all_gather.arrived()
        self._in_flight = []
        pending_work.wait()


def _reshard_in_flight(self: Bucket) -> None:
    if self.is_unsharded:
        if self._pending_work is not None:
            self._pending_work._waited = True  # type: ignore[attr-defined]
            self._pending_work = None
        self.is_unsharded = False
        self._free()


def _pack_on_lane(pending: Any, comm_stream: Any) -> None:
    launch_reductions = reduction.launch_all

    def launch() -> Any:
        for _, each in pending:
            each.pack()
        return launch_reductions(
            ((each.transport, each.request(name)) for name, each in pending), reduction.Transport.reduce_scatter
        )

    def finish() -> None:
        for _, each in pending:
            each.finalize()

    reduction._issued(pending, comm_stream.issue(launch, finish))


def _together_that_drops(self: Any, group: Any, operands: Any, issue: Any) -> Any:
    device = operands[0].shard.device
    group._start_coalescing(device)
    try:
        for operand in operands:
            issue(operand)
    finally:
        work = group._end_coalescing(device)
    return [work]


def _hook_without(before: bool, after: bool) -> Callable[..., None]:
    def run_on(stream: torch.Stream | None, function: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> None:
        if stream is None:
            function(tensor)
            return
        current = torch.accelerator.current_stream(tensor.device)
        if not before:
            memory._order(current, stream)
        with stream:
            function(tensor)
        if not after:
            memory._order(stream, current)

    return run_on


def _enter_with_a_stale_event(self: runtime.Runtime, entered: Any) -> None:
    stale = self._unshard_after
    _enter(self, entered)
    if self._unshard_after is None:
        self._unshard_after = stale


def _input_as_it_is(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(device, non_blocking=True)


class _FinishedTooEarly(memory.HostWork):
    def wait(self) -> None:
        finish, self._finish = self._finish, None
        finish()
        super().wait()


def _never_waited(work: Any) -> None:
    if work is not None:  # else it would be waited for as it is dropped
        work._waited = True


def _left_without_waiting(self: ActivationOffload) -> None:
    _never_waited(self._copies)
    self._copies = None
    _finish_copies(self)


def _used_without_waiting(self: Activation) -> torch.Tensor:
    if self.device is None:
        self.offload.fetch(self.forward)
    _never_waited(self.returning)
    self.returning = None
    return _on_device(self)


def _state_used_without_waiting(self: _Part) -> None:
    if not self.leaving:
        _never_waited(self.work)
        self.work = None
    _finish(self)


def _leaving_dropped(self: Any) -> None:
    _finalize(self)
    self._leaving = []


def _shared_event(patch: Patch) -> None:
    shared: list[torch.Event] = []

    def event(device: torch.device) -> torch.Event:
        if not shared:
            shared.append(_Event(device))
        return shared[0]

    patch.setattr(memory.torch, "Event", event)


FAULTS: dict[str, Fault] = {
    "the lane does not wait for computation": Fault(comm_stream(order_before=False)),
    "the lane does not wait for computation, offloaded": Fault(comm_stream(order_before=False), offloaded),
    "memory is allocated after the order was made": Fault(comm_stream(order_first=True)),
    "gradients are packed where their message is allocated": Fault(comm_stream(allocate_on_lane=True)),
    "memory is allocated on a lane that does not wait": Fault(comm_stream(order_before=False, allocate_on_lane=True)),
    "the lane does not wait for its collectives": Fault(asynchronous(comm_stream(wait_works=False))),
    "results are unpacked on the compute stream at once": Fault(comm_stream(finish_on_lane=False)),
    "the event is recorded before results are unpacked": Fault(comm_stream(done="first")),
    "the event is recorded on the compute stream": Fault(comm_stream(done="compute")),
    "computation does not wait for what was issued": Fault(replace(memory._DeviceWork, "wait", lambda self: None)),
    "another stream waits instead": Fault(replace(memory._DeviceWork, "wait", _wait_elsewhere)),
    "all lanes share one event": Fault(_shared_event),
    "a failed launch leaves the lane unordered": Fault(comm_stream(order_on_failure=False), failing_launch),
    "a group call that fails drops its work": Fault(
        asynchronous(replace(NcclTransport, "_together", _together_that_drops)), failing_launch
    ),
    "a dropped ticket orders nothing, reductions": Fault(
        replace(memory._DeviceWork, "__del__", lambda self: None), dropped
    ),
    "a dropped ticket orders nothing, all-gathers": Fault(
        replace(memory._DeviceWork, "__del__", lambda self: None), unshard_dropped
    ),
    "gradients are freed while they are reduced": Fault(
        replace(reduction.GradReduction, "end_reduce_scatter", _free_before_wait)
    ),
    "replicas are reduced before the shards are": Fault(
        replace(reduction.GradReduction, "end_reduce_scatter", _no_wait_between_stages), replicas, 4
    ),
    "gradients are used before they have landed": Fault(
        replace(reduction.GradReduction, "release", _no_wait_at_the_end), replicas, 4
    ),
    "packed pieces are freed before they are unpacked": Fault(replace(Bucket, "wait_for_unshard", _arrive_before_wait)),
    "a unit is resharded while it is unsharded": Fault(replace(Bucket, "reshard", _reshard_in_flight), resharded),
    "gradients are packed on the lane": Fault(replace(reductions, "issue_reduce_scatters", _pack_on_lane), mixed),
    "sums are scaled before they are there": Fault(
        asynchronous(replace(collectives, "HostWork", _FinishedTooEarly)), scaled
    ),
    "the host reads gradients that are on their way": Fault(
        replace(memory, "_synchronize", lambda event: None), offloaded
    ),
    "shards are written to while they are read": Fault(
        replace(runtime.Runtime, "_release_host_memory", lambda self: None), written_after_evaluation
    ),
    "pinned inputs are read later": Fault(replace(runtime, "input_on", _input_as_it_is), refilled_input),
    "a hook does not wait for the reduction": Fault(
        replace(reduction, "run_on", _hook_without(before=True, after=False)), hooked
    ),
    "nobody waits for a hook": Fault(replace(reduction, "run_on", _hook_without(before=False, after=True)), hooked),
    "an event of an earlier step is waited for": Fault(
        replace(runtime.Runtime, "_enter_forward", _enter_with_a_stale_event), failing_forward
    ),
    "a checkpoint is written before its copies are there": Fault(
        replace(snapshot, "stream_waiter", lambda device: lambda: None), saved
    ),
    "activations are freed while they leave": Fault(
        replace(ActivationOffload, "finish_copies", _left_without_waiting), activations
    ),
    "activations are used before they are back": Fault(
        replace(Activation, "on_device", _used_without_waiting), activations
    ),
    "optimizer state is used before it is there": Fault(
        replace(_Part, "finish", _state_used_without_waiting), state_offloaded
    ),
    "optimizer state is read before it is back": Fault(
        replace(DeviceCommStream, "synchronize", lambda self: None), state_offloaded
    ),
}

EQUIVALENT: dict[str, Fault] = {
    "a copy of the lane's code": Fault(comm_stream(), reason="nothing was changed"),
    "device copies of offloaded gradients are dropped early": Fault(
        replace(reduction.GradReduction, "finalize", _leaving_dropped),
        offloaded,
        reason="the shards themselves hold the memory until the ticket was waited for",
    ),
}
