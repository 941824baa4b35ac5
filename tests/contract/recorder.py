"""What a program can observe of a model, noted at every point at which its author's code can run.

Looking is what a program does: attributes are read, ``named_parameters`` is listed. Nothing is communicated. Every
object seen is kept alive, so that objects can be numbered.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from compare import fqn_of

RTOL, LOW_RTOL = 1e-4, 3e-2  # of the largest element: sums are in another order


@dataclass(frozen=True, eq=False)
class Value:
    """Numbers that are compared within a tolerance, which is wider where they were computed in a low precision."""

    tensor: torch.Tensor
    low: bool

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Value) or self.tensor.shape != other.tensor.shape:
            return False
        if self.tensor.numel() == 0 or torch.equal(self.tensor, other.tensor):
            return True
        tolerance = LOW_RTOL if self.low or other.low else RTOL
        bound = tolerance * max(float(self.tensor.abs().max()), 1e-3)
        return bool(((self.tensor - other.tensor).abs() <= bound).all())

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        flat = self.tensor.flatten()
        return (
            f"{[round(x, 5) for x in flat[:4].tolist()]}{'...' if flat.numel() > 4 else ''} {list(self.tensor.shape)}"
        )


Properties = dict[str, Any]


@dataclass
class Point:
    """What was seen at one point: of every parameter by FQN, and of the program itself by ""."""

    where: str
    seen: dict[str, Properties] = field(default_factory=dict)
    in_backward: bool = False


def kind_of(tensor: object) -> str:
    """How a program tells one kind of parameter from another."""
    if tensor is None:
        return "None"
    if isinstance(tensor, DTensor):
        return "DTensor" if isinstance(tensor, nn.Parameter) else "DTensor, no Parameter"
    if type(tensor).__name__ == "FlatParameter" or getattr(tensor, "_is_flat_param", False):
        return "FlatParameter"
    return "plain" if isinstance(tensor, nn.Parameter) else "plain, no Parameter"


def value_of(tensor: torch.Tensor, low: bool = False) -> Value | str:
    """The numbers that are there: of a DTensor, this rank's."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    local = local.detach()
    if local.numel() and local.untyped_storage().size() == 0:
        return "freed"
    low = low or local.dtype.itemsize < 4
    return Value(local.to(torch.float32, copy=True) if local.dtype.itemsize < 4 else local.clone(), low)


def _look(parameter: object) -> object:
    """What can change of a parameter while it stays the same object; None if it cannot be read."""
    if not isinstance(parameter, torch.Tensor):
        return None
    try:
        leaf = parameter.is_leaf
        grad = parameter.grad if leaf else None
    except RuntimeError:
        return None
    if isinstance(parameter, DTensor):
        more: object = parameter.placements, parameter._local_tensor.shape
    else:
        more = parameter.untyped_storage().size() == 0
    of_grad = None if grad is None else (type(grad), grad.dtype, grad.shape)
    return parameter.shape, parameter.dtype, parameter.requires_grad, leaf, parameter.device, more, of_grad


