"""Parameters in the flat form: 1-D pieces of the original ones, or one ``FlatParameter`` for all of a bucket.

[Note: Flat pieces]
In the flat form the ``sharded`` face of a parameter is the *piece* of it that lies in this rank's slice of the
concatenation: 1-D, maybe empty. It is the very object that the user's module had before, so that optimizers that were
built earlier, and parameter groups, stay right; only what lies in it changes. Where nothing is cut (one rank, or
replication only) the piece is the whole parameter and keeps its shape.

If flat parameters are visible (``use_orig_params=False``), modules hold the pieces as plain attributes, and what is
registered, optimized and saved is the :class:`FlatParameter` that has all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.engine.parameter import Owner, ShardedParameter, accumulate_gradient, clear_gradient, mark, value_of
from fullshard.errors import FullshardError
from fullshard.layout import FlatLayout, FlatSlot, Piece
from fullshard.memory import own_storage

__all__ = ["FlatHome", "FlatParameter", "FlatPiece", "placed"]


NOT_FUNCTIONAL = (
    ", as torch.func.functional_call does; a sharded module computes with its own parameters, so call it without "
    "others, assign to their .data, or edit them inside summon_full_params"
)


class FlatParameter(nn.Parameter):
    """This rank's slice of a bucket as a parameter: 1-D, padding included.

    Attributes:
        fqns: Names of the parameters in it, in order.
        shapes: Their shapes.
    """

    fqns: tuple[str, ...]
    shapes: tuple[torch.Size, ...]


class FlatPiece(ShardedParameter):
    """See [Note: Flat pieces]."""

    piece: Piece | None = None  # of the parameter's memory that is here; None: all of it is, before it is laid out
    slot: FlatSlot | None = None  # where the parameter lies in what it was cut from
    cut: FlatLayout | None = None  # which that is; kept, because only a gather could cut elsewhere
    home: FlatHome | None = None  # if flat parameters are visible
    gradient_dtype: torch.dtype | None = None  # of sharded gradients, where it is not the shard's

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained: what the user can set."""
        return self.sharded.requires_grad if self.home is None else self.home.flat.requires_grad

    def place(self, local: torch.Tensor) -> None:
        """Put this rank's piece at ``local``; the parameter object stays the same wherever that is possible."""
        old, self.local = self.sharded, local
        if old.grad is not None and old.grad.shape != local.shape:
            old.grad = None  # of the whole parameter, from before it was sharded
        if isinstance(old, DTensor) or not torch._has_compatible_shallow_copy_type(old, local):
            self.sharded = nn.Parameter(local, requires_grad=old.requires_grad)
        else:
            old.data = local
        self.sharded.__dict__.update(self.attributes)
        self._mark()

    def part_like_local(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's piece of ``value``, the whole parameter or that piece already, in the shape of ``local``."""
        shape = self.shape
        if self.local.dim() != 1 or tuple(value.shape) != shape.shape:
            return value.view(self.local.shape)
        if tuple(value.stride()) != shape.stride:
            value = torch.empty_strided(shape.shape, shape.stride, dtype=value.dtype, device=value.device).copy_(value)
        assert self.piece is not None
        start, numel, _ = self.piece
        return value.as_strided((numel,), (1,), int(value.storage_offset()) + start)

    def is_current(self) -> bool:
        """Whether the module still holds our parameter and that still lies in the shard buffer."""
        if self.home is not None:
            return self.home.is_current() and all(owner.held() is None for owner in self.owners)
        return self.is_home() and all(owner.held() is self.sharded for owner in self.owners)

    def is_home(self) -> bool:
        """Whether the parameter object's memory is still the piece's."""
        sharded, local = self.sharded, self.local
        if sharded.shape != local.shape:
            return False
        # Empty tensors have no address; ranks with other pieces see what is put in a piece's place, so these must too.
        if not local.numel():
            return sharded.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
        return sharded.data_ptr() == local.data_ptr()

    def adopt_registered(self) -> nn.Parameter:
        """Make what the user has put into the module ours; its value is taken over afterwards.

        Raises:
            FullshardError: If it is of neither the piece's nor the parameter's shape.
        """
        held = [owner.held() for owner in self.owners]
        if self.home is not None:
            if any(other is not None for other in held):
                raise FullshardError(
                    f"cannot write back {self.describe()}: a parameter was assigned to its module although "
                    "use_orig_params is False; edit it inside summon_full_params"
                )
            self.sharded.data = self.home.held_piece(self)
            return self.sharded
        found = next((other for other in held if other is not self.sharded), self.sharded)
        if not isinstance(found, nn.Parameter):
            raise FullshardError(
                f"cannot write back {self.describe()}: its module holds a {type(found).__name__} that is no "
                f"nn.Parameter{NOT_FUNCTIONAL}"
            )
        if found.shape not in (self.local.shape, self.placement.shape):
            raise FullshardError(
                f"cannot write back {self.describe()}: its shape was changed to {tuple(found.shape)}; expected this "
                f"rank's piece, {tuple(self.local.shape)}, or the whole parameter, {tuple(self.placement.shape)}"
            )
        if found is not self.sharded:
            self.sharded = found
            self.remember_attributes()
        return found

    @property
    def local_gradient(self) -> torch.Tensor | None:
        """See :class:`ShardedParameter`."""
        if self.home is None or self.piece is None:
            return self.sharded.grad
        gradient = self.home.flat.grad
        return None if gradient is None else gradient.narrow(0, self.piece.offset, self.piece.numel)

    @property
    def whole_on_every_rank(self) -> bool:
        """See :class:`ShardedParameter`. A slice cuts whatever lies on its edge."""
        return False

    def clear_gradient(self, *, set_to_none: bool) -> None:
        """See :class:`ShardedParameter`."""
        clear_gradient(self.sharded if self.home is None else self.home.flat, set_to_none=set_to_none)

    def set_gradient(self, local: torch.Tensor | None) -> None:
        """See :class:`ShardedParameter`. In the gradient of a visible flat parameter, missing ones become zeros."""
        if self.home is None:
            dtype = self.gradient_dtype or self.local.dtype
            if local is not None:  # maybe of a copy in CPU memory
                local = local.to(self.local.device, dtype, copy=True).view(self.local.shape)
            self.sharded.grad = local
        elif self.home.flat.grad is not None and self.piece is not None:
            target = self.home.flat.grad.narrow(0, self.piece.offset, self.piece.numel)
            if local is None:
                target.zero_()
            else:
                target.as_strided(self.local.shape, self.local.stride()).copy_(local)

    def accumulate(self, local: torch.Tensor) -> None:
        """Set the gradient of the piece to ``local``, or add it, and run the user's hooks."""
        accumulate_gradient(self.sharded, local)

    def memoize(self, memo: dict[int, Any]) -> None:
        """Put a copy of the piece into a deepcopy's memo: without a gradient, as ``nn.Parameter``'s."""
        memo[id(self.sharded)] = nn.Parameter(self.local.clone(), requires_grad=self.requires_grad)

    def copy_for(self, memo: dict[int, Any]) -> ShardedParameter:
        """This parameter in a deep copy whose modules and parameters are in ``memo``."""
        modules = [(memo[id(owner.module())], owner.name) for owner in self.owners]
        owners = [Owner.of(module, name) for module, name in modules]
        copied = FlatPiece(memo[id(self.sharded)], owners, list(self.fqns), self.placement, self.shape)
        copied.piece, copied.slot, copied.cut = self.piece, self.slot, self.cut
        return copied


class FlatHome:
    """A visible flat parameter: where it is registered and which memory it is on.

    Args:
        module: That it is registered on.
        name: Under which.
        slice_: The shard buffer.
        pieces: That lie in it, in order.
    """

    flat: FlatParameter
    name: str
    parameters: dict[str, nn.Parameter | None]  # of the module
    pieces: list[FlatPiece]
    _slice: torch.Tensor

    def __init__(self, module: nn.Module, name: str, slice_: torch.Tensor, pieces: Sequence[FlatPiece]) -> None:
        self.name, self.parameters = name, module._parameters
        self.pieces, self._slice = list(pieces), slice_
        requires_grad = pieces[0].sharded.requires_grad
        flat: FlatParameter = torch.Tensor._make_subclass(FlatParameter, slice_.detach(), requires_grad)
        flat.fqns = tuple(piece.fqn for piece in pieces)
        flat.shapes = tuple(piece.placement.shape for piece in pieces)
        self.flat = flat
        mark(flat, pieces[0])
        if any(piece.sharded.grad is not None for piece in pieces):
            self._take_gradients()

    def _take_gradients(self) -> None:
        """Of pieces that had some before they lay here."""
        dtype = self.pieces[0].gradient_dtype or self._slice.dtype
        self.flat.grad_dtype = dtype
        self.flat.grad = torch.zeros_like(self._slice, dtype=dtype)
        for piece in self.pieces:
            gradient, piece.sharded.grad = piece.sharded.grad, None
            if gradient is not None and piece.piece is not None:
                self.flat.grad.narrow(0, piece.piece.offset, piece.piece.numel).copy_(gradient.reshape(-1))

    def move_to(self, slice_: torch.Tensor) -> None:
        """The shard buffer is another one now."""
        self._slice = slice_
        self.flat.data = slice_

    def settle(self) -> None:
        """Have the flat parameter lie on the shard buffer again."""
        self.flat.data = self._slice

    def is_current(self) -> bool:
        """Whether the flat parameter is registered and on the shard buffer."""
        flat = self.flat
        return self.parameters.get(self.name) is flat and flat.data_ptr() == self._slice.data_ptr()

    def held_piece(self, piece: FlatPiece) -> torch.Tensor:
        """The piece in what the user has put in the flat parameter's place.

        Raises:
            FullshardError: If that has another size.
        """
        held = self.parameters.get(self.name)
        value = self.flat if held is None else held
        if not isinstance(value, nn.Parameter):
            raise FullshardError(
                f"cannot write back the flat parameter {self.name}: it was replaced by a {type(value).__name__} that "
                f"is no nn.Parameter{NOT_FUNCTIONAL}"
            )
        if value.shape != self._slice.shape:
            raise FullshardError(
                f"cannot write back the flat parameter {self.name}: its shape was changed to {tuple(value.shape)}, "
                f"expected {tuple(self._slice.shape)}"
            )
        assert piece.piece is not None
        local, held_slice = piece.local, value_of(value)
        start = int(held_slice.storage_offset()) + piece.piece.offset
        return held_slice.as_strided(local.shape, local.stride(), start)  # a whole piece has its parameter's strides


def placed(slice_: torch.Tensor, piece: Piece, parameter: FlatPiece, *, whole: bool) -> torch.Tensor:
    """The memory of a piece in the slice, in the parameter's own shape if it is the ``whole`` of it."""
    shape, stride = (parameter.shape.shape, parameter.shape.stride) if whole else ((piece.numel,), (1,))
    if not piece.numel:
        return slice_.new_empty(1).as_strided(shape, stride)  # with an address, see FlatPiece.is_home
    return own_storage(slice_.as_strided(shape, stride, int(slice_.storage_offset()) + piece.offset))
