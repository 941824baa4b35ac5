"""``summon_full_params``: unsharded parameters inside of a ``with`` block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from fullshard.engine.ownership import nested_units, unit_of
from fullshard.engine.summoned_parameters import SummonedParameters
from fullshard.engine.unit import Unit
from fullshard.errors import FullshardError
from fullshard.frontend.arguments import check_bool, check_instance

__all__ = ["summon"]


@contextlib.contextmanager
def summon(
    module: nn.Module,
    *,
    recurse: bool,
    writeback: bool,
    rank0_only: bool,
    offload_to_cpu: bool,
    with_grads: bool,
) -> Iterator[None]:
    """Implement :meth:`FullyShardedDataParallel.summon_full_params`."""
    check_instance("summon_full_params: module", module, nn.Module)
    flags = {"recurse": recurse, "writeback": writeback, "rank0_only": rank0_only, "offload_to_cpu": offload_to_cpu}
    for name, flag in {**flags, "with_grads": with_grads}.items():
        check_bool(f"summon_full_params: {name}", flag)
    own = unit_of(module)
    units = nested_units(module) if recurse else [] if own is None else [own]
    summoned: list[SummonedParameters] = []
    agrees = rank0_only and writeback  # the first rank's edits are sent to all
    error: BaseException | None = None
    try:
        for unit in units:
            summoned.append(
                SummonedParameters(unit, rank0_only=rank0_only, offload_to_cpu=offload_to_cpu, with_grads=with_grads)
            )
        yield
        if writeback:
            for copies in summoned:
                copies.check()
    except BaseException as raised:
        error = raised
        raise
    finally:
        failed = error is not None
        if agrees and len(summoned) == len(units):
            failed = _any_rank_failed(units, failed=failed)
        with contextlib.ExitStack() as stack:  # close all, also if one fails
            for copies in summoned:
                stack.callback(
                    copies.close, writeback=writeback and not failed, rank0_only=rank0_only, with_grads=with_grads
                )
        if failed and error is None:
            raise FullshardError(
                "summon_full_params(writeback=True, rank0_only=True): the block failed on another rank, so nothing "
                "was written back"
            )


def _any_rank_failed(units: list[Unit], *, failed: bool) -> bool:
    """Return True if the block failed on any rank that would send or receive edits."""
    anywhere = failed
    for mesh in {id(unit.mesh): unit.mesh for unit in units}.values():
        for axis, size in ((mesh.shard, mesh.world_size), (mesh.replicate, mesh.replicas)):
            if axis is not None and size > 1:
                flag = torch.tensor([anywhere], dtype=torch.int32, device=mesh.device)
                dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=axis.get_group())
                anywhere = bool(flag.item())
    return anywhere
