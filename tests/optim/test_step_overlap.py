"""Steps that hide the last reductions before them and the first gathers after them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import fullshard
from compare import assert_equal
from fullshard import FullyShardedDataParallel, PhaseError
from fullshard.comm import Collective, record
from fullshard.engine.optimizer_overlap import GradientInFlight
from fullshard.errors import FullshardError
from fullshard.optim import overlap
from fullshard.optim.local.step import LocalStep
from fullshard.progress import PROGRESS
from fullshard.wrap import ModuleWrapPolicy
from models import Stack, shard_blocks, square_loss, tiny_units
from ranks import Rank, on_ranks
from ranks.device import check_races, races_so_far


def build(rank: Rank) -> tuple[nn.Module, nn.Module]:
    """The same model twice."""
    torch.manual_seed(0)
    first = Stack()
    models = first, copy.deepcopy(first)
    with tiny_units(up_to=0):
        for model in models:
            shard_blocks(model, rank)
    return models


def adam(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.1, **options)


def step(rank: Rank, model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 0) -> None:
    square_loss(number)(model, rank.rank).backward()
    optimizer.step()
    optimizer.zero_grad()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.full_tensor() for p in model.parameters()]


def assert_same_weights(model: nn.Module, other: nn.Module) -> None:
    assert_equal(weights(model), weights(other), "weights")


class Watched:
    """Notes collectives, and the parameters that are stepped between them."""

    def __init__(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        names = {id(p): name for name, p in model.named_parameters()}
        plain = LocalStep._step_tensors

        def stepped(local: LocalStep, optimizer: Any, pieces: Any, *args: Any, **kwargs: Any) -> Any:
            members = [names[id(piece.parameter)].rsplit(".", 2)[0] for piece in pieces]
            self.events.append(
                "step " + " ".join(dict.fromkeys("root" if n in ("first", "last") else n for n in members))
            )
            return plain(local, optimizer, pieces, *args, **kwargs)

        monkeypatch.setattr(LocalStep, "_step_tensors", stepped)

    def __enter__(self) -> list[str]:
        PROGRESS.observers.append(self._note)
        self.events.clear()
        return self.events

    def __exit__(self, *_: object) -> None:
        PROGRESS.observers.remove(self._note)

    def _note(self, _: object, collectives: Sequence[Collective]) -> None:
        for collective in collectives:
            event = f"{collective.kind} {collective.unit or 'root'}"
            if not self.events or self.events[-1] != event:
                self.events.append(event)


@on_ranks(2)
def test_order(rank: Rank) -> None:
    """Half of what has its gradients is stepped; then, when they have landed, the root; its gather; and the rest."""
    model, _ = build(rank)
    optimizer = overlap(adam(model), model)
    with pytest.MonkeyPatch.context() as patch:
        watched = Watched(model, patch)
        for number in range(3):
            with watched as events:
                loss = square_loss(number)(model, rank.rank)
            assert events[0] == ("all_gather root" if number == 0 else "all_gather blocks.0")
            loss.backward()
            with watched as events:
                optimizer.step()
            steps = [event for event in events if event.startswith("step")]
            assert "root" in steps[1] and not any("root" in each for each in (steps[0], *steps[2:]))
            assert events == [*steps[:2], "all_gather root", *steps[2:]]
            stepped = {*" ".join(steps).replace("step ", "").split()}  # in one or more pieces
            assert stepped == {"blocks.0", "blocks.1", "blocks.2", "root"}
            optimizer.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize(
    ("options", "budget", "clip"),
    [
        ({}, None, torch.nn.utils.clip_grad_norm_),
        ({"fused": True}, 0, None),
        ({"foreach": True}, 10_000, fullshard.clip_grad_norm_),
    ],
)
def test_same_bits(rank: Rank, options: dict[str, Any], budget: int | None, clip: Any) -> None:
    """Steps end in the weights that steps without overlap end in, also over several backwards, one without sync."""
    model, other = build(rank)
    model.set_prefetch_bytes(budget)
    optimizers = overlap(adam(model, **options), model), adam(other, **options)
    for number in range(4):
        for each, optimizer in zip((model, other), optimizers, strict=True):
            for part in range(3 if number == 2 else 1):
                each.set_requires_gradient_sync(part != 1)
                square_loss(3 * number + part)(each, rank.rank).backward()
            each.set_requires_gradient_sync(True)
            if clip is not None:
                clip(list(nn.Module.parameters(each)), 0.01)
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(model, other)


@on_ranks(2)
@pytest.mark.parametrize("how", ["in place", "load", "reshard", "other optimizer", "assign", "replaced"])
def test_writes_after_the_step(rank: Rank, how: str) -> None:
    """A forward never computes with values from before a write: it gathers again, or raises."""
    model, other = build(rank)
    model.set_prefetch_bytes(1 << 20 if how == "in place" else None)
    optimizers = overlap(adam(model), model), adam(other)
    step(rank, model, optimizers[0])
    step(rank, other, optimizers[1])
    changed = {name: p + 1 for name, p in model.state_dict().items()}
    check_races(rank.device)
    for each in (model, other):
        if how == "load":
            each.load_state_dict(changed)
        elif how == "assign":
            each.load_state_dict({name: p.clone() for name, p in changed.items()}, assign=True)
        elif how == "replaced":  # although the unit was unsharded before it came
            each.first.weight = nn.Parameter(each.first.weight.detach() + 1)
        elif how == "other optimizer":
            second = torch.optim.SGD(each.parameters(), lr=1.0)
            for parameter in each.parameters():
                parameter.grad = torch.ones_like(parameter)
            second.step()
            second.zero_grad()
        else:
            if how == "reshard":
                each.reshard()
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter.add_(1)
    for race in races_so_far(rank.device):  # an all-gather may still read what is written: it is thrown away
        assert how in ("in place", "other optimizer"), race
        assert "begin_unshard_for_next_forward" in str(race) and "test_writes_after_the_step" in str(race), race
    if how == "in place":
        units = "unit '<root>', 'blocks.0', 'blocks.1', 'blocks.2' were modified"
        with pytest.raises(PhaseError, match=f"{units} after the optimizer step .* call reshard"):
            model(torch.ones(2, 6))
    assert_equal(model(torch.ones(2, 6)), other(torch.ones(2, 6)), "outputs")
    for each in (model, other):
        each.reshard()
    assert_same_weights(model, other)


@on_ranks(2)
def test_written_after_another_unit_was_used(rank: Rank) -> None:
    """A write after the step is noticed, whatever else was unsharded in between; and not after a reshard."""
    model, other = build(rank)
    optimizers = overlap(adam(model), model), adam(other)
    for reshards in (False, True):
        for each, optimizer in zip((model, other), optimizers, strict=True):
            step(rank, each, optimizer)
            each.blocks[2].unshard()
            each.blocks[2].reshard()
            with torch.no_grad():
                each.first.weight.mul_(2)
        if reshards:
            model.reshard()
        else:
            with pytest.raises(PhaseError, match="'<root>' were modified"):
                model(torch.ones(2, 6))
        assert_equal(model(torch.ones(2, 6)), other(torch.ones(2, 6)), "outputs")


@on_ranks(2)
@pytest.mark.parametrize("then", ["undone", "before the first forward"])
def test_steps_without_it_are_noticed(rank: Rank, then: str) -> None:
    """Once the optimizer steps as usual again, or where it cannot do otherwise, what is gathered is outdated by it."""
    model, other = build(rank)
    optimizers = overlap(adam(model), model), adam(other)
    for each, optimizer in zip((model, other), optimizers, strict=True):
        if then != "before the first forward":
            step(rank, each, optimizer)
        if each is model and then == "undone":
            overlap(optimizer, model, enable=False)
        each.set_reshard_after_backward(False)
        each.set_reshard_after_forward(False)
        for number in range(3):
            step(rank, each, optimizer, number)
    assert_same_weights(model, other)


@on_ranks(2)
def test_only_some_parameters(rank: Rank) -> None:
    """What another optimizer has still to step is not gathered before it has."""
    model, other = build(rank)
    optimizers = []
    for each in (model, other):
        inner = [p for name, p in each.named_parameters() if name.startswith("blocks")]
        outer = [p for name, p in each.named_parameters() if not name.startswith("blocks")]
        optimizers.append((torch.optim.SGD(inner, lr=0.1), torch.optim.SGD(outer, lr=0.1)))
    overlap(optimizers[0][0], model)
    for number in range(4):
        for each, pair in zip((model, other), optimizers, strict=True):
            square_loss(number)(each, rank.rank).backward()
            for optimizer in pair:
                optimizer.step()
                optimizer.zero_grad()
    assert_same_weights(model, other)


@on_ranks(2)
@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
def test_wrapper(rank: Rank, original: bool) -> None:
    """The wrapper's first gathers come early too; its gradients are there after backward as always."""
    torch.manual_seed(0)
    model = Stack()
    models = [
        FullyShardedDataParallel(
            each, auto_wrap_policy=ModuleWrapPolicy({type(each.blocks[0])}), use_orig_params=original
        )
        for each in (model, copy.deepcopy(model))
    ]
    optimizers = overlap(adam(models[0]), models[0]), adam(models[1])
    for number in range(4):
        for each, optimizer in zip(models, optimizers, strict=True):
            square_loss(number)(each, rank.rank).backward()
            assert not any(type(p.grad) is GradientInFlight for p in nn.Module.parameters(each))
            optimizer.step()
            optimizer.zero_grad()
    with record() as seen:
        square_loss()(models[0], rank.rank)
    assert "" not in {c.unit for c in seen if c.kind == "all_gather"}
    with FullyShardedDataParallel.summon_full_params(models[0]), FullyShardedDataParallel.summon_full_params(models[1]):
        full = [[p.detach().clone() for p in each.parameters()] for each in models]
    assert_equal(full[0], full[1], "weights")


