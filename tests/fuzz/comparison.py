"""Comparing a sharded model with the unsharded one, on each rank what is there: nothing is communicated.

So looking changes nothing, and replicas are compared on each rank that has one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from compare import fqn_of
from fullshard.engine.ownership import nested_units
from fullshard.engine.parameters.flat import FlatParameter, FlatShardedParameter
from fullshard.engine.parameters.sharded import ShardedParameter
from fullshard.engine.parameters.slices import SliceParameter
from fullshard.engine.states import Phase
from fuzz.models import Root
from models import held_bytes


@dataclass(frozen=True)
class Tolerance:
    """How far a tensor may be from the expected one: by ``relative`` times its largest element, plus ``absolute``."""

    relative: float
    absolute: float

    @property
    def of_parameters(self) -> Tolerance:
        """A step changes a parameter by a small part of its gradient, and so of the gradient's error.

        But a bias that starts at zero is nothing but steps: where gradients are rounded (relative error of an fp16
        number: 5e-4, several times), its error is theirs.
        """
        return Tolerance(self.relative / 10 if self.relative < 1e-6 else self.relative, self.absolute)


class Pair(NamedTuple):
    """A sharded parameter as users see it, and the reference's."""

    fqn: str
    holder: nn.Module
    name: str
    piece: ShardedParameter | None  # None: it was added after sharding, and is not sharded
    expected: nn.Parameter

    @property
    def held(self) -> nn.Parameter | None:
        """What the module holds now."""
        return self.holder._parameters.get(self.name)

    def values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the module holds, this rank's part or all of the parameter, and what it should be."""
        held, whole = self.held, self.expected.detach()
        if held is None:
            assert self.piece is not None  # in a flat parameter
            return self.piece.local, self.part_of(whole)
        if isinstance(held, DTensor):
            return held.detach().to_local(), self.part_of(whole)
        return held.detach(), whole if held.shape == whole.shape else self.part_of(whole)

    def full_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``values``, but all of DTensors: all ranks call it."""
        held = self.held
        if not isinstance(held, DTensor):
            return self.values()
        return held.detach().full_tensor(), self.expected.detach()

    def gradients(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """This rank's part of the gradient, and what it should be."""
        whole, held, piece = self.expected.grad, self.held, self.piece
        if piece is None:
            return None if held is None else held.grad, whole
        replaced = held is not None and held is not piece.sharded and held is not getattr(piece, "unsharded", None)
        gradient = held.grad if replaced and held is not None else piece.local_gradient
        return gradient, None if whole is None else self.part_of(whole)

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor like the whole parameter."""
        if isinstance(self.piece, SliceParameter):
            return self.piece.local_part(whole)
        assert self.piece is not None and isinstance(self.piece.sharded, DTensor)
        return _part(whole, self.piece.sharded)


def _part(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """What this rank has of ``whole``, if it is placed as ``like`` is."""
    coordinates = like.device_mesh.get_coordinate()
    assert coordinates is not None
    for axis, placement in enumerate(like.placements):
        if isinstance(placement, Shard):
            chunks = whole.chunk(like.device_mesh.size(axis), placement.dim)
            index = coordinates[axis]
            whole = chunks[index] if index < len(chunks) else whole.narrow(placement.dim, 0, 0)
    return whole


def pairs(model: nn.Module, reference: Root, *, wrapped: bool) -> list[Pair]:
    """All parameters, each under one of its names."""
    found = list(_wrapped(model, reference) if wrapped else _held(model, reference))
    covered, expected = {id(pair.expected) for pair in found}, {id(parameter) for parameter in reference.parameters()}
    if covered != expected:
        missing = [name for name, parameter in reference.named_parameters() if id(parameter) not in covered]
        raise AssertionError(f"the sharded model has no {missing}")
    return found


def _held(model: nn.Module, reference: Root) -> Iterator[Pair]:
    pieces = {
        (id(owner.module()), owner.name): piece
        for unit in nested_units(model)
        for piece in unit.parameters
        for owner in piece.owners
    }
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                fqn = fqn_of(f"{path}.{name}" if path else name)
                if isinstance(parameter, FlatParameter):
                    continue
                piece = pieces.get((id(module), name))
                yield Pair(fqn, module, name, piece, reference.get_parameter(fqn))


def _wrapped(model: nn.Module, reference: Root) -> Iterator[Pair]:
    paths = {id(module): fqn_of(f"{path}.") for path, module in model.named_modules()}
    for unit in nested_units(model):
        for piece in unit.parameters:
            for owner in piece.owners:
                module = owner.module()
                fqn = f"{paths[id(module)]}{owner.name}".lstrip(".")
                assert module is not None
                yield Pair(fqn, module, owner.name, piece, reference.get_parameter(fqn))
    for pair in _held(model, reference):
        if pair.piece is None:
            yield pair


def flat_groups(found: list[Pair]) -> list[list[nn.Parameter]]:
    """The reference's parameters, of each flat parameter that users see."""
    groups: dict[int, list[nn.Parameter]] = {}
    for pair in found:
        if isinstance(pair.piece, FlatShardedParameter) and pair.piece.handle is not None:
            groups.setdefault(id(pair.piece.handle), []).append(pair.expected)
    return list(groups.values())


