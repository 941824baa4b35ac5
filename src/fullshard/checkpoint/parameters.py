"""The parameters of a model as this rank holds them, by the names they had before anything was wrapped or sharded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fullshard.checkpoint.pieces import Piece, Pieces, box_of
from fullshard.engine.flat_parameter import FlatParameter, FlatPiece
from fullshard.engine.full_copies import bring_to_rest
from fullshard.engine.names import CHECKPOINTED, WRAPPED
from fullshard.engine.ownership import nested_units
from fullshard.engine.parameter import ShardedParameter, value_of
from fullshard.errors import FullshardError
from fullshard.layout import Box, boxes_of_range

__all__ = ["LocalParameter", "local_parameters", "settle", "walk", "written"]


@dataclass(frozen=True, eq=False)
class LocalParameter:
    """One parameter of a model of any kind, as this rank holds it.

    Attributes:
        fqns: Its names as before wrapping; a tied parameter has several.
        shape: Of the whole parameter.
        dtype: Of its elements at rest.
        parameter: What optimizers see: itself, or the :class:`FlatParameter` that its piece lies in.
        place: Where in a visible flat parameter its piece lies, in elements; None if it is a parameter by itself.
        sharded: What the engine knows of it; None if no unit manages it.
    """

    fqns: tuple[str, ...]
    shape: torch.Size
    dtype: torch.dtype
    parameter: nn.Parameter
    place: slice | None = None
    sharded: ShardedParameter | None = field(default=None, repr=False)

    @property
    def fqn(self) -> str:
        """Its first name."""
        return self.fqns[0]

    def local_of(self, value: torch.Tensor) -> torch.Tensor:
        """This parameter's part of a tensor that is shaped as :attr:`parameter` is, such as a state of an optimizer.

        Args:
            value: Plain or DTensor.

        Returns:
            A view of this rank's memory.
        """
        local = value_of(value)
        return local if self.place is None else local.reshape(-1)[self.place]

    def cut(self, value: torch.Tensor) -> Pieces:
        """That part as boxes of the whole parameter.

        Args:
            value: Shaped as :attr:`parameter` is, of any dtype. A DTensor says itself where it lies.

        Raises:
            FullshardError: If it has another shape.
        """
        if isinstance(self.sharded, FlatPiece):
            return self._cut_flat(self.sharded, self.local_of(value))
        if isinstance(value, DTensor):
            return Pieces.of(value)
        if isinstance(self.parameter, DTensor) and value.shape == self.parameter._local_tensor.shape:
            return Pieces.placed(self.shape, value.detach(), box_of(self.parameter))
        if value.shape != self.shape:
            raise FullshardError(
                f"{self.fqn}: expected a tensor of shape {tuple(self.shape)} or this rank's part of one, found "
                f"{tuple(value.shape)}"
            )
        return Pieces.whole(value)

    def _cut_flat(self, piece: FlatPiece, local: torch.Tensor) -> Pieces:
        shape = piece.shape
        full = piece.placement.full(local)
        outer = box_of(full) if isinstance(full, DTensor) else Box.whole(self.shape)
        assert outer is not None, f"{self.fqn} is on a mesh that this rank is not part of"
        if tuple(local.shape) == shape.shape:
            return Pieces.placed(self.shape, local, outer)
        assert piece.piece is not None, f"{self.fqn} was not laid out"
        if not self.shape.numel():  # as of any other tensor without elements, everybody has all of it
            return Pieces.placed(self.shape, local.new_empty(outer.sizes), outer)
        start, numel, _ = piece.piece
        if local.numel() != numel:
            raise FullshardError(
                f"{self.fqn}: expected this rank's piece, {numel} elements, or all of it, {shape.shape}; found "
                f"{tuple(local.shape)}"
            )
        # Elements are counted in the order in which they lie in memory: the order of rows only if the parameter is
        # contiguous.
        order = sorted(range(len(shape.shape)), key=lambda dim: (-shape.stride[dim], shape.shape[dim] != 1, dim))
        back = [order.index(dim) for dim in range(len(order))]
        pieces, taken = [], 0
        for box in boxes_of_range([shape.shape[dim] for dim in order], start, numel):
            part = local.reshape(-1)[taken : taken + box.numel].view(box.sizes).permute(back)
            pieces.append(Piece(box.permuted(back).moved(outer.offsets), part))
            taken += box.numel
        return Pieces(self.shape, local.dtype, local.device, pieces, equal=True)


def local_parameters(model: nn.Module) -> list[LocalParameter]:
    """All parameters of ``model``, in its order, each once.

    Args:
        model: Plain, DistributedDataParallel, of either front end, or a mixture; at rest.

    Raises:
        PhaseError: If a unit is in the middle of a step, or its full parameters are summoned.
    """
    settle(model)
    managed = {
        (id(owner.parameters), owner.name): parameter
        for unit in nested_units(model)
        for parameter in unit.parameters
        for owner in (*parameter.owners, *parameter.pending_owners)
    }
    names: dict[int, list[str]] = {}
    found: dict[int, tuple[nn.Parameter, ShardedParameter | None]] = {}
    for prefix, module in walk(model):
        for name, held in module._parameters.items():
            sharded = managed.get((id(module._parameters), name))
            if sharded is None and (held is None or isinstance(held, FlatParameter)):
                continue
            key = id(held if sharded is None else sharded)
            names.setdefault(key, []).append(prefix + name)
            if key not in found:
                parameter = held if sharded is None else sharded.sharded
                assert parameter is not None
                found[key] = (parameter, sharded)
    return [_local(tuple(names[key]), parameter, sharded) for key, (parameter, sharded) in found.items()]


def _local(fqns: tuple[str, ...], parameter: nn.Parameter, sharded: ShardedParameter | None) -> LocalParameter:
    if sharded is None:
        return LocalParameter(fqns, parameter.shape, parameter.dtype, parameter)
    home = sharded.home if isinstance(sharded, FlatPiece) else None
    if home is None:
        return LocalParameter(fqns, sharded.placement.shape, parameter.dtype, parameter, sharded=sharded)
    assert isinstance(sharded, FlatPiece) and sharded.piece is not None
    place = slice(sharded.piece.offset, sharded.piece.offset + sharded.piece.numel)
    return LocalParameter(fqns, sharded.placement.shape, home.flat.dtype, home.flat, place, sharded)


def walk(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of ``model`` on every path to them, with the prefix of their names: "" or ends in a dot.

    What wrappers add to names is left out.
    """
    stack = [("", model)]
    while stack:
        prefix, module = stack.pop()
        yield prefix, module
        for name, child in reversed(module._modules.items()):
            if child is not None:
                stack.append((prefix if _wraps(module, name) else f"{prefix}{name}.", child))


def _wraps(module: nn.Module, name: str) -> bool:
    """Whether ``module`` is there only to wrap its child of that name."""
    if name in (WRAPPED, CHECKPOINTED):
        return True
    if name == "module":
        return isinstance(module, DistributedDataParallel)
    return name == "_orig_mod" and type(module).__name__ == "OptimizedModule"  # torch.compile's; its module is slow


def settle(model: nn.Module) -> None:
    """Bring all units of ``model`` to rest, with the shards registered.

    Raises:
        PhaseError: See :func:`local_parameters`.
    """
    for unit in nested_units(model):
        bring_to_rest(unit, "its state")


def written(model: nn.Module) -> None:
    """The shards of ``model`` were written to behind its back: full parameters that are still around are stale."""
    for unit in nested_units(model):
        unit.outdated = True
