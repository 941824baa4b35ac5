"""After an exception the next step is that of a model that never failed; and no rank hangs on one that failed."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from compare import assert_models_equal
from failing import fail, fail_in_backward
from fullshard import fully_shard
from fullshard.comm import CommRequest, launch_all
from fullshard.engine.buckets import all_gather
from fullshard.engine.reduction.grad_reduction import GradReduction
from fullshard.engine.runtime import runtime_of
from fullshard.errors import FullshardError
from fullshard.frontend.sharded_module import unit_at
from models import (
    Stack,
    assert_at_rest,
    batch,
    gathered,
    reference_backward,
    square_loss,
    tiny_units,
    with_reference,
)
from ranks import Rank, RankPool, on_ranks
from ranks.device import device_type

CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-6}


# where -> a function that makes the model fail there and returns the handle that removes the failure
PLACES = {
    "forward of the first block": lambda m: m.blocks[0].register_forward_pre_hook(fail),
    "forward of a block": lambda m: m.blocks[1].up.register_forward_hook(fail),
    "forward of the root, at its start": lambda m: m.first.register_forward_pre_hook(fail),
    "forward of the root, at its end": lambda m: m.last.register_forward_hook(fail),
    "backward of the root": lambda m: m.last.register_forward_hook(fail_in_backward),
    "backward of a block": lambda m: m.blocks[1].up.register_forward_hook(fail_in_backward),
    "backward of the first layer": lambda m: m.first.register_forward_hook(fail_in_backward),
}


def assert_next_step_is_right(model: nn.Module, reference: nn.Module, rank: Rank) -> None:
    """Clear the gradients of ``model``, and have one more step give those of ``reference``."""
    model.zero_grad()
    square_loss()(model, rank.rank).backward()
    reference_backward(reference, rank.world_size, square_loss())
    assert_models_equal(model, reference, grads=True, **CLOSE)


def run_failing_step(model: nn.Module, rank: Rank, place: str, step: int = 0) -> None:
    handle = PLACES[place](model)
    with pytest.raises(ZeroDivisionError, match=place.split()[0]):
        square_loss(step)(model, rank.rank).backward()
    handle.remove()


@on_ranks(2)
@pytest.mark.parametrize("tiny", [0, 65536], ids=["own messages", "tiny"])
@pytest.mark.parametrize("remedy", ["reset", "zero_grad", "alone"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("setting", [None, False], ids=["default", "keep"])
def test_step_after_a_failure(rank: Rank, place: str, remedy: str, setting: Any, tiny: int) -> None:
    """The step after an exception anywhere gives the gradients of a model that never failed."""
    with tiny_units(up_to=tiny):
        model, reference = with_reference(Stack(), rank, reshard_after_forward=setting)
    sharded = list(model.parameters())
    square_loss(5)(model, rank.rank).backward()
    for step in range(2):
        run_failing_step(model, rank, place, step)
        if remedy == "reset":
            model.reset_iter_state()
            assert_at_rest(model)
        if remedy == "alone":  # nothing of the module is called before its next forward
            for parameter in sharded:
                parameter.grad = None
        else:
            model.zero_grad()
        reference.zero_grad()
        square_loss(step)(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, square_loss(step))
        assert_models_equal(model, reference, grads=True, **CLOSE)
        assert_at_rest(model)


@on_ranks(2)
@pytest.mark.parametrize("place", PLACES)
def test_failure_in_the_very_first_step(rank: Rank, place: str) -> None:
    """The first step of a model may fail, too."""
    model, reference = with_reference(Stack(), rank)
    run_failing_step(model, rank, place)
    model.zero_grad()
    square_loss(1)(model, rank.rank).backward()
    reference_backward(reference, rank.world_size, square_loss(1))
    assert_models_equal(model, reference, grads=True, **CLOSE)
    assert_at_rest(model)


@on_ranks(2)
@pytest.mark.parametrize("tiny", [0, 65536], ids=["own messages", "tiny"])
@pytest.mark.parametrize("place", [place for place in PLACES if place.startswith("forward")])
def test_failed_forward_leaves_nothing_gathered(rank: Rank, place: str, tiny: int) -> None:
    """A forward that raised leaves no unit gathered and all registered parameters sharded, without any reset."""
    with tiny_units(up_to=tiny):
        model, _ = with_reference(Stack(), rank, reshard_after_forward=False)
    for _ in range(2):
        run_failing_step(model, rank, place)
        assert gathered(model) == []
        assert_at_rest(model)


@on_ranks(2)
def test_failed_evaluation(rank: Rank) -> None:
    """A forward without gradients that raised is recovered from as well."""
    model, reference = with_reference(Stack(), rank)
    handle = model.blocks[1].register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError), torch.no_grad():
        model(batch(rank.rank, 0, 4, 6))
    handle.remove()
    assert_at_rest(model)
    square_loss()(model, rank.rank).backward()
    reference_backward(reference, rank.world_size, square_loss())
    assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(2)
@pytest.mark.parametrize("place", [place for place in PLACES if place.startswith("backward")])
def test_failed_backward_leaves_sharded_parameters(rank: Rank, place: str) -> None:
    """Right after a backward that raised the registered parameters are the sharded ones, for ``zero_grad`` and all."""
    model, _ = with_reference(Stack(), rank)
    square_loss(5)(model, rank.rank).backward()
    sharded = dict(model.named_parameters())
    run_failing_step(model, rank, place)
    assert all(parameter is sharded[name] for name, parameter in model.named_parameters())
    model.zero_grad()
    assert all(parameter.grad is None for parameter in sharded.values())
    model.reset_iter_state()
    assert_at_rest(model)


@on_ranks(2)
def test_state_dict_after_a_failed_backward(rank: Rank) -> None:
    """Parameters can be read and saved after a failed backward, before anything else has run."""
    model, reference = with_reference(Stack(), rank)
    run_failing_step(model, rank, "backward of a block")
    state = {name: value.full_tensor() for name, value in model.state_dict().items()}
    for name, value in reference.state_dict().items():
        assert torch.equal(state[name], value), name


@on_ranks(2)
@pytest.mark.parametrize("reset", [True, False], ids=["reset", "alone"])
def test_pending_gradients_and_a_failed_forward(rank: Rank, reset: bool) -> None:
    """A failed forward keeps gradients that wait for a later microbatch; ``reset_iter_state`` drops them."""
    model, reference = with_reference(Stack(), rank)
    model.set_requires_gradient_sync(False)
    square_loss(0)(model, rank.rank).backward()
    if not reset:
        reference_backward(reference, rank.world_size, square_loss(0))
    run_failing_step(model, rank, "forward of a block", step=1)
    if reset:
        model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    square_loss(2)(model, rank.rank).backward()
    reference_backward(reference, rank.world_size, square_loss(2))
    assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(2)
@pytest.mark.parametrize("reset", [True, False], ids=["reset", "alone"])
def test_pending_gradients_and_a_failed_backward(rank: Rank, reset: bool) -> None:
    """A failed backward drops all unreduced gradients, for nobody can tell how far they are complete."""
    model, reference = with_reference(Stack(), rank)
    model.set_requires_gradient_sync(False)
    square_loss(0)(model, rank.rank).backward()
    run_failing_step(model, rank, "backward of a block", step=1)
    if reset:
        model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    square_loss(2)(model, rank.rank).backward()
    reference_backward(reference, rank.world_size, square_loss(2))
    assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(2)
def test_reset_belongs_to_the_root(rank: Rank) -> None:
    """``reset_iter_state`` on a nested unit is refused with the name of the root; on the root at rest it is a no-op."""
    model, reference = with_reference(Stack(), rank)
    square_loss()(model, rank.rank).backward()
    reference_backward(reference, rank.world_size, square_loss())
    with pytest.raises(FullshardError, match=r"unit 'blocks\.1'.*root module, a FSDPStack"):
        model.blocks[1].reset_iter_state()
    model.reset_iter_state()
    assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(2)
def test_reset_before_anything_ran(rank: Rank) -> None:
    """``reset_iter_state`` on a model that never ran does nothing."""
    model, reference = with_reference(Stack(), rank)
    model.reset_iter_state()
    square_loss()(model, rank.rank).backward()
    reference_backward(reference, rank.world_size, square_loss())
    assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(2)
def test_reset_between_forward_and_backward(rank: Rank) -> None:
    """Dropping a forward that will have no backward frees what it kept, and the next step is right."""
    model, reference = with_reference(Stack(), rank, reshard_after_forward=False)
    square_loss(1)(model, rank.rank)
    assert gathered(model) == ["", "blocks.0", "blocks.1", "blocks.2"]
    model.reset_iter_state()
    assert_at_rest(model)
    square_loss()(model, rank.rank).backward()
    reference_backward(reference, rank.world_size, square_loss())
    assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(2)
@pytest.mark.parametrize("unit", ["first.bias", "blocks.2.down.weight"], ids=["at the end", "during the pass"])
def test_hook_on_a_gradient_that_raises(rank: Rank, unit: str) -> None:
    """It is raised by ``backward()``, and nothing of the step is left: no phase, no message, no reduction."""
    model, reference = with_reference(Stack(), rank)
    handle = model.get_parameter(unit).register_post_accumulate_grad_hook(fail)
    with pytest.raises(ZeroDivisionError):
        square_loss(1)(model, rank.rank).backward()
    assert not runtime_of(unit_at(model)).busy
    assert_at_rest(model)
    handle.remove()
    assert_next_step_is_right(model, reference, rank)


def fail_once() -> Any:
    """A function that raises in the first backward of what it returns."""
    failures = [ZeroDivisionError("once")]

    def hook(_: torch.Tensor) -> None:
        if failures:
            raise failures.pop()

    def watch(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        output.register_hook(hook)

    return watch


@on_ranks(2)
@pytest.mark.parametrize("then", ["the same graph", "another loss", "another forward"])
@pytest.mark.parametrize("place", ["first", "blocks.1.up", "last"])
def test_backward_after_one_that_raised(rank: Rank, place: str, then: str) -> None:
    """It gives all gradients, although no forward has noticed the failure: of the same graph, or of another."""
    model, reference = with_reference(Stack(), rank)
    sharded = list(model.parameters())
    handle = model.get_submodule(place).register_forward_hook(fail_once())
    output = model(batch(rank.rank, 1, 4, 6))
    handle.remove()
    losses = [output.square().mean(), output.abs().mean()]
    other = model(batch(rank.rank, 2, 4, 6)).square().mean()
    with pytest.raises(ZeroDivisionError):
        losses[0].backward(retain_graph=True)
    for parameter in sharded:
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
    assert_models_equal(model, reference, grads=True, **CLOSE)


class Retrying(Stack):
    """A backward in its forward raises in the last block, which runs once more then."""

    is_reference = False

    def forward(self, x: torch.Tensor, run: Any = None) -> torch.Tensor:
        x = self.first(x)
        handle = self.blocks[2].down.register_forward_hook(fail_in_backward)
        with pytest.raises(ZeroDivisionError):
            self.blocks[2](x.detach().requires_grad_()).sum().backward()
        handle.remove()
        if self.is_reference:
            self.blocks.zero_grad()
        for block in self.blocks:
            x = block(x)
        return x


@on_ranks(2)
def test_forward_of_a_unit_whose_backward_has_raised(rank: Rank) -> None:
    """The unit's next forward, inside of the same forward of the root, begins anew."""
    model, reference = with_reference(Retrying(), rank)
    reference.is_reference = True
    for step in range(2):
        square_loss(step)(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, square_loss(step))
        assert_models_equal(model, reference, grads=True, **CLOSE)
        assert_at_rest(model)


