"""What is gathered ahead of what: the exact order of gathers, computation and reductions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from compare import assert_close, assert_models_equal
from fullshard import fully_shard
from fullshard.comm import base, record
from fullshard.frontend.sharded_module import unit_at
from models import (
    Block,
    Stack,
    assert_at_rest,
    batch,
    gathered,
    reference_backward,
    shard_blocks,
    square_loss,
    tiny_units,
    with_reference,
)
from ranks import Rank, on_ranks

CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-6}


class Events(list[str]):
    """Collects "gather UNIT", "reduce UNIT" (root: "root") between the marks that the model makes itself."""

    def __enter__(self) -> Events:
        base._observers.append(self.collective)
        self.clear()
        return self

    def __exit__(self, *_: object) -> None:
        base._observers.remove(self.collective)

    def collective(self, collective: base.Collective) -> None:
        self.append(f"{collective.kind} {collective.unit or 'root'}")


def short(events: list[str]) -> str:
    """ "gather blocks.1" becomes G1, forward F1, backward B1, reduce R1; the root's are Gr and Rr, its first Bf."""
    letters = []
    for event in events:
        kind, name = event.split()
        letters.append(
            {"all_gather": "G"}.get(kind, kind[0].upper())
            + {"root": "r", "first": "f"}.get(name, name.removeprefix("blocks."))
        )
    return " ".join(letters)


def run_step(model: nn.Module, events: Events, rank: Rank, step: int = 0) -> tuple[str, str]:
    """One forward and backward; the events of each."""
    with events:
        loss = square_loss(step)(model, rank.rank)
    forward = short(events)
    with events:
        loss.backward()
    return forward, short(events)


def build(rank: Rank, depth: int = 3, **settings: Any) -> tuple[nn.Module, Events]:
    events = Events()
    with tiny_units(up_to=0):
        return shard_blocks(Stack(depth=depth, log=events), rank, **settings), events


FORWARD = "Gr G0 G1 F0 G2 F1 F2"
BACKWARD = {
    True: "Gr G2 G1 B2 R2 G0 B1 R1 B0 R0 Bf Rr",
    None: "G1 B2 R2 G0 B1 R1 B0 R0 Bf Rr",
    False: "B2 R2 B1 R1 B0 R0 Bf Rr",
}


@on_ranks(2)
@pytest.mark.parametrize("setting", [True, None, False])
def test_default_prefetch(rank: Rank, setting: Any) -> None:
    """The next unit is gathered before a unit computes, and reductions start as units end, in every step."""
    model, events = build(rank, reshard_after_forward=setting)
    for step in range(3):
        assert run_step(model, events, rank, step) == (FORWARD, BACKWARD[setting])


@on_ranks(2)
def test_order_is_recorded(rank: Rank) -> None:
    """The first step guesses the order of ``modules()``; the second prefetches in the order of the first."""
    model, events = build(rank)
    order = [2, 0, 1]

    def step() -> tuple[str, str]:
        with events:
            loss = model(batch(rank.rank, 0, 4, 6), run=order).square().mean()
        forward = short(events)
        with events:
            loss.backward()
        return forward, short(events)

    first = step()
    second = step()
    assert first[0] == "Gr G0 G2 F2 F0 G1 F1"
    assert second[0] == "Gr G2 G0 F2 G1 F0 F1"
    assert first[1] == "G1 G0 B1 R1 B0 R0 B2 R2 Bf Rr"  # block 2 was thought to be the last, and kept
    assert second[1] == "G0 B1 R1 G2 B0 R0 B2 R2 Bf Rr"
    order[:] = [0, 2]
    step()
    assert step()[0] == "Gr G0 G2 F0 F2"
    assert_at_rest(model)


