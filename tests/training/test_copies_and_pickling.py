"""Copies of sharded models, their end, and pickling."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from compare import assert_close, assert_equal
from failing import fail, fail_in_backward
from front_ends import (
    CLOSE,
    COMPOSABLE,
    FRONT_ENDS,
    FrontEnd,
    assert_at_rest,
    assert_same_values,
    build,
    each_front_end,
    full_values,
    local,
    sharded_with_reference,
    token_loss,
    train,
    train_reference,
    unwrapped,
)
from fullshard import FSDPModule, FullshardError, fully_shard
from fullshard.engine.ownership import nested_units, unit_of
from fullshard.engine.runtime import current_runtime
from models import Language, Mlp, batch, square_loss, tokens
from pairwise import each_value
from ranks import Rank, on_ranks

STATES: dict[str, Callable[[Any, Rank], object]] = {
    "new": lambda model, rank: None,
    "trained": lambda model, rank: train(model, rank, token_loss, 2),
    "after a forward": lambda model, rank: token_loss()(model, rank.rank),
    "with pending gradients": lambda model, rank: token_loss()(model, rank.rank).backward(),
}


@on_ranks(2)
@each_value(1, front_end=FRONT_ENDS, state=STATES, offloaded=[False, True])
def test_deepcopy(rank: Rank, front_end: FrontEnd, state: str, offloaded: bool) -> None:
    """A copy has equal values, no gradients and memory of its own; both train on, bit by bit alike."""
    model = front_end.wrap(build(Language), rank, **(front_end.offload() if offloaded else {}))
    if state == "with pending gradients":
        with front_end.no_sync(model):
            STATES[state](model, rank)
    else:
        STATES[state](model, rank)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    before = full_values(model)
    copied = copy.deepcopy(model)
    pairs = list(zip(copied.parameters(), model.parameters(), strict=True))
    assert all(p.grad is None and type(p) is type(q) and p is not q for p, q in pairs)
    assert all(not local(p).numel() or local(p).data_ptr() != local(q).data_ptr() for p, q in pairs)
    assert copied.get_pending_gradients() == {}
    assert bool(model.get_pending_gradients()) == (state == "with pending gradients")
    for ours, theirs in zip(nested_units(model), nested_units(copied), strict=True):
        assert ours is not theirs and ours.settings.reshard_after_forward == theirs.settings.reshard_after_forward
        assert [p.fqn for p in ours.parameters] == [p.fqn for p in theirs.parameters]
    assert unwrapped(copied).head.weight is unwrapped(copied).embedding.weight or front_end.flat
    model.zero_grad()
    assert_same_values(copied, model)
    losses = train(copied, rank, token_loss, 2)
    assert_equal(full_values(model), before, "values of the original")
    assert_equal(losses, train(model, rank, token_loss, 2), "losses")
    assert_same_values(copied, model)


@on_ranks(2)
@each_front_end
def test_averages_of_weights(rank: Rank, front_end: FrontEnd) -> None:
    """An exponential moving average over a copy's parameters, which AveragedModel makes, is that of plain modules."""
    rate = torch.optim.swa_utils.get_ema_multi_avg_fn(0.75)
    models = sharded_with_reference(front_end, rank, build(Mlp, 6, 5, 3))
    averages = [torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=rate) for model in models]
    x = batch(0, 0, 4, 6)
    for step in range(2):
        train(models[0], rank, lambda _, step=step: square_loss(step), 1)
        train_reference(models[1], rank, lambda _, step=step: square_loss(step), 1)
        for average, source in zip(averages, models, strict=True):
            average.update_parameters(source)
        with torch.no_grad():
            assert_close(averages[0](x), averages[1](x), f"output {step}", **CLOSE)
    assert_same_values(models[0], models[1], **CLOSE)


@on_ranks(2)
@each_front_end
def test_copies_of_parts(rank: Rank, front_end: FrontEnd) -> None:
    """A copy of one unit is the root of itself; a plain module around units is copied with them."""
    model = front_end.wrap(build(Language), rank)
    token_loss()(model, rank.rank).backward()
    block = copy.deepcopy(model.blocks[0])
    x = torch.ones(2, 6)
    assert_equal(block(x).detach(), model.blocks[0](x).detach(), "output")
    block(x).sum().backward()
    assert current_runtime(unit_of(block)) is not current_runtime(unit_of(model))
    around = nn.ModuleDict({"a": front_end.wrap(nn.Linear(3, 2), rank, []), "b": nn.Linear(2, 2)})
    copied = copy.deepcopy(around)
    with torch.no_grad():
        for p in copied.parameters():
            p.zero_()
        assert not copied["a"](torch.ones(1, 3)).any() and around["a"](torch.ones(1, 3)).any()


