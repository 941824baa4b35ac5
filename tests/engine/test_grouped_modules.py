"""Units of several modules together with everything else: ties, copies, checkpoints, failures, controls, roots."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from grouped_modules import (
    CLOSE,
    DIM,
    GROUPS,
    Language,
    count,
    grouped,
    grouped_with_reference,
    loss_at,
    loss_of_chunks,
    train,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from compare import assert_equal, assert_models_equal
from failing import fail, fail_in_backward
from fullshard import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from fullshard.comm import record
from fullshard.engine.ownership import nested_units, unit_of
from models import Block, assert_at_rest, batch, gathered, reference_backward, tokens
from pairwise import each_value
from ranks import Rank, on_ranks


@on_ranks(2)
@pytest.mark.parametrize("group", ["everything", "norm and head"])
def test_tied_weights(rank: Rank, group: str) -> None:
    """A weight that embedding and head share may be inside a group, or shared between a group and the root."""
    model, reference = grouped_with_reference(rank, group, tied=True)
    assert model.head.weight is model.embedding.weight
    train(rank, model, reference)
    assert model.head.weight is model.embedding.weight
    if group == "everything":
        model.mode = reference.mode = "no head"
        train(rank, model, reference, loss_of_chunks, steps=1)


@on_ranks(2)
@each_value(
    group=["norm and head", "embedding and last block", "first and last block", "everything"],
    setting=[True, False],
    around=["members", "all"],
)
def test_checkpointed_members(rank: Rank, group: str, setting: bool, around: str) -> None:
    """Members whose forward is recomputed in backward, one by one or with all that lies between them."""

    class Whole(Language):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, ids, use_reentrant=False)

    model = Whole() if around == "all" else Language()
    model.checkpointed = around == "members"
    reference = copy.deepcopy(model)
    grouped(rank, model, group, reshard_after_forward=setting)
    for mode in ("once", "chunks"):
        model.mode = reference.mode = mode
        train(rank, model, reference, steps=2)


# ---------------------------------------------------------------- copies and saved weights


@on_ranks(2)
@pytest.mark.parametrize("group", ["norm and head", "with an unused one"])
def test_deepcopy(rank: Rank, group: str) -> None:
    """The copy of a model has groups of its own: it trains alike, and the original does not see it."""
    model, reference = grouped_with_reference(rank, group)
    train(rank, model, reference, steps=1)
    twin = copy.deepcopy(model)
    members, copied = ([unit_of(module) for module in GROUPS[group](m)] for m in (model, twin))
    assert len({id(unit) for unit in copied}) == 1 and copied[0] is not members[0]
    assert len(nested_units(twin)) == len(nested_units(model))
    kept = copy.deepcopy(reference)
    train(rank, twin, reference, steps=1)
    assert_models_equal(model, kept, **CLOSE)
    train(rank, model, kept, steps=1)


@on_ranks(2)
def test_deepcopy_of_one_member(rank: Rank) -> None:
    """Copying one member alone takes the others along, so that the copy's unit is whole."""
    model, reference = grouped_with_reference(rank)
    head = copy.deepcopy(model.head)
    x = batch(rank.rank, 0, 3, DIM)
    assert torch.allclose(head(x), reference.head(x), atol=1e-6)
    head(x).sum().backward()
    assert head.weight.grad is not None and model.head.weight.grad is None
    train(rank, model, reference)


@on_ranks(2)
@pytest.mark.parametrize("mode", ["once", "no head"])
def test_state_dict(rank: Rank, mode: str) -> None:
    """Names are those of the plain model; values are the live shards; loading works, also into a part."""
    model, reference = grouped_with_reference(rank, "everything")
    model.mode = mode
    model(tokens(rank.rank, 0, 9))
    state = model.state_dict()
    assert list(state) == list(reference.state_dict())
    for name, value in reference.state_dict().items():
        assert_equal(state[name].full_tensor(), value, name)
    assert state["head.weight"].to_local().data_ptr() == model.head.weight.to_local().data_ptr()
    assert list(model.head.state_dict()) == ["weight"]
    doubled = {name: value.detach() * 2 for name, value in state.items()}
    model.load_state_dict(doubled)
    reference.load_state_dict({name: value * 2 for name, value in reference.state_dict().items()})
    model.head.load_state_dict({"weight": model.head.weight.detach() + 1})
    reference.head.weight.data += 1
    model.mode = "once"
    train(rank, model, reference)


