"""Hooks that raise, to make a forward or a backward fail, and memory that runs out."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.comm import base


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


class OutOfMemoryAt(TorchDispatchMode):
    """Within it, memory runs out at one place: where a tensor is allocated, a storage refilled, or a launch begins.

    Args:
        place: Counted from 0; -1: nowhere, to count the places.
        launches: Places count from the end of so many launches on: which allocations come before differs by rank.
    """

    def __init__(self, place: int = -1, launches: int = 0) -> None:
        super().__init__()
        self.place, self.places, self.launches = place, 0, launches
        self._patch = pytest.MonkeyPatch()

    def _pass(self) -> None:
        if self.launches > 0:
            return
        self.places += 1
        if self.places - 1 == self.place:
            raise torch.OutOfMemoryError("out of memory, as the test wants it")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        allocates = func.namespace == "aten" and all(each.alias_info is None for each in func._schema.returns)
        if allocates and func._schema.returns:
            self._pass()
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> OutOfMemoryAt:
        resize, issue = torch.UntypedStorage.resize_, base.issue_all

        def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
            if nbytes:
                self._pass()
            return resize(storage, nbytes)

        def issue_all(calls: Any) -> Any:
            self._pass()
            self.launches -= 1
            return issue(calls)

        self._patch.setattr(torch.UntypedStorage, "resize_", resize_)
        self._patch.setattr(base, "issue_all", issue_all)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._patch.undo()
