"""What overlaps with the optimizer step: the last reductions of a backward, and the first gathers of a forward.

[Note: Overlap with the optimizer]
Two collectives have no computation of the model to hide behind: the last reduction of a backward and the first gather
of the next forward. The optimizer step between them is computation, if it comes in parts. So, where the user has asked
for it, a backward ends with its last reductions under way, the step begins with the units whose gradients are
there, and as soon as the units that run first are stepped their gather starts, beside the rest of the step.

Until they have landed, ``.grad`` of the parameters concerned holds a :class:`GradientInFlight`. Whatever computes with
it waits first, so a program that reads gradients between backward and step sees the right ones, only later. Waiting is
local: all messages are on their way by the end of backward, so ranks may look at different times.

Parameters that were gathered during the step must not be written to before the next forward: it would compute with the
values from before. Loading a state dict and another optimizer's step are noticed on all ranks alike, and the gather is
done again. Other writes are noticed by the version counters of the shards, which are not equal on all ranks, and raise;
those through ``.data`` are not noticed.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from fullshard.errors import PhaseError

if TYPE_CHECKING:
    from fullshard.engine.parameter import ShardedParameter
    from fullshard.engine.unit import Unit

__all__ = ["GradientInFlight", "OptimizerOverlap"]


class GradientInFlight(torch.Tensor):
    """Stands for a sharded gradient that is still being reduced. See [Note: Overlap with the optimizer]."""

    _land: weakref.WeakMethod[Callable[[], None]]  # weak: the garbage collector does not see through ``.grad``
    _to_come: torch.Tensor  # what it will be, if there is no earlier one, in memory that is still being written
    _earlier: torch.Tensor | None  # the gradient of earlier backwards, which this one is added to
    _landed: torch.Tensor | None

    @property  # type: ignore[misc]
    def __class__(self) -> type[DTensor]:  # type: ignore[override]
        """For ``isinstance``."""
        return DTensor

    @staticmethod
    def of(parameter: ShardedParameter, to_come: torch.Tensor, land: Callable[[], None]) -> GradientInFlight:
        """For a parameter; ``land`` waits for its reduction."""
        sharded = parameter.sharded
        made: GradientInFlight = torch.Tensor._make_wrapper_subclass(
            GradientInFlight, to_come.shape, strides=to_come.stride(), dtype=to_come.dtype, device=to_come.device
        )
        made._land, made._to_come = weakref.WeakMethod(land), to_come
        made._earlier, made._landed = sharded.grad, None
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Any use of it: with what it stands for."""
        args, kwargs = tree_map_only(cls, cls.landed, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # as torch calls it
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The same below autograd."""
        return cls.__torch_function__(func, types, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Files hold what it stands for."""
        return self.landed().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        """What a DTensor has beside a tensor's own attributes."""
        return getattr(self.landed(), name)

    def landed(self) -> torch.Tensor:
        """The gradient, once it is there."""
        state = self.__dict__
        land = state["_land"]()
        if state["_landed"] is None and land is not None:
            land()
        gradient: torch.Tensor | None = state["_landed"]
        if gradient is None:
            raise PhaseError(
                "this gradient was still being reduced when an exception ended the step, or the model was deleted, "
                "and was dropped with it"
            )
        return gradient


class OptimizerOverlap:
    """Of one schedule: gradients that have not landed, and units that were gathered during an optimizer step."""

    _late: list[tuple[ShardedParameter, GradientInFlight]]
    _early: list[tuple[weakref.ref[Unit], int]]  # with the sum of its shards' version counters then

    def __init__(self) -> None:
        self._late, self._early = [], []

    # ---------------------------------------------------------------- gradients that come late

    @property
    def in_flight(self) -> bool:
        """Whether some gradients have not landed."""
        return bool(self._late)

    @contextlib.contextmanager
    def revealed(self) -> Iterator[set[int]]:
        """Inside, ``.grad`` holds the gradients in flight themselves: to be looked at, not to be read.

        Only for gradients that are not added to others; check :attr:`adds` before. Gives the ids of the parameters.
        """
        late = [(p.sharded, gradient) for p, gradient in self._late if p.sharded.grad is gradient]
        for sharded, gradient in late:
            sharded.grad = gradient.__dict__["_to_come"]
        try:
            yield {id(sharded) for sharded, _ in late}
        finally:
            for sharded, gradient in late:
                sharded.grad = gradient

    @property
    def adds(self) -> bool:
        """Whether some of the gradients in flight are going to be added to others."""
        return any(gradient.__dict__["_earlier"] is not None for _, gradient in self._late)

    def defer(self, arriving: Iterable[tuple[ShardedParameter, torch.Tensor]], land: Callable[[], None]) -> None:
        """Those gradients will be there when ``land`` was called."""
        for parameter, to_come in arriving:
            gradient = GradientInFlight.of(parameter, to_come, land)
            self._late.append((parameter, gradient))
            parameter.sharded.grad = gradient

    def land(self, finish: Callable[[], None]) -> None:
        """Have the parameters hold the gradients that ``finish`` adds to ``.grad``.

        What a user has put there meanwhile (None, by ``zero_grad``) stays.
        """
        late, self._late = self._late, []
        replaced = [(p.sharded, p.sharded.grad) for p, gradient in late if p.sharded.grad is not gradient]
        for parameter, gradient in late:
            parameter.sharded.grad = gradient.__dict__["_earlier"]
        with torch.inference_mode(False), torch.no_grad():  # a forward in inference mode may be what waits for them
            finish()
        for parameter, gradient in late:
            gradient.__dict__["_landed"] = parameter.sharded.grad
        for sharded, chosen in replaced:
            sharded.grad = chosen

    def drop(self) -> None:
        """Forget gradients in flight, after a failure."""
        late, self._late = self._late, []
        for parameter, gradient in late:
            if parameter.sharded.grad is gradient:
                parameter.sharded.grad = gradient.__dict__["_earlier"]

    # ---------------------------------------------------------------- gathers that come early

    def gathered(self, units: Iterable[Unit]) -> None:
        """``units`` were gathered during an optimizer step."""
        self._early += [(unit.ref, _versions(unit)) for unit in units]

    def gather_again(self) -> None:
        """Their parameters are written to, on all ranks: the next forward has to gather them itself."""
        early, self._early = self._early, []
        for unit in (ref() for ref, _ in early):
            if unit is not None and unit.resting and unit.gathered:  # else its modules may hold copies to be loaded
                unit.reshard()

    def check_unwritten(self) -> None:
        """Their turn comes now.

        Raises:
            PhaseError: If a shard was written to since.
        """
        if not self._early:
            return
        early, self._early = self._early, []
        written = []
        for ref, versions in early:
            unit = ref()
            if unit is None or not unit.gathered or unit.outdated or not unit.registration.is_current():
                continue  # it is gathered again
            if _versions(unit) != versions:
                unit.reshard()
                written.append(unit.name or "<root>")
        if written:
            raise PhaseError(
                f"parameters of unit {', '.join(map(repr, written))} were written to after the optimizer step had "
                "gathered them for the next forward; call reshard() on the module, on all ranks, after writing, or do "
                "without fullshard.optim.overlap"
            )


def _versions(unit: Unit) -> int:
    # An operation on a DTensor counts there, one on its local tensor here.
    return sum(parameter.sharded._version + parameter.local._version for parameter in unit.parameters)
