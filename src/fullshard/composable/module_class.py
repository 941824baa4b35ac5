"""The class that a sharded module gets: ``FSDPLinear`` of ``Linear``, with the methods that run as its forward does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

from torch import nn

from fullshard.composable.fsdp_module import FSDPModule
from fullshard.frontend.sharded_module import run_unsharded

__all__ = ["register_fsdp_forward_method", "set_class", "sharded_class"]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Treat a method such as ``generate`` as a forward: unshard before it and reshard after it.

    Args:
        module: Module that ``fully_shard`` was called on. No-op for any other module.
        method_name: Name of a method of its class.

    Raises:
        TypeError: If ``module`` is not an ``nn.Module``.
        ValueError: If the class has no such method.

    Example:
        ```python
        import torch
        from torch import nn

        from fullshard import fully_shard, register_fsdp_forward_method


        class Encoder(nn.Linear):
            def encode(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x).relu()


        encoder = fully_shard(Encoder(8, 8))
        register_fsdp_forward_method(encoder, "encode")
        encoder.encode(torch.randn(2, 8)).sum().backward()
        ```
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"register_fsdp_forward_method: expected an nn.Module, found {type(module).__name__}")
    if not isinstance(module, FSDPModule):
        return
    if not isinstance(method_name, str) or not callable(getattr(type(module), method_name, None)):
        raise ValueError(
            "register_fsdp_forward_method: expected the name of a method of "
            f"{type(module)._fullshard_class[0].__name__}, found {method_name!r}"
        )
    # On a class, not on the instance: a bound method in the instance would be a reference cycle, and a deepcopy
    # would run the original's.
    plain, methods, base = type(module)._fullshard_class
    set_class(module, sharded_class(plain, methods | {method_name}, base))


def set_class(module: nn.Module, sharded: type[FSDPModule]) -> None:
    """Change the class of ``module``, also if it forwards ``__setattr__`` (as results of torch.compile do)."""
    object.__setattr__(module, "__class__", sharded)


_ClassKey = tuple[type[nn.Module], frozenset[str], type[FSDPModule]]
_sharded_classes: dict[_ClassKey, type[FSDPModule]] = {}


def sharded_class(
    plain: type[nn.Module], methods: frozenset[str] = frozenset(), base: type[FSDPModule] = FSDPModule
) -> type[FSDPModule]:
    """Return the class ``FSDP<plain>`` whose ``methods`` run with unsharded parameters. Cached by all arguments."""
    key: _ClassKey = (plain, methods, base)
    known = _sharded_classes.get(key)
    if known is not None:
        return known
    namespace: dict[str, Any] = {"__module__": plain.__module__, "__doc__": plain.__doc__}
    for name in methods:
        namespace[name] = _as_forward(getattr(plain, name))
    namespace["_fullshard_class"] = key
    made = cast("type[FSDPModule]", type(f"{base._fullshard_prefix}{plain.__name__}", (base, plain), namespace))
    _sharded_classes[key] = made
    return made


def _as_forward(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self: FSDPModule, *args: Any, **kwargs: Any) -> Any:
        return run_unsharded(self, functools.partial(method, self), args, kwargs)

    return run
