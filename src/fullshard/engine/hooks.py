"""Pre-backward and post-backward hooks. The only file that registers hooks on tensors and autograd nodes.

[Note: Boundaries of a unit in backward]
A unit's backward starts when the first of its outputs receives its gradient: a pre-hook on the autograd node of each
output unshards the parameters. The hook is on the node and not on the tensor, and for an output that is a view also on
its base's node: an in-place operation on a view replaces the view's node, and hooks on the old one would be lost, while
the base's stays in the graph.

It ends when the gradients of its inputs are complete: all inputs that require gradients pass through one autograd
function, whose backward runs after everything between it and the outputs; gradients of leaves are accumulated before
that, because autograd prefers such nodes. If no input requires a gradient (token ids), the unit's backward ends with
the whole backward.

[Note: Double backward]
Gradients computed with ``create_graph=True`` have a graph, which reads the parameters again. So units stay unsharded
after such a pass, until a pass without ``create_graph`` ends, or until their next forward. Backward enters that graph
through the gradients of the unit's inputs, so they are hooked as outputs are. No hook marks the end of that graph, so a
unit that was reached in this way stays unsharded until the end of the backward pass.

If backward reaches a unit's parameters in neither way (a weight that the model has read, derivatives with respect to
parameters that are differentiated again), post-accumulate hooks of the unsharded parameters notify the unit, and it is
reduced at the end of the pass.

[Note: Transforms]
Forward-mode differentiation and the transforms of torch.func compute with several tensors behind one: primal, tangent,
and those of each level of transforms. Each may have a backward, in a graph of its own. So inputs and outputs pass
through an autograd function there, which torch applies on each level, and which applies itself to tangents. The
backward of such a forward ends with the pass. What the engine computes, in forward and in backward, is not to be
differentiated, batched or traced.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch.autograd import Function, Variable, forward_ad
from torch.autograd.function import once_differentiable
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from fullshard.engine.containers import iterate_tensors, map_tensors, tensors_within
from fullshard.engine.parameters.spmd_types import copy_types, spmd_checker

__all__ = [
    "NO_BACKWARD",
    "BackwardEvents",
    "BackwardPass",
    "Call",
    "after_accumulation",
    "current_backward",
    "differentiable",
    "in_backward",
    "outside_transforms",
    "register_post_backward",
    "register_pre_backward",
]

NO_BACKWARD = -1
_HOOKED = "_fullshard_hooked"  # attribute of leaves that after_accumulation has registered a hook on
_NO_CONTEXT = contextlib.nullcontext()
_TRACER = torch._C._TorchDispatchModeKey.PROXY  # of make_fx


class BackwardEvents(Protocol):
    """Callbacks of the backward of one forward of a unit."""

    came: bool  # a backward has come to the output

    def pre_backward(self) -> None:
        """Handle the first gradient of an output."""

    def pre_double_backward(self) -> None:
        """Handle the first gradient of a gradient of an input."""

    def post_backward(self) -> None:
        """Handle the complete gradients of the inputs."""


class Call:
    """A forward call whose backward may come.

    Args:
        node: The autograd node that the inputs passed through. None: no input requires a gradient, so that the backward
            of the call ends with the pass.
        output: The callbacks of its output, if ``node`` is None.
    """

    __slots__ = ("_node", "_output")

    def __init__(self, node: Any | None, output: BackwardEvents | None = None) -> None:
        self._node = None if node is None else weakref.ref(node)  # weak: users drop graphs
        self._output = None if output is None else weakref.ref(output)

    @property
    def ended_with_pass(self) -> bool:
        """True if the end of a backward pass that came to the output is the end of the call's backward."""
        output = None if self._output is None else self._output()
        return self._node is None and (output is None or output.came)

    @property
    def alive(self) -> bool:
        """True while the graph of the call exists."""
        held = self._output if self._node is None else self._node
        return held is not None and held() is not None

    def still_to_run(self) -> bool:
        """True if the backward pass that runs now may still come to the inputs of this call."""
        if self._node is None:
            return self.alive
        node = self._node()
        if node is None or node.ran_in == current_backward():
            return False
        return bool(torch._C._will_engine_execute_node(node))


