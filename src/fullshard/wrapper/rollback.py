"""Restore a module if wrapping it fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from fullshard.engine.ownership import IGNORED, all_modules, clear_unit, unit_of
from fullshard.engine.parameters.sharded import managed_by, unmark
from fullshard.engine.unit import Unit

__all__ = ["rollback_on_failure"]


@contextlib.contextmanager
def rollback_on_failure(module: nn.Module) -> Iterator[list[nn.Module]]:
    """If the ``with`` block raises, restore the original parameters of all units created in it.

    Parameters in CPU memory are kept until then, so that no collective is needed: the error may be only this rank's.
    Accelerators may lack memory for that; their parameters are all-gathered, a collective. Modules that a failing
    ``param_init_fn`` has initialized stay initialized.

    Yields:
        A list to which the caller appends each module that becomes a unit.
    """
    modules = all_modules(module)
    holders = [(m, name, p, p.device) for m in modules for name, p in m._parameters.items() if p is not None]
    values = {p: p.data for _, _, p, device in holders if device.type in ("cpu", "meta") and managed_by(p) is None}
    gradients = [(p, p.grad) for _, _, p, _ in holders if p.grad is not None]
    # Units made before note where else their tied parameters are; what a unit that is undone told them is forgotten.
    managed = [sharded for _, _, p, _ in holders if (sharded := managed_by(p)) is not None]
    pending_owners = [(sharded, sharded.pending_owners) for sharded in managed]
    children = [(m, list(m._modules.items())) for m in modules if m._modules]
    not_ignoring = [m for m in modules if IGNORED not in m.__dict__]
    wrapped_modules: list[nn.Module] = []
    try:
        yield wrapped_modules
    except BaseException:
        for wrapper in reversed(wrapped_modules):
            unit = unit_of(wrapper)
            if unit is not None:
                _restore_unit(unit, values)
                clear_unit(wrapper, modules)
        for holder, held in children:
            holder._modules.update(held)
        for each in not_ignoring:
            each.__dict__.pop(IGNORED, None)
        for holder, name, parameter, device in holders:
            found = holder._parameters.get(name)
            if found is None:
                holder._parameters[name] = parameter
            elif found.device != device and device.type != "meta":  # its shard was offloaded
                if found is parameter:
                    parameter.data = found.data.to(device)
                else:  # parameters cannot move between this accelerator and the CPU: the original still has its value
                    holder._parameters[name] = parameter
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for sharded, owners in pending_owners:
            sharded.pending_owners = owners
        raise


def _restore_unit(unit: Unit, values: dict[nn.Parameter, torch.Tensor]) -> None:
    with torch.inference_mode(False), torch.no_grad():
        for bucket in unit.buckets:
            if not all(parameter.sharded in values for parameter in bucket.parameters):
                bucket.restore()
    unit.registration.remove()
    for parameter in unit.parameters:
        old = values.get(parameter.sharded)
        if old is not None:
            parameter.sharded.grad = None
            parameter.sharded.data = old
        unmark(parameter.sharded)
        for owner in parameter.owners:
            owner.set(parameter.sharded)
