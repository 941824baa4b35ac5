"""A unit: the parameters that are gathered and reduced together, and what happens to them at each boundary."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.engine import hooks
from fullshard.engine.bucket import Bucket
from fullshard.engine.containers import map_tensors
from fullshard.engine.mesh import ShardMesh
from fullshard.engine.parameter import ShardedParameter
from fullshard.engine.schedule import Schedule, watch_optimizers
from fullshard.errors import PhaseError

__all__ = ["Phase", "Unit", "UnitSettings"]


class Phase(enum.Enum):
    """What a unit is in the middle of."""

    RESTING = "resting"
    FORWARD = "forward"
    BACKWARD = "backward"


_LEGAL_MOVES: dict[Phase, frozenset[Phase]] = {
    Phase.RESTING: frozenset({Phase.FORWARD, Phase.BACKWARD}),
    # Back to backward: recomputation of checkpointed activations runs forwards inside the backward.
    Phase.FORWARD: frozenset({Phase.RESTING, Phase.BACKWARD}),
    Phase.BACKWARD: frozenset({Phase.RESTING, Phase.FORWARD}),
}


@dataclass
class UnitSettings:
    """What a user may change between steps. Must be equal on all ranks."""

    reshard_after_forward: bool | None = None  # None: True, but False for the root
    reshard_after_backward: bool = True
    requires_gradient_sync: bool = True
    forward_prefetch: list[weakref.ref[Unit]] = field(default_factory=list)  # empty: the recorded order
    backward_prefetch: list[weakref.ref[Unit]] = field(default_factory=list)


class Unit:
    """See the module docstring. Owned by its module; everything here that points up is weak.

    [Note: Adoption]
    Users replace registered parameters: ``load_state_dict(assign=True)`` puts new objects in, ``to_empty`` and
    ``to(dtype)`` swap the contents of the old ones. Before each gather of a resting unit the registered
    parameters are compared (by identity) with the ones the unit knows, and foreign ones are taken over:
    their values are written into the shard buffer, or into a new one if dtype or device changed.
    """

    name: str  # FQN of the module below the root; "" for the root itself
    module: weakref.ref[nn.Module]
    mesh: ShardMesh
    parameters: list[ShardedParameter]
    buckets: list[Bucket]
    settings: UnitSettings
    schedule: Schedule | None  # from the first forward on
    phase: Phase
    ref: weakref.ref[Unit]
    _forwards: list[Phase]  # of this unit that are open now: the phase that each returns to
    _full_registered: bool
    outdated: bool  # whether an optimizer has stepped since the full buffers were filled
    _kept: bool  # whether the full parameters stay from a forward whose backward may still come
    _unreduced: bool  # whether a backward without sync left gradients
    _calls: list[hooks.Call]  # forwards whose backward may still come

    def __init__(
        self, module: nn.Module, mesh: ShardMesh, parameters: Sequence[ShardedParameter], settings: UnitSettings
    ) -> None:
        self.name, self.module, self.mesh, self.settings = "", weakref.ref(module), mesh, settings
        self.parameters, self.buckets = list(parameters), []
        self.schedule, self.phase, self.ref = None, Phase.RESTING, weakref.ref(self)
        self._forwards, self._full_registered = [], False
        self.outdated, self._calls = False, []
        self._kept = self._unreduced = False
        for parameter in self.parameters:
            parameter.unit = self.ref
        self.build_buckets()
        watch_optimizers()

    # ---------------------------------------------------------------- storage

    def build_buckets(self) -> None:
        """(Re)build the buckets from the parameters that the modules hold now, full or sharded."""
        with torch.inference_mode(False), torch.no_grad():  # in this order: the first switches grad on
            groups: dict[tuple[torch.dtype, bool], list[tuple[ShardedParameter, torch.Tensor]]] = {}
            for parameter in self.parameters:
                value = _value(parameter.sharded)
                key = (value.dtype, value.device.type == "meta")
                groups.setdefault(key, []).append((parameter, value))
            self.buckets = [
                Bucket([p for p, _ in group], [value for _, value in group], self.mesh) for group in groups.values()
            ]
        for parameter in self.parameters:
            parameter.register(parameter.sharded)

    def give_up(self, parameters: Sequence[ShardedParameter]) -> None:
        """Another unit takes ``parameters`` over; it reads their values from the shards they have now."""
        if self.schedule is not None:
            self.schedule.dissolve(f"unit {self.name or '<root>'!r} gives up parameters")
        self.reshard()
        taken = {id(parameter) for parameter in parameters}
        self.parameters = [p for p in self.parameters if id(p) not in taken]
        self.build_buckets()

    def adopt(self) -> None:
        """See [Note: Adoption].

        Raises:
            ValueError: If a registered parameter has the wrong shape.
        """
        rebuild = False
        for parameter in self.parameters:
            if parameter.is_current():
                continue
            found = parameter.adopt_registered()
            value = _value(found)
            rebuild |= value.dtype != parameter.local.dtype or value.device != parameter.local.device
        if rebuild:
            self.build_buckets()
            return
        with torch.inference_mode(False), torch.no_grad():  # in this order: the first switches grad on
            for bucket in self.buckets:
                bucket.take_over()
        for parameter in self.parameters:
            parameter.register(parameter.sharded)

    @property
    def gathered(self) -> bool:
        """Whether the full parameters are there, or on their way."""
        return any(bucket.gathered for bucket in self.buckets)

    def gather(self) -> None:
        """Start gathering; no-op if that was done. Adopts foreign parameters first."""
        current = self._full_registered or all(parameter.is_current() for parameter in self.parameters)
        if self.gathered:
            if current and not self.outdated:
                return
            # A forward without a backward left these behind, and its parameters were written to since.
            self.reshard()
        if not current:
            self.adopt()
        self.outdated = False
        schedule = self.attached()
        for bucket in self.buckets:
            bucket.gather(schedule.gather_lane, self.name)

    def use_full(self) -> None:
        """Gather if need be, wait, and have the modules hold the full parameters."""
        self.gather()
        for bucket in self.buckets:
            bucket.finish_gather()
        if not self._full_registered:
            self._full_registered = True
            for parameter in self.parameters:
                full = parameter.full
                if full.requires_grad is not parameter.sharded.requires_grad:
                    full.requires_grad_(parameter.sharded.requires_grad)
                parameter.register(full)

    @property
    def resting(self) -> bool:
        """Whether no forward or backward of this unit is going on."""
        return self.phase is Phase.RESTING

    @property
    def computing(self) -> bool:
        """Whether the modules hold the full parameters because a forward or backward needs them now."""
        return self._full_registered and self.phase is not Phase.RESTING

    def use_sharded(self) -> None:
        """Have the modules hold the sharded parameters again."""
        if self._full_registered:
            self._full_registered = False
            for parameter in self.parameters:
                parameter.register(parameter.sharded)

    def reshard(self) -> None:
        """Register the sharded parameters and free the full ones."""
        self.use_sharded()
        self._kept = False
        for bucket in self.buckets:
            bucket.reshard()

    # ---------------------------------------------------------------- forward

    def pre_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Gather, prefetch the next unit, and guard the inputs."""
        schedule = self.attached()
        schedule.enter(self)
        self._forwards.append(self.phase)
        try:
            if len(self._forwards) == 1:
                if self._kept and self.settings.reshard_after_forward is None and self.phase is Phase.RESTING:
                    # Only the root keeps them unasked; who wrote to its shards in between must see that.
                    self.reshard()
                self._move(Phase.FORWARD)
                self.use_full()
                schedule.started_forward(self)
                if schedule.root() is self and self.mesh.device.type != "cpu":
                    args, kwargs = map_tensors(lambda t: t.to(self.mesh.device, non_blocking=True), (args, kwargs))
            if len(self._forwards) == 1 and torch.is_grad_enabled():
                args, kwargs, call = hooks.guard_inputs(self, args, kwargs)
                if call is not None:
                    self._calls = [c for c in self._calls if c.alive]
                    self._calls.append(call)
        except BaseException:
            self.abort_forward()
            raise
        return args, kwargs

    def post_forward(self, output: Any) -> Any:
        """Watch the outputs and let go of the full parameters as the settings say."""
        schedule = self.attached()
        watched = False
        try:
            watched = torch.is_grad_enabled() and hooks.watch_outputs(self, output)
        finally:
            phase = self._forwards.pop()
            if not self._forwards:
                self._leave_forward(phase, keep=watched and not self.reshards_after_forward)
                if watched:
                    schedule.finished_forward(self)
            schedule.leave(self)
        return output

    def abort_forward(self) -> None:
        """The forward raised: leave a state from which the next one starts clean."""
        phase = self._forwards.pop()
        if not self._forwards:
            self._leave_forward(phase, keep=False)
        self.attached().leave(self, failed=True)

    def _leave_forward(self, phase: Phase, keep: bool) -> None:
        self._move(phase)
        if self.phase is Phase.BACKWARD:
            return  # recomputed inside its own backward, which needs the full parameters next
        if keep or hooks.current_backward() != hooks.NO_BACKWARD:
            self.use_sharded()
            self._kept = True
        else:
            self.reshard()

    @property
    def reshards_after_forward(self) -> bool:
        """The setting, with None resolved: all units but the root reshard."""
        setting = self.settings.reshard_after_forward
        return self.attached().root() is not self if setting is None else setting

    # ---------------------------------------------------------------- backward

    def pre_backward(self) -> None:
        """The gradient of an output is there: gather for the unit's own backward."""
        if self.phase is Phase.BACKWARD:
            return
        schedule = self.attached()
        schedule.begin_backward()
        self._move(Phase.BACKWARD)
        self.use_full()
        schedule.started_backward(self)

    def post_backward(self) -> None:
        """The gradients of the inputs of one call are complete."""
        if self.phase is not Phase.BACKWARD:
            return
        if len(self._calls) > 1 and any(call.still_to_run() for call in self._calls):
            # Autograd adds up a parameter's gradients over all calls first. Until then others may compute.
            schedule = self.attached()
            if schedule.comes_next_in_backward(self):
                schedule.started_backward(self)
            else:
                self._move(Phase.RESTING)
                self.reshard()
            return
        self.finish_backward()

    def end_backward(self) -> None:
        """The whole backward pass is over."""
        if self.phase is Phase.BACKWARD:
            self.finish_backward()
        elif self._unreduced and self.settings.requires_gradient_sync:
            self._reduce()  # this backward did not touch the unit, but an unsynced one before it did

    def finish_backward(self) -> None:
        """Reduce the gradients (or keep them for the next microbatch) and free the full parameters."""
        self.use_sharded()
        if self.settings.requires_gradient_sync:
            self._reduce()
        else:
            self._unreduced = True
        if self.settings.reshard_after_backward:
            self.reshard()
        self._move(Phase.RESTING)

    def _reduce(self) -> None:
        self._unreduced = False
        schedule = self.attached()
        for bucket in self.buckets:
            schedule.reduce(bucket, self.name)

    # ---------------------------------------------------------------- copies

    def memoize_parameters(self, memo: dict[int, Any]) -> None:
        """Put copies of the sharded parameters into a deepcopy's memo (DTensor's own would copy the mesh too)."""
        for parameter in self.parameters:
            parameter.memoize(memo)

    def copy_for(self, module: nn.Module, memo: dict[int, Any]) -> Unit:
        """The unit of a deep copy of this unit's module, whose submodules are in ``memo`` already."""
        settings = replace(self.settings, forward_prefetch=[], backward_prefetch=[])
        return Unit(module, self.mesh, [parameter.copy_for(memo) for parameter in self.parameters], settings)

    # ---------------------------------------------------------------- recovery and moves

    def reset(self, *, drop_gradients: bool) -> None:
        """Forget whatever was going on, after a failure."""
        self.phase = Phase.RESTING
        self._forwards.clear()
        self._calls.clear()
        self.release_after_failure()
        if drop_gradients:
            self._unreduced = False
            for parameter in self.parameters:
                parameter.drop_full_gradient()

    def settle(self) -> None:
        """If a backward raised and nothing ran since, return to rest now."""
        if self.schedule is not None and self.schedule.failed_backward:
            self.schedule.recover(drop_gradients=True)

    def release_after_failure(self) -> None:
        """Free the full parameters although a gather may never arrive."""
        self.use_sharded()
        for bucket in self.buckets:
            bucket.forget_gather()

    def attached(self) -> Schedule:
        """The schedule; a unit that is run before it has one becomes the root of its own module tree."""
        if self.schedule is None:
            module = self.module()
            assert module is not None, "a unit outlived its module"
            self.schedule = Schedule.attach(module)
        return self.schedule

    def _move(self, phase: Phase) -> None:
        if phase not in _LEGAL_MOVES[self.phase]:
            raise PhaseError(
                f"unit {self.name or '<root>'!r} cannot go from {self.phase.value} to {phase.value}; was its "
                "backward run from inside its own forward?"
            )
        self.phase = phase


def _value(parameter: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor, else the tensor itself."""
    value = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    return value.detach()
