"""The driver of a step: one runtime per root module says what happens to every unit below it, and when.

The front ends call it around the forward of every sharded module (``composable/fsdp_module.py``, ``wrapper/fsdp.py``),
autograd calls it through ``hooks.py``. It is made lazily, at the first forward: ``runtime_of``.

Read ``Runtime.pre_forward``, ``Runtime.post_forward``, ``Runtime.pre_backward``,
``Runtime.post_backward`` and ``Runtime.finish_backward`` from top to bottom: they are what happens in a step,
in this order. All that they call lies below: ``prefetch`` chooses what to unshard before its turn,
a ``Unit`` unshards, reshards and keeps its states, and the reduction queue takes unsharded
gradients to sharded ``.grad``.

[Note: Steps inside a forward]
Some programs run backward, and the optimizer, inside of a module's own forward (Lightning's manual optimization does).
Units whose forward is open then have no output yet whose gradient could begin their backward. A nested unit tells: if
the pass comes to it and will accumulate into its parameters (gradients of inputs do not), all units whose forward is
open are reduced at the pass's end, whatever gradients this rank has in them. (All ranks must agree on which units take
part.) After the step they are unsharded anew, for the rest of their forward. Where no nested unit takes part,
post-accumulate hooks tell the unit.

[Note: Registered parameters]
Modules hold what they hold under torch's FSDP. A unit shows its unsharded parameters while one of its modules runs. One
that the user keeps unsharded after forward, as the root by default, goes on to show them until its backward has ended,
its parameters are stepped, or it is resharded: a loss computed after the forward may use its modules and weights. Every
other unit shows the sharded ones from the end of its forward, also where the engine keeps the memory for backward. What
users do to the parameters that they see counts: flags, and between forwards new values and new parameters.

[Note: Units of several modules]
A unit of several modules is unsharded when the first of them runs, and resharded when all have run, or as the outermost
forward ends. Between norm and head, a model may read the head's weight without calling it. So a unit with a module that
has no submodules is unsharded as soon as a backward comes to the output of that forward. (Of blocks, only what is
inside of them reads the weights.) A module of the unit that is itself the outermost one (a head that is called for each
chunk of a loss) leaves it unsharded until backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard.engine import hooks
from fullshard.engine.buckets.all_gather import issue_all_gathers
from fullshard.engine.containers import map_tensors
from fullshard.engine.ownership import check_owned, nested_units, rename
from fullshard.engine.parameters.sharded import ShardedParameter
from fullshard.engine.prefetch import Prefetcher
from fullshard.engine.reduction.queue import ReductionQueue
from fullshard.engine.settings import CommStreams
from fullshard.engine.states import GradientState, InnerBackward, OpenForward, Phase
from fullshard.engine.unit import Unit
from fullshard.errors import FullshardError, PhaseError, UnmaterializedParameterError
from fullshard.memory import Event, input_on
from fullshard.profiling import profiled
from fullshard.progress import PROGRESS, StepCount
from fullshard.ranks.groups import data_parallel_groups
from fullshard.ranks.watchdog import watch

__all__ = [
    "Runtime",
    "current_runtime",
    "each_runtime",
    "ensure_idle",
    "last_forward_first",
    "live_roots",
    "runtime_of",
    "take_parameters",
]

_roots: weakref.WeakSet[Unit] = weakref.WeakSet()  # that have run as roots
_runtimes: weakref.WeakKeyDictionary[Unit, Runtime] = weakref.WeakKeyDictionary()


class Runtime:
    """Drives the units of one root, which it refers to weakly."""

    root: weakref.ref[Unit]
    comm_streams: CommStreams
    prefetcher: Prefetcher
    is_last_backward: bool  # of several before an optimizer step, see set_is_last_backward
    finalization: object | None  # handle of an asynchronous finalize_backward that was not waited for yet
    steps: StepCount
    _units: list[weakref.ref[Unit]]  # in the order of modules()
    _open_forwards: int  # of any unit
    _root_runs: bool  # the outermost open forward is the root's
    backward: hooks.BackwardPass | None  # that has begun and not ended
    reached: bool  # backward has entered a module, and not only code after the forward
    _last_in_backward: weakref.ref[Unit] | None  # whose backward computes now
    _of_several_modules: list[weakref.ref[Unit]]
    _read: list[Unit]  # those of them whose parameters other modules of the outermost forward may have read
    reductions: ReductionQueue
    _unshard_after: Event | None  # what all-gathers wait for instead of all computation, as the root's forward begins

    def __init__(self, units: list[Unit]) -> None:
        self.root, self._units = units[0].ref, [unit.ref for unit in units]
        shared = next((unit.settings.comm_streams for unit in units if unit.settings.comm_streams is not None), None)
        self.comm_streams = shared if shared is not None else CommStreams.on(units[0].mesh.device)
        self.prefetcher, self.reductions = Prefetcher(units), ReductionQueue()
        self._of_several_modules, self._read = [unit.ref for unit in units if len(unit.modules) > 1], []
        self.steps = StepCount()
        self.is_last_backward, self._root_runs, self._open_forwards = True, False, 0
        self.finalization = None
        self.backward, self.reached, self._unshard_after = None, False, None
        self._last_in_backward = None

    # ---------------------------------------------------------------- forward

    def pre_forward(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Before a module of ``unit`` computes: unshard it, prefetch the next unit, and watch and cast the inputs.

        Returns:
            What to call the module with: ``args`` and ``kwargs``.
        """
        unit.check_not_summoned("run")
        if self.has_failed or self._open_forwards == 0:
            with hooks.outside_transforms():
                self._enter_forward(unit)
        PROGRESS.enter("forward", unit.name)
        unit.open_forwards.append(OpenForward(unit.phase, hooks.nodes_made()))
        self._open_forwards += 1
        try:
            if not hooks.in_backward():
                PROGRESS.order.append(unit.name)
            if len(unit.open_forwards) == 1:  # else it calls itself, and is unsharded
                with hooks.outside_transforms():
                    if self._open_forwards == 1 or not self._root_runs:  # else what is kept is of this forward
                        self._reshard_if_left_over(unit)
                    unit.enter_phase(Phase.FORWARD)
                    self.unshard(unit)
                    self._prefetch_forward(unit)
                if self.root() is unit and unit.mesh.device.type != "cpu":
                    args, kwargs = map_tensors(lambda tensor: input_on(unit.mesh.device, tensor), (args, kwargs))
                if torch.is_grad_enabled():
                    args, kwargs = unit.register_post_backward(_BackwardOf(unit), args, kwargs)
            args, kwargs = unit.cast_inputs(args, kwargs)
            if unit.settings.around_forward is not None:
                unit.open_forwards[-1].enter(unit.settings.around_forward(unit))
        except BaseException:
            self.abort_forward(unit)
            raise
        return args, kwargs

    def post_forward(self, unit: Unit, module: nn.Module, output: Any) -> Any:
        """After ``module`` has computed: cast and watch the outputs, and reshard the unit as its settings say."""
        forward, events, has_backward = unit.open_forwards[-1], _BackwardOf(unit), False
        try:
            forward.leave()
            output = unit.cast_output(output)
            if torch.is_grad_enabled():
                output, has_backward = hooks.register_pre_backward(events, output, forward.first_node)
            if len(unit.open_forwards) == 1:
                with hooks.outside_transforms():
                    self._end_forward(unit, module, forward, events if has_backward else None)
        except BaseException:
            self.abort_forward(unit)
            raise
        unit.open_forwards.pop()
        self._open_forwards -= 1
        if self._open_forwards == 0 and not hooks.in_backward():
            with hooks.outside_transforms():
                read = self._leave_forward(unit, has_backward=has_backward)
            for each in read:
                output, _ = hooks.register_pre_backward(_BackwardOf(each), output, forward.first_node)
        return output

    def abort_forward(self, unit: Unit) -> None:
        """Clean up after a forward that raised, so that the next one starts from a clean state."""
        forward = unit.open_forwards.pop()
        if not hooks.in_backward():  # a recomputation may end early, by an exception
            PROGRESS.failed(f"forward of {unit.described}")
        try:
            forward.leave()
            if not unit.open_forwards:
                unit.modules_run.clear()
                unit.phase = forward.resumes
                if not unit.phase.is_backward and not unit.user_unshards:
                    with hooks.outside_transforms():
                        unit.reshard()  # whatever the settings say: its all-gather may have failed
        except Exception:  # of an all-gather in flight, maybe what the forward itself has raised
            unit.free_after_failure()
        finally:
            self._open_forwards -= 1
            if self._open_forwards == 0 and not hooks.in_backward():
                self._forget_forward()

    def _enter_forward(self, unit: Unit) -> None:
        """Begin a step, if this is the outermost forward: recover from a failure, and read what the user has set."""
        if self.has_failed:
            self.recover()
        if self._open_forwards == 0 and not hooks.in_backward():
            self.check_finalized("run")
            PROGRESS.begin_forward(self.steps)
            self._root_runs = self.root() is unit
            self.prefetcher.begin_forward()
            self._unshard_after, self._read = None, []  # a forward that raised may have left some
            if self._root_runs:
                for left_over in self.units():
                    left_over.modules_run.clear()
                    self._reshard_if_left_over(left_over)
                self._unshard_after, unit.settings.post_optim_event = unit.settings.post_optim_event, None

    def _prefetch_forward(self, unit: Unit) -> None:
        """Issue the all-gather of what runs after ``unit``, which is about to compute."""
        if hooks.in_backward():
            return  # recomputation of checkpointed activations; the backward prefetches
        self._prefetch(self.prefetcher.next_in_forward(unit, of_root=self._root_runs))
        self._unshard_after = None
        self.prefetcher.order.record(unit)

    def _end_forward(
        self, unit: Unit, module: nn.Module, forward: OpenForward, events: hooks.BackwardEvents | None
    ) -> None:
        """Reshard a unit that has computed, or keep it for backward, and remember the order for backward."""
        unit.enter_phase(forward.resumes)
        if not unit.phase.is_backward:  # else recomputed inside of its own backward, which needs it next
            self._reshard_when_all_have_run(unit, module, has_backward=events is not None)
        if events is None:
            return
        unit.expect_backward(forward, events)
        if not hooks.in_backward():
            if unit.awaits_backward:
                unit.gradients.accumulate_in_reduce_dtype()
            unit.awaits_backward = True
            self.prefetcher.forward_ended(unit)

    def _forget_forward(self) -> None:
        """Free what the outermost forward, which raised, has left unsharded."""
        self.steps.forward_failed()
        self.prefetcher.forget()
        for each in self.units():
            each.modules_run.clear()
            if each.is_unsharded:
                each.free_after_failure()

    def _leave_forward(self, unit: Unit, *, has_backward: bool) -> list[Unit]:
        """End the outermost forward.

        Args:
            unit: Unit whose forward ends.
            has_backward: Its output has one.

        Returns:
            Units of several modules, to be unsharded as a backward comes to the output.
        """
        PROGRESS.leave("forward")
        for incomplete in filter(None, (ref() for ref in self._of_several_modules)):
            if incomplete.modules_run and incomplete is not unit:
                self._all_have_run(incomplete, has_backward=has_backward)
                self._read.append(incomplete)
        if self._root_runs:
            self.prefetcher.end_forward()
        for guessed_wrong in self.prefetcher.units():
            guessed_wrong.reshard()
        self.prefetcher.clear()
        if not has_backward:
            self._release_host_memory()
        read, self._read = self._read, []
        return read if has_backward else []

    # ---------------------------------------------------------------- unshard

    def unshard(self, unit: Unit) -> None:
        """All-gather the parameters unless they were prefetched, wait, and have the modules hold them."""
        if not (unit.is_current and unit in self.prefetcher):  # else it was looked at as it was prefetched
            self.begin_unshard([unit])
        self.prefetcher.used(unit)
        with profiled("wait_for_all_gather", (unit.name,)):
            unit.wait_for_unshard()

    def begin_unshard(self, units: list[Unit]) -> None:
        """Issue the all-gathers of ``units`` in one launch, as far as they are not unsharded."""
        try:
            begun = [
                (bucket.launch_name(unit.name, unit.numbers), bucket, all_gathers)
                for unit in units
                for bucket, all_gathers in unit.prepare_unshard()
            ]
            if not begun:
                return
            all_gathers = [(name, each) for name, _, of_bucket in begun for each in of_bucket]
            with profiled("all_gather", (name for name, _, _ in begun)):
                work = issue_all_gathers(all_gathers, self.comm_streams.all_gather, self._unshard_after)
        except BaseException:
            for unit in units:
                self.prefetcher.used(unit)
                unit.free_after_failure()
            raise
        for _, bucket, _ in begun:
            bucket.issued(work)

    def _prefetch(self, launches: Iterable[list[Unit]]) -> None:
        for units in launches:
            self.begin_unshard(units)

    # ---------------------------------------------------------------- reshard after forward

    def _reshard_if_left_over(self, unit: Unit) -> None:
        """Reshard what an earlier forward has kept without being asked to: shards may have been written since."""
        if unit.is_kept and unit.is_idle and not unit.user_unshards:
            unit.reshard()

    def _reshard_when_all_have_run(self, unit: Unit, module: nn.Module, *, has_backward: bool) -> None:
        """Reshard once the last of the unit's modules has run, see [Note: Units of several modules]."""
        if len(unit.modules) > 1:
            unit.modules_run[id(module)] = has_backward or unit.modules_run.get(id(module), False)
            if len(unit.modules_run) < len(unit.modules):
                return
        self._all_have_run(unit, has_backward=has_backward)

    def _all_have_run(self, unit: Unit, *, has_backward: bool) -> None:
        if unit.modules_run:
            has_backward |= any(unit.modules_run.values())
            unit.modules_run.clear()
            if unit.has_leaf_modules:
                self._read.append(unit)
        self._reshard_after_forward(unit, has_backward=has_backward)

    def _reshard_after_forward(self, unit: Unit, *, has_backward: bool) -> None:
        """Reshard, keep this rank's part for a subgroup, or stay unsharded, as ``reshard_after_forward`` says."""
        if unit.user_unshards:
            return
        setting = unit.settings.reshard_after_forward
        if hooks.in_backward():  # recomputed for the backward of a module around it, and so needed next
            unit.keep()
        elif setting is False or (setting is None and unit.ref is self.root):
            shown = unit.policy.form.shows_kept(for_backward=has_backward and setting is False)
            shown &= unit.inner_backward is not InnerBackward.ENDED
            if not shown and not has_backward:
                unit.reshard()
            elif setting is None or (unit.policy.form.has_flat_parameters and not has_backward):
                unit.keep()  # users see the shards, and may write to them before the next forward
            if shown:
                unit.show_unsharded(before_forward=setting is None and not has_backward)
            else:
                unit.register_sharded()
        elif setting is None and has_backward and self.prefetcher.is_kept_by_default(unit):
            unit.keep_for_backward()
        else:
            unit.reshard(subgroup=int(setting) if setting and setting is not True and has_backward else 0)

    # ---------------------------------------------------------------- backward

    def pre_backward(self, unit: Unit) -> None:
        """Before autograd computes the backward of ``unit``: unshard it, and prefetch the unit before it."""
        unit.check_not_summoned("run backward")
        self._begin_pass()
        inner = self._last_in_backward() if self._last_in_backward is not None else None
        if inner is None or inner is unit or not (inner.phase.is_backward and _is_within(inner, unit)):
            self._last_in_backward = unit.ref  # else it returns what the inner one has returned, which computes first
            PROGRESS.enter("backward", unit.name)
        self.reached |= not unit.modules_run
        if unit.phase.is_backward:
            return
        unit.enter_phase(Phase.BACKWARD)
        if unit.settings.unshard_in_backward:
            self.unshard(unit)
        self._begin_call(unit)

    def post_backward(self, unit: Unit) -> None:
        """After autograd has computed the gradients of the inputs of one call: reshard, and begin the reduction.

        The reduced gradients become ``.grad`` when the queue makes room for those of a later unit, or at the end of
        the pass.
        """
        if unit.phase is not Phase.BACKWARD:
            return  # in a double backward only the end of the pass tells
        if not unit.has_calls_to_run:
            self.reshard_and_reduce(unit)
        elif self.prefetcher.comes_next_in_backward(unit):
            self._begin_call(unit)  # autograd goes on with another call of it
        else:  # autograd adds up a parameter's gradients over all calls; others may compute until then
            unit.gradients.expect_more()
            unit.enter_phase(Phase.IDLE)
            if len(unit.modules) == 1:
                self._reshard_after_backward(unit, creates_graph=self.creates_graph)

    def finish_backward(self) -> None:
        """After autograd is through: reduce what is left, wait for the gradients, and return to idle."""
        PROGRESS.enter("the end of backward", None)
        try:
            self._finish_backward()
        except BaseException:  # of a user's hook on gradients, or of a collective
            self.recover()
            raise
        PROGRESS.leave("backward")

    def _finish_backward(self) -> None:
        left = _left_without_backward(self)
        for unit in last_forward_first(self):
            self.finish_backward_of(unit, ran=unit in left or unit.inner_backward is InnerBackward.RUNS)
            if unit.inner_backward is InnerBackward.RUNS:
                unit.open_forwards[0].inner_backward = InnerBackward.ENDED
        creates_graph, self.backward = self.creates_graph, None
        self.prefetcher.passed_by.clear()
        root = self.root()
        if not self.is_last_backward or (root is not None and root.settings.finalized_by_caller):
            self.reductions.accumulate_read_by_host()
            return
        self.end_backwards(creates_graph=creates_graph)

    def end_backwards(self, *, creates_graph: bool = False) -> None:
        """After the last backward before an optimizer step: wait for the gradients, and free what is left."""
        self.reductions.finish(self.comm_streams)
        if self._open_forwards or not self.reached:  # gradients taken inside of a forward, or after one
            return
        if self.prefetcher.units():  # in vain, for a forward whose backward did not come
            self._release_host_memory()
        self.prefetcher.clear()
        self.prefetcher.ended.clear()
        for unit in self.units():
            unit.modules_run.clear()
            if unit.is_unsharded and unit.is_idle:  # recomputed after its own backward, or without one
                self._reshard_after_backward(unit, creates_graph=creates_graph)

    def check_finalized(self, what: str) -> None:
        """Raise PhaseError if a gradient reduction is in flight that the caller has to wait for."""
        if self.finalization is not None:
            raise PhaseError(
                f"cannot {what}: the gradient reduction of finalize_backward(async_op=True) is in flight; call wait() "
                "of its handle first"
            )

    def reshard_and_reduce(self, unit: Unit) -> None:
        """End the backward of ``unit``: free its unsharded parameters, and begin to reduce its gradients."""
        unit.end_calls()
        self._reshard_after_backward(unit, creates_graph=self.creates_graph)  # before memory for the reduction is taken
        if unit.settings.requires_gradient_sync:
            self.reduce(unit)
        else:
            unit.gradients.keep()
        unit.enter_phase(Phase.IDLE)
        if unit.settings.backward_order == "after":
            self._prefetch(self.prefetcher.last_ended())

    def pre_double_backward(self, unit: Unit) -> None:
        """Before autograd computes with the graph of gradients of the unit's inputs, see [Note: Double backward]."""
        self.pre_backward(unit)
        if unit.phase is Phase.BACKWARD:
            unit.enter_phase(Phase.DOUBLE_BACKWARD)

    def gradient_accumulated(self, unit: Unit) -> None:
        """Note a gradient of a unit whose outputs got none, to be reduced at the end of the pass."""
        self._begin_pass()
        if unit.phase.is_backward:
            return
        if unit.phase is Phase.FORWARD:
            unit.open_forwards[0].inner_backward = InnerBackward.RUNS
        unit.gradients.expect_more()

    def _begin_pass(self) -> None:
        """Begin a backward pass, if this is the first unit that it comes to."""
        if self.backward is not None:
            if self.backward.runs:
                return
            self.recover()  # an earlier pass raised, and no forward has come since
        self.check_finalized("run backward")
        self.reductions.max_in_flight = max(unit.settings.reduction.max_in_flight for unit in self.units())
        PROGRESS.steps, self.reached = self.steps, False
        self.backward = hooks.BackwardPass(self.finish_backward, _backward_raised)

    def _begin_call(self, unit: Unit) -> None:
        """Begin the backward of one call of ``unit``: note what it comes to, and prefetch what runs backward after."""
        self.prefetcher.used(unit)  # also if it is not unsharded in backward
        unit.awaits_backward = False
        if self._open_forwards and unit.is_unsharded and unit.gradients.are_coming:
            for other in self.units():  # see [Note: Steps inside a forward]
                if other.phase is Phase.FORWARD:
                    other.open_forwards[0].inner_backward = InnerBackward.RUNS
        self.prefetcher.backward_began(unit)
        self._prefetch(self.prefetcher.next_in_backward(unit))

    def finish_backward_of(self, unit: Unit, *, ran: bool) -> None:
        """End the pass for one unit. ``ran``: its parameters may have gradients although none of its hooks ran."""
        settings = unit.settings
        has_gradients = ran or unit.gradients.state is GradientState.UNREDUCED
        if unit.phase.is_backward:
            self.reshard_and_reduce(unit)
        elif not settings.requires_gradient_sync:
            if has_gradients:
                unit.gradients.keep()
        elif (
            has_gradients
            or (settings.requires_all_reduce and unit.gradients.need_all_reduce)
            or (settings.reduction.zeros_for_missing and unit.gradients.state is not GradientState.REDUCED)
        ):
            # This pass did not come to the unit, but one without sync did, or its own had no clear end.
            unit.end_calls()
            self.reduce(unit)
        unit.gradients.end_pass()

    def _reshard_after_backward(self, unit: Unit, *, creates_graph: bool) -> None:
        """Reshard as ``set_reshard_after_backward`` says, unless the pass makes a graph that reads the parameters."""
        if unit.user_unshards:
            return
        if creates_graph:  # whose backward is to come
            unit.keep_for_backward()
        elif unit.settings.reshard_after_backward:
            unit.reshard()
        elif not unit.policy.form.has_flat_parameters:
            unit.register_sharded()  # which have the gradients

    # ---------------------------------------------------------------- reductions

    def reduce(self, unit: Unit, *, all_reduce: bool | None = None) -> None:
        """Begin to reduce the gradients of ``unit``, once few enough reductions are in flight.

        Args:
            unit: Some of whose parameters may have unsharded gradients.
            all_reduce: Reduce over the replicate axis, too; None: as the user has set it.
        """
        if unit.parameters:
            self.reductions.make_room(self.comm_streams)
        all_reduce = unit.settings.requires_all_reduce if all_reduce is None else all_reduce
        reductions = unit.gradients.begin_reduction(unit.settings.reduction, all_reduce=all_reduce)
        self.reductions.launch(unit.name, reductions, self.comm_streams)

    def reduce_unreduced(self, unit: Unit) -> None:
        """Reduce what microbatches without sync have left, over all axes."""
        if unit.gradients.unreduced:
            self.reduce(unit, all_reduce=True)
            if self.backward is None:
                unit.gradients.end_pass()

    def finish_reductions(self) -> None:
        """Have every sharded gradient hold what was reduced for it."""
        self.reductions.finish(self.comm_streams)

    # ---------------------------------------------------------------- state of the step

    def units(self) -> list[Unit]:
        """Return the units that still exist."""
        return [unit for ref in self._units if (unit := ref()) is not None]

    @property
    def busy(self) -> bool:
        """True while a forward or a backward runs."""
        return self._open_forwards > 0 or self.backward is not None

    @property
    def creates_graph(self) -> bool:
        """True in a backward pass with ``create_graph=True``."""
        return self.backward is not None and self.backward.creates_graph

    @property
    def has_failed(self) -> bool:
        """True if a backward began whose end never came, because it raised."""
        return self.backward is not None and not hooks.in_backward()

    def ensure_idle(self) -> None:
        """Return to idle if a backward raised, and wait until offloaded shards are read."""
        if self.has_failed:
            self.recover()
        self._release_host_memory()

    def recover(self) -> None:
        """After an exception, drop unreduced gradients and return to idle, or to the forwards that are still open."""
        self.backward = self.finalization = None
        if not self._open_forwards:
            self.prefetcher.forget()
            self.prefetcher.order.begin()
        for unit in self.units():
            if self._open_forwards and not unit.phase.is_backward:
                unit.abandon_pass()  # it computes in the forward that goes on, or waits for the backward of that
            else:
                unit.reset()
            unit.gradients.drop()
        self.reductions.abandon()

    def reset(self) -> None:
        """Return to idle from any state: no forward is open."""
        self._open_forwards = 0
        for unit in self.units():
            unit.open_forwards.clear()
        self.recover()

    def _release_host_memory(self) -> None:
        """Wait until offloaded shards have been read: from now on the user may write to them, or has asked for them.

        A forward that has a backward is not waited for: its gradients end in host memory, which is waited for, and they
        come after all all-gathers but those that were prefetched in vain.
        """
        if any(unit.policy.offloads for unit in self.units()):
            self.comm_streams.all_gather.synchronize()


