"""Which collectives the wrapper issues, in which order: per strategy, per kind of prefetch."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from earlier_front_ends import (
    CLOSE,
    Block,
    Events,
    Stack,
    assert_at_rest,
    assert_same_gradients,
    assert_same_values,
    batch,
    build,
    gathered,
    reference_backward,
    square_loss,
    train,
    train_reference,
    wrapped,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from compare import assert_close
from fullshard import BackwardPrefetch, FullyShardedDataParallel, ShardingStrategy
from fullshard.activation_checkpoint import apply_activation_checkpointing
from fullshard.comm import record
from models import tiny_units
from ranks import Rank, on_ranks

both_modes = pytest.mark.parametrize("use_orig_params", [False, True])


def make(rank: Rank, depth: int = 3, **options: Any) -> tuple[FullyShardedDataParallel, Events]:
    """A wrapped stack of units that travel alone, and its log."""
    events = Events()
    model = build(Stack, depth)
    with tiny_units():
        wrapper = wrapped(model, rank, **options)
    wrapper.module.log = events
    for block in wrapper.blocks:
        block.module.log = events
    return wrapper, events


def run_step(model: nn.Module, events: Events, rank: Rank, step: int = 0, **options: Any) -> tuple[str, str]:
    """One forward and backward; the events of each."""
    with events:
        loss = model(batch(rank.rank, step, 4, 6), **options).square().mean()
    forward = events.short()
    with events:
        loss.backward()
    return forward, events.short()


def counts(events: str, letter: str) -> int:
    return sum(event.startswith(letter) for event in events.split())


# Gathers in forward and in backward, reductions, all-reductions, of four units (the root and what ran last are kept).
EXPECTED = {
    ShardingStrategy.FULL_SHARD: (4, 2, 4, 0),
    ShardingStrategy.SHARD_GRAD_OP: (4, 0, 4, 0),
    ShardingStrategy.HYBRID_SHARD: (4, 2, 4, 4),
    ShardingStrategy._HYBRID_SHARD_ZERO2: (4, 0, 4, 4),
    ShardingStrategy.NO_SHARD: (0, 0, 0, 4),
}


@on_ranks(2, 4)
@both_modes
@pytest.mark.parametrize("strategy", list(ShardingStrategy), ids=lambda s: s.name)
def test_collectives_of_each_strategy(rank: Rank, strategy: ShardingStrategy, use_orig_params: bool) -> None:
    """One gather per unit in forward, one per freed unit in backward, one reduction (and all-reduction) per unit."""
    mesh = rank.mesh
    if strategy.hybrid:
        if rank.world_size == 2:
            pytest.skip("a (2, 2) mesh has four ranks")
        mesh = rank.make_mesh(2, 2)
    model, events = make(rank, sharding_strategy=strategy, device_mesh=mesh, use_orig_params=use_orig_params)
    for step in range(3):
        forward, backward = run_step(model, events, rank, step)
        assert counts(forward, "R") == counts(forward, "A") == 0
        found = (counts(forward, "G"), *(counts(backward, letter) for letter in "GRA"))
        assert found == EXPECTED[strategy], (forward, backward)


@on_ranks(1)
@both_modes
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_one_rank_communicates_nothing(rank: Rank, strategy: str, use_orig_params: bool) -> None:
    """With one rank there is no collective, and no warning that would tell to change the strategy."""
    model, _ = make(rank, sharding_strategy=ShardingStrategy[strategy], use_orig_params=use_orig_params)
    reference = build(Stack)
    with record() as seen:
        losses = train(model, rank, square_loss, 3)
    assert seen == []
    assert_close(losses, train_reference(reference, rank, square_loss, 3), "losses", **CLOSE)
    assert_same_values(model, reference, **CLOSE)


@on_ranks(2)
@both_modes
def test_no_sync_saves_all_reductions(rank: Rank, use_orig_params: bool) -> None:
    """Three microbatches, two of them in ``no_sync``: one reduction per unit, of the sum."""
    model, events = make(rank, use_orig_params=use_orig_params)
    reference = build(Stack)
    for step in range(2):
        with model.no_sync():
            for micro in range(2):
                assert counts(run_step(model, events, rank, micro)[1], "R") == 0
        assert counts(run_step(model, events, rank, 2)[1], "R") == 4
        for micro in range(3):
            reference_backward(reference, rank.world_size, square_loss(micro))
        assert_same_gradients(model, reference)
        assert step == 1 or gathered(model) == []


# -------------------------------------------------------------------- order

FORWARD = "Gr G0 G1 F0 G2 F1 F2"
BACKWARD: dict[BackwardPrefetch | None, str] = {
    # The next unit is gathered before this one computes gradients (what ran last is kept for when the root comes),
    BackwardPrefetch.BACKWARD_PRE: "b2 G1 B2 R2 b1 G0 B1 R1 b0 B0 R0 Bf Rr",
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
@both_modes
@pytest.mark.parametrize("prefetch", [*BackwardPrefetch, None], ids=str)
def test_order_of_backward_prefetch(rank: Rank, prefetch: BackwardPrefetch | None, use_orig_params: bool) -> None:
    """Each kind of prefetch issues gathers where it says, in every step; reductions start as units end."""
    model, events = make(rank, backward_prefetch=prefetch, use_orig_params=use_orig_params)
    for step in range(3):
        forward, backward = run_step(model, events, rank, step)
        assert forward == FORWARD
        assert without_ties(backward) == without_ties(BACKWARD[prefetch])


@on_ranks(2)
@pytest.mark.parametrize("prefetch", [*BackwardPrefetch, None], ids=str)
def test_prefetch_follows_what_ran(rank: Rank, prefetch: BackwardPrefetch | None) -> None:
    """In another order than that of registration, gathers follow the forward that was recorded; values are right."""
    model, events = make(rank, backward_prefetch=prefetch)
    reference = build(Stack)
    order = [2, 0, 1]
    run_step(model, events, rank, run=order)
    model.zero_grad()
    forward, backward = run_step(model, events, rank, run=order)
    assert [event for event in forward.split() if event[0] == "G"] == ["Gr", "G2", "G0", "G1"]
    kept = prefetch is BackwardPrefetch.BACKWARD_PRE
    assert [event for event in backward.split() if event[0] == "G"] == [*([] if kept else ["G1"]), "G0", "G2"]

    def loss_of(module: nn.Module, number: int) -> torch.Tensor:
        return module(batch(number, 0, 4, 6), run=order).square().mean()

    reference_backward(reference, rank.world_size, loss_of)
    assert_same_gradients(model, reference)


@on_ranks(2)
@pytest.mark.parametrize("prefetch", [*BackwardPrefetch, None], ids=str)
def test_wrong_guesses_of_prefetch(rank: Rank, prefetch: BackwardPrefetch | None) -> None:
    """Forwards whose order changes at every step never deadlock and train right; nothing stays gathered."""
    orders = [[0, 1, 2], [2, 1, 0], [1], [0, 2, 0], [2], [1, 0]]
    model, reference = make(rank, backward_prefetch=prefetch)[0], build(Stack)

    def loss_at(step: int) -> Any:
        run = orders[step % len(orders)]
        return lambda module, number: module(batch(number, step, 4, 6), run=run).square().mean()

    losses = train(model, rank, loss_at, 6)
    assert_close(losses, train_reference(reference, rank, loss_at, 6), "losses", **CLOSE)
    assert_same_values(model, reference, **CLOSE)
    assert_at_rest(model)


@on_ranks(2)
@both_modes
def test_two_forwards_before_backward(rank: Rank, use_orig_params: bool) -> None:
    """Each unit reduces once for two forwards and one backward, whose inputs need no gradients."""
    model, events = make(rank, use_orig_params=use_orig_params)
    reference = build(Stack)
    for _ in range(2):
        loss = sum(model(batch(rank.rank, i, 4, 6)).square().mean() for i in range(2))
        with events:
            loss.backward()
        reduced = Counter(event for event in events.short().split() if event[0] == "R")
        assert set(reduced) == {"Rr", "R0", "R1", "R2"} and max(reduced.values()) == 1
        model.zero_grad()
    sum(model(batch(rank.rank, i, 4, 6)).square().mean() for i in range(2)).backward()
    for step in range(2):
        reference_backward(reference, rank.world_size, square_loss(step))
    assert_same_gradients(model, reference)


@on_ranks(2)
@both_modes
def test_two_losses_of_one_graph(rank: Rank, use_orig_params: bool) -> None:
    """Two backwards over one graph add up; the second one gathers again what the first has freed."""
    model, _ = make(rank, use_orig_params=use_orig_params)
    reference = build(Stack)
    output = model(batch(rank.rank, 0, 4, 6))
    output.square().mean().backward(retain_graph=True)
    assert [name for name in gathered(model) if "blocks" in name] == []
    output.sum().backward()
    for loss_of in (
        square_loss(0),
        lambda m, r: m(batch(r, 0, 4, 6)).sum(),
    ):
        reference_backward(reference, rank.world_size, loss_of)
    assert_same_gradients(model, reference)
    assert_at_rest(model)


@on_ranks(2)
def test_reductions_run_beside_backward(rank: Rank) -> None:
    """All but the root's reductions are issued before autograd has reached the first layer."""
    model, events = make(rank)
    backward = run_step(model, events, rank)[1].split()
    assert all(backward.index(event) < backward.index("Bf") for event in ("R2", "R1", "R0"))


