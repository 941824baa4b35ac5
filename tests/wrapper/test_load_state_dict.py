"""``load_state_dict()`` of wrappers with full state, and files."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from wrapped import (
    DIM,
    FULL,
    GRAD_OP,
    NO_SHARD,
    Net,
    assert_dicts_equal,
    assert_freed,
    assert_same_outputs,
    backward,
    both_forms,
    check_gradients,
    check_steps,
    on_cpu,
    other_net,
    reference_backward,
    train,
    wrapped,
)

from compare import assert_equal, assert_models_equal
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import (
    ShardingStrategy,
    fully_shard,
)
from pairwise import pairwise
from ranks import Rank, on_ranks

# ---------------------------------------------------------------- loading


@on_ranks(2)
@pairwise(strategy=[FULL, GRAD_OP, NO_SHARD], orig=[False, True], assign=[False, True])
def test_load_from_plain(rank: Rank, strategy: ShardingStrategy, orig: bool, assign: bool) -> None:
    """A plain model's state, also with ``assign``; the optimizer's parameters stay the model's."""
    model, _ = wrapped(rank, strategy, use_orig_params=orig)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = [id(p) for p in model.parameters()]
    other = other_net()
    state = other.state_dict()
    keys = list(state)
    result = model.load_state_dict(state, assign=assign)
    assert result.missing_keys == result.unexpected_keys == []
    assert list(state) == keys, "the user's dictionary is as it was"
    assert [id(p) for p in model.parameters()] == ids
    assert_dicts_equal(model.state_dict(), copy.deepcopy(state))
    assert_freed(model)
    batches = [torch.full((2, DIM), float(r)) for r in range(rank.world_size)]
    model(batches[rank.rank]).square().mean().backward()
    optimizer.step()
    (sum(other(x).square().mean() for x in batches) / rank.world_size).backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert_same_outputs(rank, model, other)


@on_ranks(2)
@both_forms
def test_load_between_microbatches(rank: Rank, orig: bool) -> None:
    """Gradients, and those that wait for a later microbatch, are as they were before the load.

    Loading counts for the next step, whatever is kept unsharded; values of another dtype are converted.
    """
    model, reference = wrapped(rank, GRAD_OP, use_orig_params=orig)
    backward(rank, model, 0)
    with model.no_sync():
        backward(rank, model, 1)
    model(torch.ones(1, DIM))
    model.load_state_dict(reference.state_dict())
    backward(rank, model, 2)
    reference_backward(rank, reference, 0, 1, 2)
    check_gradients(model, reference)
    model.zero_grad()
    model(torch.ones(1, DIM))
    state = {n: v.double() if v.is_floating_point() else v for n, v in other_net().state_dict().items()}
    model.load_state_dict(state)
    other = other_net()
    assert_same_outputs(rank, model, other)
    check_steps(rank, model, other)
    assert {n: v.dtype for n, v in model.state_dict().items()} == {n: v.dtype for n, v in other.state_dict().items()}


@on_ranks(2)
def test_load_that_differs(rank: Rank) -> None:
    """Each rank keeps its own slice of what it loads, as of what it writes in ``summon_full_params``."""
    model, _ = wrapped(rank)
    nets = [other_net(r) for r in range(rank.world_size)]
    model.load_state_dict(nets[rank.rank].state_dict())
    state = model.state_dict()
    states: list[Any] = [None] * rank.world_size
    dist.all_gather_object(states, {name: value.cpu() for name, value in state.items()})
    first, last = "first.weight", "last.bias"  # the ends of the root's concatenation
    for found in states:
        assert_equal(found[first], nets[0].first.weight.detach().cpu(), first)
        assert_equal(found[last], nets[-1].last.bias.detach().cpu(), last)
    assert_equal(state["steps"], nets[rank.rank].steps, "buffers are not sharded")


def names_in(error: BaseException) -> str:
    assert "_fsdp_wrapped_module" not in str(error), str(error)
    assert "_flat_param" not in str(error), str(error)
    return str(error)


@on_ranks(2)
@pytest.mark.parametrize(("orig", "plain_root"), [(False, False), (True, True)])
def test_missing_and_unexpected(rank: Rank, orig: bool, plain_root: bool) -> None:
    """Names in results and errors are the user's; what fits is loaded."""
    inner, _ = wrapped(rank, use_orig_params=orig)
    model: nn.Module = nn.Sequential(inner) if plain_root else inner
    prefix = "0." if plain_root else ""
    other = other_net()
    state: Any = other.state_dict(prefix=prefix)
    dropped = state.pop(f"{prefix}parts.1.up.weight")
    del state[f"{prefix}steps"]
    state[f"{prefix}parts.0.extra"] = torch.ones(1)
    state[f"{prefix}nothing.weight"] = torch.ones(1)
    result = model.load_state_dict(state, strict=False)
    assert sorted(result.missing_keys) == [f"{prefix}parts.1.up.weight", f"{prefix}steps"]
    assert sorted(result.unexpected_keys) == [f"{prefix}nothing.weight", f"{prefix}parts.0.extra"]
    with pytest.raises(RuntimeError, match=r"parts\.1\.up\.weight") as caught:
        model.load_state_dict(state)
    assert "parts.0.extra" in names_in(caught.value)
    assert_freed(model)
    loaded = inner.state_dict()
    assert_equal(loaded["parts.1.down.weight"], other.parts[1].down.weight.detach(), "what was there")
    assert not torch.equal(loaded["parts.1.up.weight"], dropped)
    model.load_state_dict(other.state_dict(prefix=prefix))
    assert_dicts_equal(inner.state_dict(), other.state_dict())


