"""Wrap modules while a model is being built: modules marked with ``wrap`` inside an ``enable_wrap`` block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from torch import nn

__all__ = ["enable_wrap", "wrap"]


# Per thread or task: models may be built concurrently.
_active: ContextVar[partial[nn.Module] | None] = ContextVar("fullshard_enable_wrap", default=None)


@contextmanager
def enable_wrap(*, wrapper_cls: Callable[..., nn.Module], **wrapper_kwargs: Any) -> Iterator[None]:
    """Make ``wrap`` wrap modules inside a ``with`` block.

    Layers can be sharded one by one while the model is being built, so that the full model never exists.

    Args:
        wrapper_cls: Called as ``wrapper_cls(module, **kwargs)``: a class, or a function that returns a module.
        **wrapper_kwargs: Arguments for every call.

    Yields:
        None.

    Raises:
        TypeError: If ``wrapper_cls`` is not callable.
        NotImplementedError: Inside another ``enable_wrap`` block.

    Example:
        ```python
        import torch
        from torch import nn

        from fullshard import fully_shard
        from fullshard.wrap import enable_wrap, wrap

        with enable_wrap(wrapper_cls=fully_shard, reshard_after_forward=True):
            layers = [wrap(nn.Linear(8, 8)) for _ in range(4)]
        model = fully_shard(nn.Sequential(*layers))
        model(torch.randn(2, 8))
        ```
    """
    if not callable(wrapper_cls):
        raise TypeError(f"enable_wrap: wrapper_cls: expected a class or function, found {wrapper_cls!r}")
    if _active.get() is not None:
        raise NotImplementedError("enable_wrap: enable_wrap blocks cannot be nested")
    token = _active.set(partial(wrapper_cls, **wrapper_kwargs))
    try:
        yield
    finally:
        _active.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wrap ``module`` with the arguments of the enclosing ``enable_wrap`` block; outside of one, return ``module``.

    Args:
        module: Module to wrap.
        **wrap_overrides: Arguments that override those of the block.

    Returns:
        The result of ``wrapper_cls``, or ``module`` itself outside of an ``enable_wrap`` block.
    """
    active = _active.get()
    return module if active is None else active(module, **wrap_overrides)
