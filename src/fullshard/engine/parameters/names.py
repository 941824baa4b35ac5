"""FQNs without the parts that wrappers add."""

from __future__ import annotations

import sys

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.nn.parallel import DistributedDataParallel

__all__ = ["CHECKPOINTED", "WRAPPED", "clean_name", "is_compiled", "wrapped_name"]

WRAPPED = "_fsdp_wrapped_module"  # attribute of our wrapper
CHECKPOINTED = "_checkpoint_wrapped_module"  # of those for activation checkpointing


def clean_name(name: str) -> str:
    """Return an FQN without the parts that wrappers of either kind add."""
    if WRAPPED not in name and CHECKPOINTED not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in (WRAPPED, CHECKPOINTED))


def wrapped_name(module: nn.Module) -> str | None:
    """Return the name of the child that ``module`` is only a wrapper of; None if it is not a wrapper.

    By its class: a model may well have a child that is called ``module`` itself.
    """
    if isinstance(module, ActivationWrapper):
        return CHECKPOINTED
    if isinstance(module, DistributedDataParallel):
        return "module"
    found: str | None = "_orig_mod" if is_compiled(module) else getattr(type(module), "_fullshard_wraps", None)
    return found


def is_compiled(module: nn.Module) -> bool:
    """Return True for a result of ``torch.compile``, sharded or not."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # slow to import, and there is none before somebody does
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)
