"""torch.distributed.checkpoint.state_dict's functions on models of this library.

[Note: torch's state dict functions]
``get_model_state_dict`` and its kin ask ``FullyShardedDataParallel`` of torch about a model: whether modules are
instances, in which form to save them, and for the optimizer's state. They do so through names of their own module, so
these are bound to others here, which ask that class *and* ours; torch's class, and models of it, are left alone. Users
may have imported the functions already: they look the names up when they run.

This is done when the first module is sharded, and imports the module then: 2 ms, for its large part, the package around
it, is what ``fullshard.save`` builds on (70 ms if nothing of it were loaded). Cheaper ways lose: import hooks change
the interpreter for everybody, and to look whether the module is there at each ``state_dict`` or ``named_parameters``
patches in the middle of somebody's call.

Models of ``fully_shard`` need little of it, for torch's functions know DTensors: see [Note: No dummy step], and that
keys missing from a full state dict are reported.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fullshard import state_dict_types
from fullshard.checkpoint.parameters import local_parameters
from fullshard.engine.flat_parameter import FlatParameter, FlatPiece
from fullshard.engine.names import clean_name
from fullshard.engine.ownership import nested_units
from fullshard.engine.parameter import managed_by
from fullshard.errors import FullshardError
from fullshard.policy import ShardingStrategy
from fullshard.state_dict_types import StateDictType
from fullshard.wrapper_state_initial import give_initial_state

__all__ = ["install"]

Function = Callable[..., Any]

# What is bound to others in torch's module.
REPLACED = (
    "FSDP",
    "_broadcast_state_dict",
    "_distribute_state_dict",
    "_get_fqns",
    "_get_model_state_dict",
    "_get_module_fsdp_state_if_fully_sharded_module",
    "_get_optim_state_dict",
    "_init_optim_state",
    "_iterate_valid_model_state",
    "_load_model_state_dict",
    "_load_optim_state_dict",
)

# What torch's functions are to take for a model's parameters and buffers while they load a state dict into it.
_entries_of: contextvars.ContextVar[tuple[nn.Module, list[tuple[str, Any]]] | None] = contextvars.ContextVar(
    "_entries_of", default=None
)
# Whether names are for the optimizer functions of wrappers: torch's take those of compiled modules, ours take users'.
_for_optimizers: contextvars.ContextVar[bool] = contextvars.ContextVar("_for_optimizers", default=False)


@functools.cache
def install() -> None:
    """See [Note: torch's state dict functions]. Does it once."""
    import torch.distributed.checkpoint.state_dict as functions

    from fullshard.wrapper_state import WrapperState  # which calls this

    module: Any = functions
    wrapper: Any = WrapperState
    missing = [name for name in REPLACED if not hasattr(module, name)]
    if missing:
        warnings.warn(
            f"torch {torch.__version__} has no {', '.join(missing)} in {module.__name__}, so its functions do not know "
            "models of fullshard; use fullshard.save and load, or the state dicts of the model itself",
            stacklevel=4,
        )
        return
    state_of, fqns_of = module._get_module_fsdp_state_if_fully_sharded_module, module._get_fqns
    initialize, iterate = module._init_optim_state, module._iterate_valid_model_state
    module.FSDP = _either(module.FSDP, wrapper)
    if hasattr(module, "HYBRID_SHARDING_STRATEGIES"):  # from torch 2.12 on
        hybrid = (strategy for strategy in ShardingStrategy if strategy.hybrid)
        module.HYBRID_SHARDING_STRATEGIES = [*module.HYBRID_SHARDING_STRATEGIES, *hybrid]
    module._get_module_fsdp_state_if_fully_sharded_module = lambda m: m if isinstance(m, wrapper) else state_of(m)
    module._get_fqns = functools.wraps(fqns_of)(functools.partial(_fqns, fqns_of))
    module._init_optim_state = lambda optim: give_initial_state(optim) if _is_ours(optim) else initialize(optim)
    module._iterate_valid_model_state = functools.partial(_entries, iterate)
    module._get_model_state_dict = functools.partial(_get_model, module._get_model_state_dict)
    module._load_model_state_dict = functools.partial(_load_model, module._load_model_state_dict, module, wrapper)
    module._distribute_state_dict = functools.partial(_keep_scalars, module._distribute_state_dict)
    module._broadcast_state_dict = functools.partial(_keep_scalars, module._broadcast_state_dict)
    module._get_optim_state_dict = functools.partial(_get_optim, module._get_optim_state_dict)
    module._load_optim_state_dict = functools.partial(_load_optim, module._load_optim_state_dict, module, wrapper)


# ---------------------------------------------------------------- classes


def _either(theirs: Any, ours: Any) -> Any:
    """What stands for torch's wrapper class and ours together."""

    class Either(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, (theirs, ours))

        def __getattr__(cls, name: str) -> Any:
            return getattr(theirs, name)

    class FullyShardedDataParallel(metaclass=Either):
        @staticmethod
        def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[nn.Module]:
            return [*theirs.fsdp_modules(module, root_only), *_wrappers(module, ours)]

        @staticmethod
        @contextlib.contextmanager
        def state_dict_type(
            module: nn.Module, state_dict_type: Any, state_dict_config: Any = None, optim_state_dict_config: Any = None
        ) -> Generator[None, None, None]:
            settings = (state_dict_type, state_dict_config, optim_state_dict_config)
            with contextlib.ExitStack() as stack:
                if theirs.fsdp_modules(module):
                    stack.enter_context(theirs.state_dict_type(module, *settings))
                stack.enter_context(ours.state_dict_type(module, *map(_as_ours, settings)))
                yield

        @staticmethod
        def optim_state_dict(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return chosen(model).optim_state_dict(model, *args, **kwargs)

        @staticmethod
        def optim_state_dict_to_load(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return chosen(model).optim_state_dict_to_load(model, *args, **kwargs)

    def chosen(model: nn.Module) -> Any:
        found = _wrappers(model, ours)
        return type(found[0]) if found else theirs

    return FullyShardedDataParallel


def _as_ours(value: Any) -> Any:
    """torch's :class:`StateDictType` and config values as ours of the same names."""
    if value is None:
        return None
    if type(value).__name__ == StateDictType.__name__:
        return StateDictType[value.name]
    options = {each.name: getattr(value, each.name) for each in fields(value)}
    return getattr(state_dict_types, type(value).__name__)(**options)


def _wrappers(module: nn.Module, kind: Any) -> list[nn.Module]:
    return [m for m in module.modules() if isinstance(m, kind)]


# ---------------------------------------------------------------- names


def _fqns(original: Function, model: nn.Module, name: str, *args: Any, **kwargs: Any) -> set[str]:
    """Names before wrapping of what is ``model``'s parameter ``name`` now. A flat parameter has several."""
    if _for_optimizers.get():
        kwargs["skip_compiler_prefix"] = True
    path, _, last = name.rpartition(".")
    if last.startswith("_flat_param"):
        module = model.get_submodule(path)
        flat = module._parameters.get(last)
        if isinstance(flat, FlatParameter):
            names = _names_in(module, flat)
            return {fqn for inside in names for fqn in _fqns(original, model, f"{path}.{inside}", *args, **kwargs)}
    # torch's does not look for wrappers inside of checkpoint wrappers.
    return {clean_name(fqn) for fqn in original(model, name, *args, **kwargs)}


def _names_in(module: nn.Module, flat: FlatParameter) -> list[str]:
    """Of each parameter in ``flat`` the first name below ``module``."""
    first = managed_by(flat)
    assert isinstance(first, FlatPiece) and first.home is not None, "a flat parameter without a unit"
    of = {(id(owner.module()), owner.name): i for i, p in enumerate(first.home.pieces) for owner in p.owners}
    names: dict[int, str] = {}
    for prefix, submodule in module.named_modules():
        for name in submodule._parameters:
            piece = of.get((id(submodule), name))
            if piece is not None:
                names.setdefault(piece, f"{prefix}.{name}" if prefix else name)
    return list(names.values())


def _entries(original: Function, model: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of what a state dict of ``model`` has."""
    given = _entries_of.get()
    yield from given[1] if given is not None and given[0] is model else original(model, *args, **kwargs)


@contextlib.contextmanager
def _taken_for(model: nn.Module, entries: Iterable[tuple[str, Any]]) -> Iterator[None]:
    token = _entries_of.set((model, list(entries)))
    try:
        yield
    finally:
        _entries_of.reset(token)


def _one_by_one(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """As torch's, with what is in flat parameters instead of these: it pairs names with and without the prefixes of
    other wrappers, and of several for one parameter it would not know which belongs to which.
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
    """Frozen parameters are left out under all their names, on ranks that have nothing anyway as well."""
    if not info.ignore_frozen_params or not nested_units(model):
        state: dict[str, Any] = original(model, info)
        return state
    state = original(model, replace(info, ignore_frozen_params=False))
    for fqn in _frozen(model):
        state.pop(fqn, None)
    return state


def _frozen(model: nn.Module) -> Iterator[str]:
    for parameter in local_parameters(model):
        if not parameter.parameter.requires_grad:
            yield from parameter.fqns


def _load_model(
    original: Function, module: Any, wrapper: Any, model: nn.Module, state_dict: dict[str, Any], info: Any
) -> Any:
    """Full state dicts: torch takes what a model holds for what is missing, and would make wrappers hold all of it."""
    if not info.handle_model or not nested_units(model):
        return original(model, state_dict, info)
    wrapped = bool(_wrappers(model, wrapper))
    rows = any(not isinstance(p, FlatPiece) for unit in nested_units(model) for p in unit.parameters)
    whole = info.full_state_dict or info.broadcast_from_rank0
    if wrapped and not info.broadcast_from_rank0 and not (whole and rows):
        with _taken_for(model, _one_by_one(model)):  # wrappers take full values as they are
            return original(model, state_dict, replace(info, full_state_dict=False))
    if whole and info.strict and not info.broadcast_from_rank0 and state_dict:
        _check_complete(module, model, state_dict, info)
    if not wrapped:
        return original(model, state_dict, info)
    with wrapper.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        template = model.state_dict()
    with _taken_for(model, template.items()):
        return original(model, state_dict, info)


def _check_complete(module: Any, model: nn.Module, state_dict: dict[str, Any], info: Any) -> None:
    modifiers = info.dsd_fqn_modifiers
    names = (name for name, _ in module._iterate_valid_model_state(model, modifiers))
    expected = {fqn: None for name in names for fqn in sorted(module._get_fqns(model, name, modifiers))}
    missing = [fqn for fqn in expected if fqn not in state_dict]
    if missing:
        raise FullshardError(
            f"set_model_state_dict: the full state dict has no {', '.join(missing[:5])}"
            f"{f' and {len(missing) - 5} more' if len(missing) > 5 else ''}; pass StateDictOptions(strict=False) to "
            "leave what is missing as it is"
        )


# ---------------------------------------------------------------- optimizers


def _is_ours(optimizer: torch.optim.Optimizer) -> bool:
    return any(managed_by(p) is not None for group in optimizer.param_groups for p in group["params"])


def _fresh(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    return [optimizer for optimizer in optimizers if not optimizer.state and _is_ours(optimizer)]


def _get_optim(
    original: Function, model: nn.Module, optimizers: tuple[torch.optim.Optimizer, ...], info: Any
) -> dict[str, Any]:
    """A fresh optimizer's state is there to be loaded into; the optimizer itself stays fresh."""
    fresh = _fresh(optimizers)
    try:
        state: dict[str, Any] = original(model, optimizers, info)
    finally:
        for optimizer in fresh:
            optimizer.state.clear()
    return state


def _load_optim(
    original: Function,
    module: Any,
    wrapper: Any,
    model: nn.Module,
    optimizers: tuple[torch.optim.Optimizer, ...],
    state_dict: dict[str, Any],
    info: Any,
) -> None:
    fresh, token = _fresh(optimizers), _for_optimizers.set(bool(_wrappers(model, wrapper)))
    try:
        if info.flatten_optimizer_state_dict and not info.fsdp_modules and any(map(_is_ours, optimizers)):
            # torch compares full flattened state with nested one, and fails
            for optimizer in optimizers:
                give_initial_state(optimizer)
                nested = module._unflatten_optim_state_dict(optimizer, state_dict, info) if state_dict else {}
                original(model, (optimizer,), nested, replace(info, flatten_optimizer_state_dict=False))
        else:
            original(model, optimizers, state_dict, info)
    except BaseException:
        for optimizer in fresh:
            optimizer.state.clear()
        raise
    finally:
        _for_optimizers.reset(token)


def _keep_scalars(original: Function, full: dict[str, Any], local: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    """torch makes plain tensors of all 0-D ones; those of 0-D parameters, which are DTensors, go on as such."""
    scalars = {key: value for key, value in local.items() if isinstance(value, DTensor) and not value.dim()}
    original(full, local, *args, **kwargs)
    for key, old in scalars.items():
        new = local.get(key)
        if isinstance(new, torch.Tensor) and not isinstance(new, DTensor):
            new = new.to(old._local_tensor.device)
            local[key] = distribute_tensor(new, old.device_mesh, old.placements, src_data_rank=None)
