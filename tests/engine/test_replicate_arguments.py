"""Wrong arguments of ``replicate``: refused on every rank alike."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from fullshard import DataParallelMeshDims, ReplicateModule, fully_shard, replicate
from fullshard.engine.ownership import unit_of
from ranks import Rank, on_ranks


class Case(NamedTuple):
    """A call that has to be refused, and the words of the refusal."""

    call: Callable[[Rank], Any]
    error: type[Exception]
    words: str


CASES: dict[str, Case] = {
    "module: None": Case(lambda r: replicate(None, mesh=r.mesh), TypeError, "replicate: expected Module, found None"),
    "module: list": Case(
        lambda r: replicate([nn.Linear(1, 1)], mesh=r.mesh), TypeError, "replicate: expected Module, found list"
    ),
    "module: ModuleList": Case(
        lambda r: replicate(nn.ModuleList([nn.Linear(1, 1)]), mesh=r.mesh),
        ValueError,
        "ModuleList has no forward of its own.*call replicate on each",
    ),
    "mesh: group": Case(
        lambda r: replicate(nn.Linear(1, 1), mesh=r.group), TypeError, "replicate: mesh: expected DeviceMesh or None"
    ),
    "mesh: 2-D": Case(
        lambda r: replicate(nn.Linear(1, 1), mesh=r.make_mesh(1, r.world_size, names=("a", "b"))),
        ValueError,
        "replicate: mesh: expected 1 dimension, found 2",
    ),
    "mp_policy": Case(
        lambda r: replicate(nn.Linear(1, 1), mesh=r.mesh, mp_policy=torch.bfloat16),
        TypeError,
        "replicate: mp_policy: expected MixedPrecisionPolicy or None, found dtype",
    ),
    "offload_policy": Case(
        lambda r: replicate(nn.Linear(1, 1), mesh=r.mesh, offload_policy=True),
        TypeError,
        "replicate: offload_policy: expected OffloadPolicy or None, found bool",
    ),
    "ignored_params": Case(
        lambda r: replicate(nn.Linear(1, 1), mesh=r.mesh, ignored_params=["weight"]),
        TypeError,
        "replicate: ignored_params: expected parameters, found a str",
    ),
    "dp_mesh_dims: shard": Case(
        lambda r: replicate(
            nn.Linear(1, 1), mesh=r.make_mesh(1, r.world_size, names=("a", "b")), dp_mesh_dims=DataParallelMeshDims("b")
        ),
        ValueError,
        "replicate: dp_mesh_dims: expected replicate axes only, found shard='b'",
    ),
    "dp_mesh_dims: type": Case(
        lambda r: replicate(nn.Linear(1, 1), mesh=r.mesh, dp_mesh_dims="b"),
        TypeError,
        "replicate: dp_mesh_dims: expected DataParallelMeshDims or None, found str",
    ),
    "twice": Case(
        lambda r: replicate(replicate(nn.Linear(1, 1), mesh=r.mesh), mesh=r.mesh),
        ValueError,
        "replicate: this Linear is sharded already",
    ),
    "over a sharded child": Case(
        lambda r: replicate(nn.Sequential(fully_shard(nn.Linear(1, 1), mesh=r.mesh)), mesh=r.mesh),
        ValueError,
        "replicate: '0' is sharded by fully_shard already",
    ),
    "over itself sharded": Case(
        lambda r: replicate(fully_shard(nn.Linear(1, 1), mesh=r.mesh), mesh=r.mesh), ValueError, "replicate: "
    ),
    "sharding a replicated module": Case(
        lambda r: fully_shard(replicate(nn.Linear(1, 1), mesh=r.mesh), mesh=r.mesh),
        ValueError,
        "fully_shard: this Linear is sharded already",
    ),
}


@on_ranks(1, 2)
@pytest.mark.parametrize("name", CASES)
def test_wrong_argument_is_refused(rank: Rank, name: str) -> None:
    """Every rank raises, saying what was expected and found."""
    with pytest.raises(CASES[name].error) as raised:
        CASES[name].call(rank)
    assert re.search(CASES[name].words, str(raised.value), re.DOTALL), str(raised.value)


@on_ranks(2)
def test_refused_module_can_be_replicated_afterwards(rank: Rank) -> None:
    """A refusal leaves the module as it was."""
    module = nn.Linear(1, 1)
    for options in ({"mesh": 3}, {"mesh": rank.mesh, "mp_policy": 16}, {"mesh": rank.mesh, "ignored_params": [1]}):
        with pytest.raises(TypeError):
            replicate(module, **options)
    assert type(module) is nn.Linear and unit_of(module) is None
    assert isinstance(replicate(module, mesh=rank.mesh), ReplicateModule)