class _BackwardOf:
    """Callbacks of autograd for one forward of a unit.

    Args:
        unit: Unit whose module runs. Its runtime may be another one by the time of the backward.
    """

    __slots__ = ("__weakref__", "came", "unit")

    def __init__(self, unit: Unit) -> None:
        self.unit, self.came = unit, False

    def pre_backward(self) -> None:
        self.came = True
        with hooks.outside_transforms():
            runtime_of(self.unit).pre_backward(self.unit)

    def pre_double_backward(self) -> None:
        with hooks.outside_transforms():
            runtime_of(self.unit).pre_double_backward(self.unit)

    def post_backward(self) -> None:
        if self.unit.phase is Phase.BACKWARD:  # in a double backward only the end of the pass tells
            with hooks.outside_transforms():
                runtime_of(self.unit).post_backward(self.unit)


def _attach(root: Unit) -> Runtime:
    """Make ``root`` the root of all units below its modules.

    Raises:
        FullshardError: If manual finalization of backward was asked for below the root.
        UnmaterializedParameterError: If parameters are still on the meta device.
        TiedParameterError: If units share a parameter without a common unit above them.
        PhaseError: If a unit below is in the middle of a step of its own.
    """
    modules = [module for module in (ref() for ref in root.modules) if module is not None]
    assert modules, "a unit outlived its modules"
    below = [unit for module in modules for unit in nested_units(module)]
    units = list({id(unit): unit for unit in [root, *below]}.values())
    for unit in units:
        unit.check_not_summoned("run")
    for unit in units:
        if (other := _runtimes.get(unit)) is not None:
            _dissolve(other, f"{type(modules[0]).__name__} became the root")
    rename(modules, units)
    for unit in units:
        if unit is not root and unit.settings.finalized_by_caller:
            raise FullshardError(
                "set_manual_backward_finalization: expected the root module, found one of unit "
                f"{unit.described} below a {type(modules[0]).__name__}; call it on that"
            )
        if not unit.is_unsharded:
            unit.refresh()
    check_owned(units)
    _check_materialized(units)
    watch()
    _compare_units(units)
    runtime = Runtime(units)
    _roots.add(root)
    for unit in units:
        _runtimes[unit] = runtime
        for parameter in unit.parameters:
            parameter.on_gradient = partial(_gradient_accumulated, unit.ref)
    return runtime


