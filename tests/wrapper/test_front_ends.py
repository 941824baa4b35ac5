"""Both front ends give the same losses and weights, bit by bit: they are one engine.

Not bit by bit: the norm of ``clip_grad_norm_`` (flat and per-parameter shards add up squares in other orders), and
optimizers whose vectorized and scalar steps round differently (Adam); these are compared within tolerances.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from earlier_front_ends import (
    AFTER_ADAM,
    CLOSE,
    EXACT_RATE,
    SAME_STRATEGY,
    Block,
    Language,
    LossOf,
    Mlp,
    Stack,
    assert_at_rest,
    assert_same_values,
    build,
    full_values,
    replicated,
    sharded,
    square_loss,
    token_loss,
    train,
    train_reference,
    wrapped,
)
from torch import nn

from compare import assert_close, assert_equal
from fullshard import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from fullshard.activation_checkpoint import apply_activation_checkpointing
from fullshard.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy
from ranks import Rank, on_ranks


class Odd(nn.Module):
    """All kinds of parameters at once: 0-D, integer, transposed, channels_last, empty, unused, of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.table = nn.Parameter(torch.arange(6), requires_grad=False)
        self.transposed = nn.Parameter(torch.randn(5, 6).t())
        self.conv = nn.Conv2d(3, 4, (2, 1)).to(memory_format=torch.channels_last)
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.unused = nn.Linear(3, 3)
        self.wide = nn.Linear(5, 3).double()
        self.low = nn.Linear(3, 3).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x[:, self.table] @ self.transposed * self.scale)
        x = self.wide(x.double())
        x = self.conv(x.float()[:, :, None, None].expand(-1, -1, 2, 1)).flatten(1)[:, :3]
        return self.low(x.bfloat16()).float()


class Frozen(Stack):
    """Frozen parameters beside trainable ones, a frozen block, a frozen root parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].up.weight.requires_grad_(False)
        self.blocks[1].requires_grad_(False)
        self.first.requires_grad_(False)


class Branch(nn.Module):
    """Which of two layers computes depends on the data; a third never does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(6, 6) for _ in range(3)]) for _ in range(1))
        self.last = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers[0][int(x[0, 0] > 0)](x))


