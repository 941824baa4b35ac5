"""``FSDPModule``, the class of modules that ``fully_shard`` was called on, and functions that take such modules.

Call setters between steps, with equal values on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn

from fullshard.comm import (
    ProcessGroupMemoryAllGather,
    ProcessGroupMemoryReduceScatter,
    SymmetricMemoryAllGather,
    SymmetricMemoryReduceScatter,
    Transport,
)
from fullshard.composable.state_dicts import is_computing, show_sharded
from fullshard.composable.unsharding import GradientReductionHandle, UnshardHandle
from fullshard.engine.finalization import awaits_finalization
from fullshard.engine.ownership import nested_units
from fullshard.engine.parameters.spmd_types import unchecked
from fullshard.engine.runtime import Runtime, current_runtime, ensure_idle, runtime_of
from fullshard.engine.settings import CommStreams
from fullshard.engine.unit import Unit
from fullshard.errors import FullshardError, PhaseError
from fullshard.frontend.arguments import check_bool
from fullshard.frontend.sharded_module import (
    ShardedModule,
    outside_graph,
    run_unsharded,
    unit_at,
    units_at,
)
from fullshard.memory import Event, Stream

if TYPE_CHECKING:
    from fullshard.comm import AllGather, ReduceScatter

__all__ = ["FSDPModule", "ReplicateModule", "share_comm_ctx"]


class FSDPModule(ShardedModule):
    """Mixin class of every module that ``fully_shard`` was called on.

    The class of the module becomes a subclass of both ``FSDPModule`` and its original class. Call the setters between
    steps, with equal values on all ranks. Setters with ``recurse`` apply to all nested units as well; the others apply
    to the unit of this module only.
    """

    _fullshard_prefix: ClassVar[str] = "FSDP"  # of the name of the module's new class
    _fullshard_class: ClassVar[tuple[type[nn.Module], frozenset[str], type[FSDPModule]]]  # what it was made of

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Construct an instance of the original class, so that slicing a sharded ``Sequential`` returns a plain one."""
        plain = cls._fullshard_class[0]
        instance = plain.__new__(plain)
        instance.__init__(*args, **kwargs)  # type: ignore[misc]
        return instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module with its unsharded parameters: unshard, run ``forward``, reshard."""
        if torch.compiler.is_compiling():
            return outside_graph(_call_module, recursive=False)(self, args, kwargs)
        return run_unsharded(self, super().__call__, args, kwargs)

    @unchecked
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gather the parameters of this unit and register the unsharded ones.

        Parameters of nested units stay sharded. Call it on all ranks.

        Args:
            async_op: Return at once. The handle's ``wait``, or the module's forward, then waits for the all-gather.

        Returns:
            A handle if ``async_op``, otherwise None.

        Raises:
            ValueError: If ``async_op`` is not a bool.

        Example:
            ```python
            import torch
            from torch import nn

            from fullshard import fully_shard

            model = fully_shard(nn.Linear(8, 4))
            handle = model.unshard(async_op=True)
            inputs = torch.randn(2, 8)  # overlaps with the all-gather
            handle.wait()
            assert model.weight.shape == (4, 8)  # a plain tensor, not a DTensor
            model.reshard()
            ```
        """
        check_bool("async_op", async_op)
        handle = UnshardHandle(unit_at(self))
        if async_op:
            return handle
        handle.wait()
        return None

    @unchecked
    def reshard(self) -> None:
        """Free the unsharded parameters of this unit and register the sharded ones.

        No-op if the unit is sharded. Nested units keep their state.
        """
        unit_at(self).reshard()

    def reset_iter_state(self) -> None:
        """Return to idle after an exception: drop unreduced gradients and free unsharded parameters.

        The next forward of the root does the same by itself, except that after a failed *forward* it keeps the
        unreduced gradients of earlier microbatches.

        Raises:
            FullshardError: If this module is not the root.
        """
        self._runtime_of_root("reset_iter_state").reset()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return a sharded state dict, without communication.

        Parameters are DTensors that share memory with the shards. ``fullshard.save`` and
        ``torch.distributed.checkpoint`` save them as they are.

        Args:
            *args: Arguments of ``nn.Module.state_dict``.
            **kwargs: Keyword arguments of ``nn.Module.state_dict``.

        Returns:
            The state dict of ``nn.Module.state_dict``, with sharded parameters.
        """
        ensure_idle(unit_at(self))
        units = nested_units(self)
        computing = [unit for unit in units if unit.registration.unsharded and is_computing(unit)]
        for unit in units:
            show_sharded(unit)
        try:
            return super().state_dict(*args, **kwargs)
        finally:
            for unit in computing:
                runtime_of(unit).unshard(unit)

    # ---------------------------------------------------------------- gradients

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backward reduces gradients, for gradient accumulation.

        With False, gradients accumulate unsharded, in place and in ``reduce_dtype``, until the next backward that
        reduces them. This also sets ``set_requires_all_reduce`` to the same value.

        Args:
            requires_gradient_sync: Reduce gradients in backward.
            recurse: Set it for all nested units as well.

        Raises:
            ValueError: If an argument is not a bool.

        Example:
            ```python
            import torch
            from torch import nn

            from fullshard import fully_shard

            model = fully_shard(nn.Linear(8, 4))
            microbatches = torch.randn(4, 2, 8)
            for index, inputs in enumerate(microbatches):
                model.set_requires_gradient_sync(index == len(microbatches) - 1)  # reduce once, in the last backward
                (model(inputs).square().mean() / len(microbatches)).backward()
            ```
        """
        check_bool("requires_gradient_sync", requires_gradient_sync)
        for unit in units_at(self, recurse):
            unit.settings.requires_gradient_sync = unit.settings.requires_all_reduce = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward all-reduces gradients over the replicate axis of a 2-D mesh.

        With False, gradients are reduce-scattered only and accumulate sharded until the next backward that does both.

        Args:
            requires_all_reduce: All-reduce gradients in backward.
            recurse: Set it for all nested units as well.

        Raises:
            ValueError: If an argument is not a bool.
        """
        check_bool("requires_all_reduce", requires_all_reduce)
        for unit in units_at(self, recurse):
            unit.settings.requires_all_reduce = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward is the last one before the optimizer step.

        Pipeline schedules pass False for all microbatches but the last: the backward then does not wait for reductions
        at its end, and the recorded order of forwards is kept.

        Args:
            is_last_backward: True (default) or False.

        Raises:
            ValueError: If ``is_last_backward`` is not a bool.
        """
        check_bool("is_last_backward", is_last_backward)
        runtime_of(unit_at(self)).is_last_backward = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Set whether the caller ends backward, with ``finalize_backward``, instead of the end of each backward.

        For schedules in which the reduction of gradients is an action of its own, and for CUDA graphs. Reductions begin
        in backward as ever; ``.grad`` is complete after ``finalize_backward``. Takes precedence over
        ``set_is_last_backward``. Call it on the root.

        Args:
            enabled: The caller finalizes. Default: False.

        Raises:
            ValueError: If ``enabled`` is not a bool.
            FullshardError: If this module is not the root, or a backward has not ended or not been finalized.
        """
        check_bool("set_manual_backward_finalization", enabled)
        settings = unit_at(self).settings
        if current_runtime(unit_at(self)) is None:  # the next forward says which module is the root
            settings.finalized_by_caller = enabled
            return
        runtime = self._runtime_of_root("set_manual_backward_finalization")
        if enabled is not settings.finalized_by_caller and awaits_finalization(runtime):
            raise PhaseError(
                "set_manual_backward_finalization: a backward has not ended, or was not finalized; call it between "
                "steps"
            )
        settings.finalized_by_caller = enabled

    @unchecked
    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """End the backwards since the last call: reduce what is left to be reduced, and wait for ``.grad``.

        Gradients of microbatches without gradient sync are reduced, too, if it is on again by now. Before the first
        forward it does nothing. Call it on the root, on all ranks, after ``set_manual_backward_finalization(True)``.

        Args:
            async_op: Return at once. The handle's ``wait`` then waits; until that, the model cannot run, and optimizers
                cannot step its parameters.

        Returns:
            A handle if ``async_op``, otherwise None.

        Raises:
            ValueError: If ``async_op`` is not a bool.
            FullshardError: If this module is not the root, manual finalization is off, a forward or backward has not
                ended, or a handle was not waited for.

        Example:
            ```python
            import torch
            from torch import nn

            from fullshard import fully_shard

            model = fully_shard(nn.Linear(8, 4))
            model.set_manual_backward_finalization(True)
            for inputs in torch.randn(4, 2, 8):
                model(inputs).square().mean().backward()
            handle = model.finalize_backward(async_op=True)
            handle.wait()  # .grad is complete
            ```
        """
        check_bool("async_op", async_op)
        if current_runtime(unit_at(self)) is None:
            return GradientReductionHandle() if async_op else None
        runtime = self._runtime_of_root("finalize_backward")
        if not unit_at(self).settings.finalized_by_caller:
            raise FullshardError(
                "finalize_backward: manual finalization is off, and backward waits for the gradients by itself; call "
                "set_manual_backward_finalization(True) before the backward"
            )
        handle = GradientReductionHandle(runtime)
        if async_op:
            return handle
        handle.wait()
        return None

    def _runtime_of_root(self, api: str) -> Runtime:
        unit = unit_at(self)
        runtime = runtime_of(unit)
        if (root := runtime.root()) is not unit:
            raise FullshardError(
                f"{api}: expected the root module, found unit {unit.described}; call it on the root, "
                + (f"a {type(root.modules[0]()).__name__}" if root is not None else "which has been deleted")
            )
        return runtime

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the summed gradients of this unit by ``factor`` instead of by the number of ranks.

        Args:
            factor: Divisor of the sum of all ranks' gradients.

        Raises:
            ValueError: If ``factor`` is not a positive, finite number.

        Example:
            ```python
            from torch import nn

            from fullshard import fully_shard

            model = fully_shard(nn.Linear(8, 4))
            model.set_gradient_divide_factor(1.0)  # sum the gradients, instead of averaging them
            ```
        """
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
            raise ValueError(f"set_gradient_divide_factor: expected a positive number, found {factor!r}")
        unit_at(self).settings.reduction.divide_factor = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Set the divide factor. Deprecated name of ``set_gradient_divide_factor``.

        Args:
            factor: Divisor of the sum of all ranks' gradients.

        Raises:
            ValueError: If ``factor`` is not a positive, finite number.
        """
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Set whether the collectives of this unit reduce with SUM only, followed by a separate division.

        For backends, and algorithms of NCCL, that do not support AVG.

        Args:
            enable: Use SUM only. Default: False.

        Raises:
            ValueError: If ``enable`` is not a bool.
        """
        check_bool("set_force_sum_reduction_for_comms", enable)
        unit_at(self).settings.reduction.force_sum = enable

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Set whether parameters without a gradient on any rank get a gradient of zeros instead of None.

        Args:
            reduce_scatter_unused_params: Give unused parameters gradients of zeros. Default: False.
            recurse: Set it for all nested units as well.

        Raises:
            ValueError: If an argument is not a bool.
        """
        check_bool("reduce_scatter_unused_params", reduce_scatter_unused_params)
        for unit in units_at(self, recurse):
            unit.settings.reduction.zeros_for_missing = reduce_scatter_unused_params

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set how many units may keep unsharded gradients for their reduce-scatter during backward.

        Each additional unit overlaps more communication and costs the memory of a unit's gradients. The largest value
        of all units of a model applies.

        Args:
            max_input_buffers: Number of units, at least 1. Default: 1.
            recurse: Set it for all nested units as well.

        Raises:
            TypeError: If ``max_input_buffers`` is not an int.
            ValueError: If ``max_input_buffers`` is less than 1, or more than 1 for a unit that reduces in symmetric
                memory, or if ``recurse`` is not a bool.
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
        """Call ``hook`` with the reduced gradients of this unit before they become ``.grad``.

        On a 1-D mesh it is called after the reduce-scatter, on a 2-D mesh after the all-reduce. It is called once per
        dtype of the unit's parameters. Without a shard axis (a single rank included), it is called once for each large
        parameter and once for all others.

        Args:
            hook: Called with a flat tensor in the reduce dtype: this rank's rows of all trainable parameters, padded
                with zeros. It may change the tensor in place. It must do the same on all ranks.
            stream: Stream to run the hook on, on a mesh without a replicate axis. None: the stream of the collectives.

        Raises:
            TypeError: If ``hook`` is not callable.
            ValueError: If ``stream`` is given on a mesh with a replicate axis, or if the unit's parameters are on
                several meshes.

        Example:
            ```python
            import torch
            from torch import nn

            from fullshard import fully_shard

            model = fully_shard(nn.Linear(8, 4))
            model.set_all_reduce_hook(lambda gradients: gradients.clamp_(-1, 1))
            model(torch.randn(2, 8)).sum().backward()
            ```
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
        """Set whether the unsharded parameters are freed between forward and backward, also for the root.

        Args:
            reshard_after_forward: True: free them and all-gather again for backward (less memory). False: keep them
                (less communication).
            recurse: Set it for all nested units as well.

        Raises:
            ValueError: If an argument is not a bool.

        Example:
            ```python
            import torch
            from torch import nn

            from fullshard import fully_shard

            model = fully_shard(nn.Linear(8, 4))
            model.set_reshard_after_forward(True)
            model.eval()
            with torch.no_grad():
                model(torch.randn(2, 8))  # the unsharded parameters are freed afterwards
            ```
        """
        check_bool("reshard_after_forward", reshard_after_forward)
        for unit in units_at(self, recurse):
            unit.settings.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether the unsharded parameters are freed after backward.

        With False, the next forward reuses them unless an optimizer has stepped in between.

        Args:
            reshard_after_backward: Free them after backward. Default: True.
            recurse: Set it for all nested units as well.

        Raises:
            ValueError: If an argument is not a bool.
        """
        check_bool("reshard_after_backward", reshard_after_backward)
        for unit in units_at(self, recurse):
            unit.settings.reshard_after_backward = reshard_after_backward

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Set whether the memory of the unsharded parameters stays allocated while they are resharded.

        Their addresses then stay the same from one unshard to the next, as CUDA graphs need it, for the memory of all
        unsharded parameters. What it holds while resharded is not to be read.

        Args:
            keep: Keep the memory. Default: False.
            recurse: Set it for all nested units as well.

        Raises:
            ValueError: If an argument is not a bool.
        """
        check_bool("set_keep_unsharded_storage", keep)
        for unit in units_at(self, recurse):
            unit.keep_storage(keep)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether this unit is unsharded in backward.

        With False, its parameters are not all-gathered for backward. For modules whose backward does not read their
        parameters, such as an embedding.

        Args:
            unshard_in_backward: Unshard in backward. Default: True.

        Raises:
            ValueError: If ``unshard_in_backward`` is not a bool.
        """
        check_bool("unshard_in_backward", unshard_in_backward)
        unit_at(self).settings.unshard_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: list[Any]) -> None:
        """Set the modules to prefetch in the forward of this module, instead of the next unit in recorded order.

        Args:
            modules: Modules that ``fully_shard`` was called on, in the order of their forwards. An empty list restores
                the default.

        Raises:
            TypeError: If ``modules`` is a single module or not iterable.
            ValueError: If an element is not an ``FSDPModule``.

        Example:
            ```python
            from torch import nn

            from fullshard import fully_shard

            model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
            for layer in model:
                fully_shard(layer)
            fully_shard(model)
            for index, layer in enumerate(model):
                layer.set_modules_to_forward_prefetch(list(model[index + 1 : index + 3]))  # the next two
            ```
        """
        found = _units("set_modules_to_forward_prefetch", modules)
        unit_at(self).settings.forward_prefetch = [unit.ref for unit in found]

    def set_modules_to_backward_prefetch(self, modules: list[Any]) -> None:
        """Set the modules to prefetch in the backward of this module, instead of the previous unit in recorded order.

        Args:
            modules: Modules that ``fully_shard`` was called on, in the order of their backwards. An empty list restores
                the default.

        Raises:
            TypeError: If ``modules`` is a single module or not iterable.
            ValueError: If an element is not an ``FSDPModule``.
        """
        found = _units("set_modules_to_backward_prefetch", modules)
        unit_at(self).settings.backward_prefetch = [unit.ref for unit in found]

    def set_post_optim_event(self, event: Event) -> None:
        """Make the first all-gathers of the next forward wait for ``event`` only.

        Otherwise they wait for all work on the current stream. Call it on the root after every optimizer step.

        Args:
            event: Event that was recorded after the optimizer step.

        Raises:
            TypeError: If ``event`` is not an event.
        """
        if not callable(getattr(event, "synchronize", None)):  # the device modules have event classes of their own
            raise TypeError(f"set_post_optim_event: expected a torch.Event, found {type(event).__name__}")
        unit_at(self).settings.post_optim_event = event

    # ---------------------------------------------------------------- communication

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """All-gather this unit with ``comm``, as one collective between buffers that ``comm`` allocates.

        Args:
            comm: A ``fullshard.AllGather``, or any callable object with its methods. None: the default all-gather.

        Raises:
            TypeError: If ``comm`` is not callable or has no ``allocate``.
            ValueError: If the unit's parameters are on several meshes, or the unit has quantized communication.
            FullshardError: If the unit is in the middle of a step, or has gradients that have not been all-reduced over
                the replicate axis yet.
        """
        self._set_custom("set_custom_all_gather", all_gather=comm)

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce-scatter this unit with ``comm``, as one collective between buffers that ``comm`` allocates.

        Args:
            comm: A ``fullshard.ReduceScatter``, or any callable object with its methods. None: the default
                reduce-scatter.

        Raises:
            TypeError: If ``comm`` is not callable or has no ``allocate``.
            ValueError: If the unit's parameters are on several meshes, or the unit has quantized communication.
            FullshardError: If the unit is in the middle of a step, or has gradients that have not been all-reduced over
                the replicate axis yet.
        """
        self._set_custom("set_custom_reduce_scatter", reduce_scatter=comm)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Set whether the process group allocates the communication buffers of this unit.

        With NCCL this is registered memory, for zero-copy collectives that use fewer SMs. With backends that have no
        such memory, the buffers are ordinary memory. No-op on one rank.

        Args:
            enable: Allocate from the process group. Default: False.

        Raises:
            ValueError: If ``enable`` is not a bool, if the unit's parameters are on several meshes, or if a custom
                collective or quantized communication is set.
            FullshardError: If the unit is in the middle of a step, or has gradients that have not been all-reduced over
                the replicate axis yet.
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
        """Allocate the communication buffers of this unit in symmetric memory.

        Reduce-scatters use it only if ``set_force_sum_reduction_for_comms(True)`` was called before, because NCCL's
        symmetric kernels do not support AVG. No-op on one rank.

        Args:
            backend: Backend of the symmetric memory; only ``"NCCL"`` is supported.

        Raises:
            ValueError: If the unit is not on CUDA with NCCL, if ``backend`` is not ``"NCCL"``, if the unit's parameters
                are on several meshes, or if a custom collective or quantized communication is set.
            FullshardError: If the unit is in the middle of a step, or has gradients that have not been all-reduced over
                the replicate axis yet.
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
        """Set whether reduce-scatters use a separate communicator, so that they overlap with all-gathers.

        Off by default: with NCCL a second communicator costs the memory of its buffers. Other backends do not need it.
        Set it for all units of a mesh, which share communicators, and on all ranks, which create the communicator
        together when it is first asked for.

        Args:
            enable: Use a separate communicator.
            recurse: Set it for all nested units as well.

        Raises:
            ValueError: If an argument is not a bool, or the ranks of the mesh axis are not in ascending order.
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


