"""Parameters of every shape, stride and dtype: they train as they would unsharded, and are cut as torch.chunk cuts."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from compare import assert_equal, assert_models_equal
from fullshard import fully_shard
from fullshard.engine.ownership import unit_of
from fullshard.layout import Route
from ranks import Rank, on_ranks

STEPS = 2
BATCH = 8  # rows per step, over all ranks


class Holder(nn.Module):
    """``linear(x)``, then what ``use`` makes of it with ``self.extra``."""

    def __init__(self, extra: nn.Parameter, use: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.extra = extra
        self.use = use
        self.strides_seen: list[tuple[int, ...]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.strides_seen.append(self.extra.stride())
        return self.use(self.linear(x), self.extra)


def matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight


def scale(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return x * factor


def add_row_sums(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return x + rows.sum()


def take_columns(x: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    return x[:, columns]


def contract(x: torch.Tensor, cube: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bi,jki->bjk", x, cube)


class Mixed(nn.Module):
    """Trainable parameters of two dtypes in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(6, 5)
        self.wide = nn.Linear(5, 7, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(self.narrow(x).relu().double())


def channels_last_conv() -> nn.Module:
    layers = nn.Sequential(nn.Unflatten(1, (3, 4, 4)), nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 2, 2))
    return layers.to(memory_format=torch.channels_last)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "0-D": lambda: Holder(nn.Parameter(torch.tensor(1.5)), scale),
    "uneven": lambda: nn.Linear(6, 7),
    "fewer rows than ranks": lambda: nn.Linear(6, 1),
    "three rows": lambda: nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 3)),
    "channels_last": channels_last_conv,
    "transposed": lambda: Holder(nn.Parameter(torch.randn(5, 6).t()), matmul),
    "transposed, uneven": lambda: Holder(nn.Parameter(torch.randn(7, 5).t()), add_row_sums),
    "permuted": lambda: Holder(nn.Parameter(torch.randn(6, 5, 3).permute(1, 2, 0)), contract),
    "rows in order, inner dims not": lambda: Holder(nn.Parameter(torch.randn(5, 6, 3).transpose(1, 2)), contract),
    "zero rows": lambda: Holder(nn.Parameter(torch.empty(0, 3)), add_row_sums),
    "zero columns": lambda: Holder(nn.Parameter(torch.empty(3, 0)), add_row_sums),
    "integer": lambda: Holder(nn.Parameter(torch.tensor([4, 0, 3, 3, 1]), requires_grad=False), take_columns),
    "two dtypes": Mixed,
    "direct": lambda: nn.Sequential(nn.Linear(6, 256), nn.ReLU(), nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 3)),
    "direct, uneven": lambda: nn.Sequential(nn.Linear(6, 256), nn.ReLU(), nn.Linear(256, 301), nn.Linear(301, 3)),
}


def make(name: str) -> nn.Module:
    torch.manual_seed(1)
    return MODULES[name]()


def batch_for(name: str, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(BATCH, 48 if name == "channels_last" else 6, generator=generator)


def own_rows(rank: Rank, batch: torch.Tensor) -> torch.Tensor:
    return batch.chunk(rank.world_size)[rank.rank]


def chunk_of(rank: Rank, full: torch.Tensor) -> torch.Tensor:
    """What ``torch.chunk`` gives this rank, which may be no rows."""
    pieces = full.chunk(rank.world_size) if full.shape[0] else ()
    return pieces[rank.rank] if rank.rank < len(pieces) else full[:0]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    trainable = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trainable, lr=0.1, momentum=0.9)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


@on_ranks(4)
@pytest.mark.parametrize("name", MODULES)
def test_trains_like_the_plain_module(rank: Rank, name: str) -> None:
    """After several steps parameters and gradients equal those of the plain module on the whole batch."""
    reference = make(name)
    model = fully_shard(copy.deepcopy(reference), mesh=rank.mesh)
    optimizers = sgd(model), sgd(reference)
    for index in range(STEPS):
        batch = batch_for(name, index)
        step(model, optimizers[0], own_rows(rank, batch))
        step(reference, optimizers[1], batch)
    assert_models_equal(model, reference, grads=True, rtol=2e-5, atol=1e-6)


