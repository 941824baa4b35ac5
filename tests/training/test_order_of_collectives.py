"""What is gathered ahead of what, when reductions start, and what is unsharded meanwhile: exact, by strategy."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from compare import assert_close
from front_ends import (
    COMPOSABLE,
    FLAT,
    FRONT_ENDS,
    ORIGINAL,
    STRATEGIES,
    Events,
    FrontEnd,
    assert_at_rest,
    assert_same_gradients,
    build,
    each_front_end,
    full_values,
    gathered,
    sharded_with_reference,
    unwrapped,
)
from fullshard import BackwardPrefetch
from fullshard.comm import record
from fullshard.engine.ownership import nested_units
from fullshard.engine.reduction.grad_reduction import GradReduction
from fullshard.frontend.sharded_module import unit_at
from models import Block, Mlp, Stack, batch, mark, reference_backward, square_loss, tiny_units
from pairwise import each_value
from ranks import Rank, on_ranks


def make(front_end: FrontEnd, rank: Rank, depth: int = 3, **options: Any) -> tuple[Any, Events]:
    """A sharded stack of units that travel alone, and its log."""
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


def only(events: str, letter: str) -> list[str]:
    return [event for event in events.split() if event[0] == letter]


# -------------------------------------------------------------------- default order

FORWARD = "Gr G0 G1 F0 G2 F1 F2"
BACKWARD = {
    "resharded": "Gr G2 G1 B2 R2 G0 B1 R1 B0 R0 Bf Rr",
    "FULL_SHARD": "B2 R2 G0 B1 R1 B0 R0 Bf Rr",  # the root and the two units that ran last are kept
    "SHARD_GRAD_OP": "B2 R2 B1 R1 B0 R0 Bf Rr",
    "HYBRID_SHARD": "B2 R2 A2 G0 B1 R1 A1 B0 R0 A0 Bf Rr Ar",
    "_HYBRID_SHARD_ZERO2": "B2 R2 A2 B1 R1 A1 B0 R0 A0 Bf Rr Ar",
}


@on_ranks(2)
@each_value(1, front_end=FRONT_ENDS, strategy=["FULL_SHARD", "SHARD_GRAD_OP"], checkpointed=[None, False, True])
def test_default_order(rank: Rank, front_end: FrontEnd, strategy: str, checkpointed: bool | None) -> None:
    """The next unit is gathered before a unit computes, and reductions start as units end, in every step.

    Recomputation inside of units changes nothing about it.
    """
    model, events = make(front_end, rank, strategy=strategy)
    for block in model.blocks:
        unwrapped(block).checkpointed = checkpointed
    for step in range(3):
        assert run_step(model, events, rank, step) == (FORWARD, BACKWARD[strategy])
        assert_at_rest(model)


@on_ranks(2)
@each_front_end
def test_order_is_recorded(rank: Rank, front_end: FrontEnd) -> None:
    """The first step guesses the order of ``modules()``; the second prefetches in the order of the first."""
    model, events = make(front_end, rank)
    first, second = (run_step(model, events, rank, run=[2, 0, 1]) for _ in range(2))
    assert first == ("Gr G0 G2 F2 F0 G1 F1", "G0 B1 R1 B0 R0 B2 R2 Bf Rr")  # 1 and 2, thought to be last, were kept
    assert second == ("Gr G2 G0 F2 G1 F0 F1", "B1 R1 G2 B0 R0 B2 R2 Bf Rr")
    assert [run_step(model, events, rank, run=[0, 2])[0] for _ in range(2)][1] == "Gr G0 G2 F0 F2"
    assert_at_rest(model)


@on_ranks(2)
@each_front_end
def test_units_whose_outputs_are_in_no_loss(rank: Rank, front_end: FrontEnd) -> None:
    """They are not gathered in backward, and the unit before the one that the loss came from is gathered ahead."""
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


# -------------------------------------------------------------------- the wrapper's kinds of prefetch

PREFETCH: dict[BackwardPrefetch | None, str] = {
    # The next unit is gathered before this one computes gradients (what ran last, and before it, is kept),
    BackwardPrefetch.BACKWARD_PRE: "b2 B2 R2 b1 G0 B1 R1 b0 B0 R0 Bf Rr",
    # or after that, but before what lies between the two,
    BackwardPrefetch.BACKWARD_POST: "b2 G2 B2 G1 R2 b1 B1 G0 R1 b0 B0 R0 Bf Rr",
    # or when it is needed.
    None: "b2 G2 B2 R2 b1 G1 B1 R1 b0 G0 B0 R0 Bf Rr",
}


def without_ties(events: str) -> str:
    """Gather and reduction that follow each other may be issued in either order."""
    words = events.split()
    for index in range(len(words) - 1):
        if words[index][0] == "R" and words[index + 1][0] == "G":
            words[index : index + 2] = words[index + 1], words[index]
    return " ".join(words)


@on_ranks(2)
@each_value(front_end=[ORIGINAL, FLAT], prefetch=PREFETCH)
def test_kinds_of_backward_prefetch(rank: Rank, prefetch: BackwardPrefetch | None, front_end: FrontEnd) -> None:
    """Each kind issues gathers where it says, in every step, and in the order that was recorded."""
    model, events = make(front_end, rank, backward_prefetch=prefetch, forward_prefetch=True)
    reference = build(Stack)
    for index, block in enumerate(model.blocks):  # marks what lies between the backwards of two blocks
        block.register_forward_hook(lambda _m, _a, out, i=index: mark(out, f"between blocks.{i}", events))
    for step in range(3):
        forward, backward = run_step(model, events, rank, step)
        assert forward == FORWARD
        assert without_ties(backward) == without_ties(PREFETCH[prefetch])
        model.zero_grad()
    order = [2, 0, 1]
    for _ in range(2):
        model.zero_grad()
        forward, backward = run_step(model, events, rank, run=order)
    assert only(forward, "G") == ["Gr", "G2", "G0", "G1"]
    kept = prefetch is BackwardPrefetch.BACKWARD_PRE
    assert only(backward, "G") == [*([] if kept else ["G1", "G0"]), "G2"]
    reference_backward(reference, rank.world_size, lambda m, r: m(batch(r, 0, 4, 6), run=order).square().mean())
    assert_same_gradients(model, reference)


# -------------------------------------------------------------------- lists of modules, and budgets


@on_ranks(2)
def test_root_prefetches_what_it_is_told(rank: Rank) -> None:
    """The root's own lists work too, and an empty list returns to the recorded order."""
    model, events = make(COMPOSABLE, rank)
    model.set_modules_to_forward_prefetch(list(model.blocks[:2]))
    model.set_modules_to_backward_prefetch([model.blocks[2], model.blocks[1]])
    assert run_step(model, events, rank) == ("Gr G0 G1 F0 G2 F1 F2", "G2 G1 B2 R2 G0 B1 R1 B0 R0 Bf Rr")
    model.set_modules_to_forward_prefetch([])
    model.set_modules_to_backward_prefetch([])
    assert run_step(model, events, rank) == (FORWARD, BACKWARD["FULL_SHARD"])


