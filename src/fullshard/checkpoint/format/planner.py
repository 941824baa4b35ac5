"""torch.distributed.checkpoint's planners for :class:`TensorShards` and tensors."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, overload

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem, WriteItemType

from fullshard.checkpoint.format.index import Shard, Shards
from fullshard.checkpoint.state.tensor_shards import TensorShards
from fullshard.layout import Region

__all__ = ["ALL", "ChunkList", "LoadPlanner", "SavePlanner"]

# torch.distributed.checkpoint does work and logs for every entry of the state dict. So it gets one entry of this name,
# which contains all of them.
ALL = "all"


class SavePlanner(DefaultSavePlanner):
    """Plans the writes of every rank for a flat dictionary of :class:`TensorShards`, tensors and serialized values.

    Replicated items are written once.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the entries as they are."""
        self.state_dict, self.is_coordinator = state_dict[ALL], is_coordinator

    def _dedup_save_plans(self, all_plans: list[SavePlan]) -> list[SavePlan]:
        """Assign each replicated item to one rank: if replicas are known to be equal, to the rank with the least to
        write so far; otherwise to the first rank, so that the checkpoint is consistent with a single rank.
        """
        writers: dict[MetadataIndex, list[int]] = {}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                writers.setdefault(item.index, []).append(rank)
        loads = [0] * len(all_plans)
        chosen: dict[MetadataIndex, int] = {}
        for plan in all_plans:
            for item in plan.items:
                if item.index in chosen:
                    continue
                ranks = writers[item.index]
                held = self.state_dict.get(item.index.fqn)
                spread = len(ranks) > 1 and isinstance(held, TensorShards) and held.equal
                writer = min(ranks, key=loads.__getitem__) if spread else ranks[0]
                chosen[item.index] = writer
                loads[writer] += 0 if item.tensor_data is None else math.prod(item.tensor_data.chunk.sizes)
        return [
            replace(plan, items=[item for item in plan.items if chosen[item.index] == rank])
            for rank, plan in enumerate(all_plans)
        ]

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the object to write under that key and offset."""
        held = self.state_dict[index.fqn]
        return held.__get_tensor_shard__(index) if isinstance(held, TensorShards) else super().lookup_object(index)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Wrap serialized values in a stream."""
        return io.BytesIO(object) if write_item.type is WriteItemType.BYTE_IO else object


class ChunkList(Sequence[ChunkStorageMetadata]):
    """The shards of a tensor as torch.distributed.checkpoint describes them, made when they are asked for."""

    _shards: Shards

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def __len__(self) -> int:
        return len(self._shards)

    @overload
    def __getitem__(self, index: int) -> ChunkStorageMetadata: ...
    @overload
    def __getitem__(self, index: slice) -> list[ChunkStorageMetadata]: ...
    def __getitem__(self, index: int | slice) -> ChunkStorageMetadata | list[ChunkStorageMetadata]:
        if isinstance(index, slice):
            return [_chunk(shard) for shard in self._shards[index]]
        return _chunk(self._shards[index])

    def overlapping(self, region: Region) -> Iterator[ChunkStorageMetadata]:
        """Yield those that have elements of a region."""
        return map(_chunk, self._shards.overlapping(region))


def _chunk(shard: Shard) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(shard.region.offsets), torch.Size(shard.region.sizes))


class LoadPlanner(DefaultLoadPlanner):
    """Plans the reads of every rank. Values that are not tensors replace those of the (flat) dictionary."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the entries as they are: all memory is allocated."""
        self.original_state_dict = self.state_dict = state_dict[ALL]
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Plan with the shards of the checkpoint that have elements of this rank's: there may be a million others."""
        assert self.metadata is not None
        described = dict(self.metadata.state_dict_metadata)
        for key, held in self.state_dict.items():
            tensor = described.get(key)
            if isinstance(held, TensorShards) and isinstance(tensor, TensorStorageMetadata):
                described[key] = _narrowed(tensor, held)
        self.metadata = replace(self.metadata, state_dict_metadata=described)
        return super().create_local_plan()

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the memory to read into."""
        held = self.state_dict[index.fqn]
        return held.__get_tensor_shard__(index) if isinstance(held, TensorShards) else super().lookup_tensor(index)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Deserialize a value without running code from it."""
        from fullshard.checkpoint.format.values import from_bytes

        name = read_item.dest_index.fqn
        self.state_dict[name] = from_bytes(name, value.getvalue())


def _narrowed(tensor: TensorStorageMetadata, held: TensorShards) -> TensorStorageMetadata:
    """Return the metadata of a tensor with those of its chunks that have elements of the shards that a rank holds."""
    chunks: Any = tensor.chunks
    if not isinstance(chunks, ChunkList):
        return tensor
    near = {chunk.offsets: chunk for shard in held.shards for chunk in chunks.overlapping(shard.region)}
    return replace(tensor, chunks=list(near.values()))
