"""Optimizers with all sorts of state, and what they hold, whole and by names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from compare import assert_close, assert_equal, fqn_of
from fullshard.engine.parameters.tensor_shards import TensorShards

State = dict[str, dict[str, Any]]


class Custom(torch.optim.Optimizer):
    """Momentum, and state of all kinds beside it."""

    def __init__(self, parameters: Any, lr: float = 0.01, note: str = "") -> None:
        super().__init__(parameters, {"lr": lr, "note": note})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["nothing"] = None
                    state["words"] = "a word"
                    state["numbers"] = [1, 2.5, None]
                    state["count"] = 0
                    state["table"] = torch.arange(5.0)
                    state["vector"] = torch.zeros(1)
                    state["nested"] = {"square": torch.zeros_like(parameter), "pair": (torch.tensor(2.0), "x")}
                    state["moments"] = [torch.zeros_like(parameter), torch.zeros_like(parameter)]
                state["count"] += 1
                state["vector"] += 2
                state["nested"]["square"].addcmul_(parameter.grad, parameter.grad)
                for factor, moment in enumerate(state["moments"], 1):
                    moment.mul_(0.5).add_(parameter.grad, alpha=factor)
                parameter.add_(state["moments"][0], alpha=-group["lr"])


Make = Callable[..., torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adam": lambda p, **more: torch.optim.Adam(p, lr=0.01, foreach=False, **more),
    "adamw_fused": lambda p, **more: torch.optim.AdamW(p, lr=0.01, fused=True, **more),
    "plain_sgd": lambda p, **more: torch.optim.SGD(p, lr=0.01, **more),
    "adagrad": lambda p, **more: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1, **more),
    "nadam": lambda p, **more: torch.optim.NAdam(p, lr=0.01, **more),
    "asgd": lambda p, **more: torch.optim.ASGD(p, lr=0.01, **more),
    "custom": lambda p, **more: Custom(p, **more),
}


def groups_of(model: nn.Module, *, order: int = 1) -> list[dict[str, Any]]:
    """Matrices and the rest in groups with a mark; ``order`` -1 turns groups and parameters round."""
    named = [(fqn_of(name), p) for name, p in model.named_parameters() if p.requires_grad]
    big = [p for name, p in named if name.endswith("weight")]
    small = [p for name, p in named if not name.endswith("weight")]
    groups = [{"params": found[::order], "mark": mark} for found, mark in ((big, "big"), (small, "small")) if found]
    return groups[::order]


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def held_by(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """The state on a plain model, by names, straight from the optimizer."""
    return {name: optimizer.state[p] for name, p in model.named_parameters() if p in optimizer.state}


def joined(state: Mapping[str, Any]) -> Any:
    """A state with its shards put together over all ranks; these must hold the same everywhere they overlap."""

    def leaf(value: Any) -> Any:
        return _whole(value) if isinstance(value, TensorShards) else value

    return {key: map_leaves(state[key], leaf) for key in sorted(state)}


def map_leaves(value: Any, leaf: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: map_leaves(value[key], leaf) for key in sorted(value)}
    if isinstance(value, (list, tuple)):
        return type(value)(map_leaves(item, leaf) for item in value)
    return leaf(value)


def _whole(shards: TensorShards) -> torch.Tensor:
    total, counts = torch.zeros(shards.shape, dtype=torch.float64), torch.zeros(shards.shape)
    for region, local in shards.shards:
        index = tuple(slice(a, b) for a, b in zip(region.offsets, region.ends, strict=True))
        total[index] += local.double()
        counts[index] += 1
    dist.all_reduce(total)
    dist.all_reduce(counts)
    assert counts.min() >= 1
    mean = total / counts
    for region, local in shards.shards:
        index = tuple(slice(a, b) for a, b in zip(region.offsets, region.ends, strict=True))
        assert torch.equal(mean[index].to(local.dtype), local), "replicas differ"
    return mean.to(shards.dtype)


def assert_states_close(actual: Any, expected: Any, what: str = "state", *, exact: bool = False) -> None:
    """Require the same keys and types, equal values, and close tensors (or with ``exact`` equal ones)."""
    if isinstance(expected, torch.Tensor):
        if exact or not expected.is_floating_point():
            assert_equal(actual, expected.detach(), what)
        else:
            rtol = 5e-2 if expected.dtype is torch.bfloat16 else 1e-4
            assert_close(actual, expected.detach(), what, rtol=rtol, atol=1e-7)
    elif isinstance(expected, Mapping):
        assert isinstance(actual, Mapping) and sorted(actual) == sorted(expected), (what, list(actual), list(expected))
        for key, value in expected.items():
            assert_states_close(actual[key], value, f"{what}[{key!r}]", exact=exact)
    elif isinstance(expected, (list, tuple)):
        assert type(actual) is type(expected) and len(actual) == len(expected), (what, actual, expected)
        for index, pair in enumerate(zip(actual, expected, strict=True)):
            assert_states_close(*pair, f"{what}[{index}]", exact=exact)
    else:
        assert_equal(actual, expected, what)
