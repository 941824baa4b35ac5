"""``FullyShardedDataParallel``, which translates its arguments to units with flat parameters on the engine."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.device_mesh import DeviceMesh

from fullshard.engine.containers import cast_tensors, iterate_tensors
from fullshard.engine.ownership import Subtree, all_modules, nested_units, unit_of
from fullshard.engine.parameters.names import CHECKPOINTED, WRAPPED, clean_name
from fullshard.engine.runtime import current_runtime, each_runtime, runtime_of
from fullshard.engine.states import ParameterState
from fullshard.errors import FullshardError, PhaseError
from fullshard.frontend.arguments import check_instance, check_parameters, placer
from fullshard.frontend.sharded_module import (
    ShardedModule,
    computes_on_copies,
    finish_reductions,
    make_unit,
    outside_graph,
    run_unsharded,
    unchanged,
    unit_at,
)
from fullshard.optim.norms import clip_grad_norm_
from fullshard.policy import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from fullshard.ranks.agreement import raised_on_all
from fullshard.ranks.groups import data_parallel_groups
from fullshard.wrap import Policy, PolicyFunction
from fullshard.wrapper.auto_wrap import plan_wrappers
from fullshard.wrapper.initialization import Initializer, sync_states
from fullshard.wrapper.options import API, Groups, WrapperOptions, ignored_states
from fullshard.wrapper.state_dict.model import WrapperState
from fullshard.wrapper.state_dict.optimizer import WrapperOptim
from fullshard.wrapper.summon import WrapperSummon

__all__ = ["FullyShardedDataParallel"]


class FullyShardedDataParallel(WrapperSummon, WrapperOptim, WrapperState, ShardedModule):
    """Wrap a module and shard its parameters, gradients and optimizer state over ranks, like PyTorch's FSDP1.

    The parameters that are not in a nested unit become one unit (an FSDP module: parameters that are unsharded and
    reduced together). They are flattened into one flat parameter, of which each rank keeps one slice, and all-gathered
    for forward and backward. Build the optimizer from ``parameters()`` after wrapping, or with ``use_orig_params=True``
    before or after.

    Two settings apply to the whole process from the first wrapper on, as from the first call of
    ``fullshard.fully_shard``: on CPU the C allocator keeps freed memory (``FULLSHARD_KEEP_FREED_MEMORY=0`` disables
    this), and hooks on all optimizers track their steps (``FULLSHARD_WATCH_OPTIMIZERS=0`` disables this) and step local
    tensors (``FULLSHARD_LOCAL_OPTIMIZERS=0``, see ``fullshard.optim.localize``). The functions of
    ``torch.distributed.checkpoint.state_dict`` raise ``FullshardError`` on wrappers until
    ``fullshard.dropin.enable_torch_state_dict_functions()`` is called.

    Args:
        module: Any module. With ``auto_wrap_policy``, modules inside of it are replaced by wrappers of themselves.
        process_group: Ranks to shard over. For hybrid strategies, a tuple of two process groups: the one to shard over
            and the one to replicate over. None: all ranks; hybrid strategies then shard within a machine and replicate
            over machines.
        sharding_strategy: A ``ShardingStrategy``. None: ``FULL_SHARD``.
        cpu_offload: Offload parameters and gradients to CPU memory. None: no offloading.
        auto_wrap_policy: Policy of ``fullshard.wrap`` or of ``torch.distributed.fsdp.wrap`` (a callable) that selects
            the modules inside of ``module`` to wrap. None: only ``module`` itself.
        backward_prefetch: When to prefetch the next unit in backward. None: no prefetching in backward.
        mixed_precision: Dtypes of parameters in computation, of gradient reduction and of buffers. None: no casts.
        ignored_modules: Modules that are ignored with all their children: not sharded, moved, cast or reduced.
        param_init_fn: Called with each module that has parameters or buffers on the meta device, to allocate and
            initialize them. None: allocate them on the compute device and call the module's ``reset_parameters()``.
        device_id: Compute device; CPU parameters are moved there. A device with an index becomes the current device.
            None: the accelerator that the module is on, else the device type of the mesh.
        sync_module_states: Broadcast parameters and buffers from the first rank before sharding.
        forward_prefetch: For compatibility. The next unit of a forward is always prefetched.
        limit_all_gathers: For compatibility. The prefetch budget always limits how many units are prefetched at a time.
        use_orig_params: If True, ``parameters()`` yields the original parameters, each holding this rank's 1-D shard.
            If False, it yields one ``FlatParameter`` per unit (and dtype).
        ignored_states: Modules or parameters to ignore, instead of ``ignored_modules``.
        device_mesh: Device mesh, instead of ``process_group``: 1-D, or for hybrid strategies 2-D (replicate, shard).

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If arguments, or what the policy chooses, contradict each other or the module. Nothing is wrapped
            then.

    Example:
        ```python
        import torch
        from torch import nn
        from fullshard import FullyShardedDataParallel as FSDP
        from fullshard.wrap import ModuleWrapPolicy

        model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)])
        model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), use_orig_params=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ```
    """

    _fullshard_wraps = WRAPPED
    _fsdp_wrapped_module: nn.Module
    _options: WrapperOptions
    _ignored_modules: set[nn.Module]
    _ignored_parameters: set[nn.Parameter]  # including those of nested units

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
            raise ValueError(f"{API}: this {type(module).__name__} is already wrapped; wrap each module once")
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
            warnings.warn(
                f"{API}: {type(module).__name__} has no forward, so its own parameters are never unsharded; wrap its "
                "children and the module that contains it instead",
                stacklevel=2,
            )
        ignored = _ignored(module, ignored_modules, ignored_states)
        options = WrapperOptions.of(module, arguments)
        check_parameters(API, Subtree.of([module]), ignored[1])
        initializer = Initializer(module, *ignored)
        if auto_wrap_policy is not None:
            plan, chosen = plan_wrappers(auto_wrap_policy, module, arguments, *ignored, options)

            def wrap(inner: nn.Module, _: dict[str, Any], left_out: frozenset[nn.Parameter]) -> nn.Module:
                child = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
                nn.Module.__init__(child)
                child._set_up(inner, chosen[inner], initializer, left_out)
                return child

            plan.apply(wrap)
        self._set_up(module, options, initializer, frozenset())

    def _set_up(
        self, module: nn.Module, options: WrapperOptions, initializer: Initializer, left_out: frozenset[nn.Parameter]
    ) -> None:
        """Initialize the wrapper of ``module``, after the wrappers of modules inside of it."""
        # Not by nn.Module.__setattr__, which compares each value with all that a module may register.
        vars(self).update(_options=options, _ignored_modules=initializer.ignored_modules)
        self._fsdp_wrapped_module = module
        mesh, subtree = options.mesh, Subtree.of([self])
        managed = self._managed_in(subtree)
        ranks_agree = options.param_init_fn is not None or options.sync_module_states  # user code; a collective follows
        with raised_on_all(data_parallel_groups(mesh)) if ranks_agree else contextlib.nullcontext():
            initializer.materialize(managed, options.param_init_fn, mesh.device)
        if options.param_init_fn is not None:
            subtree = Subtree.of([self])  # it may have changed what the modules hold
        vars(self).update(_ignored_parameters=initializer.current(initializer.ignored_parameters))
        ignored = self._ignored_parameters | initializer.current(left_out)
        unclaimed = initializer.unclaimed - ignored
        # Those that nested units left to this one, in the order of all ranks.
        inherited = [p for m in module.modules() for p in m._parameters.values() if p in unclaimed] if unclaimed else []
        if options.sync_module_states:
            sync_states(managed, ignored, inherited, mesh)
        make_unit(
            subtree,
            mesh,
            placer(API, mesh),
            options.policy(module),
            options.settings(),
            ignored,
            ignored_modules=self._ignored_modules,
            owned_by_ancestor=inherited,
        )
        initializer.unclaimed.difference_update(inherited)  # an ancestor would broadcast, and take, this rank's shards
        initializer.add_unclaimed(left_out)
        self._prepare_state()

    # ---------------------------------------------------------------- running

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module with unsharded parameters.

        Args:
            *args: Positional arguments of the wrapped module.
            **kwargs: Keyword arguments of the wrapped module.

        Returns:
            The output of the wrapped module.
        """
        outside = outside_graph if torch.compiler.is_compiling() else unchanged
        forward: Callable[..., Any] = self._fsdp_wrapped_module
        if not computes_on_copies(unit_at(self)):
            if self._options.casts_around:
                forward = functools.partial(self._forward_cast_back, _dtype_of((args, kwargs)))
            args, kwargs = outside(FullyShardedDataParallel._cast_inputs)(self, args, kwargs)
        return run_unsharded(self, forward, args, kwargs, outside)

    def _forward_cast_back(self, dtype: torch.dtype | None, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module, and cast its outputs to ``dtype``, that of the inputs before their cast."""
        output = self._fsdp_wrapped_module(*args, **kwargs)
        return output if dtype is None else cast_tensors(dtype, output)

    def _cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Cast buffers, once, and the inputs as the mixed precision says."""
        runtime_of(unit_at(self))  # decides which wrapper is the root
        self._cast_buffers()
        dtype, precision = None, self._options.precision
        if self._options.casts_around:
            dtype = torch.float32
        elif precision is not None:
            casts = precision.cast_root_forward_inputs if self.check_is_root() else precision.cast_forward_inputs
            dtype = precision.param_dtype if casts else None
        return (args, kwargs) if dtype is None else cast_tensors(dtype, (args, kwargs))

    @contextlib.contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Accumulate unsharded gradients without communication, for the backwards inside the ``with`` block.

        The gradients stay unsharded, in the reduce dtype; the next backward outside of the block reduces them. With
        strategies that keep parameters unsharded between forward and backward, parameters also stay unsharded after
        backward.

        Yields:
            None.

        Raises:
            PhaseError: If it is entered in the middle of a step.

        Example:
            ```python
            import torch
            from torch import nn
            from fullshard import FullyShardedDataParallel as FSDP

            model = FSDP(nn.Linear(16, 16))
            with model.no_sync():
                model(torch.randn(4, 16)).sum().backward()  # no reduce-scatter
            model(torch.randn(4, 16)).sum().backward()  # reduces the sum of both gradients
            ```
        """
        units = nested_units(self)
        if any(runtime.busy for runtime in each_runtime(units)):
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
        """Scale all gradients down in place so that their norm, over all ranks and units, is at most ``max_norm``.

        A collective: call it on the root, on all ranks, after backward.

        Args:
            max_norm: Largest norm to allow.
            norm_type: Order p of the norm, above 0; ``float("inf")``: the largest absolute value.

        Returns:
            The norm before scaling: a 0-D tensor on the compute device, the same on all ranks. Its dtype is the one
            that the dtypes of the gradients promote to.

        Raises:
            ValueError: If ``norm_type`` is not positive.

        Warns:
            UserWarning: If this rank has no gradients.

        Example:
            ```python
            import torch
            from torch import nn
            from fullshard import FullyShardedDataParallel as FSDP

            model = FSDP(nn.Linear(16, 16))
            model(torch.randn(4, 16)).square().mean().backward()
            norm = model.clip_grad_norm_(1.0)
            assert norm.dim() == 0
            ```
        """
        max_norm, norm_type = float(max_norm), float(norm_type)
        if not norm_type > 0:
            raise ValueError(f"clip_grad_norm_: norm_type: expected a positive number, found {norm_type}")
        finish_reductions(self)
        parameters = list(self.parameters())
        total = clip_grad_norm_(parameters, max_norm, norm_type).to(self.compute_device)
        dtypes = [parameter.grad.dtype for parameter in parameters if parameter.grad is not None]
        if not dtypes:
            warnings.warn(
                "clip_grad_norm_: this rank has no gradients; returning the norm in torch.float32", stacklevel=3
            )
            return total.float()
        return total.to(functools.reduce(torch.promote_types, dtypes))

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Register a hook that reduces the gradients of all nested units in place of the built-in reduction.

        The hook also averages: it has to divide by the number of ranks. ``fullshard.comm_hooks`` contains ready-made
        hooks.

        Args:
            state: First argument of the hook.
            hook: With sharding, ``hook(state, gradient, shard)``, which reduce-scatters the flat ``gradient`` into
                ``shard``. Without sharding, ``hook(state, gradient)``, which all-reduces it in place.

        Raises:
            ValueError: If ``hook`` is not callable, quantized communication is enabled, the strategy is hybrid, or a
                nested unit was made by ``fully_shard``.
            FullshardError: If this is not the root, or a hook is already registered.
            PhaseError: In the middle of a step.
        """
        if not callable(hook):
            raise ValueError(f"register_comm_hook: expected a function, found {hook!r}")
        if not self.check_is_root():
            raise FullshardError("register_comm_hook: call it on the outermost FullyShardedDataParallel")
        units = nested_units(self)
        if any(unit.settings.comm_hook is not None for unit in units):
            raise FullshardError("register_comm_hook: a hook is already registered; a model can have only one")
        if any(unit.settings.collectives.quantization is not None for unit in units):
            raise ValueError(
                "register_comm_hook: quantized communication is enabled and cannot be combined with a hook; disable it "
                "with set_comm_quantization() first"
            )
        others = [
            unit.name or type(unit.modules[0]()).__name__
            for unit in units
            if not unit.policy.form.reduces_gradients_alone
        ]
        if others:
            raise ValueError(
                f"register_comm_hook: the units {others} were sharded by fully_shard, which has no communication "
                "hooks; use their set_custom_reduce_scatter or set_all_reduce_hook"
            )
        waiting = [
            unit.name
            for unit in units
            if unit.gradients.need_all_reduce or any(runtime.busy for runtime in each_runtime([unit]))
        ]
        if waiting:
            raise PhaseError(
                f"register_comm_hook: units {waiting} are in the middle of a step; register the hook between steps"
            )
        if any(unit.mesh.world_size > 1 and unit.mesh.replicas > 1 for unit in units):
            raise ValueError(
                "register_comm_hook: hybrid sharding strategies reduce over two process groups and do not support "
                "communication hooks; use another sharding strategy"
            )
        for unit in units:
            unit.settings.comm_hook = (state, hook)
            unit.change_transports()

    # ---------------------------------------------------------------- inspection

    @property
    def module(self) -> nn.Module:
        """The wrapped module, without the wrapper of activation checkpointing if there is one."""
        inner = self._fsdp_wrapped_module
        return inner._modules[CHECKPOINTED] if isinstance(inner, ActivationWrapper) else inner  # type: ignore[return-value]

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """Return all wrappers in ``module``, including ``module`` itself.

        Args:
            module: Any module.
            root_only: Return only the wrappers that are not nested in another one.

        Returns:
            The wrappers, in the order of ``module.modules()``.
        """
        found = [m for m in module.modules() if isinstance(m, FullyShardedDataParallel)]
        return [m for m in found if not m._is_nested] if root_only else found

    def check_is_root(self) -> bool:
        """Return True if this wrapper is the root: not nested in another FSDP module. No state is changed.

        Returns:
            True for a root.
        """
        unit = unit_at(self)
        runtime = current_runtime(unit)
        return runtime.root() is unit if runtime is not None else not self._is_nested

    def apply(self, fn: Callable[[nn.Module], object]) -> FullyShardedDataParallel:
        """Apply ``fn`` to every module inside, as ``nn.Module.apply`` does, while parameters are unsharded.

        A collective. Changes are written back to the shards.

        Args:
            fn: Called with each module inside, and then with this one.

        Returns:
            This module.
        """
        with self.summon_full_params(self, recurse=False):
            return super().apply(fn)  # type: ignore[arg-type]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters as ``nn.Module`` does; inside ``summon_full_params``, with their FQNs before wrapping.

        Args:
            *args: Positional arguments of ``nn.Module.named_parameters``.
            **kwargs: Keyword arguments of ``nn.Module.named_parameters``.

        Yields:
            FQN and parameter.
        """
        summoned = unit_at(self).parameter_state is ParameterState.SUMMONED
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield clean_name(name) if summoned else name, parameter

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield buffers as ``nn.Module`` does; inside ``summon_full_params``, with their FQNs before wrapping.

        Args:
            *args: Positional arguments of ``nn.Module.named_buffers``.
            **kwargs: Keyword arguments of ``nn.Module.named_buffers``.

        Yields:
            FQN and buffer.
        """
        summoned = unit_at(self).parameter_state is ParameterState.SUMMONED
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield clean_name(name) if summoned else name, buffer

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped module that the wrapper does not have."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_fsdp_wrapped_module":
                raise
            return getattr(self._fsdp_wrapped_module, name)

    def __getitem__(self, key: int | str | slice) -> Any:
        """Index the wrapped module (``nn.Sequential``)."""
        return self._fsdp_wrapped_module[key]  # type: ignore[index]

    # Attributes that programs written for torch.distributed.fsdp read.

    @property
    def process_group(self) -> Any:
        """Process group that parameters are sharded over; with ``NO_SHARD``, to average gradients over."""
        mesh = self._options.mesh
        part = mesh.shard if mesh.shard is not None else mesh.replicate
        return None if part is None else part.get_group()

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """Sharding strategy that was passed; ``FULL_SHARD`` if none was."""
        return self._options.strategy

    @property
    def mixed_precision(self) -> MixedPrecision:
        """Mixed precision that was passed; if none was, one without casts."""
        return self._options.precision or MixedPrecision()

    @property
    def compute_device(self) -> torch.device:
        """Device of unsharded parameters."""
        return self._options.mesh.device

    @property
    def rank(self) -> int:
        """Rank of this process in ``process_group``."""
        group = self.process_group
        return 0 if group is None else int(group.rank())

    @property
    def world_size(self) -> int:
        """Number of ranks in ``process_group``."""
        group = self.process_group
        return 1 if group is None else int(group.size())


def _ignored(
    module: nn.Module, modules: Iterable[nn.Module] | None, states: Iterable[Any] | None
) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """Return ignored modules and parameters, including those that nested wrappers ignore."""
    ignored_modules, ignored_parameters = ignored_states(module, modules, states)
    for below in all_modules(module):
        if isinstance(below, FullyShardedDataParallel):
            ignored_modules |= below._ignored_modules
            ignored_parameters |= below._ignored_parameters
    return ignored_modules, ignored_parameters


def _dtype_of(inputs: Any) -> torch.dtype | None:
    """Return the dtype of the first floating-point tensor."""
    return next((t.dtype for t in iterate_tensors(inputs) if t.is_floating_point()), None)