def _dissolve(runtime: Runtime, reason: str) -> None:
    """Give up all units, because others will be among them; the next forward makes a new runtime.

    Raises:
        PhaseError: In the middle of a step.
    """
    if runtime.has_failed:
        runtime.recover()
    if runtime.busy:
        raise PhaseError(f"{reason} while its units were in the middle of a step; finish the step first")
    runtime.finish_reductions()
    for unit in runtime.units():
        del _runtimes[unit]


def last_forward_first(runtime: Runtime) -> list[Unit]:
    """Return all units in the order in which backward comes to them where every unit's input has a gradient.

    Ranks whose inputs have none reduce at the end of backward what others have reduced before, in the same order.
    """
    ran = dict.fromkeys(unit for ref in runtime.prefetcher.order.first() if (unit := ref()) is not None)
    return [*reversed(ran), *(unit for unit in runtime.units() if unit not in ran)]


def _left_without_backward(runtime: Runtime) -> list[Unit]:
    """Return units whose forward ran and whose outputs no loss came from, around ones whose backward ran.

    Parameters that compute what these inner units take, or what they return, have gradients.
    """
    if not runtime.prefetcher.ended and not runtime.prefetcher.passed_by:
        return []
    running = (u for u in runtime.units() if u.gradients.state is not GradientState.NONE or not u.is_idle)
    reached = [f"{unit.name}." for unit in running]
    ended = dict.fromkeys(ref() for ref in (*runtime.prefetcher.ended, *runtime.prefetcher.passed_by))
    return [
        unit
        for unit in ended
        if unit is not None
        and unit.gradients.state is not GradientState.REDUCED
        and any(not unit.name or name.startswith(f"{unit.name}.") for name in reached)
    ]


