"""Layouts, without ranks: the pieces of all ranks are those of torch.chunk and reassemble to every parameter."""

from __future__ import annotations

import dataclasses
import math
import sys
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.layout import FlatLayout, ParameterShape, PerParameterLayout, Route, Slot
from fullshard.layout.per_parameter import ALIGNMENT_BYTES, contiguous_stride, is_dense
from fullshard.layout.regions import Region, regions_of_range
from fullshard.ragged.layout import granule_of, ragged_layout

WORLDS = st.sampled_from([1, 2, 3, 4, 5, 8])
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.uint8])


@st.composite
def parameter_shapes(draw: st.DrawFn) -> list[ParameterShape]:
    """Up to five parameters of 0 to 3 dims, their dims in any order in memory, any dim cut."""
    parameters = []
    for index in range(draw(st.integers(1, 5))):
        shape = draw(st.lists(st.integers(0, 9), max_size=3))
        order = draw(st.permutations(range(len(shape))))
        memory = torch.empty([shape[dim] for dim in order])
        inverse = [order.index(dim) for dim in range(len(shape))]
        stride = memory.permute(inverse).stride()
        replicated = draw(st.booleans()) and draw(st.booleans())
        cut = draw(st.integers(0, max(len(shape) - 1, 0)))
        parameters.append(ParameterShape(f"p{index}", tuple(shape), tuple(stride), replicated, cut))
    return parameters


@st.composite
def layouts(draw: st.DrawFn) -> tuple[PerParameterLayout, torch.dtype]:
    """A layout of such parameters, with thresholds at which some are sent directly."""
    dtype = draw(DTYPES)
    layout = PerParameterLayout.build(
        tuple(draw(parameter_shapes())),
        world_size=draw(WORLDS),
        itemsize=dtype.itemsize,
        direct_bytes=draw(st.sampled_from([0, 16, 64, 10**9])),
    )
    return layout, dtype


def values_of(parameter: ParameterShape, dtype: torch.dtype) -> torch.Tensor:
    """Distinct values (as far as the dtype goes) in a tensor of this shape and stride."""
    tensor = torch.empty_strided(parameter.shape, parameter.stride, dtype=dtype)
    return tensor.copy_((torch.arange(parameter.numel) % 251 + 1).view(parameter.shape))


def chunk_of(full: torch.Tensor, rank: int, world_size: int, dim: int) -> torch.Tensor:
    pieces = full.chunk(world_size, dim) if full.shape[dim] else ()
    return pieces[rank] if rank < len(pieces) else full.narrow(dim, 0, 0)