class _Boundary(Function):
    """Identity on a unit's inputs; calls ``post_backward`` when their gradients are complete."""

    @staticmethod
    def forward(ctx: Any, events: BackwardEvents, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.events, ctx.ran_in = events, NO_BACKWARD
        # Missing gradients stay None. Not if inputs are wrapper subclasses (DTensor, AsyncCollectiveTensor): without
        # materialized gradients, compiled code that takes them loses the node that made them.
        plain = all(type(t) is torch.Tensor for t in tensors)
        ctx.set_materialize_grads(not plain)
        # Compiled code loses the gradient of an unfinished collective; any computation would wait for it anyway.
        return tensors if plain else tuple(t.wait() if isinstance(t, AsyncCollectiveTensor) else t for t in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.ran_in = current_backward()
        if torch.is_grad_enabled():  # create_graph=True
            events = ctx.events
            _before_backward_of(gradients, lambda _: events.pre_double_backward())
        ctx.events.post_backward()
        return (None, *gradients)


# Function.apply searches every argument for functorch wrappers, which costs more than the rest; register_post_backward
# has checked that there are none.
_pass_boundary: Callable[..., Any] = super(Function, _Boundary).apply


class _Transformed(Function):
    """Identity on one tensor, with a backward that is seen on every level of transforms, see [Note: Transforms].

    Args:
        before: Called before its backward.
        before_double: Called before the backward of the gradient that its backward returns.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        before: Callable[[], None] | None, before_double: Callable[[], None] | None, tensor: torch.Tensor
    ) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.before, ctx.before_double, _ = inputs

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        if ctx.before is not None:
            with outside_transforms():
                ctx.before()
        if ctx.before_double is not None and torch.is_grad_enabled():
            gradient = _Transformed.apply(ctx.before_double, None, gradient)  # type: ignore[no-untyped-call]
        return None, None, gradient

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, tangent: torch.Tensor | None) -> torch.Tensor | None:
        if tangent is None:
            return None
        return _Transformed.apply(ctx.before, ctx.before_double, tangent)  # type: ignore[no-untyped-call,no-any-return]


class _Differentiable(Function):
    """A function of one tensor with a backward given by another function."""

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, forward: Callable[[torch.Tensor], Any], backward: Callable[[Any], torch.Tensor]
    ) -> Any:
        ctx.backward_of_value = backward
        return forward(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Any) -> tuple[torch.Tensor, None, None]:
        return ctx.backward_of_value(gradient), None, None


def differentiable(
    value: torch.Tensor, forward: Callable[[torch.Tensor], Any], backward: Callable[[Any], torch.Tensor]
) -> Any:
    """Return ``forward(value)``, which ``backward`` turns a gradient of into one of ``value``."""
    return _Differentiable.apply(value, forward, backward)  # type: ignore[no-untyped-call]


def register_post_backward(
    events: BackwardEvents, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any, Call | None]:
    """Pass every input that requires a gradient through an autograd function that calls ``events``.

    Returns:
        ``args`` and ``kwargs`` with those tensors replaced, and the call, None if there was no such tensor.
    """
    if transforms_run():
        args, kwargs = _transformed((args, kwargs), None, events.pre_double_backward)
        return args, kwargs, None
    if len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor:  # most blocks: no containers to search
        if not args[0].requires_grad:
            return args, kwargs, None
        guarded_args = _guarded(events, args[0])
        return guarded_args, kwargs, Call(guarded_args[0].grad_fn)
    tensors = {id(t): t for t in iterate_tensors((args, kwargs)) if t.requires_grad}
    if not tensors:
        return args, kwargs, None
    aliases = _guarded(events, *tensors.values())
    guarded: dict[int, torch.Tensor] = dict(zip(tensors, aliases, strict=True))
    # One alias per tensor, even if it was passed several times: modules compare inputs by identity.
    args, kwargs = map_tensors(lambda t: guarded.get(id(t), t), (args, kwargs))
    return args, kwargs, Call(next(iter(guarded.values())).grad_fn)


def _guarded(events: BackwardEvents, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    aliases: tuple[torch.Tensor, ...] = _pass_boundary(events, *tensors)
    if spmd_checker() is not None:
        for tensor, alias in zip(tensors, aliases, strict=True):
            copy_types(tensor, alias)
    return aliases


def nodes_made() -> int:
    """Return how many autograd nodes this thread has made."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def register_pre_backward(events: BackwardEvents, output: Any, since: int) -> tuple[Any, bool]:
    """Have ``events.pre_backward`` called before the backward of ``output``.

    Args:
        events: Callbacks of the forward that has returned ``output``.
        output: Tensors in any containers.
        since: Number of autograd nodes at the start of the forward. Objects of unknown classes may hold tensors of
            other units as well, such as a cache of keys and values; only tensors in them with later nodes are hooked.

    Returns:
        What is to be returned instead, and True if there may be a backward.
    """
    if transforms_run():
        # Copies: users may write to outputs, which torch refuses for those of autograd functions.
        return map_tensors(torch.clone, _transformed(output, events.pre_backward, None)), True

    def pre_backward(_: tuple[torch.Tensor, ...]) -> None:
        events.pre_backward()

    if type(output) is torch.Tensor:
        return output, _before_backward_of([output], pre_backward)
    known = list(iterate_tensors(output))
    others = (t for t in tensors_within(output) if t.grad_fn is not None and t.grad_fn._sequence_nr() >= since)
    return output, _before_backward_of({id(t): t for t in (*known, *others)}.values(), pre_backward)


def _before_backward_of(tensors: Iterable[torch.Tensor | None], hook: Callable[[tuple[Any, ...]], None]) -> bool:
    """Call ``hook`` before the backward of each of ``tensors`` that has one. Returns True if any has."""
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


def transforms_run() -> bool:
    """True within transforms of torch.func and forward-mode differentiation, see [Note: Transforms]."""
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0


def _transformed(values: Any, before: Callable[[], None] | None, before_double: Callable[[], None] | None) -> Any:
    """Pass the floating-point tensors in ``values`` through ``_Transformed``, each once."""
    seen: dict[int, torch.Tensor] = {}

    def passed(tensor: torch.Tensor) -> torch.Tensor:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        if id(tensor) not in seen:
            seen[id(tensor)] = _Transformed.apply(before, before_double, tensor)  # type: ignore[no-untyped-call]
        return seen[id(tensor)]

    return map_tensors(passed, values)


def outside_transforms() -> contextlib.AbstractContextManager[object]:
    """Return a context without transforms of torch.func, tracing and checks of types, for what the engine computes."""
    checker = spmd_checker()
    if checker is not None:
        return _unchecked(checker)
    if torch._C._get_dispatch_mode(_TRACER) is not None:
        return _untraced()
    if torch._C._are_functorch_transforms_active():
        return torch._C._DisableFuncTorch()
    return _NO_CONTEXT


@contextlib.contextmanager
def _unchecked(checker: Any) -> Iterator[None]:
    with checker.no_typecheck(), outside_transforms():
        yield


@contextlib.contextmanager
def _untraced() -> Iterator[None]:
    tracer = torch._C._unset_dispatch_mode(_TRACER)
    try:
        with outside_transforms():
            yield
    finally:
        torch._C._set_dispatch_mode(tracer)  # type: ignore[arg-type]  # outside_transforms has seen it


def current_backward() -> int:
    """Return the id of the backward pass that runs on this thread, or ``NO_BACKWARD``."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """True if a backward pass runs on this thread."""
    return torch._C._current_graph_task_id() != NO_BACKWARD


def accumulates(leaf: torch.Tensor) -> bool:
    """True if the backward pass that runs on this thread now will accumulate a gradient of ``leaf``."""
    with torch.enable_grad():
        view = leaf.expand_as(leaf).grad_fn
    node = None if view is None else view.next_functions[0][0]
    return node is not None and bool(torch._C._will_engine_execute_node(node))


def after_accumulation(leaf: torch.Tensor, call: Callable[[torch.Tensor], None]) -> None:
    """Have autograd call ``call(leaf)`` whenever it has accumulated a gradient of ``leaf``.

    No-op for a leaf that has such a hook already, and while ``leaf`` requires no gradient: call it again when it does.
    """
    if leaf.requires_grad and _HOOKED not in leaf.__dict__:
        leaf.__dict__[_HOOKED] = True
        leaf.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]


class BackwardPass:
    """The backward pass that runs on this thread at construction.

    Args:
        end: Called at the end of the pass.
        failed: Called if the pass raises before that.
    """

    creates_graph: bool  # of the gradients, through which another pass may go
    _alive: weakref.ref[_EndOfPass]

    def __init__(self, end: Callable[[], None], failed: Callable[[], None]) -> None:
        self.creates_graph = torch.is_grad_enabled()
        callback = _EndOfPass(end, failed)
        self._alive = weakref.ref(callback)
        Variable._execution_engine.queue_callback(callback)

    @property
    def runs(self) -> bool:
        """True until the pass has ended or raised."""
        return self._alive() is not None  # autograd drops the callback together with the pass


class _EndOfPass:
    __slots__ = ("__weakref__", "_called", "_end", "_failed")

    def __init__(self, end: Callable[[], None], failed: Callable[[], None]) -> None:
        self._end, self._failed, self._called = end, failed, False

    def __call__(self) -> None:
        self._called = True
        with outside_transforms():
            self._end()

    def __del__(self) -> None:
        if not self._called:
            self._failed()
