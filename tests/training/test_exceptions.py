"""After an exception the next step is that of a model that never failed; and no rank hangs on one that failed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from compare import assert_equal
from failing import OutOfMemoryAt, fail, fail_in_backward
from front_ends import (
    AFTER_ADAM,
    COMPOSABLE,
    FRONT_ENDS,
    FrontEnd,
    adam,
    assert_at_rest,
    assert_same_gradients,
    assert_same_values,
    assert_trains_alike,
    both_backward,
    build,
    each_front_end,
    full_values,
    gathered,
    sharded_with_reference,
    unwrapped,
)
from fullshard.comm import CommRequest, launch_all
from fullshard.engine.buckets import all_gather
from fullshard.engine.ownership import nested_units
from fullshard.engine.runtime import runtime_of
from fullshard.errors import FullshardError
from models import Mlp, Stack, batch, reference_backward, square_loss, tiny_units
from pairwise import each_value
from ranks import Rank, RankPool, on_ranks
from ranks.device import device_type

# where -> a function that makes the model fail there and returns the handle that removes the failure
PLACES: dict[str, Callable[[Any], Any]] = {
    "forward of the first block": lambda m: m.blocks[0].register_forward_pre_hook(fail),
    "forward of a block": lambda m: unwrapped(m.blocks[1]).up.register_forward_hook(fail),
    "forward of the root, at its start": lambda m: m.first.register_forward_pre_hook(fail),
    "forward of the root, at its end": lambda m: m.last.register_forward_hook(fail),
    "backward of the root": lambda m: m.last.register_forward_hook(fail_in_backward),
    "backward of a block": lambda m: unwrapped(m.blocks[1]).up.register_forward_hook(fail_in_backward),
    "backward of the first layer": lambda m: m.first.register_forward_hook(fail_in_backward),
}


def run_failing_step(model: Any, rank: Rank, place: str, step: int = 0) -> None:
    handle = PLACES[place](unwrapped(model))
    with pytest.raises(ZeroDivisionError, match=place.split()[0]):
        square_loss(step)(model, rank.rank).backward()
    handle.remove()


def assert_next_step_is_right(model: Any, reference: Any, rank: Rank, step: int = 0) -> None:
    """Clear the gradients of ``model``, and have one more step give those of ``reference``."""
    model.zero_grad()
    both_backward(model, reference, rank, square_loss(step))
    assert_same_gradients(model, reference)
    assert_at_rest(model)


def sharded(front_end: FrontEnd, rank: Rank, **options: Any) -> tuple[Any, Any]:
    return sharded_with_reference(front_end, rank, build(Stack), **options)


@on_ranks(2)
@each_value(
    front_end=FRONT_ENDS, place=PLACES, strategy=["FULL_SHARD", "SHARD_GRAD_OP"], remedy=["reset", "zero_grad", "alone"]
)
def test_step_after_a_failure(rank: Rank, front_end: FrontEnd, place: str, strategy: str, remedy: str) -> None:
    """The step after an exception anywhere, in the first step too, gives the gradients of a model that never failed.

    Right after it the registered parameters are the sharded ones: they can be cleared, read and saved.
    """
    with tiny_units(65536 if remedy == "alone" else 0):
        model, reference = sharded(front_end, rank, strategy=strategy)
    optimizers = adam(model.parameters()), adam(reference.parameters())
    registered = list(model.parameters())
    for step in range(2):
        run_failing_step(model, rank, place, step)
        if place.startswith("forward"):
            assert_at_rest(model)
        if remedy == "reset" and front_end.composable:
            model.reset_iter_state()
            assert_at_rest(model)
        if remedy == "alone":  # nothing of the module is called before its next forward
            for parameter in registered:
                parameter.grad = None
        else:
            model.zero_grad()
        assert all(one is other for one, other in zip(model.parameters(), registered, strict=True))
        assert_same_values(model, reference, **AFTER_ADAM)
        reference.zero_grad()
        assert_trains_alike(
            model, reference, rank, lambda _, step=step: square_loss(step), steps=1, optimizers=optimizers
        )
        model.zero_grad()


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, place=["forward of a block", "backward of a block"], reset=[True, True, False, False])
def test_pending_gradients_and_failures(rank: Rank, reset: bool, place: str, front_end: FrontEnd) -> None:
    """A failed forward keeps gradients that wait for a later microbatch, ``reset_iter_state`` drops them.

    A failed backward drops all of them, for nobody can tell how far they are complete.
    """
    model, reference = sharded(front_end, rank)
    with front_end.no_sync(model):
        square_loss(0)(model, rank.rank).backward()
        run_failing_step(model, rank, place, step=1)
    keeps = place.startswith("forward")
    assert bool(model.get_pending_gradients()) == keeps
    if reset and front_end.composable:
        model.reset_iter_state()
    elif keeps:
        reference_backward(reference, rank.world_size, square_loss(0))
    both_backward(model, reference, rank, square_loss(2))
    assert_same_gradients(model, reference)


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, unit=["first.bias", "blocks.2.down.weight"])
def test_hook_on_a_gradient_that_raises(rank: Rank, unit: str, front_end: FrontEnd) -> None:
    """It is raised by ``backward()``, and no phase, message or reduction of the step is left."""
    model, reference = sharded(front_end, rank)
    holder = unwrapped(model) if unit.startswith("first") else unwrapped(model.blocks[2])
    parameter = holder._flat_param if front_end.flat else holder.get_parameter(unit.removeprefix("blocks.2."))
    handle = parameter.register_post_accumulate_grad_hook(fail)
    with pytest.raises(ZeroDivisionError):
        square_loss(1)(model, rank.rank).backward()
    if unit.startswith("first"):  # reduced at the end of the pass, which recovers; after others the next forward does
        assert not runtime_of(nested_units(model)[0]).busy
        assert_at_rest(model)
    handle.remove()
    assert_next_step_is_right(model, reference, rank)


def fail_once() -> Any:
    """A hook that raises in the first backward of what a module returns."""
    failures = [ZeroDivisionError("once")]

    def hook(_: torch.Tensor) -> None:
        if failures:
            raise failures.pop()

    def watch(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        output.register_hook(hook)

    return watch


@on_ranks(2)
@each_value(
    front_end=FRONT_ENDS,
    place=["first", "up", "last"],
    then=["the same graph", "another loss", "another forward"],
)
def test_backward_after_one_that_raised(rank: Rank, front_end: FrontEnd, place: str, then: str) -> None:
    """It gives all gradients, although no forward has noticed the failure: of the same graph, or of another."""
    model, reference = sharded(front_end, rank)
    registered = list(model.parameters())
    holder = unwrapped(model.blocks[1]) if place == "up" else unwrapped(model)
    handle = getattr(holder, place).register_forward_hook(fail_once())
    output = model(batch(rank.rank, 1, 4, 6))
    handle.remove()
    losses = [output.square().mean(), output.abs().mean()]
    other = model(batch(rank.rank, 2, 4, 6)).square().mean()
    with pytest.raises(ZeroDivisionError):
        losses[0].backward(retain_graph=True)
    for parameter in registered:
        parameter.grad = None
    if then == "the same graph":
        losses[0].backward()
        reference_backward(reference, rank.world_size, square_loss(1))
    elif then == "another loss":
        losses[1].backward()
        reference_backward(reference, rank.world_size, lambda m, r: m(batch(r, 1, 4, 6)).abs().mean())
    else:
        other.backward()
        reference_backward(reference, rank.world_size, square_loss(2))
    assert_same_gradients(model, reference)


class Searching(Stack):
    """Runs two backwards in its forward, of which the first may fail in a block, and goes on with all of its layers."""

    fails: int | None = None
    is_reference = False

    def forward(self, x: torch.Tensor, run: Any = None) -> torch.Tensor:
        x = self.first(x)
        for step in range(2):
            inner = x.detach().requires_grad_()
            found = self.blocks[0](inner)
            if self.fails is not None and step == 0:
                handle = unwrapped(self.blocks[self.fails]).down.register_forward_hook(fail_in_backward)
                with pytest.raises(ZeroDivisionError):
                    self.blocks[1](self.blocks[2](found)).sum().backward()
                handle.remove()
                if self.is_reference:  # a sharded model drops the gradients of a backward that raised
                    self.blocks.zero_grad()
            else:
                (gradient,) = torch.autograd.grad(found.square().sum(), inner)
                x = x - 0.01 * gradient
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@on_ranks(2)
@each_value(1, front_end=FRONT_ENDS, strategy=["FULL_SHARD", "SHARD_GRAD_OP"], fails=[None, 1, 2])
def test_backward_inside_a_forward_that_fails(
    rank: Rank, front_end: FrontEnd, strategy: str, fails: int | None
) -> None:
    """The forward that it lies in goes on, with its own parameters, and so does its backward."""
    plain = build(Searching)
    model, reference = sharded_with_reference(front_end, rank, plain, strategy=strategy)
    plain.fails = reference.fails = fails
    reference.is_reference = True
    assert_trains_alike(model, reference, rank)


# -------------------------------------------------------------------- failures of the engine's own steps


class LostPeer:
    """Work that fails."""

    def wait(self) -> None:
        raise RuntimeError("peer lost")


@on_ranks(2)
@each_front_end
def test_all_gather_that_fails(rank: Rank, front_end: FrontEnd) -> None:
    """In a unit with two dtypes: the forward raises, and the next one is right."""
    plain = build(Stack)
    plain.blocks[1].down.double().register_forward_pre_hook(lambda _, args: (args[0].double(),))
    plain.blocks[1].down.register_forward_hook(lambda _module, _args, output: output.float())
    model, reference = sharded_with_reference(front_end, rank, plain)
    square_loss(1)(model, rank.rank).backward()

    def launch_and_lose(requests: Iterable[tuple[Any, CommRequest]], kind: Any) -> list[Any]:
        requests = list(requests)
        units = [request.unit for _, request in requests]
        return [*launch_all(requests, kind), *([LostPeer()] if "blocks.1" in units else [])]

    all_gather.launch_all = launch_and_lose
    try:
        with pytest.raises(RuntimeError, match="peer lost"):
            model(batch(rank.rank, 1, 4, 6))
    finally:
        all_gather.launch_all = launch_all
    assert not runtime_of(nested_units(model)[0]).busy
    assert_next_step_is_right(model, reference, rank)


@on_ranks(2)
def test_reset_iter_state(rank: Rank) -> None:
    """A no-op before anything ran and at rest, refused by nested units; it frees what a forward has kept."""
    model, reference = sharded(COMPOSABLE, rank, strategy="SHARD_GRAD_OP")
    model.reset_iter_state()
    both_backward(model, reference, rank, square_loss())
    with pytest.raises(FullshardError, match=r"found unit 'blocks\.1'; call it on the root, a FSDPStack"):
        model.blocks[1].reset_iter_state()
    model.reset_iter_state()
    assert_same_gradients(model, reference)
    square_loss(1)(model, rank.rank)
    assert gathered(model) == ["", "blocks.0", "blocks.1", "blocks.2"]
    reference.zero_grad()
    model.reset_iter_state()
    assert_next_step_is_right(model, reference, rank)


# -------------------------------------------------------------------- one rank alone fails


def fail_on_one_rank(rank: Rank) -> None:
    """Rank 1 raises in the middle of the second step; the group gives up on silent ranks after two seconds."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    model = COMPOSABLE.wrap(Stack(), rank, mesh=DeviceMesh.from_group(group, rank.device.type))
    square_loss(0)(model, rank.rank).backward()
    if rank.rank == 1:
        PLACES["backward of a block"](model)
    square_loss(1)(model, rank.rank).backward()
    if rank.device.type != "cpu":
        torch.accelerator.synchronize()  # before, the host has waited for nothing
    time.sleep(30)  # not reached: it would count as hung


