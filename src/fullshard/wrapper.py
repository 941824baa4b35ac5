"""The wrapper front end: ``FullyShardedDataParallel``. It translates to units in the flat form, and decides nothing."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard import wrapper_summon
from fullshard.allocator import keep_freed_memory_by_default
from fullshard.arguments import Placer, check_instance, check_parameters
from fullshard.engine.containers import cast_tensors, iterate_tensors
from fullshard.engine.flat_form import FlatForm
from fullshard.engine.hooks import in_backward
from fullshard.engine.names import CHECKPOINTED, clean_name
from fullshard.engine.ownership import claim_parameters, managed_modules, nested_units, set_unit, unit_of
from fullshard.engine.settings import UnitPolicy
from fullshard.engine.unit import Unit
from fullshard.errors import FullshardError, PhaseError
from fullshard.policy import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from fullshard.sharded_module import ShardedModule, note_inside, outside_graph, reads_copies, unit_at
from fullshard.wrap import Policy, PolicyFunction
from fullshard.wrapper_clip import clip_gradients
from fullshard.wrapper_initial import Initializer, raise_on_all, sync_states
from fullshard.wrapper_optim import WrapperOptim
from fullshard.wrapper_options import API, Groups, WrapperOptions, ignored_states
from fullshard.wrapper_order import validated
from fullshard.wrapper_plan import plan_wrappers
from fullshard.wrapper_state import WrapperState
from fullshard.wrapper_undo import undone_on_failure

__all__ = ["FullyShardedDataParallel"]


class FullyShardedDataParallel(WrapperOptim, WrapperState, ShardedModule):
    """Wraps a module whose parameters are sharded as one flat tensor, gathered for its forward and backward, and freed.

    The parameters that are not yet in a unit below become one unit, as with :func:`fullshard.fully_shard`, and on the
    same engine. Each rank keeps one slice of their concatenation. Build the optimizer from ``parameters()``
    afterwards, or with ``use_orig_params=True`` before or afterwards.

    Args:
        module: Any module. With ``auto_wrap_policy``, modules inside of it are replaced by wrappers of themselves.
        process_group: The ranks; for hybrid strategies two groups, to shard over and to replicate over. None: all,
            and for hybrid strategies machines as torchrun knows them.
        sharding_strategy: See :class:`ShardingStrategy`. None: FULL_SHARD.
        cpu_offload: What is kept in CPU memory.
        auto_wrap_policy: Which modules inside become units of their own; see :mod:`fullshard.wrap`.
        backward_prefetch: When the next unit is gathered in backward. None: when it is needed.
        mixed_precision: In which dtypes to compute, reduce and keep buffers.
        ignored_modules: Left alone with all below them: not sharded, moved, cast or reduced.
        param_init_fn: Called with each module that has something on the meta device. None: memory for the module's
            own parameters and buffers, and its ``reset_parameters()``.
        device_id: The device to compute on, which becomes the current one; CPU parameters are moved there.
        sync_module_states: Send rank 0's parameters and buffers to all ranks first.
        forward_prefetch: For compatibility: the next unit of a forward is always gathered ahead.
        limit_all_gathers: For compatibility: never more than two units are full at a time.
        use_orig_params: Whether ``parameters()`` are the original parameters, with this rank's 1-D pieces of them, or
            one :class:`FlatParameter` per unit (and dtype).
        ignored_states: Instead of ``ignored_modules``: modules, or parameters.
        device_mesh: Instead of ``process_group``: 1-D, or for hybrid strategies 2-D (replicate, shard).

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If arguments do not fit each other or the module. The module is then as it was.
    """

    _fsdp_wrapped_module: nn.Module
    _options: WrapperOptions
    _ignored_modules: set[nn.Module]
    _ignored_parameters: set[nn.Parameter]  # of units below as well
    _casts_around: bool  # whether inputs are cast to full precision and outputs back, see MixedPrecision

    def __init__(
        self,
        module: nn.Module,
        process_group: Groups = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Policy | PolicyFunction | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], object] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        arguments = {
            "process_group": process_group,
            "sharding_strategy": sharding_strategy,
            "cpu_offload": cpu_offload,
            "backward_prefetch": backward_prefetch,
            "mixed_precision": mixed_precision,
            "param_init_fn": param_init_fn,
            "device_id": device_id,
            "sync_module_states": sync_module_states,
            "forward_prefetch": forward_prefetch,
            "limit_all_gathers": limit_all_gathers,
            "use_orig_params": use_orig_params,
            "device_mesh": device_mesh,
        }
        super().__init__()
        check_instance(f"{API}: module", module, nn.Module)
        if unit_of(module) is not None:
            raise ValueError(f"{API}: this {type(module).__name__} is a unit already; wrap each module once")
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
            warnings.warn(
                f"{API}: {type(module).__name__} has no forward, so its own parameters are gathered by none of its "
                "modules' forwards; wrap these, and the module that contains it",
                stacklevel=2,
            )
        modules, parameters = _ignored(module, ignored_modules, ignored_states)
        options = WrapperOptions.of(module, arguments)
        check_parameters(API, [module], parameters)
        planned = None
        if auto_wrap_policy is not None:
            planned = plan_wrappers(auto_wrap_policy, module, arguments, modules, parameters, options)
        initializer = Initializer(module, modules)

        with undone_on_failure(module) as made:

            def wrap(inner: nn.Module, _: dict[str, Any], left_out: frozenset[nn.Parameter]) -> nn.Module:
                assert planned is not None
                child = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
                nn.Module.__init__(child)
                made.append(child)
                child._set_up(inner, planned.options[inner], modules, parameters, initializer, left_out)
                child._casts_around = inner in planned.full_precision
                return child

            if planned is not None:
                planned.plan.apply(wrap)
            made.append(self)
            self._set_up(module, options, modules, parameters, initializer, frozenset())

    def _set_up(
        self,
        module: nn.Module,
        options: WrapperOptions,
        ignored_modules: set[nn.Module],
        ignored_parameters: set[nn.Parameter],
        initializer: Initializer,
        left_out: frozenset[nn.Parameter],
    ) -> None:
        """Become the wrapper of ``module``; the modules inside that are to be units are."""
        self._options, self._ignored_modules, self._casts_around = options, ignored_modules, False
        self._fsdp_wrapped_module = module
        mesh = options.mesh
        managed = [m for _, m in managed_modules([self]) if m not in ignored_modules and m is not self]
        failure: Exception | None = None
        try:
            initializer.materialize(managed, options.param_init_fn, mesh.device)
        except Exception as error:
            failure = error
        if options.param_init_fn is not None or options.sync_module_states:  # users' code; or ranks differ anyway
            raise_on_all(failure, mesh)
        elif failure is not None:
            raise failure
        self._ignored_parameters = initializer.present(ignored_parameters)
        ignored = self._ignored_parameters | initializer.present(left_out)
        lifted = initializer.left_out - ignored
        if options.sync_module_states:
            sync_states(managed, ignored, [p for p in dict.fromkeys(_all_parameters(module)) if p in lifted], mesh)
        if mesh.device.type == "cpu":
            keep_freed_memory_by_default()
        for submodule in managed:
            for name, buffer in submodule._buffers.items():
                if buffer is not None and buffer.device != mesh.device:
                    submodule._buffers[name] = buffer.to(mesh.device)
        form = FlatForm(None if options.use_orig_params else module)
        place = Placer(API, mesh, None)
        claimed = claim_parameters([self], ignored, place, form, lifted)
        policy = UnitPolicy(
            options.precision_policy,
            options.offload_policy,
            form,
            options.offload.offload_grads,
            options.precision is not None and options.precision.keep_low_precision_grads,
        )
        set_unit(self, Unit([self], mesh, claimed, policy, options.settings()))
        initializer.leave_out(left_out)
        note_inside(self)
        self._prepare_state()

    # ---------------------------------------------------------------- running

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module with its full parameters.

        The first one of the root in training compares the order of units over all ranks.

        Raises:
            FullshardError: On all ranks, if ranks run different units.
        """
        if reads_copies(unit_at(self)):
            return self._fsdp_wrapped_module(*args, **kwargs)
        if self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling() and not in_backward():
            schedule = unit_at(self).attached()
            if schedule.root() is unit_of(self) and not schedule.busy:
                with validated(schedule):
                    return self._run(args, kwargs)
        return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outside = outside_graph if torch.compiler.is_compiling() else _as_it_is
        dtype = _dtype_of((args, kwargs)) if self._casts_around else None
        args, kwargs = outside(FullyShardedDataParallel._before)(self, args, kwargs)
        try:
            output = self._fsdp_wrapped_module(*args, **kwargs)
            if dtype is not None:
                output = cast_tensors(dtype, output)
        except BaseException:
            outside(FullyShardedDataParallel._failed)(self)
            raise
        return outside(FullyShardedDataParallel._after)(self, output)

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        unit = unit_at(self)
        self._settle_state()
        precision = self._options.precision
        if self._casts_around:
            args, kwargs = cast_tensors(torch.float32, (args, kwargs))
        elif precision is not None and precision.param_dtype is not None:
            root = unit.attached().root() is unit
            if precision.cast_root_forward_inputs if root else precision.cast_forward_inputs:
                args, kwargs = cast_tensors(precision.param_dtype, (args, kwargs))
        return unit.pre_forward(args, kwargs)

    def _after(self, output: Any) -> Any:
        return unit_at(self).post_forward(self, output)

    def _failed(self) -> None:
        unit_at(self).abort_forward()

    @contextlib.contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Add gradients up without reducing them, for backwards in the ``with`` block: no communication for gradients.

        They stay unsharded, in the reduce dtype. With strategies that keep full parameters until backward, these
        stay after it, too.

        Raises:
            PhaseError: In the middle of a step.
        """
        units = nested_units(self)
        if any(unit.schedule is not None and unit.schedule.busy for unit in units):
            raise PhaseError("no_sync was entered in the middle of a step; enter it between steps")
        before = [(unit, replace(unit.settings)) for unit in units]
        for unit in units:
            settings = unit.settings
            settings.requires_gradient_sync = settings.requires_all_reduce = False
            settings.reshard_after_backward &= settings.reshard_after_forward is not False
        try:
            yield
        finally:
            for unit, old in before:
                settings = unit.settings
                settings.requires_gradient_sync = old.requires_gradient_sync
                settings.requires_all_reduce = old.requires_all_reduce
                settings.reshard_after_backward = old.reshard_after_backward

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float | int, norm_type: float | int = 2.0) -> torch.Tensor:
        """Scale all gradients down so that their norm, over all ranks and units, is at most ``max_norm``.

        Args:
            max_norm: The largest norm to allow.
            norm_type: p of the p-norm; ``float("inf")``: the largest element.

        Returns:
            The norm before scaling, 0-D, in the dtype that the gradients' dtypes promote to. The same on all ranks. See
            :func:`fullshard.clip_grad_norm_`, which does the work.
        """
        self._finish_reductions()
        return clip_gradients(self, float(max_norm), float(norm_type))

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Have ``hook`` reduce the gradients of all units below, instead of the engine.

        It divides by itself, too. ``fullshard.comm_hooks`` has some.

        Args:
            state: First argument of the hook.
            hook: ``hook(state, gradient, piece)``: put this rank's part of the reduced flat ``gradient`` into
                ``piece``. Without sharding ``hook(state, gradient)``: all-reduce it in place.

        Raises:
            ValueError: If it is not callable, or gradients are both sharded and replicated.
            FullshardError: If this is not the root, or there is a hook already.
        """
        if not callable(hook):
            raise ValueError(f"register_comm_hook: expected a function, found {hook!r}")
        if not self.check_is_root():
            raise FullshardError("register_comm_hook: call it on the outermost FullyShardedDataParallel")
        units = nested_units(self)
        if any(unit.settings.comm_hook is not None for unit in units):
            raise FullshardError("register_comm_hook: there is a hook already; a model can have one")
        if any(unit.settings.collectives.wire is not None for unit in units):
            raise ValueError("register_comm_hook: found a wire, which reduces by itself; call set_wire() first")
        others = [
            unit.name or type(unit.modules[0]()).__name__
            for unit in units
            if not isinstance(unit.policy.form, FlatForm)
        ]
        if others:
            raise ValueError(
                f"register_comm_hook: units {others} are fully_shard's, which send more than gradients; use their "
                "set_custom_reduce_scatter or set_all_reduce_hook"
            )
        waiting = [unit.name for unit in units if unit.gradients.partial or (unit.schedule and unit.schedule.busy)]
        if waiting:
            raise PhaseError(f"register_comm_hook: units {waiting} are in the middle of a step; register it before")
        if any(unit.mesh.transport is not None and unit.mesh.replica_transport is not None for unit in units):
            raise ValueError("register_comm_hook: a hook is one reduction, but hybrid strategies do two; use another")
        for unit in units:
            unit.settings.comm_hook = (state, hook)
            unit.reroute()

    def _finish_reductions(self) -> None:
        for unit in nested_units(self):
            if unit.schedule is not None:
                unit.schedule.finish_reductions()

    # ---------------------------------------------------------------- looking inside

    @property
    def module(self) -> nn.Module:
        """The wrapped module, also if a checkpoint wrapper lies around it."""
        inner = self._fsdp_wrapped_module
        return inner._modules.get(CHECKPOINTED) or inner

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """All wrappers in ``module``, itself included; with ``root_only`` those that no other contains."""
        found = [m for m in module.modules() if isinstance(m, FullyShardedDataParallel)]
        return [m for m in found if not m._inside] if root_only else found

    def check_is_root(self) -> bool:
        """Whether no other unit contains this one. Changes nothing."""
        unit = unit_at(self)
        return unit.schedule.root() is unit if unit.schedule is not None else not self._inside

    @staticmethod
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> contextlib.AbstractContextManager[None]:
        """Have modules hold their full parameters, in the shards' dtype, inside the ``with`` block. All ranks enter it.

        With gradients disabled, modules can be run inside: on these parameters, without casts.

        Args:
            module: Units in it are meant, whichever front end made them.
            recurse: Those of all modules below, too.
            writeback: Put what was edited back into the shards. If the block raises, nothing is.
            rank0_only: Only the first rank of the shard axis gets full parameters; with ``writeback``, what it makes
                of them is sent to the others.
            offload_to_cpu: The full parameters are in CPU memory.
            with_grads: Gradients, too.

        Raises:
            PhaseError: In forward, backward, or where a unit's parameters are full already.
        """
        return wrapper_summon.summon(
            module,
            recurse=recurse,
            writeback=writeback,
            rank0_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
            with_grads=with_grads,
        )

    def apply(self, fn: Callable[[nn.Module], object]) -> FullyShardedDataParallel:
        """As of ``nn.Module``, with full parameters; what ``fn`` makes of them is kept."""
        with self.summon_full_params(self, recurse=False):
            return super().apply(fn)  # type: ignore[arg-type]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of ``nn.Module``; inside :meth:`summon_full_params` with the names that the model had before."""
        summoned = unit_at(self).progress.summoned
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield clean_name(name) if summoned else name, parameter

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """As :meth:`named_parameters`."""
        summoned = unit_at(self).progress.summoned
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield clean_name(name) if summoned else name, buffer

    def __getattr__(self, name: str) -> Any:
        """What the wrapper does not have itself, the wrapped module may."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_fsdp_wrapped_module":
                raise
            return getattr(self._fsdp_wrapped_module, name)

    def __getitem__(self, key: int | str | slice) -> Any:
        """As of the wrapped module (``nn.Sequential``)."""
        return self._fsdp_wrapped_module[key]  # type: ignore[index]

    def _shared_with_copies(self) -> list[object]:
        return [self._options]

    # What programs written for torch.distributed.fsdp read.

    @property
    def process_group(self) -> Any:
        """That parameters are sharded over; without sharding, that gradients are averaged over."""
        mesh = self._options.mesh
        part = mesh.shard if mesh.shard is not None else mesh.replicate
        return None if part is None else part.get_group()

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """As given."""
        return self._options.strategy

    @property
    def mixed_precision(self) -> MixedPrecision:
        """As given; without any, one that casts nothing."""
        return self._options.precision or MixedPrecision()

    @property
    def compute_device(self) -> torch.device:
        """Where full parameters are."""
        return self._options.mesh.device

    @property
    def rank(self) -> int:
        """In :attr:`process_group`."""
        group = self.process_group
        return 0 if group is None else int(group.rank())

    @property
    def world_size(self) -> int:
        """Size of :attr:`process_group`."""
        group = self.process_group
        return 1 if group is None else int(group.size())


def _ignored(
    module: nn.Module, modules: Iterable[nn.Module] | None, states: Iterable[Any] | None
) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """What is ignored here, and what wrappers below ignore already."""
    ignored_modules, ignored_parameters = ignored_states(module, modules, states)
    for below in module.modules():
        if isinstance(below, FullyShardedDataParallel):
            ignored_modules |= below._ignored_modules
            ignored_parameters |= below._ignored_parameters
    return ignored_modules, ignored_parameters


def _all_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Those that modules hold, wrappers' included, in order, also more than once."""
    return (p for m in module.modules() for p in m._parameters.values() if p is not None)


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _dtype_of(inputs: Any) -> torch.dtype | None:
    """Of the first floating-point tensor."""
    return next((t.dtype for t in iterate_tensors(inputs) if t.is_floating_point()), None)
