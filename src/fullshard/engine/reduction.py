"""From full gradients to sharded gradients.

[Note: Gradients that are missing on some ranks]
Which collectives run must not depend on whether this rank's gradient is None. So all trainable parameters of a
bucket take part in every reduction, missing gradients as zeros, and every rank sends along one number per
parameter: 1 if it had a gradient, else 0. Their mean rides in the packed message. Only a rank that had none
itself looks at it: if nobody had one, ``.grad`` stays None as in an unsharded run, otherwise it is the mean.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from fullshard.engine.mesh import ShardMesh
from fullshard.engine.parameter import ShardedParameter, dtensor
from fullshard.layout import ParameterShape, PerParameterLayout, Route, Slot
from fullshard.layout.per_parameter import contiguous_stride
from fullshard.memory import Buffer, Lane, Ticket, Work
from fullshard.transport import Move

__all__ = ["GradientReducer", "PendingReduction", "assign_local_gradients"]

Gradients = list["torch.Tensor | None"]


class _PackCopy(NamedTuple):
    """One copy from a gradient (seen with ``shape`` and ``stride`` from ``offset``) into the message."""

    gradient: int  # index of the parameter
    target: torch.Tensor
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class GradientReducer:
    """Reduces the gradients of one set of parameters of a bucket. Planned once, used every step.

    Args:
        parameters: The trainable ones of the bucket, in model order.
        like: A tensor of the bucket's dtype and device.
        mesh: The ranks to reduce over (more than one).
    """

    parameters: list[ShardedParameter]
    mesh: ShardMesh
    layout: PerParameterLayout  # of the parameters, and behind them the presence numbers
    message: Buffer
    _like: torch.Tensor
    _copies: list[_PackCopy]
    _all_present: torch.Tensor

    def __init__(self, parameters: list[ShardedParameter], like: torch.Tensor, mesh: ShardMesh) -> None:
        self.parameters, self.mesh, self._like = parameters, mesh, like.new_empty(0)
        count = len(parameters)
        presence = ParameterShape("<presence>", (count,), (1,), replicated=True)
        self.layout = PerParameterLayout.build(
            [*(p.shape for p in parameters), presence],
            world_size=mesh.world_size,
            itemsize=like.dtype.itemsize,
            direct_bytes=mesh.direct_bytes,
        )
        self.message = Buffer(self.layout.message_numel * mesh.world_size, like.dtype, like.device)
        self._all_present = like.new_ones(count)
        self._copies = []
        for index, slot in enumerate(self.layout.slots):
            if slot.route is not Route.DIRECT and slot.piece_numel:
                self._plan_pack(index, slot)
        self.message.free()

    def start(self, gradients: Gradients, lane: Lane, unit: str) -> PendingReduction:
        """Start reducing ``gradients`` (full, one per parameter, None where autograd left none)."""
        like, layout = self._like, self.layout
        inputs: Gradients = [
            None if g is None else _conform(g, p.shape, like.dtype)
            for g, p in zip(gradients, self.parameters, strict=True)
        ]
        inputs.append(self._presence(gradients))
        output = like.new_empty(layout.shard_numel)
        moves = [
            Move(output.narrow(0, slot.shard_offset, slot.piece_numel), _region(gradient, slot, like))
            for gradient, slot in zip(inputs, layout.slots, strict=True)
            if slot.route is Route.DIRECT
        ]
        self.message.allocate()
        numel = layout.message_numel
        packed = self.message.tensor(0, (numel * self.mesh.world_size,), (1,))
        moves.append(Move(output.narrow(0, layout.message_offset, numel), packed))
        ticket = lane.issue(partial(self._launch, inputs, moves, unit), _nothing)
        return PendingReduction(self, ticket, inputs, moves, output)

    def _presence(self, gradients: Gradients) -> torch.Tensor:
        """See [Note: Gradients that are missing on some ranks]."""
        if all(gradient is not None for gradient in gradients):
            return self._all_present
        return self._like.new_tensor([gradient is not None for gradient in gradients])

    def local(self, output: torch.Tensor, index: int) -> torch.Tensor:
        """This rank's rows of parameter ``index`` in a reduced buffer."""
        slot = self.layout.slots[index]
        return output.as_strided(slot.local_shape(self.mesh.rank), slot.local_stride(), slot.shard_offset)

    def _launch(self, inputs: Gradients, moves: list[Move], unit: str) -> Sequence[Work]:
        targets, sources = [], []
        for copy in self._copies:
            gradient = inputs[copy.gradient]
            if gradient is None:
                copy.target.zero_()
            else:
                targets.append(copy.target)
                offset = gradient.storage_offset() + copy.offset
                sources.append(gradient.as_strided(copy.shape, copy.stride, offset))
        torch._foreach_copy_(targets, sources)
        transport = self.mesh.transport
        assert transport is not None
        return transport.reduce(moves, unit)

    def _plan_pack(self, index: int, slot: Slot) -> None:
        """Prepare the copies from one gradient to the message: at most two, or one per rank if rows interleave."""
        world_size, section = self.mesh.world_size, self.layout.message_numel
        start, piece, shape = slot.shard_offset - self.layout.message_offset, slot.piece_numel, slot.parameter

        def add(
            rank: int, target: tuple[int, ...], strides: tuple[int, ...], offset: int, source: tuple[int, ...]
        ) -> None:
            view = self.message.tensor(start + rank * section, target, strides)
            self._copies.append(_PackCopy(index, view, offset, target, source))

        if slot.route is Route.REPLICATED:
            add(0, (world_size, piece), (section, 1), 0, (0, 1))
        elif slot.row_major:
            whole, rest = divmod(shape.numel, piece)
            if whole:
                add(0, (whole, piece), (section, 1), 0, (piece, 1))
            if rest:
                add(whole, (rest,), (1,), whole * piece, (1,))
        else:
            for rank in range(world_size):
                rows = slot.local_shape(rank)
                if rows[0]:
                    add(rank, rows, slot.local_stride(), slot.local_rows(rank)[0] * shape.stride[0], shape.stride)


