"""What can be set on a sharded module between steps. Every setting has to be equal on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from fullshard.arguments import check_bool, check_modules
from fullshard.engine.unit import Unit
from fullshard.errors import FullshardError
from fullshard.memory import Event, Stream
from fullshard.sharded_module import unit_at, units_at
from fullshard.transport import (
    ProcessGroupMemoryAllGather,
    ProcessGroupMemoryReduceScatter,
    SymmetricMemoryAllGather,
    SymmetricMemoryReduceScatter,
    Transport,
)

if TYPE_CHECKING:
    from fullshard.transport import AllGather, ReduceScatter

__all__ = ["Controls"]


class Controls(nn.Module):
    """The setters of sharded modules. Those with ``recurse`` set all units below as well."""

    # ---------------------------------------------------------------- gradients

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients. False: they stay unsharded and add up until the next one that does.

        They add up in ``reduce_dtype``, without copies, where autograd left them. It sets
        :meth:`set_requires_all_reduce` to the same.
        """
        check_bool("requires_gradient_sync", requires_gradient_sync)
        for unit in units_at(self, recurse):
            unit.settings.requires_gradient_sync = unit.settings.requires_all_reduce = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces over the replicate axis of a 2-D mesh. False: gradients are reduced over the shard
        axis only, and the results add up until the next backward that does both.
        """
        check_bool("requires_all_reduce", requires_all_reduce)
        for unit in units_at(self, recurse):
            unit.settings.requires_all_reduce = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward is the last before the optimizer step. False (pipelines): do not wait for the
        reductions at its end and keep the order in which forwards ended.
        """
        check_bool("is_last_backward", is_last_backward)
        unit_at(self).attached().is_last_backward = is_last_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this unit's summed gradients by ``factor`` instead of by the number of ranks.

        Raises:
            ValueError: If it is not a positive number.
        """
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
            raise ValueError(f"set_gradient_divide_factor: expected a positive number, found {factor!r}")
        unit_at(self).settings.reduction.divide_factor = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The older name of :meth:`set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Whether collectives of this unit only ever sum, the division being a kernel of its own. For back ends, and
        algorithms of NCCL, that cannot average.
        """
        check_bool("set_force_sum_reduction_for_comms", enable)
        unit_at(self).settings.reduction.force_sum = enable

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Whether parameters that no rank had a gradient for get one of zeros instead of None."""
        check_bool("reduce_scatter_unused_params", reduce_scatter_unused_params)
        for unit in units_at(self, recurse):
            unit.settings.reduction.zeros_for_missing = reduce_scatter_unused_params

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many units' full gradients may wait for their reduction while the next are computed (1 by default).

        More hide slower networks and cost a unit's gradients each. The largest value of the units of a model counts.

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
            hook: Gets a flat tensor, in the reduce dtype, with this rank's rows of all trainable parameters (between
                them zeros), and may change it in place: after the reduce-scatter on a 1-D mesh,
                after the all-reduce on a 2-D one. It is called once per dtype of the unit's parameters, and without a
                shard axis (a single rank included) once for each large parameter and once for all others. It must do
                the same on all ranks.
            stream: Where it runs; None: where the collectives do.

        Raises:
            ValueError: If a stream is given on a 2-D mesh, whose own all-reduce runs elsewhere.
        """
        if not callable(hook):
            raise TypeError(f"set_all_reduce_hook: expected a function, found {type(hook).__name__}")
        unit = unit_at(self)
        if stream is not None and unit.mesh.replicate is not None:
            raise ValueError("set_all_reduce_hook: expected no stream on a mesh with a replicate axis, found one")
        _check_one_mesh("set_all_reduce_hook", unit)
        unit.settings.reduction.hook, unit.settings.reduction.hook_stream = hook, stream

    # ---------------------------------------------------------------- gathering

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether to free the full parameters between forward and backward; ends the special rule for the root."""
        check_bool("reshard_after_forward", reshard_after_forward)
        for unit in units_at(self, recurse):
            unit.settings.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether to free the full parameters after backward. False: they serve the next forward as well,
        unless an optimizer has stepped in between.
        """
        check_bool("reshard_after_backward", reshard_after_backward)
        for unit in units_at(self, recurse):
            unit.settings.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether this unit is gathered in backward. False is for modules whose backward does not read their
        parameters, such as an embedding.
        """
        check_bool("unshard_in_backward", unshard_in_backward)
        unit_at(self).settings.unshard_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: list[Any]) -> None:
        """Gather these modules' parameters just before this one's forward, instead of the next in recorded order."""
        found = check_modules("set_modules_to_forward_prefetch", modules, Controls)
        unit_at(self).settings.forward_prefetch = [unit_at(module).ref for module in found]

    def set_modules_to_backward_prefetch(self, modules: list[Any]) -> None:
        """Gather these modules' parameters just before this one's backward, instead of the previous in order."""
        found = check_modules("set_modules_to_backward_prefetch", modules, Controls)
        unit_at(self).settings.backward_prefetch = [unit_at(module).ref for module in found]

    def set_post_optim_event(self, event: Event) -> None:
        """Have the first gathers of the next forward wait for ``event`` only, recorded after the optimizer step,
        instead of for everything on the current stream. Call it on the root, after every step.
        """
        if not callable(getattr(event, "synchronize", None)):  # the device modules have event classes of their own
            raise TypeError(f"set_post_optim_event: expected a torch.Event, found {type(event).__name__}")
        unit_at(self).settings.post_optim_event = event

    # ---------------------------------------------------------------- communication

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gather this unit with ``comm``, in one message from and to memory that it allocates.

        Args:
            comm: See :class:`fullshard.AllGather`.

        Raises:
            ValueError: If the unit's parameters are on several meshes.
        """
        self._set_custom("set_custom_all_gather", all_gather=comm)

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce this unit with ``comm``, in one message from and to memory that it allocates.

        Args:
            comm: See :class:`fullshard.ReduceScatter`.

        Raises:
            ValueError: If the unit's parameters are on several meshes.
        """
        self._set_custom("set_custom_reduce_scatter", reduce_scatter=comm)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Whether this unit's messages lie in memory that its process group allocates (NCCL: registered with the
        network card, which frees the device's processors from copying). Where the back end has none, in ordinary
        memory.

        Raises:
            ValueError: If a custom collective is set.
        """
        api = "set_allocate_memory_from_process_group_for_comm"
        check_bool(api, enable)
        own = (ProcessGroupMemoryAllGather, ProcessGroupMemoryReduceScatter)
        transport = self._own_memory(api, own)
        if transport is not None:
            made = own[0](transport.group), own[1](transport.reduce_group)
            self._set_custom(api, *(made if enable else (None, None)))

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Have this unit's messages lie in symmetric memory.

        Reduce-scatters do so only after :meth:`set_force_sum_reduction_for_comms`, because NCCL's kernels on such
        memory cannot average.

        Raises:
            ValueError: If the unit is not on CUDA with NCCL, or a custom collective is set.
        """
        api = "set_symm_mem_for_comm"
        transport = self._own_memory(api, (SymmetricMemoryAllGather, SymmetricMemoryReduceScatter))
        if transport is not None:
            unit = unit_at(self)
            scatter = None
            if unit.settings.reduction.force_sum:
                scatter = SymmetricMemoryReduceScatter(transport.reduce_group, backend)
            self._set_custom(api, SymmetricMemoryAllGather(transport.group, backend), scatter)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Whether reduce-scatters have a communicator of their own, so that they overlap with gathers.

        On NCCL they have by default, at the price of its buffers. Other back ends do not need one. Set it for all
        units of a mesh, which share communicators, and on all ranks.
        """
        check_bool("set_separate_reduce_scatter_group", enable)
        for unit in units_at(self, recurse):
            for bucket in unit.buckets:
                if bucket.mesh.transport is not None:
                    bucket.mesh.transport.separate_reduce_group(enable)

    def _own_memory(self, api: str, own: tuple[type, ...]) -> Transport | None:
        unit = unit_at(self)
        for comm in (unit.settings.collectives.all_gather, unit.settings.collectives.reduce_scatter):
            if comm is not None and not isinstance(comm, own):
                raise ValueError(f"{api}: unit {unit.name!r} has a custom collective, which brings memory of its own")
        return unit.mesh.transport

    def _set_custom(self, api: str, all_gather: Any = None, reduce_scatter: Any = None) -> None:
        unit = unit_at(self)
        _check_one_mesh(api, unit)
        for comm in (all_gather, reduce_scatter):
            if comm is not None and not (callable(comm) and callable(getattr(comm, "allocate", None))):
                raise TypeError(f"{api}: expected an object with __call__ and allocate, found {type(comm).__name__}")
        if not unit.resting:
            raise FullshardError(f"{api}: unit {unit.name!r} is in the middle of its {unit.phase.value}")
        custom = unit.settings.collectives
        if custom.wire is not None:
            raise ValueError(f"{api}: unit {unit.name!r} has a wire; call set_wire() without arguments first")
        before = custom.all_gather, custom.reduce_scatter
        if api != "set_custom_reduce_scatter":
            custom.all_gather = all_gather
        if api != "set_custom_all_gather":
            custom.reduce_scatter = reduce_scatter
        try:
            unit.reroute()
        except FullshardError:
            custom.all_gather, custom.reduce_scatter = before
            raise


def _check_one_mesh(api: str, unit: Unit) -> None:
    if len({id(parameter.placement.mesh) for parameter in unit.parameters}) > 1:
        raise ValueError(f"{api}: expected a unit on one mesh; shard_placement_fn has put {unit.name!r} on several")