def test_one_failing_rank_does_not_hang_the_other(ranks: RankPool) -> None:
    """If one rank raises in the middle of a step, the other one's collective ends with an error in time."""
    if device_type() == "cuda":
        pytest.skip("NCCL does not notice that a rank is gone; its watchdog ends the process after the group's timeout")
    waiting, failed = ranks(2, fail_on_one_rank, fresh=True, expect_failure=True, timeout=20)
    assert (failed.kind, failed.error_type) == ("raised", "ZeroDivisionError")
    assert waiting.kind == "raised", waiting
    assert "RuntimeError" in waiting.error_types


def fail_at_different_units(rank: Rank) -> list[float]:
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(4)))
    for number, layer in enumerate(model):
        nn.init.constant_(layer.weight, number + 1.0)
    COMPOSABLE.wrap(model, rank)
    handle = model[rank.rank].register_forward_pre_hook(fail)
    with contextlib.suppress(ZeroDivisionError):
        model(torch.ones(1, 2))
    handle.remove()
    return model(torch.ones(1, 2)).flatten().tolist()


def test_ranks_out_of_step_never_take_each_others_units(ranks: RankPool) -> None:
    """Ranks that failed in different units end with an error or the right result, never with mixed-up weights."""
    for outcome in ranks(2, fail_at_different_units, fresh=True, expect_failure=True, timeout=50):
        assert outcome.kind in ("raised", "died") or outcome.value == [24.0 * 16, 24.0 * 16]