@on_ranks(2)
def test_budget_counts_bytes(rank: Rank) -> None:
    """A large unit waits until it fits; one larger than the budget is gathered when nothing else is ahead."""
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


# -------------------------------------------------------------------- what is sent, and what is held


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, strategy=["FULL_SHARD", "SHARD_GRAD_OP"])
def test_two_units_are_unsharded_at_a_time(rank: Rank, front_end: FrontEnd, strategy: str) -> None:
    """Of equal blocks one that computes and the next; SHARD_GRAD_OP keeps them till backward, FULL_SHARD the last two.

    So it is with a budget of one block, when activations are computed again, and after a forward without a backward.
    """
    model, _ = make(front_end, rank, 6, strategy=strategy)
    largest: list[int] = []

    def look(*_: Any) -> None:
        largest.append(len([name for name in gathered(model) if "blocks" in name]))

    for block in model.blocks:
        inner = unwrapped(block)
        inner.up.register_forward_pre_hook(look)
        inner.down.register_forward_hook(look)
        inner.up.register_full_backward_hook(look)
        inner.down.register_full_backward_hook(look)
    for step in range(2):
        loss = square_loss(step)(model, rank.rank)
        kept = [name for name in gathered(model) if "blocks" in name]
        assert kept == [f"blocks.{index}" for index in range(6) if index > 3 or strategy != "FULL_SHARD"]
        loss.backward()
        assert_at_rest(model)
    assert len(largest) == 48
    if strategy == "FULL_SHARD":
        square_loss()(model, rank.rank)
        unit_at(model).settings.prefetch_bytes = unit_at(model.blocks[0]).unsharded_bytes
        square_loss()(model, rank.rank).backward()
        for block in model.blocks:
            unwrapped(block).checkpointed = True
        square_loss()(model, rank.rank).backward()
        assert_at_rest(model)
        assert max(largest) == 2


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, strategy=STRATEGIES)
def test_shards_are_all_that_stays(rank: Rank, front_end: FrontEnd, strategy: str) -> None:
    """At rest a rank holds its part of parameters, padded, and as much of gradients, and memory for nothing else."""
    model, reference = sharded_with_reference(front_end, rank, build(Mlp, 8, 64, 64, 8), strategy=strategy)
    whole = sum(p.numel() for p in reference.parameters())
    most = whole if strategy == "NO_SHARD" else whole / rank.world_size
    for step in range(2):
        square_loss(step, 4, 8)(model, rank.rank).backward()
        assert_at_rest(model)
        for unit in nested_units(model):
            for parameter in unit.parameters:
                assert parameter.unsharded.grad is None
                assert strategy == "NO_SHARD" or parameter.unsharded.untyped_storage().nbytes() == 0
        assert not any(isinstance(each, GradReduction) for each in gc.get_objects())  # nor its message
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        for tensors in (list(model.parameters()), gradients):
            local = [t.to_local() if front_end.composable else t for t in tensors]
            held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local if t.numel()}
            assert sum(held.values()) <= 4 * most + 3 * 160
    assert set(full_values(model)) == {name for name, _ in reference.named_parameters()}


