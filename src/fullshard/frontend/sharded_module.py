"""Base class of sharded modules: pending gradients, prefetch, quantized communication, moves and copies."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from fullshard.allocator import keep_freed_memory_by_default
from fullshard.comm.mesh import ShardMesh
from fullshard.comm.quantized.mesh import MeshQuantization
from fullshard.comm.quantized.report import QuantizationReport
from fullshard.engine.optimizer_steps import watch_optimizers
from fullshard.engine.ownership import Subtree, claim_parameters, nested_units, set_unit, unit_of
from fullshard.engine.runtime import Runtime, each_runtime, ensure_idle, runtime_of, take_parameters
from fullshard.engine.settings import UnitPolicy, UnitSettings
from fullshard.engine.unit import Unit
from fullshard.errors import FullshardError, PhaseError
from fullshard.frontend.arguments import Place, check_bool
from fullshard.optim.local.localize import step_local_tensors
from fullshard.policy import CommQuantization

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "PendingGradient",
    "ShardedModule",
    "computes_on_copies",
    "finish_reductions",
    "make_unit",
    "outside_graph",
    "run_unsharded",
    "unchanged",
    "unit_at",
    "units_at",
]


def unit_at(module: nn.Module) -> Unit:
    """Return the unit of a sharded module.

    Raises:
        FullshardError: If it has none.
    """
    unit = unit_of(module)
    if unit is None:
        raise FullshardError(f"{type(module).__name__} has lost its sharding state; was its __dict__ replaced?")
    return unit


def units_at(module: nn.Module, recurse: bool) -> list[Unit]:
    """Return the unit of a sharded module, and with ``recurse`` all nested units."""
    check_bool("recurse", recurse)
    return nested_units(module) if recurse else [unit_at(module)]


def computes_on_copies(unit: Unit) -> bool:
    """Return True if a forward now uses the copies of ``summon_full_params``, without unshard and casts.

    Only without gradients, which would accumulate into the copies.
    """
    return unit.registration.copies and not torch.is_grad_enabled()


def make_unit(
    subtree: Subtree,
    mesh: ShardMesh,
    place: Place,
    policy: UnitPolicy,
    settings: UnitSettings,
    ignored: Iterable[nn.Parameter],
    *,
    ignored_modules: Collection[nn.Module] = (),
    owned_by_ancestor: Iterable[nn.Parameter] = (),
) -> None:
    """Move buffers to the device of ``mesh``, and shard the parameters of the roots of ``subtree`` as one unit.

    Parameters in ``ignored``, and buffers of ``ignored_modules``, stay as they are. ``owned_by_ancestor`` are
    parameters of modules in nested units that belong to this unit.

    Raises:
        TiedParameterError, ValueError: If a parameter cannot be sharded in this way.
    """
    if mesh.device.type == "cpu":
        keep_freed_memory_by_default()
    for _, managed in subtree.managed:
        for name, buffer in managed._buffers.items() if managed._buffers and managed not in ignored_modules else ():
            if buffer is not None and not buffer.is_meta and buffer.device != mesh.device:
                managed._buffers[name] = buffer.to(mesh.device)
    claimed = claim_parameters(subtree, ignored, place, policy.form, take_parameters, owned_by_ancestor)
    for parameter in claimed:
        parameter.param_dtype = policy.override(parameter.sharded, parameter.fqn)
    unit = Unit(subtree.roots, mesh, claimed, policy, settings)
    for module in subtree.roots:
        set_unit(module, unit)
    mark_nested(subtree.in_nested_units)
    watch_optimizers()
    step_local_tensors()


def mark_nested(modules: Iterable[nn.Module]) -> None:
    """Mark the sharded ones of ``modules`` as nested: they are not roots any more."""
    for module in modules:
        if isinstance(module, ShardedModule) and not module._is_nested:
            module._is_nested = True


def finish_reductions(module: nn.Module) -> None:
    """Wait for the reductions in flight of all units in ``module``, and put the gradients into ``.grad``."""
    for runtime in each_runtime(nested_units(module)):
        runtime.finish_reductions()


class ShardedModule(nn.Module):
    """Base class of modules sharded by ``fully_shard``, ``replicate`` or ``FullyShardedDataParallel``."""

    _is_nested: bool = False  # another sharded module contains it

    def get_pending_gradients(self) -> dict[nn.Parameter, PendingGradient]:
        """Return the gradients of this module and all nested units that are not in ``.grad`` yet.

        No communication. Gradients in flight, as after a backward with ``set_is_last_backward(False)``, are neither in
        the result nor in ``.grad``.

        Returns:
            Pending gradients by sharded parameter, for parameters that have any. The tensors are not copies and may be
            changed in place.
        """
        ensure_idle(unit_at(self))
        return {
            parameter.sharded: PendingGradient(unreduced, partial)
            for unit in nested_units(self)
            for parameter, unreduced, partial in unit.gradients.pending()
        }

    def synchronize_gradients(self) -> None:
        """Reduce the gradients of microbatches without gradient sync into ``.grad``.

        Applies to this module and all nested units. Call it on all ranks. No-op if there are no such gradients.

        Example:
            ```python
            import torch
            from torch import nn

            from fullshard import fully_shard

            model = fully_shard(nn.Linear(8, 4))
            model.set_requires_gradient_sync(False)
            for inputs in torch.randn(3, 2, 8):  # a number of microbatches that is not known in advance
                model(inputs).sum().backward()
            model.synchronize_gradients()
            assert model.weight.grad is not None
            ```
        """
        ensure_idle(unit_at(self))
        finish_reductions(self)
        for unit in nested_units(self):
            if unit.gradients.unreduced:  # also one that has lost its runtime: others have joined its model
                runtime_of(unit).reduce_unreduced(unit)
        finish_reductions(self)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients as ``nn.Module`` does, and unreduced gradients of earlier microbatches.

        Args:
            set_to_none: Set gradients to None instead of zero.
        """
        finish_reductions(self)  # gradients in flight would be added afterwards
        super().zero_grad(set_to_none)
        for unit in nested_units(self):
            for parameter in unit.parameters if unit.registration.unsharded else ():
                parameter.clear_gradient(set_to_none=set_to_none)  # nn.Module has cleared that of the unsharded one
            if set_to_none:
                unit.gradients.drop()
                continue
            for _, unreduced, partial in unit.gradients.pending():
                for gradient in filter(torch.is_tensor, (unreduced, partial)):
                    gradient.detach().zero_()

    def set_prefetch_bytes(self, budget: int | None) -> None:
        """Set how many bytes of the next units to prefetch, in forward and in backward.

        Only the root's budget is used. A larger budget hides latency and helps if units differ in size: the all-gather
        of a large unit may take longer than the computation of the small unit before it. Units with a list of modules
        to prefetch (``set_modules_to_forward_prefetch``) prefetch these instead.

        Args:
            budget: Bytes of unsharded parameters, in the dtype of the all-gather, that may be unsharded and not in use
                yet: as many of the next units as fit, but at least one. None (default): one unit. 0: no prefetch.

        Raises:
            TypeError: If ``budget`` is neither an int nor None.
            ValueError: If ``budget`` is negative.

        Example:
            ```python
            from torch import nn

            from fullshard import fully_shard

            model = nn.Sequential(*[fully_shard(nn.Linear(64, 64)) for _ in range(8)])
            fully_shard(model)
            model.set_prefetch_bytes(64 * 1024)  # up to three layers of 16.25 KiB
            ```
        """
        if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int)):
            raise TypeError(f"set_prefetch_bytes: expected a number of bytes or None, found {budget!r}")
        if budget is not None and budget < 0:
            raise ValueError(f"set_prefetch_bytes: expected at least 0 bytes, found {budget}")
        unit_at(self).settings.prefetch_bytes = budget

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters as ``nn.Module`` does; after a backward that raised, the sharded ones.

        Args:
            *args: Arguments of ``nn.Module.named_parameters``.
            **kwargs: Keyword arguments of ``nn.Module.named_parameters``.

        Returns:
            Iterator over names and parameters.
        """
        ensure_idle(unit_at(self))
        return super().named_parameters(*args, **kwargs)

    def set_comm_quantization(
        self, shard: CommQuantization | None = None, replicate: CommQuantization | None = None, *, recurse: bool = True
    ) -> None:
        """Send large parameters and gradients in fewer bytes (quantized communication), for slow networks.

        It is off by default; call it without arguments to turn it off again. Call it between steps, with equal
        arguments on all ranks. It restarts the counts of ``comm_quantization_report``.

        Args:
            shard: Quantization over the shard axis. None: full precision.
            replicate: Quantization over the replicate axis of a 2-D mesh, where only gradients are sent. None: full
                precision.
            recurse: Set it for all nested units as well.

        Raises:
            TypeError: If ``shard`` or ``replicate`` is neither a ``CommQuantization`` nor None.
            ValueError: If an axis does not support an option, or if a unit has custom collectives or a communication
                hook.
            FullshardError: If a unit is in the middle of a step, or has gradients that have not been all-reduced over
                the replicate axis yet.

        Example:
            ```python
            from torch import nn

            from fullshard import CommQuantization, fully_shard

            model = fully_shard(nn.Linear(256, 256))
            model.set_comm_quantization(shard=CommQuantization(all_gather="fp8", reduce="int8"))
            model.set_comm_quantization()  # full precision again
            ```
        """
        _check_quantization(shard, replicate)
        units = units_at(self, recurse)
        for unit in units:
            _check_may_change_quantization(unit)
        for unit in units:
            off = shard is None and replicate is None
            unit.settings.collectives.quantization = None if off else MeshQuantization(shard, replicate)
            unit.change_transports()

    def comm_quantization_report(self) -> QuantizationReport:
        """Return the bytes received since ``set_comm_quantization``, beside those of full precision.

        It covers this module and all nested units, on this rank. No communication.

        Returns:
            The report; ``print`` it for a table.
        """
        chosen = (unit.settings.collectives.quantization for unit in nested_units(self))
        return QuantizationReport.of(each for each in chosen if each is not None)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        unit = unit_at(self)
        for nested in nested_units(self):  # check all before moving one
            nested.check_not_summoned("be moved")
            if any(_changes(fn, parameter.sharded) for parameter in nested.parameters):
                nested.gradients.check_reduced(nested.described)
        ensure_idle(unit)
        unit.reshard()
        for parameter in unit.parameters:
            parameter.remember_attributes()
        with _same_objects(fn, unit):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        unit.write_back()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the module with separate shards; the copy is idle and has no gradients."""
        unit = unit_at(self)
        unit.check_not_summoned("be copied")
        ensure_idle(unit)
        unit.reshard()
        unit.refresh()
        for parameter in unit.parameters:  # DTensor's own copies would copy the mesh too
            if id(parameter.sharded) not in memo:
                parameter.memoize(memo)
        copied: Self = object.__new__(type(self))
        memo[id(self)] = copied
        getstate: Any = getattr(type(self), "__getstate__", None)  # Lightning's modules drop their Trainer there
        is_default = getstate is getattr(object, "__getstate__", None)  # which Python 3.10 does not have
        picked: Any = self.__dict__ if is_default else getstate(self)
        state = dict(picked if isinstance(picked, dict) else self.__dict__)
        state.pop("_fullshard_unit", None)
        copied.__setstate__(copy.deepcopy(state, memo))  # type: ignore[no-untyped-call]
        members = [module for module in (ref() for ref in unit.modules) if module is not None]
        for module in members:
            copy.deepcopy(module, memo)  # no-op for those that are copied already
        if unit_of(memo[id(members[-1])]) is None:  # else the copy of another member has set it
            copied_unit = _copy_of(unit, [memo[id(module)] for module in members], memo)
            for module in members:
                set_unit(memo[id(module)], copied_unit)
        mark_nested(copied.modules())
        copied._is_nested = False
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise FullshardError(
            f"{type(self).__name__} cannot be pickled: its shards belong to a process group; "
            "save model.state_dict() with fullshard.save or torch.distributed.checkpoint instead"
        )