# how the front end shards -> the options that it is given
OUT_OF_MEMORY: dict[str, Callable[[FrontEnd], dict[str, Any]]] = {
    "plainly": lambda _: {},
    "in mixed precision": lambda front_end: front_end.precision(torch.bfloat16, torch.float32),
    "with replicas": lambda _: {"strategy": "HYBRID_SHARD"},
    "offloaded": lambda front_end: front_end.offload(),
    "resharded to subgroups": lambda front_end: {"reshard_after_forward": 2} if front_end.composable else {},
}


@on_ranks(4, timeout=240)
@each_value(front_end=FRONT_ENDS, how=OUT_OF_MEMORY, first=[0, 1, 2, 3])
def test_out_of_memory_anywhere(rank: Rank, front_end: FrontEnd, how: str, first: int) -> None:
    """Memory runs out once, at any place of a first step: the step is repeated, and the next are as if it had not."""

    def trained(place: int) -> tuple[list[torch.Tensor], int]:
        model = front_end.wrap(build(Mlp, 8, 8, 8), rank, **OUT_OF_MEMORY[how](front_end))
        optimizer, x = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), batch(rank.rank, 0, 4, 8)
        injected, found = OutOfMemoryAt(place), []
        with contextlib.suppress(torch.OutOfMemoryError), injected:
            model(x).square().sum().backward()
            front_end.clip(model, 10.0)
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            found += [loss.detach(), front_end.clip(model, 10.0)]
            optimizer.step()
        assert_at_rest(model)
        return found + list(full_values(model).values()), injected.places

    expected, places = trained(-1)
    everywhere = [0] * rank.world_size
    dist.all_gather_object(everywhere, places)
    assert set(everywhere) == {places}, "a place has to be the same on all ranks"
    for place in range(first, places, 4):
        assert_equal(trained(place)[0], expected, f"after out of memory at place {place} of {places}")
