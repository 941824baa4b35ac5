"""Norms of gradients that are spread in all ways, and clipping: equal to an unsharded model's on all ranks."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from compare import assert_close, assert_equal
from front_ends import assert_same_gradients
from fullshard import CPUOffloadPolicy, fully_shard
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.errors import FullshardError
from fullshard.optim import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from ranks import Rank, on_ranks

ORDERS = [2.0, 3.0, -1.0, 0.0, math.inf, -math.inf]
CLOSE: dict[str, float] = {"rtol": 1e-5, "atol": 1e-6}


@contextlib.contextmanager
def counted_all_reduces() -> Iterator[list[tuple[int, ...]]]:
    """The ranks of every all-reduce that goes through ``torch.distributed``."""
    seen: list[tuple[int, ...]] = []
    usual = dist.all_reduce

    def counting(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        seen.append(tuple(dist.get_process_group_ranks(group)))
        return usual(tensor, op, group, async_op)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", counting)
        yield seen


def gradients_of(reference: nn.Module, seed: int = 3) -> None:
    """Gradients without zeros, so that negative orders and the smallest are finite, and of several sizes."""
    torch.manual_seed(seed)
    for index, parameter in enumerate(reference.parameters()):
        parameter.grad = (torch.rand_like(parameter) + 0.1) * (index + 1)


def take_gradients(model: nn.Module, reference: nn.Module) -> None:
    """Give the sharded model its parts of the reference's gradients."""
    others = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        gradient = others[name].grad
        assert gradient is not None
        if isinstance(parameter, DTensor):
            gradient = distribute_dense(gradient, parameter)
        parameter.grad = gradient.clone().to(parameter.dtype)