def fill_shard(layout: PerParameterLayout, rank: int, values: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """One rank's shard buffer, with each parameter's torch.chunk piece in one block where the layout says."""
    shard = torch.zeros(layout.shard_numel, dtype=dtype)
    for slot, full in zip(layout.slots, values, strict=True):
        whole = slot.route is Route.REPLICATED or layout.world_size == 1
        piece = full if whole else chunk_of(full, rank, layout.world_size, slot.parameter.cut)
        shape, stride = slot.local_shape(rank), slot.local_stride(rank)
        assert shape == tuple(piece.shape) and is_dense(shape, stride) and piece.numel() <= slot.shard_numel
        if not whole and not slot.row_major:
            assert stride == torch.empty(shape).stride()
        elif whole or (piece.numel() and slot.rows > 1):  # shards are neighbors in the parameter's own order
            assert stride == piece.stride() and piece.storage_offset() == (0 if whole else rank * slot.shard_numel)
        shard.as_strided(shape, stride, slot.shard_offset).copy_(piece)
    return shard


def all_gather(layout: PerParameterLayout, shards: list[torch.Tensor]) -> torch.Tensor:
    """What an all-gather of each direct piece and of the packed message makes of the shards, by plain loops."""
    full = torch.zeros(layout.unsharded_numel, dtype=shards[0].dtype)
    for slot in layout.slots:
        for rank, shard in enumerate(shards):
            piece = shard[slot.shard_offset : slot.shard_offset + slot.shard_numel]
            region = full[slot.unsharded_offset : slot.unsharded_offset + slot.unsharded_numel]
            if slot.route is Route.REPLICATED:
                region.copy_(piece)
            elif slot.row_major:
                region[rank * slot.shard_numel : (rank + 1) * slot.shard_numel].copy_(piece)
            else:
                rows = piece.as_strided(slot.local_shape(rank), slot.local_stride(rank))
                start, stop = slot.local_rows(rank)
                whole = region.as_strided(slot.parameter.shape, slot.parameter.stride)
                whole.narrow(slot.parameter.cut, start, stop - start).copy_(rows)
    return full


@given(layouts())
@settings(max_examples=150)
def test_shards(drawn: tuple[PerParameterLayout, torch.dtype]) -> None:
    """Each rank has torch.chunk's rows of each parameter, in one block; together they give it with its own strides."""
    layout, dtype = drawn
    values = [values_of(slot.parameter, dtype) for slot in layout.slots]
    shards = [fill_shard(layout, rank, values, dtype) for rank in range(layout.world_size)]
    full = all_gather(layout, shards)
    for slot, value in zip(layout.slots, values, strict=True):
        found = full.as_strided(slot.parameter.shape, slot.parameter.stride, slot.unsharded_offset)
        assert torch.equal(found, value), slot


@given(layouts())
@settings(max_examples=150)
def test_places(drawn: tuple[PerParameterLayout, torch.dtype]) -> None:
    """Shards and unsharded parameters start aligned and inside their buffer, and no element belongs to two."""
    layout, dtype = drawn
    assert layout.alignment * dtype.itemsize == ALIGNMENT_BYTES
    shards = [(s.shard_offset, s.shard_numel) for s in layout.slots]
    unsharded = [(s.unsharded_offset, s.unsharded_numel) for s in layout.slots]
    for spans, size in ((shards, layout.shard_numel), (unsharded, layout.unsharded_numel)):
        taken = [offset + i for offset, numel in spans for i in range(numel)]
        assert len(taken) == len(set(taken)) and all(0 <= element < size for element in taken)
    assert all(offset % layout.alignment == 0 for offset, _ in unsharded)
    for offset, numel in shards:
        step = next(step for step in (1, 2, 4, 8, 16, 32, 64) if step >= min(numel, layout.alignment))
        assert offset % step == 0
    assert not layout.message_numel * dtype.itemsize % 16
    assert not layout.message_numel or not layout.message_offset % layout.alignment
    end = layout.message_offset + layout.message_numel
    most = bound = 0
    for slot in layout.slots:
        inside = layout.message_offset <= slot.shard_offset and slot.shard_offset + slot.shard_numel <= end
        if slot.shard_numel:
            assert inside == (slot.route is not Route.DIRECT)
            most += inside * -(-slot.shard_numel // layout.alignment) * layout.alignment
        if slot.route is Route.DIRECT:
            assert slot.row_major and slot.shard_numel * dtype.itemsize % 16 == 0
        share = slot.parameter.numel if slot.route is Route.REPLICATED else slot.parameter.numel / layout.world_size
        bound += share + slot.row_numel * (slot.route is not Route.REPLICATED) + layout.alignment
    assert layout.message_numel <= most
    assert layout.shard_numel <= bound


@given(
    parameter_shapes(), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 3, 5]), st.sampled_from([0, 64, 10**9])
)
def test_a_smaller_group_uses_the_buffer_of_a_larger(
    parameters: list[ParameterShape], ranks: int, multiple: int, direct_bytes: int
) -> None:
    """For k | N nothing over k ranks exceeds that over N, so the k-layout fits N's full buffer and fills it alike."""
    larger = PerParameterLayout.build(tuple(parameters), world_size=ranks * multiple, itemsize=2, direct_bytes=64)
    layout = PerParameterLayout.build(
        tuple(parameters), world_size=ranks, itemsize=2, direct_bytes=direct_bytes, within=larger
    )
    assert layout.unsharded_numel == larger.unsharded_numel
    assert layout == larger or multiple > 1 or direct_bytes != 64
    values = [values_of(parameter, torch.int16) for parameter in parameters]
    full = all_gather(layout, [fill_shard(layout, rank, values, torch.int16) for rank in range(ranks)])
    for slot, other, value in zip(layout.slots, larger.slots, values, strict=True):
        assert slot.unsharded_offset == other.unsharded_offset and slot.unsharded_numel <= other.unsharded_numel
        assert torch.equal(full.as_strided(value.shape, value.stride(), other.unsharded_offset), value)