class LostPeer:
    """Work that fails."""

    def wait(self) -> None:
        raise RuntimeError("peer lost")


@on_ranks(2)
@pytest.mark.parametrize("remedy", ["none", "reset"])
def test_all_gather_that_fails(rank: Rank, remedy: str) -> None:
    """In a unit with two dtypes: the forward raises, and the next one is right."""
    model = Stack()
    model.blocks[1].down.double()
    model.blocks[1].body = lambda x: x + model.blocks[1].down(model.blocks[1].up(x).double()).float()
    model, reference = with_reference(model, rank)
    reference.blocks[1].body = lambda x: x + reference.blocks[1].down(reference.blocks[1].up(x).double()).float()
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
    if remedy == "reset":
        model.reset_iter_state()
    assert not runtime_of(unit_at(model)).busy
    assert_next_step_is_right(model, reference, rank)


@on_ranks(2)
def test_reduction_by_call_that_fails(rank: Rank) -> None:
    """A failure in ``synchronize_gradients`` does not break what comes next."""
    model, reference = with_reference(Stack(), rank)
    model.set_requires_gradient_sync(False)
    square_loss(1)(model, rank.rank).backward()
    usual = GradReduction.copy_in
    GradReduction.copy_in = fail  # type: ignore[method-assign,assignment]
    try:
        with pytest.raises(ZeroDivisionError):
            model.synchronize_gradients()
    finally:
        GradReduction.copy_in = usual  # type: ignore[method-assign]
    model.set_requires_gradient_sync(True)
    assert_next_step_is_right(model, reference, rank)


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
                handle = self.blocks[self.fails].down.register_forward_hook(fail_in_backward)
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
@pytest.mark.parametrize("setting", [None, False], ids=["default", "keep"])
@pytest.mark.parametrize("fails", [None, 1, 2], ids=["none", "first block", "second block"])
def test_backward_inside_a_forward_that_fails(rank: Rank, fails: int | None, setting: Any) -> None:
    """The forward that it lies in goes on, with its own parameters, and so does its backward."""
    model, reference = with_reference(Searching(), rank, reshard_after_forward=setting)
    model.fails = reference.fails = fails
    reference.is_reference = True
    for step in range(2):
        square_loss(step)(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, square_loss(step))
        assert_models_equal(model, reference, grads=True, **CLOSE)
        assert_at_rest(model)


