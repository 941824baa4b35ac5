"""torch.distributed.checkpoint.state_dict's functions on wrappers, for programs that ask for it.

[Note: torch's state dict functions]
``get_model_state_dict`` and its kin ask ``FullyShardedDataParallel`` of torch about a model: whether modules are
instances, in which form to save them, and for the optimizer's state. They do so through names of their own module, so
these are bound to others here, which ask that class *and* ours; torch's class, and models of it, are left alone. Users
may have imported the functions already: they look the names up when they run.

That changes torch for the whole process, so only who asks for it gets it: the user by
``enable_torch_state_dict_functions``, or the drop-in. Without it the functions work on models of ``fully_shard``,
whose parameters are DTensors. Of wrappers they would take this rank's pieces for whole parameters, so wrappers refuse:
the functions ask every module first for ``_fqn_modifiers``, a method with which modules can say under which names they
save, and a wrapper's raises.

For models of ``fully_shard`` it adds this: an optimizer without state stays so when it is looked at, see
[Note: No dummy step]; keys missing from a full state dict are reported; full optimizer state can be loaded for 0-D
parameters; frozen parameters are left out under all names of tied ones.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import torch
import torch.distributed.checkpoint.state_dict as torch_state_dict  # works while the package is being imported
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fullshard.checkpoint.state import types as state_dict_types
from fullshard.checkpoint.state.optimizer.initial import give_initial_state
from fullshard.checkpoint.state.parameters import local_parameters
from fullshard.checkpoint.state.types import StateDictType
from fullshard.dropin.patches import SharedPatch, replace
from fullshard.engine.ownership import nested_units, units_of
from fullshard.engine.parameters.flat import FlatParameter, FlatShardedParameter
from fullshard.engine.parameters.names import clean_name
from fullshard.engine.parameters.sharded import managed_by
from fullshard.errors import FullshardError
from fullshard.policy import ShardingStrategy
from fullshard.wrapper.state_dict.model import WrapperState
from fullshard.wrapper.state_dict.optimizer import WrapperOptim

__all__ = ["enable_torch_state_dict_functions"]

Function = Callable[..., Any]

_module: Any = torch_state_dict

# A model and the parameters and buffers that torch's functions use for it while they load a state dict.
_entries_in_use: contextvars.ContextVar[tuple[nn.Module, list[tuple[str, Any]]] | None] = contextvars.ContextVar(
    "_entries_of", default=None
)
# True while names are for optimizer state of wrappers, which uses FQNs without the prefix of compiled modules.
_for_optimizers: contextvars.ContextVar[bool] = contextvars.ContextVar("_for_optimizers", default=False)


def enable_torch_state_dict_functions() -> contextlib.ExitStack:
    """Make ``torch.distributed.checkpoint.state_dict`` support ``fullshard.FullyShardedDataParallel``.

    ``get_model_state_dict``, ``set_optimizer_state_dict`` and the other functions of that module then work on wrappers,
    with all ``StateDictOptions``, whether they were imported before or after this call. Private names of torch's module
    are patched for the whole process; models of torch's FSDP, DistributedDataParallel and plain ones continue to work.
    ``fullshard.dropin.install`` includes this call.

    Returns:
        A context manager that undoes this call at its end or by ``close()``; it may be discarded. The patches stay
        while another call is in effect.

    Warns:
        UserWarning: If torch's module lacks one of the patched names. Nothing is changed then.
    """
    return _shared.enable()


def _patch(undo: contextlib.ExitStack) -> None:
    bound: dict[str, Any] = {
        "_broadcast_state_dict": _keep_scalars,
        "_distribute_state_dict": _keep_scalars,
        "_get_fqns": _fqns,
        "_get_model_state_dict": _get_model,
        "_get_module_fsdp_state_if_fully_sharded_module": _state_of,
        "_get_optim_state_dict": _get_optim,
        "_init_optim_state": _initialize,
        "_iterate_valid_model_state": _entries,
        "_load_model_state_dict": _load_model,
        "_load_optim_state_dict": _load_optim,
        "_verify_options": _verify,
    }
    missing = [name for name in ("FSDP", *bound) if not hasattr(_module, name)]
    if missing:
        warnings.warn(
            f"torch {torch.__version__} has no {', '.join(missing)} in {_module.__name__}, whose functions therefore "
            "cannot support fullshard.FullyShardedDataParallel; use its own state dicts, or fullshard.save and "
            "fullshard.load",
            stacklevel=4,
        )
        return
    replaced: dict[str, Any] = {name: functools.partial(ours, getattr(_module, name)) for name, ours in bound.items()}
    replaced["FSDP"] = _class_of_both_engines(_module.FSDP)
    if hasattr(_module, "HYBRID_SHARDING_STRATEGIES"):  # from torch 2.13 on
        hybrid = (strategy for strategy in ShardingStrategy if strategy.hybrid)
        replaced["HYBRID_SHARDING_STRATEGIES"] = [*_module.HYBRID_SHARDING_STRATEGIES, *hybrid]
    for name, value in replaced.items():
        replace(undo, _module, name, value)
    replace(undo, WrapperState, "_fqn_modifiers", _no_modifiers)


def _no_modifiers(_: nn.Module) -> dict[str, str]:
    return {}


_shared = SharedPatch(_patch)


# ---------------------------------------------------------------- classes


def _class_of_both_engines(theirs: Any) -> Any:
    """Make a class for ``isinstance`` tests and static methods that covers torch's wrapper class and fullshard's."""

    class Either(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, (theirs, WrapperState))

        def __getattr__(cls, name: str) -> Any:
            return getattr(theirs, name)

    class WrapperOfEither(metaclass=Either):
        @staticmethod
        def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[nn.Module]:
            return [*theirs.fsdp_modules(module, root_only), *_wrappers(module)]

        @staticmethod
        @contextlib.contextmanager
        def state_dict_type(
            module: nn.Module, state_dict_type: Any, state_dict_config: Any = None, optim_state_dict_config: Any = None
        ) -> Generator[None, None, None]:
            settings = (state_dict_type, state_dict_config, optim_state_dict_config)
            with contextlib.ExitStack() as stack:
                if theirs.fsdp_modules(module):
                    stack.enter_context(theirs.state_dict_type(module, *settings))
                stack.enter_context(WrapperState.state_dict_type(module, *map(_as_ours, settings)))
                yield

        @staticmethod
        def optim_state_dict(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return chosen(model).optim_state_dict(model, *args, **kwargs)

        @staticmethod
        def optim_state_dict_to_load(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return chosen(model).optim_state_dict_to_load(model, *args, **kwargs)

    def chosen(model: nn.Module) -> Any:
        return WrapperOptim if _wrappers(model) else theirs

    return WrapperOfEither


def _as_ours(value: Any) -> Any:
    """Convert torch's ``StateDictType`` and config values to fullshard's of the same names."""
    if value is None:
        return None
    if type(value).__name__ == StateDictType.__name__:
        return StateDictType[value.name]
    options = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    return getattr(state_dict_types, type(value).__name__)(**options)


def _wrappers(module: nn.Module) -> list[nn.Module]:
    return [m for m in module.modules() if isinstance(m, WrapperState)]


def _state_of(original: Function, module: nn.Module) -> Any:
    """Return a state for wrappers, of which torch only tests that it is not None."""
    return module if isinstance(module, WrapperState) else original(module)


def _verify(original: Function, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Refuse a part of a wrapper, whose parameters are slices that torch would take for whole ones."""
    nested = nested_units(model)
    for unit in units_of(model):
        first = next((p for p in unit.parameters if isinstance(p, FlatShardedParameter)), None)
        if unit not in nested and first is not None and unit.mesh.world_size > 1:
            raise FullshardError(
                f"torch.distributed.checkpoint.state_dict: expected a whole model, found a {type(model).__name__} "
                f"inside of a wrapper that shards {first.describe()} with others; pass the "
                "FullyShardedDataParallel around it"
            )
    return original(model, *args, **kwargs)