def distribute_dense(full: torch.Tensor, like: DTensor) -> DTensor:
    """``full``, the same on all ranks, in the placements of ``like``, strided ones among them."""
    whole = DTensor.from_local(full, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
    return whole.redistribute(placements=like.placements)


def on_five_meshes(rank: Rank) -> tuple[nn.Module, nn.Module]:
    """One axis, two axes, a part of a mesh, tensor parallelism, and a layer that is not sharded; and its reference.

    No number of ranks divides the sizes, and one layer has fewer rows than there are ranks.
    """
    parallel = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6, bias=False))
    layers = nn.Linear(5, 7), nn.Linear(7, 3, bias=False), nn.Linear(3, 4), parallel, nn.Linear(3, 2)
    model = nn.Sequential(*layers)
    model.scale = nn.Parameter(torch.tensor(0.3))
    reference = copy.deepcopy(model)
    both = rank.make_mesh(2, 2, names=("dp", "tp"))
    fully_shard(model[0], mesh=rank.mesh)
    fully_shard(model[1], mesh=rank.make_mesh(2, 2, names=("replicate", "shard")))
    fully_shard(model[2], mesh=both["dp"])
    parallelize_module(parallel, both["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(parallel, mesh=both["dp"])
    return fully_shard(model, mesh=rank.mesh, ignored_params=set(model[4].parameters())), reference


def experts_on_two_ranks(rank: Rank) -> tuple[nn.Module, nn.Module]:
    """Dense layers on four ranks and experts on two: neither axis contains the other's sums."""
    model = nn.ModuleList([nn.Linear(5, 6), nn.Linear(6, 5)])
    reference = copy.deepcopy(model)
    fully_shard(model[0], mesh=rank.mesh)
    fully_shard(model[1], mesh=rank.make_mesh(2, 2, names=("expert", "shard"))["shard"])
    return model, reference


def assert_same_everywhere(rank: Rank, total: torch.Tensor) -> None:
    """All ranks have the same bits."""
    totals: list[Any] = [None] * rank.world_size
    dist.all_gather_object(totals, total.item())
    assert len({repr(value) for value in totals}) == 1, totals


@on_ranks(4)
@pytest.mark.parametrize(("build", "reduced"), [(on_five_meshes, [2, 2, 4]), (experts_on_two_ranks, [2, 4])])
def test_mixed_meshes(rank: Rank, build: Any, reduced: list[int]) -> None:
    """torch's norm of the whole gradients, one all-reduce for each group of ranks, a plain fp32 scalar."""
    torch.manual_seed(0)
    model, reference = build(rank)
    for order in ORDERS:
        gradients_of(reference)
        take_gradients(model, reference)
        with counted_all_reduces() as seen:
            total = clip_grad_norm_(model.parameters(), 0.5, order)
        assert [len(ranks) for ranks in seen] == reduced and len(seen) == len(set(seen))
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5, order)
        assert type(total) is torch.Tensor and total.shape == () and total.dtype is torch.float32
        assert_close(total, expected, f"norm {order}", **CLOSE)
        assert_same_everywhere(rank, total)
        assert_same_gradients(model, reference, **CLOSE)


@on_ranks(2)
@pytest.mark.parametrize("orig", [True, False], ids=["orig", "flat"])
def test_wrapper(rank: Rank, orig: bool) -> None:
    """The wrapper's pieces and flat parameters: padding and empty pieces count in no norm, the flat one as one."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 5))
    reference = copy.deepcopy(model)
    model[0] = FSDP(model[0], use_orig_params=orig)
    outer = FSDP(model, use_orig_params=orig)
    for order in ORDERS:
        for net in (outer, reference):
            net.zero_grad()
            net(torch.ones(2, 1)).square().sum().backward()
        with counted_all_reduces() as seen:
            total = clip_grad_norm_(outer.parameters(), 0.5, order)
        assert len(seen) == 1
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5, order)
        if order == 0 and not orig:
            expected = torch.tensor(2.0)  # tensors
        assert_close(total, expected, f"norm {order}", **CLOSE)
        if order or orig:
            clipped = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()])
            assert_close(clip_grad_norm_(outer.parameters(), 1e9), clipped, f"clipped by norm {order}", **CLOSE)


@on_ranks(2)
def test_missing_gradients(rank: Rank) -> None:
    """A rank without any gradients takes part, and has the others' norm; without any anywhere it is zero."""
    model = fully_shard(nn.Linear(4, 4, bias=False))
    for order, expected in ((2.0, math.sqrt(72)), (0.0, 1.0), (math.inf, 3.0)):
        (parameter,) = model.parameters()
        parameter.grad = None
        nothing = clip_grad_norm_(parameter, 1.0, order)
        assert_equal(nothing, torch.tensor(0.0), "nothing")
        if rank.rank == 1:
            local = torch.full((2, 4), 3.0)
            parameter.grad = DTensor.from_local(local, rank.mesh, [Shard(0)], shape=(4, 4), stride=(4, 1))
        with counted_all_reduces() as seen:
            total = clip_grad_norm_(parameter, 1.0, order)
        assert len(seen) == 1
        assert_close(total, torch.tensor(expected), f"norm {order}", **CLOSE)


@on_ranks(2)
def test_low_precision(rank: Rank) -> None:
    """bf16 and fp16 gradients are summed in fp32 and wider; the norm of fp64 ones is fp64."""
    model = fully_shard(nn.Linear(64, 64, bias=False).half())
    (parameter,) = model.parameters()
    parameter.grad = torch.full_like(parameter, 200.0)
    total = clip_grad_norm_(parameter, 1.0)
    assert_equal(total, torch.tensor(12800.0), "fp16")
    model = fully_shard(nn.Linear(256, 256, bias=False).bfloat16())
    (parameter,) = model.parameters()
    parameter.grad = torch.full_like(parameter, 1.0)
    assert_equal(get_total_norm(parameter.grad), torch.tensor(256.0), "bf16")
    wide = fully_shard(nn.Linear(4, 4).double())
    for parameter in wide.parameters():
        parameter.grad = torch.full_like(parameter, 1e-200)
    assert clip_grad_norm_(wide.parameters(), 1.0, math.inf).item() == 1e-200
    large = fully_shard(nn.Linear(8, 16, bias=False))
    (parameter,) = large.parameters()
    parameter.grad = torch.full_like(parameter, 1.5e12)
    assert_close(
        get_total_norm(parameter.grad, 3.0), torch.tensor(1.5e12 * 128 ** (1 / 3)), "cubes beyond fp32", **CLOSE
    )


@on_ranks(2)
def test_tied_and_single(rank: Rank) -> None:
    """A parameter that comes twice counts, and is scaled, once; an iterator and a single tensor will do."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    fully_shard(model)
    (parameter,) = model.parameters()
    parameter.grad = torch.ones_like(parameter)
    twice = [*model[0].parameters(), *model[1].parameters()]
    assert len(twice) == 2
    assert_equal(clip_grad_norm_(iter(twice), 2.0), torch.tensor(4.0), "norm")
    assert_close(parameter.grad.full_tensor(), torch.full((4, 4), 0.5), "once", **CLOSE)
    assert_close(clip_grad_norm_(parameter, 9.0), torch.tensor(2.0), "single", **CLOSE)
    exhausted = (p for p in ())
    with pytest.warns(UserWarning, match="exhausted"):
        assert_equal(clip_grad_norm_(exhausted, 1.0), torch.tensor(0.0, device="cpu"), "none")


@on_ranks(4)
def test_partial_gradients(rank: Rank) -> None:
    """Partial gradients are reduced before their norm is taken, and keep their placement when they are scaled."""
    mesh = rank.make_mesh(2, 2, names=("dp", "tp"))
    torch.manual_seed(0)
    full = torch.randn(4, 6)
    parameter = nn.Parameter(distribute_tensor(full, mesh, [Replicate(), Shard(0)]))
    local = parameter.to_local().detach() * (1 + mesh.get_local_rank("dp"))
    parameter.grad = DTensor.from_local(local, mesh, [Partial(), Shard(0)], run_check=False)
    wanted = full * 3
    assert_close(get_total_norm(parameter.grad), wanted.norm(), "tensors", **CLOSE)
    assert_close(get_total_norm([parameter.grad], parameters=[parameter]), wanted.norm(), "parameters", **CLOSE)
    assert_close(clip_grad_norm_(parameter, 1.0), wanted.norm(), "clip", **CLOSE)
    assert parameter.grad.placements == (Partial(), Shard(0))
    assert_close(parameter.grad.full_tensor(), wanted / wanted.norm(), "scaled", **CLOSE)


@on_ranks(2)
def test_nonfinite(rank: Rank) -> None:
    """What one rank alone has raises on both, with the parameter's name; gradients stay as they were."""
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    for order, bad in itertools.product((2.0, math.inf), (math.nan, math.inf)):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        if rank.rank == 1:
            model[1].weight.grad.to_local()[0, 0] = bad
        with pytest.raises(FullshardError, match=r"1\.weight") as raised:
            clip_grad_norm_(model.parameters(), 1.0, order, error_if_nonfinite=True)
        assert "0.weight" not in str(raised.value) and "1.bias" not in str(raised.value)
        assert_equal(model[0].weight.grad.to_local(), torch.ones(2, 4), "untouched")
        total = clip_grad_norm_(model.parameters(), 1.0, order)
        assert (math.isnan if math.isnan(bad) else math.isinf)(float(total))


@on_ranks(2)
def test_nonfinite_of_unreduced_gradients(rank: Rank) -> None:
    """Gradients that nobody reduces: the first rank's count, and a NaN on another one is seen by all."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    fully_shard(model, ignored_params={model[1].weight})
    model[0].weight.grad = torch.zeros_like(model[0].weight)
    model[1].weight.grad = torch.full((2, 2), 1.0 + rank.rank)
    total = clip_grad_norm_(model.parameters(), 100.0)
    assert_equal(total, torch.tensor(2.0), "the first rank's")
    if rank.rank == 1:
        model[1].weight.grad[0, 0] = math.nan
    with pytest.raises(FullshardError, match=r"parameter 1 of shape \(2, 2\)"):
        get_total_norm([p.grad for p in model.parameters()], error_if_nonfinite=True)
    for order in (2.0, 1.0, -1.0):  # an infinite sum is no NaN; of the order -1 it is that of a zero
        model[0].weight.grad = torch.ones_like(model[0].weight)
        model[1].weight.grad = torch.full((2, 2), math.inf if order > 0 else 0.0)
        total = clip_grad_norm_(model.parameters(), 1.0, order)
        assert_equal(total, torch.tensor(math.inf if order > 0 else 0.0), f"order {order}")


@on_ranks(2)
def test_torchs_own_function(rank: Rank) -> None:
    """torch's function works on the same gradients, and what it returns clips here too."""
    model, reference = nn.Linear(5, 3), nn.Linear(5, 3)
    fully_shard(model, mesh=rank.mesh)
    gradients_of(reference)
    take_gradients(model, reference)
    theirs = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert isinstance(theirs, DTensor)
    assert_close(get_total_norm([p.grad for p in model.parameters()]), theirs.full_tensor(), "norm", **CLOSE)
    clip_grads_with_norm_(model.parameters(), 0.5, theirs)
    torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    assert_same_gradients(model, reference, **CLOSE)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.25)
    assert_same_gradients(model, reference, **CLOSE)


