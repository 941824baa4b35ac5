"""What importing fullshard and sharding with it change in a process, beside the user's modules: what README.md says."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import sys, types, warnings
import torch, torch.distributed as dist
import torch.distributed.checkpoint.state_dict as functions
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_post_hooks

warnings.simplefilter("ignore")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

def train(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    model.state_dict()

def contents(value):
    "Of containers what is in them, of others nothing."
    if isinstance(value, dict):
        return [*map(id, value), *map(id, value.values())]
    return [id(item) for item in value] if isinstance(value, list | tuple | set) else None

def names():
    "All that torch's modules, and the classes in them, hold: value by value, and what is in these."
    found = {}
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType) and module.__name__.partition(".")[0] == "torch":
            owners = [module, *(v for v in list(vars(module).values()) if isinstance(v, type))]
            for owner in owners:
                if getattr(owner, "__module__", module.__name__).partition(".")[0] == "torch":
                    for name, value in list(vars(owner).items()):
                        found[owner, name] = value, contents(value)
    return found

for theirs in (model(), DistributedDataParallel(model()), fully_shard(model(), mesh=mesh)):
    train(theirs)  # what torch sets up when it is first used
before = names()

import fullshard, fullshard.dropin
imported = names()
for ours in (fullshard.fully_shard(model(), mesh=mesh), fullshard.FullyShardedDataParallel(model())):
    train(ours)
after = names()
undo = fullshard.dropin.enable_torch_state_dict_functions()
enabled = names()
undo.close()
undone = names()

def changed(old, new):
    known = {owner for owner, _ in old}
    same = lambda key: key in old and old[key][0] is new[key][0] and old[key][1] == new[key][1]
    differ = {key for key in new if key[0] in known and not same(key)} | {key for key in old if key not in new}
    submodules = {key for key in new if isinstance(new[key][0], types.ModuleType)}
    return sorted(f"{owner.__name__}.{name}" for owner, name in differ - submodules)

print("imported", *changed(before, imported))
print("sharded", *changed(imported, after))
print("enabled", *{name.rpartition(".")[0] for name in changed(after, enabled)})
print("undone", *changed(after, undone))
print("hooks", len(_global_optimizer_post_hooks))
"""


def run(program: str, **environment: str) -> list[str]:
    """The lines that it prints."""
    variables = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_torch_is_left_as_it_is() -> None:
    """One hook of ``torch.optim`` is all; the checkpoint functions are changed only by who asks, and are given back."""
    hook = "torch.optim.optimizer._global_optimizer_post_hooks"
    counter = "RemovableHandle.next_id"  # torch counts hooks, whoever registers them
    functions = "enabled torch.distributed.checkpoint.state_dict"
    assert run(PROGRAM) == ["imported", f"sharded {counter} {hook}", functions, "undone", "hooks 1"]
    without = run(PROGRAM, FULLSHARD_WATCH_OPTIMIZERS="0")
    assert without == ["imported", f"sharded {counter}", functions, "undone", "hooks 0"]


STALE = """
import torch, torch.distributed as dist
from torch import nn
from fullshard import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
precision = MixedPrecisionPolicy(param_dtype=torch.float64)  # so that what is unsharded is a copy
model = fully_shard(nn.Linear(2, 1, bias=False), reshard_after_forward=False, mp_policy=precision)
model.set_reshard_after_backward(False)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
x = torch.ones(1, 2)
before = model(x)
before.sum().backward()
optimizer.step()  # each weight becomes less by 1
print(round((before - model(x)).item()))
model.reshard()
print(round((before - model(x)).item()))
"""


def test_without_the_hook_the_user_reshards() -> None:
    """With it a forward after a step computes with what the step has made; without it only after ``reshard()``."""
    assert run(STALE) == ["2", "2"]
    assert run(STALE, FULLSHARD_WATCH_OPTIMIZERS="0") == ["0", "2"]