@on_ranks(2)
def test_deepcopy_of_a_composable_model(rank: Rank) -> None:
    """Its class and settings are the original's; setting the copy's, and an unsharded original, change no other."""
    model = COMPOSABLE.wrap(build(Language), rank)
    model.blocks[1].set_reshard_after_forward(False)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    model.blocks[0].unshard()
    copied = copy.deepcopy(model)
    assert type(copied) is type(model) and isinstance(copied.blocks[0], FSDPModule)
    assert_at_rest(copied)
    copied.blocks[1].set_reshard_after_forward(True)
    assert unit_of(model.blocks[1]).settings.reshard_after_forward is False
    token_loss()(copied, rank.rank).backward()
    assert all(p.grad is None for p in model.parameters())


class Choosy(nn.Linear):
    """A class that says what belongs to a copy of it; a lock cannot be copied."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.owner: Any = threading.Lock()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "owner": None}


@on_ranks(2)
def test_classes_that_choose_what_is_copied(rank: Rank) -> None:
    """``__getstate__`` counts, as for modules that are not sharded."""
    model = fully_shard(Choosy(), mesh=rank.mesh)
    copied = copy.deepcopy(model)
    assert copied.owner is None and model.owner is not None
    copied(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad is None and copied.weight.grad is not None


# ---------------------------------------------------------------- the end of a model


def watched(model: nn.Module) -> dict[str, weakref.ref[Any]]:
    """Weak references to everything that would keep memory or the model alive."""
    found: dict[str, weakref.ref[Any]] = {"model": weakref.ref(model)}
    for number, unit in enumerate(nested_units(model)):
        found[f"unit {number}"] = unit.ref
        for index, bucket in enumerate(unit.buckets):
            found[f"shard buffer {number}/{index}"] = weakref.ref(bucket.shard_buffer)
        for parameter in unit.parameters:
            found[f"sharded {number}/{parameter.fqn}"] = weakref.ref(parameter.sharded)
            if parameter.has_unsharded:
                found[f"unsharded {number}/{parameter.fqn}"] = weakref.ref(parameter.unsharded)
    return found


def fail_to_train(model: Any, rank: Rank, hook: Callable[..., Any] = fail) -> None:
    handle = model.blocks[1].register_forward_hook(hook)
    with contextlib.suppress(ZeroDivisionError):
        token_loss()(model, rank.rank).backward()
    handle.remove()


def train_with_prefetch_settings(model: Any, rank: Rank) -> None:
    if isinstance(model, FSDPModule):
        model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
        model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])
    train(model, rank, token_loss, 1)


# What is done with a model before it is deleted, and returns what is kept until then.
BEFORE_THE_END: dict[str, Callable[[Any, Rank], object]] = {
    "nothing": lambda model, rank: None,
    "a forward": lambda model, rank: model(tokens(0, 0, 2, 3)),  # a graph whose backward never runs
    "steps": lambda model, rank: train(model, rank, token_loss, 2),
    "a failed forward": fail_to_train,
    "a failed backward": functools.partial(fail_to_train, hook=fail_in_backward),
    "prefetch settings": train_with_prefetch_settings,
    "a copy": lambda model, rank: train(model, rank, token_loss, 1),
}


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, after=BEFORE_THE_END)
def test_deleting_a_model_frees_it_at_once(rank: Rank, front_end: FrontEnd, after: str) -> None:
    """Without the garbage collector's help, units, shards and unsharded parameters go with the last reference.

    Flat parameters alone wait for the collector.
    """
    gc.collect()
    gc.disable()
    try:
        original = model = front_end.wrap(build(Language), rank)
        if after == "a copy":
            model = copy.deepcopy(original)
        else:
            del original
        kept = BEFORE_THE_END[after](model, rank)
        references = watched(model)
        assert len(references) > 6
        del model, kept
        if front_end.flat:
            gc.collect()  # flat parameters are in a cycle
        until = time.monotonic() + 5  # a thread of autograd's lets go of an exception a moment later
        while any(reference() is not None for reference in references.values()) and time.monotonic() < until:
            time.sleep(0.01)
        assert [name for name, reference in references.items() if reference() is not None] == []
    finally:
        gc.enable()
    if after == "a copy":
        train(original, rank, token_loss, 1)


@on_ranks(2)
@each_front_end
def test_pickling_is_refused_with_the_remedy(rank: Rank, front_end: FrontEnd) -> None:
    """A sharded module cannot be pickled, by whatever means; the error says what to save instead."""
    model = front_end.wrap(build(Language), rank)
    match = r"FSDPLanguage cannot be pickled.*model\.state_dict\(\)" if front_end.composable else "state_dict"
    save = functools.partial(torch.save, f=io.BytesIO())
    for how, saved in ((pickle.dumps, model), (save, model), (pickle.dumps, nn.ModuleList([model]))):
        with pytest.raises(FullshardError if front_end.composable else RuntimeError, match=match):
            how(saved)