class Normalized(nn.Module):
    """Batch norm: buffers that forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], LossOf]]] = {
    "uneven": (lambda: Mlp(6, 7, 15, 16, 17), square_loss),
    "tiny": (lambda: Mlp(6, 3, 5, 1, 2), square_loss),
    "large": (lambda: Mlp(6, 257, 256, 3), square_loss),
    "stack": (Stack, square_loss),
    "frozen": (Frozen, square_loss),
    "tied": (Language, token_loss),
    "odd": (Odd, square_loss),
    "buffers": (Normalized, square_loss),
}


def assert_both_equal(ours: tuple[nn.Module, torch.Tensor], other: tuple[nn.Module, torch.Tensor]) -> None:
    """Require losses and weights of the two front ends to be the same in every bit."""
    assert_equal(ours[1], other[1], "losses")
    assert_same_values(ours[0], other[0])
    for name, buffer in other[0].named_buffers():
        assert_equal(dict(ours[0].module.named_buffers())[_below(ours[0], name)], buffer, name)
    assert_at_rest(ours[0])


def _below(wrapper: nn.Module, name: str) -> str:
    """The name below the wrapper of what is called ``name`` without wrappers."""
    names = {n.replace("_fsdp_wrapped_module.", ""): n for n, _ in wrapper.module.named_buffers()}
    return names[name]


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_same_losses(rank: Rank, case: str, use_orig_params: bool) -> None:
    """Ten steps of any model: the losses of both front ends agree bitwise, and with unsharded training closely."""
    make, loss_at = CASES[case]
    model = build(make)
    flat = wrapped(model, rank, use_orig_params=use_orig_params)
    rows = sharded(model, rank)
    losses = train(flat, rank, loss_at)
    assert_both_equal((flat, losses), (rows, train(rows, rank, loss_at)))
    if case == "buffers":
        return  # the reference would see the batches of all ranks
    tolerance = {"rtol": 5e-2, "atol": 5e-3} if case == "odd" else CLOSE  # bfloat16 weights
    assert_close(losses, train_reference(model, rank, loss_at), "losses", **tolerance)
    assert_same_values(flat, model, **tolerance)


@on_ranks(2, 4)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", list(ShardingStrategy), ids=lambda s: s.name)
def test_same_losses_with_each_strategy(rank: Rank, strategy: ShardingStrategy, use_orig_params: bool) -> None:
    """Each strategy equals what ``fully_shard`` (NO_SHARD: ``replicate``) calls the same."""
    model = build(Language)
    mesh = rank.make_mesh(2, rank.world_size // 2) if strategy.hybrid else rank.mesh
    flat = wrapped(model, rank, sharding_strategy=strategy, device_mesh=mesh, use_orig_params=use_orig_params)
    if strategy is ShardingStrategy.NO_SHARD:
        rows = replicated(model, rank)
    else:
        rows = sharded(model, rank, mesh=mesh, **SAME_STRATEGY[strategy])
    assert_both_equal((flat, train(flat, rank, token_loss)), (rows, train(rows, rank, token_loss)))


PRECISIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bf16": ({"param_dtype": torch.bfloat16}, {"param_dtype": torch.bfloat16}),
    "bf16, reduced in fp32": (
        {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
        {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    ),
    "fp32, reduced in bf16": ({"reduce_dtype": torch.bfloat16}, {"reduce_dtype": torch.bfloat16}),
    "fp64": ({"param_dtype": torch.float64}, {"param_dtype": torch.float64}),
}


@on_ranks(2, 4)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_same_losses_in_mixed_precision(rank: Rank, precision: str, use_orig_params: bool) -> None:
    """The same dtypes for computation and reduction give the same bits."""
    flat_options, row_options = PRECISIONS[precision]
    model = build(Stack)
    flat = wrapped(model, rank, mixed_precision=MixedPrecision(**flat_options), use_orig_params=use_orig_params)
    rows = sharded(model, rank, mp_policy=MixedPrecisionPolicy(**row_options))
    assert_both_equal((flat, train(flat, rank, square_loss)), (rows, train(rows, rank, square_loss)))
    assert {p.dtype for p in flat.parameters()} == {torch.float32}


def accumulate(model: nn.Module, rank: Rank, without_sync: Callable[[], Any], microbatches: int = 3) -> torch.Tensor:
    """SGD on several microbatches per step; the losses of all of them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=EXACT_RATE)
    losses = []
    for step in range(4):
        for micro in range(microbatches):
            with without_sync() if micro + 1 < microbatches else contextlib.nullcontext():
                loss = token_loss(10 * step + micro)(model, rank.rank)
                loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses)


