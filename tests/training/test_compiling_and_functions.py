"""What torch does to sharded models: ``torch.compile`` of and around units, and the functions of ``torch.func``."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.fx.experimental.proxy_tensor import make_fx

from compare import assert_close, assert_equal
from front_ends import (
    COMPOSABLE,
    FLAT,
    FRONT_ENDS,
    FrontEnd,
    assert_at_rest,
    assert_same_gradients,
    assert_same_values,
    assert_trains_alike,
    build,
    each_front_end,
    sharded_with_reference,
    step_and_clear,
    train,
    unwrapped,
)
from fullshard import FullshardError
from fullshard.comm import record
from models import Mlp, Stack, batch, reference_backward, square_loss
from pairwise import each_value
from ranks import Rank, on_ranks
from ranks.device import EMULATED

HOW = ["in place before", "wrapped before", "whole model"]


def compiled(model: Any, front_end: FrontEnd, rank: Rank, how: str, backend: str = "aot_eager", **options: Any) -> Any:
    """``model`` with each block a unit, compiled somewhere."""
    for index, block in enumerate(model.blocks):
        if how == "in place before":
            block.compile(backend=backend)
        elif how == "wrapped before":
            block = torch.compile(block, backend=backend)
        block = front_end.wrap(block, rank, [], **options)
        if how == "in place after":
            block.compile(backend=backend)
        model.blocks[index] = torch.compile(block, backend=backend) if how == "wrapped after" else block
    model = front_end.wrap(model, rank, [], **options)
    if how == "whole model in place":
        model.compile(backend=backend)
    return torch.compile(model, backend=backend) if how == "whole model" else model


@on_ranks(2, timeout=180)
@each_value(front_end=FRONT_ENDS, how=HOW)
def test_compiled(rank: Rank, front_end: FrontEnd, how: str) -> None:
    """Blocks compiled before or after sharding, in place or not, or the whole model, train as eager ones."""
    torch._dynamo.reset()
    reference = build(Stack, 2)
    model = compiled(copy.deepcopy(reference), front_end, rank, how)
    if how == "wrapped before" and front_end.composable:
        assert type(model.blocks[0]).__name__ == "FSDPOptimizedModule"
    assert_trains_alike(model, reference, rank)
    torch._dynamo.reset()


@on_ranks(2, timeout=180)
@each_value(front_end=[COMPOSABLE, FLAT], how=["in place after", "whole model in place"])
def test_compiled_in_mixed_precision(rank: Rank, front_end: FrontEnd, how: str) -> None:
    """Compiled units compute and reduce in the dtypes chosen, and train as those that are not compiled."""
    torch._dynamo.reset()
    options = front_end.precision(torch.bfloat16, torch.float32)
    models = [compiled(build(Stack, 2), front_end, rank, each, **options) for each in (how, "not")]
    with record() as seen:
        losses = [train(model, rank, square_loss, 3) for model in models]
    assert {c.dtype for c in seen if c.kind == "all_gather"} == {torch.bfloat16}
    assert {c.dtype for c in seen if c.kind == "reduce_scatter"} == {torch.float32}
    assert_close(losses[0], losses[1], "losses", rtol=2e-2, atol=1e-3)
    assert_same_values(*models, rtol=2e-2, atol=1e-3)
    torch._dynamo.reset()


@on_ranks(2, timeout=180)
def test_compiled_by_inductor(rank: Rank) -> None:
    """Blocks compiled with generated kernels train as eager ones."""
    if rank.device.type == EMULATED:
        pytest.skip("inductor generates no kernels for the emulated device")
    torch._dynamo.reset()
    reference = build(Stack, 1)
    patient = dist.new_group(timeout=timedelta(seconds=150))  # the first kernel of an installation may take a minute
    for turn in range(rank.world_size):  # the first generates the kernels, which the other finds then
        if rank.rank == turn:
            reference.blocks[0].compile()
            reference(batch(0, 0, 4, 6)).sum().backward()
        dist.barrier(patient)
    reference = build(Stack, 1)
    model = compiled(copy.deepcopy(reference), COMPOSABLE, rank, "in place after", "inductor")
    assert_trains_alike(model, reference, rank)
    torch._dynamo.reset()


class Layer(nn.Module):
    """Norm, up, down, with a residual around them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


# Tensor and sequence parallelism of such a layer between linear ones, on (batch, sequence, 6).
BY_SEQUENCE: dict[str, Any] = {
    "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "1.norm": SequenceParallel(),
    "1.up": ColwiseParallel(input_layouts=Shard(1)),
    "1.down": RowwiseParallel(output_layouts=Shard(1)),
    "2": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


@on_ranks(4, timeout=180)
def test_compiled_sequence_parallel_blocks(rank: Rank) -> None:
    """Blocks cut by sequence, compiled in place and sharded on a (2, 2) mesh train with the unsharded losses.

    Compiled code takes what functional collectives return; a boundary that loses the node which made it leaves the
    layers before without gradients, and the losses drift from the second step on.
    """
    mesh = rank.make_mesh(2, 2, names=("dp", "tp"))
    model = build(lambda: nn.Sequential(nn.Linear(6, 8), Layer(), nn.Linear(8, 4)))
    reference = copy.deepcopy(model)
    parallelize_module(model, mesh["tp"], BY_SEQUENCE)
    model[1].compile(backend="aot_eager")
    COMPOSABLE.wrap(model, rank, ["1"], mesh=mesh["dp"])

    def loss_of(step: int, one: nn.Module, number: int) -> torch.Tensor:
        return one(batch(number, step, 3, 4, 6)).square().mean()

    number = mesh["dp"].get_local_rank()
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.02, foreach=False) for one in (model, reference)]
    try:
        for step in range(2):
            loss = loss_of(step, model, number)
            loss.backward()
            expected = reference_backward(reference, 2, partial(loss_of, step))[number]
            assert_close(loss.detach(), expected, f"loss {step}", rtol=1e-4)
            assert_same_gradients(model, reference, rtol=1e-4, atol=1e-5)
            step_and_clear(*optimizers)
    finally:
        torch._dynamo.reset()
    assert_at_rest(model)


