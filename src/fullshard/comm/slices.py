"""Where parameters, or their gradients, lie in a message: what a quantized transport has to know of it."""

from __future__ import annotations

from typing import NamedTuple

from fullshard.layout import PerParameterLayout, Route

__all__ = ["Slice", "slices_of"]


class Slice(NamedTuple):
    """The elements of a shard that belong to one parameter, or to parameters that are sent as one.

    Args:
        offset: First element.
        numel: Number of elements, padding included.
        nbytes: Size of all of it, unsharded, in the dtype in which it is sent. Quantization depends on it.
    """

    offset: int
    numel: int
    nbytes: int


def slices_of(layout: PerParameterLayout, start: int, itemsize: int) -> tuple[Slice, ...]:
    """The slices of a layout's shard buffer from element ``start`` on: parameters that are cut over the ranks.

    Args:
        layout: Of the buffer.
        start: Offsets are counted from here; what lies before is left out.
        itemsize: Bytes per element in the dtype in which it is sent.
    """
    slots = [
        slot
        for slot in layout.slots
        if slot.shard_offset >= start and slot.shard_numel and slot.route is not Route.REPLICATED
    ]
    slices = [Slice(s.shard_offset - start, s.shard_numel, s.parameter.numel * itemsize) for s in slots]
    return tuple(sorted(slices))