def differences(found: list[Pair], tolerance: Tolerance, cancellation: Mapping[nn.Parameter, float]) -> Iterator[str]:
    """What differs between the sharded model and the reference, in words.

    ``cancellation``: By how much errors of gradients may be larger relative to these, see ``Reference``.
    """
    for pair in found:
        whole = pair.expected.detach()
        yield from difference(f"parameter {pair.fqn}", *pair.values(), tolerance.of_parameters, whole)
        gradient, expected = pair.gradients()
        if (gradient is None) != (expected is None):
            size = "" if expected is None else f", whose largest element is {largest(expected):.3g}"
            yield f"gradient of {pair.fqn}: {_brief(gradient)}, expected {_brief(expected)}{size}"
        elif gradient is not None and expected is not None:
            factor = max(1.0, cancellation.get(pair.expected, 1.0))
            allowed = replace(tolerance, relative=factor * tolerance.relative)
            yield from difference(f"gradient of {pair.fqn}", gradient, expected, allowed, pair.expected.grad)


def difference(
    what: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    tolerance: Tolerance,
    whole: torch.Tensor | None = None,
) -> Iterator[str]:
    """How ``actual`` differs from ``expected``, in words; nothing if it does not.

    ``whole``: of which ``expected`` is a part, and whose largest element counts.
    """
    actual, expected = actual.detach(), expected.detach()
    if isinstance(actual, DTensor):
        yield f"{what}: a DTensor, expected a tensor"
        return
    if actual.numel() == expected.numel() and actual.dim() == 1:
        expected = expected.reshape(actual.shape)
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        yield f"{what}: {_brief(actual)}, expected {_brief(expected)}"
        return
    actual, expected = actual.double(), expected.double()
    distance = (actual - expected).abs()
    allowed = tolerance.relative * largest(expected if whole is None else whole) + tolerance.absolute
    if actual.numel() and not bool((distance <= allowed).all()):
        index = int(distance.nan_to_num(nan=torch.inf).argmax())
        yield (
            f"{what}: {int((~(distance <= allowed)).sum())} of {actual.numel()} elements differ by more than "
            f"{allowed:.3g}; worst: {float(actual.flatten()[index])!r}, expected {float(expected.flatten()[index])!r}"
        )


def largest(tensor: torch.Tensor) -> float:
    """Return the largest magnitude of an element; 0 if there is none."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _brief(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def left_unsharded(model: nn.Module) -> Iterator[str]:
    """Units that hold memory for unsharded parameters, or are in the middle of something."""
    for unit in nested_units(model):
        if unit.phase is not Phase.IDLE:
            yield f"left over: unit {unit.name!r} is in its {unit.phase.value}"
        if any(held_bytes(bucket) for bucket in unit.buckets):
            yield f"left over: unit {unit.name!r} is unsharded"
        if unit.registration.unsharded:
            yield f"left over: modules of unit {unit.name!r} hold unsharded parameters"
