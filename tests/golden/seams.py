"""Where the golden traces look into the engine: all that a change of its inner names has to be followed by."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from golden_trace import Trace
from torch import nn

from fullshard.comm import Transport, record
from fullshard.engine.ownership import nested_units
from fullshard.engine.reduction.grad_reduction import GradReduction
from fullshard.engine.reduction.plan import ReductionPlan
from fullshard.engine.reduction.queue import ReductionQueue
from fullshard.engine.runtime import Runtime
from fullshard.engine.unit import Unit
from fullshard.memory import Buffer

KINDS = ("all_gather", "reduce_scatter", "all_reduce")
OTHERS = ("all_reduce", "broadcast", "all_gather_object")
ALL_GATHERS = ("_all_gather", "_subgroup_all_gather")  # of a bucket
BUFFERS = {  # attributes of a bucket or an all-gather
    "_unsharded": "",
    "_subgroup_shard": " (neighbors)",
    "_message": " (message)",
}
_messages: weakref.WeakKeyDictionary[Buffer, ReductionPlan] = weakref.WeakKeyDictionary()  # of reductions, by plan
PATCHED = (dist, Transport, Buffer, GradReduction, Unit, Runtime, ReductionQueue)
Patch = pytest.MonkeyPatch


@contextlib.contextmanager
def recording(trace: Trace) -> Iterator[None]:
    """Have collectives, memory of buffers and phases of units go into ``trace``."""
    with Patch.context() as patch:
        for kind in KINDS:
            _record_collectives(patch, trace, kind)
        for name in OTHERS:
            _record_others(patch, trace, name)
        _record_memory(patch, trace)
        _record_phases(patch, trace)
        yield


def _record_collectives(patch: Patch, trace: Trace, kind: str) -> None:
    """Seam: each of the three public methods of a transport is one launch; ``record`` says what travels in it."""
    launch = getattr(Transport, kind)

    def launch_recorded(self: Transport, requests: Any) -> Any:
        with record() as seen:
            works = launch(self, requests)
        if seen:
            parts = [f"{c.unit or 'root'} {str(c.dtype)[6:]}[{c.numel}] {c.nbytes} B" for c in seen]
            trace.collective(kind, parts, dist.get_process_group_ranks(self.group))
        return works

    patch.setattr(Transport, kind, launch_recorded)


def _record_others(patch: Patch, trace: Trace, name: str) -> None:
    """Seam: what the engine asks of ``torch.distributed`` itself, beside its transports."""
    function = getattr(dist, name)

    def function_recorded(*args: Any, **kwargs: Any) -> Any:
        sizes = [f"{str(a.dtype)[6:]}[{a.numel()}]" for a in args if isinstance(a, torch.Tensor)]
        trace.collective(f"dist.{name}", sizes, dist.get_process_group_ranks(kwargs.get("group")))
        return function(*args, **kwargs)

    patch.setattr(dist, name, function_recorded)


def _record_memory(patch: Patch, trace: Trace) -> None:
    """Seam: a buffer has memory from ``allocate`` to ``free``. What it is made with, to be planned on, is left out."""
    live: weakref.WeakSet[Buffer] = weakref.WeakSet()
    allocate, free = Buffer.allocate, Buffer.free

    def allocate_recorded(self: Buffer) -> None:
        allocate(self)
        if self not in live and self.allocated_bytes:
            live.add(self)
            trace.memory("alloc", self, self.allocated_bytes)

    def free_recorded(self: Buffer) -> None:
        nbytes = self.allocated_bytes
        free(self)
        if self in live:
            live.discard(self)
            trace.memory("free", self, nbytes)

    pack = GradReduction.pack

    def pack_recorded(self: GradReduction) -> None:
        pack(self)
        if isinstance(self._message, Buffer):
            live.add(self._message)
            _messages[self._message] = self.plan
            trace.memory("alloc", self._message, self._message.allocated_bytes)

    patch.setattr(GradReduction, "pack", pack_recorded)
    patch.setattr(Buffer, "allocate", allocate_recorded)
    patch.setattr(Buffer, "free", free_recorded)


def _record_phases(patch: Patch, trace: Trace) -> None:
    """Seam: a unit's ``phase`` is an attribute; a property on the class sees every change of it."""

    def change(self: Unit, phase: Any) -> None:
        if self.__dict__.get("phase", phase) is not phase:
            trace.event("phase", f"{self.name or 'root'} {phase.value}")
        self.__dict__["phase"] = phase

    patch.setattr(Unit, "phase", property(lambda self: self.__dict__["phase"], change), raising=False)


