"""Owners of matrices: balance, bytes, rounds, missing gradients, and optimizers of one's own."""

from __future__ import annotations

import contextlib
import copy
import itertools
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
from front_ends import assert_same_values, full_values
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import fully_shard
from fullshard.errors import FullshardError
from fullshard.optim import MatrixOptimizer, Muon
from fullshard.optim.muon.exchange import Assignment, PendingExchange
from ranks import Rank, on_ranks


def loads_of(assigned: Assignment, work: Sequence[float], ranks: int) -> list[float]:
    """The work of each rank."""
    pairs = [*zip(assigned.owner_ranks, work, strict=True)]
    return [sum(amount for owner, amount in pairs if owner == rank) for rank in range(ranks)]


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 9), st.integers(1, 2000))
def test_ranks_have_equal_shares_of_the_work(work: list[int], ranks: int, round_bytes: int) -> None:
    """Nobody has more than the mean and one matrix; every matrix is in one round, and no round is too large."""
    assigned = Assignment.build(work, work, ranks, round_bytes)
    assert max(loads_of(assigned, work, ranks)) <= sum(work) / ranks + (1 - 1 / ranks) * max(work, default=0) + 1e-6
    assert sorted(itertools.chain(*assigned.rounds)) == list(range(len(work)))
    assert assigned == Assignment.build(list(work), list(work), ranks, round_bytes)
    for members in assigned.rounds:
        for rank in range(ranks):
            own = [work[index] for index in members if assigned.owner_ranks[index] == rank]
            assert sum(own) <= round_bytes or len(own) == 1
    work = [1, 1, 1, 1, 4]  # the last one does not go on top of what its rank has already
    assert loads_of(Assignment.build(work, work, 2, 100), work, 2) == [4, 4]


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
    model = Holder(nn.ParameterList(nn.Parameter(torch.randn(rows, columns)) for _ in range(count)))
    reference = copy.deepcopy(model)
    return (FSDP(model, use_orig_params=True) if wrapped else fully_shard(model)), reference


class Holder(nn.Module):
    """Parameters; the loss is of those that are asked for."""

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
    own = parameters[1].to_local() if isinstance(parameters[1], DTensor) else parameters[1]
    boundary = torch.tensor(own.numel() if rank.rank == 0 else 0)
    dist.all_reduce(boundary)
    first, second = slice(int(boundary)), slice(int(boundary), None)
    others[1].grad.view(-1)[second] = 0
    if rank.rank == 1:
        parameters[1].grad = None
    parameters[2].grad = others[2].grad = None
    before = [value.view(-1) for value in full_values(model).values()]
    with counted_bytes(rank.rank) as again:
        mine.step()
    theirs.step()
    assert again == seen
    after = [value.view(-1) for value in full_values(model).values()]
    expected = [other.detach().view(-1) for other in others]
    assert_equal(after[0], expected[0], "on all ranks")
    assert_equal(after[1][first], expected[1][first], "with zeros of one rank")
    assert_equal(after[1][second], before[1][second], "without a gradient")
    assert_equal(after[2:], before[2:], "untouched")
    assert len(mine.state) == 2 - rank.rank


@on_ranks(2)
def test_plans_follow_parameters_and_groups(rank: Rank) -> None:
    """Freezing, adding and moving parameters changes the plan; nothing else does.

    A parameter that moves to another group is stepped with its options, though all are in the same order.
    """
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
    for first, second in (parameters[:2], [nn.Parameter(torch.ones(2, 2)) for _ in range(2)]):
        moving = Cubed([first, second])
        for each in (first, second):
            each.grad = torch.ones_like(each)
        moving.step()
        moving.add_param_group({"params": [moving.param_groups[0]["params"].pop()], "lr": 0.0})
        before = [whole(each).clone() for each in (first, second)]
        moving.step()
        assert not torch.equal(whole(first), before[0])
        assert_equal(whole(second), before[1], "with a learning rate of zero")


@on_ranks(2)
def test_what_is_no_matrix_is_refused(rank: Rank) -> None:
    """With its name and shape, and what to do; also in a group that is added, and sparse gradients."""
    model, wrapped = fully_shard(nn.Sequential(nn.Linear(3, 4))), FSDP(nn.Linear(3, 4), use_orig_params=True)
    complex_matrix = nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))
    given: list[tuple[Any, str]] = [
        (model.parameters(), r"0\.bias of shape \(4,\); give it to another"),
        (FSDP(nn.Linear(3, 4)).parameters(), r"FlatParameter of weight, bias.*use_orig_params=True"),
        (wrapped.parameters(), r"bias of shape \(4,\)"),
        (
            [("kernel", nn.Parameter(torch.zeros(2, 2, 2)))],
            r"expected 2-D parameters, found kernel of shape \(2, 2, 2\)",
        ),
        ([complex_matrix], r"parameter 0 of group 0 of torch\.complex64"),
    ]
    for parameters, message in given:
        with pytest.raises(ValueError, match=message):
            Muon(parameters)
    optimizer = Muon([wrapped.weight])
    with pytest.raises(ValueError, match="bias"):
        optimizer.add_param_group({"params": [wrapped.bias]})
    assert len(optimizer.param_groups) == 1
    table = nn.Parameter(torch.zeros(3, 2))
    table.grad = torch.zeros(3, 2).to_sparse()
    with pytest.raises(FullshardError, match="dense gradient"):
        Muon([table]).step()


@on_ranks(4)
def test_wrapped_after_tensor_parallelism(rank: Rank) -> None:
    """The wrapper's ranges of elements of such shards are refused."""
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
        assert_same_values(net, reference)
