"""Copies of the unsharded parameters in the dtype of the shards, to be read or edited between steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from fullshard.engine.buckets.all_gather import BucketAllGather, issue_all_gathers
from fullshard.engine.buckets.base import UnshardedCopies
from fullshard.engine.parameters.sharded import ShardedParameter, value_of
from fullshard.engine.runtime import current_runtime, ensure_idle
from fullshard.engine.states import ParameterState
from fullshard.engine.unit import Unit
from fullshard.errors import FullshardError, PhaseError
from fullshard.memory import make_comm_stream

__all__ = ["SummonedParameters", "require_idle"]


def require_idle(unit: Unit, what: str) -> None:
    """Check that a unit is idle, reshard it and write back parameters that the user has replaced.

    Args:
        unit: Any unit.
        what: Description of the request, for the error.

    Raises:
        PhaseError: If it is in the middle of a step, or its parameters are unsharded by the user.
    """
    ensure_idle(unit)
    runtime = current_runtime(unit)
    running = runtime is not None and runtime.busy
    summoned = unit.parameter_state is ParameterState.SUMMONED
    if running or not unit.is_idle or summoned or unit.user_unshards:
        raise PhaseError(
            f"unit {unit.described}: cannot access {what} in the middle of a step or while it is unsharded; save, load "
            "and summon parameters between steps, not inside forward, backward, summon_full_params or unsharded"
        )
    unit.reshard()
    unit.refresh()


def all_gather_now(unit: Unit, gathers: Sequence[BucketAllGather]) -> None:
    """All-gather buffers of an idle unit; the current stream waits for them."""
    runtime = current_runtime(unit)
    comm_stream = make_comm_stream(unit.mesh.device) if runtime is None else runtime.comm_streams.all_gather
    issue_all_gathers([(unit.name, gather) for gather in gathers], comm_stream).wait()
    for gather in gathers:
        gather.arrived()
    if unit.policy.offloads:
        comm_stream.synchronize()  # the user may overwrite the shards, which it reads, as soon as this returns


class SummonedParameters:
    """Copies of the unsharded parameters of one unit, which its modules hold until ``close``.

    Made by an all-gather over the unit's shard axis. The unsharded buffers, which may have another dtype, are not used.

    Args:
        unit: An idle unit.
        rank0_only: Only the first rank of the shard axis keeps the copies; the others keep their shards registered.
        offload_to_cpu: Move the copies to CPU memory.
        with_grads: All-gather the gradients too; a parameter without a gradient on any rank gets none.

    Raises:
        PhaseError: If the unit is in the middle of a step, or its modules hold copies already.
    """

    unit: Unit
    parameters: dict[int, nn.Parameter]  # by the id of the ShardedParameter; empty where the shards are registered
    _copies: list[UnshardedCopies]

    def __init__(
        self, unit: Unit, *, rank0_only: bool = False, offload_to_cpu: bool = False, with_grads: bool = False
    ) -> None:
        self.unit, self.parameters, self._copies = unit, {}, []
        offload_to_cpu = offload_to_cpu and unit.mesh.device.type != "cpu"
        keep = not rank0_only or unit.mesh.rank == 0
        require_idle(unit, "its unsharded parameters")
        with torch.inference_mode(False), torch.no_grad():
            self._copies = [bucket.copies() for bucket in unit.buckets]
            all_gather_now(unit, [copies.all_gather for copies in self._copies])
            gradients = self._gradients() if with_grads else {}
            for bucket, copies in zip(unit.buckets, self._copies, strict=True):
                for parameter, value in zip(bucket.parameters, copies.values, strict=True):
                    self._add(parameter, value, gradients.get(id(parameter)), offload_to_cpu)
        if offload_to_cpu or not keep:
            self._free_buffers()
        unit.mark_summoned(True)
        if keep:
            unit.registration.use_copies(self.parameters)
        else:
            self.parameters = {}

    def _add(
        self, parameter: ShardedParameter, value: torch.Tensor, gradient: torch.Tensor | None, offload_to_cpu: bool
    ) -> None:
        def unsharded(tensor: torch.Tensor) -> torch.Tensor:
            return parameter.placement.unsharded(tensor.cpu() if offload_to_cpu else tensor)

        copy = nn.Parameter(unsharded(value), requires_grad=parameter.requires_grad)
        copy.__dict__.update(parameter.attributes)
        if gradient is not None:
            if gradient.dtype is not copy.dtype:
                copy.grad_dtype = gradient.dtype
            copy.grad = unsharded(gradient)
        self.parameters[id(parameter)] = copy

    def _gradients(self) -> dict[int, torch.Tensor]:
        """Return unsharded gradients by the ids of parameters; ranks first agree on which parameters have one."""
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
        all_gather_now(unit, [each.all_gather for each in copies])
        there = {id(p) for p, flag in zip(unit.parameters, each, strict=True) if flag}
        return {
            id(parameter): value
            for bucket, copied in zip(unit.buckets, copies, strict=True)
            for parameter, value in zip(bucket.parameters, copied.values, strict=True)
            if id(parameter) in there
        }

    def close(self, *, writeback: bool, rank0_only: bool = False, with_grads: bool = False) -> None:
        """Register the shards again and free the copies.

        Args:
            writeback: Write this rank's part of the parameters that the modules held back into the shards.
            rank0_only: Broadcast the parameters of the first rank first: a collective.
            with_grads: Write gradients back as well, but not with ``rank0_only``, which broadcasts values only.

        Raises:
            FullshardError: If a parameter was replaced by one of another shape.
        """
        unit = self.unit
        try:
            if writeback:
                with torch.inference_mode(False), torch.no_grad():
                    held = self.check()
                    if rank0_only:
                        self._broadcast(held)
                    self._write(held, with_grads=with_grads and not rank0_only)
        finally:
            unit.mark_summoned(False)
            unit.registration.use_sharded()
            self._free_buffers()
            self.parameters = {}

    def check(self) -> dict[int, nn.Parameter]:
        """Return the parameters that the modules hold now, by ids: users may have replaced the copies.

        Raises:
            FullshardError: If one was replaced by one of another shape, which cannot be written back.
        """
        held = {}
        for parameter in self.unit.parameters if self.parameters else []:
            copy = self.parameters[id(parameter)]
            others = (owner.held() for owner in parameter.owners)
            found = next((other for other in others if other is not copy and other is not None), copy)
            if found.shape != parameter.placement.shape:
                raise FullshardError(
                    f"cannot write back {parameter.describe()}: inside summon_full_params it was replaced by a "
                    f"parameter of shape {tuple(found.shape)}, expected {tuple(parameter.placement.shape)}"
                )
            held[id(parameter)] = found
        return held

    def _write(self, held: dict[int, nn.Parameter], *, with_grads: bool) -> None:
        for parameter in self.unit.parameters:
            value = held[id(parameter)]
            parameter.local.copy_(parameter.local_part(value_of(value)))
            if with_grads:
                gradient = value.grad
                parameter.set_gradient(None if gradient is None else parameter.local_part(value_of(gradient)))

    def _broadcast(self, held: dict[int, nn.Parameter]) -> None:
        """Broadcast the first rank's values into ``held`` of all ranks."""
        mesh = self.unit.mesh
        for bucket, copies in zip(self.unit.buckets, self._copies, strict=True):
            copies.buffer.allocate()
            if mesh.rank == 0:
                for parameter, value in zip(bucket.parameters, copies.values, strict=True):
                    value.copy_(value_of(held[id(parameter)]))
            whole = copies.buffer.tensor(0, (copies.buffer.numel,), (1,))
            if mesh.rank == 0 and mesh.replicate is not None and mesh.replicas > 1:
                dist.broadcast(whole, group=mesh.replicate.get_group(), group_src=0)
            if mesh.shard is not None and mesh.world_size > 1:
                dist.broadcast(whole, group=mesh.shard.get_group(), group_src=0)
            for parameter, value in zip(bucket.parameters, copies.values, strict=True):
                held[id(parameter)] = nn.Parameter(parameter.placement.unsharded(value), requires_grad=False)

    def keep_memory(self) -> None:
        """Do not free the buffers at ``close``: references to the copies keep them alive."""
        self._copies = []

    def _free_buffers(self) -> None:
        for copies in self._copies:
            copies.buffer.free()
