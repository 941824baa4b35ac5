"""Policies from end to end: what they wrap trains as the unsharded model; what fails leaves the module as it was."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity import (
    Block,
    Net,
    Snapshot,
    assert_states_alike,
    assert_trains_alike,
    batch,
    built,
    mean_square,
    units_of,
)
from torch import nn

from fullshard import (
    BackwardPrefetch,
    CPUOffload,
    FlatParameter,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
)
from fullshard.comm import record
from fullshard.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    _or_policy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)
from ranks import Rank, on_ranks

S = ShardingStrategy
F32, BF16 = torch.float32, torch.bfloat16
BLOCKS = ModuleWrapPolicy({Block})
MODES = pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
EACH_BLOCK = ["", "blocks.0", "blocks.1"]
LAYERS = [f"blocks.{i}.{name}" for i in range(2) for name in ("up", "down")]


def chosen_by(arguments: dict[int, Any]) -> CustomPolicy:
    """The arguments of modules by their ids."""
    return CustomPolicy(lambda module: arguments.get(id(module), False))


def is_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


def by_size(number: int, **options: Any) -> Callable[..., bool]:
    return functools.partial(size_based_auto_wrap_policy, min_num_params=number, **options)


POLICIES: dict[str, tuple[Any, list[str]]] = {
    "classes": (BLOCKS, EACH_BLOCK),
    "custom": (CustomPolicy(is_block), EACH_BLOCK),
    "lambda": (functools.partial(lambda_auto_wrap_policy, lambda_fn=is_block), EACH_BLOCK),
    "transformer": (functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}), EACH_BLOCK),
    "size": (by_size(80), EACH_BLOCK),  # a block has 103 elements, a layer at most 49
    "size of all": (by_size(10**6), [""]),
    "or": (
        functools.partial(_or_policy, policies=[BLOCKS, by_size(42)]),
        sorted(["", "first", *EACH_BLOCK[1:], *LAYERS]),
    ),
    "function": (lambda module, recurse, nonwrapped_numel: recurse or is_block(module), EACH_BLOCK),
    "nested": (ModuleWrapPolicy({Block, nn.Linear}), sorted(["", "first", "head", *EACH_BLOCK[1:], *LAYERS])),
    "nothing": (ModuleWrapPolicy(()), [""]),
}


@on_ranks(2)
@pytest.mark.parametrize("name", POLICIES)
def test_policies(rank: Rank, name: str) -> None:
    """Each kind of policy wraps what it says, and the model trains like the unsharded one."""
    policy, expected = POLICIES[name]
    use_orig_params = list(POLICIES).index(name) % 2 == 1
    model = built(Net)
    reference = copy.deepcopy(model)
    wrapped = FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=use_orig_params)
    assert sorted(units_of(wrapped)) == expected
    found = [m for m in wrapped.modules() if isinstance(m, FullyShardedDataParallel)]
    assert found == FullyShardedDataParallel.fsdp_modules(wrapped)
    assert_trains_alike(wrapped, reference, rank, microbatches=2, steps=2)


@on_ranks(2)
def test_every_module(rank: Rank) -> None:
    """Everything wrapped, containers too, which are still read as before; by a subclass with arguments of its own."""

    class Tagged(FullyShardedDataParallel):
        def __init__(self, module: nn.Module, tag: str, **options: Any) -> None:
            super().__init__(module, **options)
            self.tag = tag

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            assert self.tag == "outer"
            return super().forward(*args, **kwargs)

    model = built(Net)
    reference = copy.deepcopy(model)
    wrapped = Tagged(model, "outer", auto_wrap_policy=always_wrap_policy)
    names = [name for name, _ in reference.named_modules()]
    assert sorted(units_of(wrapped)) == sorted(names)
    assert wrapped.blocks[1].up.weight is not None and isinstance(wrapped.blocks, FullyShardedDataParallel)
    assert_trains_alike(wrapped, reference, rank, steps=2)


class Attention(nn.Module):
    """Torch's attention, which reads the weights of its output layer without running that, between other layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.heads = nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Linear(6, 6)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        x = self.attention(x, x, x, need_weights=False)[0]
        return self.heads["b"](self.heads["a"](x))


