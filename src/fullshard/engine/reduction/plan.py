"""Plans for reducing the gradients of some parameters: computed once, never changed, used every step.

[Note: Gradients that are missing on some ranks]
Which collectives run must not depend on whether this rank's gradient is None. So all trainable parameters of a
bucket take part in every reduction, missing gradients as zeros, and every rank sends along one *presence number* per
parameter: 1 if it had a gradient, else 0. Their mean rides in the packed message. Only a rank that had none
itself looks at it: if nobody had one, ``.grad`` stays None as in an unsharded run, otherwise it is the mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from fullshard.comm import Operand, Slice
from fullshard.comm.mesh import ShardMesh
from fullshard.engine.buckets.message import Column, MessageCopy
from fullshard.engine.buckets.storage import Storage
from fullshard.engine.parameters.sharded import ShardedParameter, accumulate_gradient
from fullshard.engine.parameters.tensor_shards import View
from fullshard.layout import ParameterShape, Slot
from fullshard.layout.per_parameter import contiguous_stride
from fullshard.memory import empty

__all__ = ["Gradients", "Packing", "ReductionPlan"]

Gradients = list["torch.Tensor | None"]

# Nearly always it is one or two: all gradients, or all but frozen and unused ones.
MAX_PRESENCES_KEPT = 8
MAX_ZEROS_KEPT = 64  # bytes: padding between shards is shorter than their alignment


class _Pieces(NamedTuple):
    """The cuts of the first tensor of shards into the shards of operands."""

    sizes: list[int]  # of all pieces, in order, also of those that nothing is reduced into
    direct: list[tuple[int, int, tuple[Slice, ...]]]  # index of a gradient, index of its piece, slices of its operand
    packed: list[tuple[int, tuple[Slice, ...]]]  # the same of operands of the message, in order: piece, slices


@dataclass(frozen=True, eq=False)
class Packing:
    """The places of gradients and presence numbers in the message of a reduction.

    Without a shard axis there is no message, and they fill the first tensor of shards.
    """

    numel: int  # of the message; 0 without a shard axis
    ranks: int
    copies: Sequence[MessageCopy] = ()  # from gradients; the presence numbers come behind all of them
    gaps: Sequence[View] = ()  # between what the copies fill: zeros
    columns: Sequence[Column] = ()  # what one kernel fills; copies fill the rest
    _zeros: dict[tuple[int, torch.dtype], torch.Tensor] = field(default_factory=dict, repr=False)  # padding

    def pack(self, inputs: Gradients, memory: torch.Tensor) -> None:
        """Copy gradients, zeros for missing ones, and presence numbers into ``memory``.

        Args:
            inputs: One gradient for each parameter, None where there is none, and the presence numbers.
            memory: As large as the message, in the dtype in which gradients are sent.
        """
        if self.columns:
            self._pack_columns(inputs, memory)
        zeros, targets, sources = [gap.on(memory) for gap in self.gaps], [], []
        for index, source, target in self.copies:
            gradient, place = inputs[index], target.on(memory)
            if gradient is None:
                zeros.append(place)
            else:
                targets.append(place)
                sources.append(source.on(gradient))
        if zeros:
            torch._foreach_zero_(zeros)
        if targets:  # on one rank there may be neither gradients nor presence numbers
            torch._foreach_copy_(targets, sources)

    def _pack_columns(self, inputs: Gradients, memory: torch.Tensor) -> None:
        """Pack what lies in columns, with one kernel if gradients are in the dtype of the message, or bf16 for fp32.

        For other pairs of dtypes torch pads, concatenates and casts in steps of their own.
        """
        packed = [None if each.slot is None else inputs[each.slot] for each in self.columns]
        dtypes = {gradient.dtype for gradient in packed if gradient is not None}
        dtype = dtypes.pop() if len(dtypes) == 1 else memory.dtype
        parts = [
            self._padding(each.numel, dtype, memory.device)
            if gradient is None
            else gradient.to(dtype).as_strided(each.rows, (each.rows[1], 1))
            for each, gradient in zip(self.columns, packed, strict=True)
        ]
        torch._chunk_cat(parts, 0, self.ranks, out=memory.view(self.ranks, -1))

    def _padding(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return zeros for every rank; they are cached unless they are many."""
        found = self._zeros.get((numel, dtype))
        if found is None:
            found = torch.zeros((self.ranks, numel), dtype=dtype, device=device)
            if numel * dtype.itemsize <= MAX_ZEROS_KEPT:
                self._zeros[numel, dtype] = found
        return found


