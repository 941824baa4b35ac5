"""Parameters of every shape, stride and dtype, cut on any dim: they train as they would unsharded."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from compare import assert_equal
from front_ends import assert_same_gradients, assert_trains_alike, build
from fullshard import MixedPrecisionPolicy, fully_shard
from models import batch, square_loss
from ranks import Rank, on_ranks

Choose = Callable[[nn.Parameter], Shard | None]


class Kinds(nn.Module):
    """Parameters of zero to four dims, in any order in memory, empty, of integers, and of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.tall = nn.Parameter(torch.randn(10, 7))
        self.transposed = nn.Parameter(torch.randn(5, 7).t())  # (7, 5), strides (1, 7)
        self.kernel = nn.Conv2d(1, 3, 2)  # weight (3, 1, 2, 2)
        self.experts = nn.Parameter(torch.randn(3, 8, 6) / 3)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.order = nn.Parameter(torch.tensor([4, 2, 0, 1, 3, 5]), requires_grad=False)
        self.permuted = nn.Parameter(torch.randn(6, 5, 3).permute(1, 2, 0))
        self.in_order = nn.Parameter(torch.randn(5, 6, 3).transpose(1, 2))  # rows, but not the other dims
        self.no_rows, self.no_columns = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.empty(3, 0))
        self.wide = nn.Linear(6, 3, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x)) @ self.tall @ self.transposed / 5
        x = self.kernel(x[:, None, None].expand(-1, 1, 2, 5)).flatten(1)[:, :8]
        x = torch.tanh(torch.einsum("bi,eij->bej", x, self.experts)).sum(1) * self.scale
        x = x[:, self.order] + torch.einsum("bi,jki->b", x, self.permuted + self.in_order)[:, None] / 10
        return self.wide((x + self.no_rows.sum() + self.no_columns.sum()).to(self.wide.weight.dtype))


class Lstm(nn.LSTM):
    """Keeps a second list of its weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.unsqueeze(0))[0]


def channels_last() -> nn.Module:
    layers = nn.Sequential(nn.Linear(6, 48), nn.Unflatten(1, (3, 4, 4)), nn.Conv2d(3, 5, 3), nn.Conv2d(5, 2, 2))
    return layers.to(memory_format=torch.channels_last)


def wide(*rows: int) -> nn.Module:
    """Layers of which one has an all-gather of its own."""
    return nn.Sequential(nn.Linear(6, 256), nn.ReLU(), nn.Linear(256, rows[0]), nn.Linear(rows[0], 3))


CHOICES: dict[str, Choose] = {
    "last": lambda p: Shard(-1) if p.ndim else None,
    "middle": lambda p: Shard(p.ndim // 2) if p.ndim > 1 else None,
    "of size 1": lambda p: Shard(1) if p.ndim == 4 else None,  # all ranks but one are empty
    "mixed": lambda p: {3: Shard(-2), 2: Shard(1), 1: Shard(-1)}.get(p.ndim),
}
CASES: dict[str, tuple[Callable[[], nn.Module], Choose | None]] = {
    "rows": (Kinds, None),
    "channels_last": (channels_last, None),
    "direct": (lambda: wide(512), None),
    "direct, uneven": (lambda: wide(301), None),
    "direct, cut on columns": (lambda: wide(512), CHOICES["last"]),
    "LSTM": (lambda: Lstm(6, 5, num_layers=2, bidirectional=True), None),
    "LSTM with projections": (lambda: Lstm(6, 5, proj_size=3), None),
    **{f"dim: {name}": (Kinds, choose) for name, choose in CHOICES.items()},
}


@on_ranks(1, 3)
@pytest.mark.parametrize("name", CASES)
def test_parameters_of_every_kind(rank: Rank, name: str) -> None:
    """Each rank holds its chunk of the dim; unsharded parameters have the old values and strides, and train alike."""
    make, choose = CASES[name]
    reference = build(make)
    model = fully_shard(copy.deepcopy(reference), mesh=rank.mesh, shard_placement_fn=choose)
    for (fqn, ours), whole in zip(model.named_parameters(), reference.parameters(), strict=True):
        placement = (choose(whole) if choose else None) or Shard(0)
        dim, whole = placement.dim % max(whole.ndim, 1), whole.detach()
        assert isinstance(ours, DTensor) and (ours.shape, ours.stride()) == (whole.shape, whole.stride()), fqn
        assert ours.requires_grad == reference.get_parameter(fqn).requires_grad
        assert ours.placements == ((Shard(dim),) if whole.ndim else (Replicate(),)), fqn
        assert_equal(ours.full_tensor().detach(), whole, fqn)
        local = ours.to_local().detach()
        chunks = whole.chunk(rank.world_size, dim) if whole.ndim and whole.shape[dim] else (whole,) * 3
        if rank.rank < len(chunks):
            assert_equal(local.contiguous(), chunks[rank.rank].contiguous(), f"local part of {fqn}")
        else:
            assert local.shape[dim] == 0 and local.numel() == 0, fqn
    model.unshard()
    for (fqn, full), original in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert type(full) is nn.Parameter and full.stride() == original.stride(), fqn
        assert_equal(full.detach(), original.detach(), fqn)
    model.reshard()
    assert_trains_alike(model, reference, rank, steps=2)
    square_loss()(model, rank.rank).backward()
    for fqn, p in model.named_parameters():
        if p.requires_grad:
            assert isinstance(p.grad, DTensor) and p.grad.placements == p.placements and p.grad.dtype == p.dtype, fqn
            local, gradient = p.to_local(), p.grad.to_local()
            assert (gradient.shape, gradient.stride()) == (local.shape, local.stride()), fqn


class Tagged(nn.Linear):
    """Reads an attribute of its own parameter in forward."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.weight.tag = "decay"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.weight.tag == "decay"
        return super().forward(x)


