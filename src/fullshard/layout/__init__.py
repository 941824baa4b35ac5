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
from fullshard.layout.regions import Region, chunk_of, regions_of_range

__all__ = [
    "FlatLayout",
    "FlatShard",
    "FlatSlot",
    "ParameterShape",
    "PerParameterLayout",
    "Region",
    "Route",
    "Slot",
    "chunk_of",
    "direct_shards",
    "is_row_major",
    "regions_of_range",
]
