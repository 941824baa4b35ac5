"""``FSDPModule``: the class of modules that ``fully_shard`` was called on, and functions that take them.

Setters are called between steps, with equal values on all ranks.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import torch
from torch import nn

from fullshard.comm import (
    ProcessGroupMemoryAllGather,
    ProcessGroupMemoryReduceScatter,
    SymmetricMemoryAllGather,
    SymmetricMemoryReduceScatter,
    Transport,
)
from fullshard.engine.ownership import nested_units
from fullshard.engine.runtime import Runtime, ensure_idle, runtime_of
from fullshard.engine.settings import CommStreams
from fullshard.engine.unit import Unit
from fullshard.errors import FullshardError
from fullshard.frontend.arguments import check_bool
from fullshard.frontend.sharded_module import (
    ShardedModule,
    computes_on_copies,
    outside_graph,
    unit_at,
    units_at,
)
from fullshard.memory import Event, Stream

if TYPE_CHECKING:
    from fullshard.comm import AllGather, ReduceScatter

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


class FSDPModule(ShardedModule):
    """Mixin of the class of every module that :func:`fully_shard` was called on.

    Setters with ``recurse`` apply to all nested units as well.
    """

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
                f"reset_iter_state: expected the root module, found unit {unit.described}; call it on the root, "
                + (f"a {type(root.modules[0]()).__name__}" if root is not None else "which has been deleted")
            )
        runtime_of(unit).reset()

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

    # ---------------------------------------------------------------- gradients

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set if backward reduces gradients. False: they accumulate unsharded until the next backward that does.

        They accumulate in ``reduce_dtype``, in place. Sets :meth:`set_requires_all_reduce` to the same value.
        """
        check_bool("requires_gradient_sync", requires_gradient_sync)
        for unit in units_at(self, recurse):
            unit.settings.requires_gradient_sync = unit.settings.requires_all_reduce = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set if backward all-reduces over the replicate axis of a 2-D mesh. False: gradients are reduce-scattered
        only, and accumulate sharded until the next backward that does both.
        """
        check_bool("requires_all_reduce", requires_all_reduce)
        for unit in units_at(self, recurse):
            unit.settings.requires_all_reduce = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set if the next backward is the last before the optimizer step. False (pipelines): do not wait for
        reductions at its end, and keep the recorded order of forwards.
        """
        check_bool("is_last_backward", is_last_backward)
        runtime_of(unit_at(self)).is_last_backward = is_last_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this unit's summed gradients by ``factor`` instead of by the number of ranks.

        Raises:
            ValueError: If it is not a positive number.
        """
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
            raise ValueError(f"set_gradient_divide_factor: expected a positive number, found {factor!r}")
        unit_at(self).settings.reduction.divide_factor = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Set the divide factor: deprecated name of :meth:`set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Set if collectives of this unit reduce with SUM only, and a separate kernel divides. For back ends, and
        algorithms of NCCL, that do not support AVG.
        """
        check_bool("set_force_sum_reduction_for_comms", enable)
        unit_at(self).settings.reduction.force_sum = enable

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Set if parameters without a gradient on any rank get a gradient of zeros instead of None."""
        check_bool("reduce_scatter_unused_params", reduce_scatter_unused_params)
        for unit in units_at(self, recurse):
            unit.settings.reduction.zeros_for_missing = reduce_scatter_unused_params

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set how many units' unsharded gradients may wait for their reduce-scatter during backward (default 1).

        Each additional one overlaps more communication and costs the memory of a unit's gradients. The largest value
        of the units of a model applies.

        Raises:
            TypeError: If it is not an int.
            ValueError: If it is less than 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"set_reduce_scatter_max_input_buffers: expected an int, found {max_input_buffers!r}")
        if max_input_buffers < 1:
            raise ValueError(f"set_reduce_scatter_max_input_buffers: expected at least 1, found {max_input_buffers}")
        for unit in units_at(self, recurse):
            scatter = unit.settings.collectives.reduce_scatter
            if max_input_buffers > 1 and isinstance(scatter, SymmetricMemoryReduceScatter):
                raise ValueError(
                    f"set_reduce_scatter_max_input_buffers: expected 1, found {max_input_buffers}: unit "
                    f"{unit.described} reduce-scatters in symmetric memory, which has a single buffer"
                )
            unit.settings.reduction.max_in_flight = max_input_buffers

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], object], *, stream: Stream | None = None) -> None:
        """Call ``hook`` with this unit's reduced gradients, before they become ``.grad``.

        Args:
            hook: Called with a flat tensor, in the reduce dtype, of this rank's rows of all trainable parameters
                (padded with zeros), which it may change in place: after the reduce-scatter on a 1-D mesh, after the
                all-reduce on a 2-D mesh. It is called once per dtype of the unit's parameters; without a shard axis (a
                single rank included) once for each large parameter and once for all others. It must do the same on all
                ranks.
            stream: Stream to run it on; None: that of the collectives.

        Raises:
            TypeError: If ``hook`` is not callable.
            ValueError: If a stream is given on a 2-D mesh, or the unit's parameters are on several meshes.
        """
        if not callable(hook):
            raise TypeError(f"set_all_reduce_hook: expected a function, found {type(hook).__name__}")
        unit = unit_at(self)
        if stream is not None and unit.mesh.replicate is not None:
            raise ValueError("set_all_reduce_hook: expected stream=None on a mesh with a replicate axis, found one")
        _check_one_mesh("set_all_reduce_hook", unit)
        unit.settings.reduction.hook, unit.settings.reduction.hook_stream = hook, stream

    # ---------------------------------------------------------------- unshard and reshard

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set if the unsharded parameters are freed between forward and backward, also for the root."""
        check_bool("reshard_after_forward", reshard_after_forward)
        for unit in units_at(self, recurse):
            unit.settings.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set if the unsharded parameters are freed after backward. False: the next forward reuses them, unless an
        optimizer has stepped in between.
        """
        check_bool("reshard_after_backward", reshard_after_backward)
        for unit in units_at(self, recurse):
            unit.settings.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set if this unit is unsharded in backward. False: for modules whose backward does not read their parameters,
        such as an embedding.
        """
        check_bool("unshard_in_backward", unshard_in_backward)
        unit_at(self).settings.unshard_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: list[Any]) -> None:
        """Prefetch these modules in this module's forward, instead of the next in recorded order."""
        found = _units("set_modules_to_forward_prefetch", modules)
        unit_at(self).settings.forward_prefetch = [unit.ref for unit in found]

    def set_modules_to_backward_prefetch(self, modules: list[Any]) -> None:
        """Prefetch these modules in this module's backward, instead of the previous in recorded order."""
        found = _units("set_modules_to_backward_prefetch", modules)
        unit_at(self).settings.backward_prefetch = [unit.ref for unit in found]

    def set_post_optim_event(self, event: Event) -> None:
        """Make the first all-gathers of the next forward wait for ``event`` only, recorded after the optimizer step,
        instead of for the whole current stream. Call it on the root, after every step.
        """
        if not callable(getattr(event, "synchronize", None)):  # the device modules have event classes of their own
            raise TypeError(f"set_post_optim_event: expected a torch.Event, found {type(event).__name__}")
        unit_at(self).settings.post_optim_event = event

    # ---------------------------------------------------------------- communication

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """All-gather this unit with ``comm``, as one collective between buffers that ``comm`` allocates.

        Args:
            comm: A :class:`fullshard.AllGather`; None: the default.

        Raises:
            ValueError: If the unit's parameters are on several meshes.
        """
        self._set_custom("set_custom_all_gather", all_gather=comm)

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce-scatter this unit with ``comm``, as one collective between buffers that ``comm`` allocates.

        Args:
            comm: A :class:`fullshard.ReduceScatter`; None: the default.

        Raises:
            ValueError: If the unit's parameters are on several meshes.
        """
        self._set_custom("set_custom_reduce_scatter", reduce_scatter=comm)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Set if communication buffers of this unit are allocated by its process group (NCCL: registered memory, for
        zero-copy collectives that use fewer SMs). Back ends without such memory use ordinary memory.

        Raises:
            ValueError: If a custom collective is set.
        """
        api = "set_allocate_memory_from_process_group_for_comm"
        check_bool(api, enable)
        own = (ProcessGroupMemoryAllGather, ProcessGroupMemoryReduceScatter)
        transport = self._own_memory(api, own)
        if transport.world_size > 1:
            made = own[0](transport.group), own[1](transport.reduce_group)
            gather, scatter = made if enable else (None, None)
            self._set_custom(api, all_gather=gather, reduce_scatter=scatter)

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Allocate communication buffers of this unit in symmetric memory.

        Reduce-scatters use it only after :meth:`set_force_sum_reduction_for_comms`, because NCCL's symmetric kernels do
        not support AVG.

        Raises:
            ValueError: If the unit is not on CUDA with NCCL, or a custom collective is set.
        """
        api = "set_symm_mem_for_comm"
        transport = self._own_memory(api, (SymmetricMemoryAllGather, SymmetricMemoryReduceScatter))
        if transport.world_size > 1:
            unit = unit_at(self)
            scatter = None
            if unit.settings.reduction.force_sum:
                scatter = SymmetricMemoryReduceScatter(transport.reduce_group, backend)
            gather = SymmetricMemoryAllGather(transport.group, backend)
            self._set_custom(api, all_gather=gather, reduce_scatter=scatter)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Set if reduce-scatters use a separate communicator, so that they overlap with all-gathers.

        The default on NCCL, at the cost of its buffers. Other back ends do not need it. Set it for all units of a mesh,
        which share communicators, and on all ranks.
        """
        check_bool("set_separate_reduce_scatter_group", enable)
        for unit in units_at(self, recurse):
            for bucket in unit.buckets:
                bucket.mesh.transport.separate_reduce_group(enable)

    def _own_memory(self, api: str, own: tuple[type, ...]) -> Transport:
        unit = unit_at(self)
        for comm in (unit.settings.collectives.all_gather, unit.settings.collectives.reduce_scatter):
            if comm is not None and not isinstance(comm, own):
                raise ValueError(
                    f"{api}: unit {unit.described} has a custom collective, which allocates its own buffers; remove it "
                    "first: set_custom_all_gather(None), set_custom_reduce_scatter(None)"
                )
        return unit.mesh.transport

    def _set_custom(self, api: str, **collectives: Any) -> None:
        """Set ``all_gather``, ``reduce_scatter`` or both; None: the default."""
        unit = unit_at(self)
        _check_one_mesh(api, unit)
        for comm in collectives.values():
            if comm is not None and not (callable(comm) and callable(getattr(comm, "allocate", None))):
                raise TypeError(f"{api}: expected an object with __call__ and allocate, found {type(comm).__name__}")
        if not unit.is_idle:
            raise FullshardError(
                f"{api}: unit {unit.described} is in the middle of its {unit.phase.value}; call it between steps"
            )
        before = unit.settings.collectives
        if before.quantization is not None:
            raise ValueError(
                f"{api}: unit {unit.described} has quantized communication; turn that off first: call "
                "set_comm_quantization() without arguments"
            )
        unit.settings.collectives = replace(before, **collectives)
        try:
            unit.change_transports()
        except FullshardError:
            unit.settings.collectives = before
            raise


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


def _check_one_mesh(api: str, unit: Unit) -> None:
    if len({id(parameter.placement.mesh) for parameter in unit.parameters}) > 1:
        raise ValueError(
            f"{api}: expected all parameters of a unit on one mesh; shard_placement_fn has placed those of unit "
            f"{unit.described} on several meshes"
        )


def _units(api: str, modules: Any) -> list[Unit]:
    """Return the units of a list of sharded modules."""
    if isinstance(modules, nn.Module) or not isinstance(modules, Iterable):
        raise TypeError(f"{api}: expected a list of modules, found {type(modules).__name__}")
    found = list(modules)
    for index, module in enumerate(found):
        if not isinstance(module, FSDPModule):
            raise ValueError(
                f"{api}: expected modules that fully_shard was called on, found {type(module).__name__} at "
                f"index {index}"
            )
    return [unit_at(module) for module in found]


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
    units = _units("share_comm_ctx", modules)
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