@on_ranks(2)
@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
def test_loading_into_a_wrapper(rank: Rank, original: bool) -> None:
    """After a step, which has gathered the root, what is loaded is what the next forward computes with."""
    torch.manual_seed(0)
    policy = ModuleWrapPolicy({type(Stack().blocks[0])})
    model = FullyShardedDataParallel(Stack(), auto_wrap_policy=policy, use_orig_params=original)
    optimizer = overlap(adam(model), model)
    before, output = {name: value.clone() for name, value in model.state_dict().items()}, model(torch.ones(2, 6))
    for _ in range(2):
        for number in range(2):
            step(rank, model, optimizer, number)
        model.load_state_dict(before)
        assert_equal(model(torch.ones(2, 6)), output, "outputs")
    step(rank, model, optimizer)
    with FullyShardedDataParallel.summon_full_params(model, recurse=False):  # those of the blocks are gathered by it
        for name, block in enumerate(model.module.blocks):
            inner = {key: value for key, value in before.items() if key.startswith(f"blocks.{name}.")}
            block.load_state_dict({key.removeprefix(f"blocks.{name}."): value for key, value in inner.items()})
        model.module.first.weight.data.copy_(before["first.weight"])
        model.module.first.bias.data.copy_(before["first.bias"])
        model.module.last.load_state_dict({key: before[f"last.{key}"] for key in ("weight", "bias")})
    assert_equal(model(torch.ones(2, 6)), output, "outputs")