@on_ranks(2)
def test_offloaded(rank: Rank) -> None:
    """Gradients in CPU memory: the norm is there too."""
    model = fully_shard(nn.Linear(5, 3), offload_policy=CPUOffloadPolicy(pin_memory=False))
    reference = nn.Linear(5, 3)
    gradients_of(reference)
    for name, parameter in model.named_parameters():
        gradient = distribute_dense(dict(reference.named_parameters())[name].grad, parameter)
        parameter.grad = parameter.detach().clone()
        parameter.grad.to_local().copy_(gradient.to_local())
    total = clip_grad_norm_(model.parameters(), 0.5)
    assert total.device.type == "cpu"
    assert_close(total.to(rank.device), torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5), "norm", **CLOSE)


@on_ranks(2)
def test_weights(rank: Rank) -> None:
    """Parameters themselves have a norm, also the wrapper's; its gradients need their parameters beside them."""
    torch.manual_seed(0)
    plain = nn.Linear(3, 3)
    expected = torch.nn.utils.get_total_norm(plain.parameters()).detach()
    sharded, wrapped = fully_shard(copy.deepcopy(plain)), FSDP(copy.deepcopy(plain), use_orig_params=True)
    assert_close(get_total_norm(sharded.parameters()), expected, "fully_shard", **CLOSE)
    assert_close(get_total_norm(wrapped.parameters()), expected, "wrapper", **CLOSE)
    parameters = list(wrapped.parameters())
    halves = [p.detach() / 2 if rank.rank or index else None for index, p in enumerate(parameters)]
    total = get_total_norm(halves, parameters=parameters)
    assert_same_everywhere(rank, total)
    assert 0 < float(total) < float(expected) / 2
    with pytest.raises(ValueError, match="expected a parameter for each of 2"):
        get_total_norm(halves, parameters=parameters[:1])


