"""Hooks that raise, to make a forward or a backward fail."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn


class _RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> NoReturn:
        raise ZeroDivisionError("in backward")


def fail(*_: Any) -> NoReturn:
    """Raise: as a hook of any kind, or in the place of any function."""
    raise ZeroDivisionError("in forward")


def fail_in_backward(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
    """Forward hook after which the backward of ``output`` raises."""
    return _RaiseInBackward.apply(output)
