"""Wrapping of the engine tests' tiny models, and comparisons with the unsharded training of a copy."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from compare import assert_models_equal
from fullshard import FullyShardedDataParallel
from fullshard.comm import Collective
from fullshard.engine.ownership import nested_units
from fullshard.engine.states import Phase
from models import LossOf, reference_backward, square_loss
from ranks import Rank

CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-6}
WRAPPED = "_fsdp_wrapped_module"


def wrap(model: nn.Module, rank: Rank, units: Sequence[str] = (), **settings: Any) -> FullyShardedDataParallel:
    """Wrap the modules named in ``units``, innermost first, in place, then ``model``."""
    settings.setdefault("device_mesh", rank.mesh)
    for unit in units:
        parent, _, name = unit.rpartition(".")
        holder = model.get_submodule(parent)
        setattr(holder, name, FullyShardedDataParallel(holder.get_submodule(name), **settings))
    return FullyShardedDataParallel(model, **settings)


def with_reference(
    model: nn.Module, rank: Rank, units: Sequence[str] = (), **settings: Any
) -> tuple[FullyShardedDataParallel, nn.Module]:
    """``model`` wrapped, and an unsharded copy of it."""
    reference = copy.deepcopy(model)
    return wrap(model, rank, units, **settings), reference


def assert_like(
    model: nn.Module, reference: nn.Module, *, grads: bool = False, rtol: float = 0.0, atol: float = 0.0
) -> None:
    """Require full parameters, and with ``grads`` full gradients, to be those of ``reference``. On all ranks."""
    with FullyShardedDataParallel.summon_full_params(model, writeback=False, with_grads=grads):
        assert_models_equal(model, reference, grads=grads, rtol=rtol, atol=atol)


def backward(model: nn.Module, reference: nn.Module, rank: Rank, loss_of: LossOf) -> None:
    """One microbatch on both: gradients are added to what is there."""
    loss_of(model, rank.rank).backward()
    reference_backward(reference, rank.world_size, loss_of)


def assert_trains_alike(
    model: nn.Module,
    reference: nn.Module,
    rank: Rank,
    optimizers: tuple[torch.optim.Optimizer, torch.optim.Optimizer] | None = None,
    *,
    steps: int = 3,
    loss: Any = square_loss,
    grads: bool = True,
    rtol: float = 1e-4,
    atol: float = 1e-6,
) -> None:
    """Train both and require equal parameters, with ``grads`` also gradients, after each backward."""
    ours, theirs = optimizers or (adam(model.parameters()), adam(reference.parameters()))
    for step in range(steps):
        backward(model, reference, rank, loss(step))
        assert_like(model, reference, grads=grads, rtol=rtol, atol=atol)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    assert_like(model, reference, rtol=rtol, atol=atol)


def adam(parameters: Any, **settings: Any) -> torch.optim.Optimizer:
    """AdamW whose steps do not blow up the rounding of gradients that are nearly zero."""
    return torch.optim.AdamW(parameters, **{"lr": 1e-2, "eps": 1e-3, **settings})


def concatenated(tensors: Sequence[torch.Tensor], world_size: int, alignment: int = 4) -> torch.Tensor:
    """By plain loops, what the ranks' slices are together: tensors one after another, each aligned, padded once."""
    values: list[Any] = []
    for tensor in tensors:
        values += [0.0] * (-len(values) % alignment)
        values += tensor.detach().flatten().tolist()
    values += [0.0] * (-len(values) % world_size)
    return torch.tensor(values, dtype=tensors[0].dtype)


def slice_of(tensors: Sequence[torch.Tensor], rank: Rank, alignment: int = 4) -> torch.Tensor:
    """This rank's slice of :func:`concatenated`."""
    return concatenated(tensors, rank.world_size, alignment).chunk(rank.world_size)[rank.rank]


def pieces_of(tensors: Sequence[torch.Tensor], rank: Rank, alignment: int = 4) -> list[torch.Tensor]:
    """This rank's piece of each tensor, 1-D, maybe empty."""
    marked = [torch.full_like(t, i + 1.0, dtype=torch.float64) for i, t in enumerate(tensors)]
    values, owners = slice_of(tensors, rank, alignment), slice_of(marked, rank, alignment)
    return [values[owners == i + 1.0] for i in range(len(tensors))]


def assert_at_rest(model: nn.Module) -> None:
    """Require that nothing is gathered, no phase is open, and what is registered are pieces or flat parameters."""
    for unit in nested_units(model):
        assert unit.phase is Phase.IDLE, unit.name
        assert not unit.registration.unsharded, unit.name
        for bucket in unit.buckets:
            assert bucket.allocated_bytes == 0, unit.name
    slices = [bucket.shard_buffer for unit in nested_units(model) for bucket in unit.buckets]
    spans = [(s.data_ptr(), s.data_ptr() + s.numel() * s.element_size()) for s in slices]
    for name, parameter in model.named_parameters():
        begin, end = parameter.data_ptr(), parameter.data_ptr() + parameter.numel() * parameter.element_size()
        assert begin == end or any(first <= begin and end <= last for first, last in spans), name


def units(collectives: Sequence[Collective], kind: str) -> list[str]:
    """Names of the units of the collectives of one kind, a repeated name once in a row."""
    names = [c.unit for c in collectives if c.kind == kind]
    return [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]
