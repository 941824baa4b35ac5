"""``RaggedShard``: the placement of parameters of which each rank holds what lies in its slice of a bucket."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from fullshard.engine.parameters.tensor_shards import View
from fullshard.layout import FlatSlot

__all__ = ["RaggedShard", "hashed", "part_here", "ragged_placement", "ragged_spec", "rebuild_shard", "view_here"]


class RaggedShard(Placement):
    """The placement of a parameter of which each rank holds what lies in its slice of a bucket.

    Args:
        slot: Where the parameter lies in the bucket.
        by_rows: Local tensors consist of whole rows. If not, they are 1-D, with elements in the order of memory.
    """

    slot: FlatSlot
    by_rows: bool

    def __init__(self, slot: FlatSlot, *, by_rows: bool) -> None:
        super().__init__()
        self.slot, self.by_rows = slot, by_rows

    def view(self, rank: int) -> View:
        """Return the local tensor of ``rank`` of the shard axis as a view of the whole parameter."""
        shard, own = self.slot.shard(rank), self.slot.parameter
        if not self.by_rows:
            return View(shard.start, (shard.numel,), (1,))
        rows = [shard.numel // max(1, math.prod(own.shape[1:]))] if own.shape else []
        return View(shard.start, (*rows, *own.shape[1:]), own.stride)

    def __eq__(self, other: object) -> bool:
        return type(other) is RaggedShard and self.slot == other.slot and self.by_rows is other.by_rows

    def __hash__(self) -> int:
        # torch hashes what describes a plain DTensor before its first operation; that of a RaggedDTensor has a hash.
        if sys._getframe(1).f_code.co_name == "_hash_impl":
            raise NotImplementedError(
                f"a plain DTensor has the placement {self} of a parameter that is sharded with layout='ragged', with "
                "which torch would compute something else; use full_tensor() and Replicate()"
            )
        return hash((self.slot.unsharded_offset, self.slot.slice_numel, self.slot.parameter.numel))

    def __repr__(self) -> str:
        slot, cut = self.slot, "rows" if self.by_rows else "elements"
        return f"RaggedShard({cut}, offset={slot.unsharded_offset}, slice={slot.slice_numel})"

    def __reduce__(self) -> tuple[Callable[..., RaggedShard], tuple[FlatSlot, bool]]:
        return rebuild_shard, (self.slot, self.by_rows)


def rebuild_shard(slot: FlatSlot, by_rows: bool) -> RaggedShard:
    """Make a placement again that was pickled."""
    return RaggedShard(slot, by_rows=by_rows)


def ragged_placement(spec: DTensorSpec) -> tuple[int, RaggedShard]:
    """Return the mesh axis whose placement is a ``RaggedShard``, and that."""
    for axis, placement in enumerate(spec.placements):
        if isinstance(placement, RaggedShard):
            return axis, placement
    raise ValueError(f"expected a RaggedShard, found placements {spec.placements}")


def ragged_spec(mesh: DeviceMesh, placements: Sequence[Placement], dtype: torch.dtype) -> DTensorSpec:
    """Return the spec of a parameter with these placements, one of which is a ``RaggedShard``."""
    own = next(placement for placement in placements if isinstance(placement, RaggedShard)).slot.parameter
    meta = TensorMeta(torch.Size(own.shape), own.stride, dtype)
    return hashed(DTensorSpec(mesh, tuple(placements), tensor_meta=meta))


def view_here(spec: DTensorSpec) -> View:
    """Return this rank's local tensor as a view of the whole parameter."""
    axis, placement = ragged_placement(spec)
    return placement.view(spec.mesh.get_local_rank(axis))


def part_here(value: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """Return this rank's part of a whole ``value``: a view if its strides are the parameter's, else a copy."""
    return view_here(spec).cut(value, ragged_placement(spec)[1].slot.parameter.stride)


def hashed(spec: DTensorSpec) -> DTensorSpec:
    """Have the spec of a ``RaggedDTensor`` know its hash, see ``RaggedShard.__hash__``."""
    if spec._hash is None:
        spec._hash = hash((spec.mesh, spec.placements))
    return spec