@on_ranks(2)
@pytest.mark.parametrize("other", [torch.float64, torch.bfloat16], ids=str)
def test_other_dtype(rank: Rank, other: torch.dtype) -> None:
    """``to(dtype)`` of the model, or of one member, before training."""
    model, reference = grouped_with_reference(rank)
    for module in (model, reference):
        module.to(other)
    assert_models_equal(model, reference)
    assert all(p.dtype is other for p in model.parameters())
    train(rank, model.float(), reference.float())


@on_ranks(2)
def test_meta_device(rank: Rank) -> None:
    """A group made on the meta device is materialised as a whole."""
    reference = Language()
    with torch.device("meta"):
        model = Language()
    grouped(rank, model)
    model.to_empty(device="cpu")
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        local = ours.detach()
        rows = theirs.detach().chunk(rank.world_size)
        local.to_local().copy_(rows[rank.rank] if rank.rank < len(rows) else theirs.detach()[:0])
    train(rank, model, reference)


# ---------------------------------------------------------------- failures


FAILURES = {
    "first member, at its start": lambda m: m.norm.register_forward_pre_hook(fail),
    "first member, at its end": lambda m: m.norm.register_forward_hook(fail),
    "second member": lambda m: m.head.register_forward_pre_hook(fail),
    "between them": lambda m: m.blocks[1].register_forward_pre_hook(fail),
    "backward of the second": lambda m: m.head.register_forward_hook(fail_in_backward),
    "backward of the first": lambda m: m.norm.register_forward_hook(fail_in_backward),
    "backward between them": lambda m: m.blocks[1].register_forward_hook(fail_in_backward),
}


@on_ranks(2)
@each_value(group=["norm and head", "embedding, norm, head", "everything"], place=FAILURES, remedy=["reset", "alone"])
def test_failure_in_a_member(rank: Rank, group: str, place: str, remedy: str) -> None:
    """After an exception in a member, in forward or backward, the next step is as if it had not happened."""
    model, reference = grouped_with_reference(rank, group)
    parameters = list(model.parameters())
    for mode in ("once", "chunks"):
        model.mode = reference.mode = mode
        handle = FAILURES[place](model)
        with pytest.raises(ZeroDivisionError):
            loss_at(0)(model, rank.rank).backward()
        handle.remove()
        if remedy == "reset":
            model.reset_iter_state()
            assert_at_rest(model)
        elif not place.startswith("backward"):
            assert gathered(model) == []
        for parameter in parameters:
            parameter.grad = None
        train(rank, model, reference, steps=1)


@on_ranks(2)
def test_failure_in_a_member_called_alone(rank: Rank) -> None:
    """The same for a chunk that is called after the root's forward, and another model forward instead of it."""
    model, reference = grouped_with_reference(rank)
    model.mode = reference.mode = "no head"
    for _ in range(2):
        hidden = model(tokens(rank.rank, 0, 9))
        model.head(hidden)
        handle = model.head.register_forward_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            model.head(hidden)
        handle.remove()
        assert gathered(model) in ([], [""])
        train(rank, model, reference, loss_of_chunks, steps=1)


# ---------------------------------------------------------------- controls


@on_ranks(2)
def test_unshard_and_reshard(rank: Rank) -> None:
    """``unshard`` and ``reshard`` of any member are those of the whole group."""
    model, reference = grouped_with_reference(rank)
    model.head.unshard()
    assert_equal(model.norm.weight.detach(), reference.norm.weight.detach(), "full norm weight")
    assert_equal(model.head.weight.detach(), reference.head.weight.detach(), "full head weight")
    model.norm.reshard()
    assert_at_rest(model)
    handle = model.norm.unshard(async_op=True)
    handle.wait()
    assert type(model.head.weight) is nn.Parameter
    seen, loss = count(model, lambda: loss_at(0)(model, rank.rank))
    assert seen["all_gather norm"] == 0
    loss.backward()
    assert_at_rest(model)
    model.zero_grad()
    train(rank, model, reference)


@on_ranks(2)
def test_settings_of_one_member_are_the_groups(rank: Rank) -> None:
    """What is set on one member holds for all, also in lists of modules to prefetch."""
    model, reference = grouped_with_reference(rank)
    model.blocks[2].set_modules_to_forward_prefetch([model.head])
    model.norm.set_modules_to_backward_prefetch([model.blocks[2]])
    model.head.set_reshard_after_forward(False)
    model.norm.set_gradient_divide_factor(1.0)
    seen, loss = count(model, lambda: loss_at(0)(model, rank.rank))
    assert seen["all_gather norm"] == 1 and "norm" in gathered(model)
    seen, _ = count(model, loss.backward)
    assert seen["all_gather norm"] == 0
    reference_backward(reference, rank.world_size, loss_at(0))
    for module in (reference.norm, reference.head):
        for parameter in module.parameters():
            parameter.grad *= rank.world_size
    assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(2)
