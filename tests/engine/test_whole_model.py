"""Using whole models: several roots, parts on their own, evaluation beside training, and pipelines."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from compare import assert_models_equal
from fullshard import PhaseError, fully_shard, share_comm_ctx
from fullshard.comm import record
from fullshard.engine.ownership import unit_of
from models import (
    LossOf,
    Mlp,
    Stack,
    assert_at_rest,
    batch,
    gathered,
    reference_backward,
    shard_blocks,
    square_loss,
    tiny_units,
    tokens,
    with_reference,
)
from ranks import Rank, on_ranks

CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-6}
DIM = 6


def train(rank: Rank, model: Any, reference: Any, losses: Any = square_loss, steps: int = 2, first: int = 0) -> None:
    """Train both, and compare the weights before the last step and its gradients."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(first, first + steps):
        losses(step)(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, losses(step))
        if step == first + steps - 1:
            assert_models_equal(model, reference, grads=True, **CLOSE)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def gathers(call: Any) -> Counter[str]:
    """How often each unit was gathered during ``call``."""
    with record() as seen:
        call()
    return Counter(c.unit for c in seen if c.kind == "all_gather")


# ---------------------------------------------------------------- several roots


def two_roots(rank: Rank) -> tuple[nn.Module, nn.Module]:
    """Two stages that are sharded on their own; nothing around them is."""
    torch.manual_seed(7)
    model = nn.Sequential(Mlp(DIM, 8, DIM), Mlp(DIM, 5, DIM))
    reference = copy.deepcopy(model)
    for stage in model:
        shard_blocks(stage, rank)
    return model, reference


@on_ranks(1, 2, 4)
def test_two_roots(rank: Rank) -> None:
    """Two sharded models in one graph, with one optimizer, train as without sharding."""
    model, reference = two_roots(rank)
    train(rank, model, reference, steps=3)
    assert unit_of(model[0]).runtime is not unit_of(model[1]).runtime
    if rank.world_size > 1:
        assert_at_rest(model)


@on_ranks(2)
def test_two_roots_that_take_turns(rank: Rank) -> None:
    """Each of two models may be trained on the other's detached outputs, as in adversarial training."""
    model, reference = two_roots(rank)

    def first(step: int) -> LossOf:
        return lambda m, r: m(batch(r, step, 4, DIM)).square().mean()

    def second(step: int) -> LossOf:
        return lambda m, r: m[1](m[0](batch(r, step, 4, DIM)).detach()).square().mean()

    def only_first(step: int) -> LossOf:
        return lambda m, r: m[0](batch(r, step, 4, DIM)).square().mean()

    for step, losses in enumerate([first, second, only_first, second, first]):
        train(rank, model, reference, losses, steps=1, first=step)
        assert_at_rest(model[1])
        if losses is second:  # of the first model there was a forward without a backward
            assert gathered(model[0]) == ["layers.0", "layers.1"]
        else:
            assert_at_rest(model[0])


@on_ranks(2)
def test_two_losses_of_two_roots(rank: Rank) -> None:
    """Forwards of several roots may be open at once, and their backwards run in any order."""
    model, reference = two_roots(rank)
    for order in ([0, 1], [1, 0]):
        losses = [stage(batch(rank.rank, 3, 4, DIM)).square().mean() for stage in model]
        for index in order:
            losses[index].backward()
        for index in order:
            reference_backward(reference[index], rank.world_size, square_loss(3))
        assert_models_equal(model, reference, grads=True, **CLOSE)
        assert_at_rest(model)


@on_ranks(2)
def test_roots_join(rank: Rank) -> None:
    """What were two roots may be put below a third, between steps."""
    model, reference = two_roots(rank)
    train(rank, model, reference, steps=1)
    fully_shard(model, mesh=rank.mesh)
    train(rank, model, reference)
    assert unit_of(model[0]).runtime is unit_of(model[1]).runtime is unit_of(model).runtime
    assert [unit_of(stage).name for stage in model] == ["0", "1"]
    assert_at_rest(model)