@on_ranks(2)
@both_forms
def test_what_does_not_fit(rank: Rank, orig: bool) -> None:
    """A wrong shape is torch's error with the user's name, as are values that are no tensors, and no dictionaries.

    The model can be used and loaded afterwards.
    """
    model, reference = wrapped(rank, use_orig_params=orig)
    wrong = {"parts.1.up.weight": torch.ones(2, 2), "last.bias": torch.ones(4)}
    with pytest.raises(RuntimeError, match=r"size mismatch") as caught:
        model.load_state_dict({**reference.state_dict(), **wrong})
    assert "size mismatch for parts.1.up.weight" in names_in(caught.value)
    with pytest.raises(RuntimeError, match=r"first\.weight"):
        model.load_state_dict({**reference.state_dict(), "first.weight": "text"})
    with pytest.raises(TypeError):
        model.load_state_dict([1])  # type: ignore[arg-type]
    check_steps(rank, model, reference)
    assert_same_outputs(rank, model, reference)
    model.load_state_dict(other_net().state_dict())
    assert_dicts_equal(model.state_dict(), other_net().state_dict())


@on_ranks(2)
def test_frozen_and_strided(rank: Rank) -> None:
    """Frozen parameters stay frozen, channels-last ones keep their strides, whatever is loaded."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 2, 3)).to(memory_format=torch.channels_last)
    model[0].requires_grad_(False)
    reference = copy.deepcopy(model)
    outer = FSDP(model, use_orig_params=True)
    state = outer.state_dict()
    assert_dicts_equal(state, reference.state_dict())
    assert [value.stride() for value in state.values()] == [v.stride() for v in reference.state_dict().values()]
    new = {name: torch.randn(value.shape, generator=torch.Generator().manual_seed(1)) for name, value in state.items()}
    outer.load_state_dict(new)
    assert_dicts_equal(outer.state_dict(), new)
    assert [p.requires_grad for p in outer.parameters()] == [False, False, True, True]


@on_ranks(2)
def test_with_the_other_front_end_inside(rank: Rank) -> None:
    """A fully sharded part keeps its own kind of state; loading what was saved restores all."""
    model = Net()
    fully_shard(model.parts[0], mesh=rank.mesh)
    outer = FSDP(model, sync_module_states=True)
    state = copy.deepcopy(outer.state_dict())
    assert list(state) == list(Net().state_dict())
    x = torch.ones(2, DIM)
    with torch.no_grad():
        before = outer(x)
    train(rank, outer)
    outer.load_state_dict(state)
    with torch.no_grad():
        assert_equal(outer(x), before, "outputs")


# ---------------------------------------------------------------- files


@on_ranks(2)
@pytest.mark.parametrize(("strategy", "orig"), [(FULL, False), (FULL, True), (NO_SHARD, True)])
def test_files(rank: Rank, strategy: ShardingStrategy, orig: bool, tmp_path: Path) -> None:
    """Each rank's state goes through ``torch.save`` and safetensors, at no more bytes than a plain model's.

    A plain model and a wrapper in another form load it.
    """
    model, reference = wrapped(rank, strategy, use_orig_params=orig)
    check_steps(rank, model, reference)
    state = model.state_dict()
    mine, theirs = io.BytesIO(), io.BytesIO()
    torch.save(state, mine)
    torch.save(reference.state_dict(), theirs)
    assert len(mine.getvalue()) <= len(theirs.getvalue()) + 1024
    mine.seek(0)
    assert_dicts_equal(torch.load(mine, weights_only=True), state)
    path = tmp_path / f"{rank.rank}.safetensors"
    save_file(state, path)
    loaded = load_file(path)
    assert_dicts_equal({name: loaded[name] for name in state}, on_cpu(state))
    other = FSDP(Net(), use_orig_params=not orig)
    other.load_state_dict(loaded)
    assert_same_outputs(rank, other, model)
    plain = Net()
    plain.load_state_dict(loaded)
    with FSDP.summon_full_params(model, writeback=False):
        assert_models_equal(model, plain)