def _backward_raised() -> None:
    PROGRESS.failed("backward")


def _gradient_accumulated(ref: weakref.ref[Unit]) -> None:
    if (unit := ref()) is not None:
        runtime_of(unit).gradient_accumulated(unit)


def _check_materialized(units: list[Unit]) -> None:
    without_values = (bucket for unit in units for bucket in unit.buckets if not bucket.materialized)
    meta = [p.describe() for bucket in without_values if bucket.mesh.device.type != "meta" for p in bucket.parameters]
    if meta:
        more = f" and {len(meta) - 20} more" if len(meta) > 20 else ""
        raise UnmaterializedParameterError(
            "these parameters are on the meta device and have no values: " + ", ".join(meta[:20]) + f"{more}; call "
            "model.to_empty(device=...) and initialize them, or load a state dict with assign=True"
        )


def _compare_units(units: list[Unit]) -> None:
    """Raise on all ranks of a group that have other parameters in their units, before they launch anything."""
    of_groups: dict[dist.ProcessGroup, dict[str, str]] = {}
    for unit in units if PROGRESS.watchdog is not None else ():
        if unit.compared:
            continue
        unit.compared = True
        described = "\n".join(bucket.described(bucket.launch_name(unit.name, unit.numbers)) for bucket in unit.buckets)
        for group in data_parallel_groups(unit.mesh):
            of_groups.setdefault(group, {})[unit.name] = described
    for group, told in of_groups.items():
        PROGRESS.watchdog.compare_units(group, told)