class Trunk(nn.Module):
    """Its own head on a trunk that others use too."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk, self.head = trunk, nn.Linear(DIM, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(x))


@on_ranks(2)
def test_trunk_of_two_roots(rank: Rank) -> None:
    """A sharded module that two roots contain may be trained through either, one after the other."""
    torch.manual_seed(8)
    trunk = Mlp(DIM, 8, DIM)
    model = nn.ModuleList([Trunk(trunk), Trunk(trunk)])
    reference = copy.deepcopy(model)
    shard_blocks(trunk, rank)
    for root in model:
        fully_shard(root, mesh=rank.mesh)
    for step, which in enumerate([0, 1, 1, 0, 1]):
        train(rank, model, reference, lambda s, which=which: lambda m, r: square_loss(s)(m[which], r), 1, step)
        assert_at_rest(model)


@on_ranks(2)
@pytest.mark.parametrize("first", ["part", "root"])
def test_part_alone_and_in_the_root(rank: Rank, first: str) -> None:
    """A unit inside a model may be run and trained by itself before, after and between steps of the model."""
    model, reference = with_reference(Stack(), rank)
    block = model.blocks[1]

    def of_block(step: int) -> LossOf:
        return lambda m, r: m.blocks[1](batch(r, step, 4, DIM)).square().mean()

    def of_both(step: int) -> LossOf:
        return lambda m, r: square_loss(step)(m, r) + of_block(step)(m, r)

    def of_both_the_other_way(step: int) -> LossOf:
        return lambda m, r: of_block(step)(m, r) + square_loss(step)(m, r)

    losses = [of_block, square_loss, of_block, of_both, of_both_the_other_way, square_loss]
    if first == "root":
        losses = losses[1:]
    for step, chosen in enumerate(losses):
        train(rank, model, reference, chosen, steps=1, first=step)
        block.reshard()
        assert_at_rest(model)
        with torch.no_grad():
            x = batch(0, step, 2, DIM)
            assert torch.allclose(block(x), reference.blocks[1](x), atol=1e-6)
        block.reshard()
        assert_at_rest(model)


@on_ranks(2)
def test_write_between_uses_as_two_kinds_of_root(rank: Rank) -> None:
    """A part that stayed gathered as a root of its own sees what was written to its shards since."""
    model, reference = with_reference(Stack(), rank)
    x = batch(0, 0, 2, DIM)
    model.blocks[1](x)  # its backward never comes
    with torch.no_grad():
        for parameter in model.blocks[1].parameters():
            parameter.mul_(2)
        for parameter in reference.blocks[1].parameters():
            parameter.mul_(2)
    train(rank, model, reference)
    assert_at_rest(model)


@on_ranks(2)
def test_gradients_of_a_part_wait_for_the_root(rank: Rank) -> None:
    """Gradients that a part kept as a root of its own are reduced with the model's."""
    model, reference = with_reference(Stack(), rank)

    def of_block(m: Any, r: int) -> torch.Tensor:
        return m.blocks[1](batch(r, 9, 4, DIM)).square().mean()

    model.blocks[1].set_requires_gradient_sync(False)
    of_block(model, rank.rank).backward()
    reference_backward(reference, rank.world_size, of_block)
    model.set_requires_gradient_sync(True)
    square_loss(0)(model, rank.rank).backward()
    reference_backward(reference, rank.world_size, square_loss(0))
    assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(2)
def test_new_root_in_the_middle_of_a_step(rank: Rank) -> None:
    """A root that takes units from another one's running step is refused, and both go on afterwards."""
    torch.manual_seed(8)
    trunk = Mlp(DIM, 8, DIM)
    model = nn.ModuleList([Trunk(trunk), Trunk(trunk)])
    shard_blocks(trunk, rank)
    for root in model:
        fully_shard(root, mesh=rank.mesh)
    x = batch(rank.rank, 0, 4, DIM)
    handle = model[0].head.register_forward_pre_hook(lambda *_: model[1](x))
    with pytest.raises(PhaseError, match="Trunk becomes the root while its units are in the middle of a step"):
        model[0](x)
    handle.remove()
    for root in model:
        root(x).sum().backward()
        assert_at_rest(root)


# ---------------------------------------------------------------- evaluation beside training


@on_ranks(2)
def test_reshard_toggled_between_training_and_evaluation(rank: Rank) -> None:
    """Units may be kept in evaluation and freed in training, or the other way round, step by step."""
    with tiny_units(up_to=0):
        model, reference = with_reference(Stack(), rank)
    for step, kept in enumerate([False, True, False, True]):
        model.eval()
        model.set_reshard_after_forward(kept)
        with torch.no_grad():
            x = batch(0, step, 2, DIM)
            for _ in range(2):
                assert torch.allclose(model(x), reference(x), atol=1e-6)
        model.train()
        model.set_reshard_after_forward(not kept)
        train(rank, model, reference, steps=1, first=step)
        assert_at_rest(model)
        loss = square_loss(step)(model, rank.rank)
        assert bool(gathered(model)) is kept
        assert sum(gathers(loss.backward).values()) == (0 if kept else 4)
        model.zero_grad()


