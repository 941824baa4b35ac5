"""What sharding makes of a module: its class, and how it runs, is saved and is copied."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, cast

import torch
from torch import nn

from fullshard.arguments import check_bool, check_modules
from fullshard.controls import Controls
from fullshard.engine.ownership import nested_units
from fullshard.engine.settings import Lanes
from fullshard.engine.unit import Unit
from fullshard.errors import FullshardError
from fullshard.sharded_module import ShardedModule, outside_graph, reads_copies, unit_at

__all__ = [
    "FSDPModule",
    "ReplicateModule",
    "UnshardHandle",
    "become",
    "register_fsdp_forward_method",
    "sharded_class",
    "share_comm_ctx",
    "unsharded",
]


class FSDPModule(Controls, ShardedModule):
    """What every module becomes that :func:`fully_shard` was called on."""

    _fullshard_prefix: ClassVar[str] = "FSDP"  # of the names of the classes made

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Construct the class as it was before sharding: slicing a sharded ``Sequential`` gives a plain one."""
        plain = _plain_class(cls)
        instance = plain.__new__(plain)
        instance.__init__(*args, **kwargs)  # type: ignore[misc]
        return instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module with its full parameters."""
        if torch.compiler.is_compiling():
            return outside_graph(_call_module, recursive=False)(self, args, kwargs)
        unit: Unit = self.__dict__["_fullshard_unit"]
        if reads_copies(unit):
            return super().__call__(*args, **kwargs)
        args, kwargs = unit.pre_forward(args, kwargs)
        try:
            output = super().__call__(*args, **kwargs)
        except BaseException:
            unit.abort_forward()
            raise
        return unit.post_forward(self, output)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters (not those of units below) and register the full ones.

        Args:
            async_op: Return at once; the handle's ``wait`` (or the module's forward) waits.

        Returns:
            A handle if ``async_op``, else None.
        """
        check_bool("async_op", async_op)
        handle = UnshardHandle(unit_at(self))
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this unit's full parameters and register the sharded ones."""
        unit_at(self).reshard()

    def reset_iter_state(self) -> None:
        """Return to rest after an exception: drop unreduced gradients and free everything gathered.

        The next forward of the root does the same by itself, except that after a failed *forward* it keeps
        gradients that wait for a later microbatch.

        Raises:
            FullshardError: If this is not the root.
        """
        unit = unit_at(self)
        root = unit.attached().root()
        if root is not unit:
            raise FullshardError(
                f"reset_iter_state was called on unit {unit.name!r}; call it on the root module, "
                f"a {type(root.modules[0]()).__name__ if root is not None else 'module that is gone'}"
            )
        unit.attached().recover(drop_gradients=True)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of ``nn.Module``, without communication: values are DTensors on the live shards."""
        unit_at(self).settle()
        units = nested_units(self)
        computing = [unit for unit in units if unit.registration.full and _is_computing(unit)]
        for unit in units:
            unit.use_sharded()
        try:
            return super().state_dict(*args, **kwargs)
        finally:
            for unit in computing:
                unit.use_full()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        unit_at(self).reshard()
        super()._load_from_state_dict(*args, **kwargs)


class UnshardHandle:
    """What ``unshard(async_op=True)`` returns."""

    _unit: Unit | None

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        unit.gather()

    def wait(self) -> None:
        """Have the module hold its full parameters. May be called again; then it does nothing."""
        if self._unit is not None:
            self._unit.use_full()
            self._unit = None


class ReplicateModule(FSDPModule):
    """What every module becomes that :func:`replicate` was called on."""

    _fullshard_prefix: ClassVar[str] = "Replicate"


@contextlib.contextmanager
def unsharded(module: nn.Module) -> Iterator[nn.Module]:
    """Gather all units of ``module`` once and keep them until the end of the ``with`` block.

    For loops that run the model many times without training it, such as ``generate()``: nothing is gathered or
    freed in between. Inside, the modules hold their full parameters, at addresses that stay the same. Do not write to
    them: it is lost at the end, unless they lie in the shards, as on one rank. ``parameters()`` are those as well, so
    build optimizers and clip gradients outside. All ranks have to enter it. If an optimizer steps inside, the next
    forward gathers anew.

    Args:
        module: Any module; units below it count.

    Yields:
        ``module``.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"unsharded: expected an nn.Module, found {type(module).__name__}")
    units = nested_units(module)
    held: list[Unit] = []
    try:
        for unit in units:
            unit.settle()
            unit.begin_hold()
        for unit in units:
            unit.hold()
            held.append(unit)
        yield module
    finally:
        for unit in held:
            unit.release()
        for unit in units[len(held) :]:  # one of them could not be gathered
            if unit.resting and not unit.progress.held:
                unit.reshard()


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Have several roots (stages of a pipeline) use the same streams for their communication.

    Args:
        modules: Sharded modules, each the root of its own stage. Before or after their first forward.

    Raises:
        TypeError: If it is not a list.
        ValueError: If one is not a sharded module.
    """
    units = [unit_at(module) for module in check_modules("share_comm_ctx", modules, FSDPModule)]
    if not units:
        return
    lanes = units[0].settings.lanes
    if lanes is None:
        schedule = units[0].schedule
        lanes = Lanes.on(units[0].mesh.device) if schedule is None else schedule.lanes
    for unit in units:
        unit.settings.lanes = lanes
        if unit.schedule is not None:
            unit.schedule.lanes = lanes


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Treat a method as a forward: gather before it and free after it (``generate``, ``encode_image``).

    Args:
        module: If it is not an :class:`FSDPModule`, nothing happens.
        method_name: Name of a method of its class.

    Raises:
        ValueError: If the class has no such method.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"register_fsdp_forward_method: expected an nn.Module, found {type(module).__name__}")
    if not isinstance(module, FSDPModule):
        return
    if not isinstance(method_name, str) or not callable(getattr(type(module), method_name, None)):
        raise ValueError(
            f"expected the name of a method of {_plain_class(type(module)).__name__}, found {method_name!r}"
        )
    # On a class, not on the instance: a bound method in the instance would be a reference cycle, and a deepcopy
    # would run the original's.
    plain, methods, base = cast("_Made", type(module)._fullshard_class)  # type: ignore[attr-defined]
    become(module, sharded_class(plain, methods | {method_name}, base))


def become(module: nn.Module, made: type[FSDPModule]) -> None:
    """Change the class of ``module``, also where its class passes attributes on (what torch.compile returns)."""
    object.__setattr__(module, "__class__", made)


_Made = tuple[type[nn.Module], frozenset[str], type[FSDPModule]]
_sharded_classes: dict[_Made, type[FSDPModule]] = {}


def sharded_class(
    plain: type[nn.Module], methods: frozenset[str] = frozenset(), base: type[FSDPModule] = FSDPModule
) -> type[FSDPModule]:
    """The class ``FSDP<plain>`` whose ``methods`` run with full parameters. One per class, methods and base."""
    key: _Made = (plain, methods, base)
    known = _sharded_classes.get(key)
    if known is not None:
        return known
    namespace: dict[str, Any] = {"__module__": plain.__module__, "__doc__": plain.__doc__}
    for name in methods:
        namespace[name] = _as_forward(getattr(plain, name))
    namespace["_fullshard_class"] = key
    made = cast("type[FSDPModule]", type(f"{base._fullshard_prefix}{plain.__name__}", (base, plain), namespace))
    _sharded_classes[key] = made
    return made


def _is_computing(unit: Unit) -> bool:
    running = unit.schedule is not None and unit.schedule.busy
    return running or not unit.resting or unit.progress.held > 0


def _plain_class(sharded: type) -> type[nn.Module]:
    return cast("type[nn.Module]", sharded._fullshard_class[0])  # type: ignore[attr-defined]


def _as_forward(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self: FSDPModule, *args: Any, **kwargs: Any) -> Any:
        unit = unit_at(self)
        if reads_copies(unit):
            return method(self, *args, **kwargs)
        args, kwargs = unit.pre_forward(args, kwargs)
        try:
            output = method(self, *args, **kwargs)
        except BaseException:
            unit.abort_forward()
            raise
        return unit.post_forward(self, output)

    return run


def _call_module(module: FSDPModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``FSDPModule.__call__`` where torch.compile is tracing: the module is compiled, what surrounds it is not."""
    unit = unit_at(module)
    args, kwargs = outside_graph(Unit.pre_forward)(unit, args, kwargs)
    try:
        output = super(FSDPModule, module).__call__(*args, **kwargs)
    except BaseException:
        outside_graph(Unit.abort_forward)(unit)
        raise
    return outside_graph(Unit.post_forward)(unit, module, output)