@on_ranks(2)
@MODES
def test_sizes(rank: Rank, use_orig_params: bool) -> None:
    """Attention is left whole to the unit above, lists and dicts are not units; with sets of one's own others are.

    What is ignored does not count, so that a module may not reach the threshold any more.
    """
    model = built(Attention)
    reference = copy.deepcopy(model)
    wrapped = FullyShardedDataParallel(model, auto_wrap_policy=by_size(40), use_orig_params=use_orig_params)
    assert sorted(units_of(wrapped)) == ["", "heads.a", "heads.b", "layers.0", "layers.1"]
    assert_trains_alike(wrapped, reference, rank, shape=(2, 3, 6))
    other = FullyShardedDataParallel(
        built(Attention),
        auto_wrap_policy=by_size(50, force_leaf_modules={nn.ModuleDict}, exclude_wrap_modules={nn.MultiheadAttention}),
    )
    assert sorted(units_of(other)) == ["", "layers"]
    model = built(Net)
    up = model.blocks[0].up
    wrapped = FullyShardedDataParallel(model, auto_wrap_policy=by_size(80), ignored_modules=[up])
    assert units_of(wrapped) == ["", "blocks.1"]
    assert up.weight.shape == (7, 6)
    mean_square(wrapped, batch(rank.rank, 0)).backward()
    assert up.weight.grad is not None


# -------------------------------------------------------------------- arguments per module


@on_ranks(2)
def test_arguments_per_module(rank: Rank) -> None:
    """A dict overrides the root's arguments for a module; what it does not mention comes from the root."""
    model = built(Net)
    first, second = model.blocks
    precision = MixedPrecision(param_dtype=BF16, cast_forward_inputs=True)
    full = MixedPrecision(param_dtype=F32, cast_forward_inputs=True)
    chosen: dict[int, Any] = {
        id(first): {"sharding_strategy": S.NO_SHARD, "use_orig_params": True, "mixed_precision": full},
        id(second): {"cpu_offload": CPUOffload(offload_params=True), "backward_prefetch": None},
        id(model.head): True,
    }
    wrapped = FullyShardedDataParallel(
        model,
        sharding_strategy=S.SHARD_GRAD_OP,
        mixed_precision=precision,
        backward_prefetch=BackwardPrefetch.BACKWARD_POST,
        auto_wrap_policy=chosen_by(chosen),
    )
    one, two, head = wrapped.blocks[0], wrapped.blocks[1], wrapped.head
    assert [u.sharding_strategy for u in (wrapped, one, two, head)] == [S.SHARD_GRAD_OP, S.NO_SHARD] + [
        S.SHARD_GRAD_OP
    ] * 2
    assert [u.mixed_precision for u in (wrapped, one, two, head)] == [precision, full, precision, precision]
    assert not any(isinstance(p, FlatParameter) for p in one.parameters()) and first.up.weight.shape == (7, 6)
    assert all(isinstance(p, FlatParameter) for u in (two, head) for p in u.parameters())
    with record() as seen:
        wrapped(batch(rank.rank, 0)).float().sum().backward()
    dtypes = {unit: {c.dtype for c in seen if c.unit == unit} for unit in ("blocks.0", "blocks.1", "head")}
    assert dtypes == {"blocks.0": {F32}, "blocks.1": {BF16}, "head": {BF16}}
    assert len({c.kind for c in seen if c.unit == "blocks.0"}) == 1  # an all-reduce, or a reduction to it


# -------------------------------------------------------------------- by hand and by policy


