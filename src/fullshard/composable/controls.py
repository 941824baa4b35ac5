"""Setters of a sharded module, to be called between steps, with equal values on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from fullshard.comm import (
    ProcessGroupMemoryAllGather,
    ProcessGroupMemoryReduceScatter,
    SymmetricMemoryAllGather,
    SymmetricMemoryReduceScatter,
    Transport,
)
from fullshard.engine.runtime import runtime_of
from fullshard.engine.unit import Unit
from fullshard.errors import FullshardError
from fullshard.frontend.arguments import check_bool, check_modules
from fullshard.frontend.sharded_module import unit_at, units_at
from fullshard.memory import Event, Stream

if TYPE_CHECKING:
    from fullshard.comm import AllGather, ReduceScatter

__all__ = ["Controls"]


class Controls(nn.Module):
    """Setters of sharded modules. With ``recurse`` they apply to all nested units as well."""

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
                    f"set_reduce_scatter_max_input_buffers: unit {unit.name!r} reduces in symmetric memory, of which "
                    f"there is one buffer; expected 1, found {max_input_buffers}"
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
            raise ValueError("set_all_reduce_hook: expected no stream on a mesh with a replicate axis, found one")
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
        found = check_modules("set_modules_to_forward_prefetch", modules, Controls)
        unit_at(self).settings.forward_prefetch = [unit_at(module).ref for module in found]

    def set_modules_to_backward_prefetch(self, modules: list[Any]) -> None:
        """Prefetch these modules in this module's backward, instead of the previous in recorded order."""
        found = check_modules("set_modules_to_backward_prefetch", modules, Controls)
        unit_at(self).settings.backward_prefetch = [unit_at(module).ref for module in found]

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
                    f"{api}: unit {unit.name!r} has a custom collective, which allocates its buffers; set that to None "
                    "first"
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
                f"{api}: unit {unit.name!r} is in the middle of its {unit.phase.value}; call it between steps"
            )
        before = unit.settings.collectives
        if before.quantization is not None:
            raise ValueError(
                f"{api}: unit {unit.name!r} has quantized communication; call set_comm_quantization() without "
                "arguments first"
            )
        unit.settings.collectives = replace(before, **collectives)
        try:
            unit.change_transports()
        except FullshardError:
            unit.settings.collectives = before
            raise


def _check_one_mesh(api: str, unit: Unit) -> None:
    if len({id(parameter.placement.mesh) for parameter in unit.parameters}) > 1:
        raise ValueError(
            f"{api}: expected a unit on one mesh; shard_placement_fn has placed parameters of {unit.name!r} on several"
        )
