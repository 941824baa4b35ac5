"""What the modules of a wrapper hold while its state dict is taken."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, Shard

from fullshard.engine.flat_bucket import FlatBucket
from fullshard.engine.flat_parameter import FlatHome
from fullshard.engine.full_copies import FullCopies, bring_to_rest
from fullshard.engine.names import clean_name
from fullshard.engine.parameter import ShardedParameter, value_of
from fullshard.engine.placement import dtensor
from fullshard.engine.unit import Unit
from fullshard.layout import PerParameterLayout
from fullshard.memory import own_storage
from fullshard.state_dict_types import FullStateDictConfig, StateDictSettings, StateDictType

__all__ = ["SavedForm", "VisibleSlice", "holding", "owned_names", "visible_slices"]


@dataclass(frozen=True)
class SavedForm:
    """What becomes of one unit in a state dict.

    Args:
        kind: What values are. Where nothing is cut they are whole, whatever the user has set: there are no shards.
        offload: Whether they are in CPU memory.
        saves: Whether this rank gets any.
    """

    kind: StateDictType
    offload: bool
    saves: bool

    @classmethod
    def of(cls, unit: Unit, settings: StateDictSettings) -> SavedForm:
        """As ``settings`` want it."""
        config, mesh = settings.state_dict_config, unit.mesh
        kind = StateDictType.FULL_STATE_DICT if mesh.shard is None else settings.state_dict_type
        first = mesh.rank == 0 and (mesh.replicate is None or mesh.replicate.get_local_rank() == 0)
        everywhere = not (isinstance(config, FullStateDictConfig) and config.rank0_only)
        return cls(kind, config.offload_to_cpu, everywhere or first)


def holding(unit: Unit, form: SavedForm, *, keep_vars: bool) -> contextlib.AbstractContextManager[None]:
    """Have the unit's modules hold what is to be saved. A collective, but for LOCAL.

    Args:
        unit: At rest.
        form: What that is.
        keep_vars: Values are the parameters themselves, so their memory need not outlive the others'.

    Raises:
        PhaseError: If the unit is in the middle of a step, or its full parameters are summoned.
    """
    if form.kind is StateDictType.LOCAL_STATE_DICT:
        return _slices(unit)
    if not form.saves:
        return _nothing(unit)
    if form.kind is StateDictType.SHARDED_STATE_DICT:
        return _rows(unit, offload=form.offload)
    return _whole(unit, offload=form.offload, keep_vars=keep_vars)


@contextlib.contextmanager
def _whole(unit: Unit, *, offload: bool, keep_vars: bool) -> Iterator[None]:
    copies = FullCopies(unit, offload_to_cpu=offload)
    try:
        for parameter in copies.parameters.values():
            if not keep_vars and type(parameter.data) is torch.Tensor:
                parameter.data = own_storage(parameter.data)
        yield
    finally:
        copies.keep_memory()
        copies.close(writeback=False)


@contextlib.contextmanager
def _nothing(unit: Unit) -> Iterator[None]:
    """Gather for others; what modules hold is taken out of the state dict afterwards."""
    FullCopies(unit).close(writeback=False)
    yield


@contextlib.contextmanager
def _rows(unit: Unit, *, offload: bool) -> Iterator[None]:
    copies = FullCopies(unit)
    try:
        with torch.inference_mode(False), torch.no_grad():
            shards = _cut(unit, copies.parameters, offload=offload)
            copies.parameters.update(shards)
        copies.keep_memory()  # nobody refers to the full ones any more
        unit.registration.use_instead(copies.parameters)
        yield
    finally:
        copies.close(writeback=False)


def _cut(unit: Unit, full: dict[int, nn.Parameter], *, offload: bool) -> dict[int, nn.Parameter]:
    """This rank's rows, as ``fully_shard`` would keep them: the same meshes, placements, shapes and strides."""
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


@contextlib.contextmanager
def _slices(unit: Unit) -> Iterator[None]:
    bring_to_rest(unit, "its flat parameter")
    yield


@dataclass(frozen=True)
class VisibleSlice:
    """A visible flat parameter, and what of it is worth saving.

    Args:
        home: Where it is registered.
        unit: Its unit.
        numel: Of all ranks together, without the padding at their end.
        slice_numel: Of this rank, padding included.
    """

    home: FlatHome
    unit: Unit
    numel: int
    slice_numel: int

    @property
    def start(self) -> int:
        """Where this rank's slice begins in the whole."""
        return self.unit.mesh.rank * self.slice_numel

    @property
    def held(self) -> int:
        """How many elements of the whole this rank has."""
        return min(max(self.numel - self.start, 0), self.slice_numel)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """How the whole is cut over the unit's mesh."""
        return self.unit.mesh.placements(Shard(0))

    def saved(self, *, offload: bool) -> DTensor:
        """The live memory (in CPU memory if ``offload``), as a 1-D DTensor: other numbers of ranks can load that."""
        local = self.home.flat.detach().as_subclass(torch.Tensor).narrow(0, 0, self.held)
        local = local.cpu() if offload else local
        meta = TensorMeta(torch.Size((self.numel,)), (1,), local.dtype)
        return dtensor(local, DTensorSpec(self.unit.mesh.device_mesh, self.placements, tensor_meta=meta))

    def is_like(self, value: DTensor) -> bool:
        """Whether ``value`` is cut over the same ranks in the same way, so that its local part is this rank's."""
        return value.placements == self.placements and value.device_mesh == self.unit.mesh.device_mesh


def visible_slices(unit: Unit) -> list[VisibleSlice]:
    """The flat parameters of a unit that users see; none if they see the original ones."""
    found = []
    for bucket in unit.buckets:
        if isinstance(bucket, FlatBucket) and bucket.home is not None:
            layout = bucket.layout
            last = layout.slots[-1]
            end, ranks = last.full_offset + last.parameter.numel, layout.world_size
            # DTensors are cut as torch.chunk cuts: only where that gives our slices can the padding be left out.
            numel = end if -(-end // ranks) == layout.slice_numel else layout.full_numel
            found.append(VisibleSlice(bucket.home, unit, numel, layout.slice_numel))
    return found


def owned_names(wrapper: nn.Module, unit: Unit) -> Iterator[tuple[str, ShardedParameter]]:
    """All names, below the wrapper, of the parameters of its unit, as before wrapping."""
    names: dict[int, list[str]] = {}
    for name, module in wrapper.named_modules(remove_duplicate=False):
        known = names.setdefault(id(module), [])
        if (clean := clean_name(name)) not in known:
            known.append(clean)
    for parameter in unit.parameters:
        for owner in parameter.owners:
            for prefix in names.get(id(owner.module()), []):
                yield f"{prefix}.{owner.name}" if prefix else owner.name, parameter
