"""``enable_wrap`` and ``wrap``."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from torch import nn

from fullshard.wrap import enable_wrap, wrap


class Wrapper(nn.Module):
    """Keeps what it was made with."""

    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        super().__init__()
        self.module, self.kwargs = module, kwargs


def test_wraps_inside_only() -> None:
    """Inside the block modules are wrapped, with overrides; outside they are returned as they are."""
    layer = nn.Linear(1, 1)
    assert wrap(layer, a=1) is layer
    with enable_wrap(wrapper_cls=Wrapper, a=1, b=2):
        wrapped, changed = wrap(layer), wrap(layer, b=3, c=4)
    assert type(wrapped) is Wrapper and wrapped.module is layer and wrapped.kwargs == {"a": 1, "b": 2}
    assert changed.kwargs == {"a": 1, "b": 3, "c": 4}
    assert wrap(layer) is layer


def test_errors() -> None:
    """A block inside a block, and what cannot be called, are refused; the outer block goes on.

    After an exception inside, nothing is wrapped any more.
    """
    layer = nn.Linear(1, 1)
    with enable_wrap(wrapper_cls=Wrapper, a=1):
        with pytest.raises(NotImplementedError, match="enable_wrap"):
            with enable_wrap(wrapper_cls=Wrapper):
                pass
        assert wrap(layer).kwargs == {"a": 1}
    with pytest.raises(TypeError, match="wrapper_cls"):
        with enable_wrap(wrapper_cls=None):  # type: ignore[arg-type]
            pass
    with pytest.raises(KeyError):
        with enable_wrap(wrapper_cls=Wrapper):
            raise KeyError
    assert wrap(layer) is layer
    with enable_wrap(wrapper_cls=lambda module: module):
        assert wrap(layer) is layer


def test_other_threads() -> None:
    """A model that another thread builds meanwhile is left alone."""
    layer, found = nn.Linear(1, 1), []
    with enable_wrap(wrapper_cls=Wrapper):
        thread = threading.Thread(target=lambda: found.append(wrap(layer)))
        thread.start()
        thread.join()
    assert found == [layer]