@on_ranks(2)
@pytest.mark.parametrize(
    ("depth", "forward", "backward"),
    [
        (1, "Gr G0 G1 F0 G2 F1 G3 F2 F3", "G2 B3 R3 G1 B2 R2 G0 B1 R1 B0 R0 Bf Rr"),
        (2, "Gr G0 G1 G2 F0 G3 F1 F2 F3", "G2 G1 B3 R3 G0 B2 R2 B1 R1 B0 R0 Bf Rr"),
    ],
)
def test_listed_prefetch(rank: Rank, depth: int, forward: str, backward: str) -> None:
    """Lists of modules to prefetch, one or two units ahead, are gathered just before their unit computes."""
    model, events = build(rank, depth=4)
    blocks = list(model.blocks)
    for index, block in enumerate(blocks):
        if ahead := blocks[index + 1 : index + 1 + depth]:
            block.set_modules_to_forward_prefetch(ahead)
        if behind := blocks[max(index - depth, 0) : index][::-1]:
            block.set_modules_to_backward_prefetch(behind)
    for step in range(2):
        assert run_step(model, events, rank, step) == (forward, backward)


@on_ranks(2)
def test_root_prefetches_what_it_is_told(rank: Rank) -> None:
    """The root's own lists work too, and an empty list returns to the recorded order."""
    model, events = build(rank)
    model.set_modules_to_forward_prefetch(list(model.blocks[:2]))
    model.set_modules_to_backward_prefetch([model.blocks[2], model.blocks[1]])
    assert run_step(model, events, rank) == ("Gr G0 G1 F0 G2 F1 F2", "G2 G1 B2 R2 G0 B1 R1 B0 R0 Bf Rr")
    model.set_modules_to_forward_prefetch([])
    model.set_modules_to_backward_prefetch([])
    assert run_step(model, events, rank) == (FORWARD, BACKWARD[None])


