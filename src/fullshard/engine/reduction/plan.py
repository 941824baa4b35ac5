"""How the gradients of some parameters are reduced: computed once, never changed, used every step.

[Note: Gradients that are missing on some ranks]
Which collectives run must not depend on whether this rank's gradient is None. So all trainable parameters of a
bucket take part in every reduction, missing gradients as zeros, and every rank sends along one *presence number* per
parameter: 1 if it had a gradient, else 0. Their mean rides in the packed message. Only a rank that had none
itself looks at it: if nobody had one, ``.grad`` stays None as in an unsharded run, otherwise it is the mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from fullshard.comm import Operand, Slice
from fullshard.comm.mesh import ShardMesh
from fullshard.engine.buckets.storage import Storage
from fullshard.engine.parameters.placement import dtensor
from fullshard.engine.parameters.sharded import ShardedParameter
from fullshard.layout import ParameterShape, Slot
from fullshard.layout.per_parameter import contiguous_stride
from fullshard.memory import Buffer, empty

__all__ = ["Gradients", "ReductionPlan", "ShardView"]

Gradients = list["torch.Tensor | None"]

# Nearly always it is one or two: all gradients, or all but frozen and unused ones.
MAX_PRESENCES_KEPT = 8


class ShardView(NamedTuple):
    """Where this rank's shard of one gradient lies: in which of the tensors of shards, and where in it."""

    tensor: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def on(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The shard, on these tensors of shards."""
        return tensors[self.tensor].as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True, eq=False, kw_only=True)
class ReductionPlan:
    """How the gradients of one set of parameters of a bucket are reduced.

    The result is some flat *tensors of shards*: one with this rank's shards of all gradients. Without a shard axis
    gradients are reduced in place: then it is one with all packed gradients, and each direct gradient itself.

    Args:
        parameters: Of the bucket, in model order.
        mesh: The ranks to reduce over.
        storage: Of the bucket.
        views: The shards of the parameters' gradients on the tensors of shards.
        presence: The presence numbers, which come last in the first tensor of shards; None: there are no other ranks.
        shards_numel: Elements of the first tensor of shards.
        slices: Where gradients lie in it, for a transport that quantizes.
        direct: The parameters whose gradients are operands of their own, by index.
        message: The packed gradients of all ranks. It has memory only while a reduction is in flight, so that a plan
            is used by one at a time.
        message_tensor: All of it.
    """

    parameters: tuple[ShardedParameter, ...]
    mesh: ShardMesh
    storage: Storage
    views: tuple[ShardView, ...]
    presence: ShardView | None
    shards_numel: int
    slices: tuple[Slice, ...]
    direct: Mapping[int, Slot]
    message: Buffer
    message_tensor: torch.Tensor
    _presence_numbers: dict[tuple[bool, ...], torch.Tensor] = field(default_factory=dict, repr=False)  # sent of late

    # ---------------------------------------------------------------- what kinds of plans differ in

    def pack(self, inputs: Gradients, target: torch.Tensor) -> None:
        """Copy what is not direct into ``target``: the message, or without a shard axis the first tensor of shards."""
        raise NotImplementedError

    def packed_operands(self, shards: torch.Tensor, message: torch.Tensor) -> list[Operand]:
        """The operands that reduce-scatter the message into the first tensor of shards."""
        raise NotImplementedError

    @property
    def zeroes_message(self) -> bool:
        """True if what :meth:`pack` does not write in the message has to be zero."""
        return False

    def all_reduce_operands(self, shards: Sequence[torch.Tensor]) -> list[Operand]:
        """The operands that all-reduce the tensors of shards over replicas."""
        first, *direct = shards
        operands = [Operand(first, first, self.slices), *(Operand.of_parameter(each, each) for each in direct)]
        return [operand for operand in operands if operand.shard.numel()]

    def accumulate(self, shards: Sequence[torch.Tensor], present: Sequence[bool]) -> None:
        """Set (or add to) the sharded gradients, and run the hooks that users put on parameters."""
        for index, parameter in enumerate(self.parameters):
            if present[index]:
                parameter.accumulate(self.views[index].on(shards))

    def arriving(
        self, shards: Sequence[torch.Tensor], present: Sequence[bool]
    ) -> list[tuple[ShardedParameter, torch.Tensor]] | None:
        """The gradients that :meth:`accumulate` will set where there are none; None if that is not its way."""
        named = zip(self.parameters, self.views, present, strict=True)
        return [(p, dtensor(view.on(shards), p.spec)) for p, view, is_there in named if is_there]

    # ---------------------------------------------------------------- where, over which axes, in which dtypes

    @property
    def reduces_in_place(self) -> bool:
        """True without a shard axis: gradients are reduced in the memory that they, or their packed copies, lie in."""
        return self.mesh.world_size == 1

    @property
    def all_reduces(self) -> bool:
        """True if there are replicas to all-reduce over."""
        return self.mesh.replicas > 1

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which gradients are sent and summed."""
        return self.storage.reduce_dtype

    @property
    def sharded_dtype(self) -> torch.dtype:
        """The dtype of sharded gradients."""
        return self.dtype if self.storage.keep_reduced else self.parameters[0].local.dtype

    @property
    def ends_on_host(self) -> bool:
        """True if sharded gradients are in CPU memory, away from where they were computed."""
        device = self.mesh.device
        offloads = self.storage.offload_gradients and device.type != "cpu"
        return offloads or self.parameters[0].local.device != device

    @property
    def presence_offset(self) -> int:
        """Where in the first tensor of shards the presence numbers begin."""
        return self.shards_numel if self.presence is None else self.presence.offset

    # ---------------------------------------------------------------- gradients as they are sent

    def new_shards(self, inputs: Gradients, *, zeros: bool) -> list[torch.Tensor]:
        """The tensors of shards, contents undefined unless ``zeros``."""
        first = self._new_empty(self.shards_numel)
        if zeros:
            first.zero_()
        direct = [inputs[index] for index in self.direct] if self.reduces_in_place else []
        return [first, *(each for each in direct if each is not None)]

    def direct_operands(self, inputs: Gradients, shards: Sequence[torch.Tensor]) -> list[Operand]:
        """The operands of the reduce-scatter that need no packing; without a shard axis, all of them."""
        if self.reduces_in_place:
            return [Operand(each, each) for each in shards]
        slots = ((inputs[index], slot) for index, slot in self.direct.items())
        return [
            Operand.of_parameter(shards[0].narrow(0, slot.shard_offset, slot.shard_numel), gradient)
            for gradient, slot in slots
            if gradient is not None
        ]

    def inputs(self, gradients: Gradients, *, writable: bool) -> Gradients:
        """Gradients (unsharded, one per parameter, None where there are none) as they are sent, and presence numbers.

        Direct ones become flat, padded to equal shards. ``gradients`` is emptied, so that each is freed as soon as it
        is cast.

        Args:
            gradients: Only read, see [Note: Who owns a gradient].
            writable: Direct ones will be written to, and so have to lie in memory of their own.
        """
        presence = [] if self.presence is None else [self._presence(gradients)]
        inputs: Gradients = []
        for index, parameter in enumerate(self.parameters):
            gradient, gradients[index] = gradients[index], None
            slot = self.direct.get(index)
            if slot is not None and (gradient is None or slot.padded or writable):
                gradient = self._own_copy(gradient, parameter.shape, slot)
            elif gradient is not None:
                dtype = gradient.dtype if slot is None else self.dtype  # packing casts
                gradient = _conform(gradient, parameter.shape, dtype)
                if slot is not None:
                    gradient = gradient.as_strided((slot.unsharded_numel,), (1,))
            inputs.append(gradient)
        return [*inputs, *presence]

    def _own_copy(self, gradient: torch.Tensor | None, shape: ParameterShape, slot: Slot) -> torch.Tensor:
        copy = self._new_empty(slot.unsharded_numel)
        if gradient is None or slot.padded:
            copy.zero_()
        if gradient is not None:
            copy.as_strided(shape.shape, shape.stride).copy_(_dense(gradient))
        return copy

    def _presence(self, gradients: Gradients) -> torch.Tensor:
        """The presence numbers: kept, because making some copies them to the device."""
        present, kept = tuple(gradient is not None for gradient in gradients), self._presence_numbers
        if present not in kept:
            if len(kept) >= MAX_PRESENCES_KEPT:
                kept.clear()
            kept[present] = torch.tensor(present, dtype=self.dtype, device=self.mesh.device)
        return kept[present]

    def _new_empty(self, numel: int) -> torch.Tensor:
        """A flat tensor where gradients are computed."""
        return empty(numel, self.dtype, self.mesh.device)


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def _conform(gradient: torch.Tensor, shape: ParameterShape, dtype: torch.dtype) -> torch.Tensor:
    """``gradient`` with the parameter's dtype and strides; itself if it has them, as nearly always."""
    gradient = _dense(gradient)
    if gradient.is_complex():
        gradient = gradient.resolve_conj()  # autograd conjugates lazily, which flat views do not see
    if gradient.dtype is dtype and gradient.stride() == shape.stride:
        return gradient
    if gradient.dtype is dtype and gradient.is_contiguous() and shape.stride == contiguous_stride(shape.shape):
        return gradient
    conforming = torch.empty_strided(shape.shape, shape.stride, dtype=dtype, device=gradient.device)
    return conforming.copy_(gradient)
