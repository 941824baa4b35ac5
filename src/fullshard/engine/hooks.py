"""Where the engine meets autograd. The only file that registers hooks.

[Note: Boundaries of a unit in backward]
A unit's backward starts when the first of its outputs receives its gradient: a pre-hook on the autograd node
of each output gathers the parameters. The hook is on the node and not on the tensor, and for an output that is
a view also on its base's node: an in-place operation on a view builds the view's node anew, and hooks on
the old one would be lost, while the base's stays in the graph.

It ends when the gradients of its inputs are complete: all inputs that require gradients pass through one
autograd function, which the engine runs backward after everything between it and the outputs; gradients of
leaves are accumulated before that, because the engine prefers such nodes. Where no input requires a gradient
(token ids), the end of the whole backward ends the unit's.

[Note: Double backward]
Gradients that were computed with ``create_graph=True`` have a graph of their own, which reads the parameters again.
So units stay unsharded after the pass that makes it, until one that makes none ends, or their next forward. Backward
enters that graph through the gradients of the unit's inputs, so they are watched as outputs are. No hook marks where it
ends, so a unit that was reached in this way stays unsharded until the end of the backward pass.

Where backward reaches a unit's parameters in neither way (a weight that the model has read, derivatives with respect to
parameters that are differentiated again), post-accumulate hooks of the unsharded parameters tell the unit, and it is
reduced at the end of the pass.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch.autograd import Function, Variable
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from fullshard.engine.containers import iterate_tensors, map_tensors, tensors_within

__all__ = [
    "NO_BACKWARD",
    "BackwardPass",
    "Call",
    "after_accumulation",
    "current_backward",
    "guard_inputs",
    "in_backward",
    "outside_transforms",
    "watch_outputs",
]

NO_BACKWARD = -1
_HOOKED = "_fullshard_hooked"  # attribute of leaves that after_accumulation has registered a hook on
_NO_CONTEXT = contextlib.nullcontext()


class _Unit(Protocol):
    def pre_backward(self) -> None: ...

    def pre_double_backward(self) -> None: ...

    def post_backward(self) -> None: ...


class Call:
    """One forward call of a unit whose inputs require gradients, seen through its autograd node."""

    __slots__ = ("_node", "_ran_in")

    def __init__(self, node: Any) -> None:
        self._node = weakref.ref(node)  # weak: the graph may go as soon as the user drops the outputs

    @property
    def alive(self) -> bool:
        """Whether the graph of the call still exists."""
        return self._node() is not None

    def still_to_run(self) -> bool:
        """Whether the backward pass that runs now contains this call and has not come to its inputs yet."""
        node = self._node()
        if node is None or node.ran_in == current_backward():
            return False
        return bool(torch._C._will_engine_execute_node(node))


class _Boundary(Function):
    """Identity on a unit's inputs; tells the unit when their gradients are complete."""

    @staticmethod
    def forward(ctx: Any, unit: _Unit, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.unit, ctx.ran_in = unit, NO_BACKWARD
        # Missing gradients stay missing. Not where inputs are wrappers (DTensor, what functional collectives return):
        # without this step of autograd's, compiled code that takes them loses the node that made them.
        ctx.set_materialize_grads(any(type(t) is not torch.Tensor for t in tensors))
        # Compiled code that is given an unfinished collective loses its gradient; whatever computes waits for it first.
        return tuple(t.wait() if isinstance(t, AsyncCollectiveTensor) else t for t in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.ran_in = current_backward()
        if torch.is_grad_enabled():  # create_graph=True
            unit = ctx.unit
            _before_backward_of(gradients, lambda _: unit.pre_double_backward())
        ctx.unit.post_backward()
        return (None, *gradients)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tangents


# Function.apply looks for functorch wrappers in every argument, which costs more than the rest; guard_inputs has made
# sure that there are none.
_pass_boundary: Callable[..., Any] = super(Function, _Boundary).apply


def guard_inputs(unit: _Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Call | None]:
    """Pass every input that requires a gradient through the unit's boundary.

    Returns:
        ``args`` and ``kwargs`` with those tensors replaced, and the call, None if there was no such tensor.
    """
    if torch._C._are_functorch_transforms_active():
        return args, kwargs, None
    if len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor:  # most blocks: no containers to search
        if not args[0].requires_grad:
            return args, kwargs, None
        guarded_args = _pass_boundary(unit, args[0])
        return guarded_args, kwargs, Call(guarded_args[0].grad_fn)
    tensors = {id(t): t for t in iterate_tensors((args, kwargs)) if t.requires_grad}
    if not tensors:
        return args, kwargs, None
    aliases = _pass_boundary(unit, *tensors.values())
    guarded: dict[int, torch.Tensor] = dict(zip(tensors, aliases, strict=True))
    # One alias per tensor however often it was passed: modules compare inputs by identity.
    args, kwargs = map_tensors(lambda t: guarded.get(id(t), t), (args, kwargs))
    return args, kwargs, Call(next(iter(guarded.values())).grad_fn)


def nodes_made() -> int:
    """How many autograd nodes this thread has made."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def watch_outputs(unit: _Unit, output: Any, since: int) -> bool:
    """Have the unit's ``pre_backward`` called before the backward of ``output``. Whether there will be one.

    Args:
        unit: Whose forward has returned ``output``.
        output: Tensors in any containers. Objects of unknown classes may hold tensors of other units as well, such as
            a cache of keys and values; of what is in these only
        since: what autograd has made after so many nodes is watched.
    """

    def pre_backward(_: tuple[torch.Tensor, ...]) -> None:
        unit.pre_backward()

    if type(output) is torch.Tensor:
        return _before_backward_of([output], pre_backward)
    known = list(iterate_tensors(output))
    others = (t for t in tensors_within(output) if t.grad_fn is not None and t.grad_fn._sequence_nr() >= since)
    return _before_backward_of({id(t): t for t in (*known, *others)}.values(), pre_backward)


def _before_backward_of(tensors: Iterable[torch.Tensor | None], hook: Callable[[tuple[Any, ...]], None]) -> bool:
    """Call ``hook`` before the backward of each of ``tensors`` that has one. Whether any has."""
    watched = False
    for tensor in tensors:
        if tensor is None or tensor.grad_fn is None:
            continue
        watched = True
        tensor.grad_fn.register_prehook(hook)
        base = tensor._base
        if base is not None and base.grad_fn is not None and base.grad_fn is not tensor.grad_fn:
            base.grad_fn.register_prehook(hook)
    return watched


def outside_transforms() -> contextlib.AbstractContextManager[object]:
    """Where what is done is not part of what torch.func transforms: gathers move memory, not values."""
    if torch._C._are_functorch_transforms_active():
        return torch._C._DisableFuncTorch()
    return _NO_CONTEXT


def current_backward() -> int:
    """A number for the backward pass that runs on this thread now, or :data:`NO_BACKWARD`."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Whether a backward pass runs on this thread."""
    return current_backward() != NO_BACKWARD


def accumulates(leaf: torch.Tensor) -> bool:
    """Whether the backward pass that runs on this thread now will accumulate a gradient of ``leaf``."""
    with torch.enable_grad():
        view = leaf.expand_as(leaf).grad_fn
    node = None if view is None else view.next_functions[0][0]
    return node is not None and bool(torch._C._will_engine_execute_node(node))


def after_accumulation(leaf: torch.Tensor, call: Callable[[torch.Tensor], None]) -> None:
    """Have autograd call ``call(leaf)`` whenever it has accumulated a gradient of ``leaf``.

    Only the first ``call`` counts. While ``leaf`` requires no gradient nothing happens: ask again when it does.
    """
    if leaf.requires_grad and _HOOKED not in leaf.__dict__:
        leaf.__dict__[_HOOKED] = True
        leaf.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]


class BackwardPass:
    """The backward pass that runs on this thread when it is made.

    Args:
        end: Called once the pass has computed everything.
    """

    creates_graph: bool  # of the gradients, through which another pass may go
    _alive: weakref.ref[_EndOfPass]

    def __init__(self, end: Callable[[], None]) -> None:
        self.creates_graph = torch.is_grad_enabled()
        callback = _EndOfPass(end)
        self._alive = weakref.ref(callback)
        Variable._execution_engine.queue_callback(callback)

    @property
    def runs(self) -> bool:
        """Whether it still runs; not if it has raised."""
        return self._alive() is not None  # autograd drops the callback together with the pass


class _EndOfPass:
    __slots__ = ("__weakref__", "_end")

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end

    def __call__(self) -> None:
        self._end()
