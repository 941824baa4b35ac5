"""A history: a sharded and an unsharded model, to which the same is done; both are compared after every operation.

What can be done to them is added in ``fuzz.operations``.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from compare import fqn_of
from fullshard import FullyShardedDataParallel
from fuzz.comparison import Pair, Tolerance, difference, differences, flat_groups, left_unsharded, pairs
from fuzz.losses import Loss
from fuzz.models import build
from fuzz.optimizers import optimizers
from fuzz.plan import HistoryPlan, Operation, every_block
from fuzz.reference import Reference, Side
from fuzz.sharding import shard
from ranks import Rank

# fp64 rounding, after some steps. With fp32 parameters everything is as exact as these.
EXACT, SINGLE = Tolerance(1e-8, 1e-11), Tolerance(1e-4, 1e-6)
# Gradients reduced in fp16 have 11 bits, and may be subnormal.
ROUNDED = Tolerance(4e-3, 1e-6)

MOST_SHOWN = 12  # differences
NOTHING_HERE = "nothing on this rank, but on another"


class DifferenceFound(AssertionError):  # noqa: N818 - reads as what happened
    """The sharded model is not as the unsharded one.

    Args:
        plan: Of the history.
        index: Of the operation; -1: when the models were made.
        found: What was wrong, on this rank; the first line says of what kind.
        on_all: Whether all ranks have come here, at rest, so that the next history can begin.
    """

    def __init__(self, plan: HistoryPlan, index: int, found: str, *, on_all: bool = False) -> None:
        self.plan, self.index, self.found, self.on_all = plan, index, found, on_all
        where = "when made" if index < 0 else f"after operation {index}: {plan.operations[index]}"
        super().__init__(f"{where}\n{found}\n--- history ---\n{plan.describe()}")


class History:
    """Both models and their optimizers.

    Args:
        rank: Of the world.
        plan: Of what is made and done.
    """

    ours: Any
    theirs: Reference
    pairs: list[Pair]

    def __init__(self, rank: Rank, plan: HistoryPlan) -> None:
        self.rank, self.plan = rank, plan
        self._found: list[str] = []
        self.dangling = False  # whether a forward was run whose backward has not come, so that units may be unsharded
        front_end = plan.front_end
        root = build(plan.model, plan.seed)
        self.theirs = Reference(build(plan.model, plan.seed), rank.world_size)
        self.ours = Side(shard(root, front_end, rank))
        self.made_anew(self.ours.model)
        self.new_optimizers()
        single = any(block.kind == "dtypes" for block in every_block(plan.model))
        self.tolerance = ROUNDED if front_end.fp16 else SINGLE if single else EXACT

    def made_anew(self, model: nn.Module) -> None:
        """``model`` is the sharded one from now on."""
        self.ours = Side(model)
        self.pairs = pairs(model, self.theirs.model, wrapped=self.plan.front_end.name == "wrapper")

    def new_optimizers(self) -> None:
        """Build them from the parameters that both models show now."""
        self.optimizers = (
            optimizers(self.ours.model, self.plan, sharded=True),
            optimizers(self.theirs.model, self.plan, sharded=False),
        )

    # ---------------------------------------------------------------- running and comparing

    def live(self) -> None:
        """Do everything.

        Raises:
            DifferenceFound: On all ranks, if there is a difference on any.
        """
        self._compare(-1)
        for index, operation in enumerate(self.plan.operations):
            self._do(index, operation)
            if self.plan.front_end.fp16:
                self._compare(index)
                self._start_from_same()
            self._compare(index)

    def _do(self, index: int, operation: Operation) -> None:
        try:
            getattr(self, operation.name)(Loss.of(self.plan, operation), **operation.arguments)
        except Exception as error:
            raise DifferenceFound(
                self.plan, index, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
            ) from None

    def expect(self, what: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Compare two values of an operation."""
        self._found += difference(what, actual, expected, self.tolerance)

    def _compare(self, index: int) -> None:
        found, self._found = self._found, []
        list(self.ours.model.parameters())  # as a user who looks: what a failure has left is cleared away
        found += differences(self.pairs, self.tolerance, self.theirs.cancellation if self.plan.front_end.fp16 else {})
        if not self._may_stay_unsharded:
            found += left_unsharded(self.ours.model)
        count = torch.tensor([float(len(found))])
        dist.all_reduce(count)
        if count:
            shown = "\n".join(found[:MOST_SHOWN]) if found else NOTHING_HERE
            raise DifferenceFound(self.plan, index, shown, on_all=True)

    @property
    def _may_stay_unsharded(self) -> bool:
        return self.dangling or self.plan.front_end.keep

    def _start_from_same(self) -> None:
        """Both have the sharded model's values and no gradients: rounding errors do not add up."""
        with FullyShardedDataParallel.summon_full_params(self.ours.model, writeback=False):
            named = self.ours.model.named_parameters(remove_duplicate=False)
            values = {fqn_of(name): parameter.detach().clone() for name, parameter in named}
        with torch.no_grad():
            for name, parameter in self.theirs.model.named_parameters():
                parameter.copy_(values[name])
        for side in (self.ours, self.theirs):
            side.model.zero_grad()

    # ---------------------------------------------------------------- what operations are made of

    def backward(self, loss: Loss, times: int = 1) -> None:
        """In both models; the losses are compared."""

        def work(side: Side, rank: int) -> torch.Tensor:
            value = loss(side, rank)
            for index in range(times):
                self.run_backward(value, retain_graph=index + 1 < times)
            return value.detach()

        self.expect_average(work(self.ours, self.rank.rank), work)

    def run_backward(self, value: torch.Tensor, **options: Any) -> torch.Tensor:
        """Of one model, if the value has a graph; the value."""
        if value.requires_grad:
            value.backward(**options)
            self.dangling = False
        return value.detach()

    def expect_average(self, mine: torch.Tensor, work: Callable[[Side, int], torch.Tensor]) -> None:
        """Have the reference do the same for all ranks, and compare what came out on this one."""
        results = self.theirs.average(work)
        self.theirs.fill(flat_groups(self.pairs))
        self._average_added()
        self.expect("loss", mine, results[self.rank.rank])

    def _average_added(self) -> None:
        """What users do who add parameters: gradients are of this rank only."""
        for pair in self.pairs:
            if pair.piece is None and pair.held is not None and pair.held.grad is not None:
                dist.all_reduce(pair.held.grad)
                pair.held.grad.div_(self.rank.world_size)

    def step(self) -> None:
        """Of both sides' optimizers."""
        for side in self.optimizers:
            for optimizer in side:
                optimizer.step()

    def zero(self, *, to_none: bool) -> None:
        """The gradients of both sides."""
        for side in (self.ours, self.theirs):
            side.model.zero_grad(set_to_none=to_none)