class PendingReduction:
    """A reduction in flight. Keeps its inputs alive until :meth:`finish`."""

    __slots__ = ("_inputs", "_moves", "_output", "_present", "_reducer", "_ticket")

    def __init__(
        self,
        reducer: GradientReducer,
        ticket: Ticket,
        inputs: Gradients,
        moves: list[Move],
        output: torch.Tensor,
    ) -> None:
        self._reducer, self._ticket, self._output = reducer, ticket, output
        # A side stream may still read the gradients and the message: they must not be freed before its event.
        self._inputs, self._moves = inputs, moves
        self._present = [gradient is not None for gradient in inputs[:-1]]

    def finish(self) -> None:
        """Wait, then set (or add to) the sharded gradients and run the hooks that users put on parameters."""
        reducer, output = self._reducer, self._output
        self._ticket.wait()
        self._let_go()
        present = self._present
        if not all(present):
            # See [Note: Gradients that are missing on some ranks].
            elsewhere = reducer.local(output, len(present)).tolist()
            present = [here or abs(somewhere) > 0 for here, somewhere in zip(present, elsewhere, strict=True)]
        for index, parameter in enumerate(reducer.parameters):
            if present[index]:
                _accumulate(parameter, reducer.local(output, index))

    def abandon(self) -> None:
        """Drop it after a failure; what is in flight must land first, for its memory is used again."""
        with contextlib.suppress(RuntimeError):
            self._ticket.wait()
        self._let_go()

    def _let_go(self) -> None:
        self._inputs.clear()
        self._moves.clear()
        self._reducer.message.free()


def assign_local_gradients(parameters: Sequence[ShardedParameter], gradients: Gradients) -> None:
    """The reduction on a single rank: the full gradient is the sharded one."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            _accumulate(parameter, _conform(gradient, parameter.shape, parameter.local.dtype))


def _accumulate(parameter: ShardedParameter, local: torch.Tensor) -> None:
    sharded = parameter.sharded
    gradient: torch.Tensor = dtensor(local, parameter.spec)
    for hook in list((sharded._backward_hooks or {}).values()):  # hooks may remove themselves
        replaced = hook(gradient)
        gradient = gradient if replaced is None else replaced
    if sharded.grad is None:
        sharded.grad = gradient
    else:
        sharded.grad._local_tensor.add_(gradient._local_tensor)  # type: ignore[attr-defined]
    for hook in list((getattr(sharded, "_post_accumulate_grad_hooks", None) or {}).values()):
        hook(sharded)


def _conform(gradient: torch.Tensor, shape: ParameterShape, dtype: torch.dtype) -> torch.Tensor:
    """``gradient`` with the parameter's dtype and strides; itself if it has them, as nearly always."""
    if gradient.requires_grad:  # create_graph=True
        gradient = gradient.detach()
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    if gradient.dtype is dtype and gradient.stride() == shape.stride:
        return gradient
    if gradient.dtype is dtype and gradient.is_contiguous() and shape.stride == contiguous_stride(shape.shape):
        return gradient
    conforming = torch.empty_strided(shape.shape, shape.stride, dtype=dtype, device=gradient.device)
    return conforming.copy_(gradient)


def _region(gradient: torch.Tensor | None, slot: Slot, like: torch.Tensor) -> torch.Tensor:
    """The gradient as a flat region of padded pieces: its own memory unless it is missing or uneven."""
    if gradient is not None and not slot.padded:
        return gradient.as_strided((slot.region_numel,), (1,))
    region = like.new_zeros(slot.region_numel)
    if gradient is not None:
        numel = math.prod(slot.parameter.shape)
        region.narrow(0, 0, numel).copy_(gradient.as_strided((numel,), (1,)))
    return region


def _nothing() -> None:
    pass
