"""torch.distributed.checkpoint's planners, for :class:`~fullshard.checkpoint.pieces.Pieces` as well as tensors."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem, WriteItemType

from fullshard.checkpoint.pieces import Pieces

__all__ = ["ALL", "LoadPlanner", "SavePlanner"]

# torch.distributed.checkpoint does some work, and writes log records, for every entry of the dictionary that it is
# handed. So it gets one entry of this name, which has all of them.
ALL = "all"


class SavePlanner(DefaultSavePlanner):
    """Plans what every rank writes, of a flat dictionary of :class:`Pieces`, tensors and values that are bytes by now.

    What several ranks have is written once.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the entries as they are."""
        self.state_dict, self.is_coordinator = state_dict[ALL], is_coordinator

    def _dedup_save_plans(self, all_plans: list[SavePlan]) -> list[SavePlan]:
        """What several ranks have is written by one: where they are known to have the same, the one that has least to
        write so far; elsewhere the first, so that a checkpoint is of one rank and not of several.
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
                spread = len(ranks) > 1 and isinstance(held, Pieces) and held.equal
                writer = min(ranks, key=loads.__getitem__) if spread else ranks[0]
                chosen[item.index] = writer
                loads[writer] += 0 if item.tensor_data is None else math.prod(item.tensor_data.chunk.sizes)
        return [
            replace(plan, items=[item for item in plan.items if chosen[item.index] == rank])
            for rank, plan in enumerate(all_plans)
        ]

    def lookup_object(self, index: MetadataIndex) -> Any:
        """What there is to write under that name, at that place."""
        held = self.state_dict[index.fqn]
        return held.__get_tensor_shard__(index) if isinstance(held, Pieces) else super().lookup_object(index)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """As a stream, if it is bytes."""
        return io.BytesIO(object) if write_item.type is WriteItemType.BYTE_IO else object


class LoadPlanner(DefaultLoadPlanner):
    """Plans what every rank reads. Values that are no tensors replace those of the (flat) dictionary."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the entries as they are: all memory is there."""
        self.original_state_dict = self.state_dict = state_dict[ALL]
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The memory to read into."""
        held = self.state_dict[index.fqn]
        return held.__get_tensor_shard__(index) if isinstance(held, Pieces) else super().lookup_tensor(index)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Values from bytes, without running code from them."""
        from fullshard.checkpoint.values import from_bytes

        name = read_item.dest_index.fqn
        self.state_dict[name] = from_bytes(name, value.getvalue())
