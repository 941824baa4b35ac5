"""Layouts: where every parameter lies in a bucket's buffers. Pure values without tensors or process groups."""

from fullshard.layout.boxes import Box, boxes_of_range, chunk_of
from fullshard.layout.flat import FlatLayout, FlatSlot, Piece
from fullshard.layout.per_parameter import ParameterShape, PerParameterLayout, Route, Slot

__all__ = [
    "Box",
    "FlatLayout",
    "FlatSlot",
    "ParameterShape",
    "PerParameterLayout",
    "Piece",
    "Route",
    "Slot",
    "boxes_of_range",
    "chunk_of",
]
