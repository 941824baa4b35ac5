"""Look for the choices with which a step is fastest and fits into memory, and say what each choice changes.

[Note: The search]
One choice is changed at a time, and the best value of it is kept; twice for all choices. A step that does not fit is
worse than any that does, and of those the one that lacks least is best. Of a deep model only a few blocks are run,
with two numbers of blocks, and a line is drawn through both, for what a block adds is the same for all of them. What is
recommended is run in full. If that does not fit, estimates are corrected by it, and the search begins anew.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fullshard.errors import FullshardError
from fullshard.planning.choices import Choices
from fullshard.planning.cluster import Cluster
from fullshard.planning.dry_run import Step
from fullshard.wrap.blocks import repeated_blocks
from fullshard.wrap.tree import ModuleTree

__all__ = ["Alternative", "search"]

GIB = 2**30
SHORT = (4, 6)  # blocks of the two shorter models
LEAST_GAIN = 0.02  # of a step: a smaller one is not worth a change, and less than plans are off by
SAME = 0.05  # of a step: estimates that are further off are of blocks that differ
SWEEPS = 2
TRIES = 3  # searches, until what is recommended fits in a full run, too

_Run = Callable[[nn.Module, Choices], Step]
_Axes = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Alternative:
    """Choices that a search looked at, one of which differs from the recommended ones.

    Attributes:
        name: What differs, in words.
        choices: All of them.
        seconds: Of a step, estimated; 0 if it cannot be run.
        reserved: Bytes that the caching allocator has reserved, estimated; allocated ones on a CPU.
        change: Seconds over those of the recommended choices, less 1.
        extra: Bytes beyond those of the recommended choices.
        verdict: What speaks against it, or for it.
    """

    name: str
    choices: Choices
    seconds: float
    reserved: float
    change: float
    extra: float
    verdict: str


@dataclass(frozen=True)
class _Estimate:
    """A step with some choices, or why there is none."""

    seconds: float = float("inf")
    reserved: float = float("inf")
    usable: float = 0.0
    error: str = ""

    @property
    def lacking(self) -> float:
        """Bytes beyond what may be used."""
        return max(0.0, self.reserved - self.usable)

    def better_than(self, other: _Estimate) -> bool:
        if self.lacking or other.lacking:
            return self.lacking < other.lacking
        return self.seconds < (1 - LEAST_GAIN) * other.seconds


class _Estimates:
    """Estimates by choices, each made once."""

    def __init__(self, model: nn.Module, run: _Run, cluster: Cluster) -> None:
        self._model, self._run, self._cluster = model, run, cluster
        self._found: dict[Choices, _Estimate] = {}
        self._more = 1.0  # bytes of a full run over those of its estimate
        lists = repeated_blocks(ModuleTree(model))
        self._blocks = len(lists[0].blocks) if len(lists) == 1 and _alike(lists[0].blocks) else 0
        self._shorter = [_shortened(model, count) for count in SHORT] if self._blocks > 2 * SHORT[1] else []

    def of(self, choices: Choices) -> _Estimate:
        """Return the estimate of a step with these choices."""
        if choices not in self._found:
            try:
                self._found[choices] = self._made(choices)
            except (FullshardError, ValueError, TypeError, RuntimeError) as error:
                self._found[choices] = _Estimate(error=str(error))
        found = self._found[choices]
        return dataclasses.replace(found, reserved=self._more * found.reserved)

    def learn(self, choices: Choices, full: Step) -> bool:
        """Correct all estimates of memory by a full run. False if its time shows that blocks differ: then all are run.

        Args:
            choices: Those of the run.
            full: The run.
        """
        found = self.of(choices)
        if self._shorter and not found.error and abs(found.seconds / full.seconds - 1) > SAME:
            self._shorter, self._found = [], {}
            return False
        self._more *= max(1.0, full.reserved / found.reserved) if not found.error else 1.0
        return True

    def _made(self, choices: Choices) -> _Estimate:
        if self._shorter:
            try:
                few, more = (self._run(model, choices) for model in self._shorter)
            except Exception:  # a forward that asks for all of its blocks, such as by their numbers
                self._shorter, self._found = [], {}
            else:
                return self._continued(few, more)
        step = self._run(self._model, choices)
        return _Estimate(step.seconds, step.reserved, self._cluster.usable)

    def _continued(self, few: Step, more: Step) -> _Estimate:
        """Draw the line. Of memory, one for each phase, since another one may have the peak in the whole model.

        What the caching allocator reserves beyond that does not grow with the blocks: it is where sizes change.
        """
        distance = (self._blocks - SHORT[0]) / (SHORT[1] - SHORT[0])
        peaks, before = more.peaks(), few.peaks()
        most = max(before.get(phase, 0) + distance * (peak - before.get(phase, 0)) for phase, peak in peaks.items())
        beyond = more.reserved - more.peak.nbytes
        return _Estimate(few.seconds + distance * (more.seconds - few.seconds), most + beyond, self._cluster.usable)


def search(
    model: nn.Module, base: Choices, fixed: Mapping[str, Any], run: _Run, cluster: Cluster, ranks: int, rows: int
) -> tuple[Choices, Step, Sequence[Alternative]]:
    """Find the fastest choices that fit.

    Args:
        model: Unsharded.
        base: Where to begin.
        fixed: Names of choices that stay as they are.
        run: Runs a step of a model, which may have fewer blocks, with some choices.
        cluster: The machine.
        ranks: Of the job.
        rows: Of a rank's batch.

    Returns:
        The choices, a full run with them, and what each single change of them would give.
    """
    estimates = _Estimates(model, run, cluster)
    axes = {name: values for name, values in _axes(model, cluster, ranks, rows).items() if name not in fixed}
    for _ in range(TRIES):
        best = _fastest(base, axes, estimates)
        step = run(model, best)
        if estimates.learn(best, step) and not estimates.of(best).lacking:
            break
    if cluster.device != "cpu" and "mixed_precision" not in fixed:
        axes["mixed_precision"] = ("bf16", None)  # shown only: it changes results
    ours = estimates.of(best)
    shown = [_alternative(other, best, estimates.of(other), ours, ranks) for other in _changes(best, axes)]
    return best, step, sorted(shown, key=lambda each: (not each.seconds, each.change))


def _fastest(base: Choices, axes: _Axes, estimates: _Estimates) -> Choices:
    best = base
    for _ in range(SWEEPS):
        for name in axes:
            for other in _changes(best, {name: axes[name]}):
                if estimates.of(other).better_than(estimates.of(best)):
                    best = other
    return best


def _axes(model: nn.Module, cluster: Cluster, ranks: int, rows: int) -> dict[str, Sequence[Any]]:
    """Return the values of each choice that are looked at."""
    nodes = max(1, ranks // cluster.node)
    replicas = [each for each in (1, 2, nodes // 4, nodes) if each >= 1 and ranks % each == 0]
    axes: dict[str, Sequence[Any]] = {
        "checkpoint_activations": (False, 0.5, True),
        "replicas": sorted({each for each in replicas if each < ranks}) or [1],
        "reshard_after_forward": (None, False),
        "microbatches": [each for each in (1, 2, 4) if rows % each == 0],
        "blocks_per_unit": (1, 2),
        "prefetch_bytes": (None, 2**30),
    }
    if cluster.device != "cpu":
        axes["offload_optimizer"] = (False, True)
    if not repeated_blocks(ModuleTree(model)):
        del axes["checkpoint_activations"], axes["blocks_per_unit"]
    return axes


def _changes(choices: Choices, axes: _Axes) -> Iterator[Choices]:
    """Yield all choices of which one differs."""
    for name, values in axes.items():
        for value in values:
            if value != getattr(choices, name):
                yield dataclasses.replace(choices, **{name: value})


def _alternative(other: Choices, best: Choices, found: _Estimate, ours: _Estimate, ranks: int) -> Alternative:
    before, after = dict(best.names(ranks)), dict(other.names(ranks))
    name = next(words for which, words in after.items() if words != before[which])
    if found.error:
        return Alternative(name, other, 0.0, 0.0, 0.0, 0.0, f"cannot be run: {found.error}")
    change, extra = found.seconds / ours.seconds - 1, found.reserved - ours.reserved
    return Alternative(name, other, found.seconds, found.reserved, change, extra, _verdict(other, best, found, ours))


def _verdict(other: Choices, best: Choices, found: _Estimate, ours: _Estimate) -> str:
    if other.mixed_precision != best.mixed_precision:
        return "not looked at: it changes results"
    if found.lacking:
        return f"does not fit: {found.reserved / GIB:.1f} GiB, usable {found.usable / GIB:.1f}"
    if found.seconds > (1 + LEAST_GAIN) * ours.seconds:
        return "rejected: slower" if found.reserved >= ours.reserved else "slower, but with less memory"
    return "no gain in time" if found.reserved >= ours.reserved else "less memory, no gain in time"


def _alike(blocks: Sequence[nn.Module]) -> bool:
    """Return True if all blocks have modules of the same classes and parameters of the same shapes."""
    kinds = {
        (
            tuple((name, type(module)) for name, module in block.named_modules()),
            tuple((name, tuple(parameter.shape), parameter.dtype) for name, parameter in block.named_parameters()),
        )
        for block in blocks
    }
    return len(kinds) == 1


def _shortened(model: nn.Module, count: int) -> nn.Module:
    """Return a copy of a model whose lists of blocks have at most so many."""
    short = copy.deepcopy(model)
    for each in repeated_blocks(ModuleTree(short)):
        left_out = set(each.blocks[count:])
        holder = short.get_submodule(each.name)
        for name in [name for name, module in holder.named_children() if module in left_out]:
            del holder._modules[name]
    return short