# -------------------------------------------------------------------- torch.func


@on_ranks(2)
@each_front_end
def test_functional_call_does_not_overwrite_the_weights(rank: Rank, front_end: FrontEnd) -> None:
    """Other tensors in place of the parameters are refused, the model's own are fine, and the weights stay."""
    model, reference = sharded_with_reference(front_end, rank, build(Mlp, 6, 5, 3))
    x = batch(rank.rank, 0, 4, 6)
    others = {name: parameter.detach() * 2 for name, parameter in model.named_parameters()}
    for _ in range(2):
        with pytest.raises(FullshardError, match=r"expected an nn\.Parameter|instead of a parameter"):
            torch.func.functional_call(model, others, (x,))
    own = dict(model.named_parameters())
    assert_equal(torch.func.functional_call(model, own, (x,)), reference(x), "output")
    assert_same_values(model, reference)
    assert_trains_alike(model, reference, rank)


def _dual(model: Any, x: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        made = forward_ad.unpack_dual(model(forward_ad.make_dual(x, tangent)))
        return made.primal * made.tangent


def _linearized(model: Any, x: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
    primal, of_tangent = torch.func.linearize(model, x)
    return primal * of_tangent(tangent)


def _written(model: Any, x: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
    return torch.func.jvp(lambda x: model(x).mul_(2).add_(1), (x,), (tangent,))[1]


def _after_another(model: Any, x: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
    """A gradient whose graph is gone through after another forward, and its backward."""
    return torch.func.grad(lambda x: model(x).square().sum())(x) + model(tangent).square().mean()


# Functions of a model, an input and a tangent, which reach the parameters by one transform after the other.
DERIVATIVES: dict[str, Callable[..., torch.Tensor]] = {
    "tangent of jvp": lambda m, x, v: torch.func.jvp(m, (x,), (v,))[1],
    "jvp of a block": lambda m, x, v: torch.func.jvp(unwrapped(m).blocks[1], (x,), (v,))[1] + m(v).sum(),
    "jvp of jvp": lambda m, x, v: torch.func.jvp(lambda x: torch.func.jvp(m, (x,), (v,))[1], (x,), (v,))[1],
    "jvp at an input with a gradient": lambda m, x, v: torch.func.jvp(m, (x.requires_grad_(),), (v,))[1],
    "jvp, written to": _written,
    "jacfwd": lambda m, x, v: torch.func.jacfwd(m)(x),
    "hessian": lambda m, x, v: torch.func.hessian(lambda x: m(x).square().sum())(x),
    "vmap": lambda m, x, v: torch.func.vmap(m)(torch.stack([x, v])),
    "jvp of vmap": lambda m, x, v: torch.func.jvp(torch.func.vmap(m), (x,), (v,))[1],
    "vmap of grad": lambda m, x, v: torch.func.vmap(torch.func.grad(lambda x: m(x).square().sum()))(x),
    "grad": lambda m, x, v: torch.func.grad(lambda x: m(x).square().sum())(x),
    "grad, after another": _after_another,
    "vjp": lambda m, x, v: torch.func.vjp(m, x)[1](v[:, :3])[0],
    "dual numbers": _dual,
    "linearize": _linearized,
}


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, derivative=list(DERIVATIVES), resharded=[True, False])
def test_loss_on_derivatives(rank: Rank, front_end: FrontEnd, derivative: str, resharded: bool) -> None:
    """Losses on derivatives with respect to inputs have the gradients of the unsharded model, microbatches added up."""
    strategy = "FULL_SHARD" if resharded else "SHARD_GRAD_OP"
    model, reference = sharded_with_reference(front_end, rank, build(Stack, 3), strategy=strategy)

    def loss_of(module: Any, number: int) -> torch.Tensor:
        return DERIVATIVES[derivative](module, batch(number, 0, 3, 6), batch(number, 1, 3, 6)).square().sum()

    for number in range(2):
        with contextlib.nullcontext() if number else front_end.no_sync(model):
            loss_of(model, rank.rank + 2 * number).backward()
        for other in range(rank.world_size):
            (loss_of(reference, other + 2 * number) / rank.world_size).backward()
    assert_same_gradients(model, reference, rtol=1e-4, atol=1e-5)
    for each in (model, reference):
        each.zero_grad()
        unwrapped(each).blocks[0].requires_grad_(False)  # flags that the next forward takes over, in a transform too
    loss_of(model, rank.rank).backward()
    reference_backward(reference, rank.world_size, loss_of)
    assert_same_gradients(model, reference, rtol=1e-4, atol=1e-5)


@on_ranks(2)
@each_front_end
def test_traced_by_make_fx(rank: Rank, front_end: FrontEnd) -> None:
    """make_fx records what modules compute and nothing of the engine, and the model trains on."""
    model, reference = sharded_with_reference(front_end, rank, build(Stack, 2))
    x = batch(rank.rank, 0, 4, 6)
    graphs = [make_fx(module)(x).graph for module in (model, reference)]
    ours, theirs = (Counter(str(node.target) for node in graph.nodes if node.op == "call_function") for graph in graphs)
    assert set(ours - theirs) <= {"aten.view.default"}  # of inputs, which pass through an autograd function
    assert_trains_alike(model, reference, rank)
