"""Several roots: models beside and below each other, parts on their own, shared streams."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from front_ends import (
    COMPOSABLE,
    assert_at_rest,
    assert_same_gradients,
    assert_trains_alike,
    build,
    sgd,
    sharded_with_reference,
)
from fullshard import PhaseError, fully_shard, share_comm_ctx
from fullshard.comm import record
from fullshard.engine.ownership import unit_of
from fullshard.engine.runtime import current_runtime
from models import LossOf, Mlp, Stack, batch, reference_backward, square_loss, tiny_units, tokens
from ranks import Rank, on_ranks


def gathers(call: Callable[[], object]) -> Counter[str]:
    """How often each unit was all-gathered during ``call``."""
    with record() as seen:
        call()
    return Counter(c.unit for c in seen if c.kind == "all_gather")


def two_roots(rank: Rank) -> tuple[Any, Any]:
    """Two stages that are sharded on their own; nothing around them is."""
    model = build(lambda: nn.Sequential(Mlp(6, 8, 6), Mlp(6, 5, 6)))
    reference = copy.deepcopy(model)
    for stage in model:
        COMPOSABLE.wrap(stage, rank)
    return model, reference


@on_ranks(2)
def test_two_roots(rank: Rank) -> None:
    """Two models in one graph train right with one optimizer, and go on below a third root."""
    model, reference = two_roots(rank)
    assert_trains_alike(model, reference, rank, steps=1)
    for order in ([0, 1], [1, 0]):
        losses = [stage(batch(rank.rank, 3, 4, 6)).square().mean() for stage in model]
        for index in order:
            losses[index].backward()
            reference_backward(reference[index], rank.world_size, square_loss(3))
        assert_same_gradients(model, reference)
        assert_at_rest(model)
    assert current_runtime(unit_of(model[0])) is not current_runtime(unit_of(model[1]))
    fully_shard(model, mesh=rank.mesh)
    assert_trains_alike(model, reference, rank, steps=1)
    assert current_runtime(unit_of(model[0])) is current_runtime(unit_of(model[1])) is current_runtime(unit_of(model))
    assert [unit_of(stage).name for stage in model] == ["0", "1"]


@on_ranks(2)
def test_trunk_of_two_roots(rank: Rank) -> None:
    """A module that two roots contain may be trained through either; taking it in the middle of a step is refused."""
    trunk = build(Mlp, 6, 8, 6)
    model: Any = nn.ModuleList(nn.Sequential(trunk, nn.Linear(6, 3)) for _ in range(2))
    reference = copy.deepcopy(model)
    COMPOSABLE.wrap(trunk, rank)
    for root in model:
        fully_shard(root, mesh=rank.mesh)
    which = [0, 1, 1, 0, 1]

    def loss_at(step: int) -> LossOf:
        return lambda m, r: square_loss(step)(m[which[step]], r)

    assert_trains_alike(model, reference, rank, loss_at, steps=4)
    x = batch(rank.rank, 0, 4, 6)
    handle = model[0][1].register_forward_pre_hook(lambda *_: model[1](x))
    with pytest.raises(PhaseError, match="Sequential became the root while its units were in the middle of a step"):
        model[0](x)
    handle.remove()
    for root in model:
        root(x).sum().backward()
        assert_at_rest(root)


@on_ranks(2)
@pytest.mark.parametrize("when", ["before", "after", "between"])
def test_share_comm_ctx(rank: Rank, when: str) -> None:
    """Roots share streams from the call on, whether they have run or not, also when a root is made anew."""
    model, reference = two_roots(rank)
    if when != "before":
        ran = (model, reference) if when == "after" else (model[0], reference[0])
        assert_trains_alike(*ran, rank, steps=1)
    share_comm_ctx(list(model)[:: 1 if when == "before" else -1])
    assert_trains_alike(model, reference, rank, steps=1)
    streams = [current_runtime(unit_of(stage)).comm_streams for stage in model]
    assert streams[0] is streams[1]
    fully_shard(model, mesh=rank.mesh)
    assert_trains_alike(model, reference, rank, steps=1)
    assert current_runtime(unit_of(model)).comm_streams is streams[0]
    share_comm_ctx([])


class Embedded(nn.Module):
    """Two embeddings, one of which is called twice, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.layer = nn.Embedding(13, 6), nn.Embedding(9, 6), nn.Linear(6, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(len(ids))
        return self.layer(torch.tanh(self.words(ids) + self.places(places)) + self.words(ids.flip(0)))


@on_ranks(2)
@pytest.mark.parametrize("tiny", [0, 65536])
def test_embeddings_are_not_unsharded_in_backward(rank: Rank, tiny: int) -> None:
    """With ``set_unshard_in_backward(False)`` backward does not all-gather a unit whose parameters it does not read."""
    with tiny_units(up_to=tiny):
        model, reference = sharded_with_reference(
            COMPOSABLE, rank, build(Embedded), ["words", "places", "layer"], reshard_after_forward=True
        )
    model.words.set_unshard_in_backward(False)
    model.places.set_unshard_in_backward(False)

    def loss_of(module: nn.Module, number: int) -> torch.Tensor:
        return module(tokens(number, 0, 9)).square().mean()

    for sync in (False, True):
        model.set_requires_gradient_sync(sync)
        assert gathers(loss_of(model, rank.rank).backward) == {"layer": 1}
        reference_backward(reference, rank.world_size, loss_of)
        assert_at_rest(model)
    assert_same_gradients(model, reference)
    model.words.set_unshard_in_backward(True)
    assert gathers(loss_of(model, rank.rank).backward) == {"layer": 1, "words": 1}


class Recorded:
    """An event of some device module; notes that it was waited for."""

    def __init__(self) -> None:
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1


@on_ranks(1, 2)
def test_post_optim_event(rank: Rank) -> None:
    """The first all-gathers of the next forward, and no others, wait for the event; training is right."""
    with tiny_units():
        model, reference = sharded_with_reference(COMPOSABLE, rank, build(Stack))
    optimizers = [sgd(m, 0.1) for m in (model, reference)]
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
        # The root's and the first prefetch; on one rank nothing is all-gathered.
        assert getattr(event, "waits", 2) == 2 or rank.world_size == 1
        model.reshard()
        reference_backward(reference, rank.world_size, square_loss(step))
        assert_same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
    model.set_post_optim_event(torch.Event(device=rank.device) if rank.device.type != "cpu" else torch.Event())
    model(batch(0, 0, 2, 6)).sum().backward()