# -------------------------------------------------------------------- what optimizers outdate


@on_ranks(2)
def test_another_optimizer_on_one_rank_changes_nothing(rank: Rank) -> None:
    """Steps of an optimizer that holds none of our parameters, on one rank only, do not change what is gathered."""
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
    """A step outdates what it may have written to, and no other unit is gathered again."""
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


@on_ranks(2)
@pytest.mark.parametrize("change", ["add_param_group", "replace", "append"])
def test_parameters_that_an_optimizer_gets_later(rank: Rank, change: str) -> None:
    """Units whose parameters an optimizer was given after its first step are gathered anew after the next.

    Both layers keep their full parameters after forward. Were the units of an optimizer looked up at its first step
    only, the last forward would compute with the old weights of the second layer.
    """
    model, reference = sharded_with_reference(COMPOSABLE, rank, build(Mlp, 6, 6, 6), strategy="SHARD_GRAD_OP")
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
    assert_close(model(x).detach(), reference(x).detach(), "output after the step", rtol=1e-5, atol=1e-7)


@on_ranks(2)
@pytest.mark.parametrize(("setting", "gathers"), [(True, 10), (None, 5)])
def test_optimizer_in_backward_keeps_what_was_gathered_ahead(rank: Rank, setting: bool | None, gathers: int) -> None:
    """Stepping a unit's optimizer in backward neither gathers other units twice nor those that were kept again."""
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
    assert Counter(c.kind for c in seen)["all_gather"] == gathers
