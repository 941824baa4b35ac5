"""What programs do to a model, the same code under every library, with a note of what can be seen after each step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from contract import unsharded
from contract.modules import DIM
from contract.recorder import Recorder, kind_of, value_of
from models import Language, batch, tokens
from ranks import Rank

Operation = tuple[Any, ...]  # the name of a method of Session, and its arguments


class Injected(Exception):  # noqa: N818
    """What a program raises itself."""


class Ended(Exception):  # noqa: N818
    """The library has refused something, so that the program ends there."""


class Session:
    """A program under way: a model under one library, an optimizer, and the recorder that watches both."""

    def __init__(self, library: ModuleType, rank: Rank, model: nn.Module, recorder: Recorder, adam: bool) -> None:
        self.library, self.rank, self.model, self.recorder = library, rank, model, recorder
        self.batches = 0
        self.adam = adam
        self.make_optimizer()

    # ------------------------------------------------------------ parts

    def make_optimizer(self) -> None:
        """Build the optimizer, from what the model shows now."""
        parameters = list(self.model.parameters())
        kinds = {isinstance(parameter, DTensor) for parameter in parameters}
        foreach = False if len(kinds) > 1 else None
        if self.adam:
            self.optimizer = torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, foreach=foreach)
        else:
            self.optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=foreach)
        self.recorder.optimizer = self.optimizer

    def run(self, operations: tuple[Operation, ...]) -> None:
        """Do one after the other; note the first error that the program did not raise itself, and end there."""
        self.note("sharded")
        for index, (name, *arguments) in enumerate(operations):
            self.recorder.context = f"{index} {name}" + (f" {arguments}" if arguments else "")
            try:
                getattr(self, name)(*arguments)
            except Exception as error:
                facts = {"raised": type(error).__name__, "message": str(error)[:300]}
                self.note("raised", **facts)
                raise Ended from error

    def note(self, where: str, **facts: Any) -> None:
        """Note all parameters, their values, and the optimizer."""
        self.recorder.note(where, **facts, **(self.recorder.optimizer_facts() if hasattr(self, "optimizer") else {}))

    def unit(self, path: str) -> Any:
        """The module at a path of the model as it was before wrapping."""
        module = self.model
        for name in filter(None, path.split(".")):
            module = getattr(module, name)
        return module

    def batch(self) -> torch.Tensor:
        """The next batch of this rank."""
        self.batches += 1
        if any(isinstance(module, Language | nn.Embedding) for module in self.model.modules()):
            return tokens(self.rank.rank, self.batches, 3, 4)
        return batch(self.rank.rank, self.batches, 4, DIM)

    def forward(self, *arguments: Any, **options: Any) -> torch.Tensor:
        """Run the model on a batch; a loss."""
        output = self.model(self.batch(), *arguments, **options)
        self.note("after forward", output=output.dtype)
        return self._loss(output)

    def _loss(self, output: torch.Tensor) -> torch.Tensor:
        loss = output.float().square().mean()
        self.recorder.points[-1].seen[""]["loss"] = value_of(loss, self.recorder.low)
        return loss

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Run backward."""
        if loss.requires_grad:
            with self._in_backward():
                loss.backward(**options)
        self.note("after backward")

    @contextlib.contextmanager
    def _in_backward(self) -> Iterator[None]:
        self.recorder.in_backward = True
        try:
            yield
        finally:
            self.recorder.in_backward = False

    def step(self, set_to_none: bool = True) -> None:
        """Step, and zero gradients."""
        self._average()
        self.optimizer.step()
        self.note("after step")
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self.note("after zero_grad")

    def _average(self) -> None:
        if self.library is unsharded:
            unsharded.average_gradients(self.model)

    # ------------------------------------------------------------ operations: training

    def train(self, steps: int = 1, set_to_none: bool = True) -> None:
        """Train."""
        for _ in range(steps):
            self.backward(self.forward())
            self.step(set_to_none)

    def train_part(self, path: str) -> None:
        """Train one unit by itself."""
        output = self.unit(path)(self.batch())
        self.note("after forward of a part")
        self.backward(self._loss(output))
        self.step()

    def use(self, branch: str) -> None:
        """Choose what the model's forward runs."""
        self.unit("").use = branch

    def train_without_step(self) -> None:
        """Forward and backward."""
        self.backward(self.forward())

    step_only = step

    def step_with_hooks(self) -> None:
        """Step with hooks on the optimizer."""

        def note(where: str) -> Any:
            def hook(optimizer: Any, arguments: Any, options: Any) -> None:
                self.recorder.note(where, **self.recorder.optimizer_facts())

            return hook

        self.backward(self.forward())
        handles = [self.optimizer.register_step_pre_hook(note("before the step, in its hook"))]
        handles.append(self.optimizer.register_step_post_hook(note("after the step, in its hook")))
        self.step()
        for handle in handles:
            handle.remove()

    def zero_grad(self) -> None:
        """Drop the gradients through the model."""
        self.model.zero_grad()
        self.note("after model.zero_grad")

    def accumulate(self, microbatches: int = 3) -> None:
        """Accumulate gradients locally, and reduce them with the last microbatch."""
        for number in range(microbatches):
            last = number == microbatches - 1
            with self._no_sync(not last):
                self.backward(self.forward())
        self.step()

    @contextlib.contextmanager
    def _no_sync(self, wanted: bool) -> Iterator[None]:
        if not wanted:
            yield
        elif hasattr(self.model, "no_sync"):
            with self.model.no_sync():
                yield
        else:
            self.model.set_requires_gradient_sync(False)
            yield
            self.model.set_requires_gradient_sync(True)

    def accumulate_reduced(self, microbatches: int = 2) -> None:
        """Accumulate reduced gradients."""
        for _ in range(microbatches):
            self.train_without_step()
        self.step()

    def microbatch_dropped(self) -> None:
        """Backward without reduction, then drop the gradients."""
        with self._no_sync(True):
            self.backward(self.forward())
        self.optimizer.zero_grad()
        self.note("after optimizer.zero_grad")

    def last_backward(self) -> None:
        """Two backwards, of which the second is marked as the last."""
        self.model.set_is_last_backward(False)
        self.backward(self.forward())
        self.model.set_is_last_backward(True)
        self.backward(self.forward())
        self.step()

    def two_forwards(self, count: int = 2) -> None:
        """Several forwards, then one backward of the sum."""
        losses = [self.forward() for _ in range(count)]
        self.backward(torch.stack(losses).sum())
        self.step()

    def two_losses(self) -> None:
        """Two backwards through one forward."""
        output = self.model(self.batch())
        self.note("after forward")
        self.backward(output.float().square().mean(), retain_graph=True)
        self.backward(output.float().abs().mean())
        self.step()

    def forwards_interleaved(self) -> None:
        """Two forwards, then the backward of each."""
        first, second = self.forward(), self.forward()
        self.backward(second)
        self.backward(first)
        self.step()

    def forward_dropped(self) -> None:
        """A forward whose output is not used."""
        self.forward()
        self.note("dropped")

    def input_gradient(self) -> None:
        """Gradients with respect to the input, which needs gradients."""
        x = self.batch().requires_grad_()
        output = self.model(x)
        self.note("after forward")
        self.backward(self._loss(output))
        assert x.grad is not None
        self.note("after that", gradient=value_of(x.grad, self.recorder.low))
        self.step()

    def autograd_grad(self) -> None:
        """Gradients with respect to the input alone, by torch.autograd.grad."""
        x = self.batch().requires_grad_()
        output = self.model(x)
        self.note("after forward")
        loss = self._loss(output)
        with self._in_backward():
            (gradient,) = torch.autograd.grad(loss, x)
        self.note("after autograd.grad", gradient=value_of(gradient, self.recorder.low))

    # ------------------------------------------------------------ operations: losses outside, flags inside

    def head_outside(self, by_weight: bool = False) -> None:
        """A loss from the head, outside of forward."""
        hidden = self.model(self.batch(), hidden=True)
        self.note("after forward")
        if by_weight:
            loss = self.unit("").loss_by_weight(hidden)
            self.note("after the loss")
        else:
            output = self.unit("head")(hidden)
            self.note("after the head")
            loss = self._loss(output)
        self.backward(loss)
        self.step()

    def chunked_head(self) -> None:
        """The head outside of forward on chunks, each with its backward on a detached input."""
        hidden = self.model(self.batch(), hidden=True)
        self.note("after forward")
        detached = hidden.detach().requires_grad_()
        for chunk in detached.chunk(2):
            self.backward(self._loss(self.unit("head")(chunk)))
        self.backward((hidden * detached.grad).sum())
        self.step()

    def similarity(self) -> None:
        """Reading a weight of the root after a forward without gradients."""
        with torch.no_grad():
            hidden = self.model(self.batch(), hidden=True)
            self.note("after forward")
            similarity = hidden @ self.unit("embedding").weight.t()
        self.note("after the product", kind=kind_of(similarity), product=value_of(similarity, self.recorder.low))

    def freeze_inside(self, *paths: str) -> None:
        """Flags that forward flips, as PEFT's disable_adapter does."""
        self.unit("").frozen_inside = list(paths)
        self.backward(self.forward())
        self.step()
        self.unit("").frozen_inside = []

    def backward_inside(self) -> None:
        """Backward inside of the model's forward."""
        self.unit("").backward_inside = True
        self.model(self.batch())
        self.note("after forward")
        self.step()
        self.unit("").backward_inside = False

    def noted_inside(self) -> None:
        """Train, and look at everything from inside the root's forward."""
        self.unit("").inside = lambda: self.note("inside")
        self.backward(self.forward())
        self.step()
        self.unit("").inside = None

    def regularize(self) -> None:
        """A penalty on the parameters, as they are outside of forward before it."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        penalty = sum(p.square().sum() for p in parameters)
        if isinstance(penalty, DTensor):
            penalty = penalty.full_tensor()
        self.backward(self.forward() + 0.01 * penalty)  # type: ignore[operator]
        self.step()

    # ------------------------------------------------------------ operations: flags and settings

    def freeze(self, path: str, flag: bool = False) -> None:
        """Freeze or unfreeze a part."""
        self.unit(path).requires_grad_(flag)
        self.note("after requires_grad_")

    def reshard_after_forward(self, value: bool, path: str = "") -> None:
        """Change the setting."""
        self.unit(path).set_reshard_after_forward(value)
        self.note("set")

    def reshard_after_backward(self, value: bool) -> None:
        """Change the setting."""
        self.model.set_reshard_after_backward(value)  # type: ignore[operator]
        self.note("set")

    def evaluate(self, inference: bool = False, times: int = 1) -> None:
        """Forward in eval mode without gradients."""
        self.model.eval()
        self.note("after eval()")
        with torch.inference_mode() if inference else torch.no_grad():
            for _ in range(times):
                self.forward()
        self.note("outside of no_grad")
        self.model.train()

    def unshard(self, path: str = "") -> None:
        """Unshard by hand."""
        self.unit(path).unshard()
        self.note("after unshard")

    def unshard_async(self, path: str = "") -> None:
        """Unshard by hand, asynchronously."""
        handle = self.unit(path).unshard(async_op=True)
        self.note("before wait")
        handle.wait()
        self.note("after wait")

    def reshard(self, path: str = "") -> None:
        """Reshard by hand."""
        self.unit(path).reshard()
        self.note("after reshard")

    def clip(self) -> None:
        """Backward, clip, step."""
        self.backward(self.forward())
        self._average()
        if hasattr(self.model, "clip_grad_norm_"):
            norm = self.model.clip_grad_norm_(0.01)
        else:
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        self.note("after clipping", norm=value_of(norm, self.recorder.low))
        self.step()

    def to(self, dtype: torch.dtype) -> None:
        """Cast the model."""
        self.model.to(dtype)
        self.note("after to(dtype)")

    def apply_(self) -> None:
        """Write to the sharded parameters in place."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(0.5)
        self.note("after writing")

    def new_optimizer(self) -> None:
        """Build the optimizer anew."""
        self.make_optimizer()
        self.note("after building an optimizer")

    # ------------------------------------------------------------ operations: state

    def save(self) -> dict[str, Any]:
        """Take state dicts."""
        state = self.model.state_dict()
        facts: dict[str, Any] = {"keys": list(state)}
        for key, value in state.items():
            facts[f"{key}"] = f"{type(value).__name__} {value.dtype} {tuple(value.shape)} {value.requires_grad}"
            if isinstance(value, DTensor | torch.Tensor):
                facts[f"values of {key}"] = value_of(value, self.recorder.low)
        saved = self.optimizer.state_dict()["state"]
        facts["optimizer's keys"] = {index: sorted(entry) for index, entry in saved.items()}
        self.note("after state_dict", **facts)
        return state

    def load(self, assign: bool = False) -> None:
        """Take a state dict, train, and load it again."""
        state = {key: value.detach().clone() for key, value in self.model.state_dict().items()}
        optimizer_state = self.optimizer.state_dict()
        self.backward(self.forward())
        self.step()
        result = self.model.load_state_dict(state, assign=assign)
        self.optimizer.load_state_dict(optimizer_state)
        self.note("after load_state_dict", result=str(result))

    def summon(self) -> None:
        """Look at the parameters inside summon_full_params."""
        with self.library.FullyShardedDataParallel.summon_full_params(self.model):
            self.note("inside")
        self.note("after")

    # ------------------------------------------------------------ operations: exceptions

    def raise_in_forward(self, path: str, reset: bool = True) -> None:
        """An exception before a module's forward, inside of the model's."""

        def fail(*_: Any) -> None:
            raise Injected

        handle = self.unit(path).register_forward_pre_hook(fail)
        with contextlib.suppress(Injected):
            self.model(self.batch())
        handle.remove()
        self._recover(reset)

    def raise_in_backward(self, path: str, reset: bool = True) -> None:
        """An exception in backward, when the gradient of a module's output is there."""

        def fail(gradient: torch.Tensor) -> None:
            raise Injected

        def hook(module: nn.Module, arguments: Any, output: torch.Tensor) -> None:
            output.register_hook(fail)

        handle = self.unit(path).register_forward_hook(hook)
        loss = self.forward()
        handle.remove()
        with contextlib.suppress(Injected), self._in_backward():
            loss.backward()
        self._recover(reset)

    def _recover(self, reset: bool) -> None:
        self.note("after the exception")
        self.optimizer.zero_grad()
        if reset and hasattr(self.model, "reset_iter_state"):
            self.model.reset_iter_state()  # type: ignore[operator]
            self.note("after reset_iter_state")
