"""Register the values to save with the modules of a wrapper while its state dict is taken."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, Shard

from fullshard.checkpoint.state.types import StateDictType
from fullshard.comm.mesh import ShardMesh
from fullshard.engine.parameters.flat import FlatParamHandle
from fullshard.engine.parameters.names import clean_name
from fullshard.engine.parameters.placement import dtensor
from fullshard.engine.parameters.sharded import ShardedParameter, value_of
from fullshard.engine.summoned_parameters import SummonedParameters, require_idle
from fullshard.engine.unit import Unit
from fullshard.layout import PerParameterLayout
from fullshard.memory import own_storage

__all__ = ["SaveFormat", "VisibleSlice", "owned_names", "registered_for_saving", "visible_slices"]


@dataclass(frozen=True)
class SaveFormat:
    """Format of one unit in a state dict."""

    kind: StateDictType  # FULL_STATE_DICT if the unit is not sharded
    offload: bool  # values are in CPU memory
    saves: bool  # this rank gets values


@contextlib.contextmanager
def registered_for_saving(unit: Unit, save_format: SaveFormat, *, keep_vars: bool) -> Iterator[None]:
    """Register the values to save with the modules of an idle unit. A collective, except for LOCAL_STATE_DICT.

    With ``keep_vars``, values are the parameters themselves, and need no separate memory.

    Raises:
        PhaseError: If the unit is in the middle of a step, or unsharded by ``summon_full_params``.
    """
    if save_format.kind is StateDictType.LOCAL_STATE_DICT:
        require_idle(unit, "its flat parameter")
        yield
        return
    full = save_format.kind is StateDictType.FULL_STATE_DICT
    copies = SummonedParameters(unit, offload_to_cpu=full and save_format.saves and save_format.offload)
    try:
        if not save_format.saves:  # it took part in the all-gather; its keys are removed afterwards
            copies.close(writeback=False)
        elif full:
            for parameter in copies.parameters.values():
                if not keep_vars and type(parameter.data) is torch.Tensor:
                    parameter.data = own_storage(parameter.data)
        else:
            with torch.inference_mode(False), torch.no_grad():
                copies.parameters.update(_shards(unit, copies.parameters, offload=save_format.offload))
            unit.registration.use_copies(copies.parameters)
        copies.keep_memory()  # what the values do not reference is freed by itself
        yield
    finally:
        copies.close(writeback=False)


def _shards(unit: Unit, full: dict[int, nn.Parameter], *, offload: bool) -> dict[int, nn.Parameter]:
    """Return this rank's shards as ``fully_shard`` would keep them: same meshes, placements, shapes and strides."""
    mesh, shards = unit.mesh, {}
    layout = PerParameterLayout.build(
        [p.shape for p in unit.parameters], world_size=mesh.world_size, itemsize=1, direct_bytes=0
    )
    for parameter, slot in zip(unit.parameters, layout.slots, strict=True):
        value = value_of(full[id(parameter)])
        start, stop = slot.local_rows(mesh.rank)
        rows = value if slot.parameter.replicated else value.narrow(slot.parameter.cut, start, stop - start)
        device = torch.device("cpu") if offload else value.device
        shape, stride = slot.local_shape(mesh.rank), slot.local_stride(mesh.rank)
        local = torch.empty_strided(shape, stride, dtype=value.dtype, device=device).copy_(rows)
        shard = dtensor(local, parameter.placement.sharded_spec(value.dtype))
        made = shards[id(parameter)] = nn.Parameter(shard, requires_grad=parameter.requires_grad)
        made.__dict__.update(parameter.attributes)
    return shards


@dataclass(frozen=True)
class VisibleSlice:
    """This rank's slice of a visible flat parameter."""

    home: FlatParamHandle
    mesh: ShardMesh
    numel: int  # of all ranks, without trailing padding
    slice_numel: int  # of this rank, including padding

    @property
    def start(self) -> int:
        """First element of this rank's slice in the flat parameter."""
        return self.mesh.rank * self.slice_numel

    @property
    def local_numel(self) -> int:
        """Number of this rank's elements without padding."""
        return min(max(self.numel - self.start, 0), self.slice_numel)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Placements of the flat parameter on the unit's mesh."""
        return self.mesh.placements(Shard(0))

    def as_dtensor(self, *, offload: bool) -> DTensor:
        """Return the live memory (on the CPU if ``offload``) as a 1-D DTensor, which other numbers of ranks can
        load.
        """
        local = self.home.flat.detach().as_subclass(torch.Tensor).narrow(0, 0, self.local_numel)
        local = local.cpu() if offload else local
        meta = TensorMeta(torch.Size((self.numel,)), (1,), local.dtype)
        return dtensor(local, DTensorSpec(self.mesh.device_mesh, self.placements, tensor_meta=meta))

    def has_same_sharding(self, value: DTensor) -> bool:
        """Return True if ``value`` has the same mesh and placements, so that its local tensor is this rank's."""
        return value.placements == self.placements and value.device_mesh == self.mesh.device_mesh


def visible_slices(unit: Unit) -> list[VisibleSlice]:
    """Return the flat parameters of a unit that users see; none with ``use_orig_params=True``."""
    handles = (bucket.handle for bucket in unit.buckets)
    return [VisibleSlice(each, unit.mesh, each.numel, each.flat.numel()) for each in handles if each is not None]


def owned_names(wrapper: nn.Module, unit: Unit) -> Iterator[tuple[str, ShardedParameter]]:
    """Yield all names, relative to the wrapper and as before wrapping, of the parameters of its unit."""
    names: dict[int, list[str]] = {}
    for name, module in wrapper.named_modules(remove_duplicate=False):
        known = names.setdefault(id(module), [])
        if (clean := clean_name(name)) not in known:
            known.append(clean)
    for parameter in unit.parameters:
        for owner in parameter.owners:
            for prefix in names.get(id(owner.module()), []):
                yield f"{prefix}.{owner.name}" if prefix else owner.name, parameter
