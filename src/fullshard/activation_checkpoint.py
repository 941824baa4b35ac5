"""Activation checkpointing and offloading for sharded and plain models.

The wrappers are PyTorch's own, named here so that one import serves. They take their prefix out of state dict keys
and parameter names. Only :func:`apply_activation_checkpointing` is defined here, on wrap plans.
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
    """Put chosen modules of ``model`` into wrappers that recompute, or offload, their activations. In place.

    The model may be sharded before or afterwards. ``model`` itself is never wrapped; call the wrapper on it for that.

    Args:
        model: Modules below it, those inside sharded ones included, are wrapped.
        checkpoint_wrapper_fn: Given a module (and the arguments that a :class:`CustomPolicy` has for it), returns
            the wrapper: :func:`checkpoint_wrapper`, :func:`offload_wrapper`, or a ``partial`` of these.
        check_fn: Whether to wrap a module. Modules inside chosen ones are asked about as well; containers without
            a forward (``nn.ModuleList``, ``nn.ModuleDict``) are not: nothing would ever be recomputed there.
        auto_wrap_policy: What to wrap, as for sharding. Takes precedence over ``check_fn``.

    Raises:
        ValueError: If ``auto_wrap_policy`` is no policy, or a policy answers with something that is no answer.
    """
    policy = auto_wrap_policy
    if policy is None:
        policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: _has_forward(m) and check_fn(m))
    elif not isinstance(policy, Policy) and (not callable(policy) or isinstance(policy, type)):
        raise ValueError(
            "apply_activation_checkpointing: auto_wrap_policy: expected a Policy or a callable "
            f"(module=, recurse=, nonwrapped_numel=) -> bool, found {policy!r}"
        )

    def wrap(module: nn.Module, kwargs: dict[str, Any], _lifted: frozenset[nn.Parameter]) -> nn.Module:
        return checkpoint_wrapper_fn(module, **kwargs)

    plan_for(policy, model).apply(wrap)


def _has_forward(module: nn.Module) -> bool:
    containers = (nn.Module.forward, nn.ModuleList.forward, nn.ModuleDict.forward)
    return "forward" in module.__dict__ or type(module).forward not in containers
