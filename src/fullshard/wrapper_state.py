"""State dicts of wrappers: full parameters under the names that the model had before, and buffers as they were."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fullshard.engine.full_copies import FullCopies
from fullshard.engine.names import CHECKPOINTED, WRAPPED, clean_name
from fullshard.engine.ownership import managed_modules
from fullshard.engine.parameter import managed_by
from fullshard.errors import FullshardError
from fullshard.memory import own_storage
from fullshard.sharded_module import unit_at

__all__ = ["WrapperState"]


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
    _loading: FullCopies | None  # while a state dict is being loaded
    _messages: list[str]  # where that one collects errors
    _options: Any

    @property
    def _managed(self) -> list[nn.Module]:
        """Modules of this wrapper and no other."""
        return [m for _, m in managed_modules([self]) if m is not self and m not in self._ignored_modules]

    def _prepare_state(self) -> None:
        self._buffer_dtypes = self._loading = None
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

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of ``nn.Module`` before wrapping: names, full parameters, buffers in their own dtypes. All ranks call it.

        Gathered unit by unit; every value has memory of its own.
        """
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        copies = FullCopies(unit_at(self))
        keep_vars = kwargs.get("keep_vars", args[2] if len(args) > 2 else False)
        buffers = [(m, name, b) for m in self._managed for name, b in m._buffers.items() if b is not None]
        try:
            for parameter in copies.parameters.values():
                if not keep_vars:
                    parameter.data = _own(parameter.data)
            for module, name, buffer in buffers:
                dtype = (self._buffer_dtypes or {}).get((module, name), buffer.dtype)
                module._buffers[name] = buffer.to(dtype, copy=not keep_vars)
            state = super().state_dict(*args, **kwargs)
        finally:
            for module, name, buffer in buffers:
                module._buffers[name] = buffer
            copies.keep_memory()
            copies.close(writeback=False)
        _rename(state, f"{prefix}{WRAPPED}.", prefix)
        metadata = getattr(state, "_metadata", None)
        if metadata is not None:
            own = metadata.pop(f"{prefix}{WRAPPED}", None)
            if own is not None:  # else the module saves itself in a way of its own
                metadata[prefix.removesuffix(".")] = own
            _rename(metadata, f"{prefix}{WRAPPED}.", prefix)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As of ``nn.Module`` before wrapping. All ranks call it, with the same full values."""
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
        if self._loading is not None:  # an earlier load raised
            self._close_load(writeback=False)
        self._loading = FullCopies(unit_at(self))
        self._messages = args[-1] if args else kwargs["error_msgs"]
        _rename(state_dict, prefix, f"{prefix}{WRAPPED}.")
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


def _own(value: torch.Tensor) -> torch.Tensor:
    return own_storage(value) if type(value) is torch.Tensor else value


def _rename(state: Any, old: str, new: str) -> None:
    """Replace the prefix of all keys that have it, in place and in order."""
    if not isinstance(state, (dict, OrderedDict)):
        return
    for key in [key for key in state if key.startswith(old)]:
        state[new + key.removeprefix(old)] = state.pop(key)
