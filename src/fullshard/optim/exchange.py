"""The two all-to-alls of a round: parts of matrices to their owners, parts of the updates back.

[Note: Owners compute]
Every rank sends its part of each matrix to the rank that owns it, which computes the update and sends each rank its
part of that: 2 b P (N-1)/N^2 bytes per rank for P elements on N ranks, instead of b P (N-1)/N for gathering all
matrices on all ranks, which then compute the same N times.

The message from one rank to another: its parts of the other's matrices of the round, one after another, then one
element per matrix that is not 0 if the sender has a gradient of it. The message back has the same sizes, and the
owner's word on whether anybody had one. So a rank without a gradient takes part as everybody else, with zeros, and
learns what came of it; which messages are sent depends on the parameters alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fullshard.memory import Work
from fullshard.optim.assignment import Traffic
from fullshard.optim.cut_matrix import CutMatrix, Sharers

__all__ = ["Round"]


@dataclass(frozen=True)
class _Place:
    """Of one matrix' part in a message: elements."""

    start: int
    shape: tuple[int, ...]
    flag: int

    def on(self, message: torch.Tensor) -> torch.Tensor:
        """The part."""
        numel = self.shape[0] if len(self.shape) == 1 else self.shape[0] * self.shape[1]
        return message.narrow(0, self.start, numel).view(self.shape)