class PendingGradient(NamedTuple):
    """Unreduced gradients of one parameter; each is None if there is none.

    Attributes:
        unreduced: This rank's unsharded gradient, with the parameter's unsharded shape, in the reduce dtype.
        partial: This rank's rows, reduced over the shard axis but not over the replicate axis yet.
    """

    unreduced: torch.Tensor | None
    partial: torch.Tensor | None


def _check_quantization(shard: CommQuantization | None, replicate: CommQuantization | None) -> None:
    for axis, policy in (("shard", shard), ("replicate", replicate)):
        if policy is not None and not isinstance(policy, CommQuantization):
            raise TypeError(
                f"set_comm_quantization: {axis}: expected a fullshard.CommQuantization or None, "
                f"found {type(policy).__name__}"
            )
    if replicate is not None and replicate.all_gather is not None:
        raise ValueError(
            f"set_comm_quantization: replicate: expected all_gather=None, found {replicate.all_gather!r}; nothing is "
            "all-gathered over the replicate axis. To quantize its all-reduce, set reduce"
        )


def _check_may_change_quantization(unit: Unit) -> None:
    name, settings = unit.name or "<root>", unit.settings
    if settings.comm_hook is not None:
        raise ValueError(
            f"set_comm_quantization: unit {name!r} has a communication hook, which reduces gradients itself; use "
            "either a hook or quantized communication"
        )
    if settings.collectives.all_gather is not None or settings.collectives.reduce_scatter is not None:
        raise ValueError(f"set_comm_quantization: unit {name!r} has custom collectives; set them to None first")
    unit.check_not_summoned("change its communication")
    if not unit.is_idle or unit.user_unshards:
        raise PhaseError(
            f"set_comm_quantization: unit {name!r} is in the middle of a step or inside fullshard.unsharded; call it "
            "between steps"
        )
    if unit.gradients.need_all_reduce:
        raise FullshardError(
            f"set_comm_quantization: unit {name!r} has gradients that have not been all-reduced over the replicate "
            "axis yet; call synchronize_gradients() first"
        )


