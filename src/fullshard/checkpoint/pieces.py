"""What a rank holds of a tensor, as boxes of it: the common form of shards, whatever sharded them.

[Note: Pieces]
A row-sharded ``DTensor`` is one box, a slice of a flat buffer a few, a replicated tensor the whole of it on every
rank. Saving writes boxes, loading fills boxes, and neither asks who cut them: that is why what one front end saved
another loads, on any number of ranks, and why neither needs communication between the ranks' memories.

:class:`Pieces` speaks torch.distributed.checkpoint's protocol for things that can be saved, so its planner takes
them as they are; see :mod:`fullshard.checkpoint.planner` for the two places where it insists on tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from fullshard.layout import Box, chunk_of

__all__ = ["Piece", "Pieces", "box_at", "box_of"]


class Piece(NamedTuple):
    """One box of a tensor and the memory that this rank has it in."""

    box: Box
    local: torch.Tensor  # a view, of shape ``box.sizes``


class Pieces:
    """What this rank holds of one tensor. See [Note: Pieces].

    Attributes:
        shape: Of the whole tensor.
        dtype: Of its elements.
        device: Where this rank's part is; where it has none, where it would be.
        pieces: This rank's part, boxes that do not overlap. Empty if it has none.
        equal: Whether ranks that have the same box have the same values in it, because something sees to it: then any
            of them may write it. Otherwise the first rank's counts.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    pieces: tuple[Piece, ...]
    equal: bool

    def __init__(
        self,
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        pieces: Iterable[Piece],
        *,
        equal: bool = False,
    ) -> None:
        self.shape, self.dtype, self.device, self.pieces = torch.Size(shape), dtype, device, tuple(pieces)
        self.equal = equal

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> Pieces:
        """Of a tensor that is not sharded."""
        value = _plain(tensor.detach())
        return cls(value.shape, value.dtype, value.device, [Piece(Box.whole(value.shape), value)])

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Pieces:
        """Of a plain tensor, or of a ``DTensor``.

        Raises:
            TypeError: If the DTensor has a placement that says of no element where it is, such as ``Partial``.
        """
        if not isinstance(tensor, DTensor):
            return cls.whole(tensor)
        local = tensor._local_tensor.detach()
        if isinstance(local, AsyncCollectiveTensor):
            local = local.wait()
        return cls.placed(tensor.shape, local, box_of(tensor))

    @classmethod
    def placed(cls, shape: torch.Size, local: torch.Tensor, box: Box | None) -> Pieces:
        """Of a tensor of that shape, of which this rank has one box (None: nothing) in ``local``."""
        # A tensor without elements still has to appear in a checkpoint: everybody has all of it.
        local = _plain(local)
        held = box is not None and (box.numel or not math.prod(shape))
        pieces = [Piece(box, local.view(box.sizes))] if box is not None and held else []
        return cls(torch.Size(shape), local.dtype, local.device, pieces, equal=True)

    def size(self) -> torch.Size:
        """The shape of the whole tensor, as of a tensor."""
        return self.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the part that is here."""
        return sum(piece.local.numel() * piece.local.element_size() for piece in self.pieces)

    def find(self, offsets: Iterable[int]) -> torch.Tensor:
        """The memory of the piece that begins at ``offsets``.

        Raises:
            KeyError: If none does.
        """
        wanted = tuple(offsets)
        for piece in self.pieces:
            if piece.box.offsets == wanted:
                return piece.local
        raise KeyError(f"no piece begins at {wanted}; there are {[str(piece.box) for piece in self.pieces]}")

    def __repr__(self) -> str:
        boxes = ", ".join(str(piece.box) for piece in self.pieces) or "nothing"
        return f"Pieces({boxes} of {tuple(self.shape)}, {self.dtype}, {self.device})"

    # ------------------------------------------------ what torch.distributed.checkpoint asks things that it saves

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        chunks = [(_chunk(piece.box), MetadataIndex(fqn, torch.Size(piece.box.offsets))) for piece in self.pieces]
        return [
            WriteItem(index, WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, self.shape))
            for chunk, index in chunks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(piece.box) for piece in self.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.find(index.offset)


def box_of(tensor: DTensor) -> Box | None:
    """Which part of the whole this rank's local tensor is; None if this rank is not on the tensor's mesh.

    Raises:
        TypeError: See :meth:`Pieces.of`.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    return None if coordinate is None else box_at(tensor, coordinate)


def box_at(tensor: DTensor, coordinate: Sequence[int]) -> Box:
    """Which part of the whole the local tensor of the rank at ``coordinate`` of the tensor's mesh is.

    Raises:
        TypeError: See :meth:`Pieces.of`.
    """
    mesh = tensor.device_mesh
    offsets, sizes = [0] * tensor.dim(), list(tensor.shape)
    # A strided shard is a cut of what the axes after it have left; every other one of what those before it have.
    axes = range(mesh.ndim)
    strided = [axis for axis in axes if isinstance(tensor.placements[axis], _StridedShard)]
    for axis in [*(axis for axis in axes if axis not in strided), *reversed(strided)]:
        placement = tensor.placements[axis]
        if isinstance(placement, (Shard, _StridedShard)):
            dim = placement.dim
            start, sizes[dim] = chunk_of(sizes[dim], mesh.size(axis), coordinate[axis])
            offsets[dim] += start
        elif not isinstance(placement, Replicate):
            raise TypeError(
                f"a DTensor with placement {placement} holds no part of its elements on any rank; redistribute it to "
                "Shard or Replicate first"
            )
    return Box(tuple(offsets), tuple(sizes))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor subclass wraps, if that is one tensor of its shape: weights that are cast when they are gathered,
    for instance.

    Raises:
        TypeError: If it is made of something else.
    """
    while type(tensor) is not torch.Tensor:
        names, _ = tensor.__tensor_flatten__() if hasattr(tensor, "__tensor_flatten__") else ((), None)
        inner = [getattr(tensor, name) for name in names]
        if len(inner) != 1 or inner[0].shape != tensor.shape:
            raise TypeError(
                f"a {type(tensor).__name__} is made of {len(inner)} tensors of other shapes, of which boxes of the "
                "whole cannot be told; of weights, save the state dict of what is trained beside them instead, and "
                "state of optimizers with torch's get_optimizer_state_dict and dcp.save"
            )
        tensor = inner[0].detach()
    return tensor


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
