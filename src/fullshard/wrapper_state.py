"""State dicts of wrappers: parameters under the names that the model had before, and buffers as they were."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fullshard.engine.names import CHECKPOINTED, WRAPPED, clean_name
from fullshard.engine.ownership import managed_modules
from fullshard.engine.parameter import managed_by
from fullshard.errors import FullshardError
from fullshard.sharded_module import unit_at
from fullshard.state_dict_types import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from fullshard.torch_state_dict import install
from fullshard.wrapper_state_loading import Loading, open_slices, open_whole
from fullshard.wrapper_state_saving import SavedForm, holding, owned_names, visible_slices

__all__ = ["WrapperState"]

CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


class _Metadata(dict[str, Any]):
    """Versions of modules, found also by the names that they have inside of wrappers."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        super().__init__((clean_name(key), value) for key, value in metadata.items())  # the innermost comes last

    def get(self, key: str, default: Any = None) -> Any:
        return super().get(clean_name(key), default)


class WrapperState(nn.Module):
    """What of a wrapper is saved and loaded: see the module docstring."""

    _buffer_dtypes: dict[tuple[nn.Module, str], torch.dtype] | None  # before they were cast; None: not cast yet
    _ignored_modules: set[nn.Module]
    _loading: Loading | None  # while a state dict is being loaded
    _messages: list[str]  # where that one collects errors
    _options: Any
    _state_settings: StateDictSettings

    @property
    def _managed(self) -> list[nn.Module]:
        """Modules of this wrapper and no other."""
        return [m for _, m in managed_modules([self]) if m is not self and m not in self._ignored_modules]

    def _prepare_state(self) -> None:
        install()
        self._buffer_dtypes = self._loading = None
        self._state_settings = StateDictSettings()
        self.register_load_state_dict_post_hook(WrapperState._end_load)  # type: ignore[no-untyped-call]

    def _settle_state(self) -> None:
        """Before a forward: buffers in the dtype that the user wants."""
        if self._loading is not None:
            self._close_load(writeback=False)
        if self._buffer_dtypes is not None:
            return
        _refuse_ddp(self)
        self._buffer_dtypes = {}
        precision = self._options.precision
        dtype = None if precision is None else precision.buffer_dtype
        if dtype is None:
            return
        for module in self._managed:
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    # In place, once: modules, and users, may share a buffer.
                    original = buffer.__dict__.setdefault("_fullshard_dtype", buffer.dtype)
                    self._buffer_dtypes[module, name] = original
                    buffer.data = buffer.to(dtype)

    # ---------------------------------------------------------------- in which form

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Say in which form the wrappers in ``module`` are saved and loaded from now on.

        Args:
            module: The wrappers in it, itself included, are meant. There may be none.
            state_dict_type: What values are: see :class:`StateDictType`.
            state_dict_config: Of the class that goes with the type. None: its defaults.
            optim_state_dict_config: The same for optimizer state.

        Returns:
            The settings before.

        Raises:
            TypeError: If ``state_dict_type`` is no :class:`StateDictType`.
            FullshardError: If a config is of a class that goes with another type, or wrappers had different settings.
                Nothing is changed then.
        """
        settings = _settings(state_dict_type, state_dict_config, optim_state_dict_config)
        before = WrapperState.get_state_dict_type(module)
        for _, wrapper in _wrappers(module):
            wrapper._state_settings = settings
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """In which form the wrappers in ``module`` are saved and loaded; if there are none: whole, as plain modules.

        Raises:
            FullshardError: If they have different settings.
        """
        found: list[tuple[StateDictSettings, list[str]]] = []
        for name, wrapper in _wrappers(module):
            of_equals = next((names for settings, names in found if settings == wrapper._state_settings), None)
            if of_equals is None:
                found.append((wrapper._state_settings, of_equals := []))
            of_equals.append(name or "<root>")
        if len(found) > 1:
            described = "; ".join(f"{settings} in {', '.join(names)}" for settings, names in found)
            raise FullshardError(
                f"expected the same state dict settings in all wrappers, found {described}; call "
                "set_state_dict_type on each of these modules first, or use state_dict_type, which sets them back"
            )
        return found[0][0] if found else StateDictSettings()

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Generator[None, None, None]:
        """:meth:`set_state_dict_type` for a ``with`` block. Afterwards each wrapper has its own settings again."""
        settings = _settings(state_dict_type, state_dict_config, optim_state_dict_config)
        before = [(wrapper, wrapper._state_settings) for _, wrapper in _wrappers(module)]
        try:
            for wrapper, _ in before:
                wrapper._state_settings = settings
            yield
        finally:
            for wrapper, old in before:
                wrapper._state_settings = old

    # ---------------------------------------------------------------- out

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of ``nn.Module`` before wrapping: names, buffers in their own dtypes. All ranks call it.

        What values are is set by :meth:`set_state_dict_type`: full parameters (the default), gathered unit by unit;
        this rank's rows of them in DTensors, as of ``fully_shard``; or the live flat parameters. Without sharding
        (``NO_SHARD``) they are full ones always. But for live ones, every value has memory of its own.

        Raises:
            FullshardError: If flat parameters are wanted, and there are none (``use_orig_params=True``).
            PhaseError: In the middle of a step, or where full parameters are summoned.
        """
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        keep_vars = kwargs.get("keep_vars", args[2] if len(args) > 2 else False)
        unit = unit_at(self)
        form = self._form()
        if self._loading is not None:  # an earlier load raised
            self._close_load(writeback=False)
        grad = torch.is_grad_enabled()
        with (
            torch.inference_mode(False),  # DTensors refuse to be detached in it; and it switches grad on
            torch.set_grad_enabled(grad),
            holding(unit, form, keep_vars=keep_vars),
            self._buffers_as_saved(form, keep_vars=keep_vars),
        ):
            state = super().state_dict(*args, **kwargs)
        _rename(state, f"{prefix}{WRAPPED}.", prefix)
        if form.kind is StateDictType.LOCAL_STATE_DICT:
            for each in visible_slices(unit):
                state[prefix + each.home.name] = each.saved(offload=form.offload)
        if not form.saves:
            for name in self._saved_names():
                state.pop(prefix + name, None)
        metadata = getattr(state, "_metadata", None)
        if metadata is not None:
            own = metadata.pop(f"{prefix}{WRAPPED}", None)
            if own is not None:  # else the module saves itself in a way of its own
                metadata[prefix.removesuffix(".")] = own
            _rename(metadata, f"{prefix}{WRAPPED}.", prefix)
        return state

    def _form(self) -> SavedForm:
        unit = unit_at(self)
        form = SavedForm.of(unit, self._state_settings)
        if form.kind is StateDictType.LOCAL_STATE_DICT and unit.parameters and self._options.use_orig_params:
            raise FullshardError(
                f"LOCAL_STATE_DICT is about flat parameters, but unit {unit.name or '<root>'!r} has "
                "use_orig_params=True; use SHARDED_STATE_DICT, or wrap with use_orig_params=False"
            )
        return form

    @contextlib.contextmanager
    def _buffers_as_saved(self, form: SavedForm, *, keep_vars: bool) -> Iterator[None]:
        buffers = [(m, name, b) for m in self._managed for name, b in m._buffers.items() if b is not None]
        live = keep_vars or form.kind is StateDictType.LOCAL_STATE_DICT or not form.saves
        try:
            for module, name, buffer in buffers:
                dtype = (self._buffer_dtypes or {}).get((module, name), buffer.dtype)
                device = torch.device("cpu") if form.offload else buffer.device
                module._buffers[name] = buffer.to(device, dtype, copy=not live)
            yield
        finally:
            for module, name, buffer in buffers:
                module._buffers[name] = buffer

    def _saved_names(self) -> Iterator[str]:
        """Of what this wrapper, and no other, puts into a state dict."""
        unit = unit_at(self)
        yield from (name for name, _ in owned_names(self, unit))
        yield from (each.home.name for each in visible_slices(unit))
        managed = set(self._managed)
        for prefix, module in self.named_modules(remove_duplicate=False):
            if module in managed:
                yield from (clean_name(f"{prefix}.{name}") for name in module._buffers)

    # ---------------------------------------------------------------- in

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As of ``nn.Module`` before wrapping. All ranks call it, with the same values.

        Whatever :meth:`set_state_dict_type` says, values may be full, or DTensors of any mesh, as a wrapper or
        ``fully_shard`` saves them. Only flat parameters need ``LOCAL_STATE_DICT``, and the same wrapping.

        Raises:
            RuntimeError: As of ``nn.Module``.
            FullshardError: If a key is there on some ranks only, or with values of different kinds.
        """
        metadata = getattr(state_dict, "_metadata", None)
        if metadata is not None:
            state_dict = OrderedDict(state_dict)
            state_dict._metadata = _Metadata(metadata)  # type: ignore[attr-defined]
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except BaseException:
            for module in self.modules():
                if isinstance(module, WrapperState):
                    module._close_load(writeback=False)
            raise

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        form = self._form()
        if self._loading is not None:  # an earlier load raised
            self._close_load(writeback=False)
        self._messages = args[-1] if args else kwargs["error_msgs"]
        _rename(state_dict, prefix, f"{prefix}{WRAPPED}.")
        if form.kind is StateDictType.LOCAL_STATE_DICT:
            self._loading = open_slices(unit_at(self), state_dict, prefix)
        else:
            self._loading = open_whole(self, unit_at(self), state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _end_load(self, incompatible: Any) -> None:
        for names in incompatible:
            names[:] = [clean_name(name) for name in names]
        self._messages[:] = [
            message.replace(f"{WRAPPED}.", "").replace(f"{CHECKPOINTED}.", "") for message in self._messages
        ]
        self._close_load(writeback=True)

    def _close_load(self, *, writeback: bool) -> None:
        loading, self._loading = self._loading, None
        if loading is not None:
            loading.close(writeback=writeback)


def _refuse_ddp(module: nn.Module) -> None:
    """Raise FullshardError if a DistributedDataParallel that is running now has taken the sharded parameters for its
    own: it would add up pieces of different parameters.
    """
    ddp = DistributedDataParallel._active_ddp_module
    if ddp is None:
        return
    taken = {id(parameter) for parameter in ddp._module_parameters}
    named = module.named_parameters()
    names = [clean_name(name) for name, p in named if id(p) in taken and managed_by(p) is not None]
    if names:
        raise FullshardError(
            f"{names[0]} (and {len(names) - 1} more) are sharded, but DistributedDataParallel reduces them as well, "
            "and has overwritten them; tell it to leave them alone: before DistributedDataParallel(model), call "
            "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)"
        )


def _wrappers(module: nn.Module) -> list[tuple[str, WrapperState]]:
    """The wrappers in ``module``, with their names."""
    return [(clean_name(name), m) for name, m in module.named_modules() if isinstance(m, WrapperState)]


def _settings(
    kind: StateDictType, config: StateDictConfig | None, optim_config: OptimStateDictConfig | None
) -> StateDictSettings:
    if not isinstance(kind, StateDictType):
        raise TypeError(f"state_dict_type: expected a fullshard.StateDictType, found {kind!r}")
    made: list[Any] = []
    for name, given, expected in (
        ("state_dict_config", config, CONFIGS[kind][0]),
        ("optim_state_dict_config", optim_config, CONFIGS[kind][1]),
    ):
        if given is not None and type(given) is not expected:
            raise FullshardError(
                f"{name}: expected a {expected.__name__} for {kind.name}, found a {type(given).__name__}"
            )
        made.append(expected() if given is None else replace(given))  # what is assigned to it later is not meant
    return StateDictSettings(kind, *made)


def _rename(state: Any, old: str, new: str) -> None:
    """Replace the prefix of all keys that have it, in place and in order."""
    if not isinstance(state, (dict, OrderedDict)):
        return
    for key in [key for key in state if key.startswith(old)]:
        state[new + key.removeprefix(old)] = state.pop(key)
