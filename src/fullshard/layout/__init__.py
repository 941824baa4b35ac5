"""Layouts: where every parameter lies in a bucket's buffers. Pure values without tensors or process groups."""

from fullshard.layout.flat import FlatLayout, FlatShard, FlatSlot
from fullshard.layout.per_parameter import (
    ParameterShape,
    PerParameterLayout,
    Route,
    Slot,
    direct_shards,
    is_row_major,
)
from fullshard.layout.ragged import Granularity, granule_of, ragged_layout
from fullshard.layout.regions import Region, chunk_of, regions_of_range

__all__ = [
    "FlatLayout",
    "FlatShard",
    "FlatSlot",
    "Granularity",
    "ParameterShape",
    "PerParameterLayout",
    "Region",
    "Route",
    "Slot",
    "chunk_of",
    "direct_shards",
    "granule_of",
    "is_row_major",
    "ragged_layout",
    "regions_of_range",
]
