"""Random histories: whatever is done to a wrapped model between steps, in any order, an unsharded one does as well."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from front_ends import (
    CLOSE,
    Block,
    LossOf,
    Stack,
    assert_same_gradients,
    assert_same_values,
    batch,
    gathered,
    reference_backward,
    wrapped,
)
from torch import nn

from compare import assert_close
from fullshard import BackwardPrefetch, CPUOffload, FullyShardedDataParallel, ShardingStrategy, unsharded
from fullshard.activation_checkpoint import apply_activation_checkpointing
from fullshard.wrap import ModuleWrapPolicy
from ranks import Rank, on_ranks

DIM = 6


class History:
    """A wrapped model and a plain one, to which the same random things are done.

    Args:
        rank: Of the world.
        seed: Of all choices; equal on all ranks.
    """

    def __init__(self, rank: Rank, seed: int) -> None:
        self.rank, self.choice, self.data = rank, random.Random(seed), 0
        torch.manual_seed(seed)
        self.depth = self.choice.randint(1, 4)
        self.reference = Stack(self.depth, DIM)
        self.tied = self.choice.random() < 0.3
        if self.tied:
            self.reference.blocks[-1].up.weight = self.reference.blocks[0].up.weight
        if self.choice.random() < 0.3:
            self.reference.blocks[0].requires_grad_(False)
        self.options = self._options()
        self.model: nn.Module = wrapped(self.reference, rank, **self.options)
        recomputed = self.choice.choice([None, Block, nn.Linear])
        if recomputed is not None:
            apply_activation_checkpointing(self.model, check_fn=lambda m: isinstance(m, recomputed))
        self.done: list[str] = [str(self.options), str(recomputed)]

    def _options(self) -> dict[str, Any]:
        strategy, size = self.choice.choice(list(ShardingStrategy)), self.rank.world_size
        options: dict[str, Any] = {
            "sharding_strategy": strategy,
            "use_orig_params": self.choice.random() < 0.5,
            "backward_prefetch": self.choice.choice([*BackwardPrefetch, None]),
        }
        if strategy.hybrid:
            options["device_mesh"] = self.rank.make_mesh(*self.choice.choice([(1, size), (size, 1), (2, size // 2)]))
        if self.choice.random() < 0.3:
            options["cpu_offload"] = CPUOffload(offload_params=self.choice.random() < 0.5)
        if self.choice.random() < 0.3:
            options["auto_wrap_policy"] = ModuleWrapPolicy({Block, nn.Linear})
        return options

    # ---------------------------------------------------------------- what steps are made of

    def loss(self, *, inputs_need_gradients: bool = False) -> LossOf:
        """Of new data, through a random choice of blocks."""
        self.data += 1
        step, run = self.data, None
        if self.choice.random() < 0.5:
            run = [self.choice.randrange(self.depth) for _ in range(self.choice.randint(1, self.depth + 1))]

        def loss_of(module: nn.Module, number: int) -> torch.Tensor:
            x = batch(number, step, 3, DIM).requires_grad_(inputs_need_gradients)
            return module(x, run=run).square().mean()

        return loss_of

    def backward(self, loss_of: LossOf, times: int = 1) -> None:
        """In both models."""
        loss = loss_of(self.model, self.rank.rank)
        for index in range(times):
            loss.backward(retain_graph=index + 1 < times)
            losses = reference_backward(self.reference, self.rank.world_size, loss_of)
        assert_close(loss.detach(), losses[self.rank.rank], "loss", **CLOSE)

    def both(self) -> tuple[nn.Module, nn.Module]:
        return self.model, self.reference

    def step(self) -> None:
        """Of a new optimizer: copies have parameters of their own."""
        to_none = self.choice.random() < 0.5
        for module in self.both():
            torch.optim.SGD(module.parameters(), lr=0.05).step()
            module.zero_grad(set_to_none=to_none)

    # ---------------------------------------------------------------- what happens

    def train(self) -> None:
        self.backward(self.loss(inputs_need_gradients=self.choice.random() < 0.3))
        assert gathered(self.model) == []
        if self.choice.random() < 0.7:  # else gradients add up
            self.step()

    def accumulate(self) -> None:
        for _ in range(self.choice.randint(1, 3)):
            with self.model.no_sync():
                self.backward(self.loss())
            if self.choice.random() < 0.3:
                self.evaluate()
        self.backward(self.loss())
        self.step()

    def two_graphs(self) -> None:
        losses = [self.loss(), self.loss()]
        graphs = [loss_of(self.model, self.rank.rank) for loss_of in losses]
        for index in self.choice.sample([0, 1], 2):
            graphs[index].backward()
        for loss_of in losses:
            reference_backward(self.reference, self.rank.world_size, loss_of)

    def backward_twice(self) -> None:
        self.backward(self.loss(), times=2)

    def clip(self) -> None:
        self.backward(self.loss())
        norm = self.model.clip_grad_norm_(0.05)
        assert_close(norm, nn.utils.clip_grad_norm_(self.reference.parameters(), 0.05), "norm", **CLOSE)
        self.step()

    def evaluate(self) -> None:
        mode = self.choice.choice([torch.no_grad, torch.inference_mode])
        loss_of = self.loss()
        with mode():
            ours, expected = (loss_of(module, 0) for module in self.both())
        assert_close(ours.clone(), expected.clone(), "loss without gradients", **CLOSE)

    def hold(self) -> None:
        with unsharded(self.model):
            for _ in range(2):
                self.evaluate()

    def gradients_of_inputs(self) -> None:
        self.data += 1
        x = batch(self.rank.rank, self.data, 3, DIM).requires_grad_()
        ours, expected = (torch.autograd.grad(module(x).sum(), x)[0] for module in self.both())
        assert_close(ours, expected, "gradient of the inputs", **CLOSE)

    def edit(self) -> None:
        way = self.choice.choice(["summon", "in place", "load"])
        self.done.append(way)
        if way == "load":
            state = {name: value * 0.98 for name, value in self.model.state_dict().items()}
            for module in self.both():
                module.load_state_dict(state)
            return
        summon = FullyShardedDataParallel.summon_full_params(self.model)
        with summon if way == "summon" else contextlib.nullcontext(), torch.no_grad():
            for module in self.both():
                for parameter in module.parameters():
                    parameter.mul_(1.01)

    def edit_gradients(self) -> None:
        self.backward(self.loss())
        for module in self.both():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
        self.backward(self.loss())

    def freeze(self) -> None:
        """Freeze or unfreeze a block. Tied parameters lie in the root's flat parameter, which is frozen as a whole."""
        if self.tied and not self.options["use_orig_params"]:
            return
        index, trainable = self.choice.randrange(self.depth), self.choice.random() < 0.5
        for module in self.both():
            module.zero_grad()
            module.blocks[index].requires_grad_(trainable)

    def copy(self) -> None:
        self.model = copy.deepcopy(self.model)

    def fail(self) -> None:
        """In forward or backward; what is left is dropped."""

        def fails(_: object, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            if in_forward:
                raise _OnPurposeError
            return _Fails.apply(output)

        in_forward = self.choice.random() < 0.5
        loss_of = self.loss()
        handle = self.model.blocks[self.choice.randrange(self.depth)].register_forward_hook(fails)
        with contextlib.suppress(_OnPurposeError):  # which block runs is random
            loss_of(self.model, self.rank.rank).backward()
        handle.remove()
        for module in self.both():
            module.zero_grad()

    def live(self) -> None:
        """Do one of these things, and compare."""
        happens: list[Callable[[], None]] = [
            *[self.train] * 3,
            self.accumulate,
            self.two_graphs,
            self.backward_twice,
            self.clip,
            self.evaluate,
            self.hold,
            self.gradients_of_inputs,
            self.edit,
            self.edit_gradients,
            self.freeze,
            self.copy,
            self.fail,
        ]
        event = self.choice.choice(happens)
        self.done.append(event.__name__)
        event()
        assert_same_values(self.model, self.reference, rtol=1e-4, atol=1e-5)
        if self.choice.random() < 0.5:
            assert_same_gradients(self.model, self.reference, rtol=1e-3, atol=1e-5)


class _OnPurposeError(Exception):
    """Raised by a test."""


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise _OnPurposeError


@on_ranks(2, 4)
@pytest.mark.parametrize("seed", range(8))
def test_random_history(rank: Rank, seed: int) -> None:
    """Ten random events: losses, weights and gradients stay those of an unsharded model."""
    history = History(rank, seed)
    for _ in range(10):
        try:
            history.live()
        except Exception as error:
            raise AssertionError(f"after {history.done}") from error