@on_ranks(2)
def test_attributes_of_parameters_survive_sharding(rank: Rank) -> None:
    """What users hang on a parameter is on the sharded and the unsharded one, and on no other; dtype moves keep it."""
    model = fully_shard(Tagged(), mesh=rank.mesh)
    assert model.weight.tag == "decay"
    assert not hasattr(model.bias, "tag")
    model(torch.ones(2, 4)).sum().backward()
    model.to(torch.float64)
    assert model.weight.dtype == torch.float64 and model.weight.tag == "decay"


@on_ranks(2)
def test_state_dict_of_other_placements_is_refused(rank: Rank) -> None:
    """Loaded by assignment, the next forward names the placements and the remedy; the same placements are loaded."""
    model, other, rows = (
        fully_shard(build(Kinds), mesh=rank.mesh, shard_placement_fn=CHOICES.get(choice))
        for choice in ("mixed", "mixed", "rows")
    )
    state = {
        name: value.detach() * (2 if value.is_floating_point() else 1) for name, value in model.state_dict().items()
    }
    for assign in (False, True):
        other.load_state_dict(state, assign=assign)
        assert [value.placements for value in other.state_dict().values()] == [p.placements for p in state.values()]
        assert_equal(
            {name: value.to_local() for name, value in other.state_dict().items()},
            {name: value.to_local() for name, value in state.items()},
            "loaded",
        )
        square_loss()(other, 0).backward()
    rows.load_state_dict(state, assign=True)
    with pytest.raises(ValueError, match=r"DTensor with placements \(Shard\(dim=1\),\).*redistribute it first"):
        square_loss()(rows, rank.rank)


@on_ranks(2)
def test_mixed_precision_and_accumulation(rank: Rank) -> None:
    """Odd dims with bf16 all-gathers and fp32 sums: bitwise the gradients of the same parameters cut on dim 0."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    choices = [None, CHOICES["mixed"], CHOICES["last"]]
    models = [fully_shard(build(Kinds), mesh=rank.mesh, mp_policy=policy, shard_placement_fn=each) for each in choices]
    for model in models:
        for step in range(3):
            model.set_requires_gradient_sync(step == 2)
            square_loss(step)(model, rank.rank).backward()
    for model in models[1:]:
        assert_same_gradients(model, models[0], rtol=0.0, atol=0.0)


@on_ranks(2)
def test_placement_function_is_called_once_per_parameter(rank: Rank) -> None:
    """The function sees every parameter of the call once, as it was: plain, and tied ones once only."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    fully_shard(model[1], mesh=rank.mesh)
    seen: list[nn.Parameter] = []
    fully_shard(model, mesh=rank.mesh, shard_placement_fn=seen.append)
    assert [tuple(p.shape) for p in seen] == [(4, 4), (4,), (4,)]
    assert not any(isinstance(p, DTensor) for p in seen)
    model(batch(0, 0, 2, 4)).sum().backward()
