"""Blocks of 8-bit values, and the transport that sends them: values, bits and bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

from compare import assert_close, assert_equal
from fullshard.comm import (
    CollectiveTransport,
    CommRequest,
    GlooTransport,
    GradScaling,
    Operand,
    Slice,
    Transport,
    record,
)
from fullshard.comm.quantized.blocks import BlockFormat
from fullshard.comm.quantized.transport import QuantizedTransport
from fullshard.policy import CommQuantization
from pairwise import each_value
from ranks import Rank, on_ranks
from ranks.device import device_type

BLOCK = 32
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Gloo sends and receives host memory only.
KINDS = [GlooTransport, CollectiveTransport] if device_type() == "cpu" else [CollectiveTransport]
TRANSPORTS = pytest.mark.parametrize("base", KINDS, ids=lambda kind: kind.__name__)
BOTH = pytest.mark.parametrize("name", ["int8", "fp8"])


def largest_of_block(values: torch.Tensor) -> torch.Tensor:
    """For each value the largest magnitude in its block, in fp32."""
    parts = values.to(torch.float32).split(BLOCK)
    return torch.cat([part.abs().max().expand(part.numel()) for part in parts])


def through(form: BlockFormat, values: torch.Tensor) -> torch.Tensor:
    """``values``, (m, n), encoded and decoded."""
    rows = torch.full((values.shape[0], form.rows(values.shape[1]), form.row_bytes), 255, dtype=torch.uint8)
    form.encode(values, rows)
    decoded = torch.full_like(values, 7.0)
    form.decode(rows, decoded)
    return decoded


def mixed(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers of very different sizes."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(numel, generator=generator) * torch.rand(numel, generator=generator) ** 4).to(dtype)


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_are_bounded(name: Literal["int8", "fp8"], dtype: torch.dtype) -> None:
    """int8 is off by half a step of the block; fp8 by a sixteenth of the value, or half its smallest step."""
    values = mixed(3, 20_001, dtype)
    found = through(BlockFormat(name, BLOCK), values.unsqueeze(0))[0]
    largest, own = largest_of_block(values), values.to(torch.float32)
    bound = largest / 254 if name == "int8" else torch.maximum(own.abs() / 16, largest / 448 / 1024)
    error = (found.to(torch.float32) - own).abs()
    rounding = 0.5 * torch.finfo(dtype).eps * found.to(torch.float32).abs()  # of the result, to its own dtype
    assert bool((error <= 1.0001 * bound + rounding + torch.finfo(dtype).tiny * torch.finfo(dtype).eps).all())
    assert (error / bound).max() > 0.8, "a bound that is this loose says nothing"


@BOTH
def test_special_blocks(name: Literal["int8", "fp8"]) -> None:
    """Zeros stay zeros, values too small for a scale become zeros, and a block with inf or NaN is NaN, alone."""
    ones = torch.ones(BLOCK)
    blocks = {
        "ones": ones,
        "zeros": 0 * ones,
        "denormal": 1e-40 * ones,
        "small": 1e-30 * ones,
        "large": 3e38 * ones,
        "inf": torch.cat([torch.tensor([math.inf]), ones[1:]]),
        "-inf": torch.cat([torch.tensor([0.0, -math.inf]), ones[2:]]),
        "nan": torch.cat([ones[1:], torch.tensor([math.nan])]),
        "ones again": ones,
        "rest": torch.tensor([math.inf, 1.0]),
    }
    found = through(BlockFormat(name, BLOCK), torch.cat(list(blocks.values())).unsqueeze(0))[0]
    parts = dict(zip(blocks, found.split(BLOCK), strict=True))
    for same in ("ones", "zeros", "small", "large", "ones again"):
        assert_close(parts[same], blocks[same], same, rtol=1e-6)
    assert_equal(parts["denormal"], 0 * ones, "denormal")
    for lost in ("inf", "-inf", "nan", "rest"):
        assert bool(parts[lost].isnan().all()), lost


def wait(works: object) -> None:
    for work in works:
        work.wait()


def everyones(tensor: torch.Tensor, rank: Rank) -> list[torch.Tensor]:
    """``tensor`` of every rank."""
    found = [torch.empty_like(tensor) for _ in range(rank.world_size)]
    dist.all_gather(found, tensor)
    return found


def assert_same_bits(tensors: Sequence[torch.Tensor], rank: Rank, what: str) -> None:
    """Require equal tensors on all ranks."""
    for tensor in tensors:
        for other in everyones(tensor, rank):
            assert_equal(other, tensor, what)


@on_ranks(2)
@TRANSPORTS
@each_value(name=["int8", "fp8"], dtype=DTYPES)
def test_gathers(rank: Rank, base: Callable[..., Transport], name: Any, dtype: torch.dtype) -> None:
    """Every rank has the same bits: those of the reference where it is large; the rest as it was sent."""
    world, form = rank.world_size, BlockFormat(name, BLOCK)
    transport = QuantizedTransport(base(rank.group), CommQuantization(all_gather=name, block=BLOCK, min_bytes=800))
    pieces = {numel: mixed(rank.rank, numel, dtype) for numel in (3, 1001, 640)}
    pieces[2000] = torch.arange(2000) + rank.rank  # integers are never quantized
    operands = [Operand.of_parameter(piece, piece.new_zeros(numel * world)) for numel, piece in pieces.items()]
    with record() as seen:
        wait(transport.all_gather([CommRequest("unit", operands)]))
    assert_same_bits([operand.unsharded for operand in operands], rank, "unsharded")
    for numel, operand in zip(pieces, operands, strict=True):
        sent = everyones(operand.shard, rank)
        exact = numel in (3, 2000)
        expected = torch.cat(sent if exact else [through(form, part.unsqueeze(0))[0] for part in sent])
        assert_equal(operand.unsharded, expected, str(numel))
    assert [c.dtype for c in seen] == [dtype, form.dtype, form.dtype, torch.int64]
    assert seen[1].nbytes == (world - 1) * 32 * (BLOCK + 4)  # 1,001 values are 32 blocks


@on_ranks(2)
@TRANSPORTS
def test_small_elements_of_a_message(rank: Rank, base: Callable[..., Transport]) -> None:
    """Elements in no slice, or in a small one, are sent exactly in the same message, and share no block with others."""
    policy = CommQuantization(all_gather="int8", reduce="int8", block=BLOCK, min_bytes=100)
    transport = QuantizedTransport(base(rank.group), policy)
    slices = (Slice(0, 200, 1600), Slice(200, 3, 24))
    piece = torch.cat([1e6 * mixed(rank.rank, 200), torch.full((5,), 1 / 3)])
    gather = Operand(piece, torch.zeros(410), slices)
    wait(transport.all_gather([CommRequest("unit", [gather])]))
    reduce = Operand(torch.zeros(205), piece.repeat(2), slices)
    wait(transport.reduce_scatter([CommRequest("unit", [reduce], GradScaling(after=2.0))]))
    tensor = piece.clone()
    wait(transport.all_reduce([CommRequest("unit", [Operand(tensor, tensor, slices)], GradScaling(after=2.0))]))
    for found in (gather.unsharded[200:205], gather.unsharded[405:], reduce.shard[200:], tensor[200:]):
        assert_equal(found, torch.full((5,), 1 / 3), "small")
    sums = sum(everyones(piece, rank)) / 2
    bound = 1e6 / 127
    for found in (reduce.shard, tensor):
        assert (found[:200] - sums[:200]).abs().max() < 2 * bound


@on_ranks(3)
@TRANSPORTS
def test_reductions(rank: Rank, base: Callable[..., Transport]) -> None:
    """The sum in fp32 of this rank's own part and the others' quantized ones, divided; within the bound."""
    world = rank.world_size
    policy = CommQuantization(reduce="int8", block=BLOCK, min_bytes=800)
    transport = QuantizedTransport(base(rank.group), policy)
    for dtype in DTYPES:
        for scaling in (GradScaling(after=world), GradScaling(2.0, 3.0, native=False)):
            factor = scaling.before * scaling.after
            operands = [
                Operand.of_parameter(torch.zeros(numel, dtype=dtype), mixed(rank.rank, numel * world, dtype))
                for numel in (5, 1001, 640)
            ]
            regions = [everyones(operand.unsharded, rank) for operand in operands]
            with record() as seen:
                wait(transport.reduce_scatter([CommRequest("unit", operands, scaling)]))
            for operand, sent in zip(operands, regions, strict=True):
                numel = operand.shard.numel()
                parts = [region.view(world, numel)[rank.rank] for region in sent]
                exact = sum(part.to(torch.float32) for part in parts) / factor
                eps = torch.finfo(dtype).eps
                if numel == 5:
                    assert_close(operand.shard.float(), exact, "small", rtol=4 * eps, atol=4 * eps)
                    continue
                form = BlockFormat("int8", BLOCK)
                terms = [
                    part.float() if r == rank.rank else through(form, part.unsqueeze(0).float())[0]
                    for r, part in enumerate(parts)
                ]
                assert_close(operand.shard.float(), sum(terms) / factor, f"{dtype}", rtol=2 * eps, atol=2 * eps)
                others = sum(largest_of_block(part) for r, part in enumerate(parts) if r != rank.rank)
                error = (operand.shard.float() - exact).abs()
                assert bool((error <= 1.001 * others / 254 / factor + eps * exact.abs() + 1e-6).all())
            assert [c.dtype for c in seen] == [dtype, torch.int8, torch.int8]
            assert seen[1].nbytes == (world - 1) * 32 * (BLOCK + 4) and seen[1].numel == 1001 * world


@on_ranks(3)
@TRANSPORTS
def test_all_reductions(rank: Rank, base: Callable[..., Transport]) -> None:
    """All ranks have the same bits, within half a step of every block on either way."""
    world = rank.world_size
    transport = QuantizedTransport(base(rank.group), CommQuantization(reduce="int8", block=BLOCK, min_bytes=800))
    for dtype in DTYPES:
        tensors = [mixed(rank.rank, numel, dtype) for numel in (5, 1001, 640)]
        sent = [everyones(tensor, rank) for tensor in tensors]
        with record() as seen:
            operands = [Operand.of_parameter(tensor, tensor) for tensor in tensors]
            wait(transport.all_reduce([CommRequest("unit", operands, GradScaling(after=world))]))
        assert_same_bits(tensors, rank, f"{dtype}")
        for tensor, parts in zip(tensors, sent, strict=True):
            exact = sum(part.float() for part in parts) / world
            largest = sum(largest_of_block(part) for part in parts) / world
            bound = 2.01 * largest / 254 if tensor.numel() > 5 else 0 * largest
            eps = torch.finfo(dtype).eps
            assert bool(((tensor.float() - exact).abs() <= bound + 2 * eps * (largest + exact.abs())).all())
        rows = 32 + 20
        assert sum(c.nbytes for c in seen[1:]) == 2 * (world - 1) * -(-rows // world) * (BLOCK + 4)
