"""Units that take as long as they are told, and the systems that shard them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from bench.simulators.clocks import Device
from bench.simulators.streams import SimulatedDevice, SimulatedLane

__all__ = ["SYSTEMS", "ModelledUnit", "System", "UnitShape", "build", "modelled_model"]


class _Computation(torch.autograd.Function):
    """The identity, which takes ``forward`` seconds one way and ``backward`` seconds the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, device: Device, forward: float, backward: float) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.device, ctx.seconds = device, backward
        device.compute(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return gradient, ctx.device.compute(ctx.seconds, lambda: torch.zeros_like(weight)), None, None, None


class ModelledUnit(nn.Module):
    """One fp32 weight of ``numel`` elements and so many seconds of computation each way."""

    def __init__(self, rows: int, numel: int, device: Device, forward: float, backward: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, numel // rows))
        self._device, self._seconds = device, (forward, backward)

    def forward(self, x: Tensor) -> Tensor:
        """``x``, later."""
        out: Tensor = _Computation.apply(x, self.weight, self._device, *self._seconds)
        return out


@dataclass(frozen=True)
class UnitShape:
    """What a modelled unit is like: fp32 elements, and seconds of computation each way."""

    numel: int
    forward: float
    backward: float


def modelled_model(shapes: Sequence[UnitShape], device: Device, rows: int = 1024) -> nn.Sequential:
    """One unit per shape, in sequence; rows that no power of two of ranks up to 1,024 cuts unevenly."""
    return nn.Sequential(*(ModelledUnit(rows, s.numel, device, s.forward, s.backward) for s in shapes))


# ---------------------------------------------------------------------------------------------------------- systems


@dataclass(frozen=True)
class System:
    """A library in one configuration.

    Args:
        name: In tables.
        library: ``fullshard``, ``fullshard-wrapper``, ``fsdp1`` or ``fsdp2``.
        options: Of its constructor.
        depth: Units it is told to gather ahead; None: as it comes, one.
        reductions: How many may be in flight; None: as it comes, one.
        asynchronous: FSDP2's private switch for gathers that do not block.
        keep_last: Whether the last unit stays gathered between its forward and its backward.
    """

    name: str
    library: str
    options: Mapping[str, Any] = field(default_factory=dict)
    depth: int | None = None
    reductions: int | None = None
    asynchronous: bool = False
    keep_last: bool = False


SYSTEMS: tuple[System, ...] = (
    System("fullshard", "fullshard"),
    System("fullshard, last kept", "fullshard", keep_last=True),
    System("fullshard, none ahead", "fullshard", depth=0),
    System("fullshard, 2 ahead", "fullshard", depth=2),
    System("fullshard, 3 ahead", "fullshard", depth=3),
    System("fullshard, 2 ahead, 2 reductions", "fullshard", depth=2, reductions=2),
    System("fullshard, 3 ahead, 3 reductions", "fullshard", depth=3, reductions=3),
    System("fullshard-wrapper PRE", "fullshard-wrapper", {"backward_prefetch": "BACKWARD_PRE"}),
    System("fullshard-wrapper POST", "fullshard-wrapper", {"backward_prefetch": "BACKWARD_POST"}),
    System("fullshard-wrapper none", "fullshard-wrapper", {"backward_prefetch": None}),
    System("FSDP2", "fsdp2"),
    System("FSDP2, last kept", "fsdp2", keep_last=True),
    System("FSDP2, async op", "fsdp2", asynchronous=True),
    System("FSDP1 PRE", "fsdp1", {"backward_prefetch": "BACKWARD_PRE"}),
    System("FSDP1 POST", "fsdp1", {"backward_prefetch": "BACKWARD_POST"}),
    System("FSDP1 none", "fsdp1", {"backward_prefetch": None}),
)


def build(system: System, model: nn.Module, unit_types: tuple[type[nn.Module], ...], device: Device) -> nn.Module:
    """Shard ``model`` over the default group, every module of ``unit_types`` a unit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if system.library in ("fsdp1", "fullshard-wrapper"):
            built = _wrap(system, model, unit_types)
        else:
            built = _shard(system, model, unit_types)
    if system.library.startswith("fullshard"):
        _set_up_engine(system, built, device)
    return built


def _shard(system: System, model: nn.Module, unit_types: tuple[type[nn.Module], ...]) -> nn.Module:
    if system.library == "fsdp2":
        from torch.distributed.fsdp import fully_shard
    else:
        from fullshard import fully_shard
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    units = [module for module in model.modules() if isinstance(module, unit_types)]
    for unit in units:
        last = system.keep_last and unit is units[-1]
        fully_shard(unit, mesh=mesh, **dict(system.options), **({"reshard_after_forward": False} if last else {}))
    fully_shard(model, mesh=mesh, **dict(system.options))
    if system.asynchronous:
        model._set_unshard_async_op(True)
    return model


def _wrap(system: System, model: nn.Module, unit_types: tuple[type[nn.Module], ...]) -> nn.Module:
    if system.library == "fsdp1":
        from torch.distributed import fsdp as library
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    else:
        import fullshard as library
        from fullshard.wrap import ModuleWrapPolicy
    options = dict(system.options)
    prefetch = options.pop("backward_prefetch")
    options["backward_prefetch"] = None if prefetch is None else library.BackwardPrefetch[prefetch]
    if system.library == "fsdp1":
        options["forward_prefetch"] = True  # off by default; on accelerators the host runs ahead instead
    return library.FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy(set(unit_types)),
        use_orig_params=True,
        device_id=torch.device("cpu"),
        **options,
    )


def _set_up_engine(system: System, model: nn.Module, device: Device) -> None:
    """Depth and streams, in the engine's own terms."""
    from fullshard.engine.ownership import nested_units
    from fullshard.engine.settings import CommStreams

    units = nested_units(model)
    if isinstance(device, SimulatedDevice):
        comm_streams = CommStreams(*(SimulatedLane(device) for _ in range(3)))
        for unit in units:
            unit.settings.comm_streams = comm_streams
    if system.reductions is not None:
        for unit in units:
            unit.settings.reduction.max_in_flight = system.reductions
    if system.depth is not None:
        setter: Any = model.set_prefetch_bytes
        setter(system.depth * max(unit.unsharded_bytes for unit in units))
