"""ShardedGradScaler: ranks skip steps, and change their scale, together."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from wrapped import local_part

from compare import assert_equal
from front_ends import FRONT_ENDS, STRATEGIES, FrontEnd, assert_same_values, build, sharded_with_reference
from fullshard import FullshardError, fully_shard
from fullshard.optim.grad_scaler import ShardedGradScaler
from pairwise import each_value
from ranks import Rank, on_ranks

INF = float("inf")


def make_scaler(**options: Any) -> ShardedGradScaler:
    return ShardedGradScaler(**{"device": here(), "init_scale": 8.0, "growth_interval": 2, **options})


def here() -> str:
    """The type of device that tensors of these tests are on."""
    return torch.empty(0).device.type


def parameter(*gradient: float, dtype: torch.dtype = torch.float32, of: float = 1.0) -> nn.Parameter:
    """Ones of ``dtype`` with this gradient; none without numbers."""
    made = nn.Parameter(torch.full((max(len(gradient), 1),), of, dtype=dtype))
    if gradient:
        made.grad = torch.tensor(gradient, dtype=dtype)
    return made


def scaled(scaler: ShardedGradScaler, parameters: Sequence[nn.Parameter], lr: float = 1.0) -> torch.optim.SGD:
    """An optimizer of ``parameters``, with the scale made as by a loss."""
    scaler.scale(torch.ones(()))
    return torch.optim.SGD(parameters, lr=lr)


def test_signature() -> None:
    """Arguments have the names, order and defaults of torch's."""
    theirs = importlib.import_module("torch.distributed.fsdp.sharded_grad_scaler").ShardedGradScaler
    ours, torchs = (inspect.signature(each).parameters.values() for each in (ShardedGradScaler, theirs))
    assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in torchs]


@on_ranks(2)
@pytest.mark.parametrize("bad", [INF, -INF, float("nan")])
def test_overflow_on_one_rank_is_everybodys(rank: Rank, bad: float) -> None:
    """A rank with an infinite gradient has all skip the step, return None, and back off; then all step and grow."""
    scaler = make_scaler()
    weight = parameter(16.0, bad if rank.rank == 1 else 8.0)
    optimizer = scaled(scaler, [weight])
    assert scaler.step(optimizer) is None
    scaler.update()
    assert_equal(weight.detach(), torch.ones(2), "weights after a skipped step")
    assert scaler.get_scale() == 4.0
    for fresh in (make_scaler(), torch.amp.GradScaler(here())):  # scale and growth go to others, also to PyTorch's
        fresh.load_state_dict(scaler.state_dict())
        assert fresh.get_scale() == 4.0 and fresh.get_growth_interval() == 2
    for steps in (1, 2):
        weight.grad = torch.tensor([4.0, 8.0])
        scaler.step(optimizer)
        scaler.update()
        assert_equal(weight.detach(), torch.tensor([1.0 - steps, 1.0 - 2 * steps]), "weights")
    assert scaler.get_scale() == 8.0, "two steps in a row make the scale grow"


@on_ranks(2)
def test_unscaled_gradients(rank: Rank) -> None:
    """unscale_ divides gradients of every dtype in place, empty ones included, whatever they are stored in."""
    model = fully_shard(build(lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1))), mesh=rank.mesh)
    scaler = make_scaler()
    plain = {dtype: parameter(16.0, dtype=dtype) for dtype in (torch.float64, torch.float16, torch.bfloat16)}
    pairs = nn.Parameter(torch.ones(1, dtype=torch.complex64))
    pairs.grad = torch.tensor([16 - 8j])
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    before = {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}
    assert any(p.to_local().numel() == 0 for p in model.parameters()) == (rank.rank == 1), "the bias of one element"
    optimizer = torch.optim.SGD([*model.parameters(), *plain.values(), pairs, parameter()])
    scaler.unscale_(optimizer)
    for name, p in model.named_parameters():
        assert_equal(p.grad.full_tensor(), before[name] / 8, name)
    for dtype, p in plain.items():
        assert_equal(p.grad, torch.tensor([2.0], dtype=dtype), str(dtype))
    assert_equal(pairs.grad, torch.tensor([2 - 1j]), "complex")


