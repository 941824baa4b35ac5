"""The least memory that a sharded training step needs, from the sizes of its units and the unsharded model's run.

Two figures. The *sum* is what memory can be planned by: state at rest, the most that units need on top, and the most
activations, whether or not these come at the same time. The *course* goes through the unsharded model's step moment by
moment and adds what sharding needs there: its highest point is what no schedule with one unit of overlap stays below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.memory_limit.reading import Moment, Reading


@dataclass(frozen=True)
class Widths:
    """Bytes per parameter.

    Args:
        master: Of the shards.
        gathered: Of full parameters.
        gradient: Of full gradients as autograd makes them.
        reduced: Of full gradients as they travel.
        resting: Of sharded gradients.
        optimizer: Of optimizer state.
    """

    master: int = 4
    gathered: int = 4
    gradient: int = 4
    reduced: int = 4
    resting: int = 4
    optimizer: int = 8


@dataclass(frozen=True)
class Bound:
    """Of one model on ``ranks`` ranks, with one unit of overlap: the next unit is gathered, and the last one reduced,
    while one computes. The root is gathered once for both directions and reduced at the end.

    Args:
        units: Parameters of each unit, in the order of forward.
        root: Parameters of the root's own.
        ranks: To shard over.
        widths: Of the mode.
    """

    units: Sequence[int]
    root: int
    ranks: int
    widths: Widths

    @property
    def parameters(self) -> int:
        return self.root + sum(self.units)

    @property
    def resident(self) -> float:
        """Shards, their gradients and optimizer state."""
        w = self.widths
        return (w.master + w.resting + w.optimizer) * self.parameters / self.ranks

    @property
    def transient(self) -> int:
        """The most that units need at a time: two gathered, one's gradients, one reduction in flight; and the root."""
        w, units = self.widths, self.units
        last = len(units) - 1
        forward = max(self.gathered_with(i, i + 1) for i in range(len(units)))
        backward = max(
            self.gathered_with(i, i - 1) + w.gradient * units[i] + (w.reduced * units[i + 1] if i < last else 0)
            for i in range(len(units))
        )
        return max(w.gathered * self.root + forward, (w.gathered + w.gradient) * self.root + backward)

    def gathered_with(self, index: int, ahead: int) -> int:
        """Full parameters of a unit and of the one ahead, if there is one."""
        other = self.units[ahead] if 0 <= ahead < len(self.units) else 0
        return self.widths.gathered * (self.units[index] + other)

    def sum(self, unsharded: Reading) -> float:
        return self.resident + self.transient + unsharded.activations

    def course(self, unsharded: Reading) -> float:
        """The highest point, of forward, backward and optimizer step."""
        temporaries = unsharded.peaks["optimizer"] - (unsharded.resting + self.widths.gradient * self.parameters)
        step = self.resident + max(0, temporaries) / self.ranks
        needs, next_unit = [step], self.units[0]
        for moment in unsharded.moments:
            if moment.unit:
                next_unit = self.units[-1]  # after forward, backward begins with the last unit
            needs.append(self.at(moment, next_unit))
        return max(needs)

    def at(self, moment: Moment, next_unit: int) -> float:
        """What a sharded run needs at this moment.

        Args:
            moment: Of the unsharded run.
            next_unit: Parameters of the unit that comes next, where the root computes.
        """
        w = self.widths
        done = [i for i in range(len(self.units)) if f"blocks.{i}" in moment.gradients and moment.unit != f"blocks.{i}"]
        needed = (w.master + w.optimizer) * self.parameters / self.ranks + w.gathered * self.root + moment.activations
        needed += moment.gradients.get("", 0)  # the root's are reduced at the end
        needed += w.resting * sum(self.units[i] for i in done) / self.ranks
        if done:
            needed += w.reduced * self.units[min(done)]  # in flight
        if moment.unit:
            index = int(moment.unit.removeprefix("blocks."))
            ahead = index + 1 if moment.phase == "forward" else index - 1
            return needed + self.gathered_with(index, ahead) + moment.gradients.get(moment.unit, 0)
        return needed if done else needed + w.gathered * next_unit