@on_ranks(1, 4)
def test_shards_and_unsharded_parameters(rank: Rank) -> None:
    """Every rank holds its piece of ``torch.chunk``, no rows if there is none; 0-D parameters are replicated.

    What forward sees has the values, the type and the strides that the parameter had before sharding. A gradient is a
    DTensor with the parameter's placements, and its local tensor has the shard's strides.
    """
    for name in MODULES:
        reference = make(name)
        model = fully_shard(copy.deepcopy(reference), mesh=rank.mesh)
        for (fqn, sharded), full in zip(model.named_parameters(), reference.parameters(), strict=True):
            what, full = f"{name}: {fqn}", full.detach()
            assert isinstance(sharded, DTensor)
            assert sharded.shape == full.shape and sharded.requires_grad == reference.get_parameter(fqn).requires_grad
            assert sharded.placements == ((Shard(0),) if full.ndim else (Replicate(),))
            assert_equal(sharded.to_local().detach(), chunk_of(rank, full) if full.ndim else full, what)
            assert_equal(sharded.full_tensor().detach(), full, what)
        model.unshard()
        for (fqn, full), original in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert type(full) is nn.Parameter
            assert full.stride() == original.stride(), (name, fqn)
            assert_equal(full.detach(), original.detach(), f"{name}: {fqn}")
        model.reshard()
        model(own_rows(rank, batch_for(name, 0))).square().mean().backward()
        if isinstance(model, Holder):
            assert model.strides_seen == [reference.extra.stride()]
        for fqn, p in model.named_parameters():
            if p.requires_grad:
                assert isinstance(p.grad, DTensor), fqn
                assert p.grad.placements == p.placements and p.grad.dtype == p.dtype, fqn
                assert p.grad.to_local().shape == p.to_local().shape, fqn
                assert p.grad.to_local().stride() == p.to_local().stride(), fqn


@on_ranks(2)
def test_expanded_parameter_becomes_a_contiguous_one(rank: Rank) -> None:
    """A parameter whose rows share memory is sharded as if it had been contiguous."""
    row = torch.arange(6.0)
    model = fully_shard(Holder(nn.Parameter(row.expand(6, 6)), matmul), mesh=rank.mesh)
    reference = Holder(nn.Parameter(row.repeat(6, 1)), matmul)
    reference.linear.load_state_dict({k: v.full_tensor() for k, v in model.linear.state_dict().items()})
    optimizers = sgd(model), sgd(reference)
    for index in range(STEPS):
        batch = batch_for("", index) * 0.1
        step(model, optimizers[0], own_rows(rank, batch))
        step(reference, optimizers[1], batch)
    assert model.strides_seen[0] == (6, 1)
    assert_models_equal(model, reference, grads=True, rtol=2e-5, atol=1e-6)


@pytest.mark.cpu_only("from which size on parameters travel directly depends on the back end")
@on_ranks(2, 4)
def test_buckets(rank: Rank) -> None:
    """Each dtype has a bucket. A large weight has a collective of its own; biases and small ones share a message."""
    buckets = unit_of(fully_shard(Mixed(), mesh=rank.mesh)).buckets
    assert [b.shard_buffer.dtype for b in buckets] == [torch.float32, torch.float64]
    names = [[p.fqn for p in b.parameters] for b in buckets]
    assert names == [["narrow.weight", "narrow.bias"], ["wide.weight", "wide.bias"]]
    for name in ("direct", "direct, uneven"):
        (bucket,) = unit_of(fully_shard(make(name), mesh=rank.mesh)).buckets
        routes = {slot.parameter.fqn: slot.route for slot in bucket.layout.slots}
        assert routes.pop("2.weight") is Route.DIRECT
        assert set(routes.values()) == {Route.PACKED}
        assert bucket.layout.slots[2].padded == (name == "direct, uneven")


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
@pytest.mark.parametrize("options", [{"num_layers": 2, "bidirectional": True}, {"proj_size": 3}], ids=str)
def test_lstm_trains(rank: Rank, options: dict[str, int]) -> None:
    """An LSTM, which keeps a second list of its weights, trains like the plain one."""
    torch.manual_seed(1)
    reference = nn.LSTM(6, 5, **options)
    model = fully_shard(copy.deepcopy(reference), mesh=rank.mesh)
    optimizers = sgd(model), sgd(reference)
    for index in range(STEPS):
        batch = batch_for("", index).unsqueeze(0).expand(3, -1, -1)
        for module, optimizer, inputs in (
            (model, optimizers[0], batch.chunk(rank.world_size, dim=1)[rank.rank]),
            (reference, optimizers[1], batch),
        ):
            optimizer.zero_grad()
            output, (hidden, _) = module(inputs)
            (output.square().mean() + hidden.square().mean()).backward()
            optimizer.step()
    assert_models_equal(model, reference, grads=True, rtol=2e-5, atol=1e-6)
    assert all(isinstance(p, DTensor) for p in model._flat_weights)


@on_ranks(4)
def test_module_without_parameters_is_a_unit(rank: Rank) -> None:
    """A module that has nothing to shard can be a unit: nothing is gathered, and gradients flow through."""
    model = fully_shard(nn.Sequential(fully_shard(nn.ReLU(), mesh=rank.mesh), nn.Linear(3, 2)), mesh=rank.mesh)
    x = torch.ones(2, 3, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None and model[1].weight.grad is not None