@on_ranks(2)
def test_kept_after_backward_for_evaluation(rank: Rank) -> None:
    """With ``set_reshard_after_backward(False)`` evaluations use what is gathered, until an optimizer steps."""
    model, reference = with_reference(Stack(), rank)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    model.set_reshard_after_backward(False)
    x = batch(0, 0, 2, DIM)
    for step in range(3):
        square_loss(step)(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, square_loss(step))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            assert torch.allclose(model(x), reference(x), atol=1e-6)
    assert_models_equal(model, reference, **CLOSE)


@on_ranks(2)
@pytest.mark.parametrize("setting", [True, None, False], ids=["reshard", "default", "keep"])
def test_evaluation_between_forward_and_backward(rank: Rank, setting: bool | None) -> None:
    """An evaluation between a training forward and its backward changes nothing."""
    model, reference = with_reference(Stack(), rank, reshard_after_forward=setting)
    for step in range(2):
        loss = square_loss(step)(model, rank.rank)
        with torch.no_grad():
            x = batch(0, step, 2, DIM)
            assert torch.allclose(model(x), reference(x), atol=1e-6)
            assert torch.allclose(model.blocks[2](x), reference.blocks[2](x), atol=1e-6)
        loss.backward()
        reference_backward(reference, rank.world_size, square_loss(step))
        assert_models_equal(model, reference, grads=True, **CLOSE)
        assert_at_rest(model)


# ---------------------------------------------------------------- streams, events, embeddings


@on_ranks(1, 2)
@pytest.mark.parametrize("when", ["before", "after", "between"])
def test_share_comm_ctx(rank: Rank, when: str) -> None:
    """Roots share lanes from the call on, whether they have run or not, also when a root is made anew."""
    model, reference = two_roots(rank)
    stages = list(model)
    if when == "before":
        share_comm_ctx(stages)
    else:
        train(rank, model if when == "after" else model[0], reference if when == "after" else reference[0], steps=1)
        share_comm_ctx(stages[::-1])
    train(rank, model, reference)
    comm_streams = [unit_of(stage).runtime.comm_streams for stage in stages]
    assert comm_streams[0] is comm_streams[1]
    fully_shard(model, mesh=rank.mesh)
    train(rank, model, reference)
    assert unit_of(model).runtime.comm_streams is comm_streams[0]
    share_comm_ctx([])