@on_ranks(2)
def test_ranks_without_gradients(rank: Rank) -> None:
    """A rank without gradients steps, or skips, with the others; if none has any, all fail as the base class does."""
    for bad, scale in ((1.0, 8.0), (INF, 4.0)):
        scaler = make_scaler()
        weight = parameter(*([bad] if rank.rank == 0 else []))
        optimizer = scaled(scaler, [weight])
        optimizer.register_step_post_hook(lambda *_, taken=(steps := []): taken.append(1))
        scaler.step(optimizer)
        scaler.update()
        assert (len(steps), scaler.get_scale()) == (int(bad == 1.0), scale)
    scaler = make_scaler()
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.step(scaled(scaler, [parameter()]))


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sparse_gradients(rank: Rank, dtype: torch.dtype) -> None:
    """Values of one index that overflow float16 only once they are added up are found on all ranks."""
    scaler = make_scaler()
    weight = nn.Parameter(torch.ones(3, dtype=dtype))
    value = 60000.0 if rank.rank == 1 else 8.0
    weight.grad = torch.sparse_coo_tensor([[1, 1]], [value, value], (3,), dtype=dtype, check_invariants=True)
    optimizer = scaled(scaler, [weight], lr=0.25)
    scaler.unscale_(optimizer)
    assert_equal(weight.grad.to_dense()[1].isfinite(), torch.tensor(dtype is torch.float32 or rank.rank == 0), "sum")
    if rank.rank == 0:
        assert_equal(weight.grad.to_dense(), torch.tensor([0.0, 2.0, 0.0], dtype=dtype), "unscaled")
    scaler.step(optimizer)
    scaler.update()
    skipped = dtype is torch.float16
    assert scaler.get_scale() == (4.0 if skipped else 8.0)
    assert bool((weight == 1).all()) == skipped


@on_ranks(2)
def test_several_optimizers(rank: Rank) -> None:
    """Each optimizer skips for its own gradients only, with one collective; a disabled scaler has none."""
    scaler, calls, usual = make_scaler(), [], dist.all_reduce
    bad, good = parameter(INF if rank.rank == 0 else 8.0), parameter(8.0)
    more = [parameter(8.0, dtype=dtype) for dtype in (torch.float64, torch.float16)][rank.rank :]
    optimizers = [scaled(scaler, weights) for weights in ([bad], [good, *more])]  # kept: the base class knows their ids
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda *a, **k: (calls.append(1), usual(*a, **k))[1])
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        assert (bad.item(), good.item(), scaler.get_scale()) == (1.0, 0.0, 4.0)
        disabled, loss, weight = make_scaler(enabled=False), torch.ones(()), parameter(-INF if rank.rank == 0 else 1.0)
        assert disabled.scale(loss) is loss
        if rank.rank == 0:
            disabled.step(torch.optim.SGD([weight], lr=1.0))
            assert weight.item() == INF
        disabled.update()
    assert len(calls) == 2


@on_ranks(4)
def test_process_group(rank: Rank) -> None:
    """Ranks agree over the group that was passed, and no further."""
    mesh = rank.make_mesh(2, 2, names=("replicate", "shard"))
    scaler = make_scaler(process_group=mesh.get_group("shard"))
    scaler.step(scaled(scaler, [parameter(INF if rank.rank == 3 else 8.0)]))
    scaler.update()
    assert scaler.get_scale() == (4.0 if rank.rank >= 2 else 8.0)


def test_no_process_group() -> None:
    """Without a process group the first use says what to do; what is no group is refused by the constructor."""
    assert not dist.is_initialized()
    scaler = make_scaler()
    optimizer = scaled(scaler, [parameter(8.0)])
    with pytest.raises(FullshardError, match="init_process_group"):
        scaler.unscale_(optimizer)
    for wrong in ("world", 3, object()):
        with pytest.raises(TypeError, match=f"process_group.*{type(wrong).__name__}.*get_group"):
            ShardedGradScaler("cpu", process_group=wrong)  # type: ignore[arg-type]


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, strategy=STRATEGIES, options=["plain", "fused", "foreach"], unscale=[False, True])
def test_models_train_as_unsharded(rank: Rank, front_end: FrontEnd, strategy: str, options: str, unscale: bool) -> None:
    """With one overflowing step among five, in one rank's part alone, weights and scale are those of a plain scaler."""
    plain_model = build(lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(3, 1)))
    model, reference = sharded_with_reference(front_end, rank, plain_model, strategy=strategy)
    scaler, plain = make_scaler(), torch.amp.GradScaler(here(), init_scale=8.0, growth_interval=2)
    more = {} if options == "plain" else {options: True}
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1, **more) for m in (model, reference)]
    for step in range(5):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        for module, optimizer, own in zip((model, reference), optimizers, (scaler, plain), strict=True):
            optimizer.zero_grad()
            own.scale(module(x).square().mean()).backward()
            if step == 2 and (module is reference or rank.rank == 1):
                gradients = (p.grad for p in module.parameters() if p.grad is not None)
                local = next(g for g in (local_part(each) for each in gradients) if g.numel())
                local.view(-1)[0] = INF
            if unscale:
                own.unscale_(optimizer)
            own.step(optimizer)
            own.update()
        assert scaler.get_scale() == plain.get_scale() == [8, 16, 8, 8, 16][step]
    assert_same_values(model, reference, rtol=1e-5, atol=1e-6)