class Round:
    """What one round moves, worked out once. See [Note: Owners compute].

    Args:
        matrices: Of the round, all cut over the same ranks.
        owners: Of each matrix: a rank of the group.
        sharers: That they are cut over.
        dtype: In which they travel.
    """

    matrices: list[CutMatrix]
    owners: list[int]
    mine: list[int]  # indices of the matrices that this rank owns
    dtype: torch.dtype
    sharers: Sharers
    rank: int
    _parts: dict[int, _Place]  # of each matrix: where this rank's part is in the messages to and from the owners
    _wholes: dict[int, list[_Place]]  # of those owned here: where every rank's part is in the messages from all
    _sizes_as_part: list[int]  # elements of the message to (and from) each owner
    _sizes_as_owner: list[int]
    _flags_as_part: torch.Tensor  # positions
    _flags_as_owner: torch.Tensor

    def __init__(
        self, matrices: Sequence[CutMatrix], owners: Sequence[int], sharers: Sharers, dtype: torch.dtype
    ) -> None:
        self.matrices, self.owners, self.sharers, self.dtype = list(matrices), list(owners), sharers, dtype
        rank = self.rank = sharers.group.rank()
        size = len(sharers.ranks)
        self.mine = [index for index, owner in enumerate(owners) if owner == rank]
        owned = [[index for index, owner in enumerate(owners) if owner == other] for other in range(size)]
        self._parts, self._sizes_as_part = {}, []
        start = 0
        for indices in owned:
            places, end = self._message(indices, rank, start)
            self._parts.update(places)
            self._sizes_as_part.append(end - start)
            start = end
        self._wholes, self._sizes_as_owner = {index: [] for index in self.mine}, []
        start = 0
        for other in range(size):
            places, end = self._message(self.mine, other, start)
            for index in self.mine:
                self._wholes[index].append(places[index])
            self._sizes_as_owner.append(end - start)
            start = end
        flags = [place.flag for place in self._parts.values()]
        self._flags_as_part = torch.tensor(flags, dtype=torch.int64, device=sharers.device)
        flags = [place.flag for places_ in self._wholes.values() for place in places_]
        self._flags_as_owner = torch.tensor(flags, dtype=torch.int64, device=sharers.device)

    def _message(self, indices: Sequence[int], part: int, start: int) -> tuple[dict[int, _Place], int]:
        """Where parts of rank ``part`` lie in a message about ``indices`` that starts at ``start``, and its end."""
        numels = [self.matrices[index].part_numel(part) for index in indices]
        starts = list(itertools.accumulate(numels, initial=start))
        flags = starts[-1]
        places = {
            index: _Place(starts[i], self.matrices[index].part_shape(part), flags + i)
            for i, index in enumerate(indices)
        }
        return places, flags + len(indices)

    def traffic(self, rank: int) -> Traffic:
        """Of any rank of the group, flags included."""
        out = back = 0
        for matrix, owner in zip(self.matrices, self.owners, strict=True):
            if owner == rank:
                back += matrix.numel - matrix.part_numel(rank) + len(matrix.parts) - 1
            else:
                out += matrix.part_numel(rank) + 1
        return Traffic(out * self.dtype.itemsize, back * self.dtype.itemsize)

    def send(self, parts: Sequence[torch.Tensor], missing: Sequence[int]) -> Message:
        """Start sending this rank's parts to the owners.

        Args:
            parts: One per matrix, of the shapes of this rank's parts, of any dtype and device.
            missing: Indices of matrices that this rank has no gradient of.
        """
        message = self._new(self._sizes_as_part)
        targets = [self._parts[index].on(message) for index in range(len(parts))]
        _copy(targets, parts)
        message.index_fill_(0, self._flags_as_part, 1.0)
        for index in missing:
            message[self._parts[index].flag] = 0.0
        return self._exchange(message, self._sizes_as_part, self._sizes_as_owner)

    def wholes(self, arrived: torch.Tensor, missing: Sequence[int]) -> dict[int, torch.Tensor]:
        """The matrices that this rank owns, put together; without those that nobody has a gradient of.

        Args:
            arrived: What the other ranks sent.
            missing: See :meth:`send`. Only for these the flags are looked at, which waits for the device.
        """
        found: dict[int, torch.Tensor] = {}
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for index, places in self._wholes.items():
            if index in missing and not any(arrived[place.flag].item() for place in places):
                continue
            matrix = self.matrices[index]
            whole = found[index] = matrix.new_whole(self.dtype, arrived.device)
            for other, place in enumerate(places):
                targets.append(matrix.part(whole, other))
                sources.append(place.on(arrived))
        _copy(targets, sources)
        return found

    def send_back(self, updates: dict[int, torch.Tensor]) -> Message:
        """Start sending updates, of matrices that this rank owns, to those who have parts of them.

        Args:
            updates: By index; of those left out there are none.
        """
        message = self._new(self._sizes_as_owner)
        message.index_fill_(0, self._flags_as_owner, 1.0)
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for index, places in self._wholes.items():
            if index not in updates:
                for place in places:
                    message[place.flag] = 0.0
                continue
            matrix = self.matrices[index]
            whole = matrix.in_memory_order(updates[index])
            for other, place in enumerate(places):
                targets.append(place.on(message))
                sources.append(matrix.part(whole, other))
        _copy(targets, sources)
        return self._exchange(message, self._sizes_as_owner, self._sizes_as_part)

    def part_of(self, arrived: torch.Tensor, index: int) -> torch.Tensor:
        """This rank's part of the update of a matrix, in what the owners sent back."""
        return self._parts[index].on(arrived)

    def anybody_had(self, arrived: torch.Tensor, index: int) -> bool:
        """What the owner says on whether there is an update. Waits for the device."""
        return bool(arrived[self._parts[index].flag].item())

    def _new(self, sizes: Sequence[int]) -> torch.Tensor:
        return torch.empty(sum(sizes), dtype=self.dtype, device=self.sharers.device)

    def _exchange(self, message: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> Message:
        arrived = self._new(received)
        item = self.dtype.itemsize
        work = dist.all_to_all_single(
            arrived.view(torch.uint8),  # bytes: back ends do not know all dtypes
            message.view(torch.uint8),
            [size * item for size in received],
            [size * item for size in sent],
            group=self.sharers.group,
            async_op=True,
        )
        return Message(work, message, arrived)


class Message:
    """An all-to-all in flight.

    Args:
        work: To wait for.
        sent: Kept until then.
        arrived: Valid from then on.
    """

    _work: Work
    _sent: torch.Tensor | None
    _arrived: torch.Tensor | None

    def __init__(self, work: Work, sent: torch.Tensor, arrived: torch.Tensor) -> None:
        self._work, self._sent, self._arrived = work, sent, arrived

    def wait(self) -> torch.Tensor:
        """What the other ranks have sent, once it is here. Once: nothing is kept."""
        self._work.wait()
        arrived, self._sent, self._arrived = self._arrived, None, None
        assert arrived is not None, "a message was waited for twice"
        return arrived


def _copy(targets: list[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, list(sources))