def _is_within(inner: Unit, outer: Unit) -> bool:
    return not outer.name or inner.name.startswith(f"{outer.name}.")


def current_runtime(unit: Unit) -> Runtime | None:
    """Return the runtime of ``unit``; None before the first forward that it takes part in."""
    return _runtimes.get(unit)


def runtime_of(unit: Unit) -> Runtime:
    """Return the runtime of ``unit``; one that is run before it has one becomes the root of its own module tree."""
    runtime = _runtimes.get(unit)
    if runtime is None:
        with hooks.outside_transforms():
            return _attach(unit)
    return runtime


def ensure_idle(unit: Unit) -> None:
    """Return to idle if a backward raised and nothing ran since, and wait for what is in flight."""
    if (runtime := _runtimes.get(unit)) is not None:
        runtime.ensure_idle()


def live_roots() -> list[Unit]:
    """Return the units that are roots."""
    return [unit for unit in _roots if (runtime := _runtimes.get(unit)) is not None and runtime.root() is unit]


def take_parameters(unit: Unit, parameters: list[ShardedParameter]) -> None:
    """Take ``parameters`` away from ``unit``, for another one that reads their values from the shards they have now.

    Raises:
        PhaseError: In the middle of a step.
    """
    if (runtime := _runtimes.get(unit)) is not None:
        _dissolve(runtime, f"parameters of unit {unit.described} were given to another unit")
    taken = {id(parameter) for parameter in parameters}
    unit.rebuild([parameter for parameter in unit.parameters if id(parameter) not in taken])


def each_runtime(units: Iterable[Unit]) -> list[Runtime]:
    """Return the runtimes of ``units``, each once; units that have not run have none."""
    return list(dict.fromkeys(runtime for unit in units if (runtime := _runtimes.get(unit)) is not None))
