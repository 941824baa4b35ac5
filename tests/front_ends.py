"""The front ends as tests see them, ``fully_shard`` with each layout, and the unsharded training to compare with.

A test of behavior that they share takes a ``front_end: FrontEnd`` (see ``each_front_end`` and ``pairwise``) and asks
it to wrap, to stop synchronizing, or for options in its own words. What is the same in all, such as full parameters
and gradients, are functions of this module.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fullshard.ragged  # noqa: F401 # adds the layout
from compare import assert_close, assert_within, fqn_of
from fullshard import (
    CPUOffload,
    CPUOffloadPolicy,
    FlatParameter,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
    replicate,
)
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.comm import Collective
from fullshard.engine.ownership import nested_units
from fullshard.engine.states import Phase
from fullshard.progress import PROGRESS
from fullshard.wrap import ModuleWrapPolicy
from models import Block, LossOf, held_bytes, reference_backward, square_loss
from ranks import Rank

CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-6}
# Adam divides gradients by their own size, and so makes rounding errors of tiny ones as large as a step.
AFTER_ADAM: dict[str, float] = {"rtol": 1e-3, "atol": 1e-5}
# A step of this size is a multiplication without rounding: the update is the same bit by bit, fused or not.
EXACT_RATE = 2.0**-4

Values = dict[str, torch.Tensor]  # by FQN
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


@dataclass(frozen=True)
class FrontEnd:
    """A way to shard a model: composable, with either layout, or the wrapper with original or with flat parameters."""

    name: str

    def __str__(self) -> str:
        return self.name

    @property
    def composable(self) -> bool:
        """Whether it is ``fully_shard`` (and ``replicate``), whose parameters are DTensors."""
        return self.name in ("composable", "ragged")

    @property
    def flat(self) -> bool:
        """Whether parameters of a unit are visible as one flat parameter only."""
        return self.name == "flat"

    def wrap(
        self,
        model: nn.Module,
        rank: Rank,
        units: Sequence[str] | None = None,
        *,
        strategy: str = "FULL_SHARD",
        mesh: Any = None,
        **options: Any,
    ) -> Any:
        """Shard ``model`` in place, and return its root.

        Args:
            model: Its modules named in ``units`` become units, in that order, then the model itself.
            rank: This one.
            units: None: its blocks, or layers.
            strategy: As the wrapper calls it; NO_SHARD is ``replicate``, SHARD_GRAD_OP ``reshard_after_forward=False``.
            mesh: None: all ranks, cut into two replicas by hybrid strategies.
            options: Of this front end, as made by the methods below.
        """
        if mesh is None:
            mesh = rank.make_mesh(2, rank.world_size // 2) if "HYBRID" in strategy else rank.mesh
        shard = self._composed(strategy, mesh, options) if self.composable else self._wrapped(strategy, mesh, options)
        for unit in unit_names(model) if units is None else units:
            parent, _, name = unit.rpartition(".")
            holder = model.get_submodule(parent)
            setattr(holder, name, shard(holder.get_submodule(name)))
        return shard(model)

    def _composed(self, strategy: str, mesh: Any, options: dict[str, Any]) -> Callable[[nn.Module], nn.Module]:
        if strategy == "NO_SHARD":
            return lambda module: replicate(module, mesh=mesh, **options)
        if strategy in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2"):
            options.setdefault("reshard_after_forward", False)
        if self.name == "ragged":
            options = {"layout": "ragged", "granularity": "row", **options}
        return lambda module: fully_shard(module, mesh=mesh, **options)

    def _wrapped(self, strategy: str, mesh: Any, options: dict[str, Any]) -> Callable[[nn.Module], nn.Module]:
        options["use_orig_params"] = not self.flat
        chosen = ShardingStrategy[strategy]
        return lambda module: FSDP(module, device_mesh=mesh, sharding_strategy=chosen, **options)

    def precision(
        self,
        param: torch.dtype | None = None,
        reduce: torch.dtype | None = None,
        *,
        cast_inputs: bool = True,
    ) -> dict[str, Any]:
        """Options for mixed precision: compute in ``param``, reduce in ``reduce``, cast the inputs of all units."""
        if self.composable:
            return {"mp_policy": MixedPrecisionPolicy(param, reduce, cast_forward_inputs=cast_inputs)}
        casts = {"cast_forward_inputs": cast_inputs, "cast_root_forward_inputs": cast_inputs}
        return {"mixed_precision": MixedPrecision(param, reduce, **casts)}

    def offload(self) -> dict[str, Any]:
        """Options for parameters and gradients in CPU memory."""
        if self.composable:
            return {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
        return {"cpu_offload": CPUOffload(offload_params=True)}

    def ignoring(self, parameters: Iterable[nn.Parameter]) -> dict[str, Any]:
        """Options for parameters that are left to their owner."""
        return {"ignored_params" if self.composable else "ignored_states": set(parameters)}

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Do not reduce gradients in backwards inside."""
        if not self.composable:
            with model.no_sync():
                yield
            return
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    def clip(self, model: Any, norm: float, kind: float = 2.0) -> torch.Tensor:
        """Clip the gradients of the whole model; the norm that they had."""
        if not self.composable:
            return model.clip_grad_norm_(norm, kind)
        found = nn.utils.clip_grad_norm_(model.parameters(), norm, kind)
        return found.full_tensor() if isinstance(found, DTensor) else found


