"""In which order units are unsharded, compute and are reduced, and what is unsharded meanwhile: exact, by strategy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from compare import assert_close
from front_ends import (
    COMPOSABLE,
    FLAT,
    ORIGINAL,
    Events,
    FrontEnd,
    assert_at_rest,
    build,
    each_front_end,
    gathered,
    sharded_with_reference,
    unwrapped,
)
from fullshard import BackwardPrefetch
from fullshard.comm import record
from fullshard.frontend.sharded_module import unit_at
from models import Block, Mlp, Stack, batch, reference_backward, square_loss, tiny_units
from pairwise import each_value
from ranks import Rank, on_ranks


def make(front_end: FrontEnd, rank: Rank, depth: int = 3, **options: Any) -> tuple[Any, Events]:
    """A sharded stack, each of whose units has messages of its own, and its log."""
    events = Events()
    with tiny_units():
        return front_end.wrap(build(Stack, depth, log=events), rank, **options), events


def run_step(model: Any, events: Events, rank: Rank, step: int = 0, **options: Any) -> tuple[str, str]:
    """One forward and backward; the events of each."""
    with events:
        loss = model(batch(rank.rank, step, 4, 6), **options).square().mean()
    forward = events.short()
    with events:
        loss.backward()
    return forward, events.short()


FORWARD = "Gr G0 G1 F0 G2 F1 F2"
BACKWARD = "B2 R2 G0 B1 R1 B0 R0 Bf Rr"  # the root and the two units that ran last are kept


@on_ranks(2)
@each_front_end
def test_prefetches_follow_the_order_of_the_step_before(rank: Rank, front_end: FrontEnd) -> None:
    """The first step guesses the order of ``modules()``; the second prefetches in the order of the first."""
    model, events = make(front_end, rank)
    first, second = (run_step(model, events, rank, run=[2, 0, 1]) for _ in range(2))
    assert first == ("Gr G0 G2 F2 F0 G1 F1", "G0 B1 R1 B0 R0 B2 R2 Bf Rr")  # 1 and 2, thought to be last, were kept
    assert second == ("Gr G2 G0 F2 G1 F0 F1", "B1 R1 G2 B0 R0 B2 R2 Bf Rr")
    assert [run_step(model, events, rank, run=[0, 2])[0] for _ in range(2)][1] == "Gr G0 G2 F0 F2"
    assert [run_step(model, events, rank) for _ in range(3)][2] == (FORWARD, BACKWARD)
    assert_at_rest(model)


@on_ranks(2)
@each_front_end
def test_units_whose_outputs_are_in_no_loss(rank: Rank, front_end: FrontEnd) -> None:
    """Backward does not unshard them, and prefetches the unit before the one that the loss came from."""
    model, events = make(front_end, rank, 4)
    outputs = []
    model.get_submodule("blocks.1" if front_end.composable else "_fsdp_wrapped_module.blocks.1").register_forward_hook(
        lambda _module, _inputs, output: outputs.append(output)
    )
    for step in range(2):
        model(batch(rank.rank, step, 4, 6))
        with events:
            outputs.pop().square().mean().backward()
        assert events.short() == "G1 G0 B1 R1 B0 R0 Bf Rr"
        assert_at_rest(model)


PREFETCH: dict[BackwardPrefetch | None, str] = {
    # The next unit is all-gathered before this one computes gradients (what ran last, and before it, is kept),
    BackwardPrefetch.BACKWARD_PRE: "B2 R2 G0 B1 R1 B0 R0 Bf Rr",
    # or after that,
    BackwardPrefetch.BACKWARD_POST: "G2 B2 G1 R2 B1 G0 R1 B0 R0 Bf Rr",
    # or when it is needed.
    None: "G2 B2 R2 G1 B1 R1 G0 B0 R0 Bf Rr",
}


@on_ranks(2)
@each_value(front_end=[ORIGINAL, FLAT], prefetch=PREFETCH)
def test_kinds_of_backward_prefetch(rank: Rank, prefetch: BackwardPrefetch | None, front_end: FrontEnd) -> None:
    """Each kind of the wrapper issues all-gathers where it says, in every step."""
    model, events = make(front_end, rank, backward_prefetch=prefetch, forward_prefetch=True)
    for step in range(2):
        forward, backward = run_step(model, events, rank, step)
        assert forward == FORWARD
        # An all-gather and a reduction that follow each other may be issued in either order.
        assert re.sub(r"(R\d) (G\d)", r"\2 \1", backward) == re.sub(r"(R\d) (G\d)", r"\2 \1", PREFETCH[prefetch])


@on_ranks(2)
def test_budget_counts_bytes(rank: Rank) -> None:
    """A large unit waits until it fits; one larger than the budget is prefetched when nothing else is."""
    events = Events()
    with tiny_units():
        model = Stack(depth=4, log=events)
        model.blocks[2] = Block(24, "blocks.2", events)
        body = model.blocks[2].body
        model.blocks[2].body = lambda x: body(x.repeat(1, 4))[:, :6]
        COMPOSABLE.wrap(model, rank)
    small = unit_at(model.blocks[0]).unsharded_bytes
    model.set_prefetch_bytes(2 * small)
    for step in range(2):
        forward, backward = run_step(model, events, rank, step)
        assert forward == "Gr G0 G1 F0 G2 F1 G3 F2 F3"
        assert backward == "B3 R3 G1 G0 B2 R2 B1 R1 B0 R0 Bf Rr"  # block 2, which is kept, is more than the budget
    model.set_prefetch_bytes(unit_at(model.blocks[2]).unsharded_bytes + small)
    run_step(model, events, rank)
    assert run_step(model, events, rank)[1] == "B3 R3 G0 B2 R2 B1 R1 B0 R0 Bf Rr"  # 3 computes, and 2 and 1 fit
    model.set_prefetch_bytes(0)
    run_step(model, events, rank)
    assert run_step(model, events, rank) == ("Gr G0 F0 G1 F1 G2 F2 G3 F3", "G3 B3 R3 G2 B2 R2 G1 B1 R1 G0 B0 R0 Bf Rr")
    for bad, error, words in (
        (-1, ValueError, "at least 0 bytes, found -1"),
        (1.5, TypeError, "a number of bytes or None, found 1.5"),
        (True, TypeError, "a number of bytes or None, found True"),
    ):
        with pytest.raises(error, match=f"set_prefetch_bytes: expected {words}"):
            model.set_prefetch_bytes(bad)


@on_ranks(2)
@each_front_end
def test_two_units_are_unsharded_at_a_time(rank: Rank, front_end: FrontEnd) -> None:
    """Of equal blocks one that computes and the next; the last two are kept from forward to backward.

    So it is with a budget of one block, when activations are computed again, and after a forward without a backward.
    """
    model, _ = make(front_end, rank, 6)
    numbers: list[int] = []

    def unsharded() -> list[str]:
        return [name for name in gathered(model) if "blocks" in name]

    def look(*_: Any) -> None:
        numbers.append(len(unsharded()))

    for block in model.blocks:
        inner = unwrapped(block)
        inner.up.register_forward_pre_hook(look)
        inner.down.register_forward_hook(look)
        inner.up.register_full_backward_hook(look)
        inner.down.register_full_backward_hook(look)
    for how in ("plain", "budget", "recomputed"):
        if how == "budget":
            square_loss()(model, rank.rank)
            unit_at(model).settings.prefetch_bytes = unit_at(model.blocks[0]).unsharded_bytes
        for block in model.blocks:
            unwrapped(block).checkpointed = True if how == "recomputed" else None
        loss = square_loss()(model, rank.rank)
        assert how != "plain" or unsharded() == ["blocks.4", "blocks.5"]
        loss.backward()
        assert_at_rest(model)
    assert len(numbers) >= 84 and max(numbers) == 2


# -------------------------------------------------------------------- what optimizers outdate


@on_ranks(2)
def test_another_optimizer_on_one_rank_changes_nothing(rank: Rank) -> None:
    """Steps of an optimizer that holds none of our parameters, on one rank only, do not change what is unsharded."""
    model, _ = make(COMPOSABLE, rank)
    other = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    for _ in range(2):
        with record() as seen:
            loss = square_loss()(model, rank.rank)
            if rank.rank == 0:
                other.param_groups[0]["params"][0].grad = torch.ones(2)
                other.step()
            loss.backward()
    order = ["", "blocks.0", "blocks.1", "blocks.2", "blocks.0"]
    assert [c.unit for c in seen if c.kind == "all_gather"] == order


@on_ranks(2)
def test_only_the_units_of_an_optimizer_become_outdated(rank: Rank) -> None:
    """A step outdates what it may have written to, and no other unit is unsharded again."""
    with tiny_units():
        model = COMPOSABLE.wrap(Mlp(6, 6, 6), rank, strategy="SHARD_GRAD_OP")
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


ADDED: dict[str, Callable[[torch.optim.Optimizer, list[Any]], object]] = {
    "add_param_group": lambda optimizer, later: optimizer.add_param_group({"params": later}),
    "replace": lambda optimizer, later: optimizer.param_groups[0].update(params=later),  # as many as before
    "append": lambda optimizer, later: optimizer.param_groups[0]["params"].extend(later),
}


@on_ranks(2)
@pytest.mark.parametrize("change", ADDED)
def test_parameters_that_an_optimizer_gets_later(rank: Rank, change: str) -> None:
    """Units that stay unsharded are unsharded anew after the first step of an optimizer that got them after its first.

    Were the units of an optimizer looked up at its first step only, the last forward would compute with old weights.
    """
    model, reference = sharded_with_reference(COMPOSABLE, rank, build(Mlp, 6, 6, 6), strategy="SHARD_GRAD_OP")
    optimizers = [torch.optim.SGD(one.layers[0].parameters(), lr=0.5) for one in (model, reference)]
    for step in range(2):
        square_loss(step)(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, square_loss(step))
        if step == 1:
            for one, optimizer in zip((model, reference), optimizers, strict=True):
                ADDED[change](optimizer, list(one.layers[1].parameters()))
            model(batch(rank.rank, step, 4, 6))  # leaves unsharded parameters behind
            assert unit_at(model.layers[1]).is_unsharded
        for optimizer in optimizers:
            optimizer.step()
    x = batch(0, 9, 4, 6)
    assert_close(model(x).detach(), reference(x).detach(), "output after the step", rtol=1e-5, atol=1e-7)


@on_ranks(2)
@pytest.mark.parametrize(("setting", "all_gathers"), [(True, 10), (None, 5)])
def test_optimizer_in_backward_keeps_what_was_prefetched(rank: Rank, setting: bool | None, all_gathers: int) -> None:
    """Stepping a unit's optimizer in backward unshards neither other units twice nor those that were kept again."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    COMPOSABLE.wrap(model, rank, reshard_after_forward=setting)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        with record() as seen:
            model(torch.ones(3, 4)).sum().backward()
    assert [c.kind for c in seen].count("all_gather") == all_gathers