class Embedded(nn.Module):
    """Two embeddings, one of which is called twice, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.words, self.places, self.layer = nn.Embedding(13, DIM), nn.Embedding(9, DIM), nn.Linear(DIM, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(len(ids))
        return self.layer(torch.tanh(self.words(ids) + self.places(places)) + self.words(ids.flip(0)))


@on_ranks(2)
@pytest.mark.parametrize("tiny", [0, 65536], ids=["own messages", "tiny"])
@pytest.mark.parametrize("sync", [True, False], ids=["sync", "accumulate"])
def test_embeddings_are_not_gathered_in_backward(rank: Rank, sync: bool, tiny: int) -> None:
    """With ``set_unshard_in_backward(False)`` backward does not gather a unit whose parameters it does not read."""
    model = Embedded()
    reference = copy.deepcopy(model)
    with tiny_units(up_to=tiny):
        for module in (model.words, model.places, model.layer, model):
            fully_shard(module, mesh=rank.mesh, reshard_after_forward=True)
    model.words.set_unshard_in_backward(False)
    model.places.set_unshard_in_backward(False)

    def losses(step: int) -> LossOf:
        return lambda m, r: m(tokens(r, step, 9)).square().mean()

    model.set_requires_gradient_sync(sync)
    for step in range(3):
        loss = losses(step)(model, rank.rank)
        assert gathers(loss.backward) == {"layer": 1}
        reference_backward(reference, rank.world_size, losses(step))
        assert_at_rest(model)
    model.synchronize_gradients()
    assert_models_equal(model, reference, grads=True, **CLOSE)
    model.zero_grad()
    reference.zero_grad()
    model.set_requires_gradient_sync(True)
    model.words.set_unshard_in_backward(True)
    assert gathers(losses(5)(model, rank.rank).backward) == {"layer": 1, "words": 1}


class Recorded:
    """An event of some device module; notes that it was waited for."""

    def __init__(self) -> None:
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1


@on_ranks(1, 2)
def test_post_optim_event(rank: Rank) -> None:
    """The first gathers of the next forward, and no others, wait for the event; training is right."""
    with tiny_units(up_to=0):
        model, reference = with_reference(Stack(), rank)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        event: Any = Recorded()
        if step == 0 or rank.device.type != "cpu":
            event = torch.get_device_module(rank.device).Event()
            event.record()
        model.set_post_optim_event(event)
        square_loss(step)(model, rank.rank).backward()
        square_loss(step)(model, rank.rank)
        # The root and what is gathered ahead of its computation; on one rank nothing is gathered.
        assert getattr(event, "waits", 2) == 2 or rank.world_size == 1
        reference_backward(reference, rank.world_size, square_loss(step))
        assert_models_equal(model, reference, grads=True, **CLOSE)
        for optimizer in optimizers:
            optimizer.step()
    model.set_post_optim_event(torch.Event(device=rank.device) if rank.device.type != "cpu" else torch.Event())
    model(batch(0, 0, 2, DIM)).sum().backward()


# ---------------------------------------------------------------- microbatches of a pipeline


@on_ranks(2)
@pytest.mark.parametrize("accumulate", [True, False], ids=["without sync", "sync each"])
@pytest.mark.parametrize("setting", [None, False], ids=["default", "keep"])
def test_last_backward_of_several(rank: Rank, setting: bool | None, accumulate: bool) -> None:
    """Microbatches in the order of a 1F1B pipeline; only the last backward finishes what is in flight."""
    model, reference = with_reference(Stack(), rank, reshard_after_forward=setting)
    for start in (0, 10):
        losses: dict[int, torch.Tensor] = {}
        for kind, number in [("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("F", 3), ("B", 2), ("B", 3)]:
            if kind == "F":
                losses[number] = square_loss(start + number)(model, rank.rank)
                continue
            last = number == 3
            model.set_is_last_backward(last)
            model.set_requires_gradient_sync(last or not accumulate)
            losses.pop(number).backward()
            if start + number == 0:
                assert model.first.weight.grad is None  # the root's reduction, if any, goes on
            reference_backward(reference, rank.world_size, square_loss(start + number))
        assert_at_rest(model)
        assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(2)
def test_pipeline_that_keeps_its_parameters(rank: Rank) -> None:
    """With nothing freed between microbatches each unit is gathered once per step, and freed by hand."""
    with tiny_units(up_to=0):
        model, reference = with_reference(Stack(), rank, reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]

    def microbatches(step: int) -> None:
        losses = [square_loss(4 * step + number)(model, rank.rank) for number in range(3)]
        for number, loss in enumerate(losses):
            model.set_is_last_backward(number == 2)
            model.set_requires_gradient_sync(number == 2)
            loss.backward()

    for step in range(3):
        assert gathers(lambda step=step: microbatches(step)) == {"": 1, "blocks.0": 1, "blocks.1": 1, "blocks.2": 1}
        for number in range(3):
            reference_backward(reference, rank.world_size, square_loss(4 * step + number))
        assert_models_equal(model, reference, grads=True, **CLOSE)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
def test_unshard_ahead_of_a_pipeline_stage(rank: Rank) -> None:
    """Gathers that are issued by hand ahead of a stage's microbatches are used by all of them."""
    model, reference = with_reference(Stack(), rank, reshard_after_forward=False)
    for step in range(2):
        with record() as seen:
            handles = [module.unshard(async_op=True) for module in (model, *model.blocks)]
            losses = [square_loss(step + number)(model, rank.rank) for number in range(2)]
            for handle in handles:
                handle.wait()
            model.set_is_last_backward(False)
            model.set_requires_gradient_sync(False)
            losses[0].backward()
            model.set_is_last_backward(True)
            model.set_requires_gradient_sync(True)
            losses[1].backward()
        for number in range(2):
            reference_backward(reference, rank.world_size, square_loss(step + number))
        assert_models_equal(model, reference, grads=True, **CLOSE)
        assert len([c for c in seen if c.kind == "reduce_scatter"]) == 4
        assert_at_rest(model)
