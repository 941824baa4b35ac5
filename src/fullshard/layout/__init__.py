"""Layouts: where every parameter lies in a bucket's buffers. Pure values without tensors or process groups."""

from fullshard.layout.per_parameter import ParameterShape, PerParameterLayout, Route, Slot

__all__ = ["ParameterShape", "PerParameterLayout", "Route", "Slot"]