def test_a_message_of_single_elements_has_no_gaps() -> None:
    """Sixteen norms of fewer elements than ranks make a message of sixteen elements per rank."""
    shapes = [ParameterShape(f"norm{i}", (4096,), (1,)) for i in range(16)]
    layout = PerParameterLayout.build(tuple(shapes), world_size=16384, itemsize=4, direct_bytes=1 << 15)
    assert layout.message_numel == 16 and [slot.shard_offset for slot in layout.slots] == list(range(16))


def test_a_layout_costs_the_same_for_any_number_of_ranks() -> None:
    """Building one calls as many functions for 16,384 ranks as for 8."""

    def calls(world_size: int) -> int:
        count = 0

        def seen(*_: object) -> None:
            nonlocal count
            count += 1

        shapes = [ParameterShape("w", (1 << 20, 8), (8, 1)), ParameterShape("b", (1 << 20,), (1,))]
        sys.setprofile(seen)
        try:
            PerParameterLayout.build(tuple(shapes), world_size=world_size, itemsize=4, direct_bytes=16)
        finally:
            sys.setprofile(None)
        return count

    assert calls(16384) == calls(8)


DENSE = [((), ()), ((3,), (1,)), ((4, 3), (3, 1)), ((4, 3), (1, 4)), ((1, 3), (77, 1)), ((0, 3), (5, 9))]
DENSE += [((2, 3, 4), (12, 1, 3))]
SPARSE = [((3,), (2,)), ((3,), (0,)), ((4, 3), (4, 1)), ((4, 3), (0, 1)), ((1, 3), (3, 77)), ((4, 3), (3,))]


def test_only_dense_parameters_are_laid_out() -> None:
    """Strides are dense if the tensor fills one block; others, and a cut outside of the dims, are refused by name."""
    for shape, stride in DENSE:
        assert is_dense(shape, stride)
        assert ParameterShape("w", shape, stride).numel == math.prod(shape)
        if shape:  # nothing is cut of a replicated parameter
            assert ParameterShape("w", shape, stride, replicated=True, cut=len(shape)).shape == shape
            with pytest.raises(ValueError, match=f"w: expected a dim to shard from 0 to {len(shape) - 1}, found"):
                ParameterShape("w", shape, stride, cut=len(shape))
    for shape, stride in SPARSE:
        assert not is_dense(shape, stride)
        with pytest.raises(ValueError, match="w: expected dense"):
            ParameterShape("w", shape, stride)


def make(**options: Any) -> PerParameterLayout:
    shapes = [ParameterShape("w", (64, 8), (8, 1)), ParameterShape("b", (7,), (1,)), ParameterShape("s", (), ())]
    return PerParameterLayout.build(tuple(shapes), world_size=2, itemsize=4, direct_bytes=512, **options)


def slot_of(shape: tuple[int, ...], stride: tuple[int, ...], cut: int, world_size: int, direct_bytes: int = 0) -> Slot:
    """The slot of one fp32 parameter; unless said otherwise a message of its own always pays."""
    parameter = ParameterShape("w", shape, stride, cut=cut)
    layout = PerParameterLayout.build((parameter,), world_size=world_size, itemsize=4, direct_bytes=direct_bytes)
    return layout.slots[0]


