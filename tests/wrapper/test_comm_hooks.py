"""Communication hooks, and the transport that leaves reductions to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from compare import assert_close, assert_equal
from fullshard import FullyShardedDataParallel, comm_hooks
from fullshard.comm import CommRequest, GradScaling, Operand, make_transport, record
from fullshard.comm.hooked import HookedTransport
from fullshard.comm_hooks import DefaultState, LowPrecisionState
from ranks import Rank, on_ranks

MEAN = GradScaling(1.0, 2.0)  # of two ranks


class Recorder:
    """A hook that notes what it got, does nothing, and is not a function."""

    seen: list[tuple[object, list[int], list[torch.dtype]]]

    def __init__(self) -> None:
        self.seen = []

    def __call__(self, state: object, *tensors: torch.Tensor) -> None:
        self.seen.append((state, [t.numel() for t in tensors], [t.dtype for t in tensors]))


def hooked(rank: Rank, hook: Any, state: Any = None) -> HookedTransport:
    return HookedTransport(make_transport(rank.group, rank.device), state, hook)


def noise(rank: int, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def numbers(rank: Rank, numel: int) -> Operand:
    """A reduce-scatter of ``numel`` elements per rank, of whole numbers."""
    region = torch.arange(rank.world_size * numel, dtype=torch.float32) * (rank.rank + 1)
    return Operand(torch.full((numel,), -1.0), region)


def sums(rank: Rank, numel: int) -> torch.Tensor:
    """What :func:`numbers` add up to on this rank."""
    total = sum(range(1, rank.world_size + 1))
    return torch.arange(rank.world_size * numel, dtype=torch.float32).chunk(rank.world_size)[rank.rank] * total


def wait(works: Any) -> None:
    for work in works:
        work.wait()


@on_ranks(4)
def test_reduce_scatter(rank: Rank) -> None:
    """The hook gets the first operand of each request, in order; the others are summed and divided underneath.

    Requests without operands, and empty gradients, are not the hook's business.
    """
    hook, state = Recorder(), object()
    transport = hooked(rank, hook, state)
    requests = [
        CommRequest("a", [numbers(rank, 5), numbers(rank, 2), numbers(rank, 70_000)], MEAN),
        CommRequest("b", [numbers(rank, 3)]),
        CommRequest("c", [numbers(rank, 70_000), numbers(rank, 1)], GradScaling(2.0, 1.0)),
    ]
    with record() as collectives:
        wait(transport.reduce_scatter(requests))
    n, single = rank.world_size, [torch.float32] * 2
    assert hook.seen == [(state, [numel * n, numel], single) for numel in (5, 3, 70_000)]
    assert hook.seen[0][0] is state
    for request in requests:
        first, *others = request.operands
        assert_equal(first.shard, torch.full_like(first.shard, -1.0), "untouched, as is the hook's region")
        assert_equal(first.unsharded, numbers(rank, first.shard.numel()).unsharded, "not divided")
        for operand in others:
            assert_equal(operand.shard, sums(rank, operand.shard.numel()) / 2, "others")
    assert [(c.kind, c.unit, c.numel) for c in collectives] == [
        ("reduce_scatter", request.unit, operand.unsharded.numel())
        for request in requests
        for operand in request.operands
    ]
    hook.seen = []
    other = numbers(rank, 2)
    wait(transport.reduce_scatter([]))
    wait(transport.reduce_scatter([CommRequest("a", []), CommRequest("b", [numbers(rank, 0), other])]))
    assert not hook.seen
    assert_equal(other.shard, sums(rank, 2), "what came with an empty one")


@on_ranks(4)
def test_all_reduce(rank: Rank) -> None:
    """Without a shard axis the hook gets one tensor, which it changes in place."""
    calls = []

    def hook(state: str, tensor: torch.Tensor) -> None:
        calls.append((state, tensor.numel()))
        dist.all_reduce(tensor)

    tensors = [torch.full((numel,), float(rank.rank + 1)) for numel in (7, 2)]
    wait(hooked(rank, hook, "mine").all_reduce([CommRequest("a", [Operand(t, t) for t in tensors], MEAN)]))
    total = float(sum(range(1, rank.world_size + 1)))
    assert calls == [("mine", 7)]
    assert_equal(tensors[0], torch.full((7,), total), "the hook's, not divided")
    assert_equal(tensors[1], torch.full((2,), total / 2), "the other's, divided")


@on_ranks(2)
def test_gathers_and_memory_are_those_of_the_base(rank: Rank) -> None:
    """Gathers do not reach the hook; sizes of units that travel together are the base's."""
    hook = Recorder()
    transport = hooked(rank, hook)
    region = torch.zeros(6)
    wait(transport.all_gather([CommRequest("a", [Operand(torch.full((3,), float(rank.rank)), region)])]))
    assert_equal(region, torch.tensor([0.0, 0, 0, 1, 1, 1]), "gathered")
    assert not hook.seen
    assert transport.tiny_bytes == transport.base.tiny_bytes
    assert transport.direct_bytes > 2**60, "gradients of a bucket are one move"
    assert transport.allocate("reduce_scatter", 4, torch.float32, rank.device) is None
    transport.separate_reduce_group(True)
    assert transport.reduce_group is transport.base.reduce_group