COMPOSABLE, ORIGINAL, FLAT, RAGGED = (FrontEnd(name) for name in ("composable", "original", "flat", "ragged"))
FRONT_ENDS = (COMPOSABLE, ORIGINAL, FLAT, RAGGED)
each_front_end = pytest.mark.parametrize("front_end", FRONT_ENDS, ids=str)


def unwrapped(module: nn.Module) -> Any:
    """The module of the user, which is below the wrapper, if there is one."""
    return module.module if isinstance(module, FSDP) else module


def unit_names(model: nn.Module) -> list[str]:
    """Names of the blocks or layers of a model."""
    for name in ("blocks", "layers"):
        if (held := getattr(model, name, None)) is not None:
            return [f"{name}.{index}" for index in range(len(held))]
    return [name for name, _ in model.named_children()] if isinstance(model, nn.Sequential) else []


def build(make: Callable[..., nn.Module], *args: Any, seed: int = 4, **kwargs: Any) -> Any:
    """What ``make`` makes, with the same values on all ranks."""
    torch.manual_seed(seed)
    return make(*args, **kwargs)


def sharded_with_reference(
    front_end: FrontEnd, rank: Rank, model: nn.Module, units: Sequence[str] | None = None, **options: Any
) -> tuple[Any, Any]:
    """``model`` sharded, and an unsharded copy of it."""
    reference = copy.deepcopy(model)
    return front_end.wrap(model, rank, units, **options), reference


def wrapped(model: nn.Module, rank: Rank, **options: Any) -> FSDP:
    """A copy of ``model`` in the wrapper, by a policy: one unit per block (or layer), and the root."""
    classes = {Block} if any(isinstance(m, Block) for m in model.modules()) else {nn.Linear}
    if "device_mesh" not in options and "process_group" not in options:
        options["device_mesh"] = rank.mesh
    options.setdefault("auto_wrap_policy", ModuleWrapPolicy(classes))
    return FSDP(copy.deepcopy(model), **options)


# -------------------------------------------------------------------- full values


def full(tensor: torch.Tensor) -> torch.Tensor:
    """All of a sharded tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a sharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_values(model: nn.Module) -> Values:
    """All parameters by FQN, full, of a model whose units may come from any front end. All ranks call it."""
    with FSDP.summon_full_params(model, writeback=False):
        return {fqn_of(n): full(p.detach()).clone() for n, p in model.named_parameters(remove_duplicate=False)}


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """As :func:`full_values`, of the gradients."""
    if not any(isinstance(module, FSDP) for module in model.modules()):
        named = dict(model.named_parameters(remove_duplicate=False))
        return {fqn_of(n): None if p.grad is None else full(p.grad).detach().clone() for n, p in named.items()}
    with FSDP.summon_full_params(model, writeback=False, with_grads=True):
        return {
            fqn_of(n): None if p.grad is None else p.grad.detach().clone()
            for n, p in model.named_parameters(remove_duplicate=False)
        }


def assert_same_values(model: nn.Module, reference: nn.Module, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Require all parameters to agree; bitwise without tolerances."""
    actual, expected = full_values(model), full_values(reference)
    assert set(actual) == set(expected)
    for name, value in expected.items():
        assert_within(actual[name], value, name, rtol, atol)


def assert_same_gradients(model: nn.Module, reference: nn.Module, *, rtol: float = 1e-4, atol: float = 1e-6) -> None:
    """Require all gradients to agree within the tolerances, bitwise without.

    None of the reference has to be None, or zero in a flat parameter, of which other parts have gradients.
    """
    actual, expected = full_gradients(model), full_gradients(reference)
    assert set(actual) == set(expected)
    flat = any(isinstance(parameter, FlatParameter) for parameter in model.parameters())
    for name, value in expected.items():
        found = actual[name]
        if value is None:
            assert found is None or (flat and not found.any()), f"{name}: expected no gradient"
        else:
            assert found is not None, f"{name}: no gradient"
            assert_within(found, value, f"gradient of {name}", rtol, atol)


# -------------------------------------------------------------------- training


def sgd(model: nn.Module, rate: float, **options: Any) -> torch.optim.SGD:
    """Plain SGD. Not foreach, which torch takes on accelerators, where plain tensors are beside DTensors: it raises."""
    kinds = {isinstance(parameter, DTensor) for parameter in model.parameters()}
    return torch.optim.SGD(model.parameters(), lr=rate, foreach=False if len(kinds) > 1 else None, **options)