@on_ranks(2)
@both_modes
@pytest.mark.parametrize("inside", ["blocks", "layers", "function"])
def test_recomputation_gathers_nothing_more(rank: Rank, inside: str, use_orig_params: bool) -> None:
    """With recomputed activations, inside of units, a step issues the gathers and reductions that it does without."""
    model, events = make(rank, use_orig_params=use_orig_params)
    if inside == "function":
        for block in model.blocks:
            inner = block.module
            forward = inner.forward
            inner.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
    else:
        what = {"blocks": Block, "layers": nn.Linear}[inside]
        apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, what))
    plain, plain_events = make(rank, use_orig_params=use_orig_params)
    for step in range(2):
        ours, theirs = run_step(model, events, rank, step), run_step(plain, plain_events, rank, step)
        for direction in range(2):
            for letter in "GR":
                pair = [[e for e in one[direction].split() if e[0] == letter] for one in (ours, theirs)]
                assert pair[0] == pair[1]
    assert_same_gradients(model, plain, rtol=0.0, atol=0.0)


@on_ranks(2)
@both_modes
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_around_units(rank: Rank, reentrant: bool, use_orig_params: bool) -> None:
    """Units that a checkpoint contains are gathered once more at most, and reduce once."""
    model, events = make(rank, use_orig_params=use_orig_params)
    blocks = list(model.blocks)

    class Around(nn.Module):
        """Calls a block in a checkpoint."""

        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.block, x, use_reentrant=reentrant)

    model.module.blocks = nn.ModuleList(Around(block) for block in blocks)
    reference = copy.deepcopy(build(Stack))
    for step in range(2):
        forward, backward = run_step(model, events, rank, step)
        assert counts(forward, "G") == 4
        assert counts(backward, "R") == 4
        assert counts(backward, "G") <= 6
        reference_backward(reference, rank.world_size, square_loss(step))
    for block, plain in zip(blocks, reference.blocks, strict=True):
        assert_same_gradients(block, plain)
    assert_at_rest(model)
