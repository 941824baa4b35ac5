"""``apply``, and the methods of the wrapper that look inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from wrapped import (
    DIM,
    PLAIN,
    Block,
    Net,
    assert_states_equal,
    backward,
    both_backward,
    both_forms,
    built,
    check_gradients,
    wrapped,
)

from compare import assert_equal, assert_models_equal
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy, fully_shard
from fullshard.activation_checkpoint import checkpoint_wrapper
from pairwise import each_value
from ranks import Rank, on_ranks

# ---------------------------------------------------------------- apply


def fill(module: nn.Module) -> None:
    """Random values, and a buffer."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight)
    elif isinstance(module, Block):
        module.offset.fill_(0.5)
        nn.init.constant_(module.scale, 2.0)


@on_ranks(2)
@each_value(strategy=PLAIN, orig=[False, True])
def test_apply(rank: Rank, strategy: ShardingStrategy, orig: bool) -> None:
    """Functions see unsharded parameters of every module once, and write what they would have before wrapping."""
    model, reference = wrapped(rank, strategy, use_orig_params=orig)
    seen: list[nn.Module] = []
    for module in (model, reference):
        torch.manual_seed(3)
        assert module.apply(lambda m: (seen.append(m), fill(m))[0]) is module
    mine = seen[: len(list(model.modules()))]
    assert len(mine) == len(set(mine)) and {id(m) for m in mine} == {id(m) for m in model.modules()}
    assert_states_equal(model, reference)
    for module in (nn.Sequential(model), reference):
        torch.manual_seed(4)
        module.apply(fill)
    assert_states_equal(model, reference)


@on_ranks(2)
def test_apply_that_fails(rank: Rank) -> None:
    """If the function raises, the unit that it was in is as before, and all run."""
    model, reference = wrapped(rank)

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
    backward(rank, model)


# ---------------------------------------------------------------- looking inside


@on_ranks(2)
@pytest.mark.parametrize("inner_first", [True, False])
def test_roots(rank: Rank, inner_first: bool) -> None:
    """Which wrappers are roots follows from the modules, whoever is asked first, before or after a step."""
    model, reference = wrapped(rank)
    blocks = list(model.module.blocks)
    wrappers = [*blocks, model] if inner_first else [model, *blocks]
    if inner_first:
        blocks[0](torch.ones(1, DIM)).sum().backward()
        model.zero_grad()
        backward(rank, model)
        model.zero_grad()
    for _ in range(2):
        assert [w.check_is_root() for w in wrappers] == [w is model for w in wrappers]
        both_backward(rank, model, reference)
        check_gradients(model, reference)
    late = FSDP(nn.Linear(DIM, DIM))
    assert late.check_is_root()
    around = FSDP(nn.Sequential(late, nn.Linear(DIM, 2)))
    assert not late.check_is_root() and around.check_is_root()
    below = FSDP(nn.Linear(DIM, DIM))
    outer = fully_shard(nn.Sequential(below, nn.Linear(DIM, 2)), mesh=rank.mesh)
    if inner_first:
        outer(torch.ones(1, DIM)).sum().backward()
    assert not below.check_is_root()
    assert FSDP.fsdp_modules(model) == [model, *blocks]
    assert FSDP.fsdp_modules(model, root_only=True) == [model]
    assert FSDP.fsdp_modules(model.module) == blocks
    assert FSDP.fsdp_modules(model.module, root_only=True) == []
    siblings = nn.ModuleList([FSDP(nn.Linear(2, 2)), nn.Linear(2, 2), FSDP(nn.Linear(2, 2))])
    assert FSDP.fsdp_modules(siblings, root_only=True) == [siblings[0], siblings[2]]
    assert FSDP.fsdp_modules(nn.Linear(2, 2)) == []


@on_ranks(1)
def test_module_and_forwarding(rank: Rank) -> None:
    """``.module`` is the wrapped one, below a checkpoint wrapper, too; attributes, methods and indices are its own."""
    inner = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    inner.note = "mine"
    model = FSDP(inner)
    assert model.module is inner
    assert model.note == "mine"  # type: ignore[comparison-overlap]
    assert model[0] is inner[0] and model[-1] is inner[2]
    assert list(model) == list(inner)  # type: ignore[call-overload]
    assert isinstance(model[1:], nn.Sequential) and len(model[1:]) == 2
    checkpointed: Any = FSDP(checkpoint_wrapper(Net()))
    assert isinstance(checkpointed.module, Net)
    assert checkpointed.last.out_features == 3
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = model.nothing_of_the_kind
    assert not hasattr(model, "nothing_of_the_kind")
    with pytest.raises(TypeError):
        _ = FSDP(nn.Linear(2, 2))[0]
    whole: Any = FSDP(Net())
    assert whole.run.__self__ is whole.module and whole.forward.__self__ is whole
    assert whole.training and not whole.eval().training and not whole.module.blocks[0].training


@on_ranks(2)
@both_forms
def test_names(rank: Rank, orig: bool) -> None:
    """Outside, names show the wrappers; inside of summon they are those of before, with prefixes and options."""
    model, reference = wrapped(rank, use_orig_params=orig)
    outside = [name for name, _ in model.named_parameters()]
    wrap = "_fsdp_wrapped_module."
    expected = [
        wrap + name.replace("blocks.0.", f"blocks.0.{wrap}").replace("blocks.1.", f"blocks.1.{wrap}")
        for name, _ in reference.named_parameters()
    ]
    flat = [f"{wrap}_flat_param", f"{wrap}blocks.0.{wrap}_flat_param", f"{wrap}blocks.1.{wrap}_flat_param"]
    assert outside == expected if orig else sorted(outside) == sorted(flat)
    assert next(name for name, _ in model.named_buffers()) == wrap + "steps"
    calls: list[Callable[[nn.Module], Any]] = [
        lambda m: m.named_parameters(),
        lambda m: m.named_buffers(),
        lambda m: m.named_parameters(prefix="model"),
        lambda m: m.named_buffers(prefix="model", remove_duplicate=False),
    ]
    with FSDP.summon_full_params(model):
        for call in calls:
            assert [name for name, _ in call(model)] == [name for name, _ in call(reference)]
        assert list(model.named_parameters("model", recurse=False)) == []  # the wrapper itself has none
    assert [name for name, _ in model.named_parameters()] == outside
    both = FSDP(nn.Sequential(checkpoint_wrapper(FSDP(nn.Linear(2, 2))), FSDP(checkpoint_wrapper(nn.Linear(2, 2)))))
    with FSDP.summon_full_params(both):
        assert [name for name, _ in both.named_parameters()] == ["0.weight", "0.bias", "1.weight", "1.bias"]


@on_ranks(2)
@both_forms
def test_containers_warn_and_keep_their_parameters(rank: Rank, orig: bool) -> None:
    """A list of modules that is wrapped itself warns; its parameters are those of a unit, saved as ever."""
    plain = built(lambda: nn.ModuleList([nn.Linear(6, 3), nn.Linear(3, 2)]))
    expected = {name: value.clone() for name, value in plain.state_dict().items()}
    with pytest.warns(UserWarning, match="ModuleList has no forward"):
        model = FSDP(plain, use_orig_params=orig)
    for name, value in model.state_dict().items():
        assert_equal(value, expected[name], name)
