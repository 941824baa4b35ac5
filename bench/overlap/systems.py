"""Units that take as long as they are told, and the systems that shard them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bench.contestants import FSDP1, FSDP2, FULLSHARD, OURS, WRAPPER, distribute
from fullshard.planning.simulation.clocks import Device
from fullshard.planning.simulation.streams import SimulatedDevice, SimulatedLane


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


@dataclass(frozen=True)
class UnitShape:
    """What a modelled unit is like: fp32 elements, and seconds of computation each way."""

    numel: int
    forward: float
    backward: float


class ModelledUnit(nn.Module):
    """One fp32 weight, and so many seconds of computation each way."""

    def __init__(self, shape: UnitShape, device: Device, rows: int = 1024) -> None:
        super().__init__()
        # No power of two of ranks up to 1,024 cuts these rows unevenly.
        self.weight = nn.Parameter(torch.zeros(rows, shape.numel // rows))
        self._device, self._shape = device, shape

    def forward(self, x: Tensor) -> Tensor:
        """``x``, later."""
        out: Tensor = _Computation.apply(x, self.weight, self._device, self._shape.forward, self._shape.backward)
        return out


def modelled_model(shapes: Sequence[UnitShape], device: Device) -> nn.Sequential:
    """One unit per shape, in sequence."""
    return nn.Sequential(*(ModelledUnit(shape, device) for shape in shapes))


@dataclass(frozen=True)
class System:
    """A contestant in one configuration.

    Args:
        name: In tables.
        system: What shards the model.
        prefetch: Of a wrapper: a key of PREFETCHES.
        depth: Units it is told to gather ahead; None: as it comes, one.
        reductions: How many may be in flight; None: as it comes, one.
        asynchronous: FSDP2's private switch for gathers that do not block.
        keep_last: How many of the last units stay gathered between forward and backward.
    """

    name: str
    system: str
    prefetch: str | None = None
    depth: int | None = None
    reductions: int | None = None
    asynchronous: bool = False
    keep_last: int = 0


SYSTEMS: tuple[System, ...] = (
    System("fullshard", FULLSHARD),
    System("fullshard, last kept", FULLSHARD, keep_last=1),
    System("fullshard, none ahead", FULLSHARD, depth=0),
    System("fullshard, 2 ahead", FULLSHARD, depth=2),
    System("fullshard, 3 ahead", FULLSHARD, depth=3),
    System("fullshard, 2 ahead, 2 reductions", FULLSHARD, depth=2, reductions=2),
    System("fullshard, 3 ahead, 3 reductions", FULLSHARD, depth=3, reductions=3),
    System("fullshard-wrapper PRE", WRAPPER, "pre"),
    System("fullshard-wrapper POST", WRAPPER, "post"),
    System("fullshard-wrapper none", WRAPPER, "none"),
    System("FSDP2", FSDP2),
    System("FSDP2, last kept", FSDP2, keep_last=1),
    System("FSDP2, async op", FSDP2, asynchronous=True),
    System("FSDP1 PRE", FSDP1, "pre"),
    System("FSDP1 POST", FSDP1, "post"),
    System("FSDP1 none", FSDP1, "none"),
)


def build(system: System, model: nn.Module, unit_type: type[nn.Module], device: Device) -> nn.Module:
    """Shard ``model`` over the default group, every module of ``unit_type`` a unit."""
    # Off by default in FSDP1; on accelerators the host runs ahead instead.
    options = {"forward_prefetch": True} if system.system == FSDP1 else {}
    chosen = {"prefetch": system.prefetch, "keep_last": system.keep_last, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built: Any = distribute(system.system, model, unit_type, torch.device("cpu"), **chosen)
    if system.asynchronous:
        built._set_unshard_async_op(True)
    if system.system in OURS:
        _set_up_engine(system, built, device)
    return built


def _set_up_engine(system: System, model: nn.Module, device: Device) -> None:
    """Depth and streams, in the engine's own terms."""
    from fullshard.engine.ownership import nested_units
    from fullshard.engine.settings import CommStreams

    units = nested_units(model)
    if isinstance(device, SimulatedDevice):
        comm_streams = CommStreams(*(SimulatedLane(device) for _ in CommStreams._fields))
        for unit in units:
            unit.settings.comm_streams = comm_streams
    if system.reductions is not None:
        for unit in units:
            unit.settings.reduction.max_in_flight = system.reductions
    if system.depth is not None:
        setter: Any = model.set_prefetch_bytes
        setter(system.depth * max(unit.unsharded_bytes for unit in units))
