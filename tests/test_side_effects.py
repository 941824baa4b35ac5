"""What importing fullshard and sharding with it change in a process, beside the user's modules: what README.md says.

Bodies run in processes that have not imported fullshard, so this file must not import it either.
"""

from __future__ import annotations

import os
import sys
import types
import warnings
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

from ranks import Rank, RankPool

Names = dict[tuple[Any, str], tuple[object, list[int] | None]]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def train(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    model.state_dict()


def contents(value: object) -> list[int] | None:
    """Of containers what is in them, of others nothing."""
    if isinstance(value, dict):
        return [*map(id, value), *map(id, value.values())]
    if isinstance(value, set):
        return sorted(id(item) for item in value)
    return [id(item) for item in value] if isinstance(value, list | tuple) else None


def names() -> Names:
    """All that torch's modules, and the classes in them, hold: value by value, and what is in these."""
    found: Names = {}
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType) and module.__name__.partition(".")[0] == "torch":
            for owner in (module, *(value for value in list(vars(module).values()) if isinstance(value, type))):
                if getattr(owner, "__module__", module.__name__).partition(".")[0] == "torch":
                    for name, value in list(vars(owner).items()):
                        found[owner, name] = value, contents(value)
    return found


def changed(old: Names, new: Names) -> set[str]:
    known = {owner for owner, _ in old}

    def is_same(key: Any) -> bool:
        if key not in old or old[key][1] != new[key][1]:
            return False
        return old[key][0] is new[key][0] or isinstance(new[key][0], set)  # torch makes a set of safe globals anew

    differ = {key for key in new if key[0] in known and not is_same(key)} | {key for key in old if key not in new}
    submodules = {key for key in differ if isinstance(new.get(key, (None,))[0], types.ModuleType)}
    return {f"{owner.__name__}.{name}" for owner, name in differ - submodules}


def observe(rank: Rank, layout: str | None) -> Mapping[str, set[str]]:
    """What each step changes in torch."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    assert "fullshard" not in sys.modules
    import_module("torch.distributed.checkpoint.state_dict")  # changes are seen only in modules that were there before
    warnings.simplefilter("ignore")
    for theirs in (model(), DistributedDataParallel(model()), fully_shard(model(), mesh=rank.mesh)):
        train(theirs)  # what torch sets up when it is first used
    before = names()
    import fullshard.dropin
    import fullshard.ragged

    imported = names()
    os.environ["FULLSHARD_LAYOUT"] = "per_parameter" if layout is None else layout
    for given in (layout, None):
        train(fullshard.fully_shard(model(), mesh=rank.mesh, layout=given))
    for orig in (True, False):
        train(fullshard.FullyShardedDataParallel(model(), use_orig_params=orig))
    sharded = names()
    undo = fullshard.dropin.enable_torch_state_dict_functions()
    enabled = names()
    undo.close()
    return {
        "import": changed(before, imported),
        "sharding": changed(imported, sharded),
        "state dict functions": {name.rpartition(".")[0] for name in changed(sharded, enabled)},
        "undone": changed(sharded, names()),
    }


@pytest.fixture(scope="module")
def unaware() -> Iterator[RankPool]:
    """A pool whose ranks have not imported fullshard."""
    pool = RankPool(preload=())
    yield pool
    pool.close()


@pytest.mark.cpu_only("what is changed does not depend on the device")
@pytest.mark.parametrize("layout", [None, "per_parameter", "ragged"])
def test_torch_is_left_as_it_is(unaware: RankPool, layout: str | None) -> None:
    """Two hooks of ``torch.optim`` are all; other functions are changed only by who asks."""
    hooks = {f"torch.optim.optimizer._global_optimizer_{when}_hooks" for when in ("pre", "post")}
    assert unaware(1, observe, layout, fresh=True) == [
        {
            "import": set(),
            "sharding": {"RemovableHandle.next_id", *hooks},  # torch counts hooks, whoever registers them
            "state dict functions": {"torch.distributed.checkpoint.state_dict"},
            "undone": set(),
        }
    ]


def step_without_resharding(rank: Rank, watch: str) -> tuple[int, int]:
    """By how much an output changes with a step, before and after ``reshard()``."""
    os.environ["FULLSHARD_WATCH_OPTIMIZERS"] = watch
    from fullshard import MixedPrecisionPolicy, fully_shard

    precision = MixedPrecisionPolicy(param_dtype=torch.float64)  # so that what is unsharded is a copy
    model = fully_shard(nn.Linear(2, 1, bias=False), reshard_after_forward=False, mp_policy=precision)
    model.set_reshard_after_backward(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x = torch.ones(1, 2)
    before = model(x)
    before.sum().backward()
    optimizer.step()  # each weight becomes less by 1
    stale = before - model(x)
    model.reshard()
    return round(stale.item()), round((before - model(x)).item())


@pytest.mark.parametrize(("watch", "expected"), [("1", (2, 2)), ("0", (0, 2))])
def test_without_the_hook_the_user_reshards(ranks: RankPool, watch: str, expected: tuple[int, int]) -> None:
    """With it a forward after a step computes with what the step has made; without it only after ``reshard()``."""
    assert ranks(1, step_without_resharding, watch, fresh=True) == [expected]