@on_ranks(2)
@pytest.mark.parametrize("target", [[2], [1], [0, 2], [2, 1, 0]], ids=str)
def test_wrong_prefetch_targets(rank: Rank, target: list[int]) -> None:
    """Prefetching units that are through or far away neither blocks nor changes a value nor leaves memory."""
    with tiny_units(up_to=0):
        model, reference = with_reference(Stack(), rank)
    for block in model.blocks:
        wrong = [model.blocks[i] for i in target]
        block.set_modules_to_backward_prefetch(wrong)
        block.set_modules_to_forward_prefetch(wrong)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(3):
        square_loss(step)(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, square_loss(step))
        assert_models_equal(model, reference, grads=True, **CLOSE)
        assert_at_rest(model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_inside_the_unit(rank: Rank, reentrant: bool) -> None:
    """A body recomputed inside its unit changes nothing about what is gathered when."""
    model, events = build(rank)
    for block in model.blocks:
        block.checkpointed = reentrant
    for step in range(2):
        assert run_step(model, events, rank, step) == (FORWARD, BACKWARD[None])


@on_ranks(2)
def test_checkpoint_around_the_unit(rank: Rank) -> None:
    """A unit that is recomputed as a whole is gathered once in forward and once for recomputation and backward."""
    model, events = build(rank)
    model.checkpointed = False
    for step in range(2):
        forward, backward = run_step(model, events, rank, step)
        assert forward == FORWARD
        assert backward == "G1 B2 F2 R2 G0 B1 F1 R1 B0 F0 R0 Bf Rr"


class Groups(nn.Module):
    """Checkpoints pairs of blocks, each block checkpointing its own body as well."""

    def __init__(self, events: Events) -> None:
        super().__init__()
        self.blocks = Stack(depth=4, log=events).blocks
        for block in self.blocks:
            block.checkpointed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for start in (0, 2):
            x = checkpoint(self.pair, x, start, use_reentrant=False)
        return x

    def pair(self, x: torch.Tensor, start: int) -> torch.Tensor:
        return self.blocks[start + 1](self.blocks[start](x))


@on_ranks(2)
def test_nested_checkpoints_gather_once(rank: Rank) -> None:
    """With checkpoints around and inside units each is gathered once forward and, but for the last, once backward."""
    events = Events()
    with tiny_units(up_to=0):
        model, reference = with_reference(Groups(Events()), rank)
    for block in model.blocks:
        block.log = events

    def loss_of(module: nn.Module, number: int) -> torch.Tensor:
        x = batch(number, 0, 4, 6).requires_grad_()
        return module(x).square().mean()

    for _ in range(2):
        with events:
            loss = loss_of(model, rank.rank)
        forward = short(events).split()
        with events:
            loss.backward()
        backward = short(events).split()
        reference_backward(reference, rank.world_size, loss_of)
        assert [e for e in forward if e[0] == "G"] == ["G0", "G1", "G2", "G3"]
        assert sorted(e for e in backward if e[0] == "G") == ["G0", "G1", "G2"]
        assert [e for e in backward if e[0] == "R"] == ["R3", "R2", "R1", "R0"]
        assert_at_rest(model)
    assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(2)
def test_reductions_start_inside_backward(rank: Rank) -> None:
    """All but the root's reduction have started when autograd comes to the model's first layer."""
    model, events = build(rank, depth=4)
    _, backward = run_step(model, events, rank)
    before, _, after = backward.partition(" Bf ")
    assert [e for e in before.split() if e[0] == "R"] == ["R3", "R2", "R1", "R0"]
    assert after == "Rr"
    for index in (3, 2, 1):
        assert before.index(f"R{index}") < before.index(f"B{index - 1}")


@on_ranks(2)
def test_at_most_two_units_are_gathered_at_once(rank: Rank) -> None:
    """Beside the root, a unit and the one gathered ahead are all that holds memory, forward and backward."""
    model, _ = build(rank, depth=5)
    largest: list[int] = []

    def observe(*_: Any) -> None:
        largest.append(len([name for name in gathered(model) if name]))

    for block in model.blocks:
        block.register_forward_hook(observe)
        block.up.weight.register_hook(observe)
        block.register_full_backward_hook(observe)
    square_loss()(model, rank.rank).backward()
    assert max(largest) == 2
    assert len(largest) == 15


# ---------------------------------------------------------------- gathering by hand


@on_ranks(2)
def test_unshard_before_the_first_forward(rank: Rank) -> None:
    """Gathering by hand before anything ran gives the right values, and training goes on from there."""
    model, reference = with_reference(Stack(), rank)
    model.blocks[1].unshard()
    for ours, theirs in zip(model.blocks[1].parameters(), reference.blocks[1].parameters(), strict=True):
        assert_close(ours.detach(), theirs.detach(), "full parameter", rtol=0.0)
    for step in range(2):
        square_loss(step)(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, square_loss(step))
    assert_models_equal(model, reference, grads=True, **CLOSE)
    assert_at_rest(model)


@on_ranks(2)
@pytest.mark.parametrize("waited", ["by forward", "by handle", "twice", "first by handle"])
def test_asynchronous_unshard(rank: Rank, waited: str) -> None:
    """The forward waits for a gather issued by hand and does not repeat it; so does the handle."""
    model, reference = with_reference(Stack(), rank)
    for step in range(2):
        with record() as seen:
            handles = [module.unshard(async_op=True) for module in (model.blocks[1], model, model.blocks[0])]
            if waited == "by handle":
                for handle in handles:
                    handle.wait()
            elif waited == "first by handle":
                handles[0].wait()
            elif waited == "twice":
                handles[1].wait()
                handles[1].wait()
            loss = square_loss(step)(model, rank.rank)
        assert len([c for c in seen if c.kind == "all_gather"]) == 4
        loss.backward()
        reference_backward(reference, rank.world_size, square_loss(step))
        assert_at_rest(model)
    assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(2)
def test_handle_registers_full_parameters_only_when_waited(rank: Rank) -> None:
    """Until its handle is waited for, an asynchronously gathered unit shows its sharded parameters."""
    model, reference = with_reference(Stack(), rank)
    handle = model.blocks[0].unshard(async_op=True)
    assert type(model.blocks[0].up.weight) is not nn.Parameter
    handle.wait()
    assert torch.equal(model.blocks[0].up.weight, reference.blocks[0].up.weight)
    model.blocks[0].reshard()
    handle.wait()
    assert_at_rest(model)


@on_ranks(1, 2)
def test_unit_without_parameters(rank: Rank) -> None:
    """A unit that has nothing to gather works as a no-op, by hand and in training."""
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    torch.manual_seed(0)
    fully_shard(model[1], mesh=rank.mesh)
    with record() as seen:
        assert model[1].unshard() is None
        handle = model[1].unshard(async_op=True)
        handle.wait()
        model[1].reshard()
        assert torch.equal(model[1](torch.tensor([-1.0, 2.0])), torch.tensor([0.0, 2.0]))
    assert seen == []
    fully_shard(model, mesh=rank.mesh)
    for _ in range(2):
        model(batch(rank.rank, 0, 4, 6)).sum().backward()
        assert_at_rest(model)


@on_ranks(2)
@pytest.mark.parametrize(
    ("budget", "forward", "backward"),
    [
        (None, "Gr G0 G1 F0 G2 F1 G3 F2 F3", "G2 B3 R3 G1 B2 R2 G0 B1 R1 B0 R0 Bf Rr"),
        (0, "Gr G0 F0 G1 F1 G2 F2 G3 F3", "G3 B3 R3 G2 B2 R2 G1 B1 R1 G0 B0 R0 Bf Rr"),
        (0.5, "Gr G0 G1 F0 G2 F1 G3 F2 F3", "G2 B3 R3 G1 B2 R2 G0 B1 R1 B0 R0 Bf Rr"),
        (2, "Gr G0 G1 G2 F0 G3 F1 F2 F3", "G1 G0 B3 R3 B2 R2 B1 R1 B0 R0 Bf Rr"),
        (9, "Gr G0 G1 G2 G3 F0 F1 F2 F3", "B3 R3 B2 R2 B1 R1 B0 R0 Bf Rr"),
    ],
)
def test_prefetch_within_a_budget(rank: Rank, budget: float | None, forward: str, backward: str) -> None:
    """As many of the next units are gathered ahead as fit into the bytes given, at least one; into 0 bytes none."""
    model, events = build(rank, depth=4)
    model.set_prefetch_bytes(budget and int(budget * unit_at(model.blocks[0]).unsharded_bytes))
    for step in range(2):
        assert run_step(model, events, rank, step) == (forward, backward)
    assert_at_rest(model)


@on_ranks(2)
def test_budget_counts_bytes(rank: Rank) -> None:
    """A large unit waits until it fits; one larger than the budget is gathered when nothing else is ahead."""
    events = Events()
    with tiny_units(up_to=0):
        model = Stack(depth=4, log=events)
        model.blocks[2] = Block(24, "blocks.2", events)
        body = model.blocks[2].body
        model.blocks[2].body = lambda x: body(x.repeat(1, 4))[:, :6]
        shard_blocks(model, rank)
    size = unit_at(model.blocks[0]).unsharded_bytes
    model.set_prefetch_bytes(2 * size)
    for step in range(2):
        forward, backward = run_step(model, events, rank, step)
        assert forward == "Gr G0 G1 F0 G2 F1 G3 F2 F3"
        assert backward == "G2 B3 R3 G1 G0 B2 R2 B1 R1 B0 R0 Bf Rr"


@on_ranks(2)
@pytest.mark.parametrize(
    ("budget", "error", "message"),
    [
        (-1, ValueError, "expected at least 0 bytes, found -1"),
        (1.5, TypeError, "expected a number of bytes or None, found 1.5"),
        (True, TypeError, "expected a number of bytes or None, found True"),
    ],
)
def test_bad_budget(rank: Rank, budget: Any, error: type[Exception], message: str) -> None:
    """A budget is a number of bytes."""
    model, _ = build(rank)
    with pytest.raises(error, match=f"set_prefetch_bytes: {message}"):
        model.set_prefetch_bytes(budget)
