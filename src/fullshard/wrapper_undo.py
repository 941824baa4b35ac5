"""A wrap that fails leaves the module as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from fullshard.engine.ownership import clear_unit, nested_units, unit_of
from fullshard.engine.parameter import managed_by, unmark
from fullshard.engine.unit import Unit

__all__ = ["undone_on_failure"]


@contextlib.contextmanager
def undone_on_failure(module: nn.Module) -> Iterator[list[nn.Module]]:
    """If the ``with`` block raises, give the parameters of all units made in it their old forms and places back.

    What lies in CPU memory is kept until then, so that nothing has to be gathered: an error may be this rank's own.
    Accelerators may have no room for that; from there parameters are gathered, which all ranks have to come to. What
    a failing ``param_init_fn`` has initialised stays so.

    Yields:
        A list for the modules that units were made of, in the order in which they were.
    """
    before = {id(unit) for unit in nested_units(module)}
    holders = [(m, name, p, p.device) for m in module.modules() for name, p in m._parameters.items() if p is not None]
    values = {p: p.data for _, _, p, _ in holders if p.device.type in ("cpu", "meta") and managed_by(p) is None}
    gradients = [(p, p.grad) for _, _, p, _ in holders if p.grad is not None]
    children = [(m, list(m._modules.items())) for m in module.modules()]
    made: list[nn.Module] = []
    try:
        yield made
    except BaseException:
        for wrapper in reversed(made):
            unit = unit_of(wrapper)
            if unit is not None and id(unit) not in before:
                _dissolve(unit, values)
                clear_unit(wrapper)
        for holder, held in children:
            holder._modules.update(held)
        for holder, name, parameter, device in holders:
            found = holder._parameters.get(name)
            if found is None:
                holder._parameters[name] = parameter
            elif found.device != device and device.type != "meta":  # its shard was offloaded
                if found is parameter:
                    parameter.data = found.data.to(device)
                else:  # of an accelerator between which and the CPU parameters cannot move: it has its value still
                    holder._parameters[name] = parameter
        for parameter, gradient in gradients:
            parameter.grad = gradient
        raise


def _dissolve(unit: Unit, values: dict[nn.Parameter, torch.Tensor]) -> None:
    with torch.inference_mode(False), torch.no_grad():
        for bucket in unit.buckets:
            if not all(parameter.sharded in values for parameter in bucket.parameters):
                bucket.restore()
    unit.registration.leave()
    for parameter in unit.parameters:
        old = values.get(parameter.sharded)
        if old is not None:
            parameter.sharded.grad = None
            parameter.sharded.data = old
        unmark(parameter.sharded)
        for owner in parameter.owners:
            owner.set(parameter.sharded)