@on_ranks(2)
@MODES
def test_manual_and_policy(rank: Rank, use_orig_params: bool) -> None:
    """What was wrapped by hand is left alone by a policy, with all below it, as are units of ``fully_shard``."""
    model = built(Net, 3)
    reference = copy.deepcopy(model)
    by_hand = FullyShardedDataParallel(
        model.blocks[1], sharding_strategy=S.SHARD_GRAD_OP, use_orig_params=not use_orig_params
    )
    model.blocks[1] = by_hand
    wrapped = FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block, nn.LayerNorm}), use_orig_params=use_orig_params
    )
    assert units_of(wrapped) == ["", "blocks.0", "blocks.0.norm", "blocks.1", "blocks.2", "blocks.2.norm"]
    assert wrapped.blocks[1] is by_hand and by_hand.sharding_strategy is S.SHARD_GRAD_OP
    assert_trains_alike(wrapped, reference, rank, microbatches=2)
    model = built(Net)
    fully_shard(model.blocks[0], mesh=rank.mesh)
    assert units_of(FullyShardedDataParallel(model, auto_wrap_policy=BLOCKS)) == ["", "blocks.1"]


@on_ranks(2)
@MODES
def test_enable_wrap(rank: Rank, use_orig_params: bool) -> None:
    """Wrapping annotated in the model's own code, with overrides."""

    class Annotated(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(wrap(Block(), sharding_strategy=S.NO_SHARD) for _ in range(2))
            self.head = wrap(self.head)

    reference = built(Annotated)
    assert not any(isinstance(m, FullyShardedDataParallel) for m in reference.modules())
    with enable_wrap(wrapper_cls=FullyShardedDataParallel, use_orig_params=use_orig_params):
        model = wrap(built(Annotated))
    assert units_of(model) == ["", "blocks.0", "blocks.1", "head"]
    assert [u.sharding_strategy for u in FullyShardedDataParallel.fsdp_modules(model)] == [
        S.FULL_SHARD, S.NO_SHARD, S.NO_SHARD, S.FULL_SHARD
    ]  # fmt: skip
    assert_trains_alike(model, reference, rank)


# -------------------------------------------------------------------- frozen


@on_ranks(2)
@MODES
def test_frozen_beside_trainable(rank: Rank, use_orig_params: bool) -> None:
    """Units that mix both train, with a warning that lists the frozen parameters; ignored ones are not.

    Frozen units amid trainable ones are nothing to warn of, and are never reduced.
    """
    model = built(Net)
    for frozen in (model.blocks[0].up.weight, model.blocks[1].norm.bias, *model.head.parameters()):
        frozen.requires_grad_(False)
    reference = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="frozen") as caught:
        wrapped = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block, nn.Linear}),
            use_orig_params=use_orig_params,
            ignored_states=[model.blocks[0].up.weight],
        )
    messages = [str(w.message) for w in caught]
    assert len(messages) == 1 and "blocks.1.norm.bias" in messages[0] and "head" not in messages[0]
    assert_trains_alike(wrapped, reference, rank)
    model = built(Net)
    model.blocks[0].requires_grad_(False)
    reference = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped = FullyShardedDataParallel(model, auto_wrap_policy=BLOCKS, use_orig_params=use_orig_params)
    with record() as seen:
        mean_square(wrapped, batch(rank.rank, 0)).backward()
    assert len({c.kind for c in seen if c.unit == "blocks.0"}) == 1  # gathered, never reduced
    wrapped.zero_grad()
    assert_trains_alike(wrapped, reference, rank)
    assert_states_alike(wrapped.blocks[0], reference.blocks[0])


def test_snapshot_sees_changes() -> None:
    """What the tests of failing wraps rely on."""
    model = built(Net)
    before = Snapshot.of(model)
    before.assert_unchanged(model)
    for change in (
        lambda: model.first.weight.data.add_(1),
        lambda: setattr(model.head, "bias", nn.Parameter(model.head.bias.detach().clone())),
        lambda: model.blocks.append(Block()),
        lambda: model.first.requires_grad_(False),
        lambda: model.first.__dict__.update(extra=1),
    ):
        saved = copy.deepcopy(model)
        changed = Snapshot.of(model)
        change()
        with pytest.raises(AssertionError):
            changed.assert_unchanged(model)
        assert saved is not model