class Recorder:
    """The points of one run of a program."""

    def __init__(self, model: nn.Module) -> None:
        self.points: list[Point] = []
        self.context = ""
        self.in_backward = False
        self.low = False  # whether the program computes in a low precision
        self.holders = {id(m): (n, m) for n, m in model.named_modules()}
        # Where each parameter is an attribute. Sharding in place replaces parameters, not modules.
        self.places = [
            (f"{prefix}.{name}".lstrip("."), module, name)
            for prefix, module in self.holders.values()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        self.shapes = {fqn: getattr(module, name).shape for fqn, module, name in self.places}
        self.model = model
        self.optimizer: torch.optim.Optimizer | None = None
        self._objects: dict[tuple[str, str], list[object]] = defaultdict(list)
        self._last: dict[str, tuple[object, object, Properties]] = {}  # by FQN: the object, its look, its properties
        self._names: list[str] = []  # as last listed
        self._others: dict[str, str] = {}  # of what named_parameters has listed other objects than modules hold

    # ------------------------------------------------------------ noting

    def note(self, where: str, own: nn.Module | None = None, **facts: Any) -> None:
        """Note all parameters at this point, with the values of those of ``own`` (None: of all), and ``facts``."""
        seen: dict[str, Properties] = {}
        held: dict[str, object] = {}
        moved = False
        for fqn, module, name in self.places:
            held[fqn] = parameter = getattr(module, name, None)
            look = _look(parameter)
            last = self._last.get(fqn)
            if last is None or last[0] is not parameter or last[1] != look or look is None:
                moved = moved or last is None or last[0] is not parameter
                last = self._last[fqn] = parameter, look, self.of(fqn, parameter)
            seen[fqn] = last[2]
            if look is not None and (own is None or own is module):
                seen[fqn] = {**last[2], **self.values_of(parameter)}
        if moved or own is None or where.endswith("root"):
            self._list(held)
        for fqn, other in self._others.items():
            seen[fqn] = {**seen[fqn], "listed by named_parameters": other}
        seen[""] = {"names": self._names, **facts}
        self.points.append(Point(f"{self.context}: {where}", seen, self.in_backward))

    def _list(self, held: dict[str, object]) -> None:
        """List parameters by name: done where modules hold other objects than before, and outside of forward."""
        listed = dict(self.model.named_parameters(remove_duplicate=False))
        by_fqn = {fqn_of(name): parameter for name, parameter in listed.items()}
        self._names = list(listed)
        self._others = {
            fqn: f"another object, {kind_of(by_fqn[fqn])}"
            for fqn, parameter in held.items()
            if parameter is not None and fqn in by_fqn and by_fqn[fqn] is not parameter
        }

    def of(self, fqn: str, parameter: object) -> Properties:
        """What a program can see of a parameter, but for values. It changes only with the object and its look."""
        if not isinstance(parameter, torch.Tensor):
            return {"kind": "missing" if parameter is None else repr(type(parameter))}
        try:
            kind, grad = kind_of(parameter), parameter.grad if parameter.is_leaf else None
        except RuntimeError:
            return {"kind": "a view that cannot be read"}  # of torch's FSDP1
        seen: Properties = {
            "kind": kind,
            "form": self.form(fqn, parameter),
            "identity": self.number(fqn, parameter),
            "shape": tuple(parameter.shape),
            "dtype": parameter.dtype,
            "device": parameter.device.type,
            "requires_grad": parameter.requires_grad,
            "is_leaf": parameter.is_leaf,
            "grad": kind_of(grad).partition(",")[0],
        }
        if isinstance(parameter, DTensor):
            seen["placements"] = str(parameter.placements)
            seen["local shape"] = tuple(parameter._local_tensor.shape)
        if grad is not None:
            seen["grad's dtype and shape"] = f"{grad.dtype} {tuple(grad.shape)}"
        return seen

    def values_of(self, parameter: torch.Tensor) -> Properties:
        """The values of a parameter and its gradient. They are noted anew at each point: not every write is counted."""
        grad = parameter.grad if parameter.is_leaf else None
        return {
            "values": value_of(parameter, self.low),
            "grad's values": None if grad is None else value_of(grad, self.low),
        }

    def form(self, fqn: str, parameter: torch.Tensor) -> str:
        """Whether a parameter is whole, a part of it, or without memory."""
        if isinstance(parameter, DTensor):
            return "DTensor"
        if parameter.numel() and parameter.untyped_storage().size() == 0:
            return "freed"
        return "whole" if parameter.shape == self.shapes[fqn] else "part"

    def number(self, name: str, thing: object) -> str:
        """Number objects of a kind under a name in the order of their first appearance."""
        kind = kind_of(thing)
        objects = self._objects[name, kind]
        for index, known in enumerate(objects):
            if known is thing:
                return f"{kind} {index}"
        objects.append(thing)
        return f"{kind} {len(objects) - 1}"

    def optimizer_facts(self) -> dict[str, Any]:
        """Which objects an optimizer updates, as numbered where modules held them, and what it keeps."""
        assert self.optimizer is not None
        known = {id(o): f"{fqn} {kind} {i}" for (fqn, kind), os in self._objects.items() for i, o in enumerate(os)}
        facts: dict[str, Any] = {}
        for index, parameter in enumerate(p for g in self.optimizer.param_groups for p in g["params"]):
            facts[f"optimizer's parameter {index}"] = known.get(id(parameter), f"unknown {kind_of(parameter)}")
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    facts[f"state {index} {key}"] = f"{kind_of(value)} {value.dtype} {tuple(value.shape)}"
                    facts[f"values of state {index} {key}"] = value_of(value, self.low)
        facts["number of states"] = len(self.optimizer.state)
        return facts

    # ------------------------------------------------------------ points inside forward and backward

    def watch_before_sharding(self, hooks: bool) -> None:
        """Register the hooks of a user who does so before sharding. ``hooks``: on backward of modules, too."""
        for name, module in list(self.holders.values()):
            module.register_forward_pre_hook(self._on("pre", name))
            module.register_forward_hook(self._on("post", name))
            if hooks and not isinstance(module, nn.ModuleList | nn.ModuleDict):
                module.register_full_backward_pre_hook(self._on("backward pre", name))
                module.register_full_backward_hook(self._on("backward post", name))

    def watch_after_sharding(self, late: bool) -> None:
        """Register the hooks that fit sharded parameters, and with ``late`` hooks on forward beside those."""
        for fqn, module, name in self.places:
            parameter = getattr(module, name)
            if isinstance(parameter, nn.Parameter) and parameter.is_leaf and parameter.requires_grad:
                note = self._on_parameter(fqn)
                parameter.register_post_accumulate_grad_hook(note)
        if late:
            for name, module in list(self.holders.values()):
                module.register_forward_pre_hook(self._on("late pre", name))
                module.register_forward_hook(self._on("late post", name))

    def _on(self, what: str, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, *arguments: Any) -> None:
            facts = {}
            if what.endswith("post") and not what.startswith("backward"):
                output = arguments[-1]
                if isinstance(output, torch.Tensor):
                    facts["output"] = f"{output.dtype} {tuple(output.shape)} requires_grad={output.requires_grad}"
                    if what == "post" and output.requires_grad:
                        output.register_hook(lambda gradient: self._on_gradient(name, gradient))
            self.note(f"{what} {name or 'root'}", own=module, **facts)

        return hook

    def _on_gradient(self, name: str, gradient: torch.Tensor) -> None:
        facts = {"gradient of output": value_of(gradient, self.low), "its dtype": gradient.dtype}
        self.note(f"gradient of the output of {name or 'root'}", own=self.holders_by_name(name), **facts)

    def holders_by_name(self, name: str) -> nn.Module:
        """The module that had this name before sharding."""
        return next(m for n, m in self.holders.values() if n == name)

    def _on_parameter(self, fqn: str) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            grad = parameter.grad
            facts = {
                "object": self.number(fqn, parameter),
                "grad": None if grad is None else f"{kind_of(grad)} {grad.dtype} {tuple(grad.shape)}",
            }
            self.points.append(Point(f"{self.context}: post-accumulate {fqn}", {"": facts}, self.in_backward))

        return hook

    @contextlib.contextmanager
    def calls_noted(self) -> Iterator[None]:
        """Inside, what a module's own forward could see just after it has called another module is noted."""
        inside: set[int] = set()

        def noted(call: Callable[..., Any]) -> Callable[..., Any]:
            def noted_call(module: nn.Module, *arguments: Any, **options: Any) -> Any:
                name = self.holders.get(id(module), ("",))[0]
                if name == "" or id(module) in inside:  # a class calls the one that it derives from
                    return call(module, *arguments, **options)
                inside.add(id(module))
                try:
                    result = call(module, *arguments, **options)
                finally:
                    inside.discard(id(module))
                self.note(f"called {name}", own=module)
                return result

            return noted_call

        kinds = {type(module) for module in self.model.modules()}
        own = {kind: kind.__dict__.get("__call__") for kind in kinds}
        for kind, call in {kind: kind.__call__ for kind in kinds}.items():
            kind.__call__ = noted(call)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for kind, call in own.items():
                if call is None:
                    del kind.__call__
                else:
                    kind.__call__ = call  # type: ignore[method-assign]