@on_ranks(2)
def test_failure_as_a_forward_begins(rank: Rank) -> None:
    """What raises before the unit computes, such as a check of the order of units, leaves no forward open."""
    model, reference = with_reference(Stack(), rank)
    square_loss(1)(model, rank.rank).backward()
    runtime = runtime_of(unit_at(model))
    runtime.prefetcher.order.on_start = fail
    with pytest.raises(ZeroDivisionError):
        square_loss(1)(model, rank.rank)
    runtime.prefetcher.order.on_start = None
    assert not runtime.busy
    assert_next_step_is_right(model, reference, rank)


@on_ranks(2)
def test_memory_that_a_reduction_does_not_get(rank: Rank) -> None:
    """An error between the allocation of a message and its launch frees the message."""
    model, reference = with_reference(Stack(), rank)
    square_loss(1)(model, rank.rank).backward()
    messages = [b._plans for m in model.modules() if hasattr(m, "_fullshard_unit") for b in unit_at(m).buckets]
    usual = GradReduction.copy_in
    GradReduction.copy_in = fail  # type: ignore[method-assign,assignment]
    try:
        with pytest.raises(ZeroDivisionError):
            square_loss(1)(model, rank.rank).backward()
    finally:
        GradReduction.copy_in = usual  # type: ignore[method-assign]
    model.zero_grad()
    assert not any(plan.message.allocated_bytes for plans in messages for plan in plans.values())
    square_loss()(model, rank.rank).backward()
    reference_backward(reference, rank.world_size, square_loss())
    assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(2)
