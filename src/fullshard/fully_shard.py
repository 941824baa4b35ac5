"""The composable front end: ``fully_shard`` and what it makes of a module."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fullshard.engine.mesh import ShardMesh
from fullshard.engine.ownership import claim_parameters, managed_modules, nested_units, set_unit, unit_of
from fullshard.engine.unit import Unit, UnitSettings
from fullshard.errors import FullshardError
from fullshard.memory import keep_freed_memory

__all__ = ["FSDPModule", "UnshardHandle", "fully_shard", "register_fsdp_forward_method"]


def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
) -> nn.Module:
    """Shard the parameters of ``module`` over the ranks of ``mesh``, in place.

    The parameters that are not yet in a unit below ``module`` become one unit: they are gathered just before
    the module's forward and backward and freed after it, and their gradients are averaged over the ranks. Call
    it bottom-up: on every block, then on the whole model. Afterwards ``module.parameters()`` are ``DTensor``
    shards (``Shard(0)``, cut like ``torch.chunk``; 0-D ones ``Replicate()``); build the optimizer from these.

    Args:
        module: Any module with a ``forward``. Its class becomes ``FSDP<Class>``, a subclass of both
            :class:`FSDPModule` and the old one.
        mesh: 1-D mesh of the ranks; None: all ranks (the default process group is started if it is not).
        reshard_after_forward: Free the full parameters after forward and gather them again for backward (less
            memory), or keep them in between (less communication). None: True, but False for the root.
        ignored_params: Parameters to leave alone: not sharded, moved or reduced.

    Returns:
        ``module`` itself, which is now also an :class:`FSDPModule`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If ``module`` is sharded already or cannot run a forward, if the mesh is not 1-D, or if a
            parameter is a DTensor already.
    """
    ignored = _check_arguments(module, mesh, reshard_after_forward, ignored_params)
    shard_mesh = _shard_mesh(mesh if mesh is not None else _default_mesh())
    if shard_mesh.device.type == "cpu":
        keep_freed_memory()
    _move_buffers(module, shard_mesh.device)
    parameters = claim_parameters(module, ignored)
    settings = UnitSettings(reshard_after_forward=reshard_after_forward)
    unit = Unit(module, shard_mesh, parameters, settings)
    set_unit(module, unit)
    module.__class__ = _sharded_class(type(module), frozenset())
    return module


class FSDPModule(nn.Module):
    """What every module becomes that :func:`fully_shard` was called on."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Construct the class as it was before sharding: slicing a sharded ``Sequential`` gives a plain one."""
        plain = _plain_class(cls)
        instance = plain.__new__(plain)
        instance.__init__(*args, **kwargs)  # type: ignore[misc]
        return instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module with its full parameters."""
        if torch.compiler.is_compiling():
            return _outside_graph(_call_module, recursive=False)(self, args, kwargs)
        unit: Unit = self.__dict__["_fullshard_unit"]
        args, kwargs = unit.pre_forward(args, kwargs)
        try:
            output = super().__call__(*args, **kwargs)
        except BaseException:
            unit.abort_forward()
            raise
        return unit.post_forward(output)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters (not those of units below) and register the full ones.

        Args:
            async_op: Return at once; the handle's ``wait`` (or the module's forward) waits.

        Returns:
            A handle if ``async_op``, else None.
        """
        _check_bool("async_op", async_op)
        handle = UnshardHandle(_unit(self))
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this unit's full parameters and register the sharded ones."""
        _unit(self).reshard()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients. False: they stay unsharded and add up until the next one that does.

        Args:
            requires_gradient_sync: The setting, equal on all ranks.
            recurse: Set it on all units below as well.
        """
        _check_bool("requires_gradient_sync", requires_gradient_sync)
        for unit in _units(self, recurse):
            unit.settings.requires_gradient_sync = requires_gradient_sync

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether to free the full parameters between forward and backward; ends the special rule for the root."""
        _check_bool("reshard_after_forward", reshard_after_forward)
        for unit in _units(self, recurse):
            unit.settings.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether to free the full parameters after backward. False: they serve the next forward as well,
        unless an optimizer has stepped in between.
        """
        _check_bool("reshard_after_backward", reshard_after_backward)
        for unit in _units(self, recurse):
            unit.settings.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather these modules' parameters just before this one's forward, instead of the next in recorded order."""
        _unit(self).settings.forward_prefetch = [unit.ref for unit in _check_units("forward", modules)]

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather these modules' parameters just before this one's backward, instead of the previous in order."""
        _unit(self).settings.backward_prefetch = [unit.ref for unit in _check_units("backward", modules)]

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward is the last before the optimizer step. False (pipelines): do not wait for the
        reductions at its end and keep the order in which forwards ended.
        """
        _check_bool("is_last_backward", is_last_backward)
        _unit(self).attached().is_last_backward = is_last_backward

    def reset_iter_state(self) -> None:
        """Return to rest after an exception: drop unreduced gradients and free everything gathered.

        The next forward of the root does the same by itself, except that after a failed *forward* it keeps
        gradients that wait for a later microbatch.

        Raises:
            FullshardError: If this is not the root.
        """
        unit = _unit(self)
        root = unit.attached().root()
        if root is not unit:
            raise FullshardError(
                f"reset_iter_state was called on unit {unit.name!r}; call it on the root module, "
                f"a {type(root.module()).__name__ if root is not None else 'module that is gone'}"
            )
        unit.attached().recover(drop_gradients=True)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of ``nn.Module``, without communication: values are DTensors on the live shards."""
        _unit(self).settle()
        units = nested_units(self)
        computing = [unit for unit in units if unit.computing]
        for unit in units:
            unit.use_sharded()
        try:
            return super().state_dict(*args, **kwargs)
        finally:
            for unit in computing:
                unit.use_full()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of ``nn.Module``; after a backward that raised, the sharded parameters again."""
        _unit(self).settle()
        return super().named_parameters(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        _unit(self).reshard()
        super()._load_from_state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> FSDPModule:
        unit = _unit(self)
        unit.settle()
        unit.reshard()
        for parameter in unit.parameters:
            parameter.remember_attributes()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        unit.adopt()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> FSDPModule:
        """A sharded copy with shards of its own; it starts at rest."""
        unit = _unit(self)
        unit.settle()
        unit.reshard()
        unit.memoize_parameters(memo)
        copied: FSDPModule = object.__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(_deepcopy_state(self, memo))
        set_unit(copied, unit.copy_for(copied, memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise FullshardError(
            f"{type(self).__name__} cannot be pickled: its shards belong to a process group; "
            "save model.state_dict() with torch.distributed.checkpoint instead"
        )


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
    methods = _forward_methods(type(module)) | {method_name}
    module.__class__ = _sharded_class(_plain_class(type(module)), methods)


_sharded_classes: dict[tuple[type[nn.Module], frozenset[str]], type[FSDPModule]] = {}


def _sharded_class(plain: type[nn.Module], methods: frozenset[str]) -> type[FSDPModule]:
    """The class ``FSDP<plain>`` whose ``methods`` run with full parameters. One per class and set of methods."""
    known = _sharded_classes.get((plain, methods))
    if known is not None:
        return known
    namespace: dict[str, Any] = {"__module__": plain.__module__, "__doc__": plain.__doc__}
    for name in methods:
        namespace[name] = _as_forward(getattr(plain, name))
    namespace["_fullshard_class"] = (plain, methods)
    made = cast("type[FSDPModule]", type(f"FSDP{plain.__name__}", (FSDPModule, plain), namespace))
    _sharded_classes[plain, methods] = made
    return made


def _plain_class(sharded: type) -> type[nn.Module]:
    return cast("type[nn.Module]", sharded._fullshard_class[0])  # type: ignore[attr-defined]


def _forward_methods(sharded: type) -> frozenset[str]:
    return cast("frozenset[str]", sharded._fullshard_class[1])  # type: ignore[attr-defined]


def _as_forward(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self: FSDPModule, *args: Any, **kwargs: Any) -> Any:
        unit = _unit(self)
        args, kwargs = unit.pre_forward(args, kwargs)
        try:
            output = method(self, *args, **kwargs)
        except BaseException:
            unit.abort_forward()
            raise
        return unit.post_forward(output)

    return run


def _call_module(module: FSDPModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``FSDPModule.__call__`` where torch.compile is tracing: the module is compiled, what surrounds it is not."""
    unit = _unit(module)
    args, kwargs = _outside_graph(Unit.pre_forward)(unit, args, kwargs)
    try:
        output = super(FSDPModule, module).__call__(*args, **kwargs)
    except BaseException:
        _outside_graph(Unit.abort_forward)(unit)
        raise
    return _outside_graph(Unit.post_forward)(unit, output)


@functools.cache
def _outside_graph(function: Callable[..., Any], recursive: bool = True) -> Callable[..., Any]:
    """Keep ``function``, and if ``recursive`` what it calls, out of a graph that torch.compile is tracing."""
    return cast("Callable[..., Any]", torch.compiler.disable(function, recursive=recursive))  # type: ignore[no-untyped-call]


def _deepcopy_state(module: nn.Module, memo: dict[int, Any]) -> dict[str, Any]:
    state = {key: value for key, value in module.__dict__.items() if key != "_fullshard_unit"}
    return copy.deepcopy(state, memo)


def _unit(module: nn.Module) -> Unit:
    unit = unit_of(module)
    if unit is None:
        raise FullshardError(f"{type(module).__name__} lost its unit; was its __dict__ replaced?")
    return unit


def _units(module: nn.Module, recurse: bool) -> list[Unit]:
    _check_bool("recurse", recurse)
    return nested_units(module) if recurse else [_unit(module)]


def _check_units(direction: str, modules: Iterable[nn.Module]) -> list[Unit]:
    if isinstance(modules, nn.Module) or not isinstance(modules, Iterable):
        raise TypeError(
            f"set_modules_to_{direction}_prefetch: expected a list of modules, found {type(modules).__name__}"
        )
    units = []
    for index, module in enumerate(modules):
        if not isinstance(module, FSDPModule):
            raise ValueError(
                f"set_modules_to_{direction}_prefetch: expected modules that fully_shard was called on, "
                f"found {type(module).__name__} at index {index}"
            )
        units.append(_unit(module))
    return units


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}: expected True or False, found {value!r} of type {type(value).__name__}")


def _check_arguments(
    module: nn.Module,
    mesh: DeviceMesh | None,
    reshard_after_forward: bool | None,
    ignored_params: Iterable[nn.Parameter] | None,
) -> list[nn.Parameter]:
    if not isinstance(module, nn.Module):
        raise TypeError(f"fully_shard: expected an nn.Module, found {type(module).__name__}")
    if unit_of(module) is not None:
        raise ValueError(
            f"fully_shard was already called on this {_plain_class(type(module)).__name__}; each module "
            "can be a unit once"
        )
    if type(module).forward in (nn.Module.forward, nn.ModuleList.forward, nn.ModuleDict.forward):
        raise ValueError(
            f"fully_shard: {type(module).__name__} has no forward of its own, so there is no moment to gather "
            "its parameters; call fully_shard on each of its modules and on the module that contains it"
        )
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(f"fully_shard: mesh: expected a DeviceMesh or None, found {type(mesh).__name__}")
    if mesh is not None and mesh.ndim != 1:
        raise ValueError(f"fully_shard: mesh: expected 1 dimension, found {mesh.ndim} in {mesh}")
    if reshard_after_forward is not None:
        _check_bool("fully_shard: reshard_after_forward", reshard_after_forward)
    if isinstance(ignored_params, torch.Tensor) or not isinstance(ignored_params, (Iterable, type(None))):
        raise TypeError(
            f"fully_shard: ignored_params: expected a set or list of parameters, found {type(ignored_params).__name__}"
        )
    ignored = list(ignored_params or ())
    for parameter in ignored:
        if not isinstance(parameter, nn.Parameter):
            raise TypeError(
                f"fully_shard: ignored_params: expected parameters, found a {type(parameter).__name__}; "
                "pass module.parameters() to ignore a module"
            )
    _check_parameters(module, {id(p) for p in ignored})
    return ignored


def _check_parameters(module: nn.Module, ignored: set[int]) -> None:
    for prefix, submodule in managed_modules(module):
        for name, parameter in submodule._parameters.items():
            if parameter is None or id(parameter) in ignored:
                continue
            fqn = f"{prefix}.{name}" if prefix else name
            if nn.parameter.is_lazy(parameter):
                raise ValueError(f"fully_shard: {fqn} is uninitialised; run a forward first so that it gets its shape")
            if isinstance(parameter, DTensor) and not hasattr(parameter, "_fullshard_parameter"):
                raise ValueError(
                    f"fully_shard: {fqn} is a DTensor already (placements {parameter.placements}); "
                    "expected a plain parameter"
                )


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for _, submodule in managed_modules(module):
        for name, buffer in submodule._buffers.items():
            if buffer is not None and buffer.device.type not in (device.type, "meta"):
                submodule._buffers[name] = buffer.to(device)


def _shard_mesh(mesh: DeviceMesh) -> ShardMesh:
    """The shard mesh for ``mesh``, one for all units that share the object."""
    existing = getattr(mesh, "_fullshard_mesh", None)
    if existing is None:
        existing = ShardMesh(mesh)
        mesh._fullshard_mesh = existing  # type: ignore[attr-defined]
    return cast("ShardMesh", existing)


_default: list[tuple[dist.ProcessGroup, DeviceMesh]] = []  # at most one: the mesh of the present default group


def _default_mesh() -> DeviceMesh:
    """All ranks in one dimension, on the accelerator if there is one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if not dist.is_initialized():
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            dist.init_process_group()
        else:  # a plain `python script.py`: the only sensible world is this process
            dist.init_process_group(store=HashStore(), rank=0, world_size=1)
    group = dist.distributed_c10d._get_default_group()
    if not _default or _default[0][0] is not group:
        on_accelerator = accelerator is not None and _serves(group, accelerator)
        device_type = accelerator.type if accelerator is not None and on_accelerator else "cpu"
        _default[:] = [(group, init_device_mesh(device_type, (group.size(),)))]
    return _default[0][1]


def _serves(group: dist.ProcessGroup, device: torch.device) -> bool:
    try:
        group._get_backend(device)
    except RuntimeError:
        return False
    return True