@pytest.mark.parametrize(
    ("stride", "cut", "world_size", "route"),
    [
        ((16, 1), 0, 2, Route.DIRECT),
        ((16, 1), 1, 2, Route.PACKED),
        ((1, 8), 0, 2, Route.PACKED),
        ((1, 8), 1, 2, Route.DIRECT),
        ((16, 1), 1, 1, Route.DIRECT),
        ((1, 8), 0, 1, Route.PACKED),
        ((1, 8), 1, 1, Route.DIRECT),
    ],
)
def test_routes(stride: tuple[int, int], cut: int, world_size: int, route: Route) -> None:
    """A parameter goes directly where its rows are blocks of memory; on one rank also with any cut but 0."""
    piece_bytes = -(-(8, 16)[cut] // world_size) * (16, 8)[cut] * 4
    for direct_bytes, expected in ((0, route), (piece_bytes, route), (piece_bytes + 1, Route.PACKED)):
        slot = slot_of((8, 16), stride, cut, world_size, direct_bytes)
        assert slot.route is expected and slot.row_major == (route is Route.DIRECT or world_size == 1)
    assert [slot.route for slot in make().slots] == [Route.DIRECT, Route.PACKED, Route.REPLICATED]
    for rank in (0, 1):  # a dim of size 1 that is cut may have any stride; in the shard it has that of a row
        assert slot_of((1, 3), (77, 1), 0, world_size=2).local_stride(rank) == (3, 1)
        assert slot_of((4, 1), (1, 77), 1, world_size=2).local_stride(rank) == (1, 4)


def test_a_buffer_that_does_not_fit_is_refused() -> None:
    """The layout that another one is built within has the same parameters, aligned alike, and room for all of them."""

    def build(world_size: int, *rows: int, **options: Any) -> PerParameterLayout:
        shapes = [ParameterShape(f"p{i}", (size, 16), (16, 1)) for i, size in enumerate(rows)]
        return PerParameterLayout.build(tuple(shapes), world_size=world_size, itemsize=4, direct_bytes=0, **options)

    with pytest.raises(ValueError, match="expected a layout of the same 2 parameters, found one of 1"):
        build(2, 4, 4, within=build(4, 4))
    with pytest.raises(ValueError, match="unsharded buffer: p1 at 48 overlaps p0"):
        build(2, 3, 3, within=build(1, 3, 3))
    with pytest.raises(ValueError, match="unsharded buffer: p0 ends at 64, beyond the buffer's 48 elements"):
        build(2, 3, within=build(1, 3))
    with pytest.raises(ValueError, match="unsharded buffer: p1 starts at 16"):
        build(1, 1, 1, alignment_bytes=128, within=build(1, 1, 1))


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (1, {"unsharded_offset": 8}, "unsharded buffer: b starts at 8, not a multiple of 16"),
        (1, {"unsharded_offset": 16}, "unsharded buffer: b at 16 overlaps w"),
        (1, {"unsharded_offset": 10**4 * 16}, "unsharded buffer: b ends at .* beyond the buffer"),
        (1, {"shard_offset": 0}, "shard buffer: (b|w) at 0 overlaps (b|w)"),
        (1, {"shard_offset": 257}, "shard buffer: b starts at 257"),
        (2, {"shard_offset": 16 * 10**4}, "shard buffer: s ends at .* beyond the buffer"),
        (1, {"route": Route.DIRECT}, "b: .* on the wrong side of the packed message"),
        (0, {"route": Route.PACKED}, "w: .* on the wrong side of the packed message"),
    ],
)
def test_invalid_layouts_are_refused(index: int, change: dict[str, object], message: str) -> None:
    """A layout with overlap, misalignment, or something out of bounds or on the wrong side cannot exist."""
    layout = make()
    slots = list(layout.slots)
    slots[index] = dataclasses.replace(slots[index], **change)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(layout, slots=tuple(slots))
    for field in ("shard_numel", "unsharded_numel"):  # too small
        with pytest.raises(ValueError, match=f"{field.split('_')[0]} buffer: .* beyond the buffer's 16 elements"):
            dataclasses.replace(layout, **{field: 16})
    assert layout == make() == make(within=layout) and hash(layout) == hash(make())


def test_flattened_parameters_are_aligned() -> None:
    """Each begins at a multiple of four elements, wherever the one before it ends."""
    shapes = [ParameterShape("w", (3, 3), (3, 1)), ParameterShape("b", (3,), (1,)), ParameterShape("c", (2,), (1,))]
    assert [slot.unsharded_offset for slot in FlatLayout.build(tuple(shapes), world_size=2).slots] == [0, 12, 16]


@given(
    parameter_shapes(),
    st.lists(st.sampled_from(["element", "row", "parameter", 1, 2, 3]), min_size=5, max_size=5),
    WORLDS,
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, 9),
)
def test_ragged_slices_end_between_granules(
    parameters: list[ParameterShape], chosen: list[str | int], world_size: int, alignment: int, first_rank: int
) -> None:
    """Slices are equal, aligned, and complete; no cut is inside of a granule; parameters do not overlap."""
    parameters = [dataclasses.replace(each, replicated=False, cut=0) for each in parameters]
    granularities = chosen[: len(parameters)]
    make = partial(ragged_layout, tuple(parameters), tuple(granularities), world_size=world_size, alignment=alignment)
    layout, usual = make(first_rank=first_rank), make()
    whole = all(granule_of(p, g) >= p.numel for p, g in zip(parameters, granularities, strict=True))
    for rank, shards in enumerate(map(usual.shards, range(world_size))):
        moved = layout.shards((rank + first_rank * whole) % world_size)
        assert [shard[:2] for shard in moved if shard.numel] == [shard[:2] for shard in shards if shard.numel]
    assert [slot.parameter for slot in layout.slots] == parameters and layout.slice_numel % alignment == 0
    taken = [0] * layout.unsharded_numel
    for slot, granularity in zip(layout.slots, granularities, strict=True):
        granule, numel = granule_of(slot.parameter, granularity), slot.parameter.numel
        assert slot.unsharded_offset % alignment == 0
        shards = [slot.shard(rank) for rank in range(world_size)]
        assert sum(shard.numel for shard in shards) == numel
        for shard in shards:
            end = shard.start + shard.numel
            assert not shard.numel or (shard.start % granule == 0 and (end % granule == 0 or end == numel))
        for element in range(slot.unsharded_offset, slot.unsharded_offset + numel):
            taken[element] += 1
    assert max(taken, default=0) <= 1


