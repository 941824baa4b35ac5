"""Behaviours that reviews asked for, each with the mistake it guards against."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from packed_tensor import RoundedWeight, with_cast_weights
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from compare import assert_close, assert_equal, assert_models_equal
from fullshard import FullshardError, fully_shard
from fullshard.comm import GlooTransport, Transport, record
from fullshard.comm.base import issue_all
from fullshard.engine.buckets.per_parameter import PerParameterBucket
from fullshard.engine.ownership import unit_of
from fullshard.engine.runtime import runtime_of
from fullshard.engine.unit import Unit
from fullshard.memory import Work
from models import Mlp, Stack, assert_at_rest, batch, reference_backward, shard_blocks, square_loss, tiny_units
from ranks import Rank, on_ranks

CLOSE: dict[str, float] = {"rtol": 1e-5, "atol": 1e-7}


def unit_at(module: nn.Module) -> Unit:
    unit = unit_of(module)
    assert unit is not None
    return unit


# ---------------------------------------------------------------- gathers from subgroup


class SideBranch(Stack):
    """A stack whose block 1 computes in forward, beside the others, but does not contribute to the output."""

    def forward(self, x: torch.Tensor, run: Any = None) -> torch.Tensor:
        x = self.blocks[0](self.first(x))
        self.blocks[1](x)
        return self.last(self.blocks[2](x))


class _Watched:
    """A work that notes how much memory its sender holds when it is waited for."""

    def __init__(self, work: Work, bucket: PerParameterBucket, seen: list[int]) -> None:
        self.work, self.bucket, self.seen = work, bucket, seen

    def wait(self) -> object:
        near = self.bucket._subgroup_shard
        self.seen.append(0 if near is None else near.allocated_bytes)
        return self.work.wait()


@contextlib.contextmanager
def watched(transport: Transport, bucket: PerParameterBucket) -> Iterator[list[int]]:
    """Watch the gathers that ``transport`` does for ``bucket``: the list gets what :class:`_Watched` notes."""
    seen: list[int] = []
    usual = transport._all_gather
    unit = bucket.parameters[0].unit()
    assert unit is not None

    def gather(requests: Any) -> list[Any]:
        works = usual(requests)
        return [_Watched(w, bucket, seen) for w in works] if requests[0].unit == unit.name else list(works)

    transport._all_gather = gather  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        del transport._all_gather


@on_ranks(4)
def test_near_shard_outlives_the_gather_that_sends_from_it(rank: Rank) -> None:
    """A gather from subgroup that nobody needed has landed before what it sends from is freed.

    Backward prefetches block 1, which gets no gradient, so the end of backward reshards it with the gather in flight.
    Freeing the near shard first is seen as a work that is waited for when its sender has no memory.
    """
    with tiny_units(0):
        model = shard_blocks(SideBranch(3, 8), rank, reshard_after_forward=2)
    for step in range(2):
        loss = square_loss(step, 4, 8)(model, rank.rank)
        (bucket,) = unit_at(model.blocks[1]).buckets
        assert isinstance(bucket, PerParameterBucket) and bucket._subgroup_shard is not None
        kept = bucket._subgroup_shard.allocated_bytes
        with watched(bucket.mesh.subgroup(2), bucket) as seen:
            loss.backward()
        assert kept > 0 and seen and set(seen) == {kept}
        assert bucket._subgroup_shard.allocated_bytes == 0
        assert_at_rest(model)


# ---------------------------------------------------------------- moves with pending gradients


@on_ranks(2)
@pytest.mark.parametrize("remedy", ["synchronize", "zero_grad"])
def test_dtype_move_with_pending_gradients_is_refused(rank: Rank, remedy: str) -> None:
    """``to(dtype)`` while microbatches without sync have left gradients names the unit and both ways out, which work.

    Without the check the buckets would be built anew and the gradients be gone: the values below would be those of
    the second microbatch alone.
    """
    torch.manual_seed(2)
    model = Stack(2)
    reference = copy.deepcopy(model)
    shard_blocks(model, rank)
    model.set_requires_gradient_sync(False)
    square_loss(0)(model, rank.rank).backward()
    model.set_requires_gradient_sync(True)
    with pytest.raises(FullshardError, match=r"unit '.*' holds gradients of microbatches.*synchronize_gradients\(\)"):
        model.to(torch.float64)
    model.to(torch.float32)  # what had been moved
    if remedy == "synchronize":
        model.synchronize_gradients()
        reference_backward(reference, rank.world_size, square_loss(0))
    else:
        model.zero_grad()
    assert_models_equal(model, reference, grads=True, **CLOSE)
    for one in (model, reference):
        one.to(torch.float64)

    def loss_of(one: nn.Module, number: int) -> torch.Tensor:
        return one(batch(number, 1, 4, 6).double()).square().mean()

    loss_of(model, rank.rank).backward()
    reference_backward(reference, rank.world_size, loss_of)
    assert_models_equal(model, reference, grads=True, **CLOSE)


# ---------------------------------------------------------------- optimizers that change


@on_ranks(2)
@pytest.mark.parametrize("change", ["add_param_group", "replace", "append"])
def test_parameters_that_an_optimizer_gets_later(rank: Rank, change: str) -> None:
    """Units whose parameters an optimizer was given after its first step are gathered anew after the next.

    Both layers keep their full parameters after forward. Were the units of an optimizer looked up at its first step
    only, the last forward would compute with the old weights of the second layer.
    """
    torch.manual_seed(3)
    model = Mlp(6, 6, 6)
    reference = copy.deepcopy(model)
    shard_blocks(model, rank, reshard_after_forward=False)
    optimizers = [torch.optim.SGD(one.layers[0].parameters(), lr=0.5) for one in (model, reference)]
    for step in range(2):
        square_loss(step)(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, square_loss(step))
        if step == 1:
            for one, optimizer in zip((model, reference), optimizers, strict=True):
                later = list(one.layers[1].parameters())
                if change == "add_param_group":
                    optimizer.add_param_group({"params": later})
                elif change == "replace":
                    optimizer.param_groups[0]["params"] = later  # as many as before
                else:
                    optimizer.param_groups[0]["params"] += later
            model(batch(rank.rank, step, 4, 6))  # leaves full parameters behind
            assert unit_at(model.layers[1]).is_unsharded
        for optimizer in optimizers:
            optimizer.step()
    x = batch(0, 9, 4, 6)
    assert_close(model(x).detach(), reference(x).detach(), "output after the step", **CLOSE)


@on_ranks(2)
def test_only_the_units_of_an_optimizer_become_outdated(rank: Rank) -> None:
    """A step outdates what it may have written to, and no other unit is gathered again."""
    model = Mlp(6, 6, 6)
    with tiny_units(0):
        shard_blocks(model, rank, reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.layers[0].parameters(), lr=0.0)
    for changed in ({"layers.0"}, {"layers.0"}, {"layers.0", "layers.1"}):
        square_loss()(model, rank.rank).backward()
        model(batch(rank.rank, 0, 4, 6))
        if len(changed) == 2:
            optimizer.add_param_group({"params": list(model.layers[1].parameters())})
        optimizer.step()
        with record() as seen:
            model(batch(rank.rank, 0, 4, 6))
        assert {c.unit for c in seen} == changed


# ---------------------------------------------------------------- launches that fail half way


class _Fake:
    """A work that notes that it was waited for, and may have failed."""

    def __init__(self, name: str, waited: list[str], error: str | None = None) -> None:
        self.name, self.waited, self.error = name, waited, error

    def wait(self) -> bool:
        self.waited.append(self.name)
        if self.error is not None:
            raise RuntimeError(self.error)
        return True


@pytest.mark.parametrize("error", [ValueError, RuntimeError, KeyboardInterrupt])
def test_works_land_before_a_later_calls_error_is_raised(error: type[BaseException]) -> None:
    """What was issued before a call that raises is waited for, all of it even if some failed; no later call runs.

    Raising at once instead leaves ``waited`` empty; stopping at the failed work leaves out "c".
    """
    waited: list[str] = []

    def fails() -> list[Any]:
        assert waited == []  # not before: they run side by side
        raise error("the cause")

    def never() -> list[Any]:
        raise AssertionError("called after a failure")

    first = [_Fake("a", waited), _Fake("b", waited, "landed badly")]
    with pytest.raises(error, match="the cause"):
        issue_all([lambda: first, lambda: [_Fake("c", waited)], fails, never])
    assert waited == ["a", "b", "c"]


def test_works_of_calls_that_succeed_are_returned_unwaited() -> None:
    """Without a failure nothing is waited for, and works come in the order of the calls."""
    waited: list[str] = []
    works = [_Fake(name, waited) for name in "abc"]
    assert issue_all([lambda: works[:1], lambda: (), lambda: works[1:]]) == works
    assert waited == []


# ---------------------------------------------------------------- extensions


class Growing(RoundedWeight):
    """Sends as many columns as ``hint`` says."""

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        (low,), metadata = super().fsdp_pre_all_gather(mesh)
        return (low if self.hint is None else low[:, : self.hint],), metadata


@on_ranks(2, 4)
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_extension_whose_sizes_change(rank: Rank, when: str) -> None:
    """Inner tensors of other sizes than at the first gather are refused on every rank, and the right ones go on.

    Without the check they would be padded to the old sizes, and the layer compute with shifted rows.
    """
    torch.manual_seed(4)
    model = with_cast_weights(Mlp(8, 8, 8), Growing)
    for layer in (*model.layers, model):
        fully_shard(layer, mesh=rank.mesh, reshard_after_forward=True)
    x = batch(rank.rank, 0, 4, 8)
    expected = model(x).detach()
    local = model.layers[1].weight._local_tensor
    words = (
        rf"layers\.1\.weight \(shape \(8, 8\).*Growing returned "
        rf"\[\({8 // rank.world_size}, 3\) torch\.bfloat16\].*gathers before "
        rf"\[\({8 // rank.world_size}, 8\) torch\.bfloat16\]"
    )
    loss = model(x).square().mean() if when == "backward" else None
    local.hint = 3
    with pytest.raises(FullshardError, match=words):
        loss.backward() if loss is not None else model(x)
    local.hint = None
    assert_equal(model(x).detach(), expected, "output")
    model(x).square().mean().backward()
    assert_at_rest(model)


# ---------------------------------------------------------------- complex gradients


class Flipped(nn.Module):
    """``weight.conj()`` times the input, summed: the gradient of the weight is the lazy conjugate of a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        rows = 4 * GlooTransport.direct_bytes // 8 // 64  # of those that travel on their own
        sizes = {"even": (rows, 64), "uneven": (rows + 1, 64), "small": (3, 2)}
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(size, dtype=torch.complex64)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        totals = [(weight.conj() * weight.shape[0] * x).sum() for weight in self.parameters()]
        return sum(total.abs().square() for total in totals)


