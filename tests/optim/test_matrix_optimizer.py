"""Owners of matrices: balance, bytes, rounds, missing gradients, and optimizers of one's own."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from compare import assert_equal
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import fully_shard
from fullshard.errors import FullshardError
from fullshard.optim import MatrixOptimizer, Muon
from fullshard.optim.muon.exchange import Assignment, PendingExchange
from ranks import Rank, on_ranks


def loads_of(assigned: Assignment, work: Sequence[float], ranks: int) -> list[float]:
    """Return the work of each rank."""
    pairs = [*zip(assigned.owner_ranks, work, strict=True)]
    return [sum(amount for owner, amount in pairs if owner == rank) for rank in range(ranks)]


def test_heavy_matrices_are_assigned_first() -> None:
    """One that comes last in the model does not go on top of what its rank has already."""
    work = [1, 1, 1, 1, 4]
    assert loads_of(Assignment.build(work, work, 2, 100), work, 2) == [4, 4]


works = st.lists(st.integers(1, 1000), max_size=40)


@given(works, st.integers(1, 9), st.integers(1, 2000))
def test_balance(work: list[int], ranks: int, round_bytes: int) -> None:
    """Nobody has more than the mean and one matrix; every matrix is in one round, and no round is too large."""
    assigned = Assignment.build(work, work, ranks, round_bytes)
    loads = loads_of(assigned, work, ranks)
    assert max(loads) <= sum(work) / ranks + (1 - 1 / ranks) * max(work, default=0) + 1e-6
    assert sorted(itertools.chain(*assigned.rounds)) == list(range(len(work)))
    assert assigned == Assignment.build(list(work), list(work), ranks, round_bytes)
    for members in assigned.rounds:
        for rank in range(ranks):
            own = [work[index] for index in members if assigned.owner_ranks[index] == rank]
            assert sum(own) <= round_bytes or len(own) == 1


class Cubed(MatrixOptimizer):
    """Plain descent along ``G G^T G``, counting what it is called with."""

    def __init__(self, params: Any, lr: float = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr}, **options)
        self.calls: list[str] = []

    def prepare(self, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        self.calls.append("prepare")
        state["sum"] = state["sum"] + gradient if "sum" in state else gradient.clone()
        return state["sum"]

    def update(self, matrix: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        self.calls.append("update")
        return matrix @ matrix.T @ matrix

    def apply(
        self, parameter: torch.Tensor, update: torch.Tensor, shape: tuple[int, int], group: dict[str, Any]
    ) -> None:
        self.calls.append("apply")
        parameter.add_(update, alpha=-group["lr"])


def stack_of(count: int, rows: int = 6, columns: int = 4, wrapped: bool = False) -> tuple[nn.Module, nn.Module]:
    """Equal matrices in one unit, and their reference."""
    torch.manual_seed(0)
    model = nn.ParameterList(nn.Parameter(torch.randn(rows, columns)) for _ in range(count))
    holder = Holder(model)
    reference = copy.deepcopy(holder)
    return (FSDP(holder, use_orig_params=True) if wrapped else fully_shard(holder)), reference


class Holder(nn.Module):
    """Parameters whose loss is told which of them it is about."""

    def __init__(self, parameters: nn.ParameterList) -> None:
        super().__init__()
        self.list = parameters

    def forward(self, *used: int) -> torch.Tensor:
        return sum((self.list[index].square().sum() * (index + 1) / 10 for index in used), torch.zeros(()))


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """All of a parameter."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


@on_ranks(2)
def test_an_optimizer_of_ones_own(rank: Rank) -> None:
    """Three functions make an optimizer, with sharded state; the owner alone computes; rounds overlap."""
    model, reference = stack_of(5)
    mine, theirs = Cubed(model.parameters(), round_bytes=1), Cubed(reference.parameters())
    for _ in range(3):
        for net, optimizer in ((model, mine), (reference, theirs)):
            optimizer.zero_grad()
            net(0, 1, 2, 3, 4).backward()
            optimizer.calls.clear()
            optimizer.step()
    for sharded, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert_equal(whole(sharded), other.detach(), "parameter")
        assert_equal(mine.state[sharded]["sum"].full_tensor(), theirs.state[other]["sum"], "state")
    # Rounds of one matrix per owner, 2, 2 and 1: a round is sent before the one ahead of it is computed.
    assert mine.calls.count("update") == 3 - rank.rank and theirs.calls.count("update") == 5
    order = [kind for kind, _ in itertools.groupby(mine.calls)]
    expected = ["prepare", "update", "prepare", "update", "apply", "update", "apply"]
    assert order == expected[: 7 - 2 * rank.rank]  # the second rank owns nothing of the last round


