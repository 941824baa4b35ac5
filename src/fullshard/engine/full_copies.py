"""Full parameters in the shards' own dtype, for who wants to read or edit them outside of forward and backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from fullshard.engine.bucket import BufferCopies
from fullshard.engine.gather import Gather, issue_gathers
from fullshard.engine.parameter import ShardedParameter, value_of
from fullshard.engine.unit import Unit
from fullshard.errors import FullshardError, PhaseError
from fullshard.memory import make_lane

__all__ = ["FullCopies", "bring_to_rest"]


def bring_to_rest(unit: Unit, what: str) -> None:
    """Have the modules of a unit hold its shards, as the user has left them.

    Args:
        unit: Any.
        what: That somebody wants of it, for the error.

    Raises:
        PhaseError: If it is in the middle of a step, or its parameters are full already.
    """
    unit.settle()
    running = unit.schedule is not None and unit.schedule.busy
    if running or not unit.resting or unit.progress.summoned or unit.progress.held:
        raise PhaseError(
            f"unit {unit.name or '<root>'!r} was asked for {what} in the middle of a step, or while its "
            "parameters are full already; ask, save and load between steps, not inside forward, backward or "
            "summon_full_params"
        )
    unit.reshard()
    unit.settle_parameters()


def gather_outside(unit: Unit, gathers: Sequence[Gather]) -> None:
    """Fill buffers of a unit outside its forwards and backwards; the current stream sees them."""
    lane = make_lane(unit.mesh.device) if unit.schedule is None else unit.schedule.lanes.gather
    issue_gathers([(unit.name, gather) for gather in gathers], lane).wait()
    for gather in gathers:
        gather.arrived()
    if unit.policy.offloads:
        lane.synchronize()  # next the user may write to the shards that it reads


class FullCopies:
    """The full parameters of one unit, copied, as what its modules hold until :meth:`close`.

    Gathering is a collective over the unit's shard axis. What modules compute with is not touched: that may have
    another dtype.

    Args:
        unit: At rest.
        rank0_only: Only the first rank of the shard axis keeps the copies; the others keep their shards registered.
        offload_to_cpu: Keep the copies in CPU memory.
        with_grads: Gather the gradients too; a parameter that has none on any rank gets none.

    Raises:
        PhaseError: If the unit is in the middle of a step, or its modules hold copies already.
    """

    unit: Unit
    parameters: dict[int, nn.Parameter]  # by the id of the ShardedParameter; empty where the shards are registered
    _copies: list[BufferCopies]

    def __init__(
        self, unit: Unit, *, rank0_only: bool = False, offload_to_cpu: bool = False, with_grads: bool = False
    ) -> None:
        self.unit, self.parameters, self._copies = unit, {}, []
        offload_to_cpu = offload_to_cpu and unit.mesh.device.type != "cpu"  # else they are there
        bring_to_rest(unit, "its full parameters")
        with torch.inference_mode(False), torch.no_grad():
            self._copies = [bucket.copies() for bucket in unit.buckets]
            self._fill(self._copies)
            gradients = self._gradients() if with_grads else {}
            for bucket, copies in zip(unit.buckets, self._copies, strict=True):
                for parameter, value in zip(bucket.parameters, copies.values, strict=True):
                    self._add(parameter, value, gradients.get(id(parameter)), offload_to_cpu)
        if offload_to_cpu:
            self._free_buffers()
        if rank0_only and unit.mesh.rank != 0:
            self.parameters = {}
            self._free_buffers()
        if self.parameters:
            unit.registration.use_instead(self.parameters)
        unit.progress.summoned, unit.progress.copied = True, not rank0_only or unit.mesh.rank == 0

    def _add(
        self, parameter: ShardedParameter, value: torch.Tensor, gradient: torch.Tensor | None, offload_to_cpu: bool
    ) -> None:
        def made(tensor: torch.Tensor) -> torch.Tensor:
            return parameter.placement.full(tensor.cpu() if offload_to_cpu else tensor)

        copy = nn.Parameter(made(value), requires_grad=parameter.requires_grad)
        copy.__dict__.update(parameter.attributes)
        if gradient is not None:
            if gradient.dtype is not copy.dtype:
                copy.grad_dtype = gradient.dtype
            copy.grad = made(gradient)
        self.parameters[id(parameter)] = copy

    def _fill(self, copies: list[BufferCopies]) -> None:
        gather_outside(self.unit, [each.gather for each in copies])

    def _gradients(self) -> dict[int, torch.Tensor]:
        """Full gradients by the ids of parameters. Which there are is agreed on first: ranks may differ."""
        unit = self.unit
        own = [p.local_gradient is not None for p in unit.parameters]
        present = [any(own), *own]
        flags = torch.tensor(present, dtype=torch.int32, device=unit.mesh.device)
        if unit.mesh.shard is not None and unit.mesh.world_size > 1:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=unit.mesh.shard.get_group())
        some, *each = flags.tolist()
        if not some:
            return {}
        copies = [bucket.copies(gradients=True) for bucket in unit.buckets]
        self._fill(copies)
        there = {id(p) for p, flag in zip(unit.parameters, each, strict=True) if flag}
        return {
            id(parameter): value
            for bucket, copied in zip(unit.buckets, copies, strict=True)
            for parameter, value in zip(bucket.parameters, copied.values, strict=True)
            if id(parameter) in there
        }

    def check(self) -> None:
        """Whether what the modules hold can be written back.

        Raises:
            FullshardError: If a parameter was replaced by one of another shape.
        """
        self._held()

    def close(self, *, writeback: bool, rank0_only: bool = False, with_grads: bool = False) -> None:
        """Have the modules hold the shards again.

        Args:
            writeback: Put this rank's part of what the modules held into the shards.
            rank0_only: What the first rank held counts, and is sent to the others: a collective.
            with_grads: Put the gradients back as well, but not with ``rank0_only``, which sends values only.

        Raises:
            FullshardError: If a parameter was replaced by one of another shape.
        """
        unit = self.unit
        try:
            if writeback:
                with torch.inference_mode(False), torch.no_grad():
                    held = self._held()
                    if rank0_only:
                        self._spread(held)
                    self._write(held, with_grads=with_grads and not rank0_only)
        finally:
            unit.progress.summoned = unit.progress.copied = False
            unit.registration.use_sharded()
            unit.outdated = True
            self._free_buffers()
            self.parameters = {}

    def _held(self) -> dict[int, nn.Parameter]:
        """What the modules hold now: users may have put other objects in."""
        held = {}
        for parameter in self.unit.parameters if self.parameters else []:
            mine = self.parameters[id(parameter)]
            others = (owner.held() for owner in parameter.owners)
            found = next((other for other in others if other is not mine and other is not None), mine)
            if found.shape != parameter.placement.shape:
                raise FullshardError(
                    f"cannot write back {parameter.describe()}: inside summon_full_params it was replaced by a "
                    f"parameter of shape {tuple(found.shape)}"
                )
            held[id(parameter)] = found
        return held

    def _write(self, held: dict[int, nn.Parameter], *, with_grads: bool) -> None:
        for bucket in self.unit.buckets:
            values = [value_of(held[id(parameter)]) for parameter in bucket.parameters]
            for parameter, part in zip(bucket.parameters, bucket.parts(values), strict=True):
                parameter.local.copy_(part)
            if not with_grads:
                continue
            gradients = [held[id(parameter)].grad for parameter in bucket.parameters]
            filled = [
                value_of(gradient) if gradient is not None else torch.zeros_like(value)
                for gradient, value in zip(gradients, values, strict=True)
            ]
            for parameter, gradient, part in zip(bucket.parameters, gradients, bucket.parts(filled), strict=True):
                parameter.set_gradient(None if gradient is None else part)

    def _spread(self, held: dict[int, nn.Parameter]) -> None:
        """Send the first rank's values to all; afterwards ``held`` has them everywhere."""
        mesh = self.unit.mesh
        for bucket, copies in zip(self.unit.buckets, self._copies, strict=True):
            copies.buffer.allocate()
            for parameter, value in zip(bucket.parameters, copies.values, strict=True):
                if mesh.rank == 0:
                    value.copy_(value_of(held[id(parameter)]))
                else:
                    held[id(parameter)] = nn.Parameter(parameter.placement.full(value), requires_grad=False)
            whole = copies.buffer.tensor(0, (copies.buffer.numel,), (1,))
            if mesh.rank == 0 and mesh.replicate is not None and mesh.replicas > 1:
                dist.broadcast(whole, group=mesh.replicate.get_group(), group_src=0)
            if mesh.shard is not None and mesh.world_size > 1:
                dist.broadcast(whole, group=mesh.shard.get_group(), group_src=0)
            if mesh.rank == 0:
                for parameter, value in zip(bucket.parameters, copies.values, strict=True):
                    held[id(parameter)] = nn.Parameter(parameter.placement.full(value), requires_grad=False)

    def keep_memory(self) -> None:
        """Leave the memory to whoever still refers to the copies."""
        self._copies = []

    def _free_buffers(self) -> None:
        for copies in self._copies:
            copies.buffer.free()
