"""The packed message of a bucket: where small parameters, or their gradients, lie in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from fullshard.layout import PerParameterLayout, Route, Slot

__all__ = ["View", "message_copies"]


class View(NamedTuple):
    """A tensor on the memory of another one, ``offset`` elements from its beginning."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def on(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view, on ``tensor``."""
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)


def message_copies(slot: Slot, layout: PerParameterLayout, *, unpack: bool) -> Iterator[tuple[View, View]]:
    """The copies between one parameter and the message of all ranks: one, or a second for a last shard that is smaller.

    Args:
        slot: Of the parameter.
        layout: With the message.
        unpack: From the message to an unsharded parameter, which has room for padding. If not: from a gradient, which
            has none, to the message, where every rank's part has all of a replicated parameter.

    Yields:
        A view of the parameter, and one of the message.
    """
    world_size, section = layout.world_size, layout.message_numel  # the message has a section per rank
    start, numel, own = slot.shard_offset - layout.message_offset, slot.shard_numel, slot.parameter
    if slot.route is Route.REPLICATED and unpack:
        yield View(0, (numel,), (1,)), View(start, (numel,), (1,))
    elif slot.route is Route.REPLICATED:
        yield View(0, (world_size, numel), (0, 1)), View(start, (world_size, numel), (section, 1))
    elif slot.row_major:
        whole, rest = (world_size, 0) if unpack else divmod(own.numel, numel)
        if whole:
            yield View(0, (whole, numel), (numel, 1)), View(start, (whole, numel), (section, 1))
        if rest:
            yield View(whole * numel, (rest,), (1,)), View(start + whole * section, (rest,), (1,))
    else:
        whole, rest = divmod(slot.rows, slot.chunk_rows)
        step = slot.chunk_rows * own.stride[own.cut]  # from the rows of one rank to those of the next
        if whole:
            rows = (whole, *slot.local_shape(0))
            yield View(0, rows, (step, *own.stride)), View(start, rows, (section, *slot.local_stride(0)))
        if rest:
            rows, place = slot.local_shape(whole), start + whole * section
            yield View(whole * step, rows, own.stride), View(place, rows, slot.local_stride(whole))
