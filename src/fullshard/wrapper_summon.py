"""Full parameters inside of a ``with`` block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from fullshard.arguments import check_bool, check_instance
from fullshard.engine.full_copies import FullCopies
from fullshard.engine.ownership import nested_units, unit_of
from fullshard.engine.unit import Unit
from fullshard.errors import FullshardError

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
    """See :meth:`FullyShardedDataParallel.summon_full_params`."""
    check_instance("summon_full_params: module", module, nn.Module)
    flags = {"recurse": recurse, "writeback": writeback, "rank0_only": rank0_only, "offload_to_cpu": offload_to_cpu}
    for name, flag in {**flags, "with_grads": with_grads}.items():
        check_bool(f"summon_full_params: {name}", flag)
    own = unit_of(module)
    units = nested_units(module) if recurse else [] if own is None else [own]
    opened: list[FullCopies] = []
    agrees = rank0_only and writeback  # what the first rank did is then a matter of all
    error: BaseException | None = None
    try:
        for unit in units:
            opened.append(FullCopies(unit, rank0_only=rank0_only, offload_to_cpu=offload_to_cpu, with_grads=with_grads))
        yield
        if writeback:
            for copies in opened:
                copies.check()
    except BaseException as raised:
        error = raised
        raise
    finally:
        failed = error is not None
        if agrees and len(opened) == len(units):
            failed = _agree(units, failed=failed)
        with contextlib.ExitStack() as stack:  # all of them are closed, whichever fails
            for copies in opened:
                stack.callback(
                    copies.close, writeback=writeback and not failed, rank0_only=rank0_only, with_grads=with_grads
                )
        if failed and error is None:
            raise FullshardError(
                "summon_full_params(writeback=True, rank0_only=True): the block failed on another rank, so nothing "
                "was written back"
            )


def _agree(units: list[Unit], *, failed: bool) -> bool:
    """Whether the block failed on any of the ranks that are to send or receive what was edited."""
    anywhere = failed
    for mesh in {id(unit.mesh): unit.mesh for unit in units}.values():
        for part, size in ((mesh.shard, mesh.world_size), (mesh.replicate, mesh.replicas)):
            if part is not None and size > 1:
                flag = torch.tensor([anywhere], dtype=torch.int32, device=mesh.device)
                dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=part.get_group())
                anywhere = bool(flag.item())
    return anywhere