@pytest.mark.parametrize("before", ["backward that is not the last", "failed backward"])
def test_new_root_above_a_model(rank: Rank, before: str) -> None:
    """A larger model takes over what the last backward left: its gradients, or nothing if it raised."""
    model, reference = with_reference(Stack(), rank)
    if before == "failed backward":
        run_failing_step(model, rank, "backward of a block")
        model.zero_grad()
    else:
        model.set_is_last_backward(False)
        square_loss(1)(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, square_loss(1))
    larger = fully_shard(nn.Sequential(model, nn.Linear(3, 3)))
    larger[1].requires_grad_(False)
    square_loss()(larger, rank.rank).backward()
    reference = nn.Sequential(reference, nn.Linear(3, 3))
    reference[1].load_state_dict({k: v.full_tensor() for k, v in larger[1].state_dict().items()})
    reference_backward(reference, rank.world_size, square_loss())
    assert_models_equal(larger[0], reference[0], grads=True, **CLOSE)


# ---------------------------------------------------------------- one rank alone fails


def fail_on_one_rank(rank: Rank, place: str) -> None:
    """Rank 1 raises in the middle of the second step; the group gives up on silent ranks after two seconds."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    mesh = DeviceMesh.from_group(group, rank.device.type)
    model = Stack()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    square_loss(0)(model, rank.rank).backward()
    if rank.rank == 1:
        PLACES[place](model)
    square_loss(1)(model, rank.rank).backward()
    if rank.device.type != "cpu":
        torch.accelerator.synchronize()  # before, the host has waited for nothing
    time.sleep(30)  # not reached: it would count as hung


@pytest.mark.parametrize("place", ["forward of a block", "backward of a block"])
def test_one_failing_rank_does_not_hang_the_other(ranks: RankPool, place: str) -> None:
    """If one rank raises in the middle of a step, the other one's collective ends with an error in time."""
    if device_type() == "cuda":
        pytest.skip("NCCL does not notice that a rank is gone; its watchdog ends the process after the group's timeout")
    waiting, failed = ranks(2, fail_on_one_rank, place, fresh=True, expect_failure=True, timeout=20)
    assert (failed.kind, failed.error_type) == ("raised", "ZeroDivisionError")
    assert waiting.kind == "raised", waiting
    assert "RuntimeError" in waiting.error_types