@on_ranks(2, 4)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_lazily_conjugated_gradients(rank: Rank, microbatches: int) -> None:
    """Complex parameters whose gradients are conjugated lazily train as without sharding.

    Collectives see complex numbers as pairs of real ones; such a gradient has to be resolved before it can be so seen.
    """
    model = Flipped()
    reference = copy.deepcopy(model)
    fully_shard(model, mesh=rank.mesh)

    def loss_of(step: int, one: nn.Module, number: int) -> torch.Tensor:
        return one(torch.complex(*batch(number, step, 2)) / 1e5).real

    loss_of(0, reference, 0).backward()
    assert all(p.grad.is_conj() and p.grad.imag.abs().max() > 0 for p in reference.parameters())
    reference.zero_grad()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in (model, reference)]
    for step in range(3):
        for microbatch in range(microbatches):
            model.set_requires_gradient_sync(microbatch == microbatches - 1)
            number = 10 * step + microbatch
            loss_of(number, model, rank.rank).backward()
            reference_backward(reference, rank.world_size, partial(loss_of, number))
        assert_models_equal(model, reference, grads=True, rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_models_equal(model, reference, rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------- adoption that fails


@on_ranks(2)
@pytest.mark.parametrize("how", ["together", "forward"])
def test_unit_gathered_beside_one_that_cannot_adopt(rank: Rank, how: str) -> None:
    """If the second unit of one launch refuses a replaced parameter, the first is gathered anew after the repair.

    It had been told to gather and nothing was issued: taken for gathered, it would compute with unfilled memory.
    """
    torch.manual_seed(7)
    model = Mlp(6, 6, 6, 6)
    reference = copy.deepcopy(model)
    with tiny_units(2**16):
        shard_blocks(model, rank)
    x = batch(rank.rank, 0, 4, 6)
    model(x)  # attaches the units, and records their order
    good = model.layers[1].weight
    model.layers[1].weight = nn.Parameter(torch.ones(9, 9))
    words = r"layers\.1\.weight.*replaced by a parameter of shape \(9, 9\)"
    units = [unit_at(layer) for layer in model.layers]
    with pytest.raises(ValueError, match=words):
        model(x) if how == "forward" else runtime_of(units[0]).begin_unshard(units)
    assert not any(unit.is_unsharded for unit in units)
    model.layers[1].weight = good
    for step in range(2):
        model.zero_grad()
        reference.zero_grad()
        square_loss(step)(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, square_loss(step))
        assert_models_equal(model, reference, grads=True, **CLOSE)
        assert_at_rest(model)


# ---------------------------------------------------------------- freezing in mid backward


class BothEnds(nn.Module):
    """One unit of two parts that are called one at a time: ids to vectors, and vectors to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(13, 6), nn.Linear(6, 13)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) if x.is_floating_point() else self.embedding(x)


class Sandwich(nn.Module):
    """Both ends around a layer, in whose backward the head is frozen if ``freezes``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.ends, self.middle, self.freezes = BothEnds(), nn.Linear(6, 6), False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.middle(self.ends(ids))
        x.register_hook(self._freeze)
        return self.ends(x)

    def _freeze(self, _: torch.Tensor) -> None:
        if self.freezes:
            self.ends.head.requires_grad_(False)


@on_ranks(2)
def test_freezing_between_the_parts_of_an_open_ended_backward(rank: Rank) -> None:
    """A gradient of the first part of a unit's backward is reduced although its parameter is frozen before the end.

    The ids tell no end, so the unit rests after the head's part, holding its gradient, until backward is over.
    Were the head not noted then, it would not take part in the reduction and have no gradient, or one too late.
    """
    model = Sandwich()
    reference = copy.deepcopy(model)
    for module in (model.ends, model.middle, model):
        fully_shard(module, mesh=rank.mesh)

    def loss_of(step: int, one: nn.Module, number: int) -> torch.Tensor:
        ids = torch.randint(13, (4, 5), generator=torch.Generator().manual_seed(100 * step + number))
        return one(ids).square().mean()

    for step, freezes in enumerate((False, True, False)):
        model.freezes = freezes
        loss_of(step, model, rank.rank).backward()
        reference_backward(reference, rank.world_size, partial(loss_of, step))
        assert not (freezes and model.ends.head.weight.requires_grad)
        assert_models_equal(model, reference, grads=True, **CLOSE)
        model.ends.head.requires_grad_(True)
        model.zero_grad()
        reference.zero_grad()


# ---------------------------------------------------------------- compiled sequence parallelism


class Layer(nn.Module):
    """Norm, up, down, with a residual around them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Sequence(nn.Module):
    """Two such layers between linear ones, on (batch, sequence, 6)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def cut_by_sequence(model: Sequence, tp: DeviceMesh) -> None:
    """Tensor and sequence parallelism of everything."""
    plan: dict[str, Any] = {
        "first": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for index in range(len(model.layers)):
        plan[f"layers.{index}.norm"] = SequenceParallel()
        plan[f"layers.{index}.up"] = ColwiseParallel(input_layouts=Shard(1))
        plan[f"layers.{index}.down"] = RowwiseParallel(output_layouts=Shard(1))
    parallelize_module(model, tp, plan)


@on_ranks(4, timeout=180)
def test_compiled_sequence_parallel_blocks(rank: Rank) -> None:
    """Blocks cut by sequence, compiled in place and sharded on a (2, 2) mesh train with the unsharded losses.

    Compiled code takes what functional collectives return; a boundary that loses the node which made it leaves the
    layers before without gradients, and the losses drift from the second step on.
    """
    mesh = rank.make_mesh(2, 2, names=("dp", "tp"))
    model = Sequence()
    reference = copy.deepcopy(model)
    cut_by_sequence(model, mesh["tp"])
    for layer in model.layers:
        layer.compile(backend="aot_eager")
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])

    def loss_of(step: int, one: nn.Module, number: int) -> torch.Tensor:
        return one(batch(number, step, 3, 4, 6)).square().mean()

    number = mesh["dp"].get_local_rank()
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.02, foreach=False) for one in (model, reference)]
    try:
        for step in range(4):
            loss = loss_of(step, model, number)
            assert_close(loss.detach(), loss_of(step, reference, number).detach(), f"loss {step}", rtol=1e-4)
            loss.backward()
            reference_backward(reference, 2, partial(loss_of, step))
            assert_models_equal(model, reference, grads=True, rtol=1e-4, atol=1e-5)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    finally:
        torch._dynamo.reset()
    assert_at_rest(model)