@on_ranks(4)
def test_plain_hooks_average(rank: Rank) -> None:
    """PyTorch's own hooks leave the mean over ranks."""
    state = DefaultState(rank.group)
    for numel in (1, 5, 70_000):
        everyone = [noise(r, rank.world_size * numel) for r in range(rank.world_size)]
        mean = torch.stack(everyone).mean(0)
        operand = Operand(torch.empty(numel), everyone[rank.rank].clone())
        transport = hooked(rank, comm_hooks.reduce_scatter_hook, state)
        wait(transport.reduce_scatter([CommRequest("a", [operand])]))
        expected = mean.chunk(rank.world_size)[rank.rank]
        assert_close(operand.shard, expected, f"reduce_scatter_hook of {numel}", rtol=1e-5, atol=1e-6)
        whole = everyone[rank.rank].clone()
        wait(hooked(rank, comm_hooks.allreduce_hook, state).all_reduce([CommRequest("a", [Operand(whole, whole)])]))
        assert_close(whole, mean, f"allreduce_hook of {numel}", rtol=1e-5, atol=1e-6)


@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("fp16_compress_hook", torch.float32),
        ("fp16_compress_hook", torch.bfloat16),
        ("bf16_compress_hook", torch.float32),
        ("bf16_compress_hook", torch.float16),
        ("bf16_compress_hook", torch.bfloat16),
    ],
)
def test_compressing_hooks(rank: Rank, name: str, given: torch.dtype) -> None:
    """The mean to the precision in which it travels; the dtype in which gradients are kept does not change."""
    hook, state = getattr(comm_hooks, name), LowPrecisionState(rank.group, parameter_type=given)
    low = torch.float16 if name.startswith("fp16") else torch.bfloat16
    eps = 2 * max(torch.finfo(low).eps, torch.finfo(given).eps)
    everyone = [noise(r, rank.world_size * 100).to(given) for r in range(rank.world_size)]
    mean = torch.stack(everyone).float().mean(0)
    region, piece = everyone[rank.rank].clone(), torch.empty(100, dtype=given)
    whole = region.clone()
    wait(hooked(rank, hook, state).reduce_scatter([CommRequest("a", [Operand(piece, region)])]))
    wait(hooked(rank, hook, state).all_reduce([CommRequest("a", [Operand(whole, whole)])]))
    assert piece.dtype is given and whole.dtype is given
    assert_close(piece.float(), mean.chunk(rank.world_size)[rank.rank], "sharded", rtol=eps, atol=eps)
    assert_close(whole.float(), mean, "replicated", rtol=eps, atol=eps)
    if given is torch.float32:
        assert (piece != mean.chunk(rank.world_size)[rank.rank]).any(), "it did travel in less precision"


