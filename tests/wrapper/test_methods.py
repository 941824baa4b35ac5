"""``apply``, and the methods of the wrapper that look inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from wrapped import (
    DIM,
    Net,
    Part,
    assert_same_outputs,
    backward,
    both_forms,
    check_gradients,
    plain_strategies,
    reference_backward,
    wrapped,
)

from compare import assert_equal, assert_models_equal
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import (
    ShardingStrategy,
    fully_shard,
)
from fullshard.activation_checkpoint import checkpoint_wrapper
from ranks import Rank, on_ranks

# ---------------------------------------------------------------- apply


def fill(module: nn.Module) -> None:
    """Values that depend on the module's shape only, and a buffer."""
    if isinstance(module, nn.Linear):
        with torch.no_grad():
            module.weight.copy_(torch.arange(module.weight.numel()).view(module.weight.shape) / 100)
            nn.init.constant_(module.bias, 0.25) if module.bias is not None else None
    elif isinstance(module, Part):
        module.offset.fill_(0.5)
        nn.init.constant_(module.scale, 2.0)


@on_ranks(2)
@plain_strategies
@both_forms
def test_apply(rank: Rank, strategy: ShardingStrategy, orig: bool) -> None:
    """Functions see full parameters of every module once, and what they write is kept."""
    model, reference = wrapped(rank, strategy, use_orig_params=orig)
    seen: list[nn.Module] = []
    assert model.apply(lambda m: (seen.append(m), fill(m))[0]) is model
    assert len(seen) == len(set(seen)) and {id(m) for m in seen} == {id(m) for m in model.modules()}
    reference.apply(fill)
    backward(rank, model, 0)
    reference_backward(rank, reference, 0)
    check_gradients(model, reference)


@on_ranks(2)
def test_apply_random_init(rank: Rank) -> None:
    """With equal seeds, random initialisation gives what it gives before wrapping."""
    model, reference = wrapped(rank)

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)

    for module in (model, reference):
        torch.manual_seed(3)
        module.apply(init)
    assert_same_outputs(rank, model, reference)


