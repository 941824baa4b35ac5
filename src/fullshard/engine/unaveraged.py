"""Trainable plain parameters below a sharded root, whose gradients nobody averages over the ranks.

They were put there after sharding, as adapters (LoRA) and new heads are: torch's FSDP leaves them to the user, and so
do we. At the first step of an optimizer that has one, a warning names it. Not those that sharding was told to ignore,
nor below DistributedDataParallel, nor those with hooks on gradients, which may average them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fullshard.engine.ownership import IGNORED
from fullshard.engine.parameters.names import clean_name
from fullshard.engine.parameters.sharded import has_gradient_hooks, managed_by
from fullshard.engine.unit import Unit

__all__ = ["warn_of_unaveraged"]


def warn_of_unaveraged(optimizer: Optimizer, roots: Callable[[], list[Unit]]) -> None:
    """Warn of plain parameters of an optimizer in the modules of the units that ``roots`` returns."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    plain = {id(p) for p in parameters if p.requires_grad and not isinstance(p, DTensor) and managed_by(p) is None}
    if not plain:
        return
    sharded = [root for root in roots() if root.mesh.world_size * root.mesh.replicas > 1]
    modules = [module for root in sharded for ref in root.modules if (module := ref()) is not None]
    found = {name: None for module in modules for name, p in _unaveraged(module, "") if id(p) in plain}
    if found:
        warnings.warn(
            "the optimizer trains parameters that were put into a sharded model after it was sharded: "
            + ", ".join(found)
            + "; their gradients are of this rank's data only, and are not averaged over the ranks. Add them before "
            "sharding, shard the modules that have them (fully_shard(module) before the model's first forward), or "
            "all-reduce their gradients before each step and ignore this warning",
            stacklevel=4,
        )


def _unaveraged(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Parameter]]:
    state: dict[str, Any] = vars(module)
    if isinstance(module, DistributedDataParallel) or IGNORED in state or "replicate" in state.get(REGISTRY_KEY, {}):
        return
    for name, parameter in module._parameters.items():
        if parameter is not None and not has_gradient_hooks(parameter):
            yield clean_name(prefix + name), parameter
    for name, child in module._modules.items():
        if child is not None:
            yield from _unaveraged(child, f"{prefix}{name}.")
