"""One unit: the parameters that are all-gathered and reduced together, their buckets, and the states they are in.

A unit knows nothing of the runtime that drives it (``fullshard.engine.runtime``).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from fullshard.comm.mesh import ShardMesh
from fullshard.engine import hooks
from fullshard.engine.buckets.all_gather import BucketAllGather
from fullshard.engine.buckets.base import Bucket
from fullshard.engine.containers import cast_tensors
from fullshard.engine.parameters.registration import Registration
from fullshard.engine.parameters.sharded import ShardedParameter, value_of
from fullshard.engine.reduction.unit_gradients import UnitGradients
from fullshard.engine.settings import UnitPolicy, UnitSettings
from fullshard.engine.states import InnerBackward, OpenForward, ParameterState, Phase
from fullshard.errors import FullshardError, PhaseError
from fullshard.ranks.watchdog import watch

__all__ = ["Unit", "unit_owning"]

_owners: weakref.WeakKeyDictionary[ShardedParameter, weakref.ref[Unit]] = weakref.WeakKeyDictionary()


class Unit:
    """Parameters that are all-gathered together before they are computed with, and reduced together after.

    The counterpart of FSDP2's ``FSDPParamGroup`` and ``FSDPState``. Buckets divide it by mesh and dtype.
    Owned by its modules, which it refers to weakly.
    """

    name: str  # FQN of the (first) module below the root; "" for the root itself
    modules: list[weakref.ref[nn.Module]]
    mesh: ShardMesh
    policy: UnitPolicy
    settings: UnitSettings
    parameters: list[ShardedParameter]
    buckets: list[Bucket]
    registration: Registration
    gradients: UnitGradients
    tiny: bool  # too small for a collective of its own, see [Note: Order and prefetch]
    ref: weakref.ref[Unit]

    phase: Phase
    parameter_state: ParameterState
    open_forwards: list[OpenForward]  # the unit may call itself
    calls: list[hooks.Call]  # forwards whose backward may come
    awaits_backward: bool  # from the end of a forward to the beginning of its backward
    modules_run: dict[int, bool]  # by id, of several modules: ran in this forward; True if a backward may come
    compared: bool  # its parameters, with other ranks'
    numbers: dict[tuple[str, int], int]  # as of ``UnitName``
    user_unshards: int  # blocks of `unsharded` that the unit is in
    shown: list[int] | None  # versions of the unsharded parameters when a forward left them to users
    parts_shown: dict[int, torch.Tensor]  # copies of this rank's parts of them, by the ids of parameters

    def __init__(
        self,
        modules: Sequence[nn.Module],
        mesh: ShardMesh,
        parameters: Sequence[ShardedParameter],
        policy: UnitPolicy,
        settings: UnitSettings,
    ) -> None:
        self.name, self.modules, self.mesh = "", [weakref.ref(module) for module in modules], mesh
        self.policy, self.settings, self.ref = policy, settings, weakref.ref(self)
        self.phase, self.parameter_state, self.gradients = Phase.IDLE, ParameterState.SHARDED, UnitGradients()
        self.open_forwards, self.calls, self.modules_run, self.compared, self.numbers = [], [], {}, False, {}
        self.awaits_backward, self.user_unshards, self.shown, self.parts_shown = False, 0, None, {}
        self.parameters, self.buckets = list(parameters), []
        sizes = [parameter.shape.numel * parameter.sharded.dtype.itemsize for parameter in self.parameters]
        for parameter, offloaded in zip(self.parameters, policy.offloaded(sizes), strict=True):
            parameter.owned, parameter.offloaded = True, offloaded
            _owners[parameter] = self.ref
        self.build_buckets()
        watch()

    @property
    def has_leaf_modules(self) -> bool:
        """True if one of its modules has no submodules."""
        return not all(module is None or any(module.children()) for module in (ref() for ref in self.modules))

    @property
    def described(self) -> str:
        """Name of the unit for errors."""
        return repr(self.name or "<root>")

    # ---------------------------------------------------------------- states

    @property
    def is_idle(self) -> bool:
        """True if neither a forward nor a backward of the unit runs."""
        return self.phase is Phase.IDLE

    @property
    def is_unsharded(self) -> bool:
        """True if the unsharded parameters have memory: all-gathered, or their all-gather is in flight."""
        return self.parameter_state.is_unsharded

    @property
    def is_kept(self) -> bool:
        """True if the parameters are unsharded since a forward, for the backward that may come."""
        return self.parameter_state is ParameterState.KEPT

    @property
    def is_summoned(self) -> bool:
        """True if the modules hold copies of the unsharded parameters."""
        return self.parameter_state is ParameterState.SUMMONED

    @property
    def is_current(self) -> bool:
        """True if the unsharded parameters are there and hold what the shards hold, as far as steps are seen."""
        return self.parameter_state in (ParameterState.UNSHARDED, ParameterState.KEPT)

    def enter_phase(self, phase: Phase) -> None:
        """Move to another phase.

        Raises:
            PhaseError: If that is not a legal move.
        """
        if phase not in self.phase.legal_moves:
            raise PhaseError(
                f"unit {self.described} cannot change from phase {self.phase.value} to {phase.value}; was backward() "
                "called inside its own forward()?"
            )
        self.phase = phase

    def _move_parameters(self, state: ParameterState) -> None:
        if state is self.parameter_state:
            return
        assert state in self.parameter_state.legal_moves, f"{self.parameter_state} -> {state} in {self.described}"
        self.parameter_state = state

    def mark_out_of_date(self) -> None:
        """Have the next use all-gather anew: an optimizer has stepped the shards."""
        if self.is_unsharded:
            self._move_parameters(ParameterState.OUT_OF_DATE)

    def mark_summoned(self, summoned: bool) -> None:
        """Note that the modules hold copies of the unsharded parameters, or no longer do."""
        self._move_parameters(ParameterState.SUMMONED if summoned else ParameterState.SHARDED)

    def check_not_summoned(self, what: str) -> None:
        """Raise PhaseError if the modules hold copies of the unsharded parameters."""
        if self.parameter_state is ParameterState.SUMMONED:
            raise PhaseError(f"unit {self.described} cannot {what} inside summon_full_params; do it after the block")

    # ---------------------------------------------------------------- storage

    def build_buckets(self) -> None:
        """(Re)build the buckets from the parameters that the modules hold now, unsharded or sharded.

        Raises:
            TypeError, ValueError: If a tensor subclass has half of the methods of [Note: Extensions], or cannot be cut.
        """
        with torch.inference_mode(False), torch.no_grad():  # in this order: the first switches grad on
            groups: dict[tuple[object, ...], list[ShardedParameter]] = {}
            for parameter, dtype in zip(self.parameters, self.policy.gradient_dtypes(self.parameters), strict=True):
                parameter.drop_unsharded()
                parameter.reduced_by = dtype
                groups.setdefault(self.policy.form.group(parameter), []).append(parameter)
            self.buckets = [self._bucket(group) for group in groups.values()]
        self.keep_storage(self.settings.keep_unsharded_storage)
        self.registration = self.policy.form.registration(self.parameters, self.buckets)
        self.gradients.parameters, self.gradients.buckets = self.parameters, self.buckets
        tiny_bytes = max(self.mesh.transport.tiny_bytes, self.mesh.replica_transport.tiny_bytes)
        self.tiny = self.unsharded_bytes <= tiny_bytes
        self.registration.use_sharded()

    def _bucket(self, parameters: list[ShardedParameter]) -> Bucket:
        mesh = self.settings.communicating(parameters[0].placement.mesh)
        first = parameters[0]
        storage = self.policy.storage(
            value_of(first.sharded).dtype, first.param_dtype, first.reduced_by, offload=first.offloaded
        )
        return self.policy.form.bucket(parameters, mesh, storage, self.policy.precision)

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of all its parameters when they are unsharded."""
        return sum(bucket.unsharded_bytes for bucket in self.buckets)

    def change_transports(self) -> None:
        """Rebuild all-gathers and reduction plans for the transports that the settings ask for now.

        Raises:
            FullshardError: If gradients wait for their all-reduce: where they lie depends on how they were reduced.
        """
        self.gradients.check_all_reduced(self.described)
        self.reshard()
        with torch.inference_mode(False), torch.no_grad():
            for bucket in self.buckets:
                bucket.change_transports(self.settings.communicating(bucket.parameters[0].placement.mesh))

    def rebuild(self, kept: list[ShardedParameter] | None = None) -> None:
        """Build the buckets anew from the present shards, because something that they depend on has changed.

        Args:
            kept: The parameters that the unit still has; None: all.

        Raises:
            FullshardError: If gradients wait for a later microbatch: they would be lost.
        """
        self.gradients.check_reduced(self.described)
        self.reshard()
        if kept is not None:
            with torch.inference_mode(False), torch.no_grad():
                for bucket in self.buckets:
                    bucket.restore()
            self.parameters = kept
        self.build_buckets()

    def write_back(self) -> None:
        """Write the values of parameters that users have replaced into the shards, see [Note: Write-back].

        Raises:
            ValueError: If a registered parameter has the wrong shape.
            FullshardError: If it is on the accelerator although the unit is offloaded.
        """
        rebuild = False
        for parameter in self.parameters:
            if parameter.is_registered():
                continue
            moved, local = not parameter.is_assigned(), parameter.local
            value = value_of(parameter.accept_replacement())
            if parameter.offloaded and value.device.type not in ("cpu", "meta"):
                raise FullshardError(
                    f"{parameter.describe()} was moved to {value.device}, but its unit offloads it to the CPU "
                    "(CPUOffloadPolicy); keep the module, and tensors that are loaded into it, on the CPU"
                )
            if moved and local.device.type != "meta":
                parameter.follow(value.device)
            rebuild |= value.dtype != local.dtype or value.device != local.device or type(value) is not type(local)
        if rebuild:
            self.rebuild()
            return
        with torch.inference_mode(False), torch.no_grad():  # in this order: the first switches grad on
            for bucket in self.buckets:
                bucket.write_back()
        self.registration.use_sharded()

    def refresh(self) -> None:
        """Write replaced parameters back, and rebuild buckets whose dtype or all-gather hooks have changed."""
        reduced_by = [parameter.reduced_by for parameter in self.parameters]
        changed = reduced_by != self.policy.gradient_dtypes(self.parameters)  # their grad_dtype was set since
        if changed or any(bucket.needs_rebuild() for bucket in self.buckets):
            self.rebuild()
        if not self.registration.is_registered():
            self.write_back()
        self._check_data()

    def _check_data(self) -> None:
        for bucket in self.buckets:
            bucket.check_data()

    # ---------------------------------------------------------------- unshard and reshard

    def prepare_unshard(self) -> list[tuple[Bucket, list[BucketAllGather]]]:
        """Prepare the all-gathers that unshard the parameters; none if they are unsharded and current."""
        self.check_not_summoned("run")
        if self.parameter_state.is_unsharded:
            unreplaced = self.shown is None or self.registration.holds_unsharded()
            if self.is_current and (unreplaced if self.registration.unsharded else self.registration.is_registered()):
                self._write_back_unsharded()
                return []
            # A forward without a backward left these behind, and its parameters were written to since.
            self.reshard()
        if not self.registration.is_registered():
            self.write_back()
        from_subgroup = hooks.in_backward()
        if not from_subgroup:
            self._check_data()
        self._move_parameters(ParameterState.UNSHARDED)
        return [
            (bucket, all_gathers) for bucket in self.buckets if (all_gathers := bucket.prepare_unshard(from_subgroup))
        ]

    def wait_for_unshard(self) -> None:
        """Wait for the all-gathers, and have the modules hold the unsharded parameters."""
        for bucket in self.buckets:
            bucket.wait_for_unshard()
        if self.parameter_state is ParameterState.KEPT:
            self._move_parameters(ParameterState.UNSHARDED)
        if self.registration.unsharded:
            for parameter in self.parameters:  # flags may have changed between two of its modules
                parameter.agree_on_requires_grad()
        else:
            self.registration.use_unsharded()

    def register_sharded(self) -> None:
        """Have the modules hold the sharded parameters; the unsharded ones stay in memory."""
        if self.registration.unsharded:
            self._write_back_unsharded()
            self.registration.use_sharded()

    def show_unsharded(self, *, before_forward: bool) -> None:
        """Leave the unsharded parameters to users after a forward: their writes reach the shards.

        Args:
            before_forward: Another forward may come next. Writes through ``.data`` count until then, which no version
                counter shows; so this rank's parts are copied, to be compared.
        """
        self.shown = [parameter.unsharded._version for parameter in self.parameters]
        self.registration.show_unsharded()
        if before_forward and self.mesh.world_size > 1 and not self.policy.offloads:
            with torch.inference_mode(False), torch.no_grad():
                for bucket in (bucket for bucket in self.buckets if bucket.has_parts):
                    for parameter in bucket.parameters:
                        part = parameter.local_part(value_of(parameter.unsharded))
                        self.parts_shown[id(parameter)] = part.clone()

    def _write_back_unsharded(self) -> None:
        """Write what users have changed in unsharded parameters since ``show_unsharded`` into the shards.

        Elements that are unchanged in the dtype of computation keep their values in the shards.

        Raises:
            FullshardError: If parameters that were all-gathered quantized were written to between forward and backward.
        """
        shown, before, self.shown, self.parts_shown = self.shown, self.parts_shown, None, {}
        if shown is None:
            return
        for parameter, version in zip(self.parameters, shown, strict=True):
            parameter.agree_on_requires_grad()
            if parameter.unsharded._version != version and id(parameter) not in before:
                if self.settings.collectives.quantization is not None:
                    raise FullshardError(
                        f"{parameter.describe()} was modified while it was unsharded by a quantized all-gather; call "
                        "reshard() on its module before you modify it"
                    )
                before[id(parameter)] = parameter.local
        with torch.inference_mode(False), torch.no_grad():
            for bucket in self.buckets:
                for parameter in [p for p in bucket.parameters if id(p) in before]:
                    if not bucket.has_parts:
                        bucket.copies()  # raises an error that says why values cannot be written back
                    part, local = parameter.local_part(value_of(parameter.unsharded)), parameter.local
                    changed = part != before[id(parameter)].to(part)
                    local.copy_(torch.where(changed.to(local.device), part.to(local), local))

    def keep(self) -> None:
        """Keep the unsharded parameters until backward, or until the next forward all-gathers anew."""
        if self.parameter_state is ParameterState.UNSHARDED:
            self._move_parameters(ParameterState.KEPT)

    def keep_for_backward(self) -> None:
        """Keep the unsharded parameters in memory; the modules hold the sharded ones."""
        self.register_sharded()
        self.keep()

    def reshard(self, subgroup: int = 0) -> None:
        """Register the sharded parameters and free the unsharded ones.

        Args:
            subgroup: Keep this rank's part of them over so many consecutive ranks, for backward to all-gather from.
        """
        self.register_sharded()
        for bucket in self.buckets:
            if subgroup:
                bucket.reshard_to_subgroup(subgroup)
            bucket.reshard()
            if not subgroup:
                bucket.free_subgroup_shard()  # only now: an all-gather that was in flight has sent from it
        if self.parameter_state is not ParameterState.SUMMONED:
            self._move_parameters(ParameterState.SHARDED)

    def keep_storage(self, keep: bool) -> None:
        """Set whether the memory of unsharded parameters stays when they are resharded, see ``UnitSettings``."""
        self.settings.keep_unsharded_storage = keep
        for bucket in self.buckets:
            bucket.keep_storage(keep)

    def free_after_failure(self) -> None:
        """Free the unsharded parameters although an all-gather may never arrive; those that a user holds stay."""
        if self.parameter_state is ParameterState.SUMMONED or (self.user_unshards and self.registration.unsharded):
            return
        self.register_sharded()
        for bucket in self.buckets:
            bucket.abandon_unshard()
        self._move_parameters(ParameterState.SHARDED)

    # ---------------------------------------------------------------- forward

    def register_post_backward(
        self, events: hooks.BackwardEvents, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Have the end of the backward of this forward seen, where an input requires a gradient."""
        args, kwargs, call = hooks.register_post_backward(events, args, kwargs)
        self.open_forwards[-1].call = call
        if call is not None:
            self.calls = [each for each in self.calls if each.alive]
            self.calls.append(call)
        return args, kwargs

    def cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Cast floating-point inputs to the dtype of computation."""
        precision = self.policy.precision
        if precision.param_dtype is None or not precision.cast_forward_inputs:
            return args, kwargs
        return cast("tuple[Any, Any]", cast_tensors(precision.param_dtype, (args, kwargs)))

    def cast_output(self, output: Any) -> Any:
        """Cast floating-point outputs as the policy says."""
        dtype = self.policy.precision.output_dtype
        return output if dtype is None else cast_tensors(dtype, output)

    def expect_backward(self, forward: OpenForward, events: hooks.BackwardEvents) -> None:
        """Note that a forward has returned something that has a backward, which calls ``events``."""
        if forward.call is None:
            self.calls = [call for call in self.calls if call.alive]
            self.calls.append(hooks.Call(None, events))

    @property
    def inner_backward(self) -> InnerBackward:
        """The backward pass inside of its open forward."""
        return self.open_forwards[0].inner_backward if self.open_forwards else InnerBackward.NONE

    # ---------------------------------------------------------------- gradients

    @property
    def has_calls_to_run(self) -> bool:
        """True if the backward pass that runs now may come to another call of the unit."""
        return len(self.calls) > 1 and any(call.still_to_run() for call in self.calls)

    def end_calls(self) -> None:
        """Forget calls whose backward only the end of the pass ends: it is over."""
        self.calls = [call for call in self.calls if not call.ended_with_pass]

    # ---------------------------------------------------------------- recovery

    def abandon_pass(self) -> None:
        """End a backward pass that has raised."""
        self.gradients.end_pass()
        for forward in self.open_forwards:
            forward.inner_backward = InnerBackward.NONE

    def reset(self) -> None:
        """After a failure, return to idle, or to its own forward if that is open, and forget what else was going on."""
        self.abandon_pass()
        self.awaits_backward, self.calls = False, [f.call for f in self.open_forwards if f.call is not None]
        if self.open_forwards:
            self.phase = Phase.FORWARD
            return
        self.phase = Phase.IDLE
        self.modules_run.clear()
        self.free_after_failure()


def unit_owning(parameter: ShardedParameter) -> Unit | None:
    """Return the unit that has the parameter; None if it was given to no unit yet, or that is gone."""
    ref = _owners.get(parameter)
    return None if ref is None else ref()