@on_ranks(2)
@pytest.mark.parametrize("sharded", [True, False])
def test_new_memory(rank: Rank, sharded: bool) -> None:
    """A hook may give its tensors new memory, as PyTorch's compressing ones do: gradients are where they were."""

    def hook(state: object, grad: torch.Tensor, piece: torch.Tensor | None = None) -> None:
        grad.data = grad.data.half() * 2
        landed = grad if piece is None else piece
        landed.data = landed.data.half().fill_(3.0)
        landed.data = landed.data.float()

    operand = numbers(rank, 4) if sharded else Operand(whole := torch.ones(8), whole)
    transport = hooked(rank, hook)
    memory = operand.shard.data_ptr()
    wait((transport.reduce_scatter if sharded else transport.all_reduce)([CommRequest("a", [operand])]))
    assert operand.shard.data_ptr() == memory
    assert_equal(operand.shard, torch.full_like(operand.shard, 3.0), "result")


@on_ranks(2)
def test_wrong_results(rank: Rank) -> None:
    """A result of another dtype or size, and a hook that cannot be called, are refused with all that is known."""

    def forgets(state: object, grad: torch.Tensor, piece: torch.Tensor) -> None:
        piece.data = piece.data.half()

    def cuts(state: object, grad: torch.Tensor, piece: torch.Tensor) -> None:
        piece.data = piece.data[:2]

    with pytest.raises(TypeError, match=r"forgets left 4 elements of torch.float16 for unit 'a', expected 4 of .*32"):
        hooked(rank, forgets).reduce_scatter([CommRequest("a", [numbers(rank, 4)])])
    with pytest.raises(TypeError, match=r"cuts left 2 elements"):
        hooked(rank, cuts).reduce_scatter([CommRequest("a", [numbers(rank, 4)])])
    with pytest.raises(TypeError, match=r"communication hook has to be callable.*got str"):
        hooked(rank, "allreduce")


@on_ranks(2)
@pytest.mark.parametrize("where", [0, 1])
def test_raising_hook(rank: Rank, where: int) -> None:
    """The user's exception comes out, on this rank only if it raised there only; all other messages have landed."""

    def hook(state: object, grad: torch.Tensor, piece: torch.Tensor) -> None:
        if rank.rank == where and piece.numel() == 3:
            raise ZeroDivisionError("of the user")

    requests = [CommRequest("a", [numbers(rank, 3), numbers(rank, 2)]), CommRequest("b", [numbers(rank, 70_000)] * 2)]
    transport = hooked(rank, hook)
    if rank.rank == where:
        with pytest.raises(ZeroDivisionError, match="of the user"):
            transport.reduce_scatter(requests)
    else:
        wait(transport.reduce_scatter(requests))
    for request in requests:
        assert_equal(request.operands[1].shard, sums(rank, request.operands[1].shard.numel()), "landed")
    after = numbers(rank, 3)
    wait(make_transport(rank.group, rank.device).reduce_scatter([CommRequest("c", [after])]))
    assert_equal(after.shard, sums(rank, 3), "the group goes on")


def test_names() -> None:
    """States and plain hooks are PyTorch's own objects."""
    from torch.distributed.algorithms._comm_hooks import default_hooks

    for name in ("DefaultState", "LowPrecisionState", "allreduce_hook", "reduce_scatter_hook"):
        assert getattr(comm_hooks, name) is getattr(default_hooks, name)
    assert all(hasattr(default_hooks, name) for name in comm_hooks.__all__)


# -------------------------------------------------------------------- through the wrapper


def gradients(model: FullyShardedDataParallel) -> dict[str, torch.Tensor]:
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