@on_ranks(2)
def test_memory_of_two_rounds(rank: Rank) -> None:
    """Messages of no more than two rounds are alive at a time, however many there are."""
    peaks = []
    for count in (6, 24):
        model, _ = stack_of(count, rows=8, columns=8)
        optimizer = Muon(model.parameters(), round_bytes=1)
        model(*range(count)).backward()
        optimizer.plan()
        alive: list[int] = [0]
        peak = 0
        usual: Any = PendingExchange.__new__

        def counting(kind: Any, work: Any, *messages: Any, usual: Any = usual, alive: list[int] = alive) -> Any:
            nonlocal peak
            for made in messages:
                alive[0] += made.nbytes
                weakref.finalize(made, lambda nbytes=made.nbytes: alive.__setitem__(0, alive[0] - nbytes))
            peak = max(peak, alive[0])
            return usual(kind, work, *messages)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PendingExchange, "__new__", counting)
            optimizer.step()
        assert alive == [0]
        peaks.append(peak)
    one = 2 * 8 * 8  # bytes of what a rank sends, or receives, in a round of one matrix per owner
    assert peaks[0] == peaks[1] <= 2 * 2 * one


@contextlib.contextmanager
def counted_bytes(rank: int) -> Iterator[list[int]]:
    """Bytes that this rank sends to others in each all-to-all."""
    seen: list[int] = []
    usual = dist.all_to_all_single

    def counting(output: Any, given: Any, received: Any, sent: Any, **options: Any) -> Any:
        assert given.dtype is torch.uint8 and sum(sent) == given.numel()
        seen.append(sum(sent) - sent[options["group"].rank()])
        return usual(output, given, received, sent, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counting)
        yield seen


@on_ranks(2, 4)
def test_bytes(rank: Rank) -> None:
    """A rank sends 2 b P (N-1)/N^2 bytes."""
    ranks = rank.world_size
    model, _ = stack_of(8, rows=16, columns=8)
    for dtype, item in ((torch.bfloat16, 2), (torch.float32, 4)):
        optimizer = Muon(model.parameters(), comm_dtype=dtype)
        model(*range(8)).backward()
        with counted_bytes(rank.rank) as seen:
            optimizer.step()
        bound = 2 * item * (8 * 16 * 8) * (ranks - 1) / ranks**2
        assert len(seen) == 2 and sum(seen) == bound


@on_ranks(2)
@pytest.mark.parametrize("wrapped", [False, True], ids=["rows", "wrapper"])
def test_missing_gradients(rank: Rank, wrapped: bool) -> None:
    """Missing everywhere: nothing changes. On one rank: zeros there, whose shard stays. Messages are the same."""
    model, reference = stack_of(4, rows=5, columns=3, wrapped=wrapped)
    mine, theirs = Muon(model.parameters()), torch.optim.Muon(reference.parameters())
    with counted_bytes(rank.rank) as seen:
        mine.step()
    model(0, 1, 2).backward()
    reference(0, 1, 2).backward()
    parameters, others = list(model.parameters()), list(reference.parameters())
    # Only the first rank keeps its gradient of number 1: what the other holds of it counts as zero, and stays.
    alone, expected = parameters[1], others[1]
    assert expected.grad is not None
    boundary = torch.tensor(whole_numel(alone) if rank.rank == 0 else 0)
    dist.all_reduce(boundary)
    expected.grad.view(-1)[int(boundary) :] = 0
    if rank.rank == 1:
        alone.grad = None
    for net in (parameters, others):
        net[2].grad = None
    before = [collect(p) for p in parameters]
    with counted_bytes(rank.rank) as again:
        mine.step()
    theirs.step()
    assert again == seen
    assert_equal([collect(p) for p in parameters[2:]], before[2:], "untouched")
    assert_equal(collect(parameters[0]), others[0].detach(), "on all ranks")
    found = collect(alone).view(-1)
    assert_equal(found[: int(boundary)], expected.detach().view(-1)[: int(boundary)], "with zeros of one rank")
    assert_equal(found[int(boundary) :], before[1].view(-1)[int(boundary) :], "without a gradient")
    assert len(mine.state) == 2 - rank.rank


def whole_numel(parameter: torch.Tensor) -> int:
    """Elements that this rank holds."""
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()


def collect(parameter: torch.Tensor) -> torch.Tensor:
    """The whole of a parameter of either front end, 5 x 3."""
    if isinstance(parameter, DTensor):
        return parameter.full_tensor()
    pieces: list[Any] = [None, None]
    dist.all_gather_object(pieces, parameter.detach())
    return torch.cat([piece.view(-1).to(parameter.device) for piece in pieces]).view(5, 3)


