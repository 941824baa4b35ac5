"""Bytes of tensors on the meta device: when they are allocated and freed, and what for.

[Note: Memory without memory]
A tensor on the meta device has a storage of a size, and no memory. Its storage lives as long as a real one would:
autograd saves it, the engine frees and refills it in place, Python deletes it. So allocations and frees of a real step
are seen by watching new storages, their sizes, and their ends.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch

from fullshard.memory import is_freed_in_place

__all__ = ["Change", "Ledger", "Peak"]

UNSHARDED = "unsharded parameters"


class Change(NamedTuple):
    """An allocation, or a free.

    Attributes:
        moment: A mark of the clock.
        nbytes: Negative if memory is freed.
        storage: Number of the storage, in the order in which they were made.
        kind: What it is for, such as ``"activations"``.
        where: Phase, and FQN of the unit.
        stream: Number of the current stream, from whose pool a caching allocator takes memory.
    """

    moment: Any
    nbytes: int
    storage: int
    kind: str
    where: tuple[str, str]
    stream: int = 0


@dataclass(frozen=True)
class Peak:
    """The moment with most memory.

    Attributes:
        nbytes: Allocated then.
        where: Phase, and FQN of the unit.
        parts: Bytes by what they are for, the largest first.
    """

    nbytes: int
    where: tuple[str, str]
    parts: Mapping[str, int]


@dataclass
class Ledger:
    """Changes of memory, in the order of the host, which is that of a caching allocator.

    Attributes:
        mark: Returns a mark of the present moment.
        kind_of: Returns what an allocation now is for, and where it is.
        stream: Returns the number of the current stream.
        changes: All of them.
    """

    mark: Callable[[], Any]
    kind_of: Callable[[], tuple[str, tuple[str, str]]]
    stream: Callable[[], int] = lambda: 0
    changes: list[Change] = field(default_factory=list)
    _known: dict[int, tuple[int, int, str]] = field(default_factory=dict)  # number, bytes and kind, by address
    _made: int = 0

    def knows(self, tensor: torch.Tensor) -> bool:
        """Return True if the storage of a tensor is noted."""
        return tensor.untyped_storage()._cdata in self._known

    def see(self, tensor: torch.Tensor) -> None:
        """Note the storage of a tensor, which is new."""
        storage = tensor.untyped_storage()
        kind, _ = self.kind_of()
        self._known[storage._cdata] = self._made, 0, kind
        self._made += 1
        weakref.finalize(storage, self._resized, storage._cdata, 0, ended=True)
        self._resized(storage._cdata, storage.nbytes())

    def _resized(self, address: int, nbytes: int, *, ended: bool = False, kind: str | None = None) -> None:
        number, before, own = self._known[address]
        _, where = self.kind_of()
        if nbytes != before:
            self.changes.append(Change(self.mark(), nbytes - before, number, kind or own, where, self.stream()))
        if ended:
            del self._known[address]
        else:
            self._known[address] = number, nbytes, kind or own

    @contextlib.contextmanager
    def resizes(self) -> Iterator[None]:
        """Note storages that are freed and refilled in place."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
            result = resize(storage, nbytes)
            if storage._cdata in self._known:
                kind = UNSHARDED if is_freed_in_place(storage) else None
                self._resized(storage._cdata, nbytes, kind=kind)
            return result

        with mock.patch.object(torch.UntypedStorage, "resize_", resized):
            yield

    def alive(self) -> list[tuple[int, int]]:
        """Return numbers and bytes of the storages that exist."""
        return [(number, nbytes) for number, nbytes, _ in self._known.values() if nbytes]

    def peak(self, first: int) -> Peak:
        """Return the moment with most memory among the changes from ``first`` on."""
        total = highest = sum(change.nbytes for change in self.changes[:first])
        at = first - 1
        for index, change in enumerate(self.changes[first:], first):
            total += change.nbytes
            if total > highest:
                highest, at = total, index
        ordered = dict(sorted(self.held(at + 1).items(), key=lambda each: -each[1]))
        return Peak(highest, self.changes[at].where, ordered)

    def held(self, count: int) -> dict[str, int]:
        """Return bytes by what they are for, after so many changes."""
        alive: dict[int, tuple[int, str]] = {}
        for change in self.changes[:count]:
            nbytes, kind = alive.get(change.storage, (0, ""))
            alive[change.storage] = nbytes + change.nbytes, change.kind if change.nbytes > 0 else kind
        parts: dict[str, int] = defaultdict(int)
        for nbytes, kind in alive.values():
            parts[kind] += nbytes
        return {kind: nbytes for kind, nbytes in parts.items() if nbytes}

    def leave_out(self, kind: str) -> int:
        """Count the storages of a kind that exist now as if they had no memory.

        Args:
            kind: What they are for.

        Returns:
            Their bytes.
        """
        gone = {number: nbytes for number, nbytes, own in self._known.values() if nbytes and own == kind}
        self.changes = [each._replace(nbytes=0) if each.storage in gone else each for each in self.changes]
        return sum(gone.values())