def _shapes(**shapes: tuple[int, ...]) -> list[ParameterShape]:
    return [ParameterShape(name, shape, contiguous_stride(shape)) for name, shape in shapes.items()]


def _llama() -> list[ParameterShape]:
    square, narrow, up, down, norm = (4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336), (4096,)
    return _shapes(q=square, k=narrow, v=narrow, o=square, gate=up, up=up, down=down, norm_1=norm, norm_2=norm)


MODELS = {
    "Llama 8B": _llama(),
    "ConvNeXt": _shapes(deep=(1024, 1, 7, 7), deep_b=(1024,), norm=(1024,), norm_b=(1024,), up=(4096, 1024))
    + _shapes(up_b=(4096,), down=(1024, 4096), down_b=(1024,), scale=(1024,)),
    "64 experts": _shapes(q=(2048, 2048), o=(2048, 2048), router=(64, 2048), norm=(2048,))
    + [each for i in range(64) for each in _shapes(**{f"{i}.up": (1408, 2048), f"{i}.down": (2048, 1408)})],
}
# Share of padding with cuts between rows. Where it is more than 0.03, no order of the parameters has less: slices have
# to be a multiple of the rows of all that are cut twice.
ROWS = {
    "Llama 8B": (0.0002, 0.0013, 0.01, 0.077),
    "ConvNeXt": (0.001, 0.025, 0.056, 2.5),
    "64 experts": (0.001, 0.002, 0.002, 0.039),
}


@pytest.mark.parametrize("name", MODELS)
def test_padding_of_ragged_slices(name: str) -> None:
    """Cut anywhere, blocks of models have no padding worth a word on 8 to 1,024 ranks; cut between rows, as noted."""
    parameters = tuple(MODELS[name])
    total = sum(each.numel for each in parameters)
    for ranks, by_rows in zip((8, 64, 128, 1024), ROWS[name], strict=True):
        for granularity, most in (("element", 0.002), ("row", by_rows)):
            found = ragged_layout(tuple(parameters), (granularity,) * len(parameters), world_size=ranks, alignment=8)
            padding = found.unsharded_numel / total - 1
            assert padding <= most, (ranks, granularity, padding)


def test_whole_matrices_on_ranks() -> None:
    """Figures of docs/design/ragged.md: padding, and the work of Muon on the busiest rank, of the mean."""
    block = tuple(_llama())
    for blocks, size in ((1, 2.154), (2, 1.077)):
        layout = ragged_layout(block * blocks, ("parameter",) * len(block) * blocks, world_size=8, alignment=8)
        assert layout.unsharded_numel / sum(each.numel for each in block * blocks) == pytest.approx(size, abs=1e-3)
    for step, most in ((0, 2.218), (1, 1.0)):
        work = [0] * 8
        for first_rank in (step * number for number in range(32)):
            layout = ragged_layout(block, ("parameter",) * len(block), world_size=8, alignment=8, first_rank=first_rank)
            for rank in range(8):
                held = zip(layout.slots, layout.shards(rank), strict=True)
                shapes = [slot.parameter.shape for slot, shard in held if shard.numel]
                work[rank] += sum(math.prod(shape) * min(shape) for shape in shapes if len(shape) == 2)
        assert max(work) / (sum(work) / 8) == pytest.approx(most, abs=1e-3)


def test_ranges_inside_of_one_row() -> None:
    """A range that neither begins nor ends where a row does is one region of that row."""
    assert regions_of_range((3, 5), 6, 2) == [Region((1, 1), (1, 2))]
    assert regions_of_range((3, 5), 3, 4) == [Region((0, 3), (1, 2)), Region((1, 0), (1, 2))]