def adam(parameters: Any, **settings: Any) -> torch.optim.Optimizer:
    """AdamW whose steps do not blow up the rounding of gradients that are nearly zero."""
    return torch.optim.AdamW(parameters, **{"lr": 1e-2, "eps": 1e-3, **settings})


def step_and_clear(*optimizers: torch.optim.Optimizer) -> None:
    """Step, and set gradients to None."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def train(
    model: nn.Module, rank: Rank, loss_at: Callable[[int], LossOf], steps: int = 10, rate: float = EXACT_RATE
) -> torch.Tensor:
    """Train with SGD; this rank's losses, one per step."""
    optimizer = sgd(model, rate)
    losses = []
    for step in range(steps):
        loss = loss_at(step)(model, rank.rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        losses.append(loss.detach())
    return torch.stack(losses)


def train_reference(
    model: nn.Module, rank: Rank, loss_at: Callable[[int], LossOf], steps: int = 10, rate: float = EXACT_RATE
) -> torch.Tensor:
    """As :func:`train`, unsharded, on the data of all ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    losses = []
    for step in range(steps):
        losses.append(reference_backward(model, rank.world_size, loss_at(step))[rank.rank])
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return torch.stack(losses)


def both_backward(model: nn.Module, reference: nn.Module, rank: Rank, loss_of: LossOf) -> None:
    """Add the gradients of one microbatch to both, and require its losses to agree."""
    loss = loss_of(model, rank.rank)
    loss.backward()
    expected = reference_backward(reference, rank.world_size, loss_of)[rank.rank]
    assert_close(loss.detach(), expected, "loss", rtol=1e-4, atol=1e-6)


def assert_trains_alike(
    model: Any,
    reference: Any,
    rank: Rank,
    loss_at: Callable[[int], LossOf] = square_loss,
    *,
    steps: int = 3,
    optimizers: Sequence[torch.optim.Optimizer] | None = None,
    rtol: float = 1e-4,
    atol: float = 1e-6,
) -> None:
    """Train both, and require the losses, the gradients of each step, and the parameters in the end to agree."""
    if optimizers is None:
        optimizers = [sgd(m, 0.1, momentum=0.9) for m in (model, reference)]
    for step in range(steps):
        loss = loss_at(step)(model, rank.rank)
        loss.backward()
        expected = reference_backward(reference, rank.world_size, loss_at(step))[rank.rank]
        assert_close(loss.detach(), expected, f"loss of step {step}", rtol=max(rtol, 1e-4), atol=atol)
        assert_same_gradients(model, reference, rtol=rtol, atol=atol)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    assert_at_rest(model)
    assert_same_values(model, reference, rtol=rtol, atol=atol)


def token_loss(step: int = 0) -> LossOf:
    """Cross entropy of the logits for the very tokens that went in."""

    def loss_of(model: nn.Module, rank: int) -> torch.Tensor:
        ids = torch.randint(13, (2, 5), generator=torch.Generator().manual_seed(1000 * step + rank))
        return nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())

    return loss_of


# -------------------------------------------------------------------- what is unsharded


def assert_at_rest(model: nn.Module, *unsharded: str) -> None:
    """Require that no phase is open, and that only the units ``unsharded`` have and show unsharded parameters."""
    for unit in nested_units(model):
        assert unit.phase is Phase.IDLE, unit.name
        assert unit.registration.unsharded is (unit.name in unsharded), unit.name
    assert gathered(model) == list(unsharded)


def gathered(model: nn.Module) -> list[str]:
    """Names of the units that hold memory for full parameters."""
    return [unit.name for unit in nested_units(model) if any(held_bytes(bucket) for bucket in unit.buckets)]


# -------------------------------------------------------------------- order of events


class Events(list[str]):
    """Collects "gather UNIT", "reduce UNIT" (root: "root") between the marks that the model makes itself.

    A reduction of several messages counts once.
    """

    def __enter__(self) -> Events:
        PROGRESS.observers.append(self.noted)
        self.clear()
        return self

    def __exit__(self, *_: object) -> None:
        PROGRESS.observers.remove(self.noted)

    def noted(self, _: object, collectives: Sequence[Collective]) -> None:
        """Note the collectives of an event."""
        for collective in collectives:
            event = f"{collective.kind} {collective.unit or 'root'}"
            if self[-1:] != [event]:
                self.append(event)

    def short(self) -> str:
        """ "gather blocks.1" becomes G1, forward F1, backward B1, between b1, reduce R1; root: Gr, Rr; first: Bf."""
        letters = []
        for event in self:
            kind, name = event.split()
            letter = {"between": "b", "all_gather": "G"}.get(kind, kind[0].upper())
            letters.append(letter + {"root": "r", "first": "f"}.get(name, fqn_of(name).removeprefix("blocks.")))
        return " ".join(letters)
