"""What a ledger of one step says: the peak, what was alive at it, and what the model needs beside its state."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.memory_limit.ledger import Block, Ledger, Span

STATE = "parameters and optimizer state (sharded)"
MEASURED = "measured step"
# Of a step, and what memory is that is made in them outside of a range of the library's own.
PHASES = {
    "forward": "activations",
    "backward": "gradients, workspace",
    "optimizer": "temporaries of the optimizer",
}
# Made in no phase, by a thread that has no ranges, as gloo's.
ELSEWHERE = "of other threads"
# Marks: where units of the unsharded model begin and end, and gradients of parameters.
BOUNDARY, GRADIENT = "boundary", "gradient"
# As fullshard and FSDP2 name what they do in profiles, for example "fullshard::all_gather (blocks.3)".
OPERATION = re.compile(r"(?:fullshard|FSDP)::(\w+)(?: \((.*)\))?")


@dataclass(frozen=True)
class Moment:
    """The unsharded model at a moment: which unit computes, and what is there beside parameters and optimizer state.

    ``unit`` is "" outside the blocks. Bytes; ``gradients`` of parameters, by unit.
    """

    phase: str
    unit: str
    activations: int
    gradients: Mapping[str, int]


@dataclass(frozen=True)
class Reading:
    """Bytes of one step.

    Args:
        loss: Of the step.
        resting: Live at the beginning of the step.
        peaks: Of each phase.
        at_peak: What was alive at the highest of them: ``what|units`` to bytes.
        peak_phase: In which phase that was.
        moments: Of the unsharded model: those that matter for a bound.
    """

    loss: float
    resting: int
    peaks: dict[str, int]
    at_peak: dict[str, int]
    peak_phase: str
    moments: list[Moment] = field(default_factory=list)

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Reading:
        return cls(**{**given, "moments": [Moment(**moment) for moment in given["moments"]]})

    @property
    def peak(self) -> int:
        return max(self.peaks.values())

    @property
    def activations(self) -> int:
        """Of the unsharded model: the most that there is beside parameters, their gradients and optimizer state."""
        return max(moment.activations for moment in self.moments)


def read(ledger: Ledger, loss: float) -> Reading:
    """See :class:`Reading`."""
    step = ledger.span(MEASURED)
    phases = {span.name: span for span in ledger.spans if step.begin <= span.begin < step.end and span.name in PHASES}
    peaks = {name: ledger.peak(span.begin, span.end) for name, span in phases.items()}
    highest = max(peaks, key=lambda name: peaks[name][1])
    owners = gradient_owners(ledger, step)
    alive: dict[str, int] = {}
    for block in ledger.alive(peaks[highest][0]):
        name = name_of(block, step)
        alive[name] = alive.get(name, 0) + block.nbytes
    return Reading(
        loss,
        ledger.peak(step.begin, step.begin)[1],
        {name: live for name, (_, live) in peaks.items()},
        dict(sorted(alive.items(), key=lambda item: -item[1])),
        highest,
        _moments(ledger, step, phases, owners),
    )


def gradient_owners(ledger: Ledger, step: Span) -> dict[int, str]:
    """By the identity of blocks: the unit whose parameters they are gradients of."""
    owners = {}
    for span in ledger.spans:
        if span.name.startswith(f"{GRADIENT}|") and step.begin <= span.begin < step.end:
            _, unit, address = span.name.split("|")
            block = ledger.block_at(int(address), span.begin)
            if block is not None and block.begin >= step.begin:
                owners[id(block)] = unit
    return owners


def name_of(block: Block, step: Span) -> str:
    """``what|units`` of a block that is alive in ``step``: the operation of the library in which it was made."""
    if block.begin < step.begin:
        return f"{STATE}|"
    for found in map(OPERATION.match, reversed(block.operators)):
        if found is not None:
            return f"{found[1]}|{found[2] or ''}"
    return f"{next((PHASES[name] for name in reversed(block.ranges) if name in PHASES), ELSEWHERE)}|"


def _moments(ledger: Ledger, step: Span, phases: Mapping[str, Span], owners: Mapping[int, str]) -> list[Moment]:
    """Between two neighboring marks, that of the most activations; none if the model set no marks.

    Within such an interval the same units are there; only gradients come in, which :class:`Moment` has at the same
    moment as the activations.
    """
    boundaries = [s for s in ledger.spans if s.name.startswith(f"{BOUNDARY}|") and step.begin <= s.begin < step.end]
    if not boundaries:
        return []
    starts = [(phases[name].begin, name, "") for name in ("forward", "backward")]
    for span in boundaries:
        _, phase, unit = span.name.split("|")
        starts.append((span.begin, phase, unit))
    starts.sort()
    ends = [begin for begin, *_ in starts[1:]] + [phases["backward"].end]
    fresh = [block for block in ledger.blocks if block.begin >= step.begin]
    return [
        _highest(fresh, owners, (begin, end), phase, unit)
        for (begin, phase, unit), end in zip(starts, ends, strict=True)
    ]


def _highest(
    blocks: Sequence[Block], owners: Mapping[int, str], interval: tuple[int, int], phase: str, unit: str
) -> Moment:
    """The moment of the most bytes in an interval."""
    begin, end = interval
    inside = [b for b in blocks if b.begin <= end and (b.end is None or b.end > begin)]

    def at(moment: int) -> Moment:
        activations, gradients = 0, dict.fromkeys((owners[id(b)] for b in inside if id(b) in owners), 0)
        for block in inside:
            if not block.alive(moment):
                continue
            if id(block) in owners:
                gradients[owners[id(block)]] += block.nbytes
            else:
                activations += block.nbytes
        return Moment(phase, unit, activations, {name: nbytes for name, nbytes in gradients.items() if nbytes})

    moments = [at(moment) for moment in (begin, *(b.begin for b in inside if begin < b.begin < end))]
    return max(moments, key=lambda moment: moment.activations + sum(moment.gradients.values()))
