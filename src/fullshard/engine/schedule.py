"""One schedule per root: the order of the units, what is gathered ahead, and what is still being reduced.

[Note: Order and prefetch]
The order in which units start their forwards is recorded in every forward of the root and used in the next
(the first uses the order of ``modules()``). Just before a unit computes, the gather of its successor is
issued; in backward, that of its predecessor in the order in which this step's forwards ended. One unit is
gathered ahead, no more, so that two units' full parameters are alive at a time; or as many as the user has given
bytes for. All of it depends only on sizes and on the order in which units run, which are the same on all ranks.

The unit whose forward ends last is needed first in backward. Unless the user has said when to reshard it, it stays
gathered in between: while the root computes the loss it would be the one ahead anyway.

Tiny units, such as a lone norm, are gathered in the same launch as the unit after them and do not count as one
ahead; their reductions wait for the next unit's and go with it. So a tiny unit costs no message of its own.

[Note: Steps inside a forward]
Some programs run backward, and the optimizer, inside of a module's own forward (Lightning's manual optimization does).
Units whose forward is open then have no output yet that could tell them. A nested unit tells: if the pass comes to it
and will accumulate into its parameters (gradients of inputs do not), all units whose forward is open are reduced at the
pass's end, whatever gradients this rank has in them. (It has to be the same on all ranks whether a unit that is run
takes part with any of its parameters, as it has to be which units take part.) After the step they are gathered anew,
for the rest of their forward. Where no nested unit takes part, post-accumulate hooks tell the unit.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fullshard.engine import hooks
from fullshard.engine.ahead import MAX_TINY_UNITS_TOGETHER, Ahead
from fullshard.engine.forward_order import ForwardOrder
from fullshard.engine.gather import issue_gathers
from fullshard.engine.overlap import OptimizerOverlap
from fullshard.engine.ownership import check_owned, nested_units, rename
from fullshard.engine.parameter import managed_by
from fullshard.engine.progress import Phase
from fullshard.engine.reads import ParameterReads
from fullshard.engine.reductions import Reductions
from fullshard.engine.settings import Lanes
from fullshard.errors import PhaseError, UnmaterializedParameterError
from fullshard.memory import Event

if TYPE_CHECKING:
    from fullshard.engine.reduction import PendingReduction
    from fullshard.engine.unit import Unit

__all__ = ["Schedule", "tells_units_itself", "watch_optimizers"]

# How many forwards may wait for their backward and still be prefetched in the right order (pipelines have many).
MAX_FORWARDS_REMEMBERED = 64


# Optimizers that gather units during the step under way, and so have told these before it.
tells_units_itself: weakref.WeakSet[Optimizer] = weakref.WeakSet()


class _OptimizerSteps:
    """Tells units when an optimizer has stepped their parameters: what was gathered before is out of date after it.

    Only steps are seen, not other writes to sharded parameters, and so all ranks see the same ones; with a version
    counter they would not (an optimizer does not touch empty shards).
    """

    _units: weakref.WeakKeyDictionary[Optimizer, tuple[list[int], list[weakref.ref[Unit]]]]  # beside parameters' ids

    def __init__(self) -> None:
        self._units = weakref.WeakKeyDictionary()

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer in tells_units_itself:
            tells_units_itself.discard(optimizer)
            return
        ids = [id(p) for group in optimizer.param_groups for p in group["params"]]
        known = self._units.get(optimizer)
        if known is None or known[0] != ids:
            managed = (managed_by(p) for group in optimizer.param_groups for p in group["params"])
            units = {id(unit): unit for unit in (p.unit for p in managed if p is not None)}
            known = self._units[optimizer] = (ids, list(units.values()))
        for unit in (ref() for ref in known[1]):
            if unit is not None:
                unit.outdated = True
                if unit.progress.stepped:  # its forward goes on, with what the step has made
                    unit.reshard()
                    unit.use_full()


@functools.cache
def watch_optimizers() -> None:
    """Have units told of optimizer steps from now on."""
    register_optimizer_step_post_hook(_OptimizerSteps())


class Schedule:
    """See the module docstring. Holds its units weakly; they hold it."""

    root: weakref.ref[Unit]
    lanes: Lanes
    order: ForwardOrder
    is_last_backward: bool
    _units: list[weakref.ref[Unit]]  # in the order of modules()
    _depth: int  # forwards that are open now, of any unit
    _root_is_running: bool  # whether the outermost open forward is the root's
    _ended: list[weakref.ref[Unit]]  # forwards that wait for their backward, in the order in which they ended
    _passed_by: list[weakref.ref[Unit]]  # those whose turn was over before their own outputs got a gradient
    ahead: Ahead
    overlap: OptimizerOverlap
    _reads: ParameterReads
    _pass: hooks.BackwardPass | None  # that has begun and not ended
    _reductions: Reductions
    _after: Event | None  # what gathers wait for instead of all computation, while the root's forward begins

    def __init__(self, units: list[Unit]) -> None:
        root = units[0]
        self.root = root.ref
        shared = next((unit.settings.lanes for unit in units if unit.settings.lanes is not None), None)
        self.lanes = shared if shared is not None else Lanes.on(root.mesh.device)
        self.is_last_backward = True
        self._units = [unit.ref for unit in units]
        self.order, self._ended, self._passed_by, self._depth = ForwardOrder(self._units), [], [], 0
        self._root_is_running, self._pass, self.overlap = False, None, OptimizerOverlap()
        self.ahead, self._reads, self._reductions, self._after = Ahead(), ParameterReads(), Reductions(), None

    @classmethod
    def attach(cls, root: Unit) -> Schedule:
        """Make ``root`` the root of all units below its modules.

        Raises:
            UnmaterializedParameterError: If parameters are still on the meta device.
            TiedParameterError: If units share a parameter without a common unit above them.
            PhaseError: If a unit below is in the middle of a step of its own.
        """
        modules = [module for module in (ref() for ref in root.modules) if module is not None]
        assert modules, "a unit outlived its modules"
        found = [unit for module in modules for unit in nested_units(module)]
        units = list({id(unit): unit for unit in [root, *found]}.values())
        for unit in units:
            unit.check_not_summoned("run")
        for unit in units:
            if unit.schedule is not None:
                unit.schedule.dissolve(f"{type(modules[0]).__name__} becomes the root")
        rename(modules, units)
        for unit in units:
            if not unit.gathered:
                unit.settle_parameters()
        check_owned(units)
        meta = [p.describe() for unit in units for b in unit.buckets if not b.materialized for p in b.parameters]
        if meta:
            more = f" and {len(meta) - 20} more" if len(meta) > 20 else ""
            raise UnmaterializedParameterError(
                "these parameters are on the meta device and have no values: " + ", ".join(meta[:20]) + f"{more}; call "
                "model.to_empty(device=...) and initialise them, or load a state dict with assign=True"
            )
        schedule = cls(units)
        for unit in units:
            unit.schedule = schedule
        return schedule

    def dissolve(self, reason: str) -> None:
        """Let go of all units, because others will be among them; the next forward makes a new schedule.

        Raises:
            PhaseError: In the middle of a step.
        """
        if self.busy:
            raise PhaseError(f"{reason} while its units are in the middle of a step; finish the step first")
        self.land()
        for unit in self.units():
            unit.schedule = None

    @property
    def _max_ended(self) -> int:
        return MAX_FORWARDS_REMEMBERED * len(self._units)

    @property
    def busy(self) -> bool:
        """Whether a forward or a backward is going on."""
        return self._depth > 0 or self._pass is not None

    @property
    def creates_graph(self) -> bool:
        """Whether the backward pass that runs has ``create_graph=True``."""
        return self._pass is not None and self._pass.creates_graph

    @property
    def failed_backward(self) -> bool:
        """Whether a backward began whose end never came, because it raised."""
        return self._pass is not None and hooks.current_backward() == hooks.NO_BACKWARD

    def units(self) -> Iterator[Unit]:
        """The units that still exist."""
        return (unit for unit in (ref() for ref in self._units) if unit is not None)

    # ---------------------------------------------------------------- forward

    def enter(self, unit: Unit) -> None:
        """A forward of ``unit`` begins."""
        if self._depth == 0 and hooks.current_backward() == hooks.NO_BACKWARD:
            if self.failed_backward:
                self.recover(drop_gradients=True)
            self.land()
            self._root_is_running = self.root() is unit
            self._set_budget()
            if self.ahead.turn is None:
                self._note_turn(self._units[:0:-1])
            self.order.begin()
            if not self._ended:
                self._reads.begin()
            self._after = None  # a forward that raised may have left one
            if self._root_is_running:
                self._after, unit.settings.post_optim_event = unit.settings.post_optim_event, None
        self._depth += 1
        if hooks.current_backward() == hooks.NO_BACKWARD:
            self.order.entered(unit)

    def started_forward(self, unit: Unit) -> None:
        """``unit`` has its full parameters and is about to compute: gather ahead."""
        self.ahead.used(unit)
        if hooks.current_backward() != hooks.NO_BACKWARD:
            return  # recomputation; the backward prefetches
        chosen = unit.settings.forward_prefetch
        if chosen:
            self._gather_ahead(self.ahead.chosen(chosen))
        elif self._root_is_running:
            self._gather_ahead(self.ahead.next(self.order.after(unit)))
        self._after = None
        self.order.started(unit)

    def finished_forward(self, unit: Unit) -> None:
        """A forward of ``unit`` that has a backward is over."""
        if hooks.current_backward() == hooks.NO_BACKWARD:
            if unit.progress.awaits:
                unit.gradients.add_up()
            unit.progress.awaits = True
            self._ended.append(unit.ref)
            if len(self._ended) > self._max_ended:  # outputs that nobody runs backward
                del self._ended[0]

    def leave(self, unit: Unit, output: Any = None, *, failed: bool = False) -> None:
        """A forward of ``unit`` is over. ``output``: what it returns if that has a backward."""
        self._depth -= 1
        unit.progress.stepped = False
        if self._depth or hooks.current_backward() != hooks.NO_BACKWARD:
            return
        if failed:
            self._let_go()
            return
        if output is not None:
            self._reads.check(output)
        self._reads.end_forward(watched=output is not None)
        if self._root_is_running:
            self.order.keep()
            if self._ended and self._ended[-1] is self.root:
                self._note_turn(self._ended[-2::-1])
        for guessed_wrong in self.ahead.units():
            guessed_wrong.reshard()
        self.ahead.clear()
        if output is None:
            self._release_host_memory()

    def _release_host_memory(self) -> None:
        """Wait until offloaded shards have been read: from now on the user may write to them, or has asked for them.

        A forward that has a backward is not waited for: its gradients land in host memory, which is waited for.
        """
        if any(unit.policy.offloads for unit in self.units()):
            self.lanes.gather.synchronize()

    def defers_to_end(self, unit: Unit) -> bool:
        """Have ``unit`` show its unsharded parameters until the outermost forward ends. False if none is open."""
        if self._depth <= 1 or hooks.current_backward() != hooks.NO_BACKWARD:
            return False
        self._reads.until_end(unit)
        return True

    def is_ahead(self, unit: Unit) -> bool:
        """Whether ``unit`` was gathered just now, for what runs next."""
        self.overlap.check_unwritten()
        return unit in self.ahead

    def _gather_ahead(self, launches: Iterable[list[Unit]]) -> None:
        for units in launches:
            self.gather(units)

    def gather(self, units: list[Unit]) -> None:
        """Start gathering ``units`` in one launch, as far as they are not gathered."""
        self.overlap.check_unwritten()
        try:
            begun = [(unit.name, bucket, started) for unit in units for bucket, started in unit.begin_gather()]
            if not begun:
                return
            gathers = [(name, gather) for name, _, started in begun for gather in started]
            ticket = issue_gathers(gathers, self.lanes.gather, self._after)
        except BaseException:
            for unit in units:
                self.ahead.used(unit)
                unit.release_after_failure()
            raise
        for _, bucket, started in begun:
            bucket.issued(ticket, started)

    def _set_budget(self) -> None:
        root = self.root()
        self.ahead.budget = None if root is None else root.settings.prefetch_bytes

    def _note_turn(self, ended: Iterable[weakref.ref[Unit]]) -> None:
        settings = root.settings if (root := self.root()) is not None else None
        self.ahead.turn = None
        if settings is not None and settings.backward_order == "before" and not settings.backward_prefetch:
            self.ahead.note_turn(ended)

    def plan_first(self) -> list[list[Unit]]:
        """What a forward of the root begins with, launch by launch, to be gathered by :meth:`gather_first`."""
        self._set_budget()
        launches = list(self.ahead.next(self.order.first()))
        self.ahead.clear()
        return launches

    def gather_first(self, launches: list[list[Unit]]) -> None:
        """Start gathering during an optimizer step, see [Note: Overlap with the optimizer]."""
        for units in launches:
            self.gather(self.ahead.note(units))
        self.overlap.gathered([unit for units in launches for unit in units])

    # ---------------------------------------------------------------- backward

    def begin_backward(self) -> None:
        """The first unit of a backward pass is reached (or a later one: no-op)."""
        if self._pass is not None and not self._pass.runs:
            self.recover(drop_gradients=True)  # an earlier pass raised, and no forward has come since
        if self._pass is None:
            self.land()
            self._reductions.max_in_flight = max(unit.settings.reduction.max_in_flight for unit in self.units())
            self._pass = hooks.BackwardPass(self.end_backward)
            self._unshard_readable()

    def _unshard_readable(self) -> None:
        """See [Note: Unsharded until the forward ends]."""
        freed = self._reads.freed(self.units())
        if freed:
            self.gather(freed)
        for unit in freed:
            for bucket in unit.buckets:
                bucket.finish_gather()

    def started_backward(self, unit: Unit) -> None:
        """``unit`` has its full parameters for the backward of its last forward: gather ahead."""
        self.ahead.used(unit)
        unit.progress.awaits = False
        if self._depth and unit.gathered and unit.gradients.are_coming:  # see [Note: Steps inside a forward]
            for other in self.units():
                other.progress.encloses |= other.phase is Phase.FORWARD
        position = self._last_ended(unit)
        if position >= 0:
            self._passed_by += self._ended[position + 1 :]
            del self._ended[position:]
        if unit.settings.backward_prefetch:
            self._gather_ahead(self.ahead.chosen(unit.settings.backward_prefetch))
        elif unit.settings.backward_order == "before":
            self.prefetch_backward()

    def prefetch_backward(self) -> None:
        """Gather ahead for the backward of the forward that ended last and has not been run backward."""
        behind = (ref for ref in reversed(self._ended) if _gathers_in_backward(ref))
        self._gather_ahead(self.ahead.next(behind))

    def comes_next_in_backward(self, unit: Unit) -> bool:
        """Whether the forward before the one whose backward runs was of ``unit`` too."""
        return bool(self._ended) and self._ended[-1] is unit.ref

    def _last_ended(self, unit: Unit) -> int:
        ref = unit.ref
        return next((i for i in range(len(self._ended) - 1, -1, -1) if self._ended[i] is ref), -1)

    def make_room(self, unit: Unit) -> None:
        """Before memory for the reduction of ``unit`` is taken: let go of that of earlier ones."""
        if not unit.tiny:
            self._reductions.make_room(self.lanes)

    def reduce(self, unit: Unit, pending: list[PendingReduction]) -> None:
        """Start reducing the gradients of ``unit`` once few enough others are in flight."""
        waiting = self._reductions.add(unit.name, pending)
        if not (unit.tiny and self._pass is not None and waiting < MAX_TINY_UNITS_TOGETHER):
            self._reductions.launch(self.lanes)

    def end_backward(self) -> None:
        """Autograd is through: finish the units whose end it could not tell, and everything in flight."""
        left = self._left_without_backward() if self._ended or self._passed_by else ()
        for unit in self.units():
            progress = unit.progress
            unit.end_backward(ran=unit in left or progress.encloses)
            progress.encloses, progress.stepped = False, progress.stepped or progress.encloses
        creates_graph, self._pass = self.creates_graph, None
        self._passed_by.clear()
        self._reductions.launch(self.lanes)
        if not self.is_last_backward:
            self._reductions.land()
            return
        self._end_reductions()
        if self._depth:  # a gradient taken inside a forward, which goes on
            return
        self.ahead.clear()
        self._ended.clear()
        for unit in self.units() if not creates_graph else ():
            if unit.gathered and unit.resting and unit.settings.reshard_after_backward and not unit.progress.held:
                unit.reshard()

    def _left_without_backward(self) -> list[Unit]:
        """Units whose forward ran and whose outputs no loss came from, around ones whose backward ran: parameters that
        compute what these inner units take, or what they return, have gradients.
        """
        running = (u for u in self.units() if u.progress.reduced or u.progress.unreduced or not u.resting)
        reached = [f"{unit.name}." for unit in running]
        ended = dict.fromkeys(ref() for ref in (*self._ended, *self._passed_by))
        return [
            unit
            for unit in ended
            if unit is not None
            and not unit.progress.reduced
            and any(not unit.name or name.startswith(f"{unit.name}.") for name in reached)
        ]

    def _end_reductions(self) -> None:
        """At the end of a backward: wait for them, or leave the last to :meth:`land`."""
        root = self.root()
        if root is None or not root.settings.overlap_optimizer or self._depth:
            self._reductions.finish(self.lanes)
            return
        left = self._reductions.leave(self.lanes)
        arriving = [reduction.arriving for reduction in left]
        if any(gradients is None for gradients in arriving):
            self._reductions.finish(self.lanes)
            return
        self.overlap.defer((each for gradients in arriving for each in gradients or ()), self.land)

    def land(self) -> None:
        """Have gradients that were left in flight by a backward arrive."""
        if self.overlap.in_flight:
            self.overlap.land(lambda: self._reductions.finish(self.lanes))

    def finish_reductions(self) -> None:
        """Have every sharded gradient hold what was reduced for it."""
        self.land()
        self._reductions.launch(self.lanes)
        self._reductions.finish(self.lanes)

    # ---------------------------------------------------------------- recovery

    def settle(self) -> None:
        """Between steps: return to rest if a backward raised, have gradients land, and offloaded shards be writable."""
        if self.failed_backward:
            self.recover(drop_gradients=True)
        self.land()
        self._release_host_memory()

    def recover(self, *, drop_gradients: bool) -> None:
        """Return to rest from any state, after an exception."""
        self._let_go()
        for unit in self.units():
            unit.reset(drop_gradients=drop_gradients)
        self.overlap.drop()
        self._reductions.abandon()
        self._depth, self._pass = 0, None
        self.order.begin()

    def _let_go(self) -> None:
        self._ended.clear()
        self._passed_by.clear()
        self.ahead.clear()
        self._reads.forget_forward()
        for unit in self.units():
            unit.progress.ran.clear()
            if unit.gathered:
                unit.release_after_failure()


def _gathers_in_backward(ref: weakref.ref[Unit]) -> bool:
    unit = ref()
    return unit is None or unit.settings.unshard_in_backward