# ---------------------------------------------------------------- names


def _fqns(original: Function, model: nn.Module, name: str, *args: Any, **kwargs: Any) -> set[str]:
    """Return the FQNs before wrapping of parameter ``name`` of ``model``; a flat parameter has several."""
    if _for_optimizers.get():
        kwargs["skip_compiler_prefix"] = True
    path, _, last = name.rpartition(".")
    if last.startswith("_flat_param"):
        module = model.get_submodule(path)
        flat = module._parameters.get(last)
        if isinstance(flat, FlatParameter):
            names = _names_in(module, flat)
            return {fqn for inside in names for fqn in _fqns(original, model, f"{path}.{inside}", *args, **kwargs)}
    # torch's function does not remove the names of wrappers inside of checkpoint wrappers.
    return {clean_name(fqn) for fqn in original(model, name, *args, **kwargs)}


def _names_in(module: nn.Module, flat: FlatParameter) -> list[str]:
    """Return the first name below ``module`` of each original parameter in ``flat``."""
    first = managed_by(flat)
    assert isinstance(first, FlatShardedParameter) and first.handle is not None, "a flat parameter without a unit"
    of = {
        (id(owner.module()), owner.name): i for i, p in enumerate(first.handle.sharded_parameters) for owner in p.owners
    }
    names: dict[int, str] = {}
    for prefix, submodule in module.named_modules():
        for name in submodule._parameters:
            index = of.get((id(submodule), name))
            if index is not None:
                names.setdefault(index, f"{prefix}.{name}" if prefix else name)
    return list(names.values())