def labels(model: nn.Module) -> dict[int, str]:
    """Seam: what the buffers of a model's units are for, by ``id``. The unsharded ones have just the unit's name."""
    found: dict[int, str] = {}
    for unit in nested_units(model):
        name = unit.name or "root"
        for bucket in unit.buckets:
            for holder in [bucket, *(getattr(bucket, name, None) for name in ALL_GATHERS)]:
                attributes = {} if holder is None else vars(holder)
                held = {attribute: attributes.get(attribute) for attribute in BUFFERS}
                found |= {id(held[a]): f"{name}{what}" for a, what in BUFFERS.items() if held[a] is not None}
            found |= {id(b): f"{name} (gradients)" for b, plan in _messages.items() if plan in bucket._plans.values()}
            for each in getattr(bucket, "all_gathers", ()):
                found |= {id(buffer): f"{name} (region)" for buffer in each.buffers}
    return found


# ---------------------------------------------------------------- faults that are seeded to prove the comparison


def _swapped_gathers(patch: Patch) -> None:
    """Fault: where blocks.0 is to be gathered, blocks.1 is gathered before it."""
    begin_unshard = Runtime.begin_unshard

    def unshard_other_first(self: Runtime, units: list[Unit]) -> None:
        if [unit.name for unit in units] == ["blocks.0"]:
            begin_unshard(self, [unit for unit in self.units() if unit.name == "blocks.1"])
        begin_unshard(self, units)

    patch.setattr(Runtime, "begin_unshard", unshard_other_first)


def _dropped_prefetch(patch: Patch) -> None:
    """Fault: blocks.2 is gathered when it is needed, not ahead."""
    prefetch = Runtime._prefetch

    def leave_out(self: Runtime, launches: Iterable[list[Unit]]) -> None:
        prefetch(self, (units for units in launches if [unit.name for unit in units] != ["blocks.2"]))

    patch.setattr(Runtime, "_prefetch", leave_out)


def _late_free(patch: Patch) -> None:
    """Fault: blocks.0 is not freed after its forward."""
    reshard = Runtime._reshard_after_forward

    def stay(self: Runtime, unit: Unit, *, has_backward: bool) -> None:
        if unit.name != "blocks.0":
            reshard(self, unit, has_backward=has_backward)
            return
        unit.keep_for_backward()

    patch.setattr(Runtime, "_reshard_after_forward", stay)


def _late_reduction(patch: Patch) -> None:
    """Fault: the gradients of blocks.2 are reduced just before those of the unit after it."""
    launch = ReductionQueue.launch
    late: list[Any] = []

    def hold_back(self: ReductionQueue, unit: str, reductions: Any, comm_streams: Any) -> None:
        if unit == "blocks.2":
            late.append((unit, reductions))
            return
        while late:
            launch(self, *late.pop(), comm_streams)
        launch(self, unit, reductions, comm_streams)

    patch.setattr(ReductionQueue, "launch", hold_back)


FAULTS = {
    "swapped gathers": _swapped_gathers,
    "dropped prefetch": _dropped_prefetch,
    "late free": _late_free,
    "late reduction": _late_reduction,
}


@contextlib.contextmanager
def seeded(fault: str | None) -> Iterator[None]:
    """Have the engine make one of the :data:`FAULTS`; None: none."""
    with Patch.context() as patch:
        if fault is not None:
            FAULTS[fault](patch)
        yield
