"""The work of making units and of their first step, counted: done once for equal blocks, and linear in their number."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from front_ends import FrontEnd, each_front_end
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import fully_shard
from fullshard.engine.ownership import nested_units, unit_of
from fullshard.engine.parameters.placement import ParameterPlacement
from fullshard.layout import FlatLayout, PerParameterLayout
from fullshard.wrap import ModuleWrapPolicy
from models import Mlp
from ranks import Rank, on_ranks

WIDTH = 12


def net(blocks: int) -> Mlp:
    return Mlp(*[WIDTH] * (blocks + 1))


def stepped(front_end: FrontEnd, rank: Rank, blocks: int) -> Any:
    model = front_end.wrap(net(blocks), rank)
    model(torch.randn(2, WIDTH)).sum().backward()
    return model


def calls_of(action: Callable[[], object]) -> int:
    """Python functions that an action calls, and times that it resumes generators."""
    count = 0

    def count_call(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(count_call)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


@each_front_end
@on_ranks(2)
def test_equal_blocks_share_what_depends_on_shapes_only(
    rank: Rank, front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several equal blocks one layout is built, and checked, for the buffers and one for the reduction."""
    first = stepped(front_end, rank, 2)
    checked = []
    for kind in (PerParameterLayout, FlatLayout):
        monkeypatch.setattr(kind, "__post_init__", lambda layout: checked.append(layout))
    monkeypatch.setattr(ParameterPlacement, "__post_init__", lambda placement: checked.append(placement))
    model = stepped(front_end, rank, 6)
    assert checked == []
    buckets = [bucket for root in (first, model) for unit in nested_units(root) for bucket in unit.buckets]
    parameters = [parameter for bucket in buckets for parameter in bucket.parameters]
    assert len(buckets) == 8 and len({id(bucket.layout) for bucket in buckets}) == 1
    assert len({id(parameter.shape) for parameter in parameters}) == 2  # weight and bias
    assert len({id(parameter.placement) for parameter in parameters}) == 2
    if front_end.composable:
        assert len({id(parameter.sharded._spec) for parameter in parameters}) == 2
        other = fully_shard(nn.Linear(WIDTH, WIDTH + 1), mesh=rank.mesh)
        assert checked and other.weight._spec.shape == (WIDTH + 1, WIDTH)


@each_front_end
@on_ranks(2)
def test_work_is_linear_in_the_number_of_units(rank: Rank, front_end: FrontEnd) -> None:
    """Twice as many units take at most twice as many calls, in the wrapping and in the first step."""
    policy = ModuleWrapPolicy({nn.Linear})

    def wrap(model: nn.Module) -> nn.Module:
        if front_end.composable:
            return fully_shard(model, mesh=rank.mesh, policy=policy)
        return FSDP(model, device_mesh=rank.mesh, auto_wrap_policy=policy, use_orig_params=not front_end.flat)

    wrapping, stepping = [], []
    for blocks in (4, 8, 16, 32):  # the first is to warm up
        model, kept = net(blocks), []
        wrapping.append(calls_of(lambda: kept.append(wrap(model))))  # noqa: B023
        stepping.append(calls_of(lambda: kept[0](torch.randn(2, WIDTH)).sum().backward()))  # noqa: B023
    for _, few, some, many in (wrapping, stepping):
        assert many - some <= 2.1 * (some - few), (wrapping, stepping)
        assert many < 4.5 * few


@on_ranks(2)
def test_parameters_that_were_cut_apart_stay_apart(rank: Rank) -> None:
    """Two buckets of a unit may be laid out alike; built anew for another dtype, they are still two."""
    inner = nn.ModuleList(nn.Linear(5, 3, bias=False) for _ in range(2))
    inner[1].weight.requires_grad_(False)
    values = [layer.weight.detach().clone() for layer in inner]
    model = nn.Module()
    model.inner, model.tied = inner, nn.ParameterList(layer.weight for layer in inner)
    for index, layer in enumerate(inner):
        inner[index] = FSDP(layer, device_mesh=rank.mesh, use_orig_params=True)
    wrapped = FSDP(model, device_mesh=rank.mesh, use_orig_params=True)
    unit = unit_of(wrapped)
    assert [len(bucket.parameters) for bucket in unit.buckets] == [1, 1]
    assert unit.buckets[0].layout is unit.buckets[1].layout
    wrapped.double()
    assert [len(bucket.parameters) for bucket in unit.buckets] == [1, 1]
    with FSDP.summon_full_params(wrapped):
        for tied, value in zip(model.tied, values, strict=True):
            assert torch.equal(tied.detach(), value.double())
