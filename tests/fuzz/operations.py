"""What can be done to both models of a history: each public method is an operation, with arguments from the plan."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import fullshard
from compare import fqn_of
from containers import tensors_of
from failing import OutOfMemoryAt
from fullshard import FSDPModule, FullyShardedDataParallel, unsharded
from fuzz.comparison import Tolerance
from fuzz.histories import History
from fuzz.losses import Loss
from fuzz.models import Block, adapter
from fuzz.reference import Reference, Side
from fuzz.sharding import reshard_all, shard_added, sharded_modules


class Operations(History):
    """See the module docstring."""

    # ---------------------------------------------------------------- steps

    def train(self, loss: Loss, /, steps: int = 1, to_none: bool = True, clip: float = 0.0, **_: Any) -> None:
        """Whole steps, between which nobody looks at anything."""
        for number in range(steps):
            self.backward(_numbered(loss, number))
            if clip:
                self._clip(clip)
            self.step()
            self.zero(to_none=to_none)

    def accumulate_gradients(self, loss: Loss, /, times: int = 1, **_: Any) -> None:
        """A backward (of the same graph several times), and no step."""
        self.backward(loss, times)

    def optimizer_step(self, loss: Loss, /, to_none: bool = True, **_: Any) -> None:
        """A step with the gradients that are there, and zero_grad."""
        self.step()
        self.zero(to_none=to_none)

    def zero_gradients(self, loss: Loss, /, to_none: bool = True, **_: Any) -> None:
        """zero_grad."""
        self.zero(to_none=to_none)

    def microbatches(
        self, loss: Loss, /, count: int = 2, ends: str = "backward", evaluates: bool = False, **_: Any
    ) -> None:
        """Backwards without reduction, then one with it, or ``synchronize_gradients``."""
        with self._no_sync("requires_gradient_sync"):
            for number in range(count):
                self.backward(_numbered(loss, number))
                if evaluates:
                    self.evaluate(loss)
        if ends == "backward":
            self.backward(_numbered(loss, count))
        else:
            self.ours.model.synchronize_gradients()
            self.dangling = True  # the last backward may have kept them, for a next one

    def partial_reductions(self, loss: Loss, /, count: int = 2, **_: Any) -> None:
        """Backwards that are reduced over the shard axis only, then one over both."""
        with self._no_sync("requires_all_reduce"):
            for number in range(count):
                self.backward(_numbered(loss, number))
        self.backward(_numbered(loss, count))

    def several_graphs(self, loss: Loss, /, order: Sequence[int] = (0, 1), **_: Any) -> None:
        """All forwards first, then the backwards in some order."""

        def work(side: Side, rank: int) -> torch.Tensor:
            losses = [loss(side, rank, number) for number in range(len(order))]
            for number in order:
                self.run_backward(losses[number])
            return torch.stack([value.detach() for value in losses])

        self.expect_average(work(self.ours, self.rank.rank), work)

    def clip(self, loss: Loss, /, norm: float = 0.05, **_: Any) -> None:
        """A backward, and clipping of all gradients."""
        self.backward(loss)
        self._clip(norm)

    def _clip(self, norm: float) -> None:
        model = self.ours.model
        if isinstance(model, FullyShardedDataParallel):
            mine = model.clip_grad_norm_(norm)
        else:
            mine = fullshard.clip_grad_norm_(model.parameters(), norm)
        expected = nn.utils.clip_grad_norm_(self.theirs.model.parameters(), norm)
        self.expect("gradient norm", mine.double(), expected.double())

    # ---------------------------------------------------------------- without steps

    def evaluate(self, loss: Loss, /, mode: str = "no_grad", **_: Any) -> None:
        """Forwards without gradients."""
        with getattr(torch, mode)():
            mine = [value.clone() for value in loss.outputs(self.ours, self.rank.rank, 7)[1:]]
            expected = [value.clone() for value in loss.outputs(self.theirs, self.rank.rank, 7)[1:]]
        for index, pair in enumerate(zip(mine, expected, strict=True)):
            self.expect(f"output {index}", *pair)
        self.dangling = True  # the root may stay unsharded

    def forward_only(self, loss: Loss, /, **_: Any) -> None:
        """A forward whose backward never comes."""
        loss(self.ours, self.rank.rank)
        self.dangling = True

    def input_gradients(self, loss: Loss, /, **_: Any) -> None:
        """Gradients of the inputs only, by ``torch.autograd.grad``."""

        def work(side: Side, rank: int) -> torch.Tensor:
            x, *outputs = loss.outputs(side, rank, inputs=True)
            total = sum(output.double().square().sum() for output in outputs)
            assert isinstance(total, torch.Tensor)
            if not total.requires_grad:
                return total
            (gradient,) = torch.autograd.grad(total, x, allow_unused=True)
            self.dangling |= gradient is None  # then no backward has run
            return total.detach() if gradient is None else gradient

        self.expect("gradient of the input", work(self.ours, self.rank.rank), work(self.theirs, self.rank.rank))

    def keep_unsharded(self, loss: Loss, /, trains: bool = False, **_: Any) -> None:
        """Forwards, maybe a backward and a step, inside of ``unsharded``."""
        with unsharded(self.ours.model):
            self.evaluate(loss)
            if trains:
                self.backward(loss)
            self.evaluate(loss)

    def unsharded_loss(self, loss: Loss, /, **_: Any) -> None:
        """A loss computed inside of ``unsharded``, whose backward comes after it."""

        def work(side: Side, rank: int) -> torch.Tensor:
            with unsharded(side.model) if side is self.ours else contextlib.nullcontext():
                value = loss(side, rank)
            if value.requires_grad:
                value.backward()
            self.dangling |= not value.requires_grad
            return value.detach()

        self.expect_average(work(self.ours, self.rank.rank), work)

    def unshard(self, loss: Loss, /, unit: int = 0, waits: bool = True, runs: bool = True, **_: Any) -> None:
        """``unshard`` and ``reshard`` of one unit, with forwards in between."""
        units = [module for module in sharded_modules(self.ours.model) if isinstance(module, FSDPModule)]
        if not units:
            return
        module = units[unit % len(units)]
        handle = module.unshard(async_op=True)
        assert handle is not None
        if waits:
            handle.wait()
        if runs:
            self.evaluate(loss)
        module.reshard()

    def child(self, loss: Loss, /, block: int = 0, **_: Any) -> None:
        """A backward of one block, called without its root."""
        mine, theirs = self._block(self.ours, block), self._block(self.theirs, block)
        if mine is None or theirs is None:
            return
        width = loss.batch(0)
        shape = (*width.shape[:2], self.theirs.model.norm.normalized_shape[0])

        def work(side: Side, rank: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(loss.seed + rank)
            x = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
            module = theirs if side is self.theirs else mine
            assert module is not None
            for each in module.modules():
                if isinstance(each, Block):
                    each.rank = rank
            value = tensors_of(module(x))[0].square().mean()
            if value.requires_grad:
                value.backward()  # the root may stay unsharded
            return value.detach()

        self.expect_average(work(self.ours, self.rank.rank), work)

    # ---------------------------------------------------------------- edits

    def edit(self, loss: Loss, /, way: str = "in place", factor: float = 0.97, **_: Any) -> None:
        """Write to parameters: the sharded ones, or inside ``summon_full_params``."""
        model = self.ours.model
        around: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if way == "summon":
            around = FullyShardedDataParallel.summon_full_params(model)
        with around, torch.no_grad():
            for side in (self.ours, self.theirs):
                for parameter in side.model.parameters():
                    parameter.mul_(factor)
        if way == "in place":
            reshard_all(model)

    def write(self, loss: Loss, /, after: str = "", way: str = "mul", **_: Any) -> None:
        """Write to the parameters that modules show between forwards."""
        self._reach(loss, after)
        with torch.no_grad():
            for side in (self.ours, self.theirs):
                for parameter in side.model.parameters():
                    if way == "mul":
                        parameter.mul_(0.95)
                    else:
                        parameter.copy_(parameter.clone() * 0.95)

    def new_optimizer(self, loss: Loss, /, after: str = "", **_: Any) -> None:
        """Go on with optimizers built from the parameters that modules show."""
        self._reach(loss, after)
        self.new_optimizers()

    def replace(self, loss: Loss, /, after: str = "", number: int = 0, **_: Any) -> None:
        """Put a new parameter in the place of one, wherever that is held."""
        self._reach(loss, after)
        chosen = self.pairs[number % len(self.pairs)]
        made = nn.Parameter(chosen.held.detach() * 0.9, requires_grad=chosen.held.requires_grad)
        for pair in self.pairs:
            if pair.expected is chosen.expected:
                setattr(pair.holder, pair.name, made)
        with torch.no_grad():
            chosen.expected.mul_(0.9)
        chosen.expected.grad = None
        self.new_optimizers()

    def add(self, loss: Loss, /, block: int = 0, unit: bool = False, **_: Any) -> None:
        """Put an adapter into a block, as a unit or as it is."""
        for side in (self.ours, self.theirs):
            found = self._block(side, block)
            if isinstance(found, FullyShardedDataParallel):
                found = found.module
            if found is None or hasattr(found, "adapter"):
                return
            found.adapter = adapter(self.theirs.model.norm.normalized_shape[0], loss.seed)
            if unit and side is self.ours:
                shard_added(found.adapter, self.plan.front_end, self.rank)
        self.made_anew(self.ours.model)
        self.new_optimizers()

    def move(self, loss: Loss, /, to: str = "dtype", runs: bool = False, **_: Any) -> None:
        """Move both models to the CPU, or to another dtype and back, in which they may run."""
        for side in (self.ours, self.theirs):
            if to == "dtype":
                side.model.to(torch.float32)
            else:
                side.model.cpu()
        if to != "dtype":
            return
        if runs:
            kept, self.tolerance = self.tolerance, Tolerance(1e-3, 1e-4)
            self.evaluate(replace(loss, dtype=torch.float32))
            self.tolerance = kept
        for side in (self.ours, self.theirs):
            side.model.to(torch.float64)

    def read(self, loss: Loss, /, block: int = 0, where: str = "between", **_: Any) -> None:
        """A step, in which somebody reads all of every parameter at some point."""

        def look(*_: Any) -> None:
            for pair in self.pairs:
                self.expect(f"{pair.fqn}, read", *pair.full_values())

        module, kept = self._block(self.ours, block), contextlib.ExitStack()
        if module is not None and where in ("pre", "post"):
            register = module.register_forward_pre_hook if where == "pre" else module.register_forward_hook
            kept.callback(register(look).remove)
        with kept:
            value = loss(self.ours, self.rank.rank)
            if where == "between":
                look()
            self.run_backward(value)
        self.expect_average(value.detach(), lambda side, rank: self.run_backward(loss(side, rank)))
        look()
        self.step()
        look()

    def edit_gradients(self, loss: Loss, /, factor: float = 0.5, **_: Any) -> None:
        """Write to the gradients after a backward."""
        self.backward(loss)
        for pair in {id(pair.expected): pair for pair in self.pairs}.values():
            gradient, _ = pair.gradients()  # which unsharded parameters do not have
            for each in (gradient, pair.expected.grad):
                if each is not None:
                    each.mul_(factor)

    def summon(self, loss: Loss, /, **_: Any) -> None:
        """What ``summon_full_params`` shows of parameters and gradients."""
        expected = dict(self.theirs.model.named_parameters(remove_duplicate=False))
        with FullyShardedDataParallel.summon_full_params(self.ours.model, writeback=False, with_grads=True):
            for name, parameter in self.ours.model.named_parameters(remove_duplicate=False):
                theirs = expected[fqn_of(name)]
                self.expect(f"summoned {name}", parameter.detach(), theirs.detach())
                if parameter.grad is not None and theirs.grad is not None:
                    self.expect(f"gradient of summoned {name}", parameter.grad, theirs.grad)

    def freeze(self, loss: Loss, /, block: int = 0, trains: bool = False, **_: Any) -> None:
        """Change ``requires_grad`` of the parameters of a block."""
        for side in (self.ours, self.theirs):
            module = self._block(side, block)
            if module is not None:
                module.requires_grad_(trains)
                if self.plan.optimizer.name == "muon":  # ours does not step frozen parameters that have a gradient
                    module.zero_grad()

    # ---------------------------------------------------------------- copies and files

    def copy(self, loss: Loss, /, **_: Any) -> None:
        """Go on with deep copies of both models, and new optimizers."""
        self.theirs = Reference(copy.deepcopy(self.theirs.model), self.theirs.world_size)
        self.made_anew(copy.deepcopy(self.ours.model))
        self.new_optimizers()

    def state_dict(self, loss: Loss, /, optimizer: bool = True, **_: Any) -> None:
        """Keep a state dict, train, and load it again."""
        states = [_cloned(side.model.state_dict()) for side in (self.ours, self.theirs)]
        kept = [[copy.deepcopy(each.state_dict()) for each in side] for side in self.optimizers]
        self.train(loss)
        for side, state in zip((self.ours, self.theirs), states, strict=True):
            side.model.load_state_dict(state)
        if optimizer:
            for side, states_of in zip(self.optimizers, kept, strict=True):
                for each, state in zip(side, states_of, strict=True):
                    each.load_state_dict(state)

    # ---------------------------------------------------------------- settings

    def prefetch(self, loss: Loss, /, direction: str = "forward", units: Sequence[int] = (0, 1), **_: Any) -> None:
        """Have the first unit gather the others early."""
        found: list[Any] = [m for m in sharded_modules(self.ours.model) if isinstance(m, FSDPModule)]
        if found:
            first, *others = [found[unit % len(found)] for unit in units]
            getattr(first, f"set_modules_to_{direction}_prefetch")([other for other in others if other is not first])

    def prefetch_bytes(self, loss: Loss, /, budget: int | None = None, **_: Any) -> None:
        """Gather more, or less, ahead."""
        self.ours.model.set_prefetch_bytes(budget)

    def reshard_after_forward(self, loss: Loss, /, enable: bool = True, **_: Any) -> None:
        """Change the setting of all units but the root and the head's, whose weights losses read."""
        for module in sharded_modules(self.ours.model):
            shows = module in (self.ours.model, self.ours.model.norm, self.ours.model.head)
            if isinstance(module, FSDPModule) and not shows:
                module.set_reshard_after_forward(enable, recurse=False)

    # ---------------------------------------------------------------- failures

    def fail(self, loss: Loss, /, block: int = 0, where: str = "forward", **_: Any) -> None:
        """An exception in the forward, or the backward, of a block; gradients are dropped."""
        module = self._block(self.ours, block)
        if module is not None:
            with _failing(module, where), contextlib.suppress(OnPurposeError):
                self.run_backward(loss(self.ours, self.rank.rank))
        self.zero(to_none=True)
        self.dangling = True

    def out_of_memory(self, loss: Loss, /, launches: int = 0, place: int = 0, **_: Any) -> None:
        """Memory runs out once, after the same launch on all ranks; then the step is tried again."""
        with contextlib.suppress(torch.OutOfMemoryError), OutOfMemoryAt(place, launches):
            self.run_backward(loss(self.ours, self.rank.rank))
        self.zero(to_none=True)
        self.dangling = True
        self.train(loss)

    # ---------------------------------------------------------------- parts

    def _reach(self, loss: Loss, after: str) -> None:
        """Run what an operation comes after: nothing, a "forward" without backward, or an "evaluation"."""
        if after == "forward":
            self.forward_only(loss)
        elif after:
            self.evaluate(loss)
        elif self.plan.front_end.keep:
            reshard_all(self.ours.model)  # units may be unsharded, and only steps are noticed

    def _block(self, side: Side, number: int) -> Any:
        blocks: Any = side.model.blocks
        return blocks[number % len(blocks)] if len(blocks) else None

    @contextlib.contextmanager
    def _no_sync(self, name: str) -> Iterator[None]:
        if isinstance(self.ours.model, FullyShardedDataParallel):
            with self.ours.model.no_sync():
                yield
            return
        set_sync = getattr(self.ours.model, f"set_{name}")
        set_sync(False)
        try:
            yield
        finally:
            set_sync(True)


class OnPurposeError(Exception):
    """Raised by an operation."""


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise OnPurposeError


@contextlib.contextmanager
def _failing(module: nn.Module, where: str) -> Iterator[None]:
    def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if where == "forward":
            raise OnPurposeError
        return (_Fails.apply(args[0]), *args[1:])

    handle = module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _numbered(loss: Loss, number: int) -> Callable[[Side, int], torch.Tensor]:
    """The loss on another batch."""
    return lambda side, rank: loss(side, rank, number)


def _cloned(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() for name, value in state.items()}