@on_ranks(2)
def test_plans_follow_parameters(rank: Rank) -> None:
    """Freezing, moving and adding parameters changes the plan; nothing else does."""
    model, _ = stack_of(3)
    parameters = list(model.parameters())
    optimizer = Muon(parameters[:2])
    model(0, 1, 2).backward()
    optimizer.step()
    plan = optimizer.plan()
    optimizer.step()
    assert optimizer.plan() is plan
    parameters[0].requires_grad_(False)
    assert len(optimizer.plan().rounds[0].matrices) == 1
    parameters[0].requires_grad_(True)
    optimizer.add_param_group({"params": parameters[2:]})
    assert len(optimizer.plan().rounds[0].matrices) == 3
    optimizer.step()


@on_ranks(2)
def test_plans_follow_groups(rank: Rank) -> None:
    """A parameter that moves to another group is stepped with its options, though all are in the same order."""
    parameters = list(stack_of(2)[0].parameters())
    plain = [nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    for first, second in (parameters, plain):
        optimizer = Cubed([first, second])
        for each in (first, second):
            each.grad = torch.ones_like(each)
        optimizer.step()
        optimizer.add_param_group({"params": [optimizer.param_groups[0]["params"].pop()], "lr": 0.0})
        before = [whole(each).clone() for each in (first, second)]
        optimizer.step()
        assert not torch.equal(whole(first), before[0])
        assert_equal(whole(second), before[1], "with a learning rate of zero")


@on_ranks(2)
def test_refused(rank: Rank) -> None:
    """What is no matrix is refused with its name and shape and what to do; so are the wrapper's flat parameters."""
    model = fully_shard(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)))
    with pytest.raises(ValueError, match=r"0\.bias of shape \(4,\); give it to another optimizer"):
        Muon(model.parameters())
    with pytest.raises(ValueError, match=r"expected 2-D parameters, found kernel of shape \(2, 2, 2\)"):
        Muon([("kernel", nn.Parameter(torch.zeros(2, 2, 2)))])
    with pytest.raises(ValueError, match=r"parameter 0 of group 0 of torch\.complex64"):
        Muon([nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))])
    with pytest.raises(ValueError, match=r"FlatParameter of weight, bias.*use_orig_params=True"):
        Muon(FSDP(nn.Linear(3, 4)).parameters())
    wrapped = FSDP(nn.Linear(3, 4), use_orig_params=True)
    with pytest.raises(ValueError, match=r"bias of shape \(4,\)"):
        Muon(wrapped.parameters())
    optimizer = Muon([p for n, p in wrapped.named_parameters() if n.endswith("weight")])
    with pytest.raises(ValueError, match="bias"):
        optimizer.add_param_group({"params": [p for n, p in wrapped.named_parameters() if n.endswith("bias")]})
    assert len(optimizer.param_groups) == 1
    table = nn.Parameter(torch.zeros(3, 2))
    table.grad = torch.zeros(3, 2).to_sparse()
    with pytest.raises(FullshardError, match="dense gradient"):
        Muon([table]).step()


@on_ranks(4)
def test_wrapped_after_tensor_parallelism(rank: Rank) -> None:
    """Ranges of parts are refused."""
    mesh = rank.make_mesh(2, 2, names=("dp", "tp"))
    model = parallelize_module(nn.Sequential(nn.Linear(4, 4, bias=False)), mesh["tp"], {"0": ColwiseParallel()})
    wrapped = FSDP(model, use_orig_params=True, device_mesh=mesh["dp"])
    with pytest.raises(ValueError, match=r"0\.weight of shape \(4, 4\) is sharded by tensor parallelism"):
        Muon(wrapped.parameters())


@on_ranks(2)
def test_empty_and_transposed(rank: Rank) -> None:
    """Matrices without elements are left alone; parameters whose memory runs down columns keep their strides."""
    torch.manual_seed(0)
    for wrapped in (False, True):
        model = Holder(nn.ParameterList([nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.randn(4, 6).t())]))
        reference = copy.deepcopy(model)
        net = FSDP(model, use_orig_params=True) if wrapped else fully_shard(model)
        mine, theirs = Cubed(net.parameters()), Cubed(reference.parameters())
        for each, optimizer in ((net, mine), (reference, theirs)):
            each(1).backward()
            optimizer.step()
        tall = list(net.parameters())[1]
        if isinstance(tall, DTensor):
            assert_equal(tall.full_tensor(), reference.list[1].detach(), "rows")
        else:
            with FSDP.summon_full_params(net):
                assert_equal(model.list[1].detach().clone(), reference.list[1].detach(), "wrapper")
    assert math.prod(model.list[0].shape) == 0