@on_ranks(2, 4)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("sync", ["no_sync", "always"])
@pytest.mark.parametrize("precision", [None, torch.bfloat16], ids=str)
def test_same_losses_with_accumulation(rank: Rank, sync: str, use_orig_params: bool, precision: Any) -> None:
    """Three microbatches a step, reduced once or each time: the same bits from both, the reference's closely."""
    model = build(Language)
    mixed = None if precision is None else MixedPrecision(precision, torch.float32)
    flat = wrapped(model, rank, mixed_precision=mixed, use_orig_params=use_orig_params)
    policy = MixedPrecisionPolicy() if precision is None else MixedPrecisionPolicy(precision, torch.float32)
    rows = sharded(model, rank, mp_policy=policy)

    @contextlib.contextmanager
    def rows_without_sync() -> Any:
        rows.set_requires_gradient_sync(False)
        yield
        rows.set_requires_gradient_sync(True)

    always = sync == "always"
    flat_losses = accumulate(flat, rank, contextlib.nullcontext if always else flat.no_sync)
    row_losses = accumulate(rows, rank, contextlib.nullcontext if always else rows_without_sync)
    assert_both_equal((flat, flat_losses), (rows, row_losses))
    if precision is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=EXACT_RATE)
        for step in range(4):
            for micro in range(3):
                for other in range(rank.world_size):
                    (token_loss(10 * step + micro)(model, other) / rank.world_size).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same_values(flat, model, **CLOSE)


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("what", [{nn.Linear}, {Block}], ids=["layers", "blocks"])
def test_same_losses_with_checkpointed_activations(rank: Rank, what: set[type], use_orig_params: bool) -> None:
    """Recomputed layers or blocks: both front ends, and the wrapper without recomputation, agree bitwise."""
    model = build(Language)
    plain = wrapped(model, rank, use_orig_params=use_orig_params)
    flat, rows = wrapped(model, rank, use_orig_params=use_orig_params), sharded(model, rank)
    for one in (flat, rows):
        apply_activation_checkpointing(one, check_fn=lambda m: type(m) in what)
    losses = [train(one, rank, token_loss) for one in (plain, flat, rows)]
    assert_equal(losses[1], losses[0], "losses with recomputation")
    assert_equal(losses[1], losses[2], "losses of both front ends")
    assert_same_values(flat, plain)


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("policy", ["classes", "size", "custom"])
def test_same_losses_with_the_same_policy(rank: Rank, policy: str, use_orig_params: bool) -> None:
    """One policy serves both front ends."""
    policies: dict[str, Any] = {
        "classes": ModuleWrapPolicy({Block, nn.Linear, nn.Embedding}),
        "size": lambda **asked: size_based_auto_wrap_policy(**asked, min_num_params=60),
        "custom": CustomPolicy(lambda m: isinstance(m, (Block, nn.LayerNorm))),
    }
    model = build(Language)
    flat = wrapped(model, rank, auto_wrap_policy=policies[policy], use_orig_params=use_orig_params)
    rows = fully_shard(copy.deepcopy(model), mesh=rank.mesh, policy=policies[policy])
    assert len(FullyShardedDataParallel.fsdp_modules(flat)) > 2
    assert_both_equal((flat, train(flat, rank, token_loss)), (rows, train(rows, rank, token_loss)))


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("parameters", [True, False])
def test_same_losses_with_offload(rank: Rank, parameters: bool, use_orig_params: bool) -> None:
    """Offloading, of parameters or of gradients alone, changes no bit; nor does accumulation without no_sync."""
    model = build(Language)
    offload = CPUOffload(offload_params=True) if parameters else CPUOffload(offload_params=False)
    flat = wrapped(model, rank, cpu_offload=offload, use_orig_params=use_orig_params)
    rows = sharded(model, rank, offload_policy=CPUOffloadPolicy(pin_memory=False))
    assert_both_equal((flat, train(flat, rank, token_loss, 4)), (rows, train(rows, rank, token_loss, 4)))
    losses = [accumulate(one, rank, contextlib.nullcontext) for one in (flat, rows)]
    assert_both_equal((flat, losses[0]), (rows, losses[1]))


@on_ranks(2, 4)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_same_losses_with_clipping_and_adam(rank: Rank, norm_type: float, use_orig_params: bool) -> None:
    """Adam with clipped gradients: three ways to the same losses and norms, within rounding."""
    model = build(Mlp, 6, 8, 4, 8)  # no rank without rows: PyTorch has no infinity norm of nothing
    flat, rows = wrapped(model, rank, use_orig_params=use_orig_params), sharded(model, rank)
    results = []
    for one in (flat, rows, model):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
        told = []
        for step in range(6):
            if one is model:
                for other in range(rank.world_size):
                    (square_loss(step)(one, other) / rank.world_size).backward()
            else:
                square_loss(step)(one, rank.rank).backward()
            if one is flat:
                norm = one.clip_grad_norm_(0.05, norm_type)
            else:
                norm = torch.nn.utils.clip_grad_norm_(one.parameters(), 0.05, norm_type)
            norm = norm.full_tensor() if one is rows else norm
            told += [norm.detach()]
            optimizer.step()
            optimizer.zero_grad()
        results.append((torch.stack(told), full_values(one)))
    for norms, values in results[:2]:
        assert_close(norms, results[2][0], "norms", **AFTER_ADAM)
        for name, value in results[2][1].items():
            assert_close(values[name], value, name, **AFTER_ADAM)


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_branches_that_differ_between_ranks(rank: Rank, use_orig_params: bool) -> None:
    """Inside one unit, ranks may use different layers: unused ones count as zero, those that none uses stay put."""
    model = build(Branch)
    flat = wrapped(model, rank, auto_wrap_policy=None, use_orig_params=use_orig_params)
    rows = fully_shard(copy.deepcopy(model), mesh=rank.mesh)
    assert_both_equal((flat, train(flat, rank, square_loss)), (rows, train(rows, rank, square_loss)))
    train_reference(model, rank, square_loss)
    assert_same_values(flat, model, **CLOSE)