class ReplicateModule(FSDPModule):
    """Mixin class of every module that ``replicate`` was called on; it has the methods of ``FSDPModule``."""

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


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Share communication streams between several roots, such as the stages of a pipeline on one rank.

    Args:
        modules: Modules that ``fully_shard`` was called on, each the root of a stage, before or after their first
            forward.

    Raises:
        TypeError: If ``modules`` is a single module or not iterable.
        ValueError: If an element is not an ``FSDPModule``.

    Example:
        ```python
        from torch import nn

        from fullshard import fully_shard, share_comm_ctx

        stages = [fully_shard(nn.Linear(8, 8)) for _ in range(2)]
        share_comm_ctx(stages)
        ```
    """
    units = _units("share_comm_ctx", modules)
    if not units:
        return
    comm_streams = units[0].settings.comm_streams
    if comm_streams is None:
        runtime = current_runtime(units[0])
        comm_streams = CommStreams.on(units[0].mesh.device) if runtime is None else runtime.comm_streams
    for unit in units:
        unit.settings.comm_streams = comm_streams
        if (runtime := current_runtime(unit)) is not None:
            runtime.comm_streams = comm_streams


def _call_module(module: FSDPModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a module that torch.compile traces: the module's own forward is compiled, unshard and reshard are not."""
    return run_unsharded(module, super(FSDPModule, module).__call__, args, kwargs, outside_graph)
