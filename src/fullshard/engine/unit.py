"""A unit: the parameters that are gathered and reduced together, and what happens to them at each boundary."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fullshard.engine import hooks
from fullshard.engine.bucket import Bucket
from fullshard.engine.containers import cast_tensors, map_tensors
from fullshard.engine.extension import ExtensionBucket, has_extension
from fullshard.engine.form import BucketKey
from fullshard.engine.gather import Gather
from fullshard.engine.gradients import UnitGradients
from fullshard.engine.mesh import ShardMesh
from fullshard.engine.parameter import ShardedParameter, value_of
from fullshard.engine.progress import LEGAL_MOVES, Phase, Progress
from fullshard.engine.registration import Registration
from fullshard.engine.schedule import Schedule, watch_optimizers
from fullshard.engine.settings import UnitPolicy, UnitSettings
from fullshard.errors import FullshardError, PhaseError
from fullshard.memory import input_on

__all__ = ["Unit"]


class Unit:
    """See the module docstring. Owned by its modules; everything here that points up is weak."""

    name: str  # FQN of the (first) module below the root; "" for the root itself
    modules: list[weakref.ref[nn.Module]]
    mesh: ShardMesh
    policy: UnitPolicy
    parameters: list[ShardedParameter]
    buckets: list[Bucket]
    settings: UnitSettings
    schedule: Schedule | None  # from the first forward on
    phase: Phase
    ref: weakref.ref[Unit]
    progress: Progress
    outdated: bool  # whether an optimizer has stepped since the full buffers were filled
    tiny: bool  # whether all of it is not worth a message of its own, see [Note: Order and prefetch]
    gradients: UnitGradients
    registration: Registration

    def __init__(
        self,
        modules: Sequence[nn.Module],
        mesh: ShardMesh,
        parameters: Sequence[ShardedParameter],
        policy: UnitPolicy,
        settings: UnitSettings,
    ) -> None:
        self.name, self.modules, self.mesh = "", [weakref.ref(module) for module in modules], mesh
        self.policy, self.settings = policy, settings
        self.parameters, self.buckets = list(parameters), []
        self.schedule, self.phase, self.ref = None, Phase.RESTING, weakref.ref(self)
        self.progress, self.outdated = Progress(), False
        for parameter in self.parameters:
            parameter.unit = self.ref
        self.build_buckets()
        watch_optimizers()

    # ---------------------------------------------------------------- storage

    def build_buckets(self) -> None:
        """(Re)build the buckets from the parameters that the modules hold now, full or sharded.

        Raises:
            TypeError, ValueError: If a tensor subclass has half of the methods of [Note: Extensions], or cannot be cut.
        """
        with torch.inference_mode(False), torch.no_grad():  # in this order: the first switches grad on
            groups: dict[BucketKey, list[ShardedParameter]] = {}
            for parameter in self.parameters:
                groups.setdefault(self.policy.form.group(parameter), []).append(parameter)
            self.buckets = [self._bucket(group) for group in groups.values()]
        self.registration = self.policy.form.registration(self.parameters, self.buckets)
        self.gradients = UnitGradients(self.parameters, self.buckets)
        transport = self.mesh.transport or self.mesh.replica_transport
        self.tiny = transport is not None and self.full_size <= transport.tiny_bytes
        self.registration.use_sharded()

    def _bucket(self, parameters: list[ShardedParameter]) -> Bucket:
        mesh = self.settings.communicating(parameters[0].placement.mesh)
        storage = self.policy.storage(value_of(parameters[0].sharded).dtype)
        return self.policy.form.bucket(parameters, mesh, storage, self.policy.precision)

    def reroute(self) -> None:
        """The user has set other collectives.

        Raises:
            FullshardError: If gradients wait for their all-reduce: their place depends on how they have travelled.
        """
        self.gradients.check_not_partial(self.name)
        self.reshard()
        with torch.inference_mode(False), torch.no_grad():
            for bucket in self.buckets:
                bucket.reroute(self.settings.communicating(bucket.parameters[0].placement.mesh))

    def give_up(self, parameters: Sequence[ShardedParameter]) -> None:
        """Another unit takes ``parameters`` over; it reads their values from the shards they have now."""
        if self.schedule is not None:
            self.schedule.dissolve(f"unit {self.name or '<root>'!r} gives up parameters")
        taken = {id(parameter) for parameter in parameters}
        self.rebuild([p for p in self.parameters if id(p) not in taken])

    def rebuild(self, kept: list[ShardedParameter] | None = None) -> None:
        """Build the buckets anew from the present shards, because something that they depend on has changed.

        Args:
            kept: The parameters that the unit still has; None: all.

        Raises:
            FullshardError: If gradients wait for a later microbatch: they would be lost.
        """
        self.check_nothing_waits()
        self.reshard()
        if kept is not None:
            with torch.inference_mode(False), torch.no_grad():
                for bucket in self.buckets:
                    bucket.restore()
            self.parameters = kept
        self.build_buckets()

    def check_nothing_waits(self) -> None:
        """Raise FullshardError if gradients wait for a later microbatch: their form would not fit any more."""
        if self.progress.unreduced or self.gradients.partial:
            raise FullshardError(
                f"unit {self.name or '<root>'!r} holds gradients of microbatches without sync; call "
                "synchronize_gradients() or zero_grad() before changing the dtype, device or owner of its parameters"
            )

    def adopt(self) -> None:
        """See [Note: Adoption].

        Raises:
            ValueError: If a registered parameter has the wrong shape.
            FullshardError: If it is on the accelerator although the unit is offloaded.
        """
        rebuild = False
        for parameter in self.parameters:
            if parameter.is_current():
                continue
            value, local = value_of(parameter.adopt_registered()), parameter.local
            if self.policy.offloads and value.device.type not in ("cpu", "meta"):
                raise FullshardError(
                    f"{parameter.describe()} was moved to {value.device}, but its unit has a CPUOffloadPolicy; keep "
                    "the module, and what is loaded into it, on the CPU"
                )
            rebuild |= value.dtype != local.dtype or value.device != local.device or type(value) is not type(local)
        if rebuild:
            self.rebuild()
            return
        with torch.inference_mode(False), torch.no_grad():  # in this order: the first switches grad on
            for bucket in self.buckets:
                bucket.take_over()
        self.registration.use_sharded()

    def settle_parameters(self) -> None:
        """Adopt foreign parameters, and find methods of [Note: Extensions] put on local tensors since."""
        known = {id(p) for bucket in self.buckets if isinstance(bucket, ExtensionBucket) for p in bucket.parameters}
        if any(has_extension(p.local, p.fqn) and id(p) not in known for p in self.parameters):
            self.rebuild()
        if not self.registration.is_current():
            self.adopt()

    @property
    def full_size(self) -> int:
        """Bytes of all its parameters when gathered."""
        return sum(bucket.full_size for bucket in self.buckets)

    @property
    def gathered(self) -> bool:
        """Whether the full parameters are there, or on their way."""
        return any(bucket.gathered for bucket in self.buckets)

    def begin_gather(self) -> list[tuple[Bucket, list[Gather]]]:
        """What has to be issued to gather; nothing if that was done. Adopts foreign parameters first."""
        current = self.registration.full or self.registration.is_current()
        if self.gathered:
            if current and not self.outdated:
                return []
            # A forward without a backward left these behind, and its parameters were written to since.
            self.reshard()
        if not current:
            self.adopt()
        self.outdated = False
        near = hooks.current_backward() != hooks.NO_BACKWARD
        return [(bucket, gathers) for bucket in self.buckets if (gathers := bucket.begin_gather(near))]

    def gather(self) -> None:
        """Start gathering; no-op if that was done."""
        self.attached().gather([self])

    def use_full(self) -> None:
        """Gather if need be, wait, and have the modules hold the full parameters."""
        schedule = self.attached()
        if not (schedule.is_ahead(self) and self.gathered and not self.outdated):  # else it was looked at a moment ago
            schedule.gather([self])
        for bucket in self.buckets:
            bucket.finish_gather()
        if not self.registration.full:
            self.registration.use_full()

    @property
    def resting(self) -> bool:
        """Whether none of its forwards or backwards is going on."""
        return self.phase is Phase.RESTING

    def use_sharded(self) -> None:
        """Have the modules hold the sharded parameters again."""
        if self.registration.full:
            self.registration.use_sharded()

    def reshard(self, near: int = 0) -> None:
        """Register the sharded parameters and free the full ones.

        Args:
            near: Keep this rank's part of them over so many neighbouring ranks for backward to gather from.
        """
        self.use_sharded()
        self.progress.kept = False
        for bucket in self.buckets:
            if near:
                bucket.keep_near(near)
            bucket.reshard()
            if not near:
                bucket.drop_near()  # only now: a gather that was in flight has sent from it

    def hold(self) -> None:
        """Have the modules hold the full parameters until :meth:`release`, whatever runs in between."""
        self.use_full()
        self.progress.held += 1

    def begin_hold(self) -> None:
        """Start gathering for :meth:`hold`."""
        if self.progress.kept and self.resting and not self.progress.held:
            self.reshard()  # they may be older than the shards
        self.gather()

    def release(self) -> None:
        """See :meth:`hold`."""
        self.progress.held -= 1
        if not self.progress.held and self.resting:
            self.reshard()

    # ---------------------------------------------------------------- forward

    def pre_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Gather, prefetch the next unit, and guard and cast the inputs."""
        self.check_not_summoned("run")
        schedule = self.attached()
        schedule.enter(self)
        progress = self.progress  # not before: after a failure, enter starts a new one
        progress.forwards.append((self.phase, hooks.nodes_made()))
        try:
            if len(progress.forwards) == 1:
                by_default = self.settings.reshard_after_forward is not False
                if progress.kept and by_default and self.resting and not progress.held:
                    # Kept without having been asked to: the shards may have been written to since.
                    self.reshard()
                self._move(Phase.FORWARD)
                with hooks.outside_transforms():
                    self.use_full()
                    schedule.started_forward(self)
                if schedule.root() is self and self.mesh.device.type != "cpu":
                    args, kwargs = map_tensors(lambda t: input_on(self.mesh.device, t), (args, kwargs))
                if torch.is_grad_enabled():
                    args, kwargs, call = hooks.guard_inputs(self, args, kwargs)
                    progress.guarded = call is not None
                    if call is not None:
                        progress.calls = [c for c in progress.calls if c.alive]
                        progress.calls.append(call)
            precision = self.policy.precision
            if precision.param_dtype is not None and precision.cast_forward_inputs:
                args, kwargs = cast_tensors(precision.param_dtype, (args, kwargs))
        except BaseException:
            self.abort_forward()
            raise
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Cast and watch the outputs and let go of the full parameters as the settings say."""
        schedule = self.attached()
        watched = False
        phase, since = self.progress.forwards.pop()
        try:
            if self.policy.precision.output_dtype is not None:
                output = cast_tensors(self.policy.precision.output_dtype, output)
            watched = torch.is_grad_enabled() and hooks.watch_outputs(self, output, since)
        finally:
            if not self.progress.forwards:
                self._leave_forward(module, phase, watched=watched)
                if watched:
                    self.progress.open_ended |= not self.progress.guarded
                    schedule.finished_forward(self)
            schedule.leave(self, output if watched else None)
        return output

    def abort_forward(self) -> None:
        """The forward raised: leave a state from which the next one starts clean."""
        phase, _ = self.progress.forwards.pop()
        if not self.progress.forwards:
            self.progress.ran.clear()
            self._move(phase)
            if self.phase is not Phase.BACKWARD:
                self._rest_after_forward(watched=False)
        self.attached().leave(self, failed=True)

    def _leave_forward(self, module: nn.Module, phase: Phase, *, watched: bool) -> None:
        self._move(phase)
        if self.phase is Phase.BACKWARD:
            return  # recomputed inside its own backward, which needs the full parameters next
        if len(self.modules) > 1:  # see [Note: Units of several modules]
            progress = self.progress
            progress.ran[id(module)] = watched or progress.ran.get(id(module), False)
            if len(progress.ran) < len(self.modules) and self.attached().defers_to_end(self):
                return
            watched = any(progress.ran.values())
            progress.ran.clear()
        self._rest_after_forward(watched=watched)

    def end_outermost_forward(self, *, watched: bool) -> None:
        """Show the sharded parameters again, see [Note: Unsharded until the forward ends]."""
        self.progress.ran.clear()
        if self.resting and not self.progress.held:
            self.progress.kept |= watched  # whether or not its own outputs are: others may have read its parameters
            (self.use_sharded if self.progress.kept else self.reshard)()

    def _rest_after_forward(self, *, watched: bool) -> None:
        if self.progress.held:
            return
        setting = self.reshards_after_forward
        in_backward = hooks.current_backward() != hooks.NO_BACKWARD
        if setting is False or in_backward:
            if self.attached().defers_to_end(self):
                return
            self.progress.kept |= watched or in_backward
            (self.use_sharded if self.progress.kept else self.reshard)()
        else:
            self.reshard(near=setting if watched and setting is not True else 0)

    @property
    def reshards_after_forward(self) -> bool | int:
        """The setting, with None resolved: all units reshard but the root and what comes first in backward."""
        if self.settings.reshard_after_forward is not None:
            return self.settings.reshard_after_forward
        schedule = self.attached()
        return schedule.root() is not self and self.ref not in (schedule.ahead.turn or ())

    # ---------------------------------------------------------------- backward

    def pre_backward(self) -> None:
        """The gradient of an output is there: gather for the unit's own backward."""
        self.check_not_summoned("run backward")
        if self.phase is Phase.BACKWARD:
            return
        schedule = self.attached()
        schedule.begin_backward()
        self._move(Phase.BACKWARD)
        if self.settings.unshard_in_backward:
            self.use_full()
        schedule.started_backward(self)

    def pre_double_backward(self) -> None:
        """Unshard for the graph of gradients of the unit's inputs, see [Note: Double backward]."""
        self.pre_backward()
        self.progress.in_double_backward = self.phase is Phase.BACKWARD

    def gradient_arrived(self) -> None:
        """Have the gradient of an unsharded parameter reduced although no pre-backward hook of an output has run."""
        if self.phase is Phase.BACKWARD:
            return
        schedule = self.attached()
        schedule.begin_backward()
        self.progress.unreduced = True
        self.progress.encloses |= self.phase is Phase.FORWARD
        self.gradients.note_trainable()

    def post_backward(self) -> None:
        """The gradients of the inputs of one call are complete."""
        progress = self.progress
        if self.phase is not Phase.BACKWARD or progress.in_double_backward:
            return
        if progress.open_ended or (len(progress.calls) > 1 and any(call.still_to_run() for call in progress.calls)):
            # Autograd adds up a parameter's gradients over all calls first. Until then others may compute.
            schedule = self.attached()
            if schedule.comes_next_in_backward(self):
                schedule.started_backward(self)
            else:
                progress.unreduced = True
                self.gradients.note_trainable()
                self._move(Phase.RESTING)
                self._reshard_after_backward()
            return
        self.finish_backward()

    def end_backward(self, *, ran: bool) -> None:
        """The whole backward pass is over; ``ran``: it may have come to parameters without the unit being told."""
        settings, progress = self.settings, self.progress
        if (ran or progress.unreduced) and not settings.requires_gradient_sync:
            progress.unreduced = True
            self.gradients.keep()
        if self.phase is Phase.BACKWARD:
            self.finish_backward()
        elif settings.requires_gradient_sync and (
            progress.unreduced
            or ran
            or (settings.requires_all_reduce and self.gradients.partial)
            or (settings.reduction.zeros_for_missing and not progress.reduced)
        ):
            # This backward did not touch the unit, but one without sync did, or its own had no clear end.
            progress.open_ended = False
            self._reduce()
        progress.reduced = progress.in_double_backward = False

    def finish_backward(self) -> None:
        """Reduce the gradients (or keep them for the next microbatch) and free the full parameters."""
        progress = self.progress
        progress.open_ended = False
        self._reshard_after_backward()  # before memory for the reduction is taken
        if self.settings.requires_gradient_sync:
            self._reduce()
        else:
            progress.unreduced = True
            self.gradients.keep()
        self._move(Phase.RESTING)
        if self.settings.backward_order == "after":
            self.attached().prefetch_backward()

    def _reshard_after_backward(self) -> None:
        if not self.progress.held:
            self.use_sharded()
            if self.attached().creates_graph:  # whose backward is to come
                self.progress.kept = True
            elif self.settings.reshard_after_backward:
                self.reshard()

    def synchronize(self) -> None:
        """Reduce what microbatches without sync have left, over all axes."""
        if self.progress.unreduced or self.gradients.partial:
            self._reduce(all_reduce=True)

    def _reduce(self, *, all_reduce: bool | None = None) -> None:
        self.progress.unreduced, self.progress.reduced = False, True
        all_reduce = self.settings.requires_all_reduce if all_reduce is None else all_reduce
        self.attached().make_room(self)
        self.attached().reduce(self, self.gradients.begin_reduction(self.settings.reduction, all_reduce=all_reduce))

    def drop_gradients(self) -> None:
        """Forget gradients that were not reduced yet."""
        self.progress.unreduced = False
        self.gradients.drop_pending()

    # ---------------------------------------------------------------- recovery and moves

    def reset(self, *, drop_gradients: bool) -> None:
        """Forget whatever was going on, after a failure."""
        old = self.progress
        self.phase = Phase.RESTING
        self.progress = Progress(held=old.held, unreduced=old.unreduced, summoned=old.summoned, copied=old.copied)
        self.release_after_failure()
        if drop_gradients:
            self.drop_gradients()

    def settle(self) -> None:
        """If a backward raised and nothing ran since, return to rest now."""
        if self.schedule is not None:
            self.schedule.settle()

    def release_after_failure(self) -> None:
        """Free the full parameters although a gather may never arrive; those that a user holds stay if they have."""
        if self.progress.summoned or (self.progress.held and self.registration.full):
            return
        self.use_sharded()
        for bucket in self.buckets:
            bucket.forget_gather()

    def attached(self) -> Schedule:
        """The schedule; a unit that is run before it has one becomes the root of its own module tree."""
        if self.schedule is None:
            self.schedule = Schedule.attach(self)
        return self.schedule

    def check_not_summoned(self, what: str) -> None:
        """Raise PhaseError if the modules hold copies of the full parameters."""
        if self.progress.summoned:
            raise PhaseError(f"unit {self.name or '<root>'!r} was {what} inside summon_full_params; do that after it")

    def _move(self, phase: Phase) -> None:
        if phase not in LEGAL_MOVES[self.phase]:
            raise PhaseError(
                f"unit {self.name or '<root>'!r} cannot go from {self.phase.value} to {phase.value}; was its "
                "backward run from inside its own forward?"
            )
        self.phase = phase