def _entries(original: Function, model: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and values of the entries of a state dict of ``model``."""
    given = _entries_in_use.get()
    yield from given[1] if given is not None and given[0] is model else original(model, *args, **kwargs)


@contextlib.contextmanager
def _using_entries(model: nn.Module, entries: Iterable[tuple[str, Any]]) -> Iterator[None]:
    token = _entries_in_use.set((model, list(entries)))
    try:
        yield
    finally:
        _entries_in_use.reset(token)


def _original_entries(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the entries that torch's function yields, with the original parameters instead of flat parameters.

    torch pairs names with and without the prefixes of other wrappers, which is ambiguous for a parameter with several.
    """
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, parameter in module._parameters.items():
            held = module.__dict__.get(name) if parameter is None else parameter
            if held is not None and not isinstance(held, FlatParameter):
                yield prefix + name, held
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield prefix + name, buffer
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield f"{prefix}{nn.modules.module._EXTRA_STATE_KEY_SUFFIX}", None


# ---------------------------------------------------------------- models


def _get_model(original: Function, model: nn.Module, info: Any) -> dict[str, Any]:
    """Return a model state dict; with ``ignore_frozen_params`` without all FQNs of frozen parameters, on all ranks."""
    if not info.ignore_frozen_params or not nested_units(model):
        state: dict[str, Any] = original(model, info)
        return state
    state = original(model, dataclasses.replace(info, ignore_frozen_params=False))
    for fqn in _frozen(model):
        state.pop(fqn, None)
    return state


def _frozen(model: nn.Module) -> Iterator[str]:
    for parameter in local_parameters(model):
        if not parameter.parameter.requires_grad:
            yield from parameter.fqns


def _load_model(original: Function, model: nn.Module, state_dict: dict[str, Any], info: Any) -> Any:
    """Load a model state dict; full ones are checked for missing keys, and sharded by fullshard for wrappers."""
    if not info.handle_model or not nested_units(model):
        return original(model, state_dict, info)
    wrapped = bool(_wrappers(model))
    rows = any(not isinstance(p, FlatShardedParameter) for unit in nested_units(model) for p in unit.parameters)
    whole = info.full_state_dict or info.broadcast_from_rank0
    if wrapped and not info.broadcast_from_rank0 and not (whole and rows):
        with _using_entries(model, _original_entries(model)):  # wrappers load unsharded values
            return original(model, state_dict, dataclasses.replace(info, full_state_dict=False))
    if whole and info.strict and not info.broadcast_from_rank0 and state_dict:
        _check_complete(model, state_dict, info)
    if not wrapped:
        return original(model, state_dict, info)
    with WrapperState.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        template = model.state_dict()
    with _using_entries(model, template.items()):
        return original(model, state_dict, info)


def _check_complete(model: nn.Module, state_dict: dict[str, Any], info: Any) -> None:
    modifiers = info.dsd_fqn_modifiers
    names = (name for name, _ in _module._iterate_valid_model_state(model, modifiers))
    expected = {fqn: None for name in names for fqn in sorted(_module._get_fqns(model, name, modifiers))}
    missing = [fqn for fqn in expected if fqn not in state_dict]
    if missing:
        raise FullshardError(
            f"set_model_state_dict: the full state dict has no {', '.join(missing[:5])}"
            f"{f' and {len(missing) - 5} more' if len(missing) > 5 else ''}; pass StateDictOptions(strict=False) to "
            "keep the values of missing keys"
        )


# ---------------------------------------------------------------- optimizers


def _is_ours(optimizer: torch.optim.Optimizer) -> bool:
    return any(managed_by(p) is not None for group in optimizer.param_groups for p in group["params"])


def _initialize(original: Function, optimizer: torch.optim.Optimizer) -> None:
    if _is_ours(optimizer):
        give_initial_state(optimizer)
    else:
        original(optimizer)


def _without_state(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    return [optimizer for optimizer in optimizers if not optimizer.state and _is_ours(optimizer)]


def _get_optim(
    original: Function, model: nn.Module, optimizers: tuple[torch.optim.Optimizer, ...], info: Any
) -> dict[str, Any]:
    """Return an optimizer state dict; state that torch initializes for it is cleared afterwards."""
    fresh = _without_state(optimizers)
    try:
        state: dict[str, Any] = original(model, optimizers, info)
    finally:
        for optimizer in fresh:
            optimizer.state.clear()
    return state


def _load_optim(
    original: Function,
    model: nn.Module,
    optimizers: tuple[torch.optim.Optimizer, ...],
    state_dict: dict[str, Any],
    info: Any,
) -> None:
    fresh, token = _without_state(optimizers), _for_optimizers.set(bool(_wrappers(model)))
    try:
        original(model, optimizers, state_dict, info)
    except BaseException:
        for optimizer in fresh:
            optimizer.state.clear()
        raise
    finally:
        _for_optimizers.reset(token)


def _keep_scalars(original: Function, full: dict[str, Any], local: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    """Keep 0-D DTensors, the state of 0-D parameters, which torch would replace by plain tensors."""
    scalars = {key: value for key, value in local.items() if isinstance(value, DTensor) and not value.dim()}
    original(full, local, *args, **kwargs)
    for key, old in scalars.items():
        new = local.get(key)
        if isinstance(new, torch.Tensor) and not isinstance(new, DTensor):
            new = new.to(old._local_tensor.device)
            local[key] = distribute_tensor(new, old.device_mesh, old.placements, src_data_rank=None)