def _changes(fn: Callable[[torch.Tensor], torch.Tensor], parameter: torch.Tensor) -> bool:
    """True if ``fn`` would move a tensor like the parameter to another dtype or device."""
    before = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    after = fn(before)
    return after.dtype is not before.dtype or after.device != before.device


@contextlib.contextmanager
def _same_objects(fn: Callable[[torch.Tensor], torch.Tensor], unit: Unit) -> Iterator[None]:
    """Have ``nn.Module._apply`` keep parameter objects, as it does those of DTensors: optimizers have them."""
    future, swaps = torch.__future__, torch.__future__.get_swap_module_params_on_conversion()
    for before in (torch.empty(0, dtype=p.sharded.dtype, device=p.sharded.device) for p in unit.parameters):
        sets_data = torch._has_compatible_shallow_copy_type(before, fn(before))
        if future.get_overwrite_module_params_on_conversion() or not sets_data:
            future.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        future.set_swap_module_params_on_conversion(swaps)


def _copy_of(unit: Unit, modules: Sequence[nn.Module], memo: dict[int, Any]) -> Unit:
    """Make the unit of deep copies of a unit's modules; the copies are in ``memo`` already."""
    settings = replace(
        unit.settings, forward_prefetch=[], backward_prefetch=[], comm_streams=None, post_optim_event=None
    )
    settings.reduction = replace(settings.reduction)
    quantization = settings.collectives.quantization
    own = None if quantization is None else replace(quantization)  # nothing was communicated there
    settings.collectives = replace(settings.collectives, quantization=own)
    policy = unit.policy._replace(form=unit.policy.form.copy_for(memo))
    return Unit(modules, unit.mesh, [p.copy_for(memo) for p in unit.parameters], policy, settings)