def test_mixed_precision(rank: Rank) -> None:
    """Every member casts its own inputs and outputs as the group's policy says."""
    model = Language()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    seen: list[torch.dtype] = []
    for module in (model.norm, model.head):
        module.register_forward_hook(lambda _m, args, output: seen.extend([args[0].dtype, output.dtype]))
    reference = copy.deepcopy(model)
    grouped(rank, model, mp_policy=policy)
    for mode, losses in (("once", loss_at), ("no head", loss_of_chunks)):
        model.mode = reference.mode = mode
        train(rank, model, reference, losses, steps=2, rtol=0.1, atol=0.01)
    assert set(seen[: len(seen) // 2]) <= {torch.bfloat16, torch.float32}
    seen.clear()
    model.head(model.norm(batch(0, 0, 2, DIM)))
    assert seen == [torch.bfloat16] * 4
    assert all(p.grad.dtype is torch.float32 for p in model.parameters() if p.grad is not None)


@on_ranks(2)
def test_method_of_a_member(rank: Rank) -> None:
    """A method that was registered as a forward of a member counts as a call of it."""

    class Encoder(nn.Linear):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return self(x).tanh()

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(4)
            self.first, self.second = Encoder(DIM, DIM), Block(DIM)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first.encode(x))

    model = Pair()
    reference = copy.deepcopy(model)
    fully_shard([model.first, model.second], mesh=rank.mesh)
    register_fsdp_forward_method(model.first, "encode")
    fully_shard(model, mesh=rank.mesh)
    train(rank, model, reference, lambda step: lambda m, r: m(batch(r, step, 3, DIM)).square().mean())


# ---------------------------------------------------------------- roots


class Plain(nn.Module):
    """Runs two layers, which may be a group, ``times`` over."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second, self.times = Block(DIM), nn.Linear(DIM, DIM), times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = self.second(self.first(x))
        return x


@on_ranks(1, 2)
@pytest.mark.parametrize(("times", "setting"), [(1, True), (3, None)])
def test_group_is_its_own_root(rank: Rank, times: int, setting: bool | None) -> None:
    """Without a unit above it a group trains right as well, with no module around it that knows of sharding."""
    model = Plain(times)
    reference = copy.deepcopy(model)
    fully_shard([model.first, model.second], mesh=rank.mesh, reshard_after_forward=setting)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(2):

        def loss(module: nn.Module, number: int, step: int = step) -> torch.Tensor:
            return module(batch(number, step, 3, DIM)).square().mean()

        with record() as seen:
            loss(model, rank.rank).backward()
        assert len([c for c in seen if c.kind == "reduce_scatter"]) == (rank.world_size > 1)
        reference_backward(reference, rank.world_size, loss)
        assert_models_equal(model, reference, grads=True, **CLOSE)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            x = batch(0, step, 3, DIM)
            assert torch.allclose(model(x), reference(x), atol=1e-6)


@on_ranks(2)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)], ids=str)
def test_group_of_roots_in_any_order(rank: Rank, order: tuple[int, ...]) -> None:
    """Members of a group without a unit above may be called in any order, and some of them not at all."""
    torch.manual_seed(6)
    model = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
    reference = copy.deepcopy(model)
    fully_shard(list(model), mesh=rank.mesh)

    def loss_of(modules: Any, number: int, some: tuple[int, ...]) -> torch.Tensor:
        x = batch(number, 0, 3, DIM)
        for index in some:
            x = modules[index](x)
        return x.square().mean()

    for some in (order, order[:2], order[:1], order + order):
        loss_of(model, rank.rank, some).backward()
        reference_backward(reference, rank.world_size, lambda m, r, some=some: loss_of(m, r, some))
        assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(2)
@pytest.mark.parametrize("ran", [False, True], ids=["before the first forward", "later"])
def test_member_is_taken_out(rank: Rank, ran: bool) -> None:
    """If a member, or a part of one, is replaced by another module, what is left of the group trains on."""
    model, reference = grouped_with_reference(rank, "embedding, norm, head")
    if ran:
        train(rank, model, reference)
    for one in (model, reference):
        one.norm = nn.Tanh()
        one.blocks[0].up = nn.Identity()
        one.blocks[0].down = nn.Identity()
    train(rank, model, reference)