@on_ranks(2)
def test_apply_from_above_and_errors(rank: Rank) -> None:
    """A module above the wrapper can be applied to; if the function raises, its unit is as before, and all run."""
    model, reference = wrapped(rank)
    nn.Sequential(model).apply(fill)
    reference.apply(fill)
    assert_same_outputs(rank, model, reference)

    def fail(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.zeros_(parameter)
        if module is model.module:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        model.apply(fail)
    with FSDP.summon_full_params(model, writeback=False):
        for name in ("first", "last"):
            assert_models_equal(getattr(model.module, name), getattr(reference, name))
    backward(rank, model, 0)


# ---------------------------------------------------------------- looking inside


@on_ranks(2)
def test_fsdp_modules_and_roots(rank: Rank) -> None:
    """All wrappers in order, or those that no other contains; asking changes nothing."""
    model, _ = wrapped(rank)
    parts = list(model.module.parts)
    assert FSDP.fsdp_modules(model) == [model, *parts]
    assert FSDP.fsdp_modules(model, root_only=True) == [model]
    assert FSDP.fsdp_modules(model.module) == parts
    assert FSDP.fsdp_modules(model.module, root_only=True) == []
    siblings = nn.ModuleList([FSDP(nn.Linear(2, 2)), nn.Linear(2, 2), FSDP(nn.Linear(2, 2))])
    assert FSDP.fsdp_modules(siblings, root_only=True) == [siblings[0], siblings[2]]
    assert FSDP.fsdp_modules(nn.Linear(2, 2)) == []


@on_ranks(2)
@pytest.mark.parametrize("inner_first", [True, False])
def test_check_is_root(rank: Rank, inner_first: bool) -> None:
    """Whoever is asked first, before or after a step: the answer is about the modules, and asking changes nothing."""
    model, reference = wrapped(rank)
    wrappers = [*model.module.parts, model] if inner_first else [model, *model.module.parts]
    for _ in range(2):
        assert [w.check_is_root() for w in wrappers] == [w is model for w in wrappers]
        backward(rank, model, 0)
        reference_backward(rank, reference, 0)
        check_gradients(model, reference)
    late = FSDP(nn.Linear(DIM, DIM))
    assert late.check_is_root()
    around = FSDP(nn.Sequential(late, nn.Linear(DIM, 2)))
    assert not late.check_is_root() and around.check_is_root()


@on_ranks(2)
@pytest.mark.parametrize("ran", [False, True], ids=["fresh", "ran"])
def test_check_is_root_below_the_other_front_end(rank: Rank, ran: bool) -> None:
    """A wrapper inside of a fully sharded module is no root."""
    inner = FSDP(nn.Linear(DIM, DIM))
    outer = fully_shard(nn.Sequential(inner, nn.Linear(DIM, 2)), mesh=rank.mesh)
    if ran:
        outer(torch.ones(1, DIM)).sum().backward()
    assert not inner.check_is_root()


@on_ranks(2)
def test_a_part_that_ran_alone(rank: Rank) -> None:
    """An inner wrapper that is used first, by itself, is no root once the whole model runs."""
    model, reference = wrapped(rank)
    part = model.module.parts[0]
    part(torch.ones(1, DIM)).sum().backward()
    part.zero_grad()
    part.state_dict()
    backward(rank, model, 0)
    assert model.check_is_root() and not part.check_is_root()
    reference_backward(rank, reference, 0)
    check_gradients(model, reference)


@on_ranks(2)
def test_module_and_forwarding(rank: Rank) -> None:
    """``.module`` is the wrapped one, below a checkpoint wrapper, too; attributes and indices are its own."""
    inner = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    inner.note = "mine"
    model = FSDP(inner)
    assert model.module is inner
    assert model.note == "mine"  # type: ignore[comparison-overlap]
    assert model[0] is inner[0] and model[-1] is inner[2]
    assert list(model) == list(inner)  # type: ignore[call-overload]
    assert isinstance(model[1:], nn.Sequential) and len(model[1:]) == 2
    checkpointed = FSDP(checkpoint_wrapper(Net()))
    assert isinstance(checkpointed.module, Net)
    assert checkpointed.last.out_features == 3
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = model.nothing_of_the_kind
    assert not hasattr(model, "nothing_of_the_kind")
    with pytest.raises(TypeError):
        _ = FSDP(nn.Linear(2, 2))[0]


@on_ranks(2)
def test_own_methods_of_the_module(rank: Rank) -> None:
    """Methods are found through the wrapper; what the wrapper has itself is its own."""
    model, _ = wrapped(rank)
    assert model.run.__self__ is model.module  # type: ignore[union-attr]
    assert model.training and not model.eval().training and not model.module.training
    assert model.forward.__self__ is model
    model.train()
    assert model.module.parts[0].module.training


@on_ranks(2)
@both_forms
def test_names(rank: Rank, orig: bool) -> None:
    """Outside, names show the wrappers; inside of summon they are those of before, with prefixes and options."""
    model, reference = wrapped(rank, use_orig_params=orig)
    outside = [name for name, _ in model.named_parameters()]
    wrap = "_fsdp_wrapped_module."
    expected = [
        wrap + name.replace("parts.0.", f"parts.0.{wrap}").replace("parts.1.", f"parts.1.{wrap}")
        for name, _ in reference.named_parameters()
    ]
    flat = [f"{wrap}_flat_param", f"{wrap}parts.0.{wrap}_flat_param", f"{wrap}parts.1.{wrap}_flat_param"]
    assert outside == expected if orig else sorted(outside) == sorted(flat)
    assert next(name for name, _ in model.named_buffers()) == wrap + "steps"
    calls: list[Callable[[nn.Module], Any]] = [
        lambda m: m.named_parameters(),
        lambda m: m.named_buffers(),
        lambda m: m.named_parameters(prefix="model"),
        lambda m: m.named_parameters("model", recurse=False),
        lambda m: m.named_buffers(prefix="model", remove_duplicate=False),
    ]
    with FSDP.summon_full_params(model):
        for call in calls[:3] + calls[4:]:
            assert [name for name, _ in call(model)] == [name for name, _ in call(reference)]
        assert list(calls[3](model)) == []  # the wrapper itself has none
    assert [name for name, _ in model.named_parameters()] == outside


@on_ranks(2)
def test_names_with_checkpoint_wrappers(rank: Rank) -> None:
    """Inside of summon, names are free of checkpoint wrappers as well, in either order of wrapping."""
    reference = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = FSDP(nn.Sequential(checkpoint_wrapper(FSDP(nn.Linear(2, 2))), FSDP(checkpoint_wrapper(nn.Linear(2, 2)))))
    with FSDP.summon_full_params(model):
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in reference.named_parameters()]


@on_ranks(2)
@both_forms
def test_containers_warn_and_keep_their_parameters(rank: Rank, orig: bool) -> None:
    """A list of modules that is wrapped itself warns; its parameters are those of a unit, saved as ever."""
    plain = nn.ModuleList([nn.Linear(6, 3), nn.Linear(3, 2)])
    expected = {name: value.clone() for name, value in plain.state_dict().items()}
    with pytest.warns(UserWarning, match="ModuleList has no forward"):
        model = FSDP(plain, use_orig_params=orig)
    for name, value in model.state_dict().items():
        assert_equal(value, expected[name], name)
