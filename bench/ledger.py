"""Every allocation and every free of CPU tensors, exactly: what was alive at any moment, and who had asked for it.

Torch's CPU allocator reports to the profiler each block that it hands out and takes back: those of storages that are
resized, of kernels' temporaries, and of the threads of c10d's gloo as well. Blocks that others take from the C
allocator (gloo's and oneDNN's scratch memory, Python objects) are not seen; they are of no tensor.

A *range* is a name around a piece of code (:func:`range_of`), a *mark* a name at a moment (:func:`mark`). Every block
knows the ranges, and the operators, in which it was made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_PREFIX = "ledger:"
_LIBRARIES = ("fullshard::", "FSDP::")  # as these name what they do in profiles


@dataclass(frozen=True)
class Block:
    """One block of memory: moments in nanoseconds; ``end`` None: never freed."""

    address: int
    nbytes: int
    begin: int
    end: int | None
    ranges: tuple[str, ...]  # outermost first
    operators: tuple[str, ...]

    def alive(self, moment: int) -> bool:
        return self.begin <= moment and (self.end is None or moment < self.end)


@dataclass(frozen=True)
class Span:
    """When a range was open, or the moment of a mark (``begin`` alone counts)."""

    name: str
    begin: int
    end: int


@dataclass
class Ledger:
    """See the module docstring. Complete when the ``with`` block of :func:`recorded` has ended.

    ``operations`` are what fullshard or FSDP2 did, under its own names: "fullshard::all_gather (blocks.3)".
    """

    blocks: list[Block] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    operations: list[Span] = field(default_factory=list)

    def span(self, name: str) -> Span:
        """The only range of this name."""
        (found,) = [span for span in self.spans if span.name == name]
        return found

    def alive(self, moment: int) -> list[Block]:
        return [block for block in self.blocks if block.alive(moment)]

    def curve(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Moments from ``begin`` to ``end`` at which memory changes, with the live bytes right after each."""
        changes: list[tuple[int, int]] = []
        for block in self.blocks:
            changes.append((block.begin, block.nbytes))
            if block.end is not None:
                changes.append((block.end, -block.nbytes))
        live, points = 0, [(begin, 0)]
        for moment, change in sorted(changes):  # of the same moment: frees first
            live += change
            if moment <= begin:
                points[0] = (begin, live)
            elif moment <= end:
                points.append((moment, live))
        return points

    def peak(self, begin: int, end: int) -> tuple[int, int]:
        """The first moment of the highest point, and the live bytes there."""
        moment, live = max(self.curve(begin, end), key=lambda point: (point[1], -point[0]))
        return moment, live


def range_of(name: str) -> contextlib.AbstractContextManager[object]:
    """Blocks made inside know ``name``."""
    return record_function(_PREFIX + name)


def mark(name: str) -> None:
    with record_function(_PREFIX + name):
        pass


@contextlib.contextmanager
def recorded() -> Iterator[Ledger]:
    """Record into the ledger. Blocks that exist already are not in it, nor are their frees."""
    ledger = Ledger()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield ledger
    results = profiler.profiler.kineto_results
    _read(results.experimental_event_tree(), ledger)


def _read(roots: list[Any], ledger: Ledger) -> None:
    events: list[tuple[int, int, int, tuple[str, ...], tuple[str, ...]]] = []
    allocation = torch._C._profiler._EventType.Allocation
    todo: list[tuple[Any, tuple[str, ...], tuple[str, ...]]] = [(root, (), ()) for root in roots]
    while todo:
        event, ranges, operators = todo.pop()
        kind, fields = event.typed
        if kind == allocation:
            if fields.device.type == "cpu":
                events.append((event.start_time_ns, fields.alloc_size, fields.ptr, ranges, operators))
            continue
        name = event.name
        if name.startswith(_PREFIX):
            name = name.removeprefix(_PREFIX)
            ledger.spans.append(Span(name, event.start_time_ns, event.end_time_ns))
            ranges = (*ranges, name)
        else:
            operators = (*operators, name)
            if name.startswith(_LIBRARIES):
                ledger.operations.append(Span(name, event.start_time_ns, event.end_time_ns))
        todo += [(child, ranges, operators) for child in event.children]
    for spans in (ledger.spans, ledger.operations):
        spans.sort(key=lambda span: span.begin)
    ledger.blocks = _paired(sorted(events, key=lambda event: event[0]))


def _paired(events: list[tuple[int, int, int, tuple[str, ...], tuple[str, ...]]]) -> list[Block]:
    """Blocks out of allocations (positive sizes) and frees (negative ones), in the order of time."""
    open_blocks: dict[int, tuple[int, int, tuple[str, ...], tuple[str, ...]]] = {}
    blocks = []
    for moment, size, address, ranges, operators in events:
        if size > 0:
            open_blocks[address] = (moment, size, ranges, operators)
        elif address in open_blocks:
            begin, nbytes, made_in, made_by = open_blocks.pop(address)
            blocks.append(Block(address, nbytes, begin, moment, made_in, made_by))
    blocks += [Block(address, n, begin, None, r, o) for address, (begin, n, r, o) in open_blocks.items()]
    return sorted(blocks, key=lambda block: block.begin)