@on_ranks(2)
def test_gradients_land_in_inference_mode(rank: Rank) -> None:
    """A forward in inference mode waits for gradients, which can be zeroed and added to afterwards."""
    model, other = build(rank)
    optimizers = overlap(adam(model), model), adam(other)
    for number in range(3):
        for each, optimizer in zip((model, other), optimizers, strict=True):
            for part in range(2):
                square_loss(2 * number + part)(each, rank.rank).backward()
                with torch.inference_mode():
                    each(torch.ones(2, 6))
            each.reshard()
            assert not any(p.grad.is_inference() for p in each.parameters())
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert_same_weights(model, other)


@on_ranks(2)
def test_undone(rank: Rank) -> None:
    """``enable=False`` returns to a step on its own."""
    model, _ = build(rank)
    optimizer = overlap(adam(model), model)
    step(rank, model, optimizer)
    square_loss(1)(model, rank.rank).backward()
    with record() as seen:
        optimizer.step()
    assert {c.kind for c in seen} == {"all_gather"}
    overlap(optimizer, model, enable=False)
    square_loss()(model, rank.rank).backward()
    assert not any(type(p.grad) is GradientInFlight for p in nn.Module.parameters(model))
    with record() as seen:
        optimizer.step()
    assert seen == []


@on_ranks(2)
def test_errors(rank: Rank) -> None:
    """What it does not go with."""
    model, _ = build(rank)
    with pytest.raises(ValueError, match="expected a module that fully_shard was called on, found Linear"):
        overlap(adam(model), nn.Linear(2, 2))
    with (
        pytest.warns(UserWarning, match="left unchanged"),
        pytest.raises(ValueError, match=r"elementwise .* found LBFGS"),
    ):
        overlap(torch.optim.LBFGS(model.parameters()), model)
    optimizer = overlap(adam(model), model.blocks[0])
    square_loss()(model, rank.rank).backward()
    with pytest.raises(FullshardError, match="nested in another"):
        optimizer.step()
