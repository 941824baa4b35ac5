"""Wrong arguments: refused on every rank alike, with what was expected and what was found."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.tensor import distribute_tensor

from fullshard import FSDPModule, FullshardError, fully_shard, register_fsdp_forward_method
from ranks import Rank, on_ranks


class Case(NamedTuple):
    """A call that has to be refused, and the words of the refusal."""

    call: Callable[[Rank, nn.Module, nn.Module], Any]  # of the rank, a plain and a sharded module
    words: str  # regular expression


def shard(rank: Rank, module: Any = None, **options: Any) -> Any:
    options.setdefault("mesh", rank.mesh)
    return fully_shard(nn.Linear(2, 2) if module is None else module, **options)


def with_dtensor(rank: Rank) -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].weight = nn.Parameter(distribute_tensor(torch.ones(2, 2), rank.mesh))
    return module


CASES: dict[str, Case] = {
    # fully_shard
    "module: None": Case(lambda r, p, s: fully_shard(None, mesh=r.mesh), "expected an nn.Module, found NoneType"),
    "module: class": Case(lambda r, p, s: shard(r, nn.Linear), "expected an nn.Module, found type"),
    "module: list": Case(lambda r, p, s: shard(r, [p]), "expected an nn.Module, found list"),
    "module: tensor": Case(lambda r, p, s: shard(r, torch.ones(2)), "expected an nn.Module, found Tensor"),
    "module: twice": Case(lambda r, p, s: shard(r, s), r"already called on this Sequential"),
    "module: ModuleList": Case(
        lambda r, p, s: shard(r, nn.ModuleList([p])), "ModuleList has no forward.*each of its modules"
    ),
    "module: ModuleDict": Case(
        lambda r, p, s: shard(r, nn.ModuleDict({"a": p})), "ModuleDict has no forward.*each of its modules"
    ),
    "module: no forward": Case(
        lambda r, p, s: shard(r, nn.Module()), "Module has no forward.*the module that contains it"
    ),
    "module: lazy": Case(lambda r, p, s: shard(r, nn.LazyLinear(3)), "weight is uninitialised; run a forward first"),
    "module: DTensor": Case(
        lambda r, p, s: shard(r, with_dtensor(r)), r"0\.weight is a DTensor already.*expected a plain parameter"
    ),
    "mesh: group": Case(lambda r, p, s: shard(r, mesh=r.group), "mesh: expected a DeviceMesh or None, found"),
    "mesh: number": Case(lambda r, p, s: shard(r, mesh=2), "mesh: expected a DeviceMesh or None, found int"),
    "mesh: 2-D": Case(
        lambda r, p, s: shard(r, mesh=r.make_mesh(1, r.world_size, names=("a", "b"))),
        "mesh: expected 1 dimension, found 2",
    ),
    "reshard_after_forward: number": Case(
        lambda r, p, s: shard(r, reshard_after_forward=1),
        "reshard_after_forward: expected True or False, found 1 of type int",
    ),
    "reshard_after_forward: text": Case(
        lambda r, p, s: shard(r, reshard_after_forward="yes"), "expected True or False, found 'yes' of type str"
    ),
    "ignored_params: module": Case(
        lambda r, p, s: shard(r, p, ignored_params=[p[0]]), r"ignored_params: expected parameters, found a Linear"
    ),
    "ignored_params: names": Case(
        lambda r, p, s: shard(r, p, ignored_params=["0.weight"]), "ignored_params: expected parameters, found a str"
    ),
    "ignored_params: one parameter": Case(
        lambda r, p, s: shard(r, p, ignored_params=p[0].weight), "ignored_params: expected .*, found .*Parameter"
    ),
    "ignored_params: number": Case(
        lambda r, p, s: shard(r, p, ignored_params=5), "ignored_params: expected .*, found .*int"
    ),
    # methods
    "unshard": Case(lambda r, p, s: s.unshard(1), "async_op: expected True or False, found 1 of type int"),
    "unshard: None": Case(lambda r, p, s: s.unshard(async_op=None), "async_op: expected True or False, found None"),
    "set_requires_gradient_sync": Case(
        lambda r, p, s: s.set_requires_gradient_sync("no"),
        "requires_gradient_sync: expected True or False, found 'no' of type str",
    ),
    "set_requires_gradient_sync: recurse": Case(
        lambda r, p, s: s.set_requires_gradient_sync(True, recurse=0), "recurse: expected True or False, found 0"
    ),
    "set_reshard_after_forward": Case(
        lambda r, p, s: s.set_reshard_after_forward(None), "reshard_after_forward: expected True or False, found None"
    ),
    "set_reshard_after_forward: recurse": Case(
        lambda r, p, s: s.set_reshard_after_forward(True, recurse="all"), "recurse: expected True or False, found 'all'"
    ),
    "set_reshard_after_backward": Case(
        lambda r, p, s: s.set_reshard_after_backward(0), "reshard_after_backward: expected True or False, found 0"
    ),
    "set_reshard_after_backward: recurse": Case(
        lambda r, p, s: s.set_reshard_after_backward(True, recurse=None), "recurse: expected True or False, found None"
    ),
    "set_is_last_backward": Case(
        lambda r, p, s: s.set_is_last_backward(2), "is_last_backward: expected True or False, found 2"
    ),
    "forward prefetch: plain module": Case(
        lambda r, p, s: s.set_modules_to_forward_prefetch([s[0], p]),
        "set_modules_to_forward_prefetch: expected modules that fully_shard was called on, found Sequential at index 1",
    ),
    "backward prefetch: plain module": Case(
        lambda r, p, s: s.set_modules_to_backward_prefetch([p]),
        "set_modules_to_backward_prefetch: expected modules that .*, found Sequential at index 0",
    ),
    "forward prefetch: name": Case(
        lambda r, p, s: s.set_modules_to_forward_prefetch(["0"]),
        "set_modules_to_forward_prefetch: expected modules.*found str",
    ),
    "forward prefetch: one module": Case(
        lambda r, p, s: s.set_modules_to_forward_prefetch(s[0]), "set_modules_to_forward_prefetch: expected .*, found"
    ),
    "backward prefetch: None": Case(
        lambda r, p, s: s.set_modules_to_backward_prefetch(None), "set_modules_to_backward_prefetch: expected .*, found"
    ),
    "register_fsdp_forward_method: missing": Case(
        lambda r, p, s: register_fsdp_forward_method(s, "generate"),
        "expected the name of a method of Sequential, found 'generate'",
    ),
    "register_fsdp_forward_method: attribute": Case(
        lambda r, p, s: register_fsdp_forward_method(s, "__doc__"), "expected the name of a method of Sequential, found"
    ),
    "register_fsdp_forward_method: function": Case(
        lambda r, p, s: register_fsdp_forward_method(s, len), "expected the name of a method of Sequential, found"
    ),
    "register_fsdp_forward_method: no module": Case(
        lambda r, p, s: register_fsdp_forward_method("model", "forward"), "expected .*nn.Module.*, found"
    ),
}


@on_ranks(1, 2)
@pytest.mark.parametrize("name", CASES)
def test_wrong_argument_is_refused(rank: Rank, name: str) -> None:
    """Every rank raises ValueError or TypeError saying what was expected and found, and changes nothing."""
    plain = nn.Sequential(nn.Linear(2, 2))
    sharded = shard(rank, nn.Sequential(shard(rank), shard(rank)))
    with pytest.raises((ValueError, TypeError)) as raised:
        CASES[name].call(rank, plain, sharded)
    assert re.search(CASES[name].words, str(raised.value), re.DOTALL), str(raised.value)
    assert not isinstance(plain, FSDPModule) and type(plain[0].weight) is nn.Parameter
    sharded(torch.ones(3, 2)).sum().backward()


@on_ranks(1, 2)
def test_reset_iter_state_is_for_the_root(rank: Rank) -> None:
    """Calling it on another unit raises an error that names the unit and the root."""
    model = shard(rank, nn.Sequential(shard(rank)))
    model(torch.ones(1, 2))
    with pytest.raises(FullshardError, match=r"unit '0'; call it on the root module, a FSDPSequential"):
        model[0].reset_iter_state()
    model.reset_iter_state()


@on_ranks(2)
def test_refused_module_can_be_sharded_afterwards(rank: Rank) -> None:
    """A refusal leaves the module untouched, so that the remedied call works."""
    module = nn.Linear(2, 2)
    for options in ({"mesh": 3}, {"reshard_after_forward": 2}, {"ignored_params": ["weight"]}):
        with pytest.raises((ValueError, TypeError)):
            shard(rank, module, **options)
    assert type(module) is nn.Linear and type(module.weight) is nn.Parameter
    assert isinstance(shard(rank, module), FSDPModule)


@on_ranks(1)
def test_ignored_parameters_may_come_as_any_iterable(rank: Rank) -> None:
    """A list, a tuple, a set, a generator and None are all fine."""
    for kind in (list, tuple, set, iter):
        module = nn.Linear(2, 2)
        shard(rank, module, ignored_params=kind([module.bias]))
        assert type(module.bias) is nn.Parameter and type(module.weight) is not nn.Parameter
    shard(rank, nn.Linear(2, 2), ignored_params=None)
