"""State dicts of wrappers: parameters under their FQNs before wrapping, and buffers in their original dtypes."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fullshard.checkpoint.state.types import (
    CONFIGS,
    OptimStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from fullshard.engine.ownership import Subtree
from fullshard.engine.parameters.names import CHECKPOINTED, WRAPPED, clean_name
from fullshard.engine.parameters.sharded import managed_by
from fullshard.errors import FullshardError
from fullshard.frontend.sharded_module import unit_at
from fullshard.wrapper.state_dict.registered import (
    EndLoad,
    SaveFormat,
    load_into_full,
    load_into_slices,
    owned_names,
    registered_for_saving,
    visible_handles,
)

__all__ = ["WrapperState"]


class WrapperState(nn.Module):
    """State dict methods of ``FullyShardedDataParallel``, and the settings that control them."""

    _buffer_dtypes: dict[tuple[nn.Module, str], torch.dtype] | None  # dtypes before the cast; None: not cast yet
    _ignored_modules: set[nn.Module]
    _load: EndLoad | None  # while a state dict is being loaded
    _messages: list[str]  # its error messages
    _options: Any
    _state_settings: StateDictSettings

    @property
    def _managed(self) -> list[nn.Module]:
        """Modules of this wrapper and of no nested one."""
        return self._managed_in(Subtree.of([self]))

    def _managed_in(self, subtree: Subtree) -> list[nn.Module]:
        return [m for _, m in subtree.managed if m is not self and m not in self._ignored_modules]

    def _prepare_state(self) -> None:
        vars(self).update(_buffer_dtypes=None, _load=None, _state_settings=StateDictSettings())
        self.register_load_state_dict_post_hook(WrapperState._end_load)  # type: ignore[no-untyped-call]

    def _cast_buffers(self) -> None:
        """Cast buffers to the dtype of the mixed precision before the first forward."""
        self._close_load(writeback=False)
        if self._buffer_dtypes is not None:
            return
        _check_ddp(self)
        self._buffer_dtypes = {}
        precision = self._options.precision
        dtype = None if precision is None else precision.buffer_dtype
        if dtype is None:
            return
        for module in self._managed:
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    # In place, once: modules and users may share a buffer.
                    original = buffer.__dict__.setdefault("_fullshard_dtype", buffer.dtype)
                    self._buffer_dtypes[module, name] = original
                    buffer.data = buffer.to(dtype)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Refuse the functions of ``torch.distributed.checkpoint.state_dict``, all of which call this before anything
        else. Where they know wrappers, they get another answer: see [Note: torch's state dict functions].
        """
        raise FullshardError(
            "the functions of torch.distributed.checkpoint.state_dict would treat this rank's 1-D shards of parameters "
            "of fullshard.FullyShardedDataParallel as full parameters; call "
            "fullshard.dropin.enable_torch_state_dict_functions() before them (it patches torch's module for the whole "
            "process, and can be undone), or use fullshard.save and fullshard.load, or the wrapper's own state_dict, "
            "load_state_dict, optim_state_dict and optim_state_dict_to_load"
        )

    # ---------------------------------------------------------------- settings

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Set the state dict type and configs of all wrappers in ``module``.

        Args:
            module: Module whose wrappers are set, including itself. It may contain none.
            state_dict_type: Type of the values in state dicts.
            state_dict_config: Config for parameters and buffers, of the class that matches the type. None: its
                defaults.
            optim_state_dict_config: Config for optimizer state, of the class that matches the type. None: its defaults.

        Returns:
            The previous settings.

        Raises:
            TypeError: If ``state_dict_type`` is not a ``StateDictType``.
            FullshardError: If a config does not match the type, or the wrappers had different settings. Nothing is
                changed then.
        """
        settings = _settings(state_dict_type, state_dict_config, optim_state_dict_config)
        before = WrapperState.get_state_dict_type(module)
        for _, wrapper in _wrappers(module):
            wrapper._state_settings = settings
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """Return the state dict settings of the wrappers in ``module``.

        Args:
            module: Module that contains the wrappers, or a wrapper.

        Returns:
            The settings; the defaults if there are no wrappers.

        Raises:
            FullshardError: If the wrappers have different settings.
        """
        found: list[tuple[StateDictSettings, list[str]]] = []
        for name, wrapper in _wrappers(module):
            same_names = next((names for settings, names in found if settings == wrapper._state_settings), None)
            if same_names is None:
                found.append((wrapper._state_settings, same_names := []))
            same_names.append(name or "<root>")
        if len(found) > 1:
            described = "; ".join(f"{settings} in {', '.join(names)}" for settings, names in found)
            raise FullshardError(
                f"expected the same state dict settings in all wrappers, found {described}; call "
                "set_state_dict_type on each of these modules first, or use state_dict_type, which restores them"
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
        """Set the state dict type inside the ``with`` block, and restore each wrapper's settings afterwards.

        Args:
            module: As for ``set_state_dict_type``.
            state_dict_type: As for ``set_state_dict_type``.
            state_dict_config: As for ``set_state_dict_type``.
            optim_state_dict_config: As for ``set_state_dict_type``.

        Yields:
            None.

        Raises:
            TypeError: If ``state_dict_type`` is not a ``StateDictType``.
            FullshardError: If a config does not match the type.

        Example:
            ```python
            from torch import nn
            from fullshard import FullStateDictConfig, StateDictType
            from fullshard import FullyShardedDataParallel as FSDP

            model = FSDP(nn.Linear(16, 16))
            config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
            with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
                state = model.state_dict()  # full tensors in CPU memory on rank 0, empty on the other ranks
            ```
        """
        settings = _settings(state_dict_type, state_dict_config, optim_state_dict_config)
        before = [(wrapper, wrapper._state_settings) for _, wrapper in _wrappers(module)]
        try:
            for wrapper, _ in before:
                wrapper._state_settings = settings
            yield
        finally:
            for wrapper, old in before:
                wrapper._state_settings = old

    # ---------------------------------------------------------------- saving

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict with the keys that the module had before wrapping. All ranks call it.

        The type set by ``set_state_dict_type`` determines the values. ``FULL_STATE_DICT`` (default): full tensors,
        all-gathered unit by unit. ``SHARDED_STATE_DICT``: this rank's shards as DTensors, like those of
        ``fully_shard``. ``LOCAL_STATE_DICT``: this rank's slices of the flat parameters, not copied. With ``NO_SHARD``,
        values are always full tensors. Values do not share memory with the model, except those of ``LOCAL_STATE_DICT``
        or with ``keep_vars=True``.

        Args:
            *args: Positional arguments of ``nn.Module.state_dict``.
            **kwargs: Keyword arguments of ``nn.Module.state_dict``.

        Returns:
            The state dict.

        Raises:
            FullshardError: For ``LOCAL_STATE_DICT`` with ``use_orig_params=True``.
            PhaseError: In the middle of a step, or inside ``summon_full_params``.
        """
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        keep_vars = kwargs.get("keep_vars", args[2] if len(args) > 2 else False)
        unit = unit_at(self)
        save_format = self._save_format()
        self._close_load(writeback=False)  # of an earlier load that raised
        grad = torch.is_grad_enabled()
        with (
            torch.inference_mode(False),  # DTensors cannot be detached in it; and it enables grad
            torch.set_grad_enabled(grad),
            registered_for_saving(unit, save_format, keep_vars=keep_vars),
            self._saved_buffers(save_format, keep_vars=keep_vars),
        ):
            state = super().state_dict(*args, **kwargs)
        _rename(state, f"{prefix}{WRAPPED}.", prefix)
        if save_format.kind is StateDictType.LOCAL_STATE_DICT:
            for handle in visible_handles(unit):
                device = torch.device("cpu") if save_format.offload else handle.flat.device
                state[prefix + handle.name] = handle.as_dtensor(device)
        if not save_format.saves:
            for name in self._saved_names():
                state.pop(prefix + name, None)
        metadata = getattr(state, "_metadata", None)
        if metadata is not None:
            own = metadata.pop(f"{prefix}{WRAPPED}", None)
            if own is not None:  # absent if the module customizes its state dict
                metadata[prefix.removesuffix(".")] = own
            _rename(metadata, f"{prefix}{WRAPPED}.", prefix)
        return state

    def _save_format(self) -> SaveFormat:
        unit = unit_at(self)
        mesh, config = unit.mesh, self._state_settings.state_dict_config
        kind = StateDictType.FULL_STATE_DICT if mesh.shard is None else self._state_settings.state_dict_type
        if kind is StateDictType.LOCAL_STATE_DICT and unit.parameters and self._options.use_orig_params:
            raise FullshardError(
                f"LOCAL_STATE_DICT requires flat parameters, but unit {unit.name or '<root>'!r} has "
                "use_orig_params=True; use SHARDED_STATE_DICT, or wrap with use_orig_params=False"
            )
        first = mesh.rank == 0 and (mesh.replicate is None or mesh.replicate.get_local_rank() == 0)
        return SaveFormat(kind, config.offload_to_cpu, saves=first or not getattr(config, "rank0_only", False))

    @contextlib.contextmanager
    def _saved_buffers(self, save_format: SaveFormat, *, keep_vars: bool) -> Iterator[None]:
        buffers = [(m, name, b) for m in self._managed for name, b in m._buffers.items() if b is not None]
        live = keep_vars or save_format.kind is StateDictType.LOCAL_STATE_DICT or not save_format.saves
        try:
            for module, name, buffer in buffers:
                dtype = (self._buffer_dtypes or {}).get((module, name), buffer.dtype)
                device = torch.device("cpu") if save_format.offload else buffer.device
                module._buffers[name] = buffer.to(device, dtype, copy=not live)
            yield
        finally:
            for module, name, buffer in buffers:
                module._buffers[name] = buffer

    def _saved_names(self) -> Iterator[str]:
        """Yield the keys that this wrapper, and no nested one, has in a state dict."""
        unit = unit_at(self)
        yield from (name for name, _ in owned_names(self, unit))
        yield from (handle.name for handle in visible_handles(unit))
        managed = set(self._managed)
        for prefix, module in self.named_modules(remove_duplicate=False):
            if module in managed:
                yield from (clean_name(f"{prefix}.{name}") for name in module._buffers)

    # ---------------------------------------------------------------- loading

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict with the keys that the module had before wrapping. All ranks call it, with the same values.

        With any state dict type, values may be full tensors, or DTensors on any mesh, as saved by a wrapper or
        ``fully_shard``. Only the flat parameters of a ``LOCAL_STATE_DICT`` require that type, and the same wrapping.

        Args:
            state_dict: Values by FQN.
            strict: Raise if keys are missing or unexpected.
            assign: As in ``nn.Module.load_state_dict``.

        Returns:
            Missing and unexpected keys, as ``nn.Module.load_state_dict`` returns them.

        Raises:
            RuntimeError: As in ``nn.Module.load_state_dict``.
            FullshardError: If a key is missing on some ranks, or has values of different kinds.
        """
        metadata = getattr(state_dict, "_metadata", None)
        if metadata is not None:
            state_dict = OrderedDict(state_dict)
            versions = {clean_name(key): value for key, value in metadata.items()}  # the innermost module comes last
            names = (name for name, _ in self.named_modules(remove_duplicate=False))
            found = {name: versions[clean_name(name)] for name in names if clean_name(name) in versions}
            state_dict._metadata = found  # type: ignore[attr-defined]
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except BaseException:
            for module in self.modules():
                if isinstance(module, WrapperState):
                    module._close_load(writeback=False)
            raise

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        save_format = self._save_format()
        self._close_load(writeback=False)  # of an earlier load that raised
        self._messages = args[-1] if args else kwargs["error_msgs"]
        _rename(state_dict, prefix, f"{prefix}{WRAPPED}.")
        if save_format.kind is StateDictType.LOCAL_STATE_DICT:
            self._load = load_into_slices(unit_at(self), state_dict, prefix)
        else:
            self._load = load_into_full(self, unit_at(self), state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _end_load(self, incompatible: Any) -> None:
        for names in incompatible:
            names[:] = [clean_name(name) for name in names]
        self._messages[:] = [
            message.replace(f"{WRAPPED}.", "").replace(f"{CHECKPOINTED}.", "") for message in self._messages
        ]
        self._close_load(writeback=True)

    def _close_load(self, *, writeback: bool) -> None:
        end, self._load = self._load, None
        if end is not None:
            end(writeback=writeback)


def _check_ddp(module: nn.Module) -> None:
    """Raise FullshardError if a running DistributedDataParallel has registered the sharded parameters: it would
    all-reduce shards of different parameters.
    """
    ddp = DistributedDataParallel._active_ddp_module
    if ddp is None:
        return
    taken = {id(parameter) for parameter in ddp._module_parameters}
    named = module.named_parameters()
    names = [clean_name(name) for name, p in named if id(p) in taken and managed_by(p) is not None]
    if names:
        raise FullshardError(
            f"{names[0]} (and {len(names) - 1} more) are sharded, but DistributedDataParallel also reduces them, and "
            "has overwritten them; make it ignore them: before DistributedDataParallel(model), call "
            "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)"
        )


def _wrappers(module: nn.Module) -> list[tuple[str, WrapperState]]:
    """Return the wrappers in ``module`` with their names."""
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
        made.append(expected() if given is None else replace(given))  # a copy: later assignments have no effect
    return StateDictSettings(kind, *made)


def _rename(state: Any, old: str, new: str) -> None:
    """Replace the prefix of all keys that have it, in place and in order."""
    if not isinstance(state, (dict, OrderedDict)):
        return
    for key in [key for key in state if key.startswith(old)]:
        state[new + key.removeprefix(old)] = state.pop(key)
