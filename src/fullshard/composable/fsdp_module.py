"""``FSDPModule``: the class of modules that ``fully_shard`` was called on, and functions that take them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, cast

import torch
from torch import nn

from fullshard.composable.controls import Controls
from fullshard.engine.ownership import nested_units
from fullshard.engine.runtime import Runtime, ensure_idle, runtime_of
from fullshard.engine.settings import CommStreams
from fullshard.engine.unit import Unit
from fullshard.errors import FullshardError
from fullshard.frontend.arguments import check_bool, check_modules
from fullshard.frontend.sharded_module import ShardedModule, computes_on_copies, outside_graph, unit_at

__all__ = [
    "FSDPModule",
    "ReplicateModule",
    "UnshardHandle",
    "register_fsdp_forward_method",
    "set_class",
    "sharded_class",
    "share_comm_ctx",
    "unsharded",
]


class FSDPModule(Controls, ShardedModule):
    """Mixin of the class of every module that :func:`fully_shard` was called on."""

    _fullshard_prefix: ClassVar[str] = "FSDP"  # of the name of the module's new class

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Construct an instance of the original class: slicing a sharded ``Sequential`` returns a plain one."""
        plain = _plain_class(cls)
        instance = plain.__new__(plain)
        instance.__init__(*args, **kwargs)  # type: ignore[misc]
        return instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module with its unsharded parameters."""
        if torch.compiler.is_compiling():
            return outside_graph(_call_module, recursive=False)(self, args, kwargs)
        return _run_unsharded(self, super().__call__, args, kwargs)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gather this unit's parameters (not those of nested units) and register the unsharded ones.

        Args:
            async_op: Return at once; the handle's ``wait`` (or the module's forward) waits for the all-gather.

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
        """Free this unit's unsharded parameters and register the sharded ones."""
        unit_at(self).reshard()

    def reset_iter_state(self) -> None:
        """Return to idle after an exception: drop unreduced gradients and free unsharded parameters.

        The next forward of the root does the same by itself, except that after a failed *forward* it keeps unreduced
        gradients of earlier microbatches.

        Raises:
            FullshardError: If this is not the root.
        """
        unit = unit_at(self)
        root = runtime_of(unit).root()
        if root is not unit:
            raise FullshardError(
                f"reset_iter_state was called on unit {unit.name!r}; call it on the root module, "
                f"a {type(root.modules[0]()).__name__ if root is not None else 'module that is gone'}"
            )
        runtime_of(unit).recover(drop_gradients=True)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return a sharded state dict, without communication: values are DTensors that share memory with the shards."""
        ensure_idle(unit_at(self))
        units = nested_units(self)
        computing = [unit for unit in units if unit.registration.unsharded and _is_computing(unit)]
        for unit in units:
            unit.register_sharded()
        try:
            return super().state_dict(*args, **kwargs)
        finally:
            for unit in computing:
                runtime_of(unit).unshard(unit)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        unit_at(self).reshard()
        super()._load_from_state_dict(*args, **kwargs)


class UnshardHandle:
    """Handle of an all-gather in flight, returned by ``unshard(async_op=True)``."""

    _unit: Unit | None

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        runtime_of(unit).begin_unshard([unit])

    def wait(self) -> None:
        """Wait for the all-gather and register the unsharded parameters; no-op if called again."""
        if self._unit is not None:
            runtime_of(self._unit).unshard(self._unit)
            self._unit = None


class ReplicateModule(FSDPModule):
    """Mixin of the class of every module that :func:`replicate` was called on."""

    _fullshard_prefix: ClassVar[str] = "Replicate"


@contextlib.contextmanager
def unsharded(module: nn.Module) -> Iterator[nn.Module]:
    """Unshard all units of ``module`` and keep them unsharded until the end of the ``with`` block.

    For loops that run the model many times without training it, such as ``generate()``: nothing is all-gathered or
    freed in between. Inside, modules and ``parameters()`` hold the unsharded parameters, at addresses that stay the
    same; build optimizers and clip gradients outside. Do not write to them: writes are lost at the end, unless the
    parameters share memory with the shards, as on one rank. All ranks have to enter it. If an optimizer steps inside,
    the next forward all-gathers anew.

    Args:
        module: Any module that contains sharded modules.

    Yields:
        ``module``.

    Raises:
        TypeError: If it is not a module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"unsharded: expected an nn.Module, found {type(module).__name__}")
    units = nested_units(module)
    unsharded_units: list[Unit] = []
    try:
        for unit in units:
            ensure_idle(unit)
            runtime_of(unit).begin_user_unshard(unit)
        for unit in units:
            runtime_of(unit).user_unshard(unit)
            unsharded_units.append(unit)
        yield module
    finally:
        for unit in unsharded_units:
            runtime_of(unit).end_user_unshard(unit)
        for unit in units[len(unsharded_units) :]:  # one of their all-gathers failed
            if unit.is_idle and not unit.user_unshards:
                unit.reshard()


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Share communication streams between several roots (stages of a pipeline).

    Args:
        modules: Sharded modules, each the root of a stage, before or after their first forward.

    Raises:
        TypeError: If it is not a list.
        ValueError: If one is not a sharded module.
    """
    units = [unit_at(module) for module in check_modules("share_comm_ctx", modules, FSDPModule)]
    if not units:
        return
    comm_streams = units[0].settings.comm_streams
    if comm_streams is None:
        runtime = units[0].runtime
        comm_streams = CommStreams.on(units[0].mesh.device) if runtime is None else runtime.comm_streams
    for unit in units:
        unit.settings.comm_streams = comm_streams
        if unit.runtime is not None:
            unit.runtime.comm_streams = comm_streams


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Treat a method (``generate``, ``encode_image``) as a forward: unshard before it and reshard after it.

    Args:
        module: No-op if it is not an :class:`FSDPModule`.
        method_name: Name of a method of its class.

    Raises:
        TypeError: If ``module`` is not a module.
        ValueError: If the class has no such method.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"register_fsdp_forward_method: expected an nn.Module, found {type(module).__name__}")
    if not isinstance(module, FSDPModule):
        return
    if not isinstance(method_name, str) or not callable(getattr(type(module), method_name, None)):
        raise ValueError(
            f"register_fsdp_forward_method: expected the name of a method of {_plain_class(type(module)).__name__}, "
            f"found {method_name!r}"
        )
    # On a class, not on the instance: a bound method in the instance would be a reference cycle, and a deepcopy
    # would run the original's.
    plain, methods, base = cast("_ClassKey", type(module)._fullshard_class)  # type: ignore[attr-defined]
    set_class(module, sharded_class(plain, methods | {method_name}, base))


def set_class(module: nn.Module, sharded: type[FSDPModule]) -> None:
    """Change the class of ``module``, also if it forwards ``__setattr__`` (as results of torch.compile do)."""
    object.__setattr__(module, "__class__", sharded)


_ClassKey = tuple[type[nn.Module], frozenset[str], type[FSDPModule]]
_sharded_classes: dict[_ClassKey, type[FSDPModule]] = {}


def sharded_class(
    plain: type[nn.Module], methods: frozenset[str] = frozenset(), base: type[FSDPModule] = FSDPModule
) -> type[FSDPModule]:
    """Return the class ``FSDP<plain>`` whose ``methods`` run with unsharded parameters. Cached by all arguments."""
    key: _ClassKey = (plain, methods, base)
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
    running = unit.runtime is not None and unit.runtime.busy
    return running or not unit.is_idle or unit.user_unshards > 0


def _plain_class(sharded: type) -> type[nn.Module]:
    return cast("type[nn.Module]", sharded._fullshard_class[0])  # type: ignore[attr-defined]


def _as_forward(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self: FSDPModule, *args: Any, **kwargs: Any) -> Any:
        return _run_unsharded(self, functools.partial(method, self), args, kwargs)

    return run


def _run_unsharded(
    module: FSDPModule, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    unit = unit_at(module)
    if computes_on_copies(unit):
        return forward(*args, **kwargs)
    runtime = runtime_of(unit)
    args, kwargs = runtime.pre_forward(unit, args, kwargs)
    try:
        output = forward(*args, **kwargs)
    except BaseException:
        runtime.abort_forward(unit)
        raise
    return runtime.post_forward(unit, module, output)


def _call_module(module: FSDPModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a module that torch.compile traces: the module's own forward is compiled, unshard and reshard are not."""
    unit = unit_at(module)
    runtime = outside_graph(runtime_of)(unit)
    args, kwargs = outside_graph(Runtime.pre_forward)(runtime, unit, args, kwargs)
    try:
        output = super(FSDPModule, module).__call__(*args, **kwargs)
    except BaseException:
        outside_graph(Runtime.abort_forward)(runtime, unit)
        raise
    return outside_graph(Runtime.post_forward)(runtime, unit, module, output)
