"""From a plan's front end to a sharded model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard

import fullshard.ragged  # noqa: F401 # adds the layout
from fullshard import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
    replicate,
)
from fullshard.comm import GlooTransport
from fullshard.engine.ownership import unit_of
from fullshard.wrap import CustomPolicy
from fuzz.models import Block, Root
from fuzz.plan import FrontEnd
from ranks import Rank


@contextlib.contextmanager
def message_sizes(front_end: FrontEnd) -> Iterator[None]:
    """Inside, units travel in messages of the sizes that the plan says."""
    before = {name: getattr(GlooTransport, name) for name in ("tiny_bytes", "direct_bytes")}
    if not front_end.tiny:
        GlooTransport.tiny_bytes = 0
    if front_end.direct_bytes:
        GlooTransport.direct_bytes = front_end.direct_bytes
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(GlooTransport, name, value)


def shard(model: Root, front_end: FrontEnd, rank: Rank) -> nn.Module:
    """Shard ``model`` in place (the wrapper: return what is around it)."""
    mesh = _mesh(front_end, rank)
    for block in model.modules():
        if isinstance(block, Block) and block.plan.compiled:
            block.compile(backend=block.plan.compiled)
    sharded = _wrap(model, front_end, mesh) if front_end.name == "wrapper" else _shard(model, front_end, mesh)
    if front_end.keep and isinstance(sharded, FSDPModule):
        sharded.set_reshard_after_backward(False)
    return sharded


def _shard(model: Root, front_end: FrontEnd, mesh: Any) -> nn.Module:
    function, options = _composable(front_end, mesh)
    groups: list[list[nn.Module]] = []
    if function is fully_shard:
        if model.plan.block_unit and len(model.blocks) > 1:
            groups.append([model.blocks[0], model.blocks[1]])
        if model.plan.head_unit:
            groups.append([model.norm, model.head])
    grouped = [module for group in groups for module in group]
    for module in reversed(list(model.modules())):
        if isinstance(module, Block) and module.plan.unit and module not in grouped:
            function(module, **options)
    for group in groups:
        reshard = {"reshard_after_forward": False} if model.head in group else {}
        fully_shard(group, **{**options, **reshard})
    sharded: nn.Module = function(model, **options)
    return sharded


def _composable(front_end: FrontEnd, mesh: Any) -> tuple[Any, dict[str, Any]]:
    """Which function shards modules, and its options."""
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16 if front_end.fp16 else None),
        "offload_policy": CPUOffloadPolicy(pin_memory=False) if front_end.offload else OffloadPolicy(),
    }
    if front_end.name == "replicate":
        return replicate, options
    options["reshard_after_forward"] = front_end.reshard
    if front_end.ragged:
        options["layout"] = "ragged"
    elif front_end.columns:
        options["shard_placement_fn"] = lambda parameter: Shard(parameter.ndim - 1) if parameter.ndim else None
    return fully_shard, options


def shard_added(module: nn.Module, front_end: FrontEnd, rank: Rank) -> None:
    """Make a unit of a module that was put below a sharded root."""
    function, options = _composable(front_end, _mesh(front_end, rank))
    function(module, **options)
    if front_end.keep and isinstance(module, FSDPModule):
        module.set_reshard_after_backward(False)


def _mesh(front_end: FrontEnd, rank: Rank) -> Any:
    return rank.make_mesh(*front_end.mesh, names=("replicate", "shard")[-len(front_end.mesh) :])


def _wrap(model: Root, front_end: FrontEnd, mesh: Any) -> nn.Module:
    return FullyShardedDataParallel(
        model,
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy[front_end.strategy],
        cpu_offload=CPUOffload(offload_params=True) if front_end.offload else None,
        auto_wrap_policy=CustomPolicy(lambda module: isinstance(module, Block) and module.plan.unit),
        backward_prefetch=BackwardPrefetch[front_end.prefetch] if front_end.prefetch else None,
        mixed_precision=MixedPrecision(reduce_dtype=torch.float16) if front_end.fp16 else None,
        use_orig_params=front_end.orig,
    )


def sharded_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that are units, in the order of ``modules()``."""
    return [module for module in model.modules() if unit_of(module) is not None]


def reshard_all(model: nn.Module) -> None:
    """What a user does after writing to sharded parameters by hand."""
    for module in sharded_modules(model):
        if isinstance(module, FSDPModule):
            module.reshard()
