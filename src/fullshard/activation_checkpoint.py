"""Activation checkpointing and activation offloading for sharded and plain models.

The wrappers are PyTorch's own, re-exported here. They remove their prefix from state dict keys and parameter names.
Only ``apply_activation_checkpointing`` is defined here, on wrap plans.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    ActivationWrapper,
    CheckpointImpl,
    CheckpointWrapper,
    OffloadWrapper,
    checkpoint_wrapper,
    offload_wrapper,
)

from fullshard.wrap import Policy, PolicyFunction, lambda_auto_wrap_policy, plan_for
from fullshard.wrap.tree import has_forward

__all__ = [
    "ActivationWrapper",
    "CheckpointImpl",
    "CheckpointWrapper",
    "OffloadWrapper",
    "apply_activation_checkpointing",
    "checkpoint_wrapper",
    "offload_wrapper",
]


def _everything(_: nn.Module) -> bool:
    return True


def apply_activation_checkpointing(
    model: nn.Module,
    checkpoint_wrapper_fn: Callable[..., nn.Module] = checkpoint_wrapper,
    check_fn: Callable[[nn.Module], bool] = _everything,
    auto_wrap_policy: Policy | PolicyFunction | None = None,
) -> None:
    """Wrap selected modules of ``model``, in place, so that they recompute or offload their activations.

    Call it before or after sharding. ``model`` itself is never wrapped; call the wrapper on it for that.

    Args:
        model: Model whose modules are wrapped, including those inside sharded modules.
        checkpoint_wrapper_fn: Called with a module (and the arguments that a ``CustomPolicy`` has for it), returns the
            wrapper: ``checkpoint_wrapper``, ``offload_wrapper``, or a ``partial`` of these.
        check_fn: Returns True for modules to wrap. It is also called for modules inside selected ones, but not for
            containers without a forward (``nn.ModuleList``, ``nn.ModuleDict``), which never recompute anything.
        auto_wrap_policy: Policy that selects the modules, as for sharding. Takes precedence over ``check_fn``.

    Raises:
        ValueError: If ``auto_wrap_policy`` is not a policy, or returns an invalid value.

    Example:
        ```python
        import torch
        from torch import nn

        from fullshard import fully_shard
        from fullshard.activation_checkpoint import apply_activation_checkpointing

        model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)])
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Sequential))
        for block in model:
            fully_shard(block)
        fully_shard(model)
        model(torch.randn(4, 16)).sum().backward()
        ```
    """
    policy = auto_wrap_policy
    if policy is None:
        policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: has_forward(m) and check_fn(m))
    elif not isinstance(policy, Policy) and (not callable(policy) or isinstance(policy, type)):
        raise ValueError(
            "apply_activation_checkpointing: auto_wrap_policy: expected a Policy or a callable "
            f"(module=, recurse=, nonwrapped_numel=) -> bool, found {policy!r}"
        )

    def wrap(module: nn.Module, kwargs: dict[str, Any], _left_out: frozenset[nn.Parameter]) -> nn.Module:
        return checkpoint_wrapper_fn(module, **kwargs)

    plan_for(policy, model).apply(wrap)
