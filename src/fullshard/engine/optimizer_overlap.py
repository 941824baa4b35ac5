"""Communication that overlaps with the optimizer step: last reductions of a backward, first all-gathers of a forward.

[Note: Overlap with the optimizer]
Two collectives have no computation of the model to hide behind: the last reduction of a backward and the first
all-gather of the next forward. The optimizer step between them is computation, if it comes in parts. So, where the user
has asked for it, a backward ends with its last reductions in flight, the step begins with the units whose gradients are
there, and as soon as the units that run first are stepped their all-gather is issued, beside the rest of the step.

Until their reduction is waited for, ``.grad`` of the parameters concerned holds a ``GradientInFlight``. Whatever
computes with it waits first, so a program that reads gradients between backward and step sees the right ones, only
later. Waiting is local: all messages are on their way by the end of backward, so ranks may look at different times.

Parameters that were unsharded during the step must not be written to before the next forward: it would compute with the
values from before. Loading a state dict and another optimizer's step are noticed on all ranks alike, and the all-gather
is done again. Other writes are noticed by the version counters of the shards, which are not equal on all ranks, and
raise; those through ``.data`` are not noticed.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from fullshard.engine.parameters.sharded import ShardedParameter
from fullshard.engine.unit import Unit
from fullshard.errors import PhaseError

__all__ = ["GradientInFlight", "OptimizerOverlap"]


class GradientInFlight(torch.Tensor):
    """Stands in for a sharded gradient that is still being reduced, see [Note: Overlap with the optimizer]."""

    _finish: weakref.WeakMethod[Callable[[], None]]  # weak: the garbage collector does not see through ``.grad``
    _in_flight: torch.Tensor  # what it will be, if there is no earlier one, in memory that is still being written
    _earlier: torch.Tensor | None  # the gradient of earlier backwards, which this one is added to
    _result: torch.Tensor | None

    @property  # type: ignore[misc]
    def __class__(self) -> type[DTensor]:  # type: ignore[override]
        """Be a DTensor to ``isinstance``."""
        return DTensor

    @staticmethod
    def of(parameter: ShardedParameter, in_flight: torch.Tensor, finish: Callable[[], None]) -> GradientInFlight:
        """Make the stand-in for a parameter's gradient; ``finish`` waits for its reduction."""
        sharded = parameter.sharded
        made: GradientInFlight = torch.Tensor._make_wrapper_subclass(
            GradientInFlight,
            in_flight.shape,
            strides=in_flight.stride(),
            dtype=in_flight.dtype,
            device=in_flight.device,
        )
        made._finish, made._in_flight = weakref.WeakMethod(finish), in_flight
        made._earlier, made._result = sharded.grad, None
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Use the gradient, once it is reduced, instead."""
        args, kwargs = tree_map_only(cls, cls.result, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # as torch calls it
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Use the gradient, once it is reduced, instead, also below autograd."""
        return cls.__torch_function__(func, types, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the gradient itself."""
        return self.result().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        """Look up what a DTensor has beside a tensor's own attributes."""
        return getattr(self.result(), name)

    def result(self) -> torch.Tensor:
        """Wait for the reduction and return the gradient."""
        state = self.__dict__
        finish = state["_finish"]()
        if state["_result"] is None and finish is not None:
            finish()
        gradient: torch.Tensor | None = state["_result"]
        if gradient is None:
            raise PhaseError(
                "this gradient was discarded: it was still being reduced when an exception ended the step or the model "
                "was deleted; run forward and backward again"
            )
        return gradient


class OptimizerOverlap:
    """Gradients still in flight after a backward, and units unsharded during an optimizer step, of one root."""

    _late: list[tuple[ShardedParameter, GradientInFlight]]
    _early: dict[weakref.ref[Unit], int]  # not used yet; with the sum of its shards' version counters then

    def __init__(self) -> None:
        self._late, self._early = [], {}

    # ---------------------------------------------------------------- gradients in flight

    @property
    def in_flight(self) -> bool:
        """True if gradients of the last backward are still being reduced."""
        return bool(self._late)

    @contextlib.contextmanager
    def exposed(self) -> Iterator[set[int]]:
        """Have ``.grad`` hold the memory of the gradients in flight: its address may be used, its values not yet.

        Only for gradients that are not added to others; check ``adds`` before.

        Yields:
            The ids of the parameters.
        """
        late = [(p.sharded, gradient) for p, gradient in self._late if p.sharded.grad is gradient]
        for sharded, gradient in late:
            sharded.grad = gradient.__dict__["_in_flight"]
        try:
            yield {id(sharded) for sharded, _ in late}
        finally:
            for sharded, gradient in late:
                sharded.grad = gradient

    @property
    def adds(self) -> bool:
        """True if some of the gradients in flight are going to be added to others."""
        return any(gradient.__dict__["_earlier"] is not None for _, gradient in self._late)

    def defer(self, gradients: Iterable[tuple[ShardedParameter, torch.Tensor]], finish: Callable[[], None]) -> None:
        """Register gradients whose reduction is still in flight; calling ``finish`` completes them."""
        for parameter, in_flight in gradients:
            gradient = GradientInFlight.of(parameter, in_flight, finish)
            self._late.append((parameter, gradient))
            parameter.sharded.grad = gradient

    def finish(self, finish_reductions: Callable[[], None]) -> None:
        """Have ``.grad`` hold the gradients that ``finish_reductions`` adds to it.

        What a user has put there meanwhile (None, by ``zero_grad``) stays.
        """
        late, self._late = self._late, []
        replaced = [(p.sharded, p.sharded.grad) for p, gradient in late if p.sharded.grad is not gradient]
        for parameter, gradient in late:
            parameter.sharded.grad = gradient.__dict__["_earlier"]
        with torch.inference_mode(False), torch.no_grad():  # a forward in inference mode may be what waits for them
            finish_reductions()
        for parameter, gradient in late:
            gradient.__dict__["_result"] = parameter.sharded.grad
        for sharded, chosen in replaced:
            sharded.grad = chosen

    def drop(self) -> None:
        """Forget gradients in flight, after a failure."""
        late, self._late = self._late, []
        for parameter, gradient in late:
            if parameter.sharded.grad is gradient:
                parameter.sharded.grad = gradient.__dict__["_earlier"]

    # ---------------------------------------------------------------- units unsharded during the step

    def note_unsharded(self, units: Iterable[Unit]) -> None:
        """Note that ``units`` were unsharded during an optimizer step."""
        self._early.update((unit.ref, _versions(unit)) for unit in units)

    def forget_resharded(self) -> None:
        """Before units are unsharded: forget those that were resharded meanwhile, or stepped once more."""
        if self._early:
            kept = ((ref, versions) for ref, versions in self._early.items() if (unit := ref()) and unit.is_current)
            self._early = dict(kept)

    def discard_unsharded(self) -> None:
        """Reshard them: all ranks write to their parameters, and the next forward has to unshard them anew."""
        early, self._early = self._early, {}
        for unit in (ref() for ref in early):
            if unit is not None and unit.is_idle and unit.is_unsharded:  # else its modules may hold copies to be loaded
                unit.reshard()

    def check_unwritten(self, unit: Unit) -> None:
        """Before ``unit`` is used: check that no shard was written to since units were unsharded during a step.

        Where parameters were replaced since, the unit is resharded, and so is unsharded anew.

        Raises:
            PhaseError: If one was written to.
        """
        if unit.ref not in self._early:
            return
        written = []
        for each, versions in ((ref(), versions) for ref, versions in self._early.items()):
            if each is None or not each.is_current or each.registration.unsharded:
                continue
            if not each.registration.is_registered():
                each.reshard()
            elif _versions(each) != versions:
                each.reshard()
                written.append(each.described)
        del self._early[unit.ref]
        if written:
            raise PhaseError(
                f"parameters of unit {', '.join(written)} were modified after the optimizer step had unsharded them "
                "for the next forward; call reshard() on the module, on all ranks, after you modify parameters, or do "
                "not use fullshard.optim.overlap"
            )


def _versions(unit: Unit) -> int:
    # An operation on a DTensor counts there, one on its local tensor here.
    return sum(parameter.sharded._version + parameter.local._version for parameter in unit.parameters)
