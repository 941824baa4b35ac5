"""Parameters that users unshard, and gradients that they wait for: handles, and ``unsharded``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from fullshard.engine.finalization import begin_finalization, end_finalization
from fullshard.engine.ownership import units_of
from fullshard.engine.parameters.spmd_types import unchecked
from fullshard.engine.runtime import Runtime, ensure_idle, runtime_of
from fullshard.engine.unit import Unit
from fullshard.engine.user_unshard import begin_user_unshard, end_user_unshard, user_unshard

__all__ = ["GradientReductionHandle", "UnshardHandle", "unsharded"]


class UnshardHandle:
    """Handle of an all-gather in flight, returned by ``FSDPModule.unshard(async_op=True)``."""

    _unit: Unit | None

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        begin_user_unshard(unit)

    @unchecked
    def wait(self) -> None:
        """Wait for the all-gather and register the unsharded parameters. No-op if called again."""
        if self._unit is not None:
            runtime_of(self._unit).unshard(self._unit)
            self._unit = None


class GradientReductionHandle:
    """Handle of gradients that are being reduced, returned by ``FSDPModule.finalize_backward(async_op=True)``."""

    _runtime: Runtime | None

    def __init__(self, runtime: Runtime | None = None) -> None:
        self._runtime = runtime
        self._begun = None if runtime is None else begin_finalization(runtime)

    @unchecked
    def wait(self) -> None:
        """Wait until ``.grad`` of all parameters is complete. No-op if called again.

        Raises:
            FullshardError: If ``reset_iter_state``, or an exception in a collective, has dropped the gradients since.
        """
        if self._runtime is not None:
            end_finalization(self._runtime, self._begun)
            self._runtime = None


@contextlib.contextmanager
def unsharded(module: nn.Module) -> Iterator[nn.Module]:
    """Unshard all units of ``module`` and keep them unsharded until the end of the ``with`` block.

    For loops that run the model many times without training it, such as ``generate()``: nothing is all-gathered or
    freed in between. Inside the block, modules and ``parameters()`` hold the unsharded parameters, at addresses that
    stay the same; build optimizers and clip gradients outside. Do not write to the parameters: writes are lost at the
    end of the block, unless the parameters share memory with the shards, as on one rank. If an optimizer steps inside
    the block, the next forward all-gathers again. All ranks must enter the block.

    Args:
        module: Any module that contains sharded modules, or is one.

    Yields:
        The same ``module``.

    Raises:
        TypeError: If ``module`` is not an ``nn.Module``.

    Example:
        ```python
        import torch
        from torch import nn

        from fullshard import fully_shard, unsharded

        model = fully_shard(nn.Linear(8, 8))
        x = torch.randn(2, 8)
        with torch.no_grad(), unsharded(model):
            for _ in range(10):  # one all-gather in total
                x = model(x)
        ```
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"unsharded: expected an nn.Module, found {type(module).__name__}")
    units = units_of(module)
    unsharded_units: list[Unit] = []
    try:
        for unit in units:
            ensure_idle(unit)
            begin_user_unshard(unit)
        for unit in units:
            user_unshard(unit)
            unsharded_units.append(unit)
        yield module
    finally:
        for unit in unsharded_units:
            end_user_unshard(unit)
        for unit in units[len(unsharded_units) :]:  # one of their all-gathers failed
            if unit.is_idle and not unit.user_unshards:
                unit.reshard()