@pytest.mark.filterwarnings("ignore:Sparse invariant")
def test_alone() -> None:
    """Without any process group, on plain tensors: torch's numbers for real, complex and sparse gradients."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(4, dtype=torch.complex64))]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    others = copy.deepcopy(parameters)
    for mine, other in zip(parameters, others, strict=True):
        assert mine.grad is not None
        other.grad = mine.grad.clone()
    norms = [p.grad.norm() for p in others if p.grad is not None]
    expected = torch.stack(norms).norm()
    assert_close(clip_grad_norm_(parameters, 1.0), expected, "norm", **CLOSE)
    assert_close(get_total_norm([p.grad for p in parameters]), torch.tensor(1.0), "clipped", **CLOSE)
    table = nn.Parameter(torch.zeros(5, 2))
    table.grad = torch.sparse_coo_tensor([[1, 1, 3]], torch.ones(3, 2), (5, 2))
    assert_close(clip_grad_norm_(table, 1.0), torch.tensor(10.0).sqrt(), "sparse", **CLOSE)
    assert_close(table.grad.to_dense().norm(), torch.tensor(1.0), "sparse, clipped", **CLOSE)
    with pytest.raises(ValueError, match="norm_type"):
        clip_grad_norm_(parameters, 1.0, math.nan)
    huge = nn.Parameter(torch.zeros(1000))
    huge.grad = torch.full((1000,), 3e38)
    with pytest.raises(FullshardError, match="overflows"):
        clip_grad_norm_(huge, 1.0, 2.0, error_if_nonfinite=True)