@dataclass(frozen=True, eq=False, kw_only=True)
class ReductionPlan:
    """The plan for reducing the gradients of one set of parameters of a bucket.

    The result is some flat *tensors of shards*: one with this rank's shards of all gradients. Without a shard axis
    gradients are reduced in place: then it is one with all packed gradients, and each direct gradient itself.
    """

    parameters: tuple[ShardedParameter, ...]  # of one bucket, in model order
    mesh: ShardMesh
    storage: Storage
    views: tuple[tuple[int, View], ...]  # where shards of gradients lie: index of a tensor of shards, and view of it
    presence: View | None  # of the presence numbers, last in the first tensor of shards; None: there are no other ranks
    shards_numel: int  # of the first tensor of shards
    slices: tuple[Slice, ...]  # where gradients lie in it, for a transport that quantizes
    direct: Mapping[int, Slot]  # the parameters whose gradients are operands of their own, by index
    packed: tuple[tuple[int, int], ...]  # offsets and sizes of what the operands of the message are reduced into
    packing: Packing
    # What is not packed has to be zero in the message, because a transport quantizes padding together with gradients.
    # What is there also gets into the shards that are reduced over replicas.
    zeroes_message: bool = False
    together: bool = False  # one parameter that is optimized gets all gradients: a visible flat parameter
    _presence_numbers: dict[tuple[bool, ...], torch.Tensor] = field(default_factory=dict, repr=False)  # sent of late

    # ---------------------------------------------------------------- where, over which axes, in which dtypes

    @cached_property
    def reduces_in_place(self) -> bool:
        """True without a shard axis: gradients are reduced in the memory that they, or their packed copies, lie in."""
        return self.mesh.world_size == 1

    @cached_property
    def all_reduces(self) -> bool:
        """True if there are replicas to all-reduce over."""
        return self.mesh.replicas > 1

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype in which gradients are sent and summed."""
        return self.storage.reduce_dtype

    @property
    def sharded_dtype(self) -> torch.dtype:
        """The dtype of sharded gradients, which users may change; of the reduction if there are several."""
        dtypes = {parameter.gradient_dtype for parameter in self.parameters}
        return dtypes.pop() if len(dtypes) == 1 else self.dtype

    @cached_property
    def ends_on_host(self) -> bool:
        """True if sharded gradients are in CPU memory, away from where they were computed."""
        device = self.mesh.device
        offloads = self.storage.offload_gradients and device.type != "cpu"
        return offloads or self.parameters[0].local.device != device

    @property
    def presence_offset(self) -> int:
        """Offset of the presence numbers in the first tensor of shards."""
        return self.shards_numel if self.presence is None else self.presence.offset

    # ---------------------------------------------------------------- gradients as they are sent

    def inputs(self, gradients: Gradients, *, writable: bool) -> Gradients:
        """Bring gradients (unsharded, None where there are none) into what is sent, and add presence numbers.

        Direct ones become flat, padded to equal shards. ``gradients`` is emptied, so that each is freed as soon as it
        is cast.

        Args:
            gradients: Only read, see [Note: Who owns a gradient].
            writable: Direct ones will be written to, and so have to lie in memory of their own.
        """
        presence = [] if self.presence is None else [self._presence(gradients)]
        inputs: Gradients = []
        direct, sent_dtype = self.direct, self.dtype
        for index, parameter in enumerate(self.parameters):
            gradient, gradients[index] = gradients[index], None
            slot = direct.get(index)
            if slot is None:
                if gradient is not None:
                    gradient = _conform(gradient, parameter.shape, gradient.dtype)  # packing casts
            elif gradient is None or writable or slot.padded:
                gradient = self._own_copy(gradient, parameter.shape, slot)
            else:
                gradient = _conform(gradient, parameter.shape, sent_dtype).as_strided((slot.unsharded_numel,), (1,))
            inputs.append(gradient)
        return inputs + presence

    def _own_copy(self, gradient: torch.Tensor | None, shape: ParameterShape, slot: Slot) -> torch.Tensor:
        copy = empty(slot.unsharded_numel, self.dtype, self.mesh.device)
        if gradient is None or slot.padded:
            copy.zero_()
        if gradient is not None:
            dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
            copy.as_strided(shape.shape, shape.stride).copy_(dense)
        return copy

    def _presence(self, gradients: Gradients) -> torch.Tensor:
        """Return the presence numbers, a row for each rank; cached, since making them costs a copy to the device."""
        present, kept = tuple(gradient is not None for gradient in gradients), self._presence_numbers
        if present not in kept:
            if len(kept) >= MAX_PRESENCES_KEPT:
                kept.clear()
            row = torch.tensor(present, dtype=self.presence_dtype, device=self.mesh.device)
            kept[present] = row.repeat(self.mesh.world_size, 1)
        return kept[present]

    @cached_property
    def presence_dtype(self) -> torch.dtype:
        """The dtype of this rank's presence numbers: that of gradients, as all that one kernel packs."""
        return self.storage.param_dtype if self.packing.columns else self.dtype

    # ---------------------------------------------------------------- operands

    def new_shards(self, inputs: Gradients, *, zeros: bool) -> list[torch.Tensor]:
        """Make the tensors of shards, contents undefined unless ``zeros``."""
        first = empty(self.shards_numel, self.dtype, self.mesh.device)
        if zeros:
            first.zero_()
        direct = [inputs[index] for index in self.direct] if self.reduces_in_place else []
        return [first, *(each for each in direct if each is not None)]

    def pieces_of(self, shards: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Cut the first tensor of shards where operands of the reduce-scatter begin and end; no pieces if in place.

        One call makes all of them, where a view of each takes several times as long.
        """
        return () if self.reduces_in_place else shards[0].split_with_sizes(self._pieces.sizes)

    @cached_property
    def _pieces(self) -> _Pieces:
        sent = [(slot.shard_offset, slot.shard_numel, index) for index, slot in self.direct.items()]
        sent += [(offset, numel, -1) for offset, numel in self.packed]
        sizes: list[int] = []
        direct, packed, end = {}, [], 0
        for offset, numel, index in sorted(sent):
            if offset > end:
                sizes.append(offset - end)
            inside = [each for each in self.slices if offset <= each.offset < offset + numel]
            slices = tuple(each._replace(offset=each.offset - offset) for each in inside)
            if index >= 0:
                direct[index] = (index, len(sizes), slices)
            else:
                packed.append((len(sizes), slices))
            sizes.append(numel)
            end = offset + numel
        if self.shards_numel > end:
            sizes.append(self.shards_numel - end)
        return _Pieces(sizes, [direct[index] for index in self.direct], packed)

    def direct_operands(
        self, inputs: Gradients, shards: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor]
    ) -> list[Operand]:
        """Return the operands of the reduce-scatter that need no packing; without a shard axis, all of them."""
        if self.reduces_in_place:
            return [Operand(each, each) for each in shards]
        return [
            Operand(pieces[piece], gradient, slices)
            for index, piece, slices in self._pieces.direct
            if (gradient := inputs[index]) is not None
        ]

    def packed_operands(self, pieces: Sequence[torch.Tensor], message: torch.Tensor) -> list[Operand]:
        """Return the operands that reduce-scatter the message into the first tensor of shards."""
        operands, start = [], 0
        for piece, slices in self._pieces.packed:
            sent = pieces[piece].numel() * self.mesh.world_size
            part = message if sent == self.packing.numel else message.narrow(0, start, sent)
            operands.append(Operand(pieces[piece], part, slices))
            start += sent
        return operands

    def all_reduce_operands(self, shards: Sequence[torch.Tensor]) -> list[Operand]:
        """Return the operands that all-reduce the tensors of shards over replicas."""
        first, *direct = shards
        if self.mesh.replica_transport.hooked:  # the first operand is for the hook: gradients only
            assert not direct, "communication hooks are for flattened parameters"
            parts = first[: self.presence_offset], first[self.presence_offset :]
            operands = [Operand(part, part) for part in parts]
        else:
            operands = [Operand(first, first, self.slices), *(Operand.of_parameter(each, each) for each in direct)]
        return [operand for operand in operands if operand.shard.numel()]

    # ---------------------------------------------------------------- sharded gradients

    def accumulate(self, shards: Sequence[torch.Tensor], present: Sequence[bool]) -> None:
        """Set (or add to) the sharded gradients, and run the hooks that users put on parameters."""
        if self.together:
            if any(present):
                accumulate_gradient(self.parameters[0].optimized, shards[0].narrow(0, 0, self.presence_offset))
            return
        starts = [tensor.storage_offset() for tensor in shards]
        for parameter, (index, view), is_there in zip(self.parameters, self.views, present, strict=True):
            if is_there:
                offset, shape, stride = view
                parameter.accumulate(shards[index].as_strided(shape, stride, starts[index] + offset))


def _conform(gradient: torch.Tensor, shape: ParameterShape, dtype: torch.dtype) -> torch.Tensor:
    """Return ``gradient`` with the parameter's dtype and strides: nearly always it has them already."""
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    if gradient.is_complex():
        gradient = gradient.resolve_conj()  # autograd conjugates lazily, which flat views do not see
    if gradient.dtype is dtype:
        if gradient.stride() == shape.stride:
            return gradient
        if gradient.is_contiguous() and shape.stride == contiguous_stride(shape.shape):
            return gradient
    conforming = torch.empty_strided(shape.shape, shape.stride, dtype=dtype, device=gradient.device)
    return conforming.copy_(gradient)
