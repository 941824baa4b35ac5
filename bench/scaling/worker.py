"""One measurement: a system, a number of units, a number of ranks, in a process of its own."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench import resident_memory
from bench.contestants import distribute, fake_group, prepare

T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """What is measured.

    Args:
        system: By name.
        units: Of a model.
        ranks: Of the group.
        elements: Of each parameter.
        models: Built one after another.
        steps: Made with each after its first.
        memory: Whether Python's memory is measured as well.
    """

    system: str
    units: int
    ranks: int
    elements: int
    models: int = 2
    steps: int = 3
    memory: bool = False


@dataclass(frozen=True)
class Cost:
    """CPU seconds of this process, each the best of several, and bytes of Python's objects and of the process.

    Args:
        init: All ``fully_shard`` calls, or the wrapper's constructor.
        first: Forward and backward of the first step.
        steady: The same of a later one.
        python_bytes: Allocated by Python for a model's units, after two steps; None: not measured.
        python_peak: The most at any moment until then.
        resident_peak: Growth of the process's largest resident memory, first step included.
    """

    init: float
    first: float
    steady: float
    python_bytes: int | None
    python_peak: int | None
    resident_peak: int


class Affine(nn.Module):
    """One unit: two vectors. If they have a multiple of the ranks of elements, messages do not grow with the ranks."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(elements))
        self.bias = nn.Parameter(torch.zeros(elements))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.bias, x, self.weight)


def stack(units: int, elements: int) -> nn.Module:
    return nn.Sequential(*(Affine(elements) for _ in range(units)))


def collective_names() -> list[str]:
    """Return the names of all methods of a process group that take tensors, by their signatures.

    [Note: Which collectives are silenced]
    A list of names goes out of date: torch 2.13 added ``all_gather_single`` and ``reduce_scatter_single`` beside
    ``_allgather_base`` and ``_reduce_scatter_base``, and its FSDP2 calls the new ones while fullshard calls the old
    ones. With the old names alone silenced, the fake group's copies counted as FSDP2's host time.

    Raises:
        RuntimeError: Signatures do not say which methods take tensors.
    """
    methods = [name for name in vars(dist.ProcessGroup) if callable(getattr(dist.ProcessGroup, name))]
    found = [name for name in methods if "torch.Tensor" in (getattr(dist.ProcessGroup, name).__doc__ or "")]
    if "_allgather_base" not in found:
        raise RuntimeError(f"the signatures of torch {torch.__version__} do not show which methods are collectives")
    return found


@contextmanager
def silent_collectives() -> Iterator[None]:
    """Have all collectives on floating point tensors do nothing at all, whichever system calls them.

    The fake group copies its input to each rank's part of the output, one copy after another: with thousands of ranks
    that would be all that is measured. Collectives of integers (objects, digests) are left as they are. Needs a default
    process group; see [Note: Which collectives are silenced].
    """
    done = dist.distributed_c10d._get_default_group().barrier()
    group_type: Any = dist.ProcessGroup
    real = {name: vars(group_type)[name] for name in collective_names()}  # binding objects, which getattr unwraps
    for name in real:
        setattr(group_type, name, _silent(getattr(group_type, name), done))
    try:
        yield
    finally:
        for name, method in real.items():
            setattr(group_type, name, method)


def _silent(real: Callable[..., Any], done: Any) -> Callable[..., Any]:
    def call(group: Any, *arguments: Any, **options: Any) -> Any:
        first = arguments[0] if arguments else next(iter(options.values()))
        while isinstance(first, (list, tuple)):
            first = first[0]
        return done if first.is_floating_point() else real(group, *arguments, **options)

    return call


class Runner:
    """Builds models of a case and measures them."""

    def __init__(self, case: Case) -> None:
        self.case, self.device = case, torch.device("cpu")
        self.inputs = torch.ones(1, case.elements)

    def distribute(self, model: nn.Module) -> nn.Module:
        return distribute(self.case.system, model, Affine, self.device)

    def step(self, model: nn.Module) -> None:
        model(self.inputs).sum().backward()

    def forget(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad = None

    def turn(self, units: int, steps: int) -> tuple[float, float, float]:
        """Seconds of a new model: initialization, first step, best later step."""
        plain = stack(units, self.case.elements)
        gc.collect()
        gc.disable()  # a full collection in one turn and none in the next would hide what grows
        try:
            model, init = timed(lambda: self.distribute(plain))
            _, first = timed(lambda: self.step(model))
            later = []
            for _ in range(steps):
                self.forget(model)
                later.append(timed(lambda: self.step(model))[1])
        finally:
            gc.enable()
        return init, first, min(later)

    def python_memory(self) -> tuple[int, int]:
        """Bytes that Python has allocated for a distributed model after two steps, and the most until then."""
        plain = stack(self.case.units, self.case.elements)
        gc.collect()
        tracemalloc.start()
        model = self.distribute(plain)
        for _ in range(2):
            self.step(model)
            self.forget(model)
        found = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return found


def timed(call: Callable[[], T]) -> tuple[T, float]:
    """What it returns, and the CPU seconds of this process that it took."""
    start = time.process_time()
    result = call()
    return result, time.process_time() - start


def measure(case: Case) -> Cost:
    prepare(case.system)
    with fake_group(case.ranks), silent_collectives():
        runner = Runner(case)
        runner.turn(3, 1)  # imports and caches
        resident_memory.reset_peak()
        before = resident_memory.now() or 0
        turns = [runner.turn(case.units, case.steps) for _ in range(case.models)]
        resident = (resident_memory.peak() or 0) - before
        held, peak = runner.python_memory() if case.memory else (None, None)
    init, first, steady = (min(figures) for figures in zip(*turns, strict=True))
    return Cost(init, first, steady, held, peak, max(resident, 0))


class Worker:
    def measure(self, **case: Any) -> dict[str, Any]:
        return asdict(measure(Case(**case)))


def build() -> Worker:
    return Worker()
