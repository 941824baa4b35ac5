"""Activation checkpointing for sharded and plain models, and activation offloading for sharded ones.

The wrappers are PyTorch's own, re-exported here. They remove their prefix from state dict keys and parameter names.
Defined here are ``apply_activation_checkpointing``, on wrap plans, and ``offload_activations``, whose copies run beside
the units of ``activation_offload.py``.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
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

from fullshard.activation_offload import ActivationOffload
from fullshard.engine.ownership import nested_units, unit_of
from fullshard.wrap import Policy, PolicyFunction, lambda_auto_wrap_policy, plan_for
from fullshard.wrap.tree import has_forward

__all__ = [
    "ActivationWrapper",
    "CheckpointImpl",
    "CheckpointWrapper",
    "OffloadWrapper",
    "apply_activation_checkpointing",
    "checkpoint_wrapper",
    "offload_activations",
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

    plan_for(policy, model, sharded=True).apply(wrap)


def offload_activations(
    model: nn.Module,
    fraction: float = 1.0,
    *,
    modules: Iterable[nn.Module] | None = None,
    min_bytes: int = 2**20,
    pin_memory: bool = True,
) -> None:
    """Keep activations of sharded modules in CPU memory between forward and backward; nothing is recomputed.

    When the forward of a unit ends, large tensors that autograd has saved in it are copied to CPU memory while the next
    unit computes. They are copied back while the unit after it computes its backward, at the point where its parameters
    are prefetched, too. So the activations of about two units are on the device at a time. Losses and gradients stay
    the same bit for bit. Parameters are not copied, nor are the activations of the last of the units, whose backward
    comes at once. Inside checkpointed parts of a unit, only what the checkpoint keeps is offloaded.

    Call it after sharding; call it again to change the choice. Without an accelerator it has no effect.

    Args:
        model: Module that ``fully_shard``, ``replicate`` or ``FullyShardedDataParallel`` was called on, or that has
            such modules inside.
        fraction: Share of the bytes to offload, from 0 (none) to 1 (all).
        modules: Sharded modules whose activations are offloaded, such as the blocks. None: all sharded modules inside
            ``model`` but not ``model`` itself. What runs inside of such a module belongs to it.
        min_bytes: Tensors in smaller memory stay on the device.
        pin_memory: Pin (page-lock) the CPU memory, so that copies overlap with computation.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If ``fraction`` is not between 0 and 1, ``min_bytes`` is negative, a module is not sharded or not in
            ``model``, or there is no sharded module.

    Warns:
        UserWarning: If the model is on the CPU: activations are in CPU memory already.

    Example:
        ```python
        import torch
        from torch import nn

        from fullshard import fully_shard
        from fullshard.activation_checkpoint import offload_activations

        model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)])
        for block in model:
            fully_shard(block)
        fully_shard(model)
        offload_activations(model, fraction=0.5)
        model(torch.randn(8, 16)).square().mean().backward()
        ```
    """
    api = "offload_activations"
    if not isinstance(model, nn.Module):
        raise TypeError(f"{api}: model: expected a module, found {type(model).__name__}")
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)):
        raise TypeError(f"{api}: fraction: expected a number, found {fraction!r}")
    if not 0 <= fraction <= 1:
        raise ValueError(f"{api}: fraction: expected a number from 0 to 1, found {fraction!r}")
    if isinstance(min_bytes, bool) or not isinstance(min_bytes, int):
        raise TypeError(f"{api}: min_bytes: expected an int, found {min_bytes!r}")
    if min_bytes < 0:
        raise ValueError(f"{api}: min_bytes: expected at least 0, found {min_bytes}")
    if not isinstance(pin_memory, bool):
        raise TypeError(f"{api}: pin_memory: expected True or False, found {pin_memory!r}")
    units = {id(unit): unit for unit in nested_units(model)}
    if modules is None:
        own = unit_of(model)
        chosen = {key: unit for key, unit in units.items() if unit is not own}
        if not chosen:
            raise ValueError(
                f"{api}: found no sharded module inside the {type(model).__name__}; call fully_shard on its blocks "
                "first, or pass modules="
            )
    else:
        chosen = {}
        for module in modules:
            unit = unit_of(module) if isinstance(module, nn.Module) else None
            if unit is None or id(unit) not in units:
                raise ValueError(f"{api}: modules: expected sharded modules of model, found a {type(module).__name__}")
            chosen[id(unit)] = unit
    devices = {unit.mesh.device for unit in chosen.values()}
    if any(device.type == "cpu" for device in devices):
        warnings.warn(f"{api} has no effect on the CPU: activations are in CPU memory already", stacklevel=2)
    offloads = {
        device: ActivationOffload(fraction, min_bytes, pin_memory, device)
        for device in devices
        if fraction and device.type != "cpu"
    }
    for key, unit in units.items():
        offload = offloads.get(unit.mesh.device) if key in chosen else None
        unit.settings.around_forward = None if offload is None else offload.around