_outside: dict[Callable[..., Any], Callable[..., Any]] = {}


def outside_graph(function: Callable[..., Any], recursive: bool = True) -> Callable[..., Any]:
    """Exclude ``function``, and if ``recursive`` everything it calls, from graphs of torch.compile."""
    if function not in _outside:
        _outside[function] = torch.compiler.disable(function, recursive=recursive)  # type: ignore[no-untyped-call]
    return _outside[function]


def unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``: the counterpart of ``outside_graph`` where nothing is traced."""
    return function


def run_unsharded(
    module: ShardedModule,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outside: Callable[[Callable[..., Any]], Callable[..., Any]] = unchanged,
) -> Any:
    """Run a forward of a sharded module: unshard, ``forward``, reshard.

    Args:
        module: The module.
        forward: Computes with its unsharded parameters.
        args: Positional arguments of ``forward``.
        kwargs: Keyword arguments of ``forward``.
        outside: ``outside_graph`` where torch.compile traces, to compile ``forward`` only.

    Returns:
        The output of ``forward``.
    """
    unit = unit_at(module)
    if computes_on_copies(unit):
        return forward(*args, **kwargs)
    runtime = outside(runtime_of)(unit)
    args, kwargs = outside(Runtime.pre_forward)(runtime, unit, args, kwargs)
    try:
        output = forward(*args, **kwargs)
    except BaseException:
        outside(Runtime.abort_forward)(runtime, unit)
        raise
    return outside(Runtime.post_forward)(runtime, unit, module, output)
