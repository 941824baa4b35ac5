"""What a step of a golden trace does: training in the ways that programs train."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from golden_models import Loss
from golden_trace import Trace
from torch import nn

import fullshard
from failing import fail, fail_in_backward
from fullshard import FSDPModule, FullyShardedDataParallel
from models import mark
from ranks import Rank


@dataclass
class Run:
    """A sharded model in training, on this rank."""

    model: Any
    optimizer: torch.optim.Optimizer
    rank: Rank
    loss_of: Loss
    trace: Trace

    def forward(self, step: int) -> torch.Tensor:
        self.trace.section("forward")
        return self.loss_of(self.model, self.rank, step)

    def backward(self, loss: torch.Tensor) -> None:
        self.trace.section("backward")
        loss.backward()

    def update(self) -> None:
        self.trace.section("optimizer step")
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, step: int) -> None:
        self.backward(self.forward(step))
        self.update()

    def without_gradients(self, step: int) -> None:
        self.trace.section("forward under no_grad")
        with torch.no_grad():
            self.loss_of(self.model, self.rank, step)


def train(run: Run, step: int) -> None:
    run.train(step)


def watch(model: nn.Module, trace: Trace) -> None:
    """Mark where the module of a unit begins to compute, in forward and in backward."""
    for name, module in model.named_modules():
        if isinstance(module, (FSDPModule, FullyShardedDataParallel)):
            inner = module.module if isinstance(module, FullyShardedDataParallel) else module
            _watch(inner, name.replace("_fsdp_wrapped_module.", "") or "root", trace)


def _watch(module: nn.Module, name: str, trace: Trace) -> None:
    def after(_module: nn.Module, _args: Any, output: Any) -> Any:
        return mark(output, f"backward {name}", trace) if torch.is_grad_enabled() else output

    module.register_forward_pre_hook(lambda *_: trace.event("forward", name))
    module.register_forward_hook(after)


# ---------------------------------------------------------------- gradient accumulation


def accumulate(run: Run, step: int) -> None:
    """Two microbatches, of which the first is not reduced."""
    for sync in (False, True):
        run.model.set_requires_gradient_sync(sync)
        run.backward(run.forward(2 * step + sync))
    run.update()


def accumulate_over_shards(run: Run, step: int) -> None:
    """Two microbatches, of which the first is not reduced over the replicate axis."""
    for reduces in (False, True):
        run.model.set_requires_all_reduce(reduces)
        run.backward(run.forward(2 * step + reduces))
    run.update()


def no_sync(run: Run, step: int) -> None:
    """The same as :func:`accumulate` with the context manager of the wrapper."""
    with run.model.no_sync():
        run.backward(run.forward(2 * step))
    run.train(2 * step + 1)


def pipeline(run: Run, step: int) -> None:
    """Two forwards, then their backwards, of which the second is the last of the step."""
    losses = [run.forward(2 * step + number) for number in range(2)]
    for number, loss in enumerate(losses):
        run.model.set_is_last_backward(number == 1)
        run.backward(loss)
    run.update()


def leave_and_synchronize(run: Run, step: int) -> None:
    """A backward without sync, whose gradients are asked for."""
    run.model.set_requires_gradient_sync(False)
    run.backward(run.forward(step))
    run.trace.section("synchronize_gradients")
    run.model.synchronize_gradients()
    run.update()


# ---------------------------------------------------------------- something between steps, or in the middle


def evaluate_first(run: Run, step: int) -> None:
    run.without_gradients(step)
    run.train(step)


def generate_first(run: Run, step: int) -> None:
    """Two forwards with all parameters kept unsharded, then training."""
    run.trace.section("unsharded begins")
    with fullshard.unsharded(run.model):
        run.without_gradients(step)
        run.without_gradients(step)
        run.trace.section("unsharded ends")
    run.train(step)


def summon_first(**options: Any) -> Callable[[Run, int], None]:
    """``summon_full_params`` with these options, then training."""

    def step_of(run: Run, step: int) -> None:
        run.trace.section("summon_full_params begins")
        with FullyShardedDataParallel.summon_full_params(run.model, **options):
            run.trace.section("summon_full_params ends")
        run.train(step)

    return step_of


def unshard_by_hand(run: Run, step: int) -> None:
    """The first block is gathered early, and another one freed by the user before the step."""
    run.trace.section("unshard(async_op=True)")
    handle = run.model.blocks[0].unshard(async_op=True)
    run.trace.section("wait")
    handle.wait()
    run.model.blocks[1].unshard()
    run.trace.section("reshard")
    run.model.blocks[1].reshard()
    run.train(step)


def clip(run: Run, step: int) -> None:
    run.backward(run.forward(step))
    run.trace.section("clip_grad_norm_")
    own = getattr(run.model, "clip_grad_norm_", None)
    own(0.1) if own else fullshard.clip_grad_norm_(run.model.parameters(), 0.1)
    run.update()


def gradient_of_inputs(run: Run, step: int) -> None:
    """A gradient penalty: a backward through a backward."""
    run.trace.section("forward")
    inputs = torch.ones(4, 6, requires_grad=True)
    loss = run.model(inputs).square().mean()
    run.trace.section("gradients of inputs")
    (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
    run.backward(loss + gradient.square().sum())
    run.update()


# ---------------------------------------------------------------- failures


def fail_first(where: str) -> Callable[[Run, int], None]:
    """In step 2 the middle block raises in its "forward" or "backward" first; then as in other steps."""

    def step_of(run: Run, step: int) -> None:
        if step == 2:
            hook = fail if where == "forward" else fail_in_backward
            handle = run.model.blocks[1].up.register_forward_hook(hook)
            with contextlib.suppress(ZeroDivisionError):
                run.backward(run.forward(step))
            handle.remove()
            run.trace.section("it has raised")
        run.train(step)

    return step_of
